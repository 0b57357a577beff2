"""``semel migrate``: create or update semel's tables."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from semel.cli._database import engine_of
from semel.cli._options import argument, command, db_options, examples
from semel.cli._output import print_result
from semel.errors import StoreBroken, StoreUnavailable

if TYPE_CHECKING:
    from sqlalchemy import Engine

PATIENCE = 30.0
"""Seconds to wait while another process migrates the same file."""


@command
@examples("semel migrate postgresql://user@host/name", "semel migrate sqlite:///semel.db --json")
@argument("url", required=False, help="postgresql://user@host/name or sqlite:///file.db; by default --db.")
@db_options
def migrate(url: str | None, db: str, as_json: bool) -> None:
    """Create or update semel's tables in a database.

    Safe to run again, and to run twice at the same time.
    """
    engine = engine_of(db if url is None else url)
    try:
        before, after = _upgrade(engine)
    finally:
        engine.dispose()
    text = f"already at {after}" if before == after else f"migrated from {before or 'nothing'} to {after}"
    print_result(as_json, {"before": before, "after": after}, text)


def _upgrade(engine: Engine) -> tuple[str | None, str | None]:
    """Migrate, and wait while another process does. Returns the versions before and after."""
    from semel._concurrency.retry import Backoff
    from semel.db import migrate
    from semel.db.errors import translate_errors

    started, backoff, tries = time.monotonic(), Backoff(0.05, 1.0), 0
    while True:
        tries += 1
        try:
            with translate_errors(), engine.begin() as conn:
                return migrate.upgrade(conn)
        except StoreBroken:
            raise
        except StoreUnavailable:
            if engine.dialect.name != "sqlite" or time.monotonic() > started + PATIENCE:
                raise
            time.sleep(backoff.after(tries))
