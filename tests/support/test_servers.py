"""The servers that other tests use start, keep their data, and leave nothing behind."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import psycopg
import pytest
import redis
from sqlalchemy import create_engine, make_url, text
from sqlalchemy.ext.asyncio import create_async_engine

from support import servers

HERE = Path(__file__).parents[1]
BOTH_WAYS_TO_STOP = pytest.mark.parametrize("crash", [False, True], ids=["stopped", "crashed"])


@pytest.fixture(scope="module")
def own_postgres() -> Iterator[servers.Postgres]:
    """A server that can be stopped without affecting other tests."""
    with servers.postgres() as server:
        yield server


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "cluster"])
def own_redis(request: pytest.FixtureRequest) -> Iterator[servers.Redis]:
    with servers.redis(cluster=request.param, durable=True) as server:
        yield server


@pytest.fixture(autouse=True)
def servers_of_our_own(request: pytest.FixtureRequest) -> None:
    for name in ("own_postgres", "own_redis"):
        if name in request.fixturenames and not request.getfixturevalue(name).managed:
            pytest.skip("the environment names a server, and that one is not ours to stop")


def test_both_drivers_open_the_url(postgres_url: str) -> None:
    url = make_url(postgres_url)
    engine = create_engine(url.set(drivername="postgresql+psycopg"))
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT 1")) == 1
    engine.dispose()

    async def through_asyncpg() -> None:
        engine = create_async_engine(url.set(drivername="postgresql+asyncpg"))
        async with engine.connect() as connection:
            assert await connection.scalar(text("SELECT 1")) == 1
        await engine.dispose()
        bare = await asyncpg.connect(postgres_url)
        assert await bare.fetchval("SELECT 1") == 1
        await bare.close()

    asyncio.run(through_asyncpg())


def test_every_database_is_empty(postgres_server: servers.Postgres, redis_server: servers.Redis) -> None:
    for _ in range(2):
        url = postgres_server.database()
        with psycopg.connect(url) as connection:
            connection.execute("CREATE TABLE once (a int)")
        postgres_server.drop(url)
        with redis.Redis.from_url(redis_server.database()) as client:
            assert client.dbsize() == 0
            client.set("a", 1)


@BOTH_WAYS_TO_STOP
def test_postgres_keeps_what_was_committed(own_postgres: servers.Postgres, crash: bool) -> None:
    url = own_postgres.database()
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 7 AS a")
    own_postgres.stop(crash=crash)
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(url)
    own_postgres.start()
    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT a FROM kept").fetchone() == (7,)


@BOTH_WAYS_TO_STOP
def test_redis_keeps_what_was_set(own_redis: servers.Redis, crash: bool) -> None:
    with redis.Redis.from_url(own_redis.database()) as client:
        client.set("kept", "7")
        own_redis.stop(crash=crash)
        with pytest.raises(redis.ConnectionError):
            client.ping()
        own_redis.start()
        assert client.get("kept") == b"7"


def test_a_cluster_refuses_keys_of_two_slots(redis_cluster_url: str) -> None:
    with redis.Redis.from_url(redis_cluster_url) as client, pytest.raises(redis.ResponseError, match=r"(?i)slot"):
        client.mset({"a": 1, "b": 2})


def test_a_durable_postgres_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SEMEL_TEST_POSTGRES_URL", raising=False)
    with servers.postgres(durable=True) as server, psycopg.connect(server.url) as connection:
        assert connection.execute("SHOW fsync").fetchone() == ("on",)


def test_a_server_of_the_environment_is_not_stopped(
    postgres_server: servers.Postgres, redis_server: servers.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEMEL_TEST_POSTGRES_URL", postgres_server.url)
    monkeypatch.setenv("SEMEL_TEST_REDIS_URL", redis_server.database())
    with servers.postgres() as postgres, servers.redis() as other:
        assert not postgres.managed
        assert not other.managed
        postgres.drop(postgres.database())
        assert other.database() == other.url
        for server in (postgres, other):
            with pytest.raises(servers.ServerError, match="given by the environment"):
                server.stop()
            with pytest.raises(servers.ServerError, match="given by the environment"):
                server.start()


OPEN_BOTH = """
import json, signal, redis
from support import servers
with servers.postgres() as postgres, servers.redis() as other:
    directories = [str(server._process.directory) for server in (postgres, other)]
    with redis.Redis.from_url(other.url) as client:
        pid = client.info("server")["process_id"]
    pids = [int(open(directories[0] + "/data/postmaster.pid").readline()), pid]
    print(json.dumps([directories, pids]), flush=True)
    signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_when_the_process_ends(number: signal.Signals) -> None:
    process = child(OPEN_BOTH)
    assert process.stdout is not None
    directories, pids = json.loads(process.stdout.readline())
    assert all(Path(directory).is_dir() for directory in directories)

    process.send_signal(number)
    process.communicate(timeout=60)  # the runners share its standard error, so this waits for them too

    assert not any(Path(directory).exists() for directory in directories)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


FORK_INSIDE = """
import os, redis
from support import servers
with servers.redis() as server:
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        with redis.Redis.from_url(server.url) as client:
            print(client.ping())
"""


def test_a_forked_child_that_leaves_does_not_end_the_server() -> None:
    output, _ = child(FORK_INSIDE).communicate(timeout=60)
    assert output == "True\n"


def child(program: str) -> subprocess.Popen[str]:
    """Python in a process of its own, with servers of its own."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SEMEL_TEST_")}
    return subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=HERE,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
