"""The service over real HTTP, in a thread of the test's process; and other applications that mount it."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partialmethod
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from werkzeug.serving import ThreadedWSGIServer

from semel import App
from semel._concurrency.sync import run_sync
from semel.cli import main as semel_command
from semel.service import Settings
from semel.service.app import build
from semel.service.auth import middleware, tokens
from semel.service.state import ServiceState
from support.databases import database_url
from support.waiting import eventually

PATIENCE = 60.0


class TestServer:
    """A running server: its address, its app and its state."""

    __test__ = False

    def __init__(self, app: App, state: ServiceState, address: str) -> None:
        self.app = app
        self.state = state
        self.address = address

    def client(self, token: str | None = None, **options: Any) -> httpx.Client:
        """A client of the server, which the caller closes; with a token where one is given."""
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        return httpx.Client(base_url=self.address, headers=headers, timeout=PATIENCE, **{"verify": False, **options})


class TokenClient:
    """Sends requests with one token over the shared client of the server: creating clients is slow."""

    def __init__(self, client: httpx.Client, secret: str | None, **headers: str) -> None:
        self._client = client
        self.secret = secret
        self._headers = ({} if secret is None else {"Authorization": f"Bearer {secret}"}) | headers

    @property
    def id(self) -> str:
        """The token's id."""
        parsed = tokens.parse(self.secret or "")
        assert parsed is not None
        return parsed[0]

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        headers = [*self._headers.items(), *dict(options.pop("headers", {})).items()]
        return self._client.request(method, path, headers=headers, **options)

    get = partialmethod(request, "GET")
    post = partialmethod(request, "POST")
    put = partialmethod(request, "PUT")
    delete = partialmethod(request, "DELETE")


class TokenServer(TestServer):
    """A server with an administrator's token, so that every request needs one; and more tokens on demand."""

    def __init__(self, server: TestServer, client: httpx.Client) -> None:
        super().__init__(server.app, server.state, server.address)
        self.http = client
        self.root = self.admit("root", "admin")
        self.nobody = TokenClient(client, None)

    def admit(self, user: str, role: Any = "submitter", tenant: str = "", ttl: float | None = None) -> TokenClient:
        """A client with a new token of that user."""
        return self.sending(issue_token(self.app, user, role, tenant, ttl))

    def forget_failed_logins(self, refilled: float = middleware.FAILURES_REFILLED) -> None:
        """Lift the limit on invalid tokens from one address."""
        self.state.auth._failures = middleware.RateLimits(refilled, middleware.FAILURES)

    def sending(self, secret: str | None, **headers: str) -> TokenClient:
        return TokenClient(self.http, secret, **headers)


def issue_token(app: App, user: str, role: Any = "submitter", tenant: str = "", ttl: float | None = None) -> str:
    """Create a token as the command line does; returns its secret."""
    ledger = app.ledger(awaited=False)
    try:
        request = tokens.NewToken(user=user, role=role, tenant=tenant, ttl=ttl)
        return run_sync(ledger.write(tokens.issue, request, ledger.statement_context)).secret
    finally:
        run_sync(ledger.close())


def make_app(url: str, folder: Path, **options: Any) -> App:
    """An app on a database, which is migrated if necessary, with its artifacts in the folder."""
    if url.startswith("postgresql"):
        assert semel_command(["migrate", url]) == 0
    return App(url, artifacts=folder / "artifacts", **options)


@contextmanager
def app_on(request: pytest.FixtureRequest, folder: Path, kind: str | None = None, **options: Any) -> Iterator[App]:
    """An app on a new database of the kind: the parameter of the fixture, unless given."""
    with database_url(request, kind or request.param) as url:
        app = App(url, artifacts=folder / "artifacts", **{"dedupe_window": 0, **options})
        try:
            yield app
        finally:
            app.close()


@contextmanager
def serve(app: App, settings: Settings | None = None) -> Iterator[TestServer]:
    """The service around the app, on a free port, until the end of the block."""
    with serve_state(ServiceState(app, settings or Settings())) as server:
        yield server


@contextmanager
def serve_state(state: ServiceState, listener: socket.socket | None = None) -> Iterator[TestServer]:
    with _running(build(state), listener=listener) as address:
        yield TestServer(state.app, state, address)


@contextmanager
def token_server(url: str, folder: Path, settings: Settings | None = None) -> Iterator[TokenServer]:
    """A server with tokens on the database, with the models `add` and `train`."""
    app = make_app(url, folder, dedupe_window=0)
    add_models(app)
    try:
        with serve(app, settings) as server, server.client(verify=False) as client:
            yield TokenServer(server, client)
    finally:
        app.close()


@contextmanager
def shared_server(
    request: pytest.FixtureRequest, factory: pytest.TempPathFactory, settings: Settings | None = None
) -> Iterator[TokenServer]:
    """A server with tokens for the tests of a module, on the database that the fixture's parameter names."""
    with (
        database_url(request, getattr(request, "param", "sqlite")) as url,
        token_server(url, factory.mktemp("server"), settings) as server,
    ):
        yield server


@contextmanager
def local_server(url: str, folder: Path, **options: Any) -> Iterator[TestServer]:
    """A server without tokens, with the models `add` and `train`."""
    app = make_app(url, folder, **options)
    add_models(app)
    try:
        with serve(app) as server:
            yield server
    finally:
        app.close()


def add_models(app: App) -> None:
    @app.model("add")
    async def add(a: int, b: int = 0) -> int:
        return a + b

    @app.model("train", cost=2.5)
    async def train() -> None: ...


def _plain_client(address: str) -> httpx.Client:
    """A client that loads no certificates, which takes longer than most tests."""
    return httpx.Client(base_url=address, timeout=PATIENCE, verify=False)


@contextmanager
def host_asgi(application: Any, lifespan: Any = "on") -> Iterator[httpx.Client]:
    """A client of the ASGI application, which uvicorn serves."""
    with _running(application, lifespan) as address, _plain_client(address) as client:
        yield client


@contextmanager
def host_without_lifespan(app: App, settings: Settings | None = None) -> Iterator[httpx.Client]:
    """A client of the service inside an application that forwards no lifespan events and closes it at the end."""
    state = ServiceState(app, settings or Settings())
    inner = build(state)

    async def application(scope: Any, receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
        if scope["type"] == "http":
            await inner(scope, receive, send)
            return
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await state.close()
        await send({"type": "lifespan.shutdown.complete"})

    with host_asgi(application) as client:
        yield client


@contextmanager
def host_wsgi(application: Any) -> Iterator[httpx.Client]:
    """A client of the WSGI application, which werkzeug's server serves, a thread for each request."""
    server = ThreadedWSGIServer("127.0.0.1", 0, application)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        with _plain_client(f"http://127.0.0.1:{server.server_port}") as client:
            yield client
    finally:
        server.shutdown()
        thread.join(PATIENCE)
        server.server_close()


@contextmanager
def _running(application: Any, lifespan: Any = "on", listener: socket.socket | None = None) -> Iterator[str]:
    """The address at which uvicorn serves the application, in a thread, until the end of the block."""
    listener = listener or socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else every response waits for an acknowledgement
    server = uvicorn.Server(server_config(application, lifespan))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    eventually(lambda: server.started or not thread.is_alive(), "the server starts")
    assert server.started, "the server ended before it had started"
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        listener.close()
        assert not thread.is_alive(), "the server did not stop in time"


def server_config(application: Any, lifespan: Any = "on") -> uvicorn.Config:
    return uvicorn.Config(
        application,
        lifespan=lifespan,
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=5,
        timeout_keep_alive=round(PATIENCE),  # a client on a busy machine may be about to use a connection that was idle
    )


def send_raw(address: str, request: bytes, *, then_close: bool = False) -> bytes:
    """Send these bytes; returns everything that the server sends until it closes the connection."""
    host, _, port = address.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as line:
        sending = threading.Thread(target=_send, args=(line, request, then_close))
        sending.start()
        answer = b""
        try:
            while part := line.recv(65536):
                answer += part
        except ConnectionResetError:
            pass
        sending.join(PATIENCE)
        return answer


def _send(line: socket.socket, request: bytes, then_close: bool) -> None:
    try:
        line.sendall(request)
        if then_close:
            line.shutdown(socket.SHUT_WR)
    except OSError:  # the server has responded and closed the connection before it had read everything
        pass


def status_of(answer: bytes) -> int:
    """The status of a raw response."""
    assert answer.startswith(b"HTTP/1."), answer[:80]
    return int(answer.split(b" ", 2)[1])
