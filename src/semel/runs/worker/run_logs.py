"""Logs of a worker: the lines that its runs log, on their way to the database, and its own lines about runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence

from semel.runs.store import RunStore, lease
from semel.runs.worker.active_runs import ActiveRun, ActiveRuns

NAMED = 20
"""The most runs that one log line names."""

_log = logging.getLogger("semel.worker")


def log_run(
    log: logging.Logger,
    level: int,
    message: str,
    *,
    model: str | None = None,
    run_id: str | None = None,
    payload_hash: str | None = None,
    worker_id: str | None = None,
    status: str | None = None,
    attempt_count: int | None = None,
) -> None:
    """Log one line with the same fields each time: as attributes of the record, and in its text."""
    if not log.isEnabledFor(level):
        return
    fields = {
        "model": model,
        "run_id": run_id,
        "payload_hash": payload_hash,
        "worker_id": worker_id,
        "status": status,
        "attempt_count": attempt_count,
    }
    shown = " ".join(f"{name}={'-' if value is None else value}" for name, value in fields.items())
    log.log(level, "%s %s", message, shown, extra=fields)


class WorkerLogger:
    """Logs what one worker does, with the fields of the run that a line is about."""

    def __init__(self, worker_id: str) -> None:
        self._worker_id = worker_id

    def logs(self, level: int) -> bool:
        """Whether a line of this level goes anywhere."""
        return _log.isEnabledFor(level)

    def log(self, level: int, message: str, run: ActiveRun | None = None, status: str | None = None) -> None:
        """Log one line. ``status`` is the run's, RUNNING unless given."""
        if not self.logs(level):
            return
        if run is None:
            log_run(_log, level, message, worker_id=self._worker_id)
            return
        leased = run.leased
        log_run(
            _log,
            level,
            message,
            model=leased.model,
            run_id=leased.id,
            payload_hash=leased.payload_hash,
            worker_id=self._worker_id,
            status=status or "RUNNING",
            attempt_count=leased.attempts,
        )

    def log_lost(self, lost: Sequence[ActiveRun]) -> None:
        """Log one line for all leases that were lost together."""
        what = "what the attempt did is discarded, and the run goes on elsewhere or is done again"
        if len(lost) == 1:
            self.log(logging.WARNING, f"the lease was lost: {what}", lost[0])
        elif lost:
            ids = ", ".join(run.leased.id for run in lost[:NAMED]) + (", …" if len(lost) > NAMED else "")
            what = "what the attempts did is discarded, and the runs go on elsewhere or are done again"
            self.log(logging.WARNING, f"{len(lost)} leases were lost: {what}: {ids}")


EVERY = 1.0
PIECE_LINES, PIECE_CHARACTERS = 500, 1_000_000
"""The most lines and characters that one statement writes."""


class RunLogWriter:
    """Writes the runs' log lines every second, and a run's last lines before its end is written."""

    def __init__(self, store: RunStore, active: ActiveRuns) -> None:
        self._store = store
        self._active = active
        self._writing = asyncio.Lock()

    async def write_active(self) -> float:
        """Write the lines of all active runs; returns after how many seconds to do so again."""
        await self.write(self._active)
        return EVERY

    async def write(self, runs: Iterable[ActiveRun]) -> None:
        """Write the lines of these runs; they are stored when it returns."""
        if not any(run.lines for run in runs):
            return
        async with self._writing:
            for run in runs:
                while piece := _piece(run):
                    await self._store.write(lease.log, run.lines[:piece])
                    del run.lines[:piece]


def _piece(run: ActiveRun) -> int:
    """How many lines the next statement writes."""
    size = 0
    for count, line in enumerate(run.lines[:PIECE_LINES], 1):
        size += len(line.text)
        if size >= PIECE_CHARACTERS:
            return count
    return min(len(run.lines), PIECE_LINES)
