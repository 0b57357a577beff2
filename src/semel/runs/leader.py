"""Periodic work that one process at a time does: the processes elect a leader, with a term in the database."""

from __future__ import annotations

import time
from abc import abstractmethod

from semel._concurrency.periodic import PeriodicTask
from semel._concurrency.retry import jittered
from semel.runs.store import RunStore, maintenance

TERM = 4.75
"""Seconds of a term: if the leader dies, another takes over within this time."""


class LeaderTask(PeriodicTask):
    """Works every ``interval`` seconds while it is elected.

    The leader renews its short term, at half time unless ``_renew_after`` is another; the others try to take the role
    when the term would end.
    """

    def __init__(self, store: RunStore, role: str, holder: str, interval: float) -> None:
        super().__init__(store.runtime, f"semel-{role}")
        self._outage = store.outage or self._outage
        self._store = store
        self._role = role
        self._holder = holder
        self._interval = interval
        self._term = min(TERM, 3 * interval)
        self._renew_after = self._term / 2
        self._asks_at = self._leads_until = 0.0
        self._works_at = time.monotonic() + jittered(min(interval, 0.5))

    async def elected(self) -> bool:
        """Return whether this task is the leader; takes or renews the term when it is time to."""
        now = time.monotonic()
        if now >= self._asks_at:
            left = 0.0
            if now >= self._leads_until:
                left = await self._store.read(
                    maintenance.term_left, self._role, self._holder, self._store.statement_context
                )
            if not left and await self._acquire():
                self._leads_until, self._asks_at = now + self._term, now + self._renew_after
            else:
                self._leads_until, self._asks_at = 0.0, now + min(jittered(self._interval), left + 0.1)
        return now < self._leads_until

    async def _acquire(self) -> bool:
        """Take or renew the role. Returns False while another holds it."""
        return await self._store.write(
            maintenance.acquire_leadership, self._role, self._holder, self._term, self._store.statement_context
        )

    def pause(self) -> float:
        now = time.monotonic()
        return max(0.02, min(self._asks_at, self._works_at if now < self._leads_until else self._asks_at) - now)

    async def tick(self) -> None:
        if await self.elected() and time.monotonic() >= self._works_at:
            self._works_at = time.monotonic() + jittered(self._interval)
            await self.work()

    @abstractmethod
    async def work(self) -> object:
        """Do one turn. What it returns is ignored."""
