"""Proxies for a PostgreSQL or Redis server: one that can be silenced, one that can be down."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from sqlalchemy import URL, make_url

from support.servers import free_port


class SilentProxy:
    """Forwards bytes until it is silenced: then connections stay open, and nothing is forwarded."""

    def __init__(self, server: URL) -> None:
        self._server = server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._quiet: list[threading.Event] = []
        self._open: list[socket.socket] = []
        self._mute = False
        self.accepted = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def silence(self, *, new: bool) -> None:
        """Forward nothing more on existing connections, and, with ``new``, on later ones."""
        with self._lock:
            self._mute = new
            for quiet in self._quiet:
                quiet.set()

    def speak(self) -> None:
        """Let new connections work again; silenced ones stay silent."""
        with self._lock:
            self._mute = False

    def close(self) -> None:
        with self._lock:
            ends = [self._listener, *self._open]
        for end in ends:
            hang_up(end)

    def _accept(self) -> None:
        with suppress(OSError):  # the listener is closed
            while True:
                client, _ = self._listener.accept()
                server = connect(self._server)
                quiet = threading.Event()
                with self._lock:
                    self.accepted += 1
                    self._quiet.append(quiet)
                    self._open += [client, server]
                    if self._mute:
                        quiet.set()
                for source, target in ((client, server), (server, client)):
                    threading.Thread(target=_pass, args=(source, target, quiet), daemon=True).start()


class OutageProxy:
    """Forwards bytes while it is up; while it is down, connections are closed and refused."""

    def __init__(self, server: URL) -> None:
        self._server = server
        self._listener: socket.socket | None = None
        self._open: list[socket.socket] = []
        self.port = free_port()

    def up(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port), backlog=128)
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def down(self) -> None:
        ends, self._open = [*self._open, *([self._listener] if self._listener else [])], []
        self._listener = None
        for end in ends:
            hang_up(end)

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):  # it is down
            while True:
                client, _ = listener.accept()
                server = connect(self._server)
                self._open += [client, server]
                for source, target in ((client, server), (server, client)):
                    threading.Thread(target=_pass, args=(source, target, threading.Event()), daemon=True).start()


def connect(url: URL) -> socket.socket:
    port, directory = url.port or 5432, url.query.get("host")
    if not isinstance(directory, str):
        server = socket.create_connection((url.host or "127.0.0.1", port))
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a request in two packets would wait for 40 ms
        return server
    server = socket.socket(socket.AF_UNIX)
    server.connect(f"{directory}/.s.PGSQL.{port}")
    return server


def _pass(source: socket.socket, target: socket.socket, quiet: threading.Event) -> None:
    """Forward bytes, and the end of the connection, unless the connection is silenced."""
    with suppress(OSError):
        while data := source.recv(65536):
            if not quiet.is_set():
                target.sendall(data)
    if not quiet.is_set():
        hang_up(source)
        hang_up(target)


def hang_up(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()


def at_port(url: URL, port: int) -> str:
    moved = url.difference_update_query(["host"]).set(host="127.0.0.1", port=port)
    return moved.render_as_string(hide_password=False)


@contextmanager
def silent_proxy(url: str) -> Iterator[tuple[SilentProxy, str]]:
    """A proxy for the server of a Redis or PostgreSQL URL, and the URL of the proxy."""
    server = make_url(url)
    proxy = SilentProxy(server)
    try:
        yield proxy, at_port(server, proxy.port)
    finally:
        proxy.close()


@contextmanager
def outage_proxy(url: str) -> Iterator[tuple[OutageProxy, str]]:
    """A proxy for the server of a PostgreSQL URL, which is down at first, and the URL of the proxy."""
    server = make_url(url)
    proxy = OutageProxy(server)
    try:
        yield proxy, at_port(server, proxy.port)
    finally:
        proxy.down()


@contextmanager
def unreachable(url: str) -> Iterator[str]:
    """The URL of an unreachable server: its backlog is full, so that connecting gets no response."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        waiting = []
        for _ in range(4):
            client = socket.socket()
            client.setblocking(False)
            with suppress(BlockingIOError):
                client.connect(listener.getsockname())
            waiting.append(client)
        try:
            yield at_port(make_url(url), listener.getsockname()[1])
        finally:
            for client in waiting:
                client.close()
