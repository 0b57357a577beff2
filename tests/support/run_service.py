"""The models that tests of the service submit, an app with them, and runs submitted over HTTP."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from semel import App
from semel.runs.execution.context import Context
from support.service import app_on


async def add(a: int, b: int = 0, scenario: str = "plain") -> int:
    """Add two numbers."""
    return a + b


async def fail() -> None:
    raise ValueError("as told")


async def echo(**given: Any) -> Any:
    return given


async def talk(ctx: Context, lines: int = 2) -> str:
    for number in range(lines):
        ctx.log.info("line %d", number)
    ctx.progress(0.5, "half")
    return "said"


async def linger(ctx: Context) -> None:
    """Run until it is cancelled."""
    while True:
        ctx.check()
        await asyncio.sleep(0.01)


async def files(ctx: Context, names: list[str], text: str = "content") -> int:
    for name in names:
        path = ctx.artifact(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return len(names)


async def inside() -> None:
    """A model of the service's own, which callers cannot see."""


def register(app: App) -> None:
    """Register models that run in the worker's event loop, so that a test waits for no child process."""
    app.model("add", summary="scenario")(add)
    app.model("fail", max_attempts=1)(fail)
    for model in (echo, talk, linger, files):
        app.model(model.__name__)(model)
    app.model("semel.inside", queue="semel-service")(inside)


def submitted(client: httpx.Client, model: str, parameters: dict[str, Any] | None = None, **more: Any) -> str:
    """Submit a run; returns its id."""
    answer = client.post("/runs", json={"model": model, "parameters": parameters or {}, **more})
    assert answer.status_code == 201, answer.text
    run_id: str = answer.json()["run_id"]
    return run_id


def ended(client: httpx.Client, run_id: str) -> dict[str, Any]:
    """Wait for the run; returns it once it has ended."""
    for _ in range(10):
        answer = client.get(f"/runs/{run_id}", params={"wait": 20})
        assert answer.status_code == 200, answer.text
        run: dict[str, Any] = answer.json()
        if run["finished_at"] is not None:
            return run
    raise AssertionError(f"run {run_id} did not end")


@contextmanager
def app_with_models(request: pytest.FixtureRequest, folder: Path, **options: Any) -> Iterator[App]:
    """An app on a new database of the kind that the fixture's parameter names, with the models above."""
    with app_on(request, folder, **options) as app:
        register(app)
        yield app
