"""Transports for httpx that give a request its idempotency key, and send it again under the same key until it is
answered. The rules are written once; a blocking and an awaited line carry them out.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from math import inf
from types import TracebackType
from typing import Any, Protocol, Self, TypedDict, Unpack
from uuid import uuid4

import anyio
import httpx

from semel._concurrency.sync import run_sync
from semel._validation import checked_int, checked_seconds

FAILURES = frozenset((500, 502, 503, 504))
"""Statuses after which the same request may succeed."""

LOST = (httpx.TimeoutException, httpx.NetworkError, httpx.RemoteProtocolError)
"""Errors after which nobody here knows whether the request was carried out."""

_BUSY = frozenset(("IDEMPOTENCY_KEY_PROCESSING", "idempotency_key_in_use"))
_NEVER = frozenset(("IDEMPOTENCY_KEY_CONFLICT", "idempotency_key_reused"))

_log = logging.getLogger("semel")


def _new_key() -> str:
    return uuid4().hex


class TransportOptions(TypedDict, total=False):
    """What a transport can be told."""

    retries: int
    """How many times a request is sent again; 5 without it."""

    methods: Iterable[str]
    """Which requests get a key and are retried; others pass untouched. POST without it."""

    header: str
    """The header that holds the key."""

    backoff: float
    """Seconds before the first retry; each further one waits twice as long, and a random part of it less."""

    longest_wait: float
    """Seconds that a wait between two tries never exceeds, whatever ``Retry-After`` asks for."""

    deadline: float | None
    """Seconds for all tries and waits together; None for no limit but ``retries``."""

    buffer: int
    """Bytes of a body that are held in memory. A longer upload that cannot be read twice is sent once only; a longer
    answer, or one without a Content-Length, is passed on while it comes."""

    new_key: Callable[[], str]
    """Makes a key; ``uuid4().hex`` without it."""


class IdempotentTransport(httpx.BaseTransport):
    """``httpx.Client(transport=IdempotentTransport())`` sends each POST until it is answered, under one key.

    ``inner`` sends the tries; without it an ``httpx.HTTPTransport``. See :class:`Options`.
    """

    def __init__(self, inner: httpx.BaseTransport | None = None, **options: Unpack[TransportOptions]) -> None:
        self._inner = httpx.HTTPTransport() if inner is None else inner
        self._tries = _Tries(_SyncBackend(self._inner), **options)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send it as often as it takes; the last answer or error is the caller's."""
        return run_sync(self._tries.answer(request))

    def close(self) -> None:
        """Close the connections."""
        self._inner.close()

    def __enter__(self) -> Self:
        self._inner.__enter__()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        self._inner.__exit__(exc_type, exc_value, traceback)


class AsyncIdempotentTransport(httpx.AsyncBaseTransport):
    """As :class:`IdempotentTransport`, for ``httpx.AsyncClient``."""

    def __init__(self, inner: httpx.AsyncBaseTransport | None = None, **options: Unpack[TransportOptions]) -> None:
        self._inner = httpx.AsyncHTTPTransport() if inner is None else inner
        self._tries = _Tries(_AsyncBackend(self._inner), **options)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send it as often as it takes; the last answer or error is the caller's."""
        return await self._tries.answer(request)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._inner.aclose()

    async def __aenter__(self) -> Self:
        await self._inner.__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        await self._inner.__aexit__(exc_type, exc_value, traceback)


class _Backend(Protocol):
    """The way to the server. The blocking one never suspends, so that ``drive`` can run what is written over it."""

    async def send(self, request: httpx.Request) -> httpx.Response: ...
    async def close(self, response: httpx.Response) -> None: ...
    async def pause(self, duration: float) -> None: ...
    def parts(self, stream: Any) -> Any: ...
    async def next(self, parts: Any) -> bytes | None: ...


class _SyncBackend:
    def __init__(self, inner: httpx.BaseTransport) -> None:
        self.send_now, self.pause_now = inner.handle_request, time.sleep

    async def send(self, request: httpx.Request) -> httpx.Response:
        return self.send_now(request)

    async def close(self, response: httpx.Response) -> None:
        response.close()

    async def pause(self, duration: float) -> None:
        self.pause_now(duration)

    def parts(self, stream: httpx.SyncByteStream) -> Iterator[bytes]:
        return iter(stream)

    async def next(self, parts: Iterator[bytes]) -> bytes | None:
        return next(parts, None)


class _AsyncBackend:
    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self.send = inner.handle_async_request
        self.pause = anyio.sleep

    async def close(self, response: httpx.Response) -> None:
        await response.aclose()

    def parts(self, stream: httpx.AsyncByteStream) -> AsyncIterator[bytes]:
        return aiter(stream)

    async def next(self, parts: AsyncIterator[bytes]) -> bytes | None:
        return await anext(parts, None)


class _Begun(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A stream whose first part was read already; it can be read once, and says so when it is read again."""

    def __init__(self, head: bytes, rest: Any, source: Any) -> None:
        self._head: bytes | None = head
        self._rest, self._source = rest, source

    def __iter__(self) -> Iterator[bytes]:
        yield self._first()
        yield from self._rest

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._first()
        async for part in self._rest:
            yield part

    def _first(self) -> bytes:
        head, self._head = self._head, None
        if head is None:
            raise httpx.StreamConsumed
        return head

    def close(self) -> None:
        self._source.close()

    async def aclose(self) -> None:
        await self._source.aclose()


class _Tries:
    """What is sent again, when, and when not."""

    def __init__(
        self,
        line: _Backend,
        *,
        retries: int = 5,
        methods: Iterable[str] = ("POST",),
        header: str = "Idempotency-Key",
        backoff: float = 0.5,
        longest_wait: float = 10.0,
        deadline: float | None = 60.0,
        buffer: int = 1 << 20,
        new_key: Callable[[], str] = _new_key,
    ) -> None:
        self._line = line
        self._retries = checked_int("retries", retries)
        self._methods = frozenset(name.upper() for name in ((methods,) if isinstance(methods, str) else methods))
        self._header = header
        self._backoff = checked_seconds("backoff", backoff, zero=True)
        self._longest_wait = checked_seconds("longest_wait", longest_wait, zero=True)
        self._deadline = inf if deadline is None else checked_seconds("deadline", deadline)
        self._buffer = checked_int("buffer", buffer, 0, None)
        self._new_key = new_key

    async def answer(self, request: httpx.Request) -> httpx.Response:
        """The answer to a request, after as many tries as it takes and the rules allow."""
        if request.method not in self._methods:
            return await self._line.send(request)
        if self._header not in request.headers:
            request.headers[self._header] = self._new_key()
        end = time.monotonic() + self._deadline
        tries = 1 + self._retries if await self._repeatable(request) else 1
        number = 0
        while True:
            number += 1
            answer = await self._try(request, end)
            wait = self._wait(number, answer) if number < tries else None
            if wait is not None and time.monotonic() + wait >= end:
                wait = None
            self._say(request, f"try {number} of {tries}", answer, wait)
            if wait is None:
                break
            if isinstance(answer, httpx.Response):
                await self._line.close(answer)
            await self._line.pause(wait)
        if isinstance(answer, httpx.Response):
            return answer
        try:
            raise answer
        finally:
            del answer  # or the error would hold this frame, and the frame the error

    async def _repeatable(self, request: httpx.Request) -> bool:
        """See that the body can be sent twice: bytes can, and whatever else fits into the buffer."""
        if not isinstance(request.stream, httpx.ByteStream):
            request.stream = await self._held(request.stream)
        return isinstance(request.stream, httpx.ByteStream)

    async def _held(self, stream: Any) -> httpx.ByteStream | _Begun:
        """A stream's bytes, or, where they are more than the buffer holds, the stream as before its first byte."""
        parts = self._line.parts(stream)
        head = bytearray()
        while (part := await self._line.next(parts)) is not None:
            head += part
            if len(head) > self._buffer:
                return _Begun(bytes(head), parts, stream)
        return httpx.ByteStream(bytes(head))

    async def _try(self, request: httpx.Request, end: float) -> httpx.Response | httpx.TransportError:
        """One try: an answer, or the error that leaves open whether there was one."""
        left = max(end - time.monotonic(), 0.001)
        extensions = {**request.extensions, "timeout": _within(left, request.extensions.get("timeout"))}
        copy = httpx.Request(
            request.method, request.url, headers=request.headers, stream=request.stream, extensions=extensions
        )
        try:
            response = await self._line.send(copy)
            return await self._received(response) if self._is_short(response) else response
        except LOST as error:
            return error

    def _is_short(self, response: httpx.Response) -> bool:
        """Whether the answer is taken in here, so that a connection that breaks in the midst of it is a failed try."""
        length = response.headers.get("content-length", "")
        return (
            response.status_code in FAILURES
            or response.status_code == 409
            or (length.isascii() and length.isdigit() and len(length) < 19 and int(length) <= self._buffer)
        )

    async def _received(self, response: httpx.Response) -> httpx.Response:
        try:
            stream = await self._held(response.stream)
        except BaseException:
            await self._line.close(response)
            raise
        if isinstance(stream, httpx.ByteStream):
            await self._line.close(response)
        return httpx.Response(
            response.status_code, headers=response.headers, stream=stream, extensions=response.extensions
        )

    def _wait(self, number: int, answer: httpx.Response | httpx.TransportError) -> float | None:
        """Seconds until the next try; None when the answer is final."""
        asked = 0.0
        if isinstance(answer, httpx.Response):
            if not is_retryable(answer):
                return None
            asked = retry_after(answer.headers.get("retry-after", ""))
        pause = self._backoff * 2.0 ** min(number - 1, 60)
        pause *= random.uniform(0.5, 1)  # noqa: S311 -- so that clients that failed together do not come back together
        return min(max(pause, asked), self._longest_wait)

    def _say(self, request: httpx.Request, which: str, answer: object, wait: float | None) -> None:
        said = answer.status_code if isinstance(answer, httpx.Response) else type(answer).__name__
        then = "" if wait is None else f"; again in {wait:.2f} s"
        url, key = request.url, request.headers[self._header]
        _log.info("%s %s%s with the key %r, %s: %s%s", request.method, url.host, url.path, key, which, said, then)


def is_retryable(response: httpx.Response) -> bool:
    """Whether the same request may get another answer later.

    Yes for the failures of servers, and for a key whose first request is still being carried out. A replayed answer
    stays what it is.
    """
    if response.headers.get("idempotent-replayed", "").lower() == "true":
        return False
    if response.status_code == 409:
        code, retryable = _refusal(response)
        return code not in _NEVER and (code in _BUSY or retryable is True)
    return response.status_code in FAILURES and _refusal(response)[1] is not False


def retry_after(value: str) -> float:
    """Seconds that a ``Retry-After`` asks for, as a number or as a date; 0 where it makes no sense."""
    value = value.strip()
    if value.isascii() and value.isdigit():
        return float(value[:20])
    try:
        moment = parsedate_to_datetime(value)
        return max(0.0, (moment.replace(tzinfo=moment.tzinfo or UTC) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError, IndexError, OverflowError):
        return 0.0


def _refusal(response: httpx.Response) -> tuple[object, object]:
    """The code of a refusal and whether it says that it is ``retryable``, in whichever dialect it is put."""
    if not isinstance(response.stream, httpx.ByteStream):
        return None, None
    try:
        said = httpx.Response(response.status_code, headers=response.headers, stream=response.stream)
        said.read()
        problem = said.json()
    except (ValueError, RecursionError, httpx.DecodingError):
        return None, None
    if not isinstance(problem, dict):
        return None, None
    inner = problem.get("error")
    code = inner.get("code") if isinstance(inner, dict) else problem.get("error_code")
    return code if isinstance(code, str) else None, problem.get("retryable")


def _within(left: float, timeout: Any) -> dict[str, float | None]:
    """The request's timeouts, none of them beyond what is left of the deadline."""
    given = timeout or {}
    names = ("connect", "read", "write", "pool")
    if left == inf:
        return {name: given.get(name) for name in names}
    return {name: left if given.get(name) is None else min(left, given[name]) for name in names}
