"""On PostgreSQL, what most runs have in common is NULL, and takes no room; the view shows it as before.

Rows that were written before have the values themselves. Programs of the release before read these columns by the view
only, and go on writing the values. SQLite stores small numbers in no room, and stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

from alembic import op
from sqlalchemy import text

from semel.db.migrations.versions.ledger_0008 import ENDED, SUBMITTED, states

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

_SUBMITTED = {"priority": "0", "lease_us": "60000000"}
_ENDED = {"attempts": "1", "errors": "0", "losts": "0", "due_us": "r.created_us"}
"""What NULL stands for."""
_TABLES = text("""
SELECT CAST(CAST(:parent AS regclass) AS text) UNION ALL
SELECT CAST(CAST(inhrelid AS regclass) AS text) FROM pg_inherits WHERE inhparent = CAST(:parent AS regclass)""")


def upgrade() -> None:
    """Let these columns be NULL in every partition, and show what that stands for. No row is read or written."""
    if op.get_bind().dialect.name != "postgresql":
        return
    _let_be_null("semel_runs", list(_SUBMITTED))
    _let_be_null("semel_attempts", list(_ENDED))
    op.execute(f"CREATE OR REPLACE VIEW semel_run_states AS {sparse_states()}")


def sparse_states(added: Sequence[str] = ()) -> str:
    """PostgreSQL's query of the view of every run, with what NULL stands for, and with these columns last."""
    shown = {f"r.{name}": f"coalesce(r.{name}, {value}) AS {name}" for name, value in _SUBMITTED.items()}
    submitted = [shown.get(column, column) for column in SUBMITTED]
    ended = ENDED | {name: f"coalesce(e.{name}, {value})" for name, value in _ENDED.items()}
    return states(submitted, ended, postgres=True, added=added)


def downgrade() -> None:
    """Nothing: the view shows rows of both kinds, and the release before writes the values themselves."""


def _let_be_null(parent: str, columns: Sequence[str]) -> None:
    """Each table by itself: a partition that was attached has a rule of its own."""
    changes = ", ".join(f"ALTER COLUMN {name} DROP NOT NULL" for name in columns)
    for table in op.get_bind().scalars(_TABLES, {"parent": parent}).all():
        op.execute(f"ALTER TABLE {table} {changes}")
