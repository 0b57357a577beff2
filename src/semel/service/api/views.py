"""Converts runs, jobs and configs to the types of the API."""

from __future__ import annotations

import inspect
from datetime import datetime
from typing import Any
from urllib.parse import quote

from msgspec import UNSET, Raw

from semel.api_types import (
    JobAnswer,
    JobStatus,
    RemoteArtifact,
    RemoteConfig,
    RemoteCostLimit,
    RemoteCosts,
    RemoteJob,
    RemoteLogLine,
    RemoteModel,
    RemoteRun,
    RemoteStep,
    RemoteSummary,
    RemoteUpload,
    RemoteWaiting,
    RemoteWorker,
)
from semel.runs.models.model import Model
from semel.runs.types import MICRO, LogLine, Quota, Run, Step, Summary, Usage, Waiting, WorkerInfo
from semel.service.auth.middleware import Principal
from semel.service.jobs import SubmissionOutcome, status_of
from semel.service.jobs.configs import Config, ConfigEntry
from semel.types import moment


def run_view(run: Run, root: str = "") -> RemoteRun:
    """The run as the API returns it; ``root`` is the mount point of the service."""
    here = f"{root}/runs/{run.id}"
    succeeded = run.status == "SUCCEEDED"
    return RemoteRun(
        run_id=run.id,
        status=run.status,
        created_at=moment(run.created_us),
        payload_hash=run.payload_hash,
        links={"self": here, "result": f"{here}/result"},
        model=run.model,
        user=run.user,
        queue=run.queue,
        priority=run.priority,
        step=run.step,
        version=run.version,
        attempts=run.attempts,
        max_attempts=run.max_attempts,
        errors=run.errors,
        losts=run.losts,
        max_lost=run.max_lost,
        fence=run.fence,
        given=_raw_json(run.parameters_json) if run.parameters_json else UNSET,
        idempotency_key=run.idempotency_key,
        retry_of=run.retry_of,
        rerun_of=run.rerun_of,
        seed=run.actual_seed,
        cost=run.cost,
        due_at=moment(run.due_us),
        started_at=_moment(run.started_us),
        finished_at=_moment(run.finished_us),
        worker=run.worker,
        lease_expires_at=_moment(run.lease_until_us),
        heartbeat_at=_moment(run.heartbeat_us),
        cancel_requested=run.cancel_requested,
        progress=run.progress,
        progress_note=run.progress_note,
        stalled_since=run.stalled_since,
        error=run.last_error,
        traceback=run.traceback,
        result_ref=run.result_ref if succeeded else None,
        result_size=run.result_size if succeeded else None,
        artifacts=[
            RemoteArtifact(
                name=each.name, size=each.size, digest=each.digest, link=f"{here}/artifacts/{quote(each.name)}"
            )
            for each in run.artifacts
        ]
        if succeeded
        else [],
        warnings=run.warnings,
        replayed=run.replayed,
        quota_warnings=run.quota_warnings,
        cost_limit_warning=run.cost_limit_warning,
    )


def _raw_json(text: str) -> Any:
    """Stored JSON, which is sent unchanged."""
    return Raw(text.encode())


def step_view(step: Step) -> RemoteStep:
    """The step as the API returns it."""
    return RemoteStep(
        version=step.version,
        at=step.at,
        step=step.step,
        status=step.status,
        fence=step.fence,
        worker=step.worker,
        note=step.note,
    )


def log_view(line: LogLine) -> RemoteLogLine:
    """The log line as the API returns it."""
    return RemoteLogLine(fence=line.fence, line=line.line, at=moment(line.at_us), level=line.level, text=line.text)


def waiting_view(waiting: Waiting) -> RemoteWaiting:
    """The reason why a run is pending, as the API returns it."""
    return RemoteWaiting(
        reason=waiting.reason,
        since=waiting.since,
        place=waiting.place,
        due_at=_moment(waiting.due_us),
        workers=waiting.workers,
    )


def summary_view(summary: Summary) -> RemoteSummary:
    """The summary as the API returns it."""
    return RemoteSummary(
        model=summary.model,
        group=summary.group,
        total=summary.total,
        counts=summary.counts,
        mean_seconds=summary.mean_seconds,
    )


def model_view(model: Model) -> RemoteModel:
    """The model as the API returns it."""
    return RemoteModel(
        name=model.name,
        description=inspect.getdoc(model.function),
        parameters=model.signature.schema(),
        queue=model.queue,
        priority=model.priority,
        max_attempts=model.max_attempts,
        max_lost=model.max_lost,
        backoff=list(model.backoff),
        lease=model.lease,
        timeout=model.timeout,
        stall_after=model.stall_after,
        cost=model.cost,
        isolation=model.isolation,
        exclude=sorted(model.exclude),
        summary=model.summary,
    )


def worker_view(worker: WorkerInfo, *, whole: bool) -> RemoteWorker:
    """The worker as the API returns it; ``whole`` includes its host, pid and runs, for operators of the main tenant."""
    return RemoteWorker(
        id=worker.id,
        name=worker.name,
        queues=worker.queues,
        models=worker.models,
        slots=worker.slots,
        draining=worker.draining,
        alive=worker.alive,
        started_at=moment(worker.started_us),
        seen_at=moment(worker.seen_us),
        host=worker.host if whole else None,
        pid=worker.pid if whole else None,
        holds=worker.holds if whole else None,
    )


def answer_of(job: SubmissionOutcome) -> JobAnswer:
    """The response to a submission that was accepted, or replayed."""
    return JobAnswer(
        success=True,
        job_id=job.job_id,
        status=job.status,
        data_uploaded=job.has_data,
        idempotent_hit=job.replayed,
        quota_warnings=job.quota_warnings or UNSET,
        cost_limit_warning=job.cost_limit_warning or UNSET,
    )


def job_view(row: Any, root: str) -> RemoteJob:
    """The job of a row; ``root`` is the mount point of the service."""
    status = status_of(row.status, row.data_state)
    here = f"{root}/runs/{row.run_id}"
    return RemoteJob(
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
        else RemoteUpload(state=row.data_state, bytes=row.data_bytes, total=row.data_total, data_ref=row.data_ref),
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


def cost_status(user: str, used: Usage, quota: Quota | None) -> RemoteCosts:
    """The user's spending in each period, against the limits of their quota."""
    limits = [_limit(period, spent, quota) for period, spent in used.spent.items()]
    most = None if quota is None else quota.max_concurrent
    blocks = quota is not None and quota.action == "block"
    full = any(each.exceeded for each in limits) or (most is not None and used.concurrent >= most)
    return RemoteCosts(
        user=user,
        action=None if quota is None else quota.action,
        can_submit=not (blocks and full),
        limits=limits,
        concurrent=used.concurrent,
        max_concurrent=most,
    )


def _limit(period: Any, spent: float, quota: Quota | None) -> RemoteCostLimit:
    limit: float | None = None if quota is None else getattr(quota, f"cost_{period}")
    if quota is None or limit is None:
        return RemoteCostLimit(period=period, limit=None, spent=spent, percent=None, exceeded=False, warning=False)
    return RemoteCostLimit(
        period=period,
        limit=limit,
        spent=spent,
        percent=round(100 * spent / limit, 2) if limit else 100.0,
        exceeded=spent >= limit,
        warning=spent >= quota.warn_at * limit,
    )


def config_view(config: Config, caller: Principal) -> RemoteConfig:
    """The config as the caller may see it."""
    trusted = caller.sees("operator")
    return RemoteConfig(
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


def entry_view(entry: ConfigEntry, caller: Principal) -> RemoteConfig:
    """A config in the list; a broken one has an error."""
    if entry.config is not None:
        return config_view(entry.config, caller)
    return RemoteConfig(name=entry.name, source=entry.source, error=entry.error)


def _moment(at_us: int | None) -> datetime | None:
    return None if at_us is None else moment(at_us)
