"""Every store keeps every rule of the kit: none is left out for any store."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import sqlalchemy as sa

from semel.db import migrate
from semel.once.store import Clock, Store
from semel.once.stores import open_store
from semel.once.stores.memory import MemoryStore
from semel.testing import SharedStoreSuite, StoreSuite
from semel.testing.harness import Opener
from support import servers


class TestMemory(StoreSuite):
    def open(self, clock: Clock | None) -> Store:
        return MemoryStore(clock)


class TestMemoryInALoop(TestMemory):
    is_async = True


class Opened(SharedStoreSuite):
    """A store of semel's own, by its URL."""

    url: str
    dead_url: str

    def opener(self) -> Opener:
        return partial(open_store, self.url, is_async=self.is_async, retry_for=120)  # 64 may connect at once

    def nowhere(self) -> Opener:
        return partial(open_store, self.dead_url, is_async=self.is_async)


class TestSqlite(Opened):
    dead_url = "sqlite:////nowhere/semel.db"

    @pytest.fixture(autouse=True)
    def new_file(self, sqlite_url: str) -> None:
        self.url = sqlite_url


class TestAsyncSqlite(TestSqlite):
    is_async = True


class TestRedis(Opened):
    server_clock = True
    dead_url = "redis://127.0.0.1:1/0"

    @pytest.fixture(autouse=True)
    def empty_database(self, redis_url: str) -> None:
        self.url = redis_url


class TestAsyncRedis(TestRedis):
    is_async = True


class TestRedisCluster(Opened):
    server_clock = True
    dead_url = "redis+cluster://127.0.0.1:1/0"

    @pytest.fixture(autouse=True)
    def empty_database(self, redis_cluster_url: str) -> None:
        self.url = redis_cluster_url.replace("redis://", "redis+cluster://")


class TestAsyncRedisCluster(TestRedisCluster):
    is_async = True


@pytest.fixture(scope="module")
def migrated(postgres_server: servers.Postgres) -> Iterator[sa.Engine]:
    url = postgres_server.database()
    engine = sa.create_engine(sa.make_url(url).set(drivername="postgresql+psycopg"), isolation_level="AUTOCOMMIT")
    with engine.execution_options(isolation_level="READ COMMITTED").begin() as connection:
        migrate.upgrade(connection)
    yield engine
    engine.dispose()
    postgres_server.drop(url)


class TestPostgres(Opened):
    server_clock = True
    dead_url = "postgresql://127.0.0.1:1/nowhere"

    @pytest.fixture(autouse=True)
    def empty_tables(self, migrated: sa.Engine) -> None:
        with migrated.connect() as connection:
            connection.execute(sa.text("DELETE FROM semel_keys"))
        self.url = migrated.url.set(drivername="postgresql").render_as_string(hide_password=False)


class TestAsyncPostgres(TestPostgres):
    is_async = True
