"""Batching: calls that arrive during a flush are collected and sent together in the next one.

The first call of an idle batcher is sent at once, so no call waits for others. Under load the batches grow, and one
statement (one round trip, one commit) serves hundreds of callers.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from itertools import pairwise
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, cast

from semel._concurrency.fork import survive_fork
from semel._concurrency.sync import PerLoop, run_sync
from semel.errors import MissingExtra, NotMigrated, SemelError, StoreUnavailable

A = TypeVar("A")
B = TypeVar("B")
A_contra = TypeVar("A_contra", contravariant=True)
B_co = TypeVar("B_co", covariant=True)
Flush: TypeAlias = Callable[[Sequence[A], float], Awaitable[list[B]]]
"""``flush(requests, began)`` sends a batch; ``began`` is when its oldest call was made, by ``time.monotonic``."""

LARGEST = 128
"""The most calls in a flush. More would save little, and with two groups one runs here while the store serves the
other."""

_STORE_ERRORS = (StoreUnavailable, NotMigrated, MissingExtra)
"""Errors that do not depend on a single request: each request would also fail alone."""

_log = logging.getLogger("semel")


class Failed:
    """Takes the place of an answer; the caller of that request raises ``error``."""

    __slots__ = ("error",)

    def __init__(self, error: Exception) -> None:
        self.error = error


async def flush_isolated(flush: Flush[A, B], requests: Sequence[A], began: float) -> list[B | Failed]:
    """Flush a batch so that a request that fails does not fail the others.

    A batch that is refused for its content is halved until the request at fault is alone. This is safe, since every
    verb may be sent twice.
    """
    try:
        return [*await flush(requests, began)]
    except Exception as error:  # noqa: BLE001 -- raised by the callers of the requests that failed
        if len(requests) == 1:
            return [Failed(error)]
        if isinstance(error, _STORE_ERRORS):
            return [Failed(_copy_of(error)) for _ in requests]
        middle = len(requests) // 2
        first = await flush_isolated(flush, requests[:middle], began)
        return [*first, *await flush_isolated(flush, requests[middle:], began)]


def _copy_of(error: Exception) -> Exception:
    """A copy of the error for one caller: threads that raise the same object would mix their tracebacks."""
    try:
        copied = copy.copy(error)
    except Exception:  # noqa: BLE001 -- a foreign class that cannot be copied
        copied = StoreUnavailable(f"{type(error).__name__}: {error}")
    copied.__cause__ = error
    return copied


class Batcher(Protocol[A_contra, B_co]):
    """The queue of calls of one verb."""

    async def __call__(self, request: A_contra, /) -> B_co:
        """Send one request, alone or in a batch, and return its answer."""


class Unbatched(Generic[A, B]):
    """No batches, for a store without round trips."""

    def __init__(self, send: Callable[[Sequence[A]], Awaitable[list[B]]]) -> None:
        self._send = send

    async def __call__(self, request: A, /) -> B:
        return (await self._send((request,)))[0]


class AsyncioBatcher(Generic[A, B]):
    """Batches the calls of tasks, per event loop.

    ``on_abandoned`` is called with a request and its answer if nobody waits for the answer any more.
    """

    def __init__(self, flush: Flush[A, B], on_abandoned: Callable[[A, B], Awaitable[None]] | None = None) -> None:
        self.flush = flush
        self.on_abandoned = on_abandoned
        self._queues = PerLoop(lambda: _AsyncioQueue(self))

    def __call__(self, request: A, /) -> Coroutine[Any, Any, B]:
        return self._queues.here()(request)


class _AsyncioQueue(Generic[A, B]):
    """Batches the calls of one event loop.

    A lone caller flushes its own call at once. Under load, every flush starts one iteration of the loop later, in its
    own task: so all callers that are ready join it, and a caller that is cancelled does not cancel the others. A
    cancelled call is still completed (every verb may be sent twice), and ``on_abandoned`` is called with its answer.
    """

    def __init__(self, batcher: AsyncioBatcher[A, B]) -> None:
        self._batcher = batcher
        self._waiting: list[tuple[A, asyncio.Future[B], float]] = []
        self._busy = False
        self._crowded = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def __call__(self, request: A, /) -> B:
        if self._busy or self._crowded:
            return await self._join(request)
        self._busy = True
        try:
            return (await self._batcher.flush((request,), time.monotonic()))[0]
        except asyncio.CancelledError:
            await self._complete_cancelled(request)
            raise
        finally:
            self._send_next()

    async def _join(self, request: A) -> B:
        answer: asyncio.Future[B] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, answer, time.monotonic()))
        if not self._busy:
            self._busy = True
            self._send_next()
        try:
            return await answer
        except asyncio.CancelledError:
            # Perhaps it was answered and cancelled in the same iteration of the loop.
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                await self._abandon(request, answer.result())
            raise

    def _send_next(self) -> None:
        """After a flush: send the waiting calls that were not cancelled; become idle if there are none."""
        self._waiting = [each for each in self._waiting if not each[1].done()]
        if self._waiting:
            task = asyncio.get_running_loop().create_task(self._send())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            self._busy = False

    async def _send(self) -> None:
        batch, self._waiting = self._waiting[:LARGEST], self._waiting[LARGEST:]
        self._crowded = len(batch) > 1
        try:
            answers = await flush_isolated(self._batcher.flush, [request for request, _, _ in batch], batch[0][2])
        except BaseException:
            for _, future, _ in batch:
                future.cancel()
            raise
        else:
            abandoned: list[tuple[A, B]] = []
            for (request, future, _), answer in zip(batch, answers, strict=True):
                if isinstance(answer, Failed):
                    if not future.done():
                        future.set_exception(answer.error)
                elif not future.done():
                    future.set_result(answer)
                else:
                    abandoned.append((request, answer))
            for request, answer in abandoned:
                await self._abandon(request, answer)
        finally:
            self._send_next()

    async def _complete_cancelled(self, request: A) -> None:
        """Send a cancelled request again, for a second at most, as it may have arrived; then abandon its answer."""
        try:
            async with asyncio.timeout(1):
                await self._abandon(request, (await self._batcher.flush((request,), time.monotonic()))[0])
        except (SemelError, TimeoutError) as error:
            _log.warning("a cancelled call could not be completed: %s", str(error) or "no reply within a second")

    async def _abandon(self, request: A, answer: B) -> None:
        if self._batcher.on_abandoned is not None:
            await self._batcher.on_abandoned(request, answer)


class _Call(Generic[A, B]):
    """One thread's call: waits on ``gate`` until it has its answer or must lead a batch."""

    __slots__ = ("answer", "began", "error", "gate", "last", "leads", "next", "request")

    def __init__(self, request: A) -> None:
        self.request = request
        self.began = time.monotonic()
        self.gate = threading.Lock()
        self.leads = self.last = False
        self.next: _Call[A, B] | None = None
        self.answer: B | None = None
        self.error: BaseException | None = None


class ThreadBatcher(Generic[A, B]):
    """Batches the calls of a process's threads. A lone caller flushes its own call at once.

    Callers that arrive meanwhile wait, and the first of them becomes the leader: it flushes one batch, which includes
    its own call, so no thread works for the others forever. The callers of the batch wake one another, and the last one
    makes the first caller that waits by then the leader. A leader that started earlier would compete with the waking
    threads for the interpreter, and its batch would be small.
    """

    def __init__(self, flush: Flush[A, B]) -> None:
        self._flush = flush
        self.after_fork()
        survive_fork(self)

    def after_fork(self) -> None:
        """Start idle: the waiting threads exist only in the parent."""
        self._lock = threading.Lock()
        self._waiting: list[_Call[A, B]] = []
        self._led = False

    async def __call__(self, request: A, /) -> B:
        call: _Call[A, B] | None = None
        with self._lock:
            if self._led:
                call = _Call(request)
                call.gate.acquire()
                self._waiting.append(call)
            self._led = True
        if call is None:
            try:
                return (await self._flush((request,), time.monotonic()))[0]
            finally:
                with self._lock:
                    self._hand_over()
        self._await_turn(call)
        if call.leads:
            self._lead(call)
        if call.error is not None:
            raise call.error
        return cast("B", call.answer)

    def _await_turn(self, call: _Call[A, B]) -> None:
        try:
            call.gate.acquire()
        except BaseException:  # KeyboardInterrupt: leave, but wake the others first
            with self._lock:
                waits = call in self._waiting
                if waits:
                    self._waiting.remove(call)
            if not waits:
                call.gate.acquire()
                self._wake_next(call)
                if call.leads:
                    with self._lock:
                        self._hand_over()
            raise
        self._wake_next(call)

    def _wake_next(self, call: _Call[A, B]) -> None:
        """Wake the next caller of the batch: one after the other, never all at once."""
        if call.next is not None:
            call.next.gate.release()
        elif call.last:
            with self._lock:
                self._hand_over()

    def _lead(self, own: _Call[A, B]) -> None:
        with self._lock:
            others, self._waiting = self._waiting[: LARGEST - 1], self._waiting[LARGEST - 1 :]
        batch = [own, *others]
        try:
            answers = run_sync(
                flush_isolated(self._flush, [call.request for call in batch], min(call.began for call in batch))
            )
        except BaseException as error:  # noqa: BLE001 -- every caller raises in its own thread
            for call in others:
                call.error = StoreUnavailable(f"interrupted by {error!r}; try again")
            own.error = error
        else:
            for call, answer in zip(batch, answers, strict=True):
                if isinstance(answer, Failed):
                    call.error = answer.error
                else:
                    call.answer = answer
        finally:
            for call, following in pairwise(others):
                call.next = following
            if others:
                others[-1].last = True
                others[0].gate.release()
            else:
                with self._lock:
                    self._hand_over()

    def _hand_over(self) -> None:
        if self._waiting:
            leader = self._waiting.pop(0)
            leader.leads = True
            leader.gate.release()
        else:
            self._led = False
