"""What keeps the ledger in order: workers' signs of life, the election of who sweeps, the outbox, and what is old."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct
from sqlalchemy import BigInteger, ColumnElement, Connection, Select, and_, case, delete, literal, or_, select

from semel.db.dialect import Statement, StatementContext, hot
from semel.db.schema import run_events, runs, workers
from semel.runs.store import quotas, run_keys
from semel.runs.store.quotas import read_clock
from semel.runs.store.transitions import storable
from semel.runs.types import INTERNAL_QUEUE, MICRO, TERMINAL

BATCH = 1000
"""Rows of a kind that one transaction removes."""
DAY_US = 86400 * MICRO


class WorkerCard(Struct, frozen=True, kw_only=True):
    """How a worker tells of itself."""

    id: str
    name: str
    host: str
    pid: int
    queues: Sequence[str]
    models: Mapping[str, str]
    """Where each model runs: in the loop, a process or a thread."""
    slots: Mapping[str, int]
    """How many can run there."""
    draining: bool = False


_SEEN = Statement(
    lambda w: (
        f"""
INSERT INTO semel_workers (id, name, host, pid, queues, models, slots, draining, started_us, seen_us)
VALUES (:id, :name, :host, :pid, :queues, :models, :slots, :draining, {w.now}, {w.now})
ON CONFLICT (id) DO UPDATE SET seen_us = {w.now}, draining = excluded.draining, models = excluded.models
"""
    )
)


@hot
def worker_seen(conn: Connection, card: WorkerCard, terms: StatementContext) -> None:
    """The worker is alive."""
    values: dict[str, Any] = {
        "id": card.id,
        "name": card.name,
        "host": card.host,
        "pid": card.pid,
        "queues": json.dumps(list(card.queues)),
        "models": json.dumps(dict(card.models)),
        "slots": json.dumps(dict(card.slots)),
        "draining": card.draining,
    }
    _SEEN.count(conn, now=terms.now, **values)


@hot
def worker_gone(conn: Connection, worker_id: str) -> None:
    """The worker has stopped in good order."""
    conn.execute(delete(workers).where(workers.c.id == worker_id))


def remove_expired(conn: Connection, terms: StatementContext) -> tuple[int, bool]:
    """Remove keys and reservations that expired, and workers not seen for a day.

    Returns how many keys and reservations were removed, and whether there may be more.
    """
    now = read_clock(conn, terms)
    conn.execute(delete(workers).where(workers.c.seen_us < now - DAY_US))
    removed = run_keys.purge_keys(conn, terms, BATCH), quotas.purge_reservations(conn, terms, BATCH)
    return sum(removed), max(removed) >= BATCH


_LEAD = Statement(
    lambda w: (
        f"""
INSERT INTO semel_leaders AS k (role, holder, until_us, term_us) VALUES (:role, :holder, {w.now} + :term, :term)
ON CONFLICT (role) DO UPDATE SET holder = excluded.holder, until_us = excluded.until_us, term_us = excluded.term_us
WHERE k.holder = excluded.holder OR k.until_us < {w.now} OR k.until_us > {w.now} + k.term_us
RETURNING holder
"""
    )
)
_STEP_DOWN = Statement(lambda _: "DELETE FROM semel_leaders WHERE role = :role AND holder = :holder")


@hot
def acquire_leadership(conn: Connection, role: str, holder: str, term: float, terms: StatementContext) -> bool:
    """True for the one who has the role for the next ``term`` seconds; anybody can have it when that is over.

    A term that ends later than a new one would was begun before the clock was put back, and does not count.
    """
    return bool(_LEAD.rows(conn, role=role, holder=holder, term=round(term * MICRO), now=terms.now))


_TERM_LEFT = Statement(
    lambda w: (
        f"""
SELECT until_us - {w.now} FROM semel_leaders
WHERE role = :role AND holder <> :holder AND until_us >= {w.now} AND until_us <= {w.now} + term_us
"""
    )
)


@hot
def term_left(conn: Connection, role: str, holder: str, terms: StatementContext) -> float:
    """Seconds for which another has the role; 0 when it can be had."""
    rows = _TERM_LEFT.rows(conn, role=role, holder=holder, now=terms.now)
    return max(rows[0][0] / MICRO, 1e-6) if rows else 0.0


_SHORTEN = Statement(
    lambda w: (
        f"""
UPDATE semel_runs SET lease_until_us = {w.now} + lease_us
WHERE status = 'RUNNING' AND lease_until_us > {w.now} + lease_us
"""
    )
)


@hot
def repair_times(conn: Connection, terms: StatementContext) -> None:
    """After the clock was put back: let leases and reservations last no longer than they were asked for."""
    _SHORTEN.count(conn, now=terms.now)
    quotas.restart_reservations(conn, terms)


@hot
def release_leadership(conn: Connection, role: str, holder: str) -> None:
    """Leave the role to whoever asks next."""
    _STEP_DOWN.count(conn, role=role, holder=holder)


_LOG_COLUMNS = {
    "in_id": "uuid",
    "in_fence": "bigint",
    "in_line": "integer",
    "in_at": "bigint",
    "in_level": "text",
    "in_text": "text",
}
_LOG = Statement(
    lambda w: (
        f"""
INSERT INTO semel_run_logs (run_id, fence, line, at_us, level, text)
SELECT in_id, in_fence, in_line, in_at, in_level, in_text FROM {w.batch(_LOG_COLUMNS)} WHERE true
ON CONFLICT DO NOTHING
"""
    ),
    _LOG_COLUMNS,
)


class LogLineRow(Struct, frozen=True):
    """A line of a run's log, on its way to the database."""

    run_id: str
    fence: int
    line: int
    at_us: int
    level: str
    text: str


@hot
def log(conn: Connection, lines: Sequence[LogLineRow]) -> None:
    """Keep the lines; one that was kept before is left as it is."""
    _LOG.count(conn, [(x.run_id, x.fence, x.line, x.at_us, x.level, storable(x.text)) for x in lines])


class OutboxEvent(Struct, frozen=True, kw_only=True):
    """An event on its way out. ``name`` says what happened, as RunCompleted; ``id`` is the same at every delivery."""

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
    """The oldest events that nobody has confirmed to have published."""
    return _events(conn.execute(_outbox(run_events.c.unpublished).limit(most)))


def unsent(conn: Connection, most: int = 200) -> list[OutboxEvent]:
    """The oldest events that a subscription may want, except those that another is handing on at this moment."""
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
    """These have been published."""
    if events:
        _PUBLISHED.count(conn, [(each.run_id, each.version) for each in events])


def sent(conn: Connection, events: Sequence[OutboxEvent]) -> None:
    """These have been handed on to those who want them."""
    if events:
        _SENT.count(conn, [(each.run_id, each.version) for each in events])


class PendingRun(Struct, frozen=True):
    """A run that can be leased. With every step of its life it becomes due anew."""

    id: str
    queue: str
    version: int

    @property
    def step(self) -> tuple[str, int]:
        """What was told of, once it was."""
        return (self.id, self.version)


@hot
def due(conn: Connection, silent: float, most: int, terms: StatementContext) -> list[PendingRun]:
    """Runs, with their queues, that are due and that perhaps no worker was told of.

    The submitter announces a run that is due at once: it is listed only after it has waited ``silent`` seconds. The
    service's own work is left out: its servers poll for it.
    """
    now = read_clock(conn, terms)
    silent_us = round(silent * MICRO)
    pending = literal("PENDING", literal_execute=True)
    at_once = and_(runs.c.step == "created", runs.c.due_us <= runs.c.created_us, runs.c.changed_us == runs.c.created_us)
    told = case((at_once, literal(silent_us, BigInteger)), else_=literal(0, BigInteger))
    put_back = and_(runs.c.ready, runs.c.due_us > now)  # the clock was, since it was due
    waited = or_(runs.c.due_us <= literal(now, BigInteger) - told, put_back)
    query = select(runs.c.id, runs.c.queue, runs.c.version).where(runs.c.status == pending, waited)
    query = query.where(runs.c.queue != INTERNAL_QUEUE)
    return [PendingRun(*row) for row in conn.execute(query.order_by(runs.c.due_us).limit(most))]
