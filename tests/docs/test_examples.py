"""The examples do what they say, as real processes: run, looked at in a terminal, and interrupted."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RACE = (sys.executable, str(ROOT / "examples" / "race.py"))
SEMEL = (sys.executable, "-m", "semel.cli")
# Runs a command in a pseudo terminal of its own: what goes in here is typed there.
IN_TERMINAL = (
    sys.executable,
    "-c",
    "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))",
)
ENDLESS = ("--processes", "3", "--keys", "1000000")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the race keeps its files while it runs."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.setenv("PYTHONUTF8", "1")
    return place


def race(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*RACE, *options], capture_output=True, text=True, timeout=100, check=False)


def begin_race(*command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def read_until(running: subprocess.Popen[str], stream: str, words: str) -> str:
    pipe = getattr(running, stream)
    text = ""
    while words not in text:
        character = pipe.read(1)
        assert character, f"it ended without {words!r}: {text}"
        text += character
    return text


def nobody_is_left_of(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


def test_eight_processes_race_for_two_hundred_keys_on_sqlite_and_leave_nothing_behind(place: Path) -> None:
    finished = race("--json")
    assert finished.returncode == 0, finished.stderr
    summary = json.loads(finished.stdout)
    assert (summary["processes"], summary["keys"], summary["attempts"]) == (8, 200, 1600)
    assert summary["executed"] == 200
    assert summary["replayed"] + summary["waited"] == 1400
    assert summary["executed_twice"] == summary["never_executed"] == summary["wrong_outcome"] == []
    assert finished.stderr == ""
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("kind", ["redis", "postgres"])
def test_they_race_on_a_server_too(kind: str, request: pytest.FixtureRequest) -> None:
    url = request.getfixturevalue(f"{kind}_url")
    if kind == "postgres":
        subprocess.run([*SEMEL, "migrate", url], check=True, capture_output=True)
    for keys in (50, 5):  # those of an earlier race do not stand in the way
        finished = race("--json", "--processes", "4", "--keys", str(keys), "--store", url)
        assert finished.returncode == 0, finished.stderr
        summary = json.loads(finished.stdout)
        assert (summary["attempts"], summary["executed"]) == (4 * keys, keys)


def test_keys_that_are_executed_more_than_once_are_found() -> None:
    """Memory is not shared between processes, so each of them works on every key: the ledger shows it."""
    finished = race("--processes", "2", "--keys", "20", "--store", "memory://")
    assert finished.returncode == 1
    assert ["executed", "40"] in [line.split()[:2] for line in finished.stdout.splitlines()]
    assert "BAD: executed more than once: 20 keys, among them key-0" in finished.stdout


def test_without_a_terminal_it_writes_plain_lines_and_a_summary() -> None:
    finished = race("--processes", "3", "--keys", "20")
    assert finished.returncode == 0
    assert finished.stderr.splitlines()[0].startswith("3 processes race for 20 keys on sqlite:///")
    assert finished.stderr.splitlines()[-1] == "60 of 60 attempts"
    assert "\r" not in finished.stderr
    assert "good: each of the 20 keys was executed exactly once" in finished.stdout
    for name in ("keys", "attempts", "executed", "replayed", "waited", "time", "claims"):
        assert f"\n{name} " in f"\n{finished.stdout}"


def test_on_a_terminal_a_bar_grows_until_it_is_full() -> None:
    with begin_race(*IN_TERMINAL, *RACE, "--processes", "3", "--keys", "20") as running:
        seen, _ = running.communicate(timeout=100)
    assert running.returncode == 0
    bars = [line for line in seen.replace("\n", "\r").split("\r") if line.startswith(("█", "░"))]
    assert "░" in bars[0]
    assert bars[-1] == f"{'█' * 40} 60/60 "
    assert "good: each of the 20 keys was executed exactly once" in seen


def test_control_c_in_a_terminal_ends_it_without_a_traceback(place: Path) -> None:
    with begin_race(*IN_TERMINAL, *RACE, *ENDLESS) as running:
        read_until(running, "stdout", "9/3000000")
        seen, errors = running.communicate("\x03", timeout=100)
    assert running.returncode == 130
    assert "interrupted" in seen
    assert "Traceback" not in seen + errors
    assert list(place.iterdir()) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_everyone_ends_all_processes_and_removes_the_file(
    number: signal.Signals, code: int, place: Path
) -> None:
    with begin_race(*RACE, *ENDLESS) as running:
        read_until(running, "stderr", "of 3000000 attempts")
        os.killpg(running.pid, number)
        seen, errors = running.communicate(timeout=100)
    assert running.returncode == code
    assert "Traceback" not in seen + errors
    assert nobody_is_left_of(running.pid)
    assert list(place.iterdir()) == []


def test_processes_end_by_themselves_when_the_one_who_watches_is_killed() -> None:
    with begin_race(*RACE, *ENDLESS) as running:
        read_until(running, "stderr", "of 3000000 attempts")
        running.kill()
        running.communicate(timeout=100)  # returns when the last of them has closed its end of the pipes
    assert running.returncode == -signal.SIGKILL


def test_a_database_that_is_not_migrated_says_what_to_do(postgres_url: str) -> None:
    finished = race("--store", postgres_url)
    assert finished.returncode == 1
    assert "semel migrate" in finished.stderr
    assert "Traceback" not in finished.stderr


@pytest.mark.parametrize("options", [("--keys", "0"), ("--speed", "9")])
def test_a_mistake_in_its_use_is_told_by_exit_code_2(options: tuple[str, ...]) -> None:
    finished = race(*options)
    assert finished.returncode == 2
    assert finished.stderr.startswith("usage: ")


def test_help_names_every_option() -> None:
    finished = race("--help")
    assert finished.returncode == 0
    for option in ("--processes", "--keys", "--store", "--json"):
        assert option in finished.stdout
