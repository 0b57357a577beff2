"""Stores that are wrong on purpose: each breaks one promise, as real systems have done, and names who notices.

They are small changes to one small store that is right, so what is wrong is all there is to see.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from msgspec.structs import replace

from conformance.sound import Sound, wall_clock
from semel import codec
from semel.model import Held, InFlight, Mismatch, Reason, Record, Unknown, Verdict
from semel.once.rules import gone, judge
from semel.once.store import ClaimRequest, Clock, Complete, Done, Owned, Ref, Release, Renew

FOREVER = 2**62


class Broken(Sound):
    """A store that breaks a promise, and the rules that notice."""

    is_async: ClassVar[bool] = False
    caught_by: ClassVar[tuple[str, ...]]


BROKEN: list[type[Broken]] = []


def caught_by(*rules: str) -> Callable[[type[Broken]], type[Broken]]:
    """This store is broken, and these rules say so."""

    def note(store: type[Broken]) -> type[Broken]:
        store.caught_by = rules
        BROKEN.append(store)
        return store

    return note


@caught_by(
    "test_a_stale_complete_is_refused",
    "test_a_fence_that_was_never_given_holds_nothing",
    "test_of_two_fences_the_newer_completes",
    "test_who_was_taken_over_cannot_record_its_outcome",
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


@caught_by(
    "test_of_64_callers_one_gets_each_of_many_keys",
    "test_batches_of_the_same_keys_in_any_order_do_not_block_each_other",
    "test_a_key_passed_from_hand_to_hand_has_one_owner_at_a_time",
)
class ChecksThenActs(Broken):
    """Looks under the lock, then writes under the lock; in between it has let go."""

    async def claim(self, requests: Sequence[ClaimRequest]) -> list[Verdict]:
        return [self.look_then_take(request) for request in requests]

    def look_then_take(self, request: ClaimRequest) -> Verdict:
        now = self.clock()
        with self.lock:
            previous = self.records.get(self.place(request))
        verdict = self.judge(previous, request, now)
        with self.lock:
            return self.take(request, previous, verdict, now) if isinstance(verdict, str) else verdict


@caught_by("test_of_64_callers_one_gets_the_key", "test_of_64_callers_one_takes_over", "test_of_64_callers_one_marks")
class AwaitsBetweenCheckAndAct(Broken):
    """Looks, awaits, writes: nothing else runs meanwhile, its author thought."""

    is_async = True

    async def claim(self, requests: Sequence[ClaimRequest]) -> list[Verdict]:
        now = self.clock()
        found = [self.records.get(self.place(request)) for request in requests]
        await asyncio.sleep(0)
        verdicts: list[Verdict] = []
        for request, previous in zip(requests, found, strict=True):
            verdict = self.judge(previous, request, now)
            verdicts.append(self.take(request, previous, verdict, now) if isinstance(verdict, str) else verdict)
        return verdicts


@caught_by("test_of_64_callers_one_takes_over", "test_an_owner_completes_or_is_taken_over_never_both")
class TakesOverWhateverIsThere(Broken):
    """Inserts atomically; but what it found abandoned it overwrites without looking whether that still stands."""

    is_async = True

    async def claim(self, requests: Sequence[ClaimRequest]) -> list[Verdict]:
        now = self.clock()
        first = [(request, self.records.get(self.place(request))) for request in requests]
        judged = [(request, previous, self.judge(previous, request, now)) for request, previous in first]
        if any(verdict == "abandoned" for _, _, verdict in judged):
            await asyncio.sleep(0)
        return [
            self.take(request, previous, verdict, now) if isinstance(verdict, str) else verdict
            for request, previous, verdict in judged
        ]


@caught_by("test_two_claims_of_one_key_in_one_batch_are_judged_in_order", "test_a_batch_takes_a_key_over_once")
class JudgesABatchAllAtOnce(Broken):
    """Reads all records of a batch first, so two claims of one key in it are both granted."""

    async def claim(self, requests: Sequence[ClaimRequest]) -> list[Verdict]:
        with self.lock:
            now = self.clock()
            found = [self.records.get(self.place(request)) for request in requests]
            judged = [self.judge(*pair, now) for pair in zip(found, requests, strict=True)]
            return [
                self.take(request, previous, verdict, now) if isinstance(verdict, str) else verdict
                for request, previous, verdict in zip(requests, found, judged, strict=True)
            ]


@caught_by(
    "test_answers_come_in_the_order_of_the_requests",
    "test_a_batch_of_several_hundred_is_one_call_like_any_other",
    "test_a_batch_keeps_scopes_apart",
)
class AnswersInTheOrderOfTheKeys(Broken):
    """Sorts a batch so that two never deadlock, and forgets to sort the answers back."""

    async def claim(self, requests: Sequence[ClaimRequest]) -> list[Verdict]:
        return await super().claim(sorted(requests, key=lambda request: (request.scope, request.key)))


@caught_by("test_the_owners_verbs_answer_each_request_for_itself")
class AnswersForTheWholeBatch(Broken):
    """One UPDATE, one row count: if anything changed, everybody is told that it worked."""

    async def complete(self, requests: Sequence[Complete]) -> list[bool]:
        return [any(await super().complete(requests))] * len(requests)


@caught_by(
    "test_retention_ends_after_its_end",
    "test_a_mark_expires_exactly_and_is_renewed",
    "test_unknown_ends_with_retention",
)
class NeverForgets(Broken):
    """Leaves expiry to the collector: until it comes, an expired key answers as ever."""

    def judge(self, record: Record | None, request: ClaimRequest, now: int) -> Verdict | Reason:
        return judge(record and replace(record, expires_us=FOREVER), request, now)


@caught_by(
    "test_retention_ends_after_its_end",
    "test_what_is_gone_cannot_be_completed",
    "test_what_is_gone_cannot_be_renewed",
    "test_what_is_gone_is_absent_before_and_after_it_is_collected",
)
class ShowsWhatIsGone(Broken):
    """A claim knows about expiry; the other verbs were forgotten."""

    def live(self, request: Ref | Owned, now: int) -> Record | None:
        return self.records.get(self.place(request))


@caught_by("test_retention_ends_after_its_end", "test_a_mark_expires_exactly_and_is_renewed")
class ExpiresAMomentEarly(Broken):
    """Expired when the clock reaches the end, instead of when it is past it."""

    def judge(self, record: Record | None, request: ClaimRequest, now: int) -> Verdict | Reason:
        return judge(record and replace(record, expires_us=record.expires_us - 1), request, now)


@caught_by("test_a_lease_ends_at_its_end", "test_a_renewal_moves_the_end_of_the_lease")
class LeasesEndAMomentLate(Broken):
    """In flight when the clock is at the end of the lease, instead of until then."""

    def judge(self, record: Record | None, request: ClaimRequest, now: int) -> Verdict | Reason:
        return judge(record and replace(record, lease_until_us=record.lease_until_us + 1), request, now)


@caught_by("test_a_lease_ends_at_its_end", "test_only_the_same_fingerprint_takes_over")
class LeasesNeverEnd(Broken):
    """A crash leaves the key locked until retention ends."""

    def judge(self, record: Record | None, request: ClaimRequest, now: int) -> Verdict | Reason:
        verdict = judge(record, request, now)
        return InFlight(1.0, record.fence) if record is not None and verdict == "abandoned" else verdict


@caught_by(
    "test_a_key_at_work_is_in_flight", "test_of_64_callers_one_gets_the_key", "test_a_key_at_work_is_in_progress"
)
class KnowsNoLease(Broken):
    """SET without NX: the last one to come has the key."""

    def judge(self, record: Record | None, request: ClaimRequest, now: int) -> Verdict | Reason:
        verdict = judge(record, request, now)
        return "abandoned" if isinstance(verdict, InFlight) else verdict


@caught_by("test_a_lease_ends_at_its_end", "test_retention_ends_after_its_end", "test_get_shows_the_record_of_a_claim")
class UsesItsOwnClock(Broken):
    """Takes a clock and does not look at it."""

    def __init__(self, clock: Clock | None = None) -> None:
        super().__init__(None)


@caught_by("test_the_stores_own_time_is_no_clients")
class UsesTheClientsClock(Broken):
    """Says that its time is a server's, and sends the client's along."""


@caught_by("test_without_a_clock_the_store_has_its_own_time")
class StandsStillWithoutAClock(Broken):
    """Reads the time once, when it is opened."""

    def __init__(self, clock: Clock | None = None) -> None:
        opened = wall_clock()
        super().__init__(clock or (lambda: opened))


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

    def write(self, record: Record, done: Done, now: int) -> None:
        super().write(record, done, now)
        try:
            value = codec.decode(done.data)
        except Exception:  # noqa: BLE001 -- not a value, whatever it is
            return
        record.data = done.data if value else None


@caught_by("test_bytes_are_stored_as_they_are", "test_values_replay_exactly")
class StoresText(Broken):
    """Keeps the outcome in a text column."""

    def write(self, record: Record, done: Done, now: int) -> None:
        super().write(record, replace(done, data=done.data.decode(errors="replace").encode()), now)


@caught_by(
    "test_the_fence_grows_over_everything_that_can_happen",
    "test_the_fence_grows_in_a_store_that_was_emptied",
    "test_a_stale_complete_is_refused",
)
class CountsFencesInTheRecord(Broken):
    """The fence is the record's last one plus one: gone with the record, it starts again."""

    def next_fence(self, previous: Record | None, now: int) -> int:
        return 1 if previous is None else previous.fence + 1


@caught_by("test_the_fence_grows_while_the_clock_jumps_back", "test_the_fence_grows_over_everything_that_can_happen")
class TakesTheTimeAsFence(Broken):
    """Time only grows, its author thought."""

    def next_fence(self, previous: Record | None, now: int) -> int:
        return now


@caught_by(
    "test_only_the_same_fingerprint_takes_over",
    "test_a_mismatch_lasts_until_retention_ends",
    "test_a_batch_takes_over_by_the_first_fingerprint_that_may",
)
class LetsOtherContentTakeOver(Broken):
    """After the lease the key is free for anyone, and what was asked first is forgotten."""

    def judge(self, record: Record | None, request: ClaimRequest, now: int) -> Verdict | Reason:
        verdict = judge(record, request, now)
        ended = record is not None and record.state == "claimed" and now >= record.lease_until_us
        return "abandoned" if ended and isinstance(verdict, Mismatch) else verdict


@caught_by("test_another_fingerprint_is_a_mismatch", "test_a_key_with_other_content_is_refused")
class LooksAtTheKeyOnly(Broken):
    """Never compares what was asked."""

    def judge(self, record: Record | None, request: ClaimRequest, now: int) -> Verdict | Reason:
        return judge(record, replace(request, fingerprint=""), now)


@caught_by("test_fingerprints_of_two_versions_are_not_compared", "test_a_newer_version_takes_over_an_older_one")
class ComparesAllVersions(Broken):
    """A new release computes fingerprints anew, and every key in flight is a mismatch."""

    def judge(self, record: Record | None, request: ClaimRequest, now: int) -> Verdict | Reason:
        verdict = judge(record, request, now)
        if record is None or verdict in ("absent", "expired") or not (record.fingerprint and request.fingerprint):
            return verdict
        return verdict if record.fingerprint == request.fingerprint else Mismatch(record.fingerprint)


@caught_by("test_who_takes_over_without_a_fingerprint_inherits_it")
class ForgetsTheFingerprintOnTakeover(Broken):
    """A taker-over without a fingerprint opens the key to all content."""

    def take(self, request: ClaimRequest, previous: Record | None, reason: Reason, now: int) -> Verdict:
        return super().take(request, None, reason, now)


@caught_by(
    "test_a_vanished_owner_is_unknown_where_that_was_asked_for",
    "test_unknown_ends_with_retention",
    "test_an_unknown_outcome_waits_for_someone_who_knows",
)
class RunsUnknownWorkAgain(Broken):
    """Takes over what was to be told as unknown."""

    def judge(self, record: Record | None, request: ClaimRequest, now: int) -> Verdict | Reason:
        verdict = judge(record, request, now)
        return "abandoned" if isinstance(verdict, Unknown) else verdict


@caught_by(
    "test_an_attempt_that_is_sent_again_is_granted_again",
    "test_an_attempt_with_an_outcome_is_granted_again_too",
    "test_a_claim_is_sent_again",
    "test_a_passing_fault_is_not_noticed",
    "test_a_passing_fault_marks_no_message_twice",
)
class KnowsNoAttempts(Broken):
    """A claim whose reply was lost finds itself in the way."""

    def judge(self, record: Record | None, request: ClaimRequest, now: int) -> Verdict | Reason:
        return judge(record, replace(request, attempt=""), now)


@caught_by(
    "test_releasing_again_changes_nothing", "test_a_release_is_sent_again", "test_releasing_what_is_gone_is_true"
)
class ReleasesOnce(Broken):
    """A release whose reply was lost is told that its claim is lost."""

    def release_one(self, request: Release, now: int) -> bool:
        return self.live(request, now) is not None and super().release_one(request, now)


@caught_by("test_a_complete_is_sent_again", "test_a_completed_record_is_never_overwritten")
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


@caught_by(
    "test_scopes_never_collide", "test_a_batch_keeps_scopes_apart", "test_each_type_of_message_has_its_own_space"
)
class IgnoresTheScope(Broken):
    """One space for everybody's keys."""

    def place(self, request: Ref | ClaimRequest | Owned) -> Any:
        return request.key


@caught_by("test_no_separator_joins_two_scopes")
class JoinsScopeAndKey(Broken):
    """``f"{scope}:{key}"``, and a tenant may choose both."""

    def place(self, request: Ref | ClaimRequest | Owned) -> Any:
        return f"{request.scope}:{request.key}"


@caught_by("test_names_are_compared_exactly")
class ComparesNamesLoosely(Broken):
    """A database whose text knows no case and no spaces at the end."""

    def place(self, request: Ref | ClaimRequest | Owned) -> Any:
        return (request.scope.casefold().rstrip(), request.key.casefold().rstrip())


@caught_by("test_names_may_be_long")
class CutsLongNames(Broken):
    """VARCHAR(255), in bytes."""

    def place(self, request: Ref | ClaimRequest | Owned) -> Any:
        return (request.scope.encode()[:255], request.key.encode()[:255])


@caught_by("test_repeats_do_not_extend_retention")
class ExtendsRetentionByRepeats(Broken):
    """Every repeat renews the key's time, so that a client which retries often enough keeps it for ever."""

    def claim_one(self, request: ClaimRequest, now: int) -> Verdict:
        verdict = super().claim_one(request, now)
        self.records[self.place(request)].expires_us = now + request.ttl_us
        return verdict


@caught_by("test_retention_counts_from_the_claim")
class CountsRetentionFromTheOutcome(Broken):
    """The time to live begins anew when the work is done."""

    def write(self, record: Record, done: Done, now: int) -> None:
        super().write(record, done, now)
        record.expires_us += now - record.created_us


@caught_by("test_renewing_does_not_extend_retention")
class ExtendsRetentionByRenewals(Broken):
    """A renewal moves both ends."""

    def renew_one(self, request: Renew, now: int) -> int | None:
        until = super().renew_one(request, now)
        if until is not None:
            record = self.records[self.place(request)]
            record.expires_us = max(record.expires_us, record.expires_us + now - record.created_us)
        return until


@caught_by(
    "test_retry_after_is_positive_and_never_beyond_the_lease",
    "test_a_key_at_work_is_in_progress",
)
class SaysToRetryLater(Broken):
    """A fixed ``retry_after``, longer than what is left of the lease."""

    def judge(self, record: Record | None, request: ClaimRequest, now: int) -> Verdict | Reason:
        verdict = judge(record, request, now)
        return InFlight(60.0, verdict.fence) if isinstance(verdict, InFlight) else verdict


@caught_by("test_retry_after_is_positive_and_never_beyond_the_lease")
class SaysToRetryAtOnce(Broken):
    """Whole seconds, rounded down: at the end clients retry in a tight loop."""

    def judge(self, record: Record | None, request: ClaimRequest, now: int) -> Verdict | Reason:
        verdict = judge(record, request, now)
        return InFlight(float(int(verdict.retry_after)), verdict.fence) if isinstance(verdict, InFlight) else verdict


@caught_by("test_purge_removes_only_what_is_gone", "test_a_live_lease_outlives_retention")
class PurgesWhatIsAtWork(Broken):
    """The collector looks at retention only, and takes the key away from an owner that works."""

    def doomed(self, record: Record, now: int) -> bool:
        return now > record.expires_us


@caught_by("test_purge_removes_only_what_is_gone", "test_stats_count_what_is_held")
class PurgesTheAbandoned(Broken):
    """The collector takes ended leases for ended records, and with them the fingerprint that guards the key."""

    def doomed(self, record: Record, now: int) -> bool:
        return gone(record, now) or (record.state == "claimed" and now >= record.lease_until_us)


@caught_by("test_purge_is_bounded", "test_fading_values_is_bounded_too")
class PurgesEverythingAtOnce(Broken):
    """One DELETE for a million rows."""

    async def purge(self, limit: int) -> int:
        return await super().purge(FOREVER)


@caught_by("test_the_collector_leaves_what_is_claimed_meanwhile")
class PurgesWhatItSawBefore(Broken):
    """Looks for what is gone, awaits, and deletes by key: also what was claimed in between."""

    is_async = True

    async def purge(self, limit: int) -> int:
        now = self.clock()
        places = [place for place, record in self.records.items() if gone(record, now)][:limit]
        await asyncio.sleep(0)
        return sum(self.records.pop(place, None) is not None for place in places)


@caught_by(
    "test_purge_fades_values_past_their_time",
    "test_a_tombstone_goes_with_its_key",
    "test_a_value_that_was_not_kept_is_not_made_again",
)
class PurgesKeysWithTheirValues(Broken):
    """When the value's time is over the whole record goes, and the work is done again."""

    def doomed(self, record: Record, now: int) -> bool:
        return gone(record, now) or (record.value_until_us is not None and now > record.value_until_us)


@caught_by("test_what_get_gives_belongs_to_the_caller")
class HandsOutItsOwnRecords(Broken):
    """Whoever looks at a record holds the store's own."""

    def get_one(self, ref: Ref, now: int) -> Record | None:
        record = self.live(ref, now)
        if record is not None:
            record.now_us = now
        return record


@caught_by("test_stats_count_what_is_held", "test_purge_removes_what_is_gone")
class CountsWhatIsGone(Broken):
    """The count looks at the state, not at the clock."""

    async def stats(self) -> Held:
        states = [record.state for record in self.records.values()]
        return Held(in_flight=states.count("claimed"), completed=states.count("completed"))


@caught_by("test_a_renewal_moves_the_end_of_the_lease", "test_a_live_lease_outlives_retention")
class SaysThatItRenewed(Broken):
    """Answers a renewal and writes nothing."""

    def renew_one(self, request: Renew, now: int) -> int | None:
        record = self.live(request, now)
        held = record is not None and record.fence == request.fence and record.state == "claimed"
        return now + request.lease_us if held else None


@caught_by("test_an_ended_lease_is_still_the_owners_while_nobody_wants_it")
class DropsLateOwners(Broken):
    """An owner that is a moment late loses work that nobody else wanted."""

    def live(self, request: Ref | Owned, now: int) -> Record | None:
        record = super().live(request, now)
        late = record is not None and record.state == "claimed" and now >= record.lease_until_us
        return None if late and not isinstance(request, Ref) else record
