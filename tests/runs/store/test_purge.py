"""A purge removes what is old, whole: never what a live key names, never the data of another run, whatever dies."""

import asyncio
import hashlib
import io
import json
import threading
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from semel import App, CostLimitExceeded, InvalidRequest, JobStore, Quota, Run, RunNotFound
from semel._concurrency.sync import run_sync
from semel.cli import main as semel
from semel.db.dialect import StatementContext, hot, transaction
from semel.errors import ResultStoreError
from semel.runs.execution.input_data import folder_of, ref_of
from semel.runs.results import FileResults
from semel.runs.store import maintenance, submit, transitions
from semel.runs.submission import SubmitOptions
from semel.runs.types import Artifact
from semel.runs.worker.sweeper import Sweeper, remover
from support.databases import DATABASES, Databases
from support.programs import Program
from support.runs_harness import EVENTS, PATIENCE, RunsHarness
from support.waiting import eventually

DAY = 86400


@pytest.fixture
def postgres_harness(databases: Databases, tmp_path: Path) -> Iterator[RunsHarness]:
    with databases.empty("postgres") as database, RunsHarness(database.kind, database.url, tmp_path) as harness:
        yield harness


def put(harness: RunsHarness, ref: str) -> str:
    FileResults(harness.folder / "artifacts").put(ref, b"[1]")
    return ref


def files(harness: RunsHarness) -> list[str]:
    root = harness.folder / "artifacts"
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


def ended(harness: RunsHarness, kind: Any = "succeeded", data: str | None = None, **options: Any) -> Run:
    """A run that is over, with a result and an artifact in the result store, and perhaps with data."""
    hand = harness.hand()
    run = harness.timeless.submit("add", {"a": 1}, dedupe=False, **options)
    if data is not None:
        harness.sql("UPDATE semel_active SET data_ref = :ref WHERE id = :id", ref=put(harness, data), id=run.id)
    (taken,) = hand.lease()
    told: dict[str, Any] = {"reason": "it failed"}
    if kind == "succeeded":
        ref, artifact = (put(harness, f"{run.id}/{taken.fence}/{name}") for name in ("result.json", "artifacts/a"))
        digest = hashlib.sha256(b"[1]").hexdigest()
        told = {"result": None, "result_ref": ref, "result_digest": digest, "result_size": 3}
        told["artifacts"] = [Artifact("a", artifact, 3, digest)]
    assert hand.end(taken, kind, **told)
    return harness.timeless.get(run.id)


def data_of(name: str) -> str:
    return ref_of(hashlib.sha256(name.encode()).hexdigest())


# -- keys ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["app", "aio", "gc"])
def test_a_run_that_a_live_key_names_stays_until_the_key_ends(harness: RunsHarness, by: str) -> None:
    named = ended(harness, idempotency_key="k", key_ttl=90 * DAY)
    nameless, soon_over = ended(harness), ended(harness, idempotency_key="short", key_ttl=DAY)
    stored = ended(harness)
    jobs = JobStore(harness.url, clock=harness.clock)
    jobs.store_idempotency_key("document", stored.id, 42, ttl_hours=24 * 90)
    harness.clock.advance(40 * DAY)
    assert purge(harness, by) == 2
    assert {run.id for run in harness.timeless.runs().runs} == {named.id, stored.id}
    again = harness.timeless.submit("add", {"a": 1}, idempotency_key="k", key_ttl=90 * DAY)
    assert (again.id, again.replayed) == (named.id, True), "it does not run a second time"
    assert harness.timeless.result(named.id) == [1]
    assert jobs.check_idempotency_key("document", 42) == stored.id
    assert not [path for path in files(harness) if nameless.id in path or soon_over.id in path]
    harness.clock.advance(51 * DAY)
    assert purge(harness, by) == 2
    assert files(harness) == []
    assert not harness.timeless.submit("add", {"a": 1}, idempotency_key="k").replayed
    jobs.close()


def test_a_run_that_a_key_found_by_its_payload_stays_until_the_key_ends(harness: RunsHarness) -> None:
    """The key is not the one that the run was made with; it names the run all the same."""
    made = harness.timeless.submit("add", {"a": 1})
    asked: dict[str, Any] = {"idempotency_key": "k", "key_ttl": 90 * DAY, "dedupe": True}
    assert harness.timeless.submit("add", {"a": 1}, **asked).id == made.id
    harness.timeless.cancel(made.id)
    harness.clock.advance(40 * DAY)
    assert purge(harness, "app") == 0
    assert harness.timeless.submit("add", {"a": 1}, **asked).id == made.id
    harness.clock.advance(51 * DAY)
    assert purge(harness, "app") == 1


@pytest.mark.parametrize("what", EVENTS)
def test_a_run_whose_events_wait_stays_for_a_week_longer(harness: RunsHarness, what: str) -> None:
    """A receiver may be away for longer than the retention. One that never comes back does not keep runs for ever."""
    waiting, other = ended(harness), ended(harness)
    harness.sql(EVENTS[what], id=waiting.id, now=harness.clock.us)
    harness.clock.advance(31 * DAY)
    assert purge(harness, "app") == 1
    assert {run.id for run in harness.timeless.runs().runs} == {waiting.id} != {other.id}
    harness.clock.advance(6 * DAY - 60)
    assert purge(harness, "app") == 0
    harness.clock.advance(120)
    assert purge(harness, "app") == 1
    assert harness.sql("SELECT count(*) FROM semel_outbox")[0][0] == 0
    assert harness.sql("SELECT count(*) FROM semel_deliveries")[0][0] == 0


@pytest.mark.parametrize("state", ["delivered", "dead"])
def test_a_delivery_that_is_over_keeps_no_run(harness: RunsHarness, state: str) -> None:
    run = ended(harness)
    harness.sql(EVENTS["a delivery that waits"].replace("waiting", state), id=run.id, now=harness.clock.us)
    harness.clock.advance(31 * DAY)
    assert purge(harness, "app") == 1


def purge(harness: RunsHarness, by: str) -> int:
    if by == "app":
        return harness.timeless.purge(30 * DAY)
    if by == "aio":

        async def purge() -> int:
            app = harness.open(clock=harness.clock).aio
            try:
                return await app.purge(30 * DAY)
            finally:
                await app.close()

        return asyncio.run(purge())
    return collected(harness)


def collected(harness: RunsHarness) -> int:
    """What ``semel gc`` removes, on the clock of the test; a dry run says the same before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "semel.runs.store.RunStore.statement_context", property(lambda _: StatementContext(harness.clock.us))
        )
        counts = []
        for dry in (["--dry-run"], []):
            said = _said(["gc", "--db", harness.url, "--artifacts", str(harness.folder / "artifacts"), "--json", *dry])
            counts.append(said["removed"]["runs"])
    assert counts[0] == counts[1]
    return int(counts[1])


def _said(arguments: list[str]) -> Any:
    out = io.StringIO()
    with redirect_stdout(out):
        assert semel(arguments) == 0
    return json.loads(out.getvalue())


def test_the_key_of_another_run_keeps_nothing(harness: RunsHarness) -> None:
    """The same key, used again after its end, names a run of its own."""
    ended(harness, idempotency_key="k", key_ttl=DAY)
    harness.clock.advance(40 * DAY)
    again = ended(harness, idempotency_key="k", key_ttl=DAY)
    assert harness.timeless.purge(30 * DAY) == 1
    assert [run.id for run in harness.timeless.runs().runs] == [again.id]


# -- retries and uploads at the same time ------------------------------------------------------------------------------


def retried(harness: RunsHarness, run: Run) -> submit.Submission:
    desk = harness.timeless._engine._builder
    return desk.submission(run.model, run.parameters, SubmitOptions(), retry_of=run.id)


def test_a_purge_beside_a_retry_leaves_the_new_runs_data(postgres_harness: RunsHarness) -> None:
    """The retry is written and not committed when the purge looks."""
    harness = postgres_harness
    failed = ended(harness, "fatal", data=data_of("a"))
    harness.clock.advance(DAY)
    app = harness.timeless

    def retry_slowly(conn: Any) -> submit.Answer:
        with transaction(conn):
            (answer,) = submit.submit(conn, [retried(harness, failed)], app._engine.store.statement_context)
            other = harness.open(clock=harness.clock)
            assert other.purge(0) == 0, "it is in use"
        return answer

    answer = run_sync(app._engine.store.write(hot(retry_slowly)))
    assert isinstance(answer, submit.Created)
    assert app.get(answer.id).data_ref == data_of("a")
    assert app.purge(0) == 1
    assert files(harness) == [data_of("a")], "the new run has it"
    app.cancel(answer.id)
    harness.clock.advance(DAY)
    assert app.purge(0) == 1
    assert files(harness) == []


def test_a_run_that_was_purged_meanwhile_is_not_retried_without_its_data(harness: RunsHarness) -> None:
    failed = ended(harness, "fatal", data=data_of("a"))
    harness.clock.advance(DAY)
    submission = retried(harness, failed)
    assert harness.timeless.purge(0) == 1
    (answer,) = run_sync(harness.timeless._engine.store.submit_many([submission]))
    assert isinstance(answer, RunNotFound)
    assert harness.timeless.runs().runs == []
    assert harness.sql("SELECT count(*) FROM semel_active")[0][0] == 0


def test_a_purge_beside_an_upload_leaves_the_data_that_it_shares(postgres_harness: RunsHarness) -> None:
    """The upload found the data there, and its release is not committed when the purge comes to the files."""
    harness = postgres_harness
    ended(harness, data=data_of("a"))
    harness.clock.advance(DAY)
    app = harness.timeless
    waits = app.submit("add", {"a": 2}, dedupe=False)
    harness.sql(
        "UPDATE semel_active SET due_us = since_us + 3162240000000000, ready = false WHERE id = :id", id=waits.id
    )
    ledger = app._engine.store
    purged: list[int] = []
    purging = threading.Thread(target=lambda: purged.append(harness.open(clock=harness.clock).purge(0)))

    def release_slowly(conn: Any) -> None:
        with transaction(conn):
            maintenance.lock_data(conn, data_of("a"), ledger.statement_context)
            transitions.release(conn, waits.id, data_of("a"), ledger.statement_context)
            purging.start()
            waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
            while not harness.sql(waiting)[0][0]:
                assert purging.is_alive(), "it did not wait"

    run_sync(ledger.write(hot(release_slowly)))
    purging.join(PATIENCE)
    assert purged == [1]
    assert files(harness) == [data_of("a")]
    assert app.get(waits.id).data_ref == data_of("a")


def test_data_goes_with_the_last_run_that_has_it(harness: RunsHarness) -> None:
    first = ended(harness, data=data_of("a"))
    harness.clock.advance(5)
    second = ended(harness, data=data_of("a"))
    assert first.data_ref == second.data_ref
    assert harness.timeless.purge(2) == 1
    assert data_of("a") in files(harness)
    harness.clock.advance(10)
    assert harness.timeless.purge(2) == 1
    assert files(harness) == []
    assert harness.sql("SELECT count(*) FROM semel_removals")[0][0] == 0, "nothing is left to do"


# -- faults ----------------------------------------------------------------------------------------------------------


class Locked(FileResults):
    """Some of it cannot be removed at the moment."""

    broken: frozenset[str] = frozenset()

    def remove(self, prefix: str) -> None:
        if prefix in self.broken:
            raise ResultStoreError(f"cannot remove {prefix}: it is locked")
        super().remove(prefix)


def test_files_that_cannot_be_removed_now_are_removed_by_the_next_purge(harness: RunsHarness) -> None:
    runs = [ended(harness) for _ in range(3)]
    harness.clock.advance(DAY)
    results = Locked(harness.folder / "artifacts")
    results.broken = frozenset({runs[1].id})
    app = harness.open(clock=harness.clock, artifacts=results)
    with pytest.raises(ResultStoreError, match=r"3 runs were removed, but not all files: .* is locked; purge again"):
        app.purge(0)
    assert {path.split("/")[0] for path in files(harness)} == {runs[1].id}
    results.broken = frozenset()
    assert app.purge(0) == 0
    assert files(harness) == []
    assert harness.sql("SELECT count(*) FROM semel_removals")[0][0] == 0


def test_files_that_were_left_are_not_forgotten_for_another_folder(
    harness: RunsHarness, capsys: pytest.CaptureFixture[str]
) -> None:
    """``semel gc`` counts what has files: two runs and the data of one, and not the run that had none."""
    runs = [ended(harness, "fatal"), ended(harness), ended(harness, data=data_of("a"))]
    harness.clock.advance(DAY)
    results = Locked(harness.folder / "artifacts")
    results.broken = frozenset({folder_of(data_of("a")), *(run.id for run in runs)})
    with pytest.raises(ResultStoreError):
        harness.open(clock=harness.clock, artifacts=results).purge(0)
    assert semel(["gc", "--db", harness.url, "--artifacts", str(harness.folder / "elsewhere")]) != 0
    assert "3 of the runs have files" in capsys.readouterr().err


PURGE = """
import os, signal
from pathlib import Path
from sqlalchemy import Engine, event
from support.databases import open_app
from semel.runs.results import FileResults

left = [die_at]


def step(*_):
    left[0] -= 1
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)


class Mortal(FileResults):
    def remove(self, prefix):
        step()
        super().remove(prefix)
        step()


app = open_app(url, artifacts=Mortal(Path(folder)), clock=lambda: now)
app.usage(0)  # by which it is connected
event.listen(Engine, "before_cursor_execute", step)
event.listen(Engine, "commit", step)
app.purge(1)
tell("done")
"""


def test_a_purge_that_is_killed_anywhere_leaves_no_run_without_its_files_and_the_next_goes_on(
    harness: RunsHarness,
) -> None:
    for die_at in range(1 + DATABASES.index(harness.kind), 100, 3):
        ended(harness, data=data_of("a"))
        kept = ended(harness, data=data_of("b"), idempotency_key=f"k{die_at}")
        harness.clock.advance(DAY / 2)
        given = {"url": harness.url, "folder": harness.folder / "artifacts", "now": harness.clock.us, "die_at": die_at}
        with Program(PURGE, **given) as program:
            program._process.join(PATIENCE)
            survived = program._process.exitcode == 0
        for run in harness.timeless.runs().runs:
            assert harness.timeless.result(run.id) == [1], f"killed at step {die_at}"
            assert b"".join(harness.timeless.artifact(run.id, "a")) == b"[1]"
            assert run.data_ref in files(harness)
        eventually(partial(_is_left, harness, {"data", kept.id}), "the purge of what the dead process may have locked")
        assert data_of("b") in files(harness)
        assert data_of("a") not in files(harness)
        assert harness.sql("SELECT count(*) FROM semel_removals")[0][0] == 0
        harness.sql("DELETE FROM semel_keys")
        harness.timeless.purge(0)
        assert files(harness) == []
        if survived:
            break
    assert die_at > 10, "there are at least as many steps"


def _is_left(harness: RunsHarness, folders: set[str]) -> bool:
    """Whether a purge leaves these folders with files; never any less."""
    harness.timeless.purge(1)
    found = {path.split("/")[0] for path in files(harness)}
    assert found >= folders
    return found == folders


def test_a_run_that_is_removed_is_in_no_list_of_what_failed(harness: RunsHarness) -> None:
    ended(harness, "fatal", user="ann")
    old = harness.timeless.submit("add", {"a": 1}, user="bob")
    harness.timeless.cancel(old.id)
    assert harness.sql("SELECT user_id, status FROM semel_unsuccessful ORDER BY user_id") == [
        ("ann", "FAILED"),
        ("bob", "CANCELLED"),
    ]
    harness.clock.advance(DAY)
    assert harness.timeless.purge(1) == 2
    assert harness.sql("SELECT * FROM semel_unsuccessful") == []


def test_the_logs_of_a_run_go_in_batches(harness: RunsHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance, "LOG_BATCH", 3)
    run = ended(harness)
    harness.sql(
        "INSERT INTO semel_run_logs (run_id, fence, line, at_us, level, text) VALUES "
        + ", ".join(f"('{run.id}', 1, {line}, 0, 'INFO', 'said')" for line in range(10))
    )
    harness.clock.advance(DAY)
    assert harness.timeless.purge(0) == 1
    assert harness.sql("SELECT count(*) FROM semel_run_logs")[0][0] == 0


# -- retention ---------------------------------------------------------------------------------------------------------


def test_what_removed_runs_cost_still_counts_against_the_limits(harness: RunsHarness) -> None:
    app = harness.timeless
    app.set_quota("ann", Quota(cost_daily=10, cost_yearly=20))
    for cost in (1, 2):
        ended(harness, user="ann", cost=cost)
    harness.clock.advance(1)
    assert app.purge(0) == 2
    ended(harness, user="ann", cost=4)
    waits = app.submit("add", {"a": 2}, user="ann", cost=2)
    before = app.usage("ann").spent
    assert before == {"daily": 9, "weekly": 9, "monthly": 9, "yearly": 9}
    harness.clock.advance(1)
    assert app.purge(0) == 1, "of the same day as those before"
    assert app.usage("ann").spent == before
    with pytest.raises(CostLimitExceeded):
        app.submit("add", {"a": 3}, user="ann", cost=2)
    app.cancel(waits.id)
    harness.clock.advance(DAY)  # the next day, which is the first of a month
    assert app.purge(0) == 1
    assert app.usage("ann").spent == {"daily": 0, "weekly": 7, "monthly": 0, "yearly": 7}, (
        "a run that never began is free"
    )
    assert app.usage("bob").spent["yearly"] == 0
    harness.clock.advance(401 * DAY)
    sweep(harness)
    assert harness.sql("SELECT count(*) FROM semel_costs")[0][0] == 0


def sweep(harness: RunsHarness, **options: Any) -> None:
    """One turn of the sweeper of an app with these options, on the harness's clock."""

    async def turn() -> None:
        app = App(harness.url, clock=harness.clock, artifacts=harness.folder / "artifacts", **options)
        store = app.ledger(awaited=True)
        sweeper = Sweeper(store, "sweeper", transport=app.transport, hooks=app.hooks, remove_old=remover(app, store))
        await sweeper.sweep()
        await store.close()

    asyncio.run(turn())


def test_a_sweeper_removes_what_ended_longer_ago_than_the_retention(harness: RunsHarness) -> None:
    old, named, failed = ended(harness), ended(harness, idempotency_key="k", key_ttl=30 * DAY), ended(harness, "fatal")
    waits = harness.timeless.submit("add", {"a": 7})
    harness.clock.advance(3 * DAY)
    late = ended(harness)
    everything = {run.id for run in (old, named, failed, waits, late)}
    for options in ({}, {"retention": 4 * DAY}):
        sweep(harness, **options)
        assert {run.id for run in harness.timeless.runs().runs} == everything
    sweep(harness, retention=2 * DAY)
    assert {run.id for run in harness.timeless.runs().runs} == {named.id, waits.id, late.id}
    assert {path.split("/")[0] for path in files(harness)} == {named.id, late.id}


def test_a_retention_has_a_unit_and_is_a_number(harness: RunsHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    app = harness.timeless
    assert app.retention is None
    monkeypatch.setenv("SEMEL_RETENTION", "90d")
    assert app.place_by_environment().retention == 90 * DAY
    monkeypatch.setenv("SEMEL_RETENTION", "90")
    with pytest.raises(InvalidRequest, match="SEMEL_RETENTION: '90' has no unit; days are written as 90d"):
        app.place_by_environment()
    for wrong in (0, -1, float("nan"), "90d", True):
        with pytest.raises(InvalidRequest, match="retention must be"):
            App(harness.url, retention=wrong)  # type: ignore[arg-type]


def test_a_purge_looks_at_no_run_that_was_submitted_too_lately(
    harness: RunsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "RUNS_BATCH", 2)
    for _ in range(3):
        ended(harness)
    harness.clock.advance(DAY)
    for _ in range(5):
        ended(harness)
    looks = []
    is_old = maintenance.is_old
    monkeypatch.setattr(maintenance, "is_old", lambda *about: looks.append(about) or is_old(*about))
    assert harness.timeless.purge(DAY / 2) == 3
    assert len(looks) == 2, "eight runs are four windows, and two of them began too lately"
