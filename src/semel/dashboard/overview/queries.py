"""What the overview asks the database. Every question has an end: a window of time, or a number of rows.

Ids grow with time, so a window of time is a range of them; and of each state the newest are found by an index.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct
from sqlalchemy import BindParameter, Connection, Select, bindparam, func, literal, select

from semel.dashboard.overview.windows import Window, id_at
from semel.db.dialect import StatementContext
from semel.db.schema import runs
from semel.runs.store import queries, quotas
from semel.runs.store.queries import Filter
from semel.runs.types import MICRO, Quota, Usage, WorkerInfo

MOST_COUNTED = 10_000
"""Runs that wait or run are counted up to here: a backlog may be of any length."""
SAMPLE = 500
"""Runs of each end from which percentiles are taken: the newest."""
LONGEST = 7 * 86400
"""Seconds before the window in which a run may have been submitted to be among them."""
LATE = 60
"""Seconds after which a run that is due, and that nobody has begun, is shown as stuck."""
STUCK = 10
"""Stuck runs that are shown, of each kind."""
EXPLAINED = 3
"""Kinds of waiting runs of which it is found out why they wait."""
RUNNING = 200
"""Running runs of which it is shown who holds them."""
FAILURES = 8
FAILED_WITHIN = 7 * 86400
"""Seconds for which a failure is shown."""
NAMES = 200
"""Users who are asked for a quota: those with the most active runs, and the latest; of so many"""
PEOPLE = 30
"""the use is looked at, first of those who have one."""
ENDS = ("SUCCEEDED", "FAILED", "CANCELLED")


class Audience(Struct, frozen=True):
    """Whose runs are looked at: a tenant's, or only those of one user in it."""

    tenant: str
    user: str | None = None

    def filter(self, *status: str) -> Filter:
        """These, of these states; of any where none is named."""
        return Filter(tenant=self.tenant, user=self.user, status=status or None)

    def newest(self, query: Select[Any], status: str, since_us: int) -> Select[Any]:
        """The newest of one state, submitted since then. Of a state, and of a user, there is an index in that order."""
        found = query.where(*self.filter(status).conditions())
        if self.user is None:
            return found.where(runs.c.id >= id_at(since_us)).order_by(runs.c.id.desc())
        return found.where(runs.c.user_id != "", runs.c.created_us >= since_us).order_by(runs.c.created_us.desc())


class EndedRun(Struct, frozen=True):
    """A run that is over, as far as percentiles need it."""

    status: str
    user: str
    created_us: int
    due_us: int
    started_us: int | None
    finished_us: int

    @property
    def lag(self) -> float | None:
        """Seconds that it waited once it was due; a retry has moved that time, then they count from the submission."""
        if self.started_us is None:
            return None
        due = self.due_us if self.due_us <= self.started_us else self.created_us
        return max(0, self.started_us - due) / MICRO

    @property
    def seconds(self) -> float | None:
        """From the beginning of its first attempt to its end."""
        return None if self.started_us is None else max(0, self.finished_us - self.started_us) / MICRO


class StuckRun(Struct, frozen=True):
    """A run that does not get on. ``lease_until_us``: that of one whose worker is silent; else it is due and waits."""

    id: str
    model: str
    user: str
    queue: str
    worker: str | None
    due_us: int
    lease_until_us: int | None
    why: str = ""


class Stalled(Struct, frozen=True):
    """A run whose worker lives, and whose progress has not moved since then."""

    id: str
    model: str
    user: str
    worker: str
    progress: float | None
    since_us: int


class RunningRun(Struct, frozen=True):
    """A run that somebody works on."""

    id: str
    model: str
    user: str
    worker: str
    started_us: int | None
    progress: float | None


class Failure(Struct, frozen=True):
    """A run that failed, and with what."""

    id: str
    model: str
    user: str
    finished_us: int
    attempts: int
    last_error: str | None


class QuotaUse(Struct, frozen=True, kw_only=True):
    """What a user uses of what they may."""

    user: str
    active: int
    usage: Usage | None
    quota: Quota | None


class Snapshot(Struct, frozen=True, kw_only=True):
    """Everything that the overview shows of the present."""

    pending: int
    running: int
    oldest_due_us: int | None
    ended: list[EndedRun]
    cut: frozenset[str]
    """The ends of which only the newest runs were looked at."""
    stuck: list[StuckRun]
    late: list[StuckRun]
    stalled: list[Stalled]
    held: list[RunningRun]
    failures: list[Failure]
    uses: list[QuotaUse]
    workers: list[WorkerInfo]


def counts(conn: Connection, whose: Audience, starts: Sequence[int], step_us: int) -> dict[int, dict[str, int]]:
    """How the runs stand that were submitted in each of these steps, by the time at which it starts.

    One question for each: of a range that is given as values every planner knows the index, of a joined one not.
    """
    low: BindParameter[Any] = bindparam("low")
    high: BindParameter[Any] = bindparam("high")
    query = select(runs.c.status, func.count()).where(*whose.filter().conditions()).group_by(runs.c.status)
    if whose.user is None:
        query = query.where(runs.c.id >= low, runs.c.id < high)
    else:
        query = query.where(runs.c.user_id != "", runs.c.created_us >= low, runs.c.created_us < high)
    found: dict[int, dict[str, int]] = {}
    for start in starts:
        ends = (start, start + step_us)
        first, last = ends if whose.user is not None else (id_at(ends[0]), id_at(ends[1]))
        rows = conn.execute(query, {"low": first, "high": last})
        found[start] = {row.status: row[1] for row in rows}
    return found


def take_snapshot(conn: Connection, whose: Audience, window: Window, now_us: int, terms: StatementContext) -> Snapshot:
    """All else, by the database's clock; ``now_us`` is the clock of ids. Workers only for who sees everybody's runs."""
    now = quotas.read_clock(conn, terms)
    ended, cut = _ended(conn, whose, window, now_us)
    pending, running = _users(conn, whose, "PENDING"), _users(conn, whose, "RUNNING")
    late = _late(conn, whose, now)
    return Snapshot(
        pending=pending.total(),
        running=running.total(),
        oldest_due_us=_oldest_due(conn, whose, now),
        ended=ended,
        cut=cut,
        stuck=_lost(conn, whose, now),
        late=_explained(conn, late, terms),
        stalled=_stalled(conn, whose),
        held=_held(conn, whose),
        failures=_failures(conn, whose, now_us),
        uses=_uses(conn, whose, pending + running, ended, now),
        workers=queries.list_workers(conn, terms) if whose.user is None else [],
    )


def _users(conn: Connection, whose: Audience, status: str) -> Counter[str]:
    """How many runs in that state each user has, among the first of them; their order names the index."""
    query = select(runs.c.user_id).where(*whose.filter(status).conditions())
    first = query.order_by(runs.c.id).limit(MOST_COUNTED + 1).subquery()
    rows = conn.execute(select(first.c.user_id, func.count()).group_by(first.c.user_id))
    return Counter({row.user_id: row[1] for row in rows})


def _oldest_due(conn: Connection, whose: Audience, now: int) -> int | None:
    """When the run became due that waits longest, among the first that wait."""
    query = select(runs.c.due_us).where(*whose.filter("PENDING").conditions(), runs.c.due_us <= now)
    some = query.order_by(runs.c.id).limit(STUCK).subquery()
    oldest: int | None = conn.scalar(select(func.min(some.c.due_us)))
    return oldest


def _ended(conn: Connection, whose: Audience, window: Window, now_us: int) -> tuple[list[EndedRun], frozenset[str]]:
    """Of the newest runs of each end those that ended in the window; and the ends of which there are more."""
    start = window.starts(now_us)[0]
    names = ("status", "user_id", "created_us", "due_us", "started_us", "finished_us")
    query = select(*(runs.c[name] for name in names))
    found: list[EndedRun] = []
    cut: set[str] = set()
    for status in ENDS:
        newest = conn.execute(whose.newest(query, status, start - LONGEST * MICRO).limit(SAMPLE)).all()
        found += [EndedRun(*row) for row in newest if row.finished_us >= start]
        if len(newest) == SAMPLE:
            cut.add(status)
    return found, frozenset(cut)


_STUCK = [runs.c[name] for name in ("id", "model", "user_id", "queue", "worker", "due_us", "lease_until_us")]


def _lost(conn: Connection, whose: Audience, now: int) -> list[StuckRun]:
    """Runs whose lease is over: their worker is silent, and nobody has taken them back yet."""
    over = select(*_STUCK).where(*whose.filter("RUNNING").conditions(), runs.c.lease_until_us < now)
    return _stuck(conn, over.order_by(runs.c.lease_until_us))


def _late(conn: Connection, whose: Audience, now: int) -> list[StuckRun]:
    """Runs that have been due for long, and that nobody has begun."""
    due = select(*_STUCK).where(*whose.filter("PENDING").conditions(), runs.c.due_us < now - LATE * MICRO)
    return _stuck(conn, due.order_by(runs.c.id))


def _stalled(conn: Connection, whose: Audience) -> list[Stalled]:
    columns = [runs.c[name] for name in ("id", "model", "user_id", "worker", "progress", "progress_us")]
    query = select(*columns).where(*whose.filter("RUNNING").conditions(), queries.STALLED)
    return [Stalled(*row) for row in conn.execute(query.order_by(runs.c.progress_us).limit(STUCK))]


def _stuck(conn: Connection, query: Select[Any]) -> list[StuckRun]:
    return [StuckRun(*row) for row in conn.execute(query.limit(STUCK))]


def _explained(conn: Connection, late: Sequence[StuckRun], terms: StatementContext) -> list[StuckRun]:
    """Why they wait; it is asked of the first of each queue and model."""
    reasons: dict[tuple[str, str], str] = {}
    for each in late:
        kind = (each.queue, each.model)
        if kind not in reasons and len(reasons) < EXPLAINED:
            told = queries.waiting(conn, each.id, terms)
            reasons[kind] = "" if told is None else told.reason
    return [msgspec.structs.replace(each, why=reasons.pop((each.queue, each.model), "")) for each in late]


def _held(conn: Connection, whose: Audience) -> list[RunningRun]:
    columns = [runs.c[name] for name in ("id", "model", "user_id", "worker", "started_us", "progress")]
    query = select(*columns).where(*whose.filter("RUNNING").conditions())
    return [RunningRun(*row) for row in conn.execute(query.order_by(runs.c.id).limit(RUNNING))]


def _failures(conn: Connection, whose: Audience, now_us: int) -> list[Failure]:
    query = select(*(runs.c[name] for name in ("id", "model", "user_id", "finished_us", "attempts", "last_error")))
    lately = (
        runs.c.status == literal("FAILED", literal_execute=True),
        runs.c.finished_us >= now_us - FAILED_WITHIN * MICRO,
    )
    latest = query.where(*whose.filter().conditions(), *lately).order_by(runs.c.finished_us.desc())
    return [Failure(*row) for row in conn.execute(latest.limit(FAILURES))]


def _uses(
    conn: Connection, whose: Audience, active: Counter[str], ended: Sequence[EndedRun], now: int
) -> list[QuotaUse]:
    """What users use of their quotas: of those who are at work, and of those who were lately."""
    busy = [user for user, _ in active.most_common(PEOPLE)]
    lately = dict.fromkeys(each.user for each in ended)
    people = [user for user in dict.fromkeys([whose.user or "", *busy, *lately]) if user][:NAMES]
    held = quotas.quotas_of(conn, [(whose.tenant, user) for user in people])
    some = sorted(people, key=lambda user: (whose.tenant, user) not in held)[:PEOPLE]
    uses = []
    for user in some:
        quota = held.get((whose.tenant, user))
        usage = None if quota is None else quotas.usage(conn, (whose.tenant, user), now, quota)
        uses.append(QuotaUse(user=user, active=active[user], usage=usage, quota=quota))
    return uses
