"""S2 over real HTTP, with the requests of the document: submit, look, wait, results, cancel, lists, sums, tags."""

import json
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest

from semel import RunNotComplete, Worker
from semel.cli import main as semel_command
from semel.client import Client
from semel.demo import baseline_forecast
from support.run_service import app_with_models as on_database
from support.run_service import ended
from support.service import TestServer as Served
from support.service import issue_token as token
from support.service import serve as served
from support.waiting import eventually as until

MODEL = "baseline_forecast_v1"
PARAMETERS = {"scenario": "high_inflation", "horizon_months": 24, "region": "AU"}
BODY = {"model": MODEL, "parameters": PARAMETERS}


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """With the window of ten minutes in which the same payload is the same run."""
    with on_database(request, tmp_path_factory.mktemp("s2"), dedupe_window=600) as app:
        app.model(MODEL, isolation="thread", summary="scenario", max_attempts=2, backoff=(0.01,))(baseline_forecast)
        with served(app) as service:
            yield service


@pytest.fixture
def client(service: Served) -> Iterator[httpx.Client]:
    with service.client() as client:
        yield client


def working(service: Served) -> AbstractContextManager[Worker]:
    return service.app.working(processes=0, threads=4)


def fresh(**more: Any) -> dict[str, Any]:
    """The document's request, of a scenario that nobody has asked for."""
    return {"model": MODEL, "parameters": {**PARAMETERS, "scenario": uuid4().hex, "seconds": 0, **more}}


def test_s2_2_a_run_is_created_by_the_documents_request(client: httpx.Client) -> None:
    answer = client.post("/runs", json=BODY)
    assert answer.status_code == 201
    run = answer.json()
    assert (run["model"], run["parameters"]) == (MODEL, PARAMETERS)


def test_s2_3_it_answers_at_once_with_what_the_document_names(client: httpx.Client) -> None:
    run = client.post("/runs", json=fresh()).json()
    assert UUID(run["run_id"]).version == 7
    assert run["status"] == "PENDING"
    assert datetime.fromisoformat(run["created_at"]).tzinfo is not None
    assert re.fullmatch("[0-9a-f]{64}", run["payload_hash"])
    assert run["links"] == {"self": f"/runs/{run['run_id']}", "result": f"/runs/{run['run_id']}/result"}


def test_s2_4_the_key_travels_in_a_header_and_is_optional(client: httpx.Client) -> None:
    key = uuid4().hex
    body = fresh()
    run = client.post("/runs", json=body, headers={"Idempotency-Key": key}).json()
    assert run["idempotency_key"] == key
    assert client.post("/runs", json=fresh()).json()["idempotency_key"] is None


def test_s2_5_the_same_key_and_payload_is_the_same_run(client: httpx.Client) -> None:
    headers = {"Idempotency-Key": uuid4().hex}
    body = fresh()
    first = client.post("/runs", json=body, headers=headers)
    turned = {"parameters": dict(reversed(body["parameters"].items())), "model": MODEL}
    again = client.post("/runs", json=turned, headers=headers)
    assert (first.status_code, again.status_code) == (201, 200)
    assert again.headers["Idempotent-Replayed"] == "true"
    assert first.json()["run_id"] == again.json()["run_id"]


def test_s2_5_a_key_names_its_run_also_when_that_is_over(service: Served, client: httpx.Client) -> None:
    headers = {"Idempotency-Key": uuid4().hex}
    body = fresh()
    run_id = client.post("/runs", json=body, headers=headers).json()["run_id"]
    with working(service):
        ended(client, run_id)
    again = client.post("/runs", json=body, headers=headers)
    assert (again.status_code, again.json()["run_id"], again.json()["status"]) == (200, run_id, "SUCCEEDED")


def test_s2_6_the_same_key_with_another_payload_is_a_409(client: httpx.Client) -> None:
    headers = {"Idempotency-Key": uuid4().hex}
    client.post("/runs", json=fresh(), headers=headers)
    answer = client.post("/runs", json=fresh(), headers=headers)
    assert (answer.status_code, answer.json()["error_code"]) == (409, "IDEMPOTENCY_KEY_CONFLICT")
    assert answer.headers["Content-Type"] == "application/problem+json"


def test_s2_7_without_a_key_the_same_payload_finds_the_run_while_it_is_under_way(
    service: Served, client: httpx.Client
) -> None:
    body = fresh()
    first = client.post("/runs", json=body)
    again = client.post("/runs", json=body)
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json()["run_id"] == again.json()["run_id"]
    with working(service):
        ended(client, first.json()["run_id"])
    later = client.post("/runs", json=body)
    assert (later.status_code, later.json()["run_id"] == first.json()["run_id"]) == (201, False)


def test_s2_7_it_can_be_asked_not_to(client: httpx.Client) -> None:
    body = {**fresh(), "dedupe": False}
    assert [client.post("/runs", json=body).status_code for _ in range(2)] == [201, 201]


def test_s2_36_a_run_shows_how_it_stands(service: Served, client: httpx.Client) -> None:
    good = client.post("/runs", json=fresh()).json()["run_id"]
    bad = client.post("/runs", json=fresh(fail_attempts=9)).json()["run_id"]
    pending = client.get(f"/runs/{good}").json()
    assert (pending["status"], pending["started_at"], pending["attempts"]) == ("PENDING", None, 0)
    with working(service):
        succeeded, failed = ended(client, good), ended(client, bad)
    assert (succeeded["status"], succeeded["attempts"], succeeded["error"]) == ("SUCCEEDED", 1, None)
    assert succeeded["started_at"] <= succeeded["finished_at"]
    assert (failed["status"], failed["attempts"], failed["result_ref"]) == ("FAILED", 2, None)
    assert "told to fail" in failed["error"]
    assert client.get(f"/runs/{uuid4()}").status_code == 404


def test_s2_37_a_result_is_a_200_when_it_is_there_409_before_and_404_for_nobodys(
    service: Served, client: httpx.Client
) -> None:
    body = fresh()
    run_id = client.post("/runs", json=body).json()["run_id"]
    early = client.get(f"/runs/{run_id}/result")
    assert (early.status_code, early.json()["error_code"], early.json()["run_status"]) == (
        409,
        "RUN_NOT_COMPLETE",
        "PENDING",
    )
    with working(service):
        ended(client, run_id)
    result = client.get(f"/runs/{run_id}/result")
    assert result.status_code == 200
    assert sorted(result.json()) == ["inputs", "metrics", "notes", "run_id"]
    assert (result.json()["run_id"], result.json()["notes"]) == (run_id, "simulated")
    assert client.get(f"/runs/{uuid4()}/result").status_code == 404


def test_s2_37_a_failed_run_has_no_result(service: Served, client: httpx.Client) -> None:
    run_id = client.post("/runs", json=fresh(fatal=True)).json()["run_id"]
    with working(service):
        ended(client, run_id)
    answer = client.get(f"/runs/{run_id}/result")
    assert (answer.status_code, answer.json()["run_status"]) == (409, "FAILED")


def test_s2_38_a_pending_run_is_cancelled_and_never_runs(service: Served, client: httpx.Client) -> None:
    run_id = client.post("/runs", json=fresh()).json()["run_id"]
    other = client.post("/runs", json=fresh()).json()["run_id"]
    assert client.post(f"/runs/{run_id}/cancel").json()["status"] == "CANCELLED"
    with working(service):
        ended(client, other)
    assert client.get(f"/runs/{run_id}").json()["attempts"] == 0


def test_s2_38_a_running_run_is_asked_to_end(service: Served, client: httpx.Client) -> None:
    run_id = client.post("/runs", json=fresh(seconds=20)).json()["run_id"]
    with working(service):
        until(lambda: client.get(f"/runs/{run_id}").json()["status"] == "RUNNING", "the start")
        assert client.post(f"/runs/{run_id}/cancel").status_code == 200
        assert ended(client, run_id)["status"] == "CANCELLED"
    late = client.post(f"/runs/{run_id}/cancel")
    assert (late.status_code, late.json()["status"]) == (200, "CANCELLED")


def test_s2_39_runs_are_listed_by_status(service: Served, client: httpx.Client) -> None:
    ids = {client.post("/runs", json=fresh(seconds=20)).json()["run_id"] for _ in range(2)}
    with working(service):
        until(
            lambda: ids <= {run["run_id"] for run in client.get("/runs?status=RUNNING").json()["runs"]},
            "both in the list",
        )
        for run_id in ids:
            client.post(f"/runs/{run_id}/cancel")
            ended(client, run_id)
    listed = client.get("/runs", params={"status": "CANCELLED", "limit": 1000}).json()["runs"]
    assert ids <= {run["run_id"] for run in listed}
    assert {run["status"] for run in listed} == {"CANCELLED"}


def test_s2_57_the_completion_is_in_the_timeline_of_the_transaction_that_wrote_it(
    service: Served, client: httpx.Client
) -> None:
    run_id = client.post("/runs", json=fresh()).json()["run_id"]
    with working(service):
        run = ended(client, run_id)
    last = client.get(f"/runs/{run_id}/timeline").json()[-1]
    assert (last["step"], last["status"], last["version"]) == ("succeeded", "SUCCEEDED", run["version"])
    assert last["at"] == run["finished_at"]


def test_s2_58_runs_are_summed_up_by_model_and_scenario(service: Served, client: httpx.Client) -> None:
    body = {**fresh(), "dedupe": False}
    scenario = body["parameters"]["scenario"]
    ids = [client.post("/runs", json=body).json()["run_id"] for _ in range(3)]
    client.post(f"/runs/{ids[0]}/cancel")
    with working(service):
        for run_id in ids[1:]:
            ended(client, run_id)
    sums = client.get("/summary", params={"grouped": "true"}).json()
    [own] = [each for each in sums if (each["model"], each["group"]) == (MODEL, scenario)]
    assert (own["counts"], own["total"]) == ({"SUCCEEDED": 2, "CANCELLED": 1}, 3)
    [whole] = [each for each in client.get("/summary").json() if each["model"] == MODEL]
    assert (whole["group"], whole["total"] >= 3) == (None, True)


def test_s2_59_who_knows_the_tag_gets_a_304_until_something_changes(service: Served, client: httpx.Client) -> None:
    run_id = client.post("/runs", json=fresh()).json()["run_id"]
    tags = [client.get(f"/runs/{run_id}").headers["ETag"]]

    def look() -> httpx.Response:
        return client.get(f"/runs/{run_id}", headers={"If-None-Match": tags[-1]})

    same = look()
    assert (same.status_code, same.content) == (304, b"")
    with working(service):
        ended(client, run_id)
    changed = look()
    assert (changed.status_code, changed.json()["status"]) == (200, "SUCCEEDED")
    tags.append(changed.headers["ETag"])
    assert look().status_code == 304
    assert len(set(tags)) == 2


def test_b_14_a_pending_run_says_why_it_waits(client: httpx.Client) -> None:
    run_id = client.post("/runs", json=fresh()).json()["run_id"]
    told = client.get(f"/runs/{run_id}/waiting").json()["waiting"]
    assert told["reason"] == "no live worker serves the queue 'default'"
    assert told["place"] >= 1
    assert datetime.fromisoformat(told["since"]).tzinfo is not None


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_s2_39_a_submitter_lists_their_own_and_an_operator_all(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    request.param = kind
    with on_database(request, tmp_path) as guarded:
        secrets = [token(guarded, "ann"), token(guarded, "oona", "operator")]
        with served(guarded) as own, own.client(secrets[0]) as ann, own.client(secrets[1]) as oona:
            mine = ann.post("/runs", json={"model": "add", "parameters": {"a": 1}}).json()["run_id"]
            hers = oona.post("/runs", json={"model": "add", "parameters": {"a": 1}}).json()["run_id"]
            assert [run["run_id"] for run in ann.get("/runs?status=PENDING").json()["runs"]] == [mine]
            assert {run["run_id"] for run in oona.get("/runs?status=PENDING").json()["runs"]} == {mine, hers}


def test_s2_36_s2_40_a_small_result_has_an_address_that_everybody_understands(
    service: Served, client: httpx.Client, capsys: pytest.CaptureFixture[str]
) -> None:
    run_id = client.post("/runs", json=fresh()).json()["run_id"]
    assert client.get(f"/runs/{run_id}").json()["result_ref"] is None
    with working(service):
        run = ended(client, run_id)
    assert run["status"] == "SUCCEEDED"
    ref = run["result_ref"]
    assert ref == f"semel:{run_id}"
    result = client.get(f"/runs/{run_id}/result").json()
    assert client.get(f"/runs/{ref}/result").json() == client.get(f"/runs/{ref}/result").json() == result
    with Client(service.address) as remote:
        assert remote.result(ref) == result
        assert remote.result(f"{run_id}/1/result.json") == result, "as a file's, which large results have"
    assert semel_command(["result", ref, "--server", service.address]) == 0
    assert json.loads(capsys.readouterr().out) == result


def test_s2_37_b7_a_result_that_may_still_come_is_to_be_asked_for_again(service: Served, client: httpx.Client) -> None:
    run_id = client.post("/runs", json=fresh(), headers={"Idempotency-Key": uuid4().hex}).json()["run_id"]
    later = client.post("/runs", json={**fresh(), "delay": 1000}).json()["run_id"]
    for waiting, seconds in ((run_id, "1"), (later, "60")):
        answer = client.get(f"/runs/{waiting}/result")
        assert (answer.status_code, answer.headers["Retry-After"]) == (409, seconds)
        problem = answer.json()
        assert (problem["retryable"], problem["retry_after"], problem["run_status"]) == (True, int(seconds), "PENDING")
    with Client(service.address) as remote, pytest.raises(RunNotComplete) as told:
        remote.result(later)
    assert (told.value.status, told.value.retry_after) == ("PENDING", 60)
    for waiting in (run_id, later):
        client.post(f"/runs/{waiting}/cancel")
        over = client.get(f"/runs/{waiting}/result")
        assert (over.status_code, over.json()["retryable"], "Retry-After" in over.headers) == (409, False, False)


def test_b7_answers_say_whether_the_run_was_there_and_until_when_its_key_names_it(client: httpx.Client) -> None:
    body = fresh()
    headers = {"Idempotency-Key": uuid4().hex}
    first, again = (client.post("/runs", json=body, headers=headers) for _ in range(2))
    assert "Idempotent-Replayed" not in first.headers
    assert again.headers["Idempotent-Replayed"] == "true"
    until_day = parsedate_to_datetime(first.headers["Idempotency-Expires"]) - datetime.now(UTC)
    assert timedelta(hours=23) < until_day <= timedelta(hours=24)
    assert again.headers["Idempotency-Expires"] == first.headers["Idempotency-Expires"], "a repetition extends nothing"
    short = client.post("/runs", json={**fresh(), "idempotency_key": uuid4().hex, "key_ttl": 60})
    assert parsedate_to_datetime(short.headers["Idempotency-Expires"]) - datetime.now(UTC) <= timedelta(seconds=60)
    without = client.post("/runs", json=body)
    assert "Idempotency-Expires" not in without.headers, "a payload is no key"
    client.post(f"/runs/{first.json()['run_id']}/cancel")
    retried, found = (
        client.post(
            f"/runs/{first.json()['run_id']}/retry", headers={"Idempotency-Key": "again-" + headers["Idempotency-Key"]}
        )
        for _ in range(2)
    )
    assert (retried.status_code, found.status_code) == (201, 200)
    assert retried.headers["Idempotency-Expires"] == found.headers["Idempotency-Expires"]
    assert found.headers["Idempotent-Replayed"] == "true"


@pytest.mark.parametrize("key", ["@invalid-key#123", "gh-owner/repo sha", "k" * 255])
def test_b7_a_key_is_judged_by_one_rule_on_all_routes_and_taken(client: httpx.Client, key: str) -> None:
    key = (key + uuid4().hex)[-255:]
    body = fresh()
    quoted = f'"{key}"'
    answers = [
        client.post("/runs", json=body, headers={"Idempotency-Key": key}),
        client.post("/runs", json={**body, "idempotency_key": key}),
        client.post("/runs", json=body, headers={"Idempotency-Key": quoted}),
        client.post("/runs", json=body, headers={"Idempotency-Key": f"{quoted};v=1"}),
    ]
    many = client.post("/runs/bulk", json=[{**body, "idempotency_key": key}]).json()
    assert len({answer.json()["run_id"] for answer in answers} | {many[0]["run"]["run_id"]}) == 1


@pytest.mark.parametrize("key", ["", "k" * 256, "a\x01b"])
def test_b7_a_key_is_judged_by_one_rule_on_all_routes_and_refused_by_its_name(client: httpx.Client, key: str) -> None:
    shown = key if len(key) < 256 else f"{key[:255]}…"
    body = {**fresh(), "idempotency_key": key}
    alone, many = client.post("/runs", json=body), client.post("/runs/bulk", json=[body])
    assert (alone.status_code, many.status_code) == (400, 207)
    job = client.post(
        "/api/cloud/jobs/submit", json={"config_name_to_load": "production", "idempotency_key": key}
    ).json()
    for said in (alone.json(), many.json()[0]["problem"]):
        assert (said["error_code"], said.get("idempotency_key", "")) == ("INVALID_REQUEST", shown)
        assert repr(shown) in said["detail"]
    assert job["success"] is False
    if "\x01" not in key:  # which no header can carry
        run_id = client.post("/runs", json=fresh()).json()["run_id"]
        client.post(f"/runs/{run_id}/cancel")
        for path, sent in (("/runs", fresh()), ("/runs/bulk", [fresh()]), (f"/runs/{run_id}/retry", None)):
            refused = client.post(path, json=sent, headers={"Idempotency-Key": key})
            assert (refused.status_code, refused.json().get("idempotency_key", "")) == (400, shown), path


def test_b7_a_key_that_belongs_to_other_work_is_named(client: httpx.Client) -> None:
    key = uuid4().hex
    client.post("/runs", json=fresh(), headers={"Idempotency-Key": key})
    taken = client.post("/runs", json=fresh(), headers={"Idempotency-Key": key})
    assert (taken.status_code, taken.json()["idempotency_key"], key in taken.json()["detail"]) == (409, key, True)
    both = client.post("/runs", json={**fresh(), "idempotency_key": "one"}, headers={"Idempotency-Key": "two"})
    assert (both.status_code, both.json()["idempotency_key"]) == (400, "two")
    broken = client.post("/runs", json=fresh(), headers={"Idempotency-Key": '"open'})
    assert (broken.status_code, broken.json()["idempotency_key"]) == (400, '"open')
