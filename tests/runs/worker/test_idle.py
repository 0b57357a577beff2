"""What a worker sends while it has nothing to do: few statements, which find all that they must."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, TextClause, event

from semel.db import database, dialect
from semel.db.database import COMMITS
from semel.runs.store.queries import WORKER_SILENCE_US
from semel.runs.types import MICRO
from semel.runs.worker import Worker
from semel.runs.worker.heartbeat import RECORD_EVERY
from semel.runs.worker.notifier import CHECK_EVERY, ChangeNotifier
from semel.runs.worker.sweeper import CLEAN_UP_EVERY, Sweeper
from support.runs_harness import PATIENCE, RunsHarness
from support.waiting import eventually

LEAD, LOOK = "semel_leaders", "min(due_us)"


@contextmanager
def statements() -> Iterator[list[str]]:
    """The statements that are sent in the block: by SQLAlchemy, and hot ones, which go past it on PostgreSQL."""
    sent: list[str] = []

    def note(_conn: Any, _cursor: Any, statement: str, *_: Any) -> None:
        sent.append(statement)

    def fetch(conn: Connection, statement: TextClause, values: dict[str, Any]) -> Any:
        if conn.get_execution_options().get(COMMITS):
            sent.append(str(statement))
        return database.fetch(conn, statement, values)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dialect, "fetch", fetch)
            yield sent
    finally:
        event.remove(Engine, "before_cursor_execute", note)


def sweeper_of(harness: RunsHarness) -> Sweeper:
    app = harness.open(clock=harness.clock)
    return Sweeper(app.ledger(awaited=True), "me", transport=app.transport, hooks=app.hooks)


def turns(sweeper: Sweeper, times: int) -> list[list[str]]:
    """What the sweeper sends in each of so many turns, every one of which renews its term."""

    async def turn() -> list[list[str]]:
        sent: list[list[str]] = []
        try:
            for _ in range(times):
                sweeper._asks_at = sweeper._works_at = 0.0
                with statements() as each:
                    await sweeper.tick()
                sent.append([one for one in each if one not in ("BEGIN IMMEDIATE", "COMMIT", "ROLLBACK")])
        finally:
            await sweeper._store.close()
        return sent

    return asyncio.run(turn())


def test_an_idle_sweeper_renews_its_term_and_learns_that_there_is_nothing_to_do_with_one_statement(
    harness: RunsHarness,
) -> None:
    sweeper = sweeper_of(harness)
    first, _, *others = turns(sweeper, 5)  # the second sets its connection back after the look for partitions
    assert len(first) > 1, "a new sweeper looks for partitions"
    assert [len(each) for each in others] == [1 if harness.kind == "postgres" else 2] * 3
    assert all(LEAD in each[0] for each in others)


def test_what_an_idle_worker_sends_is_at_most_one_statement_in_two_seconds(harness: RunsHarness) -> None:
    """The sum of its four periods; the tests beside this one see that each of them is one statement."""
    config = Worker(harness.app)._config
    assert config.sweep_every is not None
    periods = (sweeper_of(harness)._renew_after, config.poll, RECORD_EVERY, CHECK_EVERY)
    assert sum(1 / each for each in periods) <= 0.5
    assert CLEAN_UP_EVERY >= 60, "a look for rows to remove is part of the statement that renews the term"


def test_a_worker_that_misses_one_of_its_signs_of_life_is_not_shown_as_silent() -> None:
    assert 2 * RECORD_EVERY * MICRO < WORKER_SILENCE_US


def test_a_poll_that_finds_nothing_is_one_statement_and_leases_nothing(
    harness: RunsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChangeNotifier, "start", lambda _: None)  # SQLite's would tell of the worker's own row
    with harness.working(sweep_every=None, queues=["a", "b", "c"]), statements() as sent:
        eventually(lambda: sum(LOOK in each for each in sent) > 1, "a poll")
        sent.clear()
        eventually(lambda: sum(LOOK in each for each in sent) >= 4, "polls")
        others = [each for each in sent if LOOK not in each and "semel_active" in each]
    assert others == []


@pytest.mark.parametrize("delay", [0, 0.3])
def test_a_run_that_nobody_announced_is_found_by_the_next_poll(
    harness: RunsHarness, monkeypatch: pytest.MonkeyPatch, delay: float
) -> None:
    monkeypatch.setattr(ChangeNotifier, "start", lambda _: None)
    with harness.working(sweep_every=None), statements() as sent:
        eventually(lambda: sum(LOOK in each for each in sent) > 1, "a poll")
        run = harness.app.submit("add", {"a": 1}, delay=delay)
        assert harness.app.wait(run.id, timeout=PATIENCE).status == "SUCCEEDED"


def test_a_sweeper_sees_a_lease_that_expired_in_the_turn_after_it(harness: RunsHarness) -> None:
    sweeper, hand = sweeper_of(harness), harness.hand()
    run = harness.timeless.submit("add", {"a": 1})
    assert hand.lease_this(run)
    turns(sweeper, 1)
    assert harness.timeless.get(run.id).status == "RUNNING"
    harness.clock.advance(3600)
    turns(sweeper, 1)
    assert harness.timeless.get(run.id).status == "PENDING"


def test_a_sweeper_shortens_leases_after_the_clock_was_put_back(harness: RunsHarness) -> None:
    sweeper, hand = sweeper_of(harness), harness.hand()
    run = harness.timeless.submit("add", {"a": 1})
    assert hand.lease_this(run)
    harness.clock.advance(-3600)
    turns(sweeper, 1)
    harness.clock.advance(600)
    turns(sweeper, 1)
    assert harness.timeless.get(run.id).status == "PENDING"


def test_a_sweeper_removes_what_expired_and_adds_up_what_ended_once_a_minute(harness: RunsHarness) -> None:
    sweeper, hand = sweeper_of(harness), harness.hand()
    turns(sweeper, 1)
    run = harness.timeless.submit("add", {"a": 1}, idempotency_key="one")
    leased = hand.lease_this(run)
    assert leased is not None
    hand.end(leased)
    harness.clock.advance(400 * 86400)
    left = "SELECT (SELECT count(*) FROM semel_run_counts), (SELECT count(*) FROM semel_keys)"
    turns(sweeper, 2)
    assert tuple(harness.sql(left)[0]) == (1, 1), "it looked less than a minute ago"
    sweeper._cleans_at = 0.0
    turns(sweeper, 1)
    assert tuple(harness.sql(left)[0]) == (0, 0)
