"""What is RQ's own: how a message finds its app, what it leaves in Redis, and the sweeper beside the submitter."""

import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
from redis import Redis
from rq.job import Job
from rq.registry import FailedJobRegistry

from semel.errors import AppNotFound, InvalidRequest
from semel.runs.app import App
from semel.runs.rq import RqTransport
from semel.runs.transports.broker import AppLocation, choose, find, location_of, perform
from semel.runs.types import new_id
from support import servers
from support.transports import PATIENCE, Ground, Rq, until

RQ = Rq()


@pytest.fixture
def alone(tmp_path: Path, redis_url: str) -> Iterator[Ground]:
    """A database and a Redis without workers."""
    urls = {"sqlite": f"sqlite:///{tmp_path / 'semel.db'}"}
    with Ground(tmp_path, transport="rq", redis=redis_url, urls=urls, sweep_every=3600) as made:
        yield made


def test_a_worker_looks_after_its_run_for_what_nobody_was_told_of_where_no_sweeper_lives(alone: Ground) -> None:
    app = alone.app("sqlite")
    later = app.submit("add_in_loop", {"a": 1, "b": 1}, delay=0.01)
    run = app.submit("add_in_loop", {"a": 1, "b": 2})
    app.transport.close()
    queue = RQ.queue(alone)
    queue.empty()
    assert perform(app, run.id, sweeps=True)
    assert [job.args[0] for job in queue.jobs] == [later.id]
    assert not perform(app, run.id, sweeps=True)


def test_closing_leaves_no_sweeper_behind_and_the_next_submission_starts_one(alone: Ground) -> None:
    def sweepers() -> set[int | None]:
        return {thread.ident for thread in threading.enumerate() if thread.name == "semel-sweeper"}

    app = alone.app("sqlite")
    app.transport = RqTransport(alone.settings["redis"], app, sweep_every=0.002)
    others = sweepers()
    for number in range(30):
        app.submit("add_in_loop", {"a": 1, "b": number}, delay=0.001)
        assert sweepers() - others
        time.sleep(random.uniform(0, 0.01))  # so that the sweeper is met at whatever it does
        app.transport.close()
    until(lambda: sweepers() <= others, "the end of the sweepers")


def test_an_address_names_the_module_that_made_the_app_and_no_password(
    alone: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = alone.app("sqlite")
    importer = ModuleType("importer")
    vars(importer)["borrowed"] = app
    monkeypatch.setitem(sys.modules, "importer", importer)
    assert isinstance(app.transport, RqTransport)
    assert app.transport.location().references == [("transport_app:sqlite_app", None)]
    monkeypatch.delitem(sys.modules, "transport_app")
    assert location_of(app, "transport_app").references == [("importer:borrowed", None)]
    monkeypatch.undo()
    ways = ["postgresql://ann:secret@db/semel", "postgresql://bob:other@db/semel", "postgresql://ann:secret@db/else"]
    first, second, third = (location_of(App(url)) for url in ways)
    assert "secret" not in repr(first)
    assert first.digest == second.digest != third.digest


def test_a_message_finds_its_app_by_name_then_by_database_then_because_there_is_only_one(alone: Ground) -> None:
    app = alone.app("sqlite")
    other = App("postgresql://db/other")
    assert find(AppLocation([("transport_app:sqlite_app", None)], "another digest")) is app
    assert choose([other, app], location_of(app)) is app
    assert choose([other], location_of(app)) is other
    with pytest.raises(AppNotFound, match=r"x:app .cannot import model.*Start the worker where"):
        choose([app, other], AppLocation([("x:app", None)], "0"), ["cannot import model"])


def test_a_url_that_is_none_is_refused_when_the_app_is_made(sqlite_url: str) -> None:
    with pytest.raises(InvalidRequest, match="this Redis URL cannot be used"):
        App(sqlite_url, transport="rq", redis="localhost")


PROGRAM = """
import semel

app = semel.App({url!r}, transport="rq", redis={redis!r})

@app.model("greet")
def greet(name: str) -> str:
    return f"hello {{name}}"

if __name__ == "__main__":
    print(app.submit("greet", {{"name": "ann"}}).id)
"""


@dataclass
class Left:
    """What a worker left that did what there was; it was started as ``rq worker --burst semel``."""

    ground: Ground
    ids: dict[str, str]
    jobs: list[Job]
    broken: Job


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory, redis_server: servers.Redis) -> Iterator[Left]:
    folder = tmp_path_factory.mktemp("rq")
    urls = {kind: f"sqlite:///{folder / kind}.db" for kind in ("unnamed", "sqlite")}
    times = {"sweep_every": 3600, "tell_again": 3600}
    with Ground(folder, transport="rq", redis=redis_server.database(), urls=urls, **times) as ground:
        transport = ground.app("sqlite").transport
        assert isinstance(transport, RqTransport)
        transport.send({"semel": [new_id()]}, AppLocation([("no_such_module:app", None)], "0"))
        ids = {kind: ground.app(kind).submit("add_in_loop", {"a": 1, "b": 1}).id for kind in urls}
        ids["program"] = submitted_by_a_program(ground)
        broken, *jobs = RQ.queue(ground).jobs
        assert RQ.start(ground, "--burst", "--quiet").wait(PATIENCE) == 0, ground.output()
        yield Left(ground, ids, jobs, broken)


def submitted_by_a_program(ground: Ground) -> str:
    program = ground.folder / "one_file.py"
    program.write_text(PROGRAM.format(url=ground.settings["urls"]["sqlite"], redis=ground.settings["redis"]))
    done = subprocess.run([sys.executable, program], check=True, capture_output=True, text=True, timeout=60)
    return done.stdout.strip()


def test_a_message_has_no_time_limit_and_leaves_nothing_in_redis(left: Left) -> None:
    assert {(job.timeout, job.result_ttl) for job in left.jobs} == {(-1, 0)}
    assert {job.args[0] for job in left.jobs} == set(left.ids.values())
    keys = [key.decode() for key in Redis.from_url(left.ground.settings["redis"]).keys("rq:*")]
    assert not [key for key in keys for job in left.jobs if job.id in key]


def test_an_app_is_found_by_its_name(left: Left) -> None:
    app = left.ground.app("sqlite")
    assert app.get(left.ids["sqlite"]).status == "SUCCEEDED", left.ground.output()


def test_an_app_that_no_module_names_is_found_by_its_models_and_its_database(left: Left) -> None:
    app = left.ground.app("unnamed")
    assert location_of(app).references == [("transport_app:add", None)]
    assert app.get(left.ids["unnamed"]).status == "SUCCEEDED", left.ground.output()


def test_a_program_of_one_file_is_found_by_its_path(left: Left) -> None:
    app = left.ground.app("sqlite")
    assert app.result(left.ids["program"]) == "hello ann", left.ground.output()


def test_an_app_that_cannot_be_imported_is_a_failed_job_that_says_so(left: Left) -> None:
    assert FailedJobRegistry(queue=RQ.queue(left.ground)).get_job_ids() == [left.broken.id]
    result = left.broken.latest_result()
    assert result is not None
    assert "No module named 'no_such_module'" in (result.exc_string or "")
    assert "Start the worker where" in (result.exc_string or "")
