"""Trying again while the store is away: a restart, a failover or a lost connection is not the caller's problem."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from semel.errors import StoreBroken, StoreUnavailable
from semel.once.runtime import Runtime

A = TypeVar("A")
B = TypeVar("B")

_FIRST_PAUSE, _LAST_PAUSE = 0.05, 1.0
_log = logging.getLogger("semel")


def patient(
    verb: Callable[[A], Awaitable[B]], runtime: Runtime, retry_for: float, took: Callable[[float], None] | None = None
) -> Callable[[A], Awaitable[B]]:
    """The verb, sent again with growing pauses for ``retry_for`` seconds, since every verb may be sent twice.

    ``took`` hears how long it was until the answer came.
    """

    async def send(requests: A) -> B:
        started = time.monotonic()
        pause = _FIRST_PAUSE
        while True:
            try:
                answer = await verb(requests)
            except StoreBroken:
                raise
            except StoreUnavailable as error:
                if time.monotonic() + pause > started + retry_for:
                    raise
                _log.debug("the store is unavailable, trying again in %.2f s: %s", pause, error)
            else:
                if took is not None:
                    took(time.monotonic() - started)
                return answer
            await runtime.sleep(pause * random.uniform(0.8, 1.2))  # noqa: S311 -- jitter, not a secret
            pause = min(pause * 2, _LAST_PAUSE)

    return send
