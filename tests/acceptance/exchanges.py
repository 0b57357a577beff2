"""The two HTTP doors, driven alike: a service written once stands behind either, and a client calls it from any thread.

WSGI's own validator stands on both sides of the WSGI door, so every exchange also shows that the door keeps the rules.
"""

import asyncio
import inspect
import io
import json
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Self, TypeAlias, TypeVar
from urllib.parse import unquote_to_bytes
from wsgiref.validate import validator

import httpx

from acceptance.spaces import Space
from acceptance.together import PATIENCE, beside
from semel import AsyncOnce, Once, Policy, Record
from semel.http import asgi, wsgi
from semel.http.refusals import status_line
from semel.once.store import Store
from semel.testing import FakeClock

T = TypeVar("T")
DoorKind: TypeAlias = Literal["asgi", "wsgi"]
DOORS: tuple[DoorKind, ...] = ("asgi", "wsgi")

ITEMS = "/api/v1/items"
SCOPE = f"POST {ITEMS}"
JSON = ("Content-Type", "application/json")


@dataclass
class Asked:
    """A request, as the service behind the door sees it."""

    method: str
    path: str
    query: str
    headers: httpx.Headers
    body: bytes


@dataclass
class Answer:
    """What the service answers: bytes as they are, everything else as JSON."""

    status: int = 201
    content: Any = b""
    headers: list[tuple[str, str]] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        return self.content if isinstance(self.content, bytes) else json.dumps(self.content).encode()

    @property
    def all_headers(self) -> list[tuple[str, str]]:
        """With type and length, as every framework sends them."""
        if self.status in {204, 304}:
            return self.headers
        names = {name.lower() for name, _ in self.headers}
        own = [] if "content-type" in names else [JSON]
        return [*own, *self.headers, ("Content-Length", str(len(self.body)))]


Handler: TypeAlias = Callable[[Asked], Answer | Awaitable[Answer]]


class Intake:
    """The Data Intake service of the document: each request that reaches it creates an item."""

    def __init__(self) -> None:
        self.items: list[Any] = []

    def __call__(self, asked: Asked) -> Answer:
        item = json.loads(asked.body)
        self.items.append(item)
        number = len(self.items)
        return Answer(201, {"id": number, **item}, [("Location", f"{ITEMS}/{number}")])


class SlowIntake(Intake):
    """Holds its first request until the gate opens."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()
        self.gate = threading.Event()

    def __call__(self, asked: Asked) -> Answer:
        if not self.entered.is_set():
            self.entered.set()
            assert self.gate.wait(PATIENCE)
        return super().__call__(asked)


class Answering:
    """Answers what it is told to, one after the other and the last for ever; an exception is raised."""

    def __init__(self, *answers: Answer | BaseException) -> None:
        self._answers = list(answers)
        self.asked: list[Asked] = []

    def __call__(self, asked: Asked) -> Answer:
        self.asked.append(asked)
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, BaseException):
            raise answer
        return answer

    @property
    def times(self) -> int:
        """How often it was asked."""
        return len(self.asked)


class Service:
    """A handler behind a door, and a client before it. Whatever the handler raises comes out of the client's call."""

    def __init__(self, once: Once | AsyncOnce, call: Callable[..., httpx.Response], loop: "LoopThread") -> None:
        self.once = once
        self._call = call
        self._loop = loop

    def ask(self, verb: str, *args: Any, **options: Any) -> Any:
        """A verb of the ``Once`` or ``AsyncOnce`` that the door itself uses."""
        answer = getattr(self.once, verb)(*args, **options)
        return self._loop.run(answer) if inspect.isawaitable(answer) else answer

    def request(
        self,
        method: str,
        path: str,
        body: bytes | dict[str, Any] = b"",
        *,
        key: str | bytes | None = None,
        headers: Iterable[tuple[str, str | bytes]] = (),
    ) -> httpx.Response:
        """Send a request and read all of its answer."""
        sent: list[tuple[str, str | bytes]] = [JSON, *headers]
        if key is not None:
            sent.append(("Idempotency-Key", key))
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        raw = [(name.encode(), value if isinstance(value, bytes) else value.encode()) for name, value in sent]
        return self._call(method, path, content=content, headers=raw)

    def post(
        self,
        body: bytes | dict[str, Any],
        *,
        key: str | bytes | None = None,
        path: str = ITEMS,
        headers: Iterable[tuple[str, str | bytes]] = (),
    ) -> httpx.Response:
        """``POST /api/v1/items`` unless another path is given."""
        return self.request("POST", path, body, key=key, headers=headers)

    @contextmanager
    def under_way(
        self, slow: SlowIntake, body: bytes | dict[str, Any], *, key: str, **options: Any
    ) -> Iterator["Future[httpx.Response]"]:
        """While inside, a first request is held in the handler; when left, it goes on, at the latest."""
        with beside(lambda: self.post(body, key=key, **options)) as first:
            try:
                assert slow.entered.wait(PATIENCE)
                yield first
            finally:
                slow.gate.set()


class Doorway:
    """Opens services behind one kind of door over one space, and closes them when the test ends."""

    def __init__(self, kind: DoorKind, space: Space, loop: "LoopThread", closing: ExitStack) -> None:
        self.kind = kind
        self.space = space
        self._loop = loop
        self._closing = closing
        self._keys: Once | None = None

    @property
    def clock(self) -> FakeClock:
        return self.space.clock

    @property
    def keys(self) -> Once:
        """Another ``Once`` over the same space: to look at keys, or to be another door."""
        if self._keys is None:
            self._keys = self.space.open(collect=False)
        return self._keys

    def record(self, key: str, scope: str = SCOPE) -> Record | None:
        return self.keys.get(key, scope=scope)

    def store(self) -> Store:
        """The bare store, to be wrapped and handed to ``open``."""
        return self.space.store(awaited=self.kind == "asgi")

    def open(self, store: Store | None = None, **options: Any) -> Once | AsyncOnce:
        """An opened ``Once`` or ``AsyncOnce``, on the fake clock."""
        options.setdefault("policy", Policy.intake())
        if self.kind == "wsgi":
            return self.space.open(store, **options)
        once = self._loop.run(self.space.open_async(store, **options).__aenter__())
        self._closing.callback(lambda: self._loop.run(once.close()))
        return once

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Await it in the loop that the ASGI door lives in."""
        return self._loop.run(work)

    def serve(self, handler: Handler, once: Once | AsyncOnce | None = None, **options: Any) -> Service:
        """The handler behind the middleware, with these options."""
        once = once or self.open()
        if self.kind == "asgi":
            return self._asgi(asgi.IdempotencyMiddleware(asgi_app(handler), once, **options), once)
        return self._wsgi(wsgi.IdempotencyMiddleware(validator(wsgi_app(handler)), once, **options), once)

    def serve_url(self, handler: Handler, **options: Any) -> Service:
        """The same with the store's URL only, as most people write it: the middleware opens and closes it."""
        if self.kind == "wsgi":
            middleware = wsgi.IdempotencyMiddleware(validator(wsgi_app(handler)), self.space.url, **options)
            self._closing.callback(middleware.close)
            return self._wsgi(middleware, middleware._core.once)
        app = asgi.IdempotencyMiddleware(asgi_app(handler), self.space.url, **options)
        self._closing.enter_context(lifespan(app, self._loop))
        return self._asgi(app, app._core.once)

    def _asgi(self, app: Any, once: Once | AsyncOnce) -> Service:
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://intake")
        self._closing.callback(lambda: self._loop.run(client.aclose()))
        return Service(once, lambda *args, **how: self._loop.run(client.request(*args, **how)), self._loop)

    def _wsgi(self, app: Any, once: Once | AsyncOnce) -> Service:
        client = self._closing.enter_context(httpx.Client(transport=WsgiServer(app), base_url="http://intake"))
        return Service(once, client.request, self._loop)


@contextmanager
def doorway(kind: DoorKind, space: Space) -> Iterator[Doorway]:
    with LoopThread() as loop, ExitStack() as closing:
        yield Doorway(kind, space, loop, closing)


class LoopThread:
    """An event loop in a thread of its own, so that a test can call from where it is."""

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._pool = ThreadPoolExecutor(32)
        self._loop.set_default_executor(self._pool)
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        return self

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE)

    def __exit__(self, *_: object) -> None:
        self.run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE)
        self._loop.close()

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._loop.shutdown_default_executor()


@contextmanager
def lifespan(app: Any, loop: LoopThread) -> Iterator[None]:
    """The app's life as a server gives it: started before the first request, shut down after the last."""

    async def start() -> tuple["asyncio.Queue[Any]", "asyncio.Queue[Any]", "asyncio.Task[None]"]:
        told: asyncio.Queue[Any] = asyncio.Queue()
        said: asyncio.Queue[Any] = asyncio.Queue()
        task = asyncio.create_task(app({"type": "lifespan", "asgi": {"version": "3.0"}}, told.get, said.put))
        await told.put({"type": "lifespan.startup"})
        assert (await said.get())["type"] == "lifespan.startup.complete"
        return told, said, task

    async def end() -> None:
        await told.put({"type": "lifespan.shutdown"})
        assert (await said.get())["type"] == "lifespan.shutdown.complete"
        await task

    told, said, task = loop.run(start())
    try:
        yield
    finally:
        loop.run(end())


def asgi_app(handler: Handler) -> Any:
    """The handler as an ASGI app: an ``async def`` runs in the loop, a ``def`` in a thread."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            for event in ("startup", "shutdown"):
                assert (await receive())["type"] == f"lifespan.{event}"
                await send({"type": f"lifespan.{event}.complete"})
            return
        body, more = b"", True
        while more:
            message = await receive()
            body += message["body"]
            more = message["more_body"]
        headers = httpx.Headers(scope["headers"])
        asked = Asked(scope["method"], scope["path"], scope["query_string"].decode(), headers, body)
        given = handler(asked) if inspect.iscoroutinefunction(handler) else asyncio.to_thread(handler, asked)
        answer = await given
        sent = [(name.lower().encode(), value.encode()) for name, value in answer.all_headers]
        await send({"type": "http.response.start", "status": answer.status, "headers": sent})
        await send({"type": "http.response.body", "body": answer.body})

    return app


def wsgi_app(handler: Handler) -> Any:
    """The handler as a WSGI app."""

    def app(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
        headers = {name[5:].replace("_", "-"): value for name, value in environ.items() if name.startswith("HTTP_")}
        path, query = environ["SCRIPT_NAME"] + environ["PATH_INFO"], environ["QUERY_STRING"]
        answer = handler(Asked(environ["REQUEST_METHOD"], path, query, httpx.Headers(headers), body))
        assert isinstance(answer, Answer)
        start_response(status_line(answer.status), answer.all_headers)
        return [answer.body]

    return app


class WsgiServer(httpx.BaseTransport):
    """Calls a WSGI app as a server does: headers of one name are joined, and every byte is in latin-1's clothes."""

    def __init__(self, app: Any) -> None:
        self._app = validator(app)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        body = request.read()
        environ: dict[str, Any] = {
            "wsgi.version": (1, 0),
            "wsgi.url_scheme": "http",
            "wsgi.input": io.BytesIO(body),
            "wsgi.errors": io.StringIO(),
            "wsgi.multithread": True,
            "wsgi.multiprocess": False,
            "wsgi.run_once": False,
            "REQUEST_METHOD": request.method,
            "SCRIPT_NAME": "",
            "PATH_INFO": unquote_to_bytes(request.url.raw_path.partition(b"?")[0]).decode("latin-1"),
            "QUERY_STRING": request.url.query.decode("latin-1"),
            "SERVER_NAME": "intake",
            "SERVER_PORT": "80",
            "CONTENT_LENGTH": str(len(body)),
            "CONTENT_TYPE": request.headers["content-type"],
        }
        for raw, value in request.headers.raw:
            name = f"HTTP_{raw.decode().upper().replace('-', '_')}"
            if name not in {"HTTP_CONTENT_LENGTH", "HTTP_CONTENT_TYPE"}:
                text = value.decode("latin-1")
                environ[name] = f"{environ[name]},{text}" if name in environ else text
        started: list[Any] = []

        def start_response(status: str, headers: list[tuple[str, str]], *exc_info: Any) -> Callable[[bytes], None]:
            started[:] = [int(status[:3]), headers]
            return lambda chunk: None

        answer = self._app(environ, start_response)
        try:
            content = b"".join(answer)
        finally:
            answer.close()
        return httpx.Response(started[0], headers=started[1], stream=httpx.ByteStream(content))
