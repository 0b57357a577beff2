"""The steps of a run's life, verb by verb, on a clock that the test sets: what each changes, and what it leaves."""

import json
from collections.abc import Iterator
from typing import Any, LiteralString

import psycopg
import pytest

from semel.runs.store import lease, transitions
from semel.runs.store.lease import Leased, LeaseRenewal, LeaseRequest
from semel.runs.store.transitions import CHANNEL, FinishRequest, storable
from semel.runs.types import MICRO, AttemptResult, EndKind, new_id
from support.databases import LEASE, MISCOUNTED, Databases, TestDatabase, behind, held

MOMENT = 0.000001


@pytest.fixture
def database(databases: Databases) -> Iterator[TestDatabase]:
    """One kind of database: its statements are the other's too."""
    with databases.empty("sqlite") as database:
        yield database


@pytest.fixture
def postgres(databases: Databases) -> Iterator[TestDatabase]:
    with databases.empty("postgres") as database:
        yield database


def lease_ready(database: TestDatabase) -> list[str]:
    """Lease the runs that are ready, without waking those that are due."""
    taken: list[Leased] = database.do(lease.lease, LeaseRequest("worker-2", ("default",), ["train"], 10))
    return [each.id for each in taken]


def leased(database: TestDatabase, **options: Any) -> Leased:
    """A run that a worker holds."""
    run = database.submit(**options)
    (taken,) = database.lease()
    assert taken.id == run.id
    return taken


# -- ends ------------------------------------------------------------------------------------------------------------


AS_BEFORE: LiteralString = """
INSERT INTO {table}
SELECT (jsonb_populate_record(t, jsonb_build_object(%(id)s::text, %(other)s::uuid) || %(usual)s::jsonb)).*
FROM {table} AS t WHERE {id} = %(run)s"""


def shown(connection: psycopg.Connection[Any], run_id: str) -> list[Any]:
    """The run's row in the view, without its ids."""
    query = "SELECT to_jsonb(s) - ARRAY['id', 'ended_id'] FROM semel_run_states AS s WHERE id = %s"
    return connection.execute(query, (run_id,)).fetchall()


def test_what_is_usual_takes_no_room_and_is_shown_as_if_it_were_written(postgres: TestDatabase) -> None:
    """The release before wrote the values themselves: such rows look the same."""
    plain = leased(postgres)
    assert postgres.end(plain)
    run, other = postgres.app.get(plain.id), new_id()
    assert (run.attempts, run.errors, run.losts, run.priority, run.due_us) == (1, 0, 0, 0, run.created_us)
    submitted = {"priority": 0, "lease_us": LEASE * MICRO}
    ended = {"attempts": 1, "errors": 0, "losts": 0, "due_us": run.created_us}
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        for table, key, usual in (("semel_runs", "id", submitted), ("semel_attempts", "run_id", ended)):
            stored = f"SELECT {', '.join(usual)} FROM {table} WHERE {key} = %s"
            assert connection.execute(stored.encode(), (plain.id,)).fetchone() == (None,) * len(usual)
            values = {"id": key, "run": plain.id, "other": other, "usual": json.dumps(usual)}
            connection.execute(AS_BEFORE.format(table=table, id=key).encode(), values)
        assert len(shown(connection, other)) == 1
        assert shown(connection, other) == shown(connection, plain.id)


def test_what_is_not_usual_is_written(postgres: TestDatabase) -> None:
    first = leased(postgres, priority=5)
    postgres.clock.advance(1)
    assert postgres.end(first, "retry", reason="again")
    due_us = postgres.app.get(first.id).due_us
    (second,) = postgres.lease()
    assert postgres.end(second)
    run = postgres.app.get(first.id)
    assert (run.attempts, run.errors, run.priority, run.due_us) == (2, 1, 5, due_us)
    assert due_us > run.created_us
    later = postgres.submit(delay=10)
    postgres.clock.advance(10)
    postgres.finish(later)
    run = postgres.app.get(later.id)
    assert run.due_us == run.created_us + 10 * MICRO


def test_a_run_that_is_tried_again_without_a_delay_is_ready_at_once(database: TestDatabase) -> None:
    taken = leased(database)
    assert database.end(taken, "retry")
    assert lease_ready(database) == [taken.id]


def test_an_attempt_that_succeeded_has_succeeded_however_often_that_is_said_and_cannot_fail(
    database: TestDatabase,
) -> None:
    taken = leased(database)
    assert database.end(taken)
    ended = database.app.get(taken.id)
    assert database.end(taken), "the first reply was lost"
    kinds: list[EndKind] = ["fatal", "retry", "cancelled"]
    assert not any(database.end(taken, kind) for kind in kinds)
    assert database.app.get(taken.id) == ended


def test_a_success_that_another_attempt_had_is_not_that_of_a_lost_one(database: TestDatabase) -> None:
    lost, other = leased(database), leased(database)
    assert database.end(other)
    database.clock.advance(LEASE + MOMENT)
    assert database.lose_expired() == 1
    (heir,) = database.lease()
    assert database.end(heir)
    assert not database.end(lost), "neither its own run nor another with its fence makes it true"


def test_many_ends_are_written_together_each_as_it_was(database: TestDatabase) -> None:
    """A plain result, one with a warning, one with a cost, an error and a passed fence, in one call."""
    for _ in range(5):
        database.submit()
    plain, warned, costly, failed, passed = database.lease(5)
    result: dict[str, Any] = {"result": "1", "result_digest": "d" * 64, "result_size": 1}
    endings = [
        FinishRequest(plain.id, plain.fence, AttemptResult(kind="succeeded", **result)),
        FinishRequest(warned.id, warned.fence, AttemptResult(kind="succeeded", warnings=["w"], **result)),
        FinishRequest(costly.id, costly.fence, AttemptResult(kind="succeeded", cost=2.0, **result)),
        FinishRequest(failed.id, failed.fence, AttemptResult(kind="fatal", reason="no", traceback="line 1")),
        FinishRequest(passed.id, passed.fence - 1, AttemptResult(kind="succeeded", **result)),
    ]
    over = database.do(transitions.end, endings)
    assert {run_id: each.status for run_id, each in over.items()} == {
        **dict.fromkeys((plain.id, warned.id, costly.id), "SUCCEEDED"),
        failed.id: "FAILED",
    }
    runs = [database.app.get(each.id) for each in (plain, warned, costly, failed, passed)]
    assert [run.warnings for run in runs] == [[], ["w"], [], [], []]
    assert [run.cost for run in runs] == [0, 0, 2, 0, 0]
    assert [run.last_error for run in runs] == [None, None, None, "no", None]
    assert [run.traceback for run in runs] == [None, None, None, "line 1", None]
    assert [run.artifacts for run in runs] == [[]] * 5


def test_an_attempt_without_a_reason_leaves_none(database: TestDatabase) -> None:
    taken = leased(database, cost=3)
    assert database.end(taken, "fatal")
    run = database.app.get(taken.id)
    assert (run.last_error, run.traceback, run.note, run.cost) == (None, None, None, 3)


@pytest.mark.parametrize(
    ("text", "stored"),
    [("plain", "plain"), ("a\0b", "a\\0b"), ("ä\0b", "ä\\0b"), ("ä\ud800b", "ä?b"), ("", "")],
    ids=ascii,
)
def test_a_text_is_stored_without_what_a_database_refuses(text: str, stored: str) -> None:
    assert storable(text) == stored


# -- lost ------------------------------------------------------------------------------------------------------------


def test_a_lease_is_lost_when_its_time_is_over_however_few_are_asked_for(database: TestDatabase) -> None:
    """Those that are still held do not hide it, not even one whose time ends in this microsecond."""
    held_first, ends_now, dead = (leased(database) for _ in range(3))
    database.clock.advance(LEASE)
    database.renew(held_first)
    assert database.lose_expired() == 0
    database.clock.advance(MOMENT)
    database.renew(ends_now)
    (lost,) = database.do(transitions.lose_expired, most=1)
    assert (lost.id, lost.status, lost.step, lost.fence, lost.worker) == (dead.id, "PENDING", "lost", 1, "worker-1")


def test_when_attempts_began_is_found_by_run_and_fence(database: TestDatabase) -> None:
    first = leased(database)
    began = database.clock.us
    database.clock.advance(5)
    database.end(first, "retry")
    (second,) = database.lease()
    other = leased(database)
    asked = [(first.id, first.fence), (other.id, other.fence)]
    assert database.ask(transitions.attempts_began, asked) == {first.id: began, other.id: database.clock.us}
    assert database.ask(transitions.attempts_began, [(second.id, second.fence)]) == {first.id: database.clock.us}
    assert database.ask(transitions.attempts_began, []) == {}


def test_a_heartbeat_waits_for_no_row_that_another_has_locked(postgres: TestDatabase) -> None:
    """Its own runs have the same fence: neither stands for the other."""
    locked, free = leased(postgres), leased(postgres)
    beats = [LeaseRenewal(each.id, each.fence) for each in (locked, free)]
    with psycopg.connect(postgres.url) as other:
        other.execute("SELECT 1 FROM semel_active WHERE id = %s FOR UPDATE", (locked.id,))
        assert postgres.do(lease.renew, beats) == {free.id: False}
    assert postgres.do(lease.renew, beats) == {free.id: False, locked.id: False}


# -- two at once: the second has read the row as it was before the first ----------------------------------------------


@pytest.mark.parametrize(
    ("kind", "status"), [("retry", "CANCELLED"), ("fatal", "FAILED"), ("succeeded", "SUCCEEDED"), ("lost", "CANCELLED")]
)
def test_an_attempt_that_ends_while_its_cancellation_is_written_heeds_it(
    postgres: TestDatabase, kind: EndKind, status: str
) -> None:
    taken, context = leased(postgres), postgres.store.statement_context
    end = FinishRequest(
        taken.id, taken.fence, AttemptResult(kind=kind, **({"result": "1"} if kind == "succeeded" else {}))
    )
    ended = behind(
        postgres,
        lambda conn: transitions.cancel(conn, [taken.id], "stop", context),
        lambda conn: transitions.end(conn, [end], context),
    )
    assert ended[taken.id].status == postgres.app.get(taken.id).status == status
    steps = [(step.version, step.step) for step in postgres.app.timeline(taken.id)]
    assert steps[:3] == [(1, "created"), (2, "leased"), (3, "cancel_requested")]
    assert [version for version, _ in steps[3:]] == [4]
    assert postgres.rows(MISCOUNTED) == []


def test_a_run_that_is_cancelled_while_it_is_leased_is_asked_to_stop(postgres: TestDatabase) -> None:
    run, context = postgres.submit(), postgres.store.statement_context
    cancelled = behind(
        postgres,
        lambda conn: lease.lease_these(conn, "w", [run.id], context),
        lambda conn: transitions.cancel(conn, [run.id], "stop", context),
    )
    assert cancelled == {run.id: "RUNNING"}
    seen = postgres.app.get(run.id)
    assert (seen.status, seen.version, seen.fence, seen.step) == ("RUNNING", 3, 1, "cancel_requested")


def test_a_run_that_is_cancelled_while_its_last_attempt_ends_has_ended_once(postgres: TestDatabase) -> None:
    taken, context = leased(postgres), postgres.store.statement_context
    end = FinishRequest(taken.id, taken.fence, AttemptResult(kind="succeeded", result="1"))
    cancelled = behind(
        postgres,
        lambda conn: transitions.end(conn, [end], context),
        lambda conn: transitions.cancel(conn, [taken.id], "stop", context),
    )
    assert cancelled == {}
    assert postgres.app.get(taken.id).status == "SUCCEEDED"
    assert postgres.count("semel_attempts") == 1
    assert postgres.rows(MISCOUNTED) == []


# -- cancel and release ------------------------------------------------------------------------------------------------


def test_a_cancellation_changes_the_named_runs_once_and_no_other(database: TestDatabase) -> None:
    running, ended = leased(database), leased(database)
    database.end(ended)
    pending, other = database.submit(), database.submit()
    asked = [running.id, ended.id, pending.id]
    assert database.do(transitions.cancel, asked, "why") == {running.id: "RUNNING", pending.id: "CANCELLED"}
    asked_to_stop = database.app.get(running.id)
    assert (asked_to_stop.step, asked_to_stop.cancel_us) == ("cancel_requested", database.clock.us)
    database.clock.advance(1)
    assert database.do(transitions.cancel, asked, "again") == {}
    assert database.app.get(running.id) == asked_to_stop
    assert (database.app.get(other.id).status, database.app.get(ended.id).status) == ("PENDING", "SUCCEEDED")


def test_a_pending_run_that_had_begun_costs_what_it_was_to_cost_once_it_is_cancelled(database: TestDatabase) -> None:
    taken = leased(database, cost=5)
    database.end(taken, "retry")
    fresh = database.submit(cost=7)
    for run_id in (taken.id, fresh.id):
        database.app.cancel(run_id)
    assert [database.app.get(run_id).cost for run_id in (taken.id, fresh.id)] == [5, 0]
    assert database.app.get(taken.id).finished_us == database.clock.us


def test_only_a_run_that_waits_for_its_data_is_released(database: TestDatabase) -> None:
    waiting, other = held(database), held(database)
    delayed, cancelled = database.submit(delay=100), held(database)
    database.app.cancel(cancelled.id)
    database.clock.advance(5)
    for run in (delayed, cancelled):
        assert database.do(transitions.release, run.id, "data/1") is None
    assert database.do(transitions.release, waiting.id, "data/1") == "default"
    released = database.app.get(waiting.id)
    assert (released.held, released.data_ref, released.due_us) == (False, "data/1", database.clock.us)
    assert (released.step, released.version) == ("uploaded", 2)
    assert database.app.get(other.id) == other
    assert database.app.get(delayed.id) == delayed
    assert lease_ready(database) == [waiting.id]
    assert database.do(transitions.release, waiting.id, "data/2") is None


def test_a_released_run_calls_the_workers_of_its_queue(postgres: TestDatabase) -> None:
    run = held(postgres)
    with psycopg.connect(postgres.url, autocommit=True) as listening:
        listening.execute(f"LISTEN {CHANNEL}")
        assert postgres.do(transitions.release, run.id, "data/1") == "default"
        called = [each.payload for each in listening.notifies(timeout=10, stop_after=1)]
    assert called == ["default"]


def test_a_batch_of_submissions_calls_the_workers_once_and_only_if_it_made_runs(postgres: TestDatabase) -> None:
    with psycopg.connect(postgres.url, autocommit=True) as listening:
        listening.execute(f"LISTEN {CHANNEL}")
        postgres.submit(idempotency_key="one", number=1)
        postgres.submit(idempotency_key="one", number=1)
        many = [{"model": "train", "parameters": {"number": n}, "queue": f"queue-{n % 2}"} for n in range(10, 20)]
        postgres.app.submit_many(many)
        listening.execute(f"NOTIFY {CHANNEL}, 'the end'")
        called = [each.payload for each in listening.notifies(timeout=10, stop_after=3)]
    assert called == ["", "", "the end"]
