"""Calls the blocking and the async client in the same way, so that a test is written once; and a service for them."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from inspect import isawaitable
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

from semel import App, Context, Fatal
from semel.client import AsyncClient, Client
from support.service import PATIENCE, TestServer, make_app, serve

QUICK = {"backoff": 0.001, "timeout": 20.0}


class ClientDriver:
    """Calls a method of a client and returns its result; iterators become lists, or are read one by one with `each`."""

    def __init__(self, kind: str, base_url: str | None, **options: Any) -> None:
        self.kind = kind
        self._runner = asyncio.Runner()
        make = Client if kind == "blocking" else AsyncClient
        self.client: Any = make(base_url, **{**QUICK, **options})

    def __getattr__(self, verb: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._given(getattr(self.client, verb)(*args, **kwargs))

        return call

    def _given(self, answer: Any) -> Any:
        if isawaitable(answer):
            return self._runner.run(_awaited(answer))
        if isinstance(answer, AsyncIterator | Iterator):
            return list(self.each(answer))
        return answer

    def each(self, answer: Any) -> Iterator[Any]:
        """The items of an iterator, one by one as they arrive."""
        if isinstance(answer, Iterator):
            yield from answer
            return
        while True:
            try:
                yield self._runner.run(_awaited(anext(answer)))
            except StopAsyncIteration:
                return
            except GeneratorExit:
                self._runner.run(answer.aclose())
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._given(self.client.close())
        self._runner.close()


async def _awaited(answer: Any) -> Any:
    return await answer


gates: dict[str, threading.Event] = {}
"""The gates that models wait for, by name."""


def gate() -> str:
    name = uuid4().hex
    gates[name] = threading.Event()
    return name


def with_models(app: App) -> App:
    @app.model("add")
    async def add(a: int, b: int = 0) -> int:
        """Adds."""
        return a + b

    @app.model("diverge")
    async def diverge() -> dict[str, Any]:
        return {"metrics": {"loss": float("nan"), "norm": float("inf"), "step": 7}}

    @app.model("fail", max_attempts=1)
    async def fail(word: str) -> None:
        raise Fatal(word)

    @app.model("gated", isolation="thread", summary="gate")
    def gated(ctx: Context, gate: str) -> str:
        ctx.progress(0.5, "half")
        ctx.log.info("at the gate")
        assert gates[gate].wait(PATIENCE)
        ctx.log.info("through the gate")
        return gate

    @app.model("files", isolation="thread")
    def files(ctx: Context, size: int) -> str:
        ctx.artifact("deep/data é.bin").write_bytes(b"x" * size)
        return "done"

    return app


@contextmanager
def working_service(url: str, folder: Path) -> Iterator[TestServer]:
    """The service with these models, and a worker."""
    app = with_models(make_app(url, folder, dedupe_window=0))
    with serve(app) as service, app.working(processes=0):
        yield service
    app.close()
