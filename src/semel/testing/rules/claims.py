"""Claims: the verdict on an absent key, one in flight, a completed one, and one whose owner vanished."""

from __future__ import annotations

from semel.once.store import KeyRef
from semel.testing.harness import (
    LEASE,
    SCOPE,
    TTL,
    World,
    claim_request,
    complete_request,
    outcome_data,
    release_request,
    renew_request,
    us,
)
from semel.types import Granted, InFlight, Mismatch, Replay, Unknown


class Claims:
    """The verdicts on claims."""

    def test_an_absent_key_is_granted(self, world: World) -> None:
        """The claim has the values of the request, and its lease and retention count from now."""
        request = claim_request("key", scope="scope", fingerprint="1:aa", attempt="me", lease=LEASE, ttl=TTL)
        (verdict,) = world.claims([request])
        assert isinstance(verdict, Granted)
        assert verdict.reason == "absent"
        claim = verdict.claim
        assert (claim.scope, claim.key, claim.attempt, claim.fingerprint) == ("scope", "key", "me", "1:aa")
        assert claim.fence > 0
        assert claim.lease == LEASE
        assert claim.lease_until_us == world.clock.us + us(LEASE)
        assert claim.expires_us == world.clock.us + us(TTL)

    def test_get_shows_the_record_of_a_claim(self, world: World) -> None:
        """The record has the claim's values and times, and the store's time at which it was read."""
        claim = world.granted(fingerprint="1:aa", attempt="me", unknown=True)
        created = world.clock.us
        world.clock.advance(1)
        record = world.record()
        assert (record.scope, record.key, record.fingerprint, record.attempt) == ("scope", "key", "1:aa", "me")
        assert (record.state, record.fence, record.unknown) == ("claimed", claim.fence, True)
        assert (record.created_us, record.lease_us) == (created, us(LEASE))
        assert (record.lease_until_us, record.expires_us) == (claim.lease_until_us, claim.expires_us)
        assert record.outcome is None
        assert record.now_us == world.clock.us

    def test_get_shows_the_record_of_an_outcome(self, world: World) -> None:
        """A completed record has its outcome and the time of completion; the rest is as it was claimed."""
        claim = world.granted(fingerprint="1:aa")
        created = world.clock.us
        world.clock.advance(1)
        assert world.complete(claim, {"id": 7})
        record = world.record()
        assert (record.state, record.fence, record.fingerprint) == ("completed", claim.fence, "1:aa")
        assert (record.created_us, record.completed_us) == (created, world.clock.us)
        assert (record.kind, record.expires_us) == ("value", claim.expires_us)
        assert world.value() == {"id": 7}

    def test_looking_at_a_key_changes_nothing(self, world: World) -> None:
        """Get is not a claim: an absent key stays absent, and a record does not change."""
        assert world.get("other") is None
        assert isinstance(world.claim("other"), Granted)
        world.granted()
        with world.untouched():
            world.clock.advance(1)
            world.get()

    def test_what_get_gives_belongs_to_the_caller(self, world: World) -> None:
        """Changing the returned record does not change the store."""
        world.completed(value="mine")
        with world.untouched():
            record = world.record()
            record.data, record.fence, record.state = b"", 0, "claimed"

    def test_a_key_at_work_is_in_flight(self, world: World) -> None:
        """While the owner's lease lasts, nobody else is granted the key; the verdict has the owner's fence."""
        claim = world.granted()
        with world.untouched():
            verdict = world.claim()
        assert isinstance(verdict, InFlight)
        assert verdict.fence == claim.fence

    def test_retry_after_is_positive_and_never_beyond_the_lease(self, world: World) -> None:
        """It is the time until the lease ends, to its last microsecond."""
        claim = world.granted(lease=10)
        for left in (10_000_000, 6_543_210, 1_000, 1):
            world.clock.us = claim.lease_until_us - left
            verdict = world.claim()
            assert isinstance(verdict, InFlight)
            assert 0 < verdict.retry_after <= left / 1e6

    def test_retry_after_follows_a_renewal(self, world: World) -> None:
        """After a renewal it is the time until the new lease ends."""
        claim = world.granted(lease=10)
        world.clock.advance(9)
        assert world.renew(claim, 30) is not None
        verdict = world.claim()
        assert isinstance(verdict, InFlight)
        assert 10 < verdict.retry_after <= 30

    def test_a_completed_key_is_replayed(self, world: World) -> None:
        """Every later caller gets the outcome, with its owner's fence and its times."""
        claim = world.granted()
        created = world.clock.us
        world.clock.advance(1)
        assert world.complete(claim, {"id": 7})
        completed = world.clock.us
        world.clock.advance(1)
        for _ in range(2):
            with world.untouched():
                verdict = world.claim()
            assert isinstance(verdict, Replay)
            outcome = verdict.outcome
            assert outcome.value == {"id": 7}
            assert (outcome.kind, outcome.fence) == ("value", claim.fence)
            assert (outcome.created_us, outcome.completed_us, outcome.expires_us) == (
                created,
                completed,
                claim.expires_us,
            )

    def test_claiming_with_an_outcome_completes_in_one_step(self, world: World) -> None:
        """Such a key is never in flight: it is completed from the start, with its own fence."""
        claim = world.granted(done=outcome_data("marked", kind="seen"))
        record = world.record()
        assert (record.state, record.fence) == ("completed", claim.fence)
        assert record.created_us == record.completed_us == world.clock.us
        verdict = world.claim()
        assert isinstance(verdict, Replay)
        assert (verdict.outcome.kind, verdict.outcome.value) == ("seen", "marked")

    def test_an_outcome_brought_along_replaces_nothing(self, world: World) -> None:
        """A claim with an outcome gets the same verdict on an owned or completed key as any claim."""
        world.granted("at work")
        world.completed("done", value="first")
        with world.untouched("at work"), world.untouched("done"):
            assert isinstance(world.claim("at work", done=outcome_data("second")), InFlight)
            verdict = world.claim("done", done=outcome_data("second"))
        assert isinstance(verdict, Replay)
        assert verdict.outcome.value == "first"

    def test_two_claims_of_one_key_in_one_batch_are_judged_in_order(self, world: World) -> None:
        """The second one sees what the first one wrote, as if it were sent later."""
        first, second, third = world.claims([claim_request(), claim_request("other"), claim_request()])
        assert isinstance(first, Granted)
        assert isinstance(second, Granted)
        assert isinstance(third, InFlight)
        assert world.record().fence == first.claim.fence
        first, second = world.claims(
            [claim_request("marked", done=outcome_data(1)), claim_request("marked", done=outcome_data(2))]
        )
        assert isinstance(first, Granted)
        assert isinstance(second, Replay)
        assert second.outcome.value == world.value("marked") == 1
        first, second = world.claims(
            [claim_request("print", fingerprint="1:aa"), claim_request("print", fingerprint="1:bb")]
        )
        assert isinstance(first, Granted)
        assert isinstance(second, Mismatch)

    def test_a_batch_takes_a_key_over_once(self, world: World) -> None:
        """Of two claims in one batch of a key whose lease or retention ended, only the first is granted."""
        world.granted("abandoned", lease=1)
        world.completed("expired", ttl=1)
        world.clock.advance(2)
        asked = [
            claim_request("abandoned"),
            claim_request("expired"),
            claim_request("expired"),
            claim_request("abandoned"),
        ]
        verdicts = world.claims(asked)
        for key, first, second in (("abandoned", 0, 3), ("expired", 1, 2)):
            winner = verdicts[first]
            assert isinstance(winner, Granted)
            assert winner.reason == key
            assert winner.claim.attempt == asked[first].attempt
            assert isinstance(verdicts[second], InFlight)
            assert world.record(key).fence == winner.claim.fence

    def test_answers_come_in_the_order_of_the_requests(self, world: World) -> None:
        """Whatever order the store works in, the answers are in the order of the batch."""
        lost = world.granted("lost", lease=1, unknown=True)
        world.clock.advance(2)
        busy = world.granted("busy")
        world.completed("done", value="was")
        world.granted("print", fingerprint="1:aa")
        keys = ["zz", "busy", "print", "lost", "done", "aa"]
        verdicts = world.claims([claim_request(key, fingerprint="1:bb" if key == "print" else "") for key in keys])
        kinds = [type(verdict) for verdict in verdicts]
        assert kinds == [Granted, InFlight, Mismatch, Unknown, Replay, Granted]
        z, in_flight, _, unknown, replay, a = verdicts
        assert isinstance(z, Granted)
        assert isinstance(a, Granted)
        assert (z.claim.key, a.claim.key) == ("zz", "aa")
        assert isinstance(in_flight, InFlight)
        assert in_flight.fence == busy.fence
        assert isinstance(unknown, Unknown)
        assert unknown.fence == lost.fence
        assert isinstance(replay, Replay)
        assert replay.outcome.value == "was"

    def test_a_batch_of_several_hundred_is_one_call_like_any_other(self, world: World) -> None:
        """700 keys are claimed, read, renewed, completed, replayed and released in batches, with answers in order."""
        names = [f"{number * 7919 % 700:03}" for number in range(700)]
        claims = []
        for name, verdict in zip(names, world.claims([claim_request(name) for name in names]), strict=True):
            assert isinstance(verdict, Granted)
            assert verdict.claim.key == name
            claims.append(verdict.claim)
        store, run = world.store, world.run
        until = world.clock.us + us(90)
        assert run(store.renew([renew_request(claim, 90) for claim in claims])) == [until] * 700
        assert run(store.complete([complete_request(claim, claim.key) for claim in claims[:350]])) == [True] * 350
        verdicts = world.claims([claim_request(name) for name in names])
        values = [verdict.outcome.value for verdict in verdicts[:350] if isinstance(verdict, Replay)]
        assert values == names[:350]
        assert all(isinstance(verdict, InFlight) for verdict in verdicts[350:])
        assert run(store.release([release_request(claim) for claim in claims[350:]])) == [True] * 350
        records = run(store.get([KeyRef(SCOPE, name) for name in names]))
        assert [record and record.key for record in records] == names[:350] + [None] * 350

    def test_a_vanished_owner_is_unknown_where_that_was_asked_for(self, world: World) -> None:
        """If the owner's or the caller's claim has ``unknown``, an ended lease is not taken over: it is Unknown."""
        by_owner = world.granted("by owner", lease=10, unknown=True)
        by_caller = world.granted("by caller", lease=10)
        world.clock.advance(10)
        with world.untouched("by owner"), world.untouched("by caller"):
            verdict = world.claim("by owner")
            second = world.claim("by caller", unknown=True)
        assert verdict == Unknown(by_owner.fence, by_owner.lease_until_us)
        assert second == Unknown(by_caller.fence, by_caller.lease_until_us)
        assert world.record("by owner").status == "unknown"

    def test_resolving_takes_what_is_unknown(self, world: World) -> None:
        """A claim with ``resolving`` is granted the key with a new fence, but not while the owner's lease lasts."""
        lost = world.granted(lease=10, unknown=True)
        assert isinstance(world.claim(resolving=True, unknown=True), InFlight)
        world.clock.advance(10)
        verdict = world.claim(resolving=True, unknown=True)
        assert isinstance(verdict, Granted)
        assert verdict.reason == "abandoned"
        assert verdict.claim.fence > lost.fence
        assert not world.complete(lost, "late")

    def test_unknown_ends_with_retention(self, world: World) -> None:
        """A key that nobody resolved expires like any other."""
        claim = world.granted(lease=10, ttl=100, unknown=True)
        world.clock.us = claim.expires_us
        assert isinstance(world.claim(), Unknown)
        world.clock.us = claim.expires_us + 1
        verdict = world.claim()
        assert isinstance(verdict, Granted)
        assert verdict.reason == "expired"

    def test_waiting_changes_no_verdict(self, world: World) -> None:
        """``waiting`` only requests a notification when the owner is done."""
        claim = world.granted()
        assert isinstance(world.claim(waiting=True), InFlight)
        assert world.complete(claim, 1)
        assert isinstance(world.claim(waiting=True), Replay)
        assert isinstance(world.claim("new", waiting=True), Granted)
