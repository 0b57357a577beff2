"""Reads rows as a database client does, on one connection for each database, which stays open between two tries.

The driver is asked without SQLAlchemy, which would take longer than the database.
"""

import sqlite3
from collections import namedtuple
from functools import cache
from typing import Any

import psycopg
from psycopg.rows import namedtuple_row

from crash.points import Place

_connections: dict[str, Any] = {}


def read_all(place: Place, *statements: str, **parameters: Any) -> list[list[Any]]:
    """The rows of several queries, each as named tuples; a query names its parameters as ``:name``."""
    if place.kind == "sqlite":
        file = _connections.get(place.url) or _opened_file(place.url)
        return [_named(file.execute(statement, parameters)) for statement in statements]
    server = _connections.get(place.url) or _connected(place.url)
    with server.pipeline():
        return [cursor.fetchall() for cursor in [_asked(server, each, parameters) for each in statements]]


def read_rows(place: Place, statement: str, **parameters: Any) -> list[Any]:
    """The rows of one query."""
    return read_all(place, statement, **parameters)[0]


def _named(cursor: sqlite3.Cursor) -> list[Any]:
    row = _row_type(*(column[0] for column in cursor.description))
    return [row(*each) for each in cursor.fetchall()]


def _asked(server: Any, statement: str, parameters: dict[str, Any]) -> Any:
    text = statement.replace("%", "%%")
    for name in parameters:
        text = text.replace(f":{name}", f"%({name})s")
    return server.execute(text, parameters, prepare=True)


@cache
def _row_type(*names: str) -> Any:
    return namedtuple("Row", names, rename=True)  # noqa: PYI024 -- as psycopg makes them


def _opened_file(url: str) -> sqlite3.Connection:
    file = _connections[url] = sqlite3.Connection(url.removeprefix("sqlite:///"), isolation_level=None)
    return file


def _connected(url: str) -> psycopg.Connection[Any]:
    server = _connections[url] = psycopg.connect(url, autocommit=True, row_factory=namedtuple_row)
    server.execute("SET plan_cache_mode = force_generic_plan")
    return server


def disconnect() -> None:
    """Close the connections."""
    for connection in _connections.values():
        connection.close()
    _connections.clear()
