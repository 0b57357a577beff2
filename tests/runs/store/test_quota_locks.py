"""Two callers ask for the last slot, and both are held between their count and their commit: one of them gets it.

Nothing is left to luck: a trigger of the test stops whoever writes, until the other one has written, too, or waits for
the lock of the user. SQLite is left out: it has one writer, from the start of its transaction.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any, TypeAlias

import psycopg
import pytest

from semel import Quota
from semel.errors import CostLimitExceeded, QuotaExceeded
from support.databases import Databases, TestDatabase
from support.runs_harness import PATIENCE
from support.waiting import eventually

Ask: TypeAlias = Callable[[TestDatabase], Callable[[], bool]]
"""Opens connections of its own; what it returns asks for a slot, and returns whether it got one."""

GATE = 7_301_004
"""The advisory lock at which the writers stop. The test holds it."""

STOP = f"""
CREATE FUNCTION stop_at_gate() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  PERFORM pg_advisory_xact_lock_shared({GATE});
  RETURN NEW;
END $$;
CREATE TRIGGER stop_at_gate AFTER INSERT ON semel_reservations EXECUTE FUNCTION stop_at_gate();
CREATE TRIGGER stop_at_gate AFTER INSERT ON semel_runs EXECUTE FUNCTION stop_at_gate();
CREATE TRIGGER stop_at_gate AFTER INSERT ON semel_quotas EXECUTE FUNCTION stop_at_gate();
"""

STOPPED = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND wait_event_type = 'Lock' AND pid <> pg_backend_pid()
"""


@pytest.fixture
def database(databases: Databases) -> Iterator[TestDatabase]:
    with databases.empty("postgres") as database:
        yield database


@contextmanager
def gate(url: str) -> Iterator[psycopg.Connection]:
    """Stop everybody who writes, until the connection releases its lock."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(STOP)
        try:
            connection.execute(f"SELECT pg_advisory_lock({GATE})")
            yield connection
        finally:
            connection.execute("SELECT pg_advisory_unlock_all()")
            connection.execute("DROP FUNCTION stop_at_gate CASCADE")


def both(database: TestDatabase, *asks: Callable[[], Any]) -> list[Any]:
    """Let all ask, and go on when each has written or waits for another."""
    with ThreadPoolExecutor(len(asks)) as threads, gate(database.url) as connection:
        asked = [threads.submit(copy_context().run, ask) for ask in asks]

        def settled() -> bool:
            ((stopped,),) = connection.execute(STOPPED)
            return len(asks) <= int(stopped) + sum(each.done() for each in asked)

        eventually(settled, "each of them has written, or waits for the other")
        connection.execute(f"SELECT pg_advisory_unlock({GATE})")
        return [each.result(PATIENCE) for each in asked]


def reserve(database: TestDatabase) -> Callable[[], bool]:
    jobs = database.open_jobs()
    jobs.check_idempotency_key("opens the connection")
    return lambda: jobs.reserve_job_slot(42, 1) is not None


def submit(database: TestDatabase, **options: Any) -> Callable[[], bool]:
    app = database.open_app()
    app.backlog()

    def ask() -> bool:
        try:
            app.submit("train", user=42, dedupe=False, **options)
        except (QuotaExceeded, CostLimitExceeded):
            return False
        return True

    return ask


@pytest.mark.parametrize(
    "asks",
    [(reserve, reserve), (reserve, submit), (submit, submit)],
    ids=lambda asks: "-".join(a.__name__ for a in asks),
)
def test_the_last_slot_is_given_once(database: TestDatabase, asks: tuple[Ask, Ask]) -> None:
    database.app.set_quota(42, Quota(max_concurrent=1))
    granted = both(database, *(ask(database) for ask in asks))
    assert sorted(granted) == [False, True]
    assert database.concurrent() == 1


@pytest.mark.parametrize(
    "quota", [Quota(per_hour=1), Quota(per_day=1), Quota(cost_daily=1)], ids=["hour", "day", "cost"]
)
def test_what_a_quota_leaves_is_given_once(database: TestDatabase, quota: Quota) -> None:
    database.app.set_quota(42, quota)
    granted = both(database, *(submit(database, cost=1) for _ in range(2)))
    assert sorted(granted) == [False, True]
    assert database.count("semel_runs") == 1


def test_users_do_not_wait_for_each_other(database: TestDatabase) -> None:
    """Both are at the gate, having written: none waits for a lock that it need not have."""
    database.app.set_quota("*", Quota(max_concurrent=1))
    jobs = [database.open_jobs() for _ in range(2)]
    granted = both(database, *(lambda user=user: jobs[user].reserve_job_slot(user, 1) for user in range(2)))
    assert None not in granted
    assert database.count("semel_reservations") == 2


def test_of_two_quotas_set_at_the_same_time_one_holds_and_neither_fails(database: TestDatabase) -> None:
    apps = [database.open_app() for _ in range(2)]
    for app in apps:
        app.backlog()
    both(database, *(lambda n=n: apps[n].set_quota(42, Quota(max_concurrent=n)) for n in range(2)))
    (held,) = database.app.quotas().values()
    assert held.max_concurrent in range(2)
