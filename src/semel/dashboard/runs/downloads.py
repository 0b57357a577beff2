"""What a run's page links to: its result, its parameters, its log and its files, for a browser that is signed in."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from litestar import Response, get
from litestar.response import Stream

from semel.dashboard.runs.live import asked_through
from semel.dashboard.runs.run_detail import image_kind
from semel.dashboard.wording import iso
from semel.runs.store import queries
from semel.runs.types import LogLine, Run
from semel.service.api import run_files
from semel.service.api.params import IfNoneMatch, RunId
from semel.service.api.problems import ApiError
from semel.service.api.run_files import ArtifactName
from semel.service.state import CurrentPrincipal, CurrentState, ServiceState

LINES = 1000
"""Lines of a log that are read at once."""
_SAFETY = {
    "Content-Security-Policy": "sandbox; default-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "private, no-store",
}


def _download(name: str) -> dict[str, str]:
    return {**_SAFETY, "Content-Disposition": f'attachment; filename="{name}"'}


@get("/ui/runs/{run_id:str}/result")
async def result(run_id: RunId, service: CurrentState, caller: CurrentPrincipal) -> Response[Any]:
    """What the run returned, as a file."""
    run = await service.run(run_id, caller)
    data = await service.engine.result_json(run.id, tenant=caller.tenant)
    return Response(data, headers=_download(f"{run.id}-result.json"), media_type="application/json")


@get("/ui/runs/{run_id:str}/parameters")
async def parameters(run_id: RunId, service: CurrentState, caller: CurrentPrincipal) -> Response[Any]:
    """What the run was asked for, as a file."""
    run = await service.run(run_id, caller)
    data = run.parameters_json.encode("utf-8", "replace")
    return Response(data, headers=_download(f"{run.id}-parameters.json"), media_type="application/json")


@get("/ui/runs/{run_id:str}/log")
async def log(run_id: RunId, service: CurrentState, caller: CurrentPrincipal) -> Response[Any]:
    """All that the run logged so far, as a file of text."""
    run = await service.run(run_id, caller)
    return Stream(_lines(service, run), headers=_download(f"{run.id}.log"), media_type="text/plain; charset=utf-8")


async def _lines(service: ServiceState, run: Run) -> AsyncIterator[bytes]:
    after = (0, 0)
    while lines := await asked_through(service.store.read(queries.logs, run.id, after, LINES)):
        yield "".join(_written(each) for each in lines).encode("utf-8", "replace")
        after = (lines[-1].fence, lines[-1].line)
        if len(lines) < LINES:
            return


def _written(line: LogLine) -> str:
    return f"{iso(line.at_us)} {line.fence} {line.level} {line.text}\n"


@get("/ui/runs/{run_id:str}/artifacts/{name:path}")
async def artifact(
    run_id: RunId, name: ArtifactName, service: CurrentState, caller: CurrentPrincipal, known: IfNoneMatch = None
) -> Response[Any]:
    """A file of the run's, as a download: the API's answer."""
    answer: Response[Any] = await run_files.artifact.fn(run_id, name, service, caller, known)
    return answer


@get("/ui/runs/{run_id:str}/images/{name:path}")
async def image(
    run_id: RunId, name: ArtifactName, service: CurrentState, caller: CurrentPrincipal, known: IfNoneMatch = None
) -> Response[Any]:
    """A picture of the run's, for its page: of a kind in which nothing can be run, whatever is in the file."""
    kind = image_kind(name)
    if kind is None:
        raise ApiError(
            404, "NOT_FOUND", f"{name.removeprefix('/')!r} is no picture that is shown; it can be downloaded"
        )
    answer: Response[Any] = await run_files.artifact.fn(run_id, name, service, caller, known)
    if answer.status_code != 304:
        answer.media_type = kind
        answer.headers.update({"Content-Disposition": "inline", "X-Content-Type-Options": "nosniff"})
    return answer


HANDLERS = (result, parameters, log, artifact, image)
