"""What the handlers of the service work with."""

from __future__ import annotations

import asyncio
from typing import Protocol, TypeAlias

from litestar.di import NamedDependency
from litestar.params import SkipValidation

from semel.errors import RunNotFound
from semel.once.client import AsyncOnce
from semel.runs.app import App
from semel.runs.store import RunStore
from semel.runs.types import Run
from semel.service.auth.limits import ConcurrencyLimit
from semel.service.auth.middleware import Authenticator, Principal
from semel.service.jobs.internal_worker import InternalWork
from semel.service.jobs.providers import load_providers
from semel.service.run_watch import Watch
from semel.service.settings import Settings
from semel.service.telemetry.access_log import concerns
from semel.service.webhooks.dispatcher import WebhookDispatcher


class Component(Protocol):
    """Something that works while the server is up."""

    async def open(self) -> None:
        """Begin."""

    async def close(self) -> None:
        """End."""


class ServiceState:
    """An app's runs, and who may have them."""

    def __init__(self, app: App, settings: Settings) -> None:
        self.app = app
        self.settings = settings
        self.engine = app.aio
        self.store: RunStore = app.aio.ledger
        self.store.outage = app.outage
        self.once = AsyncOnce(self.store.key_store(), collect=False)
        """The claim engine on the app's database, over the same connections."""
        self.auth = Authenticator(self.store, settings)
        self.watch = Watch(self.store)
        self.wait_slots = ConcurrencyLimit(settings.max_waiting)
        self.slow_query_lock = asyncio.Lock()
        """Held by who asks much of the database at once, so that all others wait for one such question at the most."""
        self.internal = InternalWork(self)
        self.providers = load_providers()
        """Who can be asked to run a job, by name."""
        self.components: list[Component] = [self.internal, self.watch, WebhookDispatcher(self)]
        self._opening: asyncio.Lock | None = None
        self._open = False

    async def ensure_open(self) -> None:
        """Open it, if that has not happened: a server that mounts us may not tell of its start."""
        if self._open:
            return
        if self._opening is None:
            self._opening = asyncio.Lock()
        async with self._opening:
            if not self._open:
                await self.store.open()
                for part in self.components:
                    await part.open()
                self._open = True

    async def close(self) -> None:
        """Give everything back."""
        self._open = False
        await self.auth.close()
        for part in reversed(self.components):
            await part.close()
        await self.once.close()
        await self.engine.close()

    async def run(self, run_id: str, caller: Principal) -> Run:
        """The run, if it is the caller's to see: of somebody else's they do not learn that it is there."""
        run = await self.engine.get(run_id, tenant=caller.tenant)
        if caller.visible_user is not None and run.user != caller.visible_user:
            raise RunNotFound(f"there is no run {run_id!r}")
        concerns(run.id, run)
        return run


CurrentState: TypeAlias = NamedDependency[SkipValidation[ServiceState]]
CurrentPrincipal: TypeAlias = NamedDependency[SkipValidation[Principal]]
