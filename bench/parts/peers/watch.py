"""Measures a worker in a process of its own, and calls from many concurrent tasks."""

from __future__ import annotations

import asyncio
import faulthandler
import itertools
import os
import threading
import time
from collections.abc import Awaitable, Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, LiteralString

import psycopg

LIMIT = 120
"""Seconds after which a drain has failed, and its worker is ended in any case."""


class Tally:
    """Counts the jobs in the worker's process, at the cost of one addition each."""

    def __init__(self, count: int) -> None:
        self._numbers = itertools.count(1)
        self._count = count
        self._started = 0.0
        self._all_called = threading.Event()

    def tick(self) -> None:
        """Count a job; every job calls this."""
        number = next(self._numbers)
        if number == 1:
            self._started = time.perf_counter()
        if number == self._count:
            self._all_called.set()

    def seconds(self, url: str, unfinished: LiteralString) -> float:
        """Seconds from the first job's call until the query counts no job; it is sent after the last job's call."""
        with psycopg.connect(url, autocommit=True) as connection:
            if not self._all_called.wait(LIMIT):
                raise TimeoutError(f"not all jobs were run in {LIMIT} seconds")
            while connection.execute(unfinished).fetchone() != (0,):
                time.sleep(0.002)  # the database sends no signal for this
                if time.perf_counter() - self._started > LIMIT:
                    raise TimeoutError(f"not all jobs were finished in {LIMIT} seconds")
            return time.perf_counter() - self._started


def in_a_process(work: Callable[..., float], *arguments: Any) -> float:
    """Call the function in a new process, which ends after it; returns its result."""
    context = get_context("spawn")
    answers, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(theirs, work, arguments))
    process.start()
    theirs.close()
    try:
        if not answers.poll(LIMIT + 10):
            raise TimeoutError(f"no answer in {LIMIT} seconds")
        seconds, error = answers.recv()
    except EOFError:
        raise RuntimeError("the worker's process ended without an answer") from None
    finally:
        process.kill()
        process.join()
    if error:
        raise RuntimeError(error)
    return float(seconds)


def _answer(pipe: Connection, work: Callable[..., float], arguments: tuple[Any, ...]) -> None:
    end_in_time()
    try:
        pipe.send((work(*arguments), ""))
    except Exception as error:  # noqa: BLE001 - the benchmark reports any error
        pipe.send((0, f"{type(error).__name__}: {error}"))
    pipe.close()
    os._exit(0)  # without waiting for the peer's threads and pools


def end_in_time() -> None:
    """End this process after the limit, even if its parent was killed before."""
    faulthandler.dump_traceback_later(LIMIT + 20, exit=True)


async def from_tasks(call: Callable[[], Awaitable[Any]], count: int, tasks: int) -> float:
    """Seconds for ``count`` calls, of which ``tasks`` are in progress at a time."""
    waiting = iter(range(count))

    async def work() -> None:
        for _ in waiting:
            await call()

    start = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(tasks)))
    return time.perf_counter() - start


def blocking(call: Callable[[], Any]) -> Callable[[], Awaitable[Any]]:
    """A blocking client's call for `from_tasks`, made in the event loop itself.

    With threads, other tasks could run meanwhile, but fewer jobs are enqueued per second: a fifth fewer with one
    thread, and even fewer with more, because the client works under the GIL.
    """

    async def in_the_loop() -> None:
        call()

    return in_the_loop
