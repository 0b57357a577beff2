"""An error as text for the run's row: one line of what happened, and the user's part of the traceback."""

from __future__ import annotations

import traceback
from pathlib import Path

from semel.errors import Fatal, Retry, RunCancelled, Snooze
from semel.runs.execution.log_capture import clean
from semel.runs.models.model import MAIN

__all__ = ["MAX_REASON_BYTES", "MAX_TRACEBACK_BYTES", "name_of", "names_in", "reason_of", "traceback_of"]

MAX_REASON_BYTES = 2000
MAX_TRACEBACK_BYTES = 16 * 1024
MAX_FRAMES = 64

_OURS = str(Path(__file__).parents[1])
_SENTENCES = (Retry, Fatal, Snooze, RunCancelled)
"""Errors whose message is shown without their type."""


def name_of(kind: type) -> str:
    """An error's type as another process knows it; the program's main file has another name there."""
    module = "__main__" if kind.__module__ == MAIN else kind.__module__
    return f"{module}:{kind.__qualname__}"


def reason_of(error: BaseException) -> str:
    """What happened, in one line."""
    try:
        message = " ".join(str(error).split())
    except Exception:  # noqa: BLE001 (the user's own __str__)
        message = "(its message cannot be shown)"
    if isinstance(error, MemoryError):
        message = message or "the model ran out of memory"
    name = type(error).__name__
    text = f"{name}: {message}" if message else name
    if message and type(error) in _SENTENCES:  # a sentence of the user's own
        text = message
    if isinstance(error, SystemExit):
        text = f"the model called sys.exit: {text}"
    return clean(text, MAX_REASON_BYTES)


def traceback_of(error: BaseException) -> str:
    """The user's frames, the innermost ones if there are too many."""
    try:
        shown = traceback.TracebackException.from_exception(error, limit=-MAX_FRAMES)
        frames = [frame for frame in shown.stack if not frame.filename.startswith(_OURS)]
        if not frames:
            return ""
        shown.stack = traceback.StackSummary.from_list(frames)
        text = "".join(shown.format())
    except Exception as trouble:  # noqa: BLE001 (out of memory, or the user's own __str__)
        return f"(no traceback: {type(trouble).__name__})"
    if len(text) > MAX_TRACEBACK_BYTES // 2:
        data = text.encode("utf-8", "backslashreplace")
        if len(data) > MAX_TRACEBACK_BYTES:
            text = "…" + data[-MAX_TRACEBACK_BYTES + 3 :].decode("utf-8", "ignore")
    return clean(text, MAX_TRACEBACK_BYTES)


def names_in(error: BaseException, names: frozenset[str]) -> bool:
    """Whether the error is of a type that has one of these names."""
    return bool(names) and any(name_of(kind) in names for kind in type(error).__mro__)
