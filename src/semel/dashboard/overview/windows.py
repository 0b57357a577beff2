"""The times that the overview looks back over, each cut into equal steps."""

from __future__ import annotations

from msgspec import Struct

from semel.runs.types import MICRO


class Window(Struct, frozen=True):
    """So many steps of so many seconds, up to now."""

    name: str
    label: str
    last: str
    """As in: in the last hour."""
    step: int
    steps: int
    every: float
    """Seconds between two counts of its runs: of a long step there are many, and a few more are not seen."""

    @property
    def seconds(self) -> int:
        """From its beginning to now."""
        return self.step * self.steps

    def starts(self, now_us: int) -> list[int]:
        """When each step begins; the last one holds the present. They stand still until it is over."""
        size = self.step * MICRO
        last = now_us // size * size
        return [last - (self.steps - 1 - place) * size for place in range(self.steps)]


HOUR = Window("hour", "1 hour", "hour", 60, 60, 2.0)
DAY = Window("day", "24 hours", "24 hours", 3600, 24, 10.0)
WEEK = Window("week", "7 days", "7 days", 6 * 3600, 28, 30.0)
WINDOWS = {each.name: each for each in (HOUR, DAY, WEEK)}


def id_at(at_us: int) -> str:
    """The least id of a run that is submitted at that time: ids begin with the milliseconds."""
    digits = f"{min(max(0, at_us // 1000), 2**48 - 1):012x}"
    return f"{digits[:8]}-{digits[8:12]}-0000-0000-000000000000"
