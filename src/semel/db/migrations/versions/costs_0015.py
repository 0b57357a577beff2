"""What ended runs cost is added up for each user and day, so that a quota need not read a year of runs.

``semel_costs`` had the runs that were removed, and has all that ended from now on. Nothing that ends runs without a row
of ``semel_charges`` may go on.
"""

from __future__ import annotations

from alembic import op
from sqlalchemy import BigInteger, Column, Index, MetaData, Table, Text

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

metadata = MetaData()
_name = Text(collation="C").with_variant(Text(), "sqlite")

_charges = Table(
    "semel_charges",
    metadata,
    Column("tenant", _name, nullable=False),
    Column("user_id", _name, nullable=False),
    Column("day_us", BigInteger, nullable=False),
    Column("cost", BigInteger, nullable=False),
)
Index("semel_charges_user", _charges.c.tenant, _charges.c.user_id)

_CHARGE_ACTIVE = """
UPDATE semel_active SET cost = coalesce(semel_active.cost, r.asked_cost), charged_us = r.created_us FROM semel_runs AS r
WHERE r.id = semel_active.id AND coalesce(semel_active.cost, r.asked_cost, 0) <> 0"""
_ADD = """
INSERT INTO semel_costs AS k (tenant, user_id, day_us, cost)
SELECT tenant, user_id, day_us, {sign} CAST({cost} AS bigint) FROM ({source}) AS ended WHERE true GROUP BY 1, 2, 3
ON CONFLICT (tenant, user_id, day_us) DO UPDATE
SET cost = CAST({sum} AS bigint)"""
_ENDED = """
SELECT r.tenant, r.user_id, r.created_us - r.created_us % 86400000000 AS day_us,
  coalesce(e.cost, r.asked_cost, 0) AS cost
FROM semel_runs AS r JOIN semel_attempts AS e ON e.run_id = r.id AND e.status <> 'PENDING'
WHERE r.user_id <> '' AND coalesce(e.cost, r.asked_cost, 0) <> 0 AND r.id IN (
  SELECT id FROM semel_runs WHERE coalesce(asked_cost, 0) <> 0
  UNION SELECT run_id FROM semel_attempts WHERE cost <> 0)"""
"""What every run cost that has ended. Few have a cost: they are found first, and only they are joined."""


def upgrade() -> None:
    """Add up what every run cost that has ended. Every run is read once, and runs wait for that to begin or to end."""
    op.add_column("semel_active", Column("charged_us", BigInteger, nullable=True))
    metadata.create_all(op.get_bind())
    op.execute(_CHARGE_ACTIVE)
    _add(_ENDED)


def downgrade() -> None:
    """Leave the costs of runs that were removed; what the others cost is read from them again."""
    _add("SELECT * FROM semel_charges")
    _add(_ENDED, "-")
    op.execute("DELETE FROM semel_costs WHERE cost <= 0")
    metadata.drop_all(op.get_bind())
    op.drop_column("semel_active", "charged_us")


def _add(source: str, sign: str = "") -> None:
    cost, added = "total(cost)", "k.cost + excluded.cost"
    if op.get_bind().dialect.name == "postgresql":
        cost, added = (
            f"least({each}, 9223372036854775807)" for each in ("sum(cost)", "CAST(k.cost AS numeric) + excluded.cost")
        )
    op.execute(_ADD.format(source=source, sign=sign, cost=cost, sum=added))
