"""The clients of a server: the same methods, blocking in :class:`Client` and awaited in :class:`AsyncClient`."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import httpx

from semel._concurrency.sync import async_iterator, async_method, sync_iterator, sync_method
from semel._validation import checked_int, checked_seconds
from semel.client.http import AsyncClientBackend, ClientBackend, HttpSession, SyncClientBackend, httpx_options
from semel.client.jobs import JobMethods
from semel.client.runs import RunMethods

TIMEOUT = 30.0
RETRIES = 3
BACKOFF = 1.0


class ClientMethods(RunMethods, JobMethods):
    """Every method of the clients, over a blocking or an async backend."""

    def __init__(self, backend: ClientBackend, url: str, timeout: float, retries: int, backoff: float) -> None:
        self.session = HttpSession(
            backend,
            url,
            timeout=checked_seconds("timeout", timeout),
            retries=checked_int("retries", retries),
            backoff=checked_seconds("backoff", backoff, zero=True),
        )

    async def close(self) -> None:
        """Close the connections."""
        await self.session.backend.close()


class Client:
    """A client of a semel server: ``Client("http://127.0.0.1:8001")``. Without a URL it uses ``SEMEL_SERVER``.

    ``token`` authenticates the caller (default: ``SEMEL_TOKEN``). ``timeout`` is for one attempt. A failed attempt is
    repeated up to ``retries`` times if it may succeed later, after ``backoff`` seconds, then twice that, and so on.
    ``transport`` is an httpx transport, for custom certificates and proxies. Threads may share a client; close it, or
    use it in ``with``.
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
        options = httpx_options(base_url, token, transport)
        self.base_url = str(options["base_url"]).rstrip("/")
        self._engine = ClientMethods(SyncClientBackend(**options), self.base_url, timeout, retries, backoff)

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
    act = sync_method(ClientMethods.act)
    action = sync_method(ClientMethods.action)
    actions = sync_method(ClientMethods.actions)
    runs = sync_iterator(ClientMethods.runs)
    timeline = sync_method(ClientMethods.timeline)
    waiting = sync_method(ClientMethods.waiting)
    manifest = sync_method(ClientMethods.manifest)
    diff = sync_method(ClientMethods.diff)
    drift = sync_method(ClientMethods.drift)
    rerun = sync_method(ClientMethods.rerun)
    logs = sync_iterator(ClientMethods.logs)
    events = sync_iterator(ClientMethods.events)
    summary = sync_method(ClientMethods.summary)
    models = sync_method(ClientMethods.models)
    workers = sync_method(ClientMethods.workers)
    pauses = sync_method(ClientMethods.pauses)
    pause = sync_method(ClientMethods.pause)
    resume = sync_method(ClientMethods.resume)
    usage = sync_method(ClientMethods.usage)
    set_quota = sync_method(ClientMethods.set_quota)
    submit_job = sync_method(ClientMethods.submit_job)
    job = sync_method(ClientMethods.job)
    audit_log = sync_iterator(ClientMethods.audit_log)
    jobs = sync_iterator(ClientMethods.jobs)
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
    """Same as :class:`Client`, for an event loop: await its methods, or iterate over them with ``async for``."""

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
        options = httpx_options(base_url, token, transport)
        self.base_url = str(options["base_url"]).rstrip("/")
        self._engine = ClientMethods(AsyncClientBackend(**options), self.base_url, timeout, retries, backoff)

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
    act = async_method(ClientMethods.act)
    action = async_method(ClientMethods.action)
    actions = async_method(ClientMethods.actions)
    runs = async_iterator(ClientMethods.runs)
    timeline = async_method(ClientMethods.timeline)
    waiting = async_method(ClientMethods.waiting)
    manifest = async_method(ClientMethods.manifest)
    diff = async_method(ClientMethods.diff)
    drift = async_method(ClientMethods.drift)
    rerun = async_method(ClientMethods.rerun)
    logs = async_iterator(ClientMethods.logs)
    events = async_iterator(ClientMethods.events)
    summary = async_method(ClientMethods.summary)
    models = async_method(ClientMethods.models)
    workers = async_method(ClientMethods.workers)
    pauses = async_method(ClientMethods.pauses)
    pause = async_method(ClientMethods.pause)
    resume = async_method(ClientMethods.resume)
    usage = async_method(ClientMethods.usage)
    set_quota = async_method(ClientMethods.set_quota)
    submit_job = async_method(ClientMethods.submit_job)
    job = async_method(ClientMethods.job)
    audit_log = async_iterator(ClientMethods.audit_log)
    jobs = async_iterator(ClientMethods.jobs)
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
