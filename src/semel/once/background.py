"""Work behind the scenes: collecting what expired, and renewing the leases of work that is still going on.

Both sleep in the background of their world (a daemon thread or a task), hold their owner weakly, and end with it.
"""

from __future__ import annotations

import logging
import math
import random
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence

from semel.errors import SemelError, StoreUnavailable
from semel.forks import survive_fork
from semel.model import Claim, Held
from semel.once.counters import Counters
from semel.once.outage import Outage
from semel.once.runtime import Runtime, Signal
from semel.once.store import Renew

_log = logging.getLogger("semel")

_LONGEST_END = 5.0
BATCH = 1000
"""How many records one step of the collector removes at the most."""


class Background(ABC):
    """A loop that calls ``tick`` and sleeps as long as it says."""

    def __init__(self, runtime: Runtime, name: str) -> None:
        self._runtime = runtime
        self._name = name
        self._outage = Outage(_log, f"the store of {name}", "this is tried again")
        self.after_fork()
        survive_fork(self)

    def after_fork(self) -> None:
        """Threads do not survive a fork: start again when needed."""
        self._signal: Signal | None = None
        self._ticking = False

    @property
    def running(self) -> bool:
        """False also when the event loop that it ran in is gone."""
        return self._signal is not None and self._signal.here()

    def start(self) -> None:
        """Run from now on; a second start changes nothing."""
        if not self.running:
            signal = self._signal = self._runtime.signal()
            owner = weakref.ref(self)
            weakref.finalize(self, signal.set).atexit = False  # wakes the loop, so that it ends with its owner
            self._runtime.spawn(lambda: _loop(owner, signal), self._name)

    def stop(self) -> None:
        """End soon."""
        signal, self._signal = self._signal, None
        if signal is not None:
            signal.set()

    async def end(self) -> None:
        """End, and wait until the last piece of work is done, so that the store can be closed after it."""
        signal = self._signal
        self.stop()
        deadline = time.monotonic() + _LONGEST_END
        while self._ticking and signal is not None and signal.here() and time.monotonic() < deadline:
            await self._runtime.sleep(0.005)

    def nudge(self) -> None:
        """Call ``tick`` now."""
        if self._signal is not None:
            self._signal.set()

    @abstractmethod
    def pause(self) -> float:
        """Seconds to sleep before the next tick."""

    @abstractmethod
    async def tick(self) -> None:
        """One piece of work."""


async def _loop(owner: weakref.ref[Background], signal: Signal) -> None:
    while (background := owner()) is not None and background._signal is signal:
        seconds = background.pause()
        del background  # while asleep, nothing here keeps the owner alive
        await signal.wait(seconds)
        if (background := owner()) is None or background._signal is not signal:
            return
        background._ticking = True
        try:
            await background.tick()
            background._outage.succeeded()
        except StoreUnavailable as error:
            background._outage.failed(error)
        except SemelError as error:
            _log.warning("%s failed and will be tried again: %s", background._name, error)
        except Exception:  # noqa: BLE001 -- whatever it is, the next turn may succeed
            _log.exception("%s failed and will be tried again", background._name)
        finally:
            background._ticking = False


class Collector(Background):
    """Purges in bounded batches, at an interval with jitter so that many processes do not do it in step."""

    def __init__(
        self,
        runtime: Runtime,
        interval: float,
        purge: Callable[[int], Awaitable[int]],
        counters: Counters,
        level: int = logging.INFO,
    ) -> None:
        super().__init__(runtime, "semel-collector")
        self._interval = interval
        self._level = level
        self._purge = purge
        self._counters = counters

    def pause(self) -> float:
        """See Background."""
        return self._interval * random.uniform(0.9, 1.1)  # noqa: S311 -- jitter, not a secret

    async def tick(self) -> None:
        """See Background."""
        await self.collect()
        self._counters.warn()

    async def collect(self) -> int:
        """Remove everything that is gone; answer how much it was."""
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


RENEW_AFTER = 0.05
"""The part of a lease after which it is renewed."""
TRY_AGAIN_AFTER = 0.01
"""The part of a lease after which a renewal that failed is tried again. Together: when a store was unavailable for nine
tenths of a lease, at least four hundredths of it are left for the renewal that succeeds."""
SHORTEST_TRY, LONGEST_TRY = 0.1, 10.0
"""Seconds that a renewal may take: a store that answers later than the first would not be noticed to be there, and
whose lease is short does not wait for long behind those whose are not."""


def time_for_renewal(left: float) -> float:
    """How long to wait for the answer to a renewal: a third of what is left of the shortest lease."""
    return min(max(left / 3, SHORTEST_TRY), LONGEST_TRY)


class _Lease:
    """When a watched lease is renewed next, and when it ends, by ``time.monotonic``."""

    __slots__ = ("due", "ends")

    def __init__(self, now: float, lease: float) -> None:
        self.due = now + lease * RENEW_AFTER
        self.ends = now + lease


class Renewer(Background):
    """Renews every watched claim when a twentieth of its lease has passed.

    A renewal that gets no answer is tried again, and sooner, as long as the work goes on.
    """

    def __init__(
        self, runtime: Runtime, renew: Callable[[Sequence[Renew]], Awaitable[list[int | None]]], idle: float
    ) -> None:
        super().__init__(runtime, "semel-renewer")
        self._renew = renew
        self._idle = idle
        self._wakes = 0.0

    def after_fork(self) -> None:
        """What the parent works on is not the child's to renew."""
        super().after_fork()
        self._leases: dict[Claim, _Lease] = {}

    def watch(self, claim: Claim) -> None:
        """Keep the claim alive until :meth:`forget`."""
        lease = self._leases[claim] = _Lease(time.monotonic(), claim.lease)
        if not self.running:
            self.start()
        elif lease.due < self._wakes:
            self.nudge()

    def watched(self) -> list[Claim]:
        """The claims that are kept alive."""
        return list(self._leases)

    def forget(self, claim: Claim) -> None:
        """Renew it no more."""
        self._leases.pop(claim, None)

    def pause(self) -> float:
        """See Background. When idle it sleeps as long as a usual claim could, so that watching rarely wakes it."""
        now = time.monotonic()
        self._wakes = math.inf  # whoever is watched from here on wakes us
        self._wakes = min([now + self._idle, *(lease.due for lease in self._leases.copy().values())])
        return max(0.02, self._wakes - now)

    async def tick(self) -> None:
        """See Background."""
        now = time.monotonic()
        # What is due soon is taken along: calls that began together are renewed together.
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


class Sampler(Background):
    """Looks at times what the store holds, for those who want to be told, and whether there is something to warn of."""

    def __init__(self, runtime: Runtime, stats: Callable[[], Awaitable[Held]], counters: Counters) -> None:
        super().__init__(runtime, "semel-sampler")
        self._interval = math.inf
        self._stats = stats
        self._counters = counters
        self._slept = False

    def look_every(self, interval: float) -> None:
        """Look at least so often."""
        self._interval = min(self._interval, interval)
        self.nudge()

    def pause(self) -> float:
        """See Background. The first look comes soon."""
        pause, self._slept = self._interval if self._slept else min(1.0, self._interval), True
        return pause * random.uniform(0.9, 1.1)  # noqa: S311 -- jitter, not a secret

    async def tick(self) -> None:
        """See Background."""
        self._counters.holds(await self._stats())
        self._counters.warn()
