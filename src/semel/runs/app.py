"""The app: a store, models, and every operation on runs, blocking here and awaited in ``app.aio``."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, Unpack, cast
from weakref import WeakSet

from semel._concurrency.fork import survive_fork
from semel._concurrency.retry import Outage
from semel._concurrency.sync import LateClass, async_method, sync_method
from semel._validation import TEN_YEARS, age_in, checked_number
from semel.errors import InvalidRequest
from semel.once.store import Clock
from semel.runs.execution import Limits
from semel.runs.hooks import EventHooks, Hook
from semel.runs.models.model import ModelOptions, Registry, is_loading, make_model
from semel.runs.results import ResultStore, open_results, path_of
from semel.runs.transports import DatabaseTransport, Transport
from semel.runs.types import RETRY_FOR, DedupePolicy

if TYPE_CHECKING:
    from semel.runs.engine import RunEngine
    from semel.runs.store import RunStore
    from semel.runs.store.outbox import OutboxEvent
    from semel.runs.worker import Worker, WorkerOptions
else:  # they import SQLAlchemy, and a child of a worker makes the app only to find its models
    RunEngine = LateClass("semel.runs.engine", "RunEngine")
    RunStore = LateClass("semel.runs.store", "RunStore")

F = TypeVar("F", bound=Callable[..., Any])

_VARIABLES = {
    "url": "SEMEL_DB",
    "artifacts": "SEMEL_ARTIFACTS",
    "transport": "SEMEL_TRANSPORT",
    "redis": "SEMEL_REDIS",
}

_apps: WeakSet[App] = WeakSet()


class Location(NamedTuple):
    """Where an app keeps its runs and files, and how it reaches its workers."""

    url: str
    artifacts: str | Path | ResultStore
    transport: str
    redis: str | None


class AsyncRuns:
    """The operations of an app for async code. Get it as ``app.aio``."""

    def __init__(self, engine: RunEngine) -> None:
        self._engine = engine

    @property
    def ledger(self) -> RunStore:
        """The store of the runs."""
        return self._engine.store

    submit = async_method(RunEngine.submit)
    submit_many = async_method(RunEngine.submit_many)
    get = async_method(RunEngine.get)
    runs = async_method(RunEngine.runs)
    cancel = async_method(RunEngine.cancel)
    retry = async_method(RunEngine.retry)
    act = async_method(RunEngine.act)
    action = async_method(RunEngine.action)
    actions = async_method(RunEngine.actions)
    result = async_method(RunEngine.result)
    result_json = async_method(RunEngine.result_json)
    artifact = async_method(RunEngine.artifact)
    wait = async_method(RunEngine.wait)
    timeline = async_method(RunEngine.timeline)
    manifest = async_method(RunEngine.manifest)
    diff = async_method(RunEngine.diff)
    compare_results = async_method(RunEngine.compare_results)
    drift = async_method(RunEngine.drift)
    rerun = async_method(RunEngine.rerun)
    logs = async_method(RunEngine.logs)
    waiting = async_method(RunEngine.waiting)
    summary = async_method(RunEngine.summary)
    backlog = async_method(RunEngine.backlog)
    workers = async_method(RunEngine.workers)
    pause = async_method(RunEngine.pause)
    resume = async_method(RunEngine.resume)
    pauses = async_method(RunEngine.pauses)
    set_quota = async_method(RunEngine.set_quota)
    quotas = async_method(RunEngine.quotas)
    usage = async_method(RunEngine.usage)
    purge = async_method(RunEngine.purge)
    audit_log = async_method(RunEngine.audit_log)
    verify_audit_log = async_method(RunEngine.verify_audit_log)
    begin_sealing = async_method(RunEngine.begin_sealing)
    close = async_method(RunEngine.close)


class App:
    """Models, and their runs in a database: ``App("sqlite:///semel.db")``, ``App("postgresql://host/name")``.

    ``artifacts`` is where large results and files are stored: a folder, ``s3://bucket/prefix``, ``gs://…``, ``az://…``.
    ``transport`` announces new runs to workers: ``"database"``, or ``"rq"`` and ``"celery"`` over ``redis``.
    ``publish`` is called with every step of every run, at least once, after it was committed.
    ``retry_for`` is for how many seconds an operation is retried while the database is unavailable or silent.
    ``pool`` (PostgreSQL) is the most connections that the operations of a process share, 5 by default.
    ``retention`` is after how many seconds workers remove a run that ended; by default runs are kept for ever.
    """

    def __init__(
        self,
        url: str,
        *,
        artifacts: str | Path | ResultStore = "./artifacts",
        transport: Literal["database", "rq", "celery"] | Transport = "database",
        redis: str | None = None,
        key_ttl: float = 86400.0,
        dedupe_window: float = 600.0,
        inline_result_bytes: int = 16 * 1024,
        max_result_bytes: int = 100 * 1024 * 1024,
        publish: Callable[[OutboxEvent], None] | None = None,
        clock: Clock | None = None,
        retry_for: float = RETRY_FOR,
        pool: int | None = None,
        retention: float | None = None,
    ) -> None:
        self.url = url
        self.retention = _checked_retention(retention)
        self.registry = Registry()
        self.hooks = EventHooks()
        self.outage = Outage(
            logging.getLogger("semel.database"),
            "the database",
            "active runs continue while their leases last, and every operation is retried",
            patience=1.0,
        )
        """Shared by the workers and servers of this process, so that one outage is logged once."""
        self.limits = Limits(inline_bytes=inline_result_bytes, max_bytes=max_result_bytes)
        self.dedupe_policy = DedupePolicy(key_ttl=key_ttl, dedupe_window=dedupe_window)
        self.publish = publish
        self.clock = clock
        self._retry_for, self._pool = retry_for, pool
        self._transport_settings = (transport, redis)
        self.transport = _transport(transport, redis, self)
        self._artifacts = _absolute(artifacts)
        self._opening = threading.Lock()
        if not is_loading():
            self.ledger(awaited=False)  # raises at once if the URL cannot work
        _apps.add(self)
        survive_fork(self)

    def place(
        self,
        *,
        url: str | None = None,
        artifacts: str | None = None,
        transport: Literal["database", "rq", "celery"] | None = None,
        redis: str | None = None,
        retention: float | None = None,
    ) -> App:
        """Change these settings before the app is used; None leaves one as it is. Returns the app."""
        transport_changed = (transport, redis) not in ((None, None), self._transport_settings)
        moves = url not in (None, self.url) or artifacts is not None or transport_changed
        if moves and self.__dict__.keys() & {"aio", "_engine"}:
            raise InvalidRequest("the app is already in use, so its settings cannot be changed")
        if retention is not None:
            self.retention = _checked_retention(retention)
        kind, broker = self._transport_settings
        kind = transport or kind
        settings = (kind, redis or (broker if kind != "database" else None))
        new = _transport(*settings, self) if transport_changed else self.transport
        if url is not None:
            RunStore(url, awaited=False)
            self.url = url
        if artifacts is not None:
            self._artifacts = _absolute(artifacts)
        if transport_changed:
            self.transport.close()
            self._transport_settings, self.transport = settings, new
        return self

    def place_by_environment(self) -> App:
        """As :meth:`place`, with ``SEMEL_DB``, ``SEMEL_ARTIFACTS``, ``SEMEL_TRANSPORT``, ``SEMEL_REDIS`` and
        ``SEMEL_RETENTION`` (such as ``90d``), if set.
        """
        found: dict[str, Any] = {name: os.environ.get(variable) or None for name, variable in _VARIABLES.items()}
        return self.place(**found, retention=retention_by_environment())

    @property
    def location(self) -> Location:
        """The settings that :meth:`place` changes."""
        kind, redis = self._transport_settings
        return Location(self.url, self._artifacts, kind if isinstance(kind, str) else type(kind).__name__, redis)

    def after_fork(self) -> None:
        """Replace the lock: a thread that stayed in the parent may hold it."""
        self._opening = threading.Lock()

    @property
    def results(self) -> ResultStore:
        """The store of large results and artifacts, opened on first use."""
        with self._opening:
            if isinstance(self._artifacts, str | Path):
                self._artifacts = open_results(self._artifacts)
            return self._artifacts

    @cached_property
    def _engine(self) -> RunEngine:
        return self.engine(awaited=False)

    @cached_property
    def aio(self) -> AsyncRuns:
        """The same operations, awaited."""
        return AsyncRuns(self.engine(awaited=True))

    def ledger(self, *, awaited: bool) -> RunStore:
        """A new store, with its own connections."""
        return RunStore(
            self.url,
            awaited=awaited,
            clock=self.clock,
            publish=self.publish is not None,
            retry_for=self._retry_for,
            pool=self._pool,
        )

    def engine(self, *, awaited: bool, store: RunStore | None = None) -> RunEngine:
        """The operations on a new store, or on the given one."""
        return RunEngine(
            store or self.ledger(awaited=awaited),
            self.registry,
            results=lambda: self.results,
            transport=lambda: self.transport,
            dedupe_policy=self.dedupe_policy,
            hooks=self.hooks,
        )

    def model(self, name: str, **options: Unpack[ModelOptions]) -> Callable[[F], F]:
        """Register a function as a model; the function itself is not changed.

        ``max_attempts``, ``backoff`` and ``fatal`` are for its errors, ``max_lost`` and ``lease`` for lost workers;
        ``timeout`` and ``grace`` limit its time; ``stall_after`` is how many seconds its progress may stand still
        before it is shown as stalled; ``isolation`` is ``"process"``, ``"thread"`` or ``"loop"``; ``queue``,
        ``priority`` and ``cost`` apply unless a submission overrides them; ``exclude`` names parameters that are not
        hashed, ``summary`` one to group runs by. ``seeded`` seeds ``random``, NumPy and torch with ``ctx.seed`` before
        the function is called in its process.
        """
        if not isinstance(name, str):
            raise InvalidRequest('a model needs a name: @app.model("name")')

        def register(function: F) -> F:
            self.registry.add(make_model(name, function, **options))
            return function

        return register

    def working(self, **options: Unpack[WorkerOptions]) -> AbstractContextManager[Worker]:
        """Run a worker in the background until the end of the block: for tests, scripts and small services.

        Takes the options of :class:`~semel.runs.worker.Worker`.
        """
        from semel.runs.worker import Worker, working

        return working(Worker(self, **options))

    def on_event(self, hook: Hook) -> None:
        """Call ``hook`` for everything that happens to runs in this process."""
        self.hooks.add(hook)

    submit = sync_method(RunEngine.submit)
    submit_many = sync_method(RunEngine.submit_many)
    get = sync_method(RunEngine.get)
    runs = sync_method(RunEngine.runs)
    cancel = sync_method(RunEngine.cancel)
    retry = sync_method(RunEngine.retry)
    act = sync_method(RunEngine.act)
    action = sync_method(RunEngine.action)
    actions = sync_method(RunEngine.actions)
    result = sync_method(RunEngine.result)
    result_json = sync_method(RunEngine.result_json)
    artifact = sync_method(RunEngine.artifact)
    wait = sync_method(RunEngine.wait)
    timeline = sync_method(RunEngine.timeline)
    manifest = sync_method(RunEngine.manifest)
    diff = sync_method(RunEngine.diff)
    compare_results = sync_method(RunEngine.compare_results)
    drift = sync_method(RunEngine.drift)
    rerun = sync_method(RunEngine.rerun)
    logs = sync_method(RunEngine.logs)
    waiting = sync_method(RunEngine.waiting)
    summary = sync_method(RunEngine.summary)
    backlog = sync_method(RunEngine.backlog)
    workers = sync_method(RunEngine.workers)
    pause = sync_method(RunEngine.pause)
    resume = sync_method(RunEngine.resume)
    pauses = sync_method(RunEngine.pauses)
    set_quota = sync_method(RunEngine.set_quota)
    quotas = sync_method(RunEngine.quotas)
    usage = sync_method(RunEngine.usage)
    purge = sync_method(RunEngine.purge)
    audit_log = sync_method(RunEngine.audit_log)
    verify_audit_log = sync_method(RunEngine.verify_audit_log)
    begin_sealing = sync_method(RunEngine.begin_sealing)
    close = sync_method(RunEngine.close)


def apps() -> list[App]:
    """Every app of this process."""
    return list(_apps)


def retention_by_environment() -> float | None:
    """The seconds in ``SEMEL_RETENTION``, such as ``90d``; None if it is not set."""
    kept = os.environ.get("SEMEL_RETENTION")
    try:
        return age_in(kept) if kept else None
    except ValueError as error:
        raise InvalidRequest(f"SEMEL_RETENTION: {error}") from error


def _checked_retention(seconds: float | None) -> float | None:
    return None if seconds is None else checked_number("retention", seconds, 1, TEN_YEARS)


def _absolute(target: str | Path | ResultStore) -> str | Path | ResultStore:
    """Make the path of a folder absolute, so that it does not depend on the working directory."""
    if isinstance(target, str) and "://" not in target and ":/" in target[:8]:
        raise InvalidRequest(f"{target!r} is not a folder, and a URL has two slashes, as in s3://bucket/prefix")
    if isinstance(target, Path) or (isinstance(target, str) and "://" not in target):
        return Path(target).resolve()
    if isinstance(target, str) and target.startswith("file:"):
        path_of(target)  # a URL that names no folder is refused here, not by the first run that has a large result
    return target


def _transport(transport: str | Transport, redis: str | None, app: App) -> Transport:
    if not isinstance(transport, str):
        return transport
    match transport:
        case "database" if redis is not None:
            raise InvalidRequest("redis= is for the transports 'rq' and 'celery': say which, as transport='rq'")
        case "database":
            return DatabaseTransport()
        case "rq" | "celery" if redis is None:
            raise InvalidRequest(f"the transport {transport!r} needs redis='redis://host/0'")
        case "rq":
            from semel.runs.rq import RqTransport

            return cast("Transport", RqTransport(cast("str", redis), app))
        case "celery":
            from semel.runs.celery import CeleryTransport

            return cast("Transport", CeleryTransport(cast("str", redis), app))
    raise InvalidRequest(f"transport is 'database', 'rq' or 'celery', not {transport!r}")
