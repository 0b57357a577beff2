"""A database that is away: who starts waits for it, who runs goes on, and the log tells of it in few lines."""

import asyncio
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import httpx
import pytest

from semel import App, Context
from semel._concurrency import retry
from semel.cli import main as semel_command
from semel.runs.leader import TERM
from semel.runs.store import maintenance
from semel.runs.transports import DatabaseTransport
from semel.runs.worker import Worker
from semel.runs.worker.sweeper import Sweeper
from semel.service import Settings
from semel.service.webhooks import dispatcher
from support.proxies import OutageProxy, outage_proxy
from support.serve_command import command, environment
from support.service import serve
from support.waiting import eventually
from support.warm_python import WarmPython
from support.webhooks import receiving


@pytest.fixture
def line(postgres_url: str) -> Iterator[tuple[OutageProxy, str]]:
    assert semel_command(["migrate", postgres_url]) == 0
    with outage_proxy(postgres_url) as found:
        yield found


def app_of(url: str, folder: Path, **options: object) -> App:
    app = App(url, artifacts=folder, dedupe_window=0)

    @app.model("wait", **options)  # type: ignore[arg-type]
    async def wait(ctx: Context, seconds: float = 0.0) -> None:
        await asyncio.sleep(seconds)

    return app


# -- at the start ----------------------------------------------------------------------------------------------------


class Command:
    """`semel` with some arguments, until the end of the block."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._said = folder / "said.txt"
        with self._said.open("w") as said:
            self.process = WarmPython(
                [sys.executable, "-m", "semel.cli", *arguments],
                cwd=folder,
                env=environment(TMPDIR=str(folder)),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def said(self) -> str:
        return self._said.read_text()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        finally:
            self.process.kill()


@pytest.mark.parametrize(
    ("arguments", "works"),
    [
        (("worker", "support.apps.serve_app:app"), "worker started"),
        (("serve", "support.apps.serve_app:app", "--port", "0", "--no-worker"), "semel serves"),
    ],
    ids=["worker", "serve"],
)
def test_a_process_that_starts_while_the_database_is_away_waits_for_it_with_one_line(
    arguments: tuple[str, ...], works: str, line: tuple[OutageProxy, str], tmp_path: Path
) -> None:
    cut, url = line
    with Command(tmp_path, *arguments, "--db", url) as started:
        eventually(lambda: "waiting for it" in started.said, "it says that it waits")
        time.sleep(1.0)  # some tries
        assert started.process.poll() is None
        assert works not in started.said
        cut.up()
        eventually(lambda: works in started.said, "it works")
        assert started.said.count("the database is unavailable, waiting for it for up to 60 s") == 1
        assert len(re.findall("unavailable", started.said)) == 1


def test_a_worker_that_is_started_by_a_program_waits_for_the_database_too(
    line: tuple[OutageProxy, str], tmp_path: Path
) -> None:
    """As long as its operations are retried for: the database may go away between a check and the start."""
    cut, url = line
    app = app_of(url, tmp_path)
    worker = Worker(app, processes=0, threads=0)

    async def scenario() -> None:
        working = asyncio.create_task(worker.serve())
        await asyncio.sleep(1.0)  # some tries
        assert not working.done()
        cut.up()
        while not await app.aio.workers():
            assert not working.done(), working.exception()
            await asyncio.sleep(0.05)
        worker.stop()
        await asyncio.wait_for(working, 60)

    asyncio.run(asyncio.wait_for(scenario(), 60))


@pytest.mark.parametrize("kind", ["worker", "serve", "sweep"])
@pytest.mark.parametrize("seconds", ["0", "3"])
def test_it_exits_when_the_time_to_wait_is_over(
    kind: str, seconds: str, line: tuple[OutageProxy, str], tmp_path: Path
) -> None:
    port = ("--port", "0") if kind == "serve" else ()
    ended = command(
        kind, "support.apps.serve_app:app", "--db", line[1], "--wait-for-database", seconds, *port, cwd=tmp_path
    )
    assert ended.returncode == 1
    assert "semel: the database cannot be reached" in ended.stderr
    assert ("waiting for it" in ended.stderr) == (seconds != "0")


def test_what_waiting_does_not_help_is_said_at_once(postgres_url: str, tmp_path: Path) -> None:
    url = postgres_url.replace(postgres_url.rpartition("/")[2].partition("?")[0], "not_there")
    ended = command("worker", "support.apps.serve_app:app", "--db", url, cwd=tmp_path)
    assert ended.returncode != 0
    assert "waiting for it" not in ended.stderr


# -- while it works --------------------------------------------------------------------------------------------------


def test_a_worker_logs_an_outage_when_it_begins_and_when_it_ends(
    line: tuple[OutageProxy, str], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many of its parts meet it: the heartbeat, the leases, the ends of runs, their lines, the sweeper."""
    monkeypatch.setattr(retry, "EVERY", 2.0)
    cut, url = line
    cut.up()
    app = app_of(url, tmp_path, lease=300)
    with app.working(processes=0, sweep_every=0.2, poll=0.2):
        run = app.submit("wait", {"seconds": 2})
        eventually(lambda: app.get(run.id).status == "RUNNING", "it runs")
        caplog.clear()
        cut.down()
        eventually(lambda: len(_about(caplog)) >= 2, "the outage, and that it lasts")
        cut.up()
        eventually(lambda: "available again" in _about(caplog)[-1], "the end of the outage")
        eventually(lambda: app.get(run.id).status == "SUCCEEDED", "what ended meanwhile is written")
    app.close()
    begins, *lasts, ends = _about(caplog)
    assert re.match(r"the database is unavailable; active runs continue while their leases last", begins)
    assert all(re.match(r"the database has been unavailable for \d+ s;", each) for each in lasts)
    assert re.fullmatch(r"the database is available again after \d+ s", ends)
    told = [record.getMessage() for record in caplog.records if record.levelname != "INFO"]
    # A listener of another test may still look for a database that was dropped.
    assert [said for said in told if said not in _about(caplog) and "does not exist" not in said] == []


def _about(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "semel.database"]


def test_a_server_logs_an_outage_when_it_begins_and_when_it_ends(
    line: tuple[OutageProxy, str], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the one that delivers events, looks after uploads, and is asked by somebody meanwhile."""
    monkeypatch.setattr(dispatcher, "POLL", 0.05)
    cut, url = line
    cut.up()
    app = app_of(url, tmp_path)
    with ExitStack() as stack:
        receiver = stack.enter_context(receiving())
        service = stack.enter_context(serve(app, Settings(private_webhooks=True)))
        client: httpx.Client = stack.enter_context(service.client())
        assert client.post("/admin/subscriptions", json={"url": receiver.url}).status_code == 201
        caplog.clear()
        cut.down()
        eventually(lambda: _about(caplog), "the outage")
        for _ in range(3):
            assert client.get("/runs").status_code == 503
        cut.up()
        eventually(lambda: "available again" in _about(caplog)[-1], "its end")
    app.close()
    assert len(_about(caplog)) == 2
    told = {record.name for record in caplog.records if record.levelname != "INFO"}
    assert told <= {"semel.database", "semel.access"}


def test_a_listener_that_fails_alone_says_what_that_means_for_runs(
    line: tuple[OutageProxy, str], postgres_url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sqlalchemy import make_url

    from semel.runs.worker import notifier
    from semel.runs.worker.notifier import ChangeNotifier

    monkeypatch.setattr(notifier, "PATIENCE", 0.2)
    cut, url = line
    well = retry.Outage(notifier._log, "the database", "it does not matter")

    async def watch() -> None:
        looks = asyncio.Event()
        watching = ChangeNotifier(make_url(url), looks.set, poll=10, database=well)
        watching.start()
        try:
            await asyncio.wait_for(looks.wait(), 30)  # a broken line is a reason to look
            await asyncio.to_thread(eventually, lambda: caplog.records, "it says so")
            cut.up()
            await asyncio.to_thread(eventually, lambda: "available again" in caplog.messages[-1], "its end")
        finally:
            watching.stop()

    asyncio.run(watch())
    said = (
        "the connection on which PostgreSQL announces runs is unavailable; a new run starts when this worker next looks"
    )
    assert [said in each for each in caplog.messages] == [True, False]
    assert "every 10 s" in caplog.messages[0]


def test_leases_that_are_lost_together_are_one_line(
    line: tuple[OutageProxy, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cut, url = line
    cut.up()
    app = app_of(url, tmp_path, lease=8)
    with app.working(processes=0, sweep_every=None):
        runs = app.submit_many([{"model": "wait", "parameters": {"seconds": 600 + number}} for number in range(30)])
        eventually(lambda: app.backlog().running == len(runs), "they run")
        cut.down()
        eventually(lambda: [each for each in caplog.messages if "lost" in each], "they are lost")
        time.sleep(0.5)  # for lines that should not come
        cut.up()
    lost = [each for each in caplog.messages if "lost" in each and "worker" not in each.partition(" ")[0]]
    assert len([each for each in lost if "lease" in each]) == 1, lost
    assert "30 leases were lost" in lost[0]
    app.close()


# -- who sweeps ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_the_next_sweeper_takes_over_a_dead_ones_term_within_five_seconds(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """By the times that are promised: the term that a dead one leaves behind, and when the next one asks."""
    url = request.getfixturevalue(f"{kind}_url")
    assert semel_command(["migrate", url]) == 0
    app = app_of(url, tmp_path)

    async def elect() -> tuple[float, float]:
        ledger = app.ledger(awaited=True)
        try:
            dead, heir = (
                Sweeper(ledger, name, transport=DatabaseTransport(), hooks=app.hooks, interval=5.0)
                for name in ("dead", "heir")
            )
            assert await dead.elected()
            assert not await heir.elected()
            return await ledger.read(maintenance.term_left, "sweeper", "heir", ledger.statement_context), heir.pause()
        finally:
            await ledger.close()

    left, pause = asyncio.run(elect())
    assert 0 < left <= TERM
    assert 0 < pause <= TERM + 0.2 < 5
    app.close()


def test_a_sweeper_asks_for_its_next_term_while_its_term_lasts(sqlite_url: str, tmp_path: Path) -> None:
    app = app_of(sqlite_url, tmp_path)

    async def elect() -> float:
        ledger = app.ledger(awaited=True)
        sweeper = Sweeper(ledger, "me", transport=DatabaseTransport(), hooks=app.hooks, interval=1000.0)
        try:
            assert await sweeper.elected()
            sweeper._works_at = time.monotonic() + 1000
            return sweeper.pause()
        finally:
            await ledger.close()

    assert 0 < asyncio.run(elect()) <= 0.9 * TERM
    app.close()


# -- whose time ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_the_lines_of_a_run_carry_the_databases_time(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Which is far from this machine's here."""
    from semel.testing import FakeClock

    url = request.getfixturevalue(f"{kind}_url")
    assert semel_command(["migrate", url]) == 0
    clock = FakeClock(1_709_210_096.0)
    app = App(url, artifacts=tmp_path, clock=clock)

    @app.model("say")
    async def say(ctx: Context) -> None:
        ctx.log.info("one")
        ctx.log.info("two")

    with app.working(processes=0):
        run = app.wait(app.submit("say").id, timeout=60)
    lines = app.logs(run.id)
    assert [each.text for each in lines] == ["one", "two"]
    assert run.started_us is not None
    for line in lines:
        assert run.started_us <= line.at_us < run.started_us + 60_000_000
    app.close()
