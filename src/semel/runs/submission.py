"""Makes a checked submission from the arguments of ``submit``, and a run from the store's answer to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any, NamedTuple, TypedDict

import msgspec
from msgspec.structs import replace

from semel._validation import (
    MAX_INT,
    TEN_YEARS,
    checked_int,
    checked_name,
    checked_number,
    checked_retention,
    checked_run_key,
    nearest,
)
from semel.errors import InvalidRequest, SemelError, UnknownModel
from semel.runs import tracing
from semel.runs.models.model import Model, Registry, refuse_while_loading
from semel.runs.store.run_keys import KeyKind, no_run
from semel.runs.store.submit import Answer, Created, JobDetails, Submission
from semel.runs.types import (
    INTERNAL_PREFIX,
    INTERNAL_QUEUE,
    MAX_SEED,
    MICRO,
    DedupePolicy,
    Run,
    checked_cost,
    checked_user,
    micros,
    new_id,
    new_ids,
)

RETRY_WINDOW = 30 * 86400.0
"""Seconds for which a second retry of the same run finds the first one, while that is pending or running."""


class SubmitOptions(TypedDict, total=False):
    """The options of a submission besides the model and its parameters; see ``App.submit``."""

    idempotency_key: str | None
    user: str | int
    tenant: str
    queue: str | None
    priority: int | None
    delay: float
    cost: float | None
    reservation: str | None
    key_ttl: float | None
    dedupe: bool | None
    seed: int | None


class _Keys(NamedTuple):
    """The keys of a submission, as in :class:`Submission`, with seconds."""

    key: str | None
    kind: KeyKind
    ttl: float
    own_key: str | None
    own_ttl: float
    asked: str | None


class SubmissionBuilder:
    """Makes submissions; it stores nothing."""

    def __init__(self, registry: Registry, policy: DedupePolicy) -> None:
        self._registry = registry
        self._policy = policy

    def from_mapping(self, asked: Mapping[str, Any]) -> Submission:
        """A submission from the arguments of ``submit`` as a mapping."""
        options = dict(_checked_mapping(asked))
        known = {"model", "parameters", *SubmitOptions.__annotations__}
        for name in options:
            if name not in known:
                raise InvalidRequest(f"a submission has no {name!r}; {nearest(name, known)}")
        if "model" not in options:
            raise InvalidRequest(
                f"a submission is a mapping with 'model' and any of {', '.join(sorted(known - {'model'}))}; "
                f"got {', '.join(map(repr, options)) or 'nothing'}"
            )
        model, parameters = options.pop("model"), options.pop("parameters", None)
        return self.submission(model, parameters or {}, SubmitOptions(**options))  # type: ignore[typeddict-item]

    def another(self, like: Submission, run_id: str, parameters: Mapping[str, Any], key: object) -> Submission:
        """A submission with the options of ``like``, which has a key if this one has."""
        model = self._registry[like.model]
        given = model.check(parameters)
        own_key = None if key is None else checked_run_key("idempotency_key", key)
        if given == like.parameters:
            payload_hash, facet = like.payload_hash, like.facet
        else:
            payload_hash, facet = model.payload_hash(given, like.seed), _group(model, given)
        names, also = (own_key, None) if like.own_key is None else (None, own_key)
        if like.key_kind == "payload" and like.key is not None:
            names = payload_hash
        return replace(
            like,
            id=run_id,
            parameters=given,
            payload_hash=payload_hash,
            key=names,
            own_key=also,
            facet=facet,
        )

    def submission(
        self,
        model: str,
        parameters: Mapping[str, Any],
        options: SubmitOptions,
        *,
        retry_of: str | None = None,
        rerun_of: str | None = None,
        job: JobDetails | None = None,
        internal: bool = False,
    ) -> Submission:
        """A checked submission. Only the service submits its own models: for a ``job``, or ``internal``."""
        internal = internal or job is not None
        refuse_while_loading("a run was submitted")
        registered = self._registry[model]
        if registered.name.startswith(INTERNAL_PREFIX) and not internal:
            raise UnknownModel(f"the model {model!r} is the service's own: only the service submits its runs")
        given = registered.check(parameters)
        seed = options.get("seed")
        if seed is not None:
            checked_int("seed", seed, 0, MAX_SEED)
        payload_hash = registered.payload_hash(given, seed)
        keys = self._keys(options, payload_hash, retry_of)
        run_id, first, asked = new_id(), None, keys.asked
        if rerun_of is not None:  # the key of the run itself names that run, and no rerun
            asked = sha256(f"rerun\0{rerun_of}\0{payload_hash}".encode()).hexdigest()
        if job is not None:
            asked = job.digest
            if job.data is not None:
                own = SubmitOptions(tenant=options.get("tenant", ""), dedupe=False)
                first = self.submission(job.upload_model, {"job_id": run_id}, own, internal=True)
        queue, priority, cost = options.get("queue"), options.get("priority"), options.get("cost")
        if queue == INTERNAL_QUEUE and not internal:
            raise InvalidRequest(f"the queue {INTERNAL_QUEUE!r} is the service's own; choose another")
        reservation = options.get("reservation")
        return Submission(
            id=run_id,
            tenant=checked_name("tenant", options.get("tenant", "")),
            user=checked_user("user", options.get("user", "")),
            model=model,
            queue=registered.queue if queue is None else checked_name("queue", queue, empty=False),
            priority=registered.priority if priority is None else checked_int("priority", priority, -MAX_INT - 1),
            parameters=given,
            payload_hash=payload_hash,
            key=keys.key,
            key_kind=keys.kind,
            key_ttl_us=round(keys.ttl * MICRO),
            own_key=keys.own_key,
            own_ttl_us=round(keys.own_ttl * MICRO),
            delay_us=round(checked_number("delay", options.get("delay", 0.0), 0, TEN_YEARS) * MICRO),
            cost=micros(checked_cost("cost", registered.cost if cost is None else cost)),
            lease_us=round(registered.lease * MICRO),
            stall_us=None if registered.stall_after is None else round(registered.stall_after * MICRO),
            max_attempts=registered.max_attempts,
            max_lost=registered.max_lost,
            facet=_group(registered, given),
            retry_of=retry_of,
            rerun_of=rerun_of,
            seed=seed,
            reservation=None if reservation is None else checked_name("reservation", reservation, empty=False),
            asked=asked,
            trace=tracing.current(),
            job=job,
            first=first,
        )

    def _keys(self, options: SubmitOptions, payload_hash: str, retry_of: str | None) -> _Keys:
        """The keys by which a repeat is recognised."""
        key, kind, ttl = self._key(options, payload_hash)
        own_key, own_ttl, asked = None, 0.0, None
        if kind == "key" and (retry_of is not None or (options.get("dedupe") and self._policy.dedupe_window > 0)):
            own_key, own_ttl = key, ttl
            key, kind, ttl = payload_hash, "payload", self._policy.dedupe_window
        if retry_of is not None:  # a second retry finds the first; the payload alone finds neither
            asked = sha256(f"retry\0{retry_of}".encode()).hexdigest()
            key, ttl = f"retry:{retry_of}", RETRY_WINDOW
        return _Keys(key, kind, ttl, own_key, own_ttl, asked)

    def _key(self, options: SubmitOptions, payload_hash: str) -> tuple[str | None, KeyKind, float]:
        """The caller's key, or that of the payload, if any; its kind, and for how many seconds it names its run."""
        given, ttl = options.get("idempotency_key"), options.get("key_ttl")
        if given is not None:
            key = checked_run_key("idempotency_key", given)
            return key, "key", checked_retention("key_ttl", self._policy.key_ttl if ttl is None else ttl)
        if options.get("dedupe") is not False and self._policy.dedupe_window > 0:
            return payload_hash, "payload", self._policy.dedupe_window
        return None, "payload", 0.0


class BulkBuilder:
    """Makes the submissions of one call: options that are the same as in an earlier one are not checked again."""

    def __init__(self, builder: SubmissionBuilder) -> None:
        self._builder = builder
        self._like: dict[Any, Submission] = {}
        self._ids = _ids()

    def from_mapping(self, asked: Mapping[str, Any]) -> Submission:
        """As :meth:`SubmissionBuilder.from_mapping`; the ids ascend."""
        options = dict(asked if type(asked) is dict else _checked_mapping(asked))
        parameters, key = options.pop("parameters", None), options.pop("idempotency_key", None)
        same = (key is None, *options.items(), *map(type, options.values()))  # True equals 1, and is no valid priority
        try:
            like = self._like.get(same)
        except TypeError:  # a value that cannot be hashed cannot be valid, either
            return self._builder.from_mapping(asked)
        if like is not None:
            return self._builder.another(like, next(self._ids), parameters or {}, key)
        made = replace(self._builder.from_mapping(asked), id=next(self._ids), group=len(self._like) + 1)
        self._like[same] = made
        return made


def _checked_mapping(asked: object) -> Mapping[str, Any]:
    if not isinstance(asked, Mapping):
        raise InvalidRequest(f"a submission is a mapping with 'model' and 'parameters', not a {type(asked).__name__}")
    return asked


def _ids() -> Iterator[str]:
    """Ids without end, made some at a time."""
    while True:
        yield from new_ids(100)


def runs_of_answers(
    submissions: Sequence[Submission], answers: Sequence[Answer], there: Mapping[str, Run]
) -> list[Run | SemelError]:
    """As :func:`run_of_answer` for each submission of a call: what the new runs of a group share is set once."""
    like: dict[tuple[int, int], Run] = {}
    runs: list[Run | SemelError] = []
    for each, answer in zip(submissions, answers, strict=True):
        if not isinstance(answer, Created) or not each.group:
            runs.append(run_of_answer(each, answer, there))
        elif (earlier := like.get(shared := (each.group, answer.created_us))) is None:
            runs.append(like.setdefault(shared, _new_run(each, answer)))
        else:
            runs.append(
                replace(
                    earlier,
                    id=each.id,
                    parameters_json=each.parameters,
                    payload_hash=each.payload_hash,
                    idempotency_key=each.client_key,
                    artifacts=[],
                    warnings=[],
                    quota_warnings=answer.admission.quota_warnings,
                    cost_limit_warning=answer.admission.cost_limit_warning,
                )
            )
    return runs


def run_of_answer(submission: Submission, answer: Answer, there: Mapping[str, Run]) -> Run | SemelError:
    """The run that the store's answer to a submission names, or the error."""
    if isinstance(answer, SemelError):
        return answer
    if isinstance(answer, Created):
        return _new_run(submission, answer)
    run = there.get(answer.id)
    if run is None or run.tenant != submission.tenant:  # whoever stores a key can name any id
        return no_run(submission.client_key, answer.id)
    return replace(run, replayed=answer.id != submission.id, key_expires_us=answer.expires_us)


def _new_run(submission: Submission, answer: Created) -> Run:
    """The run as it was just written: reading it back would cost as much as writing it."""
    cost = submission.cost / MICRO
    return replace(
        _NEW,
        id=submission.id,
        tenant=submission.tenant,
        user=submission.user,
        model=submission.model,
        queue=submission.queue,
        priority=submission.priority,
        max_attempts=submission.max_attempts,
        max_lost=submission.max_lost,
        parameters_json=submission.parameters,
        payload_hash=submission.payload_hash,
        idempotency_key=submission.client_key,
        retry_of=submission.retry_of,
        rerun_of=submission.rerun_of,
        seed=submission.seed,
        cost=cost,
        asked_cost=cost,
        created_us=answer.created_us,
        due_us=answer.created_us + submission.wait_us,
        stall_us=submission.stall_us,
        key_expires_us=submission.key_end(answer.created_us),
        artifacts=[],
        warnings=[],
        quota_warnings=answer.admission.quota_warnings,
        cost_limit_warning=answer.admission.cost_limit_warning,
    )


_NEW = Run(
    id="",
    tenant="",
    user="",
    model="",
    queue="",
    priority=0,
    status="PENDING",
    step="created",
    note=None,
    version=1,
    fence=0,
    attempts=0,
    errors=0,
    losts=0,
    max_attempts=0,
    max_lost=0,
    parameters_json="",
    payload_hash="",
    idempotency_key=None,
    retry_of=None,
    cost=0.0,
    asked_cost=0.0,
    created_us=0,
    due_us=0,
    started_us=None,
    finished_us=None,
    worker=None,
    lease_until_us=None,
    heartbeat_us=None,
    cancel_us=None,
    progress=None,
    progress_note=None,
    last_error=None,
    traceback=None,
    result_ref=None,
    result_digest=None,
    result_size=None,
    artifacts=[],
)
"""What every run is when it is new; a copy of it is made faster than such a run."""


def _group(model: Model, parameters: str) -> str | None:
    """The value of the parameter that the model is summarised by, as text."""
    if model.summary is None:
        return None
    value = msgspec.json.decode(parameters).get(model.summary)
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
