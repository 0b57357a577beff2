"""What a history consists of: operations, each with its call and its answer, and the violations found in them.

This module and the rules beside it import nothing of semel: they judge what was seen, not how it was done.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

Kind: TypeAlias = Literal["key", "run", "quota"]
"""What an operation is about."""

FOREVER = 2**62
"""The end of an operation without an answer: it may happen at any later time, or never."""


class Operation(Struct, frozen=True):
    """One call of one verb, from its call until its answer.

    ``began`` and ``ended`` are nanoseconds of the machine's monotonic clock, which all its processes share: they give
    the real order. ``began_us`` and ``ended_us`` are for leases and retention: microseconds of the same clock, or of
    the recorder's ``clock`` if it has one. Without an answer, ``answer`` is None: it may or may not have happened.
    """

    id: str
    process: str
    kind: Kind
    verb: str
    subject: tuple[str, ...]
    arguments: dict[str, Any]
    began: int
    began_us: int
    ended: int = FOREVER
    ended_us: int = FOREVER
    answer: dict[str, Any] | None = None
    error: str = ""
    lines: tuple[str, ...] = ()

    @property
    def answered(self) -> bool:
        """Whether its answer was seen."""
        return self.answer is not None

    def asked(self, name: str, default: Any = None) -> Any:
        """An argument."""
        return self.arguments.get(name, default)

    def told(self, name: str, default: Any = None) -> Any:
        """A part of the answer; the default if there is no answer."""
        return default if self.answer is None else self.answer.get(name, default)

    def about(self, *subject: str, answer: dict[str, Any] | None = None) -> Operation:
        """The same operation, as seen by one of several things that it was about."""
        return replace(self, subject=subject, answer=answer)

    def __str__(self) -> str:
        asked = ", ".join(
            f"{name}={value!r}" for name, value in self.arguments.items() if value not in (None, "", False)
        )
        answer = self.answer or {}
        told = ", ".join(f"{name}={value!r}" for name, value in answer.items() if value not in (None, ""))
        end = f"{self.ended / 1e9:.6f}" if self.ended != FOREVER else "never"
        what = (told or "done") if self.answered else f"no answer {self.error}".rstrip()
        about = "/".join(self.subject)
        return f"[{self.began / 1e9:.6f} to {end}] {self.process}: {self.verb} {about} ({asked}): {what}"


class Violation(Struct, frozen=True):
    """A rule that a history breaks: what is wrong in plain words, and the operations that prove it."""

    rule: str
    kind: Kind
    subject: tuple[str, ...]
    message: str
    proof: tuple[Operation, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.rule}: {self.kind} {'/'.join(self.subject)}: {self.message}"]
        for operation in self.proof:
            lines.append(f"  {operation}")
            if operation.lines:
                lines.append(f"    recorded in {', '.join(operation.lines)}")
        return "\n".join(lines)

    __repr__ = __str__


class History(Struct):
    """Operations in the order of their calls. ``slack_us`` is by how much a clock was set meanwhile."""

    operations: list[Operation]
    slack_us: int = 0
    complete: bool = True
    """Whether everything that was to happen has happened: what was submitted has ended, slots are free again."""

    def of(self, kind: Kind) -> dict[tuple[str, ...], list[Operation]]:
        """The operations about each subject of a kind."""
        found: dict[tuple[str, ...], list[Operation]] = {}
        for operation in self.operations:
            if operation.kind == kind:
                found.setdefault(operation.subject, []).append(operation)
        return found

    def plus(self, operations: Iterable[Operation]) -> History:
        """The same history with more operations, such as the effects that an oracle of your own has seen."""
        everything = sorted([*self.operations, *operations], key=lambda each: each.began)
        return replace(self, operations=everything)


def effect(
    kind: Kind, subject: Iterable[str], fence: int, *, name: str = "", at_ns: int = 0, where: str = ""
) -> Operation:
    """An effect that happened under a fence, as an oracle of your own has seen it: a row of a table, a sent mail."""
    told = {"fence": fence, "name": name}
    lines = (where,) if where else ()
    own = tuple(subject)
    at_us = at_ns // 1000
    return Operation(where, "oracle", kind, "effect", own, told, at_ns, at_us, at_ns, at_us, {}, lines=lines)
