"""A process that serves requests with granian."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from granian.constants import HTTPModes, Interfaces
from granian.http import HTTP1Settings
from granian.log import LogLevels
from granian.server.embed import Server

from semel.runs.app import App
from semel.runs.worker.session import GIVE_BACK_TIMEOUT
from semel.service.app import build
from semel.service.settings import Settings
from semel.service.state import ServiceState

HEADER_BYTES = 32 * 1024
"""The largest head of a request, in bytes; granian may read a little more before it refuses."""
CONNECTIONS = 4096
"""Open connections of one process; more wait to be accepted."""


def serve_requests(app: App, settings: Settings, ready: Callable[[], None]) -> int:
    """Serve requests until SIGTERM; a second one ends the process at once."""
    return asyncio.run(_serve(app, settings, ready))


async def _exit_now(service: ServiceState) -> None:
    """Drop the requests in progress, and give the service's own runs back."""
    with suppress(Exception):
        async with asyncio.timeout(GIVE_BACK_TIMEOUT):
            await service.internal_worker.close()
    os._exit(0)


async def _serve(app: App, settings: Settings, ready: Callable[[], None]) -> int:
    service = ServiceState(app, settings)
    server = make_server(build(service), settings)
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    exiting: list[asyncio.Task[None]] = []

    def stop() -> None:
        if stopping.is_set() and not exiting:
            exiting.append(loop.create_task(_exit_now(service)))
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    await service.ensure_open()
    serving = asyncio.create_task(server.serve())
    await _wait_until_listening(settings, serving)
    if not serving.done():
        ready()
    ending = asyncio.create_task(stopping.wait())
    await asyncio.wait([serving, ending], return_when=asyncio.FIRST_COMPLETED)
    service.watch.dismiss()
    server.stop()  # type: ignore[no-untyped-call]
    with suppress(TimeoutError):
        await asyncio.wait_for(serving, settings.drain)
    return 0 if stopping.is_set() else 1


def make_server(application: Any, settings: Settings) -> Server:
    """A granian that serves the application."""
    return Server(
        application,
        address=settings.host,
        port=settings.port,
        interface=Interfaces.ASGI,
        http=HTTPModes.http1,
        websockets=False,
        backlog=1024,
        backpressure=CONNECTIONS,
        http1_settings=HTTP1Settings(
            header_read_timeout=max(1, round(settings.header_timeout * 1000)), max_buffer_size=HEADER_BYTES
        ),
        log_level=LogLevels.error,
        log_dictconfig={"loggers": {"_granian": {"propagate": True}}},
    )


async def _wait_until_listening(settings: Settings, serving: asyncio.Task[None]) -> None:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)  # noqa: S104 -- a comparison
    while not serving.done():
        try:
            _, writer = await asyncio.open_connection(host, settings.port)
        except OSError:
            await asyncio.sleep(0.005)
        else:
            writer.close()
            return
