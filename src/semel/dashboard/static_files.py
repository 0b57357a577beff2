"""The stylesheet, scripts and icon of the dashboard, served from the package: no page loads anything from elsewhere."""

from __future__ import annotations

from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Annotated

from litestar import Response, get
from litestar.params import FromPath, HeaderParameter, QueryParameter
from msgspec import Struct

from semel.service.api.problems import ApiError
from semel.service.api.responses import matches

FOLDER = Path(__file__).parent / "static"
MEDIA_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
IMMUTABLE = "public, max-age=31536000, immutable"
"""For files requested by their version: other content has another address."""


class StaticFile(Struct, frozen=True):
    """A file as it is sent; its version is a hash of the content."""

    content: bytes
    media_type: str
    version: str


@cache
def files() -> dict[str, StaticFile]:
    """All files by name, read once."""
    return {path.name: _read(path) for path in sorted(FOLDER.iterdir()) if path.suffix in MEDIA_TYPES}


def _read(path: Path) -> StaticFile:
    content = path.read_bytes()
    return StaticFile(content, MEDIA_TYPES[path.suffix], blake2b(content, digest_size=8).hexdigest())


def address(name: str) -> str:
    """The path of a file below the root, with its version."""
    return f"/ui/static/{name}?v={files()[name].version}"


@get("/ui/static/{name:str}")
async def show(
    name: FromPath[str],
    version: Annotated[str | None, QueryParameter(name="v", max_length=64)] = None,
    known: Annotated[str | None, HeaderParameter(name="If-None-Match")] = None,
) -> Response[bytes | None]:
    """A file; cached for ever where it was requested by its version."""
    file = files().get(name)
    if file is None:
        raise ApiError(404, "NOT_FOUND", "there is no such file")
    tag = f'"{file.version}"'
    headers = {"ETag": tag, "Cache-Control": IMMUTABLE if version == file.version else "no-cache"}
    if matches(known, tag):
        return Response(None, status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.media_type)


HANDLERS = (show,)
