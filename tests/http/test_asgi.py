"""The ASGI middleware message by message: what it lets pass, what it holds back, and what the app gets to see."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from tempfile import TemporaryFile
from typing import Any

import pytest

from semel import AsyncOnce, StoreUnavailable
from semel.http import body as http_body
from semel.http.asgi import IdempotencyMiddleware
from semel.once.stores.memory import MemoryStore
from semel.testing import FaultyStore

START = {"type": "http.response.start", "status": 201, "headers": [(b"content-type", b"text/plain")]}
BODY = {"type": "http.response.body", "body": b"done"}
REQUEST = {"type": "http.request", "body": b"tea", "more_body": False}
GONE = {"type": "http.disconnect"}


def scope_of(*headers: tuple[bytes, bytes], **more: Any) -> dict[str, Any]:
    """A POST with the key ``k``."""
    return {
        "type": "http",
        "method": "POST",
        "path": "/orders",
        "headers": [(b"idempotency-key", b"k"), *headers],
        **more,
    }


class Recorded:
    """An app that records its scopes and what it received, and sends these messages."""

    def __init__(self, *messages: dict[str, Any], reads: int = 1) -> None:
        self.messages = messages or (START, BODY)
        self.reads = reads
        self.scopes: list[Any] = []
        self.received: list[Any] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope)
        for _ in range(self.reads):
            self.received.append(await receive())
        for message in self.messages:
            await send(message)


def serve(middleware: Any, scope: Any = None, received: Sequence[Any] = (REQUEST,), fails_at: int = -1) -> list[Any]:
    """Serve one connection; returns what was sent. The client leaves before the message ``fails_at``."""
    left, sent = list(received), list[Any]()

    async def receive() -> Any:
        return left.pop(0) if left else GONE

    async def send(message: Any) -> None:
        if len(sent) == fails_at:
            raise OSError("the client is gone")
        sent.append(message)

    asyncio.run(middleware(scope_of() if scope is None else scope, receive, send))
    return sent


def status_of(sent: list[Any]) -> int | None:
    return sent[0]["status"] if sent else None


def is_replay(sent: list[Any]) -> bool:
    return (b"idempotent-replayed", b"true") in sent[0]["headers"]


# -- what passes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scope", "options"),
    [
        ({"type": "websocket", "path": "/orders", "headers": []}, {"status_path": "/keys"}),
        (scope_of(method="GET"), {}),
        (scope_of(method="GET", path="/orders"), {"status_path": "/keys"}),
        ({**scope_of(), "headers": [(b"x-other", b"k")]}, {}),
        (scope_of(), {"paths": "/others"}),
        (scope_of(), {"exclude": "/orders"}),
        (scope_of(path="/shop/orders", root_path="/shop"), {"exclude": "/orders"}),
    ],
    ids=["websocket", "method", "no status", "no key", "paths", "exclude", "mounted"],
)
def test_what_is_not_covered_reaches_the_app_as_it_is_every_time(scope: dict[str, Any], options: Any) -> None:
    app = Recorded()
    middleware = IdempotencyMiddleware(app, "memory://", **options)
    for number in (1, 2):
        assert serve(middleware, dict(scope)) == [START, BODY]
        assert len(app.scopes) == number
    assert app.scopes[0] == scope


def test_a_key_is_required_only_where_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    app = Recorded()
    middleware = IdempotencyMiddleware(app, "memory://", required=True, paths="/orders")
    keyless = {**scope_of(), "headers": []}
    assert status_of(serve(middleware, keyless)) == 400
    assert app.scopes == []
    assert status_of(serve(middleware, {**keyless, "path": "/others"})) == 201


def test_the_status_of_a_key_is_told_without_the_app() -> None:
    app = Recorded()
    middleware = IdempotencyMiddleware(app, "memory://", status_path="/keys")
    asked = scope_of(method="GET", path="/keys/POST/orders", query_string=b"key=k")
    assert status_of(serve(middleware, asked)) == 404
    serve(middleware)
    assert status_of(serve(middleware, asked)) == 200
    assert len(app.scopes) == 1


# -- lifespan ----------------------------------------------------------------------------------------------------------


class Lived:
    """An app that starts and ends, and notes when."""

    def __init__(self, noted: list[str]) -> None:
        self.noted = noted

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        for step in ("startup", "shutdown"):
            message = await receive()
            assert message == {"type": f"lifespan.{step}"}
            self.noted.append(step)
            await send({"type": f"lifespan.{step}.complete"})


LIFE = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]
LIVED = ["lifespan.startup.complete", "lifespan.shutdown.complete"]


def watch(once: AsyncOnce, noted: list[str], error: Exception | None = None) -> None:
    """Note when the store is opened and closed; with an error, it cannot be opened."""
    close: Callable[[], Any] = once.close

    async def opened() -> None:
        noted.append("open")
        if error is not None:
            raise error

    async def closed() -> None:
        noted.append("close")
        await close()

    once.open, once.close = opened, closed  # type: ignore[method-assign]


@pytest.mark.parametrize("error", [None, StoreUnavailable("it is away")], ids=["there", "away"])
def test_a_store_of_its_own_is_open_while_the_app_lives(
    error: Exception | None, caplog: pytest.LogCaptureFixture
) -> None:
    noted: list[str] = []
    middleware = IdempotencyMiddleware(Lived(noted), "memory://")
    watch(middleware._core.once, noted, error)
    with caplog.at_level(logging.WARNING, "semel"):
        sent = serve(middleware, {"type": "lifespan"}, LIFE)
    assert [each["type"] for each in sent] == LIVED
    assert noted == ["open", "startup", "shutdown", "close"]
    assert caplog.messages == ([] if error is None else ["the store of idempotency keys is unavailable: it is away"])


def test_the_store_of_another_is_left_to_its_owner() -> None:
    noted: list[str] = []
    once = AsyncOnce("memory://")
    watch(once, noted)
    sent = serve(IdempotencyMiddleware(Lived(noted), once), {"type": "lifespan"}, LIFE)
    assert ([each["type"] for each in sent], noted) == (LIVED, ["startup", "shutdown"])


def test_a_store_that_can_never_work_fails_the_start(tmp_path: Any) -> None:
    noted: list[str] = []
    middleware = IdempotencyMiddleware(Lived(noted), f"sqlite:///{tmp_path / 'missing' / 'keys.db'}")
    (sent,) = serve(middleware, {"type": "lifespan"}, LIFE)
    assert (sent["type"], noted) == ("lifespan.startup.failed", [])
    assert "missing" in sent["message"]


# -- the request -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 5, 200_000])
def test_the_app_reads_the_body_and_then_hears_of_the_client(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []

    def open_file(**options: Any) -> Any:
        opened.append(TemporaryFile(**options))  # noqa: SIM115 -- closed by the body
        return opened[-1]

    monkeypatch.setattr(http_body, "TemporaryFile", open_file)
    content = b"x" * size
    parts = [
        {"type": "http.request", "body": content[:3], "more_body": True},
        {"type": "http.request", "body": content[3:]},
    ]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        read, more = b"", True
        while more:
            message = await receive()
            assert message["type"] == "http.request"
            assert len(message["body"]) <= http_body.CHUNK, "a large body is never in memory whole"
            read, more = read + message["body"], message["more_body"]
        assert read == content
        await send(START)
        await send(BODY)
        assert await receive() == GONE

    assert status_of(serve(IdempotencyMiddleware(app, "memory://", body_in_memory=100), None, parts)) == 201
    assert [file.closed for file in opened] == [True] * (size > 100)


def test_a_client_that_leaves_before_its_request_is_whole_changes_nothing() -> None:
    app = Recorded()
    middleware = IdempotencyMiddleware(app, "memory://")
    assert serve(middleware, None, [{"type": "http.request", "body": b"te", "more_body": True}, GONE]) == []
    assert app.scopes == []
    assert not is_replay(serve(middleware))


@pytest.mark.parametrize(
    ("length", "status"),
    [(b"11", 413), (b"9" * 18, 413), (b"10", 201), (b"9" * 19, 201), (b"-11", 201), ("²²".encode("latin-1"), 201)],
)
def test_a_request_that_says_it_is_too_large_is_refused_before_it_is_read(length: bytes, status: int) -> None:
    """A length that is no number is the server's to refuse."""
    middleware = IdempotencyMiddleware(Recorded(), "memory://", max_request_bytes=10)
    received = [] if status == 413 else [{"type": "http.request", "body": b"x" * 10}]
    assert status_of(serve(middleware, scope_of((b"content-length", length)), received)) == status


def test_a_request_without_a_limit_is_read_whatever_it_says() -> None:
    middleware = IdempotencyMiddleware(Recorded(), "memory://", max_request_bytes=None)
    assert status_of(serve(middleware, scope_of((b"content-length", b"99")))) == 201


def test_repeated_headers_are_one_as_http_joins_them() -> None:
    """Cookies with semicolons, others with commas: a caller is the same however the headers came."""
    for name, one, two in ((b"cookie", b"a=1", b"session=7"), (b"x-key", b"a", b"b")):
        names = "cookie:session" if name == b"cookie" else "x-key"
        middleware = IdempotencyMiddleware(Recorded(), "memory://", credentials=names)
        joined = (b"; " if name == b"cookie" else b",").join((one, two))
        serve(middleware, scope_of((name, one), (name, two)))
        assert is_replay(serve(middleware, scope_of((name, joined))))
        assert status_of(serve(middleware, scope_of((name, one)))) == 409


def test_a_path_that_the_server_could_not_decode_is_told_apart_by_its_bytes() -> None:
    middleware = IdempotencyMiddleware(Recorded(), "memory://")
    assert not is_replay(serve(middleware, scope_of(path="/\ufffd", raw_path=b"/%ff")))
    assert not is_replay(serve(middleware, scope_of(path="/\ufffd", raw_path=b"/%fe")))
    assert is_replay(serve(middleware, scope_of(path="/\ufffd", raw_path=b"/%FF")))
    assert not is_replay(serve(middleware, scope_of(path="/\ufffd")))
    assert not is_replay(serve(middleware, scope_of(path="/plain", raw_path=b"/%ff"))), "only where that is needed"


def test_the_app_is_offered_only_what_can_be_recorded() -> None:
    app = Recorded()
    extensions = {"http.response.pathsend": {}, "http.response.trailers": {}, "tls": {"version": 1}}
    headers = [(b"accept-encoding", b"br, gzip"), (b"accept-encoding", b"zstd"), (b"x-other", b"1")]
    serve(IdempotencyMiddleware(app, "memory://"), scope_of(*headers, extensions=extensions))
    assert app.scopes[0]["extensions"] == {"tls": {"version": 1}}
    seen = app.scopes[0]["headers"]
    assert seen == [(b"idempotency-key", b"k"), (b"x-other", b"1"), (b"accept-encoding", b"gzip")]
    plain = Recorded()
    serve(IdempotencyMiddleware(plain, "memory://"), scope_of())
    assert ("extensions" in plain.scopes[0], plain.scopes[0]["headers"]) == (False, [(b"idempotency-key", b"k")])


# -- the response ------------------------------------------------------------------------------------------------------


def test_other_messages_of_the_app_pass() -> None:
    other = {"type": "http.response.debug", "info": {}}
    assert other in serve(IdempotencyMiddleware(Recorded(other, START, BODY), "memory://"))


def test_a_part_is_sent_at_once_and_the_last_when_the_outcome_is_stored() -> None:
    """A body of known length is complete for the client with its last byte, though the app has not ended it."""
    sent: list[Any] = []
    seen: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({**START, "headers": [(b"content-length", b"4")]})
        for part in (b"do", b"ne", b""):
            seen.append(len(sent))
            await send({"type": "http.response.body", "body": part, "more_body": bool(part)})

    async def receive() -> Any:
        return REQUEST

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(IdempotencyMiddleware(app, "memory://")(scope_of(), receive, send))
    assert seen == [0, 2, 2]
    assert [message.get("body") for message in sent] == [None, b"do", b"ne", b""]


@pytest.mark.parametrize("fails_at", [0, 1])
def test_a_client_that_leaves_gets_its_response_when_it_comes_again(fails_at: int) -> None:
    parts = [{**BODY, "body": part, "more_body": bool(part)} for part in (b"one ", b"two", b"")]
    app = Recorded(START, *parts)
    middleware = IdempotencyMiddleware(app, "memory://")
    assert len(serve(middleware, fails_at=fails_at)) == fails_at
    again = serve(middleware)
    assert (is_replay(again), again[1]["body"], len(app.scopes)) == (True, b"one two", 1)


def test_what_is_too_large_to_be_kept_is_not_read_on_for_a_client_that_left() -> None:
    """It is neither sent nor stored, so the app is told."""
    parts = [{**BODY, "body": b"x" * 8, "more_body": True}] * 3
    app = Recorded(START, *parts)
    middleware = IdempotencyMiddleware(app, "memory://", max_response_bytes=10)
    with pytest.raises(OSError, match="the client is gone"):
        serve(middleware, fails_at=3)
    assert status_of(serve(middleware)) == 409, "it is known to have been too large"
    assert len(app.scopes) == 1


def test_the_app_hears_that_the_client_left_only_when_its_response_is_safe() -> None:
    heard: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        left = asyncio.create_task(receive())
        await asyncio.sleep(0)
        await send(START)
        await asyncio.sleep(0)
        heard.append("not yet" if not left.done() else "too early")
        await send(BODY)
        heard.append((await left)["type"])

    serve(IdempotencyMiddleware(app, "memory://"))
    assert heard == ["not yet", "http.disconnect"]


def test_half_a_response_is_sent_as_far_as_it_came_and_the_key_is_free() -> None:
    app = Recorded(START, {**BODY, "more_body": True})
    middleware = IdempotencyMiddleware(app, "memory://")
    for _ in range(2):
        assert [message["type"] for message in serve(middleware)] == ["http.response.start", "http.response.body"]
    assert len(app.scopes) == 2
    started = Recorded(START)
    assert len(serve(IdempotencyMiddleware(started, "memory://"))) == 1


def test_what_the_app_sends_after_its_response_was_withheld_is_dropped() -> None:
    """It was too large to be kept, and the store could not be told so."""
    store = FaultyStore(MemoryStore())
    parts = [{**BODY, "body": b"x" * 12, "more_body": more} for more in (True, True, False)]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        store.lose_request("complete")
        await Recorded(START, *parts, reads=0)(scope, receive, send)

    middleware = IdempotencyMiddleware(app, AsyncOnce(store, retry_for=0), max_response_bytes=10)
    sent = serve(middleware)
    assert (status_of(sent), len(sent)) == (503, 2)
