"""What an attempt ran on and with: manifests, written once by each worker; seeds, and runs that run another again.

The release before goes on with these tables: it writes NULL into the new columns, and reads the views as before.
"""

from __future__ import annotations

from alembic import op
from sqlalchemy import (
    BigInteger,
    Column,
    Index,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    Uuid,
    inspect,
)

from semel.db.migrations.versions.ledger_0008 import ENDED, SUBMITTED, states
from semel.db.migrations.versions.sparse_0009 import sparse_states

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

metadata = MetaData()
_id = Uuid(as_uuid=False).with_variant(Text(), "sqlite")
_digest = LargeBinary().with_variant(Text(), "sqlite")

_manifests = Table(
    "semel_manifests",
    metadata,
    Column("digest", _digest, primary_key=True),
    Column("body", Text, nullable=False),
    Column("created_us", BigInteger, nullable=False),
)
_worker_manifests = Table(
    "semel_worker_manifests",
    metadata,
    Column("worker", Text, nullable=False),
    Column("since_us", BigInteger, nullable=False),
    Column("gone_us", BigInteger, nullable=True),
    Column("host", Text, nullable=False),
    Column("environment", _digest, nullable=False),
    Column("code", _digest, nullable=False),
    PrimaryKeyConstraint("worker", "since_us", name="semel_worker_manifests_pkey"),
)
Index("semel_worker_manifests_environment", _worker_manifests.c.environment)
Index("semel_worker_manifests_code", _worker_manifests.c.code)
Index("semel_worker_manifests_gone", _worker_manifests.c.gone_us)

_ADDED = ("r.seed", "r.rerun_of")


def upgrade() -> None:
    """Make the tables, add the columns, and show these in the view, after its others."""
    metadata.create_all(op.get_bind())
    op.add_column("semel_runs", Column("seed", BigInteger, nullable=True))
    op.add_column("semel_runs", Column("rerun_of", _id, nullable=True))
    _view(_ADDED)


def downgrade() -> None:
    """Drop what was added. The documents' view, which reads the view of runs, is made again as it was."""
    found = inspect(op.get_bind())
    shown = found.get_view_definition("model_runs") if "model_runs" in found.get_view_names() else None
    if shown is not None:
        op.execute("DROP VIEW model_runs")
    op.execute("DROP VIEW semel_run_states")
    for name in ("seed", "rerun_of"):
        op.drop_column("semel_runs", name)
    _view(())
    if shown is not None:
        op.execute(shown if shown.upper().startswith("CREATE") else f"CREATE VIEW model_runs AS {shown}")
    metadata.drop_all(op.get_bind())


def _view(added: tuple[str, ...]) -> None:
    """Make the view of runs; PostgreSQL replaces it, so that what reads it stays, and its privileges."""
    if op.get_bind().dialect.name == "postgresql":
        op.execute(f"CREATE OR REPLACE VIEW semel_run_states AS {sparse_states(added)}")
        return
    op.execute("DROP VIEW IF EXISTS semel_run_states")
    op.execute(f"CREATE VIEW semel_run_states AS {states(SUBMITTED, ENDED, postgres=False, added=added)}")
