"""From a URL to a database, for blocking callers or for an event loop. Connects when first used."""

from __future__ import annotations

from sqlalchemy import URL

from semel.errors import InvalidRequest
from semel.sql import engines
from semel.sql.postgres import POOL, PostgresDatabase, postgres_engine
from semel.sql.sqlite_file import WatchedFile


def open_database(url: URL, *, awaited: bool, pool: int | None = None) -> engines.Database:
    """SQLite or PostgreSQL, with semel's own settings. ``pool``: connections to a PostgreSQL, at the most."""
    size = checked_pool(pool)
    if url.get_backend_name() == "sqlite":
        engine = engines.sqlite_engine(url)
        database = engines.BlockingDatabase(engine, file=WatchedFile(engine))
        return engines.ThreadedDatabase(database) if awaited else database
    if not awaited:
        return PostgresDatabase(postgres_engine(url), size)
    try:
        from semel.sql.awaited import AsyncPostgresDatabase
    except ImportError as error:  # SQLAlchemy's word for greenlet missing
        raise engines.missing("postgres", error) from error
    return AsyncPostgresDatabase(url, size)


def checked_pool(pool: object) -> int:
    """The number of connections, or the default."""
    if pool is None:
        return POOL
    if isinstance(pool, bool) or not isinstance(pool, int) or pool < 1:
        raise InvalidRequest(f"pool is the number of connections, 1 or more, not {pool!r}")
    return pool
