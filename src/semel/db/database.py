"""The :class:`Database` protocol, and SQLite: how a verb (a function of a ``Connection``) is run.

PostgreSQL and the user's own transaction have modules of their own. One body of SQL serves all of them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from sqlalchemy import URL, Connection, Dialect, Engine, TextClause, create_engine, event, exc, make_url

from semel._concurrency.fork import survive_fork
from semel._concurrency.runtime import seconds_left
from semel._concurrency.sync import run_sync
from semel.db.errors import translate_errors
from semel.db.sqlite_file import WatchedFile, check_known, make_private
from semel.errors import InvalidRequest, MissingExtra, StoreUnavailable

P = ParamSpec("P")
R = TypeVar("R")

COMMITS = "semel_commits"
"""The execution option of a connection whose statements commit by themselves."""

abandoned_connections: list[Any] = []
"""Connections of a parent process or of a closed loop: never used again, and never closed from here."""


class Database(Protocol):
    """Runs verbs."""

    async def write(self, work: Callable[Concatenate[Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run ``work`` so that it may write: in one transaction on SQLite, statement by statement on PostgreSQL."""

    async def optimistic_write(
        self, work: Callable[Concatenate[Connection, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """As ``write``, for work that reads first and may not need to write: it waits for no writer until then.

        When another process wrote between its read and its write, the work runs again from the start.
        """

    async def read(self, work: Callable[Concatenate[Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run ``work``, which only reads."""

    async def survey(self, work: Callable[Concatenate[Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """As ``read``, for work that goes through many rows: how it is done best is left to the server."""

    async def write_many(self, work: Callable[Concatenate[Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """As ``write``, for work that goes through many rows, such as a clean-up: planned as ``survey`` is."""

    async def close(self) -> None:
        """Give the connections back."""


class BlockingDatabase:
    """A SQLite file, or an engine of a user's, which is not closed from here; nothing here suspends."""

    def __init__(self, engine: Engine, *, owned: bool = True, file: WatchedFile | None = None) -> None:
        self._engine = engine
        self._owned = owned
        self._file = file
        self._where = str(Path(engine.url.database or "").absolute()) if self._is_sqlite else ""
        self._writing, self._reading = threading.Lock(), threading.Lock()
        self._held: list[threading.Lock] = []
        survive_fork(self)

    def before_fork(self) -> None:
        """No connection to a SQLite file may be open across a fork.

        SQLite notes in the process's memory which locks it has on a file: a child would inherit the notes, not the
        locks. So the fork waits until nobody uses one, but not forever.
        """
        if self._is_sqlite:
            self._held = [lock for lock in (self._writing, self._reading) if lock.acquire(timeout=5)]
            self._engine.dispose()

    def after_fork_in_parent(self) -> None:
        """Connect anew when needed."""
        while self._held:
            self._held.pop().release()

    def after_fork(self) -> None:
        """The parent's connections are the parent's: leave them open there and connect anew here."""
        self._engine.dispose(close=False)
        self._writing, self._reading = threading.Lock(), threading.Lock()
        self._held = []

    @property
    def _is_sqlite(self) -> bool:
        return self._engine.dialect.name == "sqlite"

    async def write(self, work: Callable[Concatenate[Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        # SQLite has one writer: threads queue here instead of spinning on the file's lock.
        with translate_errors(self._where):
            if not self._is_sqlite:
                with self._engine.connect() as conn:
                    return work(conn, *args, **kwargs)
            with self._alone(self._writing), self._engine.begin() as conn:
                return work(conn, *args, **kwargs)

    write_many = write

    @contextmanager
    def _alone(self, lock: threading.Lock) -> Iterator[None]:
        """Hold the lock, which is waited for until the deadline."""
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
    """A blocking database for an event loop, in a thread of its own; for SQLite, whose calls are short."""

    def __init__(self, inner: BlockingDatabase) -> None:
        self._inner = inner
        self.after_fork()
        survive_fork(self)

    def after_fork(self) -> None:
        """Threads do not survive a fork."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="semel-sqlite")
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
            return await asyncio.get_running_loop().run_in_executor(self._thread, call)
        except RuntimeError:
            if not self._closed:
                raise
            return call()  # work that outlived close(), as when a server is told twice to stop: its key is not lost

    async def close(self) -> None:
        self._closed = True
        self._thread.shutdown(wait=False)
        await self._inner.close()


def fetch(conn: Connection, statement: TextClause, values: dict[str, Any]) -> Sequence[Any]:
    """The rows of a hot statement, past SQLAlchemy's result objects, which cost a lone caller as much as the rest.

    Only on connections whose statements commit by themselves; in a user's transaction it is an ordinary execute.
    """
    if not conn.get_execution_options().get(COMMITS):
        return conn.execute(statement, values).all()
    sql, names = _compiled(statement, conn.dialect)
    dbapi: Any = conn.connection.dbapi_connection
    try:
        if names is not None:  # asyncpg wants its values in order, and its statements are cached by itself
            return _fetch_asyncpg(dbapi, sql, [values[name] for name in names])
        cursor = dbapi.cursor()
        cursor.execute(sql, values)
        return list(cursor.fetchall())
    except conn.dialect.loaded_dbapi.Error as error:
        lost = conn.dialect.is_disconnect(error, dbapi, None)
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


def _fetch_asyncpg(dbapi: Any, sql: str, values: list[Any]) -> list[Any]:
    try:
        return list(dbapi.run_async(lambda driver: driver.fetch(sql, *values)))
    except Exception as error:
        dbapi._handle_exception(error)
        raise


_texts: dict[tuple[TextClause, str], tuple[str, list[str] | None]] = {}


def _compiled(statement: TextClause, dialect: Dialect) -> tuple[str, list[str] | None]:
    """The statement as the driver wants it, and the order of its values if it wants them in order."""
    found = _texts.get((statement, dialect.driver))
    if found is None:
        compiled = statement.compile(dialect=dialect)
        found = _texts[statement, dialect.driver] = (str(compiled), compiled.positiontup)
    return found


def sqlite_engine(url: URL) -> Engine:
    """An engine on a file, durable (WAL, synchronous=FULL), in transactions that take the write lock at once."""
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
    """SQLite would make a file that is missing, even one that was there a moment ago, and for everybody to read."""
    check_known(arguments[0])
    if not options.get("uri"):  # which may say that no file is to be made
        make_private(arguments[0])


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute("PRAGMA busy_timeout = 1000")
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.execute("PRAGMA cache_size = -65536")
    cursor.close()


def _begin_sqlite(conn: Connection) -> None:
    conn.exec_driver_sql("BEGIN" if conn.get_execution_options().get("semel_reads") else "BEGIN IMMEDIATE")


def parse(url: str) -> URL:
    """The URL in parts, or a clear error."""
    try:
        return make_url(url)
    except Exception as error:
        raise InvalidRequest("this is not a URL; examples: sqlite:///semel.db, postgresql://host/name") from error


def missing(extra: str, error: Exception) -> MissingExtra:
    """The error for a driver that is not installed."""
    return MissingExtra(f"{error}; this needs an extra: pip install 'semel[{extra}]'")
