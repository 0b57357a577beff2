"""A server with a worker and some models, for the tests of the commands that use a server."""

import asyncio
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from semel import App, Context, Fatal
from semel.cli import cli
from support.service import PATIENCE, TestServer, make_app, serve
from support.waiting import eventually

ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
UNSERVED = "nobody"
"""A queue that no worker serves."""


def add_models(app: App, gate: threading.Event) -> None:
    @app.model("add")
    async def add(ctx: Context, a: int, b: Any = 10) -> Any:
        """Adds, and says so."""
        ctx.log.info("adding %r to %r", a, b)
        ctx.progress(0.5, "halfway")
        return {"sum": a + b} if isinstance(b, int) else {"text": b}

    @app.model("fail", max_attempts=1)
    async def fail(why: str = "told to") -> None:
        raise Fatal(why)

    @app.model("falter", max_attempts=2, backoff=[0])
    async def falter(ctx: Context) -> str:
        if ctx.attempt == 1:
            raise ConnectionError("the line was busy")
        return "through"

    @app.model("leave")
    async def leave(ctx: Context, text: str) -> None:
        ctx.artifact("notes/a letter.txt").write_text(text)

    @app.model("hold", summary="why")
    async def hold(ctx: Context, why: str = "") -> str:
        """Waits until it is let go."""
        ctx.progress(0.25, "holding")
        ctx.log.warning("holding %s", why)
        while not gate.is_set() and not ctx.cancelled:  # noqa: ASYNC110 -- another thread opens the gate
            await asyncio.sleep(0.01)
        return "let go"


def parsed(arguments: Sequence[str]) -> dict[str, Any]:
    """The parsed parameters of a command line, by name; the command is not run."""
    context = cli.make_context("semel", list(arguments))
    while isinstance(context.command, click.Group):
        name, command, rest = context.command.resolve_command(context, [*context._protected_args, *context.args])
        assert command is not None
        context = command.make_context(name, rest, parent=context)
    return context.params


class CliServer:
    """A server with a worker, for commands that use a server."""

    def __init__(self, service: TestServer, gate: threading.Event) -> None:
        self.service = service
        self.app = service.app
        self.gate = gate

    def submit(self, *arguments: Any, **options: Any) -> str:
        return str(self.app.submit(*arguments, user="local", dedupe=False, **options).id)

    def ended(self, *arguments: Any, **options: Any) -> str:
        return str(self.app.wait(self.submit(*arguments, **options), timeout=PATIENCE).id)

    def until(self, run_id: str, wanted: Callable[[Any], bool]) -> None:
        eventually(lambda: wanted(self.app.get(run_id)), f"run {run_id} as wanted")


@contextmanager
def cli_server(url: str, folder: Path) -> Iterator[CliServer]:
    """A server with a worker on the database, until the end of the block."""
    app = make_app(url, folder)
    gate = threading.Event()
    add_models(app, gate)
    with serve(app) as service, app.working(processes=0, threads=1, poll=0.2):
        eventually(lambda: any("default" in each.queues for each in app.workers()), "the worker is known")
        yield CliServer(service, gate)
        gate.set()
    app.close()
