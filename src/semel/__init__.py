"""semel makes work happen once: idempotency keys for functions, messages and HTTP, on the database that you have."""

from semel.errors import (
    ClaimLost,
    InProgress,
    InvalidRequest,
    KeyReused,
    MissingExtra,
    NotDone,
    NotMigrated,
    OriginalFailed,
    OutcomeGone,
    OutcomeUnknown,
    SemelError,
    StoreBroken,
    StoreUnavailable,
    Unencodable,
    Unfingerprintable,
)
from semel.fingerprint import fingerprint
from semel.model import (
    Claim,
    Granted,
    InFlight,
    Mismatch,
    Outcome,
    ProcessingRecord,
    Record,
    Replay,
    Response,
    Result,
    Unknown,
    Verdict,
)
from semel.once.calls import current_claim
from semel.once.counters import Event, Stats
from semel.once.faces import AsyncOnce, Once
from semel.once.processor import IdempotentProcessor
from semel.policy import Policy

__version__ = "0.1.0"

__all__ = [
    "AsyncOnce",
    "Claim",
    "ClaimLost",
    "Event",
    "Granted",
    "IdempotentProcessor",
    "InFlight",
    "InProgress",
    "InvalidRequest",
    "KeyReused",
    "Mismatch",
    "MissingExtra",
    "NotDone",
    "NotMigrated",
    "Once",
    "OriginalFailed",
    "Outcome",
    "OutcomeGone",
    "OutcomeUnknown",
    "Policy",
    "ProcessingRecord",
    "Record",
    "Replay",
    "Response",
    "Result",
    "SemelError",
    "Stats",
    "StoreBroken",
    "StoreUnavailable",
    "Unencodable",
    "Unfingerprintable",
    "Unknown",
    "Verdict",
    "current_claim",
    "fingerprint",
]
