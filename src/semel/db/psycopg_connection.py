"""psycopg's connection, which gives up at the deadline: it would wait for ever for a server that says nothing."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeVar

from psycopg import Connection, OperationalError

from semel._concurrency.runtime import deadline_passed

R = TypeVar("R")


class BoundedConnection(Connection[Any]):
    """Waits no longer than the call may take. A connection that was given up is closed: its answer may come yet."""

    @classmethod
    def _connect_gen(cls, *args: Any, **values: Any) -> Any:
        return _bounded(super()._connect_gen(*args, **values))

    def wait(self, gen: Any, *args: Any, **values: Any) -> Any:
        """Exchange something with the server."""
        try:
            return super().wait(_bounded(gen), *args, **values)
        except OperationalError:
            if deadline_passed():
                self.pgconn.finish()
            raise


def _bounded(steps: Generator[Any, Any, R]) -> Generator[Any, Any, R]:
    """The steps of an exchange. Where nothing comes, psycopg asks for the next step ten times a second."""
    try:
        awaited = next(steps)
        while True:
            ready = yield awaited
            if not ready and deadline_passed():
                raise OperationalError("the server gave no answer in time")
            awaited = steps.send(ready)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]  # StopIteration.value is Any; it is the exchange's R
