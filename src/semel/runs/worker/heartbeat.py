"""The worker's heartbeat: renews every lease in one statement, and learns which runs are lost or to be cancelled.

It beats in the worker's parent process, so that a busy child process cannot stop it. A run that makes no progress is
still alive.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from semel._concurrency.periodic import LONGEST_TRY, RENEW_AFTER, TRY_AGAIN_AFTER, time_for_renewal
from semel.errors import StoreUnavailable
from semel.runs.store import RunStore, lease, maintenance
from semel.runs.store.maintenance import WorkerRecord
from semel.runs.worker.active_runs import ActiveRun, ActiveRuns
from semel.runs.worker.run_logs import WorkerLogger

TICK = 1.0
"""Seconds between two beats: a request to cancel is noticed within this time."""
BLOCKED = 1.0
"""Seconds that the event loop may be blocked before that is logged."""
RECORD_EVERY = 20.0
"""Seconds between two writes of the worker's row, unless something in it changed: less than half of
``queries.WORKER_SILENCE_US``, after which the worker is shown as silent."""


class Heartbeat:
    """Beats while the worker runs."""

    def __init__(
        self,
        store: RunStore,
        active: ActiveRuns,
        log: WorkerLogger,
        *,
        record: Callable[[], WorkerRecord],
        lost: Callable[[ActiveRun], None],
        cancelled: Callable[[ActiveRun], None],
    ) -> None:
        self._store = store
        self._active = active
        self._log = log
        self._record = record
        self._lost = lost
        self._cancelled = cancelled
        self._recorded_at = 0.0
        self._recorded: WorkerRecord | None = None
        self._nudged = asyncio.Event()

    async def run(self) -> None:
        """Beat until cancelled. Leases that expire are dropped even while a beat hangs."""
        beat: asyncio.Task[None] | None = None
        try:
            while True:
                if beat is None or beat.done():
                    beat = asyncio.create_task(self._beat_in_time())
                await self._wait_for_next()
                self._drop_expired()
        finally:
            if beat is not None:
                beat.cancel()
                await asyncio.wait({beat}, timeout=1.0)

    async def _beat_in_time(self) -> None:
        try:
            await self._store.runtime.within(self._limit(), self.beat())
        except StoreUnavailable as error:
            self._store.unavailable(error)
        except Exception as error:  # noqa: BLE001 -- without a heartbeat every lease is lost
            self._log.log(logging.WARNING, f"a heartbeat failed: {error!r}")
        else:
            return
        asyncio.get_running_loop().call_later(self._tick(TRY_AGAIN_AFTER), self.nudge)

    def _limit(self) -> float:
        """How long a beat may take, so that there is time for more tries before the first lease ends."""
        now = time.monotonic()
        left = [each.renewed + each.lease - now for each in self._active if not each.lost]
        return time_for_renewal(min(left)) if left else LONGEST_TRY

    async def _wait_for_next(self) -> None:
        """Sleep until the next beat: sooner where a lease is short, or a run with a shorter one begins."""
        self._nudged.clear()
        tick = self._tick(RENEW_AFTER)
        began = time.monotonic()
        try:
            async with asyncio.timeout(tick):
                await self._nudged.wait()
        except TimeoutError:
            pass
        late = time.monotonic() - began - tick
        if late > BLOCKED:
            names = ", ".join(sorted({each.leased.model for each in self._active if each.model.isolation == "loop"}))
            who = f" (active async models: {names}; a model that blocks should be a plain function)" if names else ""
            self._log.log(logging.WARNING, f"the event loop was blocked for {late:.1f} s{who}")

    def _tick(self, part: float) -> float:
        """Seconds until the next beat: this part of the shortest lease."""
        return max(0.02, min([TICK, *(each.lease * part for each in self._active)]))

    def watch(self, run: ActiveRun) -> None:
        """Beat sooner if the run that begins has a short lease."""
        if run.lease * RENEW_AFTER < TICK:
            self.nudge()

    def nudge(self) -> None:
        """Beat now, unless a beat is under way."""
        self._nudged.set()

    async def beat(self) -> None:
        """Beat once: renew the leases first, then write the worker's row."""
        now = time.monotonic()
        await self._keep_leases(now)
        record = self._record()
        if record != self._recorded or now - self._recorded_at >= RECORD_EVERY:
            await self._store.write(maintenance.worker_seen, record, self._store.statement_context)
            self._recorded, self._recorded_at = record, now

    async def _keep_leases(self, now: float) -> None:
        runs = [each for each in self._active if not each.lost]
        if not runs:
            return
        soon = now + self._tick(RENEW_AFTER) / 2  # sooner by half a beat rather than later by a whole one
        if any(soon - each.renewed >= each.lease * RENEW_AFTER for each in runs):
            await self._renew(runs, now)
            return
        if changed := [each for each in runs if each.progress_changed]:
            await self._renew(changed, now)
        quiet = [each for each in runs if each not in changed] if changed else runs
        if quiet:
            answer = await self._store.read_once(lease.watch, [(each.leased.id, each.leased.fence) for each in quiet])
            self._apply_answers(quiet, answer)

    async def _renew(self, runs: list[ActiveRun], now: float) -> None:
        renewals = [each.renewal() for each in runs]
        answer = await self._store.write_once(lease.renew, renewals, self._store.statement_context)
        for each, renewal in zip(runs, renewals, strict=True):
            if each.leased.id in answer:
                each.renewed = now
                each.on_renewed(renewal)
        missed = [(each.leased.id, each.leased.fence) for each in runs if each.leased.id not in answer]
        if missed:  # lost, or the row is locked for a moment
            answer |= await self._store.read_once(lease.watch, missed)
        self._apply_answers(runs, answer)

    def _apply_answers(self, runs: list[ActiveRun], answer: dict[str, bool]) -> None:
        ours = [each for each in runs if not each.finished]  # the ends of the others were written meanwhile
        self._let_go([each for each in ours if each.leased.id not in answer])
        for each in ours:
            if answer.get(each.leased.id) and each.cancelled_at is None:
                self._cancelled(each)

    def _drop_expired(self) -> None:
        """Stop work on runs whose lease ended without a renewal: another worker may have them."""
        now = time.monotonic()
        self._let_go([each for each in self._active if not each.finished and now - each.renewed > each.lease])

    def _let_go(self, runs: list[ActiveRun]) -> None:
        lost = [each for each in runs if not each.lost]
        for each in lost:
            self._lost(each)
        self._log.log_lost(lost)
