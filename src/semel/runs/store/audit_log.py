"""The log of what people did (``semel_audit``): written in the transaction of the change itself, and read.

Each tenant has a chain of its own, so that no transaction needs the rows of two tenants. A row has the digest of the
row before, so those who write for one tenant take turns: the lock is taken last, when everything else of the
transaction is done, and held until the commit. People act seldom. What happens for every run (submit, lease, finish,
heartbeat) and what no person does (the sweeper, retention) never comes here: its ``context.by`` is None.

The digest of a row also names the transaction that wrote it: one whose reply was lost, and that is sent again, finds
by its row whether it was committed (:func:`is_committed`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from hashlib import sha256
from typing import Any, NamedTuple

from msgspec import Struct
from sqlalchemy import Connection, Row, insert, or_, select, tuple_

from semel.audit_log import START, AuditCheck, digest_of, verify_log
from semel.db.dialect import Statement, StatementContext, transaction
from semel.db.schema import audit
from semel.errors import InvalidRequest
from semel.redaction import without_secret_values
from semel.types import Actor, Entrance, moment

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
    "runs.cancelled",
    "runs.retried",
    "runs.prioritized",
    "runs.purged",
    "subscription.created",
    "subscription.deleted",
    "delivery.resent",
    "queue.paused",
    "queue.resumed",
    "model.paused",
    "model.resumed",
    "sealing.begun",
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


class Place(NamedTuple):
    """Where a row is in the logs. No other row has the same digest."""

    tenant: str
    seq: int
    digest: str


_PLACE = "semel_audit"
"""Where ``conn.info`` has the :class:`Place` of the row that the transaction wrote."""
_COLUMNS = tuple(column.name for column in audit.c)
_NUMBERS = ("seq", "at_us")
_VALUES = ", ".join(f"CAST(:{name} AS bigint)" if name in _NUMBERS else f"CAST(:{name} AS text)" for name in _COLUMNS)

_HEAD = Statement(
    lambda w: (
        f"""
SELECT {w.now}, h.seq, h.digest FROM (SELECT 1) AS one
LEFT JOIN (
  SELECT seq, digest FROM semel_audit WHERE tenant = :tenant ORDER BY seq DESC LIMIT 1) AS h ON true"""
    )
)
_LOCK = Statement(lambda w: f"SELECT {w.patience}, {w.advisory_lock('tenant', 7302)}")
_APPEND = Statement(
    lambda w: (
        f"""
WITH turn AS MATERIALIZED (SELECT {w.patience}, {w.advisory_lock("tenant", 7302)})
INSERT INTO semel_audit ({", ".join(_COLUMNS)}) SELECT {_VALUES} FROM turn WHERE true
ON CONFLICT (tenant, seq) DO NOTHING RETURNING seq"""
    )
)
"""Waits for the lock, and inserts a row if nobody has appended one with its number."""


def lock(conn: Connection, tenant: str, context: StatementContext) -> None:
    """Let no other transaction append to the tenant's log until this one ends; for one that must first read what it
    replaces. SQLite has one writer anyway.
    """
    if context.by is not None:
        _LOCK.rows(conn, tenant=tenant)


def record(conn: Connection, context: StatementContext, *changes: Change) -> None:
    """Append what the person of the context did, in the transaction of the change; nothing if there is none.

    What left everything as it was is not logged. To be called last in a transaction: others wait for it.
    """
    by, real = context.by, [each for each in changes if each.before != each.after]
    if by is None:
        return
    for tenant in sorted({each.tenant for each in real}):  # in one order, so that two never wait for each other
        _append(conn, context, by, tenant, [each for each in real if each.tenant == tenant])


def _append(conn: Connection, context: StatementContext, by: Actor, tenant: str, changes: Sequence[Change]) -> None:
    """The end of the log is read before the lock is taken, to save a statement, and again if it was not the end."""
    rows = left = _chained(conn, context, by, tenant, changes)
    if _APPEND.rows(conn, **rows[0]):
        left = rows[1:]
    else:
        rows = left = _chained(conn, context, by, tenant, changes)
    if left:
        conn.execute(insert(audit), left)
    conn.info[_PLACE] = Place(tenant, rows[-1]["seq"], rows[-1]["digest"])


def _chained(
    conn: Connection, context: StatementContext, by: Actor, tenant: str, changes: Sequence[Change]
) -> list[dict[str, Any]]:
    """The rows of the changes, from the end of the tenant's log on."""
    now, last, previous = _HEAD.rows(conn, now=context.now, tenant=tenant)[0]
    rows: list[dict[str, Any]] = []
    for seq, each in enumerate(changes, (last or 0) + 1):
        rows.append(_row(each, by, previous or START, seq, now))
        previous = rows[-1]["digest"]
    return rows


def take_place(conn: Connection) -> Place | None:
    """The place of the last row that this connection wrote since it was asked before; None if it wrote none."""
    place: Place | None = conn.info.pop(_PLACE, None)
    return place


def is_committed(conn: Connection, place: Place) -> bool:
    """Whether the transaction that wrote this row was committed. Waits for its end, if it is still under way."""
    with transaction(conn):
        _LOCK.rows(conn, tenant=place.tenant)
        found = select(audit.c.digest).where(audit.c.tenant == place.tenant, audit.c.seq == place.seq)
        return bool(conn.scalar(found) == place.digest)


def _row(change: Change, by: Actor, previous: str, seq: int, at_us: int) -> dict[str, Any]:
    row = {
        "previous": previous,
        "seq": seq,
        "at_us": at_us,
        "tenant": change.tenant,
        "user": _text(by.user),
        "role": _text(by.role),
        "user_tenant": _text(by.tenant),
        "token": _text(by.token),
        "address": _text(by.address),
        "entrance": by.entrance,
        "action": change.name,
        "target": _text(change.target),
        "before": _json(change.before),
        "after": _json(change.after),
    }
    digest = digest_of(row)
    row["user_id"] = row.pop("user")
    return {**row, "digest": digest}


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


def entries(conn: Connection, wanted: AuditFilter, limit: int, cursor: str | None = None) -> AuditPage:
    """Rows of the log, newest first."""
    place = (audit.c.at_us, audit.c.tenant, audit.c.seq)
    query = select(*_SELECTED).order_by(*(column.desc() for column in place)).limit(limit + 1)
    for name, column in _EQUAL.items():
        if (value := getattr(wanted, name)) is not None:
            query = query.where(column == value)
    if wanted.action is not None:
        kind = audit.c.action.startswith(f"{wanted.action}.", autoescape=True)
        query = query.where(or_(audit.c.action == wanted.action, kind))
    if wanted.since_us is not None:
        query = query.where(audit.c.at_us >= wanted.since_us)
    if wanted.until_us is not None:
        query = query.where(audit.c.at_us < wanted.until_us)
    if cursor is not None:
        query = query.where(tuple_(*place) < tuple_(*_place_of(cursor)))
    found = [_entry(row) for row in conn.execute(query)]
    last = found[limit - 1] if len(found) > limit else None
    return AuditPage(entries=found[:limit], next=None if last is None else f"{last.at_us}.{last.seq}.{last.tenant}")


_EQUAL = {
    "tenant": audit.c.tenant,
    "user": audit.c.user_id,
    "target": audit.c.target,
    "entrance": audit.c.entrance,
}


def _place_of(cursor: str) -> tuple[int, str, int]:
    """The time, the tenant and the number of the last row of the page before."""
    match cursor.split(".", 2):
        case [at_us, seq, tenant] if all(each.isascii() and each.isdigit() and len(each) < 19 for each in (at_us, seq)):
            return int(at_us), tenant, int(seq)
    raise InvalidRequest("cursor must be the `next` of the previous page")


def _entry(row: Row[Any]) -> AuditEntry:
    fields = dict(row._mapping)
    values = {name: None if fields[name] is None else json.loads(fields[name]) for name in ("before", "after")}
    return AuditEntry(**{**fields, **values})


def verify(conn: Connection, heads: Sequence[str] = (), tenant: str | None = None) -> AuditCheck:
    """Check the chains of all tenants, or of one, and that the rows of the kept ``heads`` are still there."""
    return verify_log(stored_rows(conn, tenant), heads)


def stored_rows(conn: Connection, tenant: str | None = None) -> Iterator[dict[str, Any]]:
    """Every row as it is stored, each tenant's oldest first, as :func:`semel.audit_log.verify_log` takes them."""
    place = (audit.c.tenant, audit.c.seq)
    query = select(*_SELECTED).order_by(*place).limit(BATCH)
    query = query if tenant is None else query.where(audit.c.tenant == tenant)
    found = list(conn.execute(query).mappings())
    while found:
        yield from map(dict, found)
        after = tuple_(found[-1]["tenant"], found[-1]["seq"])
        found = list(conn.execute(query.where(tuple_(*place) > after)).mappings())
