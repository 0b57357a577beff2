"""Authentication: plain ASGI middleware around the whole service.

It finds the token's owner, and limits the size and the rate of requests. While there are no tokens, the service accepts
only requests from this machine that address it as localhost, so that no page in a browser can reach it by another name
(DNS rebinding).
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
from semel.redaction import one_line
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
from semel.types import Actor, Entrance

if TYPE_CHECKING:
    from litestar.connection import ASGIConnection
    from litestar.handlers import BaseRouteHandler

    from semel.runs.store import RunStore
    from semel.service.settings import Settings

Send: TypeAlias = Callable[[Any], Awaitable[None]]
ErrorPage: TypeAlias = tuple[int, list[tuple[str, str]], bytes]
"""A problem as a page: status, headers, content."""

OPEN = re.compile(r"/(?:healthz|readyz|api/cloud/webhooks/\w+/[\w-]+|ui/static/[\w.-]+)", re.ASCII)
"""Paths that need no token: health, webhooks of providers (which are signed), and the dashboard's stylesheet and
script, which the sign-in page needs."""
UNOPENED = frozenset({"/healthz", "/readyz"})
"""Paths that respond even while the database is unavailable."""
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that change nothing."""
FOR_VIEWERS = frozenset({"/ui/sign-out", "/ui/runs/compare"})
"""Paths that change nothing, whatever their method: what a viewer may send besides the safe methods."""
SIGN_IN = "/ui/sign-in"
SESSION = "semel_session"
"""The cookie with the token of a signed-in user. It is valid for pages only, never for the API."""
LOCAL_USER = "local"
"""The user of local requests while there are no tokens."""
KNOWN_FOR = 5.0
"""Seconds for which a token is cached, and may still be accepted after it was revoked in another process."""
POLL_TOKENS = 1.0
"""Seconds between two checks whether there is a first token."""
USED_EVERY = 60.0
"""Seconds between two writes of a token's last use."""
MAX_FORWARDED = 200
"""Characters of the addresses that proxies name."""
FAILURES = 60
"""Invalid tokens that an address may send in a burst."""
FAILURES_REFILLED = 1.0
"""Invalid tokens a second after that. Valid tokens are accepted meanwhile: they may come through the same proxy."""

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
    """The sender of a request: a user with a role, in a tenant."""

    user: str
    role: Role
    tenant: str = ""
    token: str | None = None
    address: str = ""
    entrance: Entrance = "api"

    @property
    def actor(self) -> Actor:
        """What the audit log has of them."""
        return Actor(
            user=self.user,
            role=self.role,
            tenant=self.tenant,
            token=self.token or "",
            address=self.address,
            entrance=self.entrance,
        )

    def may(self, role: Role) -> bool:
        """Whether they may change what needs the role: they have it, or a higher one."""
        return ROLES.index(self.role) >= ROLES.index(role)

    def sees(self, role: Role) -> bool:
        """Whether they see what needs the role. A viewer sees everything of the tenant."""
        return self.role == "viewer" or self.may(role)

    @property
    def name(self) -> str:
        """What rate and concurrency limits are counted by."""
        return self.token or self.user

    @property
    def visible_user(self) -> str | None:
        """The user whose runs they see; None for everybody's."""
        return None if self.sees("operator") else self.user


def requires(role: Role) -> Callable[[ASGIConnection[Any, Any, Any, Any], BaseRouteHandler], None]:
    """A guard of a handler: ``guards=[requires("admin")]`` refuses lower roles. A viewer may read."""

    def guard(connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
        caller: Principal | None = connection.scope["state"].get("caller")
        if caller is None:
            raise ApiError(401, "UNAUTHENTICATED", "a token is required here")
        method: str = connection.scope["method"]  # type: ignore[typeddict-item]  # there are no websockets
        if not (caller.sees(role) if method in SAFE else caller.may(role)):
            raise ApiError(403, "FORBIDDEN", f"this requires the role {role}, but the token has {caller.role}")

    return guard


def forbid_cookie_on_api(connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler) -> None:
    """A guard of every handler: a cookie is accepted for pages only, however the path was spelt."""
    if connection.scope["state"].get("by_cookie") and not handler.opt.get("page"):
        raise ApiError(401, "UNAUTHENTICATED", "a token is required: Authorization: Bearer semel_…")


def is_page(path: str) -> bool:
    """Whether the path, without the mount point, is the dashboard's."""
    return path in ("", "/", "/ui") or path.startswith("/ui/")


def _origin(scope: Scope) -> dict[str, Any]:
    """Where a request comes from: the address, and whether it is for a page. A proxy's header is added unchecked."""
    client = scope.get("client")
    address = str(client[0]) if client and client[0] else ""
    said = ", ".join(headers(scope, b"x-forwarded-for"))[:MAX_FORWARDED]
    address = f"{one_line(said)} by {address}" if said else address
    return {"address": address, "entrance": "dashboard" if is_page(path_of(scope)) else "api"}


class CachedToken(Struct, frozen=True):
    """A valid token, cached until then (``time.monotonic``)."""

    token: Token
    until: float


class Authenticator:
    """Finds who sent a request, and caches valid tokens for some seconds."""

    def __init__(self, store: RunStore, settings: Settings) -> None:
        self._store = store
        self._known: dict[bytes, CachedToken] = {}
        self._rate = settings.rate
        self._uses = RateLimits(settings.rate, 2 * settings.rate)
        self._failures = RateLimits(FAILURES_REFILLED, FAILURES)
        self._used_at: dict[str, float] = {}
        self._guarded = False
        self._looked_at = -POLL_TOKENS
        self._looking = asyncio.Lock()
        self._writes: set[asyncio.Task[None]] = set()

    async def caller(self, scope: Scope) -> Principal:
        """The sender of a request; raises ApiError."""
        sent = headers(scope, b"authorization")
        if not sent:
            return await self._nobody(scope)
        return await self._admitted(sent, scope)

    async def from_cookie(self, scope: Scope) -> Principal:
        """The sender of a request for a page: by its cookie, unless there is a token in the header."""
        secret = cookie(scope, SESSION)
        if secret is None or headers(scope, b"authorization") or not await self.guarded():
            return await self.caller(scope)  # while there are no tokens, a cookie is another server's: ports share them
        return await self.signed_in(secret, scope)

    async def signed_in(self, secret: str, scope: Scope) -> Principal:
        """The owner of the token; raises ApiError."""
        return await self._admitted([f"Bearer {secret}"], scope)

    async def _admitted(self, sent: list[str], scope: Scope) -> Principal:
        token = await self._token(sent, scope)
        self._check_rate(token.id)
        self._mark_used(token.id)
        return Principal(user=token.user, role=token.role, tenant=token.tenant, token=token.id, **_origin(scope))

    async def _nobody(self, scope: Scope) -> Principal:
        if await self.guarded():
            raise ApiError(401, "UNAUTHENTICATED", "a token is required: Authorization: Bearer semel_…")
        require_local(scope)
        return Principal(user=LOCAL_USER, role="admin", **_origin(scope))

    async def guarded(self) -> bool:
        """Whether there are tokens. Once there are, the server requires them until it ends."""
        if not self._guarded and time.monotonic() - self._looked_at >= POLL_TOKENS:
            async with self._looking:  # one query serves concurrent requests
                if time.monotonic() - self._looked_at >= POLL_TOKENS:
                    self._guarded = await self._store.read(tokens.any_there)
                    self._looked_at = time.monotonic()
        return self._guarded

    async def is_still_valid(self, caller: Principal) -> bool:
        """Whether the sender of a long request would still be accepted."""
        if caller.token is None:
            return not await self.guarded()
        return await self._store.read(tokens.find, caller.token, self._store.statement_context) is not None

    async def _token(self, sent: list[str], scope: Scope) -> Token:
        """The token that was sent, from the cache or the database.

        Invalid ones are not cached: each costs the same, whatever is wrong with it, and none fills the memory.
        """
        if len(sent) != 1:
            raise self._invalid(address_of(scope))
        digest = sha256(sent[0].encode()).digest()
        known = self._known.get(digest)
        if known is not None and time.monotonic() < known.until:
            return known.token
        found = await self._look_up(sent[0])
        self._known.pop(digest, None)
        if found is None:
            raise self._invalid(address_of(scope))
        self._guarded = True
        token, left = found
        self._remember(
            digest, CachedToken(token, time.monotonic() + min(KNOWN_FOR, KNOWN_FOR if left is None else left))
        )
        return token

    def _invalid(self, address: str) -> ApiError:
        """The error for an invalid token: 401, or 429 after many from one address."""
        if wait := self._failures.take(address):
            detail = "too many invalid tokens came from this address"
            return ApiError(429, "TOO_MANY_REQUESTS", detail, retry_after=wait)
        return ApiError(401, "UNAUTHENTICATED", "the token is invalid or has expired")

    async def _look_up(self, sent: str) -> tuple[Token, float | None] | None:
        scheme, _, text = sent.partition(" ")
        parsed = tokens.parse(text.strip()) if scheme.lower() == "bearer" else None
        return None if parsed is None else await self._store.read(tokens.check, *parsed, self._store.statement_context)

    def _remember(self, digest: bytes, known: CachedToken) -> None:
        if len(self._known) >= MOST_NAMES:
            del self._known[next(iter(self._known))]
        self._known[digest] = known

    def clear_cache(self) -> None:
        """Clear the cache, after tokens have changed here."""
        self._known.clear()
        self._looked_at = -POLL_TOKENS

    def _check_rate(self, token_id: str) -> None:
        if self._rate and (wait := self._uses.take(token_id)):
            detail = f"this token may send {self._rate:g} requests a second"
            raise ApiError(429, "TOO_MANY_REQUESTS", detail, retry_after=wait)

    def _mark_used(self, token_id: str) -> None:
        now = time.monotonic()
        if now - self._used_at.get(token_id, -USED_EVERY) < USED_EVERY:
            return
        if len(self._used_at) >= MOST_NAMES:
            self._used_at.clear()
        self._used_at[token_id] = now
        task = asyncio.get_running_loop().create_task(self._write_used(token_id))
        self._writes.add(task)
        task.add_done_callback(self._writes.discard)

    async def _write_used(self, token_id: str) -> None:
        try:
            await self._store.write(tokens.used, [token_id], self._store.statement_context)
        except SemelError as error:
            _log.warning("the last use of a token could not be stored: %s", error)

    async def close(self) -> None:
        """Wait for pending writes."""
        await asyncio.gather(*self._writes)


class AuthMiddleware:
    """Authenticates every request, and checks its body, before it reaches the handlers."""

    def __init__(
        self,
        inner: Any,
        auth: Authenticator,
        settings: Settings,
        ensure_open: Callable[[], Awaitable[None]],
        error_page: Callable[[Exception, Scope], ErrorPage] | None = None,
    ) -> None:
        self._inner = inner
        self._auth = auth
        self._settings = settings
        self._ensure_open = ensure_open
        self._error_page = error_page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":  # the service has none
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
                await self._ensure_open()
            if OPEN.fullmatch(path) is None:
                await self._authenticate(path, scope)
            _require_one_key(scope)
            whole = await body.read_all()
        except ClientGone:
            with suppress(OSError):  # without a response, servers send 500 to a client that only stopped sending
                ended = ApiError(400, "INVALID_REQUEST", "the body ended before it was complete")
                await refuse(ended, scope, send, self._settings.docs_url)
            return
        except SemelError as error:
            await body.drain()
            await self._refuse(error, scope, send)
            return
        await self._inner(scope, whole, send)

    async def _authenticate(self, path: str, scope: Scope) -> None:
        """Put the sender into the scope; there is none yet for the sign-in page."""
        state = scope["state"]
        if not is_page(path):
            state["caller"] = await self._auth.caller(scope)
        elif path != SIGN_IN or not await self._auth.guarded():
            state["by_cookie"] = not headers(scope, b"authorization")
            state["caller"] = await self._auth.from_cookie(scope)
        _require_safe(path, scope)

    async def _refuse(self, error: SemelError, scope: Scope, send: Send) -> None:
        """Respond with a problem; to a browser, with a page."""
        if self._error_page is None or not is_page(path_of(scope)):
            await refuse(error, scope, send, self._settings.docs_url)
            return
        status, fields, content = self._error_page(error, scope)
        raw = [(name.encode(), value.encode("latin-1")) for name, value in fields]
        await send({"type": "http.response.start", "status": status, "headers": raw})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else content})


def _require_safe(path: str, scope: Scope) -> None:
    """Refuse everything that a viewer sends and that may change something, before it reaches a handler."""
    caller: Principal | None = scope["state"].get("caller")
    if caller is not None and caller.role == "viewer" and scope["method"] not in SAFE and path not in FOR_VIEWERS:
        raise ApiError(403, "FORBIDDEN", "the token has the role viewer, which reads and changes nothing")


def _bodiless(send: Send) -> Send:
    """Respond to HEAD as to GET, without the body."""

    async def head(message: Any) -> None:
        await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

    return head


async def refuse(error: Exception, scope: Scope, send: Send, docs_url: str | None) -> None:
    """Respond with a problem. The connection is closed if the rest of the body would have to be read."""
    problem = problem_of(error)
    content, fields = body_of(problem, docs_url)
    fields["content-length"] = str(len(content))
    if problem.status in (408, 413) and scope.get("http_version", "1.1").startswith("1"):
        fields["connection"] = "close"
    raw = [(name.encode(), value.encode()) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": problem.status, "headers": raw})
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else content})


def _require_one_key(scope: Scope) -> None:
    keys = {value for name, value in scope["headers"] if name == b"idempotency-key"}
    if len(keys) > 1:
        raise ApiError(400, "INVALID_REQUEST", "the request has two different Idempotency-Key headers")
    if not all(key.isascii() for key in keys):
        detail = "the header Idempotency-Key must be ASCII; other keys go into the body, as idempotency_key"
        raise ApiError(400, "INVALID_REQUEST", detail)


def path_of(scope: Scope) -> str:
    """The path below the mount point of the service."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path.removeprefix(root) if root else path
