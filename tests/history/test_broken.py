"""Broken variants of the product, each in one way: the checker catches every one, and the product itself never.

The schedules are chosen by seeds, on a clock that jumps, so each run is the same every time. Each test prints in how
many of its runs the variant was caught, and by which rules.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from contextvars import copy_context
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from conformance.broken import BROKEN, Broken
from history import breaking
from history.actors import Actor
from history.schedules import STEPS, KeySchedule, RunSchedule
from semel import JobStore
from semel.once.store import Clock, Store
from semel.once.stores import open_store
from semel.runs.store import submit
from semel.runs.store.run_keys import run_key
from semel.testing.history import History, RecordedJobStore, Recorder, check, read
from support.databases import KINDS, Databases, StoreUrls

SEEDS = (1, 2, 3)
MANY_SEEDS = range(1, 1 + int(os.environ.get("SEMEL_HISTORY_SEEDS", "2")))
"""Seeds for what is right, of which there may be thousands in a long search."""
FEW = 15
"""Steps at random after the classics, for a variant that is to be caught."""
_numbers = count(1)

Break = Callable[[], AbstractContextManager[None]]


def judged(histories: Iterator[History]) -> list[str]:
    """The first rule that each history breaks; "" for one that breaks none."""
    found = [check(history) for history in histories]
    return [violations[0].rule if violations else "" for violations in found]


def report(name: str, rules: Sequence[str]) -> int:
    """Print in how many runs a variant was caught, and return it."""
    caught = Counter(rule for rule in rules if rule)
    print(f"{name}: caught in {caught.total()} of {len(rules)} runs, by {dict(caught)}")  # noqa: T201
    return caught.total()


STORES_TO_CATCH = {
    "AwaitsBetweenCheckAndAct",
    "TakesOverWhateverIsThere",
    "KnowsNoLease",
    "RunsUnknownWorkAgain",
    "KnowsNoAttempts",
    "MarksInTwoSteps",
    "SaysThatItMarked",
    "CountsFencesInTheRecord",
    "TakesTheTimeAsFence",
    "PurgesTheAbandoned",
    "CompletesWithoutAFence",
    "ReleasesWithoutAFence",
    "RenewsWithoutAFence",
    "OverwritesTheOutcome",
    "StoresText",
    "ReleasesOnce",
    "CompletesOnce",
    "ReleasesOutcomes",
    "SaysThatItRenewed",
    "DropsLateOwners",
    "SaysThatItReleased",
    "RenewsWhatIsDone",
    "ForgetsTheValueAlone",
    "ForgetsOnce",
}
"""Stores of the conformance kit whose fault can be seen in a history."""


@pytest.mark.parametrize("store", [each for each in BROKEN if each.__name__ in STORES_TO_CATCH])
def test_a_broken_store_is_caught(store: type[Broken], tmp_path: Path) -> None:
    rules = judged(KeySchedule(store, tmp_path, seed, FEW).history() for seed in SEEDS)
    assert report(store.__name__, rules) * 2 > len(rules)


def test_every_store_that_is_to_be_caught_is_there() -> None:
    assert {each.__name__ for each in BROKEN} >= STORES_TO_CATCH


def opener(kind: str, urls: StoreUrls) -> Callable[[Clock], Store]:
    return lambda clock: open_store(urls[kind], is_async=False, clock=clock)


@pytest.mark.parametrize("kind", KINDS)
def test_every_store_of_ours_is_right(kind: str, urls: StoreUrls, tmp_path: Path) -> None:
    rules = judged(KeySchedule(opener(kind, urls), tmp_path, seed).history() for seed in MANY_SEEDS)
    assert dict(zip(MANY_SEEDS, rules, strict=True)) == dict.fromkeys(MANY_SEEDS, "")


COMPLETE, RELEASE, RENEW = "SET state = 'completed'", "DELETE FROM semel_keys WHERE scope = ?", "SET lease_us = "
UNFENCED = ("fence = ?", "(fence = ? OR true)")
UNFENCED_LUA = ("local ours = r[1] == int(request.fence)", "local ours = r[1]")
KEYS: dict[str, tuple[str, Break]] = {
    "SQLite completes without a fence": ("sqlite", lambda: breaking.sql(UNFENCED, only=COMPLETE)),
    "SQLite releases without a fence": ("sqlite", lambda: breaking.sql(UNFENCED, only=RELEASE)),
    "SQLite renews without a fence": ("sqlite", lambda: breaking.sql(UNFENCED, only=RENEW)),
    "SQLite overwrites outcomes": (
        "sqlite",
        lambda: breaking.sql(("AND state = 'claimed'", ""), only=COMPLETE),
    ),
    "SQLite gives a fence again": ("sqlite", lambda: breaking.sql(("last = last + ?", "last = 7 + 0 * ?"))),
    "SQLite says that it renewed": (
        "sqlite",
        lambda: breaking.sql(("lease_until_us = ? ", "lease_until_us = min(lease_until_us, ?) "), only=RENEW),
    ),
    "SQLite purges keys before their time": (
        "sqlite",
        lambda: breaking.sql(("expires_us < ?", "expires_us - 400000000 < ?"), only="DELETE FROM semel_keys"),
    ),
    "SQLite forgets values before their time": (
        "sqlite",
        lambda: breaking.sql(("value_until_us < ?", "value_until_us - 30000000 < ?"), only="SET value"),
    ),
    "Redis completes without a fence": ("redis", lambda: breaking.lua("_COMPLETE", *UNFENCED_LUA)),
    "Redis releases without a fence": ("redis", lambda: breaking.lua("_RELEASE", *UNFENCED_LUA)),
    "Redis renews without a fence": (
        "redis",
        lambda: breaking.lua("_RENEW", "if r[1] == int(request.fence) and", "if r[1] and"),
    ),
    "Redis purges keys before their time": (
        "redis",
        lambda: breaking.lua("_PURGE", "if now > last(r[2],", "if now + 400000000 > last(r[2],"),
    ),
    "Redis forgets values before their time": (
        "redis",
        lambda: breaking.lua("_PURGE", "now > tonumber(fades)", "now + 30000000 > tonumber(fades)"),
    ),
    "Redis takes every key": ("redis", lambda: breaking.lua("_CLAIM", "if not seen[1] or (was", "if true or (was")),
    "Redis gives a fence again": (
        "redis",
        lambda: breaking.lua("_CLAIM", "GET', counter) or 0) + 1, now)", "GET', counter) or 0), 7)"),
    ),
    "PostgreSQL completes without a fence": (
        "postgres",
        lambda: breaking.sql(("k.fence = r.fence AND", ""), only=COMPLETE),
    ),
    "PostgreSQL releases without a fence": (
        "postgres",
        lambda: breaking.sql(("k.fence = r.fence AND", ""), only="SET state = 'released', expires_us"),
    ),
    "PostgreSQL renews without a fence": (
        "postgres",
        lambda: breaking.sql(
            ("AND k.fence = r.fence", ""), ("k.fence, k.lease_until_us", "r.fence, k.lease_until_us"), only=RENEW
        ),
    ),
    "PostgreSQL purges keys before their time": (
        "postgres",
        lambda: breaking.sql(("expires_us < us", "expires_us - 400000000 < us"), only="DELETE FROM semel_keys"),
    ),
    "PostgreSQL forgets values before their time": (
        "postgres",
        lambda: breaking.sql(("value_until_us < us", "value_until_us - 30000000 < us"), only="SET value = NULL"),
    ),
    "PostgreSQL overwrites outcomes": (
        "postgres",
        lambda: breaking.sql(("AND k.state = 'claimed'", ""), only=COMPLETE),
    ),
    "PostgreSQL gives a fence again": ("postgres", lambda: breaking.sql(("nextval('semel_fence')", "7"))),
}


@pytest.mark.parametrize("name", KEYS)
def test_a_broken_verb_of_a_store_is_caught(name: str, urls: StoreUrls, tmp_path: Path) -> None:
    kind, broken = KEYS[name]
    with broken():
        rules = judged(KeySchedule(opener(kind, urls), tmp_path, seed, FEW).history() for seed in SEEDS)
    assert report(name, rules) * 2 > len(rules)


LEASED, SUCCEEDED, FAILED = "step = 'leased'", "'SUCCEEDED' AS status", "k.errors + CASE"
LOST, RENEWED, USAGE = "' was lost: no sign", "coalesce(in_progress, progress)", "count(*) FILTER"
UNFENCED_RUN = ("k.fence = in_fence AND", "")
RUNS: dict[str, Break] = {
    "a success without a fence": lambda: breaking.sql(UNFENCED_RUN, only=SUCCEEDED),
    "a failure without a fence": lambda: breaking.sql(UNFENCED_RUN, only=FAILED),
    "a renewal without a fence": lambda: breaking.sql(UNFENCED_RUN, only=RENEWED),
    "a renewal that renews nothing": lambda: breaking.sql(
        ("+ lease_us, heartbeat_us", "+ 0, heartbeat_us"), only=RENEWED
    ),
    "a sweeper that does not wait": lambda: breaking.sql(
        ("lease_until_us < ", "lease_until_us - 3600000000 < "), only=LOST
    ),
    "a success that is told to anybody": lambda: breaking.sql(
        ("AND e.fence = in_fence", ""), only="e.status = 'SUCCEEDED'"
    ),
    "a cancelled run that begins again when its worker is lost": lambda: breaking.sql(
        ("WHEN k.cancel_us IS NOT NULL THEN", "WHEN k.cancel_us IS NOT NULL AND in_kind <> 'lost' THEN"), only=FAILED
    ),
    "a cancelled run that is retried": lambda: breaking.sql(
        ("WHEN k.cancel_us IS NOT NULL THEN", "WHEN k.cancel_us IS NOT NULL AND in_kind <> 'retry' THEN"), only=FAILED
    ),
    "results that are not stored": lambda: breaking.sql(
        ("in_digest AS result_digest", "NULL AS result_digest"), only=SUCCEEDED
    ),
    "runs that are never due again": lambda: breaking.sql(
        ("+ e.in_delay", "+ e.in_delay + 864000000000000"),
        ("e.in_delay <= 0", "e.in_delay < 0"),
        only=FAILED,
    ),
    "keys that are forgotten early": lambda: mock.patch.object(
        submit, "run_key", lambda *asked: run_key(*asked[:-1], asked[-1] // 1_000_000_000)
    ),
    "reservations that do not count": lambda: breaking.sql(("AND NOT consumed", "AND consumed"), only=USAGE),
    "runs that do not count while they run": lambda: breaking.sql(
        ("count(*) FROM semel_active WHERE", "count(*) FROM semel_active WHERE lease_until_us IS NULL AND"), only=USAGE
    ),
    "runs that count for ever": lambda: breaking.sql(
        ("count(*) FROM semel_active", "count(*) FROM semel_runs"), only=USAGE
    ),
    "reservations that never expire": lambda: breaking.sql(
        ("AND expires_us >= ", "AND expires_us + 864000000000000 >= "), only=USAGE
    ),
    "a slot that is given back twice": lambda: breaking.sql(
        ("AND semel_reservations.consumed IS", "OR 1 = 2 AND semel_reservations.consumed IS"),
        only="DELETE FROM semel_reservations WHERE semel_reservations.id =",
    ),
}
ON_POSTGRES: dict[str, Break] = {
    "a renewal without a fence": lambda: breaking.sql(UNFENCED_RUN, only=RENEWED),
    "results that are not stored": lambda: breaking.sql(
        (
            "nullif(decode(in_digest, 'hex'), sha256(convert_to(in_result, 'UTF8'))) AS result_digest",
            "CAST(NULL AS bytea) AS result_digest",
        ),
        only=SUCCEEDED,
    ),
}
"""Variants that need another change there: the row is locked by a query of its own first."""


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_runs_and_quotas_of_ours_are_right(kind: str, databases: Databases, tmp_path: Path) -> None:
    rules = run_rules(databases, kind, tmp_path, MANY_SEEDS, STEPS)
    assert dict(zip(MANY_SEEDS, rules, strict=True)) == dict.fromkeys(MANY_SEEDS, "")


def run_rules(databases: Databases, kind: str, folder: Path, seeds: Sequence[int], steps: int) -> list[str]:
    rules = []
    for seed in seeds:
        with databases.empty(kind) as database:
            rules += judged(iter([RunSchedule(database, folder, seed, steps).history()]))
    return rules


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
@pytest.mark.parametrize("name", RUNS)
def test_a_broken_verb_of_runs_and_quotas_is_caught(name: str, kind: str, databases: Databases, tmp_path: Path) -> None:
    broken = ON_POSTGRES.get(name, RUNS[name]) if kind == "postgres" else RUNS[name]
    with broken():
        rules = run_rules(databases, kind, tmp_path, SEEDS if kind == "sqlite" else SEEDS[:1], FEW)
    assert report(name, rules) * 2 > len(rules)


def both(one: Callable[[], Any], other: Callable[[], Any]) -> None:
    """Two threads, each with a context of its own."""
    with ThreadPoolExecutor(2) as pool:
        for turn in [pool.submit(copy_context().run, each) for each in (one, other)]:
            turn.result()


NO_LOCK = ("pg_advisory_xact_lock(hashtextextended(person, 7301))", "person")
NO_COMPARE = (
    ("AND k.fence = r.was_fence AND k.state = r.was_state AND k.lease_until_us = r.was_until", ""),
    ("AND k.key = r.key AND k.fence = r.was_fence", "AND k.key = r.key"),
    ("SKIP LOCKED", ""),
)


def racing_reservations(url: str, folder: Path) -> History:
    """Two users' threads reserve the last slot; each has counted before the other writes."""
    stores = [JobStore(url), JobStore(url)]
    racers = [RecordedJobStore(store, Recorder(folder, f"racer-{number}")) for number, store in enumerate(stores)]
    racers[0].jobs.release_reservation("warm up")
    racers[1].jobs.release_reservation("warm up")
    user = f"user {next(_numbers)}"
    both(*(partial(racer.reserve_job_slot, user, 1) for racer in racers))
    for store in stores:
        store.close()
    return read(folder)


def racing_takeover(url: str, folder: Path) -> History:
    """Two owners take over from a third; each has read the abandoned record before the other writes."""
    dead, *racers = [Actor.on(url, folder, name) for name in ("dead", "one", "two")]
    key = f"race {next(_numbers)}"
    dead.take(key, lease=0.001)
    time.sleep(0.002)  # the lease ends on the server's own clock
    both(*(partial(racer.take, key, lease=60) for racer in racers))
    for actor in (dead, *racers):
        actor.close()
    return read(folder)


RACES: dict[str, tuple[Callable[[str, Path], History], str, Break]] = {
    "reservations without a lock": (
        racing_reservations,
        "INSERT INTO semel_reservations",
        lambda: breaking.sql(NO_LOCK),
    ),
    "a takeover that does not compare": (
        racing_takeover,
        "was_fence",
        lambda: breaking.sql(*NO_COMPARE, only="was_fence"),
    ),
}


@pytest.mark.parametrize("name", RACES)
def test_a_race_that_a_lock_prevents_is_caught_without_it(name: str, urls: StoreUrls, tmp_path: Path) -> None:
    race, before, broken = RACES[name]
    rules = []
    for number in range(3):
        with broken(), breaking.meeting(before):
            rules += judged(iter([race(urls["postgres"], tmp_path / f"{number}")]))
    assert report(name, rules) == len(rules)
    assert judged(iter([race(urls["postgres"], tmp_path / "right")])) == [""]
