"""``semel gc``: remove old data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from semel.cli._app import ARTIFACTS, DATABASE, location_of
from semel.cli._database import opened
from semel.cli._options import AGE, app_argument, command, examples, json_option, option
from semel.cli._output import print_result
from semel.errors import InvalidRequest

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from semel.db.dialect import StatementContext
    from semel.runs.app import Location
    from semel.runs.results import ResultStore
    from semel.runs.store import RunStore


@command
@examples(
    "semel gc myproject.runs:app --older-than 90d --dry-run", "semel gc --older-than 90d --artifacts s3://bucket/prefix"
)
@app_argument
@option("--older-than", type=AGE, default="30d", help="Remove runs that ended longer ago than this.")
@option("--dry-run", is_flag=True, help="Only print what would be removed.")
@option(
    "--artifacts",
    envvar="SEMEL_ARTIFACTS",
    metavar="PLACE",
    help=f"Where the artifacts of runs are stored.  [default: the app's, or {ARTIFACTS}]",
)
@option("--db", envvar="SEMEL_DB", metavar="URL", help=f"The database.  [default: the app's, or {DATABASE}]")
@json_option
def gc(
    *, app: str | None, older_than: float, dry_run: bool, artifacts: str | None, db: str | None, as_json: bool
) -> None:
    """Remove old runs with their files, and expired keys.

    Also removes logs, events and expired reservations. Workers remove expired rows by themselves, but not old runs.
    """
    from semel._concurrency.sync import run_sync

    place = location_of(app, url=db, artifacts=artifacts)
    with opened(place.url) as store:
        counts = run_sync(store.read(_removable, older_than, store.statement_context))
        with_files = counts.pop("runs_with_files") + counts.pop("left_files")
        if not dry_run:
            _require_artifacts(place.artifacts, with_files)
            counts = _remove(place, store, older_than, counts["run_keys"])
    removed = f"{counts['runs']} runs, {counts['run_keys']} run keys, {counts['reservations']} reservations"
    text = f"{'would remove' if dry_run else 'removed'} {removed}, {counts['keys']} keys"
    print_result(as_json, {"dry_run": dry_run, "removed": counts}, text)


def _removable(conn: Connection, age: float, terms: StatementContext) -> dict[str, int]:
    from sqlalchemy import and_, func, or_, select

    from semel._validation import TEN_YEARS, checked_number
    from semel.db.schema import keys, removals, reservations, runs
    from semel.runs.store.maintenance import is_old
    from semel.runs.store.quotas import EXPIRED_KEPT_US, read_clock
    from semel.runs.store.run_keys import RUN

    now = read_clock(conn, terms)
    over = is_old(now, checked_number("older-than", age, 0, TEN_YEARS))
    outlasted = keys.c.lease_until_us + keys.c.expires_us - keys.c.created_us  # as semel.once.rules.end_of computes it
    gone = or_(keys.c.state != "claimed", keys.c.lease_until_us <= keys.c.expires_us, outlasted < now)
    wanted = {
        "runs": over,
        "runs_with_files": and_(over, or_(runs.c.result_ref.is_not(None), runs.c.artifacts.is_not(None))),
        "left_files": removals.c.has_files,
        "run_keys": and_(keys.c.expires_us < now, gone, keys.c.kind == RUN),
        "reservations": reservations.c.expires_us < now - EXPIRED_KEPT_US,
        "keys": and_(keys.c.expires_us < now, gone, keys.c.kind != RUN),
    }
    return {name: conn.scalar(select(func.count()).where(each)) or 0 for name, each in wanted.items()}


def _require_artifacts(place: str | Path | ResultStore, with_files: int) -> None:
    """Refuse to remove runs without their files, which could not be found again."""
    if not isinstance(place, str | Path) or "://" in str(place):
        return
    if with_files and not Path(place).is_dir():
        raise InvalidRequest(f"{with_files} of the runs have files, but there is no folder {place}; set --artifacts")


def _remove(place: Location, store: RunStore, age: float, run_keys: int) -> dict[str, int]:
    from semel._concurrency.sync import run_sync
    from semel.runs.app import App
    from semel.types import actor_here

    app = App(place.url, artifacts=place.artifacts)
    try:
        counts = {"runs": app.purge(age, by=actor_here("cli")), "run_keys": run_keys, "reservations": 0, "keys": 0}
    finally:
        app.close()
    while any(removed := run_sync(store.write(_remove_expired, store.statement_context))):
        counts["keys"] += removed[0]
        counts["reservations"] += removed[1]
    counts["keys"] = max(counts["keys"] - run_keys, 0)
    return counts


def _remove_expired(conn: Connection, terms: StatementContext) -> tuple[int, int]:
    from semel.runs.store import quotas, run_keys

    return run_keys.purge(conn, 1000, terms), quotas.purge_reservations(conn, terms)
