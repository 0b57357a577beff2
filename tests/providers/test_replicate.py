"""The provider ``replicate`` on a server that speaks its API: one job is one prediction, whatever breaks."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest

from semel import App
from semel.cli import main as semel_command
from semel.errors import IllegalTransition, InvalidRequest
from semel.providers.replicate import MODEL, Replicate
from semel.providers.replicate.service import progress_in
from semel.service import Settings
from semel.service.jobs.configs import Config
from semel.service.state import ServiceState
from support.pages import Browser
from support.replicate import PACE, begun, come_due, ended, failed, row_of, serving, submit
from support.replicate_server import TOKEN, VERSION, ReplicateServer
from support.service import TestServer, app_on
from support.waiting import eventually


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def service(
    request: pytest.FixtureRequest, cloud: ReplicateServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TestServer]:
    """A server that Replicate can call back."""
    with app_on(request, tmp_path_factory.mktemp("service")) as app, serving(app, cloud, hooks=True) as service:
        yield service


def test_a_job_is_one_prediction_and_its_output_is_the_result(
    service: TestServer, cloud: ReplicateServer, prompt: str
) -> None:
    run = submit(service.app, prompt, price_per_second=0.01)
    prediction = begun(cloud, prompt)
    prediction.update(status="processing", logs="10%|█\n  45%|████▌     | 45/100")
    eventually(lambda: service.app.get(run.id).progress == 0.45)
    cloud.finish(prompt, ["https://replicate.delivery/fox.png"])
    done = ended(service.app, run)
    assert (done.status, done.cost) == ("SUCCEEDED", 0.025)
    assert service.app.result(run.id) == {
        "prediction_id": prediction["id"],
        "output": ["https://replicate.delivery/fox.png"],
        "metrics": {"predict_time": 2.5},
    }
    row = row_of(service.app, run)
    assert (row["remote_id"], row["remote_status"], row["config"]) == (prediction["id"], "succeeded", "foxes")
    assert (row["provider"], row["user_id"]) == ("replicate", "ada")
    assert prediction["webhook"] == f"{service.address}/api/cloud/webhooks/replicate/{row['remote_token']}"
    assert (len(cloud.of(prompt)), prediction["input"], prediction["version"]) == (1, {"prompt": prompt}, VERSION)


def test_an_official_model_is_asked_for_by_its_name(service: TestServer, cloud: ReplicateServer, prompt: str) -> None:
    run = submit(service.app, prompt, model="acme/painter")
    assert begun(cloud, prompt)["model"] == "acme/painter"
    cloud.finish(prompt)
    assert ended(service.app, run).status == "SUCCEEDED"


@pytest.mark.parametrize("fault", ["cut", "500 after", "500 before", "garbage", "429"])
@pytest.mark.parametrize("secretive", [False, True], ids=["shown", "hidden"])
def test_a_call_without_a_good_answer_makes_one_prediction(
    service: TestServer, cloud: ReplicateServer, prompt: str, fault: str, secretive: bool
) -> None:
    if secretive:
        cloud.secretive.add(prompt)
    cloud.faults[prompt] = [fault]
    run = submit(service.app, prompt)
    eventually(lambda: row_of(service.app, run).get("remote_id"), "the prediction's id")
    cloud.finish(prompt)
    assert ended(service.app, run).status == "SUCCEEDED"
    assert len(cloud.of(prompt)) == 1


def test_a_call_that_is_refused_for_money_or_the_input_ends_the_run(
    service: TestServer, cloud: ReplicateServer, prompt: str
) -> None:
    cloud.faults[prompt] = ["402"]
    run = submit(service.app, prompt)
    failed(service.app, run, "payment (402)", "You have no credit left.", "billing")
    assert row_of(service.app, run)["remote_status"] == "refused"
    assert cloud.of(prompt) == []
    nameless = submit(service.app, prompt, model="no/such/name")
    failed(service.app, nameless, "refused (404)")


def test_a_token_that_is_not_accepted_is_said_and_never_shown(app: App, cloud: ReplicateServer, prompt: str) -> None:
    with serving(app, cloud, replicate_token="r8_wrong") as service:
        over = failed(service.app, submit(app, prompt), "does not accept the token (401)", "REPLICATE_API_TOKEN")
        logs = " ".join(each.text for each in app.logs(over.id))
    for shown in (over.last_error, over.traceback, logs):
        assert "r8_wrong" not in (shown or "")


def test_replicate_may_be_away_for_a_while(app: App, prompt: str) -> None:
    cloud = ReplicateServer()
    with serving(app, cloud):
        with cloud.away():
            run = submit(app, prompt)
            eventually(lambda: any("cannot be reached" in each.text for each in app.logs(run.id)))
        prediction = begun(cloud, prompt)
        eventually(lambda: row_of(app, run)["remote_status"] == "starting")
        with cloud.away():
            lines = len(list(app.logs(run.id)))
            eventually(lambda: len(list(app.logs(run.id))) > lines)
        cloud.finish(prompt)
        over = ended(app, run)
    cloud.close()
    assert (over.status, over.attempts) == ("SUCCEEDED", 1)
    assert cloud.of(prompt) == [prediction]


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ({"status": "failed", "error": "CUDA out of memory"}, "failed at Replicate: CUDA out of memory"),
        ({"status": "canceled"}, "was cancelled at Replicate"),
        ({"status": "aborted"}, "was aborted at Replicate"),
        ({"status": "succeeded", "output": None, "data_removed": True}, "has removed its output"),
    ],
    ids=lambda end: end.get("status") if isinstance(end, dict) else "",
)
def test_a_prediction_that_came_to_nothing_fails_the_run(
    service: TestServer, cloud: ReplicateServer, prompt: str, end: dict[str, Any], said: str
) -> None:
    run = submit(service.app, prompt)
    begun(cloud, prompt)
    cloud.finish(prompt, **end)
    over = failed(service.app, run, said)
    assert over.attempts == 1
    assert row_of(service.app, run)["remote_status"] == end["status"]


def test_a_prediction_that_replicate_no_longer_knows_is_unknown(
    service: TestServer, cloud: ReplicateServer, prompt: str
) -> None:
    run = submit(service.app, prompt)
    prediction = begun(cloud, prompt)
    eventually(lambda: row_of(service.app, run).get("remote_id"))
    del cloud.predictions[prediction["id"]]
    failed(service.app, run, f"does not know the prediction {prediction['id']}", "unknown")
    assert row_of(service.app, run)["remote_status"] == "unknown"
    assert cloud.of(prompt) == []


def test_a_failed_prediction_is_tried_again_where_the_config_says_so(
    service: TestServer, cloud: ReplicateServer, prompt: str
) -> None:
    run = submit(service.app, prompt, retry=True)
    first = begun(cloud, prompt)
    cloud.finish(prompt, status="failed", error="busy")
    eventually(lambda: service.app.get(run.id).status == "PENDING")
    come_due(service.app, run)
    eventually(lambda: len(cloud.of(prompt)) == 2, "a second prediction")
    cloud.finish(prompt, "at last")
    assert ended(service.app, run).status == "SUCCEEDED"
    assert service.app.result(run.id)["output"] == "at last"
    row = row_of(service.app, run)
    assert row["remote_past"] == first["id"]
    assert [row["remote_id"]] == [each["id"] for each in cloud.of(prompt)[1:]]


def test_a_run_that_is_cancelled_is_cancelled_at_replicate_and_waited_for(
    service: TestServer, cloud: ReplicateServer, prompt: str
) -> None:
    cloud.stubborn.add(prompt)
    run = submit(service.app, prompt)
    prediction = begun(cloud, prompt)
    service.app.cancel(run.id)
    eventually(lambda: f"POST /v1/predictions/{prediction['id']}/cancel" in cloud.calls)
    assert service.app.get(run.id).status == "RUNNING"
    prediction["status"] = "canceled"
    assert ended(service.app, run).status == "CANCELLED"
    assert row_of(service.app, run)["remote_status"] == "canceled"


# Which one is ours?


def test_predictions_like_ours_that_are_not_ours_are_never_taken_for_ours(
    service: TestServer, cloud: ReplicateServer, prompt: str
) -> None:
    """Where Replicate shows whom they call back, it can be told."""
    theirs = {"version": VERSION, "input": {"prompt": prompt}, "webhook": "https://example.com/api/theirs"}
    others = [cloud.add(theirs), cloud.add({**theirs, "webhook": None}, source="web"), cloud.add(theirs)]
    cloud.faults[prompt] = ["cut"]
    run = submit(service.app, prompt)
    eventually(lambda: row_of(service.app, run).get("remote_id"))
    assert row_of(service.app, run)["remote_id"] not in [each["id"] for each in others]
    cloud.finish(prompt)
    assert ended(service.app, run).status == "SUCCEEDED"
    assert len(cloud.of(prompt)) == len(others) + 1


def test_where_it_cannot_be_told_the_run_fails_and_says_so_instead_of_asking_again(
    service: TestServer, cloud: ReplicateServer, prompt: str
) -> None:
    cloud.secretive.add(prompt)
    twin = cloud.add({"version": VERSION, "input": {"prompt": prompt}})
    cloud.faults[prompt] = ["cut"]
    run = submit(service.app, prompt)
    failed(service.app, run, "it is unclear which one", twin["id"], "replicate.com/predictions")
    assert len(cloud.of(prompt)) == 2
    assert row_of(service.app, run)["remote_status"] == "unknown"


def test_a_prediction_whose_data_was_removed_cannot_be_told(
    service: TestServer, cloud: ReplicateServer, prompt: str
) -> None:
    cloud.secretive.update((prompt, None))  # type: ignore[arg-type]
    forgotten = cloud.add({"version": VERSION, "input": {}}, data_removed=True)
    cloud.faults[prompt] = ["500 before"]
    failed(service.app, submit(service.app, prompt), "it is unclear which one", forgotten["id"])
    assert cloud.of(prompt) == []
    del cloud.predictions[forgotten["id"]]
    cloud.secretive.discard(None)  # type: ignore[arg-type]


def test_a_token_among_the_inputs_tells_for_sure(service: TestServer, cloud: ReplicateServer, prompt: str) -> None:
    cloud.secretive.add(prompt)
    cloud.add({"version": VERSION, "input": {"prompt": prompt, "job": "another"}})
    cloud.faults[prompt] = ["cut"]
    run = submit(service.app, prompt, token_input="job")
    eventually(lambda: row_of(service.app, run).get("remote_id"))
    row = row_of(service.app, run)
    assert cloud.predictions[row["remote_id"]]["input"]["job"] == row["remote_token"]
    cloud.finish(prompt)
    assert ended(service.app, run).status == "SUCCEEDED"
    assert len(cloud.of(prompt)) == 2


def test_two_jobs_that_ask_for_the_same_have_one_prediction_each(
    service: TestServer, cloud: ReplicateServer, prompt: str
) -> None:
    cloud.secretive.add(prompt)
    cloud.faults[prompt] = ["cut", "500 after"]
    pair = []
    for _ in range(2):  # at once, neither might know which is its own, and would say so
        run = submit(service.app, prompt)
        eventually(lambda run=run: row_of(service.app, run).get("remote_id"))
        pair.append(run)
    for each in cloud.of(prompt):
        each.update(status="succeeded", output="same")
    assert [ended(service.app, run).status for run in pair] == ["SUCCEEDED"] * 2
    assert {service.app.result(run.id)["prediction_id"] for run in pair} == {each["id"] for each in cloud.of(prompt)}
    assert len(cloud.of(prompt)) == 2


def test_ours_is_found_on_a_later_page_and_old_ones_are_not_looked_through(app: App, prompt: str) -> None:
    cloud = ReplicateServer()
    cloud.page = 3
    long_ago = (datetime.now(UTC) - timedelta(days=1)).isoformat()
    for _ in range(30):
        cloud.add({"version": VERSION, "input": {"prompt": prompt}}, created_at=long_ago)
    cloud.faults[prompt] = ["cut"]
    with serving(app, cloud):
        run = submit(app, prompt)
        eventually(lambda: len(cloud.of(prompt)) == 31)
        ours = cloud.of(prompt)[-1]
        for _ in range(4):
            cloud.add({"version": VERSION, "input": {"prompt": "something else"}})
        eventually(lambda: row_of(app, run).get("remote_id"))
        looks = cloud.calls.count("GET /v1/predictions")
        cloud.finish(prompt)
        assert ended(app, run).status == "SUCCEEDED"
    cloud.close()
    assert row_of(app, run)["remote_id"] == ours["id"]
    assert looks <= 3 * (1 + PACE.settle / PACE.poll)


# Orders


def provider(token: str | None = TOKEN) -> Replicate:
    made = Replicate()
    made.install(ServiceState(App("sqlite:///semel.db"), Settings(replicate_token=token)))
    return made


def test_a_config_becomes_a_run_of_the_services_own_queue() -> None:
    config = Config(
        name="foxes",
        parameters={"prompt": "a fox"},
        priority=3,
        cost=1.5,
        providers={"replicate": {"version": VERSION, "retry": True, "price_per_second": 0.1}},
    )
    order = provider().order(config)
    assert (order.model, order.queue, order.priority, order.cost) == (MODEL, "semel-service", 3, 1.5)
    assert order.parameters == {
        "config": "foxes",
        "version": VERSION,
        "input": {"prompt": "a fox"},
        "retry": True,
        "price_per_second": 0.1,
    }


def test_without_a_token_an_order_says_which_variable_to_set() -> None:
    config = Config(name="foxes", providers={"replicate": {"version": VERSION}})
    with pytest.raises(InvalidRequest, match="REPLICATE_API_TOKEN"):
        provider(None).order(config)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "version"),
        ({"version": VERSION, "model": "a/b"}, "not both"),
        ({"model": "../../v1/account"}, "does not fit"),
        ({"version": "a b"}, "does not fit"),
        ({"version": VERSION, "inputs": {}}, "inputs"),
        ({"version": VERSION, "price_per_second": -1}, "price_per_second"),
    ],
)
def test_a_config_that_cannot_work_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        provider().order(Config(name="foxes", providers={"replicate": options}))


def test_a_config_with_data_is_refused_because_replicate_could_not_see_it() -> None:
    with pytest.raises(InvalidRequest, match="has data"):
        provider().order(Config(name="foxes", data="/data", providers={"replicate": {"version": VERSION}}))


def test_a_job_is_submitted_over_http_and_shows_what_became_of_it(
    service: TestServer, cloud: ReplicateServer, prompt: str
) -> None:
    with httpx.Client(base_url=service.address, timeout=60) as client:
        body = {"providers": {"replicate": {"version": VERSION, "input": {"prompt": prompt}}}}
        assert client.put("/api/cloud/configs/over-http", json=body).is_success
        asked = {"config_name_to_load": "over-http", "idempotency_key": "ci-1"}
        first, again = (
            client.post("/api/cloud/jobs/submit", params={"provider": "replicate"}, json=asked).json() for _ in range(2)
        )
        assert (first["success"], first["job_id"]) == (True, again["job_id"])
        begun(cloud, prompt)
        cloud.finish(prompt, "over")
        eventually(lambda: client.get(f"/api/cloud/jobs/{first['job_id']}").json()["status"] == "completed")
        assert client.get(f"/runs/{first['job_id']}/result").json()["output"] == "over"
    assert len(cloud.of(prompt)) == 1


@pytest.mark.parametrize(
    ("logs", "share"),
    [
        (None, None),
        ("", None),
        ("loading", None),
        ("  5%|▌ | 1/20\n 35%|███ | 7/20", 0.35),
        ("at 12.5% now", 0.125),
        ("used 250% of it", None),
    ],
)
def test_progress_is_read_from_the_logs_where_it_can_be_told(logs: str | None, share: float | None) -> None:
    assert progress_in(logs) == share


def test_a_job_at_a_provider_is_retried_by_no_entrance(
    service: TestServer, cloud: ReplicateServer, prompt: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = submit(service.app, prompt)
    begun(cloud, prompt)
    cloud.finish(prompt, status="failed", error="no memory")
    failed(service.app, run)
    said = "a job at a provider is not retried"
    with pytest.raises(IllegalTransition, match=said):
        service.app.retry(run.id)
    assert semel_command(["retry", run.id, "--server", service.address]) != 0
    assert said in capsys.readouterr().err
    with httpx.Client(base_url=service.address, follow_redirects=True, timeout=60) as client:
        for key in ({}, {"Idempotency-Key": "again"}):
            refused = client.post(f"/runs/{run.id}/retry", headers=key)
            assert (refused.status_code, refused.json()["error_code"]) == (409, "ILLEGAL_TRANSITION")
            assert said in refused.json()["detail"]
        somebody = Browser(client)
        offered = [each["action"] for each in somebody.open(f"/ui/runs/{run.id}").one(id="run-state").all("form")]
        assert not offered
        alone = somebody.send(f"/ui/runs/{run.id}/retry")
        assert (alone.status, said in alone.text) == (409, True)
        assert said in somebody.send("/ui/runs/retry", {"run": [run.id]}).text
    assert [each.id for each in service.app.runs(model=MODEL, limit=1000).runs if each.retry_of == run.id] == []
    assert len(cloud.of(prompt)) == 1
