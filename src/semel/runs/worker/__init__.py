"""The worker: leases runs in batches, keeps them alive, executes them where they belong, and writes their ends.

One process, one event loop. Async models run in the loop, blocking ones in warm child processes (or in threads where
the model asks for it), so that the heartbeat goes on whatever they do.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Thread
from typing import Any, TypedDict

from semel._validation import TEN_YEARS, checked_int, checked_name, checked_number
from semel.errors import InvalidRequest
from semel.runs.app import App
from semel.runs.models.model import refuse_while_loading
from semel.runs.types import new_id
from semel.runs.worker.fetcher import WorkerConfig
from semel.runs.worker.session import WorkerSession

_log = logging.getLogger("semel.worker")


class WorkerOptions(TypedDict, total=False):
    """The options of a worker."""

    queues: Sequence[str]
    name: str | None
    concurrency: int
    processes: int | None
    threads: int
    max_runs_per_child: int | None
    poll: float
    drain: float
    sweep_every: float | None


class Worker:
    """Works on the runs of an app until it is stopped.

    ``queues`` are served in their order. ``concurrency`` async runs, ``processes`` child processes and ``threads`` at
    the same time. After ``stop`` nothing new is begun; what is not done ``drain`` seconds later is given back.
    It looks for work every ``poll`` seconds even when it hears of none. Every ``sweep_every`` seconds one worker, which
    is elected, takes back what others have lost (None: not this one).
    """

    def __init__(
        self,
        app: App,
        *,
        queues: Sequence[str] = ("default",),
        name: str | None = None,
        concurrency: int = 100,
        processes: int | None = None,
        threads: int = 8,
        max_runs_per_child: int | None = None,
        poll: float = 10.0,
        drain: float = 30.0,
        sweep_every: float | None = 5.0,
    ) -> None:
        refuse_while_loading("a worker was made")
        if not queues or isinstance(queues, str):
            raise InvalidRequest("queues is a list of names, such as ['default']")
        self.app = app
        self.name = checked_name("name", name or "worker", most=100, empty=False)
        self.id = f"{self.name}-{new_id()[-12:]}"  # who submitted a run sees it, and need not know our machines
        self._config = WorkerConfig(
            id=self.id,
            name=self.name,
            queues=tuple(checked_name("queue", queue, empty=False) for queue in queues),
            slots={
                "loop": checked_int("concurrency", concurrency, 0, 10_000),
                "process": checked_int(
                    "processes", (os.cpu_count() or 1) if processes is None else processes, 0, 10_000
                ),
                "thread": checked_int("threads", threads, 0, 10_000),
            },
            max_runs_per_child=None
            if max_runs_per_child is None
            else checked_int("max_runs_per_child", max_runs_per_child, 1),
            poll=checked_number("poll", poll, 0.01, TEN_YEARS),
            drain=checked_number("drain", drain, 0, TEN_YEARS),
            sweep_every=None if sweep_every is None else checked_number("sweep_every", sweep_every, 0.01, TEN_YEARS),
        )
        if not any(self._config.slots.values()):
            raise InvalidRequest("a worker needs a slot: concurrency, processes or threads must be over 0")
        self._session: WorkerSession | None = None
        self._stops = 0

    def run(self) -> None:
        """Work until SIGTERM or SIGINT; a second one gives back at once what is not done."""
        with _collecting_seldom():
            run_loop(self._run_with_signals())

    async def _run_with_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        try:
            await self.serve()
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def stop(self) -> None:
        """Begin nothing new; end when all that is held is done, or the time to drain is over. Twice: at once."""
        self._stops += 1
        if self._session is not None:
            self._session.stop(at_once=self._stops > 1)

    async def serve(self) -> None:
        """Work until :meth:`stop`, in this loop."""
        if not self._stops:
            session = self._session = WorkerSession(self.app, self._config)
            async with session:
                await session.work()

    async def perform(self, run_id: str) -> bool:
        """Lease this run, if it can be had, and see it through; False when there is nothing to do."""
        session = self._session = WorkerSession(self.app, self._config)
        async with session:
            return await session.work_on(run_id)


@contextmanager
def _collecting_seldom() -> Iterator[None]:
    """A worker makes many objects that die young, and what was imported never dies: look for garbage less often."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def _run_through(loop: asyncio.AbstractEventLoop, main: asyncio.Task[None]) -> None:
    """A task of some model that calls sys.exit stops the loop, but not us."""
    while not main.done():
        try:
            loop.run_until_complete(main)
        except (SystemExit, KeyboardInterrupt) as error:
            if main.done():
                raise
            _log.error("a model raised %r in a task of its own, which would have ended the worker", error)
    main.result()


def run_loop(work: Coroutine[Any, Any, None]) -> None:
    """As asyncio.run, but a task or thread that does not end is left behind instead of waited for."""
    loop = asyncio.new_event_loop()
    executor = ThreadPoolExecutor(32, thread_name_prefix="semel-apart")
    loop.set_default_executor(executor)
    try:
        asyncio.set_event_loop(loop)
        _run_through(loop, loop.create_task(work))
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left, timeout=1.0))
        for task in asyncio.all_tasks(loop):
            task._log_destroy_pending = False  # type: ignore[attr-defined]  # it was told, and would not
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        executor.shutdown(wait=False, cancel_futures=True)
        asyncio.set_event_loop(None)
        loop.close()


@contextmanager
def working(worker: Worker) -> Iterator[Worker]:
    """The worker in a thread of its own, until the end of the block; then it is stopped, and waited for."""
    failed: list[BaseException] = []
    began: Future[asyncio.AbstractEventLoop] = Future()

    async def serve() -> None:
        began.set_result(asyncio.get_running_loop())
        await worker.serve()

    def work() -> None:
        try:
            run_loop(serve())
        except BaseException as error:  # noqa: BLE001 -- raised where the block ends
            _log.error("the worker ended: %s", error)
            failed.append(error)

    thread = Thread(target=work, name=f"semel-worker-{worker.name}", daemon=True)
    thread.start()
    loop = began.result()
    try:
        yield worker
    finally:
        if not loop.is_closed():
            loop.call_soon_threadsafe(worker.stop)
        thread.join()
    if failed:
        raise failed[0]
