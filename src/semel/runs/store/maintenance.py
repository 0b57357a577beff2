"""Upkeep: the rows of live workers, leader election, and the removal of expired rows and old runs.

Runs that ended long ago are removed with their logs, files and data. A run that a live key names stays, and one with an
event that somebody is still to hear of, for a week at most.

    rows removed, their files noted     files removed        note removed
    ───────────── one transaction ────▶ ───────────────────▶ ────────────▶

If the process dies in between, the next purge finds the notes and goes on. So no run ever exists without its files.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any

from msgspec import Struct
from sqlalchemy import (
    ColumnElement,
    Connection,
    Text,
    and_,
    cast,
    delete,
    exists,
    func,
    literal,
    not_,
    select,
    text,
)

from semel.db.dialect import Dialect, Statement, StatementContext, hot
from semel.db.schema import (
    active,
    attempts,
    charges,
    costs,
    deliveries,
    keys,
    outbox,
    removals,
    run_counts,
    run_hours,
    runs,
    submitted,
    workers,
)
from semel.runs.execution.input_data import folder_of
from semel.runs.store import audit_log, quotas, run_keys
from semel.runs.store.audit_log import Change
from semel.runs.store.digests import note_purge
from semel.runs.store.durations import CHARACTERS
from semel.runs.store.quotas import read_clock
from semel.runs.store.run_keys import RUN
from semel.runs.types import DAY_US, INTERNAL_QUEUE, MICRO, TERMINAL

BATCH = 1000
"""Rows of a kind that one transaction removes."""
HOUR_US = 3600 * MICRO
HOURS_KEPT_US = 35 * DAY_US
"""For how long it is known how many runs ended in an hour."""
UNKNOWN = -1
"""The bucket of runs of which it is not known how long they took."""
COSTS_KEPT_US = 400 * DAY_US
"""The longest period of a cost limit is a year."""
EVENTS_KEPT_US = 7 * DAY_US
"""For how long events that wait keep a run beyond its retention: they may have nobody any more who takes them."""


class WorkerRecord(Struct, frozen=True, kw_only=True):
    """What a worker writes about itself."""

    id: str
    name: str
    host: str
    pid: int
    queues: Sequence[str]
    models: Mapping[str, str]
    """Where each model runs: in the loop, a process or a thread."""
    slots: Mapping[str, int]
    """How many runs each of these places has room for."""
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
def worker_seen(conn: Connection, record: WorkerRecord, context: StatementContext) -> None:
    """Write that the worker is alive."""
    values: dict[str, Any] = {
        "id": record.id,
        "name": record.name,
        "host": record.host,
        "pid": record.pid,
        "queues": json.dumps(list(record.queues)),
        "models": json.dumps(dict(record.models)),
        "slots": json.dumps(dict(record.slots)),
        "draining": record.draining,
    }
    _SEEN.count(conn, now=context.now, **values)


@hot
def worker_gone(conn: Connection, worker_id: str) -> None:
    """Remove the row of a worker that stopped in good order."""
    conn.execute(delete(workers).where(workers.c.id == worker_id))


_ADD_TOTALS = """INSERT INTO semel_run_totals AS k (tenant, model, facet, status, count, spent_us)
SELECT tenant, model, CASE WHEN facet IS NULL THEN '' ELSE '=' || facet END, status,
  CAST(sum(count) AS bigint), CAST(sum(spent_us) AS bigint)
FROM {counts} WHERE true GROUP BY 1, 2, 3, 4
ON CONFLICT (tenant, model, facet, status) DO UPDATE
SET count = k.count + excluded.count, spent_us = k.spent_us + excluded.spent_us"""


def _add_up_costs(dialect: Dialect) -> str:
    gone = "semel_charges"
    before = ""
    if dialect.writes_in_with:
        gone, before = "gone", "WITH gone AS (DELETE FROM semel_charges RETURNING *)"
    return f"""
{before} INSERT INTO semel_costs AS k (tenant, user_id, day_us, cost)
SELECT tenant, user_id, day_us, {dialect.capped(dialect.total("cost", "true"))} FROM {gone} WHERE true GROUP BY 1, 2, 3
ON CONFLICT (tenant, user_id, day_us) DO UPDATE
SET cost = {dialect.capped("CAST(k.cost AS numeric) + excluded.cost")}"""


def _ended_lately(dialect: Dialect, counts: str) -> str:
    """What ended since the counts were last added up; not what was removed."""
    return f"""SELECT tenant, model, status, CAST(sum(count) AS bigint), {dialect.joined("durations")}
FROM {counts} WHERE count > 0 GROUP BY tenant, model, status"""


_ADD_UP = Statement(
    lambda w: (
        f"""WITH gone AS (DELETE FROM semel_run_counts RETURNING *),
added AS ({_ADD_TOTALS.format(counts="gone")}) {_ended_lately(w, "gone")}"""
    )
)
_ENDED_LATELY = Statement(lambda w: _ended_lately(w, "semel_run_counts"))
_ADD_UP_ALONE = Statement(lambda _: _ADD_TOTALS.format(counts="semel_run_counts"))
_HOUR_COLUMNS = {
    "in_tenant": "text",
    "in_model": "text",
    "in_status": "text",
    "in_bucket": "integer",
    "in_count": "bigint",
}
_ADD_HOURS = Statement(
    lambda w: (
        f"""
INSERT INTO semel_run_hours AS k (tenant, model, hour_us, status, bucket, count)
SELECT in_tenant, in_model, :hour, in_status, in_bucket, in_count FROM {w.batch(_HOUR_COLUMNS)} WHERE true
ON CONFLICT (tenant, model, hour_us, status, bucket) DO UPDATE SET count = k.count + excluded.count"""
    ),
    _HOUR_COLUMNS,
)


_ADD_UP_COSTS = Statement(_add_up_costs)


def add_up(conn: Connection, context: StatementContext) -> None:
    """Add the counts of runs that ended to the totals and to those of this hour, and what they cost to the costs of
    their users' days, so that a summary and a quota read few rows.
    """
    now = read_clock(conn, context)
    if conn.dialect.name == "sqlite":
        ended = _ENDED_LATELY.rows(conn)
        _ADD_UP_ALONE.count(conn)
        conn.execute(delete(run_counts))
        _ADD_UP_COSTS.count(conn)
        conn.execute(delete(charges))
    else:
        ended = _ADD_UP.rows(conn)
        _ADD_UP_COSTS.count(conn)
    rows = sorted(_by_duration(ended))  # in one order, so that two sweepers do not wait for each other
    if rows:
        _ADD_HOURS.count(conn, rows, hour=now - now % HOUR_US)


def _by_duration(ended: Sequence[Any]) -> Iterator[tuple[str, str, str, int, int]]:
    for tenant, model, status, count, written in ended:
        found = Counter(written or "")
        if unknown := count - found.total():
            yield tenant, model, status, UNKNOWN, unknown
        for character, runs_ in found.items():
            yield tenant, model, status, CHARACTERS.index(character), runs_


def remove_expired(conn: Connection, context: StatementContext) -> tuple[int, bool]:
    """Remove keys and reservations that expired, workers not seen for a day, and costs that no limit counts any more.

    Returns how many keys and reservations were removed, and whether there may be more.
    """
    now = read_clock(conn, context)
    conn.execute(delete(workers).where(workers.c.seen_us < now - DAY_US))
    conn.execute(delete(costs).where(costs.c.day_us < now - COSTS_KEPT_US))
    conn.execute(delete(run_hours).where(run_hours.c.hour_us < now - HOURS_KEPT_US))
    removed = run_keys.purge(conn, BATCH, context), quotas.purge_reservations(conn, context, BATCH)
    return sum(removed), max(removed) >= BATCH


def _lead(dialect: Dialect) -> str:
    now = dialect.now
    return f"""
INSERT INTO semel_leaders AS k (role, holder, until_us, term_us) VALUES (:role, :holder, {now} + :term, :term)
ON CONFLICT (role) DO UPDATE SET holder = excluded.holder, until_us = excluded.until_us, term_us = excluded.term_us
WHERE k.holder = excluded.holder OR k.until_us < {now} OR k.until_us > {dialect.clock} + k.term_us
RETURNING holder
"""


_LEAD = Statement(_lead)
_STEP_DOWN = Statement(lambda _: "DELETE FROM semel_leaders WHERE role = :role AND holder = :holder")


@hot
def acquire_leadership(conn: Connection, role: str, holder: str, term: float, context: StatementContext) -> bool:
    """Take or renew the role for ``term`` seconds. Returns False while another holds it.

    A term that ends later than a new one would began before the clock was put back, and does not count.
    """
    return bool(_LEAD.rows(conn, role=role, holder=holder, term=round(term * MICRO), now=context.now))


class Chores(Struct, frozen=True):
    """What there is to do for the sweeper."""

    lost: bool = True
    """A lease expired."""
    late: bool = True
    """The clock was put back, and something would last longer than it was asked for."""
    expired: bool = True
    """Rows may be removed, or counts and costs added up."""
    unsealed: bool = True
    """Attempts ended that no seal covers."""


def _chores(dialect: Dialect) -> str:
    """The columns of :class:`Chores`. Looking for expired rows takes longest, and is left out unless ``:clean``."""
    now = dialect.now
    expired = (
        f"semel_keys WHERE expires_us < {now}",
        f"semel_keys WHERE value_until_us < {now}",
        f"semel_reservations WHERE expires_us < {now} - {quotas.EXPIRED_KEPT_US}",
        f"semel_workers WHERE seen_us < {now} - {DAY_US}",
        f"semel_costs WHERE day_us < {now} - {COSTS_KEPT_US}",
        "semel_run_counts",
        "semel_charges",
    )
    return f"""EXISTS (SELECT 1 FROM semel_active WHERE lease_until_us < {now}),
  EXISTS (SELECT 1 FROM semel_active WHERE {_too_long(now)})
  OR EXISTS (SELECT 1 FROM semel_reservations WHERE created_us > {now}),
  CAST(:clean AS boolean) AND ({" OR ".join(f"EXISTS (SELECT 1 FROM {each})" for each in expired)}),
  CAST(:clean AS boolean) AND EXISTS (SELECT 1 FROM semel_unsealed)"""


def _too_long(now: str) -> str:
    return f"lease_until_us > {now} AND lease_until_us > {now} + lease_us"


_LEAD_AND_LOOK = Statement(lambda w: f"WITH lead AS ({_lead(w)}) SELECT {_chores(w)} WHERE EXISTS (SELECT 1 FROM lead)")
_LOOK = Statement(lambda w: f"SELECT {_chores(w)}")


@hot
def lead_and_look(
    conn: Connection, role: str, holder: str, term: float, context: StatementContext, *, clean: bool
) -> Chores | None:
    """As acquire_leadership, and see what there is to do: with one round trip. None while another holds the role."""
    values: dict[str, Any] = {"role": role, "holder": holder, "term": round(term * MICRO), "now": context.now}
    if conn.dialect.name == "postgresql":
        rows = _LEAD_AND_LOOK.rows(conn, clean=clean, **values)
    else:
        rows = _LEAD.rows(conn, **values) and _LOOK.rows(conn, clean=clean, now=context.now)
    return Chores(*map(bool, rows[0])) if rows else None


_TERM_LEFT = Statement(
    lambda w: (
        f"""
SELECT until_us - {w.now} FROM semel_leaders
WHERE role = :role AND holder <> :holder AND until_us >= {w.now} AND until_us <= {w.now} + term_us
"""
    )
)


@hot
def term_left(conn: Connection, role: str, holder: str, context: StatementContext) -> float:
    """Seconds for which another holds the role; 0 if it can be taken."""
    rows = _TERM_LEFT.rows(conn, role=role, holder=holder, now=context.now)
    return max(rows[0][0] / MICRO, 1e-6) if rows else 0.0


_SHORTEN = Statement(
    lambda w: (
        f"""
UPDATE semel_active SET lease_until_us = {w.now} + lease_us WHERE {_too_long(w.now)}
"""
    )
)


@hot
def repair_times(conn: Connection, context: StatementContext) -> None:
    """After the clock was put back: shorten leases and reservations to the time that they were asked for."""
    _SHORTEN.count(conn, now=context.now)
    quotas.restart_reservations(conn, context)


@hot
def release_leadership(conn: Connection, role: str, holder: str) -> None:
    """Give up the role, so that another can take it at once."""
    _STEP_DOWN.count(conn, role=role, holder=holder)


RUNS_BATCH = 500
"""Runs that one transaction removes."""
LOG_BATCH = 5000


class Removal(Struct, frozen=True):
    """Files to remove: those of a removed run (``prefix`` is its id), or data that no run has (``data_ref``)."""

    prefix: str
    data_ref: str | None


class Removed(Struct, frozen=True):
    """How many runs a call removed, and after which id the next call goes on; None at the end."""

    count: int
    next: str | None


def is_old(now: int, age: float) -> ColumnElement[bool]:
    """True for a run that ended more than ``age`` seconds ago, that no live key names, and whose events do not wait."""
    before = now - round(age * MICRO)
    finished = and_(runs.c.finished_us < before, runs.c.status.in_(TERMINAL))
    named = and_(
        keys.c.kind == literal(RUN, literal_execute=True),  # so that the partial index is used
        keys.c.attempt == cast(runs.c.id, Text),
        keys.c.expires_us >= now,
        keys.c.state == "completed",
    )
    waits = (
        and_(outbox.c.run_id == runs.c.id, outbox.c.at_us >= before - EVENTS_KEPT_US),
        and_(
            deliveries.c.run_id == runs.c.id,
            deliveries.c.state == "waiting",
            deliveries.c.due_us >= before - EVENTS_KEPT_US,
        ),
    )
    return and_(finished, not_(exists().where(named)), *(not_(exists().where(each)) for each in waits))


_REMOVAL_COLUMNS = {"in_prefix": "text", "in_data": "text", "in_files": "boolean"}
_NOTE_REMOVAL = Statement(
    lambda w: (
        f"""
INSERT INTO semel_removals (prefix, data_ref, has_files)
SELECT in_prefix, in_data, in_files FROM {w.batch(_REMOVAL_COLUMNS)} WHERE true ON CONFLICT (prefix) DO NOTHING
"""
    ),
    _REMOVAL_COLUMNS,
)


def note_removals(conn: Connection, notes: Sequence[tuple[str, str | None, bool]]) -> None:
    """Note files to be removed: a prefix, the data if it is data's, and whether there are files for sure."""
    if notes:
        _NOTE_REMOVAL.count(conn, notes)


def remove_runs(
    conn: Connection,
    age: float,
    after: str | None,
    context: StatementContext,
    until: str | None = None,
    *,
    rule: str = "purge",
) -> Removed:
    """Remove the old ones of the next runs, in the order of their ids, and note their files, and the rule.

    One that is being retried stays. The runs after the first that were all submitted too lately are not looked at: ids
    grow with time. Nor are those from the id ``until`` on.
    """
    now = read_clock(conn, context)
    window = select(submitted.c.id, submitted.c.created_us).order_by(submitted.c.id).limit(RUNS_BATCH)
    window = window if after is None else window.where(submitted.c.id > after)
    looked = conn.execute(window if until is None else window.where(submitted.c.id < until)).all()
    if not looked or min(row.created_us for row in looked) >= now - round(age * MICRO):
        return Removed(0, None)
    last = looked[-1].id
    old = select(runs.c.id).where(is_old(now, age), runs.c.id.in_([row.id for row in looked]))
    unlocked = select(submitted.c.id).where(submitted.c.id.in_(list(conn.scalars(old)))).order_by(submitted.c.id)
    ids = list(conn.scalars(unlocked.with_for_update(skip_locked=True)))  # a retry that refers to it locks it
    if ids:
        gone = purged(conn, age, (ids[0], ids[-1]), submitted.c.id.in_(ids), context)
        _LEAVE_IDS.write(conn, ids=ids)
        note_purge(conn, rule_of(rule, age), ids, now)
        conn.execute(delete(attempts).where(attempts.c.run_id.in_(ids)))
        conn.execute(delete(submitted).where(submitted.c.id.in_(ids)))
        audit_log.record(conn, context, *gone)
    return Removed(len(ids), last)


def purged(
    conn: Connection, age: float, span: tuple[str, str], which: ColumnElement[bool], context: StatementContext
) -> list[Change]:
    """What is logged of runs that a person is about to remove, for each tenant that has some: how many, that they are
    older than so many seconds, and between which ids.
    """
    if context.by is None:
        return []
    counted = conn.execute(select(submitted.c.tenant, func.count()).where(which).group_by(submitted.c.tenant))
    about = {"older_than": age, "first": span[0], "last": span[1]}
    return [
        Change(name="runs.purged", tenant=tenant, target="runs", after={"runs": count, **about})
        for tenant, count in counted
    ]


def rule_of(rule: str, age: float) -> str:
    """How the record of removed runs names the rule by which they were removed."""
    return f"{rule}: ended more than {age:g} s ago"


_HAS_FILES = "coalesce(e.result_ref, e.artifacts, e.result_exact) IS NOT NULL"
_MAY_HAVE_FILES = f"({_HAS_FILES} OR e.version > 3 OR e.status <> 'SUCCEEDED' AND e.began_us IS NOT NULL)"
"""One that succeeded at once and stored no file has none; after another attempt files may be left."""


class Leaving:
    """Writes what is left of runs that are about to be removed: they count no longer, and their files are noted, each
    with the logs of its run. What they cost was noted when they ended. ``which`` says which runs: a condition on their
    ids.
    """

    def __init__(self, which: Callable[[Dialect, str], str], noted: str = "true") -> None:
        def ended(w: Dialect) -> str:
            return f"""FROM semel_runs AS r JOIN semel_attempts AS e ON e.run_id = r.id AND e.status <> 'PENDING'
WHERE {which(w, "r.id")} AND {which(w, "e.run_id")}"""

        self._writes = [
            Statement(lambda w: _UNCOUNT.format(ended=ended(w))),
            Statement(lambda w: _UNLIST.format(ended=ended(w))),
            Statement(lambda w: _NOTE_FILES.format(ended=ended(w), id=w.as_text("r.id"), noted=noted)),
            Statement(lambda w: f"DELETE FROM semel_outbox WHERE {which(w, 'run_id')}"),
            Statement(lambda w: f"DELETE FROM semel_jobs WHERE {which(w, 'run_id')}"),
            Statement(lambda w: f"DELETE FROM semel_deliveries WHERE {which(w, 'run_id')}"),
        ]
        self._data = Statement(lambda w: _DATA.format(ended=ended(w)))

    def write(self, conn: Connection, **ids: Any) -> None:
        """Write it, in the transaction that removes the runs."""
        refs = [row[0] for row in self._data.rows(conn, **ids)]
        for each in self._writes:
            each.count(conn, **ids)
        note_removals(conn, [(folder_of(ref), ref, True) for ref in refs])


_UNCOUNT = f"""
INSERT INTO semel_run_counts (tenant, model, facet, status, count, spent_us)
SELECT r.tenant, r.model, r.facet, e.status, -count(*), -CAST(sum(
    CASE WHEN e.status = 'SUCCEEDED' THEN e.ended_us - coalesce(e.started_us, e.began_us) ELSE 0 END) AS bigint)
{{ended}} AND (r.queue <> '{INTERNAL_QUEUE}' OR r.user_id <> '') GROUP BY r.tenant, r.model, r.facet, e.status"""
_UNLIST = """
DELETE FROM semel_unsuccessful WHERE (tenant, user_id, status, run_id) IN (
  SELECT r.tenant, r.user_id, e.status, r.id {ended} AND e.status <> 'SUCCEEDED' AND r.user_id <> '')"""
_NOTE_FILES = f"""
INSERT INTO semel_removals (prefix, has_files) SELECT {{id}}, {_HAS_FILES}
{{ended}} AND {{noted}} ON CONFLICT (prefix) DO NOTHING"""
_DATA = """
SELECT DISTINCT coalesce(e.data_ref, r.data_ref) {ended} AND coalesce(e.data_ref, r.data_ref) IS NOT NULL"""


def _in_range(dialect: Dialect, column: str) -> str:
    return f"{column} >= {dialect.identity(':start')} AND {column} < {dialect.identity(':end')}"


_LEAVE_IDS = Leaving(lambda w, column: w.is_in(column, "ids", "uuid"))
LEAVE_RANGE = Leaving(_in_range, _MAY_HAVE_FILES)
"""For runs whose logs are removed with them."""


def _is_in_use(conn: Connection, data_ref: str) -> bool:
    uses = (select(literal(1)).where(table.c.data_ref == data_ref).limit(1) for table in (submitted, active, attempts))
    return any(conn.scalar(each) for each in uses)


def pending_removals(conn: Connection, after: str) -> list[Removal]:
    """The next files to remove, in the order of their prefixes."""
    query = select(removals.c.prefix, removals.c.data_ref).where(removals.c.prefix > after)
    return [Removal(*row) for row in conn.execute(query.order_by(removals.c.prefix).limit(RUNS_BATCH))]


_REMOVE_LOGS = Statement(
    lambda w: (
        f"""
DELETE FROM semel_run_logs WHERE (run_id, fence, line) IN (
  SELECT p.run_id, p.fence, p.line FROM semel_run_logs AS p WHERE {w.is_in("p.run_id", "ids", "uuid")} LIMIT :most
)"""
    )
)


def remove_logs(conn: Connection, ids: Sequence[str]) -> bool:
    """Remove some lines that these runs logged; True when there may be more."""
    return _REMOVE_LOGS.count(conn, ids=list(ids), most=LOG_BATCH) >= LOG_BATCH


def settle(conn: Connection, prefixes: Sequence[str]) -> None:
    """Remove the notes of these prefixes: their files are removed."""
    conn.execute(delete(removals).where(removals.c.prefix.in_(list(prefixes))))


_LOCK = text("SELECT pg_advisory_xact_lock(:key)")


def lock_data(conn: Connection, data_ref: str, context: StatementContext) -> None:
    """Lock the data until the transaction ends: no other can remove it or give it to a run. SQLite has one writer."""
    read_clock(conn, context)
    if conn.dialect.name == "postgresql":
        key = int.from_bytes(sha256(f"semel data {data_ref}".encode()).digest()[:8], signed=True)
        conn.execute(_LOCK, {"key": key})


def remove_data(conn: Connection, removal: Removal, remove: Callable[[str], None], context: StatementContext) -> None:
    """Remove data that was noted, unless a run has it again by now, and remove the note."""
    assert removal.data_ref is not None
    lock_data(conn, removal.data_ref, context)
    if not _is_in_use(conn, removal.data_ref):
        remove(removal.prefix)
    settle(conn, [removal.prefix])
