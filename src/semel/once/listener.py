"""Hears, in a thread of its own, which claims other processes ended: it serves blocking callers and loops alike."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import TypeAlias

from semel.forks import survive_fork

Hear: TypeAlias = Callable[[str, threading.Event], Iterator[str]]
"""``hear(channel, stopped)``: connect, then yield every payload until stopped; raises when the connection breaks."""

_log = logging.getLogger("semel.listener")


class Listener:
    """Calls back for every payload until stopped; connects again, with patience, whenever it must.

    What is missed while the connection is down is lost, so a listener only ever hastens what a poll would find.
    """

    def __init__(self, hear: Hear) -> None:
        self._hear = hear
        self.after_fork()
        survive_fork(self)

    def after_fork(self) -> None:
        """The thread stayed in the parent."""
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, channel: str, heard: Callable[[str], None]) -> None:
        """Listen from now on; a second start changes nothing."""
        if self._thread is None:
            self._stopped = threading.Event()
            self._thread = threading.Thread(
                target=self._listen, args=(channel, heard, self._stopped), name="semel-listener", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """Let the thread end: it looks about every half second, and nobody needs to wait for it."""
        self._stopped.set()
        self._thread = None

    def _listen(self, channel: str, heard: Callable[[str], None], stopped: threading.Event) -> None:
        pause = 0.1
        while not stopped.is_set():
            try:
                for payload in self._hear(channel, stopped):
                    heard(payload)
                    pause = 0.1
            except Exception as error:  # noqa: BLE001 -- whatever broke: waiters poll, and this connects again
                if stopped.is_set():
                    return
                _log.warning("cannot hear about ended claims, waiters poll meanwhile: %s", error)
                stopped.wait(pause)
                pause = min(pause * 2, 5.0)
