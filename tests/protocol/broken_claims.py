"""Stores of keys with one rule broken each; the first line of each says which."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from protocol.key_store import MINE, NOW, ModelStore
from semel.once.store import ClaimRequest, Complete, Release, Renew
from semel.types import Granted, InFlight, Verdict


class CompletesWithoutFence(ModelStore):
    """Whoever completes is believed."""

    async def complete(self, requests: Sequence[Complete]) -> list[bool]:
        fence = self.record.fence if self.record else 0
        return await super().complete([replace(request, fence=fence) for request in requests])


class CompletesTwice(ModelStore):
    """A late owner overwrites the outcome of the one that took over."""

    async def complete(self, requests: Sequence[Complete]) -> list[bool]:
        (request,) = requests
        if self.record is not None and self.record.state == "completed" and self.record.expires_us >= NOW:
            self.record.data = request.done.data
            return [True]
        return await super().complete(requests)


class RenewsWithoutFence(ModelStore):
    """Whoever renews is believed."""

    async def renew(self, requests: Sequence[Renew]) -> list[int | None]:
        fence = self.record.fence if self.record else 0
        return await super().renew([replace(request, fence=fence) for request in requests])


class ReleasesWithoutFence(ModelStore):
    """A late owner releases the claim of the one that took over."""

    async def release(self, requests: Sequence[Release]) -> list[bool]:
        fence = self.record.fence if self.record else 0
        return await super().release([replace(request, fence=fence) for request in requests])


class TakeoverKeepsFence(ModelStore):
    """Whoever takes over an abandoned key gets the fence of the one that lost it."""

    async def claim(self, requests: Sequence[ClaimRequest]) -> list[Verdict]:
        before = self.record.fence if self.record else 0
        (verdict,) = await super().claim(requests)
        if isinstance(verdict, Granted) and verdict.reason == "abandoned" and self.record is not None:
            self.record.fence = self._fence = before
            return [Granted(replace(verdict.claim, fence=before), verdict.reason)]
        return [verdict]


class PurgeRestartsFences(ModelStore):
    """When its last record is removed, the store counts fences from the start."""

    async def purge(self, limit: int) -> int:
        removed = await super().purge(limit)
        if self.record is None:
            self._fence = 0
        return removed


class CallersClock(ModelStore):
    """A lease is judged by the caller's clock, which is a tick ahead."""

    async def claim(self, requests: Sequence[ClaimRequest]) -> list[Verdict]:
        self._clock = lambda: NOW + 1
        return await super().claim(requests)


class RetentionBeatsLease(ModelStore):
    """The record of a claim is removed when its retention ends, although its owner still works."""

    async def claim(self, requests: Sequence[ClaimRequest]) -> list[Verdict]:
        if self.record is not None and self.record.expires_us < NOW:
            self.record = None
        return await super().claim(requests)


class RetentionFromClaim(ModelStore):
    """An outcome is kept until its claim is one retention old, even if the work took longer than that."""

    async def complete(self, requests: Sequence[Complete]) -> list[bool]:
        expires = self.record.expires_us if self.record else 0
        answers = await super().complete(requests)
        if self.record is not None and self.record.state == "completed":
            self.record.expires_us = expires
        return answers


class OutcomeEndsEarly(ModelStore):
    """An outcome is forgotten at the last tick of its retention."""

    async def claim(self, requests: Sequence[ClaimRequest]) -> list[Verdict]:
        if self.record is not None and self.record.state == "completed" and self.record.expires_us <= NOW:
            self.record = None
        return await super().claim(requests)


class ReplaysForEver(ModelStore):
    """An outcome is replayed for as long as the collector has not removed it."""

    async def claim(self, requests: Sequence[ClaimRequest]) -> list[Verdict]:
        if self.record is not None and self.record.state == "completed":
            self.record.expires_us = max(self.record.expires_us, NOW)
        return await super().claim(requests)


class ForgetsAttempt(ModelStore):
    """A claim that is sent again after a lost reply is taken for somebody else's."""

    async def claim(self, requests: Sequence[ClaimRequest]) -> list[Verdict]:
        if self.record is not None:
            self.record.attempt = "forgotten"
        return await super().claim(requests)


class LeaseNeverEnds(ModelStore):
    """A key whose owner died stays in flight."""

    async def claim(self, requests: Sequence[ClaimRequest]) -> list[Verdict]:
        if self.record is not None and self.record.state == "claimed" and self.record.attempt != MINE:
            return [InFlight(1e-6)]
        return await super().claim(requests)


class ForgetsUnknown(ModelStore):
    """Only the caller's ``on_crash`` counts, not that of the owner that died."""

    async def claim(self, requests: Sequence[ClaimRequest]) -> list[Verdict]:
        if self.record is not None and self.record.attempt != MINE:
            self.record.unknown = False
        return await super().claim(requests)


class IgnoresUnknown(ModelStore):
    """Only the ``on_crash`` of the owner that died counts, not the caller's."""

    async def claim(self, requests: Sequence[ClaimRequest]) -> list[Verdict]:
        (request,) = requests
        verdicts = await super().claim([replace(request, unknown=False)])
        if isinstance(verdicts[0], Granted) and self.record is not None:
            self.record.unknown = request.unknown
        return verdicts
