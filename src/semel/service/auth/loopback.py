"""Whether a request is this machine's own: sent from here, meant for here, and by nobody else's page or proxy."""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

from semel.service.api.problems import ApiError
from semel.service.auth.limits import header, headers

_CARRIED = re.compile(
    rb"forwarded|via|x-real-ip|x-forwarded(-.*)?|x-original-(host|url|forwarded-for)|[a-z-]*(client|connecting)-ip"
)
"""What a proxy adds. Behind one every request seems to be sent from this machine."""


@lru_cache(1024)
def is_loopback(host: str) -> bool:
    """Whether that is this machine alone."""
    if host.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def require_local(scope: Any) -> None:
    """Refuse what is not from this machine, or not for it under a name of its own, or what another's page sends."""
    client = scope.get("client")
    if client and client[0] and not is_loopback(client[0]):
        raise ApiError(403, "LOOPBACK_ONLY", "without tokens this server answers only the machine it runs on")
    if any(_CARRIED.fullmatch(name) for name, _ in scope["headers"]):
        said = "without tokens this server answers no proxy: make a token, and let every request carry one"
        raise ApiError(403, "LOOPBACK_ONLY", said)
    hosts = headers(scope, b"host")
    if not hosts or not all(_names_loopback(f"//{host}") for host in hosts):
        said = "without tokens this server answers only as localhost, 127.0.0.1 or [::1]"
        raise ApiError(403, "LOOPBACK_ONLY", said)
    if not all(_names_loopback(origin) for origin in headers(scope, b"origin")) or _from_elsewhere(scope):
        raise ApiError(403, "CROSS_ORIGIN", "without tokens this server answers no page of another site")


@lru_cache(1024)
def _names_loopback(url: str) -> bool:
    """Whether the host of a URL is this machine: of a Host header, and of an Origin."""
    if any(character <= " " for character in url):  # which urlsplit would drop
        return False
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return False
    plain = parts.username is None and not parts.path and not parts.query and not parts.fragment
    return plain and (port is None or port >= 0) and is_loopback(parts.hostname or "")


def _from_elsewhere(scope: Any) -> bool:
    """Whether a browser says that another site's page sends it; following a link from there is no sending."""
    if (header(scope, b"sec-fetch-site") or "").lower() != "cross-site":
        return False
    follows = (header(scope, b"sec-fetch-mode") or "").lower() == "navigate" and scope["method"] in ("GET", "HEAD")
    return not follows
