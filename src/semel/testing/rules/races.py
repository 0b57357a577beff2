"""Concurrent callers, in threads or in tasks: every key has one owner at a time."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

from semel.once.store import KeyRef
from semel.testing.harness import (
    KEY,
    SCOPE,
    World,
    claim_request,
    complete_request,
    outcome_data,
    release_request,
    renew_request,
    us,
)
from semel.types import Claim, Granted, InFlight, Replay, Verdict

CALLERS = 64


def winners(verdicts: list[Any]) -> list[Claim]:
    """The claims among the verdicts."""
    return [verdict.claim for verdict in verdicts if isinstance(verdict, Granted)]


def _race(world: World, names: list[str], **asked: Any) -> Iterator[tuple[str, list[Verdict]]]:
    """Let all callers claim the keys one by one; return each key and the verdicts on it."""

    async def claim_each() -> list[Verdict]:
        return [(await world.store.claim([claim_request(name, **asked)]))[0] for name in names]

    per_caller = world.together([claim_each] * CALLERS)
    return zip(names, map(list, zip(*per_caller, strict=True)), strict=True)


class Races:
    """Of concurrent claims of a key, exactly one is granted."""

    def test_of_64_callers_one_gets_the_key(self, world: World) -> None:
        """All claim one absent key at once: exactly one is granted, the others find it in flight."""
        ((_, verdicts),) = _race(world, ["key"])
        (winner,) = winners(verdicts)
        assert sum(isinstance(verdict, InFlight) for verdict in verdicts) == CALLERS - 1
        assert world.record().fence == winner.fence
        assert world.complete(winner, "won") is True

    def test_of_64_callers_one_gets_each_of_many_keys(self, world: World) -> None:
        """All claim the same keys one by one: each key is granted exactly once."""
        for name, verdicts in _race(world, [f"key {number}" for number in range(6)]):
            (winner,) = winners(verdicts)
            assert world.record(name).fence == winner.fence

    def test_batches_of_the_same_keys_in_any_order_do_not_block_each_other(self, world: World) -> None:
        """Each caller claims all the keys in one batch, in its own order: each key is granted exactly once."""
        names = [f"key {number}" for number in range(50)]
        shuffle = random.Random(7)  # noqa: S311 -- any order, but the same in every run
        orders = [shuffle.sample(names, len(names)) for _ in range(16)]
        per_caller = world.together(
            [partial(world.store.claim, [claim_request(name) for name in order]) for order in orders]
        )
        owners: dict[str, list[Claim]] = {name: [] for name in names}
        for order, verdicts in zip(orders, per_caller, strict=True):
            for name, verdict in zip(order, verdicts, strict=True):
                owners[name] += winners([verdict])
        for name in names:
            (owner,) = owners[name]
            assert world.record(name).fence == owner.fence

    def test_the_owners_batches_in_any_order_do_not_block_each_other(self, world: World) -> None:
        """Batches may overlap with their own repetitions, in other orders: all succeed."""
        names = [f"key {number}" for number in range(50)]
        claims = [
            verdict.claim
            for verdict in world.claims([claim_request(name) for name in names])
            if isinstance(verdict, Granted)
        ]
        orders = [random.Random(number).sample(claims, 50) for number in range(16)]  # noqa: S311 -- any order
        store, until = world.store, world.clock.us + us(90)
        renewals = [partial(store.renew, [renew_request(claim, 90) for claim in order]) for order in orders]
        answered = {answer for answers in world.together(renewals) for answer in answers}
        assert answered <= {until, claims[0].lease_until_us}  # renewed here, or another batch was about to
        assert {world.record(name).lease_until_us for name in names} == {until}
        completions = [
            partial(store.complete, [complete_request(claim, claim.key) for claim in order]) for order in orders
        ]
        assert world.together(completions) == [[True] * 50] * 16
        releases = [partial(store.release, [release_request(claim) for claim in order]) for order in orders]
        assert world.together(releases) == [[True] * 50] * 16
        assert [world.value(name) for name in names] == names

    def test_of_64_callers_one_takes_over(self, world: World) -> None:
        """All find the same ended lease: exactly one gets a new fence, the others find the key in flight."""
        lost = {name: world.granted(name, lease=10, fingerprint="1:aa") for name in "ab"}
        world.clock.advance(10)
        for name, verdicts in _race(world, list(lost), fingerprint="1:aa"):
            (winner,) = winners(verdicts)
            assert winner.fence > lost[name].fence
            assert sum(isinstance(verdict, InFlight) for verdict in verdicts) == CALLERS - 1
            assert world.record(name).fence == winner.fence

    def test_of_64_callers_one_gets_an_expired_key(self, world: World) -> None:
        """All find the same expired outcome: exactly one is granted a new claim."""
        old = {name: world.completed(name, value="old", ttl=10) for name in "ab"}
        world.clock.advance(11)
        for name, verdicts in _race(world, list(old)):
            (winner,) = winners(verdicts)
            assert winner.fence > old[name].fence
            assert world.record(name).fence == winner.fence

    def test_of_64_callers_one_gets_a_released_key(self, world: World) -> None:
        """All claim after a release: exactly one is granted."""
        old = {name: world.granted(name) for name in "ab"}
        assert all(world.release(claim) for claim in old.values())
        for name, verdicts in _race(world, list(old)):
            (winner,) = winners(verdicts)
            assert winner.fence > old[name].fence

    def test_of_64_callers_one_marks(self, world: World) -> None:
        """All claim with an outcome: one is recorded, and all others get that one."""

        async def mark_each(number: int) -> list[Verdict]:
            return [(await world.store.claim([claim_request(name, done=outcome_data(number))]))[0] for name in "ab"]

        per_caller = world.together([partial(mark_each, number) for number in range(CALLERS)])
        for verdicts in zip(*per_caller, strict=True):
            (winner,) = (number for number, verdict in enumerate(verdicts) if isinstance(verdict, Granted))
            others = [verdict.outcome.value for verdict in verdicts if isinstance(verdict, Replay)]
            assert others == [winner] * (CALLERS - 1)

    def test_of_two_fences_the_newer_completes(self, world: World) -> None:
        """An owner and the one that took over complete at the same time, repeatedly: only the newer one succeeds."""
        stale = world.granted(lease=10)
        world.clock.advance(10)
        owner = world.granted()
        both = [(stale, "stale"), (owner, "new")] * (CALLERS // 2)
        answers = world.together([partial(world.store.complete, [complete_request(*each)]) for each in both])
        assert answers == [[False], [True]] * (CALLERS // 2)
        assert world.value() == "new"

    def test_an_owner_completes_or_is_taken_over_never_both(self, world: World) -> None:
        """After the lease ended, the owner completes while others claim: one side succeeds, the other is refused."""
        lost = [world.granted(f"key {number}", lease=10) for number in range(16)]
        world.clock.advance(10)
        calls: list[Any] = []
        for claim in lost:
            calls += [partial(world.store.claim, [claim_request(claim.key)]) for _ in range(3)]
            calls.insert(-1, partial(world.store.complete, [complete_request(claim, "owner")]))
        answers = [answer for (answer,) in world.together(calls)]
        for number, claim in enumerate(lost):
            first, second, completed, third = answers[4 * number : 4 * number + 4]
            assert len(winners([first, second, third])) == (0 if completed else 1)
            assert world.record(claim.key).state == ("completed" if completed else "claimed")
            assert (world.record(claim.key).fence == claim.fence) is completed

    def test_an_owner_renews_or_is_taken_over_never_both(self, world: World) -> None:
        """After the lease ended, the owner renews while others claim: one side succeeds, the other is refused."""
        lost = [world.granted(f"key {number}", lease=10) for number in range(16)]
        world.clock.advance(10)
        calls: list[Any] = []
        for claim in lost:
            calls += [partial(world.store.claim, [claim_request(claim.key)]) for _ in range(3)]
            calls.insert(-1, partial(world.store.renew, [renew_request(claim, 30)]))
        answers = [answer for (answer,) in world.together(calls)]
        for number, claim in enumerate(lost):
            first, second, renewed, third = answers[4 * number : 4 * number + 4]
            assert renewed in (None, world.clock.us + us(30))
            assert len(winners([first, second, third])) == (1 if renewed is None else 0)
            assert (world.record(claim.key).fence == claim.fence) is (renewed is not None)

    def test_a_key_passed_from_hand_to_hand_has_one_owner_at_a_time(self, world: World) -> None:
        """Callers claim and release in turns: one holds the key at a time, and the fences grow in that order."""
        held: list[int] = []
        broken: list[int] = []

        async def take_turns() -> int:
            turns = 0
            for _ in range(20):
                (verdict,) = await world.store.claim([claim_request()])
                if isinstance(verdict, Granted):
                    fence = verdict.claim.fence
                    held.append(fence)
                    (record,) = await world.store.get([KeyRef(SCOPE, KEY)])
                    if record is None or record.fence != fence or held[-1] != fence:
                        broken.append(fence)
                    turns += 1
                    assert await world.store.release([release_request(verdict.claim)]) == [True]
            return turns

        assert sum(world.together([take_turns] * 16)) == len(held)
        assert broken == []
        assert held == sorted(set(held))
        assert len(held) > 0

    def test_the_collector_leaves_what_is_claimed_meanwhile(self, world: World) -> None:
        """Gone records are claimed and purged at the same time: a claim that was granted still holds its key."""
        names = [f"key {number}" for number in range(20)]
        world.claims([claim_request(name, lease=10, ttl=10) for name in names])
        world.clock.advance(11)
        calls: list[Any] = []
        for _ in range(8):
            calls += [
                partial(world.store.purge, 5),
                partial(world.store.claim, [claim_request(name) for name in names]),
            ]
        batches = [answer for answer in world.together(calls) if isinstance(answer, list)]
        for name, verdicts in zip(names, zip(*batches, strict=True), strict=True):
            claims = winners(list(verdicts))
            assert len(claims) <= 1
            if claims:
                assert world.record(name).fence == claims[0].fence
            else:  # every claim came while the collector held the record
                assert isinstance(world.claim(name), Granted)
