"""What the memory store keeps for its collector: as little as is alive, and everything that will end."""

import time

import pytest

from semel import Granted, InFlight, Once, Unknown
from semel._concurrency.sync import run_sync
from semel.once.store import ClaimRequest, Complete, Forget, ForgetScope, KeyRef
from semel.once.stores.memory import MemoryStore
from semel.testing import FakeClock
from semel.testing.harness import KEY, SCOPE, claim_request, outcome_data, release_request, us


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(clock: FakeClock) -> MemoryStore:
    return MemoryStore(clock)


def filed(store: MemoryStore) -> int:
    """How many entries the collector has."""
    entries = sum(map(len, store._ends.values()))
    assert entries == store._filed
    return entries


def mark(store: MemoryStore, key: str, *, ttl: float, value_ttl: float | None = None) -> None:
    assert store.mark(SCOPE, key, b"data", us(ttl), None if value_ttl is None else us(value_ttl)) == "absent"


@pytest.mark.parametrize("url", ["memory://", "sqlite"])
def test_without_a_clock_the_hosts_time_is_used(url: str, sqlite_url: str) -> None:
    with Once(sqlite_url if url == "sqlite" else url, collect=False) as once:
        verdict = once.claim("key", lease=60)
        assert isinstance(verdict, Granted)
        assert verdict.claim.lease_until_us / 1e6 - 60 == pytest.approx(time.time(), abs=60)


def test_keys_that_were_released_are_not_kept_for_the_collector(store: MemoryStore, clock: FakeClock) -> None:
    """Their entries are dropped before they outnumber those of the living."""
    mark(store, "stays", ttl=60)
    for number in range(5000):
        (verdict,) = run_sync(store.claim([claim_request(f"key {number}", ttl=number + 1)]))
        assert isinstance(verdict, Granted)
        run_sync(store.release([release_request(verdict.claim)]))
        assert filed(store) <= 1004
    assert len(store._ends) <= 1004
    assert set(store._scopes) == {SCOPE}
    clock.advance(61)
    assert run_sync(store.purge(10)) == 1
    assert store._scopes == {}


def test_the_living_are_all_kept_for_the_collector(store: MemoryStore, clock: FakeClock) -> None:
    for number in range(5000):
        mark(store, f"key {number}", ttl=60 + number % 7)
    assert filed(store) == 5000
    clock.advance(60)
    assert run_sync(store.purge(10_000)) == 0
    clock.advance(8)
    assert [run_sync(store.purge(2000)) for _ in range(4)] == [2000, 2000, 1000, 0]
    assert (filed(store), store._scopes) == (0, {})


def test_an_entry_is_looked_at_in_the_second_in_which_it_ends(store: MemoryStore, clock: FakeClock) -> None:
    """The collector looks at what may have ended, and files again what has not."""
    mark(store, "key", ttl=60, value_ttl=10)
    assert list(store._ends) == [(clock.us + us(10)) // 1_000_000]
    clock.advance(10)
    assert run_sync(store.purge(10)) == 0
    clock.us += 1
    assert run_sync(store.purge(10)) == 1
    assert store._scopes[SCOPE]["key"].data is None
    assert list(store._ends) == [store._scopes[SCOPE]["key"].expires_us // 1_000_000]
    clock.advance(49)
    assert run_sync(store.purge(10)) == 0
    clock.advance(1)
    assert run_sync(store.purge(10)) == 1
    assert filed(store) == 0


def test_a_value_that_fades_after_its_key_does_not_keep_it(store: MemoryStore, clock: FakeClock) -> None:
    mark(store, "key", ttl=10, value_ttl=60)
    clock.advance(11)
    assert run_sync(store.purge(10)) == 1


def test_a_record_that_is_completed_late_is_filed_again(store: MemoryStore, clock: FakeClock) -> None:
    request = claim_request(ttl=10, lease=100)
    (verdict,) = run_sync(store.claim([request]))
    assert isinstance(verdict, Granted)
    clock.advance(50)
    assert run_sync(store.purge(10)) == 0
    assert run_sync(store.complete([Complete(SCOPE, KEY, verdict.claim.fence, outcome_data(7))])) == [True]
    clock.advance(10)
    assert run_sync(store.purge(10)) == 0
    clock.advance(1)
    assert run_sync(store.purge(10)) == 1


def test_an_outcome_that_changes_nothing_about_the_end_is_not_filed_again(store: MemoryStore) -> None:
    (verdict,) = run_sync(store.claim([claim_request()]))
    assert isinstance(verdict, Granted)
    assert run_sync(store.complete([Complete(SCOPE, KEY, verdict.claim.fence, outcome_data(7))])) == [True]
    assert filed(store) == 1


def test_a_request_takes_nothing_from_anybody_unless_it_says_so(store: MemoryStore, clock: FakeClock) -> None:
    """As whoever writes to a store by hand gets it."""
    lost = claim_request("lost", lease=60, unknown=True)
    (verdict, _) = run_sync(store.claim([claim_request(lease=100), lost]))
    assert isinstance(verdict, Granted)
    plain = ClaimRequest(SCOPE, KEY, "", "another", us(60), us(60))
    assert not plain.waiting
    assert [type(each) for each in run_sync(store.claim([plain]))] == [InFlight]
    assert run_sync(store.forget([Forget(SCOPE, KEY, verdict.claim.fence)])) == [False]
    clock.advance(60)
    assert run_sync(store.forget_scope(ForgetScope(SCOPE, 1000))) == 1, "the lost one"
    run_sync(store.claim([lost]))
    clock.advance(60)
    unresolving = ClaimRequest(SCOPE, "lost", "", "another", us(60), us(60))
    assert [type(each) for each in run_sync(store.claim([unresolving]))] == [Unknown]
    assert [type(each) for each in run_sync(store.claim([plain]))] == [Granted]
    (record,) = run_sync(store.get([KeyRef(SCOPE, KEY)]))
    assert record is not None
    assert not record.unknown
