"""Receives, in a separate thread, notifications of claims that other processes ended, for threads and event loops."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import TypeAlias

from semel._concurrency.fork import survive_fork
from semel._concurrency.retry import Backoff, Outage

Subscribe: TypeAlias = Callable[[str, threading.Event], Iterator[str | None]]
"""``subscribe(channel, stopped)`` connects, then yields every payload until stopped, and None about twice a second
while there is none. Raises if the connection breaks."""

PATIENCE = 30.0
"""Seconds without a connection before that is logged: by then an unavailable database has been logged elsewhere."""

_BACKOFF = Backoff(0.1, 5.0)
_log = logging.getLogger("semel.listener")


class Listener:
    """Calls back for every payload until stopped; reconnects with backoff if the connection breaks.

    Notifications are lost while there is no connection, so a listener only speeds up what polling finds anyway.
    """

    def __init__(
        self,
        subscribe: Subscribe,
        *,
        outage: Outage | None = None,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        """``outage`` logs a missing connection; ``on_failure`` is called if it cannot be made or breaks."""
        self._subscribe = subscribe
        self._on_failure = on_failure
        self._outage = outage or Outage(
            _log,
            "the connection for notifications of ended claims",
            "waiting callers poll the store instead, and notice the end of a claim later",
            patience=PATIENCE,
        )
        self.after_fork()
        survive_fork(self)

    def after_fork(self) -> None:
        """The thread exists only in the parent."""
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, channel: str, on_payload: Callable[[str], None]) -> None:
        """Start to listen. If it listens already, nothing changes."""
        if self._thread is None:
            self._stopped = threading.Event()
            self._thread = threading.Thread(
                target=self._listen, args=(channel, on_payload, self._stopped), name="semel-listener", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """Let the thread end, without waiting for it: it checks about twice a second."""
        self._stopped.set()
        self._thread = None

    def _listen(self, channel: str, on_payload: Callable[[str], None], stopped: threading.Event) -> None:
        failures = 0
        while not stopped.is_set():
            try:
                for payload in self._subscribe(channel, stopped):
                    self._outage.succeeded()
                    failures = 0
                    if payload is not None:
                        on_payload(payload)
            except Exception as error:  # noqa: BLE001 -- waiters poll meanwhile, and this reconnects
                if stopped.is_set():
                    return
                self._outage.failed(error)
                self._on_failure()
                failures += 1
                stopped.wait(_BACKOFF.after(failures))
