"""semel's tables, as the newest migration leaves them.

Times are microseconds since 1970 on the database's clock. ``semel_keys`` is narrow and updated in place: completing or
renewing changes no indexed column. Neither does a run's heartbeat.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    ColumnElement,
    Dialect,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Sequence,
    Table,
    Text,
    TypeDecorator,
    Uuid,
    and_,
    func,
    literal,
    text,
)

REVISIONS = (
    *("0001", "0002", "0003", "0004", "0005", "0006", "0007", "0008", "0009", "0010"),
    *("0011", "0012", "0013", "0014", "0015", "0016", "0017", "0018", "0019"),
)
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

_names_run = "kind = 'run'"
Index("semel_keys_run", keys.c.attempt, postgresql_where=text(_names_run), sqlite_where=text(_names_run))
"""With this index a purge finds the runs that live keys refer to."""
Index("semel_keys_run_key", keys.c.key, postgresql_where=text(_names_run), sqlite_where=text(_names_run))

fences = Sequence("semel_fence", metadata=metadata)
"""PostgreSQL: a sequence never returns a number twice, whatever is rolled back or purged."""

fence_counter = Table("semel_fence_counter", metadata, Column("last", Integer, nullable=False))
"""SQLite: one row, incremented in the transaction that claims."""

_id = Uuid(as_uuid=False).with_variant(Text(), "sqlite")
"""A UUIDv7, which grows with time; text on SQLite, so that people can query it."""


class Digest(TypeDecorator[str]):
    """A digest in hexadecimal digits: on PostgreSQL stored as bytes, half as long; on SQLite as the digits."""

    impl = LargeBinary
    cache_ok = True

    def __init__(self, start: int | None = None) -> None:
        super().__init__()
        self.start = start
        """How many bytes or digits of it are compared; None: all."""

    def load_dialect_impl(self, dialect: Dialect) -> Any:
        return dialect.type_descriptor(Text() if dialect.name == "sqlite" else LargeBinary())

    def process_bind_param(self, value: str | None, dialect: Dialect) -> Any:
        if value is None or dialect.name == "sqlite":
            return value if value is None else value[: self.start]
        try:
            return bytes.fromhex(value)[: self.start]
        except ValueError:
            return b""  # equal to no digest

    def process_result_value(self, value: Any, dialect: Dialect) -> str | None:  # noqa: ARG002 -- SQLAlchemy's
        return value if value is None or isinstance(value, str) else bytes(value).hex()


_START = 7
"""How much of a digest an index holds: enough to find its row, and no more than fits into 16 bytes with its header."""


def has_digest(column: ColumnElement[Any], digits: str) -> ColumnElement[bool]:
    """True where the column holds this digest."""
    start = func.substr(column, 1, _START) == literal(digits, Digest(_START))
    return and_(start, column == digits)


submitted = Table(
    "semel_runs",
    metadata,
    Column("id", _id, primary_key=True),
    Column("created_us", BigInteger, nullable=False),
    Column("lease_us", BigInteger, nullable=True),
    Column("asked_cost", BigInteger, nullable=True),
    Column("stall_us", BigInteger, nullable=True),
    Column("priority", Integer, nullable=True),
    Column("max_attempts", Integer, nullable=False),
    Column("max_lost", Integer, nullable=False),
    Column("tenant", _name, nullable=False),
    Column("user_id", _name, nullable=False),
    Column("model", _name, nullable=False),
    Column("queue", _name, nullable=False),
    Column("payload_hash", Digest, nullable=False),
    Column("parameters", Text, nullable=False),
    Column("idempotency_key", Text, nullable=True),
    Column("facet", Text, nullable=True),
    Column("retry_of", _id, nullable=True),
    Column("data_ref", Text, nullable=True),
    Column("trace", Text, nullable=True),
    Column("seed", BigInteger, nullable=True),
    Column("rerun_of", _id, nullable=True),
    postgresql_partition_by="RANGE (id)",
)
"""What was submitted: a row is inserted once, and never updated. ``asked_cost``: NULL for 0. ``seed``: NULL if it is
derived from the payload. On PostgreSQL also ``priority``, and ``lease_us`` NULL for a minute; on SQLite these are NOT
NULL.
"""
_somebody = "user_id <> ''"
Index(
    "semel_runs_user_time",
    submitted.c.tenant,
    submitted.c.user_id,
    submitted.c.created_us,
    postgresql_where=text(_somebody),
    sqlite_where=text(_somebody),
)
Index(
    "semel_runs_user_page",
    submitted.c.tenant,
    submitted.c.user_id,
    submitted.c.id,
    postgresql_where=text(_somebody),
    sqlite_where=text(_somebody),
)
Index("semel_runs_hash", func.substr(submitted.c.payload_hash, 1, _START)).ddl_if("postgresql")
Index("semel_runs_hash", submitted.c.payload_hash).ddl_if("sqlite")
Index(
    "semel_runs_data_ref",
    submitted.c.data_ref,
    postgresql_where=submitted.c.data_ref.is_not(None),
    sqlite_where=submitted.c.data_ref.is_not(None),
)

Index(
    "semel_runs_search",
    submitted.c.id,
    submitted.c.tenant,
    submitted.c.model,
    submitted.c.queue,
    postgresql_using="brin",
    postgresql_ops={
        "tenant": "text_bloom_ops (n_distinct_per_range = 64)",
        "model": "text_bloom_ops (n_distinct_per_range = 64)",
        "queue": "text_bloom_ops (n_distinct_per_range = 16)",
    },
    postgresql_with={"pages_per_range": 16, "autosummarize": "on"},
).ddl_if("postgresql")
Index("semel_runs_search", submitted.c.model, submitted.c.tenant, submitted.c.id).ddl_if("sqlite")
"""Finds the runs of a model, queue or tenant that has few of them. On PostgreSQL it has no entry for each run, only a
summary of the tenants, models and queues in every sixteen pages, so a run costs no WAL for it.
"""

active = Table(
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
    Column("charged_us", BigInteger, nullable=True),
    CheckConstraint("lease_until_us IS NULL OR worker IS NOT NULL", "semel_active_executor"),
    CheckConstraint("lease_until_us IS NULL OR fence > 0", "semel_active_fenced"),
    postgresql_with={"fillfactor": "45"},
)
"""The runs that are pending (without the end of a lease) or running. A lease and its renewals change no indexed column,
so that PostgreSQL writes the row in place. ``since_us``: when its present wait began. ``step``: NULL until the first.
``dedupe``: what is unique for its payload, until ``dedupe_until_us``. ``cost``: NULL for 0, until an attempt reported
one. ``charged_us``: when a run that has a cost was submitted. The times of the first start, the heartbeat and the
progress are NULL where they are ``began_us``.
"""
Index(
    "semel_active_ready",
    active.c.queue,
    active.c.ready,
    active.c.priority.desc(),
    active.c.due_us,
    active.c.id,
    sqlite_where=text("lease_until_us IS NULL"),
)
_leased = "lease_until_us IS NOT NULL"
Index("semel_active_lease", active.c.lease_until_us, postgresql_using="brin", sqlite_where=text(_leased))
_later = "NOT ready"
Index("semel_active_later", active.c.due_us, postgresql_where=text(_later), sqlite_where=text(_later))
Index("semel_active_later_since", active.c.since_us, postgresql_where=text(_later), sqlite_where=text(_later))
_named = "dedupe IS NOT NULL"
Index("semel_active_dedupe", active.c.dedupe, unique=True, postgresql_where=text(_named), sqlite_where=text(_named))
Index(
    "semel_active_user",
    active.c.tenant,
    active.c.user_id,
    postgresql_where=text(_somebody),
    sqlite_where=text(_somebody),
)

attempts = Table(
    "semel_attempts",
    metadata,
    Column("run_id", _id, nullable=False),
    Column("fence", BigInteger, nullable=False),
    Column("due_us", BigInteger, nullable=True),
    Column("ended_us", BigInteger, nullable=False),
    Column("version", Integer, nullable=False),
    Column("attempts", Integer, nullable=True),
    Column("errors", Integer, nullable=True),
    Column("losts", Integer, nullable=True),
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
    Column("result_digest", Digest, nullable=True),
    Column("result", Text, nullable=True),
    Column("result_ref", Text, nullable=True),
    Column("result_exact", Text, nullable=True),
    Column("artifacts", Text, nullable=True),
    Column("warnings", Text, nullable=True),
    Column("data_ref", Text, nullable=True),
    Column("digest", Digest, nullable=True),
    PrimaryKeyConstraint("run_id", "version", name="semel_attempts_pkey"),
    CheckConstraint("status IN ('PENDING', 'SUCCEEDED', 'FAILED', 'CANCELLED')", "semel_attempts_status"),
    CheckConstraint(
        "status = 'SUCCEEDED' OR coalesce(result, result_ref, artifacts) IS NULL AND result_digest IS NULL",
        "semel_attempts_result",
    ),
    CheckConstraint("status = 'CANCELLED' OR began_us IS NOT NULL", "semel_attempts_began"),
    postgresql_partition_by="RANGE (run_id)",
)
"""Every attempt that ended, with the run's status after it, and the outcome of the run if it was the last. A row is
inserted once, and never updated. A pending run that is cancelled has a row without ``began_us``. ``step`` is NULL where
it has the name of the status. ``started_us``, the
start of the first attempt, and the times of the heartbeat and the progress are NULL where they equal ``began_us``.
On PostgreSQL, digest and size of a result that is in the row are NULL: the view computes them. So are ``attempts`` of
1, ``errors`` and ``losts`` of 0, and a ``due_us`` at which the run was submitted; on SQLite these are NOT NULL.
``digest``: of this row and the run's attempts before it (see :mod:`semel.audit`); NULL if an older release wrote it.
"""
_unsuccessful = "status IN ('FAILED', 'CANCELLED')"
Index(
    "semel_attempts_unsuccessful",
    attempts.c.status,
    attempts.c.run_id,
    postgresql_where=text(_unsuccessful),
)
_failed = "status = 'FAILED'"
Index(
    "semel_attempts_failed",
    attempts.c.tenant,
    attempts.c.ended_us,
    postgresql_where=text(_failed),
    sqlite_where=text(_failed),
)
RETRIED = "status = 'PENDING' AND step IN ('retried', 'lost')"
"""Attempts that failed, and were not the last of their run."""
Index(
    "semel_attempts_retried",
    attempts.c.tenant,
    attempts.c.ended_us,
    postgresql_where=text(RETRIED),
    sqlite_where=text(RETRIED),
)
Index(
    "semel_attempts_data",
    attempts.c.data_ref,
    postgresql_where=attempts.c.data_ref.is_not(None),
    sqlite_where=attempts.c.data_ref.is_not(None),
)

sealing = Table("semel_sealing", metadata, Column("begun_us", BigInteger, primary_key=True, autoincrement=False))
"""Has a row if the history of runs is sealed: since when."""

unsealed = Table("semel_unsealed", metadata, Column("entries", LargeBinary, nullable=False))
"""Attempts and purges that no seal covers yet: of each, 16 bytes of its id, 4 of its version (0 for a purge) and 32 of
its digest. A row for each batch, so that nobody waits for another's.
"""

seals = Table(
    "semel_seals",
    metadata,
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("at_us", BigInteger, nullable=False),
    Column("count", Integer, nullable=False),
    Column("first_id", _id, nullable=False),
    Column("last_id", _id, nullable=False),
    Column("root", Digest, nullable=False),
    Column("previous", Digest, nullable=True),
    Column("public_key", Digest, nullable=True),
    Column("digest", Digest, nullable=False),
    Column("signature", Digest, nullable=True),
)
"""The seals, which are never removed: each covers its leaves by their ``root``, and all seals before it."""
Index("semel_seals_at", seals.c.at_us)

seal_leaves = Table(
    "semel_seal_leaves",
    metadata,
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("leaves", LargeBinary, nullable=False),
)
"""The leaves of each seal, in order: for each, 16 bytes of its id, 4 of its version and 32 of its hash."""

purges = Table(
    "semel_purges",
    metadata,
    Column("id", _id, primary_key=True),
    Column("at_us", BigInteger, nullable=False),
    Column("rule", Text, nullable=False),
    Column("count", BigInteger, nullable=False),
    Column("first_id", _id, nullable=False),
    Column("last_id", _id, nullable=False),
    Column("ids", Digest, nullable=True),
)
"""Which runs were removed, when and by which rule. ``ids``: 16 bytes for each; NULL: all from the first to the last."""

run_counts = Table(
    "semel_run_counts",
    metadata,
    Column("tenant", _name, nullable=False),
    Column("model", _name, nullable=False),
    Column("facet", Text, nullable=True),
    Column("status", Text, nullable=False),
    Column("count", BigInteger, nullable=False),
    Column("spent_us", BigInteger, nullable=False),
    Column("durations", Text, nullable=True),
)
"""How many runs ended so, and for how long those that succeeded ran: a row for each batch of ends, with negative
numbers for runs that were removed. The sweeper adds them to ``run_totals``, so no two workers wait for one row.
``durations``: a character for each run that was not cancelled (see :mod:`semel.runs.store.durations`).
"""

run_totals = Table(
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
"""The sums of ``run_counts`` so far. ``facet`` is ``=`` and its value, or empty for none."""

run_hours = Table(
    "semel_run_hours",
    metadata,
    Column("tenant", _name, nullable=False),
    Column("model", _name, nullable=False),
    Column("hour_us", BigInteger, nullable=False),
    Column("status", Text, nullable=False),
    Column("bucket", Integer, nullable=False),
    Column("count", BigInteger, nullable=False),
    PrimaryKeyConstraint("tenant", "model", "hour_us", "status", "bucket", name="semel_run_hours_pkey"),
)
"""How many runs ended so in an hour, by how long they took: the sweeper adds up ``run_counts``. ``bucket``: see
:mod:`semel.runs.store.durations`; -1 if it is not known how long. Runs that are removed still count.
"""
Index("semel_run_hours_hour", run_hours.c.hour_us)

unsuccessful = Table(
    "semel_unsuccessful",
    metadata,
    Column("tenant", _name, nullable=False),
    Column("user_id", _name, nullable=False),
    Column("status", Text, nullable=False),
    Column("run_id", _id, nullable=False),
    PrimaryKeyConstraint("tenant", "user_id", "status", "run_id", name="semel_unsuccessful_pkey"),
)
"""The runs of each user that failed or were cancelled. The attempt that ends such a run writes its row (a trigger)."""

costs = Table(
    "semel_costs",
    metadata,
    Column("tenant", _name, nullable=False),
    Column("user_id", _name, nullable=False),
    Column("day_us", BigInteger, nullable=False),
    Column("cost", BigInteger, nullable=False),
    PrimaryKeyConstraint("tenant", "user_id", "day_us", name="semel_costs_pkey"),
)
"""What a user's runs cost that have ended, for each day (UTC) on which they were submitted. They may be removed: cost
limits still count them.
"""

charges = Table(
    "semel_charges",
    metadata,
    Column("tenant", _name, nullable=False),
    Column("user_id", _name, nullable=False),
    Column("day_us", BigInteger, nullable=False),
    Column("cost", BigInteger, nullable=False),
)
"""As ``costs``, of runs that ended lately: a row for each batch of ends, user and day. The sweeper adds them to
``costs``, so no two workers wait for one row.
"""
Index("semel_charges_user", charges.c.tenant, charges.c.user_id)

views = MetaData()

runs = Table(
    "semel_run_states",
    views,
    Column("id", _id, primary_key=True),
    Column("tenant", _name),
    Column("user_id", _name),
    Column("model", _name),
    Column("queue", _name),
    Column("priority", Integer),
    Column("status", Text),
    Column("ready", Boolean),
    Column("step", Text),
    Column("note", Text),
    Column("version", Integer),
    Column("changed_us", BigInteger),
    Column("fence", BigInteger),
    Column("attempts", Integer),
    Column("errors", Integer),
    Column("losts", Integer),
    Column("max_attempts", Integer),
    Column("max_lost", Integer),
    Column("parameters", Text),
    Column("payload_hash", Digest),
    Column("idempotency_key", Text),
    Column("facet", Text),
    Column("retry_of", _id),
    Column("cost", BigInteger),
    Column("asked_cost", BigInteger),
    Column("created_us", BigInteger),
    Column("due_us", BigInteger),
    Column("started_us", BigInteger),
    Column("finished_us", BigInteger),
    Column("worker", Text),
    Column("lease_us", BigInteger),
    Column("lease_until_us", BigInteger),
    Column("heartbeat_us", BigInteger),
    Column("cancel_us", BigInteger),
    Column("progress", Float),
    Column("progress_note", Text),
    Column("progress_us", BigInteger),
    Column("stall_us", BigInteger),
    Column("last_error", Text),
    Column("traceback", Text),
    Column("result", Text),
    Column("result_ref", Text),
    Column("result_digest", Digest),
    Column("result_size", BigInteger),
    Column("artifacts", Text),
    Column("data_ref", Text),
    Column("trace", Text),
    Column("result_exact", Text),
    Column("warnings", Text),
    Column("active_id", _id),
    Column("ended", Text),
    Column("ended_id", _id),
    Column("ended_tenant", _name),
    Column("seed", BigInteger),
    Column("rerun_of", _id),
)
"""A view of every run as it is now: its active row, or else its last attempt, with what was submitted. A condition on
``active_id`` or ``ended`` (its status, once it has ended) lets the database begin with the table where such runs are.
"""

steps = Table(
    "semel_run_steps",
    views,
    Column("run_id", _id),
    Column("version", Integer),
    Column("at_us", BigInteger),
    Column("step", Text),
    Column("status", Text),
    Column("fence", BigInteger),
    Column("worker", Text),
    Column("note", Text),
)
"""A view of every step of every run, which tells its history."""

removals = Table(
    "semel_removals",
    metadata,
    Column("prefix", _name, primary_key=True),
    Column("data_ref", Text, nullable=True),
    Column("has_files", Boolean, nullable=False),
)
"""Files of purged runs: a row is added when the run is removed, and deleted when its files are."""

outbox = Table(
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
"""Steps that somebody wants to hear of and has not heard of yet: the app's hook, or a webhook."""
_unpublished = "unpublished"
Index("semel_outbox_unpublished", outbox.c.at_us, postgresql_where=text(_unpublished), sqlite_where=text(_unpublished))
_unsent = "unsent"
Index("semel_outbox_unsent", outbox.c.at_us, postgresql_where=text(_unsent), sqlite_where=text(_unsent))

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
    postgresql_partition_by="RANGE (run_id)",
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

manifests = Table(
    "semel_manifests",
    metadata,
    Column("digest", Digest, primary_key=True),
    Column("body", Text, nullable=False),
    Column("created_us", BigInteger, nullable=False),
)
"""What many attempts share, an environment or the code of a worker: canonical JSON under its SHA-256."""

worker_manifests = Table(
    "semel_worker_manifests",
    metadata,
    Column("worker", Text, nullable=False),
    Column("since_us", BigInteger, nullable=False),
    Column("gone_us", BigInteger, nullable=True),
    Column("host", Text, nullable=False),
    Column("environment", Digest, nullable=False),
    Column("code", Digest, nullable=False),
    PrimaryKeyConstraint("worker", "since_us", name="semel_worker_manifests_pkey"),
)
"""What a worker ran on and with, since when: an attempt's is that of its worker, the latest when the attempt began.
``gone_us``: when the sweeper found that the worker was gone; NULL until then.
"""
Index("semel_worker_manifests_environment", worker_manifests.c.environment)
Index("semel_worker_manifests_code", worker_manifests.c.code)
Index("semel_worker_manifests_gone", worker_manifests.c.gone_us)

leaders = Table(
    "semel_leaders",
    metadata,
    Column("role", Text, primary_key=True),
    Column("holder", Text, nullable=False),
    Column("until_us", BigInteger, nullable=False),
    Column("term_us", BigInteger, nullable=False),
)

pauses = Table(
    "semel_pauses",
    metadata,
    Column("kind", Text, nullable=False),
    Column("name", _name, nullable=False),
    Column("since_us", BigInteger, nullable=False),
    Column("by_user", Text, nullable=False),
    Column("why", Text, nullable=False),
    PrimaryKeyConstraint("kind", "name", name="semel_pauses_pkey"),
)
"""Queues and models (``kind``) whose runs are not leased."""

run_actions = Table(
    "semel_run_actions",
    metadata,
    Column("id", _id, primary_key=True),
    Column("tenant", _name, nullable=False),
    Column("user_id", _name, nullable=False),
    Column("action", Text, nullable=False),
    Column("filter", Text, nullable=False),
    Column("priority", Integer, nullable=True),
    Column("why", Text, nullable=False),
    Column("created_us", BigInteger, nullable=False),
    Column("finished_us", BigInteger, nullable=True),
    Column("lease_until_us", BigInteger, nullable=False),
    Column("holder", Text, nullable=True),
    Column("reached", _id, nullable=True),
    Column("matched", BigInteger, nullable=False),
    Column("done", BigInteger, nullable=False),
    Column("failed", BigInteger, nullable=False),
    Column("skipped", BigInteger, nullable=False),
    Column("error", Text, nullable=True),
)
"""What somebody does to all runs that match a filter, from the newest down: those down to ``reached`` are done. It is
carried out by its ``holder`` until ``lease_until_us``, and when that has passed by anybody.
"""
Index("semel_run_actions_tenant", run_actions.c.tenant, run_actions.c.created_us)
_unfinished = "finished_us IS NULL"
Index(
    "semel_run_actions_unfinished",
    run_actions.c.lease_until_us,
    postgresql_where=text(_unfinished),
    sqlite_where=text(_unfinished),
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

audit = Table(
    "semel_audit",
    metadata,
    Column("tenant", _name, nullable=False),
    Column("seq", BigInteger, nullable=False),
    Column("at_us", BigInteger, nullable=False),
    Column("user_id", _name, nullable=False),
    Column("role", Text, nullable=False),
    Column("user_tenant", _name, nullable=False),
    Column("token", Text, nullable=False),
    Column("address", Text, nullable=False),
    Column("entrance", Text, nullable=False),
    Column("action", _name, nullable=False),
    Column("target", _name, nullable=False),
    Column("before", Text, nullable=True),
    Column("after", Text, nullable=True),
    Column("previous", Text, nullable=False),
    Column("digest", Text, nullable=False),
    PrimaryKeyConstraint("tenant", "seq", name="semel_audit_pkey"),
)
"""What people did, a chain for each tenant that it was done to: ``digest`` is that of the row, and ``previous`` that of
the tenant's row before. ``user_tenant`` is the tenant of who did it.
"""
Index("semel_audit_time", audit.c.at_us)

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
    Column("data_us", BigInteger, nullable=True),
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
