"""Behind PgBouncer in transaction mode everything works, with more clients than PostgreSQL has sessions for them."""

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import Connection, create_engine, make_url, text

from semel import (
    App,
    AsyncJobStore,
    AsyncOnce,
    InFlight,
    InvalidRequest,
    JobStore,
    Once,
    Quota,
    QuotaExceeded,
    Run,
    StoreBroken,
)
from semel._concurrency.sync import run_sync
from semel.cli import main as semel_command
from semel.db import open_database
from semel.db.dialect import transaction
from semel.once.store import Clock, Store
from semel.once.stores import open_store
from semel.testing import StoreSuite
from support import servers
from support.databases import TestDatabase, database_url, held
from support.pgbouncer import SESSIONS, PgBouncer, pgbouncer
from support.runs_harness import PATIENCE, RunsHarness, effects, in_threads
from support.serve_command import ServeProcess
from support.waiting import eventually

CLIENTS = 6
"""Objects with up to five connections each."""


@pytest.fixture(scope="module")
def bouncer(postgres_server: servers.Postgres) -> Iterator[PgBouncer]:
    with pgbouncer(postgres_server) as bouncer:
        yield bouncer


@pytest.fixture
def url(bouncer: PgBouncer, migrated_postgres_url: str) -> str:
    """An empty database with all tables, through PgBouncer."""
    return bouncer.in_front_of(migrated_postgres_url, pool_mode="transaction")


@pytest.fixture
def harness(url: str, tmp_path: Path) -> Iterator[RunsHarness]:
    with RunsHarness("postgres", url, tmp_path) as harness:
        yield harness


@pytest.fixture
def database(url: str) -> Iterator[TestDatabase]:
    with ExitStack() as stack:
        yield TestDatabase("postgres", url, stack)


@pytest.fixture
def clients(url: str) -> Iterator[list[Once]]:
    with ExitStack() as stack:
        yield [stack.enter_context(Once(url, retry_for=PATIENCE)) for _ in range(CLIENTS)]


def test_threads_of_many_clients_do_each_key_once(clients: list[Once]) -> None:
    done: Counter[str] = Counter()

    def work(key: str) -> str:
        done[key] += 1
        return f"outcome of {key}"

    def call(number: int) -> str:
        key = f"key {number // 3}"
        value: str = clients[number % CLIENTS].call(key, partial(work, key), wait=PATIENCE).value
        return value

    with ThreadPoolExecutor(24) as threads:
        answers = list(threads.map(call, range(600)))
    assert answers == [f"outcome of key {number // 3}" for number in range(600)]
    assert set(done.values()) == {1}


def test_tasks_of_many_clients_do_each_key_once(url: str) -> None:
    done: Counter[str] = Counter()

    async def work(key: str) -> bytes:
        done[key] += 1
        return key.encode()

    async def call(client: AsyncOnce, key: str) -> bytes:
        value: bytes = (await client.call(key, partial(work, key), wait=PATIENCE)).value
        return value

    async def scenario() -> list[bytes]:
        clients = [AsyncOnce(url, retry_for=PATIENCE) for _ in range(CLIENTS)]
        calls = [call(clients[number % CLIENTS], f"key {number // 3}") for number in range(600)]
        answers = await asyncio.gather(*calls)
        for client in clients:
            await client.close()
        return answers

    assert asyncio.run(scenario()) == [f"key {number // 3}".encode() for number in range(600)]
    assert set(done.values()) == {1}


@pytest.mark.parametrize("value", [None, "", "it's 100 % \\ \" {a,b} :x %(x)s %s é\n", b"\x00'\\\xff", -1, 2**70, 0.1])
def test_every_value_replays_exactly(clients: list[Once], value: Any) -> None:
    """Values are part of the statement's text, so what is special there must stay as it is."""
    key = f"key of {value!r}"[:100].replace("\n", "")
    assert clients[0].call(key, lambda: value).value == value
    replayed = clients[1].call(key, lambda: "other")
    assert (replayed.value, replayed.replayed) == (value, True)


def test_a_waiting_duplicate_polls_and_nothing_listens(url: str, migrated_postgres_url: str) -> None:
    started, finish = threading.Event(), threading.Event()

    def work() -> str:
        started.set()
        finish.wait(PATIENCE)
        return "done"

    with Once(url) as owner, Once(url) as other, ThreadPoolExecutor(2) as threads:
        owned = threads.submit(owner.call, "key", work)
        assert started.wait(PATIENCE)
        waiting = threads.submit(other.call, "key", lambda: "done twice", wait=PATIENCE)
        with psycopg.connect(migrated_postgres_url, autocommit=True) as direct:
            awaited = "SELECT count(*) FROM semel_keys WHERE awaited"
            eventually(lambda: direct.execute(awaited).fetchone() == (1,), "the duplicate waits")
        finish.set()
        assert owned.result(PATIENCE).value == "done"
        assert (waiting.result(PATIENCE).value, waiting.result().replayed) == ("done", True)
    assert not [thread for thread in threading.enumerate() if thread.name == "semel-listener"]


def test_a_key_in_an_open_transaction_of_the_user_is_in_flight(url: str) -> None:
    """Also while the transaction occupies a session: others wait for its row for a fifth of a second at most."""
    own = make_url(url).set(drivername="postgresql+psycopg").difference_update_query(["pool_mode"])
    engine = create_engine(own, connect_args={"prepare_threshold": None})
    with Once(url) as once, engine.begin() as conn:
        claim = once.on(conn).claim("key").claim
        assert isinstance(once.claim("key"), InFlight)
        once.on(conn).complete(claim, 7)
        assert isinstance(once.claim("key"), InFlight)
        conn.commit()
        assert once.call("key", lambda: 8).value == 7
    engine.dispose()


SHOWN = ("lock_timeout", "transaction_isolation", "jit", "enable_seqscan", "search_path")


def shown(conn: Connection) -> dict[str, Any]:
    asked = ", ".join(f"current_setting('{name}')" for name in SHOWN)
    return dict(zip(SHOWN, conn.execute(text(f"SELECT {asked}")).one(), strict=True))


def shown_in_a_transaction(conn: Connection) -> dict[str, Any]:
    with transaction(conn):
        first = shown(conn)
        assert shown(conn) == first
        return first


def test_every_transaction_has_its_settings(url: str, migrated_postgres_url: str) -> None:
    name = make_url(url).database
    with psycopg.connect(migrated_postgres_url, autocommit=True) as direct:
        direct.execute(f"ALTER DATABASE {name} SET default_transaction_isolation = 'serializable'")  # type: ignore[call-overload]
    hot = {"lock_timeout": "200ms", "transaction_isolation": "read committed", "jit": "off", "enable_seqscan": "off"}
    database = open_database(
        make_url(url).update_query_dict({"options": "-c search_path=public,pg_catalog"}), is_async=False
    )
    for look in (shown, shown_in_a_transaction):
        ours = {**hot, "search_path": "public,pg_catalog"}
        assert run_sync(database.read(look)) == ours
        assert run_sync(database.survey(look)) == {**ours, "enable_seqscan": "on"}
        assert run_sync(database.write(look)) == ours
    run_sync(database.close())


LEFT = """
SELECT current_setting('lock_timeout'), current_setting('enable_seqscan'), current_setting('statement_timeout'),
       (SELECT count(*) FROM pg_prepared_statements), (SELECT count(*) FROM pg_listening_channels()),
       (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()), pg_backend_pid()
"""


def test_nothing_is_left_in_a_session(bouncer: PgBouncer, harness: RunsHarness, migrated_postgres_url: str) -> None:
    """Another user of the pool gets the sessions afterwards."""
    app = harness.app
    with harness.working(app), Once(harness.url) as once:
        once.call("key", lambda: 7)
        once.stats()
        assert [app.wait(run.id, timeout=PATIENCE).status for run in submitted(app, 20)] == ["SUCCEEDED"] * 20
    plain = bouncer.in_front_of(migrated_postgres_url)
    with ExitStack() as stack:
        others = [stack.enter_context(psycopg.connect(plain, prepare_threshold=None)) for _ in range(SESSIONS)]
        found = [other.execute(LEFT).fetchone() for other in others]  # type: ignore[call-overload]
    assert {each[:6] for each in found} == {("0", "on", "0", 0, 0, 0)}
    assert len({each[6] for each in found}) == SESSIONS


def submitted(app: App, most: int) -> list[Run]:
    runs = app.submit_many([{"model": "add", "parameters": {"a": number}, "dedupe": False} for number in range(most)])
    assert all(isinstance(run, Run) for run in runs)
    return [run for run in runs if isinstance(run, Run)]


def test_two_workers_execute_each_of_many_runs_once(harness: RunsHarness) -> None:
    """Submitted by two apps, one by one from threads and in bulk; one worker has a child process."""
    folder = harness.place("effects")
    apps = [harness.open(), harness.open()]

    def submit(number: int) -> Run:
        model = "note_apart" if number % 10 == 0 else "note"
        return apps[number % 2].submit(
            model, {"folder": folder, "number": number}, idempotency_key=f"run {number // 2}x"
        )

    with harness.working(apps[0], poll=PATIENCE), harness.working(harness.open(), poll=PATIENCE, processes=1):
        with ThreadPoolExecutor(16) as threads:
            single = list(threads.map(submit, range(0, 100, 2)))
        many = [
            {"model": "note", "parameters": {"folder": folder, "number": number}, "dedupe": False}
            for number in range(100, 400)
        ]
        runs = [*single, *apps[1].submit_many(many)]
        ended = [apps[0].wait(run.id, timeout=PATIENCE) for run in runs if isinstance(run, Run)]
    assert Counter(run.status for run in ended) == {"SUCCEEDED": 350}
    done = effects(folder)
    assert len(done) == len({line[0] for line in done}) == 350


def test_runs_fail_retry_stop_and_keep_their_leases(harness: RunsHarness) -> None:
    app = harness.open({"lease": 20.0, "backoff": (0,), "max_attempts": 3})
    folder = harness.place("held")
    with harness.working(app):
        flaky = app.submit("flaky", {"failures": 2})
        hopeless = app.submit("flaky", {"failures": 3})
        stopped = app.submit("await_politely", {"folder": folder})
        long = app.submit("await_politely", {"folder": harness.place("long")})
        eventually(lambda: len(effects(folder)) == 1)
        eventually(lambda: app.get(long.id).status == "RUNNING")
        first = app.get(long.id).lease_until_us or 0
        app.cancel(stopped.id)
        assert app.wait(stopped.id, timeout=PATIENCE).status == "CANCELLED"
        assert app.wait(flaky.id, timeout=PATIENCE).attempts == 3
        assert app.wait(hopeless.id, timeout=PATIENCE).status == "FAILED"
        eventually(lambda: (app.get(long.id).lease_until_us or 0) > first + 1_000_000, "its lease is renewed")
        (harness.folder / "long" / "open").touch()
        ended = app.wait(long.id, timeout=PATIENCE)
        assert (ended.status, ended.attempts) == ("SUCCEEDED", 1)


def test_what_a_lost_worker_had_is_taken_back_and_its_fence_is_refused(database: TestDatabase) -> None:
    run = database.submit()
    (lost,) = database.lease()
    assert database.renew(lost) == {run.id: False}
    database.clock.advance(61)
    assert database.lose_expired() == 1
    database.clock.advance(3600)
    (again,) = database.lease()
    assert (again.id, again.fence > lost.fence) == (run.id, True)
    assert not database.end(lost)
    assert database.end(again)
    assert database.app.get(run.id).status == "SUCCEEDED"
    database.clock.advance(10 * 86400)
    database.tidy()


def test_jobs_and_what_must_come_before_them_are_written(database: TestDatabase) -> None:
    assert database.app.get(held(database).id).status == "PENDING"


def test_a_quota_cannot_be_raced(url: str) -> None:
    with ExitStack() as stack:
        stores = [JobStore(url) for _ in range(CLIENTS)]
        apps = [App(url) for _ in range(CLIENTS)]
        for each in (*stores, *apps):
            stack.callback(each.close)
        for app in apps:
            app.model("train", isolation="thread")(lambda number: number)
        slots = in_threads(*(partial(store.reserve_job_slot, 42, 5, 300) for store in stores * 3))
        assert len([slot for slot in slots if slot]) == 5
        apps[0].set_quota(7, Quota(max_concurrent=4))

        def submit(app: App, number: int) -> bool:
            try:
                return bool(app.submit("train", {"number": number}, user=7))
            except QuotaExceeded:
                return False

        answers = in_threads(*(partial(submit, app, number) for number, app in enumerate(apps * 3)))
        assert answers.count(True) == 4


def test_an_event_loop_reserves_and_submits(url: str) -> None:
    async def scenario() -> str | None:
        app, jobs = App(url), AsyncJobStore(url)
        app.model("train", isolation="thread")(lambda number: number)
        runs = await asyncio.gather(*(app.aio.submit("train", {"number": number}) for number in range(50)))
        assert len({run.id for run in runs}) == 50
        slot = await jobs.reserve_job_slot(42, 1)
        assert await jobs.reserve_job_slot(42, 1) is None
        await jobs.close()
        await app.aio.close()
        return slot

    assert asyncio.run(scenario())


def test_migrations_wait_for_each_other_and_the_doctor_finds_nothing(
    bouncer: PgBouncer, postgres_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = bouncer.in_front_of(postgres_url, pool_mode="transaction")
    assert in_threads(*[partial(semel_command, ["migrate", url])] * 3) == [0, 0, 0]
    assert capsys.readouterr().out.count("already at") == 2
    assert semel_command(["doctor", "--db", url, "--artifacts", str(tmp_path)]) == 0
    assert "BROKEN" not in capsys.readouterr().out


def test_a_server_and_its_worker_run_jobs(url: str, tmp_path: Path) -> None:
    with ServeProcess(tmp_path, "support.apps.serve_app:app", "--db", url) as serving, serving.client() as client:
        runs = [
            serving.submit("add" if number % 5 else "count", {("a" if number % 5 else "to"): number})
            for number in range(20)
        ]
        for run in runs:
            serving.becomes(run["run_id"], "SUCCEEDED")
        assert client.get("/readyz").status_code == 200
        assert len(client.get("/runs").json()["runs"]) == 20


@pytest.mark.parametrize("crash", [False, True])
def test_calls_and_runs_survive_a_restart_of_pgbouncer(
    bouncer: PgBouncer, harness: RunsHarness, clients: list[Once], crash: bool
) -> None:
    done: Counter[int] = Counter()
    halfway = threading.Event()

    def work(number: int) -> int:
        done[number] += 1
        if len(done) == 100:
            halfway.set()
        return number

    def call(number: int) -> int:
        value: int = clients[number % CLIENTS].call(f"key {number}", partial(work, number)).value
        return value

    app = harness.open(retry_for=PATIENCE)
    with harness.working(app), ThreadPoolExecutor(8) as threads:
        runs = submitted(app, 100)
        answers = [threads.submit(call, number) for number in range(400)]
        assert halfway.wait(PATIENCE)
        bouncer.restart(crash=crash)
        assert [answer.result(PATIENCE) for answer in answers] == list(range(400))
        assert set(done.values()) == {1}
        assert {app.wait(run.id, timeout=PATIENCE).status for run in runs} == {"SUCCEEDED"}


def test_without_the_option_the_error_names_it(bouncer: PgBouncer, migrated_postgres_url: str) -> None:
    url = bouncer.in_front_of(migrated_postgres_url)
    hint = "pool_mode=transaction"
    with pytest.raises(StoreBroken, match=hint):
        Once(url).call("key", lambda: 7)
    with pytest.raises(StoreBroken, match=hint):
        asyncio.run(AsyncOnce(url).get("key"))
    with pytest.raises(StoreBroken, match=hint):
        App(url).get("018f0000-0000-7000-8000-000000000000")


def test_a_prepared_statement_of_another_client_leads_to_the_option(
    postgres_server: servers.Postgres, migrated_postgres_url: str
) -> None:
    """PgBouncer that ignores the settings lets the connection be made; then two clients prepare under one name."""
    with pgbouncer(postgres_server, default_pool_size=1, ignore_startup_parameters="options") as bouncer:
        url = bouncer.in_front_of(migrated_postgres_url)
        with Once(url, collect=False) as one, Once(url, collect=False) as other:
            for _ in range(20):
                one.get("key")
            with pytest.raises(StoreBroken, match=r"prepared statement .* pool_mode=transaction"):
                [other.get("key") for _ in range(20)]


@pytest.mark.parametrize("mode", ["statement", "Transaction"])
def test_another_mode_is_refused(mode: str) -> None:
    for opened in (Once, AsyncOnce, App, JobStore):
        with pytest.raises(InvalidRequest, match=r"'session' .* or 'transaction'"):
            opened(f"postgresql://localhost/app?pool_mode={mode}")


@pytest.mark.parametrize("mode", ["session", "transaction"])
def test_a_direct_connection_takes_either_mode(migrated_postgres_url: str, mode: str) -> None:
    url = make_url(migrated_postgres_url).update_query_dict({"pool_mode": mode}).render_as_string(hide_password=False)

    async def replayed() -> object:
        async with AsyncOnce(url) as once:
            record = await once.get("key")
            return record and record.status

    with Once(url) as once:
        assert once.call("key", lambda: 7).value == 7
    assert asyncio.run(replayed()) == "completed"


@pytest.fixture(scope="module")
def shared_url(request: pytest.FixtureRequest) -> Iterator[str]:
    with database_url(request, "postgres") as url:
        yield url


class TestKeys(StoreSuite):
    """The rules of every store of keys."""

    server_clock = True

    @pytest.fixture(autouse=True)
    def empty_tables(self, bouncer: PgBouncer, shared_url: str) -> None:
        with psycopg.connect(shared_url, autocommit=True) as direct:
            direct.execute("DELETE FROM semel_keys")
        self.url = bouncer.in_front_of(shared_url, pool_mode="transaction")

    def open(self, clock: Clock | None) -> Store:
        return open_store(self.url, is_async=False, clock=clock, retry_for=PATIENCE)
