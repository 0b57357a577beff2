"""Holds writers of one database between their statement and their commit, so that a race always has the same course.

SQLite needs none of this: it has one writer, from the start of its transaction.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from typing import TypeVar

import psycopg

from support.waiting import PATIENCE, eventually

T = TypeVar("T")

GATE = 7_301_004
"""The advisory lock at which the writers stop. The test holds it."""

STOP = f"""
CREATE FUNCTION stop_at_gate() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  PERFORM pg_advisory_xact_lock_shared({GATE});
  RETURN NEW;
END $$;
CREATE TRIGGER stop_at_gate AFTER INSERT ON semel_reservations EXECUTE FUNCTION stop_at_gate();
CREATE TRIGGER stop_at_gate AFTER INSERT ON semel_runs EXECUTE FUNCTION stop_at_gate();
CREATE TRIGGER stop_at_gate AFTER INSERT ON semel_quotas EXECUTE FUNCTION stop_at_gate();
"""

STOPPED = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND wait_event_type = 'Lock' AND pid <> pg_backend_pid()
"""


@contextmanager
def gate(url: str) -> Iterator[psycopg.Connection]:
    """Stop everybody who writes, until the connection releases its lock."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(STOP)
        try:
            connection.execute(f"SELECT pg_advisory_lock({GATE})")
            yield connection
        finally:
            connection.execute("SELECT pg_advisory_unlock_all()")
            connection.execute("DROP FUNCTION stop_at_gate CASCADE")


def meet_at_gate(url: str, *asks: Callable[[], T]) -> list[T]:
    """Let all ask at once; they go on when each has written, or waits for another. Returns their answers."""
    with ThreadPoolExecutor(len(asks)) as threads, gate(url) as connection:
        asked = [threads.submit(copy_context().run, ask) for ask in asks]

        def settled() -> bool:
            ((stopped,),) = connection.execute(STOPPED)
            return len(asks) <= int(stopped) + sum(each.done() for each in asked)

        eventually(settled, "each of them has written, or waits for the other")
        connection.execute(f"SELECT pg_advisory_unlock({GATE})")
        return [each.result(PATIENCE) for each in asked]
