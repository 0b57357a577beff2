"""Periodic background tasks that end with their owner, and the times at which leases are renewed."""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable

from semel._concurrency.fork import survive_fork
from semel._concurrency.retry import Outage, jittered
from semel._concurrency.runtime import Runtime, Signal
from semel.errors import SemelError, StoreUnavailable

_log = logging.getLogger("semel")

_LONGEST_END = 5.0

RENEW_AFTER = 0.05
"""The part of a lease after which it is renewed: the same for the leases of keys and of runs."""
TRY_AGAIN_AFTER = 0.01
"""The part of a lease after which a failed renewal is retried. Together with RENEW_AFTER it leaves at least four
hundredths of a lease for the renewal that succeeds after the store was unavailable for nine tenths of it."""
SHORTEST_TRY, LONGEST_TRY = 0.1, 10.0
"""The least and the most seconds for a renewal. A slow store needs the first; the second limits how long a short lease
waits for a renewal of long ones."""


def time_for_renewal(left: float) -> float:
    """How long to wait for the reply to a renewal: a third of what is left of the shortest lease."""
    return min(max(left / 3, SHORTEST_TRY), LONGEST_TRY)


async def repeat(tick: Callable[[], Awaitable[float]], name: str, after_failure: float) -> None:
    """Call ``tick`` in this event loop until cancelled; it returns the seconds to sleep before the next call.

    A failure is logged, unless the store is unavailable, which is logged elsewhere.
    """
    while True:
        pause = after_failure
        try:
            pause = await tick()
        except StoreUnavailable:
            pass
        except Exception as error:  # noqa: BLE001 -- the next call may succeed
            unforeseen = None if isinstance(error, SemelError) else error
            _log.warning("%s failed; retrying: %s", name, error, exc_info=unforeseen)
        await asyncio.sleep(jittered(pause))


class PeriodicTask(ABC):
    """Calls ``tick`` in the background, and sleeps for ``pause()`` seconds before each call."""

    def __init__(self, runtime: Runtime, name: str) -> None:
        self._runtime = runtime
        self._name = name
        self._outage = Outage(_log, f"the store of {name}", "retrying")
        self.after_fork()
        survive_fork(self)

    def after_fork(self) -> None:
        """Threads do not survive a fork: start again when needed."""
        self._signal: Signal | None = None
        self._ticking = False

    @property
    def running(self) -> bool:
        """Whether it runs; False also if its event loop has ended."""
        return self._signal is not None and self._signal.is_current()

    def start(self) -> None:
        """Start the task. If it runs already, nothing changes."""
        if not self.running:
            signal = self._signal = self._runtime.signal()
            owner = weakref.ref(self)
            weakref.finalize(self, signal.set).atexit = False  # wakes the loop, so that it ends with its owner
            self._runtime.spawn(lambda: _loop(owner, signal), self._name)

    def stop(self) -> None:
        """End soon, without waiting for it."""
        signal, self._signal = self._signal, None
        if signal is not None:
            signal.set()

    async def end(self) -> None:
        """End, and wait until the current tick is done, so that the store can be closed afterwards."""
        signal = self._signal
        self.stop()
        deadline = time.monotonic() + _LONGEST_END
        while self._ticking and signal is not None and signal.is_current() and time.monotonic() < deadline:
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
        """Do one piece of work."""


async def _loop(owner: weakref.ref[PeriodicTask], signal: Signal) -> None:
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
            _log.warning("%s failed; retrying: %s", background._name, error)
        except Exception:  # noqa: BLE001 -- the next tick may succeed
            _log.exception("%s failed; retrying", background._name)
        finally:
            background._ticking = False
