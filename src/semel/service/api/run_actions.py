"""``/runs/actions``: cancel, retry or reprioritize all runs that match a filter."""

from __future__ import annotations

from typing import Annotated, Any

from litestar import Response, get, post
from litestar.params import JSONBody, PathParameter, QueryParameter
from msgspec import convert

from semel.api_types import ActionRequest, RemoteRunAction, RunFilter
from semel.runs.store.actions import described
from semel.runs.types import RunAction, RunFilters
from semel.service.api.params import AnyRequest, absent, root_of
from semel.service.api.problems import ApiError
from semel.service.api.responses import answered, json, refusals
from semel.service.api.runs import Key, one_key
from semel.service.auth.middleware import Principal
from semel.service.state import CurrentPrincipal, CurrentState, ServiceState

_TAG = ["runs"]

ActionId = Annotated[str, PathParameter(description="The action's id.")]


@post(
    "/runs/actions",
    tags=_TAG,
    operation_id="actOnRuns",
    summary="Act on all runs that match a filter",
    status_code=202,
    responses={
        200: answered(RemoteRunAction, "The number of runs that match, of a dry run."),
        **refusals(400, 409, body=True),
    },
)
async def act(
    data: JSONBody[ActionRequest], service: CurrentState, caller: CurrentPrincipal, request: AnyRequest, key: Key = None
) -> Response[RemoteRunAction]:
    """Cancel, retry or give a priority to all runs that match. With ``dry_run``, only count them.

    202: it is stored, and done in the background, newest runs first; ask for it at ``Location``. Runs that are
    submitted later are not changed. Submitters change their own runs, operators those of everybody in their tenant. The
    same ``Idempotency-Key`` finds the action that began before.
    """
    action = await service.engine.begin_action(
        data.action,
        priority=data.priority,
        why=data.why,
        dry_run=data.dry_run,
        tenant=caller.tenant,
        idempotency_key=one_key(key, None),
        by=caller.actor,
        **_filters(data.filter, caller),
    )
    if data.dry_run:
        return json(action_view(action))
    service.actions.wake()
    return json(action_view(action), 202, {"Location": f"{root_of(request)}/runs/actions/{action.id}"})


def _filters(wanted: RunFilter, caller: Principal) -> RunFilters:
    """The filters of the request; a submitter's own runs only."""
    user = wanted.user
    if caller.visible_user is not None:
        if user not in (None, caller.visible_user):
            raise ApiError(403, "FORBIDDEN", "only operators may change the runs of others")
        user = caller.visible_user
    return RunFilters(
        status=wanted.status,
        model=wanted.model,
        user=user,
        queue=wanted.queue,
        worker=wanted.worker,
        error=wanted.error,
        parameter=wanted.parameters,
        since=wanted.since,
        until=wanted.until,
        stalled=wanted.stalled,
    )


@get(
    "/runs/actions",
    tags=_TAG,
    operation_id="listActions",
    summary="Actions on runs, newest first",
    responses=refusals(400),
)
async def list_actions(
    service: CurrentState,
    caller: CurrentPrincipal,
    limit: Annotated[int, QueryParameter(ge=1, le=1000, description="The largest number of them.")] = 50,
) -> Response[list[RemoteRunAction]]:
    """The actions of the last month: of the caller, for operators those of everybody in their tenant."""
    found = await service.engine.actions(tenant=caller.tenant, user=caller.visible_user, limit=limit)
    return json([action_view(each) for each in found])


@get(
    "/runs/actions/{action_id:str}",
    tags=_TAG,
    operation_id="getAction",
    summary="How far an action on runs came",
    responses=refusals(400, 404),
)
async def show(action_id: ActionId, service: CurrentState, caller: CurrentPrincipal) -> Response[RemoteRunAction]:
    """The action, with how many runs matched and how many are done, failed and skipped so far."""
    return json(action_view(await visible_action(service, caller, action_id)))


async def visible_action(service: ServiceState, caller: Principal, action_id: str) -> RunAction:
    """The action, if the caller may see it."""
    action = await service.engine.action(action_id, tenant=caller.tenant)
    if caller.visible_user not in (None, action.user):
        raise absent("action of that id")
    return action


def action_view(action: RunAction) -> RemoteRunAction:
    """The action as the API returns it."""
    shown: dict[str, Any] = described(action.filter)
    return RemoteRunAction(
        action_id=action.id or None,
        action=action.action,
        state=action.state,
        filter=convert(shown, RunFilter),
        priority=action.priority,
        why=action.why,
        user=action.user,
        matched=action.matched,
        done=action.done,
        failed=action.failed,
        skipped=action.skipped,
        error=action.error,
        created_at=action.created_at,
        finished_at=action.finished_at,
    )


HANDLERS = (act, list_actions, show)
