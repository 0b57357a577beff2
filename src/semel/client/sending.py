"""Where requests go, and what is sure to be sayable in one."""

from __future__ import annotations

import os
import re
from typing import Any, TypedDict
from urllib.parse import quote
from uuid import uuid4

import httpx

from semel.errors import InvalidRequest, RunNotFound
from semel.runs.types import checked_id

DEFAULT_SERVER = "http://127.0.0.1:8001"

_TOKEN = re.compile(r"[\x21-\x7e]+")


class SubmitOptions(TypedDict, total=False):
    """What can be said of a submission besides the model and its parameters; see ``Client.submit``."""

    idempotency_key: str | None
    user: str | int | None
    queue: str | None
    priority: int | None
    delay: float | None
    cost: float | None
    key_ttl: float | None
    dedupe: bool | None


def automatic_key() -> str:
    """A key that nobody else has."""
    return f"py-client-{uuid4()}"


def key_and_dedupe(key: str | None, dedupe: bool | None) -> tuple[str, bool | None]:
    """The key that goes with all tries of a submission, and whether its payload is looked for, too.

    Without a key of the caller's it is, as everywhere: then the key is there only to recognise our own tries.
    """
    return (automatic_key(), dedupe is not False) if key is None else (key, dedupe)


def server_url(base_url: str | None) -> httpx.URL:
    """Where the server is: as given, or as ``SEMEL_SERVER`` says."""
    given = base_url or os.environ.get("SEMEL_SERVER") or DEFAULT_SERVER
    try:
        url = httpx.URL(given)
    except (httpx.InvalidURL, TypeError) as error:
        raise InvalidRequest(f"base_url is no URL: {error}") from None
    if url.userinfo:
        raise InvalidRequest("base_url has a password in it; give a token as token=, or in SEMEL_TOKEN")
    if url.scheme not in ("http", "https") or not url.host or url.query or url.fragment or " " in given:
        raise InvalidRequest(f"base_url is http://host:port or https://host, and a path if any, not {given!r}")
    return url


def headers(token: str | None) -> httpx.Headers:
    """What goes with every request. httpx does not show the token where it shows them."""
    token = (token or os.environ.get("SEMEL_TOKEN") or "").strip()
    known = httpx.Headers({"accept": "application/json", "user-agent": "semel"})
    if token:
        if not _TOKEN.fullmatch(token):
            raise InvalidRequest("the token holds a space or a character that no token has")
        known["authorization"] = f"Bearer {token}"
    return known


def line_options(base_url: str | None, token: str | None, transport: Any) -> dict[str, Any]:
    """What a line is made with. A redirect is not followed: the token is for this server."""
    url = server_url(base_url)
    secure = url.scheme == "https"
    # Without TLS no certificates are looked at; to load them would take longer than most requests.
    return {"base_url": url, "headers": headers(token), "transport": transport, "verify": secure}


def run_path(run_id: object) -> str:
    """Where the run is. What can be no id is no run."""
    known = checked_id(run_id)
    if known is None:
        raise RunNotFound(f"there is no run {str(run_id)!r:.200}")
    return f"/runs/{known}"


def path_of(what: str, name: object) -> str:
    """A name, which may have slashes, as the end of a path."""
    text = str(name)
    if any(part in ("", ".", "..") for part in text.split("/")):
        raise InvalidRequest(f"{what} cannot be {text!r:.200}")
    return quote(text.encode(errors="replace"))
