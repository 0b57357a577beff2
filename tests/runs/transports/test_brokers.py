"""Runs over RQ and Celery, with stock workers: whatever becomes of a message, its run is executed once."""

import asyncio
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from semel._concurrency.sync import run_sync
from semel.cli import main as semel_command
from semel.runs import transports
from semel.runs.types import Run, new_id
from support import servers
from support.databases import remove_run
from support.transports import BROKERS, PATIENCE, Broker, Ground, until

KINDS = ["sqlite", "postgres"]
ADD = {"a": 1, "b": 1}


@pytest.fixture(scope="module", params=BROKERS)
def broker(request: pytest.FixtureRequest) -> Broker:
    return BROKERS[request.param]


@pytest.fixture(scope="module")
def ground(
    broker: Broker,
    tmp_path_factory: pytest.TempPathFactory,
    redis_server: servers.Redis,
    postgres_server: servers.Postgres,
) -> Iterator[Ground]:
    """Both databases, and workers."""
    folder = tmp_path_factory.mktemp(broker.name)
    postgres_url = postgres_server.database()
    assert semel_command(["migrate", postgres_url]) == 0
    urls = {"sqlite": f"sqlite:///{folder / 'semel.db'}", "postgres": postgres_url}
    with Ground(folder, transport=broker.name, redis=redis_server.database(), urls=urls) as ground:
        broker.start_all(ground)
        yield ground
    postgres_server.drop(postgres_url)


@pytest.fixture
def alone(broker: Broker, tmp_path: Path, redis_url: str) -> Iterator[Ground]:
    """A database and a Redis without workers."""
    urls = {"sqlite": f"sqlite:///{tmp_path / 'semel.db'}"}
    with Ground(tmp_path, transport=broker.name, redis=redis_url, urls=urls) as made:
        yield made


@pytest.fixture
def quiet(broker: Broker, tmp_path: Path, redis_url: str) -> Iterator[Ground]:
    """The same, where no sweeper sends anything again, so that messages can be counted."""
    urls = {"sqlite": f"sqlite:///{tmp_path / 'semel.db'}"}
    never = {"sweep_every": 3600, "tell_again": 3600}
    with Ground(tmp_path, transport=broker.name, redis=redis_url, urls=urls, **never) as made:
        yield made


only_rq = pytest.mark.parametrize("broker", ["rq"], indirect=True)
without_install = pytest.mark.parametrize("broker", ["rq", "celery"], indirect=True)


# -- stock workers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_stock_workers_execute_sync_async_and_threaded_models(ground: Ground, kind: str) -> None:
    app = ground.app(kind)
    runs = [app.submit(model, {"a": 2, "b": 3}, dedupe=False) for model in ("add", "add_in_loop", "add_in_thread")]
    for run in runs:
        ended = ground.wait_ended(app, run)
        assert (ended.status, ended.attempts, app.result(run.id)) == ("SUCCEEDED", 1, 5)
        assert len(ground.notes(run.id)) == 1
        made = app.manifest(run.id)
        assert made.code is not None
        assert (made.missing, made.worker, len(made.code["function"])) == (None, ended.worker, 64)


@pytest.mark.parametrize("kind", KINDS)
def test_messages_that_are_doubled_or_about_runs_that_are_over_or_unknown_change_nothing(
    broker: Broker, ground: Ground, kind: str
) -> None:
    app = ground.app(kind)
    finished, removed, last = (app.submit("add_in_loop", ADD, dedupe=False) for _ in range(3))
    cancelled = app.submit("add_in_loop", ADD, delay=3600, dedupe=False)
    app.cancel(cancelled.id)
    before, _ = [ground.wait_ended(app, run) for run in (finished, removed)]
    run_sync(app._engine.store.write(remove_run, removed.id))
    unknown = new_id()

    strays = (finished.id, removed.id, cancelled.id, unknown, "nonsense")
    app.transport.announce([(each, "default") for each in strays])
    app.transport.announce([(last.id, last.queue)] * 3)

    assert ground.wait_ended(app, last).attempts == 1
    until(lambda: broker.at_rest(ground), "the end of all messages")
    assert app.get(finished.id) == before
    assert (app.get(cancelled.id).status, app.get(last.id).attempts) == ("CANCELLED", 1)
    executions = [len(ground.notes(each)) for each in (finished.id, removed.id, last.id, cancelled.id, unknown)]
    assert executions == [1, 1, 1, 0, 0]


def test_a_message_that_was_lost_is_sent_again_by_the_sweeper(broker: Broker, ground: Ground) -> None:
    app = ground.app("postgres")
    runs = [app.submit("add_in_loop", {"a": 1, "b": n}, queue="apart", dedupe=False) for n in range(3)]
    broker.empty(ground, "semel-apart")
    until(lambda: broker.count(ground, "semel-apart") >= 3, "the second announcement")
    broker.consume(ground, "semel-apart")
    for run in runs:
        ended = ground.wait_ended(app, run)
        assert (ended.status, ended.attempts, len(ground.notes(run.id))) == ("SUCCEEDED", 1, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_fails_is_retried_after_its_backoff(broker: Broker, ground: Ground, kind: str) -> None:
    """Celery's workers live long enough to sweep, so that the submitter may be gone by then."""
    app = ground.app(kind)
    run = app.submit("flaky", dedupe=False)
    if broker.name != "rq":
        app.transport.close()  # and with it the sweeper of this process
    ended = ground.wait_ended(app, run)
    assert (ended.status, ended.attempts, app.result(run.id)) == ("SUCCEEDED", 2, 2)


@pytest.mark.parametrize(
    ("broker", "kind", "model"),
    [("rq", "sqlite", "slow"), ("rq", "postgres", "slow_in_loop"), ("celery", "sqlite", "slow")],
    indirect=["broker"],
)
def test_the_run_of_a_killed_process_is_executed_again_and_only_the_new_fence_counts(
    ground: Ground, kind: str, model: str
) -> None:
    """RQ's work horse, a process of Celery's pool."""
    app = ground.app(kind)
    run = app.submit(model, {"gate": "never"}, dedupe=False)
    ((_, fence, process),) = until(lambda: ground.notes(run.id, "begun"), "the first attempt")
    os.kill(process, signal.SIGKILL)
    ended = ground.wait_ended(app, run)
    assert (ended.status, ended.attempts, ended.losts) == ("SUCCEEDED", 2, 1)
    assert app.result(run.id) == ended.fence > fence
    assert [noted[:2] for noted in ground.notes(run.id)] == [(2, ended.fence)]


@pytest.mark.parametrize(
    ("broker", "options"),
    [("rq", ["-c", "transport_app"]), ("celery", ["-c", "1", "-P", "prefork"]), ("celery", ["-c", "1", "-P", "solo"])],
    indirect=["broker"],
    ids=["rq", "celery-prefork", "celery-solo"],
)
def test_sigterm_lets_the_run_finish(broker: Broker, alone: Ground, options: list[str]) -> None:
    """RQ's work horse gets it as well, as from a service manager that signals every process."""
    app = alone.app("sqlite")
    gate = alone.folder / "gate"
    run = app.submit("slow", {"gate": str(gate)})
    worker = broker.start(alone, *options)
    ((_, _, process),) = until(lambda: alone.notes(run.id, "begun"), "the start of the run")
    worker.send_signal(signal.SIGTERM)
    if broker.name == "rq":
        os.kill(process, signal.SIGTERM)
    until(lambda: broker.shuts_down(alone), "the warm shutdown")
    gate.touch()
    assert worker.wait(PATIENCE) == 0, alone.output()
    ended = app.get(run.id)
    assert (ended.status, ended.attempts) == ("SUCCEEDED", 1), alone.output()


@only_rq
def test_a_delayed_run_is_announced_when_it_is_due(ground: Ground) -> None:
    app = ground.app("postgres")
    run = app.submit("add_in_loop", ADD, delay=0.5)
    ended = ground.wait_ended(app, run)
    assert ended.status == "SUCCEEDED"
    assert ended.started_us is not None
    assert ended.started_us - ended.created_us >= 500_000


@only_rq
@pytest.mark.parametrize(("kind", "count"), [("sqlite", 10), ("postgres", 25)])
def test_two_workers_execute_each_of_many_runs_once(ground: Ground, kind: str, count: int) -> None:
    app = ground.app(kind)
    asked = [{"model": "add_in_loop", "parameters": {"a": 50, "b": n}, "dedupe": False} for n in range(count)]
    runs = [run for run in app.submit_many(asked) if isinstance(run, Run)]
    assert len(runs) == count
    ended = [ground.wait_ended(app, run) for run in runs]
    assert {(run.status, run.attempts) for run in ended} == {("SUCCEEDED", 1)}
    assert [app.result(run.id) for run in runs] == [50 + n for n in range(count)]
    assert {len(ground.notes(run.id)) for run in runs} == {1}


# -- messages --------------------------------------------------------------------------------------------------------


@without_install
def test_a_submission_from_an_event_loop_is_announced_as_well(broker: Broker, quiet: Ground) -> None:
    async def submit() -> Run:
        runs = quiet.app("sqlite").aio
        try:
            return await runs.submit("add_in_loop", ADD)
        finally:
            await runs.close()

    asyncio.run(submit())
    assert broker.count(quiet) == 1


@without_install
def test_other_queues_have_names_of_their_own(broker: Broker, quiet: Ground) -> None:
    app = quiet.app("sqlite")
    app.submit_many([{"model": "add", "parameters": {"a": 1, "b": n}, "queue": q} for n, q in enumerate("xyx")])
    assert [broker.count(quiet, f"semel-{name}") for name in "xy"] == [2, 1]


@without_install
def test_runs_that_nobody_executes_do_not_fill_the_broker_with_messages(broker: Broker, quiet: Ground) -> None:
    app = quiet.app("sqlite")
    waiting = [(new_id(), "default") for _ in range(3)]  # a submission may be announced twice on a busy machine
    assert app.transport.announce(waiting)
    for _ in range(5):
        assert app.transport.announce(waiting, again=True)
    assert broker.count(quiet) == 3
    assert app.transport.announce([*waiting, (new_id(), "default")], again=True)
    assert app.transport.announce([(new_id(), "never-used")], again=True)
    assert [broker.count(quiet, queue) for queue in ("semel", "semel-never-used")] == [7, 1]


# -- a broker that is away -------------------------------------------------------------------------------------------


@without_install
def test_a_broker_that_is_away_at_submit_delays_the_message_and_loses_nothing(
    broker: Broker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    urls = {"sqlite": f"sqlite:///{tmp_path / 'semel.db'}"}
    with servers.redis() as server, Ground(tmp_path, transport=broker.name, redis=server.url, urls=urls) as ground:
        app = ground.app("sqlite")
        app.submit("add_in_loop", {"a": 1, "b": 1})
        until(lambda: broker.count(ground) >= 1, "the first announcement")
        server.stop()
        run = app.submit("add_in_loop", {"a": 1, "b": 2})
        assert app.get(run.id).status == "PENDING"
        until(lambda: "the broker is unavailable; runs wait in the database" in caplog.text, "a warning")
        server.start()
        broker.empty(ground)
        until(lambda: broker.count(ground) >= 2, "the announcement")
        if broker.name == "rq":  # the start of one of Celery's is long
            broker.consume(ground, "semel")
            assert (app.get(run.id).status, app.get(run.id).attempts) == ("SUCCEEDED", 1)


@without_install
def test_runs_that_a_broker_missed_are_announced_once_when_it_is_back_without_a_sweeper(
    broker: Broker, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transports.broker, "BROKER_COOLDOWN", 0.2)
    settings = {"urls": {"sqlite": f"sqlite:///{tmp_path / 'semel.db'}"}, "sweep_every": 3600, "tell_again": 3600}
    with servers.redis() as server, Ground(tmp_path, transport=broker.name, redis=server.url, **settings) as ground:
        app = ground.app("sqlite")
        server.stop()
        for number in range(3):
            app.submit("add_in_loop", {"a": 1, "b": number})
        assert "the broker is unavailable" in caplog.text
        server.start()
        until(lambda: broker.count(ground) >= 3, "the announcement")
        assert broker.count(ground) == 3


@without_install
def test_a_broker_that_never_answers_costs_submitters_seconds_and_only_the_first_of_them(
    broker: Broker, alone: Ground
) -> None:
    app = alone.app("sqlite")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        app.transport.close()
        app.transport = broker.transport(f"redis://127.0.0.1:{silent.getsockname()[1]}/0", app)
        began = time.monotonic()
        first = app.submit("add", {"a": 1, "b": 1})
        middle = time.monotonic()
        second = app.submit("add", {"a": 1, "b": 2})
        assert middle - began < 8
        assert time.monotonic() - middle < (middle - began) / 2
        app.transport.close()
    assert [app.get(run.id).status for run in (first, second)] == ["PENDING", "PENDING"]
