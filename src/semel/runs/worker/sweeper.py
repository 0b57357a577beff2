"""The sweeper takes back runs whose lease expired, announces runs that still wait, removes expired rows, and seals the
history of what ended.

Every worker has one, and so has an app whose transport could lose a message. One of them is elected; when it
vanishes, another takes over.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from semel.errors import SemelError, StoreBroken, StoreUnavailable
from semel.runs.hooks import EventHooks, RunEvent
from semel.runs.leader import LeaderTask
from semel.runs.store import RunStore, lease, maintenance, manifests, outbox, partitions, transitions
from semel.runs.store.maintenance import Chores
from semel.runs.store.outbox import OutboxEvent
from semel.runs.store.transitions import Lost
from semel.runs.transports import Transport
from semel.runs.types import MICRO, is_own_work, new_id
from semel.runs.worker.run_logs import log_run
from semel.runs.worker.sealer import Sealer

if TYPE_CHECKING:
    from semel.runs.app import App

ROLE = "sweeper"
RENEW_AFTER = 0.85
"""The part of its term after which the sweeper renews it. Another may take over while a renewal is late: that does no
harm, because every step of a sweep is a transaction that two may do."""
CLEAN_UP_FOR = 5.0
"""Seconds that one turn may spend on removing expired rows; the next turn removes the rest."""
CLEAN_UP_EVERY = 60.0
"""Seconds between two looks for rows to remove."""
MANIFESTS_EVERY = 3600.0
"""Seconds after which unused manifests are looked for again."""
PARTITIONS_EVERY = 600.0
"""Seconds between two looks whether partitions are missing: they are made an hour ahead, or more."""
EVERYTHING = Chores()

_log = logging.getLogger("semel.sweeper")


class Publisher(LeaderTask):
    """Publishes events at least once, in order, by one leader at a time. The hook may be slow: nothing waits for it."""

    def __init__(self, store: RunStore, holder: str, publish: Callable[[OutboxEvent], None], interval: float) -> None:
        super().__init__(store, "publisher", holder, interval)
        self._publish = publish

    async def work(self) -> None:
        """Publish all events. One that cannot be published stays, and is tried in the next turn."""
        while await self.elected() and (events := await self._store.read(outbox.unpublished)):
            if not await self.publish(events):
                return

    async def publish(self, events: Sequence[OutboxEvent]) -> bool:
        """Publish these events. Returns False if that failed, or if another became the leader meanwhile."""
        done: list[OutboxEvent] = []
        try:
            for event in events:
                await self._store.run_blocking(self._publish, event)
                done.append(event)
                if not await self.elected():
                    return False
        except SemelError:
            raise
        except Exception:  # noqa: BLE001 -- the user's code
            _log.exception("an event could not be published, retrying")
            return False
        finally:
            if done:
                await self._store.write(outbox.published, done)
        return True


class Sweeper(LeaderTask):
    """Sweeps every ``interval`` seconds while it is elected.

    The statement that renews its term also tells it what there is to do, so that an idle sweeper sends no other.
    """

    def __init__(
        self,
        store: RunStore,
        holder: str,
        *,
        transport: Transport,
        hooks: EventHooks,
        publish: Callable[[OutboxEvent], None] | None = None,
        remove_old: Callable[[float], Awaitable[None]] | None = None,
        retention: float | None = None,
        interval: float = 5.0,
        tell_again: float = 30.0,
    ) -> None:
        super().__init__(store, ROLE, holder, interval)
        self._renew_after = min(RENEW_AFTER * self._term, interval)
        self._chores: Chores | None = None
        self._cleans_at = self._removes_at = self._forgets_at = 0.0
        self._transport = transport
        self._hooks = hooks
        self._publisher = None if publish is None else Publisher(store, holder, publish, min(interval, 1.0))
        self._sealer = Sealer(store)
        self._remove_old = remove_old
        self._retention = retention
        self._without_partitions = False
        self._announce_after = tell_again
        self._announced: dict[tuple[str, int], float] = {}

    def start(self) -> None:
        super().start()
        if self._publisher is not None:
            self._publisher.start()

    def stop(self) -> None:
        super().stop()
        if self._publisher is not None:
            self._publisher.stop()

    async def end(self) -> None:
        await super().end()
        if self._publisher is not None:
            await self._publisher.end()

    async def _acquire(self) -> bool:
        now = time.monotonic()
        clean = now >= self._cleans_at
        self._chores = await self._store.write(
            maintenance.lead_and_look, ROLE, self._holder, self._term, self._store.statement_context, clean=clean
        )
        if clean and self._chores is not None:
            self._cleans_at = now + CLEAN_UP_EVERY
        return self._chores is not None

    async def tick(self) -> None:
        """Do a turn when the term was renewed, unless it has time until the next renewal."""
        await self.elected()
        now = time.monotonic()
        if self._chores is not None and now + self._renew_after > self._works_at:
            chores, self._chores = self._chores, None
            self._works_at = now + self._interval
            await self.work(chores)

    async def sweep(self) -> int:
        """Do one turn, and publish all events. Returns how many lost runs the turn found."""
        lost = await self.work()
        if self._publisher is not None:
            await self._publisher.work()
        return lost

    async def work(self, chores: Chores = EVERYTHING) -> int:
        """Do one turn. Returns how many lost runs it found."""
        if chores.late:
            await self._store.write(maintenance.repair_times, self._store.statement_context)
        lost = await self._take_back() if chores.lost else 0
        if chores.expired and (removed := await self._remove_expired()):
            _log.info("removed %d keys and reservations that had expired", removed, extra={"removed": removed})
        if chores.unsealed:
            await self._tolerate(self._sealer.seal, "sealing the history")
        await self._tolerate(self._sealer.hand_out, "handing out the newest head")
        if time.monotonic() >= self._removes_at:
            await self._remove_old_runs()
        if self._transport.announces:
            await self._announce_again()
        return lost

    @staticmethod
    async def _tolerate(step: Callable[[], Awaitable[object]], name: str) -> None:
        """Do a step of a turn. If it fails, the rest is done, unless the store is unavailable to all of it.

        What is broken may be broken for this step alone, such as a privilege that its tables need.
        """
        try:
            await step()
        except SemelError as error:
            if isinstance(error, StoreUnavailable) and not isinstance(error, StoreBroken):
                raise
            _log.error("%s failed; retrying: %s", name, error)
        except Exception:  # noqa: BLE001 -- the rest does not need it
            _log.exception("%s failed; retrying", name)

    async def _remove_expired(self) -> int:
        total, more = 0, True
        await self._store.write(maintenance.add_up, self._store.statement_context)  # what is added may be old
        ends_at = time.monotonic() + CLEAN_UP_FOR
        while more and time.monotonic() < ends_at:
            removed, more = await self._store.write(maintenance.remove_expired, self._store.statement_context)
            total += removed
        return total

    async def _remove_old_runs(self) -> None:
        """Remove runs whose retention is over, and make the partitions of the time ahead."""
        made = await self._make_partitions()
        if self._remove_old is not None:
            await self._remove_old(CLEAN_UP_FOR)
        await self._remove_manifests()
        seldom = made and self._remove_old is None
        self._removes_at = time.monotonic() + (PARTITIONS_EVERY if seldom else CLEAN_UP_EVERY)

    async def _remove_manifests(self) -> None:
        """Remove manifests of workers that are gone and have no runs left, once in a while."""
        now = time.monotonic()
        if now < self._forgets_at:
            return
        self._forgets_at = now + MANIFESTS_EVERY
        more = True
        while more and time.monotonic() < now + CLEAN_UP_FOR:
            removed = await self._store.write(manifests.remove_unused, self._store.statement_context)
            more = removed >= manifests.BATCH

    async def _make_partitions(self) -> bool:
        """Make the partitions of the time ahead. Without them all goes on, in the default partition.

        Returns False if one could not be made now, and should be tried soon again.
        """
        context = self._store.statement_context
        wanted = await self._store.read(partitions.missing, self._retention, context)
        may = not wanted or await self._store.read(partitions.may_make)
        if not may and not self._without_partitions:
            _log.warning("%s", partitions.NO_PRIVILEGE)
        self._without_partitions = not may
        made = [await self._store.write(partitions.make, *times) for times in wanted] if may else []
        return all(made)

    async def _take_back(self) -> int:
        total = 0
        while lost := await self._store.write(transitions.lose_expired, self._store.statement_context):
            total += len(lost)
            for run in lost:
                log_run(
                    _log,
                    logging.WARNING,
                    f"run {run.id} was stuck: its worker is lost, and the run is now {run.status}",
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
        """Report the lost runs to the hooks, and for runs that ended also the duration of their last attempt."""
        if not lost or not self._hooks.has_hooks:
            return
        self._hooks.emit(RunEvent("stuck", count=len(lost)))
        ended = [run for run in lost if run.status != "PENDING"]
        began = await self._store.read(transitions.attempts_began, [(run.id, run.fence) for run in ended])
        for run in ended:
            seconds = (run.changed_us - began.get(run.id, run.started_us)) / MICRO
            self._hooks.emit(RunEvent("ended", run.model, run.status, seconds))

    async def _announce_again(self) -> None:
        """Announce runs that wait although they are due: their message was lost or never sent. Repeats do no harm."""
        _, until_next = await self._store.write(lease.wake, self._store.statement_context)
        if until_next is not None:
            self._asks_at = self._works_at = min(self._asks_at, time.monotonic() + max(0.05, until_next))
        waiting = await self._store.read(lease.due, self._announce_after, 1000, self._store.statement_context)
        now = time.monotonic()
        self._announced = {run.step: self._announced[run.step] for run in waiting if run.step in self._announced}
        new = [run for run in waiting if run.step not in self._announced]
        old = [run for run in waiting if now - self._announced.get(run.step, now) >= self._announce_after]
        for runs, again in ((new, False), (old, True)):
            if not runs:
                continue
            named = [(run.id, run.queue) for run in runs]
            if await self._store.run_blocking(partial(self._transport.announce, named, again=again)):
                self._announced |= {run.step: now for run in runs}


def remover(app: App, store: RunStore) -> Callable[[float], Awaitable[None]] | None:
    """Removes the app's runs whose retention is over, for at most so many seconds; None if all are kept."""
    retention = app.retention
    if retention is None:
        return None
    engine = app.engine(awaited=True, store=store)

    async def remove(seconds: float) -> None:
        removed, failed = await engine.remove_old(retention, seconds, whole=True)
        if removed:
            _log.info("removed %d runs that ended more than %g s ago", removed, retention, extra={"removed": removed})
        if failed is not None:
            _log.warning("files of removed runs are left, and will be removed later: %s", failed)

    return remove


def sweep_until_signalled(app: App, *, every: float, once: bool = False) -> int:
    """Sweep for an app until SIGTERM or SIGINT; if ``once``, do one turn and return how many lost runs it found."""
    return asyncio.run(_sweep(app, every, once))


async def _sweep(app: App, every: float, once: bool) -> int:
    store = app.ledger(awaited=True)
    store.outage = app.outage
    holder = f"sweeper-{os.getpid()}-{new_id()[-6:]}"
    sweeper = Sweeper(
        store,
        holder,
        transport=app.transport,
        hooks=app.hooks,
        publish=app.publish,
        remove_old=remover(app, store),
        retention=app.retention,
        interval=every,
    )
    stop_requested = asyncio.Event()
    try:
        if once:
            return await sweeper.sweep()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop_requested.set)
        await store.open()
        sweeper.start()
        await stop_requested.wait()
        await sweeper.end()
        await store.write(maintenance.release_leadership, ROLE, holder)
    finally:
        await store.close()
    return 0
