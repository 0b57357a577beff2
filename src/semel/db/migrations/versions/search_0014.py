"""An index that finds the runs of a model, queue or tenant that has few of them, without an entry for each run.

On PostgreSQL it has a small summary of every sixteen pages of runs: the tenants, models and queues that are there.
Nothing is written to it when a run is submitted; autovacuum adds the summary once the pages are full. On SQLite, where
a search would read the whole file, every run has an entry. The release before goes on with these tables.
"""

from __future__ import annotations

from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

_POSTGRES = """
CREATE INDEX semel_runs_search ON semel_runs USING brin (id,
  tenant text_bloom_ops (n_distinct_per_range = 64), model text_bloom_ops (n_distinct_per_range = 64),
  queue text_bloom_ops (n_distinct_per_range = 16))
WITH (pages_per_range = 16, autosummarize = on)"""
_SQLITE = "CREATE INDEX semel_runs_search ON semel_runs (model, tenant, id)"


def upgrade() -> None:
    """Make the index. It reads every run once, and submissions wait for that: some seconds for 10,000,000 runs."""
    op.execute(_POSTGRES if op.get_bind().dialect.name == "postgresql" else _SQLITE)


def downgrade() -> None:
    """Drop it."""
    op.execute("DROP INDEX semel_runs_search")
