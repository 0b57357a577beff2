"""Where webhooks may go: to public hosts, not to private addresses of the server's network (SSRF).

A name is resolved once, all of its addresses are checked, and the connection goes to one of these: changing the DNS
record in between (DNS rebinding) has no effect.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import re
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache

import httpx

from semel.service.api.problems import ApiError
from semel.service.webhooks.subscriptions import LONGEST_URL

RESOLVE_TIMEOUT = 5.0
"""Seconds to resolve a name."""

_HOST = re.compile(r"[A-Za-z0-9._:-]+")
_INSIDE_4 = (
    "0.0.0.0/8",
    "10.0.0.0/8",
    "100.64.0.0/10",  # carriers' own, and a cloud's metadata
    "127.0.0.0/8",
    "168.63.129.16/32",  # a cloud's host, on a public address
    "169.254.0.0/16",  # link-local, and most clouds' metadata
    "172.16.0.0/12",
    "192.0.0.0/24",
    "192.0.2.0/24",
    "192.88.99.0/24",
    "192.168.0.0/16",
    "198.18.0.0/15",
    "198.51.100.0/24",
    "203.0.113.0/24",
    "224.0.0.0/3",  # multicast, reserved, broadcast
)
_OUTSIDE_6 = "2000::/3"
"""The public part of IPv6; mapped IPv4 addresses and NAT64 are outside of it."""
_INSIDE_6 = (
    "2001::/23",  # with Teredo
    "2001:db8::/32",
    "2002::/16",  # 6to4
    "3fff::/20",
)


def is_public(address: str) -> bool:
    """Whether the address is in the public internet."""
    inside_4, outside_6, inside_6 = _networks()
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv4Address):
        return not any(ip in network for network in inside_4)
    return ip in outside_6 and not any(ip in network for network in inside_6)


@cache
def _networks() -> tuple[list[ipaddress.IPv4Network], ipaddress.IPv6Network, list[ipaddress.IPv6Network]]:
    return (
        [ipaddress.IPv4Network(each) for each in _INSIDE_4],
        ipaddress.IPv6Network(_OUTSIDE_6),
        [ipaddress.IPv6Network(each) for each in _INSIDE_6],
    )


def target_of(url: str) -> httpx.URL:
    """The URL, parsed; refused if no webhook can be sent there."""
    if len(url) > LONGEST_URL:
        raise _refused(f"the URL has {len(url):,} characters, and {LONGEST_URL:,} is the most")
    try:
        target = httpx.URL(url)
        host = host_of(target)
    except (httpx.InvalidURL, ValueError):
        raise _refused("this is not a URL") from None
    if target.scheme not in ("http", "https") or not host:
        raise _refused("the URL of a webhook begins with http:// or https://")
    if not _HOST.fullmatch(host) or not 0 <= (target.port or 0) < 65536:
        raise _refused("this is not a URL: the host or the port is invalid")
    if target.userinfo:
        raise _refused("the URL must not contain a user name or a password: requests are signed instead")
    if target.port == 0:
        raise _refused("port 0 cannot be used")
    return target


def host_of(target: httpx.URL) -> str:
    """The host in ASCII, as it is resolved, sent and checked."""
    return target.raw_host.decode("ascii")


async def addresses_of(target: httpx.URL, *, private: bool) -> Sequence[str]:
    """The addresses to connect to; refused if one of them is private and that is not allowed."""
    host = host_of(target)
    try:
        async with asyncio.timeout(RESOLVE_TIMEOUT):
            found = await _resolve(host, target.port or (443 if target.scheme == "https" else 80))
    except (OSError, ValueError):
        found = []
    if not found:
        raise _refused(f"the host {host!r} cannot be resolved")
    if not private and not all(map(is_public, found)):
        raise _refused(f"the host {host!r} has a private address; SEMEL_PRIVATE_WEBHOOKS=true allows that")
    return found


async def _resolve(host: str, port: int) -> Sequence[str]:
    """Resolve in threads of its own: a slow resolver delays only webhooks. An address needs none."""
    with suppress(ValueError):
        return [str(ipaddress.ip_address(host))]
    loop = asyncio.get_running_loop()
    found = await loop.run_in_executor(
        _threads(os.getpid()), lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    )
    return list(dict.fromkeys(str(each[4][0]) for each in found))


@cache
def _threads(process: int) -> ThreadPoolExecutor:  # noqa: ARG001 -- a forked child has none of its parent's threads
    return ThreadPoolExecutor(8, thread_name_prefix="semel-resolver")


def _refused(detail: str) -> ApiError:
    return ApiError(422, "WEBHOOK_REFUSED", detail)
