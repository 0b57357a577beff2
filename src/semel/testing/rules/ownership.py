"""The owner's verbs: what it may do with its key, how often, and for how long."""

from __future__ import annotations

from semel.testing.harness import (
    World,
    claim_request,
    complete_request,
    outcome_data,
    release_request,
    renew_request,
    us,
)
from semel.types import Granted, InFlight, Replay


class Ownership:
    """The verbs of a key's owner, also when they are repeated."""

    def test_an_attempt_that_is_sent_again_is_granted_again(self, world: World) -> None:
        """If its reply was lost, it gets the same claim with the same fence, and is not in flight to itself."""
        request = claim_request()
        (first,) = world.claims([request])
        world.clock.advance(1)
        with world.untouched():
            (again,) = world.claims([request])
        assert isinstance(first, Granted)
        assert isinstance(again, Granted)
        assert again.claim == first.claim

    def test_an_attempt_with_an_outcome_is_granted_again_too(self, world: World) -> None:
        """A mark whose reply was lost is granted to this caller again, not replayed as another's."""
        request = claim_request(done=outcome_data("mine"))
        (first,) = world.claims([request])
        world.clock.advance(1)
        with world.untouched():
            (again,) = world.claims([request])
        assert isinstance(first, Granted)
        assert isinstance(again, Granted)
        assert again.claim == first.claim
        assert isinstance(world.claim(done=outcome_data("other")), Replay)

    def test_an_attempt_twice_in_one_batch_is_one_claim(self, world: World) -> None:
        """Both answers are the same grant."""
        request = claim_request()
        first, again = world.claims([request, request])
        assert isinstance(first, Granted)
        assert isinstance(again, Granted)
        assert first.claim == again.claim

    def test_an_attempt_is_not_held_up_by_its_own_ended_lease(self, world: World) -> None:
        """Sent again after its lease ended, it gets the key if nobody took over; even if others would get Unknown."""
        request = claim_request(lease=10, unknown=True)
        (first,) = world.claims([request])
        world.clock.advance(10)
        (again,) = world.claims([request])
        assert isinstance(first, Granted)
        assert isinstance(again, Granted)
        assert again.claim.fence >= first.claim.fence
        assert again.claim.lease_until_us > world.clock.us
        assert world.complete(again.claim)

    def test_an_attempt_that_was_overtaken_is_not_granted(self, world: World) -> None:
        """Sent again after another attempt took over, it finds the key in flight, like any other caller."""
        request = claim_request(lease=10)
        world.claims([request])
        world.clock.advance(10)
        new = world.granted()
        with world.untouched():
            (verdict,) = world.claims([request])
        assert isinstance(verdict, InFlight)
        assert world.complete(new, "new")
        (verdict,) = world.claims([request])
        assert isinstance(verdict, Replay)

    def test_a_completed_record_is_never_overwritten(self, world: World) -> None:
        """Completing again with the same fence returns True, and changes neither the value nor the times."""
        claim = world.completed(value="first")
        with world.untouched():
            world.clock.advance(1)
            assert world.complete(claim, "second", value_ttl=1) is True
        assert world.value() == "first"

    def test_two_completes_of_one_claim_in_one_batch_record_one_value(self, world: World) -> None:
        """Both answers are True, and one of the two values stays."""
        claim = world.granted()
        answers = world.run(world.store.complete([complete_request(claim, "one"), complete_request(claim, "two")]))
        assert answers == [True, True]
        assert world.value() in ("one", "two")

    def test_what_was_marked_in_one_step_is_never_overwritten_either(self, world: World) -> None:
        """With its own fence, complete and release return True, and nothing changes."""
        claim = world.granted(done=outcome_data("marked"))
        with world.untouched():
            assert world.complete(claim, "second") is True
            assert world.release(claim) is True
        assert world.value() == "marked"

    def test_a_released_key_is_absent(self, world: World) -> None:
        """The next caller is granted the key, with any fingerprint."""
        claim = world.granted(fingerprint="1:aa")
        assert world.release(claim) is True
        assert world.get() is None
        verdict = world.claim(fingerprint="1:bb")
        assert isinstance(verdict, Granted)
        assert verdict.reason == "absent"

    def test_releasing_again_changes_nothing(self, world: World) -> None:
        """A second release of the same fence, or of an absent key, returns True."""
        claim = world.granted()
        assert world.release(claim) is True
        assert world.release(claim) is True
        assert world.get() is None
        assert world.run(world.store.release([release_request(claim), release_request(claim)])) == [True, True]

    def test_releasing_what_one_completed_changes_nothing(self, world: World) -> None:
        """A release after the complete of the same fence returns True, and the outcome stays."""
        claim = world.completed(value="kept")
        with world.untouched():
            assert world.release(claim) is True
        assert world.value() == "kept"

    def test_who_released_holds_the_key_no_more(self, world: World) -> None:
        """After a release the same fence can neither complete nor renew."""
        claim = world.granted()
        assert world.release(claim)
        assert world.complete(claim, "late") is False
        assert world.renew(claim) is None
        assert world.get() is None

    def test_who_completed_has_no_lease_to_renew(self, world: World) -> None:
        """A renewal after the complete returns None and changes nothing."""
        claim = world.completed()
        with world.untouched():
            assert world.renew(claim, 1000) is None

    def test_an_ended_lease_is_still_the_owners_while_nobody_wants_it(self, world: World) -> None:
        """Within retention, as long as nobody took over, the owner can still renew, complete or release."""
        renews = world.granted("renews", lease=10)
        completes = world.granted("completes", lease=10, unknown=True)
        releases = world.granted("releases", lease=10)
        world.clock.advance(100)
        assert world.renew(renews, 5) == world.clock.us + us(5)
        assert isinstance(world.claim("renews"), InFlight)
        assert world.complete(completes, "late") is True
        assert world.value("completes") == "late"
        assert world.release(releases) is True
        assert world.get("releases") is None

    def test_the_owners_verbs_answer_each_request_for_itself(self, world: World) -> None:
        """If some fences of a batch hold and some do not, each request gets its own answer, in order."""
        stale = [world.granted(f"stale {number}", lease=10) for number in range(3)]
        world.clock.advance(10)
        for claim in stale:
            world.granted(claim.key)
        own = [world.granted(f"own {number}") for number in range(3)]
        absent = world.granted("absent")
        assert world.release(absent)
        mixed = [stale[2], own[1], absent, own[0], stale[0], own[2], stale[1]]
        held = [claim in own for claim in mixed]
        store, run, now = world.store, world.run, world.clock.us
        renewed = run(store.renew([renew_request(claim, 5) for claim in mixed]))
        assert renewed == [now + us(5) if holds else None for holds in held]
        completed = run(store.complete([complete_request(claim, claim.key) for claim in mixed]))
        assert completed == held
        released = run(store.release([release_request(claim) for claim in mixed]))
        assert released == [holds or claim is absent for holds, claim in zip(held, mixed, strict=True)]
        assert [world.value(claim.key) for claim in own] == ["own 0", "own 1", "own 2"]
        assert [world.record(claim.key).state for claim in stale] == ["claimed"] * 3
