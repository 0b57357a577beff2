"""A line to a server that can fall silent: the sockets stay open, what is sent is taken, and no answer comes."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from sqlalchemy import make_url


class SilentLine:
    """Passes bytes between clients and a server, until it is told to be silent."""

    def __init__(self, upstream: str | tuple[str, int]) -> None:
        self._upstream = upstream
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._door.getsockname()[1]
        self._lock = threading.Lock()
        self._quiet: list[threading.Event] = []
        self._open: list[socket.socket] = []
        self._mute = False
        self.accepted = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def silence(self, *, new: bool) -> None:
        """From now on no byte passes on the connections that there are; nor, with ``new``, on later ones."""
        with self._lock:
            self._mute = new
            for quiet in self._quiet:
                quiet.set()

    def speak(self) -> None:
        """New connections work again; what was silent stays so."""
        with self._lock:
            self._mute = False

    def close(self) -> None:
        with self._lock:
            ends = [self._door, *self._open]
        for end in ends:
            _hang_up(end)

    def _accept(self) -> None:
        with suppress(OSError):  # the door is closed
            while True:
                client, _ = self._door.accept()
                server = self._dial()
                quiet = threading.Event()
                with self._lock:
                    self.accepted += 1
                    self._quiet.append(quiet)
                    self._open += [client, server]
                    if self._mute:
                        quiet.set()
                for source, target in ((client, server), (server, client)):
                    threading.Thread(target=_pass, args=(source, target, quiet), daemon=True).start()

    def _dial(self) -> socket.socket:
        if isinstance(self._upstream, tuple):
            return socket.create_connection(self._upstream)
        server = socket.socket(socket.AF_UNIX)
        server.connect(self._upstream)
        return server


def _pass(source: socket.socket, target: socket.socket, quiet: threading.Event) -> None:
    """Of a silent line not even the end is heard, unless the caller hangs up."""
    with suppress(OSError):
        while data := source.recv(65536):
            if not quiet.is_set():
                target.sendall(data)
    if not quiet.is_set():
        _hang_up(source)
        _hang_up(target)


def _hang_up(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()


@contextmanager
def silent_line(url: str) -> Iterator[tuple[SilentLine, str]]:
    """A line to the server of a Redis or PostgreSQL URL, and the URL through it."""
    address = make_url(url)
    port = address.port or 5432
    directory = address.query.get("host")
    upstream: str | tuple[str, int] = (address.host or "127.0.0.1", port)
    if isinstance(directory, str):
        upstream = f"{directory}/.s.PGSQL.{port}"
    line = SilentLine(upstream)
    through = address.difference_update_query(["host"]).set(host="127.0.0.1", port=line.port)
    try:
        yield line, through.render_as_string(hide_password=False)
    finally:
        line.close()


@contextmanager
def dead_end(url: str) -> Iterator[str]:
    """The URL of a server that cannot even be reached: its queue is full, so that nobody's first packet is answered."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as door:
        waiting = []
        for _ in range(4):
            client = socket.socket()
            client.setblocking(False)
            with suppress(BlockingIOError):
                client.connect(door.getsockname())
            waiting.append(client)
        try:
            address = make_url(url).difference_update_query(["host"])
            yield address.set(host="127.0.0.1", port=door.getsockname()[1]).render_as_string(hide_password=False)
        finally:
            for client in waiting:
                client.close()
