"""Where things go in a picture. The templates draw them: here are only numbers and words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from msgspec import Struct

from semel.dashboard.overview.windows import Window
from semel.types import moment

WIDTH, HEIGHT = 960, 200
LEFT, RIGHT, TOP, BOTTOM = 40, 8, 8, 20
GAP = 0.15
"""The part of a step that is left free between two bars."""
TICKS = 4


class Block(Struct, frozen=True):
    """A piece of a bar."""

    kind: str
    y: float
    height: float


class ChartBar(Struct, frozen=True):
    """One step: its pieces, one on the other, and what it says."""

    x: float
    width: float
    blocks: list[Block]
    label: str
    counts: dict[str, int]


class ChartTick(Struct, frozen=True):
    """A mark of an axis."""

    at: float
    label: str


class Chart(Struct, frozen=True, kw_only=True):
    """Bars over time, in a picture of that size."""

    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    base: int = HEIGHT - BOTTOM
    right: int = WIDTH - RIGHT
    bars: list[ChartBar]
    levels: list[ChartTick]
    times: list[ChartTick]
    totals: dict[str, int]
    """Of each kind, in all bars together; kinds that do not occur are left out."""


def stacked(window: Window, starts: Sequence[int], counts: Sequence[Mapping[str, int]], kinds: Sequence[str]) -> Chart:
    """A bar for each step; the kinds lie on each other in their order, the first at the bottom."""
    top = ceiling(max((sum(each.values()) for each in counts), default=0))
    scale = (HEIGHT - TOP - BOTTOM) / top
    pitch = (WIDTH - LEFT - RIGHT) / len(starts)
    bars = []
    for place, (start, each) in enumerate(zip(starts, counts, strict=True)):
        there = {kind: each[kind] for kind in kinds if each.get(kind)}
        x = round(LEFT + pitch * (place + GAP / 2), 2)
        bars.append(ChartBar(x, round(pitch * (1 - GAP), 2), _blocks(there, scale), _label(window, start), there))
    totals = {kind: total for kind in kinds if (total := sum(each.get(kind, 0) for each in counts))}
    return Chart(bars=bars, levels=_levels(top, scale), times=_times(window, starts, pitch), totals=totals)


def _blocks(there: Mapping[str, int], scale: float) -> list[Block]:
    blocks = []
    y = float(HEIGHT - BOTTOM)
    for kind, count in there.items():
        y -= count * scale
        blocks.append(Block(kind, round(y, 2), round(count * scale, 2)))
    return blocks


def ceiling(most: int) -> int:
    """The end of the axis: a round number from that on, and of a few runs not less than four."""
    size = 1
    while True:
        for step in (1, 2, 4, 5):
            if step * size >= max(most, TICKS):
                return step * size
        size *= 10


def _levels(top: int, scale: float) -> list[ChartTick]:
    step = top // TICKS if top % TICKS == 0 else top // 5
    return [ChartTick(round(HEIGHT - BOTTOM - level * scale, 2), f"{level:,}") for level in range(0, top + 1, step)]


def _times(window: Window, starts: Sequence[int], pitch: float) -> list[ChartTick]:
    every = max(1, len(starts) // 6)
    return [
        ChartTick(round(LEFT + pitch * place, 2), _short(window, moment(start)))
        for place, start in enumerate(starts)
        if place % every == 0
    ]


def _short(window: Window, at: datetime) -> str:
    return at.strftime("%H:%M" if window.seconds <= 86400 else "%a %H:%M")


def _label(window: Window, start_us: int) -> str:
    at = moment(start_us)
    return at.strftime("%H:%M" if window.seconds <= 86400 else "%a %d %b %H:%M")


def percentile(values: Sequence[float], part: float) -> float | None:
    """The least of the values (which are in order) that so large a part of them does not exceed."""
    if not values:
        return None
    place = -int(-part * len(values) // 1)  # rounded up
    return values[max(0, min(len(values), place) - 1)]
