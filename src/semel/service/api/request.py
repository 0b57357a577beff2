"""Requests: JSON bodies, decoded as the handler's type, and queries without unknown parameters."""

from __future__ import annotations

import asyncio
from datetime import datetime
from functools import cache
from typing import Any

import msgspec
from litestar import Request
from litestar.handlers import BaseRouteHandler
from litestar.params import QueryParameter
from litestar.types import Empty

from semel._validation import nearest, with_valid_values
from semel.runs import strict_json
from semel.service.api.problems import ApiError
from semel.typed_json import decoder

DEEPEST = strict_json.MAX_DEPTH + 10
"""The deepest nesting of a body: that of a run's parameters, and some levels around them."""
MOST_VALUES = 200_000
"""The most values in a body: each becomes an object in memory."""
LARGE = 64 * 1024
"""Bytes from which on a body is decoded in a thread."""


class JsonRequest(Request[Any, Any, Any]):
    """A request whose JSON is decoded as its handler's type, strictly: "7" is not a number.

    Other content types are refused: a page of another site can make a browser send a form or plain text here, but not
    JSON.
    """

    async def json(self) -> Any:
        """The body, as the type of the handler's ``data``."""
        if self._json is Empty:
            if not _is_json(self.headers.get("content-type", "")):
                detail = "the body must be JSON, with the header Content-Type: application/json"
                raise ApiError(415, "UNSUPPORTED_MEDIA_TYPE", detail)
            field = self.route_handler.parsed_data_field
            kind = Any if field is None else field.annotation
            body = await self.body()
            large = len(body) > LARGE
            self._json = await asyncio.to_thread(decoded, body, kind) if large else decoded(body, kind)
        return self._json


async def require_known_query(request: Request[Any, Any, Any]) -> None:
    """Refuse unknown parameters: a misspelt filter would find everything. Refuse numbers as times."""
    if request.scope["query_string"] and (known := _query_of(request.route_handler)):
        times = _times_of(request.route_handler)
        for name, value in request.query_params.multi_items():
            if name in times and _is_number(value):  # ambiguous: its unit, epoch and zone are unknown
                raise _refused(f"{name} is a time, not a number, as 2030-01-31T12:00:00Z")
            if name not in known:
                raise _refused(f"there is no query parameter {name!r:.100} here; {nearest(name, known)}")


@cache
def _query_of(handler: BaseRouteHandler) -> frozenset[str]:
    """The query parameters that a handler takes."""
    parameters = handler.parsed_fn_signature.parameters.items()
    kinds = ((name, field.kwarg_definition) for name, field in parameters)
    return frozenset(kind.name or name for name, kind in kinds if isinstance(kind, QueryParameter))


@cache
def _times_of(handler: BaseRouteHandler) -> frozenset[str]:
    """Those of them that are times."""
    fields = handler.parsed_fn_signature.parameters.items()
    return frozenset(name for name, field in fields if datetime in (field.annotation, *field.args))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def decoded(body: bytes, kind: Any = Any) -> Any:
    """The JSON body as that type; raises ApiError. Its size is checked before it is decoded."""
    if strict_json.count(body) > MOST_VALUES:
        raise ApiError(413, "BODY_TOO_LARGE", f"the body has more than {MOST_VALUES:,} values")
    if strict_json.depth(body) > DEEPEST:
        raise _too_deep()
    try:
        return decoder(kind).decode(body)
    except RecursionError:
        raise _too_deep() from None
    except UnicodeDecodeError:
        raise _refused("the body is not JSON: it is not UTF-8") from None
    except msgspec.ValidationError as error:
        raise _refused(f"the body does not fit: {with_valid_values(str(error), kind)}") from None
    except msgspec.DecodeError as error:
        raise _refused(f"the body is not JSON: {error}") from None


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def _refused(detail: str) -> ApiError:
    return ApiError(400, "INVALID_REQUEST", detail)


def _too_deep() -> ApiError:
    return _refused(f"the body has more than {DEEPEST} levels of nesting")
