"""Servers that run the cases of apps/http_cases, and their clients: httpx, and sockets that a test writes to."""

import json
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self

import h11
import httpx

from support.process_peer import ProcessPeer
from support.stacks import ask_for_stacks
from support.web_servers import WebServer, web_server

PATIENCE = 60


class Kind(NamedTuple):
    """How a server is started."""

    protocol: str
    program: str
    options: Sequence[str] = ()
    workers: int = 1


SERVERS = {
    "uvicorn": Kind("asgi", "uvicorn"),
    "granian": Kind("asgi", "granian"),
    "gunicorn-sync": Kind("wsgi", "gunicorn", ["--worker-class", "sync", "--preload"], workers=2),
    "gunicorn-gthread": Kind("wsgi", "gunicorn", ["--worker-class", "gthread", "--threads", "8"]),
}
FRAMEWORKS = {"asgi": ["asgi", "starlette"], "wsgi": ["wsgi", "flask"]}


class RawConnection:
    """A connection to which the test writes raw bytes."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
        self._rest = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def response(self) -> httpx.Response:
        """The next whole response; raises h11.RemoteProtocolError if it is truncated."""
        status, headers, body = self.raw_response()
        return httpx.Response(status, headers=headers, content=body)

    def raw_response(self) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        """The status, headers and body of the next response, as they were received."""
        parser = h11.Connection(h11.CLIENT)
        parser.send(h11.Request(method="POST", target="/", headers=[("host", "test")]))
        parser.send(h11.EndOfMessage())
        if self._rest:
            parser.receive_data(self._rest)  # empty data would mean the end
        status, headers, body = 0, [], b""
        while True:
            event = parser.next_event()
            if event is h11.NEED_DATA:
                parser.receive_data(self.socket.recv(1 << 16))
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.Response | h11.InformationalResponse):
                status, headers = event.status_code, list(event.headers)
            if isinstance(event, h11.EndOfMessage | h11.InformationalResponse):
                self._rest = bytes(parser.trailing_data[0])
                return status, headers, body

    def so_far(self, seconds: float) -> bytes:
        """Everything that arrives within that time."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self.socket.settimeout(left)
            try:
                data = self.socket.recv(1 << 16)
            except TimeoutError:
                break
            if not data:
                break
            self._rest += data
        self.socket.settimeout(PATIENCE)
        return self._rest

    def until(self, end: bytes) -> None:
        """Wait until these bytes have arrived."""
        while end not in self._rest:
            data = self.socket.recv(1 << 16)
            assert data, "the server closed the connection"
            self._rest += data

    def all(self) -> bytes:
        """Everything that arrives until the server closes the connection."""
        try:
            while data := self.socket.recv(1 << 16):
                self._rest += data
        except ConnectionResetError:
            pass
        return self._rest

    def reset(self) -> None:
        """Reset the connection, as a crashed client does."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


LEAVING: dict[str, Callable[[RawConnection], None]] = {
    "closing": lambda connection: connection.socket.close(),
    "resetting": RawConnection.reset,
}


class Site:
    """The cases of http_cases in one framework on one server over one store."""

    def __init__(self, server: WebServer, desk: ProcessPeer, name: str, framework: str, store: str) -> None:
        self.server, self.desk = server, desk
        self.name, self.framework, self.store = name, framework, store
        self.protocol = SERVERS[name].protocol
        self.client = httpx.Client(
            base_url=server.url, timeout=PATIENCE, limits=httpx.Limits(max_keepalive_connections=0), verify=False
        )

    def close(self) -> None:
        self.client.close()

    @property
    def keeps_alive(self) -> bool:
        """Whether the server accepts a second request on a connection."""
        return self.name != "gunicorn-sync"

    def path(self, place: str) -> str:
        """The path of a rule and a case, given as `rule/case`."""
        return f"/{self.framework}/{self.store}/{place}"

    def post(self, place: str, key: str, content: Any = b"{}", **headers: str) -> httpx.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            return self.client.post(self.path(place), content=content, headers={"Idempotency-Key": key, **named})
        except httpx.ReadTimeout as error:
            ask_for_stacks(self.server.pids)
            raise AssertionError(f"no answer to {place} of {key}; the server's output:\n{self.server.log()}") from error

    def post_until(self, place: str, key: str, status: int, *errors: int) -> httpx.Response:
        """Retry, as a client does, until the response has this status; any 409 or 503 must have a Retry-After."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            try:
                response = self.post(place, key)
            except httpx.TransportError:
                continue  # the worker that handled it was killed
            if response.status_code == status:
                return response
            assert response.status_code in (409, 503, *errors), response.text
            assert response.status_code in errors or int(response.headers["retry-after"]) >= 1
            time.sleep(0.01)  # shorter than a real client's pause
        raise AssertionError(f"{place} did not return {status}")

    def settled(self, place: str, key: str) -> httpx.Response:
        """The response, once the key is no longer in progress."""

        def response() -> httpx.Response | None:
            response = self.post(place, key)
            busy = response.status_code == 409 and code_of(response) == "IDEMPOTENCY_KEY_PROCESSING"
            return None if busy else response

        found: httpx.Response = until(response)
        return found

    def stream(self, place: str, key: str) -> Any:
        return self.client.stream("POST", self.path(place), content=b"{}", headers={"Idempotency-Key": key})

    def connect(self) -> RawConnection:
        return RawConnection(self.server.port)

    def head(self, place: str, key: str, *more: str) -> bytes:
        lines = [f"POST {self.path(place)} HTTP/1.1", "Host: test", f"Idempotency-Key: {key}", *more, "", ""]
        return "\r\n".join(lines).encode()

    def whole(self, place: str, key: str, body: bytes = b"{}", *more: str) -> bytes:
        return self.head(place, key, f"Content-Length: {len(body)}", *more) + body

    def executions(self, key: str) -> int:
        return len(self.desk.notes(key, "executed"))

    def open(self, key: str, *gates: object) -> None:
        """Open the key's gate, or its gates with these names."""
        for gate in gates or ("",):
            self.desk.open(f"{key} {gate}".strip())

    def assert_closed(self, key: str, times: int = 1) -> None:
        """Check that the server has closed the app's iterable, once, as WSGI requires; for streams."""
        if self.protocol == "wsgi":
            self.desk.wait_for(key, "closed", times)
            assert len(self.desk.notes(key, "closed")) == times


def until(reached: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE
    while not (answer := reached()):
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.01)  # another process does it, and cannot notify us
    return answer


def code_of(response: httpx.Response) -> str:
    code: str = response.json()["error_code"]
    return code


def replayed(response: httpx.Response) -> bool:
    return response.headers.get("idempotent-replayed") == "true"


def is_replay_of(first: httpx.Response, second: httpx.Response) -> bool:
    return (
        replayed(second)
        and "idempotent-replayed" not in first.headers
        and second.status_code == first.status_code
        and second.content == first.content
    )


@contextmanager
def running(
    name: str, folder: Path, stores: Mapping[str, str], *options: str, workers: int = 0, app: str = "app"
) -> Iterator[WebServer]:
    """The server of that name, which runs the cases with these stores."""
    kind = SERVERS[name]
    env = {
        "SEMEL_TEST_STORES": json.dumps(dict(stores)),
        "SEMEL_TEST_FOLDER": str(folder),
        "TMPDIR": str(folder),
    }
    module = f"support.apps.http_{kind.protocol}:{app}"
    all_options = [*kind.options, *options]
    with web_server(kind.program, module, workers=workers or kind.workers, env=env, options=all_options) as server:
        yield server


@contextmanager
def serving(name: str, folder: Path, url: str, *options: str, framework: str = "") -> Iterator[Site]:
    """A separate server, until the end of the block."""
    framework = framework or FRAMEWORKS[SERVERS[name].protocol][-1]
    with (
        running(name, folder, {"main": url}, *options) as server,
        closing(Site(server, ProcessPeer(folder), name, framework, "main")) as site,
    ):
        yield site
