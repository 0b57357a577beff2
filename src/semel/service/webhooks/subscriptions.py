"""Subscriptions to the events of runs: a webhook's URL, or a Redis stream."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, get_args
from urllib.parse import urlsplit

from msgspec import Struct
from sqlalchemy import Connection, delete, func, select, update

from semel.db.dialect import Statement, StatementContext
from semel.db.schema import subscriptions
from semel.runs.store import audit_log
from semel.runs.store.audit_log import Change
from semel.runs.store.quotas import read_clock
from semel.runs.types import new_id
from semel.service.api.problems import ApiError

Kind: TypeAlias = Literal["webhook", "stream"]
EventName: TypeAlias = Literal["RunCreated", "RunStarted", "RunChanged", "RunCompleted"]
EVENT_NAMES: tuple[EventName, ...] = get_args(EventName)

STREAM_ID = "stream"
"""The subscription of the Redis stream, which the setting ``events`` creates."""
STREAM = "semel:events"
MOST = 100
"""Webhooks of a tenant: each is delivered by a task of its own."""
LONGEST_URL = 2000
_EVERYTHING = "*"
_MARK = "whsec_"


class Subscription(Struct, frozen=True, kw_only=True):
    """Where the events of a tenant go; for the stream, those of all tenants."""

    id: str
    tenant: str
    kind: Kind
    target: str
    secret: str | None
    events: str
    created_us: int
    disabled_us: int | None

    def __repr__(self) -> str:
        """Without the secret."""
        return f"Subscription(id={self.id!r}, tenant={self.tenant!r}, kind={self.kind!r}, target={self.target!r})"

    @property
    def names(self) -> list[str]:
        """The names of its events."""
        return self.events.split()

    @property
    def host(self) -> str:
        """Where its events go, without the rest of the URL, which is often a secret."""
        return self.target if self.kind == "stream" else urlsplit(self.target).netloc.rpartition("@")[2]

    def wants(self, name: str, tenant: str) -> bool:
        """Whether it gets this event."""
        whose = self.kind == "stream" or self.tenant == tenant
        return whose and (self.events == _EVERYTHING or name in self.names)


def written(names: Sequence[str]) -> str:
    """The names as they are stored: each once, in order; all of them as ``*``."""
    wanted = set(EVENT_NAMES) if not names or _EVERYTHING in names else set(names)
    if wanted >= set(EVENT_NAMES):
        return _EVERYTHING
    return " ".join(name for name in EVENT_NAMES if name in wanted)


def new_secret() -> str:
    """A secret to sign with, in the form of Standard Webhooks."""
    return _MARK + base64.b64encode(secrets.token_bytes(32)).decode()


def key_of(secret: str) -> bytes:
    """The key of the signature."""
    return base64.b64decode(secret.removeprefix(_MARK))


def create(conn: Connection, tenant: str, target: str, names: Sequence[str], terms: StatementContext) -> Subscription:
    """Subscribe a webhook."""
    active = (
        subscriptions.c.tenant == tenant,
        subscriptions.c.kind == "webhook",
        subscriptions.c.disabled_us.is_(None),
    )
    if conn.execute(select(func.count()).select_from(subscriptions).where(*active)).scalar_one() >= MOST:
        raise ApiError(409, "TOO_MANY_SUBSCRIPTIONS", f"there are {MOST} subscriptions already; delete one")
    made = Subscription(
        id=new_id(),
        tenant=tenant,
        kind="webhook",
        target=target,
        secret=new_secret(),
        events=written(names),
        created_us=read_clock(conn, terms),
        disabled_us=None,
    )
    conn.execute(subscriptions.insert().values({name: getattr(made, name) for name in Subscription.__struct_fields__}))
    change = Change(name="subscription.created", tenant=tenant, target=made.id, after=_logged(made))
    audit_log.record(conn, terms, change)
    return made


def _logged(subscription: Subscription) -> dict[str, Any]:
    """What the audit log has of a webhook: the host that gets the events. The rest of a URL is often a secret."""
    scheme = urlsplit(subscription.target).scheme
    return {"kind": subscription.kind, "host": f"{scheme}://{subscription.host}", "events": subscription.names}


def list_subscriptions(conn: Connection, tenant: str) -> list[Subscription]:
    """The subscriptions of a tenant, oldest first."""
    query = select(subscriptions).where(subscriptions.c.tenant == tenant)
    rows = conn.execute(query.order_by(subscriptions.c.created_us, subscriptions.c.id)).mappings()
    return [Subscription(**row) for row in rows]


def active(conn: Connection) -> list[Subscription]:
    """The subscriptions that are not disabled."""
    rows = conn.execute(select(subscriptions).where(subscriptions.c.disabled_us.is_(None))).mappings()
    return [Subscription(**row) for row in rows]


def find(conn: Connection, subscription_id: str, tenant: str) -> Subscription:
    """The subscription, if it is the tenant's."""
    query = select(subscriptions).where(subscriptions.c.id == subscription_id, subscriptions.c.tenant == tenant)
    row = conn.execute(query).mappings().first()
    if row is None:
        raise ApiError(404, "NOT_FOUND", f"there is no subscription {subscription_id!r}")
    return Subscription(**row)


def remove(conn: Connection, subscription_id: str, tenant: str, terms: StatementContext) -> None:
    """Delete it: nothing more is sent, and its deliveries are deleted by deliveries.tidy."""
    found = find(conn, subscription_id, tenant)
    if found.kind == "stream":
        raise ApiError(409, "STREAM_IS_A_SETTING", "the stream ends when the server starts without SEMEL_EVENTS")
    if conn.execute(delete(subscriptions).where(subscriptions.c.id == subscription_id)).rowcount:
        change = Change(name="subscription.deleted", tenant=tenant, target=found.id, before=_logged(found))
        audit_log.record(conn, terms, change)


def disable(conn: Connection, subscription_id: str, terms: StatementContext) -> None:
    """Disable the subscription. Its waiting deliveries become dead, and stay listed."""
    now = read_clock(conn, terms)
    conn.execute(update(subscriptions).where(subscriptions.c.id == subscription_id).values(disabled_us=now))
    fail_disabled(conn, terms)


_FAIL_DISABLED = Statement(
    lambda w: (
        f"""
UPDATE semel_deliveries SET state = 'dead', due_us = {w.now}, last_error = 'the subscription was disabled'
WHERE (run_id, version, subscription_id) IN (
  SELECT p.run_id, p.version, p.subscription_id FROM semel_deliveries AS p
  WHERE p.state = 'waiting' AND p.subscription_id IN (
    SELECT id FROM semel_subscriptions WHERE disabled_us IS NOT NULL AND kind = 'webhook')
  LIMIT :most {w.locking("p", skip=True)}
)"""
    )
)


def fail_disabled(conn: Connection, terms: StatementContext, most: int = 1000) -> int:
    """Mark the waiting deliveries of disabled webhooks as dead, up to ``most``; returns how many."""
    return _FAIL_DISABLED.count(conn, most=most, now=terms.now)


_KEEP_STREAM = Statement(
    lambda w: (
        f"""
INSERT INTO semel_subscriptions (id, tenant, kind, target, events, created_us)
VALUES (:id, '', 'stream', :target, :events, {w.now}) ON CONFLICT (id) DO UPDATE SET disabled_us = NULL
"""
    )
)


def keep_stream(conn: Connection, wanted: bool, terms: StatementContext) -> None:
    """Create or enable the stream's subscription, or disable it: its deliveries wait until it is enabled again."""
    if wanted:
        _KEEP_STREAM.count(conn, id=STREAM_ID, target=STREAM, events=_EVERYTHING, now=terms.now)
        return
    going = (subscriptions.c.id == STREAM_ID, subscriptions.c.disabled_us.is_(None))
    conn.execute(update(subscriptions).where(*going).values(disabled_us=read_clock(conn, terms)))
