"""The protocol as pure functions: how a key is parsed, how requests are compared, and how a response is replayed."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Iterable, Sequence
from email.utils import formatdate
from io import BytesIO
from typing import Any, NoReturn, cast
from urllib.parse import quote

import msgspec

from semel._validation import MAX_KEY
from semel.errors import Unfingerprintable
from semel.fingerprint import fingerprint
from semel.http.refusals import Reason, RefusalFormat
from semel.types import OVERSIZED, Outcome, Response

REPLAYED = (b"idempotent-replayed", b"true")
_NOT_REPLAYED = frozenset(
    (
        b"connection",
        b"content-length",  # computed from the body
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
_QUOTED = re.compile(r'"((?:[ !#-\[\]-~]|\\["\\])*)"(.*)')
_PARAMETERS = re.compile(
    r"""(?:;[ ]*[a-z*][a-z0-9_.*-]*
    (?:=(?:-?[0-9]{1,15}(?:\.[0-9]{1,3})?  # a number
        |"(?:[ !#-\[\]-~]|\\["\\])*"  # a string
        |[A-Za-z*][!#$%&'*+.^_`|~A-Za-z0-9:/-]*  # a token
        |:[A-Za-z0-9+/=]*:  # bytes
        |\?[01]  # a boolean
        |@-?[0-9]{1,15}  # a date
    ))?)*""",
    re.VERBOSE,
)
_ESCAPED = re.compile(r"\\(.)")
_PART = re.compile(r'[ \t]*("(?:[^"\\]|\\.)*"(?:[^",]|"(?:[^"\\]|\\.)*")*|[^",]*)[ \t]*')
_SUFFIX = re.compile(r"\+[0-9a-f]{32}")
_VERSION = re.compile(r"(?:[0-9]+:)?")
_LONGEST_HEADER = 2048
_BODILESS = frozenset((204, 304))


class BadKey(Exception):
    """The header has no valid key; ``shown`` is its content, cut to the length of a key."""

    def __init__(self, shown: str) -> None:
        super().__init__(shown)
        self.shown = shown


def key_of(values: Sequence[str], dialect: RefusalFormat) -> str:
    """The key in the header's values: bare, or a quoted string of RFC 8941. Equal repetitions count as one."""
    if len(values) == 1 and dialect.bare.fullmatch(values[0]):
        return values[0]
    header = ", ".join(values)
    if len(header) > _LONGEST_HEADER:
        raise BadKey(header[:MAX_KEY])
    found = {_unquoted(part, dialect) for value in values for part in _parts(value)}
    if len(found) != 1 or None in found:
        raise BadKey(header[:MAX_KEY])
    return cast("str", found.pop())


def _parts(value: str) -> list[str]:
    """Split at commas, with which servers join repeated headers. A comma inside quotes is part of the key."""
    found, at = [], 0
    while True:
        part = _PART.match(value, at)
        assert part is not None
        found.append(part[1].rstrip(" \t"))
        at = part.end()
        if at == len(value):
            return found
        if value[at] != ",":
            return [value]  # neither bare nor quoted, so not a valid key
        at += 1


def _unquoted(value: str, dialect: RefusalFormat) -> str | None:
    if dialect.bare.fullmatch(value):
        return value
    quoted = _QUOTED.fullmatch(value)
    if quoted is None or not (quoted[2] == "" or (dialect.parameters and _PARAMETERS.fullmatch(quoted[2]))):
        return None
    key = _ESCAPED.sub(r"\1", quoted[1])
    return key if dialect.keys.fullmatch(key) else None


def scope_of(tenant: object, name: str) -> str:
    """The scope of a key: the quoted tenant, if any, and the operation. No tenant can name the scope of another."""
    scope = name if tenant is None or tenant == "" else f"{quote(str(tenant), safe='', errors='surrogatepass')} {name}"
    if len(scope) <= MAX_KEY:
        return scope
    return f"{scope[: MAX_KEY - 65]} {hashlib.sha256(scope.encode()).hexdigest()}"


def operation_of(method: str, path: str) -> str:
    """Method and path, quoted so that every store can keep them."""
    return f"{method} {quote(path, safe='/:@!$&()*+,;=~', errors='surrogatepass')}"


def fingerprint_of_bytes(digest: bytes, query: bytes) -> str:
    """A fingerprint of version 0: the SHA-256 of the body's bytes, combined with the query if there is one."""
    return f"0:{_with_query(digest, query).hex()}"


def fingerprint_of_json(body: bytes, digest: bytes, query: bytes) -> str:
    """The fingerprint of the JSON content, independent of its layout; of the bytes if they are not plain JSON."""
    try:
        content = json.loads(body, parse_constant=_not_json, object_pairs_hook=_named_once)
        digest = bytes.fromhex(fingerprint(content).removeprefix("1:"))
    except (ValueError, RecursionError, Unfingerprintable):
        pass
    return f"1:{_with_query(digest, query).hex()}"


def _with_query(digest: bytes, query: bytes) -> bytes:
    """BLAKE2 instead of SHA-256, so that no body without a query has the same digest."""
    return hashlib.blake2b(digest + query, digest_size=32).digest() if query else digest


def add_operation(print_: str, operation: str) -> str:
    """The fingerprint including the endpoint, for endpoints that share their keys."""
    return _hashed(print_, f"{print_} {operation}")


def add_credentials(print_: str, credentials: bytes, scope: str, key: str) -> str:
    """The fingerprint including the caller's credentials, if there are any.

    The credentials' hash is salted with the key, so that two records do not reveal that one caller made both.
    """
    if not credentials:
        return print_
    return (print_ if len(print_) <= 160 else _hashed(print_, print_)) + _mark_of(credentials, scope, key)


def is_visible_to(print_: str, credentials: bytes, scope: str, key: str) -> bool:
    """Whether a caller with these credentials may see the key with this fingerprint."""
    mark = print_[-33:]
    return not _SUFFIX.fullmatch(mark) or (credentials != b"" and mark == _mark_of(credentials, scope, key))


def differ_by_credentials(one: str, other: str) -> bool:
    """Whether two fingerprints are of equal requests with different credentials."""
    one_print, other_print = (print_[:-33] if _SUFFIX.fullmatch(print_[-33:]) else print_ for print_ in (one, other))
    return one != other and one_print == other_print


def _mark_of(credentials: bytes, scope: str, key: str) -> str:
    salt = hashlib.sha256(f"{scope} {key}".encode()).digest()
    return f"+{hashlib.blake2b(credentials, key=salt, digest_size=16).hexdigest()}"


def _hashed(print_: str, content: str) -> str:
    """The content's hash, with the version of the original fingerprint."""
    version = _VERSION.match(print_)
    assert version is not None
    return f"{version[0]}{hashlib.blake2b(content.encode(errors='surrogatepass'), digest_size=32).hexdigest()}"


def _not_json(constant: str) -> NoReturn:
    raise ValueError(constant)


def _named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuses duplicate names: parsers differ in which of the two values they use."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name occurs twice")
    return found


def stored_headers(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers to store: without those that belong to one connection, one moment or one client."""
    pairs = [(bytes(name).lower(), bytes(value)) for name, value in headers]
    dropped = {
        part.strip().lower() for name, value in pairs if name == b"connection" for part in value.split(b",")
    } | _NOT_REPLAYED
    return [(name, value) for name, value in pairs if name not in dropped]


def expires_header(expires_us: int) -> tuple[bytes, bytes]:
    """The header that says when the key expires."""
    return b"idempotency-expires", formatdate(expires_us // 1_000_000, usegmt=True).encode("ascii")


def replay(outcome: Outcome, accept_encoding: str | None, most: int | None = None) -> Response | Reason:
    """The recorded response, or the reason why there is none.

    A response that must be decompressed for the client may have ``most`` bytes: a few stored bytes can expand to
    gigabytes.
    """
    if outcome.kind == "error":
        return "failed"  # without the error's text, which may be internal
    if outcome.gone:
        return "not_kept" if outcome.kind == OVERSIZED else "gone"
    response = _recorded(outcome)
    if response.body is None:
        return "not_kept"
    if response.status in _BODILESS:
        return Response(response.status, stored_headers(response.headers) + replay_headers(outcome))
    recorded = Response(response.status, stored_headers(response.headers), response.body)
    readable = _readable(recorded, accept_encoding, most)
    if readable is None:
        return "not_acceptable"
    length = (b"content-length", b"%d" % len(readable.body or b""))
    return Response(readable.status, [*readable.headers, *replay_headers(outcome), length], readable.body)


def replay_headers(outcome: Outcome) -> list[tuple[bytes, bytes]]:
    """The headers of every response to a repeated request."""
    return [REPLAYED, expires_header(outcome.expires_us)]


def _recorded(outcome: Outcome) -> Response:
    match outcome.kind:
        case "response":
            response: Response = outcome.value
            return response
        case "seen":
            return Response(204)
        case _:
            return Response(200, [(b"content-type", b"application/json")], _as_json(outcome.value))


def codings_for_app(accept_encoding: str) -> str:
    """``Accept-Encoding`` for the app: only codings that can be decoded for a later client who does not accept them."""
    asked = [part.strip() for part in accept_encoding.split(",")]
    wanted = _weights(accept_encoding)
    left = [part for part in asked if part.partition(";")[0].strip().lower() in {*_DECODERS, "identity"}]
    return ", ".join(left) if any(wanted.get(coding, 0) for coding in (*_DECODERS, "identity")) else "identity"


def _readable(response: Response, accept_encoding: str | None, most: int | None) -> Response | None:
    """The response as stored if the client accepts its coding, otherwise decoded; None if it cannot be decoded."""
    header = b",".join(value for name, value in response.headers if name == b"content-encoding").decode("latin-1")
    codings = [coding for part in header.split(",") if (coding := part.strip().lower()) not in {"", "identity"}]
    accepted = _weights(accept_encoding or "")
    if all(accepted.get(coding, accepted.get("*", 0)) for coding in codings):
        return response
    body = response.body or b""
    for coding in reversed(codings):
        try:
            body = _DECODERS[coding](body, -1 if most is None else most + 1) if body else b""
        except (KeyError, OSError, EOFError, zlib.error):
            return None
        if most is not None and len(body) > most:
            return None
    return Response(response.status, [_decoded(*pair) for pair in response.headers if pair[0] not in _OF_CODING], body)


def _weights(accept_encoding: str) -> dict[str, float]:
    """The weight of each coding. A missing header means no coding, although RFC 9110 would allow any."""
    found = {}
    for part in accept_encoding.lower().split(","):
        coding, _, weight = part.partition(";")
        try:
            found[coding.strip()] = float(weight.partition("=")[2]) if weight else 1.0
        except ValueError:
            found[coding.strip()] = 0.0
    return found


def _gunzip(body: bytes, size: int) -> bytes:
    with gzip.GzipFile(fileobj=BytesIO(body)) as file:
        return file.read(size)


def _inflate(body: bytes, size: int) -> bytes:
    """``deflate`` is the zlib format, but some servers send the raw stream."""
    try:
        return _inflated(body, size, zlib.MAX_WBITS)
    except zlib.error:
        return _inflated(body, size, -zlib.MAX_WBITS)


def _inflated(body: bytes, size: int, window: int) -> bytes:
    stream = zlib.decompressobj(window)
    found = stream.decompress(body, max(0, size))
    if not stream.eof and len(found) != size:
        raise EOFError("the compressed response is truncated")
    return found


_DECODERS = {"gzip": _gunzip, "x-gzip": _gunzip, "deflate": _inflate}
_OF_CODING = frozenset((b"content-encoding", b"content-digest", b"repr-digest", b"digest", b"content-md5"))


def _decoded(name: bytes, value: bytes) -> tuple[bytes, bytes]:
    """A header of the decoded response: the strong ETag of the encoded bytes is a weak one for the decoded bytes."""
    return name, b"W/" + value if name == b"etag" and not value.startswith(b"W/") else value


def _as_json(value: Any) -> bytes:
    return msgspec.json.encode(value, enc_hook=str)
