"""The rules of claims, as pure functions of the request, the record and the store's time.

Every store decides by :func:`judge`; only how "read, then write" becomes one atomic step is up to the store.

::

    absent ──claim──▶ claimed ──complete──▶ completed ──ttl or forget──▶ gone (absent)
      ▲                │  ▲ │
      └────release─────┘  │ └─ lease ends ─▶ abandoned ─claim, same fingerprint─▶ claimed (new fence)
                        renew                └─ on_crash="unknown" ─▶ Unknown ─resolve─▶ completed or absent
"""

from __future__ import annotations

from semel.once.store import ClaimRequest, OutcomeData
from semel.types import Claim, Granted, InFlight, Mismatch, Reason, Record, Replay, Unknown, Verdict


def judge(record: Record | None, request: ClaimRequest, now: int) -> Verdict | Reason:
    """The verdict; or, if the request may have the key, the reason why."""
    if record is None or record.state == "released":
        return "absent"
    if gone(record, now):
        return "expired"
    if differs(record.fingerprint, request.fingerprint):
        return Mismatch(record.fingerprint)
    ours = record.attempt == request.attempt
    if record.state == "completed":
        if ours:
            return Granted(claim_of(record))
        record.now_us = now
        outcome = record.outcome
        assert outcome is not None
        return Replay(outcome)
    if now < record.lease_until_us:
        if ours:
            return Granted(claim_of(record))
        if not request.force:
            age = max(0, now - record.created_us) / 1e6
            return InFlight(min(record.lease_until_us - now, record.lease_us) / 1e6, record.fence, age)
    if (record.unknown or request.unknown) and not (request.resolving or ours):
        return Unknown(record.fence, record.lease_until_us)
    return "abandoned"


def gone(record: Record, now: int) -> bool:
    """Whether the record's time is over."""
    return now > end_of(record)


def end_of(record: Record) -> int:
    """The last microsecond at which the record exists, if nothing happens to it until then.

    That is the end of its retention. A claim whose lease ends after its retention is kept for one more retention after
    its lease, whether its owner still works or has vanished.
    """
    if record.state == "claimed" and record.lease_until_us > record.expires_us:
        return record.lease_until_us + record.expires_us - record.created_us
    return record.expires_us


def live(record: Record, now: int) -> bool:
    """Whether an owner's lease protects the record."""
    return record.state == "claimed" and now < record.lease_until_us


def rewind(record: Record | None, now: int) -> bool:
    """Shorten a lease that has more time left than it was given, because the store's clock was set back.

    Returns True if the lease was changed. Every claim does this to the record that it meets, before it is judged, so
    that nobody waits longer than a lease.
    """
    if record is None or record.state != "claimed" or record.lease_until_us <= now + record.lease_us:
        return False
    record.lease_until_us = now + record.lease_us
    return True


def differs(recorded: str, asked: str) -> bool:
    """Whether both fingerprints are known, were made by the same version of the algorithm, and are not equal.

    Fingerprints of two versions cannot be compared, so the key alone decides while both versions are in use.
    """
    if recorded == asked or not recorded or not asked:
        return False
    return _version(recorded) == _version(asked)


def _version(fingerprint: str) -> str:
    version, colon, _ = fingerprint.partition(":")
    return version if colon and version.isdigit() else ""


def grant(request: ClaimRequest, previous: Record | None, reason: Reason, fence: int, now: int) -> Record:
    """The record that a granted request writes. ``previous`` is the gone or abandoned record that it replaces."""
    record = Record(
        request.scope,
        request.key,
        fingerprint_for(request, previous, reason),
        "claimed",
        fence,
        request.attempt,
        request.unknown,
        now,
        request.lease_us,
        now + request.lease_us,
        now + request.ttl_us,
    )
    if request.done is not None:
        finish(record, request.done, now)
    return record


def finish(record: Record, done: OutcomeData, now: int) -> None:
    """Write the outcome into a claimed record."""
    if not record.created_us <= now <= record.expires_us:
        record.expires_us += now - record.created_us  # no outcome is expired at once, nor kept longer than requested
    record.state = "completed"
    record.completed_us = now
    record.kind = done.kind
    record.data = done.data
    record.value_until_us = None if done.value_ttl_us is None else now + done.value_ttl_us


def fingerprint_for(request: ClaimRequest, previous: Record | None, reason: Reason) -> str:
    """The new record's fingerprint. A request without one that takes over keeps the previous owner's."""
    inherited = previous.fingerprint if previous is not None and reason == "abandoned" else ""
    return request.fingerprint or inherited


def granted(request: ClaimRequest, previous: Record | None, reason: Reason, fence: int, now: int) -> Granted:
    """The verdict for a request whose record a store has just written as :func:`grant` would make it."""
    claim = Claim(
        request.scope,
        request.key,
        fence,
        request.attempt,
        request.fingerprint if previous is None else fingerprint_for(request, previous, reason),
        request.lease_us / 1e6,
        now + request.lease_us,
        now + request.ttl_us,
    )
    return Granted(claim, reason)


def claim_of(record: Record) -> Claim:
    """The claim that owns this record."""
    return Claim(
        record.scope,
        record.key,
        record.fence,
        record.attempt,
        record.fingerprint,
        record.lease_us / 1e6,
        record.lease_until_us,
        record.expires_us,
    )
