"""Few connections: those of a process are shared, an event loop's end with it, and a full server is waited for."""

import asyncio
import gc
import subprocess
import sys
import textwrap
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from uuid import uuid4

import psycopg
import pytest
import redis
from fastapi import FastAPI
from psycopg import sql
from sqlalchemy import Connection, make_url, text

from semel import App, AsyncOnce, Granted, InvalidRequest, JobStore, Once, StoreUnavailable
from semel._concurrency.sync import run_sync
from semel.db.database import parse
from semel.db.dialect import hot
from semel.db.postgres import PostgresDatabase, postgres_engine
from semel.http.asgi import IdempotencyMiddleware
from semel.once.store import ClaimRequest
from semel.once.stores.postgres import PostgresStore
from semel.runs.store import RunStore
from support.databases import StoreUrls
from support.waiting import eventually

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of Starlette, about the client that it is to use one day
    from fastapi.testclient import TestClient

PATIENCE = 60.0


def connections(url: str) -> int:
    """How many connections of semel the server has, those that listen left out."""
    if url.startswith("redis"):
        with redis.Redis.from_url(url) as server:
            database = str(make_url(url).database)
            return len([each for each in server.client_list() if each["db"] == database]) - 1
    with psycopg.connect(url, autocommit=True) as conn:
        asked = conn.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'semel'"
        ).fetchone()
        assert asked is not None
        return int(asked[0])


@pytest.mark.parametrize("kind", ["postgres", "redis"])
def test_an_event_loop_takes_its_connections_with_it(urls: StoreUrls, kind: str) -> None:
    before = connections(urls[kind])
    once = AsyncOnce(urls[kind], collect=False)
    for _ in range(12):
        assert isinstance(asyncio.run(once.claim(uuid4().hex)), Granted)
    eventually(lambda: connections(urls[kind]) <= before)


@pytest.mark.parametrize("kind", ["postgres", "redis"])
def test_what_a_loop_left_behind_that_was_only_closed_is_let_go_by_the_next(urls: StoreUrls, kind: str) -> None:
    """Without asyncio.run nobody tells a loop to shut down, so the next one finds what is left."""
    before = connections(urls[kind])
    once = AsyncOnce(urls[kind], collect=False)
    for _ in range(5):
        loop = asyncio.new_event_loop()
        assert isinstance(loop.run_until_complete(once.claim(uuid4().hex)), Granted)
        loop.close()
    assert isinstance(asyncio.run(once.claim(uuid4().hex)), Granted)
    eventually(lambda: connections(urls[kind]) <= before)


@pytest.mark.parametrize("shut_down", [True, False])
def test_an_event_loop_takes_its_connections_to_a_cluster_with_it(redis_cluster_url: str, shut_down: bool) -> None:
    """Those that ran scripts: the client itself closes the one that it found the cluster's nodes with."""

    def ran_scripts(server: "redis.Redis[Any]") -> set[str]:
        return {each["id"] for each in server.client_list() if each["cmd"].startswith("eval")}

    with redis.Redis.from_url(redis_cluster_url) as server:
        others = ran_scripts(server)  # of tests before this one
        once = AsyncOnce(redis_cluster_url.replace("redis:", "redis+cluster:"), collect=False)
        for _ in range(5):
            loop = asyncio.new_event_loop()
            assert isinstance(loop.run_until_complete(once.claim(uuid4().hex)), Granted)
            if shut_down:
                loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()
        assert isinstance(asyncio.run(once.claim(uuid4().hex)), Granted)
        eventually(lambda: ran_scripts(server) <= others)
    with warnings.catch_warnings(action="ignore"):  # of the client's own connection
        gc.collect()


@pytest.mark.parametrize("kind", ["memory", "sqlite", "postgres", "redis"])
def test_event_loops_in_several_threads_share_one_object(urls: StoreUrls, kind: str) -> None:
    """All are served at the same time, and a key that one of them works on is waited for in the others."""
    once = AsyncOnce(urls[kind], collect=False)
    key, together, calls = uuid4().hex, threading.Barrier(4), []

    async def work() -> str:
        calls.append(1)
        await asyncio.sleep(0.05)
        return "done"

    async def scenario() -> str:
        together.wait(PATIENCE)
        return (await once.call(key, work, wait=PATIENCE)).value

    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(asyncio.run, [scenario() for _ in range(4)]))
    assert (answers, len(calls)) == (["done"] * 4, 1)
    asyncio.run(once.close())  # it listens


@pytest.mark.parametrize("kind", ["postgres", "redis"])
def test_a_test_client_without_its_context_is_served(urls: StoreUrls, kind: str) -> None:
    """It has an event loop for each request, and requests come from several threads."""
    before = connections(urls[kind])
    site = FastAPI()
    site.add_middleware(IdempotencyMiddleware, once=urls[kind])
    done: list[str] = []

    @site.post("/orders")
    async def order() -> str:
        done.append("order")
        return "done"

    client = TestClient(site)
    key = {"Idempotency-Key": uuid4().hex}
    assert [client.post("/orders", headers=key).status_code for _ in range(3)] == [200] * 3
    assert len(done) == 1
    with ThreadPoolExecutor(4) as threads:
        answers = threads.map(lambda _: client.post("/orders", headers={"Idempotency-Key": uuid4().hex}), range(12))
        assert {answer.status_code for answer in answers} == {200}
    eventually(lambda: connections(urls[kind]) <= before)


def test_outcomes_that_one_loop_could_not_record_are_recorded_by_the_next(urls: StoreUrls) -> None:
    from semel.once.stores.memory import MemoryStore
    from semel.testing import FaultyStore

    store = FaultyStore(MemoryStore())
    once = AsyncOnce(store, collect=False, retry_for=0)

    async def work() -> int:
        store.lose_request("complete", 50)
        return 7

    async def scenario() -> None:
        with pytest.raises(StoreUnavailable):
            await once.call("key", work)

    asyncio.run(scenario())
    store._requests.clear()

    async def later() -> int:
        async def again() -> int:
            raise AssertionError("it was done before")

        return (await once.call("key", again, wait=PATIENCE)).value

    assert asyncio.run(later()) == 7


def _noop() -> None:
    """Nothing."""


def test_an_apps_awaited_verbs_serve_any_loop(urls: StoreUrls) -> None:
    before = connections(urls["postgres"])
    app = App(urls["postgres"], dedupe_window=0)
    app.model("noop")(_noop)
    runs = {asyncio.run(app.aio.submit("noop")).id for _ in range(4)}
    with ThreadPoolExecutor(4) as threads:
        runs |= {run.id for run in threads.map(asyncio.run, [app.aio.submit("noop") for _ in range(4)])}
    assert len(runs) == 8
    eventually(lambda: connections(urls["postgres"]) <= before)


@pytest.mark.parametrize("pool", [None, 1, 2])
def test_threads_share_a_few_connections(urls: StoreUrls, pool: int | None) -> None:
    before = connections(urls["postgres"])
    most: list[int] = []
    with Once(urls["postgres"], collect=False, pool=pool) as once, ThreadPoolExecutor(24) as threads:

        def use(number: int) -> None:
            verdict = once.claim(f"{once!r} {pool} {number}")
            assert isinstance(verdict, Granted)
            if number % 25 == 0:
                most.append(connections(urls["postgres"]) - before)
            once.get(f"{number}")
            once.renew(verdict.claim)
            once.complete(verdict.claim, 7)

        list(threads.map(use, range(200)))
    assert max(most) <= (pool or 5)
    eventually(lambda: connections(urls["postgres"]) <= before)


@pytest.mark.parametrize("pool", [0, -1, 1.5, True, "3"])
def test_a_pool_that_cannot_be_is_refused(urls: StoreUrls, pool: Any) -> None:
    for make in (Once, AsyncOnce, App, JobStore):
        with pytest.raises(InvalidRequest, match="pool must be a whole number, 1 or greater"):
            make(urls["postgres"], pool=pool)


def test_a_pool_is_for_urls(urls: StoreUrls) -> None:
    from semel.once.stores.memory import MemoryStore

    with pytest.raises(InvalidRequest, match="opened by its URL"):
        Once(MemoryStore(), pool=3)


def test_reservations_travel_together(urls: StoreUrls) -> None:
    """Twenty-five at once cost a few transactions, and the limit holds to the slot."""
    user = uuid4().hex
    jobs = JobStore(urls["postgres"])
    ledger: Any = jobs._engine._store
    sent: list[int] = []
    inner = ledger.reserve._flush

    async def counted(requests: Any, began: float) -> Any:
        sent.append(len(requests))
        return await inner(requests, began)

    ledger.reserve._flush = counted
    together = threading.Barrier(25)

    def reserve(_: int) -> str | None:
        together.wait(PATIENCE)
        return jobs.reserve_job_slot(user, 10)

    with ThreadPoolExecutor(25) as threads:
        got = [each for each in threads.map(reserve, range(25)) if each is not None]
    jobs.close()
    assert len(set(got)) == len(got) == 10
    assert sum(sent) == 25
    assert len(sent) < 25


BURST = textwrap.dedent("""
    import sys
    from concurrent.futures import ThreadPoolExecutor
    from semel import JobStore

    jobs = JobStore(sys.argv[1], retry_for=150)
    sys.stdin.readline()
    with ThreadPoolExecutor(25) as threads:
        got = list(threads.map(lambda number: jobs.reserve_job_slot(f"{sys.argv[2]} {number}", 1), range(25)))
    assert None not in got
    print(len(set(got)))
""")


@pytest.mark.parametrize(("count", "limit"), [(2, 1), (8, 100)])
def test_processes_that_want_more_connections_than_there_are_wait_for_each_other(
    urls: StoreUrls, count: int, limit: int
) -> None:
    """53300, too many connections, is a fault that passes. Eight processes of 25 threads do with 100 connections."""
    guest = f"guest_{uuid4().hex[:8]}"
    with psycopg.connect(urls["postgres"], autocommit=True) as operator:
        operator.execute(sql.SQL("CREATE ROLE {} LOGIN CONNECTION LIMIT {}").format(sql.Identifier(guest), limit))
        for kind in ("TABLES", "SEQUENCES"):
            operator.execute(
                sql.SQL("GRANT ALL ON ALL {} IN SCHEMA public TO {}").format(sql.SQL(kind), sql.Identifier(guest))
            )
        url = make_url(urls["postgres"]).set(username=guest).render_as_string(hide_password=False)
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", BURST, url, f"{guest} {number}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for number in range(count)
        ]
        try:
            for process in processes:
                assert process.stdin is not None
                process.stdin.write("go\n")
                process.stdin.flush()
            said = [process.communicate(timeout=3 * PATIENCE)[0].strip() for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        operator.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(guest)))
        operator.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(guest)))
    assert said == ["25"] * count


SWITCHES = (
    "SELECT name, setting FROM pg_settings WHERE name IN ('enable_seqscan', 'enable_hashjoin', 'plan_cache_mode')"
)
HOT = {"enable_seqscan": "off", "enable_hashjoin": "off", "plan_cache_mode": "force_generic_plan"}
PLAIN = {"enable_seqscan": "on", "enable_hashjoin": "on", "plan_cache_mode": "auto"}


def switches(conn: Connection) -> dict[str, str]:
    return {row.name: row.setting for row in conn.execute(text(SWITCHES), {"names": list(HOT)})}


@pytest.mark.parametrize("pool", [1, None])
@pytest.mark.parametrize("awaited", [False, True])
def test_planner_switches_are_for_hot_statements_alone(urls: StoreUrls, pool: int | None, awaited: bool) -> None:
    """With a single connection it is switched to and fro; with more of them each kind keeps its own."""

    async def scenario() -> list[dict[str, str]]:
        ledger = RunStore(urls["postgres"], awaited=awaited, pool=pool)
        asks = (ledger.write, ledger.read)
        try:
            return [await ask(verb) for ask in asks for verb in (hot(partial(switches)), switches)]
        finally:
            await ledger.close()

    found = asyncio.run(scenario()) if awaited else run_sync(scenario())
    assert found == [HOT, PLAIN, HOT, PLAIN]


def test_clean_ups_of_keys_are_planned_as_the_server_sees_fit(urls: StoreUrls) -> None:
    """The connection that was used last is on top of the pile, and knows how its statements are planned."""
    database = PostgresDatabase(postgres_engine(parse(urls["postgres"])))
    store = PostgresStore(database)

    def planned_hot() -> bool:
        return database._idle._free[-1].hot

    run_sync(store.claim([ClaimRequest("", "k", "", uuid4().hex, 1_000_000, 1_000_000)]))
    assert planned_hot()
    run_sync(store.purge(10))
    assert not planned_hot()
    run_sync(database.close())


def test_an_error_in_a_verb_costs_no_connection(urls: StoreUrls) -> None:
    """Only a connection that broke is thrown away."""
    ledger = RunStore(urls["postgres"], awaited=False)

    def backend(conn: Connection) -> int:
        return int(conn.execute(text("SELECT pg_backend_pid()")).scalar_one())

    def fails(conn: Connection) -> None:
        raise InvalidRequest("no")

    first = run_sync(ledger.write(backend))
    with pytest.raises(InvalidRequest):
        run_sync(ledger.write(fails))
    assert run_sync(ledger.write(backend)) == first
    run_sync(ledger.close())


@pytest.mark.parametrize("awaited", [False, True])
def test_any_error_of_a_connection_that_was_lost_is_an_outage(urls: StoreUrls, awaited: bool) -> None:
    """Drivers raise what they never meant to, such as AttributeError, when a connection ends under their hands."""

    async def meet_it() -> None:
        ledger = RunStore(urls["postgres"], awaited=awaited, retry_for=0)

        @hot
        def fails(conn: Connection, lost: bool) -> None:
            if lost:
                driver: Any = conn.connection.driver_connection
                driver.terminate() if awaited else driver.close()
            raise AttributeError("'NoneType' object has no attribute 'prepare'")

        with pytest.raises(StoreUnavailable, match="the connection to the database was lost: AttributeError"):
            await ledger.write(fails, lost=True)
        with pytest.raises(AttributeError):
            await ledger.write(fails, lost=False)
        await ledger.close()

    asyncio.run(meet_it())
