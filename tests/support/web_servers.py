"""Real web servers for tests: uvicorn, granian and gunicorn, each in processes of its own on a port of the loopback.

    with web_server("uvicorn", "support.apps.http_asgi:app", workers=4, env={"STORE": url}) as server:
        httpx.get(server.url)
        server.kill_worker()
        server.stop()  # SIGTERM, and everything has ended
        server.start()  # again, on the same port

The app is imported from this directory, or from PYTHONPATH in `env`. At the end of the block the server is shut down,
or killed if the test failed; it also ends with this process, however that ends (server_process.py does that).
"""

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from support.servers import Process, ServerError, free_port

PATIENCE = 60
HERE = Path(__file__).parents[1]

LEAD = """
import json, os, sys
pid_file, environment, argv = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3:]
os.setsid()  # all its processes can be told by their session
with open(pid_file + ".new", "w") as file:
    file.write(str(os.getpid()))
os.replace(pid_file + ".new", pid_file)
os.execve(argv[0], argv, {**os.environ, **environment})
"""

COMMANDS: dict[str, list[str]] = {
    "uvicorn": [
        *("uvicorn", "--host", "127.0.0.1", "--port", "{port}", "--workers", "{workers}", "--no-access-log"),
        # On a busy machine a worker may be silent for its five seconds. Much more would be too long: if a worker is
        # killed while it is asked, uvicorn waits for its answer all the time, and replaces no other.
        *("--timeout-worker-healthcheck", "30"),
    ],
    "granian": [
        *("granian", "--interface", "asgi", "--host", "127.0.0.1", "--port", "{port}", "--workers", "{workers}"),
        *("--respawn-failed-workers", "--respawn-interval", "0.1"),
    ],
    "gunicorn": ["gunicorn", "--bind", "127.0.0.1:{port}", "--workers", "{workers}", "--no-control-socket"],
}
WORKER_STARTED = {
    "uvicorn": r"Application startup complete|'lifespan' protocol appears unsupported",
    "granian": r"Started worker-\d",
    "gunicorn": r"Booting worker with pid",
}


class WebServer:
    """One server; `url` has no trailing slash."""

    def __init__(
        self, process: Process, kind: str, app: str, *, workers: int, env: Mapping[str, str], options: Sequence[str]
    ) -> None:
        self.kind = kind
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.workers = workers
        self._process = process
        self._pid_file = process.directory / "pid"
        program, *settings = (word.format(port=self.port, workers=workers) for word in COMMANDS[kind])
        path = os.pathsep.join(filter(None, (env.get("PYTHONPATH"), str(HERE), os.environ.get("PYTHONPATH"))))
        surroundings = {"PYTHONUNBUFFERED": "1", **env, "PYTHONPATH": path}
        server = [sys.executable, "-m", program, *settings, *options, app]
        self._argv = [sys.executable, "-I", "-S", "-c", LEAD, str(self._pid_file), json.dumps(surroundings), *server]
        self._seen = 0

    def start(self) -> None:
        """Start it, and wait until every worker has started and one has responded."""
        self._pid_file.unlink(missing_ok=True)
        self._seen = len(self.log())
        self._process.start(*self._argv)
        self._process.wait_until(self._answers, OSError, HTTPException)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send the signal, and wait until all of its processes have ended; SIGTERM lets it finish active requests."""
        self.signal(number)
        self.wait_until_gone()

    def kill(self) -> None:
        """Kill all of its processes at once, as a power cut would."""
        self._until(self._killed, "die")

    def _killed(self) -> bool:
        remaining = self._session()
        for pid in remaining:
            _kill(pid)
        return not remaining

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the main process, without waiting."""
        os.kill(self.pid, number)

    def wait_until_gone(self) -> None:
        """Wait until all of its processes have ended."""
        self._until(lambda: not self._session(), "end")

    @property
    def pid(self) -> int:
        """The id of the main process."""
        return int(self._pid_file.read_text())

    @property
    def pids(self) -> list[int]:
        """The ids of the processes that handle requests; uvicorn with one worker is its own worker."""
        if self.kind == "uvicorn" and self.workers == 1:
            return [pid for pid in self._session() if pid == self.pid]
        return [pid for pid in self._session() if _parent(pid) == self.pid and "resource_tracker" not in _command(pid)]

    def kill_worker(self, pid: int | None = None) -> int:
        """Kill a worker, and wait for its end; returns its id. The server starts another, if it has a main process.

        With one worker, uvicorn itself ends: call `start`.
        """
        victim = self.pids[0] if pid is None else pid
        _kill(victim)
        self._until(lambda: victim not in self._session(), "die")
        return victim

    def memory(self) -> int:
        """The memory that its workers use now, in bytes."""
        return sum(_kilobytes(pid, "VmRSS") for pid in self.pids) * 1024

    def most_memory(self) -> int:
        """The most memory that its workers have used since they started, or since `forget_most_memory`, in bytes."""
        return sum(_kilobytes(pid, "VmHWM") for pid in self.pids) * 1024

    def forget_most_memory(self) -> None:
        for pid in self.pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5")

    def log(self) -> str:
        """Its whole output."""
        return (self._process.directory / "log").read_text(errors="replace")

    def _answers(self) -> bool:
        if len(re.findall(WORKER_STARTED[self.kind], self.log()[self._seen :])) < self.workers:
            return False
        connection = HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            connection.request("GET", "/", headers={"Connection": "close"})
            return connection.getresponse().status > 0
        finally:
            connection.close()

    def _session(self) -> list[int]:
        """The ids of its processes that are alive."""
        if not self._pid_file.exists():
            return []
        leader = self.pid
        return [pid for pid, state, session in _processes() if session == leader and state not in "ZX"]

    def _until(self, reached: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not reached():
            if time.monotonic() > deadline:
                raise ServerError(f"{self.kind} did not {what}:\n{self._process.log()}")
            time.sleep(0.005)  # only a parent is notified when a process ends, and not all of these are our children


@contextmanager
def web_server(
    kind: str, app: str, *, workers: int = 1, env: Mapping[str, str] | None = None, options: Sequence[str] = ()
) -> Iterator[WebServer]:
    """A server of the kind (uvicorn, granian or gunicorn) that runs the app, given as `module:name`.

    Raises ServerError, with the server's output, if the server does not start.
    """
    with Process(last_signal=signal.SIGTERM) as process:
        server = WebServer(process, kind, app, workers=workers, env=env or {}, options=options)
        try:
            server.start()
            yield server
            if server.pids:
                server.stop()
        finally:
            server.kill()


def lives(pid: int) -> bool:
    """Whether the process is alive; a zombie is not."""
    return _status(pid).get("State", "X")[0] not in "ZX"


def _processes() -> Iterator[tuple[int, str, int]]:
    """The id, state and session of every process."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended meanwhile
            yield int(entry.name), fields[0], int(fields[3])


def _parent(pid: int) -> int:
    return int(_status(pid).get("PPid", "0"))


def _kilobytes(pid: int, name: str) -> int:
    return int(_status(pid).get(name, "0").removesuffix("kB"))


def _status(pid: int) -> dict[str, str]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}  # it has ended
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""  # it has ended


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
