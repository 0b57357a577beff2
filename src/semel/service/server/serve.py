"""``semel serve``: the server's processes and a worker, under one supervisor."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from mmap import mmap
from struct import Struct

from semel._concurrency.sync import run_sync
from semel.db.database import parse
from semel.db.sqlite_file import FileReplaced, KnownFile, know
from semel.errors import InvalidRequest, SemelError, StoreBroken, StoreUnavailable
from semel.redaction import printable, without_secrets
from semel.runs.app import App, retention_by_environment
from semel.runs.store import wait_for_database
from semel.runs.worker import Worker
from semel.runs.worker.sweeper import sweep_until_signalled
from semel.service.auth import tokens
from semel.service.auth.loopback import is_loopback
from semel.service.server.granian import serve_requests
from semel.service.server.supervisor import UNFIT, Main, SupervisedProcess, Supervisor
from semel.service.settings import Settings
from semel.service.telemetry import logs
from semel.service.telemetry.metrics import mark_dead, run_metrics

_PLACES = frozenset({"SEMEL_DB", "SEMEL_ARTIFACTS", "SEMEL_TRANSPORT", "SEMEL_REDIS"})

_log = logging.getLogger("semel.serve")


def serve(settings: Settings, load: Callable[[str], App], announce: Callable[[str], None]) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code. ``load`` imports the app."""
    logs.set_up(settings)
    factory = ProcessFactory(settings, load)
    servers = [
        SupervisedProcess(f"server {number + 1}", factory.server, on_exit=mark_dead)
        for number in range(settings.processes)
    ]
    supervisor = Supervisor(settings.drain + 10)
    return supervisor.run(
        servers[0], [*servers[1:], *factory.worker_processes()], lambda: announce(_announcement(settings))
    )


class SharedFile:
    """The identity of the SQLite file that the first process opened: all other processes require the same file."""

    _FORMAT = Struct("QQ")

    def __init__(self) -> None:
        self._memory = mmap(-1, self._FORMAT.size)  # shared with forked processes
        self._known: KnownFile | None = None

    def remember(self, app: App) -> None:
        """Remember the app's file, unless one is remembered already."""
        if (file := _file_of(app)) and (known := know(file)) and not any(self._FORMAT.unpack(self._memory[:])):
            self._memory[:] = self._FORMAT.pack(*known.identity)

    def require(self, app: App) -> None:
        """Make the app refuse any other file."""
        device, inode = self._FORMAT.unpack(self._memory[:])
        if inode and (file := _file_of(app)):
            self._known = know(file, (device, inode))


def _file_of(app: App) -> str | None:
    url = parse(app.url)
    return url.database if url.get_backend_name() == "sqlite" else None


class ProcessFactory:
    """The main functions of the processes, each of which loads the app for itself."""

    def __init__(self, settings: Settings, load: Callable[[str], App]) -> None:
        self._settings = settings
        self._load = load
        self._file = SharedFile()

    def app(self) -> App:
        """The app, configured by the settings. Also exports them, for child processes that load the app themselves."""
        settings = self._settings
        app = self._load(settings.app).place(
            url=settings.db,
            artifacts=settings.artifacts,
            transport=settings.transport,
            redis=settings.redis,
            retention=retention_by_environment(),
        )
        os.environ |= {name: value for name, value in settings.environment().items() if name in _PLACES}
        self._file.require(app)
        return app

    def server(self, ready: Callable[[], None]) -> int:
        """Serve requests."""

        def begin(app: App) -> int:
            def ready_with_file() -> None:
                self._file.remember(app)
                ready()

            require_tokens_or_loopback(app, self._settings)
            return serve_requests(app, self._settings, ready_with_file)

        return self._exit_code(begin)

    def worker(self, ready: Callable[[], None]) -> int:
        """Execute runs; with RQ or Celery, whose own workers do that, only sweep."""

        def begin(app: App) -> int:
            app.hooks.add(run_metrics())
            ready()
            if app.transport.announces:
                _log.info("runs are executed by the RQ or Celery workers that you start; this process only sweeps")
                return sweep_until_signalled(app, every=5.0)
            settings = self._settings
            Worker(
                app,
                queues=settings.queues.split(","),
                concurrency=settings.concurrency,
                processes=settings.worker_processes,
                threads=settings.threads,
                drain=settings.drain,
            ).run()
            return 0

        return self._exit_code(begin)

    def _exit_code(self, begin: Callable[[App], int]) -> int:
        try:
            app = self.app()
            wait_for_database(app.ledger(awaited=False), self._settings.wait_for_database)
            return begin(app)
        except SemelError as error:
            message = printable(without_secrets(str(error)))
            print(f"semel: {message}", file=sys.stderr)  # noqa: T201 -- as every command does
            transient = isinstance(error, StoreUnavailable) and not isinstance(error, StoreBroken)
            return 1 if transient or isinstance(error, FileReplaced) else UNFIT

    def worker_processes(self) -> list[SupervisedProcess]:
        """The worker, unless the settings exclude it."""
        main: Main = self.worker
        return [SupervisedProcess("worker", main, on_exit=mark_dead)] if self._settings.worker else []


def require_tokens_or_loopback(app: App, settings: Settings) -> None:
    """Refuse to listen beyond this machine while there are no tokens: anybody could do anything."""
    if is_loopback(settings.host):
        return
    store = app.ledger(awaited=False)
    try:
        there = run_sync(store.read(tokens.any_there))
    finally:
        run_sync(store.close())
    if not there:
        raise InvalidRequest(
            f"there are no tokens yet, so the server refuses to listen on {settings.host}, where anyone could use it; "
            f"create one first: semel token create --user admin --role admin --db {_url_without_password(app)}"
        )


def _url_without_password(app: App) -> str:
    return app.ledger(awaited=False).url.render_as_string(hide_password=True)


def _announcement(settings: Settings) -> str:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"semel serves {settings.app} on http://{host}:{settings.port} (Ctrl-C ends it)"
