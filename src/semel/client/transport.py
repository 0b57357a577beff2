"""Transports for httpx that give a request an idempotency key, and send it again with that key until the server
responds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from math import inf
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack
from uuid import uuid4

import httpx
from msgspec.structs import replace

from semel._concurrency.sync import run_sync
from semel._validation import checked_int, checked_seconds
from semel.client.http import LOST, AsyncBackend, HttpBackend, RetryPolicy, SyncBackend, send_with_retries

FAILURES = frozenset((500, 502, 503, 504))
"""Statuses after which the same request may succeed."""

_IN_PROGRESS = frozenset(("IDEMPOTENCY_KEY_PROCESSING", "idempotency_key_in_use"))
_REUSED = frozenset(("IDEMPOTENCY_KEY_CONFLICT", "idempotency_key_reused"))

_log = logging.getLogger("semel")


def _new_key() -> str:
    return uuid4().hex


class TransportOptions(TypedDict, total=False):
    """The options of the transports."""

    retries: int
    """How many times a request is sent again; 5 by default."""

    methods: Iterable[str]
    """The methods whose requests get a key and are retried; POST by default. Others pass unchanged."""

    header: str
    """The header with the key."""

    backoff: float
    """Seconds before the first retry; doubled for each further one, minus a random part."""

    longest_wait: float
    """Seconds: the longest wait between two attempts, whatever ``Retry-After`` asks for."""

    deadline: float | None
    """Seconds for all attempts and waits together; None for no limit but ``retries``."""

    buffer: int
    """Bytes of a body that are held in memory. A longer upload that cannot be read twice is sent only once; a longer
    response, or one without a Content-Length, is passed on as it arrives."""

    new_key: Callable[[], str]
    """Returns a new key; ``uuid4().hex`` by default."""


class IdempotentTransport(httpx.BaseTransport):
    """``httpx.Client(transport=IdempotentTransport())`` sends each POST until the server responds, with one key.

    ``inner`` sends each attempt; by default an ``httpx.HTTPTransport``. For the options see
    :class:`TransportOptions`.
    """

    def __init__(self, inner: httpx.BaseTransport | None = None, **options: Unpack[TransportOptions]) -> None:
        self._inner = httpx.HTTPTransport() if inner is None else inner
        self._sender = _KeyedSender(SyncBackend(self._inner.handle_request), **options)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Return the last response, or raise the last error, after all attempts."""
        return run_sync(self._sender.send(request))

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
    """Same as :class:`IdempotentTransport`, for ``httpx.AsyncClient``."""

    def __init__(self, inner: httpx.AsyncBaseTransport | None = None, **options: Unpack[TransportOptions]) -> None:
        self._inner = httpx.AsyncHTTPTransport() if inner is None else inner
        self._sender = _KeyedSender(AsyncBackend(self._inner.handle_async_request), **options)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Return the last response, or raise the last error, after all attempts."""
        return await self._sender.send(request)

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


class _PartlyRead(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A stream whose first part was read already. It can be read once; httpx.StreamConsumed after that."""

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


class _KeyedSender:
    """Sends a request with its key, and retries it with the same key."""

    def __init__(
        self,
        backend: HttpBackend,
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
        self._backend = backend
        self._methods = frozenset(name.upper() for name in ((methods,) if isinstance(methods, str) else methods))
        self._header = header
        self._policy = RetryPolicy(
            retries=checked_int("retries", retries),
            backoff=checked_seconds("backoff", backoff, zero=True),
            longest_wait=checked_seconds("longest_wait", longest_wait, zero=True),
            jitter=(0.5, 1),
            is_retryable=is_retryable_with_key,
        )
        self._deadline = inf if deadline is None else checked_seconds("deadline", deadline)
        self._buffer = checked_int("buffer", buffer, 0, None)
        self._new_key = new_key

    async def send(self, request: httpx.Request) -> httpx.Response:
        """Return the last response, or raise the last error."""
        if request.method not in self._methods:
            return await self._backend.send(request)
        if self._header not in request.headers:
            request.headers[self._header] = self._new_key()
        end = time.monotonic() + self._deadline
        policy = self._policy if await self._repeatable(request) else replace(self._policy, retries=0)

        async def attempt() -> httpx.Response | httpx.TransportError:
            return await self._try_once(request, end)

        def log(number: int, outcome: httpx.Response | httpx.TransportError, wait: float | None) -> None:
            self._log_attempt(request, f"try {number} of {policy.retries + 1}", outcome, wait)

        outcome = await send_with_retries(self._backend, policy, attempt, log, end)
        if isinstance(outcome, httpx.Response):
            return outcome
        try:
            raise outcome
        finally:
            del outcome  # or the error would hold this frame, and the frame the error

    async def _repeatable(self, request: httpx.Request) -> bool:
        """Whether the body can be sent twice: bytes can, and a stream that fits into the buffer."""
        if not isinstance(request.stream, httpx.ByteStream):
            request.stream = await self._held(request.stream)
        return isinstance(request.stream, httpx.ByteStream)

    async def _held(self, stream: Any) -> httpx.ByteStream | _PartlyRead:
        """The stream in memory, or the unread stream if it is larger than the buffer."""
        chunks = self._backend.chunks(stream)
        head = bytearray()
        while (chunk := await self._backend.next(chunks)) is not None:
            head += chunk
            if len(head) > self._buffer:
                return _PartlyRead(bytes(head), chunks, stream)
        return httpx.ByteStream(bytes(head))

    async def _try_once(self, request: httpx.Request, end: float) -> httpx.Response | httpx.TransportError:
        left = max(end - time.monotonic(), 0.001)
        extensions = {**request.extensions, "timeout": _limited_timeouts(left, request.extensions.get("timeout"))}
        copy = httpx.Request(
            request.method, request.url, headers=request.headers, stream=request.stream, extensions=extensions
        )
        try:
            response = await self._backend.send(copy)
            return await self._received(response) if self._is_short(response) else response
        except LOST as error:
            return error

    def _is_short(self, response: httpx.Response) -> bool:
        """Whether the response is read as a whole here, so that a connection lost within it is a failed attempt."""
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
            await self._backend.close_response(response)
            raise
        if isinstance(stream, httpx.ByteStream):
            await self._backend.close_response(response)
        return httpx.Response(
            response.status_code, headers=response.headers, stream=stream, extensions=response.extensions
        )

    def _log_attempt(self, request: httpx.Request, which: str, outcome: object, wait: float | None) -> None:
        result = outcome.status_code if isinstance(outcome, httpx.Response) else type(outcome).__name__
        then = "" if wait is None else f"; again in {wait:.2f} s"
        url, key = request.url, request.headers[self._header]
        _log.info("%s %s%s with the key %r, %s: %s%s", request.method, url.host, url.path, key, which, result, then)


def is_retryable_with_key(response: httpx.Response) -> bool:
    """Whether the same request with the same key may get another response later.

    True for server failures, and while the first request with the key is in progress. A replayed response is final.
    """
    if response.headers.get("idempotent-replayed", "").lower() == "true":
        return False
    if response.status_code == 409:
        code, retryable = _refusal(response)
        return code not in _REUSED and (code in _IN_PROGRESS or retryable is True)
    return response.status_code in FAILURES and _refusal(response)[1] is not False


def _refusal(response: httpx.Response) -> tuple[object, object]:
    """The error code and ``retryable`` of a problem, or the code of an error in the style of Stripe."""
    if not isinstance(response.stream, httpx.ByteStream):
        return None, None
    try:
        whole = httpx.Response(response.status_code, headers=response.headers, stream=response.stream)
        whole.read()
        problem = whole.json()
    except (ValueError, RecursionError, httpx.DecodingError):
        return None, None
    if not isinstance(problem, dict):
        return None, None
    inner = problem.get("error")
    code = inner.get("code") if isinstance(inner, dict) else problem.get("error_code")
    return code if isinstance(code, str) else None, problem.get("retryable")


def _limited_timeouts(left: float, timeout: Any) -> dict[str, float | None]:
    """The request's timeouts, none longer than what is left until the deadline."""
    given = timeout or {}
    names = ("connect", "read", "write", "pool")
    if left == inf:
        return {name: given.get(name) for name in names}
    return {name: left if given.get(name) is None else min(left, given[name]) for name in names}
