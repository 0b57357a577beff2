"""What every test can ask for: a server for the whole session, a URL of an empty database for itself, a browser."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support import servers

if TYPE_CHECKING:  # a browser's driver takes long to import, and most tests need none
    from playwright.sync_api import Browser

    from support.browser import Visitor


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


@pytest.fixture(scope="module")
def chromium() -> Iterator["Browser"]:
    from support import browser

    with browser.chromium() as browser:
        yield browser


@pytest.fixture
def visit(chromium: "Browser", request: pytest.FixtureRequest) -> Iterator[Callable[..., "Visitor"]]:
    from support import browser

    with browser.visiting(chromium, request) as visit:
        yield visit
