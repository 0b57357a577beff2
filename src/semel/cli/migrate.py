"""``semel migrate``: create or update semel's tables."""

from __future__ import annotations

import json
import sys
from typing import Self

from semel.cli._database import engine_of
from semel.cli._options import argument, command, db_options, examples
from semel.cli._output import note, print_result


@command
@examples("semel migrate postgresql://user@host/name", "semel migrate --app myproject.runs:app --json")
@argument("url", required=False, help="postgresql://user@host/name or sqlite:///file.db; by default --db.")
@db_options
def migrate(url: str | None, db: str, as_json: bool) -> None:
    """Create or update semel's tables in a database.

    Servers and workers of the release before may go on meanwhile. Safe to stop and run again, and to run twice at the
    same time. Progress is shown on stderr.
    """
    from semel.db import migrate
    from semel.db.errors import translate_errors

    engine = engine_of(db if url is None else url)
    try:
        with translate_errors(), _CopyProgress(as_json) as progress:
            before, after = migrate.run(engine, progress)
    finally:
        engine.dispose()
    text = f"already at {after}" if before == after else f"migrated from {before or 'nothing'} to {after}"
    print_result(as_json, {"before": before, "after": after}, text)


class _CopyProgress:
    """Shows on stderr how many runs are copied: one line on a terminal, else a line, or JSON, for every tenth."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._on_terminal = sys.stderr.isatty() and not as_json
        self._shown = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._on_terminal and self._shown >= 0:
            print(file=sys.stderr, flush=True)

    def __call__(self, copied: int, total: int) -> None:
        if not total:
            return
        percent = 100 * copied // total
        line = f"copied {copied:,} of {total:,} runs ({percent} %)"
        if self._on_terminal:
            self._shown = percent
            print(f"\r{line}", end="", file=sys.stderr, flush=True)
        elif percent // 10 != self._shown // 10 or self._shown < 0:
            self._shown = percent
            note(json.dumps({"copied": copied, "total": total}) if self._as_json else line)
