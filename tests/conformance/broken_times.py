"""Broken stores that have no sense of time: leases, retention, fences and the collector."""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from conformance.sound import Broken, caught_by, wall_clock
from semel.once.rules import gone, judge
from semel.once.store import ClaimRequest, Clock, KeyRef, OutcomeData, Owned, Renew
from semel.types import Held, InFlight, Reason, Record, Verdict

FOREVER = 2**62


@caught_by(
    "test_retention_ends_after_its_end",
    "test_a_mark_expires_exactly_and_is_renewed",
    "test_unknown_ends_with_retention",
    "test_a_new_owner_starts_without_the_old_outcome",
    "test_nothing_is_inherited_from_what_is_gone",
    "test_work_is_done_once_and_replayed",
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
    "test_a_value_without_a_time_of_its_own_lives_as_long_as_its_key",
    "test_a_claim_that_outlasts_its_retention_is_kept_for_one_more_after_its_lease",
)
class ShowsWhatIsGone(Broken):
    """A claim knows about expiry; the other verbs were forgotten."""

    def live(self, request: KeyRef | Owned, now: int) -> Record | None:
        return self.records.get(self.place(request))


@caught_by("test_retention_ends_after_its_end", "test_a_mark_expires_exactly_and_is_renewed")
class ExpiresAMomentEarly(Broken):
    """Expired when the clock reaches the end, instead of when it is past it."""

    def judge(self, record: Record | None, request: ClaimRequest, now: int) -> Verdict | Reason:
        return judge(record and replace(record, expires_us=record.expires_us - 1), request, now)


@caught_by("test_an_owner_may_act_until_retention_ends")
class ForgetsOwnersAMomentEarly(Broken):
    """A claim knows when retention ends; to the owner's verbs it ends a microsecond earlier."""

    def live(self, request: KeyRef | Owned, now: int) -> Record | None:
        return super().live(request, now if isinstance(request, KeyRef) else now + 1)


@caught_by("test_a_lease_ends_at_its_end", "test_a_renewal_moves_the_end_of_the_lease")
class LeasesEndAMomentLate(Broken):
    """In flight when the clock is at the end of the lease, instead of until then."""

    def judge(self, record: Record | None, request: ClaimRequest, now: int) -> Verdict | Reason:
        return judge(record and replace(record, lease_until_us=record.lease_until_us + 1), request, now)


@caught_by(
    "test_a_lease_ends_at_its_end",
    "test_only_the_same_fingerprint_takes_over",
    "test_an_attempt_that_was_overtaken_is_not_granted",
    "test_an_outcome_that_could_not_be_recorded_is_worked_for_again",
)
class LeasesNeverEnd(Broken):
    """A crash leaves the key locked until retention ends."""

    def judge(self, record: Record | None, request: ClaimRequest, now: int) -> Verdict | Reason:
        verdict = judge(record, request, now)
        return InFlight(1.0, record.fence) if record is not None and verdict == "abandoned" else verdict


@caught_by(
    "test_a_lease_ends_at_its_end",
    "test_retention_ends_after_its_end",
    "test_get_shows_the_record_of_a_claim",
    "test_an_absent_key_is_granted",
    "test_an_attempt_does_not_revive_what_is_gone",
    "test_purge_leaves_a_key_that_was_claimed_anew",
)
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
    "test_the_fence_grows_over_everything_that_can_happen",
    "test_the_fence_grows_in_a_store_that_was_emptied",
    "test_a_stale_complete_is_refused",
    "test_of_64_callers_one_gets_a_released_key",
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
    "test_repeats_do_not_extend_retention",
    "test_a_clock_that_goes_back_breaks_no_lease_and_repeats_no_work",
)
class ExtendsRetentionByRepeats(Broken):
    """Every repeat renews the key's time, so that a client which retries often enough keeps it for ever."""

    def claim_one(self, request: ClaimRequest, now: int) -> Verdict:
        verdict = super().claim_one(request, now)
        self.records[self.place(request)].expires_us = now + request.ttl_us
        return verdict


@caught_by(
    "test_retention_counts_from_the_claim",
    "test_a_completed_key_is_replayed",
    "test_a_value_may_be_kept_for_a_shorter_time_than_its_key",
    "test_get_shows_the_record_of_an_outcome",
)
class CountsRetentionFromTheOutcome(Broken):
    """The time to live begins anew when the work is done."""

    def write(self, record: Record, done: OutcomeData, now: int) -> None:
        ttl = record.expires_us - record.created_us
        super().write(record, done, now)
        record.expires_us = now + ttl


@caught_by(
    "test_work_that_outlasts_its_retention_leaves_an_outcome",
    "test_a_clock_that_goes_back_lengthens_no_retention_of_work_that_ends_after_it",
)
class CountsRetentionFromTheClaimAlone(Broken):
    """Work that takes longer than its retention leaves an outcome that is gone already, and is done again."""

    def write(self, record: Record, done: OutcomeData, now: int) -> None:
        expires = record.expires_us
        super().write(record, done, now)
        record.expires_us = expires


@caught_by(
    "test_a_claim_that_outlasts_its_retention_is_kept_for_one_more_after_its_lease",
    "test_work_that_outlasts_its_retention_leaves_an_outcome",
)
class ForgetsTheLateWithTheirLease(Broken):
    """Past its retention a claim is gone at the moment its lease ends, so whoever comes then works blindly."""

    def judge(self, record: Record | None, request: ClaimRequest, now: int) -> Verdict | Reason:
        return judge(None if record is None or self.over(record, now) else record, request, now)

    def live(self, request: KeyRef | Owned, now: int) -> Record | None:
        record = super().live(request, now)
        return None if record is None or self.over(record, now) else record

    def over(self, record: Record, now: int) -> bool:
        return now > record.expires_us and record.state == "claimed" and now >= record.lease_until_us


@caught_by("test_a_clock_that_goes_back_lengthens_no_lease")
class WaitsForTheClock(Broken):
    """Trusts that time only grows: after a step back, a dead owner's lease lasts until the clock is there again."""

    def rewind(self, record: Record | None, now: int) -> None:
        pass


@caught_by("test_a_clock_that_goes_back_breaks_no_lease_and_repeats_no_work")
class ForgetsWhatComesFromTheFuture(Broken):
    """After a step back it drops what was made after now, as though it could not be."""

    def judge(self, record: Record | None, request: ClaimRequest, now: int) -> Verdict | Reason:
        return "absent" if record is not None and record.created_us > now else judge(record, request, now)


@caught_by("test_renewing_does_not_extend_retention")
class ExtendsRetentionByRenewals(Broken):
    """A renewal moves both ends."""

    def renew_one(self, request: Renew, now: int) -> int | None:
        until = super().renew_one(request, now)
        if until is not None:
            record = self.records[self.place(request)]
            record.expires_us = max(record.expires_us, record.expires_us + now - record.created_us)
        return until


@caught_by("test_looking_at_a_key_changes_nothing")
class KeepsWhatIsLookedAt(Broken):
    """A cache: what is read lives longer."""

    def get_one(self, ref: KeyRef, now: int) -> Record | None:
        record = self.live(ref, now)
        if record is not None and record.created_us != now:
            record.expires_us += 1_000_000
        return super().get_one(ref, now)


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


@caught_by("test_stats_count_what_is_held", "test_purge_removes_what_is_gone")
class CountsWhatIsGone(Broken):
    """The count looks at the state, not at the clock."""

    async def stats(self) -> Held:
        states = [record.state for record in self.records.values()]
        return Held(in_flight=states.count("claimed"), completed=states.count("completed"))
