"""The data types of idempotency keys, and of who acts.

A caller asks for a key, and the store answers with a **verdict**: :class:`Granted` with a **claim** to work under,
:class:`Replay` with the **outcome** of the work that was done, :class:`InFlight`, :class:`Mismatch` or
:class:`Unknown`. The store keeps one **record** for each key.

Fields that end in ``_us`` are microseconds since 1970 on the **store's** clock. The properties of the same name
without the ending return them as ``datetime`` in UTC.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Struct

from semel.codec import PLAIN, Codec
from semel.errors import InvalidRequest, OutcomeGone

R = TypeVar("R")

State: TypeAlias = Literal["claimed", "completed", "released"]
Kind: TypeAlias = str
"""The kind of an outcome.

========= ============================================================
value     what a function returned
error     an exception, kept because the policy keeps failures
seen      a message was handled; there is no value
response  an HTTP response
resolved  a value that an operator gave to ``resolve``
unstored  the work was done, but its value could not be stored
oversized an HTTP response that was too large to be stored
========= ============================================================
"""
OVERSIZED: Kind = "oversized"
Reason: TypeAlias = Literal["absent", "expired", "abandoned"]
"""Why a claim was granted: the key has no record, its record expired, or the lease of its owner ended."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def time_in(text: str) -> datetime:
    """The time in an ISO 8601 text. A bare number is refused: seconds, milliseconds, or a date without dashes?"""
    text = text.strip()
    if text.isdecimal():
        raise ValueError(f"{text} is a number")
    return datetime.fromisoformat(text)


def moment(us: int) -> datetime:
    """The ``datetime`` in UTC of the store's microseconds."""
    return _EPOCH + timedelta(microseconds=us)


Entrance: TypeAlias = Literal["api", "dashboard", "cli", "python"]
"""How an action came: over HTTP, from a page, by a command on the database, or from a program."""


class Actor(Struct, frozen=True, kw_only=True):
    """Who did something, and from where: what the audit log has of them."""

    user: str
    role: str = ""
    tenant: str = ""
    token: str = ""
    """The id of the token that they used."""
    address: str = ""
    """Of their machine: its network address, or its name if they are on the database."""
    entrance: Entrance = "python"


@cache
def actor_here(entrance: Entrance) -> Actor:
    """The user of this process, on this machine."""
    import getpass
    import socket

    try:
        user = getpass.getuser()
    except (OSError, KeyError, ImportError):  # the user has no name
        user = "unknown"
    return Actor(user=user, address=socket.gethostname(), entrance=entrance)


class Claim(Struct, frozen=True, gc=False):
    """The exclusive right to work on a key until its lease ends. ``fence`` grows with every claim of the key."""

    scope: str
    key: str
    fence: int
    attempt: str
    fingerprint: str
    lease: float
    lease_until_us: int
    expires_us: int

    @property
    def lease_until(self) -> datetime:
        """When the lease ends, as of the claim or its last renewal."""
        return moment(self.lease_until_us)

    @property
    def expires_at(self) -> datetime:
        """When the key expires."""
        return moment(self.expires_us)


class Response(Struct, frozen=True, array_like=True):
    """An HTTP response as an outcome. ``body`` is None if it was too large to be stored.

    A handler that completes its claim in its own transaction passes it to ``complete`` as the value.
    """

    status: int
    headers: list[tuple[bytes, bytes]] = []
    body: bytes | None = b""

    def __post_init__(self) -> None:
        if not all(type(name) is bytes and type(value) is bytes for name, value in self.headers):
            raise InvalidRequest('a response\'s headers are pairs of bytes, such as (b"content-type", b"text/plain")')

    @classmethod
    def json(cls, content: Any, status: int = 200) -> Response:
        """A response with the content as JSON."""
        return cls(status, [(b"content-type", b"application/json")], msgspec.json.encode(content))


_responses = msgspec.msgpack.Decoder(Response)
_packer = msgspec.msgpack.Encoder()


def packed(kind: Kind, value: Any, codec: Codec = PLAIN) -> tuple[Kind, bytes]:
    """The kind and the bytes of an outcome, as they are stored."""
    if type(value) is Response:
        return "response" if value.body is not None else OVERSIZED, _packer.encode(value)
    return kind, codec.encode(value)


class Outcome(Struct, frozen=True, gc=False):
    """The result of the work under a key, which every later caller gets."""

    kind: Kind
    data: bytes | None
    fence: int
    created_us: int
    completed_us: int
    expires_us: int

    @property
    def value(self) -> Any:
        """The recorded value. Each access decodes a new copy, so that no caller changes the value of another."""
        return self.read(PLAIN)

    def read(self, codec: Codec) -> Any:
        """The recorded value, with objects of the classes that the codec knows."""
        if self.data is None or self.gone:
            why = "was kept for a shorter time than its key (value_ttl)"
            if self.kind == OVERSIZED:
                why = "was too large to be kept"
            elif self.data is not None:
                why = f"could not be stored: {PLAIN.decode(self.data)}"
            raise OutcomeGone(
                f"this work was done at {self.completed_at:%Y-%m-%d %H:%M:%S} UTC and will not be done again, "
                f"but its result {why}"
            )
        return _responses.decode(self.data) if self.kind == "response" else codec.decode(self.data)

    @property
    def gone(self) -> bool:
        """True for a tombstone: the work was done, but its value is not stored, or not any more."""
        return self.data is None or self.kind in {"unstored", OVERSIZED}

    @property
    def completed_at(self) -> datetime:
        """When the outcome was recorded."""
        return moment(self.completed_us)

    @property
    def expires_at(self) -> datetime:
        """When the key expires."""
        return moment(self.expires_us)


class Granted(Struct, frozen=True):
    """The caller holds the key: do the work, then complete or release the claim."""

    claim: Claim
    reason: Reason = "absent"


class Replay(Struct, frozen=True):
    """The work was done before; this is its outcome."""

    outcome: Outcome


class InFlight(Struct, frozen=True):
    """Another caller holds the key.

    ``retry_after`` is the remaining lease of the owner, in seconds. It is positive; if the owner is dead, the key can
    be claimed after it. ``age`` is for how many seconds the owner has held the key; renewals do not reset it.
    """

    retry_after: float
    fence: int = 0
    age: float = 0.0


class Mismatch(Struct, frozen=True):
    """The key was used with other content; this is the recorded fingerprint."""

    fingerprint: str = ""


class Unknown(Struct, frozen=True):
    """The owner died, and it is not known whether its work happened. ``fence`` is that of the lost claim."""

    fence: int = 0
    lease_until_us: int = 0


Verdict: TypeAlias = Granted | Replay | InFlight | Mismatch | Unknown


class Record(Struct, gc=False):
    """What a store keeps for one key. ``now_us`` is the store's time when the record was read."""

    scope: str
    key: str
    fingerprint: str
    state: State
    fence: int
    attempt: str
    unknown: bool
    created_us: int
    lease_us: int
    lease_until_us: int
    expires_us: int
    completed_us: int = 0
    kind: Kind = ""
    data: bytes | None = None
    value_until_us: int | None = None
    now_us: int = 0

    @property
    def status(self) -> Literal["in_flight", "abandoned", "unknown", "completed"]:
        """The state at the time of reading."""
        if self.state == "completed":
            return "completed"
        if self.now_us < self.lease_until_us:
            return "in_flight"
        return "unknown" if self.unknown else "abandoned"

    @property
    def lease_left(self) -> float:
        """Seconds until the lease ends, at most its length; zero if it has ended or the work is done."""
        left = min(self.lease_until_us - self.now_us, self.lease_us)
        return max(0.0, left / 1e6) if self.state == "claimed" else 0.0

    @property
    def outcome(self) -> Outcome | None:
        """The outcome; None until the claim is completed."""
        if self.state != "completed":
            return None
        expired = self.value_until_us is not None and self.now_us > self.value_until_us
        return Outcome(
            self.kind,
            None if expired else self.data,
            self.fence,
            self.created_us,
            self.completed_us,
            self.expires_us,
        )

    @property
    def created_at(self) -> datetime:
        """When the present or last owner claimed the key."""
        return moment(self.created_us)

    @property
    def lease_until(self) -> datetime:
        """When the lease ends or ended."""
        return moment(self.lease_until_us)

    @property
    def expires_at(self) -> datetime:
        """When the key expires."""
        return moment(self.expires_us)

    @property
    def message_id(self) -> str:
        """The key, under the name that message consumers use."""
        return self.key

    @property
    def key_type(self) -> str:
        """The scope, under the name that message consumers use."""
        return self.scope

    @property
    def processed_at(self) -> datetime | None:
        """When the message was marked; None while it is being handled."""
        return moment(self.completed_us) if self.state == "completed" else None

    @property
    def additional_data(self) -> Any:
        """The data that was stored for audit, or None."""
        outcome = self.outcome
        return None if outcome is None or outcome.gone else outcome.value


class Result(Struct, Generic[R], frozen=True):
    """The result of a guarded call."""

    value: R
    replayed: bool
    key: str
    scope: str
    fence: int


class ProcessingRecord(Struct, frozen=True):
    """What :meth:`IdempotentProcessor.process` returns."""

    result: Any
    was_replay: bool
    idempotency_key: str


class Held(Struct, frozen=True):
    """How many keys a store has, by status."""

    in_flight: int = 0
    abandoned: int = 0
    unknown: int = 0
    completed: int = 0
    expired: int = 0

    @property
    def live(self) -> int:
        """All keys except expired ones that are not purged yet."""
        return self.in_flight + self.abandoned + self.unknown + self.completed
