"""Every page of the dashboard: pictures are kept of how it looks, nothing in it keeps anybody out, it loads fast."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from semel import JobStore
from semel._concurrency.sync import run_sync
from semel.db.schema import subscriptions
from semel.runs.store import maintenance
from semel.runs.types import new_id
from support.browser import PHONE
from support.dashboard import DashboardServer, Visit, dashboard_server
from support.pages import put_rows

HEAVIEST = 200_000
"""Bytes of a page with everything that it needs."""


class Shown:
    """A scene in which every page has something to show."""

    def __init__(self, server: DashboardServer) -> None:
        self.scene = server
        ann, ben = server.admit("ann"), server.admit("ben")
        store = JobStore(server.app.url)
        assert store.reserve_job_slot("ann", 5, 600)
        store.close()
        runs = [{"model": "add", "parameters": {"a": number, "b": 2}} for number in range(30)]
        for person in (ann, ben):
            assert person.post("/runs/bulk", json=runs).status_code == 200
        self.painted = server.submit(ann, "paint", idempotency_key="order-17")
        self.failed = server.submit(ben, "fail", {"text": "the <b>model</b> had no memory left"})
        self.held = server.submit(ann, "hold", {"until": "the-data-is-there", "note": "epoch 4 of 10"})
        self.waiting = server.submit(ben, "add", {"a": 1}, queue="gpu")
        self.cancelled = server.submit(ben, "add", {"a": 1}, delay=3600)
        ben.post(f"/runs/{self.cancelled}/cancel")
        server.root.put("/admin/quotas/ann", json={"max_concurrent": 5, "per_day": 40, "cost_monthly": 10.0})
        server.root.put("/admin/quotas/ben", json={"max_concurrent": 1, "per_hour": 100})
        server.root.put("/admin/quotas/*", json={"max_concurrent": 10, "action": "warn"})
        server.leave_unknown("payment-9", "orders")
        self.hook = new_id()
        hook = {
            "id": self.hook,
            "tenant": "",
            "kind": "webhook",
            "target": "https://hooks.example.com/a",
            "secret": "s",
        }
        put_rows(server.app, subscriptions, {**hook, "events": "*", "created_us": 1, "disabled_us": 2})
        for run_id in (self.painted, self.failed):
            server.ended(run_id)
        ledger = server.app.ledger(awaited=False)
        run_sync(ledger.write(maintenance.add_up, ledger.statement_context))
        run_sync(ledger.close())
        self.worker = server.root.get("/workers").json()[0]["id"]
        assert server.root.put("/pauses/queue/gpu", json={"why": "new driver"}).status_code == 200


PAGES = {
    "overview": "/",
    "runs": "/ui/runs",
    "actions": "/ui/actions",
    "run-succeeded": "/ui/runs/{painted}",
    "run-failed": "/ui/runs/{failed}",
    "run-running": "/ui/runs/{held}",
    "run-waiting": "/ui/runs/{waiting}",
    "compare": "/ui/compare?a={painted}&b={failed}",
    "keys": "/ui/keys",
    "key-of-a-run": "/ui/keys?key=order-17",
    "key-unknown": "/ui/keys?key=payment-9&scope=orders",
    "key-delete": "/ui/keys/delete?key=payment-9&scope=orders",
    "audit": "/ui/audit",
    "quotas": "/ui/quotas",
    "quota-of-a-user": "/ui/quotas?user=ann",
    "models": "/ui/models",
    "model": "/ui/models?model=add",
    "errors": "/ui/errors",
    "queues": "/ui/queues",
    "workers": "/ui/workers",
    "worker": "/ui/workers?worker={worker}",
    "webhooks": "/ui/webhooks?subscription={hook}",
    "tokens": "/ui/tokens",
    "submit": "/ui/submit",
    "submit-form": "/ui/submit?model=add",
}


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    folder: Path = tmp_path_factory.mktemp("shown")
    with dashboard_server(f"sqlite:///{folder / 'semel.db'}", folder) as server:
        yield Shown(server)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_light_to_load_and_can_be_used_by_everybody(visit: Visit, shown: Shown, name: str) -> None:
    visitor = shown.scene.enter(visit, shown.scene.root)
    weight = visitor.weigh(PAGES[name].format(**vars(shown)))
    assert weight <= HEAVIEST, f"{name} weighs {weight:,} bytes"
    visitor.look(name)


HIGHEST = 6000
"""Pixels of a page on a phone."""


def test_on_a_phone_pages_are_short_and_begin_with_their_newest_end(visit: Visit, shown: Shown) -> None:
    visitor = shown.scene.enter(visit, shown.scene.root)
    visitor.page.set_viewport_size(PHONE)
    heights = {}
    for name in ("runs", "overview", "errors", "model", "audit", "tokens", "run-failed"):
        page = visitor.go(PAGES[name].format(**vars(shown)))
        heights[name] = page.evaluate("document.documentElement.scrollHeight")
        for chart in page.locator(".chart-frame .chart, .scroll > .timeline").all():
            right, wide = chart.evaluate("each => [each.getBoundingClientRect().right, each.clientWidth]")
            assert right <= PHONE["width"] < wide, name
    assert max(heights.values()) <= HIGHEST, heights
    expect(visitor.go("/ui/runs").locator("#runs-rows tbody tr")).to_have_count(50)


def test_a_queue_is_paused_and_resumed_with_two_clicks(visit: Visit, shown: Shown) -> None:
    page = shown.scene.enter(visit, shown.scene.root).go("/ui/queues")
    row = page.locator("#queues tbody tr").filter(has_text="default")
    row.get_by_placeholder("Why?").fill("too hot")
    row.get_by_role("button", name="Pause the queue default").click()
    expect(row).to_contain_text("by root: too hot")
    row.get_by_role("button", name="Resume the queue default").click()
    expect(row).to_contain_text("open")
    expect(page.get_by_role("status")).to_have_text("Resumed the queue default.")
