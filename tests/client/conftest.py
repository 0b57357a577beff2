"""Fixtures of the clients: a service on SQLite, and the blocking and the awaited client, near and behind a proxy.

The clients send no SQL: what the service does on either database is tested in tests/service and tests/acceptance.
"""

from collections.abc import Iterator

import pytest

from support.clients import ClientDriver, working_service
from support.faulty_server import FaultyServer
from support.service import TestServer


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestServer]:
    folder = tmp_path_factory.mktemp("service")
    with working_service(f"sqlite:///{folder / 'semel.db'}", folder) as service:
        yield service


@pytest.fixture(params=["blocking", "awaited"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def client(service: TestServer, kind: str) -> Iterator[ClientDriver]:
    with ClientDriver(kind, service.address) as client:
        yield client


@pytest.fixture
def line(service: TestServer) -> Iterator[FaultyServer]:
    """A proxy before the service that can misbehave."""
    with FaultyServer(service.address) as line:
        yield line


@pytest.fixture
def far(line: FaultyServer, kind: str) -> Iterator[ClientDriver]:
    """A client of that proxy."""
    with ClientDriver(kind, line.url) as client:
        yield client


@pytest.fixture
def alone(kind: str) -> Iterator[tuple[ClientDriver, FaultyServer]]:
    """A client of a server that only misbehaves."""
    with FaultyServer() as server, ClientDriver(kind, server.url) as client:
        yield client, server
