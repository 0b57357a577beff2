"""A store between whose caller and data something goes wrong, when told to."""

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
    """Any store, with faults on call: a request that is lost before it is applied, or a reply lost after it was.

    To the caller both are the same :class:`~semel.errors.StoreUnavailable`, as with a broken connection::

        store = FaultyStore(MemoryStore())
        store.lose_reply("claim")           # the next claim is written, and its caller never hears of it
        store.lose_request("complete", 2)   # the next two completes never arrive
        store.away = True                   # nothing arrives until it is False again
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
        """Fail the next calls of this verb after the store has done what they ask."""
        with self._lock:
            self._replies[verb] += times

    async def _pass(self, verb: Verb, call: Callable[[A], Awaitable[B]], argument: A) -> B:
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
        """See the contract, for this and all other verbs."""
        await self._pass("open", lambda _: self.inner.open(), ())

    async def claim(self, requests: Sequence[ClaimRequest]) -> list[Verdict]:
        """Claim, unless a fault comes between."""
        return await self._pass("claim", self.inner.claim, requests)

    async def renew(self, requests: Sequence[Renew]) -> list[int | None]:
        """Renew, unless a fault comes between."""
        return await self._pass("renew", self.inner.renew, requests)

    async def complete(self, requests: Sequence[Complete]) -> list[bool]:
        """Complete, unless a fault comes between."""
        return await self._pass("complete", self.inner.complete, requests)

    async def release(self, requests: Sequence[Release]) -> list[bool]:
        """Release, unless a fault comes between."""
        return await self._pass("release", self.inner.release, requests)

    async def forget(self, requests: Sequence[Forget]) -> list[bool]:
        """Forget, unless a fault comes between."""
        return await self._pass("forget", self.inner.forget, requests)

    async def forget_scope(self, request: ForgetScope) -> int:
        """Forget a scope, unless a fault comes between."""
        return await self._pass("forget_scope", self.inner.forget_scope, request)

    async def get(self, refs: Sequence[KeyRef]) -> list[Record | None]:
        """Look, unless a fault comes between."""
        return await self._pass("get", self.inner.get, refs)

    async def purge(self, limit: int) -> int:
        """Purge, unless a fault comes between."""
        return await self._pass("purge", self.inner.purge, limit)

    async def stats(self) -> Held:
        """Count, unless a fault comes between."""
        return await self._pass("stats", lambda _: self.inner.stats(), ())

    def watch(self, ring: OnReleased) -> None:
        """Rings come through; they may be lost anyway."""
        self.inner.watch(ring)

    async def close(self) -> None:
        """Closing always works."""
        await self.inner.close()


def _one_less(left: Counter[str], verb: str) -> bool:
    if left[verb] == 0:
        return False
    left[verb] -= 1
    return True
