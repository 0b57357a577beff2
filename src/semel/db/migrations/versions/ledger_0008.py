"""Runs are written once: what was submitted, what is under way, and every attempt that ended, each in its own table.

    semel_runs      what was submitted: inserted once, never updated
    semel_active    one narrow row for each run that is pending or running
    semel_attempts  one row for each attempt that ended, with the outcome of the run if it was the last
    semel_outbox    steps that somebody wants to hear of, until they are told

A run's key becomes a key like every other, in ``semel_keys``. The views ``semel_run_states`` and ``semel_run_steps``
show each run as it is now, and its history.

The runs are copied by :func:`prepare`, in bounded transactions, while servers and workers of the release before go on.
A run that has ended changes no more, and what was submitted never does; a trigger notes which runs end or are removed
meanwhile. So :func:`upgrade`, the only time that others wait, copies what is under way and what was noted last, and no
more. Whatever is not copied when it begins, it copies itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import Any
from urllib.parse import quote, unquote
from uuid import UUID

from alembic import op
from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Connection,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Row,
    Table,
    Text,
    Uuid,
    func,
    inspect,
    select,
    text,
)
from sqlalchemy.schema import CreateTable

from semel.codec import PLAIN

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

NEXT = "semel_runs_0008"
"""The name of the new table of runs for as long as the old one has its name."""

metadata = MetaData()
_name = Text(collation="C").with_variant(Text(), "sqlite")
_id = Uuid(as_uuid=False).with_variant(Text(), "sqlite")

_digest = LargeBinary().with_variant(Text(), "sqlite")

_runs = Table(
    NEXT,
    metadata,
    Column("id", _id, primary_key=True),
    Column("created_us", BigInteger, nullable=False),
    Column("lease_us", BigInteger, nullable=False),
    Column("asked_cost", BigInteger, nullable=True),
    Column("stall_us", BigInteger, nullable=True),
    Column("priority", Integer, nullable=False),
    Column("max_attempts", Integer, nullable=False),
    Column("max_lost", Integer, nullable=False),
    Column("tenant", _name, nullable=False),
    Column("user_id", _name, nullable=False),
    Column("model", _name, nullable=False),
    Column("queue", _name, nullable=False),
    Column("payload_hash", _digest, nullable=False),
    Column("parameters", Text, nullable=False),
    Column("idempotency_key", Text, nullable=True),
    Column("facet", Text, nullable=True),
    Column("retry_of", _id, nullable=True),
    Column("data_ref", Text, nullable=True),
    Column("trace", Text, nullable=True),
    postgresql_partition_by="RANGE (id)",
)
_somebody = "user_id <> ''"
# SQLite cannot rename an index: these have other names than those of the old table, which are in use meanwhile.
Index(
    "semel_runs_user_time",
    _runs.c.tenant,
    _runs.c.user_id,
    _runs.c.created_us,
    postgresql_where=text(_somebody),
    sqlite_where=text(_somebody),
)
Index(
    "semel_runs_user_page",
    _runs.c.tenant,
    _runs.c.user_id,
    _runs.c.id,
    postgresql_where=text(_somebody),
    sqlite_where=text(_somebody),
)
Index("semel_runs_hash", func.substr(_runs.c.payload_hash, 1, 7)).ddl_if("postgresql")
Index("semel_runs_hash", _runs.c.payload_hash).ddl_if("sqlite")
Index(
    "semel_runs_data_ref",
    _runs.c.data_ref,
    postgresql_where=_runs.c.data_ref.is_not(None),
    sqlite_where=_runs.c.data_ref.is_not(None),
)

_active = Table(
    "semel_active",
    metadata,
    Column("id", _id, primary_key=True),
    Column("since_us", BigInteger, nullable=False),
    Column("due_us", BigInteger, nullable=False),
    Column("lease_us", BigInteger, nullable=False),
    Column("fence", BigInteger, nullable=False),
    Column("priority", Integer, nullable=False),
    Column("version", Integer, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("errors", Integer, nullable=False),
    Column("losts", Integer, nullable=False),
    Column("ready", Boolean, nullable=False),
    Column("tenant", _name, nullable=False),
    Column("user_id", _name, nullable=False),
    Column("queue", _name, nullable=False),
    Column("model", _name, nullable=False),
    Column("began_us", BigInteger, nullable=True),
    Column("started_us", BigInteger, nullable=True),
    Column("lease_until_us", BigInteger, nullable=True),
    Column("heartbeat_us", BigInteger, nullable=True),
    Column("cancel_us", BigInteger, nullable=True),
    Column("progress_us", BigInteger, nullable=True),
    Column("cost", BigInteger, nullable=True),
    Column("progress", Float, nullable=True),
    Column("worker", Text, nullable=True),
    Column("step", Text, nullable=True),
    Column("note", Text, nullable=True),
    Column("progress_note", Text, nullable=True),
    Column("last_error", Text, nullable=True),
    Column("traceback", Text, nullable=True),
    Column("data_ref", Text, nullable=True),
    Column("facet", Text, nullable=True),
    Column("dedupe", _id, nullable=True),
    Column("dedupe_until_us", BigInteger, nullable=True),
    CheckConstraint("lease_until_us IS NULL OR worker IS NOT NULL", "semel_active_executor"),
    CheckConstraint("lease_until_us IS NULL OR fence > 0", "semel_active_fenced"),
    postgresql_with={"fillfactor": "45"},
)
Index(
    "semel_active_ready",
    _active.c.queue,
    _active.c.ready,
    _active.c.priority.desc(),
    _active.c.due_us,
    _active.c.id,
    sqlite_where=text("lease_until_us IS NULL"),
)
_leased = "lease_until_us IS NOT NULL"
Index("semel_active_lease", _active.c.lease_until_us, postgresql_using="brin", sqlite_where=text(_leased))
_later = "NOT ready"
Index("semel_active_later", _active.c.due_us, postgresql_where=text(_later), sqlite_where=text(_later))
Index("semel_active_later_since", _active.c.since_us, postgresql_where=text(_later), sqlite_where=text(_later))
_named = "dedupe IS NOT NULL"
Index("semel_active_dedupe", _active.c.dedupe, unique=True, postgresql_where=text(_named), sqlite_where=text(_named))
Index(
    "semel_active_user",
    _active.c.tenant,
    _active.c.user_id,
    postgresql_where=text(_somebody),
    sqlite_where=text(_somebody),
)

_attempts = Table(
    "semel_attempts",
    metadata,
    Column("run_id", _id, nullable=False),
    Column("fence", BigInteger, nullable=False),
    Column("due_us", BigInteger, nullable=False),
    Column("ended_us", BigInteger, nullable=False),
    Column("version", Integer, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("errors", Integer, nullable=False),
    Column("losts", Integer, nullable=False),
    Column("tenant", _name, nullable=False),
    Column("status", Text, nullable=False),
    Column("step", Text, nullable=True),
    Column("began_us", BigInteger, nullable=True),
    Column("started_us", BigInteger, nullable=True),
    Column("heartbeat_us", BigInteger, nullable=True),
    Column("cancel_us", BigInteger, nullable=True),
    Column("progress_us", BigInteger, nullable=True),
    Column("cost", BigInteger, nullable=True),
    Column("result_size", BigInteger, nullable=True),
    Column("progress", Float, nullable=True),
    Column("worker", Text, nullable=True),
    Column("note", Text, nullable=True),
    Column("cancel_note", Text, nullable=True),
    Column("progress_note", Text, nullable=True),
    Column("last_error", Text, nullable=True),
    Column("traceback", Text, nullable=True),
    Column("result_digest", _digest, nullable=True),
    Column("result", Text, nullable=True),
    Column("result_ref", Text, nullable=True),
    Column("result_exact", Text, nullable=True),
    Column("artifacts", Text, nullable=True),
    Column("warnings", Text, nullable=True),
    Column("data_ref", Text, nullable=True),
    PrimaryKeyConstraint("run_id", "version", name="semel_attempts_pkey"),
    CheckConstraint("status IN ('PENDING', 'SUCCEEDED', 'FAILED', 'CANCELLED')", "semel_attempts_status"),
    CheckConstraint(
        "status = 'SUCCEEDED' OR coalesce(result, result_ref, artifacts) IS NULL AND result_digest IS NULL",
        "semel_attempts_result",
    ),
    CheckConstraint("status = 'CANCELLED' OR began_us IS NOT NULL", "semel_attempts_began"),
    postgresql_partition_by="RANGE (run_id)",
)
_unsuccessful = "status IN ('FAILED', 'CANCELLED')"
Index(
    "semel_attempts_unsuccessful",
    _attempts.c.status,
    _attempts.c.run_id,
    postgresql_where=text(_unsuccessful),
)
_failed = "status = 'FAILED'"
Index(
    "semel_attempts_failed",
    _attempts.c.tenant,
    _attempts.c.ended_us,
    postgresql_where=text(_failed),
    sqlite_where=text(_failed),
)
Index(
    "semel_attempts_data",
    _attempts.c.data_ref,
    postgresql_where=_attempts.c.data_ref.is_not(None),
    sqlite_where=_attempts.c.data_ref.is_not(None),
)

_outbox = Table(
    "semel_outbox",
    metadata,
    Column("run_id", _id, nullable=False),
    Column("version", Integer, nullable=False),
    Column("at_us", BigInteger, nullable=False),
    Column("step", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("fence", BigInteger, nullable=False),
    Column("worker", Text, nullable=True),
    Column("note", Text, nullable=True),
    Column("unpublished", Boolean, nullable=False),
    Column("unsent", Boolean, nullable=False),
    PrimaryKeyConstraint("run_id", "version", name="semel_outbox_pkey"),
)
_unpublished = "unpublished"
Index("semel_outbox_unpublished", _outbox.c.at_us, postgresql_where=text(_unpublished), sqlite_where=text(_unpublished))
_unsent = "unsent"
Index("semel_outbox_unsent", _outbox.c.at_us, postgresql_where=text(_unsent), sqlite_where=text(_unsent))

_run_counts = Table(
    "semel_run_counts",
    metadata,
    Column("tenant", _name, nullable=False),
    Column("model", _name, nullable=False),
    Column("facet", Text, nullable=True),
    Column("status", Text, nullable=False),
    Column("count", BigInteger, nullable=False),
    Column("spent_us", BigInteger, nullable=False),
)

_run_totals = Table(
    "semel_run_totals",
    metadata,
    Column("tenant", _name, nullable=False),
    Column("model", _name, nullable=False),
    Column("facet", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("count", BigInteger, nullable=False),
    Column("spent_us", BigInteger, nullable=False),
    PrimaryKeyConstraint("tenant", "model", "facet", "status", name="semel_run_totals_pkey"),
)

_costs = Table(
    "semel_costs",
    metadata,
    Column("tenant", _name, nullable=False),
    Column("user_id", _name, nullable=False),
    Column("day_us", BigInteger, nullable=False),
    Column("cost", BigInteger, nullable=False),
    PrimaryKeyConstraint("tenant", "user_id", "day_us", name="semel_costs_pkey"),
)

SUBMITTED = (
    "r.id",
    "r.tenant",
    "r.user_id",
    "r.model",
    "r.queue",
    "r.priority",
    "r.max_attempts",
    "r.max_lost",
    "r.parameters",
    "r.payload_hash",
    "r.idempotency_key",
    "r.facet",
    "r.retry_of",
    "coalesce(r.asked_cost, 0) AS asked_cost",
    "r.created_us",
    "r.lease_us",
    "r.stall_us",
    "r.trace",
)
ACTIVE = {
    "status": "CASE WHEN a.lease_until_us IS NULL THEN 'PENDING' ELSE 'RUNNING' END",
    "ready": "a.ready",
    "step": "coalesce(a.step, 'created')",
    "changed_us": "CASE WHEN a.lease_until_us IS NULL THEN a.since_us ELSE coalesce(a.cancel_us, a.began_us) END",
    "cost": "coalesce(a.cost, r.asked_cost, 0)",
    "started_us": "coalesce(a.started_us, a.began_us)",
    "heartbeat_us": "coalesce(a.heartbeat_us, a.began_us)",
    "progress": "a.progress",
    "progress_us": "coalesce(a.progress_us, a.began_us)",
    **{
        name: f"a.{name}"
        for name in ("note", "version", "fence", "attempts", "errors", "losts", "due_us", "worker", "cancel_us")
    },
    **{name: f"a.{name}" for name in ("progress_note", "last_error", "traceback")},
}
"""The columns that a run has both while it is active and when it has ended."""
ENDED = {
    **{name: f"e.{name}" for name in ACTIVE},
    "ready": "{true}",
    "step": "coalesce(e.step, lower(e.status))",
    "changed_us": "e.ended_us",
    "cost": "coalesce(e.cost, r.asked_cost, 0)",
    "started_us": "coalesce(e.started_us, e.began_us)",
    "heartbeat_us": "coalesce(e.heartbeat_us, e.began_us)",
    "progress": "CASE WHEN e.status = 'SUCCEEDED' THEN 1.0 ELSE e.progress END",
    "progress_us": "coalesce(e.progress_us, e.began_us)",
}
ONE = {
    "lease_until_us": "a.lease_until_us",
    "finished_us": "e.ended_us",
    **{name: f"e.{name}" for name in ("result", "result_ref", "result_digest", "result_size", "artifacts")},
    **{name: f"e.{name}" for name in ("result_exact", "warnings")},
    "data_ref": "coalesce(a.data_ref, e.data_ref, r.data_ref)",
    "active_id": "a.id",
    "ended": "e.status",
    "ended_id": "e.run_id",
    "ended_tenant": "e.tenant",
}
"""The columns that only one of them has. A condition on ``active_id`` or ``ended`` lets the database begin there."""
COMPUTED = {
    "result_digest": "coalesce(e.result_digest, sha256(convert_to(e.result, 'UTF8')))",
    "result_size": "coalesce(e.result_size, octet_length(e.result))",
}
"""What PostgreSQL does not store for a result that is in the row."""
STEPS = """
SELECT r.id AS run_id, 1 AS version, r.created_us AS at_us, 'created' AS step, 'PENDING' AS status,
       CAST(0 AS bigint) AS fence, CAST(NULL AS text) AS worker, CAST(NULL AS text) AS note
FROM semel_runs AS r
UNION ALL
SELECT j.run_id, 2, j.data_us, 'uploaded', 'PENDING', CAST(0 AS bigint), CAST(NULL AS text), CAST(NULL AS text)
FROM semel_jobs AS j WHERE j.data_us IS NOT NULL
UNION ALL
SELECT e.run_id, e.version - 1 - CASE WHEN e.cancel_us IS NULL THEN 0 ELSE 1 END, e.began_us, 'leased', 'RUNNING',
       e.fence, e.worker, CAST(NULL AS text)
FROM semel_attempts AS e WHERE e.began_us IS NOT NULL
UNION ALL
SELECT e.run_id, e.version - 1, e.cancel_us, 'cancel_requested', 'RUNNING', e.fence, e.worker, e.cancel_note
FROM semel_attempts AS e WHERE e.began_us IS NOT NULL AND e.cancel_us IS NOT NULL
UNION ALL
SELECT e.run_id, e.version, e.ended_us, coalesce(e.step, lower(e.status)), e.status, e.fence, e.worker, e.note
FROM semel_attempts AS e
UNION ALL
SELECT a.id, a.version - CASE WHEN a.cancel_us IS NULL THEN 0 ELSE 1 END, a.began_us, 'leased', 'RUNNING', a.fence,
       a.worker, CAST(NULL AS text)
FROM semel_active AS a WHERE a.lease_until_us IS NOT NULL
UNION ALL
SELECT a.id, a.version, a.cancel_us, 'cancel_requested', 'RUNNING', a.fence, a.worker, a.note
FROM semel_active AS a WHERE a.lease_until_us IS NOT NULL AND a.cancel_us IS NOT NULL
"""

_FIXED = ("id", "tenant", "user_id", "model", "queue", "priority", "lease_us")


def _illegal(fixed: Sequence[str]) -> str:
    """True for a change of an active run that is refused; these columns never change."""
    return f"""
     (OLD.lease_until_us IS NULL AND NEW.lease_until_us IS NOT NULL AND NEW.fence <= OLD.fence)
  OR (OLD.fence <> NEW.fence AND NOT (OLD.lease_until_us IS NULL AND NEW.lease_until_us IS NOT NULL))
  OR ((OLD.lease_until_us IS NULL) <> (NEW.lease_until_us IS NULL) AND NEW.version <= OLD.version)
  OR NEW.version < OLD.version
  OR (OLD.lease_until_us IS NOT NULL AND NEW.lease_until_us IS NOT NULL AND OLD.worker <> NEW.worker)
  OR {" OR ".join(f"OLD.{name} <> NEW.{name}" for name in fixed)}
"""


def prepare(conn: Connection, most: int) -> tuple[int, int] | None:
    """Do the next part of the copying, of at most ``most`` runs. Returns how many of how many runs are copied.

    None means that only the switch is left. Each part is a transaction, and says itself how far it came: whoever comes
    next goes on from there.
    """
    if not inspect(conn).has_table(_note.name):
        _expand(conn)
        return _progress(conn)
    if _copy_next(conn, most) == most or _index_next(conn) or _index_keys(conn) or _catch_up(conn, most) == most:
        return _progress(conn)
    return None


def upgrade() -> None:
    """Copy what is left, put the new tables in the place of the old ones, and show them in views."""
    conn, postgres = op.get_bind(), op.get_bind().dialect.name == "postgresql"
    if postgres:
        op.execute("LOCK TABLE semel_runs, semel_run_events, semel_run_keys IN ACCESS EXCLUSIVE MODE")
    shown, keys_shown = _drop_view("model_runs"), _drop_view("idempotency_keys")
    if not inspect(conn).has_table(_note.name):
        _expand(conn)
    for copy in (_copy_next, _catch_up):
        while copy(conn, _BATCH):
            pass
    while _index_next(conn) or _index_keys(conn):
        pass
    _copy_active(conn)
    _move_keys(postgres)
    for table in ("semel_runs", "semel_run_events", "semel_run_keys", _changes.name, _note.name):
        op.drop_table(table)
    op.rename_table(NEXT, "semel_runs")
    if postgres:
        op.execute("DROP FUNCTION semel_note_change")
        op.execute(f"ALTER INDEX {NEXT}_pkey RENAME TO semel_runs_pkey")
        _partition_logs()
    _guard(postgres)
    _views(postgres, model_runs=shown)
    if keys_shown:
        _idempotency_keys(postgres)


# -- copying -----------------------------------------------------------------------------------------------------------

_meanwhile = MetaData()
_note = Table(
    "semel_migration",
    _meanwhile,
    Column("revision", Text, primary_key=True),
    Column("copied", BigInteger, nullable=False),
    Column("total", BigInteger, nullable=False),
    Column("position", _id, nullable=True),
)
_changes = Table(
    "semel_changes_0008",
    _meanwhile,
    Column("number", BigInteger().with_variant(Integer(), "sqlite"), primary_key=True),
    Column("id", _id, nullable=False),
)
_ENDED = "{} NOT IN ('PENDING', 'RUNNING')"
_NOTED = {
    "semel_runs_ended": (f"UPDATE OF status ON semel_runs FOR EACH ROW WHEN ({_ENDED.format('NEW.status')})", "NEW"),
    "semel_runs_gone": ("DELETE ON semel_runs FOR EACH ROW", "OLD"),
}


def _expand(conn: Connection) -> None:
    """Make the new tables, and note from now on which runs of the old one end or are removed."""
    postgres = conn.dialect.name == "postgresql"
    total = conn.scalar(text("SELECT count(*) FROM semel_runs"))  # before the triggers, for which writers wait
    _create_tables(conn)
    _meanwhile.create_all(conn)
    if postgres:  # with the owner's rights: a program that may write runs may not know this table
        place = conn.scalar(text("SELECT quote_ident(current_schema())"))
        conn.execute(
            text(f"""
CREATE FUNCTION semel_note_change() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = {place}, pg_temp AS $$
BEGIN
  INSERT INTO {_changes.name} (id) VALUES (CASE TG_OP WHEN 'DELETE' THEN OLD.id ELSE NEW.id END);
  RETURN NULL;
END $$""")
        )
    conn.execute(text("ALTER TABLE semel_jobs ADD COLUMN data_us BIGINT"))
    for name, (when, row) in _NOTED.items():
        noting = f"BEGIN INSERT INTO {_changes.name} (id) VALUES ({row}.id); END"
        what = "EXECUTE FUNCTION semel_note_change()" if postgres else noting
        conn.execute(text(f"CREATE TRIGGER {name} AFTER {when} {what}"))
    conn.execute(_note.insert(), {"revision": revision, "copied": 0, "total": total})


def _create_tables(conn: Connection) -> None:
    """Make the new tables. On SQLite with their indexes, since to make one later would keep all others waiting."""
    for table in metadata.sorted_tables:
        if conn.dialect.name == "sqlite":
            table.create(conn)
        else:
            conn.execute(CreateTable(table))
    if conn.dialect.name == "postgresql":
        _make_first_partitions(conn)


def _index_next(conn: Connection) -> bool:
    """Make the missing indexes of a table, which nobody else uses yet. Returns whether a table lacked some."""
    found = inspect(conn)
    for table in metadata.sorted_tables:
        there = {index["name"] for index in found.get_indexes(table.name)}
        missing = [index for index in table.indexes if index.name not in there]
        for index in missing:
            index.create(conn)  # if it is this database's
        if missing and table in (_runs, _attempts) and _progress(conn)[0]:
            conn.execute(text(f"ANALYZE {table.name}"))  # not an empty one: the planner would take it to stay so
        if missing:
            return True
    return False


def _index_keys(conn: Connection) -> bool:
    """Make the indexes of the keys of runs, of which there are none yet. Returns whether they were missing."""
    if any(index["name"] == "semel_keys_run" for index in inspect(conn).get_indexes("semel_keys")):
        return False
    for name, column in (("semel_keys_run", "attempt"), ("semel_keys_run_key", "key")):
        conn.execute(text(f"CREATE INDEX {name} ON semel_keys ({column}) WHERE {_RUN}"))
    return True


def _progress(conn: Connection) -> tuple[int, int]:
    row = conn.execute(_note.select()).one()
    return row.copied, max(row.copied, row.total)


def _copy_next(conn: Connection, most: int) -> int:
    """Copy the next runs, in the order of their ids, and say how far that came. Returns how many there were."""
    position = conn.scalar(select(_note.c.position))
    query = select(_old_runs.c.id).order_by(_old_runs.c.id).limit(most)
    ids = list(conn.scalars(query if position is None else query.where(_old_runs.c.id > position)))
    if ids:
        _copy(conn, ids)
        conn.execute(_note.update().values(copied=_note.c.copied + len(ids), position=ids[-1]))
    return len(ids)


def _catch_up(conn: Connection, most: int) -> int:
    """Copy runs that ended, and remove those that were removed, since they were copied. Returns how many there were."""
    noted = conn.execute(select(_changes.c.number, _changes.c.id).limit(most)).all()
    ids = [row.id for row in noted]
    kept = set(conn.scalars(_old_runs.select().with_only_columns(_old_runs.c.id).where(_old_runs.c.id.in_(ids))))
    if gone := [each for each in ids if each not in kept]:
        _run(conn, _COUNT.format(sign="-"), gone)
        _run(conn, "DELETE FROM semel_attempts WHERE run_id {ids}", gone)
        _run(conn, f"DELETE FROM {NEXT} WHERE id {{ids}}", gone)
    if kept:
        _copy(conn, sorted(kept))
    conn.execute(_changes.delete().where(_changes.c.number.in_([row.number for row in noted])))  # and none noted since
    return len(noted)


def _copy(conn: Connection, ids: Sequence[str]) -> None:
    """Copy what was submitted, and how the runs among these that have ended did. What is there already stays.

    A run that ends in between is noted, and copied again. The final attempt comes first: who has one has ended, so that
    those before it are known.
    """
    _plan(conn, by_index=True)
    _run(conn, _SUBMITTED, ids)
    ended = [str(row[0]) for row in _run(conn, _FINAL_ATTEMPT, ids)]
    if ended:
        _run(conn, _COUNT.format(sign=""), ended)
    _run(conn, _FORMER_ATTEMPTS.format(which=_ENDED.format("r.status")), ids)
    _run(conn, _UPLOADED, ids)


def _copy_active(conn: Connection) -> None:
    """Copy the runs that are pending or running, and what somebody is still to be told."""
    _plan(conn, by_index=False)
    active = "IN (SELECT id FROM semel_runs WHERE status IN ('PENDING', 'RUNNING'))"
    for statement in (_SUBMITTED, _ACTIVE, _FORMER_ATTEMPTS.format(which="true"), _UPLOADED):
        _run(conn, statement.replace("{ids}", active))
    _run(conn, _UNTOLD)


def _plan(conn: Connection, *, by_index: bool) -> None:
    """Let PostgreSQL find some runs by the index: without statistics, it would read all events for each part."""
    if conn.dialect.name == "postgresql":
        others = ("seqscan", "hashjoin", "mergejoin", "bitmapscan")
        allowed = "off" if by_index else "on"
        conn.execute(text("SELECT " + ", ".join(f"set_config('enable_{each}', '{allowed}', true)" for each in others)))


_DIGEST = re.compile(r"\{digest:([a-z_.]+)\}")


def _run(conn: Connection, statement: str, ids: Sequence[str] = ()) -> Sequence[Row[Any]]:
    """Execute a statement on the runs of these ids."""
    if conn.dialect.name == "postgresql":
        sql = _DIGEST.sub(r"decode(\1, 'hex')", statement).replace("{ids}", "= ANY(CAST(:ids AS uuid[]))")
        values: dict[str, Any] = {"ids": list(ids)}
    else:
        sql = _DIGEST.sub(r"\1", statement).replace("{ids}", "IN (SELECT value FROM json_each(:ids))")
        values = {"ids": json.dumps(list(ids))}
    result = conn.execute(text(sql), values if ":ids" in sql else {})
    return result.all() if result.returns_rows else ()


_SUBMITTED = f"""
INSERT INTO {NEXT} (id, created_us, lease_us, asked_cost, stall_us, priority, max_attempts, max_lost,
  tenant, user_id, model, queue, payload_hash, parameters, idempotency_key, facet, retry_of, data_ref, trace)
SELECT id, created_us, lease_us, asked_cost, stall_us, priority, max_attempts, max_lost, tenant, user_id, model,
  queue, {{digest:payload_hash}}, parameters, idempotency_key, facet, retry_of, data_ref, trace
FROM semel_runs WHERE id {{ids}} ON CONFLICT DO NOTHING
"""
_ACTIVE = """
INSERT INTO semel_active (id, since_us, due_us, lease_us, fence, priority, version, attempts, errors, losts, ready,
  tenant, user_id, queue, model, began_us, started_us, lease_until_us, heartbeat_us, cancel_us, progress_us, cost,
  progress, worker, step, note, progress_note, last_error, traceback, data_ref, facet)
SELECT id, changed_us, due_us, lease_us, fence, priority, version, attempts, errors, losts,
  CASE WHEN status = 'RUNNING' THEN true ELSE ready END, tenant, user_id, queue, model,
  CASE WHEN status = 'RUNNING' THEN coalesce(
    (SELECT max(at_us) FROM semel_run_events WHERE run_id = id AND step = 'leased'), changed_us) END,
  started_us, lease_until_us, heartbeat_us, cancel_us, progress_us, cost, progress,
  worker, CASE step WHEN 'created' THEN NULL ELSE step END, note, progress_note, last_error, traceback, data_ref,
  facet
FROM semel_runs WHERE id {ids}
"""
_FINAL_ATTEMPT = f"""
INSERT INTO semel_attempts (run_id, fence, due_us, ended_us, version, attempts, errors, losts, tenant, status, step,
  began_us, started_us, heartbeat_us, cancel_us, progress_us, cost, result_size, progress, worker, note, cancel_note,
  progress_note, last_error, traceback, result_digest, result, result_ref, result_exact, artifacts, warnings, data_ref)
SELECT r.id, r.fence, r.due_us, r.finished_us, r.version, r.attempts, r.errors, r.losts, r.tenant, r.status,
  nullif(r.step, lower(r.status)),
  (SELECT max(l.at_us) FROM semel_run_events AS l WHERE l.run_id = r.id AND l.step = 'leased' AND l.fence = r.fence
     AND EXISTS (SELECT 1 FROM semel_run_events AS p WHERE p.run_id = r.id AND p.version = r.version - 1
                 AND p.step IN ('leased', 'cancel_requested'))),
  r.started_us, r.heartbeat_us, r.cancel_us, r.progress_us, r.cost, r.result_size, r.progress, r.worker, r.note,
  (SELECT p.note FROM semel_run_events AS p WHERE p.run_id = r.id AND p.step = 'cancel_requested'),
  r.progress_note, r.last_error, r.traceback, {{digest:r.result_digest}}, r.result, r.result_ref,
  r.result_exact, r.artifacts, r.warnings, r.data_ref
FROM semel_runs AS r WHERE r.id {{ids}} AND {_ENDED.format("r.status")}
ON CONFLICT DO NOTHING RETURNING CAST(run_id AS text)
"""
_FORMER_ATTEMPTS = """
INSERT INTO semel_attempts (run_id, fence, due_us, ended_us, version, attempts, errors, losts, tenant, status, step,
  began_us, worker, note)
SELECT e.run_id, e.fence, r.due_us, e.at_us, e.version, 0, 0, 0, r.tenant, e.status, nullif(e.step, lower(e.status)),
  (SELECT max(l.at_us) FROM semel_run_events AS l WHERE l.run_id = e.run_id AND l.step = 'leased'
     AND l.fence = e.fence), e.worker, e.note
FROM semel_run_events AS e JOIN semel_runs AS r ON r.id = e.run_id
WHERE e.run_id {{ids}} AND e.step IN ('retried', 'lost', 'snoozed', 'returned') AND e.status = 'PENDING' AND {which}
ON CONFLICT DO NOTHING
"""
_UPLOADED = """
UPDATE semel_jobs SET data_us = (
  SELECT max(at_us) FROM semel_run_events WHERE run_id = semel_jobs.run_id AND step = 'uploaded')
WHERE run_id {ids} AND EXISTS (
  SELECT 1 FROM semel_run_events WHERE run_id = semel_jobs.run_id AND step = 'uploaded')
"""
_COUNT = f"""
INSERT INTO semel_run_counts (tenant, model, facet, status, count, spent_us)
SELECT r.tenant, r.model, r.facet, e.status, {{sign}}count(*), {{sign}}CAST(coalesce(
  sum(CASE WHEN e.status = 'SUCCEEDED' THEN e.ended_us - coalesce(e.started_us, e.began_us) END), 0) AS bigint)
FROM {NEXT} AS r JOIN semel_attempts AS e ON e.run_id = r.id AND e.status <> 'PENDING'
WHERE r.id {{{{ids}}}} AND (r.queue <> 'semel-service' OR r.user_id <> '')
GROUP BY r.tenant, r.model, r.facet, e.status
"""
_STEP = "run_id, version, at_us, step, status, fence, worker, note, unpublished, unsent"
_UNTOLD = f"""
INSERT INTO semel_outbox ({_STEP})
SELECT {_STEP} FROM semel_run_events WHERE unpublished UNION SELECT {_STEP} FROM semel_run_events WHERE unsent
"""


# -- partitions of PostgreSQL ------------------------------------------------------------------------------------------

_run_logs = Table(
    "semel_run_logs",
    MetaData(),
    Column("run_id", _id, nullable=False),
    Column("fence", BigInteger, nullable=False),
    Column("line", Integer, nullable=False),
    Column("at_us", BigInteger, nullable=False),
    Column("level", Text, nullable=False),
    Column("text", Text, nullable=False),
    PrimaryKeyConstraint("run_id", "fence", "line", name="semel_run_logs_pkey"),
    postgresql_partition_by="RANGE (run_id)",
)
_FIRST = "86400"
"""Seconds for which the first partition has room: by then a sweeper has made the next."""
_STRAYS = 1000
"""How many rows that were written early a new partition takes over from the default one."""
_FUNCTIONS = (
    """
CREATE FUNCTION semel_make_partition(since uuid, until uuid) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = {schema}, pg_temp SET lock_timeout = '50ms' AS $$
DECLARE
  begins timestamp := to_timestamp(('x' || left(replace(since::text, '-', ''), 12))::bit(48)::bigint / 1000)
                      AT TIME ZONE 'UTC';
  suffix text := to_char(begins, '"_p"YYYYMMDD"t"HH24MISS');
  parent text;
  id text;
  strays bigint;
BEGIN
  IF since IS NULL OR until IS NULL OR since >= until OR to_regclass('semel_runs' || suffix) IS NOT NULL THEN
    RETURN false;
  END IF;
  FOREACH parent IN ARRAY ARRAY['semel_runs', 'semel_attempts', 'semel_run_logs'] LOOP
    EXECUTE format('LOCK TABLE ONLY %I IN ACCESS EXCLUSIVE MODE', parent || '_default');
  END LOOP;
  FOREACH parent IN ARRAY ARRAY['semel_runs', 'semel_attempts', 'semel_run_logs'] LOOP
    id := CASE parent WHEN 'semel_runs' THEN 'id' ELSE 'run_id' END;
    EXECUTE format('SELECT count(*) FROM (SELECT FROM %I WHERE %I >= $1 AND %2$I < $2 LIMIT {strays} + 1) AS s',
                   parent || '_default', id) INTO strays USING since, until;
    IF strays > {strays} THEN
      RAISE lock_not_available;
    END IF;
    EXECUTE format('CREATE TABLE %I (LIKE %I INCLUDING ALL)', parent || suffix, parent);
    EXECUTE format('WITH early AS (DELETE FROM %I WHERE %I >= $1 AND %2$I < $2 RETURNING *) '
                   'INSERT INTO %I SELECT * FROM early', parent || '_default', id, parent || suffix) USING since, until;
    EXECUTE format('ALTER TABLE %I ATTACH PARTITION %I FOR VALUES FROM (%L) TO (%L)', parent, parent || suffix, since,
                   until);
    EXECUTE format('ANALYZE %I', parent || suffix);  -- else it is planned for as if it had many rows
  END LOOP;
  RETURN true;
EXCEPTION WHEN lock_not_available OR query_canceled OR deadlock_detected THEN
  RETURN false;
END $$
""",
    """
CREATE FUNCTION semel_lock_partition(name text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = {schema}, pg_temp SET lock_timeout = '50ms' AS $$
DECLARE
  parent text;
BEGIN
  IF name IS NULL OR name !~ '^_(first|p[0-9]+t[0-9]+)$' OR to_regclass('semel_runs' || name) IS NULL THEN
    RETURN false;
  END IF;
  FOREACH parent IN ARRAY ARRAY['semel_runs', 'semel_attempts', 'semel_run_logs'] LOOP
    EXECUTE format('LOCK TABLE ONLY %I IN SHARE ROW EXCLUSIVE MODE', parent || name);
  END LOOP;
  RETURN true;
EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
  RETURN false;
END $$
""",
    """
CREATE FUNCTION semel_drop_partition(name text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = {schema}, pg_temp SET lock_timeout = '50ms' AS $$
DECLARE
  parent text;
BEGIN
  IF NOT semel_lock_partition(name) THEN
    RETURN false;
  END IF;
  FOREACH parent IN ARRAY ARRAY['semel_runs', 'semel_attempts', 'semel_run_logs'] LOOP
    EXECUTE format('DROP TABLE %I', parent || name);
  END LOOP;
  RETURN true;
EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
  RETURN false;
END $$
""",
)
"""A role that may only write rows makes and drops partitions by these, if it may execute them. They wait for no lock
longer than others wait for theirs, and return false if there is nothing to do or if it is not possible now.
"""
_NAMES = "semel_make_partition, semel_lock_partition, semel_drop_partition"


def _make_first_partitions(conn: Connection) -> None:
    """Make a partition of runs and attempts for all ids until tomorrow, and one for ids of no partition's time."""
    now = f"(extract(epoch FROM now())::bigint + {_FIRST}) * 1000"
    bound = conn.scalar(text(f"SELECT rpad(lpad(to_hex({now}), 12, '0'), 32, '0')::uuid::text"))
    for name, parent in (("semel_runs", NEXT), ("semel_attempts", "semel_attempts")):
        conn.execute(text(f"CREATE TABLE {name}_default PARTITION OF {parent} DEFAULT"))
        conn.execute(text(f"CREATE TABLE {name}_first PARTITION OF {parent} FOR VALUES FROM (MINVALUE) TO ('{bound}')"))


_BOUND = text("SELECT pg_get_expr(relpartbound, oid) FROM pg_class WHERE oid = to_regclass('semel_runs_first')")


def _partition_logs() -> None:
    """Make the table of logs a partition, beside those of runs, and the functions that make and drop partitions."""
    op.execute("ALTER TABLE semel_run_logs RENAME TO semel_run_logs_first")
    op.execute("ALTER INDEX semel_run_logs_pkey RENAME TO semel_run_logs_first_pkey")
    _run_logs.create(op.get_bind())
    op.execute("CREATE TABLE semel_run_logs_default PARTITION OF semel_run_logs DEFAULT")
    first = op.get_bind().scalar(_BOUND)  # FOR VALUES FROM (MINVALUE) TO ('…')
    op.execute(f"""
WITH later AS (DELETE FROM semel_run_logs_first WHERE run_id >= {first.rpartition("TO (")[2][:-1]} RETURNING *)
INSERT INTO semel_run_logs SELECT * FROM later""")
    op.execute(f"ALTER TABLE semel_run_logs ATTACH PARTITION semel_run_logs_first {first}")
    schema = op.get_bind().scalar(text("SELECT quote_ident(current_schema())"))
    for function in _FUNCTIONS:
        op.execute(function.format(schema=schema, strays=_STRAYS))
    op.execute(f"REVOKE EXECUTE ON FUNCTION {_NAMES} FROM PUBLIC")


def _unpartition() -> None:
    op.execute(f"DROP FUNCTION {_NAMES}")
    op.execute("CREATE TABLE semel_run_logs_kept AS SELECT * FROM semel_run_logs")
    op.execute("DROP TABLE semel_run_logs")
    op.execute("ALTER TABLE semel_run_logs_kept RENAME TO semel_run_logs")
    for column in _run_logs.c:
        op.execute(f"ALTER TABLE semel_run_logs ALTER COLUMN {column.name} SET NOT NULL")
    op.execute("ALTER TABLE semel_run_logs ADD CONSTRAINT semel_run_logs_pkey PRIMARY KEY (run_id, fence, line)")


# -- keys --------------------------------------------------------------------------------------------------------------

_RUN = "kind = 'run'"
_BATCH = 1000
_INSERT_KEYS = """
INSERT INTO semel_keys (scope, key, fingerprint, state, fence, attempt, unknown, awaited, created_us, lease_us,
  lease_until_us, expires_us, completed_us, kind, value)
VALUES (:scope, :key, :fingerprint, 'completed', {fence}, :job_id, false, false, :created_us, 0, :created_us,
  :expires_us, :created_us, 'run', :value)
ON CONFLICT DO NOTHING
"""
_NAMED = {
    "postgresql": "json_to_recordset(CAST(:rows AS json)) AS b(run_id uuid, dedupe uuid, until bigint)",
    "sqlite": """(SELECT json_extract(value, '$.run_id') AS run_id, json_extract(value, '$.dedupe') AS dedupe,
  json_extract(value, '$.until') AS until FROM json_each(:rows)) AS b""",
}
_DEDUPE = """
UPDATE semel_active SET dedupe = b.dedupe, dedupe_until_us = b.until FROM {source} WHERE semel_active.id = b.run_id
"""


def _move_keys(postgres: bool) -> None:
    """A client's key becomes a claim whose outcome is the run; that of a payload, a column of the active run."""
    conn = op.get_bind()
    if not postgres:
        conn.execute(text("UPDATE semel_fence_counter SET last = last + (SELECT count(*) FROM semel_run_keys)"))
    fence = "nextval('semel_fence')" if postgres else "(SELECT last FROM semel_fence_counter)"
    for batch in _old_keys():
        own = [
            {
                "scope": _scope(row.tenant, row.user_id),
                "key": row.key,
                "fingerprint": row.payload_hash,
                "job_id": row.job_id,
                "created_us": row.created_us,
                "expires_us": row.expires_us,
                "value": PLAIN.encode(row.job_id),
            }
            for row in batch
            if row.kind == "key"
        ]
        payloads = [
            {
                "dedupe": _dedupe(row.tenant, row.user_id, row.payload_hash),
                "until": row.expires_us,
                "run_id": row.job_id,
            }
            for row in batch
            if row.kind == "payload"
        ]
        if own:
            conn.execute(text(_INSERT_KEYS.format(fence=fence)), own)
        if payloads:
            source = _NAMED[conn.dialect.name]
            conn.execute(text(_DEDUPE.format(source=source)), {"rows": json.dumps(payloads)})


def _old_keys() -> Iterator[list[Row[Any]]]:
    """The keys, in bounded batches."""
    after = {"tenant": "", "user_id": "", "kind": "", "key": ""}
    query = text(f"""
SELECT tenant, user_id, kind, key, payload_hash, job_id, created_us, expires_us FROM semel_run_keys
WHERE (tenant, user_id, kind, key) > (:tenant, :user_id, :kind, :key)
ORDER BY tenant, user_id, kind, key LIMIT {_BATCH}""")
    while batch := list(op.get_bind().execute(query, after)):
        yield batch
        after = {name: getattr(batch[-1], name) for name in after}


def _scope(tenant: str, user: str) -> str:
    name = f"runs:{user}" if user else "runs"
    return f"{quote(tenant, safe='', errors='surrogatepass')} {name}" if tenant else name


def _dedupe(tenant: str, user: str, payload_hash: str) -> str:
    return str(UUID(bytes=sha256(f"{tenant}\0{user}\0{payload_hash}".encode("utf8", "surrogatepass")).digest()[:16]))


def _idempotency_keys(postgres: bool, source: str = "") -> None:
    """The documents' view of keys."""
    if postgres:
        created, expires = (f"TIMESTAMPTZ 'epoch' + {name} * INTERVAL '1 microsecond'" for name in _TIMES)
        user, position = "user_id", "strpos(scope, 'runs:')"
    else:
        created, expires = _PLAIN.format("created_us"), _TELLING
        user, position = _USER, "instr(scope, 'runs:')"
    source = (
        source
        or f"""(
  SELECT key, attempt AS job_id, fingerprint AS payload_hash, created_us, expires_us,
         CASE {position} WHEN 0 THEN '' ELSE substr(scope, {position} + 5) END AS user_id
  FROM semel_keys WHERE {_RUN} AND state = 'completed') AS k"""
    )
    op.execute(f"""
CREATE VIEW idempotency_keys AS
SELECT key AS idempotency_key, job_id, {user} AS user_id, {created} AS created_at, {expires} AS expires_at,
       key, payload_hash, job_id AS run_id
FROM {source}
""")


_TIMES = ("created_us", "expires_us")
_PLAIN = "strftime('%Y-%m-%d %H:%M:%f', {} / 1000000.0, 'unixepoch')"
_NOW_US = "(julianday('now') - 2440587.5) * 86400000000.0"
_TELLING = (
    f"strftime(CASE WHEN expires_us > {_NOW_US} THEN '%Y-%m-%dT%H:%M:%f' ELSE '%Y-%m-%d %H:%M:%f' END, "
    "expires_us / 1000000.0, 'unixepoch')"
)
_USER = "CASE CAST(CAST(user_id AS INTEGER) AS TEXT) WHEN user_id THEN CAST(user_id AS INTEGER) ELSE user_id END"


def _guard(postgres: bool) -> None:
    """What was written once stays; an active run changes only by a lease, by its end, and under its fence."""
    refused = {
        ("semel_runs", "UPDATE"): "true",
        ("semel_attempts", "UPDATE"): "true",
        ("semel_active", "UPDATE"): _illegal(_FIXED),
        ("semel_active", "INSERT"): "NEW.version <> 1 OR NEW.fence <> 0 OR NEW.lease_until_us IS NOT NULL",
    }
    if postgres:
        op.execute("""
CREATE OR REPLACE FUNCTION semel_refuse_transition() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  RAISE EXCEPTION 'semel: illegal change of a row of %', TG_TABLE_NAME USING ERRCODE = 'check_violation';
END $$
""")
    for (table, event), when in refused.items():
        _refuse(table, event, when, postgres)


def _refuse(table: str, event: str, when: str, postgres: bool) -> None:
    name = f"{table}_{'guard' if event == 'UPDATE' else 'born'}"
    if postgres:
        op.execute(
            f"CREATE TRIGGER {name} BEFORE {event} ON {table} FOR EACH ROW WHEN ({when}) "
            "EXECUTE FUNCTION semel_refuse_transition()"
        )
    else:
        op.execute(
            f"CREATE TRIGGER {name} BEFORE {event} ON {table} FOR EACH ROW WHEN {when} "
            f"BEGIN SELECT RAISE(ABORT, 'semel: illegal change of a row of {table}'); END"
        )


def guard_active(fixed: Sequence[str] = _FIXED) -> None:
    """Make the trigger that refuses changes of an active run again: these columns never change."""
    postgres = op.get_bind().dialect.name == "postgresql"
    op.execute(f"DROP TRIGGER semel_active_guard{' ON semel_active' if postgres else ''}")
    _refuse("semel_active", "UPDATE", _illegal(fixed), postgres)


def states(submitted: Sequence[str], ended: dict[str, str], postgres: bool, added: Sequence[str] = ()) -> str:
    """The query of the view of every run, from these columns of what was submitted and of what has ended.

    ``added`` come last, so that PostgreSQL can replace the view.
    """
    both = [f"CASE WHEN a.id IS NULL THEN {ended[name]} ELSE {ACTIVE[name]} END AS {name}" for name in ACTIVE]
    one = ONE | COMPUTED if postgres else ONE
    columns = [*submitted, *both, *(f"{value} AS {name}" for name, value in one.items()), *added]
    shown = ", ".join(columns).replace("{true}", "true" if postgres else "1")
    return f"""SELECT {shown} FROM semel_runs AS r
LEFT JOIN semel_active AS a ON a.id = r.id
LEFT JOIN semel_attempts AS e ON e.run_id = r.id AND e.status <> 'PENDING'
"""


def _views(postgres: bool, *, model_runs: bool) -> None:
    op.execute(f"CREATE VIEW semel_run_states AS {states(SUBMITTED, ENDED, postgres)}")
    op.execute(f"CREATE VIEW semel_run_steps AS {STEPS}")
    if model_runs:
        _model_runs(postgres, "semel_run_states", "encode(payload_hash, 'hex')" if postgres else "payload_hash")


def _model_runs(postgres: bool, source: str, payload_hash: str = "payload_hash") -> None:
    time = (
        "TIMESTAMPTZ 'epoch' + {} * INTERVAL '1 microsecond'"
        if postgres
        else "strftime('%Y-%m-%d %H:%M:%f', {} / 1000000.0, 'unixepoch')"
    )
    op.execute(f"""
CREATE VIEW model_runs AS
SELECT id, model, status, {"CAST(parameters AS jsonb)" if postgres else "parameters"} AS parameters,
       {payload_hash} AS payload_hash,
       {time.format("created_us")} AS created_at, {time.format("started_us")} AS started_at,
       {time.format("finished_us")} AS finished_at, attempts AS attempt_count, last_error,
       CASE WHEN status = 'SUCCEEDED' THEN coalesce(result_ref, 'semel:' || CAST(id AS text)) END AS result_ref,
       CASE WHEN status = 'RUNNING' THEN worker END AS lease_owner,
       {time.format("lease_until_us")} AS lease_expires_at, {time.format("heartbeat_us")} AS heartbeat_at
FROM {source}
""")


def _drop_view(name: str) -> bool:
    """Drop semel's view of this name; a user's own stays, and is not replaced."""
    found = inspect(op.get_bind())
    if name not in found.get_view_names() or "semel_" not in (found.get_view_definition(name) or ""):
        return False
    op.execute(f"DROP VIEW {name}")
    return True


# -- the way back ------------------------------------------------------------------------------------------------------

_before = MetaData()
_old_runs = Table(
    "semel_runs",
    _before,
    Column("id", _id, primary_key=True),
    Column("tenant", _name, nullable=False),
    Column("user_id", _name, nullable=False),
    Column("model", _name, nullable=False),
    Column("queue", _name, nullable=False),
    Column("priority", Integer, nullable=False),
    Column("status", Text, nullable=False),
    Column("ready", Boolean, nullable=False),
    Column("step", Text, nullable=False),
    Column("note", Text, nullable=True),
    Column("version", Integer, nullable=False),
    Column("changed_us", BigInteger, nullable=False),
    Column("fence", BigInteger, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("errors", Integer, nullable=False),
    Column("losts", Integer, nullable=False),
    Column("max_attempts", Integer, nullable=False),
    Column("max_lost", Integer, nullable=False),
    Column("parameters", Text, nullable=False),
    Column("payload_hash", _name, nullable=False),
    Column("idempotency_key", Text, nullable=True),
    Column("facet", Text, nullable=True),
    Column("retry_of", _id, nullable=True),
    Column("cost", BigInteger, nullable=False),
    Column("asked_cost", BigInteger, nullable=False),
    Column("created_us", BigInteger, nullable=False),
    Column("due_us", BigInteger, nullable=False),
    Column("started_us", BigInteger, nullable=True),
    Column("finished_us", BigInteger, nullable=True),
    Column("worker", Text, nullable=True),
    Column("lease_us", BigInteger, nullable=False),
    Column("lease_until_us", BigInteger, nullable=True),
    Column("heartbeat_us", BigInteger, nullable=True),
    Column("cancel_us", BigInteger, nullable=True),
    Column("progress", Float, nullable=True),
    Column("progress_note", Text, nullable=True),
    Column("progress_us", BigInteger, nullable=True),
    Column("stall_us", BigInteger, nullable=True),
    Column("last_error", Text, nullable=True),
    Column("traceback", Text, nullable=True),
    Column("result", Text, nullable=True),
    Column("result_ref", Text, nullable=True),
    Column("result_digest", Text, nullable=True),
    Column("result_size", BigInteger, nullable=True),
    Column("artifacts", Text, nullable=True),
    Column("data_ref", Text, nullable=True),
    Column("trace", Text, nullable=True),
    Column("result_exact", Text, nullable=True),
    Column("warnings", Text, nullable=True),
    CheckConstraint("status IN ('PENDING', 'RUNNING', 'SUCCEEDED', 'FAILED', 'CANCELLED')", "semel_runs_status"),
    CheckConstraint("(status = 'RUNNING') = (lease_until_us IS NOT NULL)", "semel_runs_leased"),
    CheckConstraint("status <> 'RUNNING' OR worker IS NOT NULL", "semel_runs_executor"),
    CheckConstraint("(status IN ('PENDING', 'RUNNING')) = (finished_us IS NULL)", "semel_runs_finished"),
    CheckConstraint(
        "status = 'SUCCEEDED' OR coalesce(result, result_ref, result_digest, artifacts) IS NULL", "semel_runs_result"
    ),
    CheckConstraint("version > 1 OR status = 'PENDING'", "semel_runs_born"),
    postgresql_with={"fillfactor": "70"},
)
_old_pending = "status = 'PENDING' AND ready"
Index(
    "semel_runs_ready",
    _old_runs.c.queue,
    _old_runs.c.priority.desc(),
    _old_runs.c.due_us,
    _old_runs.c.id,
    postgresql_where=text(_old_pending),
    sqlite_where=text(_old_pending),
)
_old_later = "status = 'PENDING' AND NOT ready"
Index("semel_runs_later", _old_runs.c.due_us, postgresql_where=text(_old_later), sqlite_where=text(_old_later))
Index(
    "semel_runs_later_since", _old_runs.c.changed_us, postgresql_where=text(_old_later), sqlite_where=text(_old_later)
)
_old_active = "user_id <> '' AND status IN ('PENDING', 'RUNNING')"
Index(
    "semel_runs_active",
    _old_runs.c.tenant,
    _old_runs.c.user_id,
    postgresql_where=text(_old_active),
    sqlite_where=text(_old_active),
)
_old_somebody = "user_id <> ''"
Index(
    "semel_runs_user",
    _old_runs.c.tenant,
    _old_runs.c.user_id,
    _old_runs.c.created_us,
    postgresql_where=text(_old_somebody),
    sqlite_where=text(_old_somebody),
)
Index(
    "semel_runs_user_list",
    _old_runs.c.tenant,
    _old_runs.c.user_id,
    _old_runs.c.id,
    postgresql_where=text(_old_somebody),
    sqlite_where=text(_old_somebody),
)
_old_failed = "status = 'FAILED'"
Index(
    "semel_runs_failed",
    _old_runs.c.tenant,
    _old_runs.c.finished_us,
    postgresql_where=text(_old_failed),
    sqlite_where=text(_old_failed),
)
Index("semel_runs_status", _old_runs.c.status, _old_runs.c.id)
Index("semel_runs_payload", _old_runs.c.payload_hash)
Index(
    "semel_runs_data",
    _old_runs.c.data_ref,
    postgresql_where=_old_runs.c.data_ref.is_not(None),
    sqlite_where=_old_runs.c.data_ref.is_not(None),
)

_old_events = Table(
    "semel_run_events",
    _before,
    Column("run_id", _id, nullable=False),
    Column("version", Integer, nullable=False),
    Column("at_us", BigInteger, nullable=False),
    Column("step", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("fence", BigInteger, nullable=False),
    Column("worker", Text, nullable=True),
    Column("note", Text, nullable=True),
    Column("unpublished", Boolean, nullable=False),
    Column("unsent", Boolean, nullable=False, server_default=text("false")),
    PrimaryKeyConstraint("run_id", "version", name="semel_run_events_pkey"),
)
_old_unpublished = "unpublished"
Index(
    "semel_run_events_unpublished",
    _old_events.c.at_us,
    postgresql_where=text(_old_unpublished),
    sqlite_where=text(_old_unpublished),
)
_old_unsent = "unsent"
Index(
    "semel_run_events_unsent", _old_events.c.at_us, postgresql_where=text(_old_unsent), sqlite_where=text(_old_unsent)
)


_old_run_keys = Table(
    "semel_run_keys",
    MetaData(),
    Column("tenant", _name, nullable=False),
    Column("user_id", _name, nullable=False),
    Column("kind", Text, nullable=False),
    Column("key", _name, nullable=False),
    Column("payload_hash", _name, nullable=False),
    Column("job_id", Text, nullable=False),
    Column("created_us", BigInteger, nullable=False),
    Column("expires_us", BigInteger, nullable=False),
    PrimaryKeyConstraint("tenant", "user_id", "kind", "key", name="semel_run_keys_pkey"),
)
Index("semel_run_keys_expires", _old_run_keys.c.expires_us)
_own = "kind = 'key'"
Index("semel_run_keys_job", _old_run_keys.c.job_id, postgresql_where=text(_own), sqlite_where=text(_own))


def _move_keys_back() -> None:
    conn = op.get_bind()
    own = text(f"""
SELECT scope, key, fingerprint AS payload_hash, attempt AS job_id, created_us, expires_us FROM semel_keys
WHERE {_RUN} AND state = 'completed' AND (scope, key) > (:scope, :key) ORDER BY scope, key LIMIT {_BATCH}""")
    after = {"scope": "", "key": ""}
    while batch := list(conn.execute(own, after)):
        conn.execute(_old_run_keys.insert(), [{**_owner(row.scope), "kind": "key", **_entry(row)} for row in batch])
        after = {"scope": batch[-1].scope, "key": batch[-1].key}
    active = text("""
SELECT r.tenant, r.user_id, r.payload_hash, CAST(r.id AS text) AS job_id, CAST(r.retry_of AS text) AS retry_of,
       r.created_us, a.dedupe_until_us AS expires_us
FROM semel_active AS a JOIN semel_runs AS r ON r.id = a.id WHERE a.dedupe IS NOT NULL""")
    for row in conn.execute(active).all():
        payload_hash = row.payload_hash if isinstance(row.payload_hash, str) else bytes(row.payload_hash).hex()
        key = payload_hash
        if row.retry_of is not None:
            key, payload_hash = f"retry:{row.retry_of}", sha256(f"retry\0{row.retry_of}".encode()).hexdigest()
        named = {"kind": "payload", "key": key, "payload_hash": payload_hash}
        kept = {name: getattr(row, name) for name in ("tenant", "user_id", "job_id", "created_us", "expires_us")}
        conn.execute(_old_run_keys.insert(), {**kept, **named})
    op.execute(f"DELETE FROM semel_keys WHERE {_RUN}")
    op.drop_index("semel_keys_run", "semel_keys")
    op.drop_index("semel_keys_run_key", "semel_keys")


def _entry(row: Row[Any]) -> dict[str, Any]:
    return {name: getattr(row, name) for name in ("key", "payload_hash", "job_id", "created_us", "expires_us")}


def _owner(scope: str) -> dict[str, str]:
    before, colon, user = scope.partition("runs:")
    tenant = (before if colon else scope.removesuffix("runs")).removesuffix(" ")
    return {"tenant": unquote(tenant, errors="surrogatepass"), "user_id": user}


_DIGESTS = ("payload_hash", "result_digest")
_FINAL = ("result", "result_ref", "result_digest", "artifacts")
_ASKED = ("id", "tenant", "user_id", "model", "parameters", "payload_hash", "created_us")
_OLD_ILLEGAL = f"""
     (OLD.status <> NEW.status AND NOT (
            (OLD.status = 'PENDING' AND NEW.status IN ('RUNNING', 'CANCELLED'))
         OR (OLD.status = 'RUNNING' AND NEW.status IN ('PENDING', 'SUCCEEDED', 'FAILED', 'CANCELLED'))))
  OR (OLD.status <> NEW.status AND NEW.version <= OLD.version)
  OR (OLD.fence <> NEW.fence AND NOT (OLD.status = 'PENDING' AND NEW.status = 'RUNNING' AND NEW.fence > OLD.fence))
  OR (OLD.status = 'PENDING' AND NEW.status = 'RUNNING' AND NEW.fence <= OLD.fence)
  OR (OLD.status = 'RUNNING' AND NEW.status = 'RUNNING' AND OLD.worker <> NEW.worker)
  OR (OLD.finished_us IS NOT NULL AND ({
    " OR ".join(f"coalesce(OLD.{name}, '') <> coalesce(NEW.{name}, '')" for name in _FINAL)
}))
  OR {" OR ".join(f"OLD.{name} <> NEW.{name}" for name in _ASKED)}
"""
_OLD_WATCHED = ", ".join(("status", "fence", "worker", *_FINAL, *_ASKED))


def downgrade() -> None:
    """Write every run into one row again, and its steps beside it."""
    postgres = op.get_bind().dialect.name == "postgresql"
    shown, keys_shown = _drop_view("model_runs"), _drop_view("idempotency_keys")
    _old_run_keys.create(op.get_bind())
    _move_keys_back()
    op.execute("CREATE TABLE semel_runs_kept AS SELECT * FROM semel_run_states")
    op.execute("""
CREATE TABLE semel_steps_kept AS
SELECT s.*, o.run_id IS NOT NULL AND o.unpublished AS unpublished, o.run_id IS NOT NULL AND o.unsent AS unsent
FROM semel_run_steps AS s LEFT JOIN semel_outbox AS o ON o.run_id = s.run_id AND o.version = s.version
""")
    op.execute("DROP VIEW semel_run_steps")
    op.execute("DROP VIEW semel_run_states")
    op.rename_table("semel_runs", NEXT)
    metadata.drop_all(op.get_bind())
    if postgres:
        _unpartition()
    op.drop_column("semel_jobs", "data_us")
    _before.create_all(op.get_bind())
    for table, kept in ((_old_runs, "semel_runs_kept"), (_old_events, "semel_steps_kept")):
        columns = [column.name for column in table.c]
        digits = ["encode(" + name + ", 'hex')" if postgres and name in _DIGESTS else name for name in columns]
        op.execute(f"INSERT INTO {table.name} ({', '.join(columns)}) SELECT {', '.join(digits)} FROM {kept}")
        op.drop_table(kept)
    if keys_shown:
        _idempotency_keys(postgres, "semel_run_keys WHERE kind = 'key'")
    on = f"BEFORE UPDATE OF {_OLD_WATCHED} ON semel_runs FOR EACH ROW WHEN"
    if postgres:
        op.execute("""
CREATE OR REPLACE FUNCTION semel_refuse_transition() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  RAISE EXCEPTION 'semel: illegal transition of run % from % to %', OLD.id, OLD.status, NEW.status
  USING ERRCODE = 'check_violation';
END $$
""")
        op.execute(f"CREATE TRIGGER semel_runs_guard {on} ({_OLD_ILLEGAL}) EXECUTE FUNCTION semel_refuse_transition()")
    else:
        refuse = "SELECT RAISE(ABORT, 'semel: illegal transition of a run')"
        op.execute(f"CREATE TRIGGER semel_runs_guard {on} {_OLD_ILLEGAL} BEGIN {refuse}; END")
    if shown:
        _model_runs(postgres, "semel_runs")
