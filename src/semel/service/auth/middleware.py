"""The gate that every request passes first: where it comes from, who sends it, how much and how fast.

It is plain ASGI around the whole service. Without tokens the service answers this machine only, and only to requests
that name it so: a page in somebody's browser cannot reach it under another name.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from hashlib import sha256
from typing import TYPE_CHECKING, Any, TypeAlias

from msgspec import Struct

from semel.errors import SemelError
from semel.service.api.problems import ApiError, body_of, problem_of
from semel.service.auth import tokens
from semel.service.auth.cookies import cookie
from semel.service.auth.limits import (
    MOST_NAMES,
    BodyReader,
    ClientGone,
    RateLimits,
    Receive,
    Scope,
    address_of,
    headers,
)
from semel.service.auth.loopback import is_loopback, require_local
from semel.service.auth.tokens import ROLES, Role, Token

if TYPE_CHECKING:
    from litestar.connection import ASGIConnection
    from litestar.handlers import BaseRouteHandler

    from semel.runs.store import RunStore
    from semel.service.settings import Settings

Send: TypeAlias = Callable[[Any], Awaitable[None]]
ErrorPage: TypeAlias = tuple[int, list[tuple[str, str]], bytes]
"""How a refusal is shown in a browser: status, headers, content."""

OPEN = re.compile(r"/(?:healthz|readyz|api/cloud/webhooks/\w+/[\w-]+|ui/static/[\w.-]+)", re.ASCII)
"""What anybody may ask: how the server is; to call back, which proves itself by its signature; and the dashboard's
stylesheet and script, which its sign-in needs."""
UNOPENED = frozenset({"/healthz", "/readyz"})
"""What is answered even while the database is away."""
SIGN_IN = "/ui/sign-in"
SESSION = "semel_session"
"""The cookie that holds the token of somebody who signed in. It is looked at for pages only, never for the API."""
LOCAL_USER = "local"
"""Who submits on this machine while there are no tokens."""
KNOWN_FOR = 5.0
"""Seconds for which a token that was looked up is known: so long may one that was revoked still be taken."""
LOOK_EVERY = 1.0
"""Seconds between two looks for the first token, while there are none."""
NOTED_EVERY = 60.0
"""Seconds between two notes that a token was used."""
FAILURES = 60
"""Tokens that are not valid which an address may send at once, and"""
FAILURES_REFILLED = 1.0
"""a second after that. Those that were good before pass meanwhile: they may come through the same proxy."""

__all__ = [
    "LOCAL_USER",
    "OPEN",
    "AuthMiddleware",
    "Authenticator",
    "Principal",
    "forbid_cookie_on_api",
    "is_loopback",
    "is_page",
    "path_of",
    "refuse",
    "requires",
]

_log = logging.getLogger("semel.service")


class Principal(Struct, frozen=True, kw_only=True):
    """Who sent a request."""

    user: str
    role: Role
    tenant: str = ""
    token: str | None = None

    def may(self, role: Role) -> bool:
        """Whether they have the role, or one that may more."""
        return ROLES.index(self.role) >= ROLES.index(role)

    @property
    def name(self) -> str:
        """What limits go by."""
        return self.token or self.user

    @property
    def visible_user(self) -> str | None:
        """Whose runs they see: their own, or everybody's (None)."""
        return None if self.may("operator") else self.user


def requires(role: Role) -> Callable[[ASGIConnection[Any, Any, Any, Any], BaseRouteHandler], None]:
    """A guard of a handler: ``guards=[requires("admin")]`` refuses those who have less than that role."""

    def guard(connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
        caller: Principal | None = connection.scope["state"].get("caller")
        if caller is None:
            raise ApiError(401, "UNAUTHENTICATED", "a token is needed here")
        if not caller.may(role):
            raise ApiError(403, "FORBIDDEN", f"this needs the role {role}, and the token has {caller.role}")

    return guard


def forbid_cookie_on_api(connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler) -> None:
    """A guard of every handler: who came by a cookie comes to pages, whatever the path looked like at the gate."""
    if connection.scope["state"].get("by_cookie") and not handler.opt.get("page"):
        raise ApiError(401, "UNAUTHENTICATED", "a token is needed: Authorization: Bearer semel_…")


def is_page(path: str) -> bool:
    """Whether the path (without what it is mounted under) is the dashboard's."""
    return path in ("", "/", "/ui") or path.startswith("/ui/")


class CachedToken(Struct, frozen=True):
    """A token that was found good, and until when (in the process's time) that is taken for true."""

    token: Token
    until: float


class Authenticator:
    """Who a request is from. A token that was found good is known for some seconds."""

    def __init__(self, store: RunStore, settings: Settings) -> None:
        self._store = store
        self._known: dict[bytes, CachedToken] = {}
        self._rate = settings.rate
        self._uses = RateLimits(settings.rate, 2 * settings.rate)
        self._failures = RateLimits(FAILURES_REFILLED, FAILURES)
        self._noted: dict[str, float] = {}
        self._guarded = False
        self._looked_at = -LOOK_EVERY
        self._looking = asyncio.Lock()
        self._noting: set[asyncio.Task[None]] = set()

    async def caller(self, scope: Scope) -> Principal:
        """Who sent the request, or the refusal."""
        sent = headers(scope, b"authorization")
        if not sent:
            return await self._nobody(scope)
        return await self._admitted(sent, scope)

    async def visitor(self, scope: Scope) -> Principal:
        """Who asks for a page: a browser says it with its cookie, where there is no token in the header."""
        secret = cookie(scope, SESSION)
        if secret is None or headers(scope, b"authorization") or not await self.guarded():
            return await self.caller(scope)  # without tokens a cookie is another server's: ports share them
        return await self.signed_in(secret, scope)

    async def signed_in(self, secret: str, scope: Scope) -> Principal:
        """Whose token that is, as if it had been sent in the header; or the refusal."""
        return await self._admitted([f"Bearer {secret}"], scope)

    async def _admitted(self, sent: list[str], scope: Scope) -> Principal:
        token = await self._token(sent, scope)
        self._within_rate(token.id)
        self._note(token.id)
        return Principal(user=token.user, role=token.role, tenant=token.tenant, token=token.id)

    async def _nobody(self, scope: Scope) -> Principal:
        if await self.guarded():
            raise ApiError(401, "UNAUTHENTICATED", "a token is needed: Authorization: Bearer semel_…")
        require_local(scope)
        return Principal(user=LOCAL_USER, role="admin")

    async def guarded(self) -> bool:
        """Whether there are tokens. Once there are, there is no way back while the server runs."""
        if not self._guarded and time.monotonic() - self._looked_at >= LOOK_EVERY:
            async with self._looking:  # one asks for all who come meanwhile
                if time.monotonic() - self._looked_at >= LOOK_EVERY:
                    self._guarded = await self._store.read(tokens.any_there)
                    self._looked_at = time.monotonic()
        return self._guarded

    async def is_still_valid(self, caller: Principal) -> bool:
        """Whether somebody who is being answered for long would be let in now, too."""
        if caller.token is None:
            return not await self.guarded()
        return await self._store.read(tokens.find, caller.token, self._store.terms) is not None

    async def _token(self, sent: list[str], scope: Scope) -> Token:
        """The token that was sent, looked up unless that very text was good a moment ago.

        What is not good is not remembered, so it costs the same whatever is wrong with it, and fills no memory.
        """
        if len(sent) != 1:
            raise self._not_good(address_of(scope))
        mark = sha256(sent[0].encode()).digest()
        known = self._known.get(mark)
        if known is not None and time.monotonic() < known.until:
            return known.token
        found = await self._look_up(sent[0])
        self._known.pop(mark, None)
        if found is None:
            raise self._not_good(address_of(scope))
        self._guarded = True
        token, left = found
        self._remember(mark, CachedToken(token, time.monotonic() + min(KNOWN_FOR, KNOWN_FOR if left is None else left)))
        return token

    def _not_good(self, address: str) -> ApiError:
        """The refusal of a token. Good ones are never refused for what others sent from the same address."""
        if wait := self._failures.take(address):
            said = "too many tokens that were not valid came from this address"
            return ApiError(429, "TOO_MANY_REQUESTS", said, retry_after=wait)
        return ApiError(401, "UNAUTHENTICATED", "the token is not valid, or no longer")

    async def _look_up(self, sent: str) -> tuple[Token, float | None] | None:
        scheme, _, text = sent.partition(" ")
        parsed = tokens.parse(text.strip()) if scheme.lower() == "bearer" else None
        return None if parsed is None else await self._store.read(tokens.check, *parsed, self._store.terms)

    def _remember(self, mark: bytes, known: CachedToken) -> None:
        if len(self._known) >= MOST_NAMES:
            del self._known[next(iter(self._known))]
        self._known[mark] = known

    def forget(self) -> None:
        """Tokens have changed here: look everything up anew."""
        self._known.clear()
        self._looked_at = -LOOK_EVERY

    def _within_rate(self, token_id: str) -> None:
        if self._rate and (wait := self._uses.take(token_id)):
            said = f"this token may send {self._rate:g} requests a second"
            raise ApiError(429, "TOO_MANY_REQUESTS", said, retry_after=wait)

    def _note(self, token_id: str) -> None:
        now = time.monotonic()
        if now - self._noted.get(token_id, -NOTED_EVERY) < NOTED_EVERY:
            return
        if len(self._noted) >= MOST_NAMES:
            self._noted.clear()
        self._noted[token_id] = now
        task = asyncio.get_running_loop().create_task(self._write_used(token_id))
        self._noting.add(task)
        task.add_done_callback(self._noting.discard)

    async def _write_used(self, token_id: str) -> None:
        try:
            await self._store.write(tokens.used, [token_id], self._store.terms)
        except SemelError as error:
            _log.warning("that a token was used could not be noted: %s", error)

    async def close(self) -> None:
        """Let what is being noted be written."""
        await asyncio.gather(*self._noting)


class AuthMiddleware:
    """The service behind its gate, as ASGI."""

    def __init__(
        self,
        inner: Any,
        gate: Authenticator,
        settings: Settings,
        opened: Callable[[], Awaitable[None]],
        shown: Callable[[Exception, Scope], ErrorPage] | None = None,
    ) -> None:
        self._inner = inner
        self._gate = gate
        self._settings = settings
        self._opened = opened
        self._shown = shown

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "websocket":  # there are none here, so none passes
            await send({"type": "websocket.close", "code": 1008, "reason": ""})
            return
        if scope["type"] != "http":
            await self._inner(scope, receive, send)
            return
        if scope["method"] == "HEAD":
            scope, send = {**scope, "method": "GET"}, _bodiless(send)
        body = BodyReader(scope, receive, self._settings)
        try:
            path = path_of(scope)
            if path not in UNOPENED:
                await self._opened()
            if OPEN.fullmatch(path) is None:
                await self._let_in(path, scope)
            _require_one_key(scope)
            whole = await body.whole()
        except ClientGone:
            with suppress(OSError):  # a server that hears nobody answer says 500, to whoever only stopped sending
                await refuse(ApiError(400, "INVALID_REQUEST", "the body ended before it was whole"), scope, send)
            return
        except SemelError as error:
            await body.drain()
            await self._refuse(error, scope, send)
            return
        await self._inner(scope, whole, send)

    async def _let_in(self, path: str, scope: Scope) -> None:
        """Find out who it is. Who is to sign in is nobody yet."""
        state = {**scope.get("state", {})}  # a server may share its dict
        scope["state"] = state
        if not is_page(path):
            state["caller"] = await self._gate.caller(scope)
        elif path != SIGN_IN or not await self._gate.guarded():
            state["by_cookie"] = not headers(scope, b"authorization")
            state["caller"] = await self._gate.visitor(scope)

    async def _refuse(self, error: SemelError, scope: Scope, send: Send) -> None:
        """To a browser the refusal is a page, or the way to one."""
        if self._shown is None or not is_page(path_of(scope)):
            await refuse(error, scope, send)
            return
        status, fields, content = self._shown(error, scope)
        raw = [(name.encode(), value.encode("latin-1")) for name, value in fields]
        await send({"type": "http.response.start", "status": status, "headers": raw})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else content})


def _bodiless(send: Send) -> Send:
    """The answer to GET without its body, which is the answer to HEAD."""

    async def head(message: Any) -> None:
        await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

    return head


async def refuse(error: Exception, scope: Scope, send: Send) -> None:
    """Answer with a problem. What is left of the body is not waited for, so the connection ends where one is known."""
    problem = problem_of(error)
    content, fields = body_of(problem)
    fields["content-length"] = str(len(content))
    if problem.status in (408, 413) and scope.get("http_version", "1.1").startswith("1"):
        fields["connection"] = "close"
    raw = [(name.encode(), value.encode()) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": problem.status, "headers": raw})
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else content})


def _require_one_key(scope: Scope) -> None:
    keys = {value for name, value in scope["headers"] if name == b"idempotency-key"}
    if len(keys) > 1:
        raise ApiError(400, "INVALID_REQUEST", "there are two Idempotency-Keys, and a request has one")
    if not all(key.isascii() for key in keys):
        said = "a key in the header is ASCII; one with other letters goes into the body, as idempotency_key"
        raise ApiError(400, "INVALID_REQUEST", said)


def path_of(scope: Scope) -> str:
    """The path below the place where the service is mounted."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path.removeprefix(root) if root else path
