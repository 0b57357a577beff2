"""Eight processes for the rules about several processes. Started on first use, and kept for the next rule."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import get_all_start_methods, get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from typing import Any

from semel.testing.clock import FakeClock
from semel.testing.harness import PATIENCE, Opener, World

SIZE = 8

_IMPORTS = [
    "pytest",
    "semel.testing.rules.multiprocess",
    "semel.once.stores.redis",
    "semel.once.stores.postgres",
    "semel.db.asyncio",
    "psycopg",
    "asyncpg",
]
"""Slow imports, done once in the fork server. Packages that are not installed are skipped."""

_READY, _GO, _DONE, _FAILED = "ready", "go", "done", "failed"


class WorkerProcesses:
    """Processes that each open the store, report that they are ready, and start their job at the same moment."""

    _instance: WorkerProcesses | None = None

    def __init__(self) -> None:
        context = _context()
        self._lines: list[Connection] = []
        self._processes = []
        for number in range(SIZE):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), name=f"semel-worker-{number}", daemon=True)
            process.start()
            theirs.close()  # so that each side gets EOFError when the other process ends
            self._lines.append(ours)
            self._processes.append(process)

    @classmethod
    def shared(cls) -> WorkerProcesses:
        """The processes of this test process."""
        if cls._instance is None:
            cls._instance = cls()
        return cls._instance

    def work(
        self, world: World, opener: Opener, job: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]
    ) -> list[Any]:
        """Call ``job(world, *arguments)`` in one process for each of the arguments; return the answers in order."""
        lines = self._lines[: len(arguments)]
        try:
            for line, own in zip(lines, arguments, strict=True):
                line.send((opener, world.is_async, world.clock.us, job, own))
            for line in lines:
                self._expect(line, _READY)
            for line in lines:
                line.send(_GO)
            return [self._expect(line, _DONE) for line in lines]
        except BaseException:
            self.stop()  # some may wait for a message that will not come
            raise

    def _expect(self, line: Connection, wanted: str) -> Any:
        if not line.poll(PATIENCE):
            raise AssertionError(f"a process was not {wanted} within {PATIENCE} s")
        state, answer = line.recv()
        if state != wanted:
            raise AssertionError(f"a process failed:\n{answer}")
        return answer

    def stop(self) -> None:
        """End the processes. The next call of :meth:`shared` starts new ones."""
        WorkerProcesses._instance = None
        for line in self._lines:
            line.close()
        for process in self._processes:
            process.join(1)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()


def _context() -> SpawnContext | ForkServerContext:
    """Processes that inherit nothing from this one, forked from a server that did the imports if the system can."""
    if "forkserver" not in get_all_start_methods():
        return get_context("spawn")
    context = get_context("forkserver")
    context.set_forkserver_preload(_IMPORTS)
    return context


def _serve(line: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, whose end closes the pipe
    while True:
        try:
            _one_job(line)
        except EOFError:
            return
        except Exception:  # noqa: BLE001 -- the parent shows it
            line.send((_FAILED, traceback.format_exc()))


def _one_job(line: Connection) -> None:
    opener, is_async, now, job, arguments = line.recv()
    clock = FakeClock()
    clock.us = now
    with World(opener, is_async=is_async, clock=clock) as world:
        line.send((_READY, None))
        line.recv()
        answer = job(world, *arguments)
    line.send((_DONE, answer))
