"""S2, model run orchestration without HTTP: submit, canonical hash, relations, states, leases, retries, results."""

import asyncio
import hashlib
import json
import logging
import re
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain, product
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from moto.server import ThreadedMotoServer
from sqlalchemy import Connection, MetaData, Table, select, text
from sqlalchemy.exc import DatabaseError

from semel import App, IllegalTransition, InvalidRequest, KeyReused, Run, RunNotComplete, RunNotFound, SemelError
from semel.db.schema import metadata
from semel.demo import baseline_forecast
from semel.runs.results import open_results
from semel.runs.store import transitions
from semel.runs.store.maintenance import WorkerRecord
from semel.runs.types import EndKind
from semel.runs.worker import Worker
from semel.runs.worker.active_runs import ActiveRun, ActiveRuns
from semel.runs.worker.heartbeat import Heartbeat
from semel.runs.worker.run_logs import WorkerLogger
from semel.runs.worker.sweeper import Sweeper
from support.apps import worker_models
from support.databases import DATABASES as KINDS
from support.databases import Databases as Grounds
from support.programs import Program
from support.runs_harness import ManualWorker as Hand
from support.runs_harness import RunsHarness as Workshop
from support.runs_harness import effects, in_threads
from support.waiting import eventually as until

MOMENT = 0.000001
STATUSES = ("PENDING", "RUNNING", "SUCCEEDED", "FAILED", "CANCELLED")
COLUMNS = (
    *("id", "model", "status", "parameters", "payload_hash", "created_at", "started_at", "finished_at"),
    *("attempt_count", "last_error", "result_ref", "lease_owner", "lease_expires_at", "heartbeat_at"),
)


@pytest.fixture(scope="module")
def grounds(request: pytest.FixtureRequest) -> Iterator[Grounds]:
    with ExitStack() as stack:
        yield Grounds(request, stack)


@pytest.fixture(params=KINDS)
def shop(request: pytest.FixtureRequest, grounds: Grounds, tmp_path: Path) -> Iterator[Workshop]:
    """An empty SQLite file, then an empty PostgreSQL database."""
    with grounds.empty(request.param) as ground, Workshop(ground.kind, ground.url, tmp_path) as shop:
        yield shop


@pytest.fixture
def app(shop: Workshop) -> App:
    """An app on the clock that the test moves."""
    return shop.timeless


@pytest.fixture
def hand(shop: Workshop) -> Hand:
    return shop.hand()


# -- S2.1 to S2.8: submit ------------------------------------------------------------------------------------------


def test_s2_1_the_database_is_the_truth(shop: Workshop) -> None:
    """The app that submitted is gone; another one, its worker, and anybody with SQLAlchemy see the same run."""
    with Workshop(shop.kind, shop.url, shop.folder) as elsewhere:
        run = elsewhere.app.submit("add", {"a": 1}, user=42)
    assert shop.app.get(run.id) == run
    with shop.working():
        shop.app.wait(run.id, timeout=60)
    seen = Table("model_runs", MetaData(), autoload_with=shop.engine)
    with shop.engine.connect() as connection:
        row = connection.execute(select(seen).where(seen.c.model == "add")).one()
    assert (str(row.id), row.status, row.attempt_count) == (run.id, "SUCCEEDED", 1)
    assert shop.app.result(run.id) == 11


def test_s2_5_the_same_key_and_payload_is_the_same_run(app: App, shop: Workshop) -> None:
    """For a day, whatever became of the run."""
    first = app.submit("add", {"a": 1}, idempotency_key="ci-42")
    again = app.submit("add", {"a": 1}, idempotency_key="ci-42")
    assert (again.id, again.replayed, first.replayed) == (first.id, True, False)
    app.cancel(first.id)
    shop.clock.advance(86400)
    late = app.submit("add", {"a": 1}, idempotency_key="ci-42")
    assert (late.id, late.status) == (first.id, "CANCELLED")
    shop.clock.advance(MOMENT)
    assert app.submit("add", {"a": 1}, idempotency_key="ci-42").id != first.id


def test_s2_5_submitted_by_many_at_the_same_moment_it_is_one_run(shop: Workshop) -> None:
    apps = [shop.open() for _ in range(8)]
    runs = in_threads(*(lambda app=app: app.submit("add", {"a": 1}, idempotency_key="ci-42") for app in apps))
    assert len({run.id for run in runs}) == 1
    assert [run.replayed for run in runs].count(False) == 1
    assert shop.sql("SELECT count(*) FROM model_runs") == [(1,)]


def test_s2_6_the_same_key_with_another_payload_is_a_conflict(app: App, shop: Workshop) -> None:
    run = app.submit("add", {"a": 1}, idempotency_key="ci-42")
    for model, parameters in (("add", {"a": 2}), ("add_apart", {"a": 1})):
        with pytest.raises(KeyReused, match="key reused with different payload"):
            app.submit(model, parameters, idempotency_key="ci-42")
    assert [each.id for each in app.runs().runs] == [run.id]


def test_s2_7_without_a_key_the_same_payload_finds_the_run_that_is_under_way(
    app: App, hand: Hand, shop: Workshop
) -> None:
    """For ten minutes from its creation, while it is pending or running; once it has ended there is a new one."""
    first = app.submit("add", {"a": 1})
    assert app.submit("add", {"a": 1.0}).id == first.id
    leased = hand.lease()[0]
    running = app.submit("add", {"a": 1})
    assert (running.id, running.status, running.replayed) == (first.id, "RUNNING", True)
    hand.end(leased)
    second = app.submit("add", {"a": 1})
    assert second.id != first.id
    shop.clock.advance(600)
    assert app.submit("add", {"a": 1}).id == second.id
    shop.clock.advance(MOMENT)
    assert app.submit("add", {"a": 1}).id != second.id


def test_s2_7_the_window_can_be_set_and_turned_off(shop: Workshop) -> None:
    short, off = shop.open(clock=shop.clock, dedupe_window=5), shop.open(clock=shop.clock, dedupe_window=0)
    first = short.submit("add", {"a": 1})
    shop.clock.advance(5)
    assert short.submit("add", {"a": 1}).id == first.id
    shop.clock.advance(MOMENT)
    assert short.submit("add", {"a": 1}).id != first.id
    assert len({off.submit("add", {"a": 2}).id for _ in range(3)}) == 3


def test_s2_7_users_do_not_find_each_others_runs(app: App) -> None:
    assert app.submit("add", {"a": 1}, user=1).id != app.submit("add", {"a": 1}, user=2).id


def refuse_inserts(shop: Workshop, table: str) -> None:
    """From now on the table takes no row, as if its disk were full."""
    if shop.kind == "sqlite":
        shop.sql(f"CREATE TRIGGER refused BEFORE INSERT ON {table} BEGIN SELECT RAISE(ABORT, 'refused'); END")
    else:
        shop.sql("CREATE OR REPLACE FUNCTION refused() RETURNS trigger LANGUAGE plpgsql AS "
                 "$$ BEGIN RAISE EXCEPTION 'refused'; END $$")  # fmt: skip
        shop.sql(f"CREATE TRIGGER refused BEFORE INSERT ON {table} EXECUTE FUNCTION refused()")


@pytest.mark.parametrize("table", ["semel_runs", "semel_active", "semel_keys", "semel_outbox"])
def test_s2_8_run_key_and_event_are_written_together_or_not_at_all(shop: Workshop, table: str) -> None:
    app = shop.open(clock=shop.clock, publish=lambda _: None)
    refuse_inserts(shop, table)
    try:
        with pytest.raises(SemelError):
            app.submit("add", {"a": 1}, idempotency_key="ci-42")
    finally:
        shop.sql("DROP TRIGGER refused" + (f" ON {table}" if shop.kind == "postgres" else ""))
    for each in ("semel_runs", "semel_active", "semel_keys", "semel_outbox"):
        assert shop.sql(f"SELECT count(*) FROM {each}") == [(0,)]
    assert not app.submit("add", {"a": 1}, idempotency_key="ci-42").replayed


DIES_BEFORE_THE_MESSAGE = """
    import os, signal
    from support.apps import worker_models
    from semel import App

    class Killed:
        announces = True

        def announce(self, runs):
            os.kill(os.getpid(), signal.SIGKILL)

    app = worker_models.register(App(url, transport=Killed()))
    tell()
    hear()
    app.submit("add", {"a": 1}, idempotency_key="ci-42")
"""


def test_s2_8_a_crash_between_the_transaction_and_the_message_loses_nothing(shop: Workshop) -> None:
    """The process dies at the very moment in which it would tell the queue. A worker finds the run all the same."""
    with Program(DIES_BEFORE_THE_MESSAGE, url=shop.url) as program:
        program.hear()
        program.tell()
        with pytest.raises((EOFError, ConnectionError)):
            program.hear()
    assert shop.sql("SELECT status FROM model_runs") == [("PENDING",)]
    again = shop.app.submit("add", {"a": 1}, idempotency_key="ci-42")
    assert again.replayed
    with shop.working():
        assert shop.app.wait(again.id, timeout=60).status == "SUCCEEDED"


# -- S2.9 to S2.13: the hash ---------------------------------------------------------------------------------------


def hash_of(app: App, parameters: dict[str, Any], model: str = "forecast") -> str:
    return app.submit(model, parameters, dedupe=False).payload_hash


def test_s2_9_the_order_of_keys_is_irrelevant_at_every_depth(shop: Workshop, app: App) -> None:
    @app.model("nested", isolation="thread")
    def nested(tree: dict[str, Any], leaf: int) -> None: ...

    one = hash_of(app, {"tree": {"a": {"x": 1, "y": [{"p": 1, "q": 2}]}, "b": 2}, "leaf": 3}, "nested")
    two = hash_of(app, {"leaf": 3, "tree": {"b": 2, "a": {"y": [{"q": 2, "p": 1}], "x": 1}}}, "nested")
    assert one == two
    assert hash_of(app, {"leaf": 3, "tree": {"b": 2, "a": {"y": [{"q": 1, "p": 2}], "x": 1}}}, "nested") != one


def test_s2_10_one_is_one_whole_or_not(app: App) -> None:
    whole = hash_of(app, {"scenario": "high_inflation", "horizon_months": 24})
    assert hash_of(app, {"scenario": "high_inflation", "horizon_months": 24.0}) == whole
    assert hash_of(app, {"scenario": "high_inflation", "horizon_months": 25}) != whole


def test_s2_11_irrelevant_fields_are_left_out(app: App) -> None:
    """The time of sending is not part of what is asked, so a retry with a later one finds the run."""
    first = app.submit("forecast", {"scenario": "base", "sent_at": "12:00"})
    again = app.submit("forecast", {"scenario": "base", "sent_at": "12:01"})
    assert (again.id, again.payload_hash) == (first.id, first.payload_hash)
    assert again.parameters["sent_at"] == "12:00"


def test_s2_12_it_is_the_sha_256_of_compact_canonical_json(app: App) -> None:
    asked = {"scenario": "Größe", "horizon_months": 24, "region": "AU"}
    canonical = json.dumps(
        {"model": "forecast", "parameters": asked}, sort_keys=True, separators=(",", ":"), ensure_ascii=False
    )
    assert hash_of(app, asked) == hashlib.sha256(canonical.encode()).hexdigest()


def test_s2_13_the_models_name_is_part_of_it(app: App) -> None:
    assert hash_of(app, {"a": 1}, "add") != hash_of(app, {"a": 1}, "add_apart")


# -- S2.14 to S2.17: relations ---------------------------------------------------------------------------------------


def test_s2_14_model_runs_has_the_documents_columns_and_tells_the_truth(app: App, hand: Hand, shop: Workshop) -> None:
    app.submit("forecast", {"scenario": "base"})
    leased = hand.lease()[0]
    with shop.engine.connect() as connection:
        row = connection.execute(text("SELECT * FROM model_runs")).mappings().one()
    assert sorted(row) == sorted(COLUMNS)
    assert (str(row["id"]), row["status"], row["lease_owner"], row["attempt_count"]) == (
        leased.id,
        "RUNNING",
        "by-hand",
        1,
    )
    parameters = row["parameters"]
    assert (json.loads(parameters) if isinstance(parameters, str) else parameters) == {"scenario": "base"}
    assert str(row["created_at"]).startswith("2024-02-29 12:34:56")
    assert str(row["lease_expires_at"]).startswith("2024-02-29 12:35:56")
    assert str(row["heartbeat_at"]) == str(row["started_at"]) == str(row["created_at"])
    hand.end(leased, result=None, result_ref="somewhere")
    with shop.engine.connect() as connection:
        row = connection.execute(text("SELECT * FROM model_runs")).mappings().one()
    assert (row["status"], row["result_ref"], row["lease_owner"]) == ("SUCCEEDED", "somewhere", None)
    assert (row["lease_expires_at"], row["last_error"]) == (None, None)
    assert row["finished_at"] is not None


PARTITIONED = """
SELECT child.relname, parent.relname FROM pg_inherits
JOIN pg_class AS child ON child.oid = inhrelid JOIN pg_class AS parent ON parent.oid = inhparent
WHERE child.relkind = 'i'"""
"""PostgreSQL's indexes of partitions, with the index of the whole table that each is a part of."""
ASKED = {
    "SELECT run_id FROM semel_attempts WHERE status = 'FAILED' ORDER BY run_id LIMIT 10": "semel_attempts_unsuccessful",
    "SELECT id FROM semel_runs WHERE {payload} = 'x'": "semel_runs_hash",
    "SELECT id FROM semel_active WHERE lease_until_us < 7": "semel_active_lease",
}


def test_s2_15_status_hash_and_ended_leases_are_found_by_an_index(shop: Workshop) -> None:
    """Ids grow with the time of creation, so that an index on (status, id) is one on (status, created_at)."""
    explain, payload = "EXPLAIN QUERY PLAN ", "payload_hash"
    if shop.kind == "postgres":  # whose index holds the start of the hash
        explain, payload = "EXPLAIN ", "substr(payload_hash, 1, 7)"
    whole: dict[str, str] = {}
    with shop.engine.begin() as connection:
        if shop.kind == "postgres":  # the table is empty, so that to read it all would be cheapest
            connection.execute(text("SET LOCAL enable_seqscan = off"))
            whole = dict(tuple(row) for row in connection.execute(text(PARTITIONED)))
        for query, index in ASKED.items():
            plan = " ".join(str(row) for row in connection.execute(text(explain + query.format(payload=payload))))
            plan = re.sub(r"semel_\w+", lambda name: whole.get(name[0], name[0]), plan)
            assert re.search(rf"(?i)index.*{index}|on {index}", plan), plan
            assert not re.search(r"SCAN semel_(?!.*USING)|Seq Scan|Sort  |TEMP B-TREE", plan), plan


def test_s2_16_ids_grow_with_the_time_of_creation(app: App) -> None:
    ids = [app.submit("add", {"a": number}).id for number in range(20)]
    ids += [run.id for run in app.submit_many([{"model": "add", "parameters": {"a": -n}} for n in range(1, 20)])]
    assert ids == sorted(set(ids))
    assert {each[14] for each in ids} == {"7"}, "UUIDv7"
    assert [run.id for run in app.runs(limit=1000).runs] == ids[::-1]


def test_s2_17_a_key_is_unique_for_its_tenant_user_and_kind(app: App, shop: Workshop) -> None:
    """The document has one namespace of keys; here each user of each tenant has one, and two users never meet."""
    run = app.submit("add", {"a": 1}, idempotency_key="ci-42", user="ada")
    rows = shop.sql("SELECT key, payload_hash, run_id FROM idempotency_keys")
    assert rows == [("ci-42", run.payload_hash, run.id)]
    with pytest.raises(DatabaseError, match=r"(?i)unique"):
        shop.sql("INSERT INTO semel_keys SELECT * FROM semel_keys")
    others = [
        app.submit("add", {"a": 2}, idempotency_key="ci-42", user="bob"),
        app.submit("add", {"a": 2}, idempotency_key="ci-42", user="ada", tenant="acme"),
    ]
    assert len({run.id, *(each.id for each in others)}) == 3, "another user, another tenant: another key"
    assert app.submit("add", {"a": 1}, idempotency_key="ci-42", user="ada").id == run.id
    assert app.submit("add", {"a": 2}, idempotency_key="ci-42", user="bob").id == others[0].id
    with pytest.raises(KeyReused):
        app.submit("add", {"a": 2}, idempotency_key="ci-42", user="ada")
    same = app.submit("add", {"a": 3}, user="ada")
    named = app.submit("add", {"a": 3}, idempotency_key=same.payload_hash, user="ada")
    assert named.id != same.id, "the hash of a payload is of another kind than a key that is spelt like it"
    assert shop.sql("SELECT count(*) FROM idempotency_keys WHERE key = 'ci-42'") == [(3,)]


# -- S2.18 to S2.24: states and invariants -----------------------------------------------------------------------


def brought_to(status: str, app: App, hand: Hand) -> Run:
    """A run in this state, by the verbs that lead there."""
    run = app.submit("add", {"a": 1}, dedupe=False)
    if status == "CANCELLED":
        app.cancel(run.id)
    elif status != "PENDING":
        leased = hand.lease_this(run)
        assert leased is not None
        if status != "RUNNING":
            assert hand.end(leased, "succeeded" if status == "SUCCEEDED" else "fatal")
    found = app.get(run.id)
    assert found.status == status
    return found


def refused(connection: Connection, statement: str, **values: Any) -> bool:
    """Whether the database refuses the statement, which is undone in any case."""
    attempt = connection.begin()
    try:
        assert connection.execute(text(statement), values).rowcount == 1
    except DatabaseError as error:
        if not re.search(r"illegal|violates|CHECK constraint", str(error)):
            raise
        return True
    finally:
        attempt.rollback()
    return False


def test_s2_18_there_are_five_states(app: App, hand: Hand, shop: Workshop) -> None:
    runs = {status: brought_to(status, app, hand) for status in STATUSES}
    assert {run.status for run in app.runs().runs} == set(STATUSES)
    for status in STATUSES:
        assert [run.id for run in app.runs(status=status).runs] == [runs[status].id]
    with pytest.raises(InvalidRequest, match="not a status"):
        app.runs(status="DONE")
    with shop.engine.connect() as connection:
        for status in ("DONE", "running", "", "QUEUED", "RUNNING"):
            assert refused(connection, again(runs["FAILED"], status=f"'{status}'")), status


LEGAL = {
    ("PENDING", "RUNNING"),
    ("PENDING", "CANCELLED"),
    ("RUNNING", "SUCCEEDED"),
    ("RUNNING", "FAILED"),
    ("RUNNING", "CANCELLED"),
    ("RUNNING", "PENDING"),
}
MOVE = """UPDATE semel_active SET version = version + 1, fence = fence + :raise, lease_until_us = :lease,
worker = coalesce(worker, 'w') WHERE id = :id"""


def copied(table: str, key: str, run: Run, **changes: str) -> str:
    """An INSERT of the run's row once more, with these changes."""
    columns = ", ".join(changes.get(column.name, column.name) for column in metadata.tables[table].c)
    return f"INSERT INTO {table} SELECT {columns} FROM {table} WHERE {key} = '{run.id}'"


def again(run: Run, **changes: str) -> str:
    """An INSERT of another attempt of the run, after the last one."""
    return copied("semel_attempts", "run_id", run, **{"version": "version + 1", **changes})


def test_s2_19_the_database_itself_refuses_every_other_transition(app: App, hand: Hand, shop: Workshop) -> None:
    """A run that is active changes by a lease or by the end of one; what ended, and what was submitted, never does."""
    runs = {status: brought_to(status, app, hand) for status in STATUSES}
    with shop.engine.connect() as connection:
        for lease, higher in product((None, 9), (-1, 0, 1)):
            legal = {"PENDING": (lease is None) == (higher == 0) and higher >= 0, "RUNNING": higher == 0}
            for status, expected in legal.items():
                move = {"id": runs[status].id, "lease": lease, "raise": higher}
                assert refused(connection, MOVE, **move) != expected, (status, move)
        for status in ("SUCCEEDED", "FAILED", "CANCELLED"):
            ended = f"WHERE run_id = '{runs[status].id}'"
            for new in ("PENDING", "SUCCEEDED", "FAILED", "CANCELLED"):
                assert refused(connection, f"UPDATE semel_attempts SET status = '{new}' {ended}"), (status, new)
        for new in ("SUCCEEDED", "FAILED", "PENDING"):
            unbegun = again(runs["CANCELLED"], status=f"'{new}'", began_us="NULL")
            assert refused(connection, unbegun), f"{new} without an attempt"


def test_s2_19_a_lease_without_a_higher_fence_is_refused(app: App, hand: Hand, shop: Workshop) -> None:
    run = brought_to("PENDING", app, hand)
    values = {"id": run.id, "lease": 9}
    with shop.engine.connect() as connection:
        assert refused(connection, MOVE, **values, **{"raise": 0})
        assert refused(connection, MOVE, **values, **{"raise": -1})
        assert not refused(connection, MOVE, **values, **{"raise": 1})


def test_s2_19_every_run_is_born_pending(app: App, hand: Hand, shop: Workshop) -> None:
    other = "'01900000-0000-7000-8000-000000000000'"
    for status in ("PENDING", "RUNNING"):
        run = brought_to(status, app, hand)
        with shop.engine.connect() as connection:
            born = copied("semel_active", "id", run, id=other)
            assert refused(connection, born) == (status != "PENDING"), status
            assert refused(connection, copied("semel_active", "id", run, id=other, version="3"))


@pytest.mark.parametrize("status", STATUSES[2:])
def test_s2_19_what_is_over_stays_over(app: App, hand: Hand, status: str) -> None:
    run = brought_to(status, app, hand)
    assert hand.lease(10) == []
    assert hand.lease_this(run) is None
    if status == "CANCELLED":
        assert app.cancel(run.id) == run
    else:
        with pytest.raises(IllegalTransition, match=status):
            app.cancel(run.id)
    assert app.get(run.id) == run


@pytest.mark.parametrize("kind", ["retry", "lost", "snooze"])
def test_s2_19_a_running_run_returns_to_pending_when_it_is_tried_again(app: App, hand: Hand, kind: EndKind) -> None:
    run = app.submit("add", {"a": 1})
    leased = hand.lease()[0]
    assert hand.end(leased, kind, reason="why not")
    assert app.get(run.id).status == "PENDING"
    assert [step.status for step in app.timeline(run.id)] == ["PENDING", "RUNNING", "PENDING"]
    assert not hand.end(leased), "an attempt ends once"
    assert hand.lease()[0].fence > leased.fence


FIXED = {
    "id": "'01900000-0000-7000-8000-000000000000'",
    "payload_hash": "'x'",
    "parameters": "'{}'",
    "model": "'other'",
    "tenant": "'other'",
    "user_id": "'other'",
    "created_us": "7",
}
ACTIVE = ("id", "tenant", "user_id", "model")
"""Those that the row of an active run has, too."""


@pytest.mark.parametrize("status", STATUSES)
def test_s2_20_to_23_id_hash_and_what_was_asked_never_change(app: App, hand: Hand, shop: Workshop, status: str) -> None:
    brought_to(status, app, hand)
    with shop.engine.connect() as connection:
        for column, value in FIXED.items():
            assert refused(connection, f"UPDATE semel_runs SET {column} = {value}"), column
            if column in ACTIVE and status in ("PENDING", "RUNNING"):
                assert refused(connection, f"UPDATE semel_active SET {column} = {value}"), column
                assert not refused(connection, f"UPDATE semel_active SET {column} = {column}"), column


def test_s2_23_the_hash_of_a_run_is_the_same_from_its_submission_to_its_end(
    app: App, hand: Hand, shop: Workshop
) -> None:
    run = app.submit("add", {"a": 1})
    hand.end(hand.lease()[0])
    assert app.get(run.id).payload_hash == run.payload_hash
    with pytest.raises(DatabaseError):
        shop.sql(f"UPDATE semel_runs SET payload_hash = 'other' WHERE id = '{run.id}'")
    assert app.get(run.id).payload_hash == run.payload_hash


def test_s2_21_a_run_has_one_status_and_one_row(app: App, hand: Hand, shop: Workshop) -> None:
    """Twice the same id cannot be, and every step of its life left exactly one event behind, the last as it stands."""
    run = brought_to("SUCCEEDED", app, hand)
    with pytest.raises(DatabaseError, match=r"(?i)unique"):
        shop.sql("INSERT INTO semel_runs SELECT * FROM semel_runs")
    steps = app.timeline(run.id)
    assert [step.version for step in steps] == [1, 2, 3]
    assert (steps[-1].status, steps[-1].version) == (run.status, run.version)


def test_s2_22_only_one_worker_executes_a_run_at_a_time(shop: Workshop) -> None:
    """Three workers share two hundred runs: each is executed once, by one of them."""
    folder = shop.place("together")
    numbers = range(200)
    asked = [{"model": "note", "parameters": {"folder": folder, "number": number}} for number in numbers]
    shop.app.submit_many(asked)
    with ExitStack() as workers:
        for _ in range(3):
            workers.enter_context(shop.working(shop.open(), concurrency=7))
        until(lambda: shop.app.backlog().pending + shop.app.backlog().running == 0, "the end of all runs")
    done = [line[0] for line in effects(folder)]
    assert len(done) == len(set(done)) == len(numbers)
    assert shop.sql("SELECT status, attempt_count, count(*) FROM model_runs GROUP BY 1, 2") == [("SUCCEEDED", 1, 200)]


def test_s2_22_the_executor_changes_only_with_a_new_lease(app: App, hand: Hand, shop: Workshop) -> None:
    brought_to("RUNNING", app, hand)
    with shop.engine.connect() as connection:
        for change in ("worker = 'another'", "worker = NULL", "fence = fence + 1", "fence = fence - 1"):
            assert refused(connection, f"UPDATE semel_active SET {change}"), change


@pytest.mark.parametrize("status", ["PENDING", "RUNNING", "FAILED", "CANCELLED"])
def test_s2_24_a_result_is_visible_only_when_the_run_succeeded(
    app: App, hand: Hand, shop: Workshop, status: str
) -> None:
    run = brought_to(status, app, hand)
    with pytest.raises(RunNotComplete, match=status) as caught:
        app.result(run.id)
    assert caught.value.status == status
    if run.done:
        with shop.engine.connect() as connection:
            assert refused(connection, again(run, result="'1'", result_digest="'d'"))
    with pytest.raises(RunNotFound):
        app.result("01900000-0000-7000-8000-000000000000")


RESULT = {"result": "'2'", "result_ref": "'elsewhere'", "result_digest": "'d'", "artifacts": "'[]'"}


@pytest.mark.parametrize("status", STATUSES[2:])
def test_s2_24_no_column_of_a_result_can_be_written_but_by_the_success_itself(
    app: App, hand: Hand, shop: Workshop, status: str
) -> None:
    run = brought_to(status, app, hand)
    with shop.engine.connect() as connection:
        for column, value in RESULT.items():
            assert refused(connection, f"UPDATE semel_attempts SET {column} = {value}"), column
            if status != "SUCCEEDED":
                assert refused(connection, again(run, **{column: value})), column


def test_s2_24_a_result_of_none_is_a_result(shop: Workshop) -> None:
    @shop.app.model("nothing", isolation="thread")
    def nothing() -> None: ...

    run = shop.app.submit("nothing")
    with shop.working():
        assert shop.app.wait(run.id, timeout=60).status == "SUCCEEDED"
    assert shop.app.result(run.id) is None


# -- S2.25 to S2.29: leases ----------------------------------------------------------------------------------------


def test_s2_25_of_many_who_want_a_run_at_once_one_gets_it(shop: Workshop) -> None:
    """Eight workers with connections of their own ask for the same ten runs, one after the other."""
    app = shop.app
    runs = [app.submit("add", {"a": number}) for number in range(10)]
    hands = [shop.hand(shop.app, f"hand-{number}") for number in range(8)]

    def take(hand: Hand) -> list[str]:
        return [run.id for run in runs if hand.lease_this(run)]

    taken = in_threads(*(lambda hand=hand: take(hand) for hand in hands))
    assert sorted(chain.from_iterable(taken)) == [run.id for run in runs]
    owners = {run.id: f"hand-{number}" for number, ids in enumerate(taken) for run in runs if run.id in ids}
    assert {run.id: run.worker for run in app.runs().runs} == owners


def test_s2_25_a_batch_is_leased_by_one_statement(shop: Workshop) -> None:
    """Several workers empty the queue in batches: no run is handed out twice, none is left."""
    app = shop.app
    app.submit_many([{"model": "add", "parameters": {"a": number}} for number in range(300)])
    hands = [shop.hand(shop.app, f"hand-{number}") for number in range(4)]

    def empty(hand: Hand) -> list[str]:
        taken: list[str] = []
        while batch := hand.lease(13):
            taken += [each.id for each in batch]
        return taken

    taken = list(chain.from_iterable(in_threads(*(lambda hand=hand: empty(hand) for hand in hands))))
    assert len(taken) == len(set(taken)) == 300


def test_s2_26_a_lease_lasts_a_minute_keeps_the_first_start_and_counts_the_attempt(
    app: App, hand: Hand, shop: Workshop
) -> None:
    run = app.submit("add", {"a": 1})
    first = hand.lease()[0]
    held = app.get(run.id)
    assert held.lease_until_us == shop.clock.us + 60_000_000
    assert (held.attempts, held.worker, held.started_us) == (1, "by-hand", shop.clock.us)
    assert hand.end(first, "retry", delay=5, reason="no luck")
    shop.clock.advance(5)
    hand.lease()
    again = app.get(run.id)
    assert (again.attempts, again.started_us, again.fence) == (2, held.started_us, 2)


def test_s2_27_a_worker_that_is_not_granted_a_run_does_nothing(shop: Workshop) -> None:
    """It is held by another; it is over; there is none."""
    folder = shop.place("held")
    run = shop.app.submit("note", {"folder": folder})
    shop.hand(shop.app).lease()
    before = shop.app.get(run.id)

    async def perform(run_id: str) -> bool:
        return await Worker(shop.app).perform(run_id)

    assert not asyncio.run(perform(run.id))
    assert not asyncio.run(perform("01900000-0000-7000-8000-000000000000"))
    assert effects(folder) == []
    assert shop.app.get(run.id) == before


def test_s2_28_a_lease_that_ended_can_be_taken_over_and_not_a_moment_before(
    app: App, hand: Hand, shop: Workshop
) -> None:
    run = app.submit("add", {"a": 1})
    dead = shop.hand(name="dead").lease()[0]
    shop.clock.advance(60)
    assert hand.lease_this(run) is None
    shop.clock.advance(MOMENT)
    taken = hand.lease_this(run)
    assert taken is not None
    assert (taken.fence, taken.attempts) == (2, 2)
    assert app.get(run.id).worker == "by-hand"
    assert not hand.end(dead), "the old fence has passed"
    assert hand.end(taken)


def test_s2_29_every_twenty_seconds_or_sooner_a_heartbeat_extends_the_lease_to_a_minute_from_now(
    app: App, shop: Workshop
) -> None:
    run = app.submit("add", {"a": 1})
    leased = shop.hand().lease()[0]

    async def beat(seconds_ago: float) -> tuple[int | None, int | None]:
        """One beat of a worker that renewed the lease so long ago, a minute by the database's clock."""
        ledger = app.ledger(awaited=True)
        holdings = ActiveRuns()
        holdings.add(ActiveRun(leased, app.registry["add"], "by-hand", asyncio.get_running_loop().time() - seconds_ago))
        heart = Heartbeat(ledger, holdings, WorkerLogger("by-hand"), record=lambda: CARD, lost=_never, cancelled=_never)
        await heart.beat()
        await ledger.close()
        held = await app.aio.get(run.id)
        await app.aio.close()
        return held.lease_until_us, held.heartbeat_us

    began = shop.clock.us
    shop.clock.advance(2)
    assert asyncio.run(beat(2)) == (began + 60_000_000, began), (
        "a heartbeat is due after 3 s, so that outages are survived"
    )
    shop.clock.advance(1)
    assert asyncio.run(beat(3)) == (began + 63_000_000, began + 3_000_000)
    shop.clock.advance(20)
    assert asyncio.run(beat(20)) == (began + 83_000_000, began + 23_000_000)


def _never(held: ActiveRun) -> None:
    pytest.fail(f"{held.leased.id} is neither lost nor cancelled")


CARD = WorkerRecord(id="by-hand", name="by-hand", host="host", pid=1, queues=["default"], models={}, slots={})


# -- S2.30: the demo -----------------------------------------------------------------------------------------------


def demo(shop: Workshop, **options: Any) -> App:
    """The document's model, which ships with semel, on this database."""
    app = App(shop.url, artifacts=shop.folder / "artifacts", **options)
    shop.closes(app)
    app.model("baseline_forecast_v1", summary="scenario")(baseline_forecast)
    return app


def test_s2_30_the_simulated_model_sleeps_and_gives_metrics(shop: Workshop) -> None:
    asked = {"scenario": "high_inflation", "horizon_months": 24, "region": "AU"}
    app = demo(shop)
    run = app.submit("baseline_forecast_v1", {**asked, "seconds": 0.2})
    with shop.working(app, processes=1):
        ended = app.wait(run.id, timeout=60)
    assert (ended.status, ended.progress) == ("SUCCEEDED", 1.0)
    result = app.result(run.id)
    assert (result["run_id"], result["inputs"], result["notes"]) == (run.id, asked, "simulated")
    assert result["metrics"]["runtime_seconds"] >= 0.2
    assert 0 <= result["metrics"]["objective"] <= 1


def test_s2_30_it_fails_as_it_is_told_to(shop: Workshop) -> None:
    app = demo(shop, clock=shop.clock)
    told = {"again": {"fail_attempts": 1}, "fatal": {"fatal": True}, "always": {"failure_rate": 1.0}}
    runs = {name: app.submit("baseline_forecast_v1", {"seconds": 0, **how}) for name, how in told.items()}
    with shop.working(app, processes=1):
        for errors, wait in ((1, 6), (2, 22)):
            until(lambda errors=errors: app.get(runs["always"].id).errors == errors)
            until(lambda errors=errors: app.get(runs["again"].id).errors >= 1)
            shop.clock.advance(wait)
        ended = {name: app.wait(run.id, timeout=60) for name, run in runs.items()}
    assert {name: (run.status, run.attempts) for name, run in ended.items()} == {
        "again": ("SUCCEEDED", 2),
        "fatal": ("FAILED", 1),
        "always": ("FAILED", 3),
    }


# -- S2.31 to S2.35: retries -----------------------------------------------------------------------------------------


def test_s2_31_to_32_three_attempts_after_5_and_20_seconds_then_failed(app: App, shop: Workshop) -> None:
    """Each wait may be a tenth longer, so that runs that failed together do not come back together."""
    run = app.submit("flaky", {"failures": 9, "why": "the sea is rough"})
    with shop.working(app):
        for attempt, wait in ((1, 5), (2, 20)):
            until(lambda attempt=attempt: app.get(run.id).errors == attempt, f"error {attempt}")
            pending = app.get(run.id)
            assert (pending.status, pending.attempts, pending.last_error) == (
                "PENDING",
                attempt,
                "RuntimeError: the sea is rough",
            )
            assert wait * 1e6 <= pending.due_us - shop.clock.us <= wait * 1.1e6
            shop.clock.advance(wait * 1.1)
        ended = app.wait(run.id, timeout=60)
    assert (ended.status, ended.attempts, ended.errors, ended.losts) == ("FAILED", 3, 3, 0)
    assert ended.last_error == "RuntimeError: the sea is rough"
    assert "worker_models.py" in (ended.traceback or "")


def test_s2_32_the_third_wait_is_a_minute(app: App) -> None:
    model = app.registry["flaky"]
    assert [model.delay(errors, 0) for errors in (1, 2, 3, 4)] == [5, 20, 60, 60]
    assert (model.max_attempts, model.lease) == (3, 60)


def test_s2_33_a_fatal_error_is_not_tried_again_a_retryable_one_is(app: App, shop: Workshop) -> None:
    fatal = app.submit("decide", {"verdict": "fatal", "raised": True})
    declared = app.submit("decide", {"verdict": "hopeless", "raised": True})
    other = app.submit("flaky", {"failures": 1})
    with shop.working(app):
        assert (app.wait(fatal.id, timeout=60).status, app.get(fatal.id).attempts) == ("FAILED", 1)
        assert (app.wait(declared.id, timeout=60).status, app.get(declared.id).attempts) == ("FAILED", 1)
        until(lambda: app.get(other.id).errors == 1)
        shop.clock.advance(6)
        assert (app.wait(other.id, timeout=60).status, app.get(other.id).attempts) == ("SUCCEEDED", 2)
    assert app.get(fatal.id).last_error == "this cannot work"
    assert app.get(declared.id).last_error == "Hopeless: of the declared kind"


def test_s2_34_a_failure_is_recorded_and_shown(app: App, hand: Hand, shop: Workshop) -> None:
    run = app.submit("add", {"a": 1})
    assert hand.end(hand.lease()[0], "retry", delay=5, reason="no luck", traceback="line 1")
    assert shop.sql("SELECT status, last_error, attempt_count FROM model_runs") == [("PENDING", "no luck", 1)]
    shop.clock.advance(5)
    assert hand.end(hand.lease()[0], "fatal", reason="hopeless")
    assert shop.sql("SELECT status, last_error, attempt_count FROM model_runs") == [("FAILED", "hopeless", 2)]
    assert [step.note for step in app.timeline(run.id)] == [None, None, "no luck", None, "hopeless"]


def test_s2_35_a_run_is_never_running_without_a_lease_that_ends(app: App, hand: Hand, shop: Workshop) -> None:
    brought_to("RUNNING", app, hand)
    with shop.engine.connect() as connection:
        assert refused(connection, "UPDATE semel_active SET lease_until_us = NULL")
    run = brought_to("PENDING", app, hand)
    with shop.engine.connect() as connection:
        assert refused(connection, MOVE, id=run.id, **{"raise": 1, "lease": None})


def test_s2_35_whatever_the_worker_dies_of_the_run_comes_to_an_end(app: App, hand: Hand, shop: Workshop) -> None:
    """Three workers in a row take it and are never heard of again: it is FAILED, and says why."""
    run = app.submit("add", {"a": 1})
    for _ in range(3):
        assert hand.lease_this(run)
        shop.clock.advance(60 + MOMENT)
        assert len(hand.do(hand.ledger.write(transitions.lose_expired, hand.ledger.statement_context))) == 1
    ended = app.get(run.id)
    assert (ended.status, ended.attempts, ended.losts, ended.errors) == ("FAILED", 3, 3, 0)
    assert "by-hand was lost" in (ended.last_error or "")


# -- S2.40, S2.41 -----------------------------------------------------------------------------------------------------


def test_s2_40_a_large_result_lies_in_the_result_store_under_its_ref(shop: Workshop) -> None:
    run, small = shop.app.submit("large", {"size": 100_000}), shop.app.submit("large", {"size": 10})
    with shop.working(processes=1):
        ended, row = shop.app.wait(run.id, timeout=60), shop.app.wait(small.id, timeout=60)
    assert shop.app.result(run.id) == "x" * 100_000
    assert ended.result_ref is not None
    assert ended.result_ref.startswith(f"{run.id}/1/"), "run and fence"
    file = shop.folder / "artifacts" / ended.result_ref
    assert hashlib.sha256(file.read_bytes()).hexdigest() == ended.result_digest
    assert (row.result_ref, shop.app.result(small.id)) == (f"semel:{small.id}", "x" * 10), "in the row itself"
    refs = {ended.result_ref, row.result_ref}
    assert {ref for (ref,) in shop.sql("SELECT result_ref FROM model_runs")} == refs, "the relation says the same"
    assert [shop.app.result(each.result_ref) for each in (ended, row)] == ["x" * 100_000, "x" * 10], "an address"
    file.write_bytes(b'"changed"')
    with pytest.raises(SemelError, match="digest"):
        shop.app.result(run.id)


@pytest.fixture(scope="module")
def s3_server() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.mark.parametrize("isolation", ["loop", "process"])
def test_s2_40_in_a_flat_folder_every_result_is_the_file_of_its_run(shop: Workshop, isolation: str) -> None:
    """As the document has it: artifacts/{run_id}.json, and result_ref names it."""
    folder = shop.folder / "flat"
    app = shop.open(artifacts=f"{folder.as_uri()}?layout=flat")
    model, given = ("add", {"a": 1, "b": 2}) if isolation == "loop" else ("large", {"size": 100_000})
    assert app.registry[model].isolation == isolation
    run = app.submit(model, given)
    with shop.working(app, processes=1):
        ended = app.wait(run.id, timeout=60)
        until((folder / f"{run.id}.json").exists, "the file")
    assert ended.result_ref == f"{run.id}.json"
    assert json.loads((folder / f"{run.id}.json").read_bytes()) == app.result(run.id) == app.result(ended.result_ref)
    app.purge(0)
    assert list(folder.rglob("*.json")) == []


def test_s2_40_the_store_may_be_s3(shop: Workshop, s3_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = {"AWS_ACCESS_KEY_ID": "someone", "AWS_SECRET_ACCESS_KEY": "something", "AWS_REGION": "us-east-1"}
    for name, value in {**secrets, "AWS_ENDPOINT_URL": s3_server, "AWS_ALLOW_HTTP": "true"}.items():
        monkeypatch.setenv(name, value)
    bucket = f"bucket-{uuid.uuid4().hex}"
    with urlopen(Request(f"{s3_server}/{bucket}", method="PUT")) as answer:
        assert answer.status == 200
    app = shop.open(artifacts=f"s3://{bucket}/results")
    app.model("large_here", isolation="thread")(worker_models.large)
    run = app.submit("large_here", {"size": 100_000})
    with shop.working(app):
        ended = app.wait(run.id, timeout=60)
    assert (ended.status, app.result(run.id)) == ("SUCCEEDED", "x" * 100_000)
    assert ended.result_ref is not None
    kept = open_results(f"s3://{bucket}/results").get(ended.result_ref)
    assert hashlib.sha256(kept).hexdigest() == ended.result_digest


def test_s2_41_every_log_line_of_a_worker_carries_the_five_fields(
    shop: Workshop, caplog: pytest.LogCaptureFixture
) -> None:
    """As attributes for those who collect logs, and in the text for those who read them."""
    folder = shop.place("logged")
    with caplog.at_level(logging.INFO, "semel.worker"), shop.working() as worker:
        good = shop.app.submit("add", {"a": 1})
        bad = shop.app.submit("decide", {"verdict": "fatal", "raised": True})
        stopped = shop.app.submit("await_politely", {"folder": folder})
        shop.app.wait(good.id, timeout=60)
        shop.app.wait(bad.id, timeout=60)
        until(lambda: effects(folder))
        shop.app.cancel(stopped.id)
        shop.app.wait(stopped.id, timeout=60)
    lines = [record for record in caplog.records if record.name == "semel.worker"]
    fields = ("run_id", "payload_hash", "worker_id", "status", "attempt_count")
    for line in lines:
        for field in fields:
            value = getattr(line, field)
            assert f"{field}={'-' if value is None else value}" in line.getMessage()
    assert {line.worker_id for line in lines} == {worker.id}
    ends = {(line.run_id, line.payload_hash, line.status, line.attempt_count) for line in lines}
    for run, status in ((good, "SUCCEEDED"), (bad, "FAILED"), (stopped, "CANCELLED")):
        assert (run.id, run.payload_hash, status, 1) in ends


# -- S2.50 to S2.55: the document's own tests --------------------------------------------------------------------------


def test_s2_50_the_hash_is_stable_regardless_of_key_order(app: App) -> None:
    one = hash_of(app, {"scenario": "high_inflation", "horizon_months": 24, "region": "AU"})
    assert one == hash_of(app, {"region": "AU", "horizon_months": 24, "scenario": "high_inflation"})


def test_s2_51_a_key_used_again_finds_its_run_or_is_a_conflict(app: App) -> None:
    run = app.submit("forecast", {"scenario": "base"}, idempotency_key="k")
    assert app.submit("forecast", {"scenario": "base"}, idempotency_key="k").id == run.id
    with pytest.raises(KeyReused):
        app.submit("forecast", {"scenario": "other"}, idempotency_key="k")


def test_s2_52_the_first_worker_gets_the_lease_the_second_does_not_while_it_is_valid(app: App, shop: Workshop) -> None:
    run = app.submit("forecast", {"scenario": "base"})
    assert shop.hand(name="first").lease_this(run) is not None
    assert shop.hand(name="second").lease_this(run) is None


def test_s2_53_end_to_end_a_run_is_created_processed_and_succeeds(shop: Workshop) -> None:
    with shop.working():
        run = shop.app.submit("forecast", {"scenario": "high_inflation", "horizon_months": 24, "region": "AU"})
        assert run.status == "PENDING"
        assert shop.app.wait(run.id, timeout=60).status == "SUCCEEDED"
    assert shop.app.result(run.id) == {"scenario": "high_inflation", "objective": 0.83}
    steps = [(step.step, step.status) for step in shop.app.timeline(run.id)]
    assert steps == [("created", "PENDING"), ("leased", "RUNNING"), ("succeeded", "SUCCEEDED")]


def test_s2_54_a_worker_dies_another_takes_the_lease_and_succeeds(app: App, shop: Workshop) -> None:
    run = app.submit("add", {"a": 1})
    shop.hand(name="dead").lease()
    with shop.working(app) as worker:
        until(app.workers)
        shop.clock.advance(61)
        ended = app.wait(run.id, timeout=60)
    assert (ended.status, ended.attempts, ended.losts, ended.worker) == ("SUCCEEDED", 2, 1, worker.id)
    assert [step.step for step in app.timeline(run.id)] == ["created", "leased", "lost", "leased", "succeeded"]


def test_s2_55_it_fails_first_succeeds_second_with_an_attempt_count_of_two(app: App, shop: Workshop) -> None:
    run = app.submit("flaky", {"failures": 1})
    with shop.working(app):
        until(lambda: app.get(run.id).errors)
        shop.clock.advance(6)
        app.wait(run.id, timeout=60)
    assert shop.sql("SELECT status, attempt_count FROM model_runs") == [("SUCCEEDED", 2)]


# -- S2.56 to S2.58 ---------------------------------------------------------------------------------------------------


def test_s2_56_keys_whose_time_is_over_are_cleaned_away(app: App, hand: Hand, shop: Workshop) -> None:
    """By the sweeper that every worker has; the runs stay."""
    app.submit("add", {"a": 1}, idempotency_key="day")
    app.submit("add", {"a": 2}, idempotency_key="hour", key_ttl=3600)
    app.submit("add", {"a": 3})
    shop.clock.advance(3600)
    sweep(app, hand)
    assert shop.sql("SELECT key FROM idempotency_keys ORDER BY 1") == [("day",), ("hour",)]
    shop.clock.advance(MOMENT)
    sweep(app, hand)
    assert shop.sql("SELECT key FROM semel_keys") == [("day",)]
    shop.clock.advance(86400)
    sweep(app, hand)
    assert shop.sql("SELECT count(*) FROM semel_keys") == [(0,)]
    assert shop.sql("SELECT count(*) FROM model_runs") == [(3,)]


def sweep(app: App, hand: Hand) -> None:
    """One turn of the sweeper."""
    sweeper = Sweeper(hand.ledger, hand.name, transport=app.transport, hooks=app.hooks, publish=app.publish)
    hand.do(sweeper.sweep())


def test_s2_57_run_completed_is_written_with_the_end_and_published_after_it(shop: Workshop) -> None:
    """The event is in the database before anyone was told; whoever is told finds the run over."""
    published: list[tuple[str, str, str]] = []
    app = shop.open(clock=shop.clock, publish=lambda event: published.append((event.name, event.run_id, event.status)))
    hand = shop.hand(app)
    run = app.submit("add", {"a": 1})
    hand.end(hand.lease()[0])
    waiting = shop.sql("SELECT step FROM semel_outbox WHERE unpublished ORDER BY version")
    assert waiting == [("created",), ("leased",), ("succeeded",)]
    assert published == []
    sweep(app, hand)
    names = [
        ("RunCreated", run.id, "PENDING"),
        ("RunStarted", run.id, "RUNNING"),
        ("RunCompleted", run.id, "SUCCEEDED"),
    ]
    assert published == names
    sweep(app, hand)
    assert published == names, "once told is told"


def test_s2_57_an_end_that_cannot_be_noted_is_not_written(shop: Workshop) -> None:
    """State and event are one transaction."""
    app = shop.open(clock=shop.clock, publish=lambda event: None)
    hand = shop.hand(app)
    run = app.submit("add", {"a": 1})
    leased = hand.lease()[0]
    refuse_inserts(shop, "semel_outbox")
    try:
        with pytest.raises(SemelError):
            hand.end(leased)
    finally:
        shop.sql("DROP TRIGGER refused" + (" ON semel_outbox" if shop.kind == "postgres" else ""))
    assert app.get(run.id).status == "RUNNING"
    assert hand.end(leased)


def test_s2_58_runs_are_summed_up_by_model_and_scenario(app: App, hand: Hand, shop: Workshop) -> None:
    for scenario, count in (("base", 3), ("high_inflation", 2)):
        for horizon in range(1, count + 1):
            app.submit("forecast", {"scenario": scenario, "horizon_months": horizon})
    app.submit("add", {"a": 1})
    first, second = hand.lease(2)
    shop.clock.advance(10)
    hand.end(first)
    shop.clock.advance(10)
    hand.end(second, "fatal", reason="no")
    by_model = {each.model: each for each in app.summary()}
    assert by_model["forecast"].counts == {"PENDING": 3, "SUCCEEDED": 1, "FAILED": 1}
    assert (by_model["forecast"].total, by_model["forecast"].mean_seconds) == (5, 10.0)
    assert (by_model["add"].counts, by_model["add"].mean_seconds) == ({"PENDING": 1}, None)
    groups = {(each.model, each.group): each.total for each in app.summary(grouped=True)}
    assert groups == {("forecast", "base"): 3, ("forecast", "high_inflation"): 2, ("add", None): 1}
