"""Databases for event loops. A separate module, since SQLAlchemy's asyncio part is slow to import."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import URL, Connection, NullPool, event
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from semel._concurrency.fork import survive_fork
from semel._concurrency.runtime import deadline_passed
from semel._concurrency.sync import LoopGuard, PerLoop, close_all
from semel.db.database import COMMITS, abandoned_connections, missing
from semel.db.errors import DATABASE_ERRORS, translate, translate_errors
from semel.db.postgres import (
    KEEPALIVE,
    POOL,
    SETTINGS,
    IdleConnections,
    PooledConnection,
    is_left_open,
    is_lost,
    plan,
    raise_as_lost,
    settings_in,
)

P = ParamSpec("P")
R = TypeVar("R")


class AsyncDatabase:
    """A user's async engine. Its pool belongs to one event loop at a time, and is not closed here."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._loop_guard = LoopGuard(self.after_fork)
        survive_fork(self)

    def after_fork(self) -> None:
        """The connections belong to the parent: leave them open, and reconnect in the child."""
        self._engine.sync_engine.dispose(close=False)

    async def write(self, work: Callable[Concatenate[Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        self._loop_guard.check()
        with translate_errors():
            conn = await self._engine.connect()
            try:
                answer = await conn.run_sync(work, *args, **kwargs)
            except Exception:
                await conn.close()
                raise
            except BaseException:  # cancelled: the connection may be in the middle of a reply
                await _discard(conn)
                raise
            await conn.close()
            return answer

    optimistic_write = write
    read = write
    survey = write
    write_many = write

    async def close(self) -> None:
        """Nothing to close: the engine is the user's."""


class _LoopPool:
    """The connections of one event loop, and its own engine, since an engine has locks."""

    def __init__(self, engine: AsyncEngine, size: int) -> None:
        self.engine = engine
        self.idle: IdleConnections[AsyncConnection] = IdleConnections()
        self.slots = asyncio.Semaphore(size)


class AsyncPostgresDatabase:
    """PostgreSQL over asyncpg. The tasks of an event loop share a few connections, which are closed when it ends."""

    def __init__(self, url: URL, pool: int = POOL) -> None:
        async_postgres_engine(url)  # raises at once if the URL or a driver cannot be used
        self._pools = PerLoop(
            lambda: _LoopPool(async_postgres_engine(url), pool), end=self._close, abandon=self._abandon
        )

    async def write(self, work: Callable[Concatenate[Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        return await self._run(True, work, *args, **kwargs)

    optimistic_write = write
    read = write

    async def survey(self, work: Callable[Concatenate[Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        return await self._run(False, work, *args, **kwargs)

    write_many = survey

    async def _run(
        self, hot: bool, work: Callable[Concatenate[Connection, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        pool = self._pools.here()
        await pool.slots.acquire()
        try:
            pooled = pool.idle.take(hot=hot)
            if pooled is None or pooled.hot is not hot:
                pooled = await self._prepare(pool, pooled, hot)
            try:
                answer = await pooled.conn.run_sync(work, *args, **kwargs)
            except Exception as error:
                await self._after_error(pool, pooled, error)
                raise
            except BaseException:  # cancelled: the connection may be in the middle of a reply
                await self._drop(pool, pooled)
                raise
            if not pool.idle.put(pooled):
                await _discard(pooled.conn)
        except DATABASE_ERRORS as error:
            raise translate(error) from error
        else:
            return answer
        finally:
            pool.slots.release()

    async def _prepare(
        self, pool: _LoopPool, pooled: PooledConnection[AsyncConnection] | None, hot: bool
    ) -> PooledConnection[AsyncConnection]:
        if pooled is None:
            generation = pool.idle.generation
            pooled = PooledConnection(await pool.engine.connect(), generation)
        if pooled.hot is not hot:
            try:
                await pooled.conn.run_sync(plan, hot=hot)
            except BaseException:
                await self._drop(pool, pooled)
                raise
            pooled.hot = hot
        return pooled

    async def _after_error(self, pool: _LoopPool, pooled: PooledConnection[AsyncConnection], error: Exception) -> None:
        if await pooled.conn.run_sync(is_lost):
            await self._discard_all(pool, pooled)
            raise_as_lost(error)
        elif await pooled.conn.run_sync(is_left_open):
            await self._discard_all(pool, pooled)
        elif not pool.idle.put(pooled):
            await _discard(pooled.conn)

    async def _drop(self, pool: _LoopPool, pooled: PooledConnection[AsyncConnection]) -> None:
        """Close a cancelled call's connection; the idle ones, too, if its deadline passed: the server is silent."""
        if deadline_passed():
            await self._discard_all(pool, pooled)
        else:
            await _discard(pooled.conn)

    async def _discard_all(self, pool: _LoopPool, pooled: PooledConnection[AsyncConnection]) -> None:
        """Close a connection that broke or fell silent, and all idle ones, which may have, too."""
        for conn in (pooled.conn, *pool.idle.clear()):
            await _discard(conn)

    async def close(self) -> None:
        """Close the connections of this event loop. Other loops close theirs when they end."""
        await self._pools.end()

    async def _close(self, pool: _LoopPool) -> None:
        for conn in pool.idle.clear():
            await _discard(conn)

    def _abandon(self, pool: _LoopPool) -> None:
        """Close the sockets of a closed event loop, in which nothing can be awaited any more."""
        for conn in pool.idle.clear():
            raw: Any = conn.sync_connection
            abandoned_connections.append(conn)
            if raw is not None:
                close_all(raw.connection.driver_connection._transport)


async def _discard(conn: AsyncConnection) -> None:
    """Close without a message to the server, which may be silent."""
    with suppress(Exception):  # it was closed already
        raw: Any = await conn.get_raw_connection()
        raw.driver_connection.terminate()
    await conn.invalidate()
    await conn.close()


def async_postgres_engine(url: URL) -> AsyncEngine:
    """An async engine over asyncpg whose statements commit by themselves. Accepts libpq's URL parameters."""
    query = {name: value if isinstance(value, str) else value[-1] for name, value in url.query.items()}
    query.pop("pool_mode", None)  # 'session': see open_database
    settings = SETTINGS | settings_in(query.pop("options", ""))
    if "application_name" in query:
        settings["application_name"] = query.pop("application_name")
    timeout = float(query.pop("connect_timeout", 5))
    if "sslmode" in query:
        query["ssl"] = query.pop("sslmode")
    try:
        engine = create_async_engine(
            url.set(drivername="postgresql+asyncpg", query=query),
            poolclass=NullPool,
            isolation_level="AUTOCOMMIT",
            connect_args={"server_settings": settings, "timeout": timeout},
            pool_reset_on_return=None,
            execution_options={COMMITS: True},
            hide_parameters=True,
        )
    except (ImportError, ValueError) as error:  # ValueError: SQLAlchemy raises it if greenlet is missing
        raise missing("postgres", error) from error
    event.listen(engine.sync_engine, "connect", _keep_alive)
    event.listen(engine.sync_engine, "invalidate", _terminate)
    return engine


_OPTIONS = {
    "TCP_KEEPIDLE": KEEPALIVE["keepalives_idle"],
    "TCP_KEEPINTVL": KEEPALIVE["keepalives_interval"],
    "TCP_KEEPCNT": KEEPALIVE["keepalives_count"],
    "TCP_USER_TIMEOUT": KEEPALIVE["tcp_user_timeout"],
}


def _terminate(connection: Any, _record: Any, _error: Any) -> None:
    """Close at once after a cancelled call: SQLAlchemy would wait seconds for the server."""
    connection.driver_connection.terminate()


def _keep_alive(connection: Any, _record: Any) -> None:
    """Set the TCP keepalives that libpq sets itself; asyncpg has no option for them."""
    sock = connection.driver_connection._transport.get_extra_info("socket")
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _OPTIONS.items():
        if hasattr(socket, name):  # not every system has all of them
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
