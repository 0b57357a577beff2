"""The page of keys: looked up, resolved and deleted, by those who may, in their own tenant."""

import re
import time
from collections.abc import Iterator

import pytest

from semel import Granted, Once, Unknown
from semel.http.protocol import scope_of
from support.pages import Browser, browser
from support.service import TokenClient, TokenServer, shared_server

SCRIPT = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokenServer]:
    with shared_server(request, tmp_path_factory) as server:
        yield server


@pytest.fixture(scope="module")
def root(server: TokenServer) -> Iterator[Browser]:
    with browser(server, server.root) as root:
        yield root


@pytest.fixture
def once(server: TokenServer) -> Iterator[Once]:
    once = Once(server.app.url, collect=False)
    yield once
    once.close()


def lose(once: Once, key: str, scope: str = "orders") -> None:
    """Claim a key, vanish, and leave it unknown whether the work happened."""
    assert isinstance(once.claim(key, scope=scope, lease=0.01, on_crash="unknown"), Granted)
    deadline = time.monotonic() + 30
    while not isinstance(once.claim(key, scope=scope, on_crash="unknown"), Unknown):
        assert time.monotonic() < deadline


def submitted(person: TokenClient, key: str) -> str:
    answer = person.post("/runs", json={"model": "add", "parameters": {"a": 1}, "idempotency_key": key, "delay": 600})
    assert answer.status_code == 201, answer.text
    run_id: str = answer.json()["run_id"]
    return run_id


def test_a_key_in_flight_shows_its_owner_its_lease_its_expiry_and_its_fingerprint(
    server: TokenServer, root: Browser, once: Once
) -> None:
    claim = once.claim("shown", scope="orders", fingerprint="1:abc", lease=3600, ttl=7200)
    assert isinstance(claim, Granted)
    page = root.open("/ui/keys", params={"scope": "orders", "key": "shown"})
    text = page.one(id="claim").text
    assert page.status == 200
    assert "in flight" in text
    assert claim.claim.attempt in text
    assert f"Fence {claim.claim.fence:,}" in text
    assert "1:abc" in text
    assert re.search("Lease expires in (1 h|5. min)", text), text
    assert "none yet" in text
    once.complete(claim.claim, {"total": 9})
    text = root.open("/ui/keys", params={"scope": "orders", "key": "shown"}).one(id="claim").text
    assert "completed" in text
    assert "value, 8 B" in text
    assert "none: the work is done" in text


def test_a_key_that_is_not_there_is_said_to_be_not_there(root: Browser) -> None:
    assert "This key does not exist" in root.open("/ui/keys", params={"scope": "orders", "key": "free"}).text
    assert "No run has this key" in root.open("/ui/keys", params={"key": "free"}).text


@pytest.mark.parametrize("key", ["a\x00b", "x" * 256, "a\nb"])
def test_a_key_that_cannot_be_is_refused_on_the_page(root: Browser, key: str) -> None:
    page = root.open("/ui/keys", params={"scope": "orders", "key": key})
    assert page.status == 400
    assert "INVALID_REQUEST" in page.one(class_="problem").text


def test_a_key_of_runs_points_to_the_run_of_each_user_who_has_it(server: TokenServer, root: Browser) -> None:
    first, other = submitted(server.admit("mona"), "shared"), submitted(server.admit("ned"), "shared")
    page = root.open("/ui/keys", params={"key": "shared"})
    rows = page.one(id="key-runs").one("table")
    assert {link["href"] for link in rows.all("a", class_="id")} == {f"/ui/runs/{first}", f"/ui/runs/{other}"}
    assert sorted(row[2] for row in rows.rows()) == ["mona", "ned"]
    assert all("PENDING" in row[1] and row[3] == "client's key" for row in rows.rows())
    one = root.open("/ui/keys", params={"key": "shared", "user": "ned"}).one(id="key-runs").one("table").rows()
    assert [row[2] for row in one] == ["ned"]


def test_a_key_of_runs_is_deleted_after_a_second_question_and_then_makes_a_new_run(
    server: TokenServer, root: Browser
) -> None:
    otto = server.admit("otto")
    first = submitted(otto, "gone")
    where = {"key": "gone", "user": "otto", "kind": "key"}
    asked = root.open("/ui/keys/delete", params=where)
    assert "Delete this key?" in asked.text
    assert "creates a new run" in asked.text
    assert "Delete this key?" in root.send("/ui/keys/delete", where).text, "without a yes it is asked, and stays"
    assert (
        otto.post("/runs", json={"model": "add", "parameters": {"a": 1}, "idempotency_key": "gone"}).json()["run_id"]
        == first
    )
    done = root.send("/ui/keys/delete", {**where, "sure": "yes"})
    assert (done.path, "Deleted the key gone." in done.text) == ("/ui/keys", True)
    assert submitted(otto, "gone") != first
    assert root.send("/ui/keys/delete", {**where, "key": "never", "sure": "yes"}).status == 404


def test_a_key_that_somebody_works_on_is_deleted_only_when_that_is_said_too(root: Browser, once: Once) -> None:
    assert isinstance(once.claim("busy", scope="orders", lease=600), Granted)
    where = {"scope": "orders", "key": "busy"}
    assert "The work is in flight" in root.open("/ui/keys/delete", params=where).text
    refused = root.send("/ui/keys/delete", {**where, "sure": "yes"})
    assert (refused.status, "KEY_IN_FLIGHT" in refused.text) == (409, True)
    assert refused.one("button", name="force", value="yes").text == "Delete although it is in flight"
    assert once.get("busy", scope="orders") is not None
    assert root.send("/ui/keys/delete", {**where, "sure": "yes", "force": "yes"}).path == "/ui/keys"
    assert once.get("busy", scope="orders") is None


@pytest.mark.parametrize("done", ["yes", "no"])
def test_an_unknown_outcome_is_listed_and_resolved(root: Browser, once: Once, done: str) -> None:
    key = f"lost-{done}"
    lose(once, key)
    page = root.open("/ui/keys")
    assert [row[1] for row in page.one(id="unresolved").one("table").rows() if row[0] == key] == ["orders"]
    link = next(each for each in page.one(id="unresolved").all("a") if each.text == key)
    assert root.open(link["href"]).one("form", action="/ui/keys/resolve").all("input", name="done")
    form = {"scope": "orders", "key": key, "done": done, "value": '{"n": [1.5, null, "é"]}'}
    said = root.send("/ui/keys/resolve", form)
    assert (said.status, f"Resolved the key {key} as" in said.text) == (200, True)
    record = once.get(key, scope="orders")
    if done == "yes":
        assert record is not None
        assert record.outcome is not None
        assert record.outcome.value == {"n": [1.5, None, "é"]}
    else:
        assert record is None
    assert root.send("/ui/keys/resolve", form).status == (409 if done == "yes" else 404)


@pytest.mark.parametrize(
    ("given", "said"),
    [({"done": "yes", "value": "{no"}, "Must be JSON"), ({"value": "1"}, "Select whether the work was done.")],
)
def test_a_resolution_that_cannot_be_read_is_shown_with_what_was_typed(
    root: Browser, once: Once, given: dict[str, str], said: str
) -> None:
    key = f"unread-{len(given)}"
    lose(once, key)
    page = root.send("/ui/keys/resolve", {"scope": "orders", "key": key, **given})
    assert (page.status, said in page.one(id="resolve-error").text) == (422, True)
    assert page.one("textarea", name="value").text == given["value"]
    record = once.get(key, scope="orders")
    assert record is not None
    assert record.status == "unknown"


def test_work_that_happened_without_a_value_is_null(root: Browser, once: Once) -> None:
    lose(once, "no-value")
    root.send("/ui/keys/resolve", {"scope": "orders", "key": "no-value", "done": "yes", "value": " "})
    record = once.get("no-value", scope="orders")
    assert record is not None
    assert record.outcome is not None
    assert record.outcome.value is None


def test_operators_look_and_change_nothing_and_submitters_do_not_look(server: TokenServer, once: Once) -> None:
    lose(once, "theirs")
    where = {"scope": "orders", "key": "theirs"}
    with browser(server, server.admit("olga", "operator")) as olga:
        page = olga.open("/ui/keys", params=where)
        assert page.status == 200
        assert not page.all("form", action="/ui/keys/resolve")
        assert "Delete…" not in page.text
        assert olga.open("/ui/keys/delete", params=where).status == 403
        assert olga.send("/ui/keys/delete", {**where, "sure": "yes"}).status == 403
        assert olga.send("/ui/keys/resolve", {**where, "done": "no"}).status == 403
    with browser(server, server.admit("sam")) as sam:
        assert sam.open("/ui/keys", params=where).status == 403
        assert sam.send("/ui/keys/resolve", {**where, "done": "no"}).status == 403
        assert not sam.open("/ui/submit").all("a", href="/ui/keys")
    assert once.get("theirs", scope="orders") is not None


def test_a_tenant_has_its_own_keys_and_the_main_tenant_asks_for_them(
    server: TokenServer, root: Browser, once: Once
) -> None:
    lose(once, "inside", scope_of("acme", "orders"))
    lose(once, "outside")
    run = submitted(server.admit("road", tenant="acme"), "beep")
    with browser(server, server.admit("wile", "admin", "acme")) as wile:
        page = wile.open("/ui/keys", params={"scope": "orders", "key": "inside"})
        assert "unknown" in page.one(id="claim").text
        assert "outside" not in page.text
        assert "This key does not exist" in wile.open("/ui/keys", params={"scope": "orders", "key": "outside"}).text
        assert wile.open("/ui/keys", params={"key": "beep"}).one("a", class_="id")["href"] == f"/ui/runs/{run}"
        assert wile.open("/ui/keys", params={"key": "beep", "tenant": "beta"}).status == 403
        gone = {"scope": "orders", "key": "outside", "sure": "yes", "tenant": ""}
        assert wile.send("/ui/keys/delete", gone).status == 403
    assert "No run has this key" in root.open("/ui/keys", params={"key": "beep"}).text
    there = root.open("/ui/keys", params={"key": "beep", "tenant": "acme"})
    assert run in there.one(id="key-runs").text
    assert not there.one(id="key-runs").all("a", class_="id"), "runs of another tenant are shown to nobody"
    form = {"scope": "orders", "key": "inside", "tenant": "acme", "done": "no"}
    assert root.send("/ui/keys/resolve", form).path == "/ui/keys"
    assert once.get("inside", scope=scope_of("acme", "orders")) is None
    assert once.get("outside", scope="orders") is not None


def test_html_in_keys_scopes_and_users_is_text(server: TokenServer, root: Browser, once: Once) -> None:
    key, scope = f"k{SCRIPT}", f's"{SCRIPT}'
    lose(once, key, scope)
    submitted(server.admit(f"u{SCRIPT}"), key)
    for path, params in (
        ("/ui/keys", {"scope": scope, "key": key, "user": f"u{SCRIPT}"}),
        ("/ui/keys/delete", {"scope": scope, "key": key}),
    ):
        page = root.open(path, params=params)
        assert page.status == 200
        assert SCRIPT not in page.answer.text
        assert [each for each in page.all("script") if not each.get("src")] == []
        assert SCRIPT in page.text


def test_nothing_is_changed_without_the_forms_secret(server: TokenServer, root: Browser, once: Once) -> None:
    lose(once, "kept")
    where = {"scope": "orders", "key": "kept", "sure": "yes", "done": "no"}
    for path in ("/ui/keys/delete", "/ui/keys/resolve"):
        for secret in ({}, {"csrf": "x" * 43}):
            assert root.client.post(path, data={**where, **secret}).status_code == 403
        other = {"Origin": "https://elsewhere.example"}
        assert root.client.post(path, data={**where, "csrf": root.csrf}, headers=other).status_code == 403
    assert once.get("kept", scope="orders") is not None
