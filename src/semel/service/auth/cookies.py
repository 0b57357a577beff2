"""Cookies: SameSite=Strict and HttpOnly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from litestar.datastructures import Cookie

from semel.service.auth.limits import header, headers

if TYPE_CHECKING:
    from semel.service.settings import Settings


def cookie(scope: Any, name: str) -> str | None:
    """The cookie of that name; None if there are several that differ: a page on another port may have set one."""
    found = {value for each, value in _cookies(scope) if each == name}
    return found.pop() if len(found) == 1 else None


def _cookies(scope: Any) -> Iterator[tuple[str, str]]:
    for line in headers(scope, b"cookie"):
        for pair in line.split(";"):
            name, _, value = pair.strip().partition("=")
            yield name, value


def made_cookie(name: str, value: str, *, root: str, secure: bool, seconds: int | None = None) -> Cookie:
    """A cookie to set. It lasts ``seconds``, or as long as the browser runs; 0 deletes it."""
    return Cookie(
        key=name, value=value, path=root or "/", secure=secure, httponly=True, samesite="strict", max_age=seconds
    )


def is_https(scope: Any, settings: Settings) -> bool:
    """Whether the browser uses TLS, with us or with a proxy."""
    forwarded = (header(scope, b"x-forwarded-proto") or "").partition(",")[0].strip().lower()
    public = (settings.public_url or "").lower()
    return scope.get("scheme") == "https" or forwarded == "https" or public.startswith("https:")
