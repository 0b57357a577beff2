"""Keys and their fences."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_name = sa.Text(collation="C").with_variant(sa.Text(), "sqlite")


def upgrade() -> None:
    """Create the table of keys, its two indexes, and the sequence or counter of fences."""
    op.create_table(
        "semel_keys",
        sa.Column("scope", _name, nullable=False),
        sa.Column("key", _name, nullable=False),
        sa.Column("fingerprint", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("fence", sa.BigInteger, nullable=False),
        sa.Column("attempt", sa.Text, nullable=False),
        sa.Column("unknown", sa.Boolean, nullable=False),
        sa.Column("awaited", sa.Boolean, nullable=False),
        sa.Column("created_us", sa.BigInteger, nullable=False),
        sa.Column("lease_us", sa.BigInteger, nullable=False),
        sa.Column("lease_until_us", sa.BigInteger, nullable=False),
        sa.Column("expires_us", sa.BigInteger, nullable=False),
        sa.Column("completed_us", sa.BigInteger, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("value", sa.LargeBinary, nullable=True),
        sa.Column("value_until_us", sa.BigInteger, nullable=True),
        sa.PrimaryKeyConstraint("scope", "key", name="semel_keys_pkey"),
        postgresql_with={"fillfactor": "80"},
    )
    op.create_index("semel_keys_expires", "semel_keys", ["expires_us"])
    faded = sa.text("value_until_us IS NOT NULL")
    op.create_index(
        "semel_keys_value_until", "semel_keys", ["value_until_us"], postgresql_where=faded, sqlite_where=faded
    )
    if op.get_bind().dialect.name == "postgresql":
        op.execute(sa.schema.CreateSequence(sa.Sequence("semel_fence")))
    else:
        op.create_table("semel_fence_counter", sa.Column("last", sa.Integer, nullable=False))
        op.execute("INSERT INTO semel_fence_counter (last) VALUES (0)")


def downgrade() -> None:
    """Drop them."""
    if op.get_bind().dialect.name == "postgresql":
        op.execute(sa.schema.DropSequence(sa.Sequence("semel_fence")))
    else:
        op.drop_table("semel_fence_counter")
    op.drop_table("semel_keys")
