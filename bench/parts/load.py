"""A load generator: a number of connections, each with one request in flight, in one thread with epoll.

For each request it does little more than two system calls and a search for the length, so that it is not the
bottleneck.
"""

from __future__ import annotations

import select
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator

BODY = b'{"sku": "ITEM-001", "title": "Sample Item", "note": "%s"}' % (b"x" * 200)


def request(key: str | None) -> bytes:
    header = "" if key is None else f"Idempotency-Key: {key}\r\n"
    head = f"POST /items HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: {len(BODY)}\r\n"
    return f"{head}{header}\r\n".encode() + BODY


class Connection:
    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.received = b""

    def response(self) -> bytes | None:
        """The response, once it is complete; else None."""
        self.received += self.socket.recv(65536)
        head, found, body = self.received.partition(b"\r\n\r\n")
        if not found:
            return None
        at = head.lower().find(b"content-length: ")
        length = 0 if at < 0 else int(head[at + 16 :].split(b"\r\n", 1)[0])  # a 304 has no body, and maybe no length
        if len(body) < length:
            return None
        whole, self.received = self.received, b""
        return whole


def load(port: int, requests: Iterator[bytes], connections: int, many: int) -> tuple[float, Counter[bytes]]:
    """Send the requests; returns the rate per second, and the number of responses by status."""
    epoll = select.epoll()
    lines = {}
    for _ in range(connections):
        connection = Connection(port)
        lines[connection.socket.fileno()] = connection
        epoll.register(connection.socket, select.EPOLLIN)
    statuses: Counter[bytes] = Counter()
    started = time.perf_counter()
    for connection in lines.values():
        connection.socket.sendall(next(requests))
    sent, answered = connections, 0
    while answered < sent:
        for number, _ in epoll.poll():
            connection = lines[number]
            response = connection.response()
            if response is not None:
                answered += 1
                statuses[response[9:12]] += 1
                if sent < many:
                    connection.socket.sendall(next(requests))
                    sent += 1
    took = time.perf_counter() - started
    for connection in lines.values():
        connection.socket.close()
    epoll.close()
    return answered / took, statuses


def keyed(name: str, *, again: int | None = None) -> Callable[[], Iterator[bytes]]:
    """Requests with a new key each, or with the same ``again`` keys in turn."""

    def requests() -> Iterator[bytes]:
        number = 0
        while True:
            yield request(f"{name}-{number if again is None else number % again}")
            number += 1

    return requests


if __name__ == "__main__":
    sys.exit("this is a part of bench/http.py")
