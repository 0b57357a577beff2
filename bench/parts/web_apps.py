"""The apps that bench/http.py serves: one small Starlette service, bare and behind each middleware."""

from __future__ import annotations

import asyncio
import hashlib
import os
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from semel.http.asgi import IdempotencyMiddleware

TABLE = """CREATE TABLE IF NOT EXISTS by_hand (
    key text PRIMARY KEY, hash bytea, state text, status int, body bytea, expires timestamptz)"""
CLAIM = """INSERT INTO by_hand VALUES ($1, $2, 'claimed', NULL, NULL, now() + interval '1 hour')
    ON CONFLICT (key) DO NOTHING RETURNING key"""
DONE = "UPDATE by_hand SET state = 'completed', status = $2, body = $3 WHERE key = $1"


async def create(request: Request) -> JSONResponse:
    item = await request.json()
    return JSONResponse({"id": 7, "sku": item["sku"], "title": item["title"]}, 201)


class ByHand:
    """Simple hand-written middleware: an INSERT before the handler and an UPDATE after it, for every request."""

    def __init__(self, app: Any, url: str) -> None:
        self.app, self.url, self.pool = app, url, None
        self.ready = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if self.pool is None:
            import asyncpg

            self.pool = asyncpg.create_pool(self.url, min_size=16, max_size=16)
            await self.pool
            await self.pool.execute(TABLE)
            self.ready.set()
        await self.ready.wait()
        key = next(value.decode() for name, value in scope["headers"] if name == b"idempotency-key")
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        digest = hashlib.sha256(body).digest()
        if await self.pool.fetchval(CLAIM, key, digest) is None:
            await JSONResponse({"detail": "used"}, 409)(scope, receive, send)
            return
        sent = []

        async def hear() -> Any:
            return {"type": "http.request", "body": body}

        async def note(said: Any) -> None:
            sent.append(said)

        await self.app(scope, hear, note)
        await self.pool.execute(DONE, key, sent[0]["status"], sent[1]["body"])
        for said in sent:
            await send(said)


def middleware(kind: str, url: str) -> list[Middleware]:
    match kind:
        case "bare":
            return []
        case "semel":
            return [Middleware(IdempotencyMiddleware, once=url)]
        case "by hand":
            return [Middleware(ByHand, url=url)]
    import redis.asyncio

    client = redis.asyncio.Redis(connection_pool=redis.asyncio.BlockingConnectionPool.from_url(url, max_connections=64))
    match kind:
        case "asgi-idempotency-header":
            from idempotency_header_middleware import IdempotencyHeaderMiddleware
            from idempotency_header_middleware.backends import RedisBackend

            return [Middleware(IdempotencyHeaderMiddleware, backend=RedisBackend(client))]
        case "fastapi-idempotency-key":
            from fastapi_idempotency_key import IdempotencyMiddleware as Theirs
            from fastapi_idempotency_key import RedisBackend as TheirBackend

            return [Middleware(Theirs, backend=TheirBackend(client))]
    raise ValueError(kind)


app = Starlette(
    routes=[Route("/items", create, methods=["POST"])],
    middleware=middleware(os.environ["BENCH_APP"], os.environ.get("BENCH_STORE", "")),
)
