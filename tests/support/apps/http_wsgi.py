"""The cases of http_cases in bare WSGI and in Flask, and cases for these only."""

import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

from flask import Flask, Response, request, send_file

from semel import Once
from semel.http.wsgi import IdempotencyMiddleware
from support.apps.http_cases import CASES, READ, RETRIES, RULES, STORES, Broken, Call, Gate, Script, desk

Environ = dict[str, Any]
Start = Callable[..., Callable[[bytes], object]]


def played_blocking(script: Script, read: Callable[[int], bytes]) -> Iterator[Any]:
    answer: Any = None
    while True:
        try:
            step = script.send(answer)
        except StopIteration:
            return
        answer = None
        if isinstance(step, Gate):
            desk.wait_at(step.name)
        elif step is READ:
            digest, size = hashlib.sha256(), 0
            while chunk := read(50_000):
                digest.update(chunk)
                size += len(chunk)
            answer = digest.hexdigest(), size
        else:
            yield step


class Counted:
    """An iterable that logs when it is closed, so that a test can check that this happens once."""

    def __init__(self, call: Call, chunks: Iterable[bytes]) -> None:
        self._call, self._chunks = call, chunks

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._chunks)

    def close(self) -> None:
        self._call.note("closed")


PHRASES = {200: "OK", 201: "Created", 204: "No Content", 304: "Not Modified"}
TEXT = ("Content-Type", "text/plain")


def bare_wsgi(environ: Environ, start: Start) -> Iterable[bytes]:
    call = Call(environ.get("HTTP_IDEMPOTENCY_KEY", "none"), environ["QUERY_STRING"])
    call.note("length", stated=environ.get("CONTENT_LENGTH"))
    name = environ["PATH_INFO"].rsplit("/", 1)[1]
    if name in WSGI_CASES:
        return WSGI_CASES[name](call, environ, start)
    made = played_blocking(CASES[name](call), environ["wsgi.input"].read)
    head = next(made)
    line = f"{head.status} {PHRASES.get(head.status, 'Status')}"
    if head.stream:
        start(line, head.headers)
        return Counted(call, made)
    body = b"".join(made)
    length = [] if head.status in (204, 304) else [("Content-Length", str(len(body)))]
    start(line, [*head.headers, *length])
    return [body] if body else []


def wsgi_file(call: Call, environ: Environ, start: Start) -> Iterable[bytes]:
    """Sends a file with the server's `wsgi.file_wrapper`."""
    file = (desk.folder / f"{call.key}.bin").open("rb")
    size = os.fstat(file.fileno()).st_size

    class Watched:
        read = file.read

        @staticmethod
        def close() -> None:
            call.note("closed")
            file.close()

    start("200 OK", [("Content-Type", "application/octet-stream"), ("Content-Length", str(size))])
    wrapped: Iterable[bytes] = environ["wsgi.file_wrapper"](Watched(), 8192)
    return wrapped


def write(call: Call, environ: Environ, start: Start) -> Iterable[bytes]:
    """Sends the body with WSGI's legacy `write` function."""
    write = start("200 OK", [TEXT])
    write(b"one ")
    write(b"two ")
    return Counted(call, [b"three"])


def only_write(call: Call, environ: Environ, start: Start) -> Iterable[bytes]:
    start("200 OK", [TEXT, ("Content-Length", "8")])(b"all of i")
    return []


def fail(why: str) -> NoReturn:
    raise Broken(why)


def restart(start: Start, *more: tuple[str, str]) -> None:
    """Call start_response again with an error, as an app does that notices one late."""
    try:
        fail("noticed late")
    except Broken:
        start("202 Accepted", [TEXT, *more], sys.exc_info())


def reconsidered(call: Call, environ: Environ, start: Start) -> Iterable[bytes]:
    """Notices an error before anything was sent: the response is replaced."""
    start("200 OK", [TEXT, ("X-First", "yes")])
    restart(start, ("Content-Length", "6"))
    return Counted(call, [b"second"])


def too_late(call: Call, environ: Environ, start: Start) -> Iterable[bytes]:
    """Notices an error after a chunk was sent: start_response raises it again."""

    def chunks() -> Iterator[bytes]:
        yield b"gone out"
        restart(start)
        call.note("went on")
        yield b"never sent"

    start("200 OK", [TEXT])
    return Counted(call, chunks())


def taken_back(call: Call, environ: Environ, start: Start) -> Iterable[bytes]:
    """Notices an error after write()."""
    start("200 OK", [TEXT])(b"written")
    restart(start)
    return [b"sent instead"]


def taken_back_at_the_end(call: Call, environ: Environ, start: Start) -> Iterable[bytes]:
    """Notices an error after the chunk that completes the Content-Length."""

    def chunks() -> Iterator[bytes]:
        yield b"whole"
        restart(start)
        yield b"sent instead"

    start("200 OK", [TEXT, ("Content-Length", "5")])
    return Counted(call, chunks())


def lazy(call: Call, environ: Environ, start: Start) -> Iterable[bytes]:
    """Calls start_response only when its first chunk is read."""

    def chunks() -> Iterator[bytes]:
        start("201 Created", [TEXT])
        yield b""
        yield b"late but "
        yield b"whole"

    return Counted(call, chunks())


def several(call: Call, environ: Environ, start: Start) -> Iterable[bytes]:
    start("201 Created", [TEXT, ("Content-Length", "6")])
    return [b"a", b"", b"li", b"st!"]


def pair(call: Call, environ: Environ, start: Start) -> Iterable[bytes]:
    start("201 Created", [TEXT])
    return (b"a ", b"tuple")


def empty(call: Call, environ: Environ, start: Start) -> Iterable[bytes]:
    start("202 Accepted", [TEXT])
    return Counted(call, [])


def empty_chunks(call: Call, environ: Environ, start: Start) -> Iterable[bytes]:
    start("202 Accepted", [TEXT, ("Content-Length", "0")])
    return [b"", b""]


def silent(call: Call, environ: Environ, start: Start) -> Iterable[bytes]:
    """Violates WSGI: never calls start_response."""
    return Counted(call, [])


def twice(call: Call, environ: Environ, start: Start) -> Iterable[bytes]:
    """Violates WSGI: calls start_response twice without an error."""
    start("200 OK", [TEXT])
    start("201 Created", [TEXT])
    return [b"which?"]


WSGI_CASES: dict[str, Callable[[Call, Environ, Start], Iterable[bytes]]] = {
    "file": wsgi_file,
    **{
        case.__name__: case
        for case in (
            *(write, only_write, reconsidered, too_late, taken_back, taken_back_at_the_end, lazy, several, pair),
            *(empty, empty_chunks, silent, twice),
        )
    },
}


def flask_app() -> Flask:
    app = Flask("http_wsgi")

    def call_of() -> Call:
        return Call(request.headers.get("Idempotency-Key", "none"), request.query_string.decode())

    @app.post("/flask/<store>/<rule>/<case>")
    def play(store: str, rule: str, case: str) -> Response:
        call = call_of()
        made = played_blocking(CASES[case](call), request.stream.read)
        head = next(made)
        response = Response(made if head.stream else b"".join(made), head.status)
        response.headers.remove("Content-Type")
        for name, value in head.headers:
            response.headers.add(name, value)
        if head.stream:
            response.call_on_close(lambda: call.note("closed"))
        return response

    @app.post("/flask/<store>/<rule>/file")
    def file(store: str, rule: str) -> Response:
        return send_file(desk.folder / f"{call_of().key}.bin", mimetype="application/octet-stream")

    @app.post("/flask/<store>/<rule>/item")
    def item(store: str, rule: str) -> tuple[dict[str, Any], int]:
        call_of()
        return {"got": request.get_json()}, 201

    @app.post("/flask/<store>/<rule>/form")
    def form(store: str, rule: str) -> dict[str, Any]:
        call_of()
        sent = request.files["file"].read()
        return {"field": request.form["field"], "sha256": hashlib.sha256(sent).hexdigest()}

    return app


def wsgi_app() -> Callable[[Environ, Start], Iterable[bytes]]:
    chosen, onces = {}, {}
    for name, inner in (("wsgi", bare_wsgi), ("flask", flask_app())):
        for store, url in STORES.items():
            for rule, options in RULES.items():
                place = store, rule in RETRIES
                onces[place] = onces.get(place) or Once(url, **RETRIES.get(rule, {}))
                target = url if rule == "intake" and len(STORES) == 1 else onces[place]
                chosen[f"{name}/{store}/{rule}"] = IdempotencyMiddleware(inner, target, **options)

    def app(environ: Environ, start: Start) -> Iterable[bytes]:
        def named(status: str, headers: list[tuple[str, str]], *more: Any) -> Callable[[bytes], object]:
            return start(status, [*headers, ("X-Worker", str(os.getpid()))], *more)

        found = chosen.get(environ["PATH_INFO"].strip("/").rpartition("/")[0])
        if found is None:
            named("200 OK", [TEXT])
            return [b"here"]
        return found(environ, named)

    return app


app = wsgi_app()
