"""A process dies before and after every statement that it sends for a key, or loses its reply."""

import sqlite3
from pathlib import Path

import pytest

from crash.key_operations import (
    RETAKE,
    UNKNOWN,
    CheckAndMark,
    ClaimKey,
    Complete,
    FirstAsyncCall,
    FirstCall,
    GuardedCall,
    InTransaction,
    OpenEmpty,
    Release,
    Renew,
    Resolve,
    kept_open,
)
from crash.points import Operation, Report, try_every_point
from crash.statements import count_statements
from crash.wire import Fault
from semel import Once
from support.databases import DATABASES, SHARED_KINDS, StoreUrls

OPERATIONS: dict[str, Operation] = {
    "first guarded call": FirstCall(),
    "first async guarded call": FirstAsyncCall(),
    "guarded call": GuardedCall(RETAKE),
    "guarded call, unknown after a crash": GuardedCall(UNKNOWN),
    "claim": ClaimKey(),
    "complete": Complete(),
    "release": Release(),
    "renew": Renew(),
    "resolve as done": Resolve(done=True),
    "resolve as not done": Resolve(done=False),
    "check_and_mark": CheckAndMark(),
}


def crash(operation: Operation, kind: str, urls: StoreUrls, folder: Path, report: Report) -> None:
    with kept_open(urls[kind]):
        tried = try_every_point(operation, kind, urls[kind], folder)
    report(tried)


@pytest.mark.parametrize("kind", SHARED_KINDS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_key_outlives_a_process_that_dies_at_any_statement(
    name: str, kind: str, urls: StoreUrls, tmp_path: Path, report: Report
) -> None:
    crash(OPERATIONS[name], kind, urls, tmp_path, report)


@pytest.mark.parametrize("kind", DATABASES)
def test_a_completion_in_the_users_transaction_is_whole_or_nothing(
    kind: str, urls: StoreUrls, tmp_path: Path, report: Report
) -> None:
    crash(InTransaction(), kind, urls, tmp_path, report)


def test_a_file_whose_tables_are_being_made_can_be_opened_by_the_next(
    urls: StoreUrls, tmp_path: Path, report: Report
) -> None:
    crash(OpenEmpty(), "sqlite", urls, tmp_path, report)


@pytest.mark.parametrize("number", range(1, 7))
def test_a_connection_whose_set_up_fails_holds_no_lock(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each statement that opens a new file fails once, after it was executed; the next connection goes on."""
    for module in (sqlite3, sqlite3.dbapi2):
        monkeypatch.setattr(module, "connect", sqlite3.connect)  # put back after the test
    counter = count_statements(Fault("loses the reply of", number))
    counter.counts = True
    with Once(f"sqlite:///{tmp_path / 'new.db'}", retry_for=0) as once:
        assert once.call("key", lambda: 1).value == 1
    assert counter.happened
