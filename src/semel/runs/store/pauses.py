"""Paused queues and models, as SQL: who pauses or resumes uses these verbs, and leases respect what they wrote."""

from __future__ import annotations

from typing import Any

from msgspec.structs import astuple, replace
from sqlalchemy import ColumnElement, Connection, and_, delete, func, not_, or_, select, text

from semel.db.dialect import StatementContext
from semel.db.schema import active, pauses
from semel.runs.store import audit_log
from semel.runs.store.audit_log import Change
from semel.runs.store.quotas import read_clock
from semel.runs.store.transitions import CHANNEL, storable
from semel.runs.types import Pause, PauseKind

QUEUE_RUNS = "NOT EXISTS (SELECT 1 FROM semel_pauses WHERE kind = 'queue' AND name = :queue)"
"""True if ``:queue`` is not paused. It names no row, so a lease from a paused queue looks at none of its runs."""
MODEL_RUNS = "p.model NOT IN (SELECT name FROM semel_pauses WHERE kind = 'model')"
"""True for runs (``p``) whose model is not paused; the names are read once for a statement."""
BOTH_RUN = f"p.queue NOT IN (SELECT name FROM semel_pauses WHERE kind = 'queue') AND {MODEL_RUNS}"

_NOTIFY = text(f"NOTIFY {CHANNEL}")
_NAMES = ("kind", "name", "since_us", "by_user", "why")
_COLUMNS = [pauses.c[name] for name in _NAMES]
_PAUSE = text(f"INSERT INTO semel_pauses ({', '.join(_NAMES)}) VALUES (:{', :'.join(_NAMES)}) ON CONFLICT DO NOTHING")


def pause(conn: Connection, kind: PauseKind, name: str, why: str, context: StatementContext) -> Pause:
    """Let no run of the queue or model start; those under way go on. A repeat changes nothing.

    A lease whose statement is under way at this moment may still start its runs.
    """
    by = "" if context.by is None else storable(context.by.user)
    asked = Pause(kind, name, read_clock(conn, context), by, why)
    is_new = conn.execute(_PAUSE, dict(zip(_NAMES, astuple(asked), strict=False))).rowcount > 0
    found = None if is_new else conn.execute(select(*_COLUMNS).where(_is(kind, name))).one_or_none()
    shown = replace(asked if found is None else Pause(*found), pending=_pending(conn, kind, name))
    if is_new:
        audit_log.record(conn, context, Change(name=f"{kind}.paused", tenant="", target=name, after=_logged(shown)))
    return shown


def resume(conn: Connection, kind: PauseKind, name: str, context: StatementContext) -> bool:
    """Let runs of the queue or model start again, and notify workers. False if it was not paused."""
    row = conn.execute(delete(pauses).where(_is(kind, name)).returning(*_COLUMNS)).one_or_none()
    if row is None:
        return False
    if conn.dialect.name == "postgresql":
        conn.execute(_NOTIFY)
    before = _logged(Pause(*row))
    audit_log.record(conn, context, Change(name=f"{kind}.resumed", tenant="", target=name, before=before))
    return True


def _logged(pause: Pause) -> dict[str, Any]:
    """What the audit log has of a pause."""
    return {"by": pause.by, "why": pause.why, "since": pause.since.isoformat()}


def list_pauses(conn: Connection) -> list[Pause]:
    """What is paused: queues, then models, by name."""
    rows = conn.execute(select(*_COLUMNS).order_by(pauses.c.kind.desc(), pauses.c.name)).all()
    return [replace(Pause(*row), pending=_pending(conn, row.kind, row.name)) for row in rows]


def why_paused(conn: Connection, queue: str, model: str, *, named: bool) -> str | None:
    """Why a run of this queue and model cannot start, with who paused it if ``named``; None if neither is paused."""
    either = or_(_is("queue", queue), _is("model", model))
    row = conn.execute(select(*_COLUMNS).where(either).order_by(pauses.c.kind.desc()).limit(1)).one_or_none()
    if row is None:
        return None
    found = Pause(*row)
    return found.reason if named else replace(found, by="").reason


def runs_go_on() -> ColumnElement[bool]:
    """True for active runs whose queue and model are not paused."""
    queues, models = (select(pauses.c.name).where(pauses.c.kind == kind) for kind in ("queue", "model"))
    return and_(not_(active.c.queue.in_(queues)), not_(active.c.model.in_(models)))


def _is(kind: str, name: str) -> ColumnElement[bool]:
    return and_(pauses.c.kind == kind, pauses.c.name == name)


def _pending(conn: Connection, kind: str, name: str) -> int:
    """How many runs wait because of it."""
    column: Any = active.c[kind]
    query = select(func.count()).where(column == name, active.c.lease_until_us.is_(None))
    return conn.scalar(query) or 0
