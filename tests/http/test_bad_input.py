"""Bad input at the middlewares: keys, bodies, lengths, paths, tenants and JSON nobody should send, and apps that no
server should run. Nothing is executed that must not be, nothing twice, and no error is the middleware's own.

Most requests go over the bare ASGI and WSGI interfaces, as a server would make them, some over raw sockets.
"""

import asyncio
import io
import json
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from socketserver import ThreadingMixIn
from typing import Any
from urllib.parse import quote
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import pytest
import uvicorn
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from semel import AsyncOnce, Once
from semel.http import asgi, wsgi
from semel.once.stores.memory import MemoryStore
from semel.types import Verdict

PATIENCE = 60
DIALECTS = ("intake", "ietf", "stripe")
CONFLICT = {"intake": 409, "ietf": 422, "stripe": 400}
INTAKE_DETAIL = (
    "Invalid idempotency key format. Key must be 1-255 characters long and contain only letters, numbers, hyphens, "
    "and underscores"
)
INTAKE_HINT = 'This service takes the keys of policy="intake"; with policy="ietf" it would take this one'
WIDE_DETAIL = "Idempotency-Key must be 1-255 printable ASCII characters, quoted or without spaces, quotes and commas"


class CountingStore(MemoryStore):
    """Counts what is asked of it. Nobody needs to clean it: it lives for less than its keys."""

    expires_itself = True

    def __init__(self) -> None:
        super().__init__()
        self.claims = 0

    async def claim(self, requests: Any) -> list[Verdict]:
        self.claims += len(requests)
        return await super().claim(requests)

    def states(self) -> list[str]:
        return [record.state for records in self._scopes.values() for record in records.values()]


@dataclass(frozen=True)
class Request:
    """What a client sends: header values and path as bytes, the path without percent-encoding."""

    keys: tuple[bytes, ...] = (b"key",)
    body: bytes = b"{}"
    path: bytes = b"/items"
    query: bytes = b""
    method: str = "POST"
    tenant: Any = None
    whole: bool = True


@dataclass
class Answer:
    """What a client gets; None for a status when the connection breaks, with the error that the server sees."""

    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    error: BaseException | None = None

    @property
    def replayed(self) -> bool:
        return self.headers.get("idempotent-replayed") == "true"


class AppError(Exception):
    """The app's own."""


class AsgiHarness:
    """An app behind the ASGI middleware, driven as a server would."""

    def __init__(self, app: Any, **options: Any) -> None:
        self.store = CountingStore()
        self._runner = asyncio.Runner()
        self.middleware = asgi.IdempotencyMiddleware(
            app, AsyncOnce(self.store), tenant=lambda scope: scope["tenant"], **options
        )

    def close(self) -> None:
        self._runner.close()

    def send(self, request: Request) -> Answer:
        return self._runner.run(self.exchange(request))

    async def exchange(self, request: Request) -> Answer:
        half = len(request.body) // 2
        coming = [{"type": "http.request", "body": request.body[:half], "more_body": True}]
        if request.whole:
            coming.append({"type": "http.request", "body": request.body[half:], "more_body": False})
        sent: list[Any] = []

        async def receive() -> Any:
            return coming.pop(0) if coming else {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            check_message(message, sent)
            sent.append(message)

        scope = {
            "type": "http",
            "method": request.method,
            "path": request.path.decode("utf-8", "replace"),
            "raw_path": quote(request.path, safe="/").encode(),
            "query_string": request.query,
            "headers": [(b"host", b"shop"), *((b"idempotency-key", key) for key in request.keys)],
            "tenant": request.tenant,
            "harness": self,
            "request": request,
        }
        answer = Answer()
        try:
            await self.middleware(scope, receive, send)
        except Exception as error:  # noqa: BLE001 -- the test looks at it
            answer.error = error
        if sent:
            answer.status = sent[0]["status"]
            answer.headers = {name.decode().lower(): value.decode("latin-1") for name, value in sent[0]["headers"]}
            answer.body = b"".join(message.get("body", b"") for message in sent[1:])
        return answer


def check_message(message: Any, sent: list[Any]) -> None:
    """What servers insist on."""
    if message["type"] == "http.response.start":
        if sent:
            raise RuntimeError("the server got a second start")
        assert type(message["status"]) is int
        assert 100 <= message["status"] <= 599
        assert all(type(part) is bytes for pair in message["headers"] for part in pair)
    elif not sent:
        raise RuntimeError("the server got no start")
    elif len(sent) > 1 and not sent[-1].get("more_body"):
        raise RuntimeError("the server got more after the end")


class WsgiHarness:
    """An app behind the WSGI middleware, driven as a server would."""

    def __init__(self, app: Any, **options: Any) -> None:
        self.store = CountingStore()
        self.middleware = wsgi.IdempotencyMiddleware(
            app, Once(self.store), tenant=lambda environ: environ["tenant"], **options
        )

    def close(self) -> None:
        pass

    def send(self, request: Request, length: str | None = None, more: Mapping[str, Any] | None = None) -> Answer:
        coming = request.body if request.whole else request.body[: len(request.body) // 2]
        environ = {
            "REQUEST_METHOD": request.method,
            "SCRIPT_NAME": "",
            "PATH_INFO": request.path.decode("latin-1"),
            "QUERY_STRING": request.query.decode("latin-1"),
            "CONTENT_LENGTH": str(len(request.body) + (not request.whole)) if length is None else length,
            "wsgi.input": io.BytesIO(coming),
            "tenant": request.tenant,
            "harness": self,
            "request": request,
            **(more or {}),
        }
        if request.keys:
            environ["HTTP_IDEMPOTENCY_KEY"] = b", ".join(request.keys).decode("latin-1")
        answer = Answer()

        def start_response(status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Any:
            assert answer.status is None or exc_info, "the server got a second start"
            assert re.fullmatch("[2-5][0-9][0-9] .*", status)
            answer.status = int(status[:3])
            answer.headers = {name.lower(): value for name, value in headers}
            return lambda chunk: chunk

        try:
            chunks = self.middleware(environ, start_response)
            try:
                for chunk in chunks:
                    assert answer.status is not None, "the server got no start"
                    assert type(chunk) is bytes
                    answer.body += chunk
            finally:
                getattr(chunks, "close", lambda: None)()
        except Exception as error:  # noqa: BLE001 -- the test looks at it
            answer.error = error
        return answer


Harness = AsgiHarness | WsgiHarness


def behaviour(body: bytes) -> int:
    """The status that the shop answers with."""
    return next((status for status in (500, 422, 204) if b"!%d" % status in body), 201)


class Shop:
    """The same app for both middlewares. It notes each order, and the body says how it behaves."""

    def __init__(self) -> None:
        self.orders: list[tuple[Any, str, bytes, tuple[bytes, ...], bytes]] = []

    def _note(self, request: Request, body: bytes) -> tuple[int, bytes]:
        self.orders.append((request.tenant, request.method, request.path, request.keys, body))
        if b"!raise" in body:
            raise AppError
        return behaviour(body), b"order %d of %a" % (len(self.orders), request.tenant)

    async def asgi(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        request: Request = scope["request"]
        status, said = self._note(request, body)
        if b"!again" in body:
            again = await scope["harness"].exchange(request)
            said += b", meanwhile %d" % again.status
        said = b"" if status == 204 else said
        await send({"type": "http.response.start", "status": status, "headers": [(b"x-shop", b"1")]})
        await send({"type": "http.response.body", "body": said[:3], "more_body": True})
        await send({"type": "http.response.body", "body": said[3:]})

    def wsgi(self, environ: Any, start_response: Any) -> Iterator[bytes]:
        request: Request = environ["request"]
        status, said = self._note(request, environ["wsgi.input"].read())
        if b"!again" in request.body:
            again = environ["harness"].send(request)
            said += b", meanwhile %d" % again.status
        said = b"" if status == 204 else said
        start_response(f"{status} Whatever", [("X-Shop", "1")])
        return iter([said[:3], said[3:]])


HARNESSES = ("asgi", "wsgi")


@contextmanager
def opened(kind: str, app: Any, **options: Any) -> Iterator[Harness]:
    harness = AsgiHarness(app, **options) if kind == "asgi" else WsgiHarness(app, **options)
    try:
        yield harness
    finally:
        harness.close()


@pytest.fixture
def shop() -> Shop:
    return Shop()


@pytest.fixture(params=HARNESSES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def harness(kind: str, shop: Shop) -> Iterator[Harness]:
    with opened(kind, getattr(shop, kind)) as harness:
        yield harness


def refusal(dialect: str, key: str) -> Any:
    """The body of a refusal of a malformed key, as the document or the dialect has it."""
    match dialect:
        case "intake":
            said = {"detail": INTAKE_DETAIL, "error_code": "INVALID_IDEMPOTENCY_KEY", "idempotency_key": key}
            return said | ({"hint": INTAKE_HINT} if key in {"a.b", "../../etc/passwd", ":YWJj:"} else {})
        case "ietf":
            return {
                "type": "urn:semel:invalid-idempotency-key",
                "title": "Idempotency-Key is invalid",
                "status": 400,
                "detail": WIDE_DETAIL,
                "error_code": "INVALID_IDEMPOTENCY_KEY",
                "idempotency_key": key,
                "retryable": False,
            }
        case _:
            return {
                "error": {"type": "idempotency_error", "code": "invalid_idempotency_key", "message": WIDE_DETAIL},
            }


# -- keys ------------------------------------------------------------------------------------------------------------

MALFORMED: dict[str, tuple[bytes, ...]] = {
    "empty": (b"",),
    "only spaces": (b"   ",),
    "only a tab": (b"\t",),
    "256 characters": (b"k" * 256,),
    "256 quoted characters": (b'"' + b"k" * 256 + b'"',),
    "1 MB": (b"k" * 1_000_000,),
    "1 MB of quotes": (b'"' * 1_000_000,),
    "1 MB of commas": (b"k," * 500_000,),
    "a space inside": (b"a b",),
    "non-ASCII": ("clé".encode(),),
    "Cyrillic": ("ключ".encode(),),
    "fullwidth digits": ("\uff11\uff12".encode(),),
    "Arabic digits": ("٣".encode(),),
    "latin-1": (b"cl\xe9",),
    "no-break space after": (b"key\xa0",),
    "next line before": (b"\x85key",),
    "not UTF-8": (b"key\xff\xfe",),
    "zero-width joiner": ("a\u200db".encode(),),
    "NUL": (b"a\0b",),
    "NUL after": (b"key\0",),
    "bell": (b"key\x07",),
    "delete": (b"key\x7f",),
    "unit separator after": (b"key\x1f",),
    "form feed before": (b"\x0ckey",),
    "vertical tab after": (b"key\x0b",),
    "newline after": (b"key\n",),
    "CR LF and a header": (b"key\r\nX-Evil: 1",),
    "folded": (b"key\r\n more",),
    "two different": (b"a", b"b"),
    "two different, quoted": (b'"a"', b'"b"'),
    "two different in case": (b"Key", b"key"),
    "two different, joined": (b"a,b",),
    "two different, joined and quoted": (b'"a", "b"',),
    "three, the last different": (b"a", b"a", b"b"),
    "one good and one malformed": (b"good", b"a b"),
    "one good and one empty": (b"good", b""),
    "a comma after": (b"good,",),
    "a comma before": (b",good",),
    "only a comma": (b",",),
    "quoted empty": (b'""',),
    "unterminated quote": (b'"abc',),
    "quote at the end": (b'abc"',),
    "quote inside": (b'a"b',),
    "one quote": (b'"',),
    "three quotes": (b'"""',),
    "bad escape": (b'"a\\nb"',),
    "bad hex escape": (b'"\\x41"',),
    "escaped end": (b'"abc\\"',),
    "backslash": (b"a\\b",),
    "single quotes around spaces": (b"'a b'",),
    "parameters after a space": (b'"abc" ; v=1',),
    "text after the quotes": (b'"abc"def',),
    "text before the quotes": (b'abc"def"',),
    "quoted non-ASCII": ('"clé"'.encode(),),
    "quoted NUL": (b'"a\0b"',),
    "quoted newline": (b'"a\nb"',),
    "quoted tab": (b'"a\tb"',),
    "inner list": (b'("a" "b")',),
}
"""In every dialect."""

TOO_WIDE: dict[str, tuple[bytes, ...]] = {
    "the document's example": (b"@invalid-key#123",),
    "the document's other example": (b"invalid@key#123",),
    "percent-encoded": (b"abc%20def",),
    "percent-encoded line end": (b"key%0d%0aX-Evil:%201",),
    "dot": (b"a.b",),
    "path": (b"../../etc/passwd",),
    "quoted space": (b'"a b"',),
    "quoted comma": (b'"a,b"',),
    "escaped quote": (b'"a\\"b"',),
    "escaped backslash": (b'"a\\\\b"',),
    "byte sequence": (b":YWJj:",),
    "SQL": (b"';DROP--",),
    "JSON": (b"{}",),
    "a parameter": (b"abc;v=1",),
}
"""Malformed in the document; the draft and Stripe allow every printable character."""

FIELDS_WITH_PARAMETERS: dict[str, tuple[bytes, ...]] = {
    "a number": (b'"abc";v=1',),
    "several": (b'"abc"; v=-1.5;a;b=?0;*c=token/x;d="a, \\"b";e=:YWJj:;f=@1700000000',),
    "in one of two": (b'"abc"', b'"abc";v=1'),
    "in one of two, joined": (b'"abc";v="x,y", "abc"',),
}
"""RFC 8941: an item may have parameters. The draft says that the key is such an item, the others do not."""

REFUSED = [(dialect, name) for dialect in DIALECTS for name in MALFORMED] + [("intake", name) for name in TOO_WIDE]
REFUSED += [(dialect, name) for dialect in ("intake", "stripe") for name in FIELDS_WITH_PARAMETERS]


@pytest.mark.parametrize(("dialect", "name"), REFUSED)
def test_a_malformed_key_is_refused_with_exactly_the_documents_body(
    kind: str, shop: Shop, dialect: str, name: str
) -> None:
    keys = (MALFORMED | TOO_WIDE | FIELDS_WITH_PARAMETERS)[name]
    with opened(kind, getattr(shop, kind), policy=dialect) as harness:
        answer = harness.send(Request(keys))
        assert (answer.status, answer.error) == (400, None)
        assert json.loads(answer.body) == refusal(dialect, b", ".join(keys).decode("latin-1")[:255])
        assert answer.headers == {
            "content-type": "application/problem+json" if dialect == "ietf" else "application/json",
            "content-length": str(len(answer.body)),
        }
        assert shop.orders == []
        assert (harness.store.claims, harness.store.states()) == (0, [])


@pytest.mark.parametrize("dialect", ["ietf", "stripe"])
@pytest.mark.parametrize("name", TOO_WIDE)
def test_what_only_the_document_refuses_is_a_key_elsewhere(kind: str, shop: Shop, dialect: str, name: str) -> None:
    with opened(kind, getattr(shop, kind), policy=dialect) as harness:
        answers = [harness.send(Request(TOO_WIDE[name])) for _ in range(2)]
    assert [(answer.status, answer.replayed) for answer in answers] == [(201, False), (201, True)]
    assert len(shop.orders) == 1


@pytest.mark.parametrize("name", FIELDS_WITH_PARAMETERS)
def test_the_parameters_of_a_structured_field_are_no_part_of_its_key(kind: str, shop: Shop, name: str) -> None:
    with opened(kind, getattr(shop, kind), policy="ietf") as harness:
        assert harness.send(Request(FIELDS_WITH_PARAMETERS[name])).status == 201
        assert harness.send(Request((b"abc",))).replayed
        assert {key for records in harness.store._scopes.values() for key in records} == {"abc"}
        for bad in (b'"abc";', b'"abc";V=1', b'"abc";v=', b'"abc";v="', b'"abc";v=1;', b'"abc";v=1 2', b'"abc";=1'):
            assert harness.send(Request((bad,))).status == 400, bad
    assert len(shop.orders) == 1


SAME_KEY: list[tuple[bytes, ...]] = [
    (b"abc",),
    (b'"abc"',),
    (b"abc", b"abc"),
    (b'"abc"', b'"abc"'),
    (b"abc", b'"abc"'),
    (b"abc,abc",),
    (b"abc, abc",),
    (b'"abc", abc',),
    (b" abc\t",),
    (b'\t"abc" ',),
]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_one_key_said_in_many_ways_is_one_key(kind: str, shop: Shop, dialect: str) -> None:
    with opened(kind, getattr(shop, kind), policy=dialect) as harness:
        answers = [harness.send(Request(keys)) for keys in SAME_KEY]
    assert [(answer.status, answer.replayed) for answer in answers] == [(201, n > 0) for n in range(len(SAME_KEY))]
    assert len(shop.orders) == 1


def test_the_longest_key_is_a_key(harness: Harness, shop: Shop) -> None:
    assert harness.send(Request((b"k" * 255,))).status == 201
    assert harness.send(Request((b'"' + b"k" * 255 + b'"',))).replayed
    assert len(shop.orders) == 1


def test_keys_differ_in_case(harness: Harness, shop: Shop) -> None:
    assert not harness.send(Request((b"Key",))).replayed
    assert not harness.send(Request((b"key",))).replayed
    assert len(shop.orders) == 2


def test_a_hostile_key_costs_little_time(kind: str, shop: Shop) -> None:
    """Nothing in the reading of a key grows faster than the key."""
    hostile = [b'"a\\"' * 500, b',"' * 1000, b'""' * 1000, b"\\" * 2000, b" ," * 1000, b'"' + b" " * 2000, b"," * 2000]
    with opened(kind, getattr(shop, kind), policy="ietf") as harness:
        began = time.process_time()
        assert {harness.send(Request((key,))).status for key in hostile for _ in range(20)} == {400}
        assert time.process_time() - began < 2
    assert shop.orders == []


# -- over raw sockets ------------------------------------------------------------------------------------------------


class Quiet(WSGIRequestHandler):
    timeout = PATIENCE

    def log_message(self, *args: Any) -> None:
        pass


class ThreadingWsgiServer(ThreadingMixIn, WSGIServer):
    daemon_threads = False
    block_on_close = True


@dataclass
class ServerHarness:
    """A middleware on a real server, and what happened behind it."""

    port: int
    store: CountingStore
    bodies: list[bytes]

    def talk(self, *parts: bytes) -> tuple[int, dict[str, str], bytes]:
        """Send raw bytes, say that there is no more, and take the first answer; status 0 when there is none."""
        with socket.create_connection(("127.0.0.1", self.port), PATIENCE) as line:
            line.sendall(b"".join(parts))
            line.shutdown(socket.SHUT_WR)
            with line.makefile("rb") as file:
                said = file.read()
        if not said:
            return 0, {}, b""
        head, _, body = said.partition(b"\r\n\r\n")
        status, *lines = head.decode("latin-1").split("\r\n")
        return (
            int(status.split()[1]),
            {name.lower(): value for name, value in (each.split(": ", 1) for each in lines)},
            body,
        )


def raw(*headers: bytes, body: bytes = b"{}", length: bytes | None = None, target: bytes = b"/items") -> bytes:
    """A POST as bytes."""
    lines = [b"POST " + target + b" HTTP/1.1", b"Host: shop", b"Connection: close", *headers]
    lines.append(b"Content-Length: " + (b"%d" % len(body) if length is None else length))
    return b"\r\n".join([*lines, b"", body])


@pytest.fixture(scope="module")
def real_asgi() -> Iterator[ServerHarness]:
    harness = ServerHarness(0, CountingStore(), [])

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        harness.bodies.append(body)
        await send({"type": "http.response.start", "status": 201, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    middleware = asgi.IdempotencyMiddleware(app, AsyncOnce(harness.store))
    server = uvicorn.Server(uvicorn.Config(middleware, port=0, log_level="critical", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    deadline = time.monotonic() + PATIENCE
    while not server.started:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    harness.port = server.servers[0].sockets[0].getsockname()[1]
    yield harness
    server.should_exit = True
    thread.join(PATIENCE)
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def real_wsgi() -> Iterator[ServerHarness]:
    harness = ServerHarness(0, CountingStore(), [])

    def app(environ: Any, start_response: Any) -> list[bytes]:
        harness.bodies.append(environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0)))
        start_response("201 Created", [("Content-Length", "2")])
        return [b"ok"]

    middleware = wsgi.IdempotencyMiddleware(app, Once(harness.store))
    with make_server("127.0.0.1", 0, middleware, ThreadingWsgiServer, Quiet) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        harness.port = server.server_port
        yield harness
        server.shutdown()
        thread.join(PATIENCE)
        assert not thread.is_alive()


@pytest.fixture(params=HARNESSES)
def real(request: pytest.FixtureRequest) -> ServerHarness:
    harness: ServerHarness = request.getfixturevalue(f"real_{request.param}")
    harness.bodies.clear()
    harness.store.claims = 0
    harness.store._scopes.clear()
    return harness


INJECTIONS: dict[str, list[bytes]] = {
    "a second, different key": [b"Idempotency-Key: good", b"Idempotency-Key: evil"],
    "a second key in other letters": [b"Idempotency-Key: good", b"IDEMPOTENCY-KEY: evil"],
    "folded": [b"Idempotency-Key: good", b" evil"],
    "a bare LF inside": [b"Idempotency-Key: good\nIdempotency-Key: evil"],
    "a bare CR inside": [b"Idempotency-Key: good\rIdempotency-Key: evil"],
    "NUL inside": [b"Idempotency-Key: go\0od"],
    "escape inside": [b"Idempotency-Key: \x1b[2J"],
    "percent-encoded line end": [b"Idempotency-Key: good%0d%0aX-Evil:%201"],
    "quoted line end": [b'Idempotency-Key: "good\\r\\nX-Evil: 1"'],
    "nothing": [b"Idempotency-Key:"],
    "only spaces": [b"Idempotency-Key:    \t "],
    "60 KB": [b"Idempotency-Key: " + b"k" * 60_000],
}


@pytest.mark.parametrize("headers", INJECTIONS.values(), ids=INJECTIONS.keys())
def test_no_header_injection_reaches_the_handler_or_the_answer(real: ServerHarness, headers: list[bytes]) -> None:
    """Whether the server refuses it or the middleware does."""
    status, answered, body = real.talk(raw(*headers))
    assert status in {400, 431}
    assert not {name for name in answered if "evil" in name}
    if answered.get("content-type") == "application/json":
        said = json.loads(body)
        assert (said["detail"], said["error_code"]) == (INTAKE_DETAIL, "INVALID_IDEMPOTENCY_KEY")
    assert real.bodies == []
    assert (real.store.claims, real.store.states()) == (0, [])


def test_the_same_key_in_two_headers_counts_once(real: ServerHarness) -> None:
    twice = raw(b"Idempotency-Key: abc", b'Idempotency-Key: "abc"')
    assert real.talk(twice)[0] == 201
    assert real.talk(twice)[1]["idempotent-replayed"] == "true"
    assert real.bodies == [b"{}"]


def test_a_body_that_ends_early_executes_nothing_and_leaves_the_key_free(real: ServerHarness) -> None:
    status, _, body = real.talk(raw(b"Idempotency-Key: abc", body=b'{"half', length=b"100"))
    assert status in {0, 400}
    if status:
        assert json.loads(body)["error_code"] == "INCOMPLETE_REQUEST_BODY"
    assert real.bodies == []
    assert (real.store.claims, real.store.states()) == (0, [])
    status, headers, _ = real.talk(raw(b"Idempotency-Key: abc", body=b'{"whole": 1}'))
    assert (status, "idempotent-replayed" in headers) == (201, False)
    assert real.bodies == [b'{"whole": 1}']


LENGTHS = {
    "negative": b"-1",
    "with a sign": b"+2",
    "two alike": b"2, 2",
    "two different": b"2, 3",
    "hexadecimal": b"0x2",
    "exponent": b"1e3",
    "fraction": b"2.0",
    "with underscores": b"1_0",
    "words": b"two",
    "Arabic digits": "٢".encode(),
    "superscript": b"\xb2",
    "over 64 bits": b"18446744073709551618",
    "5000 digits": b"9" * 5000,
    "an exabyte": b"1000000000000000000",
}


@pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS.keys())
def test_a_hostile_content_length_never_executes_a_body_that_is_not_it(real: ServerHarness, length: bytes) -> None:
    status, _, _ = real.talk(raw(b"Idempotency-Key: abc", length=length))
    assert status in {0, 400, 413, 501} or (length, status) == (b"2, 2", 201)
    assert real.bodies == ([b"{}"] if status == 201 else [])
    assert real.store.states() == (["completed"] if status == 201 else [])
    assert real.talk(raw(b"Idempotency-Key: abc"))[0] == 201
    assert real.bodies == [b"{}"]


CARELESS = LENGTHS | {"a space before": b" 2", "a space after": b"2 ", "one too many": b"3"}


@pytest.mark.parametrize("terminated", [True, False], ids=["input terminated", "input open"])
@pytest.mark.parametrize("length", CARELESS.values(), ids=CARELESS.keys())
def test_a_content_length_that_a_careless_server_lets_through_is_refused(
    length: bytes, shop: Shop, terminated: bool
) -> None:
    with opened("wsgi", shop.wsgi) as harness:
        assert isinstance(harness, WsgiHarness)
        answer = harness.send(Request(), length.decode("latin-1"), {"wsgi.input_terminated": terminated})
        assert (answer.status, answer.error) == (400, None)
        assert json.loads(answer.body)["error_code"] == "INCOMPLETE_REQUEST_BODY"
        assert (shop.orders, harness.store.states()) == ([], [])
        assert harness.send(Request()).status == 201


class Broken(io.RawIOBase):
    """A connection that breaks while the body is read."""

    def read(self, size: int = -1) -> bytes:
        raise ConnectionResetError("the client left")


def test_a_body_whose_connection_breaks_executes_nothing(shop: Shop) -> None:
    with opened("wsgi", shop.wsgi) as harness:
        environ = {
            "REQUEST_METHOD": "POST",
            "PATH_INFO": "/items",
            "CONTENT_LENGTH": "2",
            "HTTP_IDEMPOTENCY_KEY": "key",
            "wsgi.input": Broken(),
            "tenant": None,
        }
        statuses: list[str] = []
        list(harness.middleware(environ, lambda status, headers: statuses.append(status)))
        assert statuses[0].startswith("400 "), "the client's connection broke: nobody is asked to wait for a store"
        assert (shop.orders, harness.store.states()) == ([], [])


def test_an_upload_in_many_empty_pieces_is_one_body(shop: Shop) -> None:
    with opened("asgi", shop.asgi) as harness:
        assert harness.send(Request(body=b"")).status == 201
        assert harness.send(Request(body=b"")).replayed
    assert [order[-1] for order in shop.orders] == [b""]


# -- paths, queries, tenants -----------------------------------------------------------------------------------------

PATHS: list[bytes] = [
    *(b"", b"/", b"//", b"///", b"*", b"/items", b"//items", b"/items/", b"/items//", b"/Items", b"/ITEMS"),
    *(b"/./items", b"/x/../items", b"/../items", b"/items/.", b"/items/..", b"items"),
    *(b"/items ", b"/ items", b"/items\t", b"/items\n", b"/items\r\n", b"/items\0", b"/items\x7f", b"/items\x1f"),
    *(b"/items%20", b"/items%", b"/items%zz", b"/items%252F", b"/items;a=1", b"/items,a", b"/items'", b'/items"'),
    *("/é".encode(), "/e\u0301".encode(), "/ключ".encode(), "/\u202eitems".encode(), "/\U0001f600".encode()),
    *("/\ufeffitems".encode(), "/\u2028".encode(), "/\ufffd".encode(), "/\x85".encode()),
    *(
        b"/\xff",
        b"/\xfe",
        b"/\xff\xfe",
        b"/\xc3",
        b"/\xc3(",
        b"/\xed\xa0\x80",
        b"/\xed\xb3\xbf",
        b"/\xf8\x88\x80\x80\x80",
    ),
    *(b"/" + b"x" * 10_000, b"/" + b"x" * 9_999 + b"y", b"/" + b"x" * 250, b"/" + b"x" * 249, b"/" + b"x" * 248),
    *(b"/" + b"\xff" * 5_000, b"/" + b"/" * 10_000, b"/" + b"../" * 3_000, b"/" + "é".encode() * 3_000),
    *(b"/items POST /items", b"/items a POST /items", b"/POST /items", b"/items?a=1", b"/items#x"),
]


@pytest.mark.parametrize("status_path", [None, "/status"])
def test_every_odd_path_is_a_place_of_its_own(kind: str, shop: Shop, status_path: str | None) -> None:
    assert len(set(PATHS)) == len(PATHS)
    with opened(kind, getattr(shop, kind), status_path=status_path) as harness:
        for replayed in (False, True):
            for path in PATHS:
                answer = harness.send(Request(path=path, body=b"!again"))
                assert (answer.status, answer.replayed, answer.error) == (201, replayed, None), path
                assert answer.body.endswith(b"meanwhile 409"), path
        assert [order[2] for order in shop.orders] == PATHS
        assert all(len(scope) <= 255 and scope.isprintable() for scope in harness.store._scopes)


def test_long_paths_that_look_like_a_shortened_scope_are_places_of_their_own(harness: Harness, shop: Shop) -> None:
    """The scope of a long path ends with a hash; no short path can be taken for it."""
    assert harness.send(Request(path=b"/" + b"x" * 10_000)).status == 201
    (scope,) = harness.store._scopes
    for path in (scope.removeprefix("POST "), scope, scope.replace(" ", "%20"), scope.removeprefix("POST")):
        assert not harness.send(Request(path=path.encode())).replayed
    assert len(shop.orders) == 5


QUERIES = [
    *(b"", b"a", b"a=1", b"a=1&", b"a=1&b=2", b"b=2&a=1", b"a=%31", b"?", b"&", b"=", b"a=\xff", b"a=\xfe", b"a=\0"),
    *(b"a=%ff", b"a=%0d%0a", b"q=" + b"x" * 100_000, b"a=1#b", b"key=other", b" ", b"a=\xe2\x82\xac"),
]


@pytest.mark.parametrize("fingerprint", ["body", "json"])
def test_every_odd_query_is_part_of_the_content(kind: str, shop: Shop, fingerprint: str) -> None:
    with opened(kind, getattr(shop, kind), fingerprint=fingerprint) as harness:
        for number, query in enumerate(QUERIES):
            keys = (b"key-%d" % number,)
            answers = [harness.send(Request(keys, query=each)) for each in (query, query, query + b"x")]
            assert [(answer.status, answer.replayed) for answer in answers] == [(201, False), (201, True), (409, False)]
            assert len(shop.orders) == number + 1


def test_no_body_can_pass_for_a_query_with_another_body(kind: str, shop: Shop) -> None:
    pairs = {
        "body": [(b"q=1", b"{}"), (b"", b"q=1 " + sha256(b"{}").digest()), (b"", sha256(b"{}").digest() + b"q=1")],
        "json": [(b"q=1", b'{"a":1}'), (b"", b'["q=1",{"a":1}]'), (b"", b'{"a":1}q=1')],
    }
    for fingerprint, requests in pairs.items():
        with opened(kind, getattr(shop, kind), fingerprint=fingerprint) as harness:
            statuses = [harness.send(Request(query=query, body=body)).status for query, body in requests]
            assert statuses == [201, 409, 409]


@pytest.mark.parametrize("query", [b"\xff", b"key=%ff&key=", b"key", b"key=" + b"x" * 70_000, b"key=%00", b"&" * 5000])
def test_an_odd_question_for_a_status_is_answered_or_passed_on(kind: str, shop: Shop, query: bytes) -> None:
    with opened(kind, getattr(shop, kind), status_path="/status") as harness:
        for path in (b"/status/POST/items", b"/status/", b"/status/POST", b"/status/\xff", b"/status/" + b"x" * 5000):
            answer = harness.send(Request((), method="GET", path=path, query=query))
            assert answer.error is None
            assert answer.status in {201, 400, 404}


TENANTS: list[Any] = [
    *(None, "a", "A", "a ", " a", "a b", "a  b", "a%20b", "a%2520b", "a/b", "a%2Fb", "a\\b", "a\nb", "a\0b", "a\tb"),
    *(
        "é",
        "e\u0301",
        "ключ",
        "\u202ea",
        "\U0001f600",
        "\ufeffa",
        "\ud800",
        "\udfff",
        "None",
        "0",
        "False",
        " ",
        "/",
        "%",
    ),
    *("POST", "POST /items", "a POST", "a POST /items", "POST /items a", "a POST /items POST", "..", "*", "'", '"'),
    *("t" * 190, "t" * 191, "t" * 255, "t" * 256, "t" * 10_000, "t" * 9_999 + "u", "é" * 5_000, "t" * 189 + " "),
]


def test_no_odd_tenant_meets_the_keys_of_another(harness: Harness, shop: Shop) -> None:
    places = [(tenant, path) for tenant in TENANTS for path in (b"/items", b"/items POST /items", b"/" + b"x" * 300)]
    for replayed in (False, True):
        for tenant, path in places:
            answer = harness.send(Request(tenant=tenant, path=path))
            assert (answer.status, answer.replayed, answer.error) == (201, replayed, None), (tenant, path)
            assert answer.body.endswith(b" of %a" % tenant)
    assert [(order[0], order[2]) for order in shop.orders] == places
    assert all(len(scope) <= 255 and scope.isprintable() for scope in harness.store._scopes)


def test_a_tenant_cannot_name_the_scope_of_another_even_when_scopes_are_shortened(harness: Harness, shop: Shop) -> None:
    assert harness.send(Request(tenant="t" * 10_000)).status == 201
    (scope,) = harness.store._scopes
    head, _, tail = scope.rpartition(" ")
    for tenant, path in ((head, b"/items"), (scope, b"/items"), (head, tail.encode()), (None, scope.encode())):
        assert not harness.send(Request(tenant=tenant, path=path)).replayed
    assert len(shop.orders) == 5


# -- JSON ------------------------------------------------------------------------------------------------------------

HOSTILE_JSON: dict[str, bytes] = {
    "nothing": b"",
    "only spaces": b"  \n ",
    "not JSON": b"{not json}",
    "half": b'{"a": [1, 2',
    "two": b"{}{}",
    "deep lists": b"[" * 100_000 + b"]" * 100_000,
    "deep lists, open": b"[" * 100_000,
    "deep objects": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "just too deep": b"[" * 201 + b"]" * 201,
    "not too deep": b"[" * 199 + b"]" * 199,
    "NaN": b'{"a": NaN}',
    "Infinity": b"[Infinity, -Infinity]",
    "an infinite exponent": b"[1e999, -1e999]",
    "a tiny exponent": b"[1e-999]",
    "an exponent of many digits": b"1e" + b"9" * 10_000,
    "4000 digits": b"9" * 4_000,
    "5000 digits": b"9" * 5_000,
    "many long numbers": b"[" + b",".join([b"9" * 4_000] * 50) + b"]",
    "a long fraction": b"0." + b"3" * 100_000,
    "minus zero": b"-0",
    "leading zero": b"007",
    "duplicate names": b'{"a": 1, "a": 2}',
    "duplicate names, escaped": b'{"a": 1, "\\u0061": 2}',
    "deep duplicate names": b'[{"x": {"a": 1, "a": 1}}]',
    "half a surrogate pair": b'"\\ud800"',
    "the other half": b'{"\\udfff": 1}',
    "half a pair as bytes": b'"\xed\xa0\x80"',
    "a whole pair": b'"\\ud83d\\ude00"',
    "NUL in text": b'"\\u0000"',
    "a raw control character": b'"\x01"',
    "byte order mark": b"\xef\xbb\xbf{}",
    "only a byte order mark": b"\xef\xbb\xbf",
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "UTF-16 without a mark": '{"a": 1}'.encode("utf-16-be"),
    "UTF-32": '{"a": 1}'.encode("utf-32"),
    "half of UTF-16": '{"a": 1}'.encode("utf-16")[:-1],
    "latin-1": b'"\xe9"',
    "not UTF-8": b'{"a": "\xff\xfe"}',
    "overlong": b'"\xc0\xaf"',
    "NUL bytes": b"\0" * 100,
    "compressed": b"\x1f\x8b\x08\x00\x00\x00",
    "many names": b"{" + b",".join(b'"%d":0' % n for n in range(20_000)) + b"}",
    "a long text": b'"' + b"\\n" * 200_000 + b'"',
    "prototype": b'{"__proto__": {"a": 1}, "__class__": 1}',
}


@pytest.mark.parametrize("body", HOSTILE_JSON.values(), ids=HOSTILE_JSON.keys())
def test_hostile_json_is_content_like_any_other(kind: str, shop: Shop, body: bytes) -> None:
    with opened(kind, getattr(shop, kind), fingerprint="json") as harness:
        answers = [harness.send(Request(body=each)) for each in (body, body, body + b"!")]
    assert [answer.error for answer in answers] == [None] * 3
    assert [(answer.status, answer.replayed) for answer in answers] == [(201, False), (201, True), (409, False)]
    assert [order[-1] for order in shop.orders] == [body]


SAME_JSON = [
    (b'{"a":1,"b":[2]}', b' { "b" : [ 2 ] ,\n"a" : 1 } '),
    (b"[1.0]", b"[1]"),
    (b'"\\u0041"', b'"A"'),
    (b'{"a":1}', b'\xef\xbb\xbf{"a":1}'),
    (b"[1e2]", b"[100]"),
]
OTHER_JSON = [
    (b'{"a":1}', b'{"a":"1"}'),
    (b'{"a":1}', b'{"a":true}'),
    (b"[0]", b"[false]"),
    (b"[null]", b"[]"),
    (b"[1,2]", b"[2,1]"),
    (b'{"a":2}', b'{"a":1,"a":2}'),
    (b'{"a":1,"a":2}', b'{"a":2,"a":1}'),
    (b"[NaN]", b"[null]"),
    (b"[1e999]", b"[2e999]"),
    (b"[9007199254740993]", b"[9007199254740992]"),
    (b"9" * 5000, b"9" * 5001),
    (b'"\\ud800"', b'"\\ud801"'),
    (b'"\xff"', b'"\xfe"'),
    (b"[" * 1000 + b"1" + b"]" * 1000, b"[" * 1000 + b"2" + b"]" * 1000),
]


@pytest.mark.parametrize(("one", "other"), SAME_JSON)
def test_the_same_json_in_another_layout_is_the_same_request(kind: str, shop: Shop, one: bytes, other: bytes) -> None:
    with opened(kind, getattr(shop, kind), fingerprint="json") as harness:
        harness.send(Request(body=one))
        assert harness.send(Request(body=other)).replayed


@pytest.mark.parametrize(("one", "other"), OTHER_JSON)
def test_json_that_differs_is_another_request(kind: str, shop: Shop, one: bytes, other: bytes) -> None:
    with opened(kind, getattr(shop, kind), fingerprint="json") as harness:
        assert harness.send(Request(body=one)).status == 201
        assert harness.send(Request(body=other)).status == 409


# -- apps that misbehave ---------------------------------------------------------------------------------------------

START = {"type": "http.response.start", "status": 201, "headers": [(b"x-shop", b"1")]}
BODY = {"type": "http.response.body", "body": b"done"}

BAD_ASGI_APPS: dict[str, list[Any]] = {
    "nothing at all": [],
    "no start": [BODY],
    "no start, in pieces": [{**BODY, "more_body": True}, BODY],
    "no body": [START],
    "no end": [START, {**BODY, "more_body": True}],
    "two starts": [START, {**START, "status": 202}, BODY],
    "two starts with a part between": [START, {**BODY, "more_body": True}, {**START, "status": 202}, BODY],
    "status 99": [{**START, "status": 99}, BODY],
    "status 0": [{**START, "status": 0}, BODY],
    "status 1000": [{**START, "status": 1000}, BODY],
    "status -1": [{**START, "status": -1}, BODY],
    "status as text": [{**START, "status": "201"}, BODY],
    "status as a float": [{**START, "status": 201.0}, BODY],
    "no status": [{"type": "http.response.start", "headers": []}, BODY],
    "status None": [{**START, "status": None}, BODY],
    "headers as text": [{**START, "headers": [("x-shop", "1")]}, BODY],
    "headers of three": [{**START, "headers": [(b"a", b"b", b"c")]}, BODY],
    "headers None": [{**START, "headers": None}, BODY],
    "headers of numbers": [{**START, "headers": [(b"content-length", 4)]}, BODY],
    "a dict of headers": [{**START, "headers": {b"a": b"b"}}, BODY],
    "body as text": [START, {**BODY, "body": "done"}],
    "body None": [START, {**BODY, "body": None}],
    "an unknown message": [{"type": "http.response.nonsense"}],
    "no type": [{}],
    "a websocket's message": [{"type": "websocket.accept"}],
}
"""Not a whole response: nothing that could be replayed."""

ODD_ASGI_APPS: dict[str, list[Any]] = {
    "two responses": [START, BODY, START, BODY],
    "a start after the end": [START, BODY, {**START, "status": 500}],
    "a body after the end": [START, BODY, {**BODY, "body": b"more"}],
    "too long for its length": [{**START, "headers": [(b"content-length", b"2")]}, BODY],
    "a length of nonsense": [{**START, "headers": [(b"content-length", b"-4")]}, BODY],
    "two lengths": [{**START, "headers": [(b"content-length", b"4"), (b"content-length", b"5")]}, BODY],
    "a body for 204": [{**START, "status": 204}, BODY],
    "no headers": [{"type": "http.response.start", "status": 201}, BODY],
    "no bytes in the body": [START, {"type": "http.response.body"}],
    "headers as an iterator": [{**START, "headers": ((b"x-shop", b"1"),)}, BODY],
}
"""A whole response, and something wrong with it or after it: the work was done."""


def playing(messages: Sequence[Any], runs: list[int]) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        runs.append(1)
        for message in messages:
            await send(dict(message))

    return app


@pytest.mark.parametrize("dialect", ["intake", "ietf"])
@pytest.mark.parametrize("name", BAD_ASGI_APPS)
def test_an_app_without_a_whole_response_leaves_the_key_free(name: str, dialect: str) -> None:
    runs: list[int] = []
    with opened("asgi", playing(BAD_ASGI_APPS[name], runs), policy=dialect) as harness:
        for attempt in (1, 2):
            answer = harness.send(Request())
            assert answer.error is not None or answer.status is None or name in {"no body", "no end"}
            assert not answer.replayed
            assert harness.store.states() in ([], ["released"])
            assert len(runs) == attempt
        harness.middleware.app = playing([START, BODY], runs)
        assert harness.send(Request()).body == b"done"
        assert harness.send(Request()).replayed


@pytest.mark.parametrize("name", ODD_ASGI_APPS)
def test_an_app_with_an_odd_response_is_not_run_twice(name: str) -> None:
    runs: list[int] = []
    with opened("asgi", playing(ODD_ASGI_APPS[name], runs)) as harness:
        harness.send(Request())
        assert harness.store.states() == ["completed"]
        answers = [harness.send(Request()) for _ in range(2)]
        for answer in answers:
            assert (answer.replayed, answer.error) == (True, None)
            assert answer.status in {201, 202, 204}
            assert answer.headers.get("content-length", "0") == str(len(answer.body))
    assert len(runs) == 1


def starting(status: Any = "201 Created", headers: Any = (("X-Shop", "1"),), chunks: Any = (b"done",)) -> Any:
    def app(environ: Any, start_response: Any) -> Any:
        start_response(status, list(headers) if isinstance(headers, tuple) else headers)
        return chunks

    return app


def writing(environ: Any, start_response: Any) -> list[bytes]:
    start_response("201 Created", [])(b"written ")
    return [b"done"]


def without_start(environ: Any, start_response: Any) -> list[bytes]:
    return [b"done"]


def failing_late(environ: Any, start_response: Any) -> Iterator[bytes]:
    start_response("201 Created", [])
    yield b"do"
    raise AppError


def starting_late(environ: Any, start_response: Any) -> Iterator[bytes]:
    yield b"do"
    start_response("201 Created", [])
    yield b"ne"


def starting_twice(environ: Any, start_response: Any) -> list[bytes]:
    start_response("201 Created", [])
    start_response("202 Accepted", [])
    return [b"done"]


class FailingClose(list[bytes]):
    def close(self) -> None:
        raise AppError


BAD_WSGI_APPS: dict[str, Any] = {
    "no start": without_start,
    "no start and no body": lambda environ, start_response: [],
    "a start after the first chunk": starting_late,
    "two starts": starting_twice,
    "returns nothing": starting(chunks=None),
    "returns a number": starting(chunks=5),
    "chunks of text": starting(chunks=["done"]),
    "a chunk that is None": starting(chunks=[b"do", None, b"ne"]),
    "a chunk that is a number": starting(chunks=[1]),
    "text": starting(chunks="done"),
    "fails between chunks": failing_late,
    "status 99": starting("99 Low"),
    "status 1000": starting("1000 High"),
    "status 000": starting("000 Nothing"),
    "a status of words": starting("Created"),
    "an empty status": starting(""),
    "a status that is a number": starting(201),
    "a status of bytes": starting(b"201 Created"),
    "None as status": starting(None),
    "headers None": starting(headers=None),
    "headers of bytes": starting(headers=[(b"X-Shop", b"1")]),
    "headers of numbers": starting(headers=[("Content-Length", 4)]),
    "headers of three": starting(headers=[("a", "b", "c")]),
    "headers beyond latin-1": starting(headers=[("X-Shop", "ключ")]),
}
ODD_WSGI_APPS: dict[str, Any] = {
    "writes": writing,
    "empty chunks": starting(chunks=[b"", b"done", b""]),
    "bytes as iterable of no chunk": starting(chunks=[]),
    "too long for its length": starting(headers=(("Content-Length", "2"),)),
    "a length of nonsense": starting(headers=(("Content-Length", "-4"),)),
    "a body for 204": starting("204 No Content"),
    "a status without words": starting("201 "),
    "bytearrays": starting(chunks=[bytearray(b"done")]),
}


def counted(app: Any, runs: list[int]) -> Any:
    def run(environ: Any, start_response: Any) -> Any:
        runs.append(1)
        return app(environ, start_response)

    return run


@pytest.mark.parametrize("dialect", ["intake", "ietf"])
@pytest.mark.parametrize("name", BAD_WSGI_APPS)
def test_a_wsgi_app_without_a_whole_response_leaves_the_key_free(name: str, dialect: str) -> None:
    runs: list[int] = []
    with opened("wsgi", counted(BAD_WSGI_APPS[name], runs), policy=dialect) as harness:
        for attempt in (1, 2):
            answer = harness.send(Request())
            assert answer.error is not None
            assert not isinstance(answer.error, AssertionError), answer.error
            assert not answer.replayed
            assert harness.store.states() in ([], ["released"])
            assert len(runs) == attempt
        harness.middleware.app = counted(starting(), runs)
        assert harness.send(Request()).body == b"done"
        assert harness.send(Request()).replayed


@pytest.mark.parametrize("name", ODD_WSGI_APPS)
def test_a_wsgi_app_with_an_odd_response_is_not_run_twice(name: str) -> None:
    runs: list[int] = []
    with opened("wsgi", counted(ODD_WSGI_APPS[name], runs)) as harness:
        first = harness.send(Request())
        assert first.error is None
        assert harness.store.states() == ["completed"]
        for answer in (harness.send(Request()), harness.send(Request())):
            assert (answer.replayed, answer.error, answer.status) == (True, None, first.status)
            assert answer.body == (b"" if first.status == 204 else first.body)
            assert answer.headers.get("content-length", "0") == str(len(answer.body))
    assert len(runs) == 1


def test_an_error_in_the_close_of_the_response_comes_after_the_outcome() -> None:
    runs: list[int] = []
    with opened("wsgi", counted(starting(chunks=FailingClose([b"done"])), runs)) as harness:
        assert isinstance(harness.send(Request()).error, AppError)
        assert harness.store.states() == ["completed"]
        assert harness.send(Request()).replayed
    assert len(runs) == 1


# -- anything --------------------------------------------------------------------------------------------------------


class Model:
    """What must happen, said simply: the dict of what was carried out, by tenant, method, path and key."""

    def __init__(self, dialect: str) -> None:
        self.dialect = dialect
        self.carried_out: dict[Any, tuple[Any, int, bytes | None]] = {}
        self.orders = 0
        self.raised = False

    def expect(self, request: Request) -> tuple[int | None, bytes | None, bool]:
        """Status, body (None: a refusal's) and whether it is replayed; no status for the app's error or half a body.

        Stripe keeps the app's error, and says the same to the first client as to all others.
        """
        self.raised = False
        if request.method != "POST" or not request.keys:
            return (*self._carry_out(request), False)
        key = self.key(request.keys)
        if key is None:
            return 400, None, False
        if not request.whole:
            return None, None, False
        endpoint, content = (request.method, request.path), (request.query, request.body)
        if self.dialect == "stripe":
            place: Any = (request.tenant, key)
            content += endpoint
        else:
            place = (request.tenant, *endpoint, key)
        if place in self.carried_out:
            known, status, body = self.carried_out[place]
            return (status, body, True) if known == content else (CONFLICT[self.dialect], None, False)
        first, body = self._carry_out(request)
        if first is None and self.dialect == "stripe":
            first = 500
        if first is not None and self._keeps(first):
            self.carried_out[place] = (content, first, body)
        return first, body, False

    def _keeps(self, status: int) -> bool:
        if self.dialect == "stripe":
            return status != 422
        return status < (400 if self.dialect == "intake" else 500)

    def _carry_out(self, request: Request) -> tuple[int | None, bytes | None]:
        body = request.body
        self.orders += 1
        if b"!raise" in body:
            self.raised = True
            return None, None
        status = behaviour(body)
        said = b"order %d of %a" % (self.orders, request.tenant)
        if b"!again" in body:
            said += b", meanwhile 409"
        return status, b"" if status == 204 else said

    def key(self, values: tuple[bytes, ...]) -> str | None:
        """The one key that all values say, read character by character."""
        found = {self._read(part) for value in values for part in split(value.decode("latin-1"))}
        return found.pop() if len(found) == 1 else None

    def _read(self, text: str) -> str | None:
        text = text.strip(" \t")
        quoted = text.startswith('"')
        if quoted:
            inside, end, parameters = text[1:].rpartition('"')
            if parameters and self.dialect != "ietf":
                end = ""
            for parameter in parameters.split(";")[1:]:
                if not re.fullmatch(r"[ ]*[a-z][a-z-]*(=1)?", parameter):
                    end = ""
            text = unescaped(inside) if end and parameters.partition(";")[0] == "" else "\0"
        if self.dialect == "intake":
            allowed = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")
        else:
            allowed = {chr(code) for code in range(32, 127)} - (set() if quoted else set(' ",\\'))
        return text if 1 <= len(text) <= 255 and set(text) <= allowed else None


def split(value: str) -> list[str]:
    """At commas outside of quotes."""
    parts, inside, escaped = [""], False, False
    for character in value:
        if character == "," and not inside:
            parts.append("")
            continue
        parts[-1] += character
        if character == '"' and not escaped:
            inside = not inside
        escaped = inside and character == "\\" and not escaped
    return parts


def unescaped(text: str) -> str:
    """The text between quotes; with a NUL in it, which no key may have, where it is not one."""
    said, rest = "", iter(text)
    for character in rest:
        if character == '"':
            return "\0"
        if character == "\\":
            character = next(rest, "\0")  # noqa: PLW2901 -- what is escaped stands for itself
            if character not in '"\\':
                return "\0"
        said += character
    return said


good_keys = st.sampled_from([b"a", b"b", b'"a"', b"a-1", b'"a-1"', b"A", b"k" * 255, b"a, a", b' "b"\t'])
odd_keys = st.one_of(
    st.sampled_from([keys[0] for keys in (MALFORMED | TOO_WIDE).values() if len(keys[0]) < 2000]),
    st.text('ab"\\, \t-;@\x00\x1f\x7f\xa0é', max_size=8).map(lambda text: text.encode("latin-1")),
    st.binary(max_size=6),
)
keys = st.one_of(
    st.tuples(good_keys),
    st.tuples(good_keys),
    st.tuples(good_keys, good_keys),
    st.tuples(odd_keys),
    st.lists(st.one_of(good_keys, odd_keys), max_size=3).map(tuple),
)
bodies = st.one_of(
    st.sampled_from(
        [b"{}", b"", b'{"sku": "A"}', b"!again", b"!422", b"!500", b"!204", b"!raise", b"!500 !again", b"!204 !again"]
    ),
    st.binary(max_size=40),
)
paths = st.one_of(st.sampled_from([b"/items", b"/items", b"/items/", *PATHS]), st.binary(max_size=12).map(b"/".__add__))
queries = st.one_of(st.just(b""), st.just(b""), st.sampled_from(QUERIES), st.binary(max_size=6))
methods = st.sampled_from(["POST"] * 8 + ["PUT", "GET", "post"])
tenants = st.sampled_from([None, None, "a", "b", "a b", "a POST /items", 7, "t" * 300])
wholes = st.sampled_from([True] * 9 + [False])
requests = st.builds(Request, keys, bodies, paths, queries, methods, tenants, wholes)
FIELDS = {"keys": keys, "body": bodies, "path": paths, "query": queries, "tenant": tenants, "whole": wholes}
changes = st.one_of([st.tuples(st.just(name), values) for name, values in FIELDS.items()])
variations = st.builds(
    lambda first, changes: [first, first, *(replace(first, **{name: value}) for name, value in changes)],
    requests,
    st.lists(changes, min_size=4, max_size=8),
)
"""Of one request, so that keys meet."""
some = st.one_of(variations, variations, st.lists(requests, min_size=6, max_size=8))


def check(dialect: str, asked: list[Request]) -> int:
    """Send all to both middlewares; they must do what the model says, and the same. Answer how many were sent."""
    model, shops = Model(dialect), {kind: Shop() for kind in HARNESSES}
    with (
        opened("asgi", shops["asgi"].asgi, policy=dialect) as asgi_harness,
        opened("wsgi", shops["wsgi"].wsgi, policy=dialect) as wsgi_harness,
    ):
        for request in asked:
            if request.method != "POST" or not request.keys:  # the app itself meets what the middleware would have read
                request = replace(request, whole=True, body=request.body.replace(b"!again", b""))  # noqa: PLW2901
            status, body, replayed = model.expect(request)
            answers = {"asgi": asgi_harness.send(request), "wsgi": wsgi_harness.send(request)}
            for kind, answer in answers.items():
                assert answer.error is None or isinstance(answer.error, AppError), (kind, request)
                if not request.whole and kind == "wsgi" and status is None:
                    assert (answer.status, b"early" in answer.body) == (400, True)
                    continue
                assert (answer.status, answer.replayed) == (status, replayed), (kind, request)
                assert (answer.error is not None) == model.raised, (kind, request)
                if body is not None:
                    assert answer.body == body, (kind, request)
            if request.whole:
                assert answers["asgi"].body == answers["wsgi"].body, request
                assert answers["asgi"].status == answers["wsgi"].status, request
            assert [len(shop.orders) for shop in shops.values()] == [model.orders] * 2, request
        assert set(asgi_harness.store.states() + wsgi_harness.store.states()) <= {"completed", "released"}
    return len(asked) * len(HARNESSES)


def test_10_000_random_requests_are_answered_as_the_model_says_by_both_middlewares_alike() -> None:
    sent = 0

    @settings(max_examples=800, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(DIALECTS), some)
    @example("ietf", [Request((b'"a\\"b"', b'"a\\"b"')), Request((b'"a\\"b"',))])
    def run(dialect: str, asked: list[Request]) -> None:
        nonlocal sent
        sent += check(dialect, asked)

    run()
    assert sent >= 10_000
