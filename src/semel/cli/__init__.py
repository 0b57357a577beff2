"""The ``semel`` command."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version

from sqlalchemy import Engine

from semel.cli import worker
from semel.errors import InvalidRequest, SemelError, StoreBroken, StoreUnavailable
from semel.sql import engines, migrate
from semel.sql.failures import translated


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0 when it worked, 1 when it did not, 2 for a mistake in its use."""
    parser = argparse.ArgumentParser(prog="semel", description="semel makes work happen once.")
    parser.add_argument("--version", action="version", version=f"semel {version('semel')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    migration = commands.add_parser(
        "migrate",
        help="create or update semel's tables in a database",
        description="Create or update semel's tables. Running it again, or twice at once, does no harm.",
    )
    migration.add_argument("url", metavar="URL", help="postgresql://user@host/name or sqlite:///file.db")
    migration.add_argument("--json", action="store_true", help="print the result as JSON")
    migration.set_defaults(do=_say_migrated)
    worker.add_to(commands)
    chosen = parser.parse_args(arguments)
    try:
        return int(chosen.do(chosen))
    except SemelError as error:
        print(f"semel: {error}", file=sys.stderr)
        return 1


def _say_migrated(chosen: argparse.Namespace) -> int:
    before, after = _migrate(chosen.url)
    if chosen.json:
        print(json.dumps({"before": before, "after": after}))
    elif before == after:
        print(f"already at {after}")
    else:
        print(f"migrated from {before or 'nothing'} to {after}")
    return 0


def _migrate(address: str) -> tuple[str | None, str | None]:
    url = engines.parse(address.replace("postgres://", "postgresql://", 1))
    match url.get_backend_name():
        case "sqlite":
            engine = engines.sqlite_engine(url)
        case "postgresql":
            engine = engines.postgres_engine(url).execution_options(isolation_level="READ COMMITTED")
        case other:
            raise InvalidRequest(f"{other!r} has no tables to migrate; give a postgresql:// or sqlite:/// URL")
    try:
        return _upgrade(engine)
    finally:
        engine.dispose()


def _upgrade(engine: Engine, patience: float = 30.0) -> tuple[str | None, str | None]:
    """Migrate, and wait for others who are at it."""
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
