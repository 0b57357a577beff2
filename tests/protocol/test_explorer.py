"""The explorer visits all states, finds the shortest trace, and sees who can never end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from protocol.explorer import STUCK, Broken, Step, explore


class Jugs:
    """Two jugs, of three and five litres, that are to be filled with less than six. ``wanted`` must not come about."""

    def __init__(self, wanted: int, *, pours: bool = True) -> None:
        self._wanted = wanted
        self._pours = pours

    def initial(self) -> tuple[int, int]:
        return 0, 0

    def rests(self, state: tuple[int, int]) -> bool:
        return state == (0, 0)

    def representative(self, state: tuple[int, int]) -> tuple[int, int]:
        return state

    def steps(self, state: tuple[int, int]) -> Iterator[Step[tuple[int, int]]]:
        small, large = state
        poured = min(small, 5 - large), min(large, 3 - small)
        moves = {
            "fill the small": (3, large),
            "fill the large": (small, 5),
            "small to large": (small - poured[0], large + poured[0]),
            "large to small": (small + poured[1], large - poured[1]),
        }
        if self._pours:
            moves |= {"empty the small": (0, large), "empty the large": (small, 0)}
        for name, after in moves.items():
            yield Step(name, after, "four litres" if self._wanted in after else "")


def test_the_shortest_trace_is_found() -> None:
    with pytest.raises(Broken, match="four litres") as broken:
        explore(Jugs(4))
    assert broken.value.trace == [
        "fill the large",
        "large to small",
        "empty the small",
        "large to small",
        "fill the large",
        "large to small",
    ]


def test_all_states_are_visited() -> None:
    size = explore(Jugs(9))
    assert (size.states, size.steps, size.depth) == (16, 96, 7)


def test_a_state_from_which_nobody_comes_to_rest_is_found() -> None:
    with pytest.raises(Broken, match=STUCK) as broken:
        explore(Jugs(9, pours=False))
    assert broken.value.trace == ["fill the small"]


class Lopsided(Jugs):
    """A representative that forgets too much: which of the jugs is which."""

    def representative(self, state: tuple[int, int]) -> tuple[int, int]:
        return min(state), max(state)


def test_a_representative_that_forgets_too_much_is_found() -> None:
    with pytest.raises(AssertionError, match="differ in what can happen next"):
        explore(Lopsided(4))
