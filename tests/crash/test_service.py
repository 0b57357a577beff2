"""The process of a server or a worker dies at one of its statements, or loses its reply; see docs/reliability.md."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from crash import http_operations
from crash.points import Operation, Report, try_every_point
from crash.run_operations import kept_open
from crash.service_operations import Deliver, DeliverInTurn, Predict, QuickCloud, SubmitJob, Upload, Work
from semel._concurrency.sync import run_sync
from semel.service.webhooks import subscriptions
from support.databases import SHARED_KINDS, StoreUrls, TestDatabase
from support.webhooks import receiving


@pytest.mark.parametrize("kind", SHARED_KINDS)
@pytest.mark.parametrize("protocol", http_operations.SITES)
def test_a_keyed_post_outlives_a_server_that_dies_at_any_statement(
    protocol: str, kind: str, urls: StoreUrls, tmp_path: Path, report: Report
) -> None:
    with http_operations.kept_open(protocol, urls[kind]):
        report(try_every_point(http_operations.KeyedPost(protocol), kind, urls[kind], tmp_path))


OPERATIONS: dict[str, Operation] = {"work": Work(), "submit a job": SubmitJob(), "upload": Upload()}


def crash(operation: Operation, database: TestDatabase, folder: Path, report: Report) -> None:
    with kept_open(database.kind, database.url):
        report(try_every_point(operation, database.kind, database.url, folder))


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_run_outlives_a_worker_or_a_server_that_dies_at_any_statement(
    name: str, database: TestDatabase, tmp_path: Path, report: Report
) -> None:
    crash(OPERATIONS[name], database, tmp_path, report)


def test_no_event_is_lost_if_the_server_that_delivers_it_dies_at_any_statement(
    database: TestDatabase, tmp_path: Path, report: Report
) -> None:
    with receiving() as receiver, subscribed(database, receiver.url):
        crash(Deliver(lambda: receiver.received), database, tmp_path, report)


def test_no_event_is_lost_if_the_process_dies_between_its_lease_and_the_note_that_it_was_sent(
    database: TestDatabase, tmp_path: Path, report: Report
) -> None:
    with subscribed(database, "http://127.0.0.1:9"):
        crash(DeliverInTurn(), database, tmp_path, report)


def test_one_prediction_is_made_if_the_server_that_asks_for_it_dies_at_any_statement(
    database: TestDatabase, tmp_path: Path, report: Report
) -> None:
    cloud = QuickCloud()
    try:
        crash(Predict(cloud.url, cloud.of), database, tmp_path, report)
    finally:
        cloud.close()


@contextmanager
def subscribed(database: TestDatabase, url: str) -> Iterator[None]:
    """Subscribe the URL to all events."""
    store = database.app.ledger(awaited=False)
    made = run_sync(store.write(subscriptions.create, "", url, [], store.statement_context))
    try:
        yield
    finally:
        run_sync(store.write(subscriptions.remove, made.id, "", store.statement_context))
        run_sync(store.close())
