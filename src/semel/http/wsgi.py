"""The middleware for WSGI apps: Flask, Django and others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import TracebackType
from typing import Any, TypeAlias, Unpack

from semel._concurrency.sync import run_sync
from semel.http.body import CHUNK, BodyTooLarge, SpooledBody
from semel.http.middleware import CLAIM_KEY, ClaimedExchange, MiddlewareCore, Request
from semel.http.options import MiddlewareOptions
from semel.http.protocol import codings_for_app
from semel.http.refusals import status_line
from semel.once.client import Once
from semel.once.guard import current_claim_set
from semel.once.requests import CallRequest
from semel.once.stores import Target
from semel.types import Claim, Response

Environ: TypeAlias = dict[str, Any]
ExcInfo: TypeAlias = tuple[type[BaseException], BaseException, TracebackType] | tuple[None, None, None] | None
Start: TypeAlias = Callable[..., Callable[[bytes], object]]
App: TypeAlias = Callable[[Environ, Start], Iterable[bytes]]

_END: Any = object()


class IdempotencyMiddleware:
    """Executes each request with an idempotency key once; a repetition gets the response of the first.

    ``once`` is the URL of a store, or a :class:`Once`. Requests without a key, and with other methods than
    ``methods``, pass unchanged. The options are those of :class:`~semel.http.options.MiddlewareOptions`.
    """

    def __init__(self, app: App, once: Once | Target, **options: Unpack[MiddlewareOptions]) -> None:
        self.app = app
        self._core = MiddlewareCore(Once, once, options)
        self._header = f"HTTP_{self._core.header.upper().replace('-', '_')}"

    def close(self) -> None:
        """Close the store, if this middleware opened it."""
        if self._core.owned:
            self._core.once.close()

    def __call__(self, environ: Environ, start_response: Start) -> Iterable[bytes]:
        """Serve one request."""
        core = self._core
        method = environ["REQUEST_METHOD"]
        if method == "GET" and core.status_path is not None:
            status = run_sync(core.status_response(_request(environ)))
            if status is not None:
                return _send_response(start_response, status)
        if method in core.methods:
            value = environ.get(self._header)
            if (value is not None or core.required) and (
                core.everywhere or core.covers(_path(environ), _text(environ.get("SCRIPT_NAME", "")))
            ):
                return self._serve([] if value is None else [value], environ, start_response)
        return self.app(environ, start_response)

    def _serve(self, values: list[str], environ: Environ, start_response: Start) -> Iterable[bytes]:
        core = self._core
        key = core.key(values)
        if isinstance(key, Response):
            return _send_response(start_response, key)
        body = SpooledBody(core.body_in_memory, core.max_request_bytes)
        try:
            admission = run_sync(core.admit(key, _request(environ), body, partial(_read, body, environ)))
        except BaseException:
            body.close()
            raise
        if isinstance(admission, Response):
            body.close()
            return _send_response(start_response, admission)
        environ["wsgi.input"], environ["CONTENT_LENGTH"] = body.file(), str(body.size)
        if admission is None:
            return _Unprotected(self.app(environ, start_response), body)
        return _WsgiExchange(core, admission, body, start_response).run(self.app, environ)


class _WsgiExchange(ClaimedExchange):
    """Also the iterable of the response, which the server reads and closes.

    If the server closes it early because the client disconnected, it reads the rest of the response for the retry.
    """

    def __init__(
        self, core: MiddlewareCore[Once], admitted: tuple[Claim, CallRequest], body: SpooledBody, start_response: Start
    ) -> None:
        super().__init__(core, *admitted)
        self._body, self._start_response = body, start_response
        self._head: tuple[str, list[tuple[str, str]], ExcInfo] | None = None
        self._chunks: Iterator[bytes] = iter(())
        self._close: Callable[[], object] | None = None
        self._held: list[bytes] = []
        self._server_write: Callable[[bytes], object] | None = None
        self._error: BaseException | None = None
        self._is_list = False

    def run(self, app: App, environ: Environ) -> Iterable[bytes]:
        """Call the app and read as far as its first chunk."""
        environ[CLAIM_KEY] = self._claim
        if "HTTP_ACCEPT_ENCODING" in environ:
            environ["HTTP_ACCEPT_ENCODING"] = codings_for_app(environ["HTTP_ACCEPT_ENCODING"])
        try:
            with current_claim_set(self._claim):
                chunks = app(environ, self._start)
                self._close = getattr(chunks, "close", None)
                self._chunks = iter(chunks)
                self._is_list = isinstance(chunks, list | tuple)
            self._advance()
        except BaseException as error:
            if not self._fail(error):
                raise
        return self

    def _start(
        self, status: str, headers: list[tuple[str, str]], exc_info: ExcInfo = None
    ) -> Callable[[bytes], object]:
        """The app's ``start_response``."""
        if exc_info and self._started and exc_info[1] is not None:
            raise exc_info[1]
        if self._head is not None and not exc_info:
            raise RuntimeError("the app called start_response twice")
        if not isinstance(status, str):
            raise TypeError(f"the app's status is text, not {type(status).__name__}")
        self._held = []
        pairs = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
        self._head = (status, _as_text(self._recorder.begin(int(status[:3]), pairs)), exc_info)
        return self._write

    def _write(self, chunk: bytes) -> None:
        """WSGI's ``write``. The chunk is sent together with the iterable's next, or at once if it is too large."""
        self._recorder.add(chunk)
        if self._ended:
            return
        self._held.append(chunk)
        self._settle_if_too_large()
        if self._settled:
            self._send_head()
            if self._server_write is not None:
                held, self._held = self._held, []
                self._server_write(b"".join(held))

    def _advance(self) -> None:
        """Read chunks from the app until there is something to send, or the outcome is stored."""
        while not self._ended:
            with current_claim_set(self._claim):
                chunk = next(self._chunks, _END)
            if chunk is _END:
                self._ended = True
                if not self._settled:
                    self._settle()
                self._set_content_length()
                return
            complete = self._recorder.add(chunk)
            self._held.append(chunk)
            self._settle_if_too_large()
            if chunk and not self._is_list and (self._settled or not complete):
                return

    def _settle_if_too_large(self) -> None:
        if not self._settled and self._recorder.too_large and self._recorder.is_outcome:
            self._settle()

    def _set_content_length(self) -> None:
        """Servers set it if the app returns a list, and they do not see that it did."""
        if self._is_list and self._head is not None and self._recorder.status not in (204, 304):
            status, headers, exc_info = self._head
            if not any(name.lower() == "content-length" for name, _ in headers):
                headers = [*headers, ("Content-Length", str(sum(map(len, self._held))))]
            self._head = (status, headers, exc_info)

    def _settle(self) -> None:
        if self._head is None:
            raise RuntimeError("the app ended without calling start_response")
        instead = run_sync(self._store_outcome())
        if instead is not None:
            self._replace(instead)

    def _replace(self, response: Response) -> None:
        """Send this response instead of the app's, of which nothing was sent yet."""
        self._head, self._held = (*_head_of(response), None), [response.body or b""]
        self._ended = True

    def _fail(self, error: BaseException) -> bool:
        """The app raised. True if the client gets a response before the server gets the exception."""
        self._ended = True
        failed = run_sync(self._store_failure(error))
        if failed is not None:
            self._replace(failed)
            self._error = error
        self._release()
        return failed is not None

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        if not self._held:
            if self._ended:
                self._send_head()
                if self._error is not None:
                    raise self._error
                raise StopIteration
            try:
                self._advance()
            except BaseException as error:
                self._fail(error)
                raise
            if not self._held:
                raise StopIteration
        self._send_head()
        chunk, self._held = b"".join(self._held), []
        return chunk

    def _send_head(self) -> None:
        if not self._started and self._head is not None:
            self._started = True
            status, headers, exc_info = self._head
            self._server_write = self._start_response(status, headers, *([exc_info] if exc_info else []))

    def close(self) -> None:
        """Called by the server at the end, or early if the client disconnected."""
        try:
            while not self._settled and not self._recorder.too_large:
                self._held = []
                self._advance()
            if not self._settled:
                self._settle()  # too large and not an outcome: the rest need not be read to release the key
        except BaseException as error:
            self._fail(error)
            raise
        self._release()

    def _release(self) -> None:
        close, self._close = self._close, None
        try:
            if close is not None:
                close()
        finally:
            self._body.close()


class _Unprotected:
    """The app's chunks. Closes the request's body with them."""

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


def _request(environ: Environ) -> Request:
    query = environ.get("QUERY_STRING", "").encode("latin-1", "replace")
    mount = _text(environ.get("SCRIPT_NAME", ""))
    return Request(environ["REQUEST_METHOD"], _path(environ), query, environ, mount, partial(_header, environ))


def _header(environ: Environ, name: str) -> str | None:
    value: str | None = environ.get(f"HTTP_{name.upper().replace('-', '_')}")
    return value


def _path(environ: Environ) -> str:
    return _text(environ.get("SCRIPT_NAME", "") + environ.get("PATH_INFO", ""))


def _text(latin: str) -> str:
    """WSGI gives a path's bytes as latin-1."""
    return latin.encode("latin-1", "replace").decode("utf-8", "surrogateescape")


async def _read(body: SpooledBody, environ: Environ) -> bool:
    """Read the whole body. False if it ended before its length, or its length is not valid."""
    stream = environ["wsgi.input"]
    length = environ.get("CONTENT_LENGTH") or ""
    if not length and environ.get("wsgi.input_terminated"):
        while chunk := _next_chunk(stream, CHUNK):
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
        chunk = _next_chunk(stream, min(CHUNK, left))
        if not chunk:
            return False
        left -= len(chunk)
        body.add(chunk)
    return True


def _next_chunk(stream: Any, size: int) -> bytes | None:
    """The next bytes; empty at the end, None if the connection broke."""
    try:
        chunk: bytes = stream.read(size)
    except OSError:
        return None
    return chunk


def _as_text(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]


def _head_of(response: Response) -> tuple[str, list[tuple[str, str]]]:
    return status_line(response.status), _as_text(response.headers)


def _send_response(start_response: Start, response: Response) -> list[bytes]:
    start_response(*_head_of(response))
    return [response.body or b""]
