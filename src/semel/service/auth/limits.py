"""How much and how fast: requests a second, failed attempts, and the size and pace of a request's body."""

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
"""Of how many tokens, or addresses, the use is remembered."""
BODILESS = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods whose body nobody reads."""
_SAID_ONCE = (b"content-type", b"content-encoding")
"""Headers of which a second one would be overlooked here and believed elsewhere, or the other way round."""
DRAINED = 4 * 1024 * 1024
"""Bytes of a refused body that are read and dropped, so that a client that sends first and reads then sees why."""
DRAINED_FOR = 5.0


class ClientGone(Exception):
    """The client hung up before its request was whole: there is nothing to do."""


class Bucket:
    """So many a second, and up to ``most`` at once after a pause."""

    __slots__ = ("_at", "_left", "_most", "_rate")

    def __init__(self, rate: float, most: float) -> None:
        self._rate = rate
        self._most = max(1.0, most)
        self._left = self._most
        self._at = time.monotonic()

    def take(self) -> float:
        """Take one; else the seconds until there is one."""
        now = time.monotonic()
        self._left = min(self._most, self._left + (now - self._at) * self._rate)
        self._at = now
        if self._left >= 1.0:
            self._left -= 1.0
            return 0.0
        return (1.0 - self._left) / self._rate


class RateLimits:
    """A bucket for each name. Whose was not asked for longest is forgotten first, so they stay few."""

    def __init__(self, rate: float, most: float) -> None:
        self._rate = rate
        self._most = most
        self._buckets: dict[str, Bucket] = {}

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, name: str) -> float:
        """See Bucket."""
        bucket = self._buckets.pop(name, None) or Bucket(self._rate, self._most)
        if len(self._buckets) >= MOST_NAMES:
            del self._buckets[next(iter(self._buckets))]
        self._buckets[name] = bucket
        return bucket.take()


class ConcurrencyLimit:
    """How many of each name may be there at a time."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken: Counter[str] = Counter()

    def check(self, name: str) -> None:
        """Refuse where there is no place left."""
        if self._taken[name] >= self._most:
            said = f"{self._most} requests of yours wait or listen already, and no more may at a time"
            raise ApiError(429, "TOO_MANY_REQUESTS", said, retry_after=1.0)

    @contextmanager
    def hold(self, name: str) -> Iterator[None]:
        """Take a place until the end of the block."""
        self._taken[name] += 1
        try:
            yield
        finally:
            self._taken[name] -= 1
            if not self._taken[name]:
                del self._taken[name]


def address_of(scope: Scope) -> str:
    """Where a request comes from; of IPv6 the network, since whoever has one address there has them all."""
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
    """Returns when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


class BodyReader:
    """The body of a request on its way in."""

    def __init__(self, scope: Scope, receive: Receive, settings: Settings) -> None:
        self._scope = scope
        self._receive = receive
        self._most = settings.max_body
        self._timeout = settings.body_timeout
        self._ended = False

    async def whole(self) -> Receive:
        """What gives the body in one piece, once it is here; or the refusal of one too large or too slow.

        After the body it passes on whatever the server says: a handler that waits learns that its client went away.
        """
        if (self._announced or 0) > self._most:
            raise self._too_large()
        if self._scope["method"] in BODILESS:
            return self._receive
        for name in _SAID_ONCE:
            if len(headers(self._scope, name)) > 1:
                said = f"there are two headers {name.decode().title()}, and a body is of one kind"
                raise ApiError(400, "INVALID_REQUEST", said)
        if (header(self._scope, b"content-encoding") or "identity").strip().lower() != "identity":
            raise ApiError(415, "UNSUPPORTED_MEDIA_TYPE", "a body is taken as it is, without a Content-Encoding")
        try:
            async with asyncio.timeout(self._timeout):
                body = await self._read()
        except TimeoutError:
            self._ended = True  # nobody waits for the rest
            raise ApiError(408, "BODY_TOO_SLOW", "the body took too long to arrive") from None
        return _replayed(body, self._receive)

    @property
    def _announced(self) -> int | None:
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
        return ApiError(413, "BODY_TOO_LARGE", f"the body may have {self._most:,} bytes")

    async def drain(self) -> None:
        """Drop what is still to come of a refused body, unless that is much, or the client waits to be asked for it."""
        chunked = header(self._scope, b"transfer-encoding") is not None
        coming = DRAINED if chunked else self._announced or 0
        if not 0 < coming <= DRAINED or header(self._scope, b"expect") is not None:
            return
        with suppress(TimeoutError, ClientGone):
            async with asyncio.timeout(DRAINED_FOR):
                while not self._ended and coming > 0:
                    coming -= max(1, len(await self._part()))


def _replayed(body: bytes, receive: Receive) -> Receive:
    sent = False

    async def again() -> Any:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
