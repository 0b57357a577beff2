"""Writes that a store could not take are retried until it does, in order, and for as long as they are worth it.

Most of these tests retry by hand: nothing runs in the background, and the test calls `tick`.
"""

import logging
import time

import pytest

from semel import Claim, Granted, InFlight, StoreUnavailable
from semel._concurrency.runtime import ThreadRuntime
from semel._concurrency.sync import run_sync
from semel.codec import encode
from semel.once.maintenance import Renewer
from semel.once.pending_writes import PendingWrites
from semel.once.store import ClaimRequest, KeyRef, OutcomeData
from semel.once.stores.memory import MemoryStore
from semel.testing import FakeClock, FaultyStore
from semel.testing.harness import claim_request
from semel.types import Record
from support.background import ByHand
from support.waiting import eventually

HOUR = 3600.0
DONE = OutcomeData("value", encode(7))


class Case:
    """A store that fails on request, and what is pending for it."""

    def __init__(self, runtime: ThreadRuntime | None = None) -> None:
        self.clock = FakeClock()
        self.store = FaultyStore(MemoryStore(self.clock))
        self.runtime = runtime or ByHand()
        self.released: list[str] = []
        self.renewer, self.pending = self.another()

    def another(self) -> tuple[Renewer, PendingWrites]:
        renewer = Renewer(self.runtime, self.store.renew, 60.0)
        return renewer, PendingWrites(self.runtime, self.store, renewer, lambda scope, key: self.released.append(key))

    def claim(self, request: ClaimRequest) -> Claim:
        (verdict,) = run_sync(self.store.inner.claim([request]))
        assert isinstance(verdict, Granted)
        return verdict.claim

    def claimed(self, key: str = "key", lease: float = 60.0) -> Claim:
        return self.claim(claim_request(key, lease=lease))

    def record(self, key: str = "key") -> Record | None:
        (record,) = run_sync(self.store.inner.get([KeyRef("scope", key)]))
        return record

    def tick(self) -> None:
        run_sync(self.pending.tick())

    def flush(self, key: str) -> None:
        run_sync(self.pending.flush_key("scope", key))


@pytest.fixture
def case() -> Case:
    return Case()


def test_an_outcome_is_recorded_when_the_store_is_back_and_its_lease_is_renewed_until_then(case: Case) -> None:
    claim = case.claimed()
    case.store.away = True
    case.pending.retry_outcome(claim, DONE)
    assert case.renewer.watched() == [claim]
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            case.tick()
        assert list(case.pending.writes) == case.renewer.watched() == [claim]
        assert case.released == []
    case.store.away = False
    case.tick()
    record = case.record()
    assert record is not None
    assert (record.status, record.data) == ("completed", DONE.data)
    assert (list(case.pending.writes), case.renewer.watched(), case.released) == ([], [], ["key"])


def test_an_outcome_whose_key_was_taken_over_is_reported_and_wakes_nobody(
    case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    claim = case.claimed(lease=60)
    case.clock.advance(60)
    case.claimed()
    case.pending.retry_outcome(claim, DONE)
    case.tick()
    assert "was never recorded: another caller took the key over" in caplog.text
    assert (list(case.pending.writes), case.renewer.watched(), case.released) == ([], [], [])


def test_a_recorded_outcome_is_not_reported(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    case.pending.retry_outcome(case.claimed(), DONE)
    case.tick()
    assert caplog.text == ""


def test_a_key_is_released_when_the_store_is_back(case: Case) -> None:
    claim = case.claimed()
    case.store.away = True
    case.pending.retry_release(claim)
    assert case.renewer.watched() == []
    with pytest.raises(StoreUnavailable):
        case.tick()
    assert case.released == []
    case.store.away = False
    case.tick()
    assert (case.record(), list(case.pending.writes), case.released) == (None, [], ["key"])


def test_a_claim_without_a_reply_is_released_if_it_was_granted(case: Case) -> None:
    request = claim_request()
    case.claim(request)
    case.pending.retry_claim(request)
    case.tick()
    assert (case.record(), list(case.pending.writes), case.released) == (None, [], ["key"])


@pytest.mark.parametrize("found", ["nothing", "another's claim", "an outcome"])
def test_a_claim_without_a_reply_releases_nothing_else(case: Case, found: str) -> None:
    request = claim_request()
    if found == "another's claim":
        case.claimed()
    elif found == "an outcome":
        request.done = DONE
        case.claim(request)
    before = case.record()
    case.pending.retry_claim(request)
    case.tick()
    assert (case.record(), case.store.calls["release"], case.released) == (before, 0, [])
    assert list(case.pending.writes) == []


def test_one_try_ends_after_three_failures_and_the_next_begins_with_the_others(case: Case) -> None:
    claims = [case.claimed(f"key {number}") for number in range(5)]
    for claim in claims:
        case.pending.retry_release(claim)
    case.store.lose_request("release", 3)
    with pytest.raises(StoreUnavailable):
        case.tick()
    assert case.store.calls["release"] == 3
    assert list(case.pending.writes) == [*claims[3:], *claims[:3]]
    case.tick()
    assert case.released == ["key 3", "key 4", "key 0", "key 1", "key 2"]


def test_a_failure_does_not_keep_the_others_waiting(case: Case) -> None:
    for number in range(3):
        case.pending.retry_release(case.claimed(f"key {number}"))
    case.store.lose_request("release", 2)
    with pytest.raises(StoreUnavailable):
        case.tick()
    assert case.released == ["key 2"]


def test_a_write_is_retried_for_an_hour_or_for_its_lease_if_that_is_longer(case: Case) -> None:
    for lease, expected in ((60.0, HOUR), (2 * HOUR, 2 * HOUR)):
        request = claim_request(lease=lease)
        outcome, release = case.claimed(f"a {lease}", lease), case.claimed(f"b {lease}", lease)
        case.pending.retry_outcome(outcome, DONE)
        case.pending.retry_release(release)
        case.pending.retry_claim(request)
        for about in (outcome, release, request.attempt):
            assert case.pending.writes[about][1] - time.monotonic() == pytest.approx(expected, abs=60)


def test_a_write_whose_time_is_over_is_dropped_and_its_lease_may_end(case: Case) -> None:
    claim, request = case.claimed(), claim_request("another")
    case.pending.retry_outcome(claim, DONE)
    case.pending.retry_claim(request)
    for about, (write, _) in case.pending.writes.items():
        case.pending.writes[about] = (write, time.monotonic())
    case.tick()
    assert (list(case.pending.writes), case.renewer.watched(), case.released) == ([], [], [])
    assert sum(case.store.calls.values()) == 0
    record = case.record()
    assert record is not None
    assert record.status == "in_flight"


def test_a_claim_sends_first_what_is_pending_for_its_key_and_for_no_other(case: Case) -> None:
    claims = {key: case.claimed(key) for key in ("key", "another")}
    request = claim_request("key")
    for claim in claims.values():
        case.pending.retry_release(claim)
    case.pending.retry_claim(request)
    case.flush("key")
    assert case.released == ["key"]
    assert list(case.pending.writes) == [claims["another"], request.attempt]


def test_what_cannot_be_sent_first_stays_pending(case: Case) -> None:
    claim = case.claimed()
    case.pending.retry_release(claim)
    case.store.lose_request("release")
    case.flush("key")
    assert (list(case.pending.writes), case.released) == ([claim], [])
    case.flush("key")
    assert (list(case.pending.writes), case.released) == ([], ["key"])


def test_the_writes_of_a_closed_event_loop_are_taken_over_with_their_leases(case: Case) -> None:
    renewer, closed = case.another()
    outcome, release, at_work = (case.claimed(key) for key in ("outcome", "release", "at work"))
    closed.retry_outcome(outcome, DONE)
    closed.retry_release(release)
    renewer.watch(at_work)
    assert isinstance(case.runtime, ByHand)
    case.runtime.started.clear()
    case.pending.adopt(closed)
    assert case.runtime.started == ["semel-renewer", "semel-pending-writes"]
    assert (list(case.pending.writes), list(closed.writes)) == ([outcome, release], [])
    assert case.renewer.watched() == [outcome]
    case.tick()
    assert case.released == ["outcome", "release"]


def test_nothing_is_taken_over_where_nothing_is_pending(case: Case) -> None:
    _, closed = case.another()
    case.pending.adopt(closed)
    assert isinstance(case.runtime, ByHand)
    assert case.runtime.started == []


def test_the_pauses_between_two_tries_grow_and_a_new_write_is_tried_soon(case: Case) -> None:
    assert case.pending.pause() == HOUR
    for number in range(2):
        case.pending.retry_release(case.claimed(f"key {number}"))
        pauses = [case.pending.pause() for _ in range(9)]
        expected = [0.02 * 2**failures for failures in range(8)]
        assert pauses == [pytest.approx(pause, rel=0.21) for pause in [*expected, 5.0]]
    case.tick()
    assert case.pending.pause() == HOUR


def test_a_write_is_sent_at_once_in_the_background_also_when_that_sleeps() -> None:
    case = Case(ThreadRuntime())
    for key in ("first", "second"):
        case.pending.retry_release(case.claimed(key))
        eventually(lambda key=key: case.released[-1:] == [key])
        eventually(lambda: not case.pending.writes)
    run_sync(case.pending.end())


def test_what_a_cancelled_caller_was_granted_is_released(case: Case) -> None:
    claim = case.claimed()
    run_sync(case.pending.give_back(InFlight(1.0)))
    assert case.store.calls["release"] == 0
    case.store.lose_request("release")
    run_sync(case.pending.give_back(Granted(claim)))
    assert list(case.pending.writes) == [claim]
    run_sync(case.pending.give_back(Granted(claim)))
    assert (case.record(), case.released) == (None, ["key"])


def test_at_the_end_what_is_pending_is_sent_once_more(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    case.pending.retry_release(case.claimed())
    assert case.pending.running
    run_sync(case.pending.end())
    assert not case.pending.running
    assert (case.released, caplog.text) == (["key"], "")


def test_at_the_end_what_could_not_be_sent_is_counted_in_the_log(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(2):
        case.pending.retry_release(case.claimed(f"key {number}"))
    case.store.away = True
    with caplog.at_level(logging.WARNING, "semel"):
        run_sync(case.pending.end())
    assert "2 outcomes or releases could not be recorded" in caplog.text
