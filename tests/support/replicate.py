"""The service with the provider ``replicate``, over real HTTP: in a thread, or in a process that can be killed."""

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import uvicorn
from sqlalchemy import Connection, text

from semel import App
from semel._concurrency.sync import run_sync
from semel.cli._database import engine_of
from semel.db.dialect import StatementContext
from semel.providers.replicate import MODEL, Replicate
from semel.providers.replicate.service import Timing
from semel.runs.store import transitions
from semel.runs.store.submit import JobDetails
from semel.runs.submission import SubmitOptions
from semel.runs.types import Run
from semel.service import Settings
from semel.service.app import build
from semel.service.state import ServiceState
from support.replicate_server import SECRET, TOKEN, VERSION, ReplicateServer
from support.service import TestServer, serve_state, server_config
from support.waiting import eventually

R = TypeVar("R")

PATIENCE = 60.0
PACE = Timing(
    poll=0.02,
    poll_most=0.1,
    settle=0.4,
    tick=0.02,
    webhook_poll=0.05,
    tidy=0.05,
    grace=PATIENCE,
    timeout=PATIENCE,
)
OVER = ("SUCCEEDED", "FAILED", "CANCELLED")


def prepared(app: App, cloud_url: str, listener: socket.socket, pace: Timing, options: dict[str, Any]) -> ServiceState:
    """A service with the provider. With the option ``hooks``, Replicate can call it back."""
    address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    if options.pop("hooks", False):
        options |= {"public_url": address, "replicate_webhook_secret": SECRET}
    state = ServiceState(app, Settings(**{"replicate_url": cloud_url, "replicate_token": TOKEN, **options}))
    state.providers["replicate"] = Replicate(pace)
    return state


@contextmanager
def serving(app: App, cloud: ReplicateServer, pace: Timing = PACE, **options: Any) -> Iterator[TestServer]:
    """The service in a thread."""
    listener = socket.create_server(("127.0.0.1", 0))
    with serve_state(prepared(app, cloud.url, listener, pace, options), listener) as server:
        eventually(lambda: in_database(app, listens, reads=True), "that the server's worker listens")
        yield server


def serve_here(url: str, folder: str, cloud_url: str, tell: Callable[[Any], None]) -> None:
    """The service in this process, until it is killed."""
    listener = socket.create_server(("127.0.0.1", 0))
    app = App(url, artifacts=Path(folder) / "artifacts", dedupe_window=0)
    tell(os.getpid())
    state = prepared(app, cloud_url, listener, PACE, {})
    uvicorn.Server(server_config(build(state))).run(sockets=[listener])


def submit(app: App, prompt: str, **more: Any) -> Run:
    """Submit a job as from a config."""
    given = {"config": "foxes", "version": VERSION, "input": {"prompt": prompt}, **more}
    if "model" in given:
        del given["version"]
    engine = app.engine(awaited=False)
    options, job = SubmitOptions(user="ada", dedupe=False), JobDetails(provider="replicate", config="foxes")
    try:
        return run_sync(engine.submit_run(MODEL, given, options, job=job))
    finally:
        run_sync(engine.close())


def ended(app: App, run: Run) -> Run:
    """The run, once it has ended."""
    eventually(lambda: app.get(run.id).status in OVER, f"the end of run {run.id}")
    return app.get(run.id)


def in_database(app: App, work: Callable[[Connection], R], *, reads: bool = False) -> R:
    """Call the function with a direct connection to the database. If it only ``reads``, it waits for no writer."""
    engine = engine_of(app.url)
    try:
        with engine.execution_options(semel_reads=reads).begin() as conn:
            return work(conn)
    finally:
        engine.dispose()


def row_of(app: App, run: Run) -> dict[str, Any]:
    """The row of the run's job."""

    def read(conn: Connection) -> dict[str, Any]:
        found = conn.execute(text("SELECT * FROM semel_jobs WHERE run_id = :run"), {"run": run.id}).mappings().first()
        return {} if found is None else dict(found)

    return in_database(app, read, reads=True)


def listens(conn: Connection) -> bool:
    """Whether a worker listens for new runs by now; always True for SQLite, where workers watch the file."""
    if conn.dialect.name == "sqlite":
        return True
    asked = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query ILIKE 'listen%'"
    return bool(conn.execute(text(asked)).scalar_one())


def take_lease(app: App, run: Run) -> None:
    """Take the run from its worker, as if its lease had expired."""

    def lose(conn: Connection) -> None:
        conn.execute(text("UPDATE semel_active SET lease_until_us = 1 WHERE id = :run"), {"run": run.id})
        now = time.time_ns() // 1000 if conn.dialect.name == "sqlite" else None
        assert run.id in [each.id for each in transitions.lose_expired(conn, StatementContext(now))]
        notify(conn)

    in_database(app, lose)


def come_due(app: App, run: Run) -> None:
    """End the pause before the run's next attempt."""

    def hasten(conn: Connection) -> None:
        conn.execute(text("UPDATE semel_active SET due_us = 0, ready = true WHERE id = :run"), {"run": run.id})
        notify(conn)

    in_database(app, hasten)


def notify(conn: Connection) -> None:
    """Notify the workers; those on SQLite notice that the file has changed."""
    if conn.dialect.name == "postgresql":
        conn.execute(text(f"NOTIFY {transitions.CHANNEL}"))


def paced(**changed: float) -> Timing:
    """The timing of the tests, with some changes."""
    return Timing(**{**{name: getattr(PACE, name) for name in PACE.__struct_fields__}, **changed})


def begun(cloud: ReplicateServer, prompt: str) -> dict[str, Any]:
    """Wait for a prediction of the prompt; returns the newest."""
    return eventually(lambda: cloud.of(prompt), "a prediction")[-1]


def failed(app: App, run: Run, *words: str) -> Run:
    """The run, once it has failed with an error that has these words."""
    over = ended(app, run)
    assert over.status == "FAILED"
    for word in words:
        assert word in (over.last_error or "")
    return over
