"""Runs the ``semel`` command: one process for each command line, without the time that it takes to import everything.

As a program it reads command lines as JSON from its standard input, carries out each in a process of its own that it
forks, and prints exit codes and output as JSON. The function is the one that the installed ``semel`` command calls.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple

PATIENCE = 240.0
"""Seconds for all command lines together."""
PRELOADED = ("semel:App", "semel:Once", "semel:Client", "semel.service:asgi", "alembic.command:upgrade")
"""What most commands need: a forked process has it at once."""
HERE = Path(__file__).parent


class Ended(NamedTuple):
    """A command that ended."""

    code: int
    out: str
    err: str


def environment(**more: str) -> dict[str, str]:
    """What a command is started with: nothing that changes its settings or its looks."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONDONTWRITEBYTECODE", "PROMETHEUS_MULTIPROC_DIR", "FORCE_COLOR")
        and not name.startswith(("SEMEL_", "REPLICATE_"))
    }
    looks = {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb", "LC_ALL": "C.UTF-8", "TZ": "UTC"}
    return {**kept, **looks, "PYTHONPATH": str(HERE), **more}


def semel() -> str:
    """The installed command."""
    return str(Path(sys.executable).with_name("semel"))


def run_each(lines: Sequence[Sequence[str]], folder: Path, *, preloaded: bool = False, **more: str) -> list[Ended]:
    """Carry out one command line after the other in the folder; with many of them it is worth to load things first."""
    done = subprocess.run(
        [sys.executable, __file__, *(["--preloaded"] if preloaded else [])],
        input=json.dumps([list(line) for line in lines]),
        cwd=folder,
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [Ended(*each) for each in json.loads(done.stdout)]


def _main(*, preloaded: bool) -> None:
    (entry,) = entry_points(group="console_scripts", name="semel")
    function = entry.load()
    lines = json.load(sys.stdin)
    for place in PRELOADED if preloaded else ():
        module, _, name = place.partition(":")
        getattr(importlib.import_module(module), name)
    sys.stdout.write(json.dumps([_forked(function, line) for line in lines]))


def _forked(function: Any, line: list[str]) -> tuple[int, str, str]:
    with tempfile.TemporaryFile("w+b") as out, tempfile.TemporaryFile("w+b") as err:
        pid = os.fork()
        if pid == 0:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            sys.argv = [semel(), *line]
            _finish(function)
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        return code, out.read().decode(), err.read().decode()


def _finish(function: Any) -> None:
    """Call it and end the process with its exit code; not through the interpreter's end, which takes its time."""
    try:
        code = function()
    except SystemExit as error:
        code = error.code
    except BaseException:  # noqa: BLE001 -- as the interpreter does it
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        sys.stderr.write(f"{code}\n")
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


if __name__ == "__main__":
    _main(preloaded="--preloaded" in sys.argv)
