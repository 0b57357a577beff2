"""Counts the points that are tried; conftest.py of all tests prints how many they were."""

import sys
from collections.abc import Callable, Iterator

import pytest

from crash import key_operations, rows
from crash.points import Report, Tried


@pytest.fixture(autouse=True)
def _disconnected() -> Iterator[None]:
    yield
    key_operations.disconnect()
    rows.disconnect()


@pytest.fixture
def report(record_property: Callable[[str, object], None]) -> Report:
    """Notes what was tried: pytest shows it with ``-s``, or if the test fails, and the total at its end."""

    def note(tried: Tried) -> None:
        sys.stdout.write(f"{tried}\n")
        record_property("crash points", tried.points.total())
        assert tried.points.total() >= 3, "the operation has at least one statement"
        assert tried.ends["killed"] >= 2

    return note
