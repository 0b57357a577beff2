"""The command in a terminal and in a pipe: real processes, real signals."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from support.cli import ID, CliServer, cli_server
from support.service import PATIENCE


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CliServer]:
    folder = tmp_path_factory.mktemp("terminal")
    with cli_server(f"sqlite:///{folder / 'semel.db'}", folder) as server:
        yield server


@pytest.fixture
def server(place: CliServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[CliServer]:
    monkeypatch.setenv("SEMEL_SERVER", place.service.address)
    place.gate.clear()
    yield place
    place.gate.set()


INTERRUPTED = 130
STYLE = re.compile(r"\x1b\[[\d;]*m")
COMMAND = [sys.executable, "-m", "semel.cli"]


def in_terminal(*arguments: str, columns: int = 70) -> tuple[subprocess.Popen[bytes], int]:
    """The command with a terminal of its own."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "LINES": "40", "TERM": "xterm"}
    process = subprocess.Popen([*COMMAND, *arguments], stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    return process, ours


def read_until(terminal: int, wanted: str) -> str:
    """What it shows, until it shows that; or until it ends."""
    shown = b""
    deadline = time.monotonic() + PATIENCE
    while wanted.encode() not in shown:
        assert time.monotonic() < deadline, shown
        if not select.select([terminal], [], [], 0.5)[0]:
            continue
        try:
            shown += os.read(terminal, 65536)
        except OSError:  # nobody has the other end any more
            break
    return shown.decode()


def test_in_a_terminal_there_is_a_bar_and_ctrl_c_ends_the_wait_but_not_the_run(server: CliServer) -> None:
    process, terminal = in_terminal("submit", "hold", "--wait", columns=200)
    try:
        shown = read_until(terminal, "25%  holding")
        assert "RUNNING" in shown
        assert "━" in shown
        process.send_signal(signal.SIGINT)
        shown += read_until(terminal, ", cancel)")
        assert process.wait(PATIENCE) == INTERRUPTED
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
    found = ID.search(shown)
    assert found is not None
    assert f"semel: interrupted; the run goes on: semel wait {found[0]} (or show, logs, result, cancel)" in shown
    assert len(ID.findall(shown)) == 2  # printed for use, and in the remark
    assert "Traceback" not in shown
    assert server.app.get(found[0]).status == "RUNNING"
    assert not server.app.get(found[0]).cancel_requested


def test_in_a_terminal_a_table_fits(server: CliServer) -> None:
    server.submit("add", {"a": 1, "b": "x" * 300}, queue="narrow")
    process, terminal = in_terminal("runs", "--queue", "narrow", columns=70)
    try:
        shown = read_until(terminal, "\x00 never")
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
    assert "\x1b[1mRUN" in shown
    lines = STYLE.sub("", shown).splitlines()
    assert len(lines) == 2
    assert max(map(len, lines)) <= 70
    assert "…" in lines[1]


def test_watch_shows_again_until_it_is_interrupted(server: CliServer) -> None:
    server.submit("add", {"a": 1}, queue="watched")
    process = subprocess.Popen(
        [*COMMAND, "runs", "--queue", "watched", "--watch", "0.1", "--json"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert len(json.loads(process.stdout.readline())["runs"]) == 1
        server.submit("add", {"a": 2}, queue="watched")
        deadline = time.monotonic() + PATIENCE
        while len(json.loads(process.stdout.readline())["runs"]) < 2:
            assert time.monotonic() < deadline
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == INTERRUPTED
    finally:
        process.kill()
        process.communicate()


def test_a_wait_that_is_interrupted_prints_the_run_for_programs(server: CliServer) -> None:
    command = [*COMMAND, "submit", "hold", "--wait", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        while "RUNNING" not in (line := process.stderr.readline()):
            assert line, "it ended"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == INTERRUPTED
    run = json.loads(out)
    assert run["model"] == "hold"
    assert err.count(run["run_id"]) == 1
    assert server.app.get(run["run_id"]).status == "RUNNING"


def test_to_follow_a_log_ends_with_ctrl_c(server: CliServer) -> None:
    run_id = server.submit("hold", {"why": "to be followed"})
    process = subprocess.Popen(
        [*COMMAND, "logs", run_id, "--follow"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert "to be followed" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, err) == (INTERRUPTED, "semel: interrupted; the run goes on\n")


def test_a_reader_who_has_had_enough_is_no_traceback(server: CliServer) -> None:
    for number in range(50):
        server.submit("add", {"a": number, "b": "x" * 10_000}, queue="long")
    process = subprocess.Popen(
        [*COMMAND, "runs", "--queue", "long", "--limit", "50", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    with process:
        assert process.stderr.read() == b""
    assert process.returncode == 1
