"""A clock that stands still until a test moves it."""

from __future__ import annotations


class FakeClock:
    """Pass it as ``clock=`` to ``Once``, ``AsyncOnce`` or a store: it replaces the store's time."""

    def __init__(self, start: float = 1_700_000_000.0) -> None:
        self.us = round(start * 1e6)

    def __call__(self) -> int:
        """Microseconds since 1970."""
        return self.us

    def advance(self, seconds: float) -> None:
        """Move the clock; a negative number moves it back."""
        self.us += round(seconds * 1e6)
