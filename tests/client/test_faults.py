"""What the clients do when servers and connections fail: blocking and awaited."""

import hashlib
import threading
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from semel import (
    App,
    CostLimitExceeded,
    Forbidden,
    IllegalTransition,
    InvalidParameters,
    InvalidRequest,
    KeyReused,
    QuotaExceeded,
    ResultStoreError,
    RunNotFound,
    SemelError,
    ServerUnreachable,
    ServiceError,
    StoreUnavailable,
    Unauthenticated,
    UnknownModel,
)
from semel.client import RemoteRun
from support import faulty_server
from support.clients import PATIENCE, ClientDriver, gate, gates, with_models
from support.faulty_server import FaultyServer, problem, saying
from support.service import TestServer, serve
from support.waiting import eventually

LOSSES = {
    "lost answer": faulty_server.lose_the_answer,
    "lost request": faulty_server.lose_the_request,
    "reset": faulty_server.reset,
    "cut answer": faulty_server.cut_after(200),
    "cut head": faulty_server.cut_after(12),
    "garbage": faulty_server.garbage,
    "500": saying(500),
    "503 problem": problem(503, "STORE_UNAVAILABLE", retryable=True),
    "408": problem(408, "BODY_TOO_SLOW"),
    "429": problem(429, "TOO_MANY_REQUESTS", retryable=True),
    "garbled gzip": saying(200, b"no gzip", content_encoding="gzip"),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_whatever_is_lost_one_run_comes_of_one_submission(
    far: ClientDriver, line: FaultyServer, service: TestServer, loss: str
) -> None:
    line.faults = [LOSSES[loss]] * 3
    run = far.submit("add", {"a": 1})
    assert len(line.sent) == 4
    assert set(line.keys) == {run.idempotency_key}
    there = service.app.runs(idempotency_key=run.idempotency_key).runs
    assert [each.id for each in there] == [run.id]
    assert run.replayed is (loss in {"lost answer", "cut answer", "cut head"})


def test_a_rerun_and_an_action_whose_answers_are_lost_are_done_once(
    far: ClientDriver, line: FaultyServer, service: TestServer
) -> None:
    first = far.submit_and_wait("add", {"a": 1}, timeout=PATIENCE)
    line.faults = [faulty_server.lose_the_answer] * 2
    rerun = far.rerun(first.run_id).run
    assert rerun.replayed
    assert far.rerun(first.run_id, idempotency_key=rerun.idempotency_key).run.run_id == rerun.run_id
    again = [run.id for run in service.app.runs(model="add", limit=1000).runs if run.rerun_of == first.run_id]
    assert again == [rerun.run_id]
    line.faults = [faulty_server.lose_the_answer] * 2
    done_before = len(service.app.actions(limit=1000))
    action = far.act("cancel", queue="nobody", idempotency_key=f"once-{uuid4()}")
    assert action.action_id is not None
    assert len(service.app.actions(limit=1000)) == done_before + 1


FINAL: dict[str, tuple[faulty_server.Fault, type[Exception]]] = {
    "conflict": (problem(409, "IDEMPOTENCY_KEY_CONFLICT", retryable=True), KeyReused),
    "quota": (problem(429, "QUOTA_EXCEEDED"), QuotaExceeded),
    "cost": (problem(429, "COST_LIMIT_EXCEEDED"), CostLimitExceeded),
    "model": (problem(422, "UNKNOWN_MODEL"), UnknownModel),
    "parameters": (problem(422, "INVALID_PARAMETERS"), InvalidParameters),
    "request": (problem(400, "INVALID_REQUEST"), InvalidRequest),
    "transition": (problem(409, "ILLEGAL_TRANSITION"), IllegalTransition),
    "token": (problem(401, "UNAUTHENTICATED"), Unauthenticated),
    "role": (problem(403, "FORBIDDEN"), Forbidden),
    "size": (problem(413, "BODY_TOO_LARGE"), ServiceError),
    "not there": (saying(404, b"<html>nginx</html>"), ServiceError),
    "elsewhere": (saying(307, location="https://elsewhere.example/runs"), ServiceError),
    "another's success": (saying(200, b"<html>welcome</html>"), ServiceError),
    "deep nonsense": (saying(201, b"[" * 100_000), ServiceError),
}


@pytest.mark.parametrize("name", FINAL)
def test_what_would_be_the_same_again_is_not_asked_again(alone: tuple[ClientDriver, FaultyServer], name: str) -> None:
    client, server = alone
    fault, kind = FINAL[name]
    server.faults = [fault]
    with pytest.raises(SemelError) as caught:
        client.submit("add", {"a": 1})
    assert type(caught.value) is kind
    assert len(server.sent) == 1


def test_an_error_without_a_name_of_its_own_tells_what_the_server_said(
    alone: tuple[ClientDriver, FaultyServer],
) -> None:
    client, server = alone
    server.faults = [problem(413, "BODY_TOO_LARGE")]
    with pytest.raises(ServiceError, match="it is BODY_TOO_LARGE") as caught:
        client.submit("add", {"a": 1}, idempotency_key="k")
    error = caught.value
    assert (error.status, error.code, error.retryable, error.idempotency_key) == (413, "BODY_TOO_LARGE", False, "k")


def test_failures_that_stay_are_told_after_the_last_try(alone: tuple[ClientDriver, FaultyServer]) -> None:
    client, server = alone
    server.faults = [problem(503, "STORE_UNAVAILABLE", retryable=True)] * 4
    with pytest.raises(StoreUnavailable):
        client.submit("add", {"a": 1})
    server.faults = [saying(502, b"bad gateway")] * 4
    with pytest.raises(ServiceError, match="bad gateway") as caught:
        client.submit("add", {"a": 1}, idempotency_key="k")
    assert (caught.value.status, caught.value.retryable, caught.value.idempotency_key) == (502, True, "k")
    assert len(server.sent) == 8


def test_retry_after_is_waited_for_and_waits_grow(kind: str) -> None:
    waits: list[float] = []
    with FaultyServer() as server, ClientDriver(kind, server.url, backoff=1.0) as client:
        note_waits(client, waits)
        server.faults = [saying(503), saying(429, retry_after="7"), saying(503), saying(500)]
        with pytest.raises(ServiceError):
            client.submit("add")
        server.faults = [saying(503, retry_after="86400"), saying(400)]
        with pytest.raises(ServiceError):
            client.submit("add")
    assert 1 <= waits[0] <= 1.25
    assert waits[1] == 7
    assert 4 <= waits[2] <= 5
    assert waits[3:] == [60]


def note_waits(client: ClientDriver, waits: list[float]) -> None:
    """So that nobody waits, and it is known how long they would have."""

    async def note(duration: float) -> None:
        waits.append(duration)

    client.client._engine.session.backend.pause = note


def test_a_server_that_is_not_there_is_named_with_the_way_to_start_one(kind: str) -> None:
    with FaultyServer() as gone:
        url = gone.url
    with ClientDriver(kind, url) as client, pytest.raises(ServerUnreachable, match="semel serve") as caught:
        client.get(str(uuid4()))
    assert url in str(caught.value)
    assert isinstance(caught.value, ConnectionError)


def test_a_server_that_never_answers_leaves_the_key_to_ask_with(kind: str) -> None:
    with FaultyServer() as server, ClientDriver(kind, server.url, timeout=1.0, retries=1) as client:
        server.faults = [faulty_server.keep_silent, faulty_server.drip]
        with pytest.raises(ServerUnreachable, match="may have been carried out") as caught:
            client.submit("add", {"a": 1})
        eventually(lambda: len(server.sent) == 2)
    assert {caught.value.idempotency_key} == set(server.keys)
    assert caught.value.idempotency_key in str(caught.value)


def test_many_are_stored_once_though_an_answer_is_lost(
    far: ClientDriver, line: FaultyServer, service: TestServer
) -> None:
    queue = f"idle-{uuid4()}"
    line.faults = [faulty_server.lose_the_answer]
    answers = far.submit_many([{"model": "add", "parameters": {"a": n}, "queue": queue} for n in range(5)])
    assert [run.replayed for run in answers] == [True] * 5
    assert len(service.app.runs(queue=queue).runs) == 5


def test_when_the_server_goes_away_amid_many_the_rest_have_the_error_and_their_keys(
    far: ClientDriver, line: FaultyServer
) -> None:
    line.faults = [faulty_server.pass_on, *[faulty_server.lose_the_request] * 4]
    asked = [{"model": "add", "parameters": {"a": n}, "queue": "idle"} for n in range(600)]
    answers = far.submit_many(asked)
    assert all(isinstance(each, RemoteRun) for each in answers[:500])
    assert all(isinstance(each, ServerUnreachable) for each in answers[500:])
    assert len({each.idempotency_key for each in answers}) == 600


@pytest.mark.parametrize("tell", [False, True])
def test_a_wait_outlives_lost_connections(far: ClientDriver, line: FaultyServer, tell: bool) -> None:
    name = gate()
    run = far.submit("gated", {"gate": name})
    seen: list[str] = []

    def open_the_gate(rogue: FaultyServer, client: Any, sent: Any) -> None:
        seen.append(sent.path)
        gates[name].set()

    away = [
        faulty_server.reset,
        saying(502),
        faulty_server.lose_the_request,
        faulty_server.garbage,
        problem(503, "NOT_MIGRATED"),
    ]
    line.faults = [*([faulty_server.pass_on] if tell else []), *away, open_the_gate]
    options: dict[str, Any] = {"progress": lambda run: None} if tell else {}
    with ClientDriver(far.kind, line.url, retries=3 if tell else 100) as client:
        assert client.wait(run.id, timeout=PATIENCE, **options).status == "SUCCEEDED"
    assert len(seen) == 1


def test_a_wait_outlives_a_server_that_is_restarted(kind: str, tmp_path: Path) -> None:
    app = with_models(App(f"sqlite:///{tmp_path / 'semel.db'}", artifacts=tmp_path / "artifacts"))
    name = gate()
    told = threading.Event()
    waited: list[RemoteRun] = []

    def wait(run_id: str) -> None:
        with ClientDriver(kind, line.url) as client:
            waited.append(client.wait(run_id, timeout=PATIENCE, progress=lambda run: told.set()))

    with FaultyServer() as line, app.working(processes=0):
        with serve(app) as first:
            line.behind = first.address
            waiting = threading.Thread(target=wait, args=(app.submit("gated", {"gate": name}).id,))
            waiting.start()
            assert told.wait(PATIENCE)
        gates[name].set()
        with serve(app) as second:
            line.behind = second.address
            waiting.join(PATIENCE)
    assert [run.status for run in waited] == ["SUCCEEDED"]
    app.close()


def test_waiting_at_a_server_that_was_never_there_ends(kind: str) -> None:
    with FaultyServer() as server, ClientDriver(kind, server.url) as client:
        server.faults = [faulty_server.reset] * 10
        with pytest.raises(ServerUnreachable):
            client.wait(str(uuid4()))
        assert len(server.sent) == 4
        server.faults = [faulty_server.reset] * 10
        with pytest.raises(ServerUnreachable):
            client.events(str(uuid4()))
        assert len(server.sent) == 8


def test_a_server_that_holds_nothing_back_is_not_asked_all_the_time(kind: str) -> None:
    """One that is about to end answers at once; the client takes a breath between its questions."""
    waits: list[float] = []
    run = {
        "run_id": str(uuid4()),
        "status": "RUNNING",
        "created_at": "2026-01-01T00:00:00Z",
        "payload_hash": "x",
        "links": {},
        "model": "add",
    }
    with FaultyServer() as server, ClientDriver(kind, server.url) as client:
        note_waits(client, waits)
        server.faults = [saying(200, run), *[saying(200, run)] * 3, saying(200, {**run, "status": "FAILED"})]
        assert client.wait(run["run_id"]).status == "FAILED"
        tag = '"1"'
        server.faults = [saying(200, run, etag=tag), *[saying(304)] * 3, saying(200, {**run, "status": "FAILED"})]
        assert client.wait(run["run_id"], progress=lambda run: None).status == "FAILED"
        assert [each.headers.get("if-none-match") for each in server.sent[5:]] == [None, *[tag] * 4]
    assert waits == [1.0] * 6


def test_a_file_is_fetched_whole_however_often_it_breaks_off(
    far: ClientDriver, line: FaultyServer, tmp_path: Path
) -> None:
    run = far.submit_and_wait("files", {"size": 300_000}, timeout=PATIENCE)
    [artifact] = run.artifacts
    assert (artifact.name, artifact.size) == ("deep/data é.bin", 300_000)
    assert artifact.digest == hashlib.sha256(b"x" * 300_000).hexdigest()
    line.faults = [faulty_server.cut_after(1000), saying(503), faulty_server.cut_after(200_000)]
    assert far.artifact(run.id, artifact.name) == b"x" * 300_000
    target = tmp_path / "data.bin"
    target.write_bytes(b"what was there before")
    line.faults = [faulty_server.cut_after(200_000)]
    assert far.save_artifact(run.id, artifact.name, target) == target
    assert target.read_bytes() == b"x" * 300_000
    assert list(tmp_path.iterdir()) == [target]


def test_a_file_that_cannot_be_had_leaves_what_was_there(far: ClientDriver, line: FaultyServer, tmp_path: Path) -> None:
    run = far.submit_and_wait("files", {"size": 10}, timeout=PATIENCE)
    target = tmp_path / "data.bin"
    target.write_bytes(b"what was there before")
    for name in ("other.bin", "deep/../deep/data é.bin", "/etc/passwd", "."):
        with pytest.raises((RunNotFound, InvalidRequest)):
            far.save_artifact(run.id, name, target)
    line.faults = [faulty_server.cut_after(30)] * 4
    with pytest.raises(ServerUnreachable):
        far.save_artifact(run.id, "deep/data é.bin", target)
    line.faults = [saying(200, b"forged", etag=f'"{run.artifacts[0].digest}"')]
    with pytest.raises(ResultStoreError, match="digest"):
        far.save_artifact(run.id, "deep/data é.bin", target)
    line.faults = [saying(204)]
    with pytest.raises(ServiceError):
        far.artifact(run.id, "deep/data é.bin")
    assert target.read_bytes() == b"what was there before"
    assert list(tmp_path.iterdir()) == [target]


def test_events_go_on_where_the_connection_broke_off(far: ClientDriver, line: FaultyServer) -> None:
    name = gate()
    run = far.submit("gated", {"gate": name})
    cuts = [faulty_server.cut_after(size) for size in (700, 10, 600)]
    line.faults = [
        saying(503),
        faulty_server.reset,
        cuts[0],
        saying(503),
        faulty_server.reset,
        faulty_server.garbage,
        saying(502),
        *cuts[1:],
    ]
    gates[name].set()
    events = far.events(run.id)
    told = [(event.data["step"]) for event in events if event.kind == "state"]
    assert told == [step.step for step in far.timeline(run.id)]
    assert [event.data["text"] for event in events if event.kind == "log"] == ["at the gate", "through the gate"]
    assert line.faults == []
    assert any("last-event-id" in each.headers for each in line.sent)


def test_whoever_stops_listening_leaves_no_connection_behind(client: ClientDriver) -> None:
    run = client.submit("add", {"a": 1}, delay=3600)
    events = client.each(client.client.events(run.id))
    assert next(events).data["step"] == "created"
    events.close()
    pool = client.client._engine.session.backend._client._transport._pool
    assert pool.connections == []
