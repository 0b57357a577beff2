"""Metrics for Prometheus, through prometheus-client: ``Once(url, on_event=PrometheusMetrics())``, and for runs
``app.on_event(RunMetrics())``.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar
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

T = TypeVar("T")
PLACE = ("door", "scope")


class PrometheusMetrics:
    """A hook that counts events in a registry. Hooks with the same registry share their metrics.

    Scopes beyond ``most_scopes`` are counted together. ``sample_every=None`` turns off the metrics of the store's size.
    """

    def __init__(
        self,
        registry: CollectorRegistry = REGISTRY,
        sample_every: float | None = SAMPLE_EVERY,
        *,
        most_scopes: int = MOST_SCOPES,
    ) -> None:
        self.sample_every = interval(sample_every)
        self._to = _shared(registry, _KeyInstruments)
        self._scopes = Scopes(most_scopes)

    def __call__(self, event: Event) -> None:
        """Count the event."""
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
    """A hook that counts messages only, under the names of routers: ``router_idempotency_hit_total{key_type}`` and
    ``router_idempotency_miss_total{key_type, reason}``. Hooks with the same registry share their metrics.

    The id of a message is not a label, as there is no limit to their number; it is logged.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY, *, most_key_types: int = MOST_SCOPES) -> None:
        self._to = _shared(registry, _router_counters)
        self._key_types = Scopes(most_key_types)

    def __call__(self, event: Event) -> None:
        """Count the event."""
        if event.door != "message" or event.name not in self._to:
            return
        key_type = self._key_types.known(event.label)
        labels = (key_type, event.reason) if event.name == "miss" else (key_type,)
        self._to[event.name].labels(*labels).inc()


class RunMetrics:
    """A hook that counts the runs of this process. Hooks with the same registry share their metrics."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._to = _shared(registry, _RunInstruments)

    def __call__(self, event: RunEvent) -> None:
        """Count the event."""
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
    """Serve the metrics at ``http://HOST:PORT/metrics`` while this process lives; ``place`` is ``[HOST:]PORT``."""
    host, _, port = place.rpartition(":")
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise InvalidRequest(f"metrics are served at a port such as 9101 or 0.0.0.0:9101, not at {place!r}")
    try:
        start_http_server(int(port), host.strip("[]") or "127.0.0.1")
    except OSError as error:
        raise InvalidRequest(f"metrics cannot be served at {place}: {error.strerror or error}") from error


class _RunInstruments:
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
    """The gauge ``idempotency_replay_ratio``, computed from the counters when it is scraped.

    :class:`PrometheusMetrics` registers it. In prometheus-client's multiprocess mode another registry is scraped: call
    ``ReplayRatio(registry)`` beside ``MultiProcessCollector(registry)`` to get the ratio over all processes.
    """

    def __init__(self, registry: CollectorRegistry, counted: Iterable[Collector] | None = None) -> None:
        if counted is None:
            counted = [MultiProcessCollector(None)]
        self._counted = list(counted)
        registry.register(self)

    def describe(self) -> list[Metric]:
        """The metric without samples."""
        return [GaugeMetricFamily("idempotency_replay_ratio", MEANINGS["replay_ratio"], labels=PLACE)]

    def collect(self) -> Iterator[Metric]:
        """The ratio for each door and scope."""
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


class _KeyInstruments:
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
            multiprocess_mode="mostrecent",  # all processes sample the same store
            registry=registry,
        )
        ReplayRatio(registry, [self.counters["hit"], self.counters["miss"]])


def _router_counters(registry: CollectorRegistry) -> dict[str, Counter]:
    labels = {"hit": ("key_type",), "miss": ("key_type", "reason")}
    return {
        event: Counter(f"router_idempotency_{event}", ROUTER_MEANINGS[event], names, registry=registry)
        for event, names in labels.items()
    }


_made: WeakKeyDictionary[CollectorRegistry, dict[Any, Any]] = WeakKeyDictionary()
_lock = Lock()


def _shared(registry: CollectorRegistry, make: Callable[[CollectorRegistry], T]) -> T:
    """The metrics of the registry, made once, as a registry takes each name once."""
    with _lock:
        made = _made.setdefault(registry, {})
        if make not in made:
            made[make] = make(registry)
        found: T = made[make]
        return found
