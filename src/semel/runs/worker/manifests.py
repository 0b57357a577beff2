"""Writes what this worker runs on and with, before its first lease and when that changed: never for a single run."""

from __future__ import annotations

import asyncio
import logging
import time

from semel.errors import SemelError, StoreUnavailable
from semel.runs.manifest import LOOK_EVERY, Parts, collector
from semel.runs.models.model import Registry
from semel.runs.store import RunStore, manifests
from semel.runs.worker.run_logs import WorkerLogger

WAIT = 10.0
"""Seconds for which leases wait for git and others that do not answer; after that runs begin without."""


class ManifestWriter:
    """Writes the manifest of a worker. Whatever fails, runs begin: it is written before a later lease."""

    def __init__(self, store: RunStore, registry: Registry, worker: str, log: WorkerLogger) -> None:
        self._store = store
        self._registry = registry
        self._worker = worker
        self._log = log
        self._written: Parts | None = None
        self._next = 0.0
        self._collecting: asyncio.Task[Parts] | None = None
        self._failed = False

    def collect(self) -> None:
        """Begin to collect, in a thread, while the worker starts."""
        if self._collecting is None:
            models = list(self._registry)
            self._collecting = asyncio.create_task(asyncio.to_thread(collector.parts, models))

    def close(self) -> None:
        """Wait for nothing more."""
        if self._collecting is not None:
            self._collecting.cancel()

    async def write_if_changed(self) -> None:
        """Write the manifest unless it is written. The files are looked at every few seconds; else this is one
        comparison.
        """
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + LOOK_EVERY
        try:
            parts = await self._collected()
            if parts != self._written:
                await self._write(parts)
            self._failed = False
        except TimeoutError:
            self._report(f"it is not collected after {WAIT:g} s")
        except StoreUnavailable as error:
            self._store.unavailable(error)
            self._next = 0.0  # with the next lease
        except SemelError as error:
            self._report(str(error))
        except Exception as error:  # noqa: BLE001 -- a manifest never stops a worker
            self._report(repr(error))

    async def _write(self, parts: Parts) -> None:
        store = self._store
        writing = store.write_once(manifests.write, self._worker, parts, store.statement_context)
        await store.runtime.within(WAIT / 2, writing)
        self._written = parts

    async def _collected(self) -> Parts:
        self.collect()
        assert self._collecting is not None
        async with asyncio.timeout(WAIT):
            parts = await asyncio.shield(self._collecting)
        self._collecting = None
        return parts

    def _report(self, why: str) -> None:
        if not self._failed:
            self._log.log(logging.WARNING, f"the manifest of this worker could not be written, retrying: {why}")
        self._failed = True
