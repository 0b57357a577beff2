"""The service inside a WSGI application, such as a Flask app.

    from werkzeug.middleware.dispatcher import DispatcherMiddleware
    from semel.service import wsgi
    flask_app.wsgi_app = DispatcherMiddleware(flask_app.wsgi_app, {"/semel": wsgi(app)})

Its event loop runs in a thread of its own, one in each process. For ASGI see :func:`semel.service.app.asgi`.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from a2wsgi import ASGIMiddleware

from semel.runs.app import App
from semel.service.app import build
from semel.service.settings import Settings
from semel.service.state import ServiceState

CLOSE_TIMEOUT = 5.0


def wsgi(app: App, settings: Settings | None = None) -> Wsgi:
    """The service around an app, for any WSGI server, or to be mounted in another WSGI application."""
    return Wsgi(app, settings or Settings())


class Wsgi:
    """A WSGI application. It starts with the first request of each process: a server may fork before."""

    def __init__(self, app: App, settings: Settings) -> None:
        self._app = app
        self._settings = settings
        self._lock = threading.Lock()
        self._running: _Running | None = None
        os.register_at_fork(after_in_child=self._after_fork)

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        environ.setdefault("REMOTE_ADDR", "unknown")  # without an address, the request would count as local
        environ.setdefault("REMOTE_PORT", "0")
        response: Iterable[bytes] = self._instance().application(environ, start_response)
        return response

    def close(self) -> None:
        """Stop the service in this process."""
        with self._lock:
            running, self._running = self._running, None
        if running is not None:
            running.close()

    def _instance(self) -> _Running:
        with self._lock:
            if self._running is None:
                self._running = _Running(ServiceState(self._app, self._settings))
                _at_exit(self.close)
            return self._running

    def _after_fork(self) -> None:
        """Start anew in the child: the thread exists only in the parent."""
        self._lock = threading.Lock()
        self._running = None


def _at_exit(close: Callable[[], None]) -> None:
    """Call it when the process ends, before Python joins the thread pools that the service uses.

    Only a private function registers for that moment; without it, closing the service would log errors.
    """
    register = getattr(threading, "_register_atexit", atexit.register)
    with suppress(RuntimeError):  # the process is ending
        register(close)


class _Running:
    """The service in an event loop of its own thread."""

    def __init__(self, service: ServiceState) -> None:
        self._service = service
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="semel-wsgi", daemon=True)
        self._thread.start()
        self.application: Any = ASGIMiddleware(build(service), loop=self._loop)

    def close(self) -> None:
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._service.close(), self._loop).result(CLOSE_TIMEOUT)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_TIMEOUT)
        if not self._thread.is_alive():
            self._loop.close()
