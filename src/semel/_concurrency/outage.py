"""An outage in few log lines: one when it begins, one a minute while it lasts, and one when it is over."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

EVERY = 60.0
"""Seconds between two lines while it lasts."""
SETTLED = 1.0
"""Seconds without a failure before a success ends it: what fails and succeeds by turns is one outage."""


class Outage:
    """Whoever tries again and again reports here how it went, instead of logging every failure.

    ``what`` is unavailable, and ``meaning`` says what follows from that. An outage shorter than ``patience`` seconds
    is not logged, nor what is only a part of another one: while the outage ``within`` goes on, that is what is logged.
    """

    def __init__(
        self,
        log: logging.Logger,
        what: str,
        meaning: str,
        *,
        patience: float = 0.0,
        within: Outage | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log = log
        self._what = what
        self._meaning = meaning
        self._patience = patience
        self._within = within
        self._clock = clock
        self._began: float | None = None
        self._failed = 0.0
        self._logged: float | None = None

    @property
    def ongoing(self) -> bool:
        """Whether the last that was heard is a failure."""
        return self._began is not None

    def failed(self, error: object) -> None:
        """It failed once more."""
        now = self._failed = self._clock()
        if self._began is None:
            self._began = now
        lasted = now - self._began
        if lasted < self._patience or (self._logged is not None and now - self._logged < EVERY):
            return
        if self._within is not None and self._within.ongoing:
            return
        since = "is unavailable" if self._logged is None else f"has been unavailable for {lasted:.0f} s"
        self._logged = now
        self._log.warning("%s %s; %s: %s", self._what, since, self._meaning, error)

    def succeeded(self) -> None:
        """It worked."""
        if self._began is None:
            return
        now = self._clock()
        if now - self._failed < SETTLED:
            return
        began, self._began = self._began, None
        logged, self._logged = self._logged, None
        if logged is not None:
            self._log.warning("%s is available again after %.0f s", self._what, now - began)
