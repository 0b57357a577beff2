"""psycopg's connection with a deadline: by itself, it would wait forever for a silent server.

And one for a pooler that lends a session for one transaction, which leaves nothing in a session.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Self, TypeVar

from psycopg import ClientCursor, Connection, OperationalError, sql
from psycopg.pq import TransactionStatus

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


class _SelfContainedCursor(ClientCursor[Any]):
    """Sends a statement with its values and, where it begins a transaction, the settings, in one message.

    So nothing is prepared: the next message may reach another session of the server.
    """

    def execute(self, query: Any, params: Any = None, **options: Any) -> Self:
        conn: Any = self.connection
        if conn.pgconn.transaction_status != TransactionStatus.IDLE:
            return super().execute(query, params, **options)
        super().execute(conn.preamble + self.mogrify(query, params), **options)
        while self.nextset():  # the statement's own result is the last one
            pass
        return self


class TransactionPooledConnection(BoundedConnection):
    """A connection through a pooler that lends a session for one transaction: each transaction brings its settings."""

    def __init__(self, *args: Any, **values: Any) -> None:
        super().__init__(*args, **values)
        self.cursor_factory = _SelfContainedCursor
        self.prepare_threshold = None
        self.settings: dict[str, str] = {}
        self.preamble = ""

    def plan_with(self, more: dict[str, str]) -> None:
        """From now on, begin every transaction with ``settings`` and these."""
        settings = (
            sql.SQL("set_config({}, {}, true)").format(name, value) for name, value in (self.settings | more).items()
        )
        own = sql.SQL("SELECT {};").format(sql.SQL(", ").join(settings)).as_string(self)
        self.preamble = f"SET TRANSACTION ISOLATION LEVEL READ COMMITTED; {own}"
