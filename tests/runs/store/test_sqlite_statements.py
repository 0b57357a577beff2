"""SQLite's own statements: what a lease reads, which ends are written, and of what classes values may be."""

from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import Connection, create_engine

from semel.db.dialect import StatementContext
from semel.runs.store import lease, queries, transitions
from semel.runs.store.lease import Leased, LeaseRenewal, LeaseRequest
from semel.runs.store.queries import Filter
from semel.runs.store.transitions import FinishRequest
from semel.runs.types import AttemptResult
from support.databases import LEASE, Databases, TestDatabase


@pytest.fixture
def database(databases: Databases) -> Iterator[TestDatabase]:
    with databases.empty("sqlite") as database:
        yield database


def steps_of(database: TestDatabase, work: Callable[[Connection], int]) -> int:
    """How many steps, in hundreds, SQLite's machine takes for ten runs; what they change is rolled back."""
    steps = 0

    def count() -> None:
        nonlocal steps
        steps += 1

    engine = create_engine(database.url)
    with engine.connect() as conn:
        conn.connection.dbapi_connection.set_progress_handler(count, 100)  # type: ignore[union-attr]
        assert work(conn) == 10
    engine.dispose()
    return steps


def submit_many(database: TestDatabase, numbers: range) -> None:
    database.app.submit_many([{"model": "train", "parameters": {"number": number}} for number in numbers])


def test_a_lease_reads_no_more_runs_than_it_takes_however_many_wait_or_run(database: TestDatabase) -> None:
    def lease_ten(conn: Connection) -> int:
        request = LeaseRequest("worker-1", ("default",), ["train"], 10)
        return len(lease.lease(conn, request, StatementContext(database.clock.us)))

    submit_many(database, range(20))
    few = steps_of(database, lease_ten)
    submit_many(database, range(20, 1000))
    database.lease(500)
    assert steps_of(database, lease_ten) <= few + 1


def test_a_page_of_failed_runs_reads_no_more_than_it_shows_however_many_failed(database: TestDatabase) -> None:
    cursor: str | None = None

    def list_ten(conn: Connection) -> int:
        return len(queries.list_runs(conn, Filter(status=["FAILED"]), 10, cursor).runs)

    def fail(numbers: range) -> None:
        submit_many(database, numbers)
        failed = AttemptResult(kind="fatal", reason="no")
        database.do(transitions.end, [FinishRequest(each.id, each.fence, failed) for each in database.lease(500)])

    fail(range(20))
    few = steps_of(database, list_ten)
    fail(range(20, 500))
    assert steps_of(database, list_ten) <= few + 1
    cursor = database.app.runs(limit=400, status="FAILED").runs[-1].id
    assert steps_of(database, list_ten) <= few + 2, "and so does a later page"


def test_of_two_ends_of_a_run_the_one_whose_fence_holds_is_written(database: TestDatabase) -> None:
    run = database.submit()
    (lost,) = database.lease()
    database.clock.advance(LEASE + 1)
    assert database.lose_expired() == 1
    (heir,) = database.lease()

    def end(leased: Leased, size: int) -> FinishRequest:
        ended = AttemptResult(kind="succeeded", result="1" * size, result_digest="d" * 64, result_size=size)
        return FinishRequest(leased.id, leased.fence, ended)

    over = database.do(transitions.end, [end(heir, 2), end(lost, 1)])
    assert (list(over), database.app.get(run.id).result_size) == ([run.id], 2)
    assert [each.counts["SUCCEEDED"] for each in database.app.summary()] == [1]


@pytest.mark.parametrize("results", [["1", "1", "1"], ["1", "2", "1"], ["2", "1", "1"], ["1", "1", "2"]], ids=str)
def test_runs_that_end_together_keep_their_own_results_whether_or_not_they_are_the_same(
    database: TestDatabase, results: list[str]
) -> None:
    submit_many(database, range(3))
    ended = [AttemptResult(kind="succeeded", result=each, result_digest=each * 64, result_size=1) for each in results]
    leased = database.lease(3)
    database.do(transitions.end, [FinishRequest(x.id, x.fence, y) for x, y in zip(leased, ended, strict=True)])
    digests = [database.app.get(each.id).result_digest for each in leased]
    assert [str(database.app.result(each.id)) for each in leased] == results
    assert digests == [each * 64 for each in results]


class Name(str):
    """Text of a caller's own class, such as a template's."""

    __slots__ = ()

    def __str__(self) -> str:
        return "another text"


class Fraction(float):
    """A number of a caller's own class, such as numpy's."""


@pytest.mark.parametrize("count", [1, 2])
def test_text_and_numbers_of_a_callers_own_class_are_stored_as_what_they_are(
    database: TestDatabase, count: int
) -> None:
    submit_many(database, range(count))
    leased = database.lease(count)
    notes = [f"half\u2028way of {number}" for number in range(count)]
    renewals = [LeaseRenewal(x.id, x.fence, Fraction(0.25), Name(y)) for x, y in zip(leased, notes, strict=True)]
    database.do(lease.renew, renewals)
    found = [database.app.get(each.id) for each in leased]
    assert [(run.progress, run.progress_note) for run in found] == [(0.25, note) for note in notes]
