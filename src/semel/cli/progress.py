"""A run while it is waited for: a bar on a terminal, plain lines elsewhere. All of it goes to the standard error."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING

from semel.cli import printing
from semel.redaction import printable

if TYPE_CHECKING:
    from semel.client.views import RemoteRun

_BAR = 30
_STEP = 0.1
"""The part of the way after which another line is due."""


class Progress:
    """Tells how far a run is, whenever it is called with it."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._told: tuple[str, int] | None = None
        self._drawn = False

    def __call__(self, run: RemoteRun) -> None:
        """The run has changed."""
        if self._terminal:
            self._draw(run)
            return
        told = (run.status, int((run.progress or 0.0) / _STEP + 1e-9))
        if told != self._told and not run.done:
            self._told = told
            printing.say(_line(run))

    def _draw(self, run: RemoteRun) -> None:
        done = round((run.progress or 0.0) * _BAR)
        bar = f"[{'#' * done}{'.' * (_BAR - done)}] "
        text = printable(bar + _line(run)).replace("\n", " ")[: shutil.get_terminal_size().columns - 1]
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
        self._drawn = True

    def end(self) -> None:
        """Leave the line that was drawn."""
        if self._drawn:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self._drawn = False


def _line(run: RemoteRun) -> str:
    parts: list[str] = [run.status]
    if run.status == "RUNNING" and run.progress is not None:
        parts.append(f"{run.progress:4.0%}")
    if run.status == "RUNNING" and run.attempts > 1:
        parts.append(f"attempt {run.attempts} of {run.max_attempts}")
    if run.progress_note:
        parts.append(run.progress_note)
    return "  ".join(parts)
