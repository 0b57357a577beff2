"""A submission with every kind of value that a payload may hold, the same in every process."""

from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

from semel import IdempotentProcessor


class Line(Enum):
    PROPERTY = "property"
    CYBER = "cyber"


@dataclass
class Broker:
    name: str
    licence: int


DOCUMENTED: dict[str, Any] = {
    "premium": Decimal("1200.50"),
    "received": datetime(2025, 11, 30, 12, 0, tzinfo=UTC),
    "company_id": UUID("12345678-1234-5678-1234-567812345678"),
}
"""The three kinds that the document names."""

EXTENDED: dict[str, Any] = {
    "inception": date(2026, 1, 1),
    "attachment": b"\x00\xff",
    "perils": {"fire", "flood", "theft", "storm", "hail", "quake"},
    "lines": frozenset({"a", "b", "c", "d"}),
    "broker": Broker("Acme", 7),
    "line": Line.CYBER,
}
"""The kinds beyond them."""


def key_of(payload: Any) -> str:
    """The key under which a processor files this payload."""
    return IdempotentProcessor(str).key_of(payload)
