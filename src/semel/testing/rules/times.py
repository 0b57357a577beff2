"""Lease and retention, exact to the microsecond: a lease protects the owner, retention keeps the outcome."""

from __future__ import annotations

import time
from collections.abc import Callable

from semel.testing.harness import LEASE, World, claim_request, outcome_data, us
from semel.types import Claim, Granted, InFlight, Mismatch, Replay, Unknown


def _gone(world: World) -> Claim:
    """A claim whose lease and retention have ended, and whose record was not collected."""
    claim = world.granted(fingerprint="1:aa", lease=10, ttl=100)
    world.clock.us = claim.expires_us + 1
    return claim


class Times:
    """What is allowed until, and from, which microsecond."""

    def test_a_lease_ends_at_its_end(self, world: World) -> None:
        """One microsecond before its end the key is in flight; at its end another caller can take over."""
        claim = world.granted(lease=10)
        world.clock.us = claim.lease_until_us - 1
        assert isinstance(world.claim(), InFlight)
        world.clock.us = claim.lease_until_us
        verdict = world.claim(lease=20, ttl=200)
        assert isinstance(verdict, Granted)
        assert verdict.reason == "abandoned"
        taken = verdict.claim
        assert (taken.lease_until_us, taken.expires_us) == (world.clock.us + us(20), world.clock.us + us(200))
        assert world.record().created_us == world.clock.us

    def test_retention_ends_after_its_end(self, world: World) -> None:
        """A key is expired if, and only if, the clock is past the end of its retention: not yet at it."""
        claim = world.completed(value="kept", ttl=100)
        world.clock.us = claim.expires_us
        assert isinstance(world.claim(), Replay)
        assert world.value() == "kept"
        world.clock.us = claim.expires_us + 1
        assert world.get() is None
        verdict = world.claim()
        assert isinstance(verdict, Granted)
        assert verdict.reason == "expired"

    def test_retention_counts_from_the_claim(self, world: World) -> None:
        """Completing late does not extend retention."""
        claim = world.granted(ttl=100, lease=90)
        world.clock.advance(80)
        assert world.complete(claim, 1)
        assert world.record().expires_us == claim.expires_us
        world.clock.us = claim.expires_us + 1
        assert isinstance(world.claim(), Granted)

    def test_repeats_do_not_extend_retention(self, world: World) -> None:
        """However often a key is claimed, read or completed again, its retention ends as it was set."""
        claim = world.completed(ttl=100)
        at_work = world.granted("at work", lease=100, ttl=100)
        for _ in range(9):
            world.clock.advance(10)
            assert isinstance(world.claim(ttl=1000), Replay)
            assert isinstance(world.claim("at work", ttl=1000, lease=1000), InFlight)
            assert world.complete(claim) is True
            assert world.record().expires_us == claim.expires_us
            assert world.record("at work").expires_us == at_work.expires_us
            assert world.record("at work").lease_until_us == at_work.lease_until_us
        world.clock.us = claim.expires_us + 1
        assert world.get() is None
        assert world.get("at work") is None

    def test_renewing_does_not_extend_retention(self, world: World) -> None:
        """A renewal moves the end of the lease, not that of retention."""
        claim = world.granted(lease=10, ttl=100)
        world.clock.advance(5)
        assert world.renew(claim, 50) is not None
        assert world.record().expires_us == claim.expires_us

    def test_a_renewal_moves_the_end_of_the_lease(self, world: World) -> None:
        """The lease then ends that many seconds from now. This end is returned; the key is in flight until then."""
        claim = world.granted(lease=10)
        world.clock.advance(9)
        until = world.renew(claim, 10)
        assert until == world.clock.us + us(10)
        record = world.record()
        assert (record.lease_until_us, record.lease_us, record.fence) == (until, us(10), claim.fence)
        world.clock.us = until - 1
        assert isinstance(world.claim(), InFlight)
        world.clock.us = until
        assert isinstance(world.claim(), Granted)

    def test_a_renewal_may_shorten_the_lease(self, world: World) -> None:
        """A renewal with a shorter lease is granted that shorter lease."""
        claim = world.granted(lease=100)
        assert world.renew(claim, 10) == world.clock.us + us(10)
        world.clock.advance(10)
        assert isinstance(world.claim(), Granted)

    def test_a_live_lease_outlives_retention(self, world: World) -> None:
        """While the owner's lease lasts, its record stays: for claims, reads, renewals and the collector."""
        claim = world.granted(fingerprint="1:aa", lease=100, ttl=10)
        world.clock.us = claim.lease_until_us - 1
        assert world.purge() == 0
        assert isinstance(world.claim(fingerprint="1:aa"), InFlight)
        assert isinstance(world.claim(fingerprint="1:bb"), Mismatch)
        assert world.record().state == "claimed"
        assert world.renew(claim, 100) == world.clock.us + us(100)
        world.clock.advance(99)
        assert world.purge() == 0
        assert isinstance(world.claim(fingerprint="1:aa"), InFlight)
        assert world.complete(claim) is True

    def test_a_claim_that_outlasts_its_retention_is_kept_for_one_more_after_its_lease(self, world: World) -> None:
        """Its owner vanished or is late: until then the key is abandoned or unknown, not free."""
        claim = world.granted(fingerprint="1:aa", lease=100, ttl=10)
        lost = world.granted("unknown", lease=5, ttl=10, unknown=True)
        world.clock.advance(4)
        assert world.renew(lost, 96) == claim.lease_until_us
        end = claim.lease_until_us + us(10)
        world.clock.us = end
        assert world.purge() == 0
        assert world.record().status == "abandoned"
        assert isinstance(world.claim(fingerprint="1:bb"), Mismatch)
        assert isinstance(world.claim("unknown"), Unknown)
        assert world.renew(lost, 1) == end + us(1)
        world.clock.us = end + 1
        assert world.get() is None
        assert world.complete(claim) is False
        assert world.purge() == 1
        verdict = world.claim(fingerprint="1:bb")
        assert isinstance(verdict, Granted)
        assert isinstance(world.claim("unknown"), InFlight)

    def test_work_that_outlasts_its_retention_leaves_an_outcome(self, world: World) -> None:
        """No outcome is expired when recorded: retention counts from the end of the work, even if its lease ended."""
        claims = [world.granted(f"key {number}", lease=100, ttl=10) for number in range(3)]
        world.clock.advance(10)
        assert world.complete(claims[0], "in time") is True
        assert world.record("key 0").expires_us == claims[0].expires_us
        world.clock.us += 1
        assert world.complete(claims[1], "late") is True
        ends = {"key 1": world.clock.us + us(10)}
        world.clock.us = claims[2].lease_until_us + 1
        assert world.complete(claims[2], "later still") is True
        assert world.complete(claims[2], "again") is True
        ends["key 2"] = world.clock.us + us(10)
        for key, end in ends.items():
            world.clock.us = end
            assert world.record(key).expires_us == end
            assert isinstance(world.claim(key), Replay)
            world.clock.us = end + 1
            assert world.get(key) is None
        assert world.purge() == 3

    def test_an_owner_may_act_until_retention_ends(self, world: World) -> None:
        """At the last microsecond of retention its fence can complete, renew and release; a stale fence cannot."""
        claims = {name: world.granted(name, lease=10, ttl=100) for name in ("completes", "renews", "releases")}
        stale = world.granted("taken over", lease=10, ttl=100)
        world.clock.us = stale.lease_until_us
        world.granted("taken over", lease=10, ttl=90)
        world.clock.us = stale.expires_us
        assert world.release(stale) is False
        assert world.complete(claims["completes"], "in time") is True
        assert world.value("completes") == "in time"
        assert world.renew(claims["renews"], 10) == world.clock.us + us(10)
        assert world.release(claims["releases"]) is True
        verdict = world.claim("releases")
        assert isinstance(verdict, Granted)
        assert verdict.reason == "absent"

    def test_what_is_gone_cannot_be_completed(self, world: World) -> None:
        """A gone record is absent even if it was not collected: complete returns False, and it stays absent."""
        claim = _gone(world)
        assert world.complete(claim, "late") is False
        assert world.get() is None
        assert isinstance(world.claim(), Granted)

    def test_what_is_gone_cannot_be_renewed(self, world: World) -> None:
        """A gone record is absent even if it was not collected: renew returns None, and it stays absent."""
        claim = _gone(world)
        assert world.renew(claim, 1000) is None
        assert world.get() is None
        assert isinstance(world.claim(), Granted)

    def test_releasing_what_is_gone_is_true(self, world: World) -> None:
        """A gone record is absent, so there is nothing to release, with any fence."""
        claim = _gone(world)
        assert world.release(claim) is True
        newer = world.granted(lease=10, ttl=100)
        world.clock.us = newer.expires_us + 1
        assert world.release(claim) is True
        assert world.get() is None

    def test_what_is_gone_is_absent_before_and_after_it_is_collected(self, world: World) -> None:
        """For reads and claims, it makes no difference whether a gone record was collected."""
        _gone(world)
        assert world.get() is None
        assert world.purge() == 1
        assert world.get() is None
        verdict = world.claim(fingerprint="1:bb")
        assert isinstance(verdict, Granted)
        assert world.purge() == 0

    def test_an_attempt_does_not_revive_what_is_gone(self, world: World) -> None:
        """An attempt that is sent again after retention is a new claim with a new fence."""
        request = claim_request(lease=10, ttl=100)
        (first,) = world.claims([request])
        assert isinstance(first, Granted)
        world.clock.us = first.claim.expires_us + 1
        (again,) = world.claims([request])
        assert isinstance(again, Granted)
        assert again.claim.fence > first.claim.fence
        assert again.claim.expires_us == world.clock.us + us(100)

    def test_a_clock_that_goes_back_breaks_no_lease_and_repeats_no_work(self, world: World) -> None:
        """With the clock set back, a key in flight stays so, a completed one replays; set right, nothing is lost."""
        claim = world.granted("at work", lease=10)
        world.completed("done", value=1)
        world.clock.advance(-7200)
        assert isinstance(world.claim("at work"), InFlight)
        assert isinstance(world.claim("done"), Replay)
        assert world.purge() == 0
        assert world.renew(claim, 10) == world.clock.us + us(10)
        world.clock.advance(7200)
        assert world.complete(claim, 2) is True
        assert (world.value("at work"), world.value("done")) == (2, 1)
        assert isinstance(world.claim("done"), Replay)

    def test_a_clock_that_goes_back_lengthens_no_lease(self, world: World) -> None:
        """A caller that wants the key of a vanished owner waits no longer than the lease that the owner requested."""
        world.granted("waits", lease=5)
        world.granted("marks", lease=5)
        world.granted("renewed", lease=100)
        renewed = world.granted("renewed too", lease=100)
        assert world.renew(renewed, 5) is not None
        world.clock.advance(-3600)
        assert world.record("waits").lease_left == 5
        for key, lease in (("waits", 5), ("renewed too", 5), ("renewed", 100)):
            first = world.claim(key)
            assert isinstance(first, InFlight)
            assert first.retry_after == lease
        assert isinstance(world.claim("marks", done=outcome_data()), InFlight)
        world.clock.advance(4)
        again = world.claim("waits")
        assert isinstance(again, InFlight)
        assert again.retry_after == 1
        world.clock.advance(1)
        for key in ("waits", "marks", "renewed too"):
            verdict = world.claim(key)
            assert isinstance(verdict, Granted), key
            assert verdict.reason == "abandoned"
        assert isinstance(world.claim("renewed"), InFlight)

    def test_a_clock_that_goes_back_lengthens_no_retention_of_work_that_ends_after_it(self, world: World) -> None:
        """A key that is completed after the clock was set back is kept for its retention, counted from then."""
        claim = world.granted(lease=10, ttl=100)
        world.clock.advance(-86400)
        assert world.complete(claim, 1) is True
        assert world.record().expires_us == world.clock.us + us(100)
        world.clock.advance(100)
        assert isinstance(world.claim(), Replay)
        world.clock.us += 1
        assert world.get() is None

    def test_without_a_clock_the_store_has_its_own_time(self, world: World) -> None:
        """Short leases and retention end by themselves; long ones last."""
        own = world.client(None)
        lasting = own.granted("lasting")
        short = own.granted("short", lease=0.001)
        _until(lambda: isinstance(own.claim("short", lease=0.001, ttl=0.001), Granted), "a short lease ends")
        _until(lambda: own.get("short") is None, "short retention ends")
        assert own.granted("short").fence > short.fence
        assert isinstance(own.claim("lasting"), InFlight)
        assert own.record("lasting").now_us >= lasting.lease_until_us - us(LEASE)
        assert own.complete(lasting) is True


def _until(ended: Callable[[], bool], what: str) -> None:
    """Wait until it ended, by polling for at least two seconds: a test cannot move the store's own clock."""
    for _ in range(200):
        if ended():
            return
        time.sleep(0.01)
    raise AssertionError(f"it never happened that {what}")
