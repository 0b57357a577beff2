"""An index of the attempts that failed and were followed by another one.

The page of errors reads it. Attempts that succeed, or that are the last of their run, have no entry. The release before
goes on with these tables.
"""

from __future__ import annotations

from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the index. It reads every attempt once, and ends of attempts wait for that: some seconds for 10,000,000."""
    op.execute(
        "CREATE INDEX semel_attempts_retried ON semel_attempts (tenant, ended_us) "
        "WHERE status = 'PENDING' AND step IN ('retried', 'lost')"
    )


def downgrade() -> None:
    """Drop it."""
    op.execute("DROP INDEX semel_attempts_retried")
