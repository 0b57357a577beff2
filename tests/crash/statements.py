"""Lets a fault happen at a chosen statement that this process sends to a SQLite file."""

import os
import signal
import sqlite3
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from crash.wire import Fault

T = TypeVar("T")


class Counter:
    """Counts the statements, and lets the fault happen.

    If the process survives it, ``happened`` is true, and ``settled`` tells whether no transaction was open then.
    """

    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        self._count = 0
        self.counts = False
        self.happened = False
        self.settled = True

    def execute(self, conn: sqlite3.Connection, statement: Callable[[], T]) -> T:
        self._count += self.counts
        if not self.counts or self._count != self._fault.number:
            return statement()
        if self._fault.kind == "dies before":
            os.kill(os.getpid(), signal.SIGKILL)
        answer = statement()
        if self._fault.kind == "dies after":
            os.kill(os.getpid(), signal.SIGKILL)
        self.happened, self.settled = True, not conn.in_transaction
        del answer
        raise sqlite3.OperationalError("disk I/O error")


class CountingCursor(sqlite3.Cursor):
    """Its statements are counted by ``counter``."""

    counter: Counter

    def execute(self, *arguments: Any) -> Any:
        return self.counter.execute(self.connection, lambda: super(CountingCursor, self).execute(*arguments))

    def executemany(self, *arguments: Any) -> Any:
        return self.counter.execute(self.connection, lambda: super(CountingCursor, self).executemany(*arguments))

    def executescript(self, *arguments: Any) -> Any:
        return self.counter.execute(self.connection, lambda: super(CountingCursor, self).executescript(*arguments))


class CountingConnection(sqlite3.Connection):
    """Its statements are counted, whichever way they are sent."""

    def cursor(self, factory: Any = CountingCursor) -> Any:
        return super().cursor(factory)

    def execute(self, *arguments: Any) -> Any:
        return self.cursor().execute(*arguments)

    def executemany(self, *arguments: Any) -> Any:
        return self.cursor().executemany(*arguments)

    def executescript(self, *arguments: Any) -> Any:
        return self.cursor().executescript(*arguments)

    def commit(self) -> None:
        if self.in_transaction:  # else SQLite is sent nothing
            CountingCursor.counter.execute(self, super().commit)

    def rollback(self) -> None:
        if self.in_transaction:
            CountingCursor.counter.execute(self, super().rollback)

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> Literal[False]:
        (self.commit if kind is None else self.rollback)()
        return False


def count_statements(fault: Fault) -> Counter:
    """Count every statement of every connection that this process opens from now on."""
    CountingCursor.counter = Counter(fault)
    connect = sqlite3.dbapi2.connect

    def counted(*arguments: Any, **options: Any) -> sqlite3.Connection:
        return connect(*arguments, **{**options, "factory": CountingConnection})

    sqlite3.dbapi2.connect = sqlite3.connect = counted  # type: ignore[assignment]
    return CountingCursor.counter
