"""Signals, pauses, background work, batches and deadlines for the engines: for threads, and for event loops.

Both runtimes have the same methods; those of the thread runtime never suspend.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from semel._concurrency.batching import AsyncioBatcher, Batcher, Flush, ThreadBatcher
from semel._concurrency.sync import PerLoop, run_sync
from semel.errors import StoreUnavailable

A = TypeVar("A")
B = TypeVar("B")
T = TypeVar("T")
Body: TypeAlias = Callable[[], Coroutine[Any, Any, None]]

_deadline: ContextVar[float] = ContextVar("semel_deadline", default=math.inf)
"""When the current call must end, by ``time.monotonic``. Code that waits for a server reads it."""
_SLACK = 0.005
"""Seconds by which an event loop may wake before the time that was set."""


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Limit how long the code inside may wait for a server. Of nested deadlines the earliest applies."""
    token = _deadline.set(min(_deadline.get(), time.monotonic() + seconds))
    try:
        yield
    finally:
        _deadline.reset(token)


def seconds_left(most: float = math.inf) -> float:
    """The seconds until the deadline, not below 0; ``most`` if it is further away or there is none."""
    ends = _deadline.get()
    return most if ends == math.inf else max(0.0, min(most, ends - time.monotonic()))


def deadline_passed() -> bool:
    """Whether the deadline of the current call has passed."""
    return time.monotonic() + _SLACK >= _deadline.get()


class Signal(Protocol):
    """A flag that one side sets, from any thread, and the other waits for."""

    def set(self) -> None:
        """Wake the waiter, now or at its next wait."""

    async def wait(self, seconds: float) -> bool:
        """Wait until the flag is set or the time is over. Clears the flag, and returns True if it was set."""

    def is_current(self) -> bool:
        """False if the event loop that it was made for has ended, so that nobody can wait for it."""


class Local(Protocol[T]):
    """An object that each event loop has for itself, and all threads share."""

    def here(self) -> T:
        """The object of this thread or loop."""

    def everywhere(self) -> list[T]:
        """The objects of all loops."""


class Runtime(Protocol):
    """What differs between threads and event loops."""

    def signal(self) -> Signal:
        """A new flag."""

    async def sleep(self, seconds: float) -> None:
        """Sleep."""

    def spawn(self, body: Body, name: str) -> None:
        """Run ``body`` in the background; it must end by itself when its owner is closed."""

    async def within(self, seconds: float, work: Awaitable[B]) -> B:
        """Await ``work`` for at most so many seconds; then raise ``StoreUnavailable``."""

    def local(self, make: Callable[[], T], inherit: Callable[[T], None]) -> Local[T]:
        """One ``T`` per event loop, or one for all threads. ``inherit`` is called with the ``T`` of a closed loop."""

    def batcher(self, flush: Flush[A, B]) -> Batcher[A, B]:
        """A batcher that sends concurrent calls to ``flush`` in batches."""


class _ThreadSignal:
    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        self._event.set()

    async def wait(self, seconds: float) -> bool:
        heard = self._event.wait(seconds)
        self._event.clear()
        return heard

    def is_current(self) -> bool:
        return True


class ThreadRuntime:
    """The runtime of blocking callers."""

    def signal(self) -> Signal:
        return _ThreadSignal()

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 -- the thread runtime blocks by design

    def spawn(self, body: Body, name: str) -> None:
        # A daemon thread does not keep the program from ending.
        threading.Thread(target=lambda: run_sync(body()), name=name, daemon=True).start()

    async def within(self, seconds: float, work: Awaitable[B]) -> B:
        token = _deadline.set(min(_deadline.get(), time.monotonic() + seconds))
        try:
            return await work
        finally:
            _deadline.reset(token)

    def local(self, make: Callable[[], T], inherit: Callable[[T], None]) -> Local[T]:  # noqa: ARG002 -- threads share
        return _Shared(make())

    def batcher(self, flush: Flush[A, B]) -> Batcher[A, B]:
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

    def is_current(self) -> bool:
        return self._loop is asyncio.get_running_loop() or self._loop.is_running()


class _BoundedCall:
    """A call with a deadline: its task, its deadline, and whether the watchdog cancelled it."""

    __slots__ = ("cancellations", "ends", "expired", "task")

    def __init__(self, task: asyncio.Task[Any], ends: float) -> None:
        self.task = task
        self.ends = ends
        self.cancellations = task.cancelling()
        self.expired = False


class _Watchdog:
    """Cancels the calls of one event loop that are past their deadline.

    One timer serves all calls, and stays set when a call ends. ``asyncio.timeout`` sets and cancels a timer for each
    call, which costs a lone caller a tenth of its time.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._calls: set[_BoundedCall] = set()
        self._wakes = math.inf
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, seconds: float) -> _BoundedCall:
        """Cancel the current task after so many seconds, unless :meth:`forget` is called before."""
        task = asyncio.current_task()
        assert task is not None
        call = _BoundedCall(task, time.monotonic() + seconds)
        self._calls.add(call)
        if call.ends < self._wakes:
            self._wake_at(call.ends)
        return call

    def forget(self, call: _BoundedCall) -> None:
        """Stop watching the call: it has ended."""
        self._calls.discard(call)
        if call.expired:
            call.task.uncancel()

    def cancelled(self, call: _BoundedCall) -> bool:
        """Whether the call was cancelled by its deadline, and by nobody else."""
        if not call.expired:
            return False
        call.expired = False
        return call.task.uncancel() <= call.cancellations

    def _wake_at(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._wakes = when
        self._timer = self._loop.call_later(when - time.monotonic(), self._wake)

    def _wake(self) -> None:
        self._timer, self._wakes = None, math.inf
        late = time.monotonic() + _SLACK
        for call in self._calls:
            if call.ends <= late and not call.expired:
                call.expired = True
                call.task.cancel()
        waiting = [call.ends for call in self._calls if not call.expired]
        if waiting:
            self._wake_at(min(waiting))


class AsyncioRuntime:
    """The runtime of async callers."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._watchdogs = PerLoop(_Watchdog)

    def signal(self) -> Signal:
        return _LoopSignal()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def spawn(self, body: Body, name: str) -> None:
        # Like a thread, it does not inherit the caller's context: no deadline, no claim, no span.
        task = asyncio.get_running_loop().create_task(body(), name=name, context=Context())
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # no warning if its loop ends first
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def within(self, seconds: float, work: Awaitable[B]) -> B:
        watchdog = self._watchdogs.here()
        call = watchdog.watch(seconds)
        token = _deadline.set(min(_deadline.get(), call.ends))
        try:
            return await work
        except asyncio.CancelledError as error:
            if not watchdog.cancelled(call):
                raise
            raise StoreUnavailable(f"the store gave no answer within {seconds:.3g} seconds") from error
        finally:
            watchdog.forget(call)
            _deadline.reset(token)

    def local(self, make: Callable[[], T], inherit: Callable[[T], None]) -> Local[T]:
        return PerLoop(make, abandon=inherit)

    def batcher(self, flush: Flush[A, B]) -> Batcher[A, B]:
        return AsyncioBatcher(flush)
