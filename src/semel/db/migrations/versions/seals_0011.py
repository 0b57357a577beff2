"""The digest of every attempt, and the seals that cover them: the history of runs cannot be rewritten unnoticed.

The chain begins when somebody begins it: attempts that ended before have no digest. The release before goes on with
these tables, and writes attempts without one.
"""

from __future__ import annotations

from alembic import op
from sqlalchemy import (
    BigInteger,
    Column,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    Uuid,
)

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

metadata = MetaData()
_id = Uuid(as_uuid=False).with_variant(Text(), "sqlite")
_digest = LargeBinary().with_variant(Text(), "sqlite")

Table("semel_sealing", metadata, Column("begun_us", BigInteger, primary_key=True, autoincrement=False))
Table("semel_unsealed", metadata, Column("entries", LargeBinary, nullable=False))
_seals = Table(
    "semel_seals",
    metadata,
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("at_us", BigInteger, nullable=False),
    Column("count", Integer, nullable=False),
    Column("first_id", _id, nullable=False),
    Column("last_id", _id, nullable=False),
    Column("root", _digest, nullable=False),
    Column("previous", _digest, nullable=True),
    Column("public_key", _digest, nullable=True),
    Column("digest", _digest, nullable=False),
    Column("signature", _digest, nullable=True),
)
Index("semel_seals_at", _seals.c.at_us)
Table(
    "semel_seal_leaves",
    metadata,
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("leaves", LargeBinary, nullable=False),
)
Table(
    "semel_purges",
    metadata,
    Column("id", _id, primary_key=True),
    Column("at_us", BigInteger, nullable=False),
    Column("rule", Text, nullable=False),
    Column("count", BigInteger, nullable=False),
    Column("first_id", _id, nullable=False),
    Column("last_id", _id, nullable=False),
    Column("ids", _digest, nullable=True),
)


def upgrade() -> None:
    """Make the tables and add the column. No row is read or written."""
    metadata.create_all(op.get_bind())
    op.add_column("semel_attempts", Column("digest", _digest, nullable=True))
    if op.get_bind().dialect.name == "postgresql":  # digests cannot be compressed
        op.execute("ALTER TABLE semel_unsealed ALTER COLUMN entries SET STORAGE EXTERNAL")
        op.execute("ALTER TABLE semel_seal_leaves ALTER COLUMN leaves SET STORAGE EXTERNAL")


def downgrade() -> None:
    """Drop what was added, and so the seals."""
    op.drop_column("semel_attempts", "digest")
    metadata.drop_all(op.get_bind())
