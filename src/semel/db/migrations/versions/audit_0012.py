"""What people did: a log of each tenant, each row of which has the digest of the row before.

The release before goes on with these tables; what people do through it is not logged.
"""

from __future__ import annotations

from alembic import op
from sqlalchemy import BigInteger, Column, Index, MetaData, PrimaryKeyConstraint, Table, Text

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

metadata = MetaData()
_name = Text(collation="C").with_variant(Text(), "sqlite")

_audit = Table(
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
Index("semel_audit_time", _audit.c.at_us)


def upgrade() -> None:
    """Make the table."""
    metadata.create_all(op.get_bind())


def downgrade() -> None:
    """Drop the table, and with it the log."""
    metadata.drop_all(op.get_bind())
