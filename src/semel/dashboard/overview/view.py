"""What was asked of the database, put together as the overview shows it. Templates draw it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from semel.api_types import RemoteWorker
from semel.dashboard import quota_bars
from semel.dashboard.overview import chart as overview_chart
from semel.dashboard.overview.chart import Chart, percentile
from semel.dashboard.overview.hits import Hits
from semel.dashboard.overview.queries import (
    MOST_COUNTED,
    Audience,
    EndedRun,
    Failure,
    QuotaUse,
    RunningRun,
    Snapshot,
    Stalled,
    StuckRun,
)
from semel.dashboard.overview.windows import Window
from semel.runs.types import INTERNAL_QUEUE, MICRO, TERMINAL
from semel.service.api.views import worker_view

PARTS = ("figures", "chart", "stuck", "running", "failures", "latency", "workers", "uses")
"""The parts of the page that change; each is a template of that name in the folder overview."""
RUNNING = 12
"""Running runs that are shown."""
BUSY = 6
"""Runs that are named of those that a worker holds."""
BARS = 10
"""Users whose quota is shown."""
PERCENTILES = (0.5, 0.95, 0.99)
STACK = ("SUCCEEDED", "FAILED", "CANCELLED", "RUNNING", "PENDING")


class Count(Struct, frozen=True):
    """A number, or that there are at least so many."""

    number: int
    more: bool = False

    @classmethod
    def of(cls, number: int) -> Count:
        """As it was counted, up to the most."""
        return cls(min(number, MOST_COUNTED), number > MOST_COUNTED)


class Percentiles(Struct, frozen=True):
    """Percentiles of something, in seconds."""

    label: str
    values: list[float | None]
    of: int


class WorkerRow(Struct, frozen=True):
    """A worker, and the runs of ours that it holds."""

    worker: RemoteWorker
    runs: list[RunningRun]
    more: int

    @property
    def state(self) -> str:
        """In a word."""
        return "silent" if not self.worker.alive else "draining" if self.worker.draining else "alive"


class LimitBar(Struct, frozen=True):
    """How much of their quota somebody uses: of the limit that is used the most."""

    user: str
    active: int
    part: float | None
    text: str
    level: str


class OverviewView(Struct, frozen=True, kw_only=True):
    """Everything on the page."""

    window: Window
    everybody: bool
    chart: Chart
    pending: Count
    running: Count
    oldest_due_us: int | None
    ended: int
    sampled: bool
    """Not all that ended in the window were looked at: the newest are enough for percentiles."""
    per_minute: float
    spreads: list[Percentiles]
    hits: Hits | None
    stuck: list[StuckRun]
    late: list[StuckRun]
    stalled: list[Stalled]
    held: list[RunningRun]
    failures: list[Failure]
    workers: list[WorkerRow]
    bars: list[LimitBar]


def viewed(
    look: Snapshot,
    counts: Sequence[Mapping[str, int]],
    hits: Hits | None,
    *,
    whose: Audience,
    window: Window,
    now_us: int,
) -> OverviewView:
    """What was asked, as it is shown."""
    starts = window.starts(now_us)
    return OverviewView(
        window=window,
        everybody=whose.user is None,
        chart=overview_chart.stacked(window, starts, counts, STACK),
        pending=Count.of(look.pending),
        running=Count.of(look.running),
        oldest_due_us=look.oldest_due_us,
        ended=len(look.ended),
        sampled=bool(look.cut),
        per_minute=_per_minute(look, starts, window),
        spreads=_spreads(look.ended),
        hits=hits,
        stuck=look.stuck,
        late=look.late,
        stalled=look.stalled,
        held=look.held[:RUNNING],
        failures=look.failures,
        workers=_benches(look, whole=not whose.tenant),
        bars=_bars(look.uses),
    )


def _per_minute(look: Snapshot, starts: Sequence[int], window: Window) -> float:
    """Runs that ended in a minute: of each end over the whole window, or as far back as it was looked at.

    The step that is not over counts as a whole one: the number is to stand still while nothing happens.
    """
    end = starts[-1] + window.step * MICRO
    rate = 0.0
    for status in TERMINAL:
        times = [each.finished_us for each in look.ended if each.status == status]
        begin = min(times, default=starts[0]) if status in look.cut else starts[0]
        rate += len(times) / max(1.0, (end - begin) / MICRO / 60)
    return round(rate, 2)


def _spreads(ended: Sequence[EndedRun]) -> list[Percentiles]:
    lags = sorted(lag for each in ended if (lag := each.lag) is not None)
    seconds = sorted(took for each in ended if each.status != "CANCELLED" and (took := each.seconds) is not None)
    return [
        Percentiles(label, [percentile(values, part) for part in PERCENTILES], len(values))
        for label, values in (("Queue lag", lags), ("Duration", seconds))
    ]


def _benches(look: Snapshot, *, whole: bool) -> list[WorkerRow]:
    """The workers, the silent ones first. Those inside of servers do the service's own work, and are not shown."""
    by_worker: dict[str, list[RunningRun]] = {}
    for each in look.held:
        by_worker.setdefault(each.worker, []).append(each)
    benches = []
    for worker in look.workers:
        if worker.queues == [INTERNAL_QUEUE]:
            continue
        held = by_worker.get(worker.id, [])
        count = sum(worker.holds.values()) if whole else len(held)
        benches.append(WorkerRow(worker_view(worker, whole=whole), held[:BUSY], max(0, count - len(held[:BUSY]))))
    return sorted(benches, key=lambda each: (each.state == "alive", each.worker.name, each.worker.started_at))


def _bars(uses: Sequence[QuotaUse]) -> list[LimitBar]:
    """The most used first; then those without a quota who are at work, by their active runs."""
    shown = [_bar(each) for each in uses if each.quota is not None or each.active]
    every = sorted(shown, key=lambda bar: (-(bar.part or 0.0), -bar.active, bar.user))
    return every[:BARS]


def _bar(use: QuotaUse) -> LimitBar:
    every = [] if use.usage is None else quota_bars.bars(use.quota, use.usage)
    limits = [(bar.part, bar) for bar in every if bar.part is not None]
    if not limits:
        return LimitBar(use.user, use.active, None, "no limit", "")
    part, bar = max(limits, key=lambda each: each[0])
    return LimitBar(use.user, use.active, part, f"{bar.label}: {bar.text}", bar.state)
