"""A TCP proxy that cuts, delays, truncates or resets what goes through it while a fault lasts."""

import random
import socket
import struct
import threading
import time
from contextlib import suppress
from typing import Literal

from sqlalchemy import make_url

from support.proxies import at_port, connect, hang_up

Trouble = Literal["cut", "delay", "truncate", "reset"]


class TroubledProxy:
    """Forwards bytes; ``trouble`` is what happens to some of them."""

    def __init__(self, url: str, seed: int) -> None:
        self._server = make_url(url)
        self._random = random.Random(seed)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.url = at_port(self._server, self._listener.getsockname()[1])
        self.trouble: Trouble | None = None
        self.struck = 0
        """How often there was trouble."""
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        hang_up(self._listener)

    def _accept(self) -> None:
        with suppress(OSError):  # the listener is closed
            while True:
                client, _ = self._listener.accept()
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                try:
                    server = connect(self._server)
                except OSError:
                    client.close()
                    continue
                for source, target in ((client, server), (server, client)):
                    threading.Thread(target=self._forward, args=(source, target), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if (trouble := self._next_trouble()) == "delay":
                    time.sleep(self._random.uniform(0, 0.2))  # the delay is the fault
                elif trouble is not None:
                    self._break(trouble, data, source, target)
                    return
                target.sendall(data)
        hang_up(source)
        hang_up(target)

    def _next_trouble(self) -> Trouble | None:
        """What happens to the next bytes: all are delayed, the first and one of twenty are cut, truncated or reset."""
        with self._lock:
            trouble = self.trouble
            if trouble is None or (trouble != "delay" and self.struck and self._random.random() >= 0.05):
                return None
            self.struck += 1
            return trouble

    def _break(self, trouble: Trouble, data: bytes, source: socket.socket, target: socket.socket) -> None:
        if trouble == "truncate":
            target.sendall(data[: len(data) // 2])
        if trouble == "reset":
            for end in (source, target):
                if end.family == socket.AF_INET:
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RD)  # wakes the other thread, whose call would keep the socket open
                end.close()
            return
        hang_up(source)
        hang_up(target)
