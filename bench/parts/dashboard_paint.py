"""How soon a browser paints the pages of the dashboard.

    yield from paint_rows(port)

A real Chromium with an empty cache opens each page of the server. What counts is its first contentful paint: from the
moment at which it requests the page until it has painted the first text. Each page is opened once in every round. The
browser's own process for the server has been started before, by an answer of a few bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

import httpx
from dashboard_lists import PATHS, WORST
from playwright.sync_api import Browser
from table import Row

from support.browser import DESK, chromium

ROUNDS = 5
LIMIT = 300
"""Milliseconds."""
OTHERS = {
    "models": "/ui/models",
    "a model": "/ui/models?model=model3",
    "errors": "/ui/errors",
    "queues": "/ui/queues",
    "workers": "/ui/workers",
    "webhooks": "/ui/webhooks",
    "tokens": "/ui/tokens",
    "audit": "/ui/audit",
    "submit": "/ui/submit",
}
PAINTED = """new Promise(done => new PerformanceObserver(list => {
  for (const each of list.getEntries()) if (each.name === "first-contentful-paint") done(each.startTime);
}).observe({type: "paint", buffered: true}))"""


def milliseconds_to_paint(browser: Browser, address: str) -> float:
    """Open the page in a browser with an empty cache; returns the milliseconds until it is painted."""
    context = browser.new_context(viewport=DESK)
    page = context.new_page()
    page.goto(str(httpx.URL(address).join("/healthz")))
    answer = page.goto(address, wait_until="commit")
    if answer is None or answer.status != 200:
        raise SystemExit(f"{address} was not answered with 200")
    taken: float = page.evaluate(PAINTED)
    context.close()
    return taken


def paint_rows(port: int, runs: int) -> Iterator[Row]:
    """A row for each page of the server on this port."""
    address = f"http://127.0.0.1:{port}"
    newest = httpx.get(f"{address}/runs", params={"limit": 1}).raise_for_status().json()["runs"][0]
    known = {"id": newest["run_id"], "hash": newest["payload_hash"]}
    with chromium() as browser:
        for name, path in {**PATHS, **OTHERS, **WORST}.items():
            taken = [milliseconds_to_paint(browser, address + path.format(**known)) for _ in range(ROUNDS)]
            yield Row(f"first paint, {runs:,} runs: {name}, ms", taken, LIMIT, at_most=True)
