"""The SQL of the overview. Every query is bounded, by a window of time or by a number of rows.

Run ids grow with time, so a window of time is a range of ids; an index finds the newest runs of each status.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct
from sqlalchemy import BindParameter, Connection, Select, bindparam, func, select

from semel.db.dialect import StatementContext
from semel.db.schema import active, runs
from semel.runs.store import pauses, queries, quotas
from semel.runs.store.queries import Filter, has_status
from semel.runs.types import MICRO, Pause, Quota, Usage, WorkerInfo, id_at
from semel.service.webhooks.deliveries import FailingSubscription, list_failing

MAX_COUNTED = 10_000
"""Pending and running runs are counted up to this number: a backlog can be of any length."""
SAMPLE = 500
"""The newest runs of each final status, from which percentiles are computed."""
MAX_AGE = 7 * 86400
"""Seconds before the window in which the runs of the sample may have been submitted."""
LATE = 60
"""Seconds after which a run that is due but was not started is shown as stuck."""
MAX_STUCK = 10
"""Stuck runs shown, of each kind."""
MAX_LATE = 200
"""Late runs that are read. They are shown by queue and model, whose runs wait for the same reason."""
MAX_RUNNING = 200
"""Running runs that are read to show which worker holds them."""
FAILURES = 8
FAILED_WITHIN = 7 * 86400
"""Seconds for which a failure is shown."""
MAX_USERS = 200
"""Users whose quotas are read: the busiest and the latest."""
MAX_USAGES = 30
"""Users whose usage is computed, those with a quota first."""
FINAL = ("SUCCEEDED", "FAILED", "CANCELLED")


class Audience(Struct, frozen=True):
    """Whose runs are shown: those of a tenant, or of one user of it."""

    tenant: str
    user: str | None = None

    @property
    def is_main(self) -> bool:
        """Whether they see all runs of the main tenant, which owns what all tenants share."""
        return self.user is None and not self.tenant

    def filter(self, *status: str) -> Filter:
        """Their runs, of these statuses; of any status where none is given."""
        return Filter(tenant=self.tenant, user=self.user, status=status or None)

    def newest(self, query: Select[Any], status: str, since_us: int) -> Select[Any]:
        """Their runs that ended so and were submitted since then, newest first. Each of the two orders has an index."""
        found = query.where(*self.filter(status).conditions())
        if self.user is None:  # by the id of the attempt, not of the run, which SQLite would sort
            return found.where(runs.c.id >= id_at(since_us)).order_by(runs.c.ended_id.desc())
        return found.where(runs.c.user_id != "", runs.c.created_us >= since_us).order_by(runs.c.created_us.desc())


class EndedRun(Struct, frozen=True):
    """A run that has ended, with what percentiles need."""

    status: str
    user: str
    created_us: int
    due_us: int
    started_us: int | None
    finished_us: int

    @property
    def lag(self) -> float | None:
        """Seconds from when it was due to its first start. A retry moves the due time: then from its submission."""
        if self.started_us is None:
            return None
        due = self.due_us if self.due_us <= self.started_us else self.created_us
        return max(0, self.started_us - due) / MICRO

    @property
    def seconds(self) -> float | None:
        """From the start of its first attempt to its end."""
        return None if self.started_us is None else max(0, self.finished_us - self.started_us) / MICRO


class StuckRun(Struct, frozen=True):
    """A lost run, whose lease has expired (``lease_until_us``), or a late one, which is due and was not started."""

    id: str
    model: str
    user: str
    queue: str
    worker: str | None
    due_us: int
    lease_until_us: int | None
    reason: str = ""
    others: int = 0
    """How many more runs of the same queue and model are late, among the ``MAX_LATE`` oldest."""


class DueRun(Struct, frozen=True):
    """A run that waits, and since when it has been due."""

    id: str
    due_us: int


class StalledRun(Struct, frozen=True):
    """A run whose worker is alive, but whose progress has not moved since then."""

    id: str
    model: str
    user: str
    worker: str
    progress: float | None
    since_us: int


class RunningRun(Struct, frozen=True):
    """A run that a worker holds."""

    id: str
    model: str
    user: str
    worker: str
    started_us: int | None
    progress: float | None


class Failure(Struct, frozen=True):
    """A run that failed, with its error."""

    id: str
    model: str
    user: str
    finished_us: int
    last_error: str | None
    attempts: int
    errors: int
    max_attempts: int
    losts: int
    max_lost: int


class QuotaUse(Struct, frozen=True, kw_only=True):
    """A user's active runs, and what they use of their quota."""

    user: str
    active: int
    usage: Usage | None
    quota: Quota | None


class Snapshot(Struct, frozen=True, kw_only=True):
    """The present state of the audience's runs."""

    pending: int
    running: int
    oldest_due: DueRun | None
    ended: list[EndedRun]
    sampled: frozenset[str]
    """The final statuses of which only the newest runs were read."""
    lost: list[StuckRun]
    late: list[StuckRun]
    stalled: list[StalledRun]
    running_runs: list[RunningRun]
    failures: list[Failure]
    quotas: list[QuotaUse]
    workers: list[WorkerInfo]
    pauses: list[Pause]
    """Of all tenants, so only the main tenant's operators see them."""
    webhooks: list[FailingSubscription]


def count_runs(conn: Connection, audience: Audience, starts: Sequence[int], step_us: int) -> dict[int, dict[str, int]]:
    """The runs submitted in each of these steps by status; keys are the steps' starts.

    One query for each step: planners use the index for a range given as values, but not for a joined one.
    """
    low: BindParameter[Any] = bindparam("low")
    high: BindParameter[Any] = bindparam("high")
    query = select(runs.c.status, func.count()).where(*audience.filter().conditions()).group_by(runs.c.status)
    if audience.user is None:
        query = query.where(runs.c.id >= low, runs.c.id < high)
    else:
        query = query.where(runs.c.user_id != "", runs.c.created_us >= low, runs.c.created_us < high)
    found: dict[int, dict[str, int]] = {}
    for start in starts:
        end = start + step_us
        bounds = (id_at(start), id_at(end)) if audience.user is None else (start, end)
        rows = conn.execute(query, {"low": bounds[0], "high": bounds[1]})
        found[start] = {row.status: row[1] for row in rows}
    return found


def take_snapshot(
    conn: Connection, audience: Audience, since_us: int, now_us: int, terms: StatementContext
) -> Snapshot:
    """The present state, and the runs that ended since ``since_us``.

    ``now_us`` is the hosts' clock, from which ids are made; leases expire by the database's clock. Workers and webhooks
    are listed only for callers who see everybody's runs.
    """
    now = quotas.read_clock(conn, terms)
    ended, sampled = _ended(conn, audience, since_us)
    pending, running = _count_by_user(conn, audience, "PENDING"), _count_by_user(conn, audience, "RUNNING")
    return Snapshot(
        pending=pending.total(),
        running=running.total(),
        oldest_due=_oldest_due(conn, audience, now),
        ended=ended,
        sampled=sampled,
        lost=_lost(conn, audience, now),
        late=_late(conn, audience, now, terms),
        stalled=_stalled(conn, audience),
        running_runs=_running(conn, audience),
        failures=_failures(conn, audience, now_us),
        quotas=_quotas(conn, audience, pending + running, ended, now),
        workers=queries.list_workers(conn, terms) if audience.user is None else [],
        pauses=pauses.list_pauses(conn) if audience.is_main else [],
        webhooks=list_failing(conn, audience.tenant, now) if audience.user is None else [],
    )


def _count_by_user(conn: Connection, audience: Audience, status: str) -> Counter[str]:
    """Runs of the status by user, among the first ``MAX_COUNTED``; the order makes the planner use the index."""
    query = select(runs.c.user_id).where(*audience.filter(status).conditions())
    first = query.order_by(runs.c.active_id).limit(MAX_COUNTED + 1).subquery()
    rows = conn.execute(select(first.c.user_id, func.count()).group_by(first.c.user_id))
    return Counter({row.user_id: row[1] for row in rows})


def _oldest_due(conn: Connection, audience: Audience, now: int) -> DueRun | None:
    """The longest waiting of the oldest pending runs."""
    query = select(runs.c.id, runs.c.due_us).where(*audience.filter("PENDING").conditions(), runs.c.due_us <= now)
    some = query.order_by(runs.c.active_id).limit(MAX_STUCK).subquery()
    row = conn.execute(select(some).order_by(some.c.due_us).limit(1)).one_or_none()
    return None if row is None else DueRun(*row)


def _ended(conn: Connection, audience: Audience, since_us: int) -> tuple[list[EndedRun], frozenset[str]]:
    """The newest runs of each final status that ended since then; and the statuses of which there are more."""
    names = ("status", "user_id", "created_us", "due_us", "started_us", "finished_us")
    query = select(*(runs.c[name] for name in names))
    found: list[EndedRun] = []
    sampled: set[str] = set()
    for status in FINAL:
        newest = conn.execute(audience.newest(query, status, since_us - MAX_AGE * MICRO).limit(SAMPLE)).all()
        found += [EndedRun(*row) for row in newest if row.finished_us >= since_us]
        if len(newest) == SAMPLE:
            sampled.add(status)
    return found, frozenset(sampled)


_STUCK = [runs.c[name] for name in ("id", "model", "user_id", "queue", "worker", "due_us", "lease_until_us")]


def _lost(conn: Connection, audience: Audience, now: int) -> list[StuckRun]:
    """Runs whose lease has expired, and which no sweeper has recovered yet."""
    query = select(*_STUCK).where(*audience.filter("RUNNING").conditions(), runs.c.lease_until_us < now)
    return [StuckRun(*row) for row in conn.execute(query.order_by(runs.c.lease_until_us).limit(MAX_STUCK))]


def _late(conn: Connection, audience: Audience, now: int, terms: StatementContext) -> list[StuckRun]:
    """Runs that have been due for long: the oldest of each queue and model, with the reason why it waits."""
    columns = [active.c[name] for name in ("id", "model", "user_id", "queue", "worker", "due_us", "lease_until_us")]
    late = (active.c.lease_until_us.is_(None), active.c.due_us < now - LATE * MICRO)
    query = select(*columns).where(*audience.filter().conditions(active), *late)
    kinds: dict[tuple[str, str], list[StuckRun]] = {}
    for row in conn.execute(query.order_by(active.c.id).limit(MAX_LATE)):
        kinds.setdefault((row.queue, row.model), []).append(StuckRun(*row))
    found = []
    for same in list(kinds.values())[:MAX_STUCK]:
        waiting = queries.waiting(conn, same[0].id, terms, place=False)
        if waiting is not None:
            found.append(msgspec.structs.replace(same[0], reason=waiting.reason, others=len(same) - 1))
    return found


def _stalled(conn: Connection, audience: Audience) -> list[StalledRun]:
    columns = [runs.c[name] for name in ("id", "model", "user_id", "worker", "progress", "progress_us")]
    leased = select(active.c.id).where(active.c.lease_until_us.is_not(None))  # SQLite would begin with all runs
    stalled = (runs.c.active_id.in_(leased), queries.STALLED)
    query = select(*columns).where(*audience.filter("RUNNING").conditions(), *stalled)
    return [StalledRun(*row) for row in conn.execute(query.order_by(runs.c.progress_us).limit(MAX_STUCK))]


def _running(conn: Connection, audience: Audience) -> list[RunningRun]:
    columns = [runs.c[name] for name in ("id", "model", "user_id", "worker", "started_us", "progress")]
    query = select(*columns).where(*audience.filter("RUNNING").conditions())
    return [RunningRun(*row) for row in conn.execute(query.order_by(runs.c.active_id).limit(MAX_RUNNING))]


def _failures(conn: Connection, audience: Audience, now_us: int) -> list[Failure]:
    counts = ("attempts", "errors", "max_attempts", "losts", "max_lost")
    query = select(*(runs.c[name] for name in ("id", "model", "user_id", "finished_us", "last_error", *counts)))
    recent = (
        has_status("FAILED"),
        runs.c.ended_tenant == audience.tenant,  # so that the index of failures is used
        runs.c.finished_us >= now_us - FAILED_WITHIN * MICRO,
    )
    latest = query.where(*audience.filter().conditions(), *recent).order_by(runs.c.finished_us.desc())
    return [Failure(*row) for row in conn.execute(latest.limit(FAILURES))]


def _quotas(
    conn: Connection, audience: Audience, active: Counter[str], ended: Sequence[EndedRun], now: int
) -> list[QuotaUse]:
    """The usage of users who have active runs, or had some lately."""
    busy = [user for user, _ in active.most_common(MAX_USAGES)]
    recent = dict.fromkeys(each.user for each in ended)
    users = [user for user in dict.fromkeys([audience.user or "", *busy, *recent]) if user][:MAX_USERS]
    found = quotas.quotas_of(conn, [(audience.tenant, user) for user in users])
    users.sort(key=lambda user: (audience.tenant, user) not in found)
    uses = []
    for user in users[:MAX_USAGES]:
        quota = found.get((audience.tenant, user))
        usage = None if quota is None else quotas.usage(conn, (audience.tenant, user), now, quota)
        uses.append(QuotaUse(user=user, active=active[user], usage=usage, quota=quota))
    return uses
