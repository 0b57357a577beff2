"""The overview: what it shows, to whom, and how it keeps up with what happens. Over real HTTP, on both databases."""

import json
import re
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, select, text

from semel import App, Granted, Once, Unknown
from semel._concurrency.sync import run_sync
from semel.dashboard.overview import chart, feed, queries
from semel.dashboard.overview.chart import DAY, HOUR, WEEK, WINDOWS, Window
from semel.dashboard.overview.feed import StepCounts
from semel.dashboard.overview.queries import Audience
from semel.dashboard.overview.view import ReplayRate, percentile
from semel.db.dialect import StatementContext
from semel.db.schema import runs
from semel.runs.store import quotas
from semel.runs.store.maintenance import acquire_leadership
from semel.runs.types import Quota, id_at, new_id
from semel.service import sse
from semel.service.auth import tokens
from support.databases import DATABASES
from support.pages import Browser, Event, Page, browser, listening, made_run, put_runs, put_workers
from support.service import TokenClient, TokenServer, shared_server, token_server
from support.waiting import eventually

NASTY = '<script>alert(1)</script>"><img src=x onerror=alert(2)>'
MINUTE = 60 * 1_000_000


@pytest.fixture(scope="module", params=DATABASES)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokenServer]:
    with shared_server(request, tmp_path_factory) as server:
        ledger = server.app.ledger(awaited=False)
        run_sync(ledger.write(nobody_sweeps, ledger.statement_context))
        yield server


def nobody_sweeps(conn: Connection, terms: StatementContext) -> None:
    """What is stuck stays stuck while a test looks at it."""
    while not acquire_leadership(conn, "sweeper", "nobody", 3600, terms):
        conn.execute(text("DELETE FROM semel_leaders WHERE role = 'sweeper'"))


@pytest.fixture
def tenant() -> str:
    """A tenant for the test alone, so that its runs are all that there is."""
    return f"t-{new_id()[-12:]}"


@pytest.fixture(autouse=True)
def _pages_are_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page may be shown again for two seconds, which these tests need not wait for."""
    monkeypatch.setattr(feed, "REFRESH_EVERY", 0.0)


@pytest.fixture
def operator(server: TokenServer, tenant: str) -> Iterator[Browser]:
    with browser(server, server.admit("olga", "operator", tenant)) as operator:
        yield operator


def figures(page: Page | Event) -> dict[str, str]:
    """The figures by their names."""
    place = page.root.one(id="figures")
    return {each.one("dt").text: each.one("dd").text for each in place.all("div", class_="stat")}


def table(page: Page | Event, part: str) -> list[list[str]]:
    """The texts of the table of a part; none where it is empty."""
    place = page.root.one(id=part)
    return place.rows() if place.all("tbody") else []


def write(app: App, statement: str, **values: Any) -> None:
    ledger = app.ledger(awaited=False)
    run_sync(ledger.write(lambda conn: conn.execute(text(statement), values) and None))
    run_sync(ledger.close())


def test_an_empty_house_says_so(operator: Browser) -> None:
    page = operator.open("/")
    assert page.status == 200
    shown = figures(page)
    assert (shown["Pending"], shown["Running"], shown["Throughput"].split()[0]) == ("0", "0", "0")
    assert not table(page, "attention")
    for part in ("running", "failures", "latency"):
        assert page.one(id=part).all("p", class_="empty"), part
    assert "No run was submitted" in page.one(id="chart").text


def test_runs_are_counted_by_state_and_drawn_by_when_they_were_submitted(
    server: TokenServer, tenant: str, request: pytest.FixtureRequest
) -> None:
    two_ago = HOUR.starts(time.time_ns() // 1000)[-3] + MINUTE // 2
    at = time.time() - two_ago / 1e6
    made = [made_run(at, tenant=tenant) for _ in range(3)]
    made += [made_run(at, tenant=tenant, status="FAILED", last_error="no") for _ in range(2)]
    made.append(made_run(at, tenant=tenant, status="CANCELLED"))
    made.append(made_run(at, tenant=tenant, status="PENDING"))
    made.append(made_run(at, tenant=tenant, status="RUNNING", worker="w", lease_until=-60, started=at))
    made += [made_run(7200, tenant=tenant), made_run(3 * 86400, tenant=tenant), made_run(9 * 86400, tenant=tenant)]
    put_runs(server.app, made)
    operator: Browser = request.getfixturevalue("operator")
    page = operator.open("/")
    shown = figures(page)
    assert (shown["Pending"], shown["Running"]) == ("1", "1")
    assert [shown[name].split()[0] for name in ("Succeeded", "Failed", "Cancelled")] == ["3", "2", "1"]
    picture = page.one(id="chart").one("svg", role="img")
    said = "Runs of the last hour by status: 3 succeeded, 2 failed, 1 cancelled, 1 running, 1 pending"
    assert picture.one("title", id=picture["aria-labelledby"]).text == said
    (bar,) = picture.all("g")
    assert bar.one("title").text.endswith(": 3 succeeded, 2 failed, 1 cancelled, 1 running, 1 pending")
    heights = {each["class"]: float(each["height"]) for each in bar.all("rect")}
    assert heights["fill-succeeded"] == pytest.approx(3 * heights["fill-pending"], abs=0.05)
    assert [row[-5:] for row in table(page, "chart")] == [["3", "2", "1", "1", "1"]]
    totals = {name: figures(operator.open(f"/?window={name}"))["Succeeded"].split()[0] for name in WINDOWS}
    assert totals == {"hour": "3", "day": "4", "week": "5"}


def test_a_run_goes_through_its_states_before_our_eyes(server: TokenServer, tenant: str) -> None:
    person = server.admit("olga", "operator", tenant)
    with browser(server, person) as olga, listening(olga.client, "/ui/live") as events:
        first = next(events)
        assert first.ids == list(live_parts(olga))
        assert figures(first)["Pending"] == "0"
        made = person.post("/runs", json={"model": "add", "parameters": {"a": 1}}).json()
        event = until_event(events, lambda each: each.text("figures") and figures(each)["Pending"] == "1")
        assert "failures" not in event.ids, "what is as it was is not sent again"
        with server.app.working(processes=0):
            until_event(events, lambda each: each.text("figures") and figures(each)["Succeeded"][0] == "1")
        assert person.get(f"/runs/{made['run_id']}").json()["status"] == "SUCCEEDED"


def live_parts(looker: Browser) -> Iterator[str]:
    """The parts of the page that say that they change, in their order in the stream."""
    page = looker.open("/")
    there = {each["id"] for each in page.one(id="overview").all("section")}
    for part in ("attention", "figures", "chart", "running", "failures", "latency", "workers", "quotas"):
        assert part in there
        yield part


def until_event(events: Iterator[Event], fits: Any) -> Event:
    """The first event that fits; a stream that stays silent is an error of its own."""
    for event in events:
        if fits(event):
            return event
    raise AssertionError("the stream ended")


def test_what_is_sent_is_what_the_page_shows(server: TokenServer, tenant: str, operator: Browser) -> None:
    put_runs(server.app, [made_run(30, tenant=tenant, status="FAILED", last_error="it was too late")])
    with listening(operator.client, "/ui/live?window=day") as events:
        event = next(events)
    page = operator.open("/?window=day")
    for part in event.ids:
        assert page.one(id=part).text == event.text(part), part


def scene_of(server: TokenServer, tenant: str) -> feed.OverviewFeed:
    return server.state.overview_feeds.get(Audience(tenant), HOUR)


def test_nothing_is_sent_while_nothing_happens_and_one_look_serves_all_who_look(
    server: TokenServer, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "REFRESH_EVERY", 1.0)
    people = [server.admit(f"olga{number}", "operator", tenant) for number in range(3)]
    with (
        browser(server, people[0]) as one,
        browser(server, people[1]) as two,
        browser(server, people[2]) as three,
        listening(one.client, "/ui/live") as first,
        listening(two.client, "/ui/live") as second,
        listening(three.client, "/ui/live") as third,
    ):
        lines = (first, second, third)
        assert [len(next(each).ids) for each in lines] == [8, 8, 8]
        scene = scene_of(server, tenant)
        begun, looks = time.monotonic(), scene.refreshes
        eventually(lambda: scene.refreshes >= looks + 2)
        assert scene.refreshes - looks <= 1 + (time.monotonic() - begun) / feed.REFRESH_EVERY
        put_runs(server.app, [made_run(5, tenant=tenant, status="PENDING")])
        for each in lines:
            until_event(each, lambda event: event.text("figures") and figures(event)["Pending"] == "1")
    eventually(lambda: not scene.is_watched and scene._task is not None and scene._task.done())


def test_a_stream_ends_with_its_token(server: TokenServer, tenant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "CHECK_EVERY", 0.1)
    person = server.admit("brief", "operator", tenant)
    with browser(server, person) as brief, listening(brief.client, "/ui/live") as events:
        assert next(events).kind == "replace"
        revoke(server, person)
        assert until_event(events, lambda each: each.kind == "signed-out").html == ""
        assert next(events, None) is None
        server.state.auth.clear_cache()
        assert brief.client.get("/ui/live", follow_redirects=False).headers["location"] == "/ui/sign-in"


def revoke(server: TokenServer, person: TokenClient) -> None:
    ledger = server.app.ledger(awaited=False)
    assert run_sync(ledger.write(tokens.revoke, person.id, None, ledger.statement_context))
    run_sync(ledger.close())


def test_a_stream_outlives_a_database_that_cannot_answer(server: TokenServer, tenant: str, operator: Browser) -> None:
    with listening(operator.client, "/ui/live") as events:
        next(events)
        write(server.app, "ALTER TABLE semel_reservations RENAME TO semel_reservations_away")
        try:
            scene = scene_of(server, tenant)
            drive_quota(server.app, tenant, "root")
            put_runs(server.app, [made_run(5, tenant=tenant, status="PENDING")])
            looks = scene.refreshes
            eventually(lambda: scene.refreshes >= looks + 2)
        finally:
            write(server.app, "ALTER TABLE semel_reservations_away RENAME TO semel_reservations")
        event = until_event(events, lambda each: each.text("figures") and figures(each)["Pending"] == "1")
        assert "quotas" in event.ids


def drive_quota(app: App, tenant: str, user: str, **limits: Any) -> None:
    ledger = app.ledger(awaited=False)
    run_sync(
        ledger.write(
            quotas.set_quota, (tenant, user), Quota(**(limits or {"max_concurrent": 5})), ledger.statement_context
        )
    )
    run_sync(ledger.close())


@pytest.mark.parametrize("kind", DATABASES)
def test_after_a_restart_a_stream_begins_with_everything(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    url = request.getfixturevalue(f"migrated_{kind}_url")
    with token_server(url, tmp_path) as server, browser(server, server.root) as root:
        secret = server.root.secret
        with listening(root.client, "/ui/live") as events:
            assert figures(next(events))["Pending"] == "0"
            server.state.watch.dismiss()  # as the server does when it is told to end
            assert next(events, None) is None
        server.root.post("/runs", json={"model": "add", "parameters": {"a": 1}})
    with token_server(url, tmp_path) as server, server.client() as client:
        client.cookies.set("semel_session", secret or "", domain="127.0.0.1")
        with listening(client, "/ui/live") as events:
            event = next(events)
            assert figures(event)["Pending"] == "1"
            assert len(event.ids) == 8


def test_percentiles_are_of_the_runs_that_ended_in_the_window(
    server: TokenServer, tenant: str, operator: Browser
) -> None:
    made = []
    for number in range(1, 101):  # waits number/10 s, takes number s
        at = 600.0
        started = at - number / 10
        made.append(made_run(at, tenant=tenant, started=started, finished=started - number))
    made.append(made_run(7300, tenant=tenant, started=7300, finished=7200))  # ended before the window
    made.append(made_run(300, tenant=tenant, status="CANCELLED", finished=200, started_us=None))  # never began
    made.append(made_run(5000, tenant=tenant, due=100, started=4999, finished=90))  # a retry has moved its time
    put_runs(server.app, made)
    rows = table(operator.open("/"), "latency")
    assert rows == [["5.0 s", "9.5 s", "9.9 s", "101"], ["51.0 s", "1 min 36 s", "1 min 40 s", "101"]]


def test_the_throughput_counts_every_end_over_the_time_that_was_looked_at(
    server: TokenServer, tenant: str, operator: Browser
) -> None:
    many = queries.SAMPLE + 50
    began = time.monotonic()
    made = [made_run(1200 - number, tenant=tenant) for number in range(many)]
    made += [made_run(3000, tenant=tenant, status="FAILED") for _ in range(6)]
    put_runs(server.app, made)
    page = operator.open("/")
    # 500 succeeded in the last (1200 - 50 = 1150 to 19 min 20 s) and six failed in the hour.
    rate = float(figures(page)["Throughput"].split()[0])
    longest = 20.2 + (time.monotonic() - began) / 60
    assert queries.SAMPLE / longest + 0.09 <= rate <= queries.SAMPLE / 19.1 + 0.11
    assert "From the newest runs" in page.one(id="latency").text


def test_numbers_that_are_taken_from_the_newest_runs_say_so(
    server: TokenServer, tenant: str, operator: Browser
) -> None:
    """Runs that waited for long may lie beyond the newest: then the number is called what it is."""
    made = [made_run(7200 + n, tenant=tenant, finished=600) for n in range(300)]
    made += [made_run(4200 + n / 10, tenant=tenant, finished=4100) for n in range(queries.SAMPLE - 100)]
    put_runs(server.app, made)
    page = operator.open("/")
    assert figures(page)["Throughput"].endswith("estimated")
    assert "From the newest runs" in page.one(id="latency").text


@pytest.mark.parametrize("status", queries.FINAL)
def test_sqlite_reads_the_runs_that_ended_last_without_sorting_all_of_them(tmp_path: Path, status: str) -> None:
    newest = Audience("").newest(select(runs.c.user_id), status, 1_700_000_000_000_000).limit(500)
    app = App(f"sqlite:///{tmp_path / 'semel.db'}")
    ledger = app.ledger(awaited=False)

    def plan(conn: Connection) -> list[str]:
        asked = newest.compile(dialect=conn.dialect, compile_kwargs={"literal_binds": True})
        return [row[-1] for row in conn.execute(text(f"EXPLAIN QUERY PLAN {asked}"))]

    steps = run_sync(ledger.write(plan))
    run_sync(ledger.close())
    app.close()
    assert steps[0].startswith("SEARCH"), steps
    assert not [step for step in steps if "ORDER BY" in step], steps


def test_what_failed_last_comes_first_though_it_was_submitted_long_ago(
    server: TokenServer, tenant: str, operator: Browser
) -> None:
    failed = {"tenant": tenant, "status": "FAILED"}
    younger = [made_run(1800 + n, **failed, last_error="older") for n in range(20)]
    put_runs(server.app, [*younger, made_run(7200, finished=5, last_error="broke just now", **failed)])
    assert "broke just now" in table(operator.open("/"), "failures")[0][-1]


def test_streams_of_the_overview_take_the_callers_places(server: TokenServer) -> None:
    with browser(server, server.admit("listener")) as listener, pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.state.wait_slots, "_most", 0)
        assert listener.client.get("/ui/live").status_code == 429


def test_runs_that_do_not_get_on_are_found_with_the_reason(server: TokenServer, tenant: str, operator: Browser) -> None:
    lost, late, early, later = put_runs(
        server.app,
        [
            made_run(500, tenant=tenant, status="RUNNING", worker="gone", lease_until=30, started=400, model="train"),
            made_run(300, tenant=tenant, status="PENDING", queue="nobody-serves"),
            made_run(5, tenant=tenant, status="PENDING", queue="nobody-serves"),
            made_run(300, tenant=tenant, status="PENDING", due=-500, ready=False),
        ],
    )
    page = operator.open("/")
    rows = table(page, "attention")
    assert [row[:2] for row in rows] == [[lost[-12:], "train"], [late[-12:], "add"]]
    assert "lease expired" in rows[0][3]
    assert "held by gone" in rows[0][3]
    assert rows[1][3].endswith("no live worker serves the queue 'nobody-serves'")
    shown = page.one(id="attention").text
    assert early[-12:] not in shown
    assert later[-12:] not in shown
    assert page.one(id="attention").one("a", title=lost)["href"] == f"/ui/runs/{lost}"


def test_late_runs_of_one_queue_and_model_are_shown_once_with_their_reason(
    server: TokenServer, tenant: str, operator: Browser
) -> None:
    pending = {"tenant": tenant, "status": "PENDING"}
    made = [made_run(400 - n, **pending, queue="nobody-serves") for n in range(12)]
    made += [made_run(300 - n, **pending, queue="nobody-serves", model=f"m{n}") for n in range(3)]
    oldest = put_runs(server.app, made)[0]
    page = operator.open("/")
    rows = table(page, "attention")
    assert [row[1] for row in rows] == ["add", "m0", "m1", "m2"]
    assert rows[0][0] == oldest[-12:]
    assert all("no live worker serves the queue 'nobody-serves'" in row[3] for row in rows)
    (more,) = [each for each in page.one(id="attention").all("a") if each.text == "and 11 more"]
    assert more["href"] == "/ui/runs?status=PENDING&model=add&queue=nobody-serves"
    assert len(operator.open(more["href"]).one(id="list").rows()) == 12
    (due,) = [each for each in page.one(id="figures").all("a") if each.all("time")]
    assert due["href"] == f"/ui/runs/{oldest}"


def leave_unknown(server: TokenServer, scope: str) -> None:
    once = Once(server.app.url, collect=False)
    assert isinstance(once.claim("payment", scope=scope, lease=0.01, on_crash="unknown"), Granted)
    eventually(lambda: isinstance(once.claim("payment", scope=scope, on_crash="unknown"), Unknown))
    once.close()


def put_subscription(app: App, tenant: str, **deliveries_: str) -> str:
    """A webhook with a delivery in each of these states, which has this error."""
    hook = new_id()
    write(
        app,
        "INSERT INTO semel_subscriptions (id, tenant, kind, target, secret, events, created_us) "
        "VALUES (:hook, :tenant, 'webhook', 'https://user:s3cret@hooks.example.com/s3cret', 's3cret', '*', 1)",
        hook=hook,
        tenant=tenant,
    )
    event = {"id": "e", "name": "RunFailed", "version": 1, "model": "add", "tenant": tenant, "user": "ann", "fence": 1}
    event |= {"status": "FAILED", "step": "failed", "at": "2026-01-01T00:00:00Z", "note": None}
    for state, error in deliveries_.items():
        run = new_id()
        write(
            app,
            "INSERT INTO semel_deliveries (subscription_id, run_id, version, state, attempts, due_us, body, "
            "last_error) VALUES (:hook, :run, 1, :state, 3, :due, :body, :error)",
            hook=hook,
            run=run,
            body=json.dumps({"run_id": run, **event}),
            state=state,
            due=time.time_ns() // 1000,
            error=error,
        )
    return hook


def test_what_needs_somebody_comes_first_and_links_to_where_it_can_be_mended(
    server: TokenServer, tenant: str, operator: Browser
) -> None:
    assert operator.open("/").one(id="overview").all("section")[0]["id"] == "attention"
    drive_quota(server.app, tenant, "ann", per_day=2)
    drive_quota(server.app, tenant, "bob", max_concurrent=1)
    put_runs(server.app, [made_run(60, tenant=tenant, user_id="ann") for _ in range(2)])
    put_runs(server.app, [made_run(5, tenant=tenant, user_id="bob", status="PENDING")])
    put_workers(server.app, [{"id": f"{tenant}-{n}", "seen": seen} for n, seen in (("new", 300), ("old", 3700))])
    hook = put_subscription(server.app, tenant, dead="the receiver hung up", waiting="too slow")
    put_subscription(server.app, f"{tenant}-other", dead="not ours")
    put_subscription(server.app, tenant)
    leave_unknown(server, f"{tenant} orders")
    scene_of(server, tenant)._unknown_keys._next = 0.0
    eventually(lambda: "unknown outcome" in operator.open("/").one(id="attention").text)
    page = operator.open("/")
    shown = page.one(id="attention")
    links = {each.text: each["href"] for each in shown.all("a")}
    assert links["1 key has an unknown outcome"] == "/ui/keys"
    assert links["ann"] == "/ui/quotas?user=ann"
    assert "2 of 2" in shown.text
    assert "bob" not in links, "a limit of active runs is used up at any time"
    assert links[f"{tenant}-new"] == f"/ui/workers?worker={tenant}-new"
    assert f"{tenant}-old" not in page.text, "a worker that has been silent for an hour is no news"
    assert links["hooks.example.com"] == f"/ui/webhooks?subscription={hook}"
    assert "1 is tried again, 1 was given up" in shown.text
    assert [each.text for each in shown.all("a")].count("hooks.example.com") == 1, "the other one is healthy"
    assert "s3cret" not in page.answer.text
    assert "not ours" not in page.answer.text
    for name, address in links.items():
        if not name.startswith("t-") or tenant in name:
            assert operator.open(address).status == 200, address


def test_of_many_that_need_somebody_a_few_are_named_and_the_others_counted(
    server: TokenServer, tenant: str, operator: Browser
) -> None:
    for number in range(7):
        drive_quota(server.app, tenant, f"u{number}", per_day=1)
        put_runs(server.app, [made_run(60, tenant=tenant, user_id=f"u{number}")])
    put_workers(server.app, [{"id": f"{tenant}-{number}", "seen": 300} for number in range(5)])
    shown = operator.open("/").one(id="attention").text
    assert shown.count("has used 1 of 1") == 5
    assert "At least 2 more have used up a limit" in shown
    assert shown.count("was last seen") == 3  # of these, and those that other tests left
    assert re.search(r"\d+ more are silent", shown)


def test_every_figure_model_user_and_worker_links_to_what_it_counts(
    server: TokenServer, tenant: str, request: pytest.FixtureRequest
) -> None:
    put_workers(server.app, [{"id": f"w {tenant}", "seen": 3}])
    held = {"status": "RUNNING", "worker": f"w {tenant}", "lease_until": -60, "started": 50}
    made = [
        made_run(60, tenant=tenant, user_id="a&b", model="x/y?z", **held),
        made_run(9, tenant=tenant, user_id="a&b"),
    ]
    made += [made_run(50, tenant=tenant, user_id="a&b", model="x/y?z", status="FAILED", last_error="no")]
    put_runs(server.app, made)
    operator: Browser = request.getfixturevalue("operator")
    page = operator.open("/")
    for stat in page.one(id="figures").all("div", class_="stat"):
        if stat.one("dt").text != "Oldest waiting run":
            listed = operator.open(stat.one("a")["href"])
            if stat.one("dt").text not in ("Throughput", "Replay rate"):
                count = len(table(listed, "list"))
                assert count == int(stat.one("dd").text.split()[0]), stat.text
    for part, column, start in (
        ("running", 1, "/ui/models?model=x%2Fy%3Fz"),
        ("running", 2, "/ui/runs?user=a%26b"),
        ("failures", 1, "/ui/models?model=x%2Fy%3Fz"),
        ("quotas", 0, "/ui/quotas?user=a%26b"),
    ):
        cell = page.one(id=part).one("tbody").all("tr")[0].all("td")[column]
        assert cell.one("a")["href"] == start
        assert operator.open(start).status == 200, start
    (worker,) = [each for each in page.one(id="workers").all("a") if each.text == f"w {tenant}"]
    assert "x/y?z" in operator.open(worker["href"]).one(id="held").text


def test_the_latest_failures_come_first_with_their_errors(server: TokenServer, tenant: str, operator: Browser) -> None:
    made = [
        made_run(600 - number, tenant=tenant, status="FAILED", last_error=f"ValueError: {number}", attempts=number)
        for number in range(12)
    ]
    made.append(made_run(10, tenant=tenant, status="FAILED", last_error=None))
    made.append(made_run(8 * 86400, tenant=tenant, status="FAILED", last_error="long ago"))
    put_runs(server.app, made)
    rows = table(operator.open("/"), "failures")
    assert [row[4] for row in rows[:3]] == [
        "no error recorded",
        "ValueError: 11 attempt 11 · errors 0 of 3 · lost 0 of 3",
        "ValueError: 10 attempt 10 · errors 0 of 3 · lost 0 of 3",
    ]
    assert len(rows) == queries.FAILURES


def test_workers_are_shown_with_what_they_hold_and_the_silent_ones_are_marked(server: TokenServer) -> None:
    put_workers(
        server.app,
        [
            {"id": "w-alive", "name": "alive", "seen": 3},
            {"id": "w-silent", "name": "silent", "seen": 300},
            {"id": "w-stops", "name": "stops", "seen": 3, "draining": True},
            {"id": "w-inside", "name": "inside", "seen": 3, "queues": '["semel-service"]'},
        ],
    )
    held = put_runs(
        server.app, [made_run(60, status="RUNNING", worker="w-alive", lease_until=-60, started=50) for _ in range(8)]
    )
    with browser(server, server.root) as root:
        rows = {row[0].split()[0]: row for row in table(root.open("/"), "workers")}
    assert {name: rows[name][1] for name in ("alive", "silent", "stops")} == {
        "alive": "alive",
        "silent": "silent",
        "stops": "draining",
    }
    assert "inside" not in rows
    assert "house, 7" in rows["alive"][0]
    assert sum(each[-12:] in rows["alive"][4] for each in held) == 6
    assert rows["alive"][4].endswith("and 2 more")
    assert rows["silent"][4] == "none"


def test_what_a_worker_holds_of_other_tenants_is_counted_and_not_named(server: TokenServer) -> None:
    put_workers(server.app, [{"id": "w-lent", "name": "lent", "seen": 3}])
    held = {"status": "RUNNING", "worker": "w-lent", "lease_until": -60, "started": 50}
    theirs = put_runs(server.app, [made_run(60, tenant="elsewhere", **held) for _ in range(8)])
    (own,) = put_runs(server.app, [made_run(60, **held)])
    with browser(server, server.root) as root:
        rows = {row[0].split()[0]: row for row in table(root.open("/"), "workers")}
    assert own[-12:] in rows["lent"][4]
    assert rows["lent"][4].endswith("and 8 more")
    assert not [each for each in theirs if each[-12:] in rows["lent"][4]]


def test_quota_use_is_shown_most_used_first(server: TokenServer, tenant: str, operator: Browser) -> None:
    for user, limit in (("ann", 4), ("bob", 10), ("cid", 2), ("dan", 0)):
        drive_quota(server.app, tenant, user, max_concurrent=limit)
    active = [("ann", 4), ("bob", 3), ("cid", 3), ("eve", 5)]
    made = [made_run(20, tenant=tenant, status="PENDING", user_id=user) for user, many in active for _ in range(many)]
    put_runs(
        server.app, [*made, made_run(20, tenant=tenant, user_id="dan"), made_run(20, tenant=tenant, user_id="fay")]
    )
    rows = table(operator.open("/"), "quotas")
    assert [row[0] for row in rows] == ["cid", "ann", "dan", "bob", "eve"]
    assert rows[0][2] == "150 % over Concurrent: 3 of 2"
    assert rows[1][2] == "100 % full Concurrent: 4 of 4"
    assert rows[3][1:] == ["3", "30 % Concurrent: 3 of 10"]
    assert rows[4][1:] == ["5", "no limit"]


def test_a_submitter_sees_their_own_runs_and_nothing_of_others(server: TokenServer, tenant: str) -> None:
    drive_quota(server.app, tenant, "sue", max_concurrent=5)
    drive_quota(server.app, tenant, "maxim", max_concurrent=5)
    put_workers(server.app, [{"id": f"w-{tenant}", "seen": 1}])
    own = {"tenant": tenant, "user_id": "sue"}
    other = {"tenant": tenant, "user_id": "maxim", "model": "secret-model"}
    put_runs(
        server.app,
        [
            made_run(50, **own, status="FAILED", last_error="mine"),
            made_run(500, **own, status="PENDING"),
            made_run(50, **own, status="RUNNING", worker="w-hidden", lease_until=10, started=40),
            *[
                made_run(50, **other, status=status, last_error="theirs")
                for status in ("FAILED", "PENDING", "CANCELLED")
            ],
            made_run(500, **other, status="PENDING"),
            made_run(50, **other, status="RUNNING", worker="w-hidden", lease_until=10, started=40),
        ],
    )
    with browser(server, server.admit("sue", tenant=tenant)) as sue:
        page = sue.open("/")
        with listening(sue.client, "/ui/live") as events:
            event = next(events)
    for seen in (page, event):
        shown = figures(seen)
        assert (shown["Pending"], shown["Running"], shown["Failed"].split()[0]) == ("1", "1", "1")
        assert [row[2] for row in table(seen, "attention")] == ["sue", "sue"]
        assert [row[0] for row in table(seen, "quotas")] == ["sue"]
        assert "hidden" in seen.root.one(id="workers").attributes
        assert "Replay rate" not in shown
        for word in ("maxim", "theirs", "secret-model", "w-hidden", f"w-{tenant}"):
            assert word not in (page.answer.text if seen is page else event.html), word


def test_tenants_do_not_learn_of_each_other(server: TokenServer, tenant: str, operator: Browser) -> None:
    theirs = put_runs(
        server.app,
        [
            made_run(50, tenant=f"{tenant}-other", user_id="theirs", status="FAILED", last_error="theirs"),
            made_run(500, tenant=f"{tenant}-other", user_id="theirs", status="PENDING"),
            made_run(50, user_id="theirs", status="RUNNING", worker=f"w-{tenant}", lease_until=10, started=40),
        ],
    )
    put_workers(server.app, [{"id": f"w-{tenant}", "name": f"n-{tenant}", "host": "hidden-host", "seen": 1}])
    page = operator.open("/")
    shown = figures(page)
    assert (shown["Pending"], shown["Running"], shown["Failed"].split()[0]) == ("0", "0", "0")
    assert "Replay rate" not in shown, "it is of all tenants together"
    (row,) = [row for row in table(page, "workers") if row[0] == f"n-{tenant}"]
    assert row[4] == "none"
    for word in ("theirs", "hidden-host", *(each[-12:] for each in theirs)):
        assert word not in page.answer.text


def test_what_users_write_is_shown_as_text(server: TokenServer, tenant: str, operator: Browser) -> None:
    put_workers(server.app, [{"id": f"nasty-{tenant}", "name": NASTY, "queues": '["<i>q</i>"]', "seen": 1}])
    nasty = {"tenant": tenant, "user_id": NASTY, "model": NASTY}
    put_runs(
        server.app,
        [
            made_run(50, **nasty, status="FAILED", last_error=NASTY),
            made_run(500, **nasty, status="PENDING", queue="<b>queue</b>"),
            made_run(50, **nasty, status="RUNNING", worker=NASTY, lease_until=10, started=40),
        ],
    )
    page = operator.open("/")
    with listening(operator.client, "/ui/live") as events:
        event = next(events)
    for root in (page.root, event.root):
        shown = " ".join(NASTY.split())
        assert root.one(id="failures").text.count(shown) == 3
        assert shown in root.one(id="workers").text
        assert "serves the queue '<b>queue</b>'" in root.one(id="attention").text
        assert not root.all("img")
        assert not root.all("b")
        assert len([each for each in root.all("script") if not each.get("src")]) == 0
        assert not [each for each in root.walk() if "onerror" in each.attributes]


def test_the_replay_rate_is_shown_to_the_house_with_its_thresholds(server: TokenServer) -> None:
    before = ReplayRate(*hits_shown(server))
    body = {"model": "add", "parameters": {"a": 1}, "idempotency_key": f"rate-{time.time_ns()}"}
    for _ in range(5):
        assert server.root.post("/runs", json=body).status_code in (200, 201)
    server.state.overview_feeds.replay_counter._read_at = -1000.0
    eventually(lambda: hits_shown(server) == (before.replayed + 4, before.created + 1))


def hits_shown(server: TokenServer) -> tuple[int, int]:
    with browser(server, server.root) as root:
        said = figures(root.open("/"))["Replay rate"]
    found = re.search(r"([\d,]+) replayed, ([\d,]+) created since the server started", said)
    assert found, said
    return int(found[1].replace(",", "")), int(found[2].replace(",", ""))


@pytest.mark.parametrize(
    ("hit", "miss", "low", "verdict"),
    [
        (0, 0, None, ""),
        (81, 19, None, "good"),
        (80, 20, None, "fair"),
        (0, 5, None, "fair"),
        (0, 100_000, None, "fair"),
        (0, 0, 0.5, ""),
        (0, 99, 0.5, "fair"),
        (49, 51, 0.5, "warning"),
        (50, 50, 0.5, "fair"),
        (81, 19, 0.9, "warning"),
    ],
)
def test_a_replay_rate_is_good_above_80_percent_and_a_warning_only_below_what_the_operator_calls_low(
    hit: int, miss: int, low: float | None, verdict: str
) -> None:
    assert ReplayRate(hit, miss, low).verdict == verdict


@pytest.mark.parametrize("window", [HOUR, DAY, WEEK])
def test_the_steps_of_a_window_stand_still_until_one_is_over(window: Window) -> None:
    now = 1_800_000_000_000_000
    starts = window.starts(now)
    assert len(starts) == window.steps
    assert {later - sooner for sooner, later in pairwise(starts)} == {window.step * 1_000_000}
    assert starts[-1] <= now < starts[-1] + window.step * 1_000_000
    assert window.starts(starts[-1]) == window.starts(starts[-1] + window.step * 1_000_000 - 1) == starts
    assert id_at(starts[0]) < id_at(starts[1]) <= id_at(starts[1] + 999)


def test_steps_whose_runs_are_all_over_are_counted_once() -> None:
    starts = HOUR.starts(1_800_000_000_000_000)
    counts = StepCounts()
    assert counts.outdated(starts, HOUR) == starts
    counted = {start: {"SUCCEEDED": 1} for start in starts} | {starts[5]: {"SUCCEEDED": 1, "RUNNING": 1}}
    counts.add(counted, settled_us=starts[-4])
    assert counts.outdated(starts, HOUR) == [], "a moment ago"
    counts._counted_at = -1000.0
    assert counts.outdated(starts, HOUR) == [starts[5], *starts[-3:]]
    later = [*starts[1:], starts[-1] + MINUTE]
    assert counts.outdated(later, HOUR) == [starts[5], *later[-4:]]
    counts.add({start: {"FAILED": 2} for start in [starts[5], *later[-4:]]}, settled_us=later[-4])
    assert counts.of(later)[4] == {"FAILED": 2}
    assert counts.of(later)[0] == {"SUCCEEDED": 1}


def test_the_axis_has_room_for_its_labels_and_one_run_is_seen_beside_a_million() -> None:
    starts = HOUR.starts(1_800_000_000_000_000)
    counts: list[dict[str, int]] = [{} for _ in starts]
    small = chart.stacked_chart(HOUR, starts, counts, ("SUCCEEDED", "FAILED"))
    counts[3], counts[7] = {"SUCCEEDED": 1_000_000, "FAILED": 1}, {"FAILED": 1}
    large = chart.stacked_chart(HOUR, starts, counts, ("SUCCEEDED", "FAILED"))
    longest = max(len(each.label) for each in large.levels)
    assert (longest, large.left >= 7 * longest) == (9, True)
    assert small.left < large.left <= large.bars[0].x
    blocks = [block for bar in large.bars for block in bar.blocks]
    assert len(blocks) == 3
    assert all(block.height >= 3 and block.y >= 0 for block in blocks)


@pytest.mark.parametrize(
    ("most", "top"), [(0, 4), (3, 4), (4, 4), (5, 5), (6, 6), (7, 8), (9, 10), (11, 20), (501, 600), (999, 1000)]
)
def test_an_axis_ends_at_a_round_number(most: int, top: int) -> None:
    assert chart.ceiling(most) == top


def test_a_percentile_is_one_of_the_values() -> None:
    assert percentile([], 0.5) is None
    assert percentile([7.0], 0.99) == 7.0
    values = [float(number) for number in range(1, 101)]
    assert [percentile(values, part) for part in (0.5, 0.95, 0.99, 1.0)] == [50.0, 95.0, 99.0, 100.0]
