"""One database for each kind of store, ready for use, for test files that say the same of all of them.

    @pytest.fixture(scope="module")
    def urls(request: pytest.FixtureRequest) -> Iterator[StoreUrls]:
        with store_urls(request) as urls:
            yield urls

Tests share it, so each takes a key or scope of its own.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from semel.cli import main as semel_command

KINDS = ["memory", "sqlite", "redis", "postgres"]
SHARED_KINDS = KINDS[1:]
"""Kinds that other processes see."""


class StoreUrls(dict[str, str]):
    """The URL by the store's kind; a server starts when its URL is first asked for."""

    def __init__(self, request: pytest.FixtureRequest, cleanup: ExitStack) -> None:
        super().__init__(memory="memory://")
        self._request = request
        self._cleanup = cleanup

    def __missing__(self, kind: str) -> str:
        self[kind] = getattr(self, f"_{kind}")()
        return self[kind]

    def _sqlite(self) -> str:
        folder = self._request.getfixturevalue("tmp_path_factory").mktemp("store")
        return f"sqlite:///{folder / 'semel.db'}"

    def _redis(self) -> str:
        url: str = self._request.getfixturevalue("redis_server").database()
        return url

    def _postgres(self) -> str:
        server = self._request.getfixturevalue("postgres_server")
        url: str = server.database()
        self._cleanup.callback(server.drop, url)
        assert semel_command(["migrate", url]) == 0
        return url


@contextmanager
def store_urls(request: pytest.FixtureRequest) -> Iterator[StoreUrls]:
    with ExitStack() as cleanup:
        yield StoreUrls(request, cleanup)
