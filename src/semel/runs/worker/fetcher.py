"""Leases runs for a worker whenever it has free slots, and polls seldom while there are none to lease.

On SQLite, whose every transaction waits for the disk and for all others, the ends of runs are written in the
transaction that leases the next ones.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeAlias

from msgspec import Struct

from semel._concurrency.retry import jittered
from semel.db.postgres import pools_transactions
from semel.errors import SemelError, StoreUnavailable
from semel.runs.models.model import Isolation, Registry
from semel.runs.store import RunStore, lease, transitions
from semel.runs.store.lease import Leased, LeaseRequest
from semel.runs.store.transitions import FinishedRun, FinishRequest
from semel.runs.types import RETRY_FOR, AttemptResult
from semel.runs.worker.active_runs import ActiveRuns
from semel.runs.worker.run_logs import WorkerLogger

Slots: TypeAlias = dict[Isolation, int]

LOOK_EVERY = 0.1
"""The fewest seconds between two searches for runs that have become due."""
POOLED_POLL = 1.0
"""The most seconds between two polls behind a pooler that lends a session for one transaction: there, PostgreSQL
cannot announce runs."""
LOOK_THROUGH_EVERY = 1.0
"""Seconds after which a lease looks for runs that were due before those of the last one."""
COOLDOWN = 10.0
"""Seconds for which a worker that could not begin a run leases no more runs of the same isolation."""

RETURNED = AttemptResult(kind="lost", reason="the worker was stopped before the run was done")


class WorkerConfig(Struct, frozen=True, kw_only=True):
    """The options of a Worker, checked."""

    id: str
    name: str
    queues: tuple[str, ...]
    slots: Slots
    max_runs_per_child: int | None
    poll: float
    drain: float
    sweep_every: float | None
    wait_for_database: float


class Front:
    """Where the runs begin that are still to be leased: their priority, and from when they are due, for each queue.

    Runs that have ended stay in PostgreSQL's index for as long as a transaction is open that is older, and each lease
    would pass over all of them. A run may become ready that was due earlier: all are looked through every second.
    """

    def __init__(self) -> None:
        self._since: dict[str, tuple[int, int]] = {}
        self._until = 0.0

    def since(self) -> Mapping[str, tuple[int, int]]:
        """Where the next lease begins; nothing for a queue that it looks through."""
        if time.monotonic() > self._until:
            self._since = {}
            self._until = time.monotonic() + LOOK_THROUGH_EVERY
        return self._since

    def note(self, leased: Sequence[Leased], asked: int) -> None:
        """The next ones come after the first of the lowest priority of these: those of higher ones are all leased.

        If there were fewer than asked for, nothing is left to pass over: the next lease looks through all at once.
        """
        self._since = {}
        for each in leased if len(leased) >= asked else ():
            place = (each.priority, each.due_us)
            self._since[each.queue] = min(place, self._since.get(each.queue, place))


class Fetcher:
    """Leases runs until it is ``stopped``. ``wakeup`` is set when a run has ended, or there may be a new one."""

    def __init__(
        self,
        config: WorkerConfig,
        registry: Registry,
        store: RunStore,
        active: ActiveRuns,
        *,
        log: WorkerLogger,
        before_lease: Callable[[], Awaitable[None]],
        begin: Callable[[list[Leased]], None],
        unwritten: Callable[[], int],
    ) -> None:
        self.wakeup = asyncio.Event()
        self.stopped = False
        self._config = config
        self._registry = registry
        self._store = store
        self._active = active
        self._log = log
        self._before_lease = before_lease
        self._begin = begin
        self._unwritten = unwritten
        self.busy: Slots = {"loop": 0, "process": 0, "thread": 0}
        self._paused_until: dict[Isolation, float] = {}
        self._drained: set[Isolation] = set()
        self._looked = 0.0
        self._poll_every = min(config.poll, POOLED_POLL) if pools_transactions(store.url) else config.poll
        self._lost_reply = False
        self._fronts: dict[tuple[str, ...], Front] = {}
        self._leasing = asyncio.Lock()  # what no lease under way has taken can be given back
        self._leases_with_ends = False
        self._changes = 0

    def pause_kind(self, kind: Isolation) -> None:
        """Lease no runs of this isolation for a while, because this worker cannot begin them."""
        self._paused_until[kind] = time.monotonic() + COOLDOWN

    def on_change(self) -> None:
        """Lease again, for every isolation: the database may have new runs."""
        self._changes += 1
        self._drained.clear()
        self.wakeup.set()

    def kinds(self) -> dict[Isolation, list[str]]:
        """The models that this worker has slots for, by isolation."""
        kinds: dict[Isolation, list[str]] = {}
        for model in self._registry:
            if self._config.slots[model.isolation]:
                kinds.setdefault(model.isolation, []).append(model.name)
        return kinds

    async def fetch_loop(self) -> None:
        """Lease whenever there is room, and sleep when there is nothing to lease."""
        self._leases_with_ends = self._store.dialect == "sqlite"
        while not self.stopped:
            self.wakeup.clear()
            got, asked = await self._lease()
            if asked and got >= asked:
                continue  # more may be there
            pause = await self._look([]) if asked or self._drained else self._poll()
            while not await self.sleep(pause) and not self.stopped:
                if self._lost_reply:  # what it leased is given back after the next lease
                    self._drained.clear()
                    break
                pause = await self._look(self._wanted())

    async def sleep(self, seconds: float) -> bool:
        """Sleep for so many seconds, or until ``wakeup`` is set. Returns False if nothing woke it in this time."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return True
        try:
            async with asyncio.timeout(seconds):
                return await self.wakeup.wait()
        except TimeoutError:
            return False

    def _poll(self) -> float:
        return jittered(self._poll_every)

    def _wanted(self) -> list[str]:
        """The models of which a run could begin now."""
        return [name for kind, names in self.kinds().items() if self._room(kind) > 0 for name in names]

    async def _look(self, models: list[str]) -> float:
        """Make runs ready that are due. Returns 0 if there were any, or if runs of these models wait; otherwise the
        seconds to sleep: until the next run is due, or until the next poll.
        """
        since = time.monotonic() - self._looked
        if since < LOOK_EVERY:
            return LOOK_EVERY - since
        self._looked = time.monotonic()
        store, queues = self._store, self._config.queues
        try:
            found, until_next = await store.write(lease.wake, store.statement_context, queues=queues, models=models)
        except StoreUnavailable:
            return self._poll()
        if found:
            self._drained.clear()
            return 0.0
        return self._poll() if until_next is None else min(self._poll(), max(until_next, 0.001))

    def _room(self, kind: Isolation) -> int:
        """How many more runs of the isolation can begin; 0 while too many ends wait to be written."""
        if self._unwritten() > 2 * sum(self._config.slots.values()):
            return 0
        if time.monotonic() < self._paused_until.get(kind, 0.0):
            return 0
        return self._config.slots[kind] - self.busy[kind]

    async def _lease(self) -> tuple[int, int]:
        """Fill the free slots; return how many runs were leased, of how many asked for."""
        if self._leases_with_ends and not self._lost_reply and (self._unwritten() or self._leasing.locked()):
            return 0, 0  # it wakes up when the ends are written, and these runs leased
        async with self._leasing:
            kinds = self.kinds()
            if len(kinds) > 1 and not len(self._active) and not self._drained:
                got, asked = await self._fetch_mixed(kinds)
            else:
                got, asked = await self._fetch_each(kinds)
        if self._lost_reply:
            await self.sleep(1.0)
        return got, asked

    async def _fetch_each(self, kinds: dict[Isolation, list[str]]) -> tuple[int, int]:
        got = asked = 0
        for kind, names in kinds.items():
            if request := self._request(kind, names):
                asked += request.most
                got += await self._fetch(kind, request)
        return got, asked

    def _request(self, kind: Isolation, names: list[str]) -> LeaseRequest | None:
        """What to lease for an isolation; None if it has no free slot, or if there is nothing to lease.

        At most half of the slots at a time, so that the database finds the next runs while these are executed.
        """
        room = min(self._room(kind), max(1, self._config.slots[kind] // 2))
        if room <= 0 or self.stopped or kind in self._drained:
            return None
        return self._request_for(names, room)

    def _request_for(self, names: list[str], most: int) -> LeaseRequest:
        front = self._fronts.setdefault(tuple(names), Front())
        return LeaseRequest(self._config.id, self._config.queues, names, most, front.since())

    async def _fetch_mixed(self, kinds: dict[Isolation, list[str]]) -> tuple[int, int]:
        """Lease for all kinds of models at once, for an idle worker: as many as the scarcest kind has slots."""
        room = min(self._room(kind) for kind in kinds)
        if room <= 0:
            return 0, 0
        changes = self._changes
        got = await self._fetch(None, self._request_for([name for names in kinds.values() for name in names], room))
        if not got and changes == self._changes:
            self._drained.update(kinds)
        return got, max(got, 1)

    async def _fetch(self, kind: Isolation | None, request: LeaseRequest) -> int:
        answer = await self._send({kind: request}, [])
        if answer is None:
            return 0
        if self._lost_reply:
            try:
                async with asyncio.timeout(5.0):
                    await self.give_back_unknown()
            except (SemelError, TimeoutError) as error:
                self._store.unavailable(f"runs that were leased by a lost reply are not given back yet: {error}")
        return answer[1]

    async def finish(self, endings: Sequence[FinishRequest]) -> dict[str, FinishedRun]:
        """Write the ends of attempts. On SQLite, runs for the free slots are leased in the same transaction.

        If that fails, the ends are written alone, and what it leased is given back by the next lease.
        """
        store = self._store
        if self._leases_with_ends and not self._lost_reply:
            async with self._leasing:
                requests: dict[Isolation | None, LeaseRequest] = {
                    kind: request for kind, names in self.kinds().items() if (request := self._request(kind, names))
                }
                answer = await self._send(requests, endings) if requests else None
            if answer is not None:
                return answer[0]
        return await store.write(transitions.end, endings, store.statement_context)

    async def _send(
        self, requests: Mapping[Isolation | None, LeaseRequest], endings: Sequence[FinishRequest]
    ) -> tuple[dict[str, FinishedRun], int] | None:
        """Write the ends, lease and begin runs. Returns the runs that ended, and how many began; None without a reply.

        It is not retried: if the reply was lost, the runs that it leased are given back first.
        """
        store, changes = self._store, self._changes
        await self._before_lease()
        limit = store.retry_for / 2 or RETRY_FOR
        work = store.write_once(lease.finish_and_lease, endings, list(requests.values()), store.statement_context)
        try:
            finished, leased = await store.runtime.within(limit, work)
        except SemelError as error:
            if isinstance(error, StoreUnavailable):
                self._store.unavailable(error)
            else:
                self._log.log(logging.WARNING, f"no runs could be leased, retrying: {error}")
            self._lost_reply = True
            return None
        for (kind, request), runs in zip(requests.items(), leased, strict=True):
            self._fronts[tuple(request.models)].note(runs, request.most)
            if kind and len(runs) < request.most and changes == self._changes:
                self._drained.add(kind)  # there are no more, until a change is announced
            self._begin(runs)
        return finished, sum(map(len, leased))

    async def give_back_unknown(self) -> None:
        """Give back the runs that a lease with a lost reply gave to this worker, without charging an attempt."""
        leased = await self._store.read(lease.held_by, self._config.id)
        known = {(run.leased.id, run.leased.fence) for run in self._active}  # an earlier attempt may be among them
        unknown = [each for each in leased.items() if each not in known]
        endings = [FinishRequest(run, fence, RETURNED, returned=True) for run, fence in unknown]
        if endings:
            await self._store.write(transitions.end, endings, self._store.statement_context)
        self._lost_reply = False
