"""A service with a folder of configs: a test module provides the fixtures ``app`` and ``configs``."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from semel import App
from semel.service import Settings
from support.service import TestServer, serve


@pytest.fixture
def service(app: App, configs: Path) -> Iterator[TestServer]:
    with serve(app, Settings(configs=str(configs))) as service:
        yield service


@pytest.fixture
def client(service: TestServer) -> Iterator[httpx.Client]:
    with service.client() as client:
        yield client
