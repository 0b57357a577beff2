"""``/api/cloud``: jobs as the jobs API specifies them, their configs, and their costs.

A job that is refused (a quota, a cost limit, an unknown config) gets 200 with ``success: false``, because scripts use
``curl -f``. Only a request that is invalid in itself gets a problem.
"""

from __future__ import annotations

from typing import Annotated, Any

from litestar import Response, delete, get, post, put
from litestar.openapi.spec import Example
from litestar.params import JSONBody, PathParameter, QueryParameter

from semel._validation import checked_name, checked_retention
from semel.api_types import JobAnswer, JobPage, JobRequest, JobStatus, RemoteConfig, RemoteCosts, RemoteJob
from semel.errors import InvalidRequest, NotMigrated, ResultStoreError, SemelError, StoreUnavailable
from semel.runs.store import quotas
from semel.runs.types import checked_id
from semel.service import jobs
from semel.service.api.params import AnyRequest, root_of
from semel.service.api.problems import ApiError
from semel.service.api.responses import json, refusals
from semel.service.api.runs import ABOUT_KEY, Key, key_headers, one_key
from semel.service.api.views import answer_of, config_view, cost_status, entry_view, job_view
from semel.service.auth.middleware import Principal
from semel.service.jobs import JobFilter, JobSubmission
from semel.service.jobs.configs import ConfigBody
from semel.service.state import CurrentPrincipal, CurrentState

JobId = Annotated[
    str,
    PathParameter(
        description="The job's id.", examples=[Example(value="01980a5e-8d1c-7c3e-9f00-5f2d6a1b3c4d", summary="a UUID")]
    ),
]
ConfigName = Annotated[
    str,
    PathParameter(description="The config's name.", examples=[Example(value="my-training-config", summary="a name")]),
]
MAX_TRACKER_NAME = 500
_JOBS = ["jobs"]
_CONFIGS = ["configs"]
_OUR_FAULT = (StoreUnavailable, NotMigrated, ResultStoreError)


@post(
    "/api/cloud/jobs/submit",
    tags=_JOBS,
    operation_id="submitJob",
    summary="Submit a job",
    status_code=200,
    response_headers=ABOUT_KEY,
    responses=refusals(400, body=True),
)
async def submit(
    data: JSONBody[JobRequest],
    service: CurrentState,
    caller: CurrentPrincipal,
    provider: Annotated[str, QueryParameter(description="Who does the work: local or replicate.")] = "local",
    key: Key = None,
) -> Response[JobAnswer]:
    """Store a job and answer at once; the same key again answers with the same job, as it is by then.

    What cannot be had is answered with ``success: false`` and an ``error``; then nothing was created.
    """
    named = one_key(key, data.idempotency_key)
    asked = JobSubmission(
        provider=provider,
        config=data.config_name_to_load,
        key=named,
        key_ttl=_key_ttl(data.ttl_hours, named),
        tracker_run_name=_tracker_name(data.tracker_run_name),
    )
    try:
        job = await jobs.submit(service, caller, asked)
    except _OUR_FAULT:
        raise
    except SemelError as error:
        return json(JobAnswer(success=False, error=str(error)))
    return json(answer_of(job), headers=key_headers(job.key_expires_us, replayed=job.replayed))


def _key_ttl(hours: float | None, key: str | None) -> float | None:
    """The hours in seconds; None for the default. Raises InvalidRequest where they are given without a key."""
    if hours is None:
        return None
    if key is None:
        raise InvalidRequest("ttl_hours sets how long a key is kept, but there is no key; send an idempotency_key, too")
    return checked_retention("ttl_hours", hours, unit=3600) * 3600


def _tracker_name(name: str | None) -> str | None:
    return None if name is None else checked_name("tracker_run_name", name, most=MAX_TRACKER_NAME)


@get(
    "/api/cloud/jobs",
    tags=_JOBS,
    operation_id="listJobs",
    summary="Jobs, newest first",
    responses=refusals(400),
)
async def list_jobs(
    service: CurrentState,
    caller: CurrentPrincipal,
    request: AnyRequest,
    *,
    status: Annotated[JobStatus | None, QueryParameter(description="In this state.")] = None,
    config: Annotated[str | None, QueryParameter(description="Of this config.", max_length=1000)] = None,
    provider: Annotated[str | None, QueryParameter(description="Of this provider.", max_length=1000)] = None,
    user: Annotated[str | None, QueryParameter(description="Of this user; for operators.", max_length=1000)] = None,
    limit: Annotated[int, QueryParameter(ge=1, le=1000, description="Jobs on a page.")] = 50,
    cursor: Annotated[str | None, QueryParameter(description="The `next` of the previous page.")] = None,
) -> Response[JobPage]:
    """Submitters see their own jobs, operators those of everybody in their tenant."""
    wanted = JobFilter(
        tenant=caller.tenant,
        user=_whose(caller, user, "list the jobs of others"),
        status=status,
        config=None if config is None else checked_name("config", config, most=1000),
        provider=None if provider is None else checked_name("provider", provider, most=1000),
    )
    start = None if cursor is None else checked_id(cursor)
    if cursor is not None and start is None:
        raise InvalidRequest("cursor must be the `next` of the previous page")
    rows, after = await service.store.read(jobs.list_jobs, wanted, limit, start)
    root = root_of(request)
    return json(JobPage([job_view(row, root) for row in rows], after))


def _whose(caller: Principal, user: str | None, what: str) -> str | None:
    if caller.visible_user is not None and user not in (None, caller.visible_user):
        raise ApiError(403, "FORBIDDEN", f"only operators may {what}")
    if user is not None:
        checked_name("user", user, most=1000)
    return user if caller.visible_user is None else caller.visible_user


@get(
    "/api/cloud/jobs/{job_id:str}",
    tags=_JOBS,
    operation_id="getJob",
    summary="A job",
    responses=refusals(400, 404),
)
async def show(
    job_id: JobId, service: CurrentState, caller: CurrentPrincipal, request: AnyRequest
) -> Response[RemoteJob]:
    """The job as it stands, with the progress of its run and of its upload."""
    return json(job_view(await jobs.find(service, caller, job_id), root_of(request)))


@post(
    "/api/cloud/jobs/{job_id:str}/cancel",
    tags=_JOBS,
    operation_id="cancelJob",
    summary="Cancel a job",
    status_code=200,
    responses=refusals(400, 404, 408, 409, 413),
)
async def cancel(
    job_id: JobId, service: CurrentState, caller: CurrentPrincipal, request: AnyRequest
) -> Response[RemoteJob]:
    """End a job that waits or uploads, or ask one that runs to end. Again changes nothing; 409 for one that is over."""
    return json(job_view(await jobs.cancel(service, caller, job_id), root_of(request)))


@get(
    "/api/cloud/cost-limit/status",
    tags=_JOBS,
    operation_id="getCostLimitStatus",
    summary="The cost so far, and its limits",
    responses=refusals(400),
)
async def cost_limits(
    service: CurrentState,
    caller: CurrentPrincipal,
    user: Annotated[str | None, QueryParameter(description="Of this user; for operators.", max_length=200)] = None,
) -> Response[RemoteCosts]:
    """The caller's spending in this day, week, month and year (UTC), against the limits of their quota."""
    _whose(caller, user, "see what others spend")
    whose = checked_name("user", caller.user if user is None else user, empty=False)
    used, quota = await service.store.read(
        quotas.usage_and_quota, (caller.tenant, whose), service.store.statement_context
    )
    return json(cost_status(whose, used, quota))


@get("/api/cloud/configs", tags=_CONFIGS, operation_id="listConfigs", summary="Configs", responses=refusals(400))
async def list_configs(service: CurrentState, caller: CurrentPrincipal) -> Response[list[RemoteConfig]]:
    """Every config that a job can name. One that cannot be used says why."""
    return json([entry_view(entry, caller) for entry in await service.configs.list_all(caller.tenant)])


@get(
    "/api/cloud/configs/{name:str}",
    tags=_CONFIGS,
    operation_id="getConfig",
    summary="A config",
    responses=refusals(400, 404, 422),
)
async def show_config(name: ConfigName, service: CurrentState, caller: CurrentPrincipal) -> Response[RemoteConfig]:
    """The config that a job of this name would use."""
    return json(config_view(await service.configs.find(caller.tenant, name), caller))


@put(
    "/api/cloud/configs/{name:str}",
    tags=_CONFIGS,
    operation_id="putConfig",
    summary="Write a config",
    responses=refusals(400, body=True),
)
async def put_config(
    name: ConfigName, data: JSONBody[ConfigBody], service: CurrentState, caller: CurrentPrincipal
) -> Response[RemoteConfig]:
    """Make a config, or replace it; for operators. It wins over a file of the same name."""
    _operates(caller)
    return json(config_view(await service.configs.put(caller, name, data), caller))


@delete(
    "/api/cloud/configs/{name:str}",
    tags=_CONFIGS,
    operation_id="deleteConfig",
    summary="Remove a config",
    responses=refusals(400, 404, 408, 409, 413, 422),
)
async def delete_config(name: ConfigName, service: CurrentState, caller: CurrentPrincipal) -> None:
    """Remove what was written with PUT; for operators. Jobs that were submitted go on."""
    _operates(caller)
    await service.configs.remove(caller, name)


def _operates(caller: Principal) -> None:
    if not caller.may("operator"):
        raise ApiError(403, "FORBIDDEN", "only operators may change configs")


HANDLERS: tuple[Any, ...] = (
    submit,
    list_jobs,
    show,
    cancel,
    cost_limits,
    list_configs,
    show_config,
    put_config,
    delete_config,
)
