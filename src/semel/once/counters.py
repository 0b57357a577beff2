"""What happened, counted by scope: never by key, so that the labels stay few."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Literal, TypeAlias

from msgspec import Struct, field
from msgspec.structs import asdict

from semel.model import Held

DAY = 86400.0
OTHERS = "(other)"
"""The scope under which events are counted once there are too many scopes."""

Hook: TypeAlias = "Callable[[Event], None]"
"""Hears what happens to keys. With an attribute ``sample_every`` (seconds) it also hears of the store: how long each
answer took, and every so often what it holds."""

_log = logging.getLogger("semel")
_LEVELS = {
    "hit": logging.DEBUG,
    "miss": logging.DEBUG,
    "conflict": logging.INFO,
    "collision": logging.INFO,
    "unknown": logging.WARNING,
}


class Event(Struct, frozen=True):
    """One thing that happened; for logs and metrics. Never holds a payload or a value.

    To a key: ``name`` is ``hit``, ``miss``, ``conflict`` (another fingerprint), ``collision`` (in flight) or
    ``unknown``; ``reason`` tells misses apart: ``absent``, ``expired`` or ``abandoned``. ``door`` is where it came in
    (``function``, ``message``, ``http``), and ``label`` the scope's name to count by.

    To the store: ``cleanup`` (``value`` keys removed), ``store`` (its answer to the verb in ``reason`` took ``value``
    seconds) and ``held`` (it holds ``value`` keys in the state in ``reason``).
    """

    name: str
    scope: str = ""
    key: str = ""
    reason: str = ""
    door: str = "function"
    label: str = ""
    value: float = 1


class Counts(Struct):
    """The counters of one scope since the start."""

    hits: int = 0
    misses: dict[str, int] = field(default_factory=dict)
    conflicts: int = 0
    collisions: int = 0
    unknown: int = 0

    def add(self, name: str, reason: str, number: int) -> None:
        """Count so many events of this name."""
        match name:
            case "hit":
                self.hits += number
            case "miss":
                self.misses[reason] = self.misses.get(reason, 0) + number
            case "conflict":
                self.conflicts += number
            case "collision":
                self.collisions += number
            case "unknown":
                self.unknown += number

    @property
    def calls(self) -> int:
        """Claims that met a verdict on new work or an outcome."""
        return self.hits + sum(self.misses.values())

    @property
    def hit_rate(self) -> float:
        """The share of calls that were replays, from 0 to 1."""
        return self.hits / self.calls if self.calls else 0.0

    replay_rate = hit_rate

    @property
    def hit_rate_is(self) -> Literal["good", "fair", "to be looked at"]:
        """How a door for retried requests judges it: good above 80 %, to be looked at below 50 %."""
        return "good" if self.hit_rate > 0.8 else "fair" if self.hit_rate >= 0.5 else "to be looked at"


class Stats(Struct, frozen=True):
    """What the store holds, and what happened here since ``since`` seconds ago."""

    held: Held
    scopes: dict[str, Counts]
    purged: int
    since: float
    doors: dict[tuple[str, str], Counts] = {}
    """The same by door and scope: ``stats.doors["http", "http"]``."""

    @property
    def warnings(self) -> list[str]:
        """What an operator should look at."""
        found = []
        for (door, scope), counts in self.doors.items():
            if door == "http" and counts.calls >= 100 and counts.hit_rate < 0.5:
                found.append(
                    f"{scope}: {counts.hit_rate:.1%} of requests with a key were replays (below 50 %): "
                    "look whether clients send a key anew with every retry"
                )
            if door != "http" and counts.calls >= 100 and counts.replay_rate > 0.05:
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
    """Adds up the events and tells those who listen.

    Beyond ``most_scopes`` scopes the rest is counted together, so memory stays bounded.
    """

    def __init__(self, *, most_scopes: int = 1000, clock: Callable[[], float] = time.monotonic) -> None:
        self._tally: dict[tuple[str, str, str, str], int] = {}
        self._most = most_scopes
        self._clock = clock
        self._started = clock()
        self.purged = 0
        self._hooks: list[Hook] = []
        self._meters: list[Hook] = []

    def hear(self, hook: Hook) -> float | None:
        """Tell the hook of every event from now on; answers how often it wants to know what the store holds."""
        self._hooks.append(hook)
        every: float | None = getattr(hook, "sample_every", None)
        if every is not None:
            self._meters.append(hook)
        return every

    def note(  # noqa: PLR0917 -- called for every call of every function, and names cost
        self, name: str, scope: str, key: str, reason: str = "", door: str = "function", label: str = ""
    ) -> None:
        """Something happened to a key."""
        label = label or scope
        try:
            self._tally[name, door, label, reason] += 1
        except KeyError:
            self._add(name, door, label, reason)
        if _log.isEnabledFor(level := _LEVELS[name]):
            known = {"event": name, "door": door, "scope": scope, "key": key, "reason": reason}
            _log.log(level, "%s: key %r in %r", name, key, scope, extra=known)
        if self._hooks:
            _tell(self._hooks, Event(name, scope, key, reason, door, label))

    def _add(self, name: str, door: str, label: str, reason: str) -> None:
        scopes = {known for _, _, known, _ in self._tally.copy()}
        if label not in scopes and len(scopes) >= self._most:
            label = OTHERS
        place = (name, door, label, reason)
        self._tally[place] = self._tally.get(place, 0) + 1

    def cleaned(self, removed: int) -> None:
        """The collector removed so many keys."""
        self.purged += removed
        if removed:
            _tell(self._hooks, Event("cleanup", value=removed))

    def took(self, verb: str, seconds: float) -> None:
        """The store answered."""
        if self._meters:
            _tell(self._meters, Event("store", reason=verb, value=seconds))

    def holds(self, held: Held) -> None:
        """The store was looked through."""
        for state, number in asdict(held).items():
            _tell(self._meters, Event("held", reason=state, value=number))

    def snapshot(self, held: Held) -> Stats:
        """Everything so far."""
        doors: dict[tuple[str, str], Counts] = {}
        scopes: dict[str, Counts] = {}
        for (name, door, label, reason), number in sorted(self._tally.copy().items()):
            for counts in (doors.setdefault((door, label), Counts()), scopes.setdefault(label, Counts())):
                counts.add(name, reason, number)
        return Stats(held, scopes, self.purged, self._clock() - self._started, doors)


def _tell(hooks: list[Hook], event: Event) -> None:
    for hook in hooks:
        try:
            hook(event)
        except Exception:  # noqa: BLE001 -- whatever a hook does, it must not break the work it hears of
            _log.exception("on_event failed; the work goes on")
