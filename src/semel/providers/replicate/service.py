"""A server's connection to Replicate: one HTTP client, wake-ups for the runs that follow a prediction, and clean-up.

A prediction whose run is over, such as one that was cancelled while no worker held the run, is cancelled at Replicate.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Coroutine
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from msgspec import Struct

from semel import typed_json
from semel._concurrency.periodic import repeat
from semel._concurrency.retry import Backoff
from semel.errors import StoreBroken, StoreUnavailable
from semel.once.client import AsyncOnce
from semel.providers.replicate import store as rows
from semel.providers.replicate.matching import Candidates, PredictionQuery, Verdict, group_by_verdict, judge
from semel.providers.replicate.types import Prediction, ReplicateRefusal, Unavailable
from semel.runs.types import MICRO

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Connection

    from semel.providers.replicate.api import ReplicateApi
    from semel.service.state import ServiceState

P = ParamSpec("P")
R = TypeVar("R")

HOOK = "/api/cloud/webhooks/replicate/"
"""The path of webhooks, without the run's token, which follows."""
MAX_PAGES = 50
MAX_DETAILS = 20
UNKNOWN_CLOCK = 300.0
"""Seconds by which Replicate's clock may differ from ours, if the response has no date."""
CLOSE_TIMEOUT = 5.0
"""Seconds for which a server that stops waits for responses to its calls."""

_log = logging.getLogger("semel.service")


class Timing(Struct, frozen=True, kw_only=True):
    """Durations, in seconds."""

    poll: float = 2.0
    poll_most: float = 30.0
    settle: float = 30.0
    """For how long a call whose response was lost may still create a prediction."""
    margin: float = 60.0
    """By how much a prediction may seem older than the intent."""
    tick: float = 0.5
    """Between two checks whether the run is cancelled."""
    webhook_poll: float = 1.0
    """Between two checks for webhooks that another process of the server received."""
    tidy: float = 30.0
    """Between two searches for predictions whose run is over."""
    give_up: float = 86400.0
    """For how long the cancellation of such a prediction is retried."""
    lease: float = 60.0
    grace: float = 120.0
    timeout: float = 30.0


class ReplicateService:
    """Runs while the server is up; a :class:`~semel.service.state.Component`."""

    api: ReplicateApi
    seen: AsyncOnce

    def __init__(self, service: ServiceState, token: str, timing: Timing) -> None:
        self.service = service
        self.store = service.store
        self.timing = timing
        self._token = token
        self._wake_ups: dict[str, asyncio.Event] = {}
        self._heard: dict[str, int] = {}
        self._calls: set[asyncio.Task[Any]] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._warned: set[str] = set()

    async def open(self) -> None:
        """Open the client, and start the background tasks."""
        from semel.providers.replicate.api import ReplicateApi  # a server without Replicate does without httpx

        self.api = ReplicateApi(self.service.settings.replicate_url, self._token, self.timing.timeout)
        self.seen = AsyncOnce(
            self.service.app.url.replace("postgres://", "postgresql://", 1), clock=self.service.app.clock
        )
        tidy = repeat(self._tidy_all, "the clean-up of predictions", self.timing.tidy)
        self._tasks = [asyncio.create_task(tidy)]
        if self.webhooks:
            poll = repeat(self._poll_webhooks, "the search for webhooks", self.timing.webhook_poll)
            self._tasks.append(asyncio.create_task(poll))

    async def close(self) -> None:
        """Stop. Pending calls get a moment to finish, so that their predictions need not be searched for later."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        if self._calls:
            await asyncio.wait(self._calls, timeout=CLOSE_TIMEOUT)
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        await self.api.close()
        await self.seen.close()

    @property
    def webhooks(self) -> bool:
        """Whether Replicate can reach this server, and its webhooks can be verified."""
        return bool(self.service.settings.public_url and self.service.settings.replicate_webhook_secret)

    def webhook_options(self, token: str) -> dict[str, Any]:
        """The fields of a new prediction that ask Replicate for webhooks."""
        if not self.webhooks:
            return {}
        address = (self.service.settings.public_url or "").rstrip("/") + HOOK + token
        return {"webhook": address, "webhook_events_filter": ["start", "completed"]}

    def spawn(self, work: Coroutine[Any, Any, R]) -> asyncio.Task[R]:
        """Run the work to its end, even if the run that started it is cancelled."""
        task = asyncio.create_task(work)
        self._calls.add(task)
        task.add_done_callback(self._called)
        return task

    def _called(self, task: asyncio.Task[Any]) -> None:
        self._calls.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.debug("a call to Replicate failed: %s", error)

    async def write(self, work: Callable[Concatenate[Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Write, and retry until the database is available: what Replicate responded must not be lost."""
        while True:
            try:
                return await self.store.write(work, *args, **kwargs)
            except StoreBroken:
                raise
            except StoreUnavailable:  # the store has logged it
                await asyncio.sleep(1.0)

    @contextmanager
    def following(self, remote: rows.Remote) -> Iterator[asyncio.Event]:
        """An event that is set when there is news of the prediction."""
        token = remote.token
        wake_up = self._wake_ups[token] = asyncio.Event()
        self._heard[token] = remote.heard_us
        try:
            yield wake_up
        finally:
            if self._wake_ups.get(token) is wake_up:
                del self._wake_ups[token]
                self._heard.pop(token, None)

    def notify(self, token: str, heard_us: int) -> None:
        """Wake up the run that follows the token's prediction, once for each time."""
        if (wake_up := self._wake_ups.get(token)) is not None and self._heard.get(token, 0) < heard_us:
            self._heard[token] = heard_us
            wake_up.set()

    async def find_prediction(self, query: PredictionQuery, remote: rows.Remote) -> Candidates:
        """Which of the account's predictions may be the run's."""
        judged: list[tuple[Prediction, Verdict]] = []
        cursor: str | None = None
        since, reached = 0.0, False
        for number in range(MAX_PAGES):
            page = await self.api.list(cursor)
            if not number:
                since = self._since(remote, page.now)
            judged += [(each, judge(each, query, remote.token, since)) for each in page.results]
            cursor = page.cursor
            reached = cursor is None or any(each.created is not None and each.created < since for each in page.results)
            if reached:
                break
        near = await self._in_detail([each for each in judged if each[1] != "other"], query, remote.token, since)
        ids = [each.id for each, _ in near]
        claimed = await self.store.read(rows.claimed_by_others, ids, remote.token) if ids else []
        candidates = group_by_verdict(near, claimed)
        if not reached:
            candidates.unclear.append("more predictions than can be searched")
        return candidates

    def _since(self, remote: rows.Remote, now: float | None) -> float:
        """The time of the intent on Replicate's clock."""
        ago = (remote.now_us - remote.intended_us) / MICRO
        if now is None:
            return remote.now_us / MICRO - ago - self.timing.margin - UNKNOWN_CLOCK
        return now - ago - self.timing.margin

    async def _in_detail(
        self, near: list[tuple[Prediction, Verdict]], query: PredictionQuery, token: str, since: float
    ) -> list[tuple[Prediction, Verdict]]:
        """Judge the predictions again with their details: lists do not show a prediction's webhook."""
        seen: list[tuple[Prediction, Verdict]] = []
        for place, (each, verdict) in enumerate(near):
            if verdict == "certain" or place >= MAX_DETAILS:
                seen.append((each, verdict))
                continue
            with suppress(ReplicateRefusal):
                found = await self.api.get(each.id)
                seen.append((found, judge(found, query, token, since)))
        return seen

    async def cancel_duplicate(self, prediction_id: str, run_id: str) -> None:
        """Cancel a second prediction of a run."""
        _log.error("run %s has a second prediction at Replicate, %s: cancelling it", run_id, prediction_id)
        backoff = Backoff(self.timing.poll)
        for tries in range(1, 6):
            try:
                await self.api.cancel(prediction_id)
            except Unavailable as error:
                await asyncio.sleep(error.after or backoff.after(tries))
            except ReplicateRefusal as refusal:
                _log.warning("the prediction %s could not be cancelled: %s", prediction_id, refusal)
                return
            else:
                return
        _log.error("the prediction %s could not be cancelled: cancel it at replicate.com", prediction_id)

    async def _poll_webhooks(self) -> float:
        """Wake up runs for webhooks that another process received: it stored the time."""
        if self._wake_ups:
            for token, at in (await self.store.read(rows.heard_times, list(self._wake_ups))).items():
                self.notify(token, at)
        return self.timing.webhook_poll

    async def _tidy_all(self) -> float:
        for orphan in await self.store.read(rows.orphans, 100, self.store.statement_context):
            await self._tidy(orphan)
        return self.timing.tidy

    async def _tidy(self, orphan: rows.Orphan) -> None:
        """Cancel the prediction of a run that is over, and store how it ended."""
        remote = orphan.remote
        try:
            status = await self._search(orphan) if remote.id is None else await self._cancel(remote.id)
        except (Unavailable, ReplicateRefusal) as error:
            status = None
            if remote.token not in self._warned:
                self._warned.add(remote.token)
                _log.warning(
                    "the prediction of run %s, which is over, could not be cancelled: %s", remote.run_id, error
                )
        if status is None and orphan.over_us > self.timing.give_up * MICRO:
            status = "unknown"
        if status == "unknown":
            _log.error("run %s is over, but its prediction may not be: look for it at replicate.com", remote.run_id)
        if status is not None:
            self._warned.discard(remote.token)
            await self.store.write(rows.set_status_of, remote.token, status)

    async def _search(self, orphan: rows.Orphan) -> str | None:
        """Find the prediction of a run that ended before the response came; the next round cancels it."""
        remote = orphan.remote
        if orphan.over_us < self.timing.settle * MICRO:
            return None
        query = typed_json.decode(orphan.parameters, PredictionQuery)
        candidates = await self.find_prediction(query, remote)
        found = candidates.certain or candidates.alike
        if len(found) == 1:
            with suppress(rows.AlreadyClaimed):
                await self.store.write(rows.record, remote.token, found[0], "starting", self.store.statement_context)
            return None
        return "unknown" if found or candidates.unclear else "absent"

    async def _cancel(self, prediction_id: str) -> str | None:
        """Cancel it; returns its final status, None if it has not ended yet."""
        try:
            found = await self.api.get(prediction_id)
            if not found.ended:
                await self.api.cancel(prediction_id)
                found = await self.api.get(prediction_id)
        except ReplicateRefusal as refusal:
            if refusal.status != 404:
                raise
            return "unknown"
        return found.status if found.ended else None


_PERCENTAGE = re.compile(r"(?:^|[^\d.])(\d{1,3}(?:\.\d+)?)%")


def progress_in(logs: str | None) -> float | None:
    """The last percentage in the last lines of the logs, as progress bars write it, as a number from 0 to 1."""
    found = _PERCENTAGE.findall((logs or "")[-2000:])
    share = float(found[-1]) / 100 if found else None
    return share if share is not None and share <= 1 else None
