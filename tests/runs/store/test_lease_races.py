"""Rows that change between the snapshot of a lease and its locks, on PostgreSQL.

A lease picks rows by their place, in the snapshot of its statement, and then locks them. Here a role leases to whom a
policy shows the rows: the policy waits for an advisory lock, so that the statement stands still after its snapshot and
before its locks, as long as the test wants.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import Connection, NullPool, create_engine, make_url

from semel import Run
from semel.db.dialect import StatementContext
from semel.db.postgres import plan
from semel.runs.store import lease, transitions
from semel.runs.store.lease import Leased, LeaseRequest
from semel.runs.store.transitions import FinishRequest
from semel.runs.worker.fetcher import RETURNED
from support.databases import Databases, TestDatabase
from support.waiting import eventually

GATE = 7
HELD = "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND objid = %s AND NOT granted"


@pytest.fixture
def database(databases: Databases) -> Iterator[TestDatabase]:
    with databases.empty("postgres") as database:
        yield database


class Race:
    """A lease that stands still after its snapshot, and what others do meanwhile."""

    def __init__(self, database: TestDatabase, operator: psycopg.Connection[tuple[object]], slow: Connection) -> None:
        self.database = database
        self.operator = operator
        self._slow = slow

    def lease(self, meanwhile: Callable[[], object]) -> list[Leased]:
        """What the slow worker leases, if this is done between its snapshot and its locks."""
        self.operator.execute("SELECT pg_advisory_lock(%s)", [GATE])
        with ThreadPoolExecutor(1) as pool:
            leased: Future[list[Leased]] = pool.submit(
                lease.lease, self._slow, LeaseRequest("slow", ("default",), ["train"], 10), StatementContext()
            )
            try:
                eventually(lambda: self.operator.execute(HELD, [GATE]).fetchone(), "the lease at the gate")
                meanwhile()
            finally:
                self.operator.execute("SELECT pg_advisory_unlock(%s)", [GATE])
            return leased.result(60)

    def row(self, run: Run) -> tuple[object, ...] | None:
        """Fence, worker and attempts of the run's active row."""
        found = self.operator.execute("SELECT fence, worker, attempts FROM semel_active WHERE id = %s", [run.id])
        return found.fetchone()


@contextmanager
def gated(operator: psycopg.Connection[tuple[object]]) -> Iterator[str]:
    """A role that sees a row of semel_active only after it has passed the gate."""
    role = f"slow_{uuid4().hex}"
    name = sql.Identifier(role)
    operator.execute(sql.SQL("CREATE ROLE {0} LOGIN; GRANT ALL ON ALL TABLES IN SCHEMA public TO {0}").format(name))
    operator.execute(
        sql.SQL("""
CREATE FUNCTION passes() RETURNS boolean VOLATILE LANGUAGE plpgsql AS
  $$ BEGIN PERFORM pg_advisory_xact_lock_shared({}); RETURN true; END $$;
ALTER TABLE semel_active ENABLE ROW LEVEL SECURITY;
CREATE POLICY gate ON semel_active TO {} USING (passes())""").format(sql.Literal(GATE), name)
    )
    try:
        yield role
    finally:
        operator.execute("ALTER TABLE semel_active DISABLE ROW LEVEL SECURITY; DROP FUNCTION passes CASCADE")
        operator.execute(sql.SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(name))


@pytest.fixture
def race(database: TestDatabase) -> Iterator[Race]:
    with psycopg.connect(database.url, autocommit=True) as operator, gated(operator) as role:
        url = make_url(database.url).set(drivername="postgresql+psycopg", username=role)
        engine = create_engine(url, isolation_level="AUTOCOMMIT", poolclass=NullPool)
        with engine.connect() as slow:
            plan(slow, hot=True)
            yield Race(database, operator, slow)


def test_runs_that_nobody_changes_meanwhile_are_leased(race: Race) -> None:
    """Else the tests below would prove nothing."""
    runs = [race.database.submit() for _ in range(3)]
    leased = race.lease(lambda: None)
    assert [(each.id, each.fence) for each in leased] == [(run.id, 1) for run in runs]


def test_a_run_that_another_worker_leased_meanwhile_stays_its_own(race: Race) -> None:
    taken, left = race.database.submit(), race.database.submit()
    leased = race.lease(race.database.lease)
    assert [each.id for each in leased] == [left.id]
    assert race.row(taken) == (1, "worker-1", 1)
    assert race.row(left) == (1, "slow", 1)


def test_a_run_that_was_cancelled_meanwhile_is_not_leased(race: Race) -> None:
    cancelled, left = race.database.submit(), race.database.submit()
    leased = race.lease(lambda: race.database.app.cancel(cancelled.id))
    assert [each.id for each in leased] == [left.id]
    assert race.database.app.get(cancelled.id).status == "CANCELLED"


def test_a_run_that_was_leased_and_given_back_meanwhile_has_no_fence_twice(race: Race) -> None:
    """Whether it is leased at once or by the next statement, the fence that it had meanwhile is not given again."""
    run = race.database.submit()

    def lease_and_return() -> None:
        (taken,) = race.database.lease()
        assert taken.fence == 1
        race.database.do(transitions.end, [FinishRequest(taken.id, taken.fence, RETURNED, returned=True)])

    leased = race.lease(lease_and_return) or race.lease(lambda: None)
    assert [(each.id, each.fence, each.attempts) for each in leased] == [(run.id, 2, 1)]
    assert race.row(run) == (2, "slow", 1)


def test_a_run_that_changed_meanwhile_and_still_waits_is_leased_as_it_is_now(race: Race) -> None:
    run = race.database.submit()
    change = "UPDATE semel_active SET errors = 2 WHERE id = %s"
    leased = race.lease(lambda: race.operator.execute(change, [run.id])) or race.lease(lambda: None)
    assert [(each.id, each.fence, each.errors) for each in leased] == [(run.id, 1, 2)]
