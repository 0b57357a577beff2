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


def patient(verb: Callable[[A], Awaitable[B]], runtime: Runtime, retry_for: float) -> Callable[[A], Awaitable[B]]:
    """The verb, sent again with growing pauses for ``retry_for`` seconds, since every verb may be sent twice."""

    async def send(requests: A) -> B:
        started = time.monotonic()
        pause = _FIRST_PAUSE
        while True:
            try:
                return await verb(requests)
            except StoreBroken:
                raise
            except StoreUnavailable as error:
                if time.monotonic() + pause > started + retry_for:
                    raise
                _log.info("the store is away, trying again in %.2f s: %s", pause, error)
            await runtime.sleep(pause * random.uniform(0.8, 1.2))  # noqa: S311 -- jitter, not a secret
            pause = min(pause * 2, _LAST_PAUSE)

    return send
