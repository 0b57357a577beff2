"""semel's tables, as the newest migration leaves them.

Times are microseconds since 1970 on the database's clock. ``semel_keys`` is narrow and updated in place: completing or
renewing changes no indexed column. Neither does a run's heartbeat.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Sequence,
    Table,
    Text,
    Uuid,
    text,
)

REVISIONS = ("0001", "0002", "0003", "0004", "0005", "0006", "0007")
"""Every migration, oldest first; the last one is what this release needs."""

VERSION_TABLE = "semel_version"

metadata = MetaData()

_name = Text(collation="C").with_variant(Text(), "sqlite")
"""Names are compared byte by byte: faster, and in the same order in Python and in the database."""

keys = Table(
    "semel_keys",
    metadata,
    Column("scope", _name, nullable=False),
    Column("key", _name, nullable=False),
    Column("fingerprint", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("fence", BigInteger, nullable=False),
    Column("attempt", Text, nullable=False),
    Column("unknown", Boolean, nullable=False),
    Column("awaited", Boolean, nullable=False),
    Column("created_us", BigInteger, nullable=False),
    Column("lease_us", BigInteger, nullable=False),
    Column("lease_until_us", BigInteger, nullable=False),
    Column("expires_us", BigInteger, nullable=False),
    Column("completed_us", BigInteger, nullable=False),
    Column("kind", Text, nullable=False),
    Column("value", LargeBinary, nullable=True),
    Column("value_until_us", BigInteger, nullable=True),
    PrimaryKeyConstraint("scope", "key", name="semel_keys_pkey"),
    postgresql_with={"fillfactor": "80"},
)
Index("semel_keys_expires", keys.c.expires_us)
Index(
    "semel_keys_value_until",
    keys.c.value_until_us,
    postgresql_where=keys.c.value_until_us.is_not(None),
    sqlite_where=keys.c.value_until_us.is_not(None),
)

fences = Sequence("semel_fence", metadata=metadata)
"""PostgreSQL: a sequence never returns a number twice, whatever is rolled back or purged."""

fence_counter = Table("semel_fence_counter", metadata, Column("last", Integer, nullable=False))
"""SQLite: one row, incremented in the transaction that claims."""

_id = Uuid(as_uuid=False).with_variant(Text(), "sqlite")
"""A UUIDv7, which grows with time; text on SQLite, so that people can query it."""

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
Index("semel_runs_later_since", runs.c.changed_us, postgresql_where=text(_later), sqlite_where=text(_later))
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
Index(
    "semel_runs_data",
    runs.c.data_ref,
    postgresql_where=runs.c.data_ref.is_not(None),
    sqlite_where=runs.c.data_ref.is_not(None),
)

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
_own = "kind = 'key'"
Index("semel_run_keys_job", run_keys.c.job_id, postgresql_where=text(_own), sqlite_where=text(_own))
"""With this index a purge finds the runs that live keys refer to."""

removals = Table(
    "semel_removals",
    metadata,
    Column("prefix", _name, primary_key=True),
    Column("data_ref", Text, nullable=True),
    Column("has_files", Boolean, nullable=False),
)
"""Files of purged runs: a row is added when the run is removed, and deleted when its files are."""

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
    Column("unsent", Boolean, nullable=False, server_default=text("false")),
    PrimaryKeyConstraint("run_id", "version", name="semel_run_events_pkey"),
)
_unpublished = "unpublished"
Index(
    "semel_run_events_unpublished",
    run_events.c.at_us,
    postgresql_where=text(_unpublished),
    sqlite_where=text(_unpublished),
)
_unsent = "unsent"
Index("semel_run_events_unsent", run_events.c.at_us, postgresql_where=text(_unsent), sqlite_where=text(_unsent))

run_logs = Table(
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

quotas = Table(
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
    Column("max_concurrent", Integer, nullable=True),
)
Index("semel_reservations_user", reservations.c.tenant, reservations.c.user_id)
Index("semel_reservations_expires", reservations.c.expires_us)

workers = Table(
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

leaders = Table(
    "semel_leaders",
    metadata,
    Column("role", Text, primary_key=True),
    Column("holder", Text, nullable=False),
    Column("until_us", BigInteger, nullable=False),
    Column("term_us", BigInteger, nullable=False),
)

tokens = Table(
    "semel_tokens",
    metadata,
    Column("id", Text, primary_key=True),
    Column("tenant", _name, nullable=False),
    Column("user_id", _name, nullable=False),
    Column("role", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("digest", Text, nullable=False),
    Column("created_us", BigInteger, nullable=False),
    Column("ttl_us", BigInteger, nullable=True),
    Column("expires_us", BigInteger, nullable=True),
    Column("last_used_us", BigInteger, nullable=True),
)

configs = Table(
    "semel_configs",
    metadata,
    Column("tenant", _name, nullable=False),
    Column("name", _name, nullable=False),
    Column("body", Text, nullable=False),
    Column("updated_us", BigInteger, nullable=False),
    Column("updated_by", Text, nullable=False),
    PrimaryKeyConstraint("tenant", "name", name="semel_configs_pkey"),
)

jobs = Table(
    "semel_jobs",
    metadata,
    Column("run_id", _id, primary_key=True),
    Column("tenant", _name, nullable=False),
    Column("user_id", _name, nullable=False),
    Column("provider", Text, nullable=False),
    Column("config", Text, nullable=False),
    Column("tracker_run_name", Text, nullable=True),
    Column("created_us", BigInteger, nullable=False),
    Column("data", Text, nullable=True),
    Column("data_state", Text, nullable=True),
    Column("data_error", Text, nullable=True),
    Column("upload_id", _id, nullable=True),
    Column("data_bytes", BigInteger, nullable=True),
    Column("data_total", BigInteger, nullable=True),
    Column("data_ref", Text, nullable=True),
    Column("remote_token", Text, nullable=True),
    Column("remote_id", Text, nullable=True),
    Column("remote_status", Text, nullable=True),
    Column("remote_us", BigInteger, nullable=True),
    Column("remote_past", Text, nullable=True),
    Column("remote_heard_us", BigInteger, nullable=True),
)
Index("semel_jobs_user", jobs.c.tenant, jobs.c.user_id, jobs.c.run_id)
_uploading = "data_state = 'uploading'"
Index("semel_jobs_uploading", jobs.c.run_id, postgresql_where=text(_uploading), sqlite_where=text(_uploading))
Index(
    "semel_jobs_remote",
    jobs.c.remote_id,
    unique=True,
    postgresql_where=jobs.c.remote_id.is_not(None),
    sqlite_where=jobs.c.remote_id.is_not(None),
)
Index(
    "semel_jobs_remote_token",
    jobs.c.remote_token,
    unique=True,
    postgresql_where=jobs.c.remote_token.is_not(None),
    sqlite_where=jobs.c.remote_token.is_not(None),
)
_remote_open = "remote_status IN ('asked', 'starting', 'processing')"
Index("semel_jobs_remote_open", jobs.c.run_id, postgresql_where=text(_remote_open), sqlite_where=text(_remote_open))

subscriptions = Table(
    "semel_subscriptions",
    metadata,
    Column("id", Text, primary_key=True),
    Column("tenant", _name, nullable=False),
    Column("kind", Text, nullable=False),
    Column("target", Text, nullable=False),
    Column("secret", Text, nullable=True),
    Column("events", Text, nullable=False),
    Column("created_us", BigInteger, nullable=False),
    Column("disabled_us", BigInteger, nullable=True),
)

deliveries = Table(
    "semel_deliveries",
    metadata,
    Column("subscription_id", Text, nullable=False),
    Column("run_id", _id, nullable=False),
    Column("version", Integer, nullable=False),
    Column("state", Text, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("due_us", BigInteger, nullable=False),
    Column("body", Text, nullable=False),
    Column("last_status", Integer, nullable=True),
    Column("last_error", Text, nullable=True),
    Column("wait_us", BigInteger, nullable=True),
    PrimaryKeyConstraint("run_id", "version", "subscription_id", name="semel_deliveries_pkey"),
)
_waiting = "state = 'waiting'"
Index(
    "semel_deliveries_due",
    deliveries.c.subscription_id,
    deliveries.c.due_us,
    postgresql_where=text(_waiting),
    sqlite_where=text(_waiting),
)
Index("semel_deliveries_state", deliveries.c.state, deliveries.c.due_us)
