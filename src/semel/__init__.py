"""semel executes work once: idempotency keys for functions, messages and HTTP requests, and runs of models with leases.

Where to begin: :class:`Once` guards calls with keys, :class:`App` registers models and runs them,
:class:`Client` talks to a semel server. The errors are in :mod:`semel.errors`, the data types in :mod:`semel.types`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from semel.errors import (
    AppNotFound,
    ClaimLost,
    CostLimitExceeded,
    Drifted,
    Fatal,
    Forbidden,
    IllegalTransition,
    InProgress,
    InvalidParameters,
    InvalidRequest,
    KeyReused,
    LeaseLost,
    MissingExtra,
    NotDone,
    NotMigrated,
    OriginalFailed,
    OutcomeGone,
    OutcomeUnknown,
    QuotaExceeded,
    ReservationLost,
    ResultStoreError,
    Retry,
    RunCancelled,
    RunNotComplete,
    RunNotFound,
    SemelError,
    ServerUnreachable,
    ServiceError,
    Snooze,
    StoreBroken,
    StoreUnavailable,
    Unauthenticated,
    Unencodable,
    Unfingerprintable,
    UnknownModel,
)
from semel.fingerprint import fingerprint

if TYPE_CHECKING:
    from semel.client import AsyncClient as AsyncClient
    from semel.client import Client as Client
    from semel.client import SubmitResult as SubmitResult
    from semel.client import submit_cloud_job as submit_cloud_job
    from semel.once.client import AsyncOnce, Once
    from semel.once.guard import current_claim
    from semel.once.idempotency_store import IdempotencyStore, InMemoryIdempotencyStore
    from semel.once.processor import IdempotentProcessor
    from semel.once.stats import Event, Stats
    from semel.policy import Policy
    from semel.runs.app import App, AsyncRuns
    from semel.runs.execution.context import Context
    from semel.runs.job_store import AsyncJobStore, JobStore
    from semel.runs.types import Manifest, Quota, Run, Usage
    from semel.runs.worker import Worker
    from semel.types import (
        Actor,
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

__version__ = "0.1.0"

_LAZY = {
    "semel.client": ("AsyncClient", "Client", "SubmitResult", "submit_cloud_job"),
    "semel.types": (
        "Actor",
        "Claim",
        "Granted",
        "InFlight",
        "Mismatch",
        "Outcome",
        "ProcessingRecord",
        "Record",
        "Replay",
        "Response",
        "Result",
        "Unknown",
        "Verdict",
    ),
    "semel.once.guard": ("current_claim",),
    "semel.once.stats": ("Event", "Stats"),
    "semel.once.client": ("AsyncOnce", "Once"),
    "semel.once.idempotency_store": ("IdempotencyStore", "InMemoryIdempotencyStore"),
    "semel.once.processor": ("IdempotentProcessor",),
    "semel.policy": ("Policy",),
    "semel.runs.app": ("App", "AsyncRuns"),
    "semel.runs.execution.context": ("Context",),
    "semel.runs.job_store": ("AsyncJobStore", "JobStore"),
    "semel.runs.types": ("Manifest", "Quota", "Run", "Usage"),
    "semel.runs.worker": ("Worker",),
}
"""Modules that are imported when one of their names is first used, so that ``import semel`` stays fast.

The names of the client need its extra. They are not in ``__all__``, so that ``from semel import *`` works without it.
"""
_MODULE_OF = {name: module for module, names in _LAZY.items() for name in names}

__all__ = [
    "Actor",
    "App",
    "AppNotFound",
    "AsyncJobStore",
    "AsyncOnce",
    "AsyncRuns",
    "Claim",
    "ClaimLost",
    "Context",
    "CostLimitExceeded",
    "Drifted",
    "Event",
    "Fatal",
    "Forbidden",
    "Granted",
    "IdempotencyStore",
    "IdempotentProcessor",
    "IllegalTransition",
    "InFlight",
    "InMemoryIdempotencyStore",
    "InProgress",
    "InvalidParameters",
    "InvalidRequest",
    "JobStore",
    "KeyReused",
    "LeaseLost",
    "Manifest",
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
    "Quota",
    "QuotaExceeded",
    "Record",
    "Replay",
    "ReservationLost",
    "Response",
    "Result",
    "ResultStoreError",
    "Retry",
    "Run",
    "RunCancelled",
    "RunNotComplete",
    "RunNotFound",
    "SemelError",
    "ServerUnreachable",
    "ServiceError",
    "Snooze",
    "Stats",
    "StoreBroken",
    "StoreUnavailable",
    "Unauthenticated",
    "Unencodable",
    "Unfingerprintable",
    "Unknown",
    "UnknownModel",
    "Usage",
    "Verdict",
    "Worker",
    "current_claim",
    "fingerprint",
]


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
