"""``/ui/tokens``: who has a token, with which role, and when it was last used; admins revoke tokens here."""

from __future__ import annotations

from typing import Annotated, Any

from litestar import Response, get, post
from litestar.params import QueryParameter

from semel.dashboard.forms import form_of
from semel.dashboard.templating import page, redirect_with_message
from semel.service.api import tokens as api
from semel.service.api.params import AnyRequest, manages_all_tenants
from semel.service.api.problems import ApiError
from semel.service.api.tokens import TokenPage
from semel.service.auth.middleware import requires
from semel.service.state import CurrentPrincipal, CurrentState

PATH = "/ui/tokens"
PAGE = 25
"""Rows of a page."""


@get(PATH, guards=[requires("operator")])
async def show(
    request: AnyRequest,
    service: CurrentState,
    caller: CurrentPrincipal,
    tenant: Annotated[str | None, QueryParameter(max_length=200)] = None,
    after: Annotated[str | None, QueryParameter(max_length=300)] = None,
) -> Response[Any]:
    """The tokens of the tenant, oldest first; for admins of the main tenant those of all tenants."""
    found: TokenPage = await api.list_tokens.fn(
        service=service, caller=caller, tenant=tenant or None, limit=PAGE, after=after
    )
    return page(
        request,
        service,
        caller,
        "tokens/page.html",
        title="Tokens",
        tokens=found.tokens,
        next=found.next,
        after=after,
        tenant=tenant,
        chooses_tenant=manages_all_tenants(caller),
        may_revoke=caller.may("admin"),
    )


@post("/ui/tokens/revoke", status_code=303, guards=[requires("admin")])
async def revoke(request: AnyRequest, service: CurrentState, caller: CurrentPrincipal) -> Response[Any]:
    """Revoke a token: whoever has it is refused from now on."""
    form = form_of(request)
    token = form.get("token")
    message = f"Revoked the token {token}."
    try:
        await api.revoke_token.fn(token_id=token, service=service, caller=caller)
    except ApiError as error:
        if error.status not in (404, 409):
            raise
        message = f"The token {token} was not revoked: {error}."
    return redirect_with_message(request, service, PATH, message, tenant=form.get("tenant") or None)


HANDLERS = (show, revoke)
