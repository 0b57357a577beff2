"""A small store that is right, and what makes another one a broken version of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from msgspec.structs import replace

from semel.once.rules import claim_of, finish, gone, grant, judge, live, rewind
from semel.once.store import (
    ClaimRequest,
    Clock,
    Complete,
    Forget,
    ForgetScope,
    KeyRef,
    OnReleased,
    OutcomeData,
    Owned,
    Release,
    Renew,
)
from semel.types import Granted, Held, Reason, Record, Verdict


class Sound:
    """A store that is right: a dict under a lock, in steps small enough to break one by one."""

    coalesce = False
    expires_itself = False

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock: Clock = clock or wall_clock
        self.records: dict[Any, Record] = {}
        self.fence = 0
        self.lock = threading.RLock()

    def place(self, request: KeyRef | ClaimRequest | Owned) -> Any:
        return (request.scope, request.key)

    def judge(self, record: Record | None, request: ClaimRequest, now: int) -> Verdict | Reason:
        return judge(record, request, now)

    def next_fence(self, previous: Record | None, now: int) -> int:
        self.fence += 1
        return self.fence

    def rewind(self, record: Record | None, now: int) -> None:
        rewind(record, now)

    def live(self, request: KeyRef | Owned, now: int) -> Record | None:
        record = self.records.get(self.place(request))
        return None if record is None or gone(record, now) else record

    def write(self, record: Record, done: OutcomeData, now: int) -> None:
        finish(record, done, now)

    async def each(self, one: Callable[[Any, int], Any], requests: Sequence[Any]) -> list[Any]:
        with self.lock:
            now = self.clock()
            return [one(request, now) for request in requests]

    async def open(self) -> None:
        pass

    async def claim(self, requests: Sequence[ClaimRequest]) -> list[Verdict]:
        return await self.each(self.claim_one, requests)

    def claim_one(self, request: ClaimRequest, now: int) -> Verdict:
        previous = self.records.get(self.place(request))
        self.rewind(previous, now)
        verdict = self.judge(previous, request, now)
        return self.take(request, previous, verdict, now) if isinstance(verdict, str) else verdict

    def take(self, request: ClaimRequest, previous: Record | None, reason: Reason, now: int) -> Verdict:
        record = grant(request, previous, reason, self.next_fence(previous, now), now)
        if request.done is not None:
            self.write(record, request.done, now)
        self.records[self.place(request)] = record
        return Granted(claim_of(record), reason)

    async def renew(self, requests: Sequence[Renew]) -> list[int | None]:
        return await self.each(self.renew_one, requests)

    def renew_one(self, request: Renew, now: int) -> int | None:
        record = self.live(request, now)
        if record is None or record.fence != request.fence or record.state != "claimed":
            return None
        record.lease_us, record.lease_until_us = request.lease_us, now + request.lease_us
        return record.lease_until_us

    async def complete(self, requests: Sequence[Complete]) -> list[bool]:
        return await self.each(self.complete_one, requests)

    def complete_one(self, request: Complete, now: int) -> bool:
        record = self.live(request, now)
        if record is None or record.fence != request.fence:
            return False
        if record.state == "claimed":
            self.write(record, request.done, now)
        return True

    async def release(self, requests: Sequence[Release]) -> list[bool]:
        return await self.each(self.release_one, requests)

    def release_one(self, request: Release, now: int) -> bool:
        record = self.live(request, now)
        if record is None or record.fence != request.fence:
            return record is None
        if record.state == "claimed":
            del self.records[self.place(request)]
        return True

    async def forget(self, requests: Sequence[Forget]) -> list[bool]:
        return await self.each(self.forget_one, requests)

    def forget_one(self, request: Forget, now: int) -> bool:
        record = self.live(request, now)
        if record is None:
            return True
        if record.fence != request.fence or (live(record, now) and not request.force):
            return False
        self.remove(request)
        return True

    def remove(self, request: Forget) -> None:
        del self.records[self.place(request)]

    async def forget_scope(self, request: ForgetScope) -> int:
        with self.lock:
            now = self.clock()
            doomed = [each for each in self.records.values() if self.forgets(request, each, now)][: request.limit]
            for record in doomed:
                self.remove(Forget(record.scope, record.key, record.fence))
            return len(doomed)

    def forgets(self, request: ForgetScope, record: Record, now: int) -> bool:
        return record.scope == request.scope and (request.force or not live(record, now))

    async def get(self, refs: Sequence[KeyRef]) -> list[Record | None]:
        return await self.each(self.get_one, refs)

    def get_one(self, ref: KeyRef, now: int) -> Record | None:
        record = self.live(ref, now)
        return None if record is None else replace(record, now_us=now)

    def doomed(self, record: Record, now: int) -> bool:
        return gone(record, now)

    async def purge(self, limit: int) -> int:
        with self.lock:
            now, removed = self.clock(), 0
            for place, record in list(self.records.items()):
                if removed == limit:
                    break
                if self.doomed(record, now):
                    del self.records[place]
                elif record.data is not None and record.value_until_us is not None and now > record.value_until_us:
                    record.data = None
                else:
                    continue
                removed += 1
            return removed

    async def stats(self) -> Held:
        count = dict.fromkeys(Held.__struct_fields__, 0)
        with self.lock:
            now = self.clock()
            for record in self.records.values():
                count["expired" if gone(record, now) else replace(record, now_us=now).status] += 1
        return Held(**count)

    def watch(self, ring: OnReleased) -> None:
        pass

    async def close(self) -> None:
        pass


def wall_clock() -> int:
    return time.time_ns() // 1000


class Broken(Sound):
    """A store that breaks a promise, and the rules that notice."""

    is_async: ClassVar[bool] = False
    caught_by: ClassVar[tuple[str, ...]]


BROKEN: list[type[Broken]] = []


def caught_by(*rules: str) -> Callable[[type[Broken]], type[Broken]]:
    """This store is broken, and these rules say so."""

    def note(store: type[Broken]) -> type[Broken]:
        store.caught_by = rules
        BROKEN.append(store)
        return store

    return note
