"""Real workers, one of which is killed and one stopped past its lease, and users with quotas: nothing is wrong."""

from __future__ import annotations

import os
import signal
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from msgspec.structs import replace

from history.working import Oracle, nothing, open_app
from semel import App, JobStore, Quota
from semel.errors import IllegalTransition, QuotaExceeded, RunNotFound, StoreUnavailable, UnknownModel
from semel.testing.history import Operation, RecordedApp, RecordedJobStore, Recorder, attempt, check, read
from support.databases import DATABASES, Databases, StoreUrls, database_url
from support.programs import Program, stop
from support.proxies import OutageProxy, outage_proxy
from support.waiting import eventually

WORK = "from history.working import work; work(url, oracle, folder, name)"
LIMIT = 3


class Site:
    """A database with workers, a user who submits, and an oracle in another database."""

    def __init__(self, url: str, oracle_url: str, folder: Path, stack: ExitStack) -> None:
        self.url, self.folder = url, folder
        self.oracle = Oracle(oracle_url)
        self.oracle.create()
        recorder = Recorder(folder / "history", "user")
        app = open_app(url, folder, nothing)
        stack.callback(app.close)
        self.app = RecordedApp(app, recorder, {"limited": LIMIT})
        self._stack = stack
        self.runs: list[str] = []
        self.workers: dict[int, Program] = {}

    def start(self, name: str) -> None:
        given = {"url": self.url, "oracle": self.oracle.url, "folder": str(self.folder), "name": name}
        worker = self._stack.enter_context(Program(WORK, **given))
        assert worker._process.pid is not None
        self.workers[worker._process.pid] = worker

    def submit(self, name: str, *, user: str = "") -> str:
        run = self.app.submit("work", {"name": name}, user=user, idempotency_key=name)
        self.runs.append(run.id)
        return run.id

    def waits(self, name: str) -> int:
        """The process in which the run waits."""
        place = self.folder / f"{name} pid"
        return int(eventually(lambda: place.exists() and place.read_text(), f"{name} waits"))

    def stop(self, pid: int) -> None:
        """Stop a process between two transactions: within one it would hold up everybody."""
        while True:
            stop(pid)
            if not self._in_transaction():
                return
            os.kill(pid, signal.SIGCONT)

    def _in_transaction(self) -> bool:
        if not self.url.startswith("sqlite"):
            with psycopg.connect(self.url) as connection:
                busy = (
                    "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND state <> 'idle'"
                    " AND pid <> pg_backend_pid()"
                )
                return connection.execute(busy).fetchone() is not None
        with closing(sqlite3.connect(self.url.removeprefix("sqlite:///"), timeout=0.1)) as file:
            try:
                file.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:
                return True
        return False

    def finish(self) -> None:
        """Wait until everything has ended, and look at it; then stop the workers."""
        for run in dict.fromkeys(self.runs):
            self.app.app.wait(run, timeout=60)
            self.app.get(run)
        self.app.usage("limited")
        for pid, worker in self.workers.items():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            worker._process.join()


@pytest.fixture(params=DATABASES)
def site(request: pytest.FixtureRequest, databases: Databases, tmp_path: Path) -> Any:
    with ExitStack() as stack:
        database = stack.enter_context(databases.empty(request.param))
        other = stack.enter_context(database_url(request, request.param))
        yield Site(database.url, other, tmp_path, stack)


def test_workers_that_are_killed_and_stopped(site: Site) -> None:
    (site.folder / "killed").touch()
    killed = site.submit("killed")
    site.start("first")
    os.kill(site.waits("killed"), signal.SIGKILL)
    (site.folder / "killed").unlink()
    site.app.app.set_quota("limited", Quota(max_concurrent=LIMIT))

    (site.folder / "stopped").touch()
    stopped = site.submit("stopped")
    site.start("second")
    sleeper = site.waits("stopped")
    site.stop(sleeper)
    (site.folder / "stopped").unlink()
    site.start("third")
    for number in range(6):
        with suppress(QuotaExceeded):
            site.submit(f"limited {number}", user="limited")
        site.submit(f"fails {number}")
        site.submit(f"fails {number}")
    assert site.app.app.wait(stopped, timeout=60).fence > 1
    os.kill(sleeper, signal.SIGCONT)
    site.finish()

    history = read(site.folder / "history").plus(site.oracle.effects())
    assert check(history) == []
    ends = [each for each in history.operations if each.verb == "finish" and each.subject == (stopped,)]
    assert (1, True) not in [(each.asked("fence"), each.told("accepted")) for each in ends]
    effects = [
        each.asked("fence") for each in history.operations if each.verb == "effect" and each.subject == (killed,)
    ]
    assert len(effects) == len(set(effects))  # a stopped worker's may come late
    assert len(effects) > 1


def test_reservations_of_many_processes(site: Site) -> None:
    """Processes reserve, consume and release at random; one is killed while it has a slot, which expires."""
    with ExitStack() as stack:
        given = {"url": site.url, "folder": str(site.folder / "history")}
        users = [stack.enter_context(Program(RESERVE, name=f"r{number}", **given)) for number in range(3)]
        assert [user.hear() for user in users] == ["ready"] * 3
        for user in users:
            user.tell("go")
        assert users[0].hear() == "holds a slot"
        os.kill(users[0]._process.pid or 0, signal.SIGKILL)
        assert [user.hear() for user in users[1:]] == ["done"] * 2
    jobs = RecordedJobStore(JobStore(site.url), Recorder(site.folder / "history", "last"))
    eventually(lambda: site.app.usage("reserving") == 0, "all slots are free again")
    assert jobs.reserve_job_slot("reserving", 2, 60)
    jobs.jobs.close()
    assert check(read(site.folder / "history")) == []


RESERVE = """
import random
from semel import JobStore
from semel.testing.history import RecordedJobStore, Recorder

store = JobStore(url)
store.release_reservation("warm up")
jobs = RecordedJobStore(store, Recorder(folder, name))
chance = random.Random(name)
tell("ready")
hear()
for number in range(30):
    reservation = jobs.reserve_job_slot("reserving", 2, 0.5)
    while reservation is None and name == "r0":  # the others end sometime
        reservation = jobs.reserve_job_slot("reserving", 2, 0.5)
    if reservation is None:
        continue
    if name == "r0" and number > 5:
        tell("holds a slot")
        hear()
    verb = chance.choice([jobs.consume_reservation, jobs.release_reservation])
    for _ in range(chance.choice([1, 2])):
        verb(reservation, user_id="reserving")
tell("done")
"""


def test_every_operation_of_an_app_is_recorded(databases: Databases, tmp_path: Path) -> None:
    with databases.empty("sqlite") as database:
        recorder = Recorder(tmp_path)
        app = RecordedApp(database.app, recorder, {"limited": 0})
        database.app.set_quota("limited", Quota(max_concurrent=0))
        with pytest.raises(QuotaExceeded):
            app.submit("train", {"number": 1}, user="limited")
        with pytest.raises(UnknownModel):
            app.submit("nothing")
        run = app.submit("train", {"number": 2}, idempotency_key="k")
        assert app.cancel(run.id).status == "CANCELLED"
        again = app.retry(run.id)
        database.finish(again)
        with pytest.raises(IllegalTransition):
            app.cancel(again.id)
        with pytest.raises(RunNotFound):
            app.get("nothing")
        assert app.get(run.id).status == "CANCELLED"
        assert app.get(again.id).status == "SUCCEEDED"
        with attempt(recorder, SimpleNamespace(run_id=run.id, fence=1)):  # type: ignore[arg-type]
            pass
    history = read(tmp_path)
    assert [(each.verb, each.answered) for each in history.operations] == [
        (verb, True)
        for verb in ["submit", "submit", "submit", "cancel", "submit", "cancel", "get", "get", "get", "attempt"]
    ]
    assert [each.told("refused") for each in history.operations[:2]] == [True, False]
    assert check(history) == []


def test_a_retry_is_recorded_as_a_submission_of_its_user(databases: Databases, tmp_path: Path) -> None:
    with databases.empty("sqlite") as database:
        app = RecordedApp(database.app, Recorder(tmp_path), {"u": 1})
        database.app.set_quota("u", Quota(max_concurrent=1))
        run = app.submit("train", {"number": 1}, user="u", idempotency_key="first")
        with pytest.raises(IllegalTransition):
            app.retry(run.id)
        app.cancel(run.id)
        again = app.retry(run.id, idempotency_key="again")
        assert app.retry(run.id, idempotency_key="later").id == again.id
        assert app.usage("u") == 1
        database.finish(again)
        assert app.retry(run.id, idempotency_key="later").id == again.id
        other = app.submit("train", {"number": 2}, user="u", idempotency_key="other")
        with pytest.raises(QuotaExceeded):
            app.retry(run.id, idempotency_key="too much")
        database.finish(other)
        for each in (run, again, other):
            app.get(each.id)
        assert app.usage("u") == 0
    history = read(tmp_path)
    retries = [each for each in history.operations if each.asked("retry_of")]
    assert [(each.subject, each.asked("key"), each.asked("limit")) for each in retries] == [
        (("u",), key, 1) for key in (None, "again", "later", "later", "too much")
    ]
    assert [each.told("refused") for each in retries] == [False, None, None, None, True]
    assert check(history) == []

    def changed(each: Operation) -> Operation:
        """As if a second retry with the same key had made another run."""
        return replace(each, answer=(each.answer or {}) | {"run": other.id}) if each is retries[3] else each

    wrong = replace(history, operations=[changed(each) for each in history.operations])
    assert [each.rule for each in check(wrong)] == ["two-runs-of-one-key"]


def test_submissions_whose_connections_are_cut(urls: StoreUrls, tmp_path: Path) -> None:
    """Whoever does not know whether a run was stored submits it again with its key: each key has one run."""
    recorder = Recorder(tmp_path)
    with (
        outage_proxy(urls["postgres"]) as (proxy, url),
        cutting(proxy),
        closing_app(url, tmp_path, retry_for=0) as app,
    ):
        user = RecordedApp(app, recorder)
        count = failures = 0
        while failures < 5:  # calls that failed, whether or not their run was stored
            count += 1
            while True:
                try:
                    user.submit("work", {"name": str(count)}, idempotency_key=f"cut {count}")
                except StoreUnavailable:
                    failures += 1
                else:
                    break
    with closing_app(urls["postgres"], tmp_path) as app:
        user = RecordedApp(app, recorder)
        for run in app.runs(limit=1000).runs:
            user.cancel(run.id)
            user.get(run.id)
        assert len(app.runs(limit=1000).runs) == count
    history = read(tmp_path)
    assert sum(not each.answered for each in history.operations) == failures
    assert check(history) == []


@contextmanager
def cutting(proxy: OutageProxy) -> Iterator[None]:
    """Cut all connections again and again until the end of the block, ever more seldom: a slow machine gets on, too."""
    over = threading.Event()
    proxy.up()

    def cut() -> None:
        pause = 0.03
        while not over.wait(pause):
            pause = min(1.0, 1.3 * pause)
            proxy.down()
            proxy.up()

    thread = threading.Thread(target=cut)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def closing_app(url: str, folder: Path, **options: Any) -> Iterator[App]:
    app = App(url, artifacts=folder, **options)
    app.model("work")(nothing)
    yield app
    app.close()
