"""Tests of the transports: an app in this process, and stock worker processes that import the same app."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Self

from celery import Celery
from redis import Redis
from rq import Queue, Worker
from rq.registry import FailedJobRegistry, StartedJobRegistry

from semel.runs.app import App
from semel.runs.celery import CeleryTransport
from semel.runs.rq import RqTransport
from semel.runs.types import Run
from support.warm_python import WarmPython

PATIENCE = 120
"""Seconds; on a busy machine a stock worker starts slowly."""

PROGRAM, VARIABLE = "transport_app", "SEMEL_TRANSPORT_APP"
APPS = Path(__file__).parent / "apps"
sys.path.append(str(APPS))  # the app's module has the same name here as for the workers


def until(happens: Callable[[], Any], what: str = "what was waited for") -> Any:
    """Poll until the condition is true; other processes send no signal."""
    deadline = time.monotonic() + PATIENCE
    while not (answer := happens()):
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(0.02)
    return answer


class Ground:
    """The settings of an app, the app in this process, and the workers started for it."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.settings = {"folder": str(folder), "sweep_every": 0.3, "tell_again": 1.0, **settings}
        self._workers: list[subprocess.Popen[bytes]] = []
        self._module: ModuleType | None = None

    def __enter__(self) -> Self:
        self._before = os.environ.get(VARIABLE), sys.modules.pop(PROGRAM, None)
        os.environ[VARIABLE] = json.dumps(self.settings)
        self._module = importlib.import_module(PROGRAM)
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            self.end(worker)
        for app in self.module.apps.values():
            app.close()
        del os.environ[VARIABLE], sys.modules[PROGRAM]
        settings, module = self._before
        if settings is not None and module is not None:
            os.environ[VARIABLE], sys.modules[PROGRAM] = settings, module

    @property
    def module(self) -> ModuleType:
        assert self._module is not None
        return self._module

    def app(self, kind: str) -> App:
        app: App = self.module.apps[kind]
        return app

    def start(self, command: str, *words: str) -> subprocess.Popen[bytes]:
        """Start a command of an installed package in the folder, as in a project's."""
        program = self.folder / f"{PROGRAM}.py"
        if not program.exists():
            program.symlink_to(APPS / program.name)
        with (self.folder / "output").open("ab") as output:
            worker = WarmPython(
                [sys.executable, str(Path(sys.executable).with_name(command)), *words],
                env={**os.environ, VARIABLE: json.dumps(self.settings)},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._workers.append(worker)
        return worker

    def end(self, worker: subprocess.Popen[bytes]) -> None:
        """End the worker and its forked processes; kill those that do not end in time."""
        if worker.poll() is None:
            worker.send_signal(signal.SIGTERM)
            try:
                worker.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(worker.pid, signal.SIGKILL)
                worker.wait()

    def wait_ended(self, app: App, run: Run) -> Run:
        """The run, once it has ended."""
        try:
            return app.wait(run.id, timeout=PATIENCE)
        except TimeoutError as error:
            raise AssertionError(self.output()[-8000:]) from error

    def output(self) -> str:
        file = self.folder / "output"
        return file.read_text(errors="replace") if file.exists() else ""

    def notes(self, run_id: str, what: str = "done") -> list[tuple[int, int, int]]:
        """The attempt, fence and process of each such note of this run's model."""
        file = self.folder / "notes"
        lines = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
        return [(int(n[2]), int(n[3]), int(n[4])) for n in lines if n[:2] == [run_id, what]]


class Rq:
    """RQ: its workers, and its queues in Redis."""

    name = "rq"
    transport = RqTransport

    @staticmethod
    def start(ground: Ground, *options: str, queue: str = "semel") -> subprocess.Popen[bytes]:
        return ground.start("rq", "worker", "--url", ground.settings["redis"], *options, queue)

    def start_all(self, ground: Ground) -> None:
        for _ in range(2):
            self.start(ground, "-c", PROGRAM)

    @staticmethod
    def queue(ground: Ground, name: str = "semel") -> Queue:
        return Queue(name, connection=Redis.from_url(ground.settings["redis"]))

    def count(self, ground: Ground, name: str = "semel") -> int:
        return self.queue(ground, name).count

    def empty(self, ground: Ground, name: str = "semel") -> None:
        self.queue(ground, name).empty()

    def at_rest(self, ground: Ground) -> bool:
        """Whether every message has been processed; fails if one has failed."""
        queue = self.queue(ground)
        assert FailedJobRegistry(queue=queue).get_job_ids() == []
        return not queue.count and not StartedJobRegistry(queue=queue).get_job_ids(cleanup=False)

    def consume(self, ground: Ground, queue: str) -> None:
        """Process the messages of another queue."""
        options = ("--burst", "--worker-class", "rq.SimpleWorker")
        assert self.start(ground, *options, queue=queue).wait(PATIENCE) == 0, ground.output()

    @staticmethod
    def shuts_down(ground: Ground) -> bool:
        """Whether a worker was asked to shut down."""
        redis = Redis.from_url(ground.settings["redis"])
        return any(worker.shutdown_requested_date for worker in Worker.all(redis))


class InCelery:
    """Celery on Redis: its workers, and its queues.

    ``-A semel.runs.celery`` is for apps that only have a broker, ``-A`` with the project for apps installed in one.
    """

    transport = CeleryTransport

    def __init__(self, name: str = "celery") -> None:
        self.name = name

    def start(self, ground: Ground, *options: str) -> subprocess.Popen[bytes]:
        generic = ["semel.runs.celery", "-b", ground.settings["redis"]]
        where = generic if self.name == "celery" else ["transport_app:celery_app"]
        quiet = ("--without-gossip", "--without-mingle", "--loglevel", "INFO")
        return ground.start("celery", "-A", *where, "worker", "-Q", "semel", *quiet, *options)

    def start_all(self, ground: Ground) -> None:
        self.start(ground, "-c", "2", "-P", "prefork" if self.name == "celery" else "threads")

    @staticmethod
    def redis(ground: Ground) -> Redis:
        return Redis.from_url(ground.settings["redis"])

    def count(self, ground: Ground, name: str = "semel") -> int:
        return int(self.redis(ground).llen(name))

    def empty(self, ground: Ground, name: str = "semel") -> None:
        self.redis(ground).delete(name)

    def at_rest(self, ground: Ground) -> bool:
        """Whether no message is waiting or being processed."""
        return not self.count(ground) and not self.redis(ground).hlen("unacked")

    @staticmethod
    def consume(ground: Ground, queue: str) -> None:
        Celery(broker=ground.settings["redis"], set_as_current=False).control.add_consumer(queue)

    @staticmethod
    def shuts_down(ground: Ground) -> bool:
        return "Warm shutdown" in ground.output()


Broker = Rq | InCelery
BROKERS: dict[str, Broker] = {"rq": Rq(), "celery": InCelery(), "installed": InCelery("installed")}


def rq_worker(ground: Ground) -> subprocess.Popen[bytes]:
    """A stock worker of RQ for semel's queue."""
    return ground.start("rq", "worker", "--url", ground.settings["redis"], "-c", "transport_app", "semel")


def celery_worker(ground: Ground) -> subprocess.Popen[bytes]:
    """A stock worker of Celery for semel's queue."""
    where = ("-A", "semel.runs.celery", "-b", ground.settings["redis"])
    return ground.start("celery", *where, "worker", "-Q", "semel", "-c", "1", "--without-gossip", "--without-mingle")
