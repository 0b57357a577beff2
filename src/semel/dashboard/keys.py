"""``/ui/keys``: look a key up, resolve one whose outcome is unknown, delete one."""

from __future__ import annotations

from typing import Annotated, Any

from litestar import Response, get, post
from litestar.params import QueryParameter
from msgspec import Struct

from semel.api_types import Problem
from semel.dashboard.forms import FieldError, Form, form_of, parse_json
from semel.dashboard.templating import page, redirect_with_message
from semel.errors import InvalidRequest, RunNotFound, SemelError
from semel.runs.types import Run
from semel.service.api import keys as api
from semel.service.api.keys import KeyList, KeyView, Resolution, RunKeyView
from semel.service.api.params import AnyRequest, manages_all_tenants, tenant_for
from semel.service.api.problems import ApiError, problem_of
from semel.service.auth.middleware import Principal, requires
from semel.service.state import CurrentPrincipal, CurrentState, ServiceState

PATH = "/ui/keys"
MAX_KEYS = 100
"""Keys in one table."""
MAX_LENGTH = 1000
"""Longer parameters are refused; one below this limit that is too long for a key gets its own error message."""

Text = Annotated[str, QueryParameter(max_length=MAX_LENGTH)]
OptionalText = Annotated[str | None, QueryParameter(max_length=MAX_LENGTH)]
ScopeText = Annotated[str, QueryParameter(name="scope", max_length=MAX_LENGTH)]


class KeyQuery(Struct, frozen=True, kw_only=True):
    """Identifies a key. Without a scope it is the key of a run; the tenant is None where it is the caller's own."""

    key: str = ""
    scope: str = ""
    user: str | None = None
    tenant: str | None = None
    kind: str = ""


class RunOfKey(Struct, frozen=True, kw_only=True):
    """A key of runs, and its run where the caller may see it."""

    key: RunKeyView
    run: Run | None


class KeyLookup(Struct, frozen=True, kw_only=True):
    """What was found for a query."""

    claim: KeyView | None = None
    runs: list[RunOfKey] = []
    problem: Problem | None = None


@get(PATH, guards=[requires("operator")])
async def show(
    *,
    request: AnyRequest,
    service: CurrentState,
    caller: CurrentPrincipal,
    key: Text = "",
    within: ScopeText = "",
    user: OptionalText = None,
    tenant: OptionalText = None,
) -> Response[Any]:
    """Look a key up, in its scope and among those of runs; and list the keys with unknown outcomes."""
    tenant = tenant if tenant_for(caller, tenant) != caller.tenant else None
    query = KeyQuery(key=key, scope=within, user=user or None, tenant=tenant)
    return await _lookup_page(request, service, caller, query)


async def _lookup_page(
    request: AnyRequest,
    service: ServiceState,
    caller: Principal,
    query: KeyQuery,
    *,
    form: Form | None = None,
    error: str = "",
) -> Response[Any]:
    found = await _look_up(service, caller, query)
    unresolved: KeyList = await api.unresolved.fn(service=service, caller=caller, tenant=query.tenant, limit=MAX_KEYS)
    return page(
        request,
        service,
        caller,
        "keys/page.html",
        status=422 if error else 200,
        problem=found.problem,
        title="Keys",
        query=query,
        found=found,
        unresolved=unresolved.keys,
        max_keys=MAX_KEYS,
        chooses_tenant=manages_all_tenants(caller),
        done="" if form is None else form.get("done"),
        value="" if form is None else form.get("value"),
        error=error,
    )


async def _look_up(service: ServiceState, caller: Principal, query: KeyQuery) -> KeyLookup:
    if not query.key:
        return KeyLookup()
    about = {"key": query.key, "service": service, "caller": caller, "tenant": query.tenant}
    claim: KeyView | None = None
    try:
        if query.scope:
            claim = await _claim(query.scope, about)
        found = await api.show_run_keys.fn(user=query.user, **about)
    except InvalidRequest as error:
        return KeyLookup(problem=problem_of(error))
    return KeyLookup(claim=claim, runs=[await _run_of(service, caller, each) for each in found.keys[:MAX_KEYS]])


async def _claim(scope: str, about: dict[str, Any]) -> KeyView | None:
    try:
        claim: KeyView = await api.show_key.fn(within=scope, **about)
    except ApiError as error:
        if error.status != 404:
            raise
        return None
    return claim


async def _run_of(service: ServiceState, caller: Principal, key: RunKeyView) -> RunOfKey:
    """The key's run; None for a job of another system, or for a run of another tenant."""
    try:
        return RunOfKey(key=key, run=await service.run(key.run_id, caller))
    except (RunNotFound, InvalidRequest):
        return RunOfKey(key=key, run=None)


@post("/ui/keys/resolve", status_code=303, guards=[requires("admin")])
async def resolve(request: AnyRequest, service: CurrentState, caller: CurrentPrincipal) -> Response[Any]:
    """Record whether the work of a key with an unknown outcome was done, and with which value."""
    form = form_of(request)
    query = _query_of(form)
    done = form.get("done")
    try:
        value = _resolved_value(done, form.get("value"))
    except FieldError as error:
        return await _lookup_page(request, service, caller, query, form=form, error=str(error))
    resolution = Resolution(scope=query.scope, key=query.key, done=done == "yes", value=value)
    await api.resolve_key.fn(data=resolution, service=service, caller=caller, tenant=query.tenant)
    effect = "done: later calls replay the value" if done == "yes" else "not done: the work may run again"
    message = f"Resolved the key {query.key} as {effect}."
    return redirect_with_message(request, service, PATH, message, scope=query.scope, key=query.key, tenant=query.tenant)


def _resolved_value(done: str, text: str) -> Any:
    if done not in ("yes", "no"):
        raise FieldError("Select whether the work was done.")
    return parse_json(text) if done == "yes" and text.strip() else None


@get("/ui/keys/delete", guards=[requires("admin")])
async def confirm_delete(
    *,
    request: AnyRequest,
    service: CurrentState,
    caller: CurrentPrincipal,
    key: Text,
    within: ScopeText = "",
    user: OptionalText = None,
    kind: Text = "",
    tenant: OptionalText = None,
) -> Response[Any]:
    """Ask for confirmation, and explain what deleting the key does."""
    query = KeyQuery(key=key, scope=within, user=user, tenant=tenant, kind=kind)
    return await _confirmation_page(request, service, caller, query)


async def _confirmation_page(
    request: AnyRequest, service: ServiceState, caller: Principal, query: KeyQuery, problem: Problem | None = None
) -> Response[Any]:
    found = await _look_up(service, caller, query)
    if found.problem is not None:
        raise InvalidRequest(found.problem.detail)
    runs = [each for each in found.runs if (each.key.user, each.key.kind) == (query.user, query.kind)]
    if (found.claim is None) if query.scope else (not runs):
        raise ApiError(404, "NOT_FOUND", "the key does not exist, or no longer exists")
    data: dict[str, Any] = {"title": "Delete a key", "query": query, "claim": found.claim, "runs": runs}
    return page(request, service, caller, "keys/delete.html", problem=problem, **data)


@post("/ui/keys/delete", status_code=303, guards=[requires("admin")])
async def delete(request: AnyRequest, service: CurrentState, caller: CurrentPrincipal) -> Response[Any]:
    """Delete the key once that was confirmed; one that is in flight only with ``force``."""
    form = form_of(request)
    query = _query_of(form)
    if form.get("sure") != "yes":
        return await _confirmation_page(request, service, caller, query)
    about = {"key": query.key, "service": service, "caller": caller, "tenant": query.tenant}
    try:
        if query.scope:
            await api.delete_key.fn(within=query.scope, force=form.get("force") == "yes", **about)
        else:
            await api.delete_run_key.fn(user=query.user or "", kind=query.kind or "key", **about)
    except SemelError as error:
        problem = problem_of(error)
        if problem.status != 409:
            raise
        return await _confirmation_page(request, service, caller, query, problem)
    return redirect_with_message(request, service, PATH, f"Deleted the key {query.key}.", tenant=query.tenant)


def _query_of(form: Form) -> KeyQuery:
    return KeyQuery(
        key=form.get("key"),
        scope=form.get("scope"),
        user=form.optional("user"),
        tenant=form.optional("tenant"),
        kind=form.get("kind"),
    )


HANDLERS = (show, resolve, confirm_delete, delete)
