"""What the live pages of runs share: a place for each stream, and questions that outlive a browser that leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from semel.errors import StoreUnavailable
from semel.service.auth.middleware import Principal
from semel.service.state import ServiceState

R = TypeVar("R")
GLANCE = 0.5
"""Seconds after which a stream that pauses sees whether the server is about to end."""


async def asked_through(question: Coroutine[Any, Any, R]) -> R:
    """Ask the database in a task of its own: a browser that leaves in the middle breaks no connection of ours."""
    return await asyncio.shield(asyncio.create_task(question))


async def asked_if_there(question: Coroutine[Any, Any, R], otherwise: R) -> R:
    """The same; a database that is away for a moment ends no stream."""
    try:
        return await asked_through(question)
    except StoreUnavailable:
        return otherwise


async def pause(service: ServiceState, seconds: float) -> None:
    """Wait, but not beyond the server's end."""
    for _ in range(max(1, round(seconds / GLANCE))):
        if service.watch.ending:
            return
        await asyncio.sleep(GLANCE)


async def holding_slot(service: ServiceState, caller: Principal, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The stream, which takes a place of the caller's while it is open."""
    with service.wait_slots.hold(caller.name):
        async for event in events:
            yield event
