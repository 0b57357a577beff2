"""What the server's answers are to a client: data, tolerant of what a newer server adds."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from msgspec import UNSET, Struct, UnsetType, field

from semel.errors import InvalidRequest
from semel.runs.types import TERMINAL, Status


class RemoteArtifact(Struct, frozen=True, kw_only=True):
    """A file that a run left; ``digest`` is its SHA-256."""

    name: str
    size: int
    digest: str
    link: str = ""


class RemoteRun(Struct, frozen=True, kw_only=True):
    """A run as it stood when the server was asked. ``version`` grows with every step of its life."""

    run_id: str
    status: Status
    created_at: datetime
    payload_hash: str
    links: dict[str, str]
    model: str
    user: str = ""
    queue: str = ""
    priority: int = 0
    step: str = ""
    version: int = 0
    attempts: int = 0
    max_attempts: int = 0
    losts: int = 0
    """How many of the attempts lost their worker: those are counted against ``max_lost`` instead."""
    max_lost: int = 0
    fence: int = 0
    given: dict[str, Any] | UnsetType = field(default=UNSET, name="parameters")
    """What ``parameters`` answers, where the server told it."""
    idempotency_key: str | None = None
    retry_of: str | None = None
    cost: float = 0.0
    due_at: datetime | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    worker: str | None = None
    lease_expires_at: datetime | None = None
    heartbeat_at: datetime | None = None
    cancel_requested: bool = False
    progress: float | None = None
    progress_note: str | None = None
    stalled_since: datetime | None = None
    """Since when its progress stands still though its worker lives; None unless it is stalled."""
    error: str | None = None
    traceback: str | None = None
    result_ref: str | None = None
    result_size: int | None = None
    artifacts: list[RemoteArtifact] = []
    warnings: list[str] = []
    """What to know about the result, such as numbers in it that JSON has no form for."""
    replayed: bool = False
    """Of an answer to submit: the run was there already, and nothing was created or charged."""
    quota_warnings: list[str] = []
    cost_limit_warning: str | None = None

    @property
    def id(self) -> str:
        """As ``run_id``."""
        return self.run_id

    @property
    def parameters(self) -> dict[str, Any]:
        """What was asked for. A list leaves it out, unless it was asked with ``parameters=True``."""
        if self.given is UNSET:
            raise InvalidRequest(f"the list left the parameters of run {self.run_id} out: ask it with parameters=True")
        return self.given

    @property
    def done(self) -> bool:
        """True when nothing will change any more."""
        return self.status in TERMINAL


class RunPage(Struct, frozen=True, kw_only=True):
    """Some runs, newest first, and the cursor of the next page (None on the last)."""

    runs: list[RemoteRun]
    next: str | None = None


class RemoteStep(Struct, frozen=True, kw_only=True):
    """One step in the life of a run, in its timeline."""

    version: int
    at: datetime
    step: str
    status: Status
    fence: int = 0
    worker: str | None = None
    note: str | None = None


class RemoteWaiting(Struct, frozen=True, kw_only=True):
    """Why a run is pending: since when, which place in its queue (1 is next; None when it is not its turn yet)."""

    reason: str
    since: datetime
    place: int | None = None
    due_at: datetime | None = None
    workers: int = 0


class RemoteLogLine(Struct, frozen=True, kw_only=True):
    """One line that a run logged: the ``line``-th of the attempt with that fence."""

    fence: int
    line: int
    at: datetime
    level: str
    text: str


class RemoteEvent(Struct, frozen=True, kw_only=True):
    """Something that happened to a run: ``kind`` says what, ``data`` what was told of it."""

    id: str
    kind: str
    data: Any


class RemoteSummary(Struct, frozen=True, kw_only=True):
    """How the runs of a model stand; ``group`` is the value of the parameter that the model is summarised by."""

    model: str
    group: str | None
    total: int
    counts: dict[str, int]
    mean_seconds: float | None
    """Of those that succeeded, from start to end."""


class RemoteModel(Struct, frozen=True, kw_only=True):
    """A model that can be submitted; ``parameters`` is the JSON Schema of what it takes."""

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
    """A worker as it told of itself; where it runs and what it holds is told to operators only."""

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


class RemoteUpload(Struct, frozen=True, kw_only=True):
    """The upload of a job's data."""

    state: str
    bytes: int | None = None
    total: int | None = None
    data_ref: str | None = None


class RemoteJob(Struct, frozen=True, kw_only=True):
    """A job as it stood when the server was asked. It is a run, too, of the same id."""

    job_id: str
    status: str
    """``uploading``, ``queued``, ``running``, ``completed``, ``failed`` or ``cancelled``."""
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
    run: str = ""
    remote_id: str | None = None
    remote_status: str | None = None
    cost: float = 0.0

    @property
    def done(self) -> bool:
        """True when nothing will change any more."""
        return self.status in ("completed", "failed", "cancelled")


class JobPage(Struct, frozen=True, kw_only=True):
    """Some jobs, newest first, and the cursor of the next page (None on the last)."""

    jobs: list[RemoteJob]
    next: str | None = None


class RemoteConfig(Struct, frozen=True, kw_only=True):
    """A named config; ``error`` says why one cannot be used."""

    name: str
    source: str
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
    """What was spent of one limit."""

    period: str
    spent: float
    limit: float | None = None
    percent: float | None = None
    exceeded: bool = False
    warning: bool = False


class RemoteCosts(Struct, frozen=True, kw_only=True):
    """What a user has spent, and what they may."""

    user: str
    can_submit: bool
    limits: list[RemoteCostLimit]
    action: str | None = None
    concurrent: int = 0
    max_concurrent: int | None = None
