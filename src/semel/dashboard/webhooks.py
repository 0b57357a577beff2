"""``/ui/webhooks``: who receives events, and which deliveries wait or failed; admins send events again here.

Operators see of an address its host only: the rest of it may be secret, as its signing key always is.
"""

from __future__ import annotations

from typing import Annotated, Any

from litestar import Response, get, post
from litestar.params import QueryParameter

from semel.dashboard.forms import form_of
from semel.dashboard.templating import page, redirect_with_message
from semel.errors import InvalidRequest
from semel.runs.store.quotas import read_clock
from semel.service.api import webhooks as api
from semel.service.api.params import AnyRequest
from semel.service.api.problems import ApiError
from semel.service.api.webhooks import DeliveryPage
from semel.service.auth.middleware import requires
from semel.service.state import CurrentPrincipal, CurrentState
from semel.service.webhooks import deliveries, subscriptions

PATH = "/ui/webhooks"
PAGE = 25
"""Deliveries of a page."""
STATES = ("waiting", "dead", "delivered")

Text = Annotated[str, QueryParameter(max_length=300)]


@get(PATH, guards=[requires("operator")])
async def show(
    *,
    request: AnyRequest,
    service: CurrentState,
    caller: CurrentPrincipal,
    subscription: Text = "",
    in_state: Annotated[str, QueryParameter(name="state", max_length=20)] = "",
    after: Annotated[str | None, QueryParameter(max_length=300)] = None,
) -> Response[Any]:
    """The subscriptions of the tenant, and its deliveries: all, or those of one subscription or in one state."""
    if in_state not in ("", *STATES):
        raise InvalidRequest(f"state must be one of {', '.join(STATES)}")
    store = service.store
    known = await store.read(subscriptions.list_subscriptions, caller.tenant)
    now = await store.read(read_clock, store.statement_context)
    failing = await store.read(deliveries.list_failing, caller.tenant, now)
    found: DeliveryPage = await api.list_deliveries.fn(
        service=service,
        caller=caller,
        in_state=in_state or None,
        subscription=subscription or None,
        tenant=None,
        limit=PAGE,
        after=after,
    )
    return page(
        request,
        service,
        caller,
        "webhooks/page.html",
        title="Webhooks",
        subscriptions=known,
        targets={each.id: each.target if caller.may("admin") else each.host for each in known},
        failing={each.subscription.id: each for each in failing},
        deliveries=found.deliveries,
        next=found.next,
        after=after,
        asked={"subscription": subscription or None, "state": in_state or None},
        states=STATES,
        may_resend=caller.may("admin"),
    )


@post("/ui/webhooks/resend", status_code=303, guards=[requires("admin")])
async def resend(request: AnyRequest, service: CurrentState, caller: CurrentPrincipal) -> Response[Any]:
    """Send an event once more, with the same id."""
    form = form_of(request)
    subscription, run, version = form.get("subscription"), form.get("run"), form.get("version")
    if not (version.isascii() and version.isdigit() and len(version) < 10):
        raise InvalidRequest("version must be a number")
    message = f"The event {run}/{version} is sent again soon."
    try:
        await api.resend_delivery.fn(
            subscription_id=subscription, run_id=run, version=int(version), service=service, caller=caller, tenant=None
        )
    except ApiError as error:
        if error.status not in (404, 409):
            raise
        message = f"The event {run}/{version} was not sent again: {error}."
    back = {name: form.get(f"back_{name}") or None for name in ("subscription", "state")}
    return redirect_with_message(request, service, PATH, message, **back)


HANDLERS = (show, resend)
