"""Log lines about runs: each carries the model, the run, its hash, the worker, the status and the attempt."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from semel.runs.worker.active_runs import ActiveRun

NAMED = 20
"""Runs that one line names at the most."""

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
    """The log of one worker."""

    def __init__(self, worker_id: str) -> None:
        self._worker_id = worker_id

    def say(self, level: int, message: str, held: ActiveRun | None = None, status: str | None = None) -> None:
        """One line. ``status`` is what the run is by now."""
        if held is None:
            log_run(_log, level, message, worker_id=self._worker_id)
            return
        leased = held.leased
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

    def say_lost(self, lost: Sequence[ActiveRun]) -> None:
        """One line for all leases that were lost together."""
        what = "what the attempt did is discarded, and the run goes on elsewhere or is done again"
        if len(lost) == 1:
            self.say(logging.WARNING, f"the lease was lost: {what}", lost[0])
        elif lost:
            ids = ", ".join(held.leased.id for held in lost[:NAMED]) + (", …" if len(lost) > NAMED else "")
            what = "what the attempts did is discarded, and the runs go on elsewhere or are done again"
            self.say(logging.WARNING, f"{len(lost)} leases were lost: {what}: {ids}")
