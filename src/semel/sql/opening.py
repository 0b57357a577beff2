"""From a URL to a database, for blocking callers or for an event loop. Connects when first used."""

from __future__ import annotations

from sqlalchemy import URL

from semel.sql import engines
from semel.sql.sqlite_file import WatchedFile


def open_database(url: URL, *, awaited: bool) -> engines.Database:
    """SQLite or PostgreSQL, with semel's own settings."""
    if url.get_backend_name() == "sqlite":
        engine = engines.sqlite_engine(url)
        database = engines.BlockingDatabase(engine, file=WatchedFile(engine))
        return engines.ThreadedDatabase(database) if awaited else database
    if not awaited:
        return engines.BlockingDatabase(engines.postgres_engine(url))
    try:
        from semel.sql.awaited import AsyncDatabase, async_postgres_engine
    except ImportError as error:  # SQLAlchemy's word for greenlet missing
        raise engines.missing("postgres", error) from error
    return AsyncDatabase(async_postgres_engine(url))
