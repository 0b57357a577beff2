"""What happened, counted by scope: never by key, so that the labels stay few."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from inspect import iscoroutinefunction
from typing import Literal, TypeAlias

from msgspec import Struct, field
from msgspec.structs import asdict

from semel.errors import InvalidRequest
from semel.types import Held

DAY = 86400.0
MOST_SCOPES = 1000
OTHERS = "(other)"
"""The scope under which events are counted once there are too many scopes."""

Hook: TypeAlias = "Callable[[Event], None]"
"""Hears what happens to keys. With an attribute ``sample_every`` (seconds) it also hears of the store: how long each
answer took, and every so often what it holds."""

_log = logging.getLogger("semel")
_LEVELS = {
    "hit": logging.DEBUG,  # of a message: INFO, since it is skipped
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
        """How a middleware for retried requests judges it: good above 80 %, to be looked at below 50 %."""
        return "good" if self.hit_rate > 0.8 else "fair" if self.hit_rate >= 0.5 else "to be looked at"


class Stats(Struct, frozen=True):
    """What the store holds, and what happened here since ``since`` seconds ago."""

    held: Held
    scopes: dict[str, Counts]
    purged: int
    since: float
    doors: dict[tuple[str, str], Counts] = {}
    """The same by door and scope: ``stats.doors["http", "http"]``."""
    low_replay_rate: float | None = None
    """The share of replays below which requests over HTTP are warned of; None: never."""

    @property
    def warnings(self) -> list[str]:
        """What an operator should look at."""
        return [said for _, said in self.findings()]

    def findings(self) -> Iterator[tuple[tuple[str, str, str], str]]:
        """The warnings, each with what it is about: its kind, the door and the scope."""
        for (door, scope), counts in self.doors.items():
            for kind, said in _findings(door, counts, self.since, self.low_replay_rate):
                yield (kind, door, scope), f"{scope}: {said}"


def _findings(door: str, counts: Counts, since: float, low: float | None) -> Iterator[tuple[str, str]]:
    rate = f"{counts.hit_rate:.1%}"
    if low is not None and door == "http" and counts.calls >= 100 and counts.hit_rate < low:
        said = f"{rate} of requests with a key were replays (below {100 * low:g} %): "
        yield "low_hit_rate", said + "look whether clients send a key anew with every retry"
    if door != "http" and counts.calls >= 100 and counts.replay_rate > 0.05:
        yield "high_replay_rate", f"{rate} of calls are replays (over 5 %): something upstream retries too eagerly"
    if counts.calls >= 1000 and counts.hits == 0 and since >= 7 * DAY:
        said = f"not one replay in {counts.calls} calls over {since / DAY:.0f} days: "
        yield "never_replayed", said + "check that retries really send the same key"
    if counts.unknown:
        yield "unknown_outcomes", f"{counts.unknown} calls met a key whose outcome is unknown: resolve them"


class StatsCounter:
    """Adds up the events and tells those who listen.

    Beyond ``most_scopes`` scopes the rest is counted together, so memory stays bounded. Clients that seldom retry have
    few replays and are healthy: a low rate is warned of only where ``low_replay_rate`` says what is low.
    """

    def __init__(
        self,
        *,
        most_scopes: int = MOST_SCOPES,
        clock: Callable[[], float] = time.monotonic,
        low_replay_rate: float | None = None,
    ) -> None:
        if low_replay_rate is not None and not 0 < low_replay_rate <= 1:
            raise InvalidRequest(f"low_replay_rate is a share over 0 and up to 1, such as 0.5, not {low_replay_rate!r}")
        self._low_replay_rate = low_replay_rate
        self._tally: dict[tuple[str, str, str, str], int] = {}
        self._scopes = Scopes(most_scopes)
        self._clock = clock
        self._started = clock()
        self.purged = 0
        self._hooks: list[Hook] = []
        self._meters: list[Hook] = []
        self._complained: set[tuple[int, str]] = set()
        self._warned: dict[tuple[str, str, str], object] = {}

    def add_hook(self, hook: Hook) -> float | None:
        """Tell the hook of every event from now on, once however often it is given.

        Answers how often it wants to know what the store holds.
        """
        given: object = hook
        if not callable(given) or iscoroutinefunction(given):
            raise InvalidRequest(f"on_event= takes a plain function of an event, not {given!r:.80}")
        every: float | None = getattr(hook, "sample_every", None)
        if hook not in self._hooks:
            self._hooks.append(hook)
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
        level = logging.INFO if name == "hit" and door == "message" else _LEVELS[name]
        if _log.isEnabledFor(level):
            known = {"event": name, "door": door, "scope": scope, "key": key, "reason": reason}
            _log.log(level, "%s: key %r in %r", name, key, scope, extra=known)
        if self._hooks:
            self._tell(self._hooks, Event(name, scope, key, reason, door, label))

    def _add(self, name: str, door: str, label: str, reason: str) -> None:
        place = (name, door, self._scopes.known(label), reason)
        self._tally[place] = self._tally.get(place, 0) + 1

    def cleaned(self, removed: int) -> None:
        """The collector removed so many keys."""
        self.purged += removed
        if removed:
            self._tell(self._hooks, Event("cleanup", value=removed))

    def took(self, verb: str, seconds: float) -> None:
        """The store answered."""
        if self._meters:
            self._tell(self._meters, Event("store", reason=verb, value=seconds))

    def holds(self, held: Held) -> None:
        """The store was looked through."""
        for state, number in asdict(held).items():
            self._tell(self._meters, Event("held", reason=state, value=number))

    def snapshot(self, held: Held) -> Stats:
        """Everything so far."""
        doors: dict[tuple[str, str], Counts] = {}
        scopes: dict[str, Counts] = {}
        for (name, door, label, reason), number in sorted(self._tally.copy().items()):
            for counts in (doors.setdefault((door, label), Counts()), scopes.setdefault(label, Counts())):
                counts.add(name, reason, number)
        return Stats(held, scopes, self.purged, self._clock() - self._started, doors, self._low_replay_rate)

    def warn(self) -> None:
        """Say in the log what an operator should look at: once, until it is over and begins anew."""
        found = dict(self.snapshot(Held()).findings())
        mine = object()
        for about, said in found.items():
            if self._warned.setdefault(about, mine) is mine:
                kind, door, scope = about
                _log.warning("%s", said, extra={"event": "warning", "door": door, "scope": scope, "reason": kind})
        for about in list(self._warned):
            if about not in found:
                self._warned.pop(about, None)

    def _tell(self, hooks: list[Hook], event: Event) -> None:
        for hook in hooks:
            try:
                hook(event)
            except Exception as error:  # noqa: BLE001 -- whatever a hook does, it must not break the work it hears of
                self._complain(hook, error)

    def _complain(self, hook: Hook, error: Exception) -> None:
        """Log the hook's failure; the same kind of it only once, since it would come with every event."""
        kind = f"{type(error).__module__}.{type(error).__qualname__}"
        if (id(hook), kind) not in self._complained:
            self._complained.add((id(hook), kind))
            said = "on_event failed; the work goes on, and the next %s of this hook will not be logged"
            _log.error(said, kind, exc_info=error, extra={"event": "hook_failed", "reason": kind})


class Scopes:
    """The names to count by: the first so many that come are known, the rest is counted together."""

    def __init__(self, most: int = MOST_SCOPES) -> None:
        self._most = most
        self._known: set[str] = set()

    def known(self, label: str) -> str:
        """The name itself, or ``(other)``."""
        if label in self._known:
            return label
        if len(self._known) >= self._most:
            return OTHERS
        self._known.add(label)
        return label
