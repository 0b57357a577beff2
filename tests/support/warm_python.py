"""Python programs in processes of their own that start fast: forked from a process that has done the usual imports.

    process = WarmPython([sys.executable, "-m", "semel.cli", "worker", "project:app"], cwd=folder, stderr=log)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0

It is used like `subprocess.Popen`, for ``-m module …`` and ``script …``. To import semel with its libraries takes a
second, and the tests start hundreds of programs. The process that forks has neither threads nor connections, so a
program starts as clean as a new Python. It ends without the freeing of every object, which takes longer than many a
program. How programs start from nothing, and end with nothing left, is tested in tests/cli and tests/docs.
"""

import array
import atexit
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple, NoReturn

from support.long_lived import collect_seldom

PRELOADED = (
    *("alembic.command", "alembic.config", "asyncpg", "granian.server.embed", "httpcore", "httpx", "jinja2"),
    *("litestar", "litestar.openapi", "psycopg", "redis.asyncio", "rich.console", "sqlite3", "structlog"),
    *("sqlalchemy.ext.asyncio", "sqlalchemy.dialects.postgresql.asyncpg", "sqlalchemy.dialects.postgresql.psycopg"),
    *("sqlalchemy.dialects.sqlite", "opentelemetry.trace"),
    *("semel.cli", "semel.api_types", "semel.client", "semel.runs.engine", "semel.runs.celery", "semel.runs.rq"),
    *("semel.db.asyncio", "semel.runs.job_store"),
    *("semel.runs.worker.session", "semel.once.stores.postgres", "semel.once.stores.redis"),
)
"""Nothing that reads its settings when it is imported, as prometheus_client does, and so not the service."""
EARLY = (
    *("LD_PRELOAD", "PYTHONHASHSEED", "PYTHONWARNINGS", "PYTHONDEVMODE", "PYTHONSAFEPATH", "PYTHONOPTIMIZE"),
    *("PYTHONFAULTHANDLER", "PYTHONASYNCIODEBUG"),
)
"""Variables that matter before the first import: a program that is given one starts as a new Python."""
MAIN = """
from support.warm_python import leave, serve
try:
    exec(serve(%d))
except SystemExit as end:
    leave(end.code)
leave(None)
"""


class Order(NamedTuple):
    """A program to start. Its standard streams, and a pipe for its exit status, are sent with it."""

    arguments: list[str]
    folder: str
    environment: dict[str, str]
    new_session: bool


class Forker:
    """The process that has done the imports, as its user sees it; one for each process of tests."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair()
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("SEMEL_")}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", MAIN % theirs.fileno()],
                pass_fds=[theirs.fileno()],
                env={**inherited, "PYTHONPATH": str(Path(__file__).parents[1])},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def start(self, order: Order, *fds: int) -> int:
        """Start a program; returns its process id."""
        content = pickle.dumps(order)
        with self._lock:
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
            self._socket.sendmsg([len(content).to_bytes(4, "big")], [rights])
            self._socket.sendall(content)
            return int.from_bytes(_receive(self._socket, 4), "big")


_forkers: dict[int, Forker] = {}


def _forker() -> Forker:
    if os.getpid() not in _forkers:
        _forkers[os.getpid()] = Forker()
    return _forkers[os.getpid()]


class WarmPython(subprocess.Popen[Any]):
    """A Python program; the options are those of ``Popen``, as far as tests need them."""

    def __init__(self, args: list[str], **options: Any) -> None:
        self._ended: int | None = None
        self._is_warm = not any(name in (options.get("env") or os.environ) for name in EARLY)
        super().__init__(args, **options)

    def _execute_child(self, args: list[str], *rest: Any) -> None:
        if not self._is_warm:
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        cwd, env, pipes, new_session = rest[4], rest[5], rest[9:15], rest[-2]
        assert not any(rest[:2]), "another executable or preexec_fn= is for a new Python"
        assert not rest[3], "pass_fds= is for a new Python"
        stdin, _, _, stdout, _, stderr = pipes
        words = [os.fspath(each) for each in args[1:]]
        order = Order(words, os.fspath(cwd or Path.cwd()), dict(os.environ if env is None else env), new_session)
        self._status, theirs = os.pipe()
        try:
            streams = [given if given != -1 else usual for usual, given in enumerate((stdin, stdout, stderr))]
            self.pid = _forker().start(order, *streams, theirs)
        finally:
            os.close(theirs)
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
        self._child_created = True

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        """Wait for the program as ``waitpid`` does; the process that forked it reports its exit status."""
        if not self._is_warm:
            result: tuple[int, int] = super()._try_wait(wait_flags)  # type: ignore[misc]
            return result
        if self._ended is None:
            ended = select.poll()  # select() takes no number above 1023
            ended.register(self._status, select.POLLIN)
            if wait_flags and not ended.poll(0):
                return 0, 0
            reported = os.read(self._status, 16)
            assert reported, "the process that forks programs has ended"
            self._ended = int(reported)
            os.close(self._status)
        return self.pid, self._ended

    def _internal_poll(self, _deadstate: int | None = None, *_: Any) -> int | None:
        if self._is_warm and self.returncode is None and self._waitpid_lock.acquire(False):  # type: ignore[attr-defined]
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid == self.pid:
                    self._handle_exitstatus(status)  # type: ignore[attr-defined]
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]
        if not self._is_warm:
            super()._internal_poll(_deadstate)  # type: ignore[misc]
        return self.returncode


def run(args: list[str], *, input: str | None = None, timeout: float | None = None, **options: Any) -> Any:  # noqa: A002
    """A program to its end, as ``subprocess.run`` with its output captured as text."""
    pipe = subprocess.PIPE
    stdin = subprocess.DEVNULL if input is None else pipe
    with WarmPython(args, stdin=stdin, stdout=pipe, stderr=pipe, text=True, **options) as process:
        try:
            output, errors = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(args, process.returncode, output, errors)


# -- in the process that forks ---------------------------------------------------------------------------------------


def serve(fd: int) -> CodeType:
    """Fork a process for each order. Returns in that process only, what it is to execute."""
    for name in PRELOADED:
        importlib.import_module(name)
    for name in [name for name in sys.modules if name.partition(".")[0] == "support"]:
        del sys.modules[name]
    own = [each for each in sys.path if each and Path(each) != Path(__file__).parents[1]]
    gc.collect()
    collect_seldom()
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    orders = socket.socket(fileno=fd)
    running: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([orders, woken], [], [])
        if woken in ready:
            with suppress(BlockingIOError):
                os.read(woken, 4096)
            _report(running)
        if orders in ready:
            head, fds, _, _ = socket.recv_fds(orders, 4, 4)
            if not head:
                os._exit(0)
            order: Order = pickle.loads(_receive(orders, int.from_bytes(head, "big")))
            pid = os.fork()
            if pid == 0:
                return _become(order, fds[:3], own, orders.detach())
            for each in fds[:3]:
                os.close(each)
            running[pid] = fds[3]


def leave(code: object) -> NoReturn:
    """End the program as Python does, up to where it would free its objects."""
    if code is not None and not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it, or the program has closed it
            stream.flush()
    os._exit((code or 0) & 0xFF)


def _report(running: dict[int, int]) -> None:
    """Pass on the exit status of each program that has ended."""
    for pid, status in list(running.items()):
        ended, how = os.waitpid(pid, os.WNOHANG)
        if ended == pid:
            with suppress(BrokenPipeError):  # nobody waits for it
                os.write(status, str(how).encode())
            os.close(status)
            del running[pid]


def _become(order: Order, streams: list[int], own_path: list[str], orders: int) -> CodeType:
    """Make this process what Python is before it executes the program."""
    for usual, given in enumerate(streams):
        os.dup2(given, usual)
    if order.new_session:
        os.setsid()
    os.write(orders, os.getpid().to_bytes(4, "big"))  # from now on it can be killed with its session
    os.closerange(3, 1024)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(order.environment)
    os.chdir(order.folder)
    time.tzset()
    sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in order.environment
    _open_streams(unbuffered="PYTHONUNBUFFERED" in order.environment)
    given_path = filter(None, order.environment.get("PYTHONPATH", "").split(os.pathsep))
    first, *rest = order.arguments
    sys.argv = order.arguments
    if first == "-m":
        sys.path[:] = [order.folder, *given_path, *own_path]
        sys.argv = order.arguments[1:]
        return compile(f"import runpy; runpy._run_module_as_main({rest[0]!r})", "<module>", "exec")
    sys.path[:] = [str(Path(first).resolve().parent), *given_path, *own_path]
    vars(sys.modules["__main__"])["__file__"] = first
    return compile(Path(first).read_bytes(), first, "exec")


def _open_streams(*, unbuffered: bool) -> None:
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)  # type: ignore[misc] # noqa: SIM115
    for fd, name, errors in ((1, "stdout", "strict"), (2, "stderr", "backslashreplace")):
        stream = open(fd, "w", encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115
        stream.reconfigure(line_buffering=fd == 2 or os.isatty(fd), write_through=unbuffered)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise EOFError("the process that forks programs has ended")
        data += more
    return data
