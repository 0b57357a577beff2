"""``/ui/audit``: what people did, with filters."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, get_args

from litestar import Response, get
from litestar.params import QueryParameter
from msgspec import Struct

from semel.api_types import ActionPage
from semel.dashboard.templating import page
from semel.errors import InvalidRequest
from semel.runs.store.audit_log import ACTIONS
from semel.service.api.audit_log import find_actions
from semel.service.api.params import AnyRequest, manages_all_tenants
from semel.service.api.problems import problem_of
from semel.service.auth.middleware import requires
from semel.service.state import CurrentPrincipal, CurrentState
from semel.types import Entrance, time_in

PATH = "/ui/audit"
PAGE = 20
"""Rows of a page."""
KINDS = tuple(dict.fromkeys(each.partition(".")[0] for each in ACTIONS))

Text = Annotated[str, QueryParameter(max_length=1000)]


class AuditQuery(Struct, frozen=True, kw_only=True):
    """The filters, as they are in the URL. An empty text does not filter."""

    user: str = ""
    action: str = ""
    target: str = ""
    entrance: str = ""
    since: str = ""
    until: str = ""
    tenant: str = ""

    @property
    def query(self) -> dict[str, Any]:
        """The filters as the query of an address."""
        return {name: value for name in self.__struct_fields__ if (value := getattr(self, name))}


@get(PATH, guards=[requires("admin")])
async def show(
    *,
    request: AnyRequest,
    service: CurrentState,
    caller: CurrentPrincipal,
    user: Text = "",
    action: Text = "",
    target: Text = "",
    entrance: Text = "",
    since: Text = "",
    until: Text = "",
    tenant: Text = "",
    cursor: Annotated[str | None, QueryParameter(max_length=300)] = None,
) -> Response[Any]:
    """The log, newest first."""
    asked = AuditQuery(
        user=user, action=action, target=target, entrance=entrance, since=since, until=until, tenant=tenant
    )
    found, problem = ActionPage(actions=[], next=None), None
    try:
        found = await find_actions(service, caller, tenant or None, limit=PAGE, cursor=cursor, **_filters(asked))
    except InvalidRequest as error:
        problem = problem_of(error)
    return page(
        request,
        service,
        caller,
        "audit/page.html",
        problem=problem,
        title="Audit log",
        asked=asked,
        actions=found.actions,
        next=found.next,
        cursor=cursor,
        kinds=KINDS,
        known_actions=ACTIONS,
        entrances=get_args(Entrance),
        chooses_tenant=manages_all_tenants(caller),
    )


def _filters(asked: AuditQuery) -> dict[str, Any]:
    texts = {name: getattr(asked, name).strip() or None for name in ("user", "action", "target", "entrance")}
    return {**texts, "since": _time("since", asked.since), "until": _time("until", asked.until)}


def _time(name: str, text: str) -> datetime | None:
    """A time as the browser's field sends it; without a zone it is UTC, as all times on the pages are."""
    try:
        when = time_in(text) if text else None
        return when.replace(tzinfo=UTC) if when is not None and when.tzinfo is None else when
    except (ValueError, OverflowError):
        raise InvalidRequest(f"{name} must be a time such as 2026-01-31T12:00") from None


HANDLERS = (show,)
