"""``/admin/subscriptions`` and ``/admin/deliveries``: the receivers of events, and their deliveries."""

from __future__ import annotations

import logging
from datetime import datetime
from typing import Annotated, Literal, TypeAlias

from litestar import Response, delete, get, post
from litestar.params import FromPath, JSONBody, PathParameter, QueryParameter
from msgspec import Meta, Struct, field

from semel import typed_json
from semel.errors import InvalidRequest
from semel.runs.types import checked_id
from semel.service.api.params import After, Limit, Tenant, absent, tenant_for
from semel.service.api.responses import refusals
from semel.service.auth.middleware import requires
from semel.service.state import CurrentPrincipal, CurrentState
from semel.service.webhooks import deliveries, subscriptions
from semel.service.webhooks.deliveries import Delivery, Event, State
from semel.service.webhooks.dispatcher import check_target, ping
from semel.service.webhooks.subscriptions import LONGEST_URL, STREAM_ID, EventName, Kind, Subscription
from semel.types import moment

_TAG = ["events"]
_UNSTORED = {"Cache-Control": "no-store"}
_log = logging.getLogger("semel.service")

Version: TypeAlias = Annotated[int, PathParameter(ge=1, le=2**31 - 1, description="The run's version of the event.")]
Wanted: TypeAlias = Literal["*"] | EventName


class SubscriptionRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A new webhook."""

    url: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=LONGEST_URL,
            description="Where events are posted to: http or https, not a private address unless the server allows it.",
            examples=["https://example.com/hooks/semel"],
        ),
    ]
    events: Annotated[
        list[Wanted],
        Meta(
            min_length=1, max_length=10, description="The names of its events; * is all.", examples=[["RunCompleted"]]
        ),
    ] = field(default_factory=lambda: ["*"])
    tenant: Annotated[
        Annotated[str, Meta(max_length=200)] | None,
        Meta(description="By default the caller's; admins of the main tenant may name another."),
    ] = None


class SubscriptionView(Struct, frozen=True, kw_only=True):
    """A subscription, without its secret."""

    id: str
    tenant: str
    kind: Kind
    target: Annotated[str, Meta(description="The URL of a webhook, or the name of the stream.")]
    events: list[str]
    created_at: datetime
    disabled_at: Annotated[
        datetime | None, Meta(description="When it was disabled, because the receiver responded 410.")
    ]


class NewSubscription(Struct, frozen=True, kw_only=True):
    """A new subscription."""

    subscription: SubscriptionView
    secret: Annotated[str, Meta(description="The key of the signatures. It is shown only once.")]


class Pinged(Struct, frozen=True, kw_only=True):
    """The result of a test event."""

    id: str
    delivered: bool
    status: int | None
    error: str | None


class DeliveryView(Struct, frozen=True, kw_only=True):
    """The delivery of an event to a subscription."""

    subscription_id: str
    event: Event
    state: State
    attempts: int
    due_at: Annotated[datetime, Meta(description="The time of the next attempt; if it is finished, when that was.")]
    last_status: int | None
    last_error: str | None


class DeliveryPage(Struct, frozen=True, kw_only=True):
    """A page of deliveries, latest first; `next` is the start of the next page."""

    deliveries: list[DeliveryView]
    next: str | None


@get(
    "/admin/subscriptions",
    tags=_TAG,
    summary="List subscriptions",
    guards=[requires("admin")],
    responses=refusals(400),
)
async def list_subscriptions(
    service: CurrentState, caller: CurrentPrincipal, tenant: Tenant = None
) -> list[SubscriptionView]:
    """The subscriptions of the tenant, oldest first."""
    found = await service.store.read(subscriptions.list_subscriptions, tenant_for(caller, tenant))
    return [_view(each) for each in found]


@post(
    "/admin/subscriptions",
    tags=_TAG,
    summary="Subscribe a webhook",
    guards=[requires("admin")],
    responses=refusals(400, 409, 422, body=True),
)
async def create_subscription(
    data: JSONBody[SubscriptionRequest], service: CurrentState, caller: CurrentPrincipal
) -> Response[NewSubscription]:
    """Post events to a URL from now on, signed with the secret in this response."""
    tenant = tenant_for(caller, data.tenant)
    await check_target(data.url, service.settings)
    made = await service.store.write(
        subscriptions.create, tenant, data.url, data.events, service.store.acting(caller.actor)
    )
    _log.info("subscription %s was created by %r", made.id, caller.user)
    assert made.secret is not None
    return Response(NewSubscription(subscription=_view(made), secret=made.secret), status_code=201, headers=_UNSTORED)


@get(
    "/admin/subscriptions/{subscription_id:str}",
    tags=_TAG,
    summary="A subscription",
    guards=[requires("admin")],
    responses=refusals(400, 404),
)
async def show_subscription(
    subscription_id: FromPath[str], service: CurrentState, caller: CurrentPrincipal, tenant: Tenant = None
) -> SubscriptionView:
    """The subscription, without its secret."""
    return _view(await service.store.read(subscriptions.find, _known(subscription_id), tenant_for(caller, tenant)))


@delete(
    "/admin/subscriptions/{subscription_id:str}",
    tags=_TAG,
    summary="Delete a subscription",
    guards=[requires("admin")],
    responses=refusals(400, 404, 409),
)
async def delete_subscription(
    subscription_id: FromPath[str], service: CurrentState, caller: CurrentPrincipal, tenant: Tenant = None
) -> None:
    """Delete the subscription, and its pending deliveries."""
    context = service.store.acting(caller.actor)
    await service.store.write(subscriptions.remove, _known(subscription_id), tenant_for(caller, tenant), context)
    await service.store.write(
        deliveries.tidy, service.store.statement_context
    )  # up to a limit; the dispatcher deletes the rest
    _log.info("subscription %s was deleted by %r", subscription_id, caller.user)


@post(
    "/admin/subscriptions/{subscription_id:str}/test",
    tags=_TAG,
    summary="Test a subscription",
    guards=[requires("admin")],
    status_code=200,
    responses=refusals(400, 404),
)
async def try_subscription(
    subscription_id: FromPath[str], service: CurrentState, caller: CurrentPrincipal, tenant: Tenant = None
) -> Pinged:
    """Send an event named Ping once, and return the receiver's response."""
    found = await service.store.read(subscriptions.find, _known(subscription_id), tenant_for(caller, tenant))
    event_id, answered = await ping(service, found)
    return Pinged(id=event_id, delivered=answered.good, status=answered.status, error=answered.error)


@get(
    "/admin/deliveries",
    tags=_TAG,
    summary="List deliveries",
    guards=[requires("admin")],
    responses=refusals(400),
)
async def list_deliveries(
    service: CurrentState,
    caller: CurrentPrincipal,
    *,
    in_state: Annotated[
        State | None, QueryParameter(name="state", description="Only deliveries in this state.")
    ] = None,
    subscription: Annotated[
        str | None, QueryParameter(max_length=200, description="Only deliveries to this subscription.")
    ] = None,
    tenant: Tenant = None,
    limit: Limit = 100,
    after: After = None,
) -> DeliveryPage:
    """Deliveries that are waiting, delivered or dead. Delivered ones are kept for three days, dead ones for thirty."""
    of_one = None if subscription is None else _id_of(subscription)
    if of_one is None and subscription is not None:
        return DeliveryPage(deliveries=[], next=None)
    page = await service.store.read(
        deliveries.list_deliveries,
        tenant_for(caller, tenant),
        state=in_state,
        subscription_id=of_one,
        limit=limit,
        after=_cursor(after),
    )
    last = None if page.next is None else ".".join(map(str, page.next))
    return DeliveryPage(deliveries=[_delivery_view(each) for each in page.items], next=last)


@post(
    "/admin/deliveries/{subscription_id:str}/{run_id:str}/{version:int}/resend",
    tags=_TAG,
    summary="Send an event again",
    guards=[requires("admin")],
    status_code=202,
    responses=refusals(400, 404, 409),
)
async def resend_delivery(
    subscription_id: FromPath[str],
    run_id: FromPath[str],
    version: Version,
    *,
    service: CurrentState,
    caller: CurrentPrincipal,
    tenant: Tenant = None,
) -> DeliveryView:
    """Send the event once more, soon, with the same id, whatever the state of its delivery."""
    run = checked_id(run_id)
    if run is None:
        raise absent("delivery of that run")
    place = (_known(subscription_id), run, version)
    found = await service.store.write(
        deliveries.resend, tenant_for(caller, tenant), place, service.store.acting(caller.actor)
    )
    return _delivery_view(found)


def _known(subscription_id: str) -> str:
    """The id; 404 if it cannot be one."""
    known = _id_of(subscription_id)
    if known is None:
        raise absent("subscription of that id")
    return known


def _id_of(subscription_id: str) -> str | None:
    """The id, if it can be one."""
    return subscription_id if subscription_id == STREAM_ID else checked_id(subscription_id)


def _cursor(after: str | None) -> tuple[int, str, int, str] | None:
    if after is None:
        return None
    match after.split("."):
        case [due, run_id, version, subscription_id] if _is_number(due, 19) and _is_number(version, 10):
            run, of_one = checked_id(run_id), _id_of(subscription_id)
            if run is not None and of_one is not None:
                return int(due), run, int(version), of_one
    raise InvalidRequest("after must be the `next` of the previous page")


def _is_number(text: str, digits: int) -> bool:
    return text.isascii() and text.isdigit() and len(text) < digits


def _view(each: Subscription) -> SubscriptionView:
    return SubscriptionView(
        id=each.id,
        tenant=each.tenant,
        kind=each.kind,
        target=each.target,
        events=each.names,
        created_at=moment(each.created_us),
        disabled_at=None if each.disabled_us is None else moment(each.disabled_us),
    )


def _delivery_view(each: Delivery) -> DeliveryView:
    return DeliveryView(
        subscription_id=each.subscription_id,
        event=typed_json.decode(each.body, Event),
        state=each.state,
        attempts=each.attempts,
        due_at=moment(each.due_us),
        last_status=each.last_status,
        last_error=each.last_error,
    )


HANDLERS = (
    list_subscriptions,
    create_subscription,
    show_subscription,
    delete_subscription,
    try_subscription,
    list_deliveries,
    resend_delivery,
)
