"""The engine: the verbs of keys over any store, written once for blocking and async callers.

``claim`` → ``complete`` / ``release`` / ``renew`` are the verbs as they are. ``begin`` → ``finish`` / ``fail`` put
them together around a piece of work; :mod:`semel.once.guard` only calls the user's function in between.
"""

from __future__ import annotations

import logging
import time
from asyncio import CancelledError
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar, cast

from semel._concurrency.batching import AsyncioBatcher, Batcher, Unbatched
from semel._concurrency.periodic import RENEW_AFTER
from semel._concurrency.retry import Send, with_retry
from semel._concurrency.runtime import Local, Runtime
from semel._validation import checked_fingerprint, checked_key, checked_seconds
from semel.codec import PLAIN, Codec, encode
from semel.errors import (
    ClaimLost,
    InProgress,
    InvalidRequest,
    KeyReused,
    OutcomeUnknown,
    StoreBroken,
    StoreUnavailable,
    Unencodable,
)
from semel.once.maintenance import BATCH, Collector, Renewer, Sampler
from semel.once.pending_writes import PendingWrites
from semel.once.requests import CallRequest, Door, as_claim, codec_for, new_attempt
from semel.once.stats import Hook, Stats, StatsCounter
from semel.once.store import (
    ClaimRequest,
    Complete,
    Forget,
    ForgetScope,
    KeyRef,
    OutcomeData,
    Owned,
    Release,
    Renew,
    Store,
    Together,
)
from semel.once.stores.memory import MemoryStore
from semel.once.waiters import Waiters
from semel.policy import CrashRule, Policy
from semel.types import Claim, Granted, InFlight, Kind, Mismatch, Record, Replay, Unknown, Verdict, packed

A = TypeVar("A")
B = TypeVar("B")

DEFAULT_SCOPE = "default"
_FIRST_POLL, _LAST_POLL = 0.02, 0.5
LONG = 30.0
"""Seconds for a verb that goes through all keys: stats and purge."""
_log = logging.getLogger("semel")


class _Background(NamedTuple):
    """What serves the claims of one event loop, or of all threads, in the background."""

    renewer: Renewer
    pending: PendingWrites


class KeyEngine:
    """Everything that can be done with a key, over one store, for threads or for event loops."""

    def __init__(
        self,
        store: Store,
        runtime: Runtime,
        policy: Policy,
        *,
        collect: bool = True,
        retry_for: float = 5.0,
        on_event: Hook | None = None,
        low_replay_rate: float | None = None,
        bound_to: KeyEngine | None = None,
    ) -> None:
        """``bound_to``: this engine works inside a user's transaction for that other engine, whose counters it shares.

        It sends each call by itself, never twice, and runs nothing in the background: the user's session belongs to
        the user's thread, and nobody else sees its writes before the commit.
        """
        self.store = store
        self.memory = store if isinstance(store, MemoryStore) else None
        self.policy = policy
        self._ttl_us = round(policy.ttl * 1e6)
        self._value_ttl_us = _us(policy.value_ttl)
        self.counters: StatsCounter = (
            StatsCounter(low_replay_rate=low_replay_rate) if bound_to is None else bound_to.counters
        )
        self._runtime = runtime
        self._is_new: Callable[[], bool] | None = None
        if hasattr(store, "ready"):  # SQLite: the first call creates the tables, and waits for that
            self._is_new = lambda: not cast("Any", store).ready
        self._retry_for = checked_seconds("retry_for", retry_for, zero=True)
        self._bound = bound_to is not None
        self._waiters = Waiters()
        together: Batcher[Any, Any] | None = None
        if issubclass(type(store), Together) and not self._bound:  # of the class: a wrapper may forward attributes
            together = self._batched(cast("Together", store).together)
        self._send_claim: Batcher[ClaimRequest, Verdict] = together or self._batched(store.claim)
        self._send_complete: Batcher[Complete, bool] = together or self._batched(store.complete)
        self._send_release: Batcher[Release, bool] = together or self._batched(store.release)
        self._send_renew: Batcher[Renew, int | None] = together or self._batched(store.renew)
        self._send_get = self._batched(store.get)
        self._may_collect = collect and not self._bound
        self._collects = self._may_collect and not store.expires_itself
        self._collector = Collector(
            runtime,
            policy.collect_interval,
            self._with_retry(store.purge, LONG),
            self.counters,
            logging.DEBUG if policy.cleanup_log == "debug" else logging.INFO,
        )
        self._background: Local[_Background] = runtime.local(self._new_background, self._inherit)
        if isinstance(self._send_claim, AsyncioBatcher):
            self._send_claim.on_abandoned = self._give_back
        self._sampler: Sampler | None = None
        if on_event is not None:
            self.add_hook(on_event)

    def add_hook(self, hook: Hook) -> None:
        """Call the hook for every event from now on."""
        every = self.counters.add_hook(hook)
        if every is not None:
            if self._sampler is None:
                self._sampler = Sampler(
                    self._runtime, lambda: self._runtime.within(LONG, self.store.stats()), self.counters
                )
            self._sampler.look_every(checked_seconds("sample_every", every))

    def _new_background(self) -> _Background:
        renewer = Renewer(self._runtime, self.store.renew, self.policy.lease * RENEW_AFTER)
        return _Background(renewer, PendingWrites(self._runtime, self.store, renewer, self._waiters.notify))

    async def _give_back(self, request: ClaimRequest | Owned, verdict: Verdict) -> None:
        """Release what a cancelled caller was granted, except a claim that resolves: its key must stay unknown."""
        if not (isinstance(request, ClaimRequest) and request.resolving):
            await self._background.here().pending.give_back(verdict)

    def _inherit(self, closed: _Background) -> None:
        """An event loop was closed before everything was written to the store: the current one writes it."""
        self._background.here().pending.adopt(closed.pending)

    async def claim(
        self,
        key: str,
        *,
        scope: str = DEFAULT_SCOPE,
        fingerprint: str = "",
        lease: float | None = None,
        ttl: float | None = None,
        on_crash: CrashRule | None = None,
        wait: float = 0,
    ) -> Verdict:
        """Claim the key. The verdict is ``Granted`` if it is yours; otherwise it has the outcome or the reason.

        With ``wait``, a claim of a key in flight returns when its owner is done, or after that many seconds.
        """
        policy = self.policy if on_crash is None else self.policy.but(on_crash=on_crash)
        request = self._request(key, scope, fingerprint, policy, lease, ttl)
        if wait == 0:
            return self._record_verdict(request, await self._claim(request))
        return self._record_verdict(
            request, await self._wait_for_verdict(request, checked_seconds("wait", wait, zero=True))
        )

    async def complete(self, claim: Claim, value: Any = None, *, value_ttl: float | None = None) -> None:
        """Record the outcome that every later caller gets.

        Raises :class:`ClaimLost` when the key was taken over, and :class:`Unencodable` for a value that cannot replay
        exactly: the work is done, so the key is, too, and later callers get :class:`OutcomeGone`.
        """
        claim = as_claim(claim)
        kept = self.policy.value_ttl if value_ttl is None else checked_seconds("value_ttl", value_ttl)
        done, unstored = _done("value", value, kept, codec_for(claim))
        await self._record(claim, done)
        if unstored is not None:
            raise unstored

    async def release(self, claim: Claim) -> None:
        """Release the key without an outcome; the next caller starts anew."""
        claim = as_claim(claim)
        if not await self._send_release(Release(claim.scope, claim.key, claim.fence)):
            raise _lost(claim, "release")
        self._waiters.notify(claim.scope, claim.key)

    async def renew(self, claim: Claim, lease: float | None = None) -> Claim:
        """Move the end of the lease to ``lease`` seconds from now, and return the changed claim."""
        claim = as_claim(claim)
        length = checked_seconds("lease", claim.lease if lease is None else lease)
        until = await self._send_renew(Renew(claim.scope, claim.key, claim.fence, round(length * 1e6)))
        if until is None:
            raise _lost(claim, "renew")
        return Claim(
            claim.scope, claim.key, claim.fence, claim.attempt, claim.fingerprint, length, until, claim.expires_us
        )

    async def get(self, key: str, *, scope: str = DEFAULT_SCOPE) -> Record | None:
        """Return the key's record without changing it; None if the key is free."""
        return await self._send_get(KeyRef(checked_key("scope", scope), checked_key("key", key)))

    async def resolve(
        self, key: str, *, scope: str = DEFAULT_SCOPE, done: bool, value: Any = None, force: bool = False
    ) -> None:
        """Record whether the work of a vanished owner was done, with this value, or not done, so that it may run again.

        If the owner comes back, its fence is no longer valid. While its lease lasts, the owner counts as working:
        this raises :class:`InProgress`, unless ``force`` is set.
        """
        record = await self.get(key, scope=scope)
        if record is None or record.status == "completed":
            state = "free" if record is None else record.status
            raise InvalidRequest(f"there is nothing to resolve: the key {key!r} in {scope!r} is {state}")
        if record.status == "in_flight" and not force:
            raise _at_work(record)
        data = encode(value)
        request = self._request(key, scope, "", self.policy.but(on_crash="unknown"))
        request.resolving = True
        request.force = force
        verdict = await self._claim(request)
        if not isinstance(verdict, Granted):
            raise InProgress(f"the key {key!r} in {scope!r} was resolved or taken by someone else just now", 1.0)
        if done:
            await self._record(verdict.claim, OutcomeData("resolved", data))
        else:
            await self.release(verdict.claim)

    async def forget(self, key: str, *, scope: str = DEFAULT_SCOPE, force: bool = False) -> bool:
        """Forget the key and its outcome: the next caller's work is done anew. False when the key was free.

        Raises :class:`InProgress` for a key that somebody works on. ``force`` takes it from its owner, who can then no
        longer record an outcome, so the work may happen twice.
        """
        record = await self.get(key, scope=scope)
        if record is None:
            return False
        forget = self._with_retry(self.store.forget)
        if await forget([Forget(record.scope, record.key, record.fence, force)]) == [False]:
            # If another fence has the key now, it was claimed after this call.
            now = await self.get(key, scope=scope)
            if now is not None and now.fence == record.fence:
                raise _at_work(now)
        self._waiters.notify(record.scope, record.key)
        return True

    async def forget_scope(self, scope: str, *, force: bool = False) -> int:
        """Forget every key of the scope, in bounded steps, and return how many. Keys that are worked on stay.

        ``force`` forgets those, too. Keys that are claimed in the scope meanwhile may be forgotten as well.
        """
        step = self._with_retry(self.store.forget_scope, LONG)
        request = ForgetScope(checked_key("scope", scope), BATCH, force)
        total = 0
        while True:
            forgotten = await step(request)
            total += forgotten
            if forgotten < BATCH:
                return total

    async def check_and_mark(
        self, key_type: str, message_id: str, data: Any = None, *, ttl: float | None = None
    ) -> Literal["seen", "not_seen"]:
        """Return whether this message was seen, and mark it as seen, in one atomic step. ``data`` is kept for audit.

        The mark stays even if the caller fails afterwards; :meth:`consumer` marks only what was handled.
        """
        policy = self.policy
        if self.memory is not None:
            return self.mark(self.memory, key_type, message_id, data, ttl)
        request = self._request(message_id, key_type, "", policy, None, ttl)
        request.done = OutcomeData("seen", encode(data), _us(policy.value_ttl))
        try:
            verdict = self._record_verdict(request, await self._claim(request), "message")
        except StoreUnavailable:
            if policy.store_failure == "closed":
                raise
            return "not_seen"
        if isinstance(verdict, Unknown):
            raise _unknown(request.scope, request.key)
        return "not_seen" if isinstance(verdict, Granted) else "seen"

    def mark(
        self, memory: MemoryStore, key_type: str, message_id: str, data: Any, ttl: float | None
    ) -> Literal["seen", "not_seen"]:
        """``check_and_mark`` in memory, without the machinery for stores that are a round trip away."""
        if self._collects and not self._collector.running:
            self._collector.start()
        if self._sampler is not None and not self._sampler.running:
            self._sampler.start()
        ttl_us = self._ttl_us if ttl is None else round(checked_seconds("ttl", ttl) * 1e6)
        answer = memory.mark(
            checked_key("scope", key_type),
            checked_key("key", message_id),
            encode(data),
            ttl_us,
            self._value_ttl_us,
        )
        if answer == "seen":
            self.counters.note("hit", key_type, message_id, "", "message")
            return "seen"
        if isinstance(answer, str):
            self.counters.note("miss", key_type, message_id, answer, "message")
            return "not_seen"
        self.counters.note(_EVENTS[type(answer)], key_type, message_id, "", "message")
        if isinstance(answer, Unknown):
            raise _unknown(key_type, message_id)
        return "seen"

    async def purge(self) -> int:
        """Remove every expired key now, in bounded steps, and return how many."""
        return await self._collector.collect()

    async def stats(self) -> Stats:
        """What the store holds (counted now) and the events counted by this process since the start."""
        return self.counters.snapshot(await self._with_retry(lambda _: self.store.stats(), LONG)(()))

    async def open(self) -> None:
        """Check that the store is available and ready: call it before the first consumer starts."""
        await self._with_retry(lambda _: self.store.open())(())

    async def close(self) -> None:
        """Stop the background tasks and close the store's connections."""
        for task in (self._collector, *self._background.here(), self._sampler):
            if task is not None:
                await task.end()
        for background in self._background.everywhere():
            background.renewer.stop()
        await self.store.close()

    async def begin(self, call: CallRequest) -> Granted | Replay | None:
        """The claim to work under, or the outcome to replay; None to work unprotected, if the policy allows it.

        Every other verdict is raised as an error.
        """
        verdict = await self.claim_for(call)
        match verdict:
            case InFlight(retry_after):
                message = f"the key {call.key!r} in {call.scope!r} is being worked on; retry in {retry_after:.1f} s"
                raise InProgress(message, retry_after)
            case Mismatch():
                raise KeyReused(
                    f"the key {call.key!r} in {call.scope!r} was used with other content; use a new key for new work"
                )
            case Unknown():
                raise _unknown(call.scope, call.key)
        return verdict

    async def claim_for(self, call: CallRequest) -> Verdict | None:
        """The verdict on a piece of work. If it is granted, its lease is renewed from now on.

        None to work unprotected, if the policy allows it.
        """
        policy = call.policy
        request = self._request(call.key, call.scope, call.fingerprint, policy)
        request.resolving = call.reconciling
        try:
            verdict = await self._wait_for_verdict(request, policy.wait if policy.in_flight == "wait" else 0)
        except StoreUnavailable as error:
            if policy.store_failure == "closed":
                raise
            _log.warning("working on %r in %r without protection: %s", call.key, call.scope, error)
            return None
        self._record_verdict(request, verdict, call.door, call.label)
        if call.renew and isinstance(verdict, Granted) and not self._bound:
            self._background.here().renewer.watch(verdict.claim)
        return verdict

    async def finish(self, claim: Claim, call: CallRequest, value: Any) -> None:
        """Record the value that the work returned; if it cannot be stored, record that the work was done, and raise.

        If the store is unavailable, or the caller is cancelled meanwhile, it is recorded as soon as possible.
        """
        done, unstored = _done(call.kind, value, call.policy.value_ttl, call.codec)
        await self._finish(claim, call, done)
        if unstored is not None:
            raise unstored

    async def finish_without_value(self, claim: Claim, call: CallRequest, error: BaseException) -> None:
        """Record that the work was done, although its value could not be made."""
        await self._finish(claim, call, _unstored(": ".join(_described(error))))

    async def _finish(self, claim: Claim, call: CallRequest, done: OutcomeData) -> None:
        self.stop_renewing(claim)
        try:
            await self._record(claim, done)
        except ClaimLost:
            raise
        except BaseException as error:
            self._retry_later(claim, done)
            if call.policy.store_failure == "closed" or not isinstance(error, StoreUnavailable):
                raise
            _log.warning("the outcome of %r in %r is not recorded yet: %s", call.key, call.scope, error)

    async def fail(self, claim: Claim, call: CallRequest, error: BaseException) -> bool:
        """After the work raised: release the key, or keep the failure, by the policy. Returns True if it is kept.

        An error of the store is logged here and does not hide the caller's own error; the lease then ends by itself.
        """
        self.stop_renewing(claim)
        done = None
        if call.policy.on_error == "keep" and isinstance(error, Exception):
            done, _ = _done("error", _described(error), call.policy.value_ttl)
        try:
            await (self.release(claim) if done is None else self._record(claim, done))
        except (ClaimLost, StoreUnavailable) as second:
            level = logging.DEBUG if self._bound else logging.WARNING  # bound: it vanishes with the transaction
            _log.log(level, "the failed work on %r in %r could not be recorded: %s", claim.key, claim.scope, second)
            if isinstance(second, StoreUnavailable):
                self._retry_later(claim, done)
            return False
        except BaseException:  # cancelled meanwhile
            self._retry_later(claim, done)
            raise
        return done is not None

    def _retry_later(self, claim: Claim, done: OutcomeData | None) -> None:
        if self._bound:
            return
        pending = self._background.here().pending
        if done is None:
            pending.retry_release(claim)
        else:
            pending.retry_outcome(claim, done)

    def stop_renewing(self, claim: Claim) -> None:
        """Stop renewing the claim, so that its lease ends."""
        self._background.here().renewer.forget(claim)

    def _request(  # noqa: PLR0917 -- private, and called with keywords where the order is not obvious
        self,
        key: str,
        scope: str,
        fingerprint: str,
        policy: Policy,
        lease: float | None = None,
        ttl: float | None = None,
    ) -> ClaimRequest:
        collects = self._collects or (self._may_collect and policy.value_ttl is not None)
        if collects and not self._collector.running:
            self._collector.start()
        if self._sampler is not None and not self._sampler.running:
            self._sampler.start()
        return ClaimRequest(
            checked_key("scope", scope),
            checked_key("key", key),
            checked_fingerprint(fingerprint),
            new_attempt(),
            round(policy.lease * 1e6) if lease is None else round(checked_seconds("lease", lease) * 1e6),
            round(policy.ttl * 1e6) if ttl is None else round(checked_seconds("ttl", ttl) * 1e6),
            policy.on_crash == "unknown",
        )

    async def _wait_for_verdict(self, request: ClaimRequest, patience: float) -> Verdict:
        """Claim; while the key is in flight, wait for its owner to complete it, release it or vanish."""
        verdict = await self._claim(request)
        if not isinstance(verdict, InFlight) or patience <= 0:
            return verdict
        deadline = time.monotonic() + patience
        pause = _FIRST_POLL
        request.waiting = True
        self.store.watch(self._waiters.notify)
        signal = self._runtime.signal()
        with self._waiters.waiting(request.scope, request.key, signal):
            while True:
                verdict = await self._claim(request)
                left = deadline - time.monotonic()
                if not isinstance(verdict, InFlight) or left <= 0:
                    return verdict
                await signal.wait(min(pause, left, verdict.retry_after))
                pause = min(pause * 2, _LAST_POLL)

    async def _record(self, claim: Claim, done: OutcomeData) -> None:
        if not await self._send_complete(Complete(claim.scope, claim.key, claim.fence, done)):
            raise _lost(claim, "complete")
        self._waiters.notify(claim.scope, claim.key)

    def _record_verdict(
        self, request: ClaimRequest, verdict: Verdict, door: Door = "function", label: str = ""
    ) -> Verdict:
        """Count the verdict. Every call passes here once."""
        reason = verdict.reason if isinstance(verdict, Granted) else ""
        self.counters.note(_EVENTS[type(verdict)], request.scope, request.key, reason, door, label)
        return verdict

    async def _claim(self, request: ClaimRequest) -> Verdict:
        """Claim. If no reply comes, the key is released later, in case it was granted to this caller."""
        pending = self._background.here().pending
        if pending.writes:
            await pending.flush_key(request.scope, request.key)
        try:
            return await self._send_claim(request)
        except StoreBroken:
            raise
        except (StoreUnavailable, CancelledError):
            # A claim that resolves takes an unknown key. It must not be released: the key must stay unknown.
            if request.done is None and not request.resolving and not self._bound:
                pending.retry_claim(request)
            raise

    def _batched(self, verb: Callable[[Sequence[A]], Awaitable[list[B]]]) -> Batcher[A, B]:
        if self._bound or self.memory is not None:
            return Unbatched(verb)
        retried = self._with_retry(verb)
        return self._runtime.batcher(retried) if self.store.coalesce else Unbatched(retried)

    def _with_retry(self, verb: Callable[[A], Awaitable[B]], longest: float | None = None) -> Send[A, B]:
        name = getattr(verb, "__name__", "<lambda>")
        took = None if name == "<lambda>" else partial(self.counters.took, name)  # stats and open are not timed
        return with_retry(verb, self._runtime, self._retry_for, longest=longest, took=took, is_new=self._is_new)


_EVENTS: dict[type, str] = {
    Granted: "miss",
    Replay: "hit",
    InFlight: "collision",
    Mismatch: "conflict",
    Unknown: "unknown",
}


def _done(
    kind: Kind, value: Any, value_ttl: float | None, codec: Codec = PLAIN
) -> tuple[OutcomeData, Unencodable | None]:
    """The outcome to record, and the error to raise afterwards if it had to be recorded without its value."""
    try:
        kind, data = packed(kind, value, codec)
    except Unencodable as error:
        message = f"{error}. The work is done and will not be done again: later callers get OutcomeGone"
        unstored = Unencodable(message)
        unstored.__cause__ = error
        return _unstored(str(error)), unstored
    return OutcomeData(kind, data, _us(value_ttl)), None


def _unstored(why: str) -> OutcomeData:
    return OutcomeData("unstored", encode(why[:1000].encode(errors="backslashreplace").decode()))


def _described(error: BaseException) -> list[str]:
    """The error's type and text, as text that can be stored."""
    try:
        text = str(error).encode(errors="backslashreplace").decode()
    except Exception:  # noqa: BLE001 -- the error's own __str__ failed: that must not hide the error
        text = ""
    return [type(error).__qualname__, text]


def _us(value: float | None) -> int | None:
    return None if value is None else round(value * 1e6)


def _at_work(record: Record) -> InProgress:
    left = record.lease_left
    return InProgress(
        f"the key {record.key!r} in {record.scope!r} is being worked on, for at least {left:.1f} more seconds; "
        "wait, or take it from its owner with force=True, after which the work may happen twice",
        left,
    )


def _lost(claim: Claim, verb: str) -> ClaimLost:
    return ClaimLost(
        f"cannot {verb} the key {claim.key!r} in {claim.scope!r}: fence {claim.fence} no longer holds it, because its "
        "lease ended and someone took over, or it was released; do not publish this work's effects"
    )


def _unknown(scope: str, key: str) -> OutcomeUnknown:
    return OutcomeUnknown(
        f"the owner of the key {key!r} in {scope!r} vanished, and whether its work happened is not known; "
        f"look at its effects, then call resolve({key!r}, scope={scope!r}, done=True, value=…), or with done=False"
    )
