"""An index of keys by their run, whether or not the key created it: a purge keeps runs that live keys refer to."""

from alembic import op
from sqlalchemy import text

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create an index of all keys that clients sent, and drop the narrower one."""
    _index("semel_run_keys_job", "kind = 'key'")
    op.drop_index("semel_run_keys_stored", "semel_run_keys")


def downgrade() -> None:
    """Restore the former index."""
    _index("semel_run_keys_stored", "payload_hash = ''")
    op.drop_index("semel_run_keys_job", "semel_run_keys")


def _index(name: str, where: str) -> None:
    op.create_index(name, "semel_run_keys", ["job_id"], postgresql_where=text(where), sqlite_where=text(where))
