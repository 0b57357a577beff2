"""The files that a run's page links to: result, parameters, log and artifacts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import PurePosixPath
from typing import Any

from litestar import Response, get
from litestar.response import Stream

from semel.dashboard.templating import iso
from semel.runs.store import queries
from semel.runs.types import Run
from semel.service.api import run_files
from semel.service.api.params import IfNoneMatch, RunId
from semel.service.api.problems import ApiError
from semel.service.api.run_files import ArtifactName
from semel.service.sse import to_completion
from semel.service.state import CurrentPrincipal, CurrentState, ServiceState

LINES = 1000
"""Log lines read at a time."""
IMAGE_TYPES = {
    ".gif": "image/gif",
    ".jpeg": "image/jpeg",
    ".jpg": "image/jpeg",
    ".png": "image/png",
    ".webp": "image/webp",
}
"""Images that the page shows. SVG is missing because it can contain scripts."""
_SAFE = {
    "Content-Security-Policy": "sandbox; default-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "private, no-store",
}


def image_type(name: str) -> str | None:
    """The media type of an artifact that is an image; None for any other."""
    return IMAGE_TYPES.get(PurePosixPath(name).suffix.lower())


def _attachment(name: str) -> dict[str, str]:
    return {**_SAFE, "Content-Disposition": f'attachment; filename="{name}"'}


@get("/ui/runs/{run_id:str}/result")
async def result(run_id: RunId, service: CurrentState, caller: CurrentPrincipal) -> Response[Any]:
    """The run's result as a JSON file."""
    run = await service.run(run_id, caller)
    data = await service.engine.result_json(run.id, tenant=caller.tenant)
    return Response(data, headers=_attachment(f"{run.id}-result.json"), media_type="application/json")


@get("/ui/runs/{run_id:str}/parameters")
async def parameters(run_id: RunId, service: CurrentState, caller: CurrentPrincipal) -> Response[Any]:
    """The run's parameters as a JSON file."""
    run = await service.run(run_id, caller)
    data = run.parameters_json.encode("utf-8", "replace")
    return Response(data, headers=_attachment(f"{run.id}-parameters.json"), media_type="application/json")


@get("/ui/runs/{run_id:str}/log")
async def log(run_id: RunId, service: CurrentState, caller: CurrentPrincipal) -> Response[Any]:
    """The run's whole log as a text file."""
    run = await service.run(run_id, caller)
    return Stream(
        _log_lines(service, run), headers=_attachment(f"{run.id}.log"), media_type="text/plain; charset=utf-8"
    )


async def _log_lines(service: ServiceState, run: Run) -> AsyncIterator[bytes]:
    after = (0, 0)
    while lines := await to_completion(service.store.read(queries.logs, run.id, after, LINES)):
        text = "".join(f"{iso(line.at_us)} {line.fence} {line.level} {line.text}\n" for line in lines)
        yield text.encode("utf-8", "replace")
        after = (lines[-1].fence, lines[-1].line)
        if len(lines) < LINES:
            return


@get("/ui/runs/{run_id:str}/artifacts/{name:path}")
async def artifact(
    run_id: RunId, name: ArtifactName, service: CurrentState, caller: CurrentPrincipal, known: IfNoneMatch = None
) -> Response[Any]:
    """An artifact as a download, as the API serves it."""
    response: Response[Any] = await run_files.artifact.fn(run_id, name, service, caller, known)
    return response


@get("/ui/runs/{run_id:str}/images/{name:path}")
async def image(
    run_id: RunId, name: ArtifactName, service: CurrentState, caller: CurrentPrincipal, known: IfNoneMatch = None
) -> Response[Any]:
    """An artifact that is an image, for the page to show. Its type never executes scripts, whatever it contains."""
    media_type = image_type(name)
    if media_type is None:
        shown = name.removeprefix("/")
        raise ApiError(404, "NOT_FOUND", f"{shown!r} is not an image that the page can show; it can be downloaded")
    response: Response[Any] = await run_files.artifact.fn(run_id, name, service, caller, known)
    if response.status_code != 304:
        response.media_type = media_type
        response.headers.update({"Content-Disposition": "inline", "X-Content-Type-Options": "nosniff"})
    return response


HANDLERS = (result, parameters, log, artifact, image)
