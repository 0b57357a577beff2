"""What forms send, and that they were our own: nobody else's page knows the secret that each of ours carries.

The secret is a cookie of the browser's (``semel_csrf``), and a hidden field of every form; the two must be equal, and
where the browser says which page sends the form (``Origin``) that must be one of ours. It is checked for every POST of
the dashboard before its handler is called: see pages.router.
"""

from __future__ import annotations

import hmac
import re
import secrets
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from semel.service.api.params import TheRequest
from semel.service.api.problems import ApiError
from semel.service.auth.cookies import cookie
from semel.service.auth.limits import header, headers
from semel.service.settings import Settings

CSRF = "semel_csrf"
FIELD = "csrf"
MOST_FIELDS = 5000
"""Fields of a form: a page of runs to be cancelled has some hundreds."""
_SHAPE = re.compile(r"[\w-]{43}", re.ASCII)
_KIND = "application/x-www-form-urlencoded"


class Form:
    """The fields of a form, as they were sent."""

    def __init__(self, fields: list[tuple[str, str]]) -> None:
        self._fields = fields

    def get(self, name: str, default: str = "") -> str:
        """The first field of that name."""
        return next((value for each, value in self._fields if each == name), default)

    def every(self, name: str) -> list[str]:
        """All fields of that name, such as the boxes that were ticked."""
        return [value for each, value in self._fields if each == name]

    def __contains__(self, name: str) -> bool:
        return any(each == name for each, _ in self._fields)

    def items(self) -> list[tuple[str, str]]:
        """Everything but the secret."""
        return [(name, value) for name, value in self._fields if name != FIELD]


def new_secret() -> str:
    """A secret for a browser that has none."""
    return secrets.token_urlsafe(32)


def secret_of(scope: Any) -> str | None:
    """The browser's secret, if it has one of ours."""
    found = cookie(scope, CSRF)
    return found if found is not None and _SHAPE.fullmatch(found) else None


async def posted(request: TheRequest, settings: Settings) -> Form:
    """The form of a request, which must be from a page of ours."""
    if not _ours(request.scope, settings):
        raise ApiError(403, "CROSS_ORIGIN", "the form was sent by a page of another site")
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _KIND:
        raise ApiError(415, "UNSUPPORTED_MEDIA_TYPE", f"a form is sent as {_KIND}")
    try:
        text = (await request.body()).decode("ascii")
        form = Form(parse_qsl(text, keep_blank_values=True, max_num_fields=MOST_FIELDS))
    except ValueError:
        raise ApiError(
            400, "INVALID_REQUEST", f"the form cannot be read, or has more than {MOST_FIELDS:,} fields"
        ) from None
    known = secret_of(request.scope)
    if known is None or not hmac.compare_digest(known.encode(), form.get(FIELD).encode("utf-8", "surrogatepass")):
        raise ApiError(
            403, "CSRF", "the form is out of date, or not of this site: open its page anew and send it again"
        )
    return form


def form_of(request: TheRequest) -> Form:
    """The form that was checked before the handler was called."""
    form: Form = request.scope["state"]["form"]
    return form


def _ours(scope: Any, settings: Settings) -> bool:
    """Whether the page that sends the form, if the browser names it, is at an address of ours."""
    origins = headers(scope, b"origin")
    hosts = [header(scope, b"host") or "", (header(scope, b"x-forwarded-host") or "").partition(",")[0].strip()]
    names = {_place(f"//{host}") for host in hosts} | {_place(settings.public_url or "")}
    return all(_place(origin) in names - {None} for origin in origins)


def _place(url: str) -> tuple[str, int | None] | None:
    """Host and port; the scheme is the proxy's business. The ports that go without saying are none."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return None
    return None if not parts.hostname else (parts.hostname, None if port in (80, 443) else port)
