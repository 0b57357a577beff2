"""The WSGI middleware call by call: what it lets pass, what it holds back, and what the app gets to see."""

import io
import sys
from collections.abc import Iterator
from tempfile import TemporaryFile
from typing import Any

import pytest

from semel import Once
from semel.http import body as http_body
from semel.http.wsgi import IdempotencyMiddleware
from semel.once.stores.memory import MemoryStore
from semel.testing import FaultyStore


def environ_of(body: bytes = b"tea", **more: Any) -> dict[str, Any]:
    """A POST with the key ``k``."""
    return {
        "REQUEST_METHOD": "POST",
        "PATH_INFO": "/orders",
        "HTTP_IDEMPOTENCY_KEY": "k",
        "CONTENT_LENGTH": str(len(body)),
        "wsgi.input": io.BytesIO(body),
        **more,
    }


class Recorded:
    """An app that records its environs and bodies, and answers with these chunks."""

    def __init__(self, chunks: Any = (b"done",), status: str = "201 Created", headers: Any = ()) -> None:
        self.chunks, self.status, self.headers = chunks, status, headers
        self.environs: list[Any] = []
        self.bodies: list[bytes] = []

    def __call__(self, environ: Any, start: Any) -> Any:
        self.environs.append(dict(environ))
        self.bodies.append(environ["wsgi.input"].read())
        start(self.status, list(self.headers))
        return self.chunks() if callable(self.chunks) else self.chunks


class Served:
    """A response as the server gets it."""

    def __init__(self, middleware: Any, environ: dict[str, Any] | None = None) -> None:
        self.status: str | None = None
        self.headers: dict[str, str] = {}
        self.written: list[bytes] = []
        self.starts = 0
        self.exc_info: Any = None
        self.chunks = middleware(environ_of() if environ is None else environ, self.start)

    def start(self, status: str, headers: Any, exc_info: Any = None) -> Any:
        self.starts += 1
        self.exc_info = exc_info
        self.status, self.headers = status, {name.lower(): value for name, value in headers}
        return self.written.append

    def read(self) -> bytes:
        """The whole body; then the response is closed."""
        try:
            return b"".join((*self.written, *self.chunks))
        finally:
            self.close()

    def close(self) -> None:
        if hasattr(self.chunks, "close"):
            self.chunks.close()

    @property
    def replayed(self) -> bool:
        return self.headers.get("idempotent-replayed") == "true"


def served(middleware: Any, environ: dict[str, Any] | None = None) -> tuple[str | None, bytes, bool]:
    """Status, body, and whether it is a replay."""
    response = Served(middleware, environ)
    body = response.read()
    return response.status, body, response.replayed


@pytest.fixture
def once() -> Iterator[Once]:
    with Once("memory://") as once:
        yield once


# -- what passes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "options"),
    [
        ({"REQUEST_METHOD": "GET"}, {}),
        ({"REQUEST_METHOD": "GET"}, {"status_path": "/keys"}),
        ({"HTTP_IDEMPOTENCY_KEY": None}, {}),
        ({}, {"paths": "/others"}),
        ({}, {"exclude": "/orders"}),
        ({"SCRIPT_NAME": "/shop"}, {"exclude": "/shop/orders"}),
        ({"SCRIPT_NAME": "/shop"}, {"exclude": "/orders"}),
    ],
    ids=["method", "no status", "no key", "paths", "exclude", "mounted", "mounted, by its own name"],
)
def test_what_is_not_covered_reaches_the_app_every_time(once: Once, more: dict[str, Any], options: Any) -> None:
    app = Recorded()
    middleware = IdempotencyMiddleware(app, once, **options)
    for number in (1, 2):
        environ = {name: value for name, value in environ_of(**more).items() if value is not None}
        assert served(middleware, environ) == ("201 Created", b"done", False)
        assert len(app.environs) == number


def test_a_key_is_required_only_where_that_is_said(once: Once) -> None:
    app = Recorded()
    middleware = IdempotencyMiddleware(app, once, required=True, paths="/orders")
    keyless = {name: value for name, value in environ_of().items() if name != "HTTP_IDEMPOTENCY_KEY"}
    assert served(middleware, dict(keyless))[0] == "400 Bad Request"
    assert app.environs == []
    assert served(middleware, {**keyless, "PATH_INFO": "/others"})[0] == "201 Created"


def test_the_status_of_a_key_is_told_without_the_app(once: Once) -> None:
    app = Recorded()
    middleware = IdempotencyMiddleware(app, once, status_path="/keys")
    asked = {"REQUEST_METHOD": "GET", "PATH_INFO": "/keys/POST/orders", "QUERY_STRING": "key=k"}
    assert served(middleware, environ_of(**asked))[0] == "404 Not Found"
    served(middleware)
    assert served(middleware, environ_of(**asked))[0] == "200 OK"
    assert len(app.environs) == 1


def test_a_store_of_its_own_is_closed_and_that_of_another_is_not(once: Once) -> None:
    closed: list[str] = []
    own, other = IdempotencyMiddleware(Recorded(), "memory://"), IdempotencyMiddleware(Recorded(), once)
    for name, middleware in (("own", own), ("other", other)):
        close = middleware._core.once.close
        middleware._core.once.close = lambda name=name, close=close: (closed.append(name), close())  # type: ignore[method-assign, misc]
        middleware.close()
    assert closed == ["own"]


# -- the request -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 5, 200_000])
def test_the_app_reads_the_whole_body_which_is_closed_with_the_response(
    once: Once, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Any] = []

    def open_file(**options: Any) -> Any:
        opened.append(TemporaryFile(**options))  # noqa: SIM115 -- closed by the body
        return opened[-1]

    monkeypatch.setattr(http_body, "TemporaryFile", open_file)
    app = Recorded()
    middleware = IdempotencyMiddleware(app, once, body_in_memory=100)
    response = Served(middleware, environ_of(b"x" * size))
    assert (app.bodies, app.environs[0]["CONTENT_LENGTH"]) == ([b"x" * size], str(size))
    assert [file.closed for file in opened] == [False] * (size > 100)
    assert response.read() == b"done"
    assert served(middleware, environ_of(b"x" * size)) == ("201 Created", b"done", True)
    assert served(middleware, environ_of(b"y" * size + b"z"))[0] == "409 Conflict"
    assert all(file.closed for file in opened)


@pytest.mark.parametrize(
    ("length", "status"),
    [
        *(("11", "413 Content Too Large"), ("9" * 18, "413 Content Too Large"), ("10", "201 Created")),
        *((each, "400 Bad Request") for each in ("9" * 19, "-11", "²", "1x", "12345678901234567890")),
    ],
)
def test_a_length_that_is_too_large_or_no_length_is_refused_before_the_body_is_read(
    once: Once, length: str, status: str
) -> None:
    stream = io.BytesIO(b"x" * 10)
    app = Recorded()
    middleware = IdempotencyMiddleware(app, once, max_request_bytes=10)
    found = served(middleware, environ_of(**{"CONTENT_LENGTH": length, "wsgi.input": stream}))[0] or ""
    assert found[:3] == status[:3]
    assert (len(app.environs), stream.tell()) == ((1, 10) if status.startswith("201") else (0, 0))


def test_a_request_without_a_length_has_no_body(once: Once) -> None:
    app = Recorded()
    assert served(IdempotencyMiddleware(app, once), environ_of(CONTENT_LENGTH=""))[0] == "201 Created"
    assert app.bodies == [b""]


def test_a_request_that_fails_before_the_app_leaves_no_file_open(once: Once, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []

    def open_file(**options: Any) -> Any:
        opened.append(TemporaryFile(**options))  # noqa: SIM115 -- closed by the body
        return opened[-1]

    monkeypatch.setattr(http_body, "TemporaryFile", open_file)
    middleware = IdempotencyMiddleware(Recorded(), once, body_in_memory=0, tenant=lambda _: fail())
    with pytest.raises(ValueError, match="broken"):
        served(middleware)
    assert [file.closed for file in opened] == [True]


def test_a_request_without_a_limit_is_read_to_its_length(once: Once) -> None:
    app = Recorded()
    served(IdempotencyMiddleware(app, once, max_request_bytes=None), environ_of(b"x" * 300_000))
    assert app.bodies == [b"x" * 300_000]


class Breaking(io.BytesIO):
    """A connection that breaks after its bytes."""

    def read(self, size: int | None = -1) -> bytes:
        found = super().read(size)
        if not found:
            raise ConnectionResetError("the client is gone")
        return found


@pytest.mark.parametrize("stream", [io.BytesIO, Breaking])
@pytest.mark.parametrize(
    "more", [{"CONTENT_LENGTH": "4"}, {"CONTENT_LENGTH": "", "wsgi.input_terminated": True}], ids=str
)
def test_a_body_that_ends_early_changes_nothing(once: Once, stream: type[io.BytesIO], more: dict[str, Any]) -> None:
    app = Recorded()
    middleware = IdempotencyMiddleware(app, once)
    status = served(middleware, environ_of(**{"wsgi.input": stream(b"tea"), **more}))[0]
    whole = stream is io.BytesIO and more["CONTENT_LENGTH"] == ""
    assert (status, len(app.environs)) == (("201 Created", 1) if whole else ("400 Bad Request", 0))
    assert served(middleware)[2] is whole


def test_the_app_is_asked_only_for_codings_that_can_be_taken_off(once: Once) -> None:
    app = Recorded()
    middleware = IdempotencyMiddleware(app, once)
    served(middleware, environ_of(HTTP_ACCEPT_ENCODING="br, gzip"))
    assert app.environs[0]["HTTP_ACCEPT_ENCODING"] == "gzip"
    served(middleware, environ_of(HTTP_IDEMPOTENCY_KEY="other"))
    assert "HTTP_ACCEPT_ENCODING" not in app.environs[1]


# -- the response ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chunks", "status", "headers", "length"),
    [
        ([b"do", b"ne"], "201 Created", [], "4"),
        ((b"do", b"ne"), "201 Created", [], "4"),
        ([b"do", b"ne"], "201 Created", [("Content-Length", "4")], "4"),
        ([b"do", b"ne"], "201 Created", [("content-length", "4")], "4"),
        (lambda: iter([b"do", b"ne"]), "201 Created", [], None),
        ([], "204 No Content", [], None),
        ([], "304 Not Modified", [], None),
        ([], "205 Reset Content", [], "0"),
    ],
)
def test_a_list_has_a_length_as_servers_would_give_it(
    once: Once, chunks: Any, status: str, headers: list[tuple[str, str]], length: str | None
) -> None:
    response = Served(IdempotencyMiddleware(Recorded(chunks, status, headers), once))
    response.read()
    assert (response.status, response.headers.get("content-length"), response.starts) == (status, length, 1)


def test_a_chunk_leaves_at_once_and_the_last_when_the_outcome_is_stored(once: Once) -> None:
    """A body of known length is complete for the client with its last byte, though the app has not ended it."""
    noted: list[str] = []

    def chunks() -> Iterator[bytes]:
        for chunk in (b"do", b"", b"ne", b""):
            yield chunk
            record = once.get("k", scope="POST /orders")
            noted.append("" if record is None else record.status)

    response = Served(IdempotencyMiddleware(Recorded(chunks, headers=[("Content-Length", "4")]), once))
    assert next(response.chunks) == b"do"
    assert noted == []
    assert next(response.chunks) == b"ne"
    record = once.get("k", scope="POST /orders")
    assert (noted, record is not None and record.status) == (["in_flight"] * 4, "completed")
    assert list(response.chunks) == []


def test_a_response_that_the_server_closes_early_is_read_for_the_next_try(once: Once) -> None:
    closed: list[int] = []

    class Chunks:
        def __iter__(self) -> Iterator[bytes]:
            yield from (b"one ", b"two ", b"three")

        def close(self) -> None:
            closed.append(1)

    app = Recorded(Chunks)
    middleware = IdempotencyMiddleware(app, once)
    response = Served(middleware)
    assert next(response.chunks) == b"one "
    response.close()
    assert (closed, len(app.environs)) == ([1], 1)
    assert served(middleware) == ("201 Created", b"one two three", True)


def test_what_fails_after_the_server_closed_it_leaves_the_key_free(once: Once) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"one"
        raise ValueError("broken")

    app = Recorded(chunks)
    middleware = IdempotencyMiddleware(app, once)
    response = Served(middleware)
    next(response.chunks)
    with pytest.raises(ValueError, match="broken"):
        response.close()
    app.chunks = [b"whole"]
    assert served(middleware) == ("201 Created", b"whole", False)


def test_a_failed_response_that_is_too_large_is_not_read_on_when_the_server_closes_it(once: Once) -> None:
    read: list[int] = []

    def chunks() -> Iterator[bytes]:
        for number in range(10):
            read.append(number)
            yield b"x" * 8

    app = Recorded(chunks, "500 Internal Server Error")
    middleware = IdempotencyMiddleware(app, once, max_response_bytes=10)
    response = Served(middleware)
    next(response.chunks)
    next(response.chunks)
    response.close()
    assert len(read) < 5
    assert served(middleware)[0] == "500 Internal Server Error"
    assert len(app.environs) == 2, "the key was released"


def test_a_response_is_known_to_be_too_large_with_the_first_byte_over_the_limit(once: Once) -> None:
    middleware = IdempotencyMiddleware(Recorded(lambda: iter([b"x" * 8] * 3)), once, max_response_bytes=10)
    response = Served(middleware)
    assert next(response.chunks) == b"x" * 8
    assert once.get("k", scope="POST /orders").status == "in_flight"  # type: ignore[union-attr]
    assert next(response.chunks) == b"x" * 8
    assert served(middleware)[0] == "409 Conflict"
    assert once.get("k", scope="POST /orders").kind == "oversized"  # type: ignore[union-attr]
    assert response.read() == b"x" * 8


def fail() -> None:
    raise ValueError("broken")


def test_an_error_page_replaces_the_start_that_was_not_sent(once: Once) -> None:
    def app(environ: Any, start: Any) -> list[bytes]:
        start("201 Created", [])(b"half")
        try:
            fail()
        except ValueError:
            start("202 Accepted", [("X-Page", "error")], sys.exc_info())
        return [b"page"]

    response = Served(IdempotencyMiddleware(app, once))
    assert response.read() == b"page"
    assert (response.status, response.headers["x-page"], response.starts) == ("202 Accepted", "error", 1)
    assert response.exc_info[0] is ValueError, "a server that has sent another head raises it"
    assert served(IdempotencyMiddleware(app, once)) == ("202 Accepted", b"page", True)


def test_an_error_after_the_start_was_sent_ends_the_response(once: Once) -> None:
    def app(environ: Any, start: Any) -> Iterator[bytes]:
        start("201 Created", [])
        yield b"half"
        try:
            fail()
        except ValueError:
            start("500 Internal Server Error", [], sys.exc_info())
        yield b"page"

    response = Served(IdempotencyMiddleware(app, once))
    assert next(response.chunks) == b"half"
    with pytest.raises(ValueError, match="broken"):
        next(response.chunks)
    assert (response.status, response.starts) == ("201 Created", 1)
    assert once.get("k", scope="POST /orders") is None


def failing(environ: Any, start: Any) -> list[bytes]:
    raise ValueError("broken")


def failing_first(environ: Any, start: Any) -> Iterator[bytes]:
    fail()
    yield b"never"


@pytest.mark.parametrize("app", [failing, failing_first])
def test_an_exception_that_is_not_kept_is_the_servers_at_once(once: Once, app: Any) -> None:
    with pytest.raises(ValueError, match="broken"):
        Served(IdempotencyMiddleware(app, once))
    assert once.get("k", scope="POST /orders") is None


@pytest.mark.parametrize("app", [failing, failing_first])
def test_an_exception_that_is_kept_is_answered_before_it_is_raised(once: Once, app: Any) -> None:
    middleware = IdempotencyMiddleware(app, once, policy="stripe")
    response = Served(middleware)
    assert b"idempotent_request_failed" in next(response.chunks)
    with pytest.raises(ValueError, match="broken"):
        next(response.chunks)
    assert response.status == "500 Internal Server Error"
    response.close()
    assert served(middleware)[2] is True


def test_what_is_written_comes_before_what_is_returned(once: Once) -> None:
    def app(environ: Any, start: Any) -> list[bytes]:
        write = start("201 Created", [])
        write(b"one ")
        write(b"two ")
        return [b"three"]

    middleware = IdempotencyMiddleware(app, once)
    assert [served(middleware) for _ in range(2)] == [
        ("201 Created", b"one two three", False),
        ("201 Created", b"one two three", True),
    ]


def test_what_is_written_leaves_at_once_when_it_is_too_large_to_be_kept(once: Once) -> None:
    sent: list[bytes] = []

    def app(environ: Any, start: Any) -> list[bytes]:
        write = start("201 Created", [])
        for number in range(3):
            write(b"x" * 8)
            assert len(b"".join(sent)) == (0, 16, 24)[number]
        return [b"end"]

    chunks = IdempotencyMiddleware(app, once, max_response_bytes=10)(environ_of(), lambda *_: sent.append)
    assert b"".join((*sent, *chunks)) == b"x" * 24 + b"end"


def test_a_status_that_is_no_text_is_the_apps_error(once: Once) -> None:
    for status in (b"201 Created", 201):
        with pytest.raises(TypeError, match="the app's status is text, not"):
            Served(IdempotencyMiddleware(Recorded(status=status), once))  # type: ignore[arg-type]
    assert once.get("k", scope="POST /orders") is None


def test_a_response_that_could_not_be_stored_is_withheld() -> None:
    store = FaultyStore(MemoryStore())
    app = Recorded()
    with Once(store, retry_for=0) as once:
        store.lose_request("complete")
        status, body, _ = served(IdempotencyMiddleware(app, once))
    assert (status, b"done" in body, len(app.environs)) == ("503 Service Unavailable", False, 1)


def test_an_unprotected_response_closes_what_the_app_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """The inner of two middlewares: the request is under a claim already."""
    closed: list[int] = []

    class Chunks(list[bytes]):
        def close(self) -> None:
            closed.append(1)

    opened: list[Any] = []

    def open_file(**options: Any) -> Any:
        opened.append(TemporaryFile(**options))  # noqa: SIM115 -- closed by the body
        return opened[-1]

    monkeypatch.setattr(http_body, "TemporaryFile", open_file)
    with Once("memory://") as once:
        inner = IdempotencyMiddleware(Recorded(lambda: Chunks([b"done"])), once, body_in_memory=0)
        assert served(IdempotencyMiddleware(inner, once)) == ("201 Created", b"done", False)
    assert (closed, [file.closed for file in opened]) == ([1], [True])
