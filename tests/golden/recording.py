"""Records HTTP exchanges, with everything masked that differs from one time to the next."""

import json
import re
from typing import Any

import httpx

HEADERS = (
    "allow",
    "cache-control",
    "content-disposition",
    "content-type",
    "etag",
    "idempotency-expires",
    "idempotent-replayed",
    "idempotency-replayed",
    "idempotency-key",
    "link",
    "location",
    "retry-after",
    "www-authenticate",
    "x-content-type-options",
)
"""The headers of a response that callers lean on."""

MASKED = {
    "attempt": "<attempt>",
    "expires_in": "<seconds>",
    "host": "<host>",
    "lease_left": "<seconds>",
    "left": "<seconds>",
    "mean_seconds": "<seconds>",
    "pid": "<pid>",
    "secret": "<secret>",
    "seconds": "<seconds>",
    "token": "<secret>",
    "traceback": "<traceback>",
}
"""Fields whose values are never the same twice."""

_PATTERNS = (
    (re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|\+00:00)"), "<time>"),
    (re.compile(r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun), \d\d \w{3} \d{4} \d\d:\d\d:\d\d GMT"), "<date>"),
    (re.compile(r'"[0-9a-f]{24}"'), '"<tag>"'),
    (re.compile(r"127\.0\.0\.1:\d{2,5}"), "<address>"),
    (re.compile(r"\b(worker|service)-[0-9a-f]{12}\b"), r"<\1>"),
)
_ID = re.compile(r"\b[0-9a-f]{8}-?(?:[0-9a-f]{4}-?){3}[0-9a-f]{12}\b|\b[0-9a-f]{16}\b")


class Recorder:
    """Sends requests one after the other and remembers them. Ids get numbers in the order of their appearance."""

    def __init__(self, address: str) -> None:
        self._client = httpx.Client(base_url=address, timeout=60)
        self._address = address
        self._ids: dict[str, str] = {}
        self._told: list[dict[str, Any]] = []
        self.token: str | None = None

    def send(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: dict[str, str] | None = None,
        content: str | None = None,
    ) -> httpx.Response:
        """Send the request, with a JSON body or with raw content, and record what came back."""
        sent = dict(headers or {})
        if self.token is not None:
            sent.setdefault("Authorization", f"Bearer {self.token}")
        if body is not None:
            response = self._client.request(method, path, json=body, headers=sent)
        else:
            response = self._client.request(method, path, content=content, headers=sent)
        request: dict[str, Any] = {"method": method, "path": self.mask(path)}
        if sent:
            request["headers"] = {name: self._header(name, value) for name, value in sent.items()}
        if body is not None or content is not None:
            request["body"] = self.mask(body) if content is None else content[:80]
        answer: dict[str, Any] = {"status": response.status_code, "headers": self._kept(response)}
        if response.content:
            answer["body"] = self._body(response)
        self._told.append({"request": request, "response": answer})
        return response

    def exchanges(self) -> list[dict[str, Any]]:
        """Everything so far, with its place in the story."""
        return [{"number": number, **each} for number, each in enumerate(self._told, 1)]

    def close(self) -> None:
        """Hang up."""
        self._client.close()

    def mask(self, value: Any, name: str = "") -> Any:
        """The value without what is never the same twice."""
        if isinstance(value, dict):
            return {self.mask(key): self.mask(each, key) for key, each in value.items()}
        if isinstance(value, list):
            return [self.mask(each) for each in value]
        if name in MASKED and value is not None and isinstance(value, str | int | float):
            return MASKED[name]
        return self._text(value) if isinstance(value, str) else value

    def _text(self, text: str) -> str:
        for pattern, mask in _PATTERNS:
            text = pattern.sub(mask, text)
        return _ID.sub(lambda found: self._ids.setdefault(found[0], f"<id {len(self._ids) + 1}>"), text)

    def _header(self, name: str, value: str) -> str:
        return "Bearer <secret>" if name == "Authorization" else self._text(value)

    def _kept(self, response: httpx.Response) -> dict[str, str]:
        return {name: self._text(response.headers[name]) for name in HEADERS if name in response.headers}

    def _body(self, response: httpx.Response) -> Any:
        if "json" in response.headers.get("content-type", ""):
            return self.mask(json.loads(response.text))
        return [self._line(line) for line in response.text.splitlines()]

    def _line(self, line: str) -> Any:
        """A line of text; the data of a server-sent event is JSON."""
        name, _, data = line.partition("data: ")
        return {"data": self.mask(json.loads(data))} if not name and data else self._text(line)
