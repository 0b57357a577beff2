"""The runs that a worker has leased: their progress, and the log lines that are not written yet."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

from semel.runs.execution.context import StopFlag
from semel.runs.models.model import Model
from semel.runs.store.lease import Leased, LeaseRenewal, LogLineRow
from semel.runs.types import MICRO, Attempt


class ActiveRun:
    """A leased run while it is executed, and the sink of its attempt's progress and log."""

    __slots__ = (
        "attempt",
        "cancelled_at",
        "finished",
        "fraction",
        "handing_back",
        "leased",
        "line_count",
        "lines",
        "lost",
        "model",
        "note",
        "progress_changed",
        "renewed",
        "started",
        "stop",
        "task",
    )

    def __init__(self, leased: Leased, model: Model, worker: str, now: float) -> None:
        self.leased = leased
        self.model = model
        self.attempt = Attempt(
            run_id=leased.id,
            model=leased.model,
            parameters=leased.parameters,
            payload_hash=leased.payload_hash,
            fence=leased.fence,
            attempt=leased.attempts,
            user=leased.user_id,
            tenant=leased.tenant,
            worker=worker,
            data_ref=leased.data_ref,
            seed=leased.seed,
        )
        self.stop = StopFlag()
        self.task: asyncio.Task[None] | None = None
        self.started = self.renewed = now
        self.fraction: float | None = None
        self.note = ""
        self.progress_changed = False
        self.lines: list[LogLineRow] = []
        self.line_count = 0
        self.lost = self.finished = self.handing_back = False
        self.cancelled_at: float | None = None

    def progress(self, fraction: float, note: str) -> None:
        """Keep the progress until the next heartbeat."""
        self.fraction, self.note, self.progress_changed = fraction, note, True

    def line(self, level: str, text: str) -> None:
        """Keep the line until the next flush."""
        self.line_count += 1
        at_us = self.leased.changed_us + round((time.monotonic() - self.started) * MICRO)  # on the database's clock
        self.lines.append(LogLineRow(self.leased.id, self.leased.fence, self.line_count, at_us, level, text))

    def renewal(self) -> LeaseRenewal:
        """The renewal of its lease, with the progress if that changed."""
        if not self.progress_changed:
            return LeaseRenewal(self.leased.id, self.leased.fence)
        return LeaseRenewal(self.leased.id, self.leased.fence, self.fraction, self.note)

    def on_renewed(self, sent: LeaseRenewal) -> None:
        """Note that the renewal was stored: its progress is not sent again, unless it changed since."""
        if (self.fraction, self.note) == (sent.progress, sent.note):
            self.progress_changed = False

    @property
    def lease(self) -> float:
        """Seconds that the lease lasts from a renewal."""
        return self.leased.lease_us / 1e6


class ActiveRuns:
    """Every run that is leased, until its end is written."""

    def __init__(self) -> None:
        self._runs: dict[str, ActiveRun] = {}

    def add(self, run: ActiveRun) -> None:
        """Add a run, whose lease is renewed from now on."""
        self._runs[run.leased.id] = run

    def drop(self, run: ActiveRun) -> None:
        """Forget a run that ended, or that another worker has."""
        if self._runs.get(run.leased.id) is run:
            del self._runs[run.leased.id]

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Iterator[ActiveRun]:
        return iter(list(self._runs.values()))

    def get(self, run_id: str) -> ActiveRun | None:
        """The run, or None if it is not active."""
        return self._runs.get(run_id)
