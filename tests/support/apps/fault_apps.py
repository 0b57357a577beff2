"""The apps of test_http_faults.py: one handler behind each door, under several policies, each at a path of its own.

FAULT_STORES are the stores' URLs by name, as JSON, FAULT_FOLDER is the desk's folder. `POST /<store>/<policy>` notes
that it works, waits at the key's gate if the query is `gate`, and answers; if it is `stream`, it waits there between
two chunks. Every response says by which worker it was given.
"""

import asyncio
import json
import os
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any

from semel import AsyncOnce, Once, Policy, current_claim
from semel.http import asgi as asgi_door
from semel.http import wsgi as wsgi_door
from support.process_peer import Desk

HASTY = 0.3
"""Seconds for which a request tries again while the store is away, except at /patient."""

LEASE = 10
CRASH_LEASE = 1.2
POLICIES = {
    "conflict": Policy(in_flight="conflict", lease=LEASE),
    "patient": Policy(in_flight="conflict", lease=LEASE),
    "wait": Policy(in_flight="wait", lease=LEASE, wait=50),
    "crash": Policy(in_flight="conflict", lease=CRASH_LEASE),
    "unknown": Policy(in_flight="conflict", lease=CRASH_LEASE, on_crash="unknown"),
    "open": Policy(in_flight="conflict", lease=LEASE, store_failure="open"),
}
IN_MEMORY = 100_000
STORES: dict[str, str] = json.loads(os.environ["FAULT_STORES"])

desk = Desk(os.environ["FAULT_FOLDER"])
Start = Callable[..., Callable[[bytes], object]]


def begin(key: str) -> None:
    desk.note("executed", key, fence=getattr(current_claim(None), "fence", None))


def done(key: str) -> bytes:
    """An answer that no second execution would give."""
    desk.note("done", key)
    return json.dumps({"key": key, "token": uuid.uuid4().hex}).encode()


def handle(environ: dict[str, Any], start: Start) -> Iterable[bytes]:
    key = environ["HTTP_IDEMPOTENCY_KEY"]
    begin(key)
    if environ["QUERY_STRING"] == "stream":
        start("201 Created", [("Content-Type", "text/plain"), ("Content-Length", "10")])
        return stream(key)
    if environ["QUERY_STRING"] == "gate":
        desk.wait_at(key)
    body = done(key)
    start("201 Created", [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
    return [body]


def stream(key: str) -> Iterator[bytes]:
    yield b"first"
    desk.wait_at(key)
    yield b" last"


def wsgi() -> Callable[[dict[str, Any], Start], Iterable[bytes]]:
    doors = {}
    for store, url in STORES.items():
        hasty, patient = Once(url, retry_for=HASTY), Once(url)
        for name, policy in POLICIES.items():
            once = patient if name == "patient" else hasty
            doors[f"/{store}/{name}"] = wsgi_door.IdempotencyMiddleware(
                handle, once, policy=policy, body_in_memory=IN_MEMORY
            )

    def app(environ: dict[str, Any], start: Start) -> Iterable[bytes]:
        def named(status: str, headers: list[tuple[str, str]], *more: Any) -> Callable[[bytes], object]:
            return start(status, [*headers, ("X-Worker", str(os.getpid()))], *more)

        if environ["PATH_INFO"] in doors:
            return doors[environ["PATH_INFO"]](environ, named)
        named("200 OK", [("Content-Type", "text/plain")])
        return [b"here"]

    return app


async def handle_async(scope: Any, receive: Any, send: Any) -> None:
    key = dict(scope["headers"])[b"idempotency-key"].decode()
    begin(key)
    if scope["query_string"] == b"stream":
        await send({"type": "http.response.start", "status": 201, "headers": [(b"content-length", b"10")]})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        await passed(key)
        await send({"type": "http.response.body", "body": b" last"})
        return
    if scope["query_string"] == b"gate":
        await passed(key)
    body = done(key)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 201, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def passed(gate: str) -> None:
    while not desk.is_open(gate):  # noqa: ASYNC110 -- the test that opens it is another process
        await asyncio.sleep(0.003)


async def live(receive: Any, send: Any, faces: list[AsyncOnce]) -> None:
    await receive()
    await send({"type": "lifespan.startup.complete"})
    await receive()
    for face in faces:
        await face.close()
    await send({"type": "lifespan.shutdown.complete"})


def asgi() -> Callable[..., Awaitable[None]]:
    faces, doors = [], {}
    for store, url in STORES.items():
        hasty, patient = AsyncOnce(url, retry_for=HASTY), AsyncOnce(url)
        faces += [hasty, patient]
        for name, policy in POLICIES.items():
            once = patient if name == "patient" else hasty
            doors[f"/{store}/{name}"] = asgi_door.IdempotencyMiddleware(
                handle_async, once, policy=policy, body_in_memory=IN_MEMORY
            )

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def named(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"x-worker", b"%d" % os.getpid())]}
            await send(message)

        if scope["type"] == "lifespan":
            await live(receive, send, faces)
        elif scope["path"] in doors:
            await doors[scope["path"]](scope, receive, named)
        else:
            await named({"type": "http.response.start", "status": 200, "headers": []})
            await named({"type": "http.response.body", "body": b"here"})

    return app


app = {"wsgi": wsgi, "asgi": asgi}[os.environ["FAULT_DOOR"]]()
