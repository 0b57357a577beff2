"""RQ, with and without a process for each job."""

from __future__ import annotations

import time
from typing import Any

from redis import Redis
from rq import Queue, SimpleWorker, Worker

from peers.peer import Peer
from peers.watch import blocking, from_tasks, in_a_process

BULK = 1000


def noop() -> None:
    """The job."""


class SimpleRq(Peer):
    """RQ's SimpleWorker in burst mode, the fastest by its performance notes; logs nothing per job.

    The worker is timed around its own `execute_job`, which includes what it records of a job. Bulk: `enqueue_many`,
    1000 jobs a call.
    """

    name = "RQ SimpleWorker"
    jobs = 1000
    singles = 3000
    many = 8000
    forking = False

    def prepare(self, postgres_url: str, redis_url: str) -> None:
        del postgres_url
        self._url = redis_url
        self._connection = Redis.from_url(redis_url)
        self._queue = Queue("peers", connection=self._connection)
        self._connection.ping()

    def enqueue_many(self, count: int) -> float:
        start = time.perf_counter()
        for at in range(0, count, BULK):
            self._queue.enqueue_many([Queue.prepare_data(noop) for _ in range(min(BULK, count - at))])
        return time.perf_counter() - start

    async def enqueue_from_tasks(self, count: int, tasks: int = 64) -> float:
        return await from_tasks(blocking(lambda: self._queue.enqueue(noop)), count, tasks)

    def drain(self, count: int) -> float:
        return in_a_process(work, self._url, count, self.forking)

    def clear(self) -> None:
        self._connection.flushdb()

    def close(self) -> None:
        self._connection.flushdb()
        self._connection.close()


class ForkingRq(SimpleRq):
    """RQ's default Worker in burst mode: it forks a process for each job."""

    name = "RQ Worker (forks)"
    jobs = 250
    singles = 1000
    many = 2000
    forking = True


def work(url: str, count: int, forking: bool) -> float:
    times: list[float] = []

    class Timed(Worker if forking else SimpleWorker):  # type: ignore[misc]
        def execute_job(self, *arguments: Any) -> None:
            times.append(time.perf_counter())
            super().execute_job(*arguments)
            times.append(time.perf_counter())

    connection = Redis.from_url(url)
    Timed([Queue("peers", connection=connection)], connection=connection).work(burst=True, logging_level="WARNING")
    if len(times) != 2 * count:
        raise RuntimeError(f"{len(times) // 2} jobs were run instead of {count}")
    return times[-1] - times[0]
