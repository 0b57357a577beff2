"""Uploads of job data: a folder is packed and stored under its digest before the job's run may start.

An upload is a run of the service's own model ``semel.upload``, created together with the job. Its last step releases
the job's run, in one transaction: after a crash the upload is repeated, and the run is released once. The job's row has
its state (``data_state``): uploading, then uploaded, failed or cancelled.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, exists, or_, select, update

from semel._concurrency.sync import run_sync
from semel.db.dialect import StatementContext
from semel.db.schema import active, jobs, runs
from semel.errors import Fatal, ResultStoreError, Retry, RunCancelled
from semel.runs.app import App
from semel.runs.execution.context import Context
from semel.runs.execution.input_data import ref_of
from semel.runs.execution.scratch import scratch
from semel.runs.leader import LeaderTask
from semel.runs.models.model import make_model
from semel.runs.store import RunStore, maintenance, transitions
from semel.runs.types import INTERNAL_QUEUE, TERMINAL
from semel.service.jobs.archive import CannotPack, pack
from semel.service.jobs.internal_worker import InternalWorker, current_worker

MODEL = "semel.upload"
PROGRESS_EVERY = 0.5
"""Seconds between two writes of the progress."""
LEASE = 20.0
SETTLE_EVERY = 5.0


def install(app: App) -> None:
    """Register the model."""
    options: dict[str, Any] = {"max_attempts": 5, "max_lost": 10, "backoff": (1, 5, 20, 60), "lease": LEASE}
    app.registry.add(make_model(MODEL, upload, isolation="thread", queue=INTERNAL_QUEUE, **options))


def upload(ctx: Context, job_id: str) -> dict[str, Any]:
    """Pack the job's folder, store it, and release the job's run."""
    work = current_worker()
    with _blocking_store(work.service.app) as store:
        folder = run_sync(store.read(folder_of, job_id))
        if folder is None:
            _announce(work.service.app, store, job_id)
            return {"uploaded": False}
        try:
            return _upload(ctx, job_id, Path(folder), work, store)
        except CannotPack as error:
            run_sync(store.write(fail, job_id, f"the data cannot be packed: {error}", store.statement_context))
            raise Fatal(str(error)) from error


@contextmanager
def _blocking_store(app: App) -> Iterator[RunStore]:
    """A blocking store, for this thread."""
    store = app.ledger(awaited=False)
    try:
        yield store
    finally:
        run_sync(store.close())


def _upload(ctx: Context, job_id: str, folder: Path, work: InternalWorker, store: RunStore) -> dict[str, Any]:
    app = work.service.app
    reporter = _ProgressReporter(ctx, job_id, work, store)
    with scratch("upload") as place:
        archive = place / "data.tar.gz"
        packed = pack(folder, archive, reporter.report)
        ref = ref_of(packed.digest)
        reporter.report(reporter.total, reporter.total, at_once=True)
        if not _is_there(app, ref, packed.size):
            app.results.put_file(ref, archive)
        queue = run_sync(store.write(release_run, job_id, ref, store.statement_context))
        if not _is_there(app, ref, packed.size):  # it was removed with an old run before this run referred to it
            app.results.put_file(ref, archive)
    _announce(app, store, job_id)
    if queue is None:
        return {"uploaded": False}
    return {"uploaded": True, "data_ref": ref, "bytes": packed.size}


def _announce(app: App, store: RunStore, job_id: str) -> None:
    """Announce the job's run, even if an earlier attempt released it: that attempt may have died before it did so."""
    run = run_sync(store.find(job_id)) if app.transport.announces else None
    if run is not None and run.status == "PENDING" and run.queue != INTERNAL_QUEUE:
        app.transport.announce([(job_id, run.queue)])


def _is_there(app: App, ref: str, size: int) -> bool:
    try:
        return app.results.size(ref) == size
    except ResultStoreError:
        return False


class _ProgressReporter:
    """Stores the progress in the job's row, and stops the upload if the job no longer needs it."""

    def __init__(self, ctx: Context, job_id: str, work: InternalWorker, store: RunStore) -> None:
        self._ctx = ctx
        self._job_id = job_id
        self._work = work
        self._store = store
        self._last = 0.0
        self.total = 0

    def report(self, packed: int, total: int, *, at_once: bool = False) -> None:
        """Store the progress; raises if the upload is to stop."""
        self.total = total
        self._ctx.check()
        if self._work.stopping.is_set():
            raise Retry("the server was stopped")
        now = time.monotonic()
        if at_once or now - self._last >= PROGRESS_EVERY:
            self._last = now
            self._ctx.progress(packed / total if total else 1.0, f"{packed:,} of {total:,} bytes")
            if not run_sync(self._store.write(write_progress, self._job_id, packed, total)):
                raise RunCancelled("the job is over, or its data is there already")


def _uploading(run_id: str) -> Any:
    return (jobs.c.run_id == run_id) & (jobs.c.data_state == "uploading")


def folder_of(conn: Connection, run_id: str) -> str | None:
    """The folder that is to be uploaded for the job, if any."""
    folder: str | None = conn.scalar(select(jobs.c.data).where(_uploading(run_id)))
    return folder


def write_progress(conn: Connection, run_id: str, packed: int, total: int) -> bool:
    """Store the progress. Returns False, and cancels the upload, if the run does not wait for it any more."""
    waits = exists().where(active.c.id == run_id, active.c.lease_until_us.is_(None))
    noted = update(jobs).where(_uploading(run_id), waits).values(data_bytes=packed, data_total=total)
    if conn.execute(noted).rowcount:
        return True
    conn.execute(update(jobs).where(_uploading(run_id)).values(data_state="cancelled"))
    return False


def release_run(conn: Connection, run_id: str, data_ref: str, terms: StatementContext) -> str | None:
    """The data is stored: release the run, once. Returns the run's queue; None if it does not wait any more."""
    maintenance.lock_data(conn, data_ref, terms)
    done = update(jobs).where(_uploading(run_id)).values(data_state="uploaded", data_ref=data_ref)
    if not conn.execute(done).rowcount:
        return None
    queue = transitions.release(conn, run_id, data_ref, terms)
    if queue is None:
        conn.execute(update(jobs).where(jobs.c.run_id == run_id).values(data_state="cancelled"))
    return queue


def fail(conn: Connection, run_id: str, why: str, terms: StatementContext) -> None:
    """The data cannot be uploaded: cancel the run that waits for it."""
    why = transitions.storable(why)[:1000]
    failed = update(jobs).where(_uploading(run_id)).values(data_state="failed", data_error=why)
    if conn.execute(failed).rowcount:
        transitions.cancel(conn, [run_id], why, terms)


def cancel(conn: Connection, run_id: str, why: str, terms: StatementContext, tenant: str = "") -> None:
    """Cancel a job's run, and its upload if there is one. If a person does, it is logged."""
    stopped = update(jobs).where(_uploading(run_id)).values(data_state="cancelled").returning(jobs.c.upload_id)
    upload_id = conn.scalar(stopped)
    changed = transitions.cancel(conn, [run_id] if upload_id is None else [run_id, upload_id], why, terms)
    theirs = {each: status for each, status in changed.items() if each == run_id}
    transitions.record_cancelled(conn, theirs, why, tenant, terms)


def settle(conn: Connection, terms: StatementContext) -> int:
    """End jobs whose upload ended without a result: it failed too often, was cancelled or deleted."""
    query = (
        select(jobs.c.run_id, runs.c.status, runs.c.last_error)
        .select_from(jobs.outerjoin(runs, runs.c.id == jobs.c.upload_id))
        .where(jobs.c.data_state == "uploading", or_(runs.c.id.is_(None), runs.c.status.in_(TERMINAL)))
        .limit(100)
    )
    over = conn.execute(query).all()
    for row in over:
        if row.status == "CANCELLED":
            cancel(conn, row.run_id, "the upload of its data was cancelled", terms)
        else:
            fail(conn, row.run_id, f"the data could not be uploaded: {row.last_error or 'its upload is gone'}", terms)
    return len(over)


class UploadReaper(LeaderTask):
    """Calls :func:`settle` in one server at a time."""

    def __init__(self, store: RunStore, holder: str) -> None:
        super().__init__(store, "settler", holder, SETTLE_EVERY)

    async def work(self) -> None:
        await self._store.write(settle, self._store.statement_context)
