"""``/runs``: submit, get, wait for, list, cancel and retry runs; their timelines, logs and summary; models, workers."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Coroutine
from datetime import datetime
from email.utils import formatdate
from typing import Annotated, Any, Literal
from urllib.parse import parse_qsl, urlencode

from litestar import Request, Response, get, post
from litestar.openapi.spec import Example
from litestar.params import BodyKwarg, HeaderParameter, JSONBody, PathParameter, QueryParameter

from semel._validation import checked_run_key
from semel.api_types import (
    BulkAnswer,
    CancelRequest,
    LogPage,
    RemoteModel,
    RemoteRun,
    RemoteStep,
    RemoteSummary,
    RemoteWorker,
    RunPage,
    RunRequest,
    WaitingAnswer,
)
from semel.errors import InvalidRequest, SemelError, UnknownModel
from semel.http.refusals import PROTOCOL_VERSION
from semel.runs.store import queries
from semel.runs.types import INTERNAL_PREFIX, MICRO, LogLine, Run, Status
from semel.service.api import run_events, run_files
from semel.service.api.params import PAGE_BYTES, AnyRequest, IfNoneMatch, RunId, parameters_in, root_of
from semel.service.api.problems import ApiError, problem_of
from semel.service.api.responses import answered, header, json, refusals, tagged
from semel.service.api.views import log_view, model_view, run_view, step_view, summary_view, waiting_view, worker_view
from semel.service.auth.limits import wait_for_disconnect
from semel.service.auth.middleware import Principal, requires
from semel.service.state import CurrentPrincipal, CurrentState, ServiceState
from semel.service.telemetry.access_log import add_run_to_access_log

__all__ = ["HANDLERS", "one_key", "refusals", "user_of"]

MOST_AT_ONCE = 1000
"""The most runs in one bulk request."""
LONGEST_WAIT = 60
PORTION = 500
"""Log lines in one query."""

Key = Annotated[
    str | None,
    HeaderParameter(
        name="Idempotency-Key",
        description="Identifies the run: another request with the same key finds it and creates nothing. "
        f"Version {PROTOCOL_VERSION} of the protocol: 1 to 255 characters, none of them a control character.",
        examples=[Example(summary="a CI job", value="ci-42")],
    ),
]
ManyRequests = Annotated[list[RunRequest], BodyKwarg(min_items=1, max_items=MOST_AT_ONCE)]
Wait = Annotated[
    float, QueryParameter(ge=0, le=LONGEST_WAIT, description="Seconds to wait for the end (or for a change).")
]
Exact = Annotated[
    bool,
    QueryParameter(description="Write NaN, Infinity and -Infinity as such, as Python's json does, instead of null."),
]
_TAG = ["runs"]
ABOUT_KEY = [
    header("Idempotent-Replayed", "true: the run existed already"),
    header("Idempotency-Expires", "Until when the key names it, as HTTP writes a time"),
]
_QUOTED = re.compile(r'"((?:[ !#-\[\]-~\x80-\xff]|\\["\\])*)"[ \t]*(?:;(?:[^"]|"(?:[^"\\]|\\.)*")*)?')
_LOG_CURSOR = re.compile(r"([0-9]{1,18})-([0-9]{1,9})")
_ESCAPED = re.compile(r"\\(.)")


def one_key(header: str | None, field: str | None) -> str | None:
    """The key of a request, from the header (bare or quoted) or the body; raises InvalidRequest if the two differ."""
    key = field if header is None else _unquoted(header)
    if header is not None and field is not None and key != field:
        detail = f"the Idempotency-Key of the header, {key!r:.300}, and that of the body, {field!r:.300}, differ"
        raise InvalidRequest(detail, idempotency_key=key)
    return key


def _unquoted(header: str) -> str:
    """The key in the header: bare, or a quoted string of RFC 8941, whose parameters are ignored."""
    if not header.startswith('"'):
        return header
    quoted = _QUOTED.fullmatch(header)
    if quoted is None:
        detail = f"the header Idempotency-Key begins with a quote and is not a string of RFC 8941: {header[:300]!r}"
        raise InvalidRequest(detail, idempotency_key=header[:300])
    return _ESCAPED.sub(r"\1", quoted[1])


def user_of(caller: Principal, asked: str | None) -> str:
    """The user of the new run. Never empty: no quota would apply to a run without a user."""
    if asked == "":
        raise InvalidRequest("user is empty: name the user, or leave it out to submit a run of your own")
    if asked is None or asked == caller.user:
        return caller.user
    if not caller.may("operator"):
        raise ApiError(403, "FORBIDDEN", "only operators may submit runs for others")
    return asked


def _cost(data: RunRequest, service: ServiceState, caller: Principal) -> float | None:
    """The cost of the run. Only operators may set less than the model's: others could evade every cost limit."""
    if data.cost is not None and not caller.may("operator") and data.cost < service.app.registry[data.model].cost:
        raise ApiError(403, "FORBIDDEN", f"only operators may submit {data.model} at a lower cost")
    return data.cost


def _arguments(data: RunRequest, service: ServiceState, caller: Principal, key: str | None) -> dict[str, Any]:
    """The arguments of ``submit``. Raises UnknownModel for the service's own models, which callers cannot submit."""
    if data.model.startswith(INTERNAL_PREFIX):
        raise UnknownModel(f"unknown model {data.model!r}")
    return {
        "model": data.model,
        "parameters": data.parameters,
        "idempotency_key": key,
        "user": user_of(caller, data.user),
        "tenant": caller.tenant,
        "queue": data.queue,
        "priority": data.priority,
        "delay": data.delay,
        "cost": _cost(data, service, caller),
        "key_ttl": data.key_ttl,
        "dedupe": data.dedupe,
        "seed": data.seed,
    }


def key_headers(expires_us: int | None, *, replayed: bool) -> dict[str, str]:
    """The response headers about the key, the same as those of the middleware for keys."""
    headers = {"Idempotent-Replayed": "true"} if replayed else {}
    if expires_us is not None:
        headers["Idempotency-Expires"] = formatdate(expires_us // MICRO, usegmt=True)
    return headers


def _submitted(run: Run, request: Request[Any, Any, Any]) -> Response[RemoteRun]:
    add_run_to_access_log(run.id, run)
    view = run_view(run, root_of(request))
    headers = {"Location": view.links["self"], **key_headers(run.key_expires_us, replayed=run.replayed)}
    return json(view, 200 if run.replayed else 201, headers)


@post(
    "/runs",
    tags=_TAG,
    operation_id="submitRun",
    summary="Submit a run",
    response_headers=ABOUT_KEY,
    responses={
        200: answered(RemoteRun, "The run that was there already."),
        **refusals(400, 409, 422, body=True),
    },
)
async def submit(
    data: JSONBody[RunRequest], service: CurrentState, caller: CurrentPrincipal, request: AnyRequest, key: Key = None
) -> Response[RemoteRun]:
    """Store a run and answer at once: 201 with the new run, or 200 with the one that was there already."""
    run = await service.engine.submit(**_arguments(data, service, caller, one_key(key, data.idempotency_key)))
    return _submitted(run, request)


@post(
    "/runs/bulk",
    tags=_TAG,
    operation_id="submitRuns",
    summary="Submit many runs",
    status_code=200,
    responses={
        207: answered(list[BulkAnswer], "Some were refused; the others are stored."),
        **refusals(400, body=True),
    },
)
async def submit_many(
    data: ManyRequests, service: CurrentState, caller: CurrentPrincipal, request: AnyRequest, key: Key = None
) -> Response[list[BulkAnswer]]:
    """Store up to 1,000 runs with few statements, and answer in their order.

    With an ``Idempotency-Key``, a run without a key of its own has that key and its place, ``ci-42/0``: sent again,
    all of them are found.

    Each answer has its place and a run or a problem. 200 when every one is a run, 207 when some were refused: nothing
    of the others is lost.
    """
    shared = None if key is None else checked_run_key("idempotency_key", one_key(key, None))
    asked: list[dict[str, Any]] = []
    refused: dict[int, SemelError] = {}
    for place, each in enumerate(data):
        try:
            named = f"{shared}/{place}" if each.idempotency_key is None and shared is not None else each.idempotency_key
            asked.append(_arguments(each, service, caller, named))
        except SemelError as error:
            refused[place] = error
    stored = iter(await service.engine.submit_many(asked, strict=False))
    answers = [refused[place] if place in refused else next(stored) for place in range(len(data))]
    root = root_of(request)
    views = [_one_of_many(place, answer, root) for place, answer in enumerate(answers)]
    return json(views, 207 if any(each.problem for each in views) else 200)


def _one_of_many(place: int, answer: Run | SemelError, root: str) -> BulkAnswer:
    if isinstance(answer, Run):
        return BulkAnswer(place=place, status=200 if answer.replayed else 201, run=run_view(answer, root))
    problem = problem_of(answer)
    return BulkAnswer(place=place, status=problem.status, problem=problem)


@get(
    "/runs/{run_id:str}",
    tags=_TAG,
    operation_id="getRun",
    summary="A run",
    response_headers=[header("ETag", "Changes with the run")],
    responses={304: answered(None, "It is as the client knows it."), **refusals(400, 404)},
)
async def show(
    *,
    run_id: RunId,
    service: CurrentState,
    caller: CurrentPrincipal,
    request: AnyRequest,
    wait: Wait = 0.0,
    known: IfNoneMatch = None,
) -> Response[RemoteRun]:
    """The run as it stands; 304 to those who know it so.

    With ``wait`` the answer comes when the run is over, or with ``If-None-Match`` as soon as it is other than the
    client knows it, or when the time is over.
    """
    run = await service.run(run_id, caller)
    answer = tagged(run_view(run, root_of(request)), known)
    end = time.monotonic() + wait
    while wait and not run.done and (known is None or answer.status_code == 304):
        service.wait_slots.check(caller.name)
        change = service.watch.change(run, end - time.monotonic(), end_only=known is None)
        with service.wait_slots.hold(caller.name):
            changed = await _unless_gone(change, request)
        if not await service.auth.is_still_valid(caller):
            raise ApiError(401, "UNAUTHENTICATED", "the token is no longer valid")
        run = await service.run(run_id, caller)
        answer = tagged(run_view(run, root_of(request)), known)
        if not changed:
            break
    return answer


async def _unless_gone(change: Coroutine[Any, Any, bool], request: AnyRequest) -> bool:
    """Wait for the change, or until the client disconnects."""
    waiting = asyncio.create_task(change)
    leaving = asyncio.create_task(wait_for_disconnect(request.receive))
    try:
        await asyncio.wait((waiting, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            raise ApiError(400, "INVALID_REQUEST", "the client has disconnected")
        return waiting.result()
    finally:
        waiting.cancel()
        leaving.cancel()


@get(
    "/runs/{run_id:str}/result",
    tags=_TAG,
    operation_id="getResult",
    summary="The result of a run",
    responses=refusals(400, 404, 409),
)
async def result(run_id: RunId, service: CurrentState, caller: CurrentPrincipal, exact: Exact = False) -> Response[Any]:
    """The result as JSON. 409 unless the run SUCCEEDED: ``run_status`` says how it stands.

    NaN and infinity, for which JSON has no numbers, are null, and the run has a warning that names them.
    """
    return await _result(run_id, service, caller, exact=exact)


@get(
    "/runs/{run_id:str}/{fence:int}/result.json/result",
    tags=_TAG,
    operation_id="getResultByRef",
    summary="The result of a run, by its result_ref",
    responses=refusals(400, 404, 409),
)
async def result_by_ref(
    run_id: RunId,
    fence: Annotated[int, PathParameter(description="Which attempt stored it; as ``result_ref`` has it.")],  # noqa: ARG001 -- the run has one result
    service: CurrentState,
    caller: CurrentPrincipal,
    exact: Exact = False,
) -> Response[Any]:
    """As by the run's id, for the ``result_ref`` of a result that lies in the result store."""
    return await _result(run_id, service, caller, exact=exact)


async def _result(run_id: str, service: ServiceState, caller: Principal, *, exact: bool) -> Response[Any]:
    if caller.visible_user is not None:
        await service.run(run_id, caller)
    data = await service.engine.result_json(run_id, tenant=caller.tenant, exact=exact)
    return Response(data, media_type="application/json")


@post(
    "/runs/{run_id:str}/cancel",
    tags=_TAG,
    operation_id="cancelRun",
    summary="Cancel a run",
    status_code=200,
    responses=refusals(400, 404, 409, body=True),
)
async def cancel(
    run_id: RunId,
    service: CurrentState,
    caller: CurrentPrincipal,
    request: AnyRequest,
    data: JSONBody[CancelRequest | None] = None,
) -> Response[RemoteRun]:
    """End a run that is pending, or ask a running one to end: ``cancel_requested`` is true while it cleans up.

    Again changes nothing. 409 for one that succeeded or failed before.
    """
    run = await service.run(run_id, caller)
    why = {} if data is None or data.why is None else {"why": data.why}
    run = await service.engine.cancel(run.id, tenant=caller.tenant, by=caller.actor, **why)
    add_run_to_access_log(run.id, run)
    return json(run_view(run, root_of(request)))


@post(
    "/runs/{run_id:str}/retry",
    tags=_TAG,
    operation_id="retryRun",
    summary="Submit a run again",
    response_headers=ABOUT_KEY,
    responses={
        200: answered(RemoteRun, "The new run was there already."),
        **refusals(400, 404, 408, 409, 413, 422),
    },
)
async def retry(
    run_id: RunId, service: CurrentState, caller: CurrentPrincipal, request: AnyRequest, key: Key = None
) -> Response[RemoteRun]:
    """Submit a failed or cancelled run again, as a new run with ``retry_of``.

    201 with the new run; 200 with the one that came of an earlier retry: while it is under way, or, of one with the
    same ``Idempotency-Key``, whatever became of it. Takes no body.
    """
    run = await service.run(run_id, caller)
    again = await service.engine.retry(
        run.id, idempotency_key=one_key(key, None), tenant=caller.tenant, by=caller.actor
    )
    return _submitted(again, request)


def _filter(name: str, description: str) -> Any:
    return QueryParameter(name=name, description=description, max_length=1000)


@get(
    "/runs",
    tags=_TAG,
    operation_id="listRuns",
    summary="Runs, newest first",
    response_headers=[header("Link", 'The next page, as rel="next"')],
    responses=refusals(400),
)
async def list_runs(
    *,
    service: CurrentState,
    caller: CurrentPrincipal,
    request: AnyRequest,
    status: Annotated[list[Status] | None, QueryParameter(description="Any of these; may be repeated.")] = None,
    model: Annotated[str | None, _filter("model", "Of this model.")] = None,
    user: Annotated[str | None, _filter("user", "Of this user; others than oneself for operators.")] = None,
    queue: Annotated[str | None, _filter("queue", "In this queue.")] = None,
    worker: Annotated[str | None, _filter("worker", "The id of the worker that has the run, or had it last.")] = None,
    error: Annotated[
        str | None,
        QueryParameter(description="Whose last error contains this; case matters.", min_length=1, max_length=1000),
    ] = None,
    parameter: Annotated[
        list[str] | None,
        QueryParameter(
            description="With this value of a parameter, as name=value; may be repeated. The value is JSON if it is "
            "valid JSON, else text."
        ),
    ] = None,
    key: Annotated[str | None, _filter("idempotency_key", "Submitted with this key.")] = None,
    payload_hash: Annotated[str | None, _filter("payload_hash", "With this payload.")] = None,
    since: Annotated[datetime | None, QueryParameter(description="Submitted at this time or later.")] = None,
    until: Annotated[datetime | None, QueryParameter(description="Submitted before this time.")] = None,
    stalled: Annotated[
        bool, QueryParameter(description="Only runs that make no progress although their worker is alive.")
    ] = (False),
    id_part: Annotated[
        str | None,
        QueryParameter(
            name="id",
            max_length=36,
            description="Whose id begins or ends with these characters, at least six. A page may be empty and have a "
            "`next`: the search goes on there.",
        ),
    ] = None,
    limit: Annotated[int, QueryParameter(ge=1, le=1000, description="Runs on a page.")] = 50,
    cursor: Annotated[str | None, QueryParameter(description="The `next` of the previous page.")] = None,
    include: Annotated[
        list[Literal["parameters"]] | None, QueryParameter(description="Fields that the list omits by default.")
    ] = None,
) -> Response[RunPage]:
    """Submitters see their own runs, operators those of everybody in their tenant.

    A page ends after ``limit`` runs, or after some megabytes: as long as there is a ``next``, there is more.
    """
    if caller.visible_user is not None and user not in (None, caller.visible_user):
        raise ApiError(403, "FORBIDDEN", "only operators may list the runs of others")
    page = await service.engine.runs(
        status=status,
        model=model,
        user=user if caller.visible_user is None else caller.visible_user,
        tenant=caller.tenant,
        queue=queue,
        worker=worker,
        error=error,
        parameter=None if parameter is None else parameters_in(parameter),
        idempotency_key=key,
        payload_hash=payload_hash,
        since=since,
        until=until,
        stalled=stalled,
        id_part=id_part,
        limit=limit,
        cursor=cursor,
        parameters=bool(include),
        max_bytes=PAGE_BYTES,
    )
    root = root_of(request)
    view = RunPage(runs=[run_view(run, root) for run in page.runs], next=page.next)
    return json(view, headers=None if page.next is None else {"Link": _next_link(request, page.next)})


def _next_link(request: Request[Any, Any, Any], cursor: str) -> str:
    """The Link header of the next page: the same query with the next cursor."""
    asked = [(name, value) for name, value in parse_qsl(request.scope["query_string"].decode()) if name != "cursor"]
    return f'<{root_of(request)}/runs?{urlencode([*asked, ("cursor", cursor)])}>; rel="next"'


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
    found = await service.engine.waiting(run.id, tenant=caller.tenant)
    return json(WaitingAnswer(status=run.status, waiting=None if found is None else waiting_view(found)))


@get(
    "/runs/{run_id:str}/logs",
    tags=_TAG,
    operation_id="getLogs",
    summary="The log of a run",
    responses=refusals(400, 404),
)
async def logs(
    run_id: RunId,
    service: CurrentState,
    caller: CurrentPrincipal,
    after: Annotated[str | None, QueryParameter(description="The `next` of the previous page.")] = None,
    limit: Annotated[int, QueryParameter(ge=1, le=10_000, description="The largest number of lines.")] = 1000,
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
    """The (fence, line) of a log cursor."""
    if cursor is None:
        return 0, 0
    found = _LOG_CURSOR.fullmatch(cursor)
    if found is None:
        raise InvalidRequest("after must be the `next` of the previous page, such as 1-42")
    return int(found[1]), int(found[2])


@get(
    "/summary",
    tags=_TAG,
    operation_id="getSummary",
    summary="Number of runs by model and status",
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


@get("/models", tags=_TAG, operation_id="listModels", summary="List models", responses=refusals())
async def models(service: CurrentState) -> Response[list[RemoteModel]]:
    """The models of this server, with the JSON Schema of their parameters and how they are run."""
    registry = service.app.registry
    return json([model_view(registry[name]) for name in registry.names if not name.startswith(INTERNAL_PREFIX)])


@get(
    "/workers",
    tags=["operations"],
    operation_id="listWorkers",
    summary="List workers",
    guards=[requires("operator")],
    responses=refusals(),
)
async def workers(service: CurrentState, caller: CurrentPrincipal) -> Response[list[RemoteWorker]]:
    """The workers that are alive or were until lately. For operators."""
    whole = not caller.tenant
    return json([worker_view(each, whole=whole) for each in await service.engine.workers()])


HANDLERS = (
    submit,
    submit_many,
    show,
    list_runs,
    result,
    result_by_ref,
    cancel,
    retry,
    timeline,
    waiting,
    logs,
    summary,
    models,
    workers,
    *run_events.HANDLERS,
    *run_files.HANDLERS,
)
