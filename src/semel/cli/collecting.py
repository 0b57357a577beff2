"""``semel gc``: remove what is old."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from semel.cli import database, options, printing
from semel.errors import InvalidRequest

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from semel.runs.ledger import Ledger
    from semel.sql.statements import Terms

OLD = 30 * 86400.0
ARTIFACTS = "./artifacts"


def add_to(commands: options.Commands) -> None:
    """Add the command."""
    parser = options.command(
        commands,
        "gc",
        help="remove old runs with their files, and keys that expired",
        description="Remove runs that were over long ago, with their results, files, logs and events, and keys and "
        "reservations that expired. Workers remove what expired by themselves; old runs are removed only here.",
        example="semel gc --older-than 90d --dry-run\nsemel gc --older-than 90d --artifacts s3://bucket/prefix",
    )
    parser.add_argument(
        "--older-than", type=options.age, default=OLD, metavar="TIME", help="how long runs are kept (default: 30d)"
    )
    parser.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    parser.add_argument(
        "--artifacts", metavar="PLACE", help=f"where their files are (default: $SEMEL_ARTIFACTS, or {ARTIFACTS})"
    )
    options.db_option(parser)
    parser.set_defaults(do=_collect)


def _collect(chosen: argparse.Namespace) -> int:
    from semel.bridge import drive

    with database.opened(chosen) as ledger:
        counts = drive(ledger.read(_old, chosen.older_than, ledger.terms))
        with_files = counts.pop("runs_with_files") + counts.pop("left_files")
        if not chosen.dry_run:
            artifacts = _artifacts(chosen, with_files)
            counts = _remove(options.database(chosen), ledger, chosen.older_than, artifacts)
    if chosen.json:
        printing.print_json({"dry_run": chosen.dry_run, "removed": counts})
        return 0
    told = f"{counts['runs']} runs, {counts['run_keys']} run keys, {counts['reservations']} reservations"
    print(f"{'would remove' if chosen.dry_run else 'removed'} {told}, {counts['keys']} keys")
    return 0


def _old(conn: Connection, age: float, terms: Terms) -> dict[str, int]:
    """How much there is to remove."""
    from sqlalchemy import and_, func, or_, select

    from semel.runs.quotas import EXPIRED_KEPT_US, read_clock
    from semel.runs.records import checked_seconds
    from semel.runs.retention import is_old
    from semel.sql.schema import keys, removals, reservations, run_keys, runs

    now = read_clock(conn, terms)
    over = is_old(now, checked_seconds("older-than", age))
    outlasted = keys.c.lease_until_us + keys.c.expires_us - keys.c.created_us  # see semel.once.rules.end_of
    gone = or_(keys.c.state != "claimed", keys.c.lease_until_us <= keys.c.expires_us, outlasted < now)
    wanted = {
        "runs": over,
        "runs_with_files": and_(over, or_(runs.c.result_ref.is_not(None), runs.c.artifacts.is_not(None))),
        "left_files": removals.c.has_files,
        "run_keys": run_keys.c.expires_us < now,
        "reservations": reservations.c.expires_us < now - EXPIRED_KEPT_US,
        "keys": and_(keys.c.expires_us < now, gone),
    }
    return {name: conn.scalar(select(func.count()).where(each)) or 0 for name, each in wanted.items()}


def _artifacts(chosen: argparse.Namespace, with_files: int) -> str:
    """Where the files are. To take the runs away and leave their files behind would be the end of both."""
    place: str = chosen.artifacts or os.environ.get("SEMEL_ARTIFACTS") or ARTIFACTS
    if with_files and "://" not in place and not Path(place).is_dir():
        raise InvalidRequest(
            f"{with_files} of the runs have files, but there is no folder {place}; say where they are with --artifacts"
        )
    return place


def _remove(url: str, ledger: Ledger, age: float, artifacts: str) -> dict[str, int]:
    from semel.bridge import drive
    from semel.once.faces import Once
    from semel.runs.app import App

    app = App(url, artifacts=artifacts)
    try:
        counts: dict[str, int] = {"runs": app.purge(age)}
    finally:
        app.close()
    counts |= {"run_keys": 0, "reservations": 0}
    while any(removed := drive(ledger.write(_expired, ledger.terms))):
        counts["run_keys"] += removed[0]
        counts["reservations"] += removed[1]
    with Once(url, collect=False) as once:
        counts["keys"] = once.purge()
    return counts


def _expired(conn: Connection, terms: Terms) -> tuple[int, int]:
    from semel.runs import keys, quotas

    return keys.purge_keys(conn, terms), quotas.purge_reservations(conn, terms)
