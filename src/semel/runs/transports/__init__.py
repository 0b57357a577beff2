"""A transport only announces runs: a message that is lost, duplicated, late or for a finished run changes nothing.

With the database as transport nothing is sent: the database notifies workers of new runs, and they poll it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Transport(Protocol):
    """Announces runs to workers."""

    announces: bool
    """False if the transport sends nothing."""

    def announce(self, runs: Sequence[tuple[str, str]], *, again: bool = False) -> bool:
        """Announce runs (id and queue) that can be leased. Blocks for a limited time, never raises; True if sent.

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
        """Do nothing: there are no connections."""
