"""Every scenario in its short form: about a second for each phase. `./dev chaos` plays them for longer."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from chaos.__main__ import line, main, say
from chaos.program import append, lines
from chaos.scenarios import SCENARIOS, Theatre
from chaos.stage import HostClock, Member, clock_library

SEED = 1


@pytest.fixture(scope="module")
def theatre(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Theatre]:
    with ExitStack() as stack:
        yield Theatre(tmp_path_factory.mktemp("chaos"), stack)


@pytest.mark.parametrize("name", SCENARIOS)
def test_nothing_is_lost_doubled_or_stuck(name: str, theatre: Theatre) -> None:
    if SCENARIOS[name].clocks is not None and clock_library() is None:
        pytest.skip("libfaketime has a wheel for Linux on x86-64 only")
    account = theatre.run(SCENARIOS[name], seconds=1.0, seed=SEED)
    say(line(account))
    assert account.faults == [], f"repeat it with: ./dev chaos {name} --seed {SEED}"
    assert account.acknowledged > 0
    assert account.finished >= account.acknowledged


def note_time(folder: Path) -> None:
    append(folder / "time", time.time(), time.monotonic())


@pytest.mark.skipif(clock_library() is None, reason="libfaketime has a wheel for Linux on x86-64 only")
def test_the_clock_of_a_host_is_ahead_or_behind(tmp_path: Path) -> None:
    for seconds in (3600.0, -3600.0):
        Member("host", note_time, tmp_path, clock=HostClock(tmp_path, "host", seconds)).process.join(60)
        seen, steady = (float(each) for each in lines(tmp_path / "time")[-1])
        assert seen - time.time() == pytest.approx(seconds, abs=60)
        assert steady == pytest.approx(time.monotonic(), abs=60)


def test_the_command_lists_its_scenarios_and_refuses_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert "postgres-restart" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["earthquake"])
    assert "there is no scenario 'earthquake'" in capsys.readouterr().err
