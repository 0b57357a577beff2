"""The models that tests of the service submit, and how those tests begin: an app, its service, tokens, a worker."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx

from semel import App
from semel._concurrency.sync import run_sync
from semel.runs.execution.context import Context
from semel.service.auth import tokens
from semel.service.auth.tokens import Role
from support.service import made_app

PATIENCE = 30.0
T = TypeVar("T")


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
    """Until it is cancelled."""
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
    """The service's own, which nobody sees."""


def register(app: App) -> None:
    """Models that run in the worker's loop, so that a test waits for no process."""
    app.model("add", summary="scenario")(add)
    app.model("fail", max_attempts=1)(fail)
    for model in (echo, talk, linger, files):
        app.model(model.__name__)(model)
    app.model("semel.inside", queue="semel-service")(inside)


def token(app: App, user: str, role: Role = "submitter", tenant: str = "") -> str:
    """A token for somebody."""
    ledger = app.ledger(awaited=False)
    try:
        request = tokens.NewToken(user=user, role=role, tenant=tenant)
        return run_sync(ledger.write(tokens.issue, request, ledger.terms)).secret
    finally:
        run_sync(ledger.close())


def submitted(client: httpx.Client, model: str, parameters: dict[str, Any] | None = None, **more: Any) -> str:
    """The id of a new run."""
    answer = client.post("/runs", json={"model": model, "parameters": parameters or {}, **more})
    assert answer.status_code == 201, answer.text
    run_id: str = answer.json()["run_id"]
    return run_id


def until(condition: Callable[[], T], what: str) -> T:
    """What the condition says once it says something."""
    deadline = time.monotonic() + PATIENCE
    while not (said := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen within {PATIENCE:g} seconds"
        time.sleep(0.01)
    return said


def ended(client: httpx.Client, run_id: str) -> dict[str, Any]:
    """The run once it is over, by waiting for it."""
    for _ in range(10):
        answer = client.get(f"/runs/{run_id}", params={"wait": 20})
        assert answer.status_code == 200, answer.text
        run: dict[str, Any] = answer.json()
        if run["finished_at"] is not None:
            return run
    raise AssertionError(f"run {run_id} did not end")


@contextmanager
def on_database(request: Any, folder: Path, **options: Any) -> Iterator[App]:
    """An app on the database that the fixture's parameter names, with the models above; for whole modules."""
    if request.param == "postgres":
        server = request.getfixturevalue("postgres_server")
        url = server.database()
    else:
        url = f"sqlite:///{folder / 'semel.db'}"
    app = made_app(url, folder, **{"dedupe_window": 0, **options})
    register(app)
    try:
        yield app
    finally:
        app.close()
        if request.param == "postgres":
            server.drop(url)
