"""Eight processes for the rules that only processes can break: started when first needed, kept for the next rule."""

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
    "semel.testing.rules.shared",
    "semel.once.stores.redis",
    "semel.once.stores.postgres",
    "psycopg",
    "asyncpg",
]
"""What takes a second or two to import, times eight; what is not installed is passed over."""

_READY, _GO, _DONE, _FAILED = "ready", "go", "done", "failed"


class WorkerProcesses:
    """Processes that each open the store, say so, and at a word do their job on it all at once."""

    _present: WorkerProcesses | None = None

    def __init__(self) -> None:
        context = _context()
        self._lines: list[Connection] = []
        self._processes = []
        for number in range(SIZE):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), name=f"semel-crew-{number}", daemon=True)
            process.start()
            theirs.close()  # so that the end of either process is the end of the line for the other
            self._lines.append(ours)
            self._processes.append(process)

    @classmethod
    def present(cls) -> WorkerProcesses:
        """The crew of this process."""
        if cls._present is None:
            cls._present = cls()
        return cls._present

    def work(
        self, world: World, opener: Opener, job: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]
    ) -> list[Any]:
        """Call ``job(world, *arguments)`` in one process for each of the arguments; give the answers in order."""
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
            self.dismiss()  # some may be waiting for a word that will not come
            raise

    def _expect(self, line: Connection, wanted: str) -> Any:
        if not line.poll(PATIENCE):
            raise AssertionError(f"a process was not {wanted} within {PATIENCE} s")
        said, answer = line.recv()
        if said != wanted:
            raise AssertionError(f"a process failed:\n{answer}")
        return answer

    def dismiss(self) -> None:
        """End the processes; whoever needs a crew next gets a new one."""
        WorkerProcesses._present = None
        for line in self._lines:
            line.close()
        for process in self._processes:
            process.join(1)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()


def _context() -> SpawnContext | ForkServerContext:
    """Processes that inherit nothing of this one; where the system can, forked from one that did the imports."""
    if "forkserver" not in get_all_start_methods():
        return get_context("spawn")
    context = get_context("forkserver")
    context.set_forkserver_preload(_IMPORTS)
    return context


def _serve(line: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent; its end ends the line
    while True:
        try:
            _one_job(line)
        except EOFError:
            return
        except Exception:  # noqa: BLE001 -- whatever it is, the parent shall show it
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
