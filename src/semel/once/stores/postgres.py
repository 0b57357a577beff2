"""Keys in PostgreSQL: durable, shared by every host that reaches the database, on the database's clock.

Each statement takes a whole batch as arrays and commits by itself. A claim inserts first, since most keys are new.
Rows that exist already are read in a **second** statement (the first one's snapshot cannot see a row that was
committed meanwhile), judged by the rules, and, if they may be taken, updated by compare-and-set on what was read.

No two batches deadlock: a statement that waits for locks takes them in the order of the keys, and every other
statement skips locked rows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from threading import Event
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from sqlalchemy import URL, Connection, TextClause, exc, text

from semel._concurrency.listener import Listener, Subscribe
from semel._concurrency.runtime import deadline
from semel.db import migrate
from semel.db.database import Database, fetch
from semel.db.errors import LOCK_TIMEOUT, sqlstate
from semel.db.postgres import KEEPALIVE, is_left_open, is_lost
from semel.errors import StoreUnavailable
from semel.once.rules import fingerprint_for, gone, granted, judge, rewind
from semel.once.store import (
    ClaimRequest,
    Clock,
    Complete,
    Forget,
    ForgetScope,
    KeyRef,
    OnReleased,
    Owned,
    Release,
    Renew,
)
from semel.types import Held, InFlight, Reason, Record, Verdict

if TYPE_CHECKING:
    from semel.db.psycopg_connection import BoundedConnection

_log = logging.getLogger("semel.listener")

CHANNEL = "semel"
SEPARATOR = "\x1f"
"""Between scope and key in a notification; neither can contain a control character."""

_ROUNDS = 20

Terms: TypeAlias = dict[str, Any]
"""Parameters of every statement: the time, in tests, and the milliseconds to wait for a lock ("": as configured)."""

# A statement waits for a lock for a fifth of a second at most: semel's own connections are configured so, on a user's
# pool each statement sets it for itself, and a user's transaction keeps the user's settings.
_CLOCK = """clock AS MATERIALIZED (
  SELECT coalesce(CAST(:now AS bigint), (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS us,
         CASE WHEN CAST(:patience AS text) <> '' THEN set_config('lock_timeout', CAST(:patience AS text), true) END
)"""

_ASKED = {
    "scope": "text",
    "key": "text",
    "fingerprint": "text",
    "attempt": "text",
    "unknown": "boolean",
    "lease": "bigint",
    "ttl": "bigint",
    "state": "text",
    "kind": "text",
    "value": "bytea",
    "value_ttl": "bigint",
}
_OWNED = {"scope": "text", "key": "text", "fence": "bigint"}
_OUTCOME = {"kind": "text", "value": "bytea", "value_ttl": "bigint"}


def _many(columns: dict[str, str]) -> str:
    """A batch as rows ``r``, from one array per column."""
    arrays = ", ".join(f"CAST(:{name} AS {kind}[])" for name, kind in columns.items())
    return f"unnest({arrays}) AS r({', '.join(columns)})"


def _one(columns: dict[str, str]) -> str:
    """A batch of one as the row ``r``: a lone caller does not pay for arrays."""
    return f"(SELECT {', '.join(f'CAST(:{name} AS {kind}) AS {name}' for name, kind in columns.items())}) AS r"


def _insert_from(rows: str) -> TextClause:
    return text(f"""
WITH {_CLOCK}
INSERT INTO semel_keys (scope, key, fingerprint, state, fence, attempt, unknown, awaited, created_us, lease_us,
                        lease_until_us, expires_us, completed_us, kind, value, value_until_us)
SELECT r.scope, r.key, r.fingerprint, r.state, nextval('semel_fence'), r.attempt, r.unknown, false, us, r.lease,
       us + r.lease, us + r.ttl, CASE r.state WHEN 'completed' THEN us ELSE 0 END, r.kind, r.value, us + r.value_ttl
FROM clock, {rows}
ON CONFLICT DO NOTHING
RETURNING attempt, fence, created_us
""")


_INSERT, _INSERT_ONE = _insert_from(_many(_ASKED)), _insert_from(_one(_ASKED))

_TAKE = text(f"""
WITH {_CLOCK},
r AS MATERIALIZED (
  SELECT * FROM {_many({**_ASKED, "was_fence": "bigint", "was_state": "text", "was_until": "bigint"})}
),
held AS MATERIALIZED (
  SELECT k.scope, k.key FROM r JOIN semel_keys k ON k.scope = r.scope AND k.key = r.key AND k.fence = r.was_fence
  FOR UPDATE OF k SKIP LOCKED
)
UPDATE semel_keys k
SET fingerprint = r.fingerprint, state = r.state, fence = nextval('semel_fence'), attempt = r.attempt,
    unknown = r.unknown, awaited = false, created_us = us, lease_us = r.lease, lease_until_us = us + r.lease,
    expires_us = us + r.ttl, completed_us = CASE r.state WHEN 'completed' THEN us ELSE 0 END, kind = r.kind,
    value = r.value, value_until_us = us + r.value_ttl
FROM clock, held JOIN r ON r.scope = held.scope AND r.key = held.key
WHERE k.scope = r.scope AND k.key = r.key
  AND k.fence = r.was_fence AND k.state = r.was_state AND k.lease_until_us = r.was_until
RETURNING k.attempt, k.fence, k.created_us
""")

_READ = text(f"""
WITH {_CLOCK}
SELECT k.scope, k.key, k.fingerprint, k.state, k.fence, k.attempt, k.unknown, k.created_us, k.lease_us,
       k.lease_until_us, k.expires_us, k.completed_us, k.kind, k.value, k.value_until_us, clock.us
FROM clock, unnest(CAST(:scope AS text[]), CAST(:key AS text[])) AS r(scope, key)
JOIN semel_keys k ON k.scope = r.scope AND k.key = r.key
""")

_AWAIT = text("""
WITH held AS MATERIALIZED (
  SELECT k.scope, k.key FROM unnest(CAST(:scope AS text[]), CAST(:key AS text[])) AS r(scope, key)
  JOIN semel_keys k ON k.scope = r.scope AND k.key = r.key AND k.state = 'claimed' AND NOT k.awaited
  FOR UPDATE OF k SKIP LOCKED
)
UPDATE semel_keys k SET awaited = true FROM held
WHERE k.scope = held.scope AND k.key = held.key AND k.state = 'claimed'
""")


# The clock was set back. A locked row is skipped: its owner holds the lock, or another claim does the same update.
_REWIND = text(f"""
WITH {_CLOCK},
held AS MATERIALIZED (
  SELECT k.scope, k.key FROM unnest(CAST(:scope AS text[]), CAST(:key AS text[])) AS r(scope, key)
  JOIN semel_keys k ON k.scope = r.scope AND k.key = r.key
  FOR UPDATE OF k SKIP LOCKED
)
UPDATE semel_keys k SET lease_until_us = us + k.lease_us FROM clock, held
WHERE k.scope = held.scope AND k.key = held.key AND k.state = 'claimed' AND k.lease_until_us > us + k.lease_us
""")

_HOLDS = """k.scope = r.scope AND k.key = r.key AND k.fence = r.fence AND k.state = 'claimed' AND (k.expires_us >= us
  OR (k.lease_until_us > k.expires_us AND k.lease_until_us + k.expires_us - k.created_us >= us))"""
_NOTIFIED = f"CASE WHEN k.awaited THEN pg_notify('{CHANNEL}', k.scope || chr(31) || k.key) END"


def _complete_from(rows: str) -> TextClause:
    return text(f"""
WITH {_CLOCK}
UPDATE semel_keys k
SET state = 'completed', completed_us = us, kind = r.kind, value = r.value, value_until_us = us + r.value_ttl,
    expires_us = CASE WHEN us BETWEEN k.created_us AND k.expires_us THEN k.expires_us
                      ELSE us + k.expires_us - k.created_us END
FROM clock, {rows}
WHERE {_HOLDS}
RETURNING k.scope, k.key, k.fence, {_NOTIFIED}
""")


_COMPLETE, _COMPLETE_ONE = _complete_from(_many(_OWNED | _OUTCOME)), _complete_from(_one(_OWNED | _OUTCOME))

# A released row stays for a minute: otherwise a claim that drew its fence before this one's, and inserts after the row
# is gone, would make the fence of the key go backwards.
_RELEASE = text(f"""
WITH {_CLOCK}
UPDATE semel_keys k SET state = 'released', expires_us = least(k.expires_us, us + 60000000)
FROM clock, {_many(_OWNED)}
WHERE {_HOLDS}
RETURNING k.scope, k.key, k.fence, {_NOTIFIED}
""")

# Like a release, but of a record that somebody else owns or owned.
_FORGOTTEN = (
    """state = 'released', value = NULL, value_until_us = NULL, expires_us = least(k.expires_us, us + 60000000)"""
)
_IDLE = "k.state <> 'released' AND (CAST({force} AS boolean) OR k.state <> 'claimed' OR k.lease_until_us <= us)"

_FORGET = text(f"""
WITH {_CLOCK}
UPDATE semel_keys k SET {_FORGOTTEN}
FROM clock, {_many({**_OWNED, "force": "boolean"})}
WHERE k.scope = r.scope AND k.key = r.key AND k.fence = r.fence AND {_IDLE.format(force="r.force")}
RETURNING k.scope, k.key, k.fence, {_NOTIFIED}
""")

_FORGET_SCOPE = text(f"""
WITH {_CLOCK},
doomed AS MATERIALIZED (
  SELECT k.scope, k.key FROM semel_keys k, clock
  WHERE k.scope = :scope AND {_IDLE.format(force=":force")} ORDER BY k.key LIMIT :most FOR UPDATE OF k
)
UPDATE semel_keys k SET {_FORGOTTEN} FROM clock, doomed
WHERE k.scope = doomed.scope AND k.key = doomed.key
RETURNING {_NOTIFIED}
""")

# SKIP LOCKED: an owner that completes in its own open transaction must not delay the renewals of all others.
_RENEW = text(f"""
WITH {_CLOCK},
r AS MATERIALIZED (SELECT * FROM {_many({**_OWNED, "lease": "bigint"})}),
held AS MATERIALIZED (
  SELECT r.* FROM r JOIN semel_keys k ON k.scope = r.scope AND k.key = r.key AND k.fence = r.fence
  FOR UPDATE OF k SKIP LOCKED
)
UPDATE semel_keys k SET lease_us = r.lease, lease_until_us = us + r.lease
FROM clock, held AS r
WHERE {_HOLDS}
RETURNING k.scope, k.key, k.fence, k.lease_until_us
""")

_GONE = """expires_us < us AND NOT (state = 'claimed' AND lease_until_us > expires_us
  AND lease_until_us + expires_us - created_us >= us)"""

_PURGE = text(f"""
WITH {_CLOCK},
doomed AS MATERIALIZED (
  SELECT scope, key FROM semel_keys, clock WHERE {_GONE} ORDER BY expires_us LIMIT :most
  FOR UPDATE OF semel_keys SKIP LOCKED
)
DELETE FROM semel_keys k USING doomed WHERE k.scope = doomed.scope AND k.key = doomed.key
""")

_FADE = text(f"""
WITH {_CLOCK},
faded AS MATERIALIZED (
  SELECT scope, key FROM semel_keys, clock WHERE value_until_us < us ORDER BY value_until_us LIMIT :most
  FOR UPDATE OF semel_keys SKIP LOCKED
)
UPDATE semel_keys k SET value = NULL, value_until_us = NULL FROM faded
WHERE k.scope = faded.scope AND k.key = faded.key
""")

_COUNT = text(f"""
WITH {_CLOCK}
SELECT CASE WHEN {_GONE} OR state = 'released' THEN 'expired'
            WHEN state = 'completed' THEN 'completed'
            WHEN lease_until_us > us THEN 'in_flight'
            WHEN unknown THEN 'unknown'
            ELSE 'abandoned' END, count(*)
FROM semel_keys, clock GROUP BY 1
""")


HEARTBEAT = 5.0
"""Seconds without a notification after which the listener checks the connection."""
_ANSWER, _CONNECTING = 3.0, 5.0
"""Seconds that the server has for a reply, and for a new connection."""


def subscriber(url: URL, first_payload: str | None = None, check_every: float | None = None) -> Subscribe:
    """LISTEN over psycopg, for the listener's thread. ``first_payload`` is yielded after connecting: some were missed.

    A connection that only listens would never notice that its server is gone, since it sends nothing. So it sends a
    query when nothing came for ``check_every`` seconds (HEARTBEAT without it).
    """
    address = url.set(drivername="postgresql").difference_update_query(["pool_mode"])
    options: Any = {"application_name": "semel-listener", "connect_timeout": 5, "prepare_threshold": None, **KEEPALIVE}

    def subscribe(channel: str, stopped: Event) -> Iterator[str | None]:
        from semel.db.psycopg_connection import BoundedConnection

        with deadline(_CONNECTING):
            conn = BoundedConnection.connect(address.render_as_string(hide_password=False), autocommit=True, **options)
        with conn:
            with deadline(_ANSWER):
                conn.execute(f"LISTEN {channel}")
            if first_payload is not None:
                yield first_payload
            last_received = time.monotonic()
            while not stopped.is_set():
                for notice in conn.notifies(timeout=0.5):
                    last_received = time.monotonic()
                    yield notice.payload
                yield None
                if time.monotonic() - last_received > (check_every or HEARTBEAT):
                    _check_connection(conn, time.monotonic() - last_received)
                    last_received = time.monotonic()

    return subscribe


def _check_connection(conn: BoundedConnection, silent: float) -> None:
    """Check that the server still replies."""
    try:
        with deadline(_ANSWER):
            conn.execute("SELECT 1")
    except Exception:
        _log.warning(
            "PostgreSQL has sent nothing for %.0f s on the listening connection, and does not reply to a query: "
            "reconnecting. Notifications since then are lost; polling finds what they announced",
            silent + _ANSWER,
        )
        raise


class PostgresStore:
    """A store over a blocking engine, an async one, or a user's own transaction."""

    coalesce = True
    expires_itself = False
    dialect = "postgresql"

    def __init__(
        self,
        database: Database,
        clock: Clock | None = None,
        listener: Listener | None = None,
        *,
        patience: str = "",
    ) -> None:
        self._database = database
        self._patience = patience
        self._clock = clock
        self._listener = listener
        self._ready = False

    def bound_to(self, database: Database) -> PostgresStore:
        """The same keys inside a user's transaction."""
        twin = PostgresStore(database, self._clock)
        twin._ready = self._ready
        return twin

    async def open(self) -> None:
        # The operator decides when to migrate, so this only checks.
        await self._database.read(migrate.require)
        self._ready = True

    async def _run(self, run: Callable[..., Awaitable[Any]], work: Callable[..., Any], *args: Any) -> Any:
        if not self._ready:
            await self.open()
        terms: Terms = {"now": None if self._clock is None else self._clock(), "patience": self._patience}
        return await run(work, *args, terms)

    async def claim(self, requests: Sequence[ClaimRequest]) -> list[Verdict]:
        return cast("list[Verdict]", await self._run(self._database.write, claim, requests))

    async def renew(self, requests: Sequence[Renew]) -> list[int | None]:
        return cast("list[int | None]", await self._run(self._database.write, _renew, requests))

    async def complete(self, requests: Sequence[Complete]) -> list[bool]:
        return cast("list[bool]", await self._run(self._database.write, _complete, requests))

    async def release(self, requests: Sequence[Release]) -> list[bool]:
        return cast("list[bool]", await self._run(self._database.write, _release, requests))

    async def forget(self, requests: Sequence[Forget]) -> list[bool]:
        return cast("list[bool]", await self._run(self._database.write, forget, requests))

    async def forget_scope(self, request: ForgetScope) -> int:
        return cast("int", await self._run(self._database.write_many, _forget_scope, request))

    async def get(self, refs: Sequence[KeyRef]) -> list[Record | None]:
        return cast("list[Record | None]", await self._run(self._database.read, get, refs))

    async def purge(self, limit: int) -> int:
        return cast("int", await self._run(self._database.write_many, purge, limit))

    async def stats(self) -> Held:
        return cast("Held", await self._run(self._database.survey, _stats))

    def watch(self, ring: OnReleased) -> None:
        """LISTEN on a separate connection, unless a pooler is between: then waiting callers poll."""
        if self._listener is not None:
            self._listener.start(CHANNEL, lambda payload: ring(*payload.split(SEPARATOR, 1)))

    async def close(self) -> None:
        if self._listener is not None:
            self._listener.stop()
        await self._database.close()


def claim(conn: Connection, requests: Sequence[ClaimRequest], terms: Terms) -> list[Verdict]:
    """Claim keys, in the transaction of the connection: see ``Store.claim``."""
    # Sorted by key, so that two batches lock their rows in the same order and never deadlock.
    undecided = dict(sorted(enumerate(requests), key=_by_key)) if len(requests) > 1 else {0: requests[0]}
    takeable: dict[int, tuple[Record, Reason]] = {}
    verdicts: dict[int, Verdict] = {}
    for _ in range(_ROUNDS):
        won = _insert(conn, [request for at, request in undecided.items() if at not in takeable], terms)
        if len(won) == len(requests):
            return [won[request.attempt] for request in requests]  # all keys are new, as most are
        if takeable:
            won |= _take(conn, [(undecided[at], *found) for at, found in takeable.items()], terms)
        verdicts |= {at: won[request.attempt] for at, request in undecided.items() if request.attempt in won}
        undecided = {at: request for at, request in undecided.items() if at not in verdicts}
        if undecided:
            takeable = _judge(conn, undecided, takeable, verdicts, terms)
            undecided = {at: request for at, request in undecided.items() if at not in verdicts}
        if not undecided:
            return [verdicts[at] for at in range(len(requests))]
    raise StoreUnavailable(f"a key changed hands {_ROUNDS} times while it was being claimed; try again")


def _by_key(numbered: tuple[int, ClaimRequest]) -> tuple[str, str]:
    return (numbered[1].scope, numbered[1].key)


def _judge(
    conn: Connection,
    undecided: dict[int, ClaimRequest],
    tried: dict[int, tuple[Record, Reason]],
    verdicts: dict[int, Verdict],
    terms: Terms,
) -> dict[int, tuple[Record, Reason]]:
    """Read the existing records, add the verdicts that are certain, and return the records that may be taken.

    A record that was tried and has not changed is locked by an open transaction: it is in flight.
    """
    if waiting := [request for request in undecided.values() if request.waiting]:
        conn.execute(_AWAIT, _places(waiting))
    records = _read(conn, undecided.values(), terms)
    if rewound := [place for place, record in records.items() if rewind(record, record.now_us)]:
        conn.execute(_REWIND, {**_places([KeyRef(*place) for place in rewound]), **terms})
    takeable: dict[int, tuple[Record, Reason]] = {}
    promised: set[tuple[str, str]] = set()
    for at, request in undecided.items():
        record = records.get((request.scope, request.key))
        if record is None or (request.scope, request.key) in promised:
            continue  # removed since: insert again; or promised to an earlier request: judge it in the next round
        answer = judge(record, request, record.now_us)
        if not isinstance(answer, str):
            verdicts[at] = answer
        elif at in tried and _version(tried[at][0]) == _version(record):
            verdicts[at] = _in_flight(request)
        else:
            takeable[at] = (record, answer)
            promised.add((request.scope, request.key))
    return takeable


def _version(record: Record) -> tuple[int, str, int]:
    return (record.fence, record.state, record.lease_until_us)


def _in_flight(request: ClaimRequest) -> InFlight:
    """The verdict for a row that is locked by an open transaction; when that ends is not known."""
    return InFlight(min(1.0, request.lease_us / 1e6))


def _insert(conn: Connection, requests: Sequence[ClaimRequest], terms: Terms) -> dict[str, Verdict]:
    if not requests:
        return {}
    try:
        if len(requests) == 1:
            rows = fetch(conn, _INSERT_ONE, terms | _row(requests[0]))
        else:
            rows = fetch(conn, _INSERT, terms | _columns(requests, [request.fingerprint for request in requests]))
    except exc.DBAPIError as error:
        if sqlstate(error) != LOCK_TIMEOUT or is_lost(conn) or is_left_open(conn):  # which ends a transaction
            raise
        return _insert_around(conn, requests, terms)
    asked = {request.attempt: request for request in requests}
    return {attempt: granted(asked[attempt], None, "absent", fence, created) for attempt, fence, created in rows}


def _insert_around(conn: Connection, requests: Sequence[ClaimRequest], terms: Terms) -> dict[str, Verdict]:
    """Insert while a transaction blocks one of these keys: leave out those that exist, insert the rest one by one.

    A key that cannot even be inserted alone is being claimed in a transaction that has not committed: in flight.
    """
    existing = _read(conn, requests, terms)
    absent = [request for request in requests if (request.scope, request.key) not in existing]
    if len(absent) == 1 == len(requests):
        return {absent[0].attempt: _in_flight(absent[0])}
    hasty = {**terms, "patience": "50"}
    won: dict[str, Verdict] = {}
    for request in absent:
        won |= _insert(conn, [request], hasty)
    return won


def _take(conn: Connection, wanted: Sequence[tuple[ClaimRequest, Record, Reason]], terms: Terms) -> dict[str, Verdict]:
    fingerprints = [fingerprint_for(*each) for each in wanted]
    seen = {
        "was_fence": [record.fence for _, record, _ in wanted],
        "was_state": [record.state for _, record, _ in wanted],
        "was_until": [record.lease_until_us for _, record, _ in wanted],
    }
    rows = conn.execute(_TAKE, terms | _columns([request for request, _, _ in wanted], fingerprints) | seen)
    asked = {request.attempt: (request, record, reason) for request, record, reason in wanted}
    return {attempt: granted(*asked[attempt], fence, created) for attempt, fence, created in rows}


def _row(request: ClaimRequest) -> dict[str, Any]:
    """The columns of a single claim."""
    done = request.done
    return {
        "scope": request.scope,
        "key": request.key,
        "fingerprint": request.fingerprint,
        "attempt": request.attempt,
        "unknown": request.unknown,
        "lease": request.lease_us,
        "ttl": request.ttl_us,
        "state": "claimed" if done is None else "completed",
        "kind": "" if done is None else done.kind,
        "value": None if done is None else done.data,
        "value_ttl": None if done is None else done.value_ttl_us,
    }


def _columns(requests: Sequence[ClaimRequest], fingerprints: list[str]) -> dict[str, list[Any]]:
    return {
        **_places(requests),
        "fingerprint": fingerprints,
        "attempt": [request.attempt for request in requests],
        "unknown": [request.unknown for request in requests],
        "lease": [request.lease_us for request in requests],
        "ttl": [request.ttl_us for request in requests],
        "state": ["claimed" if request.done is None else "completed" for request in requests],
        "kind": ["" if request.done is None else request.done.kind for request in requests],
        "value": [None if request.done is None else request.done.data for request in requests],
        "value_ttl": [None if request.done is None else request.done.value_ttl_us for request in requests],
    }


def _places(wanted: Collection[KeyRef | ClaimRequest | Owned]) -> dict[str, Any]:
    return {"scope": [ref.scope for ref in wanted], "key": [ref.key for ref in wanted]}


def _read(
    conn: Connection, wanted: Iterable[KeyRef | ClaimRequest | Owned], terms: Terms
) -> dict[tuple[str, str], Record]:
    rows = conn.execute(_READ, {**_places(set(map(_ref, wanted))), **terms})
    return {(record.scope, record.key): record for record in (Record(*row) for row in rows)}


def _ref(wanted: KeyRef | ClaimRequest | Owned) -> KeyRef:
    return KeyRef(wanted.scope, wanted.key)


def _fenced(
    conn: Connection, statement: TextClause, requests: Sequence[Owned], terms: Terms, **columns: list[Any]
) -> dict[tuple[str, str, int], int]:
    """Run a fenced change, in the order of the keys. Returns the requests whose fence held, with the last column."""
    values: dict[str, Any] = {**_places(requests), "fence": [each.fence for each in requests], **columns}
    if statement is _COMPLETE and len(requests) == 1:
        statement, values = _COMPLETE_ONE, {name: column[0] for name, column in values.items()}
    elif len(requests) > 1:
        order = sorted(range(len(requests)), key=lambda at: (requests[at].scope, requests[at].key))
        values = {name: [column[at] for at in order] for name, column in values.items()}
    return {(scope, key, fence): answer for scope, key, fence, answer in fetch(conn, statement, terms | values)}


def _conflicts(
    conn: Connection, requests: Sequence[Owned], held: dict[tuple[str, str, int], int], terms: Terms
) -> dict[tuple[str, str], Record]:
    """The present records of the requests whose fence did not hold."""
    return _read(conn, [each for each in requests if _name(each) not in held], terms)


def _renew(conn: Connection, requests: Sequence[Renew], terms: Terms) -> list[int | None]:
    held = _fenced(conn, _RENEW, requests, terms, lease=[each.lease_us for each in requests])
    records = _conflicts(conn, requests, held, terms) if len(held) < len(requests) else {}
    return [held[_name(each)] if _name(each) in held else _still_leased(records, each) for each in requests]


def _still_leased(records: dict[tuple[str, str], Record], request: Renew) -> int | None:
    """The end of a lease that was not renewed because its row is locked by the owner, who completes in a transaction.

    None if that lease has ended: the holder of the lock may be taking the key over.
    """
    record = _owned_record(records, request)
    if record is None or record.state != "claimed" or record.lease_until_us <= record.now_us:
        return None
    return record.lease_until_us


def _complete(conn: Connection, requests: Sequence[Complete], terms: Terms) -> list[bool]:
    held = _fenced(
        conn,
        _COMPLETE,
        requests,
        terms,
        kind=[each.done.kind for each in requests],
        value=[each.done.data for each in requests],
        value_ttl=[each.done.value_ttl_us for each in requests],
    )
    if len(held) == len(requests):
        return [True] * len(requests)
    records = _conflicts(conn, requests, held, terms)
    return [_name(each) in held or _completed_by(records, each) for each in requests]


def _completed_by(records: dict[tuple[str, str], Record], request: Complete) -> bool:
    record = _owned_record(records, request)
    return record is not None and record.state == "completed"


def _release(conn: Connection, requests: Sequence[Release], terms: Terms) -> list[bool]:
    held = _fenced(conn, _RELEASE, requests, terms)
    if len(held) == len(requests):
        return [True] * len(requests)
    records = _conflicts(conn, requests, held, terms)
    return [
        _name(each) in held or _is_free(records.get((each.scope, each.key))) or _owned_record(records, each) is not None
        for each in requests
    ]


def forget(conn: Connection, requests: Sequence[Forget], terms: Terms) -> list[bool]:
    """Make keys free, in the transaction of the connection: see ``Store.forget``."""
    held = _fenced(conn, _FORGET, requests, terms, force=[each.force for each in requests])
    if len(held) == len(requests):
        return [True] * len(requests)
    records = _conflicts(conn, requests, held, terms)
    return [_name(each) in held or _is_free(records.get((each.scope, each.key))) for each in requests]


def _forget_scope(conn: Connection, request: ForgetScope, terms: Terms) -> int:
    values = {**terms, "scope": request.scope, "force": request.force, "most": request.limit}
    return len(conn.execute(_FORGET_SCOPE, values).all())


def _name(request: Owned) -> tuple[str, str, int]:
    return (request.scope, request.key, request.fence)


def _is_free(record: Record | None) -> bool:
    return record is None or record.state == "released" or gone(record, record.now_us)


def _owned_record(records: dict[tuple[str, str], Record], request: Owned) -> Record | None:
    """The record, if the request's fence holds or completed it."""
    record = records.get((request.scope, request.key))
    return record if record is not None and not _is_free(record) and record.fence == request.fence else None


def get(conn: Connection, refs: Sequence[KeyRef], terms: Terms) -> list[Record | None]:
    """Read the records of keys, in the transaction of the connection: see ``Store.get``."""
    records = _read(conn, refs, terms)
    found = (records.get((ref.scope, ref.key)) for ref in refs)
    return [None if _is_free(record) else record for record in found]


def purge(conn: Connection, limit: int, terms: Terms) -> int:
    """Remove records and values whose time is over, in the transaction of the connection."""
    removed: int = conn.execute(_PURGE, {**terms, "most": limit}).rowcount
    if removed < limit:
        removed += conn.execute(_FADE, {**terms, "most": limit - removed}).rowcount
    return removed


def _stats(conn: Connection, terms: Terms) -> Held:
    return Held(**{row[0]: row[1] for row in conn.execute(_COUNT, {**terms})})
