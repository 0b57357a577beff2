"""``/admin/quotas`` and ``/usage``: limits and usage of users; ``/admin/reservations``: held slots."""

from __future__ import annotations

import logging
from datetime import datetime
from typing import Annotated

import msgspec
from litestar import delete, get, put
from litestar.params import FromPath, JSONBody, QueryParameter
from msgspec import Meta, Struct
from sqlalchemy import Connection, select

from semel._validation import checked_name
from semel.db.dialect import StatementContext
from semel.db.schema import quotas as kept
from semel.db.schema import reservations
from semel.runs.store import quotas
from semel.runs.types import MICRO, Action, Quota, Usage
from semel.service.api.params import After, Limit, Tenant, absent, tenant_for
from semel.service.api.problems import ApiError
from semel.service.api.responses import refusals
from semel.service.auth.middleware import requires
from semel.service.state import CurrentPrincipal, CurrentState
from semel.types import moment

_TAG = ["admin"]
_log = logging.getLogger("semel.service")

_Count = Annotated[int, Meta(ge=0, lt=2**31)]
_Money = Annotated[float, Meta(ge=0, le=2**31 - 1)]


class QuotaBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of a user; null is no limit. A user's own quota replaces the default one as a whole."""

    max_concurrent: Annotated[_Count | None, Meta(examples=[5])] = None
    per_hour: _Count | None = None
    per_day: _Count | None = None
    cost_daily: _Money | None = None
    cost_weekly: _Money | None = None
    cost_monthly: Annotated[_Money | None, Meta(examples=[500.0])] = None
    cost_yearly: _Money | None = None
    action: Annotated[Action, Meta(description="`warn` accepts everything, with a warning.")] = "block"
    warn_at: Annotated[
        float, Meta(gt=0, le=1, description="The fraction of a limit from which responses carry a warning.")
    ] = 0.8


class QuotaView(Struct, frozen=True, kw_only=True):
    """The quota of a user, or the default one (of the user `*`)."""

    tenant: str
    user: str
    quota: QuotaBody


class QuotaPage(Struct, frozen=True, kw_only=True):
    """A page of quotas, by user; `next` is the start of the next page."""

    quotas: list[QuotaView]
    next: str | None


class UsageView(Struct, frozen=True, kw_only=True):
    """The usage of a user. `concurrent` counts active runs, and valid reservations that have no run yet."""

    concurrent: int
    reserved: int
    last_hour: int
    last_day: int
    spent: Annotated[dict[str, float], Meta(description="By period, since its start in UTC.")]


class Standing(Struct, frozen=True, kw_only=True):
    """A user's usage, and the quota that applies to them."""

    tenant: str
    user: str
    quota: QuotaBody | None
    default: Annotated[
        bool, Meta(description="Whether the quota is the default one, because they have none of their own.")
    ]
    usage: UsageView


class ReservationView(Struct, frozen=True, kw_only=True):
    """A held slot."""

    id: str
    tenant: str
    user: str
    created_at: datetime
    expires_at: datetime
    expires_in: Annotated[float, Meta(description="Seconds until it expires.")]
    consumed: Annotated[bool, Meta(description="Whether its job was created, which then holds the slot.")]
    job_id: str | None


class ReservationPage(Struct, frozen=True, kw_only=True):
    """A page of reservations; `next` is the start of the next page."""

    reservations: list[ReservationView]
    next: str | None


@get("/admin/quotas", tags=_TAG, summary="List quotas", guards=[requires("operator")], responses=refusals(400))
async def list_quotas(
    service: CurrentState, caller: CurrentPrincipal, tenant: Tenant = None, limit: Limit = 100, after: After = None
) -> QuotaPage:
    """The quotas of the tenant, by user."""
    whose = tenant_for(caller, tenant)
    every = await service.store.read(quotas.list_quotas, whose)
    found = sorted(user for user in every if after is None or user > after)
    views = [QuotaView(tenant=whose, user=user, quota=_body(every[user])) for user in found[:limit]]
    return QuotaPage(quotas=views, next=found[limit - 1] if len(found) > limit else None)


@get(
    "/admin/quotas/{user:path}",
    tags=_TAG,
    summary="A user's quota and usage",
    guards=[requires("operator")],
    responses=refusals(400, 404),
)
async def show_quota(
    user: FromPath[str], service: CurrentState, caller: CurrentPrincipal, tenant: Tenant = None
) -> Standing:
    """The quota that applies to a user, their own or the default one, and their usage."""
    return await _standing(service, tenant_for(caller, tenant), named(user))


@put(
    "/admin/quotas/{user:path}",
    tags=_TAG,
    summary="Set a user's quota",
    guards=[requires("admin")],
    responses=refusals(400, 404, body=True),
)
async def put_quota(
    user: FromPath[str],
    data: JSONBody[QuotaBody],
    service: CurrentState,
    caller: CurrentPrincipal,
    tenant: Tenant = None,
) -> QuotaView:
    """Set a user's quota as a whole; the user `*` stands for everybody without one. Active runs continue."""
    whose, name = tenant_for(caller, tenant), named(user)
    await service.store.write(
        quotas.set_quota, (whose, name), Quota(**msgspec.structs.asdict(data)), service.store.acting(caller.actor)
    )
    _log.info("the quota of %r, tenant %r, was set by %r", name, whose, caller.user)
    return QuotaView(tenant=whose, user=name, quota=data)


@delete(
    "/admin/quotas/{user:path}",
    tags=_TAG,
    summary="Remove a user's quota",
    guards=[requires("admin")],
    responses=refusals(400, 404),
)
async def delete_quota(
    user: FromPath[str], service: CurrentState, caller: CurrentPrincipal, tenant: Tenant = None
) -> None:
    """Remove a user's own quota: the default one applies from now on."""
    whose, name = tenant_for(caller, tenant), named(user)
    if not await service.store.write(_remove_quota, (whose, name), service.store.acting(caller.actor)):
        raise absent("quota of that user")
    _log.info("the quota of %r, tenant %r, was removed by %r", name, whose, caller.user)


@get("/usage", tags=_TAG, summary="Your own usage", responses=refusals(400))
async def own_usage(service: CurrentState, caller: CurrentPrincipal) -> Standing:
    """The caller's usage, and the quota that applies to them."""
    return await _standing(service, caller.tenant, caller.user)


@get("/usage/{user:path}", tags=_TAG, summary="A user's usage", responses=refusals(400, 404))
async def show_usage(
    user: FromPath[str], service: CurrentState, caller: CurrentPrincipal, tenant: Tenant = None
) -> Standing:
    """A user's usage: operators see everybody's, others their own."""
    name = named(user)
    if caller.visible_user not in (None, name):
        raise ApiError(403, "FORBIDDEN", "only operators may see the usage of others")
    return await _standing(service, tenant_for(caller, tenant), name)


@get(
    "/admin/reservations",
    tags=_TAG,
    summary="List reservations",
    guards=[requires("operator")],
    responses=refusals(400),
)
async def list_reservations(
    *,
    service: CurrentState,
    caller: CurrentPrincipal,
    tenant: Tenant = None,
    user: Annotated[str | None, QueryParameter(max_length=200, description="Only this user's reservations.")] = None,
    limit: Limit = 100,
    after: After = None,
) -> ReservationPage:
    """Held slots that have not expired, with the time left of each."""
    whose = (tenant_for(caller, tenant), None if user is None else checked_name("user", user))
    last = "" if after is None else checked_name("after", after, most=300)
    found = await service.store.read(_live_reservations, whose, last, limit + 1, service.store.statement_context)
    return ReservationPage(reservations=found[:limit], next=found[limit - 1].id if len(found) > limit else None)


@delete(
    "/admin/reservations/{reservation:str}",
    tags=_TAG,
    summary="Release a reservation",
    guards=[requires("admin")],
    responses=refusals(400, 404),
)
async def release_reservation(
    reservation: FromPath[str], service: CurrentState, caller: CurrentPrincipal, tenant: Tenant = None
) -> None:
    """Free a slot whose job was not created yet. Otherwise the slot is freed when the job ends."""
    whose = tenant_for(caller, tenant)
    known, context = checked_name("reservation", reservation), service.store.acting(caller.actor)
    if not await service.store.write(quotas.release_by_hand, known, whose, context):
        raise absent("reservation of that id that can be released")
    _log.info("reservation %r, tenant %r, was released by %r", reservation, whose, caller.user)


def named(user: str) -> str:
    """The user in a path, which may have slashes."""
    return checked_name("user", user.removeprefix("/"), empty=False)


async def _standing(service: CurrentState, tenant: str, user: str) -> Standing:
    used, quota, own = await service.store.read(_look, (tenant, user), service.store.statement_context)
    return Standing(
        tenant=tenant,
        user=user,
        quota=None if quota is None else _body(quota),
        default=quota is not None and not own,
        usage=UsageView(**msgspec.structs.asdict(used)),
    )


def _look(conn: Connection, person: quotas.Person, terms: StatementContext) -> tuple[Usage, Quota | None, bool]:
    used = quotas.usage(conn, person, quotas.read_clock(conn, terms))
    there = quotas.quotas_of(conn, [person]).get(person)
    return used, there, there is not None and _has_own(conn, person)


def _has_own(conn: Connection, person: quotas.Person) -> bool:
    own = select(kept.c.user_id).where(kept.c.tenant == person[0], kept.c.user_id == person[1])
    return conn.execute(own).first() is not None


def _remove_quota(conn: Connection, person: quotas.Person, terms: StatementContext) -> bool:
    there = _has_own(conn, person)
    quotas.set_quota(conn, person, None, terms)
    return there


def _live_reservations(
    conn: Connection, whose: tuple[str, str | None], after: str, limit: int, terms: StatementContext
) -> list[ReservationView]:
    now = quotas.read_clock(conn, terms)
    tenant, user = whose
    live = [reservations.c.tenant == tenant, reservations.c.expires_us >= now, reservations.c.id > after]
    if user is not None:
        live.append(reservations.c.user_id == user)
    rows = conn.execute(select(reservations).where(*live).order_by(reservations.c.id).limit(limit))
    return [
        ReservationView(
            id=row.id,
            tenant=row.tenant,
            user=row.user_id,
            created_at=moment(row.created_us),
            expires_at=moment(row.expires_us),
            expires_in=(row.expires_us - now) / MICRO,
            consumed=row.consumed,
            job_id=row.job_id,
        )
        for row in rows
    ]


def _body(quota: Quota) -> QuotaBody:
    return QuotaBody(**msgspec.structs.asdict(quota))


HANDLERS = (
    list_quotas,
    show_quota,
    put_quota,
    delete_quota,
    own_usage,
    show_usage,
    list_reservations,
    release_reservation,
)
