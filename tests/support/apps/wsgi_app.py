"""The app behind the WSGI door of test_http_wsgi_servers.py, run by gunicorn: one path for each way to answer.

It is told by the environment where the store is (STORE), the middleware's options (OPTIONS, JSON), and its folder
(FOLDER). There it notes what it does, for the test to read, and waits at gates until the test opens them.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

from flask import Flask, Response, request, send_file, stream_with_context

from semel import Policy, current_claim
from semel.http.wsgi import IdempotencyMiddleware
from support.process_peer import Desk

PICTURE = bytes(range(256)) * 8
SHEET = b"".join(b"%06d\n" % line for line in range(20_000))

Start = Callable[..., Callable[[bytes], object]]
Environ = dict[str, Any]


class Counted:
    """An iterable that notes its end, so that a test can see it closed, once."""

    def __init__(self, desk: Desk, key: str, chunks: Iterable[bytes]) -> None:
        self._desk, self._key, self._chunks = desk, key, chunks

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._chunks)

    def close(self) -> None:
        self._desk.note("closed", self._key)


class Broken(Exception):
    """What a failing app raises."""


def fail(why: str) -> NoReturn:
    raise Broken(why)


def plain(desk: Desk) -> Callable[[Environ, Start], Iterable[bytes]]:
    """A bare WSGI app; the path says what it does."""

    def app(environ: Environ, start: Start) -> Iterable[bytes]:
        path = environ["PATH_INFO"].strip("/")
        key = environ.get("HTTP_IDEMPOTENCY_KEY", "none")
        if path:
            desk.note("executed", key, fence=getattr(current_claim(None), "fence", None))
        answer: Iterable[bytes] = globals().get(f"answer_{path}", answer_)(desk, key, environ, start)
        return answer

    return app


def answer_(desk: Desk, key: str, environ: Environ, start: Start) -> Iterable[bytes]:
    start("200 OK", [("Content-Type", "text/plain")])
    return [b"nothing to do here"]


def answer_digest(desk: Desk, key: str, environ: Environ, start: Start) -> Iterable[bytes]:
    """What came in, read in pieces."""
    digest, size = hashlib.sha256(), 0
    while chunk := environ["wsgi.input"].read(50_000):
        digest.update(chunk)
        size += len(chunk)
    start("201 Created", [("Content-Type", "application/json")])
    return [json.dumps({"sha256": digest.hexdigest(), "size": size, "length": environ["CONTENT_LENGTH"]}).encode()]


def answer_steps(desk: Desk, key: str, environ: Environ, start: Start) -> Iterable[bytes]:
    """Three chunks; each is made when the test has opened its gate."""

    def chunks() -> Iterator[bytes]:
        for number in range(3):
            desk.wait_at(f"{key} {number}")
            desk.note("made", key)
            yield b"chunk %d\n" % number

    start("200 OK", [("Content-Type", "text/plain")])
    return Counted(desk, key, chunks())


def answer_sized_steps(desk: Desk, key: str, environ: Environ, start: Start) -> Iterable[bytes]:
    """The same, with a length: the client knows from the last byte on that it has all."""
    chunks = answer_steps(desk, key, environ, lambda *_: lambda _: None)
    start("200 OK", [("Content-Type", "text/plain"), ("Content-Length", "24")])
    return chunks


def answer_flood(desk: Desk, key: str, environ: Environ, start: Start) -> Iterable[bytes]:
    """Far more than the sockets hold, so that a client that leaves is noticed while there is more to come."""

    def chunks() -> Iterator[bytes]:
        for number in range(400):
            yield b"%06d " % number * 4096
        desk.note("made", key)

    start("200 OK", [("Content-Type", "text/plain")])
    return Counted(desk, key, chunks())


def answer_breaks(desk: Desk, key: str, environ: Environ, start: Start) -> Iterable[bytes]:
    """Fails after its first chunk, until the gate is open."""

    def chunks() -> Iterator[bytes]:
        yield b"first half, "
        if not desk.is_open(key):
            raise Broken("midway")
        yield b"second half"

    start("200 OK", [("Content-Type", "text/plain")])
    return Counted(desk, key, chunks())


def answer_raises(desk: Desk, key: str, environ: Environ, start: Start) -> Iterable[bytes]:
    if not desk.is_open(key):
        raise Broken("before the start")
    return answer_list(desk, key, environ, start)


def answer_first_next_raises(desk: Desk, key: str, environ: Environ, start: Start) -> Iterable[bytes]:
    def chunks() -> Iterator[bytes]:
        if not desk.is_open(key):
            raise Broken("at the first chunk")
        yield b"at last"

    start("200 OK", [("Content-Type", "text/plain")])
    return Counted(desk, key, chunks())


def answer_file(desk: Desk, key: str, environ: Environ, start: Start) -> Iterable[bytes]:
    """A file by the server's own wrapper."""
    path = desk.folder / "sheet"
    path.write_bytes(SHEET)
    file = path.open("rb")
    close = file.close

    class Watched:
        read = file.read

        @staticmethod
        def close() -> None:
            desk.note("closed", key)
            close()

    start("200 OK", [("Content-Type", "text/csv"), ("Content-Length", str(len(SHEET)))])
    wrapped: Iterable[bytes] = environ["wsgi.file_wrapper"](Watched(), 8192)
    return wrapped


def answer_write(desk: Desk, key: str, environ: Environ, start: Start) -> Iterable[bytes]:
    """WSGI's old way: the body goes to a function."""
    write = start("200 OK", [("Content-Type", "text/plain")])
    write(b"one ")
    write(b"two ")
    return Counted(desk, key, [b"three"])


def answer_only_write(desk: Desk, key: str, environ: Environ, start: Start) -> Iterable[bytes]:
    write = start("200 OK", [("Content-Type", "text/plain"), ("Content-Length", "8")])
    write(b"all of it"[:8])
    return []


def answer_reconsidered(desk: Desk, key: str, environ: Environ, start: Start) -> Iterable[bytes]:
    """An error is noticed before anything left: the start is replaced."""
    start("200 OK", [("Content-Type", "text/plain"), ("X-First", "yes")])
    try:
        fail("noticed in time")
    except Broken:
        start("202 Accepted", [("Content-Type", "text/plain"), ("Content-Length", "6")], sys.exc_info())
    return Counted(desk, key, [b"second"])


def answer_too_late(desk: Desk, key: str, environ: Environ, start: Start) -> Iterable[bytes]:
    """An error is noticed when a chunk has left: start_response raises it again."""

    def chunks() -> Iterator[bytes]:
        yield b"gone out"
        try:
            fail("noticed too late")
        except Broken:
            start("500 Oh", [("Content-Type", "text/plain")], sys.exc_info())
        desk.note("went on", key)
        yield b"never said"

    start("200 OK", [("Content-Type", "text/plain")])
    return Counted(desk, key, chunks())


def answer_taken_back(desk: Desk, key: str, environ: Environ, start: Start) -> Iterable[bytes]:
    """An error is noticed after write()."""
    write = start("200 OK", [("Content-Type", "text/plain")])
    write(b"written")
    try:
        fail("noticed after write()")
    except Broken:
        start("202 Accepted", [("Content-Type", "text/plain")], sys.exc_info())
    return [b"said instead"]


def answer_taken_back_at_the_end(desk: Desk, key: str, environ: Environ, start: Start) -> Iterable[bytes]:
    """An error is noticed after the chunk that completes the length."""

    def chunks() -> Iterator[bytes]:
        yield b"whole"
        try:
            fail("noticed after the whole")
        except Broken:
            start("202 Accepted", [("Content-Type", "text/plain")], sys.exc_info())
        yield b"said instead"

    start("200 OK", [("Content-Type", "text/plain"), ("Content-Length", "5")])
    return Counted(desk, key, chunks())


def answer_lazy(desk: Desk, key: str, environ: Environ, start: Start) -> Iterable[bytes]:
    """Starts its response when it is asked for the first chunk."""

    def chunks() -> Iterator[bytes]:
        start("201 Created", [("Content-Type", "text/plain"), ("X-Lazy", "yes")])
        yield b""
        yield b"late but "
        yield b"whole"

    return Counted(desk, key, chunks())


def answer_list(desk: Desk, key: str, environ: Environ, start: Start) -> Iterable[bytes]:
    start("201 Created", [("Content-Type", "text/plain"), ("Content-Length", "6")])
    return [b"a", b"", b"li", b"st!"]


def answer_tuple(desk: Desk, key: str, environ: Environ, start: Start) -> Iterable[bytes]:
    start("201 Created", [("Content-Type", "text/plain")])
    return (b"a ", b"tuple")


def answer_empty(desk: Desk, key: str, environ: Environ, start: Start) -> Iterable[bytes]:
    start("202 Accepted", [("Content-Type", "text/plain")])
    return Counted(desk, key, [])


def answer_empty_chunks(desk: Desk, key: str, environ: Environ, start: Start) -> Iterable[bytes]:
    start("202 Accepted", [("Content-Type", "text/plain"), ("Content-Length", "0")])
    return [b"", b""]


def answer_no_content(desk: Desk, key: str, environ: Environ, start: Start) -> Iterable[bytes]:
    start("204 No Content", [("X-Done", "yes")])
    return []


def answer_not_modified(desk: Desk, key: str, environ: Environ, start: Start) -> Iterable[bytes]:
    start("304 Not Modified", [("ETag", '"7"')])
    return []


def answer_picture(desk: Desk, key: str, environ: Environ, start: Start) -> Iterable[bytes]:
    start("200 OK", [("Content-Type", "image/png"), ("Content-Length", str(len(PICTURE)))])
    return [PICTURE]


def answer_links(desk: Desk, key: str, environ: Environ, start: Start) -> Iterable[bytes]:
    """Several headers of one name, in an order that counts, with bytes that are not ASCII."""
    links = [("Link", "</a>; rel=next"), ("X-Between", "caf\xe9"), ("Link", "</b>; rel=prev"), ("Vary", "Accept")]
    start("200 OK", [("Content-Type", "text/plain"), *links, ("Set-Cookie", "a=1"), ("Set-Cookie", "b=2")])
    return [b"linked"]


def answer_waits(desk: Desk, key: str, environ: Environ, start: Start) -> Iterable[bytes]:
    """Works until the test opens the gate."""
    desk.wait_at(key)
    desk.note("done", key)
    start("201 Created", [("Content-Type", "text/plain"), ("Content-Length", "4")])
    return Counted(desk, key, [b"done"])


def answer_silent(desk: Desk, key: str, environ: Environ, start: Start) -> Iterable[bytes]:
    """Against the rules: never calls start_response."""
    return Counted(desk, key, [])


def answer_twice(desk: Desk, key: str, environ: Environ, start: Start) -> Iterable[bytes]:
    """Against the rules: starts twice without an error to tell."""
    start("200 OK", [("Content-Type", "text/plain")])
    start("201 Created", [("Content-Type", "text/plain")])
    return [b"which?"]


def flask(desk: Desk) -> Flask:
    """The same in Flask, as far as Flask has ways of its own."""
    app = Flask("wsgi_app")

    def executed() -> str:
        key = request.headers.get("Idempotency-Key", "none")
        desk.note("executed", key, fence=getattr(current_claim(None), "fence", None))
        return key

    @app.post("/flask/item")
    def item() -> tuple[dict[str, Any], int]:
        executed()
        return {"got": request.get_json()}, 201

    @app.post("/flask/form")
    def form() -> dict[str, Any]:
        executed()
        file = request.files["file"]
        return {"field": request.form["field"], "sha256": hashlib.sha256(file.read()).hexdigest()}

    @app.post("/flask/stream")
    def stream() -> Response:
        key = executed()

        def chunks() -> Iterator[str]:
            for number in range(2):
                desk.wait_at(f"{key} {number}")
                yield f"{request.path} {number}\n"

        response = Response(stream_with_context(chunks()), mimetype="text/event-stream")
        response.call_on_close(lambda: desk.note("closed", key))
        return response

    @app.post("/flask/file")
    def file() -> Response:
        executed()
        path = desk.folder / "flask sheet"
        path.write_bytes(SHEET)
        return send_file(path, mimetype="text/csv")

    @app.post("/flask/raises")
    def raises() -> str:
        key = executed()
        if not desk.is_open(key):
            raise Broken("in Flask")
        return "at last"

    return app


def both(desk: Desk) -> Callable[[Environ, Start], Iterable[bytes]]:
    """The bare app and Flask's, by path."""
    bare, framed = plain(desk), flask(desk)

    def app(environ: Environ, start: Start) -> Iterable[bytes]:
        return framed(environ, start) if environ["PATH_INFO"].startswith("/flask/") else bare(environ, start)

    return app


if "STORE" in os.environ:
    options = json.loads(os.environ.get("OPTIONS", "{}"))
    if "policy" in options:
        options["policy"] = Policy(**options["policy"])
    app = IdempotencyMiddleware(both(Desk(os.environ["FOLDER"])), os.environ["STORE"], **options)
