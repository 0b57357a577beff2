"""Trying again while the store is unavailable: a restart, a failover or a lost connection is no caller's problem."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from semel._concurrency.runtime import Runtime
from semel.errors import StoreBroken, StoreUnavailable

A = TypeVar("A")
B = TypeVar("B")
A_contra = TypeVar("A_contra", contravariant=True)
B_co = TypeVar("B_co", covariant=True)

_FIRST_PAUSE, _LAST_PAUSE = 0.05, 1.0
_SHORTEST = 1.0
"""Seconds that a try has at the least: a healthy server that is busy may need as many."""
_ALONE = 5.0
"""Seconds of the only try where there is no second one."""
_NEW = 30.0
"""Seconds of a try that makes the tables."""
_log = logging.getLogger("semel")


class Send(Protocol[A_contra, B_co]):
    """A verb that is sent again."""

    async def __call__(self, requests: A_contra, began: float | None = None) -> B_co:
        """``began``: when the call was made, if that was earlier (``time.monotonic``)."""


def with_retry(
    verb: Callable[[A], Awaitable[B]],
    runtime: Runtime,
    retry_for: float,
    *,
    longest: float | None = None,
    took: Callable[[float], None] | None = None,
    is_new: Callable[[], bool] = lambda: False,
) -> Send[A, B]:
    """The verb, sent again with growing pauses for ``retry_for`` seconds, since every verb may be sent twice.

    A server that is silent counts as one that is away, so no call takes much longer than that. ``longest`` is for
    verbs that may take their time: so many seconds for a single try. ``took`` hears how long it was until the answer
    came. ``is_new``: the next try makes the tables, which may take longer than a call should.
    """

    async def send(requests: A, began: float | None = None) -> B:
        started = time.monotonic()
        ends = (started if began is None else began) + retry_for
        pause = _FIRST_PAUSE
        while True:
            try:
                least = _NEW if is_new() else 0.0
                limit = longest or max(least, time_for_try(retry_for, ends - time.monotonic()))
                answer = await runtime.within(limit, verb(requests))
            except StoreBroken:
                raise
            except StoreUnavailable as error:
                if time.monotonic() + pause > ends:
                    raise
                _log.debug("the store is unavailable, trying again in %.2f s: %s", pause, error)
            else:
                if took is not None:
                    took(time.monotonic() - started)
                return answer
            await runtime.sleep(pause * random.uniform(0.8, 1.2))  # noqa: S311 -- jitter, not a secret
            pause = min(pause * 2, _LAST_PAUSE)

    return send


def time_for_try(retry_for: float, left: float) -> float:
    """How long a single try may take: half of the time that is left, so that a new connection gets its chance."""
    if retry_for == 0:
        return _ALONE
    return left / 2 if left > 2 * _SHORTEST else max(left, _SHORTEST)
