"""The words that the handlers of runs share: the run's id, the headers, and where the service is mounted."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from litestar import Request
from litestar.openapi.spec import Example
from litestar.params import HeaderParameter, PathParameter

from semel.service.settings import MEBIBYTE

RunId: TypeAlias = Annotated[
    str,
    PathParameter(
        description="The run's id.", examples=[Example(value="01980a5e-8d1c-7c3e-9f00-5f2d6a1b3c4d", summary="a UUID")]
    ),
]
IfNoneMatch: TypeAlias = Annotated[
    str | None, HeaderParameter(name="If-None-Match", description="The ETag that the client knows.")
]
PAGE_BYTES = 4 * MEBIBYTE
"""About how large a page of a list may be."""
TheRequest: TypeAlias = Request[Any, Any, Any]


def root_of(request: TheRequest) -> str:
    """Where the service is mounted, as links begin."""
    root: str = request.scope.get("root_path", "")
    return root
