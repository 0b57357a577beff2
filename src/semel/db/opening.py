"""From a URL to a database, for blocking callers or for an event loop. Connects when first used."""

from __future__ import annotations

from sqlalchemy import URL

from semel._validation import checked_int
from semel.db import blocking
from semel.db.postgres import POOL, PostgresDatabase, postgres_engine
from semel.db.sqlite_file import WatchedFile


def open_database(url: URL, *, awaited: bool, pool: int | None = None) -> blocking.Database:
    """SQLite or PostgreSQL, with semel's own settings. ``pool``: connections to a PostgreSQL, at the most."""
    size = checked_pool(pool)
    if url.get_backend_name() == "sqlite":
        engine = blocking.sqlite_engine(url)
        database = blocking.BlockingDatabase(engine, file=WatchedFile(engine))
        return blocking.ThreadedDatabase(database) if awaited else database
    if not awaited:
        return PostgresDatabase(postgres_engine(url), size)
    try:
        from semel.db.asyncio import AsyncPostgresDatabase
    except ImportError as error:  # SQLAlchemy's word for greenlet missing
        raise blocking.missing("postgres", error) from error
    return AsyncPostgresDatabase(url, size)


def checked_pool(pool: object) -> int:
    """The number of connections, or the default."""
    return POOL if pool is None else checked_int("pool", pool, 1, None)
