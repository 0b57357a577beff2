"""Lets a fault happen at a chosen statement that this process sends to a SQLite file."""

import os
import signal
import sqlite3
from collections.abc import Callable
from typing import Any, TypeVar

from crash.wire import Fault

T = TypeVar("T")


class Counter:
    """Counts the statements, and lets the fault happen; ``happened`` if the process survived it."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        self._count = 0
        self.counts = False
        self.happened = False

    def execute(self, statement: Callable[[], T]) -> T:
        self._count += self.counts
        if not self.counts or self._count != self._fault.number:
            return statement()
        if self._fault.kind == "dies before":
            os.kill(os.getpid(), signal.SIGKILL)
        answer = statement()
        if self._fault.kind == "dies after":
            os.kill(os.getpid(), signal.SIGKILL)
        self.happened = True
        del answer
        raise sqlite3.OperationalError("disk I/O error")


def count_statements(fault: Fault) -> Counter:
    """Count every statement of every connection that this process opens from now on."""
    counter = Counter(fault)

    class CountingCursor(sqlite3.Cursor):
        def execute(self, *arguments: Any) -> Any:
            return counter.execute(lambda: super(CountingCursor, self).execute(*arguments))

        def executemany(self, *arguments: Any) -> Any:
            return counter.execute(lambda: super(CountingCursor, self).executemany(*arguments))

        def executescript(self, *arguments: Any) -> Any:
            return counter.execute(lambda: super(CountingCursor, self).executescript(*arguments))

    class CountingConnection(sqlite3.Connection):
        def cursor(self, factory: Any = CountingCursor) -> Any:
            return super().cursor(factory)

        def commit(self) -> None:
            if self.in_transaction:  # else SQLite is sent nothing
                counter.execute(super().commit)

        def rollback(self) -> None:
            if self.in_transaction:
                counter.execute(super().rollback)

    connect = sqlite3.dbapi2.connect

    def counted(*arguments: Any, **options: Any) -> sqlite3.Connection:
        return connect(*arguments, **{**options, "factory": CountingConnection})

    sqlite3.dbapi2.connect = sqlite3.connect = counted  # type: ignore[assignment]
    return counter
