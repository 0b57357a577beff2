"""The middleware for WSGI apps: Flask, Django and every other."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import TracebackType
from typing import Any, TypeAlias, Unpack

from semel._concurrency.sync import run_sync
from semel.errors import ClaimLost, InvalidRequest, StoreUnavailable
from semel.http.body import CHUNK, BodyTooLarge, SpooledBody
from semel.http.middleware import CLAIM_KEY, MiddlewareCore, Request, ResponseRecorder
from semel.http.options import MiddlewareOptions
from semel.http.protocol import codings_for_app
from semel.http.refusals import phrase
from semel.once.client import Once
from semel.once.guard import current_claim_set
from semel.once.requests import CallRequest
from semel.once.stores import Target
from semel.types import Claim, Granted, Response

Environ: TypeAlias = dict[str, Any]
ExcInfo: TypeAlias = tuple[type[BaseException], BaseException, TracebackType] | tuple[None, None, None] | None
Start: TypeAlias = Callable[..., Callable[[bytes], object]]
App: TypeAlias = Callable[[Environ, Start], Iterable[bytes]]

_END: Any = object()
_log = logging.getLogger("semel")


class IdempotencyMiddleware:
    """Every request with an idempotency key is carried out once; whoever repeats it gets the first one's response.

    ``once`` is a store's URL or a :class:`Once`. Without the key, and for other methods than ``methods``, nothing
    changes. See :class:`~semel.http.options.Options`.
    """

    def __init__(self, app: App, once: Once | Target, **options: Unpack[MiddlewareOptions]) -> None:
        self.app = app
        self._door = MiddlewareCore(Once, once, options)
        self._header = f"HTTP_{self._door.header.upper().replace('-', '_')}"

    def close(self) -> None:
        """Close the store, if it was opened here."""
        if self._door.owned:
            self._door.once.close()

    def __call__(self, environ: Environ, start_response: Start) -> Iterable[bytes]:
        """Serve one request."""
        door = self._door
        method = environ["REQUEST_METHOD"]
        if method == "GET" and door.status_path is not None:
            status = self._status(environ)
            if status is not None:
                return _answer(start_response, status)
        if method in door.methods:
            value = environ.get(self._header)
            if (value is not None or door.required) and (
                door.everywhere or door.covers(_path(environ), _text(environ.get("SCRIPT_NAME", "")))
            ):
                return self._serve(value, environ, start_response)
        return self.app(environ, start_response)

    def _serve(self, value: str | None, environ: Environ, start_response: Start) -> Iterable[bytes]:
        door = self._door
        key = door.refuse("missing", None) if value is None else door.key([value])
        if isinstance(key, Response):
            return _answer(start_response, key)
        body = SpooledBody(door.body_in_memory, door.max_request_bytes)
        try:
            admitted = self._admit(key, environ, body)
        except BaseException:
            body.close()
            raise
        if isinstance(admitted, Response):
            body.close()
            return _answer(start_response, admitted)
        environ["wsgi.input"], environ["CONTENT_LENGTH"] = body.file(), str(body.size)
        if admitted is None:
            return _Closing(self.app(environ, start_response), body)
        return _Exchange(door, *admitted, body).run(self.app, environ, start_response)

    def _admit(self, key: str, environ: Environ, body: SpooledBody) -> Response | tuple[Claim, CallRequest] | None:
        """The answer to the request, or the claim to carry it out under; None: without protection."""
        door = self._door
        request = _request(environ)
        try:
            if not _read(body, environ):
                return door.refuse("incomplete", key)
            asking = door.ask(key, request, door.print_of(request, body))
            if door.within(request, asking):
                return None
            verdict = run_sync(door.engine.admit(asking))
        except (StoreUnavailable, OSError) as error:  # OSError: no room on the disk for a large body
            _log.warning("a request with the key %r was refused: %s", key, error)
            return door.unavailable(key)
        except BodyTooLarge:
            return door.refuse("too_large", key)
        if verdict is None:
            return None
        if isinstance(verdict, Granted):
            return verdict.claim, asking
        return door.answer(verdict, asking, request)

    def _status(self, environ: Environ) -> Response | None:
        door = self._door
        request = _request(environ)
        asked = door.status_asked(request)
        if asked is None:
            return None
        scope, key = asked
        try:
            return door.status(door.once.get(key, scope=scope), key, request)
        except StoreUnavailable:
            return door.unavailable(key)
        except InvalidRequest:
            return door.refuse("invalid", key)


class _Exchange:
    """One request that is carried out under a claim; also the response's iterable, which the server reads and closes.

    As at the ASGI door, chunks pass through while they are noted, and what would complete the response is held back
    until the outcome is stored. When the server closes us early (the client left), the rest is read all the same.
    """

    def __init__(self, door: MiddlewareCore[Once], claim: Claim, asking: CallRequest, body: SpooledBody) -> None:
        self._door, self._claim, self._asking, self._body = door, claim, asking, body
        self._recorder = ResponseRecorder(door, claim)
        self._started: tuple[str, list[tuple[str, str]], ExcInfo] | None = None
        self._chunks: Iterator[bytes] = iter(())
        self._close: Callable[[], object] | None = None
        self._held: list[bytes] = []
        self._sends: Callable[[bytes], object] | None = None
        self._error: BaseException | None = None
        self._passed = self._settled = self._ended = self._whole = False

    def run(self, app: App, environ: Environ, start_response: Start) -> Iterable[bytes]:
        """Call the app as far as its first chunk."""
        self._start_response = start_response
        environ[CLAIM_KEY] = self._claim
        if "HTTP_ACCEPT_ENCODING" in environ:
            environ["HTTP_ACCEPT_ENCODING"] = codings_for_app(environ["HTTP_ACCEPT_ENCODING"])
        try:
            with current_claim_set(self._claim):
                answer = app(environ, self._start)
                self._close = getattr(answer, "close", None)
                self._chunks = iter(answer)
                self._whole = isinstance(answer, list | tuple)
            self._advance()
        except BaseException as error:
            if not self._give_up(error):
                raise
        return self

    def _start(
        self, status: str, headers: list[tuple[str, str]], exc_info: ExcInfo = None
    ) -> Callable[[bytes], object]:
        if exc_info and self._passed and exc_info[1] is not None:
            raise exc_info[1]
        if self._started is not None and not exc_info:
            raise RuntimeError("the app called start_response twice")
        if not isinstance(status, str):
            raise TypeError(f"the app's status is text, not {type(status).__name__}")
        self._held = []
        pairs = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
        sent = self._recorder.begin(int(status[:3]), pairs)
        self._started = (status, [(name.decode("latin-1"), value.decode("latin-1")) for name, value in sent], exc_info)
        return self._write

    def _write(self, chunk: bytes) -> None:
        """WSGI's old way to send: it is noted, and sent with the iterable's next chunk or, if it is large, at once."""
        self._recorder.add(chunk)
        if self._ended:
            return
        self._held.append(chunk)
        self._settle_if_over()
        if self._settled:
            self._begin()
            if self._sends is not None:
                held, self._held = self._held, []
                self._sends(b"".join(held))

    def _advance(self) -> None:
        """Take chunks from the app until something may leave, or the outcome is stored."""
        while not self._ended:
            with current_claim_set(self._claim):
                chunk = next(self._chunks, _END)
            if chunk is _END:
                self._ended = True
                if not self._settled:
                    self._settle()
                self._tell_length()
                return
            complete = self._recorder.add(chunk)
            self._held.append(chunk)
            self._settle_if_over()
            if chunk and not self._whole and (self._settled or not complete):
                return

    def _settle_if_over(self) -> None:
        """A response that is too large to be kept is an outcome from the byte on that is one too many."""
        if not self._settled and self._recorder.over and self._recorder.kept:
            self._settle()

    def _tell_length(self) -> None:
        """Servers count a list for the app; here they no longer see that it was one."""
        if self._whole and self._started is not None and self._recorder.status not in (204, 304):
            status, headers, exc_info = self._started
            if not any(name.lower() == "content-length" for name, _ in headers):
                headers = [*headers, ("Content-Length", str(sum(map(len, self._held))))]
            self._started = (status, headers, exc_info)

    def _settle(self) -> None:
        """Store the outcome. What cannot be stored is not said to be done."""
        if self._started is None:
            raise RuntimeError("the app ended without calling start_response")
        engine, key, response = self._door.engine, self._asking.key, self._recorder.response
        self._settled = True
        if not self._recorder.kept:
            if self._recorder.whole:
                self._asking.policy = self._door.releasing
            run_sync(engine.fail(self._claim, self._asking, RuntimeError(f"status {response.status}")))
            return
        try:
            run_sync(engine.finish(self._claim, self._asking, response))
        except (StoreUnavailable, ClaimLost) as error:
            _log.warning("the response of the request with the key %r is withheld: %s", key, error)
            if self._passed:
                raise  # half of it is with the client; the server breaks the connection, which says enough
            answer = self._door.lost(key) if isinstance(error, ClaimLost) else self._door.unavailable(key)
            self._started = (*_head(answer), None)
            self._held = [answer.body or b""]
            self._ended = True  # what the app says after this is not heard

    def _give_up(self, error: BaseException) -> bool:
        """The app raised; True when that is kept, and the client will be told so before the server sees the error."""
        told, self._ended = False, True
        if not self._settled:
            self._settled = True
            told = run_sync(self._door.engine.fail(self._claim, self._asking, error)) and not self._passed
        if told:
            answer = self._door.failed(self._claim)
            self._started, self._held, self._error = (*_head(answer), None), [answer.body or b""], error
        self._end()
        return told

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        if not self._held:
            if self._ended:
                self._begin()
                if self._error is not None:
                    raise self._error
                raise StopIteration
            try:
                self._advance()
            except BaseException as error:
                self._give_up(error)
                raise
            if not self._held:
                self._begin()
                raise StopIteration
        self._begin()
        chunk, self._held = b"".join(self._held), []
        return chunk

    def _begin(self) -> None:
        """Send the head, once."""
        if not self._passed and self._started is not None:
            self._passed = True
            status, headers, exc_info = self._started
            self._sends = self._start_response(status, headers, *([exc_info] if exc_info else []))

    def close(self) -> None:
        """The server is done with us: finish for the retry what the client did not wait for."""
        try:
            while not self._settled and not self._recorder.over:
                self._held = []
                self._advance()
            if not self._settled:
                self._settle()  # what gives its key back need not be read to its end
        except BaseException as error:
            self._give_up(error)
            raise
        self._end()

    def _end(self) -> None:
        close, self._close = self._close, None
        try:
            if close is not None:
                close()
        finally:
            self._body.close()


def _request(environ: Environ) -> Request:
    query = environ.get("QUERY_STRING", "").encode("latin-1", "replace")
    mount = _text(environ.get("SCRIPT_NAME", ""))
    header = partial(_header, environ)
    return Request(environ["REQUEST_METHOD"], _path(environ), query, environ, mount, header)


def _header(environ: Environ, name: str) -> str | None:
    value: str | None = environ.get(f"HTTP_{name.upper().replace('-', '_')}")
    return value


def _path(environ: Environ) -> str:
    """The whole path."""
    return _text(environ.get("SCRIPT_NAME", "") + environ.get("PATH_INFO", ""))


def _text(latin: str) -> str:
    """WSGI has the bytes in latin-1's clothes."""
    return latin.encode("latin-1", "replace").decode("utf-8", "surrogateescape")


def _read(body: SpooledBody, environ: Environ) -> bool:
    """Take in the whole body; False when it ended before its length, or never had a sensible one."""
    stream = environ["wsgi.input"]
    length = environ.get("CONTENT_LENGTH") or ""
    if not length and environ.get("wsgi.input_terminated"):
        while chunk := _next(stream, CHUNK):
            body.add(chunk)
        return chunk is not None
    if not length:
        return True
    if not (length.isascii() and length.isdigit()) or len(length) > 18:
        return False
    left = int(length)
    if body.limit is not None and left > body.limit:
        raise BodyTooLarge
    while left > 0:
        chunk = _next(stream, min(CHUNK, left))
        if not chunk:
            return False
        left -= len(chunk)
        body.add(chunk)
    return True


def _next(stream: Any, size: int) -> bytes | None:
    """Some bytes; none at the end, None when the connection broke."""
    try:
        chunk: bytes = stream.read(size)
    except OSError:
        return None
    return chunk


class _Closing:
    """The app's own chunks; the body is closed with them."""

    def __init__(self, chunks: Iterable[bytes], body: SpooledBody) -> None:
        self._chunks, self._body = chunks, body

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._chunks)

    def close(self) -> None:
        try:
            if hasattr(self._chunks, "close"):
                self._chunks.close()
        finally:
            self._body.close()


def _head(response: Response) -> tuple[str, list[tuple[str, str]]]:
    headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in response.headers]
    return phrase(response.status), headers


def _answer(start_response: Start, response: Response) -> list[bytes]:
    start_response(*_head(response))
    return [response.body or b""]
