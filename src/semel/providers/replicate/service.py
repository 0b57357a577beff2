"""The desk at which a server deals with Replicate: one client, who is waiting for which news, and calls under way.

It also looks after remote jobs whose runs are over, such as one that was cancelled while no attempt was at work: they
are ended at Replicate, too.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Coroutine
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import msgspec
from msgspec import Struct

from semel.errors import SemelError, StoreBroken, StoreUnavailable
from semel.once.client import AsyncOnce
from semel.providers.replicate import store as rows
from semel.providers.replicate.matching import Choice, PredictionQuery, Verdict, choose, judge
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
"""Where Replicate calls back; the token of the run follows."""
MOST_PAGES = 50
MOST_DETAILS = 20
WITHOUT_CLOCK = 300.0
"""Seconds by which Replicate's clock may differ from ours where it does not say its time."""
CALLS_END = 5.0
"""Seconds for which a server that stops waits for the answers to its calls."""

_log = logging.getLogger("semel.service")


class Timing(Struct, frozen=True, kw_only=True):
    """How long to wait for what, in seconds."""

    poll: float = 2.0
    poll_most: float = 30.0
    settle: float = 30.0
    """A call whose answer was lost may still become a prediction for so long."""
    margin: float = 60.0
    """By so much may a prediction seem older than the intent."""
    tick: float = 0.5
    """Between two looks whether the run is to be cancelled."""
    ear: float = 1.0
    """Between two looks for webhooks that another process of the server took."""
    tidy: float = 30.0
    give_up: float = 86400.0
    """For so long it is tried to end a remote job whose run is over."""
    lease: float = 60.0
    grace: float = 120.0
    timeout: float = 30.0


class ReplicateService:
    """Runs while the server is up; a :class:`~semel.service.state.Component`."""

    api: ReplicateApi
    seen: AsyncOnce

    def __init__(self, service: ServiceState, token: str, pace: Timing) -> None:
        self.service = service
        self.pace = pace
        self._token = token
        self._bells: dict[str, asyncio.Event] = {}
        self._heard: dict[str, int] = {}
        self._calls: set[asyncio.Task[Any]] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._lamented: set[str] = set()

    async def open(self) -> None:
        """Start."""
        from semel.providers.replicate.api import ReplicateApi  # a server without Replicate does without httpx

        self.api = ReplicateApi(self.service.settings.replicate_url, self._token, self.pace.timeout)
        self.seen = AsyncOnce(
            self.service.app.url.replace("postgres://", "postgresql://", 1), clock=self.service.app.clock
        )
        self._tasks = [asyncio.create_task(self._tidy_forever())]
        if self.webhooks:
            self._tasks.append(asyncio.create_task(self._listen_forever()))

    async def close(self) -> None:
        """Stop: calls whose answers are on their way are waited for, so that they need not be looked for later."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        if self._calls:
            await asyncio.wait(self._calls, timeout=CALLS_END)
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        await self.api.close()
        await self.seen.close()

    @property
    def webhooks(self) -> bool:
        """Whether Replicate can call back, and be believed."""
        return bool(self.service.settings.public_url and self.service.settings.replicate_webhook_secret)

    def hook(self, token: str) -> dict[str, Any]:
        """What a prediction is asked for with, so that we hear of it."""
        if not self.webhooks:
            return {}
        address = (self.service.settings.public_url or "").rstrip("/") + HOOK + token
        return {"webhook": address, "webhook_events_filter": ["start", "completed"]}

    def spawn(self, work: Coroutine[Any, Any, R]) -> asyncio.Task[R]:
        """Do what must be done to its end, whatever becomes of whoever began it."""
        task = asyncio.create_task(work)
        self._calls.add(task)
        task.add_done_callback(self._called)
        return task

    def _called(self, task: asyncio.Task[Any]) -> None:
        self._calls.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.debug("a call to Replicate ended: %s", error)

    async def write(self, work: Callable[Concatenate[Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Write, however long the database is away: what Replicate said must not be forgotten."""
        while True:
            try:
                return await self.service.store.write(work, *args, **kwargs)
            except StoreBroken:
                raise
            except StoreUnavailable:  # which the ledger has reported
                await asyncio.sleep(1.0)

    @contextmanager
    def attending(self, remote: rows.Remote) -> Iterator[asyncio.Event]:
        """The bell of a remote job, rung when there is news of it."""
        token = remote.token
        bell = self._bells[token] = asyncio.Event()
        self._heard[token] = remote.heard_us
        try:
            yield bell
        finally:
            if self._bells.get(token) is bell:
                del self._bells[token]
                self._heard.pop(token, None)

    def ring(self, token: str, heard_us: int) -> None:
        """There is news of the token's prediction, since then: rung once for each."""
        if (bell := self._bells.get(token)) is not None and self._heard.get(token, 0) < heard_us:
            self._heard[token] = heard_us
            bell.set()

    async def look(self, asked: PredictionQuery, remote: rows.Remote) -> Choice:
        """Which of the account's predictions may be the remote job."""
        judged: list[tuple[Prediction, Verdict]] = []
        cursor: str | None = None
        since: float | None = None
        for _ in range(MOST_PAGES):
            page = await self.api.list(cursor)
            if since is None:
                since = self._since(remote, page.now)
            judged += [(each, judge(each, asked, remote.token, since)) for each in page.results]
            cursor = page.cursor
            if cursor is None or any(each.created is not None and each.created < since for each in page.results):
                break
        near = await self._in_detail([each for each in judged if each[1] != "other"], asked, remote.token, since or 0.0)
        ids = [each.id for each, _ in near]
        taken = await self.service.store.read(rows.taken, ids, remote.token) if ids else []
        choice = choose(near, taken)
        if cursor is not None and not any(
            each.created is not None and each.created < (since or 0) for each, _ in judged
        ):
            choice.unclear.append("those that are too many to look through")
        return choice

    def _since(self, remote: rows.Remote, now: float | None) -> float:
        """The intent's time on Replicate's clock."""
        ago = (remote.now_us - remote.intended_us) / MICRO
        if now is None:
            return remote.now_us / MICRO - ago - self.pace.margin - WITHOUT_CLOCK
        return now - ago - self.pace.margin

    async def _in_detail(
        self, near: list[tuple[Prediction, Verdict]], asked: PredictionQuery, token: str, since: float
    ) -> list[tuple[Prediction, Verdict]]:
        """Lists do not show where a prediction calls back; a prediction by itself does."""
        seen: list[tuple[Prediction, Verdict]] = []
        for place, (each, verdict) in enumerate(near):
            if verdict == "certain" or place >= MOST_DETAILS:
                seen.append((each, verdict))
                continue
            with suppress(ReplicateRefusal):
                found = await self.api.get(each.id)
                seen.append((found, judge(found, asked, token, since)))
        return seen

    async def end_stray(self, prediction_id: str, run_id: str) -> None:
        """A prediction that is one too many: end it, and say so."""
        _log.error("run %s has a second prediction at Replicate, %s: it is cancelled there", run_id, prediction_id)
        for tries in range(5):
            try:
                await self.api.cancel(prediction_id)
            except Unavailable as away:
                await asyncio.sleep(away.after or self.pace.poll * 2**tries)
            except ReplicateRefusal as refusal:
                _log.warning("the prediction %s could not be cancelled: %s", prediction_id, refusal)
                return
            else:
                return
        _log.error("the prediction %s could not be cancelled: please look after it", prediction_id)

    async def _listen_forever(self) -> None:
        """Webhooks come to any process of the server; what they say is in the rows."""
        while True:
            await asyncio.sleep(self.pace.ear)
            if not self._bells:
                continue
            with suppress(SemelError):
                for token, at in (await self.service.store.read(rows.news, list(self._bells))).items():
                    self.ring(token, at)

    async def _tidy_forever(self) -> None:
        while True:
            try:
                for orphan in await self.service.store.read(rows.orphans, 100, self.service.store.terms):
                    await self._tidy(orphan)
            except SemelError as error:
                if not isinstance(error, StoreUnavailable):  # which the ledger has reported
                    _log.warning("remote jobs could not be looked after: %s", error)
            except Exception:  # noqa: BLE001 -- one that cannot be looked after must not end it for the others
                _log.exception("remote jobs could not be looked after")
            await asyncio.sleep(self.pace.tidy)

    async def _tidy(self, orphan: rows.Orphan) -> None:
        """End the remote job of a run that is over, and write how it ended."""
        remote = orphan.remote
        try:
            status = await self._status_of(orphan) if remote.id is None else await self._ended(remote.id)
        except (Unavailable, ReplicateRefusal) as trouble:
            status = None
            if remote.token not in self._lamented:
                self._lamented.add(remote.token)
                _log.warning("the remote job of run %s, which is over, could not be ended: %s", remote.run_id, trouble)
        if status is None and orphan.over_us > self.pace.give_up * MICRO:
            status = "unknown"
        if status == "unknown":
            _log.error("run %s is over, and whether its remote job is cannot be told: please look", remote.run_id)
        if status is not None:
            self._lamented.discard(remote.token)
            await self.service.store.write(rows.close, remote.token, status)

    async def _status_of(self, orphan: rows.Orphan) -> str | None:
        """Of a run that ended between its intent and an answer: find the prediction, and leave it to the next round."""
        remote = orphan.remote
        if orphan.over_us < self.pace.settle * MICRO:
            return None
        choice = await self.look(asked_in(orphan.parameters), remote)
        found = choice.certain or choice.alike
        if len(found) == 1:
            with suppress(rows.AlreadyClaimed):
                await self.service.store.write(
                    rows.record, remote.token, found[0], "starting", self.service.store.terms
                )
            return None
        return "unknown" if found or choice.unclear else "absent"

    async def _ended(self, prediction_id: str) -> str | None:
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


def asked_in(parameters: str) -> PredictionQuery:
    """What the parameters of a run ask of Replicate."""
    return msgspec.json.decode(parameters, type=PredictionQuery)


_SHARE = re.compile(r"(?:^|[^\d.])(\d{1,3}(?:\.\d+)?)%")


def share_in(logs: str | None) -> float | None:
    """How far the work is, by the last percentage that the logs' last lines have, as progress bars write it."""
    found = _SHARE.findall((logs or "")[-2000:])
    share = float(found[-1]) / 100 if found else None
    return share if share is not None and share <= 1 else None
