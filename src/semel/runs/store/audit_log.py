"""The log of what people did (``semel_audit``): written in the transaction of the change itself, and read.

Each row has the digest of the row before, so writers take turns: the lock is taken last, when everything else of the
transaction is done, and held until the commit. People act seldom. What happens for every run (submit, lease, finish,
heartbeat) and what no person does (the sweeper, retention) never comes here: its ``context.by`` is None.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from hashlib import sha256
from typing import Any

from msgspec import Struct
from sqlalchemy import Connection, Row, insert, or_, select, text

from semel.audit_log import START, AuditCheck, digest_of, verify_log
from semel.db.dialect import Statement, StatementContext
from semel.db.schema import audit
from semel.redaction import without_secret_values
from semel.types import Entrance, moment

ACTIONS = (
    "token.created",
    "token.rotated",
    "token.revoked",
    "quota.set",
    "quota.removed",
    "reservation.released",
    "config.set",
    "config.removed",
    "key.resolved",
    "key.deleted",
    "run.cancelled",
    "run.retried",
    "run.rerun",
    "runs.purged",
    "subscription.created",
    "subscription.deleted",
)
"""Everything that is logged."""
MAX_TEXT = 16 * 1024
"""Characters of ``before`` and of ``after``: of a larger one, only size and digest are logged."""
BATCH = 1000
"""Rows that are read at a time when the whole log is."""


class Change(Struct, frozen=True, kw_only=True):
    """What is logged of a change. ``tenant`` is the one that it concerns."""

    name: str
    tenant: str
    target: str
    before: Mapping[str, Any] | None = None
    after: Mapping[str, Any] | None = None


class AuditEntry(Struct, frozen=True, kw_only=True):
    """A row of the log: who did what, when and from where, and what was before and after."""

    seq: int
    at_us: int
    action: str
    target: str
    tenant: str
    user: str
    role: str
    user_tenant: str
    token: str
    address: str
    entrance: Entrance
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    previous: str
    digest: str

    @property
    def at(self) -> datetime:
        """When it was done, in UTC."""
        return moment(self.at_us)


class AuditPage(Struct, frozen=True, kw_only=True):
    """Rows of the log, newest first; ``next`` is the cursor of the next page, None on the last."""

    entries: list[AuditEntry]
    next: str | None


class AuditFilter(Struct, frozen=True, kw_only=True):
    """Which rows; None does not filter. An action without its verb, such as ``token``, is all of that kind."""

    tenant: str | None = None
    user: str | None = None
    action: str | None = None
    target: str | None = None
    entrance: Entrance | None = None
    since_us: int | None = None
    until_us: int | None = None


_WAIT_LONGER = Statement(lambda w: f"SELECT {w.patience}")
_LOCK = text("SELECT pg_advisory_xact_lock(hashtextextended('semel_audit', 7301))")
_HEAD = Statement(
    lambda w: (
        f"""
SELECT {w.now}, h.seq, h.digest FROM (SELECT 1) AS one
LEFT JOIN (SELECT seq, digest FROM semel_audit ORDER BY seq DESC LIMIT 1) AS h ON true"""
    )
)


def lock(conn: Connection, context: StatementContext) -> None:
    """Let no other transaction append until this one ends; for one that must read what it replaces. SQLite has one
    writer anyway.
    """
    if context.by is not None and conn.dialect.name == "postgresql":
        _WAIT_LONGER.rows(conn)
        conn.execute(_LOCK)


def record(conn: Connection, context: StatementContext, *changes: Change) -> None:
    """Append what the person of the context did, in the transaction of the change; nothing if there is none.

    An action that left everything as it was is not logged. To be called last in a transaction: others wait for it.
    """
    by, real = context.by, [each for each in changes if each.before != each.after]
    if by is None or not real:
        return
    lock(conn, context)
    now, last, previous = _HEAD.rows(conn, now=context.now)[0]
    rows = []
    for seq, each in enumerate(real, (last or 0) + 1):
        row: dict[str, Any] = {
            "previous": previous or START,
            "seq": seq,
            "at_us": now,
            "tenant": _text(each.tenant),
            "user": _text(by.user),
            "role": by.role,
            "user_tenant": _text(by.tenant),
            "token": by.token,
            "address": _text(by.address),
            "entrance": by.entrance,
            "action": each.name,
            "target": _text(each.target),
            "before": _json(each.before),
            "after": _json(each.after),
        }
        previous = digest_of(row)
        rows.append({**row, "user_id": row["user"], "digest": previous})
    conn.execute(insert(audit), [{name: row[name] for name in _COLUMNS} for row in rows])


_COLUMNS = tuple(column.name for column in audit.c)


def _text(value: str) -> str:
    """The text without secrets, as every database can store it."""
    cleaned: str = without_secret_values(value)
    return cleaned.replace("\0", "\\0").encode("utf-8", "backslashreplace").decode()


def _json(value: Mapping[str, Any] | None) -> str | None:
    """The value without secrets as JSON in ASCII, which is stored as it is: its characters are part of the digest."""
    if value is None:
        return None
    cleaned = {name: without_secret_values(each) for name, each in value.items()}
    written = json.dumps(cleaned, sort_keys=True, separators=(",", ":"))
    if len(written) <= MAX_TEXT:
        return written
    return json.dumps({"omitted": "too large", "bytes": len(written), "sha256": sha256(written.encode()).hexdigest()})


_SELECTED = [audit.c.user_id.label("user") if name == "user_id" else audit.c[name] for name in _COLUMNS]


def entries(conn: Connection, wanted: AuditFilter, limit: int, before: int | None = None) -> AuditPage:
    """Rows of the log, newest first, those before the number ``before``."""
    query = select(*_SELECTED).order_by(audit.c.seq.desc()).limit(limit + 1)
    for name, column in {"tenant": audit.c.tenant, "user": audit.c.user_id, "target": audit.c.target}.items():
        if (value := getattr(wanted, name)) is not None:
            query = query.where(column == value)
    if wanted.action is not None:
        kind = audit.c.action.startswith(f"{wanted.action}.", autoescape=True)
        query = query.where(or_(audit.c.action == wanted.action, kind))
    if wanted.entrance is not None:
        query = query.where(audit.c.entrance == wanted.entrance)
    if wanted.since_us is not None:
        query = query.where(audit.c.at_us >= wanted.since_us)
    if wanted.until_us is not None:
        query = query.where(audit.c.at_us < wanted.until_us)
    if before is not None:
        query = query.where(audit.c.seq < before)
    found = [_entry(row) for row in conn.execute(query)]
    return AuditPage(entries=found[:limit], next=str(found[limit - 1].seq) if len(found) > limit else None)


def _entry(row: Row[Any]) -> AuditEntry:
    fields = dict(row._mapping)
    values = {name: None if fields[name] is None else json.loads(fields[name]) for name in ("before", "after")}
    return AuditEntry(**{**fields, **values})


def verify(conn: Connection, head: str | None = None) -> AuditCheck:
    """Check the chain of the whole log, and that it still has the row of the kept ``head``."""
    return verify_log(stored_rows(conn), head)


def rows_after(conn: Connection, seq: int, limit: int = BATCH) -> list[dict[str, Any]]:
    """Rows as they are stored, oldest first, as :func:`semel.audit_log.verify_log` takes them."""
    query = select(*_SELECTED).where(audit.c.seq > seq).order_by(audit.c.seq).limit(limit)
    return [dict(row) for row in conn.execute(query).mappings()]


def stored_rows(conn: Connection) -> Iterator[Mapping[str, Any]]:
    """Every row of the log, oldest first."""
    after = -(2**63)
    while found := rows_after(conn, after):
        yield from found
        after = found[-1]["seq"]
