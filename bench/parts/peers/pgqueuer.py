"""pgqueuer on asyncpg."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from typing import LiteralString

import asyncpg
import psycopg
import uvloop
from pgqueuer import AsyncpgDriver, AsyncpgPoolDriver, Job, PgQueuer, Queries

from peers.peer import Peer
from peers.watch import Tally, from_tasks, in_a_process

UNFINISHED: LiteralString = "SELECT count(*) FROM pgqueuer"
BATCH = 100


class Pgqueuer(Peer):
    """One worker on one asyncpg connection under uvloop, in batches of 100; an async entrypoint.

    Its own benchmark and its command line use uvloop and the plain asyncpg driver, too. All tables are logged, by
    default, because the jobs of the other peers also survive a power cut.
    """

    name = "pgqueuer"
    jobs = 20_000
    singles = 3000
    many = 40_000

    def prepare(self, postgres_url: str, redis_url: str) -> None:
        del redis_url
        self._url = postgres_url
        asyncio.run(self._install())

    async def _install(self) -> None:
        connection = await asyncpg.connect(self._url)
        await Queries(AsyncpgDriver(connection)).install()
        await connection.close()

    def enqueue_many(self, count: int) -> float:
        return uvloop.run(self._enqueue_many(count))

    async def _enqueue_many(self, count: int) -> float:
        connection = await asyncpg.connect(self._url)
        queries = Queries(AsyncpgDriver(connection))
        start = time.perf_counter()
        await queries.enqueue(["noop"] * count, [None] * count, [0] * count)
        seconds = time.perf_counter() - start
        await connection.execute("ANALYZE")
        await connection.close()
        return seconds

    async def enqueue_from_tasks(self, count: int, tasks: int = 64) -> float:
        async with asyncpg.create_pool(self._url, min_size=16, max_size=16) as pool:
            queries = Queries(AsyncpgPoolDriver(pool))
            return await from_tasks(lambda: queries.enqueue("noop", None), count, tasks)

    def drain(self, count: int) -> float:
        return in_a_process(work, self._url, count)

    def clear(self) -> None:
        with psycopg.connect(self._url, autocommit=True) as connection:
            connection.execute("TRUNCATE pgqueuer")


def work(url: str, count: int) -> float:
    return uvloop.run(_work(url, count))


async def _work(url: str, count: int) -> float:
    connection = await asyncpg.connect(url)
    queuer = PgQueuer(AsyncpgDriver(connection))
    tally = Tally(count)

    @queuer.entrypoint("noop")
    async def noop(job: Job) -> None:
        del job
        tally.tick()

    running = asyncio.create_task(queuer.run(batch_size=BATCH, dequeue_timeout=timedelta(seconds=1)))
    seconds = await asyncio.to_thread(tally.seconds, url, UNFINISHED)
    queuer.shutdown.set()
    await running
    return seconds
