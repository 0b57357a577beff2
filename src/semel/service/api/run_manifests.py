"""``/runs/{id}/manifest``: what an attempt was made of."""

from __future__ import annotations

from typing import Annotated

from litestar import Response, get
from litestar.params import QueryParameter
from msgspec.structs import replace

from semel.runs.types import Manifest
from semel.service.api.params import RunId
from semel.service.api.responses import json, refusals
from semel.service.auth.middleware import Principal
from semel.service.state import CurrentPrincipal, CurrentState

_TAG = ["runs"]
_OF_PROJECT = ("patch", "patch_digest", "untracked", "untracked_left_out")
"""What a repository's state says of code that the members of other tenants have not seen."""

AttemptNumber = Annotated[
    int | None, QueryParameter(ge=1, description="Which attempt, from 1; by default the last one.")
]


def visible(manifest: Manifest, caller: Principal) -> Manifest:
    """What the caller may see of it: hosts and variables are for operators of the main tenant, as in the list of
    workers; changes of the code that were not committed, for members of the main tenant.
    """
    if not caller.tenant and caller.may("operator"):
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


HANDLERS = (manifest,)
