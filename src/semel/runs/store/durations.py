"""How long runs took, in buckets of one significant digit: 0 ms, 1 ms … 9 ms, 10 ms, 20 ms … 90 ms, 100 ms and so on.

A bucket is written as one character, so that a batch of runs that ended is counted with one short text. The sweeper
adds these up for each hour (``schema.run_hours``), from which percentiles of any time are computed with few rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from string import ascii_letters, digits

CHARACTERS = (ascii_letters + digits + "!#&()*+,-./;<=>@[]^_|~")[:82]
"""Of each bucket: plain in SQL, and in PostgreSQL one byte. The last one is of all runs of ten days and longer."""
LONGEST_MS = 10**9 - 1


def in_sql(microseconds: str) -> str:
    """The character of a duration, which is an expression of whole microseconds; NULL if the clock was put back."""
    ms = f"({microseconds}) / 1000"
    text = f"CAST({ms} AS text)"
    place = f"1 + 9 * (length({text}) - 1) + CAST(substr({text}, 1, 1) AS integer)"
    return f"""CASE WHEN {microseconds} < 0 THEN NULL WHEN {ms} > {LONGEST_MS} THEN '{CHARACTERS[-1]}'
ELSE substr('{CHARACTERS}', {place}, 1) END"""


def bounds(bucket: int) -> tuple[float, float]:
    """The seconds from which and up to which a bucket counts."""
    if bucket == 0:
        return 0.0, 0.001
    power, digit = divmod(bucket - 1, 9)
    unit = 10**power / 1000
    return (digit + 1) * unit, (digit + 2) * unit


def percentile(counts: Mapping[int, int], part: float) -> float | None:
    """About that percentile, in seconds: values are taken to be spread evenly over their bucket. None without any."""
    total = sum(counts.values())
    if total <= 0:
        return None
    left = part * total
    for bucket in sorted(counts):
        if left <= counts[bucket]:
            low, high = bounds(bucket)
            return low + (high - low) * max(0.0, left) / max(1, counts[bucket])
        left -= counts[bucket]
    return bounds(max(counts))[1]
