"""Wrappers that record what passes through them: a store, ``Once``, an app, and a store of jobs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from typing import TYPE_CHECKING, Any, TypeVar

from semel.errors import IllegalTransition, OutcomeGone, QuotaExceeded, RunNotFound, SemelError, StoreUnavailable
from semel.once.client import Once
from semel.once.engine import DEFAULT_SCOPE
from semel.once.guard import current_claim
from semel.once.store import (
    ClaimRequest,
    Complete,
    Forget,
    ForgetScope,
    KeyRef,
    OnReleased,
    OutcomeData,
    Release,
    Renew,
    Store,
)
from semel.testing.history.recorder import PendingOperation, Recorder
from semel.types import Granted, Held, InFlight, Mismatch, Outcome, Record, Replay, Result, Unknown, Verdict

if TYPE_CHECKING:
    from semel.runs.app import App
    from semel.runs.execution.context import Context
    from semel.runs.job_store import JobStore
    from semel.runs.types import Run

A = TypeVar("A")
B = TypeVar("B")
R = TypeVar("R")


class RecordedStore:
    """A store whose verbs are recorded, one operation for each key: ``Once(RecordedStore(store, recorder))``."""

    def __init__(self, inner: Store, recorder: Recorder) -> None:
        self.inner = inner
        self.coalesce = inner.coalesce
        self.expires_itself = inner.expires_itself
        self._recorder = recorder

    async def _each(
        self,
        verb: Callable[[Sequence[A]], Awaitable[list[B]]],
        requests: Sequence[A],
        asked: Callable[[A], dict[str, Any]],
        told: Callable[[B], dict[str, Any]],
    ) -> list[B]:
        name = verb.__name__
        pending = [self._recorder.begin("key", name, _subject(each), **asked(each)) for each in requests]
        try:
            answers = await verb(requests)
        except BaseException as error:
            for each in pending:
                each.failed(error)
            raise
        for each, answer in zip(pending, answers, strict=True):
            each.answer(**told(answer))
        return answers

    async def open(self) -> None:
        await self.inner.open()

    async def claim(self, requests: Sequence[ClaimRequest]) -> list[Verdict]:
        return await self._each(self.inner.claim, requests, _claim_asked, _verdict_told)

    async def renew(self, requests: Sequence[Renew]) -> list[int | None]:
        return await self._each(
            self.inner.renew,
            requests,
            lambda each: {"fence": each.fence, "lease_us": each.lease_us},
            lambda until: {"accepted": until is not None},
        )

    async def complete(self, requests: Sequence[Complete]) -> list[bool]:
        return await self._each(
            self.inner.complete, requests, lambda each: {"fence": each.fence, **_outcome_asked(each.done)}, _accepted
        )

    async def release(self, requests: Sequence[Release]) -> list[bool]:
        return await self._each(self.inner.release, requests, lambda each: {"fence": each.fence}, _accepted)

    async def forget(self, requests: Sequence[Forget]) -> list[bool]:
        return await self._each(
            self.inner.forget, requests, lambda each: {"fence": each.fence, "force": each.force}, _accepted
        )

    async def forget_scope(self, request: ForgetScope) -> int:
        with self._recorder.begin("key", "forgotten", (request.scope,), force=request.force) as pending:
            count = await self.inner.forget_scope(request)
            pending.answer(count=count)
        return count

    async def get(self, refs: Sequence[KeyRef]) -> list[Record | None]:
        return await self._each(self.inner.get, refs, lambda _: {}, _record_told)

    async def purge(self, limit: int) -> int:
        return await self.inner.purge(limit)

    async def stats(self) -> Held:
        return await self.inner.stats()

    def watch(self, ring: OnReleased) -> None:
        self.inner.watch(ring)

    async def close(self) -> None:
        await self.inner.close()


def _subject(request: Any) -> tuple[str, str]:
    return request.scope, request.key


def _claim_asked(request: ClaimRequest) -> dict[str, Any]:
    return {
        "attempt": request.attempt,
        "lease_us": request.lease_us,
        "ttl_us": request.ttl_us,
        "force": request.force,
        "unknown": request.unknown,
        "resolving": request.resolving,
        "outcome": None if request.done is None else _value(request.done),
        "value_ttl_us": None if request.done is None else request.done.value_ttl_us,
    }


def _outcome_asked(done: OutcomeData) -> dict[str, Any]:
    return {"value": _value(done), "value_ttl_us": done.value_ttl_us}


def _verdict_told(verdict: Verdict) -> dict[str, Any]:
    match verdict:
        case Granted(claim):
            return {"verdict": "granted", "fence": claim.fence}
        case Replay(outcome):
            return {"verdict": "replay", "fence": outcome.fence, "value": _value(outcome)}
        case InFlight():
            return {"verdict": "in_flight", "fence": verdict.fence}
        case Mismatch():
            return {"verdict": "mismatch"}
        case Unknown():
            return {"verdict": "unknown", "fence": verdict.fence}


def _record_told(record: Record | None) -> dict[str, Any]:
    if record is None:
        return {"status": "absent"}
    outcome = record.outcome
    if outcome is None:
        return {"status": "claimed", "fence": record.fence}
    return {"status": "completed", "fence": record.fence, "value": _value(outcome)}


def _accepted(answer: bool) -> dict[str, Any]:
    return {"accepted": bool(answer)}


def _value(outcome: OutcomeData | Outcome) -> str:
    """The outcome in short; empty if its value was kept for a shorter time than the key."""
    return "" if outcome.data is None else f"{outcome.kind}:{_digest(outcome.data)}"


def _digest(data: bytes) -> str:
    return sha256(data).hexdigest()[:16]


class RecordedOnce:
    """Calls and marks of a ``Once``, recorded as one operation each; ``effects`` records each execution of the work."""

    def __init__(self, once: Once, recorder: Recorder, effects: Recorder | None = None) -> None:
        self.once = once
        self._recorder = recorder
        self._effects = effects

    def call(
        self, key: str, work: Callable[[], R], *, scope: str = DEFAULT_SCOPE, ttl: float, **options: Any
    ) -> Result[R]:
        """As ``Once.call``."""

        def seen() -> R:
            if self._effects is not None:
                self._effects.effect("key", (scope, key), current_claim().fence)
            return work()

        value_ttl = options.get("value_ttl") or (options.get("policy") or self.once._engine.policy).value_ttl
        asked = {"ttl_us": round(ttl * 1e6), "value_ttl_us": None if value_ttl is None else round(value_ttl * 1e6)}
        with self._recorder.begin("key", "call", (scope, key), **asked) as pending:
            try:
                result = self.once.call(key, seen, scope=scope, ttl=ttl, **options)
            except OutcomeGone:
                pending.answer(replayed=True, gone=True)
                raise
            pending.answer(fence=result.fence, value=repr(result.value), replayed=result.replayed)
        return result

    def check_and_mark(self, key_type: str, message_id: str, *, ttl: float) -> str:
        """As ``Once.check_and_mark``."""
        with self._recorder.begin("key", "mark", (key_type, message_id), ttl_us=round(ttl * 1e6)) as pending:
            answer = self.once.check_and_mark(key_type, message_id, ttl=ttl)
            pending.answer(replayed=answer == "seen")
        return answer


class RecordedApp:
    """The operations of an app, recorded.

    ``limits`` are the most concurrent runs of users, where a quota says so; ``key_ttl`` is that of the app.
    """

    def __init__(
        self, app: App, recorder: Recorder, limits: dict[str, int] | None = None, *, key_ttl: float = 86400.0
    ) -> None:
        self.app = app
        self._recorder = recorder
        self._limits = limits or {}
        self._key_ttl = key_ttl

    def submit(self, model: str, parameters: dict[str, Any] | None = None, **options: Any) -> Run:
        """As ``App.submit``."""
        user = str(options.get("user", ""))
        asked = {"reservation": options.get("reservation")}
        return self._submitted(lambda: self.app.submit(model, parameters, **options), user, options, asked)

    def retry(self, run_id: str, **options: Any) -> Run:
        """As ``App.retry``: the new run is a submission, too, by the user of the old one."""
        user = self.app.get(run_id, tenant=options.get("tenant")).user
        return self._submitted(lambda: self.app.retry(run_id, **options), user, options, {"retry_of": run_id})

    def _submitted(self, submit: Callable[[], Run], user: str, options: dict[str, Any], asked: dict[str, Any]) -> Run:
        asked |= {
            "key": options.get("idempotency_key"),
            "limit": self._limits.get(user),
            "ttl_us": round((options.get("key_ttl") or self._key_ttl) * 1e6),
        }
        with self._recorder.begin("run", "submit", (user,), **asked) as pending:
            try:
                run = submit()
            except StoreUnavailable:
                raise
            except SemelError as error:
                pending.answer(run=None, refused=isinstance(error, QuotaExceeded), error=str(error))
                raise
            pending.answer(run=run.id, created=not run.replayed)
        return run

    def cancel(self, run_id: str) -> Run:
        """As ``App.cancel``."""
        with self._recorder.begin("run", "cancel", (run_id,)) as pending:
            try:
                run = self.app.cancel(run_id)
            except IllegalTransition:
                pending.answer(refused=True)
                raise
            _tell(pending, run)
        return run

    def get(self, run_id: str) -> Run:
        """As ``App.get``."""
        with self._recorder.begin("run", "get", (run_id,)) as pending:
            try:
                run = self.app.get(run_id)
            except RunNotFound:
                pending.answer(status="absent")
                raise
            _tell(pending, run)
        return run

    def usage(self, user: str) -> int:
        """How many slots the user has in use."""
        return _usage(self.app, self._recorder, user)


@contextmanager
def attempt(recorder: Recorder, ctx: Context) -> Iterator[None]:
    """Record the execution of a model: its function puts everything it does into this block."""
    with recorder.begin("run", "attempt", (ctx.run_id,), fence=ctx.fence) as pending:
        yield
        pending.answer()


def _tell(pending: PendingOperation, run: Run) -> None:
    pending.answer(status=run.status, fence=run.fence, value=(run.result_digest or "")[:16])


def _usage(app: App, recorder: Recorder, user: str) -> int:
    with recorder.begin("quota", "usage", (user,)) as pending:
        concurrent = app.usage(user).concurrent
        pending.answer(concurrent=concurrent)
    return concurrent


class RecordedJobStore:
    """Reservations, recorded."""

    def __init__(self, jobs: JobStore, recorder: Recorder) -> None:
        self.jobs = jobs
        self._recorder = recorder

    def reserve_job_slot(self, user_id: str, max_concurrent: int, ttl_seconds: float = 300) -> str | None:
        """As ``JobStore.reserve_job_slot``."""
        asked = {"limit": max_concurrent, "ttl_us": round(ttl_seconds * 1e6)}
        with self._recorder.begin("quota", "reserve", (user_id,), **asked) as pending:
            reservation = self.jobs.reserve_job_slot(user_id, max_concurrent, ttl_seconds)
            pending.answer(reservation=reservation)
        return reservation

    def consume_reservation(self, reservation_id: str, *, user_id: str, job_id: str | None = None) -> bool:
        """As ``JobStore.consume_reservation``."""
        with self._recorder.begin("quota", "consume", (user_id,), reservation=reservation_id, job=job_id) as pending:
            accepted = self.jobs.consume_reservation(reservation_id, job_id=job_id, user_id=user_id)
            pending.answer(accepted=accepted)
        return accepted

    def release_reservation(self, reservation_id: str, *, user_id: str) -> bool:
        """As ``JobStore.release_reservation``."""
        with self._recorder.begin("quota", "release", (user_id,), reservation=reservation_id) as pending:
            accepted = self.jobs.release_reservation(reservation_id, user_id=user_id)
            pending.answer(accepted=accepted)
        return accepted
