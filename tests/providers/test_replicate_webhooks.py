"""What Replicate calls back: what is genuine makes us look at once, and what is not changes nothing."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from semel import App
from semel.db.dialect import StatementContext
from semel.service.auth import tokens
from support.replicate import begun, ended, in_database, paced, row_of, serving, submit
from support.replicate_server import VERSION, ReplicateServer
from support.service import TestServer, app_on
from support.waiting import eventually


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def patient(
    request: pytest.FixtureRequest, cloud: ReplicateServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TestServer]:
    """A server that looks by itself only once in an hour."""
    hourly = paced(poll=3600.0, poll_most=3600.0)
    with app_on(request, tmp_path_factory.mktemp("patient")) as app, serving(app, cloud, hourly, hooks=True) as service:
        yield service


def looked(cloud: ReplicateServer, prediction: dict[str, Any]) -> int:
    return cloud.calls.count(f"GET /v1/predictions/{prediction['id']}")


def test_a_webhook_makes_us_look_at_once(patient: TestServer, cloud: ReplicateServer, prompt: str) -> None:
    run = submit(patient.app, prompt)
    prediction = begun(cloud, prompt)
    eventually(lambda: looked(cloud, prediction))
    cloud.finish(prompt, "heard of")
    assert cloud.call_back(prediction) == (200, {"status": "heard"})
    assert ended(patient.app, run).status == "SUCCEEDED"
    assert patient.app.result(run.id)["output"] == "heard of"


def test_forged_old_and_repeated_webhooks_change_nothing(
    patient: TestServer, cloud: ReplicateServer, prompt: str
) -> None:
    run = submit(patient.app, prompt)
    prediction = begun(cloud, prompt)
    eventually(lambda: looked(cloud, prediction))
    assert cloud.call_back(prediction, webhook_id="msg_1") == (200, {"status": "heard"})
    eventually(lambda: looked(cloud, prediction) == 2)
    cloud.finish(prompt)
    now = int(datetime.now(UTC).timestamp())
    bad: list[dict[str, Any]] = [
        {"signature": ""},
        {"signature": "v1,AAAA"},
        {"signature": "v1,ü"},
        {"at": now - 3600},
        {"at": now + 3600},
        {"at": "soon"},
        {"at": "1" * 400},
        {"webhook_id": ""},
    ]
    for changed in bad:
        assert cloud.call_back(prediction, **changed)[0] == 403, changed
    assert cloud.call_back(prediction, body=b"[1]")[0] == 400
    assert cloud.call_back(prediction, webhook_id="msg_1") == (200, {"status": "ignored"})
    elsewhere = prediction["webhook"][:-4] + "0000"
    assert cloud.call_back(prediction, to=elsewhere) == (200, {"status": "ignored"})
    assert (looked(cloud, prediction), patient.app.get(run.id).status) == (2, "RUNNING")
    assert cloud.call_back(prediction) == (200, {"status": "heard"})
    assert ended(patient.app, run).status == "SUCCEEDED"


def test_a_webhook_that_one_process_takes_is_heard_by_the_one_that_follows(
    patient: TestServer, cloud: ReplicateServer, prompt: str
) -> None:
    run = submit(patient.app, prompt)
    prediction = begun(cloud, prompt)
    eventually(lambda: looked(cloud, prediction))
    with serving(App(patient.app.url, dedupe_window=0), cloud, hooks=True) as other:
        cloud.call_back(prediction, to=prediction["webhook"].replace(patient.address, other.address))
        cloud.finish(prompt)
        path = prediction["webhook"].replace(patient.address, other.address)
        assert cloud.call_back(prediction, to=path) == (200, {"status": "heard"})
        assert ended(patient.app, run).status == "SUCCEEDED"


def test_a_webhook_tells_which_prediction_it_is_before_the_answer_does(
    patient: TestServer, cloud: ReplicateServer, prompt: str
) -> None:
    cloud.faults[prompt] = ["hold"]
    run = submit(patient.app, prompt)
    prediction = begun(cloud, prompt)
    assert row_of(patient.app, run)["remote_id"] is None
    assert cloud.call_back(prediction) == (200, {"status": "heard"})
    assert row_of(patient.app, run)["remote_id"] == prediction["id"]
    cloud.finish(prompt)
    cloud.go_on.set()
    assert ended(patient.app, run).status == "SUCCEEDED"
    cloud.go_on.clear()


def test_a_second_prediction_that_calls_back_for_a_run_is_cancelled(
    patient: TestServer, cloud: ReplicateServer, prompt: str
) -> None:
    run = submit(patient.app, prompt)
    prediction = begun(cloud, prompt)
    eventually(lambda: looked(cloud, prediction))
    second = cloud.add({"version": VERSION, "input": {"prompt": prompt}, "webhook": prediction["webhook"]})
    assert cloud.call_back(second) == (200, {"status": "heard"})
    eventually(lambda: second["status"] == "canceled")
    assert row_of(patient.app, run)["remote_id"] == prediction["id"]
    prediction.update(status="succeeded", output="the first")
    cloud.call_back(prediction)
    assert ended(patient.app, run).status == "SUCCEEDED"


def test_a_server_that_is_not_called_back_takes_no_webhooks(app: App, cloud: ReplicateServer, prompt: str) -> None:
    with serving(app, cloud) as service:
        submit(app, prompt)
        prediction = begun(cloud, prompt)
        assert prediction["webhook"] is None
        to = f"{service.address}/api/cloud/webhooks/replicate/{'0' * 32}"
        assert cloud.call_back(prediction, to=to)[0] == 404
        cloud.finish(prompt)


def test_replicate_needs_no_token_of_ours_where_everybody_else_does(
    app: App, cloud: ReplicateServer, prompt: str
) -> None:
    app.runs()  # makes the tables
    request = tokens.NewToken(user="ada", role="admin")
    in_database(app, lambda conn: tokens.issue(conn, request, StatementContext(time.time_ns() // 1000)))
    with serving(app, cloud, hooks=True) as service:
        assert httpx.get(f"{service.address}/runs", timeout=60).status_code == 401
        run = submit(app, prompt)
        prediction = begun(cloud, prompt)
        eventually(lambda: row_of(app, run)["remote_id"])
        assert cloud.call_back(prediction, signature="v1,AAAA")[0] == 403
        assert cloud.call_back(prediction) == (200, {"status": "heard"})
        cloud.finish(prompt)
        assert ended(app, run).status == "SUCCEEDED"
