"""Proxies before a PostgreSQL or Redis server: one that falls silent, one that is down at times."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from sqlalchemy import URL, make_url


class SilentProxy:
    """Passes bytes between clients and a server until it is silenced: sockets stay open, and no answer comes."""

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
        """From now on no byte passes on the connections that there are; nor, with ``new``, on later ones."""
        with self._lock:
            self._mute = new
            for quiet in self._quiet:
                quiet.set()

    def speak(self) -> None:
        """New connections work again; those that were silenced stay so."""
        with self._lock:
            self._mute = False

    def close(self) -> None:
        with self._lock:
            ends = [self._listener, *self._open]
        for end in ends:
            _hang_up(end)

    def _accept(self) -> None:
        with suppress(OSError):  # the listener is closed
            while True:
                client, _ = self._listener.accept()
                server = _connect(self._server)
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
    """Passes bytes between clients and a server while it is up; connections break and are refused while it is down."""

    def __init__(self, server: URL) -> None:
        self._server = server
        self._listener: socket.socket | None = None
        self._open: list[socket.socket] = []
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]

    def up(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port), backlog=128)
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def down(self) -> None:
        ends, self._open = [*self._open, *([self._listener] if self._listener else [])], []
        self._listener = None
        for end in ends:
            _hang_up(end)

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):  # it is down
            while True:
                client, _ = listener.accept()
                server = _connect(self._server)
                self._open += [client, server]
                for source, target in ((client, server), (server, client)):
                    threading.Thread(target=_pass, args=(source, target, threading.Event()), daemon=True).start()


def _connect(url: URL) -> socket.socket:
    port, directory = url.port or 5432, url.query.get("host")
    if not isinstance(directory, str):
        return socket.create_connection((url.host or "127.0.0.1", port))
    server = socket.socket(socket.AF_UNIX)
    server.connect(f"{directory}/.s.PGSQL.{port}")
    return server


def _pass(source: socket.socket, target: socket.socket, quiet: threading.Event) -> None:
    """On a silent connection not even its end is passed on."""
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


def _at_port(url: URL, port: int) -> str:
    moved = url.difference_update_query(["host"]).set(host="127.0.0.1", port=port)
    return moved.render_as_string(hide_password=False)


@contextmanager
def silent_proxy(url: str) -> Iterator[tuple[SilentProxy, str]]:
    """A proxy before the server of a Redis or PostgreSQL URL, and the URL through it."""
    server = make_url(url)
    proxy = SilentProxy(server)
    try:
        yield proxy, _at_port(server, proxy.port)
    finally:
        proxy.close()


@contextmanager
def outage_proxy(url: str) -> Iterator[tuple[OutageProxy, str]]:
    """A proxy before the server of a PostgreSQL URL, which is down at first, and the URL through it."""
    server = make_url(url)
    proxy = OutageProxy(server)
    try:
        yield proxy, _at_port(server, proxy.port)
    finally:
        proxy.down()


@contextmanager
def unreachable(url: str) -> Iterator[str]:
    """The URL of a server that cannot be reached: its backlog is full, so that no first packet is answered."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        waiting = []
        for _ in range(4):
            client = socket.socket()
            client.setblocking(False)
            with suppress(BlockingIOError):
                client.connect(listener.getsockname())
            waiting.append(client)
        try:
            yield _at_port(make_url(url), listener.getsockname()[1])
        finally:
            for client in waiting:
                client.close()
