"""A transport only tells workers to look: a message that is lost, doubled, late or for a finished run changes nothing.

With the database as transport nothing is sent: it notifies workers of new runs, and they poll it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Transport(Protocol):
    """Announces runs to workers."""

    announces: bool
    """False when there is nothing to send."""

    def announce(self, runs: Sequence[tuple[str, str]], *, again: bool = False) -> bool:
        """Announce runs (id and queue) that can be leased. Blocking, bounded in time, never raises; True when sent.

        ``again``: they were announced before; nothing is sent to a queue where as many messages still wait.
        """

    def close(self) -> None:
        """Close connections; the next announcement opens them anew."""


class DatabaseTransport:
    """Workers poll the database, which notifies them: nothing is sent."""

    announces = False

    def announce(self, runs: Sequence[tuple[str, str]], *, again: bool = False) -> bool:  # noqa: ARG002 -- see Transport
        return True

    def close(self) -> None:
        """See Transport."""
