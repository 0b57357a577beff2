"""The ASGI application of the service.

    from semel.service import asgi
    application = asgi(app)            # any ASGI server runs it, any ASGI app mounts it

``semel serve`` configures the same from the environment.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import cached_property, lru_cache
from importlib.metadata import version
from traceback import format_exc
from typing import Any

import msgspec
from litestar import Litestar, Request
from litestar.di import Provide
from litestar.openapi.config import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.openapi.spec import Components, SecurityScheme
from litestar.plugins.core import MsgspecDIPlugin
from litestar.routes import HTTPRoute
from litestar.types import ControllerRouterHandler

from semel import dashboard
from semel.dashboard.session import error_page
from semel.runs.app import App
from semel.service.api import (
    audit_log,
    jobs,
    keys,
    ops,
    pauses,
    quotas,
    run_actions,
    run_manifests,
    run_proofs,
    runs,
    tokens,
    webhooks,
)
from semel.service.api.openapi import ResponseSchemas
from semel.service.api.problems import allow
from semel.service.api.request import JsonRequest, require_known_query
from semel.service.auth.middleware import AuthMiddleware, Principal, forbid_cookie_on_api
from semel.service.jobs.providers import handlers_of
from semel.service.settings import Settings
from semel.service.state import CurrentState, ServiceState
from semel.service.telemetry.access_log import AccessLogMiddleware, log_unexpected


class _Litestar(Litestar):
    """Litestar without the plugins that import other libraries, such as pydantic, if they are installed."""

    @staticmethod
    def _get_default_plugins(plugins: list[Any]) -> list[Any]:
        return [*plugins, MsgspecDIPlugin()]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Correct the Allow header of OPTIONS: Litestar's has only the methods of a route's first handler."""

        async def send_allow(message: Any) -> None:
            if message["type"] == "http.response.start" and scope.get("path_template") in self._methods:
                methods = allow(self._methods[scope["path_template"]])
                message = {**message, "headers": [*_without_allow(message["headers"]), (b"allow", methods.encode())]}
            await send(message)

        options = scope["type"] == "http" and scope["method"] == "OPTIONS"
        await super().__call__(scope, receive, send_allow if options else send)

    @cached_property
    def _methods(self) -> dict[str, set[str]]:
        return {route.path_format: set(route.methods) for route in self.routes if isinstance(route, HTTPRoute)}


def _without_allow(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in headers if name != b"allow"]


class _Rendered(JsonRenderPlugin):
    """The schema with the mount point as its server, and with the complete schemas of bodies."""

    def render(self, request: Request[Any, Any, Any], openapi_schema: dict[str, Any]) -> bytes:
        root = request.scope.get("root_path", "")
        components = openapi_schema["components"]
        components = {**components, "schemas": {**components["schemas"], **_bodies(request.app)}}
        return super().render(request, {**openapi_schema, "servers": [{"url": root or "/"}], "components": components})


def _bodies(app: Litestar) -> dict[str, Any]:
    """The schemas of bodies by msgspec: Litestar omits bounds of 0, and that unknown fields are refused."""
    routes = (route for route in app.routes if isinstance(route, HTTPRoute))
    fields = [handler.parsed_data_field for route in routes for handler in route.route_handlers]
    kinds = [field.annotation for field in fields if field is not None]
    return msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")[1]


def asgi(app: App, settings: Settings | None = None) -> Any:
    """The service around an app, for any ASGI server, or to be mounted in another ASGI application."""
    return build(ServiceState(app, settings or Settings()))


def build(service: ServiceState) -> Any:
    """The service as an ASGI application."""
    dashboard.add_feeds(service)
    litestar = _litestar(tuple(handlers_of(service.providers.values())))
    inner = AuthMiddleware(litestar, service.auth, service.settings, service.ensure_open, error_page)
    return _Application(AccessLogMiddleware(inner), service)


class _Application:
    """One service: it is opened and closed by the server, and is in the scope of each request."""

    def __init__(self, inner: Any, service: ServiceState) -> None:
        self._inner = inner
        self._service = service

    @asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        """Open the service for the duration of the block; for applications that mount it without lifespan events."""
        await self._service.ensure_open()
        try:
            yield
        finally:
            await self._service.close()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        state = {**scope.get("state", {}), "service": self._service}  # a server may share its dict between requests
        await self._inner({**scope, "state": state}, receive, send)

    async def _live(self, receive: Any, send: Any) -> None:
        """From the server's first event to its last."""
        event = "startup"
        try:
            await receive()
            async with self.lifespan():
                await send({"type": "lifespan.startup.complete"})
                event = "shutdown"
                await receive()
        except BaseException:
            await send({"type": f"lifespan.{event}.failed", "message": format_exc()})
            raise
        await send({"type": "lifespan.shutdown.complete"})


def _get_service(request: Request[Any, Any, Any]) -> ServiceState:
    service: ServiceState = request.scope["state"]["service"]
    return service


def _get_caller(request: Request[Any, Any, Any], service: CurrentState) -> Principal:  # noqa: ARG001 -- Litestar resolves it after the service
    caller: Principal = request.scope["state"]["caller"]
    return caller


@lru_cache(maxsize=8)
def _litestar(provided: tuple[ControllerRouterHandler, ...]) -> Litestar:
    """All routes, with those of the providers, shared by the services of a process: each is in its requests' scope."""
    return _Litestar(
        route_handlers=[
            *runs.HANDLERS,
            *run_actions.HANDLERS,
            *run_manifests.HANDLERS,
            *run_proofs.HANDLERS,
            *jobs.HANDLERS,
            *provided,
            *tokens.HANDLERS,
            *quotas.HANDLERS,
            *pauses.HANDLERS,
            *keys.HANDLERS,
            *audit_log.HANDLERS,
            *webhooks.HANDLERS,
            *ops.HANDLERS,
            dashboard.router(),
        ],
        dependencies={
            "service": Provide(_get_service, sync_to_thread=False),
            "caller": Provide(_get_caller, sync_to_thread=False),
        },
        guards=[forbid_cookie_on_api],
        exception_handlers={Exception: dashboard.handle_error},
        after_exception=[log_unexpected],
        request_class=JsonRequest,
        before_request=require_known_query,
        logging_config=None,
        plugins=[ResponseSchemas()],
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
        request_max_body_size=None,  # AuthMiddleware limits it
    )
