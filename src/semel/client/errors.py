"""Converts error responses of a server to semel's exceptions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import httpx
import msgspec
from msgspec import Struct

from semel import typed_json
from semel.api_types import Problem
from semel.errors import (
    CostLimitExceeded,
    Drifted,
    Forbidden,
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
    ServiceError,
    StoreUnavailable,
    Unauthenticated,
    UnknownModel,
)

_SHOWN = 500
"""Characters of an unknown response that an error message quotes at most."""


class Answer(Struct, frozen=True):
    """A response with its whole body."""

    status: int
    headers: httpx.Headers
    content: bytes

    @property
    def problem(self) -> Problem:
        """The problem details; ``_NO_PROBLEM`` if the body has none."""
        try:
            return typed_json.decode(self.content, Problem)
        except (msgspec.DecodeError, RecursionError):
            return _NO_PROBLEM


_NO_PROBLEM = Problem(type="", title="", status=0, detail="", error_code="", retryable=False)
_Maker: TypeAlias = Callable[[Problem], SemelError]


def _of(kind: type[SemelError]) -> _Maker:
    return lambda problem: kind(problem.detail)


_KNOWN: dict[str, _Maker] = {
    "INVALID_PARAMETERS": _of(InvalidParameters),
    "UNKNOWN_MODEL": _of(UnknownModel),
    "IDEMPOTENCY_KEY_CONFLICT": lambda problem: KeyReused(problem.detail, idempotency_key=problem.idempotency_key),
    "COST_LIMIT_EXCEEDED": _of(CostLimitExceeded),
    "QUOTA_EXCEEDED": _of(QuotaExceeded),
    "RESERVATION_LOST": _of(ReservationLost),
    "RUN_NOT_COMPLETE": lambda problem: RunNotComplete(
        problem.detail, problem.run_status or "PENDING", problem.retry_after
    ),
    "DRIFTED": lambda problem: Drifted(problem.detail, problem.drift),
    "ILLEGAL_TRANSITION": _of(IllegalTransition),
    "INVALID_REQUEST": lambda problem: InvalidRequest(problem.detail, idempotency_key=problem.idempotency_key),
    "STORE_UNAVAILABLE": _of(StoreUnavailable),
    "NOT_MIGRATED": _of(NotMigrated),
    "RESULT_STORE_UNAVAILABLE": _of(ResultStoreError),
}
_BY_STATUS: dict[int, type[ServiceError]] = {401: Unauthenticated, 403: Forbidden}


def is_retryable(answer: Answer) -> bool:
    """Whether the same request may succeed later: the server failed, or is too busy."""
    if answer.status == 429:
        problem = answer.problem
        return problem is _NO_PROBLEM or problem.retryable  # not for a quota
    return answer.status >= 500 or answer.status == 408


def refusal(answer: Answer, *, key: str | None = None, about_run: bool = False) -> SemelError:
    """The exception for an error response; ``about_run``: a 404 means RunNotFound."""
    problem = answer.problem
    if problem.error_code in _KNOWN:
        return _KNOWN[problem.error_code](problem)
    if problem.error_code == "NOT_FOUND" and about_run:
        return RunNotFound(problem.detail)
    kind = _BY_STATUS.get(answer.status, ServiceError)
    code = problem.error_code or f"HTTP_{answer.status}"
    return kind(answer.status, code, problem.detail or _excerpt(answer), is_retryable(answer), idempotency_key=key)


def unexpected_response(answer: Answer, url: str, *, key: str | None = None) -> ServiceError:
    """The exception for a response of success that no semel server sends."""
    detail = f"the response from {url} is not from a semel server; is the address right? {_excerpt(answer)}"
    return ServiceError(answer.status, "UNEXPECTED_ANSWER", detail, idempotency_key=key)


def _excerpt(answer: Answer) -> str:
    if 300 <= answer.status < 400:
        return f"the server redirects to {answer.headers.get('location', '')[:_SHOWN]!r}; use that address"
    text = " ".join(answer.content[: 4 * _SHOWN].decode(errors="replace").split())
    return f"the response: {text[:_SHOWN]}" if text else "the response is empty"
