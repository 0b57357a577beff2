"""Waiting for runs over HTTP: long polls and server-sent events, and that a crowd of them costs few statements."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import httpx
import pytest

from semel._concurrency.sync import run_sync
from semel.runs.store import queries
from semel.service import sse
from support.databases import remove_run
from support.run_service import app_with_models, ended, submitted
from support.service import PATIENCE, TestServer, serve
from support.waiting import eventually


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestServer]:
    with app_with_models(request, tmp_path_factory.mktemp("watched")) as app, serve(app) as service:
        yield service


@pytest.fixture
def client(service: TestServer) -> Iterator[httpx.Client]:
    with service.client() as client:
        yield client


@pytest.fixture
def aside() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(32) as pool:
        yield pool


class Event(NamedTuple):
    kind: str
    id: str
    data: Any


def events_of(lines: Iterator[str]) -> Iterator[Event]:
    """The events of a stream, without its comments."""
    fields: dict[str, str] = {}
    for line in lines:
        if not line and "data" in fields:
            yield Event(fields["event"], fields["id"], json.loads(fields["data"]))
        if not line:
            fields = {}
        elif not line.startswith(":"):
            name, _, value = line.partition(": ")
            fields[name] = value


@contextmanager
def stream(client: httpx.Client, run_id: str, last: str | None = None) -> Iterator[httpx.Response]:
    headers = {} if last is None else {"Last-Event-ID": last}
    with client.stream("GET", f"/runs/{run_id}/events", headers=headers) as answer:
        yield answer


def waiters(service: TestServer) -> int:
    return sum(len(each) for each in service.state.watch._waiters.values())


def waiting(
    service: TestServer, wait: Callable[[], httpx.Response], aside: ThreadPoolExecutor
) -> Future[httpx.Response]:
    """The answer to come of a request that now waits."""
    before = waiters(service)
    future = aside.submit(wait)
    eventually(lambda: future.done() or waiters(service) > before, "the wait")
    assert not future.done(), future.result().text
    return future


def test_a_wait_is_answered_when_the_run_is_over(
    service: TestServer, client: httpx.Client, aside: ThreadPoolExecutor
) -> None:
    run_id = submitted(client, "add", {"a": 1})
    answer = waiting(service, lambda: client.get(f"/runs/{run_id}", params={"wait": 60}), aside)
    with service.app.working(processes=0):
        assert answer.result(PATIENCE).json()["status"] == "SUCCEEDED"
    again = client.get(f"/runs/{run_id}", params={"wait": 60})
    assert again.json()["status"] == "SUCCEEDED"


def test_a_wait_for_a_change_ends_with_any_change(
    service: TestServer, client: httpx.Client, aside: ThreadPoolExecutor
) -> None:
    run_id = submitted(client, "linger")
    tag = client.get(f"/runs/{run_id}").headers["ETag"]

    def look() -> httpx.Response:
        return client.get(f"/runs/{run_id}", params={"wait": 60}, headers={"If-None-Match": tag})

    answer = waiting(service, look, aside)
    with service.app.working(processes=0):
        changed = answer.result(PATIENCE)
        assert (changed.status_code, changed.json()["status"]) == (200, "RUNNING")
        client.post(f"/runs/{run_id}/cancel")
        assert ended(client, run_id)["status"] == "CANCELLED"


def test_a_wait_without_a_change_ends_with_the_time(client: httpx.Client) -> None:
    run_id = submitted(client, "add", {"a": 1}, delay=3600)
    first = client.get(f"/runs/{run_id}", params={"wait": 0.05})
    assert (first.status_code, first.json()["status"]) == (200, "PENDING")
    known = client.get(f"/runs/{run_id}", params={"wait": 0.05}, headers={"If-None-Match": first.headers["ETag"]})
    assert known.status_code == 304


def test_a_client_that_hangs_up_while_it_waits_is_forgotten(service: TestServer, client: httpx.Client) -> None:
    run_id = submitted(client, "add", {"a": 1})
    before = waiters(service)
    port = httpx.URL(service.address).port
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as line:
            line.sendall(f"GET /runs/{run_id}?wait=60 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
            eventually(lambda: waiters(service) == before + 1, "the wait")
        eventually(lambda: waiters(service) == before, "that it is forgotten")


def test_who_knows_a_run_that_is_over_does_not_wait(client: httpx.Client) -> None:
    run_id = submitted(client, "add", {"a": 1}, delay=3600)
    tag = client.post(f"/runs/{run_id}/cancel") and client.get(f"/runs/{run_id}").headers["ETag"]
    answer = client.get(f"/runs/{run_id}", params={"wait": 60}, headers={"If-None-Match": tag}, timeout=20)
    assert answer.status_code == 304


def test_a_run_that_is_purged_while_somebody_waits_is_gone(
    service: TestServer, client: httpx.Client, aside: ThreadPoolExecutor
) -> None:
    run_id = submitted(client, "add", {"a": 1}, delay=3600)
    tag = client.get(f"/runs/{run_id}").headers["ETag"]
    looks = [
        lambda: client.get(f"/runs/{run_id}", params={"wait": 60}, headers={"If-None-Match": tag}),
        lambda: client.get(f"/runs/{run_id}", params={"wait": 60}),
    ]
    answers = [waiting(service, look, aside) for look in looks]
    ledger = service.app.ledger(awaited=False)
    run_sync(ledger.write(remove_run, run_id))
    run_sync(ledger.close())
    assert [answer.result(PATIENCE).status_code for answer in answers] == [404, 404]


def test_a_crowd_that_waits_asks_with_few_statements(
    service: TestServer, client: httpx.Client, aside: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []
    real = queries.versions

    def counted(conn: Any, ids: list[str]) -> Any:
        looked.append(len(ids))
        return real(conn, ids)

    monkeypatch.setattr(queries, "versions", counted)
    ids = [submitted(client, "add", {"a": n}, delay=3600) for n in range(24)]
    answers = [aside.submit(client.get, f"/runs/{run_id}", params={"wait": 60}) for run_id in ids]
    eventually(lambda: waiters(service) == 24, "the crowd")
    eventually(lambda: looked[-3:] == [24] * 3, "looks at all of them")
    del looked[:]
    eventually(lambda: len(looked) >= 3, "some looks")
    assert set(looked) == {24}
    for run_id in ids:
        client.post(f"/runs/{run_id}/cancel")
    assert {answer.result(PATIENCE).json()["status"] for answer in answers} == {"CANCELLED"}
    eventually(lambda: waiters(service) == 0, "an empty table")


def test_nobody_waits_and_nothing_is_asked(service: TestServer, monkeypatch: pytest.MonkeyPatch) -> None:
    eventually(lambda: service.state.watch._task is None or service.state.watch._task.done(), "the end of the looks")
    looked: list[int] = []
    monkeypatch.setattr(queries, "versions", lambda conn, ids: looked.append(len(ids)) or {})
    time.sleep(0.1)  # nothing must happen in it
    assert looked == []


def test_the_life_of_a_run_is_told_as_it_happens(service: TestServer, client: httpx.Client) -> None:
    run_id = submitted(client, "talk", {"lines": 2})
    with stream(client, run_id) as answer:
        assert answer.headers["Content-Type"].partition(";")[0] == "text/event-stream"
        assert answer.headers["Cache-Control"] == "no-store"
        events = events_of(answer.iter_lines())
        assert next(events).data["step"] == "created"
        with service.app.working(processes=0):
            rest = list(events)
    told = [
        (event.kind, event.data.get("step") or event.data.get("text")) for event in rest if event.kind != "progress"
    ]
    assert told == [("state", "leased"), ("log", "line 0"), ("log", "line 1"), ("state", "succeeded")]
    progress = [event.data for event in rest if event.kind == "progress"]
    assert progress[-1:] in ([{"progress": 0.5, "note": "half"}], [{"progress": 1.0, "note": None}], [])


def test_who_comes_back_goes_on_where_they_were(service: TestServer, client: httpx.Client) -> None:
    run_id = submitted(client, "talk", {"lines": 3})
    with service.app.working(processes=0):
        ended(client, run_id)
    with stream(client, run_id) as answer:
        everything = [event for event in events_of(answer.iter_lines()) if event.kind != "progress"]
    assert [event.kind for event in everything] == ["state", "state", "log", "log", "log", "state"]
    for seen, event in enumerate(everything[:-1], 1):
        with stream(client, run_id, event.id) as answer:
            rest = [each for each in events_of(answer.iter_lines()) if each.kind != "progress"]
        assert rest == everything[seen:]
    with stream(client, run_id, everything[-1].id) as answer:
        assert answer.status_code == 204


@pytest.mark.parametrize("last", ["", "garbage", "1-2", "9" * 40, "-1-0-0"])
def test_an_id_that_is_none_is_the_beginning(client: httpx.Client, last: str) -> None:
    run_id = submitted(client, "add", {"a": 1}, delay=3600)
    client.post(f"/runs/{run_id}/cancel")
    with stream(client, run_id, last) as answer:
        assert [event.data["step"] for event in events_of(answer.iter_lines())] == ["created", "cancelled"]


def test_a_silent_stream_says_that_it_is_alive(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "HEARTBEAT", 0.05)
    run_id = submitted(client, "add", {"a": 1}, delay=3600)
    with stream(client, run_id) as answer:
        lines = answer.iter_lines()
        comments = [next(line for line in lines if line.startswith(":")) for _ in range(3)]
    assert comments == [": hello", ": still here", ": still here"]


def test_a_client_that_leaves_is_forgotten(service: TestServer, client: httpx.Client) -> None:
    eventually(lambda: waiters(service) == 0, "quiet")
    run_id = submitted(client, "add", {"a": 1}, delay=3600)
    with stream(client, run_id) as answer:
        lines = answer.iter_lines()
        assert next(lines) == ": hello"
        eventually(lambda: waiters(service) == 1, "the stream")
    eventually(lambda: waiters(service) == 0, "the farewell")


def test_clients_that_leave_in_the_middle_break_no_connection(
    service: TestServer, client: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    run_id = submitted(client, "add", {"a": 1}, delay=3600)
    for _ in range(20):
        with stream(client, run_id) as answer:
            assert answer.status_code == 200
    eventually(lambda: waiters(service) == 0, "the farewell")
    assert client.get(f"/runs/{run_id}").status_code == 200
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


def test_a_server_that_ends_lets_everybody_go(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, aside: ThreadPoolExecutor
) -> None:
    request.param = "sqlite"
    heard: list[str] = []
    with (
        app_with_models(request, tmp_path_factory.mktemp("ending")) as app,
        serve(app) as service,
        service.client() as client,
    ):
        run_id = submitted(client, "add", {"a": 1}, delay=3600)
        poll = aside.submit(client.get, f"/runs/{run_id}", params={"wait": 60})

        def listen() -> None:
            with service.client() as other, stream(other, run_id) as answer:
                heard.extend(event.kind for event in events_of(answer.iter_lines()))

        listening = threading.Thread(target=listen)
        listening.start()
        eventually(lambda: waiters(service) == 2, "both")
        service.state.watch.dismiss()
        assert poll.result(PATIENCE).json()["status"] == "PENDING"
        listening.join(PATIENCE)
    assert (heard, listening.is_alive()) == (["state"], False)
