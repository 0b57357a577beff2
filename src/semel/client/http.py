"""HTTP for the clients: the blocking and the async backend, the retry rules, and requests to a semel server."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from math import inf
from typing import Any, ParamSpec, TypeAlias, TypeVar
from uuid import uuid4

import anyio
import httpx
import msgspec
from anyio import to_thread
from msgspec import Struct

from semel import typed_json
from semel._concurrency.fork import survive_fork
from semel._concurrency.retry import Backoff
from semel._concurrency.sync import LoopGuard
from semel.client.errors import Answer, is_retryable, refusal, unexpected_response
from semel.errors import InvalidRequest, SemelError, ServerUnreachable
from semel.runs import strict_json

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
Page = TypeVar("Page")

DEFAULT_SERVER = "http://127.0.0.1:8001"
LONGEST_WAIT = 60.0
"""Seconds: the longest wait between two attempts, whatever ``Retry-After`` asks for."""
CONNECT_TIMEOUT = 10.0

LOST = (httpx.TimeoutException, httpx.NetworkError, httpx.RemoteProtocolError)
"""Errors after which the client cannot know whether the server executed the request."""

_TOKEN = re.compile(r"[\x21-\x7e]+")
_log = logging.getLogger("semel")


class RetryPolicy(Struct, frozen=True, kw_only=True):
    """How often a request is sent again, and when: exponential backoff with jitter, or later if the server asks."""

    retries: int
    backoff: float
    longest_wait: float
    jitter: tuple[float, float]
    """The backoff is multiplied by a random number of this range, so that clients do not retry in step."""
    is_retryable: Callable[[Any], bool]
    """Whether the same request may get another response later."""

    def pause(self, attempt: int) -> float:
        """Seconds to wait after that many attempts."""
        low, high = self.jitter
        return Backoff(self.backoff, low=low, high=high).after(attempt)

    def wait(self, attempt: int, outcome: Any) -> float | None:
        """Seconds until the next attempt, however many there were; None when the response is final."""
        asked = 0.0
        if not isinstance(outcome, httpx.TransportError):
            if not self.is_retryable(outcome):
                return None
            asked = retry_after(outcome.headers.get("retry-after", ""))
        return min(max(self.pause(attempt), asked), self.longest_wait)


def retry_after(value: str) -> float:
    """Seconds that a ``Retry-After`` header asks for, as a number or as a date; 0 for any other text."""
    value = value.strip()
    if value.isascii() and value.isdigit():
        return float(value[:20])
    try:
        moment = parsedate_to_datetime(value)
        return max(0.0, (moment.replace(tzinfo=moment.tzinfo or UTC) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError, IndexError, OverflowError):
        return 0.0


async def send_with_retries(
    backend: HttpBackend,
    policy: RetryPolicy,
    attempt: Callable[[], Awaitable[T]],
    log: Callable[[int, T, float | None], None],
    end: float = inf,
) -> T:
    """The outcome of the last attempt: it is final, or no retry is left, or no time until ``end``."""
    number = 0
    while True:
        number += 1
        outcome = await attempt()
        wait = policy.wait(number, outcome) if number <= policy.retries else None
        if wait is not None and time.monotonic() + wait >= end:
            wait = None
        log(number, outcome, wait)
        if wait is None:
            return outcome
        if isinstance(outcome, httpx.Response):
            await backend.close_response(outcome)
        await backend.pause(wait)


class SyncBackend:
    """Blocking I/O behind ``async`` methods that never suspend, so that ``run_sync`` can run the code above them."""

    def __init__(self, send: Callable[[httpx.Request], httpx.Response]) -> None:
        self._send = send

    async def send(self, request: httpx.Request) -> httpx.Response:
        return self._send(request)

    def chunks(self, source: Any) -> Any:
        """The decoded body of a response, or the parts of a stream, to be read with ``next``."""
        return source.iter_bytes() if isinstance(source, httpx.Response) else iter(source)

    async def next(self, chunks: Any) -> bytes | None:
        piece: bytes | None = next(chunks, None)
        return piece

    async def close_response(self, response: httpx.Response) -> None:
        response.close()

    async def pause(self, duration: float) -> None:
        time.sleep(duration)  # noqa: ASYNC251 -- it blocks on purpose

    async def run_blocking(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return work(*args, **kwargs)


class AsyncBackend:
    """The same over the running event loop."""

    def __init__(self, send: Callable[[httpx.Request], Awaitable[httpx.Response]]) -> None:
        self._send = send

    async def send(self, request: httpx.Request) -> httpx.Response:
        return await self._send(request)

    def chunks(self, source: Any) -> Any:
        return source.aiter_bytes() if isinstance(source, httpx.Response) else aiter(source)

    async def next(self, chunks: Any) -> bytes | None:
        piece: bytes | None = await anext(chunks, None)
        return piece

    async def close_response(self, response: httpx.Response) -> None:
        await response.aclose()

    async def pause(self, duration: float) -> None:
        await anyio.sleep(duration)

    async def run_blocking(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return await to_thread.run_sync(lambda: work(*args, **kwargs))


class SyncClientBackend(SyncBackend):
    """Over ``httpx.Client``; several threads may share it."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._client = httpx.Client(**options)
        survive_fork(self)

    def after_fork(self) -> None:
        """Leave the connections to the parent."""
        self._client = httpx.Client(**self._options)

    async def request(self, method: str, path: str, **request: Any) -> httpx.Response:
        """Send a request; the body of the response is read with ``chunks``."""
        return self._client.send(self._client.build_request(method, path, **request), stream=True)

    async def close(self) -> None:
        self._client.close()


class AsyncClientBackend(AsyncBackend):
    """Over ``httpx.AsyncClient``, in one event loop at a time."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._client: httpx.AsyncClient | None = None
        self._loop_guard = LoopGuard(self.after_fork)
        survive_fork(self)

    def after_fork(self) -> None:
        """Leave the connections to the parent."""
        self._client = None

    async def request(self, method: str, path: str, **request: Any) -> httpx.Response:
        self._loop_guard.check()
        if self._client is None:
            self._client = httpx.AsyncClient(**self._options)
        return await self._client.send(self._client.build_request(method, path, **request), stream=True)

    async def close(self) -> None:
        self._loop_guard.check()
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()


HttpBackend: TypeAlias = SyncBackend | AsyncBackend
ClientBackend: TypeAlias = SyncClientBackend | AsyncClientBackend


class HttpSession:
    """Sends requests to one semel server.

    An attempt that ends in a lost connection, a timeout, 408, 429 or any 5xx is repeated with the same content (so
    with the same key), up to ``retries`` times, after ``backoff`` seconds, then twice that, and so on.
    """

    def __init__(self, backend: ClientBackend, url: str, *, timeout: float, retries: int, backoff: float) -> None:
        self.backend = backend
        self.url = url
        self.timeout = timeout
        self.retry_policy = RetryPolicy(
            retries=retries, backoff=backoff, longest_wait=LONGEST_WAIT, jitter=(1, 1.25), is_retryable=is_retryable
        )

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        key: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 -- also the blocking client's
        about_run: bool = False,
        **request: Any,
    ) -> Answer:
        """The response if it is one of success or 304, else its error is raised; ``about_run``: 404 is RunNotFound."""
        if body is not None:
            written = json_body(body)
            request |= written | {"headers": {**written["headers"], **request.get("headers", {})}}

        async def attempt() -> Answer | httpx.TransportError:
            return await self.try_once(method, path, timeout or self.timeout, **request)

        outcome = await self.with_retries(method, path, attempt)
        return self.checked(outcome, key=key, about_run=about_run)

    async def with_retries(
        self, method: str, path: str, attempt: Callable[[], Awaitable[Answer | httpx.TransportError]]
    ) -> Answer | httpx.TransportError:
        """The outcome of the last attempt."""

        def log(number: int, outcome: Answer | httpx.TransportError, wait: float | None) -> None:
            if wait is None and isinstance(outcome, Answer):
                return
            result = outcome.status if isinstance(outcome, Answer) else type(outcome).__name__
            then = "" if wait is None else f"; again in {wait:.2f} s"
            which = f"try {number} of {self.retry_policy.retries + 1}"
            _log.info("%s %s%s, %s: %s%s", method, self.url, path, which, result, then)

        return await send_with_retries(self.backend, self.retry_policy, attempt, log)

    async def get(self, path: str, kind: type[T], *, params: Any = None, about_run: bool = False) -> T:
        """The resource at the path, decoded."""
        answer = await self.request("GET", path, params=without_none(params or {}), about_run=about_run)
        return self.decode(answer, kind)

    async def paginate(
        self,
        path: str,
        kind: type[Page],
        items: Callable[[Page], list[T]],
        *,
        filters: Mapping[str, Any],
        limit: int | None,
        page_size: int,
    ) -> AsyncGenerator[T, None]:
        """The items of a list, page after page: all of them, or up to ``limit``."""
        left: float = inf if limit is None else limit
        cursor: str | None = None
        while left > 0:
            params = {**filters, "limit": int(min(left, page_size)), "cursor": cursor}
            page: Any = await self.get(path, kind, params=params)
            found = items(page)
            for item in found:
                yield item
            left -= len(found)
            if page.next is None or page.next == cursor:  # a page without items may have a next one
                return
            cursor = page.next

    def decode(self, answer: Answer, kind: type[T], *, key: str | None = None) -> T:
        """The body of a response as ``kind``."""
        try:
            return typed_json.decode(answer.content, kind)
        except (msgspec.DecodeError, RecursionError):
            raise unexpected_response(answer, self.url, key=key) from None

    def decode_exactly(self, answer: Answer) -> Any:
        """The body of a response in which numbers may be NaN or infinite."""
        try:
            return strict_json.read_exact(answer.content)
        except (ValueError, RecursionError):
            raise unexpected_response(answer, self.url) from None

    async def try_once(self, method: str, path: str, seconds: float, **request: Any) -> Answer | httpx.TransportError:
        """One attempt: the response, or the error after which it is unknown whether the request was executed."""
        try:
            response = await self.backend.request(method, path, timeout=httpx_timeout(seconds), **request)
        except LOST as error:
            return error
        return await self.read_all(response, seconds)

    async def read_all(self, response: httpx.Response, seconds: float) -> Answer | httpx.TransportError:
        """The response with its whole body, which must arrive within ``seconds``."""
        end = time.monotonic() + seconds
        chunks = self.backend.chunks(response)
        pieces = []
        try:
            while (piece := await self.backend.next(chunks)) is not None:
                pieces.append(piece)
                if time.monotonic() > end:
                    return httpx.ReadTimeout("the response arrived too slowly")
            return Answer(response.status_code, response.headers, b"".join(pieces))
        except LOST as error:
            return error
        except httpx.DecodingError as error:
            return httpx.RemoteProtocolError(str(error))
        finally:
            await self.backend.close_response(response)

    def checked(
        self, outcome: Answer | httpx.TransportError, *, key: str | None = None, about_run: bool = False
    ) -> Answer:
        """The response if it is one of success or 304, else its error is raised."""
        if isinstance(outcome, Answer) and (outcome.status < 300 or outcome.status == 304):
            return outcome
        cause = None if isinstance(outcome, Answer) else outcome
        raise self.error_of(outcome, key=key, about_run=about_run) from cause

    def error_of(
        self, outcome: Answer | httpx.TransportError, *, key: str | None = None, about_run: bool = False
    ) -> SemelError:
        """The error of a request that failed."""
        if not isinstance(outcome, Answer):
            return self._unreachable(outcome, key)
        if outcome.status < 300:
            return unexpected_response(outcome, self.url, key=key)
        return refusal(outcome, key=key, about_run=about_run)

    def _unreachable(self, error: httpx.TransportError, key: str | None) -> ServerUnreachable:
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            message = (
                f"there is no server at {self.url} ({message_of(error)}); start one with `semel serve`, or set its "
                "address with SEMEL_SERVER, base_url= or --server"
            )
            return ServerUnreachable(message, idempotency_key=key)
        message = f"no response from {self.url} ({message_of(error)})"
        if key is not None:
            message += f"; the request may have been carried out: repeat it with idempotency_key={key!r} to find out"
        return ServerUnreachable(message, idempotency_key=key)


def message_of(error: httpx.TransportError) -> str:
    """The error's message, or its type: some errors of httpx have no message."""
    return str(error) or type(error).__name__


def httpx_timeout(timeout: float) -> httpx.Timeout:
    """``timeout`` for each read and write; less for connecting."""
    return httpx.Timeout(timeout, connect=min(timeout, CONNECT_TIMEOUT))


def without_none(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that were given."""
    return {name: value for name, value in fields.items() if value is not None}


def to_json(body: Any) -> bytes:
    """The body as JSON; InvalidRequest for what JSON cannot represent."""
    try:
        return strict_json.write(body)
    except ValueError as error:
        raise InvalidRequest(f"the request cannot be written as JSON: {error}") from error


def json_body(body: Any) -> dict[str, Any]:
    """The arguments of an httpx request with a JSON body."""
    return {"content": to_json(body), "headers": {"content-type": "application/json"}}


def automatic_key() -> str:
    """A new idempotency key."""
    return f"py-client-{uuid4()}"


def server_url(base_url: str | None) -> httpx.URL:
    """The server's URL: ``base_url``, or else the one in ``SEMEL_SERVER``."""
    given = base_url or os.environ.get("SEMEL_SERVER") or DEFAULT_SERVER
    try:
        url = httpx.URL(given)
    except (httpx.InvalidURL, TypeError) as error:
        raise InvalidRequest(f"base_url is not a URL: {error}") from None
    if url.userinfo:
        raise InvalidRequest("base_url has a password in it; give a token as token=, or in SEMEL_TOKEN")
    if url.scheme not in ("http", "https") or not url.host or url.query or url.fragment or " " in given:
        raise InvalidRequest(
            f"base_url must be http://host:port or https://host, optionally with a path, not {given!r}"
        )
    return url


def httpx_options(base_url: str | None, token: str | None, transport: Any) -> dict[str, Any]:
    """The arguments of an httpx client. Redirects are not followed: the token is for this server only."""
    url = server_url(base_url)
    secure = url.scheme == "https"
    # Loading certificates takes longer than most requests, and without TLS none are needed.
    return {"base_url": url, "headers": _headers(token), "transport": transport, "verify": secure}


def _headers(token: str | None) -> httpx.Headers:
    token = (token or os.environ.get("SEMEL_TOKEN") or "").strip()
    headers = httpx.Headers({"accept": "application/json", "user-agent": "semel"})  # its repr hides the token
    if token:
        if not _TOKEN.fullmatch(token):
            raise InvalidRequest("the token contains a space or a character that no token has")
        headers["authorization"] = f"Bearer {token}"
    return headers
