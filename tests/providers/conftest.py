"""Fixtures of providers: a server that speaks Replicate's API, and apps on a database of their own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from semel import App
from support.databases import DATABASES
from support.replicate_server import ReplicateServer
from support.service import app_on


@pytest.fixture(scope="module")
def cloud() -> Iterator[ReplicateServer]:
    cloud = ReplicateServer()
    yield cloud
    cloud.close()


@pytest.fixture(params=DATABASES)
def app(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[App]:
    with app_on(request, tmp_path) as app:
        yield app


@pytest.fixture
def prompt(request: pytest.FixtureRequest) -> str:
    """What a test's own predictions are known by."""
    return request.node.name
