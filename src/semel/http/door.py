"""What both doors share: the decisions that need no socket."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar
from urllib.parse import parse_qs, quote

from msgspec import Struct

from semel.errors import InvalidRequest
from semel.http.body import Body
from semel.http.dialects import DIALECTS, refuse
from semel.http.options import (
    Context,
    Options,
    function,
    matcher,
    path_of,
    policy_of,
    several,
    size,
    tenant_name,
    token,
)
from semel.http.protocol import (
    BadKey,
    expires_header,
    kept_headers,
    key_of,
    operation_of,
    print_of_bytes,
    print_of_json,
    replay,
    scope_of,
)
from semel.model import Claim, InFlight, Mismatch, Record, Replay, Response, Unknown, Verdict
from semel.once.asking import Asking, name_of
from semel.once.calls import is_async
from semel.once.faces import AsyncOnce, Once

Face = TypeVar("Face", Once, AsyncOnce)
HELD = "semel.claim"
"""Under this name a door leaves the claim in the request's context, for a door within."""
RETRY_SOON = 1.0


class Request(Struct):
    """What a door sees of a request before its body."""

    method: str
    path: str
    query: bytes
    context: Context
    mount: str = ""
    """The beginning of the path that leads to this app, where it is mounted under another."""


class Door(Generic[Face]):
    """The options of a middleware, checked, and what follows from them."""

    def __init__(self, face: type[Face], once: Any, options: Options) -> None:
        if unknown := options.keys() - Options.__annotations__.keys():
            known = ", ".join(sorted(Options.__annotations__))
            raise InvalidRequest(f"{', '.join(sorted(unknown))}: not an option of the middleware; it has {known}")
        policy, paths, exclude = (
            options.get("policy"),
            options.get("paths"),
            several("exclude", options.get("exclude", ())),
        )
        scope, fingerprint, on_event = options.get("scope"), options.get("fingerprint", "body"), options.get("on_event")
        self.policy = policy_of(policy, options.get("ttl"))
        self.dialect = DIALECTS[self.policy.dialect]
        self.methods = frozenset(
            token("methods", method).upper() for method in several("methods", options.get("methods", ("POST",)))
        )
        self.header = token("header", options.get("header", "Idempotency-Key"))
        self.required = options.get("required", False)
        if not isinstance(self.required, bool):
            raise InvalidRequest(f"required= is True or False, not {self.required!r:.80}")
        self.max_response_bytes = size("max_response_bytes", options.get("max_response_bytes"))
        self.body_in_memory = size("body_in_memory", options.get("body_in_memory", 1 << 20)) or 0
        status_path = options.get("status_path")
        self.status_path = None if status_path is None else path_of("status_path", status_path).rstrip("/")
        self._tenant = function("tenant", options.get("tenant"))
        self._scope = name_of("scope", scope) if isinstance(scope, str) else function("scope", scope)
        self._fingerprint = fingerprint
        if is_async(fingerprint):  # type: ignore[arg-type]  # a text is not
            raise InvalidRequest("fingerprint= takes a plain function, not an async one")
        if fingerprint not in ("body", "json") and not callable(fingerprint):
            raise InvalidRequest(
                f'fingerprint= is "body", "json" or a function of request and body, not {fingerprint!r}'
            )
        self.covers = matcher(paths, exclude)
        self.everywhere = paths is None and not exclude
        self._name = name_of("name", options.get("name", "http"))
        self.owned = not isinstance(once, Once | AsyncOnce)
        if self.owned:
            self.once: Face = face(once, policy=self.policy, on_event=on_event)
        elif not isinstance(once, face):
            raise InvalidRequest(f"this middleware takes {face.__name__} or a URL, not {type(once).__name__}")
        else:
            self.once = once
            if on_event is not None:
                self.once._engine.hear(on_event)
        self.engine = self.once._engine

    def key(self, values: Sequence[str]) -> str | Response:
        """The key of a request, or the refusal of one that has none."""
        try:
            return key_of(values, self.dialect)
        except BadKey as bad:
            return self.invalid(bad.shown)

    def invalid(self, shown: str) -> Response:
        """The refusal of what cannot be a key."""
        return refuse(self.policy, "invalid", shown)

    def missing(self) -> Response:
        """The refusal of a request without the key that is required."""
        return refuse(self.policy, "missing", None)

    def incomplete(self, key: str) -> Response:
        """The refusal of a request whose body ended early."""
        return refuse(self.policy, "incomplete", key)

    def unavailable(self, key: str) -> Response:
        """The refusal while the store, or the disk for large bodies, cannot be used."""
        return refuse(self.policy, "unavailable", key, retry_after=RETRY_SOON)

    def lost(self, key: str) -> Response:
        """What a request is told whose claim was taken over while it worked: the other one's answer will count."""
        return refuse(self.policy, "processing", key, retry_after=RETRY_SOON)

    def ask(self, key: str, request: Request, body: Body) -> Asking:
        """What the request asks of the engine."""
        if self._fingerprint == "body":
            print_ = print_of_bytes(body.digest, request.query)
        elif self._fingerprint == "json":
            print_ = print_of_json(body.whole(), body.digest, request.query)
        else:
            print_ = self._fingerprint(request.context, body.whole())
        scope = self.scope_of(request.context, request.method, request.path)
        return Asking(key, scope, print_, self.policy, "response", door="http", label=self._name)

    def scope_of(self, context: Context, method: str, path: str) -> str:
        """The scope of a request's key."""
        name = self._scope
        operation = operation_of(method, path) if name is None else name if isinstance(name, str) else name(context)
        return scope_of(None if self._tenant is None else tenant_name(self._tenant(context)), operation)

    @staticmethod
    def within(request: Request, asking: Asking) -> bool:
        """The same request passed a door before this one, which holds its key."""
        held = request.context.get(HELD)
        return held is not None and (held.scope, held.key) == (asking.scope, asking.key)

    def answer(self, verdict: Verdict, key: str, request: Request) -> Response:
        """What a request gets that is not carried out."""
        match verdict:
            case Replay(outcome):
                return replay(outcome, self.policy, key)
            case InFlight(left, _, age):
                # What has lasted long is likely to last on; what began just now may be done in a moment.
                url = self._status_url(key, request)
                return refuse(self.policy, "processing", key, retry_after=min(age, left), status_url=url)
            case Mismatch():
                return refuse(self.policy, "conflict", key)
            case Unknown():
                return refuse(self.policy, "unknown", key, status_url=self._status_url(key, request))
        raise AssertionError(verdict)

    def keeps(self, status: int) -> bool:
        """Whether a response is the key's outcome, or a failure after which the request may be tried again."""
        return status < self.dialect.fails_from or self.policy.on_error == "keep"

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
            "method": method,
            "path": f"/{rest}",
            "REQUEST_METHOD": method,
            "PATH_INFO": f"/{rest}",
            "SCRIPT_NAME": "",
        }
        return self.scope_of({**request.context, **there}, method, f"/{rest}"), keys[0]

    @staticmethod
    def status(record: Record | None, key: str) -> Response:
        """What is known of a key."""
        if record is None:
            return Response.json({"idempotency_key": key, "status": "absent"}, 404)
        said = {
            "idempotency_key": key,
            "status": record.status,
            "created_at": record.created_at,
            "expires_at": record.expires_at,
            "lease_left": record.lease_left,
        }
        return Response.json(said)


class Recorder:
    """Notes a response while it passes."""

    def __init__(self, door: Door[Any], claim: Claim) -> None:
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
    def response(self) -> Response:
        """What is stored."""
        return Response(self.status, kept_headers(self.headers), None if self.over else b"".join(self._parts))
