"""The dashboard in a real browser, with a real service and a worker behind it: what people do there, and see."""

import re
from collections.abc import Iterator
from urllib.parse import quote

import pytest
from playwright.sync_api import Locator, Page, expect

from support.dashboard import DashboardServer, Visit, dashboard_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DashboardServer]:
    folder = tmp_path_factory.mktemp("scene")
    with dashboard_server(f"sqlite:///{folder / 'semel.db'}", folder) as server:
        yield server


def sign_in(page: Page, secret: str) -> None:
    page.get_by_label("Token").fill(secret)
    page.get_by_role("button", name="Sign in").click()


def test_who_signs_in_gets_the_page_that_was_asked_for_and_who_signs_out_gets_none(
    visit: Visit, server: DashboardServer
) -> None:
    alice = server.newcomer()
    visitor = visit(server.address)
    page = visitor.go("/ui/runs?status=FAILED")
    expect(page).to_have_title("Sign in · semel")
    visitor.look("sign-in")

    visitor.pardon("answered 401: POST .*/ui/sign-in")
    sign_in(page, "semel_wrong")
    expect(page.get_by_role("alert")).to_contain_text("UNAUTHENTICATED")
    sign_in(page, str(alice.secret))
    expect(page).to_have_url(f"{server.address}/ui/runs?status=FAILED")
    assert "semel_session" not in page.evaluate("document.cookie"), "no script can read the token"
    session = next(each for each in visitor.context.cookies() if each["name"] == "semel_session")
    assert (session["httpOnly"], session["sameSite"], session["path"]) == (True, "Strict", "/")

    page.get_by_role("button", name="Sign out").click()
    expect(page).to_have_url(f"{server.address}/ui/sign-in")
    page.go_back()
    expect(page).to_have_title("Sign in · semel")
    assert [each["name"] for each in visitor.context.cookies() if each["name"] == "semel_session"] == []


def test_a_submitter_sees_own_runs_only_and_no_page_for_operators(visit: Visit, server: DashboardServer) -> None:
    alice, bob = server.newcomer(), server.newcomer()
    own, other = server.submit(alice, "add", {"a": 1}), server.submit(bob, "add", {"a": 2})
    visitor = server.enter(visit, alice)
    page = visitor.go("/ui/runs")
    expect(page.locator("[data-row]")).to_have_count(1)
    expect(page.locator(f"a[href$='{own}']")).to_be_visible()
    assert page.get_by_role("navigation", name="Pages").get_by_role("link").all_inner_texts() == [
        "Overview",
        "Runs",
        "Submit",
        "Errors",
        "Quotas",
    ]
    visitor.pardon(f"answered 404: GET .*/ui/runs/{other}|answered 403: GET .*/ui/keys")
    expect(visitor.go(f"/ui/runs/{other}").get_by_role("alert")).to_contain_text("NOT_FOUND")
    visitor.look("problem")
    expect(visitor.go("/ui/keys").get_by_role("alert")).to_contain_text("FORBIDDEN")


def test_keys_move_through_the_list_and_to_the_search(visit: Visit, server: DashboardServer) -> None:
    alice = server.newcomer()
    newest_first = [server.submit(alice, "add", {"a": number}) for number in range(3)][::-1]
    page = server.enter(visit, alice).go("/ui/runs")
    expect(page.locator("[data-row]")).to_have_count(3)

    def focused() -> str:
        return str(page.evaluate("document.activeElement.getAttribute('href') || document.activeElement.name || ''"))

    for key, place in (("j", 0), ("j", 1), ("j", 2), ("j", 2), ("k", 1), ("k", 0), ("k", 0)):
        page.keyboard.press(key)
        assert focused() == f"/ui/runs/{newest_first[place]}"
    page.keyboard.press("/")
    assert focused() == "q"
    page.keyboard.type("jk/")
    expect(page.get_by_role("searchbox")).to_have_value("jk/")
    page.keyboard.press("Escape")


def test_tab_goes_through_the_page_in_its_order_and_can_skip_the_frame(visit: Visit, server: DashboardServer) -> None:
    page = server.enter(visit, server.newcomer()).go("/ui/runs")
    names = []
    for _ in range(6):
        page.keyboard.press("Tab")
        names.append(page.evaluate("document.activeElement.textContent.trim()"))
    assert names == ["Skip to content", "semel", "Overview", "Runs", "Submit", "Errors"]
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid", "the focus can be seen"


def test_the_switch_changes_the_colours_and_the_next_page_keeps_them(visit: Visit, server: DashboardServer) -> None:
    page = server.enter(visit, server.newcomer()).go("/ui/runs")

    def ground() -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    light = ground()
    page.locator("[data-theme-switch]").click()
    dark = ground()
    assert dark != light
    page.reload()
    assert ground() == dark
    page.locator("[data-theme-switch]").click()
    assert ground() == light


def test_pages_work_without_the_script(visit: Visit, server: DashboardServer) -> None:
    alice = server.newcomer()
    run_id = server.submit(alice, "add", {"a": 1}, delay=3600)
    visitor = visit(server.address, java_script_enabled=False)
    page = visitor.page
    page.goto("/ui/runs")
    sign_in(page, str(alice.secret))
    expect(page).to_have_url(re.compile("/ui/runs$"))
    page.locator("[data-row] input[name=run]").check()
    page.get_by_role("button", name="Cancel", exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Cancel: 1 of 1 done")
    assert server.ended(run_id)["status"] == "CANCELLED"


def stay(page: Page) -> None:
    """From now on the page is not to be loaded anew."""
    page.evaluate("window.sameAsBefore = true")


def stayed(page: Page) -> bool:
    return bool(page.evaluate("window.sameAsBefore === true"))


def state(page: Page) -> Locator:
    """What the page of a run says of how it stands."""
    return page.locator("#run-state")


def test_a_run_is_submitted_from_the_form_and_watched_to_its_end_without_a_reload(
    visit: Visit, server: DashboardServer
) -> None:
    gate = server.gate()
    page = server.enter(visit, server.newcomer()).go("/")
    page.get_by_role("link", name="Submit").click()
    page.get_by_role("link", name="hold", exact=True).click()
    page.get_by_label("until").fill(str(gate))
    expect(page.locator("#curl")).to_contain_text(gate.name)
    page.get_by_role("button", name="Submit", exact=True).click()
    expect(state(page)).to_contain_text("RUNNING")
    expect(state(page)).to_contain_text("40 %")
    expect(page.locator("#run-log")).to_contain_text(f"waits for {gate}")
    stay(page)
    gate.touch()
    expect(state(page)).to_contain_text("SUCCEEDED")
    expect(page.locator("#run-outcome")).to_contain_text('"went on"')
    expect(page.locator("#run-log")).to_contain_text("goes on")
    expect(page.locator(".live")).to_have_text("ended")
    assert stayed(page)


def test_what_does_not_fit_the_signature_is_said_beside_the_field_and_nothing_is_submitted(
    visit: Visit, server: DashboardServer
) -> None:
    alice = server.newcomer()
    visitor = server.enter(visit, alice)
    visitor.pardon("answered 400: POST .*/ui/submit")
    page = visitor.go("/ui/submit?model=add")
    page.get_by_role("button", name="Submit", exact=True).click()
    assert page.evaluate("document.activeElement.id") == "p-a", "the browser itself asks for what is required"
    page.locator("#p-a").fill("1001")
    page.locator("#p-b").fill("many")
    page.get_by_role("button", name="Submit", exact=True).click()
    expect(page.locator("#about-p-a .field-error")).to_be_visible()
    expect(page.locator("#about-p-b .field-error")).to_be_visible()
    expect(page.locator("#p-b")).to_have_value("many")
    assert alice.get("/runs").json()["runs"] == []
    page.locator("#p-a").fill("40")
    page.locator("#p-b").fill("2")
    page.get_by_role("button", name="Submit", exact=True).click()
    expect(page.locator("#run-outcome")).to_contain_text("42")


def test_a_failing_model_shows_its_error_and_its_traceback_and_is_retried(
    visit: Visit, server: DashboardServer
) -> None:
    alice = server.newcomer()
    visitor = server.enter(visit, alice)
    overview = visitor.go("/")
    expect(overview.locator("#failures")).to_contain_text("No run has failed")
    stay(overview)
    run_id = server.submit(alice, "fail", {"text": "no memory left"})
    expect(overview.locator("#failures")).to_contain_text("ValueError: no memory left")
    assert stayed(overview), "the overview was told"
    overview.locator(f"#failures a[href$='{run_id}']").click()
    page = visitor.page
    expect(state(page)).to_contain_text("FAILED")
    expect(page.locator("#run-outcome")).to_contain_text("ValueError: no memory left")
    expect(page.locator("#run-traceback pre")).to_contain_text("raise ValueError(text)")
    page.get_by_role("button", name="Retry", exact=True).click()
    expect(page.get_by_role("status").first).to_contain_text(f"This is a retry of {run_id}")
    expect(state(page)).to_contain_text("A retry of")
    assert run_id not in page.url


def test_a_run_is_cancelled_from_its_page_once_that_is_confirmed(visit: Visit, server: DashboardServer) -> None:
    alice = server.newcomer()
    run_id = server.submit(alice, "hold", {"until": str(server.gate())})
    visitor = server.enter(visit, alice)
    page = visitor.go(f"/ui/runs/{run_id}")
    expect(state(page)).to_contain_text("RUNNING")
    visitor.pardon("dialog: Cancel this run?")
    page.get_by_role("button", name="Cancel", exact=True).click()
    assert server.root.get(f"/runs/{run_id}").json()["cancel_requested"] is False, "no was the answer"
    visitor.agree("Cancel this run? It is running: it is asked to stop, and has time to clean up.")
    page.get_by_role("button", name="Cancel", exact=True).click()
    expect(state(page)).to_contain_text("CANCELLED")
    expect(page.get_by_role("button", name="Retry")).to_be_visible()


def test_many_runs_are_cancelled_and_retried_at_once(visit: Visit, server: DashboardServer) -> None:
    alice = server.newcomer()
    for number in range(3):
        server.submit(alice, "add", {"a": number}, delay=3600)
    visitor = server.enter(visit, alice)
    page = visitor.go("/ui/runs?status=PENDING")
    page.get_by_label("Select all on this page").check()
    expect(page.locator("input[name=run]:checked")).to_have_count(3)
    visitor.agree("Cancel the selected runs? Runs that are running are asked to stop, and have time to clean up.")
    page.get_by_role("button", name="Cancel", exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Cancel: 3 of 3 done")
    page.get_by_role("link", name="Back to the runs").click()
    expect(page.get_by_text("No runs match.")).to_be_visible()
    page.get_by_label("PENDING").uncheck()
    page.get_by_label("CANCELLED").check()
    page.get_by_role("button", name="Search").click()
    expect(page.locator("[data-row]")).to_have_count(3)
    page.locator("input[name=run]").first.check()
    page.get_by_role("button", name="Retry", exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Retry: 1 of 1 done")


def test_a_list_that_is_open_follows_its_runs_and_tells_of_newer_ones(visit: Visit, server: DashboardServer) -> None:
    alice, gate = server.newcomer(), server.gate()
    first = server.submit(alice, "hold", {"until": str(gate)})
    page = server.enter(visit, alice).go("/ui/runs")
    row = page.locator("[data-row]", has=page.locator(f"a[href$='{first}']"))
    expect(row).to_contain_text("RUNNING")
    stay(page)
    row.get_by_role("checkbox").check()
    gate.touch()
    expect(row).to_contain_text("SUCCEEDED")
    expect(row.get_by_role("checkbox")).to_be_checked()
    server.submit(alice, "add", {"a": 1})
    page.get_by_role("link", name="1 newer run").click()
    expect(page.locator("[data-row]")).to_have_count(2)
    assert stayed(page)


def test_a_quota_that_is_full_says_why_nothing_is_submitted_and_the_form_keeps_what_was_typed(
    visit: Visit, server: DashboardServer
) -> None:
    alice = server.newcomer()
    server.root.put(f"/admin/quotas/{server.name_of(alice)}", json={"max_concurrent": 1})
    held = server.submit(alice, "hold", {"until": str(server.gate())})
    visitor = server.enter(visit, alice)
    visitor.pardon("answered 429: POST .*/ui/submit")
    page = visitor.go("/ui/submit?model=add")
    expect(page.locator(".warning")).to_contain_text("1 of 1")
    page.locator("#p-a").fill("7")
    page.get_by_role("button", name="Submit", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("You have reached your quota")
    expect(page.get_by_role("alert")).to_contain_text("QUOTA_EXCEEDED")
    expect(page.locator("#p-a")).to_have_value("7")
    visitor.look("quota-full")
    page.get_by_role("alert").get_by_role("link", name="Your quota").click()
    expect(page.locator("#usage")).to_contain_text("1 of 1")
    expect(page.locator("#usage")).to_contain_text("full")
    alice.post(f"/runs/{held}/cancel")
    server.ended(held)
    page = visitor.go("/ui/submit?model=add")
    page.locator("#p-a").fill("7")
    page.get_by_role("button", name="Submit", exact=True).click()
    expect(page.locator("#run-outcome")).to_contain_text("7")


def test_a_run_that_waits_says_why(visit: Visit, server: DashboardServer) -> None:
    alice = server.newcomer()
    run_id = server.submit(alice, "add", {"a": 1}, queue="gpu")
    page = server.enter(visit, alice).go(f"/ui/runs/{run_id}")
    expect(page.locator("#run-waiting")).to_contain_text("no live worker serves the queue 'gpu'")


def test_an_admin_edits_a_quota_and_an_operator_cannot(visit: Visit, server: DashboardServer) -> None:
    name = server.name_of(server.newcomer())
    page = server.enter(visit, server.newcomer("admin")).go(f"/ui/quotas?user={name}")
    page.get_by_label("Concurrent").fill("4")
    page.get_by_label("Per month").fill("12.5")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_role("status").first).to_contain_text(f"Saved the quota of {name}")
    quota = server.root.get(f"/admin/quotas/{name}").json()["quota"]
    assert (quota["max_concurrent"], quota["cost_monthly"], quota["per_day"]) == (4, 12.5, None)
    page = server.enter(visit, server.newcomer("operator")).go(f"/ui/quotas?user={name}")
    expect(page.locator("#usage")).to_contain_text("0 of 4")
    expect(page.get_by_role("button", name="Save")).to_have_count(0)


def test_an_unknown_outcome_is_found_and_resolved(visit: Visit, server: DashboardServer) -> None:
    server.leave_unknown("payment-1", "orders")
    page = server.enter(visit, server.newcomer("admin")).go("/ui/keys")
    page.locator("#unresolved").get_by_role("link", name="payment-1").click()
    expect(page.locator("#claim")).to_contain_text("unknown")
    page.get_by_label("was done: later calls replay the value below").check()
    page.get_by_label("Value as JSON").fill('{"paid": true}')
    page.get_by_role("button", name="Resolve").click()
    expect(page.locator("#claim")).to_contain_text("completed")
    expect(page.locator("#unresolved")).to_contain_text("No keys with unknown outcomes")


def test_two_runs_are_compared(visit: Visit, server: DashboardServer) -> None:
    alice = server.newcomer()
    for number in (1, 2):
        server.ended(server.submit(alice, "add", {"a": number, "b": 5}))
    page = server.enter(visit, alice).go("/ui/runs")
    for box in page.locator("input[name=run]").all():
        box.check()
    page.get_by_role("button", name="Compare two").click()
    parameters = page.locator("section", has=page.get_by_role("heading", name="Parameters"))
    expect(parameters.locator("tbody tr")).to_have_count(1)
    expect(parameters.locator("tbody tr")).to_contain_text("a")
    expect(page.locator("section", has=page.get_by_role("heading", name="Results")).locator("tbody")).to_contain_text(
        "7"
    )


def test_a_page_that_is_open_when_the_token_is_revoked_goes_to_the_sign_in(
    visit: Visit, server: DashboardServer
) -> None:
    alice = server.newcomer()
    run_id = server.submit(alice, "hold", {"until": str(server.gate())})
    visitor = server.enter(visit, alice)
    overview = visitor.go("/")
    run = visitor.context.new_page()
    run.goto(f"/ui/runs/{run_id}")
    expect(state(run)).to_contain_text("RUNNING")
    assert server.root.delete(f"/admin/tokens/{alice.id}").status_code == 204
    for page in (overview, run):
        expect(page).to_have_title("Sign in · semel")


HOSTILE = "</pre><script>alert('s')</script><img src=x onerror=\"alert('i')\"><svg onload=alert(1)>'&amp;{{ 7*7 }}"


def test_what_users_write_is_shown_as_text_wherever_it_comes_up(visit: Visit, server: DashboardServer) -> None:
    alice = server.newcomer()
    said = server.submit(alice, "shout", {"text": HOSTILE}, idempotency_key=HOSTILE)
    failed = server.submit(alice, "fail", {"text": HOSTILE})
    held = server.submit(alice, "hold", {"until": str(server.gate()), "note": HOSTILE})
    for run_id in (said, failed):
        server.ended(run_id)
    visitor = server.enter(visit, server.root)
    quoted = quote(HOSTILE, safe="")
    for path, place in (
        (f"/ui/runs/{said}", "#run-log"),
        (f"/ui/runs/{said}", "#run-facts"),
        (f"/ui/runs/{failed}", "#run-outcome"),
        (f"/ui/runs/{held}", "#run-state"),
        ("/", "#failures"),
        ("/ui/runs?status=RUNNING", "#list"),
        (f"/ui/compare?a={said}&b={failed}", "main"),
        (f"/ui/quotas?user={quoted}", "main"),
    ):
        page = visitor.go(path)
        expect(page.locator(place)).to_contain_text("alert('s')")
        assert page.locator("img[src=x], main script:not([src]), svg[onload], [onerror]").count() == 0, path
    for path, field in (
        (f"/ui/submit?from={said}", "#p-text"),
        (f"/ui/keys?key={quoted}", "input[name=key]"),
        (f"/ui/runs?q={quoted}", "input[type=search]"),
    ):
        expect(visitor.go(path).locator(field)).to_have_value(HOSTILE)


def test_what_users_write_is_text_also_in_what_arrives_while_the_page_is_open(
    visit: Visit, server: DashboardServer
) -> None:
    """And a carriage return, which progress bars write, does not end a line of the stream."""
    alice = server.newcomer()
    hostile = f"{HOSTILE}\rdata: forged\r\revent: end\r\r end"
    visitor = server.enter(visit, alice)
    page = visitor.go("/")
    stay(page)
    server.submit(alice, "fail", {"text": hostile})
    expect(page.locator("#failures")).to_contain_text("alert('s')")
    held = server.submit(alice, "shout", {"text": hostile}, delay=2)
    run = visitor.context.new_page()
    run.goto(f"/ui/runs/{held}")
    expect(state(run)).to_contain_text("PENDING")
    stay(run)
    expect(run.locator("#run-log")).to_contain_text("alert('s')")
    expect(run.locator("#run-log")).to_contain_text("end")
    expect(run.locator("#run-facts")).to_contain_text("Payload hash")
    for each in (page, run):
        assert each.locator("img[src=x], main script:not([src]), svg[onload], [onerror]").count() == 0
        assert stayed(each)
