"""Writes that failed while the store was unavailable, or whose caller was cancelled: retried in the background.

If an outcome were not recorded, the work would be done again when its lease ends; if a key were not released, it would
be refused until then.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeAlias

from semel._concurrency.periodic import PeriodicTask
from semel._concurrency.retry import Backoff
from semel._concurrency.runtime import Runtime
from semel.errors import SemelError, StoreUnavailable
from semel.once.maintenance import Renewer
from semel.once.store import ClaimRequest, Complete, KeyRef, OnReleased, OutcomeData, Release, Store
from semel.types import Claim, Granted

_BACKOFF = Backoff(0.02, 5.0)
_TRIES = 3
"""Failures after which one tick ends: the store is unavailable."""
_LONGEST_TRY, _LONGEST_FLUSH = 2.5, 1.0
"""Seconds for a reply of the store: in the background, and while a caller waits to claim the key."""
_GIVEN_UP_AFTER = 3600.0
"""Seconds after which a write is dropped, so that its lease can end."""
_log = logging.getLogger("semel")

_Write: TypeAlias = "Callable[[PendingWrites], Awaitable[None]]"


class PendingWrites(PeriodicTask):
    """Retries outcomes, releases and claims until the store takes them."""

    def __init__(self, runtime: Runtime, store: Store, renewer: Renewer, on_released: OnReleased) -> None:
        super().__init__(runtime, "semel-pending-writes")
        self._store = store
        self._renewer = renewer
        self._on_released = on_released
        self._failures = 0

    def after_fork(self) -> None:
        """The parent retries its own writes."""
        super().after_fork()
        self.writes: dict[Claim | str, tuple[_Write, float]] = {}

    def retry_outcome(self, claim: Claim, done: OutcomeData) -> None:
        """Record the outcome, and renew its lease until then."""
        self._renewer.watch(claim)
        self._add(claim, lambda pending: pending._record(claim, done), claim.lease)

    def retry_release(self, claim: Claim) -> None:
        """Release the key."""
        self._add(claim, lambda pending: pending._release(claim), claim.lease)

    def retry_claim(self, request: ClaimRequest) -> None:
        """The store may have granted this claim although its reply was lost: release the key, if so."""
        self._add(request.attempt, lambda pending: pending._unclaim(request), request.lease_us / 1e6)

    def _add(self, about: Claim | str, write: _Write, lease: float) -> None:
        self.writes[about] = (write, time.monotonic() + max(lease, _GIVEN_UP_AFTER))
        self._start_now()

    def _start_now(self) -> None:
        self._failures = 0
        self.start()
        self.nudge()

    def adopt(self, other: PendingWrites) -> None:
        """Take over the writes of another instance whose event loop is closed."""
        if not other.writes:
            return
        self.writes |= other.writes
        other.writes = {}
        for claim in other._renewer.watched():
            if claim in self.writes:
                self._renewer.watch(claim)
        self._start_now()

    async def flush_key(self, scope: str, key: str) -> None:
        """Try once to send the pending writes of a key that is about to be claimed."""
        for about, (write, _) in self.writes.copy().items():
            if isinstance(about, Claim) and (about.scope, about.key) == (scope, key):
                with suppress(SemelError):  # the claim that follows reports the state of the store
                    await self._runtime.within(_LONGEST_FLUSH, write(self))
                    self.writes.pop(about, None)

    async def _record(self, claim: Claim, done: OutcomeData) -> None:
        (recorded,) = await self._store.complete([Complete(claim.scope, claim.key, claim.fence, done)])
        self._renewer.forget(claim)
        if recorded:
            self._on_released(claim.scope, claim.key)
        else:
            _log.warning(
                "the outcome of %r in %r (fence %d) was never recorded: another caller took the key over while the "
                "store was unavailable",
                claim.key,
                claim.scope,
                claim.fence,
            )

    async def _release(self, claim: Claim) -> None:
        await self._store.release([Release(claim.scope, claim.key, claim.fence)])
        self._on_released(claim.scope, claim.key)

    async def _unclaim(self, request: ClaimRequest) -> None:
        # Not by claiming it again: until it is released, a new claim of another caller would find the key in flight.
        (record,) = await self._store.get([KeyRef(request.scope, request.key)])
        if record is not None and record.state == "claimed" and record.attempt == request.attempt:
            await self._store.release([Release(record.scope, record.key, record.fence)])
            self._on_released(record.scope, record.key)

    async def give_back(self, verdict: object) -> None:
        """Release a claim whose caller was cancelled before it was granted."""
        if isinstance(verdict, Granted):
            try:
                await self._release(verdict.claim)
            except StoreUnavailable:
                self.retry_release(verdict.claim)

    def pause(self) -> float:
        self._failures += 1
        return _BACKOFF.after(self._failures) if self.writes else 3600.0

    async def tick(self) -> None:
        failures: list[SemelError] = []
        for about, (write, until) in self.writes.copy().items():
            try:
                if time.monotonic() < until:
                    await self._runtime.within(_LONGEST_TRY, write(self))
                elif isinstance(about, Claim):
                    self._renewer.forget(about)
            except SemelError as error:
                failures.append(error)
                # To the end of the queue, so that it delays the others only once.
                self.writes[about] = self.writes.pop(about, (write, until))
                if len(failures) == _TRIES:
                    break
            else:
                self.writes.pop(about, None)
        if failures:
            raise failures[0]

    async def end(self) -> None:
        await super().end()
        try:
            await self._runtime.within(_LONGEST_TRY, self.tick())
        except SemelError as error:
            _log.warning("%d outcomes or releases could not be recorded: %s", len(self.writes), error)
