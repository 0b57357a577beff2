"""The SQL of the pages of runs, beyond what the engine has. Every query is bounded, however many runs there are.

The runs of a model are searched for by the store. Any other list scans from the newest run downwards, a window of rows
at a time, until its page is full or its time is up. Then the page shows how far it scanned, and a link continues from
there. So a filter that matches one run in a million takes no longer than one that matches all.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct
from sqlalchemy import ColumnElement, Connection, Table, case, func, literal, or_, select

from semel.db.schema import attempts, has_digest, keys, run_logs, runs, submitted
from semel.db.schema import steps as run_steps
from semel.runs.store.partial_ids import begins_with, digits_of, edge_of_millisecond, ends_with
from semel.runs.store.queries import CLOCK_SKEW_US, STALLED, Filter, has_status
from semel.runs.store.run_keys import RUN, in_scope_of
from semel.runs.types import MICRO, STATUSES, TERMINAL, LogLine, Run, Status, Step, checked_id, id_at

SCAN_SECONDS = 0.08
"""Seconds after which the scan of a first page returns what it has found so far: the page must be there soon."""
FURTHER = 10
"""Times as long may a scan take that somebody continues."""
FIRST_WINDOW = 300
LARGEST_WINDOW = 20_000
"""Rows scanned between two checks of the time: few at first, because most pages are full at once."""
MAX_SAME_PAYLOAD = 10_000
"""Runs with the same payload that are searched."""
MAX_USERS = 10_000
"""Users whose keys of one name are searched."""
MAX_ERROR = 300
MAX_STEPS = 60


class RunRow(Struct, frozen=True, kw_only=True):
    """A run in a list."""

    id: str
    status: Status
    step: str
    note: str | None
    model: str
    user: str
    created_us: int
    due_us: int
    started_us: int | None
    finished_us: int | None
    cancel_us: int | None
    progress: float | None
    progress_note: str | None
    attempts: int
    errors: int
    max_attempts: int
    losts: int
    max_lost: int
    error: str | None
    stalled_us: int | None = None
    """Since when it has made no progress although its worker is alive."""

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self.finished_us is not None

    @property
    def seconds(self) -> float | None:
        """From its first start to its end."""
        return run_seconds(self)


def run_seconds(run: Run | RunRow) -> float | None:
    """How long a run took, from its first start to its end."""
    if run.started_us is None or run.finished_us is None:
        return None
    return (run.finished_us - run.started_us) / MICRO


_PLAIN = [name for name in RunRow.__struct_fields__ if name not in ("user", "error", "note", "stalled_us")]
_ROW = [
    *(runs.c[name] for name in _PLAIN),
    runs.c.user_id.label("user"),
    func.substr(runs.c.last_error, 1, MAX_ERROR).label("error"),
    func.substr(runs.c.note, 1, MAX_ERROR).label("note"),
    case((STALLED, runs.c.progress_us)).label("stalled_us"),
]


class SearchResult(Struct, frozen=True):
    """Ids, newest first. ``reached`` is where the scan stopped, if its time was up before the page was full."""

    ids: list[str]
    reached: str | None = None


class IdRange(Struct, frozen=True, kw_only=True):
    """A range of ids, scanned from ``start`` (exclusive) down or up to ``stop`` (inclusive)."""

    start: str | None = None
    stop: str | None = None
    down: bool = True

    def conditions(self, column: ColumnElement[str] = runs.c.id) -> list[Any]:
        """The range as SQL."""
        found: list[Any] = []
        if self.start is not None:
            found.append(column < self.start if self.down else column > self.start)
        if self.stop is not None:
            found.append(column >= self.stop if self.down else column <= self.stop)
        return found

    def order(self, column: ColumnElement[str]) -> ColumnElement[str]:
        """The direction of the scan as SQL."""
        return column.desc() if self.down else column.asc()


def range_of(wanted: Filter, before: str | None) -> IdRange:
    """The ids older than ``before`` that the filter's time allows: ids grow with time, as far as clocks agree."""
    latest = None if wanted.until_us is None else id_at(wanted.until_us + CLOCK_SKEW_US)
    starts = [each for each in (before, latest) if each is not None]
    stop = None if wanted.since_us is None else id_at(wanted.since_us - CLOCK_SKEW_US)
    return IdRange(start=min(starts, default=None), stop=stop)


def range_up(wanted: Filter, after: str | None) -> IdRange:
    """As :func:`range_of`, upwards: the ids newer than ``after``."""
    ids = range_of(wanted, None)
    starts = [each for each in (after, ids.stop) if each is not None]
    return IdRange(start=max(starts, default=None), stop=ids.start, down=False)


def scan(
    conn: Connection, wanted: Filter, ids: IdRange, limit: int, text: str = "", *, patience: int = 1
) -> SearchResult:
    """Up to ``limit`` runs in the range that match the filter, and the text where no index finds it.

    Each status is scanned separately, because the index begins with it.
    """
    deadline = time.monotonic() + SCAN_SECONDS * patience
    statuses: list[str | None] = [None]
    if wanted.status is not None and set(wanted.status) != set(STATUSES):
        statuses = [*dict.fromkeys(wanted.status)]
    scans = [_scan_status(conn, wanted, status, ids, limit, text=text, deadline=deadline) for status in statuses]
    stopped = [each.reached for each in scans if each.reached is not None]
    found = sorted((run_id for each in scans for run_id in each.ids), reverse=ids.down)
    if not stopped:
        return SearchResult(found[:limit])
    nearest = max(stopped) if ids.down else min(stopped)  # beyond this id, not every status was scanned
    complete = [run_id for run_id in found if (run_id >= nearest if ids.down else run_id <= nearest)]
    return SearchResult(complete[:limit], nearest if len(complete) < limit else None)


def _scan_status(
    conn: Connection,
    wanted: Filter,
    status: str | None,
    ids: IdRange,
    limit: int,
    *,
    text: str,
    deadline: float,
) -> SearchResult:
    wanted = msgspec.structs.replace(wanted, status=None if status is None else [status])
    if wanted.is_in_list and not text:
        listed, by = wanted.query(), wanted.listed_by
        next_listed = listed.where(*ids.conditions(by)).order_by(ids.order(by)).limit(limit)
        return SearchResult(list(conn.scalars(next_listed)))
    table, by = wanted.table, wanted.order
    indexed, within = _indexed_by(wanted, status)
    searched = _has_text(text, table) if text else []
    found: list[str] = []
    size = FIRST_WINDOW
    if within is attempts.c.run_id and len(page := _first_page(conn, wanted, ids, limit, searched)) == limit:
        return SearchResult(page)
    while True:
        ahead = select(within).where(*indexed, *ids.conditions(within)).order_by(ids.order(within))
        last = conn.scalar(ahead.offset(size - 1).limit(1))
        edge = None if last is None else edge_of_millisecond(str(last), down=ids.down)
        window = ids if edge is None else msgspec.structs.replace(ids, stop=edge)
        matching = select(table.c.id).where(*wanted.conditions(table), *window.conditions(by), *searched)
        found += conn.scalars(matching.order_by(ids.order(by)).limit(limit - len(found))).all()
        if edge is None or len(found) >= limit:
            return SearchResult(found)
        if time.monotonic() > deadline:
            return SearchResult(found, edge)
        ids = msgspec.structs.replace(ids, start=edge)
        size = min(size * 4, LARGEST_WINDOW)


def _first_page(conn: Connection, wanted: Filter, ids: IdRange, limit: int, searched: list[Any]) -> list[str]:
    """Those of the next runs in a final status that match: enough for most pages, by a statement whose plan does not
    depend on how many runs lie between two ids.
    """
    assert wanted.status is not None
    indexed, ended = _indexed_by(wanted, wanted.status[0])
    ahead = select(ended).where(*indexed, *ids.conditions(ended)).order_by(ids.order(ended))
    next_ones = ahead.limit(literal(FIRST_WINDOW, literal_execute=True)).subquery()
    matching = select(wanted.table.c.id).join(next_ones, wanted.order == next_ones.c.run_id)
    matching = matching.where(*wanted.conditions(wanted.table), *searched).order_by(ids.order(next_ones.c.run_id))
    return list(conn.scalars(matching.limit(limit)))


def _indexed_by(wanted: Filter, status: str | None) -> tuple[list[Any], ColumnElement[str]]:
    """What an index finds of the filter, and the ids there: in one table, since a window may have many rows."""
    if wanted.user:  # a user's runs have an index of their own
        of_user = Filter(tenant=wanted.tenant, user=wanted.user)
        return of_user.conditions(of_user.table), of_user.table.c.id
    if status in TERMINAL:
        return [attempts.c.status == literal(status, literal_execute=True)], attempts.c.run_id
    return [] if status is None else [has_status(status)], wanted.order


def find_by_text(conn: Connection, wanted: Filter, text: str, limit: int) -> SearchResult:
    """The runs that an index finds by the text: their id or its beginning, their live key, or their payload hash."""
    ids: set[str] = set()
    for query in _indexed(wanted, text, limit):
        ids |= {known for each in conn.scalars(query) if (known := checked_id(each)) is not None}
    if not ids:
        return SearchResult([])
    matching = select(runs.c.id).where(*wanted.conditions(), runs.c.id.in_(sorted(ids)[-MAX_SAME_PAYLOAD:]))
    return SearchResult(list(conn.scalars(matching.order_by(runs.c.id.desc()).limit(limit))))


def _indexed(wanted: Filter, text: str, limit: int) -> list[Any]:
    same = Filter(tenant=wanted.tenant, user=wanted.user, payload_hash=text.lower()).conditions(submitted)
    found = [_by_key(wanted, text), select(submitted.c.id).where(*same).limit(MAX_SAME_PAYLOAD)]
    digits = digits_of(text)
    if digits is not None:
        near = begins_with(runs.c.id, digits)
        found.append(select(runs.c.id).where(near, *wanted.conditions()).order_by(runs.c.id.desc()).limit(limit))
    return found


def _by_key(wanted: Filter, key: str) -> Any:
    """The runs that keys of this name refer to."""
    own = [keys.c.key == key, keys.c.kind == literal(RUN, literal_execute=True)]  # so that the partial index is used
    own.append(in_scope_of(wanted.tenant, wanted.user))
    return select(keys.c.attempt).where(*own).limit(MAX_USERS)


def _has_text(text: str, table: Table) -> list[Any]:
    """Matches what no index finds by the text: the end of an id, or a key that has expired."""
    ways: list[Any] = [table.c.idempotency_key == text]
    digits = digits_of(text)
    if digits is not None:
        ways.append(ends_with(table.c.id, digits))
    return [or_(*ways)]


def rows(conn: Connection, ids: Sequence[str], tenant: str, user: str | None = None) -> list[RunRow]:
    """Those of the runs that belong to the tenant, or to one user of it; newest first."""
    if not ids:
        return []
    query = select(*_ROW).where(runs.c.id.in_(list(ids)), runs.c.tenant == tenant)
    if user is not None:
        query = query.where(runs.c.user_id == user)
    return [RunRow(**row) for row in conn.execute(query.order_by(runs.c.id.desc())).mappings()]


def count_newer(conn: Connection, wanted: Filter, first: str | None, most: int = 1000) -> int:
    """How many of the next ``most`` runs after the first of a list match its filter."""
    newer = IdRange(start=first, down=False)
    next_ones = select(submitted.c.id).where(*newer.conditions(submitted.c.id)).order_by(submitted.c.id)
    looked = msgspec.structs.replace(newer, stop=conn.scalar(next_ones.offset(most - 1).limit(1)))
    matching = (*wanted.conditions(wanted.table), *looked.conditions(wanted.order))
    return conn.scalar(select(func.count()).select_from(wanted.table).where(*matching)) or 0


def last_lines(conn: Connection, run_id: str, limit: int) -> list[LogLine]:
    """The last lines of a run's log, oldest first."""
    columns = [run_logs.c[name] for name in LogLine.__struct_fields__]
    latest = (run_logs.c.fence.desc(), run_logs.c.line.desc())
    found = conn.execute(select(*columns).where(run_logs.c.run_id == run_id).order_by(*latest).limit(limit)).all()
    return [LogLine(*row) for row in reversed(found)]


def last_steps(conn: Connection, run_id: str) -> list[Step]:
    """The last steps of a run's timeline, oldest first."""
    columns = [run_steps.c[name] for name in Step.__struct_fields__]
    query = select(*columns).where(run_steps.c.run_id == run_id).order_by(run_steps.c.version.desc())
    return [Step(*row) for row in reversed(conn.execute(query.limit(MAX_STEPS)).all())]


def retries(conn: Connection, run: Run, limit: int) -> list[str]:
    """The runs that are retries of this one, oldest first. They have its payload, which is indexed."""
    same = select(runs.c.id, runs.c.retry_of).where(
        has_digest(runs.c.payload_hash, run.payload_hash), runs.c.tenant == run.tenant
    )
    some = same.limit(MAX_SAME_PAYLOAD).subquery()
    query = select(some.c.id).where(some.c.retry_of == run.id)
    return list(conn.scalars(query.order_by(some.c.id).limit(limit)))
