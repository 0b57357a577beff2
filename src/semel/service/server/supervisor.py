"""A supervisor of child processes: starts them, restarts those that die, and stops them.

The parent does no work of its own: it imports the code, forks, and waits. A child reports that it is ready through a
pipe. A second pipe, whose other end only the parent has, closes when the parent dies: then the child ends by itself.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn, TypeAlias

from semel.runs.worker.session import GIVE_BACK_TIMEOUT

UNFIT = 78
"""The exit code of a child that cannot work here: it has printed why, and is not restarted."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds before a dead child is restarted: twice as long each time."""
HEALTHY_AFTER = 60.0
"""Seconds after which the pause before the next restart is the first one again."""
LAST_GRACE = 2 * GIVE_BACK_TIMEOUT
"""Seconds for a child to end after the second SIGTERM: a worker gives its runs back meanwhile."""
ORPHAN_GRACE = 2.0
"""Seconds between the two SIGTERMs of a child whose parent died."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

Main: TypeAlias = Callable[[Callable[[], None]], int]
"""The main function of a child: takes a function to call when it is ready, and returns the exit code."""

_log = logging.getLogger("semel.serve")


class SupervisedProcess:
    """A child process that is to be running."""

    def __init__(self, name: str, main: Main, *, on_exit: Callable[[int], None] | None = None) -> None:
        self.name = name
        self.main = main
        self.on_exit = on_exit
        self.pid: int | None = None
        self.ready = False
        self.was_ready = False
        self.ready_read = -1
        self.due: float | None = 0.0
        self._started_at = 0.0
        self._pause = 0.0

    def started(self, pid: int, ready_read: int) -> None:
        """It was forked; ``ready_read`` is the pipe on which it reports that it is ready."""
        self.pid, self.ready_read, self.ready, self.due = pid, ready_read, False, None
        self._started_at = time.monotonic()

    def read_ready(self) -> None:
        """Read its pipe, which has a byte or was closed."""
        if os.read(self.ready_read, 1):
            self.ready = self.was_ready = True
        else:
            os.close(self.ready_read)
            self.ready_read = -1

    def exited(self) -> float:
        """It has exited; returns the seconds until it is restarted."""
        if self.pid is not None and self.on_exit is not None:
            self.on_exit(self.pid)
        self.pid, self.ready = None, False
        if self.ready_read >= 0:
            os.close(self.ready_read)
            self.ready_read = -1
        healthy = time.monotonic() - self._started_at > HEALTHY_AFTER
        self._pause = FIRST_PAUSE if healthy or not self._pause else min(2 * self._pause, LONGEST_PAUSE)
        self.due = time.monotonic() + self._pause
        return self._pause


class Supervisor:
    """Supervises children until a signal. ``drain``: seconds for them to end after the first SIGTERM."""

    def __init__(self, drain: float) -> None:
        self._drain = drain
        self._children: list[SupervisedProcess] = []
        self._lifeline = os.pipe()
        self._signals = os.pipe()
        for end in self._signals:
            os.set_blocking(end, False)
        self._stops = 0
        self._stopped_at = 0.0
        self._code = 0

    def run(self, first: SupervisedProcess, others: list[SupervisedProcess], ready: Callable[[], None]) -> int:
        """Start the first; once it is ready, call ``ready`` and start the others. Returns the exit code."""
        self._children = [first]
        announced = False
        before = {number: signal.signal(number, self._on_signal) for number in (*SIGNALS, signal.SIGCHLD)}
        wakes = signal.set_wakeup_fd(self._signals[1], warn_on_full_buffer=False)
        try:
            while any(child.pid for child in self._children) or not self._stops:
                if first.was_ready and not announced:
                    announced = True
                    self._children += others
                    ready()
                self._start_due()
                self._wait()
                self._reap()
                self._escalate()
        finally:
            signal.set_wakeup_fd(wakes)
            for number, handler in before.items():
                signal.signal(number, handler)
            for end in (*self._lifeline, *self._signals):
                os.close(end)
        return self._code

    def _on_signal(self, number: int, _frame: object) -> None:
        if number != signal.SIGCHLD:
            self._stop(0)

    def _stop(self, code: int) -> None:
        """Send SIGTERM to every child; the second one ends it at once."""
        self._stops += 1
        if self._stops <= 2:  # further signals do not extend the deadline
            self._stopped_at = time.monotonic()
        self._code = max(self._code, code)
        for child in self._children:
            if child.pid is not None:
                with suppress(ProcessLookupError):  # it was reaped just now
                    os.kill(child.pid, signal.SIGTERM)

    def _escalate(self) -> None:
        """Send the second SIGTERM, and then SIGKILL, to children that do not end in time."""
        if not self._stops:
            return
        late = time.monotonic() - self._stopped_at
        if self._stops == 1 and late > self._drain:
            _log.warning("some processes did not stop in time: stopping them at once")
            self._stop(0)
        elif self._stops > 1 and late > LAST_GRACE:
            for child in self._children:
                if child.pid is not None:
                    _log.error("the %s does not stop: sending SIGKILL", child.name)
                    os.kill(child.pid, signal.SIGKILL)
            self._stopped_at = time.monotonic()

    def _start_due(self) -> None:
        now = time.monotonic()
        for child in self._children:
            if not self._stops and child.due is not None and child.due <= now:
                self._fork(child)

    def _wait(self) -> None:
        """Wait until a pipe is readable, a signal comes, or a restart is due; half a second at the most."""
        dues = [child.due for child in self._children if child.due is not None and not self._stops]
        pause = max(0.0, min([0.5, *(due - time.monotonic() for due in dues)]))
        pipes = {child.ready_read: child for child in self._children if child.ready_read >= 0}
        readable, _, _ = select.select([self._signals[0], *pipes], [], [], pause)
        for end in readable:
            if end in pipes:
                pipes[end].read_ready()
            else:
                with suppress(BlockingIOError):
                    os.read(end, 4096)

    def _reap(self) -> None:
        for child in self._children:
            if child.pid is None:
                continue
            pid, status = os.waitpid(child.pid, os.WNOHANG)
            if not pid:
                continue
            code = os.waitstatus_to_exitcode(status)
            was_ready = child.was_ready
            pause = child.exited()
            if self._stops:
                self._code = max(self._code, 1 if code == UNFIT else 0)
            elif code == UNFIT or (not was_ready and child is self._children[0]):
                self._stop(1)
            else:
                how = f"signal {-code}" if code < 0 else f"exit code {code}"
                _log.error("the %s has died (%s); restarting it in %g s", child.name, how, pause)

    def _fork(self, child: SupervisedProcess) -> None:
        """Signals are blocked meanwhile: a child without handlers would miss one, or run the parent's."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            if self._stops:
                return
            ready_read, ready_write = os.pipe()
            pid = os.fork()
            if not pid:
                self._run_child(child, ready_read, ready_write)
            os.close(ready_write)
            child.started(pid, ready_read)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def _run_child(self, child: SupervisedProcess, ready_read: int, ready_write: int) -> NoReturn:
        """In the child: reset the signals, leave the terminal's session, close the parent's pipes, and run."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for number in (*SIGNALS, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            os.setsid()
            for end in (ready_read, self._lifeline[1], *self._signals, *(each.ready_read for each in self._children)):
                if end >= 0:
                    os.close(end)
            end_with_parent(self._lifeline[0])
            code = child.main(lambda: _report_ready(ready_write))
        except KeyboardInterrupt:
            code = 130
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        except BaseException:  # noqa: BLE001 -- the process ends with it
            _log.exception("the %s failed", child.name)
        finally:
            logging.shutdown()
            with suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)


def _report_ready(ready_write: int) -> None:
    os.write(ready_write, b"R")


def end_with_parent(lifeline: int) -> None:
    """Send this process two SIGTERMs when the other end of the pipe is closed."""

    def watch() -> None:
        os.read(lifeline, 1)
        _log.error("the supervisor of this process has died: stopping")
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(ORPHAN_GRACE)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(LAST_GRACE)
        os._exit(1)

    threading.Thread(target=watch, name="semel-lifeline", daemon=True).start()
