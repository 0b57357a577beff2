"""How long runs took, in buckets: by SQL, by hour, and percentiles of them."""

from typing import Any

import pytest
from sqlalchemy import Connection, text

from semel.runs.store import durations, lease, maintenance, queries
from semel.runs.types import EndKind
from support.databases import DATABASES, Databases

HOUR_US = 3_600_000_000


@pytest.mark.parametrize("kind", DATABASES)
def test_both_databases_write_a_duration_as_the_character_of_its_bucket(databases: Databases, kind: str) -> None:
    expected: dict[int, int | None] = {-1: None, 0: 0, 999: 0, 10**18: len(durations.CHARACTERS) - 1}
    for bucket in range(1, len(durations.CHARACTERS)):
        low, high = (round(seconds * 1_000_000) for seconds in durations.bounds(bucket))
        expected |= {low: bucket, high - 1: bucket}
    asked = " UNION ALL ".join(f"SELECT {us}, {durations.in_sql(f'CAST({us} AS bigint)')}" for us in expected)
    with databases.empty(kind) as database:
        found = database.do(_read, asked)
    assert {us: None if each is None else durations.CHARACTERS.index(each) for us, each in found} == expected
    assert len(set(durations.CHARACTERS)) == len(durations.CHARACTERS)


def _read(conn: Connection, statement: str, _: Any) -> list[Any]:
    return [tuple(row) for row in conn.execute(text(statement))]


def test_a_percentile_is_in_the_bucket_of_its_value() -> None:
    counts = dict.fromkeys(range(1, 10), 10)  # ten runs of 1 ms to 2 ms, ten of 2 ms to 3 ms, ...
    assert durations.percentile({}, 0.5) is None
    assert durations.percentile(counts, 0.5) == pytest.approx(0.0055)
    assert durations.percentile(counts, 0.95) == pytest.approx(0.00955)
    assert durations.percentile(counts, 1.0) == pytest.approx(0.01)
    assert durations.percentile({19: 1}, 0.5) == pytest.approx(0.15), "in the middle of 100 ms to 200 ms"


@pytest.mark.parametrize("kind", DATABASES)
def test_runs_are_counted_in_the_hour_in_which_they_were_added_up_and_stay_so_when_they_are_removed(
    databases: Databases, kind: str
) -> None:
    ends: tuple[EndKind, ...] = ("succeeded", "fatal", "cancelled", "retry", "succeeded")
    with databases.empty(kind) as database:
        for turn in range(2):
            for seconds, how in enumerate(ends, 3):
                run = database.app.submit("train", {}, dedupe=False)
                (leased,) = database.do(lease.lease_these, "w", [run.id])
                database.clock.advance(seconds)
                database.end(leased, how)
            database.do(maintenance.add_up)
            database.app.cancel(database.app.submit("train", {}, dedupe=False).id)
            database.do(maintenance.add_up)
            database.do(maintenance.add_up)
            if not turn:
                database.clock.advance(3600)
        found = run_hours(database)
        hours = sorted({row[0] for row in found})
        assert [hour % HOUR_US for hour in hours] == [0, 0]
        assert hours[1] - hours[0] == HOUR_US
        for hour in hours:
            here = {(status, bucket): count for each, status, bucket, count in found if each == hour}
            in_seconds = {durations.bounds(bucket)[0] for status, bucket in here if status != "CANCELLED"}
            assert in_seconds == {3.0, 4.0, 7.0}
            assert sum(count for (status, _), count in here.items() if status == "SUCCEEDED") == 2
            assert sum(count for (status, _), count in here.items() if status == "FAILED") == 1
            assert here["CANCELLED", maintenance.UNKNOWN] == 2
        database.clock.advance(86400)
        assert database.app.purge(3600) == 10
        database.do(maintenance.add_up)
        assert run_hours(database) == found
        database.clock.advance(34 * 86400 + 7200)
        database.do(maintenance.remove_expired)
        assert run_hours(database) == []


def run_hours(database: Any) -> list[tuple[int, str, int, int]]:
    found: list[tuple[int, str, int, int]] = database.do(_hours)
    return sorted(found)


def _hours(conn: Connection, _: Any) -> list[tuple[int, str, int, int]]:
    return queries.model_hours(conn, "", "train", 0)
