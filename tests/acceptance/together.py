"""Ways to do things at the same moment: in threads, in tasks, in processes."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

PATIENCE = 60
"""Seconds after which something that never comes fails a test instead of hanging it."""


def in_threads(count: int, work: Callable[[int], T]) -> list[T]:
    """``work(0)``, ``work(1)``, … at the same moment, each in a thread of its own."""
    barrier = threading.Barrier(count)

    def start(number: int) -> T:
        barrier.wait(PATIENCE)
        return work(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(start, range(count)))


async def in_tasks(count: int, work: Callable[[int], Awaitable[T]]) -> list[T]:
    """``work(0)``, ``work(1)``, … as tasks that start in the same turn of the loop."""
    return await asyncio.gather(*(work(number) for number in range(count)))


def in_processes(pool: Executor, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> list[T]:
    """The same job in each of the eight processes; it calls ``acceptance.jobs.together`` where all must meet."""
    return [future.result(PATIENCE) for future in [pool.submit(job, *args, **kwargs) for _ in range(8)]]


@contextmanager
def beside(work: Callable[[], T]) -> Iterator["Future[T]"]:
    """While inside, ``work`` runs in a thread beside the test; its value or error is in the future."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(work)
