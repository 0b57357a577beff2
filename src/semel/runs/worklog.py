"""The worker's own log: every line carries the model, the run, its hash, the worker, the status and the attempt."""

from __future__ import annotations

import logging

from semel.runs.held import Held

_log = logging.getLogger("semel.worker")


class WorkLog:
    """Says what happens, in the same fields each time: as attributes of the record, and in its text."""

    def __init__(self, worker_id: str) -> None:
        self._worker_id = worker_id

    def say(self, level: int, message: str, held: Held | None = None, status: str | None = None) -> None:
        """One line. ``status`` is what the run is by now."""
        if not _log.isEnabledFor(level):
            return
        leased = held.leased if held is not None else None
        fields = {
            "model": leased.model if leased else None,
            "run_id": leased.id if leased else None,
            "payload_hash": leased.payload_hash if leased else None,
            "worker_id": self._worker_id,
            "status": status or ("RUNNING" if leased else None),
            "attempt_count": leased.attempts if leased else None,
        }
        told = " ".join(f"{name}={'-' if value is None else value}" for name, value in fields.items())
        _log.log(level, "%s %s", message, told, extra=fields)
