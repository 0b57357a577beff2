"""Procrastinate on psycopg."""

from __future__ import annotations

import asyncio
import time
from typing import LiteralString

import psycopg
from procrastinate import App, PsycopgConnector

from peers.peer import Peer
from peers.watch import Tally, from_tasks, in_a_process

UNFINISHED: LiteralString = "SELECT count(*) FROM procrastinate_jobs WHERE status IN ('todo', 'doing')"
POOL = 16
BULK = 5000


def app_on(url: str, tally: Tally | None = None) -> App:
    app = App(connector=PsycopgConnector(conninfo=url, min_size=POOL, max_size=POOL))

    @app.task(name="noop")
    async def noop() -> None:
        assert tally is not None
        tally.tick()

    return app


class Procrastinate(Peer):
    """One async worker on the async psycopg connector, at the best of three concurrencies; keeps jobs, by default.

    Bulk: `batch_defer`, 5000 jobs a call.
    """

    name = "Procrastinate"
    jobs = 1500
    singles = 3000
    many = 10_000
    choices = (1, 10, 50)

    def prepare(self, postgres_url: str, redis_url: str) -> None:
        del redis_url
        self._url = postgres_url
        asyncio.run(self._install())

    async def _install(self) -> None:
        async with app_on(self._url).open_async() as app:
            await app.schema_manager.apply_schema_async()

    def enqueue_many(self, count: int) -> float:
        return asyncio.run(self._enqueue_many(count))

    async def _enqueue_many(self, count: int) -> float:
        async with app_on(self._url).open_async() as app:
            start = time.perf_counter()
            for at in range(0, count, BULK):
                await app.tasks["noop"].batch_defer_async(*({} for _ in range(min(BULK, count - at))))
            seconds = time.perf_counter() - start
        with psycopg.connect(self._url, autocommit=True) as connection:
            connection.execute("ANALYZE")
        return seconds

    async def enqueue_from_tasks(self, count: int, tasks: int = 64) -> float:
        async with app_on(self._url).open_async() as app:
            return await from_tasks(app.tasks["noop"].defer_async, count, tasks)

    def drain(self, count: int) -> float:
        return in_a_process(work, self._url, count, self.choice)

    def clear(self) -> None:
        with psycopg.connect(self._url, autocommit=True) as connection:
            connection.execute("TRUNCATE procrastinate_jobs CASCADE")


def work(url: str, count: int, concurrency: int) -> float:
    return asyncio.run(_work(url, count, concurrency))


async def _work(url: str, count: int, concurrency: int) -> float:
    tally = Tally(count)
    async with app_on(url, tally).open_async() as app:
        running = asyncio.create_task(app.run_worker_async(concurrency=concurrency, install_signal_handlers=False))
        seconds = await asyncio.to_thread(tally.seconds, url, UNFINISHED)
        running.cancel()
        await asyncio.wait({running})
    return seconds
