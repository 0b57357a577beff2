"""Tests that run in several processes: each once, wherever it runs, and none is lost with its process."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = """
from pathlib import Path
from support.parallel import Parallel

def pytest_configure(config):
    config.pluginmanager.register(Parallel(3, set(), {Path(__file__).with_name("test_waits.py")}))
"""
USUAL = """
import os, pathlib, pytest

@pytest.fixture(scope="module")
def shared():
    yield 7
    note("taken down")

def note(what):
    with pathlib.Path("notes").open("a") as file:
        print(what, os.getpid(), file=file)

@pytest.mark.parametrize("number", range(200))
def test_usual(shared, number):
    note(f"usual-{number}")

def test_fails(capfd):
    note("fails")
    print("this was printed")
    assert 1 == 2

def test_skipped():
    pytest.skip("not here")
"""


def run(folder: Path, source: str, *options: str) -> tuple[int, str]:
    """Run a file of tests in three processes; returns the exit status and what was printed."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(source)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:hypothesispytest",
        "-q",
        *options,
        ".",
    ]
    support = str(Path(__file__).parents[1])
    done = subprocess.run(
        command, cwd=folder, env={"PYTHONPATH": support}, capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_each_test_runs_once_and_every_process_takes_its_fixtures_down(tmp_path: Path) -> None:
    status, printed = run(tmp_path, USUAL)
    assert status == 1
    assert "1 failed, 200 passed, 1 skipped" in printed
    assert "this was printed" in printed
    assert "assert 1 == 2" in printed
    notes = [line.split() for line in (tmp_path / "notes").read_text().splitlines()]
    ran = [line[0] for line in notes if line[0] != "taken"]
    assert sorted(ran) == sorted([*(f"usual-{number}" for number in range(200)), "fails"])
    down = [line[-1] for line in notes if line[0] == "taken"]
    assert len(down) == len(set(down)) == len({line[-1] for line in notes if line[0].startswith("usual")}) > 1


def test_a_process_that_dies_fails_its_test_and_others_run_what_it_left(tmp_path: Path) -> None:
    dying = "\n\ndef test_that_dies():\n    os._exit(0)\n"
    status, printed = run(tmp_path, USUAL.replace("\ndef test_fails", dying + "\ndef test_fails"))
    assert status == 1
    assert "2 failed, 200 passed, 1 skipped" in printed
    assert "the process that ran this test died" in printed


def test_no_further_test_begins_after_the_first_failure_if_asked(tmp_path: Path) -> None:
    source = "import time\n\ndef test_first():\n    assert 0\n"
    source += "".join(f"\ndef test_{number}():\n    time.sleep(0.05)\n" for number in range(400))
    status, printed = run(tmp_path, source, "-x")
    assert status == 1
    assert "stopping after 1 failures" in printed
    passed = re.search(r"(\d+) passed", printed)
    assert passed is None or int(passed[1]) < 200


@pytest.mark.parametrize("broken", ["import nothing_of_this_name", "def test_a(nobody): ..."])
def test_an_error_outside_of_a_test_is_told(tmp_path: Path, broken: str) -> None:
    status, printed = run(tmp_path, broken)
    assert status in {1, 2}
    assert "nothing_of_this_name" in printed or "fixture 'nobody' not found" in printed


def test_one_process_begins_with_the_tests_that_wait_beside_the_others(tmp_path: Path) -> None:
    """Those that compute begin here, too, but none of them ends before one that waits has begun."""
    (tmp_path / "test_waits.py").write_text("import pathlib\n\ndef test_waits():\n    pathlib.Path('begun').touch()\n")
    computing = "import pathlib, pytest, time\n\n@pytest.mark.parametrize('number', range(300))\ndef test_it(number):\n"
    computing += "    while not pathlib.Path('begun').exists():\n        time.sleep(0.01)\n"
    status, printed = run(tmp_path, computing)
    assert status == 0, printed
    assert "301 passed" in printed
