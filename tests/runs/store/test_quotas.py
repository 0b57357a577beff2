"""Quotas: what is limited, whose use counts, when a warning comes, what becomes of reservations and of bad input."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from contextvars import copy_context
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import text

from acceptance.together import in_threads
from semel import (
    App,
    CostLimitExceeded,
    InvalidRequest,
    KeyReused,
    Quota,
    QuotaExceeded,
    Run,
    SemelError,
    StoreUnavailable,
)
from semel._concurrency.sync import run_sync
from semel.errors import ReservationLost
from semel.runs.store import maintenance, transitions
from semel.runs.types import MAX_COST
from support.databases import LEASE, MISCHARGED, Databases, TestDatabase, ending, refused

HOUR, DAY = 3600, 86400
MOMENT = 0.000001


@pytest.fixture
def sqlite(databases: Databases) -> Iterator[TestDatabase]:
    """For what is no matter of the database."""
    with databases.empty("sqlite") as database:
        yield database


# -- limits --------------------------------------------------------------------------------------------------------


def test_max_concurrent_counts_pending_and_running_until_they_are_over(database: TestDatabase) -> None:
    database.app.set_quota(42, Quota(max_concurrent=2))
    first, second = database.submit(), database.submit()
    assert refused(database) == "Quota exceeded: Maximum 2 concurrent jobs allowed"
    (leased,) = database.lease()
    assert leased.id == first.id
    refused(database)
    assert database.end(leased)
    database.submit()
    refused(database)
    database.app.cancel(second.id)
    database.submit()
    refused(database)


@pytest.mark.parametrize(("limit", "seconds", "name"), [("per_hour", HOUR, "hour"), ("per_day", DAY, "day")])
def test_jobs_per_hour_and_day_are_those_of_the_last_hour_and_day(
    database: TestDatabase, limit: str, seconds: int, name: str
) -> None:
    database.app.set_quota(42, Quota(**{limit: 3}))  # type: ignore[arg-type]
    for _ in range(3):
        database.finish(database.submit())
        database.clock.advance(seconds / 4)
    assert refused(database) == f"Quota exceeded: Maximum 3 jobs per {name} allowed"
    database.clock.advance(seconds / 4 - MOMENT)
    refused(database)
    database.clock.advance(MOMENT)
    database.submit()  # the first one is as old as that by now
    refused(database)
    used = database.app.usage(42)
    assert (used.last_hour, used.last_day) == ((3, 4) if limit == "per_hour" else (1, 3))


def at(database: TestDatabase, text: str) -> None:
    """Set the clock."""
    database.clock.us = round(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() * 1e6)


@pytest.mark.parametrize(
    ("period", "first", "last", "next_"),
    [
        ("daily", "2024-02-29 00:00:00", "2024-02-29 23:59:59.999999", "2024-03-01 00:00:00"),
        ("weekly", "2024-02-26 00:00:00", "2024-03-03 23:59:59.999999", "2024-03-04 00:00:00"),
        ("weekly", "2024-12-30 00:00:00", "2025-01-05 23:59:59.999999", "2025-01-06 00:00:00"),
        ("monthly", "2024-02-01 00:00:00", "2024-02-29 23:59:59.999999", "2024-03-01 00:00:00"),
        ("yearly", "2024-01-01 00:00:00", "2024-12-31 23:59:59.999999", "2025-01-01 00:00:00"),
    ],
)
def test_a_cost_limit_holds_for_its_period_in_utc(
    database: TestDatabase, period: str, first: str, last: str, next_: str
) -> None:
    """From the first microsecond to the last; a week begins on Monday, also across a year's end."""
    database.app.set_quota(42, Quota(**{f"cost_{period}": 1.0}))  # type: ignore[arg-type]
    at(database, first)
    database.finish(database.submit(cost=0.9))
    at(database, last)
    said = f"Cost limit exceeded: $0.90 spent of $1.00 {period} limit. This job would cost $0.20."
    assert refused(database, cost=0.2) == said
    assert database.app.usage(42).spent[period] == 0.9
    at(database, next_)
    assert database.app.usage(42).spent[period] == 0
    database.submit(cost=1)


def test_the_first_cost_limit_that_is_reached_is_named(database: TestDatabase) -> None:
    database.app.set_quota(42, Quota(cost_daily=5, cost_monthly=8))
    database.submit(cost=5)
    assert "daily" in refused(database, cost=1)
    database.clock.advance(DAY)  # the first of March: a new month, too
    database.submit(cost=5)
    database.clock.advance(DAY)
    said = "Cost limit exceeded: $5.00 spent of $8.00 monthly limit. This job would cost $4.00."
    assert refused(database, cost=4) == said
    assert refused(database, cost=3.0005).endswith(" This job would cost $3.0005.")
    database.submit(cost=3)


def test_cents_add_up_exactly(database: TestDatabase) -> None:
    database.app.set_quota(42, Quota(cost_daily=1))
    for _ in range(10):
        database.submit(cost=0.1)
    assert database.app.usage(42).spent["daily"] == 1.0
    refused(database, cost=0.1)


def test_a_model_has_a_cost_and_an_attempt_may_say_what_it_really_was(database: TestDatabase) -> None:
    database.app.model("costly", isolation="thread", cost=2.5)(lambda ctx: None)
    database.app.set_quota(42, Quota(cost_daily=5))
    database.app.submit("costly", user=42, dedupe=False)
    database.app.submit("costly", user=42, dedupe=False)
    with pytest.raises(CostLimitExceeded):
        database.app.submit("costly", user=42, dedupe=False)
    cheap = database.submit(cost=0.0, user=43)
    (leased,) = database.lease()
    assert leased.id == cheap.id
    assert database.end(leased, cost=1.25)
    assert database.app.usage(43).spent["daily"] == 1.25


def test_a_run_that_never_started_costs_nothing_once_it_is_cancelled(database: TestDatabase) -> None:
    database.app.set_quota(42, Quota(cost_daily=5))
    waiting = database.submit(cost=5)
    refused(database, cost=5)
    database.app.cancel(waiting.id)
    assert database.app.usage(42).spent["daily"] == 0
    database.submit(cost=5)
    (leased,) = database.lease()
    database.app.cancel(leased.id)
    assert database.end(leased, "cancelled")
    assert database.app.usage(42).spent["daily"] == 5, "this one had begun"


def test_a_retry_costs_what_the_run_was_to_cost(database: TestDatabase) -> None:
    database.app.set_quota(42, Quota(cost_daily=8))
    failed = database.submit(cost=5)
    (leased,) = database.lease()
    assert database.end(leased, "fatal", reason="no data")
    with pytest.raises(CostLimitExceeded):
        database.app.retry(failed.id)
    database.app.set_quota(42, Quota(cost_daily=10))
    assert database.app.retry(failed.id).cost == 5


@pytest.mark.parametrize("asked", [0, 2.0])
def test_a_user_is_charged_once_for_each_run_however_it_ends(database: TestDatabase, asked: float) -> None:
    """With what its last attempt reported, or else with what it was to cost."""
    database.submit(user="", cost=asked)  # nobody is charged for it
    for kind, cost in (("succeeded", None), ("succeeded", 3.0), ("succeeded", 0.0), ("fatal", None), ("fatal", 3.5)):
        database.submit(cost=asked)
        for leased in database.lease(2):
            assert database.end(leased, kind, cost=cost)  # type: ignore[arg-type]
            assert not database.end(leased, "fatal", cost=77), "and not for an end that does not count"
        assert_charged(database)
    database.submit(cost=asked)
    assert database.finish_and_lease(*database.lease(), cost=4.0) == (True, [])
    assert_charged(database)
    database.app.cancel(database.submit(cost=asked).id)
    assert_charged(database)


@pytest.mark.parametrize("reported", [None, 1.25])
@pytest.mark.parametrize("asked", [0, 2.0])
def test_a_user_is_charged_for_a_run_with_many_attempts_once(
    database: TestDatabase, asked: float, reported: float | None
) -> None:
    def tried_once() -> str:
        database.submit(cost=asked)
        (leased,) = database.lease()
        database.end(leased, "retry", cost=reported)
        assert_charged(database)
        return leased.id

    tried_once()
    assert database.end(*database.lease())
    assert_charged(database)
    database.app.cancel(tried_once())
    assert_charged(database)
    database.app.cancel(tried_once())
    database.app.cancel(tried_once())
    tried_once()
    for _ in range(3):
        database.lease()
        database.clock.advance(LEASE + 1)
        assert database.lose_expired() == 1
        assert_charged(database)
    assert database.app.backlog().pending == 0
    database.do(maintenance.add_up)
    assert_charged(database)
    assert database.count("semel_charges") == 0


def assert_charged(database: TestDatabase) -> None:
    """All runs of the user were submitted today, and their costs are what the user has spent."""
    assert database.rows(MISCHARGED) == []
    costs = sum(run.cost for run in database.app.runs(user=42).runs)
    assert database.app.usage(42).spent == dict.fromkeys(("daily", "weekly", "monthly", "yearly"), costs)


def test_a_cost_counts_for_the_day_of_its_submission_also_after_the_run_is_removed(database: TestDatabase) -> None:
    database.submit(cost=1)
    database.submit(cost=2)
    database.clock.advance(86400)
    first, second = database.lease(2)
    assert database.end(first)
    database.do(maintenance.add_up)
    assert database.end(second, cost=8.0)
    spent = {"daily": 0.0, "weekly": 9, "monthly": 0, "yearly": 9}
    assert (database.app.usage(42).spent, database.rows(MISCHARGED)) == (spent, [])
    database.clock.advance(3 * 3600)
    assert database.app.purge(3600) == 2
    assert database.app.usage(42).spent == spent


def test_no_sum_of_costs_overflows_whatever_older_runs_have(database: TestDatabase) -> None:
    """A release that took 3e8 for a cost left rows whose sum needs more than 64 bits."""
    database.app.set_quota(42, Quota(cost_yearly=100, action="warn"))
    database.app.set_quota(43, Quota(cost_yearly=100))
    for _ in range(3):
        database.submit(42)
    database.write("UPDATE semel_active SET cost = 9000000000000000000, charged_us = since_us")
    assert database.app.usage(42).spent["yearly"] == pytest.approx(2.7e13)
    assert database.submit(42, cost=1).cost_limit_warning is not None
    assert database.submit(43, cost=1).cost == 1, "and nobody else notices"
    assert database.app.usage(43).spent["yearly"] == 1
    taken = database.lease(2)
    assert all(database.do(transitions.end, [ending(each) for each in taken]))
    assert database.end(*database.lease())
    database.do(maintenance.add_up)
    assert database.app.usage(42).spent["yearly"] == pytest.approx(9.223e12, rel=0.01), "as much as a row can hold"
    assert database.app.usage(43).spent["yearly"] == 1


def test_what_a_statement_does_wrong_is_no_unavailable_database(database: TestDatabase) -> None:
    """It is not tried again ten times, and nobody is told to come back later."""
    overflow = "SELECT abs(-9223372036854775807 - 1)" if database.kind == "sqlite" else "SELECT 9223372036854775807 + 1"
    ledger = database.app._engine.store
    with pytest.raises(SemelError, match="the database reported an error") as told:
        run_sync(ledger.read(lambda conn: conn.execute(text(overflow)).all()))
    assert not isinstance(told.value, StoreUnavailable)


def test_a_cost_without_sense_is_refused_by_name(databases: Databases) -> None:
    with databases.empty("sqlite") as database:
        database.app.usage(42)  # by which the tables are made
        for cost in (MAX_COST + 0.01, 3e8, 1e300, float("nan"), float("inf"), -1, True, "7"):
            refuse_a_cost(database, cost)
        assert database.count("semel_runs") == 0
        assert database.submit(cost=MAX_COST).cost == MAX_COST


def refuse_a_cost(database: TestDatabase, cost: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"cost must be a number from 0 to 1,000,000"):
        database.submit(cost=cost)
    with pytest.raises(InvalidRequest, match=r"cost must be a number from 0 to 1,000,000"):
        database.app.submit_many([{"model": "train", "cost": cost}])
    with pytest.raises(InvalidRequest, match=r"cost must be a number from 0 to 1,000,000"):
        database.app.model("other", cost=cost)(lambda ctx: None)


def refuse_in_the_database(database: TestDatabase) -> None:
    """From now on the database itself refuses runs of one queue, as it does what it cannot keep."""
    if database.kind == "postgres":
        database.write("ALTER TABLE semel_runs ADD CHECK (queue <> 'cursed')")
    else:
        database.write(
            "CREATE TRIGGER cursed BEFORE INSERT ON semel_runs WHEN NEW.queue = 'cursed' "
            "BEGIN SELECT RAISE(ABORT, 'cursed'); END"
        )


def test_what_the_database_refuses_of_one_submitter_fails_nobody_beside_them(database: TestDatabase) -> None:
    database.app.usage(42)  # by which the tables are made
    refuse_in_the_database(database)
    queues = ["default", "cursed", "default", "default", "cursed", "default"]

    async def submit_together() -> list[Any]:
        app = database.open_app().aio
        calls = (app.submit("train", {"number": place}, queue=queue) for place, queue in enumerate(queues))
        answers = await asyncio.gather(*calls, return_exceptions=True)
        await app.close()
        return answers

    for answers in (asyncio.run(submit_together()), in_threads_of(database, queues), in_bulk(database, queues)):
        assert [isinstance(answer, Run) for answer in answers] == [queue == "default" for queue in queues]
        assert all("reported an error" in str(answer) for answer in answers if isinstance(answer, Exception))
    assert database.count("semel_runs") == 3 * 4


def in_threads_of(database: TestDatabase, queues: list[str]) -> list[Any]:
    def submit(queue: str) -> Any:
        try:
            return database.submit(queue=queue)
        except SemelError as error:
            return error

    return in_threads(len(queues), lambda place: submit(queues[place]))


def in_bulk(database: TestDatabase, queues: list[str]) -> list[Any]:
    wanted = [{"model": "train", "queue": queue, "dedupe": False} for queue in queues]
    return database.app.submit_many(wanted)


def test_max_concurrent_of_0_lets_nothing_in(database: TestDatabase) -> None:
    database.app.set_quota(42, Quota(max_concurrent=0))
    assert refused(database) == (
        "Quota exceeded: Maximum 0 concurrent jobs allowed for user '42'; ask an admin to raise it (semel quota set)"
    )
    assert database.jobs.reserve_job_slot(42, 0) is None
    database.submit(43)
    database.app.set_quota(42, Quota(max_concurrent=0, action="warn"))
    assert database.submit().quota_warnings == ["1 of 0 concurrent jobs in use"]


def test_a_quota_lowered_below_use_lets_what_runs_go_on_and_nothing_more_in(database: TestDatabase) -> None:
    database.app.set_quota(42, Quota(max_concurrent=5))
    for _ in range(5):
        database.submit()
    leased = database.lease(5)
    database.app.set_quota(42, Quota(max_concurrent=2))
    for each in leased[:4]:
        assert refused(database) == "Quota exceeded: Maximum 2 concurrent jobs allowed"
        assert database.end(each)
    database.submit()
    refused(database)
    assert database.end(leased[4])
    database.submit()


# -- warnings ------------------------------------------------------------------------------------------------------


def test_warnings_come_from_80_percent_on(database: TestDatabase) -> None:
    database.app.set_quota(42, Quota(max_concurrent=5, per_hour=10, per_day=100))
    told = [database.submit().quota_warnings for _ in range(5)]
    assert told == [[], [], [], ["4 of 5 concurrent jobs in use"], ["5 of 5 concurrent jobs in use"]]
    database.finish()
    told = [database.submit().quota_warnings for _ in range(4)]
    assert told[:2] == [[], []]
    assert told[2] == ["8 of 10 jobs per hour in use"]
    assert told[3] == ["4 of 5 concurrent jobs in use", "9 of 10 jobs per hour in use"]


def test_a_cost_is_warned_of_from_80_percent_on_for_the_first_limit_that_is_near(sqlite: TestDatabase) -> None:
    sqlite.app.set_quota(42, Quota(cost_daily=10, cost_monthly=10, cost_yearly=100))
    assert sqlite.submit(cost=7.99).cost_limit_warning is None
    assert sqlite.submit(cost=0.01).cost_limit_warning == "$8.00 spent of $10.00 daily limit."
    sqlite.clock.advance(2 * DAY)  # the second of March: a new day and a new month
    assert sqlite.submit(cost=7).cost_limit_warning is None
    sqlite.clock.advance(DAY)
    assert sqlite.submit(cost=1).cost_limit_warning == "$8.00 spent of $10.00 monthly limit."


def test_warnings_come_from_where_the_quota_says(database: TestDatabase) -> None:
    database.app.set_quota(42, Quota(max_concurrent=4, warn_at=0.5))
    assert [len(database.submit().quota_warnings) for _ in range(4)] == [0, 1, 1, 1]
    database.app.set_quota(43, Quota(max_concurrent=4, warn_at=1))
    assert [len(database.submit(43).quota_warnings) for _ in range(4)] == [0, 0, 0, 1]


def test_the_action_warn_lets_everything_through_and_says_so(database: TestDatabase) -> None:
    limits = Quota(max_concurrent=1, per_hour=1, per_day=1, cost_daily=1, action="warn")
    database.app.set_quota(42, limits)
    database.submit(cost=1)
    over = database.submit(cost=1)
    assert over.quota_warnings == [
        "2 of 1 concurrent jobs in use",
        "2 of 1 jobs per hour in use",
        "2 of 1 jobs per day in use",
    ]
    assert over.cost_limit_warning == "$2.00 spent of $1.00 daily limit."
    assert database.app.quotas() == {"42": limits}


# -- whose quota ---------------------------------------------------------------------------------------------------


def test_the_default_holds_for_everybody_without_a_quota_of_their_own(database: TestDatabase) -> None:
    database.app.set_quota("*", Quota(max_concurrent=1))
    database.app.set_quota("ann", Quota(per_hour=3))
    for user in ("bob", 42):
        database.submit(user)
        assert "Maximum 1 concurrent" in refused(database, user)
    for _ in range(3):
        database.submit("ann")  # her own replaces the default as a whole
    assert "Maximum 3 jobs per hour" in refused(database, "ann")
    assert database.app.quotas() == {"*": Quota(max_concurrent=1), "ann": Quota(per_hour=3)}
    database.app.set_quota("ann", None)
    assert "Maximum 1 concurrent" in refused(database, "ann")
    database.app.set_quota("*", None)
    database.submit("ann")
    assert database.app.quotas() == {}


def test_runs_of_nobody_in_particular_meet_no_quota(database: TestDatabase) -> None:
    database.app.set_quota("*", Quota(max_concurrent=0))
    assert [database.submit("").status for _ in range(3)] == ["PENDING"] * 3
    with pytest.raises(InvalidRequest, match="user is empty"):
        database.app.set_quota("", Quota(max_concurrent=1))


def test_users_and_tenants_are_apart(database: TestDatabase) -> None:
    database.app.set_quota("*", Quota(max_concurrent=1))
    database.app.set_quota("*", Quota(max_concurrent=2), tenant="acme")
    database.submit(42)
    database.submit(43)
    refused(database, 42)
    assert [database.submit(42, tenant="acme").tenant for _ in range(2)] == ["acme"] * 2
    refused(database, 42, tenant="acme")
    for _ in range(3):
        database.submit(42, tenant="other")  # has no quotas
    assert [database.app.usage(42, tenant=tenant).concurrent for tenant in ("", "acme", "other")] == [1, 2, 3]
    acme = database.open_jobs(tenant="acme")
    assert (acme.reserve_job_slot(42, 2), database.jobs.reserve_job_slot(42, 1)) == (None, None)
    assert acme.reserve_job_slot(43, 1) is not None
    assert database.app.quotas(tenant="acme") == {"*": Quota(max_concurrent=2)}


def test_users_whose_names_look_alike_are_apart(database: TestDatabase) -> None:
    """In the count, and in the view that shows it."""
    users = ["7", "007", "+7", "7.0", "Ann", "ann", "99999999999999999999"]
    for user in users:
        database.reserve(user, limit=1)
    assert [database.jobs.reserve_job_slot(user, 1) for user in users] == [None] * len(users)
    assert database.jobs.reserve_job_slot(7, 1) is None, "a number is its digits"
    shown = database.rows("SELECT user_id, count(*) FROM job_reservations GROUP BY user_id")
    assert {str(user): count for user, count in shown} == dict.fromkeys(users, 1)


def test_keys_of_users_and_tenants_are_apart(database: TestDatabase) -> None:
    acme = database.open_jobs(tenant="acme")
    assert database.jobs.store_idempotency_key("nightly", "job-1", 42) == "job-1"
    assert database.jobs.store_idempotency_key("nightly", "job-2", 43) == "job-2"
    assert acme.store_idempotency_key("nightly", "job-3", 42) == "job-3"
    assert database.jobs.store_idempotency_key("nightly", "job-4", 42) == "job-1"
    assert [database.jobs.check_idempotency_key("nightly", user) for user in (42, 43, 44)] == ["job-1", "job-2", None]
    assert (acme.check_idempotency_key("nightly"), database.jobs.check_idempotency_key("nightly")) == ("job-3", "job-1")
    runs = {
        database.submit(user, number=1, idempotency_key="mine", tenant=t).id for user in (42, 43) for t in ("", "acme")
    }
    assert len(runs) == 4


def test_a_key_that_names_a_job_of_another_system_is_no_run(database: TestDatabase) -> None:
    database.jobs.store_idempotency_key("nightly", "job-1", 42)
    with pytest.raises(KeyReused, match="nightly"):
        database.submit(idempotency_key="nightly")
    assert database.count("semel_runs") == 0


def test_a_key_that_names_a_run_of_another_tenant_shows_nothing_of_it(database: TestDatabase) -> None:
    theirs = database.submit(tenant="acme")
    database.jobs.store_idempotency_key("nightly", theirs.id, 42)
    with pytest.raises(KeyReused, match="nightly"):
        database.submit(idempotency_key="nightly")
    (refusal,) = database.app.submit_many([{"model": "train", "user": 42, "idempotency_key": "nightly"}])
    assert isinstance(refusal, KeyReused)


# -- reservations and runs -----------------------------------------------------------------------------------------


def test_a_reservation_bound_to_a_run_is_counted_once(database: TestDatabase) -> None:
    database.app.set_quota(42, Quota(max_concurrent=1))
    reservation = database.reserve(limit=1)
    run = database.submit(reservation=reservation)
    used = database.app.usage(42)
    assert (used.concurrent, used.reserved) == (1, 0)
    database.jobs.consume_reservation(reservation, job_id=run.id)  # as the document's flow does afterwards
    database.jobs.consume_reservation(reservation)
    assert not database.jobs.release_reservation(reservation)
    assert database.concurrent() == 1
    refused(database)
    database.clock.advance(300 + MOMENT)
    assert database.concurrent() == 1
    database.finish(run)
    assert database.concurrent() == 0
    assert database.jobs.reserve_job_slot(42, 1) is not None


def test_a_reservation_serves_one_run(database: TestDatabase) -> None:
    """Whether it was bound by a submission, or consumed by hand for a job that semel does not know."""
    database.app.set_quota(42, Quota(max_concurrent=2))
    reservation = database.reserve(limit=2)
    database.submit(reservation=reservation)
    with pytest.raises(ReservationLost):
        database.submit(reservation=reservation)
    by_hand = database.reserve(limit=2)
    database.jobs.consume_reservation(by_hand)
    with pytest.raises(ReservationLost):
        database.submit(reservation=by_hand)
    database.submit()
    assert database.concurrent() == 2
    refused(database)
    shared = {"model": "train", "user": 43, "reservation": database.reserve(43)}
    first, second = database.app.submit_many([{**shared, "parameters": {"number": number}} for number in (1, 2)])
    assert isinstance(first, Run)
    assert isinstance(second, ReservationLost)


def test_a_lost_reservation_says_why_it_is_lost(sqlite: TestDatabase) -> None:
    used, unused = sqlite.reserve(ttl=10), sqlite.reserve(ttl=10)
    sqlite.submit(reservation=used)
    for _ in range(2):
        with pytest.raises(ReservationLost, match="was used for another job already"):
            sqlite.submit(reservation=used)
        sqlite.clock.advance(11)
    with pytest.raises(ReservationLost, match="has expired; reserve a slot again"):
        sqlite.submit(reservation=unused)
    with pytest.raises(ReservationLost, match="does not exist"):
        sqlite.submit(43, reservation=used)


def test_a_reservation_names_at_most_one_job(database: TestDatabase) -> None:
    reservation = database.reserve()
    database.jobs.consume_reservation(reservation, job_id="job-1")
    database.jobs.consume_reservation(reservation, job_id="job-1")
    assert database.jobs.consume_reservation(reservation, job_id="job-2") is False


@pytest.mark.parametrize("how", ["expired", "released", "another user's", "another tenant's", "never made"])
def test_a_submission_with_a_lost_reservation_is_refused(database: TestDatabase, how: str) -> None:
    reservation = database.reserve(43 if how == "another user's" else 42)
    match how:
        case "expired":
            database.clock.advance(300 + MOMENT)
        case "released":
            database.jobs.release_reservation(reservation)
        case "another tenant's":
            assert database.jobs.release_reservation(reservation)
            reservation = str(database.open_jobs(tenant="acme").reserve_job_slot(42, 1))
        case "never made":
            reservation = "3fa85f64-5717-4562-b3fc-2c963f66afa6"
    with pytest.raises(ReservationLost):
        database.submit(reservation=reservation, idempotency_key="k")
    assert database.count("semel_runs") == database.count("semel_keys") == 0
    database.submit(idempotency_key="k")


@pytest.mark.parametrize("by", ["the sweeper", "the next to reserve"])
def test_an_expired_reservation_is_kept_for_an_hour(sqlite: TestDatabase, by: str) -> None:
    """It may still be consumed late, or again."""
    sqlite.reserve(ttl=10)
    sqlite.clock.advance(10 + HOUR)
    if by == "the sweeper":
        assert sqlite.tidy() == 0
        sqlite.clock.advance(MOMENT)
        assert sqlite.tidy() == 1
        return
    for user in (42, 43):
        sqlite.reserve(user)
    sqlite.clock.advance(MOMENT)
    sqlite.reserve(43)
    assert sqlite.count("semel_reservations") == 4, "theirs alone are removed"
    sqlite.reserve()
    assert (sqlite.count("semel_reservations"), sqlite.tidy()) == (4, 0)


def test_a_reservation_that_is_later_than_a_wait_for_a_lock_explains_is_restarted(sqlite: TestDatabase) -> None:
    sqlite.reserve(ttl=100)
    sqlite.clock.advance(-10)
    sqlite.reserve(ttl=1)
    sqlite.clock.advance(105)
    assert sqlite.concurrent() == 1, "it lasts as long as it was made for"
    sqlite.clock.advance(-105 - MOMENT)
    sqlite.reserve(ttl=1)
    sqlite.clock.advance(100)
    assert sqlite.concurrent() == 1, "100 seconds from the restart"
    sqlite.clock.advance(MOMENT)
    assert sqlite.concurrent() == 0


def test_after_the_clock_was_put_back_only_later_reservations_are_restarted(sqlite: TestDatabase) -> None:
    sqlite.reserve(ttl=100)
    sqlite.clock.advance(50)
    sqlite.reserve(43, ttl=100)
    sqlite.clock.advance(-20)
    sqlite.do(maintenance.repair_times)
    sqlite.clock.advance(70)
    assert [sqlite.concurrent(user) for user in (42, 43)] == [1, 1]
    sqlite.clock.advance(MOMENT)
    assert [sqlite.concurrent(user) for user in (42, 43)] == [0, 1]
    sqlite.clock.advance(30)
    assert sqlite.concurrent(43) == 0


def test_a_reservation_in_whose_flow_a_run_is_submitted_is_bound_to_it_once(sqlite: TestDatabase) -> None:
    def flow() -> None:
        sqlite.app.set_quota(42, Quota(max_concurrent=1))
        reservation = sqlite.jobs.reserve_job_slot(42, 1)
        assert reservation is not None
        first = sqlite.submit()
        assert (sqlite.app.usage(42).concurrent, sqlite.app.usage(42).reserved) == (1, 0)
        refused(sqlite)
        sqlite.app.cancel(first.id)
        assert sqlite.concurrent() == 0, "the reservation does not count beside its run"
        assert sqlite.jobs.consume_reservation(reservation, job_id=first.id)

    copy_context().run(flow)


def test_a_refused_submission_leaves_its_reservation_to_be_released(database: TestDatabase) -> None:
    database.app.set_quota(42, Quota(max_concurrent=1, cost_daily=5))
    reservation = database.reserve()
    assert "Cost limit" in refused(database, reservation=reservation, cost=6)
    assert database.app.usage(42).reserved == 1
    database.submit(reservation=reservation, cost=5)
    database.app.set_quota(43, Quota(per_day=0))
    other = database.reserve(43)
    refused(database, 43, reservation=other)
    assert database.jobs.release_reservation(other)
    assert database.concurrent(43) == 0


def test_a_replay_costs_nothing_and_gives_its_reservation_back(database: TestDatabase) -> None:
    database.app.set_quota(42, Quota(max_concurrent=2, per_hour=1, per_day=1, cost_daily=5))
    first = database.submit(number=1, idempotency_key="k", cost=5)
    spent = database.app.usage(42)
    reservation = database.reserve(limit=2)
    again = database.submit(number=1, idempotency_key="k", cost=5, reservation=reservation)
    assert (again.id, again.replayed) == (first.id, True)
    assert database.app.usage(42) == spent
    assert not database.jobs.release_reservation(reservation), "it is back already"
    database.finish(first)
    assert database.submit(number=1, idempotency_key="k", cost=5).replayed
    refused(database)


def test_a_replay_by_payload_gives_its_reservation_back(database: TestDatabase) -> None:
    first = database.submit(number=1)
    assert database.submit(number=1, reservation=database.reserve()).id == first.id
    assert database.app.usage(42).reserved == 0


def test_a_replay_within_one_batch_gives_its_reservation_back(database: TestDatabase) -> None:
    given = [{"reservation": database.reserve(limit=2)} for _ in range(2)]
    shared = {"model": "train", "user": 42, "idempotency_key": "k"}
    first, second = database.app.submit_many([{**shared, **each} for each in given])
    assert isinstance(first, Run)
    assert isinstance(second, Run)
    assert (second.id, second.replayed) == (first.id, True)
    used = database.app.usage(42)
    assert (used.concurrent, used.reserved) == (1, 0)


def test_a_replay_after_a_refusal_in_one_batch_gives_its_reservation_back(database: TestDatabase) -> None:
    database.submit(number=1, idempotency_key="k")
    reservation = database.reserve()
    shared = {"model": "train", "user": 42, "idempotency_key": "k"}
    other, same = database.app.submit_many(
        [{**shared, "parameters": {"number": 2}}, {**shared, "parameters": {"number": 1}, "reservation": reservation}]
    )
    assert isinstance(other, KeyReused)
    assert isinstance(same, Run)
    assert same.replayed
    used = database.app.usage(42)
    assert (used.concurrent, used.reserved) == (1, 0)


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ({"parameters": {"number": 2}}, KeyReused),
        ({"reservation": "never made", "idempotency_key": "new"}, ReservationLost),
        ({"cost": 100, "idempotency_key": "new"}, CostLimitExceeded),
    ],
)
def test_each_of_a_batch_is_judged_by_itself(
    database: TestDatabase, bad: dict[str, Any], error: type[SemelError]
) -> None:
    """What is wrong with the first use of a key is no fault of the second."""
    database.app.set_quota(42, Quota(cost_daily=10))
    database.submit(number=1, idempotency_key="k")
    good = {
        "model": "train",
        "parameters": {"number": 1},
        "user": 42,
        "idempotency_key": bad.get("idempotency_key", "k"),
    }
    first, second = database.app.submit_many([{**good, **bad}, good])
    assert isinstance(first, error)
    assert isinstance(second, Run)
    assert second.replayed is (good["idempotency_key"] == "k")


def test_a_batch_fills_quotas_one_by_one_in_its_order(database: TestDatabase) -> None:
    database.app.set_quota("*", Quota(max_concurrent=3))
    database.app.set_quota("free", Quota())
    users = ["ann", "bob", "free"]
    answers = database.app.submit_many(
        [{"model": "train", "parameters": {"number": n}, "user": user} for n in range(10) for user in users]
    )
    for place, user in enumerate(users):
        own = answers[place::3]
        told = [str(answer) if isinstance(answer, SemelError) else len(answer.quota_warnings) for answer in own]
        if user == "free":
            assert told == [0] * 10
        else:
            assert told == [0, 0, 1] + ["Quota exceeded: Maximum 3 concurrent jobs allowed"] * 7
    assert [database.concurrent(user) for user in users] == [3, 3, 10]


# -- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        ({"max_concurrent": -1}, "max_concurrent must be .*, not -1"),
        ({"max_concurrent": 2**31}, "max_concurrent must be .*, not 2147483648"),
        ({"max_concurrent": 2.5}, "max_concurrent must be a whole number from 0 to 2,147,483,647, not 2.5"),
        ({"max_concurrent": True}, "max_concurrent must be a whole number from 0 to 2,147,483,647, not True"),
        ({"per_hour": "3"}, "per_hour must be a whole number from 0 to 2,147,483,647, not '3'"),
        ({"per_day": -5}, "per_day must be .*, not -5"),
        ({"cost_daily": "$5"}, "cost_daily must be a number"),
        ({"cost_weekly": -0.01}, "cost_weekly must be .*, not -0.01"),
        ({"cost_monthly": float("nan")}, "cost_monthly must be .*, not nan"),
        ({"cost_yearly": float("inf")}, "cost_yearly must be .*, not inf"),
        ({"cost_yearly": False}, "cost_yearly must be a number from 0 to 2,147,483,647, not False"),
        ({"action": "explode"}, "action must be one of 'block', 'warn', not 'explode'"),
        ({"action": None}, "action must be one of 'block', 'warn', not None"),
        ({"warn_at": 0}, "warn_at .* not 0"),
        ({"warn_at": 80}, "warn_at .* not 80"),
        ({"warn_at": float("nan")}, "warn_at .* not nan"),
        ({"warn_at": "80%"}, "warn_at .* not '80%'"),
        ({"warn_at": None}, "warn_at .* not None"),
        ({"warn_at": True}, "warn_at .* not True"),
        ({"cost_hourly": 1}, "a quota has no 'cost_hourly'; did you mean 'cost_"),
        ({"concurrent": 1}, "a quota has no 'concurrent'; did you mean 'max_concurrent'"),
        ({"colour": 1}, "a quota has no 'colour'; there are: action, cost_daily"),
    ],
    ids=str,
)
def test_a_quota_that_makes_no_sense_is_refused(limits: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        Quota(**limits)


NAMES = [None, 4.2, b"ann", "a" * 201, "a\0b", "a\x1fb", "\x85", "\ud800", ["ann"], True]
"""What is no name of a user or a tenant."""


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_users_and_tenants_that_cannot_be_are_refused(database: TestDatabase, name: Any) -> None:
    app, jobs = database.app, database.jobs
    attempts: list[tuple[str, Callable[[], Any]]] = [
        ("user", lambda: app.set_quota(name, Quota())),
        ("user", lambda: app.usage(name)),
        ("user", lambda: app.submit("train", user=name)),
        ("tenant", lambda: app.set_quota(42, Quota(), tenant=name)),
        ("tenant", lambda: app.usage(42, tenant=name)),
        ("tenant", lambda: app.quotas(tenant=name)),
        ("tenant", lambda: app.submit("train", tenant=name)),
        ("tenant", lambda: database.open_jobs(tenant=name)),
        ("user_id", lambda: jobs.reserve_job_slot(name, 5)),
    ]
    if name is not None:  # which is anybody's
        reservation = database.reserve()
        attempts += [
            ("user_id", lambda: jobs.consume_reservation(reservation, user_id=name)),
            ("user_id", lambda: jobs.release_reservation(reservation, user_id=name)),
            ("user_id", lambda: jobs.store_idempotency_key("k", "job-1", name)),
            ("user_id", lambda: jobs.check_idempotency_key("k", name)),
        ]
    for what, attempt in attempts:
        with pytest.raises(InvalidRequest, match=f"^{what} "):
            attempt()
    assert database.count("semel_runs") == database.count("semel_quotas") == database.count("semel_keys") == 0


@pytest.mark.parametrize("reservation", [5, b"x", "\0", "", "r" * 300, ["a"], "\ud800", False], ids=ascii)
def test_a_reservation_that_cannot_be_is_refused(database: TestDatabase, reservation: Any) -> None:
    with pytest.raises((InvalidRequest, ReservationLost), match=r"^reservation"):
        database.submit(reservation=reservation)
    for verb in (database.jobs.consume_reservation, database.jobs.release_reservation):
        with suppress(InvalidRequest):
            assert verb(reservation) is False
    assert database.count("semel_runs") == 0


@pytest.mark.parametrize("job_id", [4.2, b"x", "\0", "", ["a"], "\ud800", True], ids=ascii)
def test_a_job_id_that_cannot_be_is_refused(database: TestDatabase, job_id: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^job_id "):
        database.jobs.store_idempotency_key("k", job_id)
    with pytest.raises(InvalidRequest, match=r"^job_id "):
        database.jobs.consume_reservation(database.reserve(), job_id=job_id)
    assert database.app.usage(42).reserved == 1


def test_a_key_that_would_be_forgotten_at_once_is_refused(database: TestDatabase) -> None:
    with pytest.raises(InvalidRequest, match="ttl_hours is 0, so the key would expire at once"):
        database.jobs.store_idempotency_key("k", "job-1", ttl_hours=0)
    with pytest.raises(InvalidRequest, match="key_ttl is 0"):
        database.submit(idempotency_key="k", key_ttl=0)
    assert database.count("semel_keys") == database.count("semel_runs") == 0


def test_an_unknown_option_of_a_submission_is_named_with_the_nearest(database: TestDatabase) -> None:
    with pytest.raises(InvalidRequest, match="submission 0: a submission has no 'idempotence_key'; did you mean 'idem"):
        database.app.submit_many([{"model": "train", "idempotence_key": "k"}])


@pytest.mark.parametrize("number", [-1, None, "5", float("nan"), float("inf"), True, 2**63], ids=str)
def test_numbers_that_cannot_be_are_refused(database: TestDatabase, number: Any) -> None:
    attempts: list[tuple[str, Callable[[], Any]]] = [
        ("max_concurrent", lambda: database.jobs.reserve_job_slot(42, number)),
        ("ttl_seconds", lambda: database.jobs.reserve_job_slot(42, 5, number)),
        ("ttl_hours", lambda: database.jobs.store_idempotency_key("k", "job-1", 42, number)),
    ]
    if number is not None:  # which is the default
        attempts += [
            ("cost", lambda: database.submit(cost=number)),
            ("key_ttl", lambda: database.submit(idempotency_key="k", key_ttl=number)),
        ]
    for what, attempt in attempts:
        with pytest.raises(InvalidRequest, match=f"^{what} "):
            attempt()
    assert database.count("semel_runs") == database.count("semel_keys") == database.count("semel_reservations") == 0


def test_more_that_cannot_be(database: TestDatabase) -> None:
    with pytest.raises(InvalidRequest, match=r"max_concurrent must be a whole number .*, not 2\.5"):
        database.jobs.reserve_job_slot(42, 2.5)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="stands for every user"):
        database.submit("*")
    with pytest.raises(InvalidRequest):
        database.jobs.reserve_job_slot("*", 1)
    with pytest.raises(InvalidRequest, match=r"[Qq]uota"):
        database.app.set_quota(42, {"max_concurrent": 1})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="ttl_hours"):
        database.jobs.store_idempotency_key("k", "job-1", 42, ttl_hours=100 * 366 * 24)
    database.jobs.store_idempotency_key("k", "job-1", 42, ttl_hours=10 * 365 * 24)
    assert database.count("idempotency_keys", "expires_at > created_at") == 1


def test_a_bad_submission_spoils_none_of_those_beside_it(database: TestDatabase) -> None:
    """Threads whose submissions travel together: one has a reservation that no database can even look for."""

    def submit(number: int) -> Run | Exception:
        try:
            return database.submit(number=number, reservation="\0" if number == 0 else None)
        except (InvalidRequest, ReservationLost) as error:
            return error

    for _ in range(3):
        bad, *good = in_threads(8, submit)
        assert isinstance(bad, InvalidRequest | ReservationLost)
        assert all(isinstance(each, Run) for each in good)


def test_numbers_and_texts_name_the_same_user(database: TestDatabase) -> None:
    database.app.set_quota(42, Quota(max_concurrent=1))
    database.submit("42")
    refused(database, 42)
    assert (database.concurrent(42), database.concurrent("42")) == (1, 1)


def test_an_app_can_be_asked_awaited(database: TestDatabase) -> None:
    async def main(app: App) -> None:
        await app.aio.set_quota(42, Quota(max_concurrent=1))
        await app.aio.submit("train", user=42)
        with pytest.raises(QuotaExceeded):
            await app.aio.submit("train", {"number": 1}, user=42)
        assert (await app.aio.usage(42)).concurrent == 1
        assert await app.aio.quotas() == {"42": Quota(max_concurrent=1)}
        await app.aio.close()

    asyncio.run(main(database.app))
