"""Wakes callers that wait for a key: this process notifies when it ends a claim, the store for other processes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from semel._concurrency.fork import survive_fork
from semel._concurrency.runtime import Signal


class Waiters:
    """Signals by key. Notifying is cheap while nobody waits: it checks that a dict is empty."""

    def __init__(self) -> None:
        self.after_fork()
        survive_fork(self)

    def after_fork(self) -> None:
        """The waiting threads exist only in the parent."""
        self._lock = threading.Lock()
        self._waiting: dict[tuple[str, str], list[Signal]] = {}

    @contextmanager
    def waiting(self, scope: str, key: str, signal: Signal) -> Iterator[None]:
        """Inside the context, ``signal`` is set whenever the key's claim may have ended."""
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
        """Wake all callers that wait for the key."""
        if self._waiting:
            with self._lock:
                signals = list(self._waiting.get((scope, key), ()))
            for signal in signals:
                signal.set()
