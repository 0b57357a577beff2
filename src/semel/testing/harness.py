"""What a rule uses: the store under test, a fake clock, and calls one by one or concurrently."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import wraps
from inspect import isawaitable
from types import FrameType, TracebackType
from typing import Any, Protocol, Self

from msgspec.structs import replace

from semel import codec
from semel._concurrency.sync import run_sync
from semel.once.client import AsyncOnce, Once
from semel.once.store import (
    ClaimRequest,
    Clock,
    Complete,
    Forget,
    ForgetScope,
    KeyRef,
    OutcomeData,
    Release,
    Renew,
    Store,
)
from semel.policy import Policy
from semel.testing.clock import FakeClock
from semel.types import Claim, Granted, Held, Kind, Record, Verdict

KEY, SCOPE = "key", "scope"
LEASE, TTL = 60.0, 3600.0
PATIENCE = 60
"""Seconds after which a call counts as hung."""

SWITCH_PROBABILITY = 0.35
"""The probability of a thread switch at each line of the store's code during a race."""


class Opener(Protocol):
    """Opens the store under test with a clock, or with the store's own time if it is None."""

    def __call__(self, *, clock: Clock | None) -> Store: ...


def us(seconds: float) -> int:
    """Seconds as microseconds."""
    return round(seconds * 1e6)


def claim_request(
    key: str = KEY,
    *,
    scope: str = SCOPE,
    fingerprint: str = "",
    attempt: str = "",
    lease: float = LEASE,
    ttl: float = TTL,
    unknown: bool = False,
    waiting: bool = False,
    resolving: bool = False,
    done: OutcomeData | None = None,
    force: bool = False,
) -> ClaimRequest:
    """A request to claim a key, with a new attempt id unless one is given. Times are seconds."""
    attempt = attempt or uuid.uuid4().hex
    return ClaimRequest(scope, key, fingerprint, attempt, us(lease), us(ttl), unknown, waiting, resolving, done, force)


def outcome_data(value: Any = None, *, kind: Kind = "value", value_ttl: float | None = None) -> OutcomeData:
    """An outcome with this value."""
    return OutcomeData(kind, codec.encode(value), None if value_ttl is None else us(value_ttl))


def complete_request(claim: Claim, value: Any = None, *, value_ttl: float | None = None) -> Complete:
    """The owner's request to complete the claim."""
    return Complete(claim.scope, claim.key, claim.fence, outcome_data(value, value_ttl=value_ttl))


def release_request(claim: Claim) -> Release:
    """The owner's request to release the claim."""
    return Release(claim.scope, claim.key, claim.fence)


def forget_request(claim: Claim, *, force: bool = False) -> Forget:
    """An operator's request to forget the record of the claim."""
    return Forget(claim.scope, claim.key, claim.fence, force)


def renew_request(claim: Claim, lease: float = LEASE) -> Renew:
    """The owner's request to renew the claim."""
    return Renew(claim.scope, claim.key, claim.fence, us(lease))


class StoreClient:
    """Calls a store's verbs as plain functions, for blocking and async stores."""

    store: Store
    run: Callable[[Any], Any]
    """``run(answer)`` returns the answer, awaited if it is awaitable."""

    def __init__(self, store: Store, run: Callable[[Any], Any]) -> None:
        self.store = store
        self.run = run

    def claims(self, requests: Sequence[ClaimRequest]) -> list[Verdict]:
        """Claim a batch."""
        verdicts: list[Verdict] = self.run(self.store.claim(requests))
        return verdicts

    def claim(self, key: str = KEY, **asked: Any) -> Verdict:
        """Claim one key, with the arguments of :func:`claim_request`."""
        (verdict,) = self.claims([claim_request(key, **asked)])
        return verdict

    def granted(self, key: str = KEY, **asked: Any) -> Claim:
        """Claim a key that must be granted."""
        verdict = self.claim(key, **asked)
        assert isinstance(verdict, Granted), f"expected a grant of {key!r}, got {verdict}"
        return verdict.claim

    def completed(self, key: str = KEY, value: Any = None, **asked: Any) -> Claim:
        """Claim a key and complete it."""
        claim = self.granted(key, **asked)
        assert self.complete(claim, value), f"the owner of {key!r} could not complete it"
        return claim

    def complete(self, claim: Claim, value: Any = None, *, value_ttl: float | None = None) -> bool:
        """Complete one claim."""
        (answer,) = self.run(self.store.complete([complete_request(claim, value, value_ttl=value_ttl)]))
        return bool(answer)

    def release(self, claim: Claim) -> bool:
        """Release one claim."""
        (answer,) = self.run(self.store.release([release_request(claim)]))
        return bool(answer)

    def forget(self, claim: Claim, *, force: bool = False) -> bool:
        """Forget the record of one claim."""
        (answer,) = self.run(self.store.forget([forget_request(claim, force=force)]))
        return bool(answer)

    def forget_scope(self, scope: str = SCOPE, limit: int = 1000, *, force: bool = False) -> int:
        """Forget one batch of a scope's keys."""
        forgotten: int = self.run(self.store.forget_scope(ForgetScope(scope, limit, force)))
        return forgotten

    def renew(self, claim: Claim, lease: float = LEASE) -> int | None:
        """Renew one claim."""
        answer: int | None
        (answer,) = self.run(self.store.renew([renew_request(claim, lease)]))
        return answer

    def get(self, key: str = KEY, scope: str = SCOPE) -> Record | None:
        """The key's record, or None."""
        record: Record | None
        (record,) = self.run(self.store.get([KeyRef(scope, key)]))
        return record

    def record(self, key: str = KEY, scope: str = SCOPE) -> Record:
        """The key's record, which must exist."""
        record = self.get(key, scope)
        assert record is not None, f"expected a record of {key!r} in {scope!r}"
        return record

    def value(self, key: str = KEY, scope: str = SCOPE) -> Any:
        """The value of the key's outcome, which must exist."""
        outcome = self.record(key, scope).outcome
        assert outcome is not None, f"expected an outcome of {key!r} in {scope!r}"
        return outcome.value

    @contextmanager
    def untouched(self, key: str = KEY, scope: str = SCOPE) -> Iterator[None]:
        """Asserts that the block does not change the key's record."""
        before = replace(self.record(key, scope), now_us=0)
        yield
        assert replace(self.record(key, scope), now_us=0) == before

    def purge(self, limit: int = 1000) -> int:
        """Purge one batch."""
        removed: int = self.run(self.store.purge(limit))
        return removed

    def stats(self) -> Held:
        """How many keys the store has."""
        held: Held = self.run(self.store.stats())
        return held


class World(StoreClient):
    """The store under test, opened with a fake clock, and everything else that a rule needs."""

    def __init__(self, opener: Opener, *, is_async: bool = False, clock: FakeClock | None = None) -> None:
        self.clock = clock or FakeClock()
        self.is_async = is_async
        self.run = self._await if is_async else _block
        self._opener = opener
        self._runner = asyncio.Runner()
        self._opened: list[Any] = []

    def __enter__(self) -> Self:
        try:
            self.store = self.opened(self.clock)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._close()

    def _close(self) -> None:
        try:
            for thing in reversed(self._opened):
                self.run(thing.close())
        finally:
            self._runner.close()

    def opened(self, clock: Clock | None) -> Store:
        """Open the store (once more) with a clock, or with its own time if None. Closed at the end of the rule."""
        store = self._opener(clock=clock)
        self._opened.append(store)
        self.run(store.open())
        return store

    def client(self, clock: Clock | None) -> StoreClient:
        """One more client of a store that several can share."""
        return StoreClient(self.opened(clock), self.run)

    def once(self, store: Store | None = None, **options: Any) -> Any:
        """``Once`` or ``AsyncOnce`` with the store; pass what its methods return to :attr:`run`.

        A call whose key is in flight fails at once, unless it asks to wait.
        """
        kind = AsyncOnce if self.is_async else Once
        once = kind(store or self.store, policy=Policy(in_flight="conflict"), collect=False, **options)
        self._opened.append(once)
        return once

    def working(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function for :meth:`once`: plain, or async."""
        if not self.is_async:
            return function

        @wraps(function)
        async def work(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return work

    def meeting(self, parties: int) -> Callable[[], Any]:
        """A function for :meth:`once` that returns once so many calls of it run at the same time."""
        if not self.is_async:
            gate = threading.Barrier(parties)
            return lambda: gate.wait(PATIENCE)
        meeting = asyncio.Barrier(parties)

        async def meet() -> int:
            async with asyncio.timeout(PATIENCE):
                return await meeting.wait()

        return meet

    def _await(self, answer: Any) -> Any:
        return self._runner.run(awaited(answer)) if isawaitable(answer) else answer

    def together(self, calls: Iterable[Callable[[], Any]]) -> list[Any]:
        """Make all calls at the same moment, in threads or tasks, and return their answers in order."""
        calls = list(calls)
        return self._in_tasks(calls) if self.is_async else self._in_threads(calls)

    def _in_tasks(self, calls: list[Callable[[], Any]]) -> list[Any]:
        async def gathered() -> list[Any]:
            async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as group:
                tasks = [group.create_task(awaited(call())) for call in calls]
            return [task.result() for task in tasks]

        return self._runner.run(gathered())

    def _in_threads(self, calls: list[Callable[[], Any]]) -> list[Any]:
        gate = threading.Barrier(len(calls))

        def one(call: Callable[[], Any]) -> Any:
            gate.wait(PATIENCE)
            with _forced_switches(self.store):
                return self.run(call())

        with ThreadPoolExecutor(len(calls)) as pool:
            return [turn.result() for turn in [pool.submit(one, call) for call in calls]]


@contextmanager
def _forced_switches(store: Store) -> Iterator[None]:
    """Switch threads often in the middle of the store's code.

    A thread that never waits is rarely interrupted, so a race in the store would not be found. A store with round
    trips needs no forced switches, as its threads wait for each of them.
    """
    modules = set() if store.coalesce else {kind.__module__ for kind in type(store).__mro__}

    def enter(frame: FrameType, _event: str, _arg: Any) -> Any:
        return switch if frame.f_globals.get("__name__") in modules else None

    def switch(_frame: FrameType, _event: str, _arg: Any) -> Any:
        if random.random() < SWITCH_PROBABILITY:  # noqa: S311 -- not a secret
            time.sleep(0)
        return switch

    usual = sys.gettrace()
    sys.settrace(enter if modules else usual)
    try:
        yield
    finally:
        sys.settrace(usual)


def _block(answer: Any) -> Any:
    return run_sync(awaited(answer)) if isawaitable(answer) else answer


async def awaited(answer: Any) -> Any:
    """The answer, awaited if it is awaitable."""
    return await answer if isawaitable(answer) else answer
