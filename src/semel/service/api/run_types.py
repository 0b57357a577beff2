"""What goes over the wire about runs: requests as they are taken, and answers as they are given."""

from __future__ import annotations

import inspect
from datetime import datetime
from typing import Annotated, Any, Literal
from urllib.parse import quote

import msgspec
from msgspec import Meta, Struct

from semel.runs.models.model import Model
from semel.runs.types import MAX_COST, LogLine, Run, Status, Step, Summary, Waiting, WorkerInfo
from semel.service.api.problems import Problem
from semel.types import moment

Name = Annotated[str, Meta(min_length=1, max_length=200)]


class RunRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run to be submitted. Only the model is needed; what is left out is as the model says."""

    model: Annotated[str, Meta(min_length=1, max_length=200, examples=["baseline_forecast_v1"])]
    parameters: Annotated[dict[str, Any], Meta(examples=[{"scenario": "high_inflation", "horizon_months": 24}])] = {}
    idempotency_key: Annotated[str | None, Meta(description="As the header Idempotency-Key.")] = None
    user: Annotated[Name | None, Meta(description="Whose run it is; for operators. Others submit their own.")] = None
    queue: Name | None = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None
    delay: Annotated[float, Meta(ge=0, le=316_224_000, description="Seconds before it may start.")] = 0.0
    cost: Annotated[float, Meta(ge=0, le=MAX_COST)] | None = None
    key_ttl: Annotated[float, Meta(gt=0, le=316_224_000, description="Seconds for which the key is kept.")] | None = (
        None
    )
    dedupe: Annotated[
        bool | None,
        Meta(description="Whether the same payload finds its run while that is under way; null: only without a key."),
    ] = None


class CancelRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a run is cancelled. All of it may be left out."""

    why: Annotated[str | None, Meta(description="Kept in the timeline.", examples=["the data was wrong"])] = None


class Links(Struct, frozen=True):
    """Where to go from here."""

    self: str
    result: str


class ArtifactView(Struct, frozen=True, kw_only=True):
    """A file that a run left."""

    name: str
    size: int
    digest: str
    link: str


class RunView(Struct, frozen=True, kw_only=True):
    """A run as it stood when it was read."""

    run_id: str
    status: Status
    created_at: datetime
    payload_hash: str
    links: Links
    model: str
    user: str
    queue: str
    priority: int
    step: str
    version: int
    attempts: int
    max_attempts: int
    losts: int
    max_lost: int
    fence: int
    parameters: Annotated[
        msgspec.Raw | msgspec.UnsetType, Meta(description="Left out of lists, unless they are asked for.")
    ] = msgspec.UNSET
    idempotency_key: str | None
    retry_of: str | None
    cost: float
    due_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    worker: str | None
    lease_expires_at: datetime | None
    heartbeat_at: datetime | None
    cancel_requested: bool
    progress: float | None
    progress_note: str | None
    stalled_since: Annotated[
        datetime | None,
        Meta(description="Since when its progress stands still though its worker lives; null unless it is stalled."),
    ]
    error: str | None
    traceback: str | None
    result_ref: str | None
    result_size: int | None
    artifacts: list[ArtifactView]
    warnings: Annotated[
        list[str], Meta(description="What to know about the result, such as numbers that JSON has no form for.")
    ]
    replayed: bool
    quota_warnings: list[str]
    cost_limit_warning: str | None


class BulkAnswer(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What became of one of many: ``run`` or ``problem``, and the status that it would have had alone."""

    place: int
    status: int
    run: RunView | None = None
    problem: Problem | None = None


class RunPage(Struct, frozen=True, kw_only=True):
    """Some runs, newest first, and the cursor of the next page; null on the last."""

    runs: list[RunView]
    next: str | None


class StepView(Struct, frozen=True, kw_only=True):
    """One step in the life of a run."""

    version: int
    at: datetime
    step: str
    status: Status
    fence: int
    worker: str | None
    note: str | None


class WaitingView(Struct, frozen=True, kw_only=True):
    """Why a run is pending, since when, and its place in the queue: 1 is next, null when it is not its turn yet."""

    reason: str
    since: datetime
    place: int | None
    due_at: datetime | None
    workers: Annotated[int, Meta(description="Live workers that could take it.")]


class WaitingAnswer(Struct, frozen=True, kw_only=True):
    """How the run stands; ``waiting`` is null unless it is PENDING."""

    status: Status
    waiting: WaitingView | None


class LogLineView(Struct, frozen=True, kw_only=True):
    """A line that a run logged: the ``line``-th of the attempt with that fence."""

    fence: int
    line: int
    at: datetime
    level: str
    text: str


class LogPage(Struct, frozen=True, kw_only=True):
    """Some lines, oldest first, and the cursor to go on from: ask with ``after`` for what came since."""

    lines: list[LogLineView]
    next: str


class ProgressView(Struct, frozen=True, kw_only=True):
    """How far a run has come, from 0 to 1."""

    progress: float | None
    note: str | None


class EventView(Struct, frozen=True, kw_only=True):
    """A server-sent event: its ``data`` is a step of the timeline, the progress, or a line of the log, as JSON."""

    id: Annotated[str, Meta(description="How far the client has come, for Last-Event-ID.")]
    event: Literal["state", "progress", "log"]
    data: str


class SummaryView(Struct, frozen=True, kw_only=True):
    """How the runs of a model stand; ``group`` is the value of the parameter that the model is summarised by."""

    model: str
    group: str | None
    total: int
    counts: dict[str, int]
    mean_seconds: Annotated[float | None, Meta(description="Of those that succeeded, from start to end.")]


class ModelView(Struct, frozen=True, kw_only=True):
    """A model that can be submitted; ``parameters`` is the JSON Schema of what it takes."""

    name: str
    description: str | None
    parameters: dict[str, Any]
    queue: str
    priority: int
    max_attempts: int
    max_lost: int
    backoff: list[float]
    lease: float
    timeout: float | None
    stall_after: float | None
    cost: float
    isolation: str
    exclude: list[str]
    summary: str | None


class WorkerView(Struct, frozen=True, kw_only=True):
    """A worker as it told of itself. Where it runs and what it holds is shown to operators without a tenant only."""

    id: str
    name: str
    queues: list[str]
    models: dict[str, str]
    slots: dict[str, int]
    draining: bool
    alive: bool
    started_at: datetime
    seen_at: datetime
    host: str | None
    pid: int | None
    holds: dict[str, int] | None


def run_view(run: Run, root: str = "") -> RunView:
    """The run as it is shown; ``root`` is where the service is mounted."""
    here = f"{root}/runs/{run.id}"
    succeeded = run.status == "SUCCEEDED"
    return RunView(
        run_id=run.id,
        status=run.status,
        created_at=moment(run.created_us),
        payload_hash=run.payload_hash,
        links=Links(here, f"{here}/result"),
        model=run.model,
        user=run.user,
        queue=run.queue,
        priority=run.priority,
        step=run.step,
        version=run.version,
        attempts=run.attempts,
        max_attempts=run.max_attempts,
        losts=run.losts,
        max_lost=run.max_lost,
        fence=run.fence,
        parameters=msgspec.Raw(run.parameters_json.encode()) if run.parameters_json else msgspec.UNSET,
        idempotency_key=run.idempotency_key,
        retry_of=run.retry_of,
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
            ArtifactView(
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


def step_view(step: Step) -> StepView:
    """The step as it is shown."""
    return StepView(
        version=step.version,
        at=step.at,
        step=step.step,
        status=step.status,
        fence=step.fence,
        worker=step.worker,
        note=step.note,
    )


def log_view(line: LogLine) -> LogLineView:
    """The line as it is shown."""
    return LogLineView(fence=line.fence, line=line.line, at=moment(line.at_us), level=line.level, text=line.text)


def waiting_view(waiting: Waiting) -> WaitingView:
    """The reason as it is shown."""
    return WaitingView(
        reason=waiting.reason,
        since=waiting.since,
        place=waiting.place,
        due_at=_moment(waiting.due_us),
        workers=waiting.workers,
    )


def summary_view(summary: Summary) -> SummaryView:
    """The sums as they are shown."""
    return SummaryView(
        model=summary.model,
        group=summary.group,
        total=summary.total,
        counts=summary.counts,
        mean_seconds=summary.mean_seconds,
    )


def model_view(model: Model) -> ModelView:
    """The model as it is shown."""
    return ModelView(
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


def worker_view(worker: WorkerInfo, *, whole: bool) -> WorkerView:
    """The worker as it is shown; ``whole`` to those whose machines they are."""
    return WorkerView(
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


def _moment(at_us: int | None) -> datetime | None:
    return None if at_us is None else moment(at_us)
