"""psycopg's connection with a deadline: by itself, it would wait forever for a silent server."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeVar

from psycopg import Connection, OperationalError

from semel._concurrency.runtime import deadline_passed

R = TypeVar("R")


class BoundedConnection(Connection[Any]):
    """A connection that waits until the deadline at most. It is closed then, as the reply may still come."""

    @classmethod
    def _connect_gen(cls, *args: Any, **values: Any) -> Any:
        return _bounded(super()._connect_gen(*args, **values))

    def wait(self, gen: Any, *args: Any, **values: Any) -> Any:
        """Run an exchange with the server, until the deadline at most."""
        try:
            return super().wait(_bounded(gen), *args, **values)
        except OperationalError:
            if deadline_passed():
                self.pgconn.finish()
            raise


def _bounded(steps: Generator[Any, Any, R]) -> Generator[Any, Any, R]:
    """The steps of an exchange, until the deadline. While nothing arrives, psycopg resumes it ten times a second."""
    try:
        wait_for = next(steps)
        while True:
            ready = yield wait_for
            if not ready and deadline_passed():
                raise OperationalError("the server gave no answer in time")
            wait_for = steps.send(ready)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]  # StopIteration.value is Any; it is the exchange's R
