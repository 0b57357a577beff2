"""The app behind the ASGI door that real servers run for the tests: a handler for each hard case.

`POST /<door>/<case>` goes through the door of that name. What happens is written to the file `<key>.diary` in FOLDER,
line by line, where a test can read it even when the server is gone; a handler that must wait does so until the test
makes the file `<key>.<gate>` there.
"""

import asyncio
import gzip
import hashlib
import os
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from semel import AsyncOnce, Policy
from semel.http.asgi import IdempotencyMiddleware

STORE, FOLDER = os.environ["SEMEL_TEST_STORE"], Path(os.environ["SEMEL_TEST_FOLDER"])
PATIENCE = 20
EVENTS = 5
ALL_BYTES = bytes(range(256)) * 4


def note(key: str, line: str) -> None:
    with (FOLDER / f"{key}.diary").open("a") as diary:
        diary.write(f"{line}\n")


def begin(request: Request) -> tuple[str, int]:
    """The key, and the how manieth execution this is."""
    key = request.headers.get("idempotency-key", "none")
    note(key, "ran")
    return key, (FOLDER / f"{key}.diary").read_text().splitlines().count("ran")


async def passed(key: str, gate: str) -> None:
    """Wait until the test opens the gate."""
    async with asyncio.timeout(PATIENCE):
        while not (FOLDER / f"{key}.{gate}").exists():  # noqa: ASYNC110 -- the test is another process
            await asyncio.sleep(0.005)


def token() -> dict[str, str]:
    """Something that no second execution would answer."""
    return {"token": uuid.uuid4().hex}


async def plain(request: Request) -> Response:
    begin(request)
    return JSONResponse(token(), 201)


async def echo(request: Request) -> Response:
    begin(request)
    digest, size = hashlib.sha256(), 0
    async for chunk in request.stream():
        digest.update(chunk)
        size += len(chunk)
    return JSONResponse({"sha256": digest.hexdigest(), "size": size, **token()})


async def slow(request: Request) -> Response:
    key, _ = begin(request)
    await passed(key, "go")
    note(key, "finished")
    return JSONResponse(token(), int(request.query_params.get("code", "200")))


async def attentive(request: Request) -> Response:
    """Would stop for a client that left, as long handlers do."""
    key, _ = begin(request)
    while not (FOLDER / f"{key}.go").exists():
        if await request.is_disconnected():
            note(key, "stopped")
            return PlainTextResponse("nobody is there", 499)
        await asyncio.sleep(0.005)
    note(key, "finished")
    return JSONResponse(token())


async def events(request: Request) -> Response:
    """Each event is made when the test has opened its gate."""
    key, _ = begin(request)
    mark = uuid.uuid4().hex

    async def stream() -> AsyncIterator[str]:
        for number in range(EVENTS):
            await passed(key, str(number))
            note(key, f"event {number}")
            yield f"data: {number} {mark}\n\n"
        note(key, "finished")

    return StreamingResponse(stream(), media_type="text/event-stream")


async def breaks(request: Request) -> Response:
    """Fails in the middle of its first response."""
    _, times = begin(request)

    async def stream() -> AsyncIterator[bytes]:
        yield b"first half, "
        if times == 1:
            raise RuntimeError("the source ran dry")
        yield b"second half"

    length = {"content-length": "23"} if "sized" in request.query_params else {}
    return StreamingResponse(stream(), headers=length)


async def sized(request: Request) -> Response:
    """Has all bytes of its promised length sent before it is at its end."""
    key, _ = begin(request)

    async def stream() -> AsyncIterator[bytes]:
        yield b"first half, "
        await passed(key, "go")
        yield b"second half"

    return StreamingResponse(stream(), headers={"content-length": "23"})


async def unsized(request: Request) -> Response:
    key, _ = begin(request)

    async def stream() -> AsyncIterator[bytes]:
        yield b"first half, "
        await passed(key, "go")
        yield b"second half"

    return StreamingResponse(stream())


async def file(request: Request) -> Response:
    key, _ = begin(request)
    for name in request.scope.get("extensions") or {}:
        note(key, name)
    return FileResponse(FOLDER / f"{key}.bin", filename="report.bin")


async def fails(request: Request) -> Response:
    begin(request)
    raise RuntimeError("the handler has a bug")


async def hangs(request: Request) -> Response:
    """Gives up on something that takes too long, the first time."""
    key, times = begin(request)
    async with asyncio.timeout(0.05 if times == 1 else PATIENCE):
        if times == 1:
            await passed(key, "never")
    return JSONResponse(token())


async def endless(request: Request) -> Response:
    """Waits the first time for what never comes."""
    key, times = begin(request)
    if times == 1:
        try:
            await passed(key, "never")
        except asyncio.CancelledError:
            note(key, "cancelled")
            raise
    return JSONResponse(token())


async def background(request: Request) -> Response:
    key, _ = begin(request)

    async def later() -> None:
        await passed(key, "go")
        note(key, "task")
        if "fails" in request.query_params:
            raise RuntimeError("the task has a bug")

    return JSONResponse(token(), background=BackgroundTask(later))


async def status(request: Request) -> Response:
    begin(request)
    return Response(status_code=int(request.query_params["code"]), headers={"x-token": uuid.uuid4().hex})


async def binary(request: Request) -> Response:
    begin(request)
    return Response(ALL_BYTES, media_type="application/octet-stream")


async def compressed(request: Request) -> Response:
    begin(request)
    body = gzip.compress(uuid.uuid4().bytes + ALL_BYTES)
    return Response(body, headers={"content-encoding": "gzip"}, media_type="application/octet-stream")


async def headers(request: Request) -> Response:
    begin(request)
    response = PlainTextResponse("many")
    for value in ("one", "two, three", "four"):
        response.headers.append("x-many", value)
    response.headers.append("set-cookie", "a=1")
    response.headers.append("set-cookie", "b=2")
    return response


async def large(request: Request) -> Response:
    """As many bytes as are asked for; in pieces, each of which waits for its gate, if that is asked for."""
    key, _ = begin(request)
    size = int(request.query_params["size"])
    if "pieces" not in request.query_params:
        return PlainTextResponse("x" * size)

    async def stream() -> AsyncIterator[bytes]:
        for number in range(4):
            await passed(key, str(number))
            yield b"x" * (size // 4)
        note(key, "finished")

    return StreamingResponse(stream())


async def extensions(request: Request) -> Response:
    return JSONResponse(sorted(request.scope.get("extensions") or {}))


async def talk(websocket: WebSocket) -> None:
    """Answers one message with its own text and what came in the headers."""
    await websocket.accept()
    text = await websocket.receive_text()
    await websocket.send_text(f"{text} {websocket.headers.get('idempotency-key')}")
    await websocket.close()


CASES = [
    *(plain, echo, slow, attentive, events, breaks, sized, unsized, file, fails, hangs, endless, background),
    *(status, binary, compressed, headers, large),
]
once = AsyncOnce(STORE)


@asynccontextmanager
async def lifespan(_: Starlette) -> AsyncIterator[None]:
    note("life", "started")
    async with once:
        yield
    note("life", "ended")


site = Starlette(
    routes=[
        *(Route(f"/{{door}}/{case.__name__}", case, methods=["POST"]) for case in CASES),
        Route("/extensions", extensions),
        WebSocketRoute("/{door}/talk", talk),
    ],
    lifespan=lifespan,
)


class Impatient:
    """An outer middleware that cancels the app when the test says so."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = dict(scope["headers"]).get(b"idempotency-key", b"none").decode()
        sent = False

        async def say(message: Message) -> None:
            nonlocal sent
            sent = True
            await send(message)

        work = asyncio.ensure_future(self.app(scope, receive, say))
        limit = asyncio.ensure_future(passed(key, "cancel"))
        await asyncio.wait((work, limit), return_when=asyncio.FIRST_COMPLETED)
        limit.cancel()
        if not work.done():
            work.cancel()
        try:
            await work
        except asyncio.CancelledError:
            note(key, "gave up")
            if not sent:
                await PlainTextResponse("too late", 504)(scope, receive, send)


async def pass_on(request: Request, call_next: RequestResponseEndpoint) -> Response:
    """The plainest `@app.middleware("http")`."""
    return await call_next(request)


async def raising(scope: Scope, receive: Receive, send: Send) -> None:
    """An app without a framework that would make a response of its exception."""
    begin(Request(scope))
    raise RuntimeError("of this app")


DOORS: dict[str, ASGIApp] = {
    "intake": IdempotencyMiddleware(site, STORE),
    "stripe": IdempotencyMiddleware(site, once, policy=Policy.stripe()),
    "limited": IdempotencyMiddleware(site, once, max_response_bytes=1000),
    "raising": IdempotencyMiddleware(raising, once, policy=Policy.stripe()),
    "spilling": IdempotencyMiddleware(site, once, body_in_memory=1 << 16, max_request_bytes=None),
    "impatient": Impatient(IdempotencyMiddleware(site, once)),
    "wrapped": BaseHTTPMiddleware(IdempotencyMiddleware(site, once), pass_on),
    "wrapping": IdempotencyMiddleware(BaseHTTPMiddleware(site, pass_on), once),
}


with_url = IdempotencyMiddleware(Starlette(routes=site.routes), STORE)
"""Alone with its own store."""


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """The door of the path's first word. The one with a store of its own sees to the app's life, as for a user."""
    name = "intake" if scope["type"] == "lifespan" else scope["path"].split("/")[1]
    await DOORS.get(name, site)(scope, receive, send)
