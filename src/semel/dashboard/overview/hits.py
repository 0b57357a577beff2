"""How often a submission found a run that was there: counted by all processes of the server since its start.

Above 80 % it works well, by the specification of the idempotency of POST. A low rate is healthy where clients seldom
retry, so it is a warning only below what the operator called low.
"""

from __future__ import annotations

import asyncio
import os
import time

from msgspec import Struct
from prometheus_client import REGISTRY
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from semel.service.telemetry.metrics import FOLDER

GOOD = 0.8
ENOUGH = 100
"""Submissions that a warning needs: fewer prove nothing."""
EVERY = 10.0
"""Seconds between two looks: each reads what every process has counted."""
_COUNTED = ("runs_created_total", "runs_replayed_total")


class Hits(Struct, frozen=True):
    """Submissions that found a run, and those that made one."""

    hit: int
    miss: int
    low: float | None = None
    """The rate below which it is a warning; None: no rate is."""

    @property
    def rate(self) -> float | None:
        """The part that found one; None before the first submission."""
        return self.hit / (self.hit + self.miss) if self.hit + self.miss else None

    @property
    def verdict(self) -> str:
        """What that means, in a word that the stylesheet knows, too."""
        if self.rate is None:
            return ""
        if self.low is not None and self.hit + self.miss >= ENOUGH and self.rate < self.low:
            return "warning"
        return "good" if self.rate > GOOD else "fair"


class Tally:
    """Counts, at most so often."""

    def __init__(self, low: float | None = None) -> None:
        self._low = low
        self._hits = Hits(0, 0, low)
        self._at = -EVERY

    async def hits(self) -> Hits:
        """What was counted lately."""
        if time.monotonic() - self._at >= EVERY:
            self._at = time.monotonic()
            self._hits = await asyncio.to_thread(counted, self._low)
        return self._hits


def counted(low: float | None = None) -> Hits:
    """What all processes together have counted."""
    source: Collector = MultiProcessCollector(None) if FOLDER in os.environ else REGISTRY  # type: ignore[no-untyped-call]
    sums = dict.fromkeys(_COUNTED, 0.0)
    for metric in source.collect():
        for sample in metric.samples:
            if sample.name in sums:
                sums[sample.name] += sample.value
    created, replayed = (round(sums[name]) for name in _COUNTED)
    return Hits(hit=replayed, miss=created, low=low)
