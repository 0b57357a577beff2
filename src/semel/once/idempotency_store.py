"""A store of results with two verbs, as small projects have: ``get`` and ``set_if_absent``.

`IdempotentProcessor` takes one instead of an ``Once``. Then a key is processed by one call at a time within each
process only; across processes the first stored result counts, and the work may happen more than once. An ``Once`` on
Redis, PostgreSQL or SQLite has no such gap.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from semel._concurrency.fork import survive_fork
from semel.types import ProcessingRecord

L = TypeVar("L")


class IdempotencyStore(ABC):
    """Keeps results by key. A stored result is never overwritten."""

    @abstractmethod
    def get(self, key: str) -> Any | None:
        """The result of the key, or None."""

    @abstractmethod
    def set_if_absent(self, key: str, result: Any) -> bool:
        """Store the result unless the key has one, in one atomic step. Returns whether it was stored."""

    def __contains__(self, key: str) -> bool:
        """Whether the key has a result. Override it if None can be a result."""
        return self.get(key) is not None


class InMemoryIdempotencyStore(IdempotencyStore):
    """Keeps results in this process, for tests and scripts; thread-safe. None, 0 and "" are results, too."""

    def __init__(self) -> None:
        self._results: dict[str, Any] = {}
        self.after_fork()
        survive_fork(self)

    def after_fork(self) -> None:
        """A thread that held the lock exists only in the parent."""
        self._lock = threading.Lock()

    def get(self, key: str) -> Any | None:
        with self._lock:
            return self._results.get(key)

    def set_if_absent(self, key: str, result: Any) -> bool:
        with self._lock:
            if key in self._results:
                return False
            self._results[key] = result
            return True

    def __contains__(self, key: str) -> bool:
        with self._lock:
            return key in self._results

    def __len__(self) -> int:
        """The number of keys with a result."""
        with self._lock:
            return len(self._results)


class KeyLocks(Generic[L]):
    """A lock for each key, kept while somebody holds it or waits for it."""

    def __init__(self, make: Callable[[], L]) -> None:
        self._make = make
        self.after_fork()
        survive_fork(self)

    def after_fork(self) -> None:
        """The threads that held the locks exist only in the parent."""
        self._guard = threading.Lock()
        self._locks: dict[str, tuple[L, int]] = {}

    @contextmanager
    def of(self, key: str) -> Iterator[L]:
        """The key's lock, not acquired yet."""
        with self._guard:
            lock, users = self._locks.get(key) or (self._make(), 0)
            self._locks[key] = (lock, users + 1)
        try:
            yield lock
        finally:
            with self._guard:
                _, users = self._locks[key]
                if users == 1:
                    del self._locks[key]
                else:
                    self._locks[key] = (lock, users - 1)


class StoredResults:
    """Double-checked locking: returns a stored result without a lock, and makes a missing one under the key's lock."""

    def __init__(self, store: IdempotencyStore) -> None:
        self.store = store
        self._threads = KeyLocks(threading.Lock)
        self._tasks = KeyLocks(asyncio.Lock)

    def process(self, key: str, make: Callable[[], Any]) -> ProcessingRecord:
        """The key's result, made by this call if there is none."""
        if key in self.store:
            return ProcessingRecord(self.store.get(key), True, key)
        with self._threads.of(key) as lock, lock:
            if key in self.store:
                return ProcessingRecord(self.store.get(key), True, key)
            return self._kept(key, make())

    async def process_async(self, key: str, make: Callable[[], Any]) -> ProcessingRecord:
        """As :meth:`process`, for an async function. The store's verbs block, so they run in a thread."""
        if await asyncio.to_thread(self.store.__contains__, key):
            return ProcessingRecord(await asyncio.to_thread(self.store.get, key), True, key)
        with self._tasks.of(key) as lock:
            async with lock:
                if await asyncio.to_thread(self.store.__contains__, key):
                    return ProcessingRecord(await asyncio.to_thread(self.store.get, key), True, key)
                return await asyncio.to_thread(self._kept, key, await make())

    def _kept(self, key: str, result: Any) -> ProcessingRecord:
        """Store the result. If another process stored one first, that one is returned."""
        if self.store.set_if_absent(key, result) is False:
            result = self.store.get(key)
        return ProcessingRecord(result, False, key)
