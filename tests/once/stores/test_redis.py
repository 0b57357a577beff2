"""What semel keeps in Redis, and how it is reached: other versions, and clients of a user's own, meet the same keys."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from zlib import crc32

import pytest
import redis

from semel import AsyncOnce, Granted, Once, Policy, Replay, StoreUnavailable
from semel._concurrency.sync import run_sync
from semel.once import engine
from semel.once.store import ForgetScope, KeyRef
from semel.once.stores import open_store
from semel.once.stores import redis as redis_store
from semel.once.stores.redis import RedisStore
from semel.testing import FakeClock
from support.waiting import eventually

PATIENCE = 60
"""Seconds after which something that should have happened counts as hanging."""


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


def test_a_record_is_where_every_version_looks_for_it(client: redis.Redis) -> None:
    """A version that looked elsewhere would do all work again."""
    once = Once(client, prefix="app")
    for scope, key in (("scope", "key"), ("a:b", "}:c"), ("ключ", "key")):
        assert isinstance(once.claim(key, scope=scope), Granted)
        place = f"{len(scope)}:{scope}:{key}"
        bucket = f"app:{{{crc32(place.encode()) % 256}}}"
        assert client.hget(f"{bucket}:{place}", "state") == b"claimed"
        assert client.exists(f"{bucket}:fence")
        assert once.forget_scope(scope, force=True) == 1


def test_many_keys_are_counted_purged_and_forgotten(redis_url: str) -> None:
    """More than one SCAN returns, and more than one step takes."""
    clock = FakeClock()
    with Once(redis_url, clock=clock, collect=False) as once:
        store = once._engine.store
        assert isinstance(store, RedisStore)
        for number in range(12):
            once.check_and_mark("gone", f"key {number}", ttl=1)
            once.check_and_mark("stays", f"key {number}", ttl=3600)
        clock.advance(2)
        assert asyncio.run(sizes(store, 5)) == [5, 5, 5, 5, 4]
        held = once.stats().held
        assert (held.completed, held.expired) == (12, 12)
        assert [asyncio.run(store.purge(5)) for _ in range(4)] == [5, 5, 2, 0]
        assert once.forget_scope("stays") == 12
        assert once.stats().held.live == 0


async def sizes(store: RedisStore, size: int) -> list[int]:
    return [len(found) async for found in store._scan(size)]


class Ordered(RedisStore):
    """Finds its keys in the order of their names, as a server may."""

    async def _scan(self, size: int, scope: str | None = None) -> AsyncGenerator[list[KeyRef], None]:
        found = [ref async for some in super()._scan(size, scope) for ref in some]
        yield sorted(found, key=lambda ref: ref.key)


def test_keys_that_stay_do_not_hide_those_behind_them(client: redis.Redis) -> None:
    """A step goes on until it has done as much as it may, or nothing is left."""
    clock = FakeClock()
    store = Ordered(client, clock)
    once = Once(store, collect=False)
    for number, ends in enumerate([True, True, True, False, False, False, False, True, True]):
        once.check_and_mark("expires", f"key {number}", ttl=60 if ends else 3600)
        if ends:
            once.check_and_mark("forgotten", f"key {number}")
        else:
            assert isinstance(once.claim(f"key {number}", scope="forgotten", lease=3600), Granted)
    assert [run_sync(store.forget_scope(ForgetScope("forgotten", 5))) for _ in range(2)] == [5, 0]
    assert once.forget_scope("forgotten", force=True) == 4
    clock.advance(61)
    assert [run_sync(store.purge(5)) for _ in range(2)] == [5, 0]
    assert once.stats().held.live == 4


def test_a_value_that_fades_is_removed_before_its_key(redis_url: str, client: redis.Redis) -> None:
    clock = FakeClock()
    with Once(redis_url, clock=clock, collect=False, policy=Policy(ttl=3600, value_ttl=60)) as once:
        once.call("key", lambda: "secret")
        once.call("other", lambda: None, value_ttl=600)
        clock.advance(61)
        assert [once.purge() for _ in range(2)] == [1, 0]
    assert not any(b"secret" in client.dump(name) for name in client.scan_iter())


def test_a_script_that_the_server_has_forgotten_is_sent_again(redis_url: str, client: redis.Redis) -> None:
    with Once(redis_url, collect=False) as once:
        for key in ("first", "second"):
            assert once.call(key, lambda: 7).value == 7
            client.script_flush()
        assert once.call("first", int).value == 7


def test_nothing_is_sent_for_an_empty_batch(redis_url: str) -> None:
    async def scenario() -> None:
        once = AsyncOnce(redis_url, collect=False)
        assert await once._engine.store.get([]) == []
        assert await once._engine.store.renew([]) == []
        assert await once._engine.store.get([KeyRef("scope", "key")]) == [None]
        await once.close()

    asyncio.run(scenario())


def test_a_key_that_changes_hands_all_the_time_is_given_up(client: redis.Redis) -> None:
    """Each time that its record is judged free, somebody else has it already when it is to be taken."""
    clock = FakeClock()

    class Overtaken(RedisStore):
        asked = 0

        async def _eval(self, script: str, *arguments: object) -> object:
            self.asked += 1
            reply = await super()._eval(script, *arguments)
            for name in client.scan_iter(match="semel:*:5:scope:key"):
                client.hincrby(name, "fence", 1)
            return reply

    store = Overtaken(client, clock)
    once = Once(store, collect=False, retry_for=0)
    assert isinstance(once.claim("key", scope="scope", lease=1), Granted)
    clock.advance(2)
    store.asked = 0
    with pytest.raises(StoreUnavailable, match="a key changed hands 20 times while it was being claimed"):
        once.claim("key", scope="scope")
    assert store.asked == 20


@pytest.mark.parametrize("given", ["url", "client"])
def test_a_child_process_has_connections_of_its_own(redis_url: str, client: redis.Redis, given: str) -> None:
    once = Once(redis_url if given == "url" else client, collect=False)
    store = once._engine.store
    assert isinstance(store, RedisStore)
    before = store._here()
    assert isinstance(once.claim("parent"), Granted)
    store.after_fork()  # as in a child
    assert isinstance(once.claim("child"), Granted)
    own = store._here()
    assert own is store._here()
    assert own is not before
    assert own.connection_pool is not before.connection_pool
    own.close()
    once.close()


@pytest.fixture
def no_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiter that is not woken sleeps for ten minutes."""
    for name in ("_FIRST_POLL", "_LAST_POLL"):
        monkeypatch.setattr(engine, name, 600.0)


def connections(client: redis.Redis) -> set[str]:
    """The names that the server has for its present connections."""
    return {each["id"] for each in client.client_list()}


def listeners(client: redis.Redis) -> int:
    return dict(client.pubsub_numsub("semel:ended"))[b"semel:ended"]


@pytest.mark.parametrize("given", ["url", "client"])
@pytest.mark.usefixtures("no_polling")
def test_a_waiter_hears_of_it_until_it_is_closed(redis_url: str, client: redis.Redis, given: str) -> None:
    before = connections(client)
    owner = Once(client, collect=False)
    claim = owner.claim("key")
    assert isinstance(claim, Granted)
    target = redis_url if given == "url" else redis.Redis.from_url(redis_url)
    with Once(target, collect=False) as once, ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(once.claim, "key", wait=PATIENCE)
        eventually(
            lambda: listeners(client) == 1 and any(client.hget(name, "awaited") for name in client.scan_iter("*:key"))
        )
        owner.complete(claim.claim, 7)
        assert isinstance(waiting.result(PATIENCE / 2), Replay)
    eventually(lambda: listeners(client) == 0 and connections(client) <= before)


def test_an_async_client_of_the_users_is_not_listened_on(redis_url: str) -> None:
    """A listener is a thread, and needs a blocking client; waiters poll."""
    store = AsyncOnce(redis.asyncio.Redis.from_url(redis_url))._engine.store
    assert isinstance(store, RedisStore)
    assert store._listener is None


def test_closing_in_an_event_loop_ends_its_connections(redis_url: str, client: redis.Redis) -> None:
    before = connections(client)

    async def scenario() -> None:
        async with AsyncOnce(redis_url, collect=False) as once:
            assert isinstance(await once.claim("key"), Granted)
            assert connections(client) - before
        await asyncio.to_thread(eventually, lambda: connections(client) <= before)

    asyncio.run(scenario())


@pytest.mark.parametrize("awaited", [False, True], ids=["blocking", "async"])
def test_the_engine_retries_and_not_the_client(redis_url: str, awaited: bool) -> None:
    """A server has half of the call's time for a reply, so that there is time for a new connection."""
    store = open_store(redis_url, is_async=awaited, retry_for=4)
    assert isinstance(store, RedisStore)
    options = store._client.connection_pool.connection_kwargs
    assert options["socket_timeout"] == options["socket_connect_timeout"] == 2
    assert options["socket_keepalive"] is True
    assert options["retry"].get_retries() == 0


class Listening:
    """A listener's connection, whose time the test moves: each look at it waits for a moment only."""

    def __init__(self, client: redis.Redis, monkeypatch: pytest.MonkeyPatch, *, cut: bool = False) -> None:
        """``cut``: what it asks never arrives."""
        self.now = 1000.0
        self.cut = cut
        self._client = client
        self._stopped = threading.Event()
        monkeypatch.setattr(redis_store, "time", self)
        self._heard = redis_store.subscriber(self)("news", self._stopped)
        assert self.hear() is None, "the server has confirmed the subscription"

    def monotonic(self) -> float:
        return self.now

    def pubsub(self) -> redis.client.PubSub:
        subscription = self._client.pubsub()
        look = subscription.get_message
        subscription.get_message = lambda timeout: look(timeout=timeout / 10)  # type: ignore[method-assign]
        if self.cut:
            subscription.ping = lambda message=None: None  # type: ignore[method-assign]
        return subscription

    def hear(self, at: float = 0.0) -> str | None:
        self.now = 1000.0 + at
        return next(self._heard)

    def rest(self) -> list[str | None]:
        self._stopped.set()
        return list(self._heard)


@pytest.fixture
def listening(client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> Listening:
    return Listening(client, monkeypatch)


def pings(client: redis.Redis) -> int:
    stats: dict[str, dict[str, int]] = client.info("commandstats")
    return stats.get("cmdstat_ping", {"calls": 0})["calls"]


def test_a_listener_hears_what_is_published_until_it_is_stopped(listening: Listening, client: redis.Redis) -> None:
    client.publish("other", "not for us")
    for word in ("one", "two"):
        client.publish("news", word)
    assert [listening.hear() for _ in range(3)] == ["one", "two", None]
    assert listening.rest() == []


def test_a_listener_asks_a_silent_server_for_a_sign_of_life(listening: Listening, client: redis.Redis) -> None:
    """After five seconds without a message, and not again within five seconds; any reply will do."""
    asked = pings(client)
    assert [(listening.hear(at), pings(client) - asked) for at in (5, 5.1)] == [(None, 0), (None, 1)]
    assert listening.hear(at=14) is None, "the reply to the ping"
    assert [(listening.hear(at), pings(client) - asked) for at in (19, 19.1)] == [(None, 1), (None, 2)]


def test_a_listener_gives_up_a_server_that_does_not_reply(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    listening = Listening(client, monkeypatch, cut=True)
    assert [listening.hear(at) for at in (6, 9, 10)] == [None] * 3
    with pytest.raises(redis.ConnectionError, match="silent for 11 seconds"):
        listening.hear(at=11)
    assert "Redis has sent nothing for 11 s on the listening connection" in caplog.text
