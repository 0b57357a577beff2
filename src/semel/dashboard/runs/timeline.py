"""The life of a run as a picture: a lane for each attempt, with the wait before it, on one axis of time.

Here it is worked out what stands where; templates/timeline.html draws it.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from semel.dashboard.wording import duration
from semel.runs.types import MICRO, Run, Step

WIDTH = 760
LEFT, RIGHT = 62, 132
"""Where the axis begins, and what is kept for words at its end."""
LANE = 26
BAR = 14
TOP, BOTTOM = 8, 26
THINNEST = 2.0
"""Of a moment as against an hour there would be nothing to see."""
MOST_LANES = 12
TICKS = 5

WORDS = {
    "created": "submitted",
    "uploaded": "its data arrived",
    "leased": "leased",
    "cancel_requested": "cancel requested",
    "retried": "retried",
    "lost": "lost",
    "snoozed": "snoozed",
    "returned": "returned unused",
    "succeeded": "succeeded",
    "failed": "failed",
    "cancelled": "cancelled",
}
"""What each step is called."""
FILLS = {
    "running": "fill-running",
    "succeeded": "fill-succeeded",
    "failed": "fill-failed",
    "retried": "fill-failed",
    "lost": "fill-failed",
    "cancelled": "fill-cancelled",
    "snoozed": "fill-cancelled",
    "returned": "fill-cancelled",
    "stopped": "fill-cancelled",
}
UNCOUNTED = ("snoozed", "returned")
"""Ends after which the next attempt has the same number: nothing was tried, so the engine charges none."""
_STEPS_OF_TIME = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900)
_LONGER_STEPS = (1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800, 2592000, 31536000)


class TimelineBar(Struct, frozen=True):
    """A stretch of time in a lane."""

    x: float
    width: float
    fill: str
    title: str


class Mark(Struct, frozen=True):
    """A moment in a lane: a heartbeat, or that somebody asked for the end."""

    x: float
    kind: str
    title: str


class Lane(Struct, frozen=True, kw_only=True):
    """An attempt with the wait before it; or only a wait, which goes on or came to nothing."""

    y: int
    label: str
    bars: list[TimelineBar]
    marks: list[Mark]
    word: str


class TimelineTick(Struct, frozen=True):
    """A place on the axis."""

    x: float
    label: str


class Picture(Struct, frozen=True, kw_only=True):
    """All of it, and its story in a sentence."""

    width: int
    height: int
    left: int
    right: int
    axis: int
    lanes: list[Lane]
    ticks: list[TimelineTick]
    span_us: int
    left_out: int
    told: str


class TimelineAttempt(Struct):
    """What is known of one attempt. ``None`` is what did not happen, or not yet."""

    number: int
    waited_from: int
    began: int | None = None
    ended: int | None = None
    outcome: str = ""
    asked_to_end: int | None = None
    worker: str | None = None


def attempts_of(steps: Sequence[Step], run: Run) -> list[TimelineAttempt]:
    """The steps as attempts, oldest first; the last may still wait or run."""
    begun = sum((each.step == "leased") - (each.step in UNCOUNTED) for each in steps)
    found = [TimelineAttempt(max(1, run.attempts - begun + 1), run.created_us if not steps else steps[0].at_us)]
    for step in steps:
        now = found[-1]
        if step.step == "leased":
            now.began, now.worker = step.at_us, step.worker
        elif step.step == "cancel_requested":
            now.asked_to_end = step.at_us
        elif step.status not in ("PENDING", "RUNNING"):
            now.ended, now.outcome = step.at_us, step.step
        elif now.began is not None and step.status == "PENDING":
            now.ended, now.outcome = step.at_us, step.step
            found.append(TimelineAttempt(now.number + (step.step not in UNCOUNTED), step.at_us))
    return found


def picture(run: Run, steps: Sequence[Step], now_us: int, span_us: int = 0) -> Picture:
    """The picture of a run as it stands at that time; its axis is at least so long."""
    every = attempts_of(steps, run)
    shown = every[-MOST_LANES:]
    begin = shown[0].waited_from
    end = max(now_us if run.finished_us is None else run.finished_us, begin + 1000, *(each.at_us for each in steps))
    scale = Scale(begin, end, span_us)
    lanes = [_lane(each, run, scale, TOP + place * LANE) for place, each in enumerate(shown)]
    axis = TOP + LANE * len(lanes)
    return Picture(
        width=WIDTH,
        height=axis + BOTTOM,
        left=LEFT,
        right=WIDTH - RIGHT,
        axis=axis,
        lanes=lanes,
        ticks=scale.ticks(),
        span_us=end - begin,
        left_out=max(0, run.fence - sum(each.began is not None for each in shown)),
        told="; ".join(f"{lane.label}: {lane.word}" for lane in lanes),
    )


class Scale:
    """Where a moment stands on the axis."""

    def __init__(self, begin: int, now: int, span: int) -> None:
        self.begin, self.now, self.end = begin, now, max(now, begin + span)

    def x(self, at_us: int) -> float:
        """From the left edge of the picture."""
        part = (min(max(at_us, self.begin), self.end) - self.begin) / (self.end - self.begin)
        return round(LEFT + part * (WIDTH - LEFT - RIGHT), 1)

    def bar(self, begin: int, end: int, fill: str, title: str) -> TimelineBar:
        """A stretch that can be seen however short it was."""
        x, right = self.x(begin), self.x(end)
        width = max(THINNEST, round(right - x, 1))
        return TimelineBar(min(x, WIDTH - RIGHT - width), width, fill, title)

    def ticks(self) -> list[TimelineTick]:
        """Round times since the beginning."""
        seconds = (self.end - self.begin) / MICRO
        steps = (*_STEPS_OF_TIME, *_LONGER_STEPS)
        step = next((each for each in steps if seconds / each <= TICKS), seconds / TICKS)
        count = int(seconds / step)
        return [
            TimelineTick(self.x(self.begin + round(place * step * MICRO)), duration(place * step) if place else "0")
            for place in range(count + 1)
        ]


def _lane(attempt: TimelineAttempt, run: Run, scale: Scale, y: int) -> Lane:
    """An attempt's lane."""
    bars = [_wait(attempt, scale)]
    marks: list[Mark] = []
    if attempt.began is not None:
        last = scale.now if attempt.ended is None else attempt.ended
        spent = duration((last - attempt.began) / MICRO)
        by = f" by {attempt.worker}" if attempt.worker else ""
        state = WORDS.get(attempt.outcome, attempt.outcome) or "running"
        fill = FILLS.get(attempt.outcome or "running", "fill-cancelled")
        bars.append(scale.bar(attempt.began, last, fill, f"attempt {attempt.number}{by}: {state} after {spent}"))
        if attempt.ended is None and run.heartbeat_us is not None:
            marks.append(Mark(scale.x(run.heartbeat_us), "heartbeat", "last heartbeat"))
    if attempt.asked_to_end is not None:
        marks.append(Mark(scale.x(attempt.asked_to_end), "cancel", "cancel requested"))
    label = "waits" if attempt.began is None else f"attempt {attempt.number}"
    return Lane(y=y, label=label, bars=bars, marks=marks, word=_word(attempt, scale))


def _wait(attempt: TimelineAttempt, scale: Scale) -> TimelineBar:
    until = attempt.began or attempt.ended or scale.now
    return scale.bar(attempt.waited_from, until, "fill-pending", f"waited {_spent(attempt.waited_from, until)}")


def _spent(begin: int, end: int) -> str:
    return duration(max(0, end - begin) / MICRO)


def _word(attempt: TimelineAttempt, scale: Scale) -> str:
    """How the attempt came out, in words: colours are not for everybody."""
    if attempt.ended is not None:
        said = WORDS.get(attempt.outcome, attempt.outcome)
        return said if attempt.began is None else f"{said}, {_spent(attempt.began, attempt.ended)}"
    if attempt.began is None:
        return f"waiting, {_spent(attempt.waited_from, scale.now)}"
    state = "ending" if attempt.asked_to_end is not None else "running"
    return f"{state}, {_spent(attempt.began, scale.now)}"
