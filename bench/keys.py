"""Benchmark of keys against hand-written code and the nearest peers: `./dev bench keys`.

Every row is measured in one run against its reference, in turn, several rounds, on the same durable server (fsync on),
and printed as the median of the rounds' ratios. Rows can be chosen by a part of their name: `./dev bench keys redis`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sqlite3
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import asyncpg
import redis
import redis.asyncio
from table import Row, show

from semel import AsyncOnce, Granted, Once
from semel.cli import main as semel_command
from semel.once.stores import postgres as semel_postgres
from support import servers

ROUNDS = 5
TASKS = 256
numbers = count()


def fresh(many: int) -> list[str]:
    """Keys that were never used."""
    return [f"{os.urandom(6).hex()}-{next(numbers)}" for _ in range(many)]


async def rate(pair: Callable[[str], Awaitable[None]], pairs: int, tasks: int) -> float:
    """Pairs of claim and complete per second, with this many tasks."""
    waiting = iter(fresh(pairs))

    async def work() -> None:
        for key in waiting:
            await pair(key)

    start = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(tasks)))
    return pairs / (time.perf_counter() - start)


def thread_rate(pair: Callable[[str], None], pairs: int, threads: int) -> float:
    """The same with threads."""
    waiting = iter(fresh(pairs))

    def work() -> None:
        for key in waiting:
            pair(key)

    workers = [threading.Thread(target=work) for _ in range(threads)]
    start = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return pairs / (time.perf_counter() - start)


ONE_CLAIM = """
INSERT INTO by_hand (key, state, lease_until, expires)
VALUES ($1, 'claimed', now() + interval '60 seconds', now() + interval '1 day')
ON CONFLICT (key) DO NOTHING RETURNING key
"""
ONE_COMPLETE = "UPDATE by_hand SET state = 'completed', value = $2 WHERE key = $1 AND state = 'claimed' RETURNING key"
BY_HAND = """
CREATE TABLE IF NOT EXISTS by_hand (
  key text PRIMARY KEY, state text NOT NULL, value bytea,
  lease_until timestamptz NOT NULL, expires timestamptz NOT NULL
);
CREATE INDEX IF NOT EXISTS by_hand_expires ON by_hand (expires);
"""


def numbered(statement: Any) -> tuple[str, list[str]]:
    """semel's statement with $1, $2, … as asyncpg requires, and the names in that order."""
    names: list[str] = []

    def number(match: re.Match[str]) -> str:
        if match[1] not in names:
            names.append(match[1])
        return f"${names.index(match[1]) + 1}"

    return re.sub(r"(?<![:\w]):(\w+)", number, str(statement)), names


class HandBatched:
    """Careful hand-written batching on bare asyncpg: a queue per statement, flushed when the last batch returns."""

    def __init__(self, connection: asyncpg.Connection, statement: Any) -> None:
        self._connection = connection
        self._sql, self._names = numbered(statement)
        self._queue: list[tuple[dict[str, Any], asyncio.Future[None]]] = []
        self._flushing: asyncio.Task[None] | None = None

    def send(self, row: dict[str, Any]) -> asyncio.Future[None]:
        done = asyncio.get_running_loop().create_future()
        self._queue.append((row, done))
        if self._flushing is None:
            self._flushing = asyncio.create_task(self._flush())
        return done

    def _columns(self, rows: list[dict[str, Any]]) -> list[Any]:
        terms = {"now": None, "patience": "1000"}
        return [terms[name] if name in terms else [row[name] for row in rows] for name in self._names]

    async def _flush(self) -> None:
        while self._queue:
            batch, self._queue = self._queue, []
            batch.sort(key=lambda each: each[0]["key"])
            columns = self._columns([row for row, _ in batch])
            rows = await self._connection.fetch(self._sql, *columns)
            assert len(rows) == len(batch)
            for _, done in batch:
                done.set_result(None)
        self._flushing = None


def asked_by_hand(key: str) -> dict[str, Any]:
    return {
        "scope": "default",
        "key": key,
        "fingerprint": "",
        "attempt": key,
        "unknown": False,
        "lease": 60_000_000,
        "ttl": 86_400_000_000,
        "state": "claimed",
        "kind": "",
        "value": None,
        "value_ttl": None,
    }


def completed_by_hand(key: str, fence: int) -> dict[str, Any]:
    return {
        "scope": "default",
        "key": key,
        "fence": fence,
        "kind": "value",
        "value": b"\x81\xa2id\x07",
        "value_ttl": None,
    }


class HandBatchedClaims(HandBatched):
    async def _flush(self) -> None:
        while self._queue:
            batch, self._queue = self._queue, []
            batch.sort(key=lambda each: each[0]["key"])
            columns = self._columns([row for row, _ in batch])
            fences = {row[0]: row[1] for row in await self._connection.fetch(self._sql, *columns)}
            for row, done in batch:
                done.set_result(fences[row["attempt"]])
        self._flushing = None


def semel_pair(once: AsyncOnce) -> Callable[[str], Awaitable[None]]:
    async def pair(key: str) -> None:
        verdict = await once.claim(key)
        assert isinstance(verdict, Granted)
        await once.complete(verdict.claim, {"id": 7})

    return pair


def postgres_rows(url: str) -> Iterator[Row]:
    yield from asyncio.run(_postgres_rows(url))


async def _postgres_rows(url: str) -> list[Row]:
    dsn = url
    claims_connection, completes_connection = await asyncpg.connect(dsn), await asyncpg.connect(dsn)
    await claims_connection.execute(BY_HAND)
    pool = await asyncpg.create_pool(dsn, min_size=16, max_size=16)
    claims = HandBatchedClaims(claims_connection, semel_postgres._INSERT)
    completes = HandBatched(completes_connection, semel_postgres._COMPLETE)

    async def batched(key: str) -> None:
        fence = await claims.send(asked_by_hand(key))
        await completes.send(completed_by_hand(key, fence))

    async def usual(key: str) -> None:
        assert await pool.fetchrow(ONE_CLAIM, key)
        assert await pool.fetchrow(ONE_COMPLETE, key, b"\x81\xa2id\x07")

    insert, insert_names = numbered(semel_postgres._INSERT_ONE)
    update, update_names = numbered(semel_postgres._COMPLETE_ONE)
    terms = {"now": None, "patience": ""}

    async def same(key: str) -> None:
        """semel's own two statements, each for one key, on bare asyncpg."""
        asked = asked_by_hand(key) | terms
        claimed = await claims_connection.fetchrow(insert, *(asked[name] for name in insert_names))
        done = completed_by_hand(key, claimed["fence"]) | terms
        assert await claims_connection.fetchrow(update, *(done[name] for name in update_names))

    async def simplest(key: str) -> None:
        """A minimal claim and completion: no fence, no fingerprint, no lease."""
        assert await claims_connection.fetchrow(ONE_CLAIM, key)
        assert await claims_connection.fetchrow(ONE_COMPLETE, key, b"\x81\xa2id\x07")

    against_batched, against_usual = [], []
    async with AsyncOnce(url, collect=False) as once:
        ours = semel_pair(once)
        for pair in (ours, batched, usual):
            await rate(pair, 2000, TASKS)  # warms up connections, plans and caches
        for _ in range(ROUNDS):
            mine = await rate(ours, 8000, TASKS)
            against_batched.append(mine / await rate(batched, 8000, TASKS))
            mine_again = await rate(ours, 8000, TASKS)
            against_usual.append(mine_again / await rate(usual, 3000, TASKS))
        latency = [await median_latency(ours) / await median_latency(same) for _ in range(ROUNDS)]
        against_simplest = [await median_latency(ours) / await median_latency(simplest) for _ in range(ROUNDS)]
    await pool.close()
    await claims_connection.close()
    await completes_connection.close()
    return [
        Row("PostgreSQL, 256 tasks, against the same statements batched by hand on asyncpg", against_batched, 0.85,
            note=f"{mine:,.0f} pairs/s"),
        Row("PostgreSQL, 256 tasks, against one statement per call, pool of 16", against_usual, 3),
        Row("PostgreSQL, 1 caller, median latency against the bare two statements", latency, 1.35, at_most=True),
        Row("PostgreSQL, 1 caller, median latency against the simplest two statements (no fence, no takeover)",
            against_simplest, None),
    ]  # fmt: skip


async def median_latency(pair: Callable[[str], Awaitable[None]]) -> float:
    times = []
    for key in fresh(400):
        start = time.perf_counter()
        await pair(key)
        times.append(time.perf_counter() - start)
    return median(times)


def redis_rows(url: str) -> Iterator[Row]:
    yield from asyncio.run(_redis_rows(url))
    yield from peer_rows(url)


def pooled(url: str) -> redis.asyncio.Redis:
    """A client with 32 connections: more are slower here."""
    return redis.asyncio.Redis(connection_pool=redis.asyncio.BlockingConnectionPool.from_url(url, max_connections=32))


async def _redis_rows(url: str) -> list[Row]:
    client = pooled(url)

    async def piped(pairs: int) -> float:
        """Hand-written: 256 SET NX in a pipeline, then 256 SET with the value in a pipeline, and so on."""
        keys, start = fresh(pairs), time.perf_counter()
        for at in range(0, pairs, TASKS):
            pipe = client.pipeline(transaction=False)
            for key in keys[at : at + TASKS]:
                pipe.set(f"hand:{key}", "claimed", nx=True, ex=86400)
            assert all(await pipe.execute())
            pipe = client.pipeline(transaction=False)
            for key in keys[at : at + TASKS]:
                pipe.set(f"hand:{key}", b"\x81\xa2id\x07", xx=True, ex=86400)
            assert all(await pipe.execute())
        return pairs / (time.perf_counter() - start)

    async def awaited(key: str) -> None:
        assert await client.set(f"hand:{key}", "claimed", nx=True, ex=86400)
        assert await client.set(f"hand:{key}", b"\x81\xa2id\x07", xx=True, ex=86400)

    against_piped, against_awaited = [], []
    async with AsyncOnce(url) as once:
        ours = semel_pair(once)
        await rate(ours, 2000, TASKS)
        await rate(awaited, 500, TASKS)
        await piped(2000)
        for _ in range(ROUNDS):
            mine = await rate(ours, 8192, TASKS)
            against_piped.append(mine / await piped(8192))
            mine_again = await rate(ours, 8192, TASKS)
            against_awaited.append(mine_again / await rate(awaited, 4096, TASKS))
    await client.aclose()
    return [
        Row("Redis, 256 tasks, against redis-py pipelined by hand", against_piped, 0.6, note=f"{mine:,.0f} pairs/s"),
        Row("Redis, 256 tasks, against one awaited SET NX per call", against_awaited, 2),
    ]


def peer_rows(url: str) -> Iterator[Row]:
    """The nearest peers that run here, each used as its documentation shows, on the same Redis."""
    yield powertools_row(url)
    yield asyncio.run(header_row(url))


def powertools_row(url: str) -> Row:
    os.environ.setdefault("AWS_DEFAULT_REGION", "none")
    from aws_lambda_powertools.utilities.idempotency import IdempotencyConfig, idempotent_function
    from aws_lambda_powertools.utilities.idempotency.persistence.redis import RedisCachePersistenceLayer

    layer = RedisCachePersistenceLayer(client=redis.Redis.from_url(url, decode_responses=True))

    class Lambda:
        @staticmethod
        def get_remaining_time_in_millis() -> int:
            return 60_000

    config = IdempotencyConfig()
    config.register_lambda_context(Lambda())  # type: ignore[arg-type]

    @idempotent_function(data_keyword_argument="order", persistence_store=layer, config=config)
    def theirs(order: dict[str, Any]) -> dict[str, Any]:
        return {"id": order["id"]}

    ratios = []
    with Once(url) as once:

        @once.guard()
        def ours(order: dict[str, Any]) -> dict[str, Any]:
            return {"id": order["id"]}

        for _ in range(ROUNDS):
            mine = thread_rate(lambda key: ours(order={"id": key}) and None, 2000, 16)
            ratios.append(mine / thread_rate(lambda key: theirs(order={"id": key}) and None, 1000, 16))
    return Row("Redis, 16 threads, a guarded function, against aws-lambda-powertools", ratios, 1)


async def header_row(url: str) -> Row:
    from idempotency_header_middleware.backends.redis import RedisBackend

    client = pooled(url)
    backend = RedisBackend(client)

    async def theirs(key: str) -> None:
        """The calls that its middleware makes for a new request, in order."""
        assert await backend.get_stored_response(key) is None
        assert not await backend.store_idempotency_key(key)
        await backend.store_response_data(key, {"id": 7}, 201)
        await backend.clear_idempotency_key(key)

    ratios = []
    async with AsyncOnce(url) as once:
        ours = semel_pair(once)
        for _ in range(ROUNDS):
            mine = await rate(ours, 4096, 64)
            ratios.append(mine / await rate(theirs, 1024, 64))
    await client.aclose()
    return Row("Redis, 64 tasks, claim + complete, against asgi-idempotency-header's backend", ratios, 1)


def sqlite_rows(folder: Path) -> Iterator[Row]:
    path = folder / "hand.db"
    with sqlite3.connect(path) as setup:
        setup.execute("PRAGMA journal_mode = WAL")
        setup.executescript(BY_HAND.replace("timestamptz", "real").replace("bytea", "blob"))
    local = threading.local()

    def transaction(statement: str, values: tuple[Any, ...]) -> None:
        if not hasattr(local, "connection"):
            local.connection = sqlite3.connect(path, isolation_level=None, timeout=60)
            local.connection.execute("PRAGMA synchronous = FULL")
        local.connection.execute("BEGIN IMMEDIATE")
        assert local.connection.execute(statement, values).rowcount == 1
        local.connection.execute("COMMIT")

    def by_hand(key: str) -> None:
        now = time.time()
        transaction("INSERT INTO by_hand VALUES (?, 'claimed', NULL, ?, ?)", (key, now + 60, now + 86400))
        transaction("UPDATE by_hand SET state = 'completed', value = ? WHERE key = ?", (b"\x81\xa2id\x07", key))

    ratios = []
    with Once(f"sqlite:///{folder / 'semel.db'}", collect=False) as once:

        def ours(key: str) -> None:
            verdict = once.claim(key)
            assert isinstance(verdict, Granted)
            once.complete(verdict.claim, {"id": 7})

        thread_rate(ours, 500, 64)
        for _ in range(ROUNDS):
            mine = thread_rate(ours, 6000, 64)
            ratios.append(mine / thread_rate(by_hand, 640, 64))
    yield Row("SQLite (synchronous=FULL), 64 threads, against one transaction per call", ratios, 8,
              note=f"{mine:,.0f} pairs/s")  # fmt: skip


def memory_rows() -> Iterator[Row]:
    rates = []
    for _ in range(ROUNDS * 2):
        with Once("memory://") as once:
            keys = [f"message-{number}" for number in range(100_000)]
            start = time.perf_counter()
            for key in keys:
                once.check_and_mark("ack_id", key, {"status": "ok"})
            for key in keys:
                once.check_and_mark("ack_id", key, {"status": "ok"})
            rates.append(2 * len(keys) / (time.perf_counter() - start) / 1000)
    yield Row("memory, check_and_mark, thousands a second in one thread (half new, half seen)", rates, 300)


def fill_postgres(dsn: str, many: int) -> None:
    async def fill() -> None:
        connection = await asyncpg.connect(dsn)
        await connection.execute(
            """INSERT INTO semel_keys
               SELECT 'default', md5(n::text), '', 'completed', n, n::text, false, false, t, 0, t,
                      t + 86400000000 + n, t, 'value', '\\x81a2696407', NULL
               FROM generate_series(1, $1::int) n, (SELECT (extract(epoch FROM now()) * 1000000)::bigint AS t) clock""",
            many,
        )
        await connection.execute("VACUUM ANALYZE semel_keys")
        await connection.execute("CHECKPOINT")
        await connection.close()

    asyncio.run(fill())


def fill_sqlite(path: Path, many: int) -> None:
    now = time.time_ns() // 1000
    with sqlite3.connect(path) as connection:
        connection.executemany(
            "INSERT INTO semel_keys "
            "VALUES ('default', ?, '', 'completed', ?, ?, 0, 0, ?, 0, ?, ?, ?, 'value', ?, NULL)",
            (
                (os.urandom(16).hex(), n, str(n), now, now, now + 86_400_000_000 + n, now, b"\x81\xa2id\x07")
                for n in range(many)
            ),
        )
    connection.close()


def growth(small: str, large: str) -> list[float]:
    """The ratios of the cost of a claim on the large table to that on the small one, measured one at a time."""

    def claims(once: Once, many: int) -> float:
        start = time.perf_counter()
        for key in fresh(many):
            once.claim(key)
        return time.perf_counter() - start

    with Once(small, collect=False) as few, Once(large, collect=False) as lots:
        claims(few, 200)
        claims(lots, 200)
        return [claims(lots, 300) / claims(few, 300) for _ in range(2 * ROUNDS)]


def growth_rows(server: servers.Postgres, folder: Path) -> Iterator[Row]:
    urls = []
    for many in (10_000, 1_000_000):
        url = server.database()
        semel_command(["migrate", url])
        fill_postgres(url, many)
        urls.append(url)
    yield Row("growth, PostgreSQL: a claim among 1,000,000 keys against 10,000", growth(*urls), 1.25, at_most=True)
    urls = []
    for many in (10_000, 1_000_000):
        path = folder / f"grown-{many}.db"
        with Once(f"sqlite:///{path}", collect=False):
            pass
        fill_sqlite(path, many)
        urls.append(f"sqlite:///{path}")
    yield Row("growth, SQLite: a claim among 1,000,000 keys against 10,000", growth(*urls), 1.25, at_most=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", nargs="*", help="postgres, redis, sqlite, memory, growth; all without it")
    chosen = parser.parse_args().part or ["memory", "sqlite", "redis", "postgres", "growth"]
    with ExitStack() as stack:
        return show(rows(chosen, stack))


def rows(chosen: list[str], stack: ExitStack) -> Iterator[Row]:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="semel-bench-")))
    if "memory" in chosen:
        yield from memory_rows()
    if "sqlite" in chosen:
        yield from sqlite_rows(folder)
    if "redis" in chosen:
        yield from redis_rows(stack.enter_context(servers.redis()).url)
    if "postgres" in chosen or "growth" in chosen:
        server = stack.enter_context(servers.postgres(durable=True))
        if "postgres" in chosen:
            url = server.database()
            semel_command(["migrate", url])
            yield from postgres_rows(url)
        if "growth" in chosen:
            yield from growth_rows(server, folder)


if __name__ == "__main__":
    sys.exit(main())
