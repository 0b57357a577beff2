"""``semel doctor``: is everything as it should be, and if not, what helps."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from semel.cli import options, printing
from semel.redaction import printable, without_secrets

if TYPE_CHECKING:
    from semel.cli.checks import Found

_MARKS = {"ok": "ok", "warning": "warning", "broken": "BROKEN", "skipped": "-"}


def add_to(commands: options.Commands) -> None:
    """Add the command."""
    parser = options.command(
        commands,
        "doctor",
        help="check the database, Redis, clock, migrations, disk and workers, with advice",
        description="Check that the database answers, is migrated and can be written to, that clocks agree, that there "
        "is room on the disks, that Redis answers where one is configured, that workers live and no run is stuck. "
        "Nothing is changed. Ends with 1 when something is broken; warnings are no failure.",
        example="semel doctor --db postgresql://user@host/name\n"
        "SEMEL_TRANSPORT=rq SEMEL_REDIS=redis://localhost/0 semel doctor --json",
    )
    options.db_option(parser)
    parser.add_argument("--redis", metavar="URL", help="the Redis of rq and celery (default: $SEMEL_REDIS)")
    parser.add_argument(
        "--transport", choices=("database", "rq", "celery"), help="how workers hear of runs (default: $SEMEL_TRANSPORT)"
    )
    parser.add_argument("--artifacts", metavar="PLACE", help="large results and files (default: $SEMEL_ARTIFACTS)")
    parser.add_argument("--host", metavar="ADDRESS", help="where the server listens (default: $SEMEL_HOST)")
    parser.set_defaults(do=_examine)


def _examine(chosen: argparse.Namespace) -> int:
    from semel.cli.checks import Patient, examine

    patient = Patient(
        db=options.database(chosen),
        redis=_setting(chosen, "redis"),
        events=os.environ.get("SEMEL_EVENTS") or None,
        transport=_setting(chosen, "transport") or "database",
        artifacts=_setting(chosen, "artifacts") or "./artifacts",
        host=_setting(chosen, "host") or "127.0.0.1",
    )
    found = list(examine(patient))
    broken = any(each.state == "broken" for each in found)
    if chosen.json:
        printing.print_json({"broken": broken, "checks": found})
    else:
        for each in found:
            _print(each)
    return 1 if broken else 0


def _setting(chosen: argparse.Namespace, name: str) -> str | None:
    value: str | None = getattr(chosen, name) or os.environ.get(f"SEMEL_{name.upper()}")
    return value or None


def _print(found: Found) -> None:
    print(printable(without_secrets(f"{_MARKS[found.state]:<8} {found.check:<16} {found.said}")))
    if found.advice:
        print(printable(without_secrets(f"{'':<25} → {found.advice}")))
