"""Models for the tests of the dashboard, also for a server in processes of its own."""

import asyncio
import base64
import os
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from semel import App
from semel.runs.execution.context import Context

SQUARE = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAABAAAAAQCAIAAACQkWg2AAAAFklEQVR42mMQSvEnCTGMahjVMHw1AAB/s8UBo52tGgAAAABJRU5ErkJggg=="
)


async def add(a: Annotated[int, Meta(ge=0, le=1000)], b: int = 0, mode: Literal["plain", "fancy"] = "plain") -> int:
    """Add two numbers."""
    return a + b


async def hold(ctx: Context, *, until: str, note: str = "holding") -> str:
    """Run until the file ``until`` exists."""
    ctx.log.info("waits for %s", until)
    ctx.progress(0.4, note)
    while not Path(until).exists():  # noqa: ASYNC240 -- a local file
        ctx.check()
        await asyncio.sleep(0.02)
    ctx.log.info("goes on")
    return "went on"


async def fail(text: str = "as told") -> None:
    raise ValueError(text)


async def shout(ctx: Context, *, text: str) -> dict[str, str]:
    """Put the text into the log, the progress and the result."""
    ctx.log.warning("%s", text)
    ctx.progress(0.5, text)
    return {"said": text, text: "said"}


async def paint(ctx: Context, *, rows: int = 60) -> list[dict[str, int]]:
    """Write an image, a table and a large file."""
    ctx.log.info("paints")
    ctx.artifact("square.png").write_bytes(SQUARE)
    ctx.artifact("table.json").write_text('{"columns": ["a", "b"], "rows": [[1, 2], [3, 4]]}')
    ctx.artifact("large.bin").write_bytes(bytes(3_000_000))
    return [{"row": row, "square": row * row} for row in range(rows)]


def register(app: App) -> App:
    """The app with these models."""
    app.model("add", summary="mode")(add)
    app.model("hold")(hold)
    app.model("frail", lease=2, max_lost=5, backoff=(0.05,))(hold)
    app.model("fail", max_attempts=1)(fail)
    app.model("shout", max_attempts=1)(shout)
    app.model("paint")(paint)
    return app


app = register(App(os.environ.get("SEMEL_DB", "sqlite:///semel.db"), dedupe_window=0))
