"""An app that stock RQ and Celery workers import: two databases and one transport, from the environment."""

import asyncio
import json
import os
import sys
import time
from pathlib import Path

from semel.errors import Retry
from semel.runs.app import App
from semel.runs.execution.context import Context

SETTINGS = json.loads(os.environ["SEMEL_TRANSPORT_APP"])
NOTES = Path(SETTINGS["folder"]) / "notes"
PATIENCE = 60
TIMES = {"sweep_every": SETTINGS["sweep_every"], "tell_again": SETTINGS["tell_again"]}


def note(ctx: Context, what: str, process: int = 0) -> None:
    """Append a line, in one write, to the file that the test reads."""
    line = f"{ctx.run_id} {what} {ctx.attempt} {ctx.fence} {process or os.getpid()}\n"
    with NOTES.open("ab", buffering=0) as file:
        file.write(line.encode())


def add(ctx: Context, a: int, b: int) -> int:
    note(ctx, "done")
    return a + b


def add_in_thread(ctx: Context, a: int, b: int) -> int:
    note(ctx, "done")
    return a + b


async def add_in_loop(ctx: Context, a: int, b: int) -> int:
    note(ctx, "done")
    return a + b


async def flaky(ctx: Context) -> int:
    note(ctx, "done")
    if ctx.attempt == 1:
        raise Retry("not yet")
    return ctx.attempt


def slow(ctx: Context, gate: str) -> int:
    """The first attempt waits for a file, after it has noted its parent process."""
    note(ctx, "begun", os.getppid())
    deadline = time.monotonic() + PATIENCE
    while ctx.attempt == 1 and not Path(gate).exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    note(ctx, "done")
    return ctx.fence


async def slow_in_loop(ctx: Context, gate: str) -> int:
    note(ctx, "begun")
    deadline = time.monotonic() + PATIENCE
    while ctx.attempt == 1 and not Path(gate).exists() and time.monotonic() < deadline:  # noqa: ASYNC110, ASYNC240
        await asyncio.sleep(0.02)
    note(ctx, "done")
    return ctx.fence


def make_app(url: str) -> App:
    app = App(url, artifacts=Path(SETTINGS["folder"]) / "artifacts")
    app.model("add")(add)
    app.model("add_in_thread", isolation="thread")(add_in_thread)
    app.model("add_in_loop")(add_in_loop)
    app.model("flaky", backoff=(0.2,))(flaky)
    app.model("slow", lease=5)(slow)
    app.model("slow_in_loop", lease=5)(slow_in_loop)
    match SETTINGS["transport"]:
        case "rq":
            from semel.runs.rq import RqTransport

            app.transport = RqTransport(SETTINGS["redis"], app, **TIMES)
        case "celery":
            from semel.runs.celery import CeleryTransport

            app.transport = CeleryTransport(SETTINGS["redis"], app, **TIMES)
        case "installed":
            from semel.runs.celery import install

            install(celery_app, app, **TIMES)
    return app


if SETTINGS["transport"] == "installed":
    from celery import Celery

    celery_app = Celery("transport_app", broker=SETTINGS["redis"], set_as_current=False)

apps = {kind: make_app(url) for kind, url in SETTINGS["urls"].items()}
sqlite_app, postgres_app = apps.get("sqlite"), apps.get("postgres")
if "rq.cli" in sys.modules:
    for app in apps.values():
        app.runs(limit=1)  # a connection is open when the worker forks
