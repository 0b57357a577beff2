"""A store that fails on request."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, TypeAlias, TypeVar

from semel.errors import StoreUnavailable
from semel.once.store import ClaimRequest, Complete, Forget, ForgetScope, KeyRef, OnReleased, Release, Renew, Store
from semel.types import Held, Record, Verdict

Verb: TypeAlias = Literal[
    "open", "claim", "renew", "complete", "release", "forget", "forget_scope", "get", "purge", "stats"
]

A = TypeVar("A")
B = TypeVar("B")


class FaultyStore:
    """Wraps a store and injects faults: a request is lost before it is applied, or a reply after it was.

    The caller gets the same :class:`~semel.errors.StoreUnavailable` for both, as with a broken connection::

        store = FaultyStore(MemoryStore())
        store.lose_reply("claim")           # the next claim is applied, but its caller gets an error
        store.lose_request("complete", 2)   # the next two completes are not applied
        store.away = True                   # every call fails until it is False again
        store.calls["claim"]                # how often it was called
    """

    def __init__(self, inner: Store, error: type[Exception] = StoreUnavailable) -> None:
        self.inner = inner
        self.coalesce = inner.coalesce
        self.expires_itself = inner.expires_itself
        self.away = False
        self.calls: Counter[str] = Counter()
        self._error = error
        self._requests: Counter[str] = Counter()
        self._replies: Counter[str] = Counter()
        self._lock = threading.Lock()

    def lose_request(self, verb: Verb, times: int = 1) -> None:
        """Fail the next calls of this verb before they reach the store."""
        with self._lock:
            self._requests[verb] += times

    def lose_reply(self, verb: Verb, times: int = 1) -> None:
        """Fail the next calls of this verb after the store has applied them."""
        with self._lock:
            self._replies[verb] += times

    async def _call(self, verb: Verb, call: Callable[[A], Awaitable[B]], argument: A) -> B:
        with self._lock:
            self.calls[verb] += 1
            lost = self.away or _one_less(self._requests, verb)
            unheard = not lost and _one_less(self._replies, verb)
        if lost:
            raise self._error(f"a fault was injected: the request to {verb} is lost")
        answer = await call(argument)
        if unheard:
            raise self._error(f"a fault was injected: the reply to {verb} is lost")
        return answer

    async def open(self) -> None:
        await self._call("open", lambda _: self.inner.open(), ())

    async def claim(self, requests: Sequence[ClaimRequest]) -> list[Verdict]:
        return await self._call("claim", self.inner.claim, requests)

    async def renew(self, requests: Sequence[Renew]) -> list[int | None]:
        return await self._call("renew", self.inner.renew, requests)

    async def complete(self, requests: Sequence[Complete]) -> list[bool]:
        return await self._call("complete", self.inner.complete, requests)

    async def release(self, requests: Sequence[Release]) -> list[bool]:
        return await self._call("release", self.inner.release, requests)

    async def forget(self, requests: Sequence[Forget]) -> list[bool]:
        return await self._call("forget", self.inner.forget, requests)

    async def forget_scope(self, request: ForgetScope) -> int:
        return await self._call("forget_scope", self.inner.forget_scope, request)

    async def get(self, refs: Sequence[KeyRef]) -> list[Record | None]:
        return await self._call("get", self.inner.get, refs)

    async def purge(self, limit: int) -> int:
        return await self._call("purge", self.inner.purge, limit)

    async def stats(self) -> Held:
        return await self._call("stats", lambda _: self.inner.stats(), ())

    def watch(self, ring: OnReleased) -> None:
        self.inner.watch(ring)

    async def close(self) -> None:
        await self.inner.close()


def _one_less(left: Counter[str], verb: str) -> bool:
    if left[verb] == 0:
        return False
    left[verb] -= 1
    return True
