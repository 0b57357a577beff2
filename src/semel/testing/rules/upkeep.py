"""Maintenance: a purge removes gone records and nothing else, in bounded steps, and the counts are right."""

from __future__ import annotations

from semel.once.store import KeyRef
from semel.testing.harness import SCOPE, World, claim_request, outcome_data
from semel.types import Granted, Held, InFlight, Replay


class Upkeep:
    """Open, purge, stats and close."""

    def test_a_store_may_be_opened_again(self, world: World) -> None:
        """Opening an open store is allowed, and changes no record."""
        world.granted()
        with world.untouched():
            world.run(world.store.open())

    def test_a_store_may_be_closed_twice(self, world: World) -> None:
        """Closing a closed store is allowed."""
        store = world.opened(world.clock)
        world.run(store.claim([claim_request()]))
        assert world.run(store.close()) is None
        assert world.run(store.close()) is None

    def test_purge_removes_what_is_gone(self, world: World) -> None:
        """Completed, abandoned, unknown or marked, a record is removed after its retention; the number is returned."""
        world.completed("completed", ttl=10)
        world.granted("abandoned", ttl=10, lease=10)
        world.granted("unknown", ttl=10, lease=10, unknown=True)
        world.granted("marked", ttl=10, done=outcome_data())
        assert world.purge() == 0
        world.clock.advance(11)
        assert world.stats().expired == 4
        assert world.purge() == 4
        assert world.stats() == Held()
        assert world.purge() == 0

    def test_purge_removes_only_what_is_gone(self, world: World) -> None:
        """Records in flight, abandoned, unknown or completed do not change, to the last microsecond of retention."""
        gone = world.completed("gone", ttl=100)
        world.clock.us += 1
        world.completed("completed", value="kept", ttl=100)
        world.granted("abandoned", ttl=100, lease=10)
        world.granted("unknown", ttl=100, lease=10, unknown=True)
        world.granted("at work", ttl=10, lease=1000)
        world.granted("marked", ttl=100, done=outcome_data("kept"))
        world.clock.us = gone.expires_us + 1
        kept = ("completed", "abandoned", "unknown", "at work", "marked")
        before = [world.record(key) for key in kept]
        assert world.purge() == 1
        assert [world.record(key) for key in kept] == before
        assert world.get("gone") is None

    def test_purge_is_bounded(self, world: World) -> None:
        """It removes at most ``limit`` records; fewer means that nothing is left for now."""
        world.claims([claim_request(f"gone {number}", ttl=10, done=outcome_data()) for number in range(25)])
        world.claims([claim_request(f"kept {number}", ttl=100, done=outcome_data()) for number in range(5)])
        world.clock.advance(11)
        assert [world.purge(10) for _ in range(4)] == [10, 10, 5, 0]
        assert world.stats() == Held(completed=5)

    def test_purge_fades_values_past_their_time(self, world: World) -> None:
        """The value is removed and counted once; the key is still replayed, as a tombstone."""
        claim = world.granted("completed", ttl=1000)
        assert world.complete(claim, "x" * 1000, value_ttl=10)
        world.granted("marked", ttl=1000, done=outcome_data("y", value_ttl=10))
        world.completed("kept", value="z", ttl=1000)
        world.clock.advance(10)
        assert world.purge() == 0
        world.clock.us += 1
        assert world.purge() == 2
        assert world.purge() == 0
        for key in ("completed", "marked"):
            assert world.record(key).data is None
            verdict = world.claim(key)
            assert isinstance(verdict, Replay)
            assert verdict.outcome.gone
            assert verdict.outcome.expires_us == claim.expires_us
        assert world.value("kept") == "z"
        assert world.stats() == Held(completed=3)

    def test_fading_values_is_bounded_too(self, world: World) -> None:
        """Removed records and removed values count toward one limit."""
        world.claims([claim_request(f"gone {number}", ttl=10, done=outcome_data()) for number in range(4)])
        world.claims(
            [claim_request(f"fades {number}", ttl=100, done=outcome_data("v", value_ttl=10)) for number in range(6)]
        )
        world.clock.advance(11)
        assert [world.purge(7) for _ in range(3)] == [7, 3, 0]
        assert world.stats() == Held(completed=6)

    def test_a_tombstone_goes_with_its_key(self, world: World) -> None:
        """A record whose value was removed is itself removed when its retention ends."""
        world.granted(ttl=100, done=outcome_data("v", value_ttl=10))
        world.clock.advance(11)
        assert world.purge() == 1
        world.clock.advance(90)
        assert world.get() is None
        assert world.purge() == 1
        assert isinstance(world.claim(), Granted)

    def test_purge_finds_what_ended_early(self, world: World) -> None:
        """A lease longer than retention keeps a record only until it is completed, or renewed with a shorter lease."""
        completed = world.granted("completed", lease=1000, ttl=10)
        renewed = world.granted("renewed", lease=1000, ttl=10)
        assert world.complete(completed) is True
        assert world.renew(renewed, 10) is not None
        world.clock.advance(11)
        assert world.get("completed") is None
        assert world.get("renewed") is None
        assert world.purge() == 2

    def test_purge_leaves_a_key_that_was_claimed_anew(self, world: World) -> None:
        """A key that was gone and claimed again is a new record, with a new retention."""
        world.granted("renewed", lease=10, ttl=10)
        world.granted("purged", lease=10, ttl=10)
        world.clock.advance(11)
        world.granted("renewed", ttl=100)
        assert world.purge() == 1
        world.granted("purged", ttl=100)
        world.clock.advance(11)
        assert world.purge() == 0
        assert isinstance(world.claim("renewed"), InFlight)
        assert isinstance(world.claim("purged"), InFlight)

    def test_purge_makes_a_released_key_no_less_absent(self, world: World) -> None:
        """A released key is absent before and after a purge, whether or not the store keeps a row for it."""
        assert world.release(world.granted())
        assert world.purge() <= 1
        assert world.get() is None
        assert world.stats().live == 0
        assert isinstance(world.claim(), Granted)

    def test_stats_count_what_is_held(self, world: World) -> None:
        """Records are counted by the verdict on a claim: in flight, abandoned, unknown, completed or expired."""
        assert world.stats() == Held()
        world.claims([claim_request(f"expired {number}", ttl=5, done=outcome_data()) for number in range(2)])
        world.claims([claim_request(f"abandoned {number}", lease=5) for number in range(3)])
        world.claims([claim_request(f"unknown {number}", lease=5, unknown=True) for number in range(4)])
        world.claims([claim_request(f"at work {number}", lease=100, ttl=5) for number in range(5)])
        world.claims([claim_request(f"marked {number}", done=outcome_data()) for number in range(6)])
        world.completed("completed", scope="other")
        world.clock.advance(5)
        assert world.stats() == Held(in_flight=5, abandoned=3, unknown=4, completed=9)
        world.clock.us += 1
        assert world.stats() == Held(in_flight=5, abandoned=3, unknown=4, completed=7, expired=2)
        assert world.purge() == 2
        assert world.stats() == Held(in_flight=5, abandoned=3, unknown=4, completed=7)

    def test_get_answers_each_in_its_place(self, world: World) -> None:
        """Present keys, absent keys and repeated keys are returned in the order of the batch."""
        world.completed("b", value=1)
        world.granted("a")
        records = world.run(world.store.get([KeyRef(SCOPE, key) for key in ("c", "b", "a", "b", "d")]))
        assert [record and record.key for record in records] == [None, "b", "a", "b", None]
