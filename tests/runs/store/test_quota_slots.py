"""Slots come back exactly once, whatever dies, and no race takes one too many."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

import pytest

from acceptance.proxy import line_to
from acceptance.together import in_threads
from semel import (
    AsyncJobStore,
    Quota,
    QuotaExceeded,
    Run,
    StoreUnavailable,
)
from semel._concurrency.sync import run_sync
from semel.db.dialect import hot, transaction
from semel.errors import IllegalTransition, ReservationLost
from semel.runs.store import RunStore, quotas
from semel.runs.store.quotas import Reserve
from semel.runs.types import EndKind, new_id
from support.databases import LEASE, Databases, TestDatabase, refused
from support.quota_race import killed, last_words, race
from support.runs_harness import PATIENCE

HOUR, DAY = 3600, 86400
MOMENT = 0.000001


# -- B4: slots come back exactly once ------------------------------------------------------------------------------


def lost_for_good(database: TestDatabase) -> None:
    for _ in range(3):
        database.lease()
        database.clock.advance(LEASE + 1)
        assert database.lose_expired() == 1


def cancelled_while_running(database: TestDatabase) -> None:
    (leased,) = database.lease()
    database.app.cancel(leased.id)
    assert database.concurrent() == 1, "it gets time to clean up"
    assert database.end(leased, "cancelled")


def cancelled_and_lost(database: TestDatabase) -> None:
    (leased,) = database.lease()
    database.app.cancel(leased.id)
    database.clock.advance(LEASE + 1)
    assert database.lose_expired() == 1


def ended(kind: EndKind, times: int = 1) -> Callable[[TestDatabase], None]:
    def end(database: TestDatabase) -> None:
        for _ in range(times):
            (leased,) = database.lease()
            assert database.end(leased, kind, reason="out of memory")

    return end


def cancelled_while_pending(database: TestDatabase) -> None:
    (run,) = database.app.runs(status="PENDING").runs
    database.app.cancel(run.id)


ENDS = {
    "success": ended("succeeded"),
    "fatal": ended("fatal"),
    "attempts used up": ended("retry", times=3),
    "lost once too often": lost_for_good,
    "cancelled while pending": cancelled_while_pending,
    "cancelled while running": cancelled_while_running,
    "cancelled and lost": cancelled_and_lost,
}


def test_a_reservation_is_bound_to_a_run_without_a_key_where_there_is_no_quota(database: TestDatabase) -> None:
    reservation = database.reserve(limit=1)
    run = database.submit(reservation=reservation, dedupe=False)
    assert (database.concurrent(), database.app.usage(42).reserved) == (1, 0)
    with pytest.raises(ReservationLost, match="used for another job"):
        database.submit(reservation=reservation, dedupe=False)
    assert [each.id for each in database.app.runs().runs] == [run.id]


def test_a_reservation_that_its_flow_has_used_is_not_for_another_run(database: TestDatabase) -> None:
    reservation = database.jobs.reserve_job_slot(42, 1)
    assert reservation is not None
    bound = database.submit()
    with pytest.raises(ReservationLost, match="used for another job"):
        copy_context().run(database.submit, reservation=reservation)
    assert database.jobs.consume_reservation(reservation, job_id=bound.id)
    assert database.concurrent() == 1


def test_an_expired_reservation_is_not_consumed_for_a_job_that_is_over_if_another_has_its_slot(
    database: TestDatabase,
) -> None:
    late, over = database.reserve(limit=1, ttl=1), database.submit()
    database.finish(over)
    database.clock.advance(2)
    other = database.submit()
    assert database.jobs.consume_reservation(late, job_id=over.id) is False
    database.finish(other)
    assert database.jobs.consume_reservation(late, job_id=over.id) is True


@pytest.mark.parametrize("end", ENDS)
def test_b4_a_slot_comes_back_once_however_its_run_ends(database: TestDatabase, end: str) -> None:
    database.app.set_quota(42, Quota(max_concurrent=1))
    run = database.submit(reservation=database.reserve(limit=1))
    refused(database)
    ENDS[end](database)
    assert database.app.get(run.id).done
    assert (database.concurrent(), database.app.usage(42).reserved) == (0, 0)
    database.submit()
    for _ in range(2):
        refused(database)  # one slot came back, not two
    assert database.lose_expired() == 0
    database.tidy()
    assert database.concurrent() == 1


@pytest.mark.parametrize("kind", ["retry", "snooze", "lost", "returned"])
def test_b4_a_run_that_goes_on_keeps_its_one_slot(database: TestDatabase, kind: str) -> None:
    database.app.set_quota(42, Quota(max_concurrent=1))
    run = database.submit()
    (leased,) = database.lease()
    assert database.end(leased, "lost" if kind == "returned" else kind, returned=kind == "returned")  # type: ignore[arg-type]
    assert database.app.get(run.id).status == "PENDING"
    assert database.concurrent() == 1
    refused(database)
    database.finish(run)
    assert database.concurrent() == 0


def test_b4_a_zombie_frees_nothing(database: TestDatabase) -> None:
    """It lost its lease; what it says of its end no longer matters, nor when it says so twice."""
    database.app.set_quota(42, Quota(max_concurrent=1))
    database.submit()
    (zombie,) = database.lease()
    database.clock.advance(LEASE + 1)
    assert database.lose_expired() == 1
    refused(database)
    (heir,) = database.lease()
    for kind in ("succeeded", "fatal", "cancelled"):
        assert not database.end(zombie, kind)
    assert database.concurrent() == 1
    assert database.end(heir)
    database.submit()
    assert database.end(heir), "a reply was lost, and the answer is the same"
    assert not database.end(zombie)
    assert database.concurrent() == 1
    with pytest.raises(IllegalTransition):
        database.app.cancel(heir.id)
    refused(database)


def test_b4_a_retry_takes_a_slot_of_its_own(database: TestDatabase) -> None:
    database.app.set_quota(42, Quota(max_concurrent=1))
    failed = database.submit()
    ended("fatal")(database)
    database.submit()
    with pytest.raises(QuotaExceeded):
        database.app.retry(failed.id)
    database.finish()
    assert database.app.retry(failed.id).retry_of == failed.id
    assert database.concurrent() == 1


SUBMIT_AND_DIE = """
import os, signal
from support.databases import open_app
from semel.runs.store import submit as submitting

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

def then_die(work):
    return lambda *args, **kwargs: (work(*args, **kwargs), die())

if where.startswith("after "):
    setattr(submitting, where[6:], then_die(getattr(submitting, where[6:])))
elif where:
    setattr(submitting, where, die)
app = open_app(url, clock=lambda: now)
app.submit("train", {"number": 1}, user=42, idempotency_key="k", reservation=reservation)
die()
"""


@pytest.mark.parametrize("where", ["_admit", "_create", "after _take_keys", "after _write_runs", ""])
def test_b4_a_submitter_killed_anywhere_leaves_one_slot_taken_or_one_to_expire(
    database: TestDatabase, where: str
) -> None:
    """SIGKILL before the slot is bound, after it, after the key, after the run, after all was committed."""
    database.app.set_quota(42, Quota(max_concurrent=1))
    reservation = database.reserve(limit=1)
    killed(SUBMIT_AND_DIE, url=database.url, now=database.clock(), reservation=reservation, where=where)
    committed = where == ""
    used = database.app.usage(42)
    assert (used.concurrent, used.reserved) == ((1, 0) if committed else (1, 1))
    assert database.count("semel_runs") == database.count("idempotency_keys") == int(committed)
    retried = database.submit(number=1, idempotency_key="k", reservation=reservation)
    assert retried.replayed is committed
    refused(database)
    database.clock.advance(300 + MOMENT)
    database.finish(retried)
    assert database.concurrent() == 0


def test_b4_the_slot_of_a_killed_submitter_is_back_after_the_ttl(database: TestDatabase) -> None:
    database.app.set_quota(42, Quota(max_concurrent=1))
    given = {"reservation": database.reserve(limit=1), "where": "after _write_runs"}
    killed(SUBMIT_AND_DIE, url=database.url, now=database.clock(), **given)
    database.clock.advance(300)
    refused(database)
    database.clock.advance(MOMENT)
    assert database.concurrent() == 0
    database.submit()
    assert database.jobs.reserve_job_slot(42, 1) is None


SUBMIT_ALL = """
from itertools import count
from support.databases import open_app
from semel import JobStore
app, jobs = open_app(url), JobStore(url)
for number in count():
    reservation = jobs.reserve_job_slot(42, 1000)
    app.submit("train", {"number": number}, user=42, idempotency_key=f"k{number}", reservation=reservation)
    if number == 3:
        tell("underway")
"""


def test_b4_whatever_a_killed_process_left_is_counted_once(database: TestDatabase) -> None:
    """It is killed at full speed, wherever that is; its successor asks for all again."""
    app, jobs = database.open_app(clock=None), database.open_jobs(clock=None)
    assert last_words(SUBMIT_ALL, url=database.url) == "underway"
    there = database.count("semel_runs")
    runs = [
        app.submit("train", {"number": number}, user=42, idempotency_key=f"k{number}", reservation=reservation)
        for number in range(there + 5)
        if (reservation := jobs.reserve_job_slot(42, 1000))
    ]
    assert [run.replayed for run in runs] == [True] * there + [False] * 5
    used = app.usage(42)
    assert (used.last_hour, used.concurrent - used.reserved) == (len(runs), len(runs))
    assert used.reserved <= 1, "at most the one that was on its way"


# -- B4: lost replies ----------------------------------------------------------------------------------------------


def lose_next_reply(
    ledger: RunStore, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], None] = lambda: None
) -> list[str]:
    """The next write is done, and the caller hears that the database is gone; ``meanwhile`` happens before it asks."""
    write, lost = ledger._database.write, list[str]()

    async def deaf(work: Any, *args: Any, **kwargs: Any) -> Any:
        answer = await write(work, *args, **kwargs)
        if not lost:
            lost.append("reply")
            meanwhile()
            raise StoreUnavailable("the line went dead")
        return answer

    monkeypatch.setattr(ledger._database, "write", deaf)
    return lost


def test_b4_a_lost_reply_reserves_and_submits_once(database: TestDatabase, monkeypatch: pytest.MonkeyPatch) -> None:
    database.app.set_quota(42, Quota(max_concurrent=1, per_hour=2, cost_daily=5))
    database.concurrent(), database.jobs.check_idempotency_key("warm up")
    lost = lose_next_reply(database.jobs._engine._store, monkeypatch)
    reservation = database.reserve(limit=1)
    assert lost
    assert database.count("job_reservations") == 1
    lost = lose_next_reply(database.app._engine.store, monkeypatch)
    run = database.submit(reservation=reservation, cost=5)
    assert lost
    assert not run.replayed, "it is the caller's own"
    used = database.app.usage(42)
    assert (used.concurrent, used.reserved, used.last_hour, used.spent["daily"]) == (1, 0, 1, 5)
    lost = lose_next_reply(database.jobs._engine._store, monkeypatch)
    database.jobs.consume_reservation(reservation, job_id=run.id)
    (leased,) = database.lease()
    lost = lose_next_reply(database.app._engine.store, monkeypatch)
    assert database.end(leased)
    assert lost
    assert database.concurrent() == 0


@pytest.mark.parametrize("how", [{}, {"dedupe": False}, {"idempotency_key": "k"}], ids=str)
def test_b4_a_submission_sent_again_after_its_run_is_over_finds_it(
    database: TestDatabase, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]
) -> None:
    """The reply was lost, and a worker was faster than the second try."""
    database.app.set_quota(42, Quota(per_hour=1, cost_daily=1))
    lost = lose_next_reply(database.app._engine.store, monkeypatch, meanwhile=database.finish)
    run = database.submit(cost=1, **how)
    assert lost
    assert (run.status, run.replayed) == ("SUCCEEDED", False)
    used = database.app.usage(42)
    assert (used.concurrent, used.last_hour, used.spent["daily"]) == (0, 1, 1)


def lose_every_reply(ledger: RunStore, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every write is done, and the caller never hears of it."""
    write, lost = ledger._database.write, list[str]()

    async def deaf(work: Any, *args: Any, **kwargs: Any) -> Any:
        await write(work, *args, **kwargs)
        lost.append("reply")
        raise StoreUnavailable("the line went dead")

    monkeypatch.setattr(ledger._database, "write", deaf)
    return lost


@pytest.mark.parametrize("how", ["alone", "in bulk", "retried"])
def test_b4_with_all_replies_lost_an_unkeyed_submission_is_stored_once(database: TestDatabase, how: str) -> None:
    """Nobody knows whether it was stored, says the error; our own tries make one run of it."""
    first = database.submit(dedupe=False)
    database.app.cancel(first.id)
    app = database.open_app()
    app.usage(42)
    asks: dict[str, Callable[[], object]] = {
        "alone": lambda: app.submit("train", dedupe=False),
        "in bulk": lambda: app.submit_many([{"model": "train", "dedupe": False}] * 3),
        "retried": lambda: app.retry(first.id),
    }
    with pytest.MonkeyPatch.context() as patch:
        lost = lose_every_reply(app._engine.store, patch)
        with pytest.raises(StoreUnavailable):
            asks[how]()
    assert len(lost) > 1, "it was tried again"
    assert database.count("semel_runs") == 1 + (3 if how == "in bulk" else 1)


def test_b4_a_lost_reply_stores_a_bulk_of_unkeyed_submissions_once(
    database: TestDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [{"model": "train", "parameters": {"number": number}, "dedupe": False} for number in (1, 1, 2)]
    database.app.usage(42)
    lost = lose_next_reply(database.app._engine.store, monkeypatch)
    runs = [run for run in database.app.submit_many(wanted) if isinstance(run, Run)]
    assert lost
    assert [run.replayed for run in runs] == [False] * 3, "they are the caller's own"
    assert len({run.id for run in runs}) == database.count("semel_runs") == 3


def test_b4_a_line_cut_before_the_reply_reserves_and_submits_once(databases: Databases) -> None:
    with databases.empty("postgres") as database, line_to(database.url) as (line, url):
        app, jobs = database.open_app(url=url), database.open_jobs(url=url)
        app.set_quota(42, Quota(max_concurrent=1))
        assert jobs.check_idempotency_key("warm up") is None
        line.lose_reply_to(b"COMMIT")
        reservation = jobs.reserve_job_slot(42, 1)
        assert (line.cuts, database.app.usage(42).reserved) == (1, 1)
        line.lose_reply_to(b"COMMIT")
        run = app.submit("train", user=42, reservation=reservation)
        assert (line.cuts, run.replayed) == (2, False)
        used = database.app.usage(42)
        assert (used.concurrent, used.reserved, used.last_hour) == (1, 0, 1)


# -- races ---------------------------------------------------------------------------------------------------------


def test_200_reservations_from_8_processes_on_a_limit_of_5_are_5(database: TestDatabase) -> None:
    granted = race(database.url, [("reserve",)] * 8, tries=25, limit=5)
    assert len(granted) == 5
    assert {(reservation,) for _, reservation in granted} == set(
        database.rows("SELECT reservation_id FROM job_reservations")
    )


def test_200_submissions_from_8_processes_under_a_quota_of_5_are_5(database: TestDatabase) -> None:
    database.app.set_quota(42, Quota(max_concurrent=5))
    granted = race(database.url, [("submit",)] * 8, tries=25, limit=5)
    assert len(granted) == database.count("semel_runs") == 5


def test_200_of_both_from_8_processes_on_a_limit_of_5_are_5(database: TestDatabase) -> None:
    """Some reserve, some submit, some reserve and then submit."""
    database.app.set_quota(42, Quota(max_concurrent=5))
    ways = [("reserve",), ("submit",), ("reserve_and_submit",), ("submit", "reserve", "reserve_and_submit")] * 2
    granted = race(database.url, ways, tries=25, limit=5)
    assert len(granted) == 5
    live = database.count("job_reservations", "consumed = 0")
    assert live + database.count("semel_runs") == 5


def test_processes_that_reserve_and_then_submit_without_a_word_have_5_slots(database: TestDatabase) -> None:
    """A run takes the slot that its own caller reserved, which is then no second one: both together count once."""
    database.app.set_quota(42, Quota(max_concurrent=5))
    race(database.url, [("reserve", "submit"), ("submit", "reserve")] * 2, tries=25, limit=5, alone=False)
    without_a_job = database.count("semel_reservations", "NOT consumed AND job_id IS NULL")
    assert without_a_job + database.count("semel_runs") == database.app.usage(42).concurrent == 5


def test_at_4_of_5_one_of_two_processes_gets_the_last_slot(database: TestDatabase) -> None:
    """One reserves, one submits, for twenty users one after the other."""
    users = tuple(range(20))
    database.app.set_quota("*", Quota(max_concurrent=5))
    app = database.open_app(clock=None)
    app.submit_many([{"model": "train", "parameters": {"number": n}, "user": u} for u in users for n in range(-4, 0)])
    granted = race(database.url, [("reserve",), ("submit",)], tries=1, limit=5, users=users)
    assert Counter(user for user, _ in granted) == dict.fromkeys(users, 1)


def test_100_tasks_of_one_loop_share_5_slots(database: TestDatabase) -> None:
    async def main() -> tuple[int, int]:
        store = AsyncJobStore(database.url, clock=database.clock)
        reserved = await asyncio.gather(*(store.reserve_job_slot(41, 5) for _ in range(50)))
        submitted = await asyncio.gather(
            *(database.app.aio.submit("train", {"number": n}, user=42) for n in range(50)), return_exceptions=True
        )
        await store.close()
        await database.app.aio.close()
        assert {type(each) for each in submitted} == {Run, QuotaExceeded}
        return sum(each is not None for each in reserved), sum(isinstance(each, Run) for each in submitted)

    database.app.set_quota(42, Quota(max_concurrent=5))
    assert asyncio.run(main()) == (5, 5)


def test_20_threads_share_5_slots(database: TestDatabase) -> None:
    database.app.set_quota(42, Quota(max_concurrent=5))

    def take(number: int) -> bool:
        try:
            database.submit(number=number)
        except QuotaExceeded:
            return False
        return True

    assert sum(in_threads(20, take)) == 5


def test_a_reservation_is_consumed_or_released_but_not_both(database: TestDatabase) -> None:
    for _ in range(10):
        reservation = database.reserve()

        def decide(number: int, reservation: str = reservation) -> bool:
            verb = database.jobs.release_reservation if number else database.jobs.consume_reservation
            return verb(reservation)

        assert sum(in_threads(2, decide)) == 1
        assert database.concurrent() == 0


@pytest.mark.parametrize("how", ["consume", "submit"])
def test_a_reservation_that_ends_while_its_owner_waits_for_others_gives_no_slot(databases: Databases, how: str) -> None:
    """The owner asks in time, and has to wait; meanwhile the slot becomes another's."""
    with databases.empty("postgres") as database, ThreadPoolExecutor(1) as threads:
        app, jobs = database.open_app(clock=None), database.open_jobs(clock=None)
        ledger = app._engine.store
        mine = copy_context().run(jobs.reserve_job_slot, 42, 1, 2)
        assert mine is not None
        asked: list[Future[Any]] = []

        def take_the_slot(conn: Any) -> str | None:
            with transaction(conn):
                quotas.read_clock(conn, ledger.statement_context)
                quotas.lock(conn, [("", "42")])
                if how == "consume":
                    asked.append(threads.submit(jobs.consume_reservation, mine))
                else:
                    asked.append(threads.submit(app.submit, "train", user=42, reservation=mine))
                until = time.monotonic() + PATIENCE
                while time.monotonic() < until:
                    request = Reserve(id=new_id(), tenant="", user="42", max_concurrent=1, ttl_us=60_000_000)
                    (other,) = quotas.reserve(conn, [request], ledger.statement_context)
                    if other is not None:
                        return other
                    time.sleep(0.1)
            return None

        assert run_sync(ledger.write(hot(take_the_slot))) is not None
        if how == "consume":
            assert asked[0].result(PATIENCE) is False
        else:
            with pytest.raises(ReservationLost):
                asked[0].result(PATIENCE)
        assert app.usage(42).concurrent == 1


def test_of_quotas_set_at_once_one_holds(database: TestDatabase) -> None:
    apps = [database.open_app() for _ in range(4)]

    def limit(number: int) -> None:
        for user in range(10):
            apps[number].set_quota(user, Quota(max_concurrent=number))

    in_threads(4, limit)
    held = database.app.quotas()
    assert set(held) == {str(user) for user in range(10)}
    assert all(quota.max_concurrent in range(4) for quota in held.values())
