"""Parts of pages that change while somebody looks: server-sent events that carry HTML.

An event ``parts`` holds elements with ids; the script puts each in the place of the element that has its id.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from litestar import get
from litestar.response import Stream

from semel.dashboard.overview import WindowName
from semel.dashboard.overview.feed import OverviewFeed
from semel.dashboard.overview.windows import WINDOWS
from semel.dashboard.templating import SECURITY_HEADERS
from semel.errors import StoreUnavailable
from semel.service.api.params import TheRequest, root_of
from semel.service.auth.middleware import Principal
from semel.service.state import CurrentPrincipal, CurrentState, ServiceState

MEDIA_TYPE = "text/event-stream"
HEARTBEAT = 15.0
"""Seconds after which a silent stream says that it is alive."""
CHECKED_EVERY = 5.0
"""Seconds between two looks whether who listens would still be let in."""
ALIVE = b": still here\n\n"
SIGNED_OUT = b"event: bye\ndata:\n\n"
"""They would not: the browser asks for the page anew, and is sent to sign in."""


def replace_event(html: str) -> bytes:
    """The event that replaces these elements. A user's carriage return would end a line of it, and forge others."""
    lines = html.replace("\r", "&#13;").split("\n")
    return b"event: parts\n" + b"".join(b"data: %s\n" % line.encode("utf-8", "replace") for line in lines) + b"\n"


def end_event() -> bytes:
    """The event after which nothing more will change: the browser does not come back."""
    return b"event: over\ndata:\n\n"


def stream(events: AsyncIterator[bytes]) -> Stream:
    """The events as an answer that no proxy keeps back."""
    headers = {**SECURITY_HEADERS, "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return Stream(events, media_type=MEDIA_TYPE, headers=headers)


@get("/ui/live")
async def overview(
    request: TheRequest, service: CurrentState, caller: CurrentPrincipal, window: WindowName = "hour"
) -> Stream:
    """The parts of the overview, at first all of them and then each that has changed."""
    service.wait_slots.check(caller.name)
    scene = service.overview_feeds.of(caller, WINDOWS[window])
    await scene.view()
    return stream(_told(service, caller, scene, root_of(request)))


async def _told(service: ServiceState, caller: Principal, scene: OverviewFeed, root: str) -> AsyncIterator[bytes]:
    sent: dict[str, str] = {}
    spoken = checked = time.monotonic()
    with service.wait_slots.hold(caller.name), scene.looked_at():
        while not service.watch.ending:
            drawn = scene.drawn(root)
            if changed := [html for part, html in drawn.items() if sent.get(part) != html]:
                yield replace_event("\n".join(changed))
                sent = drawn
                spoken = time.monotonic()
            await scene.change(CHECKED_EVERY)
            if time.monotonic() - checked >= CHECKED_EVERY:
                if not await still(service, caller):
                    yield SIGNED_OUT
                    return
                checked = time.monotonic()
            if time.monotonic() - spoken >= HEARTBEAT:
                yield ALIVE
                spoken = time.monotonic()


async def still(service: ServiceState, caller: Principal) -> bool:
    """Whether they would be let in now, too. A database that is away for a moment ends no stream."""
    try:
        return await asyncio.shield(asyncio.create_task(service.auth.is_still_valid(caller)))
    except StoreUnavailable:
        return True


HANDLERS = (overview,)
