"""One statement for both databases: its text is rendered once for each, from the few expressions that differ.

A statement takes a whole batch: arrays on PostgreSQL, JSON text on SQLite. On PostgreSQL an array of one element stands
for a column that is the same in every row; only the first column, which names the row, has all its elements. On SQLite
the JSON has the first column alone if all the others are the same in every row. The statement's time is
``:now``: on PostgreSQL the injected clock's, or None for the database's own; on SQLite the injected clock's, or the
host's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec import Struct
from sqlalchemy import Connection, TextClause, text

from semel.db.database import COMMITS, fetch, send
from semel.types import Actor

F = TypeVar("F", bound=Callable[..., Any])


class Dialect(Protocol):
    """The expressions in which PostgreSQL and SQLite differ."""

    now: str
    """The time in microseconds, when the statement began."""
    clock: str
    """The time in microseconds, after the statement waited for a lock."""
    patience: str
    """A column that makes the rest of the transaction wait longer for locks than a single statement does."""
    writes_in_with: bool
    """Whether a CTE may write."""

    def batch(self, columns: Mapping[str, str]) -> str:
        """The batch as a table ``b`` with these columns (name: PostgreSQL type)."""

    def is_in(self, column: str, name: str, kind: str = "text") -> str:
        """True if the column is in the list ``:name``."""

    def as_text(self, column: str) -> str:
        """An id as text."""

    def identity(self, column: str) -> str:
        """Text as an id."""

    def digest(self, column: str) -> str:
        """A digest (see ``schema.Digest``), given in hexadecimal digits."""

    def digits(self, column: str) -> str:
        """The hexadecimal digits of a digest."""

    def size(self, column: str) -> str:
        """How many bytes a text has in UTF-8."""

    def sparse(self, value: str, usual: str) -> str:
        """The value as it is stored: on PostgreSQL, where a NULL takes no room, NULL for the usual one."""

    def locking(self, table: str, *, skip: bool) -> str:
        """Lock the selected rows; with ``skip``, leave out locked ones. Empty on SQLite, whose one writer locks all."""

    def returning(self, columns: str) -> str:
        """Columns of the changed table ``k``, as RETURNING names them."""

    def advisory_lock(self, name: str, number: int) -> str:
        """Waits until no other transaction has this lock, of a number and the text ``:name``, and keeps it until the
        transaction ends. SQLite has one writer, and no locks.
        """

    def joined(self, column: str) -> str:
        """The texts of a column, one after another; NULL if there is none."""

    def total(self, column: str, where: str) -> str:
        """The sum of an integer column over the rows for which ``where`` is true; 0 for no rows. Cannot overflow."""

    def capped(self, number: str) -> str:
        """A number that may need more than 64 bits as an integer of 64 bits, the greatest if it does."""

    def unindexed(self, column: str) -> str:
        """The text column, without the use of its index: with the statistics of a table that was just empty, both
        databases would scan all RUNNING rows for each id instead of looking the id up.
        """


class Postgres:
    """The :class:`Dialect` of PostgreSQL."""

    now = "(SELECT coalesce(CAST(:now AS bigint), (extract(epoch FROM statement_timestamp()) * 1000000)::bigint))"
    clock = now.replace("statement_timestamp", "clock_timestamp").removeprefix("(SELECT ").removesuffix(")")
    patience = "set_config('lock_timeout', '5s', true)"
    writes_in_with = True

    def batch(self, columns: Mapping[str, str]) -> str:
        arrays = {name: f"CAST(:{name} AS {kind}[])" for name, kind in columns.items()}
        first, *others = columns
        picks = [f"CASE cardinality({arrays[name]}) WHEN 1 THEN ({arrays[name]})[1] ELSE {name} END" for name in others]
        named = ", ".join([first, *(f"{pick} AS {name}" for pick, name in zip(picks, others, strict=True))])
        return f"(SELECT {named} FROM unnest({', '.join(arrays.values())}) AS a({', '.join(columns)})) AS b"

    def is_in(self, column: str, name: str, kind: str = "text") -> str:
        return f"{column} = ANY(CAST(:{name} AS {kind}[]))"

    def as_text(self, column: str) -> str:
        return f"CAST({column} AS text)"

    def identity(self, column: str) -> str:
        return f"CAST({column} AS uuid)"

    def digest(self, column: str) -> str:
        return f"decode({column}, 'hex')"

    def digits(self, column: str) -> str:
        return f"encode({column}, 'hex')"

    def size(self, column: str) -> str:
        return f"octet_length({column})"

    def sparse(self, value: str, usual: str) -> str:
        return f"nullif({value}, {usual})"

    def locking(self, table: str, *, skip: bool) -> str:
        return f"FOR UPDATE OF {table}{' SKIP LOCKED' if skip else ''}"

    def returning(self, columns: str) -> str:
        return ", ".join(f"k.{name}" for name in columns.split(", "))

    def joined(self, column: str) -> str:
        return f"string_agg({column}, '')"

    def total(self, column: str, where: str) -> str:
        # PostgreSQL's sum of bigints is a numeric.
        return f"coalesce(sum({column}) FILTER (WHERE {where}), 0)"

    def capped(self, number: str) -> str:
        return f"CAST(least({number}, 9223372036854775807) AS bigint)"

    def advisory_lock(self, name: str, number: int) -> str:
        return f"pg_advisory_xact_lock(hashtextextended(CAST(:{name} AS text), {number}))"

    def unindexed(self, column: str) -> str:
        return f"({column} || '')"


class Sqlite:
    """The :class:`Dialect` of SQLite."""

    now = clock = "CAST(:now AS INTEGER)"
    patience = "NULL"
    writes_in_with = False

    def batch(self, columns: Mapping[str, str]) -> str:
        first, *others = columns
        picks = [f"CASE WHEN :alike THEN value ELSE json_extract(value, '$[0]') END AS {first}"]
        for place, name in enumerate(others, 1):
            picks.append(f"CASE WHEN :alike THEN :{name} ELSE json_extract(value, '$[{place}]') END AS {name}")
        return f"(SELECT {', '.join(picks)} FROM json_each(:batch)) AS b"

    def is_in(self, column: str, name: str, kind: str = "text") -> str:  # noqa: ARG002 -- SQLite needs no types
        return f"{column} IN (SELECT value FROM json_each(:{name}))"

    def as_text(self, column: str) -> str:
        return column

    identity = digest = digits = as_text

    def size(self, column: str) -> str:
        return f"length(CAST({column} AS BLOB))"

    def sparse(self, value: str, usual: str) -> str:  # noqa: ARG002 -- its columns are NOT NULL, and 0 and 1 take no room
        return value

    def locking(self, table: str, *, skip: bool) -> str:  # noqa: ARG002 -- nothing to lock
        return ""

    def returning(self, columns: str) -> str:
        return columns

    def joined(self, column: str) -> str:
        return f"group_concat({column}, '')"

    def total(self, column: str, where: str) -> str:
        # sum() raises if 64 bits are too few; total() is a float.
        return f"total({column}) FILTER (WHERE {where})"

    def capped(self, number: str) -> str:
        return f"CAST({number} AS INTEGER)"

    def advisory_lock(self, name: str, number: int) -> str:  # noqa: ARG002
        return "NULL"

    def unindexed(self, column: str) -> str:
        return f"+{column}"


_DIALECTS: dict[str, Dialect] = {"postgresql": Postgres(), "sqlite": Sqlite()}


class StatementContext(Struct, frozen=True):
    """What every statement needs: the time, whether its events are published, and who acts."""

    time_us: int | None = None
    publish: bool = False
    clock: Callable[[], int] | None = None
    by: Actor | None = None
    """Who acts: what they change is written to the audit log. None if no person does."""

    @property
    def now(self) -> int | None:
        """The time of a statement that is sent now, after it has waited for its lock; None: the database's own."""
        return self.time_us if self.clock is None else self.clock()


class Statement:
    """A statement, rendered for a dialect when it is first run there."""

    def __init__(self, render: Callable[[Dialect], str], columns: Mapping[str, str] | None = None) -> None:
        self._render = render
        self._columns = columns
        self._texts: dict[str, TextClause] = {}

    def rows(self, conn: Connection, batch: Iterable[Sequence[Any]] | None = None, **values: Any) -> Sequence[Any]:
        """Run it and return its rows."""
        return fetch(conn, self.text(conn), self._values(conn, batch, values))

    def count(self, conn: Connection, batch: Iterable[Sequence[Any]] | None = None, **values: Any) -> int:
        """Run it and return the number of changed rows."""
        changed: int = conn.execute(self.text(conn), self._values(conn, batch, values)).rowcount
        return changed

    def text(self, conn: Connection) -> TextClause:
        """The statement in the connection's dialect."""
        name = conn.dialect.name
        found = self._texts.get(name)
        if found is None:
            found = self._texts[name] = text(self._render(_DIALECTS[name]))
        return found

    def _values(
        self, conn: Connection, batch: Iterable[Sequence[Any]] | None, values: dict[str, Any]
    ) -> dict[str, Any]:
        sqlite = conn.dialect.name == "sqlite"
        if sqlite:
            values = {name: _json(value) if isinstance(value, list) else value for name, value in values.items()}
        if self._columns is None or batch is None:
            return values
        if sqlite:
            return {**values, **_in_json(list(batch), list(self._columns)[1:])}
        first, *others = zip(*batch, strict=True)
        arrays = zip(self._columns, [list(first), *map(_shortest, others)], strict=True)
        return {**values, **dict(arrays)}


def _shortest(array: tuple[Any, ...]) -> list[Any]:
    """The array, or one element if all are equal: drivers and servers take long over many."""
    return list(array[:1] if array.count(array[0]) == len(array) else array)


def _in_json(batch: list[Sequence[Any]], others: list[str]) -> dict[str, Any]:
    """The batch as values of a statement of SQLite, which takes longer to read an array than all the rest of a row."""
    shared = tuple(batch[0][1:]) if batch else ()
    if batch and all(tuple(row[1:]) == shared for row in batch):
        bound = {
            name: value if type(value) in _BINDABLE else _plain(value)
            for name, value in zip(others, shared, strict=True)
        }
        return {**bound, "alike": True, "batch": _json([row[0] for row in batch])}
    return {"alike": False, "batch": _json(batch), **dict.fromkeys(others)}


def _json(value: list[Any]) -> str:
    return _encoder.encode(value).decode()


def _plain(value: object) -> object:
    """The text or number of a subclass, such as numpy's floats: msgspec encodes only the types themselves."""
    for kind, plain in _PLAIN.items():
        if isinstance(value, kind):
            return plain(value)
    raise TypeError(f"a statement cannot take a {type(value).__name__}")


_PLAIN: dict[type, Callable[[Any], object]] = {str: str.__str__, int: int.__int__, float: float.__float__}
_BINDABLE = {*_PLAIN, bool, type(None)}
_encoder = msgspec.json.Encoder(enc_hook=_plain)


def hot(verb: F) -> F:
    """Mark a function that works on a few rows, found by an index, for every run or every few seconds.

    Its statements are planned once, commit one by one, and time out within seconds (see :mod:`semel.db.postgres`).
    """
    verb.semel_hot = True  # type: ignore[attr-defined]
    return verb


def is_hot(verb: Callable[..., Any]) -> bool:
    """Whether the function is marked as :func:`hot`."""
    return getattr(verb, "semel_hot", False)


@contextmanager
def transaction(conn: Connection) -> Iterator[set[str]]:
    """A transaction, on a connection whose statements otherwise commit by themselves.

    On SQLite, and in a user's own transaction, there is one already, and this begins none. It yields a set for channels
    of PostgreSQL that are notified behind the commit, in the same message: a NOTIFY within the transaction holds a lock
    during the commit, so that those of several connections wait for each other.
    """
    channels: set[str] = set()
    if not conn.get_execution_options().get(COMMITS):
        yield channels
        for each in channels if conn.dialect.name == "postgresql" else ():
            conn.execute(text(f"NOTIFY {each}"))
        return
    conn.execute(_BEGIN)
    try:
        yield channels
    except Exception:  # after a cancellation the connection is discarded, without waiting for a silent server
        if not conn.invalidated:
            conn.execute(_ROLLBACK)
        raise
    if channels:
        send(conn, "; ".join(["COMMIT", *(f"NOTIFY {each}" for each in sorted(channels))]))
    else:
        conn.execute(_COMMIT)


_BEGIN, _COMMIT, _ROLLBACK = text("BEGIN ISOLATION LEVEL READ COMMITTED"), text("COMMIT"), text("ROLLBACK")
