"""The dashboard on other grounds: processes that are killed and started again while somebody looks, and a prefix."""

import os
import re
import signal
from contextlib import closing
from pathlib import Path

from playwright.sync_api import Locator, Page, expect
from starlette.applications import Starlette
from starlette.routing import Mount

from semel.service import asgi
from support.apps import dashboard_app
from support.browser import Visitor
from support.dashboard import Visit
from support.serve_command import ServeProcess
from support.service import host_asgi, make_app
from support.waiting import eventually

APP = "support.apps.dashboard_app:app"
AWAY = r"net::ERR_(CONNECTION_\w+|INCOMPLETE_CHUNKED_ENCODING|EMPTY_RESPONSE|NETWORK_\w+)"


def live_page(visitor: Visitor, path: str) -> Page:
    """The page once it listens; it is not to be loaded anew from then on."""
    page = visitor.go(path)
    expect(page.locator(".live")).to_have_text("live")
    page.evaluate("window.sameAsBefore = true")
    return page


def stayed(page: Page) -> bool:
    return bool(page.evaluate("window.sameAsBefore === true"))


def figure(page: Page, name: str) -> Locator:
    return page.locator("#figures .stat", has=page.get_by_text(name, exact=True)).locator("dd")


def test_a_worker_that_is_killed_is_seen_to_lose_its_run_and_another_to_end_it(
    visit: Visit, migrated_postgres_url: str, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    with ServeProcess(tmp_path, APP, "--db", migrated_postgres_url) as serving:
        _, worker = eventually(lambda: len(serving.children()) == 2 and serving.children(), "a server and a worker")
        run_id = serving.submit("frail", {"until": str(gate)})["run_id"]
        serving.becomes(run_id, "RUNNING")
        visitor = visit(serving.address)
        page = live_page(visitor, f"/ui/runs/{run_id}")
        expect(page.locator("#run-state")).to_contain_text("attempt 1")
        expect(page.locator("#run-log")).to_contain_text("waits for")
        os.kill(worker, signal.SIGKILL)
        expect(page.locator("#run-facts")).to_contain_text("attempt 2 · errors 0 of 3 · lost 1 of 5")
        expect(page.locator("#run-timeline svg[role=img]")).to_contain_text("lost")
        expect(page.locator("#run-state")).to_contain_text("attempt 2")
        visitor.look("run-recovered")
        gate.touch()
        expect(page.locator("#run-state")).to_contain_text("SUCCEEDED")
        expect(page.locator("#run-timeline svg[role=img]")).to_contain_text("attempt 2")
        assert stayed(page)


def test_the_overview_is_live_and_goes_on_after_the_server_was_started_again(
    visit: Visit, migrated_sqlite_url: str, tmp_path: Path
) -> None:
    with ServeProcess(tmp_path, APP, "--db", migrated_sqlite_url) as serving:
        visitor = visit(serving.address)
        visitor.pardon(f"failed: GET .*: {AWAY}")
        page = live_page(visitor, "/")
        expect(figure(page, "Succeeded")).to_have_text(re.compile("^0 "))
        serving.submit("add", {"a": 1})
        expect(figure(page, "Succeeded")).to_have_text(re.compile("^1 "))
        expect(page.locator("#workers")).to_contain_text("alive")
        port = serving.address.rpartition(":")[2]
    expect(page.locator(".live")).to_have_text("offline")
    with ServeProcess(tmp_path, APP, "--db", migrated_sqlite_url, "--port", port) as serving:
        expect(page.locator(".live")).to_have_text("live")
        serving.submit("add", {"a": 2})
        expect(figure(page, "Succeeded")).to_have_text(re.compile("^2 "))
        assert stayed(page)


def test_below_a_prefix_every_link_form_and_stream_of_the_pages_stays_below_it(
    visit: Visit, migrated_sqlite_url: str, tmp_path: Path
) -> None:
    app = dashboard_app.register(make_app(migrated_sqlite_url, tmp_path, dedupe_window=0))
    application = Starlette(routes=[Mount("/below", asgi(app))])
    with closing(app), host_asgi(application) as client, app.working(processes=0, poll=0.2, drain=0.0):
        visitor = visit(str(client.base_url))
        page = live_page(visitor, "/below/")
        page.get_by_role("link", name="Submit").click()
        page.get_by_role("link", name="add", exact=True).click()
        page.locator("#p-a").fill("3")
        page.get_by_role("button", name="Submit", exact=True).click()
        expect(page.locator("#run-state")).to_contain_text("SUCCEEDED")
        run_url = page.url
        assert "/below/ui/runs/" in run_url
        page.get_by_role("link", name="Submit with other parameters").click()
        expect(page.locator("#p-a")).to_have_value("3")
        page.get_by_role("link", name="Quotas").click()
        page.get_by_role("link", name="Keys").click()
        page.get_by_role("link", name="Runs", exact=True).click()
        page.locator("[data-row] a").first.click()
        expect(page).to_have_url(run_url)
        page.get_by_role("link", name="semel").first.click()
        expect(page.locator(".live")).to_have_text("live")
        page.goto("about:blank")  # a stream that is open would keep the server from its end
