"""The app that the golden server serves: its models run in the worker's loop and always do the same."""

import os

from semel import App, Context, Fatal

app = App(os.environ["SEMEL_DB"])


@app.model("add", summary="a")
async def add(a: int, b: int = 0) -> int:
    """Add two numbers."""
    return a + b


@app.model("fail", max_attempts=1)
async def fail(why: str = "told to") -> None:
    """Fail for good."""
    raise Fatal(why)


@app.model("talk")
async def talk(ctx: Context) -> str:
    """Log a line."""
    ctx.log.info("hello")
    return "said"


@app.model("write", cost=1.5)
async def write(ctx: Context, text: str) -> None:
    """Leave a file."""
    ctx.artifact("letter.txt").write_text(text)


@app.model("wait", queue="unserved")
async def wait() -> None:
    """Wait in a queue that no worker serves."""
