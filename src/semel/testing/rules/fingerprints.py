"""One key with different fingerprints: when it is a mismatch, and when they cannot be compared."""

from __future__ import annotations

from semel.testing.harness import World, claim_request
from semel.types import Granted, InFlight, Mismatch, Replay


class Fingerprints:
    """The same key must stand for the same request."""

    def test_another_fingerprint_is_a_mismatch(self, world: World) -> None:
        """In flight or completed, a claim with another fingerprint gets a mismatch with the recorded one."""
        world.granted("at work", fingerprint="1:aa")
        world.completed("done", fingerprint="1:aa")
        for key in ("at work", "done"):
            with world.untouched(key):
                assert world.claim(key, fingerprint="1:bb") == Mismatch("1:aa")

    def test_the_same_fingerprint_is_not(self, world: World) -> None:
        """A claim with the same fingerprint finds the key in flight, or gets the outcome."""
        world.granted("at work", fingerprint="1:aa")
        world.completed("done", fingerprint="1:aa")
        assert isinstance(world.claim("at work", fingerprint="1:aa"), InFlight)
        assert isinstance(world.claim("done", fingerprint="1:aa"), Replay)

    def test_only_the_same_fingerprint_takes_over(self, world: World) -> None:
        """After the lease ended, another fingerprint is still a mismatch; the same one takes the key over."""
        first = world.granted(fingerprint="1:aa", lease=10)
        world.clock.advance(10)
        with world.untouched():
            assert world.claim(fingerprint="1:bb") == Mismatch("1:aa")
            assert world.claim(fingerprint="1:bb", resolving=True, unknown=True) == Mismatch("1:aa")
        second = world.granted(fingerprint="1:aa")
        assert second.fence > first.fence

    def test_a_mismatch_lasts_until_retention_ends(self, world: World) -> None:
        """To the last microsecond of retention, another fingerprint is a mismatch; then the key is free for it."""
        claim = world.granted(fingerprint="1:aa", lease=10, ttl=100)
        world.clock.us = claim.expires_us
        assert world.claim(fingerprint="1:bb") == Mismatch("1:aa")
        world.clock.us += 1
        verdict = world.claim(fingerprint="1:bb")
        assert isinstance(verdict, Granted)
        assert verdict.reason == "expired"
        assert world.record().fingerprint == verdict.claim.fingerprint == "1:bb"

    def test_a_mismatch_comes_before_unknown(self, world: World) -> None:
        """Another fingerprint is a mismatch even if the owner vanished and the outcome is unknown."""
        world.granted(fingerprint="1:aa", lease=10, unknown=True)
        world.clock.advance(10)
        assert world.claim(fingerprint="1:bb") == Mismatch("1:aa")

    def test_fingerprints_of_two_versions_are_not_compared(self, world: World) -> None:
        """The algorithm may change while keys are in use: then the key alone decides."""
        world.completed(fingerprint="1:aa")
        assert isinstance(world.claim(fingerprint="2:bb"), Replay)
        assert isinstance(world.claim(fingerprint="no version"), Replay)
        assert world.claim(fingerprint="1:bb") == Mismatch("1:aa")

    def test_a_newer_version_takes_over_an_older_one(self, world: World) -> None:
        """The new owner's fingerprint is recorded, in its own version."""
        world.granted(fingerprint="1:aa", lease=10)
        world.clock.advance(10)
        assert world.granted(fingerprint="2:bb").fingerprint == "2:bb"
        assert world.claim(fingerprint="2:cc") == Mismatch("2:bb")

    def test_fingerprints_without_a_version_are_compared_too(self, world: World) -> None:
        """A fingerprint may be any text; a colon alone does not make a version."""
        for key, recorded, asked in (("plain", "aa", "bb"), ("colon", "a:a", "b:b"), ("long", "x" * 200, "x" * 199)):
            world.granted(key, fingerprint=recorded)
            assert world.claim(key, fingerprint=asked) == Mismatch(recorded)
            assert isinstance(world.claim(key, fingerprint=recorded), InFlight)

    def test_an_empty_fingerprint_matches_any(self, world: World) -> None:
        """A claim without a fingerprint matches any record, and a record without one matches any claim."""
        world.completed("with", fingerprint="1:aa")
        world.completed("without")
        assert isinstance(world.claim("with"), Replay)
        assert isinstance(world.claim("without", fingerprint="1:aa"), Replay)

    def test_who_takes_over_without_a_fingerprint_inherits_it(self, world: World) -> None:
        """The work is the same, so its fingerprint stays recorded."""
        world.granted(fingerprint="1:aa", lease=10)
        world.clock.advance(10)
        claim = world.granted()
        assert claim.fingerprint == world.record().fingerprint == "1:aa"
        assert world.claim(fingerprint="1:bb") == Mismatch("1:aa")

    def test_nothing_is_inherited_from_what_is_gone(self, world: World) -> None:
        """After retention, or after a release, no former fingerprint is left."""
        world.completed("gone", fingerprint="1:aa", ttl=10)
        world.clock.advance(11)
        assert world.release(world.granted("released", fingerprint="1:aa"))
        for key in ("gone", "released"):
            assert world.granted(key).fingerprint == ""
            assert isinstance(world.claim(key, fingerprint="1:bb"), InFlight)

    def test_a_batch_takes_over_by_the_first_fingerprint_that_may(self, world: World) -> None:
        """Of two claims in one batch, the one with the recorded fingerprint is granted, in either order."""
        for key, order in (("a", ("1:bb", "1:aa")), ("b", ("1:aa", "1:bb"))):
            world.granted(key, fingerprint="1:aa", lease=10)
            world.clock.advance(10)
            verdicts = world.claims([claim_request(key, fingerprint=fingerprint) for fingerprint in order])
            by_print = dict(zip(order, verdicts, strict=True))
            assert isinstance(by_print["1:aa"], Granted)
            assert by_print["1:bb"] == Mismatch("1:aa")
