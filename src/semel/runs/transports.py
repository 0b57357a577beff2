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

    def announce(self, runs: Sequence[tuple[str, str]]) -> None:
        """Tell of runs (id and queue) that can be leased. Blocking, bounded in time, and never raises."""


class Database:
    """Workers ask the database."""

    announces = False

    def announce(self, runs: Sequence[tuple[str, str]]) -> None:
        """See Transport."""
