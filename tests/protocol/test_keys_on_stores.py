"""The model of claims is no other protocol than the product's: every step of it is taken on every real store.

The model counts time in ticks from now and forgets how great a fence is; a store has a clock and numbers that only
grow. Here both go the same ways, and after each step the answer and the record are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import NamedTuple

import pytest

from protocol.explorer import show
from protocol.key_store import LEASE, TTL, Answer, Key, KeyVerbs, Row, is_gone, later, shortened, told
from protocol.tours import tours
from semel._concurrency.sync import run_sync
from semel.once.store import ClaimRequest, Complete, KeyRef, OutcomeData, Release, Renew, Store
from semel.once.stores import open_store
from semel.testing import FakeClock
from support.databases import KINDS, StoreUrls

TICK = 60
"""Seconds of a tick: longer than the test, as Redis also drops records by its own clock."""
US = TICK * 1_000_000
SCOPE = "protocol"


class Verb(NamedTuple):
    """``current``: by the newest fence, or for a claim by the attempt that has the record, and not by another."""

    name: str
    current: bool = True
    unknown: bool = False
    resolving: bool = False


VERBS = [
    *(Verb("claim", *flags) for flags in product((True, False), repeat=3)),
    *(Verb(*each) for each in product(("renew", "complete", "release"), (True, False))),
    Verb("purge"),
    Verb("tick"),
]
START = Key(None, 2)
"""No record, and two fences that were given before."""
_verbs = KeyVerbs()


def answer_of(key: Key, verb: Verb) -> Answer:
    """What the model says to the verb."""
    if verb.name == "tick":
        return Answer("", later(key))
    if verb.name == "purge":
        return Answer("", _verbs.purge(key))
    if verb.name == "claim":
        return _verbs.claim(key, mine=verb.current, unknown=verb.unknown, resolving=verb.resolving)
    answer: Answer = getattr(_verbs, verb.name)(key, 2 if verb.current else 1)
    return answer


def after(key: Key, verb: Verb) -> Key:
    row = answer_of(key, verb).key.row
    return Key(row and row._replace(fence=2, outcome=2 if row.outcome else 0), 2)


class RealKey:
    """A key of a real store, whose clock only goes on."""

    def __init__(self, store: Store, clock: FakeClock, key: str) -> None:
        self._store = store
        self._clock = clock
        self._key = key
        self._attempts = 0
        self._fence = 0

    def do(self, verb: Verb) -> Answer:
        """What the store says to the verb, in ticks and without its key."""
        match verb.name:
            case "tick":
                self._clock.advance(TICK)
            case "purge":
                run_sync(self._store.purge(100))
            case "claim":
                return self._claim(verb)
            case _:
                return self._write(verb.name, self._fence if verb.current else self._fence - 1)
        return Answer("", Key())

    def _claim(self, verb: Verb) -> Answer:
        attempt = f"{self._attempts if verb.current else self._attempts + 1}"
        asked = ClaimRequest(SCOPE, self._key, "", attempt, LEASE * US, TTL * US, verb.unknown, False, verb.resolving)
        (verdict,) = run_sync(self._store.claim([asked]))
        answer = told(verdict, self._clock.us, US)
        if answer.said == "granted":
            self._attempts += not verb.current
            assert answer.fence >= self._fence
            self._fence = answer.fence
        return answer

    def _write(self, name: str, fence: int) -> Answer:
        if name == "renew":
            (until,) = run_sync(self._store.renew([Renew(SCOPE, self._key, fence, LEASE * US)]))
            lost = until is None
            return Answer(
                "lost" if lost else "renewed", Key(), lease=0 if until is None else (until - self._clock.us) // US
            )
        if name == "complete":
            done = OutcomeData("value", str(fence).encode())
            (accepted,) = run_sync(self._store.complete([Complete(SCOPE, self._key, fence, done)]))
            return Answer("completed" if accepted else "lost", Key())
        (accepted,) = run_sync(self._store.release([Release(SCOPE, self._key, fence)]))
        return Answer("released" if accepted else "lost", Key())

    def row(self) -> Row | None:
        """The record as the model has it, if there is one that is not gone."""
        (record,) = run_sync(self._store.get([KeyRef(SCOPE, self._key)]))
        if record is None:
            return None
        assert record.fence == self._fence
        assert record.data is None or int(record.data) == self._fence
        lease_left, left = (record.lease_until_us - self._clock.us) // US, (record.expires_us - self._clock.us) // US
        return shortened(Row(record.state, 2, record.unknown, lease_left, left, 2 if record.data is not None else 0))


@contextmanager
def opened(url: str, clock: FakeClock) -> Iterator[Store]:
    store = open_store(url, is_async=False, clock=clock)
    run_sync(store.open())
    try:
        yield store
    finally:
        run_sync(store.close())


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_of_keys_takes_every_step_of_the_model(kind: str, urls: StoreUrls) -> None:
    ways = tours(START, VERBS, after)
    clock = FakeClock()
    with opened(urls[kind], clock) as store:
        for number, way in enumerate(ways):
            real, key = RealKey(store, clock, f"{number}"), START
            for place, verb in enumerate(way):
                asked, key = answer_of(key, verb), after(key, verb)
                assert _heard(real.do(verb), key) == _heard(asked, key), f"{way[: place + 1]}"
                row = None if key.row is None or is_gone(key.row) else key.row
                assert real.row() == row, f"{way[: place + 1]}"
    show(f"{kind}: {sum(map(len, ways)):,} steps")


def _heard(answer: Answer, key: Key) -> tuple[str, int, bool]:
    """What of an answer must be the same: also its lease, while there is a claim that it is about."""
    claimed = key.row is not None and key.row.state == "claimed"
    return answer.said, answer.lease if claimed else 0, bool(answer.outcome)
