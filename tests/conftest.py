"""What every test can ask for: a server for the whole session, a URL of an empty database for itself."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import servers


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[servers.Postgres]:
    with servers.postgres() as server:
        yield server


@pytest.fixture(scope="session")
def redis_server() -> Iterator[servers.Redis]:
    with servers.redis() as server:
        yield server


@pytest.fixture(scope="session")
def redis_cluster_server() -> Iterator[servers.Redis]:
    with servers.redis(cluster=True) as server:
        yield server


@pytest.fixture
def postgres_url(postgres_server: servers.Postgres) -> Iterator[str]:
    url = postgres_server.database()
    yield url
    postgres_server.drop(url)


@pytest.fixture
def redis_url(redis_server: servers.Redis) -> str:
    return redis_server.database()


@pytest.fixture
def redis_cluster_url(redis_cluster_server: servers.Redis) -> str:
    return redis_cluster_server.database()


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'semel.db'}"
