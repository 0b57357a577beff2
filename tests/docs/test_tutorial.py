"""Every command of docs/tutorial.md is typed as it is written, in order, in an empty folder, into a real shell.

How the page is written, so that it is checked:

* An ``sh`` block is typed into one bash, which lasts for the whole page: the second terminal. What is installed there
  (``pip install``) is here already, so such a block is left out.
* One that begins with ``# in the first terminal`` is a server. It is started there, after Ctrl-C for the one before.
* A ``python`` block that begins with ``# name.py`` is that file.
* The shell's ``semel`` has done its imports (see ``support.warm_python``); the servers start from nothing.
* A ``text`` block is what the block before it prints, line by line, where ``…`` stands for anything, also for lines.
* The page's port is 8001. Here it is one that is free.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

import pytest

from support.servers import free_port
from support.warm_python import WarmPython

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"
SERVES = "# in the first terminal\n"
PATIENCE = 120.0
"""Seconds for one block, on a machine that has much else to do."""

SEMEL = Path(sys.executable).with_name("semel")
ASKING = """#!{python} -SE
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as asked:
    asked.connect({address!r})
    socket.send_fds(asked, [b"."], [0, 1, 2])
    asked.sendall(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode())
    asked.shutdown(socket.SHUT_WR)
    sys.exit(int(asked.recv(4)))
"""

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SPACE = re.compile(r"\s+")

T = TypeVar("T")


class Step(NamedTuple):
    """A block of the page, and what it is said to print."""

    language: str
    code: str
    prints: str
    line: int

    @property
    def place(self) -> str:
        return f"docs/tutorial.md, line {self.line}"


def steps_of(text: str) -> list[Step]:
    """What is done on the page, each with the ``text`` block that follows it."""
    steps: list[Step] = []
    for found in _BLOCK.finditer(text):
        language, code = found.groups()
        if language == "text":
            steps[-1] = steps[-1]._replace(prints=code)
        else:
            steps.append(Step(language, code, "", text.count("\n", 0, found.start(2)) + 1))
    return steps


def missing(promised: str, printed: str) -> str | None:
    """The first line of what was promised that was not printed, in this order; other lines may stand between."""
    lines = [_SPACE.sub(" ", line).strip() for line in printed.splitlines()]
    for promise in filter(None, promised.splitlines()):
        parts = (_SPACE.sub(r" ", part).strip(" ") for part in promise.split("…"))
        pattern = re.compile(".*".join(map(re.escape, parts)))
        while lines and not pattern.fullmatch(lines[0]):
            del lines[0]
        if not lines:
            return promise
        if promise.strip() != "…":
            del lines[0]
    return None


def until(condition: Callable[[], T], what: Callable[[], str]) -> T:
    """What the condition gives, once it gives something."""
    deadline = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < deadline, what()
        time.sleep(0.02)  # other programs, which only their output tells of
    return found


def running(session: int) -> list[int]:
    """The processes of a session that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _parent, _group, of = stat.read_text().rpartition(")")[2].split()[:4]
            if int(of) == session and state != "Z":
                found.append(int(stat.parent.name))
    return found


class Terminal:
    """A program in a session of its own, of which nothing is left in the end, and all that it has printed."""

    def __init__(self, words: list[str], folder: Path, name: str, environment: dict[str, str]) -> None:
        self._file = folder / f"{name}.out"
        with self._file.open("wb") as output:
            self.process = subprocess.Popen(
                words,
                cwd=folder / "empty",
                env=environment,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def printed(self) -> str:
        return self._file.read_text(errors="replace")

    def end(self) -> None:
        """Whatever still runs is killed."""
        for pid in running(self.process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait(PATIENCE)


class WarmSemel:
    """A command ``semel`` that asks this process to start the installed one, as its own standard streams and status."""

    def __init__(self, folder: Path) -> None:
        self.place = folder / "commands"
        self.place.mkdir()
        address = str(self.place / "asked")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen()
        (self.place / "semel").write_text(ASKING.format(python=sys.executable, address=address))
        (self.place / "semel").chmod(0o700)
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._thread.start()

    def _answer(self) -> None:
        while True:
            try:
                asked, _ = self._listener.accept()
            except OSError:
                return  # closed
            with asked:
                asked.sendall(str(self._start(asked).wait(PATIENCE)).encode())

    def _start(self, asked: socket.socket) -> WarmPython:
        _, streams, _, _ = socket.recv_fds(asked, 1, 3)
        with asked.makefile("rb") as order:
            words, folder, environment = json.load(order)
        stdin, stdout, stderr = streams
        try:
            command = [sys.executable, str(SEMEL), *words]
            return WarmPython(command, cwd=folder, env=environment, stdin=stdin, stdout=stdout, stderr=stderr)
        finally:
            for stream in streams:
                os.close(stream)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(PATIENCE)


class Shell(Terminal):
    """The second terminal."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._semel = WarmSemel(folder)
        path = f"{self._semel.place}{os.pathsep}{environment['PATH']}"
        super().__init__(["bash", "--noprofile", "--norc"], folder, "second", environment | {"PATH": path})
        self._blocks = 0

    def type(self, step: Step) -> str:
        """Type a block, and answer what it has printed when it is through."""
        self._blocks += 1
        before, end = len(self.printed), f"-- end of block {self._blocks} --\n"
        assert self.process.stdin is not None
        self.process.stdin.write(f"{{\n{step.code}}} </dev/null\nprintf '\\n%s' '{end}'\n".encode())
        self.process.stdin.flush()
        until(lambda: end in self.printed, lambda: f"{step.place} is not through: {self.printed[before:]}")
        return self.printed[before:].removesuffix(end)

    def end(self) -> None:
        super().end()
        self._semel.close()


class Server(Terminal):
    """The first terminal."""

    def __init__(self, step: Step, folder: Path, environment: dict[str, str]) -> None:
        super().__init__(["bash", "-c", f"exec {step.code.removeprefix(SERVES)}"], folder, "first", environment)
        until(self._has_begun, lambda: f"{step.place} does not begin: {self.printed}")

    def _has_begun(self) -> bool:
        assert self.process.poll() is None, self.printed
        return "(Ctrl-C ends it)" in self.printed and "worker started on default" in self.printed

    def interrupt(self) -> None:
        """Ctrl-C, which every process of a terminal gets."""
        os.killpg(self.process.pid, signal.SIGINT)
        assert self.process.wait(PATIENCE) == 0, self.printed
        until(lambda: not running(self.process.pid), lambda: f"it left processes behind: {self.printed}")


class Desk:
    """Both terminals, and the folder that they are in."""

    def __init__(self, folder: Path, port: int) -> None:
        (folder / "empty").mkdir()
        self._folder = folder
        self._environment = clean_environment(port) | {"PYTHONPYCACHEPREFIX": str(folder / "compiled")}
        self._shell = Shell(folder, self._environment)
        self._server: Server | None = None

    def do(self, step: Step) -> None:
        printed = self._carry_out(step)
        wanting = missing(step.prints, printed)
        log = f"\nThe server's log ends:\n{self._server.printed[-2000:]}" if self._server else ""
        assert wanting is None, f"{step.place}: promised {wanting!r}, but it printed:\n{printed}{log}"

    def _carry_out(self, step: Step) -> str:
        match step.language:
            case "python":
                found = re.match(r"# (\w+\.py)\n", step.code)
                assert found, f"{step.place}: which file is this?"
                (self._folder / "empty" / found[1]).write_text(step.code)
                return ""
            case "sh" if step.code.startswith(SERVES):
                self.interrupt()
                self._server = Server(step, self._folder, self._environment)
                return self._server.printed
            case "sh" if "pip install" in step.code:
                return ""
            case "sh":
                return self._shell.type(step)
            case other:
                pytest.fail(f"{step.place}: how should a block of {other!r} be checked?")

    def interrupt(self) -> None:
        if self._server is not None:
            self._server.interrupt()
            self._server.end()
            self._server = None

    def close(self) -> None:
        for terminal in (self._server, self._shell):
            if terminal is not None:
                terminal.end()


def clean_environment(port: int) -> dict[str, str]:
    """Nothing of ours but the commands, and the port."""
    ours = ("SEMEL_", "PROMETHEUS_", "PYTHON")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours) or name == "PYTHONPATH"}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    more = {"PATH": path, "SEMEL_PORT": str(port), "SEMEL_SERVER": f"http://127.0.0.1:{port}", "PYTHONUTF8": "1"}
    return {**kept, **more}


@contextmanager
def desk(folder: Path, port: int) -> Iterator[Desk]:
    opened = Desk(folder, port)
    try:
        yield opened
    finally:
        opened.close()


@pytest.mark.timeout(600)
def test_the_tutorial_can_be_followed_word_by_word(tmp_path: Path) -> None:
    port = free_port()
    steps = steps_of(PAGE.read_text().replace("8001", str(port)))
    with desk(tmp_path, port) as terminals:
        for step in steps:
            terminals.do(step)
        terminals.interrupt()
    left = sorted(path.name for path in (tmp_path / "empty").iterdir() if not path.name.startswith("semel.db-"))
    assert {"semel.db", "artifacts", "forecasts.py"} <= set(left)


def test_the_tutorial_shows_what_each_part_prints() -> None:
    """A block without its output would hide that a command has failed."""
    silent = [step for step in steps_of(PAGE.read_text()) if step.language == "sh" and not step.prints]
    assert [step.code.splitlines()[-1] for step in silent] == ["pip install ~/semel'[service]'", 'kill -9 "$PROCESS"']


@pytest.mark.parametrize(
    ("promised", "printed", "wanting"),
    [
        ("one\ntwo\n", "one\nbetween\ntwo\n", None),
        ("two\none\n", "one\ntwo\n", "one"),
        ("a … c\n", "a      b   c\n", None),
        ("a … d\n", "a b c\n", "a … d"),
        ("…\nlast\n", "first\nlast\n", None),
        ("…\n", "anything", None),
        ("x\nx\n", "x\n", "x"),
    ],
)
def test_a_promise_that_is_not_kept_is_found(promised: str, printed: str, wanting: str | None) -> None:
    assert missing(promised, printed) == wanting
