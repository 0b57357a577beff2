"""The four stores as empty spaces, and eight processes, for tests that say what every store must do."""

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest

from acceptance import jobs
from acceptance.spaces import SHARED, STORES, Space
from semel import Once
from support.databases import database_url
from support.programs import processes


@pytest.fixture(scope="session")
def shared_postgres(request: pytest.FixtureRequest) -> Iterator[str]:
    """A database for all tests, which is emptied before each."""
    with database_url(request, "postgres") as url:
        yield url


@pytest.fixture
def space_of(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[str], Space]]:
    """Makes an empty space on the named store."""

    def make(kind: str) -> Space:
        url = f"{kind}://"
        match kind:
            case "sqlite":
                file = tmp_path / "semel.db"
                shutil.copyfile(request.getfixturevalue("migrated_sqlite"), file)
                url = f"sqlite:///{file}"
            case "redis":
                url = request.getfixturevalue("redis_url")
            case "postgres":
                url = request.getfixturevalue("shared_postgres")
                with psycopg.connect(url, autocommit=True) as connection:
                    connection.execute("DELETE FROM semel_keys")
        return Space(kind, url, closing)

    with ExitStack() as closing:
        yield make


@pytest.fixture(params=STORES)
def space(request: pytest.FixtureRequest, space_of: Callable[[str], Space]) -> Space:
    """Each of the four stores in turn."""
    return space_of(request.param)


@pytest.fixture(params=SHARED)
def shared_space(request: pytest.FixtureRequest, space_of: Callable[[str], Space]) -> Space:
    """Each store that several processes can reach, in turn."""
    return space_of(request.param)


@pytest.fixture
def once(space: Space) -> Once:
    """An opened ``Once`` on each of the four stores, on a fake clock, with nothing in it."""
    return space.open()


@pytest.fixture(scope="session")
def eight_processes() -> Iterator[Executor]:
    """Eight processes, which share nothing but the store; see ``together.in_processes``."""
    barrier = processes.Barrier(8)
    with ProcessPoolExecutor(8, mp_context=processes, initializer=jobs.prepare, initargs=(barrier,)) as executor:
        yield executor
