"""The state of a service, which its handlers work with: an app's runs, and every collaborator around them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol, TypeAlias

from litestar.di import NamedDependency
from litestar.params import SkipValidation

from semel.errors import RunNotFound
from semel.once.client import AsyncOnce
from semel.runs.app import App
from semel.runs.engine import RunEngine
from semel.runs.store import RunStore
from semel.runs.types import Run
from semel.service.auth.limits import ConcurrencyLimit
from semel.service.auth.middleware import Authenticator, Principal
from semel.service.jobs.configs import Configs
from semel.service.jobs.internal_worker import InternalWorker
from semel.service.jobs.providers import load_providers
from semel.service.run_actions import RunActions
from semel.service.run_watch import RunWatch
from semel.service.settings import Settings
from semel.service.telemetry.access_log import add_run_to_access_log
from semel.service.telemetry.health import HealthCheck
from semel.service.telemetry.metrics import MetricsPage, run_metrics
from semel.service.webhooks.dispatcher import WebhookDispatcher

if TYPE_CHECKING:
    from semel.dashboard.overview.feed import FeedCache


class Component(Protocol):
    """Something that runs while the server is up."""

    async def open(self) -> None:
        """Start."""

    async def close(self) -> None:
        """Stop."""


class ServiceState:
    """Owns every collaborator of a service, and opens and closes them in order."""

    overview_feeds: FeedCache
    """Set by the dashboard, which is a layer above this one."""

    def __init__(self, app: App, settings: Settings) -> None:
        self.app = app
        self.settings = settings
        self.engine: RunEngine = app.aio._engine
        self.store: RunStore = self.engine.store
        self.store.outage = app.outage
        self.once = AsyncOnce(self.store.key_store(), collect=False)
        """The engine of keys on the app's database, over the same connections."""
        self.auth = Authenticator(self.store, settings)
        self.watch = RunWatch(self.store)
        self.actions = RunActions(self)
        self.wait_slots = ConcurrencyLimit(settings.max_waiting)
        self.slow_query_lock = asyncio.Lock()
        """Held during slow queries, so that one at most runs at a time."""
        self.configs = Configs(self.store, settings.configs, self._has_demo)
        self.health = HealthCheck(self)
        self.metrics = MetricsPage(self.store)
        app.hooks.add(run_metrics())
        self.internal_worker = InternalWorker(self)
        self.providers = load_providers()
        """The providers of jobs, by name."""
        self.components: list[Component] = [
            self.internal_worker,
            self.watch,
            self.actions,
            WebhookDispatcher(self),
        ]
        """Opened in this order, and closed in reverse. A provider inserts its own when it is installed."""
        self._opening = asyncio.Lock()
        self._installed = False
        self._open = False

    async def ensure_open(self) -> None:
        """Open everything, once: a server that mounts the service may send no lifespan events."""
        if self._open:
            return
        async with self._opening:
            if not self._open:
                await self.store.open()
                self._install_providers()
                for component in self.components:
                    await component.open()
                self._open = True

    def _install_providers(self) -> None:
        if not self._installed:
            self._installed = True
            for provider in self.providers.values():
                provider.install(self)

    async def close(self) -> None:
        """Close everything."""
        self._open = False
        await self.auth.close()
        for component in reversed(self.components):
            await component.close()
        await self.once.close()
        await self.engine.close()

    async def run(self, run_id: str, caller: Principal) -> Run:
        """The run, if the caller may see it; else RunNotFound, as if it did not exist."""
        run = await self.engine.get(run_id, tenant=caller.tenant)
        if caller.visible_user is not None and run.user != caller.visible_user:
            raise RunNotFound(f"there is no run {run_id!r}")
        add_run_to_access_log(run.id, run)
        return run

    def _has_demo(self) -> bool:
        return any(model.reference.startswith("semel.demo:") for model in self.app.registry)


CurrentState: TypeAlias = NamedDependency[SkipValidation[ServiceState]]
CurrentPrincipal: TypeAlias = NamedDependency[SkipValidation[Principal]]
