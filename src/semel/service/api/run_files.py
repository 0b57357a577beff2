"""``GET /runs/{id}/artifacts/{name}``: the files of a run, as downloads."""

from __future__ import annotations

import asyncio
import mimetypes
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any
from urllib.parse import quote

from litestar import Response, get
from litestar.params import PathParameter
from litestar.response import Stream

from semel.errors import RunNotComplete, RunNotFound
from semel.runs.types import Artifact, Run
from semel.service.api.params import IfNoneMatch, RunId
from semel.service.api.responses import answered, matches, refusals, unchanged
from semel.service.state import CurrentPrincipal, CurrentState

UNKNOWN = "application/octet-stream"
HARMLESS = frozenset(
    {
        "application/gzip",
        "application/json",
        "application/vnd.apache.parquet",
        "application/x-ndjson",
        "application/x-tar",
        "application/zip",
        "audio/mpeg",
        "audio/x-wav",
        "image/gif",
        "image/jpeg",
        "image/png",
        "image/webp",
        "text/csv",
        "text/markdown",
        "text/plain",
        "text/tab-separated-values",
        "video/mp4",
    }
)
"""Harmless media types. Others, such as HTML and SVG, may contain scripts, and are sent as bytes."""

_MORE_TYPES = {".ndjson": "application/x-ndjson", ".jsonl": "application/x-ndjson", ".log": "text/plain"}
_SAFETY = {
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "sandbox; default-src 'none'",
    "Cache-Control": "private, no-cache",
}

ArtifactName = Annotated[str, PathParameter(description="The artifact's name, which may have slashes.")]


@get(
    "/runs/{run_id:str}/artifacts/{name:path}",
    tags=["runs"],
    operation_id="getArtifact",
    summary="A file of a run",
    responses={
        200: answered(bytes, "The file; its type is by its name, if that is harmless.", media_type="*/*"),
        304: answered(None, "It is as the client knows it."),
        **refusals(400, 404, 409),
    },
)
async def artifact(
    run_id: RunId, name: ArtifactName, service: CurrentState, caller: CurrentPrincipal, known: IfNoneMatch = None
) -> Response[Any]:
    """The file, as a download. Its ``ETag`` is its SHA-256. 409 unless the run SUCCEEDED."""
    found = _find(await service.run(run_id, caller), name.removeprefix("/"))
    tag = f'"{found.digest}"'
    if matches(known, tag):
        return unchanged(tag)
    content = await service.engine.artifact(run_id, found.name, tenant=caller.tenant)
    first = await asyncio.to_thread(next, content, None)  # an unavailable store raises before the response begins
    headers = {
        **_SAFETY,
        "ETag": tag,
        "Content-Length": str(found.size),
        "Content-Disposition": _disposition(found.name),
    }
    return Stream(_pieces(first, content), media_type=_media_type(found.name), headers=headers)


def _find(run: Run, name: str) -> Artifact:
    """Find the artifact by its exact name, so that no name leads to another file."""
    if run.status != "SUCCEEDED":
        raise RunNotComplete(f"run {run.id} is {run.status} and has no artifacts", run.status, run.ask_again_in)
    for each in run.artifacts:
        if each.name == name:
            return each
    raise RunNotFound(f"run {run.id} has no artifact {name!r}")


async def _pieces(first: bytes | None, rest: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Read in a thread, so that a slow disk or object store does not block the event loop."""
    piece = first
    while piece is not None:
        yield piece
        piece = await asyncio.to_thread(next, rest, None)


def _media_type(name: str) -> str:
    ending = name[name.rfind(".") :].lower() if "." in name else ""
    kind, packed = mimetypes.guess_type(name, strict=False)
    kind = _MORE_TYPES.get(ending, kind)
    if packed is not None or kind not in HARMLESS:
        return "application/gzip" if packed == "gzip" else UNKNOWN
    return kind


def _disposition(name: str) -> str:
    """An attachment with the last part of the name, in ASCII and in UTF-8."""
    last = name.rpartition("/")[2]
    plain = "".join(letter if letter.isascii() and letter not in '"\\%' else "_" for letter in last)
    return f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(last, safe='')}"


HANDLERS = (artifact,)
