"""The page that submits: a form from the model's signature, what is typed is kept, and a run is made once."""

import enum
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import pytest
from msgspec import Meta, Struct

from semel import App, Quota
from semel.service import Settings
from support.pages import Browser, Node, Page, browser
from support.service import TokenServer, make_app, serve, shared_server

SCRIPT = "<script>alert(1)</script>"


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Point(Struct):
    x: int
    y: int = 0


async def every(
    *,
    text: Annotated[str, Meta(description="What is said.", max_length=400)],
    count: Annotated[int, Meta(ge=0, le=1000)],
    share: Annotated[float, Meta(gt=0)] = 0.5,
    loud: bool = False,
    mode: Literal["plain", "fancy"] = "plain",
    colour: Colour = Colour.RED,
    numbers: list[int] = [],  # noqa: B006 -- it is shown, not changed
    point: Point | None = None,
    note: str | None = None,
    level: Literal[1, 2, 3] = 1,
    anything: Any = None,
) -> None:
    """Takes every kind of parameter.

    And says so at length.
    """


async def needs_null(limit: int | None) -> None: ...


async def kwargs(first: int = 1, **others: int) -> None: ...


async def hostile(text: str = SCRIPT) -> None: ...


def register(app: App) -> None:
    for model in (every, needs_null, kwargs):
        app.model(model.__name__)(model)
    hostile.__doc__ = f"Says {SCRIPT}."
    app.model("hostile")(hostile)
    app.model("dear", cost=2.5, queue="gold", priority=7)(needs_null)
    app.model("semel.inside", queue="semel-service")(hostile)


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokenServer]:
    with shared_server(request, tmp_path_factory) as server:
        register(server.app)
        yield server


@pytest.fixture(scope="module")
def root(server: TokenServer) -> Iterator[Browser]:
    with browser(server, server.root) as root:
        yield root


def submitted(browsing: Browser, fields: dict[str, Any]) -> dict[str, Any]:
    """Send the form, and give the run that it leads to, as the API tells it."""
    page = browsing.send("/ui/submit", fields, follow_redirects=False)
    assert page.status == 303, page.text
    place = page.answer.headers["location"]
    assert re.fullmatch(r"/ui/runs/[0-9a-f-]{36}", place), place
    return {"run_id": place.rpartition("/")[2], "page": page}


def seen(server: TokenServer, run_id: str) -> dict[str, Any]:
    run: dict[str, Any] = server.root.get(f"/runs/{run_id}").json()
    return run


def filled(page: Page) -> dict[str, str]:
    """What the form would send if nothing more were typed."""
    form = page.one("form", id="submit-form")
    fields = {each["name"]: each["value"] for each in form.all("input") if each.get("type") != "checkbox"}
    fields |= {each["name"]: text_of(each) for each in form.all("textarea")}
    for select in form.all("select"):
        chosen = [each for each in select.all("option") if each.get("selected") is not None]
        fields[select["name"]] = (chosen or select.all("option"))[0]["value"]
    ticked = {
        each["name"]: each["value"] for each in form.all("input", type="checkbox") if "checked" in each.attributes
    }
    return {name: value for name, value in (fields | ticked).items() if name != "csrf"}


def text_of(area: Node) -> str:
    return "".join(each for each in area.children if isinstance(each, str)).removeprefix("\n")


def about(page: Page, name: str) -> str:
    return page.one(id=f"about-p-{name}").text


def test_the_models_are_listed_with_what_they_take_and_without_the_services_own(root: Browser) -> None:
    page = root.open("/ui/submit")
    rows = {row[0]: row for row in page.one("table").rows()}
    assert {"add", "every", "kwargs"} <= rows.keys()
    assert "semel.inside" not in page.text
    assert "Takes every kind of parameter." in rows["every"][1]
    assert rows["add"][2].replace(" ", "") == "a*,b"
    assert page.one("a", href="/ui/submit?model=add").text == "add"


def test_the_form_has_a_field_of_its_kind_for_each_parameter(root: Browser) -> None:
    page = root.open("/ui/submit", params={"model": "every"})
    assert page.one("input", name="text.text").get("required") is not None
    assert about(page, "text") == "What is said. text, at most 400 characters"
    assert page.one("input", name="number.count")["inputmode"] == "decimal"
    assert "whole number, at least 0, at most 1000" in about(page, "count")
    assert "number, greater than 0" in about(page, "share")
    assert "default: 0.5" in about(page, "share")
    choices = {
        name: [each["value"] for each in page.one("select", name=f"choice.{name}").all("option")]
        for name in ("loud", "mode", "colour", "level")
    }
    assert choices == {
        "loud": ["", "true", "false"],
        "mode": ["", '"fancy"', '"plain"'],
        "colour": ["", '"blue"', '"red"'],
        "level": ["", "1", "2", "3"],
    }
    assert 'default: "plain"' in page.one("select", name="choice.mode").text
    for name in ("numbers", "point", "anything"):
        assert page.one("textarea", name=f"json.{name}").get("required") is None
    assert page.one("input", name="text.note").get("required") is None
    assert page.one("label", for_="p-count").text == "count (required)"
    assert "Takes every kind of parameter. And says so at length." in page.text


def test_every_kind_of_value_arrives_as_it_was_meant(server: TokenServer, root: Browser) -> None:
    form = filled(root.open("/ui/submit", params={"model": "every"})) | {
        "text.text": ' a "b" \\ ☃ ',
        "number.count": "12",
        "number.share": "2.5e-1",
        "choice.loud": "true",
        "choice.mode": '"fancy"',
        "choice.colour": '"blue"',
        "json.numbers": "[1, 2,\r\n 3]",
        "json.point": '{"x": 4}',
        "choice.level": "3",
        "json.anything": '"12"',
    }
    run = seen(server, submitted(root, form)["run_id"])
    assert run["parameters"] == {
        "text": ' a "b" \\ ☃ ',
        "count": 12,
        "share": 0.25,
        "loud": True,
        "mode": "fancy",
        "colour": "blue",
        "numbers": [1, 2, 3],
        "point": {"x": 4},
        "level": 3,
        "anything": "12",
    }
    assert run["idempotency_key"] == form["key"]
    assert run["user"] == "root"


def test_a_field_that_is_left_empty_is_not_sent(server: TokenServer, root: Browser) -> None:
    form = filled(root.open("/ui/submit", params={"model": "every"})) | {"text.text": "t", "number.count": "0"}
    assert seen(server, submitted(root, form)["run_id"])["parameters"] == {"text": "t", "count": 0}


def test_a_required_parameter_that_may_be_null_is_null_when_it_is_empty(server: TokenServer, root: Browser) -> None:
    form = filled(root.open("/ui/submit", params={"model": "needs_null"}))
    assert seen(server, submitted(root, form)["run_id"])["parameters"] == {"limit": None}


def test_other_parameters_are_written_as_an_object(server: TokenServer, root: Browser) -> None:
    form = filled(root.open("/ui/submit", params={"model": "kwargs"}))
    run = submitted(root, {**form, "number.first": "2", "extra": '{"second": 3}'})
    assert seen(server, run["run_id"])["parameters"] == {"first": 2, "second": 3}
    page = root.send("/ui/submit", {**form, "extra": "[1]", "key": "other"})
    assert (page.status, "Must be a JSON object" in page.one(id="about-extra").text) == (400, True)
    page = root.send("/ui/submit", {**form, "extra": '{"second": "three"}', "key": "other"})
    assert (page.status, "INVALID_PARAMETERS" in page.one(class_="problem").text) == (422, True)
    assert "'second'" in page.one(class_="problem").text


def test_every_mistake_is_shown_at_its_field_and_what_was_typed_is_kept(server: TokenServer, root: Browser) -> None:
    before = len(server.root.get("/runs", params={"model": "every", "limit": 1000}).json()["runs"])
    typed = {
        "text.text": "x" * 401,
        "number.count": "1001",
        "number.share": "half",
        "choice.loud": "maybe",
        "choice.mode": '"odd"',
        "json.numbers": '[1, "two"]',
        "json.point": "{x: 1}",
        "json.anything": "",
        "priority": "1.5",
        "delay": "-1",
        "cost": "lots",
        "queue": "q" * 201,
    }
    page = root.send("/ui/submit", {**filled(root.open("/ui/submit", params={"model": "every"})), **typed})
    assert page.status == 400
    for name, text in typed.items():
        widget, _, plain = name.partition(".")
        wrong = text != ""
        place = f"about-p-{plain}" if plain else f"about-o-{name}"
        assert bool(page.one(id=place).all(class_="field-error")) is wrong, name
        if widget in ("number", "text") or not plain:
            assert page.one("input", name=name)["value"] == text
        elif widget == "json":
            assert text_of(page.one("textarea", name=name)) == text
    assert "Must be a number." in about(page, "share")
    assert "At [1]: expected int, got str." in about(page, "numbers")
    assert "Must be JSON" in about(page, "point")
    assert page.one("details", id="options").get("open") is not None
    assert len(server.root.get("/runs", params={"model": "every", "limit": 1000}).json()["runs"]) == before


def test_what_only_the_model_finds_wrong_is_shown_at_its_field_too(root: Browser) -> None:
    form = filled(root.open("/ui/submit", params={"model": "every"}))
    page = root.send("/ui/submit", {**form, "text.text": "x" * 401, "number.count": "-1"})
    assert (page.status, "INVALID_PARAMETERS" in page.text) == (422, True)
    assert page.one("input", name="number.count")["aria-invalid"] == "true"
    assert page.one("input", name="text.text")["aria-invalid"] == "true"
    assert page.one("textarea", name="json.point").get("aria-invalid") is None
    page = root.send("/ui/submit", {**form, "number.count": "1"})
    assert "This field is required." in about(page, "text")


def test_a_form_that_is_sent_twice_makes_one_run(server: TokenServer, root: Browser) -> None:
    form = filled(root.open("/ui/submit", params={"model": "add"})) | {"number.a": "1"}
    first, second = submitted(root, form), submitted(root, form)
    assert first["run_id"] == second["run_id"]
    found = server.root.get("/runs", params={"idempotency_key": form["key"]}).json()["runs"]
    assert [run["run_id"] for run in found] == [first["run_id"]]
    assert form["key"] != filled(root.open("/ui/submit", params={"model": "add"}))["key"]
    root.send("/ui/submit", form, follow_redirects=False)
    assert "This run already existed" in root.open("/ui/submit").text


def test_a_key_that_has_another_run_is_refused_and_a_new_one_is_offered(server: TokenServer, root: Browser) -> None:
    form = filled(root.open("/ui/submit", params={"model": "add"})) | {"number.a": "1"}
    first = submitted(root, form)["run_id"]
    page = root.send("/ui/submit", {**form, "number.a": "2"})
    assert (page.status, "IDEMPOTENCY_KEY_CONFLICT" in page.text) == (409, True)
    assert "This key already has a run" in page.one(id="about-key").text
    again = filled(page)
    assert (again["key"], again["number.a"]) == (form["key"], "2")
    second = submitted(root, {**again, "use_new_key": "yes"})["run_id"]
    assert submitted(root, {**again, "use_new_key": "yes"})["run_id"] == second != first
    assert seen(server, second)["idempotency_key"] == again["new_key"]


@pytest.mark.parametrize("key", ["k" * 256, "a\x07b"])
def test_a_key_that_cannot_be_is_said_to_be_so_at_its_field(root: Browser, key: str) -> None:
    page = root.send("/ui/submit", {"model": "add", "number.a": "1", "key": key})
    assert page.status == 400
    assert page.one(id="about-key").all(class_="field-error")


def test_options_are_taken_and_those_left_out_are_the_models(server: TokenServer, root: Browser) -> None:
    page = root.open("/ui/submit", params={"model": "dear"})
    assert page.one("input", name="queue")["placeholder"] == "gold"
    assert page.one("input", name="priority")["placeholder"] == "7"
    options = {"queue": "silver", "priority": "-3", "delay": "60", "cost": "1.25", "user": "somebody"}
    run = seen(server, submitted(root, {**filled(page), **options})["run_id"])
    assert (run["queue"], run["priority"], run["cost"], run["user"]) == ("silver", -3, 1.25, "somebody")
    assert run["due_at"] > run["created_at"]
    run = seen(server, submitted(root, filled(root.open("/ui/submit", params={"model": "dear"})))["run_id"])
    assert (run["queue"], run["priority"], run["cost"], run["user"]) == ("gold", 7, 2.5, "root")


def test_without_a_key_the_box_says_whether_the_same_run_is_found(tmp_path: Path) -> None:
    app = make_app(f"sqlite:///{tmp_path / 'semel.db'}", tmp_path, dedupe_window=600)
    app.model("kwargs")(kwargs)
    with serve(app) as service, browser(service) as anybody:
        form = {"model": "kwargs", "key": "", "dedupe": "yes"}
        first = submitted(anybody, form)["run_id"]
        assert submitted(anybody, form)["run_id"] == first
        del form["dedupe"]
        assert submitted(anybody, form)["run_id"] != first
        page = anybody.send("/ui/submit/form", form)
        assert '"dedupe": false' in page.one(id="curl").text
        assert "Authorization" not in page.one(id="curl").text, "without tokens there is none to send"
    app.close()


def test_a_run_fills_the_form_with_its_parameters(server: TokenServer, root: Browser) -> None:
    given = {
        "text": "two\nlines",
        "count": 3,
        "share": 1.0,
        "loud": False,
        "mode": "fancy",
        "numbers": [1, 2],
        "point": {"x": 1},
        "note": None,
        "anything": {"deep": [None, ""]},
    }
    body = {"model": "every", "parameters": given, "queue": "side", "priority": 4}
    origin = server.root.post("/runs", json=body).json()["run_id"]
    page = root.open("/ui/submit", params={"from": origin})
    form = filled(page)
    assert (form["number.count"], form["choice.mode"], form["queue"]) == ("3", '"fancy"', "side")
    assert form["json.text"] == json.dumps("two\nlines"), "an input has one line"
    assert form["json.note"] == "null", "a null that was given is not a parameter that was left out"
    assert page.one("a", href=f"/ui/runs/{origin}")
    run = seen(server, submitted(root, form)["run_id"])
    assert run["parameters"] == given
    assert run["payload_hash"] == seen(server, origin)["payload_hash"]
    assert (run["queue"], run["priority"], run["run_id"] != origin) == ("side", 4, True)


def test_the_parameters_can_be_written_as_one_object_and_back(server: TokenServer, root: Browser) -> None:
    form = filled(root.open("/ui/submit", params={"model": "every"})) | {"text.text": "t", "number.count": "5"}
    page = root.send("/ui/submit/form", {**form, "shape": "json"})
    assert json.loads(text_of(page.one("textarea", name="all_json"))) == {"text": "t", "count": 5}
    whole = filled(page)
    assert whole["key"] == form["key"]
    back = root.send("/ui/submit/form", {**whole, "all_json": '{"text": "", "count": 6}', "shape": "fields"})
    assert (filled(back)["json.text"], filled(back)["number.count"]) == ('""', "6")
    wrong = root.send("/ui/submit", {**whole, "all_json": '{"text": 5, "count": "x"}'})
    assert wrong.status == 422
    assert "text: Expected str, got int." in wrong.one(id="about-all_json").text
    assert "count: Expected int, got str." in wrong.one(id="about-all_json").text
    assert root.send("/ui/submit", {**whole, "all_json": "{"}).status == 400
    run = seen(server, submitted(root, {**whole, "all_json": '{"text": "", "count": 6}'})["run_id"])
    assert run["parameters"] == {"text": "", "count": 6}


HARD = 'it\'s "$HOME" `id` \\n !! ; & | \u202e é ☃ \u0085 </script>'


def test_the_curl_line_submits_the_same_run_from_a_shell(server: TokenServer, root: Browser) -> None:
    key = "it's a key; $(id)"
    form = {"model": "every", "text.text": HARD, "number.count": "7", "key": key, "priority": "2"}
    line = text_of(root.send("/ui/submit/form", form).one(id="curl"))
    assert line.startswith("curl -sS ")
    assert '"Authorization: Bearer $SEMEL_TOKEN"' in line
    assert server.root.secret is not None
    assert server.root.secret not in line
    assert line.replace("$", "").isprintable(), "it shows all that it does"
    variables = {**os.environ, "SEMEL_TOKEN": server.root.secret}
    done = subprocess.run(["sh", "-c", line], env=variables, capture_output=True, timeout=60, check=True)
    run = json.loads(done.stdout)
    assert run["parameters"] == {"text": HARD, "count": 7}
    assert (run["idempotency_key"], run["priority"], run["replayed"]) == (key, 2, False)
    assert submitted(root, form)["run_id"] == run["run_id"], "the form is the same submission"


def test_a_plain_key_goes_into_the_header_and_the_line_is_for_the_address_that_was_asked(
    server: TokenServer, root: Browser
) -> None:
    page = root.open("/ui/submit", params={"model": "add"})
    words = shlex.split(text_of(page.one(id="curl")))
    assert f"Idempotency-Key: {filled(page)['key']}" in words
    assert words[2] == f"{server.address}/runs"
    assert page.one("button", data_copy=text_of(page.one(id="curl"))).text == "Copy curl command"


def test_the_semel_line_submits_the_same_run_from_a_shell(server: TokenServer, root: Browser) -> None:
    form = {"model": "every", "text.text": HARD, "number.count": "8", "key": "-it's", "delay": "0.5", "cost": "3"}
    line = text_of(root.send("/ui/submit/form", form).one(id="semel"))
    assert line.startswith("semel submit every ")
    command = line.replace("semel ", f"{shlex.quote(sys.executable)} -m semel.cli ", 1)
    variables = {**os.environ, "SEMEL_TOKEN": server.root.secret or ""}
    done = subprocess.run(["sh", "-c", command], env=variables, capture_output=True, timeout=100, check=True)
    run = seen(server, done.stdout.decode().strip())
    assert run["parameters"] == {"text": HARD, "count": 8}
    assert (run["idempotency_key"], run["cost"]) == ("-it's", 3.0)


def test_writing_the_lines_submits_nothing(server: TokenServer, root: Browser) -> None:
    form = {"model": "add", "number.a": "1", "key": "only-lines"}
    assert root.send("/ui/submit/form", form).status == 200
    assert server.root.get("/runs", params={"idempotency_key": "only-lines"}).json()["runs"] == []


def test_a_full_quota_is_said_kindly_and_what_was_typed_stays(server: TokenServer) -> None:
    server.app.set_quota("quinn", Quota(max_concurrent=1))
    quinn = server.admit("quinn")
    with browser(server, quinn) as browsing:
        form = filled(browsing.open("/ui/submit", params={"model": "add"})) | {"number.a": "1"}
        page = browsing.send("/ui/submit", form, follow_redirects=False)
        assert page.status == 303
        near = browsing.open("/ui/submit", params={"model": "add"})
        assert "Quota warning: 1 of 1 concurrent jobs in use" in near.text
        assert "Concurrent: 1 of 1" in near.one(class_="warning").text
        assert near.one(class_="warning").one("a")["href"] == "/ui/quotas"
        page = browsing.send("/ui/submit", {**filled(near), "number.a": "22"})
        assert (page.status, "QUOTA_EXCEEDED" in page.text) == (429, True)
        box = page.one(class_="problem")
        assert "Maximum 1 concurrent jobs allowed" in box.text
        assert box.one("a")["href"] == "/ui/quotas"
        assert page.one("input", name="number.a")["value"] == "22"
    server.app.set_quota("rosa", Quota(cost_daily=1.0))
    with browser(server, server.admit("rosa")) as browsing:
        page = browsing.send("/ui/submit", {"model": "add", "number.a": "1", "cost": "2"})
        assert (page.status, "COST_LIMIT_EXCEEDED" in page.text) == (429, True)
        assert page.one(class_="problem").one("a")["href"] == "/ui/quotas"


def test_a_submitter_submits_for_themselves_and_for_no_less_than_it_costs(server: TokenServer) -> None:
    with browser(server, server.admit("sam")) as sam:
        page = sam.open("/ui/submit", params={"model": "dear"})
        assert not page.all("input", name="user")
        assert sam.send("/ui/submit", {**filled(page), "user": "root"}).status == 403
        assert sam.send("/ui/submit", {**filled(page), "cost": "1"}).status == 403
        run = seen(server, submitted(sam, filled(page))["run_id"])
        assert (run["user"], run["cost"]) == ("sam", 2.5)


def test_nobody_takes_the_parameters_of_a_run_that_they_do_not_see(server: TokenServer) -> None:
    body = {"model": "add", "parameters": {"a": 31337}}
    theirs = server.admit("tess").post("/runs", json=body).json()["run_id"]
    with browser(server, server.admit("uma")) as uma:
        assert uma.open("/ui/submit", params={"from": theirs}).status == 404
    with browser(server, server.admit("wile", "admin", "acme")) as wile:
        assert wile.open("/ui/submit", params={"from": theirs}).status == 404
        run = submitted(wile, {"model": "add", "number.a": "1"})["run_id"]
    assert server.root.get(f"/runs/{run}").status_code == 404, "it is the tenant's"
    with browser(server, server.admit("tess")) as tess:
        assert tess.open("/ui/submit", params={"from": theirs}).one("input", name="number.a")["value"] == "31337"
        assert tess.open("/ui/submit", params={"from": "no-such-run"}).status in (400, 404)


@pytest.mark.parametrize("model", ["nope", "semel.inside", SCRIPT])
def test_an_unknown_model_and_the_services_own_are_refused(root: Browser, model: str) -> None:
    for page in (root.open("/ui/submit", params={"model": model}), root.send("/ui/submit", {"model": model})):
        assert (page.status, "UNKNOWN_MODEL" in page.text) == (422, True)
        assert SCRIPT not in page.answer.text


def test_html_in_models_defaults_and_parameters_is_text(server: TokenServer, root: Browser) -> None:
    page = root.open("/ui/submit", params={"model": "hostile"})
    assert SCRIPT in page.text
    assert SCRIPT not in page.answer.text
    attack = f'"></textarea>{SCRIPT}'
    origin = server.root.post("/runs", json={"model": "hostile", "parameters": {"text": attack}}).json()["run_id"]
    wrong = {"model": "every", "text.text": attack, "json.point": attack, "choice.mode": attack, "key": attack}
    for shown in (
        root.open("/ui/submit", params={"from": origin}),
        root.send("/ui/submit/form", {"model": "hostile", "text.text": attack, "key": attack, "queue": attack}),
        root.send("/ui/submit", {**wrong, "queue": attack, "priority": attack}),
        root.send("/ui/submit/form", {"model": "every", "all_json": attack}),
    ):
        assert SCRIPT not in shown.answer.text
        assert attack in shown.answer.text.replace("&lt;", "<").replace("&gt;", ">").replace("&#34;", '"')


def test_nothing_is_submitted_without_the_forms_secret(server: TokenServer, root: Browser) -> None:
    form = {"model": "add", "number.a": "1", "key": "forged"}
    assert root.client.post("/ui/submit", data=form).status_code == 403
    assert root.client.post("/ui/submit", data={**form, "csrf": "y" * 43}).status_code == 403
    away = {"Origin": "https://elsewhere.example"}
    assert root.client.post("/ui/submit", data={**form, "csrf": root.csrf}, headers=away).status_code == 403
    assert root.client.get("/ui/submit", params=form).status_code == 200
    assert server.root.get("/runs", params={"idempotency_key": "forged"}).json()["runs"] == []


def test_the_page_is_small_and_asks_nobody_else_for_anything(root: Browser) -> None:
    page = root.open("/ui/submit", params={"model": "every"})
    weight = len(page.answer.content)
    for each in [*page.all("script"), *page.all("link")]:
        path = each.get("src") or each["href"]
        assert path.startswith("/ui/static/")
        answer: httpx.Response = root.client.get(path)
        assert answer.status_code == 200
        weight += len(answer.content)
    assert weight <= 200_000


def test_the_lines_name_the_public_address_where_there_is_one(tmp_path: Path) -> None:
    app = make_app(f"sqlite:///{tmp_path / 'semel.db'}", tmp_path)
    app.model("kwargs")(kwargs)
    with serve(app, Settings(public_url="https://semel.example/base/")) as service, browser(service) as anybody:
        page = anybody.open("/ui/submit", params={"model": "kwargs"})
        assert shlex.split(text_of(page.one(id="curl")))[2] == "https://semel.example/base/runs"
        assert "--server=https://semel.example/base" in page.one(id="semel").text
    app.close()
