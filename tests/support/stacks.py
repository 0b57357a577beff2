"""Shows where the processes of a server are, if one of them does not answer."""

import asyncio
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Iterable

SHOW = signal.SIGRTMIN
"""No server uses this signal."""


def show_stacks_on_signal() -> None:
    """Write the stacks of all threads and tasks to stderr whenever the signal ``SHOW`` comes."""
    signal.signal(SHOW, lambda *_: _show())


def _show() -> None:
    faulthandler.dump_traceback(all_threads=True)
    try:
        for task in asyncio.all_tasks():
            task.print_stack(file=sys.stderr)
    except RuntimeError:  # no event loop is running here
        pass
    sys.stderr.flush()


def ask_for_stacks(pids: Iterable[int]) -> None:
    """Ask the processes, and give them a moment to write."""
    for pid in pids:
        os.kill(pid, SHOW)
    time.sleep(1.0)
