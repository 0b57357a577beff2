"""B29: an action on all runs that match a filter, with the number shown first, in API, command line and Python."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, text

from semel import Actor, InvalidRequest, KeyReused, Quota, Run
from semel._concurrency.sync import run_sync
from semel.cli import main as semel_command
from semel.client import Client
from semel.db.database import COMMITS
from semel.db.dialect import StatementContext, transaction
from semel.runs.store import actions
from semel.runs.store.actions import Batch
from semel.runs.types import MICRO
from support.databases import DATABASES, Databases, TestDatabase, behind
from support.service import TokenClient, TokenServer, add_models, app_on, serve, shared_server, token_server
from support.waiting import eventually

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


VALUES = [None, True, False, 0, 1, -7, 2.5, "", "1", "null", "a\nb", 'q"uo\\te', "Grüße", {"deep": 1}, [1]]


def test_b29_a_parameter_is_compared_as_json_does(database: TestDatabase) -> None:
    @database.app.model("any", isolation="thread")
    def any_value(**parameters: Any) -> None: ...

    runs = [database.app.submit("any", {"value": each, "n'\"a": each, "deep": 5}) for each in VALUES]
    for value, run in zip(VALUES, runs, strict=True):
        if isinstance(value, dict | list):
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
        {"parameter": {"n": "x\x00y"}},
        {"parameter": {"n": "\ud800"}},
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
    carrier = database.app._engine._carrier
    real = carrier._prepared

    async def late(*arguments: Any, **options: Any) -> Batch:
        database.lease()
        monkeypatch.setattr(carrier, "_prepared", real)
        return await real(*arguments, **options)

    monkeypatch.setattr(carrier, "_prepared", late)
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
    @database.app.model("gone", isolation="thread")
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
    assert database.app.verify_audit_log().problem is None


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
    taken = database.do(actions.take, begun.id, "first")
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


def test_b29_of_two_that_take_an_action_at_the_same_time_one_has_it(databases: Databases) -> None:
    by_its_own_clock = StatementContext()
    with databases.empty("postgres") as database:
        begun = run_sync(database.app._engine.begin_action("cancel", status="PENDING"))

        def take(conn: Connection, holder: str) -> bool:
            with transaction(conn.execution_options(**{COMMITS: True})):
                return actions.take(conn, begun.id, holder, by_its_own_clock) is not None

        lock = text("SELECT 1 FROM semel_run_actions FOR UPDATE")
        first = partial(actions.take, action_id=begun.id, holder="first", context=by_its_own_clock)
        late = partial(take, holder="late")
        assert behind(database, lambda conn: conn.execute(lock), late, first) is False
        assert database.rows("SELECT holder FROM semel_run_actions") == [("first",)]


def test_b29_finished_actions_are_forgotten_after_a_month(database: TestDatabase) -> None:
    database.app.act("cancel", queue="gpu")
    database.clock.advance(31 * 86400)
    last = database.app.act("cancel", queue="cpu")
    assert [each.id for each in database.app.actions()] == [last.id]
    assert database.app.actions(tenant="acme") == []


@pytest.fixture(params=DATABASES)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TokenServer]:
    with token_server(request.getfixturevalue(f"migrated_{request.param}_url"), tmp_path) as server:
        yield server


def acted(who: TokenClient, body: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The action, when it is finished."""
    begun = who.post("/runs/actions", json=body, **options)
    assert begun.status_code == 202, begun.text
    eventually(lambda: who.get(begun.headers["location"]).json()["state"] == "finished")
    found: dict[str, Any] = who.get(begun.headers["location"]).json()
    return found


def test_b29_over_http_everybody_changes_what_they_may_and_nothing_else(server: TokenServer) -> None:
    alice, bob, olga = server.admit("alice"), server.admit("bob"), server.admit("olga", "operator")
    tanja = server.admit("tanja", "admin", "acme")
    body = {"model": "add", "parameters": {"a": 1}, "queue": "gpu", "delay": 3600}
    people = (alice, alice, bob, tanja)
    runs = [who.post("/runs", json=body).json()["run_id"] for who in people]

    def now() -> list[str]:
        return [who.get(f"/runs/{run}").json()["status"] for who, run in zip(people, runs, strict=True)]

    wanted: dict[str, Any] = {"action": "cancel", "filter": {"queue": "gpu"}, "why": "no"}
    dry = [who.post("/runs/actions", json={**wanted, "dry_run": True}) for who in (alice, bob, olga, tanja)]
    assert [(each.status_code, each.json()["matched"]) for each in dry] == [(200, 2), (200, 1), (200, 3), (200, 1)]
    assert now() == ["PENDING"] * 4
    done = acted(alice, wanted)
    assert (done["matched"], done["done"], done["user"]) == (2, 2, "alice")
    assert done["filter"] == {"status": ["PENDING", "RUNNING"], "user": "alice", "queue": "gpu"}
    assert now() == ["CANCELLED", "CANCELLED", "PENDING", "PENDING"]
    foreign = {"action": "cancel", "filter": {"user": "bob"}}
    assert alice.post("/runs/actions", json=foreign).status_code == 403
    for who in (bob, tanja):
        assert who.get(f"/runs/actions/{done['action_id']}").status_code == 404
        assert who.get("/runs/actions").json() == []
    assert acted(olga, foreign)["done"] == 1
    assert now() == ["CANCELLED", "CANCELLED", "CANCELLED", "PENDING"]
    assert [each["user"] for each in olga.get("/runs/actions").json()] == ["olga", "alice"]
    logged = server.root.get("/admin/audit?action=runs.cancelled").json()["actions"]
    assert [(each["user"], each["after"]["matched"]) for each in logged] == [("olga", 1), ("alice", 2)]


def test_b29_a_response_that_is_lost_begins_no_second_action(server: TokenServer) -> None:
    alice = server.admit("alice")
    run = alice.post("/runs", json={"model": "add", "parameters": {"a": 1}, "delay": 60}).json()["run_id"]
    acted(alice, {"action": "cancel", "filter": {"model": "add"}})
    wanted: dict[str, Any] = {"action": "retry", "filter": {"status": ["CANCELLED"]}}
    first = acted(alice, wanted, headers={"Idempotency-Key": "k"})
    assert acted(alice, wanted, headers={"Idempotency-Key": "k"}) == first
    again = [each for each in alice.get("/runs").json()["runs"] if each["retry_of"] == run]
    assert (first["done"], len(again)) == (1, 1)
    other = {**wanted, "filter": {"status": ["FAILED"]}}
    assert alice.post("/runs/actions", json=other, headers={"Idempotency-Key": "k"}).status_code == 409


@pytest.mark.parametrize(
    "wrong",
    [
        {"action": "cancel", "filter": {}},
        {"action": "cancel"},
        {"action": "delete", "filter": {"queue": "gpu"}},
        {"action": "cancel", "filter": {"queu": "gpu"}},
        {"action": "cancel", "filter": {"status": ["SUCCEEDED"]}},
        {"action": "set_priority", "filter": {"queue": "gpu"}},
        {"action": "set_priority", "filter": {"queue": "gpu"}, "priority": 1.5},
        {"action": "cancel", "filter": {"parameters": {"a": [1]}}},
        {"action": "cancel", "filter": {"since": "2030-01-01"}},
    ],
)
def test_b29_a_wrong_request_is_refused(shared: TokenServer, wrong: dict[str, Any]) -> None:
    answer = shared.root.post("/runs/actions", json=wrong)
    assert (answer.status_code, answer.json()["error_code"]) == (400, "INVALID_REQUEST"), answer.text


@pytest.fixture(scope="module")
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokenServer]:
    with shared_server(request, tmp_path_factory) as server:
        yield server


def test_b29_the_list_over_http_has_the_same_filters(shared: TokenServer) -> None:
    for number in (1, 2):
        body = {"model": "add", "parameters": {"a": number}, "delay": 3600}
        assert shared.root.post("/runs", json=body).status_code == 201

    def found(query: str) -> int:
        answer = shared.root.get(f"/runs?{query}")
        assert answer.status_code == 200, answer.text
        return len(answer.json()["runs"])

    assert (found("parameter=a=1"), found("parameter=a=1&parameter=b=0"), found('parameter=a="1"')) == (1, 0, 0)
    assert (found("error=boom"), found("worker=nobody"), found("model=add")) == (0, 0, 2)
    for wrong in ("parameter=a", "parameter==1", "parameter=a=[1]", "parameter=a=1&parameter=a=2", "error="):
        assert shared.root.get(f"/runs?{wrong}").status_code == 400, wrong


def test_b29_at_the_command_line_the_number_is_shown_first(
    server: TokenServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def semel(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = semel_command(arguments)
        said = capsys.readouterr()
        return code, said.out, said.err

    monkeypatch.setenv("SEMEL_SERVER", server.address)
    monkeypatch.setenv("SEMEL_TOKEN", server.root.secret or "")
    ids = [server.app.submit("add", {"a": each}, queue="gpu", user="root").id for each in range(3)]
    choose = ("--status", "PENDING", "--queue", "gpu")
    assert semel("cancel", *choose, "--dry-run")[:2] == (0, "3 runs match\n")
    code, _, said = semel("cancel", *choose)
    assert (code, said) == (1, "semel: 3 runs match; add --yes to act on them without being asked\n")
    assert semel("priority", "7", "--parameter", "a=2", "--yes")[:2] == (0, "1 changed\n")
    assert [server.app.get(each).priority for each in ids] == [0, 0, 7]
    code, out, _ = semel("cancel", *choose, "--yes", "--json")
    told = json.loads(out)
    assert (code, told["state"], told["matched"], told["done"]) == (0, "finished", 3, 3)
    assert semel("retry", "--model", "add", "--parameter", "a=1", "--yes")[:2] == (0, "1 retried\n")
    assert semel("retry", "--model", "add", "--yes")[:2] == (0, "2 retried, 1 skipped\n")
    assert semel("cancel", "--queue", "cpu")[:2] == (0, "0 runs match\n")
    listed = json.loads(semel("runs", "--parameter", "a=1", "--json", "--parameters")[1])["runs"]
    assert {run["parameters"]["a"] for run in listed} == {1}
    for wrong in (["cancel"], ["cancel", ids[0], "--queue", "gpu"], ["priority", "3"], ["priority", "x", *choose]):
        with pytest.raises(SystemExit) as exit_code:
            semel(*wrong)
        assert exit_code.value.code == 2
    assert semel("retry", "--status", "PENDING", "--yes")[0] == 1


def test_b29_a_client_acts_and_asks_how_far_it_came(server: TokenServer) -> None:
    with Client(server.address, token=server.root.secret) as client:
        client.submit("add", {"a": 5}, delay=3600)
        assert client.act("cancel", parameter={"a": 5}, dry_run=True).matched == 1
        begun = client.act("cancel", parameter={"a": 5}, status="PENDING")
        assert begun.action_id is not None
        eventually(lambda: client.action(begun.action_id or "").state == "finished")
        assert client.actions()[0].done == 1
        assert [run.status for run in client.runs(parameter={"a": 5})] == ["CANCELLED"]
        with pytest.raises(InvalidRequest):
            client.act("cancel", queu="gpu")  # type: ignore[call-arg]


KILLED = """
import asyncio, os, signal, sys
from semel import App
from semel.runs import actions
from semel.runs.store import actions as store

actions.BATCH["retry"] = actions.BATCH["cancel"] = 5
app = App(sys.argv[1], artifacts=sys.argv[2], dedupe_window=0)

@app.model("add", isolation="loop")
async def add(a: int, b: int = 0) -> int: ...

real = store.advance

def advance(conn, action, *arguments):
    if action.done == 10:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(conn, action, *arguments)

advance.semel_hot = True
store.advance = advance

async def main():
    from semel.service.state import ServiceState
    from semel.service import Settings
    service = ServiceState(app, Settings())
    await service.ensure_open()
    begun = await service.engine.begin_action(sys.argv[3], model="add")
    print(begun.id, flush=True)
    service.actions.wake()
    await asyncio.sleep(30)

asyncio.run(main())
"""


@pytest.mark.parametrize("action", ["cancel", "retry"])
@pytest.mark.parametrize("kind", DATABASES)
def test_b29_when_a_server_dies_in_the_middle_the_next_one_carries_on(
    request: pytest.FixtureRequest, kind: str, tmp_path: Path, action: str
) -> None:
    with app_on(request, tmp_path, kind) as app:
        add_models(app)
        runs = [app.submit("add", {"a": each}, delay=3600).id for each in range(23)]
        if action == "retry":
            assert app.act("cancel", model="add").done == 23
        program = [sys.executable, "-c", KILLED, app.url, str(tmp_path), action]
        died = subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)
        assert died.returncode == -signal.SIGKILL, died.stderr
        begun = app.action(died.stdout.strip())
        assert (begun.state, begun.matched, begun.done) == ("running", 23, 10)
        with serve(app):
            eventually(lambda: app.action(begun.id).state == "finished")
        done = app.action(begun.id)
        assert (done.done, done.failed, done.skipped) == (23, 0, 0)
        if action == "cancel":
            assert {app.get(each).status for each in runs} == {"CANCELLED"}
        else:
            retried = [run.retry_of for run in app.runs(status="PENDING", limit=1000).runs]
            assert sorted(map(str, retried)) == sorted(runs), "each was retried once"
