"""The scenarios: each is a fault, by name, and what it acts on."""

import os
import resource
import shutil
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psycopg
import redis as redis_client
from redis.backoff import NoBackoff
from redis.retry import Retry

from chaos.brokers import play_broker, refuses
from chaos.network import Trouble, TroubledProxy
from chaos.program import LEASE, THOROUGH, lines
from chaos.stage import (
    RATE,
    STRIKES_WITHIN,
    Account,
    Stage,
    callers,
    count_wrong_clocks,
    fleet,
    migrated,
    play,
    play_calls,
)
from semel.runs.types import RETRY_FOR
from support import servers
from support.programs import stop
from support.serve_command import ServeProcess
from support.waiting import eventually

FaultFunction = Callable[[Stage], None]


@dataclass(frozen=True)
class Scenario:
    """A fault, and where it happens."""

    name: str
    what: str
    store: Literal["postgres", "sqlite", "redis"]
    fault: FaultFunction
    through: Literal["direct", "proxy", "server", "server-proxy"] = "direct"
    """What submitters talk to: the database, the server, or a proxy before either."""
    clocks: tuple[float, ...] | None = None
    """The errors of the hosts' clocks, in seconds; None for the machine's clock."""
    broker: str | None = None
    """The broker of the runs, which is flushed or killed."""
    connections: int | None = None
    """How many connections PostgreSQL accepts; None for as many as the tests' server does."""


SCENARIOS: dict[str, Scenario] = {}


def scenario(
    name: str, what: str, store: Literal["postgres", "sqlite", "redis"], **options: Any
) -> Callable[[FaultFunction], FaultFunction]:
    """Register a fault under its name."""

    def register(fault: FaultFunction) -> FaultFunction:
        SCENARIOS[name] = Scenario(name, what, store, fault, **options)
        return fault

    return register


# -- PostgreSQL --------------------------------------------------------------------------------------------------------


@scenario("postgres-restart", "PostgreSQL is killed and started again", "postgres")
def restart_postgres(stage: Stage) -> None:
    assert stage.postgres is not None
    errors = stage.errors()
    stage.postgres.stop(crash=True)
    stage.strike(errors, stage.seconds / 2)  # the outage
    stage.postgres.start()


@scenario("backend-kill", "single backends are terminated at random", "postgres")
def terminate_backends(stage: Stage) -> None:
    ends_at = stage.ends_at()
    while time.monotonic() < ends_at or (not stage.struck and time.monotonic() < ends_at + STRIKES_WITHIN):
        found = stage.sql(
            "SELECT pid FROM pg_stat_activity WHERE application_name = 'semel' AND datname = current_database()"
        )
        if found:
            [(struck,)] = stage.sql("SELECT pg_terminate_backend(:pid)", pid=stage.random.choice(found)[0])
            stage.struck += struck
        time.sleep(stage.random.uniform(0, 0.2))  # the moment is random


@scenario(
    "connections-used-up", "all 100 connections are in use while 4 of 8 processes start", "postgres", connections=100
)
def use_up_connections(stage: Stage) -> None:
    """The newcomers must wait for a connection: none of them ends, and no call fails that may be retried for longer."""
    refused = stage.errors("too many clients")
    with ExitStack() as stack:

        def take_the_rest() -> None:
            with suppress(psycopg.OperationalError):  # there are no more
                while True:
                    stack.enter_context(psycopg.connect(stage.url))

        take_the_rest()
        began_at = time.monotonic()
        workers = [stage.add_worker(stage.url) for _ in range(2)]
        submitters = [stage.add_submitter(stage.url, share=0.25) for _ in range(2)]

        def all_refused() -> int:
            """The refusals, once every newcomer met one; or found a connection that another had just given back."""
            take_the_rest()
            met = {pid for pid, *words in lines(stage.folder / "errors") if "too many clients" in " ".join(words)}
            heard = {key.partition("-")[0] for key, _ in lines(stage.folder / "acknowledged")}
            met |= {str(each.pid) for each in submitters if f"s{stage.askers.index(each)}" in heard}
            return refused() if {str(each.pid) for each in (*workers, *submitters)} <= met else 0

        stage.strike(all_refused)
    if time.monotonic() < began_at + RETRY_FOR:
        stage.failed += len(lines(stage.folder / "refused"))


@scenario("table-lock", "the table of runs is locked", "postgres")
def lock_table(stage: Stage) -> None:
    errors = stage.errors("lock timeout")
    with psycopg.connect(stage.url) as connection:
        connection.execute("LOCK TABLE semel_active IN ACCESS EXCLUSIVE MODE")
        stage.strike(errors)


@scenario("old-snapshot", "a transaction stays open with an old snapshot", "postgres")
def keep_snapshot(stage: Stage) -> None:
    with psycopg.connect(stage.url) as connection:
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        connection.execute("SELECT count(*) FROM semel_runs")
        pid = connection.info.backend_pid
        age = "SELECT coalesce(age(backend_xmin), 0) FROM pg_stat_activity WHERE pid = :pid"
        stage.strike(lambda: int(stage.sql(age, pid=pid)[0][0]))  # the transactions that began since


@scenario("postgres-disk-full", "PostgreSQL refuses writes, as with a full disk (53100)", "postgres")
def fill_postgres_disk(stage: Stage) -> None:
    tables = ("semel_runs", "semel_active", "semel_attempts", "semel_keys")
    errors = stage.errors("No space left on device")
    stage.sql(
        "CREATE FUNCTION no_room() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " RAISE EXCEPTION 'could not extend file: No space left on device' USING ERRCODE = '53100'; END $$"
    )
    for table in tables:
        stage.sql(f"CREATE TRIGGER no_room BEFORE INSERT OR UPDATE ON {table} EXECUTE FUNCTION no_room()")
    stage.strike(errors)
    for table in tables:
        stage.sql(f"DROP TRIGGER no_room ON {table}")


def limit_files(pid: int, room: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (room, hard))


# -- workers and servers -----------------------------------------------------------------------------------------------


@scenario("worker-kill", "a worker is killed and replaced", "postgres")
def kill_worker(stage: Stage) -> None:
    victim = stage.random.choice(stage.workers)
    stage.struck += victim.kill()
    victim.restart()
    time.sleep(LEASE)  # until its leases end


@scenario("worker-kills", "workers are killed again and again", "postgres")
def kill_workers(stage: Stage) -> None:
    ends_at = stage.ends_at()
    while time.monotonic() < ends_at:
        victim = stage.random.choice(stage.workers)
        stage.struck += victim.kill()
        victim.restart()
        time.sleep(stage.random.uniform(0.2, 0.8))  # the moment is random
    time.sleep(LEASE)  # until the last leases end


@scenario("zombies", "workers are stopped past their lease, and woken with results in hand", "postgres")
def stop_and_wake(stage: Stage) -> None:
    victim = stage.random.choice(stage.workers)
    name = f"w{stage.workers.index(victim)}"
    (stage.folder / THOROUGH).touch()  # zombies have artifacts, logs and costs in hand, too

    def attempts(file: str) -> set[tuple[str, int]]:
        return {(run_id, int(fence)) for run_id, fence, *_ in lines(stage.folder / file)}

    def held() -> set[tuple[str, int]]:
        stop(victim.pid)
        running = "SELECT id, fence FROM semel_run_states WHERE status = 'RUNNING' AND worker LIKE :name"
        found = {(str(run.id), run.fence) for run in stage.sql(running, name=f"{name}%")}
        if begun := found & attempts("begun") - attempts("effects"):
            return begun
        victim.send(signal.SIGCONT)
        return set()

    def outdated() -> set[tuple[str, int]]:
        leased = stage.sql("SELECT id, fence FROM semel_run_states WHERE status = 'RUNNING'")
        return under_way - {(str(run.id), run.fence) for run in leased}

    under_way = eventually(held, "the worker is at work")
    time.sleep(max(stage.seconds, 2 * LEASE))  # longer than the lease
    zombies = eventually(outdated, "the stopped worker loses its leases")
    victim.send(signal.SIGCONT)
    stage.strike(lambda: len(zombies & attempts("effects")), 0)
    (stage.folder / THOROUGH).unlink()


@scenario("clocks-apart", "the clocks of the hosts are two hours apart", "postgres", clocks=(-3600.0, 3600.0))
def wait(stage: Stage) -> None:
    stage.strike(lambda: count_wrong_clocks(stage))


@scenario("clocks-jump", "the clocks of the hosts jump by an hour, forward and back", "postgres", clocks=(0.0,))
def jump(stage: Stage) -> None:
    members = [*stage.workers, *stage.askers]
    for step in range(4):
        for number, member in enumerate(members):
            assert member.clock is not None
            member.clock.set(3600.0 if (step + number) % 2 else -3600.0)
        time.sleep(max(stage.seconds / 4, 1.1))  # libfaketime reads the file once a second
    for member in members:
        assert member.clock is not None
        member.clock.set(0.0)
    stage.struck += count_wrong_clocks(stage)


@scenario("server-kill", "the server is killed under clients that retry", "postgres", through="server")
def kill_server(stage: Stage) -> None:
    assert stage.server is not None
    server, victim = stage.server, stage.random.choice(stage.server.children())
    os.kill(victim, signal.SIGKILL)
    stage.strike(lambda: victim not in server.children())  # its supervisor starts it again


# -- the network -------------------------------------------------------------------------------------------------------


def _trouble(kind: Trouble) -> FaultFunction:
    def fault(stage: Stage) -> None:
        stage.proxy.trouble = kind
        stage.strike(lambda: stage.proxy.struck)
        stage.proxy.trouble = None

    return fault


for _prefix, _what, _store, _through in (
    ("network", "the database", "postgres", "proxy"),
    ("http", "the server", "postgres", "server-proxy"),
    ("redis", "Redis", "redis", "proxy"),
):
    for _kind in ("cut", "delay", "truncate", "reset"):
        scenario(f"{_prefix}-{_kind}", f"the network to {_what}: {_kind}", _store, through=_through)(_trouble(_kind))


# -- keys in Redis -----------------------------------------------------------------------------------------------------


@scenario("redis-kill", "Redis is killed and started again", "redis")
def kill_redis(stage: Stage) -> None:
    assert stage.redis is not None
    url = stage.url
    stage.redis.stop(crash=True)
    stage.strike(lambda: refuses(url), stage.seconds / 2)  # the outage
    stage.redis.start()


@scenario("redis-pause", "Redis does not reply", "redis")
def pause_redis(stage: Stage) -> None:
    ends_at = stage.ends_at()
    with redis_client.Redis.from_url(
        stage.url, socket_timeout=stage.seconds / 4, retry=Retry(NoBackoff(), 0)
    ) as client:
        client.execute_command("CLIENT", "PAUSE", int(stage.seconds * 1000), "ALL")
        try:
            client.ping()
        except redis_client.TimeoutError:
            stage.struck += 1
    time.sleep(max(0.0, ends_at - time.monotonic()))  # the fault lasts


@scenario("redis-script-flush", "Redis forgets its scripts again and again", "redis")
def flush_scripts(stage: Stage) -> None:
    ends_at = stage.ends_at()
    with redis_client.Redis.from_url(stage.url) as client:

        def refusals() -> int:
            return int(client.info("errorstats").get("errorstat_NOSCRIPT", {"count": 0})["count"])

        known = refusals()
        while time.monotonic() < ends_at:
            client.script_flush()
            time.sleep(stage.random.uniform(0, 0.1))  # the moment is random
        stage.strike(lambda: refusals() - known, 0)


# -- SQLite ------------------------------------------------------------------------------------------------------------


def _file(stage: Stage) -> Path:
    return Path(stage.url.removeprefix("sqlite:///"))


@scenario("sqlite-worker-kills", "workers on one file are killed again and again", "sqlite")
def kill_file_workers(stage: Stage) -> None:
    kill_workers(stage)


@scenario("sqlite-locked", "another program holds the file's lock", "sqlite")
def lock_file(stage: Stage) -> None:
    connection = sqlite3.connect(_file(stage), isolation_level=None, timeout=60)
    errors = stage.errors("locked")
    connection.execute("BEGIN EXCLUSIVE")
    stage.strike(errors)
    connection.execute("ROLLBACK")
    connection.close()


@scenario("sqlite-disk-full", "the file cannot grow", "sqlite")
def fill_disk(stage: Stage) -> None:
    members = [*stage.workers, *stage.askers]
    errors = stage.errors()
    oracle = [stage.folder / name for name in ("asked", "acknowledged", "effects")]  # these may grow
    room = max(100_000, 2 * max(file.stat().st_size for file in oracle))
    for member in members:
        limit_files(member.pid, room)
    stage.strike(errors)
    for member in members:
        limit_files(member.pid, resource.RLIM_INFINITY)


@scenario("sqlite-read-only", "the file and its folder cannot be written, and processes start", "sqlite")
def make_read_only(stage: Stage) -> None:
    folder = _file(stage).parent
    files = [Path(f"{_file(stage)}{ending}") for ending in ("", "-wal", "-shm")]
    modes = [(path, path.stat().st_mode) for path in (folder, *files)]
    errors = stage.errors("readonly")
    for path, mode in modes:
        path.chmod(mode & ~0o222)
    for member in (*stage.workers, *stage.askers):  # who has the file open may go on writing
        member.kill()
        member.restart()
    eventually(errors, "a process meets the read-only file")
    stage.strike(errors)
    for path, mode in modes:
        path.chmod(mode)


@scenario("sqlite-moved", "the file is moved away, and back", "sqlite")
def move_file(stage: Stage) -> None:
    away = stage.folder / "away"
    away.mkdir()
    files = [Path(f"{_file(stage)}{ending}") for ending in ("", "-wal", "-shm")]
    errors = stage.errors("FileReplaced")
    for file in files:
        file.rename(away / file.name)
    stage.strike(errors)
    for file in files:
        if not file.exists():
            (away / file.name).rename(file)


# -- brokers -----------------------------------------------------------------------------------------------------------


@scenario("rq-flush", "the broker of RQ forgets everything", "postgres", broker="rq")
@scenario("celery-flush", "the broker of Celery forgets everything", "postgres", broker="celery")
def flush_broker(stage: Stage) -> None:
    """See brokers.py."""


@scenario("rq-kill", "the broker of RQ is killed and started again", "postgres", broker="rq")
@scenario("celery-kill", "the broker of Celery is killed and started again", "postgres", broker="celery")
def kill_broker(stage: Stage) -> None:
    """See brokers.py."""


# -- running one -------------------------------------------------------------------------------------------------------


class Theatre:
    """The servers that all scenarios of a run share."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._postgres: servers.Postgres | None = None
        self._redis: servers.Redis | None = None
        self._templates: dict[servers.Postgres | None, str] = {}

    def run(self, scenario: Scenario, *, seconds: float, seed: int, rate: float = RATE) -> Account:
        """Play the scenario; returns its account."""
        folder = self._folder / f"{scenario.name}-{seed}"
        folder.mkdir()
        account = Account(scenario.name, seed)
        with self._stage(scenario, folder, seconds, seed, rate) as stage:
            self._play(scenario, stage, account, seed)
        account.struck = stage.struck
        account.failed += stage.failed
        return account

    def _play(self, scenario: Scenario, stage: Stage, account: Account, seed: int) -> None:
        if scenario.broker is not None:
            stage.redis = self._redis_server()
            play_broker(stage, scenario.broker, kill=scenario.fault is kill_broker, account=account)
            return
        with self._targets(scenario, stage, seed) as (workers, askers), ExitStack() as stack:
            if scenario.store == "redis":
                stack.enter_context(callers(stage, askers))
                play_calls(stage, scenario.fault, account)
            else:
                stack.enter_context(fleet(stage, workers, askers, scenario.clocks))
                play(stage, scenario.fault, account)

    def _redis_server(self) -> servers.Redis:
        if self._redis is None:
            self._redis = self._stack.enter_context(servers.redis(durable=True))
        return self._redis

    @contextmanager
    def _stage(self, scenario: Scenario, folder: Path, seconds: float, seed: int, rate: float) -> Iterator[Stage]:
        if scenario.store == "redis":
            server = self._redis_server()
            stage = Stage("redis", server.database(), folder, seconds, seed, rate=rate)
            stage.redis = server
            yield stage
            return
        if scenario.store == "postgres" and self._postgres is None:
            self._postgres = self._stack.enter_context(servers.postgres(durable=True))
        database = self._postgres if scenario.store == "postgres" else None
        with ExitStack() as stack:
            if database is not None and scenario.connections is not None:
                stack.enter_context(database.restarted_with(f"--max_connections={scenario.connections}"))
            stage = Stage(scenario.store, self._database(database, folder), folder, seconds, seed, rate=rate)
            stage.postgres = database
            yield stage

    def _database(self, server: servers.Postgres | None, folder: Path) -> str:
        """The URL of a new database: a copy of one with all tables, which are made once."""
        if server not in self._templates:
            self._templates[server] = migrated(server, self._folder)
        template = self._templates[server]
        if server is not None:
            return server.database(template)
        shutil.copy(template.removeprefix("sqlite:///"), folder / "semel.db")
        return f"sqlite:///{folder / 'semel.db'}"

    @contextmanager
    def _targets(self, scenario: Scenario, stage: Stage, seed: int) -> Iterator[tuple[str, str]]:
        """The URLs that workers and submitters are given."""
        with ExitStack() as stack:
            workers = askers = stage.url
            if scenario.through.startswith("server"):
                more = {"SEMEL_CHAOS_DB": stage.url, "SEMEL_CHAOS_FOLDER": str(stage.folder)}
                stage.server = stack.enter_context(
                    ServeProcess(stage.folder, "chaos.served:app", "--db", stage.url, "--no-worker", **more)
                )
                askers = stage.server.address
            if scenario.through.endswith("proxy"):
                stage.proxy = stack.enter_context(closing(TroubledProxy(askers, seed)))
                workers, askers = (stage.proxy.url if each == askers else each for each in (workers, askers))
            yield workers, askers
