"""What both middlewares share: the decisions that need no socket."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar
from urllib.parse import parse_qs, quote

from msgspec import Struct

from semel._validation import checked_fingerprint, checked_key
from semel.errors import InvalidRequest
from semel.http.body import SpooledBody
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
    size,
    tenant_name,
    token,
    url_of,
)
from semel.http.protocol import (
    BadKey,
    differ_by_credentials,
    expires_header,
    kept_headers,
    key_of,
    operation_of,
    print_at,
    print_by,
    print_of_bytes,
    print_of_json,
    replay,
    replay_marks,
    scope_of,
    shown_to,
)
from semel.http.refusals import DIALECTS, Reason, refuse
from semel.once.client import AsyncOnce, Once
from semel.once.guard import is_async
from semel.once.requests import CallRequest
from semel.types import Claim, InFlight, Mismatch, Record, Replay, Response, Unknown, Verdict

AnyOnce = TypeVar("AnyOnce", Once, AsyncOnce)
CLAIM_KEY = "semel.claim"
"""Under this name a middleware leaves the claim in the context of the request, for another one within."""
RETRY_SOON = 1.0
WHOLE_SCOPE = "http"
"""What keys belong to that are valid for one endpoint, whichever it is."""
_MAX_REQUEST_BYTES = 10 << 20
_log = logging.getLogger("semel")


class Request(Struct):
    """What a middleware sees of a request before its body."""

    method: str
    path: str
    query: bytes
    context: Context
    mount: str = ""
    """The beginning of the path that leads to this app, where it is mounted under another."""
    header: Callable[[str], str | None] = lambda _: None
    """A header by its name in lower case; several are joined by commas, cookies by semicolons."""

    def credentials(self, names: Iterable[str]) -> bytes:
        """What the request has of these headers and cookies; nothing where it has none of them."""
        return "".join(f"{name}={value}\n" for name in names for value in self._values(name)).encode("utf-8", "replace")

    def _values(self, name: str) -> list[str]:
        if not name.startswith("cookie:"):
            value = self.header(name)
            return [] if value is None else [value.strip()]
        pairs = [pair.strip().partition("=") for pair in (self.header("cookie") or "").split(";")]
        return [value for cookie, _, value in pairs if cookie == name.removeprefix("cookie:")]


class MiddlewareCore(Generic[AnyOnce]):
    """The options of a middleware, checked, and what follows from them."""

    def __init__(self, face: type[AnyOnce], once: Any, options: MiddlewareOptions) -> None:
        if unknown := options.keys() - MiddlewareOptions.__annotations__.keys():
            known = ", ".join(sorted(MiddlewareOptions.__annotations__))
            raise InvalidRequest(f"{', '.join(sorted(unknown))}: not an option of the middleware; it has {known}")
        policy, paths, exclude = (
            options.get("policy"),
            options.get("paths"),
            several("exclude", options.get("exclude", ())),
        )
        scope, fingerprint, on_event = options.get("scope"), options.get("fingerprint", "body"), options.get("on_event")
        self.policy = policy_of(policy, options.get("ttl"))
        self.dialect = DIALECTS[self.policy.dialect]
        methods = several("methods", options.get("methods", self.dialect.methods))
        self.methods = frozenset(token("methods", method).upper() for method in methods)
        self.header = token("header", options.get("header", "Idempotency-Key"))
        self.required = options.get("required", False)
        if not isinstance(self.required, bool):
            raise InvalidRequest(f"required= is True or False, not {self.required!r:.80}")
        self._keep = kept_statuses(options.get("keep"))
        if self._keep is not None:
            self.policy = self.policy.but(on_error="keep" if self._keep(500) else "release")
        self.releasing = self.policy.but(on_error="release")
        self._docs_url = url_of("docs_url", options.get("docs_url"))
        self.max_request_bytes = size("max_request_bytes", options.get("max_request_bytes", _MAX_REQUEST_BYTES))
        self.max_response_bytes = size(
            "max_response_bytes", options.get("max_response_bytes", self.policy.max_response_bytes)
        )
        self.body_in_memory = size("body_in_memory", options.get("body_in_memory", 1 << 20)) or 0
        status_path = options.get("status_path")
        self.status_path = None if status_path is None else path_of("status_path", status_path).rstrip("/")
        self._tenant = function("tenant", options.get("tenant"))
        self._credentials = credential_names(options.get("credentials", ("Authorization",)))
        self._tenant_decides = "credentials" not in options
        self._scope = checked_key("scope", scope) if isinstance(scope, str) else function("scope", scope)
        self._fingerprint = fingerprint
        if is_async(fingerprint):  # type: ignore[arg-type]  # a text is not
            raise InvalidRequest("fingerprint= takes a plain function, not an async one")
        if fingerprint not in ("body", "json") and not callable(fingerprint):
            raise InvalidRequest(
                f'fingerprint= is "body", "json" or a function of request and body, not {fingerprint!r}'
            )
        self.covers = matcher(paths, exclude)
        self.everywhere = paths is None and not exclude
        self._name = checked_key("name", options.get("name", "http"))
        self.owned = not isinstance(once, Once | AsyncOnce)
        if self.owned:
            self.once: AnyOnce = face(once, policy=self.policy, on_event=on_event)
        elif not isinstance(once, face):
            raise InvalidRequest(f"this middleware takes {face.__name__} or a URL, not {type(once).__name__}")
        else:
            self.once = once
            if on_event is not None:
                self.once._engine.hear(on_event)
        self.engine = self.once._engine

    def refuse(
        self, reason: Reason, key: str | None, *, retry_after: float | None = None, status_url: str | None = None
    ) -> Response:
        """The response that says why not."""
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
        """The key of a request, or the refusal of one that has none."""
        try:
            return key_of(values, self.dialect)
        except BadKey as bad:
            return self.refuse("invalid", bad.shown)

    def unavailable(self, key: str) -> Response:
        """The refusal while the store, or the disk for large bodies, cannot be used."""
        return self.refuse("unavailable", key, retry_after=RETRY_SOON)

    def lost(self, key: str) -> Response:
        """What a request is told whose claim was taken over while it worked: the other one's answer will count."""
        return self.refuse("processing", key, retry_after=RETRY_SOON)

    def failed(self, claim: Claim) -> Response:
        """What a request is told whose exception is kept: the same as every repetition."""
        refusal: Response = self.refuse("failed", claim.key)
        return Response(refusal.status, [*refusal.headers, expires_header(claim.expires_us)], refusal.body)

    @property
    def reads_bodies(self) -> bool:
        """Whether the fingerprint needs more of a body than its hash."""
        return self._fingerprint != "body"

    def print_of(self, request: Request, body: SpooledBody) -> str:
        """The fingerprint of what is asked, whoever asks it."""
        if self._fingerprint == "body":
            print_ = print_of_bytes(body.digest, request.query)
        elif self._fingerprint == "json":
            print_ = print_of_json(body.whole(), body.digest, request.query)
        else:
            print_ = checked_fingerprint(self._fingerprint(request.context, body.whole()))
        if self._scope is None and self.dialect.whole_scope:
            return print_at(print_, operation_of(request.method, request.path))
        return print_

    def ask(self, key: str, request: Request, print_: str) -> CallRequest:
        """What the request asks of the engine."""
        tenant = self.tenant_of(request.context)
        scope = self.scope_of(tenant, request.context, request.method, request.path)
        print_ = print_by(print_, self._credentials_of(tenant, request), scope, key)
        return CallRequest(key, scope, print_, self.policy, "response", door="http", label=self._name)

    def _credentials_of(self, tenant: str | None, request: Request) -> bytes:
        """What tells this caller from others, where the tenant does not."""
        return b"" if self._tenant_decides and tenant is not None else request.credentials(self._credentials)

    def tenant_of(self, context: Context) -> str | None:
        """Whose request it is, if that was to be asked."""
        return None if self._tenant is None else tenant_name(self._tenant(context))

    def scope_of(self, tenant: str | None, context: Context, method: str, path: str) -> str:
        """The scope of a request's key."""
        name = self._scope
        if name is None:
            name = WHOLE_SCOPE if self.dialect.whole_scope else operation_of(method, path)
        return scope_of(tenant, name if isinstance(name, str) else name(context))

    @staticmethod
    def within(request: Request, asking: CallRequest) -> bool:
        """The same request passed another middleware before this one, which holds its key."""
        held = request.context.get(CLAIM_KEY)
        return held is not None and (held.scope, held.key) == (asking.scope, asking.key)

    def answer(self, verdict: Verdict, asking: CallRequest, request: Request) -> Response:
        """What a request gets that is not carried out."""
        key = asking.key
        match verdict:
            case Replay(outcome):
                found = replay(outcome, request.header("accept-encoding"), self.max_response_bytes)
                if isinstance(found, Response):
                    return found
                refusal = self.refuse(found, key)
                return Response(refusal.status, refusal.headers + replay_marks(outcome), refusal.body)
            case InFlight(left, _, age):
                # What has lasted long is likely to last on; what began just now may be done in a moment.
                url = self._status_url(key, request)
                return self.refuse("processing", key, retry_after=min(age, left), status_url=url)
            case Mismatch(recorded):
                if differ_by_credentials(recorded, asking.fingerprint):
                    # Said to the log alone: whoever tries out bodies under another's key must not learn which was it.
                    _log.info("the key %r was first used with other credentials (see the option credentials=)", key)
                return self.refuse("conflict", key)
            case Unknown():
                return self.refuse("unknown", key, status_url=self._status_url(key, request))
        raise AssertionError(verdict)

    def keeps(self, status: int) -> bool:
        """Whether a response is the key's outcome, or one after which the request may be tried again."""
        if self._keep is not None:
            return bool(self._keep(status))
        began = status not in self.dialect.not_begun
        return began and (status < self.dialect.fails_from or self.policy.on_error == "keep")

    def _status_url(self, key: str, request: Request) -> str | None:
        if self.status_path is None:
            return None
        path = quote(request.path, errors="surrogatepass")
        where = quote(request.mount + self.status_path, errors="surrogatepass")
        return f"{where}/{request.method}{path}?key={quote(key, safe='')}"

    def status_asked(self, request: Request) -> tuple[str, str] | None:
        """Scope and key that a request for ``status_path`` asks about; None when it is not one."""
        asked = request.path.removeprefix(request.mount)
        if request.method != "GET" or not asked.startswith(f"{self.status_path}/"):
            return None
        method, _, rest = asked.removeprefix(f"{self.status_path}/").partition("/")
        keys = parse_qs(request.query.decode("latin-1")).get("key", [])
        if len(keys) != 1:
            return None
        there = {
            **request.context,
            "method": method,
            "path": f"/{rest}",
            "REQUEST_METHOD": method,
            "PATH_INFO": f"/{rest}",
            "SCRIPT_NAME": "",
        }
        return self.scope_of(self.tenant_of(there), there, method, f"/{rest}"), keys[0]

    def status(self, record: Record | None, key: str, request: Request) -> Response:
        """What is known of a key, to those who may know it."""
        credentials = self._credentials_of(self.tenant_of(request.context), request)
        if record is None or not shown_to(record.fingerprint, credentials, record.scope, key):
            return Response.json({"idempotency_key": key, "status": "absent"}, 404)
        said = {
            "idempotency_key": key,
            "status": record.status,
            "created_at": record.created_at,
            "expires_at": record.expires_at,
            "lease_left": record.lease_left,
        }
        return Response.json(said)


class ResponseRecorder:
    """Notes a response while it passes."""

    def __init__(self, door: MiddlewareCore[Any], claim: Claim) -> None:
        self._keeps = door.keeps
        self._limit = door.max_response_bytes
        self._expires = expires_header(claim.expires_us)
        self._parts: list[bytes] = []
        self._size = 0
        self._length: int | None = None
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []

    def begin(self, status: Any, headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """The response starts; the headers to send. What no server could send is refused, so that it is not kept."""
        if not isinstance(status, int) or isinstance(status, bool) or not 200 <= status <= 599:
            raise ValueError(f"the app sent the status {status!r}; it must be a whole number from 200 to 599")
        self.headers = [(name, value) for name, value in headers]
        if not all(isinstance(part, bytes) for pair in self.headers for part in pair):
            raise TypeError("the app sent a header that is not a pair of bytes")
        self.status = int(status)  # it may be an HTTPStatus
        self._parts, self._size = [], 0
        found = [value for name, value in self.headers if name.lower() == b"content-length"]
        self._length = int(found[0]) if found and found[0].isdigit() else None
        return [*self.headers, self._expires] if self._keeps(status) else self.headers

    def add(self, chunk: bytes) -> bool:
        """Note a chunk; True when the client would have all with it, so that it must wait for the outcome."""
        if not self.status:
            raise RuntimeError("the app sent a part of the response before its start")
        if not isinstance(chunk, bytes | bytearray | memoryview):
            raise TypeError(f"the app sent {type(chunk).__name__} instead of bytes")
        self._size += len(chunk)
        if self._limit is None or self._size <= self._limit:
            self._parts.append(bytes(chunk))
        else:
            self._parts.clear()
        return self._length is not None and self._size >= self._length

    @property
    def whole(self) -> bool:
        """The app sent as much as it said it would."""
        return self._length is None or self._size >= self._length or self.status in (204, 304)

    @property
    def over(self) -> bool:
        """The response is larger than what is kept."""
        return self._limit is not None and self._size > self._limit

    @property
    def kept(self) -> bool:
        """The response, or that there was one too large to be kept, is the key's outcome."""
        return self._keeps(self.status) and (self.whole or self.over)

    @property
    def response(self) -> Response:
        """What is stored."""
        return Response(self.status, kept_headers(self.headers), None if self.over else b"".join(self._parts))
