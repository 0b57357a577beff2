"""Spans of requests by OpenTelemetry, if its API is installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

try:
    from opentelemetry import propagate, trace
except ModuleNotFoundError:
    INSTALLED = False
else:
    INSTALLED = True

_NOTHING: AbstractContextManager[None] = nullcontext()


def request(scope: Any) -> AbstractContextManager[None]:
    """A span around a request, in the caller's trace."""
    return _request(scope) if INSTALLED else _NOTHING


@contextmanager
def _request(scope: Any) -> Iterator[None]:
    carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    context = propagate.extract(carrier)
    tracer = trace.get_tracer("semel")
    method = scope["method"]
    with tracer.start_as_current_span(
        method, context, kind=trace.SpanKind.SERVER, attributes={"http.request.method": method}
    ) as span:
        try:
            yield
        finally:
            route = scope.get("path_template")
            if route and span.is_recording():
                span.update_name(f"{method} {route}")
                span.set_attribute("http.route", route)
