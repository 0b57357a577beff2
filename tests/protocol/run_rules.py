"""The rules of runs, in Python: what the statements of ``semel/runs/store`` say in SQL, for one run at a time.

``test_runs_on_databases.py`` takes every step of these rules on the real store, and compares every answer and every
row. Times are ticks from now.
"""

from __future__ import annotations

from typing import NamedTuple

LEASE, MAX_ATTEMPTS, MAX_LOST = 1, 2, 2
"""The length of a lease in ticks, and how many errors and losses end a run."""

ABSENT, PENDING, RUNNING = "ABSENT", "PENDING", "RUNNING"
SUCCEEDED, FAILED, CANCELLED = "SUCCEEDED", "FAILED", "CANCELLED"
ENDED = frozenset({SUCCEEDED, FAILED, CANCELLED})
ENDS = ("succeeded", "fatal", "retry", "cancelled", "lost", "returned")
"""How an attempt can end. A snoozed one ends like one that is given back."""


class Run(NamedTuple):
    """A row. ``lease``: the ticks until its lease ends; -1 when it has ended, and while nobody has one."""

    status: str = ABSENT
    fence: int = 0
    lease: int = -1
    cancel: bool = False
    errors: int = 0
    losts: int = 0
    rows: int = 0
    """How many runs there are of one submission."""


class Rules:
    """Every verb is one atomic step. None: nothing was changed."""

    def submit(self, run: Run) -> Run:
        """The first submission makes the run; a repeat finds it."""
        return run._replace(status=PENDING, rows=1) if run.status == ABSENT else run

    def lease(self, run: Run) -> Run | None:
        if run.status != PENDING:
            return None
        return run._replace(status=RUNNING, fence=run.fence + 1, lease=LEASE)

    def holds(self, run: Run, fence: int) -> bool:
        """Whether the attempt with this fence may write."""
        return run.status == RUNNING and run.fence == fence

    def renew(self, run: Run, fence: int) -> Run | None:
        return run._replace(lease=LEASE) if self.holds(run, fence) else None

    def finish(self, run: Run, fence: int, end: str) -> Run | None:
        if not self.holds(run, fence):
            return None
        return run._replace(
            status=self.status_after(run, end),
            lease=-1,
            errors=run.errors + (end in {"retry", "fatal"}),
            losts=run.losts + (end == "lost"),
        )

    def status_after(self, run: Run, end: str) -> str:
        if end in {"succeeded", "cancelled", "fatal"}:
            return {"succeeded": SUCCEEDED, "cancelled": CANCELLED, "fatal": FAILED}[end]
        if run.cancel:
            return CANCELLED
        spent = (end == "retry" and run.errors + 1 >= MAX_ATTEMPTS) or (end == "lost" and run.losts + 1 >= MAX_LOST)
        return FAILED if spent else PENDING

    def finished_before(self, run: Run, fence: int, end: str) -> bool:
        """Whether this very success was written, and only its reply was lost."""
        return end == "succeeded" and run.status == SUCCEEDED and run.fence == fence

    def sweep(self, run: Run) -> Run | None:
        """Take the run back if its lease has ended."""
        return self.finish(run, run.fence, "lost") if run.status == RUNNING and run.lease < 0 else None

    def cancel(self, run: Run) -> Run | None:
        if run.status == PENDING:
            return run._replace(status=CANCELLED, cancel=True)
        return run._replace(cancel=True) if run.status == RUNNING and not run.cancel else None

    def later(self, run: Run) -> Run:
        """The run a tick later."""
        return run._replace(lease=run.lease - 1) if run.status == RUNNING and run.lease >= 0 else run
