"""PostgreSQL: how semel connects, the few connections that the calls of a process share, and a deadline for each wait.

A statement that is run for every key or run, or every few seconds (a *hot* one), finds its rows by an index. It is
planned once, and a plan made while the table was empty must not scan it when it has grown: the settings of its
connection prevent that. Lists, counts and clean-ups read many rows; the server plans them as it does by default.

Behind a pooler that lends a server's session for one transaction (``pool_mode=transaction``) nothing may be left in a
session: no settings, no prepared statements, no LISTEN. Every transaction brings its settings with it.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from sqlalchemy import URL, Connection, Engine, NullPool, create_engine, event, text

from semel._concurrency.fork import survive_fork
from semel._concurrency.runtime import seconds_left
from semel.db.database import COMMITS, abandoned_connections, missing
from semel.db.errors import DATABASE_ERRORS, translate
from semel.errors import InvalidRequest, SemelError, StoreUnavailable

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C")

POOL = 5
"""The most connections of one Once or App in a process. Calls of one kind are sent in batches, so five kinds (claims,
completions, releases, renewals, look-ups) use at most five connections, however many callers there are. PostgreSQL's
default of 100 connections is enough for twelve processes with their listeners."""

LOCK_WAIT = "200"
"""Milliseconds to wait for a lock: a user's open transaction must not block a whole batch."""

SETTINGS = {
    "application_name": "semel",
    "lock_timeout": LOCK_WAIT,
    "default_transaction_isolation": "read committed",
    "statement_timeout": "30s",
    "idle_in_transaction_session_timeout": "15s",
    "jit": "off",
}
"""A statement that waited for a lock must see what was committed meanwhile, whatever the server's default is. A caller
that hangs inside its transaction, which usually takes milliseconds, must not block the keys and quotas of others."""

_HOT = {
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "enable_bitmapscan": "off",
    "max_parallel_workers_per_gather": "0",
}
_TO_HOT = text("SELECT " + ", ".join(f"set_config('{name}', '{value}', false)" for name, value in _HOT.items()))
_TO_PLAIN = text(
    "SELECT set_config(name, reset_val, false) FROM pg_settings"
    f" WHERE name IN ({', '.join(repr(name) for name in _HOT)})"
)

KEEPALIVE = {"keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3, "tcp_user_timeout": 20_000}
"""libpq's settings to drop the connection to an unreachable server within some 20 seconds, even if it only listens.
Calls have their own deadline, which is shorter."""


class PooledConnection(Generic[C]):
    """An open connection, its generation, and whether its statements are planned as hot ones."""

    __slots__ = ("conn", "generation", "hot")

    def __init__(self, conn: C, generation: int) -> None:
        self.conn = conn
        self.generation = generation
        self.hot = False


class IdleConnections(Generic[C]):
    """The idle connections, last in, first out.

    If one of them broke or fell silent, the others may be dead, too: a new ``generation`` begins, and connections of
    the old one that are in use are not put back.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._free: list[PooledConnection[C]] = []
        self._lock = threading.Lock()

    def take(self, *, hot: bool) -> PooledConnection[C] | None:
        """Take an idle connection, if possible one of this kind; None if there is none."""
        with self._lock:
            for at in range(len(self._free) - 1, -1, -1):
                if self._free[at].hot is hot:
                    return self._free.pop(at)
            return self._free.pop() if self._free else None

    def put(self, pooled: PooledConnection[C]) -> bool:
        """Keep the connection for the next call. False if it must be closed."""
        with self._lock:
            if pooled.generation != self.generation:
                return False
            self._free.append(pooled)
            return True

    def clear(self) -> list[C]:
        """Begin a new generation, and return the idle connections of the old one, to be closed."""
        with self._lock:
            self.generation += 1
            free, self._free = self._free, []
            return [pooled.conn for pooled in free]


def is_lost(conn: Connection) -> bool:
    """Whether the connection is closed."""
    if conn.invalidated or conn.closed:
        return True
    driver: Any = conn.connection.driver_connection
    return bool(driver.is_closed() if hasattr(driver, "is_closed") else driver.closed)  # asyncpg, psycopg


def is_left_open(conn: Connection) -> bool:
    """Whether, after an error, the connection is in a transaction that nobody will end."""
    driver: Any = conn.connection.driver_connection
    if hasattr(driver, "is_in_transaction"):  # asyncpg
        return bool(driver.is_in_transaction())
    return bool(driver.info.transaction_status.name != "IDLE")


def raise_as_lost(error: Exception) -> None:
    """Raise StoreUnavailable for an error that a driver did not expect when its connection was lost."""
    if not isinstance(error, (SemelError, *DATABASE_ERRORS)):
        raise StoreUnavailable(f"the connection to the database was lost: {error!r}") from error


def plan(conn: Connection, *, hot: bool) -> None:
    """Plan the statements of this connection as hot ones from now on, or with the server's defaults."""
    driver: Any = conn.connection.driver_connection
    if hasattr(driver, "plan_with"):
        driver.plan_with(_HOT if hot else {})
    else:
        conn.execute(_TO_HOT if hot else _TO_PLAIN)


class PostgresDatabase:
    """A :class:`~semel.db.database.Database` for threads, which share a few connections."""

    def __init__(self, engine: Engine, pool: int = POOL) -> None:
        self._engine = engine
        self._size = pool
        self._idle: IdleConnections[Connection] = IdleConnections()
        self._slots = threading.BoundedSemaphore(pool)
        survive_fork(self)

    def after_fork(self) -> None:
        """The connections belong to the parent: leave them open, and reconnect in the child."""
        free, self._idle = self._idle._free, IdleConnections()
        abandoned_connections.extend(pooled.conn for pooled in free)
        self._engine.dispose(close=False)
        self._slots = threading.BoundedSemaphore(self._size)

    async def write(self, work: Callable[Concatenate[Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        return self._run(True, work, *args, **kwargs)

    optimistic_write = write
    read = write

    async def survey(self, work: Callable[Concatenate[Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        return self._run(False, work, *args, **kwargs)

    write_many = survey

    def _run(self, hot: bool, work: Callable[Concatenate[Connection, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        slots = self._slots
        if not slots.acquire(blocking=False) and not slots.acquire(timeout=seconds_left(60.0)):
            raise all_in_use(self._size)
        try:
            pooled = self._idle.take(hot=hot)
            if pooled is None or pooled.hot is not hot:
                pooled = self._prepare(pooled, hot)
            try:
                answer = work(pooled.conn, *args, **kwargs)
            except Exception as error:
                self._after_error(pooled, error)
                raise
            except BaseException:  # an interrupt: the connection may be in the middle of a reply
                _discard(pooled.conn)
                raise
            if not self._idle.put(pooled):
                _discard(pooled.conn)
        except DATABASE_ERRORS as error:
            raise translate(error) from error
        else:
            return answer
        finally:
            slots.release()

    def _prepare(self, pooled: PooledConnection[Connection] | None, hot: bool) -> PooledConnection[Connection]:
        if pooled is None:
            generation = self._idle.generation
            pooled = PooledConnection(self._engine.connect(), generation)
        if pooled.hot is not hot:
            try:
                plan(pooled.conn, hot=hot)
            except BaseException:
                self._discard_all(pooled.conn)
                raise
            pooled.hot = hot
        return pooled

    def _after_error(self, pooled: PooledConnection[Connection], error: Exception) -> None:
        if is_lost(pooled.conn):
            self._discard_all(pooled.conn)
            raise_as_lost(error)
        elif is_left_open(pooled.conn):
            self._discard_all(pooled.conn)
        elif not self._idle.put(pooled):
            _discard(pooled.conn)

    def _discard_all(self, conn: Connection) -> None:
        """Close a connection that broke or fell silent, and all idle ones, which may have, too."""
        for each in (conn, *self._idle.clear()):
            _discard(each)

    async def close(self) -> None:
        """Close the idle connections. Those in use are closed when their calls end."""
        for conn in self._idle.clear():
            _discard(conn)


def _discard(conn: Connection) -> None:
    """Close without a message to the server, which may be silent."""
    conn.invalidate()
    conn.close()


def all_in_use(size: int) -> StoreUnavailable:
    """The error for a call that found no free connection in time."""
    return StoreUnavailable(
        f"all {size} connections of this process to the database are in use, and none became free in time; "
        "a larger pool= allows more"
    )


def pools_transactions(url: URL) -> bool:
    """Whether the URL names a pooler that lends a session for one transaction: ``?pool_mode=transaction``."""
    mode = url.query.get("pool_mode", "session")
    if mode not in ("session", "transaction"):
        raise InvalidRequest(
            f"pool_mode in the URL must be 'session' (the default) or 'transaction', as in PgBouncer, not {mode!r}"
        )
    return mode == "transaction"


def settings_in(options: str) -> dict[str, str]:
    """The settings in libpq's URL parameter ``options``, such as ``-c search_path=app``."""
    return dict(re.findall(r"(?:-c\s*|--)(\w+)=(\S+)", options))


def postgres_engine(url: URL) -> Engine:
    """A blocking engine over psycopg whose statements commit by themselves. It has no pool."""
    query: dict[str, Any] = {"connect_timeout": "5", **url.query}
    options = query.pop("options", "")
    try:
        engine = create_engine(
            url.set(drivername="postgresql+psycopg", query=query),
            poolclass=NullPool,
            isolation_level="AUTOCOMMIT",
            connect_args=KEEPALIVE,
            pool_reset_on_return=None,
            execution_options={COMMITS: True},
            use_native_hstore=False,
            hide_parameters=True,
        )
    except ModuleNotFoundError as error:
        raise missing("postgres", error) from error
    # Imported here and not while connecting: a child that is forked during an import would wait for it forever.
    from semel.db.psycopg_connection import BoundedConnection, TransactionPooledConnection

    pooled = pools_transactions(url)
    escaped = {name: value.replace(" ", "\\ ") for name, value in SETTINGS.items()}
    at_start = " ".join((*(f"-c {name}={value}" for name, value in escaped.items()), options)).strip()

    @event.listens_for(engine, "do_connect")
    def _connect(_dialect: Any, _record: Any, args: Any, values: Any) -> Any:
        values = {name: value for name, value in values.items() if name != "pool_mode"}
        if not pooled:
            return BoundedConnection.connect(*args, options=at_start, **values)
        own = SETTINGS | settings_in(options)
        conn = TransactionPooledConnection.connect(*args, **{"application_name": own.pop("application_name"), **values})
        conn.settings = own
        conn.plan_with({})
        return conn

    return engine
