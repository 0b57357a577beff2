"""What is on open overviews: one look at the database serves all who see the same, and none is made for nobody.

Everybody in a tenant who sees all of its runs looks at one scene, and so does each submitter at their own. While
somebody looks it is made anew every two seconds, or less often where a look takes long: the share of a core that it
costs stays small, however large the database is.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from semel.dashboard.overview import queries
from semel.dashboard.overview.hits import Hits, Tally
from semel.dashboard.overview.queries import Audience
from semel.dashboard.overview.view import PARTS, OverviewView, viewed
from semel.dashboard.overview.windows import Window
from semel.dashboard.templating import render_shared
from semel.errors import StoreUnavailable
from semel.runs.types import MICRO, TERMINAL
from semel.service.auth.middleware import Principal
from semel.service.state import ServiceState

EVERY = 2.0
"""Seconds between two looks, and for so long a page is shown again to the next who comes."""
SHARE = 25
"""A look that took long is followed by a pause of so many times that,"""
LONGEST = 10.0
"""but not of more seconds than that."""
SETTLED_AFTER = 120
"""Seconds after the end of a step in which the slowest clock may still add runs to it."""
TICK = 0.2
"""Seconds after which the end of the server is noticed at the latest."""
MOST = 200
"""Scenes that are remembered: those at which nobody looks are forgotten first."""

_log = logging.getLogger("semel.service")


class RunCounts:
    """How many runs of each step are in which state. Where all are over nothing changes: it is counted once."""

    def __init__(self) -> None:
        self._steps: dict[int, dict[str, int]] = {}
        self._settled: set[int] = set()
        self._counted_at = 0.0

    def todo(self, starts: list[int], window: Window) -> list[int]:
        """Steps that are to be counted; none if they were a moment ago."""
        for gone in self._steps.keys() - set(starts):
            del self._steps[gone]
            self._settled.discard(gone)
        new = [start for start in starts if start not in self._steps]
        if not new and time.monotonic() - self._counted_at < window.every:
            return []
        return [start for start in starts if start not in self._settled]

    def add(self, counts: dict[int, dict[str, int]], over_us: int) -> None:
        """What was counted; steps that began before that time get no new runs."""
        self._counted_at = time.monotonic()
        self._steps |= counts
        self._settled |= {start for start, each in counts.items() if start <= over_us and TERMINAL.issuperset(each)}

    def of(self, starts: list[int]) -> list[dict[str, int]]:
        """Of these steps."""
        return [self._steps[start] for start in starts]


class OverviewFeed:
    """One overview: whose runs, and how far back."""

    def __init__(self, service: ServiceState, whose: Audience, window: Window, tally: Tally | None) -> None:
        self.whose = whose
        self.window = window
        self._service = service
        self._tally = tally
        self._view: OverviewView | None = None
        self._seen_at = 0.0
        self._pause = 0.0
        self._counts = RunCounts()
        self._looking = asyncio.Lock()
        self._lookers = 0
        self.looks = 0
        """How often the database was asked."""
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._drawn: dict[str, dict[str, str]] = {}

    @property
    def watched(self) -> bool:
        """Whether somebody looks at the moment."""
        return self._lookers > 0

    async def view(self) -> OverviewView:
        """As it is, or was a moment ago. One look is made for all who come meanwhile, and goes on if they leave."""
        if self._view is None or time.monotonic() - self._seen_at >= EVERY:
            await asyncio.shield(asyncio.create_task(self._look()))
        assert self._view is not None
        return self._view

    async def _look(self) -> None:
        async with self._looking:
            started = time.monotonic()
            if self._view is not None and started - self._seen_at < EVERY:
                return
            self.looks += 1
            view = await self._asked()
            self._seen_at = time.monotonic()
            self._pause = max(EVERY, min(LONGEST, SHARE * (self._seen_at - started)))
            if view != self._view:
                self._view = view
                self._drawn = {}
                self._wake()

    async def _asked(self) -> OverviewView:
        now_us = time.time_ns() // 1000  # ids are made by the clocks of hosts
        read = self._service.store.read
        counts = await self._counted(now_us)
        look = await read(queries.take_snapshot, self.whose, self.window, now_us, self._service.store.terms)
        hits: Hits | None = None if self._tally is None else await self._tally.hits()
        return viewed(look, counts, hits, whose=self.whose, window=self.window, now_us=now_us)

    async def _counted(self, now_us: int) -> list[dict[str, int]]:
        """The runs of each step of the window."""
        starts = self.window.starts(now_us)
        todo = self._counts.todo(starts, self.window)
        if todo:
            step_us = self.window.step * MICRO
            new = await self._service.store.read(queries.counts, self.whose, todo, step_us)
            self._counts.add(new, now_us - step_us - SETTLED_AFTER * MICRO)
        return self._counts.of(starts)

    def drawn(self, root: str) -> dict[str, str]:
        """The parts of the page as HTML, drawn once for all who look."""
        if root not in self._drawn:
            self._drawn[root] = {part: render_shared(root, f"overview/{part}.html", view=self._view) for part in PARTS}
        return self._drawn[root]

    @contextmanager
    def looked_at(self) -> Iterator[None]:
        """Somebody looks, for the time of the block."""
        self._lookers += 1
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._look_on())
        try:
            yield
        finally:
            self._lookers -= 1

    async def change(self, seconds: float) -> None:
        """Wait until something has changed, for so long at the most."""
        changed = self._changed
        try:
            async with asyncio.timeout(seconds):
                await changed.wait()
        except TimeoutError:
            pass

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _look_on(self) -> None:
        while self._lookers and not self._service.watch.ending:
            await asyncio.sleep(TICK)
            if time.monotonic() - self._seen_at < self._pause:
                continue
            try:
                await self._look()
            except Exception as error:  # noqa: BLE001 -- whatever it was, it is tried again: somebody looks
                if not isinstance(error, StoreUnavailable):  # which the ledger has reported
                    _log.warning("the overview could not be made anew: %r", error)
                self._seen_at = time.monotonic()
                self._pause = EVERY
        self._wake()


class FeedCache:
    """The overviews of a service. Those that nobody watches are evicted first."""

    def __init__(self, service: ServiceState) -> None:
        self._service = service
        self._feeds: dict[tuple[Audience, str], OverviewFeed] = {}
        self._tally = Tally(service.settings.low_replay_rate)

    def of(self, caller: Principal, window: Window) -> OverviewFeed:
        """The overview that the caller sees."""
        return self.feed(Audience(caller.tenant, caller.visible_user), window)

    def feed(self, whose: Audience, window: Window) -> OverviewFeed:
        """An overview. The replay rate is of all tenants together, so only operators of the main one see it."""
        key = (whose, window.name)
        found = self._feeds.pop(key, None)
        if found is None:
            self._evict()
            shared = whose.user is None and not whose.tenant
            found = OverviewFeed(self._service, whose, window, self._tally if shared else None)
        self._feeds[key] = found
        return found

    def _evict(self) -> None:
        idle = [key for key, feed in self._feeds.items() if not feed.watched]
        for key in idle[: max(0, len(self._feeds) - MOST + 1)]:
            del self._feeds[key]
