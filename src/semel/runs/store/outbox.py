"""The outbox: events of runs that wait to be published to the app's hook, or sent to webhooks, at least once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Struct
from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    select,
)

from semel.db.dialect import Statement, hot
from semel.db.schema import outbox, submitted
from semel.runs.types import TERMINAL


class OutboxEvent(Struct, frozen=True, kw_only=True):
    """An event to deliver. ``name`` is what happened, such as RunCompleted; ``id`` is the same at every delivery."""

    id: str
    name: str
    run_id: str
    model: str
    tenant: str
    user: str
    status: str
    step: str
    at_us: int
    fence: int
    note: str | None

    @property
    def version(self) -> int:
        """The run's version that this step led to."""
        return int(self.id.rpartition("/")[2])


_NAMES = {"created": "RunCreated", "leased": "RunStarted"}


@hot
def unpublished(conn: Connection, most: int = 100) -> list[OutboxEvent]:
    """The oldest events that are not published yet."""
    return _events(conn.execute(_outbox(outbox.c.unpublished).limit(most)))


def unsent(conn: Connection, most: int = 200) -> list[OutboxEvent]:
    """The oldest events that a subscription may want, except those that another process has locked."""
    return _events(conn.execute(_outbox(outbox.c.unsent).limit(most).with_for_update(of=outbox, skip_locked=True)))


def _outbox(which: ColumnElement[bool]) -> Select[Any]:
    return (
        select(outbox, submitted.c.model, submitted.c.tenant, submitted.c.user_id)
        .join_from(outbox, submitted, outbox.c.run_id == submitted.c.id)
        .where(which)
        .order_by(outbox.c.at_us, outbox.c.run_id, outbox.c.version)
    )


def _events(rows: Iterable[Any]) -> list[OutboxEvent]:
    return [
        OutboxEvent(
            id=f"{row.run_id}/{row.version}",
            name="RunCompleted" if row.status in TERMINAL else _NAMES.get(row.step, "RunChanged"),
            run_id=row.run_id,
            model=row.model,
            tenant=row.tenant,
            user=row.user_id,
            status=row.status,
            step=row.step,
            at_us=row.at_us,
            fence=row.fence,
            note=row.note,
        )
        for row in rows
    ]


_STEP_COLUMNS = {"in_id": "uuid", "in_version": "integer"}


def _clearing(flag: str, other: str) -> tuple[Statement, Statement]:
    """Delete the steps whose other flag is clear, and clear the flag of the rest."""
    same = "k.run_id = in_id AND k.version = in_version"
    return (
        Statement(
            lambda w: (
                f"""
DELETE FROM semel_outbox WHERE NOT {other} AND (run_id, version) IN (
  SELECT k.run_id, k.version FROM {w.batch(_STEP_COLUMNS)} JOIN semel_outbox AS k ON {same})
"""
            ),
            _STEP_COLUMNS,
        ),
        Statement(
            lambda w: f"UPDATE semel_outbox AS k SET {flag} = false FROM {w.batch(_STEP_COLUMNS)} WHERE {same}",
            _STEP_COLUMNS,
        ),
    )


_PUBLISHED = _clearing("unpublished", "unsent")
_SENT = _clearing("unsent", "unpublished")


def _clear(conn: Connection, statements: tuple[Statement, Statement], events: Sequence[OutboxEvent]) -> None:
    remove, clear = statements
    steps = [(each.run_id, each.version) for each in events]
    if steps:
        remove.count(conn, steps)
        if clear.count(conn, steps):
            remove.count(conn, steps)  # those whose other flag another process has cleared since


@hot
def published(conn: Connection, events: Sequence[OutboxEvent]) -> None:
    """Mark these events as published."""
    _clear(conn, _PUBLISHED, events)


def sent(conn: Connection, events: Sequence[OutboxEvent]) -> None:
    """Mark these events as handed to the webhooks that want them."""
    _clear(conn, _SENT, events)
