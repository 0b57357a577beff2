"""The product's memory store as a function: a record and a request in, an answer and a record out.

Times are ticks from now, so that one record stands for all that differ only in when they were made. The store is real
and decides by :mod:`semel.once.rules`; every distinct question is asked once and its answer is remembered.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from semel._concurrency.sync import run_sync
from semel.once.rules import gone
from semel.once.store import ClaimRequest, Complete, OutcomeData, Release, Renew
from semel.once.stores.memory import MemoryStore
from semel.types import Granted, InFlight, Record, Replay, Unknown, Verdict

LEASE, TTL = 2, 3
"""The lease and the retention of every claim, in ticks."""
NOW = 1000
SCOPE, KEY = "scope", "key"
MINE, NOBODY = "mine", "nobody"
"""The attempt that asks, and any other."""


class Row(NamedTuple):
    """A record. ``outcome`` is the fence of the owner that made it; 0 while there is none."""

    state: str
    fence: int
    unknown: bool
    lease: int
    expires: int
    outcome: int = 0


class Key(NamedTuple):
    """What the store has: the key's record, and the last fence that it gave."""

    row: Row | None = None
    last_fence: int = 0


class Answer(NamedTuple):
    """What a verb returned, and what the store has afterwards. ``mine``: the record belongs to the asking attempt."""

    said: str
    key: Key
    mine: bool = False
    fence: int = 0
    lease: int = 0
    outcome: int = 0


class ModelStore(MemoryStore):
    """A memory store that can be loaded with a key, and read. The broken stores are its subclasses."""

    def __init__(self, key: Key, *, mine: bool = False) -> None:
        super().__init__(clock=lambda: NOW)
        self._fence = key.last_fence
        if key.row is not None:
            self.record = to_record(key.row, mine=mine)

    @property
    def record(self) -> Record | None:
        return self._scopes.get(SCOPE, {}).get(KEY)

    @record.setter
    def record(self, record: Record | None) -> None:
        self._scopes = {} if record is None else {SCOPE: {KEY: record}}
        if record is not None:
            self._file(record, 0)

    def contents(self) -> Key:
        """The key as it is now."""
        return Key(None if self.record is None else to_row(self.record), self._fence)


def to_record(row: Row, *, mine: bool) -> Record:
    return Record(
        scope=SCOPE,
        key=KEY,
        fingerprint="",
        state="completed" if row.state == "completed" else "claimed",
        fence=row.fence,
        attempt=MINE if mine else NOBODY,
        unknown=row.unknown,
        created_us=NOW + row.expires - TTL,
        lease_us=LEASE,
        lease_until_us=NOW + row.lease,
        expires_us=NOW + row.expires,
        kind="value" if row.outcome else "",
        data=str(row.outcome).encode() if row.outcome else None,
    )


def to_row(record: Record) -> Row:
    lease, expires = record.lease_until_us - NOW, record.expires_us - NOW
    outcome = int(record.data) if record.data else 0
    return shortened(Row(record.state, record.fence, record.unknown, lease, expires, outcome))


def shortened(row: Row) -> Row:
    """The row without what makes no difference any more, such as how long ago its lease ended.

    ``test_keys_on_stores.py`` shows that this is exact: real stores, whose time only grows, go the same ways.
    """
    if is_gone(row):
        return row._replace(lease=-1, expires=-1)
    if row.state == "completed":
        return row._replace(lease=0)
    if row.lease <= row.expires:
        return row._replace(lease=max(row.lease, 0))
    return row._replace(expires=min(-1, row.lease - 1)) if row.expires < 0 else row


@cache
def is_gone(row: Row) -> bool:
    """Whether the record's time is over, by the product's rule."""
    return gone(to_record(row, mine=False), NOW)


@cache
def later(key: Key) -> Key:
    """The key a tick later."""
    if key.row is None:
        return key
    return key._replace(row=shortened(key.row._replace(lease=key.row.lease - 1, expires=key.row.expires - 1)))


class KeyVerbs:
    """The verbs of a store, remembered."""

    def __init__(self, store: type[ModelStore] = ModelStore) -> None:
        self._store = store
        self.claim = cache(self._claim)
        self.renew = cache(self._renew)
        self.complete = cache(self._complete)
        self.release = cache(self._release)
        self.purge = cache(self._purge)

    def _claim(self, key: Key, *, mine: bool, unknown: bool, resolving: bool = False) -> Answer:
        store = self._store(key, mine=mine)
        request = ClaimRequest(SCOPE, KEY, "", MINE, LEASE, TTL, unknown, resolving=resolving)
        (verdict,) = run_sync(store.claim([request]))
        owned = store.record is not None and store.record.attempt == MINE
        return told(verdict)._replace(key=store.contents(), mine=owned)

    def _renew(self, key: Key, fence: int) -> Answer:
        store = self._store(key)
        (until,) = run_sync(store.renew([Renew(SCOPE, KEY, fence, LEASE)]))
        return Answer(
            "lost" if until is None else "renewed", store.contents(), lease=0 if until is None else until - NOW
        )

    def _complete(self, key: Key, fence: int) -> Answer:
        store = self._store(key)
        done = OutcomeData("value", str(fence).encode())
        (accepted,) = run_sync(store.complete([Complete(SCOPE, KEY, fence, done)]))
        return Answer("completed" if accepted else "lost", store.contents())

    def _release(self, key: Key, fence: int) -> Answer:
        store = self._store(key)
        (accepted,) = run_sync(store.release([Release(SCOPE, KEY, fence)]))
        return Answer("released" if accepted else "lost", store.contents())

    def _purge(self, key: Key) -> Key:
        store = self._store(key)
        run_sync(store.purge(10))
        return store.contents()


def told(verdict: Verdict, now: int = NOW, tick: int = 1) -> Answer:
    """What a verdict says, in ticks."""
    match verdict:
        case Granted(claim):
            return Answer("granted", Key(), fence=claim.fence, lease=(claim.lease_until_us - now) // tick)
        case Replay(outcome):
            return Answer("replay", Key(), outcome=int(outcome.data or 0))
        case InFlight(retry_after):
            return Answer("in flight", Key(), lease=round(retry_after * 1e6 / tick))
        case Unknown():
            return Answer("unknown", Key())
    raise AssertionError(verdict)
