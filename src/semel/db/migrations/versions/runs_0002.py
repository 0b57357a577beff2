"""Runs, their keys, events and logs; quotas, reservations, workers; views with the names in the documents."""

import logging

from alembic import op
from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Float,
    Index,
    Integer,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    Uuid,
    inspect,
    text,
)

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

metadata = MetaData()

_log = logging.getLogger("semel")

_name = Text(collation="C").with_variant(Text(), "sqlite")
_id = Uuid(as_uuid=False).with_variant(Text(), "sqlite")

runs = Table(
    "semel_runs",
    metadata,
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
    Column("last_error", Text, nullable=True),
    Column("traceback", Text, nullable=True),
    Column("result", Text, nullable=True),
    Column("result_ref", Text, nullable=True),
    Column("result_digest", Text, nullable=True),
    Column("result_size", BigInteger, nullable=True),
    Column("artifacts", Text, nullable=True),
    Column("data_ref", Text, nullable=True),
    Column("trace", Text, nullable=True),
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
_pending = "status = 'PENDING' AND ready"
Index(
    "semel_runs_ready",
    runs.c.queue,
    runs.c.priority.desc(),
    runs.c.due_us,
    runs.c.id,
    postgresql_where=text(_pending),
    sqlite_where=text(_pending),
)
_later = "status = 'PENDING' AND NOT ready"
Index("semel_runs_later", runs.c.due_us, postgresql_where=text(_later), sqlite_where=text(_later))
_active = "user_id <> '' AND status IN ('PENDING', 'RUNNING')"
Index(
    "semel_runs_active",
    runs.c.tenant,
    runs.c.user_id,
    postgresql_where=text(_active),
    sqlite_where=text(_active),
)
_somebody = "user_id <> ''"
Index(
    "semel_runs_user",
    runs.c.tenant,
    runs.c.user_id,
    runs.c.created_us,
    postgresql_where=text(_somebody),
    sqlite_where=text(_somebody),
)
Index(
    "semel_runs_user_list",
    runs.c.tenant,
    runs.c.user_id,
    runs.c.id,
    postgresql_where=text(_somebody),
    sqlite_where=text(_somebody),
)
_failed = "status = 'FAILED'"
Index(
    "semel_runs_failed",
    runs.c.tenant,
    runs.c.finished_us,
    postgresql_where=text(_failed),
    sqlite_where=text(_failed),
)
Index("semel_runs_status", runs.c.status, runs.c.id)
Index("semel_runs_payload", runs.c.payload_hash)

run_keys = Table(
    "semel_run_keys",
    metadata,
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
Index("semel_run_keys_expires", run_keys.c.expires_us)

run_events = Table(
    "semel_run_events",
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
    PrimaryKeyConstraint("run_id", "version", name="semel_run_events_pkey"),
)
_unpublished = "unpublished"
Index(
    "semel_run_events_unpublished",
    run_events.c.at_us,
    postgresql_where=text(_unpublished),
    sqlite_where=text(_unpublished),
)

_run_logs = Table(
    "semel_run_logs",
    metadata,
    Column("run_id", _id, nullable=False),
    Column("fence", BigInteger, nullable=False),
    Column("line", Integer, nullable=False),
    Column("at_us", BigInteger, nullable=False),
    Column("level", Text, nullable=False),
    Column("text", Text, nullable=False),
    PrimaryKeyConstraint("run_id", "fence", "line", name="semel_run_logs_pkey"),
)

_quotas = Table(
    "semel_quotas",
    metadata,
    Column("tenant", _name, nullable=False),
    Column("user_id", _name, nullable=False),
    Column("max_concurrent", Integer, nullable=True),
    Column("per_hour", Integer, nullable=True),
    Column("per_day", Integer, nullable=True),
    Column("cost_daily", BigInteger, nullable=True),
    Column("cost_weekly", BigInteger, nullable=True),
    Column("cost_monthly", BigInteger, nullable=True),
    Column("cost_yearly", BigInteger, nullable=True),
    Column("action", Text, nullable=False),
    Column("warn_at", Float, nullable=False),
    PrimaryKeyConstraint("tenant", "user_id", name="semel_quotas_pkey"),
)

reservations = Table(
    "semel_reservations",
    metadata,
    Column("id", Text, primary_key=True),
    Column("tenant", _name, nullable=False),
    Column("user_id", _name, nullable=False),
    Column("created_us", BigInteger, nullable=False),
    Column("expires_us", BigInteger, nullable=False),
    Column("consumed", Boolean, nullable=False),
    Column("job_id", Text, nullable=True),
)
Index("semel_reservations_user", reservations.c.tenant, reservations.c.user_id)
Index("semel_reservations_expires", reservations.c.expires_us)

_workers = Table(
    "semel_workers",
    metadata,
    Column("id", Text, primary_key=True),
    Column("name", Text, nullable=False),
    Column("host", Text, nullable=False),
    Column("pid", Integer, nullable=False),
    Column("queues", Text, nullable=False),
    Column("models", Text, nullable=False),
    Column("slots", Text, nullable=False),
    Column("draining", Boolean, nullable=False),
    Column("started_us", BigInteger, nullable=False),
    Column("seen_us", BigInteger, nullable=False),
)

_leaders = Table(
    "semel_leaders",
    metadata,
    Column("role", Text, primary_key=True),
    Column("holder", Text, nullable=False),
    Column("until_us", BigInteger, nullable=False),
    Column("term_us", BigInteger, nullable=False),
)

_FIXED = ("id", "tenant", "user_id", "model", "parameters", "payload_hash", "created_us")
_CHANGED = "coalesce(OLD.{0}, '') <> coalesce(NEW.{0}, '')"
_FINAL = ("result", "result_ref", "result_digest", "artifacts")
_LEGAL = """
     (OLD.status = 'PENDING' AND NEW.status IN ('RUNNING', 'CANCELLED'))
  OR (OLD.status = 'RUNNING' AND NEW.status IN ('PENDING', 'SUCCEEDED', 'FAILED', 'CANCELLED'))
"""
_ILLEGAL = f"""
     (OLD.status <> NEW.status AND NOT ({_LEGAL}))
  OR (OLD.status <> NEW.status AND NEW.version <= OLD.version)
  OR (OLD.fence <> NEW.fence AND NOT (OLD.status = 'PENDING' AND NEW.status = 'RUNNING' AND NEW.fence > OLD.fence))
  OR (OLD.status = 'PENDING' AND NEW.status = 'RUNNING' AND NEW.fence <= OLD.fence)
  OR (OLD.status = 'RUNNING' AND NEW.status = 'RUNNING' AND OLD.worker <> NEW.worker)
  OR (OLD.finished_us IS NOT NULL AND ({" OR ".join(_CHANGED.format(name) for name in _FINAL)}))
  OR {" OR ".join(f"OLD.{name} <> NEW.{name}" for name in _FIXED)}
"""
_WATCHED = ", ".join(("status", "fence", "worker", *_FINAL, *_FIXED))


def upgrade() -> None:
    """Create the tables, the trigger that guards the state machine, and the views."""
    metadata.create_all(op.get_bind())
    if op.get_bind().dialect.name == "postgresql":
        _guard_postgres()
        _views("TIMESTAMPTZ 'epoch' + {} * INTERVAL '1 microsecond'", "CAST({} AS jsonb)", "user_id")
    else:
        _guard_sqlite()
        _views(
            "strftime('%Y-%m-%d %H:%M:%f', {} / 1000000.0, 'unixepoch')",
            "{}",
            "CASE CAST(CAST(user_id AS INTEGER) AS TEXT) WHEN user_id THEN CAST(user_id AS INTEGER) ELSE user_id END",
        )


def _guard_postgres() -> None:
    op.execute("""
CREATE FUNCTION semel_refuse_transition() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  RAISE EXCEPTION 'semel: illegal transition of run % from % to %', OLD.id, OLD.status, NEW.status
  USING ERRCODE = 'check_violation';
END $$
""")
    op.execute(
        f"CREATE TRIGGER semel_runs_guard BEFORE UPDATE OF {_WATCHED} ON semel_runs "
        f"FOR EACH ROW WHEN ({_ILLEGAL}) EXECUTE FUNCTION semel_refuse_transition()"
    )


def _guard_sqlite() -> None:
    op.execute(
        f"CREATE TRIGGER semel_runs_guard BEFORE UPDATE OF {_WATCHED} ON semel_runs FOR EACH ROW WHEN {_ILLEGAL} "
        "BEGIN SELECT RAISE(ABORT, 'semel: illegal transition of a run'); END"
    )


def _views(time: str, json: str, user: str) -> None:
    """Create the views. ``time``, ``json`` and ``user`` are the dialect's formats of such values."""
    _view(
        "model_runs",
        f"""
SELECT id, model, status, {json.format("parameters")} AS parameters, payload_hash,
       {time.format("created_us")} AS created_at, {time.format("started_us")} AS started_at,
       {time.format("finished_us")} AS finished_at, attempts AS attempt_count, last_error,
       CASE WHEN status = 'SUCCEEDED' THEN result_ref END AS result_ref,
       CASE WHEN status = 'RUNNING' THEN worker END AS lease_owner,
       {time.format("lease_until_us")} AS lease_expires_at, {time.format("heartbeat_us")} AS heartbeat_at
FROM semel_runs
""",
    )
    _view(
        "idempotency_keys",
        f"""
SELECT key AS idempotency_key, job_id, {user} AS user_id, {time.format("created_us")} AS created_at,
       {time.format("expires_us")} AS expires_at, key, payload_hash, job_id AS run_id
FROM semel_run_keys WHERE kind = 'key'
""",
    )
    _view(
        "job_reservations",
        f"""
SELECT id AS reservation_id, {user} AS user_id, {time.format("created_us")} AS created_at,
       {time.format("expires_us")} AS expires_at, CASE WHEN consumed THEN 1 ELSE 0 END AS consumed
FROM semel_reservations
""",
    )


def _view(name: str, query: str) -> None:
    """Create the view, unless the user has a table or view of that name: semel itself does not need it."""
    if inspect(op.get_bind()).has_table(name):
        _log.warning("%r is there already, so semel's view of that name was left out", name)
    else:
        op.execute(f"CREATE VIEW {name} AS {query}")


def downgrade() -> None:
    """Drop them all."""
    found = inspect(op.get_bind())
    for view in {"job_reservations", "idempotency_keys", "model_runs"} & set(found.get_view_names()):
        if "semel_" in (found.get_view_definition(view) or ""):
            op.execute(f"DROP VIEW {view}")
    metadata.drop_all(op.get_bind())
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP FUNCTION semel_refuse_transition()")
