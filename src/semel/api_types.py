"""The types of the HTTP API: the service reads and writes them, and the clients write and read them.

Requests refuse unknown fields. Responses are lenient: a client ignores fields that a newer server adds, and a
``Remote…`` struct has a default for a field that an older server does not send.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import UNSET, Meta, Raw, Struct, UnsetType, field

from semel._validation import MAX_INT
from semel.errors import InvalidRequest
from semel.runs.diff import Drift
from semel.runs.types import (
    MAX_COST,
    MAX_SEED,
    TERMINAL,
    Action,
    ActionKind,
    ActionState,
    ParameterValue,
    PauseKind,
    Quota,
    Status,
    Usage,
)
from semel.types import Entrance

Name = Annotated[str, Meta(min_length=1, max_length=200)]
JobStatus: TypeAlias = Literal["uploading", "queued", "running", "completed", "failed", "cancelled"]


class DocumentedAs(Struct, frozen=True):
    """In ``Annotated``: the type in the OpenAPI schema, where clients accept more than the server sends today."""

    type: Any


class Problem(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a request failed (RFC 9457). ``retryable``: the same request may succeed later."""

    type: str
    title: str
    status: int
    detail: str
    error_code: str
    retryable: bool
    idempotency_key: str | None = None
    run_status: str | None = None
    retry_after: int | None = None
    drift: Drift | None = None


class RunRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run to submit. Only ``model`` is required; the model's own settings fill in the rest."""

    model: Annotated[str, Meta(min_length=1, max_length=200, examples=["baseline_forecast_v1"])]
    parameters: Annotated[dict[str, Any], Meta(examples=[{"scenario": "high_inflation", "horizon_months": 24}])] = {}
    idempotency_key: Annotated[str | None, Meta(description="Same as the Idempotency-Key header.")] = None
    user: Annotated[Name | None, Meta(description="The run's owner. Only operators may submit for others.")] = None
    queue: Name | None = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None
    delay: Annotated[float, Meta(ge=0, le=316_224_000, description="Seconds before the run may start.")] = 0.0
    cost: Annotated[float, Meta(ge=0, le=MAX_COST)] | None = None
    key_ttl: Annotated[float, Meta(gt=0, le=316_224_000, description="Seconds to keep the key.")] | None = None
    dedupe: Annotated[
        bool | None,
        Meta(description="Return the active run with the same payload, if any; null: only when there is no key."),
    ] = None
    seed: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_SEED)] | None,
        Meta(description="The run's seed, which is part of the payload; null: derived from the payload."),
    ] = None


class CancelRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options for cancelling a run."""

    why: Annotated[str | None, Meta(description="Recorded in the timeline.", examples=["the data was wrong"])] = None


class RerunRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options for running a run again."""

    parameters: Annotated[dict[str, Any], Meta(description="Replace these parameters of the run.")] = {}
    seed: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_SEED)] | None, Meta(description="Another seed; null: that of the run.")
    ] = None
    strict: Annotated[bool, Meta(description="409 if anything changed since; then nothing is stored.")] = False


class Links(Struct, frozen=True):
    """URLs of a run and of its result."""

    self: str
    result: str


class RemoteArtifact(Struct, frozen=True, kw_only=True):
    """A file that a run stored; ``digest`` is its SHA-256."""

    name: str
    size: int
    digest: str
    link: str = ""


class RemoteRun(Struct, frozen=True, kw_only=True):
    """A run at the time of the response. ``version`` grows with every state change."""

    run_id: str
    status: Status
    created_at: datetime
    payload_hash: str
    links: Annotated[dict[str, str], DocumentedAs(Links)]
    model: str
    user: str = ""
    queue: str = ""
    priority: int = 0
    step: str = ""
    version: int = 0
    attempts: int = 0
    errors: int = 0
    """Attempts that ended with an error of the model; they count against ``max_attempts``."""
    max_attempts: int = 0
    losts: int = 0
    """Attempts that lost their worker; they count against ``max_lost`` instead of ``max_attempts``."""
    max_lost: int = 0
    fence: int = 0
    given: Annotated[
        dict[str, Any] | UnsetType,
        Meta(description="Omitted from lists unless requested."),
        DocumentedAs(Raw | UnsetType),
    ] = field(default=UNSET, name="parameters")
    """The parameters; unset in a list that was requested without them. Use ``parameters``."""
    idempotency_key: str | None = None
    retry_of: str | None = None
    rerun_of: str | None = None
    seed: int | None = None
    cost: float = 0.0
    due_at: Annotated[datetime | None, DocumentedAs(datetime)] = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    worker: str | None = None
    lease_expires_at: datetime | None = None
    heartbeat_at: datetime | None = None
    cancel_requested: bool = False
    progress: float | None = None
    progress_note: str | None = None
    stalled_since: Annotated[
        datetime | None,
        Meta(description="When progress last changed, for a run that is stalled; null otherwise."),
    ] = None
    error: str | None = None
    traceback: str | None = None
    result_ref: str | None = None
    result_size: int | None = None
    artifacts: list[RemoteArtifact] = []
    warnings: Annotated[
        list[str], Meta(description="Warnings about the result, such as numbers that JSON cannot represent.")
    ] = []
    replayed: bool = False
    """In the response to a submission: the run existed already; nothing was created or charged."""
    quota_warnings: list[str] = []
    cost_limit_warning: str | None = None

    @property
    def id(self) -> str:
        """Same as ``run_id``."""
        return self.run_id

    @property
    def parameters(self) -> dict[str, Any]:
        """The submitted parameters. A list omits them unless it was requested with ``parameters=True``."""
        if self.given is UNSET:
            raise InvalidRequest(f"the list left the parameters of run {self.run_id} out: ask it with parameters=True")
        return self.given

    @property
    def done(self) -> bool:
        """True when the run has ended."""
        return self.status in TERMINAL


class RemoteRerun(Struct, frozen=True, kw_only=True):
    """A run that was submitted again, and what had changed before it was stored."""

    run: RemoteRun
    drift: Drift


class PauseRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why a queue or a model is paused."""

    why: Annotated[str, Meta(max_length=1000, examples=["the GPUs get a new driver"])] = ""


class RemotePause(Struct, frozen=True, kw_only=True):
    """A queue or a model that is paused: none of its runs starts."""

    kind: PauseKind
    name: str
    since: datetime
    by: str
    why: str
    pending: Annotated[int, Meta(description="How many of its runs are pending.")]


class RunFilter(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Which runs an action changes: those that meet all of these."""

    status: Annotated[list[Status] | None, Meta(description="Any of these; by default all that can be changed.")] = None
    model: Annotated[str, Meta(max_length=1000)] | None = None
    user: Annotated[
        Annotated[str, Meta(max_length=1000)] | None, Meta(description="Others than oneself: for operators.")
    ] = None
    queue: Annotated[str, Meta(max_length=1000)] | None = None
    worker: Annotated[
        Annotated[str, Meta(max_length=1000)] | None,
        Meta(description="The id of the worker that has the run, or had it last."),
    ] = None
    error: Annotated[
        Annotated[str, Meta(min_length=1, max_length=1000)] | None, Meta(description="Part of the last error.")
    ] = None
    parameters: Annotated[
        dict[str, ParameterValue] | None,
        Meta(description="Values of parameters: texts, numbers, true, false or null.", examples=[{"region": "north"}]),
    ] = None
    since: Annotated[datetime | None, Meta(description="Submitted at this time or later.")] = None
    until: Annotated[datetime | None, Meta(description="Submitted before this time.")] = None
    stalled: Annotated[bool, Meta(description="Only runs that make no progress although their worker is alive.")] = (
        False
    )


class ActionRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to do to all runs that match a filter."""

    action: ActionKind
    filter: RunFilter
    priority: Annotated[
        Annotated[int, Meta(ge=-MAX_INT - 1, le=MAX_INT)] | None,
        Meta(description="For set_priority: higher ones first."),
    ] = None
    why: Annotated[
        Annotated[str, Meta(max_length=1000)] | None,
        Meta(description="The reason of a cancellation.", examples=["the data was wrong"]),
    ] = None
    dry_run: Annotated[bool, Meta(description="Only count the runs that match.")] = False


class RemoteRunAction(Struct, frozen=True, kw_only=True):
    """An action on all runs that match a filter, and how far it came."""

    action_id: Annotated[str | None, Meta(description="null for a dry run.")]
    action: ActionKind
    state: ActionState
    filter: RunFilter
    priority: int | None
    why: str
    user: Annotated[str, Meta(description="Who asked for it.")]
    matched: Annotated[int, Meta(description="How many runs matched when it began.")]
    done: Annotated[int, Meta(description="How many were changed.")]
    failed: Annotated[int, Meta(description="How many could not be changed.")]
    skipped: Annotated[int, Meta(description="How many needed no change any more.")]
    error: Annotated[str | None, Meta(description="Why the first that failed could not be changed.")]
    created_at: datetime
    finished_at: datetime | None


class RunPage(Struct, frozen=True, kw_only=True):
    """A page of runs, newest first, and the cursor of the next page; null on the last."""

    runs: list[RemoteRun]
    next: str | None


class BulkAnswer(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result of one submission of many: ``run`` or ``problem``, and the status it would have had alone."""

    place: int
    status: int
    run: RemoteRun | None = None
    problem: Problem | None = None


class RemoteStep(Struct, frozen=True, kw_only=True):
    """One state change in a run's timeline."""

    version: int
    at: datetime
    step: str
    status: Status
    fence: int = 0
    worker: str | None = None
    note: str | None = None


class RemoteWaiting(Struct, frozen=True, kw_only=True):
    """Why a run is pending, since when, and its place in the queue: 1 is next, null before the run is due."""

    reason: str
    since: datetime
    place: int | None = None
    due_at: datetime | None = None
    workers: Annotated[int, Meta(description="Live workers that could take the run.")] = 0


class WaitingAnswer(Struct, frozen=True, kw_only=True):
    """A run's status; ``waiting`` is null unless it is PENDING."""

    status: Status
    waiting: RemoteWaiting | None


class RemoteLogLine(Struct, frozen=True, kw_only=True):
    """A line that a run logged: number ``line`` of the attempt with that fence."""

    fence: int
    line: int
    at: datetime
    level: str
    text: str


class LogPage(Struct, frozen=True, kw_only=True):
    """Log lines, oldest first, and the cursor for newer ones: pass it as ``after``."""

    lines: list[RemoteLogLine]
    next: str


class ProgressView(Struct, frozen=True, kw_only=True):
    """A run's progress, from 0 to 1."""

    progress: float | None
    note: str | None


class EventView(Struct, frozen=True, kw_only=True):
    """A server-sent event. ``data`` is a timeline step, the progress, or a log line, as JSON."""

    id: Annotated[str, Meta(description="The position in the stream, for Last-Event-ID.")]
    event: Literal["state", "progress", "log"]
    data: str


class RemoteEvent(Struct, frozen=True, kw_only=True):
    """A server-sent event with its ``data`` decoded; ``kind`` is ``state``, ``progress`` or ``log``."""

    id: str
    kind: str
    data: Any


class RemoteSummary(Struct, frozen=True, kw_only=True):
    """Run counts of a model; ``group`` is the value of the parameter that the model is summarised by."""

    model: str
    group: str | None
    total: int
    counts: dict[str, int]
    mean_seconds: Annotated[float | None, Meta(description="Mean duration of the runs that succeeded.")]


class RemoteModel(Struct, frozen=True, kw_only=True):
    """A model that can be submitted; ``parameters`` is the JSON Schema of its parameters."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] = {}
    queue: str = ""
    priority: int = 0
    max_attempts: int = 0
    max_lost: int = 0
    backoff: list[float] = []
    lease: float = 0.0
    timeout: float | None = None
    stall_after: float | None = None
    cost: float = 0.0
    isolation: str = ""
    exclude: list[str] = []
    summary: str | None = None


class RemoteWorker(Struct, frozen=True, kw_only=True):
    """A worker. ``host``, ``pid`` and ``holds`` are null except for operators without a tenant."""

    id: str
    name: str
    queues: list[str]
    models: dict[str, str]
    slots: dict[str, int]
    draining: bool
    alive: bool
    started_at: datetime
    seen_at: datetime
    host: str | None = None
    pid: int | None = None
    holds: dict[str, int] | None = None


class RemoteAction(Struct, frozen=True, kw_only=True):
    """What somebody did to ``tenant``, whose actions ``seq`` counts; ``user_tenant`` is their own."""

    seq: int
    at: datetime
    action: str
    target: str
    tenant: str
    user: str
    role: str | None
    user_tenant: str
    token: str | None
    address: str
    entrance: Entrance
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    previous: str
    digest: str


class ActionPage(Struct, frozen=True, kw_only=True):
    """A page of what people did, newest first, and the cursor of the next page; null on the last."""

    actions: list[RemoteAction]
    next: str | None


class RemoteUsage(Struct, frozen=True, kw_only=True):
    """A user's usage and effective quota; ``default``: the user has no quota of their own."""

    user: str
    usage: Usage
    quota: Quota | None = None
    default: bool = False
    tenant: str = ""


class JobRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job to submit."""

    config_name_to_load: Annotated[
        str, Meta(description="The config's name.", max_length=1000, examples=["my-training-config"])
    ]
    idempotency_key: Annotated[
        str | None,
        Meta(description="Identifies the job; shorter than 256 characters.", examples=["ci-build-abc123"]),
    ] = None
    ttl_hours: Annotated[
        float | None,
        Meta(
            description="Hours to keep the key; 24 by default.",
            examples=[48],
            extra_json_schema={"exclusiveMinimum": 0, "maximum": 87_840},
        ),
    ] = None
    tracker_run_name: Annotated[
        str | None, Meta(description="The job's name in an experiment tracker.", examples=["gh-17"])
    ] = None


class JobAnswer(Struct, frozen=True, kw_only=True):
    """The result of a submission. With ``success: false`` there is an ``error``, and nothing was created."""

    success: bool
    job_id: str | UnsetType = UNSET
    status: Annotated[str | UnsetType, DocumentedAs(JobStatus | UnsetType)] = UNSET
    data_uploaded: Annotated[bool, Meta(description="Whether the config has data.")] | UnsetType = UNSET
    idempotent_hit: Annotated[bool, Meta(description="The job existed already.")] | UnsetType = UNSET
    quota_warnings: list[str] | UnsetType = UNSET
    cost_limit_warning: str | UnsetType = UNSET
    error: str | UnsetType = UNSET


class RemoteUpload(Struct, frozen=True, kw_only=True):
    """The upload of a job's data."""

    state: Annotated[str, DocumentedAs(Literal["uploading", "uploaded", "failed", "cancelled"])]
    bytes: int | None = None
    total: int | None = None
    data_ref: str | None = None


class RemoteJob(Struct, frozen=True, kw_only=True):
    """A job at the time of the response. It is also a run, with the same id."""

    job_id: str
    status: Annotated[str, DocumentedAs(JobStatus)]
    provider: str
    config_name: str
    created_at: datetime
    tracker_run_name: str | None = None
    user: str = ""
    model: str = ""
    idempotency_key: str | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    cancel_requested: bool = False
    progress: float | None = None
    progress_note: str | None = None
    stalled_since: datetime | None = None
    upload: RemoteUpload | None = None
    error: str | None = None
    result: str | None = None
    """The URL of the result, if there is one."""
    run: str = ""
    remote_id: str | None = None
    remote_status: str | None = None
    cost: float = 0.0

    @property
    def done(self) -> bool:
        """True when the job has ended."""
        return self.status in ("completed", "failed", "cancelled")


class JobPage(Struct, frozen=True):
    """A page of jobs, newest first, and the cursor of the next page; null on the last."""

    jobs: list[RemoteJob]
    next: str | None


class RemoteConfig(Struct, frozen=True, kw_only=True):
    """A named config. Only operators see ``data`` and ``providers``; ``error`` is why it cannot be used."""

    name: str
    source: Annotated[str, DocumentedAs(Literal["file", "row", "demo"])]
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


class RemoteCostLimit(Struct, frozen=True, kw_only=True):
    """The amount spent against one limit."""

    period: Annotated[str, DocumentedAs(Literal["daily", "weekly", "monthly", "yearly"])]
    spent: float
    limit: float | None = None
    percent: float | None = None
    exceeded: bool = False
    warning: bool = False


class RemoteCosts(Struct, frozen=True, kw_only=True):
    """What a user has spent against the limits of their quota. ``action`` is null without a quota."""

    user: str
    can_submit: bool
    limits: list[RemoteCostLimit]
    action: Annotated[str | None, DocumentedAs(Action | None)] = None
    concurrent: int = 0
    max_concurrent: int | None = None
