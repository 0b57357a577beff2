"""Counts of events, what is warned of at which numbers, and what the hooks hear."""

import logging
from typing import Any

import pytest

from semel import InvalidRequest
from semel.once.stats import DAY, MOST_SCOPES, OTHERS, Counts, Event, Scopes, Stats, StatsCounter
from semel.types import Held


def test_nothing_is_counted_at_first() -> None:
    counts = Counts()
    assert (counts.hits, counts.misses, counts.conflicts, counts.collisions, counts.unknown) == (0, {}, 0, 0, 0)
    assert (counts.calls, counts.hit_rate) == (0, 0.0)
    stats = StatsCounter().snapshot(Held())
    assert (stats.scopes, stats.doors, stats.purged, stats.warnings) == ({}, {}, 0, [])


def test_each_event_is_counted_by_its_name_and_its_reason() -> None:
    counters = StatsCounter()
    for name, reason, times in (
        ("hit", "", 3),
        ("miss", "absent", 2),
        ("miss", "expired", 1),
        ("conflict", "", 4),
        ("collision", "", 5),
        ("unknown", "", 6),
    ):
        for _ in range(times):
            counters.note(name, "scope", "key", reason)
    counts = counters.snapshot(Held()).scopes["scope"]
    assert counts == Counts(3, {"absent": 2, "expired": 1}, 4, 5, 6)
    assert (counts.calls, counts.hit_rate) == (6, 0.5)


@pytest.mark.parametrize(
    ("hits", "rating"), [(49, "to be looked at"), (50, "fair"), (80, "fair"), (81, "good"), (0, "to be looked at")]
)
def test_the_rate_of_retried_requests_is_rated(hits: int, rating: str) -> None:
    assert Counts(hits, {"absent": 100 - hits}).hit_rate_is == rating


@pytest.mark.parametrize(
    ("door", "counts", "days", "low", "kinds"),
    [
        ("http", Counts(49, {"absent": 51}), 0, 0.5, ["low_hit_rate"]),
        ("http", Counts(49, {"absent": 50}), 0, 0.5, []),
        ("http", Counts(50, {"absent": 50}), 0, 0.5, []),
        ("http", Counts(49, {"absent": 51}), 0, None, []),
        ("http", Counts(99, {"absent": 1}), 0, 0.5, []),
        ("function", Counts(1, {"absent": 99}), 0, 0.5, []),
        ("function", Counts(6, {"absent": 94}), 0, None, ["high_replay_rate"]),
        ("function", Counts(6, {"absent": 93}), 0, None, []),
        ("message", Counts(5, {"absent": 95}), 0, None, []),
        ("function", Counts(0, {"absent": 1000}), 7, None, ["never_replayed"]),
        ("http", Counts(0, {"absent": 1000}), 7, None, ["never_replayed"]),
        ("function", Counts(0, {"absent": 999}), 7, None, []),
        ("function", Counts(0, {"absent": 1000}), 6.99, None, []),
        ("function", Counts(1, {"absent": 1000}), 7, None, []),
        ("function", Counts(unknown=1), 0, None, ["unknown_outcomes"]),
    ],
)
def test_what_is_warned_of_begins_at_a_number(
    door: str, counts: Counts, days: float, low: float | None, kinds: list[str]
) -> None:
    stats = Stats(Held(), {}, 0, days * DAY, {(door, "scope"): counts}, low)
    assert [about for about, _ in stats.findings()] == [(kind, door, "scope") for kind in kinds]
    assert [message.startswith("scope: ") for message in stats.warnings] == [True] * len(kinds)


@pytest.mark.parametrize("share", [1, 0.5, 0.001])
def test_a_share_may_be_low(share: float) -> None:
    assert StatsCounter(low_replay_rate=share).snapshot(Held()).low_replay_rate == share


@pytest.mark.parametrize("share", [0, -0.1, 1.001, 2])
def test_what_is_no_share_is_refused(share: float) -> None:
    with pytest.raises(InvalidRequest, match="above 0 and at most 1"):
        StatsCounter(low_replay_rate=share)


def test_the_counts_say_since_when() -> None:
    now = [100.0]
    counters = StatsCounter(clock=lambda: now[0])
    now[0] = 160.0
    assert counters.snapshot(Held()).since == 60


def test_hooks_hear_what_happened_and_how_often() -> None:
    heard: list[Event] = []
    counters = StatsCounter()
    for _ in range(2):
        assert counters.add_hook(heard.append) is None
    counters.note("miss", "scope", "key", "absent", "http", "label")
    counters.note("hit", "scope", "key")
    counters.cleaned(0)
    counters.cleaned(5)
    counters.took("claim", 0.5)  # for hooks that ask for samples
    assert heard == [
        Event("miss", "scope", "key", "absent", "http", "label", 1),
        Event("hit", "scope", "key", "", "function", "scope", 1),
        Event("cleanup", value=5),
    ]
    assert counters.snapshot(Held()).purged == 5
    assert set(counters.snapshot(Held()).scopes) == {"label", "scope"}


@pytest.mark.parametrize(
    ("name", "door", "level"),
    [
        ("hit", "function", logging.DEBUG),
        ("hit", "message", logging.INFO),
        ("miss", "message", logging.DEBUG),
        ("conflict", "function", logging.INFO),
        ("unknown", "message", logging.WARNING),
    ],
)
def test_each_event_has_its_level_in_the_log(
    name: str, door: str, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "semel"):
        StatsCounter().note(name, "scope", "key", "", door)
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (level, f"{name}: key 'key' in 'scope'")
    ]
    caplog.clear()
    with caplog.at_level(level + 1, "semel"):
        StatsCounter().note(name, "scope", "key", "", door)
    assert caplog.records == []


def test_scopes_beyond_the_most_are_counted_together() -> None:
    scopes = Scopes(2)
    assert [scopes.known(label) for label in ("a", "b", "c", "a", "d")] == ["a", "b", OTHERS, "a", OTHERS]
    assert MOST_SCOPES == 1000
    counters = StatsCounter(most_scopes=1)
    for scope in ("a", "b", "c", "b"):
        counters.note("hit", scope, "key")
    assert {scope: counts.hits for scope, counts in counters.snapshot(Held()).scopes.items()} == {"a": 1, OTHERS: 3}


def test_a_hook_that_fails_is_logged_once_for_each_kind_of_error(caplog: pytest.LogCaptureFixture) -> None:
    errors: list[Exception] = [ValueError("a"), ValueError("b"), KeyError("c")]

    def hook(event: Event) -> None:
        raise errors.pop(0)

    counters = StatsCounter()
    counters.add_hook(hook)
    for _ in range(3):
        counters.note("hit", "scope", "key")
    failed: list[Any] = [vars(record)["reason"] for record in caplog.records]
    assert failed == ["builtins.ValueError", "builtins.KeyError"]
