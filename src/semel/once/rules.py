"""The law of claims, as pure functions: what a request meets, given the record and the store's time.

Every store answers by :func:`judge`; a store only decides how to make "look, then write" one atomic step.

::

    absent ──claim──▶ claimed ──complete──▶ completed ──ttl──▶ gone (absent)
      ▲                │  ▲ │
      └────release─────┘  │ └─ lease ends ─▶ abandoned ─claim, same fingerprint─▶ claimed (new fence)
                        renew                └─ on_crash="unknown" ─▶ Unknown ─resolve─▶ completed or absent
"""

from __future__ import annotations

from semel.model import Claim, Granted, InFlight, Mismatch, Reason, Record, Replay, Unknown, Verdict
from semel.once.store import ClaimRequest


def judge(record: Record | None, request: ClaimRequest, now: int) -> Verdict | Reason:
    """The verdict, or, where the request may have the key, the reason why it may."""
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
        age = max(0, now - record.created_us) / 1e6
        return InFlight((record.lease_until_us - now) / 1e6, record.fence, age)
    if (record.unknown or request.unknown) and not (request.resolving or ours):
        return Unknown(record.fence, record.lease_until_us)
    return "abandoned"


def gone(record: Record, now: int) -> bool:
    """True when retention ended and no live lease protects the record."""
    return now > record.expires_us and not (record.state == "claimed" and now < record.lease_until_us)


def differs(recorded: str, asked: str) -> bool:
    """True when both are known, were made by the same version of the algorithm, and are not the same.

    Fingerprints of two versions cannot be compared, so the key alone decides while both are in flight.
    """
    if recorded == asked or not recorded or not asked:
        return False
    return _version(recorded) == _version(asked)


def _version(fingerprint: str) -> str:
    version, colon, _ = fingerprint.partition(":")
    return version if colon and version.isdigit() else ""


def grant(request: ClaimRequest, previous: Record | None, reason: Reason, fence: int, now: int) -> Record:
    """The record that a granted request writes. ``previous`` is what was there, gone or abandoned."""
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
    done = request.done
    if done is not None:
        record.state = "completed"
        record.completed_us = now
        record.kind = done.kind
        record.data = done.data
        record.value_until_us = None if done.value_ttl_us is None else now + done.value_ttl_us
    return record


def fingerprint_for(request: ClaimRequest, previous: Record | None, reason: Reason) -> str:
    """What the new record is compared by; who takes over without a fingerprint keeps the one that was there."""
    inherited = previous.fingerprint if previous is not None and reason == "abandoned" else ""
    return request.fingerprint or inherited


def granted(request: ClaimRequest, previous: Record | None, reason: Reason, fence: int, now: int) -> Granted:
    """The verdict for a request whose record, as :func:`grant` would make it, a store has just written."""
    claim = Claim(
        request.scope,
        request.key,
        fence,
        request.attempt,
        fingerprint_for(request, previous, reason),
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
