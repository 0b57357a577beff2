"""Deliveries: events on their way to subscriptions, each until it has arrived or is given up.

    fan out            lease                    settle
  ──────────▶ waiting ──────▶ waiting, later ──┬─ it arrived ──▶ delivered
                 ▲                             ├─ try again ───▶ waiting, after a pause
                 └───────── resend ────────────└─ give up ─────▶ dead

A lease moves a delivery to a later time and counts the try. It is short and renewed while the event is sent; what a
dead process has not settled is tried again by another. So an event may come twice, under the same id, and is never
lost. The steps of a run are leased one after the other: the next one when the first try of those before it has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Literal, TypeAlias, get_args

import msgspec
from msgspec import Struct
from sqlalchemy import ColumnElement, Connection, delete, exists, select, tuple_, update

from semel.db.dialect import Dialect, Statement, StatementContext
from semel.db.schema import deliveries, run_events
from semel.db.schema import subscriptions as subscription_table
from semel.runs.store import maintenance
from semel.runs.store.maintenance import OutboxEvent
from semel.runs.store.quotas import read_clock
from semel.runs.store.transitions import storable
from semel.runs.types import MICRO, is_own_work
from semel.service.api.problems import ApiError
from semel.service.webhooks import subscriptions
from semel.service.webhooks.subscriptions import Subscription
from semel.types import moment

State: TypeAlias = Literal["waiting", "delivered", "dead"]
STATES: tuple[State, ...] = get_args(State)

TIMEOUT = 10.0
"""Seconds within which a receiver must have answered, with everything that this takes."""
KEPT = {"delivered": 3 * 86400, "dead": 30 * 86400}
"""Seconds for which what is over can be looked at."""
FANNED_OUT = 200
"""Events in one transaction."""


class Event(Struct, frozen=True, kw_only=True):
    """What happened to a run, as it is told. ``version`` grows with every step of the run."""

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
    """An event about nothing, by which a receiver can be tried."""

    id: str
    name: Literal["Ping"] = "Ping"
    tenant: str
    at: datetime


def body_of(event: OutboxEvent) -> str:
    """The event as it is sent: the same at every try."""
    told = Event(
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
    return msgspec.json.encode(told).decode()


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
        """The id under which the receiver knows it."""
        return f"{self.run_id}/{self.version}"


class Pending(Struct, frozen=True):
    """What there is to do: events to be handed on, and subscriptions for which something is due."""

    now_us: int
    subscribed: bool
    events: bool
    due: list[Subscription]


def agenda(conn: Connection, terms: StatementContext) -> Pending:
    """Look, without changing anything."""
    active = subscriptions.active(conn)
    now = read_clock(conn, terms)
    waits = deliveries.c.subscription_id == subscription_table.c.id, deliveries.c.state == "waiting"
    due = select(subscription_table.c.id).where(
        subscription_table.c.disabled_us.is_(None), exists().where(*waits, deliveries.c.due_us <= now)
    )
    ids = set(conn.scalars(due)) if active else set()
    events = conn.execute(select(run_events.c.version).where(run_events.c.unsent).limit(1)).first() is not None
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
    """Make deliveries of the oldest events for all that want them. True when there may be more."""
    events = maintenance.unsent(conn, FANNED_OUT)
    active = subscriptions.active(conn)
    made = [
        (each.id, event.run_id, event.version, event.at_us, body_of(event))
        for event in events
        for each in active
        if each.wants(event.name, event.tenant) and not is_own_work(event.model, event.user)
    ]
    if made:
        _MAKE.count(conn, made, now=terms.now)
    maintenance.sent(conn, events)
    return len(events) == FANNED_OUT


_COLUMNS = ("subscription_id", "run_id", "version", "state", "attempts", "due_us", "body", "last_status", "last_error")
_SHOWN = [deliveries.c[name] for name in _COLUMNS]


def _leasing(words: Dialect) -> str:
    shown = words.own(", ".join(_COLUMNS)).replace("k.run_id", words.plain("k.run_id"))
    return f"""
WITH picked AS MATERIALIZED (
  SELECT p.run_id AS picked_id, p.version AS picked_version FROM semel_deliveries AS p
  WHERE p.subscription_id = :subscription AND p.state = 'waiting' AND p.due_us <= {words.now}
    AND NOT EXISTS (
      SELECT 1 FROM semel_deliveries AS e
      WHERE e.run_id = p.run_id AND e.version < p.version AND e.subscription_id = :subscription
        AND e.state = 'waiting' AND e.last_status IS NULL AND e.last_error IS NULL
    )
    AND EXISTS (SELECT 1 FROM semel_subscriptions AS s WHERE s.id = :subscription AND s.disabled_us IS NULL)
  ORDER BY p.due_us, p.run_id, p.version LIMIT :most {words.locking("p", skip=True)}
)
UPDATE semel_deliveries AS k SET attempts = attempts + 1, due_us = {words.now} + :lease, wait_us = :lease
FROM picked WHERE k.run_id = picked_id AND k.version = picked_version AND k.subscription_id = :subscription
RETURNING {shown}
"""


_LEASE = Statement(_leasing)


def lease(conn: Connection, subscription_id: str, most: int, seconds: float, terms: StatementContext) -> list[Delivery]:
    """Take what is due for a subscription, and count the try; nothing for one that has ended, whatever still waits."""
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


def _renewing(words: Dialect) -> str:
    batch = words.batch(_RENEW_COLUMNS)
    if words.writes_in_with:  # what is locked is being settled
        batch = f"""(SELECT b.* FROM {batch} JOIN semel_deliveries AS h
  ON h.run_id = b.in_id AND h.version = b.in_version AND h.subscription_id = b.in_subscription
  FOR UPDATE OF h SKIP LOCKED) AS held"""
    return f"""
UPDATE semel_deliveries AS k SET due_us = {words.now} + :lease, wait_us = :lease FROM {batch}
WHERE k.run_id = in_id AND k.version = in_version AND k.subscription_id = in_subscription
  AND k.attempts = in_attempts AND k.due_us = in_due AND k.state = 'waiting'
RETURNING {words.own("subscription_id, run_id, version, due_us").replace("k.run_id", words.plain("k.run_id"))}
"""


_RENEW = Statement(_renewing, _RENEW_COLUMNS)


def renew(
    conn: Connection, held: Sequence[Delivery], seconds: float, terms: StatementContext
) -> dict[tuple[str, str], int]:
    """Keep what is being sent. Returns, by subscription and event, when the leases end now.

    A delivery that was settled or taken over meanwhile is missing from it: its time is not the one that we know.
    """
    asked = [(each.subscription_id, each.run_id, each.version, each.attempts, each.due_us) for each in held]
    rows = _RENEW.rows(conn, asked, now=terms.now, lease=round(seconds * MICRO))
    return {(row[0], f"{row[1]}/{row[2]}"): row[3] for row in rows}


class Answered(Struct, frozen=True):
    """What became of a try: the status of the answer, or why there is none."""

    status: int | None
    error: str | None

    @property
    def good(self) -> bool:
        """Whether the receiver has it."""
        return self.status is not None and 200 <= self.status < 300


class DeliveryResult(Struct, frozen=True, kw_only=True):
    """How a try went. ``delay`` is the pause in seconds before the next one, of what is still waiting."""

    delivery: Delivery
    state: State
    delay: float = 0.0
    status: int | None = None
    error: str | None = None
    forget: bool = False
    """It has arrived, and nobody will ask how."""
    disable: bool = False
    """The receiver wants no more."""


def settle(conn: Connection, settled: Sequence[DeliveryResult], terms: StatementContext) -> None:
    """Write how tries went; of one that was taken over by another meanwhile, nothing."""
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
    """These were leased and not tried."""
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


def listed(
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


def resend(conn: Connection, tenant: str, place: tuple[str, str, int], terms: StatementContext) -> Delivery:
    """Let what is at the place (subscription, run, version) be sent once more, now, whatever became of it."""
    subscription_id, run_id, version = place
    found = subscriptions.find(conn, subscription_id, tenant)
    if found.disabled_us is not None:
        raise ApiError(409, "SUBSCRIPTION_DISABLED", "the receiver wants no more: make a new subscription")
    this = (
        deliveries.c.run_id == run_id,
        deliveries.c.version == version,
        deliveries.c.subscription_id == subscription_id,
    )
    due = {"state": "waiting", "due_us": read_clock(conn, terms), "wait_us": 0}
    row = conn.execute(update(deliveries).where(*this).values(**due).returning(*_SHOWN)).mappings().first()
    if row is None:
        raise ApiError(404, "NOT_FOUND", f"there is no delivery of {run_id}/{version} to that subscription")
    return Delivery(**row)


_SHORTEN = Statement(
    lambda w: (
        f"""
UPDATE semel_deliveries SET due_us = {w.now} + wait_us WHERE state = 'waiting' AND due_us > {w.now} + wait_us
"""
    )
)


def shorten_waits(conn: Connection, terms: StatementContext) -> int:
    """A wait that ends later than a new one would began before the clock was put back: let it end in time."""
    return _SHORTEN.count(conn, now=terms.now)


def _forgetting(which: str) -> Statement:
    return Statement(
        lambda w: (
            f"""
DELETE FROM semel_deliveries WHERE (run_id, version, subscription_id) IN (
  SELECT p.run_id, p.version, p.subscription_id FROM semel_deliveries AS p WHERE {which.format(now=w.now)}
  LIMIT :most {w.locking("p", skip=True)}
)"""
        )
    )


_FORGET_OLD = _forgetting("p.state = :state AND p.due_us < {now} - :kept")
_FORGET_ORPHANS = _forgetting("p.subscription_id NOT IN (SELECT id FROM semel_subscriptions)")


def tidy(conn: Connection, terms: StatementContext, most: int = 1000) -> bool:
    """Forget what has been over for long, and what belongs to no subscription. True when there may be more."""
    removed = [
        _FORGET_OLD.count(conn, state=state, kept=seconds * MICRO, most=most, now=terms.now)
        for state, seconds in KEPT.items()
    ]
    removed += [_FORGET_ORPHANS.count(conn, most=most), subscriptions.bury(conn, terms, most)]
    return max(removed) >= most
