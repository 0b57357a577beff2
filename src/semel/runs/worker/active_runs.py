"""What a worker holds: each run that it leased, how far it is, and what it said meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

from semel.runs.execution.context import StopFlag
from semel.runs.models.model import Model
from semel.runs.store.lease import Leased, LeaseRenewal, LogLineRow
from semel.runs.types import MICRO, Attempt


class ActiveRun:
    """One leased run while it is worked on. It is the wire on which its attempt is heard."""

    __slots__ = (
        "cancelled_at",
        "finished",
        "fraction",
        "handing_back",
        "job",
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
        self.job = Attempt(
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
        """Keep how far it is until the next heartbeat."""
        self.fraction, self.note, self.progress_changed = fraction, note, True

    def line(self, level: str, text: str) -> None:
        """Keep the line until the next flush."""
        self.line_count += 1
        at_us = self.leased.changed_us + round((time.monotonic() - self.started) * MICRO)  # on the database's clock
        self.lines.append(LogLineRow(self.leased.id, self.leased.fence, self.line_count, at_us, level, text))

    def renewal(self) -> LeaseRenewal:
        """A sign of life, with the progress where there is news of it."""
        if not self.progress_changed:
            return LeaseRenewal(self.leased.id, self.leased.fence)
        return LeaseRenewal(self.leased.id, self.leased.fence, self.fraction, self.note)

    def on_renewed(self, sent: LeaseRenewal) -> None:
        """The sign of life arrived; what it said of the progress is no news any more, unless there was more since."""
        if (self.fraction, self.note) == (sent.progress, sent.note):
            self.progress_changed = False

    @property
    def lease(self) -> float:
        """Seconds that the lease lasts from a renewal."""
        return self.leased.lease_us / 1e6


class ActiveRuns:
    """Every run that is leased, until its end is written."""

    def __init__(self) -> None:
        self._held: dict[str, ActiveRun] = {}

    def add(self, held: ActiveRun) -> None:
        """From now on it is kept alive."""
        self._held[held.leased.id] = held

    def drop(self, held: ActiveRun) -> None:
        """It is over, or someone else's."""
        if self._held.get(held.leased.id) is held:
            del self._held[held.leased.id]

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[ActiveRun]:
        return iter(list(self._held.values()))

    def __contains__(self, run_id: object) -> bool:
        return run_id in self._held

    def get(self, run_id: str) -> ActiveRun | None:
        """The run, if it is held."""
        return self._held.get(run_id)
