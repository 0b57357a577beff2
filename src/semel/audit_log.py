"""The chains of the log of what people did: the bytes of a row, their digest, and how whole logs are checked.

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
"""The ``previous`` of a tenant's first row."""


class AuditCheck(NamedTuple):
    """What :func:`verify_log` found. ``problem`` names the first place that is wrong; None if every chain holds."""

    rows: int
    """The rows that are as they were written, up to the first problem."""
    heads: dict[str, str]
    """The digest of the last of these rows, by tenant. Keep them elsewhere: with them, a log that was cut off is found.
    """
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


def verify_log(rows: Iterable[Mapping[str, Any]], heads: Iterable[str] = ()) -> AuditCheck:
    """Check whole logs, the rows of each tenant oldest first. ``heads`` are digests that were kept: the rows that had
    them must still be there.
    """
    count, missing = 0, set(heads)
    ends: dict[str, tuple[int, str]] = {}
    for row in rows:
        seq, previous = ends.get(row["tenant"], (0, START))
        if problem := _problem(row, seq + 1, previous):
            return AuditCheck(count, _heads(ends), problem)
        count += 1
        ends[row["tenant"]] = (row["seq"], row["digest"])
        missing.discard(row["digest"])
    problem = (
        f"no row has the kept head {min(missing)}: rows were removed from an end, or rewritten" if missing else None
    )
    return AuditCheck(count, _heads(ends), problem)


def _heads(ends: Mapping[str, tuple[int, str]]) -> dict[str, str]:
    return {tenant: digest for tenant, (_, digest) in ends.items()}


def _problem(row: Mapping[str, Any], seq: int, previous: str) -> str | None:
    """Why this row cannot be the next one; None if it can."""
    place = f"row {row['seq']}" + (f" of tenant {row['tenant']}" if row["tenant"] else "")
    if row["seq"] != seq:
        return f"{place} comes where row {seq} belongs: a row is missing, was added or moved"
    if row["previous"] != previous:
        return f"{place} does not follow the row before it: one of the two was replaced"
    if row["digest"] != digest_of(row):
        return f"{place} was changed: its digest is not that of its fields"
    return None
