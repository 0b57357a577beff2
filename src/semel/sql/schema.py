"""semel's tables, as the newest migration leaves them.

Times are microseconds since 1970 on the database's clock. ``semel_keys`` stays narrow and updates in place:
completing or renewing touches no indexed column.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Sequence,
    Table,
    Text,
)

REVISIONS = ("0001",)
"""Every migration, oldest first; the last one is what this release needs."""

VERSION_TABLE = "semel_version"

metadata = MetaData()

_name = Text(collation="C").with_variant(Text(), "sqlite")
"""Keys compare byte by byte: faster, and sorted the same way in Python and in the database."""

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
"""PostgreSQL: a sequence never gives a number twice, whatever is rolled back or purged."""

fence_counter = Table("semel_fence_counter", metadata, Column("last", Integer, nullable=False))
"""SQLite: one row, raised in the transaction that claims."""
