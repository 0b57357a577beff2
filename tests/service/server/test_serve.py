"""`semel serve` in processes of its own, with real signals, on SQLite and PostgreSQL."""

import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import httpx
import pytest

from semel import App
from semel.cli import main as semel_command
from semel.errors import InvalidRequest
from semel.service.settings import Settings, from_environment
from support import servers
from support.programs import outcome
from support.serve_command import PATIENCE, ServeProcess, command, environment
from support.servers import free_port
from support.waiting import eventually
from support.warm_python import WarmPython

APP = "support.apps.serve_app:app"


@pytest.fixture(params=["sqlite", "postgres"])
def db(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    url: str = request.getfixturevalue(f"migrated_{request.param}_url")
    return url


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    """One server with two processes for the tests that only ask."""
    folder = tmp_path_factory.mktemp("serving")
    url = f"sqlite:///{folder / 'semel.db'}"
    if request.param == "postgres":
        server: servers.Postgres = request.getfixturevalue("postgres_server")
        url = server.database()
        assert semel_command(["migrate", url]) == 0
    more = {"SEMEL_HEADER_TIMEOUT": "1", "SEMEL_LOG_FORMAT": "pretty"}
    with ServeProcess(folder, APP, "--db", url, "--processes", "2", "--log-format", "json", **more) as serving:
        yield serving


def test_the_worker_beside_the_server_does_what_is_submitted(service: ServeProcess) -> None:
    for model, parameters, result in (("add", {"a": 1, "b": 2}, 3), ("count", {"to": 4}, 6)):
        run = service.submit(model, parameters)
        service.becomes(run["run_id"], "SUCCEEDED")
        with service.client() as client:
            assert client.get(f"/runs/{run['run_id']}/result").json() == result
    assert service.said == f"semel serves {APP} on {service.address} (Ctrl-C ends it)\n"


def test_every_line_of_the_worker_about_a_run_has_the_fields_of_the_run(service: ServeProcess) -> None:
    run = service.submit("add", {"a": 1})
    service.becomes(run["run_id"], "SUCCEEDED")
    lines = eventually(
        lambda: [
            each for each in service.lines() if each.get("run_id") == run["run_id"] and "succeeded" in each["event"]
        ],
        "the worker says that it is done",
    )
    (line,) = lines
    assert line["payload_hash"] == run["payload_hash"]
    assert (line["status"], line["attempt_count"], line["model"]) == ("SUCCEEDED", 1, "add")
    assert line["worker_id"]
    assert "payload_hash=" not in line["event"]


def test_a_request_has_a_name_and_a_line_without_its_query_or_its_token(service: ServeProcess) -> None:
    with service.client() as client:
        named = client.get("/runs/unknown-run?secret=hush", headers={"X-Request-Id": "mine/1"})
        other = client.get("/runs/unknown-run", headers={"X-Request-Id": "not\tfit" * 90})
        bad = client.get("/runs", headers={"Authorization": "Bearer semel_0123456789abcdef_hush-hush"})
    assert named.headers["X-Request-Id"] == "mine/1"
    assert len(other.headers["X-Request-Id"]) == 32
    assert bad.status_code == 401
    lines = eventually(
        lambda: [each for each in service.lines() if each.get("request_id") == "mine/1"], "the request is in the log"
    )
    (line,) = [each for each in lines if each["logger"] == "semel.access"]
    assert (line["method"], line["route"], line["http_status"], line["user"]) == ("GET", "/runs/{run_id}", 400, "local")
    assert line["ms"] > 0
    refused = eventually(
        lambda: [each for each in service.lines() if each.get("request_id") == bad.headers["X-Request-Id"]],
        "the refused request is in the log",
    )
    assert refused[0]["http_status"] == 401
    assert "hush" not in service.log


def test_metrics_are_of_all_processes_together(service: ServeProcess) -> None:
    before = _metrics(service)
    runs = []
    for number in range(6):  # a connection each, so that both processes are asked
        with service.client() as client:
            body = {"model": "add", "parameters": {"a": number}, "idempotency_key": f"metrics-{number}"}
            runs.append(client.post("/runs", json=body).json())
            assert client.post("/runs", json=body).status_code == 200
    for run in runs:
        service.becomes(run["run_id"], "SUCCEEDED")
    for name, grown in (
        ('runs_created_total{model="add"}', 6),
        ('runs_replayed_total{model="add"}', 6),
        ('runs_succeeded_total{model="add"}', 6),
        ('run_duration_seconds_count{model="add",status="SUCCEEDED"}', 6),
        ('queue_lag_seconds_count{model="add"}', 6),
        ('semel_http_requests_total{method="POST",route="/runs",status="201"}', 6),
    ):
        eventually(lambda name=name, grown=grown: _metrics(service).get(name, 0) - before.get(name, 0) == grown, name)
    now = _metrics(service)
    assert now["stuck_runs_detected_total"] == 0
    assert now["semel_database_up"] == 1
    assert 0 < now["runs_replay_ratio"] < 1
    assert eventually(lambda: _metrics(service)["workers_alive"], "the worker is seen") == 1


def _metrics(service: ServeProcess) -> dict[str, float]:
    with service.client() as client:
        answer = client.get("/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain"), f"{answer.text}\n{service.log}"
    pairs = (line.rpartition(" ") for line in answer.text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


def test_slow_and_large_heads_are_not_waited_for(service: ServeProcess) -> None:
    host, port = service.address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), PATIENCE) as slow:
        slow.sendall(b"GET /runs HTTP/1.1\r\nHo")
        assert slow.recv(1000) == b""  # it was closed
    with service.client() as client:
        assert client.get("/healthz", headers={"X-Large": "a" * 100_000}).status_code == 431
        assert client.get("/healthz").status_code == 200


@pytest.mark.parametrize("terminal", [False, True], ids=["SIGTERM", "Ctrl-C"])
def test_told_to_end_it_lets_requests_streams_and_runs_end(
    terminal: bool, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Ctrl-C reaches every process of the terminal's group, and counts once."""
    db: str = request.getfixturevalue("migrated_sqlite_url" if terminal else "migrated_postgres_url")
    with ServeProcess(tmp_path, APP, "--db", db) as serving:
        run = serving.submit("sleep", {"seconds": 1.5})
        waits = serving.submit("add", {"a": 1}, queue="nobodys")
        serving.becomes(run["run_id"], "RUNNING")
        answers: dict[str, httpx.Response] = {}

        def ask(name: str, path: str) -> None:
            with serving.client() as client:
                answers[name] = client.get(path)

        asked = {"poll": f"/runs/{waits['run_id']}?wait=60", "stream": f"/runs/{waits['run_id']}/events"}
        threads = [threading.Thread(target=ask, args=each) for each in asked.items()]
        for thread in threads:
            thread.start()
        eventually(lambda: _in_flight(serving) == 3, "both wait")  # and the one that asks
        serving.stop(signal.SIGINT if terminal else signal.SIGTERM, group=terminal)
        for thread in threads:
            thread.join(PATIENCE)
        assert serving.ended() == 0
    assert (answers["poll"].status_code, answers["stream"].status_code) == (200, 200)
    assert answers["poll"].json()["status"] == "PENDING"
    app = App(db)
    assert app.get(run["run_id"]).status == "SUCCEEDED"
    app.close()


def _in_flight(serving: ServeProcess) -> float:
    return _metrics(serving)["semel_http_requests_in_flight"]


def test_told_twice_it_ends_at_once_and_gives_runs_back(db: str, tmp_path: Path) -> None:
    with ServeProcess(tmp_path, APP, "--db", db, "--drain", "600") as serving:
        run = serving.submit("sleep", {"seconds": 600})
        serving.becomes(run["run_id"], "RUNNING")
        serving.stop()
        eventually(lambda: "a second signal gives them back" in serving.log, "the worker drains")
        serving.stop()
        assert serving.ended() == 0
    app = App(db)
    given_back = app.get(run["run_id"])
    assert (given_back.status, given_back.attempts) == ("PENDING", 0)
    app.close()


def test_told_twice_it_waits_until_the_runs_are_given_back(migrated_sqlite_url: str, tmp_path: Path) -> None:
    """Somebody else holds the lock of the file for some seconds: the worker is not killed before it gets its turn."""
    with ServeProcess(tmp_path, APP, "--db", migrated_sqlite_url, "--drain", "600") as serving:
        run = serving.submit("sleep", {"seconds": 600})
        serving.becomes(run["run_id"], "RUNNING")
        serving.stop()
        eventually(lambda: "a second signal gives them back" in serving.log, "the worker drains")
        with closing(sqlite3.connect(migrated_sqlite_url.removeprefix("sqlite:///"), isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            serving.stop()
            time.sleep(5.5)  # longer than a database may keep the last courtesies of a worker waiting
        assert serving.ended() == 0
    app = App(migrated_sqlite_url)
    given_back = app.get(run["run_id"])
    assert (given_back.status, given_back.attempts) == ("PENDING", 0)
    app.close()


def test_when_the_parent_is_killed_nothing_is_left(migrated_postgres_url: str, tmp_path: Path) -> None:
    with ServeProcess(tmp_path, APP, "--db", migrated_postgres_url, "--processes", "2") as serving:
        eventually(lambda: len(serving.children()) == 3, "two servers and a worker")
        run = serving.submit("sleep", {"seconds": 600})
        serving.becomes(run["run_id"], "RUNNING")
        serving.stop(signal.SIGKILL)
        serving.ended()
        eventually(lambda: not serving.left(), "the others notice")


_TOLD_AT_BIRTH = """
import os, signal, time
from semel.service.server.supervisor import SupervisedProcess, Supervisor

fork, forks = os.fork, []

def slow_fork():
    pid = fork()
    forks.append(pid)
    if len(forks) == 2:
        if pid:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            time.sleep(0.5)  # the signal comes before the child has done anything
    return pid

def main(ready):
    ready()
    time.sleep(600)
    return 0

os.fork = slow_fork
code = Supervisor(600).run(SupervisedProcess("first", main), [SupervisedProcess("second", main)], lambda: None)
tell((code, len(forks)))
"""


def test_a_process_that_was_just_begun_is_told_to_end_like_the_others() -> None:
    assert outcome(_TOLD_AT_BIRTH) == (0, 2)


_DYING = """
import time
from semel.service.server import supervisor as supervision
from semel.service.server.supervisor import SupervisedProcess, Supervisor

supervision.FIRST_PAUSE, supervision.LONGEST_PAUSE = 0.01, 0.04
begun = []

def first(ready):
    ready()
    time.sleep(600)

class Watched(SupervisedProcess):
    def started(self, pid, ready_read):
        begun.append(time.monotonic())
        super().started(pid, ready_read)
        if len(begun) == 6:
            supervisor._stop(0)

    def exited(self):
        pauses.append(super().exited())
        return pauses[-1]

pauses = []
supervisor = Supervisor(600)
code = supervisor.run(SupervisedProcess("first", first), [Watched("second", lambda ready: 3)], lambda: None)
tell((code, pauses[:5]))
"""


def test_a_process_that_dies_again_and_again_is_started_ever_more_seldom() -> None:
    assert outcome(_DYING) == (0, [0.01, 0.02, 0.04, 0.04, 0.04])


def test_a_worker_that_is_killed_is_started_again(migrated_sqlite_url: str, tmp_path: Path) -> None:
    with ServeProcess(tmp_path, APP, "--db", migrated_sqlite_url, "--log-format", "json") as serving:
        _, worker = eventually(lambda: len(serving.children()) == 2 and serving.children(), "a server and a worker")
        os.kill(worker, signal.SIGKILL)
        said = eventually(
            lambda: [each for each in serving.lines() if "the worker has died" in each["event"]], "the parent says so"
        )
        assert "signal 9" in said[0]["event"]
        run = serving.submit("add", {"a": 1})
        serving.becomes(run["run_id"], "SUCCEEDED")


def test_a_server_that_is_killed_is_started_again_while_another_answers(
    migrated_sqlite_url: str, tmp_path: Path
) -> None:
    """And without a worker the runs wait."""
    with ServeProcess(tmp_path, APP, "--processes", "2", SEMEL_DB=migrated_sqlite_url, SEMEL_WORKER="false") as serving:
        eventually(lambda: len(serving.children()) == 2, "two servers")
        first, second = serving.children()
        run = serving.submit("add", {"a": 1})
        waits = threading.Thread(target=_wait, args=(serving, run["run_id"]))
        waits.start()
        eventually(lambda: _in_flight(serving) == 2, "one waits")
        os.kill(first, signal.SIGKILL)
        eventually(lambda: len(serving.children()) == 2 and first not in serving.children(), "it is started again")
        os.kill(second, signal.SIGKILL)
        eventually(lambda: len(serving.children()) == 2 and second not in serving.children(), "the other, too")
        eventually(lambda: _answers(serving), "the new ones answer")
        assert _metrics(serving)['runs_created_total{model="add"}'] == 1
        assert _in_flight(serving) == 1
        assert serving.run(run["run_id"])["status"] == "PENDING"
        waits.join(PATIENCE)


def _wait(serving: ServeProcess, run_id: str) -> None:
    """As long as the server lives that was asked."""
    with serving.client() as client, suppress(httpx.TransportError):
        client.get(f"/runs/{run_id}?wait=60")


def _answers(serving: ServeProcess) -> bool:
    try:
        with serving.client() as client:
            return client.get("/readyz").status_code == 200
    except httpx.TransportError:
        return False


def test_the_demo_says_what_to_try_and_that_works_when_it_is_pasted(tmp_path: Path) -> None:
    with ServeProcess(tmp_path) as serving:
        eventually(lambda: "Ctrl-C stops the server" in serving.said, "it has said everything")
        assert serving.said.startswith("semel serves semel.demo:app on http://127.0.0.1:")
        assert (tmp_path / "semel.db").exists()
        submit, look, wait = re.findall(r"^  ((?:curl|semel) .*(?:\n    .*)?)", serving.said, re.MULTILINE)
        first, again = (json.loads(_pasted(submit, tmp_path)) for _ in range(2))
        assert (first["run_id"], first["replayed"], again["replayed"]) == (again["run_id"], False, True)
        assert [run["run_id"] for run in json.loads(_pasted(look, tmp_path))["runs"]] == [first["run_id"]]
        serving.becomes(_pasted(wait, tmp_path).strip(), "SUCCEEDED")
    address = serving.address
    with pytest.raises(httpx.ConnectError):
        httpx.get(address, timeout=60)


def _pasted(line: str, folder: Path) -> str:
    """What a line says that is pasted into a terminal."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["sh", "-c", line],
        cwd=folder,
        env=environment(PATH=path),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=PATIENCE,
    ).stdout


def test_for_rq_only_the_sweeper_runs_beside(migrated_sqlite_url: str, redis_url: str, tmp_path: Path) -> None:
    with ServeProcess(tmp_path, APP, "--db", migrated_sqlite_url, "--transport", "rq", "--redis", redis_url) as serving:
        eventually(lambda: "this process only sweeps" in serving.log, "it says so")
        run = serving.submit("add", {"a": 1})
        assert serving.run(run["run_id"])["status"] == "PENDING"
        with serving.client() as client:
            assert client.get("/healthz").json()["checks"] == {"database": "ok", "redis": "ok"}


def test_a_port_in_use_is_said(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        done = command("serve", "--port", port, cwd=tmp_path)
    assert done.returncode == 1
    assert f"127.0.0.1:{port} is in use by another program" in done.stderr
    assert "Traceback" not in done.stderr


def test_two_servers_do_not_share_a_port_unnoticed(service: ServeProcess, tmp_path: Path) -> None:
    port = service.address.rpartition(":")[2]
    done = command("serve", "--port", port, cwd=tmp_path)
    assert (done.returncode, "is in use" in done.stderr) == (1, True)


def test_beyond_this_machine_it_is_served_only_with_tokens(db: str, tmp_path: Path) -> None:
    refused = command("serve", APP, "--db", db, "--host", "0.0.0.0", "--port", "0", cwd=tmp_path)
    assert refused.returncode == 1
    assert "there are no tokens yet" in refused.stderr
    assert "semel token create --user admin --role admin" in refused.stderr
    if db.startswith("sqlite"):
        assert semel_command(["token", "create", "--user", "ops", "--role", "admin", "--db", db]) == 0
        with ServeProcess(tmp_path, APP, "--db", db, "--host", "0.0.0.0") as serving, serving.client() as client:
            assert client.get("/healthz").status_code == 200
            assert client.get("/metrics").status_code == 401


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.at_all:app"], "there is no module 'nowhere.at_all'"),
        ([APP, "--db", "mysql://host/name"], "runs live in SQLite or PostgreSQL"),
        ([APP, "--db", "sqlite:////nowhere/at/all.db"], "does not exist"),
        ([APP, "--host", "198.51.100.7"], "--host takes an address of this machine"),
        ([APP, "--transport", "rq"], "needs redis="),
    ],
)
def test_what_cannot_be_served_is_said_once_and_without_a_traceback(
    arguments: list[str], said: str, tmp_path: Path
) -> None:
    done = command("serve", "--port", "0", *arguments, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.count(said) == 1, done.stderr
    assert "Traceback" not in done.stderr


def test_a_server_does_not_migrate_a_database_that_has_an_operator(postgres_url: str, tmp_path: Path) -> None:
    done = command("serve", APP, "--db", postgres_url, "--port", "0", cwd=tmp_path)
    assert (done.returncode, "run: semel migrate" in done.stderr) == (1, True)


def test_options_win_over_the_environment_and_both_over_what_is_usual() -> None:
    environ = {"SEMEL_PORT": "9000", "SEMEL_PROCESSES": "3", "SEMEL_WORKER": "false", "SEMEL_HOST": ""}
    settings = from_environment(environ, port="9001", host=None)
    assert (settings.port, settings.processes, settings.worker, settings.host) == (9001, 3, False, "127.0.0.1")
    assert from_environment(settings.environment()) == settings


@pytest.mark.parametrize("name", ["port", "processes", "max_body", "rate", "drain", "header_timeout", "LOG_LEVEL"])
def test_a_setting_that_makes_no_sense_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match=name):
        from_environment({f"SEMEL_{name.upper()}": "-7"})
    assert getattr(Settings(), name.lower()) is not None


def test_a_worker_elsewhere_tells_prometheus_and_logs_as_json(migrated_sqlite_url: str, tmp_path: Path) -> None:
    port = free_port()
    app = App(migrated_sqlite_url)
    app.model("add", isolation="thread")(lambda a: None)
    run = app.submit("add", {"a": 1})
    log = tmp_path / "worker.txt"
    arguments = [
        "worker",
        APP,
        "--db",
        migrated_sqlite_url,
        "--metrics",
        str(port),
        "--log",
        "json",
        "--processes",
        "1",
    ]
    with log.open("w") as out:
        worker = WarmPython(
            [sys.executable, "-m", "semel.cli", *arguments], env=environment(), cwd=tmp_path, stdout=out, stderr=out
        )
    try:
        app.wait(run.id, timeout=PATIENCE)
        succeeded = 'runs_succeeded_total{model="add"} 1.0'
        eventually(lambda: succeeded in httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=60).text, succeeded)
    finally:
        worker.terminate()
        worker.wait(PATIENCE)
    app.close()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["status"] for line in lines if line.get("run_id") == run.id] == ["RUNNING", "SUCCEEDED"]


def test_a_server_without_a_worker_says_once_that_it_serves(migrated_sqlite_url: str, tmp_path: Path) -> None:
    with ServeProcess(tmp_path, APP, "--db", migrated_sqlite_url, "--no-worker") as serving:
        (server,) = eventually(serving.children, "the server")
        os.kill(server, signal.SIGKILL)
        eventually(lambda: serving.children() not in ([], [server]), "another")
        eventually(lambda: _answers(serving), "it answers")
        assert serving.said.count("semel serves") == 1


def test_a_full_folder_for_temporary_files_stops_nothing(migrated_sqlite_url: str, tmp_path: Path) -> None:
    """Counters lie in memory: a file of theirs that finds no room would end the process that counts."""
    with ServeProcess(tmp_path, APP, "--db", migrated_sqlite_url) as serving:
        assert list(tmp_path.glob("semel-metrics-*")) == []
        assert _metrics(serving)
