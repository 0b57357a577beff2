"""Who uses most: the users that are worth a look, each counted as a submission would count them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct
from sqlalchemy import Connection

from semel.dashboard.overview.windows import id_at
from semel.db.dialect import Statement, StatementContext
from semel.runs.store import quotas
from semel.runs.types import EVERYBODY, MICRO, Quota, Usage

DAY = 86400
NEWEST = 10_000
"""Runs of the last day whose users are looked at."""
SLACK = 600
"""Seconds by which the clock that made a run's id may be wrong."""


class UserUsage(Struct, frozen=True, kw_only=True):
    """A user, the quota that holds for them, and what they use."""

    user: str
    quota: Quota | None
    own: bool
    """Whether the quota is theirs alone, and not the default one."""
    used: Usage


_ACTIVE = Statement(
    lambda _: (
        """
SELECT user_id, count(*) FROM semel_runs
WHERE tenant = :tenant AND user_id <> '' AND status IN ('PENDING', 'RUNNING')
GROUP BY user_id ORDER BY 2 DESC, 1 LIMIT :most"""
    )
)
_RECENT = Statement(
    lambda w: (
        f"""
SELECT user_id, count(*) FROM (
  SELECT tenant, user_id FROM semel_runs WHERE id >= {w.identity(":since")} ORDER BY id DESC LIMIT {NEWEST}) AS newest
WHERE tenant = :tenant AND user_id <> ''
GROUP BY user_id ORDER BY 2 DESC, 1 LIMIT :most"""
    )
)
_HOLDING = Statement(
    lambda _: (
        """
SELECT user_id, count(*) FROM semel_reservations
WHERE tenant = :tenant AND expires_us >= :at AND NOT consumed
GROUP BY user_id ORDER BY 2 DESC, 1 LIMIT :most"""
    )
)


def in_use(conn: Connection, tenant: str, most: int, terms: StatementContext) -> list[UserUsage]:
    """Users with a quota of their own, with runs under way, with runs of the last day, or with a slot that is held."""
    now = quotas.read_clock(conn, terms)
    own = [user for user in quotas.list_quotas(conn, tenant) if user != EVERYBODY]
    people = [(tenant, user) for user in _users(conn, tenant, most, now, own)]
    held = quotas.quotas_of(conn, people)
    return [
        UserUsage(
            user=person[1],
            quota=held.get(person),
            own=person[1] in own,
            used=quotas.usage(conn, person, now, held.get(person, _NEAR)),
        )
        for person in people
    ]


_NEAR = Quota(per_day=0, cost_daily=0.0)
"""How far back is looked for those without a quota: a day."""


def _users(conn: Connection, tenant: str, most: int, now: int, own: Sequence[str]) -> list[str]:
    """At the most so many; first those who are at work."""
    asked: dict[str, Any] = {"tenant": tenant, "most": most}
    rows = [
        *_ACTIVE.rows(conn, **asked),
        *_HOLDING.rows(conn, at=now, **asked),
        *_RECENT.rows(conn, since=id_at(now - (DAY + SLACK) * MICRO), **asked),
    ]
    return list(dict.fromkeys([*(row[0] for row in rows), *own]))[:most]
