"""The operations of an app on runs, written once: blocking in :class:`~semel.runs.app.App`, awaited in its ``aio``."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from hashlib import sha256
from typing import Any, Unpack, get_args
from uuid import UUID

import msgspec

from semel._concurrency.sync import run_sync
from semel._validation import (
    MAX_INT,
    TEN_YEARS,
    checked_choice,
    checked_int,
    checked_name,
    checked_number,
    checked_run_key,
)
from semel.audit_log import AuditCheck
from semel.errors import (
    IllegalTransition,
    InvalidRequest,
    ResultStoreError,
    RunNotComplete,
    RunNotFound,
    SemelError,
)
from semel.runs import strict_json
from semel.runs.actions import ActionCarrier
from semel.runs.diff import Drift, Rerun, ResultComparison, RunDiff, Section, compare, compare_results, refused
from semel.runs.diff import drift as find_drift
from semel.runs.hooks import EventHooks, RunEvent
from semel.runs.job_store import close_reservation, open_reservations
from semel.runs.manifest import collector
from semel.runs.models.model import Registry
from semel.runs.results import FileResults, ResultStore, flat_ref
from semel.runs.store import (
    RunStore,
    actions,
    audit_log,
    lease,
    maintenance,
    manifests,
    partial_ids,
    partitions,
    pauses,
    queries,
    quotas,
    seals,
    transitions,
)
from semel.runs.store.actions import NewAction
from semel.runs.store.audit_log import AuditFilter, AuditPage
from semel.runs.store.maintenance import Removal
from semel.runs.store.manifests import manifest_of, with_recorded
from semel.runs.store.queries import Backlog, Filter
from semel.runs.store.submit import Answer, Created, Existing, JobDetails, Submission, one_of_each_group, recognised
from semel.runs.submission import (
    BulkBuilder,
    SubmissionBuilder,
    SubmitOptions,
    run_of_answer,
    runs_of_answers,
)
from semel.runs.transports import Transport
from semel.runs.types import (
    INTERNAL_PREFIX,
    INTERNAL_QUEUE,
    MICRO,
    STATUSES,
    ActionKind,
    DedupePolicy,
    LogLine,
    Manifest,
    Page,
    ParameterValue,
    Pause,
    PauseKind,
    Quota,
    Run,
    RunAction,
    RunFilters,
    Step,
    Summary,
    Usage,
    Waiting,
    WorkerInfo,
    checked_id,
    new_id,
)
from semel.types import Actor, Entrance, actor_here

AT_ONCE = 16 * 1024
"""Up to so many bytes of parameters are checked in the event loop; more take milliseconds, in a thread."""

MAX_COMPARED = 500_000
"""Bytes of results that are compared value by value; of larger ones only the digests are."""

_log = logging.getLogger("semel.runs")


class RunEngine:
    """The operations on the runs of one app."""

    def __init__(
        self,
        store: RunStore,
        registry: Registry,
        *,
        results: Callable[[], ResultStore],
        transport: Callable[[], Transport],
        dedupe_policy: DedupePolicy,
        hooks: EventHooks,
    ) -> None:
        self.store = store
        self.registry = registry
        self._results = results
        self._transport = transport
        self._builder = SubmissionBuilder(registry, dedupe_policy)
        self._hooks = hooks
        self._put_off: set[str] = set()
        self._carrier = ActionCarrier(store, self._retry_submission, self._announce_created)

    async def submit(
        self,
        model: str,
        parameters: Mapping[str, Any] | None = None,
        *,
        idempotency_key: str | None = None,
        user: str | int = "",
        tenant: str = "",
        queue: str | None = None,
        priority: int | None = None,
        delay: float = 0.0,
        cost: float | None = None,
        reservation: str | None = None,
        key_ttl: float | None = None,
        dedupe: bool | None = None,
        seed: int | None = None,
    ) -> Run:
        """Store a run of the model with these parameters, and return at once.

        ``idempotency_key`` names the run for ``key_ttl`` seconds (a day): submitting the same again returns that run,
        with ``run.replayed``, and nothing is created or charged. Without a key, the same payload finds the run that is
        pending or running, for some minutes; ``dedupe=False`` creates a new run whatever was submitted before, and
        ``dedupe=True`` looks for the payload even if there is a key, which then names the run that is found.
        ``user`` and ``tenant`` own the run: each has their own keys, payloads and quotas. ``delay`` seconds pass
        before it may start; ``priority`` (higher first), ``queue`` and ``cost`` override the model's.
        ``seed`` (0 to 2³² - 1) is the run's ``ctx.seed``, instead of one derived from the payload; it is part of the
        payload. ``reservation`` is a slot that was reserved before. Between ``reserve_job_slot`` and
        ``consume_reservation`` in the same thread or task it need not be named: the run takes the slot.

        Raises ``UnknownModel``, ``InvalidParameters``, ``KeyReused`` for a key with another payload,
        ``QuotaExceeded``, ``CostLimitExceeded``, ``ReservationLost``: then nothing was stored.
        Raises ``StoreUnavailable`` if the database did not reply, however often it was tried: the run may have been
        stored, once, or not. Submit again with the same key to find out without a second run.
        """
        options = SubmitOptions(
            idempotency_key=idempotency_key,
            user=user,
            tenant=tenant,
            queue=queue,
            priority=priority,
            delay=delay,
            cost=cost,
            reservation=reservation,
            key_ttl=key_ttl,
            dedupe=dedupe,
            seed=seed,
        )
        return await self.submit_run(model, parameters or {}, options)

    async def submit_run(
        self,
        model: str,
        parameters: Mapping[str, Any],
        options: SubmitOptions,
        *,
        retry_of: str | None = None,
        rerun_of: str | None = None,
        job: JobDetails | None = None,
        by: Actor | None = None,
    ) -> Run:
        """As :meth:`submit`. The service's ``job`` is stored with its run, and with the run that uploads its data.

        ``by`` is who submits a run again by hand, which is logged.
        """
        build = partial(
            self._builder.submission, model, parameters, options, retry_of=retry_of, rerun_of=rerun_of, job=job
        )
        small = strict_json.is_small(parameters, AT_ONCE)
        (submission,) = _with_slots([build() if small else await self.store.run_blocking(build)])
        answer = await (self.store.submit(submission) if by is None else self.store.submit_by_hand(submission, by))
        _close_slots([submission], [answer])
        found = None
        if isinstance(answer, Existing):
            found = answer.run or await self.store.find(answer.id)
        run = run_of_answer(submission, answer, {} if found is None else {found.id: found})
        if isinstance(run, SemelError):
            self._tell("refused", model)
            raise run
        self._tell("replayed" if run.replayed else "created", model)
        if not run.replayed:
            await self._announce([run])
        return run

    async def submit_many(
        self, submissions: Sequence[Mapping[str, Any]], *, strict: bool = True
    ) -> list[Run | SemelError]:
        """Store many runs with few statements; each submission is a mapping of the arguments of :meth:`submit`.

        Returns the runs in the same order, with an error in the place of each that was refused. Invalid arguments raise
        before anything is stored; with ``strict=False`` their errors, too, are returned in their places.
        """
        if isinstance(submissions, str | Mapping):
            raise InvalidRequest("submit_many takes a list of mappings, each with the arguments of submit")
        if strict_json.is_small(submissions, AT_ONCE):
            asked, refused = self._submissions(submissions, strict=strict)
        else:
            asked, refused = await self.store.run_blocking(self._submissions, submissions, strict=strict)
        asked = _with_slots(asked)
        answers = await self.store.submit_many(asked)
        _close_slots(asked, answers)
        found = [answer.id for answer in answers if isinstance(answer, Existing)]
        there = await self.store.read(queries.get, found) if found else {}
        runs = runs_of_answers(asked, answers, there)
        if refused:
            had = iter(runs)
            runs = [refused[place] if place in refused else next(had) for place in range(len(submissions))]
        if self._hooks.has_hooks or self._transport().announces:
            new = [run for run in runs if isinstance(run, Run) and not run.replayed]
            for run in new:
                self._tell("created", run.model)
            await self._announce(new)
        return runs

    def _submissions(
        self, submissions: Sequence[Mapping[str, Any]], *, strict: bool
    ) -> tuple[list[Submission], dict[int, SemelError]]:
        asked: list[Submission] = []
        refused: dict[int, SemelError] = {}
        builder = BulkBuilder(self._builder)
        for place, each in enumerate(submissions):
            try:
                asked.append(builder.from_mapping(each))
            except SemelError as error:
                if strict:
                    raise type(error)(f"submission {place}: {error}") from error
                refused[place] = error
        return asked, refused

    async def _announce(self, runs: Sequence[Run]) -> None:
        """Announce the runs that are due. If that fails nothing is lost: the sweeper finds the runs."""
        transport = self._transport()
        if transport.announces and runs:
            due = [(run.id, run.queue) for run in runs if run.due_us <= run.created_us]
            await self.store.run_blocking(transport.announce, due)

    def _tell(self, kind: Any, model: str) -> None:
        if self._hooks.has_hooks:
            self._hooks.emit(RunEvent(kind, model))

    async def get(self, run_id: str, *, tenant: str | None = None) -> Run:
        """The run as it is now. Raises :class:`~semel.errors.RunNotFound`."""
        known = checked_id(run_id)
        if tenant is not None:
            checked_name("tenant", tenant)
        run = await self.store.find(known) if known else None
        if run is None or (tenant is not None and run.tenant != tenant):
            raise RunNotFound(f"there is no run {run_id!r}")
        return run

    async def runs(
        self,
        *,
        status: str | Sequence[str] | None = None,
        model: str | None = None,
        user: str | int | None = None,
        tenant: str = "",
        queue: str | None = None,
        idempotency_key: str | None = None,
        payload_hash: str | None = None,
        worker: str | None = None,
        error: str | None = None,
        parameter: Mapping[str, ParameterValue] | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        stalled: bool = False,
        id_part: str | None = None,
        limit: int = 50,
        cursor: str | None = None,
        parameters: bool = True,
        max_bytes: int | None = None,
    ) -> Page:
        """Runs, newest first; ``page.next`` is the cursor of the next page, None on the last.

        ``worker`` is the id of the worker that has a run, or had it last, ``error`` a part of its last error, and
        ``parameter={"region": "north"}`` a value of its parameters: a text, a number, True, False or None.
        ``parameters=False`` leaves the parameters out, and ``max_bytes`` ends a page before it gets larger (it has at
        least one run). ``stalled`` lists only runs that are alive and made no progress for ``stall_after``.
        ``id_part`` lists runs whose id begins or ends with these characters, at least six; such a page may have few
        runs, or none, and a ``next``.
        """
        checked_int("limit", limit, 1, 1000)
        start = None if cursor is None else checked_id(cursor)
        if cursor is not None and start is None:
            raise InvalidRequest("cursor must be the page.next of an earlier page")
        wanted = self.filter_of(
            tenant,
            status=status,
            model=model,
            user=user,
            queue=queue,
            worker=worker,
            error=error,
            parameter=parameter,
            since=since,
            until=until,
            stalled=stalled,
        )
        wanted = msgspec.structs.replace(
            wanted,
            key=_name_or_none("idempotency_key", idempotency_key),
            payload_hash=_name_or_none("payload_hash", payload_hash),
        )
        if id_part is not None:
            if (digits := partial_ids.digits_of(id_part)) is None:
                raise InvalidRequest(f"{id_part!r:.80} is not part of an id: at least six hexadecimal digits")
            return await self.store.read(partial_ids.list_runs, wanted, digits, limit, start, parameters=parameters)
        return await self.store.read(
            queries.list_runs, wanted, limit, start, parameters=parameters, max_bytes=max_bytes
        )

    def filter_of(self, tenant: str, **filters: Unpack[RunFilters]) -> Filter:
        """The filters as the store takes them. Raises ``InvalidRequest`` where one is invalid."""
        status, parameter = filters.get("status"), filters.get("parameter")
        error = filters.get("error")
        return Filter(
            tenant=checked_name("tenant", tenant),
            status=None if status is None else _statuses(status),
            model=_name_or_none("model", filters.get("model")),
            user=_name_or_none("user", filters.get("user")),
            queue=_name_or_none("queue", filters.get("queue")),
            worker=_name_or_none("worker", filters.get("worker")),
            error=None if error is None else checked_name("error", error, most=1000, empty=False),
            parameters=None if parameter is None else _checked_parameters(parameter),
            since_us=_us("since", filters.get("since")),
            until_us=_us("until", filters.get("until")),
            stalled=bool(filters.get("stalled")),
            real_time=self.store.has_real_time,
        )

    async def act(
        self,
        action: ActionKind,
        *,
        priority: int | None = None,
        why: str | None = None,
        dry_run: bool = False,
        tenant: str = "",
        idempotency_key: str | None = None,
        by: Actor | None = None,
        **filters: Unpack[RunFilters],
    ) -> RunAction:
        """Cancel, retry or give a ``priority`` to all runs that match the filters, which are those of :meth:`runs`.

        Returns when it is finished; ``dry_run`` only counts the runs. It changes runs in batches, newest first, and
        none that was submitted after it began. If this process dies, a server on the database carries it on; no run is
        changed twice. ``why`` is the reason for a cancellation. The same ``idempotency_key`` of the same user finds the
        action that began before. ``by`` is who the audit log says did it: by default the user of this process.
        """
        begun = await self.begin_action(
            action,
            priority=priority,
            why=why,
            dry_run=dry_run,
            tenant=tenant,
            idempotency_key=idempotency_key,
            by=by,
            **filters,
        )
        while begun.state == "running":
            if (carried := await self.carry_out(begun.id)) is not None:
                return carried
            await self.store.runtime.sleep(0.1)  # another process carries it out
            begun = await self.action(begun.id)
        return begun

    async def begin_action(
        self,
        action: ActionKind,
        *,
        priority: int | None = None,
        why: str | None = None,
        dry_run: bool = False,
        tenant: str = "",
        idempotency_key: str | None = None,
        by: Actor | None = None,
        **filters: Unpack[RunFilters],
    ) -> RunAction:
        """As :meth:`act`, but return when it is stored: :meth:`carry_out` does it."""
        checked_choice("action", action, get_args(ActionKind))
        if (action == "set_priority") != (priority is not None):
            raise InvalidRequest("a priority is needed for set_priority, and for no other action")
        if priority is not None:
            checked_int("priority", priority, -MAX_INT - 1)
        wanted = _of_statuses(action, self.filter_of(tenant, **filters))
        who, reason = _who(by), "cancelled by request" if action == "cancel" else ""
        asked = NewAction(
            id="" if dry_run else _action_id(wanted.tenant, who.user, idempotency_key),
            tenant=wanted.tenant,
            user=who.user,
            action=action,
            filter=wanted,
            priority=priority,
            why=reason if why is None else checked_name("why", why, most=1000),
        )
        if dry_run:
            return await self.store.read(actions.try_out, asked, self.store.statement_context)
        return await self.store.write(actions.begin, asked, self.store.acting(who))

    async def carry_out(self, action_id: str) -> RunAction | None:
        """Do what is left of an action, and return it; None if it is finished, or another process carries it out."""
        taken = await self.store.write(actions.take, action_id, new_id(), self.store.statement_context)
        return None if taken is None else await self._carrier.carry_out(taken)

    async def action(self, action_id: str, *, tenant: str | None = None) -> RunAction:
        """How far an action on runs came. Raises ``RunNotFound`` if there is none of this id."""
        known = checked_id(action_id)
        found = await self.store.read(actions.get, known, tenant) if known else None
        if found is None:
            raise RunNotFound(f"there is no action {action_id!r} on runs")
        return found

    async def actions(self, *, tenant: str = "", user: str | int | None = None, limit: int = 50) -> list[RunAction]:
        """The actions on runs of the last month, newest first."""
        checked_int("limit", limit, 1, 1000)
        whose = _name_or_none("user", user)
        return await self.store.read(actions.recent, checked_name("tenant", tenant), whose, limit)

    async def _announce_created(self, submissions: Sequence[Submission], answers: Sequence[Answer]) -> None:
        pairs = zip(submissions, answers, strict=True)
        new = [run_of_answer(each, answer, {}) for each, answer in pairs if isinstance(answer, Created)]
        runs = [each for each in new if isinstance(each, Run)]
        for run in runs:
            self._tell("created", run.model)
        await self._announce(runs)

    async def cancel(
        self,
        run_id: str,
        *,
        why: str = "cancelled by request",
        tenant: str | None = None,
        by: Actor | None = None,
    ) -> Run:
        """Cancel a pending run, or request the cancellation of a running one, which gets time to clean up.

        A repeat changes nothing. Raises ``IllegalTransition`` for a run that has succeeded or failed. ``by`` is who
        the audit log says did it: by default the user of this process.
        """
        checked_name("why", why, most=1000)
        run = await self.get(run_id, tenant=tenant)
        if run.status in ("PENDING", "RUNNING"):
            context = self.store.acting(_who(by))
            await self.store.write(transitions.cancel_by_hand, [run.id], why, run.tenant, context)
            run = await self.get(run.id)
        if run.status in ("SUCCEEDED", "FAILED"):
            raise IllegalTransition(f"run {run.id} is {run.status} already; only a run under way can be cancelled")
        return run

    async def retry(
        self,
        run_id: str,
        *,
        idempotency_key: str | None = None,
        tenant: str | None = None,
        by: Actor | None = None,
    ) -> Run:
        """Submit a failed or cancelled run again, as a new run with ``retry_of``; the old run stays as it is.

        A second retry finds the new run while that is pending or running, with any key; with the same key, whatever
        became of it.
        A job at a provider is never retried: it may have been done there, and would be done and paid for twice.
        ``by`` is who the audit log says did it: by default the user of this process.
        """
        run = await self.get(run_id, tenant=tenant)
        if refusal := run.retry_refusal:
            raise IllegalTransition(refusal)
        options = _retry_options(run, idempotency_key)
        who = _who(by)
        return await self.submit_run(run.model, run.parameters, options, retry_of=run.id, by=who)

    def _retry_submission(self, run: Run) -> Submission:
        return self._builder.submission(run.model, run.parameters, _retry_options(run), retry_of=run.id)

    async def result(self, run_id: str, *, tenant: str | None = None) -> Any:
        """What the run returned. Raises :class:`~semel.errors.RunNotComplete` unless it succeeded."""
        return strict_json.read_exact(await self.result_json(run_id, tenant=tenant, exact=True))

    async def result_json(self, run_id: str, *, tenant: str | None = None, exact: bool = False) -> bytes:
        """What the run returned, as JSON: with null for NaN and infinity, or ``exact``, as Python's json reads them."""
        known = checked_id(run_id)
        found = await self.store.read(queries.result, known, tenant) if known else None
        if found is None:
            raise RunNotFound(f"there is no run {run_id!r}")
        run, kept, exactly = found
        if run.status != "SUCCEEDED":
            reason = f": {run.last_error}" if run.status == "FAILED" else ""
            message = f"run {run.id} is {run.status} and has no result{reason}"
            raise RunNotComplete(message, run.status, run.ask_again_in)
        if exact and exactly is not None:
            return exactly.encode() if kept is not None else await self.store.run_blocking(self._results().get, exactly)
        if kept is not None:
            return kept.encode()
        assert run.result_ref is not None
        results = self._results()
        if isinstance(results, FileResults) and run.result_ref == flat_ref(run.id):
            await self.store.run_blocking(results.give_name, run.id, run.fence)  # its worker may have died before this
        data = await self.store.run_blocking(results.get, run.result_ref)
        if sha256(data).hexdigest() != run.result_digest:
            raise ResultStoreError(f"the result of run {run.id} was changed after it was stored: its digest differs")
        return data

    async def artifact(self, run_id: str, name: str, *, tenant: str | None = None) -> Iterator[bytes]:
        """The content of an artifact, in pieces."""
        run = await self.get(run_id, tenant=tenant)
        for each in run.artifacts:
            if each.name == name:
                return await self.store.run_blocking(self._results().open, each.ref)
        raise RunNotFound(f"run {run.id} has no artifact {name!r}")

    async def wait(
        self,
        run_id: str,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 -- the blocking interface has it, too
        tenant: str | None = None,
    ) -> Run:
        """Wait until the run is over, and return it. Raises TimeoutError after ``timeout`` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        pause = 0.01
        while True:
            run = await self.get(run_id, tenant=tenant)
            if run.done:
                return run
            left = pause if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"run {run.id} is still {run.status} after {timeout} seconds")
            await self.store.runtime.sleep(min(pause, left))
            pause = min(pause * 1.5, 0.25)

    async def timeline(self, run_id: str, *, tenant: str | None = None) -> list[Step]:
        """Every step of the run's life, oldest first."""
        return await self.store.read(queries.timeline, (await self.get(run_id, tenant=tenant)).id)

    async def manifest(self, run_id: str, *, attempt: int | None = None, tenant: str | None = None) -> Manifest:
        """What an attempt was made of (the last one, or the one of this number, from 1): parameters, seed and data, the
        environment of its worker and its code, and the digest of its result.

        Raises ``RunNotFound`` if the run has no such attempt.
        """
        run = await self.get(run_id, tenant=tenant)
        rows = await self.store.read(manifests.attempts_of, run.id)
        if attempt is not None:
            checked_int("attempt", attempt, 1)
        number = len(rows) if attempt is None else attempt
        if attempt is not None and number > len(rows):
            raise RunNotFound(f"run {run.id} has no attempt {number}: it has {len(rows)}")
        if not rows:
            return manifest_of(run)
        recorded = await self.store.read(manifests.of_attempt, rows[number - 1], run.model)
        return manifest_of(run, number, rows, recorded)

    async def diff(self, a: str, b: str, *, tenant: str | None = None) -> RunDiff:
        """How the last attempts of two runs differ, what most likely explains different results first, and whether
        their results are the same.
        """
        one, other = await self.manifest(a, tenant=tenant), await self.manifest(b, tenant=tenant)
        return await self.store.run_blocking(compare, one, other, await self.compare_results(a, b, tenant=tenant))

    async def compare_results(self, a: str, b: str, *, tenant: str | None = None) -> ResultComparison:
        """Whether two runs have the same result, by its digest; for numbers in it, the largest relative difference."""
        runs = [await self.get(a, tenant=tenant), await self.get(b, tenant=tenant)]
        without = [name for name, run in zip("AB", runs, strict=True) if run.status != "SUCCEEDED"]
        if without:
            has = "have no results" if len(without) == 2 else "has no result"
            return ResultComparison(verdict="unknown", message=f"{' and '.join(without)} {has}")
        if runs[0].result_digest == runs[1].result_digest:
            return await self._compare_exactly(*runs)
        if max(run.result_size or 0 for run in runs) > MAX_COMPARED:
            return ResultComparison(verdict="differs", message="the results differ, and are too large to compare")
        texts = [await self.result_json(run.id) for run in runs]
        return await self.store.run_blocking(compare_results, *texts)

    async def _compare_exactly(self, a: Run, b: Run) -> ResultComparison:
        """Compare two results that are the same as JSON, which has null for NaN and infinity."""
        found = [await self.store.read(queries.result, run.id, None) for run in (a, b)]
        if any(each is not None and each[2] is not None for each in found):
            one, other = [await self.result_json(run.id, exact=True) for run in (a, b)]
            if one != other:
                message = "the results differ where JSON has null: in NaN, infinity or None"
                return ResultComparison(verdict="differs", message=message)
        return ResultComparison(verdict="same", message="same result")

    async def drift(self, run_id: str, *, tenant: str | None = None) -> Drift:
        """What changed since the run's last attempt (code, data, packages, Python), of what a rerun would run with.

        Compared with the newest manifest of a worker that has the model now or, if there is none, with this process.
        """
        run = await self.get(run_id, tenant=tenant)
        before = await self.manifest(run.id)
        live = [
            each.id
            for each in await self.workers()
            if each.alive and not each.draining and run.model in each.models and run.queue in each.queues
        ]
        now = await self.store.read(manifests.newest, run.model, live) if live else None
        name = "this process" if now is None else f"worker {now.worker}"
        if now is None:
            parts = await self.store.run_blocking(collector.parts, list(self.registry))
            now = manifests.recorded_here(parts, run.model)
        unknown = "no live worker has the model, and neither has this process"
        there = with_recorded(msgspec.structs.replace(manifest_of(run), missing=unknown), now)
        sections = await self.store.run_blocking(find_drift, before, there)
        if gone := await self._missing_data(run):
            sections.insert(0, Section(name="data", unknown=gone))
        return Drift(compared_with=name, sections=sections)

    async def _missing_data(self, run: Run) -> str | None:
        """Why the run's data cannot be read; None if it can, or if there is none."""
        if run.data_ref is None:
            return None
        try:
            await self.store.run_blocking(self._results().size, run.data_ref)
        except ResultStoreError as error:
            return str(error)
        return None

    async def rerun(
        self,
        run_id: str,
        *,
        parameters: Mapping[str, Any] | None = None,
        seed: int | None = None,
        strict: bool = False,
        idempotency_key: str | None = None,
        tenant: str | None = None,
        by: Actor | None = None,
    ) -> Rerun:
        """Submit a run that has ended again, also one that succeeded, as a new run with ``rerun_of``.

        It has the same model, parameters, seed, data, user and queue; ``parameters`` replaces some of them, and
        ``seed`` the seed. Its key and its place in the quota are its own. ``rerun.drift`` is what had changed before it
        was stored (see :meth:`drift`); if there is anything, ``strict`` raises ``Drifted`` and stores nothing, unless
        the key has its run already.
        ``by`` is who the audit log says did it: by default the user of this process.
        """
        run = await self.get(run_id, tenant=tenant)
        if refusal := run.rerun_refusal:
            raise IllegalTransition(refusal)
        drift = await self.drift(run.id)
        changed = bool(parameters) and seed is None  # then only the parameters are to differ
        options = SubmitOptions(
            idempotency_key=idempotency_key,
            user=run.user,
            tenant=run.tenant,
            queue=run.queue,
            priority=run.priority,
            cost=run.asked_cost,
            dedupe=False,
            seed=run.actual_seed if changed else run.seed if seed is None else seed,
        )
        asked = {**run.parameters, **(parameters or {})}
        if strict and drift.any:
            before = await self._known_rerun(run, asked, options)
            if before is None:
                raise refused(run.id, drift)
            return Rerun(before, drift)
        who = _who(by)
        return Rerun(await self.submit_run(run.model, asked, options, rerun_of=run.id, by=who), drift)

    async def _known_rerun(self, run: Run, parameters: Mapping[str, Any], options: SubmitOptions) -> Run | None:
        """The run that the key has already: what was refused since was stored before."""
        build = partial(self._builder.submission, run.model, parameters, options, rerun_of=run.id)
        submission = await self.store.run_blocking(build)
        known = await self.store.read(recognised, [submission], self.store.statement_context)
        answer = known.get(submission.id)
        if answer is None:
            return None
        found = answer.run if isinstance(answer, Existing) else None
        known_run = run_of_answer(submission, answer, {} if found is None else {found.id: found})
        if isinstance(known_run, SemelError):
            raise known_run
        return known_run

    async def logs(
        self, run_id: str, *, after: tuple[int, int] = (0, 0), limit: int = 1000, tenant: str | None = None
    ) -> list[LogLine]:
        """What the run logged, oldest first; ``after`` is the (fence, line) of the last line seen."""
        checked_int("limit", limit, 1, 10_000)
        return await self.store.read(queries.logs, (await self.get(run_id, tenant=tenant)).id, after, limit)

    async def waiting(self, run_id: str, *, tenant: str | None = None) -> Waiting | None:
        """Why the run is pending, since when, and its place in the queue; None if it is not pending."""
        waiting = await self.store.read(
            queries.waiting, (await self.get(run_id, tenant=tenant)).id, self.store.statement_context
        )
        if waiting is not None and waiting.place is not None and not waiting.workers and self._transport().announces:
            unseen = "it waits for an RQ or Celery worker; semel sees such a worker only while it executes a run"
            return msgspec.structs.replace(waiting, reason=unseen)
        return waiting

    async def summary(self, *, tenant: str = "", grouped: bool = False, user: str | int | None = None) -> list[Summary]:
        """Counts of runs by model and status; ``grouped`` also by the parameter that each model is summarised by."""
        whose = _name_or_none("user", user)
        return await self.store.read(queries.summary, checked_name("tenant", tenant), grouped=grouped, user=whose)

    async def backlog(self) -> Backlog:
        """How many runs wait and how many run, for monitoring."""
        return await self.store.read(queries.backlog, self.store.statement_context)

    async def workers(self) -> list[WorkerInfo]:
        """The workers on this app's database."""
        return await self.store.read(queries.list_workers, self.store.statement_context)

    async def pause(
        self, *, queue: str | None = None, model: str | None = None, why: str = "", by: Actor | None = None
    ) -> Pause:
        """Let no run of a queue or of a model start, until :meth:`resume`; what runs goes on.

        ``why`` and the user of ``by`` are shown with each run that waits. To pause again changes nothing. It holds for
        all tenants. ``by`` is who the audit log says did it: by default the user of this process.
        """
        kind, name = _what_is_paused(queue, model)
        checked_name("why", why, most=1000)
        found = await self.store.write(pauses.pause, kind, name, why, self.store.acting(_who(by)))
        _log.info("the %s %r is paused by %r: %s", kind, name, found.by, found.why or "no reason given")
        return found

    async def resume(self, *, queue: str | None = None, model: str | None = None, by: Actor | None = None) -> bool:
        """Let runs of a queue or of a model start again. False if it was not paused. ``by`` as in :meth:`pause`."""
        kind, name = _what_is_paused(queue, model)
        who = _who(by)
        resumed = await self.store.write(pauses.resume, kind, name, self.store.acting(who))
        if resumed:
            _log.info("the %s %r is resumed by %r", kind, name, who.user)
            transport = self._transport()
            if transport.announces:  # messages that came meanwhile were in vain
                due = await self.store.read(lease.due, 0.0, 1000, self.store.statement_context)
                await self.store.run_blocking(transport.announce, [(run.id, run.queue) for run in due])
        return resumed

    async def pauses(self) -> list[Pause]:
        """The queues and models that are paused."""
        return await self.store.read(pauses.list_pauses)

    async def set_quota(
        self, user: str | int, quota: Quota | None, *, tenant: str = "", by: Actor | None = None
    ) -> None:
        """Set a user's quota; the user ``"*"`` stands for everybody without their own. None removes the quota.

        No quota applies to runs that are submitted without a user. ``by`` is who the audit log says did it: by default
        the user of this process.
        """
        if not isinstance(quota, Quota | None):
            raise InvalidRequest(f"a quota is semel.Quota(...) or None, not a {type(quota).__name__}")
        await self.store.write(
            quotas.set_quota,
            (checked_name("tenant", tenant), checked_name("user", user, empty=False)),
            quota,
            self.store.acting(_who(by)),
        )

    async def quotas(self, *, tenant: str = "") -> dict[str, Quota]:
        """Every quota of a tenant, by user."""
        return await self.store.read(quotas.list_quotas, checked_name("tenant", tenant))

    async def usage(self, user: str | int, *, tenant: str = "") -> Usage:
        """A user's usage: active runs, reservations, recent runs and costs."""
        return (
            await self.store.read(
                quotas.usage_and_quota,
                (checked_name("tenant", tenant), checked_name("user", user)),
                self.store.statement_context,
            )
        )[0]

    async def begin_sealing(self, *, by: Actor | None = None) -> bool:
        """Seal the history of runs from now on, for every process that uses this database. False if it was before.

        It cannot be ended. ``by`` is who the audit log says began it: by default the user of this process.
        """
        return await self.store.write(seals.begin, self.store.acting(_who(by)))

    async def audit_log(
        self,
        *,
        tenant: str | None = None,
        user: str | None = None,
        action: str | None = None,
        target: str | None = None,
        entrance: Entrance | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> AuditPage:
        """What people did, newest first: who, from where, what was before and after. ``page.next`` is the cursor of
        the next page, None on the last.

        ``action`` is one of them, such as ``"token.created"``, or a kind, such as ``"token"``; ``target`` is the id or
        name of what was changed. Without a ``tenant``, actions on all tenants.
        """
        checked_int("limit", limit, 1, 1000)
        if entrance is not None:
            checked_choice("entrance", entrance, get_args(Entrance))
        wanted = AuditFilter(
            tenant=_name_or_none("tenant", tenant),
            user=_name_or_none("user", user),
            action=_name_or_none("action", action),
            target=_name_or_none("target", target),
            entrance=entrance,
            since_us=_us("since", since),
            until_us=_us("until", until),
        )
        return await self.store.read(audit_log.entries, wanted, limit, _name_or_none("cursor", cursor))

    async def verify_audit_log(self, heads: Sequence[str] = (), *, tenant: str | None = None) -> AuditCheck:
        """Check the chains of the log of what people did, of all tenants or of one. ``heads`` are those of an earlier
        check, which were kept elsewhere: with them, rows that were removed from the end are found.
        """
        return await self.store.read(audit_log.verify, heads, _name_or_none("tenant", tenant))

    async def purge(self, older_than: float, *, by: Actor | None = None) -> int:
        """Remove runs that ended over ``older_than`` seconds ago, with events, logs, files and data; return how many.

        A run that a live key names stays until the key expires. What an earlier purge left behind because it died, or
        could not reach the files (``ResultStoreError``), is removed, too. ``by`` is who the audit log says did it: by
        default the user of this process.
        """
        age = checked_number("older_than", older_than, 0, TEN_YEARS)
        total, failed = await self.remove_old(age, by=_who(by))
        if failed is not None:
            raise ResultStoreError(
                f"{total} runs were removed, but not all files: {failed}; purge again to remove them"
            )
        return total

    async def remove_old(
        self, age: float, seconds: float = math.inf, *, whole: bool = False, by: Actor | None = None
    ) -> tuple[int, ResultStoreError | None]:
        """As :meth:`purge`, for at most so many seconds; returns how many runs, and why files could not be removed.

        With ``whole``, runs in a partition stay until all of them can be removed at once. What no person does (``by``
        is None) is not logged.
        """
        ends = time.monotonic() + seconds
        rule = "retention" if whole else "purge"
        total, failed = await self._drop_partitions(age, rule, by), await self._remove_files()
        spans = [partitions.ALL]
        if whole:
            spans = await self.store.read(partitions.spans, age, self.store.statement_context)
        for span in spans:
            removed, error = await self._remove_in_batches(age, rule, span, ends, by)
            total, failed = total + removed, error or failed
        return total, failed

    async def _remove_in_batches(
        self, age: float, rule: str, span: partitions.Span, ends: float, by: Actor | None
    ) -> tuple[int, ResultStoreError | None]:
        total, failed, more = 0, None, True
        after, until = span
        while more and time.monotonic() < ends:
            context = self.store.acting(by)
            removed = await self.store.write(maintenance.remove_runs, age, after, context, until, rule=rule)
            total, after, more = total + removed.count, removed.next, removed.next is not None
            failed = await self._remove_files() or failed  # also if nothing was removed: the reply may have been lost
        return total, failed

    async def _drop_partitions(self, age: float, rule: str, by: Actor | None) -> int:
        """Drop the partitions all of whose runs may be removed, unless somebody uses one; returns how many runs."""
        total = 0
        for each in await self.store.read(partitions.removable, age, self.store.statement_context):
            try:
                total += await self.store.write(partitions.drop, each, age, self.store.acting(by), rule=rule)
            except partitions.PartitionBusy:
                if each.name not in self._put_off:
                    self._put_off.add(each.name)
                    _log.info("semel_runs%s has only old runs, but is in use: it is dropped later", each.name)
        return total

    async def _remove_files(self) -> ResultStoreError | None:
        """Remove the files of removed runs. What cannot be removed stays for the next purge; return the last error."""
        after, failed = "", None
        while found := await self.store.read(maintenance.pending_removals, after):
            after = found[-1].prefix
            failed = await self.store.run_blocking(self._remove_these, found) or failed
        return failed

    def _remove_these(self, found: Sequence[Removal]) -> ResultStoreError | None:
        results, store = self._results(), self.store.blocking()
        failed = None
        done: list[str] = []
        try:
            for each in found:
                try:
                    if each.data_ref is None:
                        results.remove(each.prefix)
                        done.append(each.prefix)
                    else:
                        run_sync(store.write(maintenance.remove_data, each, results.remove, store.statement_context))
                except ResultStoreError as error:
                    failed = error
            more = bool(done)
            while more:
                more = run_sync(store.write(maintenance.remove_logs, done))
            run_sync(store.write(maintenance.settle, done))
        finally:
            if store is not self.store:
                run_sync(store.close())
        return failed

    async def close(self) -> None:
        """Close the connections."""
        await self.store.run_blocking(self._transport().close)
        await self.store.close()


def _with_slots(asked: Sequence[Submission]) -> list[Submission]:
    """Give each submission without a reservation one that was made in the same flow, if any is left."""
    left = {person: open_reservations(*person) for person in {each.person for each in one_of_each_group(asked)}}
    if not any(left.values()):
        return list(asked)
    given = []
    for each in asked:
        slots = left[each.person]
        slot = slots.pop(0) if slots and each.reservation is None else None
        given.append(each if slot is None else msgspec.structs.replace(each, slot=slot, group=0))
    return given


def _close_slots(asked: Sequence[Submission], answers: Sequence[Answer]) -> None:
    if not any(each.reserved for each in one_of_each_group(asked)):
        return
    for each, answer in zip(asked, answers, strict=True):
        if not isinstance(answer, SemelError):
            for reservation in (each.slot, each.reservation):
                if reservation is not None:
                    close_reservation(reservation)


def _who(by: Actor | None) -> Actor:
    """Who the audit log names; by default the user of this process."""
    if by is None:
        return actor_here("python")
    if not isinstance(by, Actor):
        raise InvalidRequest(f"by is semel.Actor(user=...), not a {type(by).__name__}")
    checked_choice("the entrance of an actor", by.entrance, get_args(Entrance))
    names = {name: checked_name(name, getattr(by, name), most=1000) for name in Actor.__struct_fields__}
    return msgspec.structs.replace(by, **names)


def _retry_options(run: Run, idempotency_key: str | None = None) -> SubmitOptions:
    return SubmitOptions(
        idempotency_key=idempotency_key,
        user=run.user,
        tenant=run.tenant,
        queue=run.queue,
        priority=run.priority,
        cost=run.asked_cost,
        seed=run.seed,
    )


def _of_statuses(action: ActionKind, wanted: Filter) -> Filter:
    """The filter with the statuses that the action can change. Raises InvalidRequest if it names others, or nothing."""
    able = actions.STATUSES[action]
    if not actions.described(wanted):
        everything = " and ".join(able)
        raise InvalidRequest(f"name at least one filter; the status {everything} stands for all runs that can change")
    if wrong := [each for each in wanted.status or () if each not in able]:
        raise InvalidRequest(f"{action} changes runs that are {' or '.join(able)}, not {wrong[0]}")
    return msgspec.structs.replace(wanted, status=list(able) if wanted.status is None else list(wanted.status))


def _action_id(tenant: str, user: str, key: str | None) -> str:
    """A new id; with a key, always the same one for the same user."""
    if key is None:
        return new_id()
    named = "\0".join(("action", tenant, user, checked_run_key("idempotency_key", key)))
    return str(UUID(bytes=sha256(named.encode()).digest()[:16], version=5))


def _checked_parameters(wanted: object) -> dict[str, ParameterValue]:
    if not isinstance(wanted, Mapping):
        raise InvalidRequest('parameter is a mapping of names and values, such as {"region": "north"}')
    for name, value in wanted.items():
        checked_name("the name of a parameter", name, most=1000, empty=False)
        number = isinstance(value, int | float) and abs(value) < 2**63  # larger ones differ between databases
        if not (value is None or isinstance(value, str) or number):
            raise InvalidRequest(f"runs are found by a text, a number, true, false or null, not by {value!r:.80}")
        if isinstance(value, str) and (len(value) > 1000 or "\0" in value or not _is_text(value)):
            raise InvalidRequest(f"the value of {name!r:.80} must be a text of at most 1000 characters, without NUL")
    return dict(wanted)


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _name_or_none(what: str, value: object) -> str | None:
    return None if value is None else checked_name(what, value, most=1000)


def _statuses(status: str | Sequence[str]) -> list[str]:
    wanted = [status] if isinstance(status, str) else list(status)
    if unknown := [each for each in wanted if each not in STATUSES]:
        raise InvalidRequest(f"{unknown[0]!r} is not a status; there are {', '.join(STATUSES)}")
    return wanted


def _us(what: str, moment: datetime | None) -> int | None:
    if moment is None:
        return None
    if moment.tzinfo is None:
        raise InvalidRequest(f"{what} needs a time zone: datetime.now(UTC), not datetime.now()")
    return round(moment.timestamp() * MICRO)


def _what_is_paused(queue: str | None, model: str | None) -> tuple[PauseKind, str]:
    if (queue is None) == (model is None):
        raise InvalidRequest("either a queue or a model is paused: pause(queue='gpu') or pause(model='forecast')")
    kind: PauseKind = "model" if queue is None else "queue"
    name = checked_name(kind, model if queue is None else queue, empty=False)
    if name == INTERNAL_QUEUE or name.startswith(INTERNAL_PREFIX):
        raise InvalidRequest(f"the {kind} {name!r} is the service's own, and cannot be paused")
    return kind, name
