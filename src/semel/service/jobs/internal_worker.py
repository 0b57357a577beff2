"""The service's own work, as runs: what needs this server, such as its files and its providers, is done here.

A small worker in the server's event loop serves a queue of its own, so that this work, too, is leased, fenced,
retried and found again when a server dies. Nobody else is told of that queue, and nobody else submits to it.
"""

from __future__ import annotations

import asyncio
import copy
import threading
from contextlib import suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING

from semel.runs.app import App
from semel.runs.models.model import Registry
from semel.runs.types import INTERNAL_PREFIX, INTERNAL_QUEUE
from semel.runs.worker import Worker

if TYPE_CHECKING:
    from semel.service.jobs.uploads import UploadReaper
    from semel.service.state import ServiceState

QUEUE = INTERNAL_QUEUE
"""The queue of the service's own models. Their names begin with ``semel.``"""

_here: ContextVar[InternalWorker] = ContextVar("semel_internal_work")


class InternalWorker:
    """The worker of the service's own runs, while the server is up."""

    def __init__(self, service: ServiceState) -> None:
        self.service = service
        self.stopping = threading.Event()
        """What works in a thread looks at it: a thread cannot be stopped from outside."""
        self._worker: Worker | None = None
        self._task: asyncio.Task[None] | None = None
        self._settler: UploadReaper | None = None
        self._installed = False

    async def open(self) -> None:
        """Begin to work."""
        from semel.service.jobs import uploads

        if not self._installed:
            self._installed = True
            uploads.install(self.service.app)
        self.stopping.clear()
        self._worker = Worker(
            _with_own_models(self.service.app), queues=[QUEUE], name="service", processes=0, threads=4, concurrency=100
        )
        _here.set(self)
        self._task = asyncio.create_task(self._worker.serve())
        self._settler = uploads.UploadReaper(self.service.store, self._worker.id)
        self._settler.start()

    async def close(self) -> None:
        """Stop, and give back what is not done."""
        self.stopping.set()
        if self._settler is not None:
            await self._settler.end()
        if self._worker is not None and self._task is not None:
            self._worker.stop()
            self._worker.stop()
            with suppress(asyncio.CancelledError):
                await self._task


def here() -> InternalWorker:
    """For the service's own models: the server that this one runs in."""
    return _here.get()


def _with_own_models(app: App) -> App:
    """The app as a worker sees it that knows the service's own models only."""
    alike = copy.copy(app)
    for made in ("aio", "_engine"):
        alike.__dict__.pop(made, None)
    alike.registry = Registry()
    for model in app.registry:
        if model.name.startswith(INTERNAL_PREFIX):
            alike.registry.add(model)
    return alike
