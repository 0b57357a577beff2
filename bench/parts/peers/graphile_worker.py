"""graphile-worker on Node, if Node is installed."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import psycopg
from sqlalchemy import make_url

from peers.peer import Absent, Peer
from peers.watch import LIMIT

HERE = Path(__file__).parent / "graphile"
BULK = 20_000


class GraphileWorker(Peer):
    """One worker with the settings of its page on performance: 24 jobs at once, 25 connections, a local queue of 500.

    Completions are batched, with the best of three delays in milliseconds. Successful jobs are not logged; it always
    deletes them. Bulk: `addJobs`, 20,000 jobs a call.
    """

    name = "graphile-worker"
    jobs = 60_000
    singles = 3000
    many = 60_000
    choices = (0, 20, 100)

    def prepare(self, postgres_url: str, redis_url: str) -> None:
        del redis_url
        self._url = postgres_url
        self._folder = installed()
        self._measure("migrate", 0, 0)

    def enqueue_many(self, count: int) -> float:
        return self._measure("many", count, BULK)

    async def enqueue_from_tasks(self, count: int, tasks: int = 64) -> float:
        return await asyncio.to_thread(self._measure, "singles", count, tasks)

    def drain(self, count: int) -> float:
        return self._measure("drain", count, self.choice)

    def clear(self) -> None:
        with psycopg.connect(self._url, autocommit=True) as connection:
            connection.execute("TRUNCATE graphile_worker._private_jobs")

    def _measure(self, what: str, count: int, how: int) -> float:
        settings = {**database(self._url), "PEERS_LIMIT": str(LIMIT), "NO_LOG_SUCCESS": "1"}
        command = ["node", str(HERE / "measure.cjs"), what, str(count), str(how)]
        done = run(command, self._folder, settings, LIMIT + 10)
        if done.returncode != 0:
            raise RuntimeError(f"graphile-worker: {done.stderr[-500:]}")
        seconds: float = json.loads(done.stdout)
        return seconds


def run(command: list[str], folder: Path, settings: dict[str, str], limit: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **settings},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )


def database(address: str) -> dict[str, str]:
    """The environment variables of the database for Node's driver."""
    url = make_url(address)
    parts = {
        "PGHOST": url.host or url.query.get("host"),
        "PGPORT": url.port or url.query.get("port"),
        "PGUSER": url.username,
        "PGPASSWORD": url.password,
        "PGDATABASE": url.database,
    }
    return {name: str(part) for name, part in parts.items() if part is not None}


def installed() -> Path:
    """The folder in the user's cache with the packages of the lock file, which npm installs if they are missing."""
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            raise Absent(f"there is no {program} here")
    lock = (HERE / "package-lock.json").read_bytes()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "semel-bench"
    folder = cache / f"graphile-{hashlib.sha256(lock).hexdigest()[:16]}"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="new-", dir=cache) as unfinished:
            install(Path(unfinished) / "graphile", folder)
    return folder


def install(unfinished: Path, folder: Path) -> None:
    unfinished.mkdir()
    for name in ("package.json", "package-lock.json"):
        shutil.copy(HERE / name, unfinished)
    options = ["--ignore-scripts", "--no-audit", "--no-fund", "--fetch-retries=1", "--fetch-retry-mintimeout=1000"]
    try:
        done = run(["npm", "ci", *options], unfinished, {}, 180)
    except subprocess.TimeoutExpired:
        raise Absent("npm could not install it in 180 seconds") from None
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if "error" in line]
        raise Absent(f"npm could not install it: {' '.join(said[:2]) or done.stderr[-200:]}")
    unfinished.rename(folder)
