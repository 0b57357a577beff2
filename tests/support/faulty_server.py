"""A faulty server on real sockets: alone or as a proxy of another server, it executes a list of faults."""

import json
import re
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, Self

PATIENCE = 60.0


class Sent(NamedTuple):
    """A request that was received."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    whole: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


Fault = Callable[["FaultyServer", socket.socket, Sent], None]


class FaultyServer:
    """Handles one request per connection with the next fault; without faults it forwards to the server ``behind``."""

    def __init__(self, behind: str | None = None) -> None:
        self.behind = behind
        self._door = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._door.getsockname()[1]}"
        self.faults: list[Fault] = []
        self.sent: list[Sent] = []
        self.ending = threading.Event()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def keys(self) -> list[str]:
        """The keys of the received requests, in order."""
        return [each.json["idempotency_key"] for each in self.sent if each.body]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.ending.set()
        with suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()
        for thread in self._threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()

    def _accept(self) -> None:
        with suppress(OSError):  # the listener is closed
            while True:
                client, _ = self._door.accept()
                client.settimeout(PATIENCE)
                self._threads.append(threading.Thread(target=self._serve, args=(client,), daemon=True))
                self._threads[-1].start()

    def _serve(self, client: socket.socket) -> None:
        with client, suppress(OSError):
            sent = _received(client)
            self.sent.append(sent)
            fault = self.faults.pop(0) if self.faults else None
            if fault is not None:
                fault(self, client, sent)
            else:
                pass_on(self, client, sent)

    def answer_of(self, sent: Sent) -> socket.socket:
        """A connection to the server behind, to which the request was sent."""
        assert self.behind is not None, f"nobody stands behind, and {sent.method} {sent.path} came"
        host, _, port = self.behind.removeprefix("http://").partition(":")
        server = socket.create_connection((host, int(port)), PATIENCE)
        head, _, rest = sent.whole.partition(b"\r\n")
        lines = re.sub(rb"(?im)^connection:.*\r\n", b"", rest)
        server.sendall(head + b"\r\nConnection: close\r\n" + lines)
        return server


def _received(client: socket.socket) -> Sent:
    data = b""
    while b"\r\n\r\n" not in data:
        data += _more(client)
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    method, path, _ = lines[0].split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    while len(body) < int(headers.get("content-length", "0")):
        body += _more(client)
    return Sent(method, path, headers, body, head + b"\r\n\r\n" + body)


def _more(client: socket.socket) -> bytes:
    data = client.recv(65536)
    if not data:
        raise ConnectionError("the client left")
    return data


def pass_on(faulty: FaultyServer, client: socket.socket, sent: Sent) -> None:
    """Forward the request and the whole response."""
    cut_after(1 << 40)(faulty, client, sent)


def cut_after(most: int) -> Fault:
    """Forward at most ``most`` bytes of the response, then close the connection."""

    def fault(faulty: FaultyServer, client: socket.socket, sent: Sent) -> None:
        left = most
        with faulty.answer_of(sent) as server:
            while left > 0 and (piece := server.recv(min(left, 65536))):
                client.sendall(piece)
                left -= len(piece)

    return fault


def lose_the_answer(faulty: FaultyServer, client: socket.socket, sent: Sent) -> None:
    """Forward the request, and drop the response."""
    with faulty.answer_of(sent) as server:
        while server.recv(65536):
            pass


def lose_the_request(faulty: FaultyServer, client: socket.socket, sent: Sent) -> None:
    """Close the connection without forwarding the request."""


def reset(faulty: FaultyServer, client: socket.socket, sent: Sent) -> None:
    """Reset the connection."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def keep_silent(faulty: FaultyServer, client: socket.socket, sent: Sent) -> None:
    """Send nothing until the client disconnects."""
    client.recv(1)


def drip(faulty: FaultyServer, client: socket.socket, sent: Sent) -> None:
    """Respond slowly: no single read takes long, and the response never ends."""
    client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
    while not faulty.ending.wait(0.02):
        client.sendall(b" ")


def saying(status: int, body: Any = b"", **headers: str) -> Fault:
    """Respond with this; a body that is not bytes is sent as JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    head = "\r\n".join([f"HTTP/1.1 {status} Whatever", *lines, f"Content-Length: {len(content)}", "Connection: close"])

    def fault(faulty: FaultyServer, client: socket.socket, sent: Sent) -> None:
        client.sendall(head.encode() + b"\r\n\r\n" + content)

    return fault


def problem(status: int, code: str, *, retryable: bool = False, **more: Any) -> Fault:
    """Respond with a problem, as semel's server does."""
    told = {"type": "urn:semel:x", "title": "x", "status": status, "detail": f"it is {code}", "error_code": code}
    return saying(status, {**told, "retryable": retryable, **more}, content_type="application/problem+json")


def garbage(faulty: FaultyServer, client: socket.socket, sent: Sent) -> None:
    """Respond with bytes that are not HTTP."""
    client.sendall(b"\x00\xff\xfe SSH-2.0 \r\n\r\n" * 3)
