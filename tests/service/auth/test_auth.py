"""Who may use the service: tokens, roles, and the machine it runs on while there are none. Over real HTTP."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import pytest

from semel import App
from semel._concurrency.sync import run_sync
from semel.service import Settings
from semel.service.auth import middleware, tokens
from semel.service.auth.limits import address_of
from semel.service.webhooks.subscriptions import Subscription
from support.databases import DATABASES
from support.service import (
    PATIENCE,
    TestServer,
    TokenServer,
    issue_token,
    local_server,
    make_app,
    send_raw,
    shared_server,
    status_of,
    token_server,
)
from support.waiting import eventually

REFUSED = {
    "type": "urn:semel:unauthenticated",
    "title": "Unauthorized",
    "status": 401,
    "detail": "the token is invalid or has expired",
    "error_code": "UNAUTHENTICATED",
    "retryable": False,
}


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokenServer]:
    with shared_server(request, tmp_path_factory) as server:
        yield server


@pytest.fixture(autouse=True)
def _no_failed_logins(request: pytest.FixtureRequest) -> None:
    if "server" in request.fixturenames:
        request.getfixturevalue("server").forget_failed_logins()


@pytest.fixture(params=DATABASES)
def new_server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TokenServer]:
    """A server of the test's own, where it matters which tokens there are."""
    with token_server(request.getfixturevalue(f"migrated_{request.param}_url"), tmp_path) as server:
        yield server


@pytest.fixture
def service(migrated_sqlite_url: str, tmp_path: Path) -> Iterator[TestServer]:
    """A service without tokens."""
    with local_server(migrated_sqlite_url, tmp_path, dedupe_window=0) as service:
        yield service


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestServer]:
    """A service without tokens; which database it is on plays no part in where a request comes from."""
    folder = tmp_path_factory.mktemp("local")
    with local_server(f"sqlite:///{folder / 'semel.db'}", folder) as server:
        yield server


def revoke_elsewhere(app: App, token_id: str) -> None:
    ledger = app.ledger(awaited=False)
    assert run_sync(ledger.write(tokens.revoke, token_id, None, ledger.statement_context))
    run_sync(ledger.close())


def wrong_secret(secret: str | None) -> str:
    assert secret
    return secret[:-1] + ("A" if secret[-1] != "A" else "B")


def test_a_token_says_who_its_caller_is(server: TokenServer) -> None:
    run = server.admit("alice").post("/runs", json={"model": "add", "parameters": {"a": 1}})
    assert (run.status_code, run.json()["user"]) == (201, "alice")


def test_with_tokens_in_the_database_a_request_without_one_is_refused_wherever_it_comes_from(
    server: TokenServer,
) -> None:
    answer = server.nobody.get("/runs")
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert answer.headers["content-type"] == "application/problem+json"


def test_an_unknown_id_and_a_wrong_secret_get_the_very_same_answer(server: TokenServer) -> None:
    unknown = f"semel_{'0' * 16}_{'x' * 43}"
    answers = [
        server.sending(each).get("/runs") for each in (wrong_secret(server.root.secret), unknown, "nonsense", "semel__")
    ]
    assert [answer.json() for answer in answers] == [REFUSED] * 4
    assert (
        len(
            {
                tuple(sorted((k, v) for k, v in each.headers.items() if k not in ("date", "x-request-id")))
                for each in answers
            }
        )
        == 1
    )


def test_an_unknown_id_and_a_wrong_secret_are_both_looked_up_each_time_even_if_the_token_was_just_used(
    server: TokenServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []
    real = tokens.check

    def noting(conn: object, token_id: str, *rest: object) -> object:
        looked.append(token_id)
        return real(conn, token_id, *rest)  # type: ignore[arg-type]

    alice = server.admit("alice")
    monkeypatch.setattr(tokens, "check", noting)
    monkeypatch.setattr(middleware, "KNOWN_FOR", 600.0)
    assert [alice.get("/runs").status_code for _ in range(3)] == [200] * 3
    assert looked == [alice.id]
    for _ in range(3):
        assert server.sending(wrong_secret(alice.secret)).get("/runs").status_code == 401
        assert server.sending(f"semel_{'0' * 16}_{'x' * 43}").get("/runs").status_code == 401
    assert looked[1:] == [alice.id, "0" * 16] * 3


def test_an_unknown_id_is_compared_with_something_too(monkeypatch: pytest.MonkeyPatch, server: TokenServer) -> None:
    compared: list[str] = []
    real = tokens.fits
    monkeypatch.setattr(tokens, "fits", lambda secret, digest: compared.append(secret) or real(secret, digest))
    for secret in (wrong_secret(server.root.secret), f"semel_{'0' * 16}_{'x' * 43}"):
        assert server.sending(secret).get("/runs").status_code == 401
    assert len(compared) == 2


@pytest.mark.parametrize(
    "sent", ["", "Bearer", "Basic {}", "Token {}", "{}", "Bearer {} {}", "Bearer {}x", 'Bearer "{}"', "Bearer: {}"]
)
def test_what_is_not_a_bearer_token_is_refused(server: TokenServer, sent: str) -> None:
    secret = server.root.secret
    assert server.sending(None, Authorization=sent.format(secret, secret)).get("/runs").status_code == 401


def test_the_scheme_is_taken_in_any_case_and_two_authorizations_in_none(server: TokenServer) -> None:
    secret = server.root.secret
    assert server.sending(None, Authorization=f"bEaReR {secret}").get("/runs").status_code == 200
    assert server.root.get("/runs", headers={"authorization": f"Bearer {secret}"}).status_code == 401


def test_a_token_in_a_second_header_is_refused_even_if_it_was_good_a_moment_ago(server: TokenServer) -> None:
    """The two together read as the text of a good one."""
    secret = server.root.secret
    assert server.root.get("/runs").status_code == 200
    for first, second in (("Bearer", secret), (f"Bearer {secret}", ""), (f"Bearer {secret}", f"Bearer {secret}")):
        both = [("Authorization", first), ("Authorization", str(second))]
        assert server.http.get("/runs", headers=both).status_code == 401
        assert server.http.get("/ui/runs", headers=both, follow_redirects=False).status_code != 200


def test_only_a_digest_of_a_token_is_kept(server: TokenServer) -> None:
    secret = server.root.secret
    ledger = server.app.ledger(awaited=False)
    found = run_sync(ledger.read(tokens.find, server.root.id, ledger.statement_context))
    run_sync(ledger.close())
    assert secret
    assert found is not None
    assert (found[0].user, len(found[1])) == ("root", 64)
    assert secret.split("_", 2)[2] not in repr(found)


def test_a_token_that_expires_ends_then_even_though_it_was_just_used(
    server: TokenServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(middleware, "KNOWN_FOR", 600.0)
    brief = server.admit("brief", ttl=1.0)
    eventually(lambda: brief.get("/runs").status_code == 401)


def test_a_token_says_when_it_was_last_used(server: TokenServer) -> None:
    dora = server.admit("dora")

    def last_used() -> object:
        found = server.root.get("/admin/tokens").json()["tokens"]
        return next(each["last_used_at"] for each in found if each["user"] == "dora")

    assert last_used() is None
    dora.get("/runs")
    eventually(lambda: last_used() is not None)


def test_a_revoked_token_ends_at_once_where_it_was_revoked(server: TokenServer) -> None:
    alice = server.admit("alice")
    assert alice.get("/runs").status_code == 200
    assert server.root.delete(f"/admin/tokens/{alice.id}").status_code == 204
    assert alice.get("/runs").status_code == 401


def test_a_token_that_was_revoked_elsewhere_ends_soon(server: TokenServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "KNOWN_FOR", 0.05)
    alice = server.admit("alice")
    assert alice.get("/runs").status_code == 200
    revoke_elsewhere(server.app, alice.id)
    eventually(lambda: alice.get("/runs").status_code == 401)


def test_after_a_rotation_the_old_token_works_for_the_grace_and_the_new_one_from_the_start(server: TokenServer) -> None:
    alice = server.admit("alice")
    second = server.root.post(f"/admin/tokens/{alice.id}/rotate", json={"grace": 3600}).json()
    assert alice.get("/runs").status_code == 200
    fresh = server.sending(second["secret"])
    assert fresh.get("/runs").status_code == 200
    third = server.root.post(f"/admin/tokens/{fresh.id}/rotate", json={}).json()
    assert fresh.get("/runs").status_code == 401
    assert third["token"]["user"] == "alice"
    assert server.root.post(f"/admin/tokens/{fresh.id}/rotate", json={}).status_code == 404


def test_tokens_that_expired_a_month_ago_are_forgotten(tmp_path: Path, migrated_sqlite_url: str) -> None:
    now = 1_800_000_000_000_000
    app = make_app(migrated_sqlite_url, tmp_path, clock=lambda: now)
    issue_token(app, "old", ttl=10)
    now += 29 * 86400 * 1_000_000
    issue_token(app, "kept")
    ledger = app.ledger(awaited=False)
    assert [each.user for each in run_sync(ledger.read(tokens.list_tokens, None))] == ["old", "kept"]
    now += 2 * 86400 * 1_000_000
    issue_token(app, "new")
    assert [each.user for each in run_sync(ledger.read(tokens.list_tokens, None))] == ["kept", "new"]
    run_sync(ledger.close())
    app.close()


def test_without_tokens_this_machine_is_an_admin_until_the_first_token_which_is_an_admins(service: TestServer) -> None:
    with service.client(verify=False) as client:
        run = client.post("/runs", json={"model": "add", "parameters": {"a": 1}})
        assert (run.status_code, run.json()["user"]) == (201, "local")
        assert client.get("/runs", headers={"Authorization": f"Bearer semel_{'0' * 16}_{'x' * 43}"}).status_code == 401
        early = client.post("/admin/tokens", json={"user": "alice"})
        assert (early.status_code, early.json()["error_code"]) == (409, "ADMIN_FIRST")
        foreign = client.post("/admin/tokens", json={"user": "alice", "role": "admin", "tenant": "acme"})
        assert foreign.status_code == 409
        assert client.get("/admin/tokens").json() == {"tokens": [], "next": None}
        made = client.post("/admin/tokens", json={"user": "root", "role": "admin"})
        assert (made.status_code, made.headers["cache-control"]) == (201, "no-store")
        assert client.get("/runs").status_code == 401
        own = {"Authorization": f"Bearer {made.json()['secret']}"}
        assert client.post("/admin/tokens", json={"user": "alice"}, headers=own).status_code == 201


def test_the_last_admin_token_stays_even_if_two_admins_revoke_each_other(new_server: TokenServer) -> None:
    root = new_server.root
    new_server.admit("acmes", "admin", "acme")
    new_server.admit("brief", "admin", ttl=60.0)
    refused = root.delete(f"/admin/tokens/{root.id}")
    assert (refused.status_code, refused.json()["error_code"]) == (409, "LAST_ADMIN")
    for _ in range(4):
        other = new_server.admit("other", "admin")
        pair = [(root, other), (other, root)]
        with ThreadPoolExecutor(2) as pool:
            left, right = pool.map(lambda both: both[0].delete(f"/admin/tokens/{both[1].id}").status_code, pair)
        assert sorted([left, right]) in ([204, 401], [204, 409])
        root = root if left == 204 else other
        assert root.get("/admin/tokens").status_code == 200


def test_a_server_that_had_tokens_does_not_trust_the_machine_again_when_they_are_gone(new_server: TokenServer) -> None:
    assert new_server.nobody.get("/runs").status_code == 401
    revoke_elsewhere(new_server.app, new_server.root.id)
    new_server.state.auth.clear_cache()
    assert new_server.nobody.get("/runs").status_code == 401
    assert new_server.root.get("/runs").status_code == 401


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "localhost.evil.example"},
        {"Host": "127.0.0.1.evil.example:8001"},
        {"Host": "0.0.0.0:8001"},
        {"Host": "[::2]:8001"},
        {"Host": "localhost@evil.example"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost.evil.example"},
        {"Origin": "file://"},
        {"Forwarded": "for=192.0.2.60"},
        {"X-Forwarded-For": "127.0.0.1"},
        {"X-Real-IP": "127.0.0.1"},
        {"X-Forwarded-Host": "localhost"},
        {"Via": "1.1 proxy"},
        {"X-Forwarded-Proto": "https"},
        {"CF-Connecting-IP": "203.0.113.9"},
        {"X-Forwarded-Port": "443"},
        {"X-Forwarded-Prefix": "/semel"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
    ],
    ids=lambda headers: " ".join(f"{name}={value}" for name, value in headers.items()),
)
def test_without_tokens_other_names_pages_and_proxies_are_refused(local: TestServer, headers: dict[str, str]) -> None:
    with local.client(verify=False) as client:
        answer = client.post("/runs", json={"model": "add", "parameters": {"a": 1}}, headers=headers)
        assert answer.status_code in (400, 403), answer.text
        assert client.get("/runs").json()["runs"] == []
        assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "localhost"},
        {"Host": "LOCALHOST:8001"},
        {"Host": "127.0.0.1:1"},
        {"Host": "127.8.8.8"},
        {"Host": "[::1]:8001"},
        {"Origin": "http://localhost:3000"},
        {"Origin": "http://127.0.0.1"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"},
        {"Sec-Fetch-Site": "same-origin"},
    ],
    ids=lambda headers: " ".join(f"{name}={value}" for name, value in headers.items()),
)
def test_without_tokens_this_machine_may_be_called_by_any_of_its_own_names(
    local: TestServer, headers: dict[str, str]
) -> None:
    with local.client(verify=False) as client:
        assert client.get("/runs", headers=headers).status_code == 200


def test_without_tokens_a_request_that_names_no_host_is_refused(local: TestServer) -> None:
    assert status_of(send_raw(local.address, b"GET /runs HTTP/1.0\r\n\r\n")) == 403
    twice = b"GET /runs HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\nConnection: close\r\n\r\n"
    assert status_of(send_raw(local.address, twice)) in (400, 403)


def test_no_page_of_another_site_is_let_in_by_cors(server: TokenServer) -> None:
    asked = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    answers = [
        who.request(verb, "/runs", headers=asked) for who in (server.nobody, server.root) for verb in ("OPTIONS", "GET")
    ]
    assert [answer.status_code for answer in answers[:2]] == [401, 401]
    assert not [name for answer in answers for name in answer.headers if name.startswith("access-control")]


def test_too_many_wrong_tokens_from_an_address_are_told_to_wait_and_good_ones_pass_on(
    server: TokenServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.state.auth, "_failures", middleware.RateLimits(0.001, 5))
    assert server.root.get("/runs").status_code == 200
    statuses = [server.sending(f"semel_{n:016x}_{'x' * 43}").get("/runs").status_code for n in range(7)]
    assert statuses == [401] * 5 + [429] * 2
    told = server.sending("nonsense").get("/runs")
    assert (told.status_code, told.json()["error_code"]) == (429, "TOO_MANY_REQUESTS")
    assert int(told.headers["retry-after"]) >= 1
    assert server.root.get("/runs").status_code == 200
    monkeypatch.setattr(middleware, "KNOWN_FOR", 0.0)
    assert server.root.get("/runs").status_code == 200
    assert server.admit("newcomer").get("/runs").status_code == 200, "good, and never seen here before"


def test_wrong_tokens_fill_no_memory(server: TokenServer) -> None:
    known = len(server.state.auth._known)
    for n in range(20):
        assert server.sending(f"semel_{n:016x}_{'x' * 43}").get("/runs").status_code == 401
    assert len(server.state.auth._known) <= known
    assert len(server.state.auth._failures) == 1


def test_only_the_names_that_were_asked_for_last_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("semel.service.auth.limits.MOST_NAMES", 3)
    buckets = middleware.RateLimits(0.001, 1)
    assert [buckets.take(name) > 0 for name in "aabbccdd"] == [False, True] * 4
    assert len(buckets) == 3
    assert buckets.take("d") > 0
    assert buckets.take("a") == 0


def test_whoever_has_one_address_of_an_ipv6_network_has_them_all() -> None:
    seen = {address_of({"client": (host, 1)}) for host in ("2001:db8::1", "2001:db8::ffff:1", "2001:db8:0:0:9::")}
    assert seen == {"2001:db8::"}
    assert address_of({"client": ("::ffff:192.0.2.1", 1)}) == address_of({"client": ("192.0.2.1", 1)})
    assert address_of({"client": None}) == address_of({}) == ""


def test_the_rate_of_a_token_is_limited_and_that_of_another_is_its_own(
    migrated_sqlite_url: str, tmp_path: Path
) -> None:
    with token_server(migrated_sqlite_url, tmp_path, Settings(rate=0.01)) as server:
        alice, bob = server.admit("alice"), server.admit("bob")
        assert [alice.get("/runs").status_code for _ in range(3)] == [200, 429, 429]
        refused = alice.get("/runs")
        assert int(refused.headers["retry-after"]) > 1
        assert refused.json()["retryable"] is True
        assert bob.get("/runs").status_code == 200
        assert server.nobody.get("/healthz").status_code == 200


def test_who_waits_or_listens_learns_nothing_after_their_token_has_ended(server: TokenServer) -> None:
    alice, bert = server.admit("alice", "operator"), server.admit("bert", "operator")
    run = server.root.post("/runs", json={"model": "add", "parameters": {"a": 1}, "delay": 3600}).json()["run_id"]
    with ThreadPoolExecutor(2) as threads:
        waits = threads.submit(alice.get, f"/runs/{run}?wait=60")
        listens = threads.submit(bert.get, f"/runs/{run}/events")
        eventually(lambda: sum(len(each) for each in server.state.watch._waiters.values()) == 2)
        for person in (alice, bert):
            assert server.root.delete(f"/admin/tokens/{person.id}").status_code == 204
        assert server.root.post(f"/runs/{run}/cancel").status_code == 200
        assert waits.result(PATIENCE).status_code == 401
        told = listens.result(PATIENCE).text
    assert "PENDING" in told
    assert "CANCELLED" not in told


def test_a_submitter_cannot_pass_a_limit_by_saying_that_a_run_costs_nothing(server: TokenServer) -> None:
    alice, boss = server.admit("alice"), server.admit("boss", "operator")
    asked = {"model": "train", "parameters": {}, "delay": 3600}
    for cost, status in ((0, 403), (2.4, 403), (2.5, 201), (9, 201), (None, 201)):
        answer = alice.post("/runs", json=asked | {"cost": cost})
        assert answer.status_code == status, answer.text
    (refused, taken) = alice.post("/runs/bulk", json=[asked | {"cost": 1}, asked]).json()
    assert (refused["status"], taken["status"]) == (403, 201)
    assert boss.post("/runs", json=asked | {"cost": 0}).json()["cost"] == 0.0


def test_a_request_has_one_key_and_that_is_ascii(server: TokenServer) -> None:
    body = json.dumps({"model": "add", "parameters": {"a": 1}, "delay": 3600}).encode()
    head = [("Authorization", f"Bearer {server.root.secret}"), ("Content-Type", "application/json")]
    for keys, status in (
        ([b"a", b"b"], 400),
        (["clé".encode()], 400),
        (["clé".encode("latin-1")], 400),
        ([b"two-of-one"] * 2, 201),
    ):
        headers = [*head, *(("Idempotency-Key", key) for key in keys)]
        answer = server.http.post("/runs", content=body, headers=headers)
        assert answer.status_code == status, answer.text
    with_it = {"model": "add", "parameters": {"a": 1}, "delay": 3600, "idempotency_key": "clé"}
    assert [server.root.post("/runs", json=with_it).status_code for _ in range(2)] == [201, 200]


def test_a_token_that_is_rotated_twice_is_replaced_for_as_long_as_it_was_made(server: TokenServer) -> None:
    """The first answer may be lost: whoever asks again within the grace must not get one that dies with it."""
    for ttl in (None, 86400.0):
        old = server.admit("erin", ttl=ttl)
        lifetimes = []
        for _ in range(2):
            made = server.root.post(f"/admin/tokens/{old.id}/rotate", json={"grace": 60}).json()["token"]
            begun, until = (made[name] and datetime.fromisoformat(made[name]) for name in ("created_at", "expires_at"))
            lifetimes.append(until and (until - begun).total_seconds())
        assert lifetimes == [ttl, ttl]


def test_so_many_requests_of_a_caller_wait_or_listen_at_a_time(tmp_path: Path, migrated_sqlite_url: str) -> None:
    with (
        token_server(migrated_sqlite_url, tmp_path, Settings(max_waiting=3)) as server,
        ThreadPoolExecutor(4) as threads,
    ):
        alice, bert = server.admit("alice", "operator"), server.admit("bert", "operator")
        run = server.root.post("/runs", json={"model": "add", "parameters": {"a": 1}, "delay": 3600}).json()["run_id"]
        paths = [f"/runs/{run}?wait=60", f"/runs/{run}?wait=60", f"/runs/{run}/events"]
        waiting = [threads.submit(alice.get, path) for path in paths]
        eventually(lambda: sum(len(each) for each in server.state.watch._waiters.values()) == 3)
        for path in paths[1:]:
            told = alice.get(path)
            assert (told.status_code, told.json()["error_code"]) == (429, "TOO_MANY_REQUESTS")
            assert int(told.headers["retry-after"]) >= 1
        assert alice.get(f"/runs/{run}").status_code == 200
        other = threads.submit(bert.get, paths[0])
        eventually(lambda: sum(len(each) for each in server.state.watch._waiters.values()) == 4)
        assert server.root.post(f"/runs/{run}/cancel").status_code == 200
        assert {each.result(PATIENCE).status_code for each in [*waiting, other]} == {200}
        assert not server.state.wait_slots._held


def test_what_is_printed_by_accident_has_no_secret() -> None:
    settings = Settings(db="postgresql://u:hush@h/d", replicate_token="hush", events="redis://:hush@h", port=7)
    assert "hush" not in repr(settings)
    assert "port=7" in repr(settings)
    target = {"kind": "webhook", "target": "https://h/", "events": "*", "created_us": 0, "disabled_us": None}
    assert "hush" not in repr(Subscription(id="1", tenant="", secret="hush", **target))


def test_an_operator_cannot_submit_for_nobody(server: TokenServer) -> None:
    """A run of nobody's would be held by nobody's quota."""
    operator = server.admit("oona", "operator")
    server.root.put("/admin/quotas/oona", json={"max_concurrent": 0})
    asked = {"model": "add", "parameters": {"a": 1}}
    assert operator.post("/runs", json=asked).status_code == 429
    alone = operator.post("/runs", json={**asked, "user": ""})
    assert (alone.status_code, alone.json()["error_code"]) == (400, "INVALID_REQUEST")
    assert "user" in alone.json()["detail"]
    assert operator.post("/runs/bulk", json=[{**asked, "user": ""}]).status_code in (207, 400)
    assert operator.get("/runs", params={"user": ""}).json()["runs"] == []
