"""The chain of the log of what people did: the bytes of a row, their digest, and how the whole log is checked.

Only Python's own library is used, and no database: a row is a mapping with the names in ``FIELDS``, and ``digest``.
``docs/audit.md`` describes the bytes, with an example.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Any, NamedTuple

FORMAT = b"semel audit 1\n"
"""What the bytes of every row begin with."""
FIELDS = (
    "previous",
    "seq",
    "at_us",
    "tenant",
    "user",
    "role",
    "user_tenant",
    "token",
    "address",
    "entrance",
    "action",
    "target",
    "before",
    "after",
)
"""What the digest of a row is made of, in this order."""
START = "0" * 64
"""The ``previous`` of the first row."""


class AuditCheck(NamedTuple):
    """What :func:`verify_log` found. ``problem`` names the first place that is wrong; None if the chain holds."""

    rows: int
    """The rows that are as they were written, up to the first problem."""
    head: str
    """The digest of the last of these rows. Keep it elsewhere: with it, a log that was cut off is found."""
    problem: str | None = None


def canonical(row: Mapping[str, Any]) -> bytes:
    """The bytes of a row: the format, then each field with its length in bytes before it (``5:alice,``)."""
    return FORMAT + b"".join(_field(row[name]) for name in FIELDS)


def _field(value: str | int | None) -> bytes:
    """The text in UTF-8, a number in decimal digits; ``-,`` for none."""
    if value is None:
        return b"-,"
    data = str(value).encode("utf-8", "surrogatepass")
    return b"%d:%s," % (len(data), data)


def digest_of(row: Mapping[str, Any]) -> str:
    """The SHA-256 of a row's bytes, in hexadecimal digits."""
    return sha256(canonical(row)).hexdigest()


def verify_log(rows: Iterable[Mapping[str, Any]], head: str | None = None) -> AuditCheck:
    """Check the whole log, oldest row first. ``head`` is a digest that was kept: the log must still have that row."""
    count, last, met = 0, START, head in (None, START)
    for row in rows:
        if problem := _problem(row, count + 1, last):
            return AuditCheck(count, last, problem)
        count, last = count + 1, row["digest"]
        met = met or last == head
    if not met:
        where = f"ends with row {count}" if count else "is empty"
        return AuditCheck(count, last, f"the log {where} and has no row with the kept head {head}: rows are missing")
    return AuditCheck(count, last)


def _problem(row: Mapping[str, Any], seq: int, previous: str) -> str | None:
    """Why this row cannot be the next one; None if it can."""
    if row["seq"] > seq:
        return f"row {seq} is missing: row {row['seq']} comes in its place"
    if row["seq"] < seq:
        return f"row {row['seq']} is out of place: row {seq} was expected"
    if row["previous"] != previous:
        return f"row {seq} does not follow the row before it: one of the two was replaced"
    if row["digest"] != digest_of(row):
        return f"row {seq} was changed: its digest is not that of its fields"
    return None
