"""What is told to those who watch the service: health, metrics, logs, over real HTTP, on SQLite and PostgreSQL."""

import io
import json
import logging
import socket
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import psycopg
import pytest

from semel import App
from semel._concurrency.sync import run_sync
from semel.redaction import without_secrets
from semel.service import Settings
from semel.service.auth import tokens
from semel.service.auth.tokens import Role
from semel.service.telemetry.logs import formatter
from support.service import TestServer, host_without_lifespan, make_app, serve
from support.waiting import eventually


@pytest.fixture(params=["sqlite", "postgres"])
def app(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[App]:
    app = make_app(request.getfixturevalue(f"migrated_{request.param}_url"), tmp_path, dedupe_window=0)

    @app.model("counted")
    async def counted(fail: bool = False) -> int:
        if fail:
            raise ValueError("told to")
        return 1

    yield app
    app.close()


@pytest.fixture
def service(app: App) -> Iterator[TestServer]:
    with serve(app) as service:
        yield service


@pytest.fixture
def closed_port() -> int:
    """Of this machine, where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def token(app: App, role: Role, tenant: str = "") -> str:
    """A new token."""
    ledger = app.ledger(awaited=False)
    request = tokens.NewToken(user=f"a-{role}", role=role, tenant=tenant)
    secret = run_sync(ledger.write(tokens.issue, request, ledger.statement_context)).secret
    run_sync(ledger.close())
    return secret


@contextmanager
def logged(how: str) -> Iterator[io.StringIO]:
    """What is logged meanwhile, as the server would show it."""
    shown = io.StringIO()
    handler = logging.StreamHandler(shown)
    handler.setFormatter(formatter(how))
    root = logging.getLogger()
    before = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield shown
    finally:
        root.removeHandler(handler)
        root.setLevel(before)


def told(shown: io.StringIO, request_id: str) -> list[dict[str, Any]]:
    """The lines about a request."""
    lines = [json.loads(line) for line in shown.getvalue().splitlines()]
    return [line for line in lines if line.get("request_id") == request_id]


def test_a_service_that_is_well_says_so_to_anybody(service: TestServer) -> None:
    token(service.app, "admin")
    service.state.auth.clear_cache()
    with service.client() as client:
        for path in ("/healthz", "/readyz"):
            answer = client.get(path)
            assert (answer.status_code, answer.json()) == (200, {"status": "ok", "checks": {"database": "ok"}})
            assert answer.headers["Cache-Control"] == "no-store"
        assert client.get("/runs").status_code == 401


def test_a_database_that_is_away_is_said_and_nothing_more(closed_port: int, tmp_path: Path) -> None:
    app = App(f"postgresql://somebody:hush@127.0.0.1:{closed_port}/name", artifacts=tmp_path)
    with host_without_lifespan(app) as client:
        for path in ("/healthz", "/readyz"):
            answer = client.get(path)
            expected = {"status": "unavailable", "checks": {"database": "unavailable"}}
            assert (answer.status_code, answer.json()) == (503, expected)


def test_a_database_without_tables_is_not_ready(postgres_url: str, tmp_path: Path) -> None:
    with host_without_lifespan(App(postgres_url, artifacts=tmp_path)) as client:
        answer = client.get("/readyz")
    assert (answer.status_code, answer.json()["checks"]) == (503, {"database": "not migrated"})


def test_a_database_that_takes_no_writes_is_alive_but_not_ready(migrated_postgres_url: str, tmp_path: Path) -> None:
    app = make_app(migrated_postgres_url, tmp_path)
    with psycopg.connect(migrated_postgres_url, autocommit=True) as conn:
        name = conn.info.dbname
        conn.execute(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on')
    with host_without_lifespan(app) as client:
        assert client.get("/healthz").json()["checks"] == {"database": "ok"}
        ready = client.get("/readyz")
    assert (ready.status_code, ready.json()["checks"]) == (503, {"database": "read-only"})


@pytest.fixture
def asked_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer is given again."""
    monkeypatch.setattr("semel.service.telemetry.health.FRESH", 0.0)


def counting_writes(file: Path) -> sqlite3.Connection:
    """A connection that can tell how often readiness wrote."""
    conn = sqlite3.connect(file, isolation_level=None)
    conn.execute("CREATE TABLE probes (n INTEGER)")
    for verb in ("INSERT", "UPDATE"):
        conn.execute(f"CREATE TRIGGER probe_{verb} AFTER {verb} ON semel_leaders WHEN NEW.role = 'readyz' "
                     "BEGIN INSERT INTO probes VALUES (1); END")  # fmt: skip
    return conn


@pytest.mark.usefixtures("asked_anew")
def test_nobody_writes_to_sqlite_by_asking_whether_it_is_ready(tmp_path: Path) -> None:
    app = make_app(f"sqlite:///{tmp_path}/semel.db", tmp_path)
    with (
        serve(app) as service,
        service.client() as client,
        closing(counting_writes(tmp_path / "semel.db")) as conn,
    ):
        for _ in range(50):
            assert client.get("/readyz").status_code == 200
        assert conn.execute("SELECT count(*) FROM probes").fetchone()[0] <= 1
    app.close()


@pytest.mark.usefixtures("asked_anew")
def test_a_disk_that_is_full_is_not_ready_until_there_is_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = make_app(f"sqlite:///{tmp_path}/semel.db", tmp_path)
    expected = {"status": "unavailable", "checks": {"database": "unavailable"}}
    with serve(app) as service, service.client() as client:
        with closing(sqlite3.connect(tmp_path / "semel.db", isolation_level=None)) as conn:
            conn.execute("CREATE TRIGGER full BEFORE INSERT ON semel_leaders WHEN NEW.role = 'readyz' "
                         "BEGIN SELECT RAISE(ABORT, 'database or disk is full'); END")  # fmt: skip
            for _ in range(3):
                assert client.get("/readyz").json() == expected
            conn.execute("DROP TRIGGER full")
        assert client.get("/readyz").status_code == 200
        monkeypatch.setattr("semel.service.telemetry.health.MIN_FREE", 1 << 62)
        assert client.get("/readyz").json() == expected
        assert client.get("/healthz").status_code == 200
        monkeypatch.setattr("semel.service.telemetry.health.MIN_FREE", 1)
        assert client.get("/readyz").status_code == 200
    app.close()


def test_redis_is_looked_at_where_it_is_used(app: App, redis_url: str, closed_port: int) -> None:
    app.backlog()  # makes the tables, which on a busy disk may take longer than the health check waits
    for url, status, word in ((redis_url, 200, "ok"), (f"redis://127.0.0.1:{closed_port}/0", 503, "unavailable")):
        with host_without_lifespan(app, Settings(redis=url)) as client:
            answer = client.get("/healthz")
            assert (answer.status_code, answer.json()["checks"]) == (status, {"database": "ok", "redis": word})
            assert client.get("/readyz").status_code == 200


def test_the_redis_of_the_events_is_looked_at_too(app: App, redis_url: str, closed_port: int) -> None:
    """Whether it is the only one, or another one responds."""
    app.backlog()  # as above
    closed = f"redis://127.0.0.1:{closed_port}/0"
    for settings, status, word in (
        (Settings(events=redis_url), 200, "ok"),
        (Settings(events=closed), 503, "unavailable"),
        (Settings(redis=redis_url, events=closed), 503, "unavailable"),
        (Settings(redis=closed, events=redis_url), 503, "unavailable"),
    ):
        with host_without_lifespan(app, settings) as client:
            answer = client.get("/healthz")
        assert (answer.status_code, answer.json()["checks"]) == (status, {"database": "ok", "redis": word})


def test_a_server_that_is_about_to_end_is_not_ready(service: TestServer) -> None:
    service.state.watch.dismiss()
    with service.client() as client:
        assert client.get("/readyz").json()["checks"] == {"server": "ending"}
        assert client.get("/healthz").status_code == 200


def test_metrics_are_for_operators_of_the_house(app: App) -> None:
    secrets = {role: token(app, role) for role in ("submitter", "operator", "admin")}  # type: ignore[arg-type]
    secrets["another house"] = token(app, "admin", tenant="acme")
    with serve(app) as service:
        expected = {"submitter": 403, "operator": 200, "admin": 200, "another house": 403}
        found = {}
        for role, secret in secrets.items():
            with service.client(secret) as client:
                found[role] = client.get("/metrics").status_code
        with service.client() as client:
            assert client.get("/metrics").status_code == 401
    assert found == expected


def test_metrics_tell_of_runs_and_requests(service: TestServer) -> None:
    with service.client() as client:
        before = _numbers(client.get("/metrics").text)
        for parameters in ({}, {"fail": True}):
            body = {"model": "counted", "parameters": parameters, "idempotency_key": f"k{len(parameters)}"}
            assert [client.post("/runs", json=body).status_code for _ in range(2)] == [201, 200]
        client.get("/nowhere/at/all")
        client.request("BREW", "/runs")
        after = _numbers(client.get("/metrics").text)
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown['runs_created_total{model="counted"}'] == 2
    assert grown['runs_replayed_total{model="counted"}'] == 2
    assert grown['semel_http_requests_total{method="POST",route="/runs",status="200"}'] == 2
    assert grown['semel_http_requests_total{method="GET",route="(none)",status="404"}'] == 1
    assert grown['semel_http_requests_total{method="(other)",route="(none)",status="405"}'] == 1
    assert grown['semel_http_request_seconds_count{method="POST",route="/runs"}'] == 4
    assert after["runs_pending"] in (0, 2)  # it is known for some seconds
    assert after["semel_database_up"] == 1
    assert not any("nowhere" in name or "k0" in name for name in after)


def _numbers(text: str) -> dict[str, float]:
    pairs = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


def test_an_exception_is_in_the_log_and_not_in_the_answer(service: TestServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object, **__: object) -> None:
        raise RuntimeError("postgresql://user:hush@host/name broke, sent by Bearer semel_0123456789abcdef_hush")

    monkeypatch.setattr(service.state, "run", broken)
    with logged("json") as shown, service.client() as client:
        answer = client.get("/runs/some-run", headers={"X-Request-Id": "broken-1"})
        eventually(lambda: len(told(shown, "broken-1")) == 2, "the exception and the request are in the log")
    assert (answer.status_code, answer.json()["error_code"]) == (500, "INTERNAL_ERROR")
    assert "RuntimeError" not in answer.text
    failed, answered = told(shown, "broken-1")
    assert failed["exception"].startswith("Traceback")
    assert "RuntimeError" in failed["exception"]
    assert answered["http_status"] == 500
    assert "hush" not in shown.getvalue()
    assert "postgresql://user:***@host/name" in shown.getvalue()


def test_an_expected_refusal_is_one_line_without_a_traceback(service: TestServer) -> None:
    with logged("json") as shown, service.client() as client:
        client.get("/runs/unknown", headers={"X-Request-Id": "unknown-1"})
        (line,) = eventually(lambda: told(shown, "unknown-1"), "the request is in the log")
    assert (line["http_status"], line["level"], line["logger"]) == (404, "info", "semel.access")
    assert not line.keys() & {"exception", "run_id", "status"}


def test_the_line_of_a_request_about_a_run_carries_the_fields_of_the_run(service: TestServer) -> None:
    body = {"model": "counted", "parameters": {}}
    with logged("json") as shown, service.client() as client:

        def line_of(method: str, path: str, **more: Any) -> dict[str, Any]:
            name = f"{method}-{path}".replace("_", "-")[:100]
            assert client.request(method, path, headers={"X-Request-Id": name}, **more).is_success
            (line,) = eventually(lambda: told(shown, name), "the request is in the log")
            found: dict[str, Any] = line
            return found

        made = line_of("POST", "/runs", json=body)
        place = f"/runs/{made['run_id']}"
        lines = [made, line_of("GET", place), line_of("GET", f"{place}/timeline"), line_of("POST", f"{place}/cancel")]
        again = line_of("POST", f"{place}/retry")
        listed = line_of("GET", "/runs")
        run = client.get(place).json()
    for line in lines:
        known = {"run_id": run["run_id"], "payload_hash": run["payload_hash"], "worker_id": None, "attempt_count": 0}
        assert line.items() >= {"model": "counted", **known}.items()
    assert [line["status"] for line in lines] == ["PENDING"] * 3 + ["CANCELLED"]
    assert (again["http_status"], again["status"], again["run_id"] != run["run_id"]) == (201, "PENDING", True)
    assert "run_id" not in listed


def test_probes_are_not_in_the_log(service: TestServer) -> None:
    with logged("pretty") as shown, service.client() as client:
        for path in ("/healthz", "/readyz", "/metrics"):
            assert client.get(path).status_code == 200
        client.get("/runs")
        eventually(lambda: "route=/runs" in shown.getvalue(), "the request is in the log")
    assert shown.getvalue().count("semel.access") == 1


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://me:s3cret@host:5432/name failed", "postgresql://me:***@host:5432/name failed"),
        ("redis://:s3cret@host/0", "redis://:***@host/0"),
        ("Authorization: Bearer abc.def-ghi", "Authorization: Bearer ***"),
        ("token semel_0123456789abcdef_abcDEF-_9 used", "token semel_0123456789abcdef_*** used"),
        ("semel_runs and https://host/path?a=b:c@d", "semel_runs and https://host/path?a=b:c@d"),
        ("nothing to hide", "nothing to hide"),
        ("postgresql://u:p@ss@h/d", "postgresql://u:***@h/d"),
        ("redis://h/0?password=s3cret&db=1", "redis://h/0?password=***&db=1"),
        ("signed with whsec_AbC+/= and r8_AbCd", "signed with whsec_*** and r8_***"),
        ("a." * 200_000 + " ://" * 1000, "a." * 200_000 + " ://" * 1000),
        ("://" + "a:" * 200_000, "://" + "a:" * 200_000),
    ],
    ids=count(1),
)
def test_secrets_are_hidden_in_what_is_logged(text: str, shown: str) -> None:
    assert without_secrets(text) == shown
