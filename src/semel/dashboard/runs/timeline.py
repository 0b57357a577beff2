"""The timeline of a run: a lane for each attempt with the wait before it, on one axis of time.

This module computes the positions; templates/run/timeline_svg.html draws them.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from semel.dashboard.templating import duration
from semel.runs.types import MICRO, Run, Step

WIDTH = 760
LEFT, RIGHT = 72, 150
"""The margins beside the axis, which hold the labels."""
LANE_HEIGHT = 26
TOP, BOTTOM = 8, 26
MIN_BAR = 2.0
"""A bar is at least this wide, so that a short attempt in a long run can be seen."""
MAX_LANES = 12
TICKS = 5

LABELS = {
    "uploaded": "data uploaded",
    "cancel_requested": "cancel requested",
    "returned": "returned unused",
}
"""The steps that have another label than their name."""
FILLS = {
    "running": "fill-running",
    "succeeded": "fill-succeeded",
    "failed": "fill-failed",
    "retried": "fill-failed",
    "lost": "fill-failed",
}
UNCOUNTED = ("snoozed", "returned")
"""Outcomes after which the next attempt has the same number: the engine does not charge them."""
_TICK_SECONDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900),
    *(1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800, 2592000, 31536000),
)


class TimelineBar(Struct, frozen=True):
    """A period of time in a lane."""

    x: float
    width: float
    fill: str
    title: str


class Mark(Struct, frozen=True):
    """A moment in a lane: the last heartbeat, or a cancel request."""

    x: float
    kind: str
    title: str


class Lane(Struct, frozen=True, kw_only=True):
    """An attempt with the wait before it, or a wait that no attempt has ended."""

    y: int
    label: str
    bars: list[TimelineBar]
    marks: list[Mark]
    outcome: str


class TimelineTick(Struct, frozen=True):
    """A label on the axis."""

    x: float
    label: str


class Timeline(Struct, frozen=True, kw_only=True):
    """The timeline in the coordinates of its SVG."""

    width: int
    height: int
    left: int
    right: int
    axis: int
    lanes: list[Lane]
    ticks: list[TimelineTick]
    span_us: int
    omitted: int
    """Earlier attempts that are not drawn."""
    summary: str
    """The timeline as text, for screen readers."""


class TimelineAttempt(Struct):
    """An attempt; a time is None where that has not happened."""

    number: int
    waited_from: int
    began: int | None = None
    ended: int | None = None
    outcome: str = ""
    cancel_requested: int | None = None
    worker: str | None = None
    fence: int | None = None
    note: str | None = None
    """Why it ended."""


def attempts_of(steps: Sequence[Step], run: Run) -> list[TimelineAttempt]:
    """The attempts that the steps describe, oldest first; the last one may still wait or run."""
    counted = sum((each.step == "leased") - (each.step in UNCOUNTED) for each in steps)
    found = [TimelineAttempt(max(1, run.attempts - counted + 1), steps[0].at_us if steps else run.created_us)]
    for step in steps:
        attempt = found[-1]
        if step.step == "leased":
            attempt.began, attempt.worker, attempt.fence = step.at_us, step.worker, step.fence
        elif step.step == "cancel_requested":
            attempt.cancel_requested = step.at_us
        elif step.status not in ("PENDING", "RUNNING"):
            attempt.ended, attempt.outcome, attempt.note = step.at_us, step.step, step.note
        elif attempt.began is not None and step.status == "PENDING":
            attempt.ended, attempt.outcome, attempt.note = step.at_us, step.step, step.note
            found.append(TimelineAttempt(attempt.number + (step.step not in UNCOUNTED), step.at_us))
    return found


def draw_timeline(run: Run, steps: Sequence[Step], now_us: int, min_span_us: int = 0) -> Timeline:
    """The run's timeline at ``now_us``; its axis covers at least ``min_span_us``."""
    shown = attempts_of(steps, run)[-MAX_LANES:]
    begin = shown[0].waited_from
    end = max(now_us if run.finished_us is None else run.finished_us, begin + 1000, *(each.at_us for each in steps))
    scale = Scale(begin, end, min_span_us)
    lanes = [_lane(each, run, scale, TOP + place * LANE_HEIGHT) for place, each in enumerate(shown)]
    axis = TOP + LANE_HEIGHT * len(lanes)
    return Timeline(
        width=WIDTH,
        height=axis + BOTTOM,
        left=LEFT,
        right=WIDTH - RIGHT,
        axis=axis,
        lanes=lanes,
        ticks=scale.ticks(),
        span_us=end - begin,
        omitted=max(0, run.fence - sum(each.began is not None for each in shown)),
        summary="; ".join(f"{lane.label}: {lane.outcome}" for lane in lanes),
    )


class Scale:
    """Converts times to positions on the axis."""

    def __init__(self, begin: int, now: int, min_span: int) -> None:
        self.begin, self.now, self.end = begin, now, max(now, begin + min_span)

    def x(self, at_us: int) -> float:
        """The distance from the left edge of the picture."""
        part = (min(max(at_us, self.begin), self.end) - self.begin) / (self.end - self.begin)
        return round(LEFT + part * (WIDTH - LEFT - RIGHT), 1)

    def bar(self, begin: int, end: int, fill: str, title: str) -> TimelineBar:
        """A bar from one time to another, wide enough to be seen."""
        x = self.x(begin)
        width = max(MIN_BAR, round(self.x(end) - x, 1))
        return TimelineBar(min(x, WIDTH - RIGHT - width), width, fill, title)

    def ticks(self) -> list[TimelineTick]:
        """Round times since the beginning."""
        seconds = (self.end - self.begin) / MICRO
        step = next((each for each in _TICK_SECONDS if seconds / each <= TICKS), seconds / TICKS)
        return [
            TimelineTick(self.x(self.begin + round(place * step * MICRO)), duration(place * step) if place else "0")
            for place in range(int(seconds / step) + 1)
        ]


def _lane(attempt: TimelineAttempt, run: Run, scale: Scale, y: int) -> Lane:
    wait_end = attempt.began or attempt.ended or scale.now
    waited = _elapsed(attempt.waited_from, wait_end)
    bars = [scale.bar(attempt.waited_from, wait_end, "fill-pending", f"waited {waited}")]
    marks: list[Mark] = []
    if attempt.began is not None:
        end = scale.now if attempt.ended is None else attempt.ended
        by = f" by {attempt.worker}" if attempt.worker else ""
        state = LABELS.get(attempt.outcome, attempt.outcome) or "running"
        fill = FILLS.get(attempt.outcome or "running", "fill-cancelled")
        title = f"attempt {attempt.number}{by}: {state} after {_elapsed(attempt.began, end)}"
        bars.append(scale.bar(attempt.began, end, fill, title))
        if attempt.ended is None and run.heartbeat_us is not None:
            marks.append(Mark(scale.x(run.heartbeat_us), "heartbeat", "last heartbeat"))
    if attempt.cancel_requested is not None:
        marks.append(Mark(scale.x(attempt.cancel_requested), "cancel", "cancel requested"))
    label = "waiting" if attempt.began is None else f"attempt {attempt.number}"
    return Lane(y=y, label=label, bars=bars, marks=marks, outcome=_outcome(attempt, scale))


def _outcome(attempt: TimelineAttempt, scale: Scale) -> str:
    """The outcome in words, because not everybody can tell the colours apart."""
    if attempt.ended is not None:
        label = LABELS.get(attempt.outcome, attempt.outcome)
        return label if attempt.began is None else f"{label}, {_elapsed(attempt.began, attempt.ended)}"
    if attempt.began is None:
        return f"waiting, {_elapsed(attempt.waited_from, scale.now)}"
    state = "running" if attempt.cancel_requested is None else "cancelling"
    return f"{state}, {_elapsed(attempt.began, scale.now)}"


def _elapsed(begin: int, end: int) -> str:
    return duration(max(0, end - begin) / MICRO)
