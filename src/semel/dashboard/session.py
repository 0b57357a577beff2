"""Signing in with a token, and out again.

The token that is pasted becomes the cookie of the session: what it may, and until when, is looked up with every
request, as for the API, so a token that was revoked opens no page either.
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
from semel.service.api.params import TheRequest, root_of
from semel.service.api.problems import ApiError, problem_of
from semel.service.auth.middleware import SESSION, SIGN_IN, ErrorPage, path_of
from semel.service.state import CurrentState

LONGEST = 2000
"""Characters of the place to go on to."""
_LOCAL = re.compile(r"/(?![/\\])[!-\[\]-~]*")
"""Printable, without the backslash, which browsers take for a slash."""
Next = Annotated[str, QueryParameter(name="next", max_length=LONGEST)]


def local(root: str, place: str) -> str:
    """The place to go on to, if it is a path of ours; else the overview. A browser takes ``//host`` for a host."""
    if _LOCAL.fullmatch(place) and len(place) <= LONGEST and place.startswith(f"{root}/"):
        return place
    return f"{root}/"


@get(SIGN_IN)
async def ask(request: TheRequest, service: CurrentState, onward: Next = "") -> Response[Any]:
    """The form for the token. Without tokens there is nothing to sign in to."""
    onward = local(root_of(request), onward)
    if not await service.auth.guarded():
        return redirect(onward)
    return page(request, service, None, "sign_in.html", title="Sign in", onward=onward, problem=None)


@post(SIGN_IN, status_code=303)
async def sign_in(request: TheRequest, service: CurrentState) -> Response[Any]:
    """Take the token for the cookie, if it is good."""
    form = form_of(request)
    onward = local(root_of(request), form.get("next"))
    if not await service.auth.guarded():
        return redirect(onward)
    secret = form.get("token").strip()
    try:
        await service.auth.signed_in(secret, request.scope)
    except ApiError as error:
        problem = problem_of(error)
        headers = problem_headers(problem)
        told = {"title": "Sign in", "onward": onward, "problem": problem}
        return page(request, service, None, "sign_in.html", status=problem.status, headers=headers, **told)
    cookies = [cookie_for(request, service, SESSION, secret), cookie_for(request, service, CSRF, new_secret())]
    return redirect(onward, cookies)


@post("/ui/sign-out", status_code=303)
async def sign_out(request: TheRequest, service: CurrentState) -> Response[Any]:
    """Forget the token in this browser; it stays good elsewhere."""
    return redirect(address(root_of(request), SIGN_IN), [cookie_for(request, service, SESSION, "", seconds=0)])


def shown(error: Exception, scope: Any) -> ErrorPage:
    """A refusal of the gate: the way to sign in for who has to, else a page that says why."""
    problem = problem_of(error)
    if problem.status == 401:
        return 303, [*SECURITY_HEADERS.items(), ("Location", _way_in(scope)), ("Content-Length", "0")], b""
    content = problem_page(scope, problem)
    fields = [*problem_headers(problem).items(), ("Content-Type", HTML), ("Content-Length", str(len(content)))]
    return problem.status, fields, content


def _way_in(scope: Any) -> str:
    """The sign-in, which goes on to the page that was asked for; a form is not sent again."""
    root: str = scope.get("root_path", "")
    path = path_of(scope)
    if scope["method"] != "GET" or path.startswith("/ui/live"):
        return address(root, SIGN_IN)
    query = scope.get("query_string", b"").decode("latin-1")
    place = quote(f"{root}{path}", errors="replace") + (f"?{query}" if query else "")
    return address(root, SIGN_IN, next=place if place != f"{root}/" and len(place) <= LONGEST else None)


HANDLERS = (ask, sign_in, sign_out)
