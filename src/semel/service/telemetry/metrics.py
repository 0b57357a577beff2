"""The metrics of ``/metrics``: of all processes of a server together, and of their database.

``semel serve`` gives its processes a folder (prometheus-client's multiprocess mode), in which each of them counts; the
one that is scraped adds up. A mounted service counts in its own process.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector

from semel.errors import SemelError
from semel.metrics.prometheus import ReplayRatio, RunMetrics
from semel.runs.store import queries
from semel.runs.types import INTERNAL_QUEUE

if TYPE_CHECKING:
    from semel.runs.store import RunStore

FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""prometheus-client's variable for the folder."""
FRESH = 5.0
"""Seconds for which the values of the database are cached."""
TIMEOUT = 3.0
"""Seconds to wait for the database; the other metrics are returned without it."""
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@cache
def run_metrics() -> RunMetrics:
    """The hook that counts what happens to runs in this process."""
    return RunMetrics()


def mark_dead(pid: int) -> None:
    """Drop the gauges of a process that has exited. Its counters stay."""
    if FOLDER in os.environ:
        mark_process_dead(pid)


class HttpMeters:
    """The HTTP metrics of this process."""

    def __init__(self) -> None:
        self.requests = Counter("semel_http_requests", "HTTP requests that were handled", ("method", "route", "status"))
        self.seconds = Histogram(
            "semel_http_request_seconds", "Seconds until the end of the response", ("method", "route"), buckets=BUCKETS
        )
        self.in_flight = Gauge(
            "semel_http_requests_in_flight", "HTTP requests in progress", multiprocess_mode="livesum"
        )

    def begin(self) -> None:
        """Count a request that has begun."""
        self.in_flight.inc()

    def end(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request that has ended. Unknown methods are counted together, to bound the number of labels."""
        method = method if method in _METHODS else "(other)"
        self.in_flight.dec()
        self.requests.labels(method, route, str(status)).inc()
        self.seconds.labels(method, route).observe(seconds)


_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


@cache
def http_meters() -> HttpMeters:
    """The HTTP metrics, created once: a metric can be registered only once in a process."""
    return HttpMeters()


_MEANINGS = {
    "semel_database_up": "1 if the database responds, 0 if not",
    "runs_pending": "Pending runs, due or not",
    "runs_running": "Runs in progress",
    "runs_stalled": "Runs whose worker is alive but whose progress has stopped",
    "runs_oldest_pending_seconds": "Seconds for which the oldest due run has waited",
    "workers_alive": "Workers with a recent heartbeat, except those inside servers",
}
"""The gauges that are read from the database."""


class MetricsPage:
    """What ``/metrics`` shows."""

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self._reading = asyncio.Lock()
        self._read_at = -FRESH
        self._backlog: list[Metric] = []

    async def render(self) -> bytes:
        """All metrics, in Prometheus' text format."""
        backlog = await self._fresh()
        return await asyncio.to_thread(_render, backlog)

    async def _fresh(self) -> list[Metric]:
        async with self._reading:
            if time.monotonic() - self._read_at >= FRESH:
                self._backlog = await self._read()
                self._read_at = time.monotonic()
        return self._backlog

    async def _read(self) -> list[Metric]:
        try:
            async with asyncio.timeout(TIMEOUT):
                backlog = await self._store.read(queries.backlog, self._store.statement_context)
                workers = await self._store.read(queries.list_workers, self._store.statement_context)
        except (SemelError, TimeoutError):
            return [GaugeMetricFamily("semel_database_up", _MEANINGS["semel_database_up"], 0)]
        values = {
            "semel_database_up": 1,
            "runs_pending": backlog.pending,
            "runs_running": backlog.running,
            "runs_stalled": backlog.stalled,
            "runs_oldest_pending_seconds": backlog.oldest_wait,
            "workers_alive": sum(each.alive for each in workers if each.queues != [INTERNAL_QUEUE]),
        }
        return [GaugeMetricFamily(name, _MEANINGS[name], value) for name, value in values.items()]


class _Fixed(Collector):
    """Metrics that were collected already."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return iter(self._metrics)


def _render(backlog: list[Metric]) -> bytes:
    several = FOLDER in os.environ
    counted: Collector = MultiProcessCollector(None) if several else REGISTRY
    metrics = list(counted.collect())
    registry = CollectorRegistry()
    registry.register(_Fixed([*metrics, _replay_ratio(metrics), *backlog]))
    if several:
        ReplayRatio(registry, [_Fixed(metrics)])
    return generate_latest(registry)


def _replay_ratio(metrics: list[Metric]) -> Metric:
    """The share of submissions that found an existing run, over all processes."""
    totals = {"runs_created_total": 0.0, "runs_replayed_total": 0.0}
    for sample in (sample for metric in metrics for sample in metric.samples):
        if sample.name in totals:
            totals[sample.name] += sample.value
    found, all_of_them = totals["runs_replayed_total"], sum(totals.values())
    meaning = "Share of submissions that found an existing run, since the start"
    return GaugeMetricFamily("runs_replay_ratio", meaning, found / all_of_them if all_of_them else 0.0)
