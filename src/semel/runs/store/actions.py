"""Actions on all runs that match a filter, as SQL: begun once, and carried out in batches, each in one transaction.

    begin ──▶ take ──▶ advance ──▶ advance ──▶ … ──▶ finished
               ▲          │
               └──────────┘  the process died: its lease ends, and another takes the action

The runs are visited from the newest down, and ``reached`` is the last one. A batch changes its runs and ``reached`` in
the same transaction, and only if ``reached`` is still what the batch began after. So however many processes carry out
an action, and whenever they die, each run is changed once. The lease only saves them the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec
from msgspec import Struct
from sqlalchemy import Connection, delete, insert, or_, select, update

from semel.db.dialect import StatementContext, hot, transaction
from semel.db.schema import active, run_actions
from semel.errors import KeyReused, SemelError
from semel.runs.store import audit_log, queries, transitions
from semel.runs.store import submit as store_submit
from semel.runs.store.audit_log import Change
from semel.runs.store.queries import Filter
from semel.runs.store.quotas import read_clock
from semel.runs.store.submit import Answer, Created, Existing, Submission
from semel.runs.store.transitions import CHANNEL, storable
from semel.runs.types import MICRO, ActionKind, RunAction, Status
from semel.types import moment

STATUSES: dict[ActionKind, tuple[Status, ...]] = {
    "cancel": ("PENDING", "RUNNING"),
    "retry": ("FAILED", "CANCELLED"),
    "set_priority": ("PENDING",),
}
"""The statuses of the runs that each action can change."""
LEASE_US = 5 * MICRO
"""For how long a process that carries out an action has it; every batch renews it."""
KEPT_US = 30 * 86400 * MICRO
"""For how long finished actions are shown."""

_LOGGED = {"cancel": "runs.cancelled", "retry": "runs.retried", "set_priority": "runs.prioritized"}
_COLUMNS = [run_actions.c.user_id.label("user") if each.name == "user_id" else each for each in run_actions.c]
_UNFINISHED = run_actions.c.finished_us.is_(None)


class NewAction(Struct, frozen=True, kw_only=True):
    """An action that is asked for. The filter names only statuses that it can change."""

    id: str
    tenant: str
    user: str
    action: ActionKind
    filter: Filter
    priority: int | None = None
    why: str = ""


class Batch(Struct, frozen=True, kw_only=True):
    """The next runs of an action, down to ``last``; without ``more`` there are no others.

    ``ids`` are those to cancel or to give the priority, ``submissions`` those of a retry. Runs that could not be
    prepared are counted in ``failed`` and ``skipped``.
    """

    ids: Sequence[str]
    last: str | None
    more: bool
    submissions: Sequence[Submission] = ()
    failed: int = 0
    skipped: int = 0
    error: str | None = None


Advanced: TypeAlias = tuple[RunAction, list[Answer]]


def described(wanted: Filter) -> dict[str, Any]:
    """The conditions of a filter, as the API names them."""
    shown = {
        "status": None if wanted.status is None else list(wanted.status),
        "model": wanted.model,
        "user": wanted.user,
        "queue": wanted.queue,
        "worker": wanted.worker,
        "error": wanted.error,
        "parameters": None if wanted.parameters is None else dict(wanted.parameters),
        "since": None if wanted.since_us is None else moment(wanted.since_us).isoformat(),
        "until": None if wanted.until_us is None else moment(wanted.until_us).isoformat(),
        "stalled": wanted.stalled or None,
    }
    return {name: value for name, value in shown.items() if value is not None}


def begin(conn: Connection, asked: NewAction, context: StatementContext) -> RunAction:
    """Store the action with the number of runs that match now, and log it. One of the same id is returned as it is.

    Raises KeyReused if that one is another action.
    """
    found = get(conn, asked.id)
    if found is not None:
        return _same(found, asked)
    now = read_clock(conn, context)
    conn.execute(delete(run_actions).where(run_actions.c.finished_us < now - KEPT_US))
    row = {
        "id": asked.id,
        "tenant": asked.tenant,
        "user_id": storable(asked.user),
        "action": asked.action,
        "filter": msgspec.json.encode(asked.filter).decode(),
        "priority": asked.priority,
        "why": storable(asked.why),
        "created_us": now,
        "lease_until_us": 0,
        "matched": queries.count_matching(conn, asked.filter),
        **dict.fromkeys(("done", "failed", "skipped"), 0),
    }
    conn.execute(insert(run_actions).values(row))
    about = {"filter": described(asked.filter), "matched": row["matched"]}
    more = {"priority": asked.priority} if asked.action == "set_priority" else {"why": asked.why} if asked.why else {}
    change = Change(name=_LOGGED[asked.action], tenant=asked.tenant, target=asked.id, after={**about, **more})
    audit_log.record(conn, context, change)
    begun = get(conn, asked.id)
    assert begun is not None
    return begun


def try_out(conn: Connection, asked: NewAction, context: StatementContext) -> RunAction:
    """The action with the number of runs that match now. Nothing is stored."""
    return RunAction(
        id="",
        tenant=asked.tenant,
        user=asked.user,
        action=asked.action,
        filter=asked.filter,
        priority=asked.priority,
        why=asked.why,
        matched=queries.count_matching(conn, asked.filter),
        created_us=read_clock(conn, context),
    )


def _same(found: RunAction, asked: NewAction) -> RunAction:
    before = (found.tenant, found.action, found.filter, found.priority, found.why)
    if before != (asked.tenant, asked.action, asked.filter, asked.priority, storable(asked.why)):
        raise KeyReused("the key was used before, for another action on runs: use a new key")
    return found


def get(conn: Connection, action_id: str, tenant: str | None = None) -> RunAction | None:
    """The action of this id, if there is one."""
    query = select(*_COLUMNS).where(run_actions.c.id == action_id)
    if tenant is not None:
        query = query.where(run_actions.c.tenant == tenant)
    row = conn.execute(query).one_or_none()
    return None if row is None else _action(row)


def recent(conn: Connection, tenant: str, user: str | None, limit: int) -> list[RunAction]:
    """The actions of a tenant, or of one of its users, newest first."""
    query = select(*_COLUMNS).where(run_actions.c.tenant == tenant)
    if user is not None:
        query = query.where(run_actions.c.user_id == user)
    rows = conn.execute(query.order_by(run_actions.c.created_us.desc(), run_actions.c.id.desc()).limit(limit))
    return [_action(row) for row in rows]


def _action(row: Any) -> RunAction:
    fields = dict(row._mapping)
    return RunAction(**{**fields, "filter": msgspec.json.decode(fields["filter"], type=Filter)})


def _is_free(now: int) -> Any:
    """True for actions that nobody carries out. A lease that ends too late began before the clock was put back."""
    ends = run_actions.c.lease_until_us
    return or_(ends < now, ends > now + LEASE_US)


@hot
def find_free(conn: Connection, context: StatementContext) -> str | None:
    """The id of the oldest action that nobody carries out."""
    free = select(run_actions.c.id).where(_UNFINISHED, _is_free(read_clock(conn, context)))
    return conn.scalar(free.order_by(run_actions.c.created_us).limit(1))


def take(conn: Connection, action_id: str, holder: str, context: StatementContext) -> RunAction | None:
    """Take the action, to carry it out; None if it is finished, if another holder has it, or if a newer release began
    it with a filter that this one does not know. Who has it already, and did not get the reply, takes it again.
    """
    unfinished = (run_actions.c.id == action_id, _UNFINISHED)
    conn.execute(select(run_actions.c.id).where(*unfinished).with_for_update())
    now = read_clock(conn, context)  # behind the lock: the lease of who had it does not seem too long
    values = {"lease_until_us": now + LEASE_US, "holder": holder}
    free = or_(_is_free(now), run_actions.c.holder == holder)
    taken = conn.execute(update(run_actions).where(*unfinished, free).values(values)).rowcount
    try:
        return get(conn, action_id) if taken else None
    except msgspec.ValidationError:
        return None


@hot
def advance(conn: Connection, action: RunAction, batch: Batch, context: StatementContext) -> Advanced | None:
    """Change the runs of a batch, and store how far the action came; returns it, and the answers to the submissions.

    None, and nothing is changed, if ``action`` is outdated: the batch was done by another process, or by an earlier try
    whose reply was lost.
    """
    with transaction(conn) as channels:
        same = (run_actions.c.id == action.id, run_actions.c.reached.is_not_distinct_from(action.reached), _UNFINISHED)
        if conn.scalar(select(run_actions.c.id).where(*same).with_for_update()) is None:
            return None
        answers = store_submit.submit(conn, batch.submissions, context) if batch.submissions else []
        if any(isinstance(each, Created) for each in answers):
            channels.add(CHANNEL)
        done = _change(conn, action, batch, context) if batch.ids else 0
        found = sum(isinstance(each, Existing) for each in answers)
        errors = [str(each) for each in answers if isinstance(each, SemelError)]
        now = read_clock(conn, context)
        values = {
            "reached": batch.last or action.reached,
            "done": action.done + done + len(answers) - found - len(errors),
            "failed": action.failed + batch.failed + len(errors),
            "skipped": action.skipped + batch.skipped + len(batch.ids) - done + found,
            "error": action.error or storable(batch.error or "".join(errors[:1]))[:2000] or None,
            "lease_until_us": now + LEASE_US,
            "finished_us": None if batch.more else now,
        }
        conn.execute(update(run_actions).where(run_actions.c.id == action.id).values(values))
        return msgspec.structs.replace(action, **values), answers


def _change(conn: Connection, action: RunAction, batch: Batch, context: StatementContext) -> int:
    """Cancel these runs, or set their priorities, as far as they are still in the statuses of the filter; returns how
    many were changed.
    """
    statuses = action.filter.status or ()
    waits = active.c.lease_until_us.is_(None)
    state = [] if len(statuses) > 1 else [waits if "PENDING" in statuses else ~waits]
    locked = select(active.c.id).where(active.c.id.in_(list(batch.ids)), *state).order_by(active.c.id)
    ids = list(conn.scalars(locked.with_for_update()))
    if not ids:
        return 0
    if action.action == "cancel":
        return len(transitions.cancel(conn, ids, action.why, context))
    return conn.execute(update(active).where(active.c.id.in_(ids)).values(priority=action.priority)).rowcount


def next_batch(conn: Connection, action: RunAction, limit: int) -> list[str]:
    """The next ids of runs that match, newest first; fewer than ``limit`` if there are no more.

    Runs that were submitted after the action began do not match.
    """
    until_us = min(each for each in (action.filter.until_us, action.created_us + 1) if each is not None)
    return queries.next_ids(conn, msgspec.structs.replace(action.filter, until_us=until_us), action.reached, limit)
