"""The steps of a run's life, as SQL: each function changes a batch of runs and writes their events, in one statement.

      submit           lease                        end
    ──────────▶ PENDING ──────▶ RUNNING ──┬─ succeeded ───────────────▶ SUCCEEDED
                   ▲ │             │      ├─ fatal, or attempts used up ▶ FAILED
                   │ │             │      └─ cancelled ───────────────▶ CANCELLED
                   │ └─ cancel ────┼────────────────────────────────────────▲
                   └───────────────┘
            retried · lost · snoozed · returned

A run whose data is not uploaded yet is PENDING and held; after the step ``uploaded`` it can be leased.
The database refuses every other step (a trigger), a RUNNING run without the end of a lease, and a result of a run that
did not succeed (checks). A lease raises the fence; every later write of the attempt names its fence, and changes
nothing once the run has a higher one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import msgspec
from msgspec import Struct
from sqlalchemy import Connection, text

from semel.db.dialect import Dialect, Statement, StatementContext, hot
from semel.runs.types import HELD_US, AttemptResult, Status, micros

CHANNEL = "semel_runs"

END_STEPS = {
    "fatal": "failed",
    "cancelled": "cancelled",
    "retry": "retried",
    "lost": "lost",
    "snooze": "snoozed",
    "returned": "returned",
}

NOTED = "id, version, changed_us, step, status, fence, worker, note"
"""The columns of the changed row that its event keeps."""
EVENT = "run_id, version, at_us, step, status, fence, worker, note, unpublished, unsent"
WANTED = """coalesce(
  (SELECT max(CASE events WHEN 'RunCompleted' THEN 1 ELSE 2 END) FROM semel_subscriptions WHERE disabled_us IS NULL), 0
) > CASE WHEN status IN ('SUCCEEDED', 'FAILED', 'CANCELLED') THEN 0 ELSE 1 END"""
"""Whether a subscription may want the event: read in the same statement, so that a new subscription counts at once."""


class FinishRequest(Struct, frozen=True):
    """What to write at the end of an attempt. ``delay_us`` passes before the next attempt, if there is one."""

    run_id: str
    fence: int
    ended: AttemptResult
    delay_us: int = 0
    returned: bool = False
    """The worker gives the lease back unused, and no attempt is charged."""


class FinishedRun(Struct, frozen=True):
    """A run as its attempt left it."""

    id: str
    status: Status
    step: str
    model: str
    started_us: int
    changed_us: int


class Lost(FinishedRun, frozen=True):
    """A run whose worker was lost."""

    fence: int
    worker: str
    payload_hash: str
    attempts: int
    user_id: str


def changing(dialect: Dialect, prelude: str, update: str, returning: str) -> str:
    """An UPDATE of ``semel_runs AS k`` that also writes the events, where a CTE may write (PostgreSQL)."""
    with_ = f"WITH {prelude}" if prelude else ""
    if not dialect.writes_in_with:
        return f"{with_} {update} RETURNING {returning}"
    columns = ", ".join(dict.fromkeys([*NOTED.split(", "), *returning.split(", ")]))
    return f"""
{with_ + "," if with_ else "WITH"} changed AS ({update} RETURNING {dialect.returning(columns)}),
noted AS (INSERT INTO semel_run_events ({EVENT}) SELECT {NOTED}, CAST(:publish AS boolean), {WANTED} FROM changed)
SELECT {returning.replace("id,", "CAST(id AS text),", 1)} FROM changed
"""


_NOTE = Statement(
    lambda w: (
        f"""
INSERT INTO semel_run_events ({EVENT})
SELECT {NOTED}, :publish, {WANTED} FROM semel_runs WHERE {w.is_in("id", "ids")}
"""
    )
)


def change(
    conn: Connection,
    statement: Statement,
    context: StatementContext,
    batch: Sequence[Sequence[Any]] | None = None,
    **values: Any,
) -> Sequence[Any]:
    """Run a statement of :func:`changing`; return its rows, which must begin with the id."""
    rows = statement.rows(conn, batch, publish=context.publish, now=context.now, **values)
    if conn.dialect.name == "sqlite":
        note(conn, rows, context)
    return rows


def note(conn: Connection, rows: Sequence[Any], context: StatementContext) -> None:
    """Write the events of runs, whose rows begin with the id: on SQLite, where the statement could not do so itself."""
    if rows:
        _NOTE.count(conn, ids=[row[0] for row in rows], publish=context.publish)


def unlocked(dialect: Dialect, columns: dict[str, str]) -> str:
    """The batch without runs that are locked: one locked row must not cost a worker all its leases."""
    if not dialect.writes_in_with:
        return f"SELECT * FROM {dialect.batch(columns)}"
    return f"""SELECT b.* FROM {dialect.batch(columns)}
  JOIN semel_runs AS h ON h.id = b.in_id AND h.fence = b.in_fence AND {dialect.unindexed("h.status")} = 'RUNNING'
  FOR UPDATE OF h SKIP LOCKED"""


def fenced(dialect: Dialect) -> str:
    return f"k.id = in_id AND k.fence = in_fence AND {dialect.unindexed('k.status')} = 'RUNNING'"


_STATUS_AFTER = """CASE
    WHEN in_kind = 'cancelled' THEN 'CANCELLED'
    WHEN in_kind = 'fatal' THEN 'FAILED'
    WHEN k.cancel_us IS NOT NULL THEN 'CANCELLED'
    WHEN in_kind = 'retry' AND k.errors + 1 >= k.max_attempts THEN 'FAILED'
    WHEN in_kind = 'lost' AND k.losts + 1 >= k.max_lost THEN 'FAILED'
    ELSE 'PENDING' END"""
_END_SET = f"""UPDATE semel_runs AS k
SET status = {_STATUS_AFTER}, ready = (in_delay <= 0),
    note = CASE WHEN {_STATUS_AFTER} = 'CANCELLED' THEN coalesce(k.note, in_why) ELSE in_why END,
    step = CASE WHEN in_kind = 'lost' THEN in_step
                WHEN {_STATUS_AFTER} = 'FAILED' THEN 'failed'
                WHEN {_STATUS_AFTER} = 'CANCELLED' THEN 'cancelled'
                ELSE in_step END,
    version = version + 1, changed_us = {{now}}, lease_until_us = NULL,
    due_us = CASE WHEN {_STATUS_AFTER} = 'PENDING' THEN {{now}} + in_delay ELSE due_us END,
    attempts = attempts - CASE WHEN in_kind IN ('snooze', 'returned') THEN 1 ELSE 0 END,
    errors = errors + CASE WHEN in_kind IN ('retry', 'fatal') THEN 1 ELSE 0 END,
    losts = losts + CASE WHEN in_kind = 'lost' THEN 1 ELSE 0 END,
    last_error = CASE WHEN in_kind IN ('retry', 'fatal', 'lost') THEN in_why ELSE last_error END,
    traceback = CASE WHEN in_kind IN ('retry', 'fatal', 'lost') THEN in_traceback ELSE traceback END,
    finished_us = CASE WHEN {_STATUS_AFTER} = 'PENDING' THEN NULL ELSE {{now}} END,
    cost = coalesce(in_cost, cost)
FROM held WHERE {{fenced}}"""
_OVER = "id, status, step, model, started_us, changed_us"
_LOST = f"{_OVER}, fence, worker, payload_hash, attempts, user_id"

_END_COLUMNS = {
    "in_id": "uuid",
    "in_fence": "bigint",
    "in_kind": "text",
    "in_step": "text",
    "in_why": "text",
    "in_traceback": "text",
    "in_delay": "bigint",
    "in_cost": "bigint",
}
_END = Statement(
    lambda w: changing(
        w,
        f"held AS MATERIALIZED (SELECT * FROM {w.batch(_END_COLUMNS)})",
        _END_SET.format(now=w.now, fenced=fenced(w)),
        _OVER,
    ),
    _END_COLUMNS,
)


_SUCCEED_COLUMNS = {
    "in_id": "uuid",
    "in_fence": "bigint",
    "in_result": "text",
    "in_digest": "text",
    "in_size": "bigint",
    "in_ref": "text",
    "in_artifacts": "text",
    "in_cost": "bigint",
    "in_exact": "text",
    "in_warnings": "text",
}
_PLAIN = 5
"""How many columns every success has; most successes send no more than these."""
_NO_MORE = (None,) * (len(_SUCCEED_COLUMNS) - _PLAIN)


def _succeeding(columns: dict[str, str], more: str = "") -> Statement:
    return Statement(
        lambda w: changing(
            w,
            f"held AS MATERIALIZED (SELECT * FROM {w.batch(columns)})",
            f"""UPDATE semel_runs AS k
SET status = 'SUCCEEDED', step = 'succeeded', note = NULL, version = version + 1, changed_us = {w.now},
    lease_until_us = NULL, finished_us = {w.now}, progress = 1.0, progress_note = NULL,
    result = in_result, result_digest = in_digest, result_size = in_size{more}
FROM held WHERE {fenced(w)}""",
            _OVER,
        ),
        columns,
    )


_SUCCEED = _succeeding(
    _SUCCEED_COLUMNS,
    """, result_ref = in_ref, artifacts = in_artifacts, cost = coalesce(in_cost, cost),
    result_exact = in_exact, warnings = in_warnings""",
)
_SUCCEED_PLAINLY = _succeeding(dict(islice(_SUCCEED_COLUMNS.items(), _PLAIN)))


def _losing(dialect: Dialect, which: str) -> str:
    return changing(
        dialect,
        f"""held AS MATERIALIZED (
  SELECT h.id AS in_id, h.fence AS in_fence, 'lost' AS in_kind, 'lost' AS in_step, 0 AS in_delay,
         CAST(NULL AS text) AS in_traceback, CAST(NULL AS bigint) AS in_cost,
         'worker ' || h.worker || ' was lost: no sign of life before the lease ended' AS in_why
  FROM semel_runs AS h
  WHERE h.status = 'RUNNING' AND h.lease_until_us < {dialect.now} AND {which} {dialect.locking("h", skip=True)}
)""",
        _END_SET.format(now=dialect.now, fenced=fenced(dialect)),
        _LOST,
    )


_LOSE = Statement(
    lambda w: _losing(
        w, f"h.id IN (SELECT id FROM semel_runs WHERE status = 'RUNNING' AND lease_until_us < {w.now} LIMIT :most)"
    )
)
LOSE_THESE = Statement(lambda w: _losing(w, w.is_in("h.id", "ids", "uuid")))


@hot
def end(conn: Connection, endings: Sequence[FinishRequest], context: StatementContext) -> dict[str, FinishedRun]:
    """Write the ends of attempts. Returns the runs whose fence still held; the others' attempts count for nothing.

    A success that was already written under the same fence, and whose reply was lost, is returned again.
    """
    rows: list[Any] = []
    succeeded = sorted(_success_row(each) for each in endings if each.ended.kind == "succeeded")
    if plain := [row[:_PLAIN] for row in succeeded if row[_PLAIN:] == _NO_MORE]:
        rows += change(conn, _SUCCEED_PLAINLY, context, plain)
    if more := [row for row in succeeded if row[_PLAIN:] != _NO_MORE]:
        rows += change(conn, _SUCCEED, context, more)
    if others := [_end_row(each) for each in endings if each.ended.kind != "succeeded"]:
        rows += change(conn, _END, context, sorted(others))
    over = {row[0]: FinishedRun(*row) for row in rows}
    if len(over) < len(endings):
        missing = [each for each in endings if each.run_id not in over and each.ended.kind == "succeeded"]
        over |= _succeeded_before(conn, missing)
    return over


def _success_row(ending: FinishRequest) -> tuple[Any, ...]:
    ended = ending.ended
    return (
        ending.run_id,
        ending.fence,
        ended.result,
        ended.result_digest,
        ended.result_size,
        ended.result_ref,
        msgspec.json.encode(ended.artifacts).decode() if ended.artifacts else None,
        None if ended.cost is None else micros(ended.cost),
        ended.result_exact,
        storable(msgspec.json.encode(ended.warnings).decode()) if ended.warnings else None,
    )


def _end_row(ending: FinishRequest) -> tuple[Any, ...]:
    ended = ending.ended
    kind = "returned" if ending.returned else ended.kind
    return (
        ending.run_id,
        ending.fence,
        kind,
        END_STEPS[kind],
        storable(ended.reason) or None,
        storable(ended.traceback) or None,
        ending.delay_us,
        None if ended.cost is None else micros(ended.cost),
    )


def storable(text: str) -> str:
    """The text as every database can store it: without NUL and lone surrogates."""
    if text.isascii():
        return text.replace("\0", "\\0")
    return text.replace("\0", "\\0").encode("utf-8", "replace").decode()


@hot
def lose_expired(conn: Connection, context: StatementContext, most: int = 500) -> list[Lost]:
    """Take back the runs whose lease expired: they are PENDING again, or FAILED if they were lost too often."""
    return [Lost(*row) for row in change(conn, _LOSE, context, most=most)]


_BEGAN_COLUMNS = {"in_id": "uuid", "in_fence": "bigint"}
_BEGAN = Statement(
    lambda w: (
        f"""
SELECT {w.as_text("k.run_id")}, k.at_us FROM {w.batch(_BEGAN_COLUMNS)}
JOIN semel_run_events AS k ON k.run_id = in_id AND k.fence = in_fence AND k.step = 'leased'
"""
    ),
    _BEGAN_COLUMNS,
)


@hot
def attempts_began(conn: Connection, attempts: Sequence[tuple[str, int]]) -> dict[str, int]:
    """When these attempts (run and fence) began, by run."""
    return dict(tuple(row) for row in _BEGAN.rows(conn, attempts)) if attempts else {}


_MINE_COLUMNS = {"in_id": "uuid", "in_fence": "bigint"}
_MINE = Statement(
    lambda w: (
        f"""
SELECT {w.as_text("k.id")}, {", ".join(f"k.{name}" for name in _OVER.split(", ")[1:])}
FROM {w.batch(_MINE_COLUMNS)} JOIN semel_runs AS k ON k.id = in_id AND k.fence = in_fence
WHERE {w.unindexed("k.status")} = 'SUCCEEDED'
"""
    ),
    _MINE_COLUMNS,
)


def _succeeded_before(conn: Connection, endings: Sequence[FinishRequest]) -> dict[str, FinishedRun]:
    if not endings:
        return {}
    return {row[0]: FinishedRun(*row) for row in _MINE.rows(conn, [(each.run_id, each.fence) for each in endings])}


_CANCEL = Statement(
    lambda w: changing(
        w,
        f"""held AS MATERIALIZED (
  SELECT h.id AS held_id FROM semel_runs AS h
  WHERE {w.is_in("h.id", "ids", "uuid")} AND (h.status = 'PENDING' OR (h.status = 'RUNNING' AND h.cancel_us IS NULL))
  ORDER BY h.id {w.locking("h", skip=False)}
)""",
        f"""UPDATE semel_runs AS k
SET status = CASE k.status WHEN 'PENDING' THEN 'CANCELLED' ELSE k.status END, cancel_us = {w.now}, note = :why,
    step = CASE k.status WHEN 'PENDING' THEN 'cancelled' ELSE 'cancel_requested' END,
    finished_us = CASE k.status WHEN 'PENDING' THEN {w.now} END, version = version + 1, changed_us = {w.now},
    cost = CASE WHEN k.status = 'PENDING' AND k.started_us IS NULL THEN 0 ELSE k.cost END
FROM held
WHERE k.id = held_id AND {w.unindexed("k.status")} IN ('PENDING', 'RUNNING')""",
        "id, status",
    )
)


@hot
def cancel(conn: Connection, ids: Sequence[str], why: str, context: StatementContext) -> dict[str, Status]:
    """Cancel pending runs, and request the cancellation of running ones. Returns those that it changed."""
    return {row[0]: row[1] for row in change(conn, _CANCEL, context, ids=list(ids), why=storable(why))}


_RELEASE = Statement(
    lambda w: changing(
        w,
        "",
        f"""UPDATE semel_runs AS k
SET ready = true, due_us = {w.now}, data_ref = :data_ref, step = 'uploaded', note = NULL, version = version + 1,
    changed_us = {w.now}
WHERE {w.is_in("k.id", "ids", "uuid")} AND {w.unindexed("k.status")} = 'PENDING'
  AND k.due_us - k.created_us >= {HELD_US}""",
        "id, queue",
    )
)
_CALL = text(f"SELECT pg_notify('{CHANNEL}', :queue)")


def release(conn: Connection, run_id: str, data_ref: str, context: StatementContext) -> str | None:
    """Make a run that waits for its data ready to be leased. Returns its queue, or None if it did not wait."""
    for _, queue in change(conn, _RELEASE, context, ids=[run_id], data_ref=data_ref):
        if conn.dialect.name == "postgresql":
            conn.execute(_CALL, {"queue": queue})
        return str(queue)
    return None
