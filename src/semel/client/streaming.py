"""What comes in pieces: a run's events as they happen, and its files."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from hashlib import sha256
from typing import IO, Any

import httpx
import msgspec

from semel.api_types import RemoteEvent
from semel.client.errors import Answer
from semel.client.http import HttpSession, within
from semel.client.transport import LOST
from semel.errors import ResultStoreError
from semel.runs.types import TERMINAL

SILENCE = 45.0
"""Seconds after which a stream without a sign of life is taken for lost; the server gives one every 15."""
LONGEST_PAUSE = 10.0
"""Seconds between two looks for a server that is away, at the most."""
LONGEST_LINE = 1 << 24
"""Bytes of one line in a stream of events, at the most: no run's news are so long."""


class EventReader:
    """Makes events of the bytes of an event stream, however they are cut."""

    def __init__(self) -> None:
        self.last_id = ""
        self.ended = False
        self.restart()

    def restart(self) -> None:
        """A new connection begins: what was half told on the last one is told again."""
        self._rest = b""
        self._fields: dict[str, str] = {}

    def feed(self, piece: bytes) -> list[RemoteEvent]:
        """The events that are whole with this piece."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > LONGEST_LINE:
            raise httpx.RemoteProtocolError("a line of the events does not end")
        told = (self._line(line.removesuffix(b"\r").decode(errors="replace")) for line in lines)
        return [event for event in told if event is not None]

    def _line(self, line: str) -> RemoteEvent | None:
        if line:
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if name == "data" and "data" in self._fields:
                value = f"{self._fields['data']}\n{value}"
            self._fields[name] = value  # one without a name is a comment: the server is still there
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
    """Opens streams, and again those that were lost."""

    def __init__(self, exchange: HttpSession) -> None:
        self._exchange = exchange
        self._line = exchange.line

    async def events(self, path: str) -> AsyncGenerator[RemoteEvent, None]:
        """Every event of a run, until it is over; a stream that is lost is taken up where it broke off.

        A server that goes away meanwhile is waited for; one that was never there is not.
        """
        reader = EventReader()
        lost, connected = 0, False
        while True:
            headers = {"accept": "text/event-stream"} | ({"last-event-id": reader.last_id} if reader.last_id else {})
            answer = await self._opened(path, max(self._exchange.timeout, SILENCE), headers)
            if isinstance(answer, httpx.Response):
                async with aclosing(self._read(answer, reader)) as events:
                    async for event in events:
                        connected, lost = True, 0
                        yield event
                if reader.ended:
                    return
            elif self._exchange.wait(1, answer) is None or (not connected and lost >= self._exchange.retries):
                self._exchange.settled(answer, about_run=True)  # raises what is an error; 204: there is no more
                return
            lost += 1
            await self._line.pause(min(self._exchange.pause(lost), LONGEST_PAUSE))

    async def _read(self, response: httpx.Response, reader: EventReader) -> AsyncGenerator[RemoteEvent, None]:
        """The events of one connection, for as long as it holds."""
        reader.restart()
        parts = self._line.parts(response)
        try:
            while (piece := await self._line.next(parts)) is not None:
                for event in reader.feed(piece):
                    yield event
        except (*LOST, httpx.DecodingError):
            return
        finally:
            await self._line.close(response)

    async def download(self, path: str, sink: IO[bytes]) -> None:
        """Pour a file into the sink, from its beginning as often as it takes."""
        number = 0
        while True:
            number += 1
            sink.seek(0)
            sink.truncate()
            answer: httpx.Response | Answer | httpx.TransportError | None
            answer = await self._opened(path, self._exchange.timeout, {"accept": "*/*"})
            if isinstance(answer, httpx.Response):
                answer = await self._poured(answer, sink)
            if answer is None:
                return
            pause = self._exchange.wait(number, answer) if number <= self._exchange.retries else None
            if pause is None:
                raise self._exchange.failure(answer, about_run=True)
            await self._line.pause(pause)

    async def _poured(self, response: httpx.Response, sink: IO[bytes]) -> httpx.TransportError | None:
        parts = self._line.parts(response)
        digest = sha256()
        try:
            while (piece := await self._line.next(parts)) is not None:
                digest.update(piece)
                await self._line.apart(sink.write, piece)
        except LOST as error:
            return error
        except httpx.DecodingError as error:
            return httpx.RemoteProtocolError(str(error))
        else:
            told = response.headers.get("etag", "").removeprefix("W/").strip('"')
            if len(told) == len(digest.hexdigest()) and told != digest.hexdigest():
                raise ResultStoreError(
                    "the artifact that came differs from the one that was stored: its digest is another"
                )
            return None
        finally:
            await self._line.close(response)

    async def _opened(
        self, path: str, seconds: float, headers: dict[str, str]
    ) -> httpx.Response | Answer | httpx.TransportError:
        """A stream that has begun; else the whole of another answer, or the error that leaves open what happened."""
        try:
            response = await self._line.send("GET", path, timeout=within(seconds), headers=headers)
        except LOST as error:
            return error
        return response if response.status_code == 200 else await self._exchange.whole(response, seconds)
