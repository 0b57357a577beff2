"""Submit, in one transaction: what was asked before is answered from its key; only new work meets the quota; then key,
run and event are written together.

A key is the client's own, for a day, and names its run whatever became of it. Without one the hash of the payload
stands in, for minutes, and only while its run is pending or running.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from typing import Any, Literal, TypeAlias

from msgspec import Struct
from sqlalchemy import Connection, delete, select

from semel.errors import KeyReused, SemelError, StoreUnavailable
from semel.runs import quotas
from semel.runs.quotas import Admission, Meter, Person
from semel.runs.transitions import CHANNEL, EVENT, NOTED, note
from semel.sql.schema import run_keys, runs
from semel.sql.statements import Statement, Terms, Words

_ROUNDS = 10

KeyKind: TypeAlias = Literal["key", "payload"]


class Submission(Struct, frozen=True, kw_only=True):
    """One run to be created. ``key`` is None when nothing is to be recognised."""

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
    max_attempts: int
    max_lost: int
    facet: str | None = None
    retry_of: str | None = None
    reservation: str | None = None

    @property
    def person(self) -> Person:
        """Whose quota it meets."""
        return (self.tenant, self.user)

    @property
    def place(self) -> tuple[str, str, str, str | None]:
        """Where its key is kept."""
        return (self.tenant, self.user, self.key_kind, self.key)


class Created(Struct, frozen=True):
    """The run is new."""

    id: str
    created_us: int
    admission: Admission


class Found(Struct, frozen=True):
    """The run was there; ``id`` is what the key names."""

    id: str


Answer: TypeAlias = Created | Found | SemelError

_KEY_COLUMNS = {
    "in_tenant": "text",
    "in_user": "text",
    "in_kind": "text",
    "in_key": "text",
    "in_hash": "text",
    "in_job": "text",
    "in_ttl": "bigint",
}
_GIVES_WAY = """CASE
    WHEN k.expires_us < {now} THEN true
    WHEN k.kind = 'payload' THEN NOT EXISTS (
      SELECT 1 FROM semel_runs AS r WHERE r.id = {id} AND r.status IN ('PENDING', 'RUNNING'))
    ELSE false END"""

# Sorted, so that two batches wait for each other's keys in the same order and never deadlock.
_TAKE_KEYS = Statement(
    lambda w: (
        f"""
INSERT INTO semel_run_keys AS k (tenant, user_id, kind, key, payload_hash, job_id, created_us, expires_us)
SELECT in_tenant, in_user, in_kind, in_key, in_hash, in_job, {w.now}, {w.now} + in_ttl
FROM {w.batch(_KEY_COLUMNS)} WHERE true ORDER BY in_tenant, in_user, in_kind, in_key
ON CONFLICT (tenant, user_id, kind, key) DO UPDATE
SET payload_hash = excluded.payload_hash, job_id = excluded.job_id, created_us = excluded.created_us,
    expires_us = excluded.expires_us
WHERE {_GIVES_WAY.format(now=w.now, id=w.identity("k.job_id"))}
RETURNING job_id
"""
    ),
    _KEY_COLUMNS,
)

_PLACE_COLUMNS = {name: _KEY_COLUMNS[name] for name in ("in_tenant", "in_user", "in_kind", "in_key")}
_READ_KEYS = Statement(
    lambda w: (
        f"""
SELECT k.tenant, k.user_id, k.kind, k.key, k.payload_hash, k.job_id FROM {w.batch(_PLACE_COLUMNS)}
JOIN semel_run_keys AS k ON k.tenant = in_tenant AND k.user_id = in_user AND k.kind = in_kind AND k.key = in_key
WHERE NOT {_GIVES_WAY.format(now=w.now, id=w.identity("k.job_id"))}
"""
    ),
    _PLACE_COLUMNS,
)


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
    "in_max_attempts": "integer",
    "in_max_lost": "integer",
}


def _insert_runs(words: Words) -> str:
    inserted = f"""
INSERT INTO semel_runs AS k (
  id, tenant, user_id, model, queue, priority, status, ready, step, version, changed_us, fence, attempts, errors,
  losts, max_attempts, max_lost, parameters, payload_hash, idempotency_key, facet, retry_of, cost, asked_cost,
  created_us, due_us, lease_us)
SELECT in_id, in_tenant, in_user, in_model, in_queue, in_priority, 'PENDING', in_delay <= 0, 'created', 1, {words.now},
  0, 0, 0, 0, in_max_attempts, in_max_lost, in_parameters, in_hash, in_key, in_facet, in_retry_of, in_cost,
  in_cost, {words.now}, {words.now} + in_delay, in_lease
FROM {words.batch(_RUN_COLUMNS)} WHERE true ON CONFLICT (id) DO NOTHING"""
    if not words.writes_in_with:
        return f"{inserted} RETURNING id, created_us"
    return f"""
WITH made AS ({inserted} RETURNING {words.own(NOTED)}, queue, created_us),
noted AS (INSERT INTO semel_run_events ({EVENT})
          SELECT {NOTED}, CAST(:publish AS boolean) FROM made)
SELECT CAST(id AS text), created_us,
       (SELECT count(pg_notify('{CHANNEL}', queue)) FROM (SELECT DISTINCT queue FROM made) AS q)
FROM made"""


_INSERT_RUNS = Statement(_insert_runs, _RUN_COLUMNS)


def submit(conn: Connection, submissions: Sequence[Submission], terms: Terms) -> list[Answer]:
    """Judge and write a batch. One that cannot be had is an error in the answer, and touches none of the others."""
    now, limited = quotas.look(conn, terms)
    terms = Terms(now, terms.publish)
    answers: dict[str, Answer] = {}
    left = list(submissions)
    while left:
        first: dict[tuple[Any, ...], Submission] = {}
        for each in left:
            first.setdefault(each.place if each.key is not None else (each.id,), each)
        leaders = list(first.values())
        admitted = {}
        if limited or any(each.reservation is not None for each in leaders):
            admitted = _meet_quotas(conn, leaders, answers, terms)
        _create(conn, [each for each in leaders if each.id not in answers], admitted, answers, terms)
        left = _follow([each for each in left if each.id not in answers], first, answers)
        answers |= _known(conn, left, terms)
        left = [each for each in left if each.id not in answers]
        _free_slots(conn, submissions, answers)
    return [answers[each.id] for each in submissions]


def _free_slots(conn: Connection, submissions: Sequence[Submission], answers: dict[str, Answer]) -> None:
    """Whose run was there already, or whose key is another's, needs no slot: its reservation is given back."""
    for each in submissions:
        if each.reservation is not None and isinstance(answers.get(each.id), Found | KeyReused):
            quotas.release(conn, each.reservation, each.person)


def _follow(
    followers: Sequence[Submission], first: dict[tuple[Any, ...], Submission], answers: dict[str, Answer]
) -> list[Submission]:
    """The same key twice in one batch: the second is judged after the first, by itself where that was refused."""
    undecided = []
    for each in followers:
        leader = first[each.place]
        answer = answers[leader.id]
        if isinstance(answer, SemelError):
            undecided.append(each)
            continue
        answers[each.id] = Found(answer.id) if each.payload_hash == leader.payload_hash else _reused(each)
    return undecided


def _meet_quotas(
    conn: Connection, submissions: Sequence[Submission], answers: dict[str, Answer], terms: Terms
) -> dict[str, Admission]:
    """Answer what is refused, or known already, for users who have a quota; give the rest with their warnings."""
    limits = quotas.quotas_of(conn, {each.person for each in submissions})
    limited = [each for each in submissions if each.person in limits or each.reservation is not None]
    if not limited:
        return {}
    quotas.lock(conn, {each.person for each in limited})
    answers |= _known(conn, limited, terms)
    assert terms.now is not None
    meters = {
        person: Meter(quota, quotas.usage(conn, person, terms.now, quota))
        for person, quota in limits.items()
        if any(each.id not in answers for each in limited if each.person == person)
    }
    admitted: dict[str, Admission] = {}
    for each in limited:
        if each.id not in answers:
            try:
                admitted[each.id] = _admit(conn, each, meters, terms.now)
            except SemelError as error:
                answers[each.id] = error
    return admitted


def _admit(conn: Connection, each: Submission, meters: dict[Person, Meter], now: int) -> Admission:
    """Count it, and bind its reservation; when either is refused, neither was done."""
    meter = copy(meters.get(each.person))
    admission = meter.admit(each.cost, reserved=each.reservation is not None) if meter else Admission()
    if each.reservation is not None:
        quotas.consume(conn, each.reservation, each.person, each.id, now)
    if meter:
        meters[each.person] = meter
    return admission


def _create(
    conn: Connection,
    submissions: Sequence[Submission],
    admitted: dict[str, Admission],
    answers: dict[str, Answer],
    terms: Terms,
) -> None:
    """Take the keys, write the runs of those who got theirs, and answer the others with what their keys name."""
    left = list(submissions)
    for _ in range(_ROUNDS):
        won = _take_keys(conn, left, terms)
        for run_id, created_us in _write_runs(conn, won, terms):
            answers[run_id] = Created(run_id, created_us, admitted.get(run_id, Admission()))
        for each in won:  # sent again after its reply was lost: it is there, and it is its own
            answers.setdefault(each.id, Found(each.id))
        left = [each for each in left if each.id not in answers]
        if left:
            answers |= _known(conn, left, terms)
            left = [each for each in left if each.id not in answers]
        if not left:
            return
    raise StoreUnavailable(f"a key changed hands {_ROUNDS} times while it was being submitted; try again")


def _take_keys(conn: Connection, submissions: Sequence[Submission], terms: Terms) -> list[Submission]:
    keyed = [(*each.place, each.payload_hash, each.id, each.key_ttl_us) for each in submissions if each.key is not None]
    if not keyed:
        return list(submissions)
    taken = {row[0] for row in _TAKE_KEYS.rows(conn, keyed, now=terms.now)}
    return [each for each in submissions if each.key is None or each.id in taken]


def _write_runs(conn: Connection, submissions: Sequence[Submission], terms: Terms) -> list[tuple[str, int]]:
    if not submissions:
        return []
    rows = _INSERT_RUNS.rows(conn, map(_run_row, submissions), now=terms.now, publish=terms.publish)
    note(conn, rows, terms)
    return [(row[0], row[1]) for row in rows]


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
        each.key if each.key_kind == "key" else None,
        each.facet,
        each.retry_of,
        each.cost,
        each.delay_us,
        each.lease_us,
        each.max_attempts,
        each.max_lost,
    )


def _known(conn: Connection, submissions: Iterable[Submission], terms: Terms) -> dict[str, Answer]:
    """What the keys of these name, where they are in use."""
    submissions = list(submissions)
    if not submissions:
        return {}
    ids = select(runs.c.id).where(runs.c.id.in_([each.id for each in submissions]))
    answers: dict[str, Answer] = {run_id: Found(run_id) for run_id in conn.scalars(ids)}  # sent again: its own
    keyed = [each for each in submissions if each.key is not None and each.id not in answers]
    if not keyed:
        return answers
    rows = _READ_KEYS.rows(conn, [each.place for each in keyed], now=terms.now)
    held = {tuple(row[:4]): row for row in rows}
    for each in keyed:
        row = held.get(each.place)
        if row is not None:
            answers[each.id] = Found(row[5]) if row[4] == each.payload_hash else _reused(each)
    return answers


def _reused(each: Submission) -> KeyReused:
    return KeyReused(f"key reused with different payload: {each.key!r} belongs to other work; use a new key for this")


class KeyEntry(Struct, frozen=True):
    """A key of a user, and the job that it names."""

    key: str
    job_id: str
    user: str
    payload_hash: str
    created_us: int
    expires_us: int


class StoreKey(Struct, frozen=True, kw_only=True):
    """A key for a job that the caller created."""

    tenant: str
    user: str
    key: str
    job_id: str
    ttl_us: int


def store_key(conn: Connection, request: StoreKey, terms: Terms) -> str:
    """Keep the key unless it is in use. Answers the job that it names from now on: the caller's, or an earlier one."""
    row = (request.tenant, request.user, "key", request.key, "", request.job_id, request.ttl_us)
    for _ in range(_ROUNDS):
        if _TAKE_KEYS.rows(conn, [row], now=terms.now):
            return request.job_id
        held = _READ_KEYS.rows(conn, [row[:4]], now=terms.now)
        if held:
            named: str = held[0][5]
            return named
    raise StoreUnavailable(f"the key {request.key!r} changed hands {_ROUNDS} times; try again")


def check_key(conn: Connection, person: tuple[str, str | None], key: str, terms: Terms) -> KeyEntry | None:
    """The live key, of one user or of anybody's. One that expired is removed on the way."""
    tenant, user = person
    now = quotas.read_clock(conn, terms)
    own = [run_keys.c.tenant == tenant, run_keys.c.kind == "key", run_keys.c.key == key]
    if user is not None:
        own.append(run_keys.c.user_id == user)
    rows = conn.execute(select(run_keys).where(*own).order_by(run_keys.c.created_us)).all()
    if any(row.expires_us < now for row in rows):
        conn.execute(delete(run_keys).where(*own, run_keys.c.expires_us < now))
    live = [row for row in rows if row.expires_us >= now]
    if not live:
        return None
    row = live[0]
    return KeyEntry(row.key, row.job_id, row.user_id, row.payload_hash, row.created_us, row.expires_us)


_PURGE_KEYS = Statement(
    lambda w: (
        f"""
DELETE FROM semel_run_keys WHERE (tenant, user_id, kind, key) IN (
  SELECT p.tenant, p.user_id, p.kind, p.key FROM semel_run_keys AS p WHERE p.expires_us < {w.now}
  ORDER BY p.expires_us LIMIT :most {w.locking("p", skip=True)}
)"""
    )
)


def purge_keys(conn: Connection, terms: Terms, most: int = 1000) -> int:
    """Remove keys that expired."""
    return _PURGE_KEYS.count(conn, most=most, now=terms.now)
