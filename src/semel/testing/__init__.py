"""The conformance kit: the store contract in executable form, with a fake clock and injected faults."""

from semel.testing.clock import FakeClock

__all__ = ["FakeClock"]
