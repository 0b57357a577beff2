"""What the overview shows, computed from a snapshot of the database and from the replay counters."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence

from msgspec import Struct
from prometheus_client import REGISTRY
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from semel.api_types import RemoteWorker
from semel.dashboard.overview.chart import Chart, Window, stacked_chart
from semel.dashboard.overview.queries import (
    MAX_COUNTED,
    Audience,
    DueRun,
    EndedRun,
    Failure,
    QuotaUse,
    RunningRun,
    Snapshot,
    StalledRun,
    StuckRun,
)
from semel.dashboard.quotas import QuotaBar, bars_of, used_part
from semel.runs.types import INTERNAL_QUEUE, MICRO, TERMINAL, Pause
from semel.service.api.views import worker_view
from semel.service.telemetry.metrics import FOLDER
from semel.service.webhooks.deliveries import FailingSubscription
from semel.types import moment

PARTS = ("attention", "figures", "chart", "running", "failures", "latency", "workers", "quotas")
"""The parts of the page that are updated live; each is a template in the folder overview."""
MAX_RUNNING = 12
MAX_RUNS_OF_WORKER = 6
MAX_WORKERS = 20
MAX_QUOTAS = 10
SILENT_FOR = 3600
"""Seconds for which a worker that sends no heartbeat any more is shown."""
PERCENTILES = (0.5, 0.95, 0.99)
STACK = ("SUCCEEDED", "FAILED", "CANCELLED", "RUNNING", "PENDING")
GOOD_REPLAY_RATE = 0.8
"""Above this rate idempotency works well, by the specification of idempotent POST."""
MIN_SUBMISSIONS = 100
"""Submissions before a low rate is a warning: fewer prove nothing."""
READ_COUNTERS_EVERY = 10.0
"""Seconds between two reads of the counters: each opens a file of every process."""
_CREATED, _REPLAYED = "runs_created_total", "runs_replayed_total"


class ReplayRate(Struct, frozen=True):
    """How many submissions were replays, which returned an existing run, and how many created one."""

    replayed: int
    created: int
    low: float | None = None
    """The rate below which the overview warns; None: never. A low rate is normal where clients seldom retry."""

    @property
    def rate(self) -> float | None:
        """The share of replays; None before the first submission."""
        total = self.replayed + self.created
        return self.replayed / total if total else None

    @property
    def verdict(self) -> str:
        """``good``, ``fair``, ``warning``, or empty before the first submission."""
        if self.rate is None:
            return ""
        if self.low is not None and self.replayed + self.created >= MIN_SUBMISSIONS and self.rate < self.low:
            return "warning"
        return "good" if self.rate > GOOD_REPLAY_RATE else "fair"


class ReplayCounter:
    """Reads the replay rate of all server processes from their metrics, at most every ten seconds."""

    def __init__(self, low: float | None) -> None:
        self._low = low
        self._latest = ReplayRate(0, 0, low)
        self._read_at = -READ_COUNTERS_EVERY

    async def latest(self) -> ReplayRate:
        """The rate since the server's start."""
        if time.monotonic() - self._read_at >= READ_COUNTERS_EVERY:
            self._read_at = time.monotonic()
            self._latest = await asyncio.to_thread(self._read)
        return self._latest

    def _read(self) -> ReplayRate:
        source: Collector = MultiProcessCollector(None) if FOLDER in os.environ else REGISTRY
        sums = {_CREATED: 0.0, _REPLAYED: 0.0}
        for metric in source.collect():
            for sample in metric.samples:
                if sample.name in sums:
                    sums[sample.name] += sample.value
        return ReplayRate(round(sums[_REPLAYED]), round(sums[_CREATED]), self._low)


class Count(Struct, frozen=True):
    """A count that stops at a maximum."""

    number: int
    more: bool = False

    @classmethod
    def of(cls, number: int) -> Count:
        """The count, up to ``MAX_COUNTED``."""
        return cls(min(number, MAX_COUNTED), number > MAX_COUNTED)


class Percentiles(Struct, frozen=True):
    """p50, p95 and p99 of a number of runs, in seconds."""

    label: str
    seconds: list[float | None]
    runs: int


class WorkerRow(Struct, frozen=True):
    """A worker, and the runs that it holds."""

    worker: RemoteWorker
    runs: list[RunningRun]
    more: int

    @property
    def state(self) -> str:
        """``silent``, ``draining`` or ``alive``."""
        return "silent" if not self.worker.alive else "draining" if self.worker.draining else "alive"


class FailingWebhook(Struct, frozen=True, kw_only=True):
    """A subscription that fails. Of its address only the host is shown: the rest may be secret."""

    id: str
    host: str
    disabled: bool
    retrying: int
    dead: int
    error: str


class QuotaRow(Struct, frozen=True):
    """A user's active runs, and the limit of which they use the largest share; None where they have none."""

    user: str
    active: int
    bar: QuotaBar | None


class OverviewView(Struct, frozen=True, kw_only=True):
    """Everything on the page."""

    window: Window
    since: str
    """The start of the window, as the list of runs takes it."""
    everybody: bool
    """Whether the runs of all users are shown, not only the caller's."""
    chart: Chart
    pending: Count
    running: Count
    oldest_due: DueRun | None
    ended: int
    sampled: bool
    """Whether only the newest of the runs that ended were read, which is enough for percentiles."""
    per_minute: float
    latency: list[Percentiles]
    replay_rate: ReplayRate | None
    lost: list[StuckRun]
    late: list[StuckRun]
    stalled: list[StalledRun]
    unknown_keys: Count
    exceeded: list[QuotaRow]
    """Users who have used up a limit that does not free itself when a run ends."""
    pauses: list[Pause]
    webhooks: list[FailingWebhook]
    running_runs: list[RunningRun]
    failures: list[Failure]
    workers: list[WorkerRow]
    silent: list[WorkerRow]
    """The workers that send no heartbeat any more."""
    quotas: list[QuotaRow]

    @property
    def is_calm(self) -> bool:
        """Whether nothing needs attention."""
        stuck = self.lost or self.late or self.stalled
        return not (stuck or self.unknown_keys.number or self.exceeded or self.pauses or self.webhooks or self.silent)


def build_view(
    snapshot: Snapshot,
    counts: Sequence[Mapping[str, int]],
    replay_rate: ReplayRate | None,
    unknown_keys: Count,
    *,
    audience: Audience,
    window: Window,
    now_us: int,
) -> OverviewView:
    """The page for these numbers; ``counts`` are the runs by status of each step of the window."""
    starts = window.starts(now_us)
    workers = _workers(snapshot, now_us - SILENT_FOR * MICRO, all_tenants=not audience.tenant)
    return OverviewView(
        window=window,
        since=moment(starts[0]).strftime("%Y-%m-%dT%H:%M"),
        everybody=audience.user is None,
        chart=stacked_chart(window, starts, counts, STACK),
        pending=Count.of(snapshot.pending),
        running=Count.of(snapshot.running),
        oldest_due=snapshot.oldest_due,
        ended=len(snapshot.ended),
        sampled=bool(snapshot.sampled),
        per_minute=_per_minute(snapshot, starts, window),
        latency=_latency(snapshot.ended),
        replay_rate=replay_rate,
        lost=snapshot.lost,
        late=snapshot.late,
        stalled=snapshot.stalled,
        unknown_keys=unknown_keys,
        exceeded=[row for each in snapshot.quotas if (row := _exceeded(each)) is not None],
        pauses=snapshot.pauses,
        webhooks=[_failing(each) for each in snapshot.webhooks],
        running_runs=snapshot.running_runs[:MAX_RUNNING],
        failures=snapshot.failures,
        workers=workers[:MAX_WORKERS],
        silent=[each for each in workers if each.state == "silent"],
        quotas=_quotas(snapshot.quotas),
    )


def _per_minute(snapshot: Snapshot, starts: Sequence[int], window: Window) -> float:
    """Runs that ended per minute, over the window, or over the time that the sample of a status covers.

    The current step counts as a whole one, so that the number does not move while nothing happens.
    """
    end = starts[-1] + window.step * MICRO
    rate = 0.0
    for status in TERMINAL:
        times = [each.finished_us for each in snapshot.ended if each.status == status]
        begin = min(times, default=starts[0]) if status in snapshot.sampled else starts[0]
        rate += len(times) / max(1.0, (end - begin) / MICRO / 60)
    return round(rate, 2)


def _latency(ended: Sequence[EndedRun]) -> list[Percentiles]:
    lags = sorted(lag for each in ended if (lag := each.lag) is not None)
    seconds = sorted(took for each in ended if each.status != "CANCELLED" and (took := each.seconds) is not None)
    return [
        Percentiles(label, [percentile(values, part) for part in PERCENTILES], len(values))
        for label, values in (("Queue lag", lags), ("Duration", seconds))
    ]


def percentile(values: Sequence[float], part: float) -> float | None:
    """The smallest of the sorted values that is not below that share of them (nearest rank)."""
    if not values:
        return None
    rank = -int(-part * len(values) // 1)  # rounded up
    return values[max(0, min(len(values), rank) - 1)]


def _workers(snapshot: Snapshot, since_us: int, *, all_tenants: bool) -> list[WorkerRow]:
    """Silent workers first, those seen since then. Workers inside servers, for the service's own work, are left out."""
    by_worker: dict[str, list[RunningRun]] = {}
    for run in snapshot.running_runs:
        by_worker.setdefault(run.worker, []).append(run)
    rows = []
    for worker in snapshot.workers:
        if worker.queues == [INTERNAL_QUEUE] or (worker.seen_us < since_us and not worker.alive):
            continue
        held = by_worker.get(worker.id, [])
        count = sum(worker.holds.values()) if all_tenants else len(held)
        shown = held[:MAX_RUNS_OF_WORKER]
        rows.append(WorkerRow(worker_view(worker, whole=all_tenants), shown, max(0, count - len(shown))))
    return sorted(rows, key=lambda each: (each.state == "alive", each.worker.name, each.worker.started_at))


def _quotas(uses: Sequence[QuotaUse]) -> list[QuotaRow]:
    """The fullest quotas first, then users without a quota by their active runs."""
    rows = [_quota_row(each) for each in uses if each.quota is not None or each.active]
    rows.sort(key=lambda row: (-(used_part(row.bar) if row.bar else 0.0), -row.active, row.user))
    return rows[:MAX_QUOTAS]


def _quota_row(use: QuotaUse) -> QuotaRow:
    bars = [] if use.usage is None else bars_of(use.quota, use.usage)
    limited = [bar for bar in bars if bar.part is not None]
    return QuotaRow(use.user, use.active, max(limited, key=used_part, default=None))


def _exceeded(use: QuotaUse) -> QuotaRow | None:
    """The limit that the user exceeds, or has used up; the limit of active runs may be used up at any time."""
    bars = [] if use.usage is None else bars_of(use.quota, use.usage)
    spent = [bar for bar in bars if bar.state == "over" or (bar.state == "full" and bar is not bars[0])]
    return QuotaRow(use.user, use.active, max(spent, key=used_part)) if spent else None


def _failing(each: FailingSubscription) -> FailingWebhook:
    subscription = each.subscription
    return FailingWebhook(
        id=subscription.id,
        host=subscription.host,
        disabled=subscription.disabled_us is not None,
        retrying=each.retrying,
        dead=each.dead,
        error=each.last_error,
    )
