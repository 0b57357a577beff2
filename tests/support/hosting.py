"""Any ASGI or WSGI application on a real server in a thread, for those that carry the service inside of them."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn
from werkzeug.serving import ThreadedWSGIServer

from semel import App
from semel.service import Settings
from semel.service.app import build
from semel.service.state import ServiceState

PATIENCE = 30.0


@contextmanager
def hosted(application: Any, lifespan: Any = "on") -> Iterator[httpx.Client]:
    """A client of the ASGI application, which uvicorn serves."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(application, lifespan=lifespan, log_config=None, access_log=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + PATIENCE
    while not server.started:
        assert thread.is_alive(), "the server ended before it had started"
        assert time.monotonic() < deadline, "the server did not start in time"
        time.sleep(0.005)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=PATIENCE) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        listener.close()
        assert not thread.is_alive(), "the server did not stop in time"


@contextmanager
def unannounced(app: App, settings: Settings | None = None) -> Iterator[httpx.Client]:
    """A client of the service within an application that does not tell it of its start, and closes it at the end."""
    site = ServiceState(app, settings or Settings())
    inner = build(site)

    async def application(scope: Any, receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
        if scope["type"] == "http":
            await inner(scope, receive, send)
            return
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await site.close()
        await send({"type": "lifespan.shutdown.complete"})

    with hosted(application) as client:
        yield client


@contextmanager
def hosted_wsgi(application: Any) -> Iterator[httpx.Client]:
    """A client of the WSGI application, which werkzeug's server serves, a thread for each request."""
    server = ThreadedWSGIServer("127.0.0.1", 0, application)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{server.server_port}", timeout=PATIENCE) as client:
            yield client
    finally:
        server.shutdown()
        thread.join(PATIENCE)
        server.server_close()
