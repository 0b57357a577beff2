"""What the ASGI and the WSGI middleware share: every decision about a request, and what becomes of its claim."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Generic, ParamSpec, TypeAlias, TypeVar
from urllib.parse import parse_qs, quote

from msgspec import Struct

from semel._validation import checked_bool, checked_bytes, checked_fingerprint, checked_key
from semel.errors import ClaimLost, InvalidRequest, StoreUnavailable
from semel.http.body import BodyTooLarge, SpooledBody
from semel.http.options import (
    Context,
    MiddlewareOptions,
    credential_names,
    function,
    kept_statuses,
    matcher,
    path_of,
    policy_of,
    several,
    tenant_name,
    token,
    url_of,
)
from semel.http.protocol import (
    BadKey,
    add_credentials,
    add_operation,
    differ_by_credentials,
    expires_header,
    fingerprint_of_bytes,
    fingerprint_of_json,
    is_visible_to,
    key_of,
    operation_of,
    replay,
    replay_headers,
    scope_of,
    stored_headers,
)
from semel.http.refusals import DIALECTS, Reason, refuse
from semel.once.client import AsyncOnce, Once
from semel.once.guard import is_async
from semel.once.requests import CallRequest
from semel.types import Claim, Granted, InFlight, Mismatch, Record, Replay, Response, Unknown, Verdict

P = ParamSpec("P")
R = TypeVar("R")
AnyOnce = TypeVar("AnyOnce", Once, AsyncOnce)
Admission: TypeAlias = Response | tuple[Claim, CallRequest] | None
"""A response without the app; the claim to call the app under; or None to call the app without protection."""

CLAIM_KEY = "semel.claim"
"""The claim's name in the request's context, for a second middleware around the same app."""
RETRY_SOON = 1.0
SHARED_SCOPE = "http"
"""The scope of keys that are shared by all endpoints."""
_MAX_REQUEST_BYTES = 10 << 20
_SLOW_BYTES = 1 << 16
"""Hashing, decoding or parsing more bytes than this would block the event loop for a noticeable time."""
_log = logging.getLogger("semel")


class Request(Struct):
    """A request without its body."""

    method: str
    path: str
    query: bytes
    context: Context
    mount: str = ""
    """The prefix of the path if this app is mounted under another."""
    header: Callable[[str], str | None] = lambda _: None
    """Returns a header by its lower-case name. Repeated headers are joined with commas, cookies with semicolons."""

    def credentials(self, names: Iterable[str]) -> bytes:
        """The values of these headers and cookies; empty if the request has none of them."""
        return "".join(f"{name}={value}\n" for name in names for value in self._values(name)).encode("utf-8", "replace")

    def _values(self, name: str) -> list[str]:
        if not name.startswith("cookie:"):
            value = self.header(name)
            return [] if value is None else [value.strip()]
        pairs = [pair.strip().partition("=") for pair in (self.header("cookie") or "").split(";")]
        return [value for cookie, _, value in pairs if cookie == name.removeprefix("cookie:")]


class MiddlewareCore(Generic[AnyOnce]):
    """A middleware's checked options, and the decisions that follow from them."""

    def __init__(self, once_class: type[AnyOnce], once: Any, options: MiddlewareOptions) -> None:
        if unknown := options.keys() - MiddlewareOptions.__annotations__.keys():
            known = ", ".join(sorted(MiddlewareOptions.__annotations__))
            raise InvalidRequest(f"{', '.join(sorted(unknown))}: not an option of the middleware; it has {known}")
        self._choose_policy(options)
        self._choose_requests(options)
        self._choose_identity(options)
        self._docs_url: str | None = url_of("docs_url", options.get("docs_url"))
        self.max_request_bytes: int | None = checked_bytes(
            "max_request_bytes", options.get("max_request_bytes", _MAX_REQUEST_BYTES)
        )
        self.max_response_bytes = checked_bytes(
            "max_response_bytes", options.get("max_response_bytes", self.policy.max_response_bytes)
        )
        self.body_in_memory = checked_bytes("body_in_memory", options.get("body_in_memory", 1 << 20)) or 0
        self._name = checked_key("name", options.get("name", "http"))
        on_event = options.get("on_event")
        self.owned = not isinstance(once, Once | AsyncOnce)
        if self.owned:
            self.once: AnyOnce = once_class(once, policy=self.policy, on_event=on_event)
        elif not isinstance(once, once_class):
            raise InvalidRequest(f"this middleware takes {once_class.__name__} or a URL, not {type(once).__name__}")
        else:
            self.once = once
            if on_event is not None:
                self.once._engine.add_hook(on_event)
        self.engine = self.once._engine
        self._has_loop = once_class is AsyncOnce

    def _choose_policy(self, options: MiddlewareOptions) -> None:
        self.policy = policy_of(options.get("policy"), options.get("ttl"))
        self.dialect = DIALECTS[self.policy.dialect]
        self._keep = kept_statuses(options.get("keep"))
        if self._keep is not None:
            self.policy = self.policy.but(on_error="keep" if self._keep(500) else "release")
        self.releasing = self.policy.but(on_error="release")

    def _choose_requests(self, options: MiddlewareOptions) -> None:
        methods = several("methods", options.get("methods", self.dialect.methods))
        self.methods = frozenset(token("methods", method).upper() for method in methods)
        self.header = token("header", options.get("header", "Idempotency-Key"))
        self.required = checked_bool("required", options.get("required", False))
        paths, exclude = options.get("paths"), several("exclude", options.get("exclude", ()))
        self.covers = matcher(paths, exclude)
        self.everywhere = paths is None and not exclude
        status_path = options.get("status_path")
        self.status_path = None if status_path is None else path_of("status_path", status_path).rstrip("/")

    def _choose_identity(self, options: MiddlewareOptions) -> None:
        self._tenant = function("tenant", options.get("tenant"))
        self._credentials = credential_names(options.get("credentials", ("Authorization",)))
        self._tenant_suffices = "credentials" not in options
        scope = options.get("scope")
        self._scope = checked_key("scope", scope) if isinstance(scope, str) else function("scope", scope)
        self._fingerprint = options.get("fingerprint", "body")
        if is_async(self._fingerprint):  # type: ignore[arg-type]  # a text is not
            raise InvalidRequest("fingerprint= takes a plain function, not an async one")
        if self._fingerprint not in ("body", "json") and not callable(self._fingerprint):
            raise InvalidRequest(
                f'fingerprint= is "body", "json" or a function of request and body, not {self._fingerprint!r}'
            )

    def refuse(
        self, reason: Reason, key: str | None, *, retry_after: float | None = None, status_url: str | None = None
    ) -> Response:
        """The response to a request that is refused."""
        return refuse(
            self.policy,
            reason,
            key,
            header=self.header,
            docs_url=self._docs_url,
            retry_after=retry_after,
            status_url=status_url,
        )

    def key(self, values: Sequence[str]) -> str | Response:
        """The key in the header's values, or the refusal if there is no valid one."""
        if not values:
            return self.refuse("missing", None)
        try:
            return key_of(values, self.dialect)
        except BadKey as bad:
            return self.refuse("invalid", bad.shown)

    def unavailable(self, key: str) -> Response:
        """The refusal while the store, or the disk for large bodies, is unavailable."""
        return self.refuse("unavailable", key, retry_after=RETRY_SOON)

    def claim_lost_response(self, key: str) -> Response:
        """The refusal if another request took over the claim: its response will be the key's outcome."""
        return self.refuse("processing", key, retry_after=RETRY_SOON)

    def failed_response(self, claim: Claim) -> Response:
        """The response if the app's exception is the key's outcome: the same as for every repetition."""
        refusal: Response = self.refuse("failed", claim.key)
        return Response(refusal.status, [*refusal.headers, expires_header(claim.expires_us)], refusal.body)

    async def admit(
        self, key: str, request: Request, body: SpooledBody, read: Callable[[], Awaitable[bool]]
    ) -> Admission:
        """Read the body and claim the key. ``read`` returns False if the body is incomplete."""
        try:
            if not await read():
                return self.refuse("incomplete", key)
            body.require_room()
            slow = self._fingerprint != "body" and body.size > _SLOW_BYTES
            call = self.request_for(key, request, await self._off_loop(slow, self.fingerprint_of, request, body))
            if self.already_claimed(request, call):
                return None
            verdict = await self.engine.claim_for(call)
        except (StoreUnavailable, OSError) as error:  # OSError: the disk is full, and the body is large
            _log.warning("a request with the key %r was refused: %s", key, error)
            return self.unavailable(key)
        except BodyTooLarge:
            return self.refuse("too_large", key)
        if verdict is None:
            return None
        if isinstance(verdict, Granted):
            return verdict.claim, call
        return await self._off_loop(_is_slow(verdict), self.answer, verdict, call, request)

    async def _off_loop(self, slow: bool, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call it; in a thread if it would block the event loop."""
        if slow and self._has_loop:
            return await asyncio.to_thread(work, *args, **kwargs)
        return work(*args, **kwargs)

    def fingerprint_of(self, request: Request, body: SpooledBody) -> str:
        """The fingerprint of a request, without the caller's credentials."""
        if self._fingerprint == "body":
            found = fingerprint_of_bytes(body.digest, request.query)
        elif self._fingerprint == "json":
            found = fingerprint_of_json(body.whole(), body.digest, request.query)
        else:
            found = checked_fingerprint(self._fingerprint(request.context, body.whole()))
        if self._scope is None and self.dialect.shared_scope:
            return add_operation(found, operation_of(request.method, request.path))
        return found

    def request_for(self, key: str, request: Request, fingerprint: str) -> CallRequest:
        """The request to the engine."""
        tenant = self.tenant_of(request.context)
        scope = self.scope_of(tenant, request.context, request.method, request.path)
        fingerprint = add_credentials(fingerprint, self._credentials_of(tenant, request), scope, key)
        return CallRequest(key, scope, fingerprint, self.policy, "response", door="http", label=self._name)

    def _credentials_of(self, tenant: str | None, request: Request) -> bytes:
        """What distinguishes this caller from others if the tenant does not."""
        return b"" if self._tenant_suffices and tenant is not None else request.credentials(self._credentials)

    def tenant_of(self, context: Context) -> str | None:
        """The tenant, if the option ``tenant`` is set."""
        return None if self._tenant is None else tenant_name(self._tenant(context))

    def scope_of(self, tenant: str | None, context: Context, method: str, path: str) -> str:
        """The scope of a request's key."""
        name = self._scope
        if name is None:
            name = SHARED_SCOPE if self.dialect.shared_scope else operation_of(method, path)
        return scope_of(tenant, name if isinstance(name, str) else name(context))

    @staticmethod
    def already_claimed(request: Request, call: CallRequest) -> bool:
        """Whether an outer middleware has claimed the key for this same request."""
        claim = request.context.get(CLAIM_KEY)
        return claim is not None and (claim.scope, claim.key) == (call.scope, call.key)

    def answer(self, verdict: Verdict, call: CallRequest, request: Request) -> Response:
        """The response to a request for which the app is not called."""
        key = call.key
        match verdict:
            case Replay(outcome):
                found = replay(outcome, request.header("accept-encoding"), self.max_response_bytes)
                if isinstance(found, Response):
                    return found
                refusal = self.refuse(found, key)
                return Response(refusal.status, refusal.headers + replay_headers(outcome), refusal.body)
            case InFlight(left, _, age):
                # A request that has run for long will likely run on; one that began just now may end in a moment.
                url = self._status_url(key, request)
                return self.refuse("processing", key, retry_after=min(age, left), status_url=url)
            case Mismatch(recorded):
                if differ_by_credentials(recorded, call.fingerprint):
                    # Only logged: a caller who guesses bodies under somebody's key must not learn which one was right.
                    _log.info("the key %r was first used with other credentials (see the option credentials=)", key)
                return self.refuse("conflict", key)
            case Unknown():
                return self.refuse("unknown", key, status_url=self._status_url(key, request))
        raise AssertionError(verdict)

    def is_final(self, status: int) -> bool:
        """Whether a response with this status is the key's outcome; otherwise the request may be tried again."""
        if self._keep is not None:
            return bool(self._keep(status))
        began = status not in self.dialect.not_begun
        return began and (status < self.dialect.fails_from or self.policy.on_error == "keep")

    async def status_response(self, request: Request) -> Response | None:
        """The status of a key; None if the request is not for ``status_path``."""
        asked = self.status_asked(request)
        if asked is None:
            return None
        scope, key = asked
        try:
            record = await self.engine.get(key, scope=scope)
        except StoreUnavailable:
            return self.unavailable(key)
        except InvalidRequest:
            return self.refuse("invalid", key)
        return self._status(record, key, request)

    def _status_url(self, key: str, request: Request) -> str | None:
        if self.status_path is None:
            return None
        path = quote(request.path, errors="surrogatepass")
        where = quote(request.mount + self.status_path, errors="surrogatepass")
        return f"{where}/{request.method}{path}?key={quote(key, safe='')}"

    def status_asked(self, request: Request) -> tuple[str, str] | None:
        """Scope and key of a request for ``status_path``; None for any other request."""
        asked = request.path.removeprefix(request.mount)
        if request.method != "GET" or not asked.startswith(f"{self.status_path}/"):
            return None
        method, _, rest = asked.removeprefix(f"{self.status_path}/").partition("/")
        keys = parse_qs(request.query.decode("latin-1")).get("key", [])
        if len(keys) != 1:
            return None
        path = f"/{rest}"
        of_asgi = {"method": method, "path": path}
        of_wsgi = {"REQUEST_METHOD": method, "PATH_INFO": path, "SCRIPT_NAME": ""}
        context = {**request.context, **of_asgi, **of_wsgi}
        return self.scope_of(self.tenant_of(context), context, method, path), keys[0]

    def _status(self, record: Record | None, key: str, request: Request) -> Response:
        credentials = self._credentials_of(self.tenant_of(request.context), request)
        if record is None or not is_visible_to(record.fingerprint, credentials, record.scope, key):
            return Response.json({"idempotency_key": key, "status": "absent"}, 404)
        status = {
            "idempotency_key": key,
            "status": record.status,
            "created_at": record.created_at,
            "expires_at": record.expires_at,
            "lease_left": record.lease_left,
        }
        return Response.json(status)


class ResponseRecorder:
    """Records a response while it is sent."""

    def __init__(self, core: MiddlewareCore[Any], claim: Claim) -> None:
        self._is_final = core.is_final
        self._limit = core.max_response_bytes
        self._expires = expires_header(claim.expires_us)
        self._parts: list[bytes] = []
        self._size = 0
        self._length: int | None = None
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []

    def begin(self, status: Any, headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """Record the start, and return the headers to send. Raises for a start that no server could send."""
        if not isinstance(status, int) or isinstance(status, bool) or not 200 <= status <= 599:
            raise ValueError(f"the app sent the status {status!r}; it must be a whole number from 200 to 599")
        self.headers = [(name, value) for name, value in headers]
        if not all(isinstance(part, bytes) for pair in self.headers for part in pair):
            raise TypeError("the app sent a header that is not a pair of bytes")
        self.status = int(status)  # it may be an HTTPStatus
        self._parts, self._size = [], 0
        found = [value for name, value in self.headers if name.lower() == b"content-length"]
        self._length = int(found[0]) if found and found[0].isdigit() else None
        return [*self.headers, self._expires] if self._is_final(status) else self.headers

    def add(self, chunk: bytes) -> bool:
        """Record a chunk. True if it ends a body of known length, so it must be held until the outcome is stored."""
        if not self.status:
            raise RuntimeError("the app sent a part of the response before its start")
        if not isinstance(chunk, bytes | bytearray | memoryview):
            raise TypeError(f"the app sent {type(chunk).__name__} instead of bytes")
        self._size += len(chunk)
        if self.too_large:
            self._parts.clear()
        else:
            self._parts.append(bytes(chunk))
        return self._length is not None and self._size >= self._length

    @property
    def complete(self) -> bool:
        """Whether the app has sent as many bytes as its Content-Length says."""
        return self._length is None or self._size >= self._length or self.status in (204, 304)

    @property
    def too_large(self) -> bool:
        """Whether the response is larger than ``max_response_bytes``."""
        return self._limit is not None and self._size > self._limit

    @property
    def is_outcome(self) -> bool:
        """Whether the response, or the fact that it was too large to be kept, is the key's outcome."""
        return self._is_final(self.status) and (self.complete or self.too_large)

    @property
    def response(self) -> Response:
        """The response to store."""
        return Response(self.status, stored_headers(self.headers), None if self.too_large else b"".join(self._parts))


class ClaimedExchange:
    """A request that the app handles under a claim, and its response.

    The response is recorded while it is sent. The part that completes it for the client (the last byte of a known
    length, or the end of the stream) is held back until the outcome is stored. A client that disconnects does not stop
    the app: a retry gets the response. A response becomes the outcome "too large" with the first byte over the limit,
    and is sent without protection from there on.
    """

    def __init__(self, core: MiddlewareCore[Any], claim: Claim, call: CallRequest) -> None:
        self._core, self._claim, self._call = core, claim, call
        self._recorder = ResponseRecorder(core, claim)
        self._started = self._settled = self._ended = False  # started: the client has the first byte

    async def _store_outcome(self) -> Response | None:
        """Store the outcome, or release the key. Returns the response to send instead if the store did not take it."""
        engine, recorder, key = self._core.engine, self._recorder, self._call.key
        self._settled = True
        if not recorder.is_outcome:
            if recorder.complete:
                self._call.policy = self._core.releasing
            await engine.fail(self._claim, self._call, RuntimeError(f"status {recorder.status}"))
            return None
        try:
            await engine.finish(self._claim, self._call, recorder.response)
        except (StoreUnavailable, ClaimLost) as error:
            _log.warning("the response of the request with the key %r is withheld: %s", key, error)
            if self._started:
                raise  # the client has half of it: the server closes the connection, which the client notices
            lost = isinstance(error, ClaimLost)
            return self._core.claim_lost_response(key) if lost else self._core.unavailable(key)
        return None

    async def _store_failure(self, error: BaseException) -> Response | None:
        """Record the app's exception, or release the key. Returns the response if the client can still get one."""
        if self._settled:
            return None
        self._settled = True
        kept = await self._core.engine.fail(self._claim, self._call, error)
        return self._core.failed_response(self._claim) if kept and not self._started else None


def _is_slow(verdict: Verdict) -> bool:
    """Whether the response takes long to make: it is large, or may have to be decompressed."""
    data = verdict.outcome.data if isinstance(verdict, Replay) else None
    return data is not None and (len(data) > _SLOW_BYTES or b"content-encoding" in data)
