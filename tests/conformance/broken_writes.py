"""Broken stores that lose or falsify what owners write, or what readers get."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch

from msgspec.structs import replace

from conformance.sound import Broken, caught_by
from semel import codec
from semel.once.store import Complete, Forget, ForgetScope, KeyRef, OutcomeData, Owned, Release, Renew
from semel.types import Record


@caught_by(
    "test_a_stale_complete_is_refused",
    "test_a_fence_that_was_never_given_holds_nothing",
    "test_of_two_fences_the_newer_completes",
    "test_who_was_taken_over_cannot_record_its_outcome",
    "test_resolving_takes_what_is_unknown",
)
class CompletesWithoutAFence(Broken):
    """Whoever says it is done is believed: a zombie's outcome replaces the new owner's."""

    def complete_one(self, request: Complete, now: int) -> bool:
        record = self.live(request, now)
        if record is None:
            return False
        if record.state == "claimed":
            self.write(record, request.done, now)
        return True


@caught_by("test_a_stale_release_is_refused", "test_a_release_is_sent_again")
class ReleasesWithoutAFence(Broken):
    """A zombie that gives up frees the key of the new owner."""

    def release_one(self, request: Release, now: int) -> bool:
        record = self.live(request, now)
        if record is not None and record.state == "claimed":
            del self.records[self.place(request)]
        return True


@caught_by("test_a_stale_renew_is_refused", "test_an_owner_renews_or_is_taken_over_never_both")
class RenewsWithoutAFence(Broken):
    """A zombie keeps the new owner's lease alive, and believes that it is its own."""

    def renew_one(self, request: Renew, now: int) -> int | None:
        record = self.live(request, now)
        return None if record is None else super().renew_one(replace(request, fence=record.fence), now)


@caught_by("test_the_owners_verbs_answer_each_request_for_itself")
class AnswersForTheWholeBatch(Broken):
    """One UPDATE, one row count: if anything changed, everybody is told that it worked."""

    async def complete(self, requests: Sequence[Complete]) -> list[bool]:
        return [any(await super().complete(requests))] * len(requests)


@caught_by(
    "test_a_completed_record_is_never_overwritten", "test_what_was_marked_in_one_step_is_never_overwritten_either"
)
class OverwritesTheOutcome(Broken):
    """The last outcome wins, so two callers of one key get two answers."""

    def complete_one(self, request: Complete, now: int) -> bool:
        record = self.live(request, now)
        if record is None or record.fence != request.fence:
            return False
        self.write(record, request.done, now)
        return True


@caught_by("test_falsy_values_replay_as_themselves", "test_every_value_replays_as_itself")
class LosesFalsyValues(Broken):
    """``if value:`` instead of ``if value is not None``."""

    def write(self, record: Record, done: OutcomeData, now: int) -> None:
        super().write(record, done, now)
        try:
            value = codec.decode(done.data)
        except Exception:  # noqa: BLE001 -- not a value, whatever it is
            return
        record.data = done.data if value else None


@caught_by(
    "test_bytes_are_stored_as_they_are",
    "test_values_replay_exactly",
    "test_a_failure_that_is_to_be_kept_is_replayed",
    "test_who_waits_gets_the_outcome_when_it_is_there",
)
class StoresText(Broken):
    """Keeps the outcome in a text column."""

    def write(self, record: Record, done: OutcomeData, now: int) -> None:
        super().write(record, replace(done, data=done.data.decode(errors="replace").encode()), now)


@caught_by(
    "test_releasing_again_changes_nothing", "test_a_release_is_sent_again", "test_releasing_what_is_gone_is_true"
)
class ReleasesOnce(Broken):
    """A release whose reply was lost is told that its claim is lost."""

    def release_one(self, request: Release, now: int) -> bool:
        return self.live(request, now) is not None and super().release_one(request, now)


@caught_by(
    "test_a_complete_is_sent_again",
    "test_a_completed_record_is_never_overwritten",
    "test_two_completes_of_one_claim_in_one_batch_record_one_value",
)
class CompletesOnce(Broken):
    """A complete whose reply was lost is told that its claim is lost."""

    def complete_one(self, request: Complete, now: int) -> bool:
        record = self.live(request, now)
        return record is not None and record.state == "claimed" and super().complete_one(request, now)


@caught_by("test_releasing_what_one_completed_changes_nothing")
class ReleasesOutcomes(Broken):
    """A release that comes late deletes the outcome of its own work."""

    def release_one(self, request: Release, now: int) -> bool:
        record = self.live(request, now)
        if record is not None and record.fence == request.fence:
            del self.records[self.place(request)]
            return True
        return record is None


@caught_by("test_what_get_gives_belongs_to_the_caller")
class HandsOutItsOwnRecords(Broken):
    """Whoever looks at a record holds the store's own."""

    def get_one(self, ref: KeyRef, now: int) -> Record | None:
        record = self.live(ref, now)
        if record is not None:
            record.now_us = now
        return record


@caught_by(
    "test_a_renewal_moves_the_end_of_the_lease",
    "test_a_live_lease_outlives_retention",
    "test_a_renewal_is_sent_again",
    "test_a_renewal_may_shorten_the_lease",
    "test_purge_finds_what_ended_early",
    "test_retry_after_follows_a_renewal",
)
class SaysThatItRenewed(Broken):
    """Answers a renewal and writes nothing."""

    def renew_one(self, request: Renew, now: int) -> int | None:
        record = self.live(request, now)
        held = record is not None and record.fence == request.fence and record.state == "claimed"
        return now + request.lease_us if held else None


@caught_by("test_an_ended_lease_is_still_the_owners_while_nobody_wants_it")
class DropsLateOwners(Broken):
    """An owner that is a moment late loses work that nobody else wanted."""

    def live(self, request: KeyRef | Owned, now: int) -> Record | None:
        record = super().live(request, now)
        late = record is not None and record.state == "claimed" and now >= record.lease_until_us
        return None if late and not isinstance(request, KeyRef) else record


@caught_by(
    "test_a_released_key_is_absent",
    "test_who_released_holds_the_key_no_more",
    "test_purge_makes_a_released_key_no_less_absent",
    "test_work_that_fails_leaves_no_trace",
    "test_a_consumer_that_fails_leaves_its_message_unseen",
    "test_a_passing_fault_does_not_keep_a_failed_key",
)
class SaysThatItReleased(Broken):
    """Leaves a released key to the end of its lease."""

    def release_one(self, request: Release, now: int) -> bool:
        record = self.live(request, now)
        return record is None or record.fence == request.fence


@caught_by("test_get_answers_each_in_its_place", "test_a_batch_keeps_scopes_apart")
class GivesWhatItFinds(Broken):
    """``SELECT … WHERE key IN (…)``: the rows that are there, once each."""

    async def get(self, refs: Sequence[KeyRef]) -> list[Record | None]:
        found = [record for record in await super().get(list(dict.fromkeys(refs))) if record is not None]
        return [*found, *[None] * (len(refs) - len(found))]


@caught_by("test_who_completed_has_no_lease_to_renew")
class RenewsWhatIsDone(Broken):
    """A heartbeat that comes late moves the lease of a completed record."""

    def renew_one(self, request: Renew, now: int) -> int | None:
        record = self.live(request, now)
        if record is None or record.fence != request.fence:
            return None
        record.lease_us, record.lease_until_us = request.lease_us, now + request.lease_us
        return record.lease_until_us


@caught_by("test_a_store_may_be_opened_again")
class OpensEmpty(Broken):
    """Opening makes the tables anew."""

    async def open(self) -> None:
        self.records = {}


@caught_by("test_a_store_may_be_closed_twice")
class ClosesOnce(Broken):
    """Whoever closes it twice gets an error."""

    closed = False

    async def close(self) -> None:
        if self.closed:
            raise RuntimeError("closed")
        self.closed = True


@caught_by(
    "test_a_forgotten_key_is_absent",
    "test_a_scope_is_forgotten_without_the_keys_at_work",
    "test_forgotten_work_is_done_anew",
)
class ForgetsTheValueAlone(Broken):
    """Takes the value away and leaves the key, which nobody can use then."""

    def remove(self, request: Forget) -> None:
        self.records[self.place(request)].data = None


@caught_by("test_a_key_at_work_is_forgotten_by_force_alone", "test_a_batch_is_forgotten_each_in_its_place")
class ForgetsKeysAtWork(Broken):
    """Whoever works on the key learns of it when it is too late, although nobody wanted that."""

    def forget_one(self, request: Forget, now: int) -> bool:
        return super().forget_one(replace(request, force=True), now)


@caught_by("test_forgetting_names_the_fence")
class ForgetsWithoutAFence(Broken):
    """By key alone: sent again after its reply was lost, it takes away what was done meanwhile."""

    def forget_one(self, request: Forget, now: int) -> bool:
        record = self.live(request, now)
        return super().forget_one(replace(request, fence=record.fence) if record is not None else request, now)


@caught_by("test_forgetting_what_is_absent_is_true", "test_forgetting_is_sent_again")
class ForgetsOnce(Broken):
    """Says whether there was something, so that sent again it says something else."""

    def forget_one(self, request: Forget, now: int) -> bool:
        return self.live(request, now) is not None and super().forget_one(request, now)


@caught_by("test_a_scope_is_forgotten_without_the_keys_at_work", "test_forgetting_a_scope_is_bounded")
class ForgetsScopesByForce(Broken):
    """A DELETE for the scope, whoever works in it."""

    async def forget_scope(self, request: ForgetScope) -> int:
        return await super().forget_scope(replace(request, force=True))


@caught_by("test_a_scope_is_forgotten_without_the_keys_at_work")
class ForgetsByPattern(Broken):
    """Takes the scope for a pattern, and forgets its namesakes."""

    def forgets(self, request: ForgetScope, record: Record, now: int) -> bool:
        return fnmatch(record.scope, f"{request.scope}*") and super().forgets(
            replace(request, scope=record.scope), record, now
        )


@caught_by("test_forgetting_a_scope_is_bounded")
class ForgetsScopesAtOnce(Broken):
    """One DELETE for a million rows."""

    async def forget_scope(self, request: ForgetScope) -> int:
        return await super().forget_scope(replace(request, limit=2**62))
