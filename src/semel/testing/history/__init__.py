"""Histories: record what processes do while faults happen, then let something judge it that knows nothing of semel.

Each process records its calls and answers, in a file of its own that survives its death::

    recorder = Recorder("history")
    once = Once(RecordedStore(my_store, recorder))

Afterwards the files are read, and every rule is checked, for keys, runs and quotas::

    assert check(read("history")) == []

:mod:`~semel.testing.history.keys`, :mod:`~semel.testing.history.runs` and :mod:`~semel.testing.history.quotas` say
which verbs are recorded, and which rules are checked. They import nothing of semel.
"""

from __future__ import annotations

from semel.testing.history.keys import check_keys
from semel.testing.history.operations import History, Operation, Violation, effect
from semel.testing.history.quotas import check_quotas
from semel.testing.history.recorder import HistoryError, PendingOperation, Recorder, read
from semel.testing.history.runs import check_runs
from semel.testing.history.wrappers import RecordedApp, RecordedJobStore, RecordedOnce, RecordedStore, attempt

__all__ = [
    "History",
    "HistoryError",
    "Operation",
    "PendingOperation",
    "RecordedApp",
    "RecordedJobStore",
    "RecordedOnce",
    "RecordedStore",
    "Recorder",
    "Violation",
    "attempt",
    "check",
    "effect",
    "read",
]


def check(history: History) -> list[Violation]:
    """Everything that is wrong in a history: nothing, if the list is empty."""
    return [*check_keys(history), *check_runs(history), *check_quotas(history)]
