"""``/healthz``, ``/readyz`` and ``/metrics``: for monitoring."""

from __future__ import annotations

from typing import Any

from litestar import Response, get
from litestar.openapi.datastructures import ResponseSpec

from semel.service.api.problems import ApiError
from semel.service.api.responses import refusals
from semel.service.auth.middleware import requires
from semel.service.state import CurrentPrincipal, CurrentState
from semel.service.telemetry.health import Health

_TAG = ["operations"]
_FORMAT = "text/plain; version=0.0.4; charset=utf-8"
_UNHEALTHY = {503: ResponseSpec(Health, description="The database or a broker does not respond")}


@get("/healthz", tags=_TAG, summary="Liveness", responses=_UNHEALTHY, security=[{}])
async def healthz(service: CurrentState) -> Response[Health]:
    """Whether the database responds, and Redis if it is used. Needs no token."""
    return _response(await service.health.alive())


@get("/readyz", tags=_TAG, summary="Readiness", responses=_UNHEALTHY, security=[{}])
async def readyz(service: CurrentState) -> Response[Health]:
    """Whether the database is migrated and writable, and the server is not shutting down. Needs no token."""
    return _response(await service.health.ready())


@get(
    "/metrics",
    tags=_TAG,
    summary="Metrics for Prometheus",
    media_type=_FORMAT,
    guards=[requires("operator")],
    responses=refusals(),
)
async def metrics(service: CurrentState, caller: CurrentPrincipal) -> Response[bytes]:
    """The metrics of all processes of this server, and of the database. For operators of the main tenant."""
    if caller.tenant:
        raise ApiError(403, "FORBIDDEN", "the metrics cover all tenants: they are for operators of the main tenant")
    return Response(await service.metrics.render(), media_type=_FORMAT)


def _response(health: Health) -> Response[Health]:
    return Response(health, status_code=200 if health.status == "ok" else 503, headers={"Cache-Control": "no-store"})


HANDLERS: tuple[Any, ...] = (healthz, readyz, metrics)
