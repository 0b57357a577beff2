"""Searches for an order of operations that explains every answer.

Each operation happened at one moment between its call and its answer; one without an answer at any moment after its
call, or not at all. A history is **linearizable** if some choice of moments explains all answers. The search is that of
Wing and Gong, with the memory of Lowe: no pair of "what has happened" and "state" is looked at twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from msgspec import Struct

from semel.testing.history.operations import Operation

S = TypeVar("S")

MOST_STATES = 20_000
"""The most states that a search looks at before it gives up."""


class IllegalStep(Struct, frozen=True):
    """Why an answer is impossible in a state: the rule, the words, and the operations that led to the state.

    ``weak`` if rather the state is wrong than the answer: such a reason is given only if there is no other.
    """

    rule: str
    message: str
    proof: tuple[Operation, ...] = ()
    weak: bool = False


class Specification(Protocol[S]):
    """How one key or one run behaves."""

    def start(self) -> S:
        """The state before the first operation. States can be compared and hashed."""

    def step(self, state: S, operation: Operation) -> list[S] | IllegalStep:
        """The states in which its answer may leave the state; or why this answer is impossible."""

    def reads(self, operation: Operation) -> bool:
        """Whether an operation with this answer changes no state, whatever that is."""

    def guess(self, state: S, operation: Operation) -> list[S]:
        """The states in which an operation without an answer may leave the state, if it changes it."""


class Stuck(Struct):
    """The most that could be explained, and the answer that could not: None if the search gave up."""

    operation: Operation | None
    refusal: IllegalStep | None


class Search(Generic[S]):
    """One search over the operations of one subject."""

    def __init__(self, operations: Sequence[Operation], model: Specification[S], most: int | None = None) -> None:
        self._operations = sorted(operations, key=lambda each: (each.began, each.ended))
        self._model = model
        self._most = MOST_STATES if most is None else most
        self._answers = sum(each.answered for each in operations)
        self._deepest = -1
        self._stuck: list[tuple[Operation, IllegalStep]] = []

    def run(self) -> Stuck | None:
        """None if some order explains every answer."""
        stack: list[tuple[int, int, S]] = [(0, 0, self._model.start())]
        seen = {(0, stack[0][2])}
        while stack:
            if len(seen) > self._most:
                return Stuck(None, None)
            done, answers, state = stack.pop()
            if answers == self._answers:
                return None
            for taken, more, after in self._next(done, answers, state):
                if (taken, after) not in seen:
                    seen.add((taken, after))
                    stack.append((taken, more, after))
        operation, refusal = min(self._stuck, key=lambda each: (each[1].weak, each[0].ended))
        return Stuck(operation, refusal)

    def _next(self, done: int, answers: int, state: S) -> list[tuple[int, int, S]]:
        found: list[tuple[int, int, S]] = []
        refused: list[tuple[Operation, IllegalStep]] = []
        for bit, operation in self._first(done):
            if not operation.answered:
                found += [(done | bit, answers, after) for after in self._model.guess(state, operation)]
                continue
            after = self._model.step(state, operation)
            if isinstance(after, IllegalStep):
                refused.append((operation, after))
            elif after == [state] and self._model.reads(operation):
                return [(done | bit, answers + 1, state)]  # nothing is lost by taking it at once
            else:
                found += [(done | bit, answers + 1, each) for each in after]
        if refused and answers >= self._deepest:
            self._stuck = refused if answers > self._deepest else [*self._stuck, *refused]
            self._deepest = answers
        return found

    def _first(self, done: int) -> Iterator[tuple[int, Operation]]:
        """The operations that may be the next: no other ended before they began."""
        first_end = None
        first = (~done & (done + 1)).bit_length() - 1
        for place, operation in enumerate(self._operations[first:], first):
            if done >> place & 1:
                continue
            if first_end is not None and operation.began > first_end:
                return
            yield 1 << place, operation
            if operation.answered and (first_end is None or operation.ended < first_end):
                first_end = operation.ended
