"""An operator forgets keys: the next caller starts anew, and only ``force`` takes a key from an owner at work."""

from __future__ import annotations

from semel.testing.harness import SCOPE, World, claim_request, forget_request, outcome_data
from semel.types import Granted, InFlight, Replay


class Removal:
    """Which keys an operator can forget, and which not."""

    def test_a_forgotten_key_is_absent(self, world: World) -> None:
        """Completed, abandoned or unknown, a forgotten key has no outcome; the next caller is granted it as absent."""
        claims = {
            "completed": world.completed("completed", value="old"),
            "abandoned": world.granted("abandoned", lease=10, fingerprint="1:aa"),
            "unknown": world.granted("unknown", lease=10, unknown=True),
        }
        world.clock.advance(10)
        for key, claim in claims.items():
            assert world.forget(claim) is True, key
            assert world.get(key) is None, key
            verdict = world.claim(key, fingerprint="1:bb")
            assert isinstance(verdict, Granted), key
            assert verdict.reason == "absent", key
            assert world.record(key).data is None, key

    def test_a_key_at_work_is_forgotten_by_force_alone(self, world: World) -> None:
        """Without force it is refused to the last microsecond of the lease; with force the owner has lost the key."""
        claim = world.granted(lease=10)
        world.clock.us = claim.lease_until_us - 1
        with world.untouched():
            assert world.forget(claim) is False
        assert world.forget(claim, force=True) is True
        assert world.get() is None
        assert world.complete(claim, "late") is False
        assert world.renew(claim) is None
        lapsed = world.granted(lease=10)
        world.clock.us = lapsed.lease_until_us
        assert world.forget(lapsed) is True

    def test_forgetting_names_the_fence(self, world: World) -> None:
        """A record that was claimed after the operator read the key is not forgotten, not even with force."""
        stale = world.completed(value="old", ttl=10)
        world.clock.us = stale.expires_us + 1
        world.completed(value="new")
        with world.untouched():
            assert world.forget(stale) is False
            assert world.forget(stale, force=True) is False
        at_work = world.granted("at work", lease=10)
        world.clock.advance(10)
        world.granted("at work")
        with world.untouched("at work"):
            assert world.forget(at_work, force=True) is False

    def test_forgetting_what_is_absent_is_true(self, world: World) -> None:
        """For a forgotten, released or gone key it returns True, so it may be sent again after its reply was lost."""
        claim = world.completed()
        released, expired = world.granted("released"), world.completed("gone", ttl=10)
        assert world.release(released)
        world.clock.us = expired.expires_us + 1
        for absent in (claim, claim, released, expired):
            assert world.forget(absent) is True
        assert world.stats().live == 0

    def test_a_batch_is_forgotten_each_in_its_place(self, world: World) -> None:
        """The answers are in the order of the batch, also if one key is named twice."""
        completed, at_work, forced = world.completed("b"), world.granted("c"), world.granted("a")
        batch = [
            forget_request(at_work),
            forget_request(completed),
            forget_request(forced, force=True),
            forget_request(completed),
        ]
        assert world.run(world.store.forget(batch)) == [False, True, True, True]
        assert isinstance(world.claim("c"), InFlight)
        assert world.stats().live == 1

    def test_a_scope_is_forgotten_without_the_keys_at_work(self, world: World) -> None:
        """Completed, marked and abandoned keys are forgotten; keys in flight only with force; other scopes stay."""
        world.completed("completed")
        world.granted("marked", done=outcome_data())
        world.granted("abandoned", lease=10)
        others = ("other", f"{SCOPE}:", f"{SCOPE[:-1]}*", SCOPE[:-1], f"{SCOPE[:-1]}?")
        for scope in others:
            world.completed("completed", scope=scope)
        world.clock.advance(10)
        at_work = world.granted("at work")
        assert world.forget_scope() == 3
        assert isinstance(world.claim("at work"), InFlight)
        assert world.stats().live == 1 + len(others)
        assert world.forget_scope() == 0
        assert world.forget_scope(force=True) == 1
        assert world.complete(at_work) is False
        assert world.forget_scope(f"{SCOPE[:-1]}*") == 1
        assert world.stats().live == len(others) - 1
        assert world.forget_scope("never used") == 0

    def test_forgetting_a_scope_is_bounded(self, world: World) -> None:
        """It forgets at most ``limit`` keys; fewer means that none is left."""
        world.claims([claim_request(f"at work {number}") for number in range(5)])
        world.claims([claim_request(f"done {number}", done=outcome_data()) for number in range(25)])
        assert [world.forget_scope(limit=10) for _ in range(4)] == [10, 10, 5, 0]
        assert world.stats().live == 5

    def test_a_key_at_work_is_taken_by_force_alone(self, world: World) -> None:
        """A claim with ``resolving`` and ``force`` takes it in one step, so that nobody else can claim in between."""
        first = world.granted(lease=100, unknown=True)
        assert isinstance(world.claim(resolving=True), InFlight)
        second = world.granted(resolving=True, force=True)
        assert world.complete(first, "first") is False
        assert world.complete(second, "second") is True
        assert isinstance(world.claim(resolving=True, force=True), Replay)
        assert world.value() == "second"
