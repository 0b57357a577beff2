"""The middlewares with what is around them: other middleware, mounts, odd apps, a store that comes and goes."""

import asyncio
import gzip
import io
import json
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from http import HTTPStatus
from tempfile import TemporaryFile
from typing import Any

import anyio
import httpx
import pytest
from litestar import Litestar, post
from litestar.config.compression import CompressionConfig
from litestar.middleware import DefineMiddleware
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route

from semel import AsyncOnce, Granted, InvalidRequest, Once, Policy, Unknown
from semel.errors import StoreUnavailable
from semel.http import body, protocol, wsgi
from semel.http import middleware as http_middleware
from semel.http.asgi import IdempotencyMiddleware
from semel.http.middleware import MiddlewareCore, ResponseRecorder
from semel.http.protocol import fingerprint_of_json
from semel.once.store import ClaimRequest, Complete, Release
from semel.once.stores.memory import MemoryStore
from semel.testing import FakeClock, FaultyStore
from semel.types import Claim

KEY = {"Idempotency-Key": "k"}
CLAIM = Claim("scope", "key", 1, "attempt", "", 60.0, 0, 0)


async def send(app: Any, path: str = "/orders", method: str = "POST", key: str | None = "k") -> httpx.Response:
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://shop"
    ) as client:
        return await client.request(method, path, headers={} if key is None else {"Idempotency-Key": key})


def answering(status: Any = 201, body: bytes = b"{}", headers: Sequence[tuple[bytes, bytes]] = ()) -> Any:
    """An app that counts its calls in ``app.ran``."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        app.ran.append(scope)  # type: ignore[attr-defined]
        await send({"type": "http.response.start", "status": status, "headers": list(headers)})
        await send({"type": "http.response.body", "body": body})

    app.ran = []  # type: ignore[attr-defined]
    return app


def test_a_status_may_be_an_enumeration() -> None:
    app = answering(HTTPStatus.CREATED)
    middleware = IdempotencyMiddleware(app, once="memory://")
    answers = [asyncio.run(send(middleware)) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [201, 201]
    assert len(app.ran) == 1


def test_a_request_that_passes_two_doors_is_carried_out_once() -> None:
    """The middleware on the app and on its parent: the inner one sees that the key is held for this very request."""
    app = answering()
    once = AsyncOnce("memory://")
    middleware = IdempotencyMiddleware(IdempotencyMiddleware(app, once=once), once=once)
    answers = [asyncio.run(send(middleware)) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [201, 201]
    assert len(app.ran) == 1


def test_a_wsgi_request_that_passes_two_doors_is_carried_out_once() -> None:
    ran = []

    def app(environ: Any, start: Any) -> list[bytes]:
        ran.append(environ["wsgi.input"].read())
        start("201 Created", [])
        return [b"done"]

    with Once("memory://") as once:
        middleware = wsgi.IdempotencyMiddleware(wsgi.IdempotencyMiddleware(app, once=once), once=once)
        with httpx.Client(transport=httpx.WSGITransport(middleware), base_url="http://shop") as client:
            answers = [client.post("/orders", content=b"tea", headers=KEY).text for _ in range(2)]
    assert answers == ["done", "done"]
    assert ran == [b"tea"]


def test_a_response_shorter_than_it_says_is_a_failure() -> None:
    """It is not made whole by storing it."""
    app = answering(200, b"half", [(b"content-length", b"8")])
    middleware = IdempotencyMiddleware(app, once="memory://")
    asyncio.run(send(middleware))
    asyncio.run(send(middleware))
    assert len(app.ran) == 2


def test_paths_to_leave_alone_may_come_from_an_iterator() -> None:
    app = answering()
    middleware = IdempotencyMiddleware(app, once="memory://", exclude=iter(["/orders"]))
    asyncio.run(send(middleware))
    asyncio.run(send(middleware))
    assert len(app.ran) == 2


def test_what_the_app_notes_in_the_scope_is_seen_outside() -> None:
    """Access logs and tracing read the route there when the app has ended."""
    app = answering()
    middleware = IdempotencyMiddleware(app, once="memory://")
    seen: list[Any] = []

    async def outer(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope)
        await middleware(scope, receive, send)

    asyncio.run(send(outer))
    assert app.ran[0] is seen[0]


def test_the_environ_is_the_servers_own() -> None:
    def app(environ: Any, start: Any) -> list[bytes]:
        environ["REMOTE_USER"] = "alice"
        start("200 OK", [])
        return [b""]

    environ = {"REQUEST_METHOD": "POST", "PATH_INFO": "/", "HTTP_IDEMPOTENCY_KEY": "k", "wsgi.input": io.BytesIO()}
    middleware = wsgi.IdempotencyMiddleware(app, once="memory://")
    list(middleware(environ, lambda *_: None))
    assert environ["REMOTE_USER"] == "alice"
    middleware.close()


def test_a_task_that_waits_for_the_client_to_leave_is_told_when_the_app_fails() -> None:
    received = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()

        async def watch() -> None:
            received.append((await receive())["type"])

        app.watching = asyncio.create_task(watch())  # type: ignore[attr-defined]
        await asyncio.sleep(0)
        raise RuntimeError("broken")

    async def scenario() -> None:
        assert (await send(IdempotencyMiddleware(app, once="memory://"))).status_code == 500
        await asyncio.wait_for(app.watching, 10)  # type: ignore[attr-defined]

    asyncio.run(scenario())
    assert received == ["http.disconnect"]


@pytest.mark.parametrize("pattern", ["/orders", "/shop/orders"])
def test_a_mounted_apps_paths_are_known_by_both_names(pattern: str) -> None:
    ran = []

    async def place(request: Request) -> JSONResponse:
        ran.append(1)
        return JSONResponse({}, 201)

    inner = Starlette(routes=[Route("/orders", place, methods=["POST"]), Route("/others", place, methods=["POST"])])
    inner.add_middleware(IdempotencyMiddleware, once="memory://", paths=pattern, status_path="/keys")
    app = Starlette(routes=[Mount("/shop", inner)])
    for _ in range(2):
        asyncio.run(send(app, "/shop/orders"))
    assert len(ran) == 1
    for _ in range(2):
        asyncio.run(send(app, "/shop/others"))
    assert len(ran) == 3
    assert asyncio.run(send(app, "/shop/keys/POST/shop/orders?key=k", "GET")).json()["status"] == "completed"


def test_the_status_of_a_key_is_found_where_a_function_makes_its_scope() -> None:
    middleware = IdempotencyMiddleware(
        answering(), once="memory://", status_path="/keys", scope=lambda scope: f"operation {scope['path']}"
    )
    asyncio.run(send(middleware))
    assert asyncio.run(send(middleware, "/keys/POST/orders?key=k", "GET")).json()["status"] == "completed"


def test_only_a_key_that_is_kept_has_a_date_of_expiry() -> None:
    assert "Idempotency-Expires" in asyncio.run(send(IdempotencyMiddleware(answering(201), once="memory://"))).headers
    refused = asyncio.run(send(IdempotencyMiddleware(answering(400), once="memory://")))
    assert "Idempotency-Expires" not in refused.headers


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"paths": "api/*"}, "paths= takes paths, which begin with a slash"),
        ({"exclude": ["health"]}, "exclude= takes paths"),
        ({"status_path": "keys"}, "status_path= takes paths"),
        ({"status_path": "/"}, "status_path= takes paths"),
        ({"status_path": 3}, "status_path must be text that is not empty"),
        ({"methods": "POST,PUT"}, "methods= takes names that are valid in HTTP, one by one"),
        ({"methods": []}, "methods= is empty"),
        ({"paths": []}, "paths= is empty"),
        ({"required": "no"}, "required must be True or False"),
        ({"tenant": asyncio.sleep}, "tenant= takes a plain function, not an async one"),
        ({"fingerprint": asyncio.sleep}, "fingerprint= takes a plain function"),
        ({"header": "Schlüssel"}, "header= takes names"),
        ({"policy": "jobs"}, "'jobs' is not a preset; there are intake, ietf, stripe, processor, router"),
    ],
    ids=lambda each: "-".join(each) if isinstance(each, dict) else each,
)
def test_an_option_that_can_never_work_is_said_at_the_start(options: Any, said: str) -> None:
    for middleware in (IdempotencyMiddleware, wsgi.IdempotencyMiddleware):
        with pytest.raises(InvalidRequest) as refused:
            middleware(answering(), once="memory://", **options)
        assert said in str(refused.value)


def test_a_tenant_that_is_no_name_is_refused() -> None:
    """The text of an object may be its place in memory: another user's, a moment later."""
    app = answering()
    middleware = IdempotencyMiddleware(app, once="memory://", tenant=lambda scope: object())
    assert asyncio.run(send(middleware)).status_code == 500
    assert app.ran == []


def test_work_that_outlives_its_store_gives_its_key_back(sqlite_url: str) -> None:
    """A server that is told to stop twice ends its life, the store's included, before it cancels what is under way."""

    async def scenario() -> None:
        once = AsyncOnce(sqlite_url)

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await once.close()
            await asyncio.sleep(3600)

        with anyio.move_on_after(0.5):
            await send(IdempotencyMiddleware(app, once=once))
        async with AsyncOnce(sqlite_url) as other:

            async def free() -> bool:
                return await other.get("k", scope="POST /orders") is None

            await until(free)

    asyncio.run(scenario())


def test_an_unprotected_request_is_closed_though_nobody_read_it() -> None:
    """store_failure="open": the server may close the response before it has asked for the first chunk."""
    closed = []

    class Chunks(list[bytes]):
        def close(self) -> None:
            closed.append(1)

    def app(environ: Any, start: Any) -> Chunks:
        start("200 OK", [])
        return Chunks([b"done"])

    once = Once("redis://127.0.0.1:1/0", retry_for=0)
    middleware = wsgi.IdempotencyMiddleware(app, once=once, policy=Policy.intake().but(store_failure="open"))
    environ = {"REQUEST_METHOD": "POST", "PATH_INFO": "/", "HTTP_IDEMPOTENCY_KEY": "k", "wsgi.input": io.BytesIO()}
    middleware(environ, lambda *_: None).close()  # type: ignore[attr-defined]
    assert closed == [1]
    once.close()


class Away:
    """A store that can be away, and slow to say that it has granted a claim."""

    coalesce = True
    expires_itself = True

    def __init__(self) -> None:
        self._inner = MemoryStore()
        self.away = False
        self.slow = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def claim(self, requests: Sequence[ClaimRequest]) -> Any:
        verdicts = await self._at(self._inner.claim, requests)
        slow, self.slow = self.slow, 0.0
        await asyncio.sleep(slow)
        return verdicts

    async def complete(self, requests: Sequence[Complete]) -> Any:
        return await self._at(self._inner.complete, requests)

    async def release(self, requests: Sequence[Release]) -> Any:
        return await self._at(self._inner.release, requests)

    async def _at(self, verb: Callable[[Any], Any], requests: Sequence[Any]) -> Any:
        if self.away:
            raise StoreUnavailable("away")
        return await verb(requests)


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(30):
        while not await condition():  # noqa: ASYNC110 -- nothing rings when a store has been told
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("raises", [True, False], ids=["an exception", "a response"])
def test_a_failure_that_is_kept_is_recorded_when_the_store_is_back(raises: bool) -> None:
    """Stripe's rules: what began is never begun again, also if the store was away when it ended."""
    ran = []

    async def scenario() -> None:
        store = Away()
        once = AsyncOnce(store, retry_for=0)

        async def app(scope: Any, receive: Any, send: Any) -> None:
            ran.append(1)
            store.away = True
            if raises:
                raise RuntimeError("after the card was charged")
            await answering(500)(scope, receive, send)

        middleware = IdempotencyMiddleware(app, once=once, policy="stripe")
        await send(middleware)
        store.away = False

        async def recorded() -> bool:
            record = await once.get("k", scope="http")
            return record is not None and record.status == "completed"

        await until(recorded)
        answer = await send(middleware)
        assert (answer.status_code, answer.headers["Idempotent-Replayed"]) == (500, "true")
        await once.close()

    asyncio.run(scenario())
    assert ran == [1]


@pytest.mark.parametrize("how", ["asyncio", "anyio"])
def test_a_request_cancelled_while_it_claims_frees_its_key(how: str) -> None:
    """anyio cancels again and again whatever is awaited, so nothing can be told to the store on the way out."""
    app = answering()

    async def scenario() -> None:
        store = Away()
        once = AsyncOnce(store)
        middleware = IdempotencyMiddleware(app, once=once)
        store.slow = 0.2
        if how == "anyio":
            with anyio.move_on_after(0.05):
                await send(middleware)
        else:
            with suppress(TimeoutError):
                await asyncio.wait_for(send(middleware), 0.05)
        assert app.ran == []

        async def free() -> bool:
            return await once.get("k", scope="POST /orders") is None

        await until(free)
        assert (await send(middleware)).status_code == 201
        await once.close()

    asyncio.run(scenario())
    assert len(app.ran) == 1


def test_what_is_owed_for_a_key_is_paid_before_it_is_claimed_again() -> None:
    """The store was away for longer than the lease: the retry comes first, and yet meets the outcome."""
    app = answering()

    async def scenario() -> None:
        store = Away()
        once = AsyncOnce(store, retry_for=0)
        once._engine._background.here().pending.pause = lambda: 3600.0  # type: ignore[method-assign]

        async def work(scope: Any, receive: Any, send: Any) -> None:
            store.away = True
            await app(scope, receive, send)

        middleware = IdempotencyMiddleware(work, once=once, policy=Policy(in_flight="conflict", lease=0.05))
        assert (await send(middleware)).status_code == 503
        await asyncio.sleep(0.1)  # the lease ends
        store.away = False
        answer = await send(middleware)
        assert (answer.status_code, answer.headers["Idempotent-Replayed"]) == (201, "true")
        await once.close()

    asyncio.run(scenario())
    assert len(app.ran) == 1


def test_what_the_store_never_takes_holds_up_nothing_else() -> None:
    """An outcome that is too large for the store is owed for long; other keys are given back meanwhile."""

    async def scenario() -> None:
        store = Away()
        once = AsyncOnce(store, retry_for=0)
        debts = once._engine._background.here().pending

        async def never(_: object) -> None:
            raise StoreUnavailable("too large")

        for number in range(5):
            debts._add(f"never {number}", never, 60)
        verdict = await once.claim("other")
        debts.retry_release(verdict.claim)  # type: ignore[union-attr]

        async def free() -> bool:
            return await once.get("other") is None

        await until(free)
        await once.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("lose", ["lose_request", "lose_reply"])
def test_what_is_unknown_stays_unknown_when_its_resolution_is_lost(lose: str) -> None:
    """To give it back in the background would say that the work did not happen, and nobody said so."""
    clock = FakeClock()
    store = FaultyStore(MemoryStore(clock))
    with Once(store, retry_for=0, policy=Policy(on_crash="unknown", in_flight="conflict", lease=60)) as once:
        assert isinstance(once.claim("k"), Granted)
        clock.advance(61)
        assert isinstance(once.claim("k"), Unknown)
        getattr(store, lose)("claim")
        with pytest.raises(StoreUnavailable):
            once.resolve("k", done=False)
        assert not once._engine._background.here().pending.writes
        clock.advance(61)
        assert isinstance(once.claim("k"), Unknown)


# -- bodies and codings ------------------------------------------------------------------------------------------------


def test_a_large_request_touches_no_disk_in_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither while it arrives nor while the app reads it; nor is its JSON parsed there."""
    touched: dict[str, set[int]] = {"write": set(), "read": set(), "print": set()}

    class Watched:
        def __init__(self, file: Any) -> None:
            self._file = file

        def __getattr__(self, name: str) -> Any:
            touched.get(name, set()).add(threading.get_ident())
            return getattr(self._file, name)

    def parse(*args: Any) -> str:
        touched["print"].add(threading.get_ident())
        return fingerprint_of_json(*args)

    monkeypatch.setattr(body, "TemporaryFile", lambda **options: Watched(TemporaryFile(**options)))  # noqa: SIM115 -- closed by the body
    monkeypatch.setattr(http_middleware, "fingerprint_of_json", parse)
    content = json.dumps({"x": "y" * 300_000}).encode()
    read = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        more = True
        while more:
            message = await receive()
            read.append(message["body"])
            more = message["more_body"]
        await answering()(scope, receive, send)

    middleware = IdempotencyMiddleware(app, once="memory://", body_in_memory=1000, fingerprint="json")

    async def scenario() -> None:
        async def upload() -> AsyncIterator[bytes]:
            for at in range(0, len(content), 50_000):
                yield content[at : at + 50_000]

        async with httpx.AsyncClient(transport=httpx.ASGITransport(middleware), base_url="http://shop") as client:
            answers = [await client.post("/", content=upload(), headers=KEY) for _ in range(2)]
        assert [answer.headers.get("Idempotent-Replayed") for answer in answers] == [None, "true"]
        assert all(threads and threading.get_ident() not in threads for threads in touched.values()), touched

    asyncio.run(scenario())
    assert b"".join(read) == content


def test_a_request_that_is_cancelled_while_it_goes_to_disk_leaves_no_file_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread that writes may be late: it opens nothing that nobody would close."""
    opened = []
    entered, gate = threading.Event(), threading.Event()

    def slow(**options: Any) -> Any:
        entered.set()
        assert gate.wait(30)
        opened.append(TemporaryFile(**options))  # noqa: SIM115 -- closed by the body
        return opened[-1]

    monkeypatch.setattr(body, "TemporaryFile", slow)

    async def scenario() -> None:
        middleware = IdempotencyMiddleware(answering(), once="memory://", body_in_memory=0)

        async def receive() -> Any:
            return {"type": "http.request", "body": b"x", "more_body": True}

        scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"idempotency-key", b"k")]}
        task = asyncio.create_task(middleware(scope, receive, receive))  # type: ignore[arg-type]
        assert await asyncio.to_thread(entered.wait, 30)
        task.cancel()
        asyncio.get_running_loop().call_later(0.05, gate.set)
        with suppress(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
    assert [file.closed for file in opened] == [True]


def test_a_replay_behind_litestars_compression_is_readable_by_every_client() -> None:
    """Litestar compresses inside of every middleware."""

    @post("/reports")
    async def report() -> dict[str, str]:
        return {"text": "word " * 1000}

    app = Litestar(
        [report],
        middleware=[DefineMiddleware(IdempotencyMiddleware, once=AsyncOnce("memory://"))],
        compression_config=CompressionConfig(backend="gzip", minimum_size=100),
    )

    async def scenario() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop") as client:
            accepted = ("gzip, br", "identity", "gzip", "br")
            return [await client.post("/reports", headers={**KEY, "Accept-Encoding": each}) for each in accepted]

    answers = asyncio.run(scenario())
    assert [answer.headers.get("content-encoding") for answer in answers] == ["gzip", None, "gzip", None]
    assert {answer.json()["text"] for answer in answers} == {"word " * 1000}
    assert [answer.headers.get("Idempotent-Replayed") for answer in answers] == [None, "true", "true", "true"]


def test_a_replay_is_not_decompressed_in_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small it is while it is compressed."""
    threads: set[int] = set()

    def unpack(body: bytes, size: int) -> bytes:
        threads.add(threading.get_ident())
        return gzip.decompress(body)

    monkeypatch.setitem(protocol._DECODERS, "gzip", unpack)
    packed = answering(body=gzip.compress(b"{}"), headers=[(b"Content-Encoding", b"gzip")])
    middleware = IdempotencyMiddleware(packed, once="memory://")

    async def scenario() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(middleware), base_url="http://shop") as client:
            answers = [await client.post("/", headers={**KEY, "Accept-Encoding": "identity"}) for _ in range(2)]
        assert [answer.headers.get("Idempotent-Replayed") for answer in answers] == [None, "true"]
        assert answers[1].content == b"{}"
        assert threads, "it was decompressed"
        assert threading.get_ident() not in threads

    asyncio.run(scenario())


def test_what_a_wsgi_app_writes_leaves_at_once_when_it_is_too_large_to_be_kept() -> None:
    """The old way to send: nothing obliges the server to ask for the first chunk before all of it is written."""
    sent: list[bytes] = []
    most = 0

    def app(environ: Any, start: Any) -> list[bytes]:
        nonlocal most
        write = start("200 OK", [])
        for _ in range(100):
            write(b"x" * 1000)
            most = max(most, 1000 * 100 - sum(map(len, sent)))
        return [b"end"]

    def start_response(status: str, headers: Any, exc_info: Any = None) -> Callable[[bytes], object]:
        return sent.append

    with Once("memory://") as once:
        middleware = wsgi.IdempotencyMiddleware(app, once=once, max_response_bytes=5000)
        environ = {"REQUEST_METHOD": "POST", "PATH_INFO": "/", "HTTP_IDEMPOTENCY_KEY": "k", "wsgi.input": io.BytesIO()}
        chunks = middleware(environ, start_response)
        assert sum(map(len, sent)) == 100_000, "all of it left before the first chunk was asked for"
        sent += chunks
        chunks.close()  # type: ignore[attr-defined]
        assert b"".join(sent) == b"x" * 100_000 + b"end"
        record = once.get("k", scope="POST /")
    assert record is not None
    assert record.kind == "oversized"


def test_a_wsgi_body_is_read_to_its_length_and_without_one_only_where_it_ends_by_itself() -> None:
    """A server's input may be the connection itself, with the next request behind the body."""
    read: list[bytes] = []

    def app(environ: Any, start: Any) -> list[bytes]:
        read.append(environ["wsgi.input"].read())
        start("201 Created", [])
        return []

    stated: list[tuple[dict[str, Any], bytes, bytes]] = [
        ({"CONTENT_LENGTH": "5"}, b"12345", b"POST /next"),
        ({"CONTENT_LENGTH": ""}, b"", b"12345POST /next"),
        ({"CONTENT_LENGTH": "", "wsgi.input_terminated": True}, b"12345POST /next", b""),
        ({"wsgi.input_terminated": True}, b"12345POST /next", b""),
    ]
    with Once("memory://") as once:
        middleware = wsgi.IdempotencyMiddleware(app, once=once)
        for number, (said, expected, left) in enumerate(stated):
            stream = io.BytesIO(b"12345POST /next")
            environ = {"REQUEST_METHOD": "POST", "PATH_INFO": "/", "HTTP_IDEMPOTENCY_KEY": f"k{number}"}
            list(middleware({**environ, "wsgi.input": stream, **said}, lambda *_: None))
            assert (read[-1], stream.read()) == (expected, left)


@pytest.mark.parametrize("again", [{"type": "http.response.start", "status": 202}, {"type": "http.response.body"}])
def test_what_an_app_sends_after_the_end_is_its_own_error(again: Any) -> None:
    """It is not forwarded, and the response stands."""
    failed = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await answering()(scope, receive, send)
        with pytest.raises(RuntimeError, match="the app sent") as error:
            await send(again)
        failed.append(error)

    middleware = IdempotencyMiddleware(app, once="memory://")
    answers = [asyncio.run(send(middleware)) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [201, 201]
    assert len(failed) == 1


# -- the core, decision by decision ------------------------------------------------------------------------------------


def core_of(**options: Any) -> MiddlewareCore[Once]:
    return MiddlewareCore(Once, "memory://", options)  # type: ignore[arg-type]


def test_how_much_of_a_body_is_in_memory() -> None:
    assert [core_of().body_in_memory, core_of(body_in_memory=0).body_in_memory] == [1 << 20, 0]
    assert core_of(body_in_memory=None).body_in_memory == 0


def test_whether_an_exception_is_kept_is_said_by_what_is_kept_of_500() -> None:
    assert [core_of(keep=[status]).policy.on_error for status in (500, 501)] == ["keep", "release"]
    assert core_of(policy="stripe").policy.on_error == "keep"


@pytest.mark.parametrize(
    ("options", "everywhere"),
    [({}, True), ({"paths": "*"}, False), ({"exclude": "/a"}, False), ({"exclude": ()}, True)],
)
def test_paths_are_looked_at_only_where_some_are_named(options: Any, everywhere: bool) -> None:
    assert core_of(**options).everywhere is everywhere


def test_events_are_told_whoever_opened_the_store() -> None:
    for shared in (True, False):
        heard: list[Any] = []
        with Once("memory://") as once:
            middleware = wsgi.IdempotencyMiddleware(
                lambda _, start: [start("201 Created", [])] and [b""],
                once if shared else "memory://",
                on_event=heard.append,
            )
            environ = {"REQUEST_METHOD": "POST", "PATH_INFO": "/", "HTTP_IDEMPOTENCY_KEY": "k"}
            list(middleware({**environ, "wsgi.input": io.BytesIO()}, lambda *_: None))
            middleware.close()
        assert heard, f"shared: {shared}"


@pytest.mark.parametrize(("status", "length", "complete"), [(204, b"5", True), (304, b"5", True), (205, b"5", False)])
def test_a_response_without_a_body_is_complete_whatever_its_length_says(
    status: int, length: bytes, complete: bool
) -> None:
    recorder = ResponseRecorder(core_of(), CLAIM)
    recorder.begin(status, [(b"content-length", length)])
    assert recorder.complete is complete


def test_the_recorder_takes_every_status_and_kind_of_bytes_that_a_server_sends() -> None:
    for status in (200, 599):
        recorder = ResponseRecorder(core_of(keep=[200, 599]), CLAIM)
        recorder.begin(status, [])
        for chunk in (b"a", bytearray(b"b"), memoryview(b"c")):
            recorder.add(chunk)  # type: ignore[arg-type]
        assert (recorder.is_outcome, recorder.response.status, recorder.response.body) == (True, status, b"abc")
        with pytest.raises(TypeError, match="the app sent str instead of bytes"):
            recorder.add("d")  # type: ignore[arg-type]


def test_a_second_start_forgets_what_came_before_it() -> None:
    recorder = ResponseRecorder(core_of(), CLAIM)
    recorder.begin(200, [(b"content-length", b"3")])
    recorder.add(b"abc")
    recorder.begin(202, [(b"Content-Length", b"2")])
    assert not recorder.complete
    assert [recorder.add(b"d"), recorder.complete, recorder.add(b"e")] == [False, False, True]
    assert recorder.response.body == b"de"


@pytest.mark.parametrize("size", [3, 4])
def test_what_is_over_the_limit_is_an_outcome_without_a_body(size: int) -> None:
    recorder = ResponseRecorder(core_of(max_response_bytes=3), CLAIM)
    recorder.begin(200, [(b"content-length", b"9")])
    recorder.add(b"x" * size)
    assert (recorder.too_large, recorder.is_outcome) == (size > 3, size > 3)
    failed = ResponseRecorder(core_of(max_response_bytes=3), CLAIM)
    failed.begin(500, [])
    failed.add(b"x" * size)
    assert not failed.is_outcome


def test_who_was_refused_for_other_credentials_is_told_in_the_log_alone(caplog: pytest.LogCaptureFixture) -> None:
    middleware = IdempotencyMiddleware(answering(), once="memory://")

    async def scenario() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(middleware), base_url="http://shop") as client:
            asked = [("ann", b"tea"), ("bob", b"tea"), ("eve", b"tea"), ("ann", b"cake")]
            return [await client.post("/", content=each, headers={**KEY, "Authorization": who}) for who, each in asked]

    with caplog.at_level("INFO", "semel"):
        answers = asyncio.run(scenario())
    assert [answer.status_code for answer in answers] == [201, 409, 409, 409]
    assert answers[1].content == answers[2].content == answers[3].content
    assert sum("first used with other credentials" in each for each in caplog.messages) == 2, "of bob and eve alone"


def test_a_request_that_meets_no_store_is_refused_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        store = Away()
        middleware = IdempotencyMiddleware(answering(), once=AsyncOnce(store, retry_for=0), status_path="/keys")
        store.away = True
        answer = await send(middleware)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")

    with caplog.at_level("WARNING", "semel"):
        asyncio.run(scenario())
    assert "a request with the key 'k' was refused: away" in caplog.messages


def test_a_response_that_could_not_be_stored_is_withheld_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    store = Away()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        store.away = True
        await answering()(scope, receive, send)

    with caplog.at_level("WARNING", "semel"):
        answer = asyncio.run(send(IdempotencyMiddleware(app, once=AsyncOnce(store, retry_for=0))))
    assert answer.status_code == 503
    assert "the response of the request with the key 'k' is withheld: away" in caplog.messages


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [
        ("/keys/POST/orders?key=k", "GET", 200),
        ("/keys/POST/orders?key=other", "GET", 404),
        ("/keys/POST/orders", "GET", 299),
        ("/keys/POST/orders?key=k&key=l", "GET", 299),
        ("/keys/POST/orders?key=k", "DELETE", 299),
        ("/keysPOST/orders?key=k", "GET", 299),
    ],
)
def test_only_a_get_with_one_key_asks_for_its_status(path: str, method: str, status: int) -> None:
    """Anything else is the app's."""
    app = answering(299)
    middleware = IdempotencyMiddleware(app, once="memory://", status_path="/keys", keep=[299])
    asyncio.run(send(middleware))
    answer = asyncio.run(send(middleware, path, method, key=None))
    assert (answer.status_code, len(app.ran)) == (status, 2 if status == 299 else 1)
    if status == 200:
        assert answer.json().keys() == {"idempotency_key", "status", "created_at", "expires_at", "lease_left"}


def test_cookies_are_found_by_their_names_alone() -> None:
    request = http_middleware.Request("POST", "/", b"", {}, "", {"cookie": "a=1; session=7; b=2", "x": " y "}.get)
    assert request.credentials(["cookie:session", "x", "cookie:c", "z"]) == b"cookie:session=7\nx=y\n"
    assert http_middleware.Request("POST", "/", b"", {}).credentials(["cookie:a", "x"]) == b""


def statuses(middleware: Any, *asked: tuple[str, dict[str, str]]) -> list[tuple[int, bool]]:
    """Post to these paths with these headers; the status of each response, and whether it is a replay."""

    async def scenario() -> list[tuple[int, bool]]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(middleware), base_url="http://shop") as client:
            answers = [await client.post(path, headers={**KEY, **headers}) for path, headers in asked]
        return [(answer.status_code, "idempotent-replayed" in answer.headers) for answer in answers]

    return asyncio.run(scenario())


@pytest.mark.parametrize(
    ("options", "second"),
    [
        ({}, (409, False)),
        ({"tenant": lambda scope: "acme"}, (201, True)),
        ({"tenant": lambda scope: None}, (409, False)),
        ({"tenant": lambda scope: "acme", "credentials": "Authorization"}, (409, False)),
        ({"credentials": None}, (201, True)),
    ],
    ids=["default", "tenant", "no tenant", "both", "neither"],
)
def test_a_tenant_stands_for_its_callers_unless_their_credentials_are_named(
    options: Any, second: tuple[int, bool]
) -> None:
    middleware = IdempotencyMiddleware(answering(), once="memory://", **options)
    ann, bob = {"Authorization": "ann"}, {"Authorization": "bob"}
    assert statuses(middleware, ("/", ann), ("/", bob), ("/", ann)) == [(201, False), second, (201, True)]


@pytest.mark.parametrize(
    ("options", "second"),
    [
        ({}, (201, False)),
        ({"policy": "stripe"}, (400, False)),
        ({"policy": "stripe", "scope": "orders"}, (201, True)),
        ({"scope": "orders"}, (201, True)),
        ({"scope": lambda scope: scope["path"]}, (201, False)),
    ],
    ids=["intake", "stripe", "stripe, named", "named", "by a function"],
)
def test_a_key_at_a_second_endpoint_is_another_a_conflict_or_the_same(options: Any, second: tuple[int, bool]) -> None:
    middleware = IdempotencyMiddleware(answering(), once="memory://", **options)
    assert statuses(middleware, ("/a", {}), ("/b", {})) == [(201, False), second]


def test_a_key_that_is_none_is_shown_and_refused() -> None:
    answer = asyncio.run(send(IdempotencyMiddleware(answering(), once="memory://"), key="a b"))
    assert (answer.status_code, answer.json()["idempotency_key"]) == (400, "a b")


def test_a_body_that_finds_no_room_is_refused_and_executes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: Any) -> Any:
        raise OSError("No space left on device")

    monkeypatch.setattr(body, "TemporaryFile", full)
    app = answering()
    middleware = IdempotencyMiddleware(app, once="memory://", body_in_memory=0)

    async def scenario() -> int:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(middleware), base_url="http://shop") as client:
            return (await client.post("/", content=b"tea", headers=KEY)).status_code

    assert (asyncio.run(scenario()), app.ran) == (503, [])


def test_large_json_is_parsed_where_there_is_no_event_loop() -> None:
    def app(environ: Any, start: Any) -> list[bytes]:
        start("201 Created", [])
        return [b"done"]

    content = json.dumps({"x": "y" * 100_000}).encode()
    with Once("memory://") as once:
        middleware = wsgi.IdempotencyMiddleware(app, once=once, fingerprint="json")
        with httpx.Client(transport=httpx.WSGITransport(middleware), base_url="http://shop") as client:
            answers = [client.post("/", content=each, headers=KEY) for each in (content, content.replace(b" ", b"\n"))]
    assert [answer.headers.get("Idempotent-Replayed") for answer in answers] == [None, "true"]


def test_a_request_whose_owner_vanished_is_not_carried_out_again() -> None:
    ran: list[int] = []

    def app(environ: Any, start: Any) -> Any:
        ran.append(1)
        start("201 Created", [])
        return iter([b"half", b"whole"])

    clock = FakeClock()
    with Once(MemoryStore(clock)) as once:
        policy = Policy.intake().but(on_crash="unknown")
        middleware = wsgi.IdempotencyMiddleware(app, once=once, policy=policy, status_path="/keys")
        environ = {"REQUEST_METHOD": "POST", "PATH_INFO": "/", "HTTP_IDEMPOTENCY_KEY": "k"}
        first = middleware({**environ, "wsgi.input": io.BytesIO()}, lambda *_: None)
        clock.advance(61)
        said: list[Any] = []
        answer = b"".join(middleware({**environ, "wsgi.input": io.BytesIO()}, lambda *each: said.extend(each)))
        assert json.loads(answer)["error_code"] == "IDEMPOTENCY_OUTCOME_UNKNOWN"
        assert (said[0], dict(said[1])["link"]) == ("409 Conflict", '</keys/POST/?key=k>; rel="status"')
        first.close()  # type: ignore[attr-defined]
    assert ran == [1]


def test_who_lost_the_claim_is_told_that_another_is_at_work() -> None:
    """The first request outlived its lease, and a second was carried out meanwhile: its response is the outcome."""
    clock = FakeClock()
    environ = {"REQUEST_METHOD": "POST", "PATH_INFO": "/", "HTTP_IDEMPOTENCY_KEY": "k"}
    ran: list[int] = []

    def call() -> bytes:
        return b"".join(middleware({**environ, "wsgi.input": io.BytesIO()}, lambda *_: None))

    def app(_: Any, start: Any) -> list[bytes]:
        ran.append(1)
        number = len(ran)
        if number == 1:
            clock.advance(61)
            call()
        start("201 Created", [])
        return [b"response %d" % number]

    with Once(MemoryStore(clock)) as once:
        middleware = wsgi.IdempotencyMiddleware(app, once=once)
        assert b"IDEMPOTENCY_KEY_PROCESSING" in call()
        assert call() == b"response 2"
    assert ran == [1, 1]
