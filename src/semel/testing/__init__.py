"""The conformance kit: the contract of a store as tests, with a fake clock and injected faults.

The author of a store runs the tests with pytest::

    from semel.testing import StoreSuite

    class TestMyStore(StoreSuite):
        def open(self, clock):
            return MyStore(clock)

:class:`FakeClock` and :class:`FaultyStore` are useful in any test; only the two suites need pytest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from semel.errors import MissingExtra
from semel.testing.clock import FakeClock
from semel.testing.faulty_store import FaultyStore

if TYPE_CHECKING:
    from semel.testing.harness import World
    from semel.testing.suite import SharedStoreSuite, StoreSuite

__all__ = ["FakeClock", "FaultyStore", "SharedStoreSuite", "StoreSuite", "World"]


def __getattr__(name: str) -> Any:
    """Import the suites on first use, so that the rest works without pytest."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import pytest
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"semel.testing.{name} runs in pytest, which is not installed: pip install pytest"
        ) from error
    pytest.register_assert_rewrite("semel.testing.rules", "semel.testing.harness")  # failures show their values
    from semel.testing import harness, suite

    loaded = {kind.__name__: kind for kind in (suite.SharedStoreSuite, suite.StoreSuite, harness.World)}
    globals().update(loaded)
    return loaded[name]
