"""Who sees what: every role of two tenants on every route of the service, as its own schema names them.

A route that is added must be added to ``LEAST``, with the least role that may use it.
"""

import asyncio
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from semel import App, Context
from semel.service import Settings, asgi
from semel.service.app import _litestar
from semel.service.jobs.providers import handlers_of
from support.databases import DATABASES
from support.service import TokenClient, TokenServer, shared_server

ANYBODY = "anybody"
RANKS = ("submitter", "operator", "admin")
LEAST = {
    "GET /healthz": ANYBODY,
    "GET /readyz": ANYBODY,
    "POST /api/cloud/webhooks/replicate/{token}": ANYBODY,
    "GET /metrics": "operator",
    "GET /workers": "operator",
    "GET /pauses": "operator",
    "PUT /pauses/{kind}/{name}": "operator",
    "DELETE /pauses/{kind}/{name}": "operator",
    "GET /models": "submitter",
    "GET /summary": "submitter",
    "GET /usage": "submitter",
    "GET /usage/{user}": "submitter",
    "GET /runs": "submitter",
    "POST /runs": "submitter",
    "POST /runs/bulk": "submitter",
    "GET /runs/actions": "submitter",
    "POST /runs/actions": "submitter",
    "GET /runs/actions/{action_id}": "submitter",
    "GET /runs/{run_id}": "submitter",
    "GET /runs/{run_id}/artifacts/{name}": "submitter",
    "POST /runs/{run_id}/cancel": "submitter",
    "GET /runs/{run_id}/diff/{other_id}": "submitter",
    "GET /runs/{run_id}/drift": "submitter",
    "GET /runs/{run_id}/events": "submitter",
    "GET /runs/{run_id}/logs": "submitter",
    "GET /runs/{run_id}/manifest": "submitter",
    "GET /runs/{run_id}/proof": "submitter",
    "POST /runs/{run_id}/rerun": "submitter",
    "GET /runs/{run_id}/result": "submitter",
    "GET /runs/{run_id}/{fence}/result.json/result": "submitter",
    "POST /runs/{run_id}/retry": "submitter",
    "GET /runs/{run_id}/timeline": "submitter",
    "GET /runs/{run_id}/waiting": "submitter",
    "GET /api/cloud/jobs": "submitter",
    "POST /api/cloud/jobs/submit": "submitter",
    "GET /api/cloud/jobs/{job_id}": "submitter",
    "POST /api/cloud/jobs/{job_id}/cancel": "submitter",
    "GET /api/cloud/cost-limit/status": "submitter",
    "GET /api/cloud/configs": "submitter",
    "GET /api/cloud/configs/{name}": "submitter",
    "PUT /api/cloud/configs/{name}": "operator",
    "DELETE /api/cloud/configs/{name}": "operator",
    "GET /admin/tokens": "operator",
    "POST /admin/tokens": "admin",
    "POST /admin/tokens/{token_id}/rotate": "admin",
    "DELETE /admin/tokens/{token_id}": "admin",
    "GET /admin/audit": "admin",
    "GET /admin/quotas": "operator",
    "GET /admin/quotas/{user}": "operator",
    "PUT /admin/quotas/{user}": "admin",
    "DELETE /admin/quotas/{user}": "admin",
    "GET /admin/reservations": "operator",
    "DELETE /admin/reservations/{reservation}": "admin",
    "GET /admin/keys": "operator",
    "DELETE /admin/keys": "admin",
    "GET /admin/keys/unresolved": "operator",
    "POST /admin/keys/resolve": "admin",
    "GET /admin/run-keys": "operator",
    "DELETE /admin/run-keys": "admin",
    "GET /admin/subscriptions": "admin",
    "POST /admin/subscriptions": "admin",
    "GET /admin/subscriptions/{subscription_id}": "admin",
    "DELETE /admin/subscriptions/{subscription_id}": "admin",
    "POST /admin/subscriptions/{subscription_id}/test": "admin",
    "GET /admin/deliveries": "admin",
    "POST /admin/deliveries/{subscription_id}/{run_id}/{version}/resend": "admin",
}
MAIN_TENANT_ONLY = {"GET /metrics", "GET /pauses", "PUT /pauses/{kind}/{name}", "DELETE /pauses/{kind}/{name}"}
"""What is of all tenants together."""
BODIES: dict[str, Any] = {
    "PUT /api/cloud/configs/{name}": {"model": "add", "parameters": {"a": 1}},
    "PUT /admin/quotas/{user}": {"per_day": 1000},
    "PUT /pauses/{kind}/{name}": {"why": "closed"},
    "POST /runs": {"model": "add", "parameters": {"a": 1}},
    "POST /runs/bulk": {"runs": [{"model": "add", "parameters": {"a": 1}}]},
    "POST /api/cloud/jobs/submit": {"config_name_to_load": "nothing"},
    "POST /runs/actions": {"action": "cancel", "filter": {"queue": "nothing"}},
}
QUERIES = {
    "GET /admin/keys": {"scope": "s", "key": "k"},
    "DELETE /admin/keys": {"scope": "s", "key": "k"},
    "GET /admin/run-keys": {"key": "k"},
    "DELETE /admin/run-keys": {"key": "k", "user": "u"},
}


class Seat(NamedTuple):
    """Somebody of a role, in a tenant."""

    role: str
    tenant: str
    person: TokenClient


class World(NamedTuple):
    """A town of two tenants, with a run and a job of alice's in the main one."""

    server: TokenServer
    seats: list[Seat]
    alice: TokenClient
    run: str
    job: str
    waiting: str


@pytest.fixture(scope="module", params=DATABASES)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with shared_server(request, tmp_path_factory, Settings(private_webhooks=True)) as server:
        yield settled(server)


def settled(server: TokenServer) -> World:
    @server.app.model("leave", isolation="thread")
    def leave(ctx: Context, word: str) -> str:
        ctx.log.info(word)
        ctx.artifact("note.txt").write_text(word)
        return word

    seats = [
        Seat(role, tenant, server.admit(f"{role}-{tenant}", role, tenant)) for role in RANKS for tenant in ("", "acme")
    ]
    alice = server.admit("alice")
    body = {"model": "leave", "parameters": {"word": "privy"}, "idempotency_key": "alices"}
    run = alice.post("/runs", json=body).json()["run_id"]
    config = {"model": "add", "parameters": {"a": 1}}
    assert seats[2].person.put("/api/cloud/configs/mine", json=config).status_code == 200
    job = alice.post("/api/cloud/jobs/submit", json={"config_name_to_load": "mine"}).json()["job_id"]
    later = {"model": "leave", "parameters": {"word": "later"}, "delay": 3600}
    waiting = alice.post("/runs", json=later).json()["run_id"]
    with server.app.working(processes=0):
        for each in (run, job):
            assert server.app.wait(each, timeout=60).status == "SUCCEEDED"
    return World(server, seats, alice, run, job, waiting)


def routes(server: TokenServer) -> list[str]:
    """Every route of the service, as its schema has it."""
    paths = server.root.get("/schema/openapi.json").json()["paths"]
    return [f"{method.upper()} {path}" for path, methods in paths.items() for method in methods]


def asked(who: TokenClient, route: str, places: dict[str, str] | None = None, **options: Any) -> httpx.Response:
    """A request to the route: what the path names is nothing that is there, unless ``places`` says so."""
    method, path = route.split(" ", 1)
    names = {"run_id": "0" * 32, "other_id": "0" * 32, "version": "1", "kind": "queue", **(places or {})}
    if "{user}" in path:
        names["user"] = who_is(who)
    for part in path.split("/"):
        if part.startswith("{"):
            path = path.replace(part, names.get(part[1:-1], "0" * 16))
    if method in ("POST", "PUT") and not path.endswith(("/retry", "/test", "/resend")):
        options.setdefault("json", BODIES.get(route, {}))
    return who.request(method, path, params=QUERIES.get(route), **options)


def who_is(who: TokenClient) -> str:
    return "alice" if who.secret is None else str(who.get("/usage").json().get("user", "alice"))


def test_every_route_is_in_the_table(world: World) -> None:
    assert sorted(routes(world.server)) == sorted(LEAST)


def test_every_route_is_open_to_its_least_role_and_closed_below_it_in_either_tenant(world: World) -> None:
    wrong = []
    for route, least in LEAST.items():
        for seat in world.seats:
            status = asked(seat.person, route).status_code
            enough = least == ANYBODY or RANKS.index(seat.role) >= RANKS.index(least)
            enough = enough and not (seat.tenant and route in MAIN_TENANT_ONLY)
            fits = status not in (401, 403) and status < 500 if enough else status == 403
            if not fits and not (least == ANYBODY and status in (401, 503)):
                wrong.append((route, seat.role, seat.tenant, status))
    assert wrong == []


@pytest.mark.parametrize("tenant", ["", "acme"])
def test_a_viewer_reads_every_route_of_an_admin_and_writes_none(world: World, tenant: str) -> None:
    viewer = world.server.admit(f"viewer-{tenant}", "viewer", tenant)
    admin = next(seat.person for seat in world.seats if (seat.role, seat.tenant) == ("admin", tenant))
    wrong = []
    for route, least in LEAST.items():
        if least == ANYBODY:
            continue
        status, told = asked(viewer, route).status_code, asked(admin, route).status_code if route[:3] == "GET" else 403
        if status != told:
            wrong.append((route, status, told))
    assert wrong == []


def test_a_viewer_sees_the_runs_of_everybody_and_ends_none(world: World) -> None:
    viewer = world.server.admit("vera", "viewer")
    assert world.run in viewer.get("/runs?limit=1000").text
    assert viewer.get(f"/runs/{world.run}/result").text == '"privy"'
    for path in (f"/runs/{world.waiting}/cancel", f"/runs/{world.run}/rerun", "/runs", "/nowhere"):
        refused = viewer.post(path, json={})
        assert (refused.status_code, refused.json()["error_code"]) == (403, "FORBIDDEN")
        assert "viewer" in refused.json()["detail"]
    assert world.alice.get(f"/runs/{world.waiting}").json()["status"] == "PENDING"
    foreign = world.server.admit("vico", "viewer", "acme")
    assert world.run not in foreign.get("/runs?limit=1000").text
    assert foreign.get(f"/runs/{world.run}").status_code == 404


def test_a_viewer_writes_nothing_from_any_page(world: World) -> None:
    """Every route of the dashboard that takes a form, as the application has it."""
    viewer = world.server.admit("vera", "viewer")
    application = _litestar(tuple(handlers_of(world.server.state.providers.values())))
    forms = [
        route.path_format
        for route in application.routes
        for method in getattr(route, "methods", ())
        if method not in ("GET", "HEAD", "OPTIONS") and route.path_format.startswith("/ui")
    ]
    assert len(forms) > 10
    for path in forms:
        answer = viewer.post(path.replace("{run_id}", world.waiting), data={}, follow_redirects=False)
        harmless = path in ("/ui/sign-in", "/ui/sign-out", "/ui/runs/compare")
        assert harmless or answer.status_code == 403, (path, answer.status_code)
    for path in ("/", "/ui/runs", "/ui/keys", "/ui/quotas", "/ui/audit", f"/ui/runs/{world.run}"):
        assert viewer.get(path, follow_redirects=False).status_code == 200, path


def test_without_a_token_only_what_is_open_to_anybody_answers(world: World) -> None:
    wrong = []
    for route, least in LEAST.items():
        for who in (world.server.nobody, world.server.sending(f"semel_{'0' * 16}_{'x' * 43}")):
            world.server.state.auth._failures._buckets.clear()
            answer = asked(who, route)
            if least != ANYBODY and answer.status_code != 401:
                wrong.append((route, answer.status_code))
            if least == ANYBODY and answer.json().get("detail") == "the token is invalid or has expired":
                wrong.append((route, answer.status_code))
    assert wrong == []
    assert world.server.nobody.get("/schema/openapi.json").status_code == 401


def outsiders(world: World) -> list[TokenClient]:
    """Who must not see what is alice's."""
    return [seat.person for seat in world.seats if seat.tenant or seat.role == "submitter"]


@pytest.mark.parametrize("route", [each for each in LEAST if "{run_id}" in each or "{job_id}" in each])
def test_a_foreign_run_is_not_there(world: World, route: str) -> None:
    places = {"run_id": world.run, "other_id": world.run, "job_id": world.job, "name": "note.txt"}
    hidden = [asked(who, route, places) for who in outsiders(world)]
    assert {answer.status_code for answer in hidden} <= ({404} if "/admin/" not in route else {403, 404})
    unknown = asked(outsiders(world)[0], route)
    assert hidden[0].status_code == unknown.status_code
    assert hidden[0].json()["error_code"] == unknown.json()["error_code"]
    assert all("privy" not in answer.text for answer in hidden)
    if "/admin/" not in route:
        assert asked(world.alice, route, places).status_code in (200, 201, 204, 304, 409)


@pytest.mark.parametrize("path", ["/runs/{}/cancel", "/api/cloud/jobs/{}/cancel", "/runs/{}/retry", "/runs/{}/rerun"])
def test_nobody_else_ends_or_repeats_a_run(world: World, path: str) -> None:
    statuses = [who.post(path.format(world.waiting)).status_code for who in outsiders(world)]
    assert set(statuses) == {404}
    assert world.alice.get(f"/runs/{world.waiting}").json()["status"] == "PENDING"
    assert world.alice.get(f"/runs/{world.waiting}").json()["cancel_requested"] is False


def test_lists_and_summaries_show_only_what_is_ones_own(world: World) -> None:
    for path in (
        "/runs?limit=1000",
        "/api/cloud/jobs?limit=100",
        "/summary?grouped=true",
        "/runs?idempotency_key=alices",
    ):
        assert "leave" in world.alice.get(path).text or world.job in world.alice.get(path).text, path
        for who in outsiders(world):
            told = who.get(path)
            assert told.status_code == 200, path
            assert not [word for word in ("leave", world.run, world.job, "alice") if word in told.text], path
    for seat in world.seats:
        if not seat.tenant and seat.role != "submitter":
            assert world.run in seat.person.get("/runs?limit=1000").text
    for path in ("/runs?user=alice", "/api/cloud/jobs?user=alice", "/api/cloud/cost-limit/status?user=alice"):
        assert world.seats[0].person.get(path).status_code in (400, 403), path


def test_configs_are_those_of_the_own_tenant(world: World) -> None:
    for seat in world.seats:
        there = seat.person.get("/api/cloud/configs/mine").status_code
        assert there == (404 if seat.tenant else 200)
    foreign = world.seats[1].person.post("/api/cloud/jobs/submit", json={"config_name_to_load": "mine"}).json()
    assert foreign["success"] is False


def test_a_key_is_its_users_and_its_tenants(world: World) -> None:
    body = {"model": "add", "parameters": {"a": 1}, "idempotency_key": "shared"}
    ids = [seat.person.post("/runs", json=body).json()["run_id"] for seat in world.seats]
    assert len(set(ids)) == len(world.seats)
    same = {**body, "user": "alice"}
    assert world.seats[0].person.post("/runs", json=same).status_code == 403


def test_no_secret_is_in_any_log_line_or_in_any_answer_but_the_one_that_hands_it_out(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for name in list(logging.root.manager.loggerDict):  # SQLAlchemy at DEBUG shows rows: whoever wants that, has them
        caplog.set_level(logging.INFO if name.startswith("sqlalchemy") else logging.DEBUG, logger=name)
    root = world.server.root
    made = root.post("/admin/tokens", json={"user": "secretive", "role": "admin"}).json()
    named = root.post("/admin/subscriptions", json={"url": "http://user:hunter2@127.0.0.1:9/x"})
    hook = root.post("/admin/subscriptions", json={"url": "http://127.0.0.1:9/x?sig=hunter3"}).json()
    secretive = world.server.sending(made["secret"])
    wrong = world.server.sending(made["secret"][:-1] + ("A" if made["secret"][-1] != "A" else "B"))
    answers = []
    for route in LEAST:
        answers += [asked(who, route) for who in (secretive, wrong)]
        world.server.state.auth._failures._buckets.clear()
    handed = root.post(f"/admin/tokens/{secretive.id}/rotate", json={}).json()["secret"]
    root.delete(f"/admin/subscriptions/{hook['subscription']['id']}")
    assert (named.status_code, "hunter2" in named.text) == (422, False)
    assert "/admin/tokens" in caplog.text
    assert "hunter" not in caplog.text
    for secret in (made["secret"], handed, wrong.secret or "", hook["secret"]):
        for part in {secret, secret.split("_", 2)[-1]}:
            assert part not in caplog.text
            assert [answer.request.url for answer in answers if part in answer.text] == []


def test_the_password_of_a_database_that_is_away_is_not_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    app = App("postgresql://semel:hunter2@127.0.0.1:1/semel")

    async def answers() -> list[httpx.Response]:
        transport = httpx.ASGITransport(asgi(app))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", verify=False) as client:
            return [await client.get(path) for path in ("/runs", "/healthz", "/readyz", "/metrics")]

    told = asyncio.run(answers())
    assert {answer.status_code for answer in told} == {503}
    assert "hunter2" not in caplog.text + "".join(answer.text for answer in told)


def test_the_roles_of_the_docs_are_those_of_the_service() -> None:
    page = (Path(__file__).parents[3] / "docs" / "security.md").read_text()
    table = page.partition("## Roles")[2].partition("## ")[0]
    rows = re.findall(r"^\| (\w+) \| (.+) \|$", table, re.MULTILINE)
    told = {route: role for role, routes in rows for route in re.findall(r"`([A-Z]+ /[^`]+)`", routes)}
    assert told == LEAST
