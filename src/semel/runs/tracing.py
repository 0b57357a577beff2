"""Traces with OpenTelemetry, if its API is installed: a run continues the trace in which it was submitted.

The run stores W3C's ``traceparent``, and every attempt is a child span of it. Without OpenTelemetry nothing is traced,
at no cost.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from semel.runs.store.lease import Leased
    from semel.runs.types import AttemptResult

try:
    from opentelemetry import context, trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ModuleNotFoundError:
    INSTALLED = False
else:
    INSTALLED = True

_NOTHING: AbstractContextManager[Any] = nullcontext()


class AttemptSpan:
    """The span of an attempt."""

    def __init__(self, span: Any) -> None:
        self._span = span

    def ended(self, ended: AttemptResult) -> None:
        """Set how the attempt ended. An error's message is left out: it may hold what others should not read."""
        self._span.set_attribute("semel.end", ended.kind)
        if ended.kind not in ("succeeded", "snooze", "cancelled"):
            self._span.set_status(trace.StatusCode.ERROR, ended.kind)


def current() -> str | None:
    """The ``traceparent`` of the current span, or None."""
    if not INSTALLED or not trace.get_current_span().get_span_context().is_valid:
        return None
    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier.get("traceparent")


def attempt(leased: Leased, worker: str) -> AbstractContextManager[AttemptSpan | None]:
    """A span around an attempt, as a child of the span in which its run was submitted."""
    return _attempt(leased, worker) if _traces() else _NOTHING


class _Untraced:
    """Until when no look is taken at whether this process collects traces: the look costs as much as a short run."""

    until = 0.0


def _traces() -> bool:
    """Whether this process collects traces: without an SDK, the API collects none, and is not called.

    An SDK that is set up later is noticed within a second.
    """
    if not INSTALLED or time.monotonic() < _Untraced.until:
        return False
    if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        _Untraced.until = time.monotonic() + 1.0
        return False
    return True


@contextmanager
def _attempt(leased: Leased, worker: str) -> Iterator[AttemptSpan]:
    attributes: dict[str, Any] = {
        "semel.run_id": leased.id,
        "semel.model": leased.model,
        "semel.attempt": leased.attempts,
        "semel.queue": leased.queue,
        "semel.worker": worker,
    }
    tracer = trace.get_tracer("semel")
    above = _above(leased.trace)
    with tracer.start_as_current_span(
        f"run {leased.model}", above, kind=trace.SpanKind.CONSUMER, attributes=attributes, record_exception=False
    ) as span:
        yield AttemptSpan(span)


def continued(traceparent: str | None) -> AbstractContextManager[None]:
    """Make the span, which is another process's, the current one for the block."""
    return _NOTHING if traceparent is None or not INSTALLED else _continued(traceparent)


@contextmanager
def _continued(traceparent: str) -> Iterator[None]:
    token = context.attach(_above(traceparent))
    try:
        yield
    finally:
        context.detach(token)


def _above(traceparent: str | None) -> Any:
    """The context of a ``traceparent``; of None, an empty one, so that a run begins a trace of its own."""
    carrier = {} if traceparent is None else {"traceparent": traceparent}
    return TraceContextTextMapPropagator().extract(carrier, context.Context())
