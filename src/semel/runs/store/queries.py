"""Reads runs, their timelines, logs, counts and workers. Nothing here writes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct
from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    CompoundSelect,
    Connection,
    FromClause,
    Select,
    Table,
    Uuid,
    and_,
    case,
    false,
    func,
    literal,
    or_,
    select,
    union_all,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from semel.db.dialect import Dialect, Statement, StatementContext, hot
from semel.db.schema import (
    Digest,
    active,
    has_digest,
    jobs,
    run_counts,
    run_hours,
    run_logs,
    run_totals,
    runs,
    steps,
    submitted,
    unsuccessful,
    workers,
)
from semel.runs.store.pauses import why_paused
from semel.runs.store.quotas import read_clock
from semel.runs.types import (
    HELD_US,
    INTERNAL_QUEUE,
    MICRO,
    TERMINAL,
    LogLine,
    Page,
    ParameterValue,
    Run,
    Step,
    Summary,
    Waiting,
    WorkerInfo,
    id_at,
    run_of,
)

if TYPE_CHECKING:
    from sqlalchemy.sql.compiler import SQLCompiler

WORKER_SILENCE_US = 45 * MICRO
"""A worker that was not seen for this long counts as dead."""

_HIDDEN = (
    "ready",
    "changed_us",
    "lease_us",
    "facet",
    "result",
    "result_exact",
    "trace",
    "active_id",
    "ended",
    "ended_id",
    "ended_tenant",
)
_SHOWN = [column for column in runs.c if column.name not in _HIDDEN]
_LISTED = [column for column in _SHOWN if column.name != "parameters"]
_FIRST_PORTION = 16
"""How many rows are read first for a page that is limited in bytes."""
_FIRST_LOOK = 2000
"""How many runs a list looks at one by one, before it searches for those that meet its filter."""
_FEW = 1000
"""Up to so many runs of a model, those in a status are searched for among them, not among all in that status."""
_UNSUCCESSFUL = TERMINAL - {"SUCCEEDED"}
CLOCK_SKEW_US = 3600 * MICRO
"""How far the clock of the host that made an id may be from the database's, which sets ``created_us``."""


def _is_of_users(table: FromClause) -> ColumnElement[bool]:
    """True for runs that a user submitted, false for the service's own work."""
    return or_(table.c.queue != INTERNAL_QUEUE, table.c.user_id != "")


_OF_USERS = _is_of_users(active)
_SPENT_US = case((runs.c.status == "SUCCEEDED", runs.c.finished_us - runs.c.started_us), else_=0)
"""For how long a run that succeeded ran."""


_IS_ACTIVE = runs.c.active_id >= literal(id_at(0), runs.c.active_id.type, literal_execute=True)
"""True for runs that are pending or running. As a range of ids, it lets SQLite begin with the table of these."""


def has_status(*statuses: str) -> ColumnElement[bool]:
    """True for runs in one of these statuses, so that the database reads the table where they are."""
    wanted = [literal(status, literal_execute=True) for status in statuses]
    if all(status in TERMINAL for status in statuses):
        return runs.c.ended == wanted[0] if len(wanted) == 1 else runs.c.ended.in_(wanted)
    if any(status in TERMINAL for status in statuses):
        return runs.c.status.in_(wanted)
    lease = {"PENDING": runs.c.lease_until_us.is_(None), "RUNNING": runs.c.lease_until_us.is_not(None)}
    return and_(_IS_ACTIVE, or_(false(), *(lease[each] for each in lease if each in statuses)))


STALLED = and_(
    has_status("RUNNING"),
    runs.c.stall_us.is_not(None),
    runs.c.heartbeat_us - runs.c.progress_us >= runs.c.stall_us,
)
"""True for a run that is alive and makes no progress; see ``Run.stalled_us``."""


class _HasParameter(FunctionElement[bool]):
    """True if the first argument, a JSON object as text, has the second as a name, with the value of the third, which
    is a JSON array of one value. Numbers are equal if their values are: 3 is 3.0.
    """

    inherit_cache = True
    type = Boolean()


@compiles(_HasParameter, "sqlite")
def _has_parameter_on_sqlite(element: _HasParameter, compiler: SQLCompiler, **options: Any) -> str:
    column, name, value = (compiler.process(each, **options) for each in element.clauses)
    numbers = "('integer', 'real')"
    return (
        f"EXISTS (SELECT 1 FROM json_each({column}) AS j, json_each({value}) AS v WHERE j.key = {name} "
        f"AND j.atom IS v.atom AND (j.type = v.type OR (j.type IN {numbers} AND v.type IN {numbers})))"
    )


@compiles(_HasParameter, "postgresql")
def _has_parameter_on_postgres(element: _HasParameter, compiler: SQLCompiler, **options: Any) -> str:
    column, name, value = (compiler.process(each, **options) for each in element.clauses)
    return f"(CAST({column} AS jsonb) -> CAST({name} AS text)) = (CAST({value} AS jsonb) -> 0)"


class Filter(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Which runs to list; None matches any. ``key``, ``payload_hash`` and ``worker`` match exactly."""

    tenant: str = ""
    status: Sequence[str] | None = None
    model: str | None = None
    user: str | None = None
    queue: str | None = None
    key: str | None = None
    payload_hash: str | None = None
    since_us: int | None = None
    until_us: int | None = None
    stalled: bool = False
    """Only those that are alive and make no progress."""
    worker: str | None = None
    """The id of the worker that has the run, or had it last."""
    error: str | None = None
    """Part of the last error; upper and lower case differ."""
    parameters: Mapping[str, ParameterValue] | None = None
    """Values of parameters: all of them must be equal."""
    ids: Sequence[str] | None = None
    """Only these."""
    inline: bool = False
    """Whether names are part of the statement's text: then PostgreSQL always plans it for them, and knows if they are
    rare."""
    real_time: bool = False
    """Whether runs were submitted by the hosts' clocks, from which their ids are made: then ids bound the times."""

    @property
    def first_id(self) -> str | None:
        """Runs with a smaller id were submitted before ``since_us``, as far as clocks agree."""
        return id_at(self.since_us - CLOCK_SKEW_US) if self.real_time and self.since_us is not None else None

    @property
    def last_id(self) -> str | None:
        """Runs with a greater id were submitted after ``until_us``, as far as clocks agree."""
        return id_at(self.until_us + CLOCK_SKEW_US) if self.real_time and self.until_us is not None else None

    @property
    def table(self) -> Table:
        """Where these runs are found: what was submitted is enough to know, unless their state matters."""
        return runs if self._asks_for_state else submitted

    @property
    def _asks_for_state(self) -> bool:
        return self.status is not None or self.stalled or self.worker is not None or self.error is not None

    @property
    def listed_by(self) -> ColumnElement[str]:
        """The id by which :meth:`query` lists these runs."""
        return unsuccessful.c.run_id if self.lists_unsuccessful else self.order

    @property
    def lists_unsuccessful(self) -> bool:
        """Whether these are runs of one user that failed or were cancelled, of which there is a list for each user."""
        return bool(self.user) and bool(self.status) and _UNSUCCESSFUL.issuperset(self.status or ())

    @property
    def _beyond_list(self) -> Filter | None:
        """What else is asked of runs in such a list, if anything is."""
        rest = msgspec.structs.replace(self, user=None, status=None)
        return None if rest == Filter(tenant=self.tenant, inline=self.inline, real_time=self.real_time) else rest

    @property
    def is_in_list(self) -> bool:
        """Whether such a list has these runs without many others between them: all, or those of a time."""
        rest = msgspec.structs.replace(self, since_us=None, until_us=None)
        return self.lists_unsuccessful and rest._beyond_list is None

    def query(self) -> Select[tuple[str]]:
        """The ids of these runs."""
        if not self.lists_unsuccessful:
            return select(self.table.c.id).where(*self.conditions(self.table))
        whose = (unsuccessful.c.tenant == self._value(self.tenant), unsuccessful.c.user_id == self._value(self.user))
        states = [literal(status, literal_execute=True) for status in self.status or ()]
        state = unsuccessful.c.status == states[0] if len(states) == 1 else unsuccessful.c.status.in_(states)
        query = select(unsuccessful.c.run_id).where(*whose, state)
        if (rest := self._beyond_list) is None:
            return query
        table = rest.table
        return query.join(table, table.c.id == unsuccessful.c.run_id).where(*rest.conditions(table))

    def without_state(self) -> Filter:
        """The same without conditions on the state of a run."""
        return msgspec.structs.replace(self, status=None, stalled=False, worker=None, error=None)

    @property
    def order(self) -> ColumnElement[str]:
        """The id by which these runs are listed and bounded: that of the table whose index finds them."""
        if self.status and TERMINAL.isdisjoint(self.status):
            return runs.c.active_id
        alone = self.status is not None and len(self.status) == 1 and self.status[0] in TERMINAL
        return runs.c.ended_id if alone else self.table.c.id

    def is_met_by(self, run: Run) -> bool:
        """Whether a run that met the filter a moment ago still does: all but its state is for ever."""
        return (
            (self.status is None or run.status in self.status)
            and (not self.stalled or run.stalled_us is not None)
            and (self.worker is None or run.worker == self.worker)
            and (self.error is None or self.error in (run.last_error or ""))
        )

    def conditions(self, table: FromClause = runs) -> list[Any]:
        """The filter as SQL conditions on its table or some rows of it, or on the view of all runs."""
        wanted = {
            "model": self.model,
            "user_id": self.user,
            "queue": self.queue,
            "idempotency_key": self.key,
        }
        found: list[Any] = [table.c.tenant == self._value(self.tenant)]
        if self.queue != INTERNAL_QUEUE:
            found.append(_is_of_users(table))
        found += [table.c[name] == self._value(value) for name, value in wanted.items() if value is not None]
        if self.payload_hash is not None:
            found.append(has_digest(table.c.payload_hash, self.payload_hash))
        if self.user:
            found.append(table.c.user_id != literal("", literal_execute=True))  # so that the partial index is used
        if self.since_us is not None:
            found.append(table.c.created_us >= self.since_us)
        if self.until_us is not None:
            found.append(table.c.created_us < self.until_us)
        if self.ids is not None:
            found.append(self.order.in_(self.ids))
        return found + self._of_state() + self._of_parameters(table)

    def _of_state(self) -> list[Any]:
        found: list[Any] = []
        if self.status is not None:
            found.append(has_status(*self.status) if self.status else false())
        if self.stalled:
            found.append(STALLED)
        if self.worker is not None:
            found.append(runs.c.worker == self.worker)
        if self.error is not None:  # unlike LIKE, this is the same on both databases
            found.append(func.replace(runs.c.last_error, self.error, "") != runs.c.last_error)
        return found

    def _of_parameters(self, table: FromClause) -> list[Any]:
        wanted = {name: msgspec.json.encode([value]).decode() for name, value in (self.parameters or {}).items()}
        return [_HasParameter(table.c.parameters, literal(name), literal(value)) for name, value in wanted.items()]

    def _value(self, name: Any) -> Any:
        return literal(name, literal_execute=True) if self.inline else name


def _as_text(dialect: Dialect, column: Column[Any]) -> str:
    if isinstance(column.type, Digest):
        return dialect.digits(column.name)
    return dialect.as_text(column.name) if isinstance(column.type, Uuid) else column.name


class _Getting:
    """Reads runs by their ids, as text with an array: one statement for any number of ids, at half of SQLAlchemy's cost
    per row. The bounds let PostgreSQL leave out all partitions but those of the ids.
    """

    def __init__(self, columns: Sequence[Column[Any]]) -> None:
        def get(dialect: Dialect) -> str:
            shown = ", ".join(_as_text(dialect, column) for column in columns)
            bounds = f"id >= {dialect.identity(':least')} AND id <= {dialect.identity(':greatest')}"
            return f"SELECT {shown} FROM semel_run_states WHERE {dialect.is_in('id', 'ids', 'uuid')} AND {bounds}"

        self._names = [column.name for column in columns]
        self._get = Statement(get)

    def rows(self, conn: Connection, ids: Sequence[str]) -> list[dict[str, Any]]:
        """The rows that there are, in no order."""
        if not ids:
            return []
        rows = self._get.rows(conn, ids=list(ids), least=min(ids), greatest=max(ids))
        return [dict(zip(self._names, row, strict=True)) for row in rows]


_GET, _GET_LISTED = _Getting(_SHOWN), _Getting(_LISTED)


@hot
def get(conn: Connection, ids: Sequence[str], tenant: str | None = None) -> dict[str, Run]:
    """The runs of these ids, by id; ids without a run are left out."""
    found = [run_of(row) for row in _GET.rows(conn, ids)]
    return {run.id: run for run in found if tenant is None or run.tenant == tenant}


def read_by_id(conn: Connection, ids: Sequence[str], *, parameters: bool = True) -> list[Run]:
    """The runs of these ids, newest first; ids without a run are left out."""
    rows = (_GET if parameters else _GET_LISTED).rows(conn, ids)
    return [run_of(row) for row in sorted(rows, key=_id_of, reverse=True)]


class RunVersion(Struct, frozen=True):
    """The state of a run in short: if two are equal, nothing was written to the run in between."""

    version: int
    status: str
    lease_until_us: int | None
    heartbeat_us: int | None
    cancel_us: int | None
    progress: float | None
    progress_note: str | None

    @classmethod
    def of(cls, run: Run) -> RunVersion:
        """The version of a run as it was read."""
        return cls(*(getattr(run, name) for name in cls.__struct_fields__))


_MARKED = [runs.c[name] for name in RunVersion.__struct_fields__]


@hot
def versions(conn: Connection, ids: Sequence[str]) -> dict[str, tuple[RunVersion, tuple[int, int]]]:
    """The versions of these runs, and the (fence, line) of the last line of each log; (0, 0) for an empty log."""
    logged = select(run_logs.c.fence).where(run_logs.c.run_id == runs.c.id)
    last = logged.order_by(run_logs.c.fence.desc(), run_logs.c.line.desc()).limit(1)
    line = last.with_only_columns(run_logs.c.line)
    query = select(runs.c.id, last.scalar_subquery(), line.scalar_subquery(), *_MARKED)
    rows = conn.execute(query.where(runs.c.id.in_(list(ids))))
    return {run_id: (RunVersion(*rest), (fence or 0, number or 0)) for run_id, fence, number, *rest in rows}


def list_runs(
    conn: Connection,
    wanted: Filter,
    limit: int,
    cursor: str | None,
    *,
    parameters: bool = True,
    max_bytes: int | None = None,
) -> Page:
    """Newest first, page by page: the cost of a page does not grow with its number.

    A page with ``max_bytes`` ends before the run that would make it larger, but has at least one run. It is read in
    portions, so that not much more than that is ever in memory. First the ids alone are found: to plan a statement
    that reads all of every run takes PostgreSQL long where there are many partitions.
    """
    count = _count_of_model(conn, wanted)
    if count == 0:
        return Page([], None)
    cursor = min((each for each in (cursor, wanted.last_id) if each is not None), default=None)
    found: list[Run] = []
    portion = limit + 1 if max_bytes is None else _FIRST_PORTION
    while True:
        asked = min(portion, limit + 1 - len(found))
        ids = _find(conn, wanted, cursor, asked, count)
        for row in sorted((_GET if parameters else _GET_LISTED).rows(conn, ids), key=_id_of, reverse=True):
            if max_bytes is not None:
                max_bytes -= _weight(row)
                if max_bytes < 0 and found:
                    return Page(found, found[-1].id)
            run = run_of(row)
            found += [run] if wanted.is_met_by(run) else []
        if len(ids) < asked or len(found) > limit:
            return Page(found[:limit], found[limit - 1].id if len(found) > limit else None)
        cursor = ids[-1]
        portion *= 2


_id_of = itemgetter("id")


def _count_of_model(conn: Connection, wanted: Filter) -> int | None:
    """How many runs of the model there are: 0 if there are none in these statuses; None where that is not counted.

    Those under way have no sums. They are counted only if few have ended, and only until they are not few.
    """
    if wanted.model is None or wanted.queue == INTERNAL_QUEUE:
        return None
    found = _counted_ended(wanted.tenant).subquery()
    query = select(found.c.status, func.sum(found.c.count)).where(found.c.model == wanted.model)
    counts = {status: int(count) for status, count in conn.execute(query.group_by(found.c.status))}
    ended = sum(counts.values())
    if wanted.status is not None and TERMINAL.issuperset(wanted.status) and not any(map(counts.get, wanted.status)):
        return 0
    if ended > _FEW:
        return ended
    under_way = select(literal(1)).where(active.c.tenant == wanted.tenant, active.c.model == wanted.model, _OF_USERS)
    return ended + (conn.scalar(select(func.count()).select_from(under_way.limit(_FEW + 1).subquery())) or 0)


def find(conn: Connection, wanted: Filter, before: str | None, limit: int) -> list[str] | None:
    """The newest ids, before this one, of a model's runs that meet the filter: fewer than ``limit`` if there are no
    more. None where there is no short way to them: the filter names no model, or one that has many runs and a status.
    """
    count = _count_of_model(conn, wanted)
    if count == 0:
        return []
    if count is None or (count > _FEW and wanted.table is not submitted):
        return None
    return _find(conn, wanted, before, limit, count)


def next_ids(conn: Connection, wanted: Filter, before: str | None, limit: int) -> list[str]:
    """The newest ids, before this one, of runs that meet the filter: fewer than ``limit`` if there are no more."""
    before = min((each for each in (before, wanted.last_id) if each is not None), default=None)
    count = _count_of_model(conn, wanted)
    return [] if count == 0 else _find(conn, wanted, before, limit, count)


def count_matching(conn: Connection, wanted: Filter) -> int:
    """How many runs meet the filter. Looks at each of them."""
    bounds = _within(wanted.listed_by, wanted.first_id, wanted.last_id)
    return conn.scalar(select(func.count()).select_from(wanted.query().where(*bounds).subquery())) or 0


def _find(conn: Connection, wanted: Filter, before: str | None, limit: int, count: int | None) -> list[str]:
    """The newest ids of runs that meet the filter, up to ``limit`` of them; fewer if there are no more.

    Where an index has the runs in the order of their ids, it is read. Else the newest runs are looked at one by one,
    and if too few of them meet the filter, the rest is searched, from the newest down. ``count``: of the model's runs.
    """
    few = count is not None and count <= _FEW and not wanted.lists_unsuccessful
    if not few and (wanted.table is not submitted or _has_index(conn, wanted)):
        return _ids_in(conn, wanted, wanted.first_id, before, limit)
    if few:
        return _search(conn, wanted, before, limit, count)
    ids, reached = _look(conn, wanted, before, limit)
    if len(ids) == limit or reached is None:
        return ids
    if count is None and wanted.queue != INTERNAL_QUEUE:
        found = _counted(wanted.tenant)
        count = int(conn.scalar(select(func.coalesce(func.sum(found.c.count), 0))) or 0)
        if count <= len(ids):  # the tenant has no others
            return ids
    return ids + _search(conn, wanted, reached, limit - len(ids), count)


def _has_index(conn: Connection, wanted: Filter) -> bool:
    of_model = wanted.model is not None and conn.dialect.name == "sqlite"
    return bool(wanted.user) or wanted.payload_hash is not None or of_model


def _within(column: ColumnElement[str], first: Any, before: Any) -> list[Any]:
    bounds = (None if first is None else column >= first, None if before is None else column < before)
    return [each for each in bounds if each is not None]


def _ids_in(conn: Connection, wanted: Filter, first: str | None, before: str | None, limit: int) -> list[str]:
    """The newest ids from ``first`` to before ``before`` of runs that meet the filter."""
    by = wanted.listed_by
    bounds = [each and literal(each, by.type, literal_execute=wanted.inline) for each in (first, before)]
    return list(conn.scalars(wanted.query().where(*_within(by, *bounds)).order_by(by.desc()).limit(limit)))


def _look(conn: Connection, wanted: Filter, before: str | None, limit: int) -> tuple[list[str], str | None]:
    """Those of the next runs that meet the filter, and the last id that was looked at; None at the end."""
    bounds = _within(submitted.c.id, wanted.first_id, before)
    newest = select(submitted).where(*bounds).order_by(submitted.c.id.desc())
    looked = newest.limit(_FIRST_LOOK).subquery()
    meeting = select(looked.c.id).where(*wanted.conditions(looked)).order_by(looked.c.id.desc())
    ids = list(conn.scalars(meeting.limit(limit)))
    if len(ids) == limit:
        return ids, None
    return ids, conn.scalar(newest.with_only_columns(submitted.c.id).offset(_FIRST_LOOK - 1).limit(1))


def _search(conn: Connection, wanted: Filter, before: str | None, limit: int, count: int | None) -> list[str]:
    """As _find, where most runs do not meet the filter: in ranges of ids, from the newest down.

    The first range is as long as ``count`` runs of equal distances let expect, each further one is longer: the database
    finds all the runs of a range at once, by an index of what is where (``semel_runs_search``).
    """
    ends = [conn.scalar(select(submitted.c.id).order_by(order).limit(1)) for order in (submitted.c.id, _NEWEST)]
    if ends[0] is None:
        return []
    oldest, newest = max(_time_of(ends[0]), _time_of(wanted.first_id)), _time_of(before or ends[1]) + 1
    length = (newest - oldest) * min(1.0, 4 * limit / max(count, 1) if count else 1 / 64)
    wanted = msgspec.structs.replace(wanted, inline=True)
    found: list[str] = []
    while True:
        newest -= math.ceil(length)
        first = wanted.first_id if newest <= oldest else id_at(newest * 1000)
        found += _ids_in(conn, _among(conn, wanted, first, before), first, before, limit - len(found))
        if len(found) == limit or newest <= oldest:
            return found
        before, length = first, 16 * length


_NEWEST = submitted.c.id.desc()


def _among(conn: Connection, wanted: Filter, first: str | None, before: str | None) -> Filter:
    """The filter, with the ids of the range that all but a state allows, if it asks for one."""
    if wanted.table is submitted:
        return wanted
    ids = _ids_in(conn, wanted.without_state(), first, before, 10 * _FEW)
    return msgspec.structs.replace(wanted, ids=ids)


def _time_of(run_id: str | None) -> int:
    """The milliseconds with which an id begins."""
    return 0 if run_id is None else int(run_id.replace("-", "")[:12], 16)


def _weight(row: Mapping[Any, Any]) -> int:
    """About how many bytes a row takes on the wire."""
    return 1000 + sum(len(value) for value in row.values() if isinstance(value, str))


@hot
def result(conn: Connection, run_id: str, tenant: str | None) -> tuple[Run, str | None, str | None] | None:
    """The run, its result if that is in the row, and the exact form (see ``AttemptResult``) if that differs."""
    query = select(*_SHOWN, runs.c.result, runs.c.result_exact).where(runs.c.id == run_id)
    if tenant is not None:
        query = query.where(runs.c.tenant == tenant)
    row = conn.execute(query).mappings().one_or_none()
    if row is None:
        return None
    fields = dict(row)
    kept, exact = fields.pop("result"), fields.pop("result_exact")
    return run_of(fields), kept, exact


def timeline(conn: Connection, run_id: str) -> list[Step]:
    """Every step of a run's life, oldest first."""
    columns = [steps.c[name] for name in ("version", "at_us", "step", "status", "fence", "worker", "note")]
    rows = conn.execute(select(*columns).where(steps.c.run_id == run_id).order_by(steps.c.version))
    return [Step(*row) for row in rows]


def logs(conn: Connection, run_id: str, after: tuple[int, int], limit: int) -> list[LogLine]:
    """Lines of a run after (fence, line), oldest first."""
    fence, line = after
    later = or_(run_logs.c.fence > fence, and_(run_logs.c.fence == fence, run_logs.c.line > line))
    columns = [run_logs.c[name] for name in ("fence", "line", "at_us", "level", "text")]
    query = select(*columns).where(run_logs.c.run_id == run_id, later)
    rows = conn.execute(query.order_by(run_logs.c.fence, run_logs.c.line).limit(limit))
    return [LogLine(*row) for row in rows]


def _counted(tenant: str) -> Any:
    """The runs of a tenant, counted: those that ended from the sums, those under way one by one."""
    status = case((active.c.lease_until_us.is_(None), "PENDING"), else_="RUNNING").label("status")
    none = literal(0, BigInteger)
    under_way = (
        select(active.c.model, status, func.count().label("count"), none.label("spent_us"), active.c.facet)
        .where(active.c.tenant == tenant, _OF_USERS)
        .group_by(active.c.model, status, active.c.facet)
    )
    return union_all(*_counted_ended(tenant).selects, under_way).subquery()


def _counted_ended(tenant: str) -> CompoundSelect[Any]:
    """The sums of a tenant's runs that have ended."""
    same = ("model", "status", "count", "spent_us")
    facet = case((run_totals.c.facet == "", None), else_=func.substr(run_totals.c.facet, 2)).label("facet")
    return union_all(
        select(*(run_totals.c[name] for name in same), facet).where(run_totals.c.tenant == tenant),
        select(*(run_counts.c[name] for name in same), run_counts.c.facet).where(run_counts.c.tenant == tenant),
    )


def _count_of_user(tenant: str, user: str) -> Any:
    groups = (runs.c.model, runs.c.status, runs.c.facet)
    query = select(*groups, func.count().label("count"), func.sum(_SPENT_US).label("spent_us"))
    return query.where(*Filter(tenant=tenant, user=user).conditions()).group_by(*groups).subquery()


def summary(conn: Connection, tenant: str, *, grouped: bool, user: str | None = None) -> list[Summary]:
    """How many runs of each model are in each status, and how long those that succeeded took on average.

    ``grouped`` also by the value of the parameter that the model is summarised by. Of one user, or of all.
    """
    found = _counted(tenant) if user is None else _count_of_user(tenant, user)
    names = [found.c.model, found.c.facet] if grouped else [found.c.model]
    count = func.sum(found.c.count)
    rows = conn.execute(
        select(*names, found.c.status, count, func.sum(found.c.spent_us))
        .group_by(*names, found.c.status)
        .having(count != 0)
        .order_by(*names)
    )
    counts: dict[tuple[str, str | None], dict[str, int]] = {}
    seconds: dict[tuple[str, str | None], float] = {}
    for *name, status, count, total in rows:
        place = (name[0], name[1] if grouped else None)
        counts.setdefault(place, {})[status] = int(count)
        if status == "SUCCEEDED":
            seconds[place] = float(total) / MICRO / float(count)
    return [
        Summary(model=model, group=group, counts=by_status, mean_seconds=seconds.get((model, group)))
        for (model, group), by_status in counts.items()
    ]


def model_hours(conn: Connection, tenant: str, model: str, since_us: int) -> list[tuple[int, str, int, int]]:
    """How many runs of a model ended since then: (hour, status, bucket of durations, count)."""
    columns = (run_hours.c.hour_us, run_hours.c.status, run_hours.c.bucket, run_hours.c.count)
    of_model = (run_hours.c.tenant == tenant, run_hours.c.model == model, run_hours.c.hour_us >= since_us)
    return [tuple(row) for row in conn.execute(select(*columns).where(*of_model))]


class Backlog(Struct, frozen=True):
    """How many runs wait and how many run, and for how many seconds the oldest run that is due has waited."""

    pending: int
    running: int
    oldest_wait: float
    stalled: int = 0
    """How many of the running ones are alive and make no progress."""


def backlog(conn: Connection, context: StatementContext) -> Backlog:
    """Count the runs that wait and those that run, without the service's own work."""
    now = read_clock(conn, context)
    waits = active.c.lease_until_us.is_(None)
    pending, running, oldest = conn.execute(
        select(
            func.count().filter(waits),
            func.count().filter(~waits),
            func.min(active.c.due_us).filter(waits, active.c.ready),
        ).where(_OF_USERS)
    ).one()
    beat, moved = (func.coalesce(column, active.c.began_us) for column in (active.c.heartbeat_us, active.c.progress_us))
    still = select(func.count()).join_from(active, submitted, active.c.id == submitted.c.id)
    stalled = conn.scalar(still.where(_OF_USERS, ~waits, beat - moved >= submitted.c.stall_us)) or 0
    return Backlog(pending, running, 0.0 if oldest is None else max(0.0, (now - oldest) / MICRO), stalled)


@hot
def waiting(conn: Connection, run_id: str, context: StatementContext, place: bool = True) -> Waiting | None:
    """Why a run is pending, since when, and its place in the queue; None if it is not pending.

    Without ``place``, the runs ahead are counted only if the reason names their number: the count reads all of them.
    """
    now = read_clock(conn, context)
    row = conn.execute(select(runs).where(runs.c.id == run_id)).one_or_none()
    if row is None or row.status != "PENDING":
        return None
    if row.due_us - row.changed_us >= HELD_US:
        return Waiting(reason=_uploading(conn, run_id), since_us=row.changed_us, place=None)
    paused = why_paused(conn, row.queue, row.model, named=not row.tenant)
    if row.due_us > now and not row.ready:
        reason = "; ".join(filter(None, [_not_yet(row, now), paused]))
        return Waiting(reason=reason, since_us=row.changed_us, place=None, due_us=row.due_us)
    if paused is not None:
        return Waiting(reason=paused, since_us=row.changed_us, place=None)
    serving = [each for each in list_workers(conn, context) if each.alive and row.queue in each.queues]
    able = [each for each in serving if each.slots.get(each.models.get(row.model, "")) and not each.draining]
    ahead = (conn.scalar(select(func.count()).where(_before(row))) or 0) if place or able else 0
    reason = _reason(row, serving, able, ahead)
    return Waiting(reason=reason, since_us=row.changed_us, place=ahead + 1 if place else None, workers=len(able))


def _uploading(conn: Connection, run_id: str) -> str:
    sent = conn.execute(select(jobs.c.data_bytes, jobs.c.data_total).where(jobs.c.run_id == run_id)).one_or_none()
    if sent is None or sent.data_total is None:
        return "its data is being uploaded"
    return f"its data is being uploaded: {sent.data_bytes:,} of {sent.data_total:,} bytes"


def _not_yet(row: Any, now: int) -> str:
    seconds = min(row.due_us - now, row.due_us - row.changed_us) / MICRO  # not longer because the clock was put back
    if row.step == "retried":
        return f"backing off for {seconds:.0f} s more after an error ({row.errors} of {row.max_attempts}): {row.note}"
    if row.step == "snoozed":
        return f"snoozed for {seconds:.0f} s more: {row.note}"
    return f"scheduled: it is due in {seconds:.0f} s"


def _before(row: Any) -> Any:
    """True for runs that are due and come before this one in the same queue."""
    later = or_(
        active.c.priority > row.priority,
        and_(
            active.c.priority == row.priority,
            or_(active.c.due_us < row.due_us, and_(active.c.due_us == row.due_us, active.c.id < row.id)),
        ),
    )
    return and_(active.c.lease_until_us.is_(None), active.c.ready, active.c.queue == row.queue, later)


def _reason(row: Any, serving: Sequence[WorkerInfo], able: Sequence[WorkerInfo], ahead: int) -> str:
    if not serving:
        return f"no live worker serves the queue {row.queue!r}"
    if not able:
        known = any(row.model in each.models for each in serving)
        return (
            f"the live workers of the queue {row.queue!r} have no slots for the model {row.model!r}, or are stopping"
            if known
            else f"no live worker of the queue {row.queue!r} knows the model {row.model!r}"
        )
    before = "it is next" if ahead == 0 else "1 run is ahead" if ahead == 1 else f"{ahead} runs are ahead"
    if all(each.free(row.model) <= 0 for each in able):
        slots = sum(each.slots[each.models[row.model]] for each in able)
        workers = "1 worker" if len(able) == 1 else f"{len(able)} workers"
        return f"all slots are busy ({slots} on {workers}); {before}"
    return before


def list_workers(conn: Connection, context: StatementContext) -> list[WorkerInfo]:
    """The workers that run, or ran until recently, and how many runs of each model they hold."""
    now = read_clock(conn, context)
    groups = (active.c.worker, active.c.model)
    holds: dict[str, dict[str, int]] = {}
    for worker, model, count in conn.execute(
        select(*groups, func.count()).where(active.c.lease_until_us.is_not(None)).group_by(*groups)
    ):
        holds.setdefault(worker, {})[model] = count
    return [
        WorkerInfo(
            id=row.id,
            name=row.name,
            host=row.host,
            pid=row.pid,
            queues=json.loads(row.queues),
            models=json.loads(row.models),
            slots=json.loads(row.slots),
            draining=row.draining,
            started_us=row.started_us,
            seen_us=row.seen_us,
            alive=abs(now - row.seen_us) < WORKER_SILENCE_US,
            holds=holds.get(row.id, {}),
        )
        for row in conn.execute(select(workers).order_by(workers.c.name, workers.c.started_us))
    ]
