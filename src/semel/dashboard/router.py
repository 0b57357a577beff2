"""Every page of the dashboard, and what holds for all of them."""

from __future__ import annotations

from typing import Any

from litestar import Response, Router

from semel.dashboard import keys, overview, quotas, session, sse, static_files, submit
from semel.dashboard.forms import posted
from semel.dashboard.overview.feed import FeedCache
from semel.dashboard.runs import compare, detail, run_list
from semel.dashboard.templating import SECURITY_HEADERS, problem_answer
from semel.service.api import problems
from semel.service.api.params import TheRequest
from semel.service.auth.middleware import is_page, path_of
from semel.service.state import ServiceState

HANDLERS = (
    *overview.HANDLERS,
    *sse.HANDLERS,
    *run_list.HANDLERS,
    *detail.HANDLERS,
    *compare.HANDLERS,
    *keys.HANDLERS,
    *quotas.HANDLERS,
    *submit.HANDLERS,
    *session.HANDLERS,
    *static_files.HANDLERS,
)


def router(service: ServiceState) -> Router:
    """The pages: no form is looked at that is not ours, and no answer leaves without its policy."""
    service.overview_feeds = FeedCache(service)

    async def checked(request: TheRequest) -> None:
        if request.method not in ("GET", "OPTIONS"):
            request.scope["state"]["form"] = await posted(request, service.settings)

    return Router(
        path="/",
        route_handlers=HANDLERS,
        before_request=checked,
        after_request=add_security_headers,
        opt={"page": True},
        include_in_schema=False,
    )


def add_security_headers(response: Response[Any]) -> Response[Any]:
    """The answer with its policy; one that a handler has set stays."""
    for name, value in SECURITY_HEADERS.items():
        response.headers.setdefault(name, value)
    return response


def answer(request: TheRequest, error: Exception) -> Response[bytes]:
    """Litestar's handler of exceptions: a page for browsers, a problem for all others."""
    if is_page(path_of(request.scope)):
        return problem_answer(request, error)
    return problems.answer(request, error)
