"""Jobs of the jobs API: runs created from a named config, for a provider."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from sqlalchemy import Connection, Select, and_, case, or_, select

from semel.api_types import JobStatus
from semel.db.schema import jobs, runs
from semel.errors import InvalidRequest, RunNotFound, SemelError
from semel.runs.store import run_keys
from semel.runs.store.queries import STALLED, has_status
from semel.runs.store.submit import JobDetails
from semel.runs.submission import SubmitOptions
from semel.runs.types import checked_id
from semel.service.jobs import uploads
from semel.service.jobs.providers import RunSpec
from semel.service.telemetry.access_log import add_run_to_access_log

if TYPE_CHECKING:
    from semel.service.auth.middleware import Principal
    from semel.service.state import ServiceState


_PLAIN: dict[str, JobStatus] = {"RUNNING": "running", "SUCCEEDED": "completed", "FAILED": "failed"}


class UnknownProvider(InvalidRequest):
    """There is no provider of that name."""


class SubmissionOutcome(Struct, frozen=True, kw_only=True):
    """The job of a submission: a new one, or the one that was submitted with the same key (``replayed``)."""

    job_id: str
    status: JobStatus
    has_data: bool
    replayed: bool
    key_expires_us: int | None
    """When its key expires; None if it has no key."""
    quota_warnings: list[str]
    cost_limit_warning: str | None


class JobSubmission(Struct, frozen=True, kw_only=True):
    """A request for a job."""

    provider: str
    config: str
    key: str | None
    key_ttl: float | None = None
    tracker_run_name: str | None = None

    @property
    def digest(self) -> str:
        """The hash that its key is stored with. Omits the tracker's name, which has the build number in pipelines."""
        return sha256(f"job\0{self.provider}\0{self.config}".encode("utf-8", "replace")).hexdigest()


def status_of(status: str, data_state: str | None) -> JobStatus:
    """The status of a job, from the status of its run and the state of its data."""
    if status == "PENDING":
        return "uploading" if data_state == "uploading" else "queued"
    if status == "CANCELLED":
        return "failed" if data_state == "failed" else "cancelled"
    return _PLAIN[status]


async def submit(service: ServiceState, caller: Principal, asked: JobSubmission) -> SubmissionOutcome:
    """Submit a job, or return the one that was submitted with the same key, even if its config is unusable by now."""
    try:
        spec, job = await _resolve(service, caller, asked)
        options = SubmitOptions(
            idempotency_key=asked.key,
            key_ttl=asked.key_ttl,
            user=caller.user,
            tenant=caller.tenant,
            queue=spec.queue,
            priority=spec.priority,
            cost=spec.cost,
            dedupe=False,
        )
        run = await service.engine.submit_run(spec.model, spec.parameters, options, job=job)
    except SemelError:
        found = await _find_by_key(service, caller, asked)
        if found is None:
            raise
        return found
    if run.replayed:
        return _replayed(await find(service, caller, run.id), run.key_expires_us)
    add_run_to_access_log(run.id, run)
    return SubmissionOutcome(
        job_id=run.id,
        status="queued" if job.data is None else "uploading",
        has_data=job.data is not None,
        replayed=False,
        key_expires_us=run.key_expires_us,
        quota_warnings=run.quota_warnings,
        cost_limit_warning=run.cost_limit_warning,
    )


async def _resolve(service: ServiceState, caller: Principal, asked: JobSubmission) -> tuple[RunSpec, JobDetails]:
    provider = service.providers.get(asked.provider)
    if provider is None:
        raise UnknownProvider(f"Unknown provider: {asked.provider[:200]}")
    config = await service.configs.find(caller.tenant, asked.config)
    simulated = config.providers.get(asked.provider, {}).get("simulate") is True
    spec = (service.providers["local"] if simulated else provider).order(config)
    if config.data is not None and not await service.store.run_blocking(Path(config.data).is_dir):
        raise InvalidRequest(f"the config {config.name!r} has data, but its folder does not exist")
    job = JobDetails(
        provider=asked.provider,
        config=config.name,
        digest=asked.digest,
        tracker_run_name=asked.tracker_run_name,
        data=config.data,
        upload_model=uploads.MODEL,
        remote_status="simulated" if simulated and asked.provider != "local" else None,
    )
    return spec, job


async def _find_by_key(service: ServiceState, caller: Principal, asked: JobSubmission) -> SubmissionOutcome | None:
    """The job that was submitted with this key, if the request was the same."""
    if asked.key is None:
        return None
    try:
        entry = await service.store.write(
            run_keys.check_key, (caller.tenant, caller.user), asked.key, service.store.statement_context
        )
    except SemelError:
        return None  # an invalid key has no job; if the database is unavailable, ``submit`` raises its first error
    if entry is None or entry.payload_hash != asked.digest:
        return None
    return _replayed(await find(service, caller, entry.job_id), entry.expires_us)


def _replayed(job: Any, key_expires_us: int | None) -> SubmissionOutcome:
    return SubmissionOutcome(
        job_id=job.run_id,
        status=status_of(job.status, job.data_state),
        has_data=job.data_state is not None,
        replayed=True,
        key_expires_us=key_expires_us,
        quota_warnings=[],
        cost_limit_warning=None,
    )


class JobFilter(Struct, frozen=True, kw_only=True):
    """Which jobs to list; None is any."""

    tenant: str
    user: str | None = None
    status: JobStatus | None = None
    config: str | None = None
    provider: str | None = None


_OF_RUN = (
    "status",
    "started_us",
    "finished_us",
    "cancel_us",
    "progress",
    "progress_note",
    "last_error",
    "note",
    "cost",
    "idempotency_key",
    "model",
    "payload_hash",
    "worker",
    "attempts",
)
_STALLED = case((STALLED, runs.c.progress_us)).label("stalled_us")
_JOBS = select(jobs, *(runs.c[name] for name in _OF_RUN), _STALLED).join_from(jobs, runs, runs.c.id == jobs.c.run_id)


def _data_is(state: str) -> Any:
    return and_(jobs.c.data_state.is_not(None), jobs.c.data_state == state)


_STATUSES: dict[JobStatus, Any] = {
    "uploading": and_(has_status("PENDING"), _data_is("uploading")),
    "queued": and_(has_status("PENDING"), ~_data_is("uploading")),
    "running": has_status("RUNNING"),
    "completed": has_status("SUCCEEDED"),
    "failed": or_(has_status("FAILED"), and_(has_status("CANCELLED"), _data_is("failed"))),
    "cancelled": and_(has_status("CANCELLED"), ~_data_is("failed")),
}


async def find(service: ServiceState, caller: Principal, job_id: str) -> Any:
    """The row of the job, joined with its run's; raises RunNotFound, also if the caller may not see it."""
    known = checked_id(job_id)
    row = await service.store.read(_find, known, caller.tenant) if known else None
    if row is None or (caller.visible_user is not None and row.user_id != caller.visible_user):
        raise RunNotFound(f"there is no job {job_id[:200]!r}")
    add_run_to_access_log(row.run_id, row)
    return row


def _find(conn: Connection, job_id: str, tenant: str) -> Any:
    return conn.execute(_JOBS.where(jobs.c.run_id == job_id, jobs.c.tenant == tenant)).one_or_none()


def list_jobs(conn: Connection, wanted: JobFilter, limit: int, cursor: str | None) -> tuple[list[Any], str | None]:
    """The jobs, newest first, and the cursor of the next page; None on the last one."""
    query: Select[Any] = _JOBS.where(jobs.c.tenant == wanted.tenant)
    if wanted.user is not None:
        query = query.where(jobs.c.user_id == wanted.user)
    if wanted.config is not None:
        query = query.where(jobs.c.config == wanted.config)
    if wanted.provider is not None:
        query = query.where(jobs.c.provider == wanted.provider)
    if wanted.status is not None:
        query = query.where(_STATUSES[wanted.status])
    if cursor is not None:
        query = query.where(jobs.c.run_id < cursor)
    found = list(conn.execute(query.order_by(jobs.c.run_id.desc()).limit(limit + 1)))
    return found[:limit], found[limit - 1].run_id if len(found) > limit else None


async def cancel(service: ServiceState, caller: Principal, job_id: str) -> Any:
    """Cancel the job's run and the upload of its data; raises if the run has succeeded or failed."""
    row = await find(service, caller, job_id)
    context = service.store.acting(caller.actor)
    await service.store.write(uploads.cancel, row.run_id, "cancelled by request", context, caller.tenant)
    await service.engine.cancel(row.run_id, tenant=caller.tenant, by=caller.actor)
    return await find(service, caller, job_id)
