"""A user's use beside its limits: one bar for each, with the words that say the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from semel.dashboard.wording import number
from semel.runs.types import Quota, Usage
from semel.service.api.quotas import QuotaBody, Standing, UsageView

WARN_AT = 0.8
"""The part of a limit from which on a bar warns, where a quota does not say another."""

COUNTS = (
    ("max_concurrent", "At once", "concurrent"),
    ("per_hour", "Last hour", "last_hour"),
    ("per_day", "Last 24 hours", "last_day"),
)
COSTS = (
    ("cost_daily", "Spent today", "daily"),
    ("cost_weekly", "Spent this week", "weekly"),
    ("cost_monthly", "Spent this month", "monthly"),
    ("cost_yearly", "Spent this year", "yearly"),
)


class QuotaBar(Struct, frozen=True, kw_only=True):
    """One limit and what is used of it."""

    name: str
    label: str
    used: str
    limit: str | None
    part: float | None
    """Of the limit; None where there is none."""
    state: Literal["", "near", "full", "over"]

    @property
    def text(self) -> str:
        """As 4 of 5."""
        return f"{self.used}, no limit" if self.limit is None else f"{self.used} of {self.limit}"


def bars(quota: Quota | QuotaBody | None, used: Usage | UsageView) -> list[QuotaBar]:
    """All of them: runs at once, in an hour, in a day, and what was spent in each period."""
    counts = [_bar(quota, name, label, getattr(used, field), number) for name, label, field in COUNTS]
    return counts + [_bar(quota, name, label, used.spent[period], money) for name, label, period in COSTS]


def money(amount: float) -> str:
    """As $1,250.00."""
    return f"${amount:,.2f}"


def _bar(quota: Quota | QuotaBody | None, name: str, label: str, used: float, written: object) -> QuotaBar:
    shown = written if callable(written) else str
    limit: float | None = None if quota is None else getattr(quota, name)
    if limit is None:
        return QuotaBar(name=name, label=label, used=shown(used), limit=None, part=None, state="")
    part = used / limit if limit else 1.0 + used
    warn_at = WARN_AT if quota is None else quota.warn_at
    return QuotaBar(
        name=name, label=label, used=shown(used), limit=shown(limit), part=part, state=_state(part, warn_at)
    )


def _state(part: float, warn_at: float) -> Literal["", "near", "full", "over"]:
    if part > 1:
        return "over"
    if part == 1:
        return "full"
    return "near" if part >= warn_at else ""


def tight(every: Sequence[QuotaBar]) -> list[QuotaBar]:
    """Those of which little or nothing is left."""
    return [bar for bar in every if bar.state]


def fullest(every: Sequence[QuotaBar]) -> float:
    """How near the user is to the nearest of their limits."""
    return max((bar.part for bar in every if bar.part is not None), default=0.0)


def bars_of(standing: Standing) -> list[QuotaBar]:
    """Of what the API tells of a user."""
    return bars(standing.quota, standing.usage)
