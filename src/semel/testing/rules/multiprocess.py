"""Rules that only a store shared by several processes can break."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar
from unittest.mock import patch

import pytest

from semel.errors import StoreUnavailable
from semel.once.store import ClaimRequest, KeyRef, Store
from semel.testing.harness import (
    KEY,
    LEASE,
    SCOPE,
    Opener,
    World,
    awaited,
    claim_request,
    complete_request,
    release_request,
    renew_request,
    us,
)
from semel.testing.processes import SIZE, WorkerProcesses
from semel.testing.rules.races import winners
from semel.types import Claim, Granted, InFlight, Replay, Verdict

DAY = 86400.0


class Multiprocess:
    """Processes and clients that share only the store."""

    server_clock: ClassVar[bool]
    opener: Callable[[], Opener]
    nowhere: Callable[[], Opener]

    def test_every_client_sees_what_another_wrote(self, world: World) -> None:
        """A claim belongs to its fence, not to a connection: any client sees it, and its owner may use any client."""
        first, second = world.client(world.clock), world.client(world.clock)
        claim = first.granted(fingerprint="1:aa")
        assert isinstance(second.claim(fingerprint="1:aa"), InFlight)
        assert second.renew(claim, 90) == world.clock.us + us(90)
        assert second.complete(claim, "done") is True
        verdict = first.claim(fingerprint="1:aa")
        assert isinstance(verdict, Replay)
        assert verdict.outcome.value == "done"

    def test_the_fence_grows_over_all_clients(self, world: World) -> None:
        """Whichever client claims next gets a greater fence, also after another client purged."""
        clients = [world.client(world.clock) for _ in range(3)]
        fences = []
        for number in range(9):
            fences.append(clients[number % 3].granted(lease=1, ttl=1).fence)
            world.clock.advance(2)
            if number % 2:
                assert clients[(number + 1) % 3].purge() == 1
        assert fences == sorted(set(fences))

    def test_a_waiter_hears_of_what_another_client_ended(self, world: World) -> None:
        """By notification or by polling, a caller that waits for a key gets its outcome soon after it is recorded."""
        owner, waiter = world.once(world.opened(world.clock)), world.once(world.opened(world.clock))
        verdict = world.run(owner.claim("key"))
        assert isinstance(verdict, Granted)
        meet = world.meeting(2)

        async def wait() -> Any:
            await awaited(meet())
            return await awaited(waiter.claim("key", wait=30))

        async def end() -> None:
            await awaited(meet())
            await awaited(owner.complete(verdict.claim, "ended"))

        waited, _ = world.together([wait, end])
        assert isinstance(waited, Replay)
        assert waited.outcome.value == "ended"

    def test_the_stores_own_time_is_no_clients(self, world: World) -> None:
        """Without an injected clock, time is the server's, so a client with a wrong clock agrees with all others.

        A store without a server uses the time of its host, which all its clients share.
        """
        before = time.time_ns() // 1000
        client = world.client(None)
        claim = client.granted(lease=LEASE)
        if not self.server_clock:
            assert before + us(LEASE) <= claim.lease_until_us <= time.time_ns() // 1000 + us(LEASE)
            return
        true = client.record().now_us
        for wrong in (10 * DAY, -10 * DAY):
            with _local_time_off_by(wrong):
                other = world.client(None)
                verdict = other.claim()
                assert isinstance(verdict, InFlight)
                assert 0 < verdict.retry_after <= LEASE
                assert abs(other.record().now_us - true) < us(DAY)
                assert other.granted(f"key {wrong}").lease_until_us < true + us(DAY)

    def test_a_store_that_cannot_be_reached_says_so(self, world: World) -> None:
        """Every verb raises StoreUnavailable instead of guessing."""
        claim = world.granted()
        asked: tuple[Callable[[Store], Any], ...] = (
            lambda store: store.open(),
            lambda store: store.claim([claim_request()]),
            lambda store: store.renew([renew_request(claim)]),
            lambda store: store.complete([complete_request(claim)]),
            lambda store: store.release([release_request(claim)]),
            lambda store: store.get([KeyRef(SCOPE, KEY)]),
            lambda store: store.purge(10),
            lambda store: store.stats(),
        )
        for verb in asked:
            with pytest.raises(StoreUnavailable):
                self._ask_nowhere(world, verb)

    def _ask_nowhere(self, world: World, verb: Callable[[Store], Any]) -> None:
        store = self.nowhere()(clock=world.clock)
        try:
            world.run(verb(store))
        finally:
            world.run(store.close())

    def test_of_8_processes_one_gets_the_key(self, world: World) -> None:
        """Processes that share only the store claim one key: exactly one is granted."""
        answers = self._apart(world, _claim_each, [([claim_request()],) for _ in range(SIZE)])
        verdicts = [verdict for (verdict,) in answers]
        (winner,) = winners(verdicts)
        assert sum(isinstance(verdict, InFlight) for verdict in verdicts) == SIZE - 1
        assert world.record().fence == winner.fence

    def test_of_8_processes_one_gets_each_of_many_keys(self, world: World) -> None:
        """Whether absent, expired, released or abandoned, each key gets one new owner, with a greater fence."""
        old = _left_behind(world, range(12))
        names = [*old, *(f"absent {number}" for number in range(12))]
        answers = self._apart(world, _claim_each, [([claim_request(name) for name in names],) for _ in range(SIZE)])
        for name, verdicts in zip(names, zip(*answers, strict=True), strict=True):
            (winner,) = winners(list(verdicts))
            assert winner.fence > old.get(name, 0)
            assert world.record(name).fence == winner.fence

    def test_8_processes_share_batches_of_keys(self, world: World) -> None:
        """Each claims all the keys in one batch, in a different order: each key is granted exactly once."""
        old = _left_behind(world, range(20))
        names = [*old, *(f"absent {number}" for number in range(40))]
        orders = [names[at:] + names[:at] for at in range(0, 8 * 7, 7)]
        orders[1::2] = [order[::-1] for order in orders[1::2]]
        answers = self._apart(world, _claim_batch, [([claim_request(name) for name in order],) for order in orders])
        found = [winner for verdicts in answers for winner in winners(verdicts)]
        assert sorted(winner.key for winner in found) == sorted(names)
        assert all(world.record(winner.key).fence == winner.fence > old.get(winner.key, 0) for winner in found)

    def test_of_two_fences_in_8_processes_the_newer_completes(self, world: World) -> None:
        """Old and new owners complete at the same time, in separate processes: the old ones are refused every time."""
        names = [f"key {number}" for number in range(10)]
        zombies = [world.granted(name, lease=10) for name in names]
        world.clock.advance(10)
        owners = [world.granted(name) for name in names]
        answers = self._apart(world, _complete_each, [(zombies, "stale"), (owners, "new")] * (SIZE // 2))
        assert answers == [[False] * 10, [True] * 10] * (SIZE // 2)
        assert [world.value(name) for name in names] == ["new"] * 10

    def test_work_in_8_processes_is_done_once(self, world: World) -> None:
        """All processes call the same work under the same keys: one does it, and all get its value."""
        names = [f"order {number}" for number in range(10)]
        answers = self._apart(world, _work, [(names, f"process {number}") for number in range(SIZE)])
        for results in zip(*answers, strict=True):
            values = {value for value, _ in results}
            assert len(values) == 1
            assert sum(not replayed for _, replayed in results) == 1

    def _apart(self, world: World, job: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        return WorkerProcesses.shared().work(world, self.opener(), job, arguments)


def _left_behind(world: World, numbers: range) -> dict[str, int]:
    """Keys that are expired, abandoned or released, with their last fences."""
    old: dict[str, int] = {}
    for number in numbers:
        for kind, lease, ttl in (("expired", 1, 1), ("abandoned", 1, 1000)):
            old[f"{kind} {number}"] = world.granted(f"{kind} {number}", lease=lease, ttl=ttl).fence
    world.clock.advance(2)
    for number in numbers:
        claim = world.granted(f"released {number}")
        assert world.release(claim)
        old[claim.key] = claim.fence
    return old


def _claim_each(world: World, requests: list[ClaimRequest]) -> list[Verdict]:
    """In a worker process: claim one after the other."""
    return [world.claims([_again(request)])[0] for request in requests]


def _claim_batch(world: World, requests: list[ClaimRequest]) -> list[Verdict]:
    """In a worker process: claim all in one batch."""
    return world.claims([_again(request) for request in requests])


def _again(request: ClaimRequest) -> ClaimRequest:
    """The same request with a new attempt id."""
    return claim_request(request.key, scope=request.scope)


def _complete_each(world: World, claims: list[Claim], value: str) -> list[bool]:
    """In a worker process: complete one after the other."""
    return [world.run(world.store.complete([complete_request(claim, value)]))[0] for claim in claims]


def _work(world: World, names: list[str], value: str) -> list[tuple[str, bool]]:
    """In a worker process: do the work under each key, or get its result."""
    once = world.once()
    results = [world.run(once.call(name, world.working(lambda: value), in_flight="wait")) for name in names]
    return [(result.value, result.replayed) for result in results]


def _local_time_off_by(seconds: float) -> Any:
    """A context in which this process's wall clock is wrong."""
    true, true_ns = time.time, time.time_ns
    return patch.multiple(time, time=lambda: true() + seconds, time_ns=lambda: true_ns() + us(seconds) * 1000)
