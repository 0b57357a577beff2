"""What can be asked about runs besides how they stand: their life, their logs, why they wait, sums, models, workers."""

from __future__ import annotations

import re
from typing import Annotated

from litestar import Response, get
from litestar.params import QueryParameter

from semel.api_types import LogPage, RemoteModel, RemoteStep, RemoteSummary, RemoteWorker, WaitingAnswer
from semel.errors import InvalidRequest
from semel.runs.store import queries
from semel.runs.types import INTERNAL_PREFIX, LogLine
from semel.service.api.params import PAGE_BYTES, RunId
from semel.service.api.responses import json, refusals
from semel.service.api.views import log_view, model_view, step_view, summary_view, waiting_view, worker_view
from semel.service.auth.middleware import requires
from semel.service.state import CurrentPrincipal, CurrentState

_CURSOR = re.compile(r"([0-9]{1,18})-([0-9]{1,9})")
_TAG = ["runs"]
PORTION = 500
"""Lines that are read from the database at a time."""


@get(
    "/runs/{run_id:str}/timeline",
    tags=_TAG,
    operation_id="getTimeline",
    summary="Every step of a run's life",
    responses=refusals(400, 404),
)
async def timeline(run_id: RunId, service: CurrentState, caller: CurrentPrincipal) -> Response[list[RemoteStep]]:
    """Oldest first: created, leased, retried, lost, cancelled, succeeded, … with who did it and why."""
    run = await service.run(run_id, caller)
    return json([step_view(each) for each in await service.engine.timeline(run.id, tenant=caller.tenant)])


@get(
    "/runs/{run_id:str}/waiting",
    tags=_TAG,
    operation_id="getWaiting",
    summary="Why a run is waiting",
    responses=refusals(400, 404),
)
async def waiting(run_id: RunId, service: CurrentState, caller: CurrentPrincipal) -> Response[WaitingAnswer]:
    """Why it is pending, since when, which place it has; ``waiting`` is null when it is not pending."""
    run = await service.run(run_id, caller)
    told = await service.engine.waiting(run.id, tenant=caller.tenant)
    return json(WaitingAnswer(status=run.status, waiting=None if told is None else waiting_view(told)))


@get(
    "/runs/{run_id:str}/logs",
    tags=_TAG,
    operation_id="getLogs",
    summary="What a run logged",
    responses=refusals(400, 404),
)
async def logs(
    run_id: RunId,
    service: CurrentState,
    caller: CurrentPrincipal,
    after: Annotated[str | None, QueryParameter(description="``next`` of the answer before.")] = None,
    limit: Annotated[int, QueryParameter(ge=1, le=10_000, description="Lines at the most.")] = 1000,
) -> Response[LogPage]:
    """Lines, oldest first. ``next`` is where to go on, now or later.

    An answer of some megabytes ends before ``limit``; only one without lines says that there are no more.
    """
    run = await service.run(run_id, caller)
    seen = line_of(after)
    lines: list[LogLine] = []
    room = PAGE_BYTES
    while room > 0 and len(lines) < limit:
        some = await service.store.read(queries.logs, run.id, seen, min(PORTION, limit - len(lines)))
        lines += some
        if len(some) < PORTION:
            break
        room -= sum(len(each.text) for each in some)
        seen = (some[-1].fence, some[-1].line)
    last = (lines[-1].fence, lines[-1].line) if lines else seen
    return json(LogPage(lines=[log_view(each) for each in lines], next=f"{last[0]}-{last[1]}"))


def line_of(cursor: str | None) -> tuple[int, int]:
    """The (fence, line) that a cursor of logs names."""
    if cursor is None:
        return 0, 0
    found = _CURSOR.fullmatch(cursor)
    if found is None:
        raise InvalidRequest("after is what next said, such as 1-42")
    return int(found[1]), int(found[2])


@get(
    "/summary",
    tags=_TAG,
    operation_id="getSummary",
    summary="How the runs of each model stand",
    responses=refusals(400),
)
async def summary(
    service: CurrentState,
    caller: CurrentPrincipal,
    grouped: Annotated[
        bool, QueryParameter(description="Also by the parameter that each model is summarised by.")
    ] = False,
) -> Response[list[RemoteSummary]]:
    """Counts by status and the mean duration; of the caller's own runs, to operators of everybody's."""
    found = await service.engine.summary(tenant=caller.tenant, grouped=grouped, user=caller.visible_user)
    return json([summary_view(each) for each in found])


@get("/models", tags=_TAG, operation_id="listModels", summary="What can be submitted", responses=refusals())
async def models(service: CurrentState) -> Response[list[RemoteModel]]:
    """The models of this server, with the JSON Schema of their parameters and how they are run."""
    registry = service.app.registry
    return json([model_view(registry[name]) for name in registry.names if not name.startswith(INTERNAL_PREFIX)])


@get(
    "/workers",
    tags=["operations"],
    operation_id="listWorkers",
    summary="Who works",
    guards=[requires("operator")],
    responses=refusals(),
)
async def workers(service: CurrentState, caller: CurrentPrincipal) -> Response[list[RemoteWorker]]:
    """The workers that are alive or were until lately. For operators."""
    whole = not caller.tenant
    return json([worker_view(each, whole=whole) for each in await service.engine.workers()])


HANDLERS = (timeline, waiting, logs, summary, models, workers)
