"""A line to a server that can be cut between a request and its reply."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from sqlalchemy import make_url


class Line:
    """Passes bytes between clients and a server; ``lose_reply_to`` cuts the next connection that sends some bytes."""

    def __init__(self, upstream: str | tuple[str, int]) -> None:
        self._upstream = upstream
        self._door = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = [self._door]
        self._marker: bytes | None = None
        self.cuts = 0
        self.port: int = self._door.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def lose_reply_to(self, marker: bytes) -> None:
        """Let the next request that holds these bytes through, and not its answer."""
        self._marker = marker

    def close(self) -> None:
        for end in self._open:
            _hang_up(end)

    def _accept(self) -> None:
        with suppress(OSError):  # the door is closed
            while True:
                client, _ = self._door.accept()
                server = self._dial()
                self._open += [client, server]
                doomed = threading.Event()
                threading.Thread(target=self._ask, args=(client, server, doomed), daemon=True).start()
                threading.Thread(target=self._answer, args=(client, server, doomed), daemon=True).start()

    def _dial(self) -> socket.socket:
        if isinstance(self._upstream, tuple):
            return socket.create_connection(self._upstream)
        server = socket.socket(socket.AF_UNIX)
        server.connect(self._upstream)
        return server

    def _ask(self, client: socket.socket, server: socket.socket, doomed: threading.Event) -> None:
        with suppress(OSError):
            while data := client.recv(65536):
                if self._marker is not None and self._marker in data:
                    self._marker = None
                    doomed.set()
                server.sendall(data)
        _hang_up(server)

    def _answer(self, client: socket.socket, server: socket.socket, doomed: threading.Event) -> None:
        with suppress(OSError):
            while data := server.recv(65536):
                if doomed.is_set():
                    self.cuts += 1
                    break
                client.sendall(data)
        _hang_up(client)
        _hang_up(server)


def _hang_up(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()


@contextmanager
def line_to(url: str) -> Iterator[tuple[Line, str]]:
    """A line to the server of a Redis or PostgreSQL URL, and the URL through it."""
    address = make_url(url)
    port = address.port or 5432
    socket_directory = address.query.get("host")
    upstream: str | tuple[str, int] = (address.host or "127.0.0.1", port)
    if isinstance(socket_directory, str):
        upstream = f"{socket_directory}/.s.PGSQL.{port}"
    line = Line(upstream)
    through = address.difference_update_query(["host"]).set(host="127.0.0.1", port=line.port)
    try:
        yield line, through.render_as_string(hide_password=False)
    finally:
        line.close()
