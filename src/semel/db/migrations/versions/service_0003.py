"""Tables of the service: tokens, named configs, jobs of the jobs API, webhook subscriptions and deliveries."""

from alembic import op
from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Index,
    Integer,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    Uuid,
    text,
)

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

metadata = MetaData()

_name = Text(collation="C").with_variant(Text(), "sqlite")
_id = Uuid(as_uuid=False).with_variant(Text(), "sqlite")

Table(
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

Table(
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

Table(
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


def upgrade() -> None:
    """Create the tables, and the column that marks events for subscriptions."""
    metadata.create_all(op.get_bind())
    unsent = "unsent"
    op.add_column("semel_run_events", Column(unsent, Boolean, nullable=False, server_default=text("false")))
    op.create_index(
        "semel_run_events_unsent",
        "semel_run_events",
        ["at_us"],
        postgresql_where=text(unsent),
        sqlite_where=text(unsent),
    )


def downgrade() -> None:
    """Drop them."""
    op.drop_index("semel_run_events_unsent", "semel_run_events")
    op.drop_column("semel_run_events", "unsent")
    metadata.drop_all(op.get_bind())
