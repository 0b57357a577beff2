"""What could not be told to the store while it was away, or by a caller who was cancelled: told as soon as possible.

An outcome that is not recorded would be worked out again when its lease ends; a key that is not given back would be
refused until then.
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
from semel.once.store import ClaimRequest, Complete, OnReleased, OutcomeData, Release, Store
from semel.types import Claim, Granted

_BACKOFF = Backoff(0.02, 5.0)
_TRIES = 3
_LONGEST_TRY, _AT_ONCE = 2.5, 1.0
"""Seconds for an answer of the store: in the background, and while a caller waits who wants the key."""
_LONGEST = 3600.0
"""Seconds after which what the store still does not take is given up, so that its lease can end."""
_log = logging.getLogger("semel")


_Pay: TypeAlias = "Callable[[PendingWrites], Awaitable[None]]"


class PendingWrites(PeriodicTask):
    """Tries again and again what it is given, in the background."""

    def __init__(self, runtime: Runtime, store: Store, renewer: Renewer, ring: OnReleased) -> None:
        super().__init__(runtime, "semel-debts")
        self._store = store
        self._renewer = renewer
        self._ring = ring
        self._failures = 0

    def after_fork(self) -> None:
        """What the parent owes is not the child's to pay."""
        super().after_fork()
        self._owed: dict[Claim | str, tuple[_Pay, float]] = {}

    def owe_outcome(self, claim: Claim, done: OutcomeData) -> None:
        """Record it, and renew its lease until then."""
        self._renewer.watch(claim)
        self._owe(claim, lambda debts: debts._record(claim, done), claim.lease)

    def owe_release(self, claim: Claim) -> None:
        """Give the key back."""
        self._owe(claim, lambda debts: debts._release(claim), claim.lease)

    def owe_answer(self, request: ClaimRequest) -> None:
        """The store may have granted this and could not say so: see to it that nobody holds the key for nobody."""
        self._owe(request.attempt, lambda debts: debts._unclaim(request), request.lease_us / 1e6)

    def _owe(self, what: Claim | str, pay: _Pay, lease: float) -> None:
        self._owed[what] = (pay, time.monotonic() + max(lease, _LONGEST))
        self._soon()

    def _soon(self) -> None:
        self._failures = 0
        self.start()
        self.nudge()

    def adopt(self, other: PendingWrites) -> None:
        """Take over what another one, whose event loop is over, has not paid."""
        if not other._owed:
            return
        self._owed |= other._owed
        other._owed = {}
        for claim in other._renewer.watched():
            if claim in self._owed:
                self._renewer.watch(claim)
        self._soon()

    async def settle(self, scope: str, key: str) -> None:
        """Pay at once, if it can be, what is owed for a key that is about to be claimed."""
        for what, (pay, _) in self._owed.copy().items():
            if isinstance(what, Claim) and (what.scope, what.key) == (scope, key):
                with suppress(SemelError):  # then the claim will tell how things stand
                    await self._runtime.within(_AT_ONCE, pay(self))
                    self._owed.pop(what, None)

    @property
    def any(self) -> bool:
        """Something is owed."""
        return bool(self._owed)

    async def _record(self, claim: Claim, done: OutcomeData) -> None:
        (recorded,) = await self._store.complete([Complete(claim.scope, claim.key, claim.fence, done)])
        self._renewer.forget(claim)
        if recorded:
            self._ring(claim.scope, claim.key)
        else:
            said = "the outcome of %r in %r (fence %d) was never recorded: someone took over while the store was away"
            _log.warning(said, claim.key, claim.scope, claim.fence)

    async def _release(self, claim: Claim) -> None:
        await self._store.release([Release(claim.scope, claim.key, claim.fence)])
        self._ring(claim.scope, claim.key)

    async def _unclaim(self, request: ClaimRequest) -> None:
        """Asked again, an attempt is granted what it was granted before."""
        (verdict,) = await self._store.claim([request])
        await self.give_back(verdict)

    async def give_back(self, verdict: object) -> None:
        """A caller was cancelled while its claim was on the way: nobody will work on it."""
        if isinstance(verdict, Granted):
            try:
                await self._release(verdict.claim)
            except StoreUnavailable:
                self.owe_release(verdict.claim)

    def pause(self) -> float:
        """See Background."""
        self._failures += 1
        return _BACKOFF.after(self._failures) if self._owed else 3600.0

    async def tick(self) -> None:
        """See Background. What cannot be paid goes to the end of the queue, so that it holds up nothing for long."""
        failures: list[SemelError] = []
        for what, (pay, until) in self._owed.copy().items():
            try:
                if time.monotonic() < until:
                    await self._runtime.within(_LONGEST_TRY, pay(self))
                elif isinstance(what, Claim):
                    self._renewer.forget(what)
            except SemelError as error:
                failures.append(error)
                self._owed[what] = self._owed.pop(what, (pay, until))
                if len(failures) == _TRIES:
                    break
            else:
                self._owed.pop(what, None)
        if failures:
            raise failures[0]

    async def end(self) -> None:
        """Also try a last time."""
        await super().end()
        try:
            await self._runtime.within(_LONGEST_TRY, self.tick())
        except SemelError as error:
            _log.warning("%d outcomes or releases could not be recorded: %s", len(self._owed), error)
