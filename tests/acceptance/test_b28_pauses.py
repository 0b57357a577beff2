"""B28: queues and models can be paused and resumed; what runs goes on, and "why it waits" says so."""

import getpass
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from redis import Redis

from semel import Actor, App, InvalidRequest, ServiceError
from semel._concurrency.sync import run_sync
from semel.cli import main as semel_command
from semel.client import Client
from semel.runs.store import lease, transitions
from semel.runs.store.lease import LeaseRequest
from semel.runs.store.transitions import FinishRequest
from semel.runs.types import MICRO, AttemptResult
from semel.service.auth import tokens
from support.databases import DATABASES, Databases, TestDatabase
from support.service import make_app, serve
from support.transports import Ground, celery_worker, rq_worker, until


@pytest.fixture(params=DATABASES)
def database(request: pytest.FixtureRequest, databases: Databases) -> Iterator[TestDatabase]:
    with databases.empty(request.param) as database:
        yield database


def reason(database: TestDatabase, run_id: str) -> str:
    waiting = database.app.waiting(run_id)
    assert waiting is not None
    return waiting.reason


def test_b28_nothing_of_a_paused_queue_starts_and_what_runs_goes_on(database: TestDatabase) -> None:
    first = database.submit()
    (running,) = database.lease()
    pause = database.app.pause(queue="default", by=Actor(user="alice"), why="a new driver")
    second = database.submit()
    assert (pause.kind, pause.name, pause.pending) == ("queue", "default", 0)
    assert (pause.by, pause.why, pause.since_us) == ("alice", "a new driver", database.clock.us)
    assert database.lease() == []
    assert database.do(lease.lease_these, "worker-1", [second.id]) == []
    assert database.renew(running) == {first.id: False}, "what runs goes on"
    assert database.end(running)
    assert reason(database, second.id) == "the queue 'default' is paused (by alice: a new driver)"
    assert database.app.resume(queue="default")
    assert [run.id for run in database.lease()] == [second.id]
    assert database.app.pauses() == []


def test_b28_a_paused_model_lets_the_others_of_its_queue_pass(database: TestDatabase) -> None:
    database.app.model("report")(train)
    held, passing = database.submit(), database.app.submit("report")
    database.app.pause(model="train", by=Actor(user="alice"))
    wanted = LeaseRequest("worker-1", ("default",), ["train", "report"], 10)
    assert [run.id for run in database.do(lease.lease, wanted)] == [passing.id]
    assert reason(database, held.id) == "the model 'train' is paused (by alice)"
    database.app.resume(model="train")
    assert [run.id for run in database.do(lease.lease, wanted)] == [held.id]


def test_b28_a_paused_queue_lets_the_others_pass(database: TestDatabase) -> None:
    held, passing = database.submit(queue="gpu"), database.submit()
    database.app.pause(queue="gpu")
    database.app.pause(model="default")  # as the other queue is named
    wanted = LeaseRequest("worker-1", ("gpu", "default"), ["train"], 10)
    assert [run.id for run in database.do(lease.lease, wanted)] == [passing.id]
    assert database.do(lease.lease_these, "worker-1", [held.id]) == []
    assert database.app.resume(queue="gpu")
    assert [run.id for run in database.do(lease.lease_these, "worker-1", [held.id])] == [held.id]


def test_b28_of_a_paused_model_in_a_paused_queue_the_queue_is_named(database: TestDatabase) -> None:
    run = database.submit()
    database.app.pause(model="train", by=Actor(user="bob"))
    database.app.pause(queue="default", by=Actor(user="alice"))
    assert reason(database, run.id) == "the queue 'default' is paused (by alice)"
    assert database.app.resume(queue="default")
    assert reason(database, run.id) == "the model 'train' is paused (by bob)"


def test_b28_workers_are_notified_of_what_is_resumed(databases: Databases) -> None:
    with databases.empty("postgres") as database, psycopg.connect(database.url, autocommit=True) as worker:
        database.app.pause(queue="default")
        worker.execute(f"LISTEN {transitions.CHANNEL}")
        assert database.app.resume(queue="default")
        assert len(list(worker.notifies(timeout=60, stop_after=1))) == 1


def test_b28_a_retry_and_a_lost_run_of_a_paused_queue_wait_too(database: TestDatabase) -> None:
    database.submit()
    (running,) = database.lease()
    database.app.pause(queue="default", why="closed", by=Actor(user="alice"))
    ending = FinishRequest(running.id, running.fence, AttemptResult(kind="retry", reason="busy"), 20 * MICRO)
    assert running.id in database.do(transitions.end, [ending])
    told = reason(database, running.id)
    assert told.startswith("backing off for ")
    assert told.endswith("; the queue 'default' is paused (by alice: closed)")
    database.clock.advance(3600)
    assert database.lease() == []
    assert reason(database, running.id) == "the queue 'default' is paused (by alice: closed)"
    database.app.resume(queue="default")
    assert len(database.lease()) == 1


def test_b28_people_of_the_main_tenant_are_not_named_to_others(database: TestDatabase) -> None:
    database.app.pause(queue="default", by=Actor(user="alice"), why="closed")
    run = database.submit(tenant="acme")
    assert reason(database, run.id) == "the queue 'default' is paused (closed)"


def test_b28_to_pause_or_resume_again_changes_nothing(database: TestDatabase) -> None:
    first = database.app.pause(queue="gpu", by=Actor(user="alice"), why="first")
    database.clock.advance(5)
    assert database.app.pause(queue="gpu", by=Actor(user="bob"), why="second") == first
    database.app.pause(model="gpu")
    assert [(each.kind, each.name, each.by) for each in database.app.pauses()] == [
        ("queue", "gpu", "alice"),
        ("model", "gpu", getpass.getuser()),
    ]
    assert database.app.resume(queue="gpu")
    assert not database.app.resume(queue="gpu")
    assert [each.kind for each in database.app.pauses()] == ["model"], "a model of the same name is paused by itself"


@pytest.mark.parametrize(
    "wrong", [{}, {"queue": "a", "model": "b"}, {"queue": ""}, {"model": 3.5}, {"queue": "semel-service"}]
)
def test_b28_only_a_queue_or_a_model_of_users_is_paused(database: TestDatabase, wrong: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest):
        database.app.pause(**wrong)  # type: ignore[arg-type]
    assert database.app.pauses() == []


def test_b28_a_worker_leaves_a_paused_queue_alone_and_goes_on_when_it_is_resumed(database: TestDatabase) -> None:
    started, gate = threading.Event(), threading.Event()

    @database.app.model("hold", isolation="thread")
    def hold() -> str:
        started.set()
        assert gate.wait(60)
        return "held"

    app = database.app
    first = app.submit("hold")
    with app.working(processes=0):
        assert started.wait(60)
        app.pause(queue="default")
        second = app.submit("hold", dedupe=False)
        gate.set()
        assert app.wait(first.id, timeout=60).status == "SUCCEEDED", "what runs goes on"
        other = app.submit("hold", queue="default", dedupe=False, delay=0)
        assert [app.get(each.id).status for each in (second, other)] == ["PENDING", "PENDING"]
        app.resume(queue="default")
        assert [app.wait(each.id, timeout=60).status for each in (second, other)] == ["SUCCEEDED", "SUCCEEDED"]


@pytest.mark.parametrize(
    "way",
    [("rq", "rq:queue:semel", rq_worker), ("celery", "semel", celery_worker)],
    ids=["rq", "celery"],
)
def test_b28_workers_of_rq_and_celery_respect_a_pause(
    way: tuple[str, str, Callable[[Ground], object]], migrated_postgres_url: str, redis_url: str, tmp_path: Path
) -> None:
    """The message of a paused run is taken in vain; resumed, the run is announced again."""
    transport, queue, start = way
    with (
        Ground(tmp_path, transport=transport, redis=redis_url, urls={"postgres": migrated_postgres_url}) as ground,
        Redis.from_url(redis_url) as broker,
    ):
        app = ground.app("postgres")
        app.pause(queue="default", why="closed")
        run = app.submit("add", {"a": 1, "b": 2})
        until(lambda: broker.llen(queue), "Redis carries it")
        start(ground)
        until(lambda: not broker.llen(queue), "the message is taken")
        assert app.get(run.id).status == "PENDING"
        waiting = app.waiting(run.id)
        assert waiting is not None
        assert waiting.reason == f"the queue 'default' is paused (by {getpass.getuser()}: closed)"
        assert app.resume(queue="default")
        until(lambda: app.get(run.id).status == "SUCCEEDED", ground.output())
        assert app.get(run.id).attempts == 1


def test_b28_over_http_and_at_the_command_line(
    database: TestDatabase, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def semel(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = semel_command(arguments)
        said = capsys.readouterr()
        return code, said.out, said.err

    app = make_app(database.url, tmp_path)
    app.model("train")(train)
    secrets = {name: issue(app, user=name, role=role, tenant=tenant) for name, role, tenant in WHO}
    with serve(app) as server:
        monkeypatch.setenv("SEMEL_SERVER", server.address)
        monkeypatch.setenv("SEMEL_TOKEN", secrets["olga"])
        run = app.submit("train", queue="gpu/a", user="olga")
        code, out, _ = semel("pause", "queue", "gpu/a", "--why", "a new driver")
        assert (code, "is paused since" in out, "by olga; 1 run is pending" in out) == (0, True, True)
        assert "the queue 'gpu/a' is paused (by olga: a new driver)" in semel("show", run.id)[1]
        listed = json.loads(semel("pause", "--json")[1])["pauses"]
        assert [(each["kind"], each["name"], each["pending"]) for each in listed] == [("queue", "gpu/a", 1)]
        assert semel("pause", "model", "train", "--json")[0] == 0
        for name in ("sam", "tanja"):
            with Client(server.address, token=secrets[name]) as client:
                for act in (client.pause, client.resume):
                    with pytest.raises(ServiceError) as refused:
                        act(queue="gpu/a")  # type: ignore[operator]
                    assert refused.value.status == 403
        assert semel("resume", "queue", "gpu/a")[:2] == (0, "the queue gpu/a is resumed\n")
        assert semel("resume", "queue", "gpu/a")[::2] == (1, "semel: the queue gpu/a is not paused\n")
        assert json.loads(semel("resume", "model", "train", "--json")[1])["resumed"]
        assert semel("pause")[2] == "nothing is paused\n"
        for wrong in (["pause", "queue"], ["pause", "worker", "x"], ["resume", "queue"]):
            with pytest.raises(SystemExit):
                semel(*wrong)


WHO = (("olga", "operator", ""), ("sam", "submitter", ""), ("tanja", "operator", "acme"))


def issue(app: App, **wanted: str) -> str:
    store = app.ledger(awaited=False)
    issued = run_sync(store.write(tokens.issue, tokens.NewToken(**wanted), store.statement_context))
    run_sync(store.close())
    return issued.secret


def train() -> None: ...
