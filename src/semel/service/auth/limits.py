"""Limits: the rate of requests, concurrent ones, and the size and duration of a request's body."""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeAlias

from semel.service.api.problems import ApiError

if TYPE_CHECKING:
    from semel.service.settings import Settings

Scope: TypeAlias = Any
Receive: TypeAlias = Callable[[], Awaitable[Any]]

MOST_NAMES = 10_000
"""The most tokens, or addresses, that a limit keeps in memory."""
BODILESS = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods whose body is not read."""
_SINGLE = (b"content-type", b"content-encoding")
"""Headers that may be sent only once: of two, a proxy may read one and we the other."""
MAX_DRAIN = 4 * 1024 * 1024
"""Bytes of a refused body that are read and dropped, so that a client that sends before it reads gets the response."""
DRAIN_TIMEOUT = 5.0


class ClientGone(Exception):
    """The client disconnected before its request was complete."""


class TokenBucket:
    """Allows ``rate`` a second, and bursts of ``most``."""

    __slots__ = ("_at", "_left", "_most", "_rate")

    def __init__(self, rate: float, most: float) -> None:
        self._rate = rate
        self._most = max(1.0, most)
        self._left = self._most
        self._at = time.monotonic()

    def take(self) -> float:
        """Take one: returns 0, or the seconds until one is available."""
        now = time.monotonic()
        self._left = min(self._most, self._left + (now - self._at) * self._rate)
        self._at = now
        if self._left >= 1.0:
            self._left -= 1.0
            return 0.0
        return (1.0 - self._left) / self._rate


class RateLimits:
    """A token bucket for each name. LRU: evicts the least recently used."""

    def __init__(self, rate: float, most: float) -> None:
        self._rate = rate
        self._most = most
        self._buckets: dict[str, TokenBucket] = {}

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, name: str) -> float:
        bucket = self._buckets.pop(name, None) or TokenBucket(self._rate, self._most)
        if len(self._buckets) >= MOST_NAMES:
            del self._buckets[next(iter(self._buckets))]
        self._buckets[name] = bucket
        return bucket.take()


class ConcurrencyLimit:
    """Limits how many slots each name holds at a time."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: Counter[str] = Counter()

    def check(self, name: str) -> None:
        """Raise 429 if the name has no slot left."""
        if self._held[name] >= self._most:
            detail = f"{self._most} of your requests are waiting or streaming already, which is the limit"
            raise ApiError(429, "TOO_MANY_REQUESTS", detail, retry_after=1.0)

    @contextmanager
    def hold(self, name: str) -> Iterator[None]:
        """Hold a slot until the end of the block."""
        self._held[name] += 1
        try:
            yield
        finally:
            self._held[name] -= 1
            if not self._held[name]:
                del self._held[name]


def address_of(scope: Scope) -> str:
    """The address of the client; for IPv6 its /64 network, which is usually one client's."""
    client = scope.get("client")
    host: str = client[0] if client and client[0] else ""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.IPv6Address(int(address) >> 64 << 64))
    return str(address)


def header(scope: Scope, name: bytes) -> str | None:
    """The first header of that name."""
    for each, value in scope["headers"]:
        if each == name:
            text: str = value.decode("latin-1")
            return text
    return None


def headers(scope: Scope, name: bytes) -> list[str]:
    """Every header of that name."""
    return [value.decode("latin-1") for each, value in scope["headers"] if each == name]


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


class BodyReader:
    """Reads the body of a request, within limits."""

    def __init__(self, scope: Scope, receive: Receive, settings: Settings) -> None:
        self._scope = scope
        self._receive = receive
        self._most = settings.max_body
        self._timeout = settings.body_timeout
        self._ended = False

    async def read_all(self) -> Receive:
        """Read the body; returns a ``receive`` that gives it in one piece, and then the server's further messages.

        Raises ApiError if the body is too large or too slow.
        """
        if (self._content_length or 0) > self._most:
            raise self._too_large()
        if self._scope["method"] in BODILESS:
            return self._receive
        for name in _SINGLE:
            if len(headers(self._scope, name)) > 1:
                detail = f"the request has two {name.decode().title()} headers"
                raise ApiError(400, "INVALID_REQUEST", detail)
        if (header(self._scope, b"content-encoding") or "identity").strip().lower() != "identity":
            raise ApiError(415, "UNSUPPORTED_MEDIA_TYPE", "the body must not have a Content-Encoding")
        try:
            async with asyncio.timeout(self._timeout):
                body = await self._read()
        except TimeoutError:
            self._ended = True  # the rest is not read
            raise ApiError(408, "BODY_TOO_SLOW", "the body took too long to arrive") from None
        return _receive_again(body, self._receive)

    @property
    def _content_length(self) -> int | None:
        length = header(self._scope, b"content-length")
        if length is None or not (length.isascii() and length.isdigit()):
            return None
        return int(length[:30])

    async def _read(self) -> bytes:
        body = bytearray()
        while not self._ended:
            body += await self._part()
            if len(body) > self._most:
                raise self._too_large()
        return bytes(body)

    async def _part(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        self._ended = not message.get("more_body", False)
        part: bytes = message.get("body", b"")
        return part

    def _too_large(self) -> ApiError:
        return ApiError(413, "BODY_TOO_LARGE", f"the body is larger than {self._most:,} bytes")

    async def drain(self) -> None:
        """Read and drop the rest of a refused body, unless it is large, or the client waits for 100 Continue."""
        chunked = header(self._scope, b"transfer-encoding") is not None
        coming = MAX_DRAIN if chunked else self._content_length or 0
        if not 0 < coming <= MAX_DRAIN or header(self._scope, b"expect") is not None:
            return
        with suppress(TimeoutError, ClientGone):
            async with asyncio.timeout(DRAIN_TIMEOUT):
                while not self._ended and coming > 0:
                    coming -= max(1, len(await self._part()))


def _receive_again(body: bytes, receive: Receive) -> Receive:
    sent = False

    async def again() -> Any:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
