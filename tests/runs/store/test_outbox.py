"""The outbox: which events wait to be published or sent, in which order, and until when."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

from semel._concurrency.sync import run_sync
from semel.runs.store import outbox
from semel.runs.store.outbox import OutboxEvent
from semel.service.webhooks import subscriptions
from support.databases import DATABASES, Databases, TestDatabase, behind
from support.runs_harness import RunsHarness


@pytest.fixture
def database(databases: Databases) -> Iterator[TestDatabase]:
    """One kind of database: its statements are the other's too."""
    with databases.empty("sqlite") as database:
        yield database


def live(database: TestDatabase) -> None:
    """Submit a run, lease it, and let it succeed, a second after each other."""
    run = database.submit(7, tenant="acme")
    database.clock.advance(1)
    (taken,) = database.lease()
    database.clock.advance(1)
    assert database.end(taken)
    assert taken.id == run.id
    database.clock.advance(1)


def subscribe(database: TestDatabase, *names: str) -> str:
    made: subscriptions.Subscription = database.do(subscriptions.create, "", "https://example.org/hook", names)
    return made.id


def steps(events: list[OutboxEvent]) -> list[str]:
    return [each.step for each in events]


def test_events_are_published_oldest_first_and_only_those_that_were_marked_are_done(database: TestDatabase) -> None:
    database.app = database.open_app(publish=lambda event: None)
    began = database.clock.us
    live(database)
    first, *rest = database.ask(outbox.unpublished)
    run = database.app.runs(tenant="acme").runs[0]
    assert first == OutboxEvent(
        id=f"{run.id}/1",
        name="RunCreated",
        run_id=run.id,
        model="train",
        tenant="acme",
        user="7",
        status="PENDING",
        step="created",
        at_us=began,
        fence=0,
        note=None,
    )
    assert [(each.name, each.version, each.fence) for each in rest] == [("RunStarted", 2, 1), ("RunCompleted", 3, 1)]
    live(database)
    run_sync(database.store.write(outbox.published, [first, rest[1]]))
    assert steps(database.ask(outbox.unpublished)) == ["leased", "created", "leased", "succeeded"]
    assert steps(database.ask(outbox.unpublished, 2)) == ["leased", "created"]
    run_sync(database.store.write(outbox.published, []))
    assert len(database.ask(outbox.unpublished)) == 4


def test_a_step_without_a_name_of_its_own_is_a_change(database: TestDatabase) -> None:
    database.app = database.open_app(publish=lambda event: None)
    database.submit()
    (taken,) = database.lease()
    database.end(taken, "retry", reason="no luck")
    changed = database.ask(outbox.unpublished)[-1]
    assert (changed.name, changed.step, changed.status, changed.note) == ("RunChanged", "retried", "PENDING", "no luck")


def test_an_app_that_publishes_nothing_leaves_nothing_to_publish(database: TestDatabase) -> None:
    live(database)
    assert database.ask(outbox.unpublished) == []


def test_an_event_waits_to_be_sent_if_a_subscription_may_want_it(database: TestDatabase) -> None:
    def unsent() -> list[str]:
        """The steps of another life that wait to be sent; they are then marked as sent."""
        live(database)
        events = database.ask(outbox.unsent)
        run_sync(database.store.write(outbox.sent, events))
        assert database.ask(outbox.unsent) == []
        return steps(events)

    assert unsent() == []
    some = subscribe(database, "RunCompleted")
    assert unsent() == ["succeeded"]
    all_ = subscribe(database, "RunStarted")
    assert unsent() == ["created", "leased", "succeeded"]
    database.do(subscriptions.disable, all_)
    assert unsent() == ["succeeded"]
    database.do(subscriptions.disable, some)
    assert unsent() == []


def test_only_the_events_that_were_marked_are_sent(database: TestDatabase) -> None:
    subscribe(database)
    live(database)
    live(database)
    events = database.ask(outbox.unsent)
    run_sync(database.store.write(outbox.sent, [events[0], events[4]]))
    assert database.ask(outbox.unsent) == [events[1], events[2], events[3], events[5]]
    assert database.ask(outbox.unsent, 1) == [events[1]]


@pytest.mark.parametrize("kind", DATABASES)
@pytest.mark.parametrize("sent_first", [True, False])
def test_an_event_is_kept_until_it_is_published_and_sent(databases: Databases, kind: str, sent_first: bool) -> None:
    with databases.empty(kind) as database:
        database.app = database.open_app(publish=lambda event: None)
        subscribe(database, "RunCreated")
        database.submit()
        events = database.ask(outbox.unpublished)
        assert steps(events) == ["created"]
        run_sync(database.store.write(outbox.sent if sent_first else outbox.published, events))
        assert database.ask(outbox.unpublished) == (events if sent_first else [])
        assert database.count("semel_outbox", "unsent") == (0 if sent_first else 1)
        run_sync(database.store.write(outbox.published if sent_first else outbox.sent, events))
        assert database.count("semel_outbox") == 0


def test_a_turn_publishes_a_hundred_events_and_sends_twice_as_many(database: TestDatabase) -> None:
    database.app = database.open_app(publish=lambda event: None)
    subscribe(database)
    database.app.submit_many([{"model": "train", "dedupe": False}] * 201)
    assert (len(database.ask(outbox.unpublished)), len(database.ask(outbox.unsent))) == (100, 200)


def test_two_processes_send_no_event_together_and_neither_waits(databases: Databases, tmp_path: Path) -> None:
    with databases.empty("postgres") as database, RunsHarness("postgres", database.url, tmp_path) as harness:
        subscribe(database)
        database.submit()
        with harness.engine.begin() as first, harness.engine.begin() as second:
            second.execute(text("SET LOCAL lock_timeout = '5s'"))
            assert steps(outbox.unsent(first)) == ["created"]
            assert outbox.unsent(second) == []


def test_a_step_that_is_published_and_sent_at_once_is_kept_no_longer(databases: Databases) -> None:
    """Each of both finds that the other is still to come, and then waits for its row."""
    with databases.empty("postgres") as database:
        database.app = database.open_app(publish=lambda event: None)
        subscribe(database, "RunCreated")
        database.submit()
        events = database.ask(outbox.unpublished)
        behind(database, lambda conn: outbox.sent(conn, events), lambda conn: outbox.published(conn, events))
        assert database.count("semel_outbox") == 0
