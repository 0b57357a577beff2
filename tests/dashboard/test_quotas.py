"""The page of quotas and cost: what is used, what is held, who may change it, and that what was typed is kept."""

from collections.abc import Iterator
from typing import Any

import pytest

from semel import JobStore, Quota
from support.databases import DATABASES
from support.pages import Browser, Node, Page, browser
from support.service import TokenClient, TokenServer, shared_server

SCRIPT = "<script>alert(1)</script>"
LIMITS = {
    "max_concurrent": "2",
    "per_hour": "10",
    "per_day": "20",
    "cost_daily": "1.5",
    "cost_weekly": "2",
    "cost_monthly": "3.25",
    "cost_yearly": "1000",
    "action": "warn",
    "warn_at": "50",
}


@pytest.fixture(scope="module", params=DATABASES)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokenServer]:
    with shared_server(request, tmp_path_factory) as server:
        yield server


@pytest.fixture(scope="module")
def root(server: TokenServer) -> Iterator[Browser]:
    with browser(server, server.root) as root:
        yield root


def spend(person: TokenClient, cost: float = 0.0, **more: Any) -> str:
    answer = person.post("/runs", json={"model": "add", "parameters": {"a": 1}, "cost": cost, "delay": 600, **more})
    assert answer.status_code == 201, answer.text
    run_id: str = answer.json()["run_id"]
    return run_id


def reserve(server: TokenServer, user: str) -> str:
    store = JobStore(server.app.url)
    reservation = store.reserve_job_slot(user, 10, ttl_seconds=300)
    store.close()
    assert reservation
    return reservation


def bar(page: Page, label: str) -> Node:
    return next(each for each in page.one(id="usage").all("div", class_="bar") if each.text.startswith(label))


def test_a_submitter_sees_the_own_use_limits_and_reservations_and_nobody_elses(server: TokenServer) -> None:
    kate, other = server.admit("kate"), server.admit("other")
    server.app.set_quota("kate", Quota(max_concurrent=5, cost_daily=10.0))
    for _ in range(3):
        spend(kate, 1.25)
    spend(other, 7.0)
    held, others = reserve(server, "kate"), reserve(server, "other")
    with browser(server, kate) as browsing:
        page = browsing.open("/ui/quotas")
        assert bar(page, "Concurrent").text == "Concurrent 4 of 5 (80 %) nearly full"
        assert bar(page, "Concurrent").one("progress").classes == ["near"]
        assert bar(page, "Spent today").text == "Spent today $3.75 of $10.00 (38 %)"
        assert bar(page, "Last hour").text == "Last hour 3, no limit"
        assert held in page.one(id="reservations").text
        assert others not in page.answer.text
        assert not page.all("form", action="/ui/quotas/set")
        assert not page.all("form", action="/ui/quotas/release")
        assert browsing.open("/ui/quotas", params={"user": "other"}).status == 403
        assert browsing.open("/ui/quotas", params={"user": "*"}).status == 403
        assert browsing.open("/ui/quotas", params={"tenant": "acme"}).status == 403


def test_what_is_full_and_what_is_over_is_marked_in_words(server: TokenServer, root: Browser) -> None:
    lou = server.admit("lou")
    server.app.set_quota("lou", Quota(max_concurrent=1, per_hour=1, cost_monthly=0.5, action="warn"))
    spend(lou, 1.0)
    spend(lou)
    page = root.open("/ui/quotas", params={"user": "lou"})
    assert bar(page, "Concurrent").text == "Concurrent 2 of 1 (200 %) over the limit"
    assert bar(page, "Spent this month").text == "Spent this month $1.00 of $0.50 (200 %) over the limit"
    assert bar(page, "Spent this month").one("progress")["value"] == "1.0"
    server.app.set_quota("lou", Quota(max_concurrent=2, per_day=0))
    page = root.open("/ui/quotas", params={"user": "lou"})
    assert bar(page, "Concurrent").text == "Concurrent 2 of 2 (100 %) full"
    assert "over the limit" in bar(page, "Last 24 hours").text


def test_users_are_sorted_by_how_full_their_fullest_limit_is(server: TokenServer, root: Browser) -> None:
    for name, count, limit in (("sort-low", 1, 10), ("sort-full", 3, 3), ("sort-mid", 1, 2)):
        person = server.admit(name)
        server.app.set_quota(name, Quota(max_concurrent=limit))
        for _ in range(count):
            spend(person)
    spend(server.admit("sort-free"))
    rows = root.open("/ui/quotas").one(id="users").one("table").rows()
    users = [row[0] for row in rows]
    ours = [user for user in users if user.startswith("sort-")]
    assert ours == ["sort-full", "sort-mid", "sort-low", "sort-free"]
    full = rows[users.index("sort-full")]
    assert full[1] == "3 of 3 (100 %) full"
    assert full[5] == "own"
    assert rows[users.index("sort-free")][5] == "none"


def test_an_admin_sets_a_quota_changes_it_and_takes_it_away(server: TokenServer, root: Browser) -> None:
    page = root.open("/ui/quotas", params={"user": "frank"})
    assert page.one("input", name="max_concurrent")["value"] == ""
    page = root.send("/ui/quotas/set", {"user": "frank", **LIMITS})
    assert (page.path, "Saved the quota of frank." in page.text) == ("/ui/quotas", True)
    expected = Quota(
        max_concurrent=2,
        per_hour=10,
        per_day=20,
        cost_daily=1.5,
        cost_weekly=2.0,
        cost_monthly=3.25,
        cost_yearly=1000.0,
        action="warn",
        warn_at=0.5,
    )
    assert server.app.quotas()["frank"] == expected
    form = root.open("/ui/quotas", params={"user": "frank"}).one("form", action="/ui/quotas/set")
    shown = {each["name"]: each["value"] for each in form.all("input") if each["name"] in LIMITS}
    assert shown == {name: text for name, text in LIMITS.items() if name != "action"}
    assert form.one("option", value="warn").get("selected") is not None
    root.send("/ui/quotas/set", {"user": "frank", **LIMITS, "per_hour": "", "warn_at": "", "action": "block"})
    assert (server.app.quotas()["frank"].per_hour, server.app.quotas()["frank"].warn_at) == (None, 0.8)
    page = root.send("/ui/quotas/remove", {"user": "frank"})
    assert "Removed the quota of frank." in page.text
    assert "frank" not in server.app.quotas()
    assert root.send("/ui/quotas/remove", {"user": "frank"}).status == 404


def test_the_default_quota_is_set_shown_and_taken_away(server: TokenServer, root: Browser) -> None:
    try:
        root.send("/ui/quotas/set", {"user": "*", "max_concurrent": "77"})
        assert server.app.quotas()["*"] == Quota(max_concurrent=77)
        page = root.open("/ui/quotas")
        assert "Concurrent 77" in page.text
        assert "Concurrent 0 of 77 (0 %)" in root.open("/ui/quotas", params={"user": "somebody"}).text
        assert "The default quota applies." in root.open("/ui/quotas", params={"user": "somebody"}).text
    finally:
        root.send("/ui/quotas/remove", {"user": "*"})
    assert "*" not in server.app.quotas()


def test_every_mistake_is_shown_at_its_field_and_what_was_typed_is_kept(server: TokenServer, root: Browser) -> None:
    wrong = {
        "max_concurrent": "-1",
        "per_hour": "1.5",
        "per_day": "lots",
        "cost_daily": "1e300",
        "cost_weekly": "nan",
        "warn_at": "101",
        "action": "shout",
        "cost_yearly": "12",
    }
    page = root.send("/ui/quotas/set", {"user": "jack", **wrong})
    assert page.status == 400
    assert "jack" not in server.app.quotas()
    for name, text in wrong.items():
        if name == "action":
            continue
        field = page.one("input", name=name)
        assert field["value"] == text
        about = page.one(id=f"about-{name}")
        assert bool(about.all(class_="field-error")) is (name != "cost_yearly"), about.text
        assert (field.get("aria-invalid") == "true") is (name != "cost_yearly")
    assert "Must be a number." in page.one(id="about-per_day").text
    assert page.one("select", name="action")["aria-invalid"] == "true"


def test_operators_see_everybody_and_change_nothing(server: TokenServer) -> None:
    spend(server.admit("seen"))
    held = reserve(server, "seen")
    with browser(server, server.admit("olga", "operator")) as olga:
        page = olga.open("/ui/quotas")
        assert "seen" in [row[0] for row in page.one(id="users").one("table").rows()]
        assert held in page.one(id="reservations").text
        assert not page.all("button", class_="danger")
        assert not olga.open("/ui/quotas", params={"user": "seen"}).all("form", action="/ui/quotas/set")
        for path, form in (
            ("/ui/quotas/set", {"user": "seen", "per_day": "1"}),
            ("/ui/quotas/remove", {"user": "seen"}),
            ("/ui/quotas/release", {"reservation": held}),
        ):
            assert olga.send(path, form).status == 403
    assert "seen" not in server.app.quotas()


def test_a_reservation_shows_its_countdown_and_is_released(server: TokenServer, root: Browser) -> None:
    held = reserve(server, "liam")
    page = root.open("/ui/quotas", params={"user": "liam"})
    (countdown,) = [each for each in page.one(id="reservations").all("time") if each.get("data-countdown") is not None]
    assert countdown.text.startswith("in 4 min") or countdown.text == "in 5 min"
    assert bar(page, "Concurrent").text == "Concurrent 1, no limit"
    done = root.send("/ui/quotas/release", {"reservation": held, "back": "liam"})
    assert f"Released the reservation {held}." in done.text
    assert "No reservations." in done.text
    again = root.send("/ui/quotas/release", {"reservation": held, "back": "liam"})
    assert (again.status, "That reservation is no longer held" in again.text) == (200, True)


def test_a_tenant_sees_its_own_and_the_main_tenant_manages_all(server: TokenServer, root: Browser) -> None:
    spend(server.admit("inner", tenant="acme"), 3.0)
    spend(server.admit("outer"), 3.0)
    held = reserve(server, "outer")
    with browser(server, server.admit("wile", "admin", "acme")) as wile:
        page = wile.open("/ui/quotas")
        users = [row[0] for row in page.one(id="users").one("table").rows()]
        assert "inner" in users
        assert "outer" not in users
        assert held not in page.answer.text
        assert wile.open("/ui/quotas", params={"tenant": ""}).status == 403
        assert wile.send("/ui/quotas/set", {"user": "x", "per_day": "1", "tenant": "beta"}).status == 403
        assert "That reservation is no longer held" in wile.send("/ui/quotas/release", {"reservation": held}).text
        wile.send("/ui/quotas/set", {"user": "inner", "per_day": "9"})
    assert server.app.quotas(tenant="acme")["inner"] == Quota(per_day=9)
    assert "inner" not in server.app.quotas()
    page = root.open("/ui/quotas", params={"user": "inner", "tenant": "acme"})
    assert page.one("form", action="/ui/quotas/set").one("input", name="tenant")["value"] == "acme"
    root.send("/ui/quotas/remove", {"user": "inner", "tenant": "acme"})
    assert "inner" not in server.app.quotas(tenant="acme")
    assert reserve(server, "outer") != held, "and outer's slot was not touched"
    assert held in root.open("/ui/quotas", params={"user": "outer"}).text


def test_html_in_users_is_text(server: TokenServer, root: Browser) -> None:
    user = f'u"{SCRIPT}'
    spend(server.admit(user))
    root.send("/ui/quotas/set", {"user": user, "per_day": "5"})
    reserve(server, user)
    for params in ({}, {"user": user}):
        page = root.open("/ui/quotas", params=params)
        assert page.status == 200
        assert SCRIPT not in page.answer.text
        assert SCRIPT in page.text
    page = root.send("/ui/quotas/set", {"user": user, "per_day": f'">{SCRIPT}'})
    assert page.status == 400
    assert SCRIPT not in page.answer.text
    assert page.one("input", name="per_day")["value"] == f'">{SCRIPT}'


def test_nothing_is_changed_without_the_forms_secret(server: TokenServer, root: Browser) -> None:
    for path in ("/ui/quotas/set", "/ui/quotas/remove", "/ui/quotas/release"):
        answer = root.client.post(path, data={"user": "kept", "per_day": "1", "reservation": "x"})
        assert answer.status_code == 403
        assert root.open(path).status == 405
    assert "kept" not in server.app.quotas()
