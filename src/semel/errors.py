"""Every error that semel raises: one small tree, rooted at :class:`SemelError`.

Each message says what happened, what it means for the caller, and what to do next.
"""

from __future__ import annotations


class SemelError(Exception):
    """The root: catch it to catch everything that semel itself raises."""


class InvalidRequest(SemelError, ValueError):
    """A key, scope, time or option that can never work; nothing was sent to the store."""


class Unfingerprintable(SemelError, ValueError):
    """A payload has no canonical form, so it has no fingerprint."""


class Unencodable(SemelError, TypeError):
    """An outcome cannot be stored so that it replays exactly; its claim was given back."""


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
    """The key was used before with other content (another fingerprint): use a new key for new work."""


class OutcomeUnknown(SemelError):
    """The key's owner vanished and nobody knows whether its work happened: look, then call ``resolve``."""


class OutcomeGone(SemelError):
    """The work was done and will not be done again, but its outcome is no longer stored."""


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
