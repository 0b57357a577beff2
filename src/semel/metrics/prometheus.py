"""Metrics for Prometheus, through prometheus-client: ``Once(url, on_event=PrometheusMetrics())``, and for runs
``app.on_event(RunMetrics())``.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable, Iterator
from threading import Lock
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from semel.db.database import missing
from semel.errors import InvalidRequest
from semel.metrics.names import (
    BUCKETS,
    COUNTED,
    MEANINGS,
    ROUTER_MEANINGS,
    RUN_BUCKETS,
    RUN_MEANINGS,
    SAMPLE_EVERY,
    interval,
)
from semel.once.stats import MOST_SCOPES, Event, Scopes

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, start_http_server
    from prometheus_client.core import GaugeMetricFamily, Metric
    from prometheus_client.multiprocess import MultiProcessCollector
    from prometheus_client.registry import Collector
except ModuleNotFoundError as error:
    raise missing("prometheus", error) from error

if TYPE_CHECKING:
    from semel.runs.hooks import RunEvent

PLACE = ("door", "scope")


class PrometheusMetrics:
    """A hook that counts in a registry. Hooks on one registry add to the same metrics.

    Scopes beyond ``most_scopes`` are counted together. With ``sample_every=None`` it does not hear of the store.
    """

    def __init__(
        self,
        registry: CollectorRegistry = REGISTRY,
        sample_every: float | None = SAMPLE_EVERY,
        *,
        most_scopes: int = MOST_SCOPES,
    ) -> None:
        self.sample_every = interval(sample_every)
        self._to = _instruments(registry)
        self._scopes = Scopes(most_scopes)

    def __call__(self, event: Event) -> None:
        """Count it."""
        match event.name:
            case "cleanup":
                self._to.cleanup.inc(event.value)
            case "store":
                self._to.store.labels(event.reason).observe(event.value)
            case "held":
                self._to.held.labels(event.reason).set(event.value)
            case "miss":
                self._to.counters["miss"].labels(event.door, self._scopes.known(event.label), event.reason).inc()
            case name if name in COUNTED:
                self._to.counters[name].labels(event.door, self._scopes.known(event.label)).inc()


class RouterMetrics:
    """A hook for messages alone, under the names that routers use: ``router_idempotency_hit_total{key_type}`` and
    ``router_idempotency_miss_total{key_type, reason}``. Hooks on one registry add to the same metrics.

    A message's id is no label, since there is no end of them; the log has it.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY, *, most_key_types: int = MOST_SCOPES) -> None:
        with _lock:
            found = _known_of_routers.get(registry)
            if found is None:
                found = _known_of_routers[registry] = {
                    "hit": Counter("router_idempotency_hit", ROUTER_MEANINGS["hit"], ("key_type",), registry=registry),
                    "miss": Counter(
                        "router_idempotency_miss", ROUTER_MEANINGS["miss"], ("key_type", "reason"), registry=registry
                    ),
                }
        self._to = found
        self._key_types = Scopes(most_key_types)

    def __call__(self, event: Event) -> None:
        """Count it."""
        if event.door != "message" or event.name not in self._to:
            return
        key_type = self._key_types.known(event.label)
        labels = (key_type, event.reason) if event.name == "miss" else (key_type,)
        self._to[event.name].labels(*labels).inc()


class RunMetrics:
    """A hook for runs: counts what happens to them in this process. Hooks on one registry add to the same metrics."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        with _lock:
            found = _known_of_runs.get(registry)
            if found is None:
                found = _known_of_runs[registry] = _RunInstruments(registry)
        self._to = found

    def __call__(self, event: RunEvent) -> None:
        """Count it."""
        match event.kind:
            case "created" | "replayed" | "refused" | "retried" as kind:
                self._to.counters[f"runs_{kind}"].labels(event.model).inc(event.count)
            case "started":
                self._to.lag.labels(event.model).observe(event.seconds)
            case "ended":
                self._to.counters[f"runs_{event.status.lower()}"].labels(event.model).inc()
                self._to.duration.labels(event.model, event.status).observe(event.seconds)
            case "stuck":
                self._to.stuck.inc(event.count)


def expose(place: str) -> None:
    """Tell at ``http://HOST:PORT/metrics``, for this process's time, what it counts; ``place`` is ``[HOST:]PORT``."""
    host, _, port = place.rpartition(":")
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise InvalidRequest(f"metrics are told at a port, as 9101 or 0.0.0.0:9101, not at {place!r}")
    try:
        start_http_server(int(port), host.strip("[]") or "127.0.0.1")
    except OSError as error:
        raise InvalidRequest(f"metrics cannot be told at {place}: {error.strerror or error}") from error


class _RunInstruments:
    """The metrics of runs in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counted = ("created", "replayed", "refused", "succeeded", "failed", "cancelled", "retried")
        self.counters = {
            name: Counter(name, RUN_MEANINGS[name], ("model",), registry=registry)
            for name in (f"runs_{each}" for each in counted)
        }
        self.duration = Histogram(
            "run_duration_seconds",
            RUN_MEANINGS["run_duration_seconds"],
            ("model", "status"),
            buckets=RUN_BUCKETS,
            registry=registry,
        )
        self.lag = Histogram(
            "queue_lag_seconds",
            RUN_MEANINGS["queue_lag_seconds"],
            ("model",),
            buckets=RUN_BUCKETS,
            registry=registry,
        )
        self.stuck = Counter("stuck_runs_detected", RUN_MEANINGS["stuck_runs_detected"], registry=registry)


class ReplayRatio(Collector):
    """The gauge ``idempotency_replay_ratio``, computed when it is asked for, so that it is never a mean of means.

    :class:`PrometheusMetrics` brings it along. In prometheus-client's multiprocess mode the registry that is scraped
    is another one: beside ``MultiProcessCollector(registry)`` say ``ReplayRatio(registry)``, and it is that of all
    processes together.
    """

    def __init__(self, registry: CollectorRegistry, counted: Iterable[Collector] | None = None) -> None:
        if counted is None:
            counted = [MultiProcessCollector(None)]  # type: ignore[no-untyped-call]
        self._counted = list(counted)
        registry.register(self)

    def describe(self) -> list[Metric]:
        """Its name, for the registry."""
        return [GaugeMetricFamily("idempotency_replay_ratio", MEANINGS["replay_ratio"], labels=PLACE)]

    def collect(self) -> Iterator[Metric]:
        """The ratio of every door and scope."""
        (ratio,) = self.describe()
        hits: Tally[tuple[str, ...]] = Tally()
        calls: Tally[tuple[str, ...]] = Tally()
        for metric in (metric for source in self._counted for metric in source.collect()):
            for sample in metric.samples:
                if sample.name in ("idempotency_hit_total", "idempotency_miss_total"):
                    place = tuple(sample.labels[label] for label in PLACE)
                    calls[place] += sample.value  # type: ignore[assignment]  # a count, kept as a float
                    hits[place] += sample.value if metric.name == "idempotency_hit" else 0  # type: ignore[assignment]
        for place, number in calls.items():
            ratio.add_sample(ratio.name, dict(zip(PLACE, place, strict=True)), hits[place] / number)
        yield ratio


class _Instruments:
    """The metrics of one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.counters = {
            event: Counter(
                f"idempotency_{name}",
                MEANINGS[name],
                (*PLACE, "reason") if event == "miss" else PLACE,
                registry=registry,
            )
            for event, name in COUNTED.items()
        }
        self.cleanup = Counter("idempotency_cleanup", MEANINGS["cleanup"], registry=registry)
        self.store = Histogram(
            "idempotency_store_seconds", MEANINGS["store"], ("verb",), buckets=BUCKETS, registry=registry
        )
        self.held = Gauge(
            "idempotency_keys_held",
            MEANINGS["keys_held"],
            ("state",),
            multiprocess_mode="mostrecent",  # every process looks into the same store
            registry=registry,
        )
        ReplayRatio(registry, [self.counters["hit"], self.counters["miss"]])


_known: WeakKeyDictionary[CollectorRegistry, _Instruments] = WeakKeyDictionary()
_known_of_routers: WeakKeyDictionary[CollectorRegistry, dict[str, Counter]] = WeakKeyDictionary()
_known_of_runs: WeakKeyDictionary[CollectorRegistry, _RunInstruments] = WeakKeyDictionary()
_lock = Lock()


def _instruments(registry: CollectorRegistry) -> _Instruments:
    """Those of the registry: a name can be registered once."""
    with _lock:
        found = _known.get(registry)
        if found is None:
            found = _known[registry] = _Instruments(registry)
        return found
