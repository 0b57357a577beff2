"""How many runs of each model ended in every hour, and how long they took.

The release before goes on with these tables: what it counts is in the totals, and not in the hours.
"""

from __future__ import annotations

from alembic import op
from sqlalchemy import BigInteger, Column, Index, Integer, MetaData, PrimaryKeyConstraint, Table, Text

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

metadata = MetaData()
_name = Text(collation="C").with_variant(Text(), "sqlite")

_hours = Table(
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
Index("semel_run_hours_hour", _hours.c.hour_us)


def upgrade() -> None:
    """Make the table, and the column from which it is filled. No row is rewritten."""
    op.add_column("semel_run_counts", Column("durations", Text, nullable=True))
    metadata.create_all(op.get_bind())


def downgrade() -> None:
    """Drop both: what runs took in the past is forgotten."""
    metadata.drop_all(op.get_bind())
    op.drop_column("semel_run_counts", "durations")
