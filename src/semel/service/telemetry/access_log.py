"""The access log: an id, a line in the log, and metrics for each request.

Plain ASGI middleware, outside of authentication, so that refused requests are logged, too. It logs the method, the
route (never the path, which has ids and keys), the sender, the status, and the run that the request concerned.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from contextvars import ContextVar
from typing import Any
from urllib.parse import unquote

from structlog.contextvars import bound_contextvars

from semel.service.api.problems import problem_of
from semel.service.telemetry import tracing
from semel.service.telemetry.metrics import http_meters

REQUEST_ID = b"x-request-id"
UNROUTED = "(none)"
"""The route of requests that were refused before they were routed, and of unknown paths."""
_VALID_ID = re.compile(rb"[\w.:=+/-]{1,128}")
_QUIET = frozenset({"/healthz", "/readyz", "/metrics"})
"""Polled every few seconds by machines: logged at level debug unless they fail."""

_log = logging.getLogger("semel.access")
_current: ContextVar[_RequestRecord | None] = ContextVar("semel_current_request", default=None)


def add_run_to_access_log(run_id: str, run: Any) -> None:
    """Add a run to the log line of the current request; ``run`` is a Run, or a row with its columns."""
    seen = _current.get()
    if seen is not None:
        seen.run = {
            "model": run.model,
            "run_id": run_id,
            "payload_hash": run.payload_hash,
            "worker_id": run.worker,
            "status": run.status,
            "attempt_count": run.attempts,
        }


class AccessLogMiddleware:
    """Logs and counts the requests of a service."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._meters = http_meters()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._inner(scope, receive, send)
            return
        if "litestar_app" in scope:
            scope = with_root_path(scope)
        seen = _RequestRecord(scope)

        async def send_and_see(message: Any) -> None:
            await send(seen.through(message))

        self._meters.begin()
        _current.set(seen)
        try:
            with bound_contextvars(request_id=seen.id), tracing.request(scope):
                await self._inner(scope, receive, send_and_see)
        except BaseException:
            seen.failed = True
            raise
        finally:
            _current.set(None)
            route = route_of(scope)
            seconds = time.perf_counter() - seen.began
            self._meters.end(seen.method, route, seen.status, seconds)
            _log_request(seen, route, scope, seconds)


class _RequestRecord:
    """What is logged of one request."""

    __slots__ = ("began", "failed", "id", "method", "run", "status")

    def __init__(self, scope: Any) -> None:
        self.began = time.perf_counter()
        self.method: str = scope["method"]
        self.id = request_id(scope)
        self.status = 499  # until a response begins: the client disconnected before
        self.failed = False
        self.run: dict[str, Any] = {}

    def through(self, message: Any) -> Any:
        """The message to send; the first gets the request's id as a header."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), (REQUEST_ID, self.id.encode())]
        return message


def with_root_path(scope: Any) -> Any:
    """The scope with the prefix under which another Litestar mounts us: it removes the prefix from the path."""
    whole = unquote(scope.get("raw_path", b"").decode("latin-1"))
    path = scope["path"].rstrip("/")
    prefix = whole.rstrip("/").removesuffix(path)
    if scope.get("root_path") or not prefix.startswith("/") or f"{prefix}{path}" != whole.rstrip("/"):
        return scope
    return {**scope, "root_path": prefix, "path": f"{prefix}{scope['path']}"}


def request_id(scope: Any) -> str:
    """The id that the request has, if it is valid; else a new one."""
    for name, value in scope["headers"]:
        if name == REQUEST_ID and _VALID_ID.fullmatch(value):
            text: str = value.decode()
            return text
    return uuid.uuid4().hex


def route_of(scope: Any) -> str:
    """The route, such as ``/runs/{run_id:str}``."""
    route: str = scope.get("path_template") or UNROUTED
    return route


def _log_request(seen: _RequestRecord, route: str, scope: Any, seconds: float) -> None:
    level = logging.INFO
    if seen.failed or seen.status >= 500:
        level = logging.ERROR if seen.failed or seen.status == 500 else logging.WARNING
    elif route in _QUIET:
        level = logging.DEBUG
    if not _log.isEnabledFor(level):
        return
    caller = scope.get("state", {}).get("caller")
    fields: dict[str, Any] = {
        "method": seen.method,
        "route": route,
        "http_status": seen.status,
        "ms": round(seconds * 1000, 2),
        "user": None if caller is None else caller.user,
        "request_id": seen.id,
    }
    if caller is not None and caller.tenant:
        fields["tenant"] = caller.tenant
    fields |= seen.run
    _log.log(level, "%s %s %d", seen.method, route, seen.status, extra=fields)


def log_unexpected(error: Exception, scope: Any) -> None:
    """Log an unexpected exception, which the response does not describe."""
    if problem_of(error).status != 500:
        return
    _log.error("%s %s failed", scope.get("method"), route_of(scope), exc_info=error, extra={"route": route_of(scope)})
