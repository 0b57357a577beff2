"""Submit, in one transaction: a repeat finds its run by its key; only new runs count against the quota; then key, run
and event are written together.

A client's key names its run for a day, whatever became of the run. Without a key, the hash of the payload names the
run, for some minutes, and only while the run is pending or running.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from typing import Any, TypeAlias

from msgspec import Struct
from sqlalchemy import Connection, delete, insert, select

from semel.db.dialect import Dialect, Statement, StatementContext
from semel.db.schema import jobs, run_keys, runs
from semel.errors import KeyReused, RunNotFound, SemelError, StoreUnavailable
from semel.runs.store import queries, quotas
from semel.runs.store.quotas import Admission, Meter, Person
from semel.runs.store.run_keys import READ_KEYS, ROUNDS, TAKE_KEYS, KeyKind
from semel.runs.store.transitions import CHANNEL, EVENT, NOTED, WANTED, note
from semel.runs.types import HELD_US, Run


class JobDetails(Struct, frozen=True, kw_only=True):
    """What is stored in addition for a run that is a job of the jobs API."""

    provider: str
    config: str
    digest: str | None = None
    """The hash that is stored with the job's key, instead of the payload's."""
    tracker_run_name: str | None = None
    data: str | None = None
    """The folder that is to be uploaded before the run may start."""
    upload_model: str = ""
    """The model of the run that uploads it."""
    remote_status: str | None = None


class Submission(Struct, frozen=True, kw_only=True):
    """One run to be created. ``key`` is None if a repeat is not to be recognised."""

    id: str
    tenant: str
    user: str
    model: str
    queue: str
    priority: int
    parameters: str
    payload_hash: str
    key: str | None
    key_kind: KeyKind
    key_ttl_us: int
    delay_us: int
    cost: int
    lease_us: int
    stall_us: int | None
    max_attempts: int
    max_lost: int
    facet: str | None = None
    retry_of: str | None = None
    reservation: str | None = None
    slot: str | None = None
    """A reservation in whose flow it is submitted: if it still holds a slot, the run takes that slot."""
    own_key: str | None = None
    """A client's key in addition to the payload, looked up first: it names the run that the payload finds, or that is
    created, for ``own_ttl_us``."""
    own_ttl_us: int
    asked: str | None = None
    """The hash that is stored with the key, if it is not the payload's."""
    trace: str | None = None
    """The ``traceparent`` of the span in which it was submitted."""
    job: JobDetails | None = None
    first: Submission | None = None
    """A run that is created with this one, and that will release it; until then it is held (see HELD_US)."""

    @property
    def key_hash(self) -> str:
        """The hash that is stored with its key: a repeat must have the same."""
        return self.payload_hash if self.asked is None else self.asked

    def key_end(self, since_us: int) -> int | None:
        """Until when its key names the run; None if it has only a payload."""
        if self.own_key is not None:
            return since_us + self.own_ttl_us
        return since_us + self.key_ttl_us if self.key_kind == "key" and self.key is not None else None

    @property
    def person(self) -> Person:
        """The tenant and user whose quota it counts against."""
        return (self.tenant, self.user)

    @property
    def reserved(self) -> bool:
        """Whether it may have a reserved slot."""
        return self.reservation is not None or self.slot is not None

    @property
    def place(self) -> tuple[str, str, str, str | None]:
        """The primary key of its key in ``semel_run_keys``."""
        return (self.tenant, self.user, self.key_kind, self.key)

    @property
    def own_place(self) -> tuple[str, str, str, str | None]:
        """As ``place``, for the key that is looked up first."""
        return self.place if self.own_key is None else (self.tenant, self.user, "key", self.own_key)


class Created(Struct, frozen=True):
    """The run is new."""

    id: str
    created_us: int
    admission: Admission


class Existing(Struct, frozen=True):
    """The run existed; ``id`` is what the key names, ``run`` the run if it was read on the way."""

    id: str
    run: Run | None = None
    expires_us: int | None = None
    """Until when the key names the run, if it was found by a key."""


Answer: TypeAlias = Created | Existing | SemelError

_RUN_COLUMNS = {
    "in_id": "uuid",
    "in_tenant": "text",
    "in_user": "text",
    "in_model": "text",
    "in_queue": "text",
    "in_priority": "integer",
    "in_parameters": "text",
    "in_hash": "text",
    "in_key": "text",
    "in_facet": "text",
    "in_retry_of": "uuid",
    "in_cost": "bigint",
    "in_delay": "bigint",
    "in_lease": "bigint",
    "in_stall": "bigint",
    "in_max_attempts": "integer",
    "in_max_lost": "integer",
    "in_trace": "text",
}


def _insert_runs(dialect: Dialect) -> str:
    inserted = f"""
INSERT INTO semel_runs AS k (
  id, tenant, user_id, model, queue, priority, status, ready, step, version, changed_us, fence, attempts, errors,
  losts, max_attempts, max_lost, parameters, payload_hash, idempotency_key, facet, retry_of, cost, asked_cost,
  created_us, due_us, lease_us, stall_us, trace, data_ref)
SELECT in_id, in_tenant, in_user, in_model, in_queue, in_priority, 'PENDING', in_delay <= 0, 'created', 1,
  {dialect.now}, 0, 0, 0, 0, in_max_attempts, in_max_lost, in_parameters, in_hash, in_key, in_facet, in_retry_of,
  in_cost, in_cost, {dialect.now}, {dialect.now} + in_delay, in_lease, in_stall, in_trace,
  (SELECT d.data_ref FROM semel_runs AS d WHERE d.id = in_retry_of)
FROM {dialect.batch(_RUN_COLUMNS)} WHERE true ON CONFLICT (id) DO NOTHING"""
    if not dialect.writes_in_with:
        return f"{inserted} RETURNING id, created_us"
    return f"""
WITH made AS ({inserted} RETURNING {dialect.returning(NOTED)}, queue, created_us),
noted AS (INSERT INTO semel_run_events ({EVENT})
          SELECT {NOTED}, CAST(:publish AS boolean), {WANTED} FROM made)
SELECT CAST(id AS text), created_us,
       (SELECT count(pg_notify('{CHANNEL}', queue)) FROM (SELECT DISTINCT queue FROM made) AS q)
FROM made"""


_INSERT_RUNS = Statement(_insert_runs, _RUN_COLUMNS)


def submit(conn: Connection, submissions: Sequence[Submission], context: StatementContext) -> list[Answer]:
    """Check and write a batch. The answer to a refused one is its error, and does not affect the others."""
    now, limited = quotas.read_clock_and_quotas(conn, context)
    clock, context = context, StatementContext(now, context.publish)
    answers = _without_their_first(conn, submissions, context)
    left = [each for each in submissions if each.id not in answers]
    while left:
        first: dict[tuple[Any, ...], Submission] = {}
        for each in left:
            first.setdefault(each.place if each.key is not None else (each.id,), each)
        leaders = list(first.values())
        admitted = {}
        if limited or any(each.reserved for each in leaders):
            admitted = _meet_quotas(conn, leaders, answers, context, clock)
        _create(conn, [each for each in leaders if each.id not in answers], admitted, answers, context)
        left = _follow([each for each in left if each.id not in answers], first, answers)
        answers |= _known(conn, left, context)
        left = [each for each in left if each.id not in answers]
        _settle_slots(conn, submissions, answers)
    _name_found(conn, submissions, answers, context)
    return [answers[each.id] for each in submissions]


def _without_their_first(
    conn: Connection, submissions: Sequence[Submission], context: StatementContext
) -> dict[str, Answer]:
    """Refuse retries of runs that were purged meanwhile; lock the other runs until the transaction ends."""
    wanted = {each.retry_of for each in submissions if each.retry_of is not None}
    if not wanted:
        return {}
    query = select(runs.c.id).where(runs.c.id.in_(wanted)).order_by(runs.c.id)
    there = set(conn.scalars(query.with_for_update(read=True, key_share=True)))
    orphans = [each for each in submissions if each.retry_of is not None and each.retry_of not in there]
    gone = "it was removed, being old, and cannot be retried; submit its work as a new run"
    refused: dict[str, Answer] = {each.id: RunNotFound(f"there is no run {each.retry_of}: {gone}") for each in orphans}
    return refused | _known(conn, orphans, context)


def _name_found(
    conn: Connection, submissions: Sequence[Submission], answers: dict[str, Answer], context: StatementContext
) -> None:
    """Let a key whose payload found a run name that run from now on, so that a repeat finds the same one."""
    named: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    for each in submissions:
        answer = answers[each.id]
        if each.own_key is not None and isinstance(answer, Existing) and answer.id != each.id:
            named.setdefault(each.own_place, (*each.own_place, each.key_hash, answer.id, each.own_ttl_us))
            if answer.expires_us is None and context.now is not None:
                answers[each.id] = Existing(answer.id, answer.run, each.key_end(context.now))
    if named:
        TAKE_KEYS.rows(conn, list(named.values()), now=context.now)


def _settle_slots(conn: Connection, submissions: Sequence[Submission], answers: dict[str, Answer]) -> None:
    """Release the reservations of submissions that found a run, or whose key was reused: they need no slot.

    A reservation that its own flow will consume stays, and is bound to the run.
    """
    for each in submissions:
        answer = answers.get(each.id)
        if each.reservation is not None and isinstance(answer, Existing | KeyReused):
            quotas.release(conn, each.reservation, each.person)
        if each.slot is not None and isinstance(answer, Created | Existing):
            quotas.bind(conn, each.slot, each.person, answer.id)


def _follow(
    followers: Sequence[Submission], first: dict[tuple[Any, ...], Submission], answers: dict[str, Answer]
) -> list[Submission]:
    """Answer repeats of a key within the batch like the first; return those to decide by themselves."""
    undecided = []
    for each in followers:
        leader = first[each.place]
        answer = answers[leader.id]
        if isinstance(answer, SemelError) or each.own_key is not None:  # an own key may name another run
            undecided.append(each)
            continue
        if each.key_hash != leader.key_hash:
            answers[each.id] = _reused(each)
            continue
        until = answer.expires_us if isinstance(answer, Existing) else leader.key_end(answer.created_us)
        answers[each.id] = Existing(answer.id, expires_us=until if each.key_kind == "key" else None)
    return undecided


def _meet_quotas(
    conn: Connection,
    submissions: Sequence[Submission],
    answers: dict[str, Answer],
    context: StatementContext,
    clock: StatementContext,
) -> dict[str, Admission]:
    """Add to ``answers`` what a quota refuses and what exists already; return the admissions of the rest."""
    limits = quotas.quotas_of(conn, {each.person for each in submissions})
    limited = [each for each in submissions if each.person in limits or each.reserved]
    if not limited:
        return {}
    quotas.lock(conn, {each.person for each in limited})
    now = context.now
    if now is None or any(each.reserved for each in limited):
        now = quotas.read_clock(conn, clock)  # the wait for the lock may have lasted longer than a reservation
    answers |= _known(conn, limited, context)
    meters = {
        person: Meter(person[1], quota, quotas.usage(conn, person, now, quota))
        for person, quota in limits.items()
        if any(each.id not in answers for each in limited if each.person == person)
    }
    admitted: dict[str, Admission] = {}
    for each in limited:
        if each.id not in answers:
            try:
                admitted[each.id] = _admit(conn, each, meters, now)
            except SemelError as error:
                answers[each.id] = error
    return admitted


def _admit(conn: Connection, each: Submission, meters: dict[Person, Meter], now: int) -> Admission:
    """Count the submission and consume its reservation; if either is refused, neither is done."""
    meter = copy(meters.get(each.person))
    reserved = each.reservation is not None or (
        each.slot is not None and quotas.is_open(conn, each.slot, each.person, now)
    )
    admission = meter.admit(each.cost, reserved=reserved) if meter else Admission()
    if each.reservation is not None:
        quotas.consume(conn, each.reservation, each.person, each.id, now)
    elif reserved and each.slot is not None:
        quotas.bind(conn, each.slot, each.person, each.id)
    if meter:
        meters[each.person] = meter
    return admission


def _create(
    conn: Connection,
    submissions: Sequence[Submission],
    admitted: dict[str, Admission],
    answers: dict[str, Answer],
    context: StatementContext,
) -> None:
    """Take the keys and write the runs; where a key is taken, the answer is the run that it names."""
    left = list(submissions)
    for _ in range(ROUNDS):
        won = _take_keys(conn, left, context)
        written = _write_runs(conn, won, context)
        _write_jobs(conn, won, dict(written), context)
        for run_id, created_us in written:
            answers[run_id] = Created(run_id, created_us, admitted.get(run_id, Admission()))
        left = [each for each in left if each.id not in answers]
        if left:
            answers |= _known(conn, left, context)
            left = [each for each in left if each.id not in answers]
        if not left:
            return
    for each in left:
        answers[each.id] = StoreUnavailable(f"the key {each.key!r} changed hands {ROUNDS} times; try again")


def _take_keys(conn: Connection, submissions: Sequence[Submission], context: StatementContext) -> list[Submission]:
    keyed = [(*each.place, each.key_hash, each.id, each.key_ttl_us) for each in submissions if each.key is not None]
    if not keyed:
        return list(submissions)
    taken = {row[0] for row in TAKE_KEYS.rows(conn, keyed, now=context.now)}
    return _take_own_keys(conn, [each for each in submissions if each.key is None or each.id in taken], context)


def _take_own_keys(conn: Connection, submissions: Sequence[Submission], context: StatementContext) -> list[Submission]:
    """Take the own keys. A submission that cannot gives back the key of its payload, and is left out."""
    first = {each.own_place: each for each in reversed(submissions) if each.own_key is not None}
    if not first:
        return list(submissions)
    keyed = [(*place, each.key_hash, each.id, each.own_ttl_us) for place, each in first.items()]
    taken = {row[0] for row in TAKE_KEYS.rows(conn, keyed, now=context.now)}
    late = {each.id: each for each in submissions if each.own_key is not None and each.id not in taken}
    for each in late.values():  # sent twice at the same time, and the other was first
        place = zip(("tenant", "user_id", "kind", "key"), each.place, strict=True)
        mine = [*(run_keys.c[name] == value for name, value in place), run_keys.c.job_id == each.id]
        conn.execute(delete(run_keys).where(*mine))
    return [each for each in submissions if each.id not in late]


def _write_runs(
    conn: Connection, submissions: Sequence[Submission], context: StatementContext
) -> list[tuple[str, int]]:
    if not submissions:
        return []
    rows = _INSERT_RUNS.rows(conn, map(_run_row, submissions), now=context.now, publish=context.publish)
    if conn.dialect.name == "sqlite":
        note(conn, rows, context)
    return [(row[0], row[1]) for row in rows]


def _write_jobs(
    conn: Connection, submissions: Sequence[Submission], created: dict[str, int], context: StatementContext
) -> None:
    """Write the jobs of runs that were created, and the runs that must come first."""
    new = [each for each in submissions if each.job is not None and each.id in created]
    if not new:
        return
    _write_runs(conn, [each.first for each in new if each.first is not None], context)
    conn.execute(insert(jobs), [_job_row(each, created[each.id]) for each in new])


def _job_row(each: Submission, created_us: int) -> dict[str, Any]:
    assert each.job is not None
    return {
        "run_id": each.id,
        "tenant": each.tenant,
        "user_id": each.user,
        "provider": each.job.provider,
        "config": each.job.config,
        "tracker_run_name": each.job.tracker_run_name,
        "created_us": created_us,
        "data": each.job.data,
        "data_state": None if each.first is None else "uploading",
        "upload_id": None if each.first is None else each.first.id,
        "remote_status": each.job.remote_status,
    }


def _run_row(each: Submission) -> tuple[Any, ...]:
    return (
        each.id,
        each.tenant,
        each.user,
        each.model,
        each.queue,
        each.priority,
        each.parameters,
        each.payload_hash,
        each.own_place[3] if each.own_place[2] == "key" else None,
        each.facet,
        each.retry_of,
        each.cost,
        each.delay_us if each.first is None else HELD_US,
        each.lease_us,
        each.stall_us,
        each.max_attempts,
        each.max_lost,
        each.trace,
    )


def _known(conn: Connection, submissions: Iterable[Submission], context: StatementContext) -> dict[str, Answer]:
    """Answers for the submissions that were written already, or whose keys are in use."""
    submissions = list(submissions)
    if not submissions:
        return {}
    ids = [each.id for each in submissions]
    rows = conn.execute(select(runs.c.id, runs.c.created_us).where(runs.c.id.in_(ids)))
    there = dict(tuple(row) for row in rows)  # sent before, and the reply was lost
    answers: dict[str, Answer] = {
        each.id: Existing(each.id, expires_us=each.key_end(there[each.id])) for each in submissions if each.id in there
    }
    keyed = [each for each in submissions if each.key is not None and each.id not in answers]
    if not keyed:
        return answers
    places = dict.fromkeys(place for each in keyed for place in (each.own_place, each.place))
    held = {tuple(row[:4]): row for row in READ_KEYS.rows(conn, list(places), now=context.now)}
    for each in keyed:
        row = held.get(each.own_place) or held.get(each.place)
        if row is not None:
            same = row[4] == each.key_hash
            answers[each.id] = Existing(row[5], expires_us=_end(row)) if same else _reused(each)
    return answers


def recognised(conn: Connection, submissions: Iterable[Submission], context: StatementContext) -> dict[str, Answer]:
    """Answers for submissions whose keys are in use, read without a transaction or a lock."""
    keyed = [each for each in submissions if each.key is not None and not each.reserved]
    if not keyed:
        return {}
    rows = READ_KEYS.rows(conn, [each.own_place for each in keyed], now=context.now)
    held = {tuple(row[:4]): row for row in rows}
    ours = {each.id: held[each.own_place] for each in keyed if each.own_place in held}
    same = {each.id: ours[each.id] for each in keyed if each.id in ours and ours[each.id][4] == each.key_hash}
    there = queries.get(conn, list({row[5] for row in same.values()})) if same else {}
    answers: dict[str, Answer] = {each.id: _reused(each) for each in keyed if each.id in ours}
    return answers | {asked: Existing(row[5], there.get(row[5]), _end(row)) for asked, row in same.items()}


def _end(row: Any) -> int | None:
    """Until when a key is kept; None for a payload."""
    return row[6] if row[2] == "key" else None


def _reused(each: Submission) -> KeyReused:
    key = each.own_place[3]
    message = f"key reused with different payload: {key!r} belongs to other work; use a new key for this"
    return KeyReused(message, idempotency_key=key)
