"""Who waits for runs to change: one look at the database serves all of them.

A client that waits costs a place in a table, not a statement: everybody's runs are looked at together, a few times a
second, and nobody asks while nobody waits.
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
"""Seconds between two looks: short after somebody came or something changed, longer while nothing happens."""
SHARE = 4
"""A look that took long is followed by a pause of so many times that."""
AT_ONCE = 500
"""Runs in one statement."""

_log = logging.getLogger("semel.service")


class Waiter:
    """One who waits for a run to be other than it was when they saw it, or only for its end."""

    __slots__ = ("_end_only", "_line", "_mark", "changed")

    def __init__(self, run: Run, line: tuple[int, int] | None, *, end_only: bool) -> None:
        self._mark = RunVersion.of(run)
        self._line = line
        self._end_only = end_only
        self.changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def waits(self, mark: RunVersion, line: tuple[int, int]) -> bool:
        """Whether there is nothing new for them in how the run stands now."""
        if self._end_only:
            return mark.status not in TERMINAL
        return mark == self._mark and self._line in (None, line)

    def wake(self) -> None:
        """It has changed, or there is nothing more to wait for."""
        if not self.changed.done():
            self.changed.set_result(None)


class RunWatch:
    """Looks at the runs that somebody waits for, in the server's event loop."""

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self._waiters: dict[str, set[Waiter]] = {}
        self._task: asyncio.Task[None] | None = None
        self._pause = SHORTEST
        self._ending = False

    async def open(self) -> None:
        """Begin; there is nothing to do before somebody waits."""
        self._ending = False

    async def close(self) -> None:
        """Let everybody go."""
        self.dismiss()
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    def dismiss(self) -> None:
        """The server is about to end: whoever waits is answered now, and nobody waits any more."""
        self._ending = True
        for waiters in self._waiters.values():
            for waiter in waiters:
                waiter.wake()

    @property
    def ending(self) -> bool:
        """Whether the server is about to end."""
        return self._ending

    async def change(
        self, run: Run, seconds: float, *, line: tuple[int, int] | None = None, end_only: bool = False
    ) -> bool:
        """Wait until the run is other than it was read, for so long at the most; True when it is.

        With ``line``, the (fence, line) of the last line seen, also until it has logged more. ``end_only``: until it
        is over, whatever happens before.
        """
        if self._ending or seconds <= 0:
            return False
        waiter = Waiter(run, line, end_only=end_only)
        self._waiters.setdefault(run.id, set()).add(waiter)
        self._pause = SHORTEST
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._look_on())
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

    async def _look_on(self) -> None:
        while self._waiters:
            await asyncio.sleep(self._pause)
            self._pause = min(self._pause * 1.5, LONGEST)
            started = time.monotonic()
            try:
                await self._look()
            except Exception as error:  # noqa: BLE001 -- whatever it was, it is tried again: somebody waits
                if not isinstance(error, StoreUnavailable):  # which the ledger has reported
                    _log.warning("runs that somebody waits for could not be looked at: %r", error)
                self._pause = LONGEST
            self._pause = max(self._pause, SHARE * (time.monotonic() - started))

    async def _look(self) -> None:
        ids = list(self._waiters)
        for start in range(0, len(ids), AT_ONCE):
            some = ids[start : start + AT_ONCE]
            marks = await self._store.read(queries.versions, some)
            for run_id in some:
                for waiter in self._waiters.get(run_id, ()):
                    if run_id not in marks or not waiter.waits(*marks[run_id]):
                        waiter.wake()
                        self._pause = SHORTEST
