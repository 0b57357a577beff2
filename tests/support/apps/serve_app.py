"""Models for a server in processes of its own."""

import asyncio
import os

from semel import App
from semel.runs import tracing

app = App(os.environ.get("SEMEL_DB", "sqlite:///semel.db"), dedupe_window=0)


@app.model("add")
async def add(a: int, b: int = 0) -> int:
    return a + b


@app.model("sleep")
async def sleep(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "slept"


@app.model("count")
def count(to: int) -> int:
    return sum(range(to))


@app.model("traced")
def traced() -> str | None:
    return tracing.current()


@app.model("fail", max_attempts=1)
async def fail() -> None:
    raise ValueError("told to")


@app.model("last", lease=1, max_lost=1)
async def last(seconds: float) -> None:
    await asyncio.sleep(seconds)
