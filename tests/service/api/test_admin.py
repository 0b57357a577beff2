"""The admin API over real HTTP, on SQLite and PostgreSQL: tokens, quotas, reservations and keys; and who may what."""

import time
from collections.abc import Iterator

import pytest
from sqlalchemy import Pool, event

from semel import ClaimLost, Granted, JobStore, Once, Quota, Unknown
from semel.http.protocol import scope_of
from support.databases import DATABASES
from support.service import TokenServer, shared_server
from support.waiting import eventually


@pytest.fixture(scope="module", params=DATABASES)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokenServer]:
    with shared_server(request, tmp_path_factory) as server:
        server.acme = server.admit("wile", "admin", "acme")  # type: ignore[attr-defined]
        yield server


@pytest.fixture
def once(server: TokenServer) -> Iterator[Once]:
    once = Once(server.app.url, collect=False)
    yield once
    once.close()


def lose(once: Once, key: str, scope: str = "orders") -> None:
    """Claim a key, vanish, and leave it unknown whether the work happened."""
    assert isinstance(once.claim(key, scope=scope, lease=0.01, on_crash="unknown"), Granted)
    deadline = time.monotonic() + 10
    while not isinstance(once.claim(key, scope=scope, on_crash="unknown"), Unknown):
        assert time.monotonic() < deadline


def test_a_token_is_made_listed_rotated_and_revoked(server: TokenServer) -> None:
    body = {"user": "erin", "role": "operator", "name": "laptop", "ttl": 3600}
    made = server.root.post("/admin/tokens", json=body)
    token = made.json()["token"]
    assert made.status_code == 201
    assert (token["user"], token["role"], token["name"], token["tenant"]) == ("erin", "operator", "laptop", "")
    assert token["expires_at"] > token["created_at"]
    erin = server.sending(made.json()["secret"])
    listed = erin.get("/admin/tokens").json()["tokens"]
    assert token["id"] in [each["id"] for each in listed]
    assert "secret" not in str(listed)
    assert "digest" not in str(listed)
    rotated = server.root.post(f"/admin/tokens/{token['id']}/rotate", json={}).json()
    assert (rotated["token"]["user"], rotated["token"]["name"]) == ("erin", "laptop")
    assert server.root.delete(f"/admin/tokens/{rotated['token']['id']}").status_code == 204
    assert server.root.delete(f"/admin/tokens/{rotated['token']['id']}").status_code == 404
    assert server.sending(rotated["secret"]).get("/runs").status_code == 401


def test_tokens_are_listed_page_by_page(server: TokenServer) -> None:
    every = [each["id"] for each in server.root.get("/admin/tokens?limit=1000").json()["tokens"]]
    seen: list[str] = []
    after: dict[str, str] = {}
    while True:
        page = server.root.get("/admin/tokens", params={"limit": "2", **after}).json()
        seen += [each["id"] for each in page["tokens"]]
        if page["next"] is None:
            break
        after = {"after": page["next"]}
    assert seen == every


def test_an_admin_manages_only_the_own_tenant_and_one_of_the_main_tenant_all(server: TokenServer) -> None:
    acme = server.acme  # type: ignore[attr-defined]
    made = acme.post("/admin/tokens", json={"user": "road"}).json()["token"]
    assert made["tenant"] == "acme"
    assert {each["tenant"] for each in acme.get("/admin/tokens").json()["tokens"]} == {"acme"}
    assert {each["tenant"] for each in server.root.get("/admin/tokens").json()["tokens"]} >= {"", "acme"}
    assert {each["tenant"] for each in server.root.get("/admin/tokens?tenant=acme").json()["tokens"]} == {"acme"}
    assert acme.post("/admin/tokens", json={"user": "x", "tenant": ""}).status_code == 403
    assert acme.post("/admin/tokens", json={"user": "x", "tenant": "other"}).status_code == 403
    assert acme.delete(f"/admin/tokens/{server.root.id}").status_code == 404
    assert acme.post(f"/admin/tokens/{server.root.id}/rotate", json={}).status_code == 404
    for path in ("/admin/tokens", "/admin/quotas", "/admin/reservations", "/admin/run-keys?key=k", "/usage/x"):
        there = acme.get(path, params={**({"key": "k"} if "key=" in path else {}), "tenant": "other"})
        assert there.status_code == 403, path
    made = server.root.post("/admin/tokens", json={"user": "coy", "tenant": "acme"}).json()["token"]
    assert (made["tenant"], acme.delete(f"/admin/tokens/{made['id']}").status_code) == ("acme", 204)


def test_an_operator_reads_what_admins_manage_and_changes_nothing(server: TokenServer) -> None:
    olga = server.admit("olga", "operator")
    assert olga.get("/admin/tokens").status_code == 200
    refused = olga.post("/admin/tokens", json={"user": "x"})
    assert (refused.status_code, refused.json()["error_code"]) == (403, "FORBIDDEN")
    assert olga.get("/admin/tokens?tenant=acme").status_code == 403
    assert {each["tenant"] for each in olga.get("/admin/tokens").json()["tokens"]} == {""}


def test_a_quota_is_set_shown_with_its_use_and_taken_away(server: TokenServer) -> None:
    body = {
        "max_concurrent": 2,
        "per_hour": 10,
        "per_day": 20,
        "cost_daily": 1.5,
        "cost_weekly": 2.0,
        "cost_monthly": 3.25,
        "cost_yearly": 1000.0,
        "action": "warn",
        "warn_at": 0.5,
    }
    put = server.root.put("/admin/quotas/frank", json=body)
    assert put.json() == {"tenant": "", "user": "frank", "quota": body}
    assert server.app.quotas()["frank"] == Quota(**body)
    frank = server.admit("frank")
    frank.post("/runs", json={"model": "add", "parameters": {"a": 1}, "cost": 0.5, "delay": 60})
    shown = server.root.get("/admin/quotas/frank").json()
    assert (shown["quota"], shown["default"]) == (body, False)
    assert (shown["usage"]["concurrent"], shown["usage"]["spent"]["daily"]) == (1, 0.5)
    assert frank.get("/usage/frank").json() == shown == frank.get("/usage").json()
    assert {"tenant": "", "user": "frank", "quota": body} in server.root.get("/admin/quotas").json()["quotas"]
    assert server.root.delete("/admin/quotas/frank").status_code == 204
    assert server.root.delete("/admin/quotas/frank").status_code == 404
    assert server.root.get("/admin/quotas/frank").json()["quota"] is None


def test_the_quota_of_the_star_is_everybodys_in_its_tenant(server: TokenServer) -> None:
    assert server.root.put("/admin/quotas/*", json={"max_concurrent": 9}, params={"tenant": "beta"}).status_code == 200
    shown = server.root.get("/usage/gina", params={"tenant": "beta"}).json()
    assert (shown["default"], shown["quota"]["max_concurrent"]) == (True, 9)
    assert server.root.get("/usage/gina").json()["quota"] is None
    assert server.root.delete("/admin/quotas/*", params={"tenant": "beta"}).status_code == 204


def test_a_quota_that_is_set_holds_for_the_next_run(server: TokenServer) -> None:
    hugo = server.admit("hugo")
    server.root.put("/admin/quotas/hugo", json={"max_concurrent": 0})
    refused = hugo.post("/runs", json={"model": "add", "parameters": {"a": 1}})
    assert (refused.status_code, refused.json()["error_code"]) == (429, "QUOTA_EXCEEDED")


def test_a_user_with_slashes_has_a_quota_too(server: TokenServer) -> None:
    assert server.root.put("/admin/quotas/team%2Fida", json={"per_day": 3}).json()["user"] == "team/ida"
    assert server.root.get("/admin/quotas/team/ida").json()["quota"]["per_day"] == 3
    assert server.admit("team/ida").get("/usage/team%2Fida").json()["quota"]["per_day"] == 3
    assert server.root.delete("/admin/quotas/team%2Fida").status_code == 204


def test_quotas_are_listed_page_by_page(server: TokenServer) -> None:
    for user in ("a", "b", "c"):
        server.root.put(f"/admin/quotas/{user}", json={"per_day": 3}, params={"tenant": "paged"})
    first = server.root.get("/admin/quotas", params={"tenant": "paged", "limit": 2}).json()
    rest = server.root.get("/admin/quotas", params={"tenant": "paged", "limit": 2, "after": first["next"]}).json()
    assert [each["user"] for each in first["quotas"] + rest["quotas"]] == ["a", "b", "c"]
    assert rest["next"] is None


def test_submitters_see_their_own_use_and_nobody_elses(server: TokenServer) -> None:
    kate = server.admit("kate")
    assert kate.get("/usage/kate").json()["usage"]["concurrent"] == 0
    assert kate.get("/usage/frank").status_code == 403
    assert kate.get("/usage/nobody-at-all").status_code == 403
    assert kate.get("/usage/kate?tenant=acme").status_code == 403


def reserve(url: str, user: str) -> str:
    store = JobStore(url)
    reservation = store.reserve_job_slot(user, 10, ttl_seconds=300)
    store.close()
    assert reservation
    return reservation


def test_reservations_are_listed_with_the_time_that_is_left_and_released(server: TokenServer) -> None:
    ids = sorted(reserve(server.app.url, "liam") for _ in range(3))
    held = server.root.get("/admin/reservations", params={"user": "liam"}).json()["reservations"]
    assert [each["id"] for each in held] == ids
    assert all(0 < each["expires_in"] <= 300 and not each["consumed"] for each in held)
    page = server.root.get("/admin/reservations", params={"user": "liam", "limit": 2}).json()
    rest = server.root.get("/admin/reservations", params={"user": "liam", "after": page["next"]}).json()
    assert [each["id"] for each in page["reservations"] + rest["reservations"]] == ids
    assert server.acme.delete(f"/admin/reservations/{ids[0]}").status_code == 404  # type: ignore[attr-defined]
    assert server.root.delete(f"/admin/reservations/{ids[0]}").status_code == 204
    assert server.root.delete(f"/admin/reservations/{ids[0]}").status_code == 404
    assert server.root.get("/usage/liam").json()["usage"]["reserved"] == 2


def test_a_run_key_is_looked_up_and_deleted_and_then_makes_a_new_run(server: TokenServer) -> None:
    body = {"model": "add", "parameters": {"a": 1}, "idempotency_key": "gh-owner/repo-1"}
    mona, ned = server.admit("mona"), server.admit("ned")
    first = mona.post("/runs", json=body).json()["run_id"]
    other = ned.post("/runs", json=body).json()["run_id"]
    found = server.root.get("/admin/run-keys", params={"key": "gh-owner/repo-1"}).json()["keys"]
    assert {(each["user"], each["run_id"]) for each in found} == {("mona", first), ("ned", other)}
    own = server.root.get("/admin/run-keys", params={"key": "gh-owner/repo-1", "user": "mona"}).json()["keys"]
    assert [each["kind"] for each in own] == ["key"]
    assert 0 < own[0]["expires_in"] <= 86400
    assert len(own[0]["payload_hash"]) >= 64
    gone = {"key": "gh-owner/repo-1", "user": "mona"}
    assert server.acme.delete("/admin/run-keys", params=gone).status_code == 404  # type: ignore[attr-defined]
    assert server.root.delete("/admin/run-keys", params=gone).status_code == 204
    assert server.root.delete("/admin/run-keys", params=gone).status_code == 404
    again = mona.post("/runs", json=body)
    assert again.status_code == 201
    assert again.json()["run_id"] != first
    assert ned.post("/runs", json=body).json()["run_id"] == other


def test_a_key_shows_its_owner_its_lease_and_what_it_replays(server: TokenServer, once: Once) -> None:
    claim = once.claim("shown", scope="orders", fingerprint="1:abc", lease=60, ttl=600)
    assert isinstance(claim, Granted)
    at = {"scope": "orders", "key": "shown"}
    shown = server.root.get("/admin/keys", params=at).json()
    assert (shown["state"], shown["fence"], shown["attempt"]) == ("in_flight", claim.claim.fence, claim.claim.attempt)
    assert (shown["fingerprint"], shown["outcome"]) == ("1:abc", None)
    assert 0 < shown["lease_left"] <= 60
    once.complete(claim.claim, {"total": 9})
    shown = server.root.get("/admin/keys", params=at).json()
    assert (shown["state"], shown["outcome"]["kind"], shown["lease_left"]) == ("completed", "value", 0)
    assert server.root.get("/admin/keys", params={"scope": "orders", "key": "free"}).status_code == 404


def test_requests_for_keys_share_the_services_connections(server: TokenServer, once: Once) -> None:
    """Counted where every connection of this process is made; the server lives in it, and its sweeper may need some."""
    claim = once.claim("counted", scope="orders")
    assert isinstance(claim, Granted)
    once.complete(claim.claim, 1)
    at = {"scope": "orders", "key": "counted"}
    opened: list[object] = []

    def note(connection: object, _: object) -> None:
        opened.append(connection)

    event.listen(Pool, "connect", note)
    try:
        for _ in range(10):
            assert server.root.get("/admin/keys", params=at).status_code == 200
            assert server.root.post("/admin/keys/resolve", json={**at, "done": True}).status_code == 409
            assert server.root.delete("/admin/keys", params={**at, "key": "free"}).status_code == 404
    finally:
        event.remove(Pool, "connect", note)
    assert len(opened) <= 5


@pytest.mark.parametrize("done", [True, False])
def test_an_unknown_outcome_is_found_and_resolved(server: TokenServer, once: Once, done: bool) -> None:
    key = f"lost-{done}"
    lose(once, key)
    assert server.root.get("/admin/keys", params={"scope": "orders", "key": key}).json()["state"] == "unknown"
    unresolved = server.root.get("/admin/keys/unresolved").json()["keys"]
    assert ("orders", key) in [(each["scope"], each["key"]) for each in unresolved]
    body = {"scope": "orders", "key": key, "done": done, "value": {"n": 1.5, "s": [None, "é"]}}
    assert server.root.post("/admin/keys/resolve", json=body).status_code == 204
    record = once.get(key, scope="orders")
    if done:
        assert record is not None
        assert record.outcome is not None
        assert record.outcome.value == body["value"]
    else:
        assert record is None
    again = server.root.post("/admin/keys/resolve", json=body)
    assert again.status_code == (409 if done else 404)
    unresolved = server.root.get("/admin/keys/unresolved").json()["keys"]
    assert key not in [each["key"] for each in unresolved]


def test_a_key_that_is_being_worked_on_is_not_resolved_and_deleted_only_by_force(
    server: TokenServer, once: Once
) -> None:
    claim = once.claim("busy", scope="orders", lease=60)
    assert isinstance(claim, Granted)
    at = {"scope": "orders", "key": "busy"}
    resolved = server.root.post("/admin/keys/resolve", json={**at, "done": True})
    assert (resolved.status_code, resolved.json()["error_code"]) == (409, "NOTHING_TO_RESOLVE")
    refused = server.root.delete("/admin/keys", params=at)
    assert (refused.status_code, refused.json()["error_code"]) == (409, "KEY_IN_FLIGHT")
    assert server.root.delete("/admin/keys", params={**at, "force": "true"}).status_code == 204
    assert server.root.delete("/admin/keys", params={**at, "force": "true"}).status_code == 404
    with pytest.raises(ClaimLost):
        once.complete(claim.claim, 1)
    anew = once.claim("busy", scope="orders", lease=60)
    assert isinstance(anew, Granted)
    assert anew.claim.fence > claim.claim.fence
    forced = server.root.post("/admin/keys/resolve", json={**at, "done": True, "value": 7, "force": True})
    assert forced.status_code == 204
    assert once.call("busy", lambda: 8, scope="orders").value == 7


def test_a_completed_key_is_deleted_and_its_work_may_be_done_again(server: TokenServer, once: Once) -> None:
    assert once.call("again", lambda: 1, scope="orders").replayed is False
    assert once.call("again", lambda: 2, scope="orders").value == 1
    assert server.root.delete("/admin/keys", params={"scope": "orders", "key": "again"}).status_code == 204
    assert once.call("again", lambda: 2, scope="orders").value == 2


def test_a_tenant_reaches_only_scopes_that_begin_with_its_name(server: TokenServer, once: Once) -> None:
    acme = server.acme  # type: ignore[attr-defined]
    lose(once, "k", scope_of("acme", "POST /orders"))
    lose(once, "k", scope_of("ACME", "POST /orders"))
    lose(once, "k", "POST /orders")
    at = {"scope": "POST /orders", "key": "k"}
    assert acme.get("/admin/keys", params=at).json()["scope"] == "POST /orders"
    assert [each["scope"] for each in acme.get("/admin/keys/unresolved").json()["keys"]] == ["POST /orders"]
    assert acme.post("/admin/keys/resolve", json={**at, "done": False}).status_code == 204
    assert acme.get("/admin/keys", params=at).status_code == 404
    assert acme.delete("/admin/keys", params=at).status_code == 404
    assert once.get("k", scope="POST /orders") is not None
    assert server.root.get("/admin/keys", params={**at, "tenant": "ACME"}).json()["state"] == "unknown"
    assert server.root.delete("/admin/keys", params={**at, "tenant": "ACME"}).status_code == 204
    assert server.root.delete("/admin/keys", params=at).status_code == 204


@pytest.mark.parametrize("bad", ["", "x" * 256, "a\x00b", "a\nb", "\ud7ff\x85"])
def test_names_that_no_store_can_keep_are_refused_everywhere(server: TokenServer, bad: str) -> None:
    root = server.root
    answers = [
        root.get("/admin/keys", params={"scope": bad, "key": "k"}),
        root.get("/admin/keys", params={"scope": "s", "key": bad}),
        root.delete("/admin/keys", params={"scope": "s", "key": bad}),
        root.post("/admin/keys/resolve", json={"scope": "s", "key": bad, "done": True}),
        root.get("/admin/run-keys", params={"key": bad}),
        root.delete("/admin/run-keys", params={"key": bad, "user": "u"}),
    ]
    if bad:
        answers += [
            root.get("/admin/reservations", params={"user": bad}),
            root.get("/admin/tokens", params={"tenant": bad}),
            root.get("/admin/quotas", params={"tenant": bad}),
            root.delete("/admin/run-keys", params={"key": "k", "user": bad}),
        ]
    assert [answer.status_code for answer in answers] == [400] * len(answers)


def test_a_value_too_deep_to_be_kept_is_refused(server: TokenServer, once: Once) -> None:
    lose(once, "deep")
    value = "[" * 5000 + "]" * 5000
    body = f'{{"scope": "orders", "key": "deep", "done": true, "value": {value}}}'
    answer = server.root.post("/admin/keys/resolve", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 422)
    assert server.root.get("/admin/keys", params={"scope": "orders", "key": "deep"}).json()["state"] == "unknown"


def test_what_admins_do_is_in_the_log_without_secrets(server: TokenServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="semel.service")
    made = server.root.post("/admin/tokens", json={"user": "olaf"}).json()
    server.root.put("/admin/quotas/olaf", json={"per_day": 1})
    server.root.delete(f"/admin/tokens/{made['token']['id']}")
    eventually(lambda: "revoked" in caplog.text)
    assert f"token {made['token']['id']} (submitter of 'olaf', tenant '') was created by 'root'" in caplog.text
    assert "the quota of 'olaf', tenant '', was set by 'root'" in caplog.text
    assert made["secret"] not in caplog.text
    assert made["secret"].split("_", 2)[2] not in caplog.text
