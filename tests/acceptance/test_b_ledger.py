"""B, beyond the documents, for the ledger of runs: keys that are claims, and runs that are removed by themselves."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from semel import App, CostLimitExceeded, InProgress, KeyReused, Once, Quota
from semel.cli import main as semel_command
from semel.runs.worker.sweeper import Sweeper, remover
from support.databases import DATABASES, Databases, TestDatabase

DAY = 86400


@pytest.fixture(params=DATABASES)
def database(request: pytest.FixtureRequest, databases: Databases) -> Iterator[TestDatabase]:
    with databases.empty(request.param) as database:
        yield database


# -- B21 ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def once(database: TestDatabase) -> Iterator[Once]:
    with Once(database.url, clock=database.clock, collect=False) as once:
        yield once


def test_b21_the_keys_of_runs_jobs_and_functions_are_in_one_table(
    database: TestDatabase, once: Once, capsys: pytest.CaptureFixture[str]
) -> None:
    database.clock.us = time.time_ns() // 1000  # the command's
    run = database.submit(42, idempotency_key="of-a-run")
    database.jobs.store_idempotency_key("of-a-job", "job-7", 42)
    once.call("of-a-function", lambda: 7, scope="runs:42")
    found = database.rows("SELECT key FROM semel_keys WHERE scope = 'runs:42' ORDER BY key")
    assert [row[0] for row in found] == ["of-a-function", "of-a-job", "of-a-run"]
    for key, names in (("of-a-run", run.id), ("of-a-job", "job-7"), ("of-a-function", "7")):
        assert semel_command(["keys", "show", key, "--db", database.url]) == 0
        assert names in capsys.readouterr().out


def test_b21_keys_of_one_scope_meet_whatever_entrance_they_came_by(database: TestDatabase, once: Once) -> None:
    run = database.submit(42, idempotency_key="a")
    assert once.call("a", lambda: "done again", scope="runs:42").value == run.id
    assert database.jobs.check_idempotency_key("a", 42) == run.id
    once.claim("b", scope="runs:42", lease=60)
    with pytest.raises(InProgress):
        database.submit(42, idempotency_key="b")
    once.call("c", lambda: "paid", scope="runs:42")
    with pytest.raises(KeyReused):
        database.submit(42, idempotency_key="c")
    assert once.forget("a", scope="runs:42"), "one admin for all keys"
    assert database.submit(42, idempotency_key="a").id != run.id


# -- B22 ---------------------------------------------------------------------------------------------------------------


def sweep(database: TestDatabase, retention: float) -> set[str]:
    """One turn of a worker's sweeper with this retention; returns the runs that are left."""

    async def turn() -> None:
        app = App(database.url, clock=database.clock, retention=retention)
        store = app.ledger(awaited=True)
        with closing(app):
            options = {"transport": app.transport, "hooks": app.hooks, "retention": retention}
            await Sweeper(store, "sweeper", remove_old=remover(app, store), **options).sweep()
            await store.close()

    asyncio.run(turn())
    return {run.id for run in database.app.runs().runs}


def test_b22_retention_never_removes_what_is_active_or_named_by_a_live_key(database: TestDatabase) -> None:
    old, named = database.submit(), database.submit(idempotency_key="key", key_ttl=30 * DAY)
    database.finish(old, named)
    running, waiting = database.submit(), database.submit()
    database.lease()
    everything = {run.id for run in (old, named, running, waiting)}
    database.clock.advance(3 * DAY)
    assert sweep(database, retention=4 * DAY) == everything
    assert sweep(database, retention=2 * DAY) == everything - {old.id}
    database.clock.advance(30 * DAY)
    assert sweep(database, retention=2 * DAY) == {running.id, waiting.id}, "no key names it any more"


def test_b22_the_usage_of_cost_limits_survives_the_runs_it_came_from(database: TestDatabase) -> None:
    database.app.set_quota(42, Quota(cost_yearly=10))
    spent = [database.submit(cost=cost) for cost in (3, 4)]
    database.finish(*spent)
    database.clock.advance(3 * DAY)
    assert sweep(database, retention=DAY) == set()
    assert database.app.usage(42).spent["yearly"] == 7
    with pytest.raises(CostLimitExceeded):
        database.submit(cost=4)
