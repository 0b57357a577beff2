"""Policies of keys: how long a key is kept, what a duplicate gets, and what happens after a failure."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypedDict, Unpack, get_args

from semel._validation import checked_bytes, checked_choice, checked_seconds
from semel.errors import InvalidRequest

InFlightRule = Literal["wait", "conflict"]
ErrorRule = Literal["release", "keep"]
CrashRule = Literal["retake", "unknown"]
FailureRule = Literal["closed", "open"]
Dialect = Literal["intake", "ietf", "stripe"]
TombstoneRule = Literal["gone", "conflict"]
CleanupLog = Literal["info", "debug"]

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0

_WORDS = {
    "in_flight": InFlightRule,
    "on_error": ErrorRule,
    "on_crash": CrashRule,
    "store_failure": FailureRule,
    "dialect": Dialect,
    "tombstone": TombstoneRule,
    "cleanup_log": CleanupLog,
}


class PolicyOptions(TypedDict, total=False):
    """The fields of :class:`Policy`, for functions that take any of them by name. None means: not given."""

    ttl: float | None
    lease: float | None
    value_ttl: float | None
    in_flight: InFlightRule | None
    wait: float | None
    on_error: ErrorRule | None
    on_crash: CrashRule | None
    store_failure: FailureRule | None
    purge_every: float | None
    cleanup_log: CleanupLog | None
    dialect: Dialect | None
    tombstone: TombstoneRule | None
    max_response_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The rules for a key. Immutable; make a variant with ``policy.but(ttl=60)``. Times are seconds."""

    ttl: float = DAY
    """Retention: how long the key is kept, counted from the claim."""

    lease: float = MINUTE
    """How long a claim is exclusive if it is not renewed."""

    value_ttl: float | None = None
    """How long the outcome's value is kept (a tombstone remains until ``ttl``); None: as long as the key."""

    in_flight: InFlightRule = "wait"
    """What a duplicate does while the first call runs: wait for its outcome, or fail at once."""

    wait: float = MINUTE
    """How long a duplicate waits before it raises ``InProgress``."""

    on_error: ErrorRule = "release"
    """After a failed call: release its key, or keep the failure as the key's outcome."""

    on_crash: CrashRule = "retake"
    """After an owner vanished: the next caller works again, or gets ``Unknown`` until someone resolves the key."""

    store_failure: FailureRule = "closed"
    """While the store is unavailable: refuse to work, or work without protection."""

    purge_every: float | None = None
    """Seconds between two clean-ups of expired keys; None: a tenth of ``ttl``, at most a minute."""

    cleanup_log: CleanupLog = "info"
    """The level at which the number of removed keys is logged."""

    dialect: Dialect = "intake"
    """Over HTTP: which keys are valid, the format of refusals, and which responses count as failures."""

    tombstone: TombstoneRule = "gone"
    """Over HTTP: the status for a key whose response is no longer stored, 410 Gone or 409 Conflict."""

    max_response_bytes: int | None = 10 << 20
    """Over HTTP: a larger response is sent but not stored, and the request is not run again; None: no limit."""

    def __post_init__(self) -> None:
        for name in ("ttl", "lease", "wait"):
            checked_seconds(name, getattr(self, name), zero=name == "wait")
        for name in ("value_ttl", "purge_every"):
            if getattr(self, name) is not None:
                checked_seconds(name, getattr(self, name))
        checked_bytes("max_response_bytes", self.max_response_bytes)
        for name, words in _WORDS.items():
            checked_choice(name, getattr(self, name), get_args(words))

    @property
    def collect_interval(self) -> float:
        """Seconds between two runs of the collector."""
        return self.purge_every if self.purge_every is not None else min(self.ttl / 10, MINUTE)

    def but(self, **changes: Unpack[PolicyOptions]) -> Policy:
        """The same policy with some fields changed; None leaves a field as it is."""
        if not changes:
            return self
        known = {field.name for field in fields(self)}
        if unknown := changes.keys() - known:
            raise InvalidRequest(f"a policy has no {', '.join(sorted(unknown))}; it has {', '.join(sorted(known))}")
        given: dict[str, Any] = {name: value for name, value in changes.items() if value is not None}
        return replace(self, **given) if given else self

    @classmethod
    def intake(cls, ttl: float = HOUR) -> Policy:
        """For a POST endpoint: one hour, a duplicate in flight is a conflict, every response is kept, however large.

        The lease is a minute, renewed while the handler runs, so that a killed worker blocks its keys for a minute at
        most. The intake document has no lease but the hour: that is ``Policy.intake().but(lease=3600)``.
        """
        return cls(
            ttl=ttl,
            lease=min(checked_seconds("ttl", ttl), MINUTE),
            in_flight="conflict",
            purge_every=10 * MINUTE,
            max_response_bytes=None,
        )

    @classmethod
    def router(cls, idempotency_ttl_seconds: float = HOUR) -> Policy:
        """For messages: one hour, expired keys removed every ``min(ttl / 10, 60)`` seconds and logged at debug."""
        return cls(ttl=checked_seconds("idempotency_ttl_seconds", idempotency_ttl_seconds), cleanup_log="debug")

    @classmethod
    def processor(cls) -> Policy:
        """For any function: 24 hours, a duplicate waits for the first call's result."""
        return cls(in_flight="wait")

    @classmethod
    def ietf(cls) -> Policy:
        """The IETF draft on the Idempotency-Key header: 24 hours, a duplicate in flight is a conflict."""
        return cls(in_flight="conflict", dialect="ietf")

    @classmethod
    def stripe(cls) -> Policy:
        """Stripe's rules: 24 hours, every outcome is kept once the work began, failures too."""
        return cls(in_flight="conflict", on_error="keep", dialect="stripe")
