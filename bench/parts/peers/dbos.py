"""DBOS (Python) on PostgreSQL."""

from __future__ import annotations

import time
from typing import LiteralString

import psycopg
from dbos import DBOS, DBOSClient, DBOSConfig, EnqueueOptions
from sqlalchemy import create_engine, make_url

from peers.peer import Peer
from peers.watch import Tally, from_tasks, in_a_process

UNFINISHED: LiteralString = "SELECT count(*) FROM dbos.workflow_status WHERE status IN ('ENQUEUED', 'PENDING')"
OPTIONS: EnqueueOptions = {"workflow_name": "noop", "queue_name": "peers"}
POOL = 20


def launch(url: str, tally: Tally | None, kind: str, threads: int) -> None:
    config: DBOSConfig = {
        "name": "peers",
        "system_database_url": url,
        "application_version": "1",
        "sys_db_pool_size": POOL,
        "max_executor_threads": threads,
        "log_level": "ERROR",
    }
    DBOS(config=config)

    if kind == "async":

        @DBOS.workflow(name="noop")
        async def noop() -> None:
            assert tally is not None
            tally.tick()

    else:

        @DBOS.workflow(name="noop")
        def noop() -> None:
            assert tally is not None
            tally.tick()

    DBOS.launch()
    DBOS.register_queue("peers", polling_interval_sec=0.01)


class Dbos(Peer):
    """One DBOS process with a queue without limits, polled every 10 ms; a workflow without steps.

    Blocking in 8 or 64 threads, or in its event loop, whichever is the fastest; its documentation shows all three.
    Bulk: `enqueue_in_transaction`, all in one transaction.
    """

    name = "DBOS"
    jobs = 1500
    singles = 1000
    many = 1500
    choices = (("blocking", 8), ("blocking", 64), ("async", 8))

    def prepare(self, postgres_url: str, redis_url: str) -> None:
        del redis_url
        self._url = postgres_url
        self._alchemy_url = make_url(postgres_url).set(drivername="postgresql+psycopg")
        in_a_process(install, postgres_url)
        self._client = DBOSClient(system_database_url=postgres_url, system_database_pool_size=POOL)

    def enqueue_many(self, count: int) -> float:
        engine = create_engine(self._alchemy_url)
        with engine.connect() as connection:
            start = time.perf_counter()
            with connection.begin():
                for _ in range(count):
                    self._client.enqueue_in_transaction(connection, OPTIONS)
            seconds = time.perf_counter() - start
        engine.dispose()
        with psycopg.connect(self._url, autocommit=True) as plain:
            plain.execute("ANALYZE")
        return seconds

    async def enqueue_from_tasks(self, count: int, tasks: int = 64) -> float:
        return await from_tasks(lambda: self._client.enqueue_async(OPTIONS), count, tasks)

    def drain(self, count: int) -> float:
        return in_a_process(work, self._url, count, *self.choice)

    def clear(self) -> None:
        with psycopg.connect(self._url, autocommit=True) as connection:
            connection.execute("TRUNCATE dbos.workflow_status CASCADE")

    def close(self) -> None:
        self._client.destroy()


def install(url: str) -> float:
    launch(url, None, "blocking", 8)
    return 0


def work(url: str, count: int, kind: str, threads: int) -> float:
    tally = Tally(count)
    launch(url, tally, kind, threads)
    return tally.seconds(url, UNFINISHED)
