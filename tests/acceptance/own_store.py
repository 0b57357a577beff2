"""A store written by a stranger from the contract alone: a dict and a lock."""

import threading
import time
from collections.abc import Sequence

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
    Owned,
    Release,
    Renew,
)
from semel.types import Granted, Held, Record, Verdict


class DictStore:
    """Keeps records in a dict."""

    coalesce = False
    expires_itself = False

    def __init__(self, clock: Clock = lambda: time.time_ns() // 1000) -> None:
        self._clock = clock
        self._records: dict[tuple[str, str], Record] = {}
        self._last_fence = 0
        self._lock = threading.Lock()

    async def open(self) -> None:
        """Nothing to do."""

    async def claim(self, requests: Sequence[ClaimRequest]) -> list[Verdict]:
        with self._lock:
            return [self._claim(request, self._clock()) for request in requests]

    def _claim(self, request: ClaimRequest, now: int) -> Verdict:
        previous = self._records.get((request.scope, request.key))
        rewind(previous, now)
        answer = judge(previous, request, now)
        if not isinstance(answer, str):
            return answer
        self._last_fence += 1
        record = grant(request, previous, answer, self._last_fence, now)
        self._records[request.scope, request.key] = record
        return Granted(claim_of(record), answer)

    async def renew(self, requests: Sequence[Renew]) -> list[int | None]:
        with self._lock:
            now = self._clock()
            answers: list[int | None] = []
            for request in requests:
                record = self._owned(request, now)
                if record is None or record.state != "claimed":
                    answers.append(None)
                    continue
                record.lease_us, record.lease_until_us = request.lease_us, now + request.lease_us
                answers.append(record.lease_until_us)
            return answers

    async def complete(self, requests: Sequence[Complete]) -> list[bool]:
        with self._lock:
            now = self._clock()
            answers = []
            for request in requests:
                record = self._owned(request, now)
                if record is not None and record.state == "claimed":
                    finish(record, request.done, now)
                answers.append(record is not None)
            return answers

    async def release(self, requests: Sequence[Release]) -> list[bool]:
        with self._lock:
            now = self._clock()
            answers = []
            for request in requests:
                record = self._owned(request, now)
                if record is not None and record.state == "claimed":
                    del self._records[request.scope, request.key]
                answers.append(record is not None or self._live(request, now) is None)
            return answers

    async def forget(self, requests: Sequence[Forget]) -> list[bool]:
        with self._lock:
            now = self._clock()
            answers = []
            for request in requests:
                record = self._live(request, now)
                ours = record is not None and record.fence == request.fence
                if record is not None and ours and (request.force or not live(record, now)):
                    record = self._records.pop((request.scope, request.key)) and None
                answers.append(record is None)
            return answers

    async def forget_scope(self, request: ForgetScope) -> int:
        with self._lock:
            now = self._clock()
            doomed = [
                place
                for place, record in self._records.items()
                if record.scope == request.scope and (request.force or not live(record, now))
            ][: request.limit]
            for place in doomed:
                del self._records[place]
            return len(doomed)

    async def get(self, refs: Sequence[KeyRef]) -> list[Record | None]:
        with self._lock:
            now = self._clock()
            found = [self._live(ref, now) for ref in refs]
            return [None if record is None else replace(record, now_us=now) for record in found]

    async def purge(self, limit: int) -> int:
        with self._lock:
            now = self._clock()
            doomed = [place for place, record in self._records.items() if gone(record, now)][:limit]
            for place in doomed:
                del self._records[place]
            faded = [
                record
                for record in self._records.values()
                if record.data is not None and record.value_until_us is not None and now > record.value_until_us
            ][: limit - len(doomed)]
            for record in faded:
                record.data = None
            return len(doomed) + len(faded)

    async def stats(self) -> Held:
        with self._lock:
            now = self._clock()
            count = dict.fromkeys(Held.__struct_fields__, 0)
            for record in self._records.values():
                count["expired" if gone(record, now) else replace(record, now_us=now).status] += 1
            return Held(**count)

    def watch(self, ring: OnReleased) -> None:
        """Waiters poll."""

    async def close(self) -> None:
        """Nothing to do."""

    def _live(self, place: KeyRef | Owned, now: int) -> Record | None:
        record = self._records.get((place.scope, place.key))
        return None if record is None or gone(record, now) else record

    def _owned(self, request: Owned, now: int) -> Record | None:
        record = self._live(request, now)
        return record if record is not None and record.fence == request.fence else None
