"""``semel doctor``: checks the deployment and gives advice. The checks are independent and change nothing."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from msgspec import Struct, field, structs

from semel.cli._app import location_of
from semel.cli._database import engine_of, file_of, require, without_password
from semel.cli._options import TRANSPORTS, app_argument, command, examples, json_option, option, place_options
from semel.cli._output import format_size, format_span, print_result
from semel.errors import SemelError
from semel.redaction import printable, without_secrets

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine

    from semel.runs.results import ResultStore

State: TypeAlias = Literal["ok", "warning", "broken", "skipped"]

SKEW = 2.0
"""Seconds: the tolerated clock skew."""
SCARCE, FULL = 1 << 30, 100 << 20
"""Free bytes on a disk below which there is a warning, and an error."""
STUCK = 600.0
"""Seconds that a due run may wait before there is a warning."""
LATE = 60.0
"""Seconds after the end of its lease by which a run should have been recovered."""
PACKAGES = (
    "sqlalchemy",
    "alembic",
    "msgspec",
    "psycopg",
    "asyncpg",
    "redis",
    "rq",
    "celery",
    "litestar",
    "granian",
    "httpx",
)
_MARKS = {"ok": "ok", "warning": "warning", "broken": "BROKEN", "skipped": "-"}


class Finding(Struct, frozen=True):
    """The result of a check."""

    check: str
    state: State
    message: str = field(name="said")
    advice: str | None = None


class Target(Struct, frozen=True, kw_only=True):
    """The deployment to check."""

    db: str
    redis: str | None
    events: str | None
    transport: str
    artifacts: str | Path | ResultStore
    host: str


@command
@examples(
    "semel doctor myproject.runs:app",
    "semel doctor --db postgresql://user@host/name",
    "semel doctor --transport rq --redis redis://localhost/0 --json",
)
@app_argument
@place_options()
@option(
    "--host",
    envvar="SEMEL_HOST",
    default="127.0.0.1",
    metavar="ADDRESS",
    help="The address that the server listens on.",
)
@json_option
def doctor(
    app: str | None, db: str | None, transport: str | None, host: str, as_json: bool, **given: str | None
) -> int:
    """Check the database, Redis, clock, migrations, disk and workers, with advice.

    Checks that the database is reachable, migrated and writable, that clocks agree, that disks have space, that Redis
    is reachable if configured, that workers are alive and no run is stuck. Changes nothing. The exit code is 1 if a
    check is BROKEN, but not for warnings.
    """
    place = location_of(app, url=db, transport=transport or os.environ.get("SEMEL_TRANSPORT") or None, **given)
    target = Target(
        db=place.url,
        redis=place.redis,
        events=os.environ.get("SEMEL_EVENTS") or None,
        transport=place.transport,
        artifacts=place.artifacts,
        host=host,
    )
    findings = list(examine(target))
    broken = any(each.state == "broken" for each in findings)
    print_result(as_json, {"broken": broken, "checks": findings}, "\n".join(map(_format, findings)))
    return int(broken)


def _format(finding: Finding) -> str:
    advice = f"\n{'':<25} → {finding.advice}" if finding.advice else ""
    line = f"{_MARKS[finding.state]:<8} {finding.check:<16} {finding.message}"
    return printable(without_secrets(f"{line}{advice}"))


def examine(target: Target) -> Iterator[Finding]:
    """The result of every check."""
    yield _python()
    yield from _database(target)
    yield _disk("database disk", file_of(target.db) if _is_url(target.db) else None, "the server's own")
    yield _artifacts(target.artifacts)
    yield _transport(target)
    for what, url in (("redis", target.redis), ("events", target.events)):
        if url is not None:
            yield _redis(what, url)


def _python() -> Finding:
    there = [f"{name} {metadata.version(name)}" for name in PACKAGES if importlib.util.find_spec(name)]
    message = f"Python {platform.python_version()}; semel {metadata.version('semel')}, {', '.join(there)}"
    return Finding("python", "ok", message)


def _is_url(url: str) -> bool:
    from semel.db.database import parse

    try:
        parse(url)
    except SemelError:
        return False
    return True


def _database(target: Target) -> Iterator[Finding]:
    try:
        require(target.db)
        engine = engine_of(target.db)
    except (SemelError, OSError) as error:
        yield Finding("database", "broken", str(error), "set --db or SEMEL_DB")
        return
    try:
        yield from _in_database(engine, target)
    finally:
        engine.dispose()


def _in_database(engine: Engine, target: Target) -> Iterator[Finding]:
    reached = _checked("database", engine, _reached, target.db)
    if reached.state == "broken":
        yield structs.replace(reached, advice="is it running, and are host, name, user and password right?")
        return
    yield reached
    migrated = _checked("migrations", engine, _migrations, target.db)
    yield migrated
    yield _checked("clock", engine, _clock)
    if migrated.state == "broken":
        return
    yield _checked("write access", engine, _writes)
    yield _checked("runs", engine, _runs)
    yield _checked("partitions", engine, _partitions)
    yield _checked("workers", engine, _workers)
    yield _checked("tokens", engine, _tokens, target.host)


def _checked(name: str, engine: Engine, check: Callable[..., Finding], *more: Any) -> Finding:
    """Run a check in a transaction that is rolled back."""
    from semel.db.errors import translate_errors

    try:
        with translate_errors(), engine.connect() as conn:
            found = check(conn, *more)
            conn.rollback()
            return found
    except (SemelError, OSError) as error:
        return Finding(name, "broken", str(error))


def _reached(conn: Connection, url: str) -> Finding:
    from sqlalchemy import text

    version = conn.scalar(text("SELECT sqlite_version()" if conn.dialect.name == "sqlite" else "SHOW server_version"))
    kind = "SQLite" if conn.dialect.name == "sqlite" else "PostgreSQL"
    return Finding("database", "ok", f"{kind} {version} at {without_password(url)}")


def _migrations(conn: Connection, url: str) -> Finding:
    from semel.db import migrate
    from semel.db.schema import REVISIONS

    version, run = migrate.current(conn), f"run: semel migrate '{without_password(url)}'"
    if migrate.behind(conn) and (copied := migrate.copied(conn)):
        message = f"a migration from {version} is under way: {copied[0]:,} of {copied[1]:,} runs are copied"
        return Finding("migrations", "broken", message, f"if it does not go on by itself, {run}")
    if migrate.behind(conn):
        message = f"the database is at {version or 'nothing'}, this release needs {REVISIONS[-1]}"
        return Finding("migrations", "broken", message, run)
    if version not in REVISIONS:
        message = f"the database is at {version}, which this release does not know"
        return Finding("migrations", "warning", message, "a newer semel migrated it: update this one")
    return Finding("migrations", "ok", f"at {version}")


def _clock(conn: Connection) -> Finding:
    from sqlalchemy import text

    if conn.dialect.name == "sqlite":
        return Finding("clock", "ok", "SQLite goes by this machine's clock")
    before = time.time()
    there = float(conn.scalar(text("SELECT extract(epoch FROM clock_timestamp())")) or 0)
    after = time.time()
    skew = max(before - there, there - after, 0.0)
    message = f"this machine and the database are {skew:.3f} s apart"
    if skew < SKEW:
        return Finding("clock", "ok", message)
    advice = "set both by NTP. Leases go by the database's clock; signatures of webhooks and logs by this one"
    return Finding("clock", "warning", message, advice)


def _writes(conn: Connection) -> Finding:
    from sqlalchemy import insert

    from semel.db.schema import leaders

    conn.execute(insert(leaders).values(role=f"doctor-{os.getpid()}", holder="doctor", until_us=0, term_us=0))
    return Finding("write access", "ok", "rows can be written")


def _runs(conn: Connection) -> Finding:
    from sqlalchemy import func, select

    from semel.db.schema import runs
    from semel.runs.store import queries
    from semel.runs.store.quotas import read_clock
    from semel.runs.types import MICRO

    terms = _terms(conn)
    now = read_clock(conn, terms)
    late = runs.c.lease_until_us < now - round(LATE * MICRO)
    lost = conn.scalar(select(func.count()).where(queries.has_status("RUNNING"), late)) or 0
    backlog = queries.backlog(conn, terms)
    message = f"{backlog.pending} pending, {backlog.running} running"
    if backlog.stalled:
        message += f" ({backlog.stalled} stalled: semel runs --stalled lists them)"
    if lost:
        message += f"; {lost} lost their worker and were not recovered"
        return Finding("runs", "broken", message, "start a worker, or semel sweep MODULE:APP")
    if backlog.oldest_wait > STUCK:
        message += f"; the oldest that is due has waited for {format_span(backlog.oldest_wait)}"
        return Finding("runs", "warning", message, "semel show RUN explains why; start more workers?")
    return Finding("runs", "ok", message)


def _partitions(conn: Connection) -> Finding:
    from semel.runs.store import partitions

    if conn.dialect.name == "sqlite":
        return Finding("partitions", "skipped", "SQLite has none")
    there = partitions.partitions(conn)
    message = f"{len(there)}, and the default one"
    if not partitions.may_make(conn):
        return Finding("partitions", "warning", message, partitions.NO_PRIVILEGE)
    return Finding("partitions", "ok", message)


def _workers(conn: Connection) -> Finding:
    from semel.runs.store import queries
    from semel.runs.types import INTERNAL_QUEUE

    terms = _terms(conn)
    there = [each for each in queries.list_workers(conn, terms) if list(each.queues) != [INTERNAL_QUEUE]]
    alive = [each for each in there if each.alive]
    silent = len(there) - len(alive)
    message = f"{len(alive)} alive" + (f", {silent} silent" if silent else "")
    if alive:
        return Finding("workers", "ok", message)
    waits = queries.backlog(conn, terms).pending > 0
    advice = "start one with semel worker MODULE:APP; of RQ's and Celery's only those at work are seen"
    return Finding("workers", "warning", message + (", and runs wait" if waits else ""), advice)


def _terms(conn: Connection) -> Any:
    from semel.db.dialect import StatementContext

    return StatementContext(time.time_ns() // 1000 if conn.dialect.name == "sqlite" else None, False)


def _tokens(conn: Connection, host: str) -> Finding:
    from semel.service.auth import tokens

    there = tokens.any_there(conn)
    if there:
        return Finding("tokens", "ok", "there are tokens: callers need one")
    if host in ("localhost", "::1") or host.startswith("127."):
        return Finding("tokens", "ok", "there are none: the server accepts requests from this machine only")
    message = f"there are none, so the server will refuse to listen on {host}"
    return Finding("tokens", "broken", message, "semel token create --user NAME --role admin")


def _disk(check: str, place: Path | None, elsewhere: str) -> Finding:
    if place is None:
        return Finding(check, "skipped", elsewhere)
    folder = place.absolute()
    while not folder.is_dir():
        folder = folder.parent
    usage = shutil.disk_usage(folder)
    message = f"{format_size(usage.free)} of {format_size(usage.total)} free at {folder}"
    if not os.access(folder, os.W_OK):
        return Finding(check, "broken", f"{folder} cannot be written to", "fix its permissions")
    if usage.free < FULL:
        return Finding(check, "broken", message, "free some space: semel gc removes old runs")
    if usage.free < SCARCE:
        return Finding(check, "warning", message, "free some space soon: semel gc removes old runs")
    return Finding(check, "ok", message)


def _artifacts(artifacts: str | Path | ResultStore) -> Finding:
    if not isinstance(artifacts, str | Path):
        return Finding("artifacts disk", "skipped", f"artifacts are stored by the app's {type(artifacts).__name__}")
    place = str(artifacts)
    if "://" in place and not place.startswith("file://"):
        return Finding("artifacts disk", "skipped", f"artifacts are stored at {place.partition('?')[0]}")
    return _disk("artifacts disk", Path(place.removeprefix("file://")), "")


def _transport(target: Target) -> Finding:
    name = target.transport
    if name == "database":
        return Finding("transport", "ok", "database: workers poll it")
    if name not in TRANSPORTS:
        return Finding("transport", "skipped", f"{name}, the app's own")
    if importlib.util.find_spec(name) is None:
        advice = f"pip install 'semel[{name}]'"
        return Finding("transport", "broken", f"{name} is not installed", advice)
    if target.redis is None:
        return Finding("transport", "broken", f"{name} needs a Redis", "set --redis or SEMEL_REDIS")
    return Finding("transport", "ok", name)


def _redis(check: str, url: str) -> Finding:
    from urllib.parse import urlsplit

    from semel.once.client import Once

    try:
        where = urlsplit(url).hostname or "a socket"
        with Once(url, collect=False, retry_for=0):
            pass
    except (SemelError, OSError, ValueError) as error:
        message = _hide_password(str(error), url)
        return Finding(check, "broken", message, "is it running, and is its URL right?")
    return Finding(check, "ok", f"Redis answers at {where}")


def _hide_password(message: str, url: str) -> str:
    from urllib.parse import urlsplit

    try:
        password = urlsplit(url).password
    except ValueError:
        return "this is not the URL of a Redis"
    return message.replace(password, "***") if password else message
