"""A line to PostgreSQL that can be down, as when the server restarts: connections break, and new ones are refused."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from sqlalchemy import make_url


class Line:
    """Passes bytes between clients and a server while it is up."""

    def __init__(self, upstream: str | tuple[str, int]) -> None:
        self._upstream = upstream
        self._door: socket.socket | None = None
        self._open: list[socket.socket] = []
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]

    def up(self) -> None:
        self._door = socket.create_server(("127.0.0.1", self.port), backlog=128)
        threading.Thread(target=self._accept, args=(self._door,), daemon=True).start()

    def down(self) -> None:
        ends, self._open = [*self._open, *([self._door] if self._door else [])], []
        self._door = None
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self, door: socket.socket) -> None:
        with suppress(OSError):  # it is down
            while True:
                client, _ = door.accept()
                server = self._dial()
                self._open += [client, server]
                for one, other in ((client, server), (server, client)):
                    threading.Thread(target=_carry, args=(one, other), daemon=True).start()

    def _dial(self) -> socket.socket:
        if isinstance(self._upstream, tuple):
            return socket.create_connection(self._upstream)
        server = socket.socket(socket.AF_UNIX)
        server.connect(self._upstream)
        return server


def _carry(one: socket.socket, other: socket.socket) -> None:
    with suppress(OSError):
        while data := one.recv(65536):
            other.sendall(data)
    for end in (one, other):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@contextmanager
def line_to(url: str) -> Iterator[tuple[Line, str]]:
    """A line to the server of a PostgreSQL URL, which is down at first, and the URL through it."""
    address = make_url(url)
    port = address.port or 5432
    folder = address.query.get("host")
    line = Line(f"{folder}/.s.PGSQL.{port}" if isinstance(folder, str) else (address.host or "127.0.0.1", port))
    through = address.difference_update_query(["host"]).set(host="127.0.0.1", port=line.port)
    try:
        yield line, through.render_as_string(hide_password=False)
    finally:
        line.down()
