"""Calls a model: whatever it returns or raises becomes one `AttemptResult`.

value ── publish ──▶ succeeded            Retry, any other error, the result store's ──▶ retry
Fatal, model.fatal, invalid parameters, a value that has no JSON form ──▶ fatal
Snooze ──▶ snooze                         RunCancelled, or ending after a request to stop ──▶ cancelled
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import msgspec
from msgspec.structs import replace

from semel.errors import Fatal, InvalidRequest, Retry, RunCancelled, Snooze
from semel.runs import strict_json, tracing
from semel.runs.execution import context, log_capture
from semel.runs.execution.context import AttemptSink, Context, Stop, StopFlag
from semel.runs.execution.tracebacks import names_in, reason_of, traceback_of
from semel.runs.models.model import Model
from semel.runs.results import INLINE_BYTES, MAX_BYTES, ResultStore, publish
from semel.runs.types import INTERNAL_PREFIX, Attempt, AttemptResult, EndKind

if TYPE_CHECKING:
    import asyncio

P = ParamSpec("P")
R = TypeVar("R")

__all__ = ["Limits", "execute", "execute_async", "execute_attempt", "run_in_thread", "timed_out_after"]

SMALL = 16 * 1024
"""Up to so many bytes, a result is written without a thread."""
LONGEST_WAIT = 10 * 366 * 86400.0
"""Seconds that a model may ask to wait: ten years."""
CANCEL_POLL = 0.1
"""Seconds between two checks whether a run in a thread was cancelled."""

_VERDICTS = (Retry, Fatal, Snooze, RunCancelled)


class Limits(msgspec.Struct, frozen=True):
    """How large a result may be, and up to which size it is stored in the row."""

    inline_bytes: int = INLINE_BYTES
    max_bytes: int = MAX_BYTES


DEFAULT_LIMITS = Limits()


def execute(
    attempt: Attempt,
    model: Model,
    sink: AttemptSink,
    results: ResultStore,
    limits: Limits = DEFAULT_LIMITS,
    *,
    cancelled: Stop | None = None,
) -> AttemptResult:
    """Execute the attempt in this thread. It never raises, whatever the model does."""
    ctx = Context(attempt, sink, cancelled or StopFlag())
    try:
        return execute_attempt(ctx, attempt, model, results, limits)
    finally:
        context.close(ctx)


def execute_attempt(
    ctx: Context,
    attempt: Attempt,
    model: Model,
    results: ResultStore,
    limits: Limits,
    *,
    fatal: frozenset[str] = frozenset(),
) -> AttemptResult:
    """Execute the attempt that the context belongs to. `fatal` names errors whose types are not known here."""
    with log_capture.LogBinding(ctx._lines):
        try:
            if _wants_data(attempt, model):
                context.fetch_data(ctx, results)
            with tracing.continued(attempt.trace):
                value = _call(ctx, attempt, model)
        except BaseException as error:  # noqa: BLE001 (sys.exit in a model must not end the process)
            return _failed(ctx, model, error, fatal)
        return _early_result(ctx, value) or _store_result(ctx, attempt, value, results, limits)


def _wants_data(attempt: Attempt, model: Model) -> bool:
    """Whether the data is to be unpacked: the service's own models pass it on as it is."""
    return (
        attempt.data_ref is not None and model.signature.wants_context and not attempt.model.startswith(INTERNAL_PREFIX)
    )


def _call(ctx: Context, attempt: Attempt, model: Model) -> Any:
    arguments = model.bind(attempt.parameters)
    return model.function(ctx, **arguments) if model.signature.wants_context else model.function(**arguments)


async def execute_async(
    attempt: Attempt,
    model: Model,
    sink: AttemptSink,
    results: ResultStore,
    limits: Limits = DEFAULT_LIMITS,
    *,
    cancelled: Stop | None = None,
) -> AttemptResult:
    """Execute the attempt in this event loop. It raises only if the calling task is cancelled."""
    ctx = Context(attempt, sink, cancelled or StopFlag())
    handed_over = False
    try:
        with log_capture.LogBinding(ctx._lines):
            try:
                if _wants_data(attempt, model):
                    await _in_thread(context.fetch_data, ctx, results)
                value = _call(ctx, attempt, model)
                if hasattr(value, "__await__"):
                    value = await (value if model.timeout is None else _in_time(value, model.timeout))
            except BaseException as error:
                if _is_ours_to_pass(error):
                    raise
                return _failed(ctx, model, error)
            ended = _early_result(ctx, value)
            if ended is not None:
                return ended
            if ctx._artifacts is None and strict_json.is_small(value, min(limits.inline_bytes, SMALL)):
                return _store_result(ctx, attempt, value, results, limits)
            handed_over = True
            return await _in_thread(_store_result_and_close, ctx, attempt, value, results, limits)
    finally:
        if not handed_over:
            if ctx._artifacts is not None:
                await _in_thread(context.close, ctx)
            else:
                context.close(ctx)


async def _in_thread(work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    import asyncio

    return await asyncio.to_thread(work, *args, **kwargs)


async def run_in_thread(
    attempt: Attempt,
    model: Model,
    sink: AttemptSink,
    results: ResultStore,
    limits: Limits = DEFAULT_LIMITS,
    *,
    cancelled: Stop | None = None,
) -> AttemptResult:
    """Execute the attempt in a thread of its own; the sink is called in this event loop.

    A thread cannot be killed: one that does not stop in time, or whose caller is cancelled, is left behind and ignored.
    """
    import asyncio

    loop = asyncio.get_running_loop()
    stop = cancelled or StopFlag()
    relay = _Relay(loop, sink)
    future: asyncio.Future[AttemptResult] = loop.create_future()
    work = partial(execute, attempt, model, relay, results, limits, cancelled=stop)
    start = partial(copy_context().run, _answer, loop, future, work)
    try:
        Thread(target=start, name=f"semel-run-{attempt.run_id}", daemon=True).start()
    except RuntimeError as error:  # the system allows no more threads
        return AttemptResult(kind="unstarted", reason=reason_of(error))
    try:
        return await _wait_for_thread(future, model, stop)
    finally:
        relay.close()


async def _wait_for_thread(future: asyncio.Future[AttemptResult], model: Model, stop: Stop) -> AttemptResult:
    """Wait for the thread; after its timeout ask it to stop, and after its grace leave it behind."""
    import asyncio

    clock = asyncio.get_running_loop().time
    deadline = math.inf if model.timeout is None else clock() + model.timeout
    outcome = AttemptResult(kind="cancelled", reason="cancelled")
    while not stop.is_set():
        await asyncio.wait({future}, timeout=min(CANCEL_POLL, max(0.0, deadline - clock())))
        if future.done():
            return future.result()
        if clock() >= deadline:
            outcome = timed_out_after(model)
            stop.set()
    await asyncio.wait({future}, timeout=model.grace)
    if future.done():
        ended = future.result()
        return replace(ended, kind=outcome.kind, reason=outcome.reason) if ended.kind == "cancelled" else ended
    how = f"; it did not stop within {model.grace:g} seconds and was left behind in its thread"
    return replace(outcome, reason=outcome.reason + how)


def timed_out_after(model: Model) -> AttemptResult:
    return AttemptResult(kind="retry", reason=f"timed out after {model.timeout:g} seconds")


def _answer(
    loop: asyncio.AbstractEventLoop, future: asyncio.Future[AttemptResult], work: Callable[[], AttemptResult]
) -> None:
    ended = work()

    def resolve() -> None:
        if not future.done():
            future.set_result(ended)

    with suppress(RuntimeError):  # the loop was closed after the thread was left behind
        loop.call_soon_threadsafe(resolve)


class _Relay:
    """Passes progress and lines from a thread to a sink in the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sink: AttemptSink) -> None:
        self._loop = loop
        self._sink: AttemptSink | None = sink

    def progress(self, fraction: float, note: str) -> None:
        self._send("progress", fraction, note)

    def line(self, level: str, text: str) -> None:
        self._send("line", level, text)

    def close(self) -> None:
        self._sink = None

    def _send(self, method: str, *arguments: object) -> None:
        if self._sink is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._arrive, method, *arguments)

    def _arrive(self, method: str, *arguments: object) -> None:
        if self._sink is not None:
            getattr(self._sink, method)(*arguments)


async def _in_time(work: Awaitable[Any], seconds: float) -> Any:
    import asyncio

    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            value = await work
    except Exception as error:
        if limit.expired():
            raise Retry(f"timed out after {seconds:g} seconds") from error
        raise
    if limit.expired():  # it was cancelled and returned: the value may be incomplete
        raise Retry(f"timed out after {seconds:g} seconds")
    return value


def _is_ours_to_pass(error: BaseException) -> bool:
    """Whether this is a request of the event loop's owner (cancellation, exit), not the model's error."""
    import asyncio

    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is None or task.cancelling() > 0
    return isinstance(error, KeyboardInterrupt | GeneratorExit)


def _early_result(ctx: Context, value: Any) -> AttemptResult | None:
    """The end of an attempt whose value is a verdict, or which was asked to stop; None if the value is a result."""
    if isinstance(value, _VERDICTS):
        return _verdict(ctx, value)
    if ctx._saw_stop:
        return AttemptResult(kind="cancelled", reason="the model was asked to stop and did", cost=ctx._cost)
    return None


def _store_result(ctx: Context, attempt: Attempt, value: Any, results: ResultStore, limits: Limits) -> AttemptResult:
    try:
        files = context.files(ctx) if ctx._artifacts is not None else {}
        return publish(
            results,
            attempt,
            value,
            files,
            inline_bytes=limits.inline_bytes,
            max_bytes=limits.max_bytes,
            cost=ctx._cost,
        )
    except Exception as error:  # noqa: BLE001 (the store's drivers raise what they like)
        kind: EndKind = "fatal" if isinstance(error, Fatal) else "retry"
        return AttemptResult(kind=kind, reason=reason_of(error), traceback=traceback_of(error), cost=ctx._cost)


def _store_result_and_close(
    ctx: Context, attempt: Attempt, value: Any, results: ResultStore, limits: Limits
) -> AttemptResult:
    """Publish and close in one call, so that the files stay until then even if the caller is cancelled."""
    try:
        return _store_result(ctx, attempt, value, results, limits)
    finally:
        context.close(ctx)


def _failed(ctx: Context, model: Model, error: BaseException, fatal: frozenset[str] = frozenset()) -> AttemptResult:
    if isinstance(error, _VERDICTS):
        return _verdict(ctx, error)
    kind: EndKind = "retry"
    if ctx._saw_stop:
        kind = "cancelled"
    elif isinstance(error, (InvalidRequest, msgspec.ValidationError, *model.fatal)) or names_in(error, fatal):
        kind = "fatal"
    return AttemptResult(kind=kind, reason=reason_of(error), traceback=traceback_of(error), cost=ctx._cost)


def _verdict(ctx: Context, verdict: Retry | Fatal | Snooze | RunCancelled) -> AttemptResult:
    """The end that the model itself raised or returned."""
    kind: EndKind = "retry"
    after: float | None = None
    if isinstance(verdict, Snooze):
        kind, after = "snooze", _seconds(verdict.seconds)
    elif isinstance(verdict, Retry):
        after = _seconds(verdict.after)
    else:
        kind = "fatal" if isinstance(verdict, Fatal) else "cancelled"
    shown = "" if kind in {"snooze", "cancelled"} else traceback_of(verdict)
    return AttemptResult(kind=kind, reason=reason_of(verdict), traceback=shown, after=after, cost=ctx._cost)


def _seconds(wish: Any) -> float | None:
    """The delay that the model asked for, if it is valid, else None."""
    if isinstance(wish, int | float) and 0 <= wish < math.inf:
        return min(float(wish), LONGEST_WAIT)
    return None
