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
from semel.db.schema import run_events, runs
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
    return _events(conn.execute(_outbox(run_events.c.unpublished).limit(most)))


def unsent(conn: Connection, most: int = 200) -> list[OutboxEvent]:
    """The oldest events that a subscription may want, except those that another process has locked."""
    return _events(
        conn.execute(_outbox(run_events.c.unsent).limit(most).with_for_update(of=run_events, skip_locked=True))
    )


def _outbox(which: ColumnElement[bool]) -> Select[Any]:
    return (
        select(run_events, runs.c.model, runs.c.tenant, runs.c.user_id)
        .join_from(run_events, runs, run_events.c.run_id == runs.c.id)
        .where(which)
        .order_by(run_events.c.at_us, run_events.c.run_id, run_events.c.version)
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


def _clearing(flag: str) -> Statement:
    return Statement(
        lambda w: (
            f"""
UPDATE semel_run_events AS k SET {flag} = false FROM {w.batch(_STEP_COLUMNS)}
WHERE k.run_id = in_id AND k.version = in_version
"""
        ),
        _STEP_COLUMNS,
    )


_PUBLISHED = _clearing("unpublished")
_SENT = _clearing("unsent")


@hot
def published(conn: Connection, events: Sequence[OutboxEvent]) -> None:
    """Mark these events as published."""
    if events:
        _PUBLISHED.count(conn, [(each.run_id, each.version) for each in events])


def sent(conn: Connection, events: Sequence[OutboxEvent]) -> None:
    """Mark these events as handed to the webhooks that want them."""
    if events:
        _SENT.count(conn, [(each.run_id, each.version) for each in events])
