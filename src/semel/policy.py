"""What a key promises: how long it lives, what a duplicate meets, and what a failure leaves behind."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Frozen data; make a variant with ``policy.but(ttl=60)``. Times are seconds."""

    ttl: float = DAY
    """Retention: how long the key is remembered, counted from the claim."""

    lease: float = MINUTE
    """How long a claim is exclusive without a sign of life."""

    value_ttl: float | None = None
    """How long the outcome's value is kept (a tombstone remains until ``ttl``); None: as long as the key."""

    in_flight: InFlightRule = "wait"
    """What a duplicate does while the first call works: wait for its outcome, or fail at once."""

    wait: float = MINUTE
    """How long a waiting duplicate waits before it gives up with ``InProgress``."""

    on_error: ErrorRule = "release"
    """A failed call gives its key back, or keeps the failure as the key's outcome."""

    on_crash: CrashRule = "retake"
    """An owner that vanished: the next caller works again, or meets ``Unknown`` until someone resolves it."""

    store_failure: FailureRule = "closed"
    """When the store is down: refuse to work, or work without protection."""

    purge_every: float | None = None
    """Seconds between two clean-ups of expired keys; None: a tenth of ``ttl``, at most a minute."""

    cleanup_log: CleanupLog = "info"
    """The level at which the number of cleaned keys is logged."""

    dialect: Dialect = "intake"
    """Over HTTP: which keys are valid, how a refusal looks, and which responses count as failures."""

    tombstone: TombstoneRule = "gone"
    """Over HTTP: a key whose response is no longer stored answers 410 Gone or 409 Conflict."""

    max_response_bytes: int | None = 10 << 20
    """Over HTTP: a larger response is delivered but not kept, and never made again; None: no limit."""

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

    def but(self, **changes: Any) -> Policy:
        """The same policy with some fields changed; None leaves a field as it is."""
        if not changes:
            return self
        known = {field.name for field in fields(self)}
        if unknown := changes.keys() - known:
            raise InvalidRequest(f"a policy has no {', '.join(sorted(unknown))}; it has {', '.join(sorted(known))}")
        real = {name: value for name, value in changes.items() if value is not None}
        return replace(self, **real) if real else self

    @classmethod
    def intake(cls, ttl: float = HOUR) -> Policy:
        """A POST endpoint: one hour, a duplicate in flight is a conflict, every response is kept, however large.

        The lease is a minute, renewed while the handler runs, so that a killed worker blocks its keys for a minute at
        most; its document has no lease but the hour, which is ``Policy.intake().but(lease=3600)``.
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
        """Messages: one hour, expired entries cleaned every ``min(ttl / 10, 60)`` seconds, which is logged at debug."""
        return cls(ttl=checked_seconds("idempotency_ttl_seconds", idempotency_ttl_seconds), cleanup_log="debug")

    @classmethod
    def processor(cls) -> Policy:
        """Any function: 24 hours, a duplicate waits for the first call's result."""
        return cls(in_flight="wait")

    @classmethod
    def ietf(cls) -> Policy:
        """The IETF draft on the Idempotency-Key header: 24 hours, a duplicate in flight is a conflict."""
        return cls(in_flight="conflict", dialect="ietf")

    @classmethod
    def stripe(cls) -> Policy:
        """Stripe's rules: 24 hours, every outcome is kept once the work began, failures too."""
        return cls(in_flight="conflict", on_error="keep", dialect="stripe")
