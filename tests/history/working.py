"""A worker for the histories of runs: it records what it leases and finishes, and what its models do."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import psycopg

from history.recorded_runs import record_app
from semel import App, Context, Worker
from semel.testing.history import Operation, Recorder, attempt, effect

LEASE = 0.6


class Oracle:
    """A table in another database, which knows nothing of semel: each execution of a model is a row."""

    def __init__(self, url: str) -> None:
        self.url = url

    def _execute(self, statement: str) -> list[tuple[str, int]]:
        if self.url.startswith("sqlite"):
            with closing(sqlite3.connect(self.url.removeprefix("sqlite:///"), timeout=60)) as file, file:
                return file.execute(statement).fetchall()
        with psycopg.connect(self.url) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def create(self) -> None:
        self._execute("CREATE TABLE effects (run text, fence integer)")

    def add(self, run: str, fence: int) -> None:
        self._execute(f"INSERT INTO effects VALUES ('{run}', {fence})")

    def effects(self) -> list[Operation]:
        rows = self._execute("SELECT run, fence FROM effects")
        return [effect("run", (run,), fence, where="the oracle's table") for run, fence in rows]


def open_app(url: str, folder: Path, model: Callable[..., object]) -> App:
    app = App(url, artifacts=folder / "artifacts")
    app.model("work", isolation="thread", lease=LEASE, max_lost=20, max_attempts=5, backoff=(0.05,))(model)
    return app


def nothing(ctx: Context, name: str) -> None:
    """The model of an app that only submits."""


def work(url: str, oracle_url: str, place: str, name: str) -> None:
    """Run a worker until SIGTERM. A run waits as long as there is a file of its name."""
    folder = Path(place)
    recorder = Recorder(folder / "history", name)
    oracle = Oracle(oracle_url)

    def model(ctx: Context, name: str) -> str:
        with attempt(recorder, ctx):
            oracle.add(ctx.run_id, ctx.fence)
            if ctx.attempt == 1 and name.startswith("fails"):
                raise RuntimeError("the first attempt fails")
            if (folder / name).exists():
                (folder / f"{name} pid").write_text(str(os.getpid()))
                while (folder / name).exists():
                    time.sleep(0.01)  # the test removes it
            return f"{name} {ctx.fence}"

    app = record_app(open_app(url, folder, model), recorder)
    Worker(app, name=name, concurrency=4, poll=0.1, sweep_every=0.1).run()
