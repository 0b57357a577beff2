"""Responses that are read piece by piece: a run's events as they happen, and its artifacts."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from hashlib import sha256
from typing import IO, Any

import httpx
import msgspec

from semel.api_types import RemoteEvent
from semel.client.errors import Answer
from semel.client.http import LOST, HttpSession, httpx_timeout
from semel.errors import ResultStoreError
from semel.runs.types import TERMINAL

SILENCE = 45.0
"""Seconds without a byte after which an event stream counts as lost; the server sends a comment every 15."""
LONGEST_PAUSE = 10.0
"""Seconds: the longest pause between two attempts to reach an unavailable server."""
LONGEST_LINE = 1 << 24
"""Bytes: the longest line of an event stream."""


class EventReader:
    """Parses the bytes of an event stream."""

    def __init__(self) -> None:
        self.last_id = ""
        self.ended = False
        self.restart()

    def restart(self) -> None:
        """Drop an incomplete event: a new connection sends it again."""
        self._rest = b""
        self._fields: dict[str, str] = {}

    def feed(self, chunk: bytes) -> list[RemoteEvent]:
        """The events that are complete with this chunk."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > LONGEST_LINE:
            raise httpx.RemoteProtocolError("a line of the event stream is too long")
        events = (self._parse(line.removesuffix(b"\r").decode(errors="replace")) for line in lines)
        return [event for event in events if event is not None]

    def _parse(self, line: str) -> RemoteEvent | None:
        if line:
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if name == "data" and "data" in self._fields:
                value = f"{self._fields['data']}\n{value}"
            self._fields[name] = value  # a line without a name is a comment, which keeps the connection alive
            return None
        fields, self._fields = self._fields, {}
        self.last_id = fields.get("id", self.last_id)
        if "data" not in fields:
            return None
        event = RemoteEvent(id=self.last_id, kind=fields.get("event", "message"), data=_decoded(fields["data"]))
        if event.kind == "state":
            self.ended = isinstance(event.data, dict) and event.data.get("status") in TERMINAL
        return event


def _decoded(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text


class Streams:
    """Opens streams, and reopens them when the connection is lost."""

    def __init__(self, session: HttpSession) -> None:
        self._session = session
        self._backend = session.backend

    async def events(self, path: str) -> AsyncGenerator[RemoteEvent, None]:
        """Every event of a run, until it has ended; a lost connection is resumed after the last event.

        Once there was an event, a server that becomes unavailable is waited for without limit.
        """
        reader, policy = EventReader(), self._session.retry_policy
        lost, connected = 0, False
        while True:
            headers = {"accept": "text/event-stream"} | ({"last-event-id": reader.last_id} if reader.last_id else {})
            answer = await self._open(path, max(self._session.timeout, SILENCE), headers)
            if isinstance(answer, httpx.Response):
                async with aclosing(self._read(answer, reader)) as events:
                    async for event in events:
                        connected, lost = True, 0
                        yield event
                if reader.ended:
                    return
            elif policy.wait(1, answer) is None or (not connected and lost >= policy.retries):
                self._session.checked(answer, about_run=True)  # raises for an error; 204: no more events
                return
            lost += 1
            await self._backend.pause(min(policy.pause(lost), LONGEST_PAUSE))

    async def _read(self, response: httpx.Response, reader: EventReader) -> AsyncGenerator[RemoteEvent, None]:
        """The events of one connection, until it is lost."""
        reader.restart()
        chunks = self._backend.chunks(response)
        try:
            while (chunk := await self._backend.next(chunks)) is not None:
                for event in reader.feed(chunk):
                    yield event
        except (*LOST, httpx.DecodingError):
            return
        finally:
            await self._backend.close_response(response)

    async def download(self, path: str, sink: IO[bytes]) -> None:
        """Write an artifact to the sink; each attempt starts from the beginning."""

        async def attempt() -> Answer | httpx.TransportError:
            sink.seek(0)
            sink.truncate()
            answer = await self._open(path, self._session.timeout, {"accept": "*/*"})
            return await self._copy(answer, sink) if isinstance(answer, httpx.Response) else answer

        outcome = await self._session.with_retries("GET", path, attempt)
        if not isinstance(outcome, Answer) or outcome.status != 200:
            raise self._session.error_of(outcome, about_run=True)

    async def _copy(self, response: httpx.Response, sink: IO[bytes]) -> Answer | httpx.TransportError:
        chunks = self._backend.chunks(response)
        digest = sha256()
        try:
            while (chunk := await self._backend.next(chunks)) is not None:
                digest.update(chunk)
                await self._backend.run_blocking(sink.write, chunk)
        except LOST as error:
            return error
        except httpx.DecodingError as error:
            return httpx.RemoteProtocolError(str(error))
        finally:
            await self._backend.close_response(response)
        expected = response.headers.get("etag", "").removeprefix("W/").strip('"')
        if len(expected) == len(digest.hexdigest()) and expected != digest.hexdigest():
            raise ResultStoreError(
                "the artifact received differs from the one that was stored: the digests do not match"
            )
        return Answer(response.status_code, response.headers, b"")

    async def _open(
        self, path: str, seconds: float, headers: dict[str, str]
    ) -> httpx.Response | Answer | httpx.TransportError:
        """A response with status 200 whose body is not read yet; any other as a whole, or a connection error."""
        try:
            response = await self._backend.request("GET", path, timeout=httpx_timeout(seconds), headers=headers)
        except LOST as error:
            return error
        return response if response.status_code == 200 else await self._session.read_all(response, seconds)
