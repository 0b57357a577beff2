"""Keys in a SQLite file: durable (synchronous=FULL), shared by the threads and processes of one host.

A write transaction takes the file's one write lock at its first statement, so "read, then write" is atomic: every verb
reads its keys, judges them as the memory store does, and writes all changes together.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

from msgspec.structs import astuple
from sqlalchemy import (
    BigInteger,
    Connection,
    and_,
    bindparam,
    case,
    delete,
    func,
    not_,
    select,
    tuple_,
    update,
)

from semel.db import migrate
from semel.db.database import Database
from semel.db.schema import keys
from semel.once.rules import claim_of, gone, grant, judge, rewind
from semel.once.store import (
    ClaimRequest,
    Clock,
    Complete,
    Forget,
    ForgetScope,
    KeyRef,
    OnReleased,
    OutcomeData,
    Owned,
    Release,
    Renew,
)
from semel.types import Granted, Held, Record, Verdict

_COLUMNS = (
    "scope, key, fingerprint, state, fence, attempt, unknown, created_us, lease_us, lease_until_us, expires_us, "
    "completed_us, kind, value, value_until_us"
)
# The hot statements go to the driver as they are: binding by name would cost more than running them.
_READ = (
    f"SELECT k.{_COLUMNS.replace(', ', ', k.')} FROM json_each(?) AS place CROSS JOIN semel_keys AS k "
    "ON k.scope = json_extract(place.value, '$[0]') AND k.key = json_extract(place.value, '$[1]')"
)
_FENCES = "UPDATE semel_fence_counter SET last = last + ? RETURNING last"
_WRITE = f"INSERT OR REPLACE INTO semel_keys ({_COLUMNS}, awaited) VALUES ({'?, ' * 15}false)"
_HELD = "WHERE scope = ? AND key = ? AND fence = ? AND state = 'claimed'"
_LIVE = (
    f"{_HELD} AND (expires_us >= ? OR (lease_until_us > expires_us AND lease_until_us + expires_us - created_us >= ?))"
)
_COMPLETE = (
    "UPDATE semel_keys SET state = 'completed', completed_us = ?, kind = ?, value = ?, value_until_us = ?, "
    "expires_us = CASE WHEN ? BETWEEN created_us AND expires_us THEN expires_us ELSE ? + expires_us - created_us END "
    f"{_LIVE}"
)
_RENEW = f"UPDATE semel_keys SET lease_us = ?, lease_until_us = ? {_LIVE}"
_RELEASE = f"DELETE FROM semel_keys {_LIVE}"
_REWIND = f"UPDATE semel_keys SET lease_until_us = ? {_HELD}"
_IDLE = "(? OR state <> 'claimed' OR lease_until_us <= ?)"
_FORGET = f"DELETE FROM semel_keys WHERE scope = ? AND key = ? AND fence = ? AND {_IDLE}"
_FORGET_SCOPE = (
    "DELETE FROM semel_keys WHERE scope = ? AND key IN "
    f"(SELECT key FROM semel_keys WHERE scope = ? AND {_IDLE} ORDER BY key LIMIT ?)"
)

_now = bindparam("now", type_=BigInteger)
_outlasts = and_(
    keys.c.state == "claimed",
    keys.c.lease_until_us > keys.c.expires_us,
    keys.c.lease_until_us + keys.c.expires_us - keys.c.created_us >= _now,
)
_gone = and_(keys.c.expires_us < _now, not_(_outlasts))
_some_gone = select(keys.c.scope, keys.c.key).where(_gone).limit(bindparam("most"))
_some_faded = select(keys.c.scope, keys.c.key).where(keys.c.value_until_us < _now).limit(bindparam("most"))
_PURGE = delete(keys).where(tuple_(keys.c.scope, keys.c.key).in_(_some_gone))
_FADE = update(keys).where(tuple_(keys.c.scope, keys.c.key).in_(_some_faded)).values(value=None, value_until_us=None)
_STATUS = case(
    (_gone, "expired"),
    (keys.c.state == "completed", "completed"),
    (keys.c.lease_until_us > _now, "in_flight"),
    (keys.c.unknown, "unknown"),
    else_="abandoned",
)
_COUNT = select(_STATUS, func.count()).group_by(_STATUS)


class SqliteStore:
    """A store over a blocking database, one in a thread for an event loop, or a user's own transaction."""

    coalesce = True
    expires_itself = False
    dialect = "sqlite"

    def __init__(self, database: Database, clock: Clock | None = None) -> None:
        self._database = database
        self._clock = clock or _host_clock
        self.ready = False
        self._bound = False

    def bound_to(self, database: Database) -> SqliteStore:
        """The same keys inside a user's transaction."""
        twin = SqliteStore(database, self._clock)
        twin.ready = self.ready
        twin._bound = True
        return twin

    async def open(self) -> None:
        """Create the tables if they are missing."""
        await self._database.optimistic_write(migrate.bring_up)
        self.ready = True

    async def _prepare(self) -> None:
        if not self.ready:
            await self.open()

    async def claim(self, requests: Sequence[ClaimRequest]) -> list[Verdict]:
        # The verdict on a key that is done or in flight does not wait for the writer of the file.
        await self._prepare()
        if self._bound:
            return await self._database.write(_claim_writing, requests, self._clock)
        return await self._database.optimistic_write(claim, requests, self._clock)

    async def renew(self, requests: Sequence[Renew]) -> list[int | None]:
        await self._prepare()
        return await self._database.write(_renew, requests, self._clock)

    async def complete(self, requests: Sequence[Complete]) -> list[bool]:
        await self._prepare()
        return await self._database.write(_complete, requests, self._clock)

    async def release(self, requests: Sequence[Release]) -> list[bool]:
        await self._prepare()
        return await self._database.write(_release, requests, self._clock)

    async def forget(self, requests: Sequence[Forget]) -> list[bool]:
        await self._prepare()
        return await self._database.write(forget, requests, self._clock)

    async def forget_scope(self, request: ForgetScope) -> int:
        await self._prepare()
        return await self._database.write_many(_forget_scope, request, self._clock)

    async def together(self, requests: Sequence[ClaimRequest | Owned]) -> list[Any]:
        await self._prepare()
        if all(type(each) is ClaimRequest for each in requests):
            return await self._database.optimistic_write(claim, cast("Sequence[ClaimRequest]", requests), self._clock)
        return await self._database.write(_together, requests, self._clock)

    async def get(self, refs: Sequence[KeyRef]) -> list[Record | None]:
        await self._prepare()
        return await self._database.read(get, refs, self._clock)

    async def purge(self, limit: int) -> int:
        await self._prepare()
        return await self._database.write_many(purge, limit, self._clock)

    async def stats(self) -> Held:
        await self._prepare()
        return await self._database.read(_stats, self._clock())

    def watch(self, ring: OnReleased) -> None:
        """Does nothing: a file cannot notify, so waiters in other processes poll."""

    async def close(self) -> None:
        await self._database.close()


def _host_clock() -> int:
    return time.time_ns() // 1000


def _read(conn: Connection, wanted: Iterable[KeyRef | ClaimRequest | Owned]) -> dict[tuple[str, str], Record]:
    places = json.dumps(list({(ref.scope, ref.key) for ref in wanted}), ensure_ascii=False)
    records = {}
    for row in conn.exec_driver_sql(_READ, (places,)):
        record = records[row[0], row[1]] = Record(*row)
        record.unknown = bool(record.unknown)
    return records


def claim(conn: Connection, requests: Sequence[ClaimRequest], clock: Clock) -> list[Verdict]:
    """Claim keys, in the transaction of the connection: see ``Store.claim``."""
    records, now = _read(conn, requests), clock()
    if rewound := [record for record in records.values() if rewind(record, now)]:
        conn.exec_driver_sql(_REWIND, [(each.lease_until_us, each.scope, each.key, each.fence) for each in rewound])
    judged = [judge(records.get((request.scope, request.key)), request, now) for request in requests]
    free = sum(isinstance(verdict, str) for verdict in judged)
    fences = _draw(conn, free) if free else iter(())
    changed: dict[tuple[str, str], Record] = {}
    verdicts: list[Verdict] = []
    for request, first in zip(requests, judged, strict=True):
        place = (request.scope, request.key)
        verdict = judge(changed[place], request, now) if place in changed else first
        if isinstance(verdict, str):
            record = grant(request, changed.get(place) or records.get(place), verdict, next(fences), now)
            changed[place] = record
            verdict = Granted(claim_of(record), verdict)
        verdicts.append(verdict)
    if changed:
        conn.exec_driver_sql(_WRITE, [astuple(record)[:15] for record in changed.values()])
    return verdicts


def _claim_writing(conn: Connection, requests: Sequence[ClaimRequest], clock: Clock) -> list[Verdict]:
    """Claim in a user's transaction: take the write lock before the first read."""
    _draw(conn, 0)
    return claim(conn, requests, clock)


def _draw(conn: Connection, count: int) -> Iterator[int]:
    last: int = conn.exec_driver_sql(_FENCES, (count,)).scalar_one()
    return iter(range(last - count + 1, last + 1))


def _together(conn: Connection, requests: Sequence[ClaimRequest | Owned], clock: Clock) -> list[Any]:
    answers: list[Any] = [None] * len(requests)
    for kind, verb in _VERBS.items():
        places = [place for place, request in enumerate(requests) if type(request) is kind]
        if places:
            for place, answer in zip(places, verb(conn, [requests[place] for place in places], clock), strict=True):
                answers[place] = answer
    return answers


def _renew(conn: Connection, requests: Sequence[Renew], clock: Clock) -> list[int | None]:
    now = clock()
    rows = [(each.lease_us, now + each.lease_us, each.scope, each.key, each.fence, now, now) for each in requests]
    if _all_changed(conn, _RENEW, rows):
        return [now + each.lease_us for each in requests]
    return [
        now + each.lease_us if record and record.fence == each.fence and record.state == "claimed" else None
        for each, record in zip(requests, _found(conn, requests, now), strict=True)
    ]


def _complete(conn: Connection, requests: Sequence[Complete], clock: Clock) -> list[bool]:
    now = clock()
    rows = [
        (now, done.kind, done.data, _fades(done, now), now, now, each.scope, each.key, each.fence, now, now)
        for each in requests
        for done in (each.done,)
    ]
    if _all_changed(conn, _COMPLETE, rows):
        return [True] * len(rows)
    found = _found(conn, requests, now)
    return [record is not None and record.fence == each.fence for each, record in zip(requests, found, strict=True)]


def _fades(done: OutcomeData, now: int) -> int | None:
    return None if done.value_ttl_us is None else now + done.value_ttl_us


def _release(conn: Connection, requests: Sequence[Release], clock: Clock) -> list[bool]:
    now = clock()
    if _all_changed(conn, _RELEASE, [(each.scope, each.key, each.fence, now, now) for each in requests]):
        return [True] * len(requests)
    found = _found(conn, requests, now)
    return [record is None or record.fence == each.fence for each, record in zip(requests, found, strict=True)]


def forget(conn: Connection, requests: Sequence[Forget], clock: Clock) -> list[bool]:
    """Make keys free, in the transaction of the connection: see ``Store.forget``."""
    now = clock()
    rows = [(each.scope, each.key, each.fence, each.force, now) for each in requests]
    if _all_changed(conn, _FORGET, rows):
        return [True] * len(requests)
    return [record is None for record in _found(conn, requests, now)]


def _forget_scope(conn: Connection, request: ForgetScope, clock: Clock) -> int:
    values = (request.scope, request.scope, request.force, clock(), request.limit)
    forgotten: int = conn.exec_driver_sql(_FORGET_SCOPE, values).rowcount
    return forgotten


def _all_changed(conn: Connection, statement: str, rows: list[tuple[Any, ...]]) -> bool:
    """Run the statement. True if it changed every row: all owners still held their keys, as nearly always."""
    changed: int = conn.exec_driver_sql(statement, rows).rowcount
    return changed == len(rows)


def _found(conn: Connection, wanted: Sequence[Owned], now: int) -> list[Record | None]:
    """The record of each request's key after the change; None if it is absent."""
    records = _read(conn, wanted)
    found = (records.get((each.scope, each.key)) for each in wanted)
    return [None if record is None or gone(record, now) else record for record in found]


_VERBS: dict[type, Callable[..., list[Any]]] = {
    Complete: _complete,
    Release: _release,
    Renew: _renew,
    ClaimRequest: claim,
}


def get(conn: Connection, refs: Sequence[KeyRef], clock: Clock) -> list[Record | None]:
    """Read the records of keys, in the transaction of the connection: see ``Store.get``."""
    records = _read(conn, refs)
    now = clock()
    for record in records.values():
        record.now_us = now
    found = (records.get((ref.scope, ref.key)) for ref in refs)
    return [None if record is None or gone(record, now) else record for record in found]


def purge(conn: Connection, limit: int, clock: Clock) -> int:
    """Remove records and values whose time is over, in the transaction of the connection."""
    now = clock()
    removed: int = conn.execute(_PURGE, {"now": now, "most": limit}).rowcount
    if removed < limit:
        removed += conn.execute(_FADE, {"now": now, "most": limit - removed}).rowcount
    return removed


def _stats(conn: Connection, now: int) -> Held:
    return Held(**{row[0]: row[1] for row in conn.execute(_COUNT, {"now": now})})
