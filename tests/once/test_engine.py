"""The verbs of a key: what an operator may resolve and forget, how messages are marked, and what an outage leaves."""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from semel import (
    AsyncOnce,
    Claim,
    ClaimLost,
    Event,
    Granted,
    InFlight,
    InProgress,
    InvalidRequest,
    Mismatch,
    Once,
    OutcomeGone,
    OutcomeUnknown,
    Policy,
    Replay,
    StoreUnavailable,
    Unknown,
)
from semel._concurrency.runtime import seconds_left
from semel._concurrency.sync import run_sync
from semel.once import engine
from semel.once.maintenance import BATCH
from semel.once.requests import CallRequest, _Attempts, new_attempt
from semel.once.store import ClaimRequest, Forget, KeyRef, Release
from semel.once.stores.memory import MemoryStore
from semel.testing import FakeClock, FaultyStore
from semel.types import Verdict
from support.waiting import eventually

PATIENCE = 60
"""Seconds after which something that should have happened counts as hanging."""


class Interrupted(MemoryStore):
    """Somebody else acts in the middle of a call: after the operator has read the key, before the key is changed."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(clock)
        self.meanwhile: Callable[[], Awaitable[object]] | None = None

    async def _interrupt(self) -> None:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            await meanwhile()

    async def claim(self, requests: Sequence[ClaimRequest]) -> list[Verdict]:
        await self._interrupt()
        return await super().claim(requests)

    async def forget(self, requests: Sequence[Forget]) -> list[bool]:
        await self._interrupt()
        return await super().forget(requests)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def once(clock: FakeClock) -> Once:
    return Once("memory://", clock=clock, collect=False)


@pytest.fixture
def far(clock: FakeClock) -> tuple[Once, FaultyStore]:
    """A store that is a round trip away, and fails on request."""
    store = FaultyStore(MemoryStore(clock))
    return Once(store, collect=False, retry_for=0), store


def granted(verdict: object) -> Claim:
    assert isinstance(verdict, Granted)
    return verdict.claim


# -- forget ----------------------------------------------------------------------------------------------------------


def test_a_key_that_is_forgotten_is_free_and_forgetting_a_free_key_is_false(once: Once) -> None:
    once.call("key", lambda: 7)
    assert once.forget("key") is True
    assert once.get("key") is None
    assert once.forget("key") is False
    assert once.call("key", lambda: 8).value == 8


def test_a_key_at_work_is_taken_from_its_owner_by_force_alone(once: Once, clock: FakeClock) -> None:
    claim = granted(once.claim("key", lease=60))
    clock.advance(20)
    with pytest.raises(InProgress, match=r"'key' in 'default' is being worked on, for at least 40\.0 more") as refused:
        once.forget("key")
    assert refused.value.retry_after == 40
    assert once.forget("key", force=True) is True
    with pytest.raises(ClaimLost):
        once.complete(claim, 7)


def test_a_vanished_owners_key_is_forgotten_without_force(once: Once, clock: FakeClock) -> None:
    for policy in ("retake", "unknown"):
        granted(once.claim(policy, lease=60, on_crash=policy))
    clock.advance(60)
    assert [once.forget(key) for key in ("retake", "unknown")] == [True, True]


def test_an_owner_that_renewed_its_lapsed_lease_meanwhile_keeps_its_key(clock: FakeClock) -> None:
    store = Interrupted(clock)
    once = Once(store, collect=False)
    claim = granted(once.claim("key", lease=60))
    clock.advance(60)
    store.meanwhile = lambda: once._engine.renew(claim)
    with pytest.raises(InProgress):
        once.forget("key")
    once.complete(claim, 7)
    assert once.call("key", int).value == 7


@pytest.mark.parametrize("since", ["claimed", "forgotten"])
def test_what_happened_to_the_key_since_the_operator_looked_is_left_alone(clock: FakeClock, since: str) -> None:
    store = Interrupted(clock)
    once = Once(store, collect=False)
    granted(once.claim("key", lease=60))
    clock.advance(60)
    verb = once._engine.claim if since == "claimed" else once._engine.forget
    store.meanwhile = lambda: verb("key")
    assert once.forget("key") is True
    record = once.get("key")
    assert (record is not None) == (since == "claimed")


def test_who_waits_for_a_key_is_woken_when_it_is_forgotten(once: Once, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_FIRST_POLL", 600.0)
    with ThreadPoolExecutor(1) as thread:
        granted(once.claim("key"))
        waiting = thread.submit(once.claim, "key", wait=PATIENCE)
        eventually(lambda: once._engine._waiters._waiting)
        once.forget("key", force=True)
        granted(waiting.result(PATIENCE / 2))


def test_a_scope_is_forgotten_in_steps_until_nothing_is_left(once: Once) -> None:
    for number in range(BATCH + 5):
        once.check_and_mark("scope", f"message {number}")
    claim = granted(once.claim("at work", scope="scope"))
    once.call("key", int, scope="another")
    assert once.forget_scope("scope") == BATCH + 5
    assert once.forget_scope("scope") == 0
    assert once.forget_scope("scope", force=True) == 1
    with pytest.raises(ClaimLost):
        once.complete(claim)
    assert once.stats().held.live == 1


# -- resolve ---------------------------------------------------------------------------------------------------------


def lost(once: Once, clock: FakeClock) -> Claim:
    """The claim of an owner that vanished, whose outcome is unknown."""
    claim = granted(once.claim("key", lease=60, on_crash="unknown"))
    clock.advance(60)
    assert isinstance(once.claim("key"), Unknown)
    return claim


def test_only_a_key_with_an_unknown_outcome_is_resolved(once: Once, clock: FakeClock) -> None:
    with pytest.raises(InvalidRequest, match="nothing to resolve: the key 'key' in 'default' is free"):
        once.resolve("key", done=True)
    claim = lost(once, clock)
    once.resolve("key", done=True, value=7)
    assert once.call("key", int).value == 7
    with pytest.raises(InvalidRequest, match="is completed"):
        once.resolve("key", done=False)
    with pytest.raises(ClaimLost):
        once.complete(claim, 8)


def test_work_that_was_not_done_is_done_by_the_next_caller(once: Once, clock: FakeClock) -> None:
    lost(once, clock)
    once.resolve("key", done=False, value="ignored")
    assert once.get("key") is None


def test_an_owner_at_work_is_overruled_by_force_alone(once: Once) -> None:
    claim = granted(once.claim("key", lease=60, on_crash="unknown"))
    with pytest.raises(InProgress, match="being worked on"):
        once.resolve("key", done=True, value=7)
    once.renew(claim)
    once.resolve("key", done=True, value=7, force=True)
    assert once.call("key", int).value == 7


def test_of_two_operators_who_resolve_a_key_the_second_is_told(clock: FakeClock) -> None:
    store = Interrupted(clock)
    once = Once(store, collect=False)
    lost(once, clock)
    store.meanwhile = lambda: once._engine.resolve("key", done=True, value="first")
    with pytest.raises(InProgress, match="by someone else just now") as refused:
        once.resolve("key", done=True, value="second")
    assert refused.value.retry_after == 1
    assert once.call("key", str).value == "first"


# -- messages --------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["memory", "far"])
def marking(request: pytest.FixtureRequest, clock: FakeClock) -> Once:
    """In memory a message is marked without a request; elsewhere by a claim that is completed at once."""
    store: Any = MemoryStore(clock)
    return Once(
        store if request.param == "memory" else FaultyStore(store),
        collect=False,
        policy=Policy(ttl=3600, value_ttl=600),
    )


def test_a_message_is_seen_for_as_long_as_was_asked(marking: Once, clock: FakeClock) -> None:
    assert [marking.check_and_mark("type", name, ttl=ttl) for name, ttl in (("a", None), ("b", 60))] == ["not_seen"] * 2
    for seconds, expected in ((60, ["seen", "seen"]), (1, ["seen", "not_seen"]), (3539, ["seen", "seen"])):
        clock.advance(seconds)
        assert [marking.check_and_mark("type", name) for name in ("a", "b")] == expected
    clock.advance(1)
    assert marking.check_and_mark("type", "a") == "not_seen"
    counts = marking.stats().doors["message", "type"]
    assert (counts.hits, counts.misses) == (5, {"absent": 2, "expired": 2})


def test_messages_are_marked_in_an_event_loop_too() -> None:
    async def scenario() -> list[str]:
        once = AsyncOnce("memory://", collect=False)
        return [await once.check_and_mark("type", message) for message in ("a", "a", "b")]

    assert asyncio.run(scenario()) == ["not_seen", "seen", "not_seen"]


def test_what_is_kept_of_a_message_for_audit_fades_before_the_mark(marking: Once, clock: FakeClock) -> None:
    marking.check_and_mark("type", "message", {"from": "queue"})
    for seconds, expected in ((600, {"from": "queue"}), (1, None)):
        clock.advance(seconds)
        record = marking.get("message", scope="type")
        assert record is not None
        assert record.additional_data == expected
    assert marking.check_and_mark("type", "message") == "seen"


def test_a_message_that_is_being_handled_is_seen(marking: Once) -> None:
    granted(marking.claim("message", scope="type"))
    assert marking.check_and_mark("type", "message") == "seen"
    assert marking.stats().doors["message", "type"].collisions == 1


def test_a_message_whose_handler_vanished_is_not_marked_by_the_next(marking: Once, clock: FakeClock) -> None:
    granted(marking.claim("message", scope="type", lease=60, on_crash="unknown"))
    clock.advance(60)
    with pytest.raises(OutcomeUnknown, match=r"'message' in 'type' vanished.*resolve\('message', scope='type'"):
        marking.check_and_mark("type", "message")
    assert marking.stats().doors["message", "type"].unknown == 1
    assert isinstance(marking.claim("message", scope="type"), Unknown)


def test_a_message_that_was_abandoned_is_marked(marking: Once, clock: FakeClock) -> None:
    granted(marking.claim("message", scope="type", lease=60))
    clock.advance(60)
    assert [marking.check_and_mark("type", "message") for _ in range(2)] == ["not_seen", "seen"]
    assert marking.stats().doors["message", "type"].misses == {"abandoned": 1}


def test_without_a_store_a_message_is_not_seen_only_if_the_policy_is_open(clock: FakeClock) -> None:
    store = FaultyStore(MemoryStore(clock))
    store.away = True
    for policy in ("open", "closed"):
        once = Once(store, collect=False, retry_for=0, policy=Policy(store_failure=policy))
        if policy == "open":
            assert once.check_and_mark("type", "message") == "not_seen"
        else:
            with pytest.raises(StoreUnavailable):
                once.check_and_mark("type", "message")
        assert not once._engine._background.here().pending.writes, "a mark that may have been made stays"


# -- claims ----------------------------------------------------------------------------------------------------------


def test_a_claim_is_sent_once_unless_it_waits(far: tuple[Once, FaultyStore]) -> None:
    once, store = far
    granted(once.claim("key"))
    for options in ({}, {"wait": 0}):
        assert isinstance(once.claim("key", **options), InFlight)
    with pytest.raises(InProgress):
        once.call("key", int, in_flight="conflict", wait=PATIENCE)
    assert store.calls["claim"] == 4


def test_a_claim_that_waits_looks_again_after_pauses_that_grow(
    far: tuple[Once, FaultyStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    once, _ = far
    granted(once.claim("key", lease=3600))
    pauses: list[float] = []

    class Noted:
        """A signal that nobody sets, which notes how long it is waited for."""

        async def wait(self, seconds: float) -> bool:
            pauses.append(seconds)
            return False

    now = [1000.0]

    class Time:
        @staticmethod
        def monotonic() -> float:
            return now[0] + sum(pauses)

    monkeypatch.setattr(once._engine._runtime, "signal", Noted)
    monkeypatch.setattr(engine, "time", Time)
    assert isinstance(once.claim("key", wait=1.52), InFlight)
    assert pauses == pytest.approx([0.02, 0.04, 0.08, 0.16, 0.32, 0.5, 0.4])


def test_a_claim_that_waits_a_moment_waits(far: tuple[Once, FaultyStore]) -> None:
    once, store = far
    granted(once.claim("key"))
    assert isinstance(once.claim("key", wait=1e-7), InFlight)
    assert store.calls["claim"] > 2


def test_a_key_in_flight_says_for_how_long_its_owner_has_held_it(once: Once, clock: FakeClock) -> None:
    """A renewal does not begin it anew; and if the clock is set back, it has just begun."""
    claim = granted(once.claim("key", lease=60))
    clock.advance(20)
    assert once.claim("key") == InFlight(40, claim.fence, 20)
    once.renew(claim)
    clock.advance(30)
    assert once.claim("key") == InFlight(30, claim.fence, 50)
    clock.advance(-100)
    assert once.claim("key") == InFlight(60, claim.fence, 0)


def test_a_claim_with_other_content_is_told_by_its_verdict_and_a_call_by_its_error(once: Once) -> None:
    granted(once.claim("key", fingerprint="1:a"))
    assert once.claim("key", fingerprint="1:b") == Mismatch("1:a")


def test_a_call_under_an_unknown_outcome_raises_what_to_do(once: Once, clock: FakeClock) -> None:
    lost(once, clock)
    with pytest.raises(OutcomeUnknown, match=r"resolve\('key', scope='default', done=True"):
        once.call("key", int)


def test_a_renewed_claim_is_the_same_claim_with_a_new_end(once: Once, clock: FakeClock) -> None:
    claim = granted(once.claim("key", lease=60, ttl=600, fingerprint="1:a"))
    clock.advance(10)
    renewed = once.renew(claim)
    assert (renewed.lease, renewed.lease_until_us) == (60, clock.us + 60_000_000)
    assert (renewed.attempt, renewed.fingerprint, renewed.expires_us) == (claim.attempt, "1:a", claim.expires_us)
    once.release(renewed)
    with pytest.raises(ClaimLost, match="cannot renew the key 'key'"):
        once.renew(claim)


def test_a_key_that_was_taken_over_is_not_released_by_its_former_owner(once: Once, clock: FakeClock) -> None:
    claim = granted(once.claim("key", lease=60))
    clock.advance(60)
    granted(once.claim("key"))
    with pytest.raises(ClaimLost, match="cannot release the key 'key'"):
        once.release(claim)


def test_a_request_is_renewed_and_reconciles_nothing_unless_it_says_so(once: Once, clock: FakeClock) -> None:
    """As the middleware makes it."""
    request = CallRequest("key", "default", "", Policy(on_crash="unknown"))
    claim = granted(run_sync(once._engine.claim_for(request)))
    assert once._engine._background.here().renewer.watched() == [claim]
    once._engine.stop_renewing(claim)
    clock.advance(60)
    assert isinstance(run_sync(once._engine.claim_for(request)), Unknown)


def test_no_two_attempts_have_the_same_name() -> None:
    """Not in one process, not in two, and not in a child that was forked."""
    one, two = _Attempts(), _Attempts()
    named = [one.new(), one.new(), two.new()]
    one.after_fork()
    named += [one.new(), new_attempt()]
    assert len(set(named)) == 5


# -- outages ---------------------------------------------------------------------------------------------------------


def pending(once: Once | AsyncOnce) -> list[Any]:
    """What is retried in the background."""
    return list(once._engine._background.here().pending.writes)


def test_work_without_protection_is_logged(clock: FakeClock, caplog: pytest.LogCaptureFixture) -> None:
    store = FaultyStore(MemoryStore(clock))
    store.away = True
    once = Once(store, collect=False, retry_for=0, policy=Policy(store_failure="open"))
    result = once.call("key", lambda: 7)
    assert (result.value, result.replayed, result.fence) == (7, False, 0)
    assert "working on 'key' in 'default' without protection" in caplog.text


@pytest.mark.parametrize("policy", ["open", "closed"])
def test_an_outcome_that_cannot_be_recorded_is_recorded_later(
    far: tuple[Once, FaultyStore], policy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The caller gets the value if the policy is open; otherwise the error of the store."""
    once, store = far

    def work() -> int:
        store.away = True
        return 7

    if policy == "open":
        assert once.call("key", work, store_failure="open").value == 7
        assert "the outcome of 'key' in 'default' is not recorded yet" in caplog.text
    else:
        with pytest.raises(StoreUnavailable):
            once.call("key", work)
    assert [claim.key for claim in pending(once)] == ["key"]
    assert [claim.key for claim in once._engine._background.here().renewer.watched()] == ["key"]
    store.away = False
    result = once.call("key", int)
    assert (result.value, result.replayed) == (7, True)
    once.close()


@pytest.mark.parametrize("policy", ["release", "keep"])
def test_a_failure_that_cannot_be_recorded_is_recorded_later(
    far: tuple[Once, FaultyStore], policy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    once, store = far

    def work() -> int:
        store.away = True
        raise ValueError("the work's own")

    with pytest.raises(ValueError, match="the work's own"):
        once.call("key", work, on_error=policy)
    assert "the failed work on 'key' in 'default' could not be recorded" in caplog.text
    store.away = False
    verdict = once.claim("key")
    assert isinstance(verdict, Granted if policy == "release" else Replay)
    once.close()


def test_what_is_pending_is_sent_before_the_key_is_claimed_again(far: tuple[Once, FaultyStore]) -> None:
    """Otherwise the same process would find its own key in flight."""
    once, store = far
    store.lose_reply("claim")
    store.lose_request("get", 1000)
    with pytest.raises(StoreUnavailable):
        once.claim("unheard")
    claim = granted(once.claim("key"))
    store.lose_request("complete", 1)
    with pytest.raises(StoreUnavailable):
        once.call("other", int)
    assert once.call("other", lambda: 1).value == 0
    once.complete(claim)
    once.close()


def test_a_claim_of_unknown_fate_is_released_but_not_one_that_marks_or_resolves(
    far: tuple[Once, FaultyStore], clock: FakeClock
) -> None:
    once, store = far
    lost(once, clock)
    store.lose_request("get", 1000)  # what is pending stays so
    store.lose_reply("claim", 2)
    with pytest.raises(StoreUnavailable):
        once.check_and_mark("type", "message")
    store._requests["get"] = 0
    with pytest.raises(StoreUnavailable):
        once.resolve("key", done=True)
    assert pending(once) == []
    store.lose_request("get", 1000)
    store.lose_reply("claim")
    with pytest.raises(StoreUnavailable):
        once.claim("another")
    assert len(pending(once)) == 1
    store._requests["get"] = 0
    once.close()


def test_whoever_reports_a_failure_learns_whether_it_is_kept(far: tuple[Once, FaultyStore]) -> None:
    """The middleware needs to know whether the next request finds the failure."""
    once, store = far
    for key, policy, kept in (("a", "keep", True), ("b", "release", False), ("c", "keep", False)):
        request = CallRequest(key, "default", "", Policy(on_error=policy))
        claim = granted(run_sync(once._engine.claim_for(request)))
        store.away = key == "c"
        assert run_sync(once._engine.fail(claim, request, ValueError("no"))) is kept
    store.away = False
    once.close()


class SlowRelease(FaultyStore):
    """Its first release takes for ever."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(MemoryStore(clock))
        self.reached = asyncio.Event()

    async def release(self, requests: Sequence[Release]) -> list[bool]:
        if not self.reached.is_set():
            self.reached.set()
            await asyncio.Event().wait()
        return await super().release(requests)


def test_whoever_reports_a_failure_can_be_cancelled(clock: FakeClock) -> None:
    async def scenario() -> None:
        store = SlowRelease(clock)
        once = AsyncOnce(store, collect=False)
        request = CallRequest("key", "default", "", Policy())
        claim = granted(await once._engine.claim_for(request))
        task = asyncio.create_task(once._engine.fail(claim, request, ValueError("no")))
        await store.reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await once.close()
        assert run_sync(store.inner.get([KeyRef("default", "key")])) == [None]

    asyncio.run(scenario())


def test_cancelled_work_whose_key_cannot_be_released_is_released_later(clock: FakeClock) -> None:
    """The release is under way when the task is cancelled once more: it is retried in the background."""

    async def scenario() -> None:
        store = SlowRelease(clock)
        once = AsyncOnce(store, collect=False)
        started = asyncio.Event()

        async def work() -> None:
            started.set()
            await asyncio.Event().wait()

        task = asyncio.create_task(once.call("key", work))
        await started.wait()
        task.cancel()
        await store.reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(eventually, lambda: run_sync(store.inner.get([KeyRef("default", "key")])) == [None])
        await once.close()

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE))


def test_what_one_event_loop_could_not_record_is_recorded_by_the_next(clock: FakeClock) -> None:
    store = FaultyStore(MemoryStore(clock))
    once = AsyncOnce(store, collect=False, retry_for=0)

    async def work() -> int:
        store.away = True
        return 7

    with pytest.raises(StoreUnavailable):
        asyncio.run(once.call("key", work))
    store.away = False
    result = asyncio.run(once.call("key", work))
    assert (result.value, result.replayed) == (7, True)


def test_a_store_that_creates_its_tables_first_has_longer_for_that(clock: FakeClock) -> None:
    class New(FaultyStore):
        """Ready after its first claim, as a new SQLite file is."""

        ready = False

        async def claim(self, requests: Sequence[ClaimRequest]) -> list[Verdict]:
            times.append(seconds_left())
            self.ready = True
            return await super().claim(requests)

    times: list[float] = []
    once = Once(New(MemoryStore(clock)), collect=False, retry_for=4)
    for key in ("first", "second"):
        granted(once.claim(key))
    assert times[0] > 20
    assert times[1] <= 2


def test_a_reason_that_the_value_is_not_stored_is_cut_to_a_thousand_characters(once: Once) -> None:
    def data(_: object) -> None:
        raise ValueError("x" * 5000)

    handle = once.consumer("type", key=lambda message: message, data=data)(lambda _: "handled")
    with pytest.raises(ValueError, match="xxx"):
        handle("message")
    verdict = once.claim("message", scope="type")
    assert isinstance(verdict, Replay)
    with pytest.raises(OutcomeGone) as gone:
        _ = verdict.outcome.value
    assert str(gone.value).endswith("could not be stored: ValueError: " + "x" * 988)


# -- hooks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("only", ["marks", "claims"])
def test_the_store_is_sampled_for_all_hooks_at_the_shortest_interval(clock: FakeClock, only: str) -> None:
    class Meter:
        def __init__(self, every: float) -> None:
            self.sample_every = every
            self.heard: list[str] = []

        def __call__(self, event: Event) -> None:
            self.heard.append(event.name)

    slow, quick = Meter(3600), Meter(0.01)
    with Once(MemoryStore(clock), collect=False, on_event=slow) as once:
        for meter in (quick, quick):
            once._engine.add_hook(meter)
        once.check_and_mark("type", "key") if only == "marks" else once.claim("key")
        eventually(lambda: slow.heard.count("held") >= 10)
    assert quick.heard == slow.heard


def test_the_replies_of_a_store_are_timed_by_verb_unless_it_is_in_memory(clock: FakeClock) -> None:
    class Meter:
        sample_every = 3600.0

        def __init__(self) -> None:
            self.timed: list[str] = []

        def __call__(self, event: Event) -> None:
            if event.name == "store":
                self.timed.append(event.reason)

    for store, expected in ((MemoryStore(clock), []), (FaultyStore(MemoryStore(clock)), ["claim", "complete", "get"])):
        meter = Meter()
        with Once(store, collect=False, on_event=meter) as once:
            once.complete(granted(once.claim("timed")))
            once.get("timed")
            once.stats()
            once._engine._sampler = None
        assert meter.timed == expected


# -- the end ---------------------------------------------------------------------------------------------------------


def test_closing_closes_the_store(clock: FakeClock) -> None:
    class Noted(FaultyStore):
        async def close(self) -> None:
            self.calls["close"] += 1

    store = Noted(MemoryStore(clock))
    with Once(store, collect=False):
        assert store.calls["close"] == 0
    assert store.calls["close"] == 1


def test_closing_ends_what_runs_in_every_event_loop() -> None:
    """Work in another loop is renewed no more, since its store is closed."""
    once = AsyncOnce("memory://", collect=False)
    begun, closed = threading.Event(), threading.Event()

    async def work() -> bool:
        renewer = once._engine._background.here().renewer
        assert renewer.running
        begun.set()
        await asyncio.to_thread(closed.wait, PATIENCE)
        return renewer.running

    with ThreadPoolExecutor(1) as thread:
        there = thread.submit(asyncio.run, once.call("key", work))
        assert begun.wait(PATIENCE)
        asyncio.run(once.close())
        closed.set()
        assert there.result(PATIENCE).value is False


class Expiring(MemoryStore):
    """Removes expired keys by itself, as Redis does."""

    expires_itself = True


@pytest.mark.parametrize(
    ("store_class", "collect", "value_ttl", "runs"),
    [
        (MemoryStore, True, None, True),
        (MemoryStore, False, 60, False),
        (Expiring, True, None, False),
        (Expiring, True, 60, True),
        (Expiring, False, 60, False),
    ],
)
def test_the_collector_runs_where_something_is_left_to_it(
    store_class: type[MemoryStore], collect: bool, value_ttl: float | None, runs: bool
) -> None:
    """A store that expires keys by itself leaves the values that end earlier."""
    with Once(store_class(), collect=collect, policy=Policy(value_ttl=value_ttl)) as once:
        granted(once.claim("key"))
        assert once._engine._collector.running is runs


def test_the_log_of_the_collector_has_the_level_of_the_policy(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    for level in (logging.DEBUG, logging.INFO):
        name = logging.getLevelName(level).lower()
        once = Once("memory://", clock=clock, collect=False, policy=Policy(cleanup_log=name))
        once.check_and_mark("type", "message", ttl=60)
        clock.advance(61)
        with caplog.at_level(logging.DEBUG, "semel"):
            assert once.purge() == 1
        assert [record.levelno for record in caplog.records if hasattr(record, "purged")] == [level]
        caplog.clear()
