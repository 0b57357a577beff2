"""One run on Replicate, from the intent to the result. After a crash at any point, the next attempt continues.

intent ──▶ create ──▶ id ──▶ follow ──▶ result
  │          │
  │          └── the response was lost ─┐
  └── an earlier attempt's ─────────────┴─▶ reconcile ─▶ found: id · surely absent: create · unknown: FAILED
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any, NoReturn

import msgspec

from semel._concurrency.retry import Backoff
from semel.errors import Fatal, LeaseLost, Retry, RunCancelled
from semel.providers.replicate import store as rows
from semel.providers.replicate.matching import Candidates, PredictionQuery
from semel.providers.replicate.service import ReplicateService, progress_in
from semel.providers.replicate.types import Prediction, ReplicateRefusal, Unavailable, iso
from semel.runs.execution.context import Context
from semel.runs.types import MAX_COST, MICRO


class PredictionRun:
    """An attempt of a run."""

    def __init__(
        self, replicate: ReplicateService, ctx: Context, query: PredictionQuery, *, retry: bool, price: float | None
    ) -> None:
        self._replicate = replicate
        self._timing = replicate.timing
        self._terms = replicate.store.statement_context
        self._ctx = ctx
        self._query = query
        self._retry = retry
        self._price = price
        self._backoff = Backoff(self._timing.poll, self._timing.poll_most, factor=1.5)
        self._quiet_polls = 0
        self._warned = ""
        self._progress: tuple[float, str] | None = None
        self._wake_up = asyncio.Event()

    async def result(self, intent: rows.Intent) -> dict[str, Any]:
        """Follow the prediction to its end; returns its result."""
        self._remote = await self._replicate.write(rows.intend, intent, self._terms)
        self._lease = rows.LeaseRef(intent.run_id, intent.fence, self._remote.token)
        with self._replicate.following(self._remote) as self._wake_up:
            prediction_id = self._remote.id or await self._obtain(doubtful=not self._remote.fresh)
            return await self._outcome(await self._follow(prediction_id))

    async def _obtain(self, *, doubtful: bool) -> str:
        """The id of the run's one prediction: found, or created."""
        while True:
            if doubtful and (found := await self._reconcile()) is not None:
                return found
            if (known := await self._require_lease()).id is not None:
                return known.id
            if self._ctx.cancelled and await self._is_cancelled():
                await self._set_status("absent")
                raise RunCancelled("cancelled before a prediction was created at Replicate")
            try:
                return await asyncio.shield(self._replicate.spawn(self._create()))
            except Unavailable as error:
                doubtful = error.perhaps_done
                await self._back_off(error)
            except ReplicateRefusal as refusal:
                await self._set_status("refused")
                raise Fatal(str(refusal)) from None
            except rows.AlreadyClaimed:
                doubtful = False

    async def _create(self) -> str:
        """Create the prediction and store its id, even if the attempt has ended meanwhile."""
        token = self._remote.token
        body = {"input": self._query.input_with(token), **self._replicate.webhook_options(token)}
        made = await self._replicate.api.create(version=self._query.version, model=self._query.model, body=body)
        return await self._adopt(made.id, made.status)

    async def _adopt(self, prediction_id: str, status: str) -> str:
        """Make this the run's prediction, unless it has another; returns the id to follow."""
        token = self._remote.token
        shown = status if status in rows.OPEN else "processing"
        if await self._replicate.write(rows.record, token, prediction_id, shown, self._terms) == "ours":
            return prediction_id
        await self._replicate.cancel_duplicate(prediction_id, self._ctx.run_id)
        known = await self._replicate.write(rows.find_by_token, token, self._terms)
        if known is None or known.id is None:
            raise LeaseLost(f"run {self._ctx.run_id} belongs to another attempt by now, or is over")
        return known.id

    async def _reconcile(self) -> str | None:
        """The prediction that an earlier call may have created; None if there is surely none."""
        began = time.monotonic()
        while True:
            if (known := await self._require_lease()).id is not None:
                return known.id
            settled = time.monotonic() - began >= self._timing.settle
            try:
                candidates = await self._replicate.find_prediction(self._query, known)
            except Unavailable as error:
                await self._back_off(error)
                continue
            except ReplicateRefusal as refusal:
                await self._fail_as_unknown(str(refusal))
            found = candidates.certain
            if not found and settled and await self._suffices(candidates):
                found = candidates.alike
            if found:
                try:
                    return await self._adopt_first(candidates, found)
                except rows.AlreadyClaimed:
                    continue
            if settled and (candidates.alike or candidates.unclear):
                await self._fail_as_unknown(f"there are {', '.join([*candidates.alike, *candidates.unclear])}")
            if settled:
                return None
            await self._sleep(min(self._timing.poll, self._timing.settle))

    async def _suffices(self, candidates: Candidates) -> bool:
        """Whether there are no more candidates than runs that asked for the same and do not know their prediction."""
        rivals = await self._replicate.store.read(rows.count_rivals, self._remote.token, self._ctx.payload_hash)
        return not candidates.unclear and len(candidates.alike) <= 1 + rivals

    async def _adopt_first(self, candidates: Candidates, found: list[str]) -> str:
        for duplicate in candidates.certain[1:]:
            self._replicate.spawn(self._replicate.cancel_duplicate(duplicate, self._ctx.run_id))
        self._ctx.log.info("found the prediction %s of an earlier attempt at Replicate", found[0])
        return await self._adopt(found[0], "starting")

    async def _fail_as_unknown(self, why: str) -> NoReturn:
        """Fail, rather than create a second prediction blindly."""
        await self._set_status("unknown")
        since = iso(self._remote.intended_us / MICRO)
        raise Fatal(
            f"Replicate may have created a prediction for this job, but it is unclear which one: {why}. Look at"
            f" replicate.com/predictions for one created since {since}, and submit the job again if there is none"
        )

    async def _follow(self, prediction_id: str) -> Prediction:
        """Poll the prediction until it has ended; cancel it if the run is cancelled."""
        cancelled = False
        while True:
            self._wake_up.clear()
            try:
                if not cancelled and self._ctx.cancelled and await self._is_cancelled():
                    cancelled = await self._cancel(prediction_id)
                found = await self._replicate.api.get(prediction_id)
            except Unavailable as error:
                await self._back_off(error)
                continue
            except ReplicateRefusal as refusal:
                await self._fail_as_refused(prediction_id, refusal)
            await self._report(found)
            if found.ended:
                return found
            await self._sleep(self._next_pause())

    async def _cancel(self, prediction_id: str) -> bool:
        try:
            await self._replicate.api.cancel(prediction_id)
        except ReplicateRefusal as refusal:
            if refusal.status in (401, 402, 403):
                raise
        self._quiet_polls = 0
        return True

    async def _fail_as_refused(self, prediction_id: str, refusal: ReplicateRefusal) -> NoReturn:
        if refusal.status == 404:
            await self._set_status("unknown")
            raise Fatal(
                f"Replicate does not know the prediction {prediction_id}, or has deleted it: its outcome is unknown"
            )
        raise Fatal(f"{refusal}; the prediction {prediction_id} may still be running there")

    async def _report(self, found: Prediction) -> None:
        """Store the prediction's status and progress if they have changed."""
        self._warned = ""
        shown = found.status if found.ended or found.status in rows.OPEN else "processing"
        if shown != self._remote.status and not (shown == "failed" and self._retry):
            await self._set_status(shown)
        if not found.ended and not self._ctx.cancelled:
            share = progress_in(found.logs)
            before = self._progress[0] if self._progress else 0.0
            progress = (before if share is None else share, f"at Replicate: {shown}")
            if progress != self._progress:
                self._progress = progress
                self._quiet_polls = 0
                self._ctx.progress(*progress)

    async def _outcome(self, ended: Prediction) -> dict[str, Any]:
        self._set_cost(ended)
        if self._ctx.cancelled:
            raise RunCancelled(f"cancelled; the prediction {ended.id} ended {ended.status} at Replicate")
        match ended.status:
            case "succeeded" if ended.output is None and ended.data_removed:
                raise Fatal(
                    f"the prediction {ended.id} succeeded, but Replicate has removed its output before it was read"
                )
            case "succeeded":
                return {"prediction_id": ended.id, "output": ended.output, "metrics": ended.metrics or {}}
            case "failed":
                reason = f"the prediction {ended.id} failed at Replicate: {ended.error or 'without a reason'}"
                if not self._retry:
                    raise Fatal(reason)
                await self._replicate.write(rows.give_up, self._lease, ended.id, self._terms)
                raise Retry(reason)
            case "aborted":
                raise Fatal(f"the prediction {ended.id} was aborted at Replicate before it began")
        raise Fatal(f"the prediction {ended.id} was cancelled at Replicate")

    def _set_cost(self, ended: Prediction) -> None:
        seconds = (ended.metrics or {}).get("predict_time")
        if self._price is None or isinstance(seconds, bool) or not isinstance(seconds, int | float):
            return
        if math.isfinite(seconds) and seconds >= 0:
            self._ctx.cost(min(self._price * seconds, MAX_COST))  # a result is not thrown away for its price

    async def _require_lease(self) -> rows.Remote:
        return await self._replicate.write(rows.require_lease, self._lease, self._terms)

    async def _is_cancelled(self) -> bool:
        """Ask the database: an attempt that lost its lease is stopped, too, but must cancel nothing."""
        return await self._replicate.write(rows.cancel_requested, self._lease, self._terms)

    async def _set_status(self, status: str) -> None:
        await self._replicate.write(rows.set_status, self._lease, status, self._terms)
        self._remote = msgspec.structs.replace(self._remote, status=status)

    async def _back_off(self, error: Unavailable) -> None:
        """Log that Replicate is unavailable, once, and wait longer each time."""
        if str(error) != self._warned:
            self._warned = str(error)
            self._ctx.log.warning("%s; retrying", error)
        pause = self._next_pause()
        await self._sleep(pause if error.after is None else error.after)

    def _next_pause(self) -> float:
        """Seconds until the next poll: longer each time, until something has changed."""
        self._quiet_polls += 1
        return self._backoff.after(self._quiet_polls)

    async def _sleep(self, seconds: float) -> None:
        """Sleep until there is news of the prediction, or the run is cancelled."""
        until = time.monotonic() + seconds
        cancelled = self._ctx.cancelled
        while (left := until - time.monotonic()) > 0 and cancelled == self._ctx.cancelled:
            try:
                async with asyncio.timeout(min(left, self._timing.tick)):
                    await self._wake_up.wait()
            except TimeoutError:
                continue
            return
