"""What is counted and purged in a SQLite file to the microsecond, and what a transaction of the user's own sees."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import create_engine, event, make_url

from semel import Granted, Once
from semel._concurrency.sync import run_sync
from semel.db import open_database
from semel.once.store import Complete, Forget, ForgetScope, KeyRef, Release, Renew
from semel.once.stores.sqlite import SqliteStore
from semel.testing import FakeClock
from semel.testing.harness import claim_request, outcome_data
from semel.types import Held


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def once(sqlite_url: str, clock: FakeClock) -> Iterator[Once]:
    with Once(sqlite_url, clock=clock, collect=False) as once:
        yield once


def test_a_claim_whose_lease_ends_with_its_retention_is_gone_after_it(once: Once, clock: FakeClock) -> None:
    assert isinstance(once.claim("key", lease=60, ttl=60), Granted)
    clock.advance(60)
    assert (once.stats().held, once.purge()) == (Held(abandoned=1), 0)
    clock.us += 1
    assert (once.stats().held, once.purge()) == (Held(expired=1), 1)


def test_a_claim_whose_lease_ends_later_is_kept_for_one_more_retention(once: Once, clock: FakeClock) -> None:
    assert isinstance(once.claim("key", lease=100, ttl=60), Granted)
    clock.advance(160)
    assert (once.stats().held, once.purge()) == (Held(abandoned=1), 0)
    clock.us += 1
    assert (once.stats().held, once.purge()) == (Held(expired=1), 1)


VERBS: dict[str, Callable[[SqliteStore], Any]] = {
    "claim": lambda store: store.claim([claim_request()]),
    "together": lambda store: store.together([claim_request()]),
    "renew": lambda store: store.renew([Renew("scope", "key", 1, 1)]),
    "complete": lambda store: store.complete([Complete("scope", "key", 1, outcome_data())]),
    "release": lambda store: store.release([Release("scope", "key", 1)]),
    "forget": lambda store: store.forget([Forget("scope", "key", 1)]),
    "forget_scope": lambda store: store.forget_scope(ForgetScope("scope", 1)),
    "get": lambda store: store.get([KeyRef("scope", "key")]),
    "purge": lambda store: store.purge(1),
    "stats": lambda store: store.stats(),
}


@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS.keys())
def test_the_first_verb_creates_the_tables(sqlite_url: str, verb: Callable[[SqliteStore], Any]) -> None:
    store = SqliteStore(open_database(make_url(sqlite_url), is_async=False))
    assert not store.ready
    run_sync(verb(store))
    assert store.ready
    run_sync(store.close())


def test_a_claim_in_a_users_transaction_takes_the_write_lock_before_it_reads(once: Once, sqlite_url: str) -> None:
    """What it has read could otherwise be changed by another before it writes, and its write would fail."""
    once.open()
    engine = create_engine(sqlite_url)
    sent: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda _conn, _cursor, statement, *_: sent.append(statement))
    with engine.begin() as connection:
        assert isinstance(once.on(connection).claim("key"), Granted)
    assert [statement.split()[0] for statement in sent if "semel_" in statement] == [
        "UPDATE",
        "SELECT",
        "UPDATE",
        "INSERT",
    ]
    engine.dispose()
