"""Stores that pass every verb on to a real one, and take notes or hold it up; for faults see semel.testing."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

from acceptance.together import PATIENCE
from semel.once.store import ClaimRequest, Complete, Forget, ForgetScope, KeyRef, OnReleased, Release, Renew, Store
from semel.types import Held, Record, Verdict


class Wrapped:
    """Passes everything on."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.coalesce = True
        self.expires_itself = inner.expires_itself

    async def _pass(self, verb: str, batch: Any) -> Any:
        return await getattr(self.inner, verb)(batch)

    async def open(self) -> None:
        await self.inner.open()

    async def claim(self, requests: Sequence[ClaimRequest]) -> list[Verdict]:
        answers: list[Verdict] = await self._pass("claim", requests)
        return answers

    async def renew(self, requests: Sequence[Renew]) -> list[int | None]:
        answers: list[int | None] = await self._pass("renew", requests)
        return answers

    async def complete(self, requests: Sequence[Complete]) -> list[bool]:
        answers: list[bool] = await self._pass("complete", requests)
        return answers

    async def release(self, requests: Sequence[Release]) -> list[bool]:
        answers: list[bool] = await self._pass("release", requests)
        return answers

    async def forget(self, requests: Sequence[Forget]) -> list[bool]:
        answers: list[bool] = await self._pass("forget", requests)
        return answers

    async def forget_scope(self, request: ForgetScope) -> int:
        forgotten: int = await self._pass("forget_scope", request)
        return forgotten

    async def get(self, refs: Sequence[KeyRef]) -> list[Record | None]:
        answers: list[Record | None] = await self._pass("get", refs)
        return answers

    async def purge(self, limit: int) -> int:
        removed: int = await self._pass("purge", limit)
        return removed

    async def stats(self) -> Held:
        return await self.inner.stats()

    def watch(self, ring: OnReleased) -> None:
        self.inner.watch(ring)

    async def close(self) -> None:
        await self.inner.close()


class Noting(Wrapped):
    """Notes the verbs that arrive, with the sizes of their batches, and says when somebody begins to wait."""

    def __init__(self, inner: Store, waiting: threading.Event | asyncio.Event | None = None) -> None:
        super().__init__(inner)
        self.seen: list[tuple[str, int]] = []
        self._waiting = waiting

    async def _pass(self, verb: str, batch: Any) -> Any:
        self.seen.append((verb, len(batch)))
        return await super()._pass(verb, batch)

    def watch(self, ring: OnReleased) -> None:
        super().watch(ring)
        if self._waiting is not None:
            self._waiting.set()


class Gated(Noting):
    """The first claim stays outside of the store until the gate opens."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.reached = threading.Event()
        self.gate = threading.Event()

    async def _pass(self, verb: str, batch: Any) -> Any:
        if verb == "claim" and not self.reached.is_set():
            self.reached.set()
            assert self.gate.wait(PATIENCE)
        return await super()._pass(verb, batch)


class LoopGated(Noting):
    """The same for tasks, which must not block their loop; made in that loop."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.reached = asyncio.Event()
        self.gate = asyncio.Event()

    async def _pass(self, verb: str, batch: Any) -> Any:
        if verb == "claim" and not self.reached.is_set():
            self.reached.set()
            async with asyncio.timeout(PATIENCE):
                await self.gate.wait()
        return await super()._pass(verb, batch)
