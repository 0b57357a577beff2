"""Models for the tests of the worker, where child processes can import them. They talk to the test through files."""

import asyncio
import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Any

from semel import App, Fatal, Retry, Snooze
from semel.runs.execution.context import Context

PATIENCE = 60.0


class Hopeless(Exception):
    """An error that a model declares fatal."""


def told(ctx: Context, folder: str) -> None:
    """Append a line about this attempt: an effect that a second execution would repeat."""
    line = f"{ctx.run_id} {ctx.fence} {ctx.attempt} {os.getpid()}\n"
    with (Path(folder) / "effects").open("a") as effects:
        effects.write(line)


async def add(a: int, b: int = 10) -> int:
    return a + b


def add_apart(a: int, b: int = 10) -> int:
    return a + b


async def note(ctx: Context, folder: str, number: int = 0) -> dict[str, int]:
    told(ctx, folder)
    return {"number": number, "fence": ctx.fence, "attempt": ctx.attempt}


def note_apart(ctx: Context, folder: str, number: int = 0) -> dict[str, int]:
    told(ctx, folder)
    return {"number": number, "fence": ctx.fence, "attempt": ctx.attempt}


async def flaky(ctx: Context, failures: int, why: str = "not yet") -> int:
    """Fails ``failures`` times, then succeeds."""
    if ctx.attempt <= failures:
        raise RuntimeError(why)
    return ctx.attempt


async def decide(ctx: Context, verdict: str, raised: bool, times: int = 1) -> Any:
    """Raise or return the verdict the first ``times`` times, counted by the fence: a snooze costs no attempt."""
    if ctx.fence > times:
        return ctx.attempt
    said = {
        "retry": Retry("the other side is busy", after=30),
        "soon": Retry("once more", after=0),
        "fatal": Fatal("this cannot work"),
        "snooze": Snooze(45, "nothing to do yet"),
        "hopeless": Hopeless("of the declared kind"),
    }[verdict]
    if raised:
        raise said
    return said


def hopeless() -> None:
    raise Hopeless("of the declared kind")


def wait_politely(ctx: Context, folder: str) -> str:
    """Run until the file ``open`` exists, or until asked to stop, and then clean up."""
    told(ctx, folder)
    deadline = time.monotonic() + PATIENCE
    try:
        while not (Path(folder) / "open").exists() and time.monotonic() < deadline:
            ctx.check()
            time.sleep(0.01)
    finally:
        (Path(folder) / "cleaned").touch()
    return "let through"


def wait_deaf(ctx: Context, folder: str) -> str:
    """Run until the file ``open`` exists, and ignore requests to stop."""
    told(ctx, folder)
    deadline = time.monotonic() + PATIENCE
    while not (Path(folder) / "open").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return "let through"


async def await_politely(ctx: Context, folder: str) -> str:
    told(ctx, folder)
    try:
        async with asyncio.timeout(PATIENCE):
            while not (Path(folder) / "open").exists():
                ctx.check()
                await asyncio.sleep(0.01)
    finally:
        (Path(folder) / "cleaned").touch()
    return "let through"


async def await_deaf(ctx: Context, folder: str) -> str:
    told(ctx, folder)
    try:
        async with asyncio.timeout(PATIENCE):
            while not (Path(folder) / "open").exists():  # noqa: ASYNC110 (the test is another thread or process)
                await asyncio.sleep(0.01)
    finally:
        (Path(folder) / "cancelled").touch()
    return "let through"


def hold_the_lock(ctx: Context, seconds: float) -> int:
    """Hold the GIL, in a C function that does not release it."""
    ctypes.PyDLL(None).usleep(round(seconds * 1e6))
    return ctx.fence


def poison(ctx: Context, folder: str) -> None:
    """Kill the process that it runs in, as the out-of-memory killer does."""
    told(ctx, folder)
    os.kill(os.getpid(), signal.SIGKILL)


async def poison_here(ctx: Context, folder: str) -> None:
    """Kill the worker itself."""
    poison(ctx, folder)


def speak(ctx: Context, folder: str) -> str:
    """Report progress and log, then wait for the file ``open`` and log again."""
    ctx.progress(0.4, "fitting")
    ctx.log.info("fitted %d of %d", 4, 10)
    print("printed")  # noqa: T201 (the worker captures it)
    wait_deaf(ctx, folder)
    ctx.log.warning("that is all")
    return "let through"


def large(ctx: Context, size: int) -> str:
    return "x" * size


def forecast(ctx: Context, scenario: str, horizon_months: int = 24, region: str = "AU", sent_at: str = "") -> Any:
    return {"scenario": scenario, "objective": 0.83}


def publish_file(ctx: Context, folder: str, text: str) -> str:
    """Write an artifact, then wait for the file ``open-<fence>``."""
    ctx.artifact("report.txt").write_text(f"{text} {ctx.fence}")
    told(ctx, folder)
    deadline = time.monotonic() + PATIENCE
    while not (Path(folder) / f"open-{ctx.fence}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return f"{text} {ctx.fence}" + "." * 100


def register(app: App, **more: Any) -> App:
    """Register all models under their own names, with the options that most tests need, and ``more``."""
    for function in (add, add_apart, note, note_apart, flaky, hopeless, large, poison_here):
        app.model(function.__name__, **more)(function)
    app.model("decide", fatal=Hopeless, **more)(decide)
    app.model("forecast", exclude="sent_at", summary="scenario", isolation="thread", **more)(forecast)
    for function in (wait_deaf, await_deaf, hold_the_lock, poison, speak, publish_file):
        app.model(function.__name__, grace=0.3, **more)(function)
    for function in (wait_politely, await_politely):  # they end by themselves, however slow the machine is
        app.model(function.__name__, grace=PATIENCE, **more)(function)
    app.model("thread_politely", isolation="thread", grace=PATIENCE, **more)(wait_politely)
    app.model("thread_deaf", isolation="thread", grace=0.3, **more)(wait_deaf)
    return app
