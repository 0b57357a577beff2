"""B24 and B25: every moment is tried, every history is judged. ``tests/crash`` and ``tests/history`` have the rest."""

from pathlib import Path

import pytest

from conformance.broken import BROKEN, Broken
from crash.key_operations import RETAKE, GuardedCall
from crash.key_operations import kept_open as keys_kept_open
from crash.points import try_every_point
from crash.run_operations import Finish
from crash.run_operations import kept_open as runs_kept_open
from crash.wire import FAULTS
from history.schedules import KeySchedule
from history.test_broken import STORES_TO_CATCH, judged
from semel.once.stores.memory import MemoryStore
from support.databases import SHARED_KINDS, StoreUrls, TestDatabase


@pytest.mark.parametrize("kind", SHARED_KINDS)
def test_b24_a_guarded_call_outlives_a_death_and_a_lost_reply_at_every_statement(
    kind: str, urls: StoreUrls, tmp_path: Path
) -> None:
    with keys_kept_open(urls[kind]):
        tried = try_every_point(GuardedCall(RETAKE), kind, urls[kind], tmp_path, each=True)
    assert tried.points.keys() == set(FAULTS)


def test_b24_a_run_outlives_a_death_and_a_lost_reply_at_every_statement_of_its_end(
    database: TestDatabase, tmp_path: Path
) -> None:
    with runs_kept_open(database.kind, database.url):
        tried = try_every_point(Finish("succeeded", "SUCCEEDED"), database.kind, database.url, tmp_path, each=True)
    assert tried.points.keys() == set(FAULTS)


def test_b25_a_checker_that_knows_nothing_of_semel_catches_each_of_the_broken_variants(tmp_path: Path) -> None:
    stores: list[type[Broken]] = [each for each in BROKEN if each.__name__ in STORES_TO_CATCH]
    assert len(stores) >= 15
    for store in stores:
        (tmp_path / store.__name__).mkdir()
        assert any(judged(KeySchedule(store, tmp_path / store.__name__, seed, 15).history() for seed in (1, 2, 3))), (
            store
        )
    assert judged(KeySchedule(MemoryStore, tmp_path, seed).history() for seed in (1, 2)) == ["", ""]
