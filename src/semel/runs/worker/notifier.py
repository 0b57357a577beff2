"""Wakes a worker when there may be new runs: by PostgreSQL's notifications, or by watching SQLite's WAL file.

Nothing depends on it: the next poll finds the runs anyway, only later.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable

from sqlalchemy import URL

from semel._concurrency.listener import PATIENCE, Listener
from semel._concurrency.periodic import repeat
from semel._concurrency.retry import Outage
from semel.db.postgres import pools_transactions
from semel.runs.store.transitions import CHANNEL

_log = logging.getLogger("semel.listener")

WAL_POLL = 0.01
"""Seconds between two checks of the WAL file's time and size; a check takes a microsecond and no query."""

CHECK_EVERY = 20.0
"""Seconds without a notification after which the connection is checked. Until then the worker's polls find runs."""


class ChangeNotifier:
    """Calls ``on_change`` in the event loop when the database may have changed."""

    def __init__(self, url: URL, on_change: Callable[[], None], *, poll: float, database: Outage) -> None:
        """``poll``: how often the worker polls anyway; ``database``: the outage of the database as a whole."""
        self._url = url
        self._on_change = on_change
        self._outage = Outage(
            _log,
            "the connection on which PostgreSQL announces runs",
            f"a new run starts when this worker next looks for one, every {poll:g} s, instead of at once",
            patience=PATIENCE,
            within=database,
        )
        self._listener: Listener | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start watching."""
        loop = asyncio.get_running_loop()
        if pools_transactions(self._url):
            return  # nobody can listen: the worker polls more often
        if self._url.get_backend_name() == "postgresql":
            from semel.once.stores.postgres import subscriber

            self._listener = Listener(
                subscriber(self._url, first_payload="", check_every=CHECK_EVERY),
                outage=self._outage,
                on_failure=lambda: _call(loop, self._on_change),
            )
            self._listener.start(CHANNEL, lambda _: _call(loop, self._on_change))
        else:
            self._wal = f"{self._url.database}-wal"
            self._last = _mark(self._wal)
            self._task = loop.create_task(repeat(self._check_wal, "watching the WAL file", 1.0))

    async def _check_wal(self) -> float:
        """Call ``on_change`` if the WAL file has changed; returns after how many seconds to check again."""
        mark = _mark(self._wal)
        if mark != self._last:
            self._last = mark
            self._on_change()
        return WAL_POLL

    def stop(self) -> None:
        """Stop watching."""
        if self._listener is not None:
            self._listener.stop()
        if self._task is not None:
            self._task.cancel()


def _call(loop: asyncio.AbstractEventLoop, on_change: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(on_change)


def _mark(path: str) -> tuple[int, int]:
    """A value that changes when a transaction is committed to the WAL file."""
    try:
        stat = os.stat(path)  # noqa: PTH116 -- a hundred times a second
    except OSError:
        return (0, 0)
    return (stat.st_mtime_ns, stat.st_size)
