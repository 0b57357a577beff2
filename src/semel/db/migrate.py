"""Migrates a database to the schema of this release, or checks that it is migrated."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from sqlalchemy import Connection, text

from semel._concurrency.fork import survive_fork
from semel.db.schema import REVISIONS, VERSION_TABLE
from semel.errors import NotMigrated

_LOCK = 0x53454D454C  # "SEMEL": PostgreSQL's advisory lock, so that two migrations wait for each other


_IS_TABLE = {  # every process asks when it starts: reflection takes ten times as long
    "sqlite": "SELECT count(*) FROM sqlite_master WHERE name = :name",
    "postgresql": "SELECT to_regclass(:name) IS NOT NULL",
}


def upgrade(conn: Connection) -> tuple[str | None, str | None]:
    """Run the missing migrations in the connection's transaction, and return the version before and after.

    Concurrent migrations of a database wait for each other. A database of a newer release is not changed.
    """
    from alembic import command
    from alembic.config import Config

    if conn.dialect.name == "postgresql":
        conn.execute(text("SET LOCAL lock_timeout = '30s'"))
        conn.execute(text("SET LOCAL statement_timeout = 0"))  # a large table may take long
        conn.execute(text("SET LOCAL idle_in_transaction_session_timeout = 0"))
        conn.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
    before = current(conn)
    if behind(conn):
        config = Config()
        config.set_main_option("script_location", "semel.db:migrations")
        config.set_main_option("path_separator", "os")
        config.attributes["connection"] = conn
        with _alembic.lock:
            command.upgrade(config, "head")
    return before, current(conn)


def bring_up(conn: Connection) -> None:
    """Run the missing migrations, if any. For an embedded file, which has no operator."""
    if not behind(conn):
        return
    if conn.scalar(text("SELECT count(*) FROM sqlite_master")):
        upgrade(conn)
    elif _new_file:
        for statement, rows in _new_file:
            conn.exec_driver_sql(statement, rows)
    else:
        upgrade(conn)
        _new_file[:] = _contents(conn)


_new_file: list[tuple[str, list[tuple[object, ...]] | None]] = []
"""The statements that make of an empty file what the migrations made of the first one, in a tenth of the time."""


def _contents(conn: Connection) -> Iterator[tuple[str, list[tuple[object, ...]] | None]]:
    """The statements that create every table, index, view, trigger and row of a file."""
    own = "sql IS NOT NULL AND name NOT LIKE 'sqlite_%'"  # SQLite makes its own tables and indexes itself
    made = conn.execute(text(f"SELECT type, name, sql FROM sqlite_master WHERE {own} ORDER BY rowid")).all()
    yield from ((statement, None) for _, _, statement in made)
    for name in [name for kind, name, _ in made if kind == "table"]:
        rows = [tuple(row) for row in conn.execute(text(f"SELECT * FROM {name}"))]
        if rows:
            yield f"INSERT INTO {name} VALUES ({', '.join('?' * len(rows[0]))})", rows


class _Alembic:
    """The lock for Alembic, which keeps its state in a module: one migration at a time per process."""

    def __init__(self) -> None:
        self.after_fork()
        survive_fork(self)

    def after_fork(self) -> None:
        """A thread that held the lock exists only in the parent."""
        self.lock = threading.Lock()


_alembic = _Alembic()


def current(conn: Connection) -> str | None:
    """The newest migration that was run on the database, or None."""
    if not conn.scalar(text(_IS_TABLE[conn.dialect.name]), {"name": VERSION_TABLE}):
        return None
    version: str | None = conn.scalar(text(f"SELECT version_num FROM {VERSION_TABLE}"))
    return version


def behind(conn: Connection) -> bool:
    """Whether a migration is missing. A version that this release does not know is newer, which is fine."""
    version = current(conn)
    return version is None or version in REVISIONS[:-1]


def require(conn: Connection) -> None:
    """Raise :class:`NotMigrated` if a migration is missing."""
    if behind(conn):
        url = conn.engine.url.set(drivername=conn.dialect.name).render_as_string(hide_password=True)
        raise NotMigrated(
            f"the database lacks semel's tables of this release (it has {current(conn) or 'none'}, "
            f"needed is {REVISIONS[-1]}); run: semel migrate '{url}'"
        )
