"""What the processes of a scenario do: workers, submitters and callers. Each runs until SIGTERM.

Effects and acknowledgements are lines in append-only files, each written at once, which nothing of semel reads.
"""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Any

from sqlalchemy import Engine, ExceptionContext, event
from sqlalchemy.exc import DBAPIError

from semel import App, Client, Context, Once, Policy, SemelError, Worker, current_claim
from semel.db import database
from semel.runs.store import wait_for_database
from support.file_modes import respect_file_modes
from support.long_lived import collect_seldom

LEASE = 1.5
PAUSE = 0.05
"""Seconds that a run takes: workers wait more than they compute, so the machine's speed is not what is measured."""


CLIENT_THREADS = 16
REPEATED = 40
"""Submissions that a submitter repeats after it was killed: each must find its run."""

CALL = Policy(lease=30, wait=10)

ARTIFACT, COST = "fence.txt", 0.01
"""What a thorough attempt publishes: a file with its fence, and this cost for each fence."""
THOROUGH = "thorough"
"""While a file has this name, every other run is thorough, and waits without letting its worker do anything else;
otherwise one of fifty is thorough."""


def append(file: Path, *words: object) -> None:
    """Append a line in one write, which is whole even if the process is killed."""
    handle = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(handle, (" ".join(map(str, words)) + "\n").encode())
    os.close(handle)


def note(file: Path, *words: object) -> None:
    """Append a line that only shows that a fault struck; it is left out if the fault is that files cannot grow."""
    with suppress(OSError):
        append(file, *words)


def lines(file: Path) -> list[list[str]]:
    """The lines, each as its words."""
    return [line.split() for line in file.read_text().splitlines()] if file.exists() else []


def make_app(url: str, folder: Path, **options: Any) -> App:
    """The app of all processes: its model records its fence, and may write an artifact, a log line and a cost.

    Each of these names the fence, so that one can tell whose it is.
    """
    app = App(url, artifacts=folder / "artifacts", dedupe_window=0, **options)

    @app.model("work", lease=LEASE, max_lost=100, max_attempts=100, backoff=(0.05,))
    async def work(ctx: Context, number: int) -> dict[str, int]:
        deaf = number % 2 == 1 and (folder / THOROUGH).exists()
        if deaf:  # if it is stopped now, it goes on before the worker hears that the lease is lost
            append(folder / "begun", ctx.run_id, ctx.fence)
            time.sleep(PAUSE / 2)  # noqa: ASYNC251 -- nothing else may go on
        else:
            await asyncio.sleep(PAUSE)
        thorough = deaf or number % 50 == 7
        if thorough:
            ctx.artifact(ARTIFACT).write_text(str(ctx.fence))
            ctx.log.info("fence %d", ctx.fence)
            ctx.cost(COST * ctx.fence)
        append(folder / "effects", ctx.run_id, ctx.fence, int(thorough), clock_error())
        return {"number": number, "fence": ctx.fence}

    return app


def work(url: str, folder: Path, name: str) -> None:
    """A worker, which waits for its database as `semel worker` does."""
    log_to(folder)
    app = make_app(url, folder)
    wait_for_database(app.ledger(awaited=False), 60)
    options: dict[str, Any] = {"concurrency": 10, "processes": 0, "threads": 0, "poll": 0.3, "sweep_every": 0.3}
    Worker(app, name=name, wait_for_database=60, **options).run()


def log_to(folder: Path) -> None:
    """Log to a file, so that the table can be read; record every database error; respect file modes even as root."""
    collect_seldom()
    respect_file_modes()
    logging.basicConfig(filename=folder / "log", level=logging.WARNING)

    def record(error: BaseException | None) -> None:
        note(folder / "errors", os.getpid(), type(error).__name__, " ".join(str(error).split())[:300])

    def handled(context: ExceptionContext) -> None:
        record(context.original_exception)

    event.listen(Engine, "handle_error", handled)
    _record_hot_statements(record)


def _record_hot_statements(record: Callable[[BaseException | None], None]) -> None:
    """Record the errors of statements that are sent without SQLAlchemy, which it tells no listener."""
    raised = database._dbapi_errors

    @contextmanager
    def recorded(*arguments: Any) -> Iterator[None]:
        try:
            with raised(*arguments):
                yield
        except DBAPIError as error:
            record(error.orig)
            raise

    database._dbapi_errors = recorded


def clock_error() -> int:
    """The time of day less the monotonic clock: on one machine it is the same everywhere, unless a clock is wrong."""
    return round(time.time() - time.monotonic())


class Stopped:
    """True once SIGTERM came."""

    def __init__(self) -> None:
        self._stopped = False
        signal.signal(signal.SIGTERM, self.stop)

    def stop(self, *_: object) -> None:
        self._stopped = True

    def __bool__(self) -> bool:
        return self._stopped


def paced(rate: float, start: float, number: int = 0) -> Iterator[int]:
    """Numbers, due at this rate from ``start`` on (``time.monotonic``); a caller who is late gets them at once."""
    while True:
        time.sleep(max(0.0, start + number / rate - time.monotonic()))
        yield number
        number += 1


def submit(url: str, folder: Path, name: str, rate: float, start: float) -> None:
    """Submits with keys, over HTTP if the URL is a server's, and repeats each until it is acknowledged.

    One that was killed begins with the last that it had submitted; what is due does not depend on that. Over HTTP it
    has threads, as a web application does: while one waits for seconds before its next try, others go on.
    """
    log_to(folder)
    stopped = Stopped()
    target: App | Client = Client(url) if url.startswith("http") else make_app(url, folder)
    known = [int(key.rpartition("-")[2]) for key, _ in lines(folder / "acknowledged") if key.startswith(f"{name}-")]
    numbers, turn = paced(rate, start, max(0, max(known, default=0) - REPEATED)), Lock()

    def submit_in_turn() -> None:
        while not stopped:
            with turn:
                number = next(numbers)
            if stopped:
                return
            key = f"{name}-{number}"
            append(folder / "asked", key, clock_error())
            if (run := _acknowledged(target, folder, key, number, stopped)) is not None:
                append(folder / "acknowledged", key, run)

    threads = CLIENT_THREADS if isinstance(target, Client) else 1
    with ThreadPoolExecutor(threads) as pool:
        each = [pool.submit(submit_in_turn) for _ in range(threads)]
        wait(each, return_when=FIRST_EXCEPTION)
        stopped.stop()
    for thread in each:
        thread.result()


def _acknowledged(target: App | Client, folder: Path, key: str, number: int, stopped: Stopped) -> str | None:
    ends_at = float("inf")
    while time.monotonic() < ends_at:
        try:
            return str(target.submit("work", {"number": number}, idempotency_key=key, user="chaos").id)
        except (SemelError, OSError) as error:  # the store or the server is unavailable
            note(folder / "refused", key, type(error).__name__)
            if stopped:
                ends_at = min(ends_at, time.monotonic() + 20)
            time.sleep(0.05)
    return None


def call(url: str, folder: Path, name: str, rate: float) -> None:
    """Calls guarded work under keys that all callers share, and repeats each until it has its value."""
    log_to(folder)
    stopped = Stopped()
    once = Once(url, retry_for=5)
    for number in paced(rate, time.monotonic()):
        if stopped:
            once.close()
            return
        key = f"key-{number}"
        append(folder / "asked", key)
        while True:
            try:
                value = once.call(key, lambda key=key: _effect(folder, key), scope="chaos", policy=CALL)
            except SemelError:
                if stopped:
                    break
                time.sleep(0.05)
            else:
                append(folder / "acknowledged", key, value.value["fence"], name)
                break


def _effect(folder: Path, key: str) -> dict[str, int]:
    fence = current_claim().fence
    append(folder / "effects", key, fence)
    return {"fence": fence}
