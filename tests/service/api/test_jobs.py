"""Jobs over real HTTP, on SQLite and PostgreSQL: submitted once, listed, cancelled, and what they cost."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from semel import App, JobStore, Quota, UnknownModel
from semel.client import Client
from support.jobs import SUBMIT, add_models, job, job_in, runs_of, submit, write_config
from support.service import TestServer, issue_token, make_app

HOUR_US = 3600 * 1_000_000


@pytest.fixture(params=["sqlite", "postgres"])
def app(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[App]:
    app = make_app(request.getfixturevalue(f"migrated_{request.param}_url"), tmp_path)
    add_models(app)
    yield app
    app.close()


@pytest.fixture
def configs(tmp_path: Path) -> Path:
    folder = tmp_path / "configs"
    write_config(folder, "adding", model="add", parameters={"a": 1}, cost=2)
    write_config(folder, "alike", model="add", parameters={"a": 1}, cost=2)
    write_config(folder, "failing", model="fails")
    write_config(folder, "pretended", model="add", providers={"replicate": {"simulate": True}})
    write_config(folder, "modelless", providers={"replicate": {"version": "abc"}})
    return folder


def test_a_job_is_a_run_of_its_configs_model(client: httpx.Client, app: App) -> None:
    said = submit(client, "adding", "k", tracker_run_name="gh-17")
    assert said == {
        "success": True,
        "job_id": said["job_id"],
        "status": "queued",
        "data_uploaded": False,
        "idempotent_hit": False,
    }
    waits = job(client, said["job_id"])
    assert (waits["status"], waits["result"], waits["upload"], waits["error"]) == ("queued", None, None, None)
    with app.working(processes=0):
        done = job_in(client, said["job_id"], "completed")
    assert client.get(done["result"]).json() == 3
    named = {"provider": "local", "config_name": "adding", "tracker_run_name": "gh-17", "user": "local", "cost": 2.0}
    assert named.items() <= done.items()
    assert submit(client, "adding", "k") == {**said, "status": "completed", "idempotent_hit": True}


def test_a_hundred_submissions_with_one_key_make_one_job(client: httpx.Client, service: TestServer) -> None:
    with ThreadPoolExecutor(10) as threads:
        answers = list(threads.map(lambda _: submit(client, "adding", "gh-owner/repo-sha"), range(100)))
    assert all(answer["success"] for answer in answers)
    assert len({answer["job_id"] for answer in answers}) == 1
    assert [answer["idempotent_hit"] for answer in answers].count(False) == 1
    assert len(runs_of(service)) == 1


def test_without_a_key_every_submission_is_a_job_of_its_own(client: httpx.Client) -> None:
    assert submit(client, "adding")["job_id"] != submit(client, "adding")["job_id"]


def test_a_key_is_kept_for_as_long_as_the_submission_says(client: httpx.Client, app: App) -> None:
    submit(client, "adding", "two days", ttl_hours=48)
    submit(client, "adding", "a day")
    with closing(JobStore(app.url)) as store:
        kept = [store.get_idempotency_key(key, user_id="local") for key in ("two days", "a day")]
    assert [entry and entry.expires_us - entry.created_us for entry in kept] == [48 * HOUR_US, 24 * HOUR_US]
    with closing(Client(str(client.base_url))) as remote:
        assert remote.submit_job("adding", provider="local", idempotency_key="a minute", ttl_hours=1 / 60).job_id


def test_an_answer_says_in_headers_what_the_middleware_would(client: httpx.Client) -> None:
    body = {"config_name_to_load": "adding", "idempotency_key": "k", "ttl_hours": 2}
    first, again = client.post(SUBMIT, json=body), client.post(SUBMIT, json=body)
    left = parsedate_to_datetime(first.headers["Idempotency-Expires"]) - datetime.now(UTC)
    assert timedelta(hours=1.9) < left <= timedelta(hours=2)
    assert ("Idempotent-Replayed" in first.headers, again.headers["Idempotent-Replayed"]) == (False, "true")
    assert again.headers["Idempotency-Expires"] == first.headers["Idempotency-Expires"]
    without = client.post(SUBMIT, json={"config_name_to_load": "adding"})
    assert not {"idempotency-expires", "idempotent-replayed"} & set(without.headers)
    other = client.post(SUBMIT, json={"config_name_to_load": "failing", "idempotency_key": "k"}).json()
    assert (other["success"], "'k'" in other["error"]) == (False, True), "a refusal names the key"


def test_a_key_that_cannot_be_one_creates_nothing(client: httpx.Client) -> None:
    for key in ("", "k" * 256, "line\nbreak", "nul\0", "\x7f", "\x9f"):
        said = submit(client, "adding", key)
        assert said["success"] is False, key
        assert "idempotency_key" in said["error"]
    assert client.get("/api/cloud/jobs").json()["jobs"] == []


def test_a_key_may_have_255_characters(client: httpx.Client) -> None:
    key = "gh-owner/repo-ñ-" + "k" * 239
    assert submit(client, "adding", key)["success"]
    assert submit(client, "adding", key)["idempotent_hit"]


def test_the_key_may_be_a_header_unless_the_body_says_otherwise(client: httpx.Client) -> None:
    def send(header: str, **more: str) -> httpx.Response:
        body = {"config_name_to_load": "adding", **more}
        return client.post(SUBMIT, json=body, headers={"Idempotency-Key": header})

    first = send("k/1").json()
    assert send('"k/1"').json() == {**first, "idempotent_hit": True}
    assert send("k/1", idempotency_key="k/1").json()["job_id"] == first["job_id"]
    refused = send("k/1", idempotency_key="k/2")
    assert refused.status_code == 400
    assert refused.headers["content-type"] == "application/problem+json"
    assert len(client.get("/api/cloud/jobs").json()["jobs"]) == 1


def test_a_key_stands_for_one_config_and_one_provider(client: httpx.Client) -> None:
    first = submit(client, "adding", "k", tracker_run_name="build-1")
    for config, provider in (("alike", "local"), ("pretended", "replicate")):
        said = submit(client, config, "k", provider=provider)
        assert said["success"] is False
        assert "key reused" in said["error"]
    assert submit(client, "adding", "k", tracker_run_name="build-2")["job_id"] == first["job_id"]
    run = client.post("/runs", json={"model": "add", "parameters": {"a": 1}, "idempotency_key": "k"})
    assert run.status_code == 409


def test_a_key_finds_its_job_whatever_became_of_the_config(client: httpx.Client, configs: Path) -> None:
    first = submit(client, "adding", "k")
    write_config(configs, "adding", model="add", parameters={"a": 5})
    assert submit(client, "adding", "k")["job_id"] == first["job_id"]
    (configs / "adding.json").write_text("{")
    assert submit(client, "adding", "k")["job_id"] == first["job_id"]
    (configs / "adding.json").unlink()
    assert submit(client, "adding", "k") == {**first, "idempotent_hit": True}
    assert submit(client, "adding", "another") == {"success": False, "error": "Unknown config: adding"}


def test_what_cannot_be_had_is_said_with_a_status_below_400(client: httpx.Client) -> None:
    said = submit(client, "adding", provider="aws")
    assert said == {"success": False, "error": "Unknown provider: aws"}
    assert submit(client, "nowhere") == {"success": False, "error": "Unknown config: nowhere"}
    assert "token" in submit(client, "modelless", provider="replicate")["error"].lower()
    assert "has no model" in submit(client, "modelless")["error"]
    assert client.get("/api/cloud/jobs").json()["jobs"] == []


def test_a_config_that_says_so_is_simulated_by_our_own_workers(client: httpx.Client, app: App) -> None:
    said = submit(client, "pretended", provider="replicate")
    with app.working(processes=0):
        done = job_in(client, said["job_id"], "completed")
    assert (done["provider"], done["remote_status"], done["model"]) == ("replicate", "simulated", "add")


def test_a_quota_denies_and_warns_in_the_documents_words(client: httpx.Client, app: App) -> None:
    app.set_quota("local", Quota(max_concurrent=2))
    submit(client, "adding", "1")
    assert submit(client, "adding", "2")["quota_warnings"] == ["2 of 2 concurrent jobs in use"]
    denied = {"success": False, "error": "Quota exceeded: Maximum 2 concurrent jobs allowed"}
    assert submit(client, "adding", "3") == denied
    assert submit(client, "adding", "1")["idempotent_hit"]
    assert len(client.get("/api/cloud/jobs").json()["jobs"]) == 2


def test_what_was_spent_is_shown_against_the_limits(client: httpx.Client, app: App) -> None:
    app.set_quota("local", Quota(cost_daily=5, cost_monthly=100))
    assert "cost_limit_warning" not in submit(client, "adding")
    assert submit(client, "adding")["cost_limit_warning"] == "$4.00 spent of $5.00 daily limit."
    said = "Cost limit exceeded: $4.00 spent of $5.00 daily limit. This job would cost $2.00."
    assert submit(client, "adding")["error"] == said
    status = client.get("/api/cloud/cost-limit/status").json()
    limits = {each["period"]: each for each in status["limits"]}
    assert (status["user"], status["action"], status["can_submit"]) == ("local", "block", True)
    day = {"limit": 5.0, "spent": 4.0, "percent": 80.0, "exceeded": False, "warning": True}
    assert day.items() <= limits["daily"].items()
    assert (limits["monthly"]["percent"], limits["weekly"]["limit"]) == (4.0, None)
    app.set_quota("local", Quota(cost_daily=4, action="warn"))
    assert submit(client, "adding")["cost_limit_warning"] == "$6.00 spent of $4.00 daily limit."
    status = client.get("/api/cloud/cost-limit/status").json()
    assert (status["can_submit"], status["limits"][0]["exceeded"]) == (True, True)


def test_jobs_are_listed_page_by_page_and_by_what_they_are(client: httpx.Client, app: App) -> None:
    ids = [submit(client, config, provider=provider)["job_id"] for config, provider in MIXED]
    client.post(f"/api/cloud/jobs/{ids[0]}/cancel")
    with app.working(processes=0):
        job_in(client, ids[3], "completed")
        job_in(client, ids[2], "failed")

    def listed(**params: Any) -> list[str]:
        found = client.get("/api/cloud/jobs", params=params).json()["jobs"]
        return [ids.index(each["job_id"]) for each in found]

    assert listed() == [3, 2, 1, 0]
    assert listed(status="cancelled") == [0]
    assert listed(status="failed") == [2]
    assert listed(status="completed") == [3, 1]
    assert listed(status="queued") == listed(status="running") == listed(status="uploading") == []
    assert listed(config="adding") == [1, 0]
    assert listed(provider="replicate", status="completed") == [3]
    page = client.get("/api/cloud/jobs", params={"limit": 3}).json()
    assert listed(limit=3, cursor=page["next"]) == [0]
    assert client.get("/api/cloud/jobs", params={"cursor": "?"}).status_code == 400
    assert client.get("/api/cloud/jobs", params={"status": "odd"}).status_code == 400
    assert "it never works" in job(client, ids[2])["error"]


MIXED = [("adding", "local"), ("adding", "local"), ("failing", "local"), ("pretended", "replicate")]


def test_a_job_that_waits_is_cancelled_once_and_one_that_is_over_is_not(client: httpx.Client, app: App) -> None:
    first, second = submit(client, "adding")["job_id"], submit(client, "adding")["job_id"]
    for _ in range(2):
        answer = client.post(f"/api/cloud/jobs/{first}/cancel")
        assert (answer.status_code, answer.json()["status"]) == (200, "cancelled")
    assert answer.json()["error"] == "cancelled by request"
    with app.working(processes=0):
        job_in(client, second, "completed")
    assert client.post(f"/api/cloud/jobs/{second}/cancel").status_code == 409
    assert client.post("/api/cloud/jobs/nothing/cancel").status_code == 404


def test_submitters_see_their_own_jobs_and_tenants_nothing_of_each_other(service: TestServer, app: App) -> None:
    with (
        service.client(issue_token(app, "ann")) as ann,
        service.client(issue_token(app, "bob")) as bob,
        service.client(issue_token(app, "op", "operator")) as operator,
        service.client(issue_token(app, "ann", "admin", "other")) as stranger,
    ):
        mine = submit(ann, "adding", "k")["job_id"]
        assert submit(bob, "adding", "k")["job_id"] != mine
        assert submit(stranger, "adding", "k")["job_id"] != mine
        for other in (bob, stranger):
            assert other.get(f"/api/cloud/jobs/{mine}").status_code == 404
            assert other.post(f"/api/cloud/jobs/{mine}/cancel").status_code == 404
            assert len(other.get("/api/cloud/jobs").json()["jobs"]) == 1
        assert bob.get("/api/cloud/jobs", params={"user": "ann"}).status_code == 403
        assert bob.get("/api/cloud/cost-limit/status", params={"user": "ann"}).status_code == 403
        assert [each["user"] for each in operator.get("/api/cloud/jobs").json()["jobs"]] == ["bob", "ann"]
        spent = operator.get("/api/cloud/cost-limit/status", params={"user": "ann"}).json()["limits"][0]["spent"]
        assert spent == 2.0
        assert operator.post(f"/api/cloud/jobs/{mine}/cancel").json()["status"] == "cancelled"


def test_nobody_submits_the_services_own_models(client: httpx.Client, app: App, configs: Path) -> None:
    parameters = {"job_id": "x"}
    assert client.post("/runs", json={"model": "semel.upload", "parameters": parameters}).status_code == 422
    with pytest.raises(UnknownModel, match="the service's own"):
        app.submit("semel.upload", parameters)
    write_config(configs, "sly", model="semel.upload", parameters=parameters)
    write_config(configs, "slyer", model="add", queue="semel-service")
    for config in ("sly", "slyer"):
        assert "reserved for the service" in submit(client, config)["error"]


def test_what_is_purged_is_no_job_any_more(client: httpx.Client, app: App) -> None:
    said, named = submit(client, "adding"), submit(client, "adding", "k")
    with app.working(processes=0):
        for each in (said, named):
            job_in(client, each["job_id"], "completed")
    assert app.purge(0) == 1
    assert [each["job_id"] for each in client.get("/api/cloud/jobs").json()["jobs"]] == [named["job_id"]]
    assert submit(client, "adding", "k") == {**named, "status": "completed", "idempotent_hit": True}
