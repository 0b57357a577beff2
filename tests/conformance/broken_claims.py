"""Broken stores that grant what is not free, refuse what is, or take one key for another."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from msgspec.structs import replace

from conformance.sound import Broken, caught_by
from semel.errors import StoreUnavailable
from semel.once.rules import judge
from semel.once.store import ClaimRequest, Clock, KeyRef, Owned
from semel.types import InFlight, Mismatch, Reason, Record, Unknown, Verdict


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
        time.sleep(0.001)  # others look meanwhile, whatever the machine does
        with self.lock:
            return self.take(request, previous, verdict, now) if isinstance(verdict, str) else verdict


@caught_by(
    "test_of_64_callers_one_gets_the_key",
    "test_of_64_callers_one_takes_over",
    "test_of_64_callers_one_marks",
    "test_many_callers_at_once_do_the_work_once",
    "test_of_64_callers_one_gets_an_expired_key",
    "test_of_many_deliveries_at_once_one_is_not_seen",
)
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


@caught_by(
    "test_two_claims_of_one_key_in_one_batch_are_judged_in_order",
    "test_a_batch_takes_a_key_over_once",
    "test_a_batch_is_sent_again",
    "test_an_attempt_twice_in_one_batch_is_one_claim",
)
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
    "test_batches_of_the_same_keys_in_any_order_do_not_block_each_other",
    "test_the_owners_batches_in_any_order_do_not_block_each_other",
)
class LocksInTheOrderOfTheBatch(Broken):
    """Locks key by key, as they come: two batches with the same keys wait for each other, until one gives up."""

    def __init__(self, clock: Clock | None = None) -> None:
        super().__init__(clock)
        self.locks: defaultdict[Any, threading.Lock] = defaultdict(threading.Lock)

    async def each(self, one: Callable[[Any, int], Any], requests: Sequence[Any]) -> list[Any]:
        with ExitStack() as held:
            for place in dict.fromkeys(map(self.place, requests)):
                if not self.locks[place].acquire(timeout=0.2):
                    raise StoreUnavailable("a deadlock")
                held.callback(self.locks[place].release)
            return await super().each(one, requests)


@caught_by(
    "test_answers_come_in_the_order_of_the_requests",
    "test_a_batch_of_several_hundred_is_one_call_like_any_other",
    "test_a_batch_keeps_scopes_apart",
)
class AnswersInTheOrderOfTheKeys(Broken):
    """Sorts a batch so that two never deadlock, and forgets to sort the answers back."""

    async def claim(self, requests: Sequence[ClaimRequest]) -> list[Verdict]:
        return await super().claim(sorted(requests, key=lambda request: (request.scope, request.key)))


@caught_by(
    "test_a_key_at_work_is_in_flight",
    "test_of_64_callers_one_gets_the_key",
    "test_a_key_at_work_is_in_progress",
    "test_an_outcome_brought_along_replaces_nothing",
    "test_the_same_fingerprint_is_not",
    "test_waiting_changes_no_verdict",
)
class KnowsNoLease(Broken):
    """SET without NX: the last one to come has the key."""

    def judge(self, record: Record | None, request: ClaimRequest, now: int) -> Verdict | Reason:
        verdict = judge(record, request, now)
        return "abandoned" if isinstance(verdict, InFlight) else verdict


@caught_by(
    "test_only_the_same_fingerprint_takes_over",
    "test_a_mismatch_lasts_until_retention_ends",
    "test_a_batch_takes_over_by_the_first_fingerprint_that_may",
    "test_a_mismatch_comes_before_unknown",
)
class LetsOtherContentTakeOver(Broken):
    """After the lease the key is free for anyone, and what was asked first is forgotten."""

    def judge(self, record: Record | None, request: ClaimRequest, now: int) -> Verdict | Reason:
        verdict = judge(record, request, now)
        ended = record is not None and record.state == "claimed" and now >= record.lease_until_us
        return "abandoned" if ended and isinstance(verdict, Mismatch) else verdict


@caught_by(
    "test_another_fingerprint_is_a_mismatch",
    "test_a_key_with_other_content_is_refused",
    "test_fingerprints_without_a_version_are_compared_too",
)
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


@caught_by("test_an_empty_fingerprint_matches_any")
class ComparesEmptyFingerprints(Broken):
    """Takes a fingerprint that was not given for one that is different."""

    def judge(self, record: Record | None, request: ClaimRequest, now: int) -> Verdict | Reason:
        verdict = judge(record, request, now)
        if record is None or isinstance(verdict, str) or bool(record.fingerprint) == bool(request.fingerprint):
            return verdict
        return Mismatch(record.fingerprint)


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
    "test_a_mark_is_sent_again",
    "test_an_attempt_is_not_held_up_by_its_own_ended_lease",
)
class KnowsNoAttempts(Broken):
    """A claim whose reply was lost finds itself in the way."""

    def judge(self, record: Record | None, request: ClaimRequest, now: int) -> Verdict | Reason:
        return judge(record, replace(request, attempt=""), now)


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


@caught_by(
    "test_scopes_never_collide",
    "test_a_batch_keeps_scopes_apart",
    "test_each_type_of_message_has_its_own_space",
    "test_a_fence_holds_its_own_key_only",
)
class IgnoresTheScope(Broken):
    """One space for everybody's keys."""

    def place(self, request: KeyRef | ClaimRequest | Owned) -> Any:
        return request.key


@caught_by("test_no_separator_joins_two_scopes")
class JoinsScopeAndKey(Broken):
    """``f"{scope}:{key}"``, and a tenant may choose both."""

    def place(self, request: KeyRef | ClaimRequest | Owned) -> Any:
        return f"{request.scope}:{request.key}"


@caught_by("test_names_are_compared_exactly")
class ComparesNamesLoosely(Broken):
    """A database whose text knows no case and no spaces at the end."""

    def place(self, request: KeyRef | ClaimRequest | Owned) -> Any:
        return (request.scope.casefold().rstrip(), request.key.casefold().rstrip())


@caught_by("test_names_may_be_long")
class CutsLongNames(Broken):
    """VARCHAR(255), in bytes."""

    def place(self, request: KeyRef | ClaimRequest | Owned) -> Any:
        return (request.scope.encode()[:255], request.key.encode()[:255])


@caught_by(
    "test_claiming_with_an_outcome_completes_in_one_step",
    "test_a_value_recorded_with_the_claim_fades_alike",
)
class MarksInTwoSteps(Broken):
    """Claims, and leaves the outcome that came along to somebody else."""

    def take(self, request: ClaimRequest, previous: Record | None, reason: Reason, now: int) -> Verdict:
        return super().take(replace(request, done=None), previous, reason, now)


@caught_by(
    "test_a_message_is_seen_from_its_second_delivery_on",
    "test_a_mark_keeps_its_data_for_audit",
)
class SaysThatItMarked(Broken):
    """Grants a mark and writes nothing."""

    def take(self, request: ClaimRequest, previous: Record | None, reason: Reason, now: int) -> Verdict:
        verdict = super().take(request, previous, reason, now)
        if request.done is not None:
            del self.records[self.place(request)]
        return verdict


@caught_by("test_a_key_at_work_is_taken_by_force_alone", "test_a_stale_complete_is_refused")
class KnowsNoForce(Broken):
    """Judges as ever, whoever insists."""

    def judge(self, record: Record | None, request: ClaimRequest, now: int) -> Verdict | Reason:
        return judge(record, replace(request, force=False), now)
