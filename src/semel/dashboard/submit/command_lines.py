"""A submission as a line for a shell: what a form would send, for scripts. No token is ever in it."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from semel.service.api.params import TheRequest, root_of
from semel.service.auth.cookies import is_https
from semel.service.settings import Settings

_AUTHORIZED = '"Authorization: Bearer $SEMEL_TOKEN"'
"""The shell puts the token in."""
_PLAIN_KEY = re.compile(r"[\w.:/@+=-]+", re.ASCII)
"""A key that a header can carry without anybody taking it for something else."""
_HOST = re.compile(r"[A-Za-z0-9._:\[\]-]+")


def base_of(request: TheRequest, settings: Settings) -> str:
    """Where this service is, as its user reaches it."""
    if settings.public_url and urlsplit(settings.public_url).netloc:
        return settings.public_url.rstrip("/")
    host = request.headers.get("host", "")
    scheme = "https" if is_https(request.scope, settings) else "http"
    return f"{scheme}://{host if _HOST.fullmatch(host) else '127.0.0.1:8001'}{root_of(request)}"


def curl_line(base: str, body: Mapping[str, Any], *, token: bool) -> str:
    """The request with curl."""
    sent = dict(body)
    key = sent.get("idempotency_key")
    words = ["curl", "-sS", shlex.quote(f"{base}/runs")]
    if token:
        words += ["-H", _AUTHORIZED]
    words += ["-H", shlex.quote("Content-Type: application/json")]
    if isinstance(key, str) and _PLAIN_KEY.fullmatch(key):
        del sent["idempotency_key"]
        words += ["-H", shlex.quote(f"Idempotency-Key: {key}")]
    return " ".join([*words, "-d", shlex.quote(_text(sent))])


def semel_line(base: str, body: Mapping[str, Any]) -> str:
    """The same with the command line; it takes its token from $SEMEL_TOKEN."""
    words = ["semel", "submit", body["model"]]
    if body.get("parameters"):
        words.append(f"--params={_text(body['parameters'])}")
    options = {
        "key": body.get("idempotency_key"),
        "user": body.get("user"),
        "queue": body.get("queue"),
        "priority": body.get("priority"),
        "delay": _decimal(body.get("delay")),
        "cost": _decimal(body.get("cost")),
        "server": base,
    }
    words += [f"--{name}={value}" for name, value in options.items() if value is not None]
    if body.get("dedupe") is not None:
        words.append("--dedupe" if body["dedupe"] else "--no-dedupe")
    return " ".join(shlex.quote(word) for word in words)


def _text(value: Any) -> str:
    """As JSON in one line. What does not print as itself is written as an escape: a line shows all that it does."""
    written = json.dumps(value, ensure_ascii=False)
    return written if written.isprintable() else json.dumps(value)


def _decimal(value: float | None) -> str | None:
    """Without an exponent, which spans of time do not have."""
    if value is None:
        return None
    return str(value) if isinstance(value, int) else f"{value:.9f}".rstrip("0").rstrip(".")
