"""Schedules chosen by a seed: what several owners, workers and users do, one after the other, on a clock that jumps.

The same seed gives the same schedule. With a right store or database nothing is wrong in its history; a broken one is
to be caught.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from contextvars import copy_context
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

from history.recorded_runs import record
from history.requests import claim_request, complete_request, forget_request, outcome, release_request, renew_request
from semel import Quota
from semel.errors import IllegalTransition, QuotaExceeded, ReservationLost, RunNotFound
from semel.once.store import ClaimRequest, Clock, KeyRef, Store
from semel.runs.store import lease, transitions
from semel.runs.store.lease import Leased, LeaseRenewal, LeaseRequest
from semel.runs.store.transitions import FinishRequest
from semel.runs.types import AttemptResult, EndKind
from semel.testing import FakeClock
from semel.testing.history import History, RecordedApp, RecordedJobStore, RecordedStore, Recorder, read
from semel.types import Claim, Granted
from support.databases import TestDatabase

LEASE, TTL = 60.0, 600.0
STEPS = 60
"""How many steps at random follow the classics."""
START = 1_709_210_096.0


class KeySchedule:
    """Owners of two keys, who come, work, come late, and come back, on one store."""

    def __init__(self, opened: Callable[[Clock], Store], folder: Path, seed: int, steps: int = STEPS) -> None:
        self.folder = folder / f"seed {seed}"
        self.clock = FakeClock(START)
        self.recorder = Recorder(self.folder, clock=self.clock)
        self.store = RecordedStore(opened(self.clock), self.recorder)
        self.effects = Recorder(self.folder / "effects", clock=self.clock)
        self.chance = random.Random(seed)
        self.steps = steps
        self.claims: list[Claim] = []
        self.requests: list[ClaimRequest] = []
        self.values = 0
        self.scope = f"history {secrets.token_hex(4)}"  # other schedules may use the same store

    def history(self) -> History:
        """Do everything, and return what was seen."""
        asyncio.run(self._all())
        return read(self.folder)

    async def _all(self) -> None:
        await self.store.open()
        await self._classics()
        steps: dict[Callable[[], Awaitable[object]], int] = {
            self.claim: 8,
            self.claim_twice_at_once: 2,
            self.claim_again: 2,
            self.mark: 3,
            self.complete: 4,
            self.renew: 5,
            self.release: 3,
            self.forget: 2,
            self.get: 3,
            self.wait: 7,
            self.purge: 2,
        }
        for step in self.chance.choices([*steps], [*steps.values()], k=self.steps):
            await step()
        for key in ("a", "b", "message"):
            await self.store.get([KeyRef(self.scope, key)])
        await self.store.close()

    async def _classics(self) -> None:
        """The situations in which stores go wrong, each on a key of its own."""
        await self._replaced_owner()
        await self._renewed_owner()
        await self._repeats()
        await self._abandoned()
        await self._forgotten()
        await self._short_lived_value()

    async def _replaced_owner(self) -> None:
        slow = await self._granted("replaced")
        self.clock.advance(LEASE + 1)
        await asyncio.gather(*(self._claim(self._request("replaced")) for _ in range(2)))
        await self.store.renew([renew_request(slow, LEASE)])
        await self.store.complete([complete_request(slow, "late")])
        await self.store.release([release_request(slow)])
        await self.store.get([KeyRef(self.scope, "replaced")])

    async def _renewed_owner(self) -> None:
        claim = await self._granted("renewed")
        self.clock.advance(LEASE - 15)
        await self.store.renew([renew_request(claim, LEASE)])
        self.clock.advance(LEASE - 15)
        await self._claim(self._request("renewed"))
        self.clock.advance(20)
        await self.store.complete([complete_request(claim, "late, but not replaced")])

    async def _repeats(self) -> None:
        """As if replies had been lost."""
        claim = await self._granted("repeated")
        await self.claim_again()
        for value in ("first", "second"):
            await self.store.complete([complete_request(claim, value)])
        await self.store.renew([renew_request(claim, LEASE)])
        await self.store.release([release_request(claim)])
        await self._claim(self._request("repeated"))
        claim = await self._granted("released")
        for _ in range(2):
            await self.store.release([release_request(claim)])
        await self._claim(self._request("released"))
        for _ in range(3):
            await self.mark()

    async def _abandoned(self) -> None:
        claim = await self._granted("abandoned")
        await self._claim(self._request("unknown", unknown=True))
        self.clock.advance(LEASE + 1)
        await self.store.purge(100)
        await self._claim(self._request("unknown"))
        await self.store.complete([complete_request(claim, "late")])
        self.clock.advance(TTL - LEASE - 20)
        await self.store.purge(100)
        await self._claim(self._request("abandoned"))

    async def _forgotten(self) -> None:
        claim = await self._granted("forgotten")
        await self.store.forget([forget_request(claim)])
        await self.store.complete([complete_request(claim, "x")])
        for _ in range(2):
            await self.store.forget([forget_request(claim)])
        await self._claim(self._request("forgotten"))

    async def _short_lived_value(self) -> None:
        """A value that is kept for a shorter time than its key."""
        claim = await self._granted("short-lived")
        await self.store.complete([complete_request(claim, "x" * 100, value_ttl=LEASE)])
        mark = self._request("short-lived mark")
        mark.done = outcome("seen", value_ttl=LEASE)
        await self.store.claim([mark])
        for seconds in (LEASE - 10, 20):
            self.clock.advance(seconds)
            await self.store.purge(100)
            for key in ("short-lived", "short-lived mark"):
                await self._claim(self._request(key))
                await self.store.get([KeyRef(self.scope, key)])

    async def _granted(self, key: str) -> Claim:
        await self._claim(self._request(key))
        return self.claims[-1]

    def _request(self, key: str = "", *, unknown: bool | None = None) -> ClaimRequest:
        key = key or self.chance.choice("ab")
        unknown = self.chance.random() < 0.2 if unknown is None and key in "ab" else bool(unknown)
        request = claim_request(key, scope=self.scope, lease=LEASE, ttl=TTL, unknown=unknown)
        self.requests.append(request)
        return request

    async def _claim(self, request: ClaimRequest) -> None:
        (verdict,) = await self.store.claim([request])
        if isinstance(verdict, Granted):
            if verdict.claim not in self.claims:
                self.effects.effect("key", (self.scope, request.key), verdict.claim.fence)
            self.claims.append(verdict.claim)

    async def claim(self) -> None:
        await self._claim(self._request())

    async def claim_twice_at_once(self) -> None:
        """Two callers of one key; an async store switches between them wherever it waits."""
        one, other = self._request(), self._request()
        other.key = one.key
        await asyncio.gather(self._claim(one), self._claim(other))

    async def claim_again(self) -> None:
        """As if the reply had been lost."""
        if self.requests:
            request = self.requests[-1]
            (verdict,) = await self.store.claim([request])
            if isinstance(verdict, Granted):
                self.claims.append(verdict.claim)

    async def mark(self) -> None:
        request = self._request()
        request.key = "message"
        request.done = outcome("seen")
        await self.store.claim([request])

    def _some(self) -> Sequence[Claim]:
        """One of the last owners: the present one, or one who was replaced."""
        return [self.chance.choice(self.claims[-4:])] if self.claims else []

    async def complete(self) -> None:
        self.values += 1
        for claim in self._some():
            await self.store.complete([complete_request(claim, self.values)])

    async def renew(self) -> None:
        for claim in self._some():
            await self.store.renew([renew_request(claim, LEASE)])

    async def release(self) -> None:
        for claim in self._some():
            await self.store.release([release_request(claim)])

    async def forget(self) -> None:
        for claim in self._some():
            await self.store.forget([forget_request(claim)])

    async def get(self) -> None:
        await self.store.get([KeyRef(self.scope, self.chance.choice(["a", "b", "message"]))])

    async def wait(self) -> None:
        self.clock.advance(*self.chance.choices([1, 20, 45, LEASE, LEASE + 1, TTL + 1], [2, 4, 4, 2, 4, 1]))

    async def purge(self) -> None:
        await self.store.purge(100)


class RunSchedule:
    """Users who submit, reserve and cancel, and workers who work, come late and vanish, on one database."""

    LIMIT = 3

    def __init__(self, database: TestDatabase, folder: Path, seed: int, steps: int = STEPS) -> None:
        self.folder = folder / f"seed {seed}"
        self.database = database
        self.clock = database.clock
        self.chance = random.Random(seed)
        self.steps = steps
        recorder = Recorder(self.folder, clock=self.clock)
        self.effects = Recorder(self.folder / "effects", clock=self.clock)
        self.app = RecordedApp(database.app, recorder, {"u": self.LIMIT})
        self.jobs = RecordedJobStore(database.jobs, recorder)
        record(database.app._engine.store, recorder)
        self.runs: list[str] = []
        self.leased: list[Leased] = []
        self.reserved: list[str] = []
        self.numbers = 0

    def history(self) -> History:
        """Do everything, let all runs end, and return what was seen."""
        self.database.app.set_quota("u", Quota(max_concurrent=self.LIMIT))
        steps: dict[Callable[[], object], int] = {
            self.submit: 6,
            self.submit_again: 2,
            self.lease: 7,
            self.renew: 3,
            self.finish: 5,
            self.finish_and_lease: 3,
            self.sweep: 3,
            self.cancel: 1,
            self.get: 2,
            self.usage: 2,
            self.reserve: 3,
            self.use_reservation: 3,
            self.wait: 5,
        }
        self._classics()
        for step in self.chance.choices([*steps], [*steps.values()], k=self.steps):
            step()
        self.drain()
        return read(self.folder)

    def _classics(self) -> None:
        """The situations in which queues and quotas go wrong."""
        self._replaced_worker()
        self._renewed_worker()
        self._reserved_slots()
        self._busy_slots()
        self._cancelled_workers()

    def _replaced_worker(self) -> None:
        self.submit()
        slow = self._leased()
        self.clock.advance(LEASE + 1)
        self.submit_again()
        self.sweep()
        quick = self._leased()
        self._renew(slow)
        for leased, kind in ((slow, "succeeded"), (slow, "retry"), (quick, "succeeded"), (slow, "succeeded")):
            self._end(leased, cast("EndKind", kind))
        self._see(slow.id)

    def _leased(self) -> Leased:
        self.lease()
        return self.leased[-1]

    def _renewed_worker(self) -> None:
        self.submit()
        leased = self._leased()
        self.sweep()
        self.clock.advance(LEASE - 15)
        self._renew(leased)
        self.clock.advance(LEASE - 15)
        self.sweep()
        self._end(leased, "fatal")

    def _reserved_slots(self) -> None:
        for _ in range(self.LIMIT + 1):
            self.reserve()
        self.usage()
        self.jobs.consume_reservation(self.reserved[0], user_id="u", job_id="job 1")
        for reservation in (self.reserved[0], self.reserved[-1], self.reserved[-1]):
            self.jobs.release_reservation(reservation, user_id="u")
        self.usage()
        self.clock.advance(TTL + 1)
        self.usage()
        self.reserve()
        self.jobs.release_reservation(self.reserved[-1], user_id="u")

    def _busy_slots(self) -> None:
        for _ in range(self.LIMIT):
            self.submit()
            self.lease()
        self.submit()
        self.usage()
        for leased in self.leased[-self.LIMIT :]:
            self._end(leased, "succeeded")
        self.usage()

    def _cancelled_workers(self) -> None:
        """Runs that are cancelled while they run: of one the worker vanishes, of one the attempt is to be repeated."""
        for _ in range(2):
            self.submit()
            leased = self._leased()
            with suppress(IllegalTransition):  # a broken quota refuses the run, and the last lease is another's
                self.app.cancel(leased.id)
        self._end(leased, "retry")
        self.clock.advance(LEASE + 1)
        self.sweep()
        self.lease(most=2)
        self.usage()

    def _write(self, verb: Callable[..., Any], *arguments: Any) -> Any:
        return self.database.do(verb, *arguments)

    def _submit(self, key: str | None, **options: Any) -> None:
        with suppress(QuotaExceeded, ReservationLost):
            run = self.app.submit(
                "train", {"number": self.numbers}, user="u", idempotency_key=key, dedupe=False, **options
            )
            self.runs.append(run.id)

    def submit(self) -> None:
        self.numbers += 1
        self._submit(f"key {self.numbers}")

    def submit_again(self) -> None:
        """As if the reply had been lost."""
        if self.numbers:
            self._submit(f"key {self.numbers}")

    def lease(self, most: int = 1) -> list[Leased]:
        self._write(lease.wake)
        return self._begin(self._write(lease.lease, self._request(most)))

    def _request(self, most: int) -> LeaseRequest:
        return LeaseRequest(self.chance.choice(["worker-1", "worker-2"]), ("default",), ["train"], most)

    def _begin(self, taken: list[Leased]) -> list[Leased]:
        for each in taken:
            self.effects.effect("run", (each.id,), each.fence)
        self.leased += taken
        return taken

    def renew(self) -> None:
        for each in self._some():
            self._renew(each)

    def _renew(self, leased: Leased) -> None:
        self._write(lease.renew, [LeaseRenewal(leased.id, leased.fence)])

    def _some(self) -> list[Leased]:
        return [self.chance.choice(self.leased[-3:])] if self.leased else []

    def finish(self) -> None:
        kind = self._kind_of_end()
        for each in self._some():
            self._end(each, kind)

    def finish_and_lease(self) -> None:
        """As a worker does on SQLite."""
        endings = [self._ending(each, self._kind_of_end()) for each in self._some()]
        _, [taken] = self._write(lease.finish_and_lease, endings, [self._request(2)])
        self._begin(taken)

    def _kind_of_end(self) -> EndKind:
        return self.chance.choice(["succeeded", "succeeded", "retry", "fatal", "snooze"])

    def _end(self, leased: Leased, kind: EndKind) -> None:
        self._write(transitions.end, [self._ending(leased, kind)])

    def _ending(self, leased: Leased, kind: EndKind) -> FinishRequest:
        more: dict[str, Any] = {"reason": "it failed"}
        if kind == "succeeded":
            digest = sha256(f"{leased.id} {leased.fence}".encode()).hexdigest()  # an attempt has one result
            more = {"result": "null", "result_digest": digest, "result_size": 4}
        return FinishRequest(leased.id, leased.fence, AttemptResult(kind=kind, **more))

    def sweep(self) -> None:
        self._write(transitions.lose_expired)

    def cancel(self) -> None:
        if self.runs:
            with suppress(IllegalTransition):
                self.app.cancel(self.chance.choice(self.runs))

    def get(self) -> None:
        if self.runs:
            self._see(self.chance.choice(self.runs))

    def _see(self, run: str) -> None:
        with suppress(RunNotFound):
            self.app.get(run)

    def usage(self) -> None:
        self.app.usage("u")

    def reserve(self) -> None:
        reservation = copy_context().run(self.jobs.reserve_job_slot, "u", self.LIMIT, TTL)
        self.reserved += [] if reservation is None else [reservation]

    def use_reservation(self) -> None:
        if not self.reserved:
            return
        reservation = self.chance.choice(self.reserved[-3:])
        match self.chance.choice(["submit", "consume", "release"]):
            case "submit":
                self.numbers += 1
                self._submit(None, reservation=reservation)
            case "consume":
                self.jobs.consume_reservation(reservation, user_id="u", job_id=f"job {self.chance.randrange(3)}")
            case _:
                self.jobs.release_reservation(reservation, user_id="u")

    def wait(self) -> None:
        self.clock.advance(*self.chance.choices([1, 20, 45, LEASE + 1], [2, 4, 4, 4]))

    def drain(self) -> None:
        """Workers who finish everything; then all runs are looked at, and nothing is in use any more."""
        for _ in range(8):
            self.clock.advance(LEASE + 1)
            self.sweep()
            for each in self.lease(most=100):
                self._end(each, "succeeded")
        for run in dict.fromkeys(self.runs):
            self._see(run)
        self.clock.advance(TTL + 1)
        self.usage()
