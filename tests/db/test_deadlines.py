"""Every call has a deadline: a server that is silent, or cannot be reached, is given up in time, on every store."""

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Self
from uuid import uuid4

import httpx
import pytest
from sqlalchemy import Connection, text
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from semel import App, AsyncOnce, Granted, JobStore, Once, StoreUnavailable
from semel._concurrency.listener import Listener
from semel.db import dialect
from semel.db.database import fetch, parse
from semel.http.asgi import IdempotencyMiddleware
from semel.once.stores import postgres, redis
from semel.runs.store import RunStore
from support.databases import StoreUrls
from support.proxies import SilentProxy, silent_proxy, unreachable

RETRY_FOR = 2.0
MUCH_LATER = 12.0
"""Seconds: far more than a call may take, since the machine may be slow, and far less than a driver's own limits."""
PATIENCE = 60.0

pytestmark = pytest.mark.parametrize("kind", ["postgres", "redis"])


@pytest.fixture
def line(urls: StoreUrls, kind: str) -> Iterator[tuple[SilentProxy, str]]:
    with silent_proxy(urls[kind]) as line:
        yield line


class Clock:
    """Measures how long something took."""

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        assert time.monotonic() - self._began < MUCH_LATER


def test_a_call_to_a_server_that_fell_silent_ends(line: tuple[SilentProxy, str], kind: str) -> None:
    proxy, url = line
    with Once(url, retry_for=RETRY_FOR, collect=False) as once:
        claim = once.claim(uuid4().hex)
        assert isinstance(claim, Granted)
        proxy.silence(new=True)
        for call in (
            lambda: once.claim(uuid4().hex),
            lambda: once.get(uuid4().hex),
            lambda: once.complete(claim.claim, 7),
        ):
            with Clock(), pytest.raises(StoreUnavailable):
                call()


def test_an_awaited_call_to_a_server_that_fell_silent_ends(line: tuple[SilentProxy, str], kind: str) -> None:
    proxy, url = line

    async def scenario() -> None:
        async with AsyncOnce(url, retry_for=RETRY_FOR, collect=False) as once:
            claim = await once.claim(uuid4().hex)
            assert isinstance(claim, Granted)
            proxy.silence(new=True)
            calls: list[Callable[[], Awaitable[Any]]] = [
                lambda: once.claim(uuid4().hex),
                lambda: once.get(uuid4().hex),
                lambda: once.complete(claim.claim, 7),
            ]
            for call in calls:
                with Clock(), pytest.raises(StoreUnavailable):
                    await call()

    asyncio.run(scenario())


@pytest.mark.parametrize("awaited", [False, True])
def test_a_call_to_a_server_that_cannot_be_reached_ends(urls: StoreUrls, kind: str, awaited: bool) -> None:

    def claim(url: str) -> None:
        if awaited:
            asyncio.run(AsyncOnce(url, retry_for=RETRY_FOR, collect=False).claim("key"))
        else:
            Once(url, retry_for=RETRY_FOR, collect=False).claim("key")

    with unreachable(urls[kind]) as url, Clock(), pytest.raises(StoreUnavailable):
        claim(url)


def test_those_who_wait_behind_a_silent_call_end_with_it(line: tuple[SilentProxy, str], kind: str) -> None:
    """They gather for the next batch while the first one hangs, and their time passes meanwhile."""
    proxy, url = line
    with Once(url, retry_for=RETRY_FOR, collect=False) as once, ThreadPoolExecutor(20) as threads:
        once.claim(uuid4().hex)
        proxy.silence(new=True)
        with Clock():
            calls = [threads.submit(once.claim, uuid4().hex) for _ in range(20)]
            errors = [call.exception(PATIENCE) for call in calls]
        assert {type(error) for error in errors} == {StoreUnavailable}
        assert len({id(error) for error in errors}) == 20  # each has its own


def test_tasks_that_wait_behind_a_silent_call_end_with_it(line: tuple[SilentProxy, str], kind: str) -> None:
    proxy, url = line

    async def scenario() -> None:
        async with AsyncOnce(url, retry_for=RETRY_FOR, collect=False) as once:
            await once.claim(uuid4().hex)
            proxy.silence(new=True)
            with Clock():
                calls = (once.claim(uuid4().hex) for _ in range(20))
                errors = await asyncio.gather(*calls, return_exceptions=True)
            assert {type(error) for error in errors} == {StoreUnavailable}
            assert len({id(error) for error in errors}) == 20

    asyncio.run(scenario())


@pytest.mark.parametrize("awaited", [False, True])
def test_where_old_connections_are_silent_and_new_ones_work_the_call_succeeds(
    line: tuple[SilentProxy, str], kind: str, awaited: bool
) -> None:
    """One that hangs condemns all that are open, so the next try is on a new one."""
    proxy, url = line

    async def scenario() -> None:
        async with AsyncOnce(url, retry_for=3, collect=False) as once:
            await asyncio.gather(*(once.claim(uuid4().hex) for _ in range(20)))
            proxy.silence(new=False)
            with Clock():
                assert isinstance(await once.claim(uuid4().hex), Granted)

    if awaited:
        asyncio.run(scenario())
        return
    with Once(url, retry_for=3, collect=False) as once, ThreadPoolExecutor(20) as threads:
        list(threads.map(once.get, ["a", "b"] * 20))
        once.claim(uuid4().hex)
        proxy.silence(new=False)
        with Clock():
            assert isinstance(once.claim(uuid4().hex), Granted)


def test_the_middleware_answers_while_its_store_is_silent(line: tuple[SilentProxy, str], kind: str) -> None:
    proxy, url = line

    async def order(_: Request) -> PlainTextResponse:
        return PlainTextResponse("done")

    async def scenario() -> None:
        once = AsyncOnce(url, retry_for=RETRY_FOR, collect=False)
        site = IdempotencyMiddleware(Starlette(routes=[Route("/", order, methods=["POST"])]), once=once)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(site), base_url="http://shop") as client:
            assert (await client.post("/", headers={"Idempotency-Key": uuid4().hex})).status_code == 200
            proxy.silence(new=True)
            with Clock():
                refused = await client.post("/", headers={"Idempotency-Key": uuid4().hex})
            assert refused.status_code == 503
        await once.close()

    asyncio.run(scenario())


def test_a_listener_whose_server_fell_silent_says_so_and_listens_anew(
    line: tuple[SilentProxy, str],
    kind: str,
    urls: StoreUrls,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nothing is sent on its connection and nothing comes, so only a question finds out."""
    proxy, url = line
    for module in (postgres, redis):
        monkeypatch.setattr(module, "HEARTBEAT", 0.1)
    monkeypatch.setattr(postgres, "_ANSWER", 0.5)
    if kind == "postgres":
        listener = Listener(postgres.subscriber(parse(url), first_payload="hello"))
    else:
        import redis as client

        listener = Listener(redis.subscriber(client.Redis.from_url(url)))
    heard = threading.Event()
    listener.start("semel_test", lambda payload: heard.set())
    try:
        _until(lambda: proxy.accepted >= 1)
        if kind == "postgres":
            assert heard.wait(PATIENCE)
        with caplog.at_level(logging.WARNING, "semel.listener"):
            proxy.silence(new=False)
            _until(lambda: proxy.accepted >= 2)
            _until(lambda: any("reconnecting" in record.getMessage() for record in caplog.records))
        heard.clear()
        _until(lambda: _say(urls[kind], kind) or heard.is_set())
    finally:
        listener.stop()


def _say(url: str, kind: str) -> None:
    if kind == "postgres":
        import psycopg

        with psycopg.connect(url, autocommit=True) as conn:
            conn.execute("NOTIFY semel_test, 'news'")
    else:
        import redis as client

        with client.Redis.from_url(url) as server:
            server.publish("semel_test", "news")


def _until(happens: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.02)  # a thread of the product is at work


def test_runs_and_reservations_have_a_deadline_too(line: tuple[SilentProxy, str], kind: str) -> None:
    if kind == "redis":
        return  # runs live in a database
    proxy, url = line
    app, jobs = App(url, retry_for=RETRY_FOR), JobStore(url, retry_for=RETRY_FOR)
    app.model("noop")(_noop)
    try:
        app.submit("noop")
        jobs.reserve_job_slot("somebody", 5)
        proxy.silence(new=True)
        with Clock(), pytest.raises(StoreUnavailable):
            app.submit("noop")
        with Clock(), pytest.raises(StoreUnavailable):
            jobs.reserve_job_slot("somebody", 5)
    finally:
        app.close()
        jobs.close()


@pytest.mark.parametrize("hot", [False, True])
@pytest.mark.parametrize("awaited", [False, True])
def test_a_transaction_in_which_the_server_falls_silent_ends(
    line: tuple[SilentProxy, str], kind: str, awaited: bool, hot: bool
) -> None:
    """It is given up as it is: a ROLLBACK, or a farewell, would wait for the same server."""
    if kind == "redis":
        return
    proxy, url = line

    @dialect.hot
    def work(conn: Connection) -> None:
        with dialect.transaction(conn):
            conn.execute(text("SELECT 1"))
            proxy.silence(new=True)
            (fetch if hot else Connection.execute)(conn, text("SELECT 2"), {})

    async def scenario() -> None:
        ledger = RunStore(url, awaited=awaited, retry_for=RETRY_FOR)
        await ledger.open()
        with Clock(), pytest.raises(StoreUnavailable):
            await ledger.write(work)
        await ledger.close()

    if awaited:
        asyncio.run(asyncio.wait_for(scenario(), PATIENCE))
    else:
        _driven(scenario())


def _noop() -> None:
    """Nothing."""


def test_every_connection_to_postgres_is_kept_alive_and_given_up(line: tuple[SilentProxy, str], kind: str) -> None:
    if kind == "redis":
        return
    _, url = line
    seen: dict[str, dict[str, int]] = {}

    def look(name: str, descriptor: int) -> None:
        with socket.socket(fileno=socket.dup(descriptor)) as end:
            words = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
            seen[name] = {word: end.getsockopt(socket.IPPROTO_TCP, getattr(socket, word)) for word in words}
            seen[name]["SO_KEEPALIVE"] = end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)

    with Once(url, collect=False) as once:
        store: Any = once._engine.store
        _driven(store._database.write(lambda conn: look("psycopg", conn.connection.driver_connection.fileno())))

    async def scenario() -> None:
        async with AsyncOnce(url, collect=False) as once:
            store: Any = once._engine.store

            def work(conn: Any) -> None:
                look("asyncpg", conn.connection.driver_connection._transport.get_extra_info("socket").fileno())

            await store._database.write(work)

    asyncio.run(scenario())
    expected = {
        "TCP_KEEPIDLE": 10,
        "TCP_KEEPINTVL": 5,
        "TCP_KEEPCNT": 3,
        "TCP_USER_TIMEOUT": 20_000,
        "SO_KEEPALIVE": 1,
    }
    assert seen == {"psycopg": expected, "asyncpg": expected}


def _driven(coroutine: Any) -> None:
    with suppress(StopIteration):
        coroutine.send(None)
