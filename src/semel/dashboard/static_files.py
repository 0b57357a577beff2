"""The dashboard's stylesheet, script and sign, served from the package: no page asks another site for anything."""

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
KINDS = {
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
FOREVER = "public, max-age=31536000, immutable"
"""Of a file that is asked for by its version: another content has another address."""


class File(Struct, frozen=True):
    """A file as it is sent."""

    content: bytes
    kind: str
    version: str

    @property
    def tag(self) -> str:
        """Its ETag."""
        return f'"{self.version}"'


@cache
def files() -> dict[str, File]:
    """All of them by name, read once."""
    return {path.name: _read(path) for path in sorted(FOLDER.iterdir()) if path.suffix in KINDS}


def _read(path: Path) -> File:
    content = path.read_bytes()
    return File(content, KINDS[path.suffix], blake2b(content, digest_size=8).hexdigest())


def address(name: str) -> str:
    """Where the file is, below the root, under its version."""
    return f"/ui/static/{name}?v={files()[name].version}"


@get("/ui/static/{name:str}")
async def show(
    name: FromPath[str],
    version: Annotated[str | None, QueryParameter(name="v", max_length=64)] = None,
    known: Annotated[str | None, HeaderParameter(name="If-None-Match")] = None,
) -> Response[bytes | None]:
    """The file; for ever where it was asked for by its version."""
    file = files().get(name)
    if file is None:
        raise ApiError(404, "NOT_FOUND", "there is no such file")
    headers = {"ETag": file.tag, "Cache-Control": FOREVER if version == file.version else "no-cache"}
    if matches(known, file.tag):
        return Response(None, status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.kind)


HANDLERS = (show,)
