"""The responses to refused requests, in three dialects: Data Intake, the IETF draft, and Stripe."""

from __future__ import annotations

import math
import re
from http import HTTPStatus
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import Struct

from semel.policy import Policy
from semel.types import Response

Reason: TypeAlias = Literal[
    "invalid",
    "missing",
    "incomplete",
    "too_large",
    "conflict",
    "processing",
    "unknown",
    "gone",
    "not_kept",
    "not_acceptable",
    "failed",
    "unavailable",
]

PROTOCOL_VERSION = "1.0"
"""The version of the protocol. It changes with the set of valid keys and with the format of refusals."""


class Refusal(Struct, frozen=True):
    """Why a request is refused. ``retryable``: the same request with the same key may succeed later.

    ``{header}`` in a text is replaced by the name of the key's header.
    """

    code: str
    status: int
    title: str
    detail: str
    retryable: bool = False


REFUSALS: dict[Reason, Refusal] = {
    "invalid": Refusal(
        "INVALID_IDEMPOTENCY_KEY",
        400,
        "{header} is invalid",
        "Invalid idempotency key format. Key must be 1-255 characters long and contain only letters, numbers, "
        "hyphens, and underscores",
    ),
    "missing": Refusal(
        "MISSING_IDEMPOTENCY_KEY",
        400,
        "{header} is missing",
        "This operation requires an idempotency key: send one that is unique to the operation in the header {header}",
    ),
    "incomplete": Refusal(
        "INCOMPLETE_REQUEST_BODY",
        400,
        "Request body is incomplete",
        "The request body ended early, so nothing was carried out",
        retryable=True,
    ),
    "too_large": Refusal(
        "REQUEST_BODY_TOO_LARGE",
        413,
        "Request body is too large",
        "The request body is larger than what is accepted together with an idempotency key; nothing was carried out",
    ),
    "conflict": Refusal(
        "IDEMPOTENCY_KEY_CONFLICT",
        409,
        "{header} is already used",
        "Idempotency key already used with different request body",
    ),
    "processing": Refusal(
        "IDEMPOTENCY_KEY_PROCESSING",
        409,
        "A request is outstanding for this {header}",
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
    "not_kept": Refusal(
        "IDEMPOTENT_RESPONSE_TOO_LARGE",
        409,
        "The response was too large to be kept",
        "The request with this idempotency key was carried out and will not be again; its response was larger than "
        "what is kept, so it cannot be sent a second time",
    ),
    "not_acceptable": Refusal(
        "IDEMPOTENT_RESPONSE_NOT_ACCEPTABLE",
        406,
        "The response is kept in another content coding",
        "The request with this idempotency key was carried out and will not be again; its response is kept in a "
        "content coding that Accept-Encoding does not allow; send the request again with an Accept-Encoding that does",
        retryable=True,
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

_ANY_KEY = "{header} must be 1-255 printable ASCII characters, quoted or without spaces, quotes and commas"
_ANOTHER_REQUEST = (
    "Idempotency key already used with a different request: another body, query or endpoint, or other credentials"
)
_STRIPE_CODES = {"conflict": "idempotency_key_reused", "processing": "idempotency_key_in_use"}


class RefusalFormat(Struct, frozen=True):
    """A dialect: which keys are valid, which responses are kept, and the format of refusals.

    Statuses from ``fails_from`` on are failures, kept only if the policy keeps failures. A status in ``not_begun``
    means that the work did not begin, and is never kept. With ``shared_scope`` all endpoints share their keys, and
    using a key at a second endpoint is a conflict.
    """

    name: str
    keys: re.Pattern[str]
    bare: re.Pattern[str]
    fails_from: int
    not_begun: frozenset[int] = frozenset()
    methods: tuple[str, ...] = ("POST",)
    parameters: bool = False
    shared_scope: bool = False
    statuses: dict[Reason, int] = {}
    details: dict[Reason, str] = {}

    def body(  # noqa: PLR0917 -- called in one place
        self, reason: Reason, status: int, key: str | None, header: str, docs_url: str | None, more: dict[str, Any]
    ) -> tuple[bytes, Any]:
        """The media type and the content."""
        refusal = REFUSALS[reason]
        detail = self.details.get(reason, refusal.detail).replace("{header}", header)
        match self.name:
            case "ietf":
                problem = {
                    "type": docs_url or f"urn:semel:{refusal.code.lower().replace('_', '-')}",
                    "title": refusal.title.replace("{header}", header),
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
                error = {"type": "idempotency_error", "code": code, "message": detail}
                return b"application/json", {"error": error | ({"doc_url": docs_url} if docs_url else {})}
            case _:
                content = {"detail": detail, "error_code": refusal.code, "idempotency_key": key}
                if reason == "invalid" and key is not None and _LIKELY.fullmatch(key):
                    content["hint"] = _HINT
                return b"application/json", content


_STRICT = re.compile(r"[A-Za-z0-9_-]{1,255}")
_PRINTABLE = re.compile(r"[ -~]{1,255}")
_BARE = re.compile(r"[!#-+\--\[\]-~]{1,255}")

_LIKELY = re.compile(r"(?=.*[.:/~+=])[A-Za-z0-9_.:/~+=-]{1,254}")
"""Keys that other services accept, such as ``order:17``, ``a.b`` and ``owner/repo``. Below 255 characters, as a longer
header is shown cut to that length."""
_HINT = 'This service takes the keys of policy="intake"; with policy="ietf" it would take this one'

DIALECTS = {
    "intake": RefusalFormat("intake", _STRICT, _STRICT, 400),
    "ietf": RefusalFormat(
        "ietf",
        _PRINTABLE,
        _BARE,
        500,
        not_begun=frozenset((401, 403, 408, 409, 425, 429)),
        methods=("POST", "PATCH"),
        parameters=True,
        statuses={"conflict": 422},
        details={"invalid": _ANY_KEY, "conflict": _ANOTHER_REQUEST},
    ),
    "stripe": RefusalFormat(
        "stripe",
        _PRINTABLE,
        _BARE,
        500,
        not_begun=frozenset((400, 401, 403, 409, 422, 429)),  # 400 and 422: failed validation
        shared_scope=True,
        statuses={"conflict": 400},
        details={"invalid": _ANY_KEY, "conflict": _ANOTHER_REQUEST},
    ),
}


def refuse(
    policy: Policy,
    reason: Reason,
    key: str | None,
    *,
    header: str = "Idempotency-Key",
    docs_url: str | None = None,
    retry_after: float | None = None,
    status_url: str | None = None,
) -> Response:
    """The response to a refused request."""
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
    if docs_url is not None:
        headers.append((b"link", f'<{docs_url}>; rel="help"'.encode("ascii")))
    media, content = dialect.body(reason, status, key, header, docs_url, more)
    body = msgspec.json.encode(content)
    return Response(status, [(b"content-type", media), (b"content-length", b"%d" % len(body)), *headers], body)


_PHRASES = {
    413: "Request Entity Too Large",
    414: "Request-URI Too Long",
    416: "Requested Range Not Satisfiable",
    422: "Unprocessable Entity",
}
"""Those that Python 3.13 renamed: responses are the same on every version."""


def phrase(status: int) -> str:
    """What a status is called, such as "Not Found"."""
    try:
        return _PHRASES.get(status) or HTTPStatus(status).phrase
    except ValueError:
        return "Unknown"


def status_line(status: int) -> str:
    """The status line of WSGI."""
    return f"{status} {phrase(status)}"
