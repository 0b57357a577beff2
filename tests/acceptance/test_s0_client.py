"""S0.27 to S0.31, and S1.31: the clients over real HTTP, on SQLite and PostgreSQL, and a line that loses things."""

import asyncio
import inspect
import threading
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from semel import App, AsyncClient, Client, CostLimitExceeded, KeyReused, Quota, QuotaExceeded, SubmitResult
from semel import submit_cloud_job as submit
from semel.service import Settings
from support import faulty_server
from support.clients import ClientDriver as Face
from support.faulty_server import FaultyServer as Rogue
from support.faulty_server import problem, saying
from support.jobs import add_models, write_config
from support.service import PATIENCE
from support.service import TestServer as Served
from support.service import make_app as made_app
from support.service import serve as served


@pytest.fixture(params=["sqlite", "postgres"])
def app(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[App]:
    app = made_app(request.getfixturevalue(f"migrated_{request.param}_url"), tmp_path, dedupe_window=0)
    add_models(app)
    yield app
    app.close()


@pytest.fixture
def line(app: App, tmp_path: Path) -> Iterator[Rogue]:
    """The service, and the way to it."""
    pretended = {"replicate": {"simulate": True}}
    write_config(tmp_path / "configs", "flux-lora-v1", model="add", cost=5, providers=pretended)
    service: Served
    with served(app, Settings(configs=str(tmp_path / "configs"))) as service, Rogue(service.address) as line:
        yield line


@pytest.fixture(params=["blocking", "awaited"])
def client(request: pytest.FixtureRequest, line: Rogue) -> Iterator[Face]:
    with Face(request.param, line.url, backoff=1.0) as client:
        yield client


@pytest.fixture
def waits(client: Face) -> list[float]:
    """How long the client would have waited between its tries; it does not."""
    waits: list[float] = []

    async def note(duration: float) -> None:
        waits.append(duration)

    client.client._engine.session.backend.pause = note
    return waits


def test_s0_27_one_key_over_all_retries_three_of_them_after_1_2_and_4_seconds(
    client: Face, line: Rogue, app: App, waits: list[float]
) -> None:
    line.faults = [faulty_server.keep_silent, faulty_server.lose_the_answer, saying(503)]
    job = client.submit_job("flux-lora-v1", timeout=2.5)
    assert job.idempotent_hit
    assert line.keys == [job.idempotency_key] * 4
    assert [run.id for run in app.runs().runs] == [job.job_id]
    assert len(waits) == 3
    assert all(least <= wait <= 1.25 * least for least, wait in zip((1, 2, 4), waits, strict=True))


def test_s0_27_a_try_has_120_seconds_and_there_are_three_more_unless_told_otherwise(line: Rogue) -> None:
    for kind in (Client, AsyncClient):
        assert inspect.signature(kind.submit_job).parameters["timeout"].default == 120
        assert inspect.signature(kind).parameters["retries"].default == 3
        assert inspect.signature(kind).parameters["backoff"].default == 1


def test_s0_28_quota_exceeded_is_never_retried(client: Face, line: Rogue, app: App, waits: list[float]) -> None:
    app.set_quota("local", Quota(max_concurrent=1))
    client.submit_job("flux-lora-v1")
    with pytest.raises(QuotaExceeded, match="Quota exceeded: Maximum 1 concurrent jobs allowed") as caught:
        client.submit_job("flux-lora-v1")
    assert not isinstance(caught.value, CostLimitExceeded)
    assert (len(line.sent), waits) == (2, [])


def test_s0_29_cost_limits_are_told_apart_and_never_retried(
    client: Face, line: Rogue, app: App, waits: list[float]
) -> None:
    app.set_quota("local", Quota(cost_daily=5))
    client.submit_job("flux-lora-v1")
    with pytest.raises(CostLimitExceeded, match=r"Cost limit exceeded: \$5\.00 spent of \$5\.00 daily limit\."):
        client.submit_job("flux-lora-v1")
    assert (len(line.sent), waits) == (2, [])


def test_s0_30_a_success_carries_its_warnings(client: Face, app: App) -> None:
    plain = client.submit_job("flux-lora-v1")
    assert (plain.quota_warnings, plain.cost_limit_warning) == ([], None)
    app.set_quota("local", Quota(max_concurrent=2, cost_daily=11))
    job = client.submit_job("flux-lora-v1")
    assert len(job.quota_warnings) == 1
    assert job.cost_limit_warning is not None
    assert "daily" in job.cost_limit_warning


def test_s0_31_the_async_function_makes_a_key_and_says_what_came_of_it(line: Rogue, app: App) -> None:
    assert [each.name for each in fields(SubmitResult)][:4] == ["success", "job_id", "error", "was_duplicate"]
    assert inspect.signature(submit).parameters["timeout"].default == 300
    first = asyncio.run(submit(base_url=line.url, config_name="flux-lora-v1"))
    assert first == SubmitResult(success=True, job_id=app.runs().runs[0].id, error=None, was_duplicate=False)
    assert line.keys[0].startswith("py-client-")
    key = line.keys[0]
    again = asyncio.run(submit(line.url, "flux-lora-v1", key, "flux-lora-experiment-42"))
    assert again == SubmitResult(success=True, job_id=first.job_id, error=None, was_duplicate=True)


def test_s0_31_a_timeout_says_that_the_job_may_exist_and_the_same_key_finds_it(line: Rogue, app: App) -> None:
    done = threading.Event()

    def work_and_keep_silent(server: Rogue, client: Any, sent: Any) -> None:
        faulty_server.lose_the_answer(server, client, sent)
        done.set()
        faulty_server.keep_silent(server, client, sent)

    line.faults = [work_and_keep_silent]
    result = asyncio.run(submit(line.url, "flux-lora-v1", timeout=0.5))
    assert done.wait(PATIENCE)
    assert result == SubmitResult(
        success=False, error="Request timed out - job may have been created, check with same idempotency key"
    )
    found = asyncio.run(submit(line.url, "flux-lora-v1", result.idempotency_key))
    assert (found.success, found.was_duplicate) == (True, True)
    assert [run.id for run in app.runs().runs] == [found.job_id]
    line.faults = [faulty_server.drip]
    slow = asyncio.run(submit(line.url, "flux-lora-v1", timeout=0.3))
    assert slow.error == result.error


def test_s1_31_our_client_does_not_retry_a_conflict(client: Face, line: Rogue, app: App, waits: list[float]) -> None:
    client.submit("add", {"a": 1}, idempotency_key="k")
    with pytest.raises(KeyReused):
        client.submit("add", {"a": 2}, idempotency_key="k")
    line.faults = [problem(409, "IDEMPOTENCY_KEY_CONFLICT", retryable=True)]
    with pytest.raises(KeyReused):
        client.submit("add", {"a": 1}, idempotency_key="k")
    assert (len(line.sent), waits, len(app.runs().runs)) == (3, [], 1)


def test_s1_31_our_client_uses_the_same_key_on_5xx_and_timeouts(client: Face, line: Rogue, app: App) -> None:
    with Face(client.kind, line.url, timeout=2.5) as hasty:
        line.faults = [saying(500), faulty_server.keep_silent, faulty_server.lose_the_answer]
        run = hasty.submit("add", {"a": 1})
    assert line.keys == [run.idempotency_key] * 4
    assert run.replayed
    assert [each.id for each in app.runs().runs] == [run.id]
