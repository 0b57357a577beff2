"""Fixtures for every test: servers for the whole session, empty databases, a browser."""

import gc
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from semel.cli import main as semel_command
from support import servers
from support.databases import DATABASES, Databases, StoreUrls, TestDatabase, database_url
from support.load import load
from support.long_lived import collect_seldom
from support.memory import keep_files_in_memory
from support.parallel import Parallel
from support.programs import share_fork_server

if TYPE_CHECKING:  # the browser's driver is slow to import, and most tests do not need it
    from playwright.sync_api import Browser

    from support.browser import Visitor


settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")  # Hypothesis must not fail a test because the machine is busy


TESTS = Path(__file__).parent
LONGEST = {TESTS / room for room in ("crash", "chaos", "protocol", "docs")}
"""Rooms whose tests take seconds or minutes each."""
WAITING = {
    TESTS / file
    for file in (
        "db/test_deadlines.py",
        "db/test_outages.py",
        "runs/store/test_quota_slots.py",
        "runs/worker/test_silence.py",
        "runs/worker/test_worker.py",
    )
}
"""Files whose tests spend most of their time waiting, such as for a timeout."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("-N", "--processes", type=int, default=0, help="run the tests in that many processes")


def pytest_configure(config: pytest.Config) -> None:
    """Prepare what all processes of the tests share."""
    if processes := config.getoption("--processes"):
        config.pluginmanager.register(Parallel(processes, LONGEST, WAITING))
    keep_files_in_memory()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background; every process inherits it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if processes := int(os.environ.pop("SEMEL_TEST_LOAD", "0")):
        computing = load(processes)
        computing.__enter__()
        config.add_cleanup(lambda: computing.__exit__(None, None, None))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many points tests/crash has tried; the counts of all processes come with the tests' reports."""
    reports = [
        each for found in terminalreporter.stats.values() for each in found if getattr(each, "when", "") == "call"
    ]
    points = sum(value for each in reports for name, value in each.user_properties if name == "crash points")
    if points:
        terminalreporter.write_line(f"{points} crash points were tried")


def pytest_collection_finish() -> None:
    """Leave the collected tests out of garbage collections: they are many, and stay until the end."""
    share_fork_server()
    gc.collect()
    collect_seldom()


@pytest.fixture(autouse=True)
def _same_environment() -> Iterator[None]:
    """Fail a test that changes a variable of ours for those after it, which would use its database."""
    before = _own_environment()
    yield
    assert _own_environment() == before, "the test has changed the environment of the tests after it"


def _own_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(("SEMEL_", "AWS_"))}


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


@pytest.fixture(scope="session")
def migrated_postgres(postgres_server: servers.Postgres) -> Iterator[str]:
    """A database with all tables, to be copied: a migration takes longer than most tests."""
    url = postgres_server.database()
    assert semel_command(["migrate", url]) == 0
    yield url
    postgres_server.drop(url)


@pytest.fixture(scope="session")
def migrated_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with all tables, to be copied."""
    file = tmp_path_factory.mktemp("template") / "semel.db"
    assert semel_command(["migrate", f"sqlite:///{file}"]) == 0
    return file


@pytest.fixture
def migrated_postgres_url(request: pytest.FixtureRequest) -> Iterator[str]:
    with database_url(request, "postgres") as url:
        yield url


@pytest.fixture
def migrated_sqlite_url(request: pytest.FixtureRequest) -> Iterator[str]:
    with database_url(request, "sqlite") as url:
        yield url


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
def urls(request: pytest.FixtureRequest) -> Iterator[StoreUrls]:
    """A store of each kind, shared by the tests of a module; each test uses keys or scopes of its own."""
    with ExitStack() as cleanup:
        yield StoreUrls(request, cleanup)


@pytest.fixture(scope="module")
def databases(request: pytest.FixtureRequest) -> Iterator[Databases]:
    with ExitStack() as cleanup:
        yield Databases(request, cleanup)


@pytest.fixture(params=DATABASES)
def database(request: pytest.FixtureRequest, databases: Databases) -> Iterator[TestDatabase]:
    """An empty database with all tables, on each kind of database."""
    with databases.empty(request.param) as database:
        yield database


@pytest.fixture(scope="module")
def chromium() -> Iterator["Browser"]:
    from support import browser

    with browser.chromium() as chromium:
        yield chromium


@pytest.fixture
def visit(chromium: "Browser", request: pytest.FixtureRequest) -> Iterator[Callable[..., "Visitor"]]:
    from support import browser

    with browser.visiting(chromium, request) as visit:
        yield visit
