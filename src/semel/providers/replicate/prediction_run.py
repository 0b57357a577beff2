"""One run on Replicate, from the intent to the result; whatever breaks on the way, the next attempt goes on from there.

intent ──▶ create ──▶ id ──▶ follow ──▶ result
  │          │
  │          └── the answer was lost ─┐
  └── an earlier attempt's ───────────┴─▶ reconcile ─▶ found: id · surely not there: create · else: FAILED
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any, NoReturn

from semel.errors import Fatal, LeaseLost, Retry, RunCancelled
from semel.providers.replicate import store as rows
from semel.providers.replicate.matching import Choice, PredictionQuery
from semel.providers.replicate.service import ReplicateService, share_in
from semel.providers.replicate.types import Prediction, ReplicateRefusal, Unavailable, iso
from semel.runs.execution.context import Context
from semel.runs.types import MAX_COST, MICRO


class PredictionRun:
    """An attempt of a run."""

    def __init__(
        self, desk: ReplicateService, ctx: Context, asked: PredictionQuery, *, retry: bool, price: float | None
    ) -> None:
        self._desk = desk
        self._ctx = ctx
        self._asked = asked
        self._retry = retry
        self._price = price
        self._pause_for = desk.pace.poll
        self._lamented = ""
        self._told: tuple[float, str] | None = None
        self._bell = asyncio.Event()

    async def to_the_end(self, intent: rows.Intent) -> dict[str, Any]:
        """The result of the prediction."""
        self._remote = await self._desk.write(rows.intend, intent, self._terms)
        self._hold = rows.LeaseRef(intent.run_id, intent.fence, self._remote.token)
        with self._desk.attending(self._remote) as self._bell:
            prediction_id = self._remote.id or await self._obtain(doubtful=not self._remote.fresh)
            ended = await self._attend(prediction_id)
            return await self._outcome(ended)

    @property
    def _terms(self) -> Any:
        return self._desk.service.store.terms

    async def _obtain(self, *, doubtful: bool) -> str:
        """The id of the one prediction that this run has: found, or created."""
        while True:
            if doubtful and (found := await self._reconcile()) is not None:
                return found
            if (known := await self._still_mine()).id is not None:
                return known.id
            if self._ctx.cancelled and await self._is_cancelled():
                await self._note("absent")
                raise RunCancelled("cancelled before Replicate was asked for anything")
            try:
                return await asyncio.shield(self._desk.spawn(self._create()))
            except Unavailable as away:
                doubtful = away.perhaps_done
                await self._rest(away)
            except ReplicateRefusal as refusal:
                await self._note("refused")
                raise Fatal(str(refusal)) from None
            except rows.AlreadyClaimed:
                doubtful = False

    async def _create(self) -> str:
        """Create the prediction, and write which it is: also when the attempt has been ended meanwhile."""
        token = self._remote.token
        body = {"input": self._asked.given(token), **self._desk.hook(token)}
        made = await self._desk.api.create(version=self._asked.version, model=self._asked.model, body=body)
        return await self._adopt(made.id, made.status)

    async def _adopt(self, prediction_id: str, status: str) -> str:
        """From now on the run has this prediction, unless it has another, which is then the one to follow."""
        token = self._remote.token
        shown = status if status in rows.OPEN else "processing"
        answer = await self._desk.write(rows.record, token, prediction_id, shown, self._terms)
        if answer == "ours":
            return prediction_id
        await self._desk.end_stray(prediction_id, self._ctx.run_id)
        known = await self._desk.write(rows.known_by, token, self._terms)
        if known is None or known.id is None:
            raise LeaseLost(f"run {self._ctx.run_id} belongs to another attempt by now, or is over")
        return known.id

    async def _reconcile(self) -> str | None:
        """The prediction that an earlier call may have made; None: surely there is none."""
        began = time.monotonic()
        while True:
            if (known := await self._still_mine()).id is not None:
                return known.id
            settled = time.monotonic() - began >= self._desk.pace.settle
            try:
                choice = await self._desk.look(self._asked, known)
            except Unavailable as away:
                await self._rest(away)
                continue
            except ReplicateRefusal as refusal:
                await self._be_honest(str(refusal))
            found = choice.certain or (choice.alike if settled and await self._enough(choice) else [])
            if found:
                try:
                    return await self._adopt_first(choice, found)
                except rows.AlreadyClaimed:
                    continue
            if settled and (choice.alike or choice.unclear):
                await self._be_honest(f"there are {', '.join([*choice.alike, *choice.unclear])}")
            if settled:
                return None
            await self._rest_for(min(self._desk.pace.poll, self._desk.pace.settle))

    async def _enough(self, choice: Choice) -> bool:
        """Not more predictions are like ours than there are runs that asked for the like and do not know theirs."""
        rivals = await self._desk.service.store.read(rows.rivals, self._remote.token, self._ctx.payload_hash)
        return not choice.unclear and len(choice.alike) <= 1 + rivals

    async def _adopt_first(self, choice: Choice, found: list[str]) -> str:
        for stray in choice.certain[1:]:
            self._desk.spawn(self._desk.end_stray(stray, self._ctx.run_id))
        self._ctx.log.info("found the prediction %s of an earlier attempt at Replicate", found[0])
        return await self._adopt(found[0], "starting")

    async def _be_honest(self, why: str) -> NoReturn:
        """Never create a second one blindly."""
        await self._note("unknown")
        since = iso(self._remote.intended_us / MICRO)
        raise Fatal(
            f"a prediction may have been made at Replicate for this job, and which cannot be told: {why}. Look at"
            f" replicate.com/predictions for one created since {since}, then submit the job anew if there is none"
        )

    async def _attend(self, prediction_id: str) -> Prediction:
        """Look at it until it is over; end it where the run is cancelled."""
        ending = False
        while True:
            self._bell.clear()
            try:
                if not ending and self._ctx.cancelled and await self._is_cancelled():
                    ending = await self._end(prediction_id)
                found = await self._desk.api.get(prediction_id)
            except Unavailable as away:
                await self._rest(away)
                continue
            except ReplicateRefusal as refusal:
                await self._refused(prediction_id, refusal)
            await self._see(found)
            if found.ended:
                return found
            await self._rest_for(self._pause_for)
            self._pause_for = min(self._pause_for * 1.5, self._desk.pace.poll_most)

    async def _end(self, prediction_id: str) -> bool:
        try:
            await self._desk.api.cancel(prediction_id)
        except ReplicateRefusal as refusal:
            if refusal.status in (401, 402, 403):
                raise
        self._pause_for = self._desk.pace.poll
        return True

    async def _refused(self, prediction_id: str, refusal: ReplicateRefusal) -> NoReturn:
        if refusal.status == 404:
            await self._note("unknown")
            raise Fatal(f"Replicate does not know the prediction {prediction_id} (any more): its outcome is unknown")
        raise Fatal(f"{refusal}; the prediction {prediction_id} may still be at work there")

    async def _see(self, found: Prediction) -> None:
        """Write what is new of it."""
        self._lamented = ""
        shown = found.status if found.ended or found.status in rows.OPEN else "processing"
        if shown != self._remote.status and not (shown == "failed" and self._retry):
            await self._note(shown)
        if not found.ended and not self._ctx.cancelled:
            share = share_in(found.logs)
            told = (share if share is not None else self._told[0] if self._told else 0.0, f"at Replicate: {shown}")
            if told != self._told:
                self._told = told
                self._pause_for = self._desk.pace.poll
                self._ctx.progress(*told)

    async def _outcome(self, ended: Prediction) -> dict[str, Any]:
        self._tell_cost(ended)
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
                await self._desk.write(rows.give_up, self._hold, ended.id, self._terms)
                raise Retry(reason)
            case "aborted":
                raise Fatal(f"the prediction {ended.id} was aborted at Replicate before it began")
        raise Fatal(f"the prediction {ended.id} was cancelled at Replicate")

    def _tell_cost(self, ended: Prediction) -> None:
        seconds = (ended.metrics or {}).get("predict_time")
        if self._price is None or isinstance(seconds, bool) or not isinstance(seconds, int | float):
            return
        if math.isfinite(seconds) and seconds >= 0:
            self._ctx.cost(min(self._price * seconds, MAX_COST))  # what is over is not thrown away for its price

    async def _still_mine(self) -> rows.Remote:
        return await self._desk.write(rows.still_mine, self._hold, self._terms)

    async def _is_cancelled(self) -> bool:
        """The database's word for it: an attempt that lost its lease is told to stop, too, and must end nothing."""
        return await self._desk.write(rows.cancel_asked, self._hold, self._terms)

    async def _note(self, status: str) -> None:
        await self._desk.write(rows.note, self._hold, status, self._terms)
        self._remote = rows.with_status(self._remote, status)

    async def _rest(self, away: Unavailable) -> None:
        """Replicate did not answer: say so, and wait longer each time."""
        if str(away) != self._lamented:
            self._lamented = str(away)
            self._ctx.log.warning("%s; trying again", away)
        await self._rest_for(away.after if away.after is not None else self._pause_for)
        self._pause_for = min(self._pause_for * 2, self._desk.pace.poll_most)

    async def _rest_for(self, seconds: float) -> None:
        """Until the time is over, there is news of the prediction, or the run is to be cancelled."""
        until = time.monotonic() + seconds
        cancelled = self._ctx.cancelled
        while (left := until - time.monotonic()) > 0 and cancelled == self._ctx.cancelled:
            try:
                async with asyncio.timeout(min(left, self._desk.pace.tick)):
                    await self._bell.wait()
            except TimeoutError:
                continue
            return
