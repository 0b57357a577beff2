"""What transports over a message broker share: announcing runs, finding the app in a worker, performing one run.

The database is the only truth. A message only names a run and where its app is made: one that is lost, duplicated, late
or for a finished run changes nothing. The process that submits also sweeps: it announces runs that became due later,
and announces again those that still wait although they are due.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from types import FrameType

from msgspec import Struct

import semel.runs.worker.session  # noqa: F401 -- every run needs it, and a worker imports this module before it forks
from semel._concurrency.fork import survive_fork
from semel._concurrency.retry import Outage
from semel._concurrency.sync import run_sync
from semel.db.database import abandoned_connections, parse
from semel.errors import AppNotFound, SemelError
from semel.runs.app import App, apps
from semel.runs.models.model import MAIN, load
from semel.runs.store import RunStore, maintenance, queries
from semel.runs.transports import Transport
from semel.runs.types import checked_id, new_id
from semel.runs.worker import Worker
from semel.runs.worker.sweeper import ROLE, Sweeper

SWEEP_EVERY = 5.0
TELL_AGAIN = 30.0
BROKER_COOLDOWN = 3.0
"""Seconds for which submitters do not try a broker that was unavailable, so that not every one of them waits for it."""
MOST_MISSED = 10_000
"""How many runs a process announces by itself when the broker is available again; the sweeper finds the others."""

_log = logging.getLogger("semel.transport")


def queue_name(queue: str) -> str:
    """The broker's name of a queue of runs: ``semel`` for the default one, ``semel-gpu`` for ``gpu``."""
    return "semel" if queue == "default" else f"semel-{queue}"


class AppLocation(Struct, frozen=True):
    """Where another process finds an app. It travels in messages, so it holds no secret."""

    references: list[tuple[str, str | None]]
    """``module:name`` and, for a program's main file, its path: what to import to make the app."""
    digest: str
    """Identifies the app's database."""


def location_of(app: App, made_in: str = "") -> AppLocation:
    """The app's name in a module, preferably the one that made it; else the modules of its models."""
    return AppLocation(_named(app, made_in) or _modelled(app), _digest(app))


def _modelled(app: App) -> list[tuple[str, str | None]]:
    """One model of every module that has models."""
    modules: dict[str, tuple[str, str | None]] = {}
    for model in app.registry:
        if model.reference:
            modules.setdefault(model.reference.partition(":")[0], (model.reference, model.main_path))
    return list(modules.values())


def _named(app: App, made_in: str) -> list[tuple[str, str | None]]:
    named: dict[str, str] = {}
    for module in list(sys.modules):
        scope = getattr(sys.modules.get(module), "__dict__", {})
        for name, value in list(scope.items()):
            if value is app:
                named.setdefault(module, name)
    for module in (made_in, *reversed(named)):  # a module is listed before those that it imports
        place = _importable(module) if module in named else None
        if place is not None:
            return [(f"{place[0]}:{named[module]}", place[1])]
    return []


def _importable(name: str) -> tuple[str, str | None] | None:
    """A module's name for other processes, and the path of a main file; None if they cannot import it."""
    if name not in {"__main__", MAIN}:
        return name, None
    module = sys.modules[name]
    real = getattr(module.__spec__, "name", None)
    if real not in {None, "__main__", MAIN}:  # python -m package.module
        return str(real), None
    file = getattr(module, "__file__", None)
    return (name, str(Path(file).resolve())) if file else None


def _digest(app: App) -> str:
    """A digest of the database's address, without user and password, which may differ in workers."""
    url = parse(app.url)
    place = (url.get_backend_name(), url.host, url.port, url.database, url.query.get("host"))
    return sha256(repr(place).encode()).hexdigest()[:16]


def find(location: AppLocation) -> App:
    """The app that a message is about, imported if necessary. Raises ``AppNotFound``."""
    failures: list[str] = []
    for reference, main_path in location.references:
        try:
            found: object = load(reference, main_path)
        except ImportError as error:
            failures.append(str(error))
            continue
        if isinstance(found, App):
            return found if _digest(found) == location.digest else found.place_by_environment()
    return choose(apps(), location, failures)


def choose(there: Iterable[App], location: AppLocation, failures: Sequence[str] = ()) -> App:
    """The app with the location's database, or the only app there is. Raises ``AppNotFound``."""
    known = list(there)
    for app in known:
        if _digest(app) == location.digest:
            return app
    if len(known) == 1:  # its URL may be spelled differently here
        return known[0]
    names = ", ".join(reference for reference, _ in location.references) or "an app that no module holds"
    why = f" ({'; '.join(failures)})" if failures else ""
    raise AppNotFound(
        f"this worker cannot find the app that a run belongs to: {names}{why}. The run waits. Start the worker where"
        " the module that makes the app can be imported, and assign the app to a name in that module"
    )


def perform(app: App, run_id: str, *, sweeps: bool = False) -> bool:
    """Lease the run, if possible, and execute it in this process. Returns False if it could not be leased.

    ``sweeps``: sweep once afterwards, unless another process does.
    """
    known = checked_id(run_id)
    if known is None:
        _log.warning("a message names %.80r, which is not the id of a run", run_id)
        return False
    return asyncio.run(_perform(app, known, sweeps=sweeps))


async def _perform(app: App, run_id: str, *, sweeps: bool) -> bool:
    worker = Worker(app, concurrency=1, processes=1, threads=1, sweep_every=None)
    with _draining_on_sigterm(worker):
        done = await worker.perform(run_id)
    if not done or sweeps:
        store = app.ledger(awaited=True)
        try:
            if not done:
                await _say_why_not(store, run_id)
            if sweeps:
                await _sweep_once(app, store, worker.id)
        except SemelError as error:
            _log.warning("the database did not answer after run %s: %s", run_id, error)
        finally:
            await store.close()
    return done


@contextmanager
def _draining_on_sigterm(worker: Worker) -> Iterator[None]:
    """On SIGTERM, which some service managers send to all processes, let the worker finish or give back its run."""
    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    loop = asyncio.get_running_loop()
    if ours:
        loop.add_signal_handler(signal.SIGTERM, worker.stop)
    try:
        yield
    finally:
        if ours:
            loop.remove_signal_handler(signal.SIGTERM)


async def _say_why_not(store: RunStore, run_id: str) -> None:
    run = (await store.read(queries.get, [run_id])).get(run_id)
    if run is None:
        _log.warning("run %s does not exist: it was removed, or this worker uses another database", run_id)
    else:
        _log.debug("nothing to do for run %s: it is %s", run_id, run.status)


async def _sweep_once(app: App, store: RunStore, holder: str) -> None:
    """Do one turn, and keep the role until the next is due, so that many short-lived workers sweep no more often."""
    if await store.write(maintenance.acquire_leadership, ROLE, holder, SWEEP_EVERY, store.statement_context):
        transport: Transport = app.transport
        if isinstance(transport, BrokerTransport):  # which runs others have announced is unknown
            transport = _Notifier(transport, again=True)
        kept = app.retention
        await Sweeper(store, holder, transport=transport, hooks=app.hooks, publish=app.publish, retention=kept).sweep()


class BrokerTransport(ABC):
    """A transport over a broker: it groups runs by queue, never raises, and sweeps while its process lives.

    It sweeps every ``sweep_every`` seconds, and announces a run that still waits again after ``tell_again`` seconds.
    """

    announces = True
    broker = "redis"
    """The broker's name in ``/healthz``."""

    def __init__(self, app: App, *, sweep_every: float = SWEEP_EVERY, tell_again: float = TELL_AGAIN) -> None:
        self._app = app
        self._made_in = _caller()
        self._sweep_every = sweep_every
        self._tell_again = tell_again
        self._away_until = 0.0
        self._known: tuple[int, AppLocation] | None = None
        self._outage = Outage(_log, "the broker", "runs wait in the database, and are announced when it is available")
        self.after_fork()
        survive_fork(self)

    def after_fork(self) -> None:
        """Leave the parent's sweeper alone: its locks may be held by threads that do not exist here."""
        abandoned_connections.append(getattr(self, "_sweeping", None))
        self._sweeping: tuple[Sweeper, RunStore, str] | None = None
        self._lock = threading.Lock()
        self._missed: dict[str, str] = {}
        self._retry: threading.Timer | None = None

    def announce(self, runs: Sequence[tuple[str, str]], *, again: bool = False) -> bool:
        self.sweep()
        if not runs or (time.monotonic() >= self._away_until and self.notify(runs, again=again)):
            return True
        self._announce_later(runs)
        return False

    def _announce_later(self, runs: Sequence[tuple[str, str]]) -> None:
        """Try again in the background, so that a run need not wait until the sweeper notices that it waits."""
        with self._lock:
            self._missed.update(runs[: MOST_MISSED - len(self._missed)])
            if self._retry is None:
                self._retry = threading.Timer(BROKER_COOLDOWN, self._announce_missed)
                self._retry.daemon = True
                self._retry.start()

    def _announce_missed(self) -> None:
        with self._lock:
            missed, self._missed, self._retry = list(self._missed.items()), {}, None
        if missed and not self.notify(missed, again=False) and self._sweeping is not None:  # it is not closed
            self._announce_later(missed)

    def notify(self, runs: Sequence[tuple[str, str]], *, again: bool) -> bool:
        """Announce at once, without starting a sweeper."""
        try:
            self._send_all(runs, again=again)
        except Exception as error:  # noqa: BLE001 -- whatever the broker's client raises, the runs are stored
            self._away_until = time.monotonic() + BROKER_COOLDOWN
            self._outage.failed(f"{type(error).__name__}: {error}")
            return False
        self._away_until = 0.0
        self._outage.succeeded()
        return True

    def _send_all(self, runs: Sequence[tuple[str, str]], *, again: bool) -> None:
        queues: dict[str, list[str]] = {}
        for run_id, queue in runs:
            queues.setdefault(queue_name(queue), []).append(run_id)
        if again:
            queues = {queue: ids for queue, ids in queues.items() if self.length(queue) < len(ids)}
        if queues:
            self.send(queues, self.location())

    def location(self) -> AppLocation:
        """Where workers find the app; searched for again only when it has more models."""
        models = len(self._app.registry.names)
        if self._known is None or self._known[0] != models:
            self._known = models, location_of(self._app, self._made_in)
        return self._known[1]

    @abstractmethod
    def send(self, queues: Mapping[str, Sequence[str]], location: AppLocation) -> None:
        """Send a message for every run, by the broker's queues; raise the client's errors, without a long wait."""

    @abstractmethod
    def length(self, queue: str) -> int:
        """How many messages wait in the broker's queue."""

    @abstractmethod
    def disconnect(self) -> None:
        """Close the connections to the broker."""

    def sweep(self) -> None:
        """Start the sweeper, in a thread; it works while it is elected."""
        with self._lock:
            if self._sweeping is None:
                store = self._app.ledger(awaited=False)
                store.outage = self._app.outage
                holder = f"{socket.gethostname()}-{os.getpid()}-{new_id()[-6:]}"
                sweeper = Sweeper(
                    store,
                    holder,
                    transport=_Notifier(self),
                    hooks=self._app.hooks,
                    publish=self._app.publish,
                    retention=self._app.retention,
                    interval=self._sweep_every,
                    tell_again=self._tell_again,
                )
                self._sweeping = sweeper, store, holder
            self._sweeping[0].start()

    def close(self) -> None:
        """Stop the sweeper, give up its leadership, and disconnect."""
        with self._lock:
            sweeping, self._sweeping = self._sweeping, None
            self._missed.clear()
            if self._retry is not None:
                self._retry.cancel()
            self._retry = None
        if sweeping is not None:
            sweeper, store, holder = sweeping
            run_sync(sweeper.end())
            try:
                run_sync(store.write(maintenance.release_leadership, ROLE, holder))
            except SemelError as error:
                _log.debug("the sweeper's leadership could not be released; it will expire: %s", error)
            run_sync(store.close())
        self.disconnect()


class _Notifier:
    """The transport for its own sweeper: announces runs, and starts no other sweeper."""

    announces = True

    def __init__(self, announcer: BrokerTransport, *, again: bool = False) -> None:
        self._announcer = announcer
        self._again = again

    def announce(self, runs: Sequence[tuple[str, str]], *, again: bool = False) -> bool:
        return self._announcer.notify(runs, again=again or self._again)

    def close(self) -> None:
        """Do nothing: the transport itself stays open."""


def _caller() -> str:
    """The name of the module outside of semel that makes the app, or its transport."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] == "semel":
        frame = frame.f_back
    return "" if frame is None else str(frame.f_globals.get("__name__", ""))
