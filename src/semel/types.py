"""The words of semel as data: a claim, its outcome, the verdict on a claim, and the record behind a key.

Times inside are whole microseconds since 1970 on the **store's** clock (names end in ``_us``); the properties
without the ending give them as aware ``datetime``.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Struct

from semel.codec import PLAIN, Codec
from semel.errors import InvalidRequest, OutcomeGone

R = TypeVar("R")

State: TypeAlias = Literal["claimed", "completed", "released"]
Kind: TypeAlias = str
"""What an outcome is: ``value``, ``error``, ``seen`` or ``response``.

``resolved`` is a value that an operator gave; ``unstored`` is work that was done and whose value could not be stored,
``oversized`` a response that was too large to be kept.
"""
OVERSIZED: Kind = "oversized"
Reason: TypeAlias = Literal["absent", "expired", "abandoned"]
"""Why a claim was granted: no record, a record past its retention, or an owner whose lease ended."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def time_in(text: str) -> datetime:
    """The time that an ISO 8601 text names. A bare number is none: seconds, milliseconds, or a date without dashes?"""
    text = text.strip()
    if text.isdecimal():
        raise ValueError(f"{text} is a number")
    return datetime.fromisoformat(text)


def moment(us: int) -> datetime:
    """The store's microseconds as an aware datetime."""
    return _EPOCH + timedelta(microseconds=us)


class Claim(Struct, frozen=True, gc=False):
    """The exclusive right to work on a key until the lease ends. ``fence`` grows with every claim of the key."""

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
        """When the lease ends, on the store's clock, as of the last claim or renewal."""
        return moment(self.lease_until_us)

    @property
    def expires_at(self) -> datetime:
        """When the key is forgotten."""
        return moment(self.expires_us)


class Response(Struct, frozen=True, array_like=True):
    """An HTTP response as an outcome. ``body`` is None where it was too large to be kept.

    A handler that completes its claim in its own transaction gives it to ``complete`` as the value.
    """

    status: int
    headers: list[tuple[bytes, bytes]] = []
    body: bytes | None = b""

    def __post_init__(self) -> None:
        """Refuse headers that could not be sent."""
        if not all(type(name) is bytes and type(value) is bytes for name, value in self.headers):
            raise InvalidRequest('a response\'s headers are pairs of bytes, such as (b"content-type", b"text/plain")')

    @classmethod
    def json(cls, content: Any, status: int = 200) -> Response:
        """The content as JSON."""
        return cls(status, [(b"content-type", b"application/json")], msgspec.json.encode(content))


_responses = msgspec.msgpack.Decoder(Response)
_packer = msgspec.msgpack.Encoder()


def packed(kind: Kind, value: Any, codec: Codec = PLAIN) -> tuple[Kind, bytes]:
    """An outcome as it is stored: its kind, and its bytes."""
    if type(value) is Response:
        return "response" if value.body is not None else OVERSIZED, _packer.encode(value)
    return kind, codec.encode(value)


class Outcome(Struct, frozen=True, gc=False):
    """What every later caller of a key gets."""

    kind: Kind
    data: bytes | None
    fence: int
    created_us: int
    completed_us: int
    expires_us: int

    @property
    def value(self) -> Any:
        """The recorded value, decoded anew each time, so that no caller can change another's."""
        return self.read(PLAIN)

    def read(self, codec: Codec) -> Any:
        """The recorded value, with the classes that the codec knows."""
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
        """True for a tombstone: the work was done, its value is not stored, or no longer."""
        return self.data is None or self.kind in {"unstored", OVERSIZED}

    @property
    def completed_at(self) -> datetime:
        """When the outcome was recorded."""
        return moment(self.completed_us)

    @property
    def expires_at(self) -> datetime:
        """When the key is forgotten."""
        return moment(self.expires_us)


class Granted(Struct, frozen=True):
    """The key is yours: work, then complete or release the claim."""

    claim: Claim
    reason: Reason = "absent"


class Replay(Struct, frozen=True):
    """The work was done: here is its outcome."""

    outcome: Outcome


class InFlight(Struct, frozen=True):
    """Someone works on it.

    ``retry_after`` is what is left of the owner's lease, in seconds: positive, and if the owner is dead, the key can be
    had by then. ``age`` is for how many seconds the owner has had the key, whose renewals do not change it.
    """

    retry_after: float
    fence: int = 0
    age: float = 0.0


class Mismatch(Struct, frozen=True):
    """The key was used with another fingerprint, which is given here."""

    fingerprint: str = ""


class Unknown(Struct, frozen=True):
    """The owner vanished and it is not known whether the work happened. ``fence`` is the lost claim's."""

    fence: int = 0
    lease_until_us: int = 0


Verdict: TypeAlias = Granted | Replay | InFlight | Mismatch | Unknown


class Record(Struct, gc=False):
    """What a store keeps for one key, and (in ``now_us``) the store's time when it was read."""

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
        """The state as a person would say it."""
        if self.state == "completed":
            return "completed"
        if self.now_us < self.lease_until_us:
            return "in_flight"
        return "unknown" if self.unknown else "abandoned"

    @property
    def lease_left(self) -> float:
        """Seconds until the lease ends, never more than it was given; zero when it ended or the work is done."""
        left = min(self.lease_until_us - self.now_us, self.lease_us)
        return max(0.0, left / 1e6) if self.state == "claimed" else 0.0

    @property
    def outcome(self) -> Outcome | None:
        """The outcome, once there is one."""
        if self.state != "completed":
            return None
        faded = self.value_until_us is not None and self.now_us > self.value_until_us
        return Outcome(
            self.kind,
            None if faded else self.data,
            self.fence,
            self.created_us,
            self.completed_us,
            self.expires_us,
        )

    @property
    def created_at(self) -> datetime:
        """When the key was claimed, by its present or last owner."""
        return moment(self.created_us)

    @property
    def lease_until(self) -> datetime:
        """When the present lease ends or ended."""
        return moment(self.lease_until_us)

    @property
    def expires_at(self) -> datetime:
        """When the key is forgotten."""
        return moment(self.expires_us)

    @property
    def message_id(self) -> str:
        """The key, as message consumers call it."""
        return self.key

    @property
    def key_type(self) -> str:
        """The scope, as message consumers call it."""
        return self.scope

    @property
    def processed_at(self) -> datetime | None:
        """When the message was marked, or None while it is being handled."""
        return moment(self.completed_us) if self.state == "completed" else None

    @property
    def additional_data(self) -> Any:
        """The data kept for audit, or None."""
        outcome = self.outcome
        return None if outcome is None or outcome.gone else outcome.value


class Result(Struct, Generic[R], frozen=True):
    """What a guarded call gave: its value, whether it was replayed, and under which key."""

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
    """What a store holds at this moment."""

    in_flight: int = 0
    abandoned: int = 0
    unknown: int = 0
    completed: int = 0
    expired: int = 0

    @property
    def live(self) -> int:
        """Keys that still answer: everything but what expired and waits for the collector."""
        return self.in_flight + self.abandoned + self.unknown + self.completed
