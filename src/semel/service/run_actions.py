"""Carries out actions on runs in the background: those that began here, and those of servers that died."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from semel._concurrency.periodic import repeat
from semel.runs.store import actions

if TYPE_CHECKING:
    from semel.service.state import ServiceState

AT_ONCE = 2
"""Actions that a process carries out at the same time."""
POLL = 3.0
"""Seconds between two looks for actions that nobody carries out."""


class RunActions:
    """Carries out actions while the server is up. Every process of a server has one."""

    def __init__(self, service: ServiceState) -> None:
        self._engine = service.engine
        self._store = service.store
        self._tasks: list[asyncio.Task[None]] = []
        self._begun = asyncio.Event()

    async def open(self) -> None:
        """Start."""
        self._tasks = [
            asyncio.create_task(repeat(self._carry_out_next, "an action on runs", POLL)) for _ in range(AT_ONCE)
        ]

    async def close(self) -> None:
        """Stop. What is not finished is carried on by another server, or by the one that starts next."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def wake(self) -> None:
        """Look for actions now."""
        self._begun.set()

    async def _carry_out_next(self) -> float:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._begun.wait(), POLL)
        self._begun.clear()
        context = self._store.statement_context
        while (free := await self._store.read(actions.find_free, context)) is not None:
            await self._engine.carry_out(free)
        return 0.0
