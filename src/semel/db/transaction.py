"""Verbs inside the user's own transaction. A separate module, since SQLAlchemy's ORM is slow to import."""

from __future__ import annotations

from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

from semel.db.errors import translate_errors
from semel.errors import InvalidRequest

P = ParamSpec("P")
R = TypeVar("R")


class UserTransaction:
    """The user's own connection or session: verbs are committed or rolled back with its transaction."""

    def __init__(self, conn: Connection | Session | AsyncConnection | AsyncSession) -> None:
        if not isinstance(conn, Connection | Session | AsyncConnection | AsyncSession):
            raise InvalidRequest(f"on() takes a SQLAlchemy connection or session, not a {type(conn).__name__}")
        self._conn = conn

    @property
    def is_async(self) -> bool:
        """Whether the connection or session is async."""
        return isinstance(self._conn, AsyncConnection | AsyncSession)

    @property
    def dialect(self) -> str:
        """The name of the database's dialect."""
        bind = self._conn.get_bind() if isinstance(self._conn, Session | AsyncSession) else self._conn
        return bind.dialect.name

    async def write(self, work: Callable[Concatenate[Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        with translate_errors():
            conn = self._conn
            if isinstance(conn, AsyncSession):
                conn = await conn.connection()
            if isinstance(conn, AsyncConnection):
                return await conn.run_sync(work, *args, **kwargs)
            return work(conn.connection() if isinstance(conn, Session) else conn, *args, **kwargs)

    optimistic_write = write
    read = write
    survey = write
    write_many = write

    async def close(self) -> None:
        """Nothing to close: the connection is the user's."""
