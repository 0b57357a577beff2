"""Renders pages from Jinja templates, with autoescaping always on.

    return page(request, service, caller, "runs/list.html", title="Runs", runs=found)

Every template can use ``url``, ``static``, ``caller`` and ``csrf``, and the filters at the end of this module.
templates/macros.html holds the elements that pages share.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urlencode

from litestar import Response
from litestar.datastructures import Cookie
from msgspec import Struct

from semel.api_types import Problem
from semel.dashboard import static_files
from semel.dashboard.forms import CSRF, new_secret, secret_of
from semel.http.refusals import phrase
from semel.runs.types import attempts_text
from semel.service.api.params import AnyRequest, root_of
from semel.service.api.problems import allow_of, problem_of
from semel.service.auth.cookies import cookie, is_https, made_cookie
from semel.service.auth.middleware import Principal, path_of
from semel.service.auth.tokens import Role
from semel.service.state import ServiceState
from semel.types import moment

if TYPE_CHECKING:
    from jinja2 import Environment

FOLDER = Path(__file__).parent / "templates"
HTML = "text/html; charset=utf-8"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
SECURITY_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",  # with no-referrer, browsers would send forms with "Origin: null"
    "Cross-Origin-Opener-Policy": "same-origin",
}
FLASH_COOKIE = "semel_flash"
"""Carries a form's confirmation to the page that the browser is redirected to."""
MAX_MESSAGE = 500
THEME = "semel_theme"
THEMES = ("light", "dark")
DASH = "\u2013"
_UNITS = ("B", "KB", "MB", "GB", "TB")


class NavigationEntry(Struct, frozen=True):
    """A link of the navigation bar, shown to callers who have the role."""

    path: str
    label: str
    role: Role = "submitter"


NAVIGATION = (
    NavigationEntry("/", "Overview"),
    NavigationEntry("/ui/runs", "Runs"),
    NavigationEntry("/ui/submit", "Submit"),
    NavigationEntry("/ui/models", "Models", "operator"),
    NavigationEntry("/ui/errors", "Errors"),
    NavigationEntry("/ui/queues", "Queues", "operator"),
    NavigationEntry("/ui/workers", "Workers", "operator"),
    NavigationEntry("/ui/quotas", "Quotas"),
    NavigationEntry("/ui/keys", "Keys", "operator"),
    NavigationEntry("/ui/webhooks", "Webhooks", "operator"),
    NavigationEntry("/ui/tokens", "Tokens", "operator"),
    NavigationEntry("/ui/audit", "Audit", "admin"),
)


@cache
def environment() -> Environment:
    """Jinja's environment; jinja2 is imported with the first page."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        auto_reload=False,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(FILTERS)
    return made


def page(
    request: AnyRequest,
    service: ServiceState,
    caller: Principal | None,
    template: str,
    *,
    status: int = 200,
    problem: Problem | None = None,
    **data: Any,
) -> Response[bytes]:
    """The template as a whole page. With a problem the page has its status, and the template shows it."""
    scope = request.scope
    secret = secret_of(scope)
    cookies = []
    if secret is None:
        secret = new_secret()
        cookies.append(cookie_for(request, service, CSRF, secret))
    flash = cookie(scope, FLASH_COOKIE)
    if flash:
        cookies.append(cookie_for(request, service, FLASH_COOKIE, "", seconds=0))
    message = unquote(flash or "")[:MAX_MESSAGE]
    content = _render(scope, caller, template, csrf=secret, message=message, problem=problem, **data)
    return Response(
        content.encode("utf-8", "replace"),
        status_code=status if problem is None else problem.status,
        headers=problem_headers(problem),
        cookies=cookies,
        media_type="text/html",  # Litestar adds the charset
    )


def render_part(request: AnyRequest, caller: Principal, template: str, **data: Any) -> str:
    """A part of an open page: its elements replace those that have the same ids."""
    return _render(request.scope, caller, template, csrf=secret_of(request.scope) or "", **data)


def render_shared(root: str, template: str, **data: Any) -> str:
    """A part that looks the same for every caller, so that it can be cached: no forms, no ``caller``."""
    return environment().get_template(template).render(_links(root) | data)


def redirect_with_message(
    request: AnyRequest, service: ServiceState, path: str, message: str, **query: Any
) -> Response[bytes]:
    """Redirects (303) to a path below the root; the page there shows the message once."""
    text = quote(message[:MAX_MESSAGE], safe="", errors="replace")
    flash = cookie_for(request, service, FLASH_COOKIE, text, seconds=60)
    return redirect(address(root_of(request), path, **query), [flash])


def redirect(location: str, cookies: list[Cookie] | None = None) -> Response[bytes]:
    """Redirects (303) to an address of this service."""
    headers = {**SECURITY_HEADERS, "Location": location, "Cache-Control": "no-store"}
    return Response(b"", status_code=303, headers=headers, cookies=cookies or [], media_type="text/plain")


def cookie_for(
    request: AnyRequest, service: ServiceState, name: str, value: str, *, seconds: int | None = None
) -> Cookie:
    """A cookie for the paths of this service; Secure where the browser came over HTTPS."""
    secure = is_https(request.scope, service.settings)
    return made_cookie(name, value, root=root_of(request), secure=secure, seconds=seconds)


def address(root: str, path: str, **query: Any) -> str:
    """The URL of a path below the root. Leaves out query parameters that are None; repeats those that are lists."""
    encoded = urlencode({name: value for name, value in query.items() if value is not None}, doseq=True)
    return quote(root) + quote(path, safe="/?&=:,;@%~+-") + (f"?{encoded}" if encoded else "")


def problem_page(scope: Any, problem: Problem) -> bytes:
    """The page that shows a problem and nothing else."""
    caller: Principal | None = scope.get("state", {}).get("caller")
    data = {"title": phrase(problem.status), "problem": problem}
    return _render(scope, caller, "problem.html", csrf=secret_of(scope) or "", **data).encode("utf-8", "replace")


def problem_response(request: AnyRequest, error: Exception) -> Response[bytes]:
    """The response to a request for a page that raised an error."""
    problem = problem_of(error)
    return Response(
        problem_page(request.scope, problem),
        status_code=problem.status,
        headers=problem_headers(problem) | allow_of(error),
        media_type="text/html",  # Litestar adds the charset
    )


def problem_headers(problem: Problem | None) -> dict[str, str]:
    """The headers of a page, with Retry-After where the problem has one."""
    wait = {} if problem is None or problem.retry_after is None else {"Retry-After": str(problem.retry_after)}
    return {**SECURITY_HEADERS, "Cache-Control": "no-store", **wait}


def _links(root: str) -> dict[str, Any]:
    return {
        "url": partial(address, root),
        "static": lambda name: f"{quote(root)}{static_files.address(name)}",
    }


def _render(scope: Any, caller: Principal | None, template: str, **data: Any) -> str:
    theme = cookie(scope, THEME)
    frame = {
        **_links(scope.get("root_path", "")),
        "caller": caller,
        "navigation": [each for each in NAVIGATION if caller is not None and caller.sees(each.role)],
        "path": path_of(scope) or "/",
        "theme": theme if theme in THEMES else "",
        "now_us": time.time_ns() // 1000,
        "message": "",
    }
    return environment().get_template(template).render(frame | data)


def duration(seconds: float | None) -> str:
    """For example 480 ms, 3.2 s, 4 min 10 s, 2 h 5 min, 3 d 4 h."""
    if seconds is None:
        return DASH
    if seconds < 0.9995:
        return f"{max(0.0, seconds) * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for size, unit, smaller, smaller_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size} {unit} {rest} {smaller_unit}" if rest else f"{whole // size} {unit}"
    raise AssertionError("unreachable")


def number(value: float | None) -> str:
    """With commas between thousands, and two decimals where it is not whole."""
    if value is None:
        return DASH
    if isinstance(value, int) or float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:,.2f}"


def percent(part: float | None) -> str:
    """For example 83 %."""
    return DASH if part is None else f"{part * 100:.0f} %"


def size(count: int | None) -> str:
    """A number of bytes, for example 12.3 KB."""
    if count is None:
        return DASH
    amount, unit = float(count), 0
    while amount >= 1000 and unit < len(_UNITS) - 1:
        amount, unit = amount / 1000, unit + 1
    return f"{amount:.0f} B" if unit == 0 else f"{amount:.1f} {_UNITS[unit]}"


def utc(when: datetime | int) -> datetime:
    """A time in UTC; integers are the database's microseconds."""
    return moment(when) if isinstance(when, int) else when.astimezone(UTC)


def iso(when: datetime | int) -> str:
    """For machines: 2026-01-31T12:00:00.000000Z."""
    return utc(when).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def plain_time(when: datetime | int) -> str:
    """For people: 2026-01-31 12:00:00, in UTC."""
    return utc(when).strftime("%Y-%m-%d %H:%M:%S")


def pretty(value: Any) -> str:
    """A value as indented JSON. A text that is JSON is indented; any other text is returned as it is."""
    if isinstance(value, str | bytes):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    try:
        return json.dumps(value, indent=2, ensure_ascii=False, default=str)
    except RecursionError:
        return str(value)


def as_json(value: object) -> str:
    """The value as compact JSON; Jinja's own filter would mark it as safe HTML."""
    return json.dumps(value, ensure_ascii=False)


def short(text: str, most: int = 60) -> str:
    """The first characters of a text, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


def short_id(run_id: str) -> str:
    """The end of an id: ids made within the same second begin alike."""
    return run_id[-12:]


FILTERS: Mapping[str, Callable[..., str]] = {
    each.__name__: each
    for each in (as_json, attempts_text, duration, number, percent, size, iso, plain_time, pretty, short, short_id)
}
