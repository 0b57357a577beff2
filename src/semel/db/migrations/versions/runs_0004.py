"""For purges and warnings: files to be removed, keys by their job, results with NaN or infinity."""

from alembic import op
from sqlalchemy import BigInteger, Boolean, Column, Text, text

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_name = Text(collation="C").with_variant(Text(), "sqlite")


def upgrade() -> None:
    """Add the table, the columns and the indexes."""
    op.create_table(
        "semel_removals",
        Column("prefix", _name, primary_key=True),
        Column("data_ref", Text, nullable=True),
        Column("has_files", Boolean, nullable=False),
    )
    op.add_column("semel_runs", Column("result_exact", Text, nullable=True))
    op.add_column("semel_runs", Column("warnings", Text, nullable=True))
    op.add_column("semel_deliveries", Column("wait_us", BigInteger, nullable=True))
    _index("semel_runs_data", "semel_runs", "data_ref", "data_ref IS NOT NULL")
    _index("semel_runs_later_since", "semel_runs", "changed_us", "status = 'PENDING' AND NOT ready")
    _index("semel_run_keys_stored", "semel_run_keys", "job_id", "payload_hash = ''")


def _index(name: str, table: str, column: str, where: str) -> None:
    op.create_index(name, table, [column], postgresql_where=text(where), sqlite_where=text(where))


def downgrade() -> None:
    """Drop them all. Files that were still to be removed stay."""
    for name, table in (
        ("semel_runs_data", "semel_runs"),
        ("semel_runs_later_since", "semel_runs"),
        ("semel_run_keys_stored", "semel_run_keys"),
    ):
        op.drop_index(name, table)
    op.drop_column("semel_deliveries", "wait_us")
    op.drop_column("semel_runs", "warnings")
    op.drop_column("semel_runs", "result_exact")
    op.drop_table("semel_removals")
