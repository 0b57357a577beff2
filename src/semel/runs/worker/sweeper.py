"""The sweeper finds what nobody looks after: leases that ended, runs that nobody was told of, what expired.

Every worker has one, and so has an app whose transport could lose a message; one of them is elected, and when it
vanishes another takes over.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from semel._concurrency.periodic import PeriodicTask
from semel._concurrency.retry import jittered
from semel.errors import SemelError
from semel.runs.hooks import EventHooks, RunEvent
from semel.runs.store import RunStore, lease, maintenance, outbox, transitions
from semel.runs.store.outbox import OutboxEvent
from semel.runs.store.transitions import Lost
from semel.runs.transports import Transport
from semel.runs.types import MICRO, is_own_work, new_id
from semel.runs.worker.run_logs import log_run

if TYPE_CHECKING:
    from semel.runs.app import App

ROLE = "sweeper"
TERM = 4.5
"""Seconds for which one is elected: so long, at the most, does nobody do the work of one that died."""
CLEAN_UP_FOR = 5.0
"""Seconds that one turn may spend on removing what expired; the next turn removes the rest."""

_log = logging.getLogger("semel.sweeper")


class LeaderTask(PeriodicTask):
    """Works every ``interval`` seconds while it is elected.

    A term is short, and its holder asks for the next one at half time. The others ask when it would be over.
    """

    def __init__(self, ledger: RunStore, role: str, holder: str, interval: float) -> None:
        super().__init__(ledger.runtime, f"semel-{role}")
        self._outage = ledger.outage or self._outage
        self._ledger = ledger
        self._role = role
        self._holder = holder
        self._interval = interval
        self._term = min(TERM, 3 * interval)
        self._asks_at = self._leads_until = 0.0
        self._works_at = time.monotonic() + jittered(min(interval, 0.5))

    async def elected(self) -> bool:
        """Whether the role is ours."""
        now = time.monotonic()
        if now >= self._asks_at:
            left = 0.0
            if now >= self._leads_until:
                left = await self._ledger.read(maintenance.term_left, self._role, self._holder, self._ledger.terms)
            if not left and await self._ledger.write(
                maintenance.acquire_leadership, self._role, self._holder, self._term, self._ledger.terms
            ):
                self._leads_until, self._asks_at = now + self._term, now + self._term / 2
            else:
                self._leads_until, self._asks_at = 0.0, now + min(jittered(self._interval), left + 0.1)
        return now < self._leads_until

    def pause(self) -> float:
        """See Background."""
        now = time.monotonic()
        return max(0.02, min(self._asks_at, self._works_at if now < self._leads_until else self._asks_at) - now)

    async def tick(self) -> None:
        """See Background."""
        if await self.elected() and time.monotonic() >= self._works_at:
            self._works_at = time.monotonic() + jittered(self._interval)
            await self.work()

    @abstractmethod
    async def work(self) -> None:
        """One turn."""


class Publisher(LeaderTask):
    """Publishes what has happened: at least once, in order, by one at a time. Its hook may be slow; nobody waits."""

    def __init__(self, ledger: RunStore, holder: str, publish: Callable[[OutboxEvent], None], interval: float) -> None:
        super().__init__(ledger, "publisher", holder, interval)
        self._publish = publish

    async def work(self) -> None:
        """See Elected. What could not be published stays, and is tried in the next turn."""
        while await self.elected() and (events := await self._ledger.read(outbox.unpublished)):
            if not await self.publish(events):
                return

    async def publish(self, events: Sequence[OutboxEvent]) -> bool:
        """Publish these; False when that failed, or the role went to another meanwhile."""
        done: list[OutboxEvent] = []
        try:
            for event in events:
                await self._ledger.run_blocking(self._publish, event)
                done.append(event)
                if not await self.elected():
                    return False
        except SemelError:
            raise
        except Exception:  # noqa: BLE001 -- the user's code
            _log.exception("an event could not be published, it is tried again")
            return False
        finally:
            if done:
                await self._ledger.write(outbox.published, done)
        return True


class Sweeper(LeaderTask):
    """Sweeps every ``interval`` seconds while it is elected."""

    def __init__(
        self,
        ledger: RunStore,
        holder: str,
        *,
        transport: Transport,
        news: EventHooks,
        publish: Callable[[OutboxEvent], None] | None = None,
        interval: float = 5.0,
        tell_again: float = 30.0,
    ) -> None:
        super().__init__(ledger, ROLE, holder, interval)
        self._transport = transport
        self._news = news
        self._publisher = None if publish is None else Publisher(ledger, holder, publish, min(interval, 1.0))
        self._tell_again = tell_again
        self._turns = 0
        self._told: dict[tuple[str, int], float] = {}

    def start(self) -> None:
        """See Background."""
        super().start()
        if self._publisher is not None:
            self._publisher.start()

    def stop(self) -> None:
        """See Background."""
        super().stop()
        if self._publisher is not None:
            self._publisher.stop()

    async def end(self) -> None:
        """See Background."""
        await super().end()
        if self._publisher is not None:
            await self._publisher.end()

    async def work(self) -> None:
        """See Elected."""
        await self._turn()

    async def sweep(self) -> int:
        """One turn, and everything published; answers how many runs were found lost."""
        lost = await self._turn()
        if self._publisher is not None:
            await self._publisher.work()
        return lost

    async def _turn(self) -> int:
        self._turns += 1
        await self._ledger.write(maintenance.repair_times, self._ledger.terms)
        lost = await self._take_back()
        if self._turns % 12 == 1 and (removed := await self._remove_expired()):
            _log.info("removed %d keys and reservations that had expired", removed, extra={"removed": removed})
        if self._transport.announces:
            await self._announce_again()
        return lost

    async def _remove_expired(self) -> int:
        total, more = 0, True
        ends_at = time.monotonic() + CLEAN_UP_FOR
        while more and time.monotonic() < ends_at:
            removed, more = await self._ledger.write(maintenance.remove_expired, self._ledger.terms)
            total += removed
        return total

    async def _take_back(self) -> int:
        total = 0
        while lost := await self._ledger.write(transitions.lose_expired, self._ledger.terms):
            total += len(lost)
            for run in lost:
                log_run(
                    _log,
                    logging.WARNING,
                    f"run {run.id} was stuck: its worker is lost, it is {run.status} now",
                    model=run.model,
                    run_id=run.id,
                    payload_hash=run.payload_hash,
                    worker_id=run.worker,
                    status=run.status,
                    attempt_count=run.attempts,
                )
            await self._count([run for run in lost if not is_own_work(run.model, run.user_id)])
        return total

    async def _count(self, lost: Sequence[Lost]) -> None:
        """Count what was lost, and the durations of attempts that were the last of their runs."""
        if not lost or not self._news.wanted:
            return
        self._news.tell(RunEvent("stuck", count=len(lost)))
        ended = [run for run in lost if run.status != "PENDING"]
        began = await self._ledger.read(transitions.attempts_began, [(run.id, run.fence) for run in ended])
        for run in ended:
            seconds = (run.changed_us - began.get(run.id, run.started_us)) / MICRO
            self._news.tell(RunEvent("ended", run.model, run.status, seconds))

    async def _announce_again(self) -> None:
        """Runs that wait although they could run: nobody was told, or the message is lost. One too many is no harm."""
        _, until_next = await self._ledger.write(lease.wake, self._ledger.terms)
        if until_next is not None:
            self._works_at = min(self._works_at, time.monotonic() + max(0.05, until_next))
        waiting = await self._ledger.read(lease.due, self._tell_again, 1000, self._ledger.terms)
        now = time.monotonic()
        self._told = {run.step: self._told[run.step] for run in waiting if run.step in self._told}
        new = [run for run in waiting if run.step not in self._told]
        old = [run for run in waiting if now - self._told.get(run.step, now) >= self._tell_again]
        for runs, again in ((new, False), (old, True)):
            if not runs:
                continue
            named = [(run.id, run.queue) for run in runs]
            if await self._ledger.run_blocking(partial(self._transport.announce, named, again=again)):
                self._told |= {run.step: now for run in runs}


def sweep_until_told(app: App, *, every: float, once: bool = False) -> int:
    """Sweep for an app until SIGTERM or SIGINT; or ``once``. Answers how many runs that one turn found lost."""
    return asyncio.run(_sweep(app, every, once))


async def _sweep(app: App, every: float, once: bool) -> int:
    ledger = app.ledger(awaited=True)
    ledger.outage = app.outage
    holder = f"sweeper-{os.getpid()}-{new_id()[-6:]}"
    sweeper = Sweeper(ledger, holder, transport=app.transport, news=app.news, publish=app.publish, interval=every)
    told = asyncio.Event()
    try:
        if once:
            return await sweeper.sweep()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, told.set)
        await ledger.open()
        sweeper.start()
        await told.wait()
        await sweeper.end()
        await ledger.write(maintenance.release_leadership, ROLE, holder)
    finally:
        await ledger.close()
    return 0
