"""A process dies before and after every statement of what somebody does, or loses its reply: the audit log agrees."""

from pathlib import Path

import pytest

from crash.audit_operations import OPERATIONS
from crash.points import Report, try_every_point
from crash.run_operations import kept_open
from support.databases import TestDatabase


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_change_and_its_row_of_the_audit_log_are_both_there_or_neither(
    name: str, database: TestDatabase, tmp_path: Path, report: Report
) -> None:
    with kept_open(database.kind, database.url):
        report(try_every_point(OPERATIONS[name], database.kind, database.url, tmp_path))
