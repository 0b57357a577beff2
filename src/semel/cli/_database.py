"""The database, for commands that work without a server."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from semel.cli._output import note
from semel.errors import InvalidRequest, StoreBroken

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from semel.db.dialect import StatementContext
    from semel.runs.store import RunStore

Answer = TypeVar("Answer")


@contextmanager
def opened(url: str, *, create: bool = False) -> Iterator[RunStore]:
    """Open the run store of a database. A missing file is created only with ``create``."""
    from semel._concurrency.sync import run_sync
    from semel.runs.store import RunStore

    if not create:
        require(url)
    elif (path := file_of(url)) is not None and not path.exists():
        note(f"creating a new database: {path} (use another with --db or SEMEL_DB)")
    store = RunStore(url, awaited=False)
    try:
        yield store
    finally:
        run_sync(store.close())


def ask(url: str, call: Callable[[RunStore], Coroutine[Any, Any, Answer]], *, create: bool = False) -> Answer:
    """Call a method of the run store of a database."""
    from semel._concurrency.sync import run_sync

    with opened(url, create=create) as store:
        return run_sync(call(store))


def acting(store: RunStore) -> StatementContext:
    """The context of a change: the audit log has it as done by the user of this command."""
    from semel.types import actor_here

    return store.acting(actor_here("cli"))


def require(url: str) -> None:
    """Raise StoreBroken if the file does not exist: reading must not create it."""
    path = file_of(url)
    if path is not None and not path.exists():
        raise StoreBroken(
            f"there is no database at {path}; set --db or SEMEL_DB, or create it with: semel migrate {url}"
        )


def file_of(url: str) -> Path | None:
    """The file of a SQLite database; None for others."""
    from semel.db.database import parse

    parts = parse(url)
    if parts.get_backend_name() != "sqlite" or not parts.database or ":memory:" in parts.database:
        return None
    return Path(parts.database)


def engine_of(url: str) -> Engine:
    """An engine on the database, for transactions."""
    from semel.db.database import parse, sqlite_engine
    from semel.db.postgres import postgres_engine

    parts = parse(url.replace("postgres://", "postgresql://", 1))
    match parts.get_backend_name():
        case "sqlite":
            return sqlite_engine(parts)
        case "postgresql":
            return postgres_engine(parts).execution_options(isolation_level="READ COMMITTED")
        case other:
            raise InvalidRequest(f"{other!r} has no tables to migrate; give a postgresql:// or sqlite:/// URL")


def without_password(url: str) -> str:
    """The URL with its password hidden."""
    from semel.db.database import parse

    return parse(url).render_as_string(hide_password=True)
