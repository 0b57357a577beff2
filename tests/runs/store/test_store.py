"""The store itself: where it is, how it runs a function on the database, and how it waits for one that is away."""

import asyncio
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from sqlalchemy import Connection, select

from semel import InvalidRequest, KeyReused, SemelError, StoreUnavailable
from semel._concurrency.retry import Outage
from semel._concurrency.runtime import seconds_left
from semel._concurrency.sync import run_sync
from semel.db import migrate
from semel.db.dialect import hot
from semel.db.schema import workers
from semel.errors import StoreBroken
from semel.once.stores.postgres import PostgresStore
from semel.once.stores.sqlite import SqliteStore
from semel.runs.store import LONG_DEADLINE, RunStore, queries, wait_for_database
from semel.runs.submission import SubmitOptions
from support.databases import Databases, TestDatabase
from support.waiting import eventually

POSTGRES = "postgresql://ann:secret@db.example.org/runs"
"""Nobody connects to it."""


@pytest.fixture
def database(databases: Databases) -> Iterator[TestDatabase]:
    with databases.empty("sqlite") as database:
        yield database


@pytest.fixture
def store(sqlite_url: str) -> Iterator[RunStore]:
    """A store on a file that does not exist yet."""
    store = RunStore(sqlite_url, awaited=False, retry_for=0)
    yield store
    run_sync(store.close())


def test_tables_that_take_long_to_create_are_waited_for(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow machine they take longer than a call may: given up and begun anew, they would never be there."""
    real = migrate.bring_up

    def slowly(conn: Connection) -> None:
        time.sleep(1.5)
        real(conn)

    async def body() -> None:
        store = RunStore(sqlite_url, awaited=True, retry_for=1.0)
        await store.open_with_retry()
        assert await store.read(queries.list_workers, store.statement_context) == []
        await store.close()

    monkeypatch.setattr(migrate, "bring_up", slowly)
    asyncio.run(body())


# -- where it is -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["redis://localhost", "mysql://localhost/runs", "memory://"])
def test_runs_live_in_one_of_two_databases(url: str) -> None:
    with pytest.raises(InvalidRequest, match="runs live in SQLite or PostgreSQL, not in"):
        RunStore(url, awaited=False)


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "sqlite:///file::memory:?cache=shared"])
def test_a_database_in_memory_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest, match="runs need a file that every process sees"):
        RunStore(url, awaited=False)


def test_the_place_is_told_without_driver_and_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    relative = RunStore("sqlite:///semel.db", awaited=False)
    assert (relative.file, relative.place) == (tmp_path / "semel.db", str(tmp_path / "semel.db"))
    for url in (POSTGRES, POSTGRES.replace("postgresql", "postgres"), POSTGRES.replace("://", "+psycopg://")):
        server = RunStore(url, awaited=False)
        assert (server.file, server.place) == (None, "postgresql://ann:***@db.example.org/runs")
    assert RunStore("postgresql://db.example.org", awaited=False).place == "postgresql://db.example.org"


def test_its_keys_are_in_the_same_kind_of_database(store: RunStore) -> None:
    assert isinstance(store.key_store(), SqliteStore)
    assert isinstance(RunStore(POSTGRES, awaited=False).key_store(), PostgresStore)


def test_the_same_store_for_threads_has_the_same_settings(store: RunStore) -> None:
    assert store.blocking() is store
    awaited = RunStore(POSTGRES, awaited=True, clock=lambda: 7, publish=True, retry_for=3)
    same = awaited.blocking()
    assert (same.awaited, same.url.password, same.retry_for) == (False, "secret", 3)
    assert (same.statement_context.now, same.statement_context.publish) == (7, True)


def test_the_time_of_a_statement_is_the_clocks_the_hosts_or_the_servers(store: RunStore) -> None:
    now = store.statement_context.now
    assert now is not None
    assert abs(now - time.time() * 1e6) < 60e6
    assert RunStore(POSTGRES, awaited=False).statement_context.now is None
    assert RunStore(POSTGRES, awaited=False, clock=lambda: 7).statement_context.now == 7
    assert store.statement_context.publish is False


# -- opening -----------------------------------------------------------------------------------------------------------


def test_the_first_call_makes_the_tables_of_a_new_file(store: RunStore) -> None:
    assert store.file is not None
    assert not store.file.exists()
    assert run_sync(store.read(queries.get, [])) == {}
    assert run_sync(store.find("01900000-0000-7000-8000-000000000000")) is None


def test_a_file_in_a_folder_that_is_missing_is_an_error_that_waiting_does_not_mend(tmp_path: Path) -> None:
    store = RunStore(f"sqlite:///{tmp_path / 'missing' / 'semel.db'}", awaited=False)
    with pytest.raises(StoreBroken, match=f"the folder {tmp_path / 'missing'} of the database file does not exist"):
        wait_for_database(store, 60)


def test_a_server_without_tables_is_an_error_at_once(postgres_url: str) -> None:
    store = RunStore(postgres_url, awaited=False)
    with pytest.raises(SemelError, match="semel migrate"):
        run_sync(store.open())
    run_sync(store.close())


# -- calls -------------------------------------------------------------------------------------------------------------


def write_and_fail(conn: Connection, worker: str) -> None:
    row = {"id": worker, "name": worker, "host": "", "pid": 1, "queues": "[]", "models": "{}", "slots": "{}"}
    conn.execute(workers.insert().values(draining=False, started_us=0, seen_us=0, **row))
    raise ValueError("after the first statement")


def names(conn: Connection) -> list[str]:
    return list(conn.scalars(select(workers.c.id)))


def test_a_function_that_fails_has_written_nothing_unless_its_statements_commit_one_by_one(
    databases: Databases,
) -> None:
    def write(conn: Connection, worker: str) -> None:
        write_and_fail(conn, worker)

    with databases.empty("postgres") as database:
        for verb, worker in ((write_and_fail, "plain"), (hot(write), "hot")):
            with pytest.raises(ValueError, match="after the first statement"):
                run_sync(database.store.write(verb, worker))
        assert run_sync(database.store.read(names)) == ["hot"]


def test_a_function_that_goes_through_many_rows_has_more_time_for_a_try(sqlite_url: str) -> None:
    store = RunStore(sqlite_url, awaited=False, retry_for=10)
    run_sync(store.open())

    def left(conn: Connection) -> float:
        return seconds_left()

    for call in (store.read, store.write):
        assert LONG_DEADLINE - 5 < run_sync(call(left)) <= LONG_DEADLINE
    short = hot(lambda conn: seconds_left())
    for call in (store.read, store.write):
        assert 0 < run_sync(call(short)) <= 5
    run_sync(store.close())


def test_a_closed_store_has_given_its_connections_back(databases: Databases) -> None:
    with databases.empty("postgres") as database:
        store = RunStore(database.url, awaited=False)
        run_sync(store.read(names))
        mine = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        assert database.rows(mine) != [(0,)]
        run_sync(store.close())
        eventually(lambda: database.rows(mine) == [(0,)], "the server has noticed")


def test_blocking_work_is_done_in_a_thread_only_where_the_store_is_awaited(store: RunStore) -> None:
    assert run_sync(store.run_blocking(threading.get_ident)) == threading.get_ident()
    awaited = RunStore(POSTGRES, awaited=True)
    assert asyncio.run(awaited.run_blocking(threading.get_ident)) != threading.get_ident()


def test_a_call_in_vain_begins_an_outage_and_an_answer_ends_it(store: RunStore) -> None:
    now = [0.0]

    def fail(conn: Connection) -> None:
        raise StoreUnavailable("it is away")

    with pytest.raises(StoreUnavailable, match="it is away"):
        run_sync(store.read(fail))
    store.outage = Outage(logging.getLogger("test"), "the database", "nothing works", clock=lambda: now[0])
    with pytest.raises(StoreUnavailable, match="it is away"):
        run_sync(store.read(fail))
    assert store.outage.ongoing
    now[0] = 10
    assert run_sync(store.read(names)) == []
    assert not store.outage.ongoing


# -- many submissions --------------------------------------------------------------------------------------------------


def submissions(database: TestDatabase, *options: SubmitOptions) -> list[Any]:
    builder = database.app._engine._builder
    return [builder.submission("train", {"number": n}, each) for n, each in enumerate(options)]


def refuse_queue(database: TestDatabase) -> None:
    """From now on the database refuses the runs of one queue, as it does what it cannot store."""
    database.write(
        "CREATE TRIGGER refused BEFORE INSERT ON semel_runs WHEN NEW.queue = 'refused' "
        "BEGIN SELECT RAISE(ABORT, 'refused'); END"
    )


def test_what_the_database_refuses_has_its_error_in_its_place(database: TestDatabase) -> None:
    refuse_queue(database)
    bad = SubmitOptions(queue="refused", dedupe=False)
    asked = submissions(database, SubmitOptions(), bad, SubmitOptions(), bad)
    first, wrong, second, too = run_sync(database.store.submit_many(asked))
    assert {first.id, second.id} == {run.id for run in database.app.runs().runs}  # type: ignore[union-attr]
    for error in (wrong, too):
        assert isinstance(error, SemelError)
        assert str(error).startswith("the database reported an error")
    with pytest.raises(SemelError, match="refused"):
        run_sync(database.store.submit_many(submissions(database, bad, bad)))


def test_a_fault_of_our_own_is_an_error_in_its_place_too(database: TestDatabase) -> None:
    good, bad = submissions(database, SubmitOptions(), SubmitOptions())
    answers = run_sync(database.store.submit_many([good, replace(bad, priority=object())]))
    assert answers[0].id == good.id  # type: ignore[union-attr]
    assert isinstance(answers[1], SemelError)
    assert str(answers[1]).startswith("it could not be stored: TypeError")


def test_none_are_none(database: TestDatabase) -> None:
    assert run_sync(database.store.submit_many([])) == []


def test_more_than_a_transaction_takes_are_all_submitted_in_their_order(
    database: TestDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("semel.runs.store._BULK", 2)
    asked = submissions(database, *[SubmitOptions(idempotency_key="key")] * 2, *[SubmitOptions()] * 3)
    answers = run_sync(database.store.submit_many(asked))
    assert isinstance(answers[1], KeyReused)
    assert [each.id for each in (answers[0], *answers[2:])] == [each.id for each in (asked[0], *asked[2:])]  # type: ignore[union-attr]
    assert len(database.app.runs().runs) == 4


# -- waiting for it ----------------------------------------------------------------------------------------------------


class Away(RunStore):
    """Cannot be reached the first times."""

    def __init__(self, url: str, failures: int) -> None:
        super().__init__(url, awaited=False)
        self.failures = failures
        self.closed = 0

    async def open(self) -> None:
        if self.failures:
            self.failures -= 1
            raise StoreUnavailable("nobody answers")
        await super().open()

    async def close(self) -> None:
        self.closed += 1
        await super().close()


def test_a_database_that_is_there_is_not_waited_for(sqlite_url: str, caplog: pytest.LogCaptureFixture) -> None:
    store = Away(sqlite_url, 0)
    wait_for_database(store, 60)
    assert store.file is not None
    assert (store.file.exists(), store.closed, caplog.messages) == (True, 1, [])


def test_a_database_that_comes_back_was_waited_for_with_two_lines(
    sqlite_url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    store = Away(sqlite_url, 3)
    wait_for_database(store, 60)
    assert (store.failures, store.closed, pauses) == (0, 1, [0.5] * 3)
    waits = "the database is unavailable, waiting for it for up to 60 s: nobody answers"
    assert caplog.messages == [waits, "the database is available after 0 s"]


@pytest.mark.parametrize(("seconds", "lines"), [(0, 0), (0.2, 1)])
def test_when_the_time_is_over_the_last_error_is_raised(
    sqlite_url: str, caplog: pytest.LogCaptureFixture, seconds: float, lines: int
) -> None:
    store = Away(sqlite_url, 10)
    with pytest.raises(StoreUnavailable, match="nobody answers"):
        wait_for_database(store, seconds)
    assert (store.failures, store.closed, len(caplog.messages)) == (9 - lines, 1, lines)
