"""Actions on all runs that match the list's filters, over real HTTP, on both databases."""

from collections.abc import Iterator

import pytest

from semel.runs.types import new_id
from support.databases import DATABASES
from support.pages import Browser, Page, browser, made_run, put_runs
from support.service import TokenServer, shared_server
from support.waiting import eventually

MANY = 60
"""More than a page shows."""


@pytest.fixture(scope="module", params=DATABASES)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokenServer]:
    with shared_server(request, tmp_path_factory) as server:
        yield server


@pytest.fixture
def tenant() -> str:
    """A tenant for the test alone, so that its runs are all that there is."""
    return f"t-{new_id()[-12:]}"


@pytest.fixture
def operator(server: TokenServer, tenant: str) -> Iterator[Browser]:
    with browser(server, server.admit("olga", "operator", tenant)) as operator:
        yield operator


def fields(page: Page) -> dict[str, str]:
    """What the form that confirms an action sends."""
    (form,) = [each for each in page.all("form") if str(each.get("action")).endswith("/ui/actions")]
    named = {str(each.get("name")): str(each.get("value") or "") for each in form.all("input")}
    return {name: value for name, value in named.items() if name != "csrf"}


def finished(visitor: Browser, path: str) -> str:
    """The state of the action, once it is finished."""
    eventually(lambda: "finished" in visitor.open(path).one(id="action-state").text, "the end of the action")
    return visitor.open(path).one(id="action-state").text


def test_all_runs_that_match_are_cancelled_after_their_number_was_shown(
    server: TokenServer, operator: Browser, tenant: str
) -> None:
    queue = f"gpu-{tenant}"
    put_runs(server.app, [made_run(100, status="PENDING", queue=queue, tenant=tenant) for _ in range(MANY)])
    (other,) = put_runs(server.app, [made_run(100, status="PENDING", queue="default", tenant=tenant)])
    assert "Cancel all…" in operator.open(f"/ui/runs?queue={queue}").text
    asked = operator.send("/ui/runs/actions", {"action": "cancel", "queue": queue, "last": "24h"})
    assert asked.one("h1").text == f"Cancel {MANY} runs?"
    confirmed = fields(asked)
    assert confirmed["queue"] == queue
    assert confirmed["since"], "the last 24 hours are those of the moment when the number was shown"
    begun = operator.send("/ui/actions", confirmed)
    again = operator.send("/ui/actions", confirmed)
    assert begun.path == again.path, "sent twice, it is one action"
    state = finished(operator, begun.path)
    assert f"{MANY} of {MANY}" in state
    assert f"Changed {MANY}" in " ".join(state.split())
    assert operator.open(f"/ui/runs?queue={queue}&status=PENDING").all("input", name="run") == []
    assert server.app.get(other).status == "PENDING"
    assert [row[0] for row in operator.open("/ui/actions").one("table").rows()] == ["Cancel runs"]


def test_a_priority_is_given_and_a_wrong_one_is_refused(server: TokenServer, operator: Browser, tenant: str) -> None:
    (run,) = put_runs(server.app, [made_run(100, status="PENDING", queue="later", tenant=tenant)])
    asked = fields(operator.send("/ui/runs/actions", {"action": "set_priority", "queue": "later"}))
    refused = operator.send("/ui/actions", asked | {"priority": "high"})
    assert (refused.status, "whole number" in refused.text) == (400, True)
    begun = operator.send("/ui/actions", asked | {"priority": "7"})
    assert "Priority 7" in " ".join(finished(operator, begun.path).split())
    assert server.app.get(run).priority == 7


def test_a_submitter_acts_on_their_own_runs_and_sees_no_action_of_others(
    server: TokenServer, operator: Browser, tenant: str
) -> None:
    made = [made_run(100, status="PENDING", user_id=user, tenant=tenant) for user in ("sue", "sue", "ben")]
    *own, bens = put_runs(server.app, made)
    asked = operator.send("/ui/runs/actions", {"action": "cancel", "user": "nobody"})
    assert "No run that can be changed this way matches." in asked.text
    foreign = operator.send("/ui/actions", {"action": "cancel", "user": "nobody", "key": new_id()})
    with browser(server, server.admit("sue", tenant=tenant)) as sue:
        page = sue.send("/ui/runs/actions", {"action": "cancel"})
        assert page.one("h1").text == "Cancel 2 runs?"
        finished(sue, sue.send("/ui/actions", fields(page)).path)
        assert sue.open(foreign.path).status == 404
        assert len(sue.open("/ui/actions").one("table").rows()) == 1
    assert {server.app.get(each).status for each in own} == {"CANCELLED"}
    assert server.app.get(bens).status == "PENDING"


def test_a_viewer_is_offered_nothing_and_a_search_is_no_filter(
    server: TokenServer, operator: Browser, tenant: str
) -> None:
    put_runs(server.app, [made_run(100, status="PENDING", tenant=tenant)])
    refused = operator.send("/ui/runs/actions", {"action": "cancel", "q": "abcdef"})
    assert (refused.status, "a search is not one of them" in refused.text) == (400, True)
    assert "Cancel all…" not in operator.open("/ui/runs?q=abcdef").text
    assert "Cancel all…" not in operator.open("/ui/runs").text, "an action needs a filter"
    assert "Cancel all…" in operator.open("/ui/runs?status=PENDING").text
    with browser(server, server.admit("vic", "viewer", tenant)) as viewer:
        assert "Cancel all…" not in viewer.open("/ui/runs?status=PENDING").text
        assert viewer.send("/ui/runs/actions", {"action": "cancel"}).status == 403


def test_the_list_is_filtered_by_worker_error_and_parameter(
    server: TokenServer, operator: Browser, tenant: str
) -> None:
    north = put_runs(server.app, [made_run(100, parameters='{"region":"north"}', tenant=tenant)])
    late = put_runs(server.app, [made_run(90, status="FAILED", last_error="ValueError: too late", tenant=tenant)])
    for query, expected in (("parameter=region%3Dnorth", north), ("error=too+late", late), ("worker=nobody", [])):
        page = operator.open(f"/ui/runs?{query}")
        assert [each.get("value") for each in page.all("input", name="run")] == expected, query
    assert "must be a parameter" in operator.open("/ui/runs?parameter=north").text
