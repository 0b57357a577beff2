"""The service put together: an app's runs behind HTTP.

    from semel.service import asgi
    application = asgi(app)            # any ASGI server runs it, any ASGI app mounts it

``semel serve`` does the same from the environment; see serving.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from litestar import Litestar, Request
from litestar.di import Provide
from litestar.openapi.config import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.openapi.spec import Components, SecurityScheme
from litestar.plugins.core import MsgspecDIPlugin

from semel.runs.app import App
from semel.service import admin_api, events_api, jobs_api, ops_api, runs_api, webhooks_in
from semel.service.bodies import JsonRequest, require_known_query
from semel.service.dashboard import pages
from semel.service.dashboard.session import shown
from semel.service.gate import Caller, Guarded, pages_alone
from semel.service.settings import Settings
from semel.service.site import Site, TheSite
from semel.service.watching import note_unforeseen, watched


class Lean(Litestar):
    """Without the plugins for other libraries' models, which would be imported wherever they are installed."""

    @staticmethod
    def _get_default_plugins(plugins: list[Any]) -> list[Any]:
        return [*plugins, MsgspecDIPlugin()]


class _Rendered(JsonRenderPlugin):
    """The schema with where the service is: it may be mounted below a path."""

    def render(self, request: Request[Any, Any, Any], openapi_schema: dict[str, Any]) -> bytes:
        """See Litestar."""
        root = request.scope.get("root_path", "")
        return super().render(request, {**openapi_schema, "servers": [{"url": root or "/"}]})


def asgi(app: App, settings: Settings | None = None) -> Any:
    """The service around an app, for any ASGI server, or to be mounted in another ASGI application."""
    return build(Site(app, settings or Settings()))


def build(site: Site) -> Any:
    """The site as an ASGI application."""

    def the_site() -> Site:
        return site

    def the_caller(request: Request[Any, Any, Any], site: TheSite) -> Caller:  # noqa: ARG001 -- one after the other
        caller: Caller = request.scope["state"]["caller"]
        return caller

    @asynccontextmanager
    async def lifespan(_: Litestar) -> AsyncIterator[None]:
        await site.opened()
        try:
            yield
        finally:
            await site.close()

    litestar = Lean(
        route_handlers=[
            *runs_api.HANDLERS,
            *jobs_api.HANDLERS,
            *webhooks_in.HANDLERS,
            *admin_api.HANDLERS,
            *events_api.HANDLERS,
            *ops_api.HANDLERS,
            pages.router(site),
        ],
        dependencies={
            "site": Provide(the_site, sync_to_thread=False),
            "caller": Provide(the_caller, sync_to_thread=False),
        },
        guards=[pages_alone],
        exception_handlers={Exception: pages.answer},
        after_exception=[note_unforeseen],
        request_class=JsonRequest,
        before_request=require_known_query,
        lifespan=[lifespan],
        logging_config=None,
        openapi_config=OpenAPIConfig(
            title="semel",
            version=version("semel"),
            description="Work happens once: submit runs, watch them, get their results.",
            path="/schema",
            render_plugins=[_Rendered()],
            use_handler_docstrings=True,
            components=Components(
                security_schemes={
                    "token": SecurityScheme(type="http", scheme="bearer", description="A token of semel's: semel_…")
                }
            ),
            security=[{"token": []}, {}],
        ),
        request_max_body_size=None,  # the gate looks after that
    )
    return watched(Guarded(litestar, site.gate, site.settings, site.opened, shown), site)
