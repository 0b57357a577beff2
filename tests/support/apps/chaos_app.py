"""A worker program for tests that kill it: `python chaos_app.py URL ARTIFACTS EFFECTS`."""

import asyncio
import os
import random
import sys
import time
from pathlib import Path

from semel import App, Context, Worker


def make_app(url: str, artifacts: str, effects: str) -> App:
    app = App(url, artifacts=artifacts, dedupe_window=0)
    os.environ["SEMEL_TEST_EFFECTS"] = effects
    app.model("async", lease=1.5, max_lost=50, backoff=(0.05,), max_attempts=5)(in_loop)
    app.model("blocking", lease=1.5, max_lost=50, backoff=(0.05,), max_attempts=5)(in_child)
    return app


def effect(ctx: Context) -> None:
    """Record an execution as one line in one write, which is atomic even if the process is killed."""
    file = os.open(os.environ["SEMEL_TEST_EFFECTS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, f"{ctx.run_id} {ctx.fence}\n".encode())
    os.close(file)


async def in_loop(ctx: Context, number: int) -> dict[str, int]:
    """Every tenth run fails at its first attempt."""
    await asyncio.sleep(random.uniform(0, 0.06))
    if number % 10 == 0 and ctx.attempt == 1:
        raise RuntimeError("the first attempt fails")
    effect(ctx)
    return {"number": number, "fence": ctx.fence}


def in_child(ctx: Context, number: int) -> dict[str, int]:
    """Writes an artifact besides its result."""
    time.sleep(random.uniform(0, 0.03))
    ctx.artifact("fence.txt").write_text(str(ctx.fence))
    effect(ctx)
    return {"number": number, "fence": ctx.fence}


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from support.apps.chaos_app import make_app as made  # under its own name, so that children find the models

    Worker(made(*sys.argv[1:4]), name="chaos", concurrency=20, processes=1, poll=0.5, sweep_every=0.3).run()
