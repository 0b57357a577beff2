"""``/ui/keys``: how a key stands, what it points to, and what became of work whose owner vanished."""

from __future__ import annotations

from typing import Annotated, Any

from litestar import Response, get, post
from litestar.params import QueryParameter
from msgspec import Struct

from semel.api_types import Problem
from semel.dashboard.forms import Form, form_of
from semel.dashboard.submit import typed
from semel.dashboard.templating import page, problem_headers, redirect_with_message
from semel.errors import InvalidRequest, RunNotFound, SemelError
from semel.runs.types import Run
from semel.service.api import keys
from semel.service.api.keys import KeyList, KeyView, Resolution, RunKeyView
from semel.service.api.params import TheRequest, manages_all, tenant_for
from semel.service.api.problems import ApiError, problem_of
from semel.service.auth.middleware import Principal, requires
from semel.service.state import CurrentPrincipal, CurrentState, ServiceState

PLACE = "/ui/keys"
MOST = 100
"""Keys of one list."""
LONGEST = 1000
"""Characters that are looked at before it is said that a key is too long."""

Text = Annotated[str, QueryParameter(max_length=LONGEST)]
Whose = Annotated[str | None, QueryParameter(max_length=LONGEST)]


class KeyQuery(Struct, frozen=True, kw_only=True):
    """Which key is meant. Without a scope it is one of runs; the tenant is None where it is the caller's own."""

    key: str = ""
    scope: str = ""
    user: str | None = None
    tenant: str | None = None
    kind: str = ""


class Pointer(Struct, frozen=True, kw_only=True):
    """A key of runs, with the run that it points to where the caller may see it."""

    key: RunKeyView
    run: Run | None


class FoundKey(Struct, frozen=True, kw_only=True):
    """What a look-up came to."""

    claim: KeyView | None = None
    pointers: list[Pointer] = []
    problem: Problem | None = None


@get(PLACE, guards=[requires("operator")])
async def show(
    *,
    request: TheRequest,
    service: CurrentState,
    caller: CurrentPrincipal,
    key: Text = "",
    within: Annotated[str, QueryParameter(name="scope", max_length=LONGEST)] = "",
    user: Whose = None,
    tenant: Whose = None,
) -> Response[Any]:
    """Look a key up, in its scope and among those of runs; and the keys that wait for a decision."""
    tenant = tenant if tenant_for(caller, tenant) != caller.tenant else None
    asked = KeyQuery(key=key, scope=within, user=user or None, tenant=tenant)
    return await _shown(request, service, caller, asked)


async def _shown(
    request: TheRequest,
    service: ServiceState,
    caller: Principal,
    asked: KeyQuery,
    *,
    typed_before: Form | None = None,
    fault: str = "",
) -> Response[Any]:
    found = await _found(service, caller, asked)
    unresolved: KeyList = await keys.unresolved.fn(service=service, caller=caller, tenant=asked.tenant, limit=MOST)
    failed = found.problem
    status = 422 if fault else 200 if failed is None else failed.status
    return page(
        request,
        service,
        caller,
        "keys.html",
        status=status,
        headers=None if failed is None else problem_headers(failed),
        title="Keys",
        asked=asked,
        found=found,
        unresolved=unresolved.keys,
        most=MOST,
        chooses=manages_all(caller),
        done="" if typed_before is None else typed_before.get("done"),
        value="" if typed_before is None else typed_before.get("value"),
        fault=fault,
    )


async def _found(service: ServiceState, caller: Principal, asked: KeyQuery) -> FoundKey:
    if not asked.key:
        return FoundKey()
    try:
        claim = await _claim(service, caller, asked)
        listed = await keys.show_run_keys.fn(
            key=asked.key, service=service, caller=caller, tenant=asked.tenant, user=asked.user
        )
    except InvalidRequest as error:
        return FoundKey(problem=problem_of(error))
    return FoundKey(claim=claim, pointers=[await _pointer(service, caller, each) for each in listed.keys[:MOST]])


async def _claim(service: ServiceState, caller: Principal, asked: KeyQuery) -> KeyView | None:
    if not asked.scope:
        return None
    try:
        claim: KeyView = await keys.show_key.fn(
            within=asked.scope, key=asked.key, service=service, caller=caller, tenant=asked.tenant
        )
    except ApiError as error:
        if error.status != 404:
            raise
        return None
    return claim


async def _pointer(service: ServiceState, caller: Principal, key: RunKeyView) -> Pointer:
    """A key may name a job of another system, or a run of another tenant, which nobody else is shown."""
    try:
        return Pointer(key=key, run=await service.run(key.run_id, caller))
    except (RunNotFound, InvalidRequest):
        return Pointer(key=key, run=None)


@post("/ui/keys/resolve", status_code=303, guards=[requires("admin")])
async def resolve(request: TheRequest, service: CurrentState, caller: CurrentPrincipal) -> Response[Any]:
    """Say what became of the work: it happened, with this value, or it did not."""
    form = form_of(request)
    asked = _asked(form)
    done = form.get("done")
    try:
        value = _value(done, form.get("value"))
    except typed.FieldError as fault:
        return await _shown(request, service, caller, asked, typed_before=form, fault=str(fault))
    resolution = Resolution(scope=asked.scope, key=asked.key, done=done == "yes", value=value)
    await keys.resolve_key.fn(data=resolution, service=service, caller=caller, tenant=asked.tenant)
    became = "done: later callers get the value" if done == "yes" else "not done: the work may run again"
    said = f"The key {asked.key} was resolved as {became}."
    return redirect_with_message(
        request, service, PLACE, said=said, scope=asked.scope, key=asked.key, tenant=asked.tenant
    )


def _value(done: str, text: str) -> Any:
    """What later callers get: null where nothing was written."""
    if done not in ("yes", "no"):
        raise typed.FieldError("Say whether the work happened.")
    return typed.json_value(text) if done == "yes" and text.strip() else None


@get("/ui/keys/delete", guards=[requires("admin")])
async def question(
    *,
    request: TheRequest,
    service: CurrentState,
    caller: CurrentPrincipal,
    key: Text,
    within: Annotated[str, QueryParameter(name="scope", max_length=LONGEST)] = "",
    user: Whose = None,
    kind: Text = "",
    tenant: Whose = None,
) -> Response[Any]:
    """Ask whether the key is really to be forgotten, and say what that means."""
    asked = KeyQuery(key=key, scope=within, user=user, tenant=tenant, kind=kind)
    return await _questioned(request, service, caller, asked, None)


async def _questioned(
    request: TheRequest, service: ServiceState, caller: Principal, asked: KeyQuery, problem: Problem | None
) -> Response[Any]:
    found = await _found(service, caller, asked)
    if found.problem is not None:
        raise InvalidRequest(found.problem.detail)
    pointers = [each for each in found.pointers if (each.key.user, each.key.kind) == (asked.user, asked.kind)]
    if (found.claim if asked.scope else pointers or None) is None:
        raise ApiError(404, "NOT_FOUND", "there is no such key (any more)")
    return page(
        request,
        service,
        caller,
        "keys_delete.html",
        status=200 if problem is None else problem.status,
        title="Delete a key",
        asked=asked,
        claim=found.claim,
        pointers=pointers,
        problem=problem,
    )


@post("/ui/keys/delete", status_code=303, guards=[requires("admin")])
async def delete(request: TheRequest, service: CurrentState, caller: CurrentPrincipal) -> Response[Any]:
    """Forget the key; of one that somebody works on only when that was asked, too."""
    form = form_of(request)
    asked = _asked(form)
    if form.get("sure") != "yes":
        return await _questioned(request, service, caller, asked, None)
    try:
        await _delete(service, caller, asked, force=form.get("force") == "yes")
    except SemelError as error:
        problem = problem_of(error)
        if problem.status != 409:
            raise
        return await _questioned(request, service, caller, asked, problem)
    said = f"The key {asked.key} was deleted."
    return redirect_with_message(request, service, PLACE, said=said, tenant=asked.tenant)


async def _delete(service: ServiceState, caller: Principal, asked: KeyQuery, *, force: bool) -> None:
    about = {"key": asked.key, "service": service, "caller": caller, "tenant": asked.tenant}
    if asked.scope:
        await keys.delete_key.fn(within=asked.scope, force=force, **about)
    else:
        await keys.delete_run_key.fn(user=asked.user or "", kind=asked.kind or "key", **about)


def _asked(form: Form) -> KeyQuery:
    return KeyQuery(
        key=form.get("key"),
        scope=form.get("scope"),
        user=form.get("user") if "user" in form else None,
        tenant=form.get("tenant") if "tenant" in form else None,
        kind=form.get("kind"),
    )


HANDLERS = (show, resolve, question, delete)
