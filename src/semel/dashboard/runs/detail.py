"""A run: its life as a picture, what it was asked and what it gave, live; and what can be done about it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from litestar import Response, get, post

from semel.dashboard.runs import downloads
from semel.dashboard.runs.live import asked_if_there, asked_through, holding_slot
from semel.dashboard.runs.run_detail import RunDetail, boxed, refresh_waiting, seen, template_context
from semel.dashboard.sse import ALIVE, CHECKED_EVERY, HEARTBEAT, SIGNED_OUT, end_event, replace_event, still, stream
from semel.dashboard.templating import page, redirect_with_message, render_part
from semel.errors import RunNotFound
from semel.runs.types import MICRO, Run
from semel.service.api.params import RunId, TheRequest
from semel.service.auth.middleware import Principal
from semel.service.state import CurrentPrincipal, CurrentState, ServiceState

PARTS = (
    "run_state.html",
    "run_waiting.html",
    "run_timeline.html",
    "run_outcome.html",
    "run_log.html",
    "run_facts.html",
)
"""What may change while the page is open."""
PASSING = ("run_waiting.html", "run_timeline.html")
"""What changes as time passes, though nothing happens to the run."""
FASTEST = 0.4
"""Seconds between two events at the least, however fast a run logs."""
REDRAWN_EVERY = 2.0
"""Seconds after which the picture of a run under way is drawn anew; of one that takes long, less often."""
QUEUE_EVERY = 5.0
"""Seconds after which the place in the queue is looked up anew."""


@get("/ui/runs/{run_id:str}")
async def show(run_id: RunId, request: TheRequest, service: CurrentState, caller: CurrentPrincipal) -> Response[Any]:
    """The page of a run."""
    run = await service.run(run_id, caller)
    told = await seen(service, caller, run)
    given = {"title": f"Run {run.id[-12:]}", "parameters": boxed(run.parameters_json), **template_context(told)}
    return page(request, service, caller, "run.html", **given)


@get("/ui/live/runs/{run_id:str}")
async def live(run_id: RunId, request: TheRequest, service: CurrentState, caller: CurrentPrincipal) -> Response[Any]:
    """The parts of the page that changed, as they change, until the run is over."""
    run = await service.run(run_id, caller)
    service.wait_slots.check(caller.name)
    return stream(holding_slot(service, caller, _told(request, service, caller, run)))


async def _told(request: TheRequest, service: ServiceState, caller: Principal, run: Run) -> AsyncIterator[bytes]:
    said: dict[str, str] = {}
    told = await asked_through(seen(service, caller, run))
    names: Sequence[str] = PARTS
    spoken = checked = time.monotonic()
    while True:
        given = template_context(told)
        news = {name: render_part(request, caller, name, **given) for name in names}
        if changed := [html for name, html in news.items() if said.get(name) != html]:
            said |= news
            yield replace_event("".join(changed))
            spoken = time.monotonic()
        if told.run.done:
            yield end_event()
            return
        if time.monotonic() - spoken >= HEARTBEAT:
            yield ALIVE
            spoken = time.monotonic()
        names = PARTS if await _change(service, told) else PASSING
        if service.watch.ending:
            return
        if time.monotonic() - checked >= CHECKED_EVERY:
            if not await still(service, caller):
                yield SIGNED_OUT
                return
            checked = time.monotonic()
        later = await asked_if_there(_looked_at(service, caller, told, changed=names is PARTS), told)
        if later is None:
            return
        told = later


async def _change(service: ServiceState, told: RunDetail) -> bool:
    """Wait until the run has changed (True), or until there is something new to tell by the time that has passed."""
    earliest = time.monotonic() + FASTEST
    changed = await service.watch.change(told.run, _patience(told.run), line=told.last_line)
    if changed and (early := earliest - time.monotonic()) > 0:
        await service.watch.change(told.run, early, end_only=True)
    return changed


def _patience(run: Run) -> float:
    """Seconds until a run that has not changed is looked at again: for its picture, or for its place in the queue."""
    if run.status == "PENDING":
        return QUEUE_EVERY
    age = 0 if run.started_us is None else time.time_ns() // 1000 - run.started_us
    return min(max(REDRAWN_EVERY, age / MICRO / 20), HEARTBEAT)


async def _looked_at(service: ServiceState, caller: Principal, told: RunDetail, *, changed: bool) -> RunDetail | None:
    """The run as it stands; None when it was purged."""
    try:
        if not changed:
            return await refresh_waiting(service, caller, told)
        return await seen(service, caller, await service.run(told.run.id, caller), told)
    except RunNotFound:
        return None


@post("/ui/runs/{run_id:str}/cancel", status_code=303)
async def cancel(run_id: RunId, request: TheRequest, service: CurrentState, caller: CurrentPrincipal) -> Response[Any]:
    """End the run, or ask it to end."""
    run = await service.run(run_id, caller)
    ended = await service.engine.cancel(run.id, tenant=caller.tenant)
    said = "Cancelled." if ended.done else "Cancel requested. The run gets time to clean up."
    return redirect_with_message(request, service, f"/ui/runs/{run.id}", said=said)


@post("/ui/runs/{run_id:str}/retry", status_code=303)
async def retry(run_id: RunId, request: TheRequest, service: CurrentState, caller: CurrentPrincipal) -> Response[Any]:
    """Submit it again, and go to the new run."""
    run = await service.run(run_id, caller)
    again = await service.engine.retry(run.id, tenant=caller.tenant)
    said = "A retry is under way already: this is it." if again.replayed else f"This is the retry of {run.id}."
    return redirect_with_message(request, service, f"/ui/runs/{again.id}", said=said)


HANDLERS = (show, live, cancel, retry, *downloads.HANDLERS)
