"""What the engine needs from its world, once for threads and once for an event loop: signals, pauses, background work.

Both forms have the same shape; in the thread form nothing suspends.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import Context
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from semel._concurrency import deadline
from semel._concurrency.batching import AsyncioBatcher, Batcher, Flush, ThreadBatcher
from semel._concurrency.sync import PerLoop, run_sync
from semel.errors import StoreUnavailable

A = TypeVar("A")
B = TypeVar("B")
T = TypeVar("T")
Body: TypeAlias = Callable[[], Coroutine[Any, Any, None]]


class Signal(Protocol):
    """A flag that one side sets, from any thread, and the other waits for."""

    def set(self) -> None:
        """Wake the waiter, now or at its next wait."""

    async def wait(self, seconds: float) -> bool:
        """Wait until set or until the time is over; True when set. Clears the flag."""

    def here(self) -> bool:
        """True when a waiter for it could still be awake: not if the event loop that it was made for has ended."""


class Local(Protocol[T]):
    """Something that each event loop has for itself, and threads share."""

    def here(self) -> T:
        """The one to use in this thread or loop."""

    def everywhere(self) -> list[T]:
        """All of them."""


class Runtime(Protocol):
    """Threads or a loop."""

    def signal(self) -> Signal:
        """A new flag."""

    async def sleep(self, seconds: float) -> None:
        """Let time pass."""

    def spawn(self, body: Body, name: str) -> None:
        """Run ``body`` in the background; it must end by itself when its owner is closed."""

    async def within(self, seconds: float, work: Awaitable[B]) -> B:
        """Await ``work`` for so long at the most; ``StoreUnavailable`` when it gave no answer by then."""

    def local(self, make: Callable[[], T], inherit: Callable[[T], None]) -> Local[T]:
        """One thing for each event loop, or one for all threads. ``inherit`` gets those of loops that are over."""

    def lane(self, flush: Flush[A, B]) -> Batcher[A, B]:
        """Coalesce concurrent calls into batches for ``flush``."""


class _ThreadSignal:
    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        self._event.set()

    async def wait(self, seconds: float) -> bool:
        heard = self._event.wait(seconds)
        self._event.clear()
        return heard

    def here(self) -> bool:
        return True


class ThreadRuntime:
    """The blocking world."""

    def signal(self) -> Signal:
        """See Runtime."""
        return _ThreadSignal()

    async def sleep(self, seconds: float) -> None:
        """See Runtime."""
        time.sleep(seconds)  # noqa: ASYNC251 -- the thread form blocks by design

    def spawn(self, body: Body, name: str) -> None:
        """See Runtime. A daemon, so that it never keeps a program from ending."""
        threading.Thread(target=lambda: run_sync(body()), name=name, daemon=True).start()

    async def within(self, seconds: float, work: Awaitable[B]) -> B:
        """See Runtime. Whatever waits for a server looks at the deadline by itself."""
        with deadline.within(seconds):
            return await work

    def local(self, make: Callable[[], T], inherit: Callable[[T], None]) -> Local[T]:  # noqa: ARG002 -- threads share
        """See Runtime."""
        return _Shared(make())

    def lane(self, flush: Flush[A, B]) -> Batcher[A, B]:
        """See Runtime."""
        return ThreadBatcher(flush)


class _Shared(Generic[T]):
    def __init__(self, thing: T) -> None:
        self._thing = thing

    def here(self) -> T:
        return self._thing

    def everywhere(self) -> list[T]:
        return [self._thing]


class _LoopSignal:
    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()

    def set(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._event.wait()
        except TimeoutError:
            return False
        self._event.clear()
        return True

    def here(self) -> bool:
        return self._loop is asyncio.get_running_loop() or self._loop.is_running()


class AsyncioRuntime:
    """The world of event loops."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def signal(self) -> Signal:
        """See Runtime."""
        return _LoopSignal()

    async def sleep(self, seconds: float) -> None:
        """See Runtime."""
        await asyncio.sleep(seconds)

    def spawn(self, body: Body, name: str) -> None:
        """See Runtime. As in a thread, nothing of the caller's context is its own: no deadline, no claim, no span."""
        task = asyncio.get_running_loop().create_task(body(), name=name, context=Context())
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # it ends with its loop, and that is no news
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def within(self, seconds: float, work: Awaitable[B]) -> B:
        """See Runtime."""
        try:
            with deadline.within(seconds):
                async with asyncio.timeout(seconds):
                    return await work
        except TimeoutError as error:
            raise StoreUnavailable(f"the store gave no answer within {seconds:.3g} seconds") from error

    def local(self, make: Callable[[], T], inherit: Callable[[T], None]) -> Local[T]:
        """See Runtime."""
        return PerLoop(make, abandon=inherit)

    def lane(self, flush: Flush[A, B]) -> Batcher[A, B]:
        """See Runtime."""
        return AsyncioBatcher(flush)
