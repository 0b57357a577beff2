"""Wakes those who wait for a key: rung by this process when it ends a claim, and by the store for others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from semel._concurrency.fork import survive_fork
from semel._concurrency.runtime import Signal


class Waiters:
    """Signals by key. Ringing for a key that nobody waits for costs a look into an empty dict."""

    def __init__(self) -> None:
        self.after_fork()
        survive_fork(self)

    def after_fork(self) -> None:
        """The waiters stayed in the parent."""
        self._lock = threading.Lock()
        self._waiting: dict[tuple[str, str], list[Signal]] = {}

    @contextmanager
    def waiting(self, scope: str, key: str, signal: Signal) -> Iterator[None]:
        """While inside, ``signal`` is set whenever the key's claim may have ended."""
        with self._lock:
            self._waiting.setdefault((scope, key), []).append(signal)
        try:
            yield
        finally:
            with self._lock:
                signals = self._waiting[scope, key]
                signals.remove(signal)
                if not signals:
                    del self._waiting[scope, key]

    def notify(self, scope: str, key: str) -> None:
        """Wake everyone who waits for the key."""
        if self._waiting:
            with self._lock:
                signals = list(self._waiting.get((scope, key), ()))
            for signal in signals:
                signal.set()
