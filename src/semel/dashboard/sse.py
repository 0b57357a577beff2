"""Live pages: server-sent events that carry HTML.

A ``replace`` event holds elements with ids; the page's script puts each in place of the element with the same id.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from litestar.response import Stream

from semel.dashboard.templating import SECURITY_HEADERS
from semel.errors import StoreUnavailable
from semel.service.auth.middleware import Principal
from semel.service.state import ServiceState

R = TypeVar("R")

MEDIA_TYPE = "text/event-stream"
HEARTBEAT = 15.0
"""Seconds of silence after which a comment is sent, so that proxies keep the connection."""
RECHECK_EVERY = 5.0
"""Seconds between two checks that the caller's token is still valid."""
NO_UPDATE = b""
ALIVE = b": alive\n\n"
END_EVENT = b"event: end\ndata:\n\n"
"""Nothing will change any more: the browser does not reconnect."""
SIGNED_OUT = b"event: signed-out\ndata:\n\n"
"""The token is no longer valid: the browser reloads the page, and is redirected to the sign-in."""


def replace_event(html: str) -> bytes:
    """The event that replaces these elements. Carriage returns are escaped: they would end a line of the event."""
    lines = html.replace("\r", "&#13;").split("\n")
    return b"event: replace\n" + b"".join(b"data: %s\n" % line.encode("utf-8", "replace") for line in lines) + b"\n"


def live_stream(service: ServiceState, caller: Principal, updates: AsyncGenerator[bytes]) -> Stream:
    """A response that sends the updates until they end. ``updates`` yields ``NO_UPDATE`` when nothing has changed."""
    service.wait_slots.check(caller.name)
    headers = {**SECURITY_HEADERS, "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return Stream(_events(service, caller, updates), media_type=MEDIA_TYPE, headers=headers)


async def _events(service: ServiceState, caller: Principal, updates: AsyncGenerator[bytes]) -> AsyncIterator[bytes]:
    """Sends a comment after a long silence; ends with the server, and when the caller's token becomes invalid."""
    with service.wait_slots.hold(caller.name):
        async with aclosing(updates):
            yield ALIVE  # opens the stream before the first query
            sent = checked = time.monotonic()
            async for update in updates:
                if service.watch.ending:
                    return
                if time.monotonic() - checked >= RECHECK_EVERY:
                    if not await _still_valid(service, caller):
                        yield SIGNED_OUT
                        return
                    checked = time.monotonic()
                if update or time.monotonic() - sent >= HEARTBEAT:
                    yield update or ALIVE
                    sent = time.monotonic()


async def _still_valid(service: ServiceState, caller: Principal) -> bool:
    """Whether the caller's token is still valid. A short outage of the database ends no stream."""
    try:
        return await shielded(service.auth.is_still_valid(caller))
    except StoreUnavailable:
        return True


async def shielded(query: Coroutine[Any, Any, R]) -> R:
    """Runs the query in a task of its own: cancelling it with the request would break its database connection."""
    return await asyncio.shield(asyncio.create_task(query))
