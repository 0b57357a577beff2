"""What the HTTP doors decide without a socket: keys, scopes, fingerprints, headers, refusals, bodies, options."""

import gzip
import hashlib
import json
import re
import tracemalloc
import zlib
from decimal import Decimal
from typing import Any, get_args
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel import AsyncOnce, InvalidRequest, Once, Outcome, OutcomeGone, Policy, Replay, Response, codec, fingerprint
from semel._validation import checked_fingerprint, checked_key
from semel.http.asgi import IdempotencyMiddleware as AsgiMiddleware
from semel.http.body import CHUNK, BodyTooLarge, SpooledBody
from semel.http.middleware import MiddlewareCore, Request, ResponseRecorder
from semel.http.protocol import (
    BadKey,
    add_credentials,
    add_operation,
    codings_for_app,
    differ_by_credentials,
    expires_header,
    fingerprint_of_bytes,
    fingerprint_of_json,
    is_visible_to,
    key_of,
    operation_of,
    replay,
    scope_of,
    stored_headers,
)
from semel.http.refusals import DIALECTS, REFUSALS, Reason, refuse, status_line
from semel.http.wsgi import IdempotencyMiddleware as WsgiMiddleware
from semel.once.requests import CallRequest
from semel.types import Claim, packed

INTAKE, IETF, STRIPE = DIALECTS["intake"], DIALECTS["ietf"], DIALECTS["stripe"]
NOON_US = 1_700_000_000_000_000


# -- keys --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "key"),
    [
        (["abc-DEF_123"], "abc-DEF_123"),
        (["k" * 255], "k" * 255),
        (['"abc"'], "abc"),
        (["abc", "abc"], "abc"),
        (["abc, abc"], "abc"),
        (["abc,abc"], "abc"),
        (['"abc"', "abc"], "abc"),
        (['"abc"', '"abc"'], "abc"),
        (['"abc", "abc"'], "abc"),
        ([" abc\t"], "abc"),
    ],
)
def test_a_key_is_found_bare_quoted_and_said_twice(values: list[str], key: str) -> None:
    for dialect in DIALECTS.values():
        assert key_of(values, dialect) == key


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ("a.b:c/d@e#f", "a.b:c/d@e#f"),
        ('"a b"', "a b"),
        ('"a, b"', "a, b"),
        ('"say \\"hi\\""', 'say "hi"'),
        ('"back\\\\slash"', "back\\slash"),
        (f'"{" " * 255}"', " " * 255),
    ],
)
def test_the_looser_dialects_take_every_printable_key_and_the_strict_one_refuses_it(value: str, key: str) -> None:
    assert key_of([value], IETF) == key_of([value], STRIPE) == key
    with pytest.raises(BadKey):
        key_of([value], INTAKE)


@pytest.mark.parametrize(
    "value",
    [
        "",
        '""',
        " ",
        ",",
        "abc,",
        ",abc",
        "abc, def",
        "a b",
        'a"b',
        '"abc',
        'abc"',
        '"',
        '"a"b"',
        '"a\\b"',
        '"a\\"',
        "k" * 256,
        f'"{"k" * 256}"',
        "a\x00b",
        "a\nb",
        "a\r\nSet-Cookie: x=1",
        "\x7f",
        '"a\x1fb"',
        "ключ",
        "\xe9",
        '"\xe9"',
        "1\u0661",
        "\uff21",
        "abc\n",
    ],
)
def test_what_is_not_a_key_is_shown_and_refused(value: str) -> None:
    for dialect in DIALECTS.values():
        with pytest.raises(BadKey) as bad:
            key_of([value], dialect)
        assert bad.value.shown == value[:255]


@pytest.mark.parametrize("values", [["abc", "def"], ["abc", ""], ['"a"', '"b"'], ["abc, def", "abc"]])
def test_two_different_keys_are_none(values: list[str]) -> None:
    with pytest.raises(BadKey) as bad:
        key_of(values, INTAKE)
    assert bad.value.shown == ", ".join(values)


@given(st.lists(st.text(st.characters(max_codepoint=255), max_size=300), min_size=1, max_size=3))
def test_any_header_is_a_valid_key_or_refused(values: list[str]) -> None:
    for dialect in DIALECTS.values():
        try:
            key = key_of(values, dialect)
        except BadKey as bad:
            shown = bad.shown
            assert len(shown) <= 255
        else:
            assert dialect.keys.fullmatch(key)
            assert checked_key("key", key) == key


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=255))
def test_every_printable_key_survives_being_quoted(key: str) -> None:
    quoted = '"' + key.replace("\\", "\\\\").replace('"', '\\"') + '"'
    assert key_of([quoted], IETF) == key


def test_a_very_long_header_is_refused_at_once() -> None:
    """The pattern for commas outside quotes must not take quadratic time on what a client made up."""
    for value in ('",' * 500_000, '"' * 1_000_000, "a," * 500_000, "\\" * 1_000_000):
        with pytest.raises(BadKey) as bad:
            key_of([value], IETF)
        assert bad.value.shown == value[:255]


@pytest.mark.parametrize(("length", "taken"), [(2048, True), (2049, False)])
def test_a_header_may_have_2048_characters(length: int, taken: bool) -> None:
    header = '"abc";p="'.ljust(length - 1, "x") + '"'
    assert len(header) == length
    if taken:
        assert key_of([header], IETF) == "abc"
        return
    with pytest.raises(BadKey):
        key_of([header], IETF)


# -- scopes ------------------------------------------------------------------------------------------------------------


def test_the_scope_is_the_operation_and_before_it_the_tenant() -> None:
    assert operation_of("POST", "/api/v1/items") == "POST /api/v1/items"
    assert scope_of(None, "POST /a") == scope_of("", "POST /a") == "POST /a"
    assert scope_of("acme", "POST /a") == "acme POST /a"
    assert scope_of(42, "POST /a") == "42 POST /a"
    assert scope_of(0, "POST /a") == "0 POST /a"
    assert scope_of("a b/ü", "POST /a") == "a%20b%2F%C3%BC POST /a"


@given(
    st.tuples(st.none() | st.text(min_size=1, max_size=300), st.text(max_size=300)),
    st.tuples(st.none() | st.text(min_size=1, max_size=300), st.text(max_size=300)),
)
def test_no_tenant_and_no_path_meets_anothers_keys(one: tuple[Any, str], other: tuple[Any, str]) -> None:
    """Whatever they are called, and every scope is one that a store can hold."""
    scopes = [scope_of(tenant, operation_of("POST", f"/{path}")) for tenant, path in (one, other)]
    assert (scopes[0] == scopes[1]) == (one == other)
    for scope in scopes:
        assert checked_key("scope", scope) == scope


def test_paths_of_any_bytes_make_scopes() -> None:
    raw = bytes(range(256)).decode("utf-8", "surrogateescape")
    assert checked_key("scope", scope_of(None, operation_of("POST", raw)))
    assert operation_of("POST", "/\udcff") != operation_of("POST", "/\udcfe")
    assert operation_of("POST", "/a b") == "POST /a%20b"
    assert operation_of("POST", "/a%20b") == "POST /a%2520b"


def test_a_long_scope_is_cut_and_told_apart_by_its_hash() -> None:
    long = scope_of("acme", "POST /" + "a" * 300)
    assert len(long) == 255
    assert long.startswith("acme POST /aaa")
    assert long != scope_of("acme", "POST /" + "a" * 301)
    exactly = "POST /" + "a" * 249
    assert scope_of(None, exactly) == exactly


# -- fingerprints ------------------------------------------------------------------------------------------------------


def digest(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()


def test_the_fingerprint_of_a_body_is_its_sha_256() -> None:
    assert fingerprint_of_bytes(digest(b"abc"), b"") == f"0:{hashlib.sha256(b'abc').hexdigest()}"


def test_the_query_makes_another_fingerprint() -> None:
    prints = [
        fingerprint_of_bytes(digest(body), query) for body in (b"", b"a", b"b") for query in (b"", b"a", b"b", b"a b")
    ]
    assert len(set(prints)) == 12
    assert all(re.fullmatch("0:[0-9a-f]{64}", each) for each in prints)
    assert all(checked_fingerprint(each) == each for each in prints)


@pytest.mark.parametrize("query", [b"", b"a=1"])
def test_json_is_fingerprinted_by_its_content(query: bytes) -> None:
    def of(body: bytes) -> str:
        return fingerprint_of_json(body, digest(body), query)

    assert of(b'{"a": 1, "b": [true, null]}') == of(b'\n{"b":[true,null],"a":1.0}')
    assert of(b'{"a": 1}') != of(b'{"a": 2}')
    assert of(b"[1, 2]") != of(b"[2, 1]")
    assert of(b"{}") != fingerprint_of_json(b"{}", digest(b"{}"), b"other")
    assert re.fullmatch("1:[0-9a-f]{64}", of(b"{}"))


def test_json_without_a_query_has_the_fingerprint_of_its_content() -> None:
    assert fingerprint_of_json(b'{"a": 1}', digest(b'{"a": 1}'), b"") == fingerprint({"a": 1})


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"\xff", b"NaN", b"[Infinity]", b'{"a": 1, "a": 2}', b"[" * 100_000, b'"\\ud800"', b"9" * 10_000],
    ids=["empty", "half", "not text", "NaN", "Infinity", "twice", "deep", "surrogate", "long number"],
)
def test_what_is_not_plain_json_is_fingerprinted_by_its_bytes(body: bytes) -> None:
    def of(body: bytes) -> str:
        return fingerprint_of_json(body, digest(body), b"")

    assert checked_fingerprint(of(body)) == of(body) != of(body + b" ")


@given(st.binary(max_size=200), st.binary(max_size=50))
def test_every_body_and_query_has_a_fingerprint(body: bytes, query: bytes) -> None:
    for each in (fingerprint_of_bytes(digest(body), query), fingerprint_of_json(body, digest(body), query)):
        assert checked_fingerprint(each) == each


def test_each_operation_makes_another_fingerprint() -> None:
    prints = {add_operation(f"0:{'a' * 64}", operation) for operation in ("POST /a", "POST /b")}
    assert len(prints) == 2
    assert all(checked_fingerprint(each).startswith("0:") for each in prints)


def test_only_the_callers_own_credentials_show_a_key() -> None:
    print_ = fingerprint_of_bytes(b"body", b"")
    mine, theirs = (add_credentials(print_, name, "POST /items", "k") for name in (b"ann", b"bob"))
    assert is_visible_to(mine, b"ann", "POST /items", "k")
    assert not is_visible_to(mine, b"bob", "POST /items", "k")
    assert not is_visible_to(mine, b"", "POST /items", "k")
    assert not is_visible_to(mine, b"ann", "POST /items", "another")
    assert is_visible_to(print_, b"ann", "POST /items", "k"), "nobody's own"
    assert differ_by_credentials(mine, theirs)
    assert differ_by_credentials(mine, print_)
    assert not differ_by_credentials(mine, mine)
    other = add_credentials(fingerprint_of_bytes(b"another body", b""), b"ann", "POST /items", "k")
    assert not differ_by_credentials(mine, other), "they differ by more"
    assert not differ_by_credentials(print_, other)


# -- what is kept and replayed -----------------------------------------------------------------------------------------


def test_kept_headers_are_lower_case_in_order_and_belong_to_no_connection() -> None:
    headers = [
        (b"Content-Type", b"text/plain"),
        (b"Connection", b"close, X-Hop ,"),
        (b"x-hop", b"1"),
        (b"Content-Length", b"3"),
        (b"TRANSFER-ENCODING", b"chunked"),
        (b"Link", b"</2>"),
        (b"Set-Cookie", b"a=1"),
        (b"link", b"</1>"),
        (b"Date", b"now"),
        (b"Server", b"s"),
        (b"Set-Cookie2", b"kept, as nobody sends it"),
    ]
    assert stored_headers(headers) == [
        (b"content-type", b"text/plain"),
        (b"link", b"</2>"),
        (b"link", b"</1>"),
        (b"set-cookie2", b"kept, as nobody sends it"),
    ]
    assert stored_headers([]) == []


def test_the_end_of_a_key_is_told_as_http_tells_time() -> None:
    assert expires_header(NOON_US) == (b"idempotency-expires", b"Tue, 14 Nov 2023 22:13:20 GMT")
    assert expires_header(NOON_US + 999_999) == (b"idempotency-expires", b"Tue, 14 Nov 2023 22:13:20 GMT")


def outcome(kind: str, data: bytes | None) -> Outcome:
    return Outcome(kind, data, 1, NOON_US, NOON_US, NOON_US)


MARKS = [(b"idempotent-replayed", b"true"), (b"idempotency-expires", b"Tue, 14 Nov 2023 22:13:20 GMT")]


@pytest.mark.parametrize(
    ("value", "body"),
    [
        (None, b"null"),
        (0, b"0"),
        ("", b'""'),
        ({"id": 7}, b'{"id":7}'),
        (Decimal("1.50"), b'"1.50"'),
        ([1, (2, 3)], b"[1,[2,3]]"),
        (10**30, b"1000000000000000000000000000000"),
    ],
)
def test_the_value_of_a_function_is_replayed_as_json(value: Any, body: bytes) -> None:
    response = replay(outcome("value", codec.encode(value)), None)
    length = (b"content-length", str(len(body)).encode())
    assert response == Response(200, [(b"content-type", b"application/json"), *MARKS, length], body)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.decimals() | st.datetimes(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers() | st.none() | st.booleans(), inner),
    max_leaves=10,
)


@given(values)
def test_every_value_that_can_be_recorded_can_be_replayed_as_json(value: Any) -> None:
    response = replay(outcome("value", codec.encode(value)), None)
    assert isinstance(response, Response)
    assert response.body is not None
    json.loads(response.body)


def test_a_message_that_was_seen_is_replayed_as_204() -> None:
    assert replay(outcome("seen", codec.encode({"x": 1})), None) == Response(204, MARKS, b"")


@pytest.mark.parametrize("status", [204, 304])
def test_a_status_without_a_body_is_replayed_without_a_length(status: int) -> None:
    recorded = packed("response", Response(status, [(b"etag", b"1")], b""))
    assert replay(outcome(*recorded), None) == Response(status, [(b"etag", b"1"), *MARKS], b"")


def answer(found: Outcome, policy: Policy, accept_encoding: str | None = None) -> Response:
    request = Request("POST", "/", b"", {}, header={"accept-encoding": accept_encoding}.get)
    return MiddlewareCore(Once, "memory://", {"policy": policy}).answer(
        Replay(found), CallRequest("k", "scope", "", policy), request
    )


@pytest.mark.parametrize(("tombstone", "status"), [("gone", 410), ("conflict", 409)])
@pytest.mark.parametrize("kind", ["value", "seen", "response"])
def test_a_tombstone_says_that_it_was_done(kind: str, tombstone: Any, status: int) -> None:
    response = answer(outcome(kind, None), Policy.intake().but(tombstone=tombstone))
    assert response.status == status
    assert response.headers[-2:] == MARKS
    assert b"IDEMPOTENT_RESPONSE_GONE" in (response.body or b"")


@pytest.mark.parametrize("tombstone", ["gone", "conflict"])
@pytest.mark.parametrize("kind", ["oversized", "response"])
def test_a_response_that_was_too_large_is_a_conflict_that_says_so(kind: str, tombstone: Any) -> None:
    """Whatever the policy for tombstones; records of kind ``response`` without a body are of earlier versions."""
    stored = packed("response", Response(201, [], None))
    assert stored[0] == "oversized"
    response = answer(outcome(kind, stored[1]), Policy.intake().but(tombstone=tombstone))
    assert (response.status, response.headers[-2:]) == (409, MARKS)
    assert b"IDEMPOTENT_RESPONSE_TOO_LARGE" in (response.body or b"")
    found = outcome("oversized", stored[1])
    assert found.gone
    with pytest.raises(OutcomeGone, match="too large to be kept"):
        _ = found.value


@pytest.mark.parametrize("data", [codec.encode(["CardDeclined", "of Ms Smith"]), None])
def test_a_kept_failure_is_replayed_without_its_text(data: bytes | None) -> None:
    response = answer(outcome("error", data), Policy.stripe())
    assert response.status == 500
    assert b"idempotent_request_failed" in (response.body or b"")
    assert b"Smith" not in (response.body or b"")


# -- content codings ---------------------------------------------------------------------------------------------------

PLAIN = b"a response of some length " * 4
STRONG = [(b"etag", b'"7"'), (b"content-digest", b"sha-256=:x:"), (b"vary", b"accept-encoding")]


def coded(coding: bytes, body: bytes) -> Outcome:
    kind, data = packed("response", Response(200, [(b"content-encoding", coding), *STRONG], body))
    return outcome(kind, data)


BARE = zlib.compressobj(wbits=-15)
CODED = {
    "gzip": (b"gzip", gzip.compress(PLAIN)),
    "x-gzip": (b"X-Gzip", gzip.compress(PLAIN)),
    "two members": (b"gzip", gzip.compress(PLAIN[:9]) + gzip.compress(PLAIN[9:])),
    "deflate": (b"deflate", zlib.compress(PLAIN)),
    "bare deflate": (b"deflate", BARE.compress(PLAIN) + BARE.flush()),
    "twice": (b"deflate, gzip", gzip.compress(zlib.compress(PLAIN))),
}


@pytest.mark.parametrize("accepted", [None, "", "identity", "br", "gzip;q=0, deflate;q=0.0", "*;q=0", "gzip;q=much"])
@pytest.mark.parametrize("name", CODED)
def test_a_coding_that_is_not_accepted_is_taken_off(name: str, accepted: str | None) -> None:
    response = answer(coded(*CODED[name]), Policy.intake(), accepted)
    assert (response.status, response.body) == (200, PLAIN)
    weak = [(b"etag", b'W/"7"'), (b"vary", b"accept-encoding")]
    assert response.headers == [*weak, *MARKS, (b"content-length", str(len(PLAIN)).encode())]


@pytest.mark.parametrize("accepted", ["*", "GZIP, x-gzip, deflate", "gzip;q=0.5,x-gzip;q=1,deflate ; q=0.1", "br, *"])
@pytest.mark.parametrize("name", CODED)
def test_a_coding_that_is_accepted_stays(name: str, accepted: str) -> None:
    coding, body = CODED[name]
    response = answer(coded(coding, body), Policy.intake(), accepted)
    assert (response.body, response.headers[0]) == (body, (b"content-encoding", coding))
    assert STRONG[0] in response.headers


@pytest.mark.parametrize("coding", [b"br", b"zstd", b"br, gzip"])
def test_bytes_that_the_client_cannot_read_are_never_sent(coding: bytes) -> None:
    unreadable = coded(coding, gzip.compress(b"\x00") if b"gzip" in coding else b"\x00")
    response = answer(unreadable, Policy.ietf(), "gzip")
    assert response.status == 406
    assert json.loads(response.body or b"")["error_code"] == "IDEMPOTENT_RESPONSE_NOT_ACCEPTABLE"
    assert MARKS[0] in response.headers
    assert answer(unreadable, Policy.ietf(), "gzip, br, zstd").status == 200
    assert answer(coded(b"gzip", b"not gzip"), Policy.ietf(), None).status == 406


@pytest.mark.parametrize("coding", [b"gzip", b"deflate", b"gzip, gzip"])
def test_a_response_is_not_decoded_into_more_than_is_kept(coding: bytes) -> None:
    """Some recorded kilobytes may stand for gigabytes: they are never made, and a client that takes gzip gets them."""
    pack = zlib.compress if coding == b"deflate" else gzip.compress
    for size, status in ((1000, 200), (1001, 406), (10 << 20, 406)):
        body = pack(bytes(size))
        bomb = coded(coding, gzip.compress(body) if b"," in coding else body)
        policy = Policy.ietf().but(max_response_bytes=1000)
        tracemalloc.start()
        try:
            response = answer(bomb, policy)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert response.status == status, size
        assert peak < 1 << 20
        assert answer(bomb, policy, "gzip, deflate").status == 200


@pytest.mark.parametrize("coding", [b"gzip", b"deflate"])
def test_a_coding_of_nothing_is_taken_off_and_half_a_response_is_not_sent(coding: bytes) -> None:
    empty = answer(coded(coding, b""), Policy.ietf())
    assert (empty.status, empty.body) == (200, b"")
    assert b"content-encoding" not in dict(empty.headers)
    whole = CODED[coding.decode()][1]
    assert answer(coded(coding, whole[:-6]), Policy.ietf()).status == 406


@pytest.mark.parametrize(
    ("accepted", "asked"),
    [
        ("gzip, deflate, br, zstd", "gzip, deflate"),
        ("br;q=1.0, gzip;q=0.8, *;q=0.1", "gzip;q=0.8"),
        ("identity;q=0, gzip", "identity;q=0, gzip"),
        ("br", "identity"),
        ("*", "identity"),
        ("", "identity"),
        ("identity;q=0, br", "identity"),
        ("GZip", "GZip"),
    ],
)
def test_the_app_is_asked_for_codings_that_can_be_taken_off(accepted: str, asked: str) -> None:
    assert codings_for_app(accepted) == asked


# -- refusals ----------------------------------------------------------------------------------------------------------

REASONS = get_args(Reason)


def test_every_reason_has_words() -> None:
    assert set(REASONS) == set(REFUSALS)


@pytest.mark.parametrize("reason", REASONS)
def test_the_intake_dialect_says_three_things(reason: Reason) -> None:
    response = refuse(Policy.intake(), reason, "k", retry_after=1.2, status_url="/keys")
    assert response.status == REFUSALS[reason].status
    assert json.loads(response.body or b"") == {
        "detail": REFUSALS[reason].detail.replace("{header}", "Idempotency-Key"),
        "error_code": REFUSALS[reason].code,
        "idempotency_key": "k",
    }
    assert dict(response.headers) == {
        b"content-type": b"application/json",
        b"content-length": str(len(response.body or b"")).encode(),
        b"retry-after": b"2",
        b"link": b'</keys>; rel="status"',
    }


@pytest.mark.parametrize("reason", REASONS)
def test_the_ietf_dialect_gives_problem_details(reason: Reason) -> None:
    response = refuse(Policy.ietf(), reason, "k")
    problem = json.loads(response.body or b"")
    assert (b"content-type", b"application/problem+json") in response.headers
    assert problem["status"] == response.status
    assert re.fullmatch("urn:semel:[a-z-]+", problem["type"])
    assert problem["retryable"] == (reason in {"processing", "unavailable", "incomplete", "not_acceptable"})
    assert set(problem) == {"type", "title", "status", "detail", "error_code", "idempotency_key", "retryable"}


@pytest.mark.parametrize("reason", REASONS)
def test_the_stripe_dialect_gives_an_error_object(reason: Reason) -> None:
    error = json.loads(refuse(Policy.stripe(), reason, "k").body or b"")["error"]
    assert set(error) == {"type", "code", "message"}
    assert re.fullmatch("[a-z_]+", error["code"])


def test_dialects_differ_in_the_status_of_a_mismatch() -> None:
    policies = (Policy.intake(), Policy.ietf(), Policy.stripe())
    assert [refuse(policy, "conflict", "k").status for policy in policies] == [409, 422, 400]


def test_the_looser_dialects_say_what_their_keys_are() -> None:
    for policy in (Policy.ietf(), Policy.stripe()):
        body = refuse(policy, "invalid", "k").body or b""
        assert b"printable ASCII" in body
        assert b"hyphens" not in body


@pytest.mark.parametrize(("left", "said"), [(0.0, b"1"), (0.001, b"1"), (1.0, b"1"), (1.001, b"2"), (3600.0, b"3600")])
def test_retry_after_is_whole_seconds_and_never_too_early(left: float, said: bytes) -> None:
    assert dict(refuse(Policy.intake(), "processing", "k", retry_after=left).headers)[b"retry-after"] == said


def test_a_status_has_its_phrase() -> None:
    assert (status_line(201), status_line(409), status_line(299)) == ("201 Created", "409 Conflict", "299 Unknown")


# -- bodies ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=20), max_size=10), st.integers(0, 100))
def test_a_body_gives_back_what_it_took_and_its_hash(chunks: list[bytes], in_memory: int) -> None:
    body = SpooledBody(in_memory)
    try:
        for chunk in chunks:
            body.add(chunk)
        whole = b"".join(chunks)
        assert (body.size, body.digest) == (len(whole), hashlib.sha256(whole).digest())
        for _ in range(2):
            assert body.whole() == body.file().read() == whole
            assert [body.read(at, 7) for at in (0, 3, len(whole))] == [whole[:7], whole[3:10], b""]
    finally:
        body.close()


def test_a_large_body_is_in_a_file_without_a_name() -> None:
    body = SpooledBody(10)
    assert not body.spills(10)
    assert body.spills(11)
    for _ in range(5):
        body.add(b"x" * CHUNK)
    assert body.on_disk
    file = body.file()
    assert isinstance(file.name, int), "no name: nobody can open it, and nothing is left behind"
    body.close()
    assert file.closed, "the disk is given back"
    body.add(b"late")  # a thread may be late


@pytest.mark.parametrize("in_memory", [0, 100])
def test_a_body_over_the_limit_is_refused_before_it_is_kept(in_memory: int) -> None:
    body = SpooledBody(in_memory, 10)
    body.add(b"x" * 10)
    with pytest.raises(BodyTooLarge):
        body.add(b"x")
    assert body.whole() == b"x" * 10
    body.close()


def test_an_empty_body_is_a_body() -> None:
    body = SpooledBody(10)
    assert (body.size, body.whole(), body.digest) == (0, b"", hashlib.sha256(b"").digest())
    body.close()


# -- what passes is noted ----------------------------------------------------------------------------------------------

CLAIM = Claim("scope", "key", 1, "attempt", "", 60.0, NOON_US, NOON_US)


def recorder(limit: int | None = None) -> ResponseRecorder:
    return ResponseRecorder(MiddlewareCore(Once, "memory://", {"max_response_bytes": limit}), CLAIM)


def test_a_recorder_tells_when_the_response_is_complete() -> None:
    noted = recorder()
    sent = noted.begin(201, [(b"Content-Length", b"6"), (b"Set-Cookie", b"a")])
    assert sent == [(b"Content-Length", b"6"), (b"Set-Cookie", b"a"), expires_header(NOON_US)]
    assert [noted.add(b"abc"), noted.add(b""), noted.add(b"def")] == [False, False, True]
    assert noted.response == Response(201, [], b"abcdef")


def test_a_recorder_cannot_tell_without_a_length() -> None:
    for headers in ([], [(b"content-length", b"six")]):
        noted = recorder()
        noted.begin(200, headers)
        assert not any([noted.add(b"abc"), noted.add(b"def")])
        assert noted.response == Response(200, stored_headers(headers), b"abcdef")


def test_a_recorder_keeps_nothing_of_what_is_over_the_limit() -> None:
    noted = recorder(4)
    noted.begin(200, [])
    noted.add(b"abcd")
    assert not noted.too_large
    assert noted.response.body == b"abcd"
    noted.add(b"e")
    assert noted.too_large
    assert noted.response == Response(200, [], None)


@pytest.mark.parametrize("status", [0, 100, 199, 600, True, "200", 200.0])
def test_a_recorder_refuses_what_no_server_could_send(status: Any) -> None:
    with pytest.raises(ValueError, match="200 to 599"):
        recorder().begin(status, [])
    with pytest.raises(TypeError, match="header"):
        recorder().begin(200, [("text", "not bytes")])  # type: ignore[list-item]
    with pytest.raises(RuntimeError, match="before its start"):
        recorder().add(b"x")


# -- options -----------------------------------------------------------------------------------------------------------


def app(*_: Any) -> Any:
    raise AssertionError("never called")


@pytest.mark.parametrize("middleware", [AsgiMiddleware, WsgiMiddleware])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tll": 60}, "tll: not an option of the middleware; it has .*ttl"),
        ({"policy": "ietff"}, "'ietff' is not a preset; there are intake, "),
        ({"policy": {"ttl": 60}}, "a Policy or a preset's name"),
        ({"ttl": 0}, "ttl must be more than zero seconds"),
        ({"ttl": "1h"}, "ttl must be a number of seconds"),
        ({"methods": 7}, "methods= takes one text or several"),
        ({"methods": [b"POST"]}, "methods must be text that is not empty"),
        ({"methods": [""]}, "methods must be text that is not empty"),
        ({"paths": 7}, "paths= takes one text or several"),
        ({"paths": [7]}, "paths must be text that is not empty"),
        ({"exclude": None}, "exclude= takes one text or several"),
        ({"exclude": [re.compile("x")]}, "exclude must be text that is not empty"),
        ({"header": ""}, "header must be text that is not empty"),
        ({"header": None}, "header must be text that is not empty"),
        ({"tenant": "acme"}, "tenant= takes a function"),
        ({"scope": 7}, "scope= takes a function"),
        ({"scope": ""}, "the scope is empty"),
        ({"scope": "a\nb"}, "control character"),
        ({"fingerprint": "sha1"}, 'fingerprint= is "body", "json" or a function'),
        ({"fingerprint": None}, 'fingerprint= is "body", "json" or a function'),
        ({"max_response_bytes": -1}, "max_response_bytes must be a number of bytes"),
        ({"max_response_bytes": "1MB"}, "max_response_bytes must be a number of bytes"),
        ({"max_response_bytes": True}, "max_response_bytes must be a number of bytes"),
        ({"max_request_bytes": "1MB"}, "max_request_bytes must be a number of bytes"),
        ({"credentials": "a b"}, "credentials= takes names"),
        ({"credentials": "cookie:"}, "credentials must be text that is not empty"),
        ({"credentials": [b"x"]}, "credentials must be text that is not empty"),
        ({"credentials": 7}, "credentials= takes one text or several"),
        ({"keep": [99]}, "keep= takes statuses from 200 to 599, or a function"),
        ({"keep": "2xx"}, "keep= takes statuses"),
        ({"keep": True}, "keep= takes statuses"),
        ({"docs_url": "see the wiki"}, "docs_url= takes a URL"),
        ({"docs_url": "https://docs/<x>"}, "docs_url= takes a URL"),
        ({"docs_url": ""}, "docs_url must be text that is not empty"),
        ({"body_in_memory": 1.5}, "body_in_memory must be a number of bytes"),
        ({"name": ""}, "the name is empty"),
        ({"name": "x" * 256}, "the name has 256 characters"),
    ],
)
def test_a_wrong_option_is_said_when_the_app_starts(middleware: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        middleware(app, "memory://", **options)


@pytest.mark.parametrize(
    ("middleware", "once", "words"),
    [
        (AsgiMiddleware, Once, "this middleware takes AsyncOnce or a URL, not Once"),
        (WsgiMiddleware, AsyncOnce, "this middleware takes Once or a URL, not AsyncOnce"),
    ],
)
def test_each_door_takes_its_own_kind_of_once(middleware: Any, once: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        middleware(app, once("memory://"))


def test_the_defaults_are_those_of_the_document() -> None:
    core = MiddlewareCore(Once, "memory://", {})
    assert core.policy == core.engine.policy == Policy.intake()
    assert (core.policy.ttl, core.policy.lease, core.policy.collect_interval) == (3600, 60, 600)
    assert (core.methods, core.header, core.required) == (frozenset({"POST"}), "Idempotency-Key", False)
    assert (core.max_response_bytes, core.status_path, core.everywhere) == (None, None, True)


@pytest.mark.parametrize(
    ("policy", "limit"),
    [
        (None, None),
        ("intake", None),
        (Policy.intake().but(lease=3600), None),
        ("router", 10 << 20),
        ("processor", 10 << 20),
        ("ietf", 10 << 20),
        ("stripe", 10 << 20),
        (Policy(), 10 << 20),
        (Policy(max_response_bytes=7), 7),
    ],
)
def test_how_much_is_taken_and_kept_by_default(policy: Any, limit: int | None) -> None:
    """The document of ``intake`` has no limit for the responses that are kept; None says that there is none."""
    chosen: list[tuple[Any, int | None]] = [({}, limit), ({"max_response_bytes": None}, None)]
    for options, expected in chosen:
        assert MiddlewareCore(Once, "memory://", {"policy": policy, **options}).max_response_bytes == expected
    chosen = [({}, 10 << 20), ({"max_request_bytes": None}, None)]
    for options, expected in chosen:
        assert MiddlewareCore(Once, "memory://", {"policy": policy, **options}).max_request_bytes == expected


@pytest.mark.parametrize(
    ("policy", "methods"),
    [("intake", {"POST"}), ("processor", {"POST"}), ("stripe", {"POST"}), ("ietf", {"POST", "PATCH"})],
)
def test_which_methods_may_have_a_key_by_default(policy: Any, methods: set[str]) -> None:
    assert MiddlewareCore(Once, "memory://", {"policy": policy}).methods == methods
    assert MiddlewareCore(Once, "memory://", {"policy": policy, "methods": "PUT"}).methods == {"PUT"}


@pytest.mark.parametrize("preset", ["intake", "router", "processor", "ietf", "stripe"])
def test_a_preset_is_named_by_its_name(preset: str) -> None:
    core = MiddlewareCore(Once, "memory://", {"policy": preset})
    assert core.policy == getattr(Policy, preset)()
    assert MiddlewareCore(Once, "memory://", {"policy": preset, "ttl": 5}).policy.ttl == 5


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (Policy.intake(), {200: True, 302: True, 399: True, 400: False, 500: False}),
        (Policy.ietf(), {200: True, 400: True, 404: True, 422: True, 499: True, 500: False, 503: False, 599: False}),
        (Policy.ietf(), dict.fromkeys((401, 403, 408, 409, 425, 429), False)),
        (Policy.ietf().but(on_error="keep"), {404: True, 500: True, 401: False, 429: False}),
        (Policy.stripe(), {200: True, 402: True, 404: True, 500: True, 503: True}),
        (Policy.stripe(), dict.fromkeys((400, 401, 403, 409, 422, 429), False)),
        (Policy.stripe().but(on_error="release"), {200: True, 402: True, 429: False, 500: False}),
        (Policy.intake().but(on_error="keep"), {404: True, 429: True, 500: True}),
    ],
)
def test_which_responses_are_kept(policy: Policy, kept: dict[int, bool]) -> None:
    core = MiddlewareCore(Once, "memory://", {"policy": policy})
    assert {status: core.is_final(status) for status in kept} == kept


@pytest.mark.parametrize("policy", ["intake", "ietf", "stripe"])
@pytest.mark.parametrize(
    ("keep", "kept", "failures"),
    [
        (range(200, 300), {200: True, 299: True, 301: False, 402: False, 429: False, 500: False}, "release"),
        ([200, 402], {200: True, 201: False, 402: True}, "release"),
        (402, {200: False, 402: True}, "release"),
        (lambda status: status != 503, {200: True, 401: True, 429: True, 500: True, 503: False}, "keep"),
        ((), {200: False}, "release"),
    ],
    ids=["range", "list", "one", "function", "none"],
)
def test_which_responses_are_kept_is_a_choice(policy: Any, keep: Any, kept: dict[int, bool], failures: str) -> None:
    """It replaces all of the policy's rule; an exception is a 500."""
    core = MiddlewareCore(Once, "memory://", {"policy": policy, "keep": keep})
    assert {status: core.is_final(status) for status in kept} == kept
    assert (core.policy.on_error, core.releasing.on_error) == (failures, "release")


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({}, ("authorization",)),
        ({"credentials": None}, ()),
        ({"credentials": ()}, ()),
        ({"credentials": "X-Api-Key"}, ("x-api-key",)),
        ({"credentials": ["Authorization", "cookie:Session"]}, ("authorization", "cookie:Session")),
    ],
)
def test_what_counts_as_credentials(given: Any, names: tuple[str, ...]) -> None:
    assert MiddlewareCore(Once, "memory://", given)._credentials == names


def test_fingerprints_tell_callers_apart_and_say_nothing_of_them() -> None:
    def of(credentials: bytes, key: str = "k", print_: str = "0:" + "a" * 64) -> str:
        return checked_fingerprint(add_credentials(print_, credentials, "scope", key))

    assert of(b"") == "0:" + "a" * 64
    assert len({of(b""), of(b"a"), of(b"b"), of(b"a", "l")}) == 4
    assert all(of(who).startswith("0:" + "a" * 64) for who in (b"a", b"b"))
    assert of(b"a", print_="1:" + "x" * 198) != of(b"a", print_="1:" + "x" * 197 + "y"), "long ones are not cut"
    assert of(b"a", print_="1:" + "x" * 198).startswith("1:")
    assert of(b"a", print_="") != of(b"b", print_="")


def test_an_option_of_one_text_is_the_same_as_a_list_of_one() -> None:
    core = MiddlewareCore(Once, "memory://", {"methods": "patch", "paths": "/a/*", "exclude": "/a/b"})
    assert core.methods == frozenset({"PATCH"})
    assert [core.covers(path, "") for path in ("/a/c", "/a/b", "/b")] == [True, False, False]
    assert not core.everywhere


def test_a_scope_for_all_still_separates_tenants() -> None:
    core = MiddlewareCore(Once, "memory://", {"scope": "orders", "tenant": lambda context: context["who"]})
    assert core.tenant_of({"who": 7}) == "7"
    assert core.scope_of("acme", {}, "POST", "/a") == "acme orders"
    assert core.scope_of(None, {}, "POST", "/b") == "orders"


@pytest.mark.parametrize("given_path", ["/keys", "/keys/"])
def test_a_status_url_leads_back_to_its_key(given_path: str) -> None:
    """Whatever path and key hold."""
    core = MiddlewareCore(Once, "memory://", {"status_path": given_path, "policy": "ietf"})
    for path in ("/a", "/a b/ü", "/100%/x?y"):
        for key in ("k", "a b&c=d#e+f%20/?"):
            url = core._status_url(key, Request("POST", path, b"", {}))
            assert url is not None
            raw, _, query = url.partition("?")
            asked = Request("GET", unquote(raw), query.encode("ascii"), {})
            assert core.status_asked(asked) == (operation_of("POST", path), key)
