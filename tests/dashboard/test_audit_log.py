"""The page of what people did: filters, pages, and who may see it; in a real browser, too."""

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from semel import Actor, Quota
from semel.dashboard.audit_log import PAGE
from support.dashboard import DashboardServer, Visit, dashboard_server
from support.pages import browser
from support.service import TokenServer, shared_server

SCRIPT = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokenServer]:
    with shared_server(request, tmp_path_factory) as server:
        by = Actor(user=SCRIPT, role="admin", address="192.0.2.7", entrance="api")
        for number in range(60):
            server.app.set_quota(f"user-{number}", Quota(per_day=number), by=by)
        server.app.set_quota("user-7", None)
        server.app.set_quota("kim", Quota(per_day=1), tenant="acme", by=Actor(user="wile", tenant="acme"))
        yield server


def test_rows_are_newest_first_page_by_page_and_nothing_in_them_is_html(server: TokenServer) -> None:
    with browser(server, server.root) as visitor:
        first = visitor.open("/ui/audit")
        rows = first.one(id="actions").rows()
        assert len(rows) == PAGE
        assert rows[0][4:6] == ["quota.set tenant acme", "kim"]
        assert rows[1][4:6] == ["quota.removed", "user-7"]
        assert "per_day 7" in rows[1][6]
        assert rows[2][2] == f"{SCRIPT} admin"
        assert SCRIPT not in first.answer.text
        page = first
        while older := page.all("a", rel="next"):
            page = visitor.open(older[0]["href"])
            rows += page.one(id="actions").rows()
        assert len({(row[0], row[4]) for row in rows}) == len(rows) == 62
        assert rows[-1][5] == "user-0"


@pytest.mark.parametrize(
    ("query", "count"),
    [
        ({"target": "user-7"}, 2),
        ({"action": "quota.removed"}, 1),
        ({"action": "token"}, 0),
        ({"user": "wile"}, 1),
        ({"tenant": "acme"}, 1),
        ({"entrance": "cli"}, 0),
        ({"until": "2020-01-01T00:00"}, 0),
        ({"since": "2020-01-01T00:00", "target": "user-7", "entrance": "api"}, 1),
    ],
)
def test_the_filters_are_those_of_the_api(server: TokenServer, query: dict[str, str], count: int) -> None:
    with browser(server, server.root) as visitor:
        page = visitor.open("/ui/audit", params=query)
        assert page.status == 200
        found = page.one(id="actions")
        assert len(found.rows() if found.all("tbody") else []) == count
        for name, value in query.items():
            fields = [each for each in page.all("input", name=name) if each.get("value") == value]
            assert fields or page.all("option", value=value, selected=""), "the form shows the filter"


@pytest.mark.parametrize("query", [{"since": "soon"}, {"cursor": "x"}, {"entrance": "window"}])
def test_a_filter_that_cannot_be_is_told_on_the_page(server: TokenServer, query: dict[str, str]) -> None:
    with browser(server, server.root) as visitor:
        page = visitor.open("/ui/audit", params=query)
        assert page.status == 400
        assert "INVALID_REQUEST" in page.one(role="alert").text
        assert page.all("form", role="search")


def test_only_admins_have_the_page_and_those_of_a_tenant_see_its_rows(server: TokenServer) -> None:
    for role, tenant, status, count in (
        ("submitter", "", 403, 0),
        ("operator", "", 403, 0),
        ("admin", "acme", 200, 1),
    ):
        with browser(server, server.admit(f"{role}-1", role, tenant)) as visitor:
            page = visitor.open("/ui/audit")
            assert page.status == status
            links = [each.text for each in visitor.open("/ui/runs").all("a") if each.get("href") == "/ui/audit"]
            assert links == (["Audit"] if status == 200 else [])
            if count:
                assert len(page.one(id="actions").rows()) == count
                assert visitor.open("/ui/audit", params={"tenant": "globex"}).status == 403


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DashboardServer]:
    folder = tmp_path_factory.mktemp("scene")
    with dashboard_server(f"sqlite:///{folder / 'semel.db'}", folder) as server:
        yield server


def test_an_admin_finds_who_cancelled_a_run(visit: Visit, scene: DashboardServer) -> None:
    ann = scene.admit("ann")
    run = scene.submit(ann, "add", {"a": 1}, delay=3600)
    assert ann.post(f"/runs/{run}/cancel", json={"why": "wrong month"}).status_code == 200
    scene.root.put("/admin/quotas/ann", json={"per_day": 5})
    visitor = scene.enter(visit, scene.root)
    page = visitor.go("/ui/runs")
    page.get_by_role("navigation", name="Pages").get_by_role("link", name="Audit").click()
    expect(page).to_have_title("Audit log · semel")
    page.get_by_role("textbox", name="User").fill("ann")
    page.get_by_role("combobox", name="Action").select_option("run")
    page.get_by_role("button", name="Filter").click()
    rows = page.locator("#actions [data-row]")
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text("run.cancelled")
    expect(rows).to_contain_text("wrong month")
    expect(rows).to_contain_text("127.0.0.1")
    visitor.look("audit-filtered")
    rows.get_by_role("link").click()
    expect(page).to_have_url(re.compile(f"/ui/runs/{run}$"))
    page.go_back()
    page.get_by_role("link", name="Clear").click()
    expect(page.locator("#actions [data-row]").first).to_contain_text("quota.set")
