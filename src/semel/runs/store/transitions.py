"""The steps of a run's life, as SQL: each function changes a batch of runs, in one statement or one transaction.

      submit           lease                        end
    ──────────▶ PENDING ──────▶ RUNNING ──┬─ succeeded ───────────────▶ SUCCEEDED
                   ▲ │             │      ├─ fatal, or attempts used up ▶ FAILED
                   │ │             │      └─ cancelled ───────────────▶ CANCELLED
                   │ └─ cancel ────┼────────────────────────────────────────▲
                   └───────────────┘
            retried · lost · snoozed · returned

A run that is PENDING or RUNNING has a row in ``semel_active``; one with the end of a lease is RUNNING. At the end of an
attempt a row of ``semel_attempts`` is inserted, and the active row is updated, or deleted if the run is over.
A run whose data is not uploaded yet is PENDING and held; after the step ``uploaded`` it can be leased.
The database refuses every other step, and every change of what was written once (triggers), and a result of a run that
did not succeed (a check). A lease raises the fence; every later write of the attempt names its fence, and changes
nothing once the run has a higher one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import msgspec
from msgspec import Struct
from sqlalchemy import Connection, bindparam, text

from semel.db.dialect import Dialect, Statement, StatementContext, hot, transaction
from semel.db.schema import jobs
from semel.runs.store import audit_log, durations
from semel.runs.store.audit_log import Change
from semel.runs.store.digests import ENQUEUE, attempt_digest, enqueue, is_sealed
from semel.runs.types import DAY_US, HELD_US, INTERNAL_QUEUE, AttemptResult, Status, micros

CHANNEL = "semel_runs"

END_STEPS = {
    "fatal": "failed",
    "cancelled": "cancelled",
    "retry": "retried",
    "lost": "lost",
    "snooze": "snoozed",
    "returned": "returned",
}

EVENT = "run_id, version, at_us, step, status, fence, worker, note"
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


def telling(source: str, publish: str = "CAST(:publish AS boolean)") -> str:
    """An INSERT into the outbox of those steps in ``source`` that somebody wants to hear of."""
    return f"""INSERT INTO semel_outbox ({EVENT}, unpublished, unsent)
SELECT * FROM (SELECT {EVENT}, {publish} AS unpublished, {WANTED} AS unsent FROM {source}) AS o
WHERE unpublished OR unsent"""


_IS_WANTED = Statement(lambda _: "SELECT 1 FROM semel_subscriptions WHERE disabled_us IS NULL LIMIT 1")


def tell(conn: Connection, steps: Iterable[tuple[str, int]], context: StatementContext) -> None:
    """Put these steps (run and version) into the outbox: on SQLite, where the statement could not do so itself.

    One by one: for a batch, SQLite would read the steps of all runs there ever were.
    """
    if conn.dialect.name == "sqlite" and (context.publish or _IS_WANTED.rows(conn)):
        for run_id, version in steps:
            _TELL_STEP.count(conn, run_id=run_id, version=version, publish=context.publish)


def counting(dialect: Dialect, source: str) -> str:
    """An INSERT of how many of the attempts in ``source`` ended a run, for the summary: see ``schema.run_counts``."""
    return f"""INSERT INTO semel_run_counts (tenant, model, facet, status, count, spent_us, durations)
SELECT tenant, model, facet, status, count(*),
  CAST(coalesce(sum(CASE WHEN status = 'SUCCEEDED' THEN ended_us - first_us END), 0) AS bigint),
  {dialect.joined(f"CASE WHEN status <> 'CANCELLED' THEN {durations.in_sql('ended_us - first_us')} END")}
FROM {source} WHERE status <> 'PENDING' AND (queue <> '{INTERNAL_QUEUE}' OR user_id <> '')
GROUP BY tenant, model, facet, status"""


def charging(dialect: Dialect, source: str) -> str:
    """An INSERT of what the attempts in ``source`` that ended a run cost its user: see ``schema.charges``."""
    return f"""INSERT INTO semel_charges (tenant, user_id, day_us, cost)
SELECT tenant, user_id, charged_us - charged_us % {DAY_US}, {dialect.capped(dialect.total("cost", "true"))}
FROM {source} WHERE status <> 'PENDING' AND user_id <> '' AND cost <> 0 GROUP BY 1, 2, 3"""


FIRST_START = "coalesce(k.started_us, k.began_us)"
"""When the first attempt of an active run began."""
FENCED = "k.id = in_id AND k.fence = in_fence AND k.lease_until_us IS NOT NULL"


def unlocked(dialect: Dialect, columns: dict[str, str]) -> str:
    """The batch without runs that are locked: one locked row must not cost a worker all its leases."""
    if not dialect.writes_in_with:
        return f"SELECT * FROM {dialect.batch(columns)}"
    return f"SELECT b.* FROM {dialect.batch(columns)} JOIN semel_active AS k ON {FENCED} FOR UPDATE OF k SKIP LOCKED"


_OVER = "status, step, model, first_us, ended_us"
_LOST = f"{_OVER}, fence, worker, payload_hash, attempts, user_id"
_ATTEMPT = (
    "run_id, fence, due_us, ended_us, version, attempts, errors, losts, tenant, status, step, began_us, started_us, "
    "heartbeat_us, cancel_us, progress_us, cost, progress, worker, note, cancel_note, progress_note, last_error, "
    "traceback, data_ref"
)
"""The columns of an attempt that did not succeed."""


def _noting(dialect: Dialect, columns: str, source: str, *, sealed: bool = True) -> str:
    """An INSERT of the attempts in ``source``, which is named ``e``, with these columns and, if sealed, digests."""
    usual = {"attempts": "1", "errors": "0", "losts": "0"}
    stored = {name: dialect.sparse(name, value) for name, value in usual.items()}
    stored["step"] = "nullif(step, lower(status))"
    values = {name: stored.get(name, name) for name in columns.split(", ")}
    if not sealed:
        return f"INSERT INTO semel_attempts ({', '.join(values)}) SELECT {', '.join(values.values())} FROM {source}"
    return _insert(dialect, values, source, "e.run_id", "e.version")


def _insert(dialect: Dialect, values: dict[str, str], source: str, run_id: str, version: str) -> str:
    """An INSERT of attempts with these values: see ``schema.attempts`` for what NULL stands for."""
    return f"""INSERT INTO semel_attempts ({", ".join(values)}, digest)
SELECT {", ".join(values.values())}, {attempt_digest(dialect, values, run_id, version)} FROM {source}
RETURNING run_id, version, digest"""


def _due(dialect: Dialect) -> str:
    """When the attempt of the active row ``k`` was due: usually when the run was submitted, if it is the first one."""
    return f"{dialect.sparse('k.due_us', 'CASE k.version WHEN 2 THEN k.since_us END')} AS due_us"


_UNLIKE_BEGAN = ", ".join(
    f"CASE WHEN k.{name} <> k.began_us THEN k.{name} END AS {name}"
    for name in ("started_us", "heartbeat_us", "progress_us")
)

# -- success ---------------------------------------------------------------------------------------------------------

_SUCCEED_COLUMNS = {
    "in_id": "uuid",
    "in_fence": "bigint",
    "in_result": "text",
    "in_digest": "text",
    "in_ref": "text",
    "in_size": "bigint",
    "in_artifacts": "text",
    "in_cost": "bigint",
    "in_exact": "text",
    "in_warnings": "text",
}
_PLAIN = 4
"""How many columns every success has. Most successes send no more than these: their result is in the row."""
_SUCCESS = (
    "run_id, fence, due_us, ended_us, version, attempts, errors, losts, tenant, status, step, began_us, started_us, "
    "heartbeat_us, progress_us, cancel_us, cost, worker, cancel_note, last_error, traceback, data_ref, result, "
    "result_digest, result_size"
)
_MORE = ", result_ref, artifacts, result_exact, warnings"


def _stored_of_result(dialect: Dialect, *, more: bool) -> str:
    """Digest and size of a result: on PostgreSQL only where they are not those of the text beside them."""
    own = dialect.size("in_result")
    digest, size = dialect.digest("in_digest"), f"coalesce({f'in_size, {own}' if more else own}, 0)"
    if dialect.writes_in_with:
        digest, size = f"nullif({digest}, sha256(convert_to(in_result, 'UTF8')))", f"nullif({size}, {own})"
    return f"{digest} AS result_digest, {size} AS result_size"


def _success(dialect: Dialect, *, more: bool) -> str:
    """The columns of an attempt that succeeded, of ``k``, the active row, and the batch."""
    return f"""k.id AS run_id, k.fence, {_due(dialect)}, {dialect.now} AS ended_us, k.version + 1 AS version,
  k.attempts, k.errors, k.losts, k.tenant, 'SUCCEEDED' AS status, 'succeeded' AS step, k.began_us, {
        _UNLIKE_BEGAN
    }, k.cancel_us,
  {"coalesce(in_cost, k.cost)" if more else "k.cost"} AS cost, k.worker,
  CASE WHEN k.cancel_us IS NOT NULL THEN k.note END AS cancel_note, k.last_error, k.traceback, k.data_ref,
  in_result AS result, {_stored_of_result(dialect, more=more)}{
        ", in_ref AS result_ref, in_artifacts AS artifacts, in_exact AS result_exact, in_warnings AS warnings"
        if more
        else ""
    }, k.model, {FIRST_START} AS first_us, CAST(NULL AS text) AS note, k.user_id, k.queue, k.facet,
  {_charged_at(more=more)} AS charged_us"""


def _charged_at(*, more: bool) -> str:
    """When the run of the active row ``k`` was submitted, if it has a cost, which only its last attempt may report."""
    if not more:
        return "k.charged_us"
    submitted = "SELECT r.created_us FROM semel_runs AS r WHERE r.id = k.id"
    return f"coalesce(k.charged_us, CASE WHEN in_cost <> 0 THEN ({submitted}) END)"


class _Succeeding:
    """Writes successes: on PostgreSQL in one statement, on SQLite in a few."""

    def __init__(self, *, more: bool) -> None:
        columns = _SUCCEED_COLUMNS if more else dict(islice(_SUCCEED_COLUMNS.items(), _PLAIN))
        written = _SUCCESS + (_MORE if more else "")

        def whole(w: Dialect) -> str:
            return f"""
WITH held AS MATERIALIZED (SELECT * FROM {w.batch(columns)}),
e AS (DELETE FROM semel_active AS k USING held WHERE {FENCED} RETURNING {_success(w, more=more)}),
noted AS ({_noting(w, written, "e")}),
queued AS ({ENQUEUE}),
counted AS ({counting(w, "e")}),
charged AS ({charging(w, "e")}),
told AS ({telling("(SELECT e.*, ended_us AS at_us FROM e) AS t")})
SELECT CAST(run_id AS text), {_OVER} FROM e"""

        def noted(w: Dialect, *, sealed: bool) -> str:
            ended = f"SELECT {_success(w, more=more)} FROM {w.batch(of_rows)} CROSS JOIN semel_active AS k"
            return _noting(w, written, f"({ended} ON k.rowid = in_row) AS e", sealed=sealed)

        def charged(w: Dialect) -> str:
            cost = "coalesce(in_cost, k.cost)" if more else "k.cost"
            return charging(
                w,
                f"""(SELECT k.tenant, k.user_id, 'SUCCEEDED' AS status, {cost} AS cost,
                       {_charged_at(more=more)} AS charged_us
                     FROM {w.batch(of_rows)} CROSS JOIN semel_active AS k ON k.rowid = in_row) AS e""",
            )

        of_rows = {"in_row": "bigint", **dict(islice(columns.items(), 2, None))}
        self._whole = Statement(whole, columns)
        self._note = Statement(partial(noted, sealed=True), of_rows)
        self._note_unsealed = Statement(partial(noted, sealed=False), of_rows)
        self._charge = Statement(charged, of_rows)
        self._more = more

    def rows(self, conn: Connection, context: StatementContext, batch: Sequence[Sequence[Any]]) -> Sequence[Any]:
        """Write them; returns the runs whose fence held."""
        if conn.dialect.name == "sqlite":
            return self._by_row(conn, context, batch)
        return self._whole.rows(conn, batch, publish=context.publish, now=context.now)

    def _by_row(self, conn: Connection, context: StatementContext, batch: Sequence[Sequence[Any]]) -> Sequence[Any]:
        """Find the rows of those whose fence holds, then name them by row: there is no other writer."""
        now = context.now
        outcomes = {row[:2]: row[2:] for row in batch}
        [(found, status, costs)] = _HELD.rows(conn, outcomes)
        held = msgspec.json.decode(found)
        if held:
            rows = [row[0] for row in held]
            batch = [(row, *outcomes[run_id, fence]) for row, run_id, fence, *_ in held]
            if is_sealed(conn):
                enqueue(conn, self._note.rows(conn, batch, now=now))
            else:  # rows that come back take longer than to write them
                self._note_unsealed.count(conn, batch, now=now)
            _COUNT_SUCCESSES.count(conn, rows=rows, now=now)
            if costs or self._more:
                self._charge.count(conn, batch)
            _REMOVE_ROWS.count(conn, rows=rows)
            tell(conn, ((run_id, version) for _, run_id, _, version, *_ in held), context)
        return [(run_id, status, "succeeded", model, first, now) for _, run_id, _, _, model, first in held]


_HELD_COLUMNS = {"in_id": "uuid", "in_fence": "bigint"}
_HELD = Statement(
    lambda w: (
        f"""
SELECT json_group_array(json_array(k.rowid, k.id, in_fence, k.version + 1, k.model, {FIRST_START})),
  'SUCCEEDED' AS status, max(k.cost)
FROM {w.batch(_HELD_COLUMNS)} CROSS JOIN semel_active AS k ON {FENCED}"""
    ),
    _HELD_COLUMNS,
)
_COUNT_SUCCESSES = Statement(
    lambda w: counting(
        w,
        f"""(SELECT k.*, 'SUCCEEDED' AS status, {w.now} AS ended_us, {FIRST_START} AS first_us
             FROM semel_active AS k WHERE {w.is_in("k.rowid", "rows")}) AS e""",
    )
)
_REMOVE_ROWS = Statement(lambda w: f"DELETE FROM semel_active WHERE {w.is_in('rowid', 'rows')}")
_REMOVE = Statement(lambda w: f"DELETE FROM semel_active WHERE {w.is_in('id', 'ids', 'uuid')}")


def _remove(conn: Connection, ids: list[str]) -> None:
    if ids:
        _REMOVE.count(conn, ids=ids)


_SUCCEED, _SUCCEED_PLAINLY = _Succeeding(more=True), _Succeeding(more=False)

# -- every other end -------------------------------------------------------------------------------------------------

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
_STATUS_AFTER = """CASE
    WHEN in_kind = 'cancelled' THEN 'CANCELLED'
    WHEN in_kind = 'fatal' THEN 'FAILED'
    WHEN k.cancel_us IS NOT NULL THEN 'CANCELLED'
    WHEN in_kind = 'retry' AND k.errors + 1 >= r.max_attempts THEN 'FAILED'
    WHEN in_kind = 'lost' AND k.losts + 1 >= r.max_lost THEN 'FAILED'
    ELSE 'PENDING' END"""


def _ended(dialect: Dialect) -> str:
    """The attempts that end, with what follows: of ``held``, which has the columns of a batch, and the active rows."""
    return f"""SELECT k.id AS run_id, k.fence, {_due(dialect)}, {dialect.now} AS ended_us, k.version + 1 AS version,
  k.attempts - CASE WHEN in_kind IN ('snooze', 'returned') THEN 1 ELSE 0 END AS attempts,
  k.errors + CASE WHEN in_kind IN ('retry', 'fatal') THEN 1 ELSE 0 END AS errors,
  k.losts + CASE WHEN in_kind = 'lost' THEN 1 ELSE 0 END AS losts,
  k.tenant, {_STATUS_AFTER} AS status,
  CASE WHEN in_kind = 'lost' THEN in_step
       WHEN {_STATUS_AFTER} = 'FAILED' THEN 'failed'
       WHEN {_STATUS_AFTER} = 'CANCELLED' THEN 'cancelled'
       ELSE in_step END AS step,
  k.began_us, {_UNLIKE_BEGAN}, k.cancel_us, coalesce(in_cost, k.cost) AS cost, k.progress, k.worker,
  CASE WHEN {_STATUS_AFTER} = 'CANCELLED' THEN coalesce(k.note, in_why) ELSE in_why END AS note,
  CASE WHEN k.cancel_us IS NOT NULL THEN k.note END AS cancel_note, k.progress_note,
  CASE WHEN in_kind IN ('retry', 'fatal', 'lost') THEN in_why ELSE k.last_error END AS last_error,
  CASE WHEN in_kind IN ('retry', 'fatal', 'lost') THEN in_traceback ELSE k.traceback END AS traceback, k.data_ref,
  in_delay, k.model, {FIRST_START} AS first_us, {dialect.digits("r.payload_hash")} AS payload_hash,
  k.user_id, k.queue, k.facet, r.created_us AS charged_us
FROM held JOIN semel_active AS k ON {FENCED} JOIN semel_runs AS r ON r.id = k.id"""


def _again(now: str) -> str:
    """The active row of a run that waits again."""
    return f"""UPDATE semel_active AS k
SET since_us = {now}, due_us = {now} + e.in_delay, ready = (e.in_delay <= 0), lease_until_us = NULL,
    version = e.version, attempts = e.attempts, errors = e.errors, losts = e.losts, step = e.step, note = e.note,
    cost = e.cost, charged_us = CASE WHEN e.cost <> 0 THEN e.charged_us END, last_error = e.last_error,
    traceback = e.traceback
FROM e WHERE k.id = e.run_id AND e.status = 'PENDING'"""


def _ending(dialect: Dialect, held: str) -> str:
    """End the attempts ``held``, where a CTE may write (PostgreSQL)."""
    return f"""
WITH held AS MATERIALIZED ({held}),
e AS MATERIALIZED ({_ended(dialect)} FOR UPDATE OF k),
noted AS ({_noting(dialect, _ATTEMPT, "e")}),
queued AS ({ENQUEUE}),
counted AS ({counting(dialect, "e")}),
charged AS ({charging(dialect, "e")}),
again AS ({_again(dialect.now)}),
gone AS (DELETE FROM semel_active AS k USING e WHERE k.id = e.run_id AND e.status <> 'PENDING'),
told AS ({telling("(SELECT e.*, ended_us AS at_us FROM e) AS t")})
SELECT CAST(run_id AS text), {_LOST} FROM e"""


_END = Statement(lambda w: _ending(w, f"SELECT * FROM {w.batch(_END_COLUMNS)}"), _END_COLUMNS)


def _with_ended(dialect: Dialect, then: str) -> str:
    return f"WITH held AS (SELECT * FROM {dialect.batch(_END_COLUMNS)}), e AS ({_ended(dialect)}) {then}"


_ENDED = Statement(lambda w: _with_ended(w, f"SELECT run_id, {_LOST}, version FROM e"), _END_COLUMNS)
_NOTE = Statement(lambda w: _with_ended(w, _noting(w, _ATTEMPT, "e")), _END_COLUMNS)
_COUNT = Statement(lambda w: _with_ended(w, counting(w, "e")), _END_COLUMNS)
_CHARGE = Statement(lambda w: _with_ended(w, charging(w, "e")), _END_COLUMNS)
_WAIT_AGAIN = Statement(lambda w: _with_ended(w, _again(w.now)), _END_COLUMNS)


def _end(conn: Connection, batch: Sequence[Sequence[Any]], context: StatementContext) -> Sequence[Any]:
    now = context.now
    if conn.dialect.name != "sqlite":
        return _END.rows(conn, batch, publish=context.publish, now=now)
    rows = _ENDED.rows(conn, batch, now=now)
    enqueue(conn, _NOTE.rows(conn, batch, now=now))
    _COUNT.count(conn, batch, now=now)
    _CHARGE.count(conn, batch, now=now)
    _WAIT_AGAIN.count(conn, batch, now=now)
    _remove(conn, [row[0] for row in rows if row[1] != "PENDING"])
    tell(conn, ((row[0], row[-1]) for row in rows), context)
    return [row[:-1] for row in rows]


def _expired(dialect: Dialect, which: str) -> str:
    """The ends of attempts whose lease expired, as a batch."""
    return f"""
SELECT h.id AS in_id, h.fence AS in_fence, 'lost' AS in_kind, 'lost' AS in_step,
       'worker ' || h.worker || ' was lost: no sign of life before the lease ended' AS in_why,
       CAST(NULL AS text) AS in_traceback, 0 AS in_delay, CAST(NULL AS bigint) AS in_cost
FROM semel_active AS h WHERE h.lease_until_us < {dialect.now} AND {which}"""


def _some(dialect: Dialect) -> str:
    return _expired(dialect, "true") + f" LIMIT :most {dialect.locking('h', skip=True)}"


def _these(dialect: Dialect) -> str:
    return _expired(dialect, dialect.is_in("h.id", "ids", "uuid")) + f" {dialect.locking('h', skip=True)}"


class _Losing:
    """Takes back runs whose lease expired."""

    def __init__(self, held: Callable[[Dialect], str]) -> None:
        self._whole = Statement(lambda w: _ending(w, held(w)))
        self._expired = Statement(held)

    def rows(self, conn: Connection, context: StatementContext, **values: Any) -> list[Lost]:
        if conn.dialect.name != "sqlite":
            rows = self._whole.rows(conn, publish=context.publish, now=context.now, **values)
        else:
            expired = [tuple(row) for row in self._expired.rows(conn, now=context.now, **values)]
            rows = _end(conn, expired, context) if expired else []
        return [Lost(*row) for row in rows]


_LOSE, LOSE_THESE = _Losing(_some), _Losing(_these)


@hot
def end(conn: Connection, endings: Sequence[FinishRequest], context: StatementContext) -> dict[str, FinishedRun]:
    """Write the ends of attempts. Returns the runs whose fence still held; the others' attempts count for nothing.

    A success that was already written under the same fence, and whose reply was lost, is returned again.
    """
    rows: list[Any] = []
    succeeded = [each for each in endings if each.ended.kind == "succeeded"]
    if plain := [_plain_row(each) for each in succeeded if _is_plain(each.ended)]:
        rows += _SUCCEED_PLAINLY.rows(conn, context, sorted(plain))
    if len(plain) < len(succeeded):
        more = [_success_row(each) for each in succeeded if not _is_plain(each.ended)]
        rows += _SUCCEED.rows(conn, context, sorted(more))
    if others := [_end_row(each) for each in endings if each.ended.kind != "succeeded"]:
        rows += _end(conn, sorted(others), context)
    over = {row[0]: FinishedRun(*row[: len(FinishedRun.__struct_fields__)]) for row in rows}
    if len(over) < len(endings):
        missing = [each for each in endings if each.run_id not in over and each.ended.kind == "succeeded"]
        over |= _succeeded_before(conn, missing)
    return over


def _is_plain(ended: AttemptResult) -> bool:
    """Whether a success has nothing but a result in the row."""
    return (
        ended.result_ref is None
        and ended.cost is None
        and ended.result_exact is None
        and not ended.artifacts
        and not ended.warnings
    )


def _plain_row(ending: FinishRequest) -> tuple[Any, ...]:
    return ending.run_id, ending.fence, ending.ended.result, ending.ended.result_digest


def _success_row(ending: FinishRequest) -> tuple[Any, ...]:
    ended = ending.ended
    return (
        *_plain_row(ending),
        ended.result_ref,
        None if ended.result_ref is None else ended.result_size,
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
    return _LOSE.rows(conn, context, most=most)


_BEGAN_COLUMNS = {"in_id": "uuid", "in_fence": "bigint"}
_BEGAN = Statement(
    lambda w: (
        f"""
SELECT {w.as_text("k.run_id")}, k.at_us FROM {w.batch(_BEGAN_COLUMNS)}
JOIN semel_run_steps AS k ON k.run_id = in_id AND k.fence = in_fence AND k.step = 'leased'
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
SELECT {w.as_text("e.run_id")}, e.status, coalesce(e.step, lower(e.status)), r.model,
  coalesce(e.started_us, e.began_us), e.ended_us
FROM {w.batch(_MINE_COLUMNS)} JOIN semel_attempts AS e ON e.run_id = in_id AND e.fence = in_fence
JOIN semel_runs AS r ON r.id = e.run_id
WHERE e.status = 'SUCCEEDED'
"""
    ),
    _MINE_COLUMNS,
)


def _succeeded_before(conn: Connection, endings: Sequence[FinishRequest]) -> dict[str, FinishedRun]:
    if not endings:
        return {}
    return {row[0]: FinishedRun(*row) for row in _MINE.rows(conn, [(each.run_id, each.fence) for each in endings])}


# -- cancel and release ----------------------------------------------------------------------------------------------


def _cancellable(dialect: Dialect) -> str:
    return f"""SELECT h.*, {dialect.now} AS at_us,
  CASE WHEN h.lease_until_us IS NULL THEN 'CANCELLED' ELSE 'RUNNING' END AS status
FROM semel_active AS h
WHERE {dialect.is_in("h.id", "ids", "uuid")} AND (h.lease_until_us IS NULL OR h.cancel_us IS NULL)
ORDER BY h.id {dialect.locking("h", skip=False)}"""


_COST_OF_CANCELLED = "CASE WHEN began_us IS NULL THEN 0 ELSE cost END"
_NEVER_LEASED = {name: name for name in _ATTEMPT.split(", ")} | {
    "run_id": "id",
    "ended_us": "at_us",
    "version": "version + 1",
    "step": "CAST(NULL AS text)",
    "began_us": "CAST(NULL AS bigint)",
    "started_us": "coalesce(started_us, began_us)",
    "heartbeat_us": "coalesce(heartbeat_us, began_us)",
    "cancel_us": "at_us",
    "progress_us": "coalesce(progress_us, began_us)",
    "cost": _COST_OF_CANCELLED,
    "note": "CAST(:why AS text)",
    "cancel_note": "CAST(NULL AS text)",
}
"""The columns of a pending run that is cancelled, of its active row."""


def _cancelled(dialect: Dialect) -> str:
    return _insert(dialect, _NEVER_LEASED, "held WHERE status = 'CANCELLED'", "held.id", "held.version + 1")


def _count_cancelled(dialect: Dialect) -> str:
    cancelled = "SELECT h.*, h.at_us AS ended_us, h.started_us AS first_us FROM held AS h WHERE h.status = 'CANCELLED'"
    return counting(dialect, f"({cancelled}) AS e")


def _charge_cancelled(dialect: Dialect) -> str:
    columns = f"tenant, user_id, status, {_COST_OF_CANCELLED} AS cost, charged_us"
    return charging(dialect, f"(SELECT {columns} FROM held AS h WHERE h.status = 'CANCELLED') AS e")


_ASK = """UPDATE semel_active AS k
SET cancel_us = held.at_us, note = CAST(:why AS text), step = 'cancel_requested', version = k.version + 1
FROM held WHERE k.id = held.id AND held.status = 'RUNNING'"""
_CANCEL = Statement(
    lambda w: (
        f"""
WITH held AS MATERIALIZED ({_cancellable(w)}),
noted AS ({_cancelled(w)}),
queued AS ({ENQUEUE}),
counted AS ({_count_cancelled(w)}),
charged AS ({_charge_cancelled(w)}),
gone AS (DELETE FROM semel_active AS k USING held WHERE k.id = held.id AND held.status = 'CANCELLED'),
asked AS ({_ASK}),
told AS ({
            telling(
                "(SELECT id AS run_id, version + 1 AS version, at_us, status, fence, worker, "
                "CAST(:why AS text) AS note, "
                "CASE status WHEN 'CANCELLED' THEN 'cancelled' ELSE 'cancel_requested' END AS step FROM held) AS t"
            )
        })
SELECT CAST(id AS text), status FROM held"""
    )
)
_CANCELLABLE = Statement(lambda w: f"SELECT id, status, version + 1 FROM ({_cancellable(w)}) AS held")
_NOTE_CANCELLED = Statement(lambda w: f"WITH held AS ({_cancellable(w)}) {_cancelled(w)}")
_NOTE_COUNT = Statement(lambda w: f"WITH held AS ({_cancellable(w)}) {_count_cancelled(w)}")
_NOTE_CHARGE = Statement(lambda w: f"WITH held AS ({_cancellable(w)}) {_charge_cancelled(w)}")
_ASK_RUNNING = Statement(lambda w: f"WITH held AS ({_cancellable(w)}) {_ASK}")


@hot
def cancel(conn: Connection, ids: Sequence[str], why: str, context: StatementContext) -> dict[str, Status]:
    """Cancel pending runs, and request the cancellation of running ones. Returns those that it changed."""
    values: dict[str, Any] = {"ids": list(ids), "why": storable(why), "now": context.now}
    if conn.dialect.name != "sqlite":
        return {row[0]: row[1] for row in _CANCEL.rows(conn, publish=context.publish, **values)}
    rows = _CANCELLABLE.rows(conn, ids=values["ids"], now=values["now"])
    enqueue(conn, _NOTE_CANCELLED.rows(conn, **values))
    for note in (_NOTE_COUNT, _NOTE_CHARGE):
        note.count(conn, ids=values["ids"], now=values["now"])
    _ASK_RUNNING.count(conn, **values)
    _remove(conn, [run_id for run_id, status, _ in rows if status == "CANCELLED"])
    tell(conn, ((run_id, version) for run_id, _, version in rows), context)
    return {run_id: status for run_id, status, _ in rows}


@hot
def cancel_by_hand(conn: Connection, ids: Sequence[str], why: str, tenant: str, context: StatementContext) -> None:
    """As :func:`cancel`, for runs of one tenant that a person cancels, and logged: each that it changed."""
    with transaction(conn):
        record_cancelled(conn, cancel(conn, ids, why, context), why, tenant, context)


def record_cancelled(
    conn: Connection, changed: Mapping[str, Status], why: str, tenant: str, context: StatementContext
) -> None:
    """Log the runs that :func:`cancel` changed, if a person cancelled them."""
    audit_log.record(conn, context, *(_cancellation(each, changed[each], why, tenant) for each in sorted(changed)))


def _cancellation(run_id: str, status: Status, why: str, tenant: str) -> Change:
    """A pending run is cancelled at once; a running one is asked to end."""
    before: Status = "PENDING" if status == "CANCELLED" else status
    after = {"status": status, "cancel_requested": True, "why": why}
    old = {"status": before, "cancel_requested": False}
    return Change(name="run.cancelled", tenant=tenant, target=run_id, before=old, after=after)


_RELEASE = Statement(
    lambda w: (
        f"""
UPDATE semel_active AS k
SET ready = true, due_us = {w.now}, since_us = {w.now}, data_ref = :data_ref, step = 'uploaded', note = NULL,
    version = version + 1
WHERE {w.is_in("k.id", "ids", "uuid")} AND k.lease_until_us IS NULL AND k.due_us - k.since_us >= {HELD_US}
RETURNING {w.as_text(w.returning("id"))}, queue, version, since_us"""
    )
)
_RELEASED = text("UPDATE semel_jobs SET data_us = :at WHERE run_id = :run_id").bindparams(
    bindparam("run_id", type_=jobs.c.run_id.type)
)
_TELL_STEP = Statement(
    lambda w: telling(
        f"""(SELECT s.* FROM semel_run_steps AS s
             WHERE s.run_id = {w.identity(":run_id")} AND s.version = CAST(:version AS integer)) AS t"""
    )
)
_CALL = text(f"SELECT pg_notify('{CHANNEL}', :queue)")


def release(conn: Connection, run_id: str, data_ref: str, context: StatementContext) -> str | None:
    """Make a run that waits for its data ready to be leased. Returns its queue, or None if it did not wait."""
    for _, queue, version, since_us in _RELEASE.rows(conn, ids=[run_id], data_ref=data_ref, now=context.now):
        conn.execute(_RELEASED, {"at": since_us, "run_id": run_id})
        _TELL_STEP.count(conn, run_id=run_id, version=version, publish=context.publish)
        if conn.dialect.name == "postgresql":
            conn.execute(_CALL, {"queue": queue})
        return str(queue)
    return None
