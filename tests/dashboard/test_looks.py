"""Every page of the dashboard: pictures are kept of how it looks, nothing in it keeps anybody out, it loads fast."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect
from sqlalchemy import update

from semel import JobStore
from semel._concurrency.sync import run_sync
from semel.db.schema import deliveries, run_hours, run_logs, subscriptions, workers
from semel.runs.store import maintenance
from semel.runs.types import new_id
from support.browser import DESK, PHONE
from support.dashboard import DashboardServer, Visit, dashboard_server
from support.pages import made_run, put_ended_runs, put_rows, put_runs, put_workers

HOUR_US = 3_600_000_000
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


EMPTY = ("overview", "runs", "actions", "keys", "audit", "quotas", "models", "model", "errors", "queues", "workers")
EMPTY += ("webhooks", "tokens", "submit", "submit-form")
DAY = 86_400.0
LONG = "https://storage.example.com/" + "a-path-without-a-space-in-it/" * 12
ERRORS = (
    "ConnectionError: the database of prices did not respond within 30 s",
    "MemoryError",
    f"FileNotFoundError: {LONG}",
    "ValueError: horizon_months must not be more than 1200, but it is 1300",
    "Lost: the worker that held the run was killed by signal 9",
)


class Empty:
    """A scene in which nothing has happened yet: a server that was just started, without a worker."""

    accessible: tuple[str, ...] = ("phone",)
    """The looks in which pages are checked for accessibility: all rules but contrast, as colours are the same in all
    scenes but that of faults. Looking for contrast takes most of the time.
    """

    def __init__(self, server: DashboardServer) -> None:
        self.scene = server
        self.hook = self.worker = ""

    def beat(self) -> None:
        """Send a heartbeat of every worker that is alive."""


class Busy(Empty):
    """A scene with 20,000 runs of a day, of twelve models and a hundred users; 300 wait, and 25 run."""

    wrong = 0.02
    """The part of the runs that fail."""
    seen = 0.0
    """How many seconds ago the workers were seen last."""
    count = 20_000

    def __init__(self, server: DashboardServer) -> None:
        super().__init__(server)
        self.models = ["add", *(f"forecast_of_demand_in_region_{number}_with_weather_v2" for number in range(11))]
        put_ended_runs(server.app, [self.ended(number) for number in range(self.count)])
        put_rows(server.app, run_hours, *(row for ago in range(1, 48) for row in self.hour(ago)))
        put_workers(server.app, [self.worker_row(number) for number in range(12)])
        self.worker = "worker-00"
        (self.held, *_) = put_runs(server.app, [self.running(number) for number in range(25)])
        (self.waiting, *_) = put_runs(server.app, [self.pending(number) for number in range(300)])
        for number in range(60):
            limits = {"max_concurrent": 20, "per_day": 150 + number, "cost_monthly": 1000.0}
            server.root.put(f"/admin/quotas/user{number}", json=limits)
        self.painted, self.failed = (self.newest(status) for status in ("SUCCEEDED", "FAILED"))
        server.submit(server.root, "add", {"a": 1}, idempotency_key="order-17")
        server.leave_unknown("payment-9", "orders")
        lines = [
            {"run_id": self.failed, "fence": 1, "line": n, "at_us": 1 + n, "level": "INFO", "text": f"step {n}: {LONG}"}
            for n in range(400)
        ]
        put_rows(server.app, run_logs, *lines)

    def beat(self) -> None:
        ledger = self.scene.app.ledger(awaited=False)
        seen = update(workers).values(seen_us=time.time_ns() // 1000 - round(self.seen * 1_000_000))
        run_sync(ledger.write(lambda conn: conn.execute(seen)))
        run_sync(ledger.close())

    def newest(self, status: str) -> str:
        found: str = self.scene.root.get("/runs", params={"status": status, "limit": 1}).json()["runs"][0]["run_id"]
        return found

    def ended(self, number: int) -> dict[str, Any]:
        ago = 5 + DAY * (number / self.count) ** 2
        fails = number % 100 < 100 * self.wrong
        how: dict[str, Any] = {"status": "FAILED", "errors": 3, "attempts": 3} if fails else {"status": "SUCCEEDED"}
        how |= {"last_error": ERRORS[number // 100 % len(ERRORS)], "traceback": f"{LONG}\n" * 40} if fails else {}
        how = {"result": None if fails else '{"objective": 0.83}', "last_error": None, "traceback": None} | how
        made = made_run(ago, started=ago - 0.05, finished=ago - 0.1 - number % 40, **how)
        data = {"scenario": f"scenario {number % 7}", "seed": number, "source": LONG, "months": [*range(24)]}
        names = {"model": self.models[number % 12], "user_id": f"user{number % 100}", "worker": "worker-00"}
        return made | names | {"parameters": json.dumps(data), "version": 7 if fails else 2}

    def hour(self, ago: int) -> list[dict[str, Any]]:
        now = time.time_ns() // 1000
        at = now - now % HOUR_US - ago * HOUR_US
        failed = {"FAILED": round(400 * self.wrong)} if ago < 24 else {"FAILED": 4}
        counts = {("SUCCEEDED", bucket): 20 + (ago * bucket) % 60 for bucket in (22, 24, 26, 29)}
        counts |= {(status, 30): count for status, count in failed.items()}
        return [
            {"tenant": "", "model": "add", "hour_us": at, "status": status, "bucket": bucket, "count": count}
            for (status, bucket), count in counts.items()
        ]

    def worker_row(self, number: int) -> dict[str, Any]:
        models = json.dumps(dict.fromkeys(self.models, "thread"))
        name = {"id": f"worker-{number:02}", "host": f"compute-{number}.eu-central-1.internal.example.com"}
        return {**name, "seen": self.seen, "models": models, "queues": '["gpu", "default"]', "slots": '{"thread": 4}'}

    def running(self, number: int) -> dict[str, Any]:
        worker = {
            "worker": f"worker-{number % 12:02}",
            "lease_until": -3600,
            "lease_us": HOUR_US,
            "started": 60 + number,
        }
        progress = {"progress": number / 25, "progress_note": f"epoch {number} of 25, loss 0.0{number}"}
        return made_run(
            90 + number, status="RUNNING", queue="gpu", model=self.models[number % 12], **worker, **progress
        )

    def pending(self, number: int) -> dict[str, Any]:
        at = {"due": -600, "ready": False} if number % 4 == 0 else {}
        return made_run(30 + number, status="PENDING", step="created", queue="gpu", user_id=f"user{number % 100}", **at)


class Failing(Busy):
    """A scene in which most runs fail, no worker is alive, and nobody has looked after anything."""

    accessible = ("light", "dark")
    wrong = 0.9
    seen = 600.0
    count = 500

    def __init__(self, server: DashboardServer) -> None:
        super().__init__(server)
        for number in range(8):
            server.leave_unknown(f"payment-{number}", "orders")
        server.root.put("/admin/quotas/user7", json={"per_day": 1})
        server.root.put("/pauses/model/add", json={"why": f"the prices are wrong: {LONG}"})
        self.hook = new_id()
        hook = {"id": self.hook, "tenant": "", "kind": "webhook", "target": LONG, "secret": "s", "events": "*"}
        put_rows(server.app, subscriptions, {**hook, "created_us": time.time_ns() // 1000})
        for state in ("waiting", "dead", "delivered"):
            put_rows(server.app, deliveries, *(self.delivery(state) for _ in range(30)))

    def delivery(self, state: str) -> dict[str, Any]:
        run, due = new_id(), time.time_ns() // 1000
        event = {"id": "e", "name": "RunFailed", "run_id": run, "version": 7, "model": "add", "tenant": "", "fence": 3}
        event |= {"user": "ann", "status": "FAILED", "step": "failed", "at": "2026-01-01T00:00:00Z", "note": None}
        found = {"last_status": 200} if state == "delivered" else {"last_error": f"the receiver responded 503: {LONG}"}
        sent = {"subscription_id": self.hook, "run_id": run, "version": 7, "attempts": 9, "due_us": due + 600_000_000}
        return {**sent, "state": state, "body": json.dumps(event), "last_status": 503, **found}

    def running(self, number: int) -> dict[str, Any]:
        return super().running(number) | {"attempts": 2, "losts": 1, "note": "lost: the worker is gone"}

    def pending(self, number: int) -> dict[str, Any]:
        waited = {"attempts": 2, "errors": 1, "losts": 1, "last_error": ERRORS[number % len(ERRORS)]}
        return made_run(7200 + number, status="PENDING", user_id=f"user{number % 100}", **waited)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    folder: Path = tmp_path_factory.mktemp("shown")
    with dashboard_server(f"sqlite:///{folder / 'semel.db'}", folder) as server:
        yield Shown(server)


@pytest.fixture(scope="module", params=[Empty, Busy, Failing], ids=["empty", "busy", "failing"])
def state(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Empty]:
    folder: Path = tmp_path_factory.mktemp("state")
    with dashboard_server(f"sqlite:///{folder / 'semel.db'}", folder, working=False) as server:
        yield request.param(server)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_light_to_load_and_can_be_used_by_everybody(visit: Visit, shown: Shown, name: str) -> None:
    visitor = shown.scene.enter(visit, shown.scene.root)
    weight = visitor.weigh(PAGES[name].format(**vars(shown)))
    assert weight <= HEAVIEST, f"{name} weighs {weight:,} bytes"
    visitor.look(name)


def test_every_page_looks_right_when_it_is_empty_busy_or_failing(visit: Visit, state: Empty) -> None:
    visitor = state.scene.enter(visit, state.scene.root)
    faults = []
    for name in EMPTY if type(state) is Empty else PAGES:
        state.beat()
        page = visitor.go(PAGES[name].format(**vars(state)))
        try:
            visitor.look(f"{name}-{type(state).__name__.lower()}", state.accessible)
        except AssertionError as fault:
            faults.append(str(fault))
        page.set_viewport_size(PHONE)
        height = page.evaluate("document.documentElement.scrollHeight")
        if height > HIGHEST:
            faults.append(f"{name} is {height} pixels high on a phone")
        page.set_viewport_size(DESK)
    assert not faults, "\n".join(faults)


HIGHEST = 10_000
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
