"""A store of results with two verbs, as small projects have it: ``get`` and ``set_if_absent``.

`IdempotentProcessor` takes one instead of an ``Once``. Then each process sees to it by itself that a key is processed
by one call at a time; across processes the first result that is stored counts, and the work may happen more than
once. An ``Once`` on Redis, PostgreSQL or SQLite has no such gap.
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
    """Keeps results by key. A result that is there is never overwritten."""

    @abstractmethod
    def get(self, key: str) -> Any | None:
        """The result of the key, or None."""

    @abstractmethod
    def set_if_absent(self, key: str, result: Any) -> bool:
        """Store the result unless the key has one, in one atomic step. Returns whether it was stored."""

    def __contains__(self, key: str) -> bool:
        """Whether the key has a result. Override it where None is a result."""
        return self.get(key) is not None


class InMemoryIdempotencyStore(IdempotencyStore):
    """In this process, for tests and scripts; safe to use from many threads. None, 0 and "" are results, too."""

    def __init__(self) -> None:
        self._results: dict[str, Any] = {}
        self.after_fork()
        survive_fork(self)

    def after_fork(self) -> None:
        """A thread that held the lock stayed in the parent."""
        self._lock = threading.Lock()

    def get(self, key: str) -> Any | None:
        """See IdempotencyStore."""
        with self._lock:
            return self._results.get(key)

    def set_if_absent(self, key: str, result: Any) -> bool:
        """See IdempotencyStore."""
        with self._lock:
            if key in self._results:
                return False
            self._results[key] = result
            return True

    def __contains__(self, key: str) -> bool:
        """See IdempotencyStore."""
        with self._lock:
            return key in self._results

    def __len__(self) -> int:
        """How many keys have a result."""
        with self._lock:
            return len(self._results)


class KeyLocks(Generic[L]):
    """A lock for each key, kept while somebody has it or waits for it."""

    def __init__(self, make: Callable[[], L]) -> None:
        self._make = make
        self.after_fork()
        survive_fork(self)

    def after_fork(self) -> None:
        """Whoever held one stayed in the parent."""
        self._guard = threading.Lock()
        self._locks: dict[str, tuple[L, int]] = {}

    @contextmanager
    def of(self, key: str) -> Iterator[L]:
        """The key's lock, which is still to be acquired."""
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
    """Double-checked: a result that is there is given without a lock, and what is not there is made under the key's."""

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
        """The same for an awaited function. The store's verbs block, so they run in a thread."""
        if await asyncio.to_thread(self.store.__contains__, key):
            return ProcessingRecord(await asyncio.to_thread(self.store.get, key), True, key)
        with self._tasks.of(key) as lock:
            async with lock:
                if await asyncio.to_thread(self.store.__contains__, key):
                    return ProcessingRecord(await asyncio.to_thread(self.store.get, key), True, key)
                return await asyncio.to_thread(self._kept, key, await make())

    def _kept(self, key: str, result: Any) -> ProcessingRecord:
        """Another process may have been quicker: then all go on with its result."""
        if self.store.set_if_absent(key, result) is False:
            result = self.store.get(key)
        return ProcessingRecord(result, False, key)
