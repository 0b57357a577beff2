"""``semel migrate``: semel's tables in a database."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from semel.cli import options, printing
from semel.errors import InvalidRequest, StoreBroken, StoreUnavailable

if TYPE_CHECKING:
    from sqlalchemy import Engine


def add_to(commands: options.Commands) -> None:
    """Add the command."""
    parser = options.command(
        commands,
        "migrate",
        help="create or update semel's tables in a database",
        description="Create or update semel's tables. Running it again, or twice at once, does no harm.",
        example="semel migrate postgresql://user@host/name\nsemel migrate sqlite:///semel.db --json",
    )
    parser.add_argument(
        "url", metavar="URL", nargs="?", help="postgresql://user@host/name or sqlite:///file.db (default: see --db)"
    )
    options.db_option(parser)
    parser.set_defaults(do=_migrate)


def _migrate(chosen: argparse.Namespace) -> int:
    before, after = migrate(options.database(chosen) if chosen.url is None else chosen.url)
    if chosen.json:
        printing.print_json({"before": before, "after": after})
    elif before == after:
        print(f"already at {after}")
    else:
        print(f"migrated from {before or 'nothing'} to {after}")
    return 0


def migrate(address: str) -> tuple[str | None, str | None]:
    """Bring the database to this release; the version before and after."""
    engine = engine_of(address)
    try:
        return _upgrade(engine)
    finally:
        engine.dispose()


def engine_of(address: str) -> Engine:
    """An engine on the database, for transactions."""
    from semel.sql import engines
    from semel.sql.postgres import postgres_engine

    url = engines.parse(address.replace("postgres://", "postgresql://", 1))
    match url.get_backend_name():
        case "sqlite":
            return engines.sqlite_engine(url)
        case "postgresql":
            return postgres_engine(url).execution_options(isolation_level="READ COMMITTED")
        case other:
            raise InvalidRequest(f"{other!r} has no tables to migrate; give a postgresql:// or sqlite:/// URL")


def _upgrade(engine: Engine, patience: float = 30.0) -> tuple[str | None, str | None]:
    """Migrate, and wait for others who are at it."""
    from semel.sql import migrate
    from semel.sql.failures import translated

    started = time.monotonic()
    while True:
        try:
            with translated(), engine.begin() as conn:
                return migrate.upgrade(conn)
        except StoreBroken:
            raise
        except StoreUnavailable:
            if engine.dialect.name != "sqlite" or time.monotonic() > started + patience:
                raise
