"""What the doctor looks at. Every check looks by itself, changes nothing, and says what would help."""

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

from msgspec import Struct

from semel.cli import database, printing
from semel.errors import SemelError

if TYPE_CHECKING:
    from sqlalchemy import Connection

State: TypeAlias = Literal["ok", "warning", "broken", "skipped"]

SKEW = 2.0
"""Seconds by which clocks may differ."""
SCARCE, FULL = 1 << 30, 100 << 20
"""Bytes on a disk under which there is little left, and too little."""
STUCK = 600.0
"""Seconds that a run may be due without being begun."""
LATE = 60.0
"""Seconds after the end of its lease when a run should have been taken back."""
DRIVERS = (
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


class Found(Struct, frozen=True, kw_only=True):
    """What a check found."""

    check: str
    state: State
    said: str
    advice: str | None = None


class Patient(Struct, frozen=True, kw_only=True):
    """What is to be examined."""

    db: str
    redis: str | None
    events: str | None
    transport: str
    artifacts: str
    host: str


def examine(patient: Patient) -> Iterator[Found]:
    """Every check, one after the other; one that fails is a finding."""
    yield _python()
    yield from _database(patient)
    yield _disk("database disk", database.file_of(patient.db) if _is_url(patient.db) else None, "the server's own")
    yield _artifacts(patient.artifacts)
    yield _transport(patient)
    for what, url in (("redis", patient.redis), ("events", patient.events)):
        if url is not None:
            yield _redis(what, url)


def _python() -> Found:
    there = [f"{name} {metadata.version(name)}" for name in DRIVERS if importlib.util.find_spec(name)]
    said = f"Python {platform.python_version()}; semel {metadata.version('semel')}, {', '.join(there)}"
    return Found(check="python", state="ok", said=said)


def _is_url(url: str) -> bool:
    from semel.sql import engines

    try:
        engines.parse(url)
    except SemelError:
        return False
    return True


def _database(patient: Patient) -> Iterator[Found]:
    """What can be asked of the database, over one connection."""
    from semel.cli.migrating import engine_of
    from semel.sql.failures import translated

    try:
        database.require(patient.db)
        engine = engine_of(patient.db)
    except (SemelError, OSError) as error:
        yield Found(check="database", state="broken", said=str(error), advice="see --db and SEMEL_DB")
        return
    try:
        try:
            with translated(), engine.connect() as conn:
                yield _reached(conn, patient.db)
        except SemelError as error:
            advice = "is it running, and are host, name, user and password right?"
            yield Found(check="database", state="broken", said=str(error), advice=advice)
            return
        migrated = _checked("migrations", lambda: _in(engine, _migrations, patient.db))
        yield migrated
        yield _checked("clock", lambda: _in(engine, _clock))
        if migrated.state == "broken":
            return
        for name, check in (("write access", _writes), ("runs", _runs), ("workers", _workers)):
            yield _checked(name, lambda check=check: _in(engine, check))  # type: ignore[misc]
        yield _checked("tokens", lambda: _in(engine, _tokens, patient.host))
    finally:
        engine.dispose()


def _in(engine: Any, check: Callable[..., Found], *more: Any) -> Found:
    """In a transaction that is always undone."""
    from semel.sql.failures import translated

    with translated(), engine.connect() as conn:
        found = check(conn, *more)
        conn.rollback()
        return found


def _checked(name: str, check: Callable[[], Found]) -> Found:
    try:
        return check()
    except (SemelError, OSError) as error:
        return Found(check=name, state="broken", said=str(error))


def _reached(conn: Connection, url: str) -> Found:
    from sqlalchemy import text

    version = conn.scalar(text("SELECT sqlite_version()" if conn.dialect.name == "sqlite" else "SHOW server_version"))
    kind = "SQLite" if conn.dialect.name == "sqlite" else "PostgreSQL"
    return Found(check="database", state="ok", said=f"{kind} {version} at {database.shown(url)}")


def _migrations(conn: Connection, url: str) -> Found:
    from semel.sql import migrate
    from semel.sql.schema import REVISIONS

    version = migrate.current(conn)
    if migrate.behind(conn):
        said = f"the database is at {version or 'nothing'}, this release needs {REVISIONS[-1]}"
        return Found(
            check="migrations", state="broken", said=said, advice=f"run: semel migrate '{database.shown(url)}'"
        )
    if version not in REVISIONS:
        said = f"the database is at {version}, which this release does not know"
        return Found(check="migrations", state="warning", said=said, advice="a newer semel was here: update this one")
    return Found(check="migrations", state="ok", said=f"at {version}")


def _clock(conn: Connection) -> Found:
    from sqlalchemy import text

    if conn.dialect.name == "sqlite":
        return Found(check="clock", state="ok", said="SQLite goes by this machine's clock")
    before = time.time()
    there = float(conn.scalar(text("SELECT extract(epoch FROM clock_timestamp())")) or 0)
    after = time.time()
    skew = max(before - there, there - after, 0.0)
    said = f"this machine and the database are {skew:.3f} s apart"
    if skew < SKEW:
        return Found(check="clock", state="ok", said=said)
    advice = "set both by NTP. Leases go by the database's clock; signatures of webhooks and logs by this one"
    return Found(check="clock", state="warning", said=said, advice=advice)


def _writes(conn: Connection) -> Found:
    from sqlalchemy import insert

    from semel.sql.schema import leaders

    conn.execute(insert(leaders).values(role=f"doctor-{os.getpid()}", holder="doctor", until_us=0, term_us=0))
    return Found(check="write access", state="ok", said="rows can be written")


def _runs(conn: Connection) -> Found:
    from sqlalchemy import func, select

    from semel.runs import reading
    from semel.runs.quotas import read_clock
    from semel.runs.records import MICRO
    from semel.sql.schema import runs

    terms = _terms(conn)
    now = read_clock(conn, terms)
    late = runs.c.lease_until_us < now - round(LATE * MICRO)
    lost = conn.scalar(select(func.count()).where(runs.c.status == "RUNNING", late)) or 0
    backlog = reading.backlog(conn, terms)
    said = f"{backlog.pending} pending, {backlog.running} running"
    if backlog.stalled:
        said += f" ({backlog.stalled} stalled: semel runs --stalled lists them)"
    if lost:
        said += f"; {lost} lost their worker and nobody took them back"
        return Found(check="runs", state="broken", said=said, advice="start a worker, or semel sweep MODULE:APP")
    if backlog.oldest_wait > STUCK:
        said += f"; the oldest that is due has waited for {printing.lasting(backlog.oldest_wait)}"
        return Found(check="runs", state="warning", said=said, advice="semel show RUN says why it waits; more workers?")
    return Found(check="runs", state="ok", said=said)


def _workers(conn: Connection) -> Found:
    from semel.runs import reading
    from semel.runs.records import INTERNAL_QUEUE

    terms = _terms(conn)
    there = [each for each in reading.list_workers(conn, terms) if list(each.queues) != [INTERNAL_QUEUE]]
    alive = [each for each in there if each.alive]
    silent = len(there) - len(alive)
    said = f"{len(alive)} alive" + (f", {silent} silent" if silent else "")
    if alive:
        return Found(check="workers", state="ok", said=said)
    waits = reading.backlog(conn, terms).pending > 0
    advice = "start one with semel worker MODULE:APP; of RQ's and Celery's only those at work are seen"
    return Found(check="workers", state="warning", said=said + (", and runs wait" if waits else ""), advice=advice)


def _terms(conn: Connection) -> Any:
    from semel.sql.statements import Terms

    return Terms(time.time_ns() // 1000 if conn.dialect.name == "sqlite" else None, False)


def _tokens(conn: Connection, host: str) -> Found:
    from semel.service import tokens

    there = tokens.any_there(conn)
    if there:
        return Found(check="tokens", state="ok", said="there are tokens: callers need one")
    if host in ("localhost", "::1") or host.startswith("127."):
        return Found(check="tokens", state="ok", said="there are none: the server answers this machine only")
    said = f"there are none, and the server is to listen on {host}, which it will refuse"
    return Found(check="tokens", state="broken", said=said, advice="semel token create --user NAME --role admin")


def _disk(check: str, place: Path | None, elsewhere: str) -> Found:
    if place is None:
        return Found(check=check, state="skipped", said=elsewhere)
    folder = place.absolute()
    while not folder.is_dir():
        folder = folder.parent
    usage = shutil.disk_usage(folder)
    said = f"{printing.size(usage.free)} of {printing.size(usage.total)} free at {folder}"
    if not os.access(folder, os.W_OK):
        return Found(check=check, state="broken", said=f"{folder} cannot be written to", advice="mend its permissions")
    if usage.free < FULL:
        return Found(check=check, state="broken", said=said, advice="make room: semel gc removes old runs")
    if usage.free < SCARCE:
        return Found(check=check, state="warning", said=said, advice="make room soon: semel gc removes old runs")
    return Found(check=check, state="ok", said=said)


def _artifacts(artifacts: str) -> Found:
    if "://" in artifacts and not artifacts.startswith("file://"):
        return Found(check="artifacts disk", state="skipped", said=f"they go to {artifacts.partition('?')[0]}")
    return _disk("artifacts disk", Path(artifacts.removeprefix("file://")), "")


def _transport(patient: Patient) -> Found:
    name = patient.transport
    if name == "database":
        return Found(check="transport", state="ok", said="database: workers ask it")
    if importlib.util.find_spec(name) is None:
        advice = f"pip install 'semel[{name}]'"
        return Found(check="transport", state="broken", said=f"{name} is not installed", advice=advice)
    if patient.redis is None:
        return Found(check="transport", state="broken", said=f"{name} needs a Redis", advice="see --redis, SEMEL_REDIS")
    return Found(check="transport", state="ok", said=name)


def _redis(check: str, url: str) -> Found:
    from urllib.parse import urlsplit

    from semel.once.faces import Once

    try:
        where = urlsplit(url).hostname or "a socket"
        with Once(url, collect=False, retry_for=0):
            pass
    except (SemelError, OSError, ValueError) as error:
        said = _without_password(str(error), url)
        return Found(check=check, state="broken", said=said, advice="is it running, and is its URL right?")
    return Found(check=check, state="ok", said=f"Redis answers at {where}")


def _without_password(said: str, url: str) -> str:
    from urllib.parse import urlsplit

    try:
        password = urlsplit(url).password
    except ValueError:
        return "this is no URL of a Redis"
    return said.replace(password, "***") if password else said
