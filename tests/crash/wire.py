"""A proxy that reads PostgreSQL's and Redis's protocol, and lets a fault happen at a chosen statement of a process.

It counts what the process sends, on whichever connection, so a statement that is new in the product is tried without
anybody naming it.
"""

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Literal, NamedTuple, Protocol

from sqlalchemy import URL, make_url

from support.programs import PATIENCE
from support.proxies import at_port, connect, hang_up

FaultKind = Literal["dies before", "dies after", "loses the reply of"]
FAULTS: tuple[FaultKind, ...] = ("dies before", "dies after", "loses the reply of")


class Fault(NamedTuple):
    """What happens to the process at its statement of this number, which counts from 1."""

    kind: FaultKind
    number: int

    def __str__(self) -> str:
        return f"the process {self.kind} statement {self.number}"


NEVER = Fault("dies before", 0)
"""No statement has this number."""


class Messages(Protocol):
    """Cuts the two streams of a connection into messages."""

    def request(self, data: bytes) -> tuple[int, bool]:
        """The length of the first message of a client, 0 if it is not whole; and whether it is a statement."""

    def reply(self, data: bytes) -> tuple[int, bool]:
        """The length of the first message of a server, 0 if it is not whole; and whether it ends a reply."""

    def settled(self, message: bytes) -> bool:
        """Whether no transaction is open after the reply that this message ends."""


class PostgresMessages:
    """A statement ends with a Query or a Sync, its reply with ReadyForQuery. Connecting counts as a statement."""

    def __init__(self) -> None:
        self._started = False

    def request(self, data: bytes) -> tuple[int, bool]:
        if self._started:
            return _typed(data, b"QS")
        if len(data) < 8 or len(data) < (length := struct.unpack("!I", data[:4])[0]):
            return 0, False
        self._started = True
        return length, True

    def reply(self, data: bytes) -> tuple[int, bool]:
        return _typed(data, b"Z")

    def settled(self, message: bytes) -> bool:
        return message.endswith(b"I")


def _typed(data: bytes, ends: bytes) -> tuple[int, bool]:
    if len(data) < 5 or len(data) < (length := 1 + struct.unpack("!I", data[1:5])[0]):
        return 0, False
    return length, data[:1] in ends


class RedisMessages:
    """Every command is a statement."""

    def request(self, data: bytes) -> tuple[int, bool]:
        return max(_value_end(data, 0), 0), True

    def reply(self, data: bytes) -> tuple[int, bool]:
        return max(_value_end(data, 0), 0), not data.startswith(b">")

    def settled(self, message: bytes) -> bool:
        return True


def _value_end(data: bytes, at: int) -> int:
    """Where the value that begins at this place ends; -1 if it is not whole."""
    line_end = data.find(b"\r\n", at)
    if line_end < 0:
        return -1
    kind, rest = data[at : at + 1], data[at + 1 : line_end]
    end = line_end + 2
    if kind in b"$!=":
        size = int(rest)
        end += 0 if size < 0 else size + 2
        return end if end <= len(data) else -1
    if kind in b"*~>%":
        for _ in range(int(rest) * (2 if kind == b"%" else 1)):
            if (end := _value_end(data, end)) < 0:
                return -1
    return end


class Link:
    """One connection of the process, and the reply that is to be withheld, if any."""

    def __init__(self, client: socket.socket, server: socket.socket, messages: Messages) -> None:
        self.client = client
        self.server = server
        self.messages = messages
        self.sent = 0
        self.answered = 0
        self.withheld: int | None = None
        self.gone = threading.Event()
        """Set when the server has ended the connection, and so has executed or undone what was sent to it."""

    def end_requests(self) -> None:
        """Tell the server that the client is gone."""
        with suppress(OSError):
            self.server.shutdown(socket.SHUT_WR)

    def drain(self) -> None:
        """Wait until the server ends the connection, too."""
        with suppress(OSError):
            while self.server.recv(65536):
                pass
        hang_up(self.client)
        hang_up(self.server)
        self.gone.set()


class FaultProxy:
    """Forwards messages until the fault's statement; what happens then is the fault's kind."""

    def __init__(self, server: URL) -> None:
        self._server = server
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._messages: type[RedisMessages | PostgresMessages] = RedisMessages
        if server.get_backend_name() == "postgresql":
            self._messages = PostgresMessages
            server = server.update_query_dict({"sslmode": "disable"})  # what is encrypted cannot be counted
        self.url = at_port(server, self._listener.getsockname()[1])
        self._lock = threading.Lock()
        self._links: list[Link] = []
        self._kill: Callable[[], None] = lambda: None
        self._fault = NEVER
        self._count = 0
        self.happened = False
        self.settled = True
        """Whether no transaction was open after the fault's statement."""
        threading.Thread(target=self._accept, daemon=True).start()

    def arm(self, fault: Fault, kill: Callable[[], None]) -> None:
        """Count from 1 again, and let this fault happen; ``kill`` ends the process."""
        with self._lock:
            self._fault, self._kill = fault, kill
            self._count, self.happened, self.settled = 0, False, True

    def disconnect(self) -> None:
        """End the connections of a process that is gone, and wait until the server has noticed it."""
        with self._lock:
            links, self._links = self._links, []
        for link in links:
            hang_up(link.client)
        for link in links:
            assert link.gone.wait(PATIENCE), "the server does not end a connection"

    def close(self) -> None:
        hang_up(self._listener)
        self.disconnect()

    def _accept(self) -> None:
        with suppress(OSError):  # the listener is closed
            while True:
                client, _ = self._listener.accept()
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                link = Link(client, connect(self._server), self._messages())
                with self._lock:
                    self._links.append(link)
                for work in (self._requests, self._replies):
                    threading.Thread(target=work, args=(link,), daemon=True).start()

    def _requests(self, link: Link) -> None:
        try:
            self._forward_requests(link)
        finally:
            link.end_requests()

    def _forward_requests(self, link: Link) -> None:
        data = ready = b""
        with suppress(OSError):
            while more := link.client.recv(65536):
                data += more
                while (cut := link.messages.request(data))[0]:
                    ready, data = ready + data[: cut[0]], data[cut[0] :]
                    if cut[1]:
                        if self._is_fatal(link):
                            self._die()
                            return
                        link.server.sendall(ready)
                        ready = b""
                link.server.sendall(ready)
                ready = b""

    def _is_fatal(self, link: Link) -> bool:
        """Count a statement. True if the process dies before it."""
        with self._lock:
            self._count += 1
            link.sent += 1
            if self._count != self._fault.number:
                return False
            if self._fault.kind != "dies before":
                link.withheld = link.sent
            return self._fault.kind == "dies before"

    def _replies(self, link: Link) -> None:
        try:
            self._forward_replies(link)
        finally:
            link.drain()

    def _forward_replies(self, link: Link) -> None:
        data = b""
        with suppress(OSError):
            while more := link.server.recv(65536):
                data += more
                while (cut := link.messages.reply(data))[0]:
                    message, data = data[: cut[0]], data[cut[0] :]
                    if link.withheld != link.answered + 1:
                        link.client.sendall(message)
                    link.answered += cut[1]
                    if link.withheld == link.answered:
                        self.settled = link.messages.settled(message)
                        self._happen(link)
                        return
        if link.withheld is not None:  # a request without a reply, such as to cancel
            self._happen(link)

    def _happen(self, link: Link) -> None:
        if self._fault.kind == "dies after":
            self._die()
        else:
            self.happened = True
            hang_up(link.client)

    def _die(self) -> None:
        self.happened = True
        self._kill()


@contextmanager
def fault_proxy(url: str) -> Iterator[FaultProxy]:
    """A proxy for the server of this URL."""
    proxy = FaultProxy(make_url(url))
    try:
        yield proxy
    finally:
        proxy.close()
