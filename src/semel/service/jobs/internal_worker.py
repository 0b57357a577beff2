"""The service's own runs, such as uploads and predictions of providers, which need this server.

A small worker in the server's event loop serves a queue of its own, so that this work, too, is leased, fenced, retried,
and recovered when a server dies. No other worker serves that queue, and callers cannot submit to it.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
from contextlib import suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING

from semel.errors import StoreUnavailable
from semel.runs.app import App
from semel.runs.models.model import Registry
from semel.runs.types import INTERNAL_PREFIX, INTERNAL_QUEUE
from semel.runs.worker import Worker

if TYPE_CHECKING:
    from semel.service.jobs.uploads import UploadReaper
    from semel.service.state import ServiceState

QUEUE = INTERNAL_QUEUE
"""The queue of the service's own models. Their names begin with ``semel.``"""

RESTART_AFTER = 0.5
"""Seconds until a worker that failed starts again."""

_log = logging.getLogger("semel.service")
_current: ContextVar[InternalWorker] = ContextVar("semel_internal_work")


class InternalWorker:
    """The worker of the service's own runs, while the server is up."""

    def __init__(self, service: ServiceState) -> None:
        self.service = service
        self.stopping = threading.Event()
        """Checked by runs in threads, which cannot be cancelled."""
        self._worker: Worker | None = None
        self._task: asyncio.Task[None] | None = None
        self._settler: UploadReaper | None = None
        self._installed = False

    async def open(self) -> None:
        """Start."""
        from semel.service.jobs import uploads

        if not self._installed:
            self._installed = True
            uploads.install(self.service.app)
        self.stopping.clear()
        self._worker = Worker(
            _with_own_models(self.service.app), queues=[QUEUE], name="service", processes=0, threads=4, concurrency=100
        )
        _current.set(self)
        self._task = asyncio.create_task(self._serve(self._worker))
        self._settler = uploads.UploadReaper(self.service.store, self._worker.id)
        self._settler.start()

    async def _serve(self, worker: Worker) -> None:
        """Work until stopped. A worker that failed starts again: no other one serves this queue."""
        while not self.stopping.is_set():
            try:
                await worker.serve()
            except StoreUnavailable:  # the store has logged it
                await asyncio.sleep(RESTART_AFTER)
            except Exception as error:  # noqa: BLE001 -- the next start may succeed
                _log.error("the worker of the server's own runs failed; it starts again: %s", error, exc_info=error)
                await asyncio.sleep(RESTART_AFTER)

    async def close(self) -> None:
        """Stop, and give unfinished runs back."""
        self.stopping.set()
        if self._settler is not None:
            await self._settler.end()
        if self._worker is not None and self._task is not None:
            self._worker.stop()
            self._worker.stop()
            with suppress(asyncio.CancelledError):
                await self._task


def current_worker() -> InternalWorker:
    """The worker that executes the current run; for the service's own models."""
    return _current.get()


def _with_own_models(app: App) -> App:
    """The app with the service's own models only."""
    own = copy.copy(app)
    for made in ("aio", "_engine"):
        own.__dict__.pop(made, None)
    own.registry = Registry()
    for model in app.registry:
        if model.name.startswith(INTERNAL_PREFIX):
            own.registry.add(model)
    return own
