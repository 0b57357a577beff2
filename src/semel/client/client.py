"""The clients of a server: one set of verbs, blocking in :class:`Client`, awaited in :class:`AsyncClient`."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import httpx

from semel._concurrency.sync import async_method, sync_method
from semel._validation import checked_int, checked_seconds
from semel.client.backend import AsyncBackend, HttpBackend, SyncBackend
from semel.client.details import DetailVerbs
from semel.client.http import HttpSession
from semel.client.iteration import awaited_iterated, iterated
from semel.client.jobs import JobVerbs
from semel.client.runs import RunVerbs
from semel.client.sending import line_options

TIMEOUT = 30.0
RETRIES = 3
BACKOFF = 1.0


class ClientMethods(RunVerbs, DetailVerbs, JobVerbs):
    """Every verb, over a line."""

    def __init__(self, line: HttpBackend, place: str, timeout: float, retries: int, backoff: float) -> None:
        self.exchange = HttpSession(
            line,
            place,
            timeout=checked_seconds("timeout", timeout),
            retries=checked_int("retries", retries),
            backoff=checked_seconds("backoff", backoff, zero=True),
        )

    async def close(self) -> None:
        """Close the connections."""
        await self.exchange.line.hang_up()


class Client:
    """A server's runs and jobs: ``Client("http://127.0.0.1:8001")``, or where ``SEMEL_SERVER`` says.

    ``token`` is who one is there (``SEMEL_TOKEN``). ``timeout`` is for one try; one that fails for reasons that may
    pass is followed by ``retries`` more, after ``backoff`` seconds, twice that, and so on. ``transport`` is httpx's,
    for certificates and proxies of one's own. Threads may share a client; close it, or use it in ``with``.
    """

    def __init__(
        self,
        base_url: str | None = None,
        *,
        token: str | None = None,
        timeout: float = TIMEOUT,
        retries: int = RETRIES,
        backoff: float = BACKOFF,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        options = line_options(base_url, token, transport)
        self.base_url = str(options["base_url"]).rstrip("/")
        self._engine = ClientMethods(SyncBackend(**options), self.base_url, timeout, retries, backoff)

    submit = sync_method(ClientMethods.submit)
    submit_many = sync_method(ClientMethods.submit_many)
    submit_and_wait = sync_method(ClientMethods.submit_and_wait)
    get = sync_method(ClientMethods.get)
    wait = sync_method(ClientMethods.wait)
    result = sync_method(ClientMethods.result)
    artifact = sync_method(ClientMethods.artifact)
    save_artifact = sync_method(ClientMethods.save_artifact)
    cancel = sync_method(ClientMethods.cancel)
    retry = sync_method(ClientMethods.retry)
    runs = iterated(ClientMethods.runs)
    timeline = sync_method(ClientMethods.timeline)
    waiting = sync_method(ClientMethods.waiting)
    logs = iterated(ClientMethods.logs)
    events = iterated(ClientMethods.events)
    summary = sync_method(ClientMethods.summary)
    models = sync_method(ClientMethods.models)
    workers = sync_method(ClientMethods.workers)
    usage = sync_method(ClientMethods.usage)
    set_quota = sync_method(ClientMethods.set_quota)
    submit_job = sync_method(ClientMethods.submit_job)
    job = sync_method(ClientMethods.job)
    jobs = iterated(ClientMethods.jobs)
    cancel_job = sync_method(ClientMethods.cancel_job)
    configs = sync_method(ClientMethods.configs)
    costs = sync_method(ClientMethods.costs)
    close = sync_method(ClientMethods.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({self.base_url!r})"


class AsyncClient:
    """As :class:`Client`, for an event loop: what it answers is awaited, or iterated over with ``async for``."""

    def __init__(
        self,
        base_url: str | None = None,
        *,
        token: str | None = None,
        timeout: float = TIMEOUT,
        retries: int = RETRIES,
        backoff: float = BACKOFF,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        options = line_options(base_url, token, transport)
        self.base_url = str(options["base_url"]).rstrip("/")
        self._engine = ClientMethods(AsyncBackend(**options), self.base_url, timeout, retries, backoff)

    submit = async_method(ClientMethods.submit)
    submit_many = async_method(ClientMethods.submit_many)
    submit_and_wait = async_method(ClientMethods.submit_and_wait)
    get = async_method(ClientMethods.get)
    wait = async_method(ClientMethods.wait)
    result = async_method(ClientMethods.result)
    artifact = async_method(ClientMethods.artifact)
    save_artifact = async_method(ClientMethods.save_artifact)
    cancel = async_method(ClientMethods.cancel)
    retry = async_method(ClientMethods.retry)
    runs = awaited_iterated(ClientMethods.runs)
    timeline = async_method(ClientMethods.timeline)
    waiting = async_method(ClientMethods.waiting)
    logs = awaited_iterated(ClientMethods.logs)
    events = awaited_iterated(ClientMethods.events)
    summary = async_method(ClientMethods.summary)
    models = async_method(ClientMethods.models)
    workers = async_method(ClientMethods.workers)
    usage = async_method(ClientMethods.usage)
    set_quota = async_method(ClientMethods.set_quota)
    submit_job = async_method(ClientMethods.submit_job)
    job = async_method(ClientMethods.job)
    jobs = awaited_iterated(ClientMethods.jobs)
    cancel_job = async_method(ClientMethods.cancel_job)
    configs = async_method(ClientMethods.configs)
    costs = async_method(ClientMethods.costs)
    close = async_method(ClientMethods.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"AsyncClient({self.base_url!r})"
