"""Server-sent events: the response, its heartbeats, and when a stream ends.

A source of events is an async generator of encoded events, which yields ``b""`` at least every :func:`longest_wait`
seconds. Between two of its items the stream sends heartbeats, ends if the server shuts down or the caller's token is no
longer valid, and counts against the streams that the caller may have open.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from litestar.response import Stream

from semel.errors import StoreUnavailable
from semel.service.auth.middleware import Principal
from semel.service.state import ServiceState

R = TypeVar("R")

MEDIA_TYPE = "text/event-stream"
HEARTBEAT = 15.0
"""Seconds of silence after which a comment is sent, so that proxies keep the connection open."""
CHECK_EVERY = 5.0
"""Seconds between two checks of the caller's token."""
_SHUTDOWN_POLL = 0.5


def longest_wait() -> float:
    """Seconds for which a source may wait for its next event."""
    return min(HEARTBEAT, CHECK_EVERY)


def response(
    service: ServiceState,
    caller: Principal,
    events: AsyncGenerator[bytes, None],
    *,
    headers: Mapping[str, str] | None = None,
    signed_out: bytes = b"",
) -> Stream:
    """Respond with the events; 429 if the caller has too many streams open.

    ``signed_out`` is the last event for a caller whose token is no longer valid.
    """
    service.wait_slots.check(caller.name)
    unbuffered = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    stream = _stream(service, caller, events, signed_out)
    return Stream(stream, media_type=MEDIA_TYPE, headers={**(headers or {}), **unbuffered})


async def _stream(
    service: ServiceState, caller: Principal, events: AsyncGenerator[bytes, None], signed_out: bytes
) -> AsyncIterator[bytes]:
    with service.wait_slots.hold(caller.name):
        yield b": hello\n\n"
        sent = checked = time.monotonic()
        async with aclosing(events):
            async for event in events:
                if service.watch.ending:
                    return
                if time.monotonic() - checked >= CHECK_EVERY:
                    if not await _is_still_valid(service, caller):
                        yield signed_out
                        return
                    checked = time.monotonic()
                if event or time.monotonic() - sent >= HEARTBEAT:
                    yield event or b": still here\n\n"
                    sent = time.monotonic()


async def _is_still_valid(service: ServiceState, caller: Principal) -> bool:
    """Whether the caller's token is still valid; True while the database is unavailable, so that it ends no stream."""
    try:
        return await to_completion(service.auth.is_still_valid(caller))
    except StoreUnavailable:
        return True


async def to_completion(query: Coroutine[Any, Any, R]) -> R:
    """Run the query in a task of its own: a client that disconnects meanwhile does not break a database connection."""
    return await asyncio.shield(asyncio.create_task(query))


async def pause(service: ServiceState, seconds: float) -> None:
    """Sleep, but not beyond the start of the server's shutdown."""
    for _ in range(max(1, round(seconds / _SHUTDOWN_POLL))):
        if service.watch.ending:
            return
        await asyncio.sleep(_SHUTDOWN_POLL)
