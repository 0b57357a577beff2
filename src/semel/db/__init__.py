"""Databases: SQLite or PostgreSQL, for threads or an event loop; their schema, migrations and dialects.

A database connects when it is first used.
"""

from __future__ import annotations

from sqlalchemy import URL

from semel._validation import checked_int
from semel.db.database import BlockingDatabase, Database, ThreadedDatabase, missing, sqlite_engine
from semel.db.postgres import POOL, PostgresDatabase, pools_transactions, postgres_engine
from semel.db.sqlite_file import WatchedFile


def open_database(url: URL, *, is_async: bool, pool: int | None = None) -> Database:
    """The SQLite or PostgreSQL database, with semel's own settings. ``pool``: the most connections to PostgreSQL."""
    size = checked_pool(pool)
    if url.get_backend_name() == "sqlite":
        engine = sqlite_engine(url)
        database = BlockingDatabase(engine, file=WatchedFile(engine))
        return ThreadedDatabase(database) if is_async else database
    if not is_async:
        return PostgresDatabase(postgres_engine(url), size)
    if pools_transactions(url):  # asyncpg prepares every statement, in a message of its own
        return ThreadedDatabase(PostgresDatabase(postgres_engine(url), size), size)
    try:
        from semel.db.asyncio import AsyncPostgresDatabase
    except ImportError as error:  # SQLAlchemy raises it if greenlet is missing
        raise missing("postgres", error) from error
    return AsyncPostgresDatabase(url, size)


def checked_pool(pool: object) -> int:
    """The number of connections, or the default. Raises :class:`InvalidRequest` if it is not valid."""
    return POOL if pool is None else checked_int("pool", pool, 1, None)
