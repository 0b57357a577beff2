"""Upkeep, verb by verb, on a clock that the test sets: workers' rows, leadership, and what is removed when."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Connection, text

from semel._concurrency.sync import run_sync
from semel.db.dialect import StatementContext, transaction
from semel.runs.store import lease, maintenance, queries
from semel.runs.store.lease import LogLineRow
from semel.runs.store.maintenance import Removal, Removed, acquire_leadership
from support.databases import LEASE, Databases, TestDatabase, behind

MOMENT = 0.000001
DAY = 86400


@pytest.fixture
def database(databases: Databases) -> Iterator[TestDatabase]:
    """One kind of database: its statements are the other's too."""
    with databases.empty("sqlite") as database:
        yield database


# -- workers -----------------------------------------------------------------------------------------------------------


def workers(database: TestDatabase) -> list[str]:
    return [each.name for each in database.app.workers()]


def test_the_row_of_a_worker_says_what_it_wrote_last(database: TestDatabase) -> None:
    database.see_worker("one")
    began = database.clock.us
    database.clock.advance(5)
    database.see_worker("one", draining=True)
    (one,) = database.app.workers()
    assert (one.host, one.pid, one.queues, one.models) == ("host", 1, ["default"], {"train": "thread"})
    assert (one.slots, one.draining, one.started_us, one.seen_us) == ({"thread": 2}, True, began, began + 5_000_000)
    database.see_worker("one")
    assert [each.draining for each in database.app.workers()] == [False]


def test_a_worker_that_stopped_takes_its_own_row_away(database: TestDatabase) -> None:
    database.see_worker("one")
    database.see_worker("two")
    run_sync(database.store.write(maintenance.worker_gone, "one"))
    assert workers(database) == ["two"]


def test_a_worker_that_was_not_seen_for_more_than_a_day_is_removed(database: TestDatabase) -> None:
    database.see_worker("dead")
    database.clock.advance(DAY)
    database.see_worker("live")
    database.tidy()
    assert workers(database) == ["dead", "live"]
    database.clock.advance(MOMENT)
    database.tidy()
    assert workers(database) == ["live"]


# -- leadership --------------------------------------------------------------------------------------------------------


def leads(database: TestDatabase, holder: str, role: str = "sweeper") -> bool:
    """Ask for the role for 15 seconds."""
    answer: bool = database.do(maintenance.acquire_leadership, role, holder, 15)
    return answer


def left(database: TestDatabase, holder: str) -> float:
    seconds: float = database.ask(maintenance.term_left, "sweeper", holder, database.store.statement_context)
    return seconds


def test_a_role_is_held_to_the_last_microsecond_of_its_term(database: TestDatabase) -> None:
    assert left(database, "heir") == 0
    assert leads(database, "first") is True
    assert leads(database, "heir") is False
    assert (left(database, "heir"), left(database, "first")) == (15, 0)
    database.clock.advance(15)
    assert (left(database, "heir"), leads(database, "heir")) == (MOMENT, False)
    database.clock.advance(MOMENT)
    assert (left(database, "heir"), leads(database, "heir")) == (0, True)
    assert left(database, "first") == 15


def test_a_role_that_was_taken_during_the_wait_for_it_is_not_taken_from_its_holder(databases: Databases) -> None:
    """By the clock at the start of its statement, who waited sees a term that ends too late to be true."""
    by_its_own_clock = StatementContext()
    with databases.empty("postgres") as database:

        def lead(holder: str) -> Callable[[Connection], bool]:
            return lambda conn: acquire_leadership(conn, "sweeper", holder, 15, by_its_own_clock)

        assert run_sync(database.store.write(acquire_leadership, "sweeper", "dead", 0, by_its_own_clock))
        lock = text("SELECT 1 FROM semel_leaders FOR UPDATE")
        assert behind(database, lambda conn: conn.execute(lock), lead("late"), lead("first")) is False
        assert database.rows("SELECT holder FROM semel_leaders") == [("first",)]


def test_who_holds_a_role_can_renew_it_and_nobody_else_gives_it_up(database: TestDatabase) -> None:
    assert leads(database, "first")
    assert leads(database, "first", "other role")
    database.clock.advance(10)
    assert leads(database, "first")
    assert left(database, "heir") == 15
    run_sync(database.store.write(maintenance.release_leadership, "sweeper", "heir"))
    assert not leads(database, "heir")
    run_sync(database.store.write(maintenance.release_leadership, "sweeper", "first"))
    assert leads(database, "heir")
    assert not leads(database, "heir", "other role"), "that one was not given up"


def test_a_term_that_began_before_the_clock_was_put_back_does_not_count(database: TestDatabase) -> None:
    assert leads(database, "first")
    database.clock.advance(-MOMENT)
    assert left(database, "heir") == 0
    assert leads(database, "heir")


# -- leases after the clock was put back -------------------------------------------------------------------------------


def test_only_a_lease_that_lasts_longer_than_a_new_one_is_shortened(database: TestDatabase) -> None:
    for _ in range(2):
        database.submit()
    (early,) = database.lease()
    database.clock.advance(30)
    (late,) = database.lease()
    until = database.app.get(early.id).lease_until_us
    database.clock.advance(-20)
    database.do(maintenance.repair_times)
    assert database.app.get(early.id).lease_until_us == until
    assert database.app.get(late.id).lease_until_us == database.clock.us + LEASE * 1_000_000


# -- removal -----------------------------------------------------------------------------------------------------------


def test_there_may_be_more_to_remove_while_a_batch_is_full(
    database: TestDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "BATCH", 2)
    for number in range(3):
        database.submit(idempotency_key=f"key-{number}", key_ttl=1)
    database.reserve(ttl=1)
    database.clock.advance(3602)
    assert [database.do(maintenance.remove_expired) for _ in range(2)] == [(3, True), (1, False)]


def old_runs(database: TestDatabase, many: int) -> list[str]:
    """Runs that ended at this moment, in the order of their ids."""
    runs = [database.submit(dedupe=False) for _ in range(many)]
    for run in runs:
        database.app.cancel(run.id)
    return [run.id for run in runs]


def test_old_runs_are_removed_batch_by_batch_in_the_order_of_their_ids(
    database: TestDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "RUNS_BATCH", 2)
    ids = old_runs(database, 4)
    database.clock.advance(10)
    remove = maintenance.remove_runs
    assert database.do(remove, 10, None) == Removed(0, None), "they are not older than ten seconds"
    database.clock.advance(MOMENT)
    assert database.do(remove, 10, ids[0]) == Removed(2, ids[2]), "after the first"
    assert [run.id for run in database.app.runs().runs] == [ids[3], ids[0]]
    assert database.do(remove, 10, None) == Removed(2, ids[3])
    assert database.do(remove, 10, ids[3]) == Removed(0, None)
    prefixes = [each.prefix for each in database.ask(maintenance.pending_removals, "")]
    assert prefixes == sorted(ids)[:2]
    assert database.ask(maintenance.pending_removals, ids[1]) == [Removal(each, None) for each in ids[2:]]
    run_sync(database.store.write(maintenance.settle, ids[:3]))
    assert database.ask(maintenance.pending_removals, "") == [Removal(ids[3], None)]


def test_a_removed_run_leaves_neither_steps_nor_logs(database: TestDatabase) -> None:
    gone, (kept,) = old_runs(database, 2), old_runs(database, 1)
    for run_id in (*gone, kept):
        run_sync(database.store.write(lease.log, [LogLineRow(run_id, 1, 1, 0, "INFO", "a line")]))
    database.app.retry(kept)
    database.clock.advance(10)
    assert database.do(maintenance.remove_runs, 1, None).count == 3
    for run_id in (*gone, kept):
        assert database.ask(queries.timeline, run_id) == []
    assert run_sync(database.store.write(maintenance.remove_logs, gone)) is False
    logged = [database.ask(queries.logs, run_id, (0, 0), 10) for run_id in (*gone, kept)]
    assert [len(lines) for lines in logged] == [0, 0, 1]


def test_a_key_keeps_its_run_to_the_last_microsecond(database: TestDatabase) -> None:
    run = database.submit(idempotency_key="key", key_ttl=60)
    database.app.cancel(run.id)
    database.clock.advance(60)
    assert database.app.purge(older_than=1) == 0
    database.clock.advance(MOMENT)
    assert database.app.purge(older_than=1) == 1


def test_any_data_can_be_locked(databases: Databases) -> None:
    """The number of the lock is made of the data's name, and fits into what PostgreSQL takes."""
    with databases.empty("postgres") as database:

        def lock(conn: Any) -> None:
            with transaction(conn):
                for number in range(20):
                    maintenance.lock_data(conn, f"data/{number}", database.store.statement_context)

        run_sync(database.store.write(lock))
