"""Quotas without races: usage is counted from rows, under a lock on the user, in the transaction that adds to it.

There is no counter that could drift: a slot is free, once, as soon as its run or its reservation has ended, whichever
process died meanwhile. What ended runs cost is added up, in the transaction that ends them; see ``schema.charges``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any, TypeAlias

from msgspec import Struct, structs
from sqlalchemy import ColumnElement, Connection, bindparam, delete, insert, or_, select, text, update

from semel.db.dialect import Dialect, Statement, StatementContext, hot, transaction
from semel.db.schema import active, quotas, reservations
from semel.errors import CostLimitExceeded, QuotaExceeded, ReservationLost
from semel.runs.store import audit_log
from semel.runs.store.audit_log import Change
from semel.runs.types import COST_PERIODS, COUNTED_LIMITS, DAY_US, EVERYBODY, MICRO, Quota, Usage, checked_id, micros
from semel.types import moment

Person: TypeAlias = tuple[str, str]
"""A tenant and a user."""

EXPIRED_KEPT_US = 3600 * MICRO
"""For how long an expired reservation, which does not count, is kept: its job may just have been created."""

CLEANED_AT_ONCE = 500
"""The most expired reservations of a user that a new one removes, so that it does not take long."""

WAITED_US = 10 * MICRO
"""By how much a reservation may be later than the time of a transaction, which may have waited for a lock."""


class Admission(Struct, frozen=True, gc=False):
    """A submission that the quota allows, with warnings for the user."""

    quota_warnings: list[str] = []
    cost_limit_warning: str | None = None


_CLOCK = Statement(lambda w: f"SELECT {w.now}, EXISTS (SELECT 1 FROM semel_quotas), {w.patience}")


def read_clock(conn: Connection, context: StatementContext) -> int:
    """The time for the whole transaction. Read it first: it also lets later statements wait longer for locks."""
    return read_clock_and_quotas(conn, context)[0]


def read_clock_and_quotas(conn: Connection, context: StatementContext) -> tuple[int, bool]:
    """As read_clock, and whether there are any quotas at all."""
    row = _CLOCK.rows(conn, now=context.now)[0]
    return row[0], bool(row[1])


_LOCK = text(
    "SELECT pg_advisory_xact_lock(hashtextextended(person, 7301)) FROM unnest(CAST(:people AS text[])) AS p(person)"
)


def lock(conn: Connection, people: Iterable[Person]) -> None:
    """Lock these users' usage until the transaction ends. SQLite has one writer anyway."""
    if conn.dialect.name == "postgresql":
        conn.execute(_LOCK, {"people": ["\x1f".join(person) for person in sorted(set(people))]})


def quotas_of(conn: Connection, people: Iterable[Person]) -> dict[Person, Quota]:
    """The quotas of these users. Users without one, and the empty user, are left out."""
    people = {person for person in people if person[1]}
    tenants = {tenant for tenant, _ in people}
    found = {}
    for row in conn.execute(_QUOTAS, {"tenants": list(tenants), "users": [EVERYBODY, *{user for _, user in people}]}):
        found[row.tenant, row.user_id] = _quota(row)
    held = {}
    for tenant, user in people:
        quota = found.get((tenant, user)) or found.get((tenant, EVERYBODY))
        if quota is not None:
            held[tenant, user] = quota
    return held


_QUOTAS = select(quotas).where(
    quotas.c.tenant.in_(bindparam("tenants", expanding=True)), quotas.c.user_id.in_(bindparam("users", expanding=True))
)


def _quota(row: Any) -> Quota:
    limits = {name: getattr(row, name) for name in COUNTED_LIMITS}
    costs = {f"cost_{period}": getattr(row, f"cost_{period}") for period in COST_PERIODS}
    costs = {name: None if cost is None else cost / MICRO for name, cost in costs.items()}
    return Quota(**limits, **costs, action=row.action, warn_at=row.warn_at)


def set_quota(conn: Connection, person: Person, quota: Quota | None, context: StatementContext) -> None:
    """Set a user's quota; None removes it. Active runs go on in any case."""
    tenant, user = person
    read_clock(conn, context)
    lock(conn, [person])
    before = None if context.by is None else list_quotas(conn, tenant).get(user)
    conn.execute(delete(quotas).where(quotas.c.tenant == tenant, quotas.c.user_id == user))
    if quota is not None:
        values: dict[str, Any] = {name: getattr(quota, name) for name in (*COUNTED_LIMITS, "action", "warn_at")}
        for period in COST_PERIODS:
            cost = getattr(quota, f"cost_{period}")
            values[f"cost_{period}"] = None if cost is None else micros(cost)
        conn.execute(insert(quotas).values(tenant=tenant, user_id=user, **values))
    change = Change(
        name="quota.removed" if quota is None else "quota.set",
        tenant=tenant,
        target=user,
        before=None if before is None else structs.asdict(before),
        after=None if quota is None else structs.asdict(quota),
    )
    audit_log.record(conn, context, change)


def list_quotas(conn: Connection, tenant: str) -> dict[str, Quota]:
    """Every quota of a tenant, by user."""
    rows = conn.execute(select(quotas).where(quotas.c.tenant == tenant).order_by(quotas.c.user_id))
    return {row.user_id: _quota(row) for row in rows}


def _usage(dialect: Dialect, *, costs: bool) -> str:
    """Counts a user's active runs, reservations and latest runs, and adds up what their runs cost, if that is asked.

    What ended was added up for each day; see ``schema.charges``. What is under way is added up here.
    """
    theirs = "tenant = :tenant AND user_id = :person"
    spent = f"""
SELECT day_us AS at_us, cost FROM semel_costs WHERE {theirs} AND day_us >= :oldest
UNION ALL SELECT day_us, cost FROM semel_charges WHERE {theirs}
UNION ALL SELECT charged_us, cost FROM semel_active WHERE {theirs} AND user_id <> '' AND cost <> 0"""
    totals = ", ".join(dialect.total("cost", f"at_us >= :{period}") for period in COST_PERIODS)
    return f"""
SELECT (SELECT count(*) FROM semel_active WHERE {theirs} AND user_id <> ''),
       (SELECT count(*) FROM semel_reservations
        WHERE {theirs} AND expires_us >= :at AND NOT consumed AND job_id IS NULL),
       counts.*{", costs.*" if costs else ""}
FROM (SELECT count(*) FILTER (WHERE created_us > :hour) AS last_hour, count(*) AS last_day FROM semel_runs
      WHERE {theirs} AND user_id <> '' AND created_us > :since) AS counts
{f"CROSS JOIN (SELECT {totals} FROM ({spent}) AS spent) AS costs" if costs else ""}"""


_USAGE, _USAGE_AND_COSTS = Statement(lambda w: _usage(w, costs=False)), Statement(lambda w: _usage(w, costs=True))


def usage(conn: Connection, person: Person, now: int, quota: Quota | None = None) -> Usage:
    """Count a user's usage at this moment; with a quota, only what its limits ask for: the rest may be 0."""
    starts = period_starts(now)
    since = {"per_hour": now - 3600 * MICRO, "per_day": now - DAY_US}
    asked = [at for name, at in since.items() if quota is None or getattr(quota, name) is not None]
    values: dict[str, Any] = {"tenant": person[0], "person": person[1], "at": now}
    values |= {"hour": since["per_hour"], "since": min([now, *asked])}
    if quota is None or any(getattr(quota, f"cost_{period}") is not None for period in starts):
        values |= {**starts, "oldest": min(starts.values())}
        (row,) = _USAGE_AND_COSTS.rows(conn, **values)
    else:
        (row,) = _USAGE.rows(conn, **values)
        row = (*row, *(0 for _ in starts))
    return Usage(
        concurrent=row[0] + row[1],
        reserved=row[1],
        last_hour=row[2],
        last_day=row[3],
        spent={period: int(amount) / MICRO for period, amount in zip(starts, row[4:], strict=True)},
    )


def usage_and_quota(conn: Connection, person: Person, context: StatementContext) -> tuple[Usage, Quota | None]:
    """A user's usage, and the quota that applies to them, if any."""
    used = usage(conn, person, read_clock(conn, context))
    return used, quotas_of(conn, [person]).get(person)


def period_starts(now: int) -> dict[str, int]:
    """When the current day, week (from Monday), month and year began, in UTC."""
    day = moment(now).replace(hour=0, minute=0, second=0, microsecond=0)
    starts: dict[str, datetime] = {
        "daily": day,
        "weekly": day - timedelta(days=day.weekday()),
        "monthly": day.replace(day=1),
        "yearly": day.replace(month=1, day=1),
    }
    return {period: round(start.timestamp()) * MICRO for period, start in starts.items()}


class Meter:
    """One user's usage against their quota, while the submissions of a transaction add to it one by one."""

    def __init__(self, user: str, quota: Quota, used: Usage) -> None:
        self._user = user
        self._quota = quota
        self._counts = {"max_concurrent": used.concurrent, "per_hour": used.last_hour, "per_day": used.last_day}
        self._spent = {period: micros(amount) for period, amount in used.spent.items()}

    def admit(self, cost: int, *, reserved: bool) -> Admission:
        """Count one more submission, or raise if the quota blocks it. A ``reserved`` slot is counted already."""
        counts = {name: count + (not (reserved and name == "max_concurrent")) for name, count in self._counts.items()}
        warnings = [line for name, count in counts.items() if (line := self._count_warning(name, count))]
        cost_warning = self._cost_warning(cost)
        self._counts = counts
        self._spent = {period: spent + cost for period, spent in self._spent.items()}
        return Admission(warnings, cost_warning)

    def _count_warning(self, name: str, count: int) -> str | None:
        limit: int | None = getattr(self._quota, name)
        if limit is None:
            return None
        if count > limit and self._quota.action == "block":
            raise QuotaExceeded(f"Quota exceeded: Maximum {limit} {COUNTED_LIMITS[name]} allowed{self._whose(limit)}")
        if count >= self._quota.warn_at * limit:
            return f"{count} of {limit} {COUNTED_LIMITS[name]} in use"
        return None

    def _whose(self, limit: int) -> str:
        """Name the user whose limit is 0: often it is not the user that the caller meant."""
        return "" if limit else f" for user {self._user!r}; ask an admin to raise it (semel quota set)"

    def _cost_warning(self, cost: int) -> str | None:
        warning = None
        for period, spent in self._spent.items():
            limit: float | None = getattr(self._quota, f"cost_{period}")
            if limit is None:
                continue
            if (spent >= micros(limit) or spent + cost > micros(limit)) and self._quota.action == "block":
                raise CostLimitExceeded(
                    f"Cost limit exceeded: ${spent / MICRO:.2f} spent of ${limit:.2f} {period} limit. "
                    f"This job would cost {_dollars(cost)}."
                )
            if warning is None and spent + cost >= self._quota.warn_at * micros(limit):
                warning = f"${(spent + cost) / MICRO:.2f} spent of ${limit:.2f} {period} limit."
        return warning


def _dollars(cost: int) -> str:
    """The cost with two decimal places, or with as many as a smaller cost needs."""
    return f"${cost / MICRO:.2f}" if cost % (MICRO // 100) == 0 else f"${cost / MICRO:.6f}".rstrip("0")


class Reserve(Struct, frozen=True, kw_only=True):
    """A request for a slot. ``id`` is the reservation's, so that a retry after a lost reply finds it."""

    id: str
    tenant: str
    user: str
    max_concurrent: int
    ttl_us: int


def reserve(conn: Connection, requests: Sequence[Reserve], context: StatementContext) -> list[str | None]:
    """Return each request's reservation id, or None when all slots are in use; first come, first served.

    Also removes reservations of these users that expired long ago.
    """
    people = sorted({(each.tenant, each.user) for each in requests})
    now = read_clock(conn, context)
    lock(conn, people)
    for tenant, user in people:
        theirs = (reservations.c.tenant == tenant, reservations.c.user_id == user)
        restarted = {"expires_us": now + reservations.c.expires_us - reservations.c.created_us, "created_us": now}
        conn.execute(update(reservations).where(*theirs, reservations.c.created_us > now + WAITED_US).values(restarted))
        expired = select(reservations.c.id).where(*theirs, reservations.c.expires_us < now - EXPIRED_KEPT_US)
        conn.execute(delete(reservations).where(reservations.c.id.in_(expired.limit(CLEANED_AT_ONCE))))
    ids = [each.id for each in requests]
    known = set(conn.scalars(select(reservations.c.id).where(reservations.c.id.in_(ids))))
    used = {person: usage(conn, person, now, Quota()).concurrent for person in people}
    answers: list[str | None] = []
    rows: list[dict[str, Any]] = []
    for each in requests:
        person = (each.tenant, each.user)
        if each.id in known:  # a retry: the first reply was lost
            answers.append(each.id)
        elif used[person] >= each.max_concurrent:
            answers.append(None)
        else:
            used[person] += 1
            answers.append(each.id)
            rows.append(_reservation(each, now))
    if rows:
        conn.execute(insert(reservations), rows)
    return answers


def _reservation(request: Reserve, now: int) -> dict[str, Any]:
    return {
        "id": request.id,
        "tenant": request.tenant,
        "user_id": request.user,
        "created_us": now,
        "expires_us": now + request.ttl_us,
        "consumed": False,
        "max_concurrent": request.max_concurrent,
    }


def consume(conn: Connection, reservation: str, person: Person, job_id: str, now: int) -> None:
    """Consume a live reservation, once, for the run that is about to be written; else raise ReservationLost."""
    changed = conn.execute(
        update(reservations)
        .where(*_own(reservation, person), reservations.c.expires_us >= now, reservations.c.consumed.is_(False))
        .where(or_(reservations.c.job_id.is_(None), reservations.c.job_id == job_id))
        .values(consumed=True, job_id=job_id)
    )
    if changed.rowcount:
        return
    row = conn.execute(select(reservations).where(*_own(reservation, person))).one_or_none()
    if row is None:
        raise ReservationLost(
            f"reservation {reservation!r} does not exist: it expired, was released, or belongs to another user"
        )
    if row.job_id == job_id:
        return
    if row.expires_us < now and not row.consumed:
        raise ReservationLost(f"reservation {reservation!r} has expired; reserve a slot again")
    raise ReservationLost(f"reservation {reservation!r} was used for another job already")


@hot
def consume_after(
    conn: Connection, reservation: str, person: tuple[str, str | None], job_id: str | None, context: StatementContext
) -> bool:
    """Consume a reservation whose job exists already, so never raise. False: the slot is not, or no longer, the job's.

    An expired reservation is consumed if its slot is still free: if the user's other jobs and reservations leave room
    under the limit with which it was reserved.
    """
    with transaction(conn):
        read_clock(conn, context)
        row = conn.execute(select(reservations).where(*_own(reservation, person))).one_or_none()
        if row is None:
            return False
        whose = (row.tenant, row.user_id)
        lock(conn, [whose])
        now = read_clock(conn, context)  # the wait for the lock may have lasted longer than the reservation
        row = conn.execute(select(reservations).where(*_own(reservation, person))).one_or_none()
        if row is None:
            return False
        if row.consumed:
            return job_id is None or row.job_id in (None, job_id)
        job = row.job_id if job_id is None else job_id
        if row.expires_us < now and not _slot_is_free(conn, row, job, now):
            return False
        unused = update(reservations).where(reservations.c.id == row.id, reservations.c.consumed.is_(False))
        return bool(
            conn.execute(unused.values(consumed=True, job_id=job)).rowcount
        )  # 0 if it was released at this moment


def _slot_is_free(conn: Connection, row: Any, job_id: str | None, now: int) -> bool:
    if row.max_concurrent is None:
        return False
    known = None if job_id is None else checked_id(job_id)
    own = 0 if known is None or conn.scalar(select(active.c.id).where(active.c.id == known)) is None else 1
    others = usage(conn, (row.tenant, row.user_id), now, Quota()).concurrent - own
    return bool(others < row.max_concurrent)


def is_open(conn: Connection, reservation: str, person: Person, now: int) -> bool:
    """Whether the reservation holds a slot and has no job yet."""
    live = [reservations.c.expires_us >= now, reservations.c.consumed.is_(False), reservations.c.job_id.is_(None)]
    return conn.scalar(select(reservations.c.id).where(*_own(reservation, person), *live)) is not None


def bind(conn: Connection, reservation: str, person: Person, job_id: str) -> None:
    """Bind the reservation to a job that was created in its flow, which consumes it later: both count once."""
    conn.execute(
        update(reservations)
        .where(*_own(reservation, person), reservations.c.consumed.is_(False), reservations.c.job_id.is_(None))
        .values(job_id=job_id)
    )


def _own(reservation: str, person: tuple[str, str | None]) -> list[ColumnElement[bool]]:
    tenant, user = person
    own = [reservations.c.id == reservation, reservations.c.tenant == tenant]
    return own if user is None else [*own, reservations.c.user_id == user]


@hot
def release(conn: Connection, reservation: str, person: tuple[str, str | None]) -> bool:
    """Free the slot at once. False if there is nothing to free: it was consumed, released, or expired and removed."""
    unused = delete(reservations).where(*_own(reservation, person), reservations.c.consumed.is_(False))
    return bool(conn.execute(unused).rowcount)


def release_by_hand(conn: Connection, reservation: str, tenant: str, context: StatementContext) -> bool:
    """As :func:`release`, for an operator, and logged."""
    unused = delete(reservations).where(*_own(reservation, (tenant, None)), reservations.c.consumed.is_(False))
    row = conn.execute(unused.returning(reservations.c.user_id)).one_or_none()
    if row is None:
        return False
    change = Change(name="reservation.released", tenant=tenant, target=reservation, before={"user": row.user_id})
    audit_log.record(conn, context, change)
    return True


_PURGE = Statement(
    lambda w: (
        f"""
DELETE FROM semel_reservations WHERE id IN (
  SELECT p.id FROM semel_reservations AS p WHERE p.expires_us < {w.now} - {EXPIRED_KEPT_US}
  ORDER BY p.expires_us LIMIT :most {w.locking("p", skip=True)}
)"""
    )
)


def purge_reservations(conn: Connection, context: StatementContext, most: int = 1000) -> int:
    """Remove reservations that expired an hour ago. Until then, one can still be consumed late, or again."""
    return _PURGE.count(conn, most=most, now=context.now)


_RESTART = Statement(
    lambda w: (
        f"""
UPDATE semel_reservations SET expires_us = {w.now} + expires_us - created_us, created_us = {w.now}
WHERE created_us > {w.now}
"""
    )
)


def restart_reservations(conn: Connection, context: StatementContext) -> None:
    """After the clock was put back: restart reservations made later than now, so that they last no longer."""
    _RESTART.count(conn, now=context.now)
