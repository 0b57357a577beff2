"""Measuring a worker in a process of its own, and calls from many tasks at once."""

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
"""Seconds after which a drain has failed, and its worker ends whether anyone looks or not."""


class Tally:
    """Counts the jobs inside the worker's process, at the price of an addition each."""

    def __init__(self, count: int) -> None:
        self._numbers = itertools.count(1)
        self._count = count
        self._started = 0.0
        self._all_called = threading.Event()

    def tick(self) -> None:
        """To be called by every job."""
        number = next(self._numbers)
        if number == 1:
            self._started = time.perf_counter()
        if number == self._count:
            self._all_called.set()

    def seconds(self, url: str, unfinished: LiteralString) -> float:
        """From the first job's call until this query counts none; it is asked only once the last job was called."""
        with psycopg.connect(url, autocommit=True) as connection:
            if not self._all_called.wait(LIMIT):
                raise TimeoutError(f"not all jobs were run in {LIMIT} seconds")
            while connection.execute(unfinished).fetchone() != (0,):
                time.sleep(0.002)  # the store has no signal for this
                if time.perf_counter() - self._started > LIMIT:
                    raise TimeoutError(f"not all jobs were finished in {LIMIT} seconds")
            return time.perf_counter() - self._started


def in_a_process(work: Callable[..., float], *arguments: Any) -> float:
    """What this function returns when a fresh process calls it, which ends with the answer."""
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
    except Exception as error:  # noqa: BLE001 - whatever it is, the benchmark is to say it
        pipe.send((0, f"{type(error).__name__}: {error}"))
    pipe.close()
    os._exit(0)  # threads and pools of the peer need not be waited for


def end_in_time() -> None:
    """This process ends after the limit, even when its parent was killed before it could end it."""
    faulthandler.dump_traceback_later(LIMIT + 20, exit=True)


async def from_tasks(call: Callable[[], Awaitable[Any]], count: int, tasks: int) -> float:
    """Seconds for so many calls, of which so many are under way at once."""
    waiting = iter(range(count))

    async def work() -> None:
        for _ in waiting:
            await call()

    start = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(tasks)))
    return time.perf_counter() - start


def blocking(call: Callable[[], Any]) -> Callable[[], Awaitable[Any]]:
    """A blocking client's call for `from_tasks`, made in the loop itself.

    Threads would let other tasks run meanwhile, but they enqueue less a second: with one of them a fifth less, with
    more of them less again, because the client's work is done under Python's global lock.
    """

    async def in_the_loop() -> None:
        call()

    return in_the_loop
