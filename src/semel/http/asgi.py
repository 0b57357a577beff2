"""The middleware for ASGI apps: Starlette, FastAPI, Litestar, Django and others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from functools import partial
from typing import Any, TypeAlias, Unpack
from urllib.parse import unquote_to_bytes

from semel.errors import SemelError, StoreBroken, StoreUnavailable
from semel.http.body import CHUNK, BodyTooLarge, SpooledBody
from semel.http.middleware import CLAIM_KEY, ClaimedExchange, MiddlewareCore, Request
from semel.http.options import MiddlewareOptions
from semel.http.protocol import codings_for_app
from semel.once.client import AsyncOnce
from semel.once.guard import current_claim_set
from semel.once.requests import CallRequest
from semel.once.stores import Target
from semel.types import Claim, Response

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Any, Any, Any], Awaitable[None]]
"""An app of any framework: each has types of its own for the scope and the messages."""

_NOT_RECORDABLE = frozenset(("http.response.pathsend", "http.response.zerocopysend", "http.response.trailers"))
"""Extensions that send bytes past the middleware. An app that is not offered them sends the bytes as messages."""
_log = logging.getLogger("semel")


class IdempotencyMiddleware:
    """Executes each request with an idempotency key once; a repetition gets the response of the first.

    ``once`` is the URL of a store, or an :class:`AsyncOnce`. Requests without a key, and with other methods than
    ``methods``, pass unchanged. The options are those of :class:`~semel.http.options.MiddlewareOptions`.
    """

    def __init__(self, app: App, once: AsyncOnce | Target, **options: Unpack[MiddlewareOptions]) -> None:
        self.app = app
        self._core = MiddlewareCore(AsyncOnce, once, options)
        self._header = self._core.header.lower().encode("ascii")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one connection."""
        core = self._core
        if scope["type"] == "http":
            if core.status_path is not None and (status := await core.status_response(_request(scope))) is not None:
                await _send_response(send, status)
                return
            if scope["method"] in core.methods:
                header = self._header
                values = [value for name, value in scope["headers"] if name == header]
                if (values or core.required) and (
                    core.everywhere or core.covers(scope["path"], scope.get("root_path", ""))
                ):
                    await self._serve(values, scope, receive, send)
                    return
        elif scope["type"] == "lifespan" and core.owned:
            await self._serve_lifespan(scope, receive, send)
            return
        await self.app(scope, receive, send)

    async def _serve(self, values: list[bytes], scope: Scope, receive: Receive, send: Send) -> None:
        core = self._core
        key = core.key([value.decode("latin-1") for value in values])
        if isinstance(key, Response):
            await _send_response(send, key)
            return
        body = SpooledBody(core.body_in_memory, core.max_request_bytes)
        try:
            admission = await core.admit(key, _request(scope), body, partial(_read, body, scope, receive))
            if isinstance(admission, Response):
                await _send_response(send, admission)
            elif admission is None:
                await self.app(scope, _BodyReplay(body, receive), send)
            else:
                await _AsgiExchange(core, admission, _BodyReplay(body, receive), send).run(self.app, scope)
        except _ClientDisconnected:
            pass  # the request is incomplete, and nobody waits for a response
        finally:
            body.close()

    async def _serve_lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Open the store when the app starts, and close it when the app ends."""
        once = self._core.once
        first: list[Message] = [await receive()]
        try:
            await once.open()
        except SemelError as error:
            if not isinstance(error, StoreUnavailable) or isinstance(error, StoreBroken):
                await send({"type": "lifespan.startup.failed", "message": str(error)})
                return
            _log.warning("the store of idempotency keys is unavailable: %s", error)

        async def receive_again() -> Message:
            return first.pop() if first else await receive()

        async def send_after_close(message: Message) -> None:
            if message["type"].startswith("lifespan.shutdown"):
                await once.close()
            await send(message)

        await self.app(scope, receive_again, send_after_close)


class _ClientDisconnected(Exception):
    """The client disconnected before it had sent the whole body."""


class _BodyReplay:
    """The app's ``receive``: the recorded body, then the server's messages.

    With ``hide_disconnect`` the app hears of a disconnect only once that event is set.
    """

    def __init__(self, body: SpooledBody, receive: Receive) -> None:
        self._body = body
        self._at = 0
        self._receive = receive
        self._done = False
        self.hide_disconnect: asyncio.Event | None = None

    async def __call__(self) -> Message:
        if not self._done:
            body = self._body
            size = CHUNK if body.on_disk else body.size
            chunk = await asyncio.to_thread(body.read, self._at, size) if body.on_disk else body.read(self._at, size)
            self._at += len(chunk)
            self._done = self._at >= body.size or not chunk
            return {"type": "http.request", "body": chunk, "more_body": not self._done}
        if self.hide_disconnect is not None:
            await self.hide_disconnect.wait()
        return await self._receive()


class _AsgiExchange(ClaimedExchange):
    """The app is called with a ``send`` that records what it sends."""

    def __init__(
        self, core: MiddlewareCore[AsyncOnce], admitted: tuple[Claim, CallRequest], body: _BodyReplay, send: Send
    ) -> None:
        super().__init__(core, *admitted)
        self._body, self._send = body, send
        self._held: list[Message] = []
        self._client_gone = False

    async def run(self, app: App, scope: Scope) -> None:
        """Call the app. The claim is settled when this returns or raises."""
        disconnect_visible = self._body.hide_disconnect = asyncio.Event()
        self._prepare(scope)
        try:
            with current_claim_set(self._claim):
                await app(scope, self._body, self._on_message)
        except BaseException as error:
            self._ended = True
            failed = await self._store_failure(error)
            if failed is not None:
                self._held = _messages(failed)
                await self._flush()
            raise
        finally:
            disconnect_visible.set()
        if not self._settled:
            self._ended = True
            await self._store_failure(RuntimeError("the app ended without a whole response"))
            await self._flush()

    def _prepare(self, scope: Scope) -> None:
        """Change the scope in place, as an outer middleware may read from it what the app writes into it."""
        scope[CLAIM_KEY] = self._claim
        codings = _header(scope, "accept-encoding")
        if codings is not None:
            own = (b"accept-encoding", codings_for_app(codings).encode("latin-1"))
            scope["headers"] = [*(pair for pair in scope["headers"] if pair[0] != own[0]), own]
        if scope.get("extensions"):
            extensions = scope["extensions"].items()
            scope["extensions"] = {name: each for name, each in extensions if name not in _NOT_RECORDABLE}

    async def _on_message(self, message: Message) -> None:
        match message["type"]:
            case "http.response.start":
                if self._recorder.status:
                    raise RuntimeError("the app sent the start of a response twice")
                headers = self._recorder.begin(message["status"], message.get("headers", ()))
                self._held.append({**message, "headers": headers})
            case "http.response.body":
                if self._ended:
                    raise RuntimeError("the app sent a part of the response after its end")
                self._held.append(message)
                complete = self._recorder.add(message.get("body", b""))
                self._ended = not message.get("more_body", False)
                if not self._settled and (self._ended or (self._recorder.too_large and self._recorder.is_outcome)):
                    await self._settle()
                if self._settled or not complete:
                    await self._flush()
            case _:
                await self._send(message)

    async def _settle(self) -> None:
        instead = await self._store_outcome()
        if instead is not None:
            self._held = _messages(instead)
            await self._flush()
            self._client_gone = True  # what the app sends from now on is dropped
        if self._body.hide_disconnect is not None:
            self._body.hide_disconnect.set()

    async def _flush(self) -> None:
        held, self._held = self._held, []
        for message in held:
            self._started = True
            if not self._client_gone:
                try:
                    await self._send(message)
                except OSError:
                    self._client_gone = True
                    if self._settled and not self._ended:
                        raise  # the rest of the response would be neither sent nor stored


def _request(scope: Scope) -> Request:
    path = scope["path"]
    if "\ufffd" in path and scope.get("raw_path"):  # the server could not decode it, and such paths must stay distinct
        path = unquote_to_bytes(scope["raw_path"]).decode("utf-8", "surrogateescape")
    mount, header = scope.get("root_path", ""), partial(_header, scope)
    return Request(scope["method"], path, scope.get("query_string", b""), scope, mount, header)


def _header(scope: Scope, name: str) -> str | None:
    wanted = name.encode("latin-1")
    values = [value.decode("latin-1") for each, value in scope["headers"] if each == wanted]
    return (";" if name == "cookie" else ",").join(values) if values else None


async def _read(body: SpooledBody, scope: Scope, receive: Receive) -> bool:
    """Read the whole body."""
    length = _header(scope, "content-length") or ""
    known = length.isascii() and length.isdigit() and len(length) < 19
    if known and body.limit is not None and int(length) > body.limit:
        raise BodyTooLarge  # before the body is read
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise _ClientDisconnected
        chunk = message.get("body", b"")
        if body.spills(len(chunk)):
            await asyncio.to_thread(body.add, chunk)
        else:
            body.add(chunk)
        if not message.get("more_body", False):
            return True


def _messages(response: Response) -> list[Message]:
    return [
        {"type": "http.response.start", "status": response.status, "headers": response.headers},
        {"type": "http.response.body", "body": response.body or b""},
    ]


async def _send_response(send: Send, response: Response) -> None:
    for message in _messages(response):
        await send(message)
