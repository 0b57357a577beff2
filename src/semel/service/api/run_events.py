"""``/runs/{run_id}/events``: what happens to a run, as server-sent events.

Events are of three kinds: ``state`` for every step, ``progress``, and ``log`` for every line. Their ids are cursors: a
client that lost its connection continues from the last one it saw, and misses nothing.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Annotated, Any

import msgspec
from litestar import Response, get
from litestar.params import HeaderParameter

from semel.api_types import EventView, ProgressView
from semel.errors import RunNotFound
from semel.runs.store import queries
from semel.runs.types import LogLine, Run, Step
from semel.service import sse
from semel.service.api.params import RunId
from semel.service.api.responses import answered, refusals
from semel.service.api.views import log_view, step_view
from semel.service.auth.middleware import Principal
from semel.service.sse import to_completion
from semel.service.state import CurrentPrincipal, CurrentState, ServiceState

LINES = 1000
"""Log lines in one query."""

_CURSOR = re.compile(r"([0-9]{1,9})-([0-9]{1,18})-([0-9]{1,9})")
LastEventId = Annotated[
    str | None,
    HeaderParameter(
        name="Last-Event-ID", description="The id of the last event received; the stream continues after it."
    ),
]


class EventCursor:
    """How far a client has read: the version of the run, and the fence and line of its log."""

    def __init__(self, text: str | None) -> None:
        found = _CURSOR.fullmatch(text or "")
        self.version, fence, line = (int(each) for each in found.groups()) if found else (0, 0, 0)
        self.line = (fence, line)

    def event(self, kind: str, content: Any) -> bytes:
        """An event whose id is this cursor."""
        data = msgspec.json.encode(content)
        return b"id: %d-%d-%d\nevent: %s\ndata: %s\n\n" % (self.version, *self.line, kind.encode(), data)

    def step(self, step: Step) -> bytes:
        """The event of a step, past which the cursor moves."""
        self.version = step.version
        return self.event("state", step_view(step))


@get(
    "/runs/{run_id:str}/events",
    tags=["runs"],
    operation_id="watchRun",
    summary="The events of a run as they happen",
    responses={
        200: answered(EventView, "The events.", media_type=sse.MEDIA_TYPE),
        204: answered(None, "The run is over, and the client has seen it all."),
        **refusals(400, 404),
    },
)
async def events(
    run_id: RunId, service: CurrentState, caller: CurrentPrincipal, last: LastEventId = None
) -> Response[Any]:
    """Server-sent events: ``state``, ``progress`` and ``log``, from the beginning or from ``Last-Event-ID`` on.

    The stream ends after the run has ended. A client that reconnects then gets 204: there are no more events.
    """
    run = await service.run(run_id, caller)
    cursor = EventCursor(last)
    if run.done and cursor.version >= run.version:
        return Response(None, status_code=204)
    return sse.response(service, caller, _events(service, caller, run, cursor))


async def _events(
    service: ServiceState, caller: Principal, run: Run, cursor: EventCursor
) -> AsyncGenerator[bytes, None]:
    """The events after the cursor, until the run has ended."""
    progress: tuple[float | None, str | None] = (None, None)
    while True:
        async for event in _steps_and_lines(service, run, cursor):
            yield event
        if (run.progress, run.progress_note) != progress:
            progress = (run.progress, run.progress_note)
            yield cursor.event("progress", ProgressView(progress=run.progress, note=run.progress_note))
        if run.done and cursor.version >= run.version:
            return
        if await service.watch.change(run, sse.longest_wait(), line=cursor.line):
            try:
                run = await to_completion(_read_again(service, caller, run.id))
            except RunNotFound:  # it was purged, or the token was revoked
                return
        yield b""


async def _read_again(service: ServiceState, caller: Principal, run_id: str) -> Run:
    if not await service.auth.is_still_valid(caller):
        raise RunNotFound(f"there is no run {run_id!r}")
    return await service.run(run_id, caller)


async def _steps_and_lines(service: ServiceState, run: Run, cursor: EventCursor) -> AsyncIterator[bytes]:
    """Steps and lines after the cursor; the lines of an attempt come between its first step and the others."""
    steps: list[Step] = []
    if run.version > cursor.version:
        timeline = await to_completion(service.store.read(queries.timeline, run.id))
        steps = [each for each in timeline if each.version > cursor.version]
    fence = max(run.fence, steps[-1].fence if steps else 0)
    async for line in _lines(service, run, cursor, fence):
        while steps and (steps[0].fence < line.fence or steps[0].step == "leased"):
            yield cursor.step(steps.pop(0))
        cursor.line = (line.fence, line.line)
        yield cursor.event("log", log_view(line))
    for step in steps:
        yield cursor.step(step)


async def _lines(service: ServiceState, run: Run, cursor: EventCursor, fence: int) -> AsyncIterator[LogLine]:
    """Lines after the cursor, but none of an attempt after ``fence``, whose first step has not been sent yet."""
    while lines := await to_completion(service.store.read(queries.logs, run.id, cursor.line, LINES)):
        for line in lines:
            if line.fence > fence:
                return
            yield line
        if len(lines) < LINES:
            return


HANDLERS = (events,)
