"""B29: an action on all runs that match a filter, with the number shown first, in API, command line and Python."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from semel import Actor, InvalidRequest, KeyReused, Quota, Run
from semel._concurrency.sync import run_sync
from semel.runs.store import actions
from semel.runs.store.actions import Batch
from semel.runs.types import MICRO
from support.databases import DATABASES, Databases, TestDatabase

ALICE = Actor(user="alice")


@pytest.fixture(params=DATABASES)
def database(request: pytest.FixtureRequest, databases: Databases) -> Iterator[TestDatabase]:
    with databases.empty(request.param) as database:
        yield database


def statuses(database: TestDatabase, runs: list[Run]) -> list[str]:
    return [database.app.get(run.id).status for run in runs]


def failed(database: TestDatabase, reason: str = "ValueError: no", **options: Any) -> Run:
    """A run that failed."""
    run = database.submit(**options)
    (leased,) = database.lease()
    assert database.end(leased, "fatal", reason=reason)
    return run


def found(database: TestDatabase, **filters: Any) -> set[str]:
    return {run.id for run in database.app.runs(**filters).runs}


def test_b29_runs_are_found_by_worker_error_and_parameter(database: TestDatabase) -> None:
    app = database.app
    timeout = failed(database, "TimeoutError: 100% of _it_", number=3)
    other = failed(database, "ValueError: timeout", number=4)
    pending = database.submit(number=3, dedupe=False)
    everything = {timeout.id, other.id, pending.id}
    assert found(database, error="Timeout") == {timeout.id}, "upper and lower case differ"
    assert found(database, error="100% of _") == {timeout.id}
    assert found(database, error="100_") == set()
    assert found(database, error="imeout", status="FAILED", model="train") == {timeout.id, other.id}
    assert found(database, worker="worker-1") == {timeout.id, other.id}
    assert found(database, worker="worker") == set()
    assert found(database, parameter={"number": 3}) == {timeout.id, pending.id}
    assert found(database, parameter={"number": 3.0}, model="train") == {timeout.id, pending.id}
    assert found(database, parameter={"number": "3"}) == found(database, parameter={"number": True}) == set()
    assert found(database, parameter={"number": 4, "other": 1}) == set()
    assert found(database, parameter={"number": 3}, status="FAILED", user=42, queue="default") == {timeout.id}
    assert found(database, tenant="acme", parameter={"number": 3}) == set()
    assert found(database) == everything
    page = app.runs(parameter={"number": 3}, limit=1, parameters=False)
    assert [run.id for run in page.runs] == [pending.id]
    assert [run.id for run in app.runs(parameter={"number": 3}, limit=1, cursor=page.next).runs] == [timeout.id]


VALUES = [None, True, False, 0, 1, -7, 2.5, "", "1", "null", "a\nb", 'q"uo\\te', "Grüße", "x\x00y", {"deep": 1}, [1]]


def test_b29_a_parameter_is_compared_as_json_does(database: TestDatabase) -> None:
    @database.app.model("any")
    def any_value(**parameters: Any) -> None: ...

    runs = [database.app.submit("any", {"value": each, "n'\"a": each, "deep": 5}) for each in VALUES]
    for value, run in zip(VALUES, runs, strict=True):
        if isinstance(value, dict | list) or value == "x\x00y":
            with pytest.raises(InvalidRequest):
                database.app.runs(parameter={"value": value})
        else:
            assert found(database, parameter={"value": value}) == {run.id}, repr(value)
            assert found(database, parameter={"n'\"a": value}) == {run.id}, repr(value)
    assert found(database, parameter={"deep": 1}) == set(), "only at the top"


@pytest.mark.parametrize(
    "wrong",
    [
        {"parameter": "n=3"},
        {"parameter": {"": 3}},
        {"parameter": {"n": 2**70}},
        {"parameter": {"n": float("nan")}},
        {"parameter": {"n": b"x"}},
        {"error": ""},
        {"error": 3.5},
        {"worker": ["w"]},
    ],
)
def test_b29_a_wrong_filter_is_refused(database: TestDatabase, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        database.app.runs(**wrong)


def test_b29_a_dry_run_counts_and_changes_nothing(database: TestDatabase) -> None:
    runs = [database.submit(queue="gpu") for _ in range(3)] + [database.submit()]
    tried = database.app.act("cancel", queue="gpu", dry_run=True)
    assert (tried.state, tried.matched, tried.done, tried.id) == ("dry_run", 3, 0, "")
    assert statuses(database, runs) == ["PENDING"] * 4
    assert database.app.actions() == []
    assert database.app.audit_log(action="runs").entries == []


def test_b29_all_that_match_are_cancelled_in_batches_and_no_other(
    database: TestDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(actions_batch(), "cancel", 3)
    mine = [database.submit(queue="gpu") for _ in range(7)]
    others = [database.submit(), database.submit(queue="gpu", tenant="acme"), failed(database, queue="default")]
    before = statuses(database, others)
    done = database.app.act("cancel", queue="gpu", why="not needed", by=ALICE)
    assert (done.state, done.matched, done.done, done.skipped, done.failed) == ("finished", 7, 7, 0, 0)
    assert statuses(database, mine) == ["CANCELLED"] * 7
    assert statuses(database, others) == before
    assert database.app.get(mine[0].id).note == "not needed"
    again = database.app.act("cancel", queue="gpu", by=ALICE)
    assert (again.matched, again.done) == (0, 0)


def actions_batch() -> dict[str, int]:
    from semel.runs.actions import BATCH

    return BATCH  # type: ignore[return-value]


def test_b29_of_pending_runs_those_that_started_meanwhile_are_left_alone(
    database: TestDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [database.submit() for _ in range(3)]
    real = actions.advance

    def late(*arguments: Any) -> Any:
        monkeypatch.setattr(actions, "advance", real)
        database.lease()
        return real(*arguments)

    late.semel_hot = True  # type: ignore[attr-defined]
    monkeypatch.setattr(actions, "advance", late)
    done = database.app.act("cancel", status="PENDING")
    assert (done.matched, done.done, done.skipped) == (3, 2, 1)
    assert statuses(database, runs) == ["RUNNING", "CANCELLED", "CANCELLED"]
    assert database.app.get(runs[0].id).cancel_us is None


def test_b29_a_running_run_is_asked_to_end(database: TestDatabase) -> None:
    run = database.submit()
    (leased,) = database.lease()
    done = database.app.act("cancel", worker="worker-1")
    assert (done.matched, done.done) == (1, 1)
    assert database.renew(leased) == {run.id: True}
    again = database.app.act("cancel", worker="worker-1")
    assert (again.matched, again.done, again.skipped) == (1, 0, 1)


def test_b29_all_that_match_are_retried_once(database: TestDatabase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(actions_batch(), "retry", 2)
    old = [failed(database, priority=3, queue="default") for _ in range(5)]
    other = failed(database, "TimeoutError: late")
    done = database.app.act("retry", error="ValueError", by=ALICE)
    assert (done.matched, done.done, done.failed) == (5, 5, 0)
    new = database.app.runs(status="PENDING").runs
    assert {run.retry_of for run in new} == {run.id for run in old}
    assert {run.priority for run in new} == {3}
    again = database.app.act("retry", status="FAILED", by=ALICE)
    assert (again.matched, again.done, again.skipped) == (6, 1, 5), "five are under way already"
    assert [run.retry_of for run in database.app.runs(status="PENDING", limit=1).runs] == [other.id]
    assert [entry.action for entry in database.app.audit_log().entries] == ["runs.retried"] * 2


def test_b29_what_a_quota_refuses_is_counted_as_failed(database: TestDatabase) -> None:
    for _ in range(3):
        failed(database)
    database.app.set_quota(42, Quota(max_concurrent=1))
    done = database.app.act("retry", status="FAILED")
    assert (done.matched, done.done, done.failed, done.state) == (3, 1, 2, "finished")
    assert done.error is not None
    assert "quota" in done.error.lower() or "concurrent" in done.error.lower()


def test_b29_a_run_whose_model_is_gone_does_not_stop_the_others(database: TestDatabase) -> None:
    @database.app.model("gone")
    def gone() -> None: ...

    database.app.submit("gone")
    database.app.act("cancel", model="gone")
    failed(database)
    del database.app.registry._models["gone"]
    done = database.app.act("retry", status=["FAILED", "CANCELLED"])
    assert (done.matched, done.done, done.failed) == (2, 1, 1)
    assert done.error is not None
    assert "unknown model 'gone'" in done.error


def test_b29_a_priority_decides_what_is_leased_next(database: TestDatabase) -> None:
    runs = [database.submit() for _ in range(4)]
    number = json.loads(runs[3].parameters_json)["number"]
    done = database.app.act("set_priority", priority=10, parameter={"number": number})
    assert (done.matched, done.done) == (1, 1)
    assert [database.app.get(run.id).priority for run in runs] == [0, 0, 0, 10]
    assert database.lease()[0].id == runs[3].id
    assert database.app.get(runs[3].id).priority == 10
    later = database.app.act("set_priority", priority=-1, status="PENDING", until=datetime.now(UTC) + timedelta(days=1))
    assert later.done == 3


@pytest.mark.parametrize(
    ("action", "options"),
    [
        ("cancel", {}),
        ("cancel", {"status": "FAILED"}),
        ("retry", {"status": "PENDING"}),
        ("set_priority", {"status": "RUNNING", "priority": 1}),
        ("set_priority", {"queue": "gpu"}),
        ("cancel", {"queue": "gpu", "priority": 3}),
        ("set_priority", {"queue": "gpu", "priority": 2**40}),
        ("purge", {"queue": "gpu"}),
        ("cancel", {"queue": "gpu", "since": datetime(2026, 1, 1)}),  # noqa: DTZ001 -- that is what is wrong
    ],
)
def test_b29_a_wrong_action_is_refused(database: TestDatabase, action: Any, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        database.app.act(action, **options)
    assert database.app.actions() == []


def test_b29_every_action_is_one_row_of_the_audit_log(database: TestDatabase) -> None:
    for _ in range(3):
        database.submit(queue="gpu")
    database.app.act("set_priority", priority=5, queue="gpu", by=ALICE)
    done = database.app.act("cancel", queue="gpu", why="late", by=ALICE)
    last, first = database.app.audit_log(action="runs").entries
    assert (last.action, last.target, last.user) == ("runs.cancelled", done.id, "alice")
    assert last.after == {"filter": {"queue": "gpu", "status": ["PENDING", "RUNNING"]}, "matched": 3, "why": "late"}
    assert first.action == "runs.prioritized"
    assert first.after == {"filter": {"queue": "gpu", "status": ["PENDING"]}, "matched": 3, "priority": 5}
    assert database.app.audit_log(action="run").entries == []
    assert database.app.verify_audit_log().ok


def test_b29_a_key_finds_the_action_that_began_before(database: TestDatabase) -> None:
    failed(database)
    first = database.app.act("retry", status="FAILED", idempotency_key="k", by=ALICE)
    failed(database)
    assert database.app.act("retry", status="FAILED", idempotency_key="k", by=ALICE) == first
    assert database.app.act("retry", status="FAILED", idempotency_key="k", by=Actor(user="bob")).id != first.id
    with pytest.raises(KeyReused):
        database.app.act("retry", status="CANCELLED", idempotency_key="k", by=ALICE)


def test_b29_runs_that_are_submitted_after_it_began_are_not_changed(database: TestDatabase) -> None:
    old = database.submit()
    engine = database.app._engine
    begun = run_sync(engine.begin_action("cancel", status="PENDING"))
    database.clock.advance(1)
    new = database.submit()
    assert run_sync(engine.carry_out(begun.id)) is not None
    assert statuses(database, [old, new]) == ["CANCELLED", "PENDING"]


def test_b29_one_that_was_left_in_the_middle_is_carried_on_and_nothing_is_done_twice(
    database: TestDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a process that died after its first batch: another may take it when the lease has ended."""
    monkeypatch.setitem(actions_batch(), "retry", 2)
    for _ in range(5):
        failed(database)
    engine = database.app._engine
    begun = run_sync(engine.begin_action("retry", status="FAILED"))
    taken = database.do(actions.take, begun.id)
    ids = database.ask(actions.next_batch, taken, 2)
    batch = run_sync(engine._carrier._prepared(taken, ids, more=True))
    reached, _ = database.do(actions.advance, taken, batch)
    assert (reached.done, reached.state) == (2, "running")
    assert run_sync(engine.carry_out(begun.id)) is None, "another has it"
    database.clock.advance(actions.LEASE_US / MICRO + 1)
    assert database.do(actions.advance, taken, batch) is None, "the first batch is done"
    done = run_sync(engine.carry_out(begun.id))
    assert done is not None
    assert (done.done, done.matched, done.state) == (5, 5, "finished")
    assert database.count("semel_runs") == 10
    stale = Batch(ids=(), last=None, more=False)
    assert database.do(actions.advance, reached, stale) is None
    assert database.app.action(begun.id) == done


def test_b29_finished_actions_are_forgotten_after_a_month(database: TestDatabase) -> None:
    database.app.act("cancel", queue="gpu")
    database.clock.advance(31 * 86400)
    last = database.app.act("cancel", queue="cpu")
    assert [each.id for each in database.app.actions()] == [last.id]
    assert database.app.actions(tenant="acme") == []
