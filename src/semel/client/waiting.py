"""Waiting for a run over HTTP, also while the server is unavailable."""

from __future__ import annotations

import time
from collections.abc import Callable
from inspect import isawaitable
from math import inf
from typing import TypeAlias

import httpx

from semel.api_types import RemoteRun
from semel.client.errors import Answer
from semel.client.http import HttpSession
from semel.client.streaming import LONGEST_PAUSE

LONG_POLL = 25.0
"""Seconds for which the server may hold the response back until the run changes."""

Progress: TypeAlias = Callable[[RemoteRun], object]


class RunWaiter:
    """Waits until a run has ended, and reports its progress."""

    def __init__(self, session: HttpSession, path: str, seconds: float | None, progress: Progress | None) -> None:
        self._session = session
        self._path = path
        self._seconds = seconds
        self._end = inf if seconds is None else time.monotonic() + seconds
        self._progress = progress
        self._run: RemoteRun | None = None
        self._tag: str | None = None

    async def wait(self) -> RemoteRun:
        """Return the run once it has ended."""
        lost = 0
        while True:
            begun = time.monotonic()
            hold = 0.0 if lost else self._hold()
            answer = await self._poll(hold)
            pause = self._session.retry_policy.wait(lost + 1, answer)
            if pause is not None and (self._run is not None or lost < self._session.retry_policy.retries):
                lost += 1
                await self._sleep(min(pause, LONGEST_PAUSE))
                continue
            lost = 0
            run = await self._changed(self._session.checked(answer, about_run=True))
            if run is not None and run.done:
                return run
            # A server that is shutting down does not hold responses back: do not poll it in a tight loop.
            early = run is None and time.monotonic() - begun < hold / 2
            await self._sleep(1.0 if early else 0.0)

    def _hold(self) -> float:
        """How long the server may hold the response back; the first one that reports progress comes at once."""
        if self._progress is not None and self._tag is None:
            return 0.0
        return max(0.0, min(LONG_POLL, self._end - time.monotonic()))

    async def _poll(self, hold: float) -> Answer | httpx.TransportError:
        headers = {} if self._tag is None else {"if-none-match": self._tag}
        params = {"wait": f"{hold:.3f}"} if hold else {}
        return await self._session.try_once(
            "GET", self._path, self._session.timeout + hold, params=params, headers=headers
        )

    async def _changed(self, answer: Answer) -> RemoteRun | None:
        """The run, if it has changed."""
        if answer.status == 304:
            return None
        run = self._session.decode(answer, RemoteRun)
        if run == self._run:
            return None
        self._run = run
        if self._progress is not None:
            self._tag = answer.headers.get("etag")
            reported = self._progress(run)
            if isawaitable(reported):
                await reported
        return run

    async def _sleep(self, duration: float) -> None:
        left = self._end - time.monotonic()
        if left <= 0:
            how = "of unknown status" if self._run is None else f"still {self._run.status}"
            raise TimeoutError(f"run {self._path.rpartition('/')[2]} is {how} after {self._seconds} seconds")
        if duration:
            await self._session.backend.pause(min(duration, left))
