"""Paused queues and models. The release before goes on with this table, and does not know it: its workers lease on."""

from __future__ import annotations

from alembic import op
from sqlalchemy import BigInteger, Column, MetaData, PrimaryKeyConstraint, Table, Text

revision = "0013"
down_revision = "0011"
branch_labels = None
depends_on = None

metadata = MetaData()
_name = Text(collation="C").with_variant(Text(), "sqlite")

Table(
    "semel_pauses",
    metadata,
    Column("kind", Text, nullable=False),
    Column("name", _name, nullable=False),
    Column("since_us", BigInteger, nullable=False),
    Column("by_user", Text, nullable=False),
    Column("why", Text, nullable=False),
    PrimaryKeyConstraint("kind", "name", name="semel_pauses_pkey"),
)


def upgrade() -> None:
    """Make the table."""
    metadata.create_all(op.get_bind())


def downgrade() -> None:
    """Drop the table: everything goes on."""
    metadata.drop_all(op.get_bind())
