"""``/healthz``, ``/readyz`` and ``/metrics``: for those who watch the service."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from litestar import Response, get
from litestar.openapi.datastructures import ResponseSpec

from semel.service.api.health import Health, HealthCheck
from semel.service.api.problems import ApiError
from semel.service.api.responses import refusals
from semel.service.auth.middleware import requires
from semel.service.state import CurrentPrincipal, CurrentState, ServiceState
from semel.service.telemetry.metrics import MetricsPage

_TAG = ["operations"]
_FORMAT = "text/plain; version=0.0.4; charset=utf-8"
_UNWELL = {503: ResponseSpec(Health, description="Something that it leans on does not answer")}

_doctors: WeakKeyDictionary[ServiceState, HealthCheck] = WeakKeyDictionary()
_boards: WeakKeyDictionary[ServiceState, MetricsPage] = WeakKeyDictionary()


@get("/healthz", tags=_TAG, summary="Is it alive?", responses=_UNWELL, security=[{}])
async def healthz(service: CurrentState) -> Response[Health]:
    """Whether the database answers, and Redis where it is used. Needs no token."""
    return _answer(await _doctor(service).alive())


@get("/readyz", tags=_TAG, summary="Does it take requests?", responses=_UNWELL, security=[{}])
async def readyz(service: CurrentState) -> Response[Health]:
    """Whether the database is migrated and takes writes, and the server is not about to end. Needs no token."""
    return _answer(await _doctor(service).ready())


@get(
    "/metrics",
    tags=_TAG,
    summary="Numbers for Prometheus",
    media_type=_FORMAT,
    guards=[requires("operator")],
    responses=refusals(),
)
async def metrics(service: CurrentState, caller: CurrentPrincipal) -> Response[bytes]:
    """What all processes of this server have counted, and what waits in the database. For operators of the house."""
    if caller.tenant:
        raise ApiError(403, "FORBIDDEN", "the numbers are of all tenants together, and not for one of them")
    board = _boards.get(service)
    if board is None:
        board = _boards[service] = MetricsPage(service)
    return Response(await board.text(), media_type=_FORMAT)


def _doctor(service: ServiceState) -> HealthCheck:
    doctor = _doctors.get(service)
    if doctor is None:
        doctor = _doctors[service] = HealthCheck(service)
    return doctor


def _answer(health: Health) -> Response[Health]:
    return Response(health, status_code=200 if health.status == "ok" else 503, headers={"Cache-Control": "no-store"})


HANDLERS: tuple[Any, ...] = (healthz, readyz, metrics)
