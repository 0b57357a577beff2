"""Visits every state that a model can reach, breadth first, and finds the shortest way to a fault."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

S = TypeVar("S", bound=Hashable)

STUCK = "somebody can never end"
"""The fault of a state from which no way leads to rest, unless something else fails."""


class Step(NamedTuple, Generic[S]):
    """Something that can happen. ``broken``: the promise that it breaks. ``fault``: it is a crash or a lost reply."""

    name: str
    after: S
    broken: str = ""
    fault: bool = False


class Model(Protocol[S]):
    """A protocol: where it starts, what can happen next, and where it rests."""

    def initial(self) -> S:
        """The state before anything happened."""

    def steps(self, state: S) -> Iterable[Step[S]]:
        """Everything that can happen next."""

    def representative(self, state: S) -> S:
        """One state for all that differ only in who is who."""

    def rests(self, state: S) -> bool:
        """Whether everybody has an answer."""


class Broken(Exception):
    """A promise was broken. ``trace`` names the steps of the shortest way to it."""

    def __init__(self, promise: str, trace: list[str]) -> None:
        lines = [f"{promise} ({len(trace)} steps)", *(f"{number:3}. {step}" for number, step in enumerate(trace, 1))]
        super().__init__("\n".join(lines))
        self.promise = promise
        self.trace = trace


@dataclass(frozen=True)
class Explored:
    """The size of a model that keeps its promises."""

    states: int
    steps: int
    depth: int
    seconds: float

    def __str__(self) -> str:
        """The figures, as the documentation has them."""
        return f"{self.states:,} states, {self.steps:,} steps, depth {self.depth} ({self.seconds:.1f} s)"


def show(*lines: object) -> None:
    """Print the figures and traces of a test, for whoever runs it with ``-s``."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def explore(model: Model[S], most: int = 5_000_000) -> Explored:
    """Visit every reachable state. Raises :class:`Broken` for a broken promise, and where somebody can never end."""
    began = time.process_time()
    search = _Search(model, most)
    search.visit_all()
    search.require_a_way_to_rest()
    return Explored(len(search.states), search.steps, search.depths[-1], time.process_time() - began)


class _Search(Generic[S]):
    """States are numbered in the order in which they are met, so the first way to a state is a shortest one."""

    def __init__(self, model: Model[S], most: int) -> None:
        self._model = model
        self._most = most
        first = model.representative(model.initial())
        self._numbers: dict[S, int] = {first: 0}
        self.states: list[S] = [first]
        self.depths: list[int] = [0]
        self._parents: list[int] = [0]
        self._before: list[list[int]] = [[]]
        self.steps = 0

    def visit_all(self) -> None:
        steps, representative, numbers = self._model.steps, self._model.representative, self._numbers
        for number, state in enumerate(self.states):  # the list grows meanwhile
            for step in steps(state):
                self.steps += 1
                if step.broken:
                    raise Broken(step.broken, self._way_to(number, step.broken))
                after = representative(step.after)
                known = numbers.get(after)
                if known is None:
                    known = self._add(after, number)
                if not step.fault:
                    self._before[known].append(number)

    def _add(self, state: S, parent: int) -> int:
        number = self._numbers[state] = len(self.states)
        if number >= self._most:
            raise AssertionError(f"more than {self._most:,} states: the model has no bound")
        self.states.append(state)
        self.depths.append(self.depths[parent] + 1)
        self._parents.append(parent)
        self._before.append([])
        return number

    def _way_to(self, number: int, broken: str = "") -> list[str]:
        """The names of the steps, taken again from the start so that everybody keeps their name on the way."""
        way = []
        while number:
            way.append(self.states[number])
            number = self._parents[number]
        state = self._model.initial()
        names = []
        for target in reversed(way):
            step = self._step(state, target, "")
            names.append(step.name)
            state = step.after
        if broken:
            names.append(self._step(state, None, broken).name)
        return names

    def _step(self, state: S, target: S | None, broken: str) -> Step[S]:
        """The step from the state to the target; without one, the step that breaks the promise."""
        for step in self._model.steps(state):
            if step.broken == broken and (target is None or self._model.representative(step.after) == target):
                return step
        raise AssertionError("two states with one representative differ in what can happen next")

    def require_a_way_to_rest(self) -> None:
        """Walk back from the states at rest, over steps that are no fault: a state that is not met can never end."""
        met = {number for number, state in enumerate(self.states) if self._model.rests(state)}
        queue = deque(met)
        while queue:
            for before in self._before[queue.popleft()]:
                if before not in met:
                    met.add(before)
                    queue.append(before)
        if len(met) < len(self.states):
            nearest = next(number for number in range(len(self.states)) if number not in met)
            raise Broken(STUCK, self._way_to(nearest))
