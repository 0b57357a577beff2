"""``/ui/errors``: the latest failed attempts, grouped by the type of their error and by what it says.

Read from the newest ones, by the indexes of failures, so that the page costs the same however many runs there are.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Annotated, Any

from litestar import Response, get
from litestar.params import QueryParameter
from msgspec import Struct
from sqlalchemy import ColumnElement, Connection, TextClause, func, literal, select, text

from semel.dashboard.templating import page, short
from semel.db.dialect import Statement
from semel.db.schema import RETRIED, attempts
from semel.runs.types import INTERNAL_QUEUE
from semel.service.api.params import AnyRequest
from semel.service.state import CurrentPrincipal, CurrentState

PATH = "/ui/errors"
MAX_FAILURES = 2000
"""The newest failed attempts, which are grouped."""
MAX_LOOKED_AT = 10_000
"""Failures of all models and users that are searched for those of one."""
PORTION = 1000
MAX_ERROR = 500
"""Characters of an error that are read."""
MAX_GROUPS = 40
MAX_MESSAGE = 200
_TYPE = re.compile(r"([A-Za-z_][\w.]*)(?:: |$)")
_VARIES = re.compile(
    r"\b0x[0-9a-f]+\b|\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b|\b[0-9a-f]{12,}\b|\d+", re.IGNORECASE
)
"""What differs between errors of one kind: numbers, addresses and ids."""


class FailedAttempt(Struct, frozen=True):
    """An attempt at a run that failed, and why."""

    id: str
    """Of the run."""
    model: str
    user: str
    ended_us: int
    error: str | None
    was_last: bool = True
    """Whether the run failed with it; otherwise it was tried again."""


class ErrorGroup(Struct, frozen=True, kw_only=True):
    """Failures of one kind."""

    type: str
    message: str
    """That of the latest failure."""
    count: int
    failed: int
    """Runs that failed with it."""
    first_us: int
    last_us: int
    latest: str
    """The id of the latest run with it."""
    models: Counter[str]
    users: int


_RUNS = Statement(
    lambda w: (
        f"""
SELECT {w.as_text("id")}, model, user_id, queue FROM semel_runs
WHERE {w.is_in("id", "ids", "uuid")} AND id >= {w.identity(":least")} AND id <= {w.identity(":greatest")}"""
    )
)


def list_failures(
    conn: Connection, tenant: str, limit: int, *, model: str = "", user: str | None = None, retried: bool = False
) -> list[FailedAttempt]:
    """The latest attempts with which runs of a tenant failed; with ``retried``, also those that were not the last.

    Those of a model or a user are searched among the ``MAX_LOOKED_AT`` latest. Their models are looked up by id: to
    join the two tables, PostgreSQL would read all runs of the model.
    """
    if not limit:
        return []
    looked_at = limit if not model and user is None else MAX_LOOKED_AT
    latest = _latest(conn, tenant, attempts.c.status == literal("FAILED", literal_execute=True), looked_at)
    if retried:
        latest += _latest(conn, tenant, text(RETRIED), looked_at)
        latest = sorted(latest, key=lambda row: row[1], reverse=True)[:looked_at]
    found: list[FailedAttempt] = []
    for start in range(0, len(latest), PORTION):
        portion = latest[start : start + PORTION]
        ids = [row[0] for row in portion]
        known = {row[0]: row for row in _RUNS.rows(conn, ids=ids, least=min(ids), greatest=max(ids))}
        for run_id, ended_us, error, status in portion:
            _, its_model, its_user, queue = known.get(run_id, (run_id, "", "", INTERNAL_QUEUE))
            is_wanted = model in ("", its_model) and user in (None, its_user)
            if is_wanted and (queue != INTERNAL_QUEUE or its_user):
                found.append(FailedAttempt(run_id, its_model, its_user, ended_us, error, status == "FAILED"))
        if len(found) >= limit:
            break
    return found[:limit]


def _latest(
    conn: Connection, tenant: str, which: ColumnElement[bool] | TextClause, limit: int
) -> list[tuple[Any, ...]]:
    """The latest attempts of a tenant: run, end, error, status of the run after it."""
    error = func.substr(attempts.c.last_error, 1, MAX_ERROR)
    query = select(attempts.c.run_id, attempts.c.ended_us, error, attempts.c.status)
    query = query.where(attempts.c.tenant == tenant, which).order_by(attempts.c.ended_us.desc()).limit(limit)
    return [tuple(row) for row in conn.execute(query)]


def split_error(error: str | None) -> tuple[str, str]:
    """The type of an error and its message; an error without a type has an empty one."""
    told = (error or "no error recorded").strip()
    found = _TYPE.match(told)
    return (found[1], told[found.end() :].strip()) if found else ("", told)


def group_errors(failures: list[FailedAttempt]) -> list[ErrorGroup]:
    """The attempts by the type of their error, and by its message without numbers and ids; the most frequent first."""
    groups: dict[tuple[str, str], list[FailedAttempt]] = {}
    for each in failures:
        kind, message = split_error(each.error)
        groups.setdefault((kind, _VARIES.sub("#", short(message, MAX_MESSAGE))), []).append(each)
    found = [_group(kind, same) for (kind, _), same in groups.items()]
    return sorted(found, key=lambda each: (-each.count, -each.last_us))


def _group(kind: str, same: list[FailedAttempt]) -> ErrorGroup:
    latest = max(same, key=lambda each: each.ended_us)
    return ErrorGroup(
        type=kind,
        message=short(split_error(latest.error)[1], MAX_MESSAGE),
        count=len(same),
        failed=sum(each.was_last for each in same),
        first_us=min(each.ended_us for each in same),
        last_us=latest.ended_us,
        latest=latest.id,
        models=Counter(each.model for each in same),
        users=len({each.user for each in same}),
    )


@get(PATH)
async def show(
    request: AnyRequest,
    service: CurrentState,
    caller: CurrentPrincipal,
    model: Annotated[str, QueryParameter(max_length=1000)] = "",
) -> Response[Any]:
    """The errors of all models, or of one."""
    async with service.slow_query_lock:
        failures = await service.store.read(
            list_failures, caller.tenant, MAX_FAILURES, model=model, user=caller.visible_user, retried=True
        )
    groups = group_errors(failures)
    return page(
        request,
        service,
        caller,
        "errors/page.html",
        title="Errors",
        model=model,
        groups=groups[:MAX_GROUPS],
        more=max(0, len(groups) - MAX_GROUPS),
        failures=len(failures),
        is_cut=len(failures) == MAX_FAILURES,
        oldest_us=min((each.ended_us for each in failures), default=None),
    )


HANDLERS = (show,)
