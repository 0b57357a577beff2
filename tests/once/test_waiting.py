"""Who waits for a key is woken when its owner is done, gives up or dies; and never waits longer than it said.

Where it matters that a waiter was woken, polling is made so slow that a poll cannot have done it.
"""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from typing import Any

import psycopg
import pytest
import redis
from sqlalchemy import create_engine, make_url
from sqlalchemy.orm import Session

from semel import AsyncOnce, Claim, ClaimLost, Granted, InFlight, InProgress, KeyReused, Once, Replay, Unknown
from semel.once import engine
from semel.once.stores.memory import MemoryStore
from semel.testing import FakeClock
from support.databases import KINDS, StoreUrls
from support.programs import Program
from support.waiting import eventually

PATIENCE = 60
"""Seconds after which something that should have happened counts as hanging."""

names = count()


@pytest.fixture
def key() -> str:
    return f"key {next(names)}"


@pytest.fixture
def no_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiter that is not woken sleeps for ten minutes."""
    monkeypatch.setattr(engine, "_FIRST_POLL", 600.0)
    monkeypatch.setattr(engine, "_LAST_POLL", 600.0)


EVERY_STORE = pytest.mark.parametrize("kind", KINDS)


def granted(verdict: object) -> Claim:
    assert isinstance(verdict, Granted)
    return verdict.claim


def waits(once: Once | AsyncOnce, number: int = 1) -> Callable[[], bool]:
    """True when so many callers of this object wait for some key."""
    bell = once._engine._waiters
    return lambda: sum(map(len, list(bell._waiting.values()))) == number


# -- in one process --------------------------------------------------------------------------------------------------


@EVERY_STORE
@pytest.mark.parametrize("end", ["complete", "release"])
@pytest.mark.usefixtures("no_polling")
def test_a_thread_is_woken_when_the_owner_ends_its_claim(urls: StoreUrls, kind: str, key: str, end: str) -> None:
    with Once(urls[kind]) as once, ThreadPoolExecutor(1) as thread:
        claim = granted(once.claim(key))
        waiting = thread.submit(once.claim, key, wait=PATIENCE)
        eventually(waits(once))
        once.complete(claim, 7) if end == "complete" else once.release(claim)
        verdict = waiting.result(PATIENCE)
        if end == "complete":
            assert isinstance(verdict, Replay)
            assert verdict.outcome.value == 7
        else:
            assert granted(verdict).fence > claim.fence


@EVERY_STORE
@pytest.mark.parametrize("end", ["complete", "release"])
@pytest.mark.usefixtures("no_polling")
def test_a_task_is_woken_when_the_owner_ends_its_claim(urls: StoreUrls, kind: str, key: str, end: str) -> None:
    async def scenario() -> None:
        async with AsyncOnce(urls[kind]) as once:
            claim = granted(await once.claim(key))
            waiting = asyncio.create_task(once.claim(key, wait=PATIENCE))
            await asyncio.to_thread(eventually, waits(once))
            await (once.complete(claim, 7) if end == "complete" else once.release(claim))
            verdict = await asyncio.wait_for(waiting, PATIENCE)
            assert isinstance(verdict, Replay if end == "complete" else Granted)

    asyncio.run(scenario())


@EVERY_STORE
def test_many_duplicates_wait_for_one_result(urls: StoreUrls, kind: str, key: str) -> None:
    """B18: 32 callers, one execution, and everyone has its value; nobody gave up."""
    started, go_on = threading.Event(), threading.Event()
    ran: list[int] = []

    def work() -> int:
        ran.append(1)
        started.set()
        assert go_on.wait(PATIENCE)
        return 7

    with Once(urls[kind]) as once, ThreadPoolExecutor(32) as threads:
        calls = [threads.submit(once.call, key, work, wait=PATIENCE) for _ in range(32)]
        assert started.wait(PATIENCE)
        eventually(waits(once, 31))
        go_on.set()
        results = [call.result(PATIENCE) for call in calls]
    assert ran == [1]
    assert [result.value for result in results] == [7] * 32
    assert Counter(result.replayed for result in results) == {True: 31, False: 1}


@EVERY_STORE
@pytest.mark.usefixtures("no_polling")
def test_when_the_owner_gives_up_one_waiter_takes_over_and_the_rest_go_on_waiting(
    urls: StoreUrls, kind: str, key: str
) -> None:
    """Each owner fails in turn, until one succeeds; all the others get its value, none is left behind."""
    started = threading.Semaphore(0)
    go_on = threading.Semaphore(0)
    failing = [ValueError("one"), ValueError("two")]
    fences: list[int] = []

    def work() -> int:
        started.release()
        assert go_on.acquire(timeout=PATIENCE)
        if failing:
            raise failing.pop()
        return 7

    with Once(urls[kind]) as once, ThreadPoolExecutor(8) as threads:
        calls = [threads.submit(once.call, key, work, wait=PATIENCE) for _ in range(8)]
        for waiting in (7, 6, 5):
            assert started.acquire(timeout=PATIENCE)
            eventually(waits(once, waiting))
            record = once.get(key)
            assert record is not None
            fences.append(record.fence)
            go_on.release()
        failures = [call.exception(PATIENCE) for call in calls]
        assert Counter(type(failure) for failure in failures) == {type(None): 6, ValueError: 2}
        values = [call.result().value for call, failure in zip(calls, failures, strict=True) if failure is None]
        assert values == [7] * 6
    assert fences == sorted(set(fences))


@EVERY_STORE
def test_a_waiter_takes_over_when_the_owner_dies(urls: StoreUrls, kind: str, key: str) -> None:
    """Nobody rings for the dead: the waiter looks again when the lease ends, and works under a higher fence."""
    with Once(urls[kind]) as once:
        dead = granted(once.claim(key, lease=0.3))
        result = once.call(key, lambda: 7, wait=PATIENCE)
        assert (result.value, result.replayed) == (7, False)
        assert result.fence > dead.fence
        with pytest.raises(ClaimLost):
            once.complete(dead, "the dead come back")


@EVERY_STORE
def test_of_many_waiters_one_takes_over_from_the_dead(urls: StoreUrls, kind: str, key: str) -> None:
    ran: list[int] = []

    def work() -> int:
        ran.append(1)
        return 7

    with Once(urls[kind]) as once, ThreadPoolExecutor(16) as threads:
        granted(once.claim(key, lease=0.3))
        calls = [threads.submit(once.call, key, work, wait=PATIENCE) for _ in range(16)]
        assert [call.result(PATIENCE).value for call in calls] == [7] * 16
    assert ran == [1]


def test_a_waiter_learns_that_the_outcome_is_unknown() -> None:
    """The lease ended on the store's clock; with on_crash="unknown" nobody takes over, and nobody goes on waiting."""
    clock = FakeClock()
    with Once("memory://", clock=clock) as once, ThreadPoolExecutor(1) as thread:
        granted(once.claim("key", lease=10, on_crash="unknown"))
        waiting = thread.submit(once.claim, "key", wait=PATIENCE)
        eventually(waits(once))
        clock.advance(10)
        assert isinstance(waiting.result(PATIENCE), Unknown)


def test_a_waiter_with_other_content_does_not_wait() -> None:
    with Once("memory://") as once:
        granted(once.claim("key", fingerprint="1:a"))
        with pytest.raises(KeyReused):
            once.call("key", int, fingerprint="1:b", wait=PATIENCE)


@EVERY_STORE
def test_a_waiter_gives_up_at_its_deadline(urls: StoreUrls, kind: str, key: str) -> None:
    """It says when to come back; the owner is not disturbed."""
    with Once(urls[kind]) as once:
        claim = granted(once.claim(key, lease=PATIENCE))
        with pytest.raises(InProgress) as refused:
            once.call(key, int, wait=0.1)
        assert 0 < refused.value.retry_after <= PATIENCE
        assert isinstance(once.claim(key, wait=0.05), InFlight)
        once.complete(claim, 7)
        assert once.call(key, int).value == 7
        assert waits(once, 0)(), "nobody is left on the bell"


@EVERY_STORE
def test_a_task_gives_up_at_its_deadline_or_when_it_is_cancelled(urls: StoreUrls, kind: str, key: str) -> None:
    async def work() -> int:
        return 8

    async def scenario() -> None:
        async with AsyncOnce(urls[kind]) as once:
            claim = granted(await once.claim(key, lease=PATIENCE))
            with pytest.raises(InProgress):
                await once.call(key, work, wait=0.1)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(once.call(key, work, wait=PATIENCE), 0.1)
            assert waits(once, 0)()
            await once.complete(claim, 7)
            assert (await once.call(key, work)).value == 7

    asyncio.run(scenario())


@EVERY_STORE
def test_a_conflict_does_not_wait_at_all(urls: StoreUrls, kind: str, key: str) -> None:
    with Once(urls[kind]) as once:
        granted(once.claim(key))
        with pytest.raises(InProgress, match="being worked on; retry in"):
            once.call(key, int, in_flight="conflict", wait=PATIENCE)


def test_two_objects_over_one_memory_store_wake_each_other() -> None:
    """A blocking owner and an event loop that waits, over the same store: the waiter polls, since it is not rung."""
    store = MemoryStore()
    owner = Once(store, collect=False)
    claim = granted(owner.claim("key"))

    async def scenario() -> Any:
        once = AsyncOnce(store, collect=False)
        waiting = asyncio.create_task(once.claim("key", wait=PATIENCE))
        await asyncio.to_thread(eventually, waits(once))
        owner.complete(claim, 7)
        return await asyncio.wait_for(waiting, PATIENCE)

    verdict = asyncio.run(scenario())
    assert isinstance(verdict, Replay)


# -- across processes ------------------------------------------------------------------------------------------------

OWNER = """
from semel import Granted, Once
with Once(url) as once:
    verdict = once.claim(key)
    assert isinstance(verdict, Granted)
    tell("claimed")
    hear()
    once.complete(verdict.claim, 7) if end == "complete" else once.release(verdict.claim)
    tell("ended")
    hear()
"""


@contextmanager
def owner(url: str, key: str, end: str) -> Iterator[Callable[[], None]]:
    """Another process holds the key, and ends its claim when told to."""
    with Program(OWNER, url=url, key=key, end=end) as program:
        assert program.hear() == "claimed"

        def end_the_claim() -> None:
            program.tell()
            assert program.hear() == "ended"

        yield end_the_claim


def hears(kind: str, url: str) -> bool:
    """True when a listener is connected: before that, only a poll can help."""
    if kind == "redis":
        with redis.Redis.from_url(url) as client:
            return bool(dict(client.pubsub_numsub("semel:ended"))[b"semel:ended"])
    with psycopg.connect(url) as connection:
        row = connection.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'semel-listener' "
            "AND datname = current_database() AND state = 'idle' AND query LIKE 'LISTEN%'"
        ).fetchone()
    return row is not None and row[0] > 0


def unheard(kind: str, urls: StoreUrls) -> str:
    """The URL, when nobody listens there any more: a listener that was stopped ends in its own time."""
    eventually(lambda: not hears(kind, urls[kind]))
    return urls[kind]


def marked(kind: str, url: str, key: str) -> bool:
    """True when the store knows that someone waits for the key, and so will ring."""
    if kind == "redis":
        with redis.Redis.from_url(url) as client:
            return any(client.hget(name, "awaited") for name in client.scan_iter(match=f"semel:*:{key}"))
    with psycopg.connect(url) as connection:
        row = connection.execute("SELECT awaited FROM semel_keys WHERE key = %s", [key]).fetchone()
    return row == (True,)


@pytest.mark.parametrize("kind", ["redis", "postgres"])
@pytest.mark.parametrize("end", ["complete", "release"])
@pytest.mark.usefixtures("no_polling")
def test_a_thread_is_woken_by_another_process(urls: StoreUrls, kind: str, key: str, end: str) -> None:
    url = unheard(kind, urls)
    with Once(url) as once, ThreadPoolExecutor(1) as thread, owner(url, key, end) as end_the_claim:
        waiting = thread.submit(once.claim, key, wait=PATIENCE)
        eventually(lambda: hears(kind, url) and marked(kind, url, key))
        end_the_claim()
        assert isinstance(waiting.result(PATIENCE / 2), Replay if end == "complete" else Granted)


@pytest.mark.parametrize("kind", ["redis", "postgres"])
@pytest.mark.parametrize("end", ["complete", "release"])
@pytest.mark.usefixtures("no_polling")
def test_a_task_is_woken_by_another_process(urls: StoreUrls, kind: str, key: str, end: str) -> None:
    url = unheard(kind, urls)

    async def scenario(end_the_claim: Callable[[], None]) -> None:
        async with AsyncOnce(url) as once:
            waiting = asyncio.create_task(once.claim(key, wait=PATIENCE))
            await asyncio.to_thread(eventually, lambda: hears(kind, url) and marked(kind, url, key))
            await asyncio.to_thread(end_the_claim)
            verdict = await asyncio.wait_for(waiting, PATIENCE / 2)
            assert isinstance(verdict, Replay if end == "complete" else Granted)

    with owner(url, key, end) as end_the_claim:
        asyncio.run(scenario(end_the_claim))


def test_a_waiter_on_a_file_finds_out_by_looking(urls: StoreUrls, key: str) -> None:
    """A file cannot ring; the poll behind every wait finds the outcome of another process."""
    url = urls["sqlite"]
    with Once(url) as once, ThreadPoolExecutor(1) as thread, owner(url, key, "complete") as end_the_claim:
        waiting = thread.submit(once.claim, key, wait=PATIENCE)
        eventually(waits(once))
        end_the_claim()
        assert isinstance(waiting.result(PATIENCE), Replay)


@pytest.mark.parametrize("kind", ["redis", "postgres"])
def test_a_ring_that_was_missed_is_made_up_for_by_looking(
    urls: StoreUrls, kind: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The listener cannot connect; a wait takes a little longer, and still ends."""
    url = urls[kind]
    with Once(url) as once, ThreadPoolExecutor(1) as thread, owner(url, key, "release") as end_the_claim:
        monkeypatch.setattr(once._engine.store, "_listener", None)
        waiting = thread.submit(once.claim, key, wait=PATIENCE)
        eventually(waits(once))
        end_the_claim()
        assert isinstance(waiting.result(PATIENCE), Granted)


@pytest.mark.usefixtures("no_polling")
def test_a_completion_in_a_users_transaction_wakes_waiters_when_it_commits(urls: StoreUrls, key: str) -> None:
    url = unheard("postgres", urls)
    database = create_engine(make_url(url).set(drivername="postgresql+psycopg"))
    with Once(url) as once, ThreadPoolExecutor(1) as thread, Session(database) as session:
        claim = granted(once.claim(key))
        waiting = thread.submit(once.claim, key, wait=PATIENCE)
        eventually(lambda: hears("postgres", url) and marked("postgres", url, key))
        once.on(session).complete(claim, 7)
        assert not waiting.done()
        session.commit()
        assert isinstance(waiting.result(PATIENCE / 2), Replay)
    database.dispose()


def test_a_ring_reaches_only_those_who_wait_for_the_key() -> None:
    """Names that look alike are different keys, also on the bell."""
    with Once("memory://") as once, ThreadPoolExecutor(2) as threads:
        claims = {place: granted(once.claim(place[1], scope=place[0])) for place in (("a", "bc"), ("ab", "c"))}
        calls = {place: threads.submit(once.claim, place[1], scope=place[0], wait=PATIENCE) for place in claims}
        eventually(waits(once, 2))
        once.complete(claims["a", "bc"], 1)
        assert isinstance(calls["a", "bc"].result(PATIENCE), Replay)
        assert waits(once, 1)()
        once.complete(claims["ab", "c"], 2)
        assert isinstance(calls["ab", "c"].result(PATIENCE), Replay)
