"""What an attempt was made of, how two runs differ, what changed since a run, and to run it again."""

from __future__ import annotations

from typing import Annotated, cast

from litestar import Response, get, post
from litestar.params import JSONBody, PathParameter, QueryParameter
from msgspec.structs import replace

from semel.api_types import RemoteRerun, RerunRequest
from semel.errors import Drifted
from semel.runs.diff import Drift, RunDiff, compare, refused
from semel.runs.types import Manifest
from semel.service.api.params import AnyRequest, RunId, root_of
from semel.service.api.responses import answered, json, refusals
from semel.service.api.runs import ABOUT_KEY, Key, key_headers, one_key
from semel.service.api.views import run_view
from semel.service.auth.middleware import Principal
from semel.service.state import CurrentPrincipal, CurrentState, ServiceState
from semel.service.telemetry.access_log import add_run_to_access_log

_TAG = ["runs"]
_OF_PROJECT = ("patch", "untracked", "untracked_left_out")
"""What a repository's state says of code that the members of other tenants have not seen."""

AttemptNumber = Annotated[
    int | None, QueryParameter(ge=1, description="Which attempt, from 1; by default the last one.")
]


def visible(manifest: Manifest, caller: Principal) -> Manifest:
    """What the caller may see of it: hosts and variables are for operators of the main tenant, as in the list of
    workers; changes of the code that were not committed, for members of the main tenant.
    """
    if not caller.tenant and caller.sees("operator"):
        return manifest
    environment, code = manifest.environment, manifest.code
    if environment is not None:
        environment = {name: value for name, value in environment.items() if name != "variables"}
    if code is not None and caller.tenant and isinstance(code.get("git"), dict):
        code = {**code, "git": {name: value for name, value in code["git"].items() if name not in _OF_PROJECT}}
    return replace(manifest, host=None, environment=environment, code=code)


@get(
    "/runs/{run_id:str}/manifest",
    tags=_TAG,
    operation_id="getManifest",
    summary="What an attempt was made of",
    responses=refusals(400, 404),
)
async def manifest(
    run_id: RunId, service: CurrentState, caller: CurrentPrincipal, attempt: AttemptNumber = None
) -> Response[Manifest]:
    """Parameters, seed and data; Python, packages and machine of its worker; commit, patch and digests of its code.

    An attempt that was lost has the same: it is written before the attempt begins. Hosts and variables are for
    operators of the main tenant, uncommitted changes of the code for its members.
    """
    run = await service.run(run_id, caller)
    return json(visible(await service.engine.manifest(run.id, attempt=attempt, tenant=caller.tenant), caller))


@get(
    "/runs/{run_id:str}/diff/{other_id:str}",
    tags=_TAG,
    operation_id="diffRuns",
    summary="How two runs differ",
    responses=refusals(400, 404),
)
async def diff(
    run_id: RunId,
    other_id: Annotated[str, PathParameter(description="The id of the other run.")],
    service: CurrentState,
    caller: CurrentPrincipal,
) -> Response[RunDiff]:
    """Sections that differ, what most likely explains different results first: code, data, parameters, packages, seed,
    Python, host; ids, times and hashes last. And whether the results are the same.
    """
    return json(await visible_diff(service, caller, run_id, other_id))


async def visible_diff(service: ServiceState, caller: Principal, a: str, b: str) -> RunDiff:
    """How two runs differ, as far as the caller may see it."""
    runs = [await service.run(run_id, caller) for run_id in (a, b)]
    one, other = [visible(await service.engine.manifest(run.id), caller) for run in runs]
    return compare(one, other, await service.engine.compare_results(runs[0].id, runs[1].id))


@get(
    "/runs/{run_id:str}/drift",
    tags=_TAG,
    operation_id="getDrift",
    summary="What changed since a run",
    responses=refusals(400, 404),
)
async def drift(run_id: RunId, service: CurrentState, caller: CurrentPrincipal) -> Response[Drift]:
    """What changed since its last attempt (code, data, packages, Python), of what a rerun would run with."""
    run = await service.run(run_id, caller)
    return json(visible_drift(await service.engine.drift(run.id), caller))


def visible_drift(found: Drift, caller: Principal) -> Drift:
    """The drift without lines of code and names of files, for members of other tenants than the main one."""
    if not caller.tenant:
        return found
    sections = [
        replace(each, lines=[], differences=[one for one in each.differences if not one.path.startswith("untracked")])
        for each in found.sections
    ]
    return replace(found, sections=sections)


@post(
    "/runs/{run_id:str}/rerun",
    tags=_TAG,
    operation_id="rerunRun",
    summary="Run a run again",
    response_headers=ABOUT_KEY,
    responses={
        200: answered(RemoteRerun, "The new run was there already."),
        **refusals(400, 404, 409, 422, body=True),
    },
)
async def rerun(
    *,
    run_id: RunId,
    service: CurrentState,
    caller: CurrentPrincipal,
    request: AnyRequest,
    data: JSONBody[RerunRequest | None] = None,
    key: Key = None,
) -> Response[RemoteRerun]:
    """Submit a run that has ended again, also one that succeeded, as a new run with ``rerun_of``.

    The answer has what had changed before the run was stored. With ``strict``, 409 with the same if there is anything:
    then nothing is stored. Its key and quota are its own.
    """
    run = await service.run(run_id, caller)
    asked = data or RerunRequest()
    try:
        again = await service.engine.rerun(
            run.id,
            parameters=asked.parameters,
            seed=asked.seed,
            strict=asked.strict,
            idempotency_key=one_key(key, None),
            tenant=caller.tenant,
            by=caller.actor,
        )
    except Drifted as error:
        raise refused(run.id, visible_drift(cast("Drift", error.drift), caller)) from None
    view = run_view(again.run, root_of(request))
    headers = {"Location": view.links["self"], **key_headers(again.run.key_expires_us, replayed=again.run.replayed)}
    add_run_to_access_log(again.run.id, again.run)
    answer = RemoteRerun(run=view, drift=visible_drift(again.drift, caller))
    return json(answer, 200 if again.run.replayed else 201, headers)


HANDLERS = (manifest, diff, drift, rerun)
