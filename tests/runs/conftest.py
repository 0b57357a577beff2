"""Fixtures of runs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.databases import TestDatabase
from support.runs_harness import RunsHarness


@pytest.fixture
def harness(database: TestDatabase, tmp_path: Path) -> Iterator[RunsHarness]:
    """Apps and workers over an empty database of each kind."""
    with RunsHarness(database.kind, database.url, tmp_path) as harness:
        yield harness
