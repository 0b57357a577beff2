"""``semel serve``: the server's processes, and a worker beside them."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from mmap import mmap
from struct import Struct

from semel._concurrency.sync import run_sync
from semel.db import blocking
from semel.db.sqlite_file import FileReplaced, KnownFile, know
from semel.errors import InvalidRequest, SemelError, StoreBroken, StoreUnavailable
from semel.redaction import printable, without_secrets
from semel.runs.app import App
from semel.runs.store import wait_for_database
from semel.runs.worker import Worker
from semel.runs.worker.sweeper import sweep_until_told
from semel.service.auth import tokens
from semel.service.auth.loopback import is_loopback
from semel.service.server.granian import answer
from semel.service.server.supervisor import UNFIT, Main, SupervisedProcess, Supervisor
from semel.service.settings import Settings
from semel.service.telemetry import logs
from semel.service.telemetry.metrics import forget, run_metrics

_PLACES = frozenset({"SEMEL_DB", "SEMEL_ARTIFACTS", "SEMEL_TRANSPORT", "SEMEL_REDIS"})

_log = logging.getLogger("semel.serve")


def serve(settings: Settings, load: Callable[[str], App], say: Callable[[str], None]) -> int:
    """Serve until SIGTERM or SIGINT; answers the exit code. ``load`` gets the app from its place."""
    logs.set_up(settings)
    place = ProcessFactory(settings, load)
    servers = [
        SupervisedProcess(f"server {number + 1}", place.server, ended=forget) for number in range(settings.processes)
    ]
    supervisor = Supervisor(settings.drain + 10)
    return supervisor.run(servers[0], [*servers[1:], *place.beside()], lambda: say(_announcement(settings)))


class SharedFile:
    """Which SQLite file the first process found: all others, and those that are started anew, insist on it."""

    _FORM = Struct("QQ")

    def __init__(self) -> None:
        self._memory = mmap(-1, self._FORM.size)  # shared with all processes that are forked from here
        self._known: KnownFile | None = None

    def remember(self, app: App) -> None:
        """The database is open; what is known already stays."""
        if (file := _file_of(app)) and (known := know(file)) and not any(self._FORM.unpack(self._memory[:])):
            self._memory[:] = self._FORM.pack(*known.identity)

    def insist(self, app: App) -> None:
        """No process of this server may use another file."""
        device, inode = self._FORM.unpack(self._memory[:])
        if inode and (file := _file_of(app)):
            self._known = know(file, (device, inode))


def _file_of(app: App) -> str | None:
    url = blocking.parse(app.url)
    return url.database if url.get_backend_name() == "sqlite" else None


class ProcessFactory:
    """What the processes do, each with an app of its own."""

    def __init__(self, settings: Settings, load: Callable[[str], App]) -> None:
        self._settings = settings
        self._load = load
        self._file = SharedFile()

    def app(self) -> App:
        """The app where the settings want it; and if it reads them itself, as in a model's process, there, too."""
        settings = self._settings
        app = self._load(settings.app).place(
            url=settings.db, artifacts=settings.artifacts, transport=settings.transport, redis=settings.redis
        )
        os.environ |= {name: value for name, value in settings.environment().items() if name in _PLACES}
        self._file.insist(app)
        return app

    def server(self, ready: Callable[[], None]) -> int:
        """Answer requests."""

        def begin(app: App) -> int:
            def well() -> None:
                self._file.remember(app)
                ready()

            require_tokens_or_loopback(app, self._settings)
            return answer(app, self._settings, well)

        return self._fit(begin)

    def worker(self, ready: Callable[[], None]) -> int:
        """Work on runs, or only look after them where RQ's or Celery's workers do the work."""

        def begin(app: App) -> int:
            app.news.hear(run_metrics())
            ready()
            if app.transport.announces:
                _log.info("runs are worked on by RQ's or Celery's own workers, which you start; here only the sweeper")
                return sweep_until_told(app, every=5.0)
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

        return self._fit(begin)

    def _fit(self, begin: Callable[[App], int]) -> int:
        try:
            app = self.app()
            wait_for_database(app.ledger(awaited=False), self._settings.wait_for_database)
            return begin(app)
        except SemelError as error:
            said = printable(without_secrets(str(error)))
            print(f"semel: {said}", file=sys.stderr)  # noqa: T201 -- as every command says why it failed
            later = isinstance(error, StoreUnavailable) and not isinstance(error, StoreBroken)
            return 1 if later or isinstance(error, FileReplaced) else UNFIT

    def beside(self) -> list[SupervisedProcess]:
        """The worker, where there is to be one."""
        main: Main = self.worker
        return [SupervisedProcess("worker", main, ended=forget)] if self._settings.worker else []


def require_tokens_or_loopback(app: App, settings: Settings) -> None:
    """Without tokens anybody who reaches the port could do anything: then only this machine may."""
    if is_loopback(settings.host):
        return
    store = app.ledger(awaited=False)
    try:
        there = run_sync(store.read(tokens.any_there))
    finally:
        run_sync(store.close())
    if not there:
        raise InvalidRequest(
            f"there are no tokens yet, so the server does not listen on {settings.host}, where others could reach it; "
            f"make one first: semel token create --user admin --role admin --db {_shown(app)}"
        )


def _shown(app: App) -> str:
    """The database's URL without its password."""
    return app.ledger(awaited=False).url.render_as_string(hide_password=True)


def _announcement(settings: Settings) -> str:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"semel serves {settings.app} on http://{host}:{settings.port} (Ctrl-C ends it)"
