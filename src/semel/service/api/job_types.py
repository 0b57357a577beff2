"""What goes over the wire about jobs and configs."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from semel.runs.store.quotas import Quota, Usage
from semel.runs.types import MICRO
from semel.service.auth.middleware import Principal
from semel.service.jobs import JobStatus, SubmissionOutcome, status_of
from semel.service.jobs.configs import Config, ConfigEntry
from semel.types import moment

MAX_TRACKER_NAME = 500


class JobRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job to be submitted."""

    config_name_to_load: Annotated[
        str, Meta(description="The config's name.", max_length=1000, examples=["my-training-config"])
    ]
    idempotency_key: Annotated[
        str | None,
        Meta(description="Names the job for a day; shorter than 256 characters.", examples=["ci-build-abc123"]),
    ] = None
    ttl_hours: Annotated[
        float | None,
        Meta(
            description="Hours for which the key names the job; 24 when it is left out.",
            examples=[48],
            extra_json_schema={"exclusiveMinimum": 0, "maximum": 87_840},
        ),
    ] = None
    tracker_run_name: Annotated[
        str | None, Meta(description="What an experiment tracker calls it.", examples=["gh-17"])
    ] = None


class JobAnswer(Struct, frozen=True, kw_only=True):
    """What came of a submission. With ``success: false`` there is an ``error``, and nothing was created."""

    success: bool
    job_id: str | UnsetType = UNSET
    status: JobStatus | UnsetType = UNSET
    data_uploaded: Annotated[bool, Meta(description="Whether the config has data.")] | UnsetType = UNSET
    idempotent_hit: Annotated[bool, Meta(description="The job was there already.")] | UnsetType = UNSET
    quota_warnings: list[str] | UnsetType = UNSET
    cost_limit_warning: str | UnsetType = UNSET
    error: str | UnsetType = UNSET


class UploadView(Struct, frozen=True, kw_only=True):
    """The upload of a job's data."""

    state: Literal["uploading", "uploaded", "failed", "cancelled"]
    bytes: int | None
    total: int | None
    data_ref: str | None


class JobView(Struct, frozen=True, kw_only=True):
    """A job as it stood when it was read."""

    job_id: str
    status: JobStatus
    provider: str
    config_name: str
    tracker_run_name: str | None
    user: str
    model: str
    idempotency_key: str | None
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    cancel_requested: bool
    progress: float | None
    progress_note: str | None
    stalled_since: datetime | None
    """Since when its run makes no progress though its worker lives."""
    upload: UploadView | None
    error: str | None
    result: str | None
    """Where the result is, once there is one."""
    run: str
    remote_id: str | None
    remote_status: str | None
    cost: float


class JobPage(Struct, frozen=True):
    """Some jobs, newest first, and the cursor of the next page (null on the last)."""

    jobs: list[JobView]
    next: str | None


class CostLimit(Struct, frozen=True, kw_only=True):
    """What was spent of one limit."""

    period: Literal["daily", "weekly", "monthly", "yearly"]
    limit: float | None
    spent: float
    percent: float | None
    exceeded: bool
    warning: bool


class CostStatus(Struct, frozen=True, kw_only=True):
    """What a user has spent, and what they may."""

    user: str
    action: Literal["block", "warn"] | None
    """What happens at a limit; null without a quota."""
    can_submit: bool
    limits: list[CostLimit]
    concurrent: int
    max_concurrent: int | None


class ConfigView(Struct, frozen=True, kw_only=True):
    """A config. Where its data lies and what it says to providers is for operators."""

    name: str
    source: Literal["file", "row", "demo"]
    model: str | None = None
    parameters: dict[str, Any] = {}
    has_data: bool = False
    queue: str | None = None
    priority: int | None = None
    cost: float | None = None
    data: str | None = None
    providers: dict[str, dict[str, Any]] | None = None
    updated_at: datetime | None = None
    updated_by: str | None = None
    error: str | None = None
    """Why it cannot be used."""


def answer_of(job: SubmissionOutcome) -> JobAnswer:
    """A job that there is."""
    return JobAnswer(
        success=True,
        job_id=job.job_id,
        status=job.status,
        data_uploaded=job.has_data,
        idempotent_hit=job.replayed,
        quota_warnings=job.quota_warnings or UNSET,
        cost_limit_warning=job.cost_limit_warning or UNSET,
    )


def job_view(row: Any, root: str) -> JobView:
    """The job behind a row; ``root`` is where the service is mounted."""
    status = status_of(row.status, row.data_state)
    here = f"{root}/runs/{row.run_id}"
    return JobView(
        job_id=row.run_id,
        status=status,
        provider=row.provider,
        config_name=row.config,
        tracker_run_name=row.tracker_run_name,
        user=row.user_id,
        model=row.model,
        idempotency_key=row.idempotency_key,
        created_at=moment(row.created_us),
        started_at=_moment(row.started_us),
        finished_at=_moment(row.finished_us),
        cancel_requested=row.cancel_us is not None,
        progress=row.progress,
        progress_note=row.progress_note,
        stalled_since=_moment(row.stalled_us),
        upload=None
        if row.data_state is None
        else UploadView(state=row.data_state, bytes=row.data_bytes, total=row.data_total, data_ref=row.data_ref),
        error=_error(row, status),
        result=f"{here}/result" if status == "completed" else None,
        run=here,
        remote_id=row.remote_id,
        remote_status=row.remote_status,
        cost=row.cost / MICRO,
    )


def _error(row: Any, status: JobStatus) -> str | None:
    if status == "cancelled":
        return str(row.note or "cancelled")
    if row.data_error is not None:
        return str(row.data_error)
    return None if status == "completed" else row.last_error


def cost_status(user: str, used: Usage, quota: Quota | None) -> CostStatus:
    """What is left of each limit."""
    limits = [_limit(period, spent, quota) for period, spent in used.spent.items()]
    most = None if quota is None else quota.max_concurrent
    blocks = quota is not None and quota.action == "block"
    full = any(each.exceeded for each in limits) or (most is not None and used.concurrent >= most)
    return CostStatus(
        user=user,
        action=None if quota is None else quota.action,
        can_submit=not (blocks and full),
        limits=limits,
        concurrent=used.concurrent,
        max_concurrent=most,
    )


def _limit(period: Any, spent: float, quota: Quota | None) -> CostLimit:
    limit: float | None = None if quota is None else getattr(quota, f"cost_{period}")
    if quota is None or limit is None:
        return CostLimit(period=period, limit=None, spent=spent, percent=None, exceeded=False, warning=False)
    return CostLimit(
        period=period,
        limit=limit,
        spent=spent,
        percent=round(100 * spent / limit, 2) if limit else 100.0,
        exceeded=spent >= limit,
        warning=spent >= quota.warn_at * limit,
    )


def config_view(config: Config, caller: Principal) -> ConfigView:
    """The config as the caller may see it."""
    trusted = caller.may("operator")
    return ConfigView(
        name=config.name,
        source=config.source,
        model=config.model,
        parameters=config.parameters,
        has_data=config.data is not None,
        queue=config.queue,
        priority=config.priority,
        cost=config.cost,
        data=config.data if trusted else None,
        providers=config.providers if trusted else None,
        updated_at=config.updated_at,
        updated_by=config.updated_by,
    )


def entry_view(entry: ConfigEntry, caller: Principal) -> ConfigView:
    """A config of the list, or what is wrong with it."""
    if entry.config is not None:
        return config_view(entry.config, caller)
    return ConfigView(name=entry.name, source=entry.source, error=entry.error)


def _moment(at_us: int | None) -> datetime | None:
    return None if at_us is None else moment(at_us)
