"""The way to the server, over httpx: blocking, and awaited. The blocking one never suspends, so that ``bridge`` can
drive what is written over it.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, ParamSpec, Protocol, TypeVar

import anyio
import httpx
from anyio import to_thread

from semel._concurrency.fork import survive_fork
from semel._concurrency.sync import LoopGuard

P = ParamSpec("P")
R = TypeVar("R")


class HttpBackend(Protocol):
    """Sends requests, and reads what comes back piece by piece."""

    async def send(self, method: str, path: str, **request: Any) -> httpx.Response:
        """The head of the answer; its body is read with ``parts``."""

    def parts(self, response: httpx.Response) -> Any:
        """The body, to be asked for its pieces with ``next``."""

    async def next(self, parts: Any) -> bytes | None:
        """The next piece, None at the end."""

    async def close(self, response: httpx.Response) -> None:
        """Done with the answer."""

    async def pause(self, duration: float) -> None:
        """Wait so many seconds."""

    async def apart(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Do what blocks."""

    async def hang_up(self) -> None:
        """Close the connections."""


class SyncBackend:
    """Over ``httpx.Client``, in the caller's thread; several threads may share it."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._client = httpx.Client(**options)
        self.pause_now: Callable[[float], None] = time.sleep
        survive_fork(self)

    def after_fork(self) -> None:
        """The parent's connections are the parent's."""
        self._client = httpx.Client(**self._options)

    async def send(self, method: str, path: str, **request: Any) -> httpx.Response:
        """See :class:`Line`."""
        return self._client.send(self._client.build_request(method, path, **request), stream=True)

    def parts(self, response: httpx.Response) -> Iterator[bytes]:
        """See :class:`Line`."""
        return response.iter_bytes()

    async def next(self, parts: Iterator[bytes]) -> bytes | None:
        """See :class:`Line`."""
        return next(parts, None)

    async def close(self, response: httpx.Response) -> None:
        """See :class:`Line`."""
        response.close()

    async def pause(self, duration: float) -> None:
        """See :class:`Line`."""
        self.pause_now(duration)

    async def apart(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """See :class:`Line`."""
        return work(*args, **kwargs)

    async def hang_up(self) -> None:
        """See :class:`Line`."""
        self._client.close()


class AsyncBackend:
    """Over ``httpx.AsyncClient``, in one event loop at a time."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._client: httpx.AsyncClient | None = None
        self._home = LoopGuard(self._forget)
        survive_fork(self)

    def after_fork(self) -> None:
        """The parent's connections are the parent's."""
        self._forget()

    def _forget(self) -> None:
        self._client = None

    async def send(self, method: str, path: str, **request: Any) -> httpx.Response:
        """See :class:`Line`."""
        self._home.enter()
        if self._client is None:
            self._client = httpx.AsyncClient(**self._options)
        return await self._client.send(self._client.build_request(method, path, **request), stream=True)

    def parts(self, response: httpx.Response) -> AsyncIterator[bytes]:
        """See :class:`Line`."""
        return response.aiter_bytes()

    async def next(self, parts: AsyncIterator[bytes]) -> bytes | None:
        """See :class:`Line`."""
        return await anext(parts, None)

    async def close(self, response: httpx.Response) -> None:
        """See :class:`Line`."""
        await response.aclose()

    async def pause(self, duration: float) -> None:
        """See :class:`Line`."""
        await anyio.sleep(duration)

    async def apart(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """See :class:`Line`."""
        return await to_thread.run_sync(lambda: work(*args, **kwargs))

    async def hang_up(self) -> None:
        """See :class:`Line`."""
        self._home.enter()
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()
