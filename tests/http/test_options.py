"""The options of a middleware, one by one: what each takes, what it refuses, and what becomes of it."""

import asyncio
from typing import Any
from uuid import UUID

import pytest

from semel import InvalidRequest, Policy
from semel.http.options import (
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

NOBODY = UUID(int=0)


@pytest.mark.parametrize(
    ("given", "name"), [(None, None), ("acme", "acme"), (7, "7"), (0, "0"), (NOBODY, str(NOBODY))], ids=str
)
def test_a_tenant_is_a_text_a_whole_number_a_uuid_or_none(given: Any, name: str | None) -> None:
    assert tenant_name(given) == name


@pytest.mark.parametrize(
    ("given", "words"), [("", "an empty text"), (True, "a bool"), (1.5, "a float"), (b"a", "a bytes")]
)
def test_anything_else_is_no_tenant(given: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=f"tenant= returned {words}"):
        tenant_name(given)


@pytest.mark.parametrize("given", [[200, 599], (200,), 599, lambda status: status in (200, 599)])
def test_statuses_from_200_to_599_may_be_kept(given: Any) -> None:
    kept = kept_statuses(given)
    assert kept is not None
    assert (kept(200) or kept(599), kept(300)) == (True, False)
    assert kept_statuses(None) is None


@pytest.mark.parametrize("given", [199, 600, [200, 600], [199, 200], [200.0], ["200"], [None]])
def test_others_cannot(given: Any) -> None:
    with pytest.raises(InvalidRequest, match="keep= takes statuses from 200 to 599"):
        kept_statuses(given)


def test_a_function_is_plain_or_there_is_none() -> None:
    assert function("tenant", None) is None
    assert function("tenant", len) is len
    with pytest.raises(InvalidRequest, match="tenant= takes a function of the request, not 'acme'"):
        function("tenant", "acme")
    for call in (lambda: function("tenant", asyncio.sleep), lambda: kept_statuses(asyncio.sleep)):
        with pytest.raises(InvalidRequest, match="= takes a plain function, not an async one"):
            call()


def test_one_text_or_several() -> None:
    assert several("methods", "POST") == ("POST",)
    assert several("methods", iter(["POST", "PUT"])) == ("POST", "PUT")
    assert several("exclude", ()) == several("credentials", ()) == ()
    for what in ("methods", "paths"):
        with pytest.raises(InvalidRequest, match=f"{what}= is empty"):
            several(what, ())
    with pytest.raises(InvalidRequest, match="methods= takes one text or several, not 7"):
        several("methods", 7)


def test_a_path_begins_with_a_slash_or_an_asterisk() -> None:
    assert [path_of("paths", each) for each in ("/", "/a", "*", "*.json")] == ["/", "/a", "*", "*.json"]
    assert path_of("status_path", "/keys/") == "/keys/"
    for what, path in (("paths", "a"), ("status_path", "keys"), ("status_path", "/"), ("status_path", "//")):
        with pytest.raises(InvalidRequest, match=f"{what}= takes paths, which begin with a slash"):
            path_of(what, path)


def test_a_token_is_a_name_of_http() -> None:
    assert token("header", "X-Key_1") == "X-Key_1"
    with pytest.raises(InvalidRequest, match="header= takes names that are valid in HTTP"):
        token("header", "X Key")


@pytest.mark.parametrize(
    ("paths", "exclude", "covered"),
    [
        (None, (), {"/a": True, "/b/c": True}),
        (None, "/b/*", {"/a": True, "/b/c": False}),
        ("/b/*", (), {"/a": False, "/b/c": True}),
        (["/a", "/b/*"], ["/b/x", "/b/c"], {"/a": True, "/b/c": False, "/b/d": True}),
        (lambda path: path == "/a", (), {"/a": True, "/b/c": False}),
    ],
)
def test_which_paths_are_covered(paths: Any, exclude: Any, covered: dict[str, bool]) -> None:
    covers = matcher(paths, exclude)
    assert {path: covers(path, "") for path in covered} == covered
    assert {path: covers(f"/shop{path}", "/shop") for path in covered} == covered


def test_credentials_are_headers_in_lower_case_and_cookies_as_they_are() -> None:
    assert credential_names(None) == credential_names(()) == ()
    assert credential_names(["X-Key", "cookie:Session"]) == ("x-key", "cookie:Session")
    with pytest.raises(InvalidRequest, match="credentials= takes names"):
        credential_names("cookie:a b")


def test_a_url_has_a_scheme_or_is_a_path() -> None:
    assert [url_of("docs_url", each) for each in (None, "/docs", "https://a/b")] == [None, "/docs", "https://a/b"]
    with pytest.raises(InvalidRequest, match="docs_url= takes a URL, not 'docs'"):
        url_of("docs_url", "docs")


def test_a_policy_is_the_documents_a_presets_or_ones_own() -> None:
    assert policy_of(None, None) == Policy.intake()
    assert policy_of(None, 5) == Policy.intake(5)
    assert policy_of("stripe", None) == Policy.stripe()
    own = Policy(ttl=7)
    assert (policy_of(own, None), policy_of(own, 5).ttl) == (own, 5)
    with pytest.raises(InvalidRequest, match="'jobs' is not a preset"):
        policy_of("jobs", None)
    with pytest.raises(InvalidRequest, match="policy= takes a Policy or a preset's name, not 7"):
        policy_of(7, None)  # type: ignore[arg-type]
