"""Waiting for runs to change: one query a few times a second serves all requests that wait.

No query is sent while no request waits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from semel.errors import StoreUnavailable
from semel.runs.store import queries
from semel.runs.store.queries import RunVersion
from semel.runs.types import TERMINAL, Run

if TYPE_CHECKING:
    from semel.runs.store import RunStore

SHORTEST = 0.02
LONGEST = 0.25
"""Seconds between two queries: short after a new waiter or a change, longer while nothing happens."""
SHARE = 4
"""The shortest pause after a query, as a multiple of the query's duration."""
AT_ONCE = 500
"""Runs in one query."""

_log = logging.getLogger("semel.service")


class Waiter:
    """A request that waits for a run to change, or to end."""

    __slots__ = ("_end_only", "_line", "_mark", "changed")

    def __init__(self, run: Run, line: tuple[int, int] | None, *, end_only: bool) -> None:
        self._mark = RunVersion.of(run)
        self._line = line
        self._end_only = end_only
        self.changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def waits(self, mark: RunVersion, line: tuple[int, int]) -> bool:
        """Whether nothing that it waits for has happened."""
        if self._end_only:
            return mark.status not in TERMINAL
        return mark == self._mark and self._line in (None, line)

    def wake(self) -> None:
        """End the wait."""
        if not self.changed.done():
            self.changed.set_result(None)


class RunWatch:
    """Polls the runs that requests wait for."""

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self._waiters: dict[str, set[Waiter]] = {}
        self._task: asyncio.Task[None] | None = None
        self._pause = SHORTEST
        self._ending = False

    async def open(self) -> None:
        """Start; the first waiter starts the polling."""
        self._ending = False

    async def close(self) -> None:
        """End all waits."""
        self.dismiss()
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    def dismiss(self) -> None:
        """The server is shutting down: end all waits now, and allow no new ones."""
        self._ending = True
        for waiters in self._waiters.values():
            for waiter in waiters:
                waiter.wake()

    @property
    def ending(self) -> bool:
        """Whether the server is shutting down."""
        return self._ending

    async def change(
        self, run: Run, seconds: float, *, line: tuple[int, int] | None = None, end_only: bool = False
    ) -> bool:
        """Wait until the run has changed since it was read, or until the time is over; returns whether it has.

        With ``line``, the (fence, line) of the last log line seen, also until it has logged more. ``end_only``: until
        it has ended.
        """
        if self._ending or seconds <= 0:
            return False
        waiter = Waiter(run, line, end_only=end_only)
        self._waiters.setdefault(run.id, set()).add(waiter)
        self._pause = SHORTEST
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._poll_forever())
        try:
            async with asyncio.timeout(seconds):
                await waiter.changed
        except TimeoutError:
            return False
        finally:
            self._leave(run.id, waiter)
        return not self._ending

    def _leave(self, run_id: str, waiter: Waiter) -> None:
        waiters = self._waiters[run_id]
        waiters.discard(waiter)
        if not waiters:
            del self._waiters[run_id]

    async def _poll_forever(self) -> None:
        while self._waiters:
            await asyncio.sleep(self._pause)
            self._pause = min(self._pause * 1.5, LONGEST)
            started = time.monotonic()
            try:
                await self._poll()
            except Exception as error:  # noqa: BLE001 -- whatever it is, the next try may succeed
                if not isinstance(error, StoreUnavailable):  # which the store has logged
                    _log.warning("runs that requests wait for could not be read: %r", error)
                self._pause = LONGEST
            self._pause = max(self._pause, SHARE * (time.monotonic() - started))

    async def _poll(self) -> None:
        ids = list(self._waiters)
        for start in range(0, len(ids), AT_ONCE):
            some = ids[start : start + AT_ONCE]
            marks = await self._store.read(queries.versions, some)
            for run_id in some:
                for waiter in self._waiters.get(run_id, ()):
                    if run_id not in marks or not waiter.waits(*marks[run_id]):
                        waiter.wake()
                        self._pause = SHORTEST
