"""Migrates a database to the schema of this release, or checks that it is migrated."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeAlias, TypeVar

from sqlalchemy import Connection, Engine, exc, text

from semel._concurrency.fork import survive_fork
from semel._concurrency.retry import Backoff
from semel.db.errors import is_lock_error
from semel.db.schema import REVISIONS, VERSION_TABLE
from semel.errors import NotMigrated

if TYPE_CHECKING:
    from alembic.config import Config

P = ParamSpec("P")
T = TypeVar("T")

_LOCK = 0x53454D454C  # "SEMEL": PostgreSQL's advisory lock, so that two migrations wait for each other


_IS_TABLE = {  # every process asks when it starts: reflection takes ten times as long
    "sqlite": "SELECT count(*) FROM sqlite_master WHERE name = :name",
    "postgresql": "SELECT to_regclass(:name) IS NOT NULL",
}


Progress: TypeAlias = Callable[[int, int], None]
"""Called with how many rows of how many are copied."""
Part: TypeAlias = Callable[[Connection, int], tuple[int, int] | None]
"""What a migration calls ``prepare``: does a part, of at most so many rows, and returns how many of how many are done.

It returns None when nothing is left that can be done while the release before still works.
"""

LARGEST, SMALLEST = 1000, 50
"""How many rows a part copies at most, and at least."""
AIM = {"sqlite": 0.2, "postgresql": 2.0}
"""Seconds that a part should take at most. SQLite has one writer, and the others wait for a second."""
PATIENCE = 30.0
"""Seconds to wait for a lock that others hold: programs that write, or a migration of the same file."""


def run(engine: Engine, progress: Progress) -> tuple[str | None, str | None]:
    """Run the missing migrations, and return the version before and after.

    Each migration is a transaction, so that the locks of one are not held while the next one works. Only an empty
    database, which nobody uses yet, gets all of them in one. What a migration can do while the release before still
    works, it does first, in short transactions. A process that dies in between loses nothing: the next one goes on.
    Concurrent ones share the work. A database of a newer release is not changed.
    """
    before = _alone(engine, current)
    if before not in REVISIONS[:-1]:
        return _alone(engine, upgrade)
    preparations = _preparations()
    for version, following in pairwise(REVISIONS[REVISIONS.index(before) :]):
        if version in preparations:
            _prepare(engine, version, preparations[version], progress)
        _alone(engine, upgrade, following)
    return before, _alone(engine, current)


def _preparations() -> dict[str, Part]:
    """What migrations do first, by the version that they start from."""
    from alembic.script import ScriptDirectory

    scripts = ScriptDirectory.from_config(_config()).walk_revisions()
    parts = {str(script.down_revision): getattr(script.module, "prepare", None) for script in scripts}
    return {version: part for version, part in parts.items() if part is not None}


def _prepare(engine: Engine, version: str, part: Part, progress: Progress) -> None:
    most, aim = LARGEST, AIM[engine.dialect.name]
    while True:
        done, took = _alone(engine, _next_part, version, part, most)
        if done is None:
            break
        progress(*done)
        most = max(SMALLEST, min(LARGEST, round(most * aim / max(took, aim / 2))))
        if engine.dialect.name == "sqlite":
            time.sleep(took)  # its writers poll for the lock: now it is their turn
    whole = _alone(engine, copied)
    if whole is not None:  # unless another process has finished
        progress(whole[0], whole[0])


def _next_part(conn: Connection, version: str, part: Part, most: int) -> tuple[tuple[int, int] | None, float]:
    """The next part, unless another process has finished the migration meanwhile; and how many seconds it took."""
    began = time.monotonic()
    done = part(conn, most) if current(conn) == version else None
    return done, time.monotonic() - began


def _alone(engine: Engine, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run work in a transaction, while no other process migrates. Without a lock that it needs, it tries again."""
    ends, backoff, tries = time.monotonic() + PATIENCE, Backoff(0.05, 1.0), 0
    while True:
        tries += 1
        try:
            with engine.begin() as conn:
                _lock(conn)
                return work(conn, *args, **kwargs)
        except exc.DBAPIError as error:
            if not is_lock_error(error) or time.monotonic() > ends:
                raise
        time.sleep(backoff.after(tries))


def _lock(conn: Connection) -> None:
    """Wait for other migrations; then wait for others' locks only briefly, since whoever comes later waits behind."""
    if conn.dialect.name == "postgresql":
        conn.execute(text("SET LOCAL lock_timeout = 0"))
        conn.execute(text("SET LOCAL statement_timeout = 0"))  # a large table may take long
        conn.execute(text("SET LOCAL idle_in_transaction_session_timeout = 0"))
        conn.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
        conn.execute(text("SET LOCAL lock_timeout = '2s'"))


def upgrade(conn: Connection, to: str = REVISIONS[-1]) -> tuple[str | None, str | None]:
    """Run the migrations up to this one that are missing, in the connection's transaction.

    Returns the version before and after. Concurrent migrations of a database wait for each other: what another process
    has run meanwhile is not run again. A database of a newer release is not changed.
    """
    from alembic import command

    _lock(conn)
    before = current(conn)
    if behind(conn) and (before is None or before < to):
        config = _config()
        config.attributes["connection"] = conn
        with _alembic.lock:
            command.upgrade(config, to)
    return before, current(conn)


def _config() -> Config:
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", "semel.db:migrations")
    config.set_main_option("path_separator", "os")
    return config


def copied(conn: Connection) -> tuple[int, int] | None:
    """How many of how many runs a migration that is under way has copied; None if none is under way."""
    if not conn.scalar(text(_IS_TABLE[conn.dialect.name]), {"name": "semel_migration"}):
        return None
    done, total = conn.execute(text("SELECT copied, total FROM semel_migration")).one()
    return done, max(done, total)


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
