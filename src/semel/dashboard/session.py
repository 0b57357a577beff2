"""Signing in with a token, and out again.

The pasted token becomes the session cookie. As for the API, every request looks up what the token may do and whether it
is still valid, so a revoked token opens no page.
"""

from __future__ import annotations

import re
from typing import Annotated, Any
from urllib.parse import quote

from litestar import Response, get, post
from litestar.params import QueryParameter

from semel.dashboard.forms import CSRF, form_of, new_secret
from semel.dashboard.templating import (
    HTML,
    SECURITY_HEADERS,
    address,
    cookie_for,
    page,
    problem_headers,
    problem_page,
    redirect,
)
from semel.service.api.params import AnyRequest, root_of
from semel.service.api.problems import ApiError, problem_of
from semel.service.auth.middleware import SESSION, SIGN_IN, ErrorPage, path_of
from semel.service.state import CurrentState

MAX_NEXT = 2000
"""Characters of the path to go to after the sign-in."""
_LOCAL_PATH = re.compile(r"/(?![/\\])[!-\[\]-~]*")
"""Printable, without backslashes, which browsers read as slashes; ``//host`` would be another host."""
NextPath = Annotated[str, QueryParameter(name="next", max_length=MAX_NEXT)]


def local_path(root: str, path: str) -> str:
    """The path to go to after the sign-in, if it is one of this service; else the overview."""
    if _LOCAL_PATH.fullmatch(path) and len(path) <= MAX_NEXT and path.startswith(f"{root}/"):
        return path
    return f"{root}/"


@get(SIGN_IN)
async def show(request: AnyRequest, service: CurrentState, onward: NextPath = "") -> Response[Any]:
    """The sign-in form. A service without tokens has no sign-in."""
    onward = local_path(root_of(request), onward)
    if not await service.auth.guarded():
        return redirect(onward)
    return page(request, service, None, "sign_in.html", title="Sign in", onward=onward)


@post(SIGN_IN, status_code=303)
async def sign_in(request: AnyRequest, service: CurrentState) -> Response[Any]:
    """Check the token, and set it as the session cookie."""
    form = form_of(request)
    onward = local_path(root_of(request), form.get("next"))
    if not await service.auth.guarded():
        return redirect(onward)
    token = form.get("token").strip()
    try:
        await service.auth.signed_in(token, request.scope)
    except ApiError as error:
        return page(request, service, None, "sign_in.html", problem=problem_of(error), title="Sign in", onward=onward)
    cookies = [cookie_for(request, service, SESSION, token), cookie_for(request, service, CSRF, new_secret())]
    return redirect(onward, cookies)


@post("/ui/sign-out", status_code=303)
async def sign_out(request: AnyRequest, service: CurrentState) -> Response[Any]:
    """Remove the token from this browser; it stays valid elsewhere."""
    return redirect(address(root_of(request), SIGN_IN), [cookie_for(request, service, SESSION, "", seconds=0)])


def error_page(error: Exception, scope: Any) -> ErrorPage:
    """The response to a refused request for a page: for 401 a redirect to the sign-in, else a page with the error."""
    problem = problem_of(error)
    if problem.status == 401:
        return 303, [*SECURITY_HEADERS.items(), ("Location", _sign_in_url(scope)), ("Content-Length", "0")], b""
    content = problem_page(scope, problem)
    fields = [*problem_headers(problem).items(), ("Content-Type", HTML), ("Content-Length", str(len(content)))]
    return problem.status, fields, content


def _sign_in_url(scope: Any) -> str:
    """The sign-in, which returns to the requested page; not to a form, which would be sent again."""
    root: str = scope.get("root_path", "")
    path = path_of(scope)
    if scope["method"] != "GET" or path.startswith("/ui/live"):
        return address(root, SIGN_IN)
    query = scope.get("query_string", b"").decode("latin-1")
    target = quote(f"{root}{path}", errors="replace") + (f"?{query}" if query else "")
    return address(root, SIGN_IN, next=target if target != f"{root}/" and len(target) <= MAX_NEXT else None)


HANDLERS = (show, sign_in, sign_out)
