"""What Replicate responds: a prediction, a page of predictions, an error."""

from __future__ import annotations

import re
import time
from datetime import datetime
from typing import Any

from msgspec import Struct

ENDED = frozenset({"succeeded", "failed", "canceled", "aborted"})
"""Final statuses."""


class Unavailable(Exception):
    """No useful response came. ``perhaps_done``: the call may have been executed; ``after``: seconds before a retry."""

    def __init__(self, reason: str, *, perhaps_done: bool, after: float | None = None) -> None:
        super().__init__(reason)
        self.perhaps_done = perhaps_done
        self.after = after


class ReplicateRefusal(Exception):
    """Replicate refused the call, and nothing was done."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Prediction(Struct, frozen=True, kw_only=True):
    """A prediction. ``webhook`` is not in every response."""

    id: str
    status: str = "starting"
    model: str | None = None
    version: str | None = None
    input: Any = None
    output: Any = None
    error: Any = None
    logs: str | None = None
    metrics: dict[str, Any] | None = None
    source: str | None = None
    webhook: str | None = None
    created_at: str | None = None
    data_removed: bool = False

    @property
    def ended(self) -> bool:
        """Whether its status is final."""
        return self.status in ENDED

    @property
    def created(self) -> float | None:
        """When it was created, in seconds since 1970 on Replicate's clock."""
        return None if self.created_at is None else _moment(self.created_at)


class PageOfPredictions(Struct, frozen=True, kw_only=True):
    """A page of predictions, newest first. ``now`` is Replicate's time, if the response has a date."""

    results: list[Prediction]
    cursor: str | None
    now: float | None


def _moment(text: str) -> float | None:
    """Seconds since 1970; Replicate has up to nine digits after the point."""
    try:
        moment = datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", text))
    except ValueError:
        return None
    return moment.timestamp() if moment.tzinfo is not None else None


def iso(seconds: float) -> str:
    """A time in ISO 8601."""
    whole, part = divmod(round(seconds * 1000), 1000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole)) + f".{part:03d}Z"
