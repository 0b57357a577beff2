"""Runs are found again by filters, page by page; retried once however often asked; purged with all they left."""

from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from itertools import product
from pathlib import Path

import pytest

from semel import App, IllegalTransition, InvalidRequest, RunNotFound
from semel._concurrency.sync import run_sync
from semel.runs.store import queries
from semel.runs.store.queries import Filter
from semel.runs.types import Run
from semel.testing import FakeClock


def work(number: int = 0, *, fails: bool = False) -> str:
    if fails:
        raise ValueError("as told")
    return "x" * 20_000


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest) -> str:
    url: str = request.getfixturevalue(f"migrated_{request.param}_url")
    return url


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def app(url: str, clock: FakeClock, tmp_path: Path) -> Iterator[App]:
    app = App(url, clock=clock, artifacts=tmp_path / "artifacts")
    app.model("work", isolation="thread", fatal=(ValueError,))(work)
    app.model("other", isolation="thread")(work)
    yield app
    app.close()


def ids(runs: list[Run]) -> list[str]:
    return [run.id for run in runs]


def test_pages_follow_each_other_without_gap_or_repetition(app: App) -> None:
    made = [app.submit("work", {"number": number}).id for number in range(25)]
    found, cursor = [], None
    while True:
        page = app.runs(limit=7, cursor=cursor)
        found += ids(page.runs)
        app.submit("work", {"number": 1000 + len(found)})  # what is new does not move what is old
        cursor = page.next
        if cursor is None:
            break
    assert found == made[::-1]
    with pytest.raises(InvalidRequest, match=r"cursor must be the page\.next of an earlier page"):
        app.runs(cursor="7")


def test_a_list_is_the_same_whichever_way_its_runs_are_found(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked at one by one, searched for in ranges of ids, or read from an index."""
    made = []
    for number in range(60):
        model = "other" if number in (3, 20, 21, 57) else "work"
        queue, tenant = ("slow" if number % 17 == 0 else "default"), ("acme" if number % 13 == 0 else "")
        made.append(app.submit(model, {"number": number}, queue=queue, tenant=tenant, dedupe=False))
        if number in (3, 5, 57):
            made[-1] = app.cancel(made[-1].id, tenant=tenant)
    filters = product(
        (None, "work", "other"), (None, "slow"), ("", "acme"), (None, "CANCELLED", ["PENDING", "CANCELLED"])
    )
    ways = product((0, 3, 1000), (2, 7, 2000))
    for number, (asked, (few, first_look)) in enumerate(product(filters, ways)):
        monkeypatch.setattr(queries, "_FEW", few)
        monkeypatch.setattr(queries, "_FIRST_LOOK", first_look)
        model, queue, tenant, status = asked
        limit = (4, 100, 1)[(number + number // 9) % 3]  # with each filter each of them three times
        found, cursor = [], None
        while True:
            page = app.runs(model=model, queue=queue, tenant=tenant, status=status, limit=limit, cursor=cursor)
            found += ids(page.runs)
            cursor = page.next
            if cursor is None:
                break
        assert found == [
            run.id
            for run in reversed(made)
            if run.model == (model or run.model)
            and run.queue == (queue or run.queue)
            and run.tenant == tenant
            and run.status in (status or run.status)
        ], (asked, few, first_look, limit)


def test_what_did_not_succeed_is_listed_for_each_user(app: App, clock: FakeClock) -> None:
    """Whatever else is asked, a page at a time; what is removed is listed no more."""
    fails = app.submit("work", {"fails": True}, user="ann")
    with app.working(processes=0):
        made = [app.wait(fails.id, timeout=60), app.wait(app.submit("work", {"number": 1}, user="ann").id, timeout=60)]
    for number in range(24):
        clock.advance(1)
        model, queue = ("work", "other")[number % 2], ("default", "slow")[number % 3 == 0]
        user, tenant = ("ann", "bob", "")[number % 5 % 3], ("", "acme")[number % 4 == 0]
        made.append(app.submit(model, {"number": number + 2}, user=user, tenant=tenant, queue=queue))
        if number % 7:
            made[-1] = app.cancel(made[-1].id, tenant=tenant)
    statuses = ("FAILED", "CANCELLED", ["FAILED", "CANCELLED"], ["SUCCEEDED", "CANCELLED"])
    times = (None, made[9].created_at)
    asked = [*product(("ann", "bob"), ("", "acme"), statuses, (None, "work"), (None, "slow"), times)]
    for number, (user, tenant, status, model, queue, since) in enumerate(asked[::3]):
        wanted = {"user": user, "tenant": tenant, "status": status, "model": model, "queue": queue, "since": since}
        found, cursor = [], None
        while True:
            page = app.runs(**wanted, limit=(2, 5, 100)[number % 3], cursor=cursor)
            found += ids(page.runs)
            cursor = page.next
            if cursor is None:
                break
        meeting = [
            run.id
            for run in reversed(made)
            if (run.user, run.tenant) == (user, tenant)
            and run.status in ([status] if isinstance(status, str) else status)
            and run.model == (model or run.model)
            and run.queue == (queue or run.queue)
            and (since is None or run.created_at >= since)
        ]
        assert found == meeting, wanted
        if status == "CANCELLED" and since is None:
            counted = app.act("retry", user=user, tenant=tenant, status=status, model=model, queue=queue, dry_run=True)
            assert counted.matched == len(meeting)
    clock.advance(86400)
    assert app.purge(0) > 10
    assert not app.runs(user="ann", status=["FAILED", "CANCELLED"]).runs


def test_where_a_search_follows_a_first_look_no_run_is_found_twice(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "_FIRST_LOOK", 2)
    monkeypatch.setattr(queries, "_FEW", 0)
    made = [app.submit("work", {"number": number}) for number in range(5)]
    found = run_sync(app._engine.store.read(queries.find, Filter(model="work"), None, 10))
    assert found == ids(made[::-1])


@pytest.mark.parametrize("real", [True, False])
def test_times_narrow_a_list_whoever_gives_the_time(
    url: str, clock: FakeClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, real: bool
) -> None:
    """Ids are made by this machine's clock: they bound a list only if that is the clock of the runs, too."""
    monkeypatch.setattr(queries, "_FIRST_LOOK", 2)
    monkeypatch.setattr(queries, "CLOCK_SKEW_US", 60 * 1_000_000)
    with closing(App(url, clock=None if real else clock, artifacts=tmp_path / "artifacts")) as app:
        app.model("work", isolation="thread")(work)
        made = []
        for number in range(6):
            made.append(app.submit("work", {"number": number}))
            clock.advance(1)
        for options in ({}, {"model": "work"}, {"status": "PENDING"}):
            since = app.runs(since=made[2].created_at, **options)
            assert ids(since.runs) == ids(made[2:][::-1])
            until = app.runs(until=made[2].created_at, **options)
            assert ids(until.runs) == ids(made[:2][::-1])
            assert not app.runs(until=made[0].created_at - timedelta(days=1), **options).runs
            assert not app.runs(since=made[5].created_at + timedelta(days=1), **options).runs


def test_filters_narrow_and_combine(app: App, clock: FakeClock) -> None:
    first = app.submit("work", {"number": 1}, user="ann", idempotency_key="k-1")
    clock.advance(60)
    second = app.submit("other", {"number": 2}, user="bob", queue="gpu")
    third = app.submit("work", {"number": 3}, tenant="acme")
    app.cancel(second.id)
    assert ids(app.runs().runs) == [second.id, first.id]
    assert ids(app.runs(tenant="acme").runs) == [third.id]
    assert ids(app.runs(status="CANCELLED").runs) == [second.id]
    assert ids(app.runs(status=["PENDING", "CANCELLED"]).runs) == [second.id, first.id]
    assert ids(app.runs(model="work").runs) == [first.id]
    assert ids(app.runs(user="bob").runs) == [second.id]
    assert ids(app.runs(queue="gpu").runs) == [second.id]
    assert ids(app.runs(idempotency_key="k-1").runs) == [first.id]
    assert ids(app.runs(payload_hash=first.payload_hash).runs) == [first.id]
    assert ids(app.runs(since=second.created_at).runs) == [second.id]
    assert ids(app.runs(until=second.created_at).runs) == [first.id]
    assert ids(app.runs(until=second.created_at - timedelta(seconds=61)).runs) == []
    assert ids(app.runs(model="work", user="bob").runs) == []
    with pytest.raises(InvalidRequest, match="'DONE' is not a status"):
        app.runs(status="DONE")
    with pytest.raises(InvalidRequest, match="since needs a time zone"):
        app.runs(since=second.created_at.replace(tzinfo=None))
    with pytest.raises(RunNotFound):
        app.get(third.id, tenant="")


def test_a_retry_is_a_new_run_and_one_however_often_it_is_asked_for(app: App, clock: FakeClock) -> None:
    failed = app.submit("work", {"fails": True}, user="ann", cost=5)
    with app.working(processes=0):
        assert app.wait(failed.id, timeout=60).status == "FAILED"
    later = app.submit("work", {"fails": True}, user="ann", delay=3600)
    again = app.retry(failed.id)
    assert (again.retry_of, again.status, again.cost, again.user) == (failed.id, "PENDING", 5.0, "ann")
    assert again.id not in {failed.id, later.id}
    assert app.retry(failed.id).id == again.id
    clock.advance(86400)
    assert app.retry(failed.id).id == again.id, "it is under way still"
    assert app.get(failed.id).status == "FAILED"
    with pytest.raises(IllegalTransition, match="is PENDING; only a FAILED or CANCELLED run"):
        app.retry(again.id)


def test_a_purge_removes_a_run_with_all_that_it_left(app: App, clock: FakeClock, tmp_path: Path) -> None:
    old = app.submit("work", idempotency_key="k", key_ttl=300)
    with app.working(processes=0):
        assert app.wait(old.id, timeout=60).status == "SUCCEEDED"
    clock.advance(1000)
    young = app.submit("work", {"number": 1})
    app.cancel(young.id)
    waits = app.submit("work", {"number": 2})
    assert list((tmp_path / "artifacts").iterdir())
    assert app.purge(older_than=500) == 1
    with pytest.raises(RunNotFound):
        app.get(old.id)
    assert not list((tmp_path / "artifacts").rglob("*.json"))
    assert {run.id for run in app.runs().runs} == {young.id, waits.id}
    assert not app.submit("work", idempotency_key="k").replayed, "its key had ended before"


def heavy(app: App, many: int, size: int) -> list[str]:
    """Runs with parameters of that size; the newest first."""
    app.model("heavy", isolation="thread")(lambda text: None)
    return [app.submit("heavy", {"text": f"{n:06}" + "x" * size}).id for n in range(many)][::-1]


def test_a_page_that_is_bounded_in_bytes_goes_on_where_it_stopped(app: App) -> None:
    made = heavy(app, 40, 10_000)
    pages, cursor = [], None
    while True:
        page = app.runs(limit=1000, cursor=cursor, max_bytes=100_000)
        pages.append(ids(page.runs))
        assert sum(len(run.parameters_json) for run in page.runs) <= 100_000
        cursor = page.next
        if cursor is None:
            break
    assert [run for page in pages for run in page] == made
    assert [len(page) for page in pages] == [8] * 5
    assert [len(app.runs(limit=n, max_bytes=100_000).runs) for n in (1, 7, 8, 9)] == [1, 7, 8, 8]
    everything = app.runs(limit=40, parameters=False, max_bytes=100_000)
    assert (ids(everything.runs), everything.next) == (made, None)
    fitting = app.runs(limit=39, parameters=False, max_bytes=100_000)
    assert (ids(fitting.runs), fitting.next) == (made[:39], made[38])


def test_a_run_larger_than_a_page_is_a_page_of_its_own(app: App) -> None:
    made = heavy(app, 3, 5_000)
    page = app.runs(max_bytes=10)
    assert (ids(page.runs), page.next) == (made[:1], made[0])
    assert ids(app.runs(max_bytes=10, cursor=made[1]).runs) == made[2:]


def test_a_list_can_leave_parameters_out_and_then_says_so(app: App) -> None:
    app.submit("work", {"number": 7})
    assert app.runs().runs[0].parameters == {"number": 7}
    with pytest.raises(InvalidRequest, match="left the parameters"):
        _ = app.runs(parameters=False).runs[0].parameters
