"""A transport only says "look": a message lost, doubled, late or for a finished run changes nothing.

The database needs none besides itself: workers hear of new runs from it, and look by themselves at times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Transport(Protocol):
    """How workers hear of runs."""

    announces: bool
    """False when there is nothing to send."""

    def announce(self, runs: Sequence[tuple[str, str]], *, again: bool = False) -> bool:
        """Tell of runs (id and queue) that can be leased. Blocking, bounded in time, never raises; True when sent.

        ``again``: they were told of before; nothing is sent where messages for as many runs still wait.
        """

    def close(self) -> None:
        """Let go of what is open; the next announcement opens it anew."""


class DatabaseTransport:
    """Workers ask the database."""

    announces = False

    def announce(self, runs: Sequence[tuple[str, str]], *, again: bool = False) -> bool:  # noqa: ARG002 -- see Transport
        """See Transport."""
        return True

    def close(self) -> None:
        """See Transport."""
