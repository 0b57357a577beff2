"""Metrics and logs: what the hooks for Prometheus, OpenTelemetry and statsd tell, what is logged, what is warned of.

Everything is counted through real use: requests at both HTTP doors, functions, messages.
"""

import asyncio
import gc
import json
import logging
import re
import socket
import subprocess
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from itertools import count
from pathlib import Path
from textwrap import dedent
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, MetricsData
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from semel import AsyncOnce, Event, Granted, InProgress, InvalidRequest, Once, OutcomeUnknown, Policy
from semel.cli import main as semel_command
from semel.http import asgi, wsgi
from semel.metrics.opentelemetry import OpenTelemetryMetrics
from semel.metrics.prometheus import PrometheusMetrics, ReplayRatio
from semel.metrics.statsd import StatsdMetrics
from semel.once.stats import MOST_SCOPES, OTHERS, StatsCounter
from semel.once.stores.memory import MemoryStore
from semel.testing import FakeClock
from support.databases import KINDS, SHARED_KINDS
from support.programs import Program, outcome
from support.waiting import eventually

PATIENCE = 60
"""Seconds after which something that should have happened counts as hanging."""

SECRET = "4111-1111-1111-1111"  # in every body and value, never in a log or a metric


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    """An empty store of the kind that the test is parametrised with: what it holds is counted."""
    kind: str = request.param
    if kind == "memory":
        return "memory://"
    found: str = request.getfixturevalue(f"{kind}_url")
    if kind == "postgres":
        assert semel_command(["migrate", found]) == 0
    return found


on_all_stores = pytest.mark.parametrize("url", KINDS, indirect=True, ids=KINDS)
on_shared_stores = pytest.mark.parametrize("url", SHARED_KINDS, indirect=True, ids=SHARED_KINDS)


# -- two doors, one story --------------------------------------------------------------------------------------------


class AsgiService:
    """A service behind the ASGI door, in a loop of its own, and its client."""

    def __init__(self, target: Any = "memory://", *, clock: FakeClock | None = None, hook: Any = None, **options: Any):
        self._loop = asyncio.Runner()
        low = options.pop("low_replay_rate", None)
        self.once = AsyncOnce(target, clock=clock, policy=Policy.intake(), on_event=hook, low_replay_rate=low)
        door = asgi.IdempotencyMiddleware(self._app, self.once, **{"scope": "items", **options})
        self._client = httpx.AsyncClient(transport=httpx.ASGITransport(door), base_url="http://service")

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        if scope["path"] == "/again":
            inner = await self._post(
                scope["path"], dict(scope["headers"])[b"idempotency-key"].decode(), message["body"]
            )
            assert inner.status_code == 409
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": message["body"]})

    async def _post(self, path: str, key: str, body: bytes) -> httpx.Response:
        return await self._client.post(path, headers={"Idempotency-Key": key}, content=body)

    def run(self, work: Awaitable[Any]) -> Any:
        async def done() -> Any:
            return await work

        return self._loop.run(done())

    def post(self, key: str, body: str = SECRET, path: str = "/items") -> int:
        response: httpx.Response = self.run(self._post(path, key, body.encode()))
        return response.status_code

    def close(self) -> None:
        self.run(self._client.aclose())
        self.run(self.once.close())
        self._loop.close()


class WsgiService:
    """The same behind the WSGI door."""

    def __init__(self, target: Any = "memory://", *, clock: FakeClock | None = None, hook: Any = None, **options: Any):
        low = options.pop("low_replay_rate", None)
        self.once = Once(target, clock=clock, policy=Policy.intake(), on_event=hook, low_replay_rate=low)
        door = wsgi.IdempotencyMiddleware(self._app, self.once, **{"scope": "items", **options})
        self._client = httpx.Client(transport=httpx.WSGITransport(door), base_url="http://service")

    def _app(self, environ: dict[str, Any], start_response: Any) -> list[bytes]:
        body = environ["wsgi.input"].read()
        if environ["PATH_INFO"] == "/again":
            assert self.post(environ["HTTP_IDEMPOTENCY_KEY"], body.decode(), "/again") == 409
        start_response("201 Created", [])
        return [body]

    def run(self, answer: Any) -> Any:
        return answer

    def post(self, key: str, body: str = SECRET, path: str = "/items") -> int:
        return self._client.post(path, headers={"Idempotency-Key": key}, content=body.encode()).status_code

    def close(self) -> None:
        self._client.close()
        self.once.close()


Service = AsgiService | WsgiService
DOORS: dict[str, type[Service]] = {"asgi": AsgiService, "wsgi": WsgiService}


@pytest.fixture(params=DOORS)
def open_service(request: pytest.FixtureRequest) -> Iterator[Callable[..., Service]]:
    """Makes a service behind the door of the test's parameter."""
    opened: list[Service] = []

    def open_one(*args: Any, **options: Any) -> Service:
        opened.append(DOORS[request.param](*args, **options))
        return opened[-1]

    yield open_one
    for service in opened:
        service.close()


def tell_story(service: Service, clock: FakeClock) -> None:
    """Everything that can happen to the key of a request."""
    assert service.post("short") == 201
    clock.advance(3601)
    assert [service.post(key) for key in ("first", "second", "first", "first", "short")] == [201] * 5
    assert service.post("first", "another body") == 409
    assert service.post("nested", path="/again") == 201
    service.run(service.once.claim("vanished", scope="items", lease=10, on_crash="unknown"))
    clock.advance(11)
    assert service.post("vanished") == 409
    clock.advance(3601)
    assert service.run(service.once.purge()) == 5


STORY = {
    ("hit", ""): 2,
    ("miss", "absent"): 4,
    ("miss", "expired"): 1,
    ("conflict", ""): 1,
    ("processing_collision", ""): 1,
    ("unknown", ""): 1,
}
"""What the story adds up to at the HTTP door."""
STORY_RATIO = 2 / 7


def total(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"idempotency_{name}", labels)


# -- Prometheus ------------------------------------------------------------------------------------------------------


def test_prometheus_counts_what_happens_to_the_keys_of_requests(open_service: Callable[..., Service]) -> None:
    clock, registry = FakeClock(), CollectorRegistry()
    tell_story(open_service(clock=clock, hook=PrometheusMetrics(registry), name="intake"), clock)
    for (name, reason), number in STORY.items():
        labels = {"door": "http", "scope": "intake"} | ({"reason": reason} if reason else {})
        assert total(registry, f"{name}_total", **labels) == number, name
    assert total(registry, "replay_ratio", door="http", scope="intake") == pytest.approx(STORY_RATIO)
    assert total(registry, "cleanup_total") == 5
    assert total(registry, "miss_total", door="function", scope="items", reason="absent") == 1, "the claim by hand"


def test_prometheus_counts_functions_and_messages_by_their_own_doors() -> None:
    registry = CollectorRegistry()
    with Once("memory://", on_event=PrometheusMetrics(registry)) as once:
        price = once.guard(scope="price", key=lambda order: order)(lambda order: SECRET)
        handle = once.consumer("assignment_id", key=lambda message: message)(lambda message: None)
        for _ in range(4):
            price("a-1")
            handle("a-1")
            once.check_and_mark("ack_id", "a-1")
    for door, scope in (("function", "price"), ("message", "assignment_id"), ("message", "ack_id")):
        assert total(registry, "hit_total", door=door, scope=scope) == 3
        assert total(registry, "miss_total", door=door, scope=scope, reason="absent") == 1
        assert total(registry, "replay_ratio", door=door, scope=scope) == 0.75


def test_no_metric_has_a_key_or_a_body_in_it(open_service: Callable[..., Service]) -> None:
    """Without a name of its own, and with a scope for every path, the door still makes one series."""
    clock, registry = FakeClock(), CollectorRegistry()
    service = open_service(clock=clock, hook=PrometheusMetrics(registry), scope=None)
    for number in range(20):
        service.post(f"key-{number}", path=f"/items/{number}")
    said = generate_latest(registry).decode()
    assert total(registry, "miss_total", door="http", scope="http", reason="absent") == 20
    assert "key-" not in said
    assert "/items" not in said
    assert SECRET not in said


def test_the_exposition_is_one_that_prometheus_reads() -> None:
    """A scope may hold any printable character."""
    registry = CollectorRegistry()
    scope = 'a "scope" with \\ and ü, {and} = more'
    with Once("memory://", on_event=PrometheusMetrics(registry)) as once:
        once.call("key", int, scope=scope)
    read = [
        (family.type, sample.labels, sample.value)
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
        if sample.name in ("idempotency_miss_total", "idempotency_replay_ratio")
    ]
    place = {"door": "function", "scope": scope}
    assert sorted(read, key=str) == [("counter", {**place, "reason": "absent"}, 1.0), ("gauge", place, 0.0)]


def test_scopes_beyond_the_most_are_counted_together() -> None:
    registry = CollectorRegistry()
    with Once("memory://", on_event=PrometheusMetrics(registry, most_scopes=3)) as once:
        for number in range(10):
            once.call("key", int, scope=f"scope {number}")
            once.call("key", int, scope=f"scope {number}")
    for scope, number in (("scope 0", 1), ("scope 2", 1), (OTHERS, 7)):
        assert total(registry, "hit_total", door="function", scope=scope) == number
        assert total(registry, "miss_total", door="function", scope=scope, reason="absent") == number
    assert total(registry, "hit_total", door="function", scope="scope 3") is None


def test_the_statistics_are_bounded_as_the_metrics_are() -> None:
    with Once("memory://") as once:
        for number in range(MOST_SCOPES + 5):
            once.check_and_mark(f"type {number}", "message")
        scopes = once.stats().scopes
    assert len(scopes) == MOST_SCOPES + 1
    assert scopes[OTHERS].misses == {"absent": 5}


def test_two_hooks_on_one_registry_add_up() -> None:
    registry = CollectorRegistry()
    for _ in range(2):
        with Once("memory://", on_event=PrometheusMetrics(registry)) as once:
            once.call("key", int)
            once.call("key", int)
    assert total(registry, "hit_total", door="function", scope="default") == 2
    assert total(registry, "replay_ratio", door="function", scope="default") == 0.5


def test_one_hook_for_several_stores_adds_up() -> None:
    registry = CollectorRegistry()
    metrics = PrometheusMetrics(registry)
    with Once("memory://", on_event=metrics) as one, Once("memory://", on_event=metrics) as two:
        one.call("key", int)
        two.call("key", int)
    assert total(registry, "miss_total", door="function", scope="default", reason="absent") == 2


def test_a_hook_that_is_given_twice_hears_everything_once(open_service: Callable[..., Service]) -> None:
    """To the object and to the middleware that it is handed to."""
    registry, heard = CollectorRegistry(), []  # type: ignore[var-annotated]
    metrics = PrometheusMetrics(registry)
    service = open_service(hook=metrics, on_event=metrics)
    again = open_service(hook=heard.append, on_event=heard.append)
    service.post("key")
    again.post("key")
    assert total(registry, "miss_total", door="http", scope="http", reason="absent") == 1
    assert len(heard) == 1


def test_a_registry_that_nobody_needs_any_more_is_let_go() -> None:
    registry = CollectorRegistry()
    gone = weakref.ref(registry)
    PrometheusMetrics(registry)
    del registry
    gc.collect()
    assert gone() is None


# -- the store, on every store ---------------------------------------------------------------------------------------


def fill(once: Once, clock: FakeClock) -> None:
    """Keys in every state."""
    for number in range(2):
        once.call(f"expired {number}", int, ttl=60)
    once.claim("abandoned", lease=60)
    once.claim("unknown", lease=60, on_crash="unknown")
    clock.advance(61)
    once.claim("in flight")
    for number in range(3):
        once.call(f"completed {number}", int)


def rest(once: Once) -> None:
    """Let the sampler end before the store is closed, so that it does not connect anew."""
    sampler = once._engine._sampler
    assert sampler is not None
    sampler.stop()
    eventually(lambda: all(thread.name != "semel-sampler" for thread in threading.enumerate()))


HELD = {"in_flight": 1, "abandoned": 1, "unknown": 1, "completed": 3, "expired": 2}


@on_all_stores
def test_the_keys_held_are_a_gauge_by_state(url: str) -> None:
    clock, registry = FakeClock(), CollectorRegistry()
    with Once(url, clock=clock, collect=False, on_event=PrometheusMetrics(registry, sample_every=0.01)) as once:
        fill(once, clock)
        eventually(lambda: {state: total(registry, "keys_held", state=state) for state in HELD} == HELD)
        once.purge()
        eventually(lambda: total(registry, "keys_held", state="expired") == 0)
        rest(once)


@on_all_stores
def test_what_is_cleaned_up_is_counted(url: str) -> None:
    clock, registry = FakeClock(), CollectorRegistry()
    heard: list[Event] = []
    with Once(url, clock=clock, collect=False, on_event=PrometheusMetrics(registry)) as once:
        once._engine.add_hook(heard.append)
        for number in range(5):
            once.check_and_mark("ack_id", str(number), ttl=60)
        once.check_and_mark("ack_id", "later")
        assert total(registry, "cleanup_total") == 0
        clock.advance(61)
        assert once.purge() == 5
        assert once.purge() == 0
    assert total(registry, "cleanup_total") == 5
    assert [event.value for event in heard if event.name == "cleanup"] == [5], "nothing removed is nothing to tell"


def test_what_the_collector_removes_by_itself_is_counted() -> None:
    clock, registry = FakeClock(), CollectorRegistry()
    policy = Policy(ttl=60, purge_every=0.01)
    with Once("memory://", clock=clock, policy=policy, on_event=PrometheusMetrics(registry)) as once:
        for number in range(5):
            once.check_and_mark("ack_id", str(number))
        clock.advance(61)
        eventually(lambda: total(registry, "cleanup_total") == 5)


@on_shared_stores
def test_the_stores_answers_are_timed_by_verb(url: str) -> None:
    registry = CollectorRegistry()
    with Once(url, on_event=PrometheusMetrics(registry)) as once:
        for number in range(3):
            once.call(f"key {number}", int)
        once.get("key 0")
        once.purge()
    timed = {
        sample.labels["verb"]: sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == "idempotency_store_seconds_count"
    }
    assert timed.pop("get") == 1
    assert timed.pop("purge") == 1
    assert timed in ({"claim": 3, "complete": 3}, {"together": 6})
    assert 0 < (total(registry, "store_seconds_sum", verb="get") or 0) < PATIENCE


def test_a_hook_without_an_interval_is_not_told_of_the_store(sqlite_url: str) -> None:
    registry = CollectorRegistry()
    with Once(sqlite_url, on_event=PrometheusMetrics(registry, sample_every=None)) as once:
        once.call("key", int)
    assert total(registry, "store_seconds_count", verb="together") is None
    assert total(registry, "miss_total", door="function", scope="default", reason="absent") == 1


def test_the_store_is_looked_at_in_an_event_loop_too(sqlite_url: str) -> None:
    registry = CollectorRegistry()

    async def scenario() -> None:
        async with AsyncOnce(sqlite_url, on_event=PrometheusMetrics(registry, sample_every=0.01)) as once:
            assert isinstance(await once.claim("key"), Granted)
            await asyncio.to_thread(eventually, lambda: total(registry, "keys_held", state="in_flight") == 1)

    asyncio.run(scenario())


def test_a_store_that_only_marks_messages_is_looked_at() -> None:
    registry = CollectorRegistry()
    with Once("memory://", on_event=PrometheusMetrics(registry, sample_every=0.01)) as once:
        once.check_and_mark("ack_id", "a-1")
        eventually(lambda: total(registry, "keys_held", state="completed") == 1)


def test_of_several_hooks_the_shortest_interval_counts(open_service: Callable[..., Service]) -> None:
    """That of the object, and that of the middleware that it is handed to."""
    seldom, often = CollectorRegistry(), CollectorRegistry()
    service = open_service(
        hook=PrometheusMetrics(seldom, sample_every=3600), on_event=PrometheusMetrics(often, sample_every=0.01)
    )
    service.post("key")
    eventually(lambda: total(often, "keys_held", state="completed") == 1 or not service.post("key"))
    assert total(seldom, "keys_held", state="completed") == 1


@pytest.mark.parametrize("every", [0, -1, float("nan"), "often"])
def test_an_interval_that_can_never_work_is_refused(every: Any, provider: MeterProvider, plain: "PlainClient") -> None:
    for make in (
        lambda: PrometheusMetrics(CollectorRegistry(), sample_every=every),
        lambda: OpenTelemetryMetrics(provider, sample_every=every),
        lambda: StatsdMetrics(plain, sample_every=every),
    ):
        with pytest.raises(InvalidRequest, match="sample_every"):
            make()


# -- Prometheus, several processes -----------------------------------------------------------------------------------

WORKER = """
    import os
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
    import time
    import httpx
    from semel import Once, Policy
    from semel.http.wsgi import IdempotencyMiddleware
    from semel.metrics.prometheus import PrometheusMetrics

    def app(environ, start_response):
        start_response("201 Created", [])
        return [b"done"]

    looked = set()

    class Watched(PrometheusMetrics):
        def __call__(self, event):
            super().__call__(event)
            if event.name == "held":
                looked.add((event.reason, event.value))

    once = Once(url, policy=Policy.intake(), on_event=Watched(sample_every=0.01))
    client = httpx.Client(transport=httpx.WSGITransport(IdempotencyMiddleware(app, once)), base_url="http://service")
    while (keys := hear()) is not None:
        for key in keys:
            assert client.post("/items", headers={"Idempotency-Key": key}).status_code == 201
        held = once.stats().held.completed
        while ("completed", held) not in looked:
            time.sleep(0.01)
        tell("done")
    once.close()
"""

SCRAPER = """
    import os
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.multiprocess import MultiProcessCollector
    from semel.metrics.prometheus import ReplayRatio

    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    ReplayRatio(registry)
    tell(generate_latest(registry).decode())
"""


def scrape(folder: Path) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    said = outcome(SCRAPER, folder=str(folder))
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(said)
        for sample in family.samples
    }


def test_the_metrics_of_two_processes_are_scraped_together(tmp_path: Path, sqlite_url: str) -> None:
    """In prometheus-client's multiprocess mode: counts add up, the ratio is of all calls, the store is counted once.

    One process has 2 hits of 8 calls and the other 9 of 10: together 11 of 18, which is no mean of their ratios.
    """
    folder = tmp_path / "metrics"
    folder.mkdir()
    place = {("door", "http"), ("scope", "http")}
    with (
        Program(WORKER, folder=str(folder), url=sqlite_url) as one,
        Program(WORKER, folder=str(folder), url=sqlite_url) as two,
    ):
        one.tell([f"one-{number}" for number in range(6)] + ["one-0", "one-1"])
        assert one.hear() == "done"
        two.tell(["two"] + ["one-0"] * 9)
        assert two.hear() == "done"
        alive = scrape(folder)
        for program in (one, two):
            program.tell(None)
    for found in (alive, scrape(folder)):
        assert found["idempotency_hit_total", frozenset(place)] == 11
        assert found["idempotency_miss_total", frozenset(place | {("reason", "absent")})] == 7
        assert found["idempotency_replay_ratio", frozenset(place)] == pytest.approx(11 / 18)
        assert found["idempotency_keys_held", frozenset({("state", "completed")})] == 7
        assert found["idempotency_store_seconds_count", frozenset({("verb", "together")})] >= 18


def test_the_ratio_of_several_processes_needs_their_folder() -> None:
    with pytest.raises(ValueError, match="PROMETHEUS_MULTIPROC_DIR"):
        ReplayRatio(CollectorRegistry())


# -- OpenTelemetry ---------------------------------------------------------------------------------------------------

Points = dict[tuple[str, frozenset[tuple[str, Any]]], Any]


def points_of(data: MetricsData | None) -> Points:
    """The value (a histogram's count) by name and attributes."""
    assert data is not None
    return {
        (metric.name, frozenset((point.attributes or {}).items())): getattr(
            point, "value", getattr(point, "count", None)
        )
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in metric.data.data_points
    }


@pytest.fixture
def reader() -> InMemoryMetricReader:
    return InMemoryMetricReader()


@pytest.fixture
def provider(reader: InMemoryMetricReader) -> Iterator[MeterProvider]:
    provider = MeterProvider([reader], shutdown_on_exit=False)
    yield provider
    provider.shutdown()


def named(name: str, **attributes: Any) -> tuple[str, frozenset[tuple[str, Any]]]:
    return f"idempotency.{name}", frozenset(attributes.items())


def test_opentelemetry_counts_what_happens_to_the_keys_of_requests(
    open_service: Callable[..., Service], reader: InMemoryMetricReader, provider: MeterProvider
) -> None:
    clock = FakeClock()
    tell_story(open_service(clock=clock, hook=OpenTelemetryMetrics(provider), name="intake"), clock)
    points = points_of(reader.get_metrics_data())
    for (name, reason), number in STORY.items():
        more = {"reason": reason} if reason else {}
        assert points[named(name, door="http", scope="intake", **more)] == number, name
    assert points[named("replay_ratio", door="http", scope="intake")] == pytest.approx(STORY_RATIO)
    assert points[named("cleanup.count")] == 5
    assert points[named("miss", door="function", scope="items", reason="absent")] == 1


def test_opentelemetry_hears_of_the_store(
    sqlite_url: str, reader: InMemoryMetricReader, provider: MeterProvider
) -> None:
    clock = FakeClock()

    def held() -> dict[str, int]:
        points = points_of(reader.get_metrics_data())
        return {state: points.get(named("keys_held", state=state), -1) for state in HELD}

    hook = OpenTelemetryMetrics(provider, sample_every=0.01)
    with Once(sqlite_url, clock=clock, collect=False, on_event=hook) as once:
        fill(once, clock)
        eventually(lambda: held() == HELD)
    assert points_of(reader.get_metrics_data())[named("store.duration", verb="together")] >= 8


def test_two_hooks_on_one_provider_add_up(reader: InMemoryMetricReader, provider: MeterProvider) -> None:
    """The provider would listen to the first observer only, and say nothing."""
    for calls in (2, 4):
        with Once("memory://", on_event=OpenTelemetryMetrics(provider)) as once:
            for _ in range(calls):
                once.call("key", int)
    points = points_of(reader.get_metrics_data())
    assert points[named("hit", door="function", scope="default")] == 4
    assert points[named("replay_ratio", door="function", scope="default")] == pytest.approx(4 / 6)


def test_scopes_beyond_the_most_are_counted_together_in_opentelemetry(
    reader: InMemoryMetricReader, provider: MeterProvider
) -> None:
    with Once("memory://", on_event=OpenTelemetryMetrics(provider, most_scopes=1)) as once:
        for scope in ("one", "two", "three"):
            once.call("key", int, scope=scope)
    points = points_of(reader.get_metrics_data())
    assert points[named("miss", door="function", scope=OTHERS, reason="absent")] == 2
    assert {scope for name, place in points if name == "idempotency.replay_ratio" for _, scope in place} == {
        "function",
        "one",
        OTHERS,
    }


def test_the_global_provider_may_be_set_after_the_hook_was_made() -> None:
    """And a hook that is made after that, with or without naming it, adds to the same instruments."""
    said = outcome("""
        from opentelemetry import metrics
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader
        from semel import Once
        from semel.metrics.opentelemetry import OpenTelemetryMetrics

        hooks = [OpenTelemetryMetrics()]
        reader = InMemoryMetricReader()
        provider = MeterProvider([reader], shutdown_on_exit=False)
        metrics.set_meter_provider(provider)
        hooks += [OpenTelemetryMetrics(), OpenTelemetryMetrics(provider)]
        for hook, calls in zip(hooks, (2, 3, 7)):
            with Once("memory://", on_event=hook) as once:
                for _ in range(calls):
                    once.call("key", int)
        (resource,) = reader.get_metrics_data().resource_metrics
        (scope,) = resource.scope_metrics
        tell({metric.name: [point.value for point in metric.data.data_points] for metric in scope.metrics})
    """)
    assert said == {"idempotency.miss": [3], "idempotency.hit": [9], "idempotency.replay_ratio": [0.75]}


# -- statsd ----------------------------------------------------------------------------------------------------------


class Statsd:
    """A statsd server's ear: every line that arrived, over real UDP."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self._socket.settimeout(PATIENCE)
        self.address: tuple[str, int] = self._socket.getsockname()

    def lines(self) -> list[str]:
        """Everything sent before now: a last line of our own says that it is all there."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
            own.sendto(b"end", self.address)
        return list(iter(lambda: self._socket.recv(2048).decode(), "end"))

    def close(self) -> None:
        self._socket.close()


class PlainClient:
    """Speaks the statsd protocol with the methods of the ``statsd`` package."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._address = address

    def incr(self, stat: str, count: int = 1, rate: float = 1) -> None:
        self._send(f"{stat}:{count}|c")

    def timing(self, stat: str, delta: float, rate: float = 1) -> None:
        self._send(f"{stat}:{delta:0.6f}|ms")

    def gauge(self, stat: str, value: float, rate: float = 1, delta: bool = False) -> None:
        self._send(f"{stat}:{value}|g")

    def _send(self, line: str) -> None:
        self._socket.sendto(line.encode(), self._address)

    def close(self) -> None:
        self._socket.close()


class TaggedClient(PlainClient):
    """As Datadog's: ``increment`` beside the rest, and tags."""

    incr = None  # type: ignore[assignment]

    def increment(self, metric: str, value: int = 1, tags: list[str] | None = None, sample_rate: float = 1) -> None:
        self._send(f"{metric}:{value}|c{self._tags(tags)}")

    def timing(self, metric: str, value: float, tags: list[str] | None = None) -> None:  # type: ignore[override]
        self._send(f"{metric}:{value:0.6f}|ms{self._tags(tags)}")

    def gauge(self, metric: str, value: float, tags: list[str] | None = None) -> None:  # type: ignore[override]
        self._send(f"{metric}:{value}|g{self._tags(tags)}")

    @staticmethod
    def _tags(tags: list[str] | None) -> str:
        return f"|#{','.join(tags)}" if tags else ""


@pytest.fixture
def statsd() -> Iterator[Statsd]:
    server = Statsd()
    yield server
    server.close()


@pytest.fixture
def plain(statsd: Statsd) -> Iterator[PlainClient]:
    client = PlainClient(statsd.address)
    yield client
    client.close()


@pytest.fixture
def tagged(statsd: Statsd) -> Iterator[TaggedClient]:
    client = TaggedClient(statsd.address)
    yield client
    client.close()


def test_statsd_gets_the_names_of_the_document(
    open_service: Callable[..., Service], statsd: Statsd, plain: PlainClient
) -> None:
    clock = FakeClock()
    tell_story(open_service(clock=clock, hook=StatsdMetrics(plain, sample_every=None)), clock)
    assert Counter(statsd.lines()) == {
        "idempotency.hit:1|c": 2,
        "idempotency.miss:1|c": 6,
        "idempotency.conflict:1|c": 1,
        "idempotency.processing_collision:1|c": 1,
        "idempotency.unknown:1|c": 1,
        "idempotency.cleanup.count:5|c": 1,
    }


def test_a_client_with_tags_is_given_door_and_scope(
    open_service: Callable[..., Service], statsd: Statsd, tagged: TaggedClient
) -> None:
    clock = FakeClock()
    hook = StatsdMetrics(tagged, sample_every=None)
    tell_story(open_service(clock=clock, hook=hook, name="intake"), clock)
    place = "#door:http,scope:intake"
    assert Counter(statsd.lines()) == {
        f"idempotency.hit:1|c|{place}": 2,
        f"idempotency.miss:1|c|{place},reason:absent": 4,
        f"idempotency.miss:1|c|{place},reason:expired": 1,
        "idempotency.miss:1|c|#door:function,scope:items,reason:absent": 1,
        f"idempotency.conflict:1|c|{place}": 1,
        f"idempotency.processing_collision:1|c|{place}": 1,
        f"idempotency.unknown:1|c|{place}": 1,
        "idempotency.cleanup.count:5|c": 1,
    }


def test_without_tags_door_and_scope_can_be_part_of_the_name(statsd: Statsd, plain: PlainClient) -> None:
    """With no character in them that means something to statsd."""
    hook = StatsdMetrics(plain, sample_every=None, by_scope=True, most_scopes=1)
    with Once("memory://", on_event=hook) as once:
        for scope in ("GET /a.b:c|d@e#f", "another"):
            once.call("key", int, scope=scope)
            once.call("key", int, scope=scope)
    assert statsd.lines() == [
        "idempotency.miss.function.GET_a_b_c_d_e_f.absent:1|c",
        "idempotency.hit.function.GET_a_b_c_d_e_f:1|c",
        "idempotency.miss.function._other_.absent:1|c",
        "idempotency.hit.function._other_:1|c",
    ]


def test_a_tag_holds_nothing_that_means_something_to_statsd(statsd: Statsd, tagged: TaggedClient) -> None:
    with Once("memory://", on_event=StatsdMetrics(tagged, sample_every=None)) as once:
        once.call("key", int, scope="price|v1,b #2")
    assert statsd.lines() == ["idempotency.miss:1|c|#door:function,scope:price_v1_b_2,reason:absent"]


@pytest.mark.parametrize("kind", ["plain", "tagged"])
def test_statsd_hears_of_the_store(kind: str, request: pytest.FixtureRequest, statsd: Statsd, sqlite_url: str) -> None:
    clock, lines = FakeClock(), set[str]()
    client: PlainClient = request.getfixturevalue(kind)
    wanted = {
        f"idempotency.keys_held.{state}:{number}|g"
        if kind == "plain"
        else f"idempotency.keys_held:{number}|g|#state:{state}"
        for state, number in HELD.items()
    }

    def heard() -> bool:
        lines.update(statsd.lines())
        return wanted <= lines

    with Once(sqlite_url, clock=clock, collect=False, on_event=StatsdMetrics(client, sample_every=0.01)) as once:
        fill(once, clock)
        eventually(heard)
    timing = (
        r"idempotency\.store\.together:([\d.]+)\|ms"
        if kind == "plain"
        else (r"idempotency\.store:([\d.]+)\|ms\|#verb:together")
    )
    took = [float(found[1]) for line in lines if (found := re.fullmatch(timing, line))]
    assert took
    assert all(0 < each < PATIENCE * 1000 for each in took)


def test_a_client_that_takes_tags_only_here_and_there_is_given_none(statsd: Statsd) -> None:
    class Mixed(TaggedClient):
        gauge = PlainClient.gauge  # type: ignore[assignment]

    client = Mixed(statsd.address)
    with Once("memory://", on_event=StatsdMetrics(client, sample_every=None)) as once:
        once.call("key", int)
    client.close()
    assert statsd.lines() == ["idempotency.miss:1|c"]


def test_something_that_is_no_client_is_refused() -> None:
    class Mute:
        def incr(self, name: str, count: int) -> None:
            raise NotImplementedError

    with pytest.raises(InvalidRequest, match=r"increment or incr\(\); object does not"):
        StatsdMetrics(object())
    with pytest.raises(InvalidRequest, match=r"timing\(\); Mute does not"):
        StatsdMetrics(Mute())


# -- none of them is needed ------------------------------------------------------------------------------------------


def printed(program: str) -> str:
    """What a new Python prints: redis-py, which the tests' other programs have imported, looks for OpenTelemetry."""
    finished = subprocess.run([sys.executable, "-c", dedent(program)], capture_output=True, text=True, check=True)
    return finished.stdout.strip()


@pytest.mark.parametrize("module", ["prometheus", "opentelemetry"])
def test_without_the_package_the_module_names_the_extra(module: str) -> None:
    """Whoever looks for the package does not find it, as where it was never installed."""
    said = printed(f"""
        import sys
        from semel.errors import MissingExtra

        class Absent:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in ("prometheus_client", "opentelemetry"):
                    raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

        sys.meta_path.insert(0, Absent())
        try:
            import semel.metrics.{module}
        except MissingExtra as error:
            assert isinstance(error, ImportError)
            print(error)
    """)
    assert said.startswith(f"No module named '{module}")
    assert said.endswith(f"this needs an extra: pip install 'semel[{module}]'")


def test_nothing_is_imported_until_it_is_asked_for() -> None:
    said = printed("""
        import sys
        import semel, semel.http.asgi, semel.http.wsgi, semel.metrics.statsd
        semel.Once("memory://").check_and_mark("type", "message")
        print({name.split(".")[0] for name in sys.modules} & {"prometheus_client", "opentelemetry", "statsd"})
    """)
    assert said == "set()"


# -- hooks that fail -------------------------------------------------------------------------------------------------


class Failing:
    """Raises what it is told to, and counts how often it was called."""

    def __init__(self, *errors: Exception, sample_every: float | None = None) -> None:
        self.errors = errors
        self.heard: list[Event] = []
        self.sample_every = sample_every

    def __call__(self, event: Event) -> None:
        self.heard.append(event)
        raise self.errors[(len(self.heard) - 1) % len(self.errors)]


def failures(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    return [
        (record.levelno, vars(record)["reason"])
        for record in caplog.records
        if vars(record).get("event") == "hook_failed"
    ]


def test_a_hook_that_fails_never_breaks_a_request(
    open_service: Callable[..., Service], caplog: pytest.LogCaptureFixture
) -> None:
    """And it is logged once, not with every event; the next hook hears all the same."""
    hook, heard = Failing(ValueError("bad day")), []  # type: ignore[var-annotated]
    service = open_service(hook=hook, on_event=heard.append)
    assert [service.post("key") for _ in range(5)] == [201] * 5
    assert len(hook.heard) == 5
    assert [event.name for event in heard] == ["miss"] + ["hit"] * 4
    assert failures(caplog) == [(logging.ERROR, "builtins.ValueError")]
    assert "bad day" in caplog.text


def test_each_kind_of_error_is_logged_once_for_each_hook(caplog: pytest.LogCaptureFixture) -> None:
    one, two = Failing(ValueError(), KeyError()), Failing(ValueError())
    with Once("memory://", on_event=one) as once:
        once._engine.add_hook(two)
        for number in range(6):
            assert once.call(f"key {number}", lambda: SECRET).value == SECRET
    assert len(one.heard) == len(two.heard) == 6
    assert Counter(failures(caplog)) == {
        (logging.ERROR, "builtins.ValueError"): 2,
        (logging.ERROR, "builtins.KeyError"): 1,
    }


def test_a_hook_that_fails_breaks_neither_the_sampler_nor_the_collector(
    sqlite_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    clock, hook = FakeClock(), Failing(ValueError(), sample_every=0.01)
    with Once(sqlite_url, clock=clock, policy=Policy(ttl=60, purge_every=0.01), on_event=hook) as once:
        once.call("key", int)
        clock.advance(61)
        eventually(lambda: {"store", "held", "cleanup"} <= {event.name for event in hook.heard})
        seen = len([event for event in hook.heard if event.name == "held"])
        eventually(lambda: len([event for event in hook.heard if event.name == "held"]) > seen + 5)
        assert once.stats().purged == 1
    assert len(failures(caplog)) == 1


def test_something_that_is_no_plain_function_is_refused() -> None:
    async def later(event: Event) -> None:
        raise NotImplementedError

    for hook in (5, "print", later):
        with pytest.raises(InvalidRequest, match="on_event= takes a plain function"):
            Once("memory://", on_event=hook)  # type: ignore[arg-type]


# -- logs ------------------------------------------------------------------------------------------------------------


def logged(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """What structured records say, as a JSON formatter would write them."""
    known = ("event", "door", "scope", "key", "reason", "purged")
    return [
        {"level": record.levelname} | {name: vars(record)[name] for name in known if name in vars(record)}
        for record in caplog.records
        if record.name == "semel" and "event" in vars(record)
    ]


def test_every_event_of_a_request_is_in_the_log_with_key_and_scope(
    open_service: Callable[..., Service], caplog: pytest.LogCaptureFixture
) -> None:
    clock = FakeClock()
    service = open_service(clock=clock)
    with caplog.at_level(logging.DEBUG, "semel"):
        tell_story(service, clock)
    http = {"door": "http", "scope": "items"}
    assert logged(caplog) == [
        {"level": "DEBUG", "event": "miss", **http, "key": "short", "reason": "absent"},
        {"level": "DEBUG", "event": "miss", **http, "key": "first", "reason": "absent"},
        {"level": "DEBUG", "event": "miss", **http, "key": "second", "reason": "absent"},
        {"level": "DEBUG", "event": "hit", **http, "key": "first", "reason": ""},
        {"level": "DEBUG", "event": "hit", **http, "key": "first", "reason": ""},
        {"level": "DEBUG", "event": "miss", **http, "key": "short", "reason": "expired"},
        {"level": "INFO", "event": "conflict", **http, "key": "first", "reason": ""},
        {"level": "DEBUG", "event": "miss", **http, "key": "nested", "reason": "absent"},
        {"level": "INFO", "event": "collision", **http, "key": "nested", "reason": ""},
        {
            "level": "DEBUG", "event": "miss", "door": "function", "scope": "items", "key": "vanished",
            "reason": "absent",
        },
        {"level": "WARNING", "event": "unknown", **http, "key": "vanished", "reason": ""},
        {"level": "INFO", "event": "cleanup", "purged": 5},
    ]  # fmt: skip


def test_functions_and_messages_are_logged_alike(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "semel"), Once("memory://") as once:
        once.call("key", int, scope="price")
        once.check_and_mark("ack_id", "a-1", {"card": SECRET})
        with pytest.raises(InProgress):
            once.call("busy", lambda: once.call("busy", int, in_flight="conflict"))
        once.claim("gone", lease=1e-6, on_crash="unknown")
        with pytest.raises(OutcomeUnknown):
            once.call("gone", int)
    assert [(each["event"], each["door"], each["scope"], each["key"]) for each in logged(caplog)] == [
        ("miss", "function", "price", "key"),
        ("miss", "message", "ack_id", "a-1"),
        ("miss", "function", "default", "busy"),
        ("collision", "function", "default", "busy"),
        ("miss", "function", "default", "gone"),
        ("unknown", "function", "default", "gone"),
    ]


def test_a_message_that_was_seen_is_logged_at_info(caplog: pytest.LogCaptureFixture) -> None:
    """It is skipped, and an operator who asks why finds it; a function's or a request's replay stays at debug."""
    with caplog.at_level(logging.INFO, "semel"), Once("memory://", policy=Policy.router()) as router:
        handle = router.consumer("assignment_id", key=lambda message: message["id"])(lambda message: None)
        for _ in range(2):
            router.check_and_mark("ack_id", "a-1")
            handle({"id": "b-1"})
            router.call("function", int)
    assert logged(caplog) == [
        {"level": "INFO", "event": "hit", "door": "message", "scope": scope, "key": key, "reason": ""}
        for scope, key in (("ack_id", "a-1"), ("assignment_id", "b-1"))
    ]


def test_no_log_record_holds_a_body_or_a_value(
    open_service: Callable[..., Service], caplog: pytest.LogCaptureFixture
) -> None:
    """Not in the text, not in the fields: neither the request's, nor the response's, nor what a function returned."""
    clock = FakeClock()
    hook = Failing(ValueError("bad day"))
    with caplog.at_level(logging.DEBUG, "semel"):
        tell_story(open_service(clock=clock, hook=hook), clock)
        with Once("memory://") as once:
            for _ in range(2):
                once.call("key", lambda: SECRET)
                once.check_and_mark("ack_id", "a-1", {"card": SECRET})
            with pytest.raises(ZeroDivisionError):
                once.call("failed", lambda: [SECRET, 1 // 0])
    assert len(caplog.records) > 12
    for record in caplog.records:
        fields = {name: value for name, value in vars(record).items() if name != "exc_info"}
        assert SECRET not in repr(fields)
        assert SECRET not in record.getMessage()


def test_the_fields_of_a_record_clash_with_none_of_loggings_own(caplog: pytest.LogCaptureFixture) -> None:
    """``logging`` refuses a record whose extra fields would replace its own."""
    own = {*vars(logging.LogRecord("semel", 10, "path", 1, "message", (), None)), "message", "asctime", "taskName"}
    clock, policy = FakeClock(), Policy(on_crash="unknown")
    with caplog.at_level(logging.DEBUG, "semel"), Once("memory://", clock=clock, policy=policy) as once:
        once.claim("key", lease=60, ttl=60)
        clock.advance(60)
        with pytest.raises(OutcomeUnknown):
            once.call("key", int)
        once._engine.counters.warn()
        clock.advance(1)
        once.purge()
    records = [set(vars(record)) - own for record in caplog.records]
    assert records == [
        {"event", "door", "scope", "key", "reason"},
        {"event", "door", "scope", "key", "reason"},
        {"event", "door", "scope", "reason"},
        {"event", "purged"},
    ]


def test_the_records_can_be_written_as_json(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever printable text a key is."""
    key = 'a "key" with \\ and ü'
    with caplog.at_level(logging.DEBUG, "semel"), Once("memory://") as once:
        once.check_and_mark("ack_id", key)
    (each,) = logged(caplog)
    assert json.loads(json.dumps(each))["key"] == key


# -- what an operator is warned of -----------------------------------------------------------------------------------


def stats_of(service: Service) -> Any:
    return service.run(service.once.stats())


def test_a_low_hit_rate_at_an_http_door_is_warned_of(open_service: Callable[..., Service]) -> None:
    """From 100 requests on: below what the user calls low it is a warning, above 80 % it is good."""
    service = open_service(name="intake", low_replay_rate=0.5)

    def judged() -> tuple[str, int]:
        stats = stats_of(service)
        return stats.doors["http", "intake"].hit_rate_is, len(stats.warnings)

    def post(keys: int, hits: int) -> None:
        for number in range(keys):
            service.post(f"key-{posted + number}")
        for _ in range(hits):
            service.post("key-0")

    posted = 0
    post(51, 48)
    assert judged() == ("to be looked at", 0), "99 requests prove nothing"
    post(0, 1)
    assert judged() == ("to be looked at", 1), "49 of 100"
    (warning,) = stats_of(service).warnings
    assert warning.startswith("intake: 49.0% of requests with a key were replays (below 50 %)")
    post(0, 2)
    assert judged() == ("fair", 0), "51 of 102 is half, not below"
    post(0, 153)
    assert stats_of(service).doors["http", "intake"].hit_rate == 0.8
    assert judged() == ("fair", 0), "80 % is not above 80 %"
    post(0, 1)
    assert judged() == ("good", 0)
    posted = 51
    post(154, 0)
    assert judged() == ("fair", 0), "205 of 410"
    posted += 154
    post(1, 0)
    assert judged() == ("to be looked at", 1), "205 of 411"


@pytest.mark.parametrize("door", ["guard", "consumer", "check_and_mark"])
def test_a_replay_rate_over_five_percent_is_warned_of(door: str) -> None:
    """From 100 calls on, for functions and messages; a request's door is judged the other way round."""
    with Once("memory://") as once:
        calls: Mapping[str, Callable[[str], object]] = {
            "guard": once.guard(scope="price", key=lambda key: key)(lambda key: None),
            "consumer": once.consumer("price", key=lambda key: key)(lambda key: None),
            "check_and_mark": lambda key: once.check_and_mark("price", key),
        }
        call = calls[door]
        for number in range(93):
            call(f"key {number}")
        for _ in range(6):
            call("key 0")
        assert once.stats().warnings == [], "6 of 99, but 99 calls prove nothing"
        call("key 0")
        (warning,) = once.stats().warnings
        assert warning == "price: 7.0% of calls are replays (over 5 %): something upstream retries too eagerly"
        for number in range(40):
            call(f"another {number}")
        assert once.stats().scopes["price"].replay_rate == 0.05
        assert once.stats().warnings == [], "7 of 140 is not over 5 %"
        call("key 0")
        assert len(once.stats().warnings) == 1


def warned(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str, str, str]]:
    return [
        (record.levelno, fields["door"], fields["scope"], fields["reason"])
        for record in caplog.records
        if (fields := vars(record)).get("event") == "warning"
    ]


class Looks:
    """A hook that counts how often the store was looked at."""

    sample_every = 0.01

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, event: Event) -> None:
        self.times += event.name == "held" and event.reason == "completed"

    def again(self) -> None:
        """Wait for looks that began after now."""
        seen = self.times
        eventually(lambda: self.times > seen + 2)


EAGER = (logging.WARNING, "function", "default", "high_replay_rate")


def test_a_warning_is_logged_once_and_again_when_it_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    """The sampler says it, as long as someone listens to the store."""
    looks = Looks()
    with Once("memory://", on_event=looks) as once:
        for number in range(95):
            once.call(f"key {number}", int)
        for _ in range(5):
            once.call("key 0", int)
        looks.again()
        assert warned(caplog) == []
        once.call("key 0", int)
        eventually(lambda: warned(caplog) == [EAGER])
        looks.again()
        assert warned(caplog) == [EAGER], "it lasts, and is not said again"
        for number in range(20):
            once.call(f"another {number}", int)
        looks.again()
        for _ in range(2):
            once.call("key 0", int)
        eventually(lambda: warned(caplog) == [EAGER, EAGER])
    assert "something upstream retries too eagerly" in caplog.text


def test_a_warning_is_logged_where_nobody_listens(caplog: pytest.LogCaptureFixture) -> None:
    """The collector says it; and where both run, only the first to see it."""
    looks = Looks()
    for hook in (None, looks):
        caplog.clear()
        with Once("memory://", policy=Policy(purge_every=0.01), on_event=hook) as once:
            for _ in range(100):
                once.call("key", int)
            eventually(lambda: warned(caplog))
            if hook is not None:
                looks.again()
        assert warned(caplog) == [EAGER]


def test_without_a_threshold_a_low_hit_rate_is_no_warning(open_service: Callable[..., Service]) -> None:
    """Clients that never retry are healthy."""
    service = open_service(name="intake")
    for number in range(200):
        service.post(f"key-{number}")
    stats = stats_of(service)
    assert (stats.doors["http", "intake"].hit_rate, stats.warnings) == (0.0, [])


@pytest.mark.parametrize("share", [0, -0.1, 1.1, 50, float("nan")])
def test_a_threshold_that_is_no_share_is_refused(share: float) -> None:
    with pytest.raises(InvalidRequest, match="low_replay_rate must be above 0 and at most 1"):
        Once("memory://", low_replay_rate=share)


def test_a_low_hit_rate_of_requests_is_logged(
    open_service: Callable[..., Service], caplog: pytest.LogCaptureFixture
) -> None:
    service = open_service(hook=Looks(), name="intake", low_replay_rate=0.5)
    number = count()
    for _ in range(100):
        service.post(f"key-{next(number)}")
    eventually(lambda: service.post(f"key-{next(number)}") and warned(caplog))  # the loop runs while it is used
    assert warned(caplog) == [(logging.WARNING, "http", "intake", "low_hit_rate")]


def test_an_unknown_outcome_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """Each call that meets one is logged by itself; the warning is one for all of them."""
    looks = Looks()
    with Once("memory://", policy=Policy(on_crash="unknown"), on_event=looks) as once:
        once.claim("key", lease=1e-6)
        for _ in range(3):
            with pytest.raises(OutcomeUnknown):
                once.call("key", int)
            looks.again()
        assert once.stats().warnings == ["default: 3 calls met a key whose outcome is unknown: resolve them"]
    assert warned(caplog) == [(logging.WARNING, "function", "default", "unknown_outcomes")]
    assert [each["level"] for each in logged(caplog) if each["event"] == "unknown"] == ["WARNING"] * 3


def test_two_that_warn_at_the_same_moment_say_it_once(caplog: pytest.LogCaptureFixture) -> None:
    counters = StatsCounter()
    for _ in range(100):
        counters.note("hit", "default", "key")
    everyone = threading.Barrier(8)

    def warn() -> None:
        everyone.wait(PATIENCE)
        counters.warn()

    threads = [threading.Thread(target=warn) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert warned(caplog) == [EAGER]


def test_nothing_is_told_where_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of an event that nobody hears is a count in a table: no object is made for it."""
    monkeypatch.delattr("semel.once.stats.Event")
    with Once(MemoryStore(), collect=False) as once:
        assert once.check_and_mark("ack_id", "a-1") == "not_seen"
        assert once.check_and_mark("ack_id", "a-1") == "seen"
        assert once.stats().scopes["ack_id"].hits == 1
