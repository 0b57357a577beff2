"""The cases of http_cases in bare ASGI and in Starlette, and cases for these only."""

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from semel import AsyncOnce
from semel.http.asgi import IdempotencyMiddleware
from support.apps.http_cases import CASES, READ, RETRIES, RULES, STORES, Broken, Call, Gate, Script, desk, token


async def passed(gate: str) -> None:
    async with asyncio.timeout(20):
        while not desk.is_open(gate):  # noqa: ASYNC110 -- the test that opens it is another process
            await asyncio.sleep(0.003)


async def played(script: Script, request: Request) -> AsyncIterator[Any]:
    """The response of the case: its head, then its chunks."""
    answer: Any = None
    while True:
        try:
            step = script.send(answer)
        except StopIteration:
            return
        answer = None
        if isinstance(step, Gate):
            await passed(step.name)
        elif step is READ:
            digest, size = hashlib.sha256(), 0
            async for chunk in request.stream():
                digest.update(chunk)
                size += len(chunk)
            answer = digest.hexdigest(), size
        else:
            yield step


def call_of(request: Request) -> Call:
    return Call(request.headers.get("idempotency-key", "none"), request.url.query)


def script_of(request: Request) -> Script:
    return CASES[request.url.path.rsplit("/", 1)[1]](call_of(request))


async def bare_asgi(scope: Scope, receive: Receive, send: Send) -> None:
    request = Request(scope, receive)
    made = played(script_of(request), request)
    head = await anext(made)
    fields = [(name.encode(), value.encode("latin-1")) for name, value in head.headers]
    if head.stream:
        await send({"type": "http.response.start", "status": head.status, "headers": fields})
        async for chunk in made:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body"})
        return
    body = b"".join([chunk async for chunk in made])
    if head.status not in (204, 304):
        fields.append((b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": head.status, "headers": fields})
    await send({"type": "http.response.body", "body": body})


async def in_starlette(request: Request) -> Response:
    made = played(script_of(request), request)
    head = await anext(made)
    if head.stream:
        response: Response = StreamingResponse(made, head.status)
    else:
        response = Response(b"".join([chunk async for chunk in made]), head.status)
    for name, value in head.headers:
        response.headers.append(name, value)
    return response


async def starlette_file(request: Request) -> Response:
    call = call_of(request)
    for name in request.scope.get("extensions") or {}:
        call.note(name)
    return FileResponse(desk.folder / f"{call.key}.bin", filename="report.bin")


async def attentive(request: Request) -> Response:
    """Stops if the client disconnects, as long-running handlers do."""
    call = call_of(request)
    while not desk.is_open(call.key):
        if await request.is_disconnected():
            call.note("stopped")
            return PlainTextResponse("nobody is there", 499)
        await asyncio.sleep(0.005)
    call.note("done")
    return PlainTextResponse(token(call), 201)


async def hangs(request: Request) -> Response:
    """Times out in its first execution."""
    call = call_of(request)
    async with asyncio.timeout(0.05 if call.times == 1 else 20):
        if call.times == 1:
            await passed("never")
    return PlainTextResponse(token(call))


async def endless(request: Request) -> Response:
    """Never ends in its first execution."""
    call = call_of(request)
    if call.times == 1:
        try:
            await passed("never")
        except asyncio.CancelledError:
            call.note("cancelled")
            raise
    return PlainTextResponse(token(call))


async def background(request: Request) -> Response:
    call = call_of(request)

    async def later() -> None:
        await passed(call.key)
        call.note("task")
        if "fails" in call.query:
            raise Broken("the task has a bug")

    return PlainTextResponse(token(call), background=BackgroundTask(later))


async def extensions(request: Request) -> Response:
    return JSONResponse(sorted(request.scope.get("extensions") or {}))


async def talk(websocket: WebSocket) -> None:
    """Sends back the text of one message, and the key in the headers."""
    await websocket.accept()
    text = await websocket.receive_text()
    await websocket.send_text(f"{text} {websocket.headers.get('idempotency-key')}")
    await websocket.close()


async_onces: dict[tuple[str, float], AsyncOnce] = {}


@asynccontextmanager
async def lifespan(_: Starlette) -> AsyncIterator[None]:
    desk.note("started", "life")
    yield
    for once in async_onces.values():
        await once.close()
    desk.note("ended", "life")


STARLETTE_CASES = {
    "file": starlette_file,
    **{case.__name__: case for case in (attentive, hangs, endless, background)},
}
starlette = Starlette(
    routes=[
        *(Route(f"/starlette/{{store}}/{{rule}}/{name}", STARLETTE_CASES.get(name, in_starlette), methods=["POST"])
          for name in CASES | STARLETTE_CASES),
        Route("/extensions", extensions),
        WebSocketRoute("/starlette/{store}/{rule}/talk", talk),
    ],
    lifespan=lifespan,
)  # fmt: skip


class Impatient:
    """An outer middleware that cancels the app when the test opens a gate."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = dict(scope["headers"]).get(b"idempotency-key", b"none").decode()
        sent = False

        async def forward(message: Message) -> None:
            nonlocal sent
            sent = True
            await send(message)

        work = asyncio.ensure_future(self.app(scope, receive, forward))
        limit = asyncio.ensure_future(passed(f"{key} cancel"))
        await asyncio.wait((work, limit), return_when=asyncio.FIRST_COMPLETED)
        limit.cancel()
        if not work.done():
            work.cancel()
        try:
            await work
        except asyncio.CancelledError:
            desk.note("gave up", key)
            if not sent:
                await PlainTextResponse("too late", 504)(scope, receive, send)


async def pass_on(request: Request, call_next: RequestResponseEndpoint) -> Response:
    """A minimal `@app.middleware("http")`."""
    return await call_next(request)


def async_once(store: str, rule: str) -> AsyncOnce:
    options = RETRIES.get(rule, {})
    place = store, options.get("retry_for", -1.0)
    if place not in async_onces:
        async_onces[place] = AsyncOnce(STORES[store], **options)
    return async_onces[place]


def asgi_app() -> ASGIApp:
    """Chooses the middleware by the path. That of the first rule opens its own store, and gets the lifespan events."""
    chosen: dict[str, ASGIApp] = {}
    for name, inner in (("asgi", bare_asgi), ("starlette", starlette)):
        for store, url in STORES.items():
            for rule, options in RULES.items():
                own = rule == "intake" and len(STORES) == 1
                target = url if own else async_once(store, rule)
                chosen[f"{name}/{store}/{rule}"] = IdempotencyMiddleware(inner, target, **options)
    for store in STORES:
        once = async_once(store, "intake")
        chosen[f"starlette/{store}/impatient"] = Impatient(IdempotencyMiddleware(starlette, once))
        wrapped = BaseHTTPMiddleware(IdempotencyMiddleware(starlette, once), pass_on)
        chosen[f"starlette/{store}/wrapped"] = wrapped
        wrapping = IdempotencyMiddleware(BaseHTTPMiddleware(starlette, pass_on), once)
        chosen[f"starlette/{store}/wrapping"] = wrapping
    with_lifespan = chosen[f"starlette/{next(iter(STORES))}/intake"] if len(STORES) == 1 else starlette

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"x-worker", b"%d" % os.getpid())]}
            await send(message)

        if scope["type"] == "lifespan":
            await with_lifespan(scope, receive, send)
        else:
            found = chosen.get(scope["path"].strip("/").rpartition("/")[0], starlette)
            await found(scope, receive, named)

    return app


app = asgi_app()
with_url = IdempotencyMiddleware(Starlette(routes=starlette.routes), next(iter(STORES.values())))
"""One middleware, created with a URL, so with a store of its own."""
