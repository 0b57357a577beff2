"""Two callers ask for the last slot, and both are held between their count and their commit: one of them gets it.

Nothing is left to luck (see support/gates.py). SQLite is left out: only one of its transactions can write at a time.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import pytest

from semel import Quota
from semel.errors import CostLimitExceeded, QuotaExceeded
from semel.runs.store import quotas
from semel.runs.store.quotas import Reserve
from semel.runs.types import MICRO, new_id
from support.databases import Databases, TestDatabase, behind
from support.gates import meet_at_gate

Ask: TypeAlias = Callable[[TestDatabase], Callable[[], bool]]
"""Opens connections of its own; what it returns asks for a slot, and returns whether it got one."""


@pytest.fixture
def database(databases: Databases) -> Iterator[TestDatabase]:
    with databases.empty("postgres") as database:
        yield database


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
    granted = meet_at_gate(database.url, *(ask(database) for ask in asks))
    assert sorted(granted) == [False, True]
    assert database.concurrent() == 1


@pytest.mark.parametrize(
    "quota", [Quota(per_hour=1), Quota(per_day=1), Quota(cost_daily=1)], ids=["hour", "day", "cost"]
)
def test_what_a_quota_leaves_is_given_once(database: TestDatabase, quota: Quota) -> None:
    database.app.set_quota(42, quota)
    granted = meet_at_gate(database.url, *(submit(database, cost=1) for _ in range(2)))
    assert sorted(granted) == [False, True]
    assert database.count("semel_runs") == 1


def test_an_expired_reservation_is_not_consumed_if_its_slot_is_being_given_away(database: TestDatabase) -> None:
    late = database.reserve(limit=1, ttl=1)
    database.clock.advance(2)
    context = database.store.statement_context
    wanted = Reserve(id=new_id(), tenant="", user="42", max_concurrent=1, ttl_us=60 * MICRO)
    granted: list[str | None] = []
    consumed = behind(
        database,
        lambda conn: granted.extend(quotas.reserve(conn, [wanted], context)),
        lambda conn: quotas.consume_after(conn, late, ("", "42"), None, context),
    )
    assert (granted, consumed) == ([wanted.id], False)


def test_users_do_not_wait_for_each_other(database: TestDatabase) -> None:
    """Both are at the gate, having written: none waits for a lock that it need not have."""
    database.app.set_quota("*", Quota(max_concurrent=1))
    jobs = [database.open_jobs() for _ in range(2)]
    granted = meet_at_gate(database.url, *(lambda user=user: jobs[user].reserve_job_slot(user, 1) for user in range(2)))
    assert None not in granted
    assert database.count("semel_reservations") == 2


def test_of_two_quotas_set_at_the_same_time_one_holds_and_neither_fails(database: TestDatabase) -> None:
    apps = [database.open_app() for _ in range(2)]
    for app in apps:
        app.backlog()
    meet_at_gate(database.url, *(lambda n=n: apps[n].set_quota(42, Quota(max_concurrent=n)) for n in range(2)))
    (held,) = database.app.quotas().values()
    assert held.max_concurrent in range(2)
