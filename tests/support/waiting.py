"""Polls for what another thread or process does without sending a signal."""

import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE = 60.0
"""Seconds after which a test that waits fails."""

FIRST_PAUSE, LONGEST_PAUSE = 0.005, 0.1
"""Seconds between two looks. A look may be a request, and with many of them who is waited for has to wait, too."""

T = TypeVar("T")


def eventually(condition: Callable[[], T], what: object = "the condition") -> T:
    """Return the first true value of the condition; fails if there is none in time."""
    deadline, pause = time.monotonic() + PATIENCE, FIRST_PAUSE
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what}: not so within {PATIENCE:g} seconds"
        time.sleep(pause)
        pause = min(1.2 * pause, LONGEST_PAUSE)
    return found
