"""A verb on an async engine. Apart from the rest, since SQLAlchemy's asyncio part takes long to import."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from sqlalchemy import URL, Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from semel.bridge import HomeLoop
from semel.forks import survive_fork
from semel.sql.engines import COMMITS, KEPT, POSTGRES_SETTINGS, left_behind, missing
from semel.sql.failures import translated

P = ParamSpec("P")
R = TypeVar("R")


class AsyncDatabase:
    """An async engine."""

    def __init__(self, engine: AsyncEngine, *, owned: bool = True) -> None:
        self._engine = engine
        self._owned = owned
        self._kept: list[AsyncConnection] = []
        self._closings = 0
        self._home = HomeLoop(self.after_fork)
        survive_fork(self)

    def after_fork(self) -> None:
        """See BlockingDatabase."""
        left_behind.extend(self._kept)
        self._kept = []
        self._engine.sync_engine.dispose(close=False)

    async def write(self, work: Callable[Concatenate[Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """See Database."""
        self._home.enter()
        with translated():
            before = self._closings
            conn = self._kept.pop() if self._kept else await self._engine.connect()
            try:
                answer = await conn.run_sync(work, *args, **kwargs)
            except Exception:
                await conn.close()
                await self._let_go()  # where one connection broke, the others may have, too
                raise
            except BaseException:  # cancelled: who knows what the connection was about to say
                await conn.invalidate()
                await conn.close()
                raise
            if self._owned and self._closings != before:  # it outlived close(): leave nothing open behind
                await conn.invalidate()
                await conn.close()
            elif self._owned and len(self._kept) < KEPT:
                self._kept.append(conn)
            else:
                await conn.close()
            return answer

    async def _let_go(self) -> None:
        kept, self._kept = self._kept, []
        for conn in kept:
            await conn.close()

    look_and_write = write
    read = write

    async def close(self) -> None:
        """See Database."""
        self._closings += 1
        await self._let_go()
        if self._owned:
            await self._engine.dispose()


def async_postgres_engine(url: URL) -> AsyncEngine:
    """An async engine over asyncpg whose statements commit by themselves. Takes the URL that libpq takes."""
    query = {name: value if isinstance(value, str) else value[-1] for name, value in url.query.items()}
    settings = POSTGRES_SETTINGS | dict(re.findall(r"(?:-c\s*|--)(\w+)=(\S+)", query.pop("options", "")))
    if "application_name" in query:
        settings["application_name"] = query.pop("application_name")
    timeout = float(query.pop("connect_timeout", 5))
    if "sslmode" in query:
        query["ssl"] = query.pop("sslmode")
    try:
        return create_async_engine(
            url.set(drivername="postgresql+asyncpg", query=query),
            isolation_level="AUTOCOMMIT",
            connect_args={"server_settings": settings, "timeout": timeout},
            pool_reset_on_return=None,
            execution_options={COMMITS: True},
            hide_parameters=True,
        )
    except (ImportError, ValueError) as error:  # ValueError: SQLAlchemy's word for greenlet missing
        raise missing("postgres", error) from error
