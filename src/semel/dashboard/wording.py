"""Numbers, times and values as people read them; what templates write them with."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from semel.types import moment

DASH = "\u2013"
_UNITS = ("B", "KB", "MB", "GB", "TB")


def duration(seconds: float | None) -> str:
    """As 480 ms, 3.2 s, 4 m 10 s, 2 h 5 m, 3 d 4 h."""
    if seconds is None:
        return DASH
    if seconds < 0.9995:
        return f"{max(0.0, seconds) * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for size, unit, below, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= size:
            rest = whole % size // below
            return f"{whole // size} {unit} {rest} {smaller}" if rest else f"{whole // size} {unit}"
    raise AssertionError("unreachable")


def number(value: float | None) -> str:
    """With commas between thousands; of a fraction what matters."""
    if value is None:
        return DASH
    if isinstance(value, int) or float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:,.2f}"


def percent(part: float | None) -> str:
    """As 83 %."""
    return DASH if part is None else f"{part * 100:.0f} %"


def size(count: int | None) -> str:
    """Bytes, as 12.3 KB."""
    if count is None:
        return DASH
    amount, unit = float(count), 0
    while amount >= 1000 and unit < len(_UNITS) - 1:
        amount, unit = amount / 1000, unit + 1
    return f"{amount:.0f} B" if unit == 0 else f"{amount:.1f} {_UNITS[unit]}"


def clock(when: datetime | int) -> datetime:
    """A time of the database (microseconds), or one that is a time already, in UTC."""
    return moment(when) if isinstance(when, int) else when.astimezone(UTC)


def iso(when: datetime | int) -> str:
    """For machines: 2026-01-31T12:00:00.000000Z."""
    return clock(when).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def plain_time(when: datetime | int) -> str:
    """For people: 2026-01-31 12:00:00, in UTC."""
    return clock(when).strftime("%Y-%m-%d %H:%M:%S")


def pretty(value: Any) -> str:
    """A value as JSON that can be read; text that is JSON already is laid out anew."""
    if isinstance(value, str | bytes):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    try:
        return json.dumps(value, indent=2, ensure_ascii=False, default=str)
    except RecursionError:
        return str(value)


def short(text: str, most: int = 60) -> str:
    """The beginning of a text, in one line."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


def brief(run_id: str) -> str:
    """An id as short as people can tell it from others: those of one moment begin alike."""
    return run_id[-12:]


FILTERS: Mapping[str, Callable[..., str]] = {
    "duration": duration,
    "number": number,
    "percent": percent,
    "size": size,
    "iso": iso,
    "plain_time": plain_time,
    "pretty": pretty,
    "short": short,
    "brief": brief,
}
