"""Actions on all runs that match a filter, and priorities that can be changed while a run is pending.

The release before goes on with these tables: it shows the new priority, and knows no actions.
"""

from __future__ import annotations

from alembic import op
from sqlalchemy import BigInteger, Column, Index, Integer, MetaData, Table, Text, Uuid, text

from semel.db.migrations.versions.ledger_0008 import ENDED, SUBMITTED, guard_active, states
from semel.db.migrations.versions.sparse_0009 import sparse_states

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

metadata = MetaData()
_name = Text(collation="C").with_variant(Text(), "sqlite")
_id = Uuid(as_uuid=False).with_variant(Text(), "sqlite")

_actions = Table(
    "semel_run_actions",
    metadata,
    Column("id", _id, primary_key=True),
    Column("tenant", _name, nullable=False),
    Column("user_id", _name, nullable=False),
    Column("action", Text, nullable=False),
    Column("filter", Text, nullable=False),
    Column("priority", Integer, nullable=True),
    Column("why", Text, nullable=False),
    Column("created_us", BigInteger, nullable=False),
    Column("finished_us", BigInteger, nullable=True),
    Column("lease_until_us", BigInteger, nullable=False),
    Column("holder", Text, nullable=True),
    Column("reached", _id, nullable=True),
    Column("matched", BigInteger, nullable=False),
    Column("done", BigInteger, nullable=False),
    Column("failed", BigInteger, nullable=False),
    Column("skipped", BigInteger, nullable=False),
    Column("error", Text, nullable=True),
)
Index("semel_run_actions_tenant", _actions.c.tenant, _actions.c.created_us)
_unfinished = "finished_us IS NULL"
Index(
    "semel_run_actions_unfinished",
    _actions.c.lease_until_us,
    postgresql_where=text(_unfinished),
    sqlite_where=text(_unfinished),
)

_ADDED = ("r.seed", "r.rerun_of")
_PRIORITY = {"r.priority": "coalesce(a.priority, r.priority) AS priority"}
_SPARSE = ("coalesce(r.priority, 0) AS priority", "coalesce(a.priority, r.priority, 0) AS priority")


def upgrade() -> None:
    """Make the table; let the priority of an active run change, and show it."""
    metadata.create_all(op.get_bind())
    guard_active(fixed=("id", "tenant", "user_id", "model", "queue", "lease_us"))
    _view(changed=True)


def downgrade() -> None:
    """Drop the table, and with it what is left to do; the view shows the priority that was submitted."""
    _view(changed=False)
    guard_active()
    metadata.drop_all(op.get_bind())


def _view(*, changed: bool) -> None:
    """Make the view of runs. PostgreSQL replaces it, so that what reads it stays, and its privileges."""
    if op.get_bind().dialect.name == "postgresql":
        query = sparse_states(_ADDED)
        op.execute(f"CREATE OR REPLACE VIEW semel_run_states AS {query.replace(*_SPARSE) if changed else query}")
        return
    submitted = [_PRIORITY.get(each, each) for each in SUBMITTED] if changed else SUBMITTED
    op.execute("DROP VIEW semel_run_states")
    op.execute(f"CREATE VIEW semel_run_states AS {states(submitted, ENDED, postgres=False, added=_ADDED)}")
