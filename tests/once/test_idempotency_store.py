"""A store of results with two verbs: one call at a time makes a key's result, and everyone gets the first one."""

import asyncio
import threading
from typing import Any

import pytest

from semel.once.idempotency_store import IdempotencyStore, InMemoryIdempotencyStore, KeyLocks, StoredResults
from semel.types import ProcessingRecord


class Overtaken(InMemoryIdempotencyStore):
    """Another call stores a result after the first look at the key."""

    def __contains__(self, key: str) -> bool:
        found = super().__contains__(key)
        self.set_if_absent(key, "theirs")
        return found


class TwoVerbs(IdempotencyStore):
    """What a user writes: nothing but the two verbs."""

    def __init__(self) -> None:
        self.results: dict[str, Any] = {}

    def get(self, key: str) -> Any | None:
        return self.results.get(key)

    def set_if_absent(self, key: str, result: Any) -> bool:
        return self.results.setdefault(key, result) is result


def processed(store: IdempotencyStore, awaited: bool) -> ProcessingRecord:
    """What a call gets whose own work would make ``"mine"``."""
    results = StoredResults(store)

    async def make() -> str:
        return "mine"

    return asyncio.run(results.process_async("key", make)) if awaited else results.process("key", lambda: "mine")


BOTH_FORMS = pytest.mark.parametrize("awaited", [False, True], ids=["blocking", "async"])


@BOTH_FORMS
def test_a_result_that_is_stored_already_is_replayed(awaited: bool) -> None:
    store = TwoVerbs()
    assert [processed(store, awaited) for _ in range(2)] == [
        ProcessingRecord("mine", False, "key"),
        ProcessingRecord("mine", True, "key"),
    ]


@BOTH_FORMS
def test_a_result_that_was_stored_while_a_call_waited_for_its_turn_is_replayed(awaited: bool) -> None:
    assert processed(Overtaken(), awaited) == ProcessingRecord("theirs", True, "key")


@BOTH_FORMS
def test_a_result_that_another_process_stored_during_the_work_is_the_result(awaited: bool) -> None:
    class Late(TwoVerbs):
        def set_if_absent(self, key: str, result: Any) -> bool:
            self.results[key] = "theirs"
            return super().set_if_absent(key, result)

    assert processed(Late(), awaited) == ProcessingRecord("theirs", False, "key")


def test_all_who_want_a_key_share_its_lock_and_the_last_one_drops_it() -> None:
    locks = KeyLocks(threading.Lock)
    with locks.of("key") as first:
        with locks.of("key") as second, locks.of("key") as third, locks.of("another") as other:
            assert first is second is third
            assert first is not other
        with locks.of("key") as fourth:
            assert fourth is first
    assert locks._locks == {}
    with locks.of("key") as later:
        assert later is not first


def test_the_memory_store_counts_its_keys() -> None:
    store = InMemoryIdempotencyStore()
    assert (len(store), "key" in store, store.get("key")) == (0, False, None)
    assert [store.set_if_absent("key", value) for value in (None, 7)] == [True, False]
    assert (len(store), "key" in store, store.get("key")) == (1, True, None)
