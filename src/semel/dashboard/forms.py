"""Reads the forms of the dashboard: the CSRF check, the fields, and the values that people type into them.

The CSRF secret is both a cookie (``semel_csrf``) and a hidden field of every form; the two must be equal. If the
browser sends an ``Origin``, that must be this service. Both are checked for every POST before its handler is called.
"""

from __future__ import annotations

import hmac
import math
import re
import secrets
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import msgspec

from semel.runs import strict_json
from semel.service.api.params import AnyRequest
from semel.service.api.problems import ApiError
from semel.service.api.request import DEEPEST, MOST_VALUES
from semel.service.auth.cookies import cookie
from semel.service.auth.limits import header, headers
from semel.service.settings import Settings

CSRF = "semel_csrf"
FIELD = "csrf"
MAX_FIELDS = 5000
"""Fields of one form: one that cancels a page of runs has some hundreds."""
_SECRET = re.compile(r"[\w-]{43}", re.ASCII)
_FORM_TYPE = "application/x-www-form-urlencoded"


class Form:
    """The fields of a form, as the browser sent them."""

    def __init__(self, fields: list[tuple[str, str]]) -> None:
        self._fields = fields

    def get(self, name: str) -> str:
        """The first field of that name; empty where there is none."""
        return self.optional(name) or ""

    def optional(self, name: str) -> str | None:
        """The first field of that name; None where there is none."""
        return next((value for each, value in self._fields if each == name), None)

    def every(self, name: str) -> list[str]:
        """All fields of that name, such as the checked boxes of a list."""
        return [value for each, value in self._fields if each == name]

    def __contains__(self, name: str) -> bool:
        return any(each == name for each, _ in self._fields)


class FieldError(ValueError):
    """What is wrong with a field, as a sentence that is shown next to it."""


def new_secret() -> str:
    """A CSRF secret for a browser that has none."""
    return secrets.token_urlsafe(32)


def secret_of(scope: Any) -> str | None:
    """The browser's CSRF secret; None where it has none, or one that this service did not make."""
    found = cookie(scope, CSRF)
    return found if found is not None and _SECRET.fullmatch(found) else None


async def read_form(request: AnyRequest, settings: Settings) -> Form:
    """The request's form. Raises ApiError unless a page of this service sent it."""
    if not _same_origin(request.scope, settings):
        raise ApiError(403, "CROSS_ORIGIN", "the form was sent by a page of another site")
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _FORM_TYPE:
        raise ApiError(415, "UNSUPPORTED_MEDIA_TYPE", f"forms must be sent as {_FORM_TYPE}")
    try:
        text = (await request.body()).decode("ascii")
        form = Form(parse_qsl(text, keep_blank_values=True, max_num_fields=MAX_FIELDS))
    except ValueError:
        detail = f"the form is malformed, or has more than {MAX_FIELDS:,} fields"
        raise ApiError(400, "INVALID_REQUEST", detail) from None
    known = secret_of(request.scope)
    if known is None or not hmac.compare_digest(known.encode(), form.get(FIELD).encode("utf-8", "surrogatepass")):
        detail = "the form has expired, or belongs to another site: reload its page and send it again"
        raise ApiError(403, "CSRF", detail)
    return form


def form_of(request: AnyRequest) -> Form:
    """The form that ``read_form`` checked before the handler was called."""
    form: Form = request.scope["state"]["form"]
    return form


def _same_origin(scope: Any, settings: Settings) -> bool:
    """Whether the page that sent the form, if the browser names it, is at an address of this service."""
    hosts = [header(scope, b"host") or "", (header(scope, b"x-forwarded-host") or "").partition(",")[0].strip()]
    own = {_host_and_port(f"//{host}") for host in hosts} | {_host_and_port(settings.public_url or "")}
    return all(_host_and_port(origin) in own - {None} for origin in headers(scope, b"origin"))


def _host_and_port(url: str) -> tuple[str, int | None] | None:
    """Without the scheme, which a proxy may change; the port is None where it is a default one."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return None
    return None if not parts.hostname else (parts.hostname, None if port in (80, 443) else port)


def parse_number(text: str) -> int | float:
    """A number: an int where it is written as one."""
    try:
        value = float(text)
        if text.lstrip("+-").isdecimal():
            return int(text)
    except ValueError:
        raise FieldError("Must be a number.") from None
    if not math.isfinite(value):
        raise FieldError("Must be a finite number.")
    return value


def parse_json(text: str) -> Any:
    """A value written as JSON."""
    data = text.encode(errors="replace")
    if strict_json.count(data) > MOST_VALUES:
        raise FieldError(f"Must have at most {MOST_VALUES:,} values.")
    if strict_json.depth(data) > DEEPEST:
        raise FieldError("The JSON is nested too deeply.")
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        reason = str(error).removeprefix("JSON is malformed: ").rstrip(".")
        raise FieldError(f"Must be JSON: {reason}. Put text in double quotes.") from None
    except RecursionError:
        raise FieldError("The JSON is nested too deeply.") from None


def parse_json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    value = parse_json(text)
    if not isinstance(value, dict):
        raise FieldError('Must be a JSON object, such as {"name": 1}.')
    return value


def validation_error(kind: type, values: dict[str, Any]) -> str | None:
    """Why the values cannot be converted to the type, as a sentence; None when they can."""
    try:
        msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        return sentence(str(error).partition(" - at `$")[0])
    return None


def sentence(text: str) -> str:
    """The text with a capital at its beginning and a full stop at its end."""
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."
