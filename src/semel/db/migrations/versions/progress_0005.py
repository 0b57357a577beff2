"""When a run last made progress, and how long it may make none; a reservation's limit; where a result is stored."""

from alembic import op
from sqlalchemy import BigInteger, Column, Integer, inspect

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns, and show in the view where a small result is stored, too."""
    op.add_column("semel_runs", Column("progress_us", BigInteger, nullable=True))
    op.add_column("semel_runs", Column("stall_us", BigInteger, nullable=True))
    op.add_column("semel_reservations", Column("max_concurrent", Integer, nullable=True))
    _show_runs("coalesce(result_ref, 'semel:' || CAST(id AS text))")


def downgrade() -> None:
    """Remove the columns, and restore the view."""
    _show_runs("result_ref")
    op.drop_column("semel_reservations", "max_concurrent")
    op.drop_column("semel_runs", "stall_us")
    op.drop_column("semel_runs", "progress_us")


def _show_runs(result_ref: str) -> None:
    """Replace semel's view ``model_runs``; a user's own view of that name stays."""
    found = inspect(op.get_bind())
    if "model_runs" not in found.get_view_names() or "semel_" not in (found.get_view_definition("model_runs") or ""):
        return
    if op.get_bind().dialect.name == "postgresql":
        time, json = "TIMESTAMPTZ 'epoch' + {} * INTERVAL '1 microsecond'", "CAST({} AS jsonb)"
    else:
        time, json = "strftime('%Y-%m-%d %H:%M:%f', {} / 1000000.0, 'unixepoch')", "{}"
        op.execute("DROP VIEW model_runs")
    how = "CREATE OR REPLACE" if op.get_bind().dialect.name == "postgresql" else "CREATE"
    op.execute(f"""
{how} VIEW model_runs AS
SELECT id, model, status, {json.format("parameters")} AS parameters, payload_hash,
       {time.format("created_us")} AS created_at, {time.format("started_us")} AS started_at,
       {time.format("finished_us")} AS finished_at, attempts AS attempt_count, last_error,
       CASE WHEN status = 'SUCCEEDED' THEN {result_ref} END AS result_ref,
       CASE WHEN status = 'RUNNING' THEN worker END AS lease_owner,
       {time.format("lease_until_us")} AS lease_expires_at, {time.format("heartbeat_us")} AS heartbeat_at
FROM semel_runs
""")
