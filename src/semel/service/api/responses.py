"""What handlers have in common: how answers are written, and what the schema says of refusals."""

from __future__ import annotations

from hashlib import blake2b
from http import HTTPStatus
from typing import Any

import msgspec
from litestar import Response
from litestar.datastructures import ResponseHeader
from litestar.openapi.datastructures import ResponseSpec

from semel.api_types import Problem
from semel.service.api.problems import MEDIA_TYPE

ALWAYS = (401, 403, 429, 500, 503)
"""What any request may be refused with: by the gate, or because the database is away."""
_MEANINGS = {
    400: "The request cannot be understood: something is missing, of the wrong type, or out of bounds.",
    401: "There is no token, or it is not valid (any more).",
    403: "The token's role does not allow that; or there are no tokens, and the request is not from this machine.",
    404: "There is no such thing, or it is not the caller's to see.",
    408: "The body took too long to arrive.",
    409: "It is in a state that does not allow that, or the key was used with another payload.",
    413: "The body is too large.",
    415: "The body is not said to be JSON.",
    422: "The model is unknown, or its parameters do not fit.",
    429: "Too many requests, or the quota or cost limit is used up; error_code says which.",
    500: "A bug here; the server's log says more.",
    503: "The database or the result store is away. Retry-After says when to come again.",
}
_TAKES_BODY = (408, 413, 415)

_encoder = msgspec.json.Encoder()


def refusals(*statuses: int, body: bool = False) -> dict[int, ResponseSpec]:
    """What a handler may refuse with, for the schema; ``body`` for one that takes a body."""
    every = sorted({*statuses, *ALWAYS, *(_TAKES_BODY if body else ())})
    return {status: refusal(status) for status in every}


def refusal(status: int) -> ResponseSpec:
    """One of them."""
    said = _MEANINGS.get(status, HTTPStatus(status).phrase)
    return ResponseSpec(Problem, media_type=MEDIA_TYPE, generate_examples=False, description=said)


def answered(kind: Any, description: str, *, media_type: str = "application/json") -> ResponseSpec:
    """Another answer than the usual one, for the schema."""
    return ResponseSpec(kind, description=description, media_type=media_type, generate_examples=False)


def header(name: str, description: str) -> ResponseHeader:
    """A header that an answer may have, for the schema."""
    return ResponseHeader(name=name, value="", description=description, required=False, documentation_only=True)


def json(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response[Any]:
    """The content as JSON, written at once."""
    return Response(_encoder.encode(content), status_code=status, headers=headers, media_type="application/json")


def tagged(content: Any, known: str | None) -> Response[Any]:
    """The content as JSON with its ETag; 304 for those who know it already."""
    data = _encoder.encode(content)
    tag = f'"{blake2b(data, digest_size=12).hexdigest()}"'
    if matches(known, tag):
        return unchanged(tag)
    headers = {"ETag": tag, "Cache-Control": "private, no-cache"}
    return Response(data, headers=headers, media_type="application/json")


def unchanged(tag: str) -> Response[Any]:
    """304: what the client has is what there is."""
    return Response(None, status_code=304, headers={"ETag": tag, "Cache-Control": "private, no-cache"})


def matches(known: str | None, tag: str) -> bool:
    """Whether the tag is among those of the header If-None-Match. Weak ones count: the comparison is the weak one."""
    if known is None:
        return False
    return tag in known or known.strip() == "*"
