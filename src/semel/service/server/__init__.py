"""The processes of a server. Its port is bound before the rest is imported, to report at once if it is in use."""

from __future__ import annotations

import errno
import socket

import msgspec

from semel.errors import InvalidRequest
from semel.service.settings import Settings


def claim_port(settings: Settings) -> tuple[socket.socket, Settings]:
    """Bind the port, so that no other server takes it. Returns the socket, and the settings with its address and port.

    The server's processes share the port (SO_REUSEPORT), which any other process of the same user could do, too: so it
    is first bound without sharing, which fails if it is in use. The socket never listens; the processes do.
    """
    try:
        family, _, _, _, where = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
            host, port, *_ = probe.getsockname()
        held = socket.socket(family, socket.SOCK_STREAM)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind((host, port))
    except OSError as error:
        raise InvalidRequest(_why_not(settings, error)) from error
    return held, msgspec.structs.replace(settings, host=host, port=port)


def _why_not(settings: Settings, error: OSError) -> str:
    where = f"{settings.host}:{settings.port}"
    if error.errno == errno.EADDRINUSE:
        return f"{where} is in use by another program; choose another port: --port 8002, or 0 for any that is free"
    if error.errno == errno.EACCES:
        return f"{where} needs more rights than this user has; choose a port from 1024 on"
    return f"cannot listen on {where}: {error.strerror or error}; --host takes an address of this machine"
