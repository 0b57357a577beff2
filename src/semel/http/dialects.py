"""How a refusal looks, in three dialects: the Data Intake document's, the IETF draft's, and Stripe's."""

from __future__ import annotations

import math
import re
from http import HTTPStatus
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import Struct

from semel.model import Response
from semel.policy import Policy

Reason: TypeAlias = Literal[
    "invalid", "missing", "conflict", "processing", "unknown", "gone", "failed", "unavailable", "incomplete"
]


class Refusal(Struct, frozen=True):
    """Why a request is not carried out. ``retryable``: the same request with the same key may succeed later."""

    code: str
    status: int
    title: str
    detail: str
    retryable: bool = False


REFUSALS: dict[Reason, Refusal] = {
    "invalid": Refusal(
        "INVALID_IDEMPOTENCY_KEY",
        400,
        "Idempotency-Key is invalid",
        "Invalid idempotency key format. Key must be 1-255 characters long and contain only letters, numbers, "
        "hyphens, and underscores",
    ),
    "missing": Refusal(
        "MISSING_IDEMPOTENCY_KEY",
        400,
        "Idempotency-Key is missing",
        "This operation is carried out only with an idempotency key: send one that is unique to the operation",
    ),
    "incomplete": Refusal(
        "INCOMPLETE_REQUEST_BODY",
        400,
        "Request body is incomplete",
        "The request body ended early, so nothing was carried out",
        retryable=True,
    ),
    "conflict": Refusal(
        "IDEMPOTENCY_KEY_CONFLICT",
        409,
        "Idempotency-Key is already used",
        "Idempotency key already used with different request body",
    ),
    "processing": Refusal(
        "IDEMPOTENCY_KEY_PROCESSING",
        409,
        "A request is outstanding for this Idempotency-Key",
        "Request with this idempotency key is already being processed",
        retryable=True,
    ),
    "unknown": Refusal(
        "IDEMPOTENCY_OUTCOME_UNKNOWN",
        409,
        "The outcome is not known",
        "The first request with this idempotency key was interrupted, and whether it was carried out is not known; "
        "it will not be carried out again until that is settled",
    ),
    "gone": Refusal(
        "IDEMPOTENT_RESPONSE_GONE",
        410,
        "The response is no longer kept",
        "The request with this idempotency key was carried out and will not be again, but its response is not kept",
    ),
    "failed": Refusal(
        "IDEMPOTENT_REQUEST_FAILED",
        500,
        "The request failed",
        "The first request with this idempotency key failed; use a new key to try again",
    ),
    "unavailable": Refusal(
        "IDEMPOTENCY_STORE_UNAVAILABLE",
        503,
        "Idempotency keys are unavailable",
        "It cannot be told at the moment whether this request was carried out before; send it again with the same key",
        retryable=True,
    ),
}

_ANY_KEY = "The idempotency key must be 1-255 printable ASCII characters, quoted or without spaces, quotes and commas"
_STRIPE_CODES = {"conflict": "idempotency_key_reused", "processing": "idempotency_key_in_use"}


class Dialect(Struct, frozen=True):
    """One way to speak: which keys are valid, which status means a failed request, and how a refusal is put."""

    name: str
    keys: re.Pattern[str]
    bare: re.Pattern[str]
    fails_from: int
    statuses: dict[Reason, int] = {}
    details: dict[Reason, str] = {}

    def body(self, reason: Reason, status: int, key: str | None, **more: Any) -> tuple[bytes, Any]:
        """The media type and the content of a refusal."""
        refusal = REFUSALS[reason]
        detail = self.details.get(reason, refusal.detail)
        match self.name:
            case "ietf":
                problem = {
                    "type": f"urn:semel:{refusal.code.lower().replace('_', '-')}",
                    "title": refusal.title,
                    "status": status,
                    "detail": detail,
                    "error_code": refusal.code,
                    "idempotency_key": key,
                    "retryable": refusal.retryable,
                    **more,
                }
                return b"application/problem+json", problem
            case "stripe":
                code = _STRIPE_CODES.get(reason, refusal.code.lower())
                return b"application/json", {"error": {"type": "idempotency_error", "code": code, "message": detail}}
            case _:
                return b"application/json", {"detail": detail, "error_code": refusal.code, "idempotency_key": key}


_STRICT = re.compile(r"[A-Za-z0-9_-]{1,255}")
_PRINTABLE = re.compile(r"[ -~]{1,255}")
_BARE = re.compile(r"[!#-+\--\[\]-~]{1,255}")

DIALECTS = {
    "intake": Dialect("intake", _STRICT, _STRICT, 400),
    "ietf": Dialect("ietf", _PRINTABLE, _BARE, 500, {"conflict": 422}, {"invalid": _ANY_KEY}),
    "stripe": Dialect("stripe", _PRINTABLE, _BARE, 500, {"conflict": 400}, {"invalid": _ANY_KEY}),
}


def refuse(
    policy: Policy,
    reason: Reason,
    key: str | None,
    *,
    retry_after: float | None = None,
    status_url: str | None = None,
) -> Response:
    """The response that says why not."""
    dialect = DIALECTS[policy.dialect]
    status = dialect.statuses.get(reason, REFUSALS[reason].status)
    if reason == "gone" and policy.tombstone == "conflict":
        status = 409
    more: dict[str, Any] = {}
    headers = []
    if retry_after is not None:
        seconds = max(1, math.ceil(retry_after))
        more["retry_after"] = seconds
        headers.append((b"retry-after", b"%d" % seconds))
    if status_url is not None:
        more["status_url"] = status_url
        headers.append((b"link", f'<{status_url}>; rel="status"'.encode("ascii")))
    media, content = dialect.body(reason, status, key, **more)
    body = msgspec.json.encode(content)
    return Response(status, [(b"content-type", media), (b"content-length", b"%d" % len(body)), *headers], body)


def phrase(status: int) -> str:
    """What the status is called, for WSGI's status line."""
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return f"{status} Unknown"
