"""Runs over Celery, with stock workers: a message says "look", and whatever becomes of it, a run is executed once."""

import base64
import json
import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from celery import Celery, current_app
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from redis import Redis

from semel.cli import main as semel_command
from semel.runs import celery as semel_celery
from semel.runs.app import App
from semel.runs.celery import CeleryTransport
from semel.runs.types import Run, new_id
from support import servers
from support.programs import outcome
from support.transports import Ground, until

KINDS = ["sqlite", "postgres"]
GENERIC, INSTALLED = "celery", "installed"


def celery_worker(ground: Ground, *options: str) -> subprocess.Popen[bytes]:
    """``-A semel.runs.celery`` for apps that only know a broker, ``-A`` the project for those installed in it."""
    generic = ["semel.runs.celery", "-b", ground.settings["redis"]]
    where = generic if ground.settings["transport"] == GENERIC else ["transport_app:celery_app"]
    quiet = ("--without-gossip", "--without-mingle", "--loglevel", "INFO")
    return ground.start("celery", "-A", *where, "worker", "-Q", "semel", *quiet, *options)


@pytest.fixture(scope="module", params=[GENERIC, INSTALLED])
def ground(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    redis_server: servers.Redis,
    postgres_server: servers.Postgres,
) -> Iterator[Ground]:
    folder = tmp_path_factory.mktemp("celery")
    postgres_url = postgres_server.database()
    assert semel_command(["migrate", postgres_url]) == 0
    urls = {"sqlite": f"sqlite:///{folder / 'semel.db'}", "postgres": postgres_url}
    with Ground(folder, transport=request.param, redis=redis_server.database(), urls=urls) as made:
        celery_worker(made, "-c", "2", "-P", "prefork" if request.param == GENERIC else "threads")
        yield made
    postgres_server.drop(postgres_url)


@pytest.fixture
def alone(tmp_path: Path, redis_url: str) -> Iterator[Ground]:
    """A database and a Redis without workers."""
    urls = {"sqlite": f"sqlite:///{tmp_path / 'semel.db'}"}
    with Ground(tmp_path, transport=GENERIC, redis=redis_url, urls=urls) as made:
        yield made


def redis_of(ground: Ground) -> Redis:
    return Redis.from_url(ground.settings["redis"])


def control(ground: Ground) -> Celery:
    return Celery(broker=ground.settings["redis"], set_as_current=False)


def over(ground: Ground, app: App, run: Run) -> Run:
    try:
        return app.wait(run.id, timeout=60)
    except TimeoutError as error:
        raise AssertionError(ground.output()[-8000:]) from error


def at_rest(ground: Ground) -> None:
    """Wait until every message has been dealt with: none waits, and none is being worked on."""
    redis = redis_of(ground)
    until(lambda: not redis.llen("semel") and not redis.hlen("unacked"), "the end of all messages")


@pytest.mark.parametrize("kind", KINDS)
def test_stock_workers_execute_sync_async_and_threaded_models(ground: Ground, kind: str) -> None:
    app = ground.app(kind)
    runs = [app.submit(model, {"a": 2, "b": 3}, dedupe=False) for model in ("add", "add_in_loop", "add_in_thread")]
    for run in runs:
        ended = over(ground, app, run)
        assert (ended.status, ended.attempts, app.result(run.id)) == ("SUCCEEDED", 1, 5)
        assert len(ground.notes(run.id)) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_messages_that_are_doubled_or_about_runs_that_are_over_change_nothing(ground: Ground, kind: str) -> None:
    app = ground.app(kind)
    finished, last = (app.submit("add_in_loop", {"a": 1, "b": 1}, dedupe=False) for _ in range(2))
    cancelled = app.submit("add_in_loop", {"a": 1, "b": 1}, delay=3600, dedupe=False)
    app.cancel(cancelled.id)
    before = over(ground, app, finished)

    app.transport.announce([(each, "default") for each in (finished.id, cancelled.id, new_id(), "nonsense")])
    app.transport.announce([(last.id, last.queue)] * 3)

    assert over(ground, app, last).attempts == 1
    at_rest(ground)
    assert app.get(finished.id) == before
    assert app.get(cancelled.id).status == "CANCELLED"
    assert [len(ground.notes(run.id)) for run in (finished, last, cancelled)] == [1, 1, 0]


def test_a_message_that_was_lost_is_sent_again_by_the_sweeper(ground: Ground) -> None:
    app = ground.app("postgres")
    run = app.submit("add_in_loop", {"a": 1, "b": 1}, queue="apart", dedupe=False)
    redis = redis_of(ground)
    assert redis.delete("semel-apart") == 1
    until(lambda: redis.llen("semel-apart"), "the second announcement")
    control(ground).control.add_consumer("semel-apart")
    ended = over(ground, app, run)
    assert (ended.status, ended.attempts, len(ground.notes(run.id))) == ("SUCCEEDED", 1, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_retried_after_its_backoff_even_when_its_submitter_has_gone(ground: Ground, kind: str) -> None:
    app = ground.app(kind)
    run = app.submit("flaky", dedupe=False)
    app.transport.close()  # and with it the sweeper of this process
    ended = over(ground, app, run)
    assert (ended.status, ended.attempts, app.result(run.id)) == ("SUCCEEDED", 2, 2)


@pytest.mark.parametrize("ground", [GENERIC], indirect=True)
def test_the_run_of_a_killed_pool_process_is_executed_again_and_only_the_new_fence_counts(ground: Ground) -> None:
    app = ground.app("sqlite")
    run = app.submit("slow", {"gate": "never"}, dedupe=False)
    ((_, fence, process),) = until(lambda: ground.notes(run.id, "begun"), "the first attempt")
    os.kill(process, signal.SIGKILL)
    ended = over(ground, app, run)
    assert (ended.status, ended.attempts, ended.losts) == ("SUCCEEDED", 2, 1)
    assert app.result(run.id) == ended.fence > fence
    assert [noted[:2] for noted in ground.notes(run.id)] == [(2, ended.fence)]


@pytest.mark.parametrize("pool", ["prefork", "solo"])
def test_sigterm_lets_the_run_finish(alone: Ground, pool: str) -> None:
    app = alone.app("sqlite")
    gate = alone.folder / "gate"
    run = app.submit("slow", {"gate": str(gate)})
    worker = celery_worker(alone, "-c", "1", "-P", pool)
    until(lambda: alone.notes(run.id, "begun"), "the start of the run")
    worker.send_signal(signal.SIGTERM)
    until(lambda: "Warm shutdown" in alone.output(), "the warm shutdown")
    gate.touch()
    assert worker.wait(60) == 0, alone.output()
    ended = app.get(run.id)
    assert (ended.status, ended.attempts) == ("SUCCEEDED", 1), alone.output()


def test_a_message_holds_the_run_and_where_its_app_is_and_no_secret(alone: Ground) -> None:
    run = alone.app("sqlite").submit("add", {"a": 1, "b": 1})
    (raw,) = redis_of(alone).lrange("semel", 0, -1)
    message = json.loads(raw)
    (run_id, where), _, _ = json.loads(base64.b64decode(message["body"]))
    assert (message["headers"]["task"], run_id) == ("semel.run", run.id)
    assert where["references"] == [["transport_app:sqlite_app", None]]
    assert alone.settings["urls"]["sqlite"] not in raw.decode() + json.dumps(where)


def test_other_queues_have_names_of_their_own(alone: Ground) -> None:
    app = alone.app("sqlite")
    app.submit_many([{"model": "add", "parameters": {"a": 1, "b": n}, "queue": q} for n, q in enumerate("xyx")])
    assert [redis_of(alone).llen(f"semel-{name}") for name in "xy"] == [2, 1]


def test_runs_that_nobody_executes_do_not_fill_the_broker_with_messages(alone: Ground) -> None:
    app = alone.app("sqlite")
    waiting = [(run.id, run.queue) for run in (app.submit("add", {"a": 1, "b": n}) for n in range(3))]
    for _ in range(5):
        assert app.transport.announce(waiting, again=True)
    assert redis_of(alone).llen("semel") == 3
    assert app.transport.announce([*waiting, (new_id(), "default")], again=True)
    assert app.transport.announce([(new_id(), "never-used")], again=True)
    assert [redis_of(alone).llen(queue) for queue in ("semel", "semel-never-used")] == [7, 1]


def test_a_broker_that_is_away_at_submit_delays_the_message_and_loses_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    urls = {"sqlite": f"sqlite:///{tmp_path / 'semel.db'}"}
    with servers.redis() as server, Ground(tmp_path, transport=GENERIC, redis=server.url, urls=urls) as ground:
        app = ground.app("sqlite")
        app.submit("add", {"a": 1, "b": 1})
        server.stop()
        began = time.monotonic()
        run = app.submit("add", {"a": 1, "b": 2})
        assert time.monotonic() - began < 6
        assert app.get(run.id).status == "PENDING"
        assert f"run {run.id} could not be announced" in caplog.text
        server.start()
        redis = redis_of(ground)
        redis.delete("semel")
        until(lambda: redis.llen("semel") >= 2, "the announcement")


def test_a_broker_that_never_answers_costs_submitters_seconds_and_only_the_first_of_them(alone: Ground) -> None:
    app = alone.app("sqlite")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        app.transport.close()
        app.transport = CeleryTransport(f"redis://127.0.0.1:{silent.getsockname()[1]}/0", app)
        began = time.monotonic()
        first = app.submit("add", {"a": 1, "b": 1})
        middle = time.monotonic()
        second = app.submit("add", {"a": 1, "b": 2})
        assert middle - began < 8
        assert time.monotonic() - middle < 1
        app.transport.close()
    assert [app.get(run.id).status for run in (first, second)] == ["PENDING", "PENDING"]


def test_the_users_own_celery_app_stays_the_current_one(alone: Ground) -> None:
    assert current_app.main != "semel"
    assert semel_celery.worker_app is not current_app._get_current_object()


def test_the_task_is_acknowledged_late_and_neither_retried_nor_kept(sqlite_url: str) -> None:
    celery_app = Celery(set_as_current=False)
    semel_celery.install(celery_app, App(sqlite_url))
    for each in (celery_app, semel_celery.worker_app):
        task = each.tasks["semel.run"]
        assert (task.acks_late, task.ignore_result, task.max_retries) == (True, True, 0)


def test_a_forked_process_gets_a_connection_of_its_own(sqlite_url: str, redis_url: str) -> None:
    connections, messages = outcome(
        """
        import os
        from redis import Redis
        from semel.runs.app import App
        from semel.runs.types import new_id
        app = App(sqlite_url, transport="celery", redis=redis_url)
        redis = Redis.from_url(redis_url)
        def connections():
            return {each["id"] for each in redis.client_list() if each["db"] == redis_url.rpartition("/")[2]}
        assert app.transport.announce([(new_id(), "default")])
        before = connections()
        child = os.fork()
        if not child:
            done = app.transport.announce([(new_id(), "default")]) and len(connections() - before) >= 1
            os._exit(0 if done else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert app.transport.announce([(new_id(), "default")])
        tell((before <= connections(), redis.llen("semel")))
        app.close()
        """,
        sqlite_url=sqlite_url,
        redis_url=redis_url,
    )
    assert connections
    assert messages == 3


def test_the_extra_brings_what_celery_needs_for_redis() -> None:
    """Celery's transport is imported with nothing but what the extra asks for, and what that asks for."""
    extras = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    brought: set[str] = set()
    asked = [Requirement(each) for each in [*extras["celery"], *extras["redis"]]]
    while asked:
        wanted = asked.pop()
        name = canonicalize_name(wanted.name)
        if name == "semel" or (wanted.marker and not wanted.marker.evaluate()):
            continue
        with suppress(PackageNotFoundError):
            needs = [Requirement(each) for each in requires(name) or []]
            plain = [each for each in needs if each.marker is None or each.marker.evaluate({"extra": ""})]
            more = [each for each in needs if each.marker and not each.marker.evaluate({"extra": ""})]
            more = [each for each in more if any(each.marker.evaluate({"extra": extra}) for extra in wanted.extras)]
            asked += [Requirement(str(each).partition(";")[0]) for each in more]
            asked += [] if name in brought else plain
            brought.add(name)
    lacking = [
        module
        for module, owners in packages_distributions().items()
        if not {canonicalize_name(owner) for owner in owners} & brought
    ]
    done = subprocess.run(
        [sys.executable, "-c", _IMPORTS.format(lacking=set(lacking))], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


_IMPORTS = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {lacking!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
import kombu.transport.redis, celery.backends.redis
assert kombu.transport.redis.redis is not None
"""
