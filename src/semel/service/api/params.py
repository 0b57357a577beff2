"""What handlers share: their parameters, the tenant that a request is about, and where the service is mounted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

import msgspec
from litestar import Request
from litestar.openapi.spec import Example
from litestar.params import HeaderParameter, PathParameter, QueryParameter

from semel._validation import checked_name
from semel.errors import InvalidRequest
from semel.service.api.problems import ApiError
from semel.service.auth.middleware import Principal
from semel.service.auth.tokens import MAIN
from semel.service.settings import MEBIBYTE

RunId: TypeAlias = Annotated[
    str,
    PathParameter(
        description="The run's id.", examples=[Example(value="01980a5e-8d1c-7c3e-9f00-5f2d6a1b3c4d", summary="a UUID")]
    ),
]
IfNoneMatch: TypeAlias = Annotated[
    str | None, HeaderParameter(name="If-None-Match", description="The ETag that the client has.")
]
PAGE_BYTES = 4 * MEBIBYTE
"""About how large a page of a list may be."""
AnyRequest: TypeAlias = Request[Any, Any, Any]
Tenant = Annotated[
    str | None,
    QueryParameter(description="Another tenant; for admins of the main tenant (the empty one).", max_length=200),
]
Limit = Annotated[int, QueryParameter(ge=1, le=1000, description="The largest number of items.")]
After = Annotated[str | None, QueryParameter(max_length=300, description="The `next` of the previous page.")]


def root_of(request: AnyRequest) -> str:
    """The mount point of the service, with which links begin."""
    root: str = request.scope.get("root_path", "")
    return root


def parameters_in(texts: Sequence[str]) -> dict[str, Any]:
    """The parameters in texts such as ``name=value``, whose value is JSON if it is valid JSON, else text."""
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals or name in found:
            raise InvalidRequest(f"{text!r:.80} must be a parameter, such as name=value, and each name given once")
        try:
            found[name] = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError, UnicodeError):
            found[name] = value
    return found


def tenant_for(caller: Principal, asked: str | None) -> str:
    """The tenant of a request: the caller's own, or another for admins of the main tenant."""
    if asked is None or asked == caller.tenant:
        return caller.tenant
    if not manages_all_tenants(caller):
        raise ApiError(403, "FORBIDDEN", "only admins of the main tenant may manage other tenants")
    return checked_name("tenant", asked)


def manages_all_tenants(caller: Principal) -> bool:
    """Whether they manage, or see, every tenant."""
    return caller.tenant == MAIN and caller.sees("admin")


def absent(what: str) -> ApiError:
    """404: it does not exist, or the caller may not see it."""
    return ApiError(404, "NOT_FOUND", f"there is no {what}")
