"""On SQLite, expiry times that compare correctly with ``datetime('now')`` and with Python's ``now.isoformat()``.

Both are compared as text: ``datetime('now')`` has a space between date and time, ``now.isoformat()`` a ``T``, which is
greater. So future times are shown with the ``T`` and past ones with the space: both forms of the present lie between.
"""

from alembic import op
from sqlalchemy import inspect

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_PLAIN = "strftime('%Y-%m-%d %H:%M:%f', {} / 1000000.0, 'unixepoch')"
_NOW_US = "(julianday('now') - 2440587.5) * 86400000000.0"
_TELLING = (
    f"strftime(CASE WHEN expires_us > {_NOW_US} THEN '%Y-%m-%dT%H:%M:%f' ELSE '%Y-%m-%d %H:%M:%f' END, "
    "expires_us / 1000000.0, 'unixepoch')"
)
_USER = "CASE CAST(CAST(user_id AS INTEGER) AS TEXT) WHEN user_id THEN CAST(user_id AS INTEGER) ELSE user_id END"


def upgrade() -> None:
    """Create the views again, with the new form of expiry times."""
    _show(_TELLING)


def downgrade() -> None:
    """Create the views again as they were."""
    _show(_PLAIN.format("expires_us"))


def _show(expires: str) -> None:
    if op.get_bind().dialect.name == "postgresql":
        return  # its views have timestamps, not text
    created = _PLAIN.format("created_us")
    _view(
        "idempotency_keys",
        f"""
SELECT key AS idempotency_key, job_id, {_USER} AS user_id, {created} AS created_at, {expires} AS expires_at,
       key, payload_hash, job_id AS run_id
FROM semel_run_keys WHERE kind = 'key'
""",
    )
    _view(
        "job_reservations",
        f"""
SELECT id AS reservation_id, {_USER} AS user_id, {created} AS created_at, {expires} AS expires_at,
       CASE WHEN consumed THEN 1 ELSE 0 END AS consumed
FROM semel_reservations
""",
    )


def _view(name: str, query: str) -> None:
    """Replace semel's view of this name; a user's own view stays."""
    found = inspect(op.get_bind())
    if name in found.get_view_names() and "semel_" in (found.get_view_definition(name) or ""):
        op.execute(f"DROP VIEW {name}")
        op.execute(f"CREATE VIEW {name} AS {query}")
