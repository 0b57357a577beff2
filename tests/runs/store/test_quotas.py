"""Quotas: what is limited, whose use counts, when a warning comes, what becomes of reservations and of bad input."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
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
from semel.runs.types import MAX_COST
from support.quotas import KINDS, Ground, Grounds

HOUR, DAY = 3600, 86400
MOMENT = 0.000001


@pytest.fixture(scope="module")
def grounds(request: pytest.FixtureRequest) -> Iterator[Grounds]:
    with ExitStack() as stack:
        yield Grounds(request, stack)


@pytest.fixture(params=KINDS)
def ground(request: pytest.FixtureRequest, grounds: Grounds) -> Iterator[Ground]:
    """An empty SQLite file, then an empty PostgreSQL database."""
    with grounds.empty(request.param) as ground:
        yield ground


def refused(ground: Ground, user: str | int = 42, **options: Any) -> str:
    """What a submission that must not pass is told."""
    before = ground.count("semel_runs")
    with pytest.raises(QuotaExceeded) as told:
        ground.submit(user, **options)
    assert ground.count("semel_runs") == before
    return str(told.value)


# -- limits --------------------------------------------------------------------------------------------------------


def test_max_concurrent_counts_pending_and_running_until_they_are_over(ground: Ground) -> None:
    ground.app.set_quota(42, Quota(max_concurrent=2))
    first, second = ground.submit(), ground.submit()
    assert refused(ground) == "Quota exceeded: Maximum 2 concurrent jobs allowed"
    (leased,) = ground.lease()
    assert leased.id == first.id
    refused(ground)
    assert ground.end(leased)
    ground.submit()
    refused(ground)
    ground.app.cancel(second.id)
    ground.submit()
    refused(ground)


@pytest.mark.parametrize(("limit", "seconds", "name"), [("per_hour", HOUR, "hour"), ("per_day", DAY, "day")])
def test_jobs_per_hour_and_day_are_those_of_the_last_hour_and_day(
    ground: Ground, limit: str, seconds: int, name: str
) -> None:
    ground.app.set_quota(42, Quota(**{limit: 3}))  # type: ignore[arg-type]
    for _ in range(3):
        ground.finish(ground.submit())
        ground.clock.advance(seconds / 4)
    assert refused(ground) == f"Quota exceeded: Maximum 3 jobs per {name} allowed"
    ground.clock.advance(seconds / 4 - MOMENT)
    refused(ground)
    ground.clock.advance(MOMENT)
    ground.submit()  # the first one is as old as that by now
    refused(ground)
    used = ground.app.usage(42)
    assert (used.last_hour, used.last_day) == ((3, 4) if limit == "per_hour" else (1, 3))


def at(ground: Ground, text: str) -> None:
    """Set the clock."""
    ground.clock.us = round(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() * 1e6)


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
    ground: Ground, period: str, first: str, last: str, next_: str
) -> None:
    """From the first microsecond to the last; a week begins on Monday, also across a year's end."""
    ground.app.set_quota(42, Quota(**{f"cost_{period}": 1.0}))  # type: ignore[arg-type]
    at(ground, first)
    ground.finish(ground.submit(cost=0.9))
    at(ground, last)
    said = f"Cost limit exceeded: $0.90 spent of $1.00 {period} limit. This job would cost $0.20."
    assert refused(ground, cost=0.2) == said
    assert ground.app.usage(42).spent[period] == 0.9
    at(ground, next_)
    assert ground.app.usage(42).spent[period] == 0
    ground.submit(cost=1)


def test_the_first_cost_limit_that_is_reached_is_named(ground: Ground) -> None:
    ground.app.set_quota(42, Quota(cost_daily=5, cost_monthly=8))
    ground.submit(cost=5)
    assert "daily" in refused(ground, cost=1)
    ground.clock.advance(DAY)  # the first of March: a new month, too
    ground.submit(cost=5)
    ground.clock.advance(DAY)
    said = "Cost limit exceeded: $5.00 spent of $8.00 monthly limit. This job would cost $4.00."
    assert refused(ground, cost=4) == said
    assert refused(ground, cost=3.0005).endswith(" This job would cost $3.0005.")
    ground.submit(cost=3)


def test_cents_add_up_exactly(ground: Ground) -> None:
    ground.app.set_quota(42, Quota(cost_daily=1))
    for _ in range(10):
        ground.submit(cost=0.1)
    assert ground.app.usage(42).spent["daily"] == 1.0
    refused(ground, cost=0.1)


def test_a_model_has_a_cost_and_an_attempt_may_say_what_it_really_was(ground: Ground) -> None:
    ground.app.model("costly", isolation="thread", cost=2.5)(lambda ctx: None)
    ground.app.set_quota(42, Quota(cost_daily=5))
    ground.app.submit("costly", user=42, dedupe=False)
    ground.app.submit("costly", user=42, dedupe=False)
    with pytest.raises(CostLimitExceeded):
        ground.app.submit("costly", user=42, dedupe=False)
    cheap = ground.submit(cost=0.0, user=43)
    (leased,) = ground.lease()
    assert leased.id == cheap.id
    assert ground.end(leased, cost=1.25)
    assert ground.app.usage(43).spent["daily"] == 1.25


def test_a_run_that_never_started_costs_nothing_once_it_is_cancelled(ground: Ground) -> None:
    ground.app.set_quota(42, Quota(cost_daily=5))
    waiting = ground.submit(cost=5)
    refused(ground, cost=5)
    ground.app.cancel(waiting.id)
    assert ground.app.usage(42).spent["daily"] == 0
    ground.submit(cost=5)
    (leased,) = ground.lease()
    ground.app.cancel(leased.id)
    assert ground.end(leased, "cancelled")
    assert ground.app.usage(42).spent["daily"] == 5, "this one had begun"


def test_a_retry_costs_what_the_run_was_to_cost(ground: Ground) -> None:
    ground.app.set_quota(42, Quota(cost_daily=8))
    failed = ground.submit(cost=5)
    (leased,) = ground.lease()
    assert ground.end(leased, "fatal", reason="no data")
    with pytest.raises(CostLimitExceeded):
        ground.app.retry(failed.id)
    ground.app.set_quota(42, Quota(cost_daily=10))
    assert ground.app.retry(failed.id).cost == 5


def test_no_sum_of_costs_overflows_whatever_older_runs_have(ground: Ground) -> None:
    """A release that took 3e8 for a cost left rows whose sum needs more than 64 bits."""
    ground.app.set_quota(42, Quota(cost_yearly=100, action="warn"))
    ground.app.set_quota(43, Quota(cost_yearly=100))
    for _ in range(3):
        ground.submit(42)
    ground.write("UPDATE semel_runs SET cost = 9000000000000000000")
    assert ground.app.usage(42).spent["yearly"] == pytest.approx(2.7e13)
    assert ground.submit(42, cost=1).cost_limit_warning is not None
    assert ground.submit(43, cost=1).cost == 1, "and nobody else notices"
    assert ground.app.usage(43).spent["yearly"] == 1


def test_what_a_statement_does_wrong_is_no_unavailable_database(ground: Ground) -> None:
    """It is not tried again ten times, and nobody is told to come back later."""
    overflow = "SELECT abs(-9223372036854775807 - 1)" if ground.kind == "sqlite" else "SELECT 9223372036854775807 + 1"
    ledger = ground.app._engine.store
    with pytest.raises(SemelError, match="the database says") as told:
        run_sync(ledger.read(lambda conn: conn.execute(text(overflow)).all()))
    assert not isinstance(told.value, StoreUnavailable)


def test_a_cost_without_sense_is_refused_by_name(grounds: Grounds) -> None:
    with grounds.empty("sqlite") as ground:
        ground.app.usage(42)  # by which the tables are made
        for cost in (MAX_COST + 0.01, 3e8, 1e300, float("nan"), float("inf"), -1, True, "7"):
            refuse_a_cost(ground, cost)
        assert ground.count("semel_runs") == 0
        assert ground.submit(cost=MAX_COST).cost == MAX_COST


def refuse_a_cost(ground: Ground, cost: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"cost must be a number from 0 to 1,000,000"):
        ground.submit(cost=cost)
    with pytest.raises(InvalidRequest, match=r"cost must be a number from 0 to 1,000,000"):
        ground.app.submit_many([{"model": "train", "cost": cost}])
    with pytest.raises(InvalidRequest, match=r"cost must be a number from 0 to 1,000,000"):
        ground.app.model("other", cost=cost)(lambda ctx: None)


def refuse_in_the_database(ground: Ground) -> None:
    """From now on the database itself refuses runs of one queue, as it does what it cannot keep."""
    if ground.kind == "postgres":
        ground.write("ALTER TABLE semel_runs ADD CHECK (queue <> 'cursed')")
    else:
        ground.write(
            "CREATE TRIGGER cursed BEFORE INSERT ON semel_runs WHEN NEW.queue = 'cursed' "
            "BEGIN SELECT RAISE(ABORT, 'cursed'); END"
        )


def test_what_the_database_refuses_of_one_submitter_fails_nobody_beside_them(ground: Ground) -> None:
    ground.app.usage(42)  # by which the tables are made
    refuse_in_the_database(ground)
    queues = ["default", "cursed", "default", "default", "cursed", "default"]

    async def submit_together() -> list[Any]:
        app = ground.open_app().aio
        calls = (app.submit("train", {"number": place}, queue=queue) for place, queue in enumerate(queues))
        answers = await asyncio.gather(*calls, return_exceptions=True)
        await app.close()
        return answers

    for answers in (asyncio.run(submit_together()), in_threads_of(ground, queues), in_bulk(ground, queues)):
        assert [isinstance(answer, Run) for answer in answers] == [queue == "default" for queue in queues]
        assert all("the database says" in str(answer) for answer in answers if isinstance(answer, Exception))
    assert ground.count("semel_runs") == 3 * 4


def in_threads_of(ground: Ground, queues: list[str]) -> list[Any]:
    def submit(queue: str) -> Any:
        try:
            return ground.submit(queue=queue)
        except SemelError as error:
            return error

    return in_threads(len(queues), lambda place: submit(queues[place]))


def in_bulk(ground: Ground, queues: list[str]) -> list[Any]:
    wanted = [{"model": "train", "queue": queue, "dedupe": False} for queue in queues]
    return ground.app.submit_many(wanted)


def test_max_concurrent_of_0_lets_nothing_in(ground: Ground) -> None:
    ground.app.set_quota(42, Quota(max_concurrent=0))
    assert refused(ground) == (
        "Quota exceeded: Maximum 0 concurrent jobs allowed for user '42'; ask an admin to raise it (semel quota set)"
    )
    assert ground.jobs.reserve_job_slot(42, 0) is None
    ground.submit(43)
    ground.app.set_quota(42, Quota(max_concurrent=0, action="warn"))
    assert ground.submit().quota_warnings == ["1 of 0 concurrent jobs in use"]


def test_a_quota_lowered_below_use_lets_what_runs_go_on_and_nothing_more_in(ground: Ground) -> None:
    ground.app.set_quota(42, Quota(max_concurrent=5))
    for _ in range(5):
        ground.submit()
    leased = ground.lease(5)
    ground.app.set_quota(42, Quota(max_concurrent=2))
    for each in leased[:4]:
        assert refused(ground) == "Quota exceeded: Maximum 2 concurrent jobs allowed"
        assert ground.end(each)
    ground.submit()
    refused(ground)
    assert ground.end(leased[4])
    ground.submit()


# -- warnings ------------------------------------------------------------------------------------------------------


def test_warnings_come_from_80_percent_on(ground: Ground) -> None:
    ground.app.set_quota(42, Quota(max_concurrent=5, per_hour=10, per_day=100))
    told = [ground.submit().quota_warnings for _ in range(5)]
    assert told == [[], [], [], ["4 of 5 concurrent jobs in use"], ["5 of 5 concurrent jobs in use"]]
    ground.finish()
    told = [ground.submit().quota_warnings for _ in range(4)]
    assert told[:2] == [[], []]
    assert told[2] == ["8 of 10 jobs per hour in use"]
    assert told[3] == ["4 of 5 concurrent jobs in use", "9 of 10 jobs per hour in use"]


def test_warnings_come_from_where_the_quota_says(ground: Ground) -> None:
    ground.app.set_quota(42, Quota(max_concurrent=4, warn_at=0.5))
    assert [len(ground.submit().quota_warnings) for _ in range(4)] == [0, 1, 1, 1]
    ground.app.set_quota(43, Quota(max_concurrent=4, warn_at=1))
    assert [len(ground.submit(43).quota_warnings) for _ in range(4)] == [0, 0, 0, 1]


def test_the_action_warn_lets_everything_through_and_says_so(ground: Ground) -> None:
    limits = Quota(max_concurrent=1, per_hour=1, per_day=1, cost_daily=1, action="warn")
    ground.app.set_quota(42, limits)
    ground.submit(cost=1)
    over = ground.submit(cost=1)
    assert over.quota_warnings == [
        "2 of 1 concurrent jobs in use",
        "2 of 1 jobs per hour in use",
        "2 of 1 jobs per day in use",
    ]
    assert over.cost_limit_warning == "$2.00 spent of $1.00 daily limit."
    assert ground.app.quotas() == {"42": limits}


# -- whose quota ---------------------------------------------------------------------------------------------------


def test_the_default_holds_for_everybody_without_a_quota_of_their_own(ground: Ground) -> None:
    ground.app.set_quota("*", Quota(max_concurrent=1))
    ground.app.set_quota("ann", Quota(per_hour=3))
    for user in ("bob", 42):
        ground.submit(user)
        assert "Maximum 1 concurrent" in refused(ground, user)
    for _ in range(3):
        ground.submit("ann")  # her own replaces the default as a whole
    assert "Maximum 3 jobs per hour" in refused(ground, "ann")
    assert ground.app.quotas() == {"*": Quota(max_concurrent=1), "ann": Quota(per_hour=3)}
    ground.app.set_quota("ann", None)
    assert "Maximum 1 concurrent" in refused(ground, "ann")
    ground.app.set_quota("*", None)
    ground.submit("ann")
    assert ground.app.quotas() == {}


def test_runs_of_nobody_in_particular_meet_no_quota(ground: Ground) -> None:
    ground.app.set_quota("*", Quota(max_concurrent=0))
    assert [ground.submit("").status for _ in range(3)] == ["PENDING"] * 3
    with pytest.raises(InvalidRequest, match="user is empty"):
        ground.app.set_quota("", Quota(max_concurrent=1))


def test_users_and_tenants_are_apart(ground: Ground) -> None:
    ground.app.set_quota("*", Quota(max_concurrent=1))
    ground.app.set_quota("*", Quota(max_concurrent=2), tenant="acme")
    ground.submit(42)
    ground.submit(43)
    refused(ground, 42)
    assert [ground.submit(42, tenant="acme").tenant for _ in range(2)] == ["acme"] * 2
    refused(ground, 42, tenant="acme")
    for _ in range(3):
        ground.submit(42, tenant="other")  # has no quotas
    assert [ground.app.usage(42, tenant=tenant).concurrent for tenant in ("", "acme", "other")] == [1, 2, 3]
    acme = ground.open_jobs(tenant="acme")
    assert (acme.reserve_job_slot(42, 2), ground.jobs.reserve_job_slot(42, 1)) == (None, None)
    assert acme.reserve_job_slot(43, 1) is not None
    assert ground.app.quotas(tenant="acme") == {"*": Quota(max_concurrent=2)}


def test_users_whose_names_look_alike_are_apart(ground: Ground) -> None:
    """In the count, and in the view that shows it."""
    users = ["7", "007", "+7", "7.0", "Ann", "ann", "99999999999999999999"]
    for user in users:
        ground.reserve(user, limit=1)
    assert [ground.jobs.reserve_job_slot(user, 1) for user in users] == [None] * len(users)
    assert ground.jobs.reserve_job_slot(7, 1) is None, "a number is its digits"
    shown = ground.rows("SELECT user_id, count(*) FROM job_reservations GROUP BY user_id")
    assert {str(user): count for user, count in shown} == dict.fromkeys(users, 1)


def test_keys_of_users_and_tenants_are_apart(ground: Ground) -> None:
    acme = ground.open_jobs(tenant="acme")
    assert ground.jobs.store_idempotency_key("nightly", "job-1", 42) == "job-1"
    assert ground.jobs.store_idempotency_key("nightly", "job-2", 43) == "job-2"
    assert acme.store_idempotency_key("nightly", "job-3", 42) == "job-3"
    assert ground.jobs.store_idempotency_key("nightly", "job-4", 42) == "job-1"
    assert [ground.jobs.check_idempotency_key("nightly", user) for user in (42, 43, 44)] == ["job-1", "job-2", None]
    assert (acme.check_idempotency_key("nightly"), ground.jobs.check_idempotency_key("nightly")) == ("job-3", "job-1")
    runs = {
        ground.submit(user, number=1, idempotency_key="mine", tenant=t).id for user in (42, 43) for t in ("", "acme")
    }
    assert len(runs) == 4


def test_a_key_that_names_a_job_of_another_system_is_no_run(ground: Ground) -> None:
    ground.jobs.store_idempotency_key("nightly", "job-1", 42)
    with pytest.raises(KeyReused, match="nightly"):
        ground.submit(idempotency_key="nightly")
    assert ground.count("semel_runs") == 0


# -- reservations and runs -----------------------------------------------------------------------------------------


def test_a_reservation_bound_to_a_run_is_counted_once(ground: Ground) -> None:
    ground.app.set_quota(42, Quota(max_concurrent=1))
    reservation = ground.reserve(limit=1)
    run = ground.submit(reservation=reservation)
    used = ground.app.usage(42)
    assert (used.concurrent, used.reserved) == (1, 0)
    ground.jobs.consume_reservation(reservation, job_id=run.id)  # as the document's flow does afterwards
    ground.jobs.consume_reservation(reservation)
    assert not ground.jobs.release_reservation(reservation)
    assert ground.concurrent() == 1
    refused(ground)
    ground.clock.advance(300 + MOMENT)
    assert ground.concurrent() == 1
    ground.finish(run)
    assert ground.concurrent() == 0
    assert ground.jobs.reserve_job_slot(42, 1) is not None


def test_a_reservation_serves_one_run(ground: Ground) -> None:
    """Whether it was bound by a submission, or consumed by hand for a job that semel does not know."""
    ground.app.set_quota(42, Quota(max_concurrent=2))
    reservation = ground.reserve(limit=2)
    ground.submit(reservation=reservation)
    with pytest.raises(ReservationLost):
        ground.submit(reservation=reservation)
    by_hand = ground.reserve(limit=2)
    ground.jobs.consume_reservation(by_hand)
    with pytest.raises(ReservationLost):
        ground.submit(reservation=by_hand)
    ground.submit()
    assert ground.concurrent() == 2
    refused(ground)
    shared = {"model": "train", "user": 43, "reservation": ground.reserve(43)}
    first, second = ground.app.submit_many([{**shared, "parameters": {"number": number}} for number in (1, 2)])
    assert isinstance(first, Run)
    assert isinstance(second, ReservationLost)


def test_a_reservation_names_at_most_one_job(ground: Ground) -> None:
    reservation = ground.reserve()
    ground.jobs.consume_reservation(reservation, job_id="job-1")
    ground.jobs.consume_reservation(reservation, job_id="job-1")
    assert ground.jobs.consume_reservation(reservation, job_id="job-2") is False


@pytest.mark.parametrize("how", ["expired", "released", "another user's", "another tenant's", "never made"])
def test_a_submission_with_a_lost_reservation_is_refused(ground: Ground, how: str) -> None:
    reservation = ground.reserve(43 if how == "another user's" else 42)
    match how:
        case "expired":
            ground.clock.advance(300 + MOMENT)
        case "released":
            ground.jobs.release_reservation(reservation)
        case "another tenant's":
            assert ground.jobs.release_reservation(reservation)
            reservation = str(ground.open_jobs(tenant="acme").reserve_job_slot(42, 1))
        case "never made":
            reservation = "3fa85f64-5717-4562-b3fc-2c963f66afa6"
    with pytest.raises(ReservationLost):
        ground.submit(reservation=reservation, idempotency_key="k")
    assert ground.count("semel_runs") == ground.count("semel_run_keys") == 0
    ground.submit(idempotency_key="k")


def test_a_refused_submission_leaves_its_reservation_to_be_released(ground: Ground) -> None:
    ground.app.set_quota(42, Quota(max_concurrent=1, cost_daily=5))
    reservation = ground.reserve()
    assert "Cost limit" in refused(ground, reservation=reservation, cost=6)
    assert ground.app.usage(42).reserved == 1
    ground.submit(reservation=reservation, cost=5)
    ground.app.set_quota(43, Quota(per_day=0))
    other = ground.reserve(43)
    refused(ground, 43, reservation=other)
    assert ground.jobs.release_reservation(other)
    assert ground.concurrent(43) == 0


def test_a_replay_costs_nothing_and_gives_its_reservation_back(ground: Ground) -> None:
    ground.app.set_quota(42, Quota(max_concurrent=2, per_hour=1, per_day=1, cost_daily=5))
    first = ground.submit(number=1, idempotency_key="k", cost=5)
    spent = ground.app.usage(42)
    reservation = ground.reserve(limit=2)
    again = ground.submit(number=1, idempotency_key="k", cost=5, reservation=reservation)
    assert (again.id, again.replayed) == (first.id, True)
    assert ground.app.usage(42) == spent
    assert not ground.jobs.release_reservation(reservation), "it is back already"
    ground.finish(first)
    assert ground.submit(number=1, idempotency_key="k", cost=5).replayed
    refused(ground)


def test_a_replay_by_payload_gives_its_reservation_back(ground: Ground) -> None:
    first = ground.submit(number=1)
    assert ground.submit(number=1, reservation=ground.reserve()).id == first.id
    assert ground.app.usage(42).reserved == 0


def test_a_replay_within_one_batch_gives_its_reservation_back(ground: Ground) -> None:
    given = [{"reservation": ground.reserve(limit=2)} for _ in range(2)]
    shared = {"model": "train", "user": 42, "idempotency_key": "k"}
    first, second = ground.app.submit_many([{**shared, **each} for each in given])
    assert isinstance(first, Run)
    assert isinstance(second, Run)
    assert (second.id, second.replayed) == (first.id, True)
    used = ground.app.usage(42)
    assert (used.concurrent, used.reserved) == (1, 0)


def test_a_replay_after_a_refusal_in_one_batch_gives_its_reservation_back(ground: Ground) -> None:
    ground.submit(number=1, idempotency_key="k")
    reservation = ground.reserve()
    shared = {"model": "train", "user": 42, "idempotency_key": "k"}
    other, same = ground.app.submit_many(
        [{**shared, "parameters": {"number": 2}}, {**shared, "parameters": {"number": 1}, "reservation": reservation}]
    )
    assert isinstance(other, KeyReused)
    assert isinstance(same, Run)
    assert same.replayed
    used = ground.app.usage(42)
    assert (used.concurrent, used.reserved) == (1, 0)


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ({"parameters": {"number": 2}}, KeyReused),
        ({"reservation": "never made", "idempotency_key": "new"}, ReservationLost),
        ({"cost": 100, "idempotency_key": "new"}, CostLimitExceeded),
    ],
)
def test_each_of_a_batch_is_judged_by_itself(ground: Ground, bad: dict[str, Any], error: type[SemelError]) -> None:
    """What is wrong with the first use of a key is no fault of the second."""
    ground.app.set_quota(42, Quota(cost_daily=10))
    ground.submit(number=1, idempotency_key="k")
    good = {
        "model": "train",
        "parameters": {"number": 1},
        "user": 42,
        "idempotency_key": bad.get("idempotency_key", "k"),
    }
    first, second = ground.app.submit_many([{**good, **bad}, good])
    assert isinstance(first, error)
    assert isinstance(second, Run)
    assert second.replayed is (good["idempotency_key"] == "k")


def test_a_batch_fills_quotas_one_by_one_in_its_order(ground: Ground) -> None:
    ground.app.set_quota("*", Quota(max_concurrent=3))
    ground.app.set_quota("free", Quota())
    users = ["ann", "bob", "free"]
    answers = ground.app.submit_many(
        [{"model": "train", "parameters": {"number": n}, "user": user} for n in range(10) for user in users]
    )
    for place, user in enumerate(users):
        own = answers[place::3]
        told = [str(answer) if isinstance(answer, SemelError) else len(answer.quota_warnings) for answer in own]
        if user == "free":
            assert told == [0] * 10
        else:
            assert told == [0, 0, 1] + ["Quota exceeded: Maximum 3 concurrent jobs allowed"] * 7
    assert [ground.concurrent(user) for user in users] == [3, 3, 10]


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
def test_users_and_tenants_that_cannot_be_are_refused(ground: Ground, name: Any) -> None:
    app, jobs = ground.app, ground.jobs
    attempts: list[tuple[str, Callable[[], Any]]] = [
        ("user", lambda: app.set_quota(name, Quota())),
        ("user", lambda: app.usage(name)),
        ("user", lambda: app.submit("train", user=name)),
        ("tenant", lambda: app.set_quota(42, Quota(), tenant=name)),
        ("tenant", lambda: app.usage(42, tenant=name)),
        ("tenant", lambda: app.quotas(tenant=name)),
        ("tenant", lambda: app.submit("train", tenant=name)),
        ("tenant", lambda: ground.open_jobs(tenant=name)),
        ("user_id", lambda: jobs.reserve_job_slot(name, 5)),
    ]
    if name is not None:  # which is anybody's
        reservation = ground.reserve()
        attempts += [
            ("user_id", lambda: jobs.consume_reservation(reservation, user_id=name)),
            ("user_id", lambda: jobs.release_reservation(reservation, user_id=name)),
            ("user_id", lambda: jobs.store_idempotency_key("k", "job-1", name)),
            ("user_id", lambda: jobs.check_idempotency_key("k", name)),
        ]
    for what, attempt in attempts:
        with pytest.raises(InvalidRequest, match=f"^{what} "):
            attempt()
    assert ground.count("semel_runs") == ground.count("semel_quotas") == ground.count("semel_run_keys") == 0


@pytest.mark.parametrize("reservation", [5, b"x", "\0", "", "r" * 300, ["a"], "\ud800", False], ids=ascii)
def test_a_reservation_that_cannot_be_is_refused(ground: Ground, reservation: Any) -> None:
    with pytest.raises((InvalidRequest, ReservationLost), match=r"^reservation"):
        ground.submit(reservation=reservation)
    for verb in (ground.jobs.consume_reservation, ground.jobs.release_reservation):
        with suppress(InvalidRequest):
            assert verb(reservation) is False
    assert ground.count("semel_runs") == 0


@pytest.mark.parametrize("job_id", [4.2, b"x", "\0", "", ["a"], "\ud800", True], ids=ascii)
def test_a_job_id_that_cannot_be_is_refused(ground: Ground, job_id: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^job_id "):
        ground.jobs.store_idempotency_key("k", job_id)
    with pytest.raises(InvalidRequest, match=r"^job_id "):
        ground.jobs.consume_reservation(ground.reserve(), job_id=job_id)
    assert ground.app.usage(42).reserved == 1


def test_a_key_that_would_be_forgotten_at_once_is_refused(ground: Ground) -> None:
    with pytest.raises(InvalidRequest, match="ttl_hours is 0, so the key would expire at once"):
        ground.jobs.store_idempotency_key("k", "job-1", ttl_hours=0)
    with pytest.raises(InvalidRequest, match="key_ttl is 0"):
        ground.submit(idempotency_key="k", key_ttl=0)
    assert ground.count("semel_run_keys") == ground.count("semel_runs") == 0


def test_an_unknown_option_of_a_submission_is_named_with_the_nearest(ground: Ground) -> None:
    with pytest.raises(InvalidRequest, match="submission 0: a submission has no 'idempotence_key'; did you mean 'idem"):
        ground.app.submit_many([{"model": "train", "idempotence_key": "k"}])


@pytest.mark.parametrize("number", [-1, None, "5", float("nan"), float("inf"), True, 2**63], ids=str)
def test_numbers_that_cannot_be_are_refused(ground: Ground, number: Any) -> None:
    attempts: list[tuple[str, Callable[[], Any]]] = [
        ("max_concurrent", lambda: ground.jobs.reserve_job_slot(42, number)),
        ("ttl_seconds", lambda: ground.jobs.reserve_job_slot(42, 5, number)),
        ("ttl_hours", lambda: ground.jobs.store_idempotency_key("k", "job-1", 42, number)),
    ]
    if number is not None:  # which is the default
        attempts += [
            ("cost", lambda: ground.submit(cost=number)),
            ("key_ttl", lambda: ground.submit(idempotency_key="k", key_ttl=number)),
        ]
    for what, attempt in attempts:
        with pytest.raises(InvalidRequest, match=f"^{what} "):
            attempt()
    assert ground.count("semel_runs") == ground.count("semel_run_keys") == ground.count("semel_reservations") == 0


def test_more_that_cannot_be(ground: Ground) -> None:
    with pytest.raises(InvalidRequest, match=r"max_concurrent must be a whole number .*, not 2\.5"):
        ground.jobs.reserve_job_slot(42, 2.5)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="stands for every user"):
        ground.submit("*")
    with pytest.raises(InvalidRequest):
        ground.jobs.reserve_job_slot("*", 1)
    with pytest.raises(InvalidRequest, match=r"[Qq]uota"):
        ground.app.set_quota(42, {"max_concurrent": 1})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="ttl_hours"):
        ground.jobs.store_idempotency_key("k", "job-1", 42, ttl_hours=100 * 366 * 24)
    ground.jobs.store_idempotency_key("k", "job-1", 42, ttl_hours=10 * 365 * 24)
    assert ground.count("idempotency_keys", "expires_at > created_at") == 1


def test_a_bad_submission_spoils_none_of_those_beside_it(ground: Ground) -> None:
    """Threads whose submissions travel together: one has a reservation that no database can even look for."""

    def submit(number: int) -> Run | Exception:
        try:
            return ground.submit(number=number, reservation="\0" if number == 0 else None)
        except (InvalidRequest, ReservationLost) as error:
            return error

    for _ in range(3):
        bad, *good = in_threads(8, submit)
        assert isinstance(bad, InvalidRequest | ReservationLost)
        assert all(isinstance(each, Run) for each in good)


def test_numbers_and_texts_name_the_same_user(ground: Ground) -> None:
    ground.app.set_quota(42, Quota(max_concurrent=1))
    ground.submit("42")
    refused(ground, 42)
    assert (ground.concurrent(42), ground.concurrent("42")) == (1, 1)


def test_an_app_can_be_asked_awaited(ground: Ground) -> None:
    async def main(app: App) -> None:
        await app.aio.set_quota(42, Quota(max_concurrent=1))
        await app.aio.submit("train", user=42)
        with pytest.raises(QuotaExceeded):
            await app.aio.submit("train", {"number": 1}, user=42)
        assert (await app.aio.usage(42)).concurrent == 1
        assert await app.aio.quotas() == {"42": Quota(max_concurrent=1)}
        await app.aio.close()

    asyncio.run(main(ground.app))
