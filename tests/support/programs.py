"""Programs in processes of their own that start fast: they are forked from a small process that has their imports.

    with Program("tell(hear() + one)", one=1) as program:
        program.tell(7)
        assert program.hear() == 8

That process has no threads and no open files, so a program starts as clean as a new Python.
"""

import multiprocessing
import os
import signal
import sys
import textwrap
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Self

from support import warm_python
from support.long_lived import collect_seldom
from support.waiting import eventually

PATIENCE = 60
"""Seconds without a message after which a program counts as hanging."""

PRELOADED = ["pytest", "semel.testing.rules.multiprocess", "uvicorn", *warm_python.PRELOADED]

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(PRELOADED)


def share_fork_server() -> None:
    """Let the conformance kit import the same: a process has one fork server, and who starts it decides its imports."""
    if kit := sys.modules.get("semel.testing.processes"):
        kit._IMPORTS[:] = PRELOADED


def stop(pid: int) -> None:
    """SIGSTOP, and wait until every thread has stopped: one in a system call ends that first, and may get a lock."""

    def has_stopped() -> bool:
        try:
            stats = [file.read_text() for file in Path(f"/proc/{pid}/task").glob("*/stat")]
        except (FileNotFoundError, ProcessLookupError):  # a thread has just ended
            return False
        return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)

    os.kill(pid, signal.SIGSTOP)
    eventually(has_stopped, "the process has stopped")


class Failed(Exception):
    """A program raised an error; the message has its traceback."""


class Program:
    """Runs Python source with the given names, and with `tell` and `hear` to send to and receive from the test."""

    def __init__(self, source: str, **given: Any) -> None:
        self._pipe, theirs = processes.Pipe()
        self._process = processes.Process(target=play, args=(textwrap.dedent(source), given, theirs))
        self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._pipe.close()
        self._process.join(0 if kind else PATIENCE)
        self._process.kill()
        self._process.join()
        self._process.close()

    def tell(self, value: Any = None) -> None:
        self._pipe.send(value)

    def hear(self) -> Any:
        """The next object that the program sends."""
        if not self._pipe.poll(4 * PATIENCE):
            raise Failed("the program hangs")
        good, said = self._pipe.recv()
        if not good:
            raise Failed(said)
        return said


def play(source: str, given: dict[str, Any], pipe: Connection) -> None:
    """Run the source, in the child."""
    collect_seldom()

    def hear() -> Any:
        try:
            return pipe.recv()
        except EOFError:
            raise SystemExit from None  # the test has ended

    program = sys.modules["program"] = ModuleType("program")  # a module, so that its functions can be pickled
    vars(program).update(given, tell=lambda value=None: pipe.send((True, value)), hear=hear)
    try:
        exec(compile(source, "<program>", "exec"), vars(program))
    except Exception:
        pipe.send((False, traceback.format_exc()))
        raise


def outcome(source: str, **given: Any) -> Any:
    """Run a program; returns the first object that it sends."""
    with Program(source, **given) as program:
        return program.hear()
