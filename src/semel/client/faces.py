"""The clients of a server: one set of verbs, blocking in :class:`Client`, awaited in :class:`AsyncClient`."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import httpx

from semel.bridge import awaited, blocking
from semel.client.details import DetailVerbs
from semel.client.exchange import Exchange
from semel.client.iteration import awaited_iterated, iterated
from semel.client.jobs import JobVerbs
from semel.client.line import AwaitedLine, BlockingLine, Line
from semel.client.runs import RunVerbs
from semel.client.sending import line_options
from semel.client.transport import count
from semel.policy import seconds

TIMEOUT = 30.0
RETRIES = 3
BACKOFF = 1.0


class Verbs(RunVerbs, DetailVerbs, JobVerbs):
    """Every verb, over a line."""

    def __init__(self, line: Line, place: str, timeout: float, retries: int, backoff: float) -> None:
        self.exchange = Exchange(
            line,
            place,
            timeout=seconds("timeout", timeout),
            retries=count("retries", retries),
            backoff=seconds("backoff", backoff, zero=True),
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
        self._engine = Verbs(BlockingLine(**options), self.base_url, timeout, retries, backoff)

    submit = blocking(Verbs.submit)
    submit_many = blocking(Verbs.submit_many)
    submit_and_wait = blocking(Verbs.submit_and_wait)
    get = blocking(Verbs.get)
    wait = blocking(Verbs.wait)
    result = blocking(Verbs.result)
    artifact = blocking(Verbs.artifact)
    save_artifact = blocking(Verbs.save_artifact)
    cancel = blocking(Verbs.cancel)
    retry = blocking(Verbs.retry)
    runs = iterated(Verbs.runs)
    timeline = blocking(Verbs.timeline)
    waiting = blocking(Verbs.waiting)
    logs = iterated(Verbs.logs)
    events = iterated(Verbs.events)
    summary = blocking(Verbs.summary)
    models = blocking(Verbs.models)
    workers = blocking(Verbs.workers)
    usage = blocking(Verbs.usage)
    set_quota = blocking(Verbs.set_quota)
    submit_job = blocking(Verbs.submit_job)
    job = blocking(Verbs.job)
    jobs = iterated(Verbs.jobs)
    cancel_job = blocking(Verbs.cancel_job)
    configs = blocking(Verbs.configs)
    costs = blocking(Verbs.costs)
    close = blocking(Verbs.close)

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
        self._engine = Verbs(AwaitedLine(**options), self.base_url, timeout, retries, backoff)

    submit = awaited(Verbs.submit)
    submit_many = awaited(Verbs.submit_many)
    submit_and_wait = awaited(Verbs.submit_and_wait)
    get = awaited(Verbs.get)
    wait = awaited(Verbs.wait)
    result = awaited(Verbs.result)
    artifact = awaited(Verbs.artifact)
    save_artifact = awaited(Verbs.save_artifact)
    cancel = awaited(Verbs.cancel)
    retry = awaited(Verbs.retry)
    runs = awaited_iterated(Verbs.runs)
    timeline = awaited(Verbs.timeline)
    waiting = awaited(Verbs.waiting)
    logs = awaited_iterated(Verbs.logs)
    events = awaited_iterated(Verbs.events)
    summary = awaited(Verbs.summary)
    models = awaited(Verbs.models)
    workers = awaited(Verbs.workers)
    usage = awaited(Verbs.usage)
    set_quota = awaited(Verbs.set_quota)
    submit_job = awaited(Verbs.submit_job)
    job = awaited(Verbs.job)
    jobs = awaited_iterated(Verbs.jobs)
    cancel_job = awaited(Verbs.cancel_job)
    configs = awaited(Verbs.configs)
    costs = awaited(Verbs.costs)
    close = awaited(Verbs.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"AsyncClient({self.base_url!r})"
