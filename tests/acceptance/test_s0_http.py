"""S0 over real HTTP: the jobs API as the document has it, with the demo's configs, on both databases.

The document's bash script and its step of GitHub Actions lie unchanged in documents/, and are run by a real bash.
"""

import json
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import httpx
import pytest

from semel import App, Quota, demo
from semel.service import Settings
from support import servers
from support.jobs import SUBMIT, job, job_in, submit
from support.service import PATIENCE
from support.service import TestServer as Served
from support.service import make_app as made_app
from support.service import serve as served

DOCUMENTS = Path(__file__).parent / "documents"
CONFIGS = ["my-training-config", "production", "production-lora", "flux-lora-v1"]
JQ = [".success", ".job_id // empty", ".job_id", ".idempotent_hit // false", ".idempotent_hit", ".error"]


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def service(
    request: pytest.FixtureRequest, postgres_server: servers.Postgres, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """The demo's models and configs, as `semel serve` has them."""
    folder = tmp_path_factory.mktemp("service")
    url = postgres_server.database() if request.param == "postgres" else f"sqlite:///{folder / 'semel.db'}"
    app = made_app(url, folder)
    app.model("train_lora_v1", isolation="thread")(demo.train_lora)
    with served(app) as service:
        yield service
    app.close()
    if request.param == "postgres":
        postgres_server.drop(url)


@pytest.fixture
def app(service: Served) -> App:
    return service.app


@pytest.fixture
def client(service: Served) -> Iterator[httpx.Client]:
    """A client; what it left waiting is cancelled after the test, and its quota taken away."""
    with service.client() as client:
        yield client
        service.app.set_quota("local", None)
        for status in ("uploading", "queued"):
            for each in client.get("/api/cloud/jobs", params={"status": status}).json()["jobs"]:
                client.post(f"/api/cloud/jobs/{each['job_id']}/cancel")


def new_key() -> str:
    return f"ci-build-{uuid4()}"


def jobs_there(client: httpx.Client) -> set[str]:
    found = client.get("/api/cloud/jobs", params={"limit": 1000}).json()["jobs"]
    return {each["job_id"] for each in found}


def test_s0_1_a_job_is_posted_as_json_and_the_port_is_8001(client: httpx.Client) -> None:
    body = f'{{"config_name_to_load": "my-training-config", "idempotency_key": "{new_key()}"}}'
    for provider in ("replicate", "local"):
        path = f"{SUBMIT}?provider={provider}"
        answer = client.post(path, content=body.replace("ci", provider), headers={"Content-Type": "application/json"})
        assert (answer.status_code, answer.json()["success"]) == (200, True)
    assert client.post(SUBMIT, content=body, headers={"Content-Type": "text/plain"}).status_code == 415
    assert Settings().port == 8001


def test_s0_2_the_body_takes_config_key_and_tracker_name(client: httpx.Client) -> None:
    key = new_key()
    said = submit(client, "production", key, tracker_run_name="gh-17", provider="replicate")
    view = job(client, said["job_id"])
    assert (view["config_name"], view["idempotency_key"], view["tracker_run_name"]) == ("production", key, "gh-17")


def test_s0_3_the_key_is_optional_and_may_be_a_header(client: httpx.Client) -> None:
    key = new_key()
    assert submit(client, "production")["job_id"] != submit(client, "production")["job_id"]
    first = submit(client, "production", key)
    body = {"config_name_to_load": "production"}
    again = client.post(SUBMIT, json=body, headers={"Idempotency-Key": key}).json()
    assert (again["job_id"], again["idempotent_hit"]) == (first["job_id"], True)
    before = jobs_there(client)
    both = client.post(SUBMIT, json={**body, "idempotency_key": new_key()}, headers={"Idempotency-Key": key})
    assert both.status_code == 400
    assert jobs_there(client) == before


def test_s0_4_a_new_job_is_uploading_with_data_and_queued_without(client: httpx.Client) -> None:
    with_data = submit(client, "my-training-config", new_key(), provider="replicate")
    assert with_data == {
        "success": True,
        "job_id": with_data["job_id"],
        "status": "uploading",
        "data_uploaded": True,
        "idempotent_hit": False,
    }
    without = submit(client, "production", new_key(), provider="replicate")
    assert (without["status"], without["data_uploaded"]) == ("queued", False)


def test_s0_4_5_a_duplicate_answers_with_the_current_status(client: httpx.Client, app: App) -> None:
    key = new_key()
    first = submit(client, "my-training-config", key, provider="replicate")
    job_in(client, first["job_id"], "queued")
    again = submit(client, "my-training-config", key, provider="replicate")
    assert again == {**first, "status": "queued", "idempotent_hit": True}
    with app.working(processes=0):
        job_in(client, first["job_id"], "running")
        assert submit(client, "my-training-config", key, provider="replicate")["status"] in ("running", "completed")
        done = job_in(client, first["job_id"], "completed")
    assert client.get(done["result"]).json()["files"] == 3
    again = submit(client, "my-training-config", key, provider="replicate")
    assert again == {**first, "status": "completed", "idempotent_hit": True}


def test_s0_6_after_a_lost_response_the_original_job_is_found(client: httpx.Client, service: Served) -> None:
    parts = urlsplit(service.address)
    for _ in range(10):
        before = jobs_there(client)
        key = new_key()
        body = json.dumps({"config_name_to_load": "production", "idempotency_key": key}).encode()
        fields = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        head = f"POST {SUBMIT} HTTP/1.1\r\n{fields}"
        with socket.create_connection((parts.hostname, parts.port), PATIENCE) as lost:  # type: ignore[arg-type]
            lost.sendall(head.encode() + b"\r\n\r\n" + body)
        answers = [submit(client, "production", key) for _ in range(2)]
        assert jobs_there(client) - before == {answers[0]["job_id"]} == {answers[1]["job_id"]}
        assert answers[1]["idempotent_hit"]


def test_s0_7_a_bad_key_is_a_clear_error_and_creates_nothing(client: httpx.Client) -> None:
    before = jobs_there(client)
    reasons = {
        "": "empty",
        "k" * 256: "256 characters",
        "k" * 5000: "5000 characters",
        "a\nb": "control",
        "a\0b": "control",
    }
    for key, reason in reasons.items():
        said = submit(client, "production", key)
        assert said["success"] is False
        assert reason in said["error"]
    assert jobs_there(client) == before
    assert submit(client, "production", new_key().ljust(255, "x"))["success"]


def test_s0_8_keys_with_slashes_work(client: httpx.Client) -> None:
    for place in ("gh-owner/repo", "github-owner/repo", "gitlab-group/sub/project"):
        key = f"{place}-{uuid4()}"
        first = submit(client, "production", key)
        assert submit(client, "production", key) == {**first, "idempotent_hit": True}


def test_s0_17_a_denial_is_in_the_documents_words(client: httpx.Client, app: App) -> None:
    app.set_quota("local", Quota(max_concurrent=5))
    said = [submit(client, "production", new_key()) for _ in range(6)]
    assert [each["success"] for each in said] == [True] * 5 + [False]
    assert said[5] == {"success": False, "error": "Quota exceeded: Maximum 5 concurrent jobs allowed"}


def test_s0_28_29_denials_of_quota_and_cost_are_told_apart(client: httpx.Client, app: App) -> None:
    app.set_quota("local", Quota(max_concurrent=0))
    quota = submit(client, "production")["error"]
    app.set_quota("local", Quota(cost_monthly=0.5))
    cost = submit(client, "production")["error"]
    assert "Quota exceeded" in quota
    assert "Cost limit" not in quota
    assert "Cost limit" in cost
    assert "Quota exceeded" not in cost


def test_s0_30_a_success_may_carry_warnings(client: httpx.Client, app: App) -> None:
    plain = submit(client, "production")
    assert plain.keys() & {"quota_warnings", "cost_limit_warning"} == set()
    app.set_quota("local", Quota(max_concurrent=2, cost_yearly=1_000_000))
    warned = submit(client, "production")
    assert warned["quota_warnings"] == ["2 of 2 concurrent jobs in use"]
    spent = client.get("/api/cloud/cost-limit/status").json()["limits"][3]["spent"]
    app.set_quota("local", Quota(cost_yearly=spent + 1))
    assert submit(client, "production")["cost_limit_warning"].endswith("yearly limit.")


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment for scripts: nobody sleeps, and where there is no jq, one stands in."""
    folder = tmp_path_factory.mktemp("tools")
    _tool(folder / "sleep", f'#!/bin/sh\necho "$1" >> "{folder}/slept"\n')
    if shutil.which("jq") is None:
        print("!!! there is no jq on this machine: a stand-in of ours runs instead of it !!!", file=sys.__stderr__)
        _tool(folder / "jq", f'#!/bin/sh\nexec "{sys.executable}" "{DOCUMENTS / "jq_stand_in.py"}" "$@"\n')
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "HOME": str(folder), "SLEPT": str(folder / "slept")}


def _tool(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def run(script: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", *script], env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
    )


def script(service: Served, tools: dict[str, str], *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """The document's bash script against our server."""
    environment = {**tools, "SIMPLETUNER_URL": service.address, **more}
    return run([str(DOCUMENTS / "submit_job.sh"), *arguments], environment)


def test_s0_32_the_documents_bash_script_runs_unchanged(
    service: Served, client: httpx.Client, tools: dict[str, str]
) -> None:
    where = {"GITHUB_SHA": uuid4().hex, "GITHUB_REPOSITORY": "owner/repo"}
    first, again = script(service, tools, **where), script(service, tools, **where)
    assert (first.returncode, again.returncode) == (0, 0), first.stdout + first.stderr
    job_id = re.search(r"^JOB_ID=(\S+)$", first.stdout, re.MULTILINE)
    assert job_id
    assert f"Created new job: {job_id[1]}" in first.stdout
    assert f"Matched existing job: {job_id[1]}" in again.stdout
    assert again.stdout.endswith(f"JOB_ID={job_id[1]}\n")
    view = job(client, job_id[1])
    assert (view["config_name"], view["provider"]) == ("production-lora", "replicate")
    named = script(service, tools, "my-training-config", CI_COMMIT_SHA=uuid4().hex, CI_PROJECT_PATH="group/sub/project")
    assert named.returncode == 0
    by_hand = script(service, tools, "flux-lora-v1")
    assert by_hand.returncode == 0
    assert "Using idempotency key: manual-" in by_hand.stdout


def test_s0_32_33_the_script_ends_at_once_when_the_quota_is_used_up(
    service: Served, client: httpx.Client, app: App, tools: dict[str, str]
) -> None:
    app.set_quota("local", Quota(max_concurrent=0))
    denied = script(service, tools)
    assert denied.returncode == 1
    assert "Quota exceeded: Quota exceeded: Maximum 0 concurrent jobs allowed" in denied.stdout
    assert denied.stdout.count("Attempt ") == 1
    app.set_quota("local", None)
    unknown = script(service, tools, "no-such-config")
    assert unknown.returncode == 1
    assert unknown.stdout.endswith("Failed: Unknown config: no-such-config\n")


def test_s0_32_the_script_tries_three_times_when_nobody_answers(tools: dict[str, str], service: Served) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    slept = Path(tools["SLEPT"])
    slept.unlink(missing_ok=True)
    failed = script(service, tools, SIMPLETUNER_URL=f"http://127.0.0.1:{port}")
    assert (failed.returncode, failed.stdout.count("Attempt ")) == (1, 3)
    assert slept.read_text().split() == ["2", "4"]


def test_s0_33_curl_f_gets_the_denial(service: Served, client: httpx.Client, app: App) -> None:
    app.set_quota("local", Quota(max_concurrent=0))
    body = '{"config_name_to_load": "production"}'
    command = ["curl", "-sf", "-X", "POST", f"{service.address}{SUBMIT}", "-H", "Content-Type: application/json"]
    ended = subprocess.run([*command, "-d", body], capture_output=True, timeout=PATIENCE, check=False)
    assert ended.returncode == 0
    assert json.loads(ended.stdout)["success"] is False
    nonsense = subprocess.run([*command, "-d", "{"], capture_output=True, timeout=PATIENCE, check=False)
    assert nonsense.returncode == 22


def github_step(output: Path, tools: dict[str, str], url: str, **github: str) -> subprocess.CompletedProcess[str]:
    """Run the step as a runner of GitHub does: with its expressions filled in, by `bash -e` from a file."""
    document = (DOCUMENTS / "github_actions.yml").read_text()
    shell = textwrap.dedent(document.partition("run: |\n")[2])
    filled = re.sub(r"\$\{\{ github\.(\w+) \}\}", lambda found: github[found[1]], shell)
    assert "${{" not in filled
    file = output.with_name("step.sh")
    file.write_text(filled)
    return run(["-e", str(file)], {**tools, "SIMPLETUNER_URL": url, "GITHUB_OUTPUT": str(output)})


def test_s0_34_the_documents_github_step_runs_unchanged(
    service: Served, client: httpx.Client, app: App, tools: dict[str, str], tmp_path: Path
) -> None:
    output = tmp_path / "output"
    commit = {"repository": "owner/repo", "sha": uuid4().hex}
    first = github_step(output, tools, service.address, **commit, run_number="17")
    assert first.returncode == 0, first.stdout + first.stderr
    job_id = output.read_text().removeprefix("job_id=").strip()
    view = job(client, job_id)
    assert (view["config_name"], view["tracker_run_name"]) == ("production", "gh-17")
    assert view["idempotency_key"] == f"gh-owner/repo-{commit['sha']}"
    again = github_step(output, tools, service.address, **commit, run_number="18")
    assert "::notice::Matched existing job" in again.stdout
    assert output.read_text() == f"job_id={job_id}\n" * 2
    app.set_quota("local", Quota(max_concurrent=0))
    denied = github_step(output, tools, service.address, repository="owner/repo", sha=uuid4().hex, run_number="19")
    assert denied.returncode == 1
    said = "::error::Job submission failed: Quota exceeded: Maximum 0 concurrent jobs allowed"
    assert said in denied.stdout


@pytest.mark.parametrize(
    "said",
    [
        {"success": True, "job_id": "x", "idempotent_hit": True},
        {"success": True, "job_id": "x", "idempotent_hit": False},
        {"success": False, "error": 'it said "no"'},
    ],
)
def test_s0_32_34_the_stand_in_for_jq_says_what_is_expected(said: dict[str, Any]) -> None:
    """And what jq says, where there is one."""
    expected = {
        ".success": json.dumps(said["success"]),
        ".job_id // empty": said.get("job_id"),
        ".job_id": said.get("job_id", "null"),
        ".idempotent_hit // false": json.dumps(said.get("idempotent_hit", False)),
        ".idempotent_hit": json.dumps(said.get("idempotent_hit")),
        ".error": said.get("error", "null"),
    }
    commands = [[sys.executable, str(DOCUMENTS / "jq_stand_in.py")]] + [["jq"]] * bool(shutil.which("jq"))
    for expression in JQ:
        for command in commands:
            done = subprocess.run(
                [*command, "-r", expression], input=json.dumps(said), capture_output=True, text=True, check=True
            )
            wanted = expected[expression]
            assert done.stdout == ("" if wanted is None else f"{wanted}\n"), (command, expression)


def test_s0_38_unknown_configs_and_providers_are_named(client: httpx.Client) -> None:
    assert submit(client, "nowhere") == {"success": False, "error": "Unknown config: nowhere"}
    assert submit(client, "production", provider="aws") == {"success": False, "error": "Unknown provider: aws"}
    listed = [each["name"] for each in client.get("/api/cloud/configs").json()]
    assert listed == sorted(CONFIGS)
    for config in CONFIGS:
        assert submit(client, config, new_key(), provider="replicate")["success"]


@pytest.mark.parametrize("period", ["daily", "weekly", "monthly", "yearly"])
def test_s0_39_a_cost_limit_blocks_or_warns(client: httpx.Client, app: App, period: str) -> None:
    places = ["daily", "weekly", "monthly", "yearly"]
    spent = client.get("/api/cloud/cost-limit/status").json()["limits"][places.index(period)]["spent"]
    limit = spent + 1.5
    app.set_quota("local", Quota(**{f"cost_{period}": limit}))  # type: ignore[arg-type]
    said = submit(client, "production")
    if spent + 1 >= 0.8 * limit:
        assert said["cost_limit_warning"] == f"${spent + 1:.2f} spent of ${limit:.2f} {period} limit."
    else:
        assert "cost_limit_warning" not in said
    denied = submit(client, "production")
    assert denied == {
        "success": False,
        "error": f"Cost limit exceeded: ${spent + 1:.2f} spent of ${limit:.2f} {period} limit. "
        "This job would cost $1.00.",
    }
    app.set_quota("local", Quota(action="warn", **{f"cost_{period}": limit}))  # type: ignore[arg-type]
    warned = submit(client, "production")
    assert warned["success"]
    assert warned["cost_limit_warning"] == f"${spent + 2:.2f} spent of ${limit:.2f} {period} limit."
