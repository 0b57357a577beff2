"""Ways through a small state machine that take every step of it, so that a real store can be led along them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

S = TypeVar("S", bound=Hashable)
V = TypeVar("V", bound=Hashable)


def tours(start: S, verbs: Iterable[V], after: Callable[[S, V], S]) -> list[list[V]]:
    """Sequences of verbs, each from the start, that together try every verb in every state that can be reached."""
    steps = _reachable(start, tuple(verbs), after)
    untried = {(state, verb) for state, known in steps.items() for verb in known}
    found = []
    while untried:
        tour: list[V] = []
        state = start
        while way := _way_to_untried(state, steps, untried):
            for verb in way:
                untried.discard((state, verb))
                state = steps[state][verb]
            tour += way
        found.append(tour)
    return found


def _reachable(start: S, verbs: tuple[V, ...], after: Callable[[S, V], S]) -> dict[S, dict[V, S]]:
    steps: dict[S, dict[V, S]] = {}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        if state not in steps:
            steps[state] = {verb: after(state, verb) for verb in verbs}
            queue.extend(steps[state].values())
    return steps


def _way_to_untried(state: S, steps: dict[S, dict[V, S]], untried: set[tuple[S, V]]) -> list[V]:
    """The shortest way that ends with an untried step; empty if there is none. Of several, one that stays here."""
    ways: dict[S, list[V]] = {state: []}
    queue = deque([state])
    while queue:
        at = queue.popleft()
        here = [verb for verb in steps[at] if (at, verb) in untried]
        if here:
            return [*ways[at], min(here, key=lambda verb: steps[at][verb] != at)]
        for verb, then in steps[at].items():
            if then not in ways:
                ways[then] = [*ways[at], verb]
                queue.append(then)
    return []
