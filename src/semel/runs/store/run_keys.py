"""The keys of runs and jobs, as SQL: which run a client's key, or a payload, names, and until when."""

from __future__ import annotations

from typing import Literal, TypeAlias

from msgspec import Struct
from sqlalchemy import Connection, delete, select

from semel.db.dialect import Statement, StatementContext, hot, transaction
from semel.db.schema import run_keys
from semel.errors import StoreUnavailable
from semel.runs.store import quotas

ROUNDS = 10
"""How often to try to take or read a key that other transactions keep changing."""

KeyKind: TypeAlias = Literal["key", "payload"]

_KEY_COLUMNS = {
    "in_tenant": "text",
    "in_user": "text",
    "in_kind": "text",
    "in_key": "text",
    "in_hash": "text",
    "in_job": "text",
    "in_ttl": "bigint",
}
_GIVES_WAY = """CASE
    WHEN k.expires_us < {now} THEN true
    WHEN k.kind = 'payload' THEN NOT EXISTS (
      SELECT 1 FROM semel_runs AS r WHERE r.id = {id} AND r.status IN ('PENDING', 'RUNNING'))
    ELSE false END"""

# Sorted, so that two batches wait for each other's keys in the same order and never deadlock.
TAKE_KEYS = Statement(
    lambda w: (
        f"""
INSERT INTO semel_run_keys AS k (tenant, user_id, kind, key, payload_hash, job_id, created_us, expires_us)
SELECT in_tenant, in_user, in_kind, in_key, in_hash, in_job, {w.now}, {w.now} + in_ttl
FROM {w.batch(_KEY_COLUMNS)} WHERE true ORDER BY in_tenant, in_user, in_kind, in_key
ON CONFLICT (tenant, user_id, kind, key) DO UPDATE
SET payload_hash = excluded.payload_hash, job_id = excluded.job_id, created_us = excluded.created_us,
    expires_us = excluded.expires_us
WHERE {_GIVES_WAY.format(now=w.now, id=w.identity("k.job_id"))}
RETURNING job_id
"""
    ),
    _KEY_COLUMNS,
)

_PLACE_COLUMNS = {name: _KEY_COLUMNS[name] for name in ("in_tenant", "in_user", "in_kind", "in_key")}
READ_KEYS = Statement(
    lambda w: (
        f"""
SELECT k.tenant, k.user_id, k.kind, k.key, k.payload_hash, k.job_id, k.expires_us FROM {w.batch(_PLACE_COLUMNS)}
JOIN semel_run_keys AS k ON k.tenant = in_tenant AND k.user_id = in_user AND k.kind = in_kind AND k.key = in_key
WHERE NOT {_GIVES_WAY.format(now=w.now, id=w.identity("k.job_id"))}
"""
    ),
    _PLACE_COLUMNS,
)


class KeyEntry(Struct, frozen=True):
    """A key of a user, and the job that it names."""

    key: str
    job_id: str
    user: str
    payload_hash: str
    created_us: int
    expires_us: int


class StoreKey(Struct, frozen=True, kw_only=True):
    """A request to store a key for a job that the caller created."""

    tenant: str
    user: str
    key: str
    job_id: str
    ttl_us: int


@hot
def store_key(conn: Connection, request: StoreKey, context: StatementContext) -> str:
    """Store the key unless it is in use. Returns the job that it names: the caller's, or an earlier one."""
    with transaction(conn):
        row = (request.tenant, request.user, "key", request.key, "", request.job_id, request.ttl_us)
        for _ in range(ROUNDS):
            if TAKE_KEYS.rows(conn, [row], now=context.now):
                return request.job_id
            held = READ_KEYS.rows(conn, [row[:4]], now=context.now)
            if held:
                named: str = held[0][5]
                return named
        raise StoreUnavailable(f"the key {request.key!r} changed hands {ROUNDS} times; try again")


@hot
def check_key(conn: Connection, person: tuple[str, str | None], key: str, context: StatementContext) -> KeyEntry | None:
    """The live key of one user (None: of any user), or None. Expired ones of this name are removed."""
    with transaction(conn):
        tenant, user = person
        now = quotas.read_clock(conn, context)
        own = [run_keys.c.tenant == tenant, run_keys.c.kind == "key", run_keys.c.key == key]
        if user is not None:
            own.append(run_keys.c.user_id == user)
        rows = conn.execute(select(run_keys).where(*own).order_by(run_keys.c.created_us)).all()
        if any(row.expires_us < now for row in rows):
            conn.execute(delete(run_keys).where(*own, run_keys.c.expires_us < now))
        live = [row for row in rows if row.expires_us >= now]
        if not live:
            return None
        row = live[0]
        return KeyEntry(row.key, row.job_id, row.user_id, row.payload_hash, row.created_us, row.expires_us)


_PURGE_KEYS = Statement(
    lambda w: (
        f"""
DELETE FROM semel_run_keys WHERE (tenant, user_id, kind, key) IN (
  SELECT p.tenant, p.user_id, p.kind, p.key FROM semel_run_keys AS p WHERE p.expires_us < {w.now}
  ORDER BY p.expires_us LIMIT :most {w.locking("p", skip=True)}
)"""
    )
)


def purge_keys(conn: Connection, context: StatementContext, most: int = 1000) -> int:
    """Remove up to ``most`` expired keys; return how many."""
    return _PURGE_KEYS.count(conn, most=most, now=context.now)
