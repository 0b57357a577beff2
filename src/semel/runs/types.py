"""Runs and what belongs to them as data. Times ending in ``_us`` are microseconds on the database's clock."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypedDict, get_args

import msgspec
from msgspec import Struct, StructMeta

from semel import typed_json
from semel._concurrency.fork import survive_fork
from semel._validation import MAX_INT, checked_choice, checked_int, checked_name, checked_number, nearest
from semel.errors import InvalidRequest
from semel.types import moment

Status: TypeAlias = Literal["PENDING", "RUNNING", "SUCCEEDED", "FAILED", "CANCELLED"]
STATUSES: tuple[Status, ...] = ("PENDING", "RUNNING", "SUCCEEDED", "FAILED", "CANCELLED")
TERMINAL = frozenset({"SUCCEEDED", "FAILED", "CANCELLED"})

MICRO = 1_000_000
DAY_US = 86400 * MICRO

HELD_US = 100 * 366 * 86400 * MICRO
"""A run that is due this long after its creation is held: it cannot be leased until it is released."""
INTERNAL_QUEUE = "semel-service"
"""The queue of the service's own work. Its runs that no user submitted are listed only when the queue is asked for."""
INTERNAL_PREFIX = "semel."
"""The prefix of the names of the service's own models."""

RETRY_FOR = 10.0
"""Seconds for which a verb is tried again while the database is unavailable or silent. A SQLite file has one writer,
who is not chosen by turns: under load it may take some tries of a second each."""


class DedupePolicy(Struct, frozen=True, kw_only=True):
    """How an app recognises repeated submissions."""

    key_ttl: float = 86400.0
    """Seconds for which an idempotency key names its run."""
    dedupe_window: float = 600.0
    """Seconds for which the same payload without a key finds its run, while that is pending or running; 0: never."""


def is_own_work(model: str, user: str) -> bool:
    """True for runs that the service submitted to itself, such as uploads: metrics and events leave them out."""
    return model.startswith(INTERNAL_PREFIX) and not user


EndKind: TypeAlias = Literal["succeeded", "retry", "fatal", "snooze", "cancelled", "lost", "unstarted"]
"""How an attempt ends. ``lost``: its worker or process vanished, so it is unknown how far it came. ``unstarted``: the
worker could not begin it, which is not the run's fault."""


class Attempt(Struct, frozen=True, kw_only=True):
    """What is needed to execute an attempt."""

    run_id: str
    model: str
    parameters: str
    """The parameters as JSON."""
    payload_hash: str
    fence: int
    attempt: int
    user: str = ""
    tenant: str = ""
    worker: str = ""
    data_ref: str | None = None
    """The ref of the run's data in the result store, if it has any."""
    seed: int | None = None
    """The seed that was given; None if it is derived from the payload."""
    trace: str | None = None
    """The attempt's span as ``traceparent``, for an attempt in another process."""


MAX_SEED = 2**32 - 1
"""The largest seed that ``random``, NumPy and torch all take."""


def seed_of(payload_hash: str) -> int:
    """The seed of a run for which none was given: the same payload has the same."""
    return int(payload_hash[:8] or "0", 16)


class Artifact(Struct, frozen=True):
    """A file that the attempt leaves in the result store."""

    name: str
    ref: str
    size: int
    digest: str
    """SHA-256 of the content, in hex."""


class AttemptResult(Struct, frozen=True, kw_only=True):
    """How an attempt ended, and what it produced."""

    kind: EndKind
    reason: str = ""
    """What happened, in a sentence, unless it succeeded; becomes ``last_error``."""
    traceback: str = ""
    after: float | None = None
    """For ``retry`` and ``snooze``: seconds from now; None leaves it to the model's backoff."""
    result: str | None = None
    """The result as JSON, if it is small enough for the row."""
    result_ref: str | None = None
    """The ref of the result in the result store, if it is not in the row."""
    result_digest: str | None = None
    """SHA-256 of the result's JSON, in hex."""
    result_size: int = 0
    result_exact: str | None = None
    """The result with NaN and infinity as they are, if it has any: the text, or a ref, as for the result."""
    warnings: list[str] = []
    artifacts: list[Artifact] = []
    cost: float | None = None
    """What the attempt really cost, if the model reported it."""


class Run(Struct, frozen=True, kw_only=True, gc=False):
    """A run as it was when it was read. ``version`` grows with every step of its life."""

    id: str
    tenant: str
    user: str
    model: str
    queue: str
    priority: int
    status: Status
    step: str
    note: str | None
    version: int
    fence: int
    attempts: int
    errors: int
    losts: int
    max_attempts: int
    max_lost: int
    parameters_json: str
    """Empty if the list was asked to leave the parameters out."""
    payload_hash: str
    idempotency_key: str | None
    retry_of: str | None
    cost: float
    """The expected cost, until the model reports the real one."""
    asked_cost: float
    created_us: int
    due_us: int
    started_us: int | None
    finished_us: int | None
    worker: str | None
    lease_until_us: int | None
    heartbeat_us: int | None
    cancel_us: int | None
    progress: float | None
    progress_note: str | None
    last_error: str | None
    traceback: str | None
    result_ref: str | None
    """If it succeeded, where the result is: a ref in the result store, or ``semel:<id>`` for one in the database."""
    result_digest: str | None
    result_size: int | None
    artifacts: list[Artifact]
    warnings: list[str] = []
    """Notes on the result, such as numbers in it that JSON cannot represent."""
    progress_us: int | None = None
    """When the progress of the attempt last changed; if it has reported none, when the attempt began."""
    stall_us: int | None = None
    data_ref: str | None = None
    """The ref of its data in the result store, if it has any."""
    replayed: bool = False
    """Returned by submit: the run existed already, and nothing was created or charged."""
    key_expires_us: int | None = None
    """Returned by submit with a key: until when the key names the run."""
    quota_warnings: list[str] = []
    cost_limit_warning: str | None = None
    seed: int | None = None
    """The seed that was given at submit; None if it is derived from the payload."""
    rerun_of: str | None = None

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters. Raises ``InvalidRequest`` if the list left them out."""
        if not self.parameters_json:
            raise InvalidRequest(f"the list left the parameters of run {self.id} out: ask it for them, or get the run")
        parameters: dict[str, Any] = msgspec.json.decode(self.parameters_json)
        return parameters

    @property
    def actual_seed(self) -> int:
        """The seed of the run, as ``ctx.seed``."""
        return seed_of(self.payload_hash) if self.seed is None else self.seed

    @property
    def done(self) -> bool:
        """True if its status is final."""
        return self.status in TERMINAL

    @property
    def held(self) -> bool:
        """True if the run could never begin, because its data has not been uploaded."""
        return self.due_us - self.created_us >= HELD_US

    @property
    def retry_refusal(self) -> str | None:
        """Why ``retry`` refuses the run, the same in every interface; None if it can be retried."""
        if self.status not in ("FAILED", "CANCELLED"):
            return f"run {self.id} is {self.status}; only a FAILED or CANCELLED run can be retried"
        if self.model.startswith(INTERNAL_PREFIX):
            return f"run {self.id}: a job at a provider is not retried; submit it again, with a new key"
        if self.held:
            return f"run {self.id} never got its data; submit the job again"
        return None

    @property
    def rerun_refusal(self) -> str | None:
        """Why ``rerun`` refuses the run; None if it can be run again."""
        if not self.done:
            return f"run {self.id} is {self.status}; only a run that has ended can be run again"
        if self.model.startswith(INTERNAL_PREFIX):
            return f"run {self.id}: a job at a provider is not run again; submit it again, with a new key"
        if self.held:
            return f"run {self.id} never got its data; submit the job again"
        return None

    @property
    def created_at(self) -> datetime:
        """When it was submitted."""
        return moment(self.created_us)

    @property
    def started_at(self) -> datetime | None:
        """When its first attempt began."""
        return None if self.started_us is None else moment(self.started_us)

    @property
    def finished_at(self) -> datetime | None:
        """When it ended."""
        return None if self.finished_us is None else moment(self.finished_us)

    @property
    def ask_again_in(self) -> float | None:
        """Estimated seconds after which it is worth asking for the result again; None if the run is over.

        For a pending run the delay that was asked for, for a running one a quarter of the time that it took so far.
        """
        if self.done:
            return None
        if self.status == "PENDING":
            return min(max((self.due_us - (self.heartbeat_us or self.created_us)) / MICRO, 1.0), 60.0)
        took = (self.heartbeat_us or 0) - (self.started_us or 0)
        return min(max(took / MICRO / 4, 1.0), 30.0)

    @property
    def stalled_us(self) -> int | None:
        """Since when it is stalled: it runs, its heartbeat is alive, and its progress stood still for ``stall_after``.

        None if it is not stalled. Compared with the time of the heartbeat, so that only the database's clock counts.
        """
        if self.status != "RUNNING" or self.stall_us is None or self.progress_us is None or self.heartbeat_us is None:
            return None
        return self.progress_us if self.heartbeat_us - self.progress_us >= self.stall_us else None

    @property
    def stalled_since(self) -> datetime | None:
        """As ``stalled_us``; None when it is not stalled."""
        return None if self.stalled_us is None else moment(self.stalled_us)

    @property
    def cancel_requested(self) -> bool:
        """True if its cancellation was requested; a RUNNING run gets time to clean up."""
        return self.cancel_us is not None


class Step(Struct, frozen=True):
    """One step in the life of a run, in its timeline."""

    version: int
    at_us: int
    step: str
    status: Status
    fence: int
    worker: str | None
    note: str | None

    @property
    def at(self) -> datetime:
        """When it happened."""
        return moment(self.at_us)


class Manifest(Struct, frozen=True, kw_only=True):
    """What an attempt of a run was made of: what it was asked, on what it ran and with which code, and what came of it.

    What could not be found out is a text that begins with ``unavailable:``.
    """

    run_id: str
    model: str
    attempt: int = 0
    """Which attempt, from 1; 0 if the run has not begun."""
    attempts: int = 0
    """How many the run has."""
    fence: int = 0
    step: str = ""
    """How it ended: ``succeeded``, ``retried``, ``lost``, …; or ``running``."""
    worker: str | None = None
    began_at: datetime | None = None
    ended_at: datetime | None = None
    parameters: dict[str, Any] = {}
    payload_hash: str = ""
    seed: int = 0
    seed_given: bool = False
    """Whether the seed was given at submit; else it follows from the payload."""
    data_ref: str | None = None
    """The ref of its data, which contains the digest of the content."""
    result_digest: str | None = None
    host: str | None = None
    environment_digest: str | None = None
    environment: dict[str, Any] | None = None
    """``python``, ``packages``, ``platform``, ``cpu``, ``memory_bytes``, ``gpus``, ``image``, ``variables``."""
    code_digest: str | None = None
    code: dict[str, Any] | None = None
    """``reference``, ``function`` and ``module`` (SHA-256 of their sources), ``file``, ``git``."""
    recorded_at: datetime | None = None
    """When its worker wrote the environment and the code."""
    missing: str | None = None
    """Why there is no environment and no code, or what is to be known of them."""


class LogLine(Struct, frozen=True):
    """One line that a run logged."""

    fence: int
    line: int
    at_us: int
    level: str
    text: str


PauseKind: TypeAlias = Literal["queue", "model"]


class Pause(Struct, frozen=True):
    """A queue or a model that is paused: none of its runs starts."""

    kind: PauseKind
    name: str
    since_us: int
    by: str
    """Who paused it; empty if that is not known."""
    why: str
    pending: int = 0
    """How many runs of it are pending."""

    @property
    def since(self) -> datetime:
        """When it was paused."""
        return moment(self.since_us)

    @property
    def reason(self) -> str:
        """Why a run waits because of it."""
        about = ": ".join(filter(None, [f"by {self.by}" if self.by else "", self.why]))
        return f"the {self.kind} {self.name!r} is paused" + (f" ({about})" if about else "")


ParameterValue: TypeAlias = str | int | float | bool | None
"""The value of a parameter that runs are found by."""
ActionKind: TypeAlias = Literal["cancel", "retry", "set_priority"]
ActionState: TypeAlias = Literal["dry_run", "running", "finished"]


class RunFilters(TypedDict, total=False):
    """Which runs an action changes: those that meet all of these."""

    status: str | Sequence[str] | None
    model: str | None
    user: str | int | None
    queue: str | None
    worker: str | None
    error: str | None
    parameter: Mapping[str, ParameterValue] | None
    since: datetime | None
    until: datetime | None
    stalled: bool


class RunAction(Struct, frozen=True, kw_only=True):
    """What somebody does to all runs that match a filter, and how far it came."""

    id: str
    """Empty if it is a dry run."""
    tenant: str
    user: str
    """Who asked for it."""
    action: ActionKind
    filter: Any
    """Which runs: a :class:`semel.runs.store.queries.Filter`."""
    priority: int | None = None
    why: str = ""
    matched: int
    """How many runs matched when it began."""
    done: int = 0
    """How many were changed."""
    failed: int = 0
    """How many could not be changed; ``error`` says why, of the first of them."""
    skipped: int = 0
    """How many needed no change any more: they had ended, or were retried already."""
    error: str | None = None
    created_us: int
    finished_us: int | None = None
    lease_until_us: int = 0
    holder: str | None = None
    reached: str | None = None
    """The last run that it came to; it goes from the newest to the oldest."""

    @property
    def state(self) -> ActionState:
        """Whether it is finished."""
        if not self.id:
            return "dry_run"
        return "running" if self.finished_us is None else "finished"

    @property
    def created_at(self) -> datetime:
        """When it began."""
        return moment(self.created_us)

    @property
    def finished_at(self) -> datetime | None:
        """When it was finished."""
        return None if self.finished_us is None else moment(self.finished_us)


class Waiting(Struct, frozen=True, kw_only=True):
    """Why a run is pending, since when, and its place in the queue (1 is next; None while it is not due)."""

    reason: str
    since_us: int
    place: int | None
    due_us: int | None = None
    workers: int = 0

    @property
    def since(self) -> datetime:
        """When the wait began."""
        return moment(self.since_us)


class Summary(Struct, frozen=True, kw_only=True):
    """How many runs of a model have each status; ``group`` is the value of the model's ``summary`` parameter."""

    model: str
    group: str | None
    counts: dict[str, int]
    mean_seconds: float | None
    """Of the runs that succeeded, from start to end."""

    @property
    def total(self) -> int:
        """The number of runs."""
        return sum(self.counts.values())


class Page(Struct, frozen=True):
    """Some runs, newest first, and the cursor of the next page (None on the last)."""

    runs: list[Run]
    next: str | None


Action: TypeAlias = Literal["block", "warn"]
"""What happens at the limit of a quota."""
COUNTED_LIMITS = {"max_concurrent": "concurrent jobs", "per_hour": "jobs per hour", "per_day": "jobs per day"}
COST_PERIODS = ("daily", "weekly", "monthly", "yearly")


class _Limits(StructMeta):
    """Raises InvalidRequest with the nearest name for an unknown limit, instead of a bare TypeError."""

    if not TYPE_CHECKING:  # to type checkers Quota takes its fields

        def __call__(self, *args: object, **limits: object) -> object:
            for name in limits:
                if name not in self.__struct_fields__:
                    raise InvalidRequest(f"a quota has no {name!r}; {nearest(name, self.__struct_fields__)}")
            return super().__call__(*args, **limits)


class Quota(Struct, frozen=True, kw_only=True, metaclass=_Limits):
    """The limits of a user; None means no limit. A user's own quota replaces the default quota as a whole."""

    max_concurrent: int | None = None
    per_hour: int | None = None
    per_day: int | None = None
    cost_daily: float | None = None
    cost_weekly: float | None = None
    cost_monthly: float | None = None
    cost_yearly: float | None = None
    action: Action = "block"
    """``warn`` allows everything, and returns a warning."""
    warn_at: float = 0.8
    """The part of a limit from which on ``submit`` returns a warning."""

    def __post_init__(self) -> None:
        for name in (*COUNTED_LIMITS, *(f"cost_{period}" for period in COST_PERIODS)):
            limit = getattr(self, name)
            if limit is not None:
                (checked_int if name in COUNTED_LIMITS else checked_number)(name, limit, 0, MAX_INT)
        checked_choice("action", self.action, get_args(Action))
        checked_number("warn_at", self.warn_at, 0, 1, above=True)


class Usage(Struct, frozen=True, kw_only=True):
    """A user's usage. ``concurrent`` counts active runs, and live reservations that have no run yet."""

    concurrent: int
    reserved: int
    last_hour: int
    last_day: int
    spent: dict[str, float]
    """By period: daily, weekly, monthly, yearly; each since its start in UTC."""


class WorkerInfo(Struct, frozen=True, kw_only=True):
    """A worker as it last described itself, and the runs that it holds."""

    id: str
    name: str
    host: str
    pid: int
    queues: list[str]
    models: dict[str, str]
    """Where each model that it knows runs: ``loop``, ``process`` or ``thread``."""
    slots: dict[str, int]
    """How many runs it can have there at a time."""
    draining: bool
    started_us: int
    seen_us: int
    alive: bool
    holds: dict[str, int]
    """How many runs of each model it holds."""

    def free(self, model: str) -> int:
        """How many more runs of the model it could begin."""
        where = self.models.get(model, "")
        return self.slots.get(where, 0) - sum(n for name, n in self.holds.items() if self.models.get(name) == where)


class _Stamps:
    """Ever greater stamps for ids, also when the clock stands still or goes back."""

    def __init__(self) -> None:
        self._last = 0
        self.after_fork()
        survive_fork(self)

    def after_fork(self) -> None:
        """Another thread may have held the lock at the moment of the fork."""
        self._lock = threading.Lock()

    def take(self, count: int) -> range:
        with self._lock:
            first = max(self._last + 1, time.time_ns() * 4096 // MICRO)  # 48 bits of milliseconds, 12 below them
            self._last = first + count - 1
        return range(first, first + count)


_stamps = _Stamps()


class HasAttempts(Protocol):
    """A run, wherever it was read."""

    @property
    def attempts(self) -> int: ...
    @property
    def errors(self) -> int: ...
    @property
    def max_attempts(self) -> int: ...
    @property
    def losts(self) -> int: ...
    @property
    def max_lost(self) -> int: ...


def attempts_text(run: HasAttempts) -> str:
    """How often a run was tried, and what is used of its two budgets: ``attempt 2 · errors 0 of 3 · lost 1 of 3``."""
    number = f"attempt {run.attempts}" if run.attempts else "no attempt yet"
    return f"{number} · errors {run.errors} of {run.max_attempts} · lost {run.losts} of {run.max_lost}"


def new_id() -> str:
    """A UUIDv7: unique, and greater than every id made before in this process."""
    return new_ids(1)[0]


def new_ids(count: int) -> list[str]:
    """Ascending ids, as :func:`new_id` makes them one by one."""
    tails = os.urandom(8 * count).hex()
    return [
        f"{_start_of_ids(stamp >> 12)}{stamp & 0xFFF:03x}-{_VARIANT[tails[at]]}"
        f"{tails[at + 1 : at + 4]}-{tails[at + 4 : at + 16]}"
        for stamp, at in zip(_stamps.take(count), range(0, 16 * count, 16), strict=True)
    ]


@lru_cache(16)
def _start_of_ids(milliseconds: int) -> str:
    """How all ids of a millisecond begin."""
    digits = f"{milliseconds:012x}"
    return f"{digits[:8]}-{digits[8:]}-7"


_VARIANT = {digit: "89ab"[int(digit, 16) % 4] for digit in "0123456789abcdef"}
"""The two highest bits after the stamp are 10 in every UUID of RFC 9562."""


def id_at(at_us: int) -> str:
    """The smallest id that a run submitted at that time can have: ids begin with the time in milliseconds."""
    digits = f"{min(max(0, at_us // 1000), 2**48 - 1):012x}"
    return f"{digits[:8]}-{digits[8:]}-0000-0000-000000000000"


RESULT_SCHEME = "semel:"
"""The prefix of the ``result_ref`` of a result that is in the database."""
_RESULT_FILE = re.compile(r"/[0-9]+/result\.json|\.json")


def checked_id(run_id: object) -> str | None:
    """The id in canonical form, or None if it cannot be one. Also takes a ``result_ref``, which names its run."""
    plain = str(run_id).removeprefix(RESULT_SCHEME)
    if _RESULT_FILE.fullmatch(plain, 36):
        plain = plain[:36]
    plain = plain.replace("-", "").lower()
    if len(plain) != 32 or not all(digit in "0123456789abcdef" for digit in plain):
        return None
    return f"{plain[:8]}-{plain[8:12]}-{plain[12:16]}-{plain[16:20]}-{plain[20:]}"


MAX_COST = 1_000_000
"""The highest cost of one run. More is most likely a mistake in the unit."""


def checked_cost(what: str, value: object) -> float:
    """Return an amount of money, in any currency; raise if it is not in the range."""
    return checked_number(what, value, 0, MAX_COST)


EVERYBODY = "*"
"""The user of the default quota, which applies to every user without their own."""


def checked_user(what: str, value: object, *, empty: bool = True) -> str:
    """The name of one user, or an empty text for none if ``empty``."""
    user = checked_name(what, value, empty=empty)
    if user == EVERYBODY:
        raise InvalidRequest(f"{what} is {EVERYBODY!r}, which stands for every user in quotas, so it cannot be one")
    return user


def micros(amount: float) -> int:
    """Money as whole millionths."""
    return round(amount * MICRO)


def run_of(row: Mapping[str, Any]) -> Run:
    """The run of a row. Only one that succeeded has a ``result_ref``."""
    fields = dict(row)
    fields["user"] = fields.pop("user_id")
    fields["parameters_json"] = fields.pop("parameters", "")
    fields["cost"] /= MICRO
    fields["asked_cost"] /= MICRO
    warnings = fields["warnings"]
    fields["warnings"] = typed_json.decode(warnings, list[str]) if warnings else []
    if fields["status"] == "SUCCEEDED" and fields["result_ref"] is None:
        fields["result_ref"] = f"{RESULT_SCHEME}{fields['id']}"
    artifacts = fields["artifacts"]
    fields["artifacts"] = typed_json.decode(artifacts, list[Artifact]) if artifacts else []
    return Run(**fields)
