"""Manifests, as SQL: a worker writes what it runs on and with, before it leases; an attempt's is that of its worker.

    semel_manifests         a body, under its digest
    semel_worker_manifests  which bodies a worker has, since when

So a run costs nothing, and an attempt whose worker died has its manifest, too.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace
from sqlalchemy import ColumnElement, Connection, and_, delete, exists, func, not_, or_, select, update

from semel.db.dialect import Statement, StatementContext, hot, transaction
from semel.db.schema import active, attempts, manifests, submitted, worker_manifests, workers
from semel.runs.manifest import Content, Parts, code_of, content_of
from semel.runs.store.quotas import read_clock
from semel.runs.types import MICRO, Manifest, Run
from semel.types import moment

BATCH = 500
"""Rows that one transaction removes."""
SETTLED_US = 86400 * MICRO
"""A worker that wrote its manifest so long ago, and is not listed, is gone: it may not have been listed yet before."""

_WRITE = Statement(
    lambda w: (
        f"""
INSERT INTO semel_worker_manifests (worker, since_us, host, environment, code)
VALUES (:worker, {w.now}, :host, {w.digest(":environment")}, {w.digest(":code")})
ON CONFLICT (worker, since_us) DO UPDATE SET environment = excluded.environment, code = excluded.code
"""
    )
)
_STORE = Statement(
    lambda w: (
        f"INSERT INTO semel_manifests (digest, body, created_us) VALUES ({w.digest(':digest')}, :body, {w.now}) "
        "ON CONFLICT (digest) DO NOTHING"
    )
)


@hot
def write(conn: Connection, worker: str, parts: Parts, context: StatementContext) -> None:
    """Write what the worker runs on and with from now on. A body that is there already is not sent again."""
    wanted = {each.digest: each for each in (parts.environment, parts.code)}
    with transaction(conn):
        there = select(manifests.c.digest).where(manifests.c.digest.in_(list(wanted))).order_by(manifests.c.digest)
        known = set(conn.scalars(there.with_for_update(read=True, key_share=True)))  # so that it is not removed
        for digest, part in sorted(wanted.items()):
            if digest not in known:
                _STORE.count(conn, digest=digest, body=part.body, now=context.now)
        _WRITE.count(
            conn,
            worker=worker,
            host=parts.host,
            environment=parts.environment.digest,
            code=parts.code.digest,
            now=context.now,
        )


class AttemptRow(Struct, frozen=True):
    """An attempt, as far as its rows tell."""

    fence: int
    began_us: int
    ended_us: int | None
    step: str
    worker: str | None


class Recorded(Struct, frozen=True):
    """What a worker wrote: on and with what it ran, since when."""

    worker: str
    since_us: int
    host: str
    environment_digest: str
    code_digest: str
    environment: Content
    code: Content | None
    """That of the model; None if the worker did not have it."""


def attempts_of(conn: Connection, run_id: str) -> list[AttemptRow]:
    """The attempts of a run that began, oldest first, with the one that is under way."""
    ended = select(
        attempts.c.fence,
        attempts.c.began_us,
        attempts.c.ended_us,
        func.coalesce(attempts.c.step, func.lower(attempts.c.status)),
        attempts.c.worker,
    ).where(attempts.c.run_id == run_id, attempts.c.began_us.is_not(None))
    running = select(active.c.fence, active.c.began_us, active.c.worker).where(
        active.c.id == run_id, active.c.lease_until_us.is_not(None)
    )
    found = [AttemptRow(*row) for row in conn.execute(ended.order_by(attempts.c.version))]
    return found + [
        AttemptRow(row.fence, row.began_us, None, "running", row.worker)
        for row in conn.execute(running)
        if all(each.fence != row.fence for each in found)  # it ended between the two queries
    ]


def of_attempt(conn: Connection, attempt: AttemptRow, model: str) -> Recorded | None:
    """What the attempt's worker had last written when the attempt began; else the first that it wrote after that.

    A worker whose database did not answer writes later. None if it has written nothing.
    """
    if attempt.worker is None:
        return None
    rows = worker_manifests.c.worker == attempt.worker
    before = _read(conn, and_(rows, worker_manifests.c.since_us <= attempt.began_us), model, newest=True)
    if before is not None and before.code is not None:
        return before
    return _read(conn, and_(rows, worker_manifests.c.since_us > attempt.began_us), model, newest=False) or before


def newest(conn: Connection, model: str, live: list[str]) -> Recorded | None:
    """What one of these workers wrote last that has the model; None if none has."""
    query = select(worker_manifests.c.worker, func.max(worker_manifests.c.since_us))
    query = query.where(worker_manifests.c.worker.in_(live)).group_by(worker_manifests.c.worker)
    for worker, since_us in sorted(conn.execute(query), key=lambda row: -row[1]):
        which = and_(worker_manifests.c.worker == worker, worker_manifests.c.since_us == since_us)
        found = _read(conn, which, model, newest=True)
        if found is not None and found.code is not None:
            return found
    return None


def _read(conn: Connection, which: ColumnElement[bool], model: str, *, newest: bool) -> Recorded | None:
    environment, code = manifests.alias("environment"), manifests.alias("code")
    since = worker_manifests.c.since_us
    query = (
        select(worker_manifests, environment.c.body.label("environment_body"), code.c.body.label("code_body"))
        .join(environment, environment.c.digest == worker_manifests.c.environment)
        .join(code, code.c.digest == worker_manifests.c.code)
        .where(which)
        .order_by(since.desc() if newest else since)
        .limit(1)
    )
    row = conn.execute(query).one_or_none()
    if row is None:
        return None
    environment_content, code_content = content_of(row.environment_body), content_of(row.code_body)
    return Recorded(
        worker=row.worker,
        since_us=row.since_us,
        host=row.host,
        environment_digest=row.environment,
        code_digest=row.code,
        environment=environment_content,
        code=code_of(code_content, model),
    )


_NOT_BEGUN = "the run has not begun"
_NOT_RECORDED = "its worker recorded nothing: it is from an earlier release, or its database did not answer"
_LATE = "recorded after the attempt began, by the same worker: its database did not answer before"


def manifest_of(
    run: Run, number: int = 0, rows: Sequence[AttemptRow] = (), recorded: Recorded | None = None
) -> Manifest:
    """The manifest of an attempt, from the rows of the run and from what its worker wrote."""
    asked = Manifest(
        run_id=run.id,
        model=run.model,
        parameters=run.parameters,
        payload_hash=run.payload_hash,
        seed=run.actual_seed,
        seed_given=run.seed is not None,
        data_ref=run.data_ref,
        missing=_NOT_BEGUN,
    )
    if not rows:
        return asked
    row = rows[number - 1]
    found = replace(
        asked,
        attempt=number,
        attempts=len(rows),
        fence=row.fence,
        step=row.step,
        worker=row.worker,
        began_at=moment(row.began_us),
        ended_at=None if row.ended_us is None else moment(row.ended_us),
        result_digest=run.result_digest if row.step == "succeeded" else None,
        missing=_NOT_RECORDED,
    )
    if recorded is None:
        return found
    return replace(with_recorded(found, recorded), missing=_LATE if recorded.since_us > row.began_us else None)


def with_recorded(manifest: Manifest, recorded: Recorded) -> Manifest:
    """The manifest with the environment and the code that a worker wrote."""
    return replace(
        manifest,
        host=recorded.host,
        environment_digest=recorded.environment_digest,
        environment=recorded.environment,
        code_digest=recorded.code_digest,
        code=recorded.code,
        recorded_at=moment(recorded.since_us),
    )


def recorded_here(parts: Parts, model: str, worker: str = "") -> Recorded:
    """What this process would write."""
    return Recorded(
        worker=worker,
        since_us=0,
        host=parts.host,
        environment_digest=parts.environment.digest,
        code_digest=parts.code.digest,
        environment=content_of(parts.environment.body),
        code=code_of(content_of(parts.code.body), model),
    )


def remove_unused(conn: Connection, context: StatementContext) -> int:
    """Remove some manifests of workers that are gone, and of whose attempts none is left. Returns how many rows.

    All attempts of a worker began before it was found gone; so if every run that is left was submitted later, none of
    them is its.
    """
    now = read_clock(conn, context)
    _mark_gone(conn, now)
    oldest = conn.scalar(select(submitted.c.created_us).order_by(submitted.c.id).limit(1))
    before = now if oldest is None else min(now, oldest)
    key = (worker_manifests.c.worker, worker_manifests.c.since_us)
    unused = select(*key, worker_manifests.c.environment, worker_manifests.c.code)
    unused = unused.where(worker_manifests.c.gone_us < before).order_by(worker_manifests.c.gone_us).limit(BATCH)
    rows = conn.execute(unused).all()
    for row in rows:
        conn.execute(delete(worker_manifests).where(key[0] == row.worker, key[1] == row.since_us))
    _remove_unnamed(conn, sorted({digest for row in rows for digest in (row.environment, row.code)}))
    return len(rows)


def _mark_gone(conn: Connection, now: int) -> None:
    """Note which workers are gone; one that is listed again, after a long silence, is not."""
    listed = exists().where(workers.c.id == worker_manifests.c.worker)
    back = and_(worker_manifests.c.gone_us.is_not(None), worker_manifests.c.worker.in_(select(workers.c.id)))
    conn.execute(update(worker_manifests).where(back).values(gone_us=None))
    gone = and_(worker_manifests.c.gone_us.is_(None), worker_manifests.c.since_us < now - SETTLED_US, not_(listed))
    conn.execute(update(worker_manifests).where(gone).values(gone_us=now))


def _remove_unnamed(conn: Connection, digests: list[str]) -> None:
    """Remove those of these bodies that no worker's manifest names.

    They are locked first, and looked for with a new snapshot: who names one meanwhile waits, and writes it again.
    """
    if not digests:
        return
    locked = select(manifests.c.digest).where(manifests.c.digest.in_(digests)).order_by(manifests.c.digest)
    held = list(conn.scalars(locked.with_for_update(skip_locked=True)))
    named = exists().where(
        or_(worker_manifests.c.environment == manifests.c.digest, worker_manifests.c.code == manifests.c.digest)
    )
    conn.execute(delete(manifests).where(manifests.c.digest.in_(held), not_(named)))
