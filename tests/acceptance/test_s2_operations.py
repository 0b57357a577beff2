"""S2.41 to 49 over real HTTP: what `semel serve` tells of itself, on SQLite and on PostgreSQL with Redis."""

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from semel import App
from semel.cli import main as semel_command
from semel.service import Settings
from support import servers
from support.serve_command import ServeProcess as Serving
from support.service import host_without_lifespan as unannounced
from support.service import make_app as made_app
from support.waiting import eventually as until

FIELDS = {"run_id", "payload_hash", "worker_id", "status", "attempt_count"}


@pytest.fixture(scope="module", params=["sqlite", "postgres+redis"])
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("operations")
    url, more = f"sqlite:///{folder / 'semel.db'}", []
    if request.param != "sqlite":
        postgres: servers.Postgres = request.getfixturevalue("postgres_server")
        redis: servers.Redis = request.getfixturevalue("redis_server")
        url, more = postgres.database(), ["--events", redis.database()]
    assert semel_command(["migrate", url]) == 0
    with Serving(folder, "support.apps.serve_app:app", "--db", url, "--log-format", "json", *more) as serving:
        yield serving


def numbers(service: Serving) -> dict[str, float]:
    with service.client() as client:
        lines = client.get("/metrics").text.splitlines()
    pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


def grows(service: Serving, before: dict[str, float], name: str, by: float = 1) -> None:
    until(lambda: numbers(service).get(name, 0) - before.get(name, 0) >= by, f"{name} grows")


def test_s2_41_every_line_of_the_servers_worker_carries_the_five_fields(service: Serving) -> None:
    run = service.submit("add", {"a": 1})
    service.becomes(run["run_id"], "SUCCEEDED")
    about = [("semel.worker", run["run_id"])]
    lines = until(
        lambda: (
            (found := [line for line in service.lines() if (line["logger"], line.get("run_id")) in about])[1:] and found
        ),
        "the worker tells of start and end",
    )

    def requests() -> list[Any]:
        return [line for line in service.lines() if line["logger"] == "semel.access" and line.get("run_id")]

    until(lambda: {line["route"] for line in requests()} >= {"/runs", "/runs/{run_id}"}, "both requests are logged")
    assert all(line.keys() >= FIELDS for line in requests())
    assert all(line.keys() >= FIELDS for line in service.lines() if line["logger"] == "semel.worker")
    assert [(line["status"], line["attempt_count"]) for line in lines] == [("RUNNING", 1), ("SUCCEEDED", 1)]
    assert {line["payload_hash"] for line in lines} == {run["payload_hash"]}


def test_s2_42_to_44_the_server_counts_what_was_created_succeeded_and_failed(service: Serving) -> None:
    before = numbers(service)
    for model, parameters in (("add", {"a": 1}), ("fail", {})):
        service.becomes(service.submit(model, parameters)["run_id"], "SUCCEEDED", "FAILED")
    for name in (
        'runs_created_total{model="add"}',
        'runs_created_total{model="fail"}',
        'runs_succeeded_total{model="add"}',
        'runs_failed_total{model="fail"}',
    ):
        grows(service, before, name)
    assert 'runs_failed_total{model="add"}' not in numbers(service)


def test_s2_45_to_46_and_48_the_server_tells_durations_and_lags_in_prometheus_format(service: Serving) -> None:
    before = numbers(service)
    service.becomes(service.submit("sleep", {"seconds": 0.2})["run_id"], "SUCCEEDED")
    grows(service, before, 'run_duration_seconds_count{model="sleep",status="SUCCEEDED"}')
    grows(service, before, 'run_duration_seconds_sum{model="sleep",status="SUCCEEDED"}', by=0.2)
    grows(service, before, 'queue_lag_seconds_count{model="sleep"}')
    with service.client() as client:
        answer = client.get("/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    for line in ("# TYPE run_duration_seconds histogram", "# TYPE queue_lag_seconds histogram"):
        assert line in answer.text.splitlines()


def test_s2_47_the_server_counts_runs_whose_worker_was_lost(service: Serving) -> None:
    before = numbers(service)
    run = service.submit("last", {"seconds": 600})
    service.becomes(run["run_id"], "RUNNING")
    os.kill(service.children()[-1], signal.SIGKILL)
    grows(service, before, "stuck_runs_detected_total")
    with service.client() as client:
        client.post(f"/runs/{run['run_id']}/cancel")


def test_s2_49_healthz_checks_the_database_and_redis_where_it_is_used(
    service: Serving, request: pytest.FixtureRequest
) -> None:
    with service.client() as client:
        answer = client.get("/healthz")
    assert (answer.status_code, answer.json()["status"]) == (200, "ok")
    with_redis = request.node.callspec.params["service"] == "postgres+redis"
    assert set(answer.json()["checks"]) == ({"database", "redis"} if with_redis else {"database"})


def checks_of(client: Any) -> Any:
    """The checks of ``/healthz``. On a busy machine, a reply may come too late for one of them."""
    return client.get("/healthz").json()["checks"]


@pytest.mark.parametrize("transport", ["rq", "celery"])
def test_s2_49_healthz_asks_the_redis_of_the_apps_own_transport(
    transport: str, sqlite_url: str, redis_url: str, tmp_path: Path
) -> None:
    """No setting of the server names it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    for url, word in ((redis_url, "ok"), (f"redis://127.0.0.1:{port}/0", "unavailable")):
        app = made_app(sqlite_url, tmp_path, transport=transport, redis=url)
        with unannounced(app) as client:
            until(lambda client=client, word=word: checks_of(client) == {"database": "ok", "redis": word})
        app.close()


def test_s2_49_healthz_asks_the_redis_of_the_events(sqlite_url: str, redis_url: str, tmp_path: Path) -> None:
    """And says that one is away, although another answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        away = f"redis://127.0.0.1:{listener.getsockname()[1]}/0"
    for redis, events, word in (
        (redis_url, redis_url, "ok"),
        (redis_url, away, "unavailable"),
        (None, away, "unavailable"),
    ):
        app = made_app(sqlite_url, tmp_path, **({"transport": "rq", "redis": redis} if redis else {}))
        with unannounced(app, Settings(events=events)) as client:
            until(lambda client=client, word=word: checks_of(client) == {"database": "ok", "redis": word})
        app.close()


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_s2_49_healthz_says_which_of_them_is_away(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    here = made_app(request.getfixturevalue(f"{kind}_url"), tmp_path)
    away = App(f"postgresql://127.0.0.1:{port}/name", artifacts=tmp_path)
    for app, redis, checks in (
        (here, f"redis://127.0.0.1:{port}/0", {"database": "ok", "redis": "unavailable"}),
        (away, request.getfixturevalue("redis_url"), {"database": "unavailable", "redis": "ok"}),
    ):
        with unannounced(app, Settings(redis=redis)) as client:
            until(lambda client=client, checks=checks: checks_of(client) == checks)
            assert client.get("/healthz").status_code == 503
        app.close()
