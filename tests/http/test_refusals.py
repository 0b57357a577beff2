"""The responses to refused requests: the status of each reason, and what a dialect adds."""

from typing import Any

import msgspec
import pytest

from semel import Policy
from semel.http.refusals import DIALECTS, REFUSALS, Reason, refuse, status_line

STATUSES: dict[Reason, int] = {
    "invalid": 400,
    "missing": 400,
    "incomplete": 400,
    "too_large": 413,
    "conflict": 409,
    "processing": 409,
    "unknown": 409,
    "gone": 410,
    "not_kept": 409,
    "not_acceptable": 406,
    "failed": 500,
    "unavailable": 503,
}
RETRYABLE = {"incomplete", "processing", "not_acceptable", "unavailable"}


def content_of(policy: Policy, reason: Reason, key: str | None = "key", **more: Any) -> dict[str, Any]:
    content: dict[str, Any] = msgspec.json.decode(refuse(policy, reason, key, **more).body or b"")
    return content


@pytest.mark.parametrize(
    ("policy", "fails_from", "not_begun", "methods", "parameters", "shared_scope"),
    [
        (Policy.intake(), 400, set(), ("POST",), False, False),
        (Policy.ietf(), 500, {401, 403, 408, 409, 425, 429}, ("POST", "PATCH"), True, False),
        (Policy.stripe(), 500, {400, 401, 403, 409, 422, 429}, ("POST",), False, True),
    ],
    ids=["intake", "ietf", "stripe"],
)
def test_a_dialect_says_which_responses_are_kept_and_whose_keys_meet(  # noqa: PLR0917 -- a table
    policy: Policy, fails_from: int, not_begun: set[int], methods: tuple[str, ...], parameters: bool, shared_scope: bool
) -> None:
    dialect = DIALECTS[policy.dialect]
    assert (dialect.fails_from, dialect.not_begun, dialect.methods) == (fails_from, not_begun, methods)
    assert (dialect.parameters, dialect.shared_scope) == (parameters, shared_scope)
    media = {"intake": b"application/json", "ietf": b"application/problem+json", "stripe": b"application/json"}
    assert dict(refuse(policy, "missing", None).headers)[b"content-type"] == media[dialect.name]


@pytest.mark.parametrize(
    ("policy", "conflict"), [(Policy.intake(), 409), (Policy.ietf(), 422), (Policy.stripe(), 400)], ids=str
)
def test_each_reason_has_its_status(policy: Policy, conflict: int) -> None:
    found = {reason: refuse(policy, reason, "key").status for reason in REFUSALS}
    assert found == {**STATUSES, "conflict": conflict}


def test_a_response_that_is_gone_may_be_a_conflict() -> None:
    conflict = Policy.intake().but(tombstone="conflict")
    assert [refuse(conflict, reason, "key").status for reason in ("gone", "failed")] == [409, 500]


def test_a_problem_says_whether_the_same_request_may_succeed_later() -> None:
    found = {reason for reason in REFUSALS if content_of(Policy.ietf(), reason)["retryable"]}
    assert found == RETRYABLE


def test_the_documentation_is_linked_and_named() -> None:
    for policy in (Policy.intake(), Policy.ietf(), Policy.stripe()):
        linked, plain = (refuse(policy, "missing", None, docs_url=url) for url in ("/docs", None))
        assert [dict(each.headers).get(b"link") for each in (linked, plain)] == [b'</docs>; rel="help"', None]
    assert content_of(Policy.ietf(), "missing", docs_url="/docs")["type"] == "/docs"
    assert content_of(Policy.ietf(), "missing")["type"] == "urn:semel:missing-idempotency-key"
    assert content_of(Policy.stripe(), "missing", docs_url="/docs")["error"]["doc_url"] == "/docs"
    assert "doc_url" not in content_of(Policy.stripe(), "missing")["error"]


def test_who_is_to_wait_is_told_how_long_and_where_to_ask() -> None:
    refusal = refuse(Policy.ietf(), "processing", "key", retry_after=1.2, status_url="/keys/POST/a?key=key")
    headers = dict(refusal.headers)
    assert (headers[b"retry-after"], headers[b"link"]) == (b"2", b'</keys/POST/a?key=key>; rel="status"')
    assert headers[b"content-length"] == b"%d" % len(refusal.body or b"")
    content = msgspec.json.decode(refusal.body or b"")
    assert (content["retry_after"], content["status_url"]) == (2, "/keys/POST/a?key=key")
    assert dict(refuse(Policy.ietf(), "processing", "key", retry_after=0).headers)[b"retry-after"] == b"1"
    assert {b"retry-after", b"link"}.isdisjoint(dict(refuse(Policy.ietf(), "processing", "key").headers))


@pytest.mark.parametrize(
    ("reason", "key", "hints"),
    [
        ("invalid", "order:17", True),
        ("invalid", "a b", False),
        ("invalid", None, False),
        ("conflict", "order:17", False),
    ],
)
def test_a_key_that_another_dialect_would_take_is_answered_with_a_hint(
    reason: Reason, key: str | None, hints: bool
) -> None:
    assert ("hint" in content_of(Policy.intake(), reason, key)) == hints


def test_statuses_that_python_renamed_have_one_phrase_and_their_neighbours_their_own() -> None:
    assert [status_line(each) for each in (413, 414, 415, 416, 417, 423)] == [
        "413 Request Entity Too Large",
        "414 Request-URI Too Long",
        "415 Unsupported Media Type",
        "416 Requested Range Not Satisfiable",
        "417 Expectation Failed",
        "423 Locked",
    ]


def test_a_status_has_its_phrase() -> None:
    assert [status_line(each) for each in (404, 422, 299)] == [
        "404 Not Found",
        "422 Unprocessable Entity",
        "299 Unknown",
    ]
