"""Counts of events by scope, never by key, so that there are few labels."""

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

Hook: TypeAlias = "Callable[[Event], object]"
"""Called with every event of a key. With an attribute ``sample_every`` (seconds) it is also called with events of the
store: how long each reply took, and at that interval how many keys it holds."""

_log = logging.getLogger("semel")
_LEVELS = {
    "hit": logging.DEBUG,  # INFO for a message, since it is skipped
    "miss": logging.DEBUG,
    "conflict": logging.INFO,
    "collision": logging.INFO,
    "unknown": logging.WARNING,
}


class Event(Struct, frozen=True):
    """One event, for logs and metrics. Never holds a payload or a result.

    Of a key: ``name`` is ``hit``, ``miss``, ``conflict`` (another fingerprint), ``collision`` (in flight) or
    ``unknown``; the ``reason`` of a miss is ``absent``, ``expired`` or ``abandoned``. ``door`` is how the call was made
    (``function``, ``message``, ``http``), and ``label`` is the scope's name to count by.

    Of the store: ``cleanup`` (``value`` keys removed), ``store`` (its reply to the verb in ``reason`` took ``value``
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
        """Add ``number`` events of this name."""
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
        """Hits and misses: calls that were replayed or worked."""
        return self.hits + sum(self.misses.values())

    @property
    def hit_rate(self) -> float:
        """The share of calls that were replays, from 0 to 1."""
        return self.hits / self.calls if self.calls else 0.0

    replay_rate = hit_rate

    @property
    def hit_rate_is(self) -> Literal["good", "fair", "to be looked at"]:
        """The rating for retried HTTP requests: good above 80 %, to be looked at below 50 %."""
        return "good" if self.hit_rate > 0.8 else "fair" if self.hit_rate >= 0.5 else "to be looked at"


class Stats(Struct, frozen=True):
    """What the store holds, and the events that this process counted in the last ``since`` seconds."""

    held: Held
    scopes: dict[str, Counts]
    purged: int
    since: float
    doors: dict[tuple[str, str], Counts] = {}
    """The same by door and scope: ``stats.doors["http", "http"]``."""
    low_replay_rate: float | None = None
    """The share of replays below which there is a warning about HTTP requests; None: no warning."""

    @property
    def warnings(self) -> list[str]:
        """Messages about what an operator should look at."""
        return [message for _, message in self.findings()]

    def findings(self) -> Iterator[tuple[tuple[str, str, str], str]]:
        """The warnings, each with its kind, door and scope."""
        for (door, scope), counts in self.doors.items():
            for kind, message in _findings(door, counts, self.since, self.low_replay_rate):
                yield (kind, door, scope), f"{scope}: {message}"


def _findings(door: str, counts: Counts, since: float, low: float | None) -> Iterator[tuple[str, str]]:
    rate = f"{counts.hit_rate:.1%}"
    if low is not None and door == "http" and counts.calls >= 100 and counts.hit_rate < low:
        share = f"{rate} of requests with a key were replays (below {100 * low:g} %)"
        yield "low_hit_rate", f"{share}: check whether clients send a new key with every retry"
    if door != "http" and counts.calls >= 100 and counts.replay_rate > 0.05:
        yield "high_replay_rate", f"{rate} of calls are replays (over 5 %): something upstream retries too eagerly"
    if counts.calls >= 1000 and counts.hits == 0 and since >= 7 * DAY:
        share = f"not one replay in {counts.calls} calls over {since / DAY:.0f} days"
        yield "never_replayed", f"{share}: check that retries really send the same key"
    if counts.unknown:
        yield "unknown_outcomes", f"{counts.unknown} calls met a key whose outcome is unknown: resolve them"


class StatsCounter:
    """Counts the events and calls the hooks.

    Scopes beyond the first ``most_scopes`` are counted together, so memory is bounded. Clients that seldom retry have
    few replays and are healthy: a low rate is a warning only if ``low_replay_rate`` is set.
    """

    def __init__(
        self,
        *,
        most_scopes: int = MOST_SCOPES,
        clock: Callable[[], float] = time.monotonic,
        low_replay_rate: float | None = None,
    ) -> None:
        if low_replay_rate is not None and not 0 < low_replay_rate <= 1:
            raise InvalidRequest(f"low_replay_rate must be above 0 and at most 1, such as 0.5, not {low_replay_rate!r}")
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
        """Call the hook for every event from now on. Adding it again changes nothing.

        Returns its ``sample_every``: the seconds between two samples of the store, or None.
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

    def note(  # noqa: PLR0917 -- called for every call of every function, and keywords cost time
        self, name: str, scope: str, key: str, reason: str = "", door: str = "function", label: str = ""
    ) -> None:
        """Count, log and report an event of a key."""
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
        """Count and report keys that the collector removed."""
        self.purged += removed
        if removed:
            self._tell(self._hooks, Event("cleanup", value=removed))

    def took(self, verb: str, seconds: float) -> None:
        """Report how long the store's reply took."""
        if self._meters:
            self._tell(self._meters, Event("store", reason=verb, value=seconds))

    def holds(self, held: Held) -> None:
        """Report a sample of what the store holds."""
        for state, number in asdict(held).items():
            self._tell(self._meters, Event("held", reason=state, value=number))

    def snapshot(self, held: Held) -> Stats:
        """All counts so far."""
        doors: dict[tuple[str, str], Counts] = {}
        scopes: dict[str, Counts] = {}
        for (name, door, label, reason), number in sorted(self._tally.copy().items()):
            for counts in (doors.setdefault((door, label), Counts()), scopes.setdefault(label, Counts())):
                counts.add(name, reason, number)
        return Stats(held, scopes, self.purged, self._clock() - self._started, doors, self._low_replay_rate)

    def warn(self) -> None:
        """Log each warning once; again only if it was over in between."""
        found = dict(self.snapshot(Held()).findings())
        mine = object()
        for about, message in found.items():
            if self._warned.setdefault(about, mine) is mine:
                kind, door, scope = about
                _log.warning("%s", message, extra={"event": "warning", "door": door, "scope": scope, "reason": kind})
        for about in list(self._warned):
            if about not in found:
                self._warned.pop(about, None)

    def _tell(self, hooks: list[Hook], event: Event) -> None:
        for hook in hooks:
            try:
                hook(event)
            except Exception as error:  # noqa: BLE001 -- a hook must not break the work that it is called for
                self._complain(hook, error)

    def _complain(self, hook: Hook, error: Exception) -> None:
        """Log the hook's failure; each type of error only once, since it could come with every event."""
        kind = f"{type(error).__module__}.{type(error).__qualname__}"
        if (id(hook), kind) not in self._complained:
            self._complained.add((id(hook), kind))
            message = "on_event failed; the work goes on, and the next %s of this hook will not be logged"
            _log.error(message, kind, exc_info=error, extra={"event": "hook_failed", "reason": kind})


class Scopes:
    """The labels to count by: the first ``most`` are counted each, the rest together."""

    def __init__(self, most: int = MOST_SCOPES) -> None:
        self._most = most
        self._known: set[str] = set()

    def known(self, label: str) -> str:
        """The label itself, or ``(other)``."""
        if label in self._known:
            return label
        if len(self._known) >= self._most:
            return OTHERS
        self._known.add(label)
        return label
