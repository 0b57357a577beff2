"""Celery on Redis."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from celery import Celery as App

from peers.peer import Peer
from peers.watch import LIMIT, blocking, end_in_time, from_tasks

PREFETCH = 128


def app_on(broker: str, times: str = os.devnull) -> App:
    """An app whose only task writes the time of its call to a file: any of the worker's processes may run it."""
    app = App("peers", broker=broker)
    app.conf.task_ignore_result = True
    app.conf.worker_prefetch_multiplier = PREFETCH
    app.conf.worker_enable_remote_control = False
    file = os.open(times, os.O_WRONLY | os.O_APPEND)

    @app.task(name="noop", shared=False)
    def noop() -> None:
        os.write(file, struct.pack("d", time.monotonic()))

    return app


if "PEERS_BROKER" in os.environ:  # in the worker
    end_in_time()
    app = app_on(os.environ["PEERS_BROKER"], os.environ["PEERS_TIMES"])


class Celery(Peer):
    """One stock worker with the pool that is the fastest here; no results, no events, no gossip; a large prefetch.

    Its guide to optimizing recommends to prefetch 64 or 128 short tasks. Messages are acknowledged before the call, by
    default, so a drain ends with the last call. It has no bulk call: jobs are sent one after the other through one
    producer.
    """

    name = "Celery"
    jobs = 2400
    singles = 3000
    many = 3000
    choices = (("solo", 1), ("threads", 2), ("prefork", 1), ("prefork", 2))

    def prepare(self, postgres_url: str, redis_url: str) -> None:
        del postgres_url
        self._url = redis_url
        self._app = app_on(redis_url)
        self._noop = self._app.tasks["noop"]
        self._noop.delay()  # opens the connections
        self.clear()

    def enqueue_many(self, count: int) -> float:
        with self._app.producer_pool.acquire(block=True) as producer:
            start = time.perf_counter()
            for _ in range(count):
                self._noop.apply_async(producer=producer)
            return time.perf_counter() - start

    async def enqueue_from_tasks(self, count: int, tasks: int = 64) -> float:
        return await from_tasks(blocking(self._noop.delay), count, tasks)

    def drain(self, count: int) -> float:
        with tempfile.TemporaryDirectory(prefix="semel-bench-") as folder:
            times = Path(folder) / "times"
            times.touch()
            worker = self._worker(times)
            try:
                wait_for_size(times, 8 * count, worker)
            finally:
                end(worker)
            called = struct.unpack(f"{count}d", times.read_bytes())
        return max(called) - min(called)

    def _worker(self, times: Path) -> subprocess.Popen[bytes]:
        pool, concurrency = self.choice
        command = [sys.executable, "-P", "-m", "celery", "-A", "peers.celery", "worker", "--loglevel=ERROR"]
        options = [f"--pool={pool}", f"--concurrency={concurrency}", "--without-gossip", "--without-mingle"]
        settings = {
            "PYTHONPATH": str(Path(__file__).parents[1]),
            "PYTHONWARNINGS": "ignore",  # it warns about root, which is common in containers
            "PEERS_BROKER": self._url,
            "PEERS_TIMES": str(times),
        }
        return subprocess.Popen(
            [*command, *options, "--without-heartbeat"],
            env=os.environ | settings,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def clear(self) -> None:
        self._app.control.purge()

    def close(self) -> None:
        self.clear()
        self._app.close()


def wait_for_size(file: Path, size: int, worker: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + LIMIT
    while file.stat().st_size < size:
        if worker.poll() is not None:
            raise RuntimeError("Celery's worker ended before the jobs did")
        if time.monotonic() > deadline:
            raise TimeoutError(f"not all jobs were run in {LIMIT} seconds")
        time.sleep(0.02)  # there is no signal for a file's size


def end(worker: subprocess.Popen[bytes]) -> None:
    worker.terminate()
    try:
        worker.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()
