"""A store that goes away is waited for, within a deadline; then the caller is told. It is never a grant."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from typing import Any

import psycopg
import pytest
import redis
from psycopg import sql
from sqlalchemy import Connection, create_engine, make_url, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

from semel import AsyncOnce, Claim, Granted, InFlight, Once, Replay, SemelError, StoreUnavailable
from semel.cli import main as semel_command
from support import servers
from support.databases import StoreUrls
from support.programs import stop

names = count()
PATIENCE = 60
"""Seconds after which something that should have happened counts as hanging."""


class Stoppable:
    """A server of our own, that may be stopped without anybody else noticing, and a database on it."""

    def __init__(self, server: servers.Server) -> None:
        self.server = server
        self.url = server.database()
        if isinstance(server, servers.Postgres):
            assert semel_command(["migrate", self.url]) == 0

    def key(self) -> str:
        return f"key {next(names)}"


@pytest.fixture(scope="module")
def own_postgres() -> Iterator[Stoppable]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SEMEL_TEST_POSTGRES_URL", raising=False)
        with servers.postgres() as server:
            yield Stoppable(server)


@pytest.fixture(scope="module")
def own_redis() -> Iterator[Stoppable]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SEMEL_TEST_REDIS_URL", raising=False)
        with servers.redis(durable=True) as server:
            yield Stoppable(server)


@pytest.fixture(params=["postgres", "redis"])
def own(request: pytest.FixtureRequest) -> Stoppable:
    stoppable: Stoppable = request.getfixturevalue(f"own_{request.param}")
    return stoppable


class Caller:
    """Calls ``Once`` or ``AsyncOnce`` from a test's thread."""

    def __init__(self, url: str, *, awaited: bool, retry_for: float) -> None:
        self._runner = asyncio.Runner() if awaited else None
        self.once: Any = (AsyncOnce if awaited else Once)(url, retry_for=retry_for, collect=False)

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            answer = getattr(self.once, verb)(*args, **options)
            return answer if self._runner is None else self._runner.run(answer)

        return call

    def work(self, key: str, value: object, **options: Any) -> Any:
        """The value that a guarded call gives; it ran now, or was replayed."""

        async def awaited() -> object:
            return value

        return self.call(key, (lambda: value) if self._runner is None else awaited, **options).value

    def end(self) -> None:
        self.close()
        if self._runner is not None:
            self._runner.close()


@contextmanager
def calling(url: str, awaited: bool, retry_for: float = PATIENCE) -> Iterator[Caller]:
    caller = Caller(url, awaited=awaited, retry_for=retry_for)
    try:
        yield caller
    finally:
        caller.end()


BOTH_FORMS = pytest.mark.parametrize("awaited", [False, True], ids=["blocking", "async"])
BOTH_ENDS = pytest.mark.parametrize("crash", [False, True], ids=["stopped", "crashed"])


@contextmanager
def refusals() -> Iterator[threading.Event]:
    """Set when a call has met a store that is away and is about to try again."""
    refused = threading.Event()

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "the store is unavailable" in record.getMessage():
                refused.set()

    log, ear = logging.getLogger("semel"), Ear()
    before = log.level
    log.addHandler(ear)
    log.setLevel(logging.DEBUG)
    try:
        yield refused
    finally:
        log.setLevel(before)
        log.removeHandler(ear)


def granted(verdict: object) -> Claim:
    assert isinstance(verdict, Granted)
    return verdict.claim


# -- a server that is restarted --------------------------------------------------------------------------------------


@BOTH_FORMS
@BOTH_ENDS
def test_a_server_that_comes_back_in_time_is_waited_for(own: Stoppable, awaited: bool, crash: bool) -> None:
    """The call that met the gap succeeds, and nothing from before is lost."""
    done, held, new = own.key(), own.key(), own.key()
    with calling(own.url, awaited) as caller, refusals() as refused:
        assert caller.work(done, 7) == 7
        claim = granted(caller.claim(held))
        own.server.stop(crash=crash)

        with ThreadPoolExecutor(1) as thread:
            call = thread.submit(caller.work, new, 8)
            try:
                assert refused.wait(PATIENCE)
                assert not call.done()
            finally:
                own.server.start()
            assert call.result(PATIENCE) == 8

        caller.complete(claim, 9)
        assert [caller.work(key, "again") for key in (done, held, new)] == [7, 9, 8]


@BOTH_FORMS
def test_a_server_that_stays_away_grants_nothing(own: Stoppable, awaited: bool) -> None:
    """Every verb says so when its patience ends; when the server is back, the same object goes on."""
    done, held, new = own.key(), own.key(), own.key()
    with calling(own.url, awaited, retry_for=0.5) as caller:
        caller.work(done, 7)
        claim = granted(caller.claim(held))
        own.server.stop()
        try:
            asks: list[Callable[[], Any]] = [
                lambda: caller.claim(new),
                lambda: caller.complete(claim, 9),
                lambda: caller.renew(claim),
                lambda: caller.release(claim),
                lambda: caller.get(done),
                lambda: caller.work(done, "again"),
                lambda: caller.check_and_mark("type", new),
                caller.open,
                caller.purge,
                caller.stats,
            ]
            for ask in asks:
                with pytest.raises(StoreUnavailable):
                    ask()
        finally:
            own.server.start()
        until_given_back(caller, new)
        caller.complete(claim, 9)
        assert caller.work(held, "again") == 9
        assert caller.work(done, "again") == 7


def until_given_back(caller: Caller, key: str) -> None:
    """A grant whose answer was lost is taken back as soon as the server is there again."""
    deadline = time.monotonic() + PATIENCE
    while calling_until(lambda: caller.get(key)) is not None:
        assert time.monotonic() < deadline, "it was granted to nobody"
        time.sleep(0.01)  # it is done in the background


def calling_until(ask: Callable[[], Any]) -> Any:
    """The answer, once the connections that the server closed have been found out."""
    for _ in range(20):
        try:
            return ask()
        except StoreUnavailable:
            continue
    raise AssertionError("the server is back, and the store still says that it is away")


def test_without_patience_the_first_refusal_is_the_answer(own: Stoppable) -> None:
    with calling(own.url, False, retry_for=0) as caller, refusals() as refused:
        own.server.stop()
        try:
            with pytest.raises(StoreUnavailable):
                caller.claim(own.key())
        finally:
            own.server.start()
        assert not refused.is_set()


class Load:
    """Many callers, each with keys of its own and keys that all want; work that notes who did it."""

    def __init__(self, callers: int, keys: int = 6) -> None:
        number = next(names)
        self.own = [[f"load {number} {caller} {key}" for key in range(keys)] for caller in range(callers)]
        self.shared = [f"load {number} shared {key}" for key in range(keys)]
        self.ran: Counter[str] = Counter()
        self.values: list[tuple[str, str]] = []
        self.underway = threading.Event()
        self.stopped = threading.Event()
        self.lock = threading.Lock()

    def note(self, key: str) -> str:
        with self.lock:
            self.ran[key] += 1
            if self.ran.total() == len(self.own):
                self.underway.set()
            return f"{key} by {self.ran[key]}"

    def keys(self, caller: int) -> Iterator[str]:
        for own, shared in zip(self.own[caller], self.shared, strict=True):
            yield from (own, shared)

    def check(self) -> None:
        wanted = {key for caller in range(len(self.own)) for key in self.keys(caller)}
        assert set(self.ran) == wanted, "nothing is lost"
        assert set(self.ran.values()) == {1}, "nothing is done twice"
        assert {value for key, value in self.values} == {f"{key} by 1" for key in wanted}
        assert len(self.values) == sum(len(list(self.keys(caller))) for caller in range(len(self.own)))


@BOTH_ENDS
def test_a_restart_under_32_threads_does_nothing_twice_and_loses_nothing(own: Stoppable, crash: bool) -> None:
    load = Load(callers=32)

    def work(key: str) -> str:
        value = load.note(key)
        if load.underway.is_set():
            load.stopped.wait(PATIENCE)  # so that outcomes are sent to a server that is not there
        return value

    def call_all(caller: int) -> None:
        for key in load.keys(caller):
            value = once.call(key, lambda key=key: work(key), wait=PATIENCE).value  # type: ignore[misc]
            load.values.append((key, value))

    with Once(own.url, retry_for=PATIENCE) as once, ThreadPoolExecutor(32) as threads, refusals() as refused:
        calls = [threads.submit(call_all, caller) for caller in range(32)]
        assert load.underway.wait(PATIENCE)
        own.server.stop(crash=crash)
        load.stopped.set()
        try:
            assert refused.wait(PATIENCE)
        finally:
            own.server.start()
        for call in calls:
            call.result(PATIENCE)
        load.check()


@BOTH_ENDS
def test_a_restart_under_64_tasks_does_nothing_twice_and_loses_nothing(own: Stoppable, crash: bool) -> None:
    load = Load(callers=64)

    async def scenario() -> None:
        underway, stopped = asyncio.Event(), asyncio.Event()

        async def work(key: str) -> str:
            value = load.note(key)
            if load.underway.is_set():
                underway.set()
                await stopped.wait()
            return value

        async def call_all(once: AsyncOnce, caller: int) -> None:
            for key in load.keys(caller):
                result = await once.call(key, lambda key=key: work(key), wait=PATIENCE)  # type: ignore[misc]
                load.values.append((key, result.value))

        async with AsyncOnce(own.url, retry_for=PATIENCE) as once, asyncio.TaskGroup() as tasks:
            for caller in range(64):
                tasks.create_task(call_all(once, caller))
            await underway.wait()
            await asyncio.to_thread(own.server.stop, crash=crash)
            stopped.set()
            try:
                assert await asyncio.to_thread(refused.wait, PATIENCE)
            finally:
                await asyncio.to_thread(own.server.start)

    with refusals() as refused:
        asyncio.run(asyncio.wait_for(scenario(), 2 * PATIENCE))
    load.check()


# -- protection that gives way ---------------------------------------------------------------------------------------


@BOTH_FORMS
def test_an_open_policy_works_without_protection_while_the_store_is_away(own: Stoppable, awaited: bool) -> None:
    """Each call works, replayed or not; when the store is back, keys protect again."""
    key = own.key()
    with calling(own.url, awaited, retry_for=0) as caller:
        own.server.stop()
        try:
            assert [caller.work(key, number, store_failure="open") for number in (1, 2)] == [1, 2]
            assert [caller.once._engine.counters.snapshot(None).scopes] == [{}]
            with pytest.raises(StoreUnavailable):
                caller.work(key, 3)
        finally:
            own.server.start()
        calling_until(lambda: caller.get(key))
        assert [caller.work(key, number, store_failure="open") for number in (4, 5)] == [4, 4]


def test_an_open_policy_gives_the_value_even_if_it_cannot_be_recorded(own: Stoppable) -> None:
    """The store goes away while the function runs: under "open" the caller, whose work is done, gets its value."""

    def stop_and_work() -> int:
        own.server.stop()
        return 7

    with Once(own.url, retry_for=0) as once:
        for rule, expected in (("open", 7), ("closed", None)):
            try:
                if expected is None:
                    with pytest.raises(StoreUnavailable):
                        once.call(own.key(), stop_and_work, store_failure=rule)
                else:
                    assert once.call(own.key(), stop_and_work, store_failure=rule).value == expected
            finally:
                own.server.start()
            calling_until(once.open)
            calling_until(lambda: once.get("anything"))


# -- a pool that runs dry --------------------------------------------------------------------------------------------


def test_a_pool_that_runs_dry_is_a_store_that_is_away(urls: StoreUrls) -> None:
    """A user's own engine, whose only connection is in use elsewhere: nothing is granted until it is back."""
    url = make_url(urls["postgres"]).set(drivername="postgresql+psycopg")
    engine = create_engine(url, pool_size=1, max_overflow=0, pool_timeout=0.05)
    once = Once(engine, retry_for=0.2, collect=False)
    with engine.connect(), pytest.raises(StoreUnavailable, match="pool"):
        once.claim("dry")
    granted(once.claim("dry"))

    patient = Once(engine, retry_for=PATIENCE, collect=False)
    with refusals() as refused, ThreadPoolExecutor(1) as thread, engine.connect() as taken:
        call = thread.submit(patient.claim, "dry, then not")
        assert refused.wait(PATIENCE)
        taken.close()
        granted(call.result(PATIENCE))
    once.close()
    patient.close()
    with engine.connect() as still_open:  # it is the user's: closing Once does not close it
        assert still_open.scalar(text("SELECT 1")) == 1
    engine.dispose()


def test_an_async_pool_that_runs_dry_is_a_store_that_is_away(urls: StoreUrls) -> None:
    url = make_url(urls["postgres"]).set(drivername="postgresql+asyncpg")

    async def scenario() -> None:
        engine = create_async_engine(url, pool_size=1, max_overflow=0, pool_timeout=0.05)
        once = AsyncOnce(engine, retry_for=0.2, collect=False)
        async with engine.connect():
            with pytest.raises(StoreUnavailable, match="pool"):
                await once.claim("dry async")
        granted(await once.claim("dry async"))
        await once.close()
        await engine.dispose()

    asyncio.run(scenario())


# -- someone else's lock ---------------------------------------------------------------------------------------------

HOLD = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
print("held", flush=True)
sys.stdin.readline()
connection.rollback()
"""


@contextmanager
def file_held(url: str) -> Iterator[Callable[[], None]]:
    """Another process holds the file's write lock until told to let go."""
    path = make_url(url).database
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdin is not None
        assert holder.stdout.readline() == "held\n"

        def let_go() -> None:
            holder.communicate("go\n", timeout=PATIENCE)

        try:
            yield let_go
        finally:
            if holder.poll() is None:
                let_go()


@BOTH_FORMS
def test_a_file_locked_by_another_process_grants_nothing(sqlite_url: str, awaited: bool) -> None:
    with calling(sqlite_url, awaited, retry_for=0) as caller:
        caller.work("done", 7)
        held = granted(caller.claim("held"))
        with file_held(sqlite_url):
            assert caller.get("done").status == "completed"  # readers are not held up
            asks: list[Callable[[], Any]] = [lambda: caller.claim("new"), lambda: caller.complete(held, 8)]
            for ask in asks:
                with pytest.raises(StoreUnavailable, match="locked"):
                    ask()
        caller.complete(held, 8)
        granted(caller.claim("new"))


@BOTH_FORMS
def test_a_file_that_is_unlocked_in_time_is_waited_for(sqlite_url: str, awaited: bool) -> None:
    with calling(sqlite_url, awaited) as caller:
        caller.work("done", 7)
        with file_held(sqlite_url) as let_go, refusals() as refused, ThreadPoolExecutor(1) as thread:
            call = thread.submit(caller.claim, "new")
            assert refused.wait(PATIENCE)
            let_go()
            granted(call.result(PATIENCE))


@pytest.mark.parametrize("whose", ["semel's engine", "the user's engine"])
def test_an_open_transaction_on_one_key_leaves_the_others_free(urls: StoreUrls, whose: str) -> None:
    """A user claims a key in a transaction that stays open: it is in flight to others, whose own keys are granted."""
    url = make_url(urls["postgres"]).set(drivername="postgresql+psycopg")
    number = next(names)
    engine = create_engine(url)
    with (
        Once(urls["postgres"] if whose == "semel's engine" else engine, collect=False) as once,
        ThreadPoolExecutor(12) as threads,
        Session(engine) as session,
    ):
        granted(once.on(session).claim(f"held {number}"))
        keys = [f"held {number}", *(f"free {number} {at}" for at in range(10)), f"held {number}"]
        verdicts = [call.result(PATIENCE) for call in [threads.submit(once.claim, key) for key in keys]]
        assert [type(verdict) for verdict in verdicts] == [InFlight, *[Granted] * 10, InFlight]
        assert all(verdict.retry_after > 0 for verdict in verdicts if isinstance(verdict, InFlight))

        session.rollback()
        granted(once.claim(f"held {number}"))
    engine.dispose()


def test_an_open_transaction_that_completes_leaves_the_others_free(urls: StoreUrls) -> None:
    """The row is locked by its owner's own transaction; renewing, reading and other keys go on."""
    url = make_url(urls["postgres"]).set(drivername="postgresql+psycopg")
    number = next(names)
    engine = create_engine(url)
    with (
        Once(urls["postgres"], collect=False) as once,
        ThreadPoolExecutor(8) as threads,
        Session(engine) as session,
    ):
        claim = granted(once.claim(f"mine {number}"))
        once.on(session).complete(claim, 7)
        assert isinstance(once.claim(f"mine {number}"), InFlight)
        calls = [threads.submit(once.call, f"other {number} {at}", int) for at in range(8)]
        assert [call.result(PATIENCE).replayed for call in calls] == [False] * 8
        session.commit()
        assert isinstance(once.claim(f"mine {number}"), Replay)
    engine.dispose()


def test_two_batches_in_opposite_order_do_not_deadlock(urls: StoreUrls) -> None:
    """Two engines complete and take over the same keys at the same time, each in its own order."""
    keys = [f"ring {next(names)}" for _ in range(40)]

    async def hammer(once: AsyncOnce, order: list[str]) -> list[Any]:
        claims = await asyncio.gather(*(once.claim(key, lease=0.001) for key in order))
        mine = [verdict.claim for verdict in claims if isinstance(verdict, Granted)]
        return list(await asyncio.gather(*(once.complete(claim, 1) for claim in mine), return_exceptions=True))

    async def scenario() -> list[Any]:
        async with AsyncOnce(urls["postgres"]) as one, AsyncOnce(urls["postgres"]) as two:
            return list(await asyncio.gather(hammer(one, keys), hammer(two, keys[::-1]), hammer(one, keys[::-1])))

    for answers in asyncio.run(scenario()):
        assert all(answer is None or isinstance(answer, SemelError) for answer in answers)
        assert not any(isinstance(answer, StoreUnavailable) for answer in answers)


# -- Redis -----------------------------------------------------------------------------------------------------------


@BOTH_FORMS
def test_scripts_that_the_server_forgot_are_sent_again(own_redis: Stoppable, awaited: bool) -> None:
    keys = [own_redis.key() for _ in range(4)]
    with calling(own_redis.url, awaited) as caller, redis.Redis.from_url(own_redis.url) as client:
        for key in keys:
            client.script_flush()
            claim = granted(caller.claim(key))
            client.script_flush()
            caller.renew(claim)
            client.script_flush()
            caller.complete(claim, 7)
            client.script_flush()
            assert caller.get(key).status == "completed"
            client.script_flush()
            assert caller.work(key, 8) == 7


def test_fences_grow_over_a_server_that_lost_its_data(own_redis: Stoppable) -> None:
    """Whoever still holds a claim from before is refused, and cannot pass for the new owner."""
    key = own_redis.key()
    with Once(own_redis.url) as once, redis.Redis.from_url(own_redis.url) as client:
        lost = granted(once.claim(key))
        client.flushall()
        new = granted(once.claim(key))
        assert new.fence > lost.fence
        with pytest.raises(SemelError):
            once.complete(lost, "stale")
        once.complete(new, "fresh")
        assert once.call(key, str).value == "fresh"


@BOTH_FORMS
def test_a_redis_that_hangs_is_a_store_that_is_away(own_redis: Stoppable, awaited: bool) -> None:
    """It accepts connections and says nothing; a call does not wait for ever, and is seen through when it wakes up."""
    key = own_redis.key()
    with redis.Redis.from_url(own_redis.url) as client:
        process = client.info("server")["process_id"]
    with calling(f"{own_redis.url}?socket_timeout=2", awaited, retry_for=3) as caller:
        caller.work(own_redis.key(), 1)
        stop(process)
        try:
            with pytest.raises(StoreUnavailable):
                caller.claim(key)
        finally:
            os.kill(process, signal.SIGCONT)
        assert calling_until(lambda: caller.get(own_redis.key())) is None


# -- PostgreSQL ------------------------------------------------------------------------------------------------------


@BOTH_FORMS
def test_connections_that_an_operator_ends_are_replaced(own_postgres: Stoppable, awaited: bool) -> None:
    with calling(own_postgres.url, awaited) as caller:
        for _ in range(3):
            key = own_postgres.key()
            claim = granted(caller.claim(key))
            with psycopg.connect(own_postgres.url, autocommit=True) as operator:
                operator.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE datname = current_database() AND pid <> pg_backend_pid()"
                )
            caller.complete(claim, 7)
            assert caller.work(key, 8) == 7


@pytest.fixture
def guest(own_postgres: Stoppable) -> Iterator[str]:
    """The URL for a user whom the database's limit of connections binds: a superuser's never is."""
    with psycopg.connect(own_postgres.url, autocommit=True) as operator:
        operator.execute("CREATE ROLE guest LOGIN")
        operator.execute("GRANT ALL ON ALL TABLES IN SCHEMA public TO guest")
        operator.execute("GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO guest")
        yield make_url(own_postgres.url).set(username="guest").render_as_string(hide_password=False)
        operator.execute("DROP OWNED BY guest")
        operator.execute("DROP ROLE guest")


def test_a_server_without_a_free_connection_is_a_store_that_is_away(own_postgres: Stoppable, guest: str) -> None:
    """53300, too many clients: it passes, so it is tried again."""

    def limit(connections: int) -> None:
        with psycopg.connect(own_postgres.url, autocommit=True) as operator:
            name = sql.Identifier(str(make_url(own_postgres.url).database))
            operator.execute(sql.SQL("ALTER DATABASE {} CONNECTION LIMIT {}").format(name, sql.Literal(connections)))

    once = Once(guest, retry_for=PATIENCE, collect=False)
    with refusals() as refused, ThreadPoolExecutor(1) as thread:
        limit(0)
        try:
            call = thread.submit(once.claim, own_postgres.key())
            assert refused.wait(PATIENCE)
        finally:
            limit(-1)
        granted(call.result(PATIENCE))
    once.close()


def test_a_standby_that_cannot_write_grants_nothing(own_postgres: Stoppable, guest: str) -> None:
    """25006: after a failover the old address may be read-only for a while."""
    with psycopg.connect(own_postgres.url, autocommit=True) as operator:
        operator.execute("ALTER ROLE guest SET default_transaction_read_only = on")
    once = Once(guest, retry_for=0.1, collect=False)
    try:
        with pytest.raises(StoreUnavailable, match="read-only"):
            once.claim(own_postgres.key())
    finally:
        once.close()


def test_a_verb_inside_a_transaction_is_never_sent_twice(urls: StoreUrls) -> None:
    """The user's transaction is the user's: when its connection dies, the error comes at once, nothing is repeated."""
    url = make_url(urls["postgres"]).set(drivername="postgresql+psycopg")
    engine = create_engine(url)
    with Once(urls["postgres"], retry_for=PATIENCE, collect=False) as once, engine.connect() as connection:
        kill_backend(urls["postgres"], connection)
        with refusals() as refused, pytest.raises(StoreUnavailable):
            once.on(connection).claim("in a dead transaction")
        assert not refused.is_set()
        assert isinstance(once.claim("in a dead transaction"), Granted)
    engine.dispose()


def kill_backend(url: str, connection: Connection) -> None:
    number = connection.scalar(text("SELECT pg_backend_pid()"))
    with psycopg.connect(url, autocommit=True) as operator:
        operator.execute("SELECT pg_terminate_backend(%s, 10000)", [number])
