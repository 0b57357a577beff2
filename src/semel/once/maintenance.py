"""Background tasks of the key engine: remove expired keys, renew leases, sample the store."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence

from semel._concurrency.periodic import RENEW_AFTER, TRY_AGAIN_AFTER, PeriodicTask, time_for_renewal
from semel._concurrency.retry import jittered
from semel._concurrency.runtime import Runtime
from semel.once.stats import StatsCounter
from semel.once.store import Renew
from semel.types import Claim, Held

_log = logging.getLogger("semel")

BATCH = 1000
"""The most records that one step of the collector removes."""


class Collector(PeriodicTask):
    """Purges in bounded batches, at an interval with jitter, so that many processes do not purge at the same time."""

    def __init__(
        self,
        runtime: Runtime,
        interval: float,
        purge: Callable[[int], Awaitable[int]],
        counters: StatsCounter,
        level: int = logging.INFO,
    ) -> None:
        super().__init__(runtime, "semel-collector")
        self._interval = interval
        self._level = level
        self._purge = purge
        self._counters = counters

    def pause(self) -> float:
        return jittered(self._interval, 0.9, 1.1)

    async def tick(self) -> None:
        await self.collect()
        self._counters.warn()

    async def collect(self) -> int:
        """Remove all expired keys, and return how many."""
        total = 0
        while True:
            removed = await self._purge(BATCH)
            total += removed
            self._counters.cleaned(removed)
            if removed < BATCH:
                break
        if total:
            _log.log(self._level, "purged %d expired keys", total, extra={"event": "cleanup", "purged": total})
        return total


class _Lease:
    """When a watched lease is renewed next, and when it ends, by ``time.monotonic``."""

    __slots__ = ("due", "ends")

    def __init__(self, now: float, lease: float) -> None:
        self.due = now + lease * RENEW_AFTER
        self.ends = now + lease


class Renewer(PeriodicTask):
    """Renews every watched claim when a twentieth of its lease has passed.

    A renewal without a reply is retried sooner, as long as the work goes on.
    """

    def __init__(
        self, runtime: Runtime, renew: Callable[[Sequence[Renew]], Awaitable[list[int | None]]], idle: float
    ) -> None:
        super().__init__(runtime, "semel-renewer")
        self._renew = renew
        self._idle = idle
        self._wakes = 0.0

    def after_fork(self) -> None:
        """The parent renews its own claims."""
        super().after_fork()
        self._leases: dict[Claim, _Lease] = {}

    def watch(self, claim: Claim) -> None:
        """Renew the claim until :meth:`forget`."""
        lease = self._leases[claim] = _Lease(time.monotonic(), claim.lease)
        if not self.running:
            self.start()
        elif lease.due < self._wakes:
            self.nudge()

    def watched(self) -> list[Claim]:
        """The claims that are renewed."""
        return list(self._leases)

    def forget(self, claim: Claim) -> None:
        """Stop renewing the claim."""
        self._leases.pop(claim, None)

    def pause(self) -> float:
        # When idle, it sleeps until a claim with the default lease would be due, so that watch() rarely wakes it.
        now = time.monotonic()
        self._wakes = math.inf  # a claim that is watched from here on wakes this task
        self._wakes = min([now + self._idle, *(lease.due for lease in self._leases.copy().values())])
        return max(0.02, self._wakes - now)

    async def tick(self) -> None:
        now = time.monotonic()
        # Claims that are due soon are included: calls that began together are renewed together.
        due = {
            claim: lease
            for claim, lease in self._leases.copy().items()
            if lease.due <= now + claim.lease * RENEW_AFTER / 2
        }
        if not due:
            return
        for claim, lease in due.items():
            lease.due = now + claim.lease * TRY_AGAIN_AFTER
        limit = time_for_renewal(min(lease.ends for lease in due.values()) - now)
        asked = [Renew(claim.scope, claim.key, claim.fence, round(claim.lease * 1e6)) for claim in due]
        answers = await self._runtime.within(limit, self._renew(asked))
        for (claim, lease), answer in zip(due.items(), answers, strict=True):
            if answer is not None:
                lease.due, lease.ends = now + claim.lease * RENEW_AFTER, now + claim.lease
            elif self._leases.pop(claim, None) is not None:
                _log.warning(
                    "the claim on %r in %r (fence %d) is lost while its work goes on",
                    claim.key,
                    claim.scope,
                    claim.fence,
                )


class Sampler(PeriodicTask):
    """Samples the store's size for the hooks, and logs warnings."""

    def __init__(self, runtime: Runtime, stats: Callable[[], Awaitable[Held]], counters: StatsCounter) -> None:
        super().__init__(runtime, "semel-sampler")
        self._interval = math.inf
        self._stats = stats
        self._counters = counters
        self._slept = False

    def look_every(self, interval: float) -> None:
        """Sample at least every ``interval`` seconds."""
        self._interval = min(self._interval, interval)
        self.nudge()

    def pause(self) -> float:
        # The first sample is taken soon.
        pause, self._slept = self._interval if self._slept else min(1.0, self._interval), True
        return jittered(pause, 0.9, 1.1)

    async def tick(self) -> None:
        self._counters.holds(await self._stats())
        self._counters.warn()
