"""Cookies as browsers send them, and as they are set here: for this site's own requests alone, and not for scripts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from litestar.datastructures import Cookie

from semel.service.auth.limits import header, headers

if TYPE_CHECKING:
    from semel.service.settings import Settings


def cookie(scope: Any, name: str) -> str | None:
    """The cookie of that name. Of several that differ none: a page on another port may have set one of them."""
    found = {value for each, value in _cookies(scope) if each == name}
    return found.pop() if len(found) == 1 else None


def _cookies(scope: Any) -> Iterator[tuple[str, str]]:
    for line in headers(scope, b"cookie"):
        for pair in line.split(";"):
            name, _, value = pair.strip().partition("=")
            yield name, value


def made_cookie(name: str, value: str, *, root: str, secure: bool, seconds: int | None = None) -> Cookie:
    """A cookie to be set; it ends with the browser unless ``seconds`` says when, and at once with 0."""
    return Cookie(
        key=name, value=value, path=root or "/", secure=secure, httponly=True, samesite="strict", max_age=seconds
    )


def is_https(scope: Any, settings: Settings) -> bool:
    """Whether the browser speaks TLS, with us or with the proxy before us."""
    forwarded = (header(scope, b"x-forwarded-proto") or "").partition(",")[0].strip().lower()
    public = (settings.public_url or "").lower()
    return scope.get("scheme") == "https" or forwarded == "https" or public.startswith("https:")
