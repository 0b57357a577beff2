"""What the pages of runs ask the database besides the engine's questions: each is bounded, whatever there is.

A list walks from the newest run down, a window of rows at a time, until its page is full or its time is up: then the
page says how far it looked, and goes on from there when it is asked to. So a filter that fits one run in a million
costs no more than one that fits all.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct
from sqlalchemy import Connection, Text, case, cast, func, literal, or_, select

from semel.dashboard.overview.windows import id_at
from semel.db.schema import run_events, run_keys, run_logs, runs
from semel.runs.store.queries import STALLED, Filter
from semel.runs.types import MICRO, STATUSES, LogLine, Run, Status, Step, checked_id

PATIENCE = 0.25
"""Seconds that a page looks for runs that fit, before it shows what it has."""
FIRST_WINDOW = 300
LARGEST_WINDOW = 20_000
"""Rows that are looked at between two looks at the clock: few at first, since most pages are full at once."""
SKEW_US = 3600 * MICRO
"""How far the clock that made a run's id may be from the database's, which says when the run was created."""
SAME_PAYLOAD = 10_000
"""Runs of one payload among which a search or a retry is looked for."""
MOST_USERS = 10_000
"""Users whose keys are looked at, one after the other: a key is a user's."""
SHORTEST_PIECE = 6
"""Digits of an id that name it."""
LONGEST_ERROR = 300
LAST_ID = "ffffffff-ffff-ffff-ffff-ffffffffffff"

_HEX = re.compile(r"[0-9a-f-]+")


class RunRow(Struct, frozen=True, kw_only=True):
    """A run as it stands in a list."""

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
    max_attempts: int
    losts: int
    error: str | None
    stalled_us: int | None = None
    """Since when it makes no progress though its worker lives."""

    @property
    def done(self) -> bool:
        """True when nothing will change any more."""
        return self.finished_us is not None

    @property
    def seconds(self) -> float | None:
        """From its first start to its end."""
        if self.started_us is None or self.finished_us is None:
            return None
        return (self.finished_us - self.started_us) / MICRO


_PLAIN = [name for name in RunRow.__struct_fields__ if name not in ("user", "error", "note", "stalled_us")]
_LINE = [
    *(runs.c[name] for name in _PLAIN),
    runs.c.user_id.label("user"),
    func.substr(runs.c.last_error, 1, LONGEST_ERROR).label("error"),
    func.substr(runs.c.note, 1, LONGEST_ERROR).label("note"),
    case((STALLED, runs.c.progress_us)).label("stalled_us"),
]


class SearchResult(Struct, frozen=True):
    """Ids, newest first; ``reached`` is how far it was looked when the time was up before the page was full."""

    ids: list[str]
    reached: str | None = None


class IdRange(Struct, frozen=True, kw_only=True):
    """The part of the ids that is walked: from ``start`` on (without it), down or up, as far as ``stop`` (with it)."""

    start: str | None = None
    stop: str | None = None
    down: bool = True

    def conditions(self) -> list[Any]:
        """As SQL."""
        found: list[Any] = []
        if self.start is not None:
            found.append(runs.c.id < self.start if self.down else runs.c.id > self.start)
        if self.stop is not None:
            found.append(runs.c.id >= self.stop if self.down else runs.c.id <= self.stop)
        return found


def whole_moment(run_id: str, *, down: bool) -> str:
    """The edge of the millisecond in which the id was made: it tells nobody the id of another's run."""
    moment = run_id[:13]  # twelve digits and a dash
    return f"{moment}-0000-0000-000000000000" if down else f"{moment}-ffff-ffff-ffffffffffff"


def stretch_of(wanted: Filter, cursor: str | None) -> IdRange:
    """Where to look for what was created in the filter's time: ids grow with it, as far as clocks agree."""
    latest = None if wanted.until_us is None else id_at(wanted.until_us + SKEW_US)
    starts = [each for each in (cursor, latest) if each is not None]
    stop = None if wanted.since_us is None else id_at(wanted.since_us - SKEW_US)
    return IdRange(start=min(starts, default=None), stop=stop)


def scan(conn: Connection, wanted: Filter, stretch: IdRange, limit: int, more: Sequence[Any] = ()) -> SearchResult:
    """Up to so many that fit the filter (and ``more``) in their order; each status has an order of its own."""
    deadline = time.monotonic() + PATIENCE
    statuses: list[str | None] = [None]
    if wanted.status is not None and set(wanted.status) != set(STATUSES):
        statuses = [*dict.fromkeys(wanted.status)]
    walks = [_walk(conn, _of(wanted, each), stretch, limit, more=more, deadline=deadline) for each in statuses]
    cut = [each.reached for each in walks if each.reached is not None]
    every = sorted((run_id for each in walks for run_id in each.ids), reverse=stretch.down)
    if not cut:
        return SearchResult(every[:limit])
    nearest = max(cut) if stretch.down else min(cut)  # beyond that, some were not looked at
    whole = [run_id for run_id in every if (run_id >= nearest if stretch.down else run_id <= nearest)]
    return SearchResult(whole[:limit], nearest if len(whole) < limit else None)


def _of(wanted: Filter, status: str | None) -> Filter:
    return msgspec.structs.replace(wanted, status=None if status is None else [status])


def _walk(
    conn: Connection, wanted: Filter, stretch: IdRange, limit: int, *, more: Sequence[Any], deadline: float
) -> SearchResult:
    order = runs.c.id.desc() if stretch.down else runs.c.id.asc()
    lane = [runs.c.status == literal(each, literal_execute=True) for each in wanted.status or ()]
    if wanted.user:  # their own runs alone are walked, in an index of theirs
        lane = Filter(tenant=wanted.tenant, user=wanted.user).conditions()
    found: list[str] = []
    size = FIRST_WINDOW
    while True:
        ahead = select(runs.c.id).where(*lane, *stretch.conditions()).order_by(order)
        last = conn.scalar(ahead.offset(size - 1).limit(1))
        edge = None if last is None else whole_moment(str(last), down=stretch.down)
        window = stretch if edge is None else msgspec.structs.replace(stretch, stop=edge)
        fitting = select(runs.c.id).where(*wanted.conditions(), *window.conditions(), *more).order_by(order)
        found += conn.scalars(fitting.limit(limit - len(found))).all()
        if edge is None or len(found) >= limit:
            return SearchResult(found)
        if time.monotonic() > deadline:
            return SearchResult(found, edge)
        stretch = msgspec.structs.replace(stretch, start=edge)
        size = min(size * 4, LARGEST_WINDOW)


def find_by_text(conn: Connection, wanted: Filter, text: str, limit: int) -> SearchResult:
    """The runs that the text names and an index finds: by id or its beginning, live key, or payload hash."""
    ids: set[str] = set()
    for question in _indexed(wanted, text, limit):
        ids |= {known for each in conn.scalars(question) if (known := checked_id(each)) is not None}
    if not ids:
        return SearchResult([])
    fitting = select(runs.c.id).where(*wanted.conditions(), runs.c.id.in_(sorted(ids)[-SAME_PAYLOAD:]))
    return SearchResult(list(conn.scalars(fitting.order_by(runs.c.id.desc()).limit(limit))))


def _indexed(wanted: Filter, text: str, limit: int) -> list[Any]:
    own = Filter(tenant=wanted.tenant, user=wanted.user, payload_hash=text.lower()).conditions()
    questions = [_keyed(wanted, text), select(runs.c.id).where(*own).limit(SAME_PAYLOAD)]
    digits = piece_of(text)
    if digits is not None:
        first, last = checked_id(digits.ljust(32, "0")), checked_id(digits.ljust(32, "f"))
        near = runs.c.id.between(first, last)
        questions.append(select(runs.c.id).where(near, *wanted.conditions()).order_by(runs.c.id.desc()).limit(limit))
    return questions


def _keyed(wanted: Filter, key: str) -> Any:
    """Runs of a live key: of one user's, or of each user's, by stepping from one user to the next in the index."""
    own = [run_keys.c.tenant == wanted.tenant, run_keys.c.kind == "key", run_keys.c.key == key]
    if wanted.user is not None:
        return select(run_keys.c.job_id).where(*own, run_keys.c.user_id == wanted.user)
    least = select(func.min(run_keys.c.user_id).label("name")).where(run_keys.c.tenant == wanted.tenant)
    users = least.cte("users", recursive=True)
    following = least.where(run_keys.c.user_id > users.c.name).correlate(users).scalar_subquery()
    users = users.union_all(select(following).where(users.c.name.is_not(None)))
    some = select(users.c.name).limit(MOST_USERS).subquery()
    return select(run_keys.c.job_id).where(*own, run_keys.c.user_id == some.c.name)


def piece_of(text: str) -> str | None:
    """The digits of an id, or of a piece of one; None where the text is neither."""
    low = text.lower()
    digits = low.replace("-", "")
    return digits if _HEX.fullmatch(low) and SHORTEST_PIECE <= len(digits) <= 32 else None


def unindexed(text: str) -> list[Any]:
    """What else the text may name, of which there is no index: the end of an id, or a key that has expired."""
    ways: list[Any] = [runs.c.idempotency_key == text]
    digits = piece_of(text)
    if digits is not None:
        padded = digits.rjust(32, "_")
        shape = "-".join((padded[:8], padded[8:12], padded[12:16], padded[16:20], padded[20:]))
        ways.append(cast(runs.c.id, Text).like(shape))
    return [or_(*ways)]


def lines(conn: Connection, ids: Sequence[str], tenant: str, user: str | None = None) -> list[RunRow]:
    """These runs for a list, newest first: those of the tenant, or of one user of it."""
    if not ids:
        return []
    query = select(*_LINE).where(runs.c.id.in_(list(ids)), runs.c.tenant == tenant)
    if user is not None:
        query = query.where(runs.c.user_id == user)
    return [RunRow(**row) for row in conn.execute(query.order_by(runs.c.id.desc())).mappings()]


def newer(conn: Connection, wanted: Filter, first: str | None, most: int = 1000) -> int:
    """How many of the runs that came after the first of a list fit it, among the next so many."""
    beyond = IdRange(start=first, down=False).conditions()
    edge = select(runs.c.id).where(*beyond).order_by(runs.c.id).offset(most - 1).limit(1).scalar_subquery()
    upto = runs.c.id <= func.coalesce(edge, literal(LAST_ID, runs.c.id.type))
    return conn.scalar(select(func.count()).select_from(runs).where(*wanted.conditions(), *beyond, upto)) or 0


def tail(conn: Connection, run_id: str, limit: int) -> list[LogLine]:
    """The last lines of a run's log, oldest first."""
    columns = [run_logs.c[name] for name in LogLine.__struct_fields__]
    latest = (run_logs.c.fence.desc(), run_logs.c.line.desc())
    rows = conn.execute(select(*columns).where(run_logs.c.run_id == run_id).order_by(*latest).limit(limit)).all()
    return [LogLine(*row) for row in reversed(rows)]


def last_steps(conn: Connection, run_id: str, limit: int) -> list[Step]:
    """The last steps of a run's life, oldest first."""
    columns = [run_events.c[name] for name in Step.__struct_fields__]
    query = select(*columns).where(run_events.c.run_id == run_id).order_by(run_events.c.version.desc()).limit(limit)
    return [Step(*row) for row in reversed(conn.execute(query).all())]


def retries(conn: Connection, run: Run, limit: int) -> list[str]:
    """The runs that were made of this one by a retry, oldest first. They have its payload, which has an index."""
    same = select(runs.c.id, runs.c.retry_of).where(
        runs.c.payload_hash == run.payload_hash, runs.c.tenant == run.tenant
    )
    some = same.limit(SAME_PAYLOAD).subquery()
    query = select(some.c.id).where(some.c.retry_of == run.id)
    return list(conn.scalars(query.order_by(some.c.id).limit(limit)))
