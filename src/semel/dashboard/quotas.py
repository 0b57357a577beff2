"""``/ui/quotas``: what each user uses of their limits; admins set limits and release reservations here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from litestar import Response, get, post
from litestar.params import QueryParameter
from msgspec import Struct
from sqlalchemy import Connection

from semel.api_types import Problem
from semel.dashboard.forms import FieldError, Form, form_of, parse_number, validation_error
from semel.dashboard.templating import number, page, redirect_with_message
from semel.db.dialect import Statement, StatementContext
from semel.errors import InvalidRequest, SemelError
from semel.runs.store import quotas as store
from semel.runs.types import EVERYBODY, MICRO, Quota, Usage, id_at
from semel.service.api import quotas as api
from semel.service.api.params import AnyRequest, manages_all_tenants, tenant_for
from semel.service.api.problems import problem_of
from semel.service.api.quotas import QuotaBody, ReservationPage, Standing, UsageView
from semel.service.auth.middleware import Principal, requires
from semel.service.state import CurrentPrincipal, CurrentState, ServiceState

PATH = "/ui/quotas"
MAX_USERS = 50
MAX_RESERVATIONS = 100
"""Users, and reservations, on one page."""
RECENT_RUNS = 10_000
"""The newest runs of the last day, whose users are listed."""
DAY = 86400
CLOCK_SKEW = 600
"""Seconds by which the clock of the host that made a run's id may be wrong."""
COUNTS = (
    ("max_concurrent", "Concurrent", "concurrent"),
    ("per_hour", "Last hour", "last_hour"),
    ("per_day", "Last 24 hours", "last_day"),
)
COSTS = (
    ("cost_daily", "Spent today", "daily"),
    ("cost_weekly", "Spent this week", "weekly"),
    ("cost_monthly", "Spent this month", "monthly"),
    ("cost_yearly", "Spent this year", "yearly"),
)
LIMITS = tuple(name for name, _, _ in (*COUNTS, *COSTS))
_RANGES = {
    "warn_at": "Must be a number above 0, at most 100.",
    **{name: f"Must be a whole number from 0 to {2**31 - 1:,}." for name, _, _ in COUNTS},
    **{name: f"Must be a number from 0 to {2**31 - 1:,}." for name, _, _ in COSTS},
}

QuotaQuery = Annotated[str | None, QueryParameter(max_length=200)]


class QuotaBar(Struct, frozen=True, kw_only=True):
    """One limit, and how much of it is used."""

    label: str
    used: str
    limit: str | None
    part: float | None
    """The share of the limit that is used; None where there is no limit."""
    state: Literal["", "near", "full", "over"]

    @property
    def text(self) -> str:
        """For example 4 of 5."""
        return f"{self.used}, no limit" if self.limit is None else f"{self.used} of {self.limit}"


class UserUsage(Struct, frozen=True, kw_only=True):
    """A user, their quota, and what they use."""

    user: str
    quota: Quota | None
    own: bool
    """Whether the quota is the user's own, not the default one."""
    used: Usage


class QuotaForm(Struct, kw_only=True):
    """The form for a quota: what was typed, and the errors by field."""

    user: str = ""
    texts: dict[str, str] = {}
    errors: dict[str, str] = {}


def bars_of(quota: Quota | QuotaBody | None, used: Usage | UsageView) -> list[QuotaBar]:
    """A bar for each limit: active runs, runs of the last hour and day, and the cost of each period."""
    counts = [_bar(quota, name, label, getattr(used, field), number) for name, label, field in COUNTS]
    return counts + [_bar(quota, name, label, used.spent[period], _money) for name, label, period in COSTS]


def _bar(
    quota: Quota | QuotaBody | None, name: str, label: str, used: float, written: Callable[[float], str]
) -> QuotaBar:
    limit: float | None = None if quota is None else getattr(quota, name)
    if quota is None or limit is None:
        return QuotaBar(label=label, used=written(used), limit=None, part=None, state="")
    part = used / limit if limit else 1.0 + used
    return QuotaBar(
        label=label, used=written(used), limit=written(limit), part=part, state=_bar_state(part, quota.warn_at)
    )


def _money(amount: float) -> str:
    return f"${amount:,.2f}"


def _bar_state(part: float, warn_at: float) -> Literal["", "near", "full", "over"]:
    if part > 1:
        return "over"
    if part == 1:
        return "full"
    return "near" if part >= warn_at else ""


def used_part(bar: QuotaBar) -> float:
    """The share of the limit that is used, for sorting; 0 where there is no limit."""
    return bar.part or 0.0


_ACTIVE = Statement(
    lambda _: (
        """
SELECT user_id, count(*) FROM semel_active
WHERE tenant = :tenant AND user_id <> ''
GROUP BY user_id ORDER BY 2 DESC, 1 LIMIT :most"""
    )
)
_RECENT = Statement(
    lambda w: (
        f"""
SELECT user_id, count(*) FROM (
  SELECT tenant, user_id FROM semel_runs WHERE id >= {w.identity(":since")} ORDER BY id DESC LIMIT {RECENT_RUNS}
) AS newest
WHERE tenant = :tenant AND user_id <> ''
GROUP BY user_id ORDER BY 2 DESC, 1 LIMIT :most"""
    )
)
_RESERVING = Statement(
    lambda _: (
        """
SELECT user_id, count(*) FROM semel_reservations
WHERE tenant = :tenant AND expires_us >= :at AND NOT consumed
GROUP BY user_id ORDER BY 2 DESC, 1 LIMIT :most"""
    )
)


def list_usage(conn: Connection, tenant: str, most: int, terms: StatementContext) -> list[UserUsage]:
    """Users with active runs, reservations, runs of the last day, or a quota of their own; the busiest first."""
    now = store.read_clock(conn, terms)
    own = [user for user in store.list_quotas(conn, tenant) if user != EVERYBODY]
    people = [(tenant, user) for user in _users(conn, tenant, most, now, own)]
    quotas = store.quotas_of(conn, people)
    return [
        UserUsage(
            user=person[1],
            quota=quotas.get(person),
            own=person[1] in own,
            used=store.usage(conn, person, now),
        )
        for person in people
    ]


def _users(conn: Connection, tenant: str, most: int, now: int, own: Sequence[str]) -> list[str]:
    bounds: dict[str, Any] = {"tenant": tenant, "most": most}
    rows = [
        *_ACTIVE.rows(conn, **bounds),
        *_RESERVING.rows(conn, at=now, **bounds),
        *_RECENT.rows(conn, since=id_at(now - (DAY + CLOCK_SKEW) * MICRO), **bounds),
    ]
    return list(dict.fromkeys([*(row[0] for row in rows), *own]))[:most]


@get(PATH)
async def show(
    request: AnyRequest,
    service: CurrentState,
    caller: CurrentPrincipal,
    user: QuotaQuery = None,
    tenant: QuotaQuery = None,
) -> Response[Any]:
    """One user's usage, or everybody's; submitters see their own."""
    checked = tenant_for(caller, tenant)
    if caller.visible_user is not None and not user:
        user = caller.visible_user
    if user:
        return await _user_page(request, service, caller, checked, user)
    return await _list_page(request, service, caller, checked)


async def _list_page(request: AnyRequest, service: ServiceState, caller: Principal, tenant: str) -> Response[Any]:
    async with service.slow_query_lock:
        usages = await service.store.read(list_usage, tenant, MAX_USERS, service.store.statement_context)
    rows = [(each, bars_of(each.quota, each.used)) for each in usages]
    rows.sort(key=lambda row: _busiest_first(*row))
    default = await _standing(service, caller, tenant, EVERYBODY)
    return page(
        request,
        service,
        caller,
        "quotas/list.html",
        title="Quotas and cost",
        tenant=_other_tenant(caller, tenant),
        chooses_tenant=manages_all_tenants(caller),
        rows=rows,
        max_rows=MAX_USERS,
        default=[bar for bar in bars_of(default.quota, default.usage) if bar.limit is not None],
        has_default=default.quota is not None,
        action="" if default.quota is None else default.quota.action,
        held=await _reservations(service, caller, tenant, None),
    )


def _busiest_first(usage: UserUsage, bars: list[QuotaBar]) -> tuple[float, int, int, str]:
    fullest = max(used_part(bar) for bar in bars)
    return (-fullest, -usage.used.concurrent, -usage.used.last_day, usage.user)


async def _user_page(
    request: AnyRequest,
    service: ServiceState,
    caller: Principal,
    tenant: str,
    user: str,
    *,
    form: QuotaForm | None = None,
    problem: Problem | None = None,
) -> Response[Any]:
    standing = await _standing(service, caller, tenant, user)
    own = standing.quota is not None and not standing.default
    default = user == EVERYBODY
    return page(
        request,
        service,
        caller,
        "quotas/user.html",
        problem=problem,
        title="Default quota" if default else f"Quota of {user}",
        tenant=_other_tenant(caller, tenant),
        standing=standing,
        own=own,
        bars=bars_of(standing.quota, standing.usage),
        is_default=default,
        form=form or _filled_form(user, standing.quota if own else None),
        held=None if default else await _reservations(service, caller, tenant, user),
    )


@post("/ui/quotas/set", status_code=303, guards=[requires("admin")])
async def save(request: AnyRequest, service: CurrentState, caller: CurrentPrincipal) -> Response[Any]:
    """Set a user's quota, replacing the one before; or show the form again with its errors."""
    sent = form_of(request)
    tenant = sent.optional("tenant")
    form, body = _read(sent)
    user = api.named(form.user)
    if body is None:
        problem = problem_of(InvalidRequest("The quota was not changed. Fix the fields marked below."))
        return await _user_page(request, service, caller, tenant_for(caller, tenant), user, form=form, problem=problem)
    await api.put_quota.fn(user=user, data=body, service=service, caller=caller, tenant=tenant)
    return redirect_with_message(request, service, PATH, f"Saved {_quota_of(user)}.", user=user, tenant=tenant)


@post("/ui/quotas/remove", status_code=303, guards=[requires("admin")])
async def remove(request: AnyRequest, service: CurrentState, caller: CurrentPrincipal) -> Response[Any]:
    """Remove a user's own quota."""
    form = form_of(request)
    user, tenant = form.get("user"), form.optional("tenant")
    await api.delete_quota.fn(user=user, service=service, caller=caller, tenant=tenant)
    return redirect_with_message(request, service, PATH, f"Removed {_quota_of(user)}.", tenant=tenant)


@post("/ui/quotas/release", status_code=303, guards=[requires("admin")])
async def release(request: AnyRequest, service: CurrentState, caller: CurrentPrincipal) -> Response[Any]:
    """Release a reservation that has no job yet."""
    form = form_of(request)
    tenant = form.optional("tenant")
    reservation = form.get("reservation")
    message = f"Released the reservation {reservation}."
    try:
        await api.release_reservation.fn(reservation=reservation, service=service, caller=caller, tenant=tenant)
    except SemelError as error:
        if problem_of(error).status != 404:
            raise
        message = "That reservation is no longer held: it was used, released, or has expired."
    return redirect_with_message(request, service, PATH, message, user=form.get("back") or None, tenant=tenant)


async def _standing(service: ServiceState, caller: Principal, tenant: str, user: str) -> Standing:
    found: Standing = await api.show_usage.fn(user=user, service=service, caller=caller, tenant=tenant)
    return found


async def _reservations(service: ServiceState, caller: Principal, tenant: str, user: str | None) -> ReservationPage:
    held: ReservationPage = await api.list_reservations.fn(
        service=service, caller=caller, tenant=tenant, user=user, limit=MAX_RESERVATIONS, after=None
    )
    return held


def _other_tenant(caller: Principal, tenant: str) -> str | None:
    """The tenant for links and forms; None, which leaves it out, where it is the caller's own."""
    return None if tenant == caller.tenant else tenant


def _quota_of(user: str) -> str:
    return "the default quota" if user == EVERYBODY else f"the quota of {user}"


def _filled_form(user: str, quota: QuotaBody | None) -> QuotaForm:
    body = quota or QuotaBody()
    texts = {name: _number_text(getattr(body, name)) for name in LIMITS}
    warn_at = _number_text(round(body.warn_at * 100, 6))
    return QuotaForm(user=user, texts={**texts, "action": body.action, "warn_at": warn_at})


def _number_text(value: float | None) -> str:
    if value is None:
        return ""
    return str(int(value)) if float(value).is_integer() else repr(value)


def _read(sent: Form) -> tuple[QuotaForm, QuotaBody | None]:
    """The form, and the quota that it describes; None where a field has an error. An empty field is no limit."""
    texts = {name: sent.get(name).strip() for name in (*LIMITS, "action", "warn_at")}
    form = QuotaForm(user=sent.get("user").strip(), texts=texts)
    values: dict[str, Any] = {}
    for name, text in texts.items():
        if not text:
            continue
        try:
            values[name] = _value(name, text)
        except FieldError as error:
            form.errors[name] = str(error)
    return form, None if form.errors else QuotaBody(**values)


def _value(name: str, text: str) -> Any:
    value = text if name == "action" else parse_number(text)
    if name == "warn_at":
        value = float(value) / 100
    if reason := validation_error(QuotaBody, {name: value}):
        raise FieldError(_RANGES.get(name, reason))
    return value


HANDLERS = (show, save, remove, release)
