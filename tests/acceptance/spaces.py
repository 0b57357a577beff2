"""Where these tests keep their keys: any of the four stores, empty, on a clock that the tests move."""

from contextlib import ExitStack
from typing import Any

from semel import AsyncOnce, Once
from semel.once.store import Store
from semel.once.stores import open_store
from semel.once.stores.memory import MemoryStore
from semel.testing import FakeClock

STORES = ("memory", "sqlite", "redis", "postgres")
SHARED = ("sqlite", "redis", "postgres")
"""Those that several processes can reach."""


class Space:
    """An empty store. Everything opened over it meets in the same keys, and is closed when the test ends."""

    def __init__(self, kind: str, url: str, closing: ExitStack) -> None:
        self.kind = kind
        self.url = url
        self.clock = FakeClock()
        self._closing = closing
        self._memory = MemoryStore(self.clock) if kind == "memory" else None

    def open(self, store: Store | None = None, *, once_class: type[Once] = Once, **options: Any) -> Once:
        """An opened ``Once``, on the fake clock unless ``clock=`` says otherwise; ``store`` may wrap the real one."""
        return self._closing.enter_context(once_class(store or self._target, **{"clock": self.clock, **options}))

    def open_async(self, store: Store | None = None, **options: Any) -> AsyncOnce:
        """The same for a loop; enter it there."""
        return AsyncOnce(store or self._target, **{"clock": self.clock, **options})

    def store(self, *, awaited: bool = False) -> Store:
        """The bare store, to be wrapped and handed to ``open`` or ``open_async``, which close it."""
        return self._memory or open_store(self.url, is_async=awaited, clock=self.clock)

    @property
    def _target(self) -> str | MemoryStore:
        return self._memory or self.url
