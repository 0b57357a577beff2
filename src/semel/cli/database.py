"""The database for commands that need no server."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from semel.cli import options, printing
from semel.errors import StoreBroken

if TYPE_CHECKING:
    from semel.runs.ledger import Ledger


@contextmanager
def opened(chosen: argparse.Namespace, *, make: bool = False) -> Iterator[Ledger]:
    """The ledger in the database that was named. A file that is not there is made only when there is cause to."""
    from semel.bridge import drive
    from semel.runs.ledger import Ledger

    url = options.database(chosen)
    if not make:
        require(url)
    elif (path := file_of(url)) is not None and not path.exists():
        printing.say(f"a new database is made: {path} (--db and SEMEL_DB name another)")
    ledger = Ledger(url, awaited=False)
    try:
        yield ledger
    finally:
        drive(ledger.close())


def require(url: str) -> None:
    """Refuse a file that is not there: to look into it must not make it."""
    path = file_of(url)
    if path is not None and not path.exists():
        raise StoreBroken(
            f"there is no database at {path}; name it with --db or SEMEL_DB, or make it with: semel migrate {url}"
        )


def file_of(url: str) -> Path | None:
    """Where a SQLite database lies; None for others."""
    from semel.sql import engines

    parts = engines.parse(url)
    if parts.get_backend_name() != "sqlite" or not parts.database or ":memory:" in parts.database:
        return None
    return Path(parts.database)


def shown(url: str) -> str:
    """The URL without its password."""
    from semel.sql import engines

    return engines.parse(url).render_as_string(hide_password=True)
