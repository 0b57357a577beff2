"""The service inside a WSGI application, such as a Flask app.

    from werkzeug.middleware.dispatcher import DispatcherMiddleware
    from semel.service import wsgi
    flask_app.wsgi_app = DispatcherMiddleware(flask_app.wsgi_app, {"/semel": wsgi(app)})

Its event loop runs in a thread of its own, one in each process. For ASGI there is nothing to do: see assembly.asgi.
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

CLOSING = 5.0
"""Seconds to close it when the process ends."""


def wsgi(app: App, settings: Settings | None = None) -> Wsgi:
    """The service around an app, for any WSGI server, or to be mounted in another WSGI application."""
    return Wsgi(app, settings or Settings())


class Wsgi:
    """A WSGI application. It begins with the first request of each process: a server may fork before."""

    def __init__(self, app: App, settings: Settings) -> None:
        self._app = app
        self._settings = settings
        self._lock = threading.Lock()
        self._running: _Running | None = None
        os.register_at_fork(after_in_child=self._after_fork)

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """See WSGI."""
        environ.setdefault("REMOTE_ADDR", "unknown")  # without an address it would count as this machine's
        environ.setdefault("REMOTE_PORT", "0")
        answer: Iterable[bytes] = self._here().answer(environ, start_response)
        return answer

    def close(self) -> None:
        """End what runs for it in this process."""
        with self._lock:
            running, self._running = self._running, None
        if running is not None:
            running.close()

    def _here(self) -> _Running:
        with self._lock:
            if self._running is None:
                self._running = _Running(ServiceState(self._app, self._settings))
                _at_exit(self.close)
            return self._running

    def _after_fork(self) -> None:
        """The thread stayed in the parent."""
        self._lock = threading.Lock()
        self._running = None


def _at_exit(close: Callable[[], None]) -> None:
    """When the process ends, and before Python ends the pools of threads that the service works with.

    There is no public name for that moment; without it the service would be closed a little late, and complain.
    """
    register = getattr(threading, "_register_atexit", atexit.register)
    with suppress(RuntimeError):  # it ends already
        register(close)


class _Running:
    """The service in the loop of a thread."""

    def __init__(self, service: ServiceState) -> None:
        self._service = service
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="semel-wsgi", daemon=True)
        self._thread.start()
        self.answer: Any = ASGIMiddleware(build(service), loop=self._loop)

    def close(self) -> None:
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._service.close(), self._loop).result(CLOSING)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSING)
        if not self._thread.is_alive():
            self._loop.close()
