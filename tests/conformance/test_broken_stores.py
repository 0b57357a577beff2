"""The kit is worth what it catches: each broken store fails the rules that name its fault, and sound ones fail none."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from conformance.broken import BROKEN, Broken, Sound
from conformance.broken_times import UsesTheClientsClock
from semel.once.store import Clock, Store
from semel.once.stores.memory import MemoryStore
from semel.testing import SharedStoreSuite, StoreSuite
from semel.testing.harness import Opener

RULES = sorted(name for name in dir(StoreSuite) if name.startswith("test_"))
ABOUT_THE_ENGINE = {
    "test_a_broken_store_is_not_asked_again",
    "test_a_store_that_is_away_grants_nothing",
    "test_other_keys_are_worked_on_at_the_same_time",
}
"""Rules of the kit that no small fault of a store alone can break."""
MISTAKES = (TypeError, AttributeError, NameError)
"""What a mistake in the broken store itself would raise; anything else is a rule that noticed."""


def keeps(suite: StoreSuite, rule: str) -> bool:
    """Run one rule of the suite."""
    try:
        with suite.new_world() as world:
            getattr(suite, rule)(world)
    except MISTAKES:
        raise
    except (Exception, pytest.fail.Exception):  # noqa: BLE001 -- a rule may notice by any error
        return False
    return True


def suite_of(make: Callable[[Clock | None], Store], *, is_async: bool) -> StoreSuite:
    class Suite(StoreSuite):
        def open(self, clock: Clock | None) -> Store:
            return make(clock)

    Suite.is_async = is_async
    return Suite()


def suite_of_broken(store: type[Broken]) -> StoreSuite:
    if store is not UsesTheClientsClock:
        return suite_of(store, is_async=store.is_async)

    class Suite(SharedStoreSuite):
        server_clock = True
        held = store()

        def opener(self) -> Opener:
            return lambda *, clock: self.held

    return Suite()


@pytest.mark.parametrize(("make", "is_async"), [(MemoryStore, False), (Sound, False), (Sound, True)])
def test_a_sound_store_keeps_every_rule(make: Callable[[Clock | None], Store], is_async: bool) -> None:
    suite = suite_of(make, is_async=is_async)
    assert [rule for rule in RULES if not keeps(suite, rule)] == []


@pytest.mark.parametrize("store", BROKEN, ids=lambda store: store.__name__)
def test_a_broken_store_is_caught(store: type[Broken]) -> None:
    assert [rule for rule in store.caught_by if keeps(suite_of_broken(store), rule)] == []


def test_every_rule_has_caught_a_store() -> None:
    """A rule that nothing can break would prove nothing."""
    named = {rule for store in BROKEN for rule in store.caught_by}
    assert set(RULES) - named == ABOUT_THE_ENGINE
    assert named - set(RULES) == {"test_the_stores_own_time_is_no_clients"}


@pytest.mark.parametrize("store", BROKEN, ids=lambda store: store.__name__)
def test_a_broken_store_works_at_first_sight(store: type[Broken]) -> None:
    """It is broken in one point: what anyone would try first works, so only the rules tell."""
    suite = suite_of_broken(store)
    with suite.new_world() as world:
        claim = world.granted()
        assert world.complete(claim, 7)
        assert world.claim().outcome.value == 7
