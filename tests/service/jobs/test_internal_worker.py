"""The worker of the server's own runs: it works again after every failure, because no other worker serves its queue."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from semel import App
from semel.errors import StoreUnavailable
from semel.runs.store import queries
from semel.runs.worker import Worker
from semel.service import Settings
from semel.service.jobs.internal_worker import InternalWorker
from semel.service.state import ServiceState
from support.proxies import outage_proxy

PATIENCE = 60.0


@pytest.mark.parametrize("failure", [StoreUnavailable, RuntimeError])
def test_the_worker_starts_again_whatever_ended_it(
    migrated_postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: type[Exception]
) -> None:
    """The database goes away just before the worker opens it, for longer than calls are retried."""
    failures: list[Exception] = []
    failed_twice = asyncio.Event()
    serve = Worker.serve

    async def noted(worker: Worker) -> None:
        try:
            await serve(worker)
        except StoreUnavailable as error:
            failures.append(error)
            if len(failures) == 2:
                failed_twice.set()
            raise failure("as told") from error

    monkeypatch.setattr(Worker, "serve", noted)

    async def scenario(url: str, up: Callable[[], None], down: Callable[[], None]) -> None:
        up()
        service = ServiceState(App(url, artifacts=tmp_path, retry_for=0.2), Settings())
        await service.store.open()
        down()
        worker = InternalWorker(service)
        await worker.open()
        await failed_twice.wait()
        up()
        context = service.store.statement_context
        while not any(each.alive for each in await service.store.read(queries.list_workers, context)):  # noqa: ASYNC110 -- in the database
            await asyncio.sleep(0.02)
        await worker.close()
        await service.close()

    with outage_proxy(migrated_postgres_url) as (proxy, url):
        asyncio.run(asyncio.wait_for(scenario(url, proxy.up, proxy.down), PATIENCE))
