"""The protocol of idempotent requests as pure functions: what a key is, what is compared, kept and replayed."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from email.utils import formatdate
from typing import Any, NoReturn, cast
from urllib.parse import quote

import msgspec

from semel.errors import Unfingerprintable
from semel.fingerprint import fingerprint
from semel.http.dialects import Dialect, refuse
from semel.model import Outcome, Response
from semel.once.asking import LONGEST
from semel.policy import Policy

Headers = Sequence[tuple[bytes, bytes]]

REPLAYED = (b"idempotent-replayed", b"true")
_NOT_REPLAYED = frozenset(
    (
        b"connection",
        b"content-length",  # counted anew
        b"date",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"server",
        b"set-cookie",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
_QUOTED = re.compile(r'"((?:[ !#-\[\]-~]|\\["\\])*)"')
_ESCAPED = re.compile(r"\\(.)")
_PART = re.compile(r'[ \t]*("(?:[^"\\]|\\.)*"|[^",]*)[ \t]*')
_LONGEST_SAID = 2048
_BODILESS = frozenset((204, 304))


class BadKey(Exception):
    """The header holds no valid key; ``shown`` is what it holds."""

    def __init__(self, shown: str) -> None:
        super().__init__(shown)
        self.shown = shown


def key_of(values: Sequence[str], dialect: Dialect) -> str:
    """The key in the header's values: bare, or quoted as RFC 8941 has it. Said twice alike, it counts once."""
    if len(values) == 1 and dialect.bare.fullmatch(values[0]):
        return values[0]
    said = ", ".join(values)
    if len(said) > _LONGEST_SAID:
        raise BadKey(said[:LONGEST])
    found = {_unquoted(part, dialect) for value in values for part in _parts(value)}
    if len(found) != 1 or None in found:
        raise BadKey(said[:LONGEST])
    return cast("str", found.pop())


def _parts(value: str) -> list[str]:
    """Servers may join two headers of one name with a comma; inside quotes it belongs to the key."""
    found, at = [], 0
    while True:
        part = _PART.match(value, at)
        assert part is not None
        found.append(part[1].rstrip(" \t"))
        at = part.end()
        if at == len(value):
            return found
        if value[at] != ",":
            return [value]  # what stands there is neither bare nor quoted
        at += 1


def _unquoted(value: str, dialect: Dialect) -> str | None:
    if dialect.bare.fullmatch(value):
        return value
    quoted = _QUOTED.fullmatch(value)
    if quoted is None:
        return None
    key = _ESCAPED.sub(r"\1", quoted[1])
    return key if dialect.keys.fullmatch(key) else None


def scope_of(tenant: object, name: str) -> str:
    """The scope of a key: the tenant, where there is one, and the operation. No tenant can name another's."""
    scope = name if tenant is None or tenant == "" else f"{quote(str(tenant), safe='', errors='surrogatepass')} {name}"
    if len(scope) <= LONGEST:
        return scope
    return f"{scope[: LONGEST - 65]} {hashlib.sha256(scope.encode()).hexdigest()}"


def operation_of(method: str, path: str) -> str:
    """Method and path, in characters that every store can hold."""
    return f"{method} {quote(path, safe='/:@!$&()*+,;=~', errors='surrogatepass')}"


def print_of_bytes(digest: bytes, query: bytes) -> str:
    """Version 0 of a fingerprint: SHA-256 of the body as it came, with the query where there is one."""
    return f"0:{_with_query(digest, query).hex()}"


def print_of_json(body: bytes, digest: bytes, query: bytes) -> str:
    """The fingerprint of the content whatever its layout; of the bytes, where they are not plain JSON."""
    try:
        content = json.loads(body, parse_constant=_not_json, object_pairs_hook=_named_once)
        digest = bytes.fromhex(fingerprint(content).removeprefix("1:"))
    except (ValueError, RecursionError, Unfingerprintable):
        pass
    return f"1:{_with_query(digest, query).hex()}"


def _with_query(digest: bytes, query: bytes) -> bytes:
    """Another function than SHA-256, so that no body without a query has the same."""
    return hashlib.blake2b(digest + query, digest_size=32).digest() if query else digest


def _not_json(constant: str) -> NoReturn:
    raise ValueError(constant)


def _named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose names are unique: which of two alike would count is up to the handler's parser."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands twice")
    return found


def kept_headers(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """What of a response's headers is stored: not what belongs to one connection, one moment or one client."""
    pairs = [(bytes(name).lower(), bytes(value)) for name, value in headers]
    dropped = {
        part.strip().lower() for name, value in pairs if name == b"connection" for part in value.split(b",")
    } | _NOT_REPLAYED
    return [(name, value) for name, value in pairs if name not in dropped]


def expires_header(expires_us: int) -> tuple[bytes, bytes]:
    """When the key will be forgotten, as HTTP writes a time."""
    return b"idempotency-expires", formatdate(expires_us // 1_000_000, usegmt=True).encode("ascii")


def replay(outcome: Outcome, policy: Policy, key: str) -> Response:
    """The response of a request that was carried out before, at whichever door."""
    extra = [REPLAYED, expires_header(outcome.expires_us)]
    response = _recorded(outcome) if not outcome.gone else None
    if response is None or response.body is None:
        response = refuse(policy, "failed" if outcome.kind == "error" else "gone", key)
        return Response(response.status, response.headers + extra, response.body)
    body = b"" if response.status in _BODILESS else response.body
    if response.status not in _BODILESS:
        extra.append((b"content-length", b"%d" % len(body)))
    return Response(response.status, kept_headers(response.headers) + extra, body)


def _recorded(outcome: Outcome) -> Response | None:
    """The outcome as a response; None for a kept failure, whose text is not the client's business."""
    match outcome.kind:
        case "response":
            response: Response = outcome.value
            return response
        case "error":
            return None
        case "seen":
            return Response(204)
        case _:
            return Response(200, [(b"content-type", b"application/json")], _as_json(outcome.value))


def _as_json(value: Any) -> bytes:
    return msgspec.json.encode(value, enc_hook=str)
