"""Polls for what another thread or process does without sending a signal."""

import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE = 60.0
"""Seconds after which a test that waits fails."""

T = TypeVar("T")


def eventually(condition: Callable[[], T], what: object = "the condition") -> T:
    """Return the first true value of the condition; fails if there is none in time."""
    deadline = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what}: not so within {PATIENCE:g} seconds"
        time.sleep(0.01)
    return found
