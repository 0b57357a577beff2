"""The service over real HTTP, in a thread of the test's process, on every database."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from semel import App
from semel.cli import main as semel_command
from semel.service import Settings
from semel.service.app import build
from semel.service.state import ServiceState

PATIENCE = 30.0


class Served:
    """A server that runs: its address, its app and its site."""

    def __init__(self, app: App, site: ServiceState, address: str) -> None:
        self.app = app
        self.site = site
        self.address = address

    def client(self, token: str | None = None, **options: Any) -> httpx.Client:
        """A client of the server, which the caller closes; with a token where one is given."""
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        return httpx.Client(base_url=self.address, headers=headers, timeout=PATIENCE, **options)


def made_app(url: str, folder: Path, **options: Any) -> App:
    """An app on a database that is migrated, its artifacts in the folder."""
    if url.startswith("postgresql"):
        assert semel_command(["migrate", url]) == 0
    return App(url, artifacts=folder / "artifacts", **options)


@contextmanager
def served(app: App, settings: Settings | None = None) -> Iterator[Served]:
    """The service around the app, answering on a port of this machine until the end of the block."""
    site = ServiceState(app, settings or Settings())
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else every answer waits for an acknowledgement
    config = uvicorn.Config(build(site), lifespan="on", log_config=None, access_log=False, timeout_graceful_shutdown=5)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + PATIENCE
    while not server.started:
        assert thread.is_alive(), "the server ended before it had started"
        assert time.monotonic() < deadline, "the server did not start in time"
        time.sleep(0.005)
    try:
        yield Served(app, site, f"http://127.0.0.1:{listener.getsockname()[1]}")
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        listener.close()
        assert not thread.is_alive(), "the server did not stop in time"
