"""A receiver of webhooks over real HTTP, which responds with a status, never responds, or disconnects."""

import base64
import hashlib
import hmac
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from support.waiting import eventually

PATIENCE = 60.0


class Received(NamedTuple):
    """A received request."""

    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def id(self) -> str:
        return self.headers["webhook-id"]

    @property
    def event(self) -> dict[str, Any]:
        event: dict[str, Any] = json.loads(self.body)
        return event

    def is_signed_with(self, secret: str) -> bool:
        """Whether the signature is valid; an implementation of Standard Webhooks independent of ours."""
        signed = f"{self.id}.{self.headers['webhook-timestamp']}.".encode() + self.body
        key = base64.b64decode(secret.removeprefix("whsec_"))
        digest = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
        return f"v1,{digest}" in self.headers["webhook-signature"].split(" ")


Behaviour = int | str | Callable[[BaseHTTPRequestHandler], None]
"""A status; or "hang", "close", "endless"; or a function that handles the request."""


class Receiver:
    """Accepts POSTs, and responds with each behaviour in turn; the last one is repeated."""

    def __init__(self, *behaviours: Behaviour, context: ssl.SSLContext | None = None) -> None:
        self.received: list[Received] = []
        self.behaviours = list(behaviours or (204,))
        self.on_receipt: Callable[[Received], None] = lambda _: None
        self.ended = threading.Event()
        self._lock = threading.Lock()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = PATIENCE

            def do_POST(self) -> None:
                receiver.take(self)

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, *_: object) -> None:
                """Ignore errors: tests expect clients that disconnect."""

        self.server = Server(("127.0.0.1", 0), Handler)
        if context is not None:
            self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.port: int = self.server.server_address[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    @property
    def ids(self) -> list[str]:
        return [each.id for each in self.received]

    @property
    def names(self) -> list[str]:
        return [each.event["name"] for each in self.received]

    def take(self, handler: BaseHTTPRequestHandler) -> None:
        length = int(handler.headers["content-length"])
        body = handler.rfile.read(length)
        if len(body) < length:  # the sender died before it had sent everything
            handler.close_connection = True
            return
        headers = {name.lower(): value for name, value in handler.headers.items()}
        received = Received(handler.path, headers, body)
        self.on_receipt(received)
        with self._lock:
            behaviour = self.behaviours.pop(0) if len(self.behaviours) > 1 else self.behaviours[0]
            self.received.append(received)
        self._behave(handler, behaviour)

    def _behave(self, handler: BaseHTTPRequestHandler, behaviour: Behaviour) -> None:
        if callable(behaviour):
            behaviour(handler)
        elif behaviour == "hang":
            self.ended.wait(PATIENCE)
            handler.close_connection = True
        elif behaviour == "close":
            handler.close_connection = True
        elif behaviour == "endless":
            handler.send_response(200)
            handler.end_headers()
            while not self.ended.is_set():
                handler.wfile.write(b"x" * 65536)
        else:
            handler.send_response(int(behaviour))
            handler.send_header("content-length", "0")
            handler.end_headers()

    def wait_for(self, count: int) -> list[Received]:
        eventually(lambda: len(self.received) >= count, f"{count} requests")
        return self.received


@contextmanager
def receiving(*behaviours: Behaviour, context: ssl.SSLContext | None = None) -> Iterator[Receiver]:
    receiver = Receiver(*behaviours, context=context)
    thread = threading.Thread(target=receiver.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        receiver.ended.set()
        receiver.server.shutdown()
        receiver.server.server_close()
        thread.join(PATIENCE)
