"""Every page of the dashboard, and what holds for all of them."""

from __future__ import annotations

from typing import Any

from litestar import Response, Router

from semel.service import problems
from semel.service.dashboard import (
    compare,
    keys,
    live,
    overview,
    quotas,
    run,
    runs,
    session,
    static_files,
    submit,
)
from semel.service.dashboard.forms import posted
from semel.service.dashboard.rendering import ARMOUR, problem_answer
from semel.service.gate import is_page, path_of
from semel.service.runs_words import TheRequest
from semel.service.site import Site

HANDLERS = (
    *overview.HANDLERS,
    *live.HANDLERS,
    *runs.HANDLERS,
    *run.HANDLERS,
    *compare.HANDLERS,
    *keys.HANDLERS,
    *quotas.HANDLERS,
    *submit.HANDLERS,
    *session.HANDLERS,
    *static_files.HANDLERS,
)


def router(site: Site) -> Router:
    """The pages: no form is looked at that is not ours, and no answer leaves without its policy."""

    async def checked(request: TheRequest) -> None:
        if request.method not in ("GET", "OPTIONS"):
            request.scope["state"]["form"] = await posted(request, site.settings)

    return Router(
        path="/",
        route_handlers=HANDLERS,
        before_request=checked,
        after_request=armoured,
        opt={"page": True},
        include_in_schema=False,
    )


def armoured(response: Response[Any]) -> Response[Any]:
    """The answer with its policy; one that a handler has set stays."""
    for name, value in ARMOUR.items():
        response.headers.setdefault(name, value)
    return response


def answer(request: TheRequest, error: Exception) -> Response[bytes]:
    """Litestar's handler of exceptions: a page for browsers, a problem for all others."""
    if is_page(path_of(request.scope)):
        return problem_answer(request, error)
    return problems.answer(request, error)
