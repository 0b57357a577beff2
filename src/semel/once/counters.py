"""What happened, counted by scope: never by key, so that the labels stay few."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

from msgspec import Struct, field

from semel.model import Held

DAY = 86400.0
OTHERS = "(other)"
"""The scope under which events are counted once there are too many scopes."""

Hook: TypeAlias = "Callable[[Event], None]"


class Event(Struct, frozen=True):
    """One thing that happened to one key; for logs and metrics. Never holds a payload or a value.

    ``name`` is ``hit``, ``miss``, ``conflict`` (another fingerprint), ``collision`` (in flight) or ``unknown``;
    ``reason`` tells misses apart: ``absent``, ``expired`` or ``abandoned``.
    """

    name: str
    scope: str
    key: str
    reason: str = ""


class Counts(Struct):
    """The counters of one scope since the start."""

    hits: int = 0
    misses: dict[str, int] = field(default_factory=dict)
    conflicts: int = 0
    collisions: int = 0
    unknown: int = 0

    @property
    def calls(self) -> int:
        """Claims that met a verdict on new work or an outcome."""
        return self.hits + sum(self.misses.values())

    @property
    def hit_rate(self) -> float:
        """The share of calls that were replays, from 0 to 1."""
        return self.hits / self.calls if self.calls else 0.0

    replay_rate = hit_rate


class Stats(Struct, frozen=True):
    """What the store holds, and what happened here since ``since`` seconds ago."""

    held: Held
    scopes: dict[str, Counts]
    purged: int
    since: float

    @property
    def warnings(self) -> list[str]:
        """What an operator should look at."""
        found = []
        for scope, counts in self.scopes.items():
            if counts.calls >= 100 and counts.replay_rate > 0.05:
                found.append(
                    f"{scope}: {counts.replay_rate:.1%} of calls are replays (over 5 %): "
                    "something upstream retries too eagerly"
                )
            if counts.calls >= 1000 and counts.hits == 0 and self.since >= 7 * DAY:
                found.append(
                    f"{scope}: not one replay in {counts.calls} calls over {self.since / DAY:.0f} days: "
                    "check that retries really send the same key"
                )
            if counts.unknown:
                found.append(f"{scope}: {counts.unknown} calls met a key whose outcome is unknown: resolve them")
        return found


class Counters:
    """Adds up the events. Beyond ``most_scopes`` scopes the rest is counted together, so memory stays bounded."""

    def __init__(self, *, most_scopes: int = 1000, clock: Callable[[], float] = time.monotonic) -> None:
        self._tally: dict[tuple[str, str, str], int] = {}
        self._most = most_scopes
        self._clock = clock
        self._started = clock()
        self.purged = 0

    def add(self, name: str, scope: str, reason: str = "") -> None:
        """Count one event."""
        try:
            self._tally[name, scope, reason] += 1
        except KeyError:
            scopes = {known for _, known, _ in self._tally.copy()}
            if scope not in scopes and len(scopes) >= self._most:
                scope = OTHERS
            self._tally[name, scope, reason] = self._tally.get((name, scope, reason), 0) + 1

    def snapshot(self, held: Held) -> Stats:
        """Everything so far."""
        scopes: dict[str, Counts] = {}
        for (name, scope, reason), number in sorted(self._tally.copy().items()):
            counts = scopes.setdefault(scope, Counts())
            match name:
                case "hit":
                    counts.hits = number
                case "miss":
                    counts.misses[reason] = number
                case "conflict":
                    counts.conflicts = number
                case "collision":
                    counts.collisions = number
                case "unknown":
                    counts.unknown = number
        return Stats(held, scopes, self.purged, self._clock() - self._started)
