"""Which runs of each user failed or were cancelled, so that a list of them reads no others.

A trigger writes them, so the release before goes on with these tables. A run that succeeds writes nothing.
"""

from __future__ import annotations

from alembic import op
from sqlalchemy import Column, MetaData, PrimaryKeyConstraint, Table, Text, Uuid, text

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None

metadata = MetaData()
_name = Text(collation="C").with_variant(Text(), "sqlite")

Table(
    "semel_unsuccessful",
    metadata,
    Column("tenant", _name, nullable=False),
    Column("user_id", _name, nullable=False),
    Column("status", Text, nullable=False),
    Column("run_id", Uuid(as_uuid=False).with_variant(Text(), "sqlite"), nullable=False),
    PrimaryKeyConstraint("tenant", "user_id", "status", "run_id", name="semel_unsuccessful_pkey"),
)

_NOTED = "INSERT INTO semel_unsuccessful (tenant, user_id, status, run_id)"
_UNSUCCESSFUL = "status IN ('FAILED', 'CANCELLED')"
_OF_ATTEMPT = f"""{_NOTED}
SELECT NEW.tenant, r.user_id, NEW.status, NEW.run_id FROM semel_runs AS r
WHERE r.id = NEW.run_id AND r.user_id <> '' ON CONFLICT DO NOTHING"""
_TRIGGER = "CREATE TRIGGER semel_attempts_unsuccessful AFTER INSERT ON semel_attempts"
_OF_ALL = f"""{_NOTED}
SELECT e.tenant, r.user_id, e.status, r.id FROM semel_attempts AS e JOIN semel_runs AS r ON r.id = e.run_id
WHERE e.{_UNSUCCESSFUL} AND r.user_id <> '' ON CONFLICT DO NOTHING"""


def upgrade() -> None:
    """Make the table, and read every unsuccessful run once. Ends of attempts wait for that: seconds for 1,000,000."""
    conn = op.get_bind()
    metadata.create_all(conn)
    if conn.dialect.name == "postgresql":
        place = conn.scalar(text("SELECT quote_ident(current_schema())"))
        op.execute(f"""
CREATE FUNCTION semel_note_unsuccessful() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = {place}, pg_temp AS $$
BEGIN
  {_OF_ATTEMPT};
  RETURN NULL;
END $$""")
        op.execute(f"{_TRIGGER} FOR EACH ROW WHEN (NEW.{_UNSUCCESSFUL}) EXECUTE FUNCTION semel_note_unsuccessful()")
    else:
        op.execute(f"{_TRIGGER} FOR EACH ROW WHEN NEW.{_UNSUCCESSFUL} BEGIN {_OF_ATTEMPT}; END")
    op.execute(_OF_ALL)


def downgrade() -> None:
    """Drop it: the runs are in the ledger."""
    postgres = op.get_bind().dialect.name == "postgresql"
    op.execute(f"DROP TRIGGER semel_attempts_unsuccessful{' ON semel_attempts' if postgres else ''}")
    if postgres:
        op.execute("DROP FUNCTION semel_note_unsuccessful")
    metadata.drop_all(op.get_bind())
