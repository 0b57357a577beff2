"""Runs of a time are in one partition, which the sweeper makes ahead and drops whole when all its runs may go."""

import asyncio
import json
import logging
import re
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any, LiteralString

import psycopg
import pytest
from sqlalchemy import Engine, event
from sqlalchemy.engine import make_url

from semel import App, Run, audit
from semel._concurrency.sync import run_sync
from semel.cli._database import engine_of
from semel.runs.execution.input_data import ref_of
from semel.runs.store import partitions, seals, submit
from semel.runs.store.partitions import Partition
from semel.runs.submission import SubmitOptions
from semel.runs.types import INTERNAL_QUEUE, MICRO, id_at, new_id
from semel.runs.worker.sweeper import Sweeper, remover
from semel.testing import FakeClock
from support.databases import MISCOUNTED, database_url
from support.runs_harness import EVENTS, RunsHarness

HOUR, DAY = 3600, 86400
RETENTION = DAY
TABLES = ("semel_runs", "semel_attempts", "semel_run_logs")


class Ledger(RunsHarness):
    """A database with a partition for the runs that are submitted in this test, and the clock of this machine."""

    def __init__(self, url: str, folder: Path) -> None:
        super().__init__("postgres", url, folder)
        self.clock = FakeClock(time.time())
        self.client = self._closing.enter_context(closing(psycopg.connect(url, autocommit=True)))
        self.began = round(self.clock.us / MICRO)

    def begin(self) -> Partition:
        """Give the runs of now a partition of four hours, in the place of the first one."""
        assert self.value("SELECT semel_drop_partition('_first')")
        self.make(self.began - 2 * HOUR, self.began + 2 * HOUR)
        return self.partitions[0]

    def make(self, start: float, end: float) -> bool:
        return bool(self.value("SELECT semel_make_partition(%s, %s)", id_of(start), id_of(end)))

    def value(self, query: LiteralString, *values: object) -> Any:
        row = self.client.execute(query, values or None).fetchone()
        return None if row is None else row[0]

    @property
    def partitions(self) -> list[Partition]:
        return run_sync(self.timeless._engine.store.read(partitions.partitions))

    @property
    def names(self) -> list[str]:
        return [each.name for each in self.partitions]

    def ended(self, kind: Any = "succeeded", **options: Any) -> Run:
        hand = self.hand()
        run = self.timeless.submit("add", {"a": 1}, dedupe=False, **options)
        if kind == "fatal":
            self.client.execute("UPDATE semel_active SET data_ref = %s WHERE id = %s", [self.data_of(run), run.id])
        (taken,) = hand.lease()
        told = {"reason": "it failed"} if kind == "fatal" else {"result": None}
        assert hand.end(taken, kind, **told)
        self.client.execute("INSERT INTO semel_run_logs VALUES (%s, 1, 1, 1, 'INFO', 'said')", [run.id])
        return run

    def data_of(self, run: Run) -> str:
        """The data of a run that fails."""
        return ref_of(run.payload_hash)

    def leave(self, name: str) -> None:
        """Write a file into the folder of results."""
        file = self.folder / "artifacts" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()

    def succeed_at_last(self) -> Run:
        """A run that succeeds a minute after its first attempt began."""
        hand = self.hand()
        run = self.timeless.submit("add", {"a": 1}, dedupe=False)
        for kind in ("retry", "succeeded"):
            (taken,) = hand.lease()
            self.clock.advance(30)
            assert hand.end(taken, kind)
        return run

    def cancel_internal(self, user: str) -> None:
        """A run of the service's own queue, which is counted if it has a user."""
        engine = self.timeless._engine
        options = SubmitOptions(queue=INTERNAL_QUEUE, user=user, dedupe=False)
        submission = engine._builder.submission("add", {"a": 1}, options, internal=True)
        run_sync(engine.store.submit(submission))
        self.timeless.cancel(submission.id)

    def drop(self, name: str) -> int:
        (partition,) = [each for each in self.partitions if each.name == name]
        store = self.timeless._engine.store
        return run_sync(store.write(partitions.drop, partition, RETENTION, store.statement_context))

    def sweep(self, url: str = "", times: int = 1, **options: Any) -> None:
        """Turns of the sweeper of an app with these options, on the clock of the test."""

        async def turn() -> None:
            app = App(url or self.url, clock=self.clock, artifacts=self.folder / "artifacts", **options)
            store = app.ledger(awaited=True)
            more: dict[str, Any] = {"remove_old": remover(app, store), "retention": app.retention}
            sweeper = Sweeper(store, "sweeper", transport=app.transport, hooks=app.hooks, **more)
            for _ in range(times):
                await sweeper.sweep()
                sweeper._removes_at = 0.0
            await store.close()

        asyncio.run(turn())


def id_of(seconds: float) -> str:
    return id_at(round(seconds * MICRO))


@pytest.fixture
def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ledger]:
    with database_url(request, "postgres") as url, Ledger(url, tmp_path) as ledger:
        yield ledger


# -- where a run is ----------------------------------------------------------------------------------------------------


def test_a_run_its_attempts_and_its_logs_are_in_the_partitions_of_its_time(ledger: Ledger) -> None:
    name = ledger.begin().name
    ledger.ended()
    for table in TABLES:
        rows = ledger.client.execute(f"SELECT CAST(tableoid AS regclass)::text FROM {table}").fetchall()  # type: ignore[call-overload]
        assert rows == [(table + name,)]


def test_an_id_of_no_partitions_time_is_in_the_default_one_and_works_as_every_other(ledger: Ledger) -> None:
    assert ledger.value("SELECT semel_drop_partition('_first')")
    run = ledger.ended("fatal", idempotency_key="k")
    assert ledger.value("SELECT count(*) FROM semel_runs_default") == 1
    assert ledger.timeless.get(run.id).status == "FAILED"
    assert ledger.timeless.submit("add", {"a": 1}, idempotency_key="k", dedupe=False).id == run.id
    assert ledger.timeless.retry(run.id).retry_of == run.id
    assert len(ledger.timeless.runs().runs) == 2


def test_a_look_up_by_id_reads_one_partition(ledger: Ledger) -> None:
    ledger.begin()
    ledger.make(ledger.began + 2 * HOUR, ledger.began + 3 * HOUR)
    ledger.client.execute("SET plan_cache_mode = force_generic_plan")
    ledger.client.execute("PREPARE one(uuid) AS SELECT * FROM semel_run_states WHERE id = $1")
    plan = ledger.client.execute(f"EXPLAIN EXECUTE one('{new_id()}')").fetchall()  # type: ignore[call-overload]
    scanned = set(re.findall(r"on (semel_(?:runs|attempts)_\w+)", str(plan)))
    name = ledger.names[0]
    assert scanned == {f"semel_runs{name}", f"semel_attempts{name}"}


# -- made ahead --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("retention", [None, 90 * DAY, DAY, 60])
def test_the_sweeper_makes_partitions_ahead_without_a_gap(ledger: Ledger, retention: float | None) -> None:
    ledger.sweep(retention=retention)
    made = ledger.partitions
    assert made[0].name == "_first"
    assert all(before.end == after.start for before, after in pairwise(made))
    period = partitions.period_of(retention)
    assert made[-1].end_us >= ledger.clock.us + min(2 * period, partitions.AHEAD_US)
    ledger.sweep(retention=retention)
    assert ledger.partitions == made, "there are enough"
    ledger.clock.advance((made[-1].end_us - ledger.clock.us) / MICRO)
    ledger.sweep(retention=retention)
    assert len(ledger.partitions) > len(made)
    assert len(ledger.names) <= partitions.SHARE + 4


def test_a_role_that_may_only_write_rows_makes_and_drops_partitions_if_it_may_execute_the_functions(
    ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    grants = re.findall(r"GRANT [^;]+;", Path("docs/deploy.md").read_text() + Path("docs/stores.md").read_text())
    execute = [each for each in grants if "EXECUTE" in each]
    assert execute
    role = f"app_{new_id()[-12:]}"
    ledger.client.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'secret'")  # type: ignore[call-overload]
    try:
        for grant in [each for each in grants if each not in execute]:
            ledger.client.execute(grant.replace("TO app", f"TO {role}"))  # type: ignore[call-overload]
        url = make_url(ledger.url).set(username=role, password="secret").render_as_string(hide_password=False)
        with caplog.at_level(logging.WARNING, "semel"):
            ledger.sweep(url, times=2, retention=90 * DAY)
        assert caplog.messages.count(partitions.NO_PRIVILEGE) == 1
        assert ledger.names == ["_first"]
        for grant in execute:
            ledger.client.execute(grant.replace("TO app", f"TO {role}"))  # type: ignore[call-overload]
        ledger.sweep(url, retention=90 * DAY)
        assert len(ledger.names) > 1
        ledger.clock.advance(100 * DAY)
        ledger.sweep(url, retention=90 * DAY)
        assert "_first" not in ledger.names
    finally:
        ledger.client.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")  # type: ignore[call-overload]


@pytest.mark.parametrize("what", ["makes", "drops"])
def test_runs_can_be_read_soon_although_who_makes_or_drops_a_partition_vanished(ledger: Ledger, what: str) -> None:
    """Its transaction has locked the tables, and neither ends nor is ended by a lost connection."""
    run = ledger.ended()
    store = ledger.timeless._engine.store
    engine = engine_of(ledger.url)
    with closing(engine.connect()) as conn:
        conn.begin()
        if what == "makes":
            assert partitions.make(conn, round((ledger.began + DAY) * MICRO), round((ledger.began + 2 * DAY) * MICRO))
        else:
            ledger.make(ledger.began + DAY, ledger.began + 2 * DAY)
            later = ledger.partitions[-1]
            assert partitions.drop(conn, later, -3 * DAY, store.statement_context) == 0
        assert ledger.timeless.get(run.id).status == "SUCCEEDED"
        conn.invalidate()  # the database has ended it
    engine.dispose()


def test_a_new_partition_takes_over_what_a_clock_that_was_ahead_wrote(ledger: Ledger) -> None:
    assert ledger.value("SELECT semel_drop_partition('_first')")
    run = ledger.ended()
    assert ledger.make(ledger.began - HOUR, ledger.began + HOUR)
    assert ledger.value("SELECT count(*) FROM semel_runs_default") == 0
    assert ledger.timeless.get(run.id).status == "SUCCEEDED"
    assert ledger.value("SELECT count(*) FROM semel_run_logs WHERE run_id = %s", run.id) == 1


def test_a_time_with_many_rows_in_the_default_partition_is_left_to_it(ledger: Ledger) -> None:
    assert ledger.value("SELECT semel_drop_partition('_first')")
    ledger.client.execute(
        "INSERT INTO semel_run_logs SELECT %s, 1, n, 1, '', '' FROM generate_series(1, 1001) AS n", [new_id()]
    )
    assert not ledger.make(ledger.began - HOUR, ledger.began + HOUR)
    assert ledger.names == []
    ledger.sweep(retention=RETENTION)
    assert ledger.partitions[0].start_us > ledger.clock.us


def test_a_clock_that_was_far_ahead_and_is_right_again_leaves_no_time_without_a_partition(ledger: Ledger) -> None:
    ledger.clock.advance(3650 * DAY)
    ledger.sweep(retention=RETENTION)
    ledger.clock.advance(-3650 * DAY)
    ledger.sweep(retention=RETENTION)
    store = ledger.timeless._engine.store
    assert run_sync(store.read(partitions.missing, RETENTION, store.statement_context)) == []


@pytest.mark.parametrize("arguments", ["NULL, NULL", "'{1}', '{0}'", "'{0}', '{0}'"])
def test_nonsense_makes_no_partition(ledger: Ledger, arguments: str) -> None:
    query = f"SELECT semel_make_partition({arguments.format(id_of(1), id_of(2))})"
    assert ledger.client.execute(query).fetchone() == (False,)  # type: ignore[call-overload]


@pytest.mark.parametrize("name", ["", "_default", "; DROP TABLE semel_keys", "_p20000101t000000", None])
def test_only_a_partition_is_dropped(ledger: Ledger, name: str | None) -> None:
    assert ledger.value("SELECT semel_drop_partition(%s)", name) is False
    assert ledger.names == ["_first"]


# -- dropped whole -----------------------------------------------------------------------------------------------------


def test_a_partition_whose_runs_are_all_old_is_dropped_and_what_must_stay_stays(ledger: Ledger) -> None:
    name = ledger.begin().name
    ledger.ended(user="ann", cost=2)
    ledger.clock.advance(1)
    assert ledger.timeless.purge(0) == 1, "it has a cost of the same day, too"
    ledger.ended(user="ann", cost=3)
    failed = ledger.ended("fatal", user="ann", cost=4)
    ledger.timeless.cancel(ledger.timeless.submit("add", {"a": 3}, user="bob", cost=5).id)
    for run in (failed, ledger.succeed_at_last()):
        ledger.leave(f"{run.id}/1/left by an attempt that failed")
    ledger.leave(ledger.data_of(failed))
    for table, values in (
        ("semel_jobs (run_id, tenant, user_id, provider, config, created_us)", "'', 'ann', 'local', 'c', 1"),
        (
            "semel_deliveries (run_id, subscription_id, version, state, attempts, due_us, body)",
            "'s', 5, 'dead', 1, 1, ''",
        ),
    ):
        ledger.client.execute(f"INSERT INTO {table} VALUES ('{failed.id}', {values})")  # type: ignore[call-overload]
    for user in ("", "bob"):
        ledger.cancel_internal(user)
    assert ledger.sql(MISCOUNTED) == []
    assert ledger.sql("SELECT count(*) FROM semel_unsuccessful") == [(3,)]
    ledger.sweep(retention=RETENTION)
    spent = ledger.timeless.usage("ann").spent["yearly"]
    ledger.clock.advance(DAY + 3 * HOUR)
    ledger.sweep(retention=RETENTION)
    assert name not in ledger.names
    assert not ledger.timeless.runs().runs
    assert ledger.timeless.usage("ann").spent["yearly"] == spent == 9
    assert ledger.sql(MISCOUNTED) == []
    for table in (*TABLES, "semel_removals", "semel_outbox", "semel_jobs", "semel_deliveries", "semel_unsuccessful"):
        assert ledger.sql(f"SELECT count(*) FROM {table}")[0][0] == 0
    assert not [path for path in (ledger.folder / "artifacts").rglob("*") if path.is_file()]


def test_of_a_sealed_history_it_is_noted_which_runs_a_dropped_partition_had(ledger: Ledger) -> None:
    ledger.timeless.begin_sealing()
    store = ledger.timeless._engine.store
    name = ledger.begin().name
    runs = sorted(ledger.ended().id for _ in range(3))
    assert run_sync(store.write(seals.seal, None, store.statement_context)) is not None
    ledger.clock.advance(DAY + 3 * HOUR)
    assert ledger.drop(name) == 3
    columns = "rule, count, CAST(first_id AS text), CAST(last_id AS text), ids"
    noted = ledger.sql(f"SELECT {columns} FROM semel_purges")
    assert noted == [("purge: ended more than 86400 s ago", 3, runs[0], runs[-1], None)]
    engine = engine_of(ledger.url)
    with closing(engine.connect()) as conn:
        lines = [json.dumps(line) for line in seals.export(conn)]
    engine.dispose()
    assert audit.verify(lines).purged == 3


def test_runs_in_a_partition_wait_for_the_last_of_them_and_no_longer_than_its_time(ledger: Ledger) -> None:
    ledger.begin()
    ledger.ended()
    ledger.clock.advance(DAY + HOUR)
    ledger.sweep(retention=RETENTION)
    assert len(ledger.timeless.runs().runs) == 1, "the partition's time is not over for so long"
    assert ledger.timeless.purge(RETENTION) == 1, "by hand it is exact"


@pytest.mark.parametrize(
    "what", ["a live key", "an active run", "a run that ended lately", "an unsent event", "a delivery that waits"]
)
def test_one_run_that_must_stay_keeps_its_partition(ledger: Ledger, what: str) -> None:
    name = ledger.begin().name
    old = ledger.ended()
    if what == "a live key":
        kept = ledger.ended(idempotency_key="k", key_ttl=30 * DAY)
    elif what in EVENTS:
        kept = ledger.ended()
        ledger.sql(EVENTS[what], id=kept.id, now=ledger.clock.us)
    else:
        kept = ledger.timeless.submit("add", {"a": 2})
    ledger.clock.advance(DAY + 3 * HOUR)
    if what == "a run that ended lately":
        ledger.timeless.cancel(kept.id)
    ledger.sweep(retention=RETENTION)
    assert ledger.drop(name) == 0, "it came after the sweeper had looked"
    assert name in ledger.names
    assert {run.id for run in ledger.timeless.runs().runs} == {old.id, kept.id}
    ledger.clock.advance(6 * HOUR)  # long overdue: what may go goes in batches
    ledger.sweep(retention=RETENTION)
    assert {run.id for run in ledger.timeless.runs().runs} == {kept.id}
    assert ledger.sql(MISCOUNTED) == []


def test_what_must_stay_in_another_partition_keeps_none(ledger: Ledger) -> None:
    ledger.begin()
    assert ledger.make(ledger.began - 20 * DAY, ledger.began - 19 * DAY)
    old, new = ledger.names
    kept = ledger.ended(idempotency_key="k", key_ttl=30 * DAY)
    for statement in EVENTS.values():
        ledger.sql(statement, id=kept.id, now=ledger.clock.us)
    ledger.timeless.submit("add", {"a": 2})
    ledger.sweep(retention=RETENTION)
    assert old not in ledger.names
    assert new in ledger.names


def test_a_drop_waits_for_nobody_and_nobody_waits_for_it(ledger: Ledger, caplog: pytest.LogCaptureFixture) -> None:
    name = ledger.begin().name
    ledger.ended()
    ledger.sweep(retention=RETENTION)
    ledger.clock.advance(DAY + 3 * HOUR)
    with caplog.at_level(logging.INFO, "semel"), psycopg.connect(ledger.url) as reader:
        reader.execute("SELECT count(*) FROM semel_runs")
        ledger.sweep(times=2, retention=RETENTION)
        assert name in ledger.names
        assert len([line for line in caplog.messages if "is in use" in line]) == 1
        new = ledger.timeless.submit("add", {"a": 2})
        assert ledger.sql("SELECT count(*) FROM semel_run_counts WHERE count < 0")[0][0] == 0, "all is as before"
    ledger.timeless.cancel(new.id)
    ledger.clock.advance(DAY + HOUR)
    ledger.sweep(retention=RETENTION)
    assert name not in ledger.names


def test_nobody_writes_to_a_partition_whose_runs_are_being_added_up(ledger: Ledger) -> None:
    name = ledger.begin().name
    ledger.ended()
    ledger.clock.advance(DAY + 3 * HOUR)
    refused = list[str]()

    def write(_conn: object, _cursor: object, statement: str, *_: object) -> None:
        if "INSERT INTO semel_run_counts" in statement:
            for table in TABLES:
                with pytest.raises(psycopg.errors.LockNotAvailable), ledger.client.transaction():
                    ledger.client.execute(f"LOCK TABLE ONLY {table}{name} IN ROW EXCLUSIVE MODE NOWAIT")  # type: ignore[call-overload]
                refused.append(table)

    event.listen(Engine, "before_cursor_execute", write)
    try:
        assert ledger.drop(name) == 1
    finally:
        event.remove(Engine, "before_cursor_execute", write)
    assert refused == list(TABLES)


def test_a_partition_of_which_a_run_is_being_retried_is_not_dropped(ledger: Ledger) -> None:
    name = ledger.begin().name
    old = ledger.ended()
    ledger.sweep(retention=RETENTION)
    ledger.clock.advance(DAY + 3 * HOUR)
    store = ledger.timeless._engine.store
    again = ledger.timeless._engine._builder.submission("add", {"a": 1}, SubmitOptions(), retry_of=old.id)

    def retry_slowly(conn: Any) -> submit.Answer:
        (answer,) = submit.submit(conn, [again], store.statement_context)
        ledger.sweep(retention=RETENTION)
        return answer

    assert isinstance(run_sync(store.write(retry_slowly)), submit.Created)
    assert name in ledger.names
