"""Runs over RQ, with stock workers: a message says "look", and whatever becomes of it, every run is executed once."""

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
from redis import Redis
from rq import Queue, Worker
from rq.job import Job
from rq.registry import FailedJobRegistry, StartedJobRegistry
from sqlalchemy import delete

from semel._concurrency.sync import run_sync
from semel.cli import main as semel_command
from semel.db.schema import runs as run_table
from semel.errors import AppNotFound, InvalidRequest
from semel.runs.app import App
from semel.runs.rq import RqTransport
from semel.runs.transports.broker import AppLocation, choose, find, location_of, perform
from semel.runs.types import Run, new_id
from support import servers
from support.transports import Ground, until

KINDS = ["sqlite", "postgres"]


@pytest.fixture(scope="module")
def ground(
    tmp_path_factory: pytest.TempPathFactory, redis_server: servers.Redis, postgres_server: servers.Postgres
) -> Iterator[Ground]:
    folder = tmp_path_factory.mktemp("rq")
    postgres_url = postgres_server.database()
    assert semel_command(["migrate", postgres_url]) == 0
    urls = {"sqlite": f"sqlite:///{folder / 'semel.db'}", "postgres": postgres_url}
    with Ground(folder, transport="rq", redis=redis_server.database(), urls=urls) as made:
        for _ in range(2):
            rq_worker(made, "-c", "transport_app")
        yield made
    postgres_server.drop(postgres_url)


@pytest.fixture
def alone(tmp_path: Path, redis_url: str) -> Iterator[Ground]:
    """A database and a Redis without workers."""
    urls = {"sqlite": f"sqlite:///{tmp_path / 'semel.db'}"}
    with Ground(tmp_path, transport="rq", redis=redis_url, urls=urls) as made:
        yield made


def rq_worker(ground: Ground, *options: str) -> subprocess.Popen[bytes]:
    return ground.start("rq", "worker", "--url", ground.settings["redis"], *options, "semel")


def work_off(ground: Ground, *options: str) -> None:
    """Let a worker do what there is, and leave."""
    options = options or ("-c", "transport_app")
    assert rq_worker(ground, "--burst", *options).wait(60) == 0, ground.output()


def queue_of(ground: Ground, name: str = "semel") -> Queue:
    return Queue(name, connection=Redis.from_url(ground.settings["redis"]))


def at_rest(ground: Ground) -> None:
    """Wait until every message has been dealt with."""
    queue = queue_of(ground)
    started = StartedJobRegistry(queue=queue)
    until(lambda: not queue.count and not started.get_job_ids(cleanup=False), "the end of all messages")


def over(ground: Ground, app: App, run: Run) -> Run:
    try:
        return app.wait(run.id, timeout=60)
    except TimeoutError as error:
        raise AssertionError(ground.output()[-8000:]) from error


@pytest.mark.parametrize("kind", KINDS)
def test_stock_workers_execute_sync_async_and_threaded_models(ground: Ground, kind: str) -> None:
    app = ground.app(kind)
    runs = [app.submit(model, {"a": 2, "b": 3}, dedupe=False) for model in ("add", "add_in_loop", "add_in_thread")]
    for run in runs:
        ended = over(ground, app, run)
        assert (ended.status, ended.attempts, app.result(run.id)) == ("SUCCEEDED", 1, 5)
        assert len(ground.notes(run.id)) == 1


def test_a_submission_from_an_event_loop_is_announced_as_well(alone: Ground) -> None:
    async def submit() -> Run:
        runs = alone.app("sqlite").aio
        try:
            return await runs.submit("add_in_loop", {"a": 1, "b": 1})
        finally:
            await runs.close()

    run = asyncio.run(submit())
    assert [job.args[0] for job in queue_of(alone).jobs] == [run.id]


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_that_comes_four_times_makes_one_execution(ground: Ground, kind: str) -> None:
    app = ground.app(kind)
    run = app.submit("add_in_loop", {"a": 1, "b": 1}, dedupe=False)
    app.transport.announce([(run.id, run.queue)] * 3)
    assert over(ground, app, run).status == "SUCCEEDED"
    at_rest(ground)
    assert len(ground.notes(run.id)) == 1
    assert app.get(run.id).attempts == 1


@pytest.mark.parametrize("kind", KINDS)
def test_messages_about_runs_that_are_over_or_unknown_change_nothing_and_the_worker_goes_on(
    ground: Ground, kind: str
) -> None:
    app = ground.app(kind)
    finished = app.submit("add_in_loop", {"a": 1, "b": 1}, dedupe=False)
    removed = app.submit("add_in_loop", {"a": 1, "b": 1}, dedupe=False)
    cancelled = app.submit("add_in_loop", {"a": 1, "b": 1}, delay=3600)
    app.cancel(cancelled.id)
    before, _ = [over(ground, app, run) for run in (finished, removed)]
    run_sync(app._engine.store.write(lambda conn: conn.execute(delete(run_table).where(run_table.c.id == removed.id))))
    unknown = new_id()

    app.transport.announce([(each, "default") for each in (finished.id, removed.id, cancelled.id, unknown, "nonsense")])
    last = app.submit("add_in_loop", {"a": 1, "b": 1}, dedupe=False)

    assert over(ground, app, last).status == "SUCCEEDED"
    at_rest(ground)
    assert app.get(finished.id) == before
    assert app.get(cancelled.id).status == "CANCELLED"
    assert not ground.notes(cancelled.id)
    assert not ground.notes(unknown)
    assert FailedJobRegistry(queue=queue_of(ground)).get_job_ids() == []


def test_a_message_that_was_lost_is_sent_again_by_the_sweeper(alone: Ground) -> None:
    app = alone.app("sqlite")
    runs = [app.submit("add_in_loop", {"a": 1, "b": n}) for n in range(3)]
    queue = queue_of(alone)
    queue.empty()
    until(lambda: queue.count >= 3, "the second announcement")
    work_off(alone, "--worker-class", "rq.SimpleWorker")
    assert [over(alone, app, run).status for run in runs] == ["SUCCEEDED"] * 3
    assert [len(alone.notes(run.id)) for run in runs] == [1, 1, 1]


def test_a_worker_looks_after_its_run_for_what_nobody_was_told_of_where_no_sweeper_lives(alone: Ground) -> None:
    app = alone.app("sqlite")
    later = app.submit("add_in_loop", {"a": 1, "b": 1}, delay=0.01)
    run = app.submit("add_in_loop", {"a": 1, "b": 2})
    app.transport.close()
    queue = queue_of(alone)
    queue.empty()
    assert perform(app, run.id, sweeps=True)
    assert [job.args[0] for job in queue.jobs] == [later.id]
    assert not perform(app, run.id, sweeps=True)


def test_closing_leaves_no_sweeper_behind_and_the_next_submission_starts_one(alone: Ground) -> None:
    def sweepers() -> set[int | None]:
        return {thread.ident for thread in threading.enumerate() if thread.name == "semel-sweeper"}

    app = alone.app("sqlite")
    app.transport = RqTransport(alone.settings["redis"], app, sweep_every=0.002)
    others = sweepers()
    for number in range(30):
        app.submit("add_in_loop", {"a": 1, "b": number}, delay=0.001)
        assert sweepers() > others
        time.sleep(random.uniform(0, 0.01))  # so that the sweeper is met at whatever it does
        app.transport.close()
    until(lambda: sweepers() <= others, "the end of the sweepers")


def test_runs_that_nobody_executes_do_not_fill_redis_with_messages(alone: Ground) -> None:
    app = alone.app("sqlite")
    runs = [app.submit("add_in_loop", {"a": 1, "b": n}) for n in range(3)]
    waiting = [(run.id, run.queue) for run in runs]
    for _ in range(5):
        assert app.transport.announce(waiting, again=True)
    assert queue_of(alone).count == 3
    assert app.transport.announce([*waiting, (new_id(), "default")], again=True)
    assert queue_of(alone).count == 7


def test_other_queues_have_names_of_their_own(alone: Ground) -> None:
    app = alone.app("sqlite")
    app.submit_many([{"model": "add", "parameters": {"a": 1, "b": n}, "queue": q} for n, q in enumerate("xyx")])
    assert [queue_of(alone, f"semel-{name}").count for name in "xy"] == [2, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_fails_is_retried_after_its_backoff(ground: Ground, kind: str) -> None:
    app = ground.app(kind)
    run = app.submit("flaky", dedupe=False)
    ended = over(ground, app, run)
    assert (ended.status, ended.attempts, app.result(run.id)) == ("SUCCEEDED", 2, 2)


def test_a_delayed_run_is_announced_when_it_is_due(ground: Ground) -> None:
    app = ground.app("postgres")
    run = app.submit("add_in_loop", {"a": 1, "b": 1}, delay=0.5)
    ended = over(ground, app, run)
    assert ended.status == "SUCCEEDED"
    assert ended.started_us is not None
    assert ended.started_us - ended.created_us >= 500_000


@pytest.mark.parametrize(("kind", "model"), [("sqlite", "slow"), ("postgres", "slow_in_loop")])
def test_the_run_of_a_killed_work_horse_is_executed_again_and_only_the_new_fence_counts(
    ground: Ground, kind: str, model: str
) -> None:
    app = ground.app(kind)
    run = app.submit(model, {"gate": "never"}, dedupe=False)
    ((_, fence, horse),) = until(lambda: ground.notes(run.id, "begun"), "the first attempt")
    os.kill(horse, signal.SIGKILL)
    ended = over(ground, app, run)
    assert (ended.status, ended.attempts, ended.losts) == ("SUCCEEDED", 2, 1)
    assert app.result(run.id) == ended.fence > fence
    assert [noted[:2] for noted in ground.notes(run.id)] == [(2, ended.fence)]


def test_sigterm_to_a_worker_and_its_work_horse_lets_the_run_finish(alone: Ground) -> None:
    app = alone.app("sqlite")
    gate = alone.folder / "gate"
    run = app.submit("slow", {"gate": str(gate)})
    worker = rq_worker(alone, "-c", "transport_app")
    ((_, _, horse),) = until(lambda: alone.notes(run.id, "begun"), "the start of the run")
    worker.send_signal(signal.SIGTERM)
    os.kill(horse, signal.SIGTERM)  # as a service manager does that signals every process
    redis = Redis.from_url(alone.settings["redis"])
    until(lambda: next(each.shutdown_requested_date for each in Worker.all(redis)), "the warm shutdown")
    gate.touch()
    assert worker.wait(60) == 0, alone.output()
    ended = app.get(run.id)
    assert (ended.status, ended.attempts) == ("SUCCEEDED", 1), alone.output()


@pytest.mark.parametrize(("kind", "count"), [("sqlite", 10), ("postgres", 50)])
def test_two_workers_execute_each_of_many_runs_once(ground: Ground, kind: str, count: int) -> None:
    app = ground.app(kind)
    asked = [{"model": "add_in_loop", "parameters": {"a": 50, "b": n}, "dedupe": False} for n in range(count)]
    runs = [run for run in app.submit_many(asked) if isinstance(run, Run)]
    assert len(runs) == count
    ended = [over(ground, app, run) for run in runs]
    assert {(run.status, run.attempts) for run in ended} == {("SUCCEEDED", 1)}
    assert [app.result(run.id) for run in runs] == [50 + n for n in range(count)]
    assert {len(ground.notes(run.id)) for run in runs} == {1}


def test_redis_that_is_away_at_submit_delays_the_run_and_loses_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with servers.redis() as server:
        urls = {"sqlite": f"sqlite:///{tmp_path / 'semel.db'}"}
        with Ground(tmp_path, transport="rq", redis=server.url, urls=urls) as ground:
            app = ground.app("sqlite")
            server.stop()
            began = time.monotonic()
            run = app.submit("add_in_loop", {"a": 1, "b": 1})
            assert time.monotonic() - began < 5
            assert app.get(run.id).status == "PENDING"
            assert f"run {run.id} could not be announced" in caplog.text
            assert "the sweeper will announce" in caplog.text
            server.start()
            until(lambda: queue_of(ground).count, "the announcement")
            work_off(ground)
            assert (app.get(run.id).status, app.get(run.id).attempts) == ("SUCCEEDED", 1)


def test_redis_that_never_answers_costs_submitters_seconds_and_only_the_first_of_them(alone: Ground) -> None:
    app = alone.app("sqlite")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        app.transport.close()
        app.transport = RqTransport(f"redis://127.0.0.1:{silent.getsockname()[1]}/0", app)
        began = time.monotonic()
        first = app.submit("add", {"a": 1, "b": 1})
        middle = time.monotonic()
        second = app.submit("add", {"a": 1, "b": 2})
        assert middle - began < 8
        assert time.monotonic() - middle < 1
        app.transport.close()
    assert [app.get(run.id).status for run in (first, second)] == ["PENDING", "PENDING"]


def test_an_address_names_the_module_that_made_the_app_and_no_password(
    alone: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = alone.app("sqlite")
    importer = ModuleType("importer")
    vars(importer)["borrowed"] = app
    monkeypatch.setitem(sys.modules, "importer", importer)
    assert isinstance(app.transport, RqTransport)
    assert app.transport.address().references == [("transport_app:sqlite_app", None)]
    monkeypatch.delitem(sys.modules, "transport_app")
    assert location_of(app, "transport_app").references == [("importer:borrowed", None)]
    monkeypatch.undo()
    ways = ["postgresql://ann:secret@db/semel", "postgresql://bob:other@db/semel", "postgresql://ann:secret@db/else"]
    first, second, third = (location_of(App(url)) for url in ways)
    assert "secret" not in repr(first)
    assert first.digest == second.digest != third.digest


def test_a_message_finds_its_app_by_name_then_by_database_then_because_there_is_only_one(alone: Ground) -> None:
    app = alone.app("sqlite")
    other = App("postgresql://db/other")
    assert find(AppLocation([("transport_app:sqlite_app", None)], "another digest")) is app
    assert choose([other, app], location_of(app)) is app
    assert choose([other], location_of(app)) is other
    with pytest.raises(AppNotFound, match=r"x:app .cannot import model.*Start the worker where"):
        choose([app, other], AppLocation([("x:app", None)], "0"), ["cannot import model"])


def test_a_url_that_is_none_is_refused_when_the_app_is_made(sqlite_url: str) -> None:
    with pytest.raises(InvalidRequest, match="this Redis URL cannot be used"):
        App(sqlite_url, transport="rq", redis="localhost")


PROGRAM = """
import semel

app = semel.App({url!r}, transport="rq", redis={redis!r})

@app.model("greet")
def greet(name: str) -> str:
    return f"hello {{name}}"

if __name__ == "__main__":
    print(app.submit("greet", {{"name": "ann"}}).id)
"""


@dataclass
class Left:
    """What a worker left that did what there was; it was started as ``rq worker --burst semel``."""

    ground: Ground
    ids: dict[str, str]
    jobs: list[Job]
    broken: Job


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory, redis_server: servers.Redis) -> Iterator[Left]:
    folder = tmp_path_factory.mktemp("rq")
    urls = {kind: f"sqlite:///{folder / kind}.db" for kind in ("unnamed", "sqlite")}
    times = {"sweep_every": 3600, "tell_again": 3600}
    with Ground(folder, transport="rq", redis=redis_server.database(), urls=urls, **times) as ground:
        transport = ground.app("sqlite").transport
        assert isinstance(transport, RqTransport)
        transport.send({"semel": [new_id()]}, AppLocation([("no_such_module:app", None)], "0"))
        ids = {kind: ground.app(kind).submit("add_in_loop", {"a": 1, "b": 1}).id for kind in urls}
        ids["program"] = submitted_by_a_program(ground)
        broken, *jobs = queue_of(ground).jobs
        work_off(ground, "--quiet")
        yield Left(ground, ids, jobs, broken)


def submitted_by_a_program(ground: Ground) -> str:
    program = ground.folder / "one_file.py"
    program.write_text(PROGRAM.format(url=ground.settings["urls"]["sqlite"], redis=ground.settings["redis"]))
    done = subprocess.run([sys.executable, program], check=True, capture_output=True, text=True, timeout=60)
    return done.stdout.strip()


def test_a_message_has_no_time_limit_and_leaves_nothing_in_redis(left: Left) -> None:
    assert {(job.timeout, job.result_ttl) for job in left.jobs} == {(-1, 0)}
    assert {job.args[0] for job in left.jobs} == set(left.ids.values())
    keys = [key.decode() for key in Redis.from_url(left.ground.settings["redis"]).keys("rq:*")]
    assert not [key for key in keys for job in left.jobs if job.id in key]


def test_an_app_is_found_by_its_name(left: Left) -> None:
    app = left.ground.app("sqlite")
    assert app.get(left.ids["sqlite"]).status == "SUCCEEDED", left.ground.output()


def test_an_app_that_no_module_names_is_found_by_its_models_and_its_database(left: Left) -> None:
    app = left.ground.app("unnamed")
    assert location_of(app).references == [("transport_app:add", None)]
    assert app.get(left.ids["unnamed"]).status == "SUCCEEDED", left.ground.output()


def test_a_program_of_one_file_is_found_by_its_path(left: Left) -> None:
    app = left.ground.app("sqlite")
    assert app.result(left.ids["program"]) == "hello ann", left.ground.output()


def test_an_app_that_cannot_be_imported_is_a_failed_job_that_says_so(left: Left) -> None:
    assert FailedJobRegistry(queue=queue_of(left.ground)).get_job_ids() == [left.broken.id]
    result = left.broken.latest_result()
    assert result is not None
    assert "No module named 'no_such_module'" in (result.exc_string or "")
    assert "Start the worker where" in (result.exc_string or "")
