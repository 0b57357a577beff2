"""Runs the installed ``semel`` command, in a process of its own for each command line."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from support.warm_python import run

PATIENCE = 240.0
"""Seconds for one command line."""
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


def run_each(lines: Sequence[Sequence[str]], folder: Path, **more: str) -> list[Ended]:
    """Carry out one command line after the other in the folder."""
    given = environment(**more)
    ended = [run([sys.executable, semel(), *line], cwd=folder, env=given, timeout=PATIENCE) for line in lines]
    return [Ended(each.returncode, each.stdout, each.stderr) for each in ended]
