"""The metrics that the hooks for Prometheus, OpenTelemetry and statsd make: their names, kinds and labels."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry, generate_latest

from golden.comparing import compare
from golden.exposition import families
from semel import Event
from semel.metrics.opentelemetry import OpenTelemetryMetrics
from semel.metrics.prometheus import PrometheusMetrics, RouterMetrics, RunMetrics
from semel.metrics.statsd import StatsdMetrics

EVENTS = (
    Event("hit", door="http", label="orders"),
    Event("miss", reason="absent", door="http", label="orders"),
    Event("conflict", door="http", label="orders"),
    Event("collision", door="http", label="orders"),
    Event("unknown", door="http", label="orders"),
    Event("hit", door="message", label="orders"),
    Event("miss", reason="expired", door="message", label="orders"),
    Event("cleanup", value=3),
    Event("store", reason="claim", value=0.002),
    Event("held", reason="completed", value=5),
)
RUN_EVENTS = (
    *(("created", ""), ("replayed", ""), ("refused", ""), ("started", ""), ("retried", ""), ("stuck", "")),
    *(("ended", status) for status in ("SUCCEEDED", "FAILED", "CANCELLED")),
)


def test_the_metrics_of_prometheus_stay() -> None:
    lines: list[str] = []
    for kind in (PrometheusMetrics, RouterMetrics, RunMetrics):
        registry = CollectorRegistry()
        hook: Callable[[Any], None] = kind(registry)
        for event in _events_of_runs() if kind is RunMetrics else EVENTS:
            hook(event)
        lines += [f"== {kind.__name__}", *families(generate_latest(registry).decode()), ""]
    compare("metrics-prometheus.txt", "\n".join(lines))


def _events_of_runs() -> list[Any]:
    return [SimpleNamespace(kind=kind, model="add", status=status, seconds=0.5, count=1) for kind, status in RUN_EVENTS]


def test_the_metrics_of_opentelemetry_stay() -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    hook = OpenTelemetryMetrics(provider)
    for event in EVENTS:
        hook(event)
    found = reader.get_metrics_data()
    assert found is not None
    lines = []
    for metric in (each for part in found.resource_metrics for scope in part.scope_metrics for each in scope.metrics):
        labels = sorted({label for point in metric.data.data_points for label in point.attributes or ()})
        lines.append(f"{type(metric.data).__name__} {metric.name} [{metric.unit}] {{{', '.join(labels)}}}")
    provider.shutdown()
    compare("metrics-opentelemetry.txt", "\n".join(sorted(lines)))


class Tagged:
    """A client whose methods take tags, as Datadog's."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    def increment(self, name: str, value: float = 1, tags: list[str] | None = None) -> None:
        self.sent.append(f"increment {name} {tags}")

    def timing(self, name: str, value: float, tags: list[str] | None = None) -> None:
        self.sent.append(f"timing {name} {tags}")

    def gauge(self, name: str, value: float, tags: list[str] | None = None) -> None:
        self.sent.append(f"gauge {name} {tags}")


class Plain:
    """A client without tags."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    def incr(self, name: str, count: float = 1) -> None:
        self.sent.append(f"incr {name}")

    def timing(self, name: str, delta: float) -> None:
        self.sent.append(f"timing {name}")

    def gauge(self, name: str, value: float) -> None:
        self.sent.append(f"gauge {name}")


def test_the_metrics_of_statsd_stay() -> None:
    lines: list[str] = []
    for client, by_scope in ((Tagged(), False), (Plain(), False), (Plain(), True)):
        hook = StatsdMetrics(client, by_scope=by_scope)
        for event in EVENTS:
            hook(event)
        lines += [f"== {type(client).__name__}, by_scope={by_scope}", *client.sent, ""]
    compare("metrics-statsd.txt", "\n".join(lines))
