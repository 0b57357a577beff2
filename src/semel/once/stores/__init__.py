"""Opens a store from what the user gives: a URL, an engine, a client, or a store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, cast

from sqlalchemy import URL
from sqlalchemy import Engine as SqlEngine

from semel._concurrency.listener import Listener
from semel._concurrency.retry import time_for_try
from semel.db import checked_pool, open_database
from semel.db.database import COMMITS, BlockingDatabase, Database, missing, parse
from semel.errors import InvalidRequest
from semel.once.store import Clock, Store
from semel.once.stores.memory import MemoryStore
from semel.once.stores.sqlite import SqliteStore

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

Target: TypeAlias = "str | Store | SqlEngine | AsyncEngine | Any"
"""A URL, a SQLAlchemy engine, a redis-py client, or a store of your own."""

EXAMPLES = "memory://, sqlite:///semel.db, redis://localhost/0, postgresql://user@host/name"


def open_store(
    target: Target,
    *,
    is_async: bool,
    clock: Clock | None = None,
    pool: int | None = None,
    retry_for: float = 5.0,
    prefix: str | None = None,
) -> Store:
    """The store for ``target``, async if ``is_async``. It connects when first used."""
    checked_pool(pool)
    if pool is not None and not isinstance(target, str):
        raise InvalidRequest(
            "pool= is for a store that is opened by its URL; an engine or a client has a pool of its own"
        )
    if type(target).__module__.startswith("redis."):
        return _of_client(target, is_async, clock, prefix)
    if isinstance(target, str) and _scheme(target) in ("redis", "rediss", "unix"):
        return _redis(target, is_async, clock, retry_for, prefix)
    if prefix is not None:
        raise InvalidRequest("prefix= is for a store in Redis: it begins the names of its keys")
    if type(target).__module__.startswith("sqlalchemy."):
        return _of_engine(target, is_async, clock)
    if isinstance(target, str):
        return _of_url(target, is_async, clock, pool)
    if hasattr(target, "claim") and hasattr(target, "purge"):
        return cast("Store", target)
    raise InvalidRequest(
        f"a store is opened by a URL ({EXAMPLES}), an engine or a client, not a {type(target).__name__}"
    )


def _scheme(url: str) -> str:
    return url.split(":", 1)[0].split("+", 1)[0]


def _of_url(target: str, is_async: bool, clock: Clock | None, pool: int | None) -> Store:
    match _scheme(target):
        case "memory":
            return MemoryStore(clock)
        case "sqlite":
            return _sqlite(parse(target), is_async, clock)
        case "postgresql" | "postgres":
            url = parse(target.replace("postgres://", "postgresql://", 1))
            return _postgres(url, is_async, clock, pool)
    raise InvalidRequest(f"{_scheme(target)!r} is not a kind of store; a URL looks like one of: {EXAMPLES}")


def _sqlite(url: URL, is_async: bool, clock: Clock | None) -> Store:
    return SqliteStore(open_database(url, is_async=is_async), clock)


def _postgres(url: URL, is_async: bool, clock: Clock | None, pool: int | None) -> Store:
    from semel.db.postgres import pools_transactions
    from semel.once.stores.postgres import PostgresStore, subscriber

    listener = None if pools_transactions(url) else Listener(subscriber(url))
    return PostgresStore(open_database(url, is_async=is_async, pool=pool), clock, listener)


def _of_engine(engine: Any, is_async: bool, clock: Clock | None) -> Store:
    """The store for a user's engine: shares its PostgreSQL pool, but opens a SQLite file with semel's own settings."""
    from sqlalchemy.ext.asyncio import AsyncEngine

    from semel.db.asyncio import AsyncDatabase
    from semel.db.postgres import LOCK_WAIT
    from semel.once.stores.postgres import PostgresStore, subscriber

    if not isinstance(engine, SqlEngine | AsyncEngine):
        raise InvalidRequest(f"a store is opened by an engine, not by a {type(engine).__name__}; see on() for sessions")
    kind = engine.dialect.name
    if kind == "sqlite":
        return _sqlite(engine.url, is_async, clock)
    if kind != "postgresql":
        raise InvalidRequest(f"keys can be stored in SQLite or PostgreSQL, not in {kind}")
    if is_async != isinstance(engine, AsyncEngine):
        raise InvalidRequest("Once takes a blocking engine (create_engine), AsyncOnce an async one")
    own = engine.execution_options(isolation_level="AUTOCOMMIT", **{COMMITS: True})
    database: Database
    database = AsyncDatabase(own) if isinstance(own, AsyncEngine) else BlockingDatabase(own, owned=False)
    return PostgresStore(database, clock, Listener(subscriber(engine.url)), patience=LOCK_WAIT)


def _redis(url: str, is_async: bool, clock: Clock | None, retry_for: float, prefix: str | None) -> Store:
    try:
        from semel.once.stores import redis
    except ModuleNotFoundError as error:
        raise missing("redis", error) from error
    return redis.open_url(url, is_async, clock, timeout=time_for_try(retry_for, retry_for), prefix=prefix)


def _of_client(client: Any, is_async: bool, clock: Clock | None, prefix: str | None) -> Store:
    from semel.once.stores.redis import RedisStore, subscriber

    if is_async != type(client).__module__.startswith("redis.asyncio"):
        raise InvalidRequest("Once takes a blocking client (redis.Redis), AsyncOnce an async one (redis.asyncio.Redis)")
    listener = None if is_async else Listener(subscriber(client))
    return RedisStore(client, clock, listener=listener, prefix=prefix)


def join(store: Store, session: Any) -> tuple[Store, bool]:
    """The same kind of store inside the user's own transaction, and whether it is async."""
    from semel.db.transaction import UserTransaction
    from semel.once.stores.postgres import PostgresStore

    bound = UserTransaction(session)
    if not isinstance(store, SqliteStore | PostgresStore):
        raise InvalidRequest(
            f"on() needs a store that shares a database with you (SQLite or PostgreSQL), not {type(store).__name__}"
        )
    if bound.dialect != store.dialect:
        raise InvalidRequest(f"the session is on {bound.dialect}, but the keys are in {store.dialect}")
    return store.bound_to(bound), bound.is_async
