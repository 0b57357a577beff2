"""The store through ``Once`` and ``AsyncOnce``, as users call it: messages are handled once, work is done once."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from semel.errors import ClaimLost, InProgress, KeyReused, OriginalFailed, OutcomeGone, OutcomeUnknown
from semel.testing.harness import World
from semel.testing.rules.outcomes import FALSY, VALUES
from semel.types import Granted, InFlight, Replay, Unknown


class Work:
    """Work that counts how often it is done."""

    def __init__(self, world: World, value: Any = "value") -> None:
        self.done = 0
        self.value = value
        self.error: Exception | None = None
        self.call = world.working(self._work)

    def _work(self, *_: Any, **__: Any) -> Any:
        self.done += 1
        if self.error is not None:
            raise self.error
        return self.value


class Lifecycle:
    """A key from its first call to its end."""

    def test_a_message_is_seen_from_its_second_delivery_on(self, world: World) -> None:
        """An absent message is not seen, and marked in the same step; a marked one is seen."""
        once = world.once()
        assert world.run(once.check_and_mark("ack_id", "m1", {"status": "ok"})) == "not_seen"
        assert world.run(once.check_and_mark("ack_id", "m1")) == "seen"
        assert world.run(once.check_and_mark("ack_id", "m2")) == "not_seen"

    def test_a_mark_expires_exactly_and_is_renewed(self, world: World) -> None:
        """A message is seen to the last microsecond of its ttl; then it is not seen, and marked for a full ttl."""
        once = world.once()
        assert world.run(once.check_and_mark("ack_id", "m1", ttl=100)) == "not_seen"
        world.clock.advance(100)
        assert world.run(once.check_and_mark("ack_id", "m1", ttl=100)) == "seen"
        world.clock.us += 1
        assert world.run(once.check_and_mark("ack_id", "m1", ttl=100)) == "not_seen"
        world.clock.advance(100)
        assert world.run(once.check_and_mark("ack_id", "m1", ttl=100)) == "seen"

    def test_each_type_of_message_has_its_own_space(self, world: World) -> None:
        """The same message id under another type is another message."""
        once = world.once()
        for key_type in ("assignment_id", "request_id", "ack_id", "usage_id"):
            assert world.run(once.check_and_mark(key_type, "m1", key_type)) == "not_seen"
        for key_type in ("assignment_id", "request_id", "ack_id", "usage_id"):
            assert world.run(once.check_and_mark(key_type, "m1")) == "seen"
            assert world.run(once.get("m1", scope=key_type)).additional_data == key_type

    def test_a_mark_keeps_its_data_for_audit(self, world: World) -> None:
        """The record has the message's id and type, the times of processing and expiry, and the data."""
        once = world.once()
        world.run(once.check_and_mark("usage_id", "usage-7", {"units": 3}, ttl=3600))
        entry = world.run(once.get("usage-7", scope="usage_id"))
        assert entry is not None
        assert (entry.message_id, entry.key_type, entry.additional_data) == ("usage-7", "usage_id", {"units": 3})
        assert (entry.completed_us, entry.expires_us) == (world.clock.us, world.clock.us + 3_600_000_000)

    def test_of_many_deliveries_at_once_one_is_not_seen(self, world: World) -> None:
        """Check and mark are one atomic step: of 64 concurrent calls exactly one returns "not_seen"."""
        once = world.once()
        answers = world.together([partial(once.check_and_mark, "ack_id", "m1", number) for number in range(64)])
        assert sorted(answers) == ["not_seen"] + ["seen"] * 63
        assert world.run(once.get("m1", scope="ack_id")).additional_data == answers.index("not_seen")

    def test_a_consumer_that_fails_leaves_its_message_unseen(self, world: World) -> None:
        """After a failure the next delivery is handled; after a success, later ones are skipped."""
        work, once = Work(world), world.once()
        handle = once.consumer("ack_id", key=lambda message: message)(work.call)
        work.error = RuntimeError("no")
        with pytest.raises(RuntimeError):
            world.run(handle("m1"))
        assert world.run(once.get("m1", scope="ack_id")) is None
        work.error = None
        assert [world.run(handle("m1")) for _ in range(3)] == ["value", None, None]
        assert work.done == 2

    def test_work_is_done_once_and_replayed(self, world: World) -> None:
        """The first call does the work, and every later call gets its value, until retention ends."""
        work, once = Work(world), world.once()
        results = [world.run(once.call("key", work.call, ttl=100)) for _ in range(3)]
        assert [(result.value, result.replayed) for result in results] == [
            ("value", False),
            ("value", True),
            ("value", True),
        ]
        assert work.done == 1
        world.clock.advance(101)
        assert world.run(once.call("key", work.call)).replayed is False
        assert work.done == 2

    def test_every_value_replays_as_itself(self, world: World) -> None:
        """None, 0, False and empty values are results, too."""
        once = world.once()
        for number, value in enumerate(FALSY + VALUES):
            work = Work(world, value)
            results = [world.run(once.call(f"key {number}", work.call)) for _ in range(2)]
            assert [repr(result.value) for result in results] == [repr(value)] * 2
            assert results[1].replayed is True
            assert work.done == 1

    def test_work_that_fails_leaves_no_trace(self, world: World) -> None:
        """The caller gets the error, nothing is stored, and the next call tries again."""
        work, once = Work(world), world.once()
        work.error = RuntimeError("no")
        for _ in range(2):
            with pytest.raises(RuntimeError, match="no"):
                world.run(once.call("key", work.call))
            assert world.run(once.get("key")) is None
        work.error = None
        assert world.run(once.call("key", work.call)).replayed is False
        assert work.done == 3

    def test_a_failure_that_is_to_be_kept_is_replayed(self, world: World) -> None:
        """With ``on_error="keep"`` the failure is the outcome: the work is not done again."""
        work, once = Work(world), world.once()
        work.error = RuntimeError("no")
        with pytest.raises(RuntimeError):
            world.run(once.call("key", work.call, on_error="keep"))
        with pytest.raises(OriginalFailed, match="RuntimeError: no"):
            world.run(once.call("key", work.call, on_error="keep"))
        assert work.done == 1

    def test_a_key_at_work_is_in_progress(self, world: World) -> None:
        """A caller that does not wait gets ``retry_after``: at most the time until the owner's lease ends."""
        once = world.once()
        assert isinstance(world.run(once.claim("key", lease=30)), Granted)
        with pytest.raises(InProgress) as raised:
            world.run(once.call("key", Work(world).call))
        assert 0 < raised.value.retry_after <= 30

    def test_a_key_with_other_content_is_refused(self, world: World) -> None:
        """A call with another fingerprint raises KeyReused, and the work is not done again."""
        work, once = Work(world), world.once()
        world.run(once.call("key", work.call, fingerprint="1:aa"))
        with pytest.raises(KeyReused):
            world.run(once.call("key", work.call, fingerprint="1:bb"))
        assert work.done == 1

    def test_many_callers_at_once_do_the_work_once(self, world: World) -> None:
        """Of 64 concurrent callers, one works, and all get its value."""
        work, once = Work(world, {"id": 7}), world.once()
        results = world.together([partial(once.call, "key", work.call, in_flight="wait")] * 64)
        assert work.done == 1
        assert [result.value for result in results] == [{"id": 7}] * 64
        assert sum(not result.replayed for result in results) == 1

    def test_other_keys_are_worked_on_at_the_same_time(self, world: World) -> None:
        """Work under four keys waits for each other, so it must run concurrently."""
        once, meet = world.once(), world.meeting(4)
        results = world.together([partial(once.call, f"key {number}", meet) for number in range(4)])
        assert sorted(result.value for result in results) == [0, 1, 2, 3]

    def test_who_was_taken_over_cannot_record_its_outcome(self, world: World) -> None:
        """Every verb of the late owner raises ClaimLost; the new owner's outcome stays."""
        once = world.once()
        late = world.run(once.claim("key", lease=10)).claim
        world.clock.advance(10)
        new = world.run(once.claim("key"))
        assert (new.reason, new.claim.fence > late.fence) == ("abandoned", True)
        for verb in (once.complete, once.release, once.renew):
            with pytest.raises(ClaimLost):
                world.run(verb(late))
        world.run(once.complete(new.claim, "new"))
        assert world.run(once.claim("key")).outcome.value == "new"

    def test_an_unknown_outcome_waits_for_someone_who_knows(self, world: World) -> None:
        """The work is not done again by itself. Resolved as done, it is replayed; as not done, the key is free."""
        work, once = Work(world), world.once()
        for key in ("done", "not done"):
            lost = world.run(once.claim(key, lease=10, on_crash="unknown")).claim
            world.clock.advance(10)
            assert isinstance(world.run(once.claim(key)), Unknown)
            with pytest.raises(OutcomeUnknown):
                world.run(once.call(key, work.call))
            world.run(once.resolve(key, done=key == "done", value="found"))
            with pytest.raises(ClaimLost):
                world.run(once.complete(lost, "late"))
        assert work.done == 0
        assert world.run(once.call("done", work.call)).value == "found"
        assert world.run(once.call("not done", work.call)).value == "value"
        assert work.done == 1

    def test_forgotten_work_is_done_anew(self, world: World) -> None:
        """One key, or all of a scope, can be forgotten; a key in flight is forgotten or resolved only with force."""
        work, once = Work(world), world.once()
        world.run(once.call("key", work.call))
        assert world.run(once.forget("key")) is True
        assert world.run(once.forget("key")) is False
        assert world.run(once.call("key", work.call)).replayed is False
        assert world.run(once.forget_scope("default")) == 1
        assert world.run(once.call("key", work.call)).replayed is False
        assert work.done == 3
        for key in ("forgotten", "resolved"):
            claim = world.run(once.claim(key, lease=10)).claim
            verb = partial(once.forget, key) if key == "forgotten" else partial(once.resolve, key, done=True, value=7)
            with pytest.raises(InProgress) as refused:
                world.run(verb())
            assert refused.value.retry_after == 10
            world.run(verb(force=True))
            with pytest.raises(ClaimLost):
                world.run(once.complete(claim))
        assert world.run(once.call("forgotten", work.call)).replayed is False
        assert world.run(once.call("resolved", work.call)).value == 7

    def test_a_value_that_was_not_kept_is_not_made_again(self, world: World) -> None:
        """The tombstone keeps the key completed, and the work is not done again."""
        work, once = Work(world), world.once()
        world.run(once.call("key", work.call, ttl=100, value_ttl=10))
        world.clock.advance(11)
        for _ in range(2):
            with pytest.raises(OutcomeGone):
                world.run(once.call("key", work.call))
            world.run(once.purge())
        assert work.done == 1

    def test_who_waits_gets_the_outcome_when_it_is_there(self, world: World) -> None:
        """A duplicate that waits gets its verdict when the claim ends, however it ends."""
        once = world.once()
        first = world.run(once.claim("completed")).claim
        other = world.run(once.claim("released")).claim
        assert isinstance(world.run(once.claim("completed", wait=0.01)), InFlight)
        replay, granted, *_ = world.together(
            [
                partial(once.claim, "completed", wait=30),
                partial(once.claim, "released", wait=30),
                partial(once.complete, first, "value"),
                partial(once.release, other),
            ]
        )
        assert isinstance(replay, Replay)
        assert replay.outcome.value == "value"
        assert isinstance(granted, Granted)
