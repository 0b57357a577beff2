"""Keys by the run that they name, whether or not the run was made with them: a purge leaves what a live key names."""

from alembic import op
from sqlalchemy import text

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """One index for every key that clients gave."""
    _index("semel_run_keys_job", "kind = 'key'")
    op.drop_index("semel_run_keys_stored", "semel_run_keys")


def downgrade() -> None:
    """As it was."""
    _index("semel_run_keys_stored", "payload_hash = ''")
    op.drop_index("semel_run_keys_job", "semel_run_keys")


def _index(name: str, where: str) -> None:
    op.create_index(name, "semel_run_keys", ["job_id"], postgresql_where=text(where), sqlite_where=text(where))
