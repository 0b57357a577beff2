"""Submit, in one transaction: a repeat finds its run by its key; only new runs count against the quota; then key, run
and event are written together.

A client's key is claimed as every other key (see :mod:`semel.runs.store.run_keys`), and names its run for a day,
whatever became of the run. Without a key, the hash of the payload names the run, for some minutes, and only while the
run is pending or running.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from typing import Any, TypeAlias

from msgspec import Struct
from sqlalchemy import Connection, insert, select

from semel.db.dialect import Dialect, Statement, StatementContext
from semel.db.schema import jobs, submitted
from semel.errors import KeyReused, RunNotFound, SemelError, StoreUnavailable
from semel.once.rules import judge
from semel.once.store import ClaimRequest, Forget, KeyRef
from semel.runs.store import queries, quotas, run_keys
from semel.runs.store.quotas import Admission, Meter, Person
from semel.runs.store.run_keys import ROUNDS, KeyKind, dedupe_of, refusal, run_key, scope_of_runs
from semel.runs.store.transitions import tell, telling
from semel.runs.types import HELD_US, Run, checked_id
from semel.types import Claim, Granted, Mismatch, Replay, Verdict


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


class Submission(Struct, frozen=True, kw_only=True, gc=False):
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
    rerun_of: str | None = None
    seed: int | None = None
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
    group: int = 0
    """Submissions of one call with the same group differ only in their ids, parameters and keys, and either all have
    a key or none has; 0: it is in no group."""

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
    def wait_us(self) -> int:
        """How long the run waits before it is due."""
        return self.delay_us if self.first is None else HELD_US

    @property
    def person(self) -> Person:
        """The tenant and user whose quota it counts against."""
        return (self.tenant, self.user)

    @property
    def reserved(self) -> bool:
        """Whether it may have a reserved slot."""
        return self.reservation is not None or self.slot is not None

    @property
    def first_run(self) -> str | None:
        """The run that it retries or runs again, whose data it has."""
        return self.rerun_of if self.retry_of is None else self.retry_of

    @property
    def place(self) -> tuple[str, str, str, str | None]:
        """What is equal for two submissions that are to be one run."""
        return (self.tenant, self.user, self.key_kind, self.key)

    @property
    def client_key(self) -> str | None:
        """The client's key, if it gave one."""
        return self.own_key if self.own_key is not None or self.key_kind == "payload" else self.key

    @property
    def ref(self) -> KeyRef | None:
        """Where the client's key is stored."""
        key = self.client_key
        return None if key is None else KeyRef(scope_of_runs(self.tenant, self.user), key)

    def claim(self, run_id: str) -> ClaimRequest:
        """The claim of the client's key for this run."""
        ref = self.ref
        assert ref is not None
        ttl = self.key_ttl_us if self.own_key is None else self.own_ttl_us
        return run_key(ref.scope, ref.key, self.key_hash, run_id, ttl)

    @property
    def dedupe(self) -> str | None:
        """What is unique among active runs, if the payload names the run."""
        if self.key_kind == "key" or self.key is None:
            return None
        return dedupe_of(self.tenant, self.user, self.key_hash)


def one_of_each_group(submissions: Iterable[Submission]) -> list[Submission]:
    """The submissions without those that are in the group of another one."""
    groups: dict[int, Submission] = {}
    others = []
    for each in submissions:
        if each.group:
            groups[each.group] = each
        else:
            others.append(each)
    return [*groups.values(), *others]


class Created(Struct, frozen=True, gc=False):
    """The run is new."""

    id: str
    created_us: int
    admission: Admission


class Existing(Struct, frozen=True, gc=False):
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
    "in_dedupe": "uuid",
    "in_dedupe_for": "bigint",
    "in_seed": "bigint",
    "in_rerun_of": "uuid",
}


_USUAL_LEASE = "60000000"
"""See ``schema.submitted``."""
_SUBMITTED = (
    "id, created_us, lease_us, asked_cost, stall_us, priority, max_attempts, max_lost, tenant, user_id, model, "
    "queue, payload_hash, parameters, idempotency_key, facet, retry_of, data_ref, trace, "
    "seed, rerun_of"
)
_ACTIVE = (
    "id, since_us, due_us, lease_us, fence, priority, version, attempts, errors, losts, ready, tenant, user_id, queue, "
    "model, facet, dedupe, dedupe_until_us, cost, charged_us"
)


def _unseen(dialect: Dialect, columns: Mapping[str, str] = _RUN_COLUMNS) -> str:
    """The batch without the runs that are there: they were sent before, and the reply was lost.

    The bounds let PostgreSQL begin with the partitions of these ids alone.
    """
    least, greatest = dialect.identity(":least"), dialect.identity(":greatest")
    return f"""{dialect.batch(columns)} WHERE NOT EXISTS (
  SELECT 1 FROM semel_runs AS o WHERE o.id = in_id AND o.id >= {least} AND o.id <= {greatest})"""


def _queue(dialect: Dialect, asked: str, *, deduped: bool) -> str:
    """Insert the active rows of runs. Sorted, so that two batches never deadlock."""
    return f"""
INSERT INTO semel_active AS k ({_ACTIVE})
SELECT in_id, {dialect.now}, {dialect.now} + in_delay, in_lease, 0, in_priority, 1, 0, 0, 0, in_delay <= 0, in_tenant,
  in_user, in_queue, in_model, in_facet, in_dedupe, {dialect.now} + in_dedupe_for, nullif(in_cost, 0),
  CASE WHEN in_cost <> 0 THEN {dialect.now} END
FROM {asked}
{"ORDER BY in_dedupe ON CONFLICT DO NOTHING" if deduped else ""}
RETURNING {dialect.returning("id")}"""


def _insert(dialect: Dialect, asked: str, *, retries: bool) -> str:
    data = "NULL"
    if retries:
        data = "(SELECT d.data_ref FROM semel_run_states AS d WHERE d.id = coalesce(in_retry_of, in_rerun_of))"
    return f"""
INSERT INTO semel_runs ({_SUBMITTED})
SELECT in_id, {dialect.now}, {dialect.sparse("in_lease", _USUAL_LEASE)}, nullif(in_cost, 0), in_stall,
  {dialect.sparse("in_priority", "0")}, in_max_attempts, in_max_lost,
  in_tenant, in_user, in_model, in_queue, {dialect.digest("in_hash")}, in_parameters, in_key, in_facet,
  in_retry_of, {data}, in_trace, in_seed, in_rerun_of
FROM {asked}"""


_TOLD = telling(
    "(SELECT id AS run_id, 1 AS version, created_us AS at_us, 'created' AS step, 'PENDING' AS status, "
    "CAST(0 AS bigint) AS fence, CAST(NULL AS text) AS worker, CAST(NULL AS text) AS note FROM made) AS t"
)


def _whole(dialect: Dialect, asked: str, queued: str, new: str, *, retries: bool) -> str:
    """Insert the runs ``new`` and tell of them, where a CTE may write (PostgreSQL).

    Returns one row: NULL, or if not all of the batch were new, the ids of those that were.
    """
    return f"""
WITH asked AS MATERIALIZED (SELECT * FROM {asked}),
{queued}
made AS ({_insert(dialect, new, retries=retries)} RETURNING id, created_us),
told AS ({_TOLD})
SELECT CASE WHEN (SELECT count(*) FROM made) < cardinality(CAST(:in_id AS uuid[]))
            THEN ARRAY(SELECT CAST(id AS text) FROM made) END"""


_OWN_COLUMNS = {name: _RUN_COLUMNS[name] for name in ("in_id", "in_parameters", "in_hash", "in_facet")}
"""What the runs of a group are written with that have no keys; they share the other columns."""


def _alike(dialect: Dialect) -> str:
    """As :func:`_whole` for runs that share all but their own columns: PostgreSQL is given each value once."""
    shared = [f"CAST(:{name} AS {kind}) AS {name}" for name, kind in _RUN_COLUMNS.items() if name not in _OWN_COLUMNS]
    asked = f"(SELECT asked.*, {', '.join(shared)} FROM asked) AS w"
    queued = f"queued AS ({_queue(dialect, asked, deduped=False)}),"
    return _whole(dialect, _unseen(dialect, _OWN_COLUMNS), queued, asked, retries=False)


_CREATE_ALIKE = Statement(_alike, _OWN_COLUMNS)


class _Creating:
    """Writes new runs: on PostgreSQL in one statement, or two, on SQLite in a few. ``deduped``: where a payload names
    an active run, no other is written. ``retries``: some have the data of the run that they retry, or run again."""

    def __init__(self, *, deduped: bool, retries: bool) -> None:
        self._deduped = deduped
        new = "asked JOIN queued ON queued.id = in_id" if deduped else "asked"

        def whole(w: Dialect) -> str:
            queued = f"queued AS ({_queue(w, 'asked', deduped=deduped)}),"
            return _whole(w, _unseen(w), queued, new, retries=retries)

        self._whole = Statement(whole, _RUN_COLUMNS)
        self._queue = Statement(lambda w: _queue(w, _unseen(w), deduped=deduped), _RUN_COLUMNS)
        self._rest = Statement(lambda w: _whole(w, w.batch(_RUN_COLUMNS), "", "asked", retries=retries), _RUN_COLUMNS)
        self._insert = Statement(
            lambda w: f"{_insert(w, w.batch(_RUN_COLUMNS), retries=retries)} WHERE true RETURNING id", _RUN_COLUMNS
        )

    def write(self, conn: Connection, batch: Sequence[Sequence[Any]], context: StatementContext) -> list[str]:
        """Write them; returns the ids of those that were created."""
        sqlite = conn.dialect.name == "sqlite"
        ids = [row[0] for row in batch]
        if not sqlite and (not self._deduped or len(batch) <= _FEW):
            rows = self._whole.rows(conn, batch, now=context.now, publish=context.publish, **_bounds(ids))
            return _made(rows, ids)
        queued = {str(row[0]) for row in self._queue.rows(conn, batch, now=context.now, **_bounds(ids))}
        new = [row for row in batch if row[0] in queued]
        if not new:
            return []
        if sqlite:
            made = [row[0] for row in self._insert.rows(conn, new, now=context.now)]
            tell(conn, [(run_id, 1) for run_id in made], context)
            return made
        rows = self._rest.rows(conn, new, now=context.now, publish=context.publish)
        return _made(rows, [row[0] for row in new])


def _bounds(ids: Sequence[str]) -> dict[str, str]:
    return {"least": min(ids), "greatest": max(ids)}


def _made(rows: Sequence[Any], ids: list[str]) -> list[str]:
    """The ids of the runs that were created, from the answer of :func:`_whole`."""
    some: list[str] | None = rows[0][0]
    return ids if some is None else some


_FEW = 64
"""The most runs whose statement may compare each with each: two statements do not, and cost a round trip more."""
_CREATE = {
    (deduped, retries): _Creating(deduped=deduped, retries=retries)
    for deduped in (False, True)
    for retries in (False, True)
}


def submit(conn: Connection, submissions: Sequence[Submission], context: StatementContext) -> list[Answer]:
    """Check and write a batch. The answer to a refused one is its error, and does not affect the others."""
    now, limited = quotas.read_clock_and_quotas(conn, context)
    clock, context = context, StatementContext(now, context.publish)
    different = one_of_each_group(submissions)
    if not limited and all(map(_is_plain, different)):
        return _create_plain(conn, submissions, context, alike=len(different) == 1)
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


def _is_plain(each: Submission) -> bool:
    return each.key is None and each.first_run is None and each.job is None and not each.reserved


def _create_plain(
    conn: Connection, submissions: Sequence[Submission], context: StatementContext, *, alike: bool
) -> list[Answer]:
    """Write runs without keys and jobs, where there are no quotas: what is not written now was written before."""
    now = context.now
    assert now is not None
    write = _write_alike if alike and conn.dialect.name == "postgresql" else _write_runs
    new = set(write(conn, submissions, context))
    return [Created(each.id, now, Admission()) if each.id in new else Existing(each.id) for each in submissions]


def _write_alike(conn: Connection, submissions: Sequence[Submission], context: StatementContext) -> list[str]:
    """Write runs of one group, or a single one, without keys; returns the ids of those that were created."""
    ids = [each.id for each in submissions]
    batch = [(each.id, each.parameters, each.payload_hash, each.facet) for each in submissions]
    shared = dict(zip(_RUN_COLUMNS, _run_row(submissions[0]), strict=True))
    values = {name: value for name, value in shared.items() if name not in _OWN_COLUMNS}
    rows = _CREATE_ALIKE.rows(conn, batch, now=context.now, publish=context.publish, **_bounds(ids), **values)
    return _made(rows, ids)


def _without_their_first(
    conn: Connection, submissions: Sequence[Submission], context: StatementContext
) -> dict[str, Answer]:
    """Refuse retries and reruns of runs that were purged meanwhile; lock the others until the transaction ends."""
    wanted = {each.first_run for each in submissions if each.first_run is not None}
    if not wanted:
        return {}
    query = select(submitted.c.id).where(submitted.c.id.in_(wanted)).order_by(submitted.c.id)
    there = set(conn.scalars(query.with_for_update(read=True, key_share=True)))
    orphans = [each for each in submissions if each.first_run is not None and each.first_run not in there]
    gone = "it was removed, being old, and cannot be retried; submit its work as a new run"
    refused: dict[str, Answer] = {each.id: RunNotFound(f"there is no run {each.first_run}: {gone}") for each in orphans}
    return refused | _known(conn, orphans, context)


def _name_found(
    conn: Connection, submissions: Sequence[Submission], answers: dict[str, Answer], context: StatementContext
) -> None:
    """Let a key whose payload found a run name that run from now on, so that a repeat finds the same one."""
    for each in submissions:
        answer = answers[each.id]
        if each.own_key is None or not isinstance(answer, Existing) or answer.id == each.id:
            continue
        if answer.expires_us is None and context.now is not None:
            (verdict,) = run_keys.take(conn, [each.claim(answer.id)], context)  # one by one: two may name the same run
            named = Existing(answer.id, answer.run, each.key_end(context.now))
            answers[each.id] = named if isinstance(verdict, Granted) else _answer_of(verdict, each)


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
            answers[each.id] = refusal(Mismatch(), each.client_key)
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
    left, now = list(submissions), context.now
    assert now is not None
    for _ in range(ROUNDS):
        claims = _take_keys(conn, left, answers, context)
        won = [each for each in left if each.client_key is None or each.id in claims]
        written = _write_runs(conn, won, context)
        _write_jobs(conn, won, set(written), context)
        for run_id in written:
            answers[run_id] = Created(run_id, now, admitted.get(run_id, Admission()))
        left = [each for each in left if each.id not in answers]
        if not left:
            return
        known = _known(conn, left, context)
        _give_back(conn, [claims[asked] for asked in claims if _names_another(asked, known.get(asked))], context)
        answers |= known
        left = [each for each in left if each.id not in answers]
        if not left:
            return
        run_keys.let_go(conn, [each.dedupe for each in left if each.dedupe is not None], context)
    for each in left:
        answers[each.id] = StoreUnavailable(f"the key {each.key!r} changed hands {ROUNDS} times; try again")


def _take_keys(
    conn: Connection, submissions: Sequence[Submission], answers: dict[str, Answer], context: StatementContext
) -> dict[str, Claim]:
    """Claim the clients' keys, each for one submission. Returns the claims, and answers where a key is taken."""
    first: dict[KeyRef, Submission] = {}
    for each in submissions:
        if (ref := each.ref) is not None:
            first.setdefault(ref, each)
    asked = list(first.values())
    claims: dict[str, Claim] = {}
    for each, verdict in zip(asked, run_keys.take(conn, [each.claim(each.id) for each in asked], context), strict=True):
        if isinstance(verdict, Granted):
            claims[each.id] = verdict.claim
        else:
            answers[each.id] = _answer_of(verdict, each)
    return claims


def _names_another(asked: str, answer: Answer | None) -> bool:
    return isinstance(answer, Existing) and answer.id != asked


def _give_back(conn: Connection, claims: Sequence[Claim], context: StatementContext) -> None:
    """Make keys free again whose payload named another run: nobody else has seen them taken."""
    if claims:
        run_keys.forget(conn, [Forget(claim.scope, claim.key, claim.fence) for claim in claims], context)


def _answer_of(verdict: Verdict, each: Submission) -> Answer:
    """The run that the client's key names, or why it cannot name one."""
    if not isinstance(verdict, Replay) or verdict.outcome.kind != run_keys.RUN:
        return refusal(verdict, each.client_key)
    job = str(verdict.outcome.value)
    if checked_id(job) != job:
        return run_keys.no_run(each.client_key, job)
    return Existing(job, expires_us=verdict.outcome.expires_us)


def _write_runs(conn: Connection, submissions: Sequence[Submission], context: StatementContext) -> list[str]:
    """Write the runs; returns the ids of those that were created."""
    if not submissions:
        return []
    deduped = any(each.dedupe is not None for each in submissions)
    retries = any(each.first_run is not None for each in submissions)
    return _CREATE[deduped, retries].write(conn, list(map(_run_row, submissions)), context)


def _write_jobs(
    conn: Connection, submissions: Sequence[Submission], created: set[str], context: StatementContext
) -> None:
    """Write the jobs of runs that were created, and the runs that must come first."""
    new = [each for each in submissions if each.job is not None and each.id in created]
    if not new:
        return
    _write_runs(conn, [each.first for each in new if each.first is not None], context)
    conn.execute(insert(jobs), [_job_row(each, context.now) for each in new])


def _job_row(each: Submission, created_us: int | None) -> dict[str, Any]:
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
    dedupe = each.dedupe
    return (
        each.id,
        each.tenant,
        each.user,
        each.model,
        each.queue,
        each.priority,
        each.parameters,
        each.payload_hash,
        each.client_key,
        each.facet,
        each.retry_of,
        each.cost,
        each.wait_us,
        each.lease_us,
        each.stall_us,
        each.max_attempts,
        each.max_lost,
        each.trace,
        dedupe,
        None if dedupe is None else each.key_ttl_us,
        each.seed,
        each.rerun_of,
    )


def _known(conn: Connection, submissions: Iterable[Submission], context: StatementContext) -> dict[str, Answer]:
    """Answers for the submissions that were written already, or whose keys are in use."""
    submissions = list(submissions)
    if not submissions:
        return {}
    ids = [each.id for each in submissions]
    rows = conn.execute(select(submitted.c.id, submitted.c.created_us).where(submitted.c.id.in_(ids)))
    there = dict(tuple(row) for row in rows)  # sent before, and the reply was lost
    answers: dict[str, Answer] = {
        each.id: Existing(each.id, expires_us=each.key_end(there[each.id])) for each in submissions if each.id in there
    }
    return answers | _named(conn, [each for each in submissions if each.id not in answers], context)


def _named(conn: Connection, submissions: Sequence[Submission], context: StatementContext) -> dict[str, Answer]:
    """Answers for the submissions whose key or payload names a run."""
    answers: dict[str, Answer] = {}
    refs = {each.ref for each in submissions if each.ref is not None}
    records = dict(zip(refs, run_keys.read(conn, list(refs), context), strict=True))
    for each in submissions:
        record = None if each.ref is None else records[each.ref]
        if record is not None:
            verdict = judge(record, each.claim(each.id), record.now_us)
            if not isinstance(verdict, str | Granted):  # else the key may be claimed
                answers[each.id] = _answer_of(verdict, each)
    payloads = {each.id: each.dedupe for each in submissions if each.dedupe is not None and each.id not in answers}
    active = run_keys.active_of(conn, list(set(payloads.values())), context)
    return answers | {asked: Existing(active[dedupe]) for asked, dedupe in payloads.items() if dedupe in active}


def recognised(conn: Connection, submissions: Iterable[Submission], context: StatementContext) -> dict[str, Answer]:
    """Answers for submissions whose keys are in use, read without a transaction or a lock."""
    keyed = [each for each in submissions if each.key is not None and not each.reserved]
    answers = _named(conn, keyed, context) if keyed else {}
    for each in keyed:
        answer = answers.get(each.id)
        if each.own_key is not None and isinstance(answer, Existing) and answer.expires_us is None:
            del answers[each.id]  # found by its payload: its key is to name the run
    named = [answer.id for answer in answers.values() if isinstance(answer, Existing)]
    there = queries.get(conn, named) if named else {}
    return {
        asked: Existing(answer.id, there.get(answer.id), answer.expires_us) if isinstance(answer, Existing) else answer
        for asked, answer in answers.items()
    }
