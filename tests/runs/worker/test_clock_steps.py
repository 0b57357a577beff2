"""A clock that is put back: no wait becomes longer than what was asked for when it began."""

from typing import Any

import pytest

from semel import App, JobStore, Run
from semel._concurrency.sync import run_sync
from semel.runs.store import lease, maintenance
from semel.runs.store.lease import Leased
from semel.runs.store.maintenance import Chores
from semel.runs.transports import DatabaseTransport
from semel.runs.worker.sweeper import Sweeper
from support.runs_harness import ManualWorker, RunsHarness

HOUR = 3600


def leased(harness: RunsHarness, hand: ManualWorker, **options: Any) -> tuple[Run, Leased]:
    run = harness.timeless.submit("add", {"a": 1, "b": 2}, dedupe=False, **options)
    (taken,) = hand.lease()
    assert taken.id == run.id
    return run, taken


def waits_no_longer_than(seconds: float, harness: RunsHarness, hand: ManualWorker, run: Run) -> None:
    """It is not to be had yet, and it is once so much time has passed."""
    assert hand.lease() == []
    harness.clock.advance(seconds - 0.01)
    assert hand.lease() == []
    harness.clock.advance(0.02)
    assert [each.id for each in hand.lease()] == [run.id]


def test_a_backoff_lasts_no_longer(harness: RunsHarness) -> None:
    hand = harness.hand()
    run, taken = leased(harness, hand)
    assert hand.end(taken, "retry", delay=5, reason="try again")
    harness.clock.advance(-HOUR)
    told = harness.timeless.waiting(run.id)
    assert told is not None
    assert "backing off for 5 s more" in told.reason
    waits_no_longer_than(5, harness, hand, run)


def test_a_snooze_lasts_no_longer_however_often_the_clock_is_put_back(harness: RunsHarness) -> None:
    hand = harness.hand()
    run, taken = leased(harness, hand)
    assert hand.end(taken, "snooze", delay=60)
    for _ in range(3):
        harness.clock.advance(-HOUR)
        assert hand.lease() == []
    waits_no_longer_than(60, harness, hand, run)


def test_a_run_that_is_scheduled_starts_no_later(harness: RunsHarness) -> None:
    hand = harness.hand()
    harness.timeless.submit("add", {"a": 1, "b": 1}, delay=HOUR)
    run = harness.timeless.submit("add", {"a": 1, "b": 2}, delay=30)
    harness.clock.advance(-7 * HOUR)
    waits_no_longer_than(30, harness, hand, run)


def test_a_wait_that_the_step_leaves_whole_is_left_as_it_is(harness: RunsHarness) -> None:
    """It began before the time to which the clock went back, so it is known how long it has lasted."""
    hand = harness.hand()
    run = harness.timeless.submit("add", {"a": 1, "b": 2}, delay=60)
    harness.clock.advance(40)
    harness.clock.advance(-30)
    waits_no_longer_than(50, harness, hand, run)


def test_what_is_due_at_once_is_leased_and_told_of_at_once(harness: RunsHarness) -> None:
    hand = harness.hand()
    run = harness.timeless.submit("add", {"a": 1, "b": 2})
    harness.clock.advance(-HOUR)
    assert [each.id for each in hand.do(hand.ledger.read(lease.due, 30, 10, hand.ledger.statement_context))] == [run.id]
    told = harness.timeless.waiting(run.id)
    assert told is not None
    assert told.place == 1
    again = hand.lease_this(run)
    assert again is not None
    assert again.id == run.id


def test_a_run_that_is_submitted_while_the_sweeper_looks_is_left_to_its_submitter(harness: RunsHarness) -> None:
    """The sweeper has read the clock before the run is stored, and finds it afterwards."""
    hand = harness.hand()
    harness.timeless.submit("add", {"a": 1, "b": 2})
    harness.clock.advance(-0.5)
    assert hand.do(hand.ledger.read(lease.due, 30, 10, hand.ledger.statement_context)) == []


def test_a_scheduled_run_is_told_of_as_soon_as_it_is_due(harness: RunsHarness) -> None:
    """Its submitter never told of it, so nobody waits for that."""
    hand = harness.hand()
    run = harness.timeless.submit("add", {"a": 1, "b": 2}, delay=30)
    harness.clock.advance(-HOUR)
    hand.do(hand.ledger.write(lease.wake, hand.ledger.statement_context))
    harness.clock.advance(31)
    hand.do(hand.ledger.write(lease.wake, hand.ledger.statement_context))
    assert [each.id for each in hand.do(hand.ledger.read(lease.due, 30, 10, hand.ledger.statement_context))] == [run.id]


def turn(app: App) -> int:
    """One turn of a sweeper which has turned before, so that it cleans nothing up."""
    sweeper = Sweeper(app._engine.store, "sweeper", transport=DatabaseTransport(), hooks=app.hooks)
    return run_sync(sweeper.work(Chores(expired=False)))


def test_a_lease_of_a_dead_worker_ends_no_later_after_any_turn_of_the_sweeper(harness: RunsHarness) -> None:
    hand = harness.hand()
    _, taken = leased(harness, hand)
    lease = taken.lease_us / 1e6
    harness.clock.advance(-HOUR)
    assert turn(harness.timeless) == 0
    harness.clock.advance(lease - 0.01)
    assert turn(harness.timeless) == 0
    harness.clock.advance(0.02)
    assert turn(harness.timeless) == 1
    assert not hand.end(taken), "it is somebody else's by now"


def test_a_worker_that_lives_keeps_its_lease_over_the_step(harness: RunsHarness) -> None:
    hand = harness.hand()
    _, taken = leased(harness, hand)
    harness.clock.advance(-HOUR)
    turn(harness.timeless)
    assert hand.do(hand.ledger.read_once(lease.watch, [(taken.id, taken.fence)])) == {taken.id: False}
    assert hand.end(taken)


@pytest.mark.parametrize("by", ["the sweeper", "the next to reserve"])
def test_a_reservation_holds_its_slot_no_longer(harness: RunsHarness, by: str) -> None:
    jobs = JobStore(harness.url, clock=harness.clock)
    try:
        assert jobs.reserve_job_slot(42, 1, 300) is not None
        harness.clock.advance(-HOUR)
        if by == "the sweeper":
            turn(harness.timeless)
        assert jobs.reserve_job_slot(42, 1) is None, "it is still held"
        harness.clock.advance(299)
        assert jobs.reserve_job_slot(42, 1) is None
        harness.clock.advance(1.1)
        assert jobs.reserve_job_slot(42, 1) is not None
    finally:
        jobs.close()


def test_the_role_of_a_dead_sweeper_is_free_no_later(harness: RunsHarness) -> None:
    ledger = harness.timeless._engine.store
    assert run_sync(ledger.write(maintenance.acquire_leadership, "sweeper", "dead", 15, ledger.statement_context))
    assert not run_sync(ledger.write(maintenance.acquire_leadership, "sweeper", "heir", 15, ledger.statement_context))
    harness.clock.advance(-HOUR)
    assert run_sync(ledger.write(maintenance.acquire_leadership, "sweeper", "heir", 15, ledger.statement_context))


def test_a_worker_that_died_before_the_step_does_not_look_alive_for_an_hour(harness: RunsHarness) -> None:
    with harness.working():
        pass
    app = harness.timeless
    harness.sql("UPDATE semel_workers SET seen_us = :us", us=harness.clock.us + HOUR * 1_000_000)
    assert not any(each.alive for each in app.workers())
