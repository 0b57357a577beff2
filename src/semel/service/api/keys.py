"""``/admin/keys``: the keys of ``Once`` and the middleware; ``/admin/run-keys``: the keys of runs."""

from __future__ import annotations

import logging
from datetime import datetime
from typing import Annotated, Any, Literal
from urllib.parse import quote

from litestar import delete, get, post
from litestar.params import JSONBody, QueryParameter
from msgspec import Meta, Struct
from sqlalchemy import Connection, and_, or_, select

from semel._validation import checked_key, checked_name
from semel.db.dialect import StatementContext
from semel.db.schema import keys
from semel.errors import ClaimLost, InProgress, InvalidRequest, Unencodable
from semel.http.protocol import scope_of
from semel.runs.store import key_actions, quotas, run_keys
from semel.runs.types import MICRO
from semel.service.api.params import Limit, Tenant, absent, tenant_for
from semel.service.api.problems import ApiError
from semel.service.api.responses import refusals
from semel.service.auth.middleware import requires
from semel.service.state import CurrentPrincipal, CurrentState, ServiceState
from semel.types import Record, Response, moment

_TAG = ["admin"]
_log = logging.getLogger("semel.service")

Scope = Annotated[str, QueryParameter(name="scope", min_length=1, max_length=255, description="The scope of the key.")]
Key = Annotated[str, QueryParameter(min_length=1, max_length=255, description="The key.")]
KeyUser = Annotated[
    str, QueryParameter(max_length=200, description="The user whose key it is; empty for a key without a user.")
]
KeyKind = Annotated[
    Literal["key", "payload"],
    QueryParameter(description="A client's key, or a payload hash that was used as one."),
]


class OutcomeView(Struct, frozen=True, kw_only=True):
    """The outcome that later callers get, without its value."""

    kind: str
    completed_at: datetime
    size: Annotated[int | None, Meta(description="Bytes; null if it is not stored, or no longer.")]
    status: Annotated[int | None, Meta(description="Of an HTTP response.")]


class KeyView(Struct, frozen=True, kw_only=True):
    """A key of Once or of the middleware."""

    scope: str
    key: str
    state: Literal["in_flight", "abandoned", "unknown", "completed"]
    fence: int
    attempt: Annotated[str, Meta(description="The attempt of the owner, or of the last one.")]
    fingerprint: str
    claimed_at: datetime
    lease_left: Annotated[float, Meta(description="Seconds; 0 if it has ended, or the work is done.")]
    expires_at: datetime
    outcome: OutcomeView | None


class KeyList(Struct, frozen=True, kw_only=True):
    """Keys whose outcome is unknown."""

    keys: list[KeyView]


class Resolution(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The outcome of work whose owner vanished."""

    scope: Annotated[str, Meta(min_length=1, max_length=255, examples=["orders"])]
    key: Annotated[str, Meta(min_length=1, max_length=255, examples=["order-1"])]
    done: Annotated[bool, Meta(description="Whether the work was done; if not, it may run again.")]
    value: Annotated[Any, Meta(description="The value that later callers get, if the work was done.")] = None
    force: Annotated[bool, Meta(description="Even while an owner holds the key, who then loses the claim.")] = False


class RunKeyView(Struct, frozen=True, kw_only=True):
    """The idempotency key of a run."""

    key: str
    kind: Literal["key", "payload"]
    tenant: str
    user: str
    payload_hash: str
    run_id: Annotated[str, Meta(description="The run that it names, or a job outside of semel.")]
    created_at: datetime
    expires_at: datetime
    expires_in: Annotated[float, Meta(description="Seconds until it expires.")]


class RunKeyList(Struct, frozen=True, kw_only=True):
    """The keys of that name: one for each user who has it."""

    keys: list[RunKeyView]


@get("/admin/keys", tags=_TAG, summary="Look up a key", guards=[requires("operator")], responses=refusals(400, 404))
async def show_key(
    within: Scope, key: Key, service: CurrentState, caller: CurrentPrincipal, tenant: Tenant = None
) -> KeyView:
    """The state of a key of Once or of the middleware: its owner, its lease, and the outcome that it replays."""
    whose = tenant_for(caller, tenant)
    return _view(await _record(service, _full(whose, within), key), whose)


@get(
    "/admin/keys/unresolved",
    tags=_TAG,
    summary="Keys whose outcome is unknown",
    guards=[requires("operator")],
    responses=refusals(400),
)
async def unresolved(
    service: CurrentState, caller: CurrentPrincipal, tenant: Tenant = None, limit: Limit = 100
) -> KeyList:
    """Keys whose owner vanished, oldest first: they stay so until somebody resolves them."""
    whose = tenant_for(caller, tenant)
    found = await service.store.read(list_unresolved, whose, limit, service.store.statement_context)
    return KeyList(keys=[_view(record, whose) for record in found])


@post(
    "/admin/keys/resolve",
    tags=_TAG,
    summary="Resolve a key",
    guards=[requires("admin")],
    status_code=204,
    responses=refusals(400, 404, 409, 422, body=True),
)
async def resolve_key(
    data: JSONBody[Resolution], service: CurrentState, caller: CurrentPrincipal, tenant: Tenant = None
) -> None:
    """Store the outcome of work whose owner vanished: done, with this value; or not done, so that it may run again."""
    whose = tenant_for(caller, tenant)
    scope = _full(whose, data.scope)
    record = await _record(service, scope, data.key)
    if record.status == "completed" or (record.status == "in_flight" and not data.force):
        raise ApiError(409, "NOTHING_TO_RESOLVE", f"the key is {record.status.replace('_', ' ')}")
    try:
        await service.store.write(
            key_actions.resolve,
            service.store.key_store(),
            whose,
            scope,
            data.key,
            done=data.done,
            value=data.value,
            force=data.force,
            context=service.store.acting(caller.actor),
        )
    except (InProgress, ClaimLost, InvalidRequest) as error:
        raise ApiError(409, "NOTHING_TO_RESOLVE", str(error)) from error
    except (Unencodable, RecursionError) as error:
        raise ApiError(422, "INVALID_PARAMETERS", f"the value cannot be stored: {error}") from error
    became = "done" if data.done else "not done"
    _log.info("the key %r in %r was resolved as %s by %r", data.key, scope, became, caller.user)


@delete("/admin/keys", tags=_TAG, summary="Delete a key", guards=[requires("admin")], responses=refusals(400, 404, 409))
async def delete_key(
    *,
    within: Scope,
    key: Key,
    service: CurrentState,
    caller: CurrentPrincipal,
    tenant: Tenant = None,
    force: Annotated[bool, QueryParameter(description="Even while an owner holds it.")] = False,
) -> None:
    """Delete a key and its outcome: the next caller does the work again.

    Whoever works on it meanwhile cannot record an outcome any more, so that takes `force`.
    """
    whose = tenant_for(caller, tenant)
    full, name, context = _full(whose, within), checked_key("key", key), service.store.acting(caller.actor)
    store = service.store.key_store()
    try:
        forgotten = await service.store.write(
            key_actions.delete, store, whose, full, name, force=force, context=context
        )
    except InProgress as error:
        left = f"{error.retry_after:.1f} more seconds"
        detail = f"an owner holds the key for at least {left}; force=true deletes it anyway"
        raise ApiError(409, "KEY_IN_FLIGHT", detail) from error
    if not forgotten:
        raise absent("such key")
    _log.info("the key %r in %r was deleted by %r", key, full, caller.user)


@get(
    "/admin/run-keys", tags=_TAG, summary="Look up a run's key", guards=[requires("operator")], responses=refusals(400)
)
async def show_run_keys(
    key: Key,
    service: CurrentState,
    caller: CurrentPrincipal,
    tenant: Tenant = None,
    user: Annotated[str | None, QueryParameter(max_length=200, description="Only this user's keys.")] = None,
) -> RunKeyList:
    """The keys of that name, with the runs that they name."""
    whose = (tenant_for(caller, tenant), None if user is None else checked_name("user", user))
    name = checked_name("key", key, most=255)
    return RunKeyList(keys=await service.store.read(_run_keys, whose, name, service.store.statement_context))


@delete(
    "/admin/run-keys", tags=_TAG, summary="Delete a run's key", guards=[requires("admin")], responses=refusals(400, 404)
)
async def delete_run_key(
    *,
    key: Key,
    user: KeyUser,
    service: CurrentState,
    caller: CurrentPrincipal,
    tenant: Tenant = None,
    kind: KeyKind = "key",
) -> None:
    """Delete a key: the same submission then creates a new run. The old run stays."""
    whose = (tenant_for(caller, tenant), checked_name("user", user))
    if not await service.store.write(
        _remove_run_key, whose, kind, checked_name("key", key, most=255), service.store.acting(caller.actor)
    ):
        raise absent("such key")
    _log.info("the run key %r of %r, tenant %r, was deleted by %r", key, whose[1], whose[0], caller.user)


def _full(tenant: str, scope: str) -> str:
    """The scope as it is stored: a tenant's begin with its name, as in the HTTP middleware."""
    return scope_of(tenant, checked_key("scope", scope))


def _prefix(tenant: str) -> str:
    return f"{quote(tenant, safe='', errors='surrogatepass')} " if tenant else ""


async def _record(service: ServiceState, scope: str, key: str) -> Record:
    record = await service.once.get(checked_key("key", key), scope=scope)
    if record is None:
        raise absent("such key")
    return record


def list_unresolved(conn: Connection, tenant: str, limit: int, terms: StatementContext) -> list[Record]:
    """The tenant's keys whose outcome is unknown, oldest first. Reads all keys that there are."""
    now = quotas.read_clock(conn, terms)
    outlasted = keys.c.lease_until_us + keys.c.expires_us - keys.c.created_us  # as semel.once.rules.end_of computes it
    lost = [
        keys.c.state == "claimed",
        keys.c.unknown,
        keys.c.lease_until_us <= now,
        or_(keys.c.expires_us >= now, and_(keys.c.lease_until_us > keys.c.expires_us, outlasted >= now)),
    ]
    if prefix := _prefix(tenant):
        lost.append(and_(keys.c.scope >= prefix, keys.c.scope < f"{prefix[:-1]}!"))  # "!" comes after the space
    columns = [keys.c.value.label("data") if name == "data" else keys.c[name] for name in _KEPT]
    rows = conn.execute(select(*columns).where(*lost).order_by(keys.c.created_us, keys.c.key).limit(limit))
    return [Record(**row, now_us=now) for row in rows.mappings()]


_KEPT = tuple(name for name in Record.__struct_fields__ if name != "now_us")


def _run_keys(conn: Connection, whose: tuple[str, str | None], key: str, terms: StatementContext) -> list[RunKeyView]:
    now = quotas.read_clock(conn, terms)
    return [
        RunKeyView(
            key=each.key,
            kind=each.kind,
            tenant=each.tenant,
            user=each.user,
            payload_hash=each.payload_hash,
            run_id=each.job_id,
            created_at=moment(each.created_us),
            expires_at=moment(each.expires_us),
            expires_in=(each.expires_us - now) / MICRO,
        )
        for each in run_keys.entries(conn, key, *whose, terms)
    ]


def _remove_run_key(conn: Connection, whose: tuple[str, str], kind: str, key: str, terms: StatementContext) -> bool:
    found = [each for each in run_keys.entries(conn, key, *whose, terms) if each.kind == kind]
    return sum(key_actions.delete_run_key(conn, each, terms) for each in found) > 0


def _view(record: Record, tenant: str) -> KeyView:
    return KeyView(
        scope=record.scope.removeprefix(_prefix(tenant)),
        key=record.key,
        state=record.status,
        fence=record.fence,
        attempt=record.attempt,
        fingerprint=record.fingerprint,
        claimed_at=record.created_at,
        lease_left=record.lease_left,
        expires_at=record.expires_at,
        outcome=_outcome(record),
    )


def _outcome(record: Record) -> OutcomeView | None:
    outcome = record.outcome
    if outcome is None:
        return None
    answer = outcome.value if outcome.kind == "response" and not outcome.gone else None
    return OutcomeView(
        kind=outcome.kind,
        completed_at=outcome.completed_at,
        size=None if outcome.data is None or outcome.gone else len(outcome.data),
        status=answer.status if isinstance(answer, Response) else None,
    )


HANDLERS = (show_key, unresolved, resolve_key, delete_key, show_run_keys, delete_run_key)
