"""The verbs on runs over HTTP: written once, for both faces."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from datetime import datetime
from math import inf
from typing import Any, Unpack

from semel.api_types import RemoteRun, RunPage
from semel.client.bulk import submitted
from semel.client.http import HttpSession, given
from semel.client.sending import SubmitOptions, automatic_key, key_and_dedupe, run_path
from semel.client.waiting import Progress, RunWaiter
from semel.errors import SemelError

PAGE = 200
"""Runs that are asked for at once."""


class RunVerbs:
    """The verbs on runs."""

    exchange: HttpSession

    async def submit(
        self,
        model: str,
        parameters: Mapping[str, Any] | None = None,
        *,
        idempotency_key: str | None = None,
        user: str | int | None = None,
        queue: str | None = None,
        priority: int | None = None,
        delay: float | None = None,
        cost: float | None = None,
        key_ttl: float | None = None,
        dedupe: bool | None = None,
    ) -> RemoteRun:
        """Submit a run; ``run.replayed`` says that it was there already: under the same key, or, without one, with the
        same payload and under way.

        One key, ``py-client-<uuid>`` without one, goes with all tries, so that a lost answer never makes a second
        run. The rest is as for :meth:`semel.App.submit`; ``user`` is for operators who submit for others.
        """
        key, dedupe = key_and_dedupe(idempotency_key, dedupe)
        fields = {
            "model": model,
            "parameters": parameters or {},
            "idempotency_key": key,
            "user": None if user is None else str(user),
            "queue": queue,
            "priority": priority,
            "delay": delay,
            "cost": cost,
            "key_ttl": key_ttl,
            "dedupe": dedupe,
        }
        answer = await self.exchange.ask("POST", "/runs", body=given(fields), key=key)
        return self.exchange.decoded(answer, RemoteRun, key=key)

    async def submit_many(self, submissions: Sequence[Mapping[str, Any]]) -> list[RemoteRun | SemelError]:
        """Submit many runs with few requests: each is the arguments of :meth:`submit` as a mapping.

        Answers in their order; where one could not be had, its error stands in its place. Each has a key of its own.
        """
        return await submitted(self.exchange, submissions)

    async def submit_and_wait(
        self,
        model: str,
        parameters: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 -- it is the blocking face's, too
        progress: Progress | None = None,
        **options: Unpack[SubmitOptions],
    ) -> RemoteRun:
        """Submit a run with the options of :meth:`submit`, wait as :meth:`wait` does, and give it as it ended."""
        run = await self.submit(model, parameters, **options)
        return await self.wait(run.run_id, timeout=timeout, progress=progress)

    async def get(self, run_id: str) -> RemoteRun:
        """The run as it stands."""
        return await self.exchange.read(run_path(run_id), RemoteRun, about_run=True)

    async def wait(
        self,
        run_id: str,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 -- it is the blocking face's, too
        progress: Progress | None = None,
    ) -> RemoteRun:
        """Wait until the run is over, and give it as it ended; TimeoutError when that takes too long.

        ``progress`` is called with the run whenever it changed. A server that goes away meanwhile is waited for, too;
        one that was never there is not.
        """
        return await RunWaiter(self.exchange, run_path(run_id), timeout, progress).ended()

    async def result(self, run_id: str) -> Any:
        """What the run returned; :class:`~semel.errors.RunNotComplete` unless it succeeded."""
        answer = await self.exchange.ask("GET", f"{run_path(run_id)}/result", params={"exact": "true"}, about_run=True)
        return self.exchange.decoded_exactly(answer)

    async def cancel(self, run_id: str, *, why: str | None = None) -> RemoteRun:
        """End a run that is pending, or ask for the end of one that is running: it gets time to clean up."""
        answer = await self.exchange.ask("POST", f"{run_path(run_id)}/cancel", body=given({"why": why}), about_run=True)
        return self.exchange.decoded(answer, RemoteRun)

    async def retry(self, run_id: str, *, idempotency_key: str | None = None) -> RemoteRun:
        """Submit a failed or cancelled run again, as a new run with ``retry_of``.

        ``run.replayed``: the new run was there already: under way, or, with a key, whatever became of it. One key,
        ``py-client-<uuid>`` without one, goes with all tries, so that a lost answer never makes a second run.
        """
        path, key = f"{run_path(run_id)}/retry", automatic_key() if idempotency_key is None else idempotency_key
        answer = await self.exchange.ask("POST", path, headers={"idempotency-key": key}, key=key, about_run=True)
        return self.exchange.decoded(answer, RemoteRun, key=key)

    async def runs(
        self,
        *,
        status: str | Sequence[str] | None = None,
        model: str | None = None,
        user: str | int | None = None,
        queue: str | None = None,
        idempotency_key: str | None = None,
        payload_hash: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        stalled: bool = False,
        limit: int | None = None,
        parameters: bool = False,
    ) -> AsyncGenerator[RemoteRun, None]:
        """Runs, newest first, page after page: all of them, or up to ``limit``; with their parameters if asked for.

        ``stalled`` leaves only those whose worker lives and whose progress has not moved for ``stall_after``.
        """
        asked = {
            "status": status,
            "model": model,
            "user": user,
            "queue": queue,
            "idempotency_key": idempotency_key,
            "payload_hash": payload_hash,
            "since": None if since is None else since.isoformat(),
            "until": None if until is None else until.isoformat(),
            "include": "parameters" if parameters else None,
            "stalled": "true" if stalled else None,
        }
        left = inf if limit is None else limit
        cursor = None
        while left > 0:
            params = {**asked, "limit": int(min(left, PAGE)), "cursor": cursor}
            page = await self.exchange.read("/runs", RunPage, params=params)
            for run in page.runs:
                yield run
            left -= len(page.runs)
            cursor = page.next
            if cursor is None or not page.runs:
                return
