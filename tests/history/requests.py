"""Requests to a store, in seconds."""

from __future__ import annotations

import uuid
from typing import Any

from semel import codec
from semel.once.store import ClaimRequest, Complete, Forget, OutcomeData, Release, Renew
from semel.types import Claim


def us(seconds: float) -> int:
    return round(seconds * 1e6)


def claim_request(
    key: str,
    *,
    scope: str,
    lease: float = 60,
    ttl: float = 600,
    attempt: str = "",
    fingerprint: str = "",
    unknown: bool = False,
) -> ClaimRequest:
    return ClaimRequest(scope, key, fingerprint, attempt or uuid.uuid4().hex, us(lease), us(ttl), unknown)


def outcome(value: Any, *, value_ttl: float | None = None) -> OutcomeData:
    return OutcomeData("value", codec.encode(value), None if value_ttl is None else us(value_ttl))


def complete_request(claim: Claim, value: Any, *, value_ttl: float | None = None) -> Complete:
    return Complete(claim.scope, claim.key, claim.fence, outcome(value, value_ttl=value_ttl))


def release_request(claim: Claim) -> Release:
    return Release(claim.scope, claim.key, claim.fence)


def renew_request(claim: Claim, lease: float) -> Renew:
    return Renew(claim.scope, claim.key, claim.fence, us(lease))


def forget_request(claim: Claim, *, force: bool = False) -> Forget:
    return Forget(claim.scope, claim.key, claim.fence, force)
