"""Breaks the product on purpose, for as long as a block lasts: its SQL on the way to the driver, or its Lua scripts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Barrier, local
from typing import Any
from unittest import mock

import psycopg
import sqlalchemy as sa

from semel.once.stores import redis as redis_store


@contextmanager
def sql(*changes: tuple[str, str], only: str = "") -> Iterator[None]:
    """Replace parts of every statement that contains ``only``. Each part must be found, or nothing would be broken."""
    missing = {old for old, _ in changes}

    def broken(statement: str) -> str:
        if only in statement:
            for old, new in changes:
                if old in statement:
                    missing.discard(old)
                    statement = statement.replace(old, new)
        return statement

    def sqlite(_conn: Any, _cursor: Any, statement: str, values: Any, *_: Any) -> tuple[str, Any]:
        return broken(statement), values

    execute = psycopg.Cursor.execute

    def postgres(self: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        return execute(self, broken(query) if isinstance(query, str) else query, *args, **kwargs)

    event = (sa.Engine, "before_cursor_execute", sqlite)
    sa.event.listen(*event, retval=True)
    try:
        with mock.patch.object(psycopg.Cursor, "execute", postgres):
            yield
    finally:
        sa.event.remove(*event)
    assert not missing, f"no statement contains {missing}: this variant breaks nothing any more"


@contextmanager
def lua(script: str, old: str, new: str) -> Iterator[None]:
    """Replace a part of a script of the Redis store."""
    text = getattr(redis_store, script)
    assert old in text, f"{script} does not contain {old!r}: this variant breaks nothing any more"
    with mock.patch.object(redis_store, script, text.replace(old, new)):
        yield


@contextmanager
def meeting(before: str, parties: int = 2) -> Iterator[None]:
    """Let that many threads wait for each other before their first statement with this text, in PostgreSQL.

    So a race that two of them can lose is lost every time.
    """
    barrier, done = Barrier(parties, timeout=60), local()
    execute = psycopg.Cursor.execute

    def waiting(self: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        if before in str(query) and not hasattr(done, "met"):
            done.met = True
            barrier.wait()
        return execute(self, query, *args, **kwargs)

    with mock.patch.object(psycopg.Cursor, "execute", waiting):
        yield
