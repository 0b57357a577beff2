"""One request and its answer, after as many tries as it takes: what is sent again, when, and when not."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Mapping
from typing import Any, TypeVar

import httpx
import msgspec

from semel.client.backend import HttpBackend
from semel.client.errors import Answer, is_retryable, refusal, unexpected_response
from semel.client.transport import LOST, retry_after
from semel.errors import InvalidRequest, SemelError, ServerUnreachable
from semel.runs import strict_json

T = TypeVar("T")

LONGEST_WAIT = 60.0
"""Seconds that a wait between two tries never exceeds, whatever ``Retry-After`` asks for."""
CONNECT = 10.0
"""Seconds within which a server takes up a connection, or is not there."""

_log = logging.getLogger("semel")


class HttpSession:
    """Asks the server at ``place`` over a line.

    A try that ends in a lost connection, a timeout, 408, 429 or any 5xx is followed by another with the same content
    (so under the same key), up to ``retries`` times, after ``backoff`` seconds, then twice that, and so on.
    """

    def __init__(self, line: HttpBackend, place: str, *, timeout: float, retries: int, backoff: float) -> None:
        self.line = line
        self.place = place
        self.timeout = timeout
        self.retries = retries
        self.backoff = backoff

    async def ask(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        key: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 -- it is the blocking face's, too
        about_run: bool = False,
        **request: Any,
    ) -> Answer:
        """The answer of success (or 304); else the error that the refusal means."""
        if body is not None:
            request |= as_json(body)
        number = 0
        while True:
            number += 1
            answer = await self.once(method, path, timeout or self.timeout, **request)
            wait = self.wait(number, answer) if number <= self.retries else None
            self._say(method, path, f"try {number} of {self.retries + 1}", answer, wait)
            if wait is None:
                return self.settled(answer, key=key, about_run=about_run)
            await self.line.pause(wait)

    async def read(self, path: str, kind: type[T], *, params: Any = None, about_run: bool = False) -> T:
        """What is at the path."""
        asked = await self.ask("GET", path, params=given(params or {}), about_run=about_run)
        return self.decoded(asked, kind)

    def decoded(self, answer: Answer, kind: type[T], *, key: str | None = None) -> T:
        """The content of an answer, as data."""
        try:
            return msgspec.json.decode(answer.content, type=kind)
        except (msgspec.DecodeError, RecursionError):
            raise unexpected_response(answer, self.place, key=key) from None

    def decoded_exactly(self, answer: Answer) -> Any:
        """The content of an answer in which numbers may be NaN or infinite."""
        try:
            return strict_json.read_exact(answer.content)
        except (ValueError, RecursionError):
            raise unexpected_response(answer, self.place) from None

    async def once(self, method: str, path: str, seconds: float, **request: Any) -> Answer | httpx.TransportError:
        """One try: an answer, or the error that leaves open whether there was one."""
        try:
            response = await self.line.send(method, path, timeout=within(seconds), **request)
        except LOST as error:
            return error
        return await self.whole(response, seconds)

    async def whole(self, response: httpx.Response, seconds: float) -> Answer | httpx.TransportError:
        """The answer with its body, which must have come in that time, however slowly it drips."""
        end = time.monotonic() + seconds
        try:
            return Answer(response.status_code, response.headers, await self._body(response, end))
        except LOST as error:
            return error
        except httpx.DecodingError as error:
            return httpx.RemoteProtocolError(str(error))
        finally:
            await self.line.close(response)

    async def _body(self, response: httpx.Response, end: float) -> bytes:
        parts = self.line.parts(response)
        pieces = []
        while (piece := await self.line.next(parts)) is not None:
            pieces.append(piece)
            if time.monotonic() > end:
                raise httpx.ReadTimeout("the answer came too slowly")
        return b"".join(pieces)

    def wait(self, number: int, answer: Answer | httpx.TransportError) -> float | None:
        """Seconds until the next try; None when the answer is final."""
        asked = 0.0
        if isinstance(answer, Answer):
            if not is_retryable(answer):
                return None
            asked = retry_after(answer.headers.get("retry-after", ""))
        return min(max(self.pause(number), asked), LONGEST_WAIT)

    def pause(self, number: int) -> float:
        """Seconds to wait after so many tries, where nothing else is said."""
        pause = self.backoff * 2.0 ** min(number - 1, 60)
        return pause * random.uniform(1, 1.25)  # noqa: S311 -- clients that failed together come back apart

    def settled(
        self, answer: Answer | httpx.TransportError, *, key: str | None = None, about_run: bool = False
    ) -> Answer:
        """The answer, if it is one of success; else its error."""
        if isinstance(answer, Answer) and (answer.status < 300 or answer.status == 304):
            return answer
        cause = None if isinstance(answer, Answer) else answer
        raise self.failure(answer, key=key, about_run=about_run) from cause

    def failure(
        self, answer: Answer | httpx.TransportError, *, key: str | None = None, about_run: bool = False
    ) -> SemelError:
        """The error behind a try that was the last."""
        if not isinstance(answer, Answer):
            return self.unreachable(answer, key)
        if answer.status < 300:
            return unexpected_response(answer, self.place, key=key)
        return refusal(answer, key=key, about_run=about_run)

    def unreachable(self, error: httpx.TransportError, key: str | None) -> ServerUnreachable:
        """What to say when no answer came."""
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            said = f"there is no server at {self.place} ({said_by(error)}); `semel serve` starts one"
            return ServerUnreachable(
                f"{said}, and SEMEL_SERVER says where it is (or base_url=, or --server)", idempotency_key=key
            )
        said = f"no answer came from {self.place} ({said_by(error)})"
        if key is not None:
            said += f"; the request may have been carried out: send it again with idempotency_key={key!r} to see"
        return ServerUnreachable(said, idempotency_key=key)

    def _say(self, method: str, path: str, which: str, answer: object, wait: float | None) -> None:
        if wait is None and isinstance(answer, Answer):
            return
        said = answer.status if isinstance(answer, Answer) else type(answer).__name__
        then = "" if wait is None else f"; again in {wait:.2f} s"
        _log.info("%s %s%s, %s: %s%s", method, self.place, path, which, said, then)


def said_by(error: httpx.TransportError) -> str:
    """What an error of httpx says; some say nothing."""
    return str(error) or type(error).__name__


def within(timeout: float) -> httpx.Timeout:
    """httpx's timeouts: for each piece, and shorter for a server that is not there."""
    return httpx.Timeout(timeout, connect=min(timeout, CONNECT))


def given(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What was said; None stands for what was not."""
    return {name: value for name, value in fields.items() if value is not None}


def written(body: Any) -> bytes:
    """As JSON."""
    try:
        return strict_json.write(body)
    except ValueError as error:
        raise InvalidRequest(f"the request cannot be written as JSON: {error}") from error


def as_json(body: Any) -> dict[str, Any]:
    """A body for httpx."""
    return {"content": written(body), "headers": {"content-type": "application/json"}}
