"""The chart of the overview: windows of time, and the position of each bar, tick and label. The template draws it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from semel.runs.types import MICRO
from semel.types import moment

WIDTH, HEIGHT = 960, 200
RIGHT, TOP, BOTTOM = 8, 20, 20
CHARACTER = 7
"""The width of a digit: labels of the left axis get as much room as the longest of them needs."""
LOWEST = 3
"""The height of the smallest block: one failure is visible beside thousands of runs that succeeded."""
GAP = 0.15
"""The share of a step that is left free between two bars."""
TICKS = 4


class Window(Struct, frozen=True):
    """The time that the overview covers: a number of steps of equal length, up to now."""

    name: str
    label: str
    last: str
    """Completes the phrase "in the last …"."""
    step: int
    """Seconds."""
    steps: int
    recount_every: float
    """Seconds between two counts of its runs: long steps hold many runs, and a few more make no visible difference."""

    @property
    def seconds(self) -> int:
        """The length of the window."""
        return self.step * self.steps

    def starts(self, now_us: int) -> list[int]:
        """When each step begins. Steps are aligned, so they stay the same until the last one is over."""
        size = self.step * MICRO
        last = now_us // size * size
        return [last - (self.steps - 1 - place) * size for place in range(self.steps)]

    def label_of(self, start_us: int) -> str:
        """The beginning of a step, with its day where the window is longer than one."""
        return moment(start_us).strftime("%H:%M" if self.seconds <= 86400 else "%a %d %b %H:%M")


HOUR = Window("hour", "1 hour", "hour", 60, 60, 2.0)
DAY = Window("day", "24 hours", "24 hours", 3600, 24, 10.0)
WEEK = Window("week", "7 days", "7 days", 6 * 3600, 28, 30.0)
WINDOWS = {each.name: each for each in (HOUR, DAY, WEEK)}


class Block(Struct, frozen=True):
    """The part of a bar that stands for one status."""

    status: str
    y: float
    height: float


class ChartBar(Struct, frozen=True):
    """One step: its blocks from bottom to top, its label and its numbers."""

    x: float
    width: float
    blocks: list[Block]
    label: str
    counts: dict[str, int]


class ChartTick(Struct, frozen=True):
    """A label on an axis."""

    at: float
    label: str


class Chart(Struct, frozen=True, kw_only=True):
    """A stacked bar chart, in the coordinates of its SVG."""

    width: int = WIDTH
    height: int = HEIGHT
    left: int
    right: int = WIDTH - RIGHT
    bars: list[ChartBar]
    levels: list[ChartTick]
    times: list[ChartTick]
    totals: dict[str, int]
    """Runs of the whole window by status; a status without runs is left out."""


def stacked_chart(
    window: Window, starts: Sequence[int], counts: Sequence[Mapping[str, int]], statuses: Sequence[str]
) -> Chart:
    """A bar for each step, with the statuses stacked in their order, the first at the bottom."""
    top = ceiling(max((sum(each.values()) for each in counts), default=0))
    scale = (HEIGHT - TOP - BOTTOM) / top
    levels = _levels(top, scale)
    left = 10 + CHARACTER * max(len(each.label) for each in levels)
    pitch = (WIDTH - left - RIGHT) / len(starts)
    bars = []
    for place, (start, each) in enumerate(zip(starts, counts, strict=True)):
        present = {status: each[status] for status in statuses if each.get(status)}
        x = round(left + pitch * (place + GAP / 2), 2)
        width = round(pitch * (1 - GAP), 2)
        bars.append(ChartBar(x, width, _blocks(present, scale), window.label_of(start), present))
    totals = {status: total for status in statuses if (total := sum(each.get(status, 0) for each in counts))}
    return Chart(left=left, bars=bars, levels=levels, times=_times(window, starts, left, pitch), totals=totals)


def _blocks(counts: Mapping[str, int], scale: float) -> list[Block]:
    blocks = []
    y = float(HEIGHT - BOTTOM)
    for status, count in counts.items():
        height = max(LOWEST, count * scale)
        y -= height
        blocks.append(Block(status, round(y, 2), round(height, 2)))
    return blocks


def ceiling(most: int) -> int:
    """The top of the axis: a round number that is not below ``most``, and at least 4."""
    size = 1
    while True:
        for step in (1, 2, 4, 5, 6, 8):
            if step * size >= max(most, TICKS):
                return step * size
        size *= 10


def _levels(top: int, scale: float) -> list[ChartTick]:
    step = top // TICKS if top % TICKS == 0 else top // 5
    return [ChartTick(round(HEIGHT - BOTTOM - level * scale, 2), f"{level:,}") for level in range(0, top + 1, step)]


def _times(window: Window, starts: Sequence[int], left: float, pitch: float) -> list[ChartTick]:
    every = max(1, len(starts) // 6)
    shape = "%H:%M" if window.seconds <= 86400 else "%a %H:%M"
    return [
        ChartTick(round(left + pitch * place, 2), moment(start).strftime(shape))
        for place, start in enumerate(starts)
        if place % every == 0
    ]
