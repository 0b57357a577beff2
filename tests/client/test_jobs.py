"""The clients on jobs, over real HTTP, blocking and awaited."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from semel import (
    App,
    CostLimitExceeded,
    Forbidden,
    IllegalTransition,
    InvalidRequest,
    Quota,
    QuotaExceeded,
    RunNotFound,
    SemelError,
    ServerUnreachable,
    ServiceError,
    StoreUnavailable,
    SubmitResult,
    Unauthenticated,
    submit_cloud_job,
)
from semel.service import Settings
from support import faulty_server
from support.clients import ClientDriver
from support.faulty_server import FaultyServer, problem, saying
from support.jobs import add_models, write_config
from support.service import TestServer, issue_token, make_app, serve

PATIENCE = 60


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestServer]:
    folder = tmp_path_factory.mktemp("service")
    app = make_app(f"sqlite:///{folder / 'semel.db'}", folder)
    add_models(app)
    pretended = {"replicate": {"simulate": True}}
    write_config(folder / "configs", "adding", model="add", parameters={"a": 1}, providers=pretended, cost=2)
    write_config(folder / "configs", "idle", model="add", queue="nobody-serves", providers=pretended)
    with serve(app, Settings(configs=str(folder / "configs"))) as service, app.working(processes=0):
        yield service
    app.close()


def test_a_job_is_submitted_and_found_again_by_its_key(client: ClientDriver) -> None:
    key = f"gh-owner/repo-{uuid4()}"
    job = client.submit_job("adding", idempotency_key=key, tracker_run_name="gh-17")
    again = client.submit_job("adding", idempotency_key=key, tracker_run_name="gh-18")
    assert (job.status, job.data_uploaded, job.idempotent_hit, job.idempotency_key) == ("queued", False, False, key)
    assert (again.job_id, again.idempotent_hit) == (job.job_id, True)
    assert client.wait(job.job_id, timeout=PATIENCE).status == "SUCCEEDED"
    shown = client.job(job.job_id)
    assert (shown.status, shown.done, shown.tracker_run_name, shown.provider) == (
        "completed",
        True,
        "gh-17",
        "replicate",
    )
    assert client.result(job.job_id) == 3


@pytest.mark.parametrize(
    "loss",
    [
        faulty_server.lose_the_answer,
        faulty_server.lose_the_request,
        faulty_server.reset,
        faulty_server.cut_after(40),
        faulty_server.garbage,
        saying(500),
        problem(503, "STORE_UNAVAILABLE", retryable=True),
        saying(429),
        saying(408),
    ],
)
def test_whatever_is_lost_one_job_comes_of_one_submission(
    far: ClientDriver, line: FaultyServer, loss: faulty_server.Fault
) -> None:
    line.faults = [loss] * 3
    job = far.submit_job("idle")
    assert len(line.sent) == 4
    assert set(line.keys) == {job.idempotency_key}
    assert job.idempotency_key.startswith("py-client-")
    assert [each.job_id for each in far.jobs(config="idle") if each.idempotency_key == job.idempotency_key] == [
        job.job_id
    ]


def test_jobs_are_listed_and_cancelled(client: ClientDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("semel.client.jobs.PAGE", 2)
    ids = [client.submit_job("idle", provider="local").job_id for _ in range(5)][::-1]
    assert [job.job_id for job in client.jobs(provider="local", limit=5)] == ids
    assert [job.job_id for job in client.jobs(status="queued", config="idle", provider="local", user="local")][
        :5
    ] == ids
    ended = client.cancel_job(ids[0])
    assert (ended.status, client.cancel_job(ids[0]).status) == ("cancelled", "cancelled")
    assert ids[0] not in [job.job_id for job in client.jobs(status="queued")]
    done = client.submit_job("adding")
    client.wait(done.job_id, timeout=PATIENCE)
    with pytest.raises(IllegalTransition):
        client.cancel_job(done.job_id)
    with pytest.raises(InvalidRequest):
        client.jobs(status="gone")


@pytest.mark.parametrize("job_id", ["0a1b2c3d-0000-4000-8000-000000000000", "no-id", "..", "", "submit"])
def test_a_job_that_is_not_there_is_not_found(client: ClientDriver, job_id: str) -> None:
    for verb in (client.job, client.cancel_job):
        with pytest.raises(RunNotFound):
            verb(job_id)


def test_configs_and_costs_are_shown(client: ClientDriver) -> None:
    configs = {config.name: config for config in client.configs()}
    assert (configs["adding"].model, configs["adding"].source, configs["adding"].cost) == ("add", "file", 2)
    costs = client.costs()
    assert (costs.user, costs.can_submit, {limit.period for limit in costs.limits}) == (
        "local",
        True,
        {"daily", "weekly", "monthly", "yearly"},
    )


@pytest.mark.parametrize(
    ("config", "options", "said"),
    [
        ("absent", {}, "absent"),
        ("../adding", {}, "config"),
        ("adding", {"provider": "nobody"}, "Unknown provider: nobody"),
        ("adding", {"idempotency_key": "x" * 256}, "256|255"),
        ("adding", {"idempotency_key": ""}, "empty"),
    ],
)
def test_what_can_be_no_job_is_said_at_once(
    far: ClientDriver, line: FaultyServer, config: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ServiceError, match=said) as caught:
        far.submit_job(config, **options)
    assert (caught.value.code, caught.value.retryable) == ("JOB_REFUSED", False)
    assert len(line.sent) == 1


NONSENSE = {
    "no success": saying(200, {"job_id": "1"}),
    "success without a job": saying(200, {"success": True}),
    "a page": saying(200, b"<html>"),
    "a list": saying(200, [1]),
    "a wrong type": saying(200, {"success": "yes", "job_id": 7}),
    "too deep": saying(200, b"[" * 100_000),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_an_answer_that_makes_no_sense_is_told_as_such(kind: str, name: str) -> None:
    with FaultyServer() as server, ClientDriver(kind, server.url) as client:
        server.faults = [NONSENSE[name]]
        with pytest.raises(ServiceError) as caught:
            client.submit_job("adding")
        assert len(server.sent) == 1
        assert caught.value.idempotency_key == server.keys[0]
        server.faults = [NONSENSE[name]]
        result = asyncio.run(submit_cloud_job(server.url, "adding"))
        assert (result.success, bool(result.error), result.job_id) == (False, True, None)


def test_refusals_of_the_request_itself_have_their_names(kind: str) -> None:
    with FaultyServer() as server, ClientDriver(kind, server.url) as client:
        kinds: list[type[SemelError]] = []
        for fault in (problem(400, "INVALID_REQUEST"), problem(401, "UNAUTHENTICATED"), problem(403, "FORBIDDEN")):
            server.faults = [fault]
            with pytest.raises(SemelError) as caught:
                client.submit_job("adding")
            kinds.append(caught.type)
        assert kinds == [InvalidRequest, Unauthenticated, Forbidden]
        server.faults = [problem(503, "STORE_UNAVAILABLE")] * 4
        with pytest.raises(StoreUnavailable):
            client.submit_job("adding")


def test_the_function_of_the_document_submits_and_finds(service: TestServer) -> None:
    key = f"training/{uuid4()}"
    first = asyncio.run(submit_cloud_job(service.address, "idle", key, "experiment-42"))
    again = asyncio.run(submit_cloud_job(f"{service.address}/", "idle", idempotency_key=key))
    assert first == SubmitResult(success=True, job_id=first.job_id)
    assert again == SubmitResult(success=True, job_id=first.job_id, was_duplicate=True)
    assert first.idempotency_key == key
    with ClientDriver("blocking", service.address) as client:
        assert client.job(first.job_id).tracker_run_name == "experiment-42"


def test_the_function_of_the_document_says_what_went_wrong_and_raises_nothing(service: TestServer) -> None:
    with FaultyServer(service.address) as line:
        gone = FaultyServer()
        gone.__exit__()
        assert asyncio.run(submit_cloud_job(gone.url, "idle")).error.startswith("Connection error: ")  # type: ignore[union-attr]
        for fault in (faulty_server.reset, faulty_server.lose_the_answer, faulty_server.garbage):
            line.faults = [fault]
            result = asyncio.run(submit_cloud_job(line.url, "idle"))
            assert (result.success, (result.error or "").startswith("Connection error: ")) == (False, True)
        line.faults = [problem(401, "UNAUTHENTICATED")]
        assert "it is UNAUTHENTICATED" in str(asyncio.run(submit_cloud_job(line.url, "idle")).error)
        assert "absent" in str(asyncio.run(submit_cloud_job(line.url, "absent")).error)
        with pytest.raises(InvalidRequest):
            asyncio.run(submit_cloud_job("no address", "idle"))


def test_the_function_of_the_document_can_be_cancelled(service: TestServer) -> None:
    async def give_up(url: str, came: threading.Event) -> None:
        task = asyncio.create_task(submit_cloud_job(url, "idle"))
        await asyncio.to_thread(came.wait, PATIENCE)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    came = threading.Event()

    def note(server: FaultyServer, client: Any, sent: Any) -> None:
        came.set()
        faulty_server.keep_silent(server, client, sent)

    with FaultyServer() as server:
        server.faults = [note]
        asyncio.run(give_up(server.url, came))


def test_a_token_is_taken_from_the_environment_or_given(
    tmp_path: Path, sqlite_url: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = App(sqlite_url, artifacts=tmp_path / "artifacts")
    add_models(app)
    write_config(tmp_path / "configs", "adding", model="add")
    ann = issue_token(app, "ann")
    with serve(app, Settings(configs=str(tmp_path / "configs"))) as service:
        app.set_quota("ann", Quota(max_concurrent=1))
        refused = asyncio.run(submit_cloud_job(service.address, "adding", provider="local"))
        assert "token" in str(refused.error)
        assert asyncio.run(submit_cloud_job(service.address, "adding", provider="local", token=ann)).success
        monkeypatch.setenv("SEMEL_TOKEN", ann)
        full = asyncio.run(submit_cloud_job(service.address, "adding", provider="local"))
        assert full == SubmitResult(success=False, error="Quota exceeded: Maximum 1 concurrent jobs allowed")
        with ClientDriver(kind, service.address) as client:
            with pytest.raises(QuotaExceeded):
                client.submit_job("adding", provider="local")
            with pytest.raises(Forbidden):
                client.costs("bob")
    app.close()


def test_limits_on_cost_are_told_apart(kind: str) -> None:
    said = "Cost limit exceeded: $10.00 spent of $10.00 daily limit."
    with FaultyServer() as server, ClientDriver(kind, server.url) as client:
        server.faults = [saying(200, {"success": False, "error": said})]
        with pytest.raises(CostLimitExceeded) as caught:
            client.submit_job("adding")
        assert str(caught.value) == said
        server.faults = [faulty_server.keep_silent]
        with ClientDriver(kind, server.url, retries=0) as hasty, pytest.raises(ServerUnreachable):
            hasty.submit_job("adding", timeout=0.05)
