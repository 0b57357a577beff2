"""What is known of a run's prediction, in its row of ``semel_jobs``.

The **intent** is stored before Replicate is called, under the run's fence. Which prediction a token became is stored
once, by whoever learns it first (the caller, a later attempt, a webhook), and never overwritten: of two predictions one
is followed, and the other is known to be a duplicate.
"""

from __future__ import annotations

import secrets
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import Struct
from sqlalchemy import Connection, Select, and_, func, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import IntegrityError

from semel.db.dialect import StatementContext
from semel.db.schema import active, has_digest, jobs, runs
from semel.errors import LeaseLost
from semel.runs.execution.context import Context
from semel.runs.store.quotas import read_clock

OPEN = ("asked", "starting", "processing")
"""Statuses of a prediction that may still run."""
PROVIDER = "replicate"

Recorded: TypeAlias = Literal["ours", "another", "taken", "gone"]
"""``another``: the run has a different prediction. ``taken``: it is another run's. ``gone``: no row has the token."""


class AlreadyClaimed(Exception):
    """The prediction belongs to another run."""


class Remote(Struct, frozen=True, kw_only=True):
    """What is known of a run's prediction."""

    run_id: str
    token: str
    id: str | None
    status: str
    intended_us: int
    past: list[str]
    now_us: int
    heard_us: int = 0
    fresh: bool = False
    """The intent is new: Replicate cannot have been called with this token yet."""


class LeaseRef(Struct, frozen=True):
    """An attempt's lease on a run, and the token of the run's prediction."""

    run_id: str
    fence: int
    token: str


class Intent(Struct, frozen=True, kw_only=True):
    """An attempt's intent to call Replicate, with this token if the run has none yet."""

    run_id: str
    fence: int
    token: str
    tenant: str
    user: str
    config: str


class Orphan(Struct, frozen=True, kw_only=True):
    """A prediction whose run is over."""

    remote: Remote
    parameters: str
    payload_hash: str
    over_us: int


def new_intent(ctx: Context, config: str) -> Intent:
    """The intent of an attempt, with a token that nobody can guess."""
    return Intent(
        run_id=ctx.run_id,
        fence=ctx.fence,
        token=secrets.token_hex(16),
        tenant=ctx.tenant,
        user=ctx.user,
        config=config,
    )


def intend(conn: Connection, intent: Intent, terms: StatementContext) -> Remote:
    """Store the intent, once; returns the one that exists, unless its prediction was given up."""
    now = read_clock(conn, terms)
    _require_fence(conn, intent.run_id, intent.fence)
    _make_row(conn, intent, now)
    known = _found(conn, jobs.c.run_id == intent.run_id, now)
    if known is not None and (known.id is None or known.id not in known.past):
        return msgspec.structs.replace(known, fresh=known.token == intent.token)
    conn.execute(
        update(jobs)
        .where(jobs.c.run_id == intent.run_id)
        .values(remote_token=intent.token, remote_id=None, remote_status="asked", remote_us=now)
    )
    past = known.past if known is not None else []
    return Remote(
        run_id=intent.run_id,
        token=intent.token,
        id=None,
        status="asked",
        intended_us=now,
        past=past,
        now_us=now,
        fresh=True,
    )


def require_lease(conn: Connection, lease: LeaseRef, terms: StatementContext) -> Remote:
    """Check that the lease still holds; returns what is known by now."""
    now = read_clock(conn, terms)
    _require_fence(conn, lease.run_id, lease.fence)
    known = _found(conn, jobs.c.remote_token == lease.token, now)
    if known is None:
        raise LeaseLost(f"run {lease.run_id} asks Replicate under another token by now")
    return known


def record(conn: Connection, token: str, prediction_id: str, status: str, terms: StatementContext) -> Recorded:
    """Store that the token became this prediction, unless it is known to have become another."""
    now = read_clock(conn, terms)
    try:
        changed = conn.execute(
            update(jobs)
            .where(jobs.c.remote_token == token, or_(jobs.c.remote_id.is_(None), jobs.c.remote_id == prediction_id))
            .values(remote_id=prediction_id, remote_status=status)
        ).rowcount
    except IntegrityError:
        raise AlreadyClaimed from None
    if changed:
        return "ours"
    return "gone" if _found(conn, jobs.c.remote_token == token, now) is None else "another"


def set_status(conn: Connection, lease: LeaseRef, status: str, terms: StatementContext) -> None:
    """Store the status of the remote job, under the run's fence."""
    require_lease(conn, lease, terms)
    set_status_of(conn, lease.token, status)


def set_status_of(conn: Connection, token: str, status: str) -> None:
    """Store the status of the remote job of a run that no worker holds."""
    conn.execute(update(jobs).where(jobs.c.remote_token == token).values(remote_status=status))


def give_up(conn: Connection, lease: LeaseRef, prediction_id: str, terms: StatementContext) -> None:
    """Store that the prediction failed: the next attempt creates another."""
    known = require_lease(conn, lease, terms)
    past = ",".join(dict.fromkeys([*known.past, prediction_id]))
    conn.execute(
        update(jobs).where(jobs.c.remote_token == lease.token).values(remote_status="failed", remote_past=past)
    )


def cancel_requested(conn: Connection, lease: LeaseRef, terms: StatementContext) -> bool:
    """Whether the run is to be cancelled; for the attempt that holds it."""
    require_lease(conn, lease, terms)
    query = select(runs.c.cancel_us.is_not(None)).where(runs.c.id == lease.run_id)
    return bool(conn.execute(query).scalar_one())


def find_by_token(conn: Connection, token: str, terms: StatementContext) -> Remote | None:
    """The remote job of a token."""
    return _found(conn, jobs.c.remote_token == token, read_clock(conn, terms))


def mark_heard(conn: Connection, token: str, terms: StatementContext) -> int:
    """Store that there is news of the remote job, for the process that follows it; returns the time."""
    now = read_clock(conn, terms)
    conn.execute(update(jobs).where(jobs.c.remote_token == token).values(remote_heard_us=now))
    return now


def heard_times(conn: Connection, tokens: list[str]) -> dict[str, int]:
    """When there was last news of each of the remote jobs."""
    query = select(jobs.c.remote_token, jobs.c.remote_heard_us).where(
        jobs.c.remote_token.in_(tokens), jobs.c.remote_heard_us.is_not(None)
    )
    return {row.remote_token: row.remote_heard_us for row in conn.execute(query)}


def claimed_by_others(conn: Connection, ids: list[str], token: str) -> list[str]:
    """Those of the predictions that are, or were, another job's than the token's."""
    query = select(jobs.c.remote_id, jobs.c.remote_past, jobs.c.remote_token).where(
        or_(jobs.c.remote_id.in_(ids), and_(jobs.c.provider == PROVIDER, jobs.c.remote_past.is_not(None)))
    )
    found: set[str] = set()
    for remote_id, past, whose in conn.execute(query):
        found.update(_ids(past))
        if whose != token and remote_id is not None:
            found.add(remote_id)
    return sorted(found.intersection(ids))


def count_rivals(conn: Connection, token: str, payload_hash: str) -> int:
    """How many other runs asked for exactly the same, and do not know their predictions either."""
    query = (
        select(func.count())
        .select_from(jobs.join(runs, runs.c.id == jobs.c.run_id))
        .where(jobs.c.remote_status == "asked", jobs.c.remote_id.is_(None), jobs.c.remote_token != token)
        .where(has_digest(runs.c.payload_hash, payload_hash))
    )
    count: int = conn.execute(query).scalar_one()
    return count


def orphans(conn: Connection, most: int, terms: StatementContext) -> list[Orphan]:
    """Predictions that may still run although their runs are over."""
    now = read_clock(conn, terms)
    query = (
        _columns(runs.c.parameters, runs.c.payload_hash, runs.c.finished_us)
        .join(runs, runs.c.id == jobs.c.run_id)
        .where(jobs.c.provider == PROVIDER, jobs.c.remote_status.in_(OPEN), jobs.c.remote_token.is_not(None))
        .where(runs.c.status.in_(("SUCCEEDED", "FAILED", "CANCELLED")))
        .order_by(jobs.c.run_id)
        .limit(most)
    )
    return [
        Orphan(
            remote=_remote(row, now),
            parameters=row.parameters,
            payload_hash=row.payload_hash,
            over_us=now - (row.finished_us or now),
        )
        for row in conn.execute(query)
    ]


def _require_fence(conn: Connection, run_id: str, fence: int) -> None:
    held = select(active.c.id).where(
        active.c.id == run_id, active.c.fence == fence, active.c.lease_until_us.is_not(None)
    )
    if conn.execute(held.with_for_update()).first() is None:
        raise LeaseLost(f"run {run_id} belongs to another attempt by now, or is over")


def _make_row(conn: Connection, intent: Intent, now: int) -> None:
    insert = postgresql.insert if conn.dialect.name == "postgresql" else sqlite.insert
    conn.execute(
        insert(jobs)
        .values(
            run_id=intent.run_id,
            tenant=intent.tenant,
            user_id=intent.user,
            provider=PROVIDER,
            config=intent.config,
            created_us=now,
        )
        .on_conflict_do_nothing(index_elements=["run_id"])
    )


def _columns(*more: Any) -> Select[Any]:
    names = ("run_id", "remote_token", "remote_id", "remote_status", "remote_us", "remote_past", "remote_heard_us")
    return select(*(jobs.c[name] for name in names), *more).select_from(jobs)


def _found(conn: Connection, which: Any, now: int) -> Remote | None:
    row = conn.execute(_columns().where(which, jobs.c.remote_token.is_not(None))).first()
    return None if row is None else _remote(row, now)


def _remote(row: Any, now: int) -> Remote:
    return Remote(
        run_id=str(row.run_id),
        token=row.remote_token,
        id=row.remote_id,
        status=row.remote_status or "asked",
        intended_us=row.remote_us or now,
        past=_ids(row.remote_past),
        now_us=now,
        heard_us=row.remote_heard_us or 0,
    )


def _ids(past: str | None) -> list[str]:
    return past.split(",") if past else []
