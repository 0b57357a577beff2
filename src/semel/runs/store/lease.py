"""Leases, as SQL: workers lease runs that are due, renew the leases, store log lines, and learn of cancellations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct
from sqlalchemy import (
    BigInteger,
    Connection,
    and_,
    case,
    literal,
    or_,
    select,
)

from semel.db.dialect import Dialect, Statement, StatementContext, hot, transaction
from semel.db.schema import active
from semel.runs.store.pauses import BOTH_RUN, MODEL_RUNS, QUEUE_RUNS, runs_go_on
from semel.runs.store.quotas import read_clock
from semel.runs.store.transitions import (
    FENCED,
    FIRST_START,
    LOSE_THESE,
    FinishedRun,
    FinishRequest,
    end,
    storable,
    tell,
    telling,
    unlocked,
)
from semel.runs.types import HELD_US, INTERNAL_QUEUE, MICRO


class Leased(Struct, frozen=True):
    """A run as its worker receives it."""

    id: str
    fence: int
    model: str
    parameters: str
    payload_hash: str
    attempts: int
    errors: int
    user_id: str
    tenant: str
    queue: str
    lease_us: int
    created_us: int
    started_us: int
    changed_us: int
    data_ref: str | None
    trace: str | None
    due_us: int
    """When this attempt could have begun."""
    priority: int
    seed: int | None = None
    """The seed that was given; None if it is derived from the payload."""


def _picked(dialect: Dialect, which: str) -> str:
    """The runs (``p``) that wait and for which ``which`` is true, except those that another transaction has locked."""
    return f"""SELECT p.ctid AS in_place FROM semel_active AS p
WHERE p.lease_until_us IS NULL AND {which} {dialect.locking("p", skip=True)}"""


def _taken(now: str) -> str:
    return f"""UPDATE semel_active AS k
SET step = 'leased', note = NULL, version = version + 1, fence = fence + 1, attempts = attempts + 1, worker = :worker,
    began_us = {now}, lease_until_us = {now} + lease_us, started_us = coalesce(started_us, began_us),
    heartbeat_us = NULL, progress = NULL, progress_note = NULL, progress_us = NULL"""


def _leased(dialect: Dialect) -> str:
    """The columns of :class:`Leased`."""
    return f"""{dialect.as_text("k.id")}, k.fence, k.model, r.parameters, {dialect.digits("r.payload_hash")},
  k.attempts, k.errors, k.user_id, k.tenant, k.queue, k.lease_us, r.created_us, {FIRST_START}, k.began_us,
  coalesce(k.data_ref, r.data_ref), r.trace, k.due_us, k.priority, r.seed"""


_TAKEN = """k.id, k.fence, k.model, k.attempts, k.errors, k.user_id, k.tenant, k.queue, k.lease_us, k.started_us,
  k.began_us, k.data_ref, k.due_us, k.priority, k.version, k.step, k.worker"""
"""What the rest of the statement reads of a row that was leased: to form and to read all its columns takes time."""


class _Leasing:
    """Leases runs: on PostgreSQL in one statement, on SQLite in two."""

    def __init__(self, which: Callable[[Dialect], str]) -> None:
        self._whole = Statement(
            lambda w: (
                f"""
WITH picked AS MATERIALIZED ({_picked(w, which(w))}),
k AS ({_taken(w.now)} FROM picked WHERE k.ctid = in_place AND k.lease_until_us IS NULL RETURNING {_TAKEN}),
told AS ({telling("(SELECT k.*, id AS run_id, began_us AS at_us, 'RUNNING' AS status, NULL AS note FROM k) AS t")})
SELECT {_leased(w)} FROM k JOIN semel_runs AS r ON r.id = k.id"""
            )
        )
        self._waiting = Statement(
            lambda w: f"{_AS_JSON} FROM ({_WAITING} WHERE p.lease_until_us IS NULL AND {which(w)})"
        )

    def rows(self, conn: Connection, context: StatementContext, **values: Any) -> list[Leased]:
        """Lease them."""
        if conn.dialect.name == "sqlite":
            return self._by_row(conn, context, **values)
        rows = self._whole.rows(conn, publish=context.publish, now=context.now, **values)
        return [Leased(*row) for row in rows]

    def _by_row(self, conn: Connection, context: StatementContext, **values: Any) -> list[Leased]:
        """Read the runs as they will be, then take them: there is no other writer."""
        now, worker = context.now, values.pop("worker")
        [(rows, versions, waiting)] = self._waiting.rows(conn, now=now, **values)
        leased = [Leased(*each) for each in msgspec.json.decode(waiting)]
        if leased:
            _TAKE_ROWS.count(conn, rows=rows, worker=worker, now=now)
            tell(conn, zip((each.id for each in leased), msgspec.json.decode(versions), strict=True), context)
        return leased


_AS_LEASED = """id, fence, model, parameters, payload_hash, attempts, errors, user_id, tenant, queue, lease_us,
  created_us, started_us, began_us, data_ref, trace, due_us, priority, seed"""
_AS_JSON = f"SELECT json_group_array(place), json_group_array(version), json_group_array(json_array({_AS_LEASED}))"
"""SQLite: all rows as one. Between two rows, another thread of the worker would take over, until it waits."""
_WAITING = """
SELECT p.rowid AS place, p.version + 1 AS version, p.id, p.fence + 1 AS fence, p.model, r.parameters, r.payload_hash,
  p.attempts + 1 AS attempts, p.errors, p.user_id, p.tenant, p.queue, p.lease_us, r.created_us,
  coalesce(p.started_us, p.began_us, :now) AS started_us, :now AS began_us,
  coalesce(p.data_ref, r.data_ref) AS data_ref, r.trace, p.due_us, p.priority, r.seed
FROM semel_active AS p CROSS JOIN semel_runs AS r ON r.id = p.id"""
"""SQLite: the columns of :class:`Leased` of runs that wait, as they are after the lease."""
_TAKE_ROWS = Statement(
    lambda w: f"{_taken(w.now)} WHERE {w.is_in('k.rowid', 'rows')} AND k.lease_until_us IS NULL",
)


def _next_ones(dialect: Dialect, *, since: bool) -> str:
    due = "AND p.priority >= CAST(:least AS integer) AND p.due_us >= CAST(:since_us AS bigint)" if since else ""
    return (
        f"p.ready = true AND p.queue = :queue {due} AND {dialect.is_in('p.model', 'models')} "
        f"AND {QUEUE_RUNS} AND {MODEL_RUNS} "
        "ORDER BY p.priority DESC, p.due_us, p.id LIMIT :most"
    )


_LEASE = _Leasing(lambda w: _next_ones(w, since=False))
_LEASE_SINCE = _Leasing(lambda w: _next_ones(w, since=True))
_LEASE_THESE = _Leasing(
    lambda w: f"(p.ready OR p.due_us <= {w.now}) AND {w.is_in('p.id', 'ids', 'uuid')} AND {BOTH_RUN}"
)


class LeaseRequest(Struct, frozen=True):
    """Up to ``most`` runs of these models, from the queues in their order."""

    worker: str
    queues: tuple[str, ...]
    models: list[str]
    most: int
    since: Mapping[str, tuple[int, int]] = {}
    """For a queue, a priority and a time: only if too few runs of at least this priority were due from this time on,
    all of them are looked through."""


@hot
def lease(conn: Connection, request: LeaseRequest, context: StatementContext) -> list[Leased]:
    """Lease runs that are due, queue by queue."""
    taken: list[Leased] = []
    for queue in request.queues:
        most = request.most - len(taken)
        if most > 0:
            values: dict[str, Any] = {"worker": request.worker, "queue": queue, "models": request.models, "most": most}
            if queue in request.since:
                least, since_us = request.since[queue]
                taken += _LEASE_SINCE.rows(conn, context, least=least, since_us=since_us, **values)
                values["most"] = request.most - len(taken)
            if values["most"]:
                taken += _LEASE.rows(conn, context, **values)
    return taken


@hot
def finish_and_lease(
    conn: Connection, endings: Sequence[FinishRequest], requests: Sequence[LeaseRequest], context: StatementContext
) -> tuple[dict[str, FinishedRun], list[list[Leased]]]:
    """Write the ends of attempts (see ``transitions.end``), then lease for each request.

    On SQLite this is one transaction. On PostgreSQL each statement commits by itself.
    """
    finished = end(conn, endings, context) if endings else {}
    return finished, [lease(conn, each, context) for each in requests]


@hot
def lease_these(conn: Connection, worker: str, ids: Sequence[str], context: StatementContext) -> list[Leased]:
    """Lease these runs if they are due, including those whose lease expired."""
    with transaction(conn):
        LOSE_THESE.rows(conn, context, ids=list(ids))
        return _LEASE_THESE.rows(conn, context, worker=worker, ids=list(ids))


_WAKE = Statement(
    lambda w: (
        f"""
UPDATE semel_active SET ready = true WHERE id IN (
  SELECT p.id FROM semel_active AS p WHERE NOT p.ready AND p.due_us <= {w.now}
  ORDER BY p.due_us LIMIT :most {w.locking("p", skip=True)}
)"""
    )
)
_NEXT = Statement(
    lambda w: (
        f"""
SELECT (SELECT min(due_us) FROM semel_active WHERE NOT ready) - {w.now},
       (SELECT max(since_us) FROM semel_active WHERE NOT ready) > {w.now},
       EXISTS (SELECT 1 FROM semel_active AS p WHERE p.lease_until_us IS NULL AND p.ready = true
               AND {w.is_in("p.queue", "queues")} AND {w.is_in("p.model", "models")} AND {BOTH_RUN})
"""
    )
)
_RESTART = Statement(
    lambda w: (
        f"""
UPDATE semel_active SET due_us = {w.now} + due_us - since_us, since_us = {w.now} WHERE id IN (
  SELECT p.id FROM semel_active AS p
  WHERE NOT p.ready AND p.since_us > {w.now} AND p.due_us - p.since_us < {HELD_US} {w.locking("p", skip=True)}
)"""
    )
)


@hot
def wake(
    conn: Connection,
    context: StatementContext,
    most: int = 500,
    *,
    queues: Sequence[str] = (),
    models: Sequence[str] = (),
) -> tuple[bool, float | None]:
    """Make the runs that are due ready to be leased. Returns whether there were any, or whether runs of these models
    in these queues can be leased; and in how many seconds the next is due.

    A delay that began later than now began before the clock was put back: it starts again, no longer than before.
    """
    values: dict[str, Any] = {"queues": list(queues), "models": list(models), "now": context.now}
    until_next, began_later, ready = _NEXT.rows(conn, **values)[0]
    if began_later and _RESTART.count(conn, now=context.now):
        until_next, _, ready = _NEXT.rows(conn, **values)[0]
    if until_next is None or until_next > 0:
        return bool(ready), None if until_next is None else until_next / MICRO
    return bool(_WAKE.count(conn, most=most, now=context.now) or ready), 0


_RENEW_COLUMNS = {"in_id": "uuid", "in_fence": "bigint", "in_progress": "double precision", "in_note": "text"}
_RENEW = Statement(
    lambda w: (
        f"""
WITH held AS MATERIALIZED ({unlocked(w, _RENEW_COLUMNS)})
UPDATE semel_active AS k
SET lease_until_us = {w.now} + lease_us, heartbeat_us = {w.now}, progress = coalesce(in_progress, progress),
    progress_note = CASE WHEN in_progress IS NULL THEN progress_note ELSE in_note END,
    progress_us = CASE WHEN in_progress <> coalesce(progress, -1) OR in_note <> coalesce(progress_note, '')
                       THEN {w.now} ELSE progress_us END
FROM held WHERE {FENCED}
RETURNING {w.as_text(w.returning("id"))}, {w.returning("cancel_us")}
"""
    ),
    _RENEW_COLUMNS,
)


class LeaseRenewal(Struct, frozen=True):
    """The renewal of an attempt's lease, with its progress if that changed."""

    run_id: str
    fence: int
    progress: float | None = None
    note: str | None = None


@hot
def renew(conn: Connection, beats: Sequence[LeaseRenewal], context: StatementContext) -> dict[str, bool]:
    """Renew leases in one statement. Returns the runs that it renewed, and whether each is to be cancelled.

    A run that is missing is lost, or its row is locked: see watch.
    """
    rows = _RENEW.rows(conn, sorted((b.run_id, b.fence, b.progress, b.note) for b in beats), now=context.now)
    return {row[0]: row[1] is not None for row in rows}


_WATCH_COLUMNS = {"in_id": "uuid", "in_fence": "bigint"}
_WATCH = Statement(
    lambda w: (
        f"""
SELECT {w.as_text("k.id")}, k.cancel_us FROM {w.batch(_WATCH_COLUMNS)}
JOIN semel_active AS k ON {FENCED}
"""
    ),
    _WATCH_COLUMNS,
)


@hot
def watch(conn: Connection, held: Sequence[tuple[str, int]]) -> dict[str, bool]:
    """As renew, without renewing: which of these runs are still held, and whether each is to be cancelled."""
    return {row[0]: row[1] is not None for row in _WATCH.rows(conn, held)}


_HELD_BY = Statement(
    lambda w: f"SELECT {w.as_text('id')}, fence FROM semel_active WHERE worker = :worker AND lease_until_us IS NOT NULL"
)


@hot
def held_by(conn: Connection, worker: str) -> dict[str, int]:
    """The runs that the worker holds, with their fences."""
    return {row[0]: row[1] for row in _HELD_BY.rows(conn, worker=worker)}


class PendingRun(Struct, frozen=True):
    """A run that can be leased. Every step of its life is announced anew."""

    id: str
    queue: str
    version: int

    @property
    def step(self) -> tuple[str, int]:
        """What identifies an announcement."""
        return (self.id, self.version)


PUT_BACK_US = 5 * MICRO
"""How far a clock must be put back to be noticed: less is over soon, and may be a run that is being submitted."""


@hot
def due(conn: Connection, silent: float, most: int, context: StatementContext) -> list[PendingRun]:
    """Runs, with their queues, that are due and that perhaps were not announced.

    The submitter announces a run that is due at once: it is listed only after it has waited ``silent`` seconds. The
    service's own work is left out: its servers poll for it. So is what is paused: it is listed when it is resumed.

    A run that became due later than now was submitted after the clock was read, or else the clock was put back since.
    """
    now = read_clock(conn, context)
    silent_us = round(silent * MICRO)
    at_once = and_(active.c.step.is_(None), active.c.due_us <= active.c.since_us)
    submitter_us = case((at_once, literal(silent_us, BigInteger)), else_=literal(0, BigInteger))
    put_back = and_(active.c.ready, active.c.due_us > now + PUT_BACK_US)
    waited = or_(active.c.due_us <= literal(now, BigInteger) - submitter_us, put_back)
    query = select(active.c.id, active.c.queue, active.c.version).where(active.c.lease_until_us.is_(None), waited)
    query = query.where(active.c.queue != INTERNAL_QUEUE, runs_go_on())
    return [PendingRun(*row) for row in conn.execute(query.order_by(active.c.due_us).limit(most))]


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
    """Store the lines; those that are stored already stay as they are."""
    _LOG.count(conn, [(x.run_id, x.fence, x.line, x.at_us, x.level, storable(x.text)) for x in lines])
