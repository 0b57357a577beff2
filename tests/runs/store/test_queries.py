"""What is read of runs, on a clock that the test sets: lists, logs, sums, the backlog, and why a run waits."""

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from msgspec import structs
from sqlalchemy import Connection, event

from semel import InvalidRequest, Run
from semel._concurrency.sync import run_sync
from semel.runs import submission
from semel.runs.store import lease, maintenance, partial_ids, queries, transitions
from semel.runs.store.lease import LeaseRenewal, LogLineRow
from semel.runs.store.queries import Backlog, Filter, RunVersion
from semel.runs.submission import SubmitOptions
from semel.runs.types import INTERNAL_QUEUE, EndKind, Waiting, new_id
from support.databases import DATABASES, MISCOUNTED, Databases, TestDatabase, held

MOMENT = 0.000001


@pytest.fixture
def database(databases: Databases) -> Iterator[TestDatabase]:
    """One kind of database: its statements are the other's too."""
    with databases.empty("sqlite") as database:
        yield database


def submit_internal(database: TestDatabase, user: str) -> str:
    """A run in the service's own queue, its own work unless there is a user."""
    options = SubmitOptions(queue=INTERNAL_QUEUE, user=user, dedupe=False)
    submission = database.app._engine._builder.submission("train", {}, options, internal=True)
    return run_sync(database.store.submit(submission)).id  # type: ignore[union-attr]


def log(database: TestDatabase, run: Run, *places: tuple[int, int]) -> None:
    """Store a line of the run at each (fence, line)."""
    lines = [LogLineRow(run.id, fence, line, 0, "INFO", f"{fence}.{line}") for fence, line in places]
    run_sync(database.store.write(lease.log, lines))


# -- runs --------------------------------------------------------------------------------------------------------------


def test_the_services_own_work_is_listed_only_if_its_queue_is_asked_for(database: TestDatabase) -> None:
    own, users = submit_internal(database, ""), submit_internal(database, "7")
    run = database.submit("")
    assert [each.id for each in database.app.runs().runs] == [run.id, users]
    assert [each.id for each in database.app.runs(queue=INTERNAL_QUEUE).runs] == [users, own]
    assert [each.id for each in database.app.runs(user="").runs] == [run.id]


MANY = """
INSERT INTO semel_runs (id, created_us, max_attempts, max_lost, tenant, user_id, model, queue, payload_hash, parameters)
SELECT (lpad(to_hex(n), 12, '0') || '70008000000000000000')::uuid, n, 3, 3, '', '',
  CASE n % 20000 WHEN 1 THEN 'rare' ELSE 'train' END, 'default', sha256(n::text::bytea), '{}'
FROM generate_series(1, 100000) AS n;
INSERT INTO semel_attempts (run_id, fence, ended_us, version, tenant, status, began_us)
SELECT id, 1, created_us, 3, '', 'SUCCEEDED', created_us FROM semel_runs;
INSERT INTO semel_run_counts (tenant, model, status, count, spent_us)
VALUES ('', 'train', 'SUCCEEDED', 99995, 0), ('', 'rare', 'SUCCEEDED', 5, 0)"""


@pytest.mark.parametrize(
    "wanted",
    [
        Filter(model="rare"),
        Filter(model="rare", status=["SUCCEEDED", "PENDING"]),
        Filter(queue="another"),
        Filter(tenant="another"),
    ],
)
def test_what_few_runs_have_is_found_without_reading_the_others(databases: Databases, wanted: Filter) -> None:
    """Names are in the statements' text: a plan that is made once, for any model, would read all runs."""

    def plans(conn: Connection) -> tuple[int, list[str]]:
        sent: list[tuple[str, Any]] = []
        event.listen(conn, "before_cursor_execute", lambda *about: sent.append((about[2], about[3])))
        found = queries.list_runs(conn, wanted, 50, None)
        asked = [(text, values) for text, values in sent if "FROM semel_runs \nWHERE" in text and "OFFSET" not in text]
        assert not [values for _, values in asked if {"rare", "another"} & {*map(str, values.values())}]
        rows = [row[0] for text, values in asked for row in conn.exec_driver_sql(f"EXPLAIN {text}", values)]
        return len(found.runs), [row for row in rows if "Scan" in row and "semel_runs_first" in row]

    with databases.empty("postgres") as database, psycopg.connect(database.url, autocommit=True) as client:
        client.execute(MANY)
        client.execute("VACUUM ANALYZE semel_runs, semel_attempts")
        count, scans = database.ask(plans)
    assert count == (5 if wanted.model else 0)
    searches = [row for row in scans if "semel_runs_first_id_tenant_model_queue_idx" in row]
    assert bool(searches) != bool(wanted.tenant), "the sums tell that a tenant has no runs"
    assert not [row for row in scans if "Seq Scan" in row]


@pytest.mark.parametrize("kind", DATABASES)
def test_what_failed_of_a_user_is_listed_without_reading_any_other_run(databases: Databases, kind: str) -> None:
    def plan(conn: Connection) -> str:
        sent: list[tuple[str, Any]] = []
        event.listen(conn, "before_cursor_execute", lambda *about: sent.append((about[2], about[3])))
        assert queries.list_runs(conn, Filter(user="ann", status=["FAILED"]), 50, None).runs == []
        ((asked, values),) = [(text, values) for text, values in sent if "semel_unsuccessful" in text]
        explained = conn.exec_driver_sql(f"EXPLAIN {'QUERY PLAN ' * (kind == 'sqlite')}{asked}", values)
        return "\n".join(str(row[-1]) for row in explained)

    with databases.empty(kind) as database:
        found = database.ask(plan)
    assert "semel_unsuccessful" in found
    assert not any(word in found for word in ("semel_runs", "semel_attempts", "semel_active", "Sort", "TEMP B-TREE"))


def test_a_run_is_found_under_its_own_tenant_or_any(database: TestDatabase) -> None:
    run, other = database.submit(tenant="acme"), database.submit()
    for tenant, found in ((None, {run.id, other.id}), ("acme", {run.id}), ("", {other.id}), ("b", set())):
        assert set(database.ask(queries.get, [run.id, other.id], tenant)) == found
        for each in (run, other):
            kept = database.ask(queries.result, each.id, tenant)
            assert (kept is not None) == (each.id in found)


@pytest.mark.parametrize("kind", DATABASES)
def test_runs_are_found_by_the_beginning_or_end_of_their_ids(
    databases: Databases, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partial_ids, "WINDOW", 2)
    with databases.empty(kind) as database:
        made = [database.submit(user=user, tenant=tenant) for tenant in ("", "acme") for user in ("1", "2", "1")]
        for patience in (0.0, 60.0):  # a page for each window, and one for all
            monkeypatch.setattr(partial_ids, "SCAN_SECONDS", patience)
            for run in made:
                for part in (run.id[-12:], run.id[-6:], run.id[:24], run.id):
                    assert _found(database, id_part=part, tenant=run.tenant) == [run.id]
                    assert _found(database, id_part=part, tenant=run.tenant, user=run.user, status="PENDING") == [
                        run.id
                    ]
                    assert _found(database, id_part=part, tenant=run.tenant, user="3") == []
                    assert _found(database, id_part=part, tenant=run.tenant, status="FAILED") == []
                    assert _found(database, id_part=part, tenant="other") == []
        everyones = [run.id for run in made[2::-1]]
        assert _found(database, id_part=made[0].id[:6], limit=2) == everyones, "a beginning that all have"
        pages = database.app.runs(id_part="0123456789ab", tenant="other")
        assert pages.next is None or pages.next.endswith("-0000-0000-000000000000"), "a run of others was disclosed"
    for wrong in ("", "12345", "xyzxyz", "a-b-c-d-e", "0" * 33):
        with pytest.raises(InvalidRequest, match="part of an id"):
            database.app.runs(id_part=wrong)


@pytest.mark.parametrize("kind", DATABASES)
def test_each_run_whose_id_has_the_digits_is_on_one_page(
    databases: Databases, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission, "new_id", lambda: f"{new_id()[:-6]}abcdef")
    with databases.empty(kind) as database:
        made = [database.submit().id for _ in range(5)][::-1]
        for part in (made[0][:6], "abcdef"):
            for limit in (1, 2, 4, 5, 6):
                assert _found(database, id_part=part, limit=limit) == made
        for limit, more in ((4, True), (5, False), (6, False)):
            assert (database.app.runs(id_part=made[0][:6], limit=limit).next is not None) == more


@pytest.mark.parametrize("kind", DATABASES)
def test_a_search_for_an_id_does_not_tell_whether_others_have_it(
    databases: Databases, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partial_ids, "WINDOW", 1)
    monkeypatch.setattr(partial_ids, "SCAN_SECONDS", 0.0)
    with databases.empty(kind) as database:
        made = [database.submit(user="1", tenant="acme") for _ in range(3)]
        theirs = database.app.runs(id_part=made[-1].id[-12:], tenant="other")
        assert theirs == database.app.runs(id_part="0123456789ab", tenant="other")


@pytest.mark.parametrize("kind", DATABASES)
def test_runs_of_a_model_are_listed_although_its_sums_are_too_low(databases: Databases, kind: str) -> None:
    """As after somebody restored some tables, and not the others."""
    with databases.empty(kind) as database:
        runs = [database.submit() for _ in range(2)]
        database.write(
            "INSERT INTO semel_run_counts (tenant, model, facet, status, count, spent_us) "
            "VALUES ('', 'train', NULL, 'FAILED', -5, 0)"
        )
        assert _found(database, model="train", limit=1) == [run.id for run in reversed(runs)]


def _found(database: TestDatabase, **wanted: Any) -> list[str]:
    """The ids on all pages."""
    found, page = [], database.app.runs(**wanted)
    while True:
        found += [run.id for run in page.runs]
        if page.next is None:
            return found
        page = database.app.runs(**wanted, cursor=page.next)


def test_a_result_is_read_with_its_run(database: TestDatabase) -> None:
    run, other = database.submit(), database.submit()
    for each in database.lease(2):
        database.end(each, result=f'"{each.id}"')
    assert database.ask(queries.result, run.id, None) == (database.app.get(run.id), f'"{run.id}"', None)
    assert database.ask(queries.result, other.id, "")[1] == f'"{other.id}"'


def test_a_page_that_is_bounded_in_bytes_has_no_more_runs_than_asked_for(database: TestDatabase) -> None:
    made = [run.id for run in database.app.submit_many([{"model": "train", "dedupe": False}] * 40)][::-1]
    for limit in (1, 15, 16, 17, 20, 39):
        page = database.app.runs(limit=limit, max_bytes=1_000_000)
        assert ([run.id for run in page.runs], page.next) == (made[:limit], made[limit - 1])
    twenty = database.app.runs(limit=20, max_bytes=35_000)
    assert ([run.id for run in twenty.runs], twenty.next) == (made[:20], made[19])
    assert 20 < len(database.app.runs(limit=40, max_bytes=35_000).runs) < 35


# -- versions and logs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("wanted", "left"), [(Filter(status=["PENDING"]), [2, 1]), (Filter(worker="worker-1"), [0])])
def test_a_run_whose_state_changes_while_it_is_listed_is_left_out(
    database: TestDatabase, wanted: Filter, left: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its id is found first, and then the run is read: between the two it may begin or end."""
    ids = [database.app.submit("train", {"number": number}).id for number in range(3)]
    database.lease()
    monkeypatch.setattr(queries, "_find", lambda *_: ids[::-1])
    assert [run.id for run in database.ask(queries.list_runs, wanted, 3, None).runs] == [ids[place] for place in left]


def test_versions_are_those_of_the_runs_with_the_last_line_of_each_log(databases: Databases) -> None:
    with databases.empty("postgres") as database:
        silent, logged, other = (database.submit() for _ in range(3))
        log(database, logged, (1, 1), (1, 7), (2, 1), (2, 3))
        log(database, other, (5, 5))
        (taken,) = database.lease()
        assert taken.id == silent.id
        database.do(lease.renew, [LeaseRenewal(taken.id, taken.fence, 0.5, "half")])
        runs = {run.id: database.app.get(run.id) for run in (silent, logged)}
        assert database.ask(queries.versions, [silent.id, logged.id]) == {
            silent.id: (RunVersion.of(runs[silent.id]), (0, 0)),
            logged.id: (RunVersion.of(runs[logged.id]), (2, 3)),
        }
        assert RunVersion.of(runs[silent.id]) == RunVersion(
            2, "RUNNING", database.clock.us + 60_000_000, database.clock.us, None, 0.5, "half"
        )


def test_a_log_is_read_on_from_where_one_was(database: TestDatabase) -> None:
    run, other = database.submit(), database.submit()
    log(database, run, (1, 1), (1, 2), (2, 1), (3, 1))
    log(database, other, (1, 3))

    def after(fence: int, line: int, limit: int = 10) -> list[str]:
        return [each.text for each in database.ask(queries.logs, run.id, (fence, line), limit)]

    assert after(0, 0) == ["1.1", "1.2", "2.1", "3.1"]
    assert after(0, 0, 2) == ["1.1", "1.2"]
    assert after(1, 1) == ["1.2", "2.1", "3.1"]
    assert after(2, 0) == ["2.1", "3.1"]
    assert after(3, 1) == []


# -- sums --------------------------------------------------------------------------------------------------------------


def test_a_summary_counts_each_status_and_means_the_seconds_of_those_that_succeeded(database: TestDatabase) -> None:
    for number, user in enumerate((1, 1, 1, 1, 2)):
        database.app.model("grouped", isolation="thread", summary="number")(_grouped) if not number else None
        database.app.submit("grouped", {"number": number % 2}, user=user, dedupe=False)
    database.submit("", tenant="acme")
    submit_internal(database, "")
    taken = [database.do(lease.lease_these, "w", [run.id])[0] for run in database.app.runs(model="grouped").runs[::-1]]
    for each in taken[:3]:
        database.clock.advance(10)
        database.end(each, "succeeded" if each is not taken[2] else "fatal")
    (found,) = database.app.summary()
    assert (found.model, found.group, found.counts) == ("grouped", None, {"SUCCEEDED": 2, "FAILED": 1, "RUNNING": 2})
    assert found.mean_seconds == 15
    even, odd = database.app.summary(grouped=True)
    assert (even.group, even.counts, even.mean_seconds) == ("0", {"SUCCEEDED": 1, "FAILED": 1, "RUNNING": 1}, 10)
    assert (odd.group, odd.counts, odd.mean_seconds) == ("1", {"SUCCEEDED": 1, "RUNNING": 1}, 20)
    assert [each.counts for each in database.app.summary(user=2)] == [{"RUNNING": 1}]
    assert [each.mean_seconds for each in database.app.summary(user=1)] == [15]
    assert [each.model for each in database.app.summary(tenant="acme")] == ["train"]


def _grouped(number: int) -> None: ...


@pytest.mark.parametrize("kind", DATABASES)
def test_the_counts_of_a_summary_are_those_of_the_runs_however_they_end(databases: Databases, kind: str) -> None:
    """Counted when they end, summed by the sweeper, and counted no longer when they are removed."""
    with databases.empty(kind) as database:
        database.app.model("grouped", isolation="thread", summary="number")(_grouped)
        ends: tuple[EndKind, ...] = ("succeeded", "fatal", "cancelled", "retry", "lost", "snooze")
        for turn, kinds in enumerate((ends, ends[:2])):
            for number, how in enumerate(kinds):
                run = database.app.submit("grouped", {"number": number % 2}, user=number % 3 or "", dedupe=False)
                (leased,) = database.do(lease.lease_these, "w", [run.id])
                database.clock.advance(7)
                database.end(leased, how)
            waits = database.app.submit("grouped", {"number": 0}, dedupe=False)
            database.app.cancel(waits.id)
            for user in ("", "ann"):  # the service's own work is not counted, that for a user is
                database.do(transitions.cancel, [submit_internal(database, user)], "no need")
            assert database.rows(MISCOUNTED) == []
            assert database.app.summary()[0].counts["SUCCEEDED"] == turn + 1
            database.do(maintenance.add_up)
            database.do(maintenance.add_up)
            assert database.rows(MISCOUNTED) == []
            assert database.app.summary()[0].mean_seconds == 7
        assert database.count("semel_run_counts") == 0
        database.clock.advance(86400)
        assert database.app.purge(3600) == 11
        assert database.rows(MISCOUNTED) == []
        (left,) = database.app.summary()
        assert left.counts == {"PENDING": 3}
        database.do(maintenance.add_up)
        assert database.rows(MISCOUNTED) == []
        assert database.app.runs(model="unheard-of").runs == []
        assert len(database.app.runs(model="grouped").runs) == 3


def test_the_backlog_counts_what_users_wait_for_and_how_long_the_oldest_has_been_due(database: TestDatabase) -> None:
    app = database.app
    assert app.backlog() == Backlog(0, 0, 0.0, 0)
    app.model("slow", isolation="thread", stall_after=5)(lambda: None)
    stalling = app.submit("slow")
    submit_internal(database, "")
    database.clock.advance(1)
    database.submit()
    (taken,) = database.do(lease.lease_these, "w", [stalling.id])
    database.clock.advance(2)
    submit_internal(database, "7")
    database.submit(delay=100)
    assert app.backlog() == Backlog(3, 1, 2.0, 0)
    database.clock.advance(3)
    database.do(lease.renew, [LeaseRenewal(taken.id, taken.fence)])
    assert app.backlog() == Backlog(3, 1, 5.0, 1)
    database.clock.advance(-1000)
    assert app.backlog() == Backlog(3, 1, 0.0, 1)


# -- why a run waits ---------------------------------------------------------------------------------------------------


def waiting(database: TestDatabase, run: Run) -> Waiting:
    found = database.app.waiting(run.id)
    assert found is not None
    return found


def test_a_run_whose_data_is_uploaded_says_how_far_that_is(database: TestDatabase) -> None:
    run = held(database)
    held(database)
    since = database.clock.us
    database.clock.advance(5)
    assert waiting(database, run) == Waiting(reason="its data is being uploaded", since_us=since, place=None)
    database.write("UPDATE semel_jobs SET data_bytes = 1000")
    assert waiting(database, run).reason == "its data is being uploaded"
    database.write("UPDATE semel_jobs SET data_total = 2500")
    assert waiting(database, run).reason == "its data is being uploaded: 1,000 of 2,500 bytes"
    assert database.do(transitions.release, run.id, "data/1") == "default"
    assert waiting(database, run).place == 1


def test_a_delayed_run_waits_for_its_time_and_then_for_a_worker(database: TestDatabase) -> None:
    run = database.submit(delay=10)
    assert waiting(database, run) == Waiting(
        reason="scheduled: it is due in 10 s", since_us=run.created_us, place=None, due_us=run.due_us
    )
    database.clock.advance(10 - MOMENT)
    assert waiting(database, run).place is None
    database.clock.advance(MOMENT)
    nobody = "no live worker serves the queue 'default'"
    assert waiting(database, run) == Waiting(reason=nobody, since_us=run.created_us, place=1)
    assert database.app.waiting(database.submit().id) is not None
    (taken,) = database.lease()
    assert database.app.waiting(taken.id) is None
    assert (
        database.ask(queries.waiting, "01900000-0000-7000-8000-000000000000", database.store.statement_context) is None
    )


def test_places_follow_priority_then_the_time_then_the_id_among_what_is_ready_in_the_queue(
    database: TestDatabase,
) -> None:
    app = database.app
    first, second = (app.submit("train", dedupe=False) for _ in range(2))
    low = app.submit("train", dedupe=False, priority=-1)
    database.clock.advance(1)
    third, urgent = app.submit("train", dedupe=False), app.submit("train", dedupe=False, priority=1)
    app.submit("train", dedupe=False, queue="other", priority=5)
    app.submit("train", dedupe=False, delay=1, priority=5)
    app.cancel(app.submit("train", dedupe=False, priority=5).id)
    assert [waiting(database, each).place for each in (urgent, first, second, third, low)] == [1, 2, 3, 4, 5]
    context = database.store.statement_context
    unplaced = database.ask(queries.waiting, low.id, context, False)
    assert unplaced == structs.replace(waiting(database, low), place=None)
    database.see_worker("one", models={"train": "thread"}, slots={"thread": 1})
    assert database.ask(queries.waiting, low.id, context, False).reason == "4 runs are ahead"


@pytest.mark.parametrize(
    ("worker", "reason"),
    [
        ({"queues": ["other"]}, "no live worker serves the queue 'default'"),
        ({"models": {}}, "no live worker of the queue 'default' knows the model 'train'"),
        ({"slots": {"thread": 0}}, "the live workers of the queue 'default' have no slots for the model 'train'"),
        ({"draining": True}, "the live workers of the queue 'default' have no slots for the model 'train'"),
    ],
    ids=["queue", "model", "slots", "draining"],
)
def test_a_worker_that_cannot_take_the_run_is_told(database: TestDatabase, worker: dict[str, Any], reason: str) -> None:
    run = database.submit()
    database.see_worker("one", **worker)
    found = waiting(database, run)
    assert (found.reason.removesuffix(", or are stopping"), found.place, found.workers) == (reason, 1, 0)


def test_free_slots_decide_whether_a_run_is_next(database: TestDatabase) -> None:
    busy, first, second, third = (database.submit() for _ in range(4))
    (taken,) = database.lease()
    assert taken.id == busy.id
    database.see_worker("worker-1", models={"train": "thread", "other": "loop"}, slots={"thread": 2, "loop": 1})
    reasons = [waiting(database, each).reason for each in (first, second, third)]
    assert reasons == ["it is next", "1 run is ahead", "2 runs are ahead"]
    assert waiting(database, first).workers == 1
    assert [each.id for each in database.lease()] == [first.id]
    assert waiting(database, second).reason == "all slots are busy (2 on 1 worker); it is next"
    assert waiting(database, third).reason == "all slots are busy (2 on 1 worker); 1 run is ahead"
    database.see_worker("worker-2", slots={"thread": 1})
    assert (waiting(database, second).reason, waiting(database, second).workers) == ("it is next", 2)


def test_a_worker_is_dead_45_seconds_after_it_was_seen(database: TestDatabase) -> None:
    run = database.submit()
    database.see_worker("one")
    database.clock.advance(45 - MOMENT)
    assert waiting(database, run).reason == "it is next"
    database.clock.advance(MOMENT)
    assert waiting(database, run).reason == "no live worker serves the queue 'default'"
    assert [each.alive for each in database.app.workers()] == [False]


def test_workers_are_listed_with_what_they_hold(database: TestDatabase) -> None:
    for _ in range(3):
        database.submit()
    ended, *_ = database.lease(3)
    database.end(ended)
    database.submit()
    database.see_worker("worker-2")
    database.see_worker("worker-1")
    assert [(each.name, each.holds) for each in database.app.workers()] == [
        ("worker-1", {"train": 2}),
        ("worker-2", {}),
    ]
