"""What a store's author runs: every rule of the contract, as a class of pytest tests."""

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
from semel.testing.rules.forgetting import Forgetting
from semel.testing.rules.lifecycle import Lifecycle
from semel.testing.rules.names import Names
from semel.testing.rules.outcomes import Outcomes
from semel.testing.rules.ownership import Ownership
from semel.testing.rules.races import Races
from semel.testing.rules.shared import Shared
from semel.testing.rules.times import Times
from semel.testing.rules.upkeep import Upkeep


class StoreSuite(
    Claims,
    Fingerprints,
    Fences,
    Ownership,
    Times,
    Outcomes,
    Forgetting,
    Names,
    Upkeep,
    Races,
    Lifecycle,
    Faults,
):
    """The rules that every store keeps. Derive from it a class named ``Test…`` and say how to open your store::

        class TestMyStore(StoreSuite):
            def open(self, clock):
                return MyStore(clock)

    Each rule opens an empty store and closes it. For what must be there before (a file, a server, a clean database)
    write a fixture in your class: ``@pytest.fixture(autouse=True)``.
    """

    is_async: ClassVar[bool] = False
    """True when the store's verbs must be awaited in an event loop; a blocking store never suspends."""

    def open(self, clock: Clock | None) -> Store:
        """Your store, empty at the start of each rule, with this clock in place of its time (None: its own time)."""
        raise NotImplementedError(f"{type(self).__name__} must say how to open its store: def open(self, clock)")

    @pytest.fixture
    def world(self) -> Iterator[World]:
        """What the rules are given: your store and all that they need around it."""
        with self.new_world() as world:
            yield world

    def new_world(self) -> World:
        """A world to run one rule in, for those who run rules without pytest: ``suite.test_…(world)``."""
        return World(lambda *, clock: self.open(clock), is_async=self.is_async)


class SharedStoreSuite(StoreSuite, Shared):
    """The same for a store that several processes share, with the rules that only they can break::

    class TestMyStore(SharedStoreSuite):
        def opener(self):
            return partial(MyStore, "mystore://localhost")   # called with clock=…
    """

    server_clock: ClassVar[bool] = False
    """True when the store's own time is a server's, so that clients whose clocks differ agree about leases."""

    def opener(self) -> Opener:
        """A function that opens this same store wherever it is called, with ``clock=`` a clock or None.

        It is sent to other processes by pickle, so it comes from a module that they can import: a class or function
        there, or a ``functools.partial`` of one.
        """
        raise NotImplementedError(f"{type(self).__name__} must say how any process opens its store: def opener(self)")

    def nowhere(self) -> Opener:
        """The same, for a place where no store answers: a port that is closed, a directory that is not there."""
        raise NotImplementedError(f"{type(self).__name__} must name a place without a store: def nowhere(self)")

    def open(self, clock: Clock | None) -> Store:
        """See StoreSuite."""
        return self.opener()(clock=clock)
