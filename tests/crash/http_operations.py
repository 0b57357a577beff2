"""A keyed POST through the middlewares, and what must hold whenever the server's process dies."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from crash.key_operations import LEASE, TTL
from crash.points import Ended, Place
from semel import AsyncOnce, Once, Policy, StoreUnavailable, current_claim
from semel.http import asgi, wsgi
from semel.testing import FakeClock

POLICY = Policy.intake().but(lease=LEASE, ttl=TTL, in_flight="conflict", on_crash="retake")
OPTIONS: dict[str, Any] = {"collect": False}


class AsgiSite:
    """An ASGI app behind the middleware, called in this process; its handler records an effect."""

    def __init__(self, url: str) -> None:
        self.clock = FakeClock()
        self.place: Place | None = None
        self._runner = asyncio.Runner()
        self._once = self._runner.run(self._opened(url))
        served = asgi.IdempotencyMiddleware(self._serve, self._once, policy=POLICY)
        self._transport = httpx.ASGITransport(served)

    async def _opened(self, url: str) -> AsyncOnce:
        once = AsyncOnce(url, clock=self.clock, **OPTIONS)
        await once.claim("warm", scope="warm")  # a script of Redis is loaded by its first use
        return once

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        body = work(self.place)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 201, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def post(self, key: str) -> httpx.Response:
        return self._runner.run(self._post(key))

    async def _post(self, key: str) -> httpx.Response:
        async with httpx.AsyncClient(transport=self._transport, base_url="http://test") as client:
            return await client.post("/orders", json={"of": "tea"}, headers={"idempotency-key": key})

    def close(self) -> None:
        self._runner.run(self._once.close())
        self._runner.close()


class WsgiSite:
    """The same as a WSGI app."""

    def __init__(self, url: str) -> None:
        self.clock = FakeClock()
        self.place: Place | None = None
        self._once = Once(url, clock=self.clock, **OPTIONS)
        self._once.claim("warm", scope="warm")
        served = wsgi.IdempotencyMiddleware(self._serve, self._once, policy=POLICY)
        self._transport = httpx.WSGITransport(served)

    def _serve(self, environ: Any, start: Any) -> list[bytes]:
        body = work(self.place)
        start("201 Created", [("content-type", "application/json"), ("content-length", str(len(body)))])
        return [body]

    def post(self, key: str) -> httpx.Response:
        with httpx.Client(transport=self._transport, base_url="http://test") as client:
            return client.post("/orders", json={"of": "tea"}, headers={"idempotency-key": key})

    def close(self) -> None:
        self._once.close()


SITES: dict[str, type[AsgiSite | WsgiSite]] = {"asgi": AsgiSite, "wsgi": WsgiSite}
_kept: dict[tuple[str, str], AsgiSite | WsgiSite] = {}


def work(place: Place | None) -> bytes:
    """The handler: it records its fence."""
    assert place is not None
    fence = current_claim().fence
    place.record(fence)
    return json.dumps({"fence": fence}).encode()


@contextmanager
def kept_open(protocol: str, url: str) -> Iterator[None]:
    """Keep one site open for all tries of this process."""
    site = _kept[protocol, url] = SITES[protocol](url)
    try:
        yield
    finally:
        del _kept[protocol, url]
        site.close()


@dataclass(frozen=True)
class KeyedPost:
    """A POST with a key: one effect for each accepted response, and every later response is the same."""

    protocol: str

    def prepare(self, place: Place) -> None: ...

    def warm_up(self, place: Place) -> None:
        _kept[self.protocol, place.url] = SITES[self.protocol](place.url)

    def _post(self, place: Place, later: float = 0.0) -> tuple[int, bytes, bool]:
        site = _kept[self.protocol, place.url]
        site.place, site.clock.us = place, place.later(later).us
        response = site.post(place.name)
        return response.status_code, response.content, "idempotent-replayed" in response.headers

    def act(self, place: Place, given: None) -> Any:
        answer = self._post(place)
        if answer[0] == 503:
            raise StoreUnavailable(answer[1].decode())
        return answer

    def check(self, place: Place, given: None, ended: Ended) -> None:
        before = place.effects
        assert len(before) <= 1, "one request was executed twice"
        status, body, replayed = self._post(place, LEASE + 1)
        assert status == 201
        assert self._post(place, LEASE + 1) == (201, body, True)
        assert replayed == (place.effects == before)
        fences = [int(fence) for fence in place.effects]
        assert fences == sorted(set(fences)), "a fence was granted twice, or a lower one later"
        assert json.loads(body) == {"fence": fences[-1]}
        if ended.how == "returned":
            assert ended.value[0] == 201, ended.value
            assert (body, replayed) == (ended.value[1], True), "an acknowledged response was forgotten"
