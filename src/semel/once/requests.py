"""What a caller asks for, checked before it goes anywhere."""

from __future__ import annotations

import re
import secrets
from contextvars import ContextVar
from itertools import count
from typing import Literal, TypeAlias

from msgspec import Struct

from semel._concurrency.fork import survive_fork
from semel.codec import PLAIN, Codec
from semel.errors import InvalidRequest
from semel.policy import Policy
from semel.types import Claim, Granted, Kind

LONGEST = 255
"""Characters of a key or a scope: within every store's index, whatever the characters."""

Door: TypeAlias = Literal["function", "message", "http"]

_FORBIDDEN = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


class CallRequest(Struct):
    """One piece of work: under which key, by which policy, what its outcome is called, and where it came in.

    Events are counted by ``door`` and by ``label``, where the scope itself has too many values to count by.
    """

    key: str
    scope: str
    fingerprint: str
    policy: Policy
    kind: Kind = "value"
    renew: bool = True
    reconciling: bool = False
    door: Door = "function"
    label: str = ""
    codec: Codec = PLAIN


current: ContextVar[tuple[Claim, Codec]] = ContextVar("semel_current_claim")
"""The claim that the running work is done under, and the codec for its value."""


def codec_for(claim: Claim) -> Codec:
    """The codec of the work that runs under this claim, if it runs here."""
    own, codec = current.get((None, PLAIN))
    same = own is not None and (own.scope, own.key, own.fence) == (claim.scope, claim.key, claim.fence)
    return codec if same else PLAIN


def as_claim(given: object) -> Claim:
    """The claim, if it is one."""
    if isinstance(given, Claim):
        return given
    hint = "pass its .claim" if isinstance(given, Granted) else "a Granted verdict has it as .claim"
    raise InvalidRequest(f"a claim is needed here, not {type(given).__name__}; {hint}")


def checked_key_name(what: str, name: object) -> str:
    """The key or scope, if it can be one."""
    if type(name) is str and 0 < len(name) <= LONGEST and name.isprintable():
        return name
    if not isinstance(name, str):
        raise InvalidRequest(f"a {what} is text, not {type(name).__name__}: {name!r:.80}")
    if not name:
        raise InvalidRequest(f"the {what} is empty")
    if len(name) > LONGEST:
        raise InvalidRequest(f"the {what} has {len(name)} characters; at most {LONGEST} are allowed: {name[:40]!r}…")
    if found := _FORBIDDEN.search(name):
        raise InvalidRequest(f"the {what} holds a control character at position {found.start()}: {name!r}")
    return str(name)


def checked_fingerprint(fingerprint: object) -> str:
    """The fingerprint, if it can be one; empty when there is none."""
    if fingerprint == "":
        return ""
    if not isinstance(fingerprint, str) or len(fingerprint) > 200 or _FORBIDDEN.search(fingerprint):
        raise InvalidRequest(
            "a fingerprint is text of at most 200 characters, none of them a control character; "
            "semel.fingerprint(payload) makes one"
        )
    return fingerprint


class _Attempts:
    """Names for attempts: unique over processes, and cheap."""

    def __init__(self) -> None:
        self.after_fork()
        survive_fork(self)

    def after_fork(self) -> None:
        """A child must not go on with its parent's names."""
        self._origin = secrets.token_hex(8)
        self._count = count(1)

    def new(self) -> str:
        return f"{self._origin}{next(self._count):x}"


_attempts = _Attempts()
new_attempt = _attempts.new
