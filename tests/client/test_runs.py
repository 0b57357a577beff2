"""The clients on runs, over real HTTP, blocking and awaited."""

import asyncio
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from textwrap import dedent
from typing import Any
from uuid import uuid4

import pytest

import semel
from semel import (
    App,
    CostLimitExceeded,
    Forbidden,
    IllegalTransition,
    InvalidParameters,
    InvalidRequest,
    KeyReused,
    Quota,
    QuotaExceeded,
    RunNotComplete,
    RunNotFound,
    SemelError,
    ServerUnreachable,
    Unauthenticated,
    UnknownModel,
)
from semel._concurrency.sync import run_sync
from semel.client import AsyncClient, Client, RemoteRun
from semel.service.auth import tokens
from support import faulty_server
from support.clients import PATIENCE, ClientDriver, gate, gates, with_models
from support.faulty_server import FaultyServer, problem, saying
from support.service import TestServer, serve

PACKAGE = Path(semel.__file__).parent


def test_a_run_is_submitted_waited_for_and_its_result_fetched(client: ClientDriver) -> None:
    run = client.submit("add", {"a": 1, "b": 2}, idempotency_key=f"ci/{uuid4()}")
    assert isinstance(run, RemoteRun)
    assert (run.status, run.replayed, run.parameters, run.user) == ("PENDING", False, {"a": 1, "b": 2}, "local")
    ended = client.wait(run.id, timeout=PATIENCE)
    assert (ended.run_id, ended.status, ended.done) == (run.run_id, "SUCCEEDED", True)
    assert client.result(run.id) == 3
    assert client.get(run.id).version == ended.version


def test_a_key_used_again_finds_its_run_and_with_other_content_is_refused(client: ClientDriver) -> None:
    key = f"k-{uuid4()}"
    first = client.submit("add", {"a": 1}, idempotency_key=key)
    again = client.submit("add", {"a": 1}, idempotency_key=key)
    assert (again.id, again.replayed, first.replayed) == (first.id, True, False)
    with pytest.raises(KeyReused):
        client.submit("add", {"a": 2}, idempotency_key=key)


def test_without_a_key_every_submission_is_new_and_has_one(client: ClientDriver) -> None:
    first, second = (client.submit("add", {"a": 1}) for _ in range(2))
    assert first.id != second.id
    assert first.idempotency_key.startswith("py-client-")
    assert first.idempotency_key != second.idempotency_key


def test_what_is_said_of_a_submission_arrives(client: ClientDriver) -> None:
    run = client.submit("add", {"a": 1}, user=7, queue="nobody-serves", priority=5, delay=3600, cost=0.5, key_ttl=60)
    assert (run.user, run.queue, run.priority, run.cost) == ("7", "nobody-serves", 5, 0.5)
    assert run.due_at - run.created_at == timedelta(hours=1)
    assert "scheduled" in client.waiting(run.id).reason
    assert client.cancel(run.id, why="only a test").status == "CANCELLED"
    assert client.timeline(run.id)[-1].note == "only a test"
    assert client.waiting(run.id) is None


def test_many_are_submitted_at_once_each_with_its_answer(client: ClientDriver) -> None:
    key = f"k-{uuid4()}"
    asked: list[dict[str, Any]] = [{"model": "add", "parameters": {"a": n}, "queue": "idle"} for n in range(1200)]
    asked[3]["idempotency_key"] = key
    asked[1100] = {**asked[3]}
    asked[7] = {"model": "ad", "parameters": {}}
    asked[1150] = {"model": "add", "parameters": {"a": "x"}}
    answers = client.submit_many(asked)
    assert len(answers) == 1200
    assert isinstance(answers[7], UnknownModel)
    assert isinstance(answers[1150], InvalidParameters)
    runs = [each for each in answers if isinstance(each, RemoteRun)]
    assert len(runs) == 1198
    assert [run.parameters["a"] for run in runs] == [
        asked[n]["parameters"]["a"] for n in range(1200) if n not in {7, 1150}
    ]
    assert (answers[1100].id, answers[1100].replayed) == (answers[3].id, True)
    assert client.submit_many([]) == []


def test_a_result_that_is_not_finite_is_null_on_the_wire_and_exact_through_the_client(
    client: ClientDriver, service: TestServer
) -> None:
    run = client.submit_and_wait("diverge", timeout=PATIENCE)
    assert run.status == "SUCCEEDED"
    assert [each.split(",")[0] for each in run.warnings] == ["$.metrics.loss is nan", "$.metrics.norm is inf"]
    with service.client() as http:
        assert http.get(f"/runs/{run.run_id}/result").content == b'{"metrics":{"loss":null,"norm":null,"step":7}}'
    metrics = client.result(run.run_id)["metrics"]
    assert (repr(metrics["loss"]), metrics["norm"], metrics["step"]) == ("nan", float("inf"), 7)


@pytest.mark.parametrize(
    "wrong", [{"model": "add"}, "add", [{"parameters": {}}], [{"model": "add", "colour": 1}], [{"model": float("nan")}]]
)
def test_submissions_that_make_no_sense_are_refused_before_they_are_sent(
    alone: tuple[ClientDriver, FaultyServer], wrong: Any
) -> None:
    client, server = alone
    with pytest.raises(InvalidRequest):
        client.submit_many(wrong)
    assert server.sent == []


def test_parameters_are_written_as_they_are_or_refused(client: ClientDriver) -> None:
    when = datetime(2026, 1, 2, tzinfo=UTC)
    with pytest.raises(InvalidParameters, match="'a'"):
        client.submit("add", {"a": when})
    with pytest.raises(InvalidRequest, match="nan"):
        client.submit("add", {"a": float("nan")})


def test_the_whole_list_is_iterated_over_page_by_page(client: ClientDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("semel.client.runs.PAGE", 3)
    queue = f"idle-{uuid4()}"
    asked = [{"model": "add", "parameters": {"a": n}, "queue": queue, "user": "u"} for n in range(8)]
    ids = [run.id for run in client.submit_many(asked)][::-1]
    assert [run.id for run in client.runs(queue=queue)] == ids
    assert [run.id for run in client.runs(queue=queue, limit=5)] == ids[:5]
    assert [run.id for run in client.runs(queue=queue, status=["PENDING", "RUNNING"], user="u", model="add")] == ids
    assert client.runs(queue=queue, status="FAILED") == []
    assert [run.parameters["a"] for run in client.runs(queue=queue, parameters=True)] == list(range(8))[::-1]
    with pytest.raises(InvalidRequest, match="parameters=True"):
        _ = client.runs(queue=queue)[0].parameters
    assert client.runs(queue=queue, until=datetime.now(UTC) - timedelta(hours=1)) == []
    assert len(client.runs(queue=queue, since=datetime.now(UTC) - timedelta(hours=1))) == 8
    with pytest.raises(InvalidRequest):
        client.runs(status="GONE")


def test_progress_is_told_while_a_run_is_waited_for(client: ClientDriver) -> None:
    name = gate()
    told: list[RemoteRun] = []

    def progress(run: RemoteRun) -> None:
        told.append(run)
        if run.progress == 0.5:
            gates[name].set()

    run = client.submit_and_wait("gated", {"gate": name}, timeout=PATIENCE, progress=progress)
    assert (run.status, told[-1]) == ("SUCCEEDED", run)
    assert [each.progress_note for each in told if each.progress == 0.5][:1] == ["half"]
    assert len({each.version for each in told}) >= 2


def test_a_wait_has_an_end(client: ClientDriver) -> None:
    run = client.submit("add", {"a": 1}, delay=3600)
    with pytest.raises(TimeoutError, match="still PENDING"):
        client.wait(run.id, timeout=0.05)
    with pytest.raises(TimeoutError, match="still PENDING"):
        client.wait(run.id, timeout=0.05, progress=lambda run: None)
    client.cancel(run.id)
    assert client.wait(run.id, timeout=0).status == "CANCELLED"


def test_a_run_that_failed_has_no_result_and_can_be_retried(client: ClientDriver) -> None:
    run = client.submit_and_wait("fail", {"word": "never"}, timeout=PATIENCE)
    assert (run.status, "never" in run.error) == ("FAILED", True)
    with pytest.raises(RunNotComplete) as caught:
        client.result(run.id)
    assert caught.value.status == "FAILED"
    with pytest.raises(IllegalTransition):
        client.cancel(run.id)
    again = client.retry(run.id)
    assert (again.retry_of, again.id != run.id) == (run.id, True)
    assert client.wait(again.id, timeout=PATIENCE).status == "FAILED"


@pytest.mark.parametrize("run_id", ["0a1b2c3d-0000-4000-8000-000000000000", "no-id", "..", "", "a/b", "é" * 300, 7])
def test_a_run_that_is_not_there_is_not_found_by_any_verb(client: ClientDriver, run_id: Any) -> None:
    for verb in ("get", "wait", "result", "cancel", "retry", "timeline", "waiting", "logs", "events"):
        with pytest.raises(RunNotFound):
            getattr(client, verb)(run_id)
    with pytest.raises(RunNotFound):
        client.artifact(run_id, "name")


def test_the_log_is_read_and_followed(client: ClientDriver) -> None:
    name = gate()
    run = client.submit("gated", {"gate": name})
    lines = []
    for line in client.each(client.client.logs(run.id, follow=True)):
        lines.append(line.text)
        gates[name].set()
    assert lines == ["at the gate", "through the gate"]
    assert [line.text for line in client.logs(run.id)] == lines
    assert [line.text for line in client.logs(run.id, follow=True)] == lines
    assert client.logs(client.submit("add", {"a": 1}, delay=60).id) == []


def test_events_come_as_they_happen_and_end_with_the_run(client: ClientDriver) -> None:
    name = gate()
    run = client.submit("gated", {"gate": name})
    events = []
    for event in client.each(client.client.events(run.id)):
        events.append(event)
        gates[name].set()
    assert [event.data["step"] for event in events if event.kind == "state"] == [
        step.step for step in client.timeline(run.id)
    ]
    assert [event.data["text"] for event in events if event.kind == "log"] == ["at the gate", "through the gate"]
    assert [event.data["status"] for event in client.events(run.id) if event.kind == "state"][-1] == "SUCCEEDED"


def test_sums_models_workers_and_use_are_shown(client: ClientDriver) -> None:
    client.submit_and_wait("add", {"a": 1}, timeout=PATIENCE)
    [add] = [each for each in client.summary() if each.model == "add"]
    assert add.counts["SUCCEEDED"] >= 1
    name = gate()
    gates[name].set()
    client.submit_and_wait("gated", {"gate": name}, timeout=PATIENCE)
    assert [each.counts for each in client.summary(grouped=True) if each.group == name] == [{"SUCCEEDED": 1}]
    models = {model.name: model for model in client.models()}
    assert models["add"].description == "Adds."
    assert set(models["add"].parameters["properties"]) == {"a", "b"}
    assert all(worker.alive for worker in client.workers())


def test_quotas_are_set_shown_and_met(client: ClientDriver) -> None:
    user = f"user-{uuid4()}/of team"
    client.set_quota(user, Quota(max_concurrent=1))
    client.submit("add", {"a": 1}, user=user, delay=3600)
    standing = client.usage(user)
    assert (standing.usage.concurrent, standing.quota.max_concurrent, standing.default) == (1, 1, False)
    with pytest.raises(QuotaExceeded):
        client.submit("add", {"a": 1}, user=user)
    client.set_quota(user, Quota(cost_daily=1))
    with pytest.raises(CostLimitExceeded):
        client.submit("add", {"a": 1}, user=user, cost=5)
    client.set_quota(user, None)
    client.set_quota(user, None)
    assert client.usage(user).quota is None
    assert client.usage().user == "local"


def test_the_token_goes_with_every_request_and_shows_nowhere(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    secret = "semel_abc_thisissecret"
    monkeypatch.setenv("SEMEL_TOKEN", f" {secret}\n")
    caplog.set_level(logging.DEBUG)
    shown = []
    with FaultyServer() as server:
        monkeypatch.setenv("SEMEL_SERVER", server.url)
        for token in (None, secret):
            with ClientDriver(kind, None, token=token) as client:
                shown += [
                    repr(client.client),
                    repr(vars(client.client)),
                    str(vars(client.client._engine.session.backend)),
                ]
                server.faults = [faulty_server.reset, saying(500), problem(401, "UNAUTHENTICATED")]
                with pytest.raises(Unauthenticated) as refused:
                    client.submit("add")
                server.faults = [faulty_server.reset] * 4
                with pytest.raises(ServerUnreachable) as lost:
                    client.submit("add")
                shown += [repr(each.value) + str(each.value) + "".join(locals_of(each)) for each in (refused, lost)]
        assert {each.headers["authorization"] for each in server.sent} == {f"Bearer {secret}"}
    with ClientDriver(kind, server.url) as client, pytest.raises(ServerUnreachable):
        client.models()
    assert "thisissecret" not in "".join(shown) + caplog.text
    assert "again in" in caplog.text


def locals_of(caught: pytest.ExceptionInfo[BaseException]) -> Iterator[str]:
    """What a tool that shows variables would show of the client's own calls."""
    for entry in caught.traceback:
        if Path(entry.path).is_relative_to(PACKAGE):
            yield repr(entry.frame.f_locals)


@pytest.mark.parametrize("token", ["semel_a b", "semel_x\ny", "sémel"])
def test_a_token_that_cannot_be_sent_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Client(token=token)
    assert token not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:8001",
        "ftp://host",
        "http://",
        "http://a b",
        "http://host?x=1",
        "http://host:port",
        "http://u:secret@host",
    ],
)
@pytest.mark.parametrize("make", [Client, AsyncClient])
def test_an_address_that_can_be_none_is_refused(url: str, make: Callable[..., object]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        make(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "options", [{"timeout": 0}, {"timeout": "x"}, {"retries": -1}, {"retries": 1.5}, {"backoff": -1}]
)
def test_options_that_make_no_sense_are_refused(options: Any) -> None:
    with pytest.raises(InvalidRequest):
        Client(**options)


def test_roles_and_strangers_are_told_apart(tmp_path: Path, kind: str) -> None:
    app = with_models(App(f"sqlite:///{tmp_path / 'semel.db'}", artifacts=tmp_path / "artifacts"))
    with serve(app) as service:
        made = [make_token(service, user, role) for user, role in (("ann", "submitter"), ("op", "operator"))]
        with ClientDriver(kind, service.address) as nobody, pytest.raises(Unauthenticated):
            nobody.submit("add", {"a": 1})
        with (
            ClientDriver(kind, service.address, token=made[0]) as ann,
            ClientDriver(kind, service.address, token=made[1]) as op,
        ):
            run = ann.submit("add", {"a": 1})
            assert run.user == "ann"
            with pytest.raises(Forbidden):
                ann.submit("add", {"a": 1}, user="bob")
            with pytest.raises(Forbidden):
                ann.workers()
            other = op.submit("add", {"a": 2}, user="bob")
            with pytest.raises(RunNotFound):
                ann.get(other.id)
            assert {each.id for each in op.runs()} == {run.id, other.id}
            assert [each.id for each in ann.runs()] == [run.id]
    app.close()


def make_token(service: TestServer, user: str, role: str) -> str:
    ledger = service.app.ledger(awaited=False)
    run_sync(ledger.open())
    request = tokens.NewToken(name=user, user=user, role=role)
    text = run_sync(ledger.write(tokens.issue, request, ledger.statement_context)).secret
    run_sync(ledger.close())
    service.state.auth.clear_cache()
    return str(text)


def test_an_async_client_serves_one_loop_after_another_and_none_besides(service: TestServer) -> None:
    client = AsyncClient(service.address)

    async def look() -> int:
        try:
            return len(await client.models())
        finally:
            await client.close()

    async def look_from_two() -> None:
        await client.models()
        with pytest.raises(SemelError, match="loop"):
            await asyncio.to_thread(asyncio.run, client.models())
        await client.close()
        await client.models()
        await client.close()

    assert asyncio.run(look()) == asyncio.run(look()) == 5
    asyncio.run(look_from_two())


def test_threads_share_a_client(service: TestServer) -> None:
    with Client(service.address) as client:
        found: list[str] = []

        def submit(number: int) -> None:
            found.append(client.submit("add", {"a": number}).id)

        threads = [threading.Thread(target=submit, args=(100 + each,)) for each in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert len(set(found)) == 8


def test_a_forked_child_has_connections_of_its_own(service: TestServer) -> None:
    program = f"""
        import os
        from semel import Client
        client = Client({service.address!r})
        before = len(client.models())
        child = os.fork()
        for _ in range(20):
            assert len(client.models()) == before
        if not child:
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        client.close()
        print("both are well")
    """
    done = subprocess.run([sys.executable, "-c", dedent(program)], capture_output=True, text=True, check=True)
    assert "both are well" in done.stdout


def test_semel_is_imported_without_httpx_and_names_the_extra_when_it_is_missing() -> None:
    program = """
        import sys
        import semel
        assert "httpx" not in sys.modules and "semel.client" not in sys.modules
        assert "Client" in dir(semel) and "submit_cloud_job" in dir(semel)
        namespace = {}
        exec("from semel import *", namespace)
        assert "httpx" not in sys.modules
        sys.modules["httpx"] = None
        try:
            semel.Client
        except semel.MissingExtra as error:
            print(error)
        try:
            semel.Cleint
        except AttributeError as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", dedent(program)], capture_output=True, text=True, check=True)
    assert "semel[client]" in done.stdout
    assert "Cleint" in done.stdout


def test_both_faces_have_the_same_verbs_and_the_page_has_them_all() -> None:
    verbs = {name for name in vars(Client) if not name.startswith("_")}
    assert verbs == {name for name in vars(AsyncClient) if not name.startswith("_")}
    page = (Path(__file__).parents[2] / "docs" / "client.md").read_text()
    assert {name for name in verbs if f"`{name}(" not in page} == {"close"}
