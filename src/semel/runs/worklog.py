"""Log lines about runs: each carries the model, the run, its hash, the worker, the status and the attempt."""

from __future__ import annotations

import logging

from semel.runs.held import Held

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


class WorkLog:
    """The log of one worker."""

    def __init__(self, worker_id: str) -> None:
        self._worker_id = worker_id

    def say(self, level: int, message: str, held: Held | None = None, status: str | None = None) -> None:
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
