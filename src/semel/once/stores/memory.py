"""Keys in this process's memory: the fastest store, and the reference in tests. Lost when the process ends."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain, islice
from typing import Literal

from msgspec.structs import replace

from semel._concurrency.fork import survive_fork
from semel.once.rules import claim_of, end_of, finish, gone, grant, judge, live, rewind
from semel.once.store import (
    ClaimRequest,
    Clock,
    Complete,
    Forget,
    ForgetScope,
    KeyRef,
    OnReleased,
    Owned,
    Release,
    Renew,
)
from semel.types import Granted, Held, Reason, Record, Verdict


def _wall_clock() -> int:
    return time.time_ns() // 1000


class MemoryStore:
    """A store for the threads and event loops of one process. Every verb runs under one short lock."""

    coalesce = False
    expires_itself = False

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or _wall_clock
        self._scopes: dict[str, dict[str, Record]] = {}
        self._ends: defaultdict[int, list[Record]] = defaultdict(list)
        self._filed = 0
        self._tidy_at = 1000
        self._fence = 0
        self._lock = threading.Lock()
        survive_fork(self)

    def after_fork(self) -> None:
        """Another thread may have held the lock during the fork; in the child nobody would release it."""
        self._lock = threading.Lock()

    async def open(self) -> None:
        """Always ready."""

    async def claim(self, requests: Sequence[ClaimRequest]) -> list[Verdict]:
        with self._lock:
            now = self._clock()
            return [self._claim(request, now) for request in requests]

    def _claim(self, request: ClaimRequest, now: int) -> Verdict:
        records = self._scopes.setdefault(request.scope, {})
        previous = records.get(request.key)
        verdict = self._judge(previous, request, now)
        if not isinstance(verdict, str):
            return verdict
        self._fence += 1
        record = records[request.key] = grant(request, previous, verdict, self._fence, now)
        self._file(record, record.expires_us)
        return Granted(claim_of(record), verdict)

    def _judge(self, record: Record | None, request: ClaimRequest, now: int) -> Verdict | Reason:
        if record is not None and rewind(record, now):
            self._file(record, end_of(record))
        return judge(record, request, now)

    def _file(self, record: Record, end: int) -> None:
        """File the record under the second in which it, or its value, may end next, for the collector.

        A record whose end comes earlier than before is filed again. Entries that are out of date are dropped before
        they outnumber the others.
        """
        if record.value_until_us is not None and record.data is not None and record.value_until_us < end:
            end = record.value_until_us
        self._ends[end // 1_000_000].append(record)
        self._filed += 1
        if self._filed > self._tidy_at:
            self._tidy()

    def _tidy(self) -> None:
        self._ends.clear()
        self._filed = 0
        held = sum(map(len, self._scopes.values()))
        self._tidy_at = 1000 + 2 * held
        for records in self._scopes.values():
            for record in records.values():
                self._file(record, end_of(record))

    def mark(
        self, scope: str, key: str, data: bytes, ttl_us: int, value_ttl_us: int | None
    ) -> Verdict | Reason | Literal["seen"]:
        """Claim and complete in one step, without a request: there is no round trip to share."""
        with self._lock:
            now = self._clock()
            records = self._scopes.get(scope)
            if records is None:
                records = self._scopes[scope] = {}
            previous = records.get(key)
            verdict: Verdict | Reason = "absent"
            if previous is not None:
                if previous.state == "completed" and now <= previous.expires_us:
                    return "seen"
                verdict = self._judge(previous, ClaimRequest(scope, key, "", "", 0, ttl_us), now)
                if not isinstance(verdict, str):
                    return verdict
            self._fence += 1
            end = now + ttl_us
            fades = None if value_ttl_us is None else now + value_ttl_us
            record = records[key] = Record(
                scope, key, "", "completed", self._fence, "", False, now, 0, now, end, now, "seen", data, fades
            )
            self._file(record, end)
            return verdict

    async def renew(self, requests: Sequence[Renew]) -> list[int | None]:
        with self._lock:
            now = self._clock()
            return [self._renew(request, now) for request in requests]

    def _renew(self, request: Renew, now: int) -> int | None:
        record = self._live(request, now)
        if record is None or record.fence != request.fence or record.state != "claimed":
            return None
        end = end_of(record)
        record.lease_us = request.lease_us
        record.lease_until_us = now + request.lease_us
        if end_of(record) < end:
            self._file(record, end_of(record))
        return record.lease_until_us

    async def complete(self, requests: Sequence[Complete]) -> list[bool]:
        with self._lock:
            now = self._clock()
            return [self._complete(request, now) for request in requests]

    def _complete(self, request: Complete, now: int) -> bool:
        record = self._live(request, now)
        if record is None or record.fence != request.fence:
            return False
        if record.state == "claimed":
            end = end_of(record)
            finish(record, request.done, now)
            if record.value_until_us is not None or end_of(record) < end:
                self._file(record, end_of(record))
        return True

    async def release(self, requests: Sequence[Release]) -> list[bool]:
        with self._lock:
            now = self._clock()
            return [self._release(request, now) for request in requests]

    def _release(self, request: Release, now: int) -> bool:
        record = self._live(request, now)
        if record is None:
            return True
        if record.fence == request.fence and record.state == "claimed":
            self._remove(record)
        return record.fence == request.fence

    async def forget(self, requests: Sequence[Forget]) -> list[bool]:
        with self._lock:
            now = self._clock()
            return [self._forget(request, now) for request in requests]

    def _forget(self, request: Forget, now: int) -> bool:
        record = self._live(request, now)
        if record is None:
            return True
        if record.fence != request.fence or (live(record, now) and not request.force):
            return False
        self._remove(record)
        return True

    async def forget_scope(self, request: ForgetScope) -> int:
        with self._lock:
            now = self._clock()
            records = self._scopes.get(request.scope, {}).values()
            doomed = islice((each for each in records if request.force or not live(each, now)), request.limit)
            forgotten = list(doomed)
            for record in forgotten:
                self._remove(record)
            return len(forgotten)

    async def get(self, refs: Sequence[KeyRef]) -> list[Record | None]:
        with self._lock:
            now = self._clock()
            return [self._copy(self._live(ref, now), now) for ref in refs]

    @staticmethod
    def _copy(record: Record | None, now: int) -> Record | None:
        if record is None:
            return None
        return replace(record, now_us=now)

    def _live(self, place: KeyRef | Owned, now: int) -> Record | None:
        record = self._scopes.get(place.scope, {}).get(place.key)
        return None if record is None or gone(record, now) else record

    def _remove(self, record: Record) -> None:
        records = self._scopes[record.scope]
        del records[record.key]
        if not records:
            del self._scopes[record.scope]

    async def purge(self, limit: int) -> int:
        with self._lock:
            now = self._clock()
            removed = 0
            for second in sorted(second for second in self._ends if second <= now // 1_000_000):
                ending = self._ends.pop(second)
                self._filed -= len(ending)
                while ending and removed < limit:
                    removed += self._purge(ending.pop(), now)
                if ending:
                    self._ends[second] += ending
                    self._filed += len(ending)
                    break
            return removed

    def _purge(self, record: Record, now: int) -> int:
        if self._scopes.get(record.scope, {}).get(record.key) is not record:
            return 0
        if gone(record, now):
            self._remove(record)
            return 1
        faded = record.value_until_us is not None and now > record.value_until_us and record.data is not None
        if faded:
            record.data = None
        self._file(record, end_of(record))
        return int(faded)

    async def stats(self) -> Held:
        count = dict.fromkeys(Held.__struct_fields__, 0)
        with self._lock:
            now = self._clock()
            for record in chain.from_iterable(records.values() for records in self._scopes.values()):
                record.now_us = now
                count["expired" if gone(record, now) else record.status] += 1
        return Held(**count)

    def watch(self, ring: OnReleased) -> None:
        """Does nothing: no other process can end a claim."""

    async def close(self) -> None:
        """Nothing to close."""
