"""A town with the models that the pages of runs show, a worker for one queue, and leases taken by hand for another."""

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

PATIENCE = 30.0
IDLE = "idle"
"""The queue that no worker serves: what is submitted there waits until a test takes it."""
TRICKS = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</pre></textarea></title><svg onload=alert(1)>",
    "{{ 7 * 7 }} {% raw %} javascript:alert(1)",
]
"""Texts that do something where they are not taken for texts."""


async def files(ctx: Context, *, names: list[str], text: str = "content") -> None:
    """Leave files of these names."""
    for name in names:
        path = ctx.artifact(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


async def chatter(ctx: Context, *, lines: int, text: str) -> list[str]:
    """Log a lot, and give a lot."""
    for number in range(lines):
        ctx.log.info("%d %s", number, text)
    return [text] * lines


@contextmanager
def runs_server(request: pytest.FixtureRequest, factory: pytest.TempPathFactory) -> Iterator[TokenServer]:
    """The town for the tests of a file, at work."""
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
    """The id of a new run."""
    return server.app.submit(model, parameters or {}, **options).id


def ended(server: TokenServer, run_id: str) -> Run:
    """The run once it is over."""
    return server.app.wait(run_id, timeout=PATIENCE)


def idle(server: TokenServer, user: str = "", **options: Any) -> str:
    """A run that waits for ever."""
    return submitted(server, "add", {"a": 1}, user=user, queue=IDLE, **options)


class ManualWorker:
    """A worker that is led by the test: it takes runs of the idle queue, and ends them as it is told."""

    def __init__(self, app: App) -> None:
        self._ledger = app.ledger(awaited=False)

    def take(self, run_id: str) -> None:
        """Lease the run, which must be due."""
        leased = run_sync(self._ledger.write(lease.lease_these, "the-hand", [run_id], self._ledger.terms))
        assert len(leased) == 1, "the run could not be leased"

    def end(self, run_id: str, kind: Any, reason: str = "as told", **more: Any) -> None:
        """End the attempt at the run."""
        run = run_sync(self._ledger.find(run_id))
        assert run is not None
        ending = FinishRequest(run_id, run.fence, AttemptResult(kind=kind, reason=reason, **more))
        assert run_sync(self._ledger.write(transitions.end, [ending], self._ledger.terms)), (
            "the run was not held any more"
        )

    def tidy(self) -> None:
        """Remove the keys that have expired."""
        run_sync(self._ledger.write(maintenance.remove_expired, self._ledger.terms))

    def close(self) -> None:
        run_sync(self._ledger.close())


@contextmanager
def manual_worker(server: TokenServer) -> Iterator[ManualWorker]:
    """A hand of one's own."""
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
