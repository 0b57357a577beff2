"""``GET /runs/{id}/events``: a run's life as server-sent events, as it happens.

Three kinds of events: ``state`` for every step, ``progress``, and ``log`` for every line. Their ids say how far the
client has come, so that one that lost its connection goes on from there and misses nothing.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Annotated, Any, TypeVar

import msgspec
from litestar import Response, get
from litestar.params import HeaderParameter
from litestar.response import Stream

from semel.errors import RunNotFound
from semel.runs.types import LogLine, Run, Step
from semel.service.api.params import RunId
from semel.service.api.responses import answered, refusals
from semel.service.api.run_types import EventView, ProgressView, log_view, step_view
from semel.service.auth.middleware import Principal
from semel.service.state import CurrentPrincipal, CurrentState, ServiceState

R = TypeVar("R")

MEDIA_TYPE = "text/event-stream"
HEARTBEAT = 15.0
"""Seconds after which a silent stream says that it is alive."""
LINES = 1000
"""Lines that are read at once."""

_PLACE = re.compile(r"([0-9]{1,9})-([0-9]{1,18})-([0-9]{1,9})")
LastEventId = Annotated[
    str | None, HeaderParameter(name="Last-Event-ID", description="The id of the last event seen: go on from there.")
]


class Place:
    """How far a client has come: the version of the run, and the fence and line of its log."""

    def __init__(self, text: str | None) -> None:
        found = _PLACE.fullmatch(text or "")
        self.version, fence, line = (int(each) for each in found.groups()) if found else (0, 0, 0)
        self.line = (fence, line)

    def event(self, kind: str, content: Any) -> bytes:
        """An event whose id is this place."""
        data = msgspec.json.encode(content)
        return b"id: %d-%d-%d\nevent: %s\ndata: %s\n\n" % (self.version, *self.line, kind.encode(), data)

    def step(self, step: Step) -> bytes:
        """The event of a step, which is then behind the client."""
        self.version = step.version
        return self.event("state", step_view(step))


@get(
    "/runs/{run_id:str}/events",
    tags=["runs"],
    operation_id="watchRun",
    summary="A run's life as it happens",
    responses={
        200: answered(EventView, "The events.", media_type=MEDIA_TYPE),
        204: answered(None, "The run is over, and the client has seen it all."),
        **refusals(400, 404),
    },
)
async def events(
    run_id: RunId, service: CurrentState, caller: CurrentPrincipal, last: LastEventId = None
) -> Response[Any]:
    """Server-sent events: ``state``, ``progress`` and ``log``, from the beginning or from ``Last-Event-ID`` on.

    The stream ends after the run has ended. Whoever comes back then is told by 204 that there is nothing more.
    """
    run = await service.run(run_id, caller)
    place = Place(last)
    if run.done and place.version >= run.version:
        return Response(None, status_code=204)
    service.wait_slots.check(caller.name)
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return Stream(_listening(service, caller, run, place), media_type=MEDIA_TYPE, headers=headers)


async def _listening(service: ServiceState, caller: Principal, run: Run, place: Place) -> AsyncIterator[bytes]:
    """The stream, which takes a place of the caller's while it is open."""
    with service.wait_slots.hold(caller.name):
        async for event in _told(service, caller, run, place):
            yield event


async def _told(service: ServiceState, caller: Principal, run: Run, place: Place) -> AsyncIterator[bytes]:
    """The events since the place, until the run is over."""
    progress: tuple[float | None, str | None] = (None, None)
    yield b": hello\n\n"
    spoken = time.monotonic()
    while True:
        async for event in _news(service, run, place):
            yield event
            spoken = time.monotonic()
        if (run.progress, run.progress_note) != progress:
            progress = (run.progress, run.progress_note)
            yield place.event("progress", ProgressView(progress=run.progress, note=run.progress_note))
            spoken = time.monotonic()
        if run.done and place.version >= run.version:
            return
        changed = await service.watch.change(run, spoken + HEARTBEAT - time.monotonic(), line=place.line)
        if service.watch.ending:
            return
        if time.monotonic() - spoken >= HEARTBEAT:
            yield b": still here\n\n"
            spoken = time.monotonic()
        if changed:
            now = await _seen_through(_looked_at(service, caller, run.id))
            if now is None:
                return
            run = now


async def _looked_at(service: ServiceState, caller: Principal, run_id: str) -> Run | None:
    """The run as it stands; None when it was purged, or the caller would not be let in any more."""
    try:
        return await service.run(run_id, caller) if await service.auth.is_still_valid(caller) else None
    except RunNotFound:
        return None


async def _news(service: ServiceState, run: Run, place: Place) -> AsyncIterator[bytes]:
    """Steps and lines since the place: an attempt's lines between its first step and the others."""
    steps: list[Step] = []
    if run.version > place.version:
        steps = [each for each in await _seen_through(service.store.timeline(run.id)) if each.version > place.version]
    fence = max(run.fence, steps[-1].fence if steps else 0)
    async for line in _lines(service, run, place, fence):
        while steps and (steps[0].fence < line.fence or steps[0].step == "leased"):
            yield place.step(steps.pop(0))
        place.line = (line.fence, line.line)
        yield place.event("log", log_view(line))
    for step in steps:
        yield place.step(step)


async def _lines(service: ServiceState, run: Run, place: Place, fence: int) -> AsyncIterator[LogLine]:
    """Lines since the place, of attempts up to that one: of a later one the beginning was not told yet."""
    while lines := await _seen_through(service.store.logs(run.id, place.line, LINES)):
        for line in lines:
            if line.fence > fence:
                return
            yield line
        if len(lines) < LINES:
            return


async def _seen_through(question: Coroutine[Any, Any, R]) -> R:
    """Ask the database in a task of its own: a client that leaves in the middle breaks no connection of ours."""
    return await asyncio.shield(asyncio.create_task(question))


HANDLERS = (events,)
