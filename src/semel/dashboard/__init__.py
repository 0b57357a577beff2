"""The dashboard: server-rendered pages that show what is running, what is stuck, and why runs failed."""

from __future__ import annotations

from typing import Any

from litestar import Response, Router

from semel.dashboard import (
    audit_log,
    errors,
    keys,
    models,
    overview,
    queues,
    quotas,
    session,
    static_files,
    submit,
    tokens,
    webhooks,
    workers,
)
from semel.dashboard.forms import read_form
from semel.dashboard.overview.feed import FeedCache
from semel.dashboard.runs import actions, compare, detail, downloads, run_list
from semel.dashboard.templating import SECURITY_HEADERS, problem_response
from semel.service.api import problems
from semel.service.api.params import AnyRequest
from semel.service.auth.middleware import is_page, path_of
from semel.service.state import ServiceState

HANDLERS = (
    *overview.HANDLERS,
    *run_list.HANDLERS,
    *actions.HANDLERS,
    *detail.HANDLERS,
    *downloads.HANDLERS,
    *compare.HANDLERS,
    *errors.HANDLERS,
    *models.HANDLERS,
    *keys.HANDLERS,
    *audit_log.HANDLERS,
    *quotas.HANDLERS,
    *queues.HANDLERS,
    *workers.HANDLERS,
    *webhooks.HANDLERS,
    *tokens.HANDLERS,
    *submit.HANDLERS,
    *session.HANDLERS,
    *static_files.HANDLERS,
)


def router() -> Router:
    """All pages. Every form is checked before its handler, and every response gets the security headers."""
    return Router(
        path="/",
        route_handlers=HANDLERS,
        before_request=check_form,
        after_request=add_security_headers,
        opt={"page": True},
        include_in_schema=False,
    )


def add_feeds(service: ServiceState) -> None:
    """Adds what the overview shows of this service: one feed for each audience, whoever looks at it."""
    service.overview_feeds = FeedCache(service)


async def check_form(request: AnyRequest) -> None:
    """Reads the form of a request that has one."""
    if request.method not in ("GET", "OPTIONS"):
        state = request.scope["state"]
        state["form"] = await read_form(request, state["service"].settings)


def add_security_headers(response: Response[Any]) -> Response[Any]:
    """Adds the security headers that the handler has not set itself."""
    for name, value in SECURITY_HEADERS.items():
        response.headers.setdefault(name, value)
    return response


def handle_error(request: AnyRequest, error: Exception) -> Response[bytes]:
    """Litestar's exception handler: an HTML page for the paths of the dashboard, a problem document for the API."""
    if is_page(path_of(request.scope)):
        return problem_response(request, error)
    return problems.answer(request, error)
