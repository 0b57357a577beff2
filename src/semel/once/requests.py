"""Requests of callers to the engine, and the claim that the current work runs under."""

from __future__ import annotations

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

Door: TypeAlias = Literal["function", "message", "http"]


class CallRequest(Struct):
    """One piece of work: its key, its policy, the kind of its outcome, and how it was called (``door``).

    Events are counted by ``door`` and by ``label``, which replaces a scope that has too many values to count by.
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
"""The claim that the current work runs under, and the codec for its value."""


def codec_for(claim: Claim) -> Codec:
    """The codec of the work under this claim if it is the current work; otherwise the plain one."""
    own, codec = current.get((None, PLAIN))
    same = own is not None and (own.scope, own.key, own.fence) == (claim.scope, claim.key, claim.fence)
    return codec if same else PLAIN


def as_claim(given: object) -> Claim:
    """The argument, if it is a claim. Raises :class:`InvalidRequest` for anything else."""
    if isinstance(given, Claim):
        return given
    hint = "pass its .claim" if isinstance(given, Granted) else "a Granted verdict has it as .claim"
    raise InvalidRequest(f"a claim is needed here, not {type(given).__name__}; {hint}")


class _Attempts:
    """Names for attempts: unique across processes, and cheap to make."""

    def __init__(self) -> None:
        self.after_fork()
        survive_fork(self)

    def after_fork(self) -> None:
        """A child must not reuse its parent's names."""
        self._origin = secrets.token_hex(8)
        self._count = count(1)

    def new(self) -> str:
        return f"{self._origin}{next(self._count):x}"


_attempts = _Attempts()
new_attempt = _attempts.new
