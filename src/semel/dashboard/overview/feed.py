"""Keeps the overviews that somebody has open up to date, with one set of queries for everybody who sees the same.

All callers of a tenant who see all of its runs share one feed; each submitter has their own. While somebody watches, a
feed is refreshed every two seconds, or less often where its queries take long: their share of a core stays small
however large the database is. A feed that nobody watches costs nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from semel.dashboard.overview import queries
from semel.dashboard.overview.chart import Window
from semel.dashboard.overview.queries import Audience
from semel.dashboard.overview.view import PARTS, Count, OverviewView, ReplayCounter, build_view
from semel.dashboard.templating import render_shared
from semel.errors import StoreUnavailable
from semel.runs.types import MICRO, TERMINAL
from semel.service.api.keys import list_unresolved
from semel.service.auth.middleware import Principal
from semel.service.state import ServiceState

REFRESH_EVERY = 2.0
"""Seconds between two refreshes; a view that is younger is shown again."""
PAUSE_FACTOR = 25
"""The pause after a refresh is at least this many times what the refresh took, up to ``MAX_PAUSE``."""
MAX_PAUSE = 10.0
SETTLED_AFTER = 120
"""Seconds after the end of a step in which a slow clock may still add runs to it."""
TICK = 0.2
"""Seconds within which the feed notices that the server is shutting down."""
MAX_FEEDS = 200
COUNT_KEYS_EVERY = 30.0
"""Seconds between two counts of the keys whose outcome is unknown: each reads all keys."""
MAX_KEYS = 100
KEYS_PATIENCE = 0.1
"""Seconds for which a page waits for that count; if it takes longer, the page shows the one before."""

_log = logging.getLogger("semel.service")


class StepCounts:
    """Caches the runs by status of each step of the chart. A step whose runs have all ended is counted only once."""

    def __init__(self) -> None:
        self._steps: dict[int, dict[str, int]] = {}
        self._settled: set[int] = set()
        self._counted_at = 0.0

    def outdated(self, starts: list[int], window: Window) -> list[int]:
        """The steps that must be counted again. Forgets steps that are no longer in the window."""
        for gone in self._steps.keys() - set(starts):
            del self._steps[gone]
            self._settled.discard(gone)
        new = [start for start in starts if start not in self._steps]
        if not new and time.monotonic() - self._counted_at < window.recount_every:
            return []
        return [start for start in starts if start not in self._settled]

    def add(self, counts: dict[int, dict[str, int]], settled_us: int) -> None:
        """Stores the counts. Steps that began before ``settled_us`` get no new runs."""
        self._counted_at = time.monotonic()
        self._steps |= counts
        self._settled |= {start for start, each in counts.items() if start <= settled_us and TERMINAL.issuperset(each)}

    def of(self, starts: list[int]) -> list[dict[str, int]]:
        """The counts of these steps."""
        return [self._steps[start] for start in starts]


class UnknownKeyCounter:
    """Counts a tenant's keys whose outcome is unknown. No page waits for long: the count may be of a while ago."""

    def __init__(self, service: ServiceState, tenant: str) -> None:
        self._service = service
        self._tenant = tenant
        self._latest = Count(0)
        self._task: asyncio.Task[None] | None = None
        self._next = 0.0

    async def latest(self) -> Count:
        """The count, up to ``MAX_KEYS``."""
        if (self._task is None or self._task.done()) and time.monotonic() >= self._next:
            self._task = asyncio.create_task(self._count())
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=KEYS_PATIENCE)
        return self._latest

    async def _count(self) -> None:
        store = self._service.store
        started = time.monotonic()
        with suppress(StoreUnavailable):  # the next count may succeed
            async with self._service.slow_query_lock:
                found = await store.read(list_unresolved, self._tenant, MAX_KEYS + 1, store.statement_context)
            self._latest = Count(min(len(found), MAX_KEYS), len(found) > MAX_KEYS)
        self._next = time.monotonic() + max(COUNT_KEYS_EVERY, PAUSE_FACTOR * (time.monotonic() - started))


class OverviewFeed:
    """The overview of one audience and one window."""

    def __init__(
        self, service: ServiceState, audience: Audience, window: Window, replay_counter: ReplayCounter | None
    ) -> None:
        self.audience = audience
        self.window = window
        self._service = service
        self._replay_counter = replay_counter
        self._view: OverviewView | None = None
        self._refreshed_at = 0.0
        self._pause = 0.0
        self._counts = StepCounts()
        self._unknown_keys = UnknownKeyCounter(service, audience.tenant)
        self._refreshing = asyncio.Lock()
        self._watchers = 0
        self.refreshes = 0
        """How often the database was queried."""
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._rendered: dict[str, dict[str, str]] = {}

    @property
    def is_watched(self) -> bool:
        """Whether somebody has the overview open."""
        return self._watchers > 0

    async def view(self) -> OverviewView:
        """The latest view. Callers who arrive during a refresh share it; it goes on if they leave."""
        if self._view is None or time.monotonic() - self._refreshed_at >= REFRESH_EVERY:
            await asyncio.shield(asyncio.create_task(self._refresh()))
        assert self._view is not None
        return self._view

    async def _refresh(self) -> None:
        async with self._refreshing:
            started = time.monotonic()
            if self._view is not None and started - self._refreshed_at < REFRESH_EVERY:
                return
            self.refreshes += 1
            view = await self._query()
            self._refreshed_at = time.monotonic()
            self._pause = max(REFRESH_EVERY, min(MAX_PAUSE, PAUSE_FACTOR * (self._refreshed_at - started)))
            if view != self._view:
                self._view = view
                self._rendered = {}
                self._wake()

    async def _query(self) -> OverviewView:
        now_us = time.time_ns() // 1000  # the hosts' clock, which ids are made from
        store, window = self._service.store, self.window
        starts = window.starts(now_us)
        if outdated := self._counts.outdated(starts, window):
            step_us = window.step * MICRO
            counted = await store.read(queries.count_runs, self.audience, outdated, step_us)
            self._counts.add(counted, now_us - step_us - SETTLED_AFTER * MICRO)
        snapshot = await store.read(queries.take_snapshot, self.audience, starts[0], now_us, store.statement_context)
        rate = None if self._replay_counter is None else await self._replay_counter.latest()
        keys = await self._unknown_keys.latest() if self.audience.user is None else Count(0)
        counts = self._counts.of(starts)
        return build_view(snapshot, counts, rate, keys, audience=self.audience, window=window, now_us=now_us)

    def render(self, root: str) -> dict[str, str]:
        """The parts of the page as HTML, rendered once for all watchers."""
        if root not in self._rendered:
            self._rendered[root] = {
                part: render_shared(root, f"overview/{part}.html", view=self._view) for part in PARTS
            }
        return self._rendered[root]

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Keeps the feed up to date until the end of the block."""
        self._watchers += 1
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._refresh_loop())
        try:
            yield
        finally:
            self._watchers -= 1

    async def wait_for_change(self, seconds: float) -> None:
        """Waits until the view has changed, for ``seconds`` at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _refresh_loop(self) -> None:
        while self._watchers and not self._service.watch.ending:
            await asyncio.sleep(TICK)
            if time.monotonic() - self._refreshed_at < self._pause:
                continue
            try:
                await self._refresh()
            except Exception as error:  # noqa: BLE001 -- any error: the next refresh may succeed
                if not isinstance(error, StoreUnavailable):  # the store has logged that itself
                    _log.warning("the overview could not be refreshed: %r", error)
                self._refreshed_at = time.monotonic()
                self._pause = REFRESH_EVERY
        self._wake()


class FeedCache:
    """The feeds of a service. LRU: evicts the least recently used that nobody watches."""

    def __init__(self, service: ServiceState) -> None:
        self._service = service
        self._feeds: dict[tuple[Audience, str], OverviewFeed] = {}
        self.replay_counter = ReplayCounter(service.settings.low_replay_rate)

    def of(self, caller: Principal, window: Window) -> OverviewFeed:
        """The feed of the overview that the caller may see."""
        return self.get(Audience(caller.tenant, caller.visible_user), window)

    def get(self, audience: Audience, window: Window) -> OverviewFeed:
        """The feed. Replays are counted for all tenants together, so only the main tenant's operators see them."""
        key = (audience, window.name)
        feed = self._feeds.pop(key, None)
        if feed is None:
            self._evict()
            feed = OverviewFeed(self._service, audience, window, self.replay_counter if audience.is_main else None)
        self._feeds[key] = feed
        return feed

    def _evict(self) -> None:
        idle = [key for key, feed in self._feeds.items() if not feed.is_watched]
        for key in idle[: max(0, len(self._feeds) - MAX_FEEDS + 1)]:
            del self._feeds[key]
