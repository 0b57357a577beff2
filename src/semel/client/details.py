"""What else can be asked of a server: a run's life, logs and files, sums, models, workers, quotas."""

from __future__ import annotations

import io
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import IO, TYPE_CHECKING
from uuid import uuid4

import msgspec

from semel.api_types import (
    LogPage,
    RemoteEvent,
    RemoteLogLine,
    RemoteModel,
    RemoteStep,
    RemoteSummary,
    RemoteUsage,
    RemoteWaiting,
    RemoteWorker,
    WaitingAnswer,
)
from semel.client.http import HttpSession
from semel.client.sending import path_of, run_path
from semel.client.streaming import Streams
from semel.errors import ServiceError

if TYPE_CHECKING:
    from semel.runs.types import Quota


class DetailVerbs:
    """The verbs of those who look closer."""

    exchange: HttpSession

    async def timeline(self, run_id: str) -> list[RemoteStep]:
        """Every step of the run's life, oldest first."""
        return await self.exchange.read(f"{run_path(run_id)}/timeline", list[RemoteStep], about_run=True)

    async def waiting(self, run_id: str) -> RemoteWaiting | None:
        """Why the run is pending, its place in the queue, since when; None when it is not pending."""
        answer = await self.exchange.read(f"{run_path(run_id)}/waiting", WaitingAnswer, about_run=True)
        return answer.waiting

    async def logs(self, run_id: str, *, follow: bool = False) -> AsyncGenerator[RemoteLogLine, None]:
        """What the run logged, oldest first; with ``follow``, also what it logs from now on, until it is over."""
        path = run_path(run_id)
        if follow:
            async with aclosing(self.events(run_id)) as events:
                async for event in events:
                    if event.kind == "log":
                        yield msgspec.convert(event.data, RemoteLogLine)
            return
        after = None
        while True:
            page = await self.exchange.read(f"{path}/logs", LogPage, params={"after": after}, about_run=True)
            for line in page.lines:
                yield line
            if not page.lines:
                return
            after = page.next

    async def events(self, run_id: str) -> AsyncGenerator[RemoteEvent, None]:
        """What happens to the run, as it happens and from its beginning, until it is over.

        ``state`` for every step, ``progress``, and ``log`` for every line. A connection that is lost is taken up
        where it broke off: nothing is missed, and of steps and lines nothing is told twice.
        """
        async with aclosing(Streams(self.exchange).events(f"{run_path(run_id)}/events")) as events:
            async for event in events:
                yield event

    async def artifact(self, run_id: str, name: str) -> bytes:
        """A file that the run left, as bytes."""
        content = io.BytesIO()
        await self._download(run_id, name, content)
        return content.getvalue()

    async def save_artifact(self, run_id: str, name: str, path: str | os.PathLike[str]) -> Path:
        """Save a file that the run left, however large, at the path; what was there is replaced when it is whole."""
        target = Path(path)
        part = target.with_name(f".{target.name}.{uuid4().hex}.part")
        try:
            with part.open("xb") as sink:
                await self._download(run_id, name, sink)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
        return target

    async def _download(self, run_id: str, name: str, sink: IO[bytes]) -> None:
        path = f"{run_path(run_id)}/artifacts/{path_of('the name of an artifact', name)}"
        await Streams(self.exchange).download(path, sink)

    async def summary(self, *, grouped: bool = False) -> list[RemoteSummary]:
        """Runs by model and state; ``grouped`` also by the parameter that each model is summarised by."""
        params = {"grouped": "true"} if grouped else {}
        return await self.exchange.read("/summary", list[RemoteSummary], params=params)

    async def models(self) -> list[RemoteModel]:
        """What can be submitted."""
        return await self.exchange.read("/models", list[RemoteModel])

    async def workers(self) -> list[RemoteWorker]:
        """Who works; for operators."""
        return await self.exchange.read("/workers", list[RemoteWorker])

    async def usage(self, user: str | int | None = None) -> RemoteUsage:
        """What one has in use oneself, or, for operators, somebody else; and the quota that holds for them."""
        path = "/usage" if user is None else f"/usage/{path_of('a user', user)}"
        return await self.exchange.read(path, RemoteUsage)

    async def set_quota(self, user: str | int, quota: Quota | None) -> None:
        """Limit a user, for admins; ``"*"`` is everybody without a quota of their own. None takes a quota away."""
        path = f"/admin/quotas/{path_of('a user', user)}"
        if quota is not None:
            await self.exchange.ask("PUT", path, body=quota)
            return
        try:
            await self.exchange.ask("DELETE", path)
        except ServiceError as error:
            if error.status != 404:  # there is none: so it was asked for
                raise
