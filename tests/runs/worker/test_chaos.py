"""Workers are killed at random under load: every run ends, once, and everything that is counted agrees."""

import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from semel import App, Quota
from semel.cli import main as semel_command
from semel.runs.types import Run
from support.apps.chaos_app import make_app

RUNS = 2000
WORKERS = 3
KILLS = 10
PATIENCE = 100


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest) -> str:
    url: str = request.getfixturevalue(f"{request.param}_url")
    assert semel_command(["migrate", url]) == 0
    return url


def all_runs(app: App) -> list[Run]:
    page = app.runs(limit=1000)
    found = page.runs
    while page.next is not None:
        page = app.runs(limit=1000, cursor=page.next)
        found += page.runs
    return found


def started(url: str, folder: Path) -> subprocess.Popen[bytes]:
    program = Path(__file__).parents[2] / "support" / "apps" / "chaos_app.py"
    command = [sys.executable, str(program), url, str(folder / "artifacts"), str(folder / "effects")]
    with (folder / "workers.log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)


def kill_at_random(app: App, url: str, folder: Path) -> None:
    """Three workers, of which one at a time is killed and replaced, until all is done."""
    workers = [started(url, folder) for _ in range(WORKERS)]
    kills = 0
    deadline = time.monotonic() + PATIENCE
    try:
        while (left := app.backlog()) and left.pending + left.running:
            assert time.monotonic() < deadline, f"{left}\n{(folder / 'workers.log').read_text()[-3000:]}"
            time.sleep(random.uniform(0.1, 0.5))  # the moment of a kill is what is tested
            if kills < KILLS and left.running:
                victim = workers.pop(random.randrange(len(workers)))
                victim.send_signal(signal.SIGKILL)
                victim.wait()
                workers.append(started(url, folder))
                kills += 1
    finally:
        for worker in workers:
            worker.terminate()
        codes = [worker.wait(30) for worker in workers]
    assert kills >= KILLS // 2
    assert codes == [0] * WORKERS


@pytest.mark.timeout(240)
def test_every_run_ends_once_whoever_is_killed(url: str, tmp_path: Path) -> None:
    app = make_app(url, str(tmp_path / "artifacts"), str(tmp_path / "effects"))
    app.set_quota("u", Quota(max_concurrent=RUNS))
    asked = [
        {"model": "blocking" if number % 20 == 7 else "async", "parameters": {"number": number}, "user": "u"}
        for number in range(RUNS)
    ]
    submitted = app.submit_many(asked)
    assert all(isinstance(run, Run) for run in submitted)
    assert app.usage("u").concurrent == RUNS

    kill_at_random(app, url, tmp_path)

    runs = all_runs(app)
    assert Counter(run.status for run in runs) == {"SUCCEEDED": RUNS}
    assert app.usage("u").concurrent == 0, "a slot leaked"
    effects = Counter(tuple(line.split()) for line in (tmp_path / "effects").read_text().splitlines())
    assert [place for place, times in effects.items() if times > 1] == [], "executed twice under one fence"
    for run in runs:
        agrees(app, run, effects)
    assert sum(each.total for each in app.summary()) == RUNS
    assert app.backlog().pending == app.backlog().running == 0
    assert sum(run.losts for run in runs) > 0, "nobody was killed at work"
    app.close()


def agrees(app: App, run: Run, effects: "Counter[tuple[str, ...]]") -> None:
    """The row, its events, its result and its effect tell the same story."""
    result = app.result(run.id)
    assert result == {"number": run.parameters["number"], "fence": run.fence}
    assert effects[run.id, str(run.fence)] == 1
    if run.model == "blocking":
        assert b"".join(app.artifact(run.id, "fence.txt")) == str(run.fence).encode()
    steps = Counter(step.step for step in app.timeline(run.id))
    assert steps["created"] == steps["succeeded"] == 1
    assert steps["leased"] == run.fence == run.attempts + steps["returned"]
    assert steps["lost"] == run.losts
    assert steps["retried"] == run.errors
    assert run.attempts == 1 + run.losts + run.errors
