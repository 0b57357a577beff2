"""The runs of the service, over real HTTP, on SQLite and PostgreSQL."""

import json
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import httpx
import pytest

from semel import App
from semel.service.api.params import PAGE_BYTES
from support.run_service import app_with_models, ended, submitted
from support.service import TestServer, issue_token, serve
from support.waiting import eventually


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestServer]:
    """A service with nobody working."""
    with app_with_models(request, tmp_path_factory.mktemp("service")) as app, serve(app) as service:
        yield service


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def busy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestServer]:
    """A service with a worker beside it."""
    with (
        app_with_models(request, tmp_path_factory.mktemp("busy")) as app,
        serve(app) as service,
        app.working(processes=0, threads=1),
    ):
        yield service


class Guarded:
    """A service with tokens: a client for each of them."""

    def __init__(self, service: TestServer) -> None:
        self.app = service.app
        names: list[tuple[str, str, Any, str]] = [
            ("ann", "ann", "submitter", ""),
            ("bob", "bob", "submitter", ""),
            ("operator", "oona", "operator", ""),
            ("stranger", "ann", "operator", "elsewhere"),
        ]
        self._clients = {
            name: service.client(issue_token(service.app, user, role, tenant)) for name, user, role, tenant in names
        }

    def __getattr__(self, name: str) -> httpx.Client:
        return self._clients[name]

    def close(self) -> None:
        for client in self._clients.values():
            client.close()


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def guarded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with app_with_models(request, tmp_path_factory.mktemp("guarded")) as app:
        issue_token(app, "first")
        with serve(app) as service:
            guarded = Guarded(service)
            yield guarded
            guarded.close()


@pytest.fixture
def client(service: TestServer) -> Iterator[httpx.Client]:
    with service.client() as client:
        yield client


@pytest.fixture
def worked(busy: TestServer) -> Iterator[httpx.Client]:
    with busy.client() as client:
        yield client


def test_a_run_is_created_and_found_again_by_its_key(client: httpx.Client) -> None:
    body = {"model": "add", "parameters": {"a": 1}}
    first = client.post("/runs", json=body, headers={"Idempotency-Key": "ci/1"})
    again = client.post("/runs", json=body, headers={"Idempotency-Key": '"ci/1"'})
    in_body = client.post("/runs", json={**body, "idempotency_key": "ci/1"})
    assert (first.status_code, again.status_code, in_body.status_code) == (201, 200, 200)
    assert "Idempotent-Replayed" not in first.headers
    assert again.headers["Idempotent-Replayed"] == in_body.headers["Idempotent-Replayed"] == "true"
    assert first.json()["run_id"] == again.json()["run_id"] == in_body.json()["run_id"]
    assert first.headers["Location"] == first.json()["links"]["self"] == f"/runs/{first.json()['run_id']}"


def test_after_repeats_a_repeat_a_conflict_and_a_new_run_are_told_apart(client: httpx.Client) -> None:
    key = uuid4().hex
    body = {"model": "add", "parameters": {"a": 1}, "idempotency_key": key}
    other = {"model": "add", "parameters": {"a": 2}, "idempotency_key": key}
    new = {"model": "add", "parameters": {"a": 1}, "idempotency_key": uuid4().hex}
    answers = [client.post("/runs", json=each) for each in (body, body, body, other, body, body, new)]
    assert [answer.status_code for answer in answers] == [201, 200, 200, 409, 200, 200, 201]
    assert len({answer.json()["run_id"] for answer in answers[:3]}) == 1
    many = client.post("/runs/bulk", json=[body, other, {**new, "idempotency_key": uuid4().hex}, body])
    assert [each["status"] for each in many.json()] == [200, 409, 201, 200]


@pytest.mark.parametrize(
    "header",
    ['"ci 42"', '"ci 42";v=1', '"ci 42"; v="a;b"; w="\\""', r'"c\i 42"', '"ci 42";v="', '"ci 42" 7', '"ci 42'],
)
def test_a_key_in_quotes_is_a_string_of_rfc_8941(client: httpx.Client, header: str) -> None:
    """With or without parameters behind it, which may be strings themselves."""
    good = header.startswith('"ci 42"') and not header.endswith(('="', "7"))
    answer = client.post("/runs", json={"model": "add", "parameters": {"a": 1}}, headers={"Idempotency-Key": header})
    if good:
        assert answer.json()["idempotency_key"] == "ci 42"
    else:
        assert (answer.status_code, answer.json()["error_code"]) == (400, "INVALID_REQUEST")


def test_two_keys_that_differ_are_refused(client: httpx.Client) -> None:
    body = {"model": "add", "parameters": {"a": 1}, "idempotency_key": "one"}
    answer = client.post("/runs", json=body, headers={"Idempotency-Key": "other"})
    assert answer.status_code == 400
    assert answer.json()["error_code"] == "INVALID_REQUEST"


def test_what_a_submission_says_is_kept(client: httpx.Client) -> None:
    run = client.post(
        "/runs",
        json={
            "model": "add",
            "parameters": {"a": 2},
            "user": "ann",
            "queue": "night",
            "priority": 7,
            "delay": 3600,
            "cost": 2.5,
        },
    ).json()
    said = {name: run[name] for name in ("user", "queue", "priority", "cost", "parameters")}
    assert said == {"user": "ann", "queue": "night", "priority": 7, "cost": 2.5, "parameters": {"a": 2}}
    wait = datetime.fromisoformat(run["due_at"]) - datetime.fromisoformat(run["created_at"])
    assert wait == timedelta(hours=1)


def test_the_services_own_models_and_queue_cannot_be_reached(client: httpx.Client) -> None:
    own = client.post("/runs", json={"model": "semel.inside"})
    queue = client.post("/runs", json={"model": "add", "parameters": {"a": 1}, "queue": "semel-service"})
    assert (own.status_code, own.json()["error_code"]) == (422, "UNKNOWN_MODEL")
    assert (queue.status_code, queue.json()["error_code"]) == (400, "INVALID_REQUEST")
    many = client.post("/runs/bulk", json=[{"model": "semel.inside"}])
    assert [each["status"] for each in many.json()] == [422]


def test_many_are_answered_in_their_order_with_what_was_refused_in_its_place(client: httpx.Client) -> None:
    key = uuid4().hex
    answer = client.post(
        "/runs/bulk",
        json=[
            {"model": "add", "parameters": {"a": 1}},
            {"model": "add", "parameters": {"a": "one"}},
            {"model": "nobody"},
            {"model": "add", "parameters": {"a": 3}, "idempotency_key": key},
            {"model": "add", "parameters": {"a": 3}, "idempotency_key": key},
            {"model": "add", "parameters": {"a": 4}, "idempotency_key": key},
            {"model": "add", "parameters": {"a": 5}, "idempotency_key": "\n"},
        ],
    )
    assert answer.status_code == 207
    said = answer.json()
    assert [each["place"] for each in said] == list(range(7))
    assert [each["status"] for each in said] == [201, 422, 422, 201, 200, 409, 400]
    assert [sorted(each) for each in said[:2]] == [["place", "run", "status"], ["place", "problem", "status"]]
    assert said[1]["problem"]["error_code"] == "INVALID_PARAMETERS"
    assert said[3]["run"]["run_id"] == said[4]["run"]["run_id"]
    assert client.get(said[0]["run"]["links"]["self"]).json()["parameters"] == {"a": 1}


def test_many_that_are_all_stored_are_a_200(client: httpx.Client) -> None:
    answer = client.post("/runs/bulk", json=[{"model": "add", "parameters": {"a": n}} for n in range(1000)])
    assert answer.status_code == 200
    runs = [each["run"] for each in answer.json()]
    assert [run["parameters"]["a"] for run in runs] == list(range(1000))
    assert len({run["run_id"] for run in runs}) == 1000


@pytest.mark.parametrize("many", [0, 1001])
def test_none_and_too_many_at_once_are_refused(client: httpx.Client, many: int) -> None:
    answer = client.post("/runs/bulk", json=[{"model": "add", "parameters": {"a": 1}}] * many)
    assert answer.status_code == 400


def test_a_run_has_a_tag_that_changes_with_it(client: httpx.Client) -> None:
    run_id = submitted(client, "add", {"a": 1}, delay=3600)
    first = client.get(f"/runs/{run_id}")
    tag = first.headers["ETag"]
    known = client.get(f"/runs/{run_id}", headers={"If-None-Match": tag})
    assert (known.status_code, known.content, known.headers["ETag"]) == (304, b"", tag)
    for sent in (f'W/{tag}, "other"', "*"):
        assert client.get(f"/runs/{run_id}", headers={"If-None-Match": sent}).status_code == 304
    assert client.post(f"/runs/{run_id}/cancel").status_code == 200
    changed = client.get(f"/runs/{run_id}", headers={"If-None-Match": tag})
    assert (changed.status_code, changed.json()["status"]) == (200, "CANCELLED")
    assert changed.headers["ETag"] != tag


def test_many_who_look_at_once_each_get_their_own_run(client: httpx.Client) -> None:
    ids = [submitted(client, "add", {"a": n}) for n in range(32)]
    with ThreadPoolExecutor(16) as pool:
        shown = list(pool.map(lambda run_id: client.get(f"/runs/{run_id}").json(), ids * 2))
    assert [(run["run_id"], run["parameters"]["a"]) for run in shown] == [
        (run_id, n) for n, run_id in enumerate(ids)
    ] * 2


def test_a_result_is_what_was_stored_and_a_conflict_before_that(worked: httpx.Client) -> None:
    given = {"text": "ünï", "n": None, "big": 2**60, "list": [1, 2.5, True]}
    run_id = submitted(worked, "echo", given)
    assert ended(worked, run_id)["status"] == "SUCCEEDED"
    answer = worked.get(f"/runs/{run_id}/result")
    assert (answer.status_code, answer.json()) == (200, given)
    assert answer.headers["Content-Type"] == "application/json"
    later = submitted(worked, "add", {"a": 1}, delay=3600)
    early = worked.get(f"/runs/{later}/result")
    assert (early.status_code, early.json()["error_code"], early.json()["run_status"]) == (
        409,
        "RUN_NOT_COMPLETE",
        "PENDING",
    )
    assert worked.get(f"/runs/{uuid4()}/result").status_code == 404


def test_a_large_result_comes_from_the_result_store_as_it_is(worked: httpx.Client) -> None:
    given = {"text": "x" * 50_000}
    run_id = submitted(worked, "echo", given)
    run = ended(worked, run_id)
    assert run["result_ref"] is not None
    answer = worked.get(f"/runs/{run_id}/result")
    assert answer.json() == given
    assert len(answer.content) == run["result_size"]
    assert worked.get(f"/runs/{run['result_ref']}/result").json() == given, "its address does for its id"
    assert worked.get(f"/runs/{uuid4()}/1/result.json/result").status_code == 404


def test_a_pending_run_is_cancelled_once_and_a_finished_one_not_at_all(worked: httpx.Client) -> None:
    run_id = submitted(worked, "add", {"a": 1}, delay=3600)
    first = worked.post(f"/runs/{run_id}/cancel", json={"why": "the data was wrong"})
    again = worked.post(f"/runs/{run_id}/cancel")
    assert (first.status_code, first.json()["status"]) == (200, "CANCELLED")
    assert (again.status_code, again.json()) == (200, first.json())
    steps = worked.get(f"/runs/{run_id}/timeline").json()
    assert [(step["step"], step["note"]) for step in steps][1:] == [("cancelled", "the data was wrong")]
    done = submitted(worked, "add", {"a": 1})
    ended(worked, done)
    late = worked.post(f"/runs/{done}/cancel")
    assert (late.status_code, late.json()["error_code"]) == (409, "ILLEGAL_TRANSITION")


def test_a_running_run_is_asked_to_end(worked: httpx.Client) -> None:
    run_id = submitted(worked, "linger")
    eventually(lambda: worked.get(f"/runs/{run_id}").json()["status"] == "RUNNING", "the start")
    asked = worked.post(f"/runs/{run_id}/cancel")
    assert asked.json()["cancel_requested"] is True
    assert ended(worked, run_id)["status"] == "CANCELLED"


def test_a_failed_run_is_retried_once_however_often_asked(worked: httpx.Client) -> None:
    run_id = submitted(worked, "fail")
    run = ended(worked, run_id)
    assert (run["status"], run["attempts"]) == ("FAILED", 1)
    assert "as told" in run["error"]
    first = worked.post(f"/runs/{run_id}/retry")
    assert (first.status_code, first.json()["retry_of"]) == (201, run_id)
    assert worked.post(f"/runs/{first.json()['run_id']}/retry").status_code in (201, 409)
    pending = submitted(worked, "add", {"a": 1}, delay=3600)
    assert worked.post(f"/runs/{pending}/retry").json()["error_code"] == "ILLEGAL_TRANSITION"
    worked.post(f"/runs/{pending}/cancel")


def test_a_retry_that_is_under_way_is_found(client: httpx.Client) -> None:
    run_id = submitted(client, "add", {"a": 1})
    client.post(f"/runs/{run_id}/cancel")
    first = client.post(f"/runs/{run_id}/retry")
    again = client.post(f"/runs/{run_id}/retry")
    assert (first.status_code, again.status_code) == (201, 200)
    assert again.headers["Idempotent-Replayed"] == "true"
    assert again.json()["run_id"] == first.json()["run_id"]


def test_runs_are_listed_page_by_page_by_their_filters(client: httpx.Client) -> None:
    queue = uuid4().hex
    ids = [submitted(client, "add", {"a": n}, queue=queue) for n in range(5)]
    client.post(f"/runs/{ids[0]}/cancel")
    page = client.get("/runs", params={"queue": queue, "limit": 2, "status": ["PENDING", "RUNNING"]})
    assert [run["run_id"] for run in page.json()["runs"]] == [ids[4], ids[3]]
    link = page.headers["Link"]
    assert link.endswith('>; rel="next"')
    last = client.get(link[1:].partition(">")[0])
    assert [run["run_id"] for run in last.json()["runs"]] == [ids[2], ids[1]]
    assert last.json()["next"] is None
    assert "Link" not in last.headers
    by_cursor = client.get("/runs", params={"queue": queue, "limit": 2, "cursor": page.json()["next"]})
    assert [run["run_id"] for run in by_cursor.json()["runs"]] == [ids[2], ids[1]]


def test_a_list_leaves_parameters_out_unless_asked(client: httpx.Client) -> None:
    queue = uuid4().hex
    submitted(client, "add", {"a": 5}, queue=queue)
    (listed,) = client.get("/runs", params={"queue": queue}).json()["runs"]
    assert "parameters" not in listed
    (whole,) = client.get("/runs", params={"queue": queue, "include": "parameters"}).json()["runs"]
    assert whole == {**listed, "parameters": {"a": 5}} == client.get(listed["links"]["self"]).json()
    assert client.get("/runs", params={"include": "secrets"}).status_code == 400


def test_a_page_of_large_runs_is_bounded_and_the_link_leads_through_all_of_them(client: httpx.Client) -> None:
    queue, large = uuid4().hex, "x" * 900_000
    made = [submitted(client, "echo", {"x": f"{n}{large}"}, queue=queue) for n in range(6)]
    found, link = [], f"/runs?queue={queue}&limit=1000&include=parameters"
    while link:
        page = client.get(link)
        assert len(page.content) < PAGE_BYTES + 1_000_000
        found.append([run["run_id"] for run in page.json()["runs"]])
        link = page.headers.get("Link", "<>")[1:].partition(">")[0]
    assert [run for page in found for run in page] == made[::-1]
    assert [len(page) for page in found] == [4, 2]
    without = client.get("/runs", params={"queue": queue, "limit": 1000})
    assert len(without.json()["runs"]) == 6
    assert len(without.content) < 20_000


def test_each_filter_finds_what_it_names(client: httpx.Client) -> None:
    user = uuid4().hex
    key = f"key-{user}"
    run = client.post(
        "/runs", json={"model": "echo", "parameters": {"x": user}, "user": user, "idempotency_key": key}
    ).json()
    client.post("/runs", json={"model": "add", "parameters": {"a": 1}, "user": user})
    at = datetime.fromisoformat(run["created_at"])

    def found(**filters: Any) -> list[str]:
        return [each["run_id"] for each in client.get("/runs", params=filters).json()["runs"]]

    assert found(idempotency_key=key) == found(payload_hash=run["payload_hash"]) == [run["run_id"]]
    assert found(user=user, model="echo") == [run["run_id"]]
    assert found(user=user, until=at.isoformat()) == []
    assert found(user=user, model="echo", since=at.isoformat()) == [run["run_id"]]
    assert found(user=user, since=(datetime.now(UTC) + timedelta(days=1)).isoformat()) == []
    assert found(user=user, status="SUCCEEDED") == []


def test_a_life_is_told_step_by_step(worked: httpx.Client) -> None:
    run_id = submitted(worked, "add", {"a": 1})
    ended(worked, run_id)
    steps = worked.get(f"/runs/{run_id}/timeline").json()
    assert [(step["step"], step["status"], step["version"]) for step in steps] == [
        ("created", "PENDING", 1),
        ("leased", "RUNNING", 2),
        ("succeeded", "SUCCEEDED", 3),
    ]
    assert datetime.fromisoformat(steps[0]["at"]) <= datetime.fromisoformat(steps[2]["at"])


def test_a_pending_run_says_why_it_waits_and_another_that_it_does_not(client: httpx.Client) -> None:
    queue = uuid4().hex
    ahead = submitted(client, "add", {"a": 1}, queue=queue)
    run_id = submitted(client, "add", {"a": 2}, queue=queue)
    told = client.get(f"/runs/{run_id}/waiting").json()
    assert told["status"] == "PENDING"
    assert (told["waiting"]["place"], told["waiting"]["workers"]) == (2, 0)
    assert queue in told["waiting"]["reason"]
    client.post(f"/runs/{ahead}/cancel")
    assert client.get(f"/runs/{run_id}/waiting").json()["waiting"]["place"] == 1
    assert client.get(f"/runs/{ahead}/waiting").json() == {"status": "CANCELLED", "waiting": None}


def test_logs_are_read_on_from_where_one_was(worked: httpx.Client) -> None:
    run_id = submitted(worked, "talk", {"lines": 3})
    ended(worked, run_id)
    first = worked.get(f"/runs/{run_id}/logs", params={"limit": 2}).json()
    rest = worked.get(f"/runs/{run_id}/logs", params={"after": first["next"]}).json()
    assert [line["text"] for line in first["lines"] + rest["lines"]] == ["line 0", "line 1", "line 2"]
    assert {line["level"] for line in first["lines"]} == {"INFO"}
    none = worked.get(f"/runs/{run_id}/logs", params={"after": rest["next"]}).json()
    assert none == {"lines": [], "next": rest["next"]}


def test_a_page_of_logs_is_bounded_in_bytes_and_gone_on_from(
    worked: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("semel.service.api.runs.PAGE_BYTES", 300)
    monkeypatch.setattr("semel.service.api.runs.PORTION", 10)
    run_id = submitted(worked, "talk", {"lines": 100})
    ended(worked, run_id)
    found, after, pages = [], "0-0", 0
    while lines := (page := worked.get(f"/runs/{run_id}/logs", params={"after": after}).json())["lines"]:
        assert len(lines) <= 50
        found += [line["text"] for line in lines]
        after, pages = page["next"], pages + 1
    assert found == [f"line {n}" for n in range(100)]
    assert pages == 2


def test_the_summary_counts_by_model_and_by_the_models_parameter(worked: httpx.Client) -> None:
    scenarios = [f"s{n}-{uuid4().hex}" for n in range(2)]
    for scenario in (scenarios[0], scenarios[0], scenarios[1]):
        ended(worked, submitted(worked, "add", {"a": 1, "scenario": scenario}))
    grouped = {each["group"]: each for each in worked.get("/summary", params={"grouped": "true"}).json()}
    assert [grouped[scenario]["counts"] for scenario in scenarios] == [{"SUCCEEDED": 2}, {"SUCCEEDED": 1}]
    assert grouped[scenarios[0]]["mean_seconds"] >= 0
    whole = [each for each in worked.get("/summary").json() if each["model"] == "add"]
    assert [(each["group"], each["total"] >= 3) for each in whole] == [(None, True)]


def test_models_are_shown_with_the_schema_of_their_parameters(client: httpx.Client) -> None:
    models = {model["name"]: model for model in client.get("/models").json()}
    assert "semel.inside" not in models
    add = models["add"]
    assert (add["description"], add["summary"], add["isolation"]) == ("Add two numbers.", "scenario", "loop")
    assert add["parameters"] == {
        "type": "object",
        "properties": {
            "a": {"type": "integer"},
            "b": {"type": "integer", "default": 0},
            "scenario": {"type": "string", "default": "plain"},
        },
        "required": ["a"],
        "additionalProperties": False,
    }
    assert models["echo"]["parameters"]["additionalProperties"] is True
    assert models["linger"]["parameters"]["properties"] == {}


def test_workers_are_shown_with_what_they_can_do(worked: httpx.Client) -> None:
    def of_the_app() -> list[dict[str, Any]]:
        return [worker for worker in worked.get("/workers").json() if worker["queues"] == ["default"]]

    worker = eventually(of_the_app, "a worker that told of itself")[0]
    assert (worker["alive"], worker["draining"], worker["models"]["add"]) == (True, False, "loop")
    assert worker["pid"] > 0


def test_where_a_worker_runs_is_seen_in_the_list_of_workers_alone(worked: httpx.Client) -> None:
    run_id = submitted(worked, "talk")
    run = ended(worked, run_id)
    told = [worked.get(f"/runs/{run_id}{more}").text for more in ("", "/timeline", "/events", "/logs")]
    assert run["worker"]
    assert all(run["worker"] in each for each in told[:3])
    here = socket.gethostname()
    for each in (here, f"-{os.getpid()}-", f'-{os.getpid()}"'):
        assert each not in "".join(told)
    (worker,) = [each for each in worked.get("/workers").json() if each["id"] == run["worker"]]
    assert (worker["host"], worker["pid"]) == (here, os.getpid())


def test_submitters_see_and_touch_only_their_own(guarded: Guarded) -> None:
    run_id = submitted(guarded.ann, "add", {"a": 1}, delay=3600)
    assert guarded.ann.get(f"/runs/{run_id}").json()["user"] == "ann"
    for path in ("", "/result", "/timeline", "/waiting", "/logs", "/events", "/artifacts/x"):
        for other in (guarded.bob, guarded.stranger):
            answer = other.get(f"/runs/{run_id}{path}")
            assert (answer.status_code, answer.json()["error_code"]) == (404, "NOT_FOUND"), path
    for verb in ("cancel", "retry"):
        for other in (guarded.bob, guarded.stranger):
            assert other.post(f"/runs/{run_id}/{verb}").status_code == 404
    assert guarded.operator.get(f"/runs/{run_id}").status_code == 200
    assert guarded.operator.post(f"/runs/{run_id}/cancel").json()["status"] == "CANCELLED"


def test_lists_and_sums_are_of_ones_own_runs_and_to_operators_of_their_tenants(guarded: Guarded) -> None:
    mine, yours = (submitted(each, "add", {"a": 1}) for each in (guarded.ann, guarded.bob))
    far = submitted(guarded.stranger, "echo", {"a": 1})

    def seen(client: httpx.Client, **filters: str) -> set[str]:
        return {run["run_id"] for run in client.get("/runs", params={"limit": "1000", **filters}).json()["runs"]}

    assert mine in seen(guarded.ann)
    assert not {yours, far} & seen(guarded.ann)
    assert {mine, yours} <= seen(guarded.operator)
    assert seen(guarded.operator, user="bob") & {mine, yours} == {yours}
    assert seen(guarded.stranger) == {far}
    assert guarded.ann.get("/runs", params={"user": "bob"}).status_code == 403
    everybody = {each["model"]: each["total"] for each in guarded.operator.get("/summary").json()}
    own = {each["model"]: each["total"] for each in guarded.bob.get("/summary").json()}
    assert 0 < own["add"] < everybody["add"]
    assert "echo" not in everybody


def test_only_operators_submit_for_others_and_see_workers(guarded: Guarded) -> None:
    body = {"model": "add", "parameters": {"a": 1}, "user": "bob"}
    refused = guarded.ann.post("/runs", json=body)
    assert (refused.status_code, refused.json()["error_code"]) == (403, "FORBIDDEN")
    many = guarded.ann.post("/runs/bulk", json=[body, {"model": "add", "parameters": {"a": 1}}])
    assert [each["status"] for each in many.json()] == [403, 201]
    assert guarded.operator.post("/runs", json=body).json()["user"] == "bob"
    assert guarded.ann.get("/workers").status_code == 403
    assert guarded.operator.get("/workers").status_code == 200


def test_keys_of_two_users_and_of_two_tenants_do_not_meet(guarded: Guarded) -> None:
    key = uuid4().hex
    ids = set()
    for client in (guarded.ann, guarded.bob, guarded.stranger):
        ids.add(submitted(client, "add", {"a": 1}, idempotency_key=key))
    assert len(ids) == 3


def test_one_key_sent_by_many_at_once_is_one_run(client: httpx.Client) -> None:
    body = {"model": "add", "parameters": {"a": 1}, "idempotency_key": uuid4().hex}
    barrier = threading.Barrier(8)

    def send(_: int) -> httpx.Response:
        barrier.wait(30)
        return client.post("/runs", json=body)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(send, range(8)))
    assert sorted(answer.status_code for answer in answers) == [200] * 7 + [201]
    assert len({answer.json()["run_id"] for answer in answers}) == 1


def test_links_begin_where_the_service_is_mounted(service: TestServer, client: httpx.Client) -> None:
    run_id = submitted(client, "add", {"a": 1})
    assert json.loads(client.get(f"/runs/{run_id}").content)["links"] == {
        "self": f"/runs/{run_id}",
        "result": f"/runs/{run_id}/result",
    }


def test_an_app_is_asked_for_many_with_the_refused_in_their_places(service: TestServer) -> None:
    app: App = service.app
    asked = [{"model": "add", "parameters": {"a": 1}}, {"model": "add"}]
    runs = app.submit_many(asked, strict=False)
    assert [type(each).__name__ for each in runs] == ["Run", "InvalidParameters"]
    with pytest.raises(ValueError, match="submission 1"):
        app.submit_many(asked)
