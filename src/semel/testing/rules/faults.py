"""Lost requests and replies: nothing is done twice, and nobody is granted the key of another."""

from __future__ import annotations

from typing import Any

import pytest

from semel.errors import StoreBroken, StoreUnavailable
from semel.testing.faulty_store import FaultyStore
from semel.testing.harness import (
    World,
    claim_request,
    complete_request,
    forget_request,
    outcome_data,
    release_request,
    renew_request,
    us,
)
from semel.testing.rules.lifecycle import Work
from semel.types import Granted, InFlight, Replay


class Faults:
    """Every verb may be sent again after its reply was lost, and then returns the same as the first time."""

    def test_a_claim_is_sent_again(self, world: World) -> None:
        """Whether the request or its reply was lost, the same request sent again is granted, and only this one."""
        for lost in ("lose_request", "lose_reply"):
            request = claim_request(lost)
            first, again = _twice(world, lost, "claim", [request])
            assert isinstance(first[0], Granted)
            assert again == first
            assert isinstance(world.claim(lost), InFlight)
            assert world.record(lost).fence == first[0].claim.fence

    def test_a_mark_is_sent_again(self, world: World) -> None:
        """The mark belongs to this caller; it does not count as seen before."""
        for lost in ("lose_request", "lose_reply"):
            request = claim_request(lost, done=outcome_data("mine"))
            first, again = _twice(world, lost, "claim", [request])
            assert isinstance(first[0], Granted)
            assert again == first
            assert isinstance(world.claim(lost, done=outcome_data("other")), Replay)

    def test_a_complete_is_sent_again(self, world: World) -> None:
        """It returns True, and the value is the one that was sent."""
        for lost in ("lose_request", "lose_reply"):
            claim = world.granted(lost)
            first, again = _twice(world, lost, "complete", [complete_request(claim, "value")])
            assert first == again == [True]
            assert world.value(lost) == "value"

    def test_a_release_is_sent_again(self, world: World) -> None:
        """It returns True, and the key is absent. A claim made since then is not released."""
        for lost in ("lose_request", "lose_reply"):
            claim = world.granted(lost)
            first, again = _twice(world, lost, "release", [release_request(claim)])
            assert first == again == [True]
            world.granted(lost)
            with world.untouched(lost):
                assert world.release(claim) is False

    def test_a_renewal_is_sent_again(self, world: World) -> None:
        """It moves the end of the lease, and returns it."""
        for lost in ("lose_request", "lose_reply"):
            claim = world.granted(lost)
            first, again = _twice(world, lost, "renew", [renew_request(claim, 90)])
            assert first == again == [world.clock.us + us(90)]
            assert world.record(lost).lease_until_us == world.clock.us + us(90)

    def test_forgetting_is_sent_again(self, world: World) -> None:
        """It returns True, and the key is absent. A claim made since then stays, even with force."""
        for lost in ("lose_request", "lose_reply"):
            claim = world.completed(lost)
            first, again = _twice(world, lost, "forget", [forget_request(claim)])
            assert first == again == [True]
            world.granted(lost)
            with world.untouched(lost):
                assert world.forget(claim, force=True) is False

    def test_a_batch_is_sent_again(self, world: World) -> None:
        """In a batch with every kind of verdict, each request gets the same answer as the first time."""
        world.granted("busy")
        world.completed("done", value=1)
        requests = [
            claim_request("new"),
            claim_request("busy"),
            claim_request("marked", done=outcome_data(2)),
            claim_request("done"),
            claim_request("new"),
        ]
        first, again = _twice(world, "lose_reply", "claim", requests)
        assert [type(verdict) for verdict in first] == [Granted, InFlight, Granted, Replay, InFlight]
        assert again == first

    def test_a_passing_fault_is_not_noticed(self, world: World) -> None:
        """The engine retries lost requests and replies: the caller sees one grant and one outcome."""
        for lost in ("lose_request", "lose_reply"):
            store, work = FaultyStore(world.store), Work(world)
            once = world.once(store)
            for verb in ("claim", "complete"):
                getattr(store, lost)(verb)
            result = world.run(once.call(lost, work.call))
            assert (result.value, result.replayed, work.done) == ("value", False, 1)
            assert store.calls["claim"] == store.calls["complete"] == 2
            assert world.run(once.call(lost, work.call)).replayed is True
            assert work.done == 1

    def test_a_passing_fault_marks_no_message_twice(self, world: World) -> None:
        """A mark whose reply was lost returns "not_seen", since this caller is the first."""
        store = FaultyStore(world.store)
        once = world.once(store)
        store.lose_reply("claim")
        assert world.run(once.check_and_mark("ack_id", "m1")) == "not_seen"
        assert world.run(once.check_and_mark("ack_id", "m1")) == "seen"

    def test_a_passing_fault_does_not_keep_a_failed_key(self, world: World) -> None:
        """The release after failed work is retried, too: the next caller need not wait for the end of the lease."""
        store, work = FaultyStore(world.store), Work(world)
        once = world.once(store)
        work.error = RuntimeError("no")
        store.lose_request("release")
        with pytest.raises(RuntimeError):
            world.run(once.call("key", work.call))
        assert world.get("key", "default") is None

    def test_a_store_that_is_away_grants_nothing(self, world: World) -> None:
        """After retries for ``retry_for`` seconds, every verb raises StoreUnavailable, and no work is done."""
        store, work = FaultyStore(world.store), Work(world)
        once, patient = world.once(store, retry_for=0), world.once(store, retry_for=0.3)
        claim = world.run(once.claim("held")).claim
        store.away = True
        for call in (
            lambda: once.claim("key"),
            lambda: once.call("key", work.call),
            lambda: once.check_and_mark("ack_id", "m1"),
            lambda: once.complete(claim),
            lambda: once.renew(claim),
            lambda: once.release(claim),
            lambda: patient.get("key"),
        ):
            with pytest.raises(StoreUnavailable):
                _run(world, call)
        assert work.done == 0
        assert store.calls["get"] >= 2
        store.away = False
        assert isinstance(world.run(once.claim("key")), Granted)
        assert world.run(once.check_and_mark("ack_id", "m1")) == "not_seen"
        world.run(once.complete(claim, "held on"))
        assert world.value("held", "default") == "held on"

    def test_an_outcome_that_could_not_be_recorded_is_worked_for_again(self, world: World) -> None:
        """The caller gets an error; the key stays in flight until its lease ends, and then the next caller works."""
        store, work = FaultyStore(world.store), Work(world)
        once = world.once(store, retry_for=0.1)
        store.lose_request("complete", 1000)
        with pytest.raises(StoreUnavailable):
            world.run(once.call("key", work.call, lease=30, renew=False))
        sound = world.once()
        assert isinstance(world.run(sound.claim("key")), InFlight)
        world.clock.advance(30)
        assert world.run(sound.call("key", work.call)).replayed is False
        assert work.done == 2

    def test_a_broken_store_is_not_asked_again(self, world: World) -> None:
        """An error that retries cannot solve is raised at once."""
        store = FaultyStore(world.store, StoreBroken)
        once = world.once(store)
        store.lose_request("claim")
        with pytest.raises(StoreBroken):
            world.run(once.claim("key"))
        assert store.calls["claim"] == 1


def _twice(world: World, lost: str, verb: str, requests: list[Any]) -> tuple[Any, Any]:
    """Send the requests once with a fault and then twice without; return the two answers."""
    store = FaultyStore(world.store)
    getattr(store, lost)(verb)
    send = getattr(store, verb)
    with pytest.raises(StoreUnavailable):
        world.run(send(requests))
    return world.run(send(requests)), world.run(send(requests))


def _run(world: World, call: Any) -> Any:
    return world.run(call())
