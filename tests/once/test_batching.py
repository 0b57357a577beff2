"""Concurrent calls leave together: fewer round trips, the right answer to each caller, and nobody harmed by another."""

import asyncio
import gc
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from semel import AsyncOnce, Claim, Granted, InFlight, Once, Replay, SemelError, StoreUnavailable, Unknown, Verdict
from semel._concurrency.batching import LARGEST
from semel.once.store import ClaimRequest, Complete, Release
from semel.once.stores.memory import MemoryStore
from semel.testing import FakeClock
from support.waiting import eventually

PATIENCE = 60
"""Seconds after which something that should have happened counts as hanging."""


class FarStore:
    """Memory that is a round trip away: every claim passes a gate, and every batch is noted."""

    coalesce = True

    def __init__(self) -> None:
        self._memory = MemoryStore()
        self.batches: list[list[str]] = []
        self.completed: list[int] = []
        self.released: list[str] = []
        self.errors: dict[str, Exception] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)

    async def claim(self, requests: Sequence[ClaimRequest]) -> list[Verdict]:
        self.batches.append([request.key for request in requests])
        await self.gate()
        for request in requests:
            if request.key in self.errors:
                raise self.errors[request.key]
        return await self._memory.claim(requests)

    async def complete(self, requests: Sequence[Complete]) -> list[bool]:
        self.completed.append(len(requests))
        return await self._memory.complete(requests)

    async def release(self, requests: Sequence[Release]) -> list[bool]:
        self.released += [request.key for request in requests]
        return await self._memory.release(requests)

    async def gate(self) -> None:
        """Nothing to wait for."""


class LoopStore(FarStore):
    """It answers in a later turn of the loop, as everything does that is far away."""

    async def gate(self) -> None:
        await asyncio.sleep(0)

    async def complete(self, requests: Sequence[Complete]) -> list[bool]:
        await asyncio.sleep(0)
        return await super().complete(requests)


class ThreadGate(FarStore):
    """Holds up each batch until the test lets it pass."""

    def __init__(self) -> None:
        super().__init__()
        self.arrived = threading.Semaphore(0)
        self.passes = threading.Semaphore(0)

    async def gate(self) -> None:
        self.arrived.release()
        assert self.passes.acquire(timeout=PATIENCE)

    def wait_for_a_batch(self) -> None:
        assert self.arrived.acquire(timeout=PATIENCE)

    def let_pass(self, batches: int = 1) -> None:
        self.passes.release(batches)


class LoopGate(FarStore):
    """The same for an event loop."""

    def __init__(self) -> None:
        super().__init__()
        self.arrived = asyncio.Semaphore(0)
        self.passes = asyncio.Semaphore(0)

    async def gate(self) -> None:
        self.arrived.release()
        await self.passes.acquire()

    async def wait_for_a_batch(self) -> None:
        await asyncio.wait_for(self.arrived.acquire(), PATIENCE)

    def let_pass(self, batches: int = 1) -> None:
        for _ in range(batches):
            self.passes.release()


def gathered(once: Once, number: int) -> Callable[[], bool]:
    """True when so many threads wait for the next batch."""
    lane: Any = once._engine._send_claim
    return lambda: len(lane._waiting) == number


@contextmanager
def crowd(size: int) -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(size) as threads:
        yield threads


def granted(verdict: object) -> Claim:
    assert isinstance(verdict, Granted)
    return verdict.claim


# -- threads ---------------------------------------------------------------------------------------------------------


def test_a_lone_call_leaves_at_once_by_itself() -> None:
    store = FarStore()
    once = Once(store, collect=False)
    for key in ("a", "b", "c"):
        granted(once.claim(key))
    assert store.batches == [["a"], ["b"], ["c"]]


def test_threads_that_come_meanwhile_leave_together() -> None:
    """64 calls: the first alone, the 63 that gathered behind it in one flush; each gets its own answer."""
    store = ThreadGate()
    once = Once(store, collect=False)
    with crowd(64) as threads:
        first = threads.submit(once.claim, "key 0")
        store.wait_for_a_batch()
        others = [threads.submit(once.claim, f"key {number}") for number in range(1, 64)]
        eventually(gathered(once, 63))
        store.let_pass(2)
        verdicts = [call.result(PATIENCE) for call in [first, *others]]
    assert [len(batch) for batch in store.batches] == [1, 63]
    assert [granted(verdict).key for verdict in verdicts] == [f"key {number}" for number in range(64)]


def test_a_batch_has_a_largest_size() -> None:
    store = ThreadGate()
    once = Once(store, collect=False)
    number = LARGEST + 20
    with crowd(number) as threads:
        calls = [threads.submit(once.claim, f"key {at}") for at in range(number)]
        store.wait_for_a_batch()
        eventually(gathered(once, number - 1))
        store.let_pass(3)
        keys = [granted(call.result(PATIENCE)).key for call in calls]
    assert sorted(keys) == sorted(f"key {at}" for at in range(number))
    assert [len(batch) for batch in store.batches] == [1, LARGEST, 19]


def test_calls_of_one_key_in_one_batch_have_one_winner() -> None:
    store = ThreadGate()
    once = Once(store, collect=False)
    with crowd(33) as threads:
        calls = [threads.submit(once.claim, "first")]
        store.wait_for_a_batch()
        calls = [threads.submit(once.claim, "wanted by all") for _ in range(32)]
        eventually(gathered(once, 32))
        store.let_pass(2)
        kinds = [type(call.result(PATIENCE)) for call in calls]
    assert kinds.count(Granted) == 1
    assert kinds.count(InFlight) == 31


def test_an_error_of_one_request_fails_none_of_its_neighbours() -> None:
    store = ThreadGate()
    store.errors["bad"] = SemelError("this one cannot be had")
    once = Once(store, collect=False)
    with crowd(8) as threads:
        first = threads.submit(once.claim, "first")
        store.wait_for_a_batch()
        batch = [threads.submit(once.claim, key) for key in ("a", "bad", "b")]
        eventually(gathered(once, 3))
        store.let_pass()
        store.wait_for_a_batch()
        after = [threads.submit(once.claim, key) for key in ("c", "d")]
        eventually(gathered(once, 2))
        store.let_pass(6)
        granted(first.result(PATIENCE))
        assert [granted(batch[place].result(PATIENCE)).key for place in (0, 2)] == ["a", "b"]
        with pytest.raises(SemelError, match="this one cannot be had"):
            batch[1].result(PATIENCE)
        assert [granted(call.result(PATIENCE)).key for call in after] == ["c", "d"]
    assert len(store.batches) == 7, "the first, three and their halves, and those who came after"


def test_a_store_that_raises_what_it_should_not_leaves_the_lane_usable() -> None:
    """Not every error is ours; whatever it is, its caller gets it, and the next call goes through."""
    store = FarStore()
    store.errors["bad"] = ZeroDivisionError("a bug in the store")
    once = Once(store, collect=False)
    for key in ("a", "b"):
        with pytest.raises(ZeroDivisionError):
            once.claim("bad")
        granted(once.claim(key))


def test_no_thread_works_for_the_others_for_ever() -> None:
    """A leader flushes the batch with its own call and is done, however many come after."""
    store = ThreadGate()
    once = Once(store, collect=False)
    with crowd(8) as threads:
        first = threads.submit(once.claim, "first")
        store.wait_for_a_batch()
        second = [threads.submit(once.claim, f"second {number}") for number in range(3)]
        eventually(gathered(once, 3))
        store.let_pass()
        granted(first.result(PATIENCE))  # while the second batch is still held up
        store.wait_for_a_batch()
        assert not any(call.done() for call in second)
        store.let_pass()
        assert all(granted(call.result(PATIENCE)) for call in second)


def test_a_leader_that_is_interrupted_hands_over() -> None:
    """Ctrl-C in the thread whose flush is under way: it goes, and those who gathered meanwhile are served."""
    store = ThreadGate()
    once = Once(store, collect=False)
    usual = store.gate

    async def interrupted() -> None:
        store.gate = usual  # type: ignore[method-assign]
        await usual()
        signal.raise_signal(signal.SIGINT)

    store.gate = interrupted  # type: ignore[method-assign]
    with crowd(5) as threads:

        def gather() -> list[Future[Verdict]]:
            store.wait_for_a_batch()
            calls = [threads.submit(once.claim, f"other {number}") for number in range(4)]
            eventually(gathered(once, 4))
            store.let_pass(2)
            return calls

        gathering = threads.submit(gather)
        with pytest.raises(KeyboardInterrupt):
            once.claim("interrupted")
        verdicts = [call.result(PATIENCE) for call in gathering.result(PATIENCE)]
    assert sorted(granted(verdict).key for verdict in verdicts) == [f"other {number}" for number in range(4)]
    store.let_pass()
    granted(once.claim("afterwards"))


def test_those_whom_an_interrupted_leader_carried_are_told_to_try_again() -> None:
    """Whether their calls arrived is not known to them: that is an error, not a grant, and a second try is safe."""
    store = ThreadGate()
    once = Once(store, collect=False)
    usual = store.gate
    with crowd(5) as threads:
        first = threads.submit(once.claim, "first")
        store.wait_for_a_batch()

        async def interrupted() -> None:
            store.gate = usual  # type: ignore[method-assign]
            assert threading.current_thread() is threading.main_thread()
            raise KeyboardInterrupt

        def gather() -> list[Future[Verdict]]:
            eventually(gathered(once, 1))  # the main thread waits, first in the queue, so it will lead
            calls = [threads.submit(once.claim, f"carried {number}") for number in range(2)]
            eventually(gathered(once, 3))
            store.gate = interrupted  # type: ignore[method-assign]
            store.let_pass()
            return calls

        gathering = threads.submit(gather)
        with pytest.raises(KeyboardInterrupt):
            once.claim("interrupted")
        granted(first.result(PATIENCE))
        for call in gathering.result(PATIENCE):
            with pytest.raises(StoreUnavailable, match="try again"):
                call.result(PATIENCE)
        store.let_pass(100)  # also for the claims of unknown fate, which are given back
        assert granted(once.claim("carried 2")).key == "carried 2"


def test_who_waits_and_is_interrupted_leaves_without_harm() -> None:
    """Ctrl-C in a thread that only waits for its turn: it goes, and everyone else is served."""
    store = ThreadGate()
    once = Once(store, collect=False)
    with crowd(4) as threads:
        first = threads.submit(once.claim, "first")
        store.wait_for_a_batch()
        others = [threads.submit(once.claim, f"other {number}") for number in range(2)]
        eventually(gathered(once, 2))

        def interrupt() -> None:
            eventually(gathered(once, 3))
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, signal.SIGINT)

        interrupting = threads.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            once.claim("interrupted")
        interrupting.result(PATIENCE)
        assert gathered(once, 2)()
        store.let_pass(2)
        assert [granted(call.result(PATIENCE)).key for call in [first, *others]] == ["first", "other 0", "other 1"]
    assert ["interrupted"] not in store.batches


# -- tasks -----------------------------------------------------------------------------------------------------------


def test_tasks_that_come_meanwhile_leave_together() -> None:
    async def scenario() -> None:
        store = LoopStore()
        async with AsyncOnce(store, collect=False) as once:
            verdicts = await asyncio.gather(*(once.claim(f"key {number}") for number in range(256)))
            assert [granted(verdict).key for verdict in verdicts] == [f"key {number}" for number in range(256)]
            assert sum(len(batch) for batch in store.batches) == 256
            assert len(store.batches) <= 4

            await asyncio.gather(*(once.complete(granted(verdict), 7) for verdict in verdicts))
            assert sum(store.completed) == 256
            assert len(store.completed) <= 4
            replays = await asyncio.gather(*(once.claim(f"key {number}") for number in range(256)))
            assert all(isinstance(replay, Replay) for replay in replays)

    asyncio.run(scenario())


def test_a_lone_task_leaves_at_once_by_itself() -> None:
    async def scenario() -> list[list[str]]:
        store = LoopStore()
        async with AsyncOnce(store, collect=False) as once:
            for key in ("a", "b", "c"):
                granted(await once.claim(key))
        return store.batches

    assert asyncio.run(scenario()) == [["a"], ["b"], ["c"]]


def test_a_task_batch_has_a_largest_size_too() -> None:
    async def scenario() -> None:
        store = LoopStore()
        number = 2 * LARGEST + 20
        async with AsyncOnce(store, collect=False) as once:
            verdicts = await asyncio.gather(*(once.claim(f"key {at}") for at in range(number)))
        assert [granted(verdict).key for verdict in verdicts] == [f"key {at}" for at in range(number)]
        assert max(len(batch) for batch in store.batches) <= LARGEST

    asyncio.run(scenario())


def test_guarded_calls_of_many_tasks_are_all_answered() -> None:
    """Claims and outcomes of the same tasks cross each other in their lanes; nobody is left waiting."""

    async def scenario() -> None:
        store = LoopStore()
        ran: list[str] = []

        async def work(key: str) -> str:
            await asyncio.sleep(0)
            ran.append(key)
            return key

        async def call_all(once: AsyncOnce, caller: int) -> list[str]:
            keys = [name for at in range(6) for name in (f"{caller} {at}", f"shared {at}")]
            return [(await once.call(key, lambda key=key: work(key))).value for key in keys]  # type: ignore[misc]

        async with AsyncOnce(store, collect=False) as once:
            answers = await asyncio.wait_for(
                asyncio.gather(*(call_all(once, caller) for caller in range(64))), PATIENCE
            )
        for caller, values in enumerate(answers):
            assert values == [name for at in range(6) for name in (f"{caller} {at}", f"shared {at}")]
        assert len(ran) == len(set(ran)) == 64 * 6 + 6

    asyncio.run(scenario())


def test_an_error_of_one_request_fails_no_task_beside_it() -> None:
    async def scenario() -> None:
        store = LoopGate()
        store.errors["bad"] = SemelError("this one cannot be had")
        once = AsyncOnce(store, collect=False)
        first = asyncio.create_task(once.claim("first"))
        await store.wait_for_a_batch()
        batch = [asyncio.create_task(once.claim(key)) for key in ("a", "bad", "b")]
        await turns()
        store.let_pass()
        await store.wait_for_a_batch()
        after = [asyncio.create_task(once.claim(key)) for key in ("c", "d")]
        await turns()
        store.let_pass(6)
        granted(await first)
        one, bad, other = await asyncio.gather(*batch, return_exceptions=True)
        assert [granted(answer).key for answer in (one, other) if not isinstance(answer, BaseException)] == ["a", "b"]
        assert isinstance(bad, SemelError)
        assert [granted(await task).key for task in after] == ["c", "d"]
        halves = [["a"], ["bad", "b"], ["bad"], ["b"]]
        assert store.batches == [["first"], ["a", "bad", "b"], *halves, ["c", "d"]]

    asyncio.run(scenario())


async def turns(number: int = 5) -> None:
    """Let the other tasks run until they wait for something."""
    for _ in range(number):
        await asyncio.sleep(0)


@pytest.mark.parametrize("who", ["the first", "one of the others"])
def test_a_cancelled_task_takes_nobody_with_it_and_its_claim_is_given_back(who: str) -> None:
    """Its call may be on the way already: what it is granted there is released, and the key is free again."""

    async def scenario() -> None:
        store = LoopGate()
        once = AsyncOnce(store, collect=False)
        first = asyncio.create_task(once.claim("first"))
        await store.wait_for_a_batch()
        others = {key: asyncio.create_task(once.claim(key)) for key in ("a", "b", "c")}
        await turns()
        victim, key = (first, "first") if who == "the first" else (others.pop("b"), "b")
        if who != "the first":
            store.let_pass()
            await store.wait_for_a_batch()  # the batch with the victim's call is on its way
        victim.cancel()
        store.let_pass(10)
        with pytest.raises(asyncio.CancelledError):
            await victim
        for name, task in others.items():
            assert granted(await task).key == name
        await asyncio.wait_for(freed(once, key), PATIENCE)
        granted(await once.claim(key))
        await once.close()

    asyncio.run(scenario())


def test_a_claim_that_is_granted_long_after_its_task_was_cancelled_is_given_back() -> None:
    """What is done at once about a cancelled claim finds nothing: the claim is still on its way."""

    async def scenario() -> None:
        store = LoopGate()
        once = AsyncOnce(store, collect=False)
        first = asyncio.create_task(once.claim("first"))
        await store.wait_for_a_batch()
        victim = asyncio.create_task(once.claim("victim"))
        await turns()
        store.let_pass()
        granted(await first)
        await store.wait_for_a_batch()  # the victim's call is on its way
        victim.cancel()
        with pytest.raises(asyncio.CancelledError):
            await victim
        pending = once._engine._background.here().pending
        while pending.writes:
            await turns()
        assert await once.get("victim") is None
        store.let_pass()
        await asyncio.to_thread(eventually, lambda: "victim" in store.released)
        assert await once.get("victim") is None
        await once.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("alone", [True, False])
def test_a_cancelled_task_that_resolves_a_key_leaves_it_unknown(alone: bool) -> None:
    """Were its claim given back like any other, the key would be free, and the lost work would be done again."""

    async def scenario() -> None:
        store, clock = LoopGate(), FakeClock()
        store._memory = MemoryStore(clock)
        once = AsyncOnce(store, collect=False)
        store.let_pass()
        granted(await once.claim("lost", lease=60, on_crash="unknown"))
        await store.wait_for_a_batch()
        clock.advance(61)
        if not alone:
            beside = asyncio.create_task(once.claim("beside"))
            await store.wait_for_a_batch()
        resolver = asyncio.create_task(once.resolve("lost", done=True))
        await turns()
        if not alone:
            store.let_pass()
            granted(await beside)
        await store.wait_for_a_batch()  # the resolver's claim is on its way
        resolver.cancel()
        store.let_pass(10)
        with pytest.raises(asyncio.CancelledError):
            await resolver
        await turns(20)  # for what a cancelled task leaves to the background
        clock.advance(3600)  # longer than the lease of the claim that resolves
        assert isinstance(await once.claim("lost"), Unknown)
        await once.close()

    asyncio.run(scenario())


async def freed(once: AsyncOnce, key: str) -> None:
    """Until the key is given back: that is done in the background, which tells nobody."""
    while await once.get(key) is not None:
        await turns()


def test_a_task_that_is_cancelled_in_the_turn_of_its_answer_gives_its_claim_back() -> None:
    async def scenario() -> None:
        store = LoopGate()
        once = AsyncOnce(store, collect=False)
        first = asyncio.create_task(once.claim("first"))
        await store.wait_for_a_batch()
        victim = asyncio.create_task(once.claim("victim"))
        await turns()

        usual = store.gate

        async def gate() -> None:
            await usual()
            asyncio.get_running_loop().call_soon(victim.cancel)  # before the answered task wakes up

        store.gate = gate  # type: ignore[method-assign]
        store.let_pass(10)
        granted(await first)
        with pytest.raises(asyncio.CancelledError):
            await victim
        assert store.batches == [["first"], ["victim"]]
        await asyncio.wait_for(freed(once, "victim"), PATIENCE)
        await once.close()

    asyncio.run(scenario())


def test_a_cancelled_completion_is_seen_through() -> None:
    """The work is done; that its caller went away is no reason to forget the outcome."""

    async def scenario() -> None:
        store = LoopStore()
        reached, passes = asyncio.Event(), asyncio.Event()
        usual = store.complete

        async def complete(requests: Sequence[Complete]) -> list[bool]:
            reached.set()
            await passes.wait()
            return await usual(requests)

        store.complete = complete  # type: ignore[method-assign]
        once = AsyncOnce(store, collect=False)
        claim = granted(await once.claim("key"))
        completing = asyncio.create_task(once.complete(claim, 7))
        await reached.wait()
        completing.cancel()
        passes.set()
        with pytest.raises(asyncio.CancelledError):
            await completing
        await asyncio.wait_for(completed(once, "key"), PATIENCE)
        await once.close()

    asyncio.run(scenario())


async def completed(once: AsyncOnce, key: str) -> None:
    while not isinstance(await once.claim(key), Replay):
        await turns()


def test_cancelled_work_gives_its_key_back() -> None:
    """The guarded function itself is cancelled: the key is free for the next caller at once."""

    async def scenario() -> None:
        once = AsyncOnce(LoopStore(), collect=False)
        started = asyncio.Event()

        async def work() -> int:
            started.set()
            await asyncio.Event().wait()
            return 7

        task = asyncio.create_task(once.call("key", work))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await once.get("key") is None
        await once.close()

    asyncio.run(scenario())


def test_two_event_loops_at_once_are_both_served() -> None:
    """Each has a queue of its own: a call in the one does not wait for a flush of the other."""
    store = ThreadGate()
    once = AsyncOnce(store, collect=False)
    with crowd(2) as threads:
        there = threads.submit(asyncio.run, once.claim("there"))
        store.wait_for_a_batch()
        here = threads.submit(asyncio.run, once.claim("here"))
        store.wait_for_a_batch()
        store.let_pass()
        store.let_pass()
        granted(there.result(PATIENCE))
        granted(here.result(PATIENCE))


def test_one_event_loop_after_the_other_is_fine() -> None:
    once = AsyncOnce(LoopStore(), collect=False)
    for key in ("a", "b"):
        granted(asyncio.run(once.claim(key)))


@pytest.mark.filterwarnings("error")
def test_a_loop_that_ends_in_the_middle_of_a_call_leaves_no_noise(caplog: pytest.LogCaptureFixture) -> None:
    """Ctrl-C, a failed neighbour: asyncio.run cancels what is under way, and nothing complains about it afterwards."""

    async def scenario() -> None:
        store = LoopGate()
        once = AsyncOnce(store, collect=False)
        tasks = [asyncio.create_task(once.claim(f"key {number}")) for number in range(3)]
        await store.wait_for_a_batch()
        await turns()
        assert not any(task.done() for task in tasks)

    asyncio.run(scenario())
    gc.collect()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


def test_a_store_that_is_away_tells_everyone_in_the_batch() -> None:
    async def scenario() -> None:
        store = LoopGate()
        store.errors["a"] = StoreUnavailable("gone")
        once = AsyncOnce(store, collect=False, retry_for=0)
        first = asyncio.create_task(once.claim("first"))
        await store.wait_for_a_batch()
        batch = [asyncio.create_task(once.claim(key)) for key in ("a", "b")]
        await turns()
        store.let_pass(2)
        granted(await first)
        answers = await asyncio.gather(*batch, return_exceptions=True)
        assert [type(answer) for answer in answers] == [StoreUnavailable] * 2
        assert await once.get("b") is None

    asyncio.run(scenario())
