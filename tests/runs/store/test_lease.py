"""Leases, verb by verb, on a clock that the test sets: which runs are due, whose they are, and what is announced."""

from collections.abc import Iterator

import pytest

from semel._concurrency.sync import run_sync
from semel.runs.store import lease, queries, transitions
from semel.runs.store.lease import Leased, LeaseRenewal, LeaseRequest, LogLineRow, PendingRun
from semel.runs.types import INTERNAL_QUEUE
from semel.runs.worker import fetcher
from support.databases import DATABASES, Databases, TestDatabase, held

MOMENT = 0.000001


@pytest.fixture
def database(databases: Databases) -> Iterator[TestDatabase]:
    """One kind of database: its statements are the other's too."""
    with databases.empty("sqlite") as database:
        yield database


def take(database: TestDatabase, most: int, *queues: str, worker: str = "worker-1") -> list[Leased]:
    """Lease runs that are ready, without waking those that are due."""
    taken: list[Leased] = database.do(lease.lease, LeaseRequest(worker, queues or ("default",), ["train"], most))
    return taken


def ids(found: list[Leased]) -> list[str]:
    return [each.id for each in found]


def test_runs_are_leased_from_the_queues_in_their_order_and_never_more_than_asked_for(database: TestDatabase) -> None:
    second, third, fourth = (database.submit(queue="later") for _ in range(3))
    first = database.submit(queue="sooner")
    assert ids(take(database, 2, "sooner", "later")) == [first.id, second.id]
    assert ids(take(database, 1, "sooner", "later")) == [third.id]
    assert take(database, 3, "sooner") == []
    assert ids(take(database, 3, "sooner", "later")) == [fourth.id]


def test_a_higher_priority_is_leased_first_and_then_what_is_due_first(database: TestDatabase) -> None:
    late, early = database.submit(delay=2), database.submit(delay=1)
    urgent = database.submit(priority=1, delay=3)
    database.clock.advance(3)
    assert [ids(database.lease()) for _ in range(3)] == [[urgent.id], [early.id], [late.id]]


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_lease_that_begins_at_a_place_takes_what_is_before_it_only_where_too_few_are_behind(
    databases: Databases, kind: str
) -> None:
    with databases.empty(kind) as database:
        early, low = database.submit(), database.submit(priority=-1)
        database.clock.advance(1)
        at = (0, database.clock.us)
        middle, late, high = database.submit(), database.submit(), database.submit(priority=1)

        def take_since(most: int) -> list[str]:
            request = LeaseRequest("worker-1", ("default",), ["train"], most, {"default": at})
            return ids(database.do(lease.lease, request))

        assert take_since(1) == [high.id]
        assert take_since(1) == [middle.id]
        assert take_since(2) == [late.id, early.id]
        assert take_since(2) == [low.id]


def test_a_worker_looks_for_what_was_due_before_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next lease begins where the last one did, at its lowest priority."""
    now = 100.0
    monkeypatch.setattr(fetcher.time, "monotonic", lambda: now)
    front = fetcher.Front()
    assert front.since() == {}
    runs = [leased_run("a", 5, 70), leased_run("a", 0, 90), leased_run("a", 0, 80), leased_run("b", 3, 60)]
    front.note(runs, 4)
    assert front.since() == {"a": (0, 80), "b": (3, 60)}
    now += fetcher.LOOK_THROUGH_EVERY + MOMENT
    assert front.since() == {}
    front.note([leased_run("a", 0, 90)], 1)
    assert front.since() == {"a": (0, 90)}
    front.note([], 1)
    assert front.since() == {}


def test_after_a_lease_that_found_too_few_the_next_one_is_a_single_statement() -> None:
    """The first run that comes must not wait for a second look."""
    front = fetcher.Front()
    front.since()
    front.note([leased_run("a", 0, 90)], 2)
    assert front.since() == {}


def leased_run(queue: str, priority: int, due_us: int) -> Leased:
    names = Leased.__struct_fields__
    return Leased(**{**dict.fromkeys(names, ""), "queue": queue, "priority": priority, "due_us": due_us})


def test_a_worker_holds_what_it_leased_until_it_ends(database: TestDatabase) -> None:
    for _ in range(4):
        database.submit()
    (ended, mine), (other,) = take(database, 2), take(database, 1, worker="worker-2")
    database.end(ended)
    assert database.ask(lease.held_by, "worker-1") == {mine.id: mine.fence}
    assert database.ask(lease.held_by, "worker-2") == {other.id: other.fence}


@pytest.mark.parametrize("kind", DATABASES)
def test_a_worker_gets_a_run_as_it_is_after_the_lease(databases: Databases, kind: str) -> None:
    with databases.empty(kind) as database:
        run = database.submit()
        for number in (1, 2):
            (leased,) = database.lease()
            assert (leased.id, leased.fence, leased.attempts, leased.errors) == (run.id, number, number, number - 1)
            seen = database.app.get(run.id)
            assert (seen.fence, seen.attempts, seen.started_us) == (number, number, leased.started_us)
            assert database.end(leased, "retry")
            database.clock.advance(100)


def test_a_heartbeat_and_a_look_learn_of_a_cancellation(database: TestDatabase) -> None:
    database.submit(), database.submit()
    stopped, going = take(database, 2)
    database.app.cancel(stopped.id)
    expected = {stopped.id: True, going.id: False}
    assert database.do(lease.renew, [LeaseRenewal(each.id, each.fence) for each in (stopped, going)]) == expected
    assert database.ask(lease.watch, [(each.id, each.fence) for each in (stopped, going)]) == expected


def test_lines_that_are_stored_twice_are_there_once_and_stay_as_they_were(database: TestDatabase) -> None:
    run = database.submit()
    first = LogLineRow(run.id, 1, 1, 7, "INFO", "with a \0 in it")
    again, third = LogLineRow(run.id, 1, 1, 9, "ERROR", "another"), LogLineRow(run.id, 1, 3, 9, "INFO", "the third")
    for lines in ([first, LogLineRow(run.id, 1, 2, 8, "INFO", "the second")], [again, third]):
        run_sync(database.store.write(lease.log, lines))
    stored = database.ask(queries.logs, run.id, (0, 0), 10)
    assert [(each.line, each.text) for each in stored] == [(1, "with a \\0 in it"), (2, "the second"), (3, "the third")]


# -- delays ----------------------------------------------------------------------------------------------------------


def wake(database: TestDatabase) -> tuple[int, float | None]:
    woken: tuple[int, float | None] = database.do(lease.wake)
    return woken


def test_a_delayed_run_is_woken_in_the_microsecond_in_which_it_is_due(database: TestDatabase) -> None:
    assert wake(database) == (0, None)
    ready, running = database.submit(), database.submit(priority=1)
    assert ids(take(database, 1)) == [running.id]
    assert wake(database) == (0, None), "none of these waits for a time"
    due, later = database.submit(delay=30, priority=1), database.submit(delay=40)
    assert wake(database) == (0, 30.0)
    database.clock.advance(30 - MOMENT)
    assert wake(database) == (0, MOMENT)
    assert ids(take(database, 10)) == [ready.id]
    database.clock.advance(MOMENT)
    assert wake(database) == (1, 0)
    assert ids(take(database, 10)) == [due.id]
    assert wake(database) == (0, 10.0)
    assert database.app.get(later.id).status == "PENDING"


def test_no_more_runs_are_woken_at_once_than_asked_for(database: TestDatabase) -> None:
    late, early = database.submit(delay=2), database.submit(delay=1)
    database.clock.advance(2)
    assert database.do(lease.wake, most=1) == (1, 0)
    assert ids(take(database, 10)) == [early.id]
    assert wake(database) == (1, 0)
    assert ids(take(database, 10)) == [late.id]


def test_a_clock_that_is_put_back_restarts_only_the_waits_that_began_later(database: TestDatabase) -> None:
    whole = database.submit(delay=60)
    database.clock.advance(40)
    restarted, ready = database.submit(delay=60), database.submit()
    database.clock.advance(-30)
    assert wake(database) == (0, 50.0)
    assert database.app.get(whole.id).due_us == whole.due_us
    assert database.app.get(restarted.id).due_us == database.clock.us + 60_000_000
    assert database.app.get(ready.id).due_us == ready.due_us


def test_a_wait_that_began_anew_is_over_when_the_clock_says_so(database: TestDatabase) -> None:
    database.submit(delay=60)
    database.clock.advance(-3600)
    assert wake(database) == (0, 60.0), "and not in an hour"


@pytest.mark.parametrize("kind", DATABASES)
def test_a_worker_is_told_whether_it_can_lease_a_run(databases: Databases, kind: str) -> None:
    with databases.empty(kind) as database:

        def waits(*models: str, queue: str = "default") -> bool:
            waiting: bool = database.do(lease.wake, queues=[queue], models=list(models))[0]
            return waiting

        database.submit(delay=60)
        assert not waits("train"), "it is not due"
        database.submit()
        assert waits("train")
        assert waits("other", "train")
        assert not waits("other")
        assert not waits("train", queue="other")
        for paused in ({"queue": "default"}, {"model": "train"}):
            database.app.pause(**paused)
            assert not waits("train"), paused
            assert database.app.resume(**paused)
        assert waits("train")
        assert len(take(database, 2)) == 1
        assert not waits("train"), "it is leased"


def test_a_run_that_waits_for_its_data_does_so_after_the_clock_was_put_back(database: TestDatabase) -> None:
    run = held(database)
    database.clock.advance(-3600)
    assert wake(database)[0] == 0
    assert database.app.get(run.id).held
    assert database.do(transitions.release, run.id, "data/1") == "default"
    assert ids(take(database, 1)) == [run.id]


# -- announcements -----------------------------------------------------------------------------------------------------


def due(database: TestDatabase, most: int = 10) -> list[PendingRun]:
    """What is to be announced, where a submitter has 30 seconds for it."""
    found: list[PendingRun] = database.ask(lease.due, 30, most, database.store.statement_context)
    return found


def announced(database: TestDatabase) -> list[str]:
    return [each.id for each in due(database)]


def test_a_run_that_its_submitter_announces_is_listed_once_it_has_waited_in_vain(database: TestDatabase) -> None:
    run = database.submit(queue="other")
    assert announced(database) == []
    database.clock.advance(30 - MOMENT)
    assert announced(database) == []
    database.clock.advance(MOMENT)
    assert due(database) == [PendingRun(run.id, "other", 1)]
    assert due(database)[0].step == (run.id, 1)
    assert len(take(database, 1, "other")) == 1
    assert announced(database) == []


def test_a_run_that_became_due_later_is_listed_at_once(database: TestDatabase) -> None:
    delayed, retried = database.submit(delay=10), database.submit()
    (leased,) = database.lease()
    database.end(leased, "retry")
    database.clock.advance(10 - MOMENT)
    assert announced(database) == [retried.id]
    database.clock.advance(MOMENT)
    assert announced(database) == [retried.id, delayed.id]
    assert [each.id for each in due(database, 1)] == [retried.id]


def test_the_services_own_work_is_not_announced(database: TestDatabase) -> None:
    held(database)
    database.clock.advance(3600)
    assert announced(database) == []
    assert [each.status for each in database.app.runs(queue=INTERNAL_QUEUE).runs] == ["PENDING"]


def test_what_is_paused_is_announced_when_it_is_resumed(database: TestDatabase) -> None:
    first, second = database.submit(), database.submit(queue="gpu")
    database.clock.advance(3600)
    database.app.pause(queue="gpu")
    assert announced(database) == [first.id]
    database.app.pause(model="train")
    database.app.resume(queue="gpu")
    assert announced(database) == []
    database.app.resume(model="train")
    assert announced(database) == [first.id, second.id]
