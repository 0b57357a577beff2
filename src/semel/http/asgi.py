"""The middleware for ASGI apps: Starlette, FastAPI, Litestar, Django and every other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from functools import partial
from typing import Any, ParamSpec, TypeAlias, TypeVar, Unpack
from urllib.parse import unquote_to_bytes

from semel.errors import ClaimLost, InvalidRequest, SemelError, StoreBroken, StoreUnavailable
from semel.http.body import CHUNK, BodyTooLarge, SpooledBody
from semel.http.middleware import CLAIM_KEY, MiddlewareCore, Request, ResponseRecorder
from semel.http.options import MiddlewareOptions
from semel.http.protocol import codings_for_app
from semel.once.client import AsyncOnce
from semel.once.guard import current_claim_set
from semel.once.requests import CallRequest
from semel.once.stores import Target
from semel.types import Claim, Granted, Replay, Response, Verdict

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

P = ParamSpec("P")
R = TypeVar("R")

_LARGE = 1 << 16
"""Bytes whose hash, decoding or parsing would keep the event loop from its other work for a noticeable time."""
_log = logging.getLogger("semel")


class IdempotencyMiddleware:
    """Every request with an idempotency key is carried out once; whoever repeats it gets the first one's response.

    ``once`` is a store's URL or an :class:`AsyncOnce`. Without the key, and for other methods than ``methods``,
    nothing changes. See :class:`~semel.http.options.Options`.
    """

    def __init__(self, app: App, once: AsyncOnce | Target, **options: Unpack[MiddlewareOptions]) -> None:
        self.app = app
        self._door = MiddlewareCore(AsyncOnce, once, options)
        self._header = self._door.header.lower().encode("ascii")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        door = self._door
        if scope["type"] == "http":
            if door.status_path is not None and await self._tell_status(scope, send):
                return
            if scope["method"] in door.methods:
                header = self._header
                values = [value for name, value in scope["headers"] if name == header]
                if (values or door.required) and (door.everywhere or self._covers(scope)):
                    await self._serve(values, scope, receive, send)
                    return
        elif scope["type"] == "lifespan" and door.owned:
            await self._live(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _covers(self, scope: Scope) -> bool:
        return self._door.covers(scope["path"], scope.get("root_path", ""))

    async def _serve(self, values: list[bytes], scope: Scope, receive: Receive, send: Send) -> None:
        door = self._door
        key = door.key([value.decode("latin-1") for value in values]) if values else door.refuse("missing", None)
        if isinstance(key, Response):
            await _answer(send, key)
            return
        body = SpooledBody(door.body_in_memory, door.max_request_bytes)
        try:
            admitted = await self._admit(key, scope, receive, body)
            if isinstance(admitted, Response):
                await _answer(send, admitted)
            elif isinstance(admitted, _Exchange):
                await admitted.run(self.app, scope, send)
            elif admitted:
                await self.app(scope, _Upload(body, receive), send)
        finally:
            body.close()

    async def _admit(self, key: str, scope: Scope, receive: Receive, body: SpooledBody) -> Response | _Exchange | bool:
        """The answer to the request, or how to carry it out; True: without protection, False: not at all."""
        door = self._door
        request = _request(scope)
        try:
            if body.limit is not None and _length(request) > body.limit:
                return door.refuse("too_large", key)
            if not await _read(body, receive):
                return False  # the client left before its request was whole, and nobody is there to be told
            print_ = await _off_loop(door.reads_bodies and body.size > _LARGE, door.print_of, request, body)
            asking = door.ask(key, request, print_)
            if door.within(request, asking):
                return True
            verdict = await door.engine.admit(asking)
        except (StoreUnavailable, OSError) as error:  # OSError: no room on the disk for a large body
            _log.warning("a request with the key %r was refused: %s", key, error)
            return door.unavailable(key)
        except BodyTooLarge:
            return door.refuse("too_large", key)
        if verdict is None:
            return True
        if isinstance(verdict, Granted):
            return _Exchange(door, verdict.claim, asking, _Upload(body, receive))
        return await _off_loop(_is_work(verdict), door.answer, verdict, asking, request)

    async def _tell_status(self, scope: Scope, send: Send) -> bool:
        door = self._door
        request = _request(scope)
        asked = door.status_asked(request)
        if asked is None:
            return False
        where, key = asked
        try:
            record = await door.once.get(key, scope=where)
            await _answer(send, door.status(record, key, request))
        except StoreUnavailable:
            await _answer(send, door.unavailable(key))
        except InvalidRequest:
            await _answer(send, door.refuse("invalid", key))
        return True

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The app's life: open our store when it starts, close it when it ends."""
        once = self._door.once
        first: list[Message] = [await receive()]
        try:
            await once.open()
        except SemelError as error:
            if not isinstance(error, StoreUnavailable) or isinstance(error, StoreBroken):
                await send({"type": "lifespan.startup.failed", "message": str(error)})
                return
            _log.warning("the store of idempotency keys is away: %s", error)

        async def hear() -> Message:
            return first.pop() if first else await receive()

        async def say(message: Message) -> None:
            if message["type"].startswith("lifespan.shutdown"):
                await once.close()
            await send(message)

        await self.app(scope, hear, say)


class _Upload:
    """The body again, for the app. Then it waits, and hears that the client left when ``over`` is set."""

    def __init__(self, body: SpooledBody, receive: Receive) -> None:
        self._body = body
        self._at = 0
        self._receive = receive
        self.sent = False
        self.hidden: asyncio.Event | None = None

    async def __call__(self) -> Message:
        if not self.sent:
            size = CHUNK if self._body.on_disk else self._body.size
            chunk = await _off_loop(self._body.on_disk, self._body.read, self._at, size)
            self._at += len(chunk)
            self.sent = self._at >= self._body.size or not chunk
            return {"type": "http.request", "body": chunk, "more_body": not self.sent}
        if self.hidden is not None:
            await self.hidden.wait()
        return await self._receive()


class _Exchange:
    """One request that is carried out under a claim.

    The response passes through while it is noted. What would tell the client that it is complete (the last byte of a
    known length, or the end of the stream) is held back until the outcome is stored. A client that leaves does not
    stop the app: its retry gets the response. A response that is too large to be kept is an outcome from the byte on
    that is one too many, and from then on whatever happens to it is between the app and its client.
    """

    def __init__(self, door: MiddlewareCore[AsyncOnce], claim: Claim, asking: CallRequest, upload: _Upload) -> None:
        self._door, self._claim, self._asking, self._upload = door, claim, asking, upload
        self._recorder = ResponseRecorder(door, claim)
        self._held: list[Message] = []
        self._passed = self._settled = self._ended = self._deaf = False

    async def run(self, app: App, scope: Scope, send: Send) -> None:
        """Call the app, and see that its claim is settled, whatever it does."""
        self._send = send
        self._upload.hidden = asyncio.Event()
        scope[CLAIM_KEY] = self._claim
        codings = _header(scope, "accept-encoding")
        if codings is not None:
            own = (b"accept-encoding", codings_for_app(codings).encode("latin-1"))
            scope["headers"] = [*(pair for pair in scope["headers"] if pair[0] != own[0]), own]
        if scope.get("extensions"):  # in place: what the app notes in the scope is for those outside, too
            scope["extensions"] = {name: each for name, each in scope["extensions"].items() if name not in _BYPASSES}
        engine = self._door.engine
        try:
            with current_claim_set(self._claim):
                await app(scope, self._upload, self._pass)
        except BaseException as error:
            if not self._settled and await engine.fail(self._claim, self._asking, error) and not self._passed:
                self._held = list(_messages(self._door.failed(self._claim)))
                await self._forward()
            raise
        finally:
            self._reveal()
        if not self._settled:
            await engine.fail(self._claim, self._asking, RuntimeError("the app ended without a whole response"))
            await self._forward()

    async def _pass(self, message: Message) -> None:
        """What the app sends."""
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
                if not self._settled and (self._ended or (self._recorder.over and self._recorder.kept)):
                    await self._settle()
                    self._reveal()
                if self._settled or not complete:
                    await self._forward()
            case _:
                await self._send(message)

    def _reveal(self) -> None:
        """From now on the app may hear that the client left."""
        if self._upload.hidden is not None:
            self._upload.hidden.set()

    async def _settle(self) -> None:
        """Store the outcome, before the end leaves. What cannot be stored is not said to be done."""
        engine, key, response = self._door.engine, self._asking.key, self._recorder.response
        self._settled = True
        if not self._recorder.kept:
            if self._recorder.whole:
                self._asking.policy = self._door.releasing
            await engine.fail(self._claim, self._asking, RuntimeError(f"status {response.status}"))
            return
        try:
            await engine.finish(self._claim, self._asking, response)
        except (StoreUnavailable, ClaimLost) as error:
            _log.warning("the response of the request with the key %r is withheld: %s", key, error)
            if self._passed:
                raise  # half of it is with the client; the server breaks the connection, which says enough
            answer = self._door.lost(key) if isinstance(error, ClaimLost) else self._door.unavailable(key)
            self._held = list(_messages(answer))
            await self._forward()
            self._deaf = True  # to the rest of what the app sends, if there is more

    async def _forward(self) -> None:
        held, self._held = self._held, []
        for message in held:
            self._passed = True
            if not self._deaf:
                try:
                    await self._send(message)
                except OSError:
                    self._deaf = True  # the client left
                    if self._settled and not self._ended:
                        raise  # there is no reason to finish for nobody what will not be kept


_BYPASSES = frozenset(("http.response.pathsend", "http.response.zerocopysend", "http.response.trailers"))
"""Ways to send a response that pass no bytes through here; without them, apps send the bytes."""


def _request(scope: Scope) -> Request:
    path = scope["path"]
    if "\ufffd" in path and scope.get("raw_path"):  # the server could not decode it: tell such paths apart all the same
        path = unquote_to_bytes(scope["raw_path"]).decode("utf-8", "surrogateescape")
    mount, header = scope.get("root_path", ""), partial(_header, scope)
    return Request(scope["method"], path, scope.get("query_string", b""), scope, mount, header)


def _header(scope: Scope, name: str) -> str | None:
    wanted = name.encode("latin-1")
    values = [value.decode("latin-1") for each, value in scope["headers"] if each == wanted]
    return (";" if name == "cookie" else ",").join(values) if values else None


def _length(request: Request) -> int:
    said = request.header("content-length") or ""
    return int(said) if said.isascii() and said.isdigit() and len(said) < 19 else 0


def _is_work(verdict: Verdict) -> bool:
    """Whether to make an answer of it takes long: a response is large, or would be once it is decompressed."""
    data = verdict.outcome.data if isinstance(verdict, Replay) else None
    return data is not None and (len(data) > _LARGE or b"content-encoding" in data)


async def _off_loop(blocks: bool, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call it: in a thread, if it would block the event loop."""
    return await asyncio.to_thread(work, *args, **kwargs) if blocks else work(*args, **kwargs)


async def _read(body: SpooledBody, receive: Receive) -> bool:
    """Take in the whole body; False when the client left before the end."""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return False
        chunk = message.get("body", b"")
        await _off_loop(body.spills(len(chunk)), body.add, chunk)
        if not message.get("more_body", False):
            return True


def _messages(response: Response) -> Iterator[Message]:
    yield {"type": "http.response.start", "status": response.status, "headers": response.headers}
    yield {"type": "http.response.body", "body": response.body or b""}


async def _answer(send: Send, response: Response) -> None:
    for message in _messages(response):
        await send(message)
