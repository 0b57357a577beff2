"""A server with models for the pages of runs, a worker for one queue, and manual leases for another."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from semel import App
from semel._concurrency.sync import run_sync
from semel.runs.execution.context import Context
from semel.runs.store import lease, maintenance, transitions
from semel.runs.store.transitions import FinishRequest
from semel.runs.types import AttemptResult, Run
from support.apps.dashboard_app import fail, hold, paint, shout
from support.service import TokenServer, shared_server

PATIENCE = 60.0
IDLE = "idle"
"""The queue that no worker serves: its runs wait until a test leases them."""
TRICKS = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</pre></textarea></title><svg onload=alert(1)>",
    "{{ 7 * 7 }} {% raw %} javascript:alert(1)",
]
"""Texts that have an effect if they are not escaped."""


async def files(ctx: Context, *, names: list[str], text: str = "content") -> None:
    """Write artifacts of these names."""
    for name in names:
        path = ctx.artifact(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


async def chatter(ctx: Context, *, lines: int, text: str) -> list[str]:
    """Log many lines, and return a large result."""
    for number in range(lines):
        ctx.log.info("%d %s", number, text)
    return [text] * lines


@contextmanager
def runs_server(request: pytest.FixtureRequest, factory: pytest.TempPathFactory) -> Iterator[TokenServer]:
    """The server for the tests of a file, with its worker running."""
    with shared_server(request, factory) as server:
        app = server.app
        app.model("hold")(hold)
        app.model("fail", max_attempts=1)(fail)
        app.model("shout", max_attempts=1)(shout)
        app.model("paint")(paint)
        app.model("files")(files)
        app.model("chatter")(chatter)
        with app.working(processes=0, poll=0.1):
            yield server


def submitted(server: TokenServer, model: str, parameters: dict[str, Any] | None = None, **options: Any) -> str:
    """Submit a run; returns its id."""
    return server.app.submit(model, parameters or {}, **options).id


def ended(server: TokenServer, run_id: str) -> Run:
    """The run, once it has ended."""
    return server.app.wait(run_id, timeout=PATIENCE)


def idle(server: TokenServer, user: str = "", **options: Any) -> str:
    """Submit a run that no worker leases; returns its id."""
    return submitted(server, "add", {"a": 1}, user=user, queue=IDLE, **options)


class ManualWorker:
    """A worker controlled by the test: it leases runs of the idle queue, and ends them."""

    def __init__(self, app: App) -> None:
        self._ledger = app.ledger(awaited=False)

    def take(self, run_id: str) -> None:
        """Lease the run, which must be due."""
        leased = run_sync(self._ledger.write(lease.lease_these, "the-hand", [run_id], self._ledger.statement_context))
        assert len(leased) == 1, "the run could not be leased"

    def end(self, run_id: str, kind: Any, reason: str = "as told", **more: Any) -> None:
        """End the attempt at the run."""
        run = run_sync(self._ledger.find(run_id))
        assert run is not None
        ending = FinishRequest(run_id, run.fence, AttemptResult(kind=kind, reason=reason, **more))
        assert run_sync(self._ledger.write(transitions.end, [ending], self._ledger.statement_context)), (
            "the run was not held any more"
        )

    def tidy(self) -> None:
        """Remove expired keys."""
        run_sync(self._ledger.write(maintenance.remove_expired, self._ledger.statement_context))

    def close(self) -> None:
        run_sync(self._ledger.close())


@contextmanager
def manual_worker(server: TokenServer) -> Iterator[ManualWorker]:
    """A manual worker on the server's database, closed at the end of the block."""
    made = ManualWorker(server.app)
    try:
        yield made
    finally:
        made.close()


def events(lines: Iterator[str]) -> Iterator[tuple[str, str]]:
    """Server-sent events as (name, data)."""
    name, data = "", []
    for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data:"):
            data.append(line.removeprefix("data:").removeprefix(" "))
        elif not line and name:
            yield name, "\n".join(data)
            name, data = "", []
