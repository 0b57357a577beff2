"""Processes that are looked after: started, started again when they die, told to end, and never left behind.

The parent does no work of its own: it forks what it has imported, hears from each child when it is ready, and waits.
Every child holds one end of a pipe whose other end only the parent has: when the parent is gone, however that came
about, the pipe closes and the child ends by itself.
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

from semel.runs.worker.session import GIVE_BACK

UNFIT = 78
"""How a child exits that could never work here: it has said why, and is not started again."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds before a child that died is started again: twice as long each time."""
WELL_AFTER = 60.0
"""Seconds after which a child that still lives is well: its next death counts as the first."""
LAST_GRACE = 2 * GIVE_BACK
"""Seconds for a child that was told twice to end: a worker gives its runs back meanwhile."""
ORPHANED = 2.0
"""Seconds for what is under way in a child whose parent is gone."""
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

Main: TypeAlias = Callable[[Callable[[], None]], int]
"""What a child does; it is given a function to call when it is ready, and answers its exit code."""

_log = logging.getLogger("semel.serve")


class SupervisedProcess:
    """A process that ought to be there."""

    def __init__(self, name: str, main: Main, *, ended: Callable[[int], None] | None = None) -> None:
        self.name = name
        self.main = main
        self.ended = ended
        self.pid: int | None = None
        self.ready = False
        self.was_ready = False
        self.hears = -1
        self.due: float | None = 0.0
        self._started = 0.0
        self._pause = 0.0

    def began(self, pid: int, hears: int) -> None:
        """It was started; ``hears`` is where it says that it is ready."""
        self.pid, self.hears, self.ready, self.due = pid, hears, False, None
        self._started = time.monotonic()

    def listen(self) -> None:
        """It said something, or closed its pipe."""
        if os.read(self.hears, 1):
            self.ready = self.was_ready = True
        else:
            os.close(self.hears)
            self.hears = -1

    def died(self) -> float:
        """It is gone; the seconds after which it is due again."""
        if self.pid is not None and self.ended is not None:
            self.ended(self.pid)
        self.pid, self.ready = None, False
        if self.hears >= 0:
            os.close(self.hears)
            self.hears = -1
        well = time.monotonic() - self._started > WELL_AFTER
        self._pause = FIRST_PAUSE if well or not self._pause else min(2 * self._pause, LONGEST_PAUSE)
        self.due = time.monotonic() + self._pause
        return self._pause


class Supervisor:
    """Looks after children until it is told to end. ``patience``: seconds for them to end when told once."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._children: list[SupervisedProcess] = []
        self._lifeline = os.pipe()
        self._signals = os.pipe()
        for end in self._signals:
            os.set_blocking(end, False)
        self._told = 0
        self._told_at = 0.0
        self._code = 0

    def run(self, first: SupervisedProcess, others: list[SupervisedProcess], ready: Callable[[], None]) -> int:
        """Start the first; once it is ready call ``ready`` and start the others. Answers the exit code."""
        self._children = [first]
        announced = False
        before = {number: signal.signal(number, self._on_signal) for number in (*ENDING, signal.SIGCHLD)}
        wakes = signal.set_wakeup_fd(self._signals[1], warn_on_full_buffer=False)
        try:
            while any(child.pid for child in self._children) or not self._told:
                if first.was_ready and not announced:
                    announced = True
                    self._children += others
                    ready()
                self._start_due()
                self._wait()
                self._bury()
                self._hasten()
        finally:
            signal.set_wakeup_fd(wakes)
            for number, handler in before.items():
                signal.signal(number, handler)
            for end in (*self._lifeline, *self._signals):
                os.close(end)
        return self._code

    def _on_signal(self, number: int, _frame: object) -> None:
        if number != signal.SIGCHLD:
            self._end(0)

    def _end(self, code: int) -> None:
        """Tell everybody to end; the second time, at once."""
        self._told += 1
        if self._told <= 2:  # who asks more often does not wait longer
            self._told_at = time.monotonic()
        self._code = max(self._code, code)
        for child in self._children:
            if child.pid is not None:
                with suppress(ProcessLookupError):  # the signal came just when it was buried
                    os.kill(child.pid, signal.SIGTERM)

    def _hasten(self) -> None:
        """Who does not end in time is told again, and then not asked any more."""
        if not self._told:
            return
        late = time.monotonic() - self._told_at
        if self._told == 1 and late > self._patience:
            _log.warning("not everything has ended in time: ending it at once")
            self._end(0)
        elif self._told > 1 and late > LAST_GRACE:
            for child in self._children:
                if child.pid is not None:
                    _log.error("the %s does not end: it is killed", child.name)
                    os.kill(child.pid, signal.SIGKILL)
            self._told_at = time.monotonic()

    def _start_due(self) -> None:
        now = time.monotonic()
        for child in self._children:
            if not self._told and child.due is not None and child.due <= now:
                self._fork(child)

    def _wait(self) -> None:
        """Until a child says something, a signal comes, or something is due; half a second at the most."""
        dues = [child.due for child in self._children if child.due is not None and not self._told]
        pause = max(0.0, min([0.5, *(due - time.monotonic() for due in dues)]))
        talking = {child.hears: child for child in self._children if child.hears >= 0}
        heard, _, _ = select.select([self._signals[0], *talking], [], [], pause)
        for end in heard:
            if end in talking:
                talking[end].listen()
            else:
                with suppress(BlockingIOError):
                    os.read(end, 4096)

    def _bury(self) -> None:
        for child in self._children:
            if child.pid is None:
                continue
            pid, status = os.waitpid(child.pid, os.WNOHANG)
            if not pid:
                continue
            code = os.waitstatus_to_exitcode(status)
            never = not child.was_ready
            pause = child.died()
            if self._told:
                self._code = max(self._code, 1 if code == UNFIT else 0)
            elif code == UNFIT or (never and child is self._children[0]):
                self._end(1)
            else:
                how = f"signal {-code}" if code < 0 else f"exit code {code}"
                _log.error("the %s has died (%s); it is started again in %g s", child.name, how, pause)

    def _fork(self, child: SupervisedProcess) -> None:
        """No signal comes between: a child that does not know yet how to end would miss it, or take it for ours."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        try:
            if self._told:
                return
            hears, says = os.pipe()
            pid = os.fork()
            if not pid:
                self._become(child, hears, says)
            os.close(says)
            child.began(pid, hears)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)

    def _become(self, child: SupervisedProcess, hears: int, says: int) -> NoReturn:
        """In the child: what was the parent's is closed, and its terminal is not ours to be interrupted from."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for number in (*ENDING, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
            os.setsid()
            for end in (hears, self._lifeline[1], *self._signals, *(each.hears for each in self._children)):
                if end >= 0:
                    os.close(end)
            end_with_the_parent(self._lifeline[0])
            code = child.main(lambda: _say_ready(says))
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


def _say_ready(says: int) -> None:
    os.write(says, b"R")


def end_with_the_parent(lifeline: int) -> None:
    """End this process, as if it were told to, when the other end of the pipe is gone; twice, so that it is soon."""

    def watch() -> None:
        os.read(lifeline, 1)
        _log.error("the process that looked after this one is gone: ending")
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(ORPHANED)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(LAST_GRACE)
        os._exit(1)

    threading.Thread(target=watch, name="semel-lifeline", daemon=True).start()
