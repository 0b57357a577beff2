"""``/admin/tokens``: list, create, rotate and revoke tokens."""

from __future__ import annotations

import logging
from datetime import datetime
from typing import Annotated

from litestar import Response, delete, get, post
from litestar.params import FromPath, JSONBody
from msgspec import Meta, Struct
from sqlalchemy import Connection

from semel.db.dialect import StatementContext
from semel.errors import InvalidRequest
from semel.service.api.params import After, Limit, Tenant, absent, manages_all_tenants, tenant_for
from semel.service.api.problems import ApiError
from semel.service.api.responses import refusals
from semel.service.auth import tokens
from semel.service.auth.middleware import Principal, requires
from semel.service.auth.tokens import MAIN, Issued, Role, Token
from semel.service.state import CurrentPrincipal, CurrentState
from semel.types import moment

_TAG = ["admin"]
_log = logging.getLogger("semel.service")
_TEN_YEARS = 316_224_000
_UNSTORED = {"Cache-Control": "no-store"}


class TokenRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A new token."""

    user: Annotated[str, Meta(min_length=1, max_length=200, examples=["alice"])]
    role: Role = "submitter"
    tenant: Annotated[
        Annotated[str, Meta(max_length=200)] | None,
        Meta(description="By default the caller's; admins of the main tenant may name another."),
    ] = None
    name: Annotated[str, Meta(max_length=200, description="What it is for.", examples=["nightly build"])] = ""
    ttl: Annotated[
        Annotated[float, Meta(gt=0, le=_TEN_YEARS)] | None, Meta(description="Seconds until it expires; null: never.")
    ] = None


class RotateRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a token is rotated."""

    grace: Annotated[
        float, Meta(ge=0, le=_TEN_YEARS, description="Seconds for which the old token stays valid.", examples=[3600])
    ] = 0.0


class TokenView(Struct, frozen=True, kw_only=True):
    """A token, without its secret, which is not stored."""

    id: str
    tenant: str
    user: str
    role: Role
    name: str
    created_at: datetime
    expires_at: datetime | None
    last_used_at: Annotated[datetime | None, Meta(description="Updated once a minute.")]


class IssuedView(Struct, frozen=True, kw_only=True):
    """A new token."""

    token: TokenView
    secret: Annotated[str, Meta(description="What clients send, as Authorization: Bearer … It is shown only once.")]


class TokenPage(Struct, frozen=True, kw_only=True):
    """A page of tokens, oldest first; `next` is the start of the next page."""

    tokens: list[TokenView]
    next: str | None


@get(
    "/admin/tokens",
    tags=_TAG,
    summary="List tokens",
    guards=[requires("operator")],
    responses=refusals(400),
)
async def list_tokens(
    service: CurrentState, caller: CurrentPrincipal, tenant: Tenant = None, limit: Limit = 100, after: After = None
) -> TokenPage:
    """The tokens of the tenant; for admins of the main tenant who name none, those of every tenant."""
    whose = None if tenant is None and manages_all_tenants(caller) else tenant_for(caller, tenant)
    found = await service.store.read(tokens.list_tokens, whose, after=_cursor(after), limit=limit + 1)
    last = found[limit - 1] if len(found) > limit else None
    more = None if last is None else f"{last.created_us}-{last.id}"
    return TokenPage(tokens=[_view(each) for each in found[:limit]], next=more)


@post(
    "/admin/tokens",
    tags=_TAG,
    summary="Create a token",
    guards=[requires("admin")],
    responses=refusals(400, 409, body=True),
)
async def create_token(
    data: JSONBody[TokenRequest], service: CurrentState, caller: CurrentPrincipal
) -> Response[IssuedView]:
    """Create a token. Its secret is in this response only.

    The first token must have the role admin in the main tenant. Until it exists, everybody on the server's machine has
    full access without a token.
    """
    request = tokens.NewToken(
        user=data.user, role=data.role, tenant=tenant_for(caller, data.tenant), name=data.name, ttl=data.ttl
    )
    issued = await service.store.write(_issue, request, service.store.acting(caller.actor))
    return _issued_response(service, caller, issued, "created")


def _issue(conn: Connection, request: tokens.NewToken, terms: StatementContext) -> Issued:
    issued = tokens.issue(conn, request, terms)
    if (request.role, request.tenant) != ("admin", MAIN) and len(tokens.list_tokens(conn, None, limit=2)) == 1:
        detail = "the first token must have the role admin in the main tenant, or nobody could create another"
        raise ApiError(409, "ADMIN_FIRST", detail)
    return issued


@post(
    "/admin/tokens/{token_id:str}/rotate",
    tags=_TAG,
    summary="Rotate a token",
    guards=[requires("admin")],
    responses=refusals(400, 404, body=True),
)
async def rotate_token(
    token_id: FromPath[str], data: JSONBody[RotateRequest], service: CurrentState, caller: CurrentPrincipal
) -> Response[IssuedView]:
    """Create a new token for the same user, with the same lifetime. The old one stays valid for the grace period."""
    terms = service.store.acting(caller.actor)
    issued = await service.store.write(tokens.rotate, _known(token_id), data.grace, terms, _reach(caller))
    if issued is None:
        raise absent("token of that id")
    return _issued_response(service, caller, issued, f"created in place of {token_id}")


@delete(
    "/admin/tokens/{token_id:str}",
    tags=_TAG,
    summary="Revoke a token",
    guards=[requires("admin")],
    responses=refusals(400, 404, 409),
)
async def revoke_token(token_id: FromPath[str], service: CurrentState, caller: CurrentPrincipal) -> None:
    """Revoke a token: at once in this process, within five seconds in others.

    The last token of the main tenant's admins stays.
    """
    done = await service.store.write(
        tokens.revoke_but_last, _known(token_id), _reach(caller), service.store.acting(caller.actor)
    )
    if done == "absent":
        raise absent("token of that id")
    if done == "last":
        detail = (
            "this is the last admin token: create another first, or use `semel token revoke` on the server's machine"
        )
        raise ApiError(409, "LAST_ADMIN", detail)
    service.auth.clear_cache()
    _log.info("token %s was revoked by %s", token_id, _signed(caller))


def _issued_response(service: CurrentState, caller: Principal, issued: Issued, how: str) -> Response[IssuedView]:
    service.auth.clear_cache()
    token = issued.token
    _log.info(
        "token %s (%s of %r, tenant %r) was %s by %s",
        token.id,
        token.role,
        token.user,
        token.tenant,
        how,
        _signed(caller),
    )
    return Response(IssuedView(token=_view(token), secret=issued.secret), status_code=201, headers=_UNSTORED)


def _signed(caller: Principal) -> str:
    return f"{caller.user!r}" + (f" with token {caller.token}" if caller.token else "")


def _reach(caller: Principal) -> str | None:
    """The tenant whose tokens they may change; None for all."""
    return None if manages_all_tenants(caller) else caller.tenant


def _known(token_id: str) -> str:
    """The id; 404 if it cannot be one."""
    if tokens.is_id(token_id):
        return token_id
    raise absent("token of that id")


def _cursor(after: str | None) -> tuple[int, str]:
    if after is None:
        return (-1, "")
    made, _, token_id = after.partition("-")
    if not (made.isascii() and made.isdigit() and len(made) < 19 and tokens.is_id(token_id)):
        raise InvalidRequest("after must be the `next` of the previous page")
    return int(made), token_id


def _view(token: Token) -> TokenView:
    return TokenView(
        id=token.id,
        tenant=token.tenant,
        user=token.user,
        role=token.role,
        name=token.name,
        created_at=moment(token.created_us),
        expires_at=None if token.expires_us is None else moment(token.expires_us),
        last_used_at=None if token.last_used_us is None else moment(token.last_used_us),
    )


HANDLERS = (list_tokens, create_token, rotate_token, revoke_token)
