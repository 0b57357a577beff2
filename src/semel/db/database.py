"""The :class:`Database` protocol, and SQLite: how a verb (a function of a ``Connection``) is run.

PostgreSQL and the user's own transaction have separate modules. All of them run the same verbs.
"""

from __future__ import annotations

import asyncio
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from contextvars import copy_context
from hashlib import sha256
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from sqlalchemy import URL, Connection, Dialect, Engine, TextClause, create_engine, event, exc, make_url

from semel._concurrency.fork import survive_fork
from semel._concurrency.runtime import seconds_left
from semel._concurrency.sync import run_sync
from semel.audit import FORMS, ZEROS
from semel.db.errors import translate_errors
from semel.db.sqlite_file import WatchedFile, check_known, make_private
from semel.errors import InvalidRequest, MissingExtra, StoreUnavailable

P = ParamSpec("P")
R = TypeVar("R")

COMMITS = "semel_commits"
"""The execution option of a connection whose statements commit by themselves."""

abandoned_connections: list[Any] = []
"""Connections of a parent process or of a closed loop, kept so that they are neither used nor closed here."""


class Database(Protocol):
    """Runs verbs, which are functions of a connection."""

    async def write(self, work: Callable[Concatenate[Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run ``work`` so that it may write: in one transaction on SQLite, statement by statement on PostgreSQL."""

    async def optimistic_write(
        self, work: Callable[Concatenate[Connection, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """As ``write``, for work that reads first and may not write: it waits for other writers only when it writes.

        If another process wrote between its read and its write, the work runs again from the start.
        """

    async def read(self, work: Callable[Concatenate[Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run ``work``, which only reads."""

    async def survey(self, work: Callable[Concatenate[Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """As ``read``, for work on many rows, which the server plans with its defaults."""

    async def write_many(self, work: Callable[Concatenate[Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """As ``write``, for work on many rows, such as a clean-up; planned as in ``survey``."""

    async def close(self) -> None:
        """Close the connections."""


class BlockingDatabase:
    """A SQLite file, or a user's engine, which is not closed here. Nothing here suspends."""

    def __init__(self, engine: Engine, *, owned: bool = True, file: WatchedFile | None = None) -> None:
        self._engine = engine
        self._owned = owned
        self._file = file
        self._where = str(Path(engine.url.database or "").absolute()) if self._is_sqlite else ""
        self._writing, self._reading = threading.Lock(), threading.Lock()
        self._held: list[threading.Lock] = []
        survive_fork(self)

    def before_fork(self) -> None:
        """Close the connections to a SQLite file: none may be open across a fork.

        SQLite keeps a list of its locks on a file in the process's memory: a child would inherit the list, but not
        the locks. So the fork waits until no connection is in use, but not forever.
        """
        if self._is_sqlite:
            self._held = [lock for lock in (self._writing, self._reading) if lock.acquire(timeout=5)]
            self._engine.dispose()

    def after_fork_in_parent(self) -> None:
        """Allow connections again; they are opened when needed."""
        while self._held:
            self._held.pop().release()

    def after_fork(self) -> None:
        """The connections belong to the parent: leave them open, and reconnect in the child."""
        self._engine.dispose(close=False)
        self._writing, self._reading = threading.Lock(), threading.Lock()
        self._held = []

    @property
    def _is_sqlite(self) -> bool:
        return self._engine.dialect.name == "sqlite"

    async def write(self, work: Callable[Concatenate[Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        # SQLite has one writer: threads wait here instead of polling the file's lock.
        with translate_errors(self._where):
            if not self._is_sqlite:
                with self._engine.connect() as conn:
                    return work(conn, *args, **kwargs)
            with self._alone(self._writing), self._engine.begin() as conn:
                return work(conn, *args, **kwargs)

    write_many = write

    @contextmanager
    def _alone(self, lock: threading.Lock) -> Iterator[None]:
        """Hold the lock; wait for it until the deadline."""
        if not lock.acquire(timeout=seconds_left(60.0)):
            raise StoreUnavailable("the database file is in use by other threads of this process for too long")
        try:
            yield
        finally:
            lock.release()

    async def optimistic_write(
        self, work: Callable[Concatenate[Connection, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        try:
            with translate_errors(self._where), self._alone(self._writing), self._looking() as conn, conn.begin():
                return work(conn, *args, **kwargs)
        except StoreUnavailable:  # another process wrote since our read
            return await self.write(work, *args, **kwargs)

    async def read(self, work: Callable[Concatenate[Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        with (
            translate_errors(self._where),
            self._alone(self._reading) if self._is_sqlite else nullcontext(),
            self._looking() as conn,
        ):
            return work(conn, *args, **kwargs)

    survey = read

    def _looking(self) -> Connection:
        return self._engine.connect().execution_options(semel_reads=True)

    async def close(self) -> None:
        if self._owned:
            self._engine.dispose()
        if self._file is not None:
            self._file.forget()


class ThreadedDatabase:
    """A blocking database in separate threads, for event loops.

    Used for SQLite, whose calls are short, with one thread, and for PostgreSQL where asyncpg cannot be used.
    """

    def __init__(self, inner: Database, threads: int = 1) -> None:
        self._inner = inner
        self._size = threads
        self.after_fork()
        survive_fork(self)

    def after_fork(self) -> None:
        """Threads do not survive a fork."""
        self._threads = ThreadPoolExecutor(self._size, thread_name_prefix="semel-database")
        self._closed = False

    async def write(self, work: Callable[Concatenate[Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        return await self._there(lambda: run_sync(self._inner.write(work, *args, **kwargs)))

    async def optimistic_write(
        self, work: Callable[Concatenate[Connection, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        return await self._there(lambda: run_sync(self._inner.optimistic_write(work, *args, **kwargs)))

    async def read(self, work: Callable[Concatenate[Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        return await self._there(lambda: run_sync(self._inner.read(work, *args, **kwargs)))

    async def survey(self, work: Callable[Concatenate[Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        return await self._there(lambda: run_sync(self._inner.survey(work, *args, **kwargs)))

    async def write_many(self, work: Callable[Concatenate[Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        return await self._there(lambda: run_sync(self._inner.write_many(work, *args, **kwargs)))

    async def _there(self, call: Callable[[], R]) -> R:
        try:
            # The context has the deadline, which the thread keeps: nobody can cancel it.
            return await asyncio.get_running_loop().run_in_executor(self._threads, copy_context().run, call)
        except RuntimeError:
            if not self._closed:
                raise
            return call()  # after close(), as when a server gets two signals to stop: the last writes are not lost

    async def close(self) -> None:
        self._closed = True
        self._threads.shutdown(wait=False)
        await self._inner.close()


def fetch(conn: Connection, statement: TextClause, values: dict[str, Any]) -> Sequence[Any]:
    """The rows of a hot statement, without SQLAlchemy's result objects, which cost a lone caller as much as the rest.

    Only connections whose statements commit by themselves also send it without SQLAlchemy.
    """
    if not conn.get_execution_options().get(COMMITS):
        result = conn.execute(statement, values)
        return list(result.cursor_strategy.fetchall(result, result.cursor))
    sql, names = _compiled(statement, conn.dialect)
    dbapi: Any = conn.connection.dbapi_connection
    with _dbapi_errors(conn, sql, values):
        if names is not None:  # asyncpg takes values by position, and caches its statements itself
            return list(_on_asyncpg(dbapi, lambda driver: driver.fetch(sql, *[values[name] for name in names])))
        cursor = dbapi.cursor()
        cursor.execute(sql, values)
        return list(cursor.fetchall())


def send(conn: Connection, statements: str) -> None:
    """Send statements without values to PostgreSQL as one message, which it executes one after the other."""
    dbapi: Any = conn.connection.dbapi_connection
    with _dbapi_errors(conn, statements, {}):
        if hasattr(dbapi, "run_async"):
            _on_asyncpg(dbapi, lambda driver: driver.execute(statements))
        else:
            dbapi.cursor().execute(statements)


@contextmanager
def _dbapi_errors(conn: Connection, sql: str, values: dict[str, Any]) -> Iterator[None]:
    """Raise the errors of the driver as SQLAlchemy does."""
    try:
        yield
    except conn.dialect.loaded_dbapi.Error as error:
        lost = conn.dialect.is_disconnect(error, conn.connection.dbapi_connection, None)
        if lost:
            conn.invalidate(error)
        raise exc.DBAPIError.instance(
            sql,
            values,
            error,
            conn.dialect.loaded_dbapi.Error,
            hide_parameters=True,
            connection_invalidated=lost,
            dialect=conn.dialect,
        ) from error


def _on_asyncpg(dbapi: Any, call: Callable[[Any], Any]) -> Any:
    try:
        return dbapi.run_async(call)
    except Exception as error:
        dbapi._handle_exception(error)
        raise


_texts: dict[tuple[TextClause, str], tuple[str, list[str] | None]] = {}


def _compiled(statement: TextClause, dialect: Dialect) -> tuple[str, list[str] | None]:
    """The statement in the driver's syntax, and the order of its values if the driver takes them by position."""
    found = _texts.get((statement, dialect.driver))
    if found is None:
        compiled = statement.compile(dialect=dialect)
        found = _texts[statement, dialect.driver] = (str(compiled), compiled.positiontup)
    return found


def sqlite_engine(url: URL) -> Engine:
    """An engine for a file, durable (WAL, synchronous=FULL), whose transactions take the write lock at once."""
    if not url.database or ":memory:" in url.database or "memory" in str(url.query.get("mode", "")):
        raise InvalidRequest("SQLite needs a file, such as sqlite:///semel.db; for memory use memory://")
    engine = create_engine(
        url.set(drivername="sqlite+pysqlite"), connect_args={"check_same_thread": False}, hide_parameters=True
    )
    event.listen(engine, "do_connect", _before_connecting)
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _before_connecting(_dialect: Any, _record: Any, arguments: list[Any], options: dict[str, Any]) -> None:
    """Check and create the file first: SQLite would replace a deleted file, and create one that everybody may read."""
    check_known(arguments[0])
    if not options.get("uri"):  # a URI may forbid to create the file
        make_private(arguments[0])


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    """Set a new connection up, or close it: a statement that failed may hold a lock, which would outlive it."""
    connection.isolation_level = None
    try:
        with closing(connection.cursor()) as cursor:
            cursor.execute("PRAGMA busy_timeout = 1000")
            cursor.execute("PRAGMA journal_mode = WAL")
            cursor.execute("PRAGMA synchronous = FULL")
            cursor.execute("PRAGMA cache_size = -65536")
    except BaseException:
        connection.close()
        raise
    connection.create_function("semel_digest", -1, _digest, deterministic=True)


def _digest(form: str, previous: str | None, *values: Any) -> str:
    """SQLite's function for the digest of a row: of this form (see :mod:`semel.audit`), after the digest before it.

    SQLite stores values of any type. One that is not of its column's has a digest of zeros, which no row verifies with:
    a run must end, and be sealed, whatever somebody wrote into its row.
    """
    try:
        return sha256(bytes.fromhex(previous or "") + FORMS[form].encode(values)).hexdigest()
    except (ValueError, TypeError, AttributeError, struct.error):
        return ZEROS.hex()


def _begin_sqlite(conn: Connection) -> None:
    conn.exec_driver_sql("BEGIN" if conn.get_execution_options().get("semel_reads") else "BEGIN IMMEDIATE")


def parse(url: str) -> URL:
    """The parsed URL. Raises :class:`InvalidRequest` if it is not a URL."""
    try:
        return make_url(url)
    except Exception as error:
        raise InvalidRequest("this is not a URL; examples: sqlite:///semel.db, postgresql://host/name") from error


def missing(extra: str, error: Exception) -> MissingExtra:
    """The error for a driver that is not installed."""
    return MissingExtra(f"{error}; this needs an extra: pip install 'semel[{extra}]'")
