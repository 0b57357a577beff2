"""Retry with backoff: callers need not handle a store's restart, failover or lost connection.

:func:`with_retry` retries a verb of a store until a deadline. Loops that keep their own state, such as a listener or an
HTTP client, take the length of their pauses from a :class:`Backoff`.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from msgspec import Struct

from semel._concurrency.runtime import Runtime
from semel.errors import StoreBroken, StoreUnavailable

A = TypeVar("A")
B = TypeVar("B")
A_contra = TypeVar("A_contra", contravariant=True)
B_co = TypeVar("B_co", covariant=True)

_SHORTEST_TRY = 1.0
"""The least seconds for a try: a healthy but busy server may need them."""
_ONLY_TRY = 5.0
"""Seconds for a try that is not followed by another one."""
_CREATING_TABLES = 30.0
"""Seconds for a try that creates the tables."""
_log = logging.getLogger("semel")
_random = random.SystemRandom()  # not the shared generator, whose sequence belongs to the user who seeded it


def jittered(seconds: float, low: float = 0.8, high: float = 1.2) -> float:
    """The duration, a little shorter or longer at random, so that processes do not act in step."""
    return seconds * _random.uniform(low, high)


class Backoff(Struct, frozen=True):
    """Pauses between tries: ``first`` seconds, then ``factor`` times as long each time, up to ``longest``.

    Each pause is multiplied by a random number between ``low`` and ``high``, so that callers that failed together retry
    at different times.
    """

    first: float
    longest: float = math.inf
    factor: float = 2.0
    low: float = 0.8
    high: float = 1.2

    def after(self, failures: int) -> float:
        """Seconds to wait after that many failed tries, 1 or more."""
        pause = self.first * self.factor ** min(failures - 1, 60)
        return jittered(min(pause, self.longest), self.low, self.high)


_BACKOFF = Backoff(0.05, 1.0)


class Send(Protocol[A_contra, B_co]):
    """A verb with retries."""

    async def __call__(self, requests: A_contra, began: float | None = None) -> B_co:
        """``began``: when the call was made, if that was earlier (``time.monotonic``)."""


def with_retry(
    verb: Callable[[A], Awaitable[B]],
    runtime: Runtime,
    retry_for: float,
    *,
    longest: float | None = None,
    took: Callable[[float], None] | None = None,
    is_new: Callable[[], bool] | None = None,
) -> Send[A, B]:
    """The verb, retried with growing pauses for ``retry_for`` seconds. Every verb may be sent twice.

    A silent server counts as unavailable, so no call takes much longer than that. ``longest`` sets the seconds of a
    single try, for slow verbs. ``took`` is called with the seconds until the reply. ``is_new`` returns True while the
    next try creates the tables, which may take longer than a call should.
    """

    async def send(requests: A, began: float | None = None) -> B:
        started = time.monotonic()
        ends = (started if began is None else began) + retry_for
        failures = 0
        while True:
            try:
                least = _CREATING_TABLES if is_new is not None and is_new() else 0.0
                limit = longest or max(least, time_for_try(retry_for, ends - time.monotonic()))
                answer = await runtime.within(limit, verb(requests))
            except StoreBroken:
                raise
            except StoreUnavailable as error:
                failures += 1
                pause = _BACKOFF.after(failures)
                if time.monotonic() + pause > ends:
                    raise
                _log.debug("the store is unavailable; retrying in %.2f s: %s", pause, error)
            else:
                if took is not None:
                    took(time.monotonic() - started)
                return answer
            await runtime.sleep(pause)

    return send


def time_for_try(retry_for: float, left: float) -> float:
    """How long a single try may take: half of the time that is left, so that there is time for a new connection."""
    if retry_for == 0:
        return _ONLY_TRY
    return left / 2 if left > 2 * _SHORTEST_TRY else max(left, _SHORTEST_TRY)


EVERY = 60.0
"""Seconds between two log lines about one outage."""
SETTLED = 1.0
"""Seconds without a failure before a success ends an outage: alternating failures and successes are one outage."""


class Outage:
    """Logs an outage in few lines: one when it begins, one a minute while it lasts, and one when it is over.

    A loop that retries reports every try here, instead of logging it. ``what`` names what is unavailable, ``meaning``
    the consequence. An outage shorter than ``patience`` seconds is not logged, nor one that is part of the outage
    ``within``, while that lasts.
    """

    def __init__(
        self,
        log: logging.Logger,
        what: str,
        meaning: str,
        *,
        patience: float = 0.0,
        within: Outage | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log = log
        self._what = what
        self._meaning = meaning
        self._patience = patience
        self._within = within
        self._clock = clock
        self._began: float | None = None
        self._failed = 0.0
        self._logged: float | None = None

    @property
    def ongoing(self) -> bool:
        """Whether an outage has begun and is not over."""
        return self._began is not None

    def failed(self, error: object) -> None:
        """Report a failed try."""
        now = self._failed = self._clock()
        if self._began is None:
            self._began = now
        lasted = now - self._began
        if lasted < self._patience or (self._logged is not None and now - self._logged < EVERY):
            return
        if self._within is not None and self._within.ongoing:
            return
        since = "is unavailable" if self._logged is None else f"has been unavailable for {lasted:.0f} s"
        self._logged = now
        self._log.warning("%s %s; %s: %s", self._what, since, self._meaning, error)

    def succeeded(self) -> None:
        """Report a try that succeeded."""
        if self._began is None:
            return
        now = self._clock()
        if now - self._failed < SETTLED:
            return
        began, self._began = self._began, None
        logged, self._logged = self._logged, None
        if logged is not None:
            self._log.warning("%s is available again after %.0f s", self._what, now - began)
