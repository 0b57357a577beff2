"""Whatever is asked of a store, in whatever order and wherever its clock jumps, it answers as the memory store does."""

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from msgspec import structs

from semel import Granted, InFlight, Mismatch, Record, Replay, Unknown, Verdict
from semel._concurrency.sync import run_sync
from semel.once.store import ClaimRequest, Complete, KeyRef, OutcomeData, Release, Renew, Store
from semel.once.stores import open_store
from semel.once.stores.memory import MemoryStore
from semel.testing import FakeClock
from support.databases import SHARED_KINDS, store_urls

T = TypeVar("T")
Run = Callable[[Coroutine[Any, Any, Any]], Any]

SECOND = 1_000_000
START = 1_700_000_000.0
FORMS = [f"{kind}-{form}" for kind in SHARED_KINDS for form in ("blocking", "async")]

# Redis drops records by its own clock a minute after their end, so no time here is shorter than the test takes.
LEASES = [60 * SECOND, 120 * SECOND, 600 * SECOND]
TTLS = [60 * SECOND, 180 * SECOND, 900 * SECOND]
JUMPS = [-700, -61, -1e-6, 1e-6, 1, 59.999999, 60, 60.000001, 61, 120, 180.000001, 600, 1000]
PRINTS = ["", "1:a", "1:b", "2:a", "text"]
KEYS = ["a", "b", "ключ {0}:*"]


@dataclass(frozen=True)
class Ask:
    """One request of a batch of claims. ``again``: instead, an earlier one is sent once more, as it was."""

    key: str
    scope: int
    fingerprint: str
    lease_us: int
    ttl_us: int
    unknown: bool
    waiting: bool
    resolving: bool
    done: OutcomeData | None
    again: int | None


@dataclass(frozen=True)
class Own:
    """What the owner of an earlier claim asks; ``forged``: with a fence that nobody was ever given."""

    claim: int
    forged: bool
    lease_us: int
    done: OutcomeData


@dataclass(frozen=True)
class Step:
    """One verb with its batch, or a jump of the clock."""

    verb: str
    asks: tuple[Ask, ...] = ()
    owns: tuple[Own, ...] = ()
    limit: int = 1000
    seconds: float = 0


value_ttls = st.sampled_from([None, 60 * SECOND, 200 * SECOND])
dones = st.builds(OutcomeData, st.sampled_from(["value", "seen", "error"]), st.binary(max_size=8), value_ttls)
asks = st.builds(
    Ask,
    key=st.sampled_from(KEYS),
    scope=st.integers(0, 1),
    fingerprint=st.sampled_from(PRINTS),
    lease_us=st.sampled_from(LEASES),
    ttl_us=st.sampled_from(TTLS),
    unknown=st.booleans(),
    waiting=st.booleans(),
    resolving=st.booleans(),
    done=st.none() | dones,
    again=st.none() | st.integers(0, 20),
)
owns = st.builds(
    Own, claim=st.integers(0, 20), forged=st.just(False) | st.booleans(), lease_us=st.sampled_from(LEASES), done=dones
)
owned = st.lists(owns, min_size=1, max_size=4).map(tuple)
steps = st.one_of(
    st.builds(Step, st.just("claim"), asks=st.lists(asks, min_size=1, max_size=4).map(tuple)),
    st.builds(Step, st.sampled_from(["complete", "release", "renew"]), owns=owned),
    st.builds(Step, st.just("jump"), seconds=st.sampled_from(JUMPS)),
    st.builds(Step, st.just("purge"), limit=st.sampled_from([1, 1000])),
)


@dataclass
class Side:
    """A store, and how the fences of each key are named: by the order of their first appearance."""

    store: Store
    run: Run
    fences: defaultdict[KeyRef, list[int]] = field(default_factory=lambda: defaultdict(list))

    def rank(self, ref: KeyRef, fence: int) -> int:
        known = self.fences[ref]
        if fence not in known:
            assert fence > max(known, default=0), "the fence of a key strictly grows"
            known.append(fence)
        return known.index(fence)


@dataclass(frozen=True)
class Given:
    """A claim that both sides granted, with the fence that each gave."""

    ref: KeyRef
    fences: tuple[int, int]


class Comparison:
    """Asks both stores the same and compares what they say."""

    def __init__(self, oracle: Side, store: Side, clock: FakeClock, scopes: Sequence[str], *, keeps_released: bool):
        self.sides = (oracle, store)
        self.clock = clock
        self.refs = [KeyRef(scope, key) for scope in scopes for key in KEYS]
        self.scopes = scopes
        self.keeps_released = keeps_released
        self.given: list[Given] = []
        self.sent: list[ClaimRequest] = []
        self.released = 0

    def take(self, step: Step) -> None:
        getattr(self, step.verb)(step)
        self.look()

    def jump(self, step: Step) -> None:
        self.clock.advance(step.seconds)

    def claim(self, step: Step) -> None:
        requests = [self.request(ask) for ask in step.asks]
        self.sent += requests
        answers = [side.run(side.store.claim([structs.replace(each) for each in requests])) for side in self.sides]
        for request, expected, got in zip(requests, *answers, strict=True):
            self.note(request, expected, got)

    def request(self, ask: Ask) -> ClaimRequest:
        if ask.again is not None and self.sent:
            return self.sent[ask.again % len(self.sent)]
        scope = self.scopes[ask.scope]
        return ClaimRequest(
            scope,
            ask.key,
            ask.fingerprint,
            f"attempt {len(self.sent)} {next(unique)}",
            ask.lease_us,
            ask.ttl_us,
            ask.unknown,
            ask.waiting,
            ask.resolving,
            ask.done,
        )

    def note(self, request: ClaimRequest, expected: Verdict, got: Verdict) -> None:
        ref = KeyRef(request.scope, request.key)
        known = len(self.sides[0].fences[ref])
        assert self.plain(self.sides[1], ref, got) == self.plain(self.sides[0], ref, expected), request
        if len(self.sides[0].fences[ref]) > known:
            assert isinstance(expected, Granted)
            assert isinstance(got, Granted)
            assert got.reason == expected.reason, request
            self.given.append(Given(ref, (expected.claim.fence, got.claim.fence)))

    @staticmethod
    def plain(side: Side, ref: KeyRef, verdict: Verdict) -> tuple[object, ...]:
        match verdict:
            case Granted(claim):
                return "granted", structs.replace(claim, fence=side.rank(ref, claim.fence))
            case Replay(outcome):
                return "replay", structs.replace(outcome, fence=side.rank(ref, outcome.fence))
            case InFlight(retry_after, fence):
                assert retry_after > 0
                return "in flight", retry_after, side.rank(ref, fence)
            case Mismatch(fingerprint):
                return "mismatch", fingerprint
            case Unknown(fence, lease_until_us):
                return "unknown", side.rank(ref, fence), lease_until_us

    def renew(self, step: Step) -> None:
        def ask(given: Given, fence: int, own: Own) -> Renew:
            return Renew(given.ref.scope, given.ref.key, fence, own.lease_us)

        self.owned(step, ask, lambda store: store.renew)

    def complete(self, step: Step) -> None:
        def ask(given: Given, fence: int, own: Own) -> Complete:
            return Complete(given.ref.scope, given.ref.key, fence, own.done)

        self.owned(step, ask, lambda store: store.complete)

    def release(self, step: Step) -> None:
        def ask(given: Given, fence: int, own: Own) -> Release:
            return Release(given.ref.scope, given.ref.key, fence)

        self.owned(step, ask, lambda store: store.release)
        self.released += len(step.owns)

    def owned(
        self, step: Step, ask: Callable[[Given, int, Own], T], verb: Callable[[Store], Callable[[list[T]], Any]]
    ) -> None:
        if not self.given:
            return
        # One for each key: only claims of one key in one batch are promised an order.
        chosen = {self.given[own.claim % len(self.given)].ref: own for own in step.owns}
        answers = []
        for at, side in enumerate(self.sides):
            batch = []
            for own in chosen.values():
                claim = self.given[own.claim % len(self.given)]
                batch.append(ask(claim, 0 if own.forged else claim.fences[at], own))
            answers.append(side.run(verb(side.store)(batch)))
        assert answers[1] == answers[0]

    def purge(self, step: Step) -> None:
        expected, got = (self.purge_all(side, step.limit) for side in self.sides)
        # PostgreSQL keeps a released row for a while, and counts it when it goes.
        assert expected <= got <= expected + (self.released if self.keeps_released else 0)

    @staticmethod
    def purge_all(side: Side, limit: int) -> int:
        """Fewer than the limit means that nothing is left."""
        total = 0
        while True:
            removed: int = side.run(side.store.purge(limit))
            assert removed <= limit
            total += removed
            if removed < limit:
                return total

    def look(self) -> None:
        """The records of all keys are the same."""
        oracle, store = self.sides
        expected, got = (side.run(side.store.get(self.refs)) for side in self.sides)
        assert [self.seen(store, each) for each in got] == [self.seen(oracle, each) for each in expected]

    def count(self) -> None:
        """What is held is the same, but for what expired: stores differ in when it goes."""
        expected, got = (structs.replace(side.run(side.store.stats()), expired=0) for side in self.sides)
        assert got == expected

    @staticmethod
    def seen(side: Side, record: Record | None) -> tuple[object, ...] | None:
        if record is None:
            return None
        outcome = record.outcome
        rank = side.rank(KeyRef(record.scope, record.key), record.fence)
        told = structs.asdict(record) | {"fence": rank, "unknown": bool(record.unknown)}
        del told["data"], told["value_until_us"]  # a purge may drop them or not; what counts is what the outcome says
        return told, record.status, record.lease_left, None if outcome is None else outcome.data


unique = itertools.count()


@dataclass
class Place:
    """A store to compare, and the means to call it."""

    store: Store
    run: Run
    clock: FakeClock
    keeps_released: bool


@pytest.fixture(scope="module", params=FORMS)
def shared_place(request: pytest.FixtureRequest) -> Iterator[Place]:
    kind, form = request.param.split("-")
    clock = FakeClock(START)
    with ExitStack() as cleanup:
        url = cleanup.enter_context(store_urls(request))[kind]
        run: Run = cleanup.enter_context(asyncio.Runner()).run if form == "async" else run_sync
        store = open_store(url, is_async=form == "async", clock=clock)
        cleanup.callback(lambda: run(store.close()))
        yield Place(store, run, clock, keeps_released=kind == "postgres")


@pytest.fixture
def place(shared_place: Place) -> Iterator[Place]:
    """An empty store, whatever ran before: the order of tests depends on which process is free."""
    shared_place.clock.us = round(START * 1e6)
    yield shared_place
    empty(shared_place)


def empty(place: Place) -> None:
    """Remove all records, however far the clock was put forward and back."""
    place.clock.us = round((START + 10**9) * 1e6)
    while place.run(place.store.purge(1000)) == 1000:
        pass


PURGE = Step("purge")
LONG_LEASE = Step("claim", asks=(Ask("a", 0, "", 600 * SECOND, 60 * SECOND, False, False, False, None, None),))
OWN = Own(0, False, 120 * SECOND, OutcomeData("seen", b"", None))
RENEWAL, COMPLETION = Step("renew", owns=(OWN,)), Step("complete", owns=(OWN,))
BEFORE = [LONG_LEASE, Step("jump", seconds=100), PURGE]
"""The retention is over, and the lease is not."""
SHORTER_BY_RENEWAL = [*BEFORE, RENEWAL, Step("jump", seconds=300), PURGE]
SHORTER_BY_OUTCOME = [*BEFORE, COMPLETION, Step("jump", seconds=300), PURGE]
SHORTER_BY_CLOCK = [*BEFORE, Step("jump", seconds=-700), LONG_LEASE, Step("jump", seconds=800), PURGE]


@settings(
    max_examples=40,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(st.lists(st.lists(steps, min_size=1, max_size=8), min_size=1, max_size=6).map(lambda parts: list(chain(*parts))))
@example(SHORTER_BY_RENEWAL)
@example(SHORTER_BY_OUTCOME)
@example(SHORTER_BY_CLOCK)
def test_a_store_answers_as_the_memory_store_does(place: Place, told: list[Step]) -> None:
    """Given both stores empty, when both are told the same, then verdicts, fences, records and purges agree."""
    clock = place.clock
    clock.us = round(START * 1e6)
    number = next(unique)
    compared = Comparison(
        Side(MemoryStore(clock), run_sync),
        Side(place.store, place.run),
        clock,
        [f"example {number}", f"example {number}:x"],
        keeps_released=place.keeps_released,
    )
    try:
        for step in told:
            compared.take(step)
        compared.count()
    finally:
        empty(place)


def test_claims_of_one_key_in_one_batch_are_decided_in_their_order(place: Place) -> None:
    """The second sees what the first has done, and not what both have read."""
    key = f"example {next(unique)}"

    def claim(attempt: str, *, unknown: bool = False) -> ClaimRequest:
        return ClaimRequest("scope", key, "", attempt, lease_us=60 * 10**6, ttl_us=600 * 10**6, unknown=unknown)

    place.run(place.store.claim([claim("lost")]))
    place.clock.advance(61)
    first, second = place.run(place.store.claim([claim("first"), claim("second", unknown=True)]))
    assert isinstance(first, Granted)
    assert isinstance(second, InFlight)
