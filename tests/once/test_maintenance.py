"""Behind the scenes: the collector, which forgets what expired, and the renewer, which keeps long work alive."""

import asyncio
import gc
import logging
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import pytest
from sqlalchemy import create_engine, make_url
from sqlalchemy.orm import Session

from semel import AsyncOnce, Claim, ClaimLost, Granted, InFlight, Once, Policy, StoreUnavailable, current_claim
from semel._concurrency.runtime import AsyncioRuntime, Runtime, ThreadRuntime, deadline, seconds_left
from semel._concurrency.sync import run_sync
from semel.once import maintenance
from semel.once.maintenance import BATCH, Collector, Renewer, Sampler
from semel.once.stats import StatsCounter
from semel.once.store import Renew
from semel.once.stores.memory import MemoryStore
from semel.testing import FakeClock, FaultyStore
from semel.types import Held
from support.background import ByHand
from support.databases import KINDS, StoreUrls
from support.waiting import eventually

PATIENCE = 60
"""Seconds after which something that should have happened counts as hanging."""

names = count()


@pytest.fixture
def key() -> str:
    return f"key {next(names)}"


def granted(verdict: object) -> Claim:
    assert isinstance(verdict, Granted)
    return verdict.claim


def background_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("semel-")}


class NotedStore(MemoryStore):
    """Notes every purge and renewal, and may be told to fail."""

    def __init__(self, clock: FakeClock | None = None) -> None:
        super().__init__(clock)
        self.limits: list[int] = []
        self.renewed = threading.Semaphore(0)
        self.purged = threading.Semaphore(0)
        self.failures: list[Exception] = []

    async def purge(self, limit: int) -> int:
        self.limits.append(limit)
        self.purged.release()
        if self.failures:
            raise self.failures.pop()
        return await super().purge(limit)

    async def renew(self, requests: Sequence[Renew]) -> list[int | None]:
        answers = await super().renew(requests)
        for _ in requests:
            self.renewed.release()
        if self.failures:
            raise self.failures.pop()
        return answers


# -- the collector ---------------------------------------------------------------------------------------------------


def test_expired_keys_are_collected_by_themselves() -> None:
    """Given keys past their retention, when the interval is over, then they are gone from the store."""
    clock = FakeClock()
    store = NotedStore(clock)
    with Once(store, policy=Policy(ttl=60, purge_every=0.01)) as once:
        for number in range(10):
            once.call(f"key {number}", int)
        clock.advance(61)
        eventually(lambda: once.stats().held.expired == 0)
        assert once.stats().purged == 10
        assert store._scopes == {}


def test_expired_keys_are_collected_in_a_loop_too() -> None:
    async def work() -> int:
        return 7

    async def scenario() -> None:
        clock = FakeClock()
        async with AsyncOnce(NotedStore(clock), policy=Policy(ttl=60, purge_every=0.01)) as once:
            for number in range(10):
                await once.call(f"key {number}", work)
            clock.advance(61)
            await asyncio.to_thread(eventually, lambda: once._engine.counters.purged == 10)
            assert (await once.stats()).held.expired == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", KINDS)
def test_a_purge_on_demand_removes_everything_that_expired(urls: StoreUrls, kind: str) -> None:
    clock = FakeClock()
    scope = f"purged {next(names)}"
    with Once(urls[kind], clock=clock, collect=False) as once:
        for number in range(5):
            once.complete(granted(once.claim(f"short {number}", scope=scope, ttl=60)), number)
            once.complete(granted(once.claim(f"long {number}", scope=scope, ttl=600)), number)
        clock.advance(61)
        assert once.purge() >= 5
        assert once.purge() == 0
        assert all(once.get(f"long {number}", scope=scope) is not None for number in range(5))
        assert all(once.get(f"short {number}", scope=scope) is None for number in range(5))


def test_a_purge_goes_in_bounded_steps() -> None:
    """More than one step's worth expired: each step removes at most a thousand, and the steps go on until done."""
    clock = FakeClock()
    store = NotedStore(clock)
    with Once(store, collect=False) as once:
        for number in range(2 * BATCH + 1):
            once.check_and_mark("type", f"message {number}", ttl=60)
        clock.advance(61)
        assert once.purge() == 2 * BATCH + 1
    assert store.limits == [BATCH] * 3


def test_the_collector_can_be_switched_off() -> None:
    before = background_threads()
    clock = FakeClock()
    store = NotedStore(clock)
    with Once(store, collect=False, policy=Policy(ttl=60, purge_every=0.001)) as once:
        once.call("key", int, renew=False)
        once.check_and_mark("type", "message")
        clock.advance(61)
        assert background_threads() == before
        assert isinstance(once.claim("key"), Granted)  # expired is absent, whatever the collector does
    assert store.limits == []


def test_a_store_that_expires_keys_by_itself_is_left_alone(urls: StoreUrls, key: str) -> None:
    before = background_threads()
    with Once(urls["redis"], policy=Policy(purge_every=0.001)) as once:
        granted(once.claim(key))
        assert background_threads() == before


def test_the_interval_follows_the_policy() -> None:
    """A tenth of the retention, at most a minute, unless given."""
    assert Policy(ttl=3600).collect_interval == 60
    assert Policy(ttl=60).collect_interval == 6
    assert Policy.router().collect_interval == 60
    assert Policy.intake().collect_interval == 600
    assert Policy(ttl=60, purge_every=1).collect_interval == 1


def test_many_collectors_do_not_work_in_step() -> None:
    """Each pause is the interval give or take a tenth."""

    async def purge(limit: int) -> int:
        return 0

    collector = Collector(ThreadRuntime(), 100.0, purge, StatsCounter())
    pauses = [collector.pause() for _ in range(200)]
    assert all(90 <= pause <= 110 for pause in pauses)
    assert max(pauses) - min(pauses) > 5


def test_the_collector_outlives_a_store_that_is_away(caplog: pytest.LogCaptureFixture) -> None:
    """It says so once for each try, and goes on."""
    store = NotedStore()
    store.failures = [StoreUnavailable("gone for a moment")]
    with Once(store, retry_for=0, policy=Policy(purge_every=0.01)) as once:
        once.check_and_mark("type", "message")
        for _ in range(3):
            assert store.purged.acquire(timeout=PATIENCE)
    assert "the store of semel-collector is unavailable; retrying: gone for a moment" in caplog.text


def test_closing_ends_the_background() -> None:
    before = background_threads()
    with Once(NotedStore(), policy=Policy(purge_every=3600)) as once:
        once.call("key", int)
        assert len(background_threads() - before) == 2
    eventually(lambda: background_threads() <= before)


def test_a_forgotten_once_is_collected_itself_and_its_background_with_it() -> None:
    """Nobody closed it: neither the sleeping collector nor the renewer keeps it alive, and their threads end."""
    before = background_threads()
    once = Once(NotedStore(), policy=Policy(purge_every=3600, lease=3600))
    once.call("key", int)
    assert len(background_threads() - before) == 2
    engine = weakref.ref(once._engine)
    del once
    gc.collect()
    assert engine() is None
    eventually(lambda: background_threads() <= before)


def test_an_object_that_is_used_after_its_close_collects_again() -> None:
    clock = FakeClock()
    once = Once(NotedStore(clock), policy=Policy(ttl=60, purge_every=0.01))
    once.check_and_mark("type", "message")
    once.close()
    once.check_and_mark("type", "another")
    clock.advance(61)
    eventually(lambda: once.stats().purged == 2)
    once.close()


def test_a_second_event_loop_has_a_background_of_its_own() -> None:
    """The first loop took its tasks with it; leases are renewed and keys collected in the next one as well."""
    store = NotedStore()
    once = AsyncOnce(store, policy=Policy(lease=0.03, purge_every=0.01))

    async def work() -> int:
        for _ in range(2):
            assert await asyncio.to_thread(store.renewed.acquire, timeout=PATIENCE)
            assert await asyncio.to_thread(store.purged.acquire, timeout=PATIENCE)
        return 7

    for key in ("first", "second"):
        assert asyncio.run(once.call(key, work)).value == 7


# -- the renewer -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_work_longer_than_its_lease_keeps_its_claim(urls: StoreUrls, kind: str, key: str) -> None:
    """The function ends when its lease was renewed beyond where it would have ended; nobody else got in."""
    with Once(urls[kind]) as once:

        def work() -> int:
            claim = current_claim()
            eventually(lambda: lease_until(once, key) > claim.lease_until_us + 500_000)
            assert isinstance(once.claim(key), InFlight)
            return claim.fence

        result = once.call(key, work, lease=6)  # renewed after two seconds
        assert result.value == result.fence
        assert once.call(key, int).replayed


def lease_until(once: Once, key: str) -> int:
    record = once.get(key)
    assert record is not None
    assert record.status == "in_flight"
    return record.lease_until_us


@pytest.mark.parametrize("kind", KINDS)
def test_async_work_longer_than_its_lease_keeps_its_claim(urls: StoreUrls, kind: str, key: str) -> None:
    async def scenario() -> None:
        async with AsyncOnce(urls[kind]) as once:

            async def work() -> int:
                claim = current_claim()
                with Once(urls[kind] if kind != "memory" else once._engine.store, collect=False) as other:
                    beyond = claim.lease_until_us + 500_000
                    await asyncio.to_thread(eventually, lambda: lease_until(other, key) > beyond)
                assert isinstance(await once.claim(key), InFlight)
                return claim.fence

            result = await once.call(key, work, lease=6)
            assert result.value == result.fence

    asyncio.run(scenario())


def test_work_without_renewal_loses_its_claim_when_another_takes_over() -> None:
    """Then its outcome is not recorded, and it is told."""
    clock = FakeClock()
    with Once("memory://", clock=clock) as once:

        def slow() -> str:
            clock.advance(61)
            assert once.call("key", lambda: "the new owner's").value == "the new owner's"
            return "the zombie's"

        with pytest.raises(ClaimLost, match="no longer holds it"):
            once.call("key", slow, lease=60, renew=False)
        assert once.call("key", str).value == "the new owner's"


def test_work_that_is_slower_than_its_lease_still_counts_if_nobody_took_over() -> None:
    clock = FakeClock()
    with Once("memory://", clock=clock) as once:

        def slow() -> int:
            clock.advance(61)
            return 7

        assert once.call("key", slow, lease=60, renew=False).value == 7
        assert once.call("key", int).value == 7


def test_a_claim_that_is_lost_while_its_work_goes_on_is_said_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """The renewer finds out first; the worker is told when it wants to record its outcome."""
    clock = FakeClock()
    with Once(NotedStore(clock)) as once:

        def work() -> str:
            clock.advance(61)
            granted(once.claim("key", lease=60))  # someone else takes over
            eventually(lambda: "is lost while its work goes on" in caplog.text)
            return "the zombie's"

        with caplog.at_level(logging.WARNING, "semel"), pytest.raises(ClaimLost):
            once.call("key", work, lease=0.03)
        record = once.get("key")
        assert record is not None
        assert record.status == "in_flight"


def test_the_renewer_outlives_a_store_that_is_away(caplog: pytest.LogCaptureFixture) -> None:
    store = NotedStore()
    with Once(store, retry_for=0) as once:

        def work() -> int:
            store.failures = [StoreUnavailable("gone for a moment")]
            for _ in range(3):
                assert store.renewed.acquire(timeout=PATIENCE)
            return 7

        assert once.call("key", work, lease=0.03).value == 7
    assert "the store of semel-renewer is unavailable; retrying" in caplog.text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("applied", [True, False])
def test_a_claim_without_a_reply_is_released_and_never_made_again(
    urls: StoreUrls, kind: str, key: str, applied: bool
) -> None:
    """Made again and then released, it would refuse a caller in between as a duplicate."""
    with Once(urls[kind]) as plain:
        store = FaultyStore(plain._engine.store)
        with Once(store, retry_for=0) as once:
            (store.lose_reply if applied else store.lose_request)("claim")
            with pytest.raises(StoreUnavailable):
                once.claim(key, lease=600)
            pending = once._engine._background.here().pending
            eventually(lambda: not pending.writes)
            assert store.calls["claim"] == 1
            assert store.calls["release"] == applied
            assert plain.get(key) is None


def test_all_leases_are_renewed_in_one_batch() -> None:
    """32 pieces of work at once cost one renewal each third of a lease, not 32."""
    batches: list[int] = []

    class Counting(MemoryStore):
        async def renew(self, requests: Sequence[Renew]) -> list[int | None]:
            batches.append(len(requests))
            return await super().renew(requests)

    everyone = threading.Barrier(32)

    def work() -> int:
        everyone.wait(PATIENCE)
        eventually(lambda: sum(batches) >= 64)
        return 7

    with Once(Counting()) as once, ThreadPoolExecutor(32) as threads:
        calls = [threads.submit(once.call, f"key {number}", work, lease=1.0) for number in range(32)]
        assert [call.result(PATIENCE).value for call in calls] == [7] * 32
    assert max(batches) > 1
    assert len(batches) < sum(batches)


def test_what_is_finished_is_renewed_no_more() -> None:
    store = NotedStore()
    with Once(store, policy=Policy(lease=0.03)) as once:
        once.call("done", int)
        with pytest.raises(ZeroDivisionError):
            once.call("failed", lambda: 1 // 0)
        assert once._engine._background.here().renewer.watched() == []


def test_a_claim_that_was_asked_for_by_hand_is_renewed_by_hand() -> None:
    clock = FakeClock()
    with Once(NotedStore(clock), policy=Policy(lease=60)) as once:
        claim = granted(once.claim("key"))
        assert once._engine._background.here().renewer.watched() == []
        clock.advance(30)
        renewed = once.renew(claim)
        assert renewed.fence == claim.fence
        assert renewed.lease_until_us == claim.lease_until_us + 30_000_000
        assert once.renew(renewed, lease=120).lease == 120


class Renewals:
    """A renewer whose time the test moves, and the store that it renews in."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(maintenance, "time", self)
        self.runtime = ByHand()
        self.clock = FakeClock()
        self.times: list[float] = []
        self.store = FaultyStore(MemoryStore(self.clock))
        self.renewer = Renewer(self.runtime, self._timed, idle=3.0)

    def monotonic(self) -> float:
        return self.now

    async def _timed(self, requests: Sequence[Renew]) -> list[int | None]:
        self.times.append(seconds_left())
        return await self.store.renew(requests)

    def watch(self, key: str, lease: float) -> Claim:
        claim = granted(Once(self.store, collect=False).claim(key, lease=lease))
        self.renewer.watch(claim)
        return claim

    def renewed(self, at: float) -> int:
        """How many times the store was asked to renew, when the task has ticked at this time."""
        before = self.store.calls["renew"]
        self.now = 1000.0 + at
        run_sync(self.renewer.tick())
        return self.store.calls["renew"] - before


@pytest.fixture
def renewals(monkeypatch: pytest.MonkeyPatch) -> Renewals:
    return Renewals(monkeypatch)


def test_a_lease_is_renewed_after_a_twentieth_or_half_of_that_if_others_are(renewals: Renewals) -> None:
    """The renewer sleeps until a twentieth of the lease is over; whatever is due soon is renewed with the rest."""
    claim = renewals.watch("key", lease=100.0)
    renewals.renewer._idle = 60.0
    assert renewals.renewer.pause() == pytest.approx(5.0)
    assert [renewals.renewed(at) for at in (0, 2.4, 2.5, 4.9, 5, 5.1)] == [0, 0, 1, 0, 1, 0]
    renewals.clock.advance(10)
    assert renewals.renewed(at=7.5) == 1
    record = Once(renewals.store, collect=False).get("key")
    assert record is not None
    assert record.lease_until_us == claim.lease_until_us + 10_000_000
    assert renewals.renewer.pause() == pytest.approx(5.0)


def test_a_renewal_that_failed_is_retried_after_a_hundredth_of_the_lease(renewals: Renewals) -> None:
    renewals.watch("key", lease=100.0)
    renewals.store.lose_request("renew")
    with pytest.raises(StoreUnavailable):
        renewals.renewed(at=5)
    assert renewals.renewer.pause() == pytest.approx(1.0)
    assert renewals.renewed(at=6) == 1


def test_a_renewal_may_take_a_third_of_what_is_left_of_the_shortest_lease(renewals: Renewals) -> None:
    renewals.watch("short", lease=12.0)
    renewals.watch("long", lease=15.0)
    assert [renewals.renewed(at) for at in (6, 15)] == [1, 1]
    assert renewals.times == [pytest.approx(2.0, abs=0.8), pytest.approx(1.0, abs=0.8)]


def test_without_claims_the_renewer_sleeps_and_is_woken_for_a_shorter_lease_alone(renewals: Renewals) -> None:
    assert renewals.runtime.started == []
    renewals.watch("first", lease=1000.0)
    assert renewals.runtime.started == ["semel-renewer"]
    assert not renewals.runtime.nudged()
    assert renewals.renewer.pause() == pytest.approx(3.0)
    renewals.watch("longer", lease=61.0)
    assert not renewals.runtime.nudged()
    renewals.watch("shorter", lease=59.0)
    assert renewals.runtime.nudged()
    assert renewals.runtime.started == ["semel-renewer"]


def test_a_lease_that_is_long_due_is_renewed_after_a_short_pause(renewals: Renewals) -> None:
    """Never at once: a store that fails would be asked without a break."""
    renewals.watch("key", lease=100.0)
    renewals.now += 50
    assert renewals.renewer.pause() == pytest.approx(0.02)


def test_nothing_is_renewed_inside_a_users_transaction(urls: StoreUrls, key: str) -> None:
    """A session belongs to one thread, and nobody else sees the claim before the commit anyway."""
    before = background_threads()
    engine = create_engine(make_url(urls["postgres"]).set(drivername="postgresql+psycopg"))
    with Once(urls["postgres"], collect=False) as once, Session(engine) as session:

        def work() -> set[threading.Thread]:
            return background_threads() - before

        assert once.on(session).call(key, lambda: len(work()), lease=0.03).value == 0
        session.commit()
        assert once.call(key, int).replayed
    engine.dispose()


def test_hooks_hear_every_verdict() -> None:
    heard: list[Any] = []
    with Once("memory://", on_event=heard.append) as once:
        once.call("key", int, scope="heard")
        once.call("key", int, scope="heard")
    assert [(event.name, event.scope, event.key, event.reason) for event in heard] == [
        ("miss", "heard", "key", "absent"),
        ("hit", "heard", "key", ""),
    ]


@pytest.mark.parametrize("world", [AsyncioRuntime, ThreadRuntime])
def test_background_work_inherits_neither_deadline_nor_claim_of_the_call_that_started_it(world: type[Runtime]) -> None:
    seen: list[tuple[float, object]] = []
    told = threading.Event()

    async def look() -> None:
        seen.append((seconds_left(60.0), current_claim(None)))
        told.set()

    async def scenario() -> None:
        once = AsyncOnce("memory://", collect=False)

        async def work() -> None:
            with deadline(0.001):
                world().spawn(look, "semel-look")

        await once.call("key", work)
        await asyncio.to_thread(told.wait, PATIENCE)

    asyncio.run(scenario())
    assert seen == [(60.0, None)]


# -- the sampler -----------------------------------------------------------------------------------------------------


def test_the_store_is_sampled_soon_and_then_at_the_shortest_interval() -> None:
    async def stats() -> Held:
        return Held()

    runtime = ByHand()
    sampler = Sampler(runtime, stats, StatsCounter())
    sampler.start()
    for interval in (30.0, 60.0):
        sampler.look_every(interval)
        assert runtime.nudged()
    assert [sampler.pause() for _ in range(3)] == [pytest.approx(pause, rel=0.11) for pause in (1.0, 30.0, 30.0)]
    hasty = Sampler(runtime, stats, StatsCounter())
    hasty.look_every(0.2)
    assert hasty.pause() == pytest.approx(0.2, rel=0.11)


@pytest.mark.parametrize("who", ["collector", "sampler"])
def test_whoever_runs_warns_of_what_was_counted(who: str, caplog: pytest.LogCaptureFixture) -> None:
    counters = StatsCounter()
    for _ in range(100):
        counters.note("hit", "default", "key")

    async def purge(limit: int) -> int:
        return 0

    async def stats() -> Held:
        return Held()

    task = Collector(ByHand(), 60.0, purge, counters) if who == "collector" else Sampler(ByHand(), stats, counters)
    run_sync(task.tick())
    assert "something upstream retries too eagerly" in caplog.text


def test_a_sample_is_reported_by_state_to_the_hooks_that_asked_for_it() -> None:
    class Meter:
        sample_every = 60.0

        def __init__(self) -> None:
            self.heard: dict[str, float] = {}

        def __call__(self, event: Any) -> None:
            self.heard[event.reason] = event.value

    async def stats() -> Held:
        return Held(in_flight=1, completed=5)

    counters, meter = StatsCounter(), Meter()
    counters.add_hook(meter)
    run_sync(Sampler(ByHand(), stats, counters).tick())
    assert meter.heard == {"in_flight": 1, "abandoned": 0, "unknown": 0, "completed": 5, "expired": 0}
