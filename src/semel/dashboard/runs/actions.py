"""``/ui/actions``: cancel, retry or reprioritize all runs that match the filters of the list; how far that came.

The number of runs is shown first. Then the action is stored, and done in the background by any server.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Annotated, Any

from litestar import Response, get, post
from litestar.params import PathParameter
from litestar.response import Stream

from semel.dashboard.forms import Form, form_of
from semel.dashboard.runs.filters import parse_filters
from semel.dashboard.sse import END_EVENT, NO_UPDATE, live_response, replace_event
from semel.dashboard.templating import page, redirect, render_part
from semel.errors import InvalidRequest, StoreUnavailable
from semel.runs.store.actions import described
from semel.runs.types import ActionKind, RunAction, new_id
from semel.service.api.params import AnyRequest, root_of
from semel.service.api.run_actions import visible_action
from semel.service.auth.middleware import Principal
from semel.service.sse import pause, to_completion
from semel.service.state import CurrentPrincipal, CurrentState, ServiceState

PATH = "/ui/actions"
VERBS: dict[ActionKind, str] = {"cancel": "Cancel", "retry": "Retry", "set_priority": "Change the priority of"}
SHOWN = 50
PAUSE = 1.0
"""Seconds between two looks at an action that is under way."""

ActionId = Annotated[str, PathParameter(description="The action's id.")]


@post("/ui/runs/actions", status_code=200)
async def ask(request: AnyRequest, service: CurrentState, caller: CurrentPrincipal) -> Response[Any]:
    """How many runs match, and a form that confirms it."""
    form = form_of(request)
    filters = parse_filters(form.every("status"), form.get).fixed()
    if filters.q:
        raise InvalidRequest("an action changes all runs that match the filters; a search is not one of them")
    action = _action(form)
    found = await service.engine.begin_action(
        action,
        priority=0 if action == "set_priority" else None,
        dry_run=True,
        tenant=caller.tenant,
        by=caller.actor,
        **filters.options(caller),
    )
    return page(
        request,
        service,
        caller,
        "runs/confirm.html",
        title=f"{VERBS[action]} runs",
        verb=VERBS[action],
        action=found,
        shown=described(found.filter),
        filters=filters,
        key=new_id(),
    )


@post(PATH, status_code=303)
async def begin(request: AnyRequest, service: CurrentState, caller: CurrentPrincipal) -> Response[Any]:
    """Begin the action that was confirmed; the same form sent twice begins one."""
    form = form_of(request)
    begun = await service.engine.begin_action(
        _action(form),
        priority=_priority(form),
        tenant=caller.tenant,
        idempotency_key=form.get("key") or None,
        by=caller.actor,
        **parse_filters(form.every("status"), form.get).options(caller),
    )
    service.actions.wake()
    return redirect(f"{root_of(request)}{PATH}/{begun.id}")


def _action(form: Form) -> ActionKind:
    for each in VERBS:
        if form.get("action") == each:
            return each
    raise InvalidRequest(f"the action must be one of {', '.join(VERBS)}")


def _priority(form: Form) -> int | None:
    if _action(form) != "set_priority":
        return None
    try:
        return int(form.get("priority"))
    except ValueError:
        raise InvalidRequest("the priority must be a whole number") from None


@get(PATH)
async def show_all(request: AnyRequest, service: CurrentState, caller: CurrentPrincipal) -> Response[Any]:
    """The actions of the last month: one's own, for operators those of everybody in their tenant."""
    found = await service.engine.actions(tenant=caller.tenant, user=caller.visible_user, limit=SHOWN)
    return page(request, service, caller, "runs/actions.html", title="Actions on runs", actions=found, verbs=VERBS)


@get(PATH + "/{action_id:str}")
async def show(
    request: AnyRequest, service: CurrentState, caller: CurrentPrincipal, action_id: ActionId
) -> Response[Any]:
    """One action, and how far it came."""
    action = await visible_action(service, caller, action_id)
    return page(request, service, caller, "runs/action.html", title="Action on runs", **_data(action))


@get("/ui/live/actions/{action_id:str}")
async def live(request: AnyRequest, service: CurrentState, caller: CurrentPrincipal, action_id: ActionId) -> Stream:
    """How far the action came, until it is finished."""
    action = await visible_action(service, caller, action_id)
    return live_response(service, caller, _updates(request, service, caller, action))


async def _updates(
    request: AnyRequest, service: ServiceState, caller: Principal, action: RunAction
) -> AsyncGenerator[bytes, None]:
    sent: RunAction | None = None
    while sent is None or sent.finished_us is None:
        if sent is not None:
            await pause(service, PAUSE)
            with suppress(StoreUnavailable):  # a short outage ends no stream
                action = await to_completion(service.engine.action(action.id, tenant=caller.tenant))
        html = render_part(request, caller, "runs/action_state.html", **_data(action))
        yield replace_event(html) if action != sent else NO_UPDATE
        sent = action
    yield END_EVENT


def _data(action: RunAction) -> dict[str, Any]:
    return {"action": action, "verb": VERBS[action.action], "shown": described(action.filter)}


HANDLERS = (ask, begin, show_all, show, live)
