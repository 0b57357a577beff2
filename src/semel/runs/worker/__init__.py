"""The worker: leases runs in batches, renews their leases, executes them, and writes their ends.

One process, one event loop. Async models run in the loop, blocking ones in warm child processes (or in threads, if the
model asks for that), so that a model that blocks does not stop the heartbeat.
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
from typing import TYPE_CHECKING, Any, TypedDict

from semel._concurrency.sync import LateClass
from semel._validation import TEN_YEARS, checked_int, checked_name, checked_number
from semel.errors import InvalidRequest
from semel.runs.app import App
from semel.runs.models.model import refuse_while_loading
from semel.runs.types import new_id

if TYPE_CHECKING:
    from semel.runs.worker.fetcher import WorkerConfig
    from semel.runs.worker.session import WorkerSession
else:  # they import SQLAlchemy, and a child of a worker imports this class only because its program does
    WorkerConfig = LateClass("semel.runs.worker.fetcher", "WorkerConfig")
    WorkerSession = LateClass("semel.runs.worker.session", "WorkerSession")

_log = logging.getLogger("semel.worker")


class WorkerOptions(TypedDict, total=False):
    """The keyword arguments of :class:`Worker`."""

    queues: Sequence[str]
    name: str | None
    concurrency: int
    processes: int | None
    threads: int
    max_runs_per_child: int | None
    poll: float
    drain: float
    sweep_every: float | None
    wait_for_database: float


class Worker:
    """Executes the runs of an app until it is stopped.

    ``queues`` are served in this order. Up to ``concurrency`` async runs, ``processes`` child processes (one per CPU by
    default) and ``threads`` are active at the same time. After ``stop`` no run is begun, and runs that are not finished
    ``drain`` seconds later are given back. The worker polls for runs every ``poll`` seconds, even if no notification
    comes. Every ``sweep_every`` seconds one elected worker takes back the runs of lost workers (None: never this one).
    If the database is unavailable at the start, the worker goes on trying for ``wait_for_database`` seconds.
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
        wait_for_database: float = 0.0,
    ) -> None:
        refuse_while_loading("a worker was made")
        if not queues or isinstance(queues, str):
            raise InvalidRequest("queues is a list of names, such as ['default']")
        self.app = app
        self.name = checked_name("name", name or "worker", most=100, empty=False)
        self.id = f"{self.name}-{new_id()[-12:]}"  # without the host: users can see it
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
            wait_for_database=checked_number("wait_for_database", wait_for_database, 0, TEN_YEARS),
        )
        if not any(self._config.slots.values()):
            raise InvalidRequest("a worker needs a slot: concurrency, processes or threads must be over 0")
        self._session: WorkerSession | None = None
        self._stops = 0

    def run(self) -> None:
        """Work until SIGTERM or SIGINT; a second signal gives back unfinished runs at once."""
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
        """Begin no new runs, and stop when the active ones are finished or given back. A second call stops at once."""
        self._stops += 1
        if self._session is not None:
            self._session.stop(at_once=self._stops > 1)

    async def serve(self) -> None:
        """Work in this event loop until :meth:`stop`."""
        if not self._stops:
            session = self._session = WorkerSession(self.app, self._config)
            async with session:
                await session.work()

    async def perform(self, run_id: str) -> bool:
        """Lease this run, if possible, and execute it. Returns False if it could not be leased."""
        session = self._session = WorkerSession(self.app, self._config)
        async with session:
            return await session.work_on(run_id)


@contextmanager
def _collecting_seldom() -> Iterator[None]:
    """Collect garbage less often: a worker makes many short-lived objects, and imported modules are never freed.

    Objects that the program has frozen itself stay frozen.
    """
    before = gc.get_threshold()
    freezes = not gc.get_freeze_count()
    if freezes:
        gc.collect()
        gc.freeze()
    gc.set_threshold(before[0] and max(50_000, before[0]), *before[1:])  # 0: the program collects by itself
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if freezes:
            gc.unfreeze()


def _run_through(loop: asyncio.AbstractEventLoop, main: asyncio.Task[None]) -> None:
    """Run the task to its end, even if another task, of some model, stops the loop by calling sys.exit."""
    while not main.done():
        try:
            loop.run_until_complete(main)
        except (SystemExit, KeyboardInterrupt) as error:
            if main.done():
                raise
            _log.error("a model raised %r in a task of its own, which would have ended the worker", error)
    main.result()


def run_loop(work: Coroutine[Any, Any, None]) -> None:
    """As asyncio.run, but does not wait for a task or thread that does not end: it is left behind."""
    loop = asyncio.new_event_loop()
    executor = ThreadPoolExecutor(32, thread_name_prefix="semel-blocking")
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
            task._log_destroy_pending = False  # type: ignore[attr-defined]  # it was cancelled, and did not end
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        executor.shutdown(wait=False, cancel_futures=True)
        asyncio.set_event_loop(None)
        loop.close()


@contextmanager
def working(worker: Worker) -> Iterator[Worker]:
    """Run the worker in a thread until the end of the block; then stop it, and wait until it has stopped."""
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
