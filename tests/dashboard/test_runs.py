"""The page of runs: its filters, its search, its pages, and what is done to many at once."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from semel import StoreUnavailable
from semel._concurrency.sync import run_sync
from semel.dashboard.runs import queries, run_list
from semel.dashboard.runs.queries import IdRange, scan
from semel.runs.store import RunStore
from semel.runs.store.queries import Filter
from semel.runs.types import STATUSES, id_at
from support.dashboard_runs import IDLE, TRICKS, ended, events, idle, manual_worker, runs_server, submitted
from support.databases import DATABASES
from support.pages import Browser, Page, browser, made_run, parsed, put_runs
from support.service import TokenServer


@pytest.fixture(scope="module", params=DATABASES)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokenServer]:
    with runs_server(request, tmp_path_factory) as server:
        yield server


@pytest.fixture(scope="module")
def operator(server: TokenServer) -> Iterator[Browser]:
    with browser(server, server.admit("olga", "operator")) as made:
        yield made


def ids(page: Page) -> list[str]:
    """The runs that a list shows, in its order."""
    return [box["value"] for box in page.all("input", type="checkbox", name="run")]


def listed(who: Browser, **query: object) -> list[str]:
    page = who.open("/ui/runs", params={name: value for name, value in query.items() if value is not None})
    assert page.status == 200, page.text
    return ids(page)


def test_a_row_tells_how_the_run_stands(server: TokenServer, operator: Browser) -> None:
    good = submitted(server, "add", {"a": 1}, user="rose")
    bad = submitted(server, "fail", {"text": "no luck"}, user="rose")
    waits = idle(server, "rose")
    for run_id in (good, bad):
        ended(server, run_id)
    page = operator.open("/ui/runs", params={"user": "rose"})
    rows = {row.all("input")[0]["value"]: row.text for row in page.one("tbody").all("tr")}
    assert list(rows) == [waits, bad, good]
    assert "PENDING" in rows[waits]
    assert "waiting" in rows[waits]
    assert "FAILED" in rows[bad]
    assert "ValueError: no luck" in rows[bad]
    assert "SUCCEEDED" in rows[good]
    assert "rose" in rows[good]


@pytest.mark.parametrize(
    ("states", "found"),
    [(["FAILED"], ["bad"]), (["FAILED", "PENDING"], ["waits", "bad"]), (list(STATUSES), ["waits", "bad", "good"])],
)
def test_runs_are_filtered_by_one_or_several_states(
    server: TokenServer, operator: Browser, states: list[str], found: list[str]
) -> None:
    user = f"states-{len(states)}"
    made = {"good": submitted(server, "add", {"a": 1}, user=user), "bad": submitted(server, "fail", user=user)}
    made["waits"] = idle(server, user)
    for name in ("good", "bad"):
        ended(server, made[name])
    assert listed(operator, user=user, status=states) == [made[name] for name in found]


def test_runs_are_filtered_by_model_and_user(server: TokenServer, operator: Browser) -> None:
    add = submitted(server, "add", {"a": 1}, user="mia")
    train = submitted(server, "train", user="mia")
    other = submitted(server, "train", user="max")
    assert listed(operator, user="mia") == [train, add]
    assert listed(operator, user="mia", model="train") == [train]
    assert listed(operator, user="max", model="train") == [other]
    assert listed(operator, user="max", model="add") == []


def test_runs_are_filtered_by_time(server: TokenServer, operator: Browser) -> None:
    run_id = idle(server, "tim")
    now = datetime.now(UTC)
    hour = timedelta(hours=1)

    def local(when: datetime) -> str:
        return when.strftime("%Y-%m-%dT%H:%M")

    assert listed(operator, user="tim", since=local(now - hour)) == [run_id]
    assert listed(operator, user="tim", since=local(now + hour)) == []
    assert listed(operator, user="tim", until=local(now - hour)) == []
    assert listed(operator, user="tim", since=local(now - hour), until=local(now + hour)) == [run_id]
    for span in ("1h", "24h", "7d"):
        assert listed(operator, user="tim", last=span) == [run_id]
    page = operator.open("/ui/runs", params={"user": "tim", "last": "24h"})
    chosen = [each.text for each in page.all("a", aria_current="true")]
    assert chosen == ["24h", "newest first"]


@pytest.mark.parametrize(
    "query",
    [
        "status=GONE",
        "since=yesterday",
        "since=20300131",
        "until=2026-99-01T00:00",
        "last=1y",
        "cursor=x",
        "newer=1",
        "user=a%00b",
    ],
)
def test_what_cannot_be_asked_is_refused_with_a_page(operator: Browser, query: str) -> None:
    page = operator.open(f"/ui/runs?{query}")
    assert page.status == 400
    assert "INVALID_REQUEST" in page.text


def test_a_run_is_found_by_its_id_its_key_and_its_payload(server: TokenServer, operator: Browser) -> None:
    run_id = submitted(server, "add", {"a": 7}, user="finn", idempotency_key="order 42/ü", queue=IDLE)
    other = submitted(server, "add", {"a": 8}, user="finn", idempotency_key="order 43", queue=IDLE)
    payload = server.app.get(run_id).payload_hash
    for text in (run_id, run_id.upper(), run_id.replace("-", ""), f"  {run_id} ", run_id[-12:], run_id[-6:]):
        assert listed(operator, q=text, user="finn") == [run_id], text
    assert listed(operator, q=run_id[:30], user="finn") == [run_id]
    assert set(listed(operator, q=run_id[:6])) >= {run_id, other}
    assert listed(operator, q="order 42/ü") == [run_id]
    assert listed(operator, q=payload) == [run_id]
    assert listed(operator, q=payload.upper(), status="FAILED") == []
    assert listed(operator, q="order 42") == []
    assert "No runs match" in operator.open("/ui/runs", params={"q": "order 42"}).text


def test_a_key_that_has_expired_still_finds_its_run(server: TokenServer, operator: Browser) -> None:
    run_id = submitted(server, "add", {"a": 1}, user="kim", idempotency_key="short-lived", key_ttl=0.001, queue=IDLE)
    with manual_worker(server) as keeper:
        keeper.tidy()
    assert listed(operator, q="short-lived") == [run_id]


def test_the_pages_lead_through_all_runs_and_back(server: TokenServer, operator: Browser) -> None:
    many = [{"model": "add", "parameters": {"a": n}, "user": "paula", "queue": IDLE} for n in range(120)]
    every = sorted((run.id for run in server.app.submit_many(many)), reverse=True)
    page = operator.open("/ui/runs?user=paula")
    pages = [ids(page)]
    while older := page.all("a", rel="next"):
        page = operator.open(older[0]["href"])
        pages.append(ids(page))
    assert [len(each) for each in pages] == [50, 50, 20]
    assert [run_id for each in pages for run_id in each] == every
    back = []
    while newer := page.all("a", rel="prev"):
        page = operator.open(newer[0]["href"])
        back.append(ids(page))
    assert back == [every[50:100], every[:50]] or back == [every[50:100], every[:50], every[:50]]


def test_the_oldest_runs_come_first_if_that_is_wanted(server: TokenServer, operator: Browser) -> None:
    many = [{"model": "add", "parameters": {"a": n}, "user": "otto", "queue": IDLE} for n in range(60)]
    every = sorted(run.id for run in server.app.submit_many(many))
    newest = operator.open("/ui/runs?user=otto&model=add&last=1h")
    (oldest,) = [each for each in newest.all("a") if each.text == "oldest first"]
    page = operator.open(oldest["href"])
    assert {each["value"] for each in page.all("input", name="sort")} == {"oldest"}, "the next search keeps the order"
    (onward,) = page.all("a", rel="next")
    assert onward.text == "Newer"
    following = operator.open(onward["href"])
    assert [ids(page), ids(following)] == [every[:50], every[50:]]
    (back,) = [each for each in following.all("a") if each.text == "newest first"]
    assert ids(operator.open(back["href"])) == every[:-51:-1]
    with operator.events(page.one(id="list")["data-live"]) as answer:
        _, html = next(events(answer.iter_lines()))
    assert [box["value"] for box in parsed(html).all("input", name="run")] == every[:50]
    assert not operator.open("/ui/runs?sort=oldest").all("form", aria_label="All runs that match")
    assert operator.open("/ui/runs?sort=largest").status == 400


def test_a_page_that_runs_out_of_time_says_so_and_goes_on(
    server: TokenServer, operator: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    oldest = submitted(server, "train", user="hank", queue=IDLE)
    server.app.submit_many([{"model": "add", "parameters": {"a": n}, "user": "hank", "queue": IDLE} for n in range(40)])
    monkeypatch.setattr(queries, "SCAN_SECONDS", -1.0)
    monkeypatch.setattr(queries, "FIRST_WINDOW", 15)
    page = operator.open(f"/ui/runs?q={oldest[-12:]}&user=hank")
    seen = 0
    while not ids(page):
        assert "Searched back to" in page.text
        (onward,) = page.all("a", rel="next")
        assert onward.text == "Search further back"
        page = operator.open(onward["href"])
        seen += 1
        assert seen < 100
    assert ids(page) == [oldest]
    assert seen >= 1


@pytest.mark.parametrize("status", ["", "&status=PENDING", "&status=PENDING&status=FAILED"])
def test_the_runs_of_a_model_are_found_however_many_others_there_are(
    server: TokenServer, operator: Browser, monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    user = f"hugo{len(status)}"
    oldest = submitted(server, "train", user=user, queue=IDLE)
    server.app.submit_many([{"model": "add", "parameters": {"a": n}, "user": user, "queue": IDLE} for n in range(40)])
    monkeypatch.setattr(queries, "SCAN_SECONDS", -1.0)
    monkeypatch.setattr(queries, "FIRST_WINDOW", 15)
    assert ids(operator.open(f"/ui/runs?model=train&user={user}{status}")) == [oldest]
    assert ids(operator.open(f"/ui/runs?model=none{status}")) == []


def test_how_far_was_looked_tells_no_id_of_anybody_elses_run(
    server: TokenServer, operator: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = submitted(server, "train", user="ivy", queue=IDLE)
    theirs = put_runs(server.app, [made_run(0.5 + n / 100, tenant="elsewhere") for n in range(40)])
    monkeypatch.setattr(queries, "SCAN_SECONDS", -1.0)
    monkeypatch.setattr(queries, "FIRST_WINDOW", 7)
    page = operator.open("/ui/runs?q=nothing")
    (onward,) = page.all("a", rel="next")
    assert not [each for each in theirs if each in onward["href"]]
    with browser(server, server.admit("ivy")) as ivy:
        own = ivy.open("/ui/runs")
        assert ids(own) == [mine], "their own runs are walked, not everybody's"
        assert "Searched back to" not in own.text


def test_a_payload_is_found_however_often_others_have_it(
    server: TokenServer, operator: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "MAX_SAME_PAYLOAD", 5)
    digest = f"{time.time_ns():064x}"
    put_runs(server.app, [made_run(5 + n, tenant="elsewhere", payload_hash=digest) for n in range(30)])
    (own,) = put_runs(server.app, [made_run(2, payload_hash=digest)])
    assert ids(operator.open(f"/ui/runs?q={digest}")) == [own]


@pytest.mark.parametrize("window", [1, 5, 1000])
@pytest.mark.parametrize("down", [True, False])
def test_a_walk_finds_what_the_engine_lists_whatever_its_windows(
    server: TokenServer, monkeypatch: pytest.MonkeyPatch, window: int, down: bool
) -> None:
    user = f"walker-{window}-{down}"
    before = idle(server)
    stretch = IdRange(stop=before) if down else IdRange(start=before, down=False)
    kinds = [("train", {}) if n % 3 else ("add", {"a": 1}) for n in range(12)]
    queues = ["default"] * 8 + [IDLE] * 4
    made = [submitted(server, *kind, user=user, queue=queue) for kind, queue in zip(kinds, queues, strict=True)]
    for run_id in made[:8]:
        ended(server, run_id)
    monkeypatch.setattr(queries, "FIRST_WINDOW", window)
    monkeypatch.setattr(queries, "LARGEST_WINDOW", window)
    ledger = server.app.ledger(awaited=False)
    try:
        for status in (None, ["SUCCEEDED"], ["PENDING", "SUCCEEDED"], ["RUNNING", "FAILED", "SUCCEEDED"]):
            for model in (None, "train"):
                wanted = Filter(status=status, model=model, user=user)
                monkeypatch.setattr(queries, "SCAN_SECONDS", 60.0)
                found = run_sync(ledger.read(scan, wanted, stretch, 100))
                there = [run.id for run in server.app.runs(status=status, model=model, user=user).runs]
                assert found.ids == (there if down else there[::-1])
                assert found.reached is None
                monkeypatch.setattr(queries, "SCAN_SECONDS", -1.0)
                assert _by_steps(ledger, wanted, stretch) == found.ids
    finally:
        run_sync(ledger.close())


def _by_steps(ledger: RunStore, wanted: Filter, stretch: IdRange) -> list[str]:
    """What a walk finds that is out of time after each window, and taken up again where it ended."""
    found: list[str] = []
    while True:
        some = run_sync(ledger.read(scan, wanted, stretch, 100))
        found += some.ids
        if some.reached is None:
            return found
        stretch = IdRange(start=some.reached, stop=stretch.stop, down=stretch.down)


def test_the_id_of_a_time_lies_between_those_made_before_and_after(server: TokenServer) -> None:
    before = idle(server)
    time.sleep(0.005)  # ids of one millisecond cannot be told apart by their time
    between = id_at(time.time_ns() // 1000)
    time.sleep(0.005)
    assert before < between < idle(server)


def test_a_submitter_sees_their_own_runs_and_no_others(server: TokenServer, operator: Browser) -> None:
    own = idle(server, "sue", idempotency_key="sues")
    other = idle(server, "joe", idempotency_key="joes")
    with browser(server, server.admit("sue")) as sue:
        assert listed(sue) == [own]
        assert listed(sue, user="joe") == [own]
        assert listed(sue, q=other) == []
        assert listed(sue, q=other[-12:]) == []
        assert listed(sue, q="joes") == []
        assert listed(sue, q="sues") == [own]
        assert listed(sue, cursor=other) == [own]
        assert sue.open("/ui/runs").all("input", name="user") == []
    assert set(listed(operator)) >= {own, other}


def test_tenants_do_not_see_each_others_runs(server: TokenServer, operator: Browser) -> None:
    ours, theirs = idle(server, "uma", idempotency_key="k"), idle(server, "uma", tenant="acme", idempotency_key="k")
    with browser(server, server.admit("boss", "operator", tenant="acme")) as boss:
        assert listed(boss) == [theirs]
        assert listed(boss, q=ours) == []
        assert listed(boss, q="k") == [theirs]
        assert boss.open(f"/ui/runs/{ours}").status == 404
    assert theirs not in listed(operator)
    assert listed(operator, q=theirs) == []
    assert listed(operator, q="k", user="uma") == [ours]


def test_many_runs_are_cancelled_at_once_and_each_is_told(server: TokenServer, operator: Browser) -> None:
    first, second = idle(server, "bulk"), idle(server, "bulk")
    done = submitted(server, "add", {"a": 1}, user="bulk")
    ended(server, done)
    gone = "01980a5e-8d1c-7c3e-9f00-5f2d6a1b3c4d"
    page = operator.send("/ui/runs/cancel", {"run": [first, second, done, gone], "user": "bulk", "status": "PENDING"})
    assert page.status == 200
    told = {row[0]: row[1:] for row in page.one("table").rows()}
    assert told[first[-12:]] == ["done", "cancelled"]
    assert told[second[-12:]] == ["done", "cancelled"]
    assert told[done[-12:]][0] == "refused"
    assert "SUCCEEDED already" in told[done[-12:]][1]
    assert told[gone[-12:]] == ["refused", f"there is no run {gone!r}"]
    assert "2 of 4" in page.one("h1").text
    assert [server.app.get(each).status for each in (first, second, done)] == ["CANCELLED", "CANCELLED", "SUCCEEDED"]
    back = [each["href"] for each in page.all("a") if each.text == "Back to the runs"]
    assert back == ["/ui/runs?status=PENDING&user=bulk"]


def test_many_runs_are_retried_at_once_and_each_is_told(server: TokenServer, operator: Browser) -> None:
    bad, waits = submitted(server, "fail", user="again"), idle(server, "again")
    cancelled = idle(server, "again")
    ended(server, bad)
    server.app.cancel(cancelled)
    page = operator.send("/ui/runs/retry", {"run": [bad, waits, cancelled]})
    told = {row[0]: row[1] for row in page.one("table").rows()}
    assert told == {bad[-12:]: "done", waits[-12:]: "refused", cancelled[-12:]: "done"}
    new = [run for run in server.app.runs(user="again").runs if run.retry_of is not None]
    assert {run.retry_of for run in new} == {bad, cancelled}
    assert {run.id[-12:] for run in new} <= {each.text for each in page.all("a", class_="id")}


def test_nobody_cancels_or_retries_the_runs_of_others(server: TokenServer) -> None:
    other = idle(server, "victim")
    with browser(server, server.admit("mallory")) as mallory:
        for what in ("cancel", "retry"):
            page = mallory.send(f"/ui/runs/{what}", {"run": other})
            assert page.one("table").rows()[0][1] == "refused"
            assert f"there is no run {other!r}" in page.text
            assert mallory.send(f"/ui/runs/{other}/{what}").status == 404
    assert server.app.get(other).status == "PENDING"


def test_a_form_without_the_secret_changes_nothing(server: TokenServer, operator: Browser) -> None:
    run_id = idle(server, "csrf")
    for path in ("/ui/runs/cancel", "/ui/runs/retry", f"/ui/runs/{run_id}/cancel", f"/ui/runs/{run_id}/retry"):
        for secret in ({}, {"csrf": "x" * 43}):
            answer = operator.client.post(path, data={"run": run_id, **secret})
            assert answer.status_code == 403, path
        answer = operator.client.post(
            path, data={"run": run_id, "csrf": operator.csrf}, headers={"Origin": "https://evil.example"}
        )
        assert answer.status_code == 403, path
        assert operator.client.get(path).status_code in (404, 405), path
    assert server.app.get(run_id).status == "PENDING"


def test_a_form_without_ticks_or_with_too_many_says_so(server: TokenServer, operator: Browser) -> None:
    page = operator.send("/ui/runs/cancel", {"user": "nobody"})
    assert page.path == "/ui/runs"
    assert "No runs selected" in page.text
    page = operator.send("/ui/runs/cancel", {"run": [f"x{n}" for n in range(run_list.MAX_SELECTED + 1)]})
    assert page.status == 400
    assert f"at most {run_list.MAX_SELECTED}" in page.text


def test_two_ticked_runs_are_compared(server: TokenServer, operator: Browser) -> None:
    first, second = idle(server, "duo"), idle(server, "duo")
    page = operator.send("/ui/runs/compare", {"run": [second, first]})
    assert page.path == "/ui/compare"
    assert dict(page.answer.url.params) == {"a": first, "b": second}
    page = operator.send("/ui/runs/compare", {"run": [first], "user": "duo"})
    assert (page.path, page.answer.url.params["user"]) == ("/ui/runs", "duo")
    assert "Select two runs" in page.text


@pytest.mark.parametrize("trick", TRICKS)
def test_what_people_write_is_text(server: TokenServer, operator: Browser, trick: str) -> None:
    user = f"tricky {trick}"[:190]
    run_id = submitted(server, "fail", {"text": trick}, user=user, idempotency_key=trick)
    ended(server, run_id)
    page = operator.open("/ui/runs", params={"q": trick, "user": user, "model": "fail", "queue": "default"})
    assert ids(page) == [run_id]
    assert trick in page.one("tbody").text
    assert page.one("section", id="filters").one("input", name="user")["value"] == user
    assert len(page.all("script")) == 1
    assert page.all("img") == []


def test_without_a_session_every_page_of_runs_leads_to_the_sign_in(server: TokenServer) -> None:
    run_id = idle(server)
    with browser(server) as stranger:
        for path in ("/ui/runs", f"/ui/runs/{run_id}", "/ui/compare", f"/ui/runs/{run_id}/result", "/ui/live/runs"):
            answer = stranger.client.get(path, follow_redirects=False)
            assert answer.status_code == 303, path
            assert answer.headers["Location"].startswith("/ui/sign-in"), path


def test_a_store_that_is_away_ends_what_is_done_to_many(
    server: TokenServer, operator: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [submitted(server, "add", {"a": n}, user="jane", queue=IDLE) for n in range(4)]
    tried: list[str] = []
    real = server.state.engine.cancel

    async def cancel(run_id: str, **more: object) -> object:
        tried.append(run_id)
        if len(tried) == 2:
            raise StoreUnavailable("the database cannot be reached")
        return await real(run_id, **more)

    monkeypatch.setattr(server.state.engine, "cancel", cancel)
    page = operator.send("/ui/runs/cancel", {"run": made})
    assert tried == made[:2]
    assert page.text.count("not tried") == 3
