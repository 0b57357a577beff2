"""Runs on an empty database: apps, workers in threads or in processes of their own, and a manual worker."""

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypeVar

from sqlalchemy import Engine, create_engine, make_url, text

from semel import App, Run
from semel._concurrency.sync import run_sync
from semel.runs.store import RunStore, lease, transitions
from semel.runs.store.lease import Leased, LeaseRequest
from semel.runs.store.transitions import FinishRequest
from semel.runs.types import AttemptResult, EndKind
from semel.runs.worker import Worker
from semel.testing import FakeClock
from support.apps import worker_models
from support.warm_python import WarmPython

PATIENCE = 60
START = 1_709_210_096.0
"""2024-02-29 12:34:56 UTC."""
PROGRAM = Path(__file__).parent / "apps" / "worker_program.py"
EVENTS = {
    "an unsent event": """INSERT INTO semel_outbox (run_id, version, at_us, step, status, fence, unpublished, unsent)
VALUES (:id, 3, :now, 'succeeded', 'SUCCEEDED', 1, false, true)""",
    "a delivery that waits": """INSERT INTO semel_deliveries
  (run_id, subscription_id, version, state, attempts, due_us, body) VALUES (:id, 's', 3, 'waiting', 1, :now, '')""",
}
"""Statements that leave an event of a run with somebody who is still to hear of it."""

T = TypeVar("T")


class RunsHarness:
    """An empty database and a folder. Everything opened on it is closed when the test ends."""

    def __init__(self, kind: str, url: str, folder: Path) -> None:
        self.kind = kind
        self.url = url
        self.folder = folder
        self.clock = FakeClock(START)
        self._closing = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.close()

    def open(self, models: dict[str, Any] | None = None, **options: Any) -> App:
        """An app on this database, with the models of worker_models; ``models`` has more options for them."""
        app = App(self.url, **{"artifacts": self.folder / "artifacts", **options})
        self.closes(app)
        return worker_models.register(app, **models or {})

    def closes(self, app: App) -> None:
        """Close the app when the test ends."""
        self._closing.callback(app.close)

    def hand(self, app: App | None = None, name: str = "by-hand") -> "ManualWorker":
        """A manual worker; with the clock that the test sets, unless another app is given."""
        hand = ManualWorker(app or self.timeless, name)
        self._closing.callback(hand.close)
        return hand

    @cached_property
    def app(self) -> App:
        """An app with the database's clock."""
        return self.open()

    @cached_property
    def timeless(self) -> App:
        """An app with the clock that the test sets."""
        return self.open(clock=self.clock)

    def place(self, name: str) -> str:
        """A new folder through which a model and the test communicate."""
        (self.folder / name).mkdir()
        return str(self.folder / name)

    @cached_property
    def engine(self) -> Engine:
        """A plain SQLAlchemy engine on the database."""
        url = make_url(self.url)
        engine = create_engine(url.set(drivername="postgresql+psycopg") if self.kind == "postgres" else url)
        self._closing.callback(engine.dispose)
        return engine

    def sql(self, statement: str, **values: Any) -> Sequence[Any]:
        """Execute a statement; returns its rows, if it has any."""
        with self.engine.begin() as connection:
            answer = connection.execute(text(statement), values)
            return answer.all() if answer.returns_rows else []

    @contextmanager
    def working(self, app: App | None = None, **options: Any) -> Iterator[Worker]:
        """Run a worker in a thread until the end of the block, where it is stopped at once.

        By default it has no child processes: to start one takes longer than most tests.
        """
        worker = Worker(app or self.app, **{"processes": 0, "drain": 5.0, "poll": 0.2, **options})
        began: Future[asyncio.AbstractEventLoop] = Future()

        async def serve() -> None:
            began.set_result(asyncio.get_running_loop())
            await worker.serve()

        with ThreadPoolExecutor(1, "worker") as pool:
            served = pool.submit(asyncio.run, serve())
            loop = began.result(PATIENCE)
            try:
                yield worker
            finally:
                for _ in range(2):
                    in_loop(loop, worker.stop)
                served.result(PATIENCE)

    @contextmanager
    def program(self, **options: Any) -> Iterator["WorkerProcess"]:
        """Run a worker (worker_program.py) in a process of its own until the end of the block."""
        told = {"url": self.url, "artifacts": str(self.folder / "artifacts"), **options}
        process = WorkerProcess(told, self.folder)
        try:
            yield process
        finally:
            process.end()


def in_loop(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    """Call the function in the loop, unless the loop is closed."""
    try:
        loop.call_soon_threadsafe(call)
    except RuntimeError:
        assert loop.is_closed()


class WorkerProcess:
    """A worker in a process that can be killed."""

    def __init__(self, options: dict[str, Any], folder: Path) -> None:
        self._log = folder / f"worker-{time.monotonic_ns()}.log"
        with self._log.open("w") as log:
            self.popen = WarmPython(
                [sys.executable, str(PROGRAM), json.dumps(options)],
                env={**os.environ, "PYTHONPATH": str(PROGRAM.parents[2])},
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )

    def send(self, number: int) -> None:
        self.popen.send_signal(number)

    def wait(self) -> int:
        """Wait for its end; returns its exit code."""
        return self.popen.wait(PATIENCE)

    def end(self) -> None:
        self.popen.kill()
        self.popen.wait(PATIENCE)

    @property
    def log(self) -> str:
        return self._log.read_text()


def effects(folder: str) -> list[list[str]]:
    """The run id, fence, attempt and process of each execution, as the models have recorded them."""
    file = Path(folder) / "effects"
    return [line.split() for line in file.read_text().splitlines()] if file.exists() else []


def touch(folder: str, name: str = "open") -> None:
    (Path(folder) / name).touch()


def in_threads(*work: Callable[[], T]) -> list[T]:
    """Call all functions at the same time, each in a thread; returns their results."""
    barrier = threading.Barrier(len(work))

    def start(each: Callable[[], T]) -> T:
        barrier.wait(PATIENCE)
        return each()

    with ThreadPoolExecutor(len(work)) as pool:
        return list(pool.map(start, work))


class ManualWorker:
    """A worker controlled by the test, which calls its functions on the store one by one."""

    def __init__(self, app: App, name: str = "by-hand") -> None:
        self.name = name
        self.ledger: RunStore = app.ledger(awaited=False)
        self._models = app.registry.names

    def lease(self, most: int = 1, queues: tuple[str, ...] = ("default",)) -> list[Leased]:
        self.do(self.ledger.write(lease.wake, self.ledger.statement_context))
        return self.do(
            self.ledger.write(
                lease.lease, LeaseRequest(self.name, queues, self._models, most), self.ledger.statement_context
            )
        )

    def lease_this(self, run: Run) -> Leased | None:
        leased = self.do(self.ledger.write(lease.lease_these, self.name, [run.id], self.ledger.statement_context))
        return leased[0] if leased else None

    def end(self, leased: Leased, kind: EndKind = "succeeded", *, delay: float = 0, **told: Any) -> bool:
        """End the attempt; returns False if the lease was lost before."""
        if kind == "succeeded":
            told = {"result": "1", "result_digest": "6b86b273ff34fce1", "result_size": 1, **told}
        returned = told.pop("returned", False)
        ending = FinishRequest(
            leased.id, leased.fence, AttemptResult(kind=kind, **told), round(delay * 1e6), returned=returned
        )
        return leased.id in self.do(self.ledger.write(transitions.end, [ending], self.ledger.statement_context))

    def do(self, verb: Coroutine[Any, Any, T]) -> T:
        return run_sync(verb)

    def close(self) -> None:
        self.do(self.ledger.close())
