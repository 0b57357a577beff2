"""Pages for operators: models, errors, queues, workers, webhooks, tokens. Over real HTTP, on both databases."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from semel.dashboard import errors, models
from semel.dashboard.errors import FailedAttempt
from semel.dashboard.overview import feed
from semel.dashboard.overview.chart import DAY, stacked_chart
from semel.dashboard.templating import DASH
from semel.db.schema import attempts, deliveries, run_hours, subscriptions
from semel.runs.types import new_id
from support.databases import DATABASES
from support.pages import Browser, Page, browser, made_run, put_rows, put_runs, put_workers
from support.service import TokenServer, shared_server

NASTY = '<script>alert(1)</script>"><img src=x>'
HOUR_US = 3_600_000_000


@pytest.fixture(scope="module", params=DATABASES)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokenServer]:
    with shared_server(request, tmp_path_factory) as server:
        yield server


@pytest.fixture(autouse=True)
def _overviews_are_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "REFRESH_EVERY", 0.0)


@pytest.fixture
def tenant() -> str:
    """A tenant for the test alone, so that its runs are all that there is."""
    return f"t-{new_id()[-12:]}"


@pytest.fixture
def operator(server: TokenServer, tenant: str) -> Iterator[Browser]:
    with browser(server, server.admit("olga", "operator", tenant)) as operator:
        yield operator


@pytest.fixture
def root(server: TokenServer) -> Iterator[Browser]:
    with browser(server, server.root) as root:
        yield root


def row_of(page: Page, part: str, first: str) -> list[str]:
    (row,) = [row for row in page.one(id=part).rows() if row[0].split()[0] == first]
    return row


# -- Queues, and what is paused ----------------------------------------------------------------------------------------


def test_a_queue_is_paused_and_resumed_with_a_form_and_the_run_says_why_it_waits(
    server: TokenServer, root: Browser
) -> None:
    queue = f"gpu/{new_id()[-6:]}"
    late, _ = put_runs(server.app, [made_run(100, status="PENDING", queue=queue) for _ in range(2)])
    put_runs(server.app, [made_run(100, status="PENDING", queue=queue, due=-500, ready=False)])
    page = root.open("/ui/queues")
    assert row_of(page, "queues", queue)[1:5] == ["open no worker", "2", "1", "0"]
    answer = root.send("/ui/queues/pause", {"kind": "queue", "name": queue, "why": f"new driver {NASTY}"})
    assert "nothing new starts" in answer.one("p", role="status").text
    assert "3 runs are pending" in answer.one("p", role="status").text
    state = row_of(answer, "queues", queue)[1]
    assert state.startswith("paused since")
    assert "by root: new driver" in state
    assert not [each for each in answer.all("script") if not each.get("src")]
    assert f"the queue '{queue}' is paused (by root: new driver" in root.open(f"/ui/runs/{late}").text
    overview = root.open("/").one(id="attention").text
    assert f"The queue {queue} is paused since" in overview
    assert "3 pending" in overview
    again = root.send("/ui/queues/resume", {"kind": "queue", "name": queue})
    assert again.one("p", role="status").text == f"Resumed the queue {queue}."
    assert row_of(again, "queues", queue)[1] == "open no worker"
    twice = root.send("/ui/queues/resume", {"kind": "queue", "name": queue})
    assert "not paused any more" in twice.one("p", role="status").text
    logged = root.open(f"/ui/audit?target={queue}").one(id="actions").rows()
    assert [row[4] for row in logged] == ["queue.resumed", "queue.paused"]
    assert all("dashboard" in row[3] for row in logged)


def test_a_model_is_paused_on_its_page(root: Browser) -> None:
    answer = root.send("/ui/queues/pause", {"kind": "model", "name": "add", "why": "wrong results"})
    assert (answer.path, answer.status) == ("/ui/models", 200)
    assert "paused since" in answer.one(id="limits").text
    assert "wrong results" in root.open("/ui/queues").one(id="paused-models").text
    assert "paused" in row_of(root.open("/ui/models"), "models", "add")[0]
    root.send("/ui/queues/resume", {"kind": "model", "name": "add"})
    assert "paused" not in root.open("/ui/models?model=add").one(id="limits").text


def test_only_operators_of_the_main_tenant_pause(server: TokenServer, tenant: str, operator: Browser) -> None:
    put_runs(server.app, [made_run(100, tenant=tenant, status="PENDING", queue="ours")])
    page = operator.open("/ui/queues")
    assert row_of(page, "queues", "ours")[2] == "1"
    assert not page.one(id="queues").all("form")
    assert operator.send("/ui/queues/pause", {"kind": "queue", "name": "ours"}).status == 403
    with browser(server, server.admit("sue")) as sue:
        assert sue.open("/ui/queues").status == 403
        assert sue.send("/ui/queues/pause", {"kind": "queue", "name": "ours"}).status == 403


@pytest.mark.parametrize(
    "form", [{"kind": "user", "name": "x"}, {"kind": "queue"}, {"kind": "queue", "name": "semel-service"}]
)
def test_what_cannot_be_paused_is_refused(root: Browser, form: dict[str, str]) -> None:
    assert root.send("/ui/queues/pause", form).status == 400


# -- Workers -----------------------------------------------------------------------------------------------------------


def test_a_worker_has_a_page_with_the_runs_that_it_holds(server: TokenServer, tenant: str, operator: Browser) -> None:
    put_workers(server.app, [{"id": f"w {tenant}", "name": NASTY, "seen": 3, "host": "hidden-host"}])
    held = {"status": "RUNNING", "worker": f"w {tenant}", "lease_until": -60, "started": 50}
    (own,) = put_runs(server.app, [made_run(60, tenant=tenant, **held)])
    (theirs,) = put_runs(server.app, [made_run(60, tenant=f"{tenant}-other", **held)])
    listed = operator.open("/ui/workers")
    (link,) = [each for each in listed.one(id="workers").all("a") if each["href"].endswith(tenant)]
    page = operator.open(link["href"])
    assert [row[0] for row in page.one(id="held").rows()] == [own[-12:]]
    for shown in (listed, page):
        assert theirs[-12:] not in shown.answer.text
        assert "hidden-host" not in shown.answer.text
        assert not shown.all("img")
    assert "has stopped" in operator.open("/ui/workers?worker=unheard-of").text


# -- Errors ------------------------------------------------------------------------------------------------------------


def test_failures_are_grouped_by_type_and_message(server: TokenServer, tenant: str, operator: Browser) -> None:
    made = [
        made_run(600 - n, tenant=tenant, status="FAILED", last_error=f"ValueError: row {n} of {new_id()} is bad")
        for n in range(5)
    ]
    made += [made_run(50, tenant=tenant, status="FAILED", last_error=f"KeyError: {NASTY}", model="other")]
    made += [made_run(900, tenant=tenant, status="FAILED", last_error="ValueError: row 9 of 9 is bad", model="other")]
    made += [made_run(40, tenant=tenant, status="FAILED", last_error=None), made_run(30, tenant=tenant)]
    ids = put_runs(server.app, made)
    page = operator.open("/ui/errors")
    rows = page.one(id="errors").rows()
    assert [row[1] for row in rows] == ["6", "1", "1"]
    assert [row[2] for row in rows] == ["6", "1", "1"]
    assert rows[0][5] == "add 5 , other 1"
    assert rows[0][0].startswith("ValueError : row 4 of")
    assert rows[0][-1] == ids[4][-12:]
    assert {row[0].split()[0] for row in rows} == {"ValueError", "KeyError", "no"}
    assert not page.all("img")
    of_one = operator.open("/ui/errors?model=other").one(id="errors").rows()
    assert sorted(row[5] for row in of_one) == ["other 1", "other 1"]
    with browser(server, server.admit("sue", tenant=tenant)) as sue:
        assert "No attempt has failed" in sue.open("/ui/errors").text


def test_errors_of_attempts_that_were_tried_again_are_counted_too(
    server: TokenServer, tenant: str, operator: Browser
) -> None:
    tries = {"tenant": tenant, "attempts": 3, "errors": 2, "version": 8}
    succeeded, failed = put_runs(
        server.app,
        [made_run(90, **tries), made_run(60, status="FAILED", last_error="ValueError: row 3 is bad", **tries)],
    )
    for run_id, ends in ((succeeded, ("retried", "lost", "snoozed")), (failed, ("retried",))):
        for number, step in enumerate(ends, 1):
            put_rows(server.app, attempts, _attempt(run_id, tenant, number, step))
    rows = operator.open("/ui/errors").one(id="errors").rows()
    assert [row[:3] for row in rows] == [["ValueError : row 3 is bad", "3", "1"], ["worker w was lost", "1", "0"]]
    assert operator.open("/ui/models?model=add").one(id="failures").rows()[0][0] == failed[-12:]
    assert len(operator.open("/ui/models?model=add").one(id="failures").rows()) == 1


def _attempt(run_id: str, tenant: str, number: int, step: str) -> dict[str, Any]:
    """The row of an attempt that ended in this way, and was followed by another one."""
    errors_by_step = {"retried": f"ValueError: row {number} is bad", "lost": "worker w was lost", "snoozed": "old"}
    times = {"due_us": 1, "began_us": 2, "ended_us": number}
    counts = {"fence": number, "version": 2 * number + 1, "attempts": number, "errors": 0, "losts": 0}
    row = {"run_id": run_id, "tenant": tenant, "status": "PENDING", "step": step, "worker": "w"}
    return {**row, **times, **counts, "last_error": errors_by_step[step]}


def test_numbers_and_ids_do_not_make_an_error_another_kind() -> None:
    def failed(error: str | None, at: int = 1, model: str = "m") -> FailedAttempt:
        return FailedAttempt(f"id{at}", model, "ann", at, error)

    texts = ["A: 7 at 0x7f00ab", "A: 81 at 0x7f00AC", "A.B: 7 at 0x7f00ab", "not a type: it has spaces", "Alone", None]
    groups = errors.group_errors([failed(text, at, f"m{at % 2}") for at, text in enumerate(texts)])
    assert [(each.type, each.message, each.count) for each in groups] == [
        ("A", "81 at 0x7f00AC", 2),
        ("", "no error recorded", 1),
        ("Alone", "", 1),
        ("", "not a type: it has spaces", 1),
        ("A.B", "7 at 0x7f00ab", 1),
    ]
    assert (groups[0].first_us, groups[0].last_us, groups[0].latest, dict(groups[0].models)) == (
        0,
        1,
        "id1",
        {"m0": 1, "m1": 1},
    )


# -- Models ------------------------------------------------------------------------------------------------------------


def hours(tenant: str, ago: int, status: str, **buckets: int) -> list[dict[str, Any]]:
    """Runs of an hour some hours ago; ``b28=5``: five that took 1 s to 2 s."""
    now = time.time_ns() // 1000
    hour = now - now % HOUR_US - ago * HOUR_US
    same = {"tenant": tenant, "model": "add", "hour_us": hour, "status": status}
    return [{**same, "bucket": int(name[1:]), "count": count} for name, count in buckets.items()]


def test_the_page_of_a_model_tells_whether_it_gets_worse(server: TokenServer, tenant: str, operator: Browser) -> None:
    rows = hours(tenant, 30, "SUCCEEDED", b28=99) + hours(tenant, 30, "FAILED", b28=1)
    rows += hours(tenant, 2, "SUCCEEDED", b28=40, b37=40) + hours(tenant, 2, "FAILED", b37=20)
    rows += hours(tenant, 1, "CANCELLED", **{"b-1": 3})
    put_rows(server.app, run_hours, *rows)
    made = [
        made_run(
            100 + n, tenant=tenant, started=90 + n, finished=90, parameters=f'{{"a": {n % 2}, "b": "{NASTY[:8]}"}}'
        )
        for n in range(10)
    ]
    made += [made_run(50, tenant=tenant, status="FAILED", last_error="ValueError: no", parameters='{"a": 1}')]
    put_runs(server.app, made)
    page = operator.open("/ui/models?model=add")
    figures = {
        each.one("dt").text: each.one("dd").text for each in page.one(id="model-figures").all("div", class_="stat")
    }
    assert figures["Failure rate"] == "20 % worse before: 1 %"
    assert figures["p50"] == "11.7 s worse before: 1.5 s"
    assert figures["p95"].startswith("19.2 s worse before: 1.")
    assert figures["Ended"].split()[0] == "103"
    picture = page.one(id="model-chart").all("svg", role="img")
    assert [len(each.all("g")) for each in picture] == [2, 2]
    table = page.one(id="model-chart").rows()
    assert [row[1:5] for row in table] == [["80", "20", "0", "20 %"], ["0", "0", "3", DASH]]
    assert page.one(id="slowest").rows()[0][2] == "9.0 s"
    assert page.one(id="failures").rows()[0][-1] == "ValueError: no"
    parameters = {row[0]: row[1:] for row in page.one(id="parameters").rows()}
    assert parameters["a"] == ["11", "1 6 , 0 5"]
    assert "3 with an error" in page.one(id="limits").text
    week = operator.open("/ui/models?model=add&window=week").one(id="model-figures").text
    assert "Ended 203 in the last 7 days" in week
    assert operator.open("/ui/models?model=unheard-of").status == 404
    with browser(server, server.admit("sue", tenant=tenant)) as sue:
        assert sue.open("/ui/models?model=add").path == "/ui/runs", "sums of others are not for everybody"


def test_few_runs_prove_nothing_and_a_gap_breaks_the_line() -> None:
    def counted(bucket: int, runs: int) -> models.Period:
        return models.period([(0, "SUCCEEDED", bucket, runs)], 0, 1)

    assert [each.is_worse for each in models.trends(counted(37, 20), counted(28, 20))] == [False, True, True]
    assert not any(each.is_worse for each in models.trends(counted(37, 19), counted(28, 100)))
    assert not any(each.is_worse for each in models.trends(counted(28, 100), counted(37, 100)))
    starts = DAY.starts(1_800_000_000_000_000)
    steps = [models.period([], 0, 1) if place in (3, 5) else counted(28, 1) for place in range(len(starts))]
    drawn = stacked_chart(DAY, starts, [each.counts for each in steps], models.STACK)
    lines = models.duration_chart(drawn, steps, [str(start) for start in starts])
    assert lines is not None
    assert [len(each.split()) for each in lines.lines[0].stretches] == [3, 18]
    assert len(lines.lines[0].points) == 22
    assert models.duration_chart(drawn, [models.period([], 0, 1)], [""]) is None


# -- Webhooks and tokens -----------------------------------------------------------------------------------------------


def test_deliveries_are_listed_by_state_and_sent_again(server: TokenServer, tenant: str) -> None:
    hook, run = new_id(), new_id()
    put_rows(
        server.app,
        subscriptions,
        {
            "id": hook,
            "tenant": tenant,
            "kind": "webhook",
            "target": "https://hooks.example.com/s3cret",
            "secret": "s3cret",
            "events": "RunFailed",
            "created_us": 1,
        },
    )
    event = (
        f'{{"id":"e","name":"RunFailed","run_id":"{run}","version":3,"model":"add","tenant":"{tenant}","user":"ann",'
    )
    event += '"status":"FAILED","step":"failed","at":"2026-01-01T00:00:00Z","fence":1,"note":null}'
    same = {"subscription_id": hook, "run_id": run, "attempts": 9, "body": event, "due_us": time.time_ns() // 1000}
    put_rows(
        server.app, deliveries, {**same, "version": 3, "state": "dead", "last_status": 500, "last_error": "no luck"}
    )
    put_rows(server.app, deliveries, {**same, "version": 4, "state": "delivered", "last_status": 200})
    with browser(server, server.admit("olga", "operator", tenant)) as operator:
        page = operator.open("/ui/webhooks")
        assert [row[3] for row in page.one(id="deliveries").rows()] == ["delivered", "dead"]
        (shown,) = page.one(id="subscriptions").rows()
        assert shown[0] == "hooks.example.com"
        assert shown[1] == "failing no luck"
        assert "s3cret" not in page.answer.text
        assert not page.one(id="deliveries").all("form")
        dead = operator.open(f"/ui/webhooks?subscription={hook}&state=dead").one(id="deliveries").rows()
        assert [row[3] for row in dead] == ["dead"]
        assert operator.open("/ui/webhooks?state=unheard-of").status == 400
        assert operator.send("/ui/webhooks/resend", {"subscription": hook, "run": run, "version": "3"}).status == 403
    with browser(server, server.admit("ada", "admin", tenant)) as admin:
        assert "https://hooks.example.com/s3cret" in admin.open("/ui/webhooks").text
        sent = admin.send("/ui/webhooks/resend", {"subscription": hook, "run": run, "version": "3"})
        assert "is sent again soon" in sent.one("p", role="status").text
        missing = admin.send("/ui/webhooks/resend", {"subscription": hook, "run": run, "version": "77"})
        assert "was not sent again" in missing.one("p", role="status").text


def test_tokens_are_listed_and_revoked(server: TokenServer, tenant: str) -> None:
    gone = server.admit(NASTY, "submitter", tenant)
    server.admit("theirs", "submitter", f"{tenant}-other")
    with browser(server, server.admit("olga", "operator", tenant)) as operator:
        page = operator.open("/ui/tokens")
        assert {row[1] for row in page.one(id="tokens").rows()} == {" ".join(NASTY.split()), "olga"}
        assert not page.one(id="tokens").all("form")
        assert not page.all("img")
        assert operator.send("/ui/tokens/revoke", {"token": gone.id or ""}).status == 403
    with browser(server, server.admit("ada", "admin", tenant)) as admin:
        answer = admin.send("/ui/tokens/revoke", {"token": gone.id or ""})
        assert answer.one("p", role="status").text == f"Revoked the token {gone.id}."
        assert {row[1] for row in answer.one(id="tokens").rows()} == {"ada", "olga"}
        again = admin.send("/ui/tokens/revoke", {"token": gone.id or ""})
        assert "was not revoked" in again.one("p", role="status").text
    assert gone.get("/runs").status_code == 401
