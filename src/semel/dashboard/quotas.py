"""``/ui/quotas``: what everybody may use, and does use; what it costs; which slots are held. Admins change it here."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from litestar import Response, get, post
from litestar.params import QueryParameter

from semel.api_types import Problem
from semel.dashboard import quota_bars
from semel.dashboard.forms import Form, form_of
from semel.dashboard.quota_queries import UserUsage, in_use
from semel.dashboard.submit import typed
from semel.dashboard.templating import page, problem_headers, redirect_with_message
from semel.errors import InvalidRequest, SemelError
from semel.runs.types import EVERYBODY
from semel.service.api import quotas
from semel.service.api.params import TheRequest, manages_all, tenant_for
from semel.service.api.problems import problem_of
from semel.service.api.quotas import QuotaBody, ReservationPage, Standing
from semel.service.auth.middleware import Principal, requires
from semel.service.state import CurrentPrincipal, CurrentState, ServiceState

PLACE = "/ui/quotas"
MOST = 100
"""Users, and reservations, on the page."""
NUMBERS = tuple(name for name in QuotaBody.__struct_fields__ if name not in ("action", "warn_at"))
"""The limits of a quota; an empty field is no limit."""

QuotaQuery = Annotated[str | None, QueryParameter(max_length=200)]


class Draft(msgspec.Struct, kw_only=True):
    """The form of a quota as it stands: what was typed, and what is wrong with it."""

    user: str = ""
    texts: dict[str, str] = {}
    faults: dict[str, str] = {}


@get(PLACE)
async def show(
    request: TheRequest,
    service: CurrentState,
    caller: CurrentPrincipal,
    user: QuotaQuery = None,
    tenant: QuotaQuery = None,
) -> Response[Any]:
    """One user's use, or everybody's; submitters have their own."""
    whose = tenant_for(caller, tenant)
    if caller.visible_user is not None and not user:
        user = caller.visible_user
    if user:
        return await _one(request, service, caller, whose, user)
    return await _everybody(request, service, caller, whose)


async def _everybody(request: TheRequest, service: ServiceState, caller: Principal, tenant: str) -> Response[Any]:
    async with service.slow_query_lock:
        uses = await service.store.read(in_use, tenant, MOST, service.store.terms)
    rows = [(use, quota_bars.bars(use.quota, use.used)) for use in uses]
    rows.sort(key=lambda row: _busyness(*row))
    default = await _standing(service, caller, tenant, EVERYBODY)
    return page(
        request,
        service,
        caller,
        "quotas.html",
        title="Quotas and cost",
        tenant=_said_tenant(caller, tenant),
        chooses=manages_all(caller),
        rows=rows,
        most=MOST,
        default=[bar for bar in quota_bars.bars_of(default) if bar.limit is not None],
        has_default=default.quota is not None,
        action="" if default.quota is None else default.quota.action,
        held=await _reservations(service, caller, tenant, None),
    )


def _busyness(use: UserUsage, every: list[quota_bars.QuotaBar]) -> tuple[float, int, int, str]:
    """By the fullest limit first, then by what is under way, then by the last day."""
    return (-quota_bars.fullest(every), -use.used.concurrent, -use.used.last_day, use.user)


async def _one(
    request: TheRequest,
    service: ServiceState,
    caller: Principal,
    tenant: str,
    user: str,
    *,
    draft: Draft | None = None,
    problem: Problem | None = None,
) -> Response[Any]:
    standing = await _standing(service, caller, tenant, user)
    own = standing.quota is not None and not standing.default
    return page(
        request,
        service,
        caller,
        "quotas_user.html",
        status=200 if problem is None else problem.status,
        headers=None if problem is None else problem_headers(problem),
        title=f"Quota of {user}" if user != EVERYBODY else "The default quota",
        tenant=_said_tenant(caller, tenant),
        standing=standing,
        own=own,
        bars=quota_bars.bars_of(standing),
        everybody=user == EVERYBODY,
        draft=draft or _drafted(user, standing.quota if own else None),
        counts=quota_bars.COUNTS,
        costs=quota_bars.COSTS,
        problem=problem,
        held=ReservationPage(reservations=[], next=None)
        if user == EVERYBODY
        else await _reservations(service, caller, tenant, user),
    )


@post("/ui/quotas/set", status_code=303, guards=[requires("admin")])
async def save(request: TheRequest, service: CurrentState, caller: CurrentPrincipal) -> Response[Any]:
    """Set a quota as a whole, or show what is wrong beside what was typed."""
    form = form_of(request)
    tenant = form.get("tenant") if "tenant" in form else None
    draft, body = _read(form)
    name = quotas.named(draft.user)
    if body is None:
        problem = problem_of(InvalidRequest("the quota was not changed: something below cannot be so"))
        return await _one(request, service, caller, tenant_for(caller, tenant), name, draft=draft, problem=problem)
    await quotas.put_quota.fn(user=name, data=body, service=service, caller=caller, tenant=tenant)
    return redirect_with_message(
        request, service, PLACE, said=f"The quota of {_called(name)} was set.", user=name, tenant=tenant
    )


@post("/ui/quotas/remove", status_code=303, guards=[requires("admin")])
async def remove(request: TheRequest, service: CurrentState, caller: CurrentPrincipal) -> Response[Any]:
    """Take a user's own quota away."""
    form = form_of(request)
    user, tenant = form.get("user"), form.get("tenant") if "tenant" in form else None
    await quotas.delete_quota.fn(user=user, service=service, caller=caller, tenant=tenant)
    return redirect_with_message(
        request, service, PLACE, said=f"The quota of {_called(user)} was taken away.", tenant=tenant
    )


@post("/ui/quotas/release", status_code=303, guards=[requires("admin")])
async def release(request: TheRequest, service: CurrentState, caller: CurrentPrincipal) -> Response[Any]:
    """Free a slot that has no job yet."""
    form = form_of(request)
    tenant = form.get("tenant") if "tenant" in form else None
    reservation = form.get("reservation")
    said = f"The reservation {reservation} was released."
    try:
        await quotas.release_reservation.fn(reservation=reservation, service=service, caller=caller, tenant=tenant)
    except SemelError as error:
        if problem_of(error).status != 404:
            raise
        said = "That slot is not held any more: it was used, released, or has expired."
    return redirect_with_message(request, service, PLACE, said=said, user=form.get("back") or None, tenant=tenant)


async def _standing(service: ServiceState, caller: Principal, tenant: str, user: str) -> Standing:
    found: Standing = await quotas.show_usage.fn(user=user, service=service, caller=caller, tenant=tenant)
    return found


async def _reservations(service: ServiceState, caller: Principal, tenant: str, user: str | None) -> ReservationPage:
    held: ReservationPage = await quotas.list_reservations.fn(
        service=service, caller=caller, tenant=tenant, user=user, limit=MOST, after=None
    )
    return held


def _said_tenant(caller: Principal, tenant: str) -> str | None:
    """The tenant as addresses name it: not at all where it is the caller's own."""
    return None if tenant == caller.tenant else tenant


def _called(user: str) -> str:
    return "everybody else" if user == EVERYBODY else user


def _drafted(user: str, quota: QuotaBody | None) -> Draft:
    body = quota or QuotaBody()
    texts = {name: _written(getattr(body, name)) for name in NUMBERS}
    return Draft(user=user, texts={**texts, "action": body.action, "warn_at": _written(round(body.warn_at * 100, 6))})


def _written(value: float | None) -> str:
    if value is None:
        return ""
    return str(int(value)) if float(value).is_integer() else repr(value)


def _read(form: Form) -> tuple[Draft, QuotaBody | None]:
    """What was typed, and the quota that it makes, if it does. Each field is judged by itself."""
    names = (*NUMBERS, "action", "warn_at")
    draft = Draft(user=form.get("user").strip(), texts={name: form.get(name).strip() for name in names})
    values: dict[str, Any] = {}
    for name, text in draft.texts.items():
        if not text:
            continue
        try:
            values[name] = _value(name, text)
        except typed.FieldError as fault:
            draft.faults[name] = str(fault)
    return draft, None if draft.faults else QuotaBody(**values)


def _value(name: str, text: str) -> Any:
    value = text if name == "action" else typed.parse_number(text)
    if name == "warn_at":
        value = float(value) / 100
    if reason := typed.validation_error(QuotaBody, {name: value}):
        raise typed.FieldError(_RANGES.get(name, reason))
    return value


_RANGES = {
    "warn_at": "This is a number above 0 and up to 100.",
    **{name: f"This is a whole number from 0 to {2**31 - 1:,}." for name, _, _ in quota_bars.COUNTS},
    **{name: f"This is a number from 0 to {2**31 - 1:,}." for name, _, _ in quota_bars.COSTS},
}

HANDLERS = (show, save, remove, release)
