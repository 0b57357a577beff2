"""Deliveries: one event for one subscription, until it is delivered or given up.

    fan out            lease                    settle
  ──────────▶ waiting ──────▶ waiting, later ──┬─ 2xx ───────────▶ delivered
                 ▲                             ├─ error ─────────▶ waiting, after a pause
                 └───────── resend ────────────└─ last attempt ──▶ dead

A lease moves a delivery to a later time and counts the attempt. It is short, and renewed while the event is sent; the
deliveries of a dead process are leased by another. So an event may be sent twice, with the same id, but is never lost.
The events of a run are leased in order: the next one after the first attempt of those before it has ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import Struct
from sqlalchemy import ColumnElement, Connection, delete, exists, func, or_, select, tuple_, update

from semel.db.dialect import Dialect, Statement, StatementContext
from semel.db.schema import deliveries
from semel.db.schema import outbox as outbox_table
from semel.db.schema import subscriptions as subscription_table
from semel.runs.store import audit_log, outbox
from semel.runs.store.audit_log import Change
from semel.runs.store.outbox import OutboxEvent
from semel.runs.store.quotas import read_clock
from semel.runs.store.transitions import storable
from semel.runs.types import MICRO, is_own_work
from semel.service.api.problems import ApiError
from semel.service.webhooks import subscriptions
from semel.service.webhooks.subscriptions import Subscription
from semel.types import moment

State: TypeAlias = Literal["waiting", "delivered", "dead"]

TIMEOUT = 10.0
"""Seconds for a receiver to respond, including name resolution and connecting."""
KEPT = {"delivered": 3 * 86400, "dead": 30 * 86400}
"""Seconds for which a finished delivery is kept."""
FANNED_OUT = 200
"""Events in one transaction."""


class Event(Struct, frozen=True, kw_only=True):
    """An event of a run, as it is sent. ``version`` grows with every step of the run."""

    id: str
    name: str
    run_id: str
    version: int
    model: str
    tenant: str
    user: str
    status: str
    step: str
    at: datetime
    fence: int
    note: str | None


class Ping(Struct, frozen=True, kw_only=True):
    """A test event."""

    id: str
    name: Literal["Ping"] = "Ping"
    tenant: str
    at: datetime


def body_of(event: OutboxEvent) -> str:
    """The body of the event, which is the same at every attempt."""
    content = Event(
        id=event.id,
        name=event.name,
        run_id=event.run_id,
        version=event.version,
        model=event.model,
        tenant=event.tenant,
        user=event.user,
        status=event.status,
        step=event.step,
        at=moment(event.at_us),
        fence=event.fence,
        note=event.note,
    )
    return msgspec.json.encode(content).decode()


class Delivery(Struct, frozen=True, kw_only=True):
    """An event for a subscription."""

    subscription_id: str
    run_id: str
    version: int
    state: State
    attempts: int
    due_us: int
    body: str
    last_status: int | None
    last_error: str | None

    @property
    def event_id(self) -> str:
        """The id that the receiver sees."""
        return f"{self.run_id}/{self.version}"


class Pending(Struct, frozen=True):
    """Whether there are events to fan out, and the subscriptions with deliveries that are due."""

    now_us: int
    subscribed: bool
    events: bool
    due: list[Subscription]


def read_pending(conn: Connection, terms: StatementContext) -> Pending:
    """What there is to do now."""
    active = subscriptions.active(conn)
    now = read_clock(conn, terms)
    waits = deliveries.c.subscription_id == subscription_table.c.id, deliveries.c.state == "waiting"
    due = select(subscription_table.c.id).where(
        subscription_table.c.disabled_us.is_(None), exists().where(*waits, deliveries.c.due_us <= now)
    )
    ids = set(conn.scalars(due)) if active else set()
    events = conn.execute(select(outbox_table.c.version).where(outbox_table.c.unsent).limit(1)).first() is not None
    return Pending(now, bool(active), events, [each for each in active if each.id in ids])


_MAKE_COLUMNS = {
    "in_subscription": "text",
    "in_id": "uuid",
    "in_version": "integer",
    "in_due": "bigint",
    "in_body": "text",
}
_MAKE = Statement(
    lambda w: (
        f"""
INSERT INTO semel_deliveries (subscription_id, run_id, version, state, attempts, due_us, wait_us, body)
SELECT in_subscription, in_id, in_version, 'waiting', 0, CASE WHEN in_due > {w.now} THEN {w.now} ELSE in_due END, 0,
  in_body FROM {w.batch(_MAKE_COLUMNS)} WHERE true
ON CONFLICT (run_id, version, subscription_id) DO NOTHING
"""
    ),
    _MAKE_COLUMNS,
)


def fan_out(conn: Connection, terms: StatementContext) -> bool:
    """Make deliveries of the oldest events, for each subscription that wants them. True if there may be more."""
    events = outbox.unsent(conn, FANNED_OUT)
    active = subscriptions.active(conn)
    made = [
        (each.id, event.run_id, event.version, event.at_us, body_of(event))
        for event in events
        for each in active
        if each.wants(event.name, event.tenant) and not is_own_work(event.model, event.user)
    ]
    if made:
        _MAKE.count(conn, made, now=terms.now)
    outbox.sent(conn, events)
    return len(events) == FANNED_OUT


_COLUMNS = ("subscription_id", "run_id", "version", "state", "attempts", "due_us", "body", "last_status", "last_error")
_SHOWN = [deliveries.c[name] for name in _COLUMNS]


def _leasing(dialect: Dialect) -> str:
    shown = dialect.returning(", ".join(_COLUMNS)).replace("k.run_id", dialect.as_text("k.run_id"))
    return f"""
WITH picked AS MATERIALIZED (
  SELECT p.run_id AS picked_id, p.version AS picked_version FROM semel_deliveries AS p
  WHERE p.subscription_id = :subscription AND p.state = 'waiting' AND p.due_us <= {dialect.now}
    AND NOT EXISTS (
      SELECT 1 FROM semel_deliveries AS e
      WHERE e.run_id = p.run_id AND e.version < p.version AND e.subscription_id = :subscription
        AND e.state = 'waiting' AND e.last_status IS NULL AND e.last_error IS NULL
    )
    AND EXISTS (SELECT 1 FROM semel_subscriptions AS s WHERE s.id = :subscription AND s.disabled_us IS NULL)
  ORDER BY p.due_us, p.run_id, p.version LIMIT :most {dialect.locking("p", skip=True)}
)
UPDATE semel_deliveries AS k SET attempts = attempts + 1, due_us = {dialect.now} + :lease, wait_us = :lease
FROM picked WHERE k.run_id = picked_id AND k.version = picked_version AND k.subscription_id = :subscription
RETURNING {shown}
"""


_LEASE = Statement(_leasing)


def lease(conn: Connection, subscription_id: str, most: int, seconds: float, terms: StatementContext) -> list[Delivery]:
    """Lease what is due for a subscription, and count the attempt; nothing if the subscription has ended."""
    values: dict[str, Any] = {"subscription": subscription_id, "most": most, "lease": round(seconds * MICRO)}
    rows = _LEASE.rows(conn, now=terms.now, **values)
    found = [Delivery(**dict(zip(_COLUMNS, row, strict=True))) for row in rows]
    return sorted(found, key=lambda each: (each.run_id, each.version))


_RENEW_COLUMNS = {
    "in_subscription": "text",
    "in_id": "uuid",
    "in_version": "integer",
    "in_attempts": "integer",
    "in_due": "bigint",
}


def _renewing(dialect: Dialect) -> str:
    batch = dialect.batch(_RENEW_COLUMNS)
    if dialect.writes_in_with:  # skip locked rows: they are being settled
        batch = f"""(SELECT b.* FROM {batch} JOIN semel_deliveries AS h
  ON h.run_id = b.in_id AND h.version = b.in_version AND h.subscription_id = b.in_subscription
  FOR UPDATE OF h SKIP LOCKED) AS held"""
    return f"""
UPDATE semel_deliveries AS k SET due_us = {dialect.now} + :lease, wait_us = :lease FROM {batch}
WHERE k.run_id = in_id AND k.version = in_version AND k.subscription_id = in_subscription
  AND k.attempts = in_attempts AND k.due_us = in_due AND k.state = 'waiting'
RETURNING {
        dialect.returning("subscription_id, run_id, version, due_us").replace("k.run_id", dialect.as_text("k.run_id"))
    }
"""


_RENEW = Statement(_renewing, _RENEW_COLUMNS)


def renew(
    conn: Connection, held: Sequence[Delivery], seconds: float, terms: StatementContext
) -> dict[tuple[str, str], int]:
    """Extend the leases of deliveries in progress. Returns their new ends, by subscription and event.

    A delivery that was settled or taken over meanwhile is not among them.
    """
    asked = [(each.subscription_id, each.run_id, each.version, each.attempts, each.due_us) for each in held]
    rows = _RENEW.rows(conn, asked, now=terms.now, lease=round(seconds * MICRO))
    return {(row[0], f"{row[1]}/{row[2]}"): row[3] for row in rows}


class SendResult(Struct, frozen=True):
    """The result of an attempt: the status of the response, or why there is none."""

    status: int | None
    error: str | None

    @property
    def good(self) -> bool:
        """Whether the receiver accepted it."""
        return self.status is not None and 200 <= self.status < 300


class DeliveryResult(Struct, frozen=True, kw_only=True):
    """The state of a delivery after an attempt. ``delay``: seconds until the next one, if it is still waiting."""

    delivery: Delivery
    state: State
    delay: float = 0.0
    status: int | None = None
    error: str | None = None
    forget: bool = False
    """Delete it: it was delivered to the stream, which is not listed."""
    disable: bool = False
    """End the subscription, as the receiver asked."""


def settle(conn: Connection, settled: Sequence[DeliveryResult], terms: StatementContext) -> None:
    """Store the results of attempts, except for deliveries that another process took over."""
    now = read_clock(conn, terms)
    for each in settled:
        ours = (*_one(each.delivery), deliveries.c.attempts == each.delivery.attempts, deliveries.c.state == "waiting")
        if each.forget:
            conn.execute(delete(deliveries).where(*ours))
            continue
        wait_us = round(each.delay * MICRO)
        error = None if each.error is None else storable(each.error)
        values = {"state": each.state, "due_us": now + wait_us, "last_status": each.status, "last_error": error}
        conn.execute(update(deliveries).where(*ours).values(**values, wait_us=wait_us))
        if each.disable:
            subscriptions.disable(conn, each.delivery.subscription_id, terms)


def give_back(conn: Connection, unused: Sequence[Delivery], terms: StatementContext) -> None:
    """Undo leases whose event was not sent."""
    now = read_clock(conn, terms)
    for each in unused:
        ours = (*_one(each), deliveries.c.attempts == each.attempts, deliveries.c.state == "waiting")
        conn.execute(update(deliveries).where(*ours).values(due_us=now, wait_us=0, attempts=each.attempts - 1))


def _one(each: Delivery) -> tuple[ColumnElement[bool], ...]:
    return (
        deliveries.c.run_id == each.run_id,
        deliveries.c.version == each.version,
        deliveries.c.subscription_id == each.subscription_id,
    )


class DeliveryRows(Struct, frozen=True):
    """Deliveries, and where the next page begins."""

    items: list[Delivery]
    next: tuple[int, str, int, str] | None


_ORDER = (deliveries.c.due_us, deliveries.c.run_id, deliveries.c.version, deliveries.c.subscription_id)


def list_deliveries(
    conn: Connection,
    tenant: str,
    *,
    state: State | None,
    subscription_id: str | None,
    limit: int,
    after: tuple[int, str, int, str] | None,
) -> DeliveryRows:
    """The deliveries of a tenant, the latest first."""
    whose = select(subscription_table.c.id).where(subscription_table.c.tenant == tenant)
    query = select(*_SHOWN).where(deliveries.c.subscription_id.in_(whose))
    if state is not None:
        query = query.where(deliveries.c.state == state)
    if subscription_id is not None:
        query = query.where(deliveries.c.subscription_id == subscription_id)
    if after is not None:
        query = query.where(tuple_(*_ORDER) < tuple_(*after, types=[each.type for each in _ORDER]))
    rows = conn.execute(query.order_by(*(each.desc() for each in _ORDER)).limit(limit + 1)).mappings().all()
    items = [Delivery(**row) for row in rows[:limit]]
    last = items[-1] if len(rows) > limit else None
    return DeliveryRows(items, None if last is None else (last.due_us, last.run_id, last.version, last.subscription_id))


FAILING_WITHIN = 86400
"""Seconds for which a subscription whose delivery was given up counts as failing."""
MAX_LOOKED_AT = 10_000
"""Deliveries of each state, of all tenants, that are looked at for those that fail."""


class FailingSubscription(Struct, frozen=True, kw_only=True):
    """A subscription that was disabled, or whose receiver refuses events."""

    subscription: Subscription
    retrying: int
    """Deliveries that failed and are tried again."""
    dead: int
    """Deliveries that were given up lately."""
    last_error: str


def list_failing(conn: Connection, tenant: str, now_us: int) -> list[FailingSubscription]:
    """The tenant's subscriptions that fail."""
    known = subscriptions.list_subscriptions(conn, tenant)
    if not known:
        return []
    found: dict[str, Counter[str]] = {}
    errors: dict[str, str] = {}
    for row in (*_failed(conn, "waiting", 0), *_failed(conn, "dead", now_us - FAILING_WITHIN * MICRO)):
        found.setdefault(row.subscription_id, Counter())[row.state] += row.count
        errors[row.subscription_id] = row.error or f"HTTP {row.status}"
    return [
        FailingSubscription(
            subscription=each,
            retrying=found.get(each.id, Counter())["waiting"],
            dead=found.get(each.id, Counter())["dead"],
            last_error=errors.get(each.id, ""),
        )
        for each in known
        if each.disabled_us is not None or each.id in found
    ]


def _failed(conn: Connection, state: State, since_us: int) -> Sequence[Any]:
    """How many of the first deliveries in this state have failed, by subscription, with one of their errors."""
    names = ("subscription_id", "state", "last_error", "last_status")
    query = select(*(deliveries.c[name] for name in names))
    in_state = (deliveries.c.state == state, deliveries.c.due_us >= since_us)
    some = query.where(*in_state).order_by(deliveries.c.due_us).limit(MAX_LOOKED_AT).subquery()
    refused = or_(some.c.last_error.is_not(None), some.c.last_status.is_not(None))
    grouped = select(
        some.c.subscription_id,
        some.c.state,
        func.count().label("count"),
        func.max(some.c.last_error).label("error"),
        func.max(some.c.last_status).label("status"),
    )
    return conn.execute(grouped.where(refused).group_by(some.c.subscription_id, some.c.state)).all()


def resend(conn: Connection, tenant: str, place: tuple[str, str, int], terms: StatementContext) -> Delivery:
    """Send the event of (subscription, run, version) once more, now, whatever its state."""
    subscription_id, run_id, version = place
    found = subscriptions.find(conn, subscription_id, tenant)
    if found.disabled_us is not None:
        raise ApiError(
            409,
            "SUBSCRIPTION_DISABLED",
            "the receiver ended this subscription (410): create a new one",
        )
    this = (
        deliveries.c.run_id == run_id,
        deliveries.c.version == version,
        deliveries.c.subscription_id == subscription_id,
    )
    old = conn.execute(select(*_SHOWN).where(*this).with_for_update()).mappings().first()
    if old is None:
        raise ApiError(404, "NOT_FOUND", f"there is no delivery of {run_id}/{version} to that subscription")
    due = {"state": "waiting", "due_us": read_clock(conn, terms)}
    conn.execute(update(deliveries).where(*this).values(**due, wait_us=0))
    resent = Delivery(**{**old, **due})
    audit_log.record(conn, terms, _resent(Delivery(**old), resent, tenant))
    return resent


def _resent(before: Delivery, after: Delivery, tenant: str) -> Change:
    """What the audit log has of a delivery that somebody sends again."""
    old, new = (
        {
            "subscription": each.subscription_id,
            "state": each.state,
            "attempts": each.attempts,
            "due": _time(each.due_us),
        }
        for each in (before, after)
    )
    return Change(name="delivery.resent", tenant=tenant, target=before.event_id, before=old, after=new)


def _time(us: int) -> str:
    return moment(us).isoformat()


_SHORTEN = Statement(
    lambda w: (
        f"""
UPDATE semel_deliveries SET due_us = {w.now} + wait_us WHERE state = 'waiting' AND due_us > {w.now} + wait_us
"""
    )
)


def shorten_waits(conn: Connection, terms: StatementContext) -> int:
    """After the clock was set back: end every wait as soon as one of the same length would that begins now."""
    return _SHORTEN.count(conn, now=terms.now)


def _deletion(which: str) -> Statement:
    """Materialized: a plan may execute a subquery several times, and each time it would lock and delete other rows."""
    return Statement(
        lambda w: (
            f"""
DELETE FROM semel_deliveries WHERE (run_id, version, subscription_id) IN (
  WITH old AS MATERIALIZED (
    SELECT p.run_id, p.version, p.subscription_id FROM semel_deliveries AS p WHERE {which.format(now=w.now)}
    LIMIT :most {w.locking("p", skip=True)}
  )
  SELECT run_id, version, subscription_id FROM old
)"""
        )
    )


_DELETE_OLD = _deletion("p.state = :state AND p.due_us < {now} - :kept")
_DELETE_ORPHANS = _deletion("p.subscription_id NOT IN (SELECT id FROM semel_subscriptions)")


def tidy(conn: Connection, terms: StatementContext, most: int = 1000) -> bool:
    """Delete old finished deliveries, and those of deleted subscriptions. True if there may be more."""
    removed = [
        _DELETE_OLD.count(conn, state=state, kept=seconds * MICRO, most=most, now=terms.now)
        for state, seconds in KEPT.items()
    ]
    removed += [_DELETE_ORPHANS.count(conn, most=most), subscriptions.fail_disabled(conn, terms, most)]
    return max(removed) >= most
