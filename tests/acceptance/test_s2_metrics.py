"""S2.42-48: what happens to runs is counted, under the document's names."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from semel import App, Context, Fatal, KeyReused
from semel._concurrency.sync import run_sync
from semel.metrics.prometheus import RunMetrics
from semel.runs.store import lease
from semel.runs.store.lease import LeaseRequest
from semel.runs.transports import DatabaseTransport
from semel.runs.worker.sweeper import Sweeper
from semel.testing import FakeClock
from support.waiting import eventually as until


def work(number: int = 0, *, fatal: bool = False) -> int:
    if fatal:
        raise Fatal("as told")
    return number


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest) -> str:
    url: str = request.getfixturevalue(f"migrated_{request.param}_url")
    return url


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def app(url: str, registry: CollectorRegistry, tmp_path: Path) -> Iterator[App]:
    app = App(url, artifacts=tmp_path)
    app.model("work", isolation="thread")(work)
    app.on_event(RunMetrics(registry))
    yield app
    app.close()


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, {"model": "work", **labels})


def worked(app: App, **parameters: object) -> None:
    with app.working(sweep_every=None):
        app.wait(app.submit("work", parameters).id, timeout=60)


def test_s2_43_a_run_that_succeeds_is_counted_as_such(app: App, registry: CollectorRegistry) -> None:
    worked(app)
    assert (value(registry, "runs_succeeded_total"), value(registry, "runs_failed_total")) == (1, None)


def test_s2_44_a_run_that_fails_is_counted_as_such(app: App, registry: CollectorRegistry) -> None:
    worked(app, fatal=True)
    assert (value(registry, "runs_succeeded_total"), value(registry, "runs_failed_total")) == (None, 1)


def test_s2_46_the_lag_of_a_run_that_is_due_at_once_is_the_time_from_submission_to_start(
    app: App, registry: CollectorRegistry
) -> None:
    worked(app)
    (run,) = app.runs().runs
    assert run.started_us is not None
    lag = value(registry, "queue_lag_seconds_sum")
    assert lag == pytest.approx((run.started_us - run.created_us) / 1e6)


def test_s2_42_to_44_runs_created_succeeded_and_failed_are_counted(app: App, registry: CollectorRegistry) -> None:
    with app.working(sweep_every=None):
        runs = [app.submit("work", {"number": number}) for number in range(3)]
        runs.append(app.submit("work", {"fatal": True}))
        app.submit("work", {"number": 7}, idempotency_key="k")
        app.submit("work", {"number": 7}, idempotency_key="k")
        with pytest.raises(KeyReused):
            app.submit("work", {"number": 8}, idempotency_key="k")
        for run in app.runs().runs:
            app.wait(run.id, timeout=60)
    assert value(registry, "runs_created_total") == 5
    assert value(registry, "runs_succeeded_total") == 4
    assert value(registry, "runs_failed_total") == 1
    assert value(registry, "runs_replayed_total") == 1
    assert value(registry, "runs_refused_total") == 1


def test_s2_45_to_46_duration_and_queue_lag_are_histograms(app: App, registry: CollectorRegistry) -> None:
    with app.working(sweep_every=None):
        app.wait(app.submit("work").id, timeout=60)
    assert value(registry, "run_duration_seconds_count", status="SUCCEEDED") == 1
    assert value(registry, "queue_lag_seconds_count") == 1
    lag, duration = (
        value(registry, "queue_lag_seconds_sum"),
        value(registry, "run_duration_seconds_sum", status="SUCCEEDED"),
    )
    assert lag is not None
    assert 0 <= lag < 30
    assert duration is not None
    assert 0 <= duration < 30


def test_s2_45_the_duration_of_a_retried_run_is_that_of_its_last_attempt(app: App, registry: CollectorRegistry) -> None:
    @app.model("falters", backoff=(1.0,))
    async def falters(ctx: Context) -> None:
        if ctx.attempt == 1:
            raise ConnectionError("busy")

    with app.working(sweep_every=None):
        run = app.wait(app.submit("falters").id, timeout=60)
    duration = registry.get_sample_value("run_duration_seconds_sum", {"model": "falters", "status": "SUCCEEDED"})
    assert duration is not None
    assert run.started_us is not None
    assert run.finished_us is not None
    assert duration < (run.finished_us - run.started_us) / 1e6 - 0.9, (
        "the pause before the last attempt is no part of it"
    )


def test_s2_47_runs_whose_worker_is_lost_are_counted_as_stuck(url: str, registry: CollectorRegistry) -> None:
    clock = FakeClock()
    app = App(url, clock=clock)
    app.model("work", isolation="thread")(work)
    app.on_event(RunMetrics(registry))
    app.submit("work")
    ledger = app._engine.store
    run_sync(ledger.write(lease.lease, LeaseRequest("dead", ("default",), ["work"], 1), ledger.statement_context))
    clock.advance(61)
    sweeper = Sweeper(ledger, "me", transport=DatabaseTransport(), hooks=app.hooks)
    assert run_sync(sweeper.sweep()) == 1
    assert run_sync(sweeper.sweep()) == 0
    assert registry.get_sample_value("stuck_runs_detected_total") == 1
    app.close()


def test_s2_45_the_duration_is_that_of_the_last_attempt_also_when_the_sweeper_ends_it(
    url: str, registry: CollectorRegistry
) -> None:
    """Not the time since the first attempt began, and not that of the attempts before."""
    clock = FakeClock()
    app = App(url, clock=clock)
    app.model("work", isolation="thread", lease=60, max_lost=2)(work)
    app.on_event(RunMetrics(registry))
    run = app.submit("work")
    ledger = app._engine.store
    sweeper = Sweeper(ledger, "me", transport=DatabaseTransport(), hooks=app.hooks)
    for _ in range(2):
        assert run_sync(
            ledger.write(lease.lease, LeaseRequest("dead", ("default",), ["work"], 1), ledger.statement_context)
        )
        clock.advance(75)
        assert run_sync(sweeper.sweep()) == 1
        clock.advance(1000)
    assert app.get(run.id).status == "FAILED"
    assert value(registry, "run_duration_seconds_sum", status="FAILED") == pytest.approx(75)
    assert value(registry, "run_duration_seconds_count", status="FAILED") == 1
    app.close()


def test_s2_46_the_lag_begins_when_a_run_is_due_and_counts_once_for_each_attempt(
    url: str, registry: CollectorRegistry, tmp_path: Path
) -> None:
    """Neither ``delay=`` nor the pause between two attempts is time in the queue."""
    clock = FakeClock()
    app = App(url, artifacts=tmp_path, clock=clock)

    @app.model("work", backoff=(50,), max_attempts=2)
    async def work(ctx: Context) -> None:
        if ctx.attempt == 1:
            raise ConnectionError

    app.on_event(RunMetrics(registry))
    run = app.submit("work", delay=100)
    clock.advance(103)
    with app.working(sweep_every=None, processes=0, poll=0.02):
        until(lambda: app.get(run.id).step == "retried", "the first attempt failed")
        retried = app.get(run.id)
        assert value(registry, "queue_lag_seconds_sum") == pytest.approx(3)
    clock.advance((retried.due_us - clock.us) / 1e6 + 7)
    with app.working(sweep_every=None, processes=0, poll=0.02):
        assert app.wait(run.id, timeout=60).status == "SUCCEEDED"
    assert value(registry, "queue_lag_seconds_sum") == pytest.approx(10)
    assert value(registry, "queue_lag_seconds_count") == 2
    app.close()


def test_s2_41_the_sweepers_line_about_a_run_carries_the_five_fields(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    clock = FakeClock()
    app = App(url, clock=clock)
    app.model("work", isolation="thread", lease=60)(work)
    run = app.submit("work")
    ledger = app._engine.store
    run_sync(ledger.write(lease.lease, LeaseRequest("dead", ("default",), ["work"], 1), ledger.statement_context))
    clock.advance(61)
    with caplog.at_level(logging.INFO, "semel.sweeper"):
        run_sync(Sweeper(ledger, "me", transport=DatabaseTransport(), hooks=app.hooks).sweep())
    (line,) = [vars(record) for record in caplog.records if record.name == "semel.sweeper"]
    expected = {"run_id": run.id, "payload_hash": run.payload_hash, "worker_id": "dead", "attempt_count": 1}
    assert line.items() >= {**expected, "status": "PENDING"}.items()
    app.close()


def test_s2_56_the_keys_that_the_sweeper_cleaned_are_logged_at_info(url: str, caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    app = App(url, clock=clock, key_ttl=60)
    app.model("work", isolation="thread")(work)
    app.submit("work", idempotency_key="k")
    clock.advance(61)
    with caplog.at_level(logging.INFO, "semel.sweeper"):
        run_sync(Sweeper(app._engine.store, "me", transport=DatabaseTransport(), hooks=app.hooks).sweep())
    assert [record.getMessage() for record in caplog.records if record.name == "semel.sweeper"] == [
        "removed 1 keys and reservations that had expired"
    ]
    app.close()


def test_s2_48_they_are_exposed_in_the_format_of_prometheus(app: App, registry: CollectorRegistry) -> None:
    app.submit("work")
    text = generate_latest(registry).decode()
    assert 'runs_created_total{model="work"} 1.0' in text
    for name in ("runs_succeeded", "runs_failed", "run_duration_seconds", "queue_lag_seconds", "stuck_runs_detected"):
        assert f"# HELP {name}" in text
