"""Errors as problem details (RFC 9457)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import msgspec
import msgspec.inspect
from litestar import Request, Response
from litestar.exceptions import HTTPException, MethodNotAllowedException

from semel._validation import with_valid_values
from semel.api_types import Problem
from semel.errors import (
    CostLimitExceeded,
    Drifted,
    IllegalTransition,
    InvalidParameters,
    InvalidRequest,
    KeyReused,
    NotMigrated,
    QuotaExceeded,
    ReservationLost,
    ResultStoreError,
    RunNotComplete,
    RunNotFound,
    SemelError,
    StoreUnavailable,
    Unfingerprintable,
    UnknownModel,
)
from semel.http.refusals import phrase

MEDIA_TYPE = "application/problem+json"
HELP = "troubleshooting.html"
"""The page of the documentation that has an anchor for each error code."""
RETRY_AFTER = 5
"""Seconds in Retry-After while a store is unavailable."""


class ApiError(SemelError):
    """A request that the service itself refuses."""

    def __init__(self, status: int, code: str, detail: str, *, retry_after: float | None = None) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.retry_after = retry_after


_KNOWN: tuple[tuple[type[SemelError], int, str], ...] = (
    (InvalidParameters, 422, "INVALID_PARAMETERS"),
    (UnknownModel, 422, "UNKNOWN_MODEL"),
    (Unfingerprintable, 422, "INVALID_PARAMETERS"),
    (KeyReused, 409, "IDEMPOTENCY_KEY_CONFLICT"),
    (CostLimitExceeded, 429, "COST_LIMIT_EXCEEDED"),
    (QuotaExceeded, 429, "QUOTA_EXCEEDED"),
    (ReservationLost, 409, "RESERVATION_LOST"),
    (RunNotFound, 404, "NOT_FOUND"),
    (RunNotComplete, 409, "RUN_NOT_COMPLETE"),
    (Drifted, 409, "DRIFTED"),
    (IllegalTransition, 409, "ILLEGAL_TRANSITION"),
    (InvalidRequest, 400, "INVALID_REQUEST"),
    (StoreUnavailable, 503, "STORE_UNAVAILABLE"),
    (NotMigrated, 503, "NOT_MIGRATED"),
    (ResultStoreError, 503, "RESULT_STORE_UNAVAILABLE"),
)
_BY_STATUS = {
    400: "INVALID_REQUEST",
    401: "UNAUTHENTICATED",
    403: "FORBIDDEN",
    404: "NOT_FOUND",
    405: "METHOD_NOT_ALLOWED",
    413: "BODY_TOO_LARGE",
    415: "UNSUPPORTED_MEDIA_TYPE",
    429: "TOO_MANY_REQUESTS",
}


def problem_of(error: Exception) -> Problem:
    """The problem of an error; an unexpected one is not described."""
    if isinstance(error, ApiError):
        return _problem(error.status, error.code, str(error), retry_after=error.retry_after)
    for kind, status, code in _KNOWN:
        if isinstance(error, kind):
            more: dict[str, Any] = {"retry_after": RETRY_AFTER} if status == 503 else {}
            if isinstance(error, RunNotComplete):
                more |= {"run_status": error.status, "retry_after": error.retry_after}
            if isinstance(error, InvalidRequest | KeyReused):
                more["idempotency_key"] = error.idempotency_key
            if isinstance(error, Drifted):
                more["drift"] = error.drift
            return _problem(status, code, str(error), **more)
    if isinstance(error, HTTPException):
        status = error.status_code
        return _problem(status, _BY_STATUS.get(status, f"HTTP_{status}"), _said(error))
    return _problem(500, "INTERNAL_ERROR", "something went wrong here; the server's log says what")


def _said(error: HTTPException) -> str:
    """The message; for a request that does not match its schema, what does not."""
    if isinstance(error.extra, list):
        parts = [_part(each) for each in error.extra if isinstance(each, dict)]
        if parts:
            return "; ".join(parts)
    return error.detail


def _part(wrong: dict[str, Any]) -> str:
    key, message = wrong.get("key", "data"), str(wrong.get("message", ""))
    if key == "data":
        return "the body is missing" if message == "'data'" else f"the body: {message}"
    return f"{key}: {message}" + (", as 2030-01-31T12:00:00Z" if "RFC3339" in message else "")


def _problem(status: int, code: str, detail: str, *, retry_after: float | None = None, **more: Any) -> Problem:
    return Problem(
        type=f"urn:semel:{code.lower().replace('_', '-')}",
        title=phrase(status),
        status=status,
        detail=detail,
        error_code=code,
        retryable=retry_after is not None
        or (status in (429, 503) and code not in ("QUOTA_EXCEEDED", "COST_LIMIT_EXCEEDED")),
        retry_after=None if retry_after is None else max(1, math.ceil(retry_after)),
        **more,
    )


def allow(methods: Iterable[str]) -> str:
    """The header Allow: a route's methods, and HEAD if it has GET."""
    known = set(methods)
    return ", ".join(sorted(known | {"HEAD"} if "GET" in known else known))


def allow_of(error: Exception) -> dict[str, str]:
    """The header Allow of a 405."""
    if isinstance(error, MethodNotAllowedException) and error.headers:
        return {"allow": allow(error.headers["allow"].split(", "))}
    return {}


def _name_choices(request: Request[Any, Any, Any], error: HTTPException) -> None:
    """Add the valid values to the error, where a parameter has another one."""
    if not isinstance(error.extra, list):  # an unknown route or method has no handler
        return
    fields = request.route_handler.parsed_fn_signature.parameters
    for wrong in error.extra:
        if isinstance(wrong, dict) and wrong.get("key") in fields:
            wrong["message"] = with_valid_values(str(wrong.get("message", "")), fields[wrong["key"]].annotation)


def body_of(problem: Problem, docs_url: str | None) -> tuple[bytes, dict[str, str]]:
    """The body of the response, and its headers. With a ``docs_url`` they link to what to do about it."""
    headers = {"content-type": MEDIA_TYPE}
    if docs_url:
        problem = msgspec.structs.replace(problem, type=f"{docs_url.rstrip('/')}/{HELP}#{problem.error_code.lower()}")
        headers["link"] = f'<{problem.type}>; rel="help"'
    if problem.retry_after is not None:
        headers["retry-after"] = str(problem.retry_after)
    if problem.status == 401:
        headers["www-authenticate"] = "Bearer"
    return msgspec.json.encode(problem), headers


def answer(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """An exception handler for Litestar."""
    if isinstance(error, HTTPException):
        _name_choices(request, error)
    problem = problem_of(error)
    content, headers = body_of(problem, request.scope["state"]["service"].settings.docs_url)
    return Response(content, status_code=problem.status, headers=headers | allow_of(error), media_type=MEDIA_TYPE)
