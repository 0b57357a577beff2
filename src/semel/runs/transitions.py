"""The life of a run, step by step, as SQL: each verb is one statement that changes a batch and notes it as events.

      submit           lease                        end
    ──────────▶ PENDING ──────▶ RUNNING ──┬─ succeeded ───────────────▶ SUCCEEDED
                   ▲ │             │      ├─ fatal, or attempts used up ▶ FAILED
                   │ │             │      └─ cancelled ───────────────▶ CANCELLED
                   │ └─ cancel ────┼────────────────────────────────────────▲
                   └───────────────┘
            retried · lost · snoozed · returned

The database refuses every other step (a trigger), a RUNNING run without the end of a lease, and a result of a run that
did not succeed (checks). A lease raises the fence; every later write names it, and changes nothing once it has passed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import msgspec
from msgspec import Struct
from sqlalchemy import Connection

from semel.runs.attempt import Ended
from semel.runs.records import Status, micros
from semel.sql.statements import Statement, Terms, Words

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
"""What an event keeps of the row that was changed."""
EVENT = "run_id, version, at_us, step, status, fence, worker, note, unpublished"


class Leased(Struct, frozen=True):
    """A run as its worker gets it."""

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


class Ending(Struct, frozen=True):
    """What to write at the end of an attempt. ``delay_us`` counts for one that will be followed by another."""

    run_id: str
    fence: int
    ended: Ended
    delay_us: int = 0
    returned: bool = False
    """The worker gives the lease back unused, and no attempt is charged."""


class Over(Struct, frozen=True):
    """A run as its attempt left it."""

    id: str
    status: Status
    step: str
    model: str
    started_us: int
    changed_us: int


def changing(words: Words, prelude: str, update: str, returning: str) -> str:
    """An UPDATE of ``semel_runs AS k`` that notes what it changed: in the statement itself where that can be."""
    with_ = f"WITH {prelude}" if prelude else ""
    if not words.writes_in_with:
        return f"{with_} {update} RETURNING {returning}"
    columns = ", ".join(dict.fromkeys([*NOTED.split(", "), *returning.split(", ")]))
    return f"""
{with_ + "," if with_ else "WITH"} changed AS ({update} RETURNING {words.own(columns)}),
noted AS (INSERT INTO semel_run_events ({EVENT}) SELECT {NOTED}, CAST(:publish AS boolean) FROM changed)
SELECT {returning.replace("id,", "CAST(id AS text),", 1)} FROM changed
"""


_NOTE = Statement(
    lambda w: (
        f"""
INSERT INTO semel_run_events ({EVENT})
SELECT {NOTED}, :publish FROM semel_runs WHERE {w.among("id", "ids")}
"""
    )
)


def change(
    conn: Connection, statement: Statement, terms: Terms, batch: Sequence[Sequence[Any]] | None = None, **values: Any
) -> Sequence[Any]:
    """Run a changing statement; its rows begin with the id."""
    rows = statement.rows(conn, batch, publish=terms.publish, now=terms.now, **values)
    note(conn, rows, terms)
    return rows


def note(conn: Connection, rows: Sequence[Any], terms: Terms) -> None:
    """Write the events of runs, of which the rows begin with the ids, where the statement could not do so itself."""
    if rows and conn.dialect.name == "sqlite":
        _NOTE.count(conn, ids=[row[0] for row in rows], publish=terms.publish)


def _leasing(words: Words, which: str) -> str:
    """Lease the runs that ``which`` picks, as ``p``, unless somebody else is at it."""
    now = words.now
    return changing(
        words,
        f"""picked AS MATERIALIZED (
  SELECT p.id AS picked_id FROM semel_runs AS p WHERE p.status = 'PENDING' AND {which} {words.locking("p", skip=True)}
)""",
        f"""UPDATE semel_runs AS k
SET status = 'RUNNING', step = 'leased', note = NULL, version = version + 1, changed_us = {now}, fence = fence + 1,
    attempts = attempts + 1, worker = :worker, lease_until_us = {now} + lease_us, heartbeat_us = {now},
    started_us = coalesce(started_us, {now}), progress = NULL, progress_note = NULL
FROM picked WHERE k.id = picked.picked_id AND {words.unindexed("k.status")} = 'PENDING'""",
        _LEASED,
    )


_LEASED = (
    "id, fence, model, parameters, payload_hash, attempts, errors, user_id, tenant, queue, lease_us, created_us, "
    "started_us, changed_us"
)

_LEASE = Statement(
    lambda w: _leasing(
        w,
        f"p.ready AND p.queue = :queue AND {w.among('p.model', 'models')} "
        "ORDER BY p.priority DESC, p.due_us, p.id LIMIT :most",
    )
)
_LEASE_THESE = Statement(lambda w: _leasing(w, f"p.due_us <= {w.now} AND {w.among('p.id', 'ids', 'uuid')}"))


class LeaseRequest(Struct, frozen=True):
    """A worker asks for up to ``most`` runs of the models that it knows, from the queues in their order."""

    worker: str
    queues: tuple[str, ...]
    models: list[str]
    most: int


def lease(conn: Connection, request: LeaseRequest, terms: Terms) -> list[Leased]:
    """Take runs that are due."""
    taken: list[Leased] = []
    for queue in request.queues:
        most = request.most - len(taken)
        if most > 0:
            values: dict[str, Any] = {"worker": request.worker, "queue": queue, "models": request.models, "most": most}
            taken += [Leased(*row) for row in change(conn, _LEASE, terms, **values)]
    return taken


def lease_these(conn: Connection, worker: str, ids: Sequence[str], terms: Terms) -> list[Leased]:
    """Take these runs where they are due, also from owners whose leases have ended."""
    change(conn, _LOSE_THESE, terms, ids=list(ids))
    rows = change(conn, _LEASE_THESE, terms, worker=worker, ids=list(ids))
    return [Leased(*row) for row in rows]


_WAKE = Statement(
    lambda w: (
        f"""
UPDATE semel_runs SET ready = true WHERE id IN (
  SELECT p.id FROM semel_runs AS p WHERE p.status = 'PENDING' AND NOT p.ready AND p.due_us <= {w.now}
  ORDER BY p.due_us LIMIT :most {w.locking("p", skip=True)}
)"""
    )
)
_NEXT = Statement(lambda w: f"SELECT min(due_us) - {w.now} FROM semel_runs WHERE status = 'PENDING' AND NOT ready")


def wake(conn: Connection, terms: Terms, most: int = 500) -> tuple[int, int | None]:
    """Let the runs whose time has come be leased; answer how many, and in how many microseconds the next is due."""
    (until_next,) = _NEXT.rows(conn, now=terms.now)[0]
    if until_next is None or until_next > 0:
        return 0, until_next
    return _WAKE.count(conn, most=most, now=terms.now), 0


def _unlocked(words: Words, columns: dict[str, str]) -> str:
    """The batch without the runs that somebody has locked: one of them must not cost a worker all its leases."""
    if not words.writes_in_with:
        return f"SELECT * FROM {words.batch(columns)}"
    return f"""SELECT b.* FROM {words.batch(columns)}
  JOIN semel_runs AS h ON h.id = b.in_id AND h.fence = b.in_fence AND {words.unindexed("h.status")} = 'RUNNING'
  FOR UPDATE OF h SKIP LOCKED"""


def _fenced(words: Words) -> str:
    return f"k.id = in_id AND k.fence = in_fence AND {words.unindexed('k.status')} = 'RUNNING'"


_RENEW_COLUMNS = {"in_id": "uuid", "in_fence": "bigint", "in_progress": "double precision", "in_note": "text"}
_RENEW = Statement(
    lambda w: (
        f"""
WITH held AS MATERIALIZED ({_unlocked(w, _RENEW_COLUMNS)})
UPDATE semel_runs AS k
SET lease_until_us = {w.now} + lease_us, heartbeat_us = {w.now}, progress = coalesce(in_progress, progress),
    progress_note = CASE WHEN in_progress IS NULL THEN progress_note ELSE in_note END
FROM held WHERE {_fenced(w)}
RETURNING {w.plain(w.own("id"))}, {w.own("cancel_us")}
"""
    ),
    _RENEW_COLUMNS,
)


class Beat(Struct, frozen=True):
    """A sign of life of an attempt, with its progress where that is news."""

    run_id: str
    fence: int
    progress: float | None = None
    note: str | None = None


def renew(conn: Connection, beats: Sequence[Beat], terms: Terms) -> dict[str, bool]:
    """Extend the leases in one statement. Answers those it could, and whether their end is asked for.

    One that is missing is lost, or its row is locked by someone: see watch.
    """
    rows = _RENEW.rows(conn, sorted((b.run_id, b.fence, b.progress, b.note) for b in beats), now=terms.now)
    return {row[0]: row[1] is not None for row in rows}


_WATCH_COLUMNS = {"in_id": "uuid", "in_fence": "bigint"}
_WATCH = Statement(
    lambda w: (
        f"""
SELECT {w.plain("k.id")}, k.cancel_us FROM {w.batch(_WATCH_COLUMNS)}
JOIN semel_runs AS k ON {_fenced(w)}
"""
    ),
    _WATCH_COLUMNS,
)


def watch(conn: Connection, held: Sequence[tuple[str, int]]) -> dict[str, bool]:
    """As renew, without extending anything."""
    return {row[0]: row[1] is not None for row in _WATCH.rows(conn, held)}


_HELD_BY = Statement(
    lambda w: f"SELECT {w.plain('id')}, fence FROM semel_runs WHERE status = 'RUNNING' AND worker = :worker"
)


def held_by(conn: Connection, worker: str) -> dict[str, int]:
    """The runs that the worker holds, with their fences."""
    return {row[0]: row[1] for row in _HELD_BY.rows(conn, worker=worker)}


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
        _END_SET.format(now=w.now, fenced=_fenced(w)),
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
}
_PLAIN = 5
"""How many of these every success has; most have no more, and send no more."""
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
FROM held WHERE {_fenced(w)}""",
            _OVER,
        ),
        columns,
    )


_SUCCEED = _succeeding(
    _SUCCEED_COLUMNS, ", result_ref = in_ref, artifacts = in_artifacts, cost = coalesce(in_cost, cost)"
)
_SUCCEED_PLAINLY = _succeeding(dict(islice(_SUCCEED_COLUMNS.items(), _PLAIN)))


def _losing(words: Words, which: str) -> str:
    return changing(
        words,
        f"""held AS MATERIALIZED (
  SELECT h.id AS in_id, h.fence AS in_fence, 'lost' AS in_kind, 'lost' AS in_step, 0 AS in_delay,
         CAST(NULL AS text) AS in_traceback, CAST(NULL AS bigint) AS in_cost,
         'worker ' || h.worker || ' was lost: no sign of life before the lease ended' AS in_why
  FROM semel_runs AS h
  WHERE h.status = 'RUNNING' AND h.lease_until_us < {words.now} AND {which} {words.locking("h", skip=True)}
)""",
        _END_SET.format(now=words.now, fenced=_fenced(words)),
        _OVER,
    )


_LOSE = Statement(
    lambda w: _losing(
        w, f"h.id IN (SELECT id FROM semel_runs WHERE status = 'RUNNING' AND lease_until_us < {w.now} LIMIT :most)"
    )
)
_LOSE_THESE = Statement(lambda w: _losing(w, w.among("h.id", "ids", "uuid")))


def end(conn: Connection, endings: Sequence[Ending], terms: Terms) -> dict[str, Over]:
    """Write the ends of attempts. Answers the runs whose fence still held; the others' attempts count for nothing."""
    rows: list[Any] = []
    succeeded = sorted(_success_row(each) for each in endings if each.ended.kind == "succeeded")
    if plain := [row[:_PLAIN] for row in succeeded if row[_PLAIN:] == _NO_MORE]:
        rows += change(conn, _SUCCEED_PLAINLY, terms, plain)
    if more := [row for row in succeeded if row[_PLAIN:] != _NO_MORE]:
        rows += change(conn, _SUCCEED, terms, more)
    if others := [_end_row(each) for each in endings if each.ended.kind != "succeeded"]:
        rows += change(conn, _END, terms, sorted(others))
    return {row[0]: Over(*row) for row in rows}


def _success_row(ending: Ending) -> tuple[Any, ...]:
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
    )


def _end_row(ending: Ending) -> tuple[Any, ...]:
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
    """Text that every database takes: no NUL, no half of a surrogate pair."""
    if text.isascii():
        return text.replace("\0", "\\0")
    return text.replace("\0", "\\0").encode("utf-8", "replace").decode()


def lose_expired(conn: Connection, terms: Terms, most: int = 500) -> list[Over]:
    """Take back the runs whose leases have ended: to be leased again, or FAILED when they were lost too often."""
    return [Over(*row) for row in change(conn, _LOSE, terms, most=most)]


_MINE = Statement(
    lambda w: (
        f"""
SELECT {w.plain("k.id")}, {", ".join(f"k.{name}" for name in _OVER.split(", ")[1:])}
FROM {w.batch(_WATCH_COLUMNS)} JOIN semel_runs AS k ON k.id = in_id AND k.fence = in_fence
WHERE {w.unindexed("k.status")} = 'SUCCEEDED'
"""
    ),
    _WATCH_COLUMNS,
)


def succeeded_before(conn: Connection, endings: Sequence[Ending]) -> dict[str, Over]:
    """Those whose success was written already under the same fence: only the reply was lost."""
    asked = [(each.run_id, each.fence) for each in endings if each.ended.kind == "succeeded"]
    return {row[0]: Over(*row) for row in _MINE.rows(conn, asked)} if asked else {}


_CANCEL = Statement(
    lambda w: changing(
        w,
        f"""held AS MATERIALIZED (
  SELECT h.id AS held_id FROM semel_runs AS h
  WHERE {w.among("h.id", "ids", "uuid")} AND (h.status = 'PENDING' OR (h.status = 'RUNNING' AND h.cancel_us IS NULL))
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


def cancel(conn: Connection, ids: Sequence[str], why: str, terms: Terms) -> dict[str, Status]:
    """End what is pending, and ask for the end of what is running. Answers those that this changed."""
    return {row[0]: row[1] for row in change(conn, _CANCEL, terms, ids=list(ids), why=storable(why))}
