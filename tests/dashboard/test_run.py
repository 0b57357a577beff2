"""The page of a run, its files, and two runs side by side."""

import json
from collections.abc import Iterator

import pytest

from semel.dashboard.templating import DASH
from semel.db.schema import run_logs
from support.apps.dashboard_app import SQUARE
from support.dashboard_runs import TRICKS, ended, idle, manual_worker, runs_server, submitted
from support.databases import DATABASES
from support.pages import Browser, Node, Page, browser, put_rows
from support.service import TokenServer

UNKNOWN = "01980a5e-8d1c-7c3e-9f00-5f2d6a1b3c4d"


@pytest.fixture(scope="module", params=DATABASES)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokenServer]:
    with runs_server(request, tmp_path_factory) as server:
        yield server


@pytest.fixture(scope="module")
def operator(server: TokenServer) -> Iterator[Browser]:
    with browser(server, server.admit("olga", "operator")) as made:
        yield made


def facts(page: Page) -> dict[str, str]:
    """What the list of facts says."""
    place = page.one("section", id="run-facts")
    names, values = place.all("dt"), place.all("dd")
    return {name.text: value.text for name, value in zip(names, values, strict=True)}


def steps(page: Page) -> list[str]:
    return [row[1] for row in page.one("section", id="run-timeline").one("table").rows()]


def words(node: Node) -> list[str]:
    """What the lanes of a picture say of their attempts, without the times."""
    return [each.text.partition(",")[0] for each in node.one("svg", role="img").all("text", class_="outcome")]


def test_the_page_tells_everything_about_a_run(server: TokenServer, operator: Browser) -> None:
    run_id = submitted(server, "shout", {"text": "hello there"}, user="ann", idempotency_key="ann-1")
    run = ended(server, run_id)
    page = operator.open(f"/ui/runs/{run_id}")
    told = facts(page)
    assert page.status == 200
    assert run_id in page.one("h1").text
    assert told["User"] == "ann"
    assert told["Key"].startswith("ann-1")
    assert told["Payload hash"].startswith(run.payload_hash)
    assert told["Fence"].startswith(str(run.fence))
    assert told["Worker"] == run.worker
    assert "hello there" in page.one("section", id="run-log").text
    assert json.loads(page.one("section", id="run-outcome").one("pre").text) == {
        "said": "hello there",
        "hello there": "said",
    }
    assert json.loads(page.all("pre", class_="json")[-1].text) == {"text": "hello there"}
    assert steps(page) == ["created", "leased", "succeeded"]
    assert [each for each in page.root.walk() if each.get("data-live")] == []


async def diverge() -> dict[str, float]:
    return {"loss": float("nan")}


def test_a_result_that_is_not_finite_is_shown_with_its_warning(server: TokenServer, operator: Browser) -> None:
    server.app.model("diverge")(diverge)
    run_id = submitted(server, "diverge")
    ended(server, run_id)
    outcome = operator.open(f"/ui/runs/{run_id}").one("section", id="run-outcome")
    assert json.loads(outcome.one("pre").text) == {"loss": None}
    assert "Warning: $.loss is nan" in outcome.text


def test_a_failed_run_shows_its_error_and_traceback(server: TokenServer, operator: Browser) -> None:
    run_id = submitted(server, "fail", {"text": "the disk is full"})
    ended(server, run_id)
    outcome = operator.open(f"/ui/runs/{run_id}").one("section", id="run-outcome")
    assert outcome.one("pre", class_="run-error").text == "ValueError: the disk is full"
    traceback = outcome.one("details", id="run-traceback")
    assert "open" in traceback.attributes
    assert "raise ValueError(text)" in traceback.text


def test_the_picture_tells_of_every_attempt(server: TokenServer, operator: Browser) -> None:
    run_id = idle(server)
    path = f"/ui/runs/{run_id}"
    with manual_worker(server) as worker:
        assert words(operator.open(path).one("section", id="run-timeline")) == ["waiting"]
        worker.take(run_id)
        page = operator.open(path)
        assert words(page.one("section", id="run-timeline")) == ["running"]
        assert len(page.one("svg", role="img").all("circle", class_="mark-heartbeat")) == 1
        worker.end(run_id, "lost", "the worker vanished")
        worker.take(run_id)
        worker.end(run_id, "snooze", "later")
        worker.take(run_id)
        worker.end(run_id, "retry", "it stumbled")
        worker.take(run_id)
        server.app.cancel(run_id, why="enough")
        page = operator.open(path)
        assert words(page.one("section", id="run-timeline")) == ["lost", "snoozed", "retried", "cancelling"]
        assert len(page.one("svg", role="img").all("line", class_="mark-cancel")) == 1
        worker.end(run_id, "cancelled", "enough")
    page = operator.open(path)
    picture = page.one("section", id="run-timeline")
    assert words(picture) == ["lost", "snoozed", "retried", "cancelled"]
    fills = [each["class"] for each in picture.one("svg", role="img").all("rect")]
    assert [each for each in fills if each != "fill-pending"] == [
        "fill-failed",
        "fill-cancelled",
        "fill-failed",
        "fill-cancelled",
    ]
    label = picture.one("svg", role="img")["aria-label"]
    assert "attempt 1: lost" in label
    assert "attempt 3: cancelled" in label
    assert "the worker vanished" in picture.one("table").text
    unlucky = [each.text for each in picture.one("ul", id="run-attempts").all("li")]
    assert [each.split(" ")[:3] for each in unlucky] == [["lost", "Attempt", "1,"], ["retried", "Attempt", "2,"]]
    assert [each.partition(": ")[2].split(": ")[-1] for each in unlucky] == ["the worker vanished", "it stumbled"]
    fences = [int(row[3]) for row in picture.one("table").rows() if row[1] == "leased"]
    lines = [{"fence": fence, "line": 1, "at_us": 1, "level": "INFO", "text": f"said {fence}"} for fence in fences]
    put_rows(server.app, run_logs, *({"run_id": run_id, **each} for each in lines))
    log = operator.open(path).one("section", id="run-log").text
    for number, fence in zip((1, 2, 2, 3), fences, strict=True):
        assert f"attempt {number} INFO said {fence}" in log
    assert steps(page)[-2:] == ["cancel_requested", "cancelled"]
    assert page.one("section", id="run-outcome").one("pre", class_="run-error").text == "it stumbled"


def test_a_picture_of_very_many_attempts_stays_small(server: TokenServer, operator: Browser) -> None:
    run_id = idle(server)
    with manual_worker(server) as worker:
        for _ in range(40):
            worker.take(run_id)
            worker.end(run_id, "snooze", "x" * 1000)
    page = operator.open(f"/ui/runs/{run_id}")
    lanes = words(page.one("section", id="run-timeline"))
    assert len(lanes) == 12
    assert lanes[-1] == "waiting"
    assert "29 earlier attempts are not shown" in page.text
    assert "The last 60 of 81 steps" in page.text
    assert len(page.answer.content) < 100_000


def test_a_waiting_run_says_why_and_its_place(server: TokenServer, operator: Browser) -> None:
    first, second = (submitted(server, "add", {"a": n}, queue="nowhere") for n in (1, 2))
    waiting = operator.open(f"/ui/runs/{second}").one("section", id="run-waiting")
    assert "no live worker serves the queue 'nowhere'" in waiting.text
    assert "2 in nowhere" in waiting.text
    assert "1 in nowhere" in operator.open(f"/ui/runs/{first}").one("section", id="run-waiting").text
    later = submitted(server, "add", {"a": 1}, delay=3600)
    assert "scheduled" in operator.open(f"/ui/runs/{later}").one("section", id="run-waiting").text


def test_buttons_cancel_and_retry_and_the_two_runs_lead_to_each_other(server: TokenServer, operator: Browser) -> None:
    run_id = idle(server, "rita")
    page = operator.open(f"/ui/runs/{run_id}")
    actions = [each["action"] for each in page.one("section", id="run-state").all("form")]
    assert actions == [f"/ui/runs/{run_id}/cancel"]
    page = operator.send(actions[0])
    assert page.path == f"/ui/runs/{run_id}"
    assert "Cancelled." in page.text
    assert "CANCELLED" in page.one("section", id="run-state").text
    (retry,) = [each["action"] for each in page.one("section", id="run-state").all("form")]
    again = operator.send(retry)
    new = again.path.rpartition("/")[2]
    assert new != run_id
    assert server.app.get(new).retry_of == run_id
    assert [each["href"] for each in again.one("section", id="run-state").all("a", class_="id")] == [
        f"/ui/runs/{run_id}"
    ]
    old = operator.open(f"/ui/runs/{run_id}").one("section", id="run-state")
    assert [each["href"] for each in old.all("a", class_="id")] == [f"/ui/runs/{new}"]
    assert f"/ui/submit?from={run_id}" in [each["href"] for each in old.all("a", class_="button")]
    refused = operator.send(f"/ui/runs/{new}/retry")
    assert refused.status == 409
    assert "only a FAILED or CANCELLED run can be retried" in refused.text


@pytest.mark.parametrize(
    "path",
    [
        "/ui/runs/{}",
        "/ui/runs/{}/result",
        "/ui/runs/{}/parameters",
        "/ui/runs/{}/log",
        "/ui/runs/{}/artifacts/square.png",
        "/ui/runs/{}/images/square.png",
        "/ui/live/runs/{}",
        "/ui/compare?a={0}&b={0}",
    ],
)
def test_what_is_not_there_or_not_yours_is_a_page_that_says_so(server: TokenServer, path: str) -> None:
    run_id = submitted(server, "paint", {"rows": 1}, user="owner")
    ended(server, run_id)
    with browser(server, server.admit("owner")) as owner, browser(server, server.admit("other")) as other:
        with owner.client.stream("GET", path.format(run_id)) as answer:
            assert answer.status_code == 200
        for visitor, unknown in ((other, run_id), (owner, UNKNOWN), (owner, "nonsense"), (owner, "%00")):
            page = visitor.open(path.format(unknown))
            assert page.status == 404, unknown
            assert page.answer.headers["Content-Type"].startswith("text/html")
            assert "NOT_FOUND" in page.text


def test_pictures_are_shown_and_other_files_downloaded(server: TokenServer, operator: Browser) -> None:
    run_id = submitted(server, "paint")
    ended(server, run_id)
    page = operator.open(f"/ui/runs/{run_id}")
    (image,) = page.all("img")
    assert image["src"] == f"/ui/runs/{run_id}/images/square.png"
    answer = operator.client.get(image["src"])
    assert answer.content == SQUARE
    assert answer.headers["Content-Type"] == "image/png"
    assert answer.headers["Content-Disposition"] == "inline"
    links = [each["href"] for each in page.one("section", id="run-outcome").all("a") if "/artifacts/" in each["href"]]
    assert len(links) == 3
    for link in links:
        answer = operator.client.get(link)
        assert answer.status_code == 200
        assert answer.headers["Content-Disposition"].startswith("attachment")
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Content-Security-Policy"] == "sandbox; default-src 'none'"
        tag = answer.headers["ETag"]
        assert operator.client.get(link, headers={"If-None-Match": tag}).status_code == 304


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("p.png", "image/png"),
        ("p.JPG", "image/jpeg"),
        ("p.jpeg", "image/jpeg"),
        ("p.gif", "image/gif"),
        ("p.webp", "image/webp"),
        ("p.svg", None),
        ("p.html", None),
        ("p.png.html", None),
        ("png", None),
        ("sub/ü 100%.png", "image/png"),
    ],
)
def test_a_file_is_shown_only_if_its_name_is_a_harmless_pictures(
    server: TokenServer, operator: Browser, name: str, kind: str | None
) -> None:
    run_id = submitted(server, "files", {"names": [name], "text": "<script>alert(1)</script>"})
    ended(server, run_id)
    page = operator.open(f"/ui/runs/{run_id}")
    links = [each["href"] for each in page.one("section", id="run-outcome").one("table").all("a")]
    assert operator.client.get(links[0]).text == "<script>alert(1)</script>"
    answer = operator.client.get(links[0].replace("/artifacts/", "/images/"))
    if kind is None:
        assert page.all("img") == []
        assert answer.status_code == 404
        return
    assert [each["src"] for each in page.all("img")] == [links[0].replace("/artifacts/", "/images/")]
    assert answer.headers["Content-Type"] == kind
    assert answer.headers["Content-Disposition"] == "inline"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Content-Security-Policy"] == "sandbox; default-src 'none'"


def test_what_is_large_is_downloaded_and_the_page_stays_light(server: TokenServer, operator: Browser) -> None:
    heavy = "\"<&'>" * 60
    run_id = submitted(server, "chatter", {"lines": 900, "text": heavy})
    ended(server, run_id)
    page = operator.open(f"/ui/runs/{run_id}")
    assert len(page.answer.content) < 150_000
    assert "too large to show here" in page.one("section", id="run-outcome").text
    for what, kind in (("result", "application/json"), ("parameters", "application/json"), ("log", "text/plain")):
        answer = operator.client.get(f"/ui/runs/{run_id}/{what}")
        assert answer.headers["Content-Type"].startswith(kind)
        assert answer.headers["Content-Disposition"].startswith(f'attachment; filename="{run_id}')
        assert answer.headers["Content-Security-Policy"] == "sandbox; default-src 'none'"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert operator.client.get(f"/ui/runs/{run_id}/result").json() == [heavy] * 900
    log = operator.client.get(f"/ui/runs/{run_id}/log").text.splitlines()
    assert len(log) == 900
    assert log[-1].endswith(f"899 {heavy}")
    assert "899" in page.one("section", id="run-log").text


@pytest.mark.parametrize("trick", TRICKS)
def test_what_people_write_is_text(server: TokenServer, operator: Browser, trick: str) -> None:
    run_id = submitted(server, "shout", {"text": trick}, idempotency_key=trick)
    ended(server, run_id)
    bad = submitted(server, "fail", {"text": trick})
    ended(server, bad)
    noted = idle(server)
    server.app.cancel(noted, why=trick)
    plain = " ".join(trick.split())
    page = operator.open(f"/ui/runs/{run_id}")
    assert plain in page.one("section", id="run-log").text
    assert plain in facts(page)["Key"]
    assert json.loads(page.one("section", id="run-outcome").one("pre").text)["said"] == plain
    pages = [page, operator.open(f"/ui/runs/{bad}"), operator.open(f"/ui/runs/{noted}")]
    assert plain in pages[1].one("section", id="run-outcome").text
    assert plain in pages[2].one("section", id="run-timeline").text
    both = operator.open(f"/ui/compare?a={run_id}&b={bad}")
    assert plain in both.text
    for each in [*pages, both]:
        assert len(each.all("script")) == 1
        assert each.all("img") == []


def test_two_runs_are_compared_by_what_differs(server: TokenServer, operator: Browser) -> None:
    one = submitted(server, "shout", {"text": "one"}, user="cora")
    other = submitted(server, "shout", {"text": "other"}, user="cora")
    bad = submitted(server, "fail", {"text": "broken"}, user="cora")
    for run_id in (one, other, bad):
        ended(server, run_id)
    page = operator.open(f"/ui/compare?a={one}&b={other}")
    tables = page.all("table")
    assert page.all("h2")[0].text == "Parameters"
    folded = {row.all("td")[0].text for row in tables[3].all("tr", class_="differs")}
    assert "Payload hash differs" in folded
    marked = {row.all("td")[0].text for row in tables[2].all("tr", class_="differs")}
    assert not {each for each in marked if each.startswith(("Status", "Model", "User", "Attempts"))}
    assert tables[0].rows() == [["text", "changed", '"one"', '"other"']]
    assert tables[1].rows() == [
        ["said", "changed", '"one"', '"other"'],
        ["one", "only in A", '"said"', DASH],
        ["other", "only in B", DASH, '"said"'],
    ]
    assert len([each for each in page.all("svg") if each.get("role") == "img"]) == 2
    page = operator.open(f"/ui/compare?a={one}&b={bad}")
    marked = {row.all("td")[0].text for row in page.all("table")[-2].all("tr", class_="differs")}
    assert {"Status differs", "Model differs", "Error differs"} <= marked
    assert "B has no result." in page.text
    same = operator.open(f"/ui/compare?a={one}&b={one}")
    assert same.text.count("Equal.") == 2
    assert [each.text for each in same.all("tr", class_="differs")] == []


def test_compare_asks_for_the_runs_that_it_was_not_given(server: TokenServer, operator: Browser) -> None:
    run_id = idle(server)
    page = operator.open("/ui/compare")
    assert [each["value"] for each in page.one("form", class_="filters").all("input")] == ["", ""]
    page = operator.open(f"/ui/compare?a={run_id}")
    assert [each["value"] for each in page.one("form", class_="filters").all("input")] == [run_id, ""]
    assert operator.open(f"/ui/compare?a={run_id}&b={UNKNOWN}").status == 404


def test_a_submitter_cannot_compare_with_anothers_run(server: TokenServer) -> None:
    own, other = idle(server, "nell"), idle(server, "zoe")
    with browser(server, server.admit("nell")) as nell:
        assert nell.open(f"/ui/compare?a={own}&b={own}").status == 200
        assert nell.open(f"/ui/compare?a={own}&b={other}").status == 404
        assert nell.open(f"/ui/compare?a={other}&b={own}").status == 404


def test_a_page_says_what_the_run_was_made_of(server: TokenServer, operator: Browser) -> None:
    run_id = submitted(server, "shout", {"text": "made"}, user="cora")
    ended(server, run_id)
    part = operator.open(f"/ui/runs/{run_id}").one(id="run-manifest")
    found = server.app.manifest(run_id)
    assert found.code is not None
    for expected in (str(found.seed), found.code["function"], found.code["reference"], "packages"):
        assert expected in part.text


def test_a_run_is_run_again_from_a_page_that_says_what_changed(server: TokenServer, operator: Browser) -> None:
    run_id = submitted(server, "shout", {"text": "twice"}, user="cora")
    assert operator.open(f"/ui/runs/{run_id}/rerun").status in (200, 409), "409 while it has not ended"
    ended(server, run_id)
    asking = operator.open(f"/ui/runs/{run_id}/rerun")
    assert "hanged since, compared with" in asking.text
    page = operator.send(f"/ui/runs/{run_id}/rerun", {})
    assert f"This is a rerun of {run_id}." in page.text
    again = page.path.rpartition("/")[2]
    ended(server, again)
    page = operator.open(f"/ui/runs/{again}")
    assert "A rerun of" in page.text
    assert "same result" in page.text
    with browser(server, server.admit("nell")) as nell:
        assert nell.open(f"/ui/runs/{run_id}/rerun").status == 404
        assert nell.send(f"/ui/runs/{run_id}/rerun", {}).status == 404
