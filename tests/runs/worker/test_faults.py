"""Models, databases and machines that misbehave: no run hangs for it, is lost for it, or pays for it."""

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import create_engine, make_url, text

from semel import App, InvalidRequest, JobStore, Quota, QuotaExceeded, Run, SemelError
from semel._concurrency.sync import run_sync
from semel.cli import main as semel_command
from semel.runs.store import lease, maintenance, transitions
from semel.runs.store.lease import LeaseRenewal, LeaseRequest
from semel.runs.store.maintenance import WorkerRecord
from semel.runs.store.outbox import OutboxEvent
from semel.runs.worker.active_runs import ActiveRun, ActiveRuns
from semel.runs.worker.heartbeat import Heartbeat
from semel.runs.worker.run_logs import WorkerLogger
from semel.testing import FakeClock
from support.waiting import eventually

PATIENCE = 60


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest) -> str:
    url: str = request.getfixturevalue(f"migrated_{request.param}_url")
    return url


@pytest.fixture
def app(url: str, tmp_path: Path) -> Iterator[App]:
    app = App(url, artifacts=tmp_path / "artifacts", dedupe_window=0)
    yield app
    app.close()


async def deaf(*, seconds: float = 30.0) -> None:
    """An async model that swallows its cancellation."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends and not _heard.is_set():
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0.05)


_heard = threading.Event()


def close_everything() -> None:
    """What recipes for daemons do."""
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))


def leave_a_process_behind() -> None:
    subprocess.Popen([sys.executable, "-c", "import time\nwhile True: print('left', flush=True); time.sleep(0.05)"])


def leave_a_thread_behind() -> None:
    def speak() -> None:
        while True:
            sys.stdout.write("left\n")
            sys.stdout.flush()
            time.sleep(0.02)

    threading.Thread(target=speak, daemon=True).start()


def sleep_a_while() -> None:
    time.sleep(0.3)


def noop() -> None:
    """Nothing."""


def test_a_deaf_model_is_left_behind_when_its_run_is_cancelled(app: App) -> None:
    app.model("deaf", grace=0.1)(deaf)
    _heard.clear()
    try:
        with app.working(drain=0.1, processes=0):
            run = app.submit("deaf")
            eventually(lambda: app.get(run.id).status == "RUNNING")
            app.cancel(run.id, why="no need")
            ended = app.wait(run.id, timeout=PATIENCE)
            assert (ended.status, ended.note) == ("CANCELLED", "no need")
    finally:
        _heard.set()


def test_a_deaf_model_is_left_behind_when_its_time_is_up(app: App) -> None:
    app.model("deaf", timeout=0.1, grace=0.1, max_attempts=1)(deaf)
    _heard.clear()
    try:
        with app.working(drain=0.1, processes=0):
            ended = app.wait(app.submit("deaf").id, timeout=PATIENCE)
            assert (ended.status, ended.last_error) == ("FAILED", "timed out after 0.1 seconds and did not stop")
    finally:
        _heard.set()


def test_a_deaf_model_does_not_keep_a_worker_from_stopping(app: App) -> None:
    app.model("deaf")(deaf)
    _heard.clear()
    try:
        with app.working(drain=0.1, processes=0):
            run = app.submit("deaf")
            eventually(lambda: app.get(run.id).status == "RUNNING")
        back = app.get(run.id)
        assert (back.status, back.step, back.attempts, back.losts) == ("PENDING", "returned", 0, 0)
        assert back.note == "the worker was stopped before the run was done"
    finally:
        _heard.set()


def test_quotas_hold_whatever_the_servers_isolation_is(postgres_url: str) -> None:
    assert semel_command(["migrate", postgres_url]) == 0
    with psycopg.connect(postgres_url, autocommit=True) as conn:
        name = conn.info.dbname
        conn.execute(f"ALTER DATABASE \"{name}\" SET default_transaction_isolation = 'repeatable read'")  # type: ignore[arg-type]
    app = App(postgres_url, dedupe_window=0)
    app.model("noop", isolation="thread")(noop)
    app.set_quota("u", Quota(max_concurrent=1))
    got: list[object] = []
    barrier = threading.Barrier(8)

    def race() -> None:
        own, jobs = App(postgres_url, dedupe_window=0), JobStore(postgres_url)
        own.model("noop", isolation="thread")(noop)
        barrier.wait()
        with suppress(QuotaExceeded):
            got.append(own.submit("noop", user="u").id)
        got.extend(filter(None, [jobs.reserve_job_slot("v", 1)]))
        own.close()
        jobs.close()

    threads = [threading.Thread(target=race) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 2, "one run and one reservation"
    app.close()


def test_a_worker_that_cannot_start_children_gives_runs_back_uncharged(
    app: App, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    app.model("noop")(noop)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "gone"))
    with app.working(processes=1, poll=0.1):
        runs = [app.submit("noop") for _ in range(5)]
        eventually(lambda: any(app.get(run.id).step == "returned" for run in runs))
    assert [(run.status, run.losts, run.attempts) for run in map(app.get, [run.id for run in runs])] == [
        ("PENDING", 0, 0)
    ] * 5
    monkeypatch.undo()
    with app.working(processes=1, poll=0.1):
        assert all(app.wait(run.id, timeout=PATIENCE).status == "SUCCEEDED" for run in runs)


def test_a_publisher_that_hangs_does_not_stop_the_sweeping(url: str, tmp_path: Path) -> None:
    hangs = threading.Event()

    def publish(event: OutboxEvent) -> None:
        hangs.wait(PATIENCE)

    app = App(url, artifacts=tmp_path, publish=publish)
    app.model("noop", isolation="thread", lease=0.5, max_lost=9)(noop)
    try:
        with app.working(processes=0, sweep_every=0.1):
            eventually(lambda: len(app.workers()) == 1)
            run = app.submit("noop", queue="elsewhere")
            run_sync(
                app._engine.store.write(
                    lease.lease, LeaseRequest("dead", ("elsewhere",), ["noop"], 1), app._engine.store.statement_context
                )
            )
            eventually(lambda: app.get(run.id).losts == 1)
    finally:
        hangs.set()
    app.close()


def test_one_locked_row_costs_no_other_run_its_lease(postgres_url: str) -> None:
    assert semel_command(["migrate", postgres_url]) == 0
    app = App(postgres_url, dedupe_window=0)
    app.model("noop", isolation="thread")(noop)
    locked, free = app.submit("noop"), app.submit("noop")
    ledger = app._engine.store
    leased = run_sync(ledger.write(lease.lease, LeaseRequest("w", ("default",), ["noop"], 2), ledger.statement_context))
    with psycopg.connect(postgres_url) as other:
        other.execute("SELECT 1 FROM semel_active WHERE id = %s FOR UPDATE", (locked.id,))
        renewed = run_sync(
            ledger.write_once(
                lease.renew, [LeaseRenewal(each.id, each.fence) for each in leased], ledger.statement_context
            )
        )
        assert renewed == {free.id: False}
        assert run_sync(ledger.read_once(lease.watch, [(each.id, each.fence) for each in leased])) == {
            locked.id: False,
            free.id: False,
        }
    app.close()


def diverge(steps: int) -> dict[str, Any]:
    return {"metrics": {"loss": float("nan")}, "losses": [1.5, *[float("inf")] * steps]}


@pytest.mark.parametrize("steps", [1, 5000], ids=["in the row", "in the result store"])
def test_finished_work_is_not_thrown_away_for_a_number_that_is_not_finite(app: App, steps: int) -> None:
    app.model("diverge", isolation="thread")(diverge)
    with app.working(processes=0):
        run = app.wait(app.submit("diverge", {"steps": steps}).id, timeout=PATIENCE)
    assert (run.status, run.attempts, run.last_error) == ("SUCCEEDED", 1, None)
    assert run.warnings[0].startswith("$.metrics.loss is nan")
    assert run.warnings[1].startswith("$.losses[1] is inf")
    assert [each.warnings for each in app.runs().runs] == [run.warnings]
    assert repr(app.result(run.id)) == repr(diverge(steps))
    assert json.loads(app.result_json(run.id)) == {"metrics": {"loss": None}, "losses": [1.5, *[None] * steps]}

    async def awaited() -> Any:
        try:
            return await app.aio.result(run.id)
        finally:
            await app.aio.close()

    assert repr(asyncio.run(awaited())) == repr(diverge(steps))


def test_progress_that_a_heartbeat_could_not_write_comes_with_the_next(url: str, app: App) -> None:
    """A heartbeat that failed, and one that left out a row which somebody had locked, have told nothing."""
    app.model("noop", isolation="thread")(noop)
    run = app.submit("noop")
    parts = make_url(url)
    engine = create_engine(parts.set(drivername="postgresql+psycopg") if "postgres" in url else parts)

    async def scenario() -> None:
        ledger = app.ledger(awaited=True)
        (leased,) = await ledger.write(
            lease.lease, LeaseRequest("w", ("default",), ["noop"], 1), ledger.statement_context
        )
        run = ActiveRun(leased, app.registry["noop"], "w", time.monotonic())
        active = ActiveRuns()
        active.add(run)
        record = WorkerRecord(id="w", name="w", host="here", pid=1, queues=[], models={}, slots={})
        heart = Heartbeat(ledger, active, WorkerLogger("w"), record=lambda: record, lost=_never, cancelled=_never)
        run.progress(0.4, "fitting")
        with engine.begin() as conn:
            conn.execute(text("ALTER TABLE semel_active RENAME TO semel_elsewhere"))
        with pytest.raises(SemelError):
            await heart.beat()
        with engine.begin() as conn:
            conn.execute(text("ALTER TABLE semel_elsewhere RENAME TO semel_active"))
        await heart.beat()
        assert shown() == (0.4, "fitting")
        run.progress(0.5, "fitting")
        if "postgres" in url:
            with engine.begin() as conn:
                conn.execute(text("SELECT 1 FROM semel_active FOR UPDATE"))
                await heart.beat()
            assert shown() == (0.4, "fitting")
        await heart.beat()
        assert shown() == (0.5, "fitting")
        assert not run.progress_changed
        await ledger.close()

    def shown() -> tuple[float | None, str | None]:
        found = app.get(run.id)
        return found.progress, found.progress_note

    try:
        asyncio.run(scenario())
    finally:
        engine.dispose()


def _never(run: ActiveRun) -> None:
    raise AssertionError(f"{run.leased.id} was neither lost nor cancelled")


def test_a_clock_that_is_put_back_stops_neither_election_nor_sweep(url: str) -> None:
    clock = FakeClock()
    app = App(url, clock=clock)
    app.model("noop", isolation="thread")(noop)
    ledger = app._engine.store
    run = app.submit("noop")
    run_sync(ledger.write(lease.lease, LeaseRequest("dead", ("default",), ["noop"], 1), ledger.statement_context))
    assert run_sync(ledger.write(maintenance.acquire_leadership, "sweeper", "dead", 15, ledger.statement_context))
    assert not run_sync(ledger.write(maintenance.acquire_leadership, "sweeper", "heir", 15, ledger.statement_context))
    clock.advance(-3600)
    assert run_sync(ledger.write(maintenance.acquire_leadership, "sweeper", "heir", 15, ledger.statement_context))
    run_sync(ledger.write(maintenance.repair_times, ledger.statement_context))
    clock.advance(61)
    assert [lost.id for lost in run_sync(ledger.write(transitions.lose_expired, ledger.statement_context))] == [run.id]
    app.close()


def test_a_model_that_closes_its_files_is_lost_and_not_waited_for(app: App) -> None:
    app.model("closer", max_lost=1)(close_everything)
    with app.working(processes=1):
        ended = app.wait(app.submit("closer").id, timeout=PATIENCE)
    assert (ended.status, ended.losts) == ("FAILED", 1)


@pytest.mark.parametrize("leaves", [leave_a_process_behind, leave_a_thread_behind])
def test_what_one_run_leaves_behind_does_not_speak_in_anothers_log(app: App, leaves: Callable[[], None]) -> None:
    app.model("leaves")(leaves)
    app.model("quiet")(sleep_a_while)
    with app.working(processes=1):
        assert app.wait(app.submit("leaves").id, timeout=PATIENCE).status == "SUCCEEDED"
        quiet = app.wait(app.submit("quiet").id, timeout=PATIENCE)
    assert quiet.status == "SUCCEEDED"
    assert app.logs(quiet.id) == []


def test_a_program_without_its_main_guard_is_told_and_starts_no_avalanche(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        f"""
from semel import App
app = App("sqlite:///{tmp_path}/semel.db")

@app.model("f", backoff=(0.05,))
def f() -> None: ...

with app.working(processes=1):
    run = app.wait(app.submit("f").id, timeout={PATIENCE})
    print(run.status, run.last_error)
"""
    )
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert done.stdout.startswith("FAILED cannot import model")
    assert 'put what the program does under if __name__ == "__main__":' in done.stdout
    app = App(f"sqlite:///{tmp_path}/semel.db")
    assert len(app.runs().runs) == 1
    app.close()


def test_who_waits_for_a_kind_of_slot_is_told_of_that_kind(app: App) -> None:
    app.model("noop")(noop)
    app.model("deaf")(deaf)
    with app.working(processes=0):
        eventually(lambda: len(app.workers()) == 1)
        waiting = app.waiting(app.submit("noop").id)
        assert waiting is not None
        assert waiting.reason.startswith("the live workers of the queue 'default' have no slots for the model 'noop'")


@pytest.mark.parametrize(
    "ask",
    [
        lambda app, run: app.runs(model="\0"),
        lambda app, run: app.runs(limit="5"),
        lambda app, run: app.runs(limit=0),
        lambda app, run: app.runs(tenant=5.0),
        lambda app, run: app.logs(run.id, limit=-1),
        lambda app, run: app.get(run.id, tenant="\0"),
        lambda app, run: app.summary(tenant="\0"),
        lambda app, run: app.cancel(run.id, why=None),
        lambda app, run: app.cancel(run.id, why="x" * 1001),
        lambda app, run: app.submit_many([None]),
        lambda app, run: app.submit_many({"model": "noop"}),
        lambda app, run: app.submit("noop", user=10**5000),
    ],
)
def test_wrong_questions_get_a_clear_error(app: App, ask: Callable[[App, Run], object]) -> None:
    app.model("noop", isolation="thread")(noop)
    run = app.submit("noop")
    with pytest.raises(InvalidRequest):
        ask(app, run)
    assert app.get(run.id).status == "PENDING"
