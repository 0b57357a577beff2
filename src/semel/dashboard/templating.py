"""Pages from templates: every value is text unless a template says otherwise, and none does.

    return page(request, site, caller, "runs.html", title="Runs", runs=found)

Templates know ``url``, ``static``, ``caller``, ``csrf`` and what the handler gives them; see templates/parts.html for
the pieces that pages are made of.
"""

from __future__ import annotations

import time
from functools import cache, partial
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urlencode

from litestar import Response
from litestar.datastructures import Cookie
from msgspec import Struct

from semel.api_types import Problem
from semel.dashboard import static_files, wording
from semel.dashboard.forms import CSRF, new_secret, secret_of
from semel.service.api.params import TheRequest, root_of
from semel.service.api.problems import allow_of, problem_of
from semel.service.auth.cookies import cookie, is_https, made_cookie
from semel.service.auth.middleware import Principal, path_of
from semel.service.auth.tokens import Role
from semel.service.state import ServiceState

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
    "Referrer-Policy": "same-origin",  # with no-referrer a browser would not say where a form comes from
    "Cross-Origin-Opener-Policy": "same-origin",
}
"""What every answer of the dashboard carries."""
FLASH_COOKIE = "semel_said"
"""The cookie by which a page tells what the form before it did."""
LONGEST_SAID = 500
THEME = "semel_theme"
THEMES = ("light", "dark")


class NavigationEntry(Struct, frozen=True):
    """A page in the navigation, for those who have that role."""

    path: str
    label: str
    role: Role = "submitter"


NAVIGATION = (
    NavigationEntry("/", "Overview"),
    NavigationEntry("/ui/runs", "Runs"),
    NavigationEntry("/ui/submit", "Submit"),
    NavigationEntry("/ui/quotas", "Quotas"),
    NavigationEntry("/ui/keys", "Keys", "operator"),
)


@cache
def environment() -> Environment:
    """Where the templates are; jinja2 is imported with the first page."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        auto_reload=False,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(wording.FILTERS)
    return made


def page(
    request: TheRequest,
    service: ServiceState,
    caller: Principal | None,
    template: str,
    *,
    status: int = 200,
    headers: dict[str, str] | None = None,
    **data: Any,
) -> Response[bytes]:
    """The template as an answer, in the frame of all pages."""
    scope = request.scope
    secret = secret_of(scope)
    cookies = []
    if secret is None:
        secret = new_secret()
        cookies.append(cookie_for(request, service, CSRF, secret))
    said = cookie(scope, FLASH_COOKIE)
    if said:
        cookies.append(cookie_for(request, service, FLASH_COOKIE, "", seconds=0))
    content = _rendered(scope, caller, template, csrf=secret, said=unquote(said or "")[:LONGEST_SAID], **data)
    return Response(
        content.encode("utf-8", "replace"),
        status_code=status,
        headers={**SECURITY_HEADERS, "Cache-Control": "no-store", **(headers or {})},
        cookies=cookies,
        media_type="text/html",  # Litestar adds the charset
    )


def render_part(request: TheRequest, caller: Principal, template: str, **data: Any) -> str:
    """A template without a frame: parts of a page, which replace those of the same ids while the page is open."""
    return _rendered(request.scope, caller, template, csrf=secret_of(request.scope) or "", said="", **data)


def redirect_with_message(
    request: TheRequest, service: ServiceState, path: str, *, said: str = "", **query: Any
) -> Response[bytes]:
    """303 to the path (below the root), as the answer to a form; the page there tells what was done."""
    told = quote(said[:LONGEST_SAID], safe="", errors="replace")
    cookies = [cookie_for(request, service, FLASH_COOKIE, told, seconds=60)] if said else []
    return redirect(address(root_of(request), path, **query), cookies)


def redirect(place: str, cookies: list[Cookie] | None = None) -> Response[bytes]:
    """303 to an address of ours."""
    headers = {**SECURITY_HEADERS, "Location": place, "Cache-Control": "no-store"}
    return Response(b"", status_code=303, headers=headers, cookies=cookies or [], media_type="text/plain")


def cookie_for(
    request: TheRequest, service: ServiceState, name: str, value: str, *, seconds: int | None = None
) -> Cookie:
    """A cookie of this place."""
    secure = is_https(request.scope, service.settings)
    return made_cookie(name, value, root=root_of(request), secure=secure, seconds=seconds)


def address(root: str, path: str, **query: Any) -> str:
    """The address of a path below the root; what is None is left out of the query, lists are repeated."""
    asked = urlencode({name: value for name, value in query.items() if value is not None}, doseq=True)
    return quote(root) + quote(path, safe="/?&=:,;@%~+-") + (f"?{asked}" if asked else "")


def problem_page(scope: Any, problem: Problem) -> bytes:
    """A refusal, for people."""
    caller: Principal | None = scope.get("state", {}).get("caller")
    csrf = secret_of(scope) or ""
    data = {"title": HTTPStatus(problem.status).phrase, "problem": problem}
    return _rendered(scope, caller, "problem.html", csrf=csrf, said="", **data).encode("utf-8", "replace")


def problem_answer(request: TheRequest, error: Exception) -> Response[bytes]:
    """An error as a page."""
    problem = problem_of(error)
    return Response(
        problem_page(request.scope, problem),
        status_code=problem.status,
        headers=problem_headers(problem) | allow_of(error),
        media_type="text/html",  # Litestar adds the charset
    )


def problem_headers(problem: Problem) -> dict[str, str]:
    """What goes with it."""
    wait = {} if problem.retry_after is None else {"Retry-After": str(problem.retry_after)}
    return {**SECURITY_HEADERS, "Cache-Control": "no-store", **wait}


def render_shared(root: str, template: str, **data: Any) -> str:
    """A template that is the same for all who see it: it knows nobody, and has no forms."""
    return environment().get_template(template).render(_links(root) | data)


def _links(root: str) -> dict[str, Any]:
    return {
        "url": partial(address, root),
        "static": lambda name: f"{quote(root)}{static_files.address(name)}",
    }


def _rendered(scope: Any, caller: Principal | None, template: str, **data: Any) -> str:
    theme = cookie(scope, THEME)
    frame = {
        **_links(scope.get("root_path", "")),
        "caller": caller,
        "navigation": [each for each in NAVIGATION if caller is not None and caller.may(each.role)],
        "here": path_of(scope) or "/",
        "theme": theme if theme in THEMES else "",
        "served_us": time.time_ns() // 1000,
    }
    return environment().get_template(template).render(frame | data)
