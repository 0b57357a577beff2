"""Every error that semel raises. Each derives from :class:`SemelError`.

A message says what happened, what it means for the caller, and what to do next.
"""

from __future__ import annotations


class SemelError(Exception):
    """The base class of all errors that semel raises."""


class InvalidRequest(SemelError, ValueError):
    """An argument is not valid: a key, a scope, a time or an option. Nothing was sent to the store.

    ``idempotency_key`` is the refused key, if the argument is one.
    """

    def __init__(self, message: str = "", *, idempotency_key: str | None = None) -> None:
        super().__init__(message)
        self.idempotency_key = idempotency_key


class Unfingerprintable(SemelError, ValueError):
    """The payload has no canonical JSON form, so it has no fingerprint."""


class Unencodable(SemelError, TypeError):
    """The value cannot be stored so that it replays exactly.

    If a guarded call returned it, the call is done, its key is completed, and only the value is lost.
    """


class StoreUnavailable(SemelError):
    """The store did not answer within the deadline. No claim was granted: try again later."""


class NotMigrated(SemelError):
    """The database has no semel tables, or those of an older version: run ``semel migrate URL``."""


class MissingExtra(SemelError, ImportError):
    """A package is not installed; the message names the extra to install."""


class ClaimLost(SemelError):
    """The claim is no longer the caller's: its lease ended and another took it over, or it was released.

    The caller's work may have happened, but its outcome was not recorded and must not be published.
    """


class InProgress(SemelError):
    """Another call holds this key. Try again after ``retry_after`` seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class KeyReused(SemelError):
    """The key was used before with other content (another fingerprint): use a new key for new work.

    ``idempotency_key`` is the key, if it is that of a run or a job.
    """

    def __init__(self, message: str = "", *, idempotency_key: str | None = None) -> None:
        super().__init__(message)
        self.idempotency_key = idempotency_key


class OutcomeUnknown(SemelError):
    """The key's owner died, and it is not known whether its work happened: find out, then call ``resolve``."""


class OutcomeGone(SemelError):
    """The work was done and will not be done again, but its value is not stored, or not any more."""


class OriginalFailed(SemelError):
    """The first call failed, and the policy keeps failures: this replays it. ``error`` is the type of the original."""

    def __init__(self, error: str, message: str) -> None:
        super().__init__(f"the first call with this key failed with {error}: {message}")
        self.error = error
        self.message = message


class StoreBroken(StoreUnavailable):
    """The store cannot work until it is repaired: a read-only file, a full disk, a wrong password or name."""


class NotDone(SemelError):
    """Raise it in a ``reconcile`` function: the lost work did not happen, and is to be done now."""


class UnknownModel(SemelError, LookupError):
    """The app has no model of that name. Nothing was stored."""


class InvalidParameters(InvalidRequest):
    """The parameters do not fit the model's signature. Nothing was stored; the message names the parameter."""


class RunNotFound(SemelError, LookupError):
    """There is no run with that id, or the caller may not see it."""


class RunNotComplete(SemelError):
    """The run has no result, as it has not succeeded. ``status`` is its present status.

    Try again after ``retry_after`` seconds; None if the run has ended and will never have a result.
    """

    def __init__(self, message: str, status: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


class IllegalTransition(SemelError):
    """The run's status does not allow the transition. Nothing was changed."""


class Drifted(SemelError):
    """A strict rerun was refused: what it would run with is not what the run had. Nothing was stored."""

    def __init__(self, message: str, drift: object = None) -> None:
        super().__init__(message)
        self.drift = drift
        """What changed, as ``app.drift`` returns it."""


class LeaseLost(ClaimLost):
    """The run belongs to another attempt, or has ended: the work of this attempt must not be published."""


class QuotaExceeded(SemelError):
    """The user's quota is used up. Nothing was stored: wait for earlier runs to end, or raise the limit."""


class CostLimitExceeded(QuotaExceeded):
    """The user's spending limit is reached. Nothing was stored."""


class ReservationLost(SemelError):
    """The reservation expired, was released, or is another user's: the caller no longer has the slot."""


class ResultStoreError(SemelError):
    """The result store is full or unavailable. The attempt is retried."""


class Retry(SemelError):
    """Raise or return it in a model to be retried ``after`` seconds from now, or after the model's backoff."""

    def __init__(self, reason: str = "the model asked to be tried again", *, after: float | None = None) -> None:
        super().__init__(reason)
        self.after = after


class Fatal(SemelError):
    """Raise or return it in a model whose run can never succeed, and is not to be retried."""


class Snooze(SemelError):
    """Raise or return it in a model to be run again in ``seconds``. It does not count as an attempt."""

    def __init__(self, seconds: float, reason: str = "") -> None:
        super().__init__(reason or f"snoozed for {seconds:g} seconds")
        self.seconds = seconds


class RunCancelled(SemelError):
    """Raised in a model by ``ctx.check()`` and ``ctx.progress()`` once its run is cancelled: clean up and return."""


class AppNotFound(SemelError, LookupError):
    """A worker process cannot find the app that a message names. Nothing was done, and the run stays pending."""


class ServiceError(SemelError):
    """The server refused a request, or its response was not valid.

    ``status`` is the HTTP status, ``code`` the error's code; if ``retryable``, the same request may succeed later.
    ``idempotency_key`` is the key of the request: a retry with it executes nothing twice.
    """

    def __init__(
        self, status: int, code: str, detail: str, retryable: bool = False, *, idempotency_key: str | None = None
    ) -> None:
        super().__init__(f"{detail} ({code})" if status == 200 else f"{detail} (HTTP {status}, {code})")
        self.status = status
        self.code = code
        self.detail = detail
        self.retryable = retryable
        self.idempotency_key = idempotency_key


class Unauthenticated(ServiceError):
    """The server needs a token, or does not know this one: pass ``token=``, or set ``SEMEL_TOKEN``."""


class Forbidden(ServiceError):
    """The token's role does not allow the request. Nothing was done."""


class ServerUnreachable(SemelError, ConnectionError):
    """No response arrived: the server is unavailable, or its response was lost.

    The request may have been executed. ``idempotency_key`` is its key: a retry with it executes nothing twice.
    """

    def __init__(self, message: str, *, idempotency_key: str | None = None) -> None:
        super().__init__(message)
        self.idempotency_key = idempotency_key
