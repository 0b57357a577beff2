"""How long a call may take: said where the call begins, and kept by whatever waits further down."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_ends: ContextVar[float] = ContextVar("semel_deadline", default=math.inf)
_SLACK = 0.005
"""Seconds: an event loop may wake a little before the time that it was told."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Let nothing inside wait for longer than this. Of nested deadlines the earliest holds."""
    token = _ends.set(min(_ends.get(), time.monotonic() + seconds))
    try:
        yield
    finally:
        _ends.reset(token)


def seconds_left(most: float = math.inf) -> float:
    """The seconds until the deadline, not below 0; ``most`` where it is further away, or there is none."""
    ends = _ends.get()
    return most if ends == math.inf else max(0.0, min(most, ends - time.monotonic()))


def is_over() -> bool:
    """True when the deadline has passed."""
    return time.monotonic() + _SLACK >= _ends.get()
