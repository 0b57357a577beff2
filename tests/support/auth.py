"""A service that has tokens, on every database, shared by the tests of a file; and requests byte by byte."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partialmethod
from pathlib import Path
from typing import Any

import httpx
import pytest

from semel import App
from semel._concurrency.sync import run_sync
from semel.service import Settings
from semel.service.auth import tokens
from support.service import PATIENCE, Served, made_app, served

BOTH = ["sqlite", "postgres"]


def issue(app: App, user: str, role: Any = "submitter", tenant: str = "", ttl: float | None = None) -> str:
    """A token, made as the command line makes one."""
    ledger = app.ledger(awaited=False)
    try:
        request = tokens.NewToken(user=user, role=role, tenant=tenant, ttl=ttl)
        return run_sync(ledger.write(tokens.issue, request, ledger.terms)).secret
    finally:
        run_sync(ledger.close())


class Person:
    """Requests with somebody's token, over the town's one client: a client of one's own takes long to make."""

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

    def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        headers = [*self._headers.items(), *dict(options.pop("headers", {})).items()]
        return self._client.request(method, path, headers=headers, **options)

    get = partialmethod(ask, "GET")
    post = partialmethod(ask, "POST")
    put = partialmethod(ask, "PUT")
    delete = partialmethod(ask, "DELETE")


class Town(Served):
    """A server with a token of root's, and more as they are asked for."""

    def __init__(self, service: Served, client: httpx.Client) -> None:
        super().__init__(service.app, service.site, service.address)
        self.line = client
        self.root = self.admit("root", "admin")
        self.nobody = Person(client, None)

    def admit(self, user: str, role: Any = "submitter", tenant: str = "", ttl: float | None = None) -> Person:
        """Somebody with a new token of that user."""
        return self.sending(issue(self.app, user, role, tenant, ttl))

    def sending(self, secret: str | None, **headers: str) -> Person:
        return Person(self.line, secret, **headers)


def add_models(app: App) -> None:
    @app.model("add")
    async def add(a: int, b: int = 0) -> int:
        return a + b

    @app.model("train", cost=2.5)
    async def train() -> None: ...


@contextmanager
def town_on(url: str, folder: Path, settings: Settings | None = None) -> Iterator[Town]:
    app = made_app(url, folder, dedupe_window=0)
    add_models(app)
    try:
        with served(app, settings) as service, service.client(verify=False) as client:
            yield Town(service, client)
    finally:
        app.close()


def bare(address: str, request: bytes, *, then_close: bool = False) -> bytes:
    """Send these bytes and give all that comes back until the server hangs up."""
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
    except OSError:  # the server has answered and hung up before it had read all
        pass


def status_of(answer: bytes) -> int:
    """The status of an answer as it came."""
    assert answer.startswith(b"HTTP/1."), answer[:80]
    return int(answer.split(b" ", 2)[1])


def eventually(holds: Callable[[], bool]) -> None:
    """Wait until it is so."""
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.02)


@contextmanager
def shared_town(
    request: pytest.FixtureRequest, factory: pytest.TempPathFactory, settings: Settings | None = None
) -> Iterator[Town]:
    """A town for the tests of a whole file, on the database that the fixture's parameter names."""
    folder = factory.mktemp("town")
    if request.param == "sqlite":
        with town_on(f"sqlite:///{folder / 'semel.db'}", folder, settings) as town:
            yield town
        return
    server = request.getfixturevalue("postgres_server")
    url = server.database()
    try:
        with town_on(url, folder, settings) as town:
            yield town
    finally:
        server.drop(url)
