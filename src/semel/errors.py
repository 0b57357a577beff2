"""Every error that semel raises: one small tree, rooted at :class:`SemelError`.

Each message says what happened, what it means for the caller, and what to do next.
"""

from __future__ import annotations


class SemelError(Exception):
    """The root: catch it to catch everything that semel itself raises."""


class InvalidRequest(SemelError, ValueError):
    """A key, scope, time or option that can never work; nothing was sent to the store.

    ``idempotency_key`` is the key that is refused, where it is one.
    """

    def __init__(self, message: str = "", *, idempotency_key: str | None = None) -> None:
        super().__init__(message)
        self.idempotency_key = idempotency_key


class Unfingerprintable(SemelError, ValueError):
    """A payload has no canonical form, so it has no fingerprint."""


class Unencodable(SemelError, TypeError):
    """A value cannot be stored so that it replays exactly. Of work: it is done, its key too, and its value is lost."""


class StoreUnavailable(SemelError):
    """The store did not answer within the deadline. Nothing was granted: try again later."""


class NotMigrated(SemelError):
    """The database lacks semel's tables, or has older ones: run ``semel migrate URL``."""


class MissingExtra(SemelError, ImportError):
    """The URL needs a driver that is not installed; the message names the extra to install."""


class ClaimLost(SemelError):
    """The claim belongs to someone else by now: its lease ended and it was taken over, or it was given back.

    The work of the caller may have happened, yet its outcome was not recorded and must not be published.
    """


class InProgress(SemelError):
    """Someone else works on this key. ``retry_after`` says in how many seconds to ask again."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class KeyReused(SemelError):
    """The key was used before with other content (another fingerprint): use a new key for new work.

    ``idempotency_key`` is the key, where it is a run's or a job's.
    """

    def __init__(self, message: str = "", *, idempotency_key: str | None = None) -> None:
        super().__init__(message)
        self.idempotency_key = idempotency_key


class OutcomeUnknown(SemelError):
    """The key's owner vanished and nobody knows whether its work happened: look, then call ``resolve``."""


class OutcomeGone(SemelError):
    """The work was done and will not be done again, but its outcome is not stored, or no longer."""


class OriginalFailed(SemelError):
    """The first call failed and the policy keeps failures: this is its replay. ``error`` names the original's type."""

    def __init__(self, error: str, message: str) -> None:
        super().__init__(f"the first call with this key failed with {error}: {message}")
        self.error = error
        self.message = message


class StoreBroken(StoreUnavailable):
    """The store refuses and waiting will not help: a read-only file, a full disk, a wrong password or name."""


class NotDone(SemelError):
    """Raise it in a reconcile hook to say: the lost work did not happen, do it now."""


class UnknownModel(SemelError, LookupError):
    """No model of that name is registered with the app; nothing was stored."""


class InvalidParameters(InvalidRequest):
    """The parameters do not fit the model's signature; nothing was stored. The message names the parameter."""


class RunNotFound(SemelError, LookupError):
    """There is no run of that id, or it is not the caller's to see."""


class RunNotComplete(SemelError):
    """The run has no result to show: it has not succeeded. ``status`` says how it stands.

    ``retry_after`` are seconds after which to ask again; None for a run that is over, and will never have one.
    """

    def __init__(self, message: str, status: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


class IllegalTransition(SemelError):
    """The run is in a state that the step asked for does not lead from; nothing was changed."""


class LeaseLost(ClaimLost):
    """The run belongs to another attempt by now, or is over: what this one did must not be published."""


class QuotaExceeded(SemelError):
    """The user's quota is used up; nothing was stored. Waiting for earlier runs to end, or a higher limit, helps."""


class CostLimitExceeded(QuotaExceeded):
    """The user's spending limit is reached; nothing was stored."""


class ReservationLost(SemelError):
    """The reservation expired, was given back, or is someone else's: the slot is not the caller's any more."""


class ResultStoreError(SemelError):
    """The result store is full or cannot be reached; the attempt is tried again."""


class Retry(SemelError):
    """Raise or return it in a model: try again, ``after`` seconds from now (or by the model's backoff)."""

    def __init__(self, reason: str = "the model asked to be tried again", *, after: float | None = None) -> None:
        super().__init__(reason)
        self.after = after


class Fatal(SemelError):
    """Raise or return it in a model: this can never work, do not try again."""


class Snooze(SemelError):
    """Raise or return it in a model: nothing is wrong, run me again in ``seconds``; no attempt is charged."""

    def __init__(self, seconds: float, reason: str = "") -> None:
        super().__init__(reason or f"snoozed for {seconds:g} seconds")
        self.seconds = seconds


class RunCancelled(SemelError):
    """Raised inside a model by ``ctx.check()`` and ``ctx.progress()`` once its run is cancelled: clean up and leave."""


class AppNotFound(SemelError, LookupError):
    """A worker process cannot find the app that a message is about: nothing was done, the run waits."""


class ServiceError(SemelError):
    """The server refused a request, or answered with what makes no sense.

    ``status`` is that of HTTP, ``code`` the problem's, ``retryable`` says that the same request may succeed later. A
    request that had a key names it in ``idempotency_key``: sent again under it, nothing is done twice.
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
    """The server wants a token, or does not know this one: give ``token=``, or set ``SEMEL_TOKEN``."""


class Forbidden(ServiceError):
    """The token's role does not allow that; nothing was done."""


class ServerUnreachable(SemelError, ConnectionError):
    """No answer came: the server is not there, or its answers were lost.

    A request that had a key names it in ``idempotency_key``: it may have been carried out, and sent again under the
    same key, nothing is done twice.
    """

    def __init__(self, message: str, *, idempotency_key: str | None = None) -> None:
        super().__init__(message)
        self.idempotency_key = idempotency_key
