"""Live pages: server-sent events that carry HTML.

A ``replace`` event holds elements with ids; the page's script puts each in place of the element with the same id.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

from litestar.response import Stream

from semel.dashboard.templating import SECURITY_HEADERS
from semel.service import sse
from semel.service.auth.middleware import Principal
from semel.service.state import ServiceState

NO_UPDATE = b""
"""What a source of updates yields when nothing has changed."""
END_EVENT = b"event: end\ndata:\n\n"
"""Nothing will change any more: the browser does not reconnect."""
SIGNED_OUT = b"event: signed-out\ndata:\n\n"
"""The token is no longer valid: the browser reloads the page, and is redirected to the sign-in."""


def replace_event(html: str) -> bytes:
    """The event that replaces these elements. Carriage returns are escaped: they would end a line of the event."""
    lines = html.replace("\r", "&#13;").split("\n")
    return b"event: replace\n" + b"".join(b"data: %s\n" % line.encode("utf-8", "replace") for line in lines) + b"\n"


def live_response(service: ServiceState, caller: Principal, updates: AsyncGenerator[bytes, None]) -> Stream:
    """Responds with the updates of an open page."""
    return sse.response(service, caller, updates, headers=SECURITY_HEADERS, signed_out=SIGNED_OUT)
