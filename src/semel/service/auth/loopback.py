"""Whether a request is local: from this machine, addressed to it, and not sent by a proxy or another site's page."""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

from semel.service.api.problems import ApiError
from semel.service.auth.limits import header, headers

_PROXY_HEADER = re.compile(
    rb"forwarded|via|x-real-ip|x-forwarded(-.*)?|x-original-(host|url|forwarded-for)|[a-z-]*(client|connecting)-ip"
)
"""Headers that proxies add. Behind a proxy, every request seems to be local."""


@lru_cache(1024)
def is_loopback(host: str) -> bool:
    """Whether the host is a loopback address."""
    if host.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def require_local(scope: Any) -> None:
    """Raise 403 unless the request is local."""
    client = scope.get("client")
    if client and client[0] and not is_loopback(client[0]):
        raise ApiError(
            403,
            "LOOPBACK_ONLY",
            "while there are no tokens, this server accepts only requests from the machine it runs on",
        )
    if any(_PROXY_HEADER.fullmatch(name) for name, _ in scope["headers"]):
        detail = (
            "while there are no tokens, this server accepts no requests through a proxy: create a token, and send it"
        )
        raise ApiError(403, "LOOPBACK_ONLY", detail)
    hosts = headers(scope, b"host")
    if not hosts or not all(_names_loopback(f"//{host}") for host in hosts):
        detail = "while there are no tokens, this server accepts requests only for localhost, 127.0.0.1 or [::1]"
        raise ApiError(403, "LOOPBACK_ONLY", detail)
    if not all(_names_loopback(origin) for origin in headers(scope, b"origin")) or _is_cross_site(scope):
        raise ApiError(
            403, "CROSS_ORIGIN", "while there are no tokens, this server accepts no requests from pages of other sites"
        )


@lru_cache(1024)
def _names_loopback(url: str) -> bool:
    """Whether the host of a URL, from a Host or an Origin header, is a loopback address."""
    if any(character <= " " for character in url):  # urlsplit would drop it
        return False
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return False
    plain = parts.username is None and not parts.path and not parts.query and not parts.fragment
    return plain and (port is None or port >= 0) and is_loopback(parts.hostname or "")


def _is_cross_site(scope: Any) -> bool:
    """Whether a browser sends it for another site's page; following a link from there is allowed."""
    if (header(scope, b"sec-fetch-site") or "").lower() != "cross-site":
        return False
    follows = (header(scope, b"sec-fetch-mode") or "").lower() == "navigate" and scope["method"] in ("GET", "HEAD")
    return not follows
