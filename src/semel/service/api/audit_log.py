"""``/admin/audit``: what people did, from the audit log."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from litestar import get
from litestar.params import QueryParameter

from semel.api_types import ActionPage, RemoteAction
from semel.runs.store.audit_log import AuditEntry
from semel.service.api.params import Limit, Tenant, manages_all_tenants, tenant_for
from semel.service.api.responses import refusals
from semel.service.auth.middleware import Principal, requires
from semel.service.state import CurrentPrincipal, CurrentState, ServiceState
from semel.types import Entrance

_TAG = ["admin"]


@get("/admin/audit", tags=_TAG, summary="What people did", guards=[requires("admin")], responses=refusals(400))
async def list_actions(
    *,
    service: CurrentState,
    caller: CurrentPrincipal,
    tenant: Tenant = None,
    user: Annotated[str | None, QueryParameter(max_length=200, description="Done by this user.")] = None,
    action: Annotated[
        str | None,
        QueryParameter(max_length=200, description="This action, such as `token.created`, or a kind, such as `token`."),
    ] = None,
    target: Annotated[
        str | None, QueryParameter(max_length=1000, description="Done to what has this id or name.")
    ] = None,
    entrance: Annotated[Entrance | None, QueryParameter(description="By this entrance.")] = None,
    since: Annotated[datetime | None, QueryParameter(description="Done at this time or later.")] = None,
    until: Annotated[datetime | None, QueryParameter(description="Done before this time.")] = None,
    limit: Limit = 100,
    cursor: Annotated[
        str | None, QueryParameter(max_length=300, description="The `next` of the previous page.")
    ] = None,
) -> ActionPage:
    """Tokens, quotas, configs, keys, runs, pauses and subscriptions that people changed, newest first: who, from
    where, and what was before and after.

    An admin sees what was done to their tenant, whoever did it; admins of the main tenant who name none see everything.
    """
    return await find_actions(
        service,
        caller,
        tenant,
        user=user,
        action=action,
        target=target,
        entrance=entrance,
        since=since,
        until=until,
        limit=limit,
        cursor=cursor,
    )


async def find_actions(service: ServiceState, caller: Principal, tenant: str | None, **filters: object) -> ActionPage:
    """A page of the log, as far as the caller may see it; ``filters`` are those of ``RunEngine.audit_log``."""
    whose = None if tenant is None and manages_all_tenants(caller) else tenant_for(caller, tenant)
    page = await service.engine.audit_log(tenant=whose, **filters)  # type: ignore[arg-type]  # as the callers have them
    return ActionPage(actions=[_view(each) for each in page.entries], next=page.next)


def _view(entry: AuditEntry) -> RemoteAction:
    return RemoteAction(
        seq=entry.seq,
        at=entry.at,
        action=entry.action,
        target=entry.target,
        tenant=entry.tenant,
        user=entry.user,
        role=entry.role or None,
        user_tenant=entry.user_tenant,
        token=entry.token or None,
        address=entry.address,
        entrance=entry.entrance,
        before=entry.before,
        after=entry.after,
        previous=entry.previous,
        digest=entry.digest,
    )


HANDLERS = (list_actions,)
