"""The table that a benchmark prints: ratios, their required values, and whether they are met."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median


class Row:
    """One line of the table: the ratios of all rounds, and the required ratio, if any."""

    def __init__(
        self, what: str, ratios: list[float], required: float | None, *, at_most: bool = False, note: str = ""
    ) -> None:
        self.what, self.required, self.at_most, self.note = what, required, at_most, note
        self.ratio = median(ratios)
        self.spread = (min(ratios), max(ratios))

    @property
    def ok(self) -> bool:
        if self.required is None:
            return True
        return self.ratio <= self.required if self.at_most else self.ratio >= self.required

    def __str__(self) -> str:
        asked = "" if self.required is None else f"{'<=' if self.at_most else '>='} {self.required:g}"
        said = "" if self.required is None else "yes" if self.ok else "NO"
        low, high = self.spread
        return f"| {self.what} | {self.ratio:.2f} ({low:.2f} to {high:.2f}) | {asked} | {said} | {self.note} |"


def show(rows: Iterable[Row]) -> int:
    """Print each row as soon as it is measured; returns the exit code, 0 if all rows are as required."""
    print("| what | ratio (lowest to highest round) | required | ok | absolute |\n|---|---|---|---|---|", flush=True)
    found = []
    for row in rows:
        found.append(row)
        print(row, flush=True)
    asked = [row for row in found if row.required is not None]
    good = sum(row.ok for row in asked)
    print(f"\n{good} of {len(asked)} rows as required")
    return 0 if good == len(asked) else 1
