"""Every scenario in its short form: a third of a second for each phase. `./dev chaos` plays them for longer."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace
from typing import Any

import pytest

from chaos.__main__ import line, main, say
from chaos.program import CALL, append, lines
from chaos.scenarios import SCENARIOS, Theatre
from chaos.stage import Account, HostClock, Stage, clock_library, count_outdated, judge_calls, migrated
from semel import Once

SEED = 1
SECONDS = 0.3
RATE = 15.0
"""Less than `./dev chaos` submits: nobody looks at the throughput here."""


@pytest.fixture(scope="module")
def theatre(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Theatre]:
    with ExitStack() as stack:
        yield Theatre(tmp_path_factory.mktemp("chaos"), stack)


@pytest.mark.parametrize("name", SCENARIOS)
def test_nothing_is_lost_doubled_or_stuck(name: str, theatre: Theatre) -> None:
    if SCENARIOS[name].clocks is not None and clock_library() is None:
        pytest.skip("libfaketime has a wheel for Linux on x86-64 only")
    account = theatre.run(SCENARIOS[name], seconds=SECONDS, seed=SEED, rate=RATE)
    say(line(account))
    assert account.faults == [], f"repeat it with: ./dev chaos {name} --seed {SEED}"
    assert account.struck > 0
    assert account.acknowledged > 0
    assert account.finished >= account.acknowledged


def stage_in(folder: Path) -> Stage:
    return Stage("sqlite", migrated(None, folder), folder, SECONDS, SEED)


def test_a_key_that_was_forgotten_is_lost_and_one_that_nobody_can_end_is_stuck(tmp_path: Path) -> None:
    stage, account = stage_in(tmp_path), Account("keys", SEED)
    for key in ("kept", "forgotten", "held", "free"):
        append(tmp_path / "asked", key)
    for key in ("kept", "forgotten"):
        append(tmp_path / "effects", key, 1)
        append(tmp_path / "acknowledged", key, 1, "c0")
    with Once(stage.url) as once:
        once.call("kept", lambda: {"fence": 1}, scope="chaos", policy=CALL)
        once.claim("held", scope="chaos", lease=30)
        judge_calls(stage, account, patience=1.0, wait=0.1)
    assert (account.acknowledged, account.finished, account.lost, account.stuck) == (2, 2, 1, 1)
    assert sorted(lines(tmp_path / "again")) == [["forgotten"], ["free"]]


def test_a_key_that_replays_another_outcome_is_lost(tmp_path: Path) -> None:
    stage, account = stage_in(tmp_path), Account("keys", SEED)
    append(tmp_path / "asked", "key")
    append(tmp_path / "effects", "key", 1)
    append(tmp_path / "acknowledged", "key", 1, "c0")
    with Once(stage.url) as once:
        once.call("key", lambda: {"fence": 2}, scope="chaos", policy=CALL)
    judge_calls(stage, account)
    assert (account.finished, account.lost) == (0, 1)


@pytest.mark.parametrize(
    ("thorough", "changes", "outdated"),
    [
        (False, {}, 0),
        (False, {"cost": 10_000}, 1),
        (False, {"artifacts": json.dumps([{"name": "fence.txt", "ref": "run/1/artifacts/fence.txt"}])}, 1),
        (True, {}, 1),
        (True, {"cost": 10_000}, 1),
    ],
)
def test_what_an_outdated_attempt_left_is_noticed(
    thorough: bool, changes: dict[str, Any], outdated: int, tmp_path: Path
) -> None:
    run = SimpleNamespace(**{"id": "run", "fence": 1, "cost": 0, "artifacts": None, **changes})
    assert count_outdated(stage_in(tmp_path), [run], {("run", "1")} if thorough else set()) == outdated


def test_a_fault_that_did_not_strike_fails_the_command_and_a_slow_recovery_is_only_marked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    account = Account("zombies", SEED, struck=1, after=0.9, notes=["worker-1 had to be killed"])
    monkeypatch.setattr(Theatre, "run", lambda *_, **__: account)
    assert main(["zombies"]) == 0
    assert "below 98%; worker-1 had to be killed" in capsys.readouterr().out
    account.struck = 0
    assert main(["zombies"]) == 1
    assert "zombies: the fault did not strike" in capsys.readouterr().out


@pytest.mark.skipif(clock_library() is None, reason="libfaketime has a wheel for Linux on x86-64 only")
def test_the_clock_of_a_host_is_ahead_or_behind(tmp_path: Path) -> None:
    program = "import time; print(time.time(), time.monotonic())"
    for seconds in (3600.0, -3600.0):
        environment = {**os.environ, **HostClock(tmp_path, "host", seconds).environment()}
        host = subprocess.run([sys.executable, "-I", "-S", "-c", program], env=environment, stdout=PIPE, check=True)
        seen, steady = (float(each) for each in host.stdout.split())
        assert seen - time.time() == pytest.approx(seconds, abs=300)
        assert steady == pytest.approx(time.monotonic(), abs=300)


def test_the_command_lists_its_scenarios_and_refuses_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert "postgres-restart" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["earthquake"])
    assert "there is no scenario 'earthquake'" in capsys.readouterr().err
