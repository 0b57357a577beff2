"""The suites of pytest tests that the author of a store runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import pytest

from semel.once.store import Clock, Store
from semel.testing.harness import Opener, World
from semel.testing.rules.claims import Claims
from semel.testing.rules.faults import Faults
from semel.testing.rules.fences import Fences
from semel.testing.rules.fingerprints import Fingerprints
from semel.testing.rules.lifecycle import Lifecycle
from semel.testing.rules.multiprocess import Multiprocess
from semel.testing.rules.names import Names
from semel.testing.rules.outcomes import Outcomes
from semel.testing.rules.ownership import Ownership
from semel.testing.rules.races import Races
from semel.testing.rules.removal import Removal
from semel.testing.rules.times import Times
from semel.testing.rules.upkeep import Upkeep


class StoreSuite(
    Claims,
    Fingerprints,
    Fences,
    Ownership,
    Times,
    Outcomes,
    Removal,
    Names,
    Upkeep,
    Races,
    Lifecycle,
    Faults,
):
    """The rules of every store. Derive a class named ``Test…`` from it that opens your store::

        class TestMyStore(StoreSuite):
            def open(self, clock):
                return MyStore(clock)

    Each rule opens an empty store and closes it. If it needs a file, a server or a clean database, write a fixture in
    your class: ``@pytest.fixture(autouse=True)``.
    """

    is_async: ClassVar[bool] = False
    """True if the store's verbs must be awaited in an event loop; the coroutines of a blocking store never suspend."""

    def open(self, clock: Clock | None) -> Store:
        """Your store, empty at the start of each rule, with this clock; None is the store's own time."""
        raise NotImplementedError(f"{type(self).__name__} must say how to open its store: def open(self, clock)")

    @pytest.fixture
    def world(self) -> Iterator[World]:
        """The argument of every rule: your store, and what else the rule needs."""
        with self.new_world() as world:
            yield world

    def new_world(self) -> World:
        """The argument to call one rule without pytest: ``suite.test_…(world)``."""
        return World(lambda *, clock: self.open(clock), is_async=self.is_async)


class SharedStoreSuite(StoreSuite, Multiprocess):
    """The rules of a store that several processes share::

    class TestMyStore(SharedStoreSuite):
        def opener(self):
            return partial(MyStore, "mystore://localhost")   # called with clock=…
    """

    server_clock: ClassVar[bool] = False
    """True if the store uses the time of a server, so that clients with different clocks agree about leases."""

    def opener(self) -> Opener:
        """A function that opens this store in any process, with ``clock=`` a clock or None.

        It is sent to other processes by pickle, so it must be a class or function of a module that they can import,
        or a ``functools.partial`` of one.
        """
        raise NotImplementedError(f"{type(self).__name__} must say how any process opens its store: def opener(self)")

    def nowhere(self) -> Opener:
        """The same for a place without a store: a closed port, a directory that does not exist."""
        raise NotImplementedError(f"{type(self).__name__} must name a place without a store: def nowhere(self)")

    def open(self, clock: Clock | None) -> Store:
        return self.opener()(clock=clock)
