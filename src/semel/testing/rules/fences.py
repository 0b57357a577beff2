"""The fence: a number that only grows, and that every write of an owner must have."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from msgspec.structs import replace

from semel.testing.harness import World, outcome_data
from semel.types import Claim, InFlight, Replay


def _taken_over(world: World, key: str) -> Claim:
    stale = world.granted(key, lease=10)
    world.clock.advance(10)
    world.granted(key)
    return stale


def _taken_over_and_completed(world: World, key: str) -> Claim:
    stale = world.granted(key, lease=10)
    world.clock.advance(10)
    world.completed(key, value="new")
    return stale


def _released_and_claimed_anew(world: World, key: str) -> Claim:
    stale = world.granted(key)
    assert world.release(stale)
    world.granted(key)
    return stale


def _expired_and_claimed_anew(world: World, key: str) -> Claim:
    stale = world.granted(key, lease=10, ttl=20)
    world.clock.advance(21)
    world.granted(key)
    return stale


def _purged_and_claimed_anew(world: World, key: str) -> Claim:
    stale = world.granted(key, lease=10, ttl=20)
    world.clock.advance(21)
    assert world.purge() == 1
    world.completed(key, value="new")
    return stale


def _resolved(world: World, key: str) -> Claim:
    stale = world.granted(key, lease=10, unknown=True)
    world.clock.advance(10)
    world.granted(key, resolving=True, unknown=True)
    return stale


def _forgotten_and_claimed_anew(world: World, key: str) -> Claim:
    stale = world.granted(key)
    assert world.forget(stale, force=True)
    world.granted(key)
    return stale


def _taken_by_force(world: World, key: str) -> Claim:
    stale = world.granted(key)
    world.granted(key, resolving=True, force=True)
    return stale


STALE: tuple[Callable[[World, str], Claim], ...] = (
    _taken_over,
    _taken_over_and_completed,
    _released_and_claimed_anew,
    _expired_and_claimed_anew,
    _purged_and_claimed_anew,
    _resolved,
    _forgotten_and_claimed_anew,
    _taken_by_force,
)
"""Every way in which a fence becomes stale while another one holds the key."""


class Fences:
    """An owner whose fence is stale can write nothing."""

    def test_the_fence_grows_over_everything_that_can_happen(self, world: World) -> None:
        """After a release, takeover, resolve, expiry, purge or forget, the key's next owner has a greater fence."""
        fences = [(first := world.granted(lease=10)).fence]
        assert world.release(first)
        fences.append((released := world.granted(lease=10, unknown=True)).fence)
        world.clock.us = released.lease_until_us
        fences.append((resolved := world.granted(resolving=True, lease=10)).fence)
        world.clock.us = resolved.lease_until_us
        fences.append((taken := world.granted(lease=10, ttl=20)).fence)
        assert world.complete(taken)
        world.clock.us = taken.expires_us + 1
        fences.append((expired := world.granted(ttl=20, done=outcome_data())).fence)
        world.clock.us = expired.expires_us + 1
        assert world.purge() == 1
        fences.append((purged := world.granted(lease=10, ttl=20)).fence)
        world.clock.us = purged.expires_us + 1
        assert world.purge() == 1
        fences.append((again := world.granted()).fence)
        assert world.release(again)
        world.purge()
        fences.append((worked := world.granted()).fence)
        assert world.forget(worked, force=True)
        world.purge()
        fences.append((finished := world.completed()).fence)
        assert world.forget(finished)
        fences.append(world.granted(done=outcome_data()).fence)
        assert world.forget_scope() == 1
        world.purge()
        fences.append(world.granted().fence)
        fences.append(world.granted(resolving=True, force=True).fence)
        assert all(earlier < later for earlier, later in pairwise(fences)), fences

    def test_the_fence_grows_in_a_store_that_was_emptied(self, world: World) -> None:
        """After all its records expired and were purged, a store still gives greater fences."""
        names = [f"key {number}" for number in range(10)]
        fences = {name: world.granted(name, lease=1, ttl=1).fence for name in names}
        world.clock.advance(10)
        assert world.purge() == 10
        assert all(world.granted(name).fence > fences[name] for name in reversed(names))

    def test_the_fence_grows_while_the_clock_jumps_back(self, world: World) -> None:
        """A store whose clock was set back gives no fence twice, and no key to two owners."""
        first = world.granted()
        world.clock.advance(-86400)
        assert isinstance(world.claim(), InFlight)
        assert world.release(first)
        second = world.granted()
        assert second.fence > first.fence
        assert world.complete(second, "second")
        world.clock.advance(-86400)
        assert isinstance(world.claim(), Replay)
        third = world.granted("other", lease=10, ttl=20)
        world.clock.advance(-3600)
        assert isinstance(world.claim("other"), InFlight)
        world.clock.us = third.expires_us + 1
        assert world.granted("other").fence > third.fence

    def test_a_stale_complete_is_refused(self, world: World) -> None:
        """It returns False and does not change the new owner's record, however the fence became stale."""
        for story in STALE:
            stale = story(world, story.__name__)
            with world.untouched(story.__name__):
                assert world.complete(stale, "stale") is False, story.__name__

    def test_a_stale_release_is_refused(self, world: World) -> None:
        """It returns False and does not release the new owner's key, however the fence became stale."""
        for story in STALE:
            stale = story(world, story.__name__)
            with world.untouched(story.__name__):
                assert world.release(stale) is False, story.__name__

    def test_a_stale_renew_is_refused(self, world: World) -> None:
        """It returns None and does not move the end of the new owner's lease, however the fence became stale."""
        for story in STALE:
            stale = story(world, story.__name__)
            with world.untouched(story.__name__):
                assert world.renew(stale, 1000) is None, story.__name__

    def test_a_fence_that_was_never_given_holds_nothing(self, world: World) -> None:
        """A fence greater than the owner's is refused like a smaller one."""
        claim = world.granted()
        forged = replace(claim, fence=claim.fence + 1)
        with world.untouched():
            assert world.complete(forged, "forged") is False
            assert world.release(forged) is False
            assert world.renew(forged) is None

    def test_a_fence_holds_its_own_key_only(self, world: World) -> None:
        """Two keys may have the same fence: what the owner of one key does changes nothing for the other."""
        verbs: tuple[Callable[[Claim], object], ...] = (world.complete, world.renew, world.release)
        for number, verb in enumerate(verbs):
            own, others = world.granted(f"own {number}"), [("other", "scope"), (f"own {number}", "other")]
            for key, scope in others:
                world.granted(key, scope=scope)
            with world.untouched(*others[0]), world.untouched(*others[1]):
                assert verb(own)
            world.clock.advance(86400)  # everything expires, for the next verb
