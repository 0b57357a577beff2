"""PostgreSQL: how semel connects, the few connections that the calls of a process share, and a deadline for each wait.

A statement that is run for every key or run, or every few seconds (a *hot* one), finds its rows by an index. It is
planned once, and a plan made while the table was empty must not scan it when it has grown: the connection that it runs
on is told so. Lists, counts and clean-ups go through many rows, and are planned as the server sees fit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from sqlalchemy import URL, Connection, Engine, NullPool, create_engine, event, text

from semel._concurrency.fork import survive_fork
from semel._concurrency.runtime import seconds_left
from semel.db.database import COMMITS, abandoned_connections, missing
from semel.db.errors import DATABASE_ERRORS, translate
from semel.errors import StoreUnavailable

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C")

POOL = 5
"""Connections of one Once or App in a process, at the most. Calls of one kind travel together, so five kinds (claims,
completions, releases, renewals, look-ups) keep five connections busy, however many callers there are. Twelve processes
fit into the 100 connections that a PostgreSQL has by default, with their listeners."""

LOCK_WAIT = "200"
"""Milliseconds: a batch must not hang behind one user's open transaction."""

SETTINGS = {
    "application_name": "semel",
    "lock_timeout": LOCK_WAIT,
    "default_transaction_isolation": "read committed",
    "statement_timeout": "30s",
    "idle_in_transaction_session_timeout": "15s",
    "jit": "off",
}
"""A statement that waited for a lock must see what was committed meanwhile, whatever the server's default is. A caller
that freezes inside its transaction, which takes milliseconds, must not keep others from their keys and quotas."""

_HOT = {
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
}
_TO_HOT = text("SELECT " + ", ".join(f"set_config('{name}', '{value}', false)" for name, value in _HOT.items()))
_TO_PLAIN = text(
    "SELECT set_config(name, reset_val, false) FROM pg_settings"
    f" WHERE name IN ({', '.join(repr(name) for name in _HOT)})"
)

KEEPALIVE = {"keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3, "tcp_user_timeout": 20_000}
"""libpq's words for: a peer that cannot be reached any more is given up within some 20 seconds, even by who waits for
nothing but to hear from it. A call has its own deadline, which is shorter."""


class Kept(Generic[C]):
    """A connection that is open, of which pool, and whether its statements are planned as hot ones."""

    __slots__ = ("conn", "generation", "hot")

    def __init__(self, conn: C, generation: int) -> None:
        self.conn = conn
        self.generation = generation
        self.hot = False


class Shelf(Generic[C]):
    """The idle connections, last in, first out.

    When one of them broke or fell silent, the others, which may be as dead, are of an older ``generation``: whoever
    has one in use does not put it back.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._free: list[Kept[C]] = []
        self._lock = threading.Lock()

    def take(self, *, hot: bool) -> Kept[C] | None:
        """One of the kind, else any, else None."""
        with self._lock:
            for at in range(len(self._free) - 1, -1, -1):
                if self._free[at].hot is hot:
                    return self._free.pop(at)
            return self._free.pop() if self._free else None

    def put(self, kept: Kept[C]) -> bool:
        """Keep it for the next call; False when it must be closed."""
        with self._lock:
            if kept.generation != self.generation:
                return False
            self._free.append(kept)
            return True

    def clear(self) -> list[C]:
        """Begin a new generation; returns the connections of the old one, to be closed."""
        with self._lock:
            self.generation += 1
            free, self._free = self._free, []
            return [kept.conn for kept in free]


def is_broken(conn: Connection) -> bool:
    """After an error: True when the connection is gone, or inside a transaction that somebody left open."""
    if conn.invalidated or conn.closed:
        return True
    driver: Any = conn.connection.driver_connection
    if hasattr(driver, "is_in_transaction"):  # asyncpg
        return bool(driver.is_closed() or driver.is_in_transaction())
    return bool(driver.closed or driver.info.transaction_status.name != "IDLE")


def plan(conn: Connection, *, hot: bool) -> None:
    """Let the statements on this connection be planned as hot ones from now on, or as the server sees fit."""
    conn.execute(_TO_HOT if hot else _TO_PLAIN)


class PostgresDatabase:
    """A :class:`~semel.db.database.Database` for threads, which share a few connections."""

    def __init__(self, engine: Engine, pool: int = POOL) -> None:
        self._engine = engine
        self._size = pool
        self._shelf: Shelf[Connection] = Shelf()
        self._places = threading.BoundedSemaphore(pool)
        survive_fork(self)

    def after_fork(self) -> None:
        """The parent's connections are the parent's: leave them open there and connect anew here."""
        free, self._shelf = self._shelf._free, Shelf()
        abandoned_connections.extend(kept.conn for kept in free)
        self._engine.dispose(close=False)
        self._places = threading.BoundedSemaphore(self._size)

    async def write(self, work: Callable[Concatenate[Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        return self._run(True, work, *args, **kwargs)

    optimistic_write = write
    read = write

    async def survey(self, work: Callable[Concatenate[Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        return self._run(False, work, *args, **kwargs)

    write_many = survey

    def _run(self, hot: bool, work: Callable[Concatenate[Connection, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        places = self._places
        if not places.acquire(blocking=False) and not places.acquire(timeout=seconds_left(60.0)):
            raise all_in_use(self._size)
        try:
            kept = self._shelf.take(hot=hot)
            if kept is None or kept.hot is not hot:
                kept = self._prepare(kept, hot)
            try:
                answer = work(kept.conn, *args, **kwargs)
            except Exception:
                self._after_error(kept)
                raise
            except BaseException:  # an interrupt: the connection may be in the middle of a reply
                _discard(kept.conn)
                raise
            if not self._shelf.put(kept):
                _discard(kept.conn)
        except DATABASE_ERRORS as error:
            raise translate(error) from error
        else:
            return answer
        finally:
            places.release()

    def _prepare(self, kept: Kept[Connection] | None, hot: bool) -> Kept[Connection]:
        if kept is None:
            generation = self._shelf.generation
            kept = Kept(self._engine.connect(), generation)
        if kept.hot is not hot:
            try:
                plan(kept.conn, hot=hot)
            except BaseException:
                self._condemn(kept.conn)
                raise
            kept.hot = hot
        return kept

    def _after_error(self, kept: Kept[Connection]) -> None:
        if is_broken(kept.conn):
            self._condemn(kept.conn)
        elif not self._shelf.put(kept):
            _discard(kept.conn)

    def _condemn(self, conn: Connection) -> None:
        """Where one connection broke or fell silent, the others may have, too: close all that are idle."""
        for each in (conn, *self._shelf.clear()):
            _discard(each)

    async def close(self) -> None:
        """Close the idle connections. One that is in use is closed when its call ends."""
        for conn in self._shelf.clear():
            _discard(conn)


def _discard(conn: Connection) -> None:
    """Close without telling the server, which may be silent."""
    conn.invalidate()
    conn.close()


def all_in_use(size: int) -> StoreUnavailable:
    """The error of a call that found no free connection in time."""
    return StoreUnavailable(
        f"all {size} connections of this process to the database are in use, and none became free in time; "
        "more of them: pool="
    )


def postgres_engine(url: URL) -> Engine:
    """A blocking engine over psycopg whose statements commit by themselves. It keeps no connections."""
    query = dict(url.query)
    escaped = {name: value.replace(" ", "\\ ") for name, value in SETTINGS.items()}
    ours = " ".join(f"-c {name}={value}" for name, value in escaped.items())
    options = f"{ours} {query.pop('options', '')}".strip()
    try:
        engine = create_engine(
            url.set(drivername="postgresql+psycopg", query={"connect_timeout": "5", **query}),
            poolclass=NullPool,
            isolation_level="AUTOCOMMIT",
            connect_args={"options": options, **KEEPALIVE},
            pool_reset_on_return=None,
            execution_options={COMMITS: True},
            use_native_hstore=False,
            hide_parameters=True,
        )
    except ModuleNotFoundError as error:
        raise missing("postgres", error) from error
    # Imported here and not while connecting: a child that is forked during an import would wait for it for ever.
    from semel.db.psycopg_connection import BoundedConnection

    @event.listens_for(engine, "do_connect")
    def _connect(_dialect: Any, _record: Any, args: Any, values: Any) -> Any:
        return BoundedConnection.connect(*args, **values)

    return engine
