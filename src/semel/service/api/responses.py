"""What handlers share: JSON responses, ETags, and the responses in the schema."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import msgspec
from litestar import Response
from litestar.datastructures import ResponseHeader
from litestar.openapi.datastructures import ResponseSpec

from semel.api_types import Problem
from semel.http.refusals import phrase
from semel.service.api.problems import MEDIA_TYPE

ALWAYS = (401, 403, 429, 500, 503)
"""Statuses that any request may get: by authentication, or because the database is unavailable."""
_MEANINGS = {
    400: "The request is invalid: something is missing, of the wrong type, or out of bounds.",
    401: "The token is missing, invalid or expired.",
    403: "The token's role does not allow this; or there are no tokens, and the request is not local.",
    404: "It does not exist, or the caller may not see it.",
    408: "The body took too long to arrive.",
    409: "Its state does not allow this, or the key was used with another payload.",
    413: "The body is too large.",
    415: "The Content-Type is not JSON.",
    422: "The model is unknown, or its parameters are invalid.",
    429: "Too many requests, or the quota or cost limit is used up; error_code says which.",
    500: "An unexpected error; see the server's log.",
    503: "The database or the result store is unavailable. Retry-After says when to try again.",
}
_TAKES_BODY = (408, 413, 415)

_encoder = msgspec.json.Encoder()


def refusals(*statuses: int, body: bool = False) -> dict[int, ResponseSpec]:
    """The error responses of a handler, for the schema; ``body``: it takes a body."""
    every = sorted({*statuses, *ALWAYS, *(_TAKES_BODY if body else ())})
    return {status: refusal(status) for status in every}


def refusal(status: int) -> ResponseSpec:
    """An error response, for the schema."""
    description = _MEANINGS.get(status, phrase(status))
    return ResponseSpec(Problem, media_type=MEDIA_TYPE, generate_examples=False, description=description)


def answered(kind: Any, description: str, *, media_type: str = "application/json") -> ResponseSpec:
    """A further response, for the schema."""
    return ResponseSpec(kind, description=description, media_type=media_type, generate_examples=False)


def header(name: str, description: str) -> ResponseHeader:
    """A header of a response, for the schema."""
    return ResponseHeader(name=name, value="", description=description, required=False, documentation_only=True)


def json(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response[Any]:
    """Respond with JSON."""
    return Response(_encoder.encode(content), status_code=status, headers=headers, media_type="application/json")


def tagged(content: Any, known: str | None) -> Response[Any]:
    """Respond with JSON and its ETag; with 304 if the client has it."""
    data = _encoder.encode(content)
    tag = f'"{blake2b(data, digest_size=12).hexdigest()}"'
    if matches(known, tag):
        return unchanged(tag)
    headers = {"ETag": tag, "Cache-Control": "private, no-cache"}
    return Response(data, headers=headers, media_type="application/json")


def unchanged(tag: str) -> Response[Any]:
    """Respond with 304."""
    return Response(None, status_code=304, headers={"ETag": tag, "Cache-Control": "private, no-cache"})


def matches(known: str | None, tag: str) -> bool:
    """Whether the header If-None-Match has the tag, by weak comparison."""
    if known is None:
        return False
    return tag in known or known.strip() == "*"
