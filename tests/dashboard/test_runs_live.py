"""Pages of runs that are open while something happens: they follow it, for whom they may and as long as they may."""

from collections.abc import Iterator

import pytest

from semel.dashboard.runs import detail as run_page
from semel.dashboard.runs import run_list
from semel.service import sse
from support.dashboard_runs import ended, events, idle, manual_worker, runs_server, submitted
from support.databases import DATABASES
from support.pages import Browser, Node, browser, parsed
from support.service import TokenServer
from support.waiting import eventually


@pytest.fixture(scope="module", params=DATABASES)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokenServer]:
    with runs_server(request, tmp_path_factory) as server:
        yield server


@pytest.fixture(scope="module")
def operator(server: TokenServer) -> Iterator[Browser]:
    with browser(server, server.admit("olga", "operator")) as made:
        yield made


def test_an_open_list_follows_its_rows_and_counts_newer_ones(
    server: TokenServer, operator: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_list, "BUSY_PAUSE", 0.1)
    monkeypatch.setattr(run_list, "QUIET_PAUSE", 0.1)
    run_id = idle(server, "lara")
    page = operator.open("/ui/runs?user=lara")
    (place,) = [each["data-live"] for each in page.root.walk() if each.get("data-live")]
    with operator.client.stream("GET", place) as answer, manual_worker(server) as worker:
        told = events(answer.iter_lines())
        name, html = next(told)
        assert name == "replace"
        assert "PENDING" in html
        assert run_id in html
        worker.take(run_id)
        _until(told, "RUNNING")
        later = idle(server, "lara")
        _until(told, "1 newer run")
        worker.end(run_id, "fatal", "out of luck")
        html = _until(told, "out of luck")
        assert "FAILED" in html
        assert later not in html


def _until(told: Iterator[tuple[str, str]], text: str) -> str:
    for name, html in told:
        assert name == "replace"
        if text in html:
            return html
    raise AssertionError(f"the stream ended without {text!r}")


@pytest.mark.parametrize(("role", "tenant"), [("submitter", ""), ("operator", "acme")])
def test_an_open_list_shows_nobody_elses_rows(server: TokenServer, role: str, tenant: str) -> None:
    other = idle(server, "victor")
    with (
        browser(server, server.admit("spy", role, tenant)) as spy,
        spy.client.stream("GET", f"/ui/live/runs?run={other}&first=1") as answer,
    ):
        name, html = next(events(answer.iter_lines()))
        assert name == "replace"
        assert other not in html


def test_an_open_list_ends_for_whose_token_is_taken_away(server: TokenServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_list, "QUIET_PAUSE", 0.1)
    monkeypatch.setattr(sse, "CHECK_EVERY", 0.1)
    person = server.admit("temp")
    with browser(server, person) as temp, temp.client.stream("GET", "/ui/live/runs") as answer:
        told = events(answer.iter_lines())
        assert next(told)[0] == "replace"
        assert server.root.delete(f"/admin/tokens/{person.id}").status_code == 204
        assert [name for name, _ in told][-1] == "signed-out"


def test_a_stream_takes_a_place_and_gives_it_back(server: TokenServer) -> None:
    person = server.admit("seat")
    taken = server.state.wait_slots._held
    with browser(server, person) as seat:
        with seat.client.stream("GET", "/ui/live/runs") as answer:
            told = events(answer.iter_lines())
            assert next(told)[0] == "replace"
            assert taken[person.id] == 1
        eventually(lambda: taken[person.id] == 0)


def test_an_open_page_follows_the_run_to_its_end(
    server: TokenServer, operator: Browser, tmp_path_factory: pytest.TempPathFactory
) -> None:
    gate = tmp_path_factory.mktemp("gate") / "open"
    run_id = submitted(server, "hold", {"until": str(gate), "note": "<b>almost</b>"})
    page = operator.open(f"/ui/runs/{run_id}")
    (place,) = [each["data-live"] for each in page.root.walk() if each.get("data-live")]
    shown: dict[str, str] = {}
    with operator.client.stream("GET", place) as answer:
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        for name, html in events(answer.iter_lines()):
            if name == "end":
                break
            assert name == "replace"
            tree = parsed(html)
            shown |= {each["id"]: each.text for each in tree.children if isinstance(each, Node)}
            if "40 %" in shown["run-state"] and "waits for" in shown["run-log"]:
                assert "<b>almost</b>" in shown["run-state"]
                assert "RUNNING" in shown["run-state"]
                gate.touch()
        else:
            raise AssertionError("the stream ended without saying that it is over")
    assert "SUCCEEDED" in shown["run-state"]
    assert "went on" in shown["run-outcome"]
    assert "goes on" in shown["run-log"]
    assert "succeeded" in shown["run-timeline"]
    ids = {each["id"] for each in page.one("main").walk() if each.get("id")}
    assert set(shown) <= ids, "every part replaces something of the page"


def test_the_stream_of_a_run_that_is_over_says_so_at_once(server: TokenServer, operator: Browser) -> None:
    run_id = submitted(server, "add", {"a": 1})
    ended(server, run_id)
    answer = operator.client.get(f"/ui/live/runs/{run_id}")
    assert [name for name, _ in events(iter(answer.text.split("\n")))] == ["replace", "end"]


def test_an_open_page_ends_for_whose_token_is_taken_away(server: TokenServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_page, "QUEUE_EVERY", 0.1)
    monkeypatch.setattr(sse, "CHECK_EVERY", 0.1)
    person = server.admit("brief")
    run_id = idle(server, "brief")
    with browser(server, person) as brief, brief.client.stream("GET", f"/ui/live/runs/{run_id}") as answer:
        told = events(answer.iter_lines())
        assert next(told)[0] == "replace"
        assert server.root.delete(f"/admin/tokens/{person.id}").status_code == 204
        assert [name for name, _ in told][-1] == "signed-out"
