"""``/pauses``: queues and models whose runs do not start."""

from __future__ import annotations

from typing import Annotated

from litestar import delete, get, put
from litestar.params import FromPath, JSONBody, PathParameter

from semel.api_types import PauseRequest, RemotePause
from semel.runs.types import Pause, PauseKind
from semel.service.api.params import absent
from semel.service.api.problems import ApiError
from semel.service.api.responses import refusals
from semel.service.auth.middleware import Principal, requires
from semel.service.auth.tokens import MAIN
from semel.service.state import CurrentPrincipal, CurrentState

_TAG = ["operations"]

Kind = Annotated[PauseKind, PathParameter(description="What is paused.")]


@get(
    "/pauses",
    tags=_TAG,
    operation_id="listPauses",
    summary="List paused queues and models",
    guards=[requires("operator")],
    responses=refusals(),
)
async def list_pauses(service: CurrentState, caller: CurrentPrincipal) -> list[RemotePause]:
    """What is paused, since when, by whom and why. For operators of the main tenant."""
    _check_tenant(caller)
    return [_view(each) for each in await service.engine.pauses()]


@put(
    "/pauses/{kind:str}/{name:path}",
    tags=_TAG,
    operation_id="pause",
    summary="Pause a queue or a model",
    guards=[requires("operator")],
    responses=refusals(400, 404, body=True),
)
async def pause(
    kind: Kind, name: FromPath[str], data: JSONBody[PauseRequest], service: CurrentState, caller: CurrentPrincipal
) -> RemotePause:
    """Let no run of it start until it is resumed; what runs goes on. A repeat changes nothing.

    Queues and models are those of all tenants, so this is for operators of the main tenant.
    """
    _check_tenant(caller)
    queue, model = _chosen(kind, name)
    return _view(await service.engine.pause(queue=queue, model=model, why=data.why, by=caller.actor))


@delete(
    "/pauses/{kind:str}/{name:path}",
    tags=_TAG,
    operation_id="resume",
    summary="Resume a queue or a model",
    guards=[requires("operator")],
    responses=refusals(400, 404),
)
async def resume(kind: Kind, name: FromPath[str], service: CurrentState, caller: CurrentPrincipal) -> None:
    """Let its runs start again. 404 if it is not paused. For operators of the main tenant."""
    _check_tenant(caller)
    queue, model = _chosen(kind, name)
    if not await service.engine.resume(queue=queue, model=model, by=caller.actor):
        raise absent("pause of that name")


def _check_tenant(caller: Principal) -> None:
    if caller.tenant != MAIN:
        raise ApiError(403, "FORBIDDEN", "queues and models belong to all tenants: only the main tenant pauses them")


def _chosen(kind: PauseKind, name: str) -> tuple[str | None, str | None]:
    """The queue, and the model; a name in a path may have slashes."""
    name = name.removeprefix("/")
    return (name, None) if kind == "queue" else (None, name)


def _view(pause: Pause) -> RemotePause:
    return RemotePause(
        kind=pause.kind, name=pause.name, since=pause.since, by=pause.by, why=pause.why, pending=pause.pending
    )


HANDLERS = (list_pauses, pause, resume)
