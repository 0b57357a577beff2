"""The service inside other people's applications, on real servers."""

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from flask import Flask
from litestar import Litestar
from litestar import asgi as litestar_asgi
from starlette.applications import Starlette
from starlette.routing import Mount
from werkzeug.middleware.dispatcher import DispatcherMiddleware

from semel import App
from semel.service import asgi, wsgi
from support.serve_command import environment
from support.service import host_asgi, host_wsgi, make_app
from support.waiting import eventually


@pytest.fixture
def app(migrated_sqlite_url: str, tmp_path: Path) -> Iterator[App]:
    app = make_app(migrated_sqlite_url, tmp_path, dedupe_window=0)

    @app.model("add")
    async def add(a: int, b: int = 0) -> int:
        return a + b

    yield app
    app.close()


def in_starlette(service: Any) -> Any:
    """It tells mounted applications nothing: the service opens with its first request."""
    return Starlette(routes=[Mount("/semel", service)])


def in_fastapi(service: Any) -> Any:
    """Who wants the service to start and to end with the application passes that on."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with service.lifespan():
            yield

    outer = FastAPI(lifespan=lifespan)
    outer.mount("/semel", service)
    return outer


def in_litestar(service: Any) -> Any:
    @asynccontextmanager
    async def lifespan(_: Litestar) -> AsyncIterator[None]:
        async with service.lifespan():
            yield

    mounted = litestar_asgi("/semel", is_mount=True, copy_scope=True)(service)
    return Litestar([mounted], lifespan=[lifespan], openapi_config=None, logging_config=None)


@pytest.mark.parametrize("mount", [in_starlette, in_fastapi, in_litestar])
def test_mounted_under_a_prefix_it_answers_with_links_that_lead_back(mount: Any, app: App) -> None:
    service = asgi(app)
    with host_asgi(mount(service)) as client:
        assert_answers(client)
    app.close()


def test_two_services_of_one_process_share_their_routes_and_nothing_else(tmp_path: Path) -> None:
    def add(a: int) -> int:
        return a

    apps = [make_app(f"sqlite:///{tmp_path / name}.db", tmp_path / name) for name in ("one", "two")]
    for number, app in enumerate(apps):
        app.model(f"add{number}", isolation="thread")(add)
    mounts = [Mount(f"/{number}", asgi(app)) for number, app in enumerate(apps)]
    with host_asgi(Starlette(routes=mounts)) as client:
        for number in range(2):
            made = client.post(f"/{number}/runs", json={"model": f"add{number}", "parameters": {"a": number}})
            assert made.status_code == 201, made.text
            assert made.headers["Location"].startswith(f"/{number}/runs/")
            assert client.post(f"/{1 - number}/runs", json={"model": f"add{number}"}).status_code != 201
            assert client.get(f"/{1 - number}/runs/{made.json()['run_id']}").status_code == 404
            assert [run["model"] for run in client.get(f"/{number}/runs").json()["runs"]] == [f"add{number}"]
            assert f"add{number}" in client.get(f"/{number}/ui/runs").text
    for app in apps:
        app.close()


def assert_answers(client: httpx.Client) -> None:
    """Everything that a client does first works below the prefix."""
    eventually(lambda: client.get("/semel/healthz").json()["status"] == "ok", "it is well")
    eventually(lambda: client.get("/semel/readyz").status_code == 200, "it is ready")
    made = client.post("/semel/runs", json={"model": "add", "parameters": {"a": 1}})
    assert made.status_code == 201, made.text
    links = made.json()["links"]
    assert links["self"] == made.headers["Location"] == f"/semel/runs/{made.json()['run_id']}"
    assert client.get(links["self"]).json()["status"] == "PENDING"
    assert client.get(links["result"]).status_code == 409
    assert made.headers["X-Request-Id"]
    page = client.get("/semel/runs").json()
    assert page["runs"][0]["links"]["self"] == links["self"]
    assert "semel_http_requests_total" in client.get("/semel/metrics").text
    assert client.get("/semel/nowhere").status_code == 404
    assert client.get("/runs").status_code == 404


def test_within_flask_it_answers_below_its_prefix(app: App) -> None:
    flask = Flask("mine")

    @flask.get("/own")
    def own() -> str:
        return "mine"

    service = wsgi(app)
    flask.wsgi_app = DispatcherMiddleware(flask.wsgi_app, {"/semel": service})  # type: ignore[method-assign]
    with host_wsgi(flask) as client:
        assert client.get("/own").text == "mine"
        assert_answers(client)
        with app.working(processes=0):
            run = client.post("/semel/runs", json={"model": "add", "parameters": {"a": 1, "b": 2}}).json()
            assert client.get(f"{run['links']['self']}?wait=30").json()["status"] == "SUCCEEDED"
            assert client.get(run["links"]["result"]).json() == 3
    service.close()


def test_a_wsgi_server_that_does_not_say_who_asks_is_not_taken_for_this_machine(app: App) -> None:
    service = wsgi(app)

    def anonymous(environ: Any, start_response: Any) -> Any:
        for name in ("REMOTE_ADDR", "REMOTE_PORT"):
            environ.pop(name, None)
        return service(environ, start_response)

    with host_wsgi(anonymous) as client:
        answer = client.get("/runs")
    service.close()
    assert (answer.status_code, answer.json()["error_code"]) == (403, "LOOPBACK_ONLY")


_PROGRAM = """
from semel import App
from semel.service import wsgi
app = App({url!r}, artifacts={artifacts!r})

@app.model("add")
async def add(a: int, b: int = 0) -> int:
    return a + b

application = wsgi(app)
list(application({environ!r}, lambda *_: None))  # before the server forks
"""


def test_it_works_in_the_processes_of_a_server_that_forks(
    migrated_sqlite_url: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """gunicorn imports the application, and a request may come, before it forks its workers."""
    environ = {
        "REQUEST_METHOD": "GET",
        "PATH_INFO": "/healthz",
        "SERVER_NAME": "localhost",
        "SERVER_PORT": "1",
        "wsgi.input": None,
    }
    (tmp_path / "forked.py").write_text(
        _PROGRAM.format(url=migrated_sqlite_url, artifacts=str(tmp_path / "artifacts"), environ=environ)
    )
    socket_path = tmp_path_factory.mktemp("s") / "http"  # the path of a Unix socket is short
    command = [sys.executable, "-m", "gunicorn", "--preload", "-w", "2", "--threads", "2", "-b", f"unix:{socket_path}"]
    log = tmp_path / "log.txt"
    with log.open("w") as out:
        server = subprocess.Popen(
            [*command, "forked:application"],
            cwd=tmp_path,
            env=environment(),
            stdout=out,
            stderr=out,
        )
    try:
        eventually(socket_path.exists, "gunicorn listens")
        transport = httpx.HTTPTransport(uds=str(socket_path))
        with httpx.Client(transport=transport, base_url="http://localhost", timeout=60) as client:
            answers = [client.get("/healthz", headers={"Connection": "close"}) for _ in range(4)]
    finally:
        server.terminate()
        server.wait(60)
    assert [json.loads(answer.text)["status"] for answer in answers] == ["ok"] * 4, log.read_text()[-2000:]


_UNCLOSED = """
import sys
from semel import App
from semel.service import wsgi

app = App(sys.argv[1], artifacts=sys.argv[2])
service = wsgi(app)
environ = {
    "REQUEST_METHOD": "GET", "PATH_INFO": "/runs", "QUERY_STRING": "", "SERVER_NAME": "localhost", "SERVER_PORT": "80",
    "SERVER_PROTOCOL": "HTTP/1.1", "HTTP_HOST": "localhost", "REMOTE_ADDR": "127.0.0.1", "wsgi.url_scheme": "http",
}
import io
environ["wsgi.input"] = io.BytesIO()
print(b"".join(service(environ, lambda status, headers, *more: print(status))).decode())
"""


def test_a_process_that_closes_nothing_ends_without_a_complaint(migrated_sqlite_url: str, tmp_path: Path) -> None:
    argv = [sys.executable, "-c", _UNCLOSED, migrated_sqlite_url, str(tmp_path)]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=60, env=environment(), check=False)
    assert ended.stdout.startswith("200 OK\n"), ended.stderr
    assert (ended.returncode, ended.stderr) == (0, "")
