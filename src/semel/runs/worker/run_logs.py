"""What runs say, on its way to the database: in pieces of bounded size, and gone from here only when it is kept."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from semel.errors import StoreUnavailable
from semel.runs.store import RunStore, maintenance
from semel.runs.worker.active_runs import ActiveRun, ActiveRuns
from semel.runs.worker.worker_logger import WorkerLogger

EVERY = 1.0
PIECE_LINES, PIECE_CHARACTERS = 500, 1_000_000
"""How much is written by one statement."""


class RunLogWriter:
    """Writes every second what was said, and what is left of a run before its end is written."""

    def __init__(self, ledger: RunStore, holdings: ActiveRuns, log: WorkerLogger) -> None:
        self._ledger = ledger
        self._holdings = holdings
        self._log = log
        self._writing = asyncio.Lock()

    async def write_forever(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(EVERY)
            try:
                await self.write(self._holdings)
            except StoreUnavailable:
                continue  # the ledger has reported it
            except Exception as error:  # noqa: BLE001 -- it is tried again, whatever it was
                self._log.say(logging.WARNING, f"lines of runs could not be kept yet: {error!r}")

    async def write(self, held: Iterable[ActiveRun]) -> None:
        """Write all that these have said; when it returns, it is kept."""
        if not any(each.lines for each in held):
            return
        async with self._writing:
            for each in held:
                while piece := _piece(each):
                    await self._ledger.write(maintenance.log, each.lines[:piece])
                    del each.lines[:piece]


def _piece(held: ActiveRun) -> int:
    """How many of its lines make the next piece."""
    size = 0
    for count, line in enumerate(held.lines[:PIECE_LINES], 1):
        size += len(line.text)
        if size >= PIECE_CHARACTERS:
            return count
    return min(len(held.lines), PIECE_LINES)
