"""The stranger's store with one mistake each, as they are made in earnest."""

import time
from collections.abc import Sequence

from msgspec.structs import replace

from acceptance.own_store import DictStore
from semel import codec
from semel.once.rules import gone
from semel.once.store import ClaimRequest, Clock, Complete, KeyRef, Owned, Release
from semel.types import Record, Verdict


class NoFenceCheck(DictStore):
    """Whoever knows the key may write."""

    def _owned(self, request: Owned, now: int) -> Record | None:
        return self._live(request, now)


class CheckThenAct(DictStore):
    """Looks, and writes a moment later, with nothing to hold the two together."""

    async def claim(self, requests: Sequence[ClaimRequest]) -> list[Verdict]:
        return [self._claim(request, self._clock()) for request in requests]

    def _claim(self, request: ClaimRequest, now: int) -> Verdict:
        before = self._records.get((request.scope, request.key))
        time.sleep(0.001)
        if before is None:
            self._records.pop((request.scope, request.key), None)
        return super()._claim(request, now)


class NeverExpires(DictStore):
    """Leaves expiry to the collector."""

    def _live(self, place: KeyRef | Owned, now: int) -> Record | None:
        return self._records.get((place.scope, place.key))

    def _claim(self, request: ClaimRequest, now: int) -> Verdict:
        previous = self._live(KeyRef(request.scope, request.key), now)
        return super()._claim(request, now if previous is None else min(now, previous.expires_us))


class OwnClock(DictStore):
    """Asks the host for the time instead of the clock that it was given."""

    def __init__(self, clock: Clock | None = None) -> None:
        super().__init__()


class Overwrites(DictStore):
    """The last result wins."""

    async def complete(self, requests: Sequence[Complete]) -> list[bool]:
        for request in requests:
            record = self._owned(request, self._clock())
            if record is not None:
                record.state = "claimed"
        return await super().complete(requests)


class LosesFalsyValues(DictStore):
    """``if value:``"""

    async def complete(self, requests: Sequence[Complete]) -> list[bool]:
        falsy = list(map(codec.encode, (0, False, "", [], {})))
        for request in requests:
            if request.done.data in falsy:
                request.done.data = codec.encode(None)
        return await super().complete(requests)


class CountsFencesInTheRecord(DictStore):
    """One more than the record's, so it starts again when the record is removed."""

    def _claim(self, request: ClaimRequest, now: int) -> Verdict:
        previous = self._records.get((request.scope, request.key))
        self._last_fence = 0 if previous is None else previous.fence
        return super()._claim(request, now)


class DoesNotKnowItself(DictStore):
    """Ignores the attempt, so a claim that is sent again meets itself."""

    def _claim(self, request: ClaimRequest, now: int) -> Verdict:
        return super()._claim(replace(request, attempt=f"{request.attempt}-{time.monotonic_ns()}"), now)


class ReleasesForOthers(DictStore):
    """A late release frees the key under its new owner's feet."""

    async def release(self, requests: Sequence[Release]) -> list[bool]:
        return [self._records.pop((each.scope, each.key), None) is not None or True for each in requests]


class JoinsNames(DictStore):
    """One text for scope and key."""

    def _claim(self, request: ClaimRequest, now: int) -> Verdict:
        scope, _, key = f"{request.scope}:{request.key}".partition(":")
        return super()._claim(replace(request, scope=scope, key=key), now)

    def _live(self, place: KeyRef | Owned, now: int) -> Record | None:
        scope, _, key = f"{place.scope}:{place.key}".partition(":")
        return super()._live(KeyRef(scope, key), now)


class PurgesTheLiving(DictStore):
    """Goes by retention alone, whoever still works."""

    async def purge(self, limit: int) -> int:
        now = self._clock()
        doomed = [place for place, record in self._records.items() if now > record.expires_us][:limit]
        for place in doomed:
            del self._records[place]
        return len(doomed)


class IgnoresContent(DictStore):
    """Never compares fingerprints."""

    def _claim(self, request: ClaimRequest, now: int) -> Verdict:
        return super()._claim(replace(request, fingerprint=""), now)


class ExtendsOnReplay(DictStore):
    """Every look makes the key live longer."""

    def _claim(self, request: ClaimRequest, now: int) -> Verdict:
        previous = self._records.get((request.scope, request.key))
        if previous is not None and previous.state == "completed" and not gone(previous, now):
            previous.expires_us = now + request.ttl_us
        return super()._claim(request, now)


BROKEN = (
    NoFenceCheck,
    CheckThenAct,
    NeverExpires,
    OwnClock,
    Overwrites,
    LosesFalsyValues,
    CountsFencesInTheRecord,
    DoesNotKnowItself,
    ReleasesForOthers,
    JoinsNames,
    PurgesTheLiving,
    IgnoresContent,
    ExtendsOnReplay,
)
